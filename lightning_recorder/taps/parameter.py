"""The parameters of modules and their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_recorder.autograd import in_backward
from lightning_recorder.taps.base import Tap, TapHook
from lightning_recorder.taps.gradient import GradientHook, GradientTap

__all__ = ["ParameterGradientTap", "ParameterTap", "own_parameters"]


class ParameterTap(Tap):
    """Hands over the parameters of the modules at each call, with the values that the call used.

    Those of its submodules are no parameters of a module, but for submodules that are a part of it: what
    ``torch.nn.utils.parametrize`` puts in, and the projection of ``nn.MultiheadAttention``. A parameter that two
    modules share is handed over by both.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> import torch
        >>> with ParameterTap(dict(net.named_children()), lambda site, tensor: print(*site, tuple(tensor.shape))):
        ...     _ = net(torch.ones(5, 2))
        0 weight (3, 2)
        0 bias (3,)
    """

    @override
    def _put_on(self, name: str, module: nn.Module) -> None:
        self._keep(module.register_forward_hook(TapHook(self, name, self._see)))

    def _see(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not in_backward():
            self._hand_over(name, own_parameters(module))


class ParameterGradientTap(GradientTap):
    """Hands over what each backward pass adds to the gradients of the modules' parameters.

    It is the gradient of that pass alone, on this rank, with the scale of the loss that was differentiated; ``.grad``
    is the sum of those since it was set to zero, after DDP the mean over the ranks. Which parameters are the modules'
    own is said at :class:`ParameterTap`. One that is frozen has no gradient; one that is thawed while the tap is on is
    seen when the tap is attached the next time.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 1)
        >>> with ParameterGradientTap({"head": net}, lambda site, grad: print(*site, grad.tolist())):
        ...     net(torch.tensor([[2.0, 3.0]])).sum().backward()
        head bias [1.0]
        head weight [[2.0, 3.0]]
    """

    @override
    def _put_on(self, name: str, module: nn.Module) -> None:
        if any(is_lazy(parameter) for _, parameter in own_parameters(module)):
            # They take no hook before the module has been called.
            self._keep(module.register_forward_hook(TapHook(self, name, self._see)))
        else:
            self._see(name, module)

    def _see(self, name: str, module: nn.Module, *passed: Any) -> None:
        for path, parameter in own_parameters(module):
            if parameter.requires_grad:
                self._put_on_tensor(parameter, GradientHook(self, name, path))


def own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a call of the module uses itself, by their names in it.

    Example:
        >>> [name for name, _ in own_parameters(nn.MultiheadAttention(4, 2))]
        ['in_proj_weight', 'in_proj_bias', 'out_proj.weight', 'out_proj.bias']
    """
    yield from module.named_parameters(recurse=False)
    for name, child in module.named_children():
        if name == "parametrizations" or isinstance(module, nn.MultiheadAttention):
            yield from child.named_parameters(prefix=name)
