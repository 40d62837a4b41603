"""Recorders of the gradients of module inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from typing_extensions import override

from lightning_recorder.taps import InputGradientTap, OutputGradientTap, Receiver, Tap
from lightning_recorder.tensors.base import Recorder

__all__ = ["BackwardInput", "BackwardOutput"]


class BackwardInput(Recorder):
    """Record the gradients of module inputs that flow through these modules.

    See :class:`~lightning_recorder.taps.InputGradientTap` for the exact definition and
    :class:`~lightning_recorder.tensors.Recorder` for the arguments. An input that does not require a gradient, such as
    the batch itself, has none.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> with BackwardInput().children(net) as recorder:
        ...     net(torch.ones(8, 4)).sum().backward()
        >>> [[tuple(grad.shape) for grad in data] for data in recorder]
        [[], [(8, 3)], [(8, 3)]]
    """

    @override
    def _make_tap(self, modules: Mapping[str, nn.Module], receive: Receiver) -> Tap:
        return InputGradientTap(modules, receive, condition=self.condition, strict=self.strict)


class BackwardOutput(Recorder):
    """Record the gradients of module outputs.

    See :class:`~lightning_recorder.taps.OutputGradientTap` for the exact definition and
    :class:`~lightning_recorder.tensors.Recorder` for the arguments.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> with BackwardOutput(reduction=torch.add).children(net, types=nn.Linear) as recorder:
        ...     for _ in range(2):
        ...         net(torch.ones(8, 4)).sum().backward()
        >>> recorder["2"][0]
        tensor([2., 2.])
    """

    @override
    def _make_tap(self, modules: Mapping[str, nn.Module], receive: Receiver) -> Tap:
        return OutputGradientTap(modules, receive, condition=self.condition, strict=self.strict)
