"""Replace formulas in the graph, such as ``x @ weight + bias``, by the torch functions that compute the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lightning_recorder.graph.model import Edge, Graph, Node, TensorMeta

__all__ = ["recognized"]

_SUMS = ("add", "__add__", "add_", "__iadd__")
_PRODUCTS = ("matmul", "__matmul__", "mm")
_TURNED = ("T", "mT", "t")
_DIFFERENCES = ("sub", "__sub__", "rsub", "__rsub__", "subtract")
_ERRORS = {"square": "mse_loss", "pow": "mse_loss", "__pow__": "mse_loss", "abs": "l1_loss"}
_CLAMPS = ("clamp", "clip", "clamp_", "clip_")
_TINY = 1e-3  # a clamp whose limits are at most this far from 0 and 1 only keeps probabilities away from them


def recognized(graph: Graph) -> Graph:
    """Return a graph with torch functions in place of equivalent formulas, so that rules need to know only one form.

    ``x @ weight + bias`` and ``x @ weight.T``, with or without a bias, become ``linear``. The mean or the sum of
    squared or absolute differences between an output and a tensor of the batch with the same shape is ``mse_loss`` or
    ``l1_loss``. A clamp that keeps probabilities away from 0 and 1 becomes ``identity``. Other nodes do not change, and
    no node changes its id.

    Example:
        >>> import torch
        >>> from lightning_recorder.graph import capture_graph
        >>> class Dense(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.kernel, self.bias = (torch.nn.Parameter(torch.ones(*size)) for size in ((2, 3), (3,)))
        ...
        ...     def forward(self, x):
        ...         return x @ self.kernel + self.bias
        >>> graph = capture_graph(Dense(), torch.ones(1, 2))
        >>> [node.name for node in graph.nodes if node.kind == "op"]
        ['matmul', 'add']
        >>> [node.name for node in recognized(graph).nodes if node.kind == "op"]
        ['linear']
    """
    form = _Form(graph)
    for node in graph.nodes:
        if node.kind == "op" and not node.failed:
            form.layer(node)
            form.error(node)
            form.limit(node)
    return form.graph()


class _Form:
    """The replaced nodes, by their ids."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._changed: dict[int, Node] = {}
        self._sources: dict[int, list[Node]] = {}
        self._dropped: set[int] = set()
        self._uses: dict[int, int] = {}
        self._roots: dict[int, set[str]] = {}
        for edge in graph.edges:
            self._uses[edge.source] = self._uses.get(edge.source, 0) + edge.multiplicity
        for node in graph.nodes:
            self._roots[node.id] = {node.kind}.union(*(self._roots[each.id] for each in self._into(node)))

    def _into(self, node: Node) -> list[Node]:
        return [self._graph[edge.source] for edge in self._graph.into(node)]

    def _is_used_once(self, nodes: Iterable[Node]) -> bool:
        return all(self._uses.get(each.id) == 1 for each in nodes)

    def _change(self, node: Node, name: str, sources: list[Node], inputs: list[TensorMeta], **changes: object) -> None:
        self._changed[node.id] = replace(node, name=name, inputs=tuple(inputs), **changes)  # type: ignore[arg-type] # of Node
        self._sources[node.id] = sources

    def layer(self, node: Node) -> None:
        """Replace the sum that ends a linear layer, or the product with a transposed weight."""
        is_sum = node.name in _SUMS
        terms = self._into(node) if is_sum else [node]
        product, bias = terms[0] if terms else node, terms[1:]
        sources = self._into(product) if product.name in _PRODUCTS else []
        if len(terms) != 1 + is_sum or len(sources) != 2 or not product.inputs or sources[0].kind == "parameter":
            return
        turned = sources[1] if sources[1].name in _TURNED else None
        weight = self._into(sources[1])[0] if turned is not None else sources[1]
        offsets = [each.outputs[0] for each in bias if each.kind == "parameter" and len(each.outputs[0].shape) == 1]
        if weight.kind != "parameter" or not weight.outputs or len(weight.outputs[0].shape) != 2:
            return
        if len(offsets) != len(bias) or (is_sum and not self._is_used_once([product])) or not (is_sum or turned):
            return
        shape = weight.outputs[0].shape if turned is not None else weight.outputs[0].shape[::-1]
        tensors = [product.inputs[0], replace(weight.outputs[0], shape=shape), *offsets]
        self._change(node, "linear", [sources[0], weight, *bias], tensors, arguments=())
        if is_sum:  # the product may have been replaced, too
            self._dropped.add(product.id)
            self._changed.pop(product.id, None)
            self._sources.pop(product.id, None)

    def error(self, node: Node) -> None:
        """Replace the mean or the sum that ends a squared or an absolute error."""
        power = next(iter(self._into(node)), None) if node.name in ("mean", "sum") else None
        if power is None or power.name not in _ERRORS or dict(power.arguments).get("exponent", "2") not in ("2", "2.0"):
            return
        difference = next(iter(self._into(power)), None)
        sides = self._into(difference) if difference is not None and difference.name in _DIFFERENCES else []
        if difference is None or len(sides) != 2 or not self._is_used_once([power, difference]):
            return
        shapes = [each.shape for each in difference.inputs]
        given = [{"input"} == self._roots[each.id] - {"op"} for each in sides]
        predicted = ["parameter" in self._roots[each.id] for each in sides]
        if len(shapes) == 2 and shapes[0] == shapes[1] and sorted(given) == [False, True] and given != predicted:
            # The loss functions of torch have the prediction as first input.
            place = given.index(False)
            order = [place, 1 - place]
            is_mean = node.name == "mean" and not (node.outputs[0].shape and self._is_summed(node))
            arguments = () if is_mean else (("reduction", "'sum'"),)
            inputs = [difference.inputs[each] for each in order]
            self._change(node, _ERRORS[power.name], [sides[each] for each in order], inputs, arguments=arguments)
            self._dropped |= {power.id, difference.id}

    def _is_summed(self, node: Node) -> bool:
        """Return True unless the only user of a node is a mean, which averages the errors of the samples."""
        users = [self._graph[edge.target] for edge in self._graph.edges if edge.source == node.id]
        return [each.name for each in users] != ["mean"]

    def limit(self, node: Node) -> None:
        """Replace a clamp that keeps probabilities away from 0 and 1."""
        if node.name in _CLAMPS and len(self._into(node)) == 1:
            ends = dict(node.arguments)
            try:
                low, high = float(ends["min"]), float(ends.get("max", "1"))
            except (KeyError, ValueError):
                return
            if 0 < low <= _TINY and 1 - _TINY <= high <= 1:
                self._changed[node.id] = replace(node, name="identity")

    def graph(self) -> Graph:
        """Return the graph with the replacements; the original graph if there are none."""
        if not self._changed:
            return self._graph
        nodes = [self._changed.get(node.id, node) for node in self._graph.nodes if node.id not in self._dropped]
        edges = [
            edge for edge in self._graph.edges if not {edge.source, edge.target} & self._dropped
            and edge.target not in self._sources
        ]  # fmt: skip
        for target, sources in self._sources.items():
            edges += [Edge(each.id, target, tensor=each.outputs[0] if each.outputs else None) for each in sources]
        return replace(self._graph, nodes=tuple(nodes), edges=tuple(edges))
