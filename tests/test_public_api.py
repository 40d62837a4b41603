"""The public API that users rely on."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import lightning_recorder
from lightning_recorder import errors

ROOT = Path(lightning_recorder.__file__).parent
HEAVY = (
    "PIL",
    "comet_ml",
    "graphviz",
    "lightning",
    "lightning_fabric",
    "mlflow",
    "numpy",
    "pygraphviz",
    "pytorch_lightning",
    "safetensors",
    "tensorboard",
    "torch",
    "transformers",
    "typing_extensions",
    "wandb",
)

# The subpackages that users import from, in addition to the root.
SUBPACKAGES = (
    "callbacks",
    "check",
    "dumps",
    "errors",
    "graph",
    "plots",
    "recordings",
    "reductions",
    "selection",
    "sinks",
    "statistics",
    "structure",
    "taps",
    "tensors",
    "wrapped",
)


def loaded_after(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after running some code."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    output = subprocess.check_output([sys.executable, "-c", script], cwd=ROOT.parent, text=True)
    return set(json.loads(output))


def test_all_is_sorted() -> None:
    """The public names are sorted and unique."""
    assert lightning_recorder.__all__ == sorted(set(lightning_recorder.__all__))


def test_all_is_what_can_be_loaded() -> None:
    """Every name of the stub can be loaded, is the object of its subpackage, and is public there."""
    tree = ast.parse((ROOT / "__init__.pyi").read_text(encoding="utf-8"))
    homes = {alias.name: each.module for each in tree.body if isinstance(each, ast.ImportFrom) for alias in each.names}
    assert set(lightning_recorder.__all__) == set(homes)
    for name, home in homes.items():
        module = importlib.import_module(f"lightning_recorder.{home}")
        assert getattr(lightning_recorder, name) is getattr(module, name)
        assert name in module.__all__


def test_a_star_import_brings_every_name() -> None:
    """``from lightning_recorder import *`` imports all listed names."""
    namespace: dict[str, Any] = {}
    exec("from lightning_recorder import *", namespace)
    assert set(lightning_recorder.__all__) <= set(namespace)


def test_dir_lists_every_name() -> None:
    """``dir`` lists all names, before they are loaded, for shell completion."""
    code = "import lightning_recorder, json; print(json.dumps(dir(lightning_recorder)))"
    names = json.loads(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT.parent, text=True))
    assert set(lightning_recorder.__all__) <= set(names)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """An unknown name raises the same error as in any module."""
    with pytest.raises(AttributeError, match=r"^No lightning_recorder attribute Recorders$"):
        lightning_recorder.Recorders  # type: ignore[attr-defined]  # noqa: B018  # the point of the test
    with pytest.raises(ImportError, match="cannot import name 'Recorders'"):
        from lightning_recorder import Recorders  # type: ignore[attr-defined]  # noqa: F401  # the point


def test_importing_the_package_imports_nothing_else() -> None:
    """``import lightning_recorder`` loads neither torch nor Lightning nor any back end."""
    assert loaded_after("import lightning_recorder") & set(HEAVY) == set()


def test_recording_without_a_trainer_needs_no_lightning() -> None:
    """The features for a plain loop, including sinks and dumps, load neither Lightning nor unused back ends."""
    code = "\n".join(f"import lightning_recorder.{name}" for name in SUBPACKAGES if name != "callbacks")
    allowed = {"torch", "numpy", "typing_extensions"}
    assert loaded_after(code) & set(HEAVY) <= allowed


@cache
def public_objects() -> dict[str, Any]:
    """Return the public classes and functions, with the methods and properties that the package defines."""
    found = {}
    modules = [importlib.import_module(f"lightning_recorder.{name}") for name in SUBPACKAGES]
    for name, thing in {name: getattr(module, name) for module in modules for name in module.__all__}.items():
        if not str(getattr(thing, "__module__", "")).startswith("lightning_recorder"):
            continue  # a constant or a type alias
        found[name] = thing
        if inspect.isclass(thing):
            for attribute in dir(thing):
                value = inspect.getattr_static(thing, attribute)
                code = getattr(value, "__func__", getattr(value, "fget", value))
                ours = str(getattr(code, "__module__", "")).startswith("lightning_recorder")
                if not attribute.startswith("_") and ours and (callable(code) or isinstance(value, property)):
                    found[f"{name}.{attribute}"] = getattr(thing, attribute)
    return found


def test_everything_public_is_documented() -> None:
    """Every public class, function, method and property has a docstring, its own or an inherited one."""
    first = {name: (inspect.getdoc(each) or "").partition("\n\n")[0] for name, each in public_objects().items()}
    # Docstrings generated by dataclasses and named tuples do not count.
    generated = [name for name, text in first.items() if re.match(rf"{name}\(.*\)$", text)]
    assert [name for name, text in first.items() if name in generated or not re.search(r"[.:]{1,2}$", text)] == []


def test_the_methods_are_found() -> None:
    """The search for methods finds plain methods, class methods, properties and inherited ones."""
    expected = {
        "Selection.resolve",
        "Graph.from_json",
        "Tap.attached",
        "OutputTap.attach",
        "GradientRecorder.on_fit_start",
    }
    assert expected <= set(public_objects())


def test_the_tree_of_errors_is_the_one_that_is_drawn() -> None:
    """The diagram in the errors module shows each class under its base, with its built-in base class."""
    text = inspect.getdoc(errors) or ""
    drawn = {}
    parents: dict[int, str] = {}  # by indentation
    pattern = r"^([ │]*)([├└]── )?(\w+) +(?:\((\w+)\))? +\w"
    for indent, branch, name, builtin in re.findall(pattern, text, flags=re.MULTILINE):
        bases = [parents[len(indent)]] if branch else [] if builtin else ["Exception"]
        drawn[name] = [*bases, *([builtin] if builtin else [])]
        parents[len(indent) + len(branch)] = name
    real = {
        name: [base.__name__ for base in value.__bases__]
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert drawn == real
    assert len(drawn) == 12


def test_the_package_is_typed() -> None:
    """The package has a type marker and a valid version."""
    assert (ROOT / "py.typed").read_text() == ""
    assert re.fullmatch(r"\d+\.\d+\.\d+([a-z]+\d+)?", lightning_recorder.__version__)


def test_every_module_says_what_it_is() -> None:
    """Every file begins with a one-sentence docstring."""
    for path in ROOT.rglob("*.py"):
        # The beginning is enough: parsing all files takes seconds.
        assert re.match(r'"""(?:(?!"""|\n\n).)+\.(?:"""|\n\n)', path.read_text(encoding="utf-8"), re.DOTALL), path
