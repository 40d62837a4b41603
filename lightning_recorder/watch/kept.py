"""The state at the start of a batch, kept so that the batch can be run again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import filterfalse
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recorder.internals.autograd import counted_version, version_of, without_functions
from lightning_recorder.internals.module_tree import (
    attributes_of,
    is_scripted,
    modules_of,
    parameters_of,
    put_entry,
    table_of,
)
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.internals.preserve_state import own_copies
from lightning_recorder.internals.random_states import RandomStates
from lightning_recorder.internals.storage import is_uninitialized
from lightning_recorder.structure import ignore_unknown, iter_tensors
from lightning_recorder.watch.counters import Counters, Slot

__all__ = ["KeptBatch", "StateKeeper"]

_REQUIRES_GRAD = attrgetter("requires_grad")
# Kernels of normalizations write these buffers without increasing their version.
_UNVERSIONED = ("running_mean", "running_var", "num_batches_tracked")
_MOST_BYTES = 2**28  # of the copies of buffers; larger buffers are not copied


@dataclass
class KeptBatch:
    """A batch, and the state of the model and the random number generators before it.

    Args:
        batch: The batch, as the step received it.
        batch_idx: Its index in the epoch.
        step: The optimizer step that it is part of, counted like ``self.log`` does.
        epoch: The epoch.
        random: The states of the random number generators.
        buffers: The values of the buffers of the model, by the table and the name of each. A table may be of a class of
            the user, so its methods are not called.
        frozen: The parameters that did not require a gradient.
    """

    batch: Any
    batch_idx: int
    step: int
    epoch: int
    random: RandomStates
    buffers: list[tuple[dict[str, Tensor | None], str, Tensor]]
    frozen: list[nn.Parameter]
    losses: list[Tensor] = field(default_factory=list)
    """The losses of which gradients were computed, in order."""
    versions: list[tuple[Tensor, int | None]] = field(default_factory=list)
    counters: list[tuple[Slot, Any]] = field(default_factory=list)
    """The numbers in objects of the model that change from batch to batch."""
    indices: list[int] | None = None
    """The indices of its samples in the data set, if they are known."""

    @property
    def rows(self) -> int:
        """The first size of the first tensor of the batch that has a dimension: the number of its samples, or 0."""
        return next((len(tensor) for tensor, _ in self.versions if tensor.dim()), 0)

    @property
    def is_changed(self) -> bool:
        """True if the step has changed a tensor of the batch in place, so that it cannot be run again."""
        with without_functions():
            for tensor, version in self.versions:
                if version is not None and counted_version(tensor) != version:
                    return True
        return False

    @contextmanager
    def restored(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Set buffers, ``requires_grad``, counters and random number generators to the state before the batch.

        The caller restores them to their current state afterwards, except for the counters, which are restored here.
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


def _versions(batch: Any) -> list[tuple[Tensor, int | None]]:
    """Return the tensors of a batch, with the number of in-place writes to each."""
    if type(batch) in (list, tuple) and set(map(type, batch)) == {Tensor}:  # most batches, without a search
        tensors = batch
    else:
        tensors = [each for _, each in iter_tensors(batch, "batch", unknown=ignore_unknown)]
    try:
        return list(zip(tensors, map(counted_version, tensors), strict=True))
    except RuntimeError:  # tensors of inference mode do not count
        return [(each, version_of(each)) for each in tensors]


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
        with without_functions():  # a function mode would be called for each property of a tensor that is read
            versions = [] if self.must_copy else _versions(batch)
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
