"""Rules about layers without an activation between them, single units, and operations along the batch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from lightning_recorder.graph.model import Node
from lightning_recorder.insight.evidence import Evidence
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.recorded_step import (
    LOSSES,
    RecordedStep,
    Shape,
    found_in,
    joined,
    keeps_values,
    listed,
    setting,
    shape_of,
    softmax_dimension,
    step_of,
)
from lightning_recorder.insight.rule import GRAPH, rule

_ANY = ("any",)
_DIFFERENCES = ("sub", "__sub__", "__rsub__", "rsub")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


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
    # A layer with fixed weights is a transform of the input, a layer that is called twice is a recurrence, and the rows
    # of an embedding are not free, so none of them counts.
    weights = [_trained_weight(step, each) for each in (source, node)]
    return source if is_read_once and None not in weights and weights[0] != weights[1] and not is_narrow else None


def _trained_weight(step: RecordedStep, layer: Node) -> int | None:
    """Return the id of the first parameter of a layer; None if there is none, or if it is frozen or embeds tokens."""
    parameters = [each for each in step.sources(layer) if each.kind == "parameter"]
    if not parameters or "frozen" in parameters[0].note:
        return None
    is_shared = any(each.name == "embedding" for each in step.users(parameters[0]))
    return None if is_shared else parameters[0].id


def _is_bottleneck(inner: Shape | None, outer: Shape | None) -> bool:
    """Return True if the width between two layers is smaller than on both sides, as in a low-rank factorization."""
    return not inner or not outer or inner[0] < min(inner[-1], outer[0])


_ACTIVATION = re.compile(r"(leaky_|p|r)?relu6?|gelu|silu|elu|selu|celu|mish|hardswish|softplus")
_LAYERS = re.compile(r"linear|conv\dd|conv_transpose\dd|addmm")


@rule(
    "result-not-used",
    statistic="operations that read the result of an activation or a BatchNorm",
    usual="the next layer reads it",
    why="The module was called without an assignment, such as self.act(x) in place of x = self.act(x).",
    next="Assign the result, and pass it on.",
    false_alarms="Functions that write into their input, and activations of what no other layer reads, are left out.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("unused-parameter", "forgotten-parameter", "gradient-stops", "no-activation"), _ANY),
    is_lasting=True,
)
def result_not_used(evidence: Evidence) -> Iterator[Finding]:
    """Yield activations and BatchNorms whose result nothing reads, while a later layer reads their input."""
    step = step_of(evidence)
    found = []
    for node in step.operations:
        sources = step.sources(node)
        is_kind = _ACTIVATION.fullmatch(node.name) or node.name == "batch_norm"
        if not is_kind or not sources or node.note or setting(node, "inplace") == "True" or step.is_read(node):
            continue
        source = sources[0]
        reader = next((each for each in step.readers(source) if _LAYERS.fullmatch(each.name)), None)
        if reader is not None and reader.id > node.id and {node.id, reader.id} <= step.trained:
            verdict = (
                f"nothing reads the result of the {node.name} in {step.place(node)}: "
                f"{step.owner(reader) or reader.name} gets its input instead"
            )
            found.append(found_in(evidence, step.owner(node), verdict))
    yield from joined(found)


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
            # An autoencoder may get its inputs and its targets as two tensors, such as noisy and clean samples.
            given = [step.graph[each].outputs[:1] for each in inputs & step.ancestors(layer)]
            if sources[0].outputs[:1] == sources[1].outputs[:1] in given:
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
