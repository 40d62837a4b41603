"""The tensors that modules take and give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_recorder.autograd import in_backward, is_tracing
from lightning_recorder.taps.base import Receiver, Site, Tap, TapHook

__all__ = ["InputTap", "OutputTap"]


class InputTap(Tap):
    """Hands over each tensor among the arguments of the modules, keyword arguments included, before the call.

    Args:
        modules: The modules by name.
        receive: As for :class:`~lightning_recorder.Tap`.
        after: Hand the arguments over when the module has returned, as it leaves them: after an in-place module with
            its results in them, and not at all if the module raised.
        condition: As for :class:`~lightning_recorder.Tap`.
        strict: As for :class:`~lightning_recorder.Tap`.

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
    def _put_on(self, name: str, module: nn.Module) -> None:
        register = module.register_forward_hook if self.after else module.register_forward_pre_hook
        self._keep(register(TapHook(self, name, self._see), with_kwargs=True))

    def _see(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None
    ) -> None:
        if not in_backward():
            self._hand_over(name, self._inputs(name, args, kwargs))


class OutputTap(Tap):
    """Hands over each output tensor of the modules, at the moment when the module returns.

    An in-place operation that follows does not matter, since the receiver has read the tensor by then. A forward pass
    that ``torch.utils.checkpoint`` repeats inside the backward pass is not a second call and is passed over.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(inplace=True))
        >>> with OutputTap(dict(net.named_children()), lambda site, tensor: print(*site, tuple(tensor.shape))):
        ...     _ = net(torch.ones(5, 2))
        0 out (5, 3)
        1 out (5, 3)
    """

    @override
    def _put_on(self, name: str, module: nn.Module) -> None:
        self._keep(module.register_forward_hook(_OutputHook(self, name, self._see)))

    def _see(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not in_backward():
            self._hand_over(name, self._tensors(name, output, "out"))


class _OutputHook(TapHook):
    """A hook that has an output which is one tensor taken at once."""

    def __init__(self, tap: Tap, name: str, method: Callable[..., None]) -> None:
        super().__init__(tap, name, method)
        self._site = Site(name, "out")

    @override
    def __call__(self, module: nn.Module, *passed: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not in_backward() and not is_tracing() and self._tap._taken_at_once(self._site, passed[-1]):
            self._tap.called.add(self._name)
            return
        super().__call__(module, *passed)
