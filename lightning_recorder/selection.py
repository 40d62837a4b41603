"""Which modules to record, said as data and resolved against ``named_modules()``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeGuard

from torch import nn

from lightning_recorder.errors import ArgumentError, SelectionError, imported
from lightning_recorder.names import closest_names, compile_glob, is_never_called, leaf_modules, named_submodules

__all__ = ["SelectedModules", "Selection", "is_of_types"]


# What tags call the root, which has no name.
_ROOT = "(root)"


@dataclass(frozen=True)
class Selection:
    """A choice of submodules by name, place, type, predicate and exclusion; what is given must hold together.

    A name is the dotted name of ``named_modules()``. In a name ``*`` stands for any run of characters within one
    segment, ``?`` for one character, and a segment ``**`` for any number of segments, none included: ``encoder.*`` are
    the children of ``encoder``, ``encoder.**`` is ``encoder`` with everything below it, ``**.attn`` is every module
    called ``attn``.

    A place is an index, a label or a depth in ``named_modules()``, where each module occurs once and the root comes
    first: a module that is registered under several names has the place of the first. Wrappers, as of
    ``torch.compile``, have neither names nor places of their own.

    A ``ModuleList`` or ``ModuleDict`` is never called itself. Selected by name, index or label it stands for its
    entries; depths, types and predicates pass it over. The root is selected where its index, its label, its depth or a
    predicate asks for it, or the name ``""``; globs and types alone leave it out. If nothing is given, or only
    ``exclude``, the selection is the leaves of the tree.

    Args:
        names: Names or globs; a module is chosen when any of them matches.
        types: Classes, or class names as ``"Linear"`` or ``"torch.nn.Linear"``; base classes count.
        exclude: Names or globs of modules to leave out, by any of their names. A pattern here may match nothing.
        indices: Positions in ``enumerate(module.modules())``, from 0, the root.
        labels: Pairs ``(depth, idx)``: the ``idx``-th module, from 1, of those at that depth. Those of a
            :class:`~lightning_recorder.RecordedNet` count calls and not modules; ``net.labels[label]`` is a name.
        depth: Depths of nesting: 0 is the root, 1 its children. The entries of a ``ModuleList`` lie one deeper than it.
        predicate: Takes a module's name and the module and says whether to record it, or the dotted import path of
            such a function, as ``"mypackage.mymodule.is_wanted"``. It is asked last before ``exclude``, once for each
            module that everything else holds for.

    Raises:
        ArgumentError: If an entry is not of the kind that its argument takes, a list that chooses is empty, or the
            predicate cannot be imported or called.

    Note:
        Each argument takes one entry or several. What YAML can say, strings, integers and lists of them, is enough for
        every choice.

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
        # Normalised once, so that equal selections compare equal.
        for field in _ENTRIES:
            object.__setattr__(self, field, _entries(field, getattr(self, field)))
        object.__setattr__(self, "predicate", _imported(self.predicate))

    def resolve(self, module: nn.Module) -> SelectedModules:
        """The selected submodules by name, in the order of ``named_modules()``.

        A module that is registered under several names appears once, under the first of them that ``names`` matches.
        Printing the result shows what was selected.

        Raises:
            ArgumentError: If it is no module.
            SelectionError: If nothing is selected, if a single name or glob matches nothing, if there is no module at
                an index or label, or if the predicate raises. The message gives the closest names, or says which
                argument left nothing over.
        """
        if not isinstance(module, nn.Module):
            raise ArgumentError(f"a selection is resolved against a torch.nn.Module, got {type(module).__name__}")
        tree = _Tree(module)
        chosen = self._candidates(tree)
        for field, holds in self._criteria(tree):
            left = {name: each for name, each in chosen.items() if holds(name, each)}
            # A model of a single module has no leaves, and excluding some of none is no mistake.
            if not left and (chosen or not self._is_of_leaves):
                raise SelectionError(self._nothing_left(field, tree, chosen))
            chosen = left
        return SelectedModules(chosen, tree.names)

    @property
    def _is_placed(self) -> bool:
        """Whether something is given that can ask for the root."""
        return any(given is not None for given in (self.indices, self.labels, self.depth, self.predicate))

    @property
    def _is_of_leaves(self) -> bool:
        return self.names is None and self.types is None and not self._is_placed

    def _candidates(self, tree: _Tree) -> dict[str, nn.Module]:
        """The modules with the names, or without names all that could be meant."""
        if self.names is not None:
            return self._named(tree)
        names = leaf_modules(tree.root) if self._is_of_leaves else [names[0] for names in tree.names.values()]
        modules = {name: tree.modules[name] for name in names if name or self._is_placed}
        return {name: each for name, each in modules.items() if not is_never_called(each)}

    def _named(self, tree: _Tree) -> dict[str, nn.Module]:
        found: set[str] = set()
        for pattern in self.names or ():
            matched = tree.matching(pattern)
            if not matched:
                raise SelectionError(f"no module matches {pattern!r}; {closest_names(pattern, tree.modules)}")
            found |= matched
        first_names: dict[nn.Module, str] = {}
        for name in tree.opened(found):
            first_names.setdefault(tree.modules[name], name)
        if not first_names:
            raise SelectionError(f"names={_shown(self.names)} matches only lists and dictionaries without entries")
        return {name: each for each, name in first_names.items()}

    def _criteria(self, tree: _Tree) -> Iterator[tuple[str, Callable[[str, nn.Module], bool]]]:
        """What must hold beside the names, by argument."""
        given = vars(self)  # as normalised, which the annotations of the fields do not say
        if given["indices"] is not None:
            indexed = tree.at_indices(given["indices"])
            yield "indices", lambda name, each: each in indexed
        if given["labels"] is not None:
            labelled = tree.at_labels(given["labels"])
            yield "labels", lambda name, each: each in labelled
        if given["depth"] is not None:
            yield "depth", lambda name, each: tree.places[each].depth in given["depth"]
        if given["types"] is not None:
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
            told = f"{type(error).__name__}: {error}"
            raise SelectionError(f"the predicate failed for module {name!r}: {told}") from error

    def _nothing_left(self, field: str, tree: _Tree, chosen: dict[str, nn.Module]) -> str:
        """That a criterion holds for none of the modules that those before it had left, and what would hold."""
        given = getattr(self, field)
        if field == "types":
            wanted = ", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in given)
            present = sorted({type(each).__name__ for each in tree.names})
            return f"no selected module is a {wanted}; the model has {', '.join(present)}"
        told = f"{field}={_shown(given)} leaves none of the {len(chosen)} selected modules"
        if field == "exclude":
            return told
        if field == "predicate":
            return f"{told}; it was asked about {_listed(map(repr, chosen))}"
        examples: dict[object, str] = {}
        for name, each in chosen.items():
            examples.setdefault(getattr(tree.places[each], field), name)
        return f"{told}; {_listed(f'{name!r} has {place}' for place, name in examples.items())}"


