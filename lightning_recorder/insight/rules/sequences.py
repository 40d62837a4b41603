"""Rules about sequences: what attention may see, how positions are told apart, and masks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from lightning_recorder.graph.model import Node, TensorMeta
from lightning_recorder.insight.evidence import Evidence
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.recorded_step import (
    ATTENTION,
    RecordedStep,
    factor_of,
    found_in,
    is_attention,
    is_masked,
    joined,
    keeps_values,
    setting,
    shape_of,
    step_of,
)
from lightning_recorder.insight.rule import GRAPH, rule
from lightning_recorder.insight.rules.blocks import attention_layers

_ANY = ("any",)
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
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
    if not shape or len(shape) != 2 or not all(treats_positions_alike(step, node, shape[1]) for node in nodes):
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


def treats_positions_alike(step: RecordedStep, node: Node, length: int) -> bool:
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
    "state-not-carried",
    statistic="states that a recurrent module begins with in each of its calls for one step of a sequence",
    usual="the state of the call before",
    why="The module is called once for each step without the state of the step before, and begins with zeros: no step "
    "knows the others.",
    next="Pass the state on: output, state = self.lstm(x[:, t:t+1], state); or call it once with the whole sequence.",
    false_alarms="Calls that depend on each other in any way, calls for longer sequences, and results that a later "
    "recurrence, attention or layer joins, as in a tree, are left out.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("unlike-siblings", "forgotten-parameter", "gradient-stops", "first-step-only"), _ANY),
    is_lasting=True,
)
def state_not_carried(evidence: Evidence) -> Iterator[Finding]:
    """Yield recurrent modules that are called for one step of a sequence after the other, each time without a state."""
    step = step_of(evidence)
    by_module: dict[str, list[Node]] = {}
    for node in step.operations:
        sources, shape = step.sources(node), shape_of(node) or ()
        is_cell = node.name in _CELLS
        # The length, since a batch of one sample may be a whole sequence.
        is_step = node.name in RECURRENT and len(shape) == 3 and shape[setting(node, "batch_first") == "True"] == 1
        if is_cell or is_step:
            given = sources[1] if len(sources) > 1 else None
            is_new = given is None or given.kind == "parameter" or given.name in ("zeros", "zeros_like", "new_zeros")
            by_module.setdefault(step.owner(node), []).append(node) if is_new else by_module.pop(step.owner(node), None)
    for name, nodes in by_module.items():
        parts = [_slice_of(step, node) for node in nodes]
        if len(nodes) >= _FEWEST_CALLS and None not in parts and len({*parts}) == 1 and not _are_joined(step, nodes):
            verdict = (
                f"{name} is called {len(nodes)} times in a step, for one step of a sequence each, and begins with a "
                "state of zeros every time"
            )
            yield found_in(evidence, name, verdict, calls=len(nodes))


def _are_joined(step: RecordedStep, calls: list[Node]) -> bool:
    """Return True if a later recurrence or attention gets results of calls, or a layer gets those of some calls."""
    ids = {each.id for each in calls}
    for node in step.operations:
        joins = node.name in _JOINS or (node.name == "softmax" and is_attention(shape_of(node)))
        known = ids & step.ancestors(node) if joins and node.id > min(ids) and node.id not in ids else ()
        if len(known) > 1 and (node.name != "linear" or len(known) < len(ids)):
            return True
    return False


_FEWEST_CALLS = 4
_CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
_JOINS = ("linear", ATTENTION, *RECURRENT, *_CELLS)


def _slice_of(step: RecordedStep, node: Node) -> int | None:
    """Return the id of the sequence of which the input of a node is a part; None if a recurrence made it."""
    before = [step.graph[each] for each in step.ancestors(node)]
    if any(each.name in (*RECURRENT, *_CELLS) and each.kind == "op" for each in before):
        return None
    parts = [each for each in before if each.name in ("getitem", "select", "narrow", "unbind", "split", "chunk")]
    return max((each.id for part in parts for each in step.sources(part)[:1] if part.kind == "op"), default=None)


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
        tokens, states = step.behind(node) if node.name in RECURRENT else None, shape_of(node, 1)
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
