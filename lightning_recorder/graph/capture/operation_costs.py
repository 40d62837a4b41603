"""The costs of each function: wall time, floating-point operations, and memory kept for the backward pass."""

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
    """A placeholder for a tensor among the arguments of a function."""

    meta: TensorMeta


class _Call(NamedTuple):
    """A function call whose floating-point operations are counted at the end."""

    node: int
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    times: int
    """The number of calls that this entry represents: more than 1 under ``torch.vmap``."""


class Costs:
    """Measures the costs of the functions of a recording.

    torch's ``FlopCounterMode`` counts the floating-point operations. After the step, it runs each function once more on
    tensors that have shapes but no values. Equal calls run once. Matrix products, convolutions and attention count two
    operations for each multiply-add. Other functions count as 0.

    The parameters and buffers of the model do not count as memory kept for the backward pass.
    """

    def __init__(self, builder: GraphBuilder, origins: TensorOrigins, root: nn.Module) -> None:
        self._builder = builder
        self._origins = origins
        self._root = root
        self._calls: list[_Call] = []
        self._own: set[int] | None = None
        """The storage addresses of the model's parameters and buffers."""
        self._saved: set[int] = set()
        self.overhead_s = 0.0
        """The time spent on the recording itself, in seconds."""

    def forget_saved(self) -> None:
        """Forget the memory saved so far, because a backward pass releases it."""
        self._saved.clear()

    def note(
        self, node: int | None, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], seconds: float
    ) -> None:
        """Add the wall time of a function call to its node and keep the call for :meth:`finish`.

        ``node`` is None for a function that is not part of the model, which is ignored.
        """
        if node is None or self._builder.nodes[node].kind != "op":
            return
        draft = self._builder.nodes[node]
        draft.duration_ms = (draft.duration_ms or 0.0) + seconds * 1e3
        with contextlib.suppress(_UnknownArgumentError):
            shapes = {name: _shapes(each) for name, each in kwargs.items()}
            times = vmap_numel(tensors_in((*args, *kwargs.values())))
            self._calls.append(_Call(node, func, _shapes(args), shapes, times))

    def note_saved(self, node: int, results: Iterable[Tensor]) -> None:
        """Add the memory that autograd keeps for a node. ``results`` are the outputs of the node."""
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
        """Count the floating-point operations of each function, and sum the costs over each module call."""
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
    """Raised for an argument that may hold tensors, since the recording must not keep tensors alive."""


def _shapes(value: Any) -> Any:
    """Return arguments with each tensor replaced by its shape."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return _Shape(meta_of(value))
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [_shapes(each) for each in value] if isinstance(value, list) else tuple(map(_shapes, value))
    raise _UnknownArgumentError(type(value).__name__)


def _tensors(value: Any) -> Any:
    """Return arguments with each shape replaced by a tensor without values."""
    if isinstance(value, _Shape):
        dtype = getattr(torch, value.meta.dtype)
        return torch.empty(value.meta.shape, dtype=dtype, device="meta")
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [_tensors(each) for each in value] if isinstance(value, list) else tuple(map(_tensors, value))
    return value


def _count(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of floating-point operations of a call; ``None`` if it cannot run on tensors without values."""
    # Imported here because this module imports Triton, which takes a second and 76 MB.
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    try:
        given = {name: _tensors(each) for name, each in kwargs.items() if name not in ("device", "out")}
        with counter:
            func(*_tensors(args), **given)
    except Exception:  # noqa: BLE001 - a function may need values, or another device
        return None
    return int(counter.get_total_flops())
