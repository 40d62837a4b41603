"""Taps for the parameters of modules and their gradients."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_recorder.names import own_parameters
from lightning_recorder.taps.base import Tap, TapHook
from lightning_recorder.taps.gradient import GradientHook, GradientTap

__all__ = ["ParameterGradientTap", "ParameterTap"]


class ParameterTap(Tap):
    """Records the parameters of the modules at each call, with the values that the call used.

    Parameters of submodules do not belong to a module, except for submodules that it never calls: lists and
    dictionaries of parameters, parametrizations from ``torch.nn.utils.parametrize``, and the projection of
    ``nn.MultiheadAttention``. A parameter that two modules share is recorded for both.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> import torch
        >>> with ParameterTap(dict(net.named_children()), lambda site, tensor: print(*site, tuple(tensor.shape))):
        ...     _ = net(torch.ones(5, 2))
        0 weight (3, 2)
        0 bias (3,)
    """

    @override
    def _register(self, name: str, module: nn.Module) -> None:
        self._keep(module.register_forward_hook(TapHook(self, name, self._record)))

    def _record(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._pass_on(name, own_parameters(module))


class ParameterGradientTap(GradientTap):
    """Records the gradient that each backward pass adds to the parameters of the modules.

    It is the gradient of that pass alone, on this rank, with the scale of the differentiated loss. In contrast,
    ``.grad`` is the sum of these gradients since it was last zeroed, and the mean over the ranks after DDP.
    :class:`ParameterTap` defines the parameters that belong to a module. A frozen parameter has no gradient. A
    parameter that is unfrozen while the tap is attached is recorded from the next time the tap is attached.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 1)
        >>> with ParameterGradientTap({"head": net}, lambda site, grad: print(*site, grad.tolist())):
        ...     net(torch.tensor([[2.0, 3.0]])).sum().backward()
        head bias [1.0]
        head weight [[2.0, 3.0]]
    """

    @override
    def _register(self, name: str, module: nn.Module) -> None:
        if any(is_lazy(parameter) for _, parameter in own_parameters(module)):
            # Lazy parameters do not support hooks before the first call of the module.
            self._keep(module.register_forward_hook(TapHook(self, name, self._record)))
        else:
            self._record(name, module)

    def _record(self, name: str, module: nn.Module, *passed: Any) -> None:
        for path, parameter in own_parameters(module):
            if parameter.requires_grad:
                self._register_on_tensor(parameter, GradientHook(self, name, path))
