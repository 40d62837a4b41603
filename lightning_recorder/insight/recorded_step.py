"""The operations of the recorded step, for the rules about the graph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_recorder.functions import function_sites
from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.recognized import recognized
from lightning_recorder.names import Site

__all__ = [
    "ATTENTION",
    "BINARY",
    "ELEMENTWISE",
    "LOSSES",
    "RecordedStep",
    "Shape",
    "factor_of",
    "found_in",
    "is_attention",
    "is_masked",
    "joined",
    "keeps_values",
    "listed",
    "setting",
    "shape_of",
    "sides_of",
    "softmax_dimension",
    "step_of",
]

Shape = tuple[int, ...]

ELEMENTWISE = frozenset(
    ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "soft_margin_loss"]
)
LOSSES = ELEMENTWISE | frozenset(
    [
        *("binary_cross_entropy", "cross_entropy", "nll_loss", "kl_div", "poisson_nll_loss", "gaussian_nll_loss"),
        *("multi_margin_loss", "multilabel_soft_margin_loss"),
    ]
)
BINARY = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
# Functions that change at most the shape or the dtype, but not the values. Dropout is treated as such a function.
_SAME_VALUES = re.compile(
    r"view|view_as|reshape|(un)?flatten|transpose|permute|movedim|swapaxes|(un)?squeeze|contiguous|clone|float|double|"
    r"half|to|type|m?[tT]|identity|(\w+_)?dropout\d?d?"
)
_SCORES_PAIRS = re.compile(r"r?sub|neg|sum|mul|matmul|bmm|einsum|cosine_similarity")
_MASKING = re.compile(r"masked_fill_?|where|tril_?|triu_?|masked_scatter_?")
_PRODUCTS = ("matmul", "bmm", "mm", "linear", "einsum")
ATTENTION = "scaled_dot_product_attention"
_NUMBER = re.compile(r"-?\d+(\.\d*)?(e[-+]?\d+)?")
_COMPARES = ("sub", "__sub__", "rsub", "__rsub__", "mul", "__mul__", "__rmul__")


@dataclass(frozen=True)
class RecordedStep:
    """The operations of the first recorded step, with their sources and users."""

    graph: Graph

    @cached_property
    def operations(self) -> list[Node]:
        """The functions that returned without an error, in the order of execution."""
        return [node for node in self.graph.nodes if node.kind == "op" and not node.failed]

    @cached_property
    def _users(self) -> dict[int, list[Node]]:
        found: dict[int, list[Node]] = {}
        for edge in self.graph.edges:
            found.setdefault(edge.source, []).append(self.graph[edge.target])
        return found

    def sources(self, node: Node) -> list[Node]:
        """Return the nodes whose tensors a node gets, in the order of its arguments."""
        return [self.graph[edge.source] for edge in self.graph.into(node)]

    def ancestors(self, node: Node) -> set[int]:
        """Return the ids of all nodes that a node depends on."""
        found, todo = set[int](), [node]
        while todo:
            for source in self.sources(todo.pop()):
                if source.id not in found:
                    found.add(source.id)
                    todo.append(source)
        return found

    def users(self, node: Node) -> list[Node]:
        """Return the operations that take the output of a node; backward passes are left out."""
        return [user for user in self._users.get(node.id, ()) if user.kind == "op"]

    def is_read(self, node: Node) -> bool:
        """Return True if an operation or a backward pass takes the output of a node, or the model returns it."""
        return node.id in self._users

    def behind(self, node: Node) -> Node | None:
        """Return the node that computed the values of the first input, skipping changes of shape or dtype."""
        sources = self.sources(node)
        while sources and keeps_values(sources[0]):
            inner = self.sources(sources[0])
            if not inner:
                break
            sources = inner
        return sources[0] if sources else None

    def made_by(self, node: Node) -> Node:
        """Return the node that computed the values of a node, skipping changes of shape or dtype."""
        return (self.behind(node) or node) if keeps_values(node) else node

    def readers(self, node: Node) -> Iterator[Node]:
        """Yield the operations that use the values of a node, skipping changes of shape or dtype."""
        todo = self.users(node)
        while todo:
            user = todo.pop()
            if keeps_values(user):
                todo += self.users(user)
            else:
                yield user

    @cached_property
    def roots(self) -> dict[int, frozenset[str]]:
        """The kinds of tensors that each node depends on, such as ``input`` and ``parameter``."""
        found: dict[int, frozenset[str]] = {}
        for node in self.graph.nodes:
            own = frozenset([node.kind]) if node.kind in ("input", "parameter", "buffer", "tensor") else frozenset()
            found[node.id] = own.union(*(found.get(edge.source, frozenset()) for edge in self.graph.into(node)))
        return found

    @cached_property
    def batch(self) -> int:
        """The number of samples; 0 unless it is the first size of each input, and each sample has one target.

        The second condition excludes sequences with time as the first dimension: no loss has one target for each entry
        of this dimension.
        """
        shapes = [node.outputs[0].shape for node in self.graph.nodes if node.kind == "input" and node.outputs]
        sizes = {shape[0] for shape in shapes if shape}
        if len(sizes) != 1:
            return 0
        (size,) = sizes
        targets = [shape_of(node, 1) for node in self.operations if node.name in LOSSES]
        targets += [self._given_shape(target) for _, target in self.comparisons.values()]
        return size if size > 1 and targets and all(each in ((size,), (size, 1)) for each in targets) else 0

    @cached_property
    def probabilities(self) -> dict[int, Node]:
        """The node with the probabilities of each cross-entropy written as a formula, by the id of the last node.

        The formula is the sum of the targets times the logarithm of the probabilities, or nll_loss of that logarithm.
        The probabilities may be divided by their sum. A binary cross-entropy, which also has the logarithm of 1 - p, is
        left out, and so is the sigmoid of a score of pairs, whose weighted logarithm is a loss of its own.
        """
        logarithms = {last: self.made_by(side) for last, (side, _) in self.comparisons.items()}
        logarithms = {last: each for last, each in logarithms.items() if "mul" in self.graph[last].name}
        losses = ((node.id, self.behind(node)) for node in self.operations if node.name == "nll_loss")
        logarithms |= {last: each for last, each in losses if each is not None}
        found = {}
        for last, source in logarithms.items():
            behind = self.behind(source) if source.name == "log" else None
            if behind is not None and behind.name in ("div", "__truediv__"):
                behind = self.behind(behind) or behind
            if behind is None or behind.kind != "op":
                continue
            score = self.behind(behind) if behind.name.strip("_") == "sigmoid" else None
            is_of_pairs = score is not None and _SCORES_PAIRS.fullmatch(score.name.strip("_")) is not None
            if not is_of_pairs and not any("sub" in user.name for user in self.readers(behind)):
                found[last] = behind
        return found

    @cached_property
    def function_names(self) -> dict[int, str]:
        """The site names of the functions that can be recorded, by the id of the operation."""
        return function_sites(self.graph)

    @cached_property
    def last_layer(self) -> int:
        """The id of the last node with a parameter; -1 if no node has one."""
        return max((node.id for node in self.graph.nodes if node.kind == "parameter" or node.parameters), default=-1)

    @cached_property
    def trained(self) -> frozenset[int]:
        """The ids of the operations from which a gradient leads to a parameter."""
        found = {node.id for node in self.graph.nodes if node.kind == "parameter" and not node.note}
        own = set(found)
        for node in self.operations:
            if any(each.id in found for each in self.sources(node)) and not node.note.startswith("stops the gradient"):
                found.add(node.id)
        return frozenset(found - own)

    @cached_property
    def gives_gradients(self) -> set[int]:
        """The ids of the nodes that the gradient of a backward pass reaches, up to operations that stop it."""
        found, todo = set[int](), [node for node in self.graph.nodes if node.kind == "backward"]
        while todo:
            for source in self.sources(todo.pop()):
                if source.id not in found and not source.note.startswith("stops the gradient"):
                    found.add(source.id)
                    todo.append(source)
        return found

    @cached_property
    def signs(self) -> dict[int, set[int]]:
        """The signs of the terms of a loss, 1 or -1, by the id of the operation.

        A term is an operation whose result reaches the loss only through sums, means, changes of shape and constant
        factors. The signs are unknown if ``backward`` is called with an explicit gradient.
        """
        found: dict[int, set[int]] = {}
        passes = [node for node in self.graph.nodes if node.kind == "backward" and not setting(node, "gradient")]
        todo = [(source, 1) for node in passes for source in self.sources(node)]
        while todo:
            node, sign = todo.pop()
            if node.kind == "op" and sign not in found.setdefault(node.id, set()):
                found[node.id].add(sign)
                todo += [(each, sign * factor) for each, factor in self._linear_terms(node)]
        return found

    def _linear_terms(self, node: Node) -> list[tuple[Node, int]]:
        """Return the summands of an operation, each with the sign of its factor; none if the operation is not a sum."""
        sources, kind = self.sources(node), node.name.strip("_")
        if kind in ("mean", "sum", "stack", "cat") or keeps_values(node):
            return [(each, 1) for each in sources]
        if kind in ("neg", "rsub") and len(sources) == 1:
            return [(sources[0], -1)]
        factor = factor_of(node) if len(sources) == 1 else None
        if factor is not None:
            return [(sources[0], -1 if factor < 0 else 1)] if factor else []
        if kind in ("add", "radd", "iadd", "sub", "isub") and not setting(node, "alpha"):
            return [(each, -1 if place and "sub" in kind else 1) for place, each in enumerate(sources)]
        return []

    @cached_property
    def comparisons(self) -> dict[int, tuple[Node, Node]]:
        """The prediction and the target of each comparison in a loss written as a formula, by the id of the operation.

        A comparison is a difference or a product, after the last layer, of an output of the model and a tensor of the
        batch.
        """
        found = {}
        for node in self.operations:
            if node.id > self.last_layer >= 0 and node.name in _COMPARES and len(sources := self.sources(node)) == 2:
                for prediction, target in (sources, sources[::-1]):
                    if "parameter" in self.roots[prediction.id] and self.roots[target.id] == {"input"}:
                        found[node.id] = prediction, target
        return found

    def is_loss(self, node: Node) -> bool:
        """Return True for a loss function of torch, and for a comparison in a loss that is written as a formula."""
        return node.name in LOSSES or node.id in self.comparisons

    def _given_shape(self, node: Node) -> Shape | None:
        """Return the shape of the tensor at the start of a chain: go from a node to its first source, and so on."""
        while node.kind == "op" and (sources := self.sources(node)):
            node = sources[0]
        return node.outputs[0].shape if node.outputs else None

    def is_packaged(self, source: str) -> bool:
        """Return True if a code line is in an installed package."""
        return source.partition("/")[0].partition(":")[0] in self.graph.packages

    @cached_property
    def packaged(self) -> dict[str, bool]:
        """For each module that runs code, True if it is that of installed packages alone, as in a model of a library.

        The layers of torch belong to the code that calls them.
        """
        found: dict[str, bool] = {}
        for node in self.graph.nodes:
            if node.source and node.parent is not None:
                # A module belongs to the one that has it, also if a method of that one was called directly.
                name = node.name.rpartition(".")[0] if node.kind == "module" else self.owner(node)
                found[name] = found.get(name, True) and self.is_packaged(node.source)
        return found

    def place(self, node: Node) -> str:
        """Return the module that calls an operation, with the code line of the call."""
        owner = self.owner(node) or "training_step"
        return f"{owner} ({node.source})" if node.source else owner

    def owner(self, node: Node) -> str:
        """Return the name of the module that calls an operation."""
        return "" if node.parent is None else self.graph[node.parent].name


def softmax_dimension(node: Node) -> int | None:
    """Return the dimension of a softmax as a non-negative number; None if it is unknown."""
    shape, text = shape_of(node), setting(node, "dim")
    if not shape:
        return None
    if text in ("", "None"):  # the default of torch for a softmax without a dimension
        return 0 if len(shape) in (1, 3) else 1
    return int(text) % len(shape) if re.fullmatch(r"-?\d+", text) else None


def keeps_values(node: Node) -> bool:
    """Return True for a function that changes at most the shape or the dtype, and for dropout."""
    return node.kind == "op" and _SAME_VALUES.fullmatch(node.name) is not None


def shape_of(node: Node, place: int = 0) -> Shape | None:
    """Return the shape of an input of a node; None if it has no such input."""
    return node.inputs[place].shape if len(node.inputs) > place else None


def setting(node: Node, name: str) -> str:
    """Return an argument of a node as text; an empty string if the argument has its default."""
    return dict(node.arguments).get(name, "")


def listed(shape: Shape) -> str:
    """Return a shape as text, such as ``[8, 3]``."""
    return f"[{', '.join(map(str, shape))}]"


def step_of(evidence: Evidence) -> RecordedStep:
    """Return the recorded step of a run, with formulas of layers and losses replaced by torch functions."""
    # Most rules about the graph call this, so the step is cached on the evidence, as by a cached property.
    kept = vars(evidence)
    if "_recorded_step" not in kept:
        kept["_recorded_step"] = RecordedStep(recognized(evidence.graph))
    step: RecordedStep = kept["_recorded_step"]
    return step


def factor_of(node: Node) -> float | None:
    """Return the constant by which a function multiplies a tensor; None for other functions."""
    kind, text = node.name.strip("_"), setting(node, "other")
    if kind not in ("mul", "rmul", "div", "truediv") or not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    return number if "mul" in kind else 1 / number if number else None


def found_in(evidence: Evidence, name: str, verdict: str, **numbers: float) -> Finding:
    """Return a finding about a module, with its numbers."""
    table = evidence.activations if len(evidence.activations) else evidence.parameters
    return replace(evidence.view(table, name).found(verdict), numbers=numbers)


def joined(found: list[Finding]) -> Iterator[Finding]:
    """Merge several findings into the first one, which gets the modules of the others."""
    for first in found[:1]:
        names = dict.fromkeys(each.module for each in found if each.module != first.module)
        yield replace(first, others=tuple(names))


def is_attention(shape: Shape | None) -> bool:
    """Return True for a shape of attention scores: three or more dimensions, the last two equal and larger than 1."""
    return shape is not None and len(shape) >= 3 and shape[-1] == shape[-2] > 1


def is_masked(step: RecordedStep, softmax: Node) -> bool:
    """Return True if an operation between the product of queries and keys and a softmax may apply a mask."""
    seen: set[int] = set()
    todo = [softmax]
    while todo:
        node = todo.pop()
        for source in step.sources(node):
            is_sum = source.name in ("add", "add_", "__add__", "sub", "mul") and len(source.inputs) > 1
            if _MASKING.fullmatch(source.name) or is_sum or source.kind != "op":
                return True
            if source.id not in seen and source.name not in _PRODUCTS:
                seen.add(source.id)
                todo.append(source)
    return False


def sides_of(evidence: Evidence, step: RecordedStep, loss: Node) -> tuple[View, View]:
    """Return the views of the prediction and the target of a loss; empty views if they were not recorded.

    For a loss that is written as a formula, these are an output of a module and a tensor of the batch.
    """
    names = [step.function_names.get(loss.id, ""), step.owner(loss)]
    found = [[evidence.view(evidence.losses, name, path) for path in ("in.prediction", "in.target")] for name in names]
    prediction, target = next((each for each in found if each[1]), found[0])
    sources = [step.made_by(each) for each in step.sources(loss)[:2]]
    if not target and len(sources) == 2 and sources[1].kind == "input":
        target = View(evidence, evidence.losses, Site("", sources[1].name))
        prediction = evidence.output(step.owner(sources[0]))
    return prediction, target
