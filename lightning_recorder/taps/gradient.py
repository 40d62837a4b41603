"""The gradients of the tensors that modules give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from typing_extensions import override

from lightning_recorder.autograd import hooks_of_leaf
from lightning_recorder.errors import tell
from lightning_recorder.taps.base import Receiver, Site, Tap, TapHook
from lightning_recorder.taps.living import LIVING_NODES, MOST_NODES

__all__ = ["GradientHook", "GradientTap", "OutputGradientTap"]

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
        self.without_gradient: set[str] = set()
        """The names of the modules of which a call gave tensors, none of which needs a gradient; may be cleared."""
        self._told = False

    def _may_look_at(self, nodes: int) -> bool:
        """Whether that many nodes of the autograd graph more can be looked at."""
        if LIVING_NODES.has_room(nodes):
            return True
        if not self._told:
            self._told = True
            tell(
                f"{type(self).__name__} follows {MOST_NODES:,} operations of the graphs that there are at a time, and "
                "records no gradients of further ones, since torch could not free longer graphs. Record fewer modules."
            )
        return False

    def _bring(self, name: str, function: Callable[..., None], *args: Any) -> None:
        """Call a function of ours from a hook of the backward pass."""
        LIVING_NODES.expect_less()
        self._guarded(name, function, *args)

    def _put_on_tensor(self, tensor: Tensor, hook: Hook) -> Hook:
        """Put a hook on a tensor. A leaf outlives the step, so it keeps the one that it has already, if they are equal.

        Returns:
            The hook that is on.
        """
        is_leaf = tensor.is_leaf
        if is_leaf:
            for there in hooks_of_leaf(tensor):
                if isinstance(there, type(hook)) and there.place == hook.place:
                    return there
        handle = tensor.register_hook(hook)
        self._keep(handle)
        if not is_leaf:
            LIVING_NODES.add(handle.hooks_dict_ref, 1)
        return hook


class OutputGradientTap(GradientTap):
    """Hands over the gradient of the loss with respect to each output tensor of the modules.

    The hook sits on the output tensor and not on the module: a full backward hook raises where an in-place operation
    follows, stays silent for dictionaries and dataclasses, and puts a node into the autograd graph that changes the
    last bits of the gradients. The gradient is that of the tensor, so for an output which is used twice it is the sum
    of both uses, and for a module that returns its input that of the input. An output that is a view, and is written to
    later, as that of ``nn.Flatten`` before an in-place activation, is another tensor to autograd then and has none.

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
        found = tuple(self._tensors(name, output, "out"))
        needing = [(path, tensor) for path, tensor in found if tensor.requires_grad]
        if found and not needing:
            self.without_gradient.add(name)
        for path, tensor in needing:
            if self._may_look_at(1):
                self._put_on_tensor(tensor, GradientHook(self, name, path))


class GradientHook:
    """A tensor hook that belongs to one site of a tap and hands the gradient over."""

    # Read by torch when it pickles the tensor: says that leaving the hook out is intended, so that nobody is warned of
    # it.
    __torch_unserializable__ = True

    def __init__(self, tap: GradientTap, name: str, path: str) -> None:
        self.tap = tap
        self.site = Site(name, path)

    @property
    def place(self) -> tuple[Tap, Site]:
        """What tells it from the hooks of other sites and taps."""
        return self.tap, self.site

    def __call__(self, grad: Tensor | None) -> None:
        """Hand the gradient over."""
        # torch calls the hook of an output that took no part in the loss with None.
        if grad is None:
            return
        if self.tap._taken_at_once(self.site, grad):
            LIVING_NODES.expect_less()
            return
        self.tap._bring(self.site.name, self.tap._hand_over, [(self.site.path, grad)])
