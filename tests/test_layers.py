"""Imports point downward only, and each optional library is imported in one place."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lightning_recorder

PACKAGE = "lightning_recorder"
ROOT = Path(lightning_recorder.__file__).parent

# From bottom to top; a file may import from lower layers and from its own folder.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("lazy", "privacy"),
    ("bins", "errors", "fonts", "graph.unused", "internals.random_states", "notebook", "switch", "version"),
    ("disk", "folder_lock", "portable", "signatures", "structure", "temporary", "untrusted"),
    ("internals",),
    ("module_names", "names"),
    ("records",),
    ("graph.model", "inputs", "reductions", "schedule", "selection"),
    ("dumps", "graph", "taps"),
    ("functions",),
    ("insight",),
    ("plots", "recordings", "sinks"),  # each sink converts data to the format of its back end
    ("page",),
    ("statistics",),
    ("tensors",),
    ("wrapped",),
    ("outputs", "watch"),
    ("check",),
    ("callbacks", "commands", "testing"),
    ("loops",),
    ("huggingface", "tensorboard_tab"),
    ("__main__", "entry_point"),
    ("site.sitecustomize",),  # what a program of ``lightning-recorder run`` imports first
)

# A recording shows itself in a notebook, and the page that it shows reads recordings.
UPWARD = ("recordings.recording", "lightning_recorder.page")

# Libraries that may be missing or are slow to import.
BACKENDS = (
    "PIL",
    "comet_ml",
    "graphviz",
    "mlflow",
    "pygraphviz",
    "safetensors",
    "tensorboard",
    "torch.utils.tensorboard",
    "wandb",
)


@dataclass(frozen=True)
class Import:
    """An import of one module by another."""

    importer: str
    """The name relative to the package, such as ``graph.model``; a folder's ``__init__`` has the folder's name."""
    imported: str
    """The full dotted name."""
    in_function: bool

    @property
    def inner(self) -> str | None:
        """The name of the imported module inside the package, if it is part of it."""
        name = self.imported.removeprefix(PACKAGE + ".")
        return name if name != self.imported else None


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Return every file of the package except the public interface, by its name inside the package."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported_by_string(node: ast.AST) -> str | None:
    """Return the name of a call such as ``import_module("package.file")``, if it is written out."""
    if not isinstance(node, ast.Call) or "import_module" not in (
        vars(node.func).get("id"),
        vars(node.func).get("attr"),
    ):
        return None
    name = node.args[0]
    return str(name.value) if isinstance(name, ast.Constant) else None


def statements(node: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yield the imports that happen at run time, and a flag for those that happen only in a function call."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, in_function
        elif (name := imported_by_string(child)) is not None:
            yield ast.Import([ast.alias(name)]), True
        elif isinstance(child, ast.If) and vars(child.test).get("id") == "TYPE_CHECKING":
            for other in child.orelse:
                yield from statements(other, in_function)
        else:
            inside = in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from statements(child, inside)


@functools.cache
def imports() -> list[Import]:
    """Return every import of the package, with ``from folder import file`` as an import of the file."""
    trees = modules()
    found = []
    for importer, tree in trees.items():
        for statement, in_function in statements(tree):
            if isinstance(statement, ast.Import):
                names = [alias.name for alias in statement.names]
            else:
                base = statement.module or ""
                inner = base.removeprefix(PACKAGE).lstrip(".")
                files = [f"{inner}.{alias.name}".lstrip(".") for alias in statement.names]
                whole = [f"{PACKAGE}.{file}" if file in trees else base for file in files]
                names = whole if base.startswith(PACKAGE) else [f"{base}.{alias.name}" for alias in statement.names]
            names = [name for name in dict.fromkeys(names) if (importer, name) != UPWARD]
            found += [Import(importer, name, in_function) for name in names]
    return found


def layer(name: str) -> int:
    """Return the number of a module's layer; the most specific entry applies."""
    places = {entry: number for number, entries in enumerate(LAYERS) for entry in entries}
    while name not in places:
        name, dot, _ = name.rpartition(".")
        assert dot, f"{name} has no place in the layers"
    return places[name]


def folder(name: str) -> str:
    """Return the folder of a module, or the module itself at the bottom."""
    return name.partition(".")[0]


