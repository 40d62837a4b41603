"""Flags on the device that show for each module call of a step if its values were finite."""

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
    """The index of the batch in the step."""


@dataclass(frozen=True)
class StepFlags:
    """The flags of one step."""

    calls: list[_Call]  # the module calls in the order of execution
    # ``[calls]`` on the device: a number for each call, finite only if its output, or the gradient of its output, is
    # finite. ``None`` if no module was called.
    values: Tensor | None

    def origin(self) -> tuple[Origin, int] | None:
        """Return the module with the first bad value, and the index of its batch in the step. Waits for the device.

        The first NaN takes precedence over infinities, because masks contain infinities. Positive infinities directly
        before the NaN are its cause, so the module of the first of these infinities is returned. In the backward pass,
        the module is the last one whose output still had a finite gradient.
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
        """Return True if a call and the call before it are in the same pass over the same batch."""
        before, call = self.calls[index - 1 : index + 1]
        return (before.backward, before.batch) == (call.backward, call.batch)


class ModuleFlags:
    """Computes flags for the outputs of all modules, and for the gradients of these outputs, in every step.

    Args:
        modules: The modules by name.

    Note:
        Never waits for the device. Each module output and each gradient is read once, by one kernel.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._taps = (OutputTap(modules, self._add_output), OutputGradientTap(modules, self._add_gradient))
        self.begin_step()

    def begin_step(self) -> None:
        """Discard the flags of the previous step."""
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
        """End a batch. The hooks stay registered but do nothing until the next batch."""
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
            # A sum is the fastest kernel whose result is not finite if any value is not.
            value = tensor.sum(dtype=torch.float32 if tensor.dtype in _LOW else None)
            device = self._values[0].device if self._values else value.device
            self._calls.append(call)
            self._values.append(value.to(device, torch.float32))
