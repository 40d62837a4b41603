"""Rules about the operations of the recorded step: their order and their dimensions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np

from lightning_recorder.graph.model import Node, TensorMeta
from lightning_recorder.insight.evidence import Evidence
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.recorded_step import (
    ATTENTION,
    LOSSES,
    RecordedStep,
    Shape,
    factor_of,
    found_in,
    is_attention,
    is_masked,
    joined,
    keeps_values,
    listed,
    setting,
    shape_of,
    softmax_dimension,
    step_of,
)
from lightning_recorder.insight.rule import GRAPH, rule
from lightning_recorder.insight.rules.blocks import attention_layers

_ANY = ("any",)

_DIFFERENCES = ("sub", "__sub__", "__rsub__", "rsub")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_PRODUCTS = ("matmul", "bmm")
_MASKS = ("masked_fill", "where", "add", "clamp")
_CLOSE = 0.01
_FEWEST = 2  # the least number of attention layers
_ALIKE = {
    ATTENTION,
    *("embedding", "linear", "addmm", "matmul", "bmm", "softmax", "layer_norm", "rms_norm", "masked_fill"),
    *("gelu", "relu", "silu", "tanh", "sigmoid", "erf", "clamp", "square", "sqrt", "rsqrt", "neg", "pow"),
    *("add", "iadd", "radd", "sub", "mul", "imul", "rmul", "div", "truediv", "mean", "var"),
    *("split", "chunk", "unbind", "expand", "repeat_interleave", "cat"),
}
"""The functions that treat all positions alike if their inputs do."""
_INVERTED_BY = re.compile(r"ne|__ne__|not_equal")


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
    """Yield a finding if all linear layers follow each other directly, and a note if only some do."""
    step = step_of(evidence)
    linear = [node for node in step.operations if node.name == "linear"]
    pairs = [(source, node) for node in linear if (source := _linear_before(step, node)) is not None]
    if not pairs:
        return
    first, second = pairs[0]
    shapes = " and ".join(listed(shape) for shape in (shape_of(first, 1), shape_of(second, 1)) if shape)
    more = f"; {len(pairs)} pairs of layers are like this" if len(pairs) > 1 else ""
    verdict = f"{step.owner(second)} directly follows {step.owner(first)} (weights {shapes}){more}: together they "
    found = found_in(evidence, step.owner(second), f"{verdict}compute what one linear layer can", pairs=len(pairs))
    # In a network with activations, a pair of linear layers only costs time, so the finding is a note.
    is_all = len(pairs) >= share * (len(linear) - 1)
    yield found if is_all else replace(found, severity="note")


def _linear_before(step: RecordedStep, node: Node) -> Node | None:
    """Return the linear layer that directly feeds another linear layer, if it has no other users."""
    width = (shape_of(node) or (0,))[-1:]
    source = next(iter(step.sources(node)), None)
    # After a transpose, the second layer mixes other entries than the first one, as in an MLP-Mixer.
    while source is not None and keeps_values(source) and source.outputs and source.outputs[0].shape[-1:] == width:
        if re.fullmatch(r"transpose|permute|movedim|swapaxes|m?[tT]", source.name):
            return None
        source = next(iter(step.sources(source)), None)
    if source is None or source.kind != "op" or source.name != "linear":
        return None
    is_narrow = _is_bottleneck(shape_of(source, 1), shape_of(node, 1))
    # With another user, such as a residual connection, the first layer is not redundant.
    is_read_once = len(list(step.readers(source))) == 1
    # A layer with fixed weights is a transform of the input, and a layer that is called twice is a recurrence, so
    # neither counts.
    weights = [_trained_weight(step, each) for each in (source, node)]
    return source if is_read_once and None not in weights and weights[0] != weights[1] and not is_narrow else None


def _trained_weight(step: RecordedStep, layer: Node) -> int | None:
    """Return the id of the first parameter of a layer; None if there is none or it is frozen."""
    parameters = [each for each in step.sources(layer) if each.kind == "parameter"]
    return parameters[0].id if parameters and "frozen" not in parameters[0].note else None


def _is_bottleneck(inner: Shape | None, outer: Shape | None) -> bool:
    """Return True if the width between two layers is smaller than on both sides, as in a low-rank factorization."""
    return not inner or not outer or inner[0] < min(inner[-1], outer[0])


@rule(
    "single-unit",
    statistic="values of a sample between two layers, if all that the predictions depend on passes between them",
    usual="at least about as many as the model has outputs",
    why="A layer has one output, such as where the number of outputs of the model was also given to a hidden layer.",
    next="Give the hidden layer more units.",
    false_alarms="Latents of autoencoders, gates and weights of attention, which something else passes by, and models "
    "of one or two outputs are left out.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("scale-jump", "unlike-siblings", "vanishing-gradient", "dead-output", "saturation"), _ANY),
    is_lasting=True,
)
def single_unit(evidence: Evidence, *, outputs: int = 3) -> Iterator[Finding]:
    """Yield a finding if each sample is reduced to one number between two layers, but the model returns several."""
    step = step_of(evidence)
    inputs = {node.id for node in evidence.graph.nodes if node.kind == "input"}
    for loss in step.operations:
        sources = step.sources(loss) if loss.name in LOSSES else []
        shape = shape_of(loss)
        if len(sources) < 2 or not shape or len(shape) != 2 or shape[1] < outputs:
            continue
        before = {sources[0].id, *step.ancestors(sources[0])}
        targets = {sources[1].id, *step.ancestors(sources[1])}
        for node in step.operations:
            if node.id not in before or node.name != "linear" or shape_of(node) != (shape[0], 1):
                continue
            layer = _layer_before(step, node)
            if layer is None or targets & inputs & step.ancestors(layer):
                continue
            if inputs.isdisjoint(_ancestors_without(step, sources[0], layer)):
                verdict = (
                    f"{step.owner(layer) or layer.name} returns one number for each sample, from which the "
                    f"{shape[1]} outputs follow"
                )
                yield found_in(evidence, step.owner(layer), verdict, values=1.0)
                return


_SELECTS = ("getitem", "select", "unbind", "narrow")
_KEEPS_UNITS = re.compile(r"(leaky_|p)?relu6?_?|gelu|silu|elu|selu|tanh_?|sigmoid_?|softplus|\w*_norm")


def _layer_before(step: RecordedStep, node: Node) -> Node | None:
    """Return the layer with several inputs before another layer, skipping activations."""
    source = step.behind(node)
    while source is not None and (_KEEPS_UNITS.fullmatch(source.name) or source.name in _SELECTS):
        source = step.behind(source)
    is_layer = source is not None and source.name in ("linear", *_RECURRENT) and (shape_of(source) or (1,))[-1] > 1
    return source if is_layer else None


def _ancestors_without(step: RecordedStep, node: Node, cut: Node) -> set[int]:
    """Return the ids of the nodes that a node depends on along paths that avoid the node ``cut``."""
    found, todo = set[int](), [node]
    while todo:
        for source in step.sources(todo.pop()):
            if source.id not in found and source.id != cut.id:
                found.add(source.id)
                todo.append(source)
    return found


@rule(
    "along-batch",
    statistic="dimension of softmax, recurrence, attention, mean, normalization and position embedding, in steps with "
    "one target for each sample",
    usual="a dimension inside of each sample",
    why="The first dimension has the samples, so that each result depends on the other samples of the batch, or on "
    "the place of the sample in it.",
    next="Choose a dimension inside of the sample: dim=-1, batch_first=True, or exchanged dimensions.",
    false_alarms="Sequences that begin with the time, the square logits of contrastive losses, and attention between "
    "samples in a single sequence are left out.",
    needs=(GRAPH,),
    is_lasting=True,
)
def along_batch(evidence: Evidence) -> Iterator[Finding]:
    """Yield the functions and recurrent layers that run along the batch dimension."""
    step = step_of(evidence)
    descriptions = [_of_classes]
    if step.batch:
        descriptions += [_of_softmax, _of_recurrence, _of_attention, _of_position, _of_mean, _of_whole, _of_normalize]
    found = []
    for node in step.operations:
        verdict = next(filter(None, (describe(step, node) for describe in descriptions)), "")
        if verdict:
            found.append(found_in(evidence, step.owner(node), verdict, batch=step.batch))
    yield from joined(found)


def _of_classes(step: RecordedStep, node: Node) -> str:
    """Describe a softmax of images or sequences over another dimension than 1, where the loss expects the classes."""
    shape, dimension = shape_of(node), softmax_dimension(node)
    if node.name != "log_softmax" or shape is None or len(shape) < 3 or dimension in (None, 1):
        return ""
    # Only a loss that gets the output in the same shape counts.
    if not any(user.name == "nll_loss" and shape_of(user) == shape for user in step.users(node)):
        return ""
    return (
        f"the {node.name} in {step.place(node)} runs over dimension {dimension} of {listed(shape)}, and nll_loss "
        "takes dimension 1 for the classes"
    )


def _of_softmax(step: RecordedStep, node: Node) -> str:
    """Describe a softmax over the samples of predictions, ``[samples, classes]``."""
    shape = shape_of(node)
    if node.name not in ("softmax", "log_softmax") or shape is None or len(shape) != 2 or shape[1] == 1:
        return ""
    # Square logits may be those of all pairs of samples, as in contrastive learning.
    if shape[0] != step.batch or shape[0] == shape[1] or softmax_dimension(node) != 0:
        return ""
    logs = [user for user in step.readers(node) if user.name in ("log", "add", "clamp")]
    logs += [user for each in logs for user in step.readers(each) if user.name == "log"]
    readers = [user for each in (node, *logs) for user in step.readers(each)]
    if not any(map(step.is_loss, readers)):
        return ""
    return f"the {node.name} in {step.place(node)} runs over dimension 0 of {listed(shape)}, which has the samples"


def _of_recurrence(step: RecordedStep, node: Node) -> str:
    """Describe a recurrent layer that treats the samples of the batch as time steps."""
    shape = shape_of(node)
    if node.name not in _RECURRENT or shape is None or len(shape) != 3 or not node.outputs:
        return ""
    hidden = shape_of(node, 1)
    # The hidden state has one row for each sequence.
    if shape[0] != step.batch or shape[1] in (1, shape[0]) or hidden is None or hidden[-2] != shape[1]:
        return ""
    return (
        f"the {node.name} in {step.place(node)} runs over dimension 0 of {listed(shape)}, which has the {step.batch} "
        f"samples, and takes dimension 1 for the batch: batch_first is off"
    )


def _of_attention(step: RecordedStep, node: Node) -> str:
    """Describe an attention layer that treats the samples of the batch as positions of a sequence."""
    shape = shape_of(node)
    # The function gets [positions, samples, features]. A layer with batch_first transposes its input before the call.
    if node.name != "multi_head_attention_forward" or shape is None or len(shape) != 3 or shape[0] != step.batch:
        return ""
    # A single sequence of all samples is intended. Windows of samples are a multiple of the batch size.
    if shape[1] == 1 or shape[1] % step.batch == 0 or "input" not in step.roots[node.id]:
        return ""
    return (
        f"the attention in {step.place(node)} runs over dimension 0 of {listed(shape)}, which has the {step.batch} "
        f"samples, and takes dimension 1 for the batch: batch_first is off"
    )


_TO_ROWS = re.compile(r"(index|scatter)_(add|reduce)_?")


def _of_mean(step: RecordedStep, node: Node) -> str:
    """Describe a mean over the samples that replaces each sample: the averaged tensor has no other users."""
    shape, sources = shape_of(node), step.sources(node)
    dimensions = setting(node, "dim").strip("()[],")
    if _TO_ROWS.fullmatch(node.name) and node.outputs and node.outputs[0].shape[:1] == (1,) and sources:
        # A pooling of all nodes of a batch of graphs into one row.
        shape, sources, dimensions = shape_of(node, len(node.inputs) - 1), sources[-1:], "0"
    elif node.name not in ("mean", "sum") or not shape or shape[0] != step.batch:
        return ""
    if not shape or len(shape) < 2 or shape[0] % step.batch or dimensions != "0":
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
                    f"the {node.name} in {step.place(node)} runs over dimension 0 of {listed(shape)}, which has the "
                    "samples, and its result is used for each of them"
                )
            if user.id not in seen and user.name not in LOSSES:
                seen.add(user.id)
                todo.append(user)
    return ""


def _of_whole(step: RecordedStep, node: Node) -> str:
    """Describe a normalization by the standard deviation of all values of a batch, between two layers."""
    sources, shape = step.sources(node), shape_of(node)
    if node.name not in ("div", "__truediv__", "div_") or len(sources) != 2 or not shape or shape[0] != step.batch:
        return ""
    centered, scale = sources
    # Skip an added epsilon and the square root of a variance.
    while scale.name in ("add", "sqrt", "clamp") and len(inner := step.sources(scale)) == 1:
        (scale,) = inner
    if centered.name not in _DIFFERENCES or scale.name not in ("std", "var") or scale.outputs[0].shape:
        return ""
    of_mean, of_scale = step.sources(centered), step.sources(scale)
    if len(of_mean) != 2 or of_mean[0].id != of_scale[0].id or of_mean[1].name != "mean" or of_mean[1].outputs[0].shape:
        return ""
    # A batch that is normalized before the first layer, and values after the last layer, such as returns, are fine.
    if not {"input", "parameter"} <= step.roots[node.id] or not _feeds_a_layer(step, node):
        return ""
    return (
        f"the normalization in {step.place(node)} divides {listed(shape)} by the standard deviation of all values of "
        "the batch"
    )


def _feeds_a_layer(step: RecordedStep, node: Node) -> bool:
    """Return True if a function with a parameter follows on a node."""
    todo, seen = [node], {node.id}
    for each in todo:
        users = [user for user in step.users(each) if user.id not in seen]
        if any(source.kind == "parameter" for user in users for source in step.sources(user)):
            return True
        todo += users
        seen |= {user.id for user in users}
    return False


def _of_normalize(step: RecordedStep, node: Node) -> str:
    """Describe a division of each feature by its norm over the samples, between two layers."""
    shape = shape_of(node)
    if node.name != "normalize" or shape is None or len(shape) < 2 or shape[0] != step.batch:
        return ""
    if setting(node, "dim") not in ("0", str(-len(shape))) or not {"input", "parameter"} <= step.roots[node.id]:
        return ""
    # If no layer follows, dividing by the norm over the samples is right for a correlation of features, but not for
    # products of samples.
    pairs = [user for user in step.readers(node) if user.name in ("matmul", "mm", "__matmul__")]
    is_of_samples = any(each.outputs and each.outputs[0].shape == (step.batch, step.batch) for each in pairs)
    if not _feeds_a_layer(step, node) and not (is_of_samples and shape[-1] != step.batch):
        return ""
    return f"the normalize in {step.place(node)} runs over dimension 0 of {listed(shape)}, which has the samples"


def _of_position(step: RecordedStep, node: Node) -> str:
    """Describe a tensor of the model that adds a different offset to each sample of the batch."""
    if node.name not in ("add", "add_", "__add__", "__iadd__") or len(node.inputs) != 2 or not step.batch:
        return ""
    sources = step.sources(node)
    if len(sources) != 2:
        return ""
    for fixed, varying, place in ((sources[1], sources[0], 1), (sources[0], sources[1], 0)):
        own, other = shape_of(node, place), shape_of(node, 1 - place)
        is_fixed = "input" not in step.roots[fixed.id] and bool(step.roots[fixed.id] & {"buffer", "parameter"})
        if not is_fixed or "input" not in step.roots[varying.id] or not own or not other or len(own) != len(other):
            continue
        # If the first two dimensions have the same size, the first one may be the time. The sum is then an intended
        # offset for each position, so such tensors are left out.
        if len(own) >= 3 and own[0] == other[0] == step.batch and own[1] == 1 < other[1] != other[0]:
            return (
                f"the sum in {step.place(node)} adds {listed(own)} of the model to {listed(other)}: another value "
                "for each sample, and the same one for all positions"
            )
    return ""


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
    """Yield a finding if the targets are the inputs shifted by one position, but no attention has a mask."""
    step = step_of(evidence)
    if not any(node.name == "cross_entropy" and _is_shifted(step, node) for node in step.operations):
        return
    fused = [node for node in step.operations if node.name == ATTENTION]
    plain = [node for node in step.operations if node.name == "softmax" and is_attention(shape_of(node))]
    found = [node for node in fused if setting(node, "is_causal") != "True" and len(node.inputs) < 4]
    found += [node for node in plain if not is_masked(step, node)]
    if found and len(found) == len(fused) + len(plain):
        first = found[0]
        verdict = (
            f"the targets of cross_entropy are the inputs shifted by one position, and the attention in "
            f"{step.place(first)} has no mask, nor has any other: each position sees the token that it has to predict"
        )
        yield found_in(evidence, step.owner(first), verdict, attentions=len(found))


def _is_shifted(step: RecordedStep, loss: Node) -> bool:
    """Return True if the targets of a loss are an input of the model without the first position."""
    sources = step.sources(loss)
    target = sources[1] if len(sources) > 1 else None
    while target is not None and keeps_values(target):
        target = next(iter(step.sources(target)), None)
    if target is None or target.name != "getitem" or re.search(r"(^|, )1:(, |$)", setting(target, "index")) is None:
        return False
    roots = step.sources(target)
    if not roots or roots[0].kind != "input":
        return False
    # The model must read the same tensor, usually without the last position.
    users = [each for each in step.users(roots[0]) if each is not target]
    return any(each.name in ("getitem", "embedding") for each in users)


@rule(
    "no-softmax",
    statistic="functions between the product of queries and keys and the product with the values",
    usual="a softmax, or another function of the scores",
    why="The softmax is missing: the values are summed up with the scores themselves, which have both signs.",
    next="Take the softmax of the scores over the keys before the product with the values.",
    false_alarms="Scores that any other function has changed, such as a ReLU, a decay or a division by the number of "
    "positions, belong to another kind of attention.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("scale-jump", "unlike-siblings", "odd-attention", "odd-block", "block-trend"), _ANY),
    is_lasting=True,
)
def no_softmax(evidence: Evidence) -> Iterator[Finding]:
    """Yield attention without a softmax: a product of queries, keys and values, maybe with a scale and a mask."""
    step = step_of(evidence)
    found = [node for node in step.operations if node.name in _PRODUCTS and _gets_plain_scores(step, node)]
    if found:
        names = [step.owner(each) for each in found]
        verdict = (
            f"the product in {step.place(found[0])} sums up the values with the products of queries and keys as they "
            "are: there is no softmax between them"
        )
        yield replace(found_in(evidence, names[0], verdict, layers=len(names)), others=tuple(dict.fromkeys(names[1:])))


def _gets_plain_scores(step: RecordedStep, node: Node) -> bool:
    """Return True if the first factor of a product is the scores of queries and keys, scaled and maybe masked."""
    shape, is_scaled = shape_of(node), False
    scores = next(iter(step.sources(node)), None)
    if not is_attention(shape):
        return False
    while scores is not None and scores.kind == "op" and scores.name not in _PRODUCTS:
        name, factor = scores.name.strip("_"), factor_of(scores)
        inner = [each for each in step.sources(scores) if "parameter" in step.roots[each.id]]
        is_mask = name == "masked_fill" or (name in _MASKS and len(inner) == 1)
        if factor is None and not is_mask and not keeps_values(scores):
            return False
        if factor is not None and abs(factor * shape[-1] - 1) < _CLOSE:  # type: ignore[index]  # it is of attention
            return False  # a mean over the positions
        is_scaled |= factor is not None
        scores = next(iter(inner), None)
    sides = [] if scores is None else [step.made_by(each) for each in step.sources(scores)]
    are_made = all(each.kind == "op" and "parameter" in step.roots[each.id] for each in sides)
    return is_scaled and len(sides) == 2 and are_made


@rule(
    "no-positions",
    statistic="operations between the embedding of tokens and the attention, if each token has a target",
    usual="an embedding of positions, a rotation, or a bias of the scores by the distance",
    why="Without a mask, the result for a token is the same in any order of the others.",
    next="Add an embedding of the positions, or rotate queries and keys.",
    false_alarms="Any operation that may tell positions apart counts, such as a convolution, a recurrence, or a tensor "
    "with a row for each. With a causal mask it is a note, as the mask tells where a token is.",
    needs=(GRAPH,),
    is_lasting=True,
)
def no_positions(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if nothing but a mask in a transformer depends on the order of the tokens."""
    step = step_of(evidence)
    layers = [last for last, _ in attention_layers(step)]
    if len(layers) < _FEWEST:
        return
    inner = step.ancestors(layers[-1]) | {layers[-1].id}
    nodes = [node for node in step.operations if node.id in inner and {"input", "parameter"} <= step.roots[node.id]]
    tokens = [node for node in nodes if node.name == "embedding"]
    shape = shape_of(tokens[0]) if len(tokens) == 1 else None
    if not shape or len(shape) != 2 or not all(_treats_positions_alike(step, node, shape[1]) for node in nodes):
        return
    counts = {prod(shape_of(node, 1) or ()) for node in step.operations if node.name in ("cross_entropy", "nll_loss")}
    if not counts & {prod(shape), shape[0] * (shape[1] - 1)}:
        return
    # A mask with one row per query depends on the order, unlike a padding mask.
    masks = [_given(step, node) for node in nodes if node.name.strip("_") in ("masked_fill", ATTENTION)]
    has_mask = any(setting(node, "is_causal") == "True" for node in nodes) or any(
        meta.shape[-2:] == (shape[1], shape[1]) for each in masks for meta in each
    )
    verdict = (
        f"nothing between {step.owner(tokens[0])} and {step.owner(layers[-1])} depends on the positions of the "
        f"{shape[1]} tokens{', but for a mask' if has_mask else ''}"
    )
    found = found_in(evidence, step.owner(tokens[0]), verdict, layers=len(layers))
    yield replace(found, severity="note") if has_mask else found


