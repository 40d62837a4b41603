"""Gradients of views whose memory is modified after a module has returned them.

To autograd, a view becomes a different tensor after an in-place operation on it: the operation becomes a node of the
*base* of the view, and the node that created the view is bypassed. A hook on the view then only receives the gradient
of earlier uses. The gradient of the original view is part of the gradient of the original base.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from typing_extensions import Self, override

from lightning_recorder.internals.autograd import (
    base_of,
    hooks_of,
    register_hooks,
    sequence_number,
    sequence_number_of,
    set_hooks,
    version_counter,
    version_of,
)
from lightning_recorder.internals.storage import reference_counts

__all__ = ["NEAR", "BaseEdge", "Region", "View", "guard_of", "is_unshared", "unguarded", "writer_of"]

NEAR = 64
"""The maximum number of nodes to visit for one view."""


class Region(NamedTuple):
    """The region of a base that a view covers."""

    base_size: torch.Size
    base_stride: tuple[int, ...]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """The offset of the first element of the view from the first element of the base in memory, in elements."""
    whole: bool
    """True if the view covers every element of the base in the same order."""

    @classmethod
    def of(cls, view: Tensor, base: Tensor) -> Region | None:
        """Return the region, or ``None`` if the gradient of the base does not contain the gradient of the view.

        This is the case if elements appear several times, as in an expanded tensor, or if the dtype, the conjugate bit
        or the negative bit differs.
        """
        if type(view) is not Tensor or view.layout != torch.strided or base.layout != torch.strided:
            return None
        if view.dtype != base.dtype or view.is_conj() != base.is_conj() or view.is_neg() != base.is_neg():
            return None
        size, stride, offset = view.size(), view.stride(), int(view.storage_offset() - base.storage_offset())
        whole = offset == 0 and view.numel() == base.numel() and view.is_contiguous() and base.is_contiguous()
        if not whole and (offset < 0 or _overlaps(size, stride)):
            return None
        return cls(base.size(), base.stride(), size, stride, offset, whole)

    def part_of(self, grad: Tensor) -> Tensor:
        """Return the gradient of the view from a gradient of the base."""
        if self.whole:
            return grad.reshape(self.size)
        if grad.stride() != self.base_stride:
            grad = grad.new_empty_strided(self.base_size, self.base_stride).copy_(grad)
        return grad.as_strided(self.size, self.stride, grad.storage_offset() + self.offset)


class _Guard(OrderedDict[int, object]):
    """An empty dictionary of tensor hooks, which is freed when the tensor gets a different node.

    A view gets a different node when an in-place operation changes it, or when it is used after such an operation on
    the base. Then torch removes its dictionary of hooks. The dictionary must be empty, because an autograd node keeps a
    dictionary that contains hooks alive.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = weakref.ref(tensor)
        self.hooks = hooks_of(tensor)
        """The dictionary that this guard replaces."""

    @override
    def __setitem__(self, key: int, hook: object) -> None:
        # Do the same as torch does for the first hook on a tensor.
        tensor = self._tensor()
        if not self and tensor is not None:
            register_hooks(tensor)
        super().__setitem__(key, hook)


def guard_of(tensor: Tensor) -> OrderedDict[int, object]:
    """Return an object that is freed with the view, or when an in-place operation gives the view a different node.

    Hooks can still be registered on the tensor. After a hook is registered outside :func:`unguarded`, the object is
    freed together with the node.
    """
    guard = hooks_of(tensor)
    if not isinstance(guard, _Guard):
        guard = _Guard(tensor)
        set_hooks(tensor, guard)
    return guard


@contextmanager
def unguarded(tensor: Tensor) -> Iterator[None]:
    """Remove the guard from a tensor while a hook is registered on it."""
    guard = hooks_of(tensor)
    if not isinstance(guard, _Guard) or guard:
        yield
        return
    set_hooks(tensor, guard.hooks)
    try:
        yield
    finally:
        set_hooks(tensor, guard)


class View:
    """A snapshot of a view, which later in-place operations may change.

    The snapshot keeps neither the view nor its base alive.
    """

    def __init__(self, region: Region, changes: Tensor) -> None:
        self.region = region
        self._changes = changes
        self._writes = version_of(changes)

    @classmethod
    def of(cls, tensor: Tensor, base: Tensor) -> Self | None:
        """Return the snapshot, or ``None`` if a gradient of the base does not contain a gradient of the view."""
        region = Region.of(tensor, base)
        changes = None if region is None else version_counter(tensor)
        return None if region is None or changes is None else cls(region, changes)

    @property
    def is_changed(self) -> bool:
        """True if an in-place operation has written to the memory since the snapshot."""
        return version_of(self._changes) != self._writes


