"""Copies of the tensors of one step, within a size limit."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_recorder.dumps import can_hold
from lightning_recorder.errors import warn
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.names import split_call
from lightning_recorder.statistics.sites import SiteStates
from lightning_recorder.statistics.snapshot import Snapshot
from lightning_recorder.taps import InputGradientTap, InputTap, OutputGradientTap, OutputTap, Site, Tap

__all__ = ["TENSOR_KINDS", "BufferPool", "Captured", "TensorCapture"]

_TAPS: dict[str, type[Tap]] = {
    "inputs": InputTap,
    "outputs": OutputTap,
    "input_gradients": InputGradientTap,
    "output_gradients": OutputGradientTap,
}

TENSOR_KINDS = tuple(_TAPS)
"""The kinds of module tensors that can be copied."""


_KEPT_STEPS = 4  # number of steps whose copies may exist at the same time

Kind = tuple[tuple[int, ...], torch.dtype, torch.device]


class BufferPool:
    """A pool of tensors to copy into, which reuses returned tensors.

    The copies of consecutive steps usually have the same shapes. On a CPU, writing to new memory takes several times as
    long as the copy itself. Tensors that were unused for several steps, for example because shapes vary, are freed.
    """

    def __init__(self) -> None:
        self._free: dict[Kind, list[tuple[int, Tensor]]] = {}
        self._given_back = 0  # number of calls of give_back
        self._lock = threading.Lock()

    def take(self, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor with undefined contents."""
        kind = (tuple(shape), dtype, device)
        with self._lock:
            free = self._free.get(kind)
            if free:
                return free.pop()[1]
        with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
            return torch.empty(kind[0], dtype=dtype, device=device)

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Return the tensors of one step to the pool. The caller must no longer use them."""
        with self._lock:
            self._given_back += 1
            for tensor in tensors:
                kind = (tuple(tensor.shape), tensor.dtype, tensor.device)
                self._free.setdefault(kind, []).append((self._given_back, tensor))
            oldest = self._given_back - _KEPT_STEPS
            fresh = {kind: [each for each in free if each[0] > oldest] for kind, free in self._free.items()}
            self._free = {kind: free for kind, free in fresh.items() if free}


@dataclass
class Captured:
    """The tensors of one step.

    Args:
        tensors: The copies by name, on their original devices. The name is ``<module>/<path>``, with the suffix
            ``.grad`` for gradients and ``#2``, ``#3``, … for repeated calls of a module. A gradient has the number of
            the forward call. If a second backward pass goes through the same call, the name of its gradient ends with
            ``~2``.
        left_out: The names of tensors that exceeded the size limit.
        unsupported: The names of tensors with a dtype that the file format does not support.
        snapshot: The statistics of the complete, unrounded tensors, if requested.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    snapshot: Snapshot | None = None


