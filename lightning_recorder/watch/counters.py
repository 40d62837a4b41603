"""The numbers in a model's objects that change from batch to batch, such as a count of the calls of a hook."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_recorder.internals.module_tree import attributes_of, is_a, is_scripted

__all__ = ["Counters", "Slot"]

_NUMBERS = (int, float, bool)
_SKIPPED = (str, bytes, type, ModuleType, Tensor, nn.Module)
_FOREIGN = ("torch", "lightning", "pytorch_lightning", "numpy")  # whose objects are not searched
# Exact types only: to read a key that is gone may change a subclass.
_CONTAINERS = (dict, list, OrderedDict, Counter)
_MOST_ENTRIES = 64  # of a list or a dictionary that is searched
_DEEPEST = 6


class Slot(NamedTuple):
    """The place of a number: a key of a dictionary, an index of a list, or the variable of a closure.

    Args:
        owner: The dictionary, the list or the cell.
        key: The key or the index; ``None`` for a cell.
    """

    owner: Any
    key: Any

    def read(self) -> Any:
        """Return the number; ``None`` if there is no value any more."""
        try:
            return self.owner.cell_contents if self.key is None else self.owner[self.key]
        except (KeyError, IndexError, ValueError):
            return None

    def write(self, value: Any) -> None:
        """Set the number, unless there is no value any more."""
        if self.read() is None:
            return
        if self.key is None:
            self.owner.cell_contents = value
        else:
            self.owner[self.key] = value


class Counters:
    """Finds the numbers that change from batch to batch, so that a batch can be run again with those that it had.

    A model, a hook or a function may count its calls and depend on the count. All numbers are searched for at the
    first batch: attributes of modules, variables of the closures of functions and hooks, the global variables that
    these use, and what is in lists and dictionaries there. From the second batch on, those that have changed since are
    kept.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._first: list[tuple[Slot, Any]] | None = None
        self._slots: list[Slot] | None = None
        self.are_none = False
        """True if no number changes."""

    def keep(self) -> list[tuple[Slot, Any]]:
        """Return the numbers as they are now."""
        if self._first is None:
            self._first = [(slot, slot.read()) for slot in _slots(self._modules)]
            return self._first
        if self._slots is None:
            self._slots = [slot for slot, value in self._first if slot.read() != value]
            self._first, self._modules, self.are_none = [], [], not self._slots
        return [(slot, slot.read()) for slot in self._slots]


def _slots(modules: Iterable[nn.Module]) -> Iterator[Slot]:
    seen: set[int] = set()
    for module in modules:
        if is_scripted(module):
            continue
        table = attributes_of(module)
        is_own = not _is_foreign(type(module))
        for key, value in table.items():
            if type(value) in _NUMBERS:
                if is_own and key != "training":
                    yield Slot(table, key)
            else:
                yield from _inside(value, seen, 1)


def _inside(value: Any, seen: set[int], depth: int) -> Iterator[Slot]:
    """Yield the places of the numbers in an object that is not a number itself."""
    if depth > _DEEPEST or id(value) in seen or is_a(value, _SKIPPED):
        return
    seen.add(id(value))
    for owner, key, each in _parts(value):
        if type(each) in _NUMBERS and owner is not None:
            yield Slot(owner, key)
        else:
            yield from _inside(each, seen, depth + 1)


def _parts(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the values that an object refers to, with their owner and their key; no owner if they cannot be set."""
    if type(value) in _CONTAINERS:
        if len(value) <= _MOST_ENTRIES:
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((value, key, each) for key, each in list(pairs) if key is not None)
    elif is_a(value, partial):
        yield from ((None, None, each) for each in (value.func, *value.args, *value.keywords.values()))
    elif is_a(value, MethodType):
        yield from ((None, None, each) for each in (value.__self__, value.__func__))
    elif is_a(value, FunctionType):
        if not _is_foreign(value):
            yield from _variables(value)
    elif not _is_foreign(type(value)):
        with suppress(AttributeError):  # an object without a dictionary
            yield None, None, attributes_of(value)


def _variables(function: FunctionType) -> Iterator[tuple[Any, Any, Any]]:
    for cell in function.__closure__ or ():
        slot = Slot(cell, None)
        yield cell, None, slot.read()
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield function.__globals__, name, function.__globals__[name]
    yield None, None, vars(function)


def _is_foreign(value: type | Callable[..., Any]) -> bool:
    return str(value.__module__).partition(".")[0] in (*_FOREIGN, __name__.partition(".")[0])