def _treats_positions_alike(step: RecordedStep, node: Node, length: int) -> bool:
    """Return True for an operation that does not distinguish between positions."""
    name = node.name.strip("_")
    if name not in _ALIKE and not keeps_values(node):
        return False
    given = _given(step, node)
    if name in ("masked_fill", ATTENTION):
        # A mask is boolean. A tensor of numbers is a bias of the scores.
        return all(meta.dtype == "bool" for meta in given)
    if name in ("mean", "var", "cat"):
        return setting(node, "dim").strip("()[], ") == "-1"
    return name in ("embedding", "linear", "addmm") or all(length not in meta.shape for meta in given)


def _given(step: RecordedStep, node: Node) -> list[TensorMeta]:
    """Return the input tensors of an operation that the model has not computed from its input."""
    sources = [each for each in step.sources(node) if not {"input", "parameter"} <= step.roots[each.id]]
    return [each.outputs[0] for each in sources if each.outputs]


_ENCODED_BY = ("embedding", "cos", "sin")
_MAKES_POSITIONS = frozenset(("expand", "getitem", "add", "repeat", "mul", "cat", "matmul", "bmm", "outer", "einsum"))
_CUTS = ("clamp", "clip", "clamp_max")
_SUMS_OF_TWO = ("add", "radd", "iadd")


