"""The recorded node that created each node of torch's backward graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from torch import Tensor
from torch.autograd.graph import Node as AutogradNode

from lightning_recorder.internals.autograd import (
    LEAF_NUMBER,
    in_transform,
    sequence_number,
    sequence_number_of,
    unwrapped,
)

__all__ = ["AutogradOwners"]

# torch frees a chain of autograd nodes recursively if Python has visited them: a chain of 50,000 crashes the process.
# This limit leaves room for the taps, which may visit 20,000 nodes of the same chain.
_MOST_NODES = 15_000


@lru_cache(1024)
def _shared(*names: str) -> tuple[str, ...]:
    """Return the names as a tuple that functions with the same autograd nodes share, to save memory."""
    return names


class AutogradOwners:
    """Remembers the recorded node that created each autograd node, without keeping any autograd node alive.

    The recorded node is called the owner of the autograd node. An autograd node is identified by its sequence number,
    because torch recreates its Python object when no reference is left. Each thread numbers its autograd nodes in the
    order of creation. So autograd nodes of another thread, such as the nodes of a gradient computed on a GPU with
    ``create_graph``, may be confused with nodes of this thread. Only the first 15,000 autograd nodes are tracked.
    """

    def __init__(self) -> None:
        self._first = self.complete_until = sequence_number()
        """Each autograd node with a sequence number below this has an owner, or belongs to no recorded result."""
        self._owners: dict[int, int] = {}
        self._unreached: set[int] = set()
        """The autograd nodes without an owner that are not in the backward graph of any recorded result."""

    def is_new(self, tensor: Tensor) -> bool:
        """Return True if the ``grad_fn`` of a tensor was created since the recording began and has no owner."""
        node = self._made_by(tensor)
        return node is not None and self._is_unowned(sequence_number_of(node))

    def of(self, tensor: Tensor) -> int | None:
        """Return the owner of a tensor's ``grad_fn``; ``None`` if there is no ``grad_fn`` or no owner."""
        return self._owners.get(self.number(tensor))

    def number(self, tensor: Tensor) -> int:
        """Return the sequence number of a tensor's ``grad_fn``; ``LEAF_NUMBER`` if there is none."""
        node = self._made_by(tensor)
        return LEAF_NUMBER if node is None else sequence_number_of(node)

    def claim_usual(self, tensor: Tensor, owner: int, start: int, end: int) -> tuple[str, ...]:
        """Do the same as :meth:`claim_new` faster, for a single result outside of transforms.

        All autograd nodes before ``start`` must have owners. The function ran between the sequence numbers ``start``
        and ``end``.
        """
        if end <= start + 2 and len(self._owners) < _MOST_NODES and (node := tensor.grad_fn) is not None:
            names: tuple[str, ...] = ()
            # A function usually creates one autograd node, or two, as ``linear`` does.
            if sequence_number_of(node) == end - 1:
                names = _shared(node.name()) if end == start + 1 else _pair(node, start)
            if names:
                self._owners[start] = self._owners[end - 1] = owner
                self.complete_until = end
                return names
        return self.claim_new((tensor,), owner, start)

    def claim_new(self, tensors: Sequence[Tensor], owner: int, start: int) -> tuple[str, ...]:
        """Assign the autograd nodes behind the results of a recorded node to this node.

        Other autograd nodes created since ``start`` are remembered as belonging to no result.

        Returns:
            The types of the assigned autograd nodes, starting with the last.
        """
        end = sequence_number()
        complete = self.complete_until == start
        if complete and end == start:
            return ()
        # The number of new autograd nodes is known, so the search can end with the last of them.
        names = self.claim(tensors, owner, end - start if complete and not self._unreached else _MOST_NODES)
        if not (complete and len(names) == end - start) and len(self._owners) < _MOST_NODES:
            # Examples are the autograd nodes of unused intermediate results and of the tangents of forward-mode AD.
            self._unreached.update(number for number in range(start, end) if number not in self._owners)
            self._count()
        return names

    def claim(self, tensors: Iterable[Tensor], owner: int, most: int = _MOST_NODES) -> tuple[str, ...]:
        """Assign up to ``most`` autograd nodes behind the tensors that have no owner yet to a recorded node.

        Returns:
            The types of the assigned autograd nodes, starting with the last.
        """
        names: list[str] = []
        todo = [node for tensor in tensors if (node := self._made_by(tensor)) is not None]
        owners, first = self._owners, self._first
        for node in todo:  # todo grows during the loop
            number = sequence_number_of(node)
            if number >= first and number not in owners:
                owners[number] = owner
                self._unreached.discard(number)
                names.append(node.name())
                if len(names) == most:
                    break
                todo += [before for before, _ in node.next_functions if before is not None]
        if names:
            self._count()
        return tuple(names)

    def _count(self) -> None:
        self.complete_until = self._first + len(self._owners) + len(self._unreached)

    def owned(self, tensors: Iterable[Tensor], owner: int) -> Iterator[AutogradNode]:
        """Yield the autograd nodes of this owner behind the tensors, starting with the last."""
        todo = [node for tensor in tensors if (node := self._made_by(tensor)) is not None]
        seen: set[int] = set()
        while todo:
            node = todo.pop(0)
            number = sequence_number_of(node)
            if self._owners.get(number) == owner and number not in seen:
                seen.add(number)
                yield node
                todo.extend(before for before, _ in node.next_functions if before is not None)

    def sources(self, tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[int]]:
        """Return the inputs of the unowned part of the backward graph of the tensors: leaf tensors, and owners."""
        leaves: dict[int, Tensor] = {}
        owners: list[int] = []
        seen: set[int] = set()
        todo = [node for tensor in tensors if (node := self._made_by(tensor)) is not None]
        while todo:
            node = todo.pop(0)
            number = sequence_number_of(node)
            if number == LEAF_NUMBER:
                if (leaf := getattr(node, "variable", None)) is not None:
                    leaves[id(leaf)] = leaf
            elif number in self._owners:
                owners.append(self._owners[number])
            elif self._is_unowned(number) and number not in seen:
                seen.add(number)
                todo.extend(before for before, _ in node.next_functions if before is not None)
        return list(leaves.values()), owners

    def _is_unowned(self, number: int) -> bool:
        return number >= self._first and number not in self._owners

    def _made_by(self, tensor: Tensor) -> AutogradNode | None:
        # See _MOST_NODES: a longer chain could overflow the stack when torch frees it.
        if len(self._owners) >= _MOST_NODES:
            return None
        if in_transform():
            # A torch.func wrapper has its own backward graph, which is discarded when the transform ends.
            tensor = unwrapped(tensor)
        try:
            return tensor.grad_fn if tensor.requires_grad else None
        except RuntimeError:
            # torch raises for a view created under no_grad whose base was changed in place with gradients enabled, as
            # AdamW does with the real view of a complex parameter.
            return None


def _pair(node: AutogradNode, number: int) -> tuple[str, ...]:
    """Return the types of a node and of its predecessor with a sequence number; empty if there is no predecessor."""
    for before, _ in node.next_functions:
        if before is not None and sequence_number_of(before) == number:
            return _shared(node.name(), before.name())
    return ()
