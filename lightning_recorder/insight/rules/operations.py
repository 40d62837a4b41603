"""Rules about the operations of the recorded step: what the loss gets, and along which dimension functions work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from lightning_recorder.functions import function_sites
from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import GRAPH, rule

Shape = tuple[int, ...]

_ANY = ("any",)

_ELEMENTWISE = frozenset(
    ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "soft_margin_loss"]
)
_LOSSES = _ELEMENTWISE | frozenset(
    [
        *("binary_cross_entropy", "cross_entropy", "nll_loss", "kl_div", "poisson_nll_loss", "gaussian_nll_loss"),
        *("multi_margin_loss", "multilabel_soft_margin_loss"),
    ]
)
# Functions that keep the values and change at most the shape or the dtype; dropout keeps them up to a factor.
_SAME_VALUES = re.compile(
    r"view|view_as|reshape|(un)?flatten|transpose|permute|movedim|swapaxes|(un)?squeeze|contiguous|clone|float|double|"
    r"half|to|type|m?[tT]|identity|(\w+_)?dropout\d?d?"
)
_CUTS_OFF = re.compile(r"(relu|hardtanh|relu6|softplus|sigmoid|hardsigmoid|tanh)_?")  # not all numbers are outputs
_RANGES = {  # of the outputs of functions
    **dict.fromkeys(("sigmoid", "softmax", "hardsigmoid"), (0.0, 1.0)),
    **dict.fromkeys(("relu", "relu_", "softplus"), (0.0, np.inf)),
    "relu6": (0.0, 6.0),
    **dict.fromkeys(("tanh", "hardtanh", "softsign"), (-1.0, 1.0)),
}
_POWERS = ("pow", "square", "abs", "__pow__")  # of a difference, in a loss that is written by hand
_DIFFERENCES = ("sub", "__sub__", "__rsub__", "rsub")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_MASKING = re.compile(r"masked_fill_?|where|tril_?|triu_?|masked_scatter_?")
_PRODUCTS = ("matmul", "bmm", "mm", "linear", "einsum")
_ATTENTION = "scaled_dot_product_attention"
_COMPARES = ("sub", "__sub__", "rsub", "__rsub__", "mul", "__mul__", "__rmul__")
_INVERTED_BY = re.compile(r"ne|__ne__|not_equal")


@dataclass(frozen=True)
class _Step:
    """The operations of the first recorded step, with the nodes on both sides of each."""

    graph: Graph

    @cached_property
    def operations(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.kind == "op" and not node.failed]

    @cached_property
    def _users(self) -> dict[int, list[Node]]:
        found: dict[int, list[Node]] = {}
        for edge in self.graph.edges:
            found.setdefault(edge.source, []).append(self.graph[edge.target])
        return found

    def sources(self, node: Node) -> list[Node]:
        """Return the nodes that a node takes tensors from, in the order of its arguments."""
        return [self.graph[edge.source] for edge in self.graph.into(node)]

    def users(self, node: Node) -> list[Node]:
        """Return the nodes that take the output of a node, without the losses' backward passes."""
        return [user for user in self._users.get(node.id, ()) if user.kind == "op"]

    def behind(self, node: Node) -> Node | None:
        """Return the node that made the values of the first input, through changes of the shape."""
        sources = self.sources(node)
        while sources and _keeps_values(sources[0]):
            inner = self.sources(sources[0])
            if not inner:
                break
            sources = inner
        return sources[0] if sources else None

    def made_by(self, node: Node) -> Node:
        """Return the node that made the values of a node, through changes of the shape; the node itself without any."""
        return (self.behind(node) or node) if _keeps_values(node) else node

    def readers(self, node: Node) -> Iterator[Node]:
        """Yield the operations that use the values of a node, through changes of the shape."""
        todo = self.users(node)
        while todo:
            user = todo.pop()
            if _keeps_values(user):
                todo += self.users(user)
            else:
                yield user

    @cached_property
    def roots(self) -> dict[int, frozenset[str]]:
        """The kinds of the tensors that each node depends on, such as ``input`` and ``parameter``."""
        found: dict[int, frozenset[str]] = {}
        for node in self.graph.nodes:
            own = frozenset([node.kind]) if node.kind in ("input", "parameter", "buffer", "tensor") else frozenset()
            found[node.id] = own.union(*(found.get(edge.source, frozenset()) for edge in self.graph.into(node)))
        return found

    @cached_property
    def batch(self) -> int:
        """The number of samples if the step leaves no doubt: each input begins with it, and each has one target; or 0.

        In a step of sequences that begin with the time, the first dimension is not the batch. Then no loss takes one
        target for each of its entries.
        """
        shapes = [node.outputs[0].shape for node in self.graph.nodes if node.kind == "input" and node.outputs]
        sizes = {shape[0] for shape in shapes if shape}
        if len(sizes) != 1:
            return 0
        (size,) = sizes
        targets = [_shape(node, 1) for node in self.operations if node.name in _LOSSES]
        targets += [self._given_shape(target) for _, target in self.comparisons.values()]
        return size if size > 1 and targets and all(each in ((size,), (size, 1)) for each in targets) else 0

    @cached_property
    def comparisons(self) -> dict[int, tuple[Node, Node]]:
        """The prediction and the target of each operation of a loss that the step computes itself, by its id.

        Behind the last layer, it is a difference or a product of what the model returns and of a tensor of the batch.
        """
        last = max((node.id for node in self.graph.nodes if node.kind == "parameter" or node.parameters), default=-1)
        found = {}
        for node in self.operations:
            if node.id > last >= 0 and node.name in _COMPARES and len(sources := self.sources(node)) == 2:
                for prediction, target in (sources, sources[::-1]):
                    if "parameter" in self.roots[prediction.id] and self.roots[target.id] == {"input"}:
                        found[node.id] = prediction, target
        return found

    def is_loss(self, node: Node) -> bool:
        """Return True for a loss of torch, and for the comparison of a loss that the step computes itself."""
        return node.name in _LOSSES or node.id in self.comparisons

    def _given_shape(self, node: Node) -> Shape | None:
        """Return the shape of the first tensor of the batch that a node follows from."""
        while node.kind == "op" and (sources := self.sources(node)):
            node = sources[0]
        return node.outputs[0].shape if node.outputs else None

    def place(self, node: Node) -> str:
        """Return the module that calls an operation, with the line of the call."""
        owner = self.owner(node) or "training_step"
        return f"{owner} ({node.source})" if node.source else owner

    def owner(self, node: Node) -> str:
        """Return the name of the module that calls an operation."""
        return "" if node.parent is None else self.graph[node.parent].name


