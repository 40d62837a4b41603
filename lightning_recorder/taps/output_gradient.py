"""A tap for the gradients of module outputs."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from functools import partial
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_recorder.internals.autograd import (
    base_of,
    is_transformed,
    is_view,
    without_functions,
)
from lightning_recorder.internals.module_tree import hookable
from lightning_recorder.taps.base import Site, TapHook
from lightning_recorder.taps.gradient import GRAPH_NODE_LIMIT, GradientHook, GradientTap, Total
from lightning_recorder.taps.view import NEAR, BaseEdge, View, guard_of, is_unshared, unguarded, writer_of

__all__ = ["OutputGradientTap"]


class OutputGradientTap(GradientTap):
    """Records the gradient of the loss with respect to each output tensor of the modules.

    The hook is on the output tensor and not on the module: a full backward hook raises if an in-place operation
    follows, ignores dictionaries and dataclasses, and adds a node to the autograd graph that changes the last bits of
    the gradients. The recorded gradient is the gradient of the tensor. If an output is used twice, it is the sum over
    both uses. If a module returns its input, it is the gradient of the input. The gradient is taken with respect to the
    output as the module returned it, even if an in-place operation changes the output afterwards.

    With gradient checkpointing and ``use_reentrant=True`` the graph is built inside the backward pass, and the hooks
    are registered there. If the backward pass runs twice, such as with ``torch.autograd.grad`` for a gradient penalty,
    both gradients are recorded. Backward passes after the removal of the tap are not recorded.

    Note:
        To autograd, a view becomes a different tensor after an in-place operation on it. The gradient of the original
        view is then extracted from the gradient of its base. If the base has other uses, such as the input of
        ``nn.Flatten``, only the part that flows through the in-place operation counts. This part is unknown if the
        operation was on a view of the output or ran without autograd. Then nothing is recorded, and the name of the
        module is in ``changed_in_place``.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 1)
        >>> with OutputGradientTap({"head": net}, lambda site, grad: print(site.name, grad.tolist())):
        ...     (3 * net(torch.ones(1, 2))).sum().backward()
        head [[3.0]]
    """

    @override
    def _register(self, name: str, module: nn.Module) -> None:
        self._keep(hookable(module).register_forward_hook(TapHook(self, name, self._record)))

    def _record(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        found = tuple(self._tensors(name, output, "out"))
        # Disable function modes: otherwise, reading each property of the tensors would call the active mode.
        with without_functions():
            needing = [(path, tensor) for path, tensor in found if tensor.requires_grad]
            if found and not needing:
                self.without_gradient.add(name)
            for path, tensor in needing:
                if self._may_visit(1) and not (is_view(tensor) and self._follow(Site(name, path), tensor, needing)):
                    self._register_on_tensor(tensor, GradientHook(self, name, path))

    def _follow(self, site: Site, tensor: Tensor, outputs: list[tuple[str, Tensor]]) -> bool:
        """Register hooks on a view and its base.

        Returns:
            False if the gradient of the base does not contain the gradient of the view.
        """
        if tensor.is_leaf or not self._may_visit(NEAR):
            return False
        unshared = is_unshared(tensor, [each for _, each in outputs])
        base = base_of(tensor)
        edge = None if base is None else BaseEdge.of(base)
        if base is None or edge is None:
            return False
        view = (_UnsharedView if unshared else _SharedView).of(tensor, base)
        if view is None:
            return False
        with unguarded(tensor):
            self._register_on_tensor(tensor, _ViewHook(self, *site, view))
        self._register_on_tensor(base, _BaseHook(self, *site, view))
        if isinstance(view, _SharedView):
            view.watch(self, site, tensor, base, edge)
        return True


class _OutputView(View, ABC):
    """A view that a module returned."""

    @abstractmethod
    def take_from_view(self, grad: Tensor) -> Tensor | None:
        """Return the gradient of the original view, given a gradient of the view; None if that is incomplete."""

    @abstractmethod
    def take_from_base(self, grad: Tensor) -> Tensor | None:
        """Return the gradient of the original view, given the gradient of the original base; ``None`` if unknown."""


class _UnsharedView(_OutputView):
    """A returned view whose base has no other use."""

    @override
    def take_from_view(self, grad: Tensor) -> Tensor | None:
        return None if self.is_changed else grad

    @override
    def take_from_base(self, grad: Tensor) -> Tensor | None:
        return self.region.part_of(grad)


class _SharedView(_OutputView):
    """A returned view whose base may have other uses.

    Its gradient is the gradient of its uses before the first in-place operation, plus the part of the base gradient
    that flows through this operation.
    """

    def watch(self, tap: OutputGradientTap, site: Site, tensor: Tensor, base: Tensor, edge: BaseEdge) -> None:
        """Detect the in-place operation that makes the view a different tensor to autograd."""
        self._tap = tap
        self._site = site
        self._edge = edge
        self._tensor = weakref.ref(tensor)
        self._base = weakref.ref(base)
        self._total = Total()
        self._is_replaced = False
        self._has_writer = False
        # A strong reference to this object would create a cycle that only the garbage collector could free.
        self._guard = weakref.ref(guard_of(tensor), partial(_when_replaced, weakref.ref(self)))

    def find_writer(self) -> None:
        """Register a hook on the first in-place operation on the base."""
        if self._tensor() is not None:  # the view is still alive, so it was changed and not freed
            self._is_replaced = True
            self._tap._guarded(self._site.name, None, self._follow_writer)

    def _follow_writer(self, name: str) -> None:
        base = self._base()
        found = None if base is None else writer_of(base, self._edge)
        if found is not None:
            self._has_writer = True
            node, visited = found
            handle = node.register_hook(_WriterHook(self))
            self._tap._keep(handle)
            GRAPH_NODE_LIMIT.add(handle.hooks_dict_ref, visited)

    def add_from_writer(self, grad: Tensor) -> None:
        """Add the part of the gradient that flows through the in-place operation."""
        GRAPH_NODE_LIMIT.expect_less()
        self._tap._guarded(self._site.name, None, self._add, grad)

    def _add(self, name: str, grad: Tensor) -> None:
        if not is_transformed(grad):
            self._total.add(self.region.part_of(grad.detach()))

    @override
    def take_from_view(self, grad: Tensor) -> Tensor | None:
        if not self._is_replaced:
            return grad
        self._total.add(grad.detach())
        return None

    @override
    def take_from_base(self, grad: Tensor) -> Tensor | None:
        part = self._total.take()
        if self._has_writer:
            return part
        self._tap.changed_in_place.add(self._site.name)
        return None


def _when_replaced(view: weakref.ref[_SharedView], guard: object) -> None:
    """Call :meth:`find_writer` if the view is still alive."""
    found = view()
    if found is not None:
        found.find_writer()


class _ViewHook(GradientHook):
    """A hook on an output that is a view."""

    def __init__(self, tap: GradientTap, name: str, path: str, view: _OutputView) -> None:
        super().__init__(tap, name, path)
        self._view = view

    @override
    def __call__(self, grad: Tensor | None) -> None:
        if grad is not None:
            # Allow the fast path only if the view is unchanged, because only then is ``grad`` its whole gradient.
            site = None if self._view.is_changed else self.site
            GRAPH_NODE_LIMIT.expect_less()
            self.tap._guarded(self.site.name, site, self._record, grad)

    @override
    def _record(self, name: str, grad: Tensor) -> None:
        part = self._view.take_from_view(grad)
        if part is not None:
            self.tap._pass_on(name, [(self.site.path, part)])


class _BaseHook(_ViewHook):
    """A hook on the base of an output."""

    @override
    def __call__(self, grad: Tensor | None) -> None:
        if grad is not None and self._view.is_changed:
            GRAPH_NODE_LIMIT.expect_less()
            self.tap._guarded(self.site.name, None, self._record, grad)

    @override
    def _record(self, name: str, grad: Tensor) -> None:
        part = None if is_transformed(grad) else self._view.take_from_base(grad)
        if part is not None:
            self.tap._pass_on(name, [(self.site.path, part)])


class _WriterHook:
    """A hook on the first in-place operation on the base of an output."""

    def __init__(self, view: _SharedView) -> None:
        self._view = view

    def __call__(self, grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]) -> None:
        if grad_inputs[0] is not None:
            self._view.add_from_writer(grad_inputs[0])