@rule(
    "wrong-positions",
    statistic="largest number that a position is encoded as, and its order",
    usual="0 to the length of the sequence, in this order",
    why="The positions are cut off, so that all later ones have the same encoding, or they are drawn at random, and "
    "the encoding says nothing about the order.",
    next="Print the positions of a batch. They should count up to the length of the sequence.",
    false_alarms="Only positions that the step counts itself are examined. Distances may be cut off. A permutation "
    "that anything else takes, such as the tokens, is none of positions.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("unlike-siblings", "loss-of-a-guess"), _ANY),
    is_lasting=True,
)
def wrong_positions(evidence: Evidence, *, positions: int = 4) -> Iterator[Finding]:
    """Yield position encodings that are shorter than the sequence or in random order."""
    step = step_of(evidence)
    found = []
    for node in step.operations:
        if node.name.strip("_") in _CUTS and _counts_positions(step, node):
            length, most = (shape_of(node) or (0,))[-1], setting(node, "max")
            if length < positions or not most.isdecimal() or int(most) + 1 >= length:
                continue
            what = f"positions of at most {most}, where a sequence has {length}: all from {most} on are encoded alike"
        elif node.name == "randperm" and node.outputs and node.outputs[0].shape[-1] >= positions:
            what = f"{node.outputs[0].shape[-1]} positions in an order that is drawn at random in each step"
        else:
            continue
        names = [step.owner(each) for each in _encoders(step, node)][:1]
        found += [found_in(evidence, name, f"{name or 'the model'} encodes {what}") for name in names]
    yield from joined(found)


