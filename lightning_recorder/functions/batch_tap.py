"""A tap for the tensors of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_recorder.functions.losses import some_of
from lightning_recorder.functions.tap import ChosenFunctions
from lightning_recorder.internals.autograd import without_functions
from lightning_recorder.structure import ignore_unknown, iter_tensors
from lightning_recorder.taps import Receiver, Tap

__all__ = ["BatchTap"]

_MOST_TENSORS = 16
_NAME = "batch"


class BatchTap(Tap):
    """Records the tensors of each batch under their names in a recorded graph, such as ``batch[0]``.

    The sites of batches have no module. At most 16 tensors are recorded, and only the first samples of a large tensor.
    Tensor subclasses that implement operations themselves are ignored, except ``DTensor``.

    Args:
        chosen: The functions to record. Batches are recorded if losses are recorded and no sites are named.
        receive: The receiver, as for :class:`~lightning_recorder.taps.Tap`.
        options: The other arguments of :class:`~lightning_recorder.taps.Tap`.

    Example:
        >>> import torch
        >>> chosen = ChosenFunctions(torch.nn.Linear(2, 2), ["cross_entropy"])
        >>> with BatchTap(chosen, lambda site, tensor: print(*site, tuple(tensor.shape))) as tap:
        ...     tap.observe({"image": torch.ones(4, 2), "label": torch.zeros(4)})
         batch.image (4, 2)
         batch.label (4,)
    """

    def __init__(self, chosen: ChosenFunctions, receive: Receiver, **options: Any) -> None:
        super().__init__({}, receive, **options)
        self._chosen = chosen

    @override
    def _register(self, name: str, module: nn.Module) -> None:
        pass  # there are no modules

    @override
    def attach(self) -> None:
        self._attached = True

    @override
    def remove(self) -> None:
        self._attached = False

    def observe(self, batch: Any) -> None:
        """Record the tensors of a batch."""
        if self._chosen.has_batches:
            self._guarded(_NAME, None, self._record, batch)

    def _record(self, name: str, batch: Any) -> None:
        # Disable function modes: otherwise, reading each property of the tensors would call the active mode.
        with without_functions():
            self._pass_on("", islice(self._readable(batch), _MOST_TENSORS))

    def _readable(self, batch: Any) -> Iterator[tuple[str, Tensor]]:
        seen: set[int] = set()
        for path, tensor in iter_tensors(batch, _NAME, unknown=ignore_unknown):
            has_values = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ or hasattr(tensor, "to_local")
            # A tensor that occurs twice in the batch is one input of the graph.
            if has_values and id(tensor) not in seen and self._chosen.has_batch(path):
                seen.add(id(tensor))
                yield path, some_of(tensor)
