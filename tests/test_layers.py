"""Imports point downward only, and each optional library is imported in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lightning_recorder

PACKAGE = "lightning_recorder"
ROOT = Path(lightning_recorder.__file__).parent

BOTTOM = (
    "autograd",
    "compiled",
    "errors",
    "hooks",
    "names",
    "schedule",
    "stance",
    "stopwatch",
    "storage",
    "structure",
    "tags",
    "unrecorded",
)
# From the bottom to the top; what a file may import lies in a lower layer or in its own folder.
LAYERS: tuple[tuple[str, ...], ...] = (
    BOTTOM,
    ("graph.model", "inputs", "reductions", "selection", "untouched"),
    ("dumps", "graph", "taps"),
    ("plots", "recordings", "sinks"),  # each sink brings what it shows into the form of its back end
    ("recorders",),
    ("callbacks", "commands"),
    ("__main__",),
)

# The libraries that a user may not have, or that take long to import.
BACKENDS = (
    "PIL",
    "comet_ml",
    "graphviz",
    "matplotlib",
    "mlflow",
    "pygraphviz",
    "safetensors",
    "tensorboard",
    "torch.utils.tensorboard",
    "wandb",
)


@dataclass(frozen=True)
class Import:
    """That one module imports another."""

    importer: str
    """Inside the package, without its name: ``graph.model``; of a folder's ``__init__`` the folder."""
    imported: str
    """The whole dotted name."""
    in_function: bool

    @property
    def inner(self) -> str | None:
        """The name inside the package of what is imported, if it lies there."""
        name = self.imported.removeprefix(PACKAGE + ".")
        return name if name != self.imported else None


def modules() -> dict[str, ast.Module]:
    """Every file of the package but the public face, by its name inside the package."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def statements(node: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """The imports that happen when the program runs, and whether only when a function is called."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, in_function
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            for other in child.orelse:
                yield from statements(other, in_function)
        else:
            inside = in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from statements(child, inside)


def imports() -> list[Import]:
    """Every import of the package, ``from folder import file`` as one of the file."""
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
            found += [Import(importer, name, in_function) for name in dict.fromkeys(names)]
    return found


IMPORTS = imports()


def layer(name: str) -> int:
    """The number of the layer of a module, the most exact entry counting."""
    places = {entry: number for number, entries in enumerate(LAYERS) for entry in entries}
    while name not in places:
        name, dot, _ = name.rpartition(".")
        assert dot, f"{name} has no place in the layers"
    return places[name]


def folder(name: str) -> str:
    """The folder of a module, or the module itself at the bottom."""
    return name.partition(".")[0]


def test_the_imports_are_found() -> None:
    """The reading of the sources finds what is there: imports of files and folders, in functions and out of them."""
    assert Import("graph.views", f"{PACKAGE}.graph.model", False) in IMPORTS
    assert Import("taps.forward", f"{PACKAGE}.autograd", False) in IMPORTS
    assert Import("callbacks.gradient", f"{PACKAGE}.taps", False) in IMPORTS
    assert Import("sinks.files", "PIL.Image", True) in IMPORTS
    assert Import("selection", "torch.nn", False) in IMPORTS
    # Under TYPE_CHECKING there are more, which cost nothing when the program runs.
    assert not [each for each in IMPORTS if each.importer == "" and each.inner]


def test_every_module_has_a_layer() -> None:
    """No file lies outside the layers, and no layer names a file that is not there."""
    names = [name for name in modules() if name]
    assert all(0 <= layer(name) < len(LAYERS) for name in names)
    assert [entry for entries in LAYERS for entry in entries if entry not in names] == []


def test_imports_point_downward() -> None:
    """A file imports from lower layers and its own folder only, the bottom but errors and torch's private names."""
    wrong = []
    for each in IMPORTS:
        if each.inner is None or not each.importer:
            continue
        own = folder(each.importer) == folder(each.inner)
        below = layer(each.inner) < layer(each.importer)
        if not below and not (own and layer(each.inner) == layer(each.importer)):
            wrong.append(each)
    assert [
        each for each in wrong if not (each.importer in BOTTOM and each.inner in ("autograd", "errors", "storage"))
    ] == []


def test_no_import_goes_in_a_circle() -> None:
    """No module needs itself, also not by way of others or of an import inside a function."""
    needs: dict[str, set[str]] = {}
    for each in IMPORTS:
        if each.inner is not None:
            needs.setdefault(each.importer, set()).add(each.inner)
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail(" needs ".join(reversed(error.args[1])))


def test_only_callbacks_import_lightning() -> None:
    """Everything below the callbacks works without Lightning, under any of its names."""
    frameworks = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")
    users = {folder(each.importer) for each in IMPORTS if each.imported.partition(".")[0] in frameworks}
    assert users == {"callbacks"}


def users_of(library: str) -> list[Import]:
    """The imports of a library or of something inside it."""
    return [each for each in IMPORTS if f"{each.imported}.".startswith(f"{library}.")]


@pytest.mark.parametrize("library", BACKENDS)
def test_a_back_end_is_imported_in_one_file_of_a_folder(library: str) -> None:
    """Of each folder at most one file imports a library that writes or draws."""
    files = sorted({each.importer for each in users_of(library)})
    folders = [folder(file) for file in files]
    assert len(folders) == len(set(folders)), files


@pytest.mark.parametrize("library", BACKENDS)
def test_a_back_end_is_imported_when_it_is_used(library: str) -> None:
    """A library that writes or draws is imported inside functions, so that it may be absent until then."""
    early = [each.importer for each in users_of(library) if not each.in_function]
    assert early == []


@pytest.mark.parametrize("name", ["_C.", "_functorch", "_backward_hooks", "._version", "_sequence_nr", "_call_impl"])
def test_private_names_of_torch_are_asked_in_one_file(name: str) -> None:
    """What torch may rename is named in one file, which says what holds if it did."""
    users = [
        path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if name in path.read_text(encoding="utf-8")
    ]
    assert [user for user in users if user != "autograd.py"] == []