def _counts_positions(step: RecordedStep, node: Node) -> bool:
    """Return True for integers that count from 0, and False for their differences."""
    if not node.outputs or not node.outputs[0].dtype.startswith("int"):
        return False
    while node.kind == "op" and node.name != "arange":
        is_passed = keeps_values(node) or node.name.strip("_") in (*_CUTS, "expand", "getitem", "add", "repeat")
        sources = step.sources(node)
        if not is_passed or not sources:
            return False
        node = sources[0]
    if node.kind == "buffer":
        return "position" in node.name.rpartition(".")[2]
    return node.name == "arange" and not setting(node, "step")


def _encoders(step: RecordedStep, node: Node) -> list[Node]:
    """Return the operations that encode positions for the tokens; empty if the positions index an input instead."""
    found, todo, seen = [], [node], {node.id}
    length = node.outputs[0].shape[-1]
    while todo:
        for user in step.users(todo.pop()):
            if user.name in _ENCODED_BY and _joins_tokens(step, user, length):
                found.append(user)
            elif "input" in step.roots[user.id]:
                return []
            elif user.id not in seen and (keeps_values(user) or user.name.strip("_") in _MAKES_POSITIONS):
                seen.add(user.id)
                todo.append(user)
    return found


def _joins_tokens(step: RecordedStep, node: Node, length: int) -> bool:
    """Return True if an encoding is added to the tokens of the model's input, or a rotation multiplied with them."""
    joins = _SUMS_OF_TWO if node.name == "embedding" else (*_SUMS_OF_TWO, "mul", "rmul")
    todo, seen = [node], {node.id}
    while todo:
        encoding = todo.pop()
        shape = encoding.outputs[0].shape if encoding.outputs else ()
        # The first of three dimensions is the batch, so the length is searched for in the others. Samples may have one
        # number each, such as a diffusion step, which is no position.
        is_of_tokens = length in (shape[:-1] if len(shape) == 2 else shape[1:-1])
        for user in step.users(encoding):
            others = [each for each in step.sources(user) if each.id not in seen and each.outputs]
            name = user.name.strip("_")
            if name in joins and is_of_tokens:
                tokens = (each for each in others if "input" in step.roots[each.id])
                if any(len(each.outputs[0].shape) > 2 and length in each.outputs[0].shape for each in tokens):
                    return True
            if user.id not in seen and (keeps_values(user) or name in _MAKES_POSITIONS):
                seen.add(user.id)
                todo.append(user)
    return False