class TensorCapture:
    """Copy the tensors of modules while attached. A context manager.

    Args:
        modules: The modules by name.
        kinds: The kinds of tensors, from ``TENSOR_KINDS``.
        samples: The number of leading rows of each tensor to copy; by default all.
        dtype: The dtype to which floating-point tensors are rounded; by default they are unchanged.
        max_bytes: The limit in bytes per step. Tensors beyond the limit are left out.
        statistics: True to compute statistics as well.
        buffers: The pool that provides the memory of the copies.
        strict: Raise errors that occur inside a hook.

    Note:
        The copies stay on the device of the tensors, so the device is not synchronized.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with TensorCapture({"relu": net[1]}, ["inputs", "outputs"], samples=1) as capture:
        ...     _ = net(torch.ones(5, 2))
        >>> {name: tuple(tensor.shape) for name, tensor in capture.take().tensors.items()}
        {'relu/in[0]': (1, 2), 'relu/out': (1, 2)}
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        kinds: Iterable[str] = ("outputs",),
        *,
        samples: int | None = None,
        dtype: torch.dtype | None = None,
        max_bytes: int | None = None,
        statistics: bool = False,
        buffers: BufferPool | None = None,
        strict: bool = False,
    ) -> None:
        self.modules = dict(modules)
        self._buffers = buffers or BufferPool()
        self._has_warned = False
        self.factor = 1.0
        """The factor for gradients: the inverse of a loss scale."""
        self.taps = [_TAPS[kind](modules, partial(self._receive, kind), strict=strict) for kind in kinds]
        for tap in self.taps:
            tap.per_call = True
        self.attached = False
        """True while the hooks are registered."""
        self._samples, self._dtype, self._max_bytes = samples, dtype, max_bytes
        self._states = SiteStates(strict=strict) if statistics else None
        self._captured = Captured()
        self._seen: Counter[str] = Counter()
        self._nbytes = 0

    @property
    def ran_eagerly(self) -> tuple[str, ...]:
        """The names of compiled functions that ran eagerly because of the hooks."""
        return tuple(dict.fromkeys(name for tap in self.taps for name in tap.ran_eagerly))

    def attach(self) -> None:
        """Register the hooks."""
        self.attached = True
        for tap in self.taps:
            tap.attach()

    def remove(self) -> None:
        """Remove the hooks."""
        self.attached = False
        for tap in self.taps:
            tap.remove()

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def take(self) -> Captured:
        """Return the copies since the last call and clear them."""
        captured = self._captured
        if self._states is not None:
            # The copy is asynchronous. Whoever reads the snapshot waits for the device.
            captured.snapshot = self._states.snapshot(self.modules, "cpu")
            self._states.reset()
        self.drop()
        return captured

    def drop(self) -> None:
        """Discard the copies."""
        self._captured = Captured()
        self._seen.clear()
        for tap in self.taps:
            tap.restart_calls()
        self._nbytes = 0
        if self._states is not None:
            self._states.reset()

    def _receive(self, kind: str, site: Site, tensor: Tensor) -> None:
        tensor = getattr(tensor, "to_local", lambda: tensor)()  # the local shard of a DTensor
        if tensor.device.type == "meta":
            return
        is_gradient = kind.endswith("gradients")
        factor = self.factor if is_gradient else 1.0
        path, call = split_call(site.path)
        if is_gradient:
            path += ".grad"
        if self._states is not None:
            self._states.add(Site(site.name, path), tensor, factor)
        name = f"{_plain(site.name)}/{path}{call}"
        self._seen[name] += 1
        if self._seen[name] > 1:
            name = f"{name}~{self._seen[name]}"
        tensor = _rows(tensor, self._samples)
        if factor != 1.0:  # unscaled gradients can underflow in half precision
            tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * factor
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        if not can_hold(dtype):
            self._leave_unsupported(name, dtype)
            return
        nbytes = tensor.numel() * dtype.itemsize
        if self._max_bytes is not None and self._nbytes + nbytes > self._max_bytes:
            self._captured.left_out.append(name)
            return
        self._nbytes += nbytes
        with torch.no_grad(), pause_recording():
            copy = self._buffers.take(tensor.shape, dtype, tensor.device)
            self._captured.tensors[name] = copy.copy_(tensor)

    def _leave_unsupported(self, name: str, dtype: torch.dtype) -> None:
        self._captured.unsupported.append(name)
        if not self._has_warned:
            self._has_warned = True
            warn(f"{name!r} is not dumped, nor are other tensors of {dtype}, which safetensors does not support")


def _plain(name: str) -> str:
    """Return a module's name in a form that the file format supports."""
    return (name or "(root)").encode("utf-8", "replace").decode("utf-8")


def _rows(tensor: Tensor, samples: int | None) -> Tensor:
    """Return the first rows of a tensor as a dense tensor."""
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    elif tensor.is_nested:
        tensor = tensor.to_padded_tensor(0.0)
    elif tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor if samples is None or tensor.dim() == 0 else tensor[:samples]
