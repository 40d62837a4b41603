"""Keep the state at the start of a batch, so that the batch can be run again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import filterfalse
from operator import attrgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_recorder.internals.autograd import counted_version, version_of, without_functions
from lightning_recorder.internals.module_tree import (
    attributes_of,
    is_a,
    is_scripted,
    modules_of,
    package_of,
    parameters_of,
    put_entry,
    table_of,
)
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.internals.preserve_state import own_copies
from lightning_recorder.internals.random_states import RandomStates
from lightning_recorder.internals.storage import is_uninitialized
from lightning_recorder.structure import ignore_unknown, iter_tensors

__all__ = ["Counters", "KeptBatch", "StateKeeper", "are_written", "batch_versions"]

_NUMBERS = (int, float, bool)
_SKIPPED = (str, bytes, type, ModuleType, Tensor, nn.Module)
_FOREIGN = ("torch", "lightning", "pytorch_lightning", "numpy")  # objects of these packages are not searched
# Exact types only: reading a missing key may change an instance of a subclass, such as a defaultdict.
_CONTAINERS = (dict, list, OrderedDict, Counter)
_MOST_ENTRIES = 64  # longer lists and dictionaries are not searched
_DEEPEST = 6


class Slot(NamedTuple):
    """A reference to a number: a key of a dictionary, an index of a list, or the variable of a closure.

    Args:
        owner: The dictionary, the list or the cell.
        key: The key or the index; ``None`` for a cell.
    """

    owner: Any
    key: Any

    def read(self) -> Any:
        """Return the number, or ``None`` if the value no longer exists."""
        try:
            return self.owner.cell_contents if self.key is None else self.owner[self.key]
        except (KeyError, IndexError, ValueError):
            return None

    def write(self, value: Any) -> None:
        """Set the number, unless the value no longer exists."""
        if self.read() is None:
            return
        if self.key is None:
            self.owner.cell_contents = value
        else:
            self.owner[self.key] = value


class Counters:
    """Finds the numbers that change from batch to batch, so that a batch can be run again with the same numbers.

    A model, a hook or a function may count its calls and depend on the count. At the first batch, all numbers are
    collected: attributes of modules, closure variables of functions and hooks, the global variables that these use, and
    entries of lists and dictionaries in any of them. From the second batch on, the numbers that have changed are kept.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._first: list[tuple[Slot, Any]] | None = None
        self._slots: list[Slot] | None = None
        self.are_none = False
        """True if no number changes from batch to batch."""

    def keep(self) -> list[tuple[Slot, Any]]:
        """Return the current values of the changing numbers."""
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
    """Yield a slot for each number in an object, such as the items of a list, up to a limited depth."""
    if depth > _DEEPEST or id(value) in seen or is_a(value, _SKIPPED):
        return
    seen.add(id(value))
    for owner, key, each in _parts(value):
        if any(type(each) is kind for kind in _NUMBERS) and owner is not None:
            yield Slot(owner, key)
        else:
            yield from _inside(each, seen, depth + 1)


