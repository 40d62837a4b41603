"""Declarative selection of modules, resolved against ``named_modules()``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeGuard

from torch import nn

from lightning_recorder.errors import (
    ArgumentError,
    SelectionError,
    check_callable,
    closest,
    describe_call,
    imported,
)
from lightning_recorder.internals.module_tree import ModuleMap, ModuleSet, children_of
from lightning_recorder.internals.preserve_state import read_extra_repr
from lightning_recorder.module_names import default_modules, is_never_called, named_submodules
from lightning_recorder.names import closest_names, compile_glob

__all__ = ["SelectedModules", "Selection", "is_of_types"]


# The name of the root in tags. The module name of the root is empty.
_ROOT = "(root)"


@dataclass(frozen=True)
class Selection:
    """Selection of submodules by name, position, type, predicate and exclusion; all given criteria must be met.

    A name is the dotted name of ``named_modules()``. In a name ``*`` matches any characters within one segment, ``?``
    matches one character, and a segment ``**`` matches any number of segments, including none: ``encoder.*`` matches
    the children of ``encoder``, ``encoder.**`` matches ``encoder`` and everything below it, and ``**.attn`` matches
    every module called ``attn``.

    Indices, labels and depths refer to ``named_modules()``: the root comes first, and each module occurs once. A module
    that is registered under several names has the position of its first name. Wrapper modules, as from
    ``torch.compile``, have neither names nor positions.

    A ``ModuleList`` or ``ModuleDict`` is never called itself. If it is selected by name, index or label, its entries
    are selected instead. Depths, types and predicates ignore it. The root is selected only by its index, label or
    depth, by a predicate, or by the name ``""``. Globs and types alone do not select it.

    If nothing or only ``exclude`` is given, the selection is every leaf of the tree and every other module that owns
    parameters, without the root and without torchmetrics metrics. A module owns the parameters that are registered on
    it, directly or in a ``ParameterList`` or ``ParameterDict``.

    Args:
        names: Names or globs; a module is selected if any of them matches.
        types: Classes, or class names such as ``"Linear"`` or ``"torch.nn.Linear"``; subclasses match too.
        exclude: Names or globs of modules to exclude, by any of their names. A pattern may match nothing.
        indices: Positions in ``enumerate(module.modules())``, starting at 0 for the root.
        labels: Pairs ``(depth, idx)``: the ``idx``-th module at that depth, starting at 1. Labels of a
            :class:`~lightning_recorder.RecordedNet` count calls, not modules; ``net.labels[label]`` is a module name.
        depth: Nesting depths: 0 is the root, 1 its children. The entries of a ``ModuleList`` are one level deeper than
            the list.
        predicate: A function that takes the name and the module and returns True to select the module, or the import
            path of such a function, as in ``"mypackage.mymodule.is_wanted"``. It runs after all other criteria except
            ``exclude``, once for each module that meets them.

    Raises:
        ArgumentError: If an entry has the wrong type for its argument, a list other than ``exclude`` is empty, or the
            predicate cannot be imported or called.

    Note:
        Each argument takes one entry or several entries. Every selection can be written in YAML with strings, integers
        and lists of them.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> list(Selection().resolve(net))
        ['0', '1.0', '1.1']
        >>> list(Selection("**", types="Linear", exclude="0").resolve(net))
        ['1.0']
        >>> list(Selection(indices=[0, 3]).resolve(net))
        ['', '1.0']
        >>> list(Selection(labels=[[1, 2], [2, 1]]).resolve(net))  # the second child, and the first grandchild
        ['1', '1.0']
        >>> list(Selection(depth=2, predicate=lambda name, module: hasattr(module, "weight")).resolve(net))
        ['1.0']
        >>> Selection("1.2").resolve(net)
        Traceback (most recent call last):
            ...
        lightning_recorder.errors.SelectionError: no module matches '1.2'; the closest names are '1.1', '1.0', '1'
    """

    names: str | Iterable[str] | None = None
    types: type[nn.Module] | str | Iterable[type[nn.Module] | str] | None = None
    exclude: str | Iterable[str] | None = None
    indices: int | Iterable[int] | None = None
    labels: Iterable[int] | Iterable[Iterable[int]] | None = None
    depth: int | Iterable[int] | None = None
    predicate: Callable[[str, nn.Module], bool] | str | None = None

    def __post_init__(self) -> None:
        # Normalize the fields, so that equal selections compare equal.
        for field in _ENTRIES:
            object.__setattr__(self, field, _entries(field, getattr(self, field)))
        object.__setattr__(self, "predicate", _imported(self.predicate))

    def resolve(self, module: nn.Module) -> SelectedModules:
        """Return the selected submodules by name, in the order of ``named_modules()``.

        A module that is registered under several names appears once, under the first name that ``names`` matches.
        Printing the result shows the selection.

        Raises:
            ArgumentError: If ``module`` is not a module.
            SelectionError: If nothing is selected, if any name or glob matches nothing, if there is no module at an
                index or label, or if the predicate raises. The message has the closest names, or names the argument
                that excluded all remaining modules.
        """
        if not isinstance(module, nn.Module):
            raise ArgumentError(f"resolve() takes a torch.nn.Module, got {type(module).__name__}")
        tree = _Tree(module)
        chosen = self._candidates(tree)
        for field, holds in self._criteria(tree):
            left = {name: each for name, each in chosen.items() if holds(name, each)}
            # A model of a single module has no default selection, and excluding from an empty selection is not a
            # mistake.
            if not left and (chosen or not self.is_default):
                raise SelectionError(self._nothing_left(field, tree, chosen))
            chosen = left
        return SelectedModules(chosen, tree.names)

    @property
    def _is_placed(self) -> bool:
        """True if ``indices``, ``labels``, ``depth`` or ``predicate`` is set. Only these can select the root."""
        return any(given is not None for given in (self.indices, self.labels, self.depth, self.predicate))

    @property
    def is_default(self) -> bool:
        """True if no argument selects modules. ``exclude`` may be set."""
        return self.names is None and self.types is None and not self._is_placed

    def _candidates(self, tree: _Tree) -> dict[str, nn.Module]:
        """Return the modules that match the names, or all possible modules if no names are given."""
        if self.names is not None:
            return self._named(tree)
        names = default_modules(tree.root) if self.is_default else [names[0] for names in tree.names.values()]
        modules = {name: tree.modules[name] for name in names if name or self._is_placed}
        return {name: each for name, each in modules.items() if not is_never_called(each)}

    def _named(self, tree: _Tree) -> dict[str, nn.Module]:
        found: set[str] = set()
        for pattern in self.names or ():
            matched = tree.matching(pattern)
            if not matched:
                raise SelectionError(f"no module matches {pattern!r}; {closest_names(pattern, tree.modules)}")
            found |= matched
        first_names: ModuleMap[str] = ModuleMap()
        for name in tree.opened(found):
            first_names.setdefault(tree.modules[name], name)
        if not first_names:
            raise SelectionError(f"names={_shown(self.names)} matches only empty lists and dictionaries")
        return {name: each for each, name in first_names.items()}

    def _criteria(self, tree: _Tree) -> Iterator[tuple[str, Callable[[str, nn.Module], bool]]]:
        """Yield each criterion other than the names, with the name of its argument."""
        given = vars(self)  # the normalized values, whose types the field annotations do not express
        if given["indices"] is not None:
            indexed = tree.at_indices(given["indices"])
            yield "indices", lambda name, each: each in indexed
        if given["labels"] is not None:
            labeled = tree.at_labels(given["labels"])
            yield "labels", lambda name, each: each in labeled
        if given["depth"] is not None:
            yield "depth", lambda name, each: tree.places[each].depth in given["depth"]
        if given["types"] is not None:
            tree.check_types(given["types"])
            yield "types", lambda name, each: is_of_types(each, given["types"])
        if given["predicate"] is not None:
            yield "predicate", self._is_wanted
        if given["exclude"] is not None:
            excluded = set().union(*map(tree.matching, given["exclude"]))
            yield "exclude", lambda name, each: excluded.isdisjoint(tree.names[each])

    def _is_wanted(self, name: str, module: nn.Module) -> bool:
        try:
            return bool(vars(self)["predicate"](name, module))
        except Exception as error:
            raised = describe_call(vars(self)["predicate"], error)
            raise SelectionError(f"the predicate failed for module {name!r}: it {raised}") from error

    def _nothing_left(self, field: str, tree: _Tree, chosen: dict[str, nn.Module]) -> str:
        """Return an error message for a criterion that excludes all remaining modules, with values that would match."""
        given = getattr(self, field)
        if field == "types":
            wanted = ", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in given)
            present = sorted({type(each).__name__ for each in tree.names})
            return f"no selected module is a {wanted}; the model has {', '.join(present)}"
        message = f"{field}={_shown(given)} excludes all of the {len(chosen)} selected modules"
        if field == "exclude":
            return message
        if field == "predicate":
            return f"{message}; it was called with {_listed(map(repr, chosen))}"
        examples: dict[object, str] = {}
        for name, each in chosen.items():
            examples.setdefault(getattr(tree.places[each], field), name)
        return f"{message}; {_listed(f'{name!r} has {place}' for place, name in examples.items())}"


class SelectedModules(dict[str, nn.Module]):
    """The modules chosen by a selection, by name. Printing them shows one line per module.

    The printed count covers all modules of the model, including the root. A module that calls no other module is shown
    with its arguments. A module with several names is shown with its other names.

    Args:
        modules: The selected modules by name.
        names: All modules of the model, each with all its names.

    Example:
        >>> net = nn.ModuleDict({"up": nn.Linear(2, 2), "act": nn.ReLU()})
        >>> net["down"] = net["up"]
        >>> print(Selection().resolve(net))
        2 of 3 modules:
          up   Linear(in_features=2, out_features=2, bias=True), also down
          act  ReLU()
    """

    def __init__(self, modules: Mapping[str, nn.Module], names: Mapping[nn.Module, Sequence[str]]) -> None:
        super().__init__(modules)
        self._count = len(names)
        self._names = {name: names[each] for name, each in modules.items()}

    def __str__(self) -> str:
        width = max((len(name or _ROOT) for name in self), default=0)
        lines = [f"{len(self)} of {self._count} modules:"]
        for name, module in self.items():
            others = [other or _ROOT for other in self._names.get(name, ()) if other != name]
            also = f", also {', '.join(others)}" if others else ""
            lines.append(f"  {name or _ROOT:{width}}  {_described(module)}{also}")
        return "\n".join(lines)


def _described(module: nn.Module) -> str:
    kind = type(module).__name__
    if any(True for _ in children_of(module)):
        return kind
    # Some classes format their arguments over several lines.
    return f"{kind}({' '.join(read_extra_repr(module).split())})"


class _Place(NamedTuple):
    """The position of a module in ``named_modules()``, by the arguments of a selection that refer to it."""

    indices: int
    labels: tuple[int, int]
    depth: int


class _Tree:
    """The modules of a model with all their names and positions, in the order of ``named_modules()``."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.modules = named_submodules(root, remove_duplicate=False, with_lent=True)
        self.names: ModuleMap[list[str]] = ModuleMap()
        for name, each in self.modules.items():
            self.names.setdefault(each, []).append(name)
        self.places: ModuleMap[_Place] = ModuleMap()
        self._widths: Counter[int] = Counter()
        for index, (each, (name, *_)) in enumerate(self.names.items()):
            depth = name.count(".") + 1 if name else 0
            self._widths[depth] += 1
            self.places[each] = _Place(index, (depth, self._widths[depth]), depth)

    def matching(self, pattern: str) -> set[str]:
        """Return the names that equal or match the pattern."""
        if not {"*", "?"}.intersection(pattern):
            return {pattern} & self.modules.keys()
        # The root's name is empty and must not match a glob.
        fits = compile_glob(pattern).fullmatch
        return {name for name in self.modules if name and fits(name)}

    def check_types(self, types: Iterable[type[nn.Module] | str]) -> None:
        """Raise if a class name is probably misspelled.

        A class that the model does not contain is allowed, since one selection may be used for several models.

        Raises:
            SelectionError: If neither the model nor torch has a class of this name, but the model has a class with a
                similar name.
        """
        present = {base.__name__ for each in self.names for base in type(each).__mro__ if issubclass(base, nn.Module)}
        for kind in types:
            if not isinstance(kind, str) or hasattr(nn, kind) or any(_is_a(each, kind) for each in self.names):
                continue
            # A high threshold, because class names share words: MyLayer is not a misspelled LayerNorm.
            meant = closest(kind.rpartition(".")[2], sorted(present), similarity=0.8)
            if meant:
                classes = ", ".join(sorted({type(each).__name__ for each in self.names}))
                hint = f"did you mean {meant!r}?"
                raise SelectionError(f"no selected module is a {kind}; the model has {classes}: {hint}")

    def opened(self, names: Iterable[str]) -> list[str]:
        """Return the names in order, with containers that are never called replaced by their entries."""
        found = set(names)
        for name, each in self.modules.items():
            if name in found and is_never_called(each):
                found |= {f"{name}.{child}" if name else child for child, _ in children_of(each)}
        return [name for name, each in self.modules.items() if name in found and not is_never_called(each)]

    def at_indices(self, indices: Iterable[int]) -> ModuleSet:
        """Return the modules at these indices."""
        modules = list(self.names)
        for index in indices:
            if index >= len(modules):
                raise SelectionError(f"no module has the index {index}; the model has {_counted(len(modules))}")
        return self._meant(modules[index] for index in indices)

    def at_labels(self, labels: Iterable[tuple[int, int]]) -> ModuleSet:
        """Return the modules with these labels."""
        labeled = {place.labels: each for each, place in self.places.items()}
        for label in labels:
            if label not in labeled:
                there = _counted(self._widths[label[0]])
                raise SelectionError(f"no module has the label {label}; depth {label[0]} has {there}")
        return self._meant(labeled[label] for label in labels)

    def _meant(self, modules: Iterable[nn.Module]) -> ModuleSet:
        return ModuleSet(self.modules[name] for name in self.opened(self.names[each][0] for each in modules))


