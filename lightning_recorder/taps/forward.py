"""Taps for the inputs, outputs and parameters of modules in the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_recorder.internals.module_tree import hookable
from lightning_recorder.module_names import own_parameters
from lightning_recorder.taps.base import Receiver, Site, Tap, TapHook

__all__ = ["InputTap", "OutputTap", "ParameterTap"]


class InputTap(Tap):
    """Records each tensor in the arguments of the modules, including keyword arguments, before the call.

    Args:
        modules: The modules by name.
        receive: The receiver, as for :class:`~lightning_recorder.taps.Tap`.
        after: Record the arguments in their state after the module has returned. If the module changes an argument in
            place, the changed values are recorded. Nothing is recorded if the module raises.
        condition: The condition, as for :class:`~lightning_recorder.taps.Tap`.
        strict: The error handling, as for :class:`~lightning_recorder.taps.Tap`.

    Example:
        >>> import torch
        >>> attention = torch.nn.MultiheadAttention(4, 2)
        >>> x = torch.ones(3, 1, 4)
        >>> with InputTap({"attn": attention}, lambda site, tensor: print(*site, tuple(tensor.shape))):
        ...     _ = attention(x, x, value=x)
        attn in[0] (3, 1, 4)
        attn in[1] (3, 1, 4)
        attn in.value (3, 1, 4)
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        receive: Receiver,
        *,
        after: bool = False,
        condition: Callable[[], object] | None = None,
        strict: bool = False,
    ) -> None:
        super().__init__(modules, receive, condition=condition, strict=strict)
        self.after = after

    @override
    def _register(self, name: str, module: nn.Module) -> None:
        bare = hookable(module)
        register = bare.register_forward_hook if self.after else bare.register_forward_pre_hook
        self._keep(register(_InputHook(self, name, self._record, Site(name, "in[0]")), with_kwargs=True))

    def _record(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], only: Tensor | None
    ) -> None:
        self._pass_on(name, self._inputs(name, args, kwargs))


class _InputHook(TapHook):
    """A hook that also passes the argument of the call to its tap for the fast path, if there is only one argument."""

    @override
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, output: Any = None
    ) -> None:
        super().__call__(module, args, kwargs or {}, args[0] if len(args) == 1 and not kwargs else None)


class OutputTap(Tap):
    """Records each output tensor of the modules when the module returns.

    Later in-place operations have no effect, because the receiver has already read the tensor. The forward pass that
    ``torch.utils.checkpoint`` repeats inside the backward pass is ignored, because it is not a second call.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(inplace=True))
        >>> with OutputTap(dict(net.named_children()), lambda site, tensor: print(*site, tuple(tensor.shape))):
        ...     _ = net(torch.ones(5, 2))
        0 out (5, 3)
        1 out (5, 3)
    """

    @override
    def _register(self, name: str, module: nn.Module) -> None:
        self._keep(hookable(module).register_forward_hook(TapHook(self, name, self._record, Site(name, "out"))))

    def _record(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._pass_on(name, self._tensors(name, output, "out"))


class ParameterTap(Tap):
    """Records the parameters of the modules at each call, with their values in this call.

    Parameters of submodules do not belong to a module, except for submodules that the module never calls: lists and
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
        self._keep(hookable(module).register_forward_hook(TapHook(self, name, self._record)))

    def _record(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._pass_on(name, own_parameters(module))
