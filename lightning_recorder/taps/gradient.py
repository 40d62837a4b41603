"""The gradients of the tensors that modules give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from typing_extensions import override

from lightning_recorder.errors import tell
from lightning_recorder.taps.base import Receiver, Tap, TapHook

__all__ = ["GradientHook", "GradientTap", "OutputGradientTap"]

# torch frees the nodes of a graph that Python has looked at one inside the other, on the stack: with 45,000 in a row,
# as of a loop unrolled that often, the process ends (torch 2.13, 8 MiB of stack; ``tensor.grad_fn`` alone does it).
_MOST_NODES = 20_000


Hook = TypeVar("Hook", bound="GradientHook")


class GradientTap(Tap):
    """A tap whose tensors come in the backward pass; arguments as for :class:`~lightning_recorder.Tap`."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        receive: Receiver,
        *,
        condition: Callable[[], object] | None = None,
        strict: bool = False,
    ) -> None:
        super().__init__(modules, receive, condition=condition, strict=strict)
        self._looked_at = 0
        self._told = False

    @override
    def attach(self) -> None:
        if not self.attached:
            self._looked_at = 0
        super().attach()

    def _may_look_at(self, nodes: int) -> bool:
        """Whether that many nodes more can be looked at, on top of those since the last backward pass."""
        if self._looked_at + nodes <= _MOST_NODES:
            return True
        if not self._told:
            self._told = True
            tell(
                f"{type(self).__name__} follows {_MOST_NODES:,} operations between two backward passes and records no "
                "gradients of further ones, since torch could not free a longer graph. Record fewer modules."
            )
        return False

    def _bring(self, name: str, function: Callable[..., None], *args: Any) -> None:
        """Call a function of ours from a hook of the backward pass."""
        self._looked_at = 0
        self._guarded(name, function, *args)

    def _put_on_tensor(self, tensor: Tensor, hook: Hook) -> Hook:
        """Put a hook on a tensor. A leaf outlives the step, so it keeps the one that it has already, if they are equal.

        Returns:
            The hook that is on.
        """
        for there in (tensor._backward_hooks or {}).values() if tensor.is_leaf else ():
            if isinstance(there, type(hook)) and there.place == hook.place:
                return there
        self._keep(tensor.register_hook(hook))
        return hook


class OutputGradientTap(GradientTap):
    """Hands over the gradient of the loss with respect to each output tensor of the modules.

    The hook sits on the output tensor and not on the module: a full backward hook raises where an in-place operation
    follows, stays silent for dictionaries and dataclasses, and puts a node into the autograd graph that changes the
    last bits of the gradients. The gradient is that of the tensor, so for an output which is used twice it is the sum
    of both uses, and for a module that returns its input that of the input.

    Under gradient checkpointing with ``use_reentrant=True`` the graph is built inside the backward pass; the hooks are
    put on there. A backward pass that is run twice, as by ``torch.autograd.grad`` for a gradient penalty, hands over
    both gradients. Backward passes after the tap was removed are not seen.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 1)
        >>> with OutputGradientTap({"head": net}, lambda site, grad: print(site.name, grad.tolist())):
        ...     (3 * net(torch.ones(1, 2))).sum().backward()
        head [[3.0]]
    """

    @override
    def _put_on(self, name: str, module: nn.Module) -> None:
        self._keep(module.register_forward_hook(TapHook(self, name, self._see)))

    def _see(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for path, tensor in self._tensors(name, output, "out"):
            if tensor.requires_grad and self._may_look_at(1):
                self._put_on_tensor(tensor, GradientHook(self, name, path))
                self._looked_at += 1


class GradientHook:
    """A tensor hook that belongs to one site of a tap and hands the gradient over."""

    # Read by torch when it pickles the tensor: says that leaving the hook out is intended, so that nobody is warned of
    # it.
    __torch_unserializable__ = True

    def __init__(self, tap: GradientTap, name: str, path: str) -> None:
        self.tap = tap
        self.name = name
        self.path = path

    @property
    def place(self) -> tuple[Tap, str, str]:
        """What tells it from the hooks of other sites and taps."""
        return self.tap, self.name, self.path

    def __call__(self, grad: Tensor | None) -> None:
        """Hand the gradient over."""
        # torch calls the hook of an output that took no part in the loss with None.
        if grad is not None:
            self.tap._bring(self.name, self.tap._hand_over, [(self.path, grad)])