def _parts(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the values in an object, each with its owner and its key. The owner is None if the value cannot be set."""
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
        with suppress(AttributeError):  # an object without ``__dict__``
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
    package = package_of(value) if isinstance(value, type) else str(value.__module__).partition(".")[0]
    return package in (*_FOREIGN, __name__.partition(".")[0])


_REQUIRES_GRAD = attrgetter("requires_grad")
# Normalization kernels write to these buffers without increasing their version counters.
_UNVERSIONED = ("running_mean", "running_var", "num_batches_tracked")
_MOST_BYTES = 2**28  # the maximum size of all copies of buffers; further buffers are not copied


@dataclass
class KeptBatch:
    """A batch, and the state of the model and the random number generators before it."""

    batch: Any  # the batch, as the step received it
    batch_idx: int  # the index of the batch in the epoch
    step: int  # the optimizer step of the batch, as counted by ``self.log``
    epoch: int
    random: RandomStates  # the states of the random number generators
    # for each buffer, the dictionary that holds it, its name and its values; write with put_entry, since the dictionary
    # may be an instance of a user's class
    buffers: list[tuple[dict[str, Tensor | None], str, Tensor]]
    frozen: list[nn.Parameter]  # the parameters that did not require a gradient
    losses: list[Tensor] = field(default_factory=list)
    """The losses with a backward pass, in order."""
    versions: list[tuple[Tensor, int | None]] = field(default_factory=list)
    counters: list[tuple[Slot, Any]] = field(default_factory=list)
    """The numbers in objects of the model that change from batch to batch."""
    indices: list[int] | None = None
    """The indices of the samples in the data set, if they are known."""

    @property
    def rows(self) -> int:
        """The number of samples: the first size of the first tensor of the batch that has a dimension, or 0."""
        return next((len(tensor) for tensor, _ in self.versions if tensor.dim()), 0)

    @property
    def is_changed(self) -> bool:
        """True if the step has changed a tensor of the batch in place, so that the step cannot be run again."""
        with without_functions():
            return are_written(self.versions)

    @contextmanager
    def restored(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Set buffers, ``requires_grad``, counters and random number generators to the state before the batch.

        On exit, only the counters are set back to their current values. The caller restores everything else.
        """
        frozen = set(map(id, self.frozen))
        for parameter in parameters:
            if parameter.requires_grad != (id(parameter) not in frozen):
                parameter.requires_grad_(id(parameter) not in frozen)
        for table, name, values in self.buffers:
            current = dict.get(table, name)
            # A new tensor, since the graph of the current step may need the current one.
            if current is None or current.shape != values.shape or not torch.equal(current, values):
                put_entry(table, name, values.clone())
        self.random.restore()
        now = [(slot, slot.read()) for slot, _ in self.counters]
        try:
            for slot, number in self.counters:
                slot.write(number)
            yield
        finally:
            for slot, number in now:
                slot.write(number)


def batch_versions(batch: Any) -> list[tuple[Tensor, int | None]]:
    """Return the tensors of a batch, each with its version, the number of in-place writes to it."""
    tensors = [each for _, each in iter_tensors(batch, "batch", unknown=ignore_unknown)]
    try:
        return list(zip(tensors, map(counted_version, tensors), strict=True))
    except RuntimeError:  # inference tensors have no version counter
        return [(each, version_of(each)) for each in tensors]


def are_written(versions: Iterable[tuple[Tensor, int | None]]) -> bool:
    """Return True if torch has written to one of these tensors since its version was read."""
    return any(version is not None and counted_version(tensor) != version for tensor, version in versions)


class StateKeeper:
    """Keeps the state before each batch at little cost.

    The batch is kept by reference. If a step changes a batch in place, that step cannot be run again, and the batches
    of all later steps are copied. A buffer is copied when it has changed since its last copy.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._parameters = list(parameters_of(module))
        self._devices = [device] if device.type != "cpu" else []
        self._copies: dict[tuple[int, str], tuple[Tensor, int | None, Tensor]] = {}
        self._tables = [
            (attributes_of(each)["_buffers"], name)
            for each in modules_of(module)
            if not is_scripted(each)
            for name, buffer in table_of(each, "_buffers").items()
            if buffer is not None and not is_uninitialized(buffer)
        ]
        self._left_bytes = _MOST_BYTES
        self.must_copy = False
        """Copy all later batches: a step has changed its batch in place."""
        self._counters = Counters(modules_of(module))

    def keep(self, batch: Any, batch_idx: int, *, step: int, epoch: int) -> KeptBatch:
        """Return the state before a batch."""
        if self.must_copy:
            with pause_recording():
                batch = own_copies({"batch": batch})["batch"]
        with without_functions():  # reading a property of a tensor would call an active function mode
            is_plain = type(batch) in (list, tuple) and set(map(type, batch)) == {Tensor} and not self.must_copy
            versions: list[tuple[Tensor, int | None]] | None
            try:  # the common case of a plain batch, without further calls
                versions = list(zip(batch, map(counted_version, batch), strict=True)) if is_plain else None
            except RuntimeError:  # inference tensors have no version counter
                versions = None
            if versions is None:
                versions = [] if self.must_copy else batch_versions(batch)
            frozen = list(filterfalse(_REQUIRES_GRAD, self._parameters))
        return KeptBatch(
            batch,
            batch_idx,
            step,
            epoch,
            RandomStates(self._devices),
            self._buffers() if self._tables else [],
            frozen,
            versions=versions,
            counters=[] if self._counters.are_none else self._counters.keep(),
        )

    def _buffers(self) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
        found = []
        with pause_recording():
            for table, name in self._tables:
                buffer = dict.get(table, name)
                if buffer is None:
                    continue
                known = self._copies.get((id(table), name))
                version = version_of(buffer)
                is_same = known is not None and known[0] is buffer and known[1] == version and name not in _UNVERSIONED
                if known is None or not is_same:
                    if known is None and not self._has_room(buffer):
                        continue
                    known = self._copies[id(table), name] = buffer, version, buffer.detach().clone()
                found.append((table, name, known[2]))
        return found

    def _has_room(self, buffer: Tensor) -> bool:
        size = buffer.numel() * buffer.element_size()
        if size > self._left_bytes:
            return False
        self._left_bytes -= size
        return True