def _keeps_values(node: Node) -> bool:
    return node.kind == "op" and _SAME_VALUES.fullmatch(node.name) is not None


def _shape(node: Node, place: int = 0) -> Shape | None:
    """Return the shape of an input of a node; None if it has no such input."""
    return node.inputs[place].shape if len(node.inputs) > place else None


def _setting(node: Node, name: str) -> str:
    return dict(node.arguments).get(name, "")


def _listed(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _softmax_dimension(node: Node) -> int | None:
    """Return the dimension of a softmax, not negative; None if it is not known."""
    shape, text = _shape(node), _setting(node, "dim")
    if not shape:
        return None
    if text in ("", "None"):  # torch's choice for a softmax without a dimension
        return 0 if len(shape) in (1, 3) else 1
    return int(text) % len(shape) if re.fullmatch(r"-?\d+", text) else None


def _of_step(evidence: Evidence) -> _Step:
    return _Step(evidence.graph)


def _found(evidence: Evidence, name: str, verdict: str, **numbers: float) -> Finding:
    table = evidence.activations if len(evidence.activations) else evidence.parameters
    return replace(evidence.view(table, name).found(verdict), numbers=numbers)


def _joined(found: list[Finding]) -> Iterator[Finding]:
    """Yield the first of several findings, with the modules of the others."""
    for first in found[:1]:
        names = dict.fromkeys(each.module for each in found if each.module != first.module)
        yield replace(first, others=tuple(names))


@rule(
    "loss-shapes",
    statistic="shapes of prediction and target of losses that compare element by element",
    usual="the same shape",
    why="Each prediction is compared with the targets of all samples, so the model learns their mean.",
    next="Give both the same shape, such as prediction.squeeze(-1) or target.unsqueeze(-1).",
    false_alarms="A target without dimensions, and dimensions of size 1 at the same place, are left out.",
    needs=(GRAPH,),
    is_lasting=True,
)
def loss_shapes(evidence: Evidence) -> Iterator[Finding]:
    """Yield the losses whose prediction and target have shapes that broadcast."""
    step = _of_step(evidence)
    for node in step.operations:
        is_own = _is_error(step, node)
        if node.name not in _ELEMENTWISE and not is_own:
            continue
        one, other = _shape(node), _shape(node, 1)
        # A scalar target, such as the label of a discriminator, and an explicit dimension of size 1 are intended.
        if one and other and len(one) != len(other):
            if is_own and "parameter" not in step.roots[step.sources(node)[0].id]:
                one, other = other, one
            verdict = (
                f"{'the difference' if is_own else node.name} in {step.place(node)} compares a prediction "
                f"{_listed(one)} with a target "
                f"{_listed(other)}: torch expands both to {_listed(_broadcast(one, other))}"
            )
            yield _found(evidence, step.owner(node), verdict)
            return


def _is_error(step: _Step, node: Node) -> bool:
    """Return True for the difference of a prediction and a target, in a loss that is written by hand."""
    sources = step.sources(node)
    one, other = (_shape(node), _shape(node, 1)) if len(node.inputs) == 2 else (None, None)
    if node.name not in _DIFFERENCES or len(sources) != 2 or not one or not other:
        return False
    # A column and a vector with the same samples; fewer dimensions alone may be meant.
    if not 1 < one[0] == other[0] or {one, other} != {(one[0],), (one[0], 1)}:
        return False
    # Pairs of predictions, as in a ranking loss, are meant.
    predicts = ["parameter" in step.roots[each.id] for each in sources]
    is_given = any("input" in step.roots[each.id] for each, one in zip(sources, predicts, strict=True) if not one)
    if sorted(predicts) != [False, True] or not is_given:
        return False
    powers = [each for each in step.users(node) if each.name in _POWERS]
    sums = [user for each in powers for user in step.users(each)]
    return any(each.name in ("mean", "sum") and each.outputs and not each.outputs[0].shape for each in sums)


def _broadcast(one: Shape, other: Shape) -> Shape:
    """Return the shape to which torch expands two shapes."""
    most = max(len(one), len(other))
    filled = [(1,) * (most - len(shape)) + shape for shape in (one, other)]
    return tuple(max(sizes) for sizes in zip(*filled, strict=True))


@rule(
    "cut-off-logits",
    statistic="function that makes the logits of cross_entropy or binary_cross_entropy_with_logits",
    usual="a linear layer, whose outputs have both signs",
    why="The loss expects logits of any sign and size. An activation before it limits them, and has no gradient, or "
    "hardly one, where it does.",
    next="Give the output of the last linear layer to the loss.",
    false_alarms="Logits that are limited and then scaled, as in models that bound their logits, are left out.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("dead-output", "gradient-stops", "does-not-move"), _ANY),
    is_lasting=True,
)
def cut_off_logits(evidence: Evidence) -> Iterator[Finding]:
    """Yield the activations that limit what a loss expects to be without limits."""
    step = _of_step(evidence)
    for node in step.operations:
        if node.name not in ("cross_entropy", "binary_cross_entropy_with_logits"):
            continue
        source = step.behind(node)
        is_double = source is not None and node.name != "cross_entropy" and source.name == "sigmoid"
        if source is not None and source.kind == "op" and _CUTS_OFF.fullmatch(source.name) and not is_double:
            owner = step.owner(source)
            verdict = f"{node.name} gets the output of the {source.name} in {step.place(source)} as logits"
            yield _found(evidence, owner, verdict)
            return


@rule(
    "no-log-softmax",
    statistic="function that makes the input of nll_loss",
    usual="log_softmax",
    why="nll_loss expects logarithms of probabilities. Other numbers make it fall without bound.",
    next="Use cross_entropy, or apply log_softmax before nll_loss.",
    false_alarms="None are known.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("exploding-gradient", "weight-drift", "sudden-change"), _ANY),
    is_lasting=True,
)
def no_log_softmax(evidence: Evidence) -> Iterator[Finding]:
    """Yield the calls of ``nll_loss`` whose prediction is no logarithm of probabilities."""
    step = _of_step(evidence)
    for node in step.operations:
        source = step.behind(node) if node.name == "nll_loss" else None
        if source is not None and source.kind == "op" and source.name in ("linear", "conv2d"):
            verdict = f"nll_loss in {step.place(node)} gets the output of the {source.name} in {step.place(source)}"
            yield _found(evidence, step.owner(source), verdict)
            return


@rule(
    "no-activation",
    statistic="linear layers whose input comes directly from a linear layer",
    usual="an activation between two linear layers",
    why="Without an activation between them, two linear layers are one: the depth adds nothing.",
    next="Add an activation, such as ReLU, between the layers.",
    false_alarms="A low-rank factorization, whose inner width is the smallest, and a layer with another reader are "
    "left out. If other linear layers have activations, it is a note.",
    needs=(GRAPH,),
    is_lasting=True,
)
def no_activation(evidence: Evidence, *, share: float = 0.99) -> Iterator[Finding]:
    """Yield a finding if linear layers follow each other directly, and a note if only some of them do."""
    step = _of_step(evidence)
    linear = [node for node in step.operations if node.name == "linear"]
    pairs = [(source, node) for node in linear if (source := _linear_before(step, node)) is not None]
    if not pairs:
        return
    first, second = pairs[0]
    shapes = " and ".join(_listed(shape) for shape in (_shape(first, 1), _shape(second, 1)) if shape)
    more = f"; {len(pairs)} pairs of layers are like this" if len(pairs) > 1 else ""
    verdict = f"{step.owner(second)} directly follows {step.owner(first)} (weights {shapes}){more}: together they "
    found = _found(evidence, step.owner(second), f"{verdict}compute what one linear layer can", pairs=len(pairs))
    # A pair in a network with activations costs time and little else.
    is_all = len(pairs) >= share * (len(linear) - 1)
    yield found if is_all else replace(found, severity="note")


def _linear_before(step: _Step, node: Node) -> Node | None:
    """Return the linear layer whose outputs a linear layer takes as they are, if nothing else reads them."""
    width = (_shape(node) or (0,))[-1:]
    source = next(iter(step.sources(node)), None)
    # Exchanged dimensions make the second layer mix other entries than the first one, as in an MLP-Mixer.
    while source is not None and _keeps_values(source) and source.outputs and source.outputs[0].shape[-1:] == width:
        if re.fullmatch(r"transpose|permute|movedim|swapaxes|m?[tT]", source.name):
            return None
        source = next(iter(step.sources(source)), None)
    if source is None or source.kind != "op" or source.name != "linear":
        return None
    is_narrow = _is_bottleneck(_shape(source, 1), _shape(node, 1))
    # Another reader, such as a residual connection, makes the inner layer useful on its own.
    is_read_once = len(list(step.readers(source))) == 1
    # Fixed weights are a transform of the input, and a layer that is called twice is a recurrence.
    weights = [_trained_weight(step, each) for each in (source, node)]
    return source if is_read_once and None not in weights and weights[0] != weights[1] and not is_narrow else None


def _trained_weight(step: _Step, layer: Node) -> int | None:
    """Return the id of the first parameter of a layer; None if it has none, or if it is frozen."""
    parameters = [each for each in step.sources(layer) if each.kind == "parameter"]
    return parameters[0].id if parameters and "frozen" not in parameters[0].note else None


def _is_bottleneck(inner: Shape | None, outer: Shape | None) -> bool:
    """Return True if the width between two layers is smaller than on both sides, as in a low-rank factorization."""
    return not inner or not outer or inner[0] < min(inner[-1], outer[0])


@rule(
    "along-batch",
    statistic="dimension of softmax, recurrence, mean and position embedding, in steps with one target for each sample",
    usual="a dimension inside of each sample",
    why="The first dimension has the samples, so that each result depends on the other samples of the batch, or on "
    "the place of the sample in it.",
    next="Choose a dimension inside of the sample: dim=-1, batch_first=True, or exchanged dimensions.",
    false_alarms="Sequences that begin with the time, and the square logits of contrastive losses, are left out.",
    needs=(GRAPH,),
    is_lasting=True,
)
def along_batch(evidence: Evidence) -> Iterator[Finding]:
    """Yield the functions and recurrences that run along the batch."""
    step = _of_step(evidence)
    descriptions = [_of_classes]
    if step.batch:
        descriptions += [_of_softmax, _of_recurrence, _of_position, _of_mean]
    found = []
    for node in step.operations:
        verdict = next(filter(None, (describe(step, node) for describe in descriptions)), "")
        if verdict:
            found.append(_found(evidence, step.owner(node), verdict, batch=step.batch))
    yield from _joined(found)


def _of_classes(step: _Step, node: Node) -> str:
    """Describe a softmax of images or sequences whose reader takes dimension 1 for the classes."""
    shape, dimension = _shape(node), _softmax_dimension(node)
    if node.name != "log_softmax" or shape is None or len(shape) < 3 or dimension in (None, 1):
        return ""
    # A loss that gets the output as it is, not in another shape.
    if not any(user.name == "nll_loss" and _shape(user) == shape for user in step.users(node)):
        return ""
    return (
        f"the {node.name} in {step.place(node)} runs over dimension {dimension} of {_listed(shape)}, and nll_loss "
        "takes dimension 1 for the classes"
    )


def _of_softmax(step: _Step, node: Node) -> str:
    """Describe a softmax over the samples of predictions, ``[samples, classes]``."""
    shape = _shape(node)
    if node.name not in ("softmax", "log_softmax") or shape is None or len(shape) != 2 or shape[1] == 1:
        return ""
    # The logits of pairs of samples, as in contrastive learning, are square.
    if shape[0] != step.batch or shape[0] == shape[1] or _softmax_dimension(node) != 0:
        return ""
    logs = [user for user in step.readers(node) if user.name in ("log", "add", "clamp")]
    logs += [user for each in logs for user in step.readers(each) if user.name == "log"]
    readers = [user for each in (node, *logs) for user in step.readers(each)]
    if not any(map(step.is_loss, readers)):
        return ""
    return f"the {node.name} in {step.place(node)} runs over dimension 0 of {_listed(shape)}, which has the samples"


def _of_recurrence(step: _Step, node: Node) -> str:
    """Describe a recurrent layer that takes the samples of the batch for steps in time."""
    shape = _shape(node)
    if node.name not in _RECURRENT or shape is None or len(shape) != 3 or not node.outputs:
        return ""
    hidden = _shape(node, 1)
    # The states have one row for each sequence.
    if shape[0] != step.batch or shape[1] in (1, shape[0]) or hidden is None or hidden[-2] != shape[1]:
        return ""
    return (
        f"the {node.name} in {step.place(node)} runs over dimension 0 of {_listed(shape)}, which has the {step.batch} "
        f"samples, and takes dimension 1 for the batch: batch_first is off"
    )


def _of_mean(step: _Step, node: Node) -> str:
    """Describe a mean over the samples that replaces each sample: nothing else reads what is averaged."""
    shape, sources = _shape(node), step.sources(node)
    dimensions = _setting(node, "dim").strip("()[],")
    if node.name not in ("mean", "sum") or not shape or len(shape) < 2 or shape[0] != step.batch or dimensions != "0":
        return ""
    is_read_once = len(sources) == 1 and [each.id for each in step.readers(step.made_by(sources[0]))] == [node.id]
    if not is_read_once or "input" not in step.roots[node.id]:
        return ""
    todo, seen = [node], {node.id}
    while todo:
        for user in step.users(todo.pop()):
            is_wide = bool(user.outputs) and user.outputs[0].shape[:1] == (step.batch,)
            if user.name in ("expand", "expand_as", "repeat") and is_wide:
                return (
                    f"the {node.name} in {step.place(node)} runs over dimension 0 of {_listed(shape)}, which has the "
                    "samples, and its result is used for each of them"
                )
            if user.id not in seen and user.name not in _LOSSES:
                seen.add(user.id)
                todo.append(user)
    return ""


def _of_position(step: _Step, node: Node) -> str:
    """Describe a tensor of the model that gives each sample of the batch an offset of its own."""
    if node.name not in ("add", "add_", "__add__", "__iadd__") or len(node.inputs) != 2 or not step.batch:
        return ""
    sources = step.sources(node)
    if len(sources) != 2:
        return ""
    for fixed, varying, place in ((sources[1], sources[0], 1), (sources[0], sources[1], 0)):
        own, other = _shape(node, place), _shape(node, 1 - place)
        is_fixed = "input" not in step.roots[fixed.id] and bool(step.roots[fixed.id] & {"buffer", "parameter"})
        if not is_fixed or "input" not in step.roots[varying.id] or not own or not other or len(own) != len(other):
            continue
        if len(own) >= 3 and own[0] == other[0] == step.batch and own[1] == 1 < other[1]:
            return (
                f"the sum in {step.place(node)} adds {_listed(own)} of the model to {_listed(other)}: another value "
                "for each sample, and the same one for all positions"
            )
    return ""


@rule(
    "one-class",
    statistic="size of the dimension of a softmax whose output a loss gets",
    usual="at least two entries",
    why="Probabilities of a single class add up to 1, whatever the input is.",
    next="Use a sigmoid for one output, or one output for each class.",
    false_alarms="Attention to one position, whose output no loss gets directly.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("gradient-stops", "does-not-move", "double-activation", "constant-input"), _ANY),
    is_lasting=True,
)
def one_class(evidence: Evidence) -> Iterator[Finding]:
    """Yield the softmax functions over a single entry."""
    step = _of_step(evidence)
    for node in step.operations:
        shape = _shape(node)
        if node.name not in ("softmax", "log_softmax") or not shape:
            continue
        dimension = _softmax_dimension(node)
        # Attention to a single position, and a mixture of one component, are intended.
        if dimension is None or shape[dimension] != 1 or not any(map(step.is_loss, step.readers(node))):
            continue
        value = "1" if node.name == "softmax" else "0"
        verdict = (
            f"the {node.name} in {step.place(node)} runs over dimension {dimension} of {_listed(shape)}, which has one "
            f"entry: its output is always {value}, and no gradient passes it"
        )
        yield _found(evidence, step.owner(node), verdict)
        return


@rule(
    "sees-the-target",
    statistic="masks of attention in a step whose targets are the inputs shifted by one position",
    usual="a causal mask",
    why="Without a causal mask, the model copies the next token from its input. It cannot when it generates text.",
    next="Pass is_causal=True or a mask above the diagonal to the attention.",
    false_alarms="Any sum, selection or mask between the product and the softmax counts as a mask.",
    needs=(GRAPH,),
    is_lasting=True,
)
def sees_the_target(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the targets are the inputs shifted by one position, and no attention is masked."""
    step = _of_step(evidence)
    if not any(node.name == "cross_entropy" and _is_shifted(step, node) for node in step.operations):
        return
    fused = [node for node in step.operations if node.name == _ATTENTION]
    plain = [node for node in step.operations if node.name == "softmax" and _is_attention(_shape(node))]
    found = [node for node in fused if _setting(node, "is_causal") != "True" and len(node.inputs) < 4]
    found += [node for node in plain if not _is_masked(step, node)]
    if found and len(found) == len(fused) + len(plain):
        first = found[0]
        verdict = (
            f"the targets of cross_entropy are the inputs shifted by one position, and the attention in "
            f"{step.place(first)} has no mask, nor has any other: each position sees the token that it has to predict"
        )
        yield _found(evidence, step.owner(first), verdict, attentions=len(found))


def _is_shifted(step: _Step, loss: Node) -> bool:
    """Return True if the targets of a loss are an input of the model without the first position."""
    sources = step.sources(loss)
    target = sources[1] if len(sources) > 1 else None
    while target is not None and _keeps_values(target):
        target = next(iter(step.sources(target)), None)
    if target is None or target.name != "getitem" or re.search(r"(^|, )1:(, |$)", _setting(target, "index")) is None:
        return False
    roots = step.sources(target)
    if not roots or roots[0].kind != "input":
        return False
    # The same tensor, without the last position, is what the model reads.
    users = [each for each in step.users(roots[0]) if each is not target]
    return any(each.name in ("getitem", "embedding") for each in users)


def _is_attention(shape: Shape | None) -> bool:
    return shape is not None and len(shape) >= 3 and shape[-1] == shape[-2] > 1


def _is_masked(step: _Step, softmax: Node) -> bool:
    """Return True if anything between the product of queries and keys and a softmax may be a mask."""
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


@rule(
    "inverted-mask",
    statistic="comparison with the padding that makes the mask of an attention",
    usual="tokens == padding",
    why="The modules of torch leave out the positions where a padding mask is True.",
    next="Pass tokens == padding as key_padding_mask.",
    false_alarms="Masks that are made outside of the recorded step are not known.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("constant-input", "attention-collapse"), _ANY),
    is_lasting=True,
)
def inverted_mask(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if attention leaves out the tokens that are not padding."""
    step = _of_step(evidence)
    padding = {_setting(node, "padding_idx") for node in step.operations if node.name == "embedding"} - {"", "None"}
    for node in step.operations:
        if node.name not in ("masked_fill", "masked_fill_") or not _is_low(_setting(node, "value")):
            continue
        sources = step.sources(node)
        mask = sources[-1] if len(sources) > 1 else None
        while mask is not None and (_keeps_values(mask) or mask.name in ("expand", "bool", "getitem")):
            mask = next(iter(step.sources(mask)), None)
        if mask is not None and (verdict := _of_triangle(step, node, mask)):
            yield _found(evidence, step.owner(node), verdict)
            return
        if mask is not None and _INVERTED_BY.fullmatch(mask.name) and _setting(mask, "other") in padding:
            verdict = (
                f"the mask in {step.place(node)} is True where the token is not the padding "
                f"({_setting(mask, 'other')}), and attention leaves out what is True: it sees the padding alone"
            )
            yield _found(evidence, step.owner(node), verdict)
            return


def _is_low(value: str) -> bool:
    """Return True for a number that a softmax makes zero."""
    return value == "float('-inf')" or (
        re.fullmatch(r"-(inf|[\d.]+(e\+?\d+)?)", value) is not None and float(value) < -1e3
    )


def _of_triangle(step: _Step, fill: Node, mask: Node) -> str:
    """Describe a causal mask that leaves out the past: the lower triangle, or what is not in the upper one."""
    sources = step.sources(mask)
    is_negated = mask.name in ("invert", "bitwise_not", "logical_not") or (
        mask.name in ("eq", "__eq__") and _setting(mask, "other") in ("0", "0.0", "False")
    )
    triangle = step.made_by(sources[0]) if is_negated and sources else mask
    is_attention = any(each.name == "softmax" for each in step.readers(fill)) and _is_attention(_shape(fill))
    if not is_attention or triangle.name.rstrip("_") != ("triu" if is_negated else "tril"):
        return ""
    return (
        f"the mask in {step.place(fill)} leaves out the earlier positions and keeps the later ones: each position sees "
        "the tokens after it"
    )


@rule(
    "target-scale",
    statistic="mean error of a regression, from the gradient of its last bias, against the rms of the predictions",
    usual="below 1 after the first records",
    why="The targets are far larger than what the last layer returns, so that training spends its steps on their mean.",
    next="Standardize the targets, or set the bias of the last layer to their mean.",
    false_alarms="The first records count only in a run of fewer than eight, which has no finding.",
    needs=("activations", "parameters", GRAPH),
    records=8,
    explains=dict.fromkeys(
        ("exploding-gradient", "weight-drift", "sudden-change", "learning-rate-outlier", "scale-jump"), _ANY
    ),
)
def target_scale(
    evidence: Evidence, *, persistence: int = 4, ratio: float = 10.0, records: int = 8
) -> Iterator[Finding]:
    """Yield a finding if the mean error of a regression stays far larger than its predictions.

    The gradient of the last bias under a mean squared error of K outputs is 2/K times the mean error of each.
    """
    step = _of_step(evidence)
    for node in step.operations:
        layer = step.behind(node) if node.name == "mse_loss" and _setting(node, "reduction") in ("", "'mean'") else None
        users = step.users(node) if layer is not None else [node]
        shape = _shape(node)
        # A factor, another term of the loss, or another use of the layer would change the gradient.
        if layer is None or layer.name != "linear" or users or not shape or len(list(step.readers(layer))) != 1:
            continue
        name = step.owner(layer)
        gradient = evidence.parameter(name, "bias").gradient
        gradients, steps = gradient.column("rms")
        sizes = evidence.output(name).rms
        if min(len(gradients), len(sizes)) < persistence or len(gradients) < records:
            continue
        errors = gradients[-persistence:] * (layer.outputs[0].shape[-1] if layer.outputs else 1) / 2
        if (errors / sizes[-persistence:] > ratio).all():
            error, size = float(errors[-1]), float(sizes[-1])
            verdict = (
                f"the mean error of the predictions from {name} is {error:.3g} at step {int(steps[-1])}, "
                f"{error / size:.3g} × their rms ({size:.3g})"
            )
            yield gradient.found(verdict, "rms", error=error, rms=size)
            return


@rule(
    "unused-codes",
    statistic="rows of a code book with a gradient, if argmin or argmax chooses the rows",
    usual="at least a tenth of the rows, as far as the batch can reach them",
    why="Nearly all samples are closest to the same rows, and rows without a gradient do not move to the samples.",
    next="Begin with rows from encoded samples, replace rows that are not used, or normalize codes and samples.",
    false_alarms="Batches that look up fewer than 20 rows are left out.",
    needs=("parameters", GRAPH),
    records=8,
)
def unused_codes(
    evidence: Evidence, *, persistence: int = 8, share: float = 0.05, reached: int = 20
) -> Iterator[Finding]:
    """Yield a finding if the nearest rows of a code book are nearly always the same few ones."""
    step = _of_step(evidence)
    parameters = {each.name: each for each in evidence.tensors}
    for node in step.operations:
        if node.name not in ("embedding", "getitem", "index_select"):
            continue
        sources = step.sources(node)
        nearest = next((each for each in map(step.made_by, sources) if each.name in ("argmin", "argmax")), None)
        book = next((parameters[each.name] for each in sources if each.name in parameters), None)
        if nearest is None or book is None or not book.gradient or not nearest.outputs:
            continue
        rows = book.shape[0] if book.shape else 0
        possible = min(rows, prod(nearest.outputs[0].shape))
        zeros, steps = book.gradient.column("zero_fraction")
        last = np.round((1 - zeros[-persistence:]) * rows)
        if len(last) < persistence or possible < reached:
            continue
        if (last <= share * possible).all():
            most = int(last.max())
            verdict = (
                f"at most {most} of the {rows} rows of {book.name} got a gradient in each of the last {len(last)} "
                f"records; a batch looks up the nearest row {prod(nearest.outputs[0].shape)} times"
            )
            since = int(steps[-persistence])
            yield book.gradient.found(verdict, since=since, used=most, rows=rows)
            return


def _sides(evidence: Evidence, step: _Step, loss: Node) -> tuple[View, View]:
    """Return the recorded prediction and target of a loss; views of nothing if they were not recorded."""
    names = [function_sites(step.graph).get(loss.id, ""), step.owner(loss)]
    found = [[evidence.view(evidence.losses, name, path) for path in ("in.prediction", "in.target")] for name in names]
    prediction, target = next((each for each in found if each[1]), found[0])
    return prediction, target


_SQUARED = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_BINARY = ("binary_cross_entropy", "binary_cross_entropy_with_logits")


@rule(
    "output-range",
    statistic="smallest and largest target of a loss, against the range of the function that makes the predictions",
    usual="the targets are in the range",
    why="The activation after the last layer cannot return these targets, so that the loss stays high whatever is "
    "learned.",
    next="Remove the activation after the last layer, or scale the targets to its range.",
    false_alarms="Targets beyond the range by less than a tenth of it, or of their size, do not count.",
    needs=("activations", GRAPH),
    records=4,
    explains=dict.fromkeys(
        ("target-scale", "saturation", "dead-output", "gradient-stops", "vanishing-gradient", "barely-moves"), _ANY
    ),
)
def output_range(evidence: Evidence, *, persistence: int = 4, margin: float = 0.1) -> Iterator[Finding]:
    """Yield the losses whose targets are out of the range of their predictions."""
    step = _of_step(evidence)
    for node in step.operations:
        source = step.behind(node)
        if node.name in _BINARY:
            low, high = 0.0, 1.0
        elif node.name in _SQUARED and source is not None and source.kind == "op" and source.name in _RANGES:
            low, high = _RANGES[source.name]
        else:
            continue
        _, target = _sides(evidence, step, node)
        (least, most, size), steps = target.columns("min", "max", "rms")
        if len(steps) < persistence:
            continue
        # Without an upper end, the size of the targets is the scale.
        beyond = np.maximum(low - least, most - high) / np.where(np.isfinite(high), high - low, np.maximum(size, 1e-30))
        if not (beyond[-persistence:] > margin).all():
            continue
        targets = f"targets from {least.min():.3g} to {most.max():.3g}"
        if node.name in _BINARY:
            verdict = f"{node.name} in {step.place(node)} gets {targets}, and expects 0 to 1"
            why = "The target of this loss is a probability. It has no least value for other targets."
            following = "Scale the labels to 0 and 1, or use a loss for regression."
            yield replace(target.found(verdict, "max"), module=step.owner(node), path="", why=why, next=following)
        else:
            assert source is not None
            ends = f"{low:.3g} to {high:.3g}" if np.isfinite(high) else f"at least {low:.3g}"
            verdict = (
                f"{node.name} in {step.place(node)} gets {targets}, but the {source.name} in {step.place(source)} "
                f"returns {ends}"
            )
            yield replace(target.found(verdict, "max"), module=step.owner(source), path="")
        return


@rule(
    "classes-by-error",
    statistic="targets of a squared or absolute error whose predictions are probabilities of classes",
    usual="cross_entropy for classes",
    why="A squared error of probabilities has hardly a gradient where a prediction is sure and wrong.",
    next="Use cross_entropy or binary_cross_entropy_with_logits, and give it the output of the last linear layer.",
    false_alarms="Probabilities of another model as targets, and predictions of several sigmoids, such as the pixels "
    "of an image, are left out.",
    needs=("activations", GRAPH),
    records=4,
)
def classes_by_error(evidence: Evidence, *, persistence: int = 4, tolerance: float = 1e-6) -> Iterator[Finding]:
    """Yield the losses for numbers whose predictions are probabilities and whose targets are classes."""
    step = _of_step(evidence)
    for node in step.operations:
        source, shape = step.behind(node), _shape(node)
        if node.name not in _SQUARED or source is None or source.name not in ("softmax", "sigmoid") or not shape:
            continue
        if source.name == "sigmoid" and prod(shape[1:]) != 1:
            continue
        _, target = _sides(evidence, step, node)
        (least, most, mean, size), steps = target.columns("min", "max", "mean", "rms")
        last = slice(-persistence, None)
        # Values that are 0 or 1 are equal to their squares.
        are_binary = (least == 0) & (most == 1) & (np.abs(mean - size**2) < tolerance)
        if len(steps) >= persistence and are_binary[last].all():
            verdict = (
                f"{node.name} in {step.place(node)} compares the output of the {source.name} in {step.place(source)} "
                "with targets of 0 and 1, which are classes"
            )
            yield replace(target.found(verdict), module=step.owner(source), path="")
            return


@rule(
    "constant-target",
    statistic="std of the targets of a loss",
    usual="the targets differ between samples",
    why="The labels are lost on the way: a wrong column, a division of whole numbers, or a cast.",
    next="Print the targets of some batches, and compare them with the data set.",
    false_alarms="Targets that the step makes without the batch, such as those of a discriminator or of contrastive "
    "learning, and targets of 0 for a penalty, are left out.",
    needs=("activations", GRAPH),
    records=5,
    explains=dict.fromkeys(("vanishing-gradient", "gradient-stops", "barely-moves", "saturation"), _ANY),
)
def constant_target(evidence: Evidence, *, persistence: int = 5, samples: int = 4) -> Iterator[Finding]:
    """Yield the losses whose targets are the same number in all records."""
    step = _of_step(evidence)
    for node in step.operations:
        sources = step.sources(node)
        if node.name not in _LOSSES or len(sources) < 2 or "input" not in step.roots[sources[1].id]:
            continue
        if "parameter" in step.roots[sources[1].id]:
            continue
        _, target = _sides(evidence, step, node)
        (least, most), steps = target.columns("min", "max")
        if len(steps) < persistence or target.numel < samples:
            continue
        if least.min() == most.max() and np.isfinite(least[0]) and least[0] != -100:
            verdict = (
                f"all targets of {node.name} in {step.place(node)} are {least[0]:.3g} in each of {len(steps)} records"
            )
            yield replace(target.found(verdict, "max"), module=step.owner(node), path="")
            return


@rule(
    "padding-as-target",
    statistic="share of the targets of cross_entropy that are the padding of an embedding of the same tokens",
    usual="the padding is ignored",
    why="The model learns to predict the padding, which is easy, and the loss looks better than the model is.",
    next="Pass ignore_index with the number of the padding to cross_entropy.",
    false_alarms="An embedding without padding_idx, and padding with another number than 0, are not known.",
    needs=("activations", GRAPH),
    records=4,
)
def padding_as_target(evidence: Evidence, *, persistence: int = 4, share: float = 0.2) -> Iterator[Finding]:
    """Yield the losses many of whose targets are the padding."""
    step = _of_step(evidence)
    pads = [node for node in step.operations if node.name == "embedding" and _setting(node, "padding_idx") == "0"]
    tokens = {each.id for node in pads for each in _inputs_of(step, node)}
    for node in step.operations:
        sources = step.sources(node)
        if node.name != "cross_entropy" or len(sources) < 2 or _setting(node, "ignore_index") == "0":
            continue
        if not tokens & {each.id for each in _inputs_of(step, sources[1])} or _setting(node, "weight"):
            continue
        _, target = _sides(evidence, step, node)
        zeros, steps = target.column("zero_fraction")
        if len(steps) >= persistence and (zeros[-persistence:] > share).all():
            verdict = (
                f"{np.median(zeros):.0%} of the targets of cross_entropy in {step.place(node)} are 0, the padding of "
                f"{step.owner(pads[0])}, and none is ignored"
            )
            yield replace(target.found(verdict, "zero_fraction"), module=step.owner(node), path="")
            return


def _inputs_of(step: _Step, node: Node) -> list[Node]:
    """Return the inputs of the model that a node takes through changes of the shape and selections."""
    found, todo = [], [node]
    while todo:
        each = todo.pop()
        if each.kind == "input":
            found.append(each)
        elif each is node or _keeps_values(each) or each.name in ("getitem", "narrow", "long", "clone", "chunk"):
            todo += step.sources(each)
    return found


@rule(
    "copies-the-input",
    statistic="positions of the targets of a causal model, against those of the tokens that it reads",
    usual="the target of each position is the next token",
    why="Each position has its target as input, so that the model learns to copy it, and the loss falls to 0.",
    next="Compare the logits of all positions but the last with the tokens from the second one on.",
    false_alarms="Models without a causal mask, such as autoencoders, and those that shift the tokens themselves, are "
    "left out.",
    needs=(GRAPH,),
    is_lasting=True,
)
def copies_the_input(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the targets of a causal model are the tokens that it reads at the same positions."""
    step = _of_step(evidence)
    attentions = [node for node in step.operations if node.name == "softmax" and _is_attention(_shape(node))]
    is_causal = any(_is_masked(step, node) for node in attentions) or any(
        node.name == _ATTENTION and (_setting(node, "is_causal") == "True" or len(node.inputs) > 3)
        for node in step.operations
    )
    for node in step.operations if is_causal else ():
        sources = step.sources(node)
        if node.name != "cross_entropy" or len(sources) < 2:
            continue
        tokens, logits = step.made_by(sources[1]), step.made_by(sources[0])
        readers = list(step.readers(tokens)) if tokens.kind == "input" else []
        is_read = bool(readers) and all(each is node or each.name == "embedding" for each in readers)
        if is_read and len(readers) > 1 and logits.name == "linear" and tokens.id in _ancestors(step, logits):
            verdict = (
                f"the targets of cross_entropy in {step.place(node)} are the tokens that the model reads at the same "
                "positions: it learns to copy them"
            )
            yield _found(evidence, step.owner(node), verdict)
            return


def _ancestors(step: _Step, node: Node) -> set[int]:
    """Return the ids of the nodes that a node depends on."""
    found, todo = set(), [node]
    while todo:
        for source in step.sources(todo.pop()):
            if source.id not in found:
                found.add(source.id)
                todo.append(source)
    return found


@rule(
    "exchanged-by-view",
    statistic="shapes of the input and the output of view and reshape",
    usual="a view splits or joins dimensions",
    why="A view keeps the order of the values in memory, so that exchanging two sizes mixes samples, positions and "
    "features.",
    next="Exchange dimensions with transpose or permute.",
    false_alarms="Dimensions of size 1, and values that do not depend on the batch, are left out.",
    needs=(GRAPH,),
    is_lasting=True,
)
def exchanged_by_view(evidence: Evidence) -> Iterator[Finding]:
    """Yield the views whose output has two sizes of the input in exchanged places."""
    step = _of_step(evidence)
    found = []
    for node in step.operations:
        shape = _shape(node)
        if node.name not in ("view", "reshape") or not shape or not node.outputs or "input" not in step.roots[node.id]:
            continue
        other = node.outputs[0].shape
        moved = [place for place, sizes in enumerate(zip(shape, other, strict=False)) if len(set(sizes)) > 1]
        if len(shape) == len(other) and len(moved) == 2 and sorted(shape) == sorted(other) and 1 not in shape:
            verdict = (
                f"the {node.name} in {step.place(node)} makes {_listed(other)} of {_listed(shape)}: it mixes the "
                f"dimensions {moved[0]} and {moved[1]} instead of exchanging them"
            )
            found.append(_found(evidence, step.owner(node), verdict))
    yield from _joined(found)


_INITIALIZES = re.compile(r"(kaiming|xavier|trunc)_(normal|uniform)_?|(uniform|normal|orthogonal)_?")
_LAYERS = ("linear", "embedding", "conv1d", "conv2d", "conv3d")


@rule(
    "made-in-forward",
    statistic="weights of layers in the recorded graph that a function initializes in the same step",
    usual="weights are parameters of the model",
    why="The layer is made in forward, so that it has new random weights in each step, and no optimizer has them.",
    next="Make the layer in __init__.",
    false_alarms="Random matrices that are multiplied without a layer, such as random projections, are left out.",
    needs=(GRAPH,),
    is_lasting=True,
)
def made_in_forward(evidence: Evidence) -> Iterator[Finding]:
    """Yield the layers whose weight the step itself makes and initializes."""
    step = _of_step(evidence)
    found = []
    for node in step.operations:
        weights = [each for each in step.sources(node) if node.name in _LAYERS and each.kind == "op"]
        if any(_INITIALIZES.fullmatch(each.name) and not step.roots[each.id] for each in weights):
            verdict = f"the weight of the {node.name} in {step.place(node)} is made and initialized in the step itself"
            found.append(_found(evidence, step.owner(node), verdict))
    yield from _joined(found)