def _counted(count: int) -> str:
    return f"{count} module{'' if count == 1 else 's'}"


def _listed(texts: Iterable[str], most: int = 5) -> str:
    first = list(islice(texts, most + 1))
    return ", ".join(first if len(first) <= most else [*first[:most], "..."])


def _shown(given: Any) -> str:
    """Return the value of an argument as shown in a message."""
    return str(list(given)) if isinstance(given, tuple) else getattr(given, "__qualname__", repr(given))


def _is_kind(entry: object) -> bool:
    return isinstance(entry, str) or (isinstance(entry, type) and issubclass(entry, nn.Module))


def _is_count(entry: object, least: int = 0) -> bool:
    return isinstance(entry, int) and not isinstance(entry, bool) and entry >= least


def _is_label(entry: object) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and _is_count(entry[0]) and _is_count(entry[1], 1)


# The expected entries of each argument: a description, and a function that checks one entry.
_NAMES = ("module names or globs", lambda entry: isinstance(entry, str))
_ENTRIES: dict[str, tuple[str, Callable[[object], bool]]] = {
    "names": _NAMES,
    "types": ("subclasses of torch.nn.Module or their names", _is_kind),
    "exclude": _NAMES,
    "indices": ("integers of at least 0", _is_count),
    "labels": ("pairs (depth, idx) of a depth of at least 0 and a position of at least 1", _is_label),
    "depth": ("integers of at least 0", _is_count),
}