class SelectedModules(dict[str, nn.Module]):
    """The modules that a selection has chosen, by name; printed they show what was chosen, one line for each.

    The printed count is of all modules of the model, the root included. A module that calls no other is shown with its
    arguments, one that is registered under several names with those other names.

    Args:
        modules: The chosen modules by name.
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
    if any(True for _ in module.children()):
        return kind
    # Some classes write their arguments over several lines.
    return f"{kind}({' '.join(module.extra_repr().split())})"


class _Place(NamedTuple):
    """Where a module stands in ``named_modules()``, by the arguments of a selection that ask for it."""

    indices: int
    labels: tuple[int, int]
    depth: int


class _Tree:
    """The modules of a model with all their names and their places, in the order of ``named_modules()``."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.modules = named_submodules(root, remove_duplicate=False)
        self.names: dict[nn.Module, list[str]] = {}
        for name, each in self.modules.items():
            self.names.setdefault(each, []).append(name)
        self.places: dict[nn.Module, _Place] = {}
        self._widths: Counter[int] = Counter()
        for index, (each, (name, *_)) in enumerate(self.names.items()):
            depth = name.count(".") + 1 if name else 0
            self._widths[depth] += 1
            self.places[each] = _Place(index, (depth, self._widths[depth]), depth)

    def matching(self, pattern: str) -> set[str]:
        """The names that are the pattern or fit it."""
        if not {"*", "?"}.intersection(pattern):
            return {pattern} & self.modules.keys()
        # The root has no name, so that no glob means it.
        fits = compile_glob(pattern).fullmatch
        return {name for name in self.modules if name and fits(name)}

    def opened(self, names: Iterable[str]) -> list[str]:
        """The names in order, with those of the entries for those of lists and dictionaries that are never called."""
        found = set(names)
        for name, each in self.modules.items():
            if name in found and is_never_called(each):
                found |= {f"{name}.{child}" if name else child for child, _ in each.named_children()}
        return [name for name, each in self.modules.items() if name in found and not is_never_called(each)]

    def at_indices(self, indices: Iterable[int]) -> set[nn.Module]:
        """The modules that are meant by these indices."""
        modules = list(self.names)
        for index in indices:
            if index >= len(modules):
                raise SelectionError(f"no module has the index {index}; the model has {_counted(len(modules))}")
        return self._meant(modules[index] for index in indices)

    def at_labels(self, labels: Iterable[tuple[int, int]]) -> set[nn.Module]:
        """The modules that are meant by these labels."""
        labelled = {place.labels: each for each, place in self.places.items()}
        for label in labels:
            if label not in labelled:
                there = _counted(self._widths[label[0]])
                raise SelectionError(f"no module has the label {label}; depth {label[0]} has {there}")
        return self._meant(labelled[label] for label in labels)

    def _meant(self, modules: Iterable[nn.Module]) -> set[nn.Module]:
        return {self.modules[name] for name in self.opened(self.names[each][0] for each in modules)}


