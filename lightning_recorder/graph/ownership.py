"""Which recorded function made a node of torch's backward graph."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node as AutogradNode

from lightning_recorder.autograd import sequence_number, sequence_number_of, unwrapped

__all__ = ["AutogradOwners"]


class AutogradOwners:
    """Remembers for each node of the backward graph the recorded node that made it, and keeps none of them alive.

    A node is known by its number and its type: numbers are given in the order in which a thread makes its nodes, and no
    object of Python stays the same for a node whose other references are gone.
    """

    def __init__(self) -> None:
        self._first = sequence_number()
        self._owners: dict[tuple[int, str], int] = {}

    def owner(self, node: AutogradNode) -> int | None:
        """The recorded node that made a node of the backward graph."""
        return self._owners.get((sequence_number_of(node), node.name()))

    def is_new(self, tensor: Tensor) -> bool:
        """Whether the tensor was computed since the recording began by what nobody has claimed."""
        return (node := _made_by(tensor)) is not None and self._is_unowned(node)

    def claim(self, tensors: Iterable[Tensor], owner: int) -> tuple[list[str], list[Tensor], list[int]]:
        """Give all nodes behind the tensors that nobody has claimed to one recorded node.

        Returns:
            The types of these nodes, the last first; the leaves that go into them; the owners of what else does.
        """
        names: list[str] = []
        leaves: list[Tensor] = []
        owners: list[int] = []
        todo = [node for tensor in tensors if (node := _made_by(tensor)) is not None and self._is_unowned(node)]
        while todo:
            node = todo.pop(0)
            if not self._is_unowned(node):
                continue
            self._owners[sequence_number_of(node), node.name()] = owner
            names.append(node.name())
            for before, _ in node.next_functions:
                if before is None:
                    continue
                if (leaf := getattr(before, "variable", None)) is not None:
                    leaves.append(leaf)
                elif self._is_unowned(before):
                    todo.append(before)
                elif (known := self.owner(before)) is not None and known != owner:
                    owners.append(known)
        return names, leaves, owners

    def _is_unowned(self, node: AutogradNode) -> bool:
        # The number of a leaf is -1.
        return sequence_number_of(node) >= self._first and self.owner(node) is None


def _made_by(tensor: Tensor) -> AutogradNode | None:
    # A wrapper of torch.func has a graph of its own, which ends with the transform.
    tensor = unwrapped(tensor)
    return tensor.grad_fn if tensor.requires_grad else None