def _entries(field: str, value: object) -> tuple[Any, ...] | None:
    """Check the entries of a field, one or several, and return them as a tuple."""
    if value is None:
        return None
    expected, is_allowed = _ENTRIES[field]
    if isinstance(value, nn.Module):  # some modules are iterable
        raise ArgumentError(f"{field} takes {expected}, got {_given(field, value)}")
    entries = _pairs(value) if field == "labels" else tuple(value) if _is_several(value) else (value,)
    for entry in entries:
        if not is_allowed(entry):
            raise ArgumentError(f"{field} takes {expected}, got {_given(field, entry)}")
    if not entries and field != "exclude":
        raise ArgumentError(f"{field} is empty; omit it to record the default modules")
    return entries or None


def _given(field: str, entry: object) -> str:
    """Return a wrong entry as shown in a message. For a module or a class, add what to pass instead."""
    if isinstance(entry, nn.Module):
        kind = type(entry).__name__
        if field == "types":
            return f"a module: write types={kind!r} for all modules of its class"
        return (
            f"the module {kind} itself: write its name in the model, which is the attribute that it is assigned to "
            f"(for self.encoder 'encoder', with all that is in it 'encoder.**')"
        )
    if field in ("names", "exclude") and isinstance(entry, type) and issubclass(entry, nn.Module):
        return f"the class {entry.__name__}" + (f": write types={entry.__name__!r}" if field == "names" else "")
    return repr(entry)