@rule(
    "embedding-scale",
    statistic="constant factor of the embedding of tokens, and its rms against that of the positions that are added",
    usual="at most √features, and about the size of the positions",
    why="The embedding of tokens is multiplied with a large number, and the embedding of positions is not. In the sum, "
    "the positions are too small to tell tokens apart by their place.",
    next="Leave out the factor, or multiply with the root of the number of features, at most.",
    false_alarms="Factors up to twice the root of the number of features do not count, and neither do positions that "
    "are not an embedding.",
    needs=("activations", GRAPH),
    explains=dict.fromkeys(("unlike-siblings", "loss-of-a-guess", "scale-jump"), _ANY),
)
def embedding_scale(evidence: Evidence, *, factor: float = 2.0, times: float = 10.0) -> Iterator[Finding]:
    """Yield token embeddings that are multiplied by a large number before position embeddings are added."""
    step = step_of(evidence)
    for node in step.operations:
        sides = step.sources(node) if node.name in _SUMS_OF_TWO else []
        terms = [each for side in sides for each in _embedded(step, side)]
        tokens = [each for each in terms if "input" in step.roots[each[0].id]]
        positions = [each for each in terms if _counts_positions(step, step.sources(each[0])[0])]
        if len(tokens) != 1 or not positions:
            continue
        (embedding, inner, outer), width = tokens[0], node.outputs[0].shape[-1] if node.outputs else 0
        most = max(abs(each[1] * each[2]) for each in positions)
        if abs(inner * outer) <= factor * max(1.0, most) * width**0.5:
            continue
        first = evidence.output(step.owner(embedding))
        sizes = [(evidence.output(step.owner(each)).rms[:1], scale) for each, _, scale in positions]
        known = [float(rms[0]) * abs(scale) for rms, scale in sizes if len(rms)]
        if len(first.rms) and known and (ratio := float(first.rms[0]) * abs(outer) / max(*known, 1e-30)) >= times:
            verdict = (
                f"the embedding of tokens {first.module} is multiplied with {abs(inner * outer):.3g}, and in the first "
                f"record it is {ratio:.3g} × as large as the embedding that is added to it for each position"
            )
            yield first.found(verdict, "rms", factor=abs(inner * outer), times=ratio)
            return


