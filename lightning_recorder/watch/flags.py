"""Flags on the device that tell for each module of a step whether its values were finite."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_recorder.taps import OutputGradientTap, OutputTap, Site
from lightning_recorder.watch.origin import Origin

__all__ = ["ModuleFlags", "StepFlags"]

_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Call:
    name: str
    number: int
    backward: bool
    batch: int
    """The place of the batch among the batches of the step."""


@dataclass(frozen=True)
class StepFlags:
    """The flags of one step."""

    calls: list[_Call]  # the module calls in the order of execution
    # A number for each of them that is finite if and only if its output, or the gradient of it, is, ``[calls]`` on the
    # device. ``None`` if no module was called.
    values: Tensor | None

    def origin(self) -> tuple[Origin, int] | None:
        """Return the module with the first bad value, and the place of its batch. Waits for the device.

        A NaN counts before infinities, which masks have, except for positive ones right before it: they became the NaN.
        In the backward pass, the module is the one whose output still had a finite gradient right before.
        """
        values = [] if self.values is None else self.values.tolist()
        first = next((index for index, value in enumerate(values) if math.isnan(value)), None)
        if first is None:
            first = next((index for index, value in enumerate(values) if math.isinf(value)), None)
        if first is None:
            return None
        while first and values[first - 1] == math.inf and self._is_next(first):
            first -= 1
        kind = "NaN" if math.isnan(values[first]) else "inf"
        call = self.calls[first]
        if call.backward and first and self._is_next(first):
            call = self.calls[first - 1]
        return Origin(call.name, call.number, call.backward, "", "", "", kind, 1), call.batch

    def _is_next(self, index: int) -> bool:
        """Return True if a call follows the one before it in the same pass over the same batch."""
        before, call = self.calls[index - 1 : index + 1]
        return (before.backward, before.batch) == (call.backward, call.batch)


class ModuleFlags:
    """Computes a flag for the outputs of all modules, and for the gradients of the outputs, in every step.

    Args:
        modules: The modules by name.

    Note:
        Waits for nothing. Each module output and each gradient is read once, by one kernel.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._taps = (OutputTap(modules, self._add_output), OutputGradientTap(modules, self._add_gradient))
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the flags of the step before."""
        self._calls: list[_Call] = []
        self._values: list[Tensor] = []
        self._batch = -1

    def begin_batch(self) -> None:
        """Begin a batch of the step."""
        self._batch += 1
        self._forward: Counter[Site] = Counter()
        self._backward: Counter[Site] = Counter()
        for tap in self._taps:
            tap.attach()

    def end_batch(self) -> None:
        """End a batch. The hooks stay, without effect."""
        for tap in self._taps:
            tap.pause()

    def remove(self) -> None:
        """Remove all hooks."""
        for tap in self._taps:
            tap.remove()

    def flags(self) -> StepFlags:
        """Return the flags of the step so far."""
        return StepFlags(list(self._calls), torch.stack(self._values) if self._values else None)

    def _add_output(self, site: Site, tensor: Tensor) -> None:
        self._forward[site] += 1
        self._add(_Call(site.name, self._forward[site], False, self._batch), tensor)

    def _add_gradient(self, site: Site, tensor: Tensor) -> None:
        number = max(1, self._forward[site] - self._backward[site])  # the gradient of the last call comes first
        self._backward[site] += 1
        self._add(_Call(site.name, number, True, self._batch), tensor)

    def _add(self, call: _Call, tensor: Tensor) -> None:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.is_floating_point() and tensor.numel() and tensor.layout is torch.strided:
            # A sum is the fastest kernel that keeps a NaN or an infinity.
            value = tensor.sum(dtype=torch.float32 if tensor.dtype in _LOW else None)
            device = self._values[0].device if self._values else value.device
            self._calls.append(call)
            self._values.append(value.to(device, torch.float32))
