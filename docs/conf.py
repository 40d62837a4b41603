"""Configuration of the documentation: `nox -s docs` builds it."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

import lightning_recorder

project = "lightning_recorder"
author = "the lightning_recorder authors"
copyright = author  # noqa: A001 - the name that Sphinx reads
release = version = lightning_recorder.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["transformers"]  # which the site does not need otherwise, and which is large
maximum_signature_line_length = 90
add_module_names = False
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
viewcode_line_numbers = True

# Every reference to a name of this package must resolve. Names of other packages are text, so that the pages are built
# without a network.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!lightning_recorder\b).*")]

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "lightning_recorder"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_extra_path = ["llms.txt"]
html_theme_options = {"navigation_with_keys": True}

SUBPACKAGES = (
    "", "callbacks", "dumps", "graph", "insight", "plots", "recordings", "reductions", "sinks", "statistics",
    "structure", "taps", "tensors", "testing", "wrapped", "errors", "selection", "schedule",
)  # fmt: skip


def documented_names() -> dict[str, str]:
    """Return the full name of each public name; a name that the root exports is documented there."""
    found: dict[str, str] = {}
    for subpackage in SUBPACKAGES:
        module = ".".join(filter(None, ["lightning_recorder", subpackage]))
        for name in getattr(importlib.import_module(module), "__all__", ()):
            found.setdefault(name, f"{module}.{name}")
    return found


NAMES = documented_names()


class LinkPublicNames(SphinxTransform):
    """Link code such as `Outputs`, `Outputs(plots=False)` and `open_recording` to the reference."""

    default_priority = 400  # before the references are resolved

    def apply(self, **kwargs: Any) -> None:
        """Replace each literal that is a class, a function with an underscore in its name, or a call."""
        for literal in list(self.document.findall(nodes.literal)):
            match = re.match(r"([A-Z]\w+|\w+_\w+)(?:\(.*)?$|(\w+)\(.*$", literal.astext(), re.DOTALL)
            name = match and (match[1] or match[2])
            inside = isinstance(literal.parent, (nodes.reference, pending_xref, nodes.title))
            if name not in NAMES or inside:
                continue
            link = pending_xref(
                "", literal.deepcopy(), refdomain="py", reftype="obj", reftarget=NAMES[name], refdoc=self.env.docname
            )
            literal.replace_self(link)


def resolve_elsewhere(app: Sphinx, env: Any, node: pending_xref, content: nodes.TextElement) -> nodes.Node | None:
    """Resolve a name under the module that documents it: `graph.Graph` is `lightning_recorder.Graph`."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].removeprefix("lightning_recorder.")
    for first in range(len(parts := target.split("."))):
        full = ".".join([NAMES.get(parts[first], ""), *parts[first + 1 :]])
        if NAMES.get(parts[first]) and full != node["reftarget"]:
            return env.domains["py"].resolve_xref(env, node["refdoc"], app.builder, "obj", full, node, content)
    return content if exists(node["reftarget"]) else None


def exists(target: str) -> bool:
    """Return True if a name exists: a private class in the signature of a public one is shown as text."""
    module, _, name = target.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), name)
    except (ImportError, ValueError):
        return False


def copy_sources(app: Sphinx, error: Exception | None) -> None:
    """Put each page as Markdown beside its HTML, where the links of llms.txt lead."""
    if error is None and app.builder.name == "html":
        for name in app.env.found_docs:
            path = Path(app.outdir, f"{name}.md")
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(app.env.doc2path(name), path)


def setup(app: Sphinx) -> None:
    """Add the transform and the handler to Sphinx."""
    app.add_transform(LinkPublicNames)
    app.connect("missing-reference", resolve_elsewhere)
    app.connect("build-finished", copy_sources)
