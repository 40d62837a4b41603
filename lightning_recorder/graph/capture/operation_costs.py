"""The measured costs of each function: wall time, floating-point operations, and memory kept for the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_recorder.graph.capture.builder import GraphBuilder, meta_of
from lightning_recorder.graph.capture.function_calls import PLAIN, tensors_in
from lightning_recorder.graph.capture.origins import TensorOrigins
from lightning_recorder.graph.model import TensorMeta
from lightning_recorder.internals.autograd import saved_tensors, vmap_numel
from lightning_recorder.internals.module_tree import buffers_of, parameters_of
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.internals.preserve_state import same_random_numbers
from lightning_recorder.internals.storage import address_of, storage_of

__all__ = ["Costs"]


class _Shape(NamedTuple):
    """Stands for a tensor among the arguments of a function."""

    meta: TensorMeta


class _Call(NamedTuple):
    """A call of a function whose operations are counted at the end."""

    node: int
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    times: int
    """The number of calls for which it stands, under ``torch.vmap``."""


class Costs:
    """Measures the functions of a recording.

    Floating-point operations are counted by torch's ``FlopCounterMode``. It runs each function once more, after the
    step, on tensors that have shapes but no values; equal calls run once. It counts products of matrices, convolutions
    and attention, with two operations for each multiplication with addition; other functions count as 0.

    The memory of the model's own tensors does not count as kept for the backward pass.
    """

    def __init__(self, builder: GraphBuilder, origins: TensorOrigins, root: nn.Module) -> None:
        self._builder = builder
        self._origins = origins
        self._root = root
        self._calls: list[_Call] = []
        self._own: set[int] | None = None
        """The addresses of the model's tensors."""
        self._saved: set[int] = set()
        self.overhead_s = 0.0
        """The time that the recording itself has taken, in seconds."""

    def forget_saved(self) -> None:
        """Forget the memory that was saved so far; a backward pass releases it."""
        self._saved.clear()

    def note(
        self, node: int | None, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], seconds: float
    ) -> None:
        """Measure a function that was recorded as a node; ``None`` if it is not part of the model."""
        if node is None or self._builder.nodes[node].kind != "op":
            return
        draft = self._builder.nodes[node]
        draft.duration_ms = (draft.duration_ms or 0.0) + seconds * 1e3
        with contextlib.suppress(_UnknownArgumentError):
            shapes = {name: _shapes(each) for name, each in kwargs.items()}
            times = vmap_numel(tensors_in((*args, *kwargs.values())))
            self._calls.append(_Call(node, func, _shapes(args), shapes, times))

    def note_saved(self, node: int, results: Iterable[Tensor]) -> None:
        """Add the memory that the part of the backward graph of a node keeps; ``results`` are its outputs."""
        if self._own is None:
            tensors = (*parameters_of(self._root), *buffers_of(self._root))
            self._own = {address_of(storage) for each in tensors if (storage := storage_of(each)) is not None}
        total = 0
        for each in self._origins.autograd_nodes(results, node):
            for tensor in saved_tensors(each):
                storage = storage_of(tensor)
                address = 0 if storage is None else address_of(storage)
                if storage is not None and address not in self._own and address not in self._saved:
                    self._saved.add(address)
                    total += storage.nbytes()
        self._builder.nodes[node].saved_bytes = (self._builder.nodes[node].saved_bytes or 0) + total

    def finish(self) -> None:
        """Count the floating-point operations of the functions, and add up those inside each module call."""
        nodes = self._builder.nodes
        known: dict[str, int | None] = {}
        calls, self._calls = self._calls, []
        if not calls:
            return
        with pause_recording(), same_random_numbers(()):
            for number, func, args, kwargs, times in calls:
                key = repr((func, args, kwargs))
                if key not in known:
                    known[key] = _count(func, args, kwargs)
                counted = known[key]
                if counted is not None:
                    nodes[number].flops = (nodes[number].flops or 0) + times * counted
        for number in range(len(nodes) - 1, 0, -1):
            node = nodes[number]
            around = None if node.parent is None else nodes[node.parent]
            if around is not None and node.flops is not None:
                around.flops = (around.flops or 0) + node.flops
            if around is not None and node.saved_bytes is not None:
                around.saved_bytes = (around.saved_bytes or 0) + node.saved_bytes


class _UnknownArgumentError(Exception):
    """An argument may hold tensors, which must not be kept alive."""


def _shapes(value: Any) -> Any:
    """Return arguments with shapes in place of tensors."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return _Shape(meta_of(value))
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [_shapes(each) for each in value] if isinstance(value, list) else tuple(map(_shapes, value))
    raise _UnknownArgumentError(type(value).__name__)


def _tensors(value: Any) -> Any:
    """Return arguments with tensors that have no values in place of shapes."""
    if isinstance(value, _Shape):
        dtype = getattr(torch, value.meta.dtype)
        return torch.empty(value.meta.shape, dtype=dtype, device="meta")
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [_tensors(each) for each in value] if isinstance(value, list) else tuple(map(_tensors, value))
    return value


def _count(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of operations of a call; ``None`` if it cannot run without values."""
    # Imported here because it imports Triton, which takes a second and 76 MB in every program.
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    try:
        given = {name: _tensors(each) for name, each in kwargs.items() if name not in ("device", "out")}
        with counter:
            func(*_tensors(args), **given)
    except Exception:  # noqa: BLE001 - a function may need values, or another device
        return None
    return int(counter.get_total_flops())
