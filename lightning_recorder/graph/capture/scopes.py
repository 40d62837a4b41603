"""The scopes of a training step, such as the loss, and the nodes in each scope."""

from __future__ import annotations

from itertools import pairwise

from lightning_recorder.graph.capture.builder import Draft, GraphBuilder

__all__ = ["Scopes"]


class Scopes:
    """Divides the nodes of a training step into scopes: one for each backward pass, and one for each loss."""

    def __init__(self, builder: GraphBuilder, scope: str) -> None:
        self._nodes = builder.nodes
        self._scope = scope
        self._builder = builder
        self._targets: dict[int, list[int]] = {}
        self._sources: dict[int, list[int]] = {}

    def named(self) -> dict[int, str]:
        """Return the scope of each node except the root; empty if there is no backward pass."""
        passes = [number for number in self._builder.of_kind("backward") if _is_backward(self._nodes[number])]
        if not passes:
            return {}
        for source, target in self._builder.ends:
            self._targets.setdefault(source, []).append(target)
            self._sources.setdefault(target, []).append(source)
        leading = self._leading()
        loss = self._loss(leading)
        ends = self._ends(passes, leading)
        named: dict[int, str] = {}
        turn = 0
        for number, node in enumerate(self._nodes):
            if node.parent is None:
                continue
            turn += turn < len(ends) and number > ends[turn]
            own = "loss" if number in loss else self._scope
            # A node has the scope of its enclosing call, even if a backward pass is between them.
            named[number] = named.get(node.parent) or (f"{own} {turn + 1}" if turn else own)
        return named

    def _leading(self) -> set[int]:
        """Return the nodes with a path to a backward pass, and the calls that contain these nodes."""
        found: set[int] = set()
        # Visit the nodes in reverse order, so that the users of a tensor are visited before its source.
        for number in range(len(self._nodes) - 1, -1, -1):
            node = self._nodes[number]
            if (
                number in found
                or _is_backward(node)
                or any(target in found for target in self._targets.get(number, ()))
            ):
                found.add(number)
                if node.parent is not None and not _is_backward(node):
                    found.add(node.parent)
        return found

    def _ends(self, passes: list[int], leading: set[int]) -> list[int]:
        """Return the last node of each turn except the last turn, in execution order.

        The turns divide the step: a turn ends with the last backward pass or optimizer step before the next loss is
        computed.
        """
        ends = []
        for one, other in pairwise(passes):
            end = max(number for number in range(one, other) if _is_boundary(self._nodes[number]))
            if any(number in leading for number in range(end + 1, other)):
                ends.append(end)
        return ends

    def _loss(self, leading: set[int]) -> set[int]:
        """Return the nodes between the last layer with parameters and a backward pass, with their contents."""
        place: dict[int, int] = {}  # the ancestor of each node that is a child of the root
        layers: set[int] = set()
        for number, node in enumerate(self._nodes):
            if node.parent is not None:
                place[number] = place.get(node.parent, number)
                # A node with only buffers is not a layer, since a loss may have class weights as a buffer.
                if node.kind == "parameter" or node.parameters:
                    layers.add(place[number])
        layers |= self._layers_of_the_root()
        following: dict[int, set[int]] = {}
        for source, targets in self._targets.items():
            outside = {place[target] for target in targets if target in leading} - {place[source]}
            following.setdefault(place[source], set()).update(outside)
        found: set[int] = set()
        for number in sorted(set(place.values()), reverse=True):
            node, users = self._nodes[number], following.get(number)
            behind = node.kind in ("op", "module") and number not in layers and users and users <= found
            if _is_backward(node) or behind:
                found.add(number)
        # Computations on the targets alone, before they are combined with the model output, are not part of the loss.
        found = found & {place[number] for number in self._trained()} or found
        return {number for number, root in place.items() if root in found and not _is_backward(self._nodes[root])}

    def _trained(self) -> set[int]:
        """Return the nodes that depend on a parameter."""
        todo = [number for number, node in enumerate(self._nodes) if node.kind == "parameter"]
        found = set(todo)
        while todo:
            new = [target for target in self._targets.get(todo.pop(), ()) if target not in found]
            found.update(new)
            todo.extend(new)
        return found

    def _layers_of_the_root(self) -> set[int]:
        """Return the functions among the root's children that combine a parameter with another tensor.

        Functions with only scalar outputs are left out.
        """
        found = set()
        for number, sources in self._sources.items():
            # A function of parameters alone is not a layer. It may be a norm that is added to the loss.
            joins = len({self._nodes[source].kind == "parameter" for source in sources}) == 2
            if joins and _is_large(self._nodes[number]):
                found.add(number)
        return found


def _is_large(node: Draft) -> bool:
    return node.parent == 0 and node.kind == "op" and any(meta.shape for meta in node.outputs)


def _is_backward(node: Draft) -> bool:
    return node.kind == "backward" and node.name == "backward"


def _is_boundary(node: Draft) -> bool:
    return node.kind == "optimizer" or _is_backward(node)
