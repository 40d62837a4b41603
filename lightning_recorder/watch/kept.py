"""The state at the start of a batch, kept so that the batch can be run again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recorder.internals.autograd import version_of
from lightning_recorder.internals.module_tree import attributes_of, is_scripted, modules_of, parameters_of
from lightning_recorder.internals.preserve_state import own_copies
from lightning_recorder.internals.random_states import RandomStates
from lightning_recorder.internals.storage import is_uninitialized
from lightning_recorder.structure import ignore_unknown, iter_tensors
from lightning_recorder.watch.counters import Counters, Slot

__all__ = ["KeptBatch", "StateKeeper"]

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
        buffers: The values of the buffers of the model, by the table and the name of each.
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
        return any(version_of(tensor) != version for tensor, version in self.versions)

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
            current = table.get(name)
            # A new tensor, since the graph of the current step may need the current one.
            if current is None or current.shape != values.shape or not torch.equal(current, values):
                table[name] = values.clone()
        self.random.restore()
        now = [(slot, slot.read()) for slot, _ in self.counters]
        try:
            for slot, number in self.counters:
                slot.write(number)
            yield
        finally:
            for slot, number in now:
                slot.write(number)


def _tensors(batch: Any) -> Iterable[Tensor]:
    """Return the tensors of a batch. Looks into most batches without a search."""
    if type(batch) in (list, tuple) and all(type(each) is Tensor for each in batch):
        return batch  # type: ignore[no-any-return]  # tensors, as just checked
    return [each for _, each in iter_tensors(batch, "batch", unknown=ignore_unknown)]


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
            for name, buffer in attributes_of(each)["_buffers"].items()
            if buffer is not None and not is_uninitialized(buffer)
        ]
        self._left_bytes = _MOST_BYTES
        self._must_copy = False
        self._counters = Counters(modules_of(module))

    def keep(self, batch: Any, batch_idx: int, *, step: int, epoch: int) -> KeptBatch:
        """Return the state before a batch."""
        if self._must_copy:
            batch = own_copies({"batch": batch})["batch"]
        return KeptBatch(
            batch,
            batch_idx,
            step,
            epoch,
            RandomStates(self._devices),
            self._buffers(),
            [each for each in self._parameters if not each.requires_grad],
            versions=[] if self._must_copy else [(each, version_of(each)) for each in _tensors(batch)],
            counters=self._counters.keep(),
        )

    def check(self, kept: KeptBatch) -> None:
        """Check after a batch whether the step has changed it in place."""
        if not self._must_copy and kept.is_changed:
            self._must_copy = True

    def _buffers(self) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
        found = []
        for table, name in self._tables:
            buffer = table.get(name)
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