def _overlaps(size: torch.Size, stride: tuple[int, ...]) -> bool:
    """Return True if several elements may share a memory address."""
    end = 0
    for step, number in sorted((step, number) for number, step in zip(size, stride, strict=True) if number > 1):
        if step <= end:
            return True
        end += step * (number - 1)
    return False


class BaseEdge(NamedTuple):
    """The edge of the autograd graph at which the gradient of a base arrives, without a reference to the node.

    Hooks on a node must not refer to the node, because the graph would never be freed.
    """

    sequence_number: int
    output_nr: int

    @classmethod
    def of(cls, base: Tensor) -> BaseEdge | None:
        """Return the edge of a base, or ``None`` if the base is not the result of an operation."""
        node = base.grad_fn
        return None if node is None else cls(sequence_number_of(node), base.output_nr)

    def is_at(self, node: Node | None, output_nr: int) -> bool:
        """Return True if this is the edge to the given output of the node."""
        return node is not None and output_nr == self.output_nr and sequence_number_of(node) == self.sequence_number


def is_unshared(view: Tensor, outputs: Iterable[Tensor]) -> bool:
    """Return True if only the view has used its base and nothing else can use the base later.

    Then the gradient of the base is the gradient of the view. An example is the output of ``nn.Linear``: no other
    tensor and no variable refers to the base, and all operations since the creation of the base lead to the view.
    """
    # The counts depend on how Python makes the call, since torch.compile can replace the interpreter's evaluation of
    # frames. So compare them with the counts of a view whose base is known to be unshared.
    found, unshared = [_counts_of_base(each) for each in (view, _unshared_view())]
    if found != unshared:
        return False
    base = base_of(view)
    edge = None if base is None else BaseEdge.of(base)
    last = view.grad_fn
    if edge is None or last is None:
        return False
    since = sequence_number() - edge.sequence_number - 1
    if since == 1 and sequence_number_of(last) == edge.sequence_number + 1:  # the common case
        return True
    if not 0 < since <= NEAR:
        return False
    users = _users_since(edge, [each.grad_fn for each in outputs if each.requires_grad])
    return len(users) == since and _is_chain(last, edge, users)


def _counts_of_base(view: Tensor) -> tuple[int, int]:
    # No local variable refers to the base, so the reference counts are the same for every base without other uses.
    return reference_counts(base_of(view))  # type: ignore[arg-type]  # the caller knows that this is a view


def _unshared_view() -> Tensor:
    """Return a view whose base has no other use; the same view at each call."""
    global _UNSHARED  # noqa: PLW0603 - a cache must not keep a view that was made under a mode of the caller
    if _UNSHARED is None:
        view = torch.zeros(1, device="cpu").view(1)
        if type(view) is not Tensor or base_of(view) is None:
            return view
        _UNSHARED = view
    return _UNSHARED


_UNSHARED: Tensor | None = None


def _users_since(edge: BaseEdge, roots: list[Node | None]) -> dict[Node, int]:
    """Return the nodes created after a base, each with its number of uses by other such nodes."""
    users = {node: 0 for node in roots if node is not None and sequence_number_of(node) > edge.sequence_number}
    todo = list(users)
    while todo and len(users) <= NEAR:
        for node, _ in todo.pop().next_functions:
            if node is None or sequence_number_of(node) <= edge.sequence_number:
                continue
            if node not in users:
                users[node] = 0
                todo.append(node)
            users[node] += 1
    return users


def _is_chain(last: Node, edge: BaseEdge, users: dict[Node, int]) -> bool:
    """Return True if the base has a single use, from which an unbranched chain of nodes leads to the view."""
    places = sum(edge.is_at(*each) for node in users for each in node.next_functions)
    node: Node | None = last
    while node is not None and len(node.next_functions) == 1:
        if edge.is_at(*node.next_functions[0]):
            return places == 1
        node = node.next_functions[0][0]
        if node is None or users.get(node) != 1:
            return False
    return False


def writer_of(base: Tensor, edge: BaseEdge) -> tuple[Node, int] | None:
    """Return the first in-place operation on a base after the given edge, and the number of visited nodes.

    The original base is the first input of the operation. Returns ``None`` if no operation that autograd records has
    written to the base, or if there are too many such operations.
    """
    node: Node | None = base.grad_fn
    for visited in range(1, NEAR):
        if node is None or edge.is_at(node, edge.output_nr):
            return None
        # The modified tensor is the first argument of an in-place operation.
        before = node.next_functions[:1]
        if before and edge.is_at(*before[0]):
            return node, visited
        node = before[0][0] if before else None
    return None
