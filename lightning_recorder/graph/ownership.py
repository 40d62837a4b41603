"""Which recorded function made a node of torch's backward graph."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node as AutogradNode

from lightning_recorder.autograd import LEAF_NUMBER, sequence_number, sequence_number_of, unwrapped

__all__ = ["AutogradOwners"]

# At 50,000 in a row the process dies; the taps may look at 20,000 of the same.
_MOST_NODES = 15_000


class AutogradOwners:
    """Remembers for each node of the backward graph the recorded node that made it, and keeps none of them alive.

    A node is known by its number, since no object of Python stays the same for a node whose other references are gone.
    Numbers are given in the order in which a thread makes its nodes; those of another thread, as of a gradient that was
    computed on a GPU with ``create_graph``, may be taken for some of this one. Of a graph of more than 15,000 nodes the
    rest is not looked at.
    """

    def __init__(self) -> None:
        self._first = sequence_number()
        self._owners: dict[int, int] = {}

    def is_new(self, tensor: Tensor) -> bool:
        """Whether the tensor was computed since the recording began by what nobody has claimed."""
        node = self._made_by(tensor)
        return node is not None and self._is_unowned(sequence_number_of(node))

    def of(self, tensor: Tensor) -> int | None:
        """The recorded node to which the node that made a tensor belongs; ``None`` where none did, or nobody has it."""
        return self._owners.get(self.number(tensor))

    def number(self, tensor: Tensor) -> int:
        """The number of the node that made a tensor, that of a leaf where none did."""
        node = self._made_by(tensor)
        return LEAF_NUMBER if node is None else sequence_number_of(node)

    def claim(self, tensors: Iterable[Tensor], owner: int) -> tuple[str, ...]:
        """Give all nodes behind the tensors that nobody has claimed to one recorded node.

        Returns:
            The types of these nodes, the last first.
        """
        names: list[str] = []
        todo = [node for tensor in tensors if (node := self._made_by(tensor)) is not None]
        while todo:
            node = todo.pop(0)
            number = sequence_number_of(node)
            if self._is_unowned(number):
                self._owners[number] = owner
                names.append(node.name())
                todo.extend(before for before, _ in node.next_functions if before is not None)
        return tuple(names)

    def sources(self, tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[int]]:
        """What goes into the nodes behind the tensors that nobody has claimed: leaves, and owners of other nodes."""
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
        # torch frees a chain of nodes that Python has seen by recursion, which a long one does not survive.
        if len(self._owners) >= _MOST_NODES:
            return None
        # A wrapper of torch.func has a graph of its own, which ends with the transform.
        tensor = unwrapped(tensor)
        return tensor.grad_fn if tensor.requires_grad else None