def _embedded(step: RecordedStep, node: Node) -> Iterator[tuple[Node, float, float]]:
    """Yield the embeddings in a sum, with their constant factors inside and outside of the embedding module."""
    factors: list[tuple[str, float]] = []
    while True:
        scale = factor_of(node)
        if node.name in _SUMS_OF_TWO and not factors:
            for source in step.sources(node):
                yield from _embedded(step, source)
            return
        if node.name == "embedding":
            own = step.owner(node)
            inner, outer = (prod(each for name, each in factors if (name == own) is is_own) for is_own in (True, False))
            yield node, inner, outer
            return
        sources = step.sources(node)
        if not sources or not (keeps_values(node) or scale is not None):
            return
        factors += [] if scale is None else [(step.owner(node), scale)]
        node = sources[0]


@rule(
    "inverted-mask",
    statistic="comparison with the padding that makes the mask of an attention",
    usual="tokens == padding",
    why="The modules of torch leave out the positions where a padding mask is True.",
    next="Pass tokens == padding as key_padding_mask.",
    false_alarms="Masks that are made outside of the recorded step are not known. Only the numbers that an embedding "
    "takes are tokens.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("constant-input", "attention-collapse"), _ANY),
    is_lasting=True,
)
def inverted_mask(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if an attention mask hides the real tokens instead of the padding."""
    step = step_of(evidence)
    embeddings = [node for node in step.operations if node.name == "embedding"]
    padding = {setting(node, "padding_idx") for node in embeddings} - {"", "None"}
    tokens = {step.made_by(source).id for node in embeddings for source in step.sources(node)}
    for node in step.operations:
        if node.name not in ("masked_fill", "masked_fill_") or not _is_low(setting(node, "value")):
            continue
        sources = step.sources(node)
        mask = sources[-1] if len(sources) > 1 else None
        while mask is not None and (keeps_values(mask) or mask.name in ("expand", "bool", "getitem")):
            mask = next(iter(step.sources(mask)), None)
        if mask is not None and (verdict := _of_triangle(step, node, mask)):
            yield found_in(evidence, step.owner(node), verdict)
            return
        compared = mask and next(iter(step.sources(mask)), None)
        if (
            mask is not None
            and compared is not None
            and _INVERTED_BY.fullmatch(mask.name)
            and setting(mask, "other") in padding
            and step.made_by(compared).id in tokens
        ):
            verdict = (
                f"the mask in {step.place(node)} is True where the token is not the padding "
                f"({setting(mask, 'other')}), and attention leaves out what is True: it sees the padding alone"
            )
            yield found_in(evidence, step.owner(node), verdict)
            return


def _is_low(value: str) -> bool:
    """Return True for a number that a softmax turns into zero."""
    return value == "float('-inf')" or (
        re.fullmatch(r"-(inf|[\d.]+(e\+?\d+)?)", value) is not None and float(value) < -1e3
    )


def _of_triangle(step: RecordedStep, fill: Node, mask: Node) -> str:
    """Describe a causal mask that hides the past: the lower triangle, or the negated upper triangle."""
    sources = step.sources(mask)
    is_negated = mask.name in ("invert", "bitwise_not", "logical_not") or (
        mask.name in ("eq", "__eq__") and setting(mask, "other") in ("0", "0.0", "False")
    )
    triangle = step.made_by(sources[0]) if is_negated and sources else mask
    is_of_scores = any(each.name == "softmax" for each in step.readers(fill)) and is_attention(shape_of(fill))
    if not is_of_scores or triangle.name.rstrip("_") != ("triu" if is_negated else "tril"):
        return ""
    return (
        f"the mask in {step.place(fill)} leaves out the earlier positions and keeps the later ones: each position sees "
        "the tokens after it"
    )


@rule(
    "padding-is-read",
    statistic="share of padding in the tokens of a recurrent layer, and batch_spread of what gets its last state",
    usual="the last state of each sequence is read at its last token",
    why="If the padding is behind the tokens, the last state comes after it, and the model may have forgotten them.",
    next="Read the output at position length - 1, or pack the sequences with pack_padded_sequence.",
    false_alarms="Padding before the tokens, packed sequences and other means to choose positions: what gets the last "
    "state must be nearly the same for all samples.",
    needs=("activations", GRAPH),
    records=8,
    explains=dict.fromkeys(
        ("one-class-predicted", "collapsed-embedding", "vanishing-gradient", "constant-input"), _ANY
    ),
)
def padding_is_read(
    evidence: Evidence, *, persistence: int = 8, padding: float = 0.3, spread: float = 0.1
) -> Iterator[Finding]:
    """Yield a finding if the state after the padding of a sequence is used, and hardly differs between samples."""
    step = step_of(evidence)
    for node in step.operations:
        tokens, states = step.behind(node) if node.name in _RECURRENT else None, shape_of(node, 1)
        if tokens is None or tokens.name != "embedding" or setting(tokens, "padding_idx") in ("", "None"):
            continue
        zeros = evidence.output(step.owner(tokens)).zero_fraction[-persistence:]
        for user in step.users(node):
            index = setting(user, "index").replace(" ", "") if user.name == "getitem" else ""
            # Only the state at the last position counts. The final hidden states, as in h[-1], have the shape of
            # ``states``, unlike the states of all positions.
            if not (index.startswith(":,-1") or (states is not None and shape_of(user) == states)):
                continue
            for name in dict.fromkeys(step.owner(each) for each in step.readers(user)):
                spreads = evidence.output(name).batch_spread[-persistence:]
                if min(len(zeros), len(spreads)) < persistence or zeros.min() < padding or spreads.max() > spread:
                    continue
                verdict = (
                    f"{zeros[-1]:.0%} of the tokens that {step.owner(node)} reads are padding, {name} gets its last "
                    f"state, and the output of {name} is nearly the same for all samples (they differ by "
                    f"{spreads[-1]:.2g} of its rms)"
                )
                view = evidence.output(name)
                yield view.found(verdict, "batch_spread", others=(step.owner(node),), padding=zeros[-1])
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
    """Yield a finding if only a few rows of a code book are ever the nearest ones."""
    step = step_of(evidence)
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


@rule(
    "encoder-cut-off",
    statistic="operations between an encoder and what reads the nearest rows of a code book",
    usual="the sum z + (code - z).detach(), so that the encoder gets the gradient for the code",
    why="The choice of the nearest row has no gradient, so that the loss behind the codes does not train the encoder.",
    next="Pass z + (code - z).detach() on, with the output z of the encoder.",
    false_alarms="An encoder that is not trained, and rows that are chosen by something else than their distance, are "
    "left out.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("collapsed-embedding", "unused-codes"), _ANY),
    is_lasting=True,
)
def encoder_cut_off(evidence: Evidence) -> Iterator[Finding]:
    """Yield a code book whose nearest rows reach a loss, while no gradient reaches the encoder."""
    step = step_of(evidence)
    for node in step.operations:
        sources = step.sources(node)
        nearest = next((each for each in map(step.made_by, sources) if each.name in ("argmin", "argmax")), None)
        books = [each for each in sources if each.kind in ("parameter", "buffer")]
        if node.name not in ("embedding", "getitem", "index_select") or nearest is None or not books:
            continue
        distances = [step.graph[each] for each in step.ancestors(nearest)]
        layers = [each for each in distances if each.id in step.trained and "input" in step.roots[each.id]]
        encoded = {each.id for each in layers if books[0].id not in step.ancestors(each)}
        if books[0] not in distances or not encoded:
            continue
        for loss in step.operations:
            prediction = next(iter(step.sources(loss)), None)
            if not step.is_loss(loss) or prediction is None or not step.signs.get(loss.id):
                continue
            between = step.ancestors(prediction) - step.ancestors(node)
            has_layer = any(step.graph[each].kind == "parameter" for each in between - {each.id for each in books})
            if node.id in between and has_layer and not encoded & _with_gradient(step, prediction):
                verdict = (
                    f"{loss.name} in {step.place(loss)} depends on the encoder through the {nearest.name} at "
                    f"{nearest.source} alone, which has no gradient: the encoder is not trained by it"
                )
                yield found_in(evidence, step.owner(node), verdict)
                return


def _with_gradient(step: RecordedStep, node: Node) -> set[int]:
    """Return the ids of a node and of all nodes that a gradient reaches from this node."""
    found, todo = {node.id}, [node]
    while todo:
        each = todo.pop()
        for source in step.sources(each) if not each.note.startswith("stops the gradient") else ():
            if source.id not in found:
                found.add(source.id)
                todo.append(source)
    return found


@rule(
    "exchanged-samples",
    statistic="order of the samples in the inputs of a model and in the targets of its loss",
    usual="the same order, as after an exchange of both, or of the inputs and back",
    why="The samples are sorted or shuffled on the way to the model, and its outputs are compared as they come.",
    next="Exchange the outputs back with order.argsort(), or pass enforce_sorted=False to pack_padded_sequence.",
    false_alarms="A model that also gets the samples in their own order, as for mixtures and negative pairs, and any "
    "further use of an order, are left out.",
    needs=(GRAPH,),
    is_lasting=True,
)
def exchanged_samples(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the inputs are reordered before the model, but the targets are not."""
    step = step_of(evidence)
    for node in step.operations:
        order = _order_of(step, node)
        data = step.made_by(step.sources(node)[0]) if order is not None else node
        if order is None or data.kind != "input":
            continue
        for loss in step.operations:
            sources = step.sources(loss)
            if loss.name not in LOSSES or len(sources) < 2 or not step.signs.get(loss.id):
                continue
            before, target = (step.ancestors(each) | {each.id} for each in sources[:2])
            own = [each for each in step.readers(data) if each.id in before and each is not node]
            own = [each for each in own if each is not order and each.id not in step.ancestors(order)]
            again = [each for each in map(step.graph.__getitem__, before) if _order_of(step, each) is not None]
            again = [each for each in again if step.made_by(step.sources(each)[0]).kind != "input"]
            is_of_batch = any(step.graph[each].kind == "input" for each in target) and order.id not in target
            if node.id in before and not own and not again and is_of_batch and "parameter" in step.roots[sources[0].id]:
                verdict = (
                    f"the model gets {data.name} in the order of the {order.name} at {order.source}, and {loss.name} "
                    f"in {step.place(loss)} compares its outputs with targets in the order of the batch"
                )
                yield found_in(evidence, step.owner(node), verdict)
                return


def _order_of(step: RecordedStep, node: Node) -> Node | None:
    """Return the node with the indices, if a node reorders all samples of a tensor; otherwise None."""
    sources = step.sources(node) if node.name in ("getitem", "index_select") else []
    order = step.made_by(sources[1]) if len(sources) == 2 else None
    if order is None or order.name not in ("sort", "argsort", "randperm") or not node.outputs:
        return None
    samples = sources[0].outputs[0].shape[:1] if sources[0].outputs else ()
    is_whole = bool(samples) and node.outputs[0].shape[:1] == samples
    return order if is_whole and order.outputs and order.outputs[0].shape == samples else None


@rule(
    "exchanged-by-view",
    statistic="shapes of the input and the output of view and reshape",
    usual="a view splits or joins dimensions, and the samples stay in theirs",
    why="A view keeps the order of the values in memory, so that exchanging two sizes mixes samples, positions and "
    "features.",
    next="Exchange dimensions with transpose or permute.",
    false_alarms="Dimensions of size 1, values that do not depend on the batch, and the shift of scores of relative "
    "positions, which adds or cuts off a column, are left out. So are sizes that are new on the other side. Logits "
    "count that become rows if the shape of the targets shows where the classes are.",
    needs=(GRAPH,),
    is_lasting=True,
)
def exchanged_by_view(evidence: Evidence) -> Iterator[Finding]:
    """Yield views that seem to exchange two dimensions of the input, or whose rows mix classes and positions."""
    step = step_of(evidence)
    found = []
    for node in step.operations:
        shape = shape_of(node)
        if node.name not in ("view", "reshape") or not shape or not node.outputs or "input" not in step.roots[node.id]:
            continue
        other = node.outputs[0].shape
        moved = [place for place, sizes in enumerate(zip(shape, other, strict=False)) if len(set(sizes)) > 1]
        if (
            step.batch
            and len(shape) > 2
            and shape[0] > 1
            and shape[0] % step.batch
            and shape[1] == step.batch == other[0]
        ):
            verdict = (
                f"the {node.name} in {step.place(node)} makes {listed(other)} of {listed(shape)}: it joins values of "
                "different samples"
            )
            found.append(found_in(evidence, step.owner(node), verdict))
        elif (targets := _targets_of_images(step, node)) is not None:
            verdict = (
                f"the {node.name} in {step.place(node)} makes {listed(other)} of {listed(shape)}, whose dimension 1 "
                f"has the classes, as the targets {listed(targets)} show: its rows mix the logits of several places"
            )
            found.append(found_in(evidence, step.owner(node), verdict))
        elif (
            len(shape) == len(other)
            and len(moved) == 2
            and sorted(shape) == sorted(other)
            and 1 not in shape
            and not _is_shift(step, node, moved)
        ):
            verdict = (
                f"the {node.name} in {step.place(node)} makes {listed(other)} of {listed(shape)}: it mixes the "
                f"dimensions {moved[0]} and {moved[1]} instead of exchanging them"
            )
            found.append(found_in(evidence, step.owner(node), verdict))
        elif _skips_an_exchange(shape, other):
            verdict = (
                f"the {node.name} in {step.place(node)} makes {listed(other)} of {listed(shape)}: it mixes the "
                "positions with the heads, because it does not exchange them"
            )
            found.append(found_in(evidence, step.owner(node), verdict))
    yield from joined(found)


def _skips_an_exchange(shape: Shape, other: Shape) -> bool:
    """Return True if a view joins or splits attention heads without the transpose of heads and positions."""
    short, long = sorted((shape, other), key=len)
    if len(long) != len(short) + 1 or len(short) < 3:
        return False
    *batch, heads, positions, features = long
    is_one = 1 in (heads, positions, features) or heads == positions
    return not is_one and short == (*batch, positions, heads * features)


def _targets_of_images(step: RecordedStep, node: Node) -> Shape | None:
    """Return the shape of the targets, if a view makes rows for the loss from logits with the classes in dimension 1.

    The result is the shape before the targets are flattened. It is None if the last dimension of the logits is as large
    as dimension 1, since it may then have the classes.
    """
    shape, rows = shape_of(node) or (), node.outputs[0].shape
    if len(shape) < 3 or len(rows) != 2 or rows[1] != shape[1] or shape[1] == shape[-1]:
        return None
    for user in step.readers(node):
        targets = step.sources(user)[1:2] if user.name in ("cross_entropy", "nll_loss") else []
        for given in targets:
            source = step.made_by(given)
            if source.outputs and source.outputs[0].shape == shape[:1] + shape[2:]:
                return source.outputs[0].shape
    return None


def _is_shift(step: RecordedStep, node: Node, moved: list[int]) -> bool:
    """Return True for a deliberate shift: an exchanged dimension was padded before, or is cut before a reverse view."""
    source = step.behind(node)
    before = shape_of(source) if source is not None and source.name in ("pad", "cat") else None
    if (
        before
        and source is not None
        and [before[each] for each in moved] != [source.outputs[0].shape[each] for each in moved]
    ):
        return True
    cuts = [each for each in (*step.sources(node)[:1], *step.users(node)) if each.name == "getitem"]
    pairs = [(first, back) for cut in cuts for first in step.sources(cut)[:1] for back in step.users(cut)]
    place = moved[0]
    return any(
        node in (first, back)
        and {first.name, back.name} <= {"view", "reshape"}
        and len(shape := shape_of(first) or ()) == len(back.outputs[0].shape)
        and shape[place] == back.outputs[0].shape[place]
        for first, back in pairs
    )


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
    """Yield the layers whose weight is created and initialized during the step."""
    step = step_of(evidence)
    found = []
    for node in step.operations:
        weights = [each for each in step.sources(node) if node.name in _LAYERS and each.kind == "op"]
        if any(_INITIALIZES.fullmatch(each.name) and not step.roots[each.id] for each in weights):
            verdict = f"the weight of the {node.name} in {step.place(node)} is made and initialized in the step itself"
            found.append(found_in(evidence, step.owner(node), verdict))
    yield from joined(found)