def test_the_imports_are_found() -> None:
    """The source scan finds imports of files and folders, inside and outside of functions."""
    assert Import("graph.views.fold", f"{PACKAGE}.graph.model", False) in imports()
    assert Import("taps.base", f"{PACKAGE}.internals.autograd", False) in imports()
    assert Import("callbacks.gradient", f"{PACKAGE}.taps", False) in imports()
    assert Import("sinks.files", "PIL.Image", True) in imports()
    assert Import("selection", "torch.nn", False) in imports()
    importer, imported = UPWARD
    assert imported in [each.names[0].name for each, _ in statements(modules()[importer])]  # by string


def test_every_module_has_a_layer() -> None:
    """Every file belongs to a layer, and every file named by a layer exists."""
    names = [name for name in modules() if name]
    assert all(0 <= layer(name) < len(LAYERS) for name in names)
    assert [entry for entries in LAYERS for entry in entries if entry not in names] == []


def test_imports_point_downward() -> None:
    """Files import only from lower layers and their own folder."""
    wrong = []
    for each in imports():
        if each.inner is None or not each.importer:
            continue
        own = folder(each.importer) == folder(each.inner)
        below = layer(each.inner) < layer(each.importer)
        if not below and not (own and layer(each.inner) == layer(each.importer)):
            wrong.append(each)
    assert wrong == []


def test_nothing_imports_the_public_face() -> None:
    """No file imports the package itself, whose names come from the files above it."""
    assert [each for each in imports() if each.imported == PACKAGE] == []


def test_no_import_goes_in_a_circle() -> None:
    """No module imports itself, directly, through others, or through an import inside a function.

    So each file can be the first one of the package to be imported.
    """
    needs: dict[str, set[str]] = {}
    for each in imports():
        if each.inner is not None:
            # Python runs the packages around a file before the file, unless they already import it.
            around = [each.inner[:place] for place, sign in enumerate(each.inner) if sign == "."]
            new = [package for package in around if not f"{each.importer}.".startswith(f"{package}.")]
            needs.setdefault(each.importer, set()).update([each.inner, *new])
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail(" needs ".join(reversed(error.args[1])))


def test_only_callbacks_import_lightning() -> None:
    """Everything below the callbacks works without Lightning, under any of its names."""
    frameworks = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")
    users = {folder(each.importer) for each in imports() if each.imported.partition(".")[0] in frameworks}
    assert users == {"callbacks"}


def users_of(library: str) -> list[Import]:
    """Return the imports of a library or of its submodules."""
    return [each for each in imports() if f"{each.imported}.".startswith(f"{library}.")]


@pytest.mark.parametrize("library", BACKENDS)
def test_a_back_end_is_imported_in_one_file_of_a_folder(library: str) -> None:
    """At most one file per folder imports a given library that writes or draws."""
    files = sorted({each.importer for each in users_of(library)})
    folders = [folder(file) for file in files]
    assert len(folders) == len(set(folders)), files


@pytest.mark.parametrize("library", BACKENDS)
def test_a_back_end_is_imported_when_it_is_used(library: str) -> None:
    """A library that writes or draws is imported inside functions, so that it may be missing until then."""
    # TensorBoard itself imports its tab.
    own = {"tensorboard": "tensorboard_tab"}.get(library)
    early = [each.importer for each in users_of(library) if not each.in_function and each.importer != own]
    assert early == []


@pytest.mark.parametrize("name", ["_C.", "_functorch", "_backward_hooks", "._version", "_sequence_nr", "_call_impl"])
def test_private_names_of_torch_are_used_in_one_file(name: str) -> None:
    """Private names of torch are used in a single file, which documents their fallbacks."""
    users = [
        path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if name in path.read_text(encoding="utf-8")
    ]
    assert [user for user in users if user != "internals/autograd.py"] == []


FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros"}


def test_each_new_tensor_is_on_a_device_that_is_given() -> None:
    """No tensor of the package depends on the default device of the program."""
    calls = {
        name: [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        for name, tree in modules().items()
    }
    factories = [
        (f"{name}:{call.lineno}", {keyword.arg for keyword in call.keywords})
        for name, found in calls.items()
        for call in found
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in FACTORIES
        and ast.unparse(call.func.value) == "torch"
    ]
    assert len(factories) > 50
    assert [place for place, keywords in factories if "device" not in keywords] == []