def _is_several(value: object) -> TypeGuard[Iterable[Any]]:
    return isinstance(value, Iterable) and not isinstance(value, (str, type))


def _pairs(value: object) -> tuple[Any, ...]:
    """Return labels as tuples, since YAML only has lists. A pair of integers is a single label."""
    if not _is_several(value):
        return (value,)
    entries = [tuple(entry) if _is_several(entry) else entry for entry in value]
    return (tuple(entries),) if entries and not any(isinstance(entry, tuple) for entry in entries) else tuple(entries)


def _imported(predicate: object) -> object:
    """Return the predicate. If it is an import path, import the predicate first."""
    predicate = imported("predicate", predicate)
    if predicate is not None:
        check_callable("predicate", predicate, "name, module", " or its import path")
    return predicate


def is_of_types(module: nn.Module, types: type[nn.Module] | str | Iterable[type[nn.Module] | str]) -> bool:
    """Return True if the module has one of these classes or class names, as in the ``types`` of :class:`Selection`.

    Example:
        >>> is_of_types(nn.Linear(1, 1), ["Conv2d", "torch.nn.Linear"]), is_of_types(nn.ReLU(), [nn.Linear])
        (True, False)
    """
    return any(_is_a(module, kind) for kind in _entries("types", types) or ())


def _is_a(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    if isinstance(kind, type):
        return isinstance(module, kind)
    # Compare the names of all base classes, so that FSDP's ``FSDPLinear`` counts as a ``Linear``.
    return any(
        kind in (base.__name__, f"{base.__module__}.{base.__qualname__}", _public_name(base))
        for base in type(module).__mro__
    )


def _public_name(kind: type) -> str:
    """Return the public name of a class: ``torch.nn.Linear`` instead of ``torch.nn.modules.linear.Linear``."""
    package = "torch.nn" if kind.__module__.startswith("torch.nn.modules") else kind.__module__
    return f"{package}.{kind.__qualname__}"
