"""Rules about connections: parts without a gradient, entries that change places, layers of the forward pass."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np

from lightning_recorder.graph.model import Node
from lightning_recorder.insight.evidence import Evidence
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.recorded_step import (
    LOSSES,
    RecordedStep,
    Shape,
    found_in,
    joined,
    listed,
    setting,
    shape_of,
    step_of,
)
from lightning_recorder.insight.rule import GRAPH, rule

_ANY = ("any",)


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
    false_alarms="An encoder that is not trained, or whose output another loss decodes, and rows that are chosen by "
    "something else than their distance, are left out.",
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
            if any(_decodes(step, each, encoded) for each in step.operations):
                return
            between = step.ancestors(prediction) - step.ancestors(node)
            has_layer = any(step.graph[each].kind == "parameter" for each in between - {each.id for each in books})
            if node.id in between and has_layer and not encoded & _with_gradient(step, prediction):
                verdict = (
                    f"{loss.name} in {step.place(loss)} depends on the encoder through the {nearest.name} at "
                    f"{nearest.source} alone, which has no gradient: the encoder is not trained by it"
                )
                yield found_in(evidence, step.owner(node), verdict)
                return


def _decodes(step: RecordedStep, loss: Node, encoded: set[int]) -> bool:
    """Return True for a loss whose prediction is made of an encoded tensor by further layers."""
    prediction = next(iter(step.sources(loss)), None)
    if not step.is_loss(loss) or prediction is None or not step.signs.get(loss.id):
        return False
    behind = step.ancestors(prediction).difference(*(step.ancestors(step.graph[each]) for each in encoded))
    has_layer = any(step.graph[each].kind == "parameter" for each in behind)
    return has_layer and bool(encoded & _with_gradient(step, prediction))


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
    # As in x[:, order], the order may be that of another dimension.
    is_first = setting(node, "index").startswith("tensor") or not setting(node, "index")
    is_first = is_first and setting(node, "dim") in ("", "0")
    order = step.made_by(sources[1]) if len(sources) == 2 and is_first else None
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
    "positions, which adds or cuts off a column, are left out. So are sizes that are new on the other side, and the "
    "code of installed packages. Logits count that become rows if the shape of the targets shows where the "
    "classes are.",
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
        if step.is_packaged(node.source):
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
        elif (side := _patches(step, node, shape, other)) is not None:
            verdict = (
                f"the {node.name} in {step.place(node)} makes {listed(other)} of images {listed(shape)}: its rows are "
                f"no patches of {side} × {side} pixels, but runs of pixels of a single channel"
            )
            found.append(replace(found_in(evidence, step.owner(node), verdict), next=_NEXT_PATCHES))
        elif _skips_an_exchange(shape, other):
            verdict = (
                f"the {node.name} in {step.place(node)} makes {listed(other)} of {listed(shape)}: it mixes the "
                "positions with the heads, because it does not exchange them"
            )
            found.append(found_in(evidence, step.owner(node), verdict))
    yield from joined(found)


_NEXT_PATCHES = "Split height and width, and bring both parts of a patch together with permute; or use nn.Unfold."


def _patches(step: RecordedStep, node: Node, shape: Shape, other: Shape) -> int | None:
    """Return the side of the patches, if a view makes as many rows of an image of the batch as it has patches."""
    source = step.behind(node)
    if source is None or source.kind != "input" or len(shape) != 4 or len(other) != 3 or shape[0] != other[0]:
        return None
    (_, channels, height, width), (_, count, size) = shape, other
    side = round((size / channels) ** 0.5)
    is_patch = 1 < side < width and side * side * channels == size and not height % side and not width % side
    # Whole rows may be steps of a time, of which the view makes segments; three channels are those of an image.
    is_image = channels == 3 or (channels > 1 and size % width > 0)
    return side if is_patch and is_image and count == height // side * (width // side) else None


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


@rule(
    "joined-with-itself",
    statistic="sources of a concatenation of two tensors along another dimension than the first",
    usual="two different tensors",
    why="The output of a layer is concatenated with itself, so that the second half says nothing new. In a U-Net, the "
    "features of the encoder belong there.",
    next="Look at the arguments of cat, such as torch.cat([upsampled, skip], dim=1).",
    false_alarms="Only what a layer reads directly or behind activations and normalizations counts, since two streams, "
    "wider residual connections and angles of rotary positions begin as copies. A single channel that becomes several, "
    "and copies along the batch are left out.",
    needs=(GRAPH,),
    is_lasting=True,
)
def joined_with_itself(evidence: Evidence) -> Iterator[Finding]:
    """Yield concatenations of the output of a layer with itself."""
    step = step_of(evidence)
    found = []
    for node in step.operations:
        sources = step.sources(node) if node.name in ("cat", "concat", "concatenate") else []
        shape, joint = shape_of(node), node.outputs[0].shape if node.outputs else ()
        is_twice = len(node.inputs) == 2 and len({each.id for each in sources}) == 1
        if not is_twice or len(sources[0].outputs) != 1 or sources[0].id not in step.trained or not shape:
            continue
        place = next((place for place, sizes in enumerate(zip(shape, joint, strict=False)) if len(set(sizes)) > 1), 0)
        if place and shape[place] > 1 and _is_read_by_layers(step, node):
            source = sources[0]
            verdict = (
                f"the {node.name} in {step.place(node)} joins the output {listed(shape)} of the {source.name} in "
                f"{step.place(source)} with itself"
            )
            found.append(found_in(evidence, step.owner(node), verdict))
    yield from joined(found)


def _is_read_by_layers(step: RecordedStep, node: Node) -> bool:
    """Return True if only layers, activations and normalizations read a tensor."""
    return all(
        re.fullmatch(r"linear|addmm|conv\w*|\w*norm|\w*relu6?_?|gelu|silu", each.name) for each in step.readers(node)
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