def _counted(count: int) -> str:
    return f"{count} module{'' if count == 1 else 's'}"


def _listed(texts: Iterable[str], most: int = 5) -> str:
    first = list(islice(texts, most + 1))
    return ", ".join(first if len(first) <= most else [*first[:most], "..."])


def _shown(given: Any) -> str:
    """What was given for an argument, as in a message."""
    return str(list(given)) if isinstance(given, tuple) else getattr(given, "__qualname__", repr(given))


def _is_kind(entry: object) -> bool:
    return isinstance(entry, str) or (isinstance(entry, type) and issubclass(entry, nn.Module))


def _is_count(entry: object, least: int = 0) -> bool:
    return isinstance(entry, int) and not isinstance(entry, bool) and entry >= least


def _is_label(entry: object) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and _is_count(entry[0]) and _is_count(entry[1], 1)


# What each argument that takes one or several expects, in words and as a check of one entry.
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
    """The entries of a field that takes one or several, each checked."""
    if value is None:
        return None
    expected, is_allowed = _ENTRIES[field]
    entries = _pairs(value) if field == "labels" else tuple(value) if _is_several(value) else (value,)
    for entry in entries:
        if not is_allowed(entry):
            raise ArgumentError(f"{field} takes {expected}, got {entry!r}")
    if not entries and field != "exclude":
        raise ArgumentError(f"{field} is empty; leave it out to record what is recorded by default")
    return entries or None


def _is_several(value: object) -> TypeGuard[Iterable[Any]]:
    return isinstance(value, Iterable) and not isinstance(value, (str, type))


def _pairs(value: object) -> tuple[Any, ...]:
    """The labels, which YAML gives as lists, as tuples; a pair of integers is one label."""
    if not _is_several(value):
        return (value,)
    entries = [tuple(entry) if _is_several(entry) else entry for entry in value]
    return (tuple(entries),) if entries and not any(isinstance(entry, tuple) for entry in entries) else tuple(entries)


def _imported(predicate: object) -> object:
    """The predicate itself, if it is given by its import path."""
    predicate = imported("predicate", predicate)
    if predicate is not None and not callable(predicate):
        raise ArgumentError(f"predicate takes a function (name, module) -> bool or its import path, got {predicate!r}")
    return predicate


def is_of_types(module: nn.Module, types: type[nn.Module] | str | Iterable[type[nn.Module] | str]) -> bool:
    """Whether the module is of one of these classes or class names, as :class:`Selection` reads its ``types``.

    Example:
        >>> is_of_types(nn.Linear(1, 1), ["Conv2d", "torch.nn.Linear"]), is_of_types(nn.ReLU(), [nn.Linear])
        (True, False)
    """
    return any(_is_a(module, kind) for kind in _entries("types", types) or ())


def _is_a(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    if isinstance(kind, type):
        return isinstance(module, kind)
    # By the name of every base, so that FSDP's ``FSDPLinear`` is still a ``Linear``.
    return any(
        kind in (base.__name__, f"{base.__module__}.{base.__qualname__}", _public_name(base))
        for base in type(module).__mro__
    )


def _public_name(kind: type) -> str:
    """``torch.nn.Linear`` rather than ``torch.nn.modules.linear.Linear``: the name that people write."""
    package = "torch.nn" if kind.__module__.startswith("torch.nn.modules") else kind.__module__
    return f"{package}.{kind.__qualname__}"
