"""Base classes of taps and hooks for gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_recorder.errors import warn
from lightning_recorder.internals.autograd import hooks_of_leaf
from lightning_recorder.taps.base import Receiver, Site, Tap
from lightning_recorder.taps.graph_node_limit import GRAPH_NODE_LIMIT, MOST_NODES

__all__ = ["GradientHook", "GradientTap"]

Hook = TypeVar("Hook", bound="GradientHook")


class GradientTap(Tap):
    """A tap that records tensors in the backward pass; arguments as for :class:`~lightning_recorder.taps.Tap`."""

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
        """The names of modules with a call in which no output tensor required a gradient; may be cleared."""
        self.changed_in_place: set[str] = set()
        """The names of modules that returned a view whose gradient is unknown because the view was changed in place;
        may be cleared."""
        self._told = False

    def _may_look_at(self, nodes: int) -> bool:
        """Return True if that many more nodes of the autograd graph may be visited."""
        if GRAPH_NODE_LIMIT.has_room(nodes):
            return True
        if not self._told:
            self._told = True
            warn(
                f"{type(self).__name__} follows {MOST_NODES:,} operations of the graphs that there are at a time, and "
                "records no gradients of further ones, since torch could not free longer graphs. Record fewer modules."
            )
        return False

    def _bring(self, name: str, function: Callable[..., None], *args: Any) -> None:
        """Call a function from a hook of the backward pass so that its errors do not reach the model."""
        GRAPH_NODE_LIMIT.expect_less()
        self._guarded(name, function, *args)

    def _put_on_tensor(self, tensor: Tensor, hook: Hook) -> Hook:
        """Register a hook on a tensor. A leaf outlives the step, so an equal hook on it is reused.

        Returns:
            The registered hook.
        """
        is_leaf = tensor.is_leaf
        if is_leaf:
            for there in hooks_of_leaf(tensor):
                if isinstance(there, type(hook)) and there.place == hook.place:
                    return there
        handle = tensor.register_hook(hook)
        self._keep(handle)
        if not is_leaf:
            GRAPH_NODE_LIMIT.add(handle.hooks_dict_ref, 1)
        return hook


class GradientHook:
    """A tensor hook that passes the gradient of one site to its tap."""

    # torch reads this when it pickles the tensor. It means that the hook is left out on purpose, which suppresses the
    # warning.
    __torch_unserializable__ = True

    def __init__(self, tap: GradientTap, name: str, path: str) -> None:
        self.tap = tap
        self.site = Site(name, path)

    @property
    def place(self) -> tuple[Tap, Site]:
        """The tap and the site, which identify the hook."""
        return self.tap, self.site

    def __call__(self, grad: Tensor | None) -> None:
        """Pass the gradient to the tap."""
        # torch calls the hook of an output that does not contribute to the loss with None.
        if grad is None:
            return
        if self.tap._fast_path(self.site, grad):
            GRAPH_NODE_LIMIT.expect_less()
            return
        self.tap._bring(self.site.name, self.tap._hand_over, [(self.site.path, grad)])
