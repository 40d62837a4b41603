"""Recorders of module inputs and outputs, and of their gradients."""

from __future__ import annotations

from functools import partial

from lightning_recorder.taps import InputGradientTap, InputTap, OutputGradientTap, OutputTap
from lightning_recorder.tensors.base import Recorder

__all__ = ["BackwardInput", "BackwardOutput", "ForwardInput", "ForwardOutput", "ForwardPre"]


class ForwardPre(Recorder):
    """Record module inputs in their state before the call.

    Takes the arguments of :class:`~lightning_recorder.tensors.Recorder`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> recorder = ForwardPre(reduction=torch.add).children(net, indices=(1, 2))
        >>> for _ in range(5):
        ...     _ = net(torch.ones(8, 4))
        >>> [tuple(data.shape) for data in recorder], recorder.samples(0), recorder.calls(0)
        ([(8, 3), (8, 3)], 40, 5)
        >>> recorder.detach()
    """

    _tap = InputTap


class ForwardInput(Recorder):
    """Record module inputs in their state after the call.

    Takes the arguments of :class:`~lightning_recorder.tensors.Recorder`.

    The results differ from :class:`ForwardPre` if a module changes its input in place. The inputs of a module that
    raises are not recorded.
    """

    _tap = staticmethod(partial(InputTap, after=True))


class ForwardOutput(Recorder):
    """Record module outputs when the module returns.

    Takes the arguments of :class:`~lightning_recorder.tensors.Recorder`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_recorder.reductions import RunningMoments
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True))
        >>> with ForwardOutput(reduction=RunningMoments).modules(net, types=nn.ReLU) as recorder:
        ...     _ = net(torch.zeros(8, 4))
        >>> float(recorder["1"]["count"])
        24.0
    """

    _tap = OutputTap


class BackwardInput(Recorder):
    """Record the gradients of module inputs that flow back through the modules.

    See :class:`~lightning_recorder.taps.InputGradientTap` for the exact definition and
    :class:`~lightning_recorder.tensors.Recorder` for the arguments. Inputs that do not require a gradient, such as the
    batch itself, are not recorded.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> with BackwardInput().children(net) as recorder:
        ...     net(torch.ones(8, 4)).sum().backward()
        >>> [[tuple(grad.shape) for grad in data] for data in recorder]
        [[], [(8, 3)], [(8, 3)]]
    """

    _tap = InputGradientTap


class BackwardOutput(Recorder):
    """Record the gradients of module outputs.

    See :class:`~lightning_recorder.taps.OutputGradientTap` for the exact definition and
    :class:`~lightning_recorder.tensors.Recorder` for the arguments.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> with BackwardOutput(reduction=torch.add).children(net, types=nn.Linear) as recorder:
        ...     for _ in range(2):
        ...         net(torch.ones(8, 4)).sum().backward()
        >>> recorder["2"][0]
        tensor([2., 2.])
    """

    _tap = OutputGradientTap
