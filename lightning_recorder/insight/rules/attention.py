"""The rules about attention: its scores, its heads, its masks and its scale."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from lightning_recorder.functions import function_sites
from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.parts import family_of, layers_of, listed
from lightning_recorder.insight.recorded_step import LOSSES, RecordedStep, found_in, setting, shape_of, step_of
from lightning_recorder.insight.recorded_step import listed as listed_shape
from lightning_recorder.insight.rule import GRAPH, rule
from lightning_recorder.insight.rules.blocks import attention_layers
from lightning_recorder.insight.rules.sequences import RECURRENT, treats_positions_alike
from lightning_recorder.insight.rules.small_updates import FEWEST_VALUES, TOLERANCE, are_new
from lightning_recorder.records.table import Floats

_ANY = ("any",)
_ATTENTION = ("scaled_dot_product_attention", "softmax")


def _last(view: View, statistic: str, records: int) -> Floats:
    """Return the values of a statistic in the last ``records`` records; empty if there are fewer."""
    values = view.column(statistic)[0]
    return values[-records:] if len(values) >= records else np.zeros(0)


def _all(values: Floats, limit: float) -> bool:
    return bool(len(values)) and bool((values >= limit).all())


@rule(
    "attention-scores-grow",
    statistic="largest score of a head of attention before the softmax",
    usual="below 30, and bounded",
    why="Queries and keys grow against each other. The softmax becomes one-hot, its gradient vanishes, and low "
    "precision rounds the scores; then the loss diverges.",
    next="Normalize queries and keys (QK norm), clip the scores, or lower the learning rate of query and key.",
    false_alarms="Large scores that do not grow, as of pretrained models, do not count.",
    needs=("activations",),
    records=6,
    explains=dict.fromkeys(("attention-collapse", "one-hot-heads", "sudden-change", "unlike-siblings"), _ANY),
)
def attention_scores_grow(
    evidence: Evidence, *, records: int = 6, large: float = 50.0, growth: float = 2.0, recent: float = 1.1
) -> Iterator[Finding]:
    """Yield the layers with heads whose largest score is large and still grows."""
    for name, heads in layers_of(evidence, evidence.heads).items():
        found = []
        for head in heads:
            values, steps = head.column("attention_max_logit")
            if len(values) < records or values[-1] < large:
                continue
            third = len(values) // 3
            first, before, last = (float(np.median(each)) for each in np.split(values, (third, len(values) - third)))
            if last >= large and last >= growth * max(first, 1.0) and last >= recent * before:
                since = int(steps[int(np.argmax(values >= large))])
                rate = (
                    1000 * (last - before) / max(1.0, float(np.median(steps[-third:]) - np.median(steps[third:-third])))
                )
                found.append((rate, since, last, head))
        if found:
            rate, since, last, head = max(found, key=lambda each: each[0])
            some = [each[-1] for each in found]
            verdict = (
                f"the largest score of {listed('head', some)} of {name} is {last:.3g}, and grows by {rate:.3g} in "
                "1,000 steps"
            )
            yield head.found(
                verdict, "attention_max_logit", since=since, score=last, rate=rate, heads=len(some), parts=some
            )


@rule(
    "dead-heads",
    statistic="values and scores of a head of attention",
    usual="values that are not zero, and scores that differ between keys",
    why="The weights of the query, key or value of the head are zero, or it is masked.",
    next="Look at the initialization and the gradient of these rows of the projections.",
    false_alarms="Zeros of the first records, as of queries that begin at zero.",
    needs=("activations",),
    records=3,
    explains=dict.fromkeys(("dead-output", "gradient-stops", "unlike-siblings", "constant-weight"), _ANY),
)
def dead_heads(evidence: Evidence, *, persistence: int = 3, least: float = 1e-7) -> Iterator[Finding]:
    """Yield the layers with heads whose output is zero or does not depend on the query."""
    for name, heads in layers_of(evidence, evidence.heads).items():
        silent = [each for each in heads if _none_above(_last(each, "attention_value_rms", persistence), least)]
        if silent:
            verdict = f"the values of {listed('head', silent)} of {name} are zero, so that their output is zero"
            yield silent[0].found(verdict, "attention_value_rms", heads=len(silent), parts=silent)
        blind = [each for each in heads if each not in silent and _is_constant(each, persistence, least)]
        if blind:
            verdict = (
                f"the scores of {listed('head', blind)} of {name} are the same for all keys, so that each query gets "
                "the mean of the values: the query or the key is zero, or all keys are equal"
            )
            yield blind[0].found(verdict, "attention_logit_std", heads=len(blind), parts=blind)


def _none_above(values: Floats, limit: float) -> bool:
    return bool(len(values)) and bool((values <= limit).all())


def _is_constant(head: View, persistence: int, least: float) -> bool:
    # The statistic exists only with two or more keys. Scores of non-zero queries and keys differ at least by rounding.
    return _none_above(_last(head, "attention_logit_std", persistence), least)


@rule(
    "zero-projection",
    statistic="zero_fraction of a weight that makes queries, keys and values together, and of its gradient",
    usual="0, but for weights that begin at zero and leave it with the first steps",
    why="As many weights as those of one projection stay zero, or have no gradient. Without weights it gives its bias "
    "alone, which is the same at all positions; without a gradient nothing depends on it.",
    next="Look at the initialization of these rows, at hooks on the gradient, and at what takes the three parts.",
    false_alarms="Only a third or two thirds of the weight in all of the last records count, as pruning leaves another "
    "share, and only weights of nn.MultiheadAttention or beside recorded scores.",
    needs=("parameters",),
    records=3,
    explains=dict.fromkeys(
        ("dead-heads", "attention-collapse", "unlike-siblings", "gradient-stops", "one-class-predicted"), _ANY
    ),
)
def zero_projection(evidence: Evidence, *, persistence: int = 3) -> Iterator[Finding]:
    """Yield joint projections in which one or two of the query, key and value parts are zero or get zero gradients."""
    found = []
    around = {name.rpartition(".")[0] for name in layers_of(evidence, evidence.heads)}
    for each in evidence.weights:
        is_joined = len(each.shape) == 2 and max(each.shape) == 3 * min(each.shape)
        # The weight of a GRU's gates has the same shape, so only weights of attention layers count.
        is_of_attention = each.path == "in_proj_weight" or each.module.rpartition(".")[0] in around
        for view in (each, each.gradient) if is_joined and is_of_attention else ():
            thirds = 3 * view.zero_fraction[-persistence:]
            if len(thirds) == persistence:
                found += [(each, view, count) for count in (1, 2) if np.allclose(thirds, count)]
    if found:
        first, view, count = found[0]
        share, which = ("a third", "one") if count == 1 else ("two thirds", "two")
        what = first.name if view is first else f"the gradient of {first.name}"
        verdict = (
            f"{share} of {what} is zero in all of the last {persistence} records, as many weights as {which} of the "
            "projections of queries, keys and values has"
        )
        others = tuple(dict.fromkeys(each.module for each, *_ in found[1:] if each.module != first.module))
        yield view.found(verdict, "zero_fraction", others=others, share=float(view.zero_fraction[-1]))


@rule(
    "one-hot-heads",
    statistic="largest share of a key, and entropy, over all queries of a head",
    usual="an entropy above 0.1 of that of equal shares for some queries",
    why="The scores are too large: they are not scaled, or query and key have grown.",
    next="Check the scale of the scores and the learning rate; normalize queries and keys.",
    false_alarms="Single heads of trained models that look at one position. Most heads of a layer must be like this.",
    needs=("activations",),
    records=3,
    explains={"attention-collapse": _ANY, "unlike-siblings": _ANY},
)
def one_hot_heads(
    evidence: Evidence,
    *,
    persistence: int = 3,
    top: float = 0.97,
    ratio: float = 0.2,
    keys: float = 6.0,
    share: float = 0.5,
) -> Iterator[Finding]:
    """Yield layers in which most heads give nearly all attention to a single key for each query."""
    for name, heads in layers_of(evidence, evidence.heads).items():
        found = [
            each
            for each in heads
            if _all(_last(each, "attention_top_key", persistence), top)
            and _none_above(_last(each, "attention_most_ratio", persistence), ratio)
            and _all(_last(each, "attention_keys", persistence), keys)
        ]
        if found and len(found) >= share * len(heads):
            last = float(np.median([each.attention_top_key[-1] for each in found]))
            scores = float(max(each.attention_max_logit[-1] for each in found))
            verdict = (
                f"{listed('head', found)} of {name} give {last:.1%} of the attention of each query to a single key; "
                f"the largest score is {scores:.3g}"
            )
            yield found[0].found(verdict, "attention_top_key", share=last, score=scores, heads=len(found), parts=found)


@rule(
    "attention-sink",
    "note",
    statistic="share of the first key in the attention of a head",
    usual="below 0.9",
    why="The head does nothing for most queries: it rests at the first token, as many heads of trained models do.",
    next="Nothing, unless most heads of a layer do it: then it needs fewer heads, or a gate.",
    false_alarms="Common in trained language models, so it is a note.",
    needs=("activations",),
    records=3,
)
def attention_sink(
    evidence: Evidence, *, persistence: int = 3, share: float = 0.9, keys: float = 8.0
) -> Iterator[Finding]:
    """Yield the layers with heads that attend only to the first key."""
    for name, heads in layers_of(evidence, evidence.heads).items():
        found = [
            each
            for each in heads
            if _all(_last(each, "attention_first_key", persistence), share)
            and _all(_last(each, "attention_keys", persistence), keys)
        ]
        if found:
            last = float(np.median([each.attention_first_key[-1] for each in found]))
            verdict = f"{listed('head', found)} of {name} give {last:.0%} of their attention to the first key"
            yield found[0].found(verdict, "attention_first_key", share=last, heads=len(found), parts=found)


@rule(
    "mask-inverted",
    statistic="share of samples none of whose queries may attend a key, and of the keys behind the query",
    usual="0",
    why="The mask is inverted: True marks keys that may be attended for scaled_dot_product_attention, and keys that "
    "may not for nn.MultiheadAttention. Or masks for padding and order leave nothing together.",
    next="Print the mask of a sample, and compare it with the one that the function expects.",
    false_alarms="Single queries without a key do not count, as they may be padding.",
    needs=("activations",),
    records=2,
    explains=dict.fromkeys(
        (
            *(
                "attention-collapse",
                "constant-input",
                "sudden-change",
                "dead-heads",
                "unlike-siblings",
                "inverted-mask",
            ),
            *("sees-later-keys", "attends-the-target", "gradient-stops"),
        ),
        _ANY,
    ),
)
def mask_inverted(
    evidence: Evidence, *, persistence: int = 2, share: float = 0.1, future: float = 0.99, hidden: float = 0.9
) -> Iterator[Finding]:
    """Yield attention whose mask hides all keys from the queries of a sample, or all keys except later positions."""
    found = _layers_above(evidence, "attention_blind", persistence, share)
    if found:
        blind = float(found[0].attention_blind[-1])
        verdict = f"the mask of {found[0].module} hides all keys from all queries of {blind:.0%} of the samples"
        yield found[0].found(verdict, "attention_blind", others=_others(found), share=blind)
    later = [each for each in _layers_above(evidence, "attention_future", persistence, future) if each not in found]
    later = [each for each in later if _none_above(_last(each, "attention_visible", persistence), hidden)]
    padded = _layers_above(evidence, "attention_padding", persistence, future)
    if padded:
        name = padded[0].module
        verdict = f"the queries of {name} attend the padding only, in all samples that have some"
        yield padded[0].found(
            verdict, "attention_padding", others=_others(padded), share=float(padded[0].attention_padding[-1])
        )
    later = [each for each in later if each not in padded]
    if later:
        seen = float(later[0].attention_visible[-1])
        verdict = (
            f"the mask of {later[0].module} leaves {seen:.0%} of the keys, and the queries attend the positions behind "
            "them only"
        )
        yield later[0].found(
            verdict, "attention_future", others=_others(later), share=float(later[0].attention_future[-1])
        )


def _layers_above(evidence: Evidence, statistic: str, persistence: int, limit: float) -> list[View]:
    """Return the first head of each layer in which all heads reach a limit in the last records."""
    layers = layers_of(evidence, evidence.heads).values()
    return [heads[0] for heads in layers if all(_all(_last(each, statistic, persistence), limit) for each in heads)]


def _others(found: Sequence[View]) -> tuple[str, ...]:
    return tuple(each.module for each in found[1:])


@rule(
    "attends-padding",
    statistic="share of the padding in the attention of tokens that are no padding",
    usual="0",
    why="The layer gets no mask for the padding, so that the result for a sample depends on how long the others of "
    "its batch are.",
    next="Pass the mask: attention_mask to models of transformers, key_padding_mask to nn.MultiheadAttention.",
    false_alarms="Padding is what the embedding has as padding_idx, at the beginning or the end of a sequence. Queries "
    "that are padding themselves do not count.",
    needs=("activations",),
    records=2,
    explains={"unlike-siblings": _ANY, "odd-block": _ANY, "odd-attention": _ANY},
)
def attends_padding(
    evidence: Evidence, *, persistence: int = 2, share: float = 0.01, most: float = 0.99
) -> Iterator[Finding]:
    """Yield the layers whose queries give some of their attention to padding."""
    found = _layers_above(evidence, "attention_padding", persistence, share)
    found = [each for each in found if each.attention_padding[-1] < most]  # above this limit, the mask is inverted
    if found:
        last = float(found[0].attention_padding[-1])
        verdict = f"tokens give {last:.0%} of their attention in {found[0].module} to padding"
        yield found[0].found(verdict, "attention_padding", others=_others(found), share=last)


@rule(
    "sees-later-keys",
    statistic="share of keys behind the query in attention, against the equal layers of the stack",
    usual="0 in all layers of a stack, or in none",
    why="The layer does not get the causal mask that the others get.",
    next="Pass the same mask, or is_causal=True, in each layer.",
    false_alarms="Stacks that mix both kinds on purpose: seven of ten layers must have the mask. If the targets are "
    "the next tokens of the input, one layer must, as any layer without it sees what the model has to predict.",
    needs=("activations",),
    records=2,
    explains={"unlike-siblings": _ANY, "odd-block": _ANY},
)
def sees_later_keys(
    evidence: Evidence, *, persistence: int = 2, share: float = 1e-3, most: float = 0.7, targets: float = 0.9
) -> Iterator[Finding]:
    """Yield the layers that see later positions, if the other layers of the stack do not."""
    # Cross-attention, which may see all keys, may have as many keys as queries. The graph shows which is which.
    own = {step_of(evidence).owner(last) for last, _ in attention_layers(step_of(evidence))}
    leaks = _predicts_next(evidence, persistence, targets)
    families: dict[str, list[View]] = {}
    for name, heads in layers_of(evidence, evidence.heads).items():
        if len(_last(heads[0], "attention_future", persistence)):
            families.setdefault(family_of(name), []).append(heads[0])
    for members in families.values():
        seen = [each for each in members if _all(_last(each, "attention_future", persistence), share)]
        blind = [each for each in members if not each.attention_future[-persistence:].any()]
        to_itself = leaks and all(each.module.rpartition(".")[0] in own for each in members)
        if seen and blind and (to_itself or len(blind) >= most * len(members)):
            others = "the other layer" if len(blind) == 1 else f"the {len(blind)} other layers"
            for each in seen:
                later = float(each.attention_future[-1])
                verdict = (
                    f"the queries of {each.module} attend later positions, with {later:.0%} of their attention; those "
                    f"of {others} of the stack do not"
                )
                yield each.found(verdict, "attention_future", share=later, layers=len(members))


@rule(
    "attends-the-target",
    statistic="share of keys behind the query in attention, if the targets are the next tokens of the input",
    usual="0",
    why="The mask lets each position see the token that it has to predict. It will not when the model generates text.",
    next="Hide the keys behind the query: pass is_causal=True, or a mask that is True up to the diagonal only.",
    false_alarms="Encoders beside a decoder: if any stack hides later keys, or a recurrence decodes the states of "
    "another one, nothing is found.",
    needs=("activations",),
    records=2,
    explains=dict.fromkeys(("sees-the-target", "unlike-siblings"), _ANY),
)
def attends_the_target(
    evidence: Evidence, *, persistence: int = 2, share: float = 1e-3, targets: float = 0.9
) -> Iterator[Finding]:
    """Yield a finding if the targets are the next tokens and all attention layers see later positions."""
    layers = [heads[0] for heads in layers_of(evidence, evidence.heads).values()]
    placed = [each for each in layers if len(_last(each, "attention_future", persistence))]
    see = [_all(_last(each, "attention_future", persistence), share) for each in placed]
    step = step_of(evidence)
    recurrences = {step.owner(node) for node in step.operations if node.name in RECURRENT}
    if placed and all(see) and len(recurrences) < 2 and _predicts_next(evidence, persistence, targets):
        head = placed[-1]
        later = float(head.attention_future[-1])
        verdict = (
            f"the targets are the next tokens of the input, and the queries of {head.module} attend later positions, "
            f"with {later:.0%} of their attention: each position sees the token that it has to predict"
        )
        yield head.found(verdict, "attention_future", others=_others(placed[::-1]), share=later)


def _predicts_next(evidence: Evidence, persistence: int, targets: float) -> bool:
    """Return True if the targets of a loss are the next tokens of the input."""
    sites = [site for site in evidence.losses.places if site.path == "in.target.next"]
    losses = (View(evidence, evidence.losses, site) for site in sites)
    return any(_all(_last(each, "mean", persistence), targets) for each in losses)


@rule(
    "mixes-tokens",
    statistic="means and variances of the tokens in a stack of attention, if the targets are the next tokens",
    usual="over the features of each token",
    why="A normalization or a mean runs over the positions or the samples. Over the positions, the result for a token "
    "depends on the tokens after it, which the model has to predict.",
    next="Normalize the last dimension, which has the features.",
    false_alarms="Only results that the stream of the tokens takes count, and no summary of a sequence. A mean over "
    "samples and positions together, as of BatchNorm, is left out.",
    needs=("activations", GRAPH),
    records=2,
    explains=dict.fromkeys(("unlike-siblings", "odd-block", "along-batch", "norm-ineffective"), _ANY),
)
def mixes_tokens(evidence: Evidence, *, persistence: int = 2, targets: float = 0.9) -> Iterator[Finding]:
    """Yield means over positions or samples that reach each token in a model that predicts next tokens."""
    step = step_of(evidence)
    linears = [each for _, projections in attention_layers(step) for each in projections]
    # The second input of addmm has the tokens, in one dimension. Its first input is the bias.
    inputs = [shape_of(each, int(each.name == "addmm")) or () for each in linears]
    streams = {(prod(shape[:-1]), shape[-1:]) for shape in inputs}
    found = [
        node
        for node in step.operations
        if node.name in _MEANS
        and (shape := shape_of(node) or ())
        and (prod(shape[:-1]), shape[-1:]) in streams
        and _mixes_positions(step, node, shape)
    ]
    if found and _predicts_next(evidence, persistence, targets):
        names = [step.owner(each) for each in found]
        verdict = (
            f"the {found[0].name} in {step.place(found[0])} of {listed_shape(shape_of(found[0]) or ())} runs over "
            "other dimensions than the last one, and its result is used for each token"
        )
        yield replace(found_in(evidence, names[0], verdict), others=tuple(dict.fromkeys(names[1:])))


_MEANS = ("mean", "var", "std", "var_mean", "std_mean", "sum", "amax", "norm", "layer_norm")
_MOST_USERS = 50


def _mixes_positions(step: RecordedStep, node: Node, shape: Sequence[int]) -> bool:
    """Return True if a mean over positions or samples of ``[samples, positions, features]`` reaches each token."""
    if node.name == "layer_norm":
        return len(re.findall(r"\d+", setting(node, "normalized_shape"))) > 1
    given = {each.strip() for each in setting(node, "dim").strip("()[]").split(",")}
    if len(shape) != 3 or not (given <= {"0", "-3"} or given <= {"1", "2", "-2", "-1"}) or given <= {"2", "-1"}:
        return False
    found = [node]
    for each in found:
        for user in step.users(each):
            # Stop at a layer: a layer after a mean computes a summary of the sequence, which is intended.
            if user not in found and len(found) < _MOST_USERS and user.name not in ("linear", "addmm", *LOSSES):
                found.append(user)
    return any(each.outputs and each.outputs[0].shape == shape for each in found)


@rule(
    "own-key-hidden",
    statistic="share of queries that may attend the key of their own position, if later keys are hidden",
    usual="1",
    why="The causal mask is shifted by one: it hides the position itself, and leaves nothing to the first one.",
    next="Use a mask that is True up to the diagonal, as tril(diagonal=0) and is_causal=True are.",
    false_alarms="The targets must be the next tokens of the input.",
    needs=("activations",),
    records=2,
    explains=dict.fromkeys(("unlike-siblings", "odd-block", "odd-attention"), _ANY),
)
def own_key_hidden(
    evidence: Evidence, *, persistence: int = 2, share: float = 0.01, targets: float = 0.9
) -> Iterator[Finding]:
    """Yield causal layers whose queries attend only to earlier positions, not to their own."""
    found = []
    for heads in layers_of(evidence, evidence.heads).values():
        own, later = (_last(heads[0], f"attention_{name}", persistence) for name in ("own", "future"))
        if _none_above(own, share) and _none_above(later, 0.0):
            found.append(heads[0])
    if found and _predicts_next(evidence, persistence, targets):
        verdict = f"the mask of {found[0].module} hides the position of the query itself beside those behind it"
        yield found[0].found(verdict, "attention_own", others=_others(found), share=float(found[0].attention_own[-1]))


@rule(
    "first-token-is-read",
    statistic="position whose output is read behind a stack in which all attention is causal",
    usual="the last position of each sequence, or a mean over the positions",
    why="With a causal mask, the first position sees itself alone, so that the output does not depend on the others. A "
    "classification token in front is for models without such a mask.",
    next="Read the output at the last token of each sequence, or leave the mask out.",
    false_alarms="Models that read other positions, too, or in which another operation than those of a transformer may "
    "have moved the positions, are left out.",
    needs=("activations", GRAPH),
    records=2,
    explains=dict.fromkeys(
        (
            *("constant-input", "collapsed-embedding", "one-class-predicted", "loss-of-a-guess"),
            *("zero-projection", "constant-positions", "gradient-stops"),
        ),
        _ANY,
    ),
)
def first_token_is_read(evidence: Evidence, *, persistence: int = 2, positions: int = 4) -> Iterator[Finding]:
    """Yield a finding if only the first position of the output of causal attention is read."""
    layers = [heads[0] for heads in layers_of(evidence, evidence.heads).values()]
    step = step_of(evidence)
    attention = [last.id for last, _ in attention_layers(step)]
    if not layers or len(attention) != len(layers):
        return
    if not all(_none_above(_last(each, "attention_future", persistence), 0.0) for each in layers):
        return
    for node in step.operations:
        shape, source = shape_of(node), step.behind(node)
        if source is None or not shape or len(shape) != 3 or shape[1] < positions or node.id < attention[-1]:
            continue
        index, readers = setting(node, "index").replace(" ", ""), list(step.readers(source))
        if node.name != "getitem" or not re.fullmatch(r":,(0|:1)(,:|,\.\.\.)?", index) or readers != [node]:
            continue
        between = step.ancestors(node) - step.ancestors(step.graph[attention[-1]])
        if all(treats_positions_alike(step, each, shape[1]) for each in step.operations if each.id in between):
            verdict = (
                f"{step.place(node)} reads the output at the first of {shape[1]} positions alone, and all attention "
                "before it has a causal mask: the first position sees no other one"
            )
            yield found_in(evidence, step.owner(node), verdict, positions=shape[1])


@rule(
    "equal-query-and-key",
    statistic="smallest cosine between a query and the key of the same position",
    usual="anything below 0.9",
    why="The key is computed by the projection of the query, or both projections have the same weights.",
    next="Check which layer computes the key.",
    false_alarms="Attention that shares queries and keys on purpose, as in Reformer.",
    needs=("activations",),
    records=2,
    explains={"unlike-siblings": _ANY},
)
def equal_query_and_key(evidence: Evidence, *, persistence: int = 2, cosine: float = 0.9999) -> Iterator[Finding]:
    """Yield the layers in which query and key are equal at each position, up to a factor."""
    found = _layers_above(evidence, "attention_alike", persistence, cosine)
    if found:
        verdict = f"queries and keys of {found[0].module} are equal at each position: their smallest cosine is 1"
        yield found[0].found(verdict, "attention_alike", others=_others(found), cosine=found[0].attention_alike[-1])


_ROTARY = re.compile(r"rotary|(?<![pu])rope")  # does not match "property"
_FILLS = ("zeros", "zeros_like", "new_zeros", "full", "full_like")
_POSITIONS = re.compile(r"(?<![mx])pos(ition|_|$|e[mn]|\d)|wpe$")  # not composition, posterior or transpose; wpe: GPT-2


@rule(
    "constant-positions",
    statistic="least and largest value of an encoding of positions, and the rows of its weight that have a gradient",
    usual="values that differ, and a row for each position",
    why="All positions have the same encoding: their indices are the same, or the values do not depend on them. Then "
    "attention cannot tell where a token is.",
    next="Print the position ids of a batch. They should count up to the length of the sequence.",
    false_alarms="Sequences of fewer than four positions do not count. Modules are found by their names or classes. "
    "Indices of zero that the code of an installed package makes are left out.",
    needs=("activations",),
    records=2,
    explains={"unlike-siblings": _ANY},
)
def constant_positions(evidence: Evidence, *, persistence: int = 2, positions: int = 4) -> Iterator[Finding]:
    """Yield the modules that encode all positions alike: constants, and embeddings with a single used row."""
    step, encodings = step_of(evidence), dict[str, list[View]]()
    for view in evidence.outputs:
        is_rotary = _ROTARY.search(f"{view.kind} {view.module}".lower()) is not None
        if (is_rotary or _has_positions(view.module)) and len(view.shape) > 1:
            encodings.setdefault(view.module, []).append(view)
    for name, views in encodings.items():
        ends = [_last(view, end, persistence) for view in views for end in ("min", "max")]
        are_constant = all(
            len(low) and np.array_equal(low, high) for low, high in zip(ends[::2], ends[1::2], strict=True)
        )
        if are_constant and views[0].shape[-2] >= positions:
            values = " and ".join(f"{each[-1]:.3g}" for each in ends[::2])
            verdict = f"the output of {name} is the same for all {views[0].shape[-2]} positions: {values}"
            yield views[0].found(verdict, "max", positions=views[0].shape[-2])
    for node in evidence.graph.nodes:
        name = "" if node.parent is None else evidence.graph[node.parent].name
        if node.name != "embedding" or len(node.inputs) < 2 or not _has_positions(name):
            continue
        length = (node.inputs[0].shape or (0,))[-1]
        rows = node.inputs[1].shape[0] * (
            1 - _last(evidence.parameter(name, "weight").gradient, "zero_fraction", persistence)
        )
        # A model of a package may switch its embedding of positions off, if its tokens already have another one.
        indices = [each for each in map(step.made_by, step.sources(node)) if each.name in _FILLS]
        if length < positions or any(step.is_packaged(each.source) for each in indices):
            continue
        if len(rows) and all(0 < each < 1.5 for each in rows):
            verdict = (
                f"a single row of {name} has a gradient, where a sequence has {length} positions: all get this row"
            )
            yield evidence.output(name).found(verdict, None, positions=length)
        elif any(_repeats_one(evidence.graph[edge.source], length) for edge in evidence.graph.into(node)):
            verdict = (
                f"the index of {name} is the same for all {length} positions of a sample: it was expanded from one for "
                "each sample"
            )
            yield evidence.output(name).found(verdict, None, positions=length)


def _has_positions(name: str) -> bool:
    return _POSITIONS.search(name.rpartition(".")[2].lower()) is not None


def _repeats_one(node: Node, length: int) -> bool:
    """Return True if a node repeats one value for all positions of a sequence."""
    return node.name in ("expand", "expand_as", "broadcast_to", "repeat") and node.inputs[0].shape[-1:] == (1,) != (
        length,
    )


@rule(
    "attention-scale",
    statistic="constant factor between the product of queries and keys and the softmax, against 1/√features",
    usual="1/√features of a head",
    why="The scores are not scaled, or twice: before the function and in it.",
    next="Divide the scores by the square root of the features of a head, once.",
    false_alarms="Models without a scale whose initialization makes up for it, such as T5: their scores are not large. "
    "The initialization of torch makes up for nothing, so that smaller scores count then. A single factor of "
    "1/features, as in muP, is no second one. Cosines of queries and keys have a scale of their own.",
    needs=("activations", GRAPH),
    records=2,
    explains=dict.fromkeys(
        (
            *("attention-collapse", "one-hot-heads", "attention-scores-grow", "unlike-siblings", "sudden-change"),
            *("odd-block", "odd-attention"),
        ),
        _ANY,
    ),
)
def attention_scale(
    evidence: Evidence, *, factor: float = 1.9, spread: float = 2.5, of_new: float = 1.2, close: float = 0.05
) -> Iterator[Finding]:
    """Yield attention that is scaled twice, and unscaled attention with large scores from the first record on."""
    layers = layers_of(evidence, evidence.heads)
    large, twice = [], []
    for name, node in _attention_nodes(evidence.graph):
        heads = layers.get(name)
        if heads is None:
            continue
        size, factors = _factors(evidence.graph, node)
        if not size:
            continue
        usual = size**-0.5
        whole = float(np.prod(factors)) if factors else 1.0
        spreads = [each.attention_logit_std[0] for each in heads if len(each.attention_logit_std)]
        first = float(np.median(spreads)) if spreads else 0.0
        least = spread
        if of_new <= first < spread and are_new(
            evidence, FEWEST_VALUES, TOLERANCE, inside=name.rpartition(".")[0], record=0
        ):
            least = of_new
        if whole >= factor * usual and first >= least:
            large.append((heads[0], whole / usual, first))
        if sum(abs(each / usual - 1) <= close for each in factors) >= 2 and abs(whole / usual**2 - 1) <= close:
            twice.append((heads[0], size))
    if large:
        head, times, first = large[0]
        verdict = (
            f"the scores of {head.module} are {times:.3g} × as large as with the usual 1/√features, and vary by "
            f"{first:.3g} between the keys of a query in the first record"
        )
        yield head.found(
            verdict, "attention_logit_std", others=_others([each[0] for each in large]), times=times, std=first
        )
    if twice:
        head, size = twice[0]
        verdict = (
            f"the scores of {head.module} are scaled twice by 1/√{size}, so that they are {size**0.5:.3g} × too small"
        )
        yield head.found(verdict, "attention_logit_std", others=_others([each[0] for each in twice]), features=size)


_SHAPES = (
    *(
        "view",
        "reshape",
        "transpose",
        "permute",
        "contiguous",
        "T",
        "mT",
        "to",
        "float",
        "type",
        "unflatten",
        "flatten",
    ),
    *(
        "expand",
        "repeat_interleave",
        "unsqueeze",
        "squeeze",
        "clone",
        "getitem",
        "split",
        "chunk",
        "unbind",
        "swapaxes",
    ),
)
_SUMS = ("add", "masked_fill", "where", "sub", "dropout", "masked_fill_", "add_", "tril")


def _attention_nodes(graph: Graph) -> Iterator[tuple[str, Node]]:
    """Yield the attention functions of a graph with their site names."""
    names = function_sites(graph)
    for node in graph.nodes:
        if node.id in names and node.name in _ATTENTION and not node.failed:
            yield names[node.id], node


def _factors(graph: Graph, node: Node) -> tuple[int, list[float]]:
    """Return the number of features per head, and the constant factors of the attention scores."""
    found: list[float] = []
    if node.name == "softmax":
        product = _back(graph, node, found, (*_SHAPES, *_SUMS))
        if product is None or product.name not in ("matmul", "bmm", "einsum", "baddbmm") or not product.inputs:
            return 0, []
        size = product.inputs[0].shape[-1] if product.inputs[0].shape else 0
    else:
        product, size = node, node.inputs[0].shape[-1] if node.inputs and node.inputs[0].shape else 0
        given = dict(node.arguments).get("scale", "None")
        found.append(_number(given) if _number(given) is not None else size**-0.5)  # type: ignore[arg-type]  # not None
    sides = [graph[edge.source] for edge in graph.into(product)[:2]]
    if all(_has_length_one(graph, each) for each in sides):
        return 0, []
    for source in sides:
        own = _scale_of(source)
        if own is not None:
            found.append(own)
        if source.kind == "op" and (own is not None or source.name in _SHAPES):
            _back(graph, source, found, _SHAPES)
    return size, found


def _has_length_one(graph: Graph, node: Node) -> bool:
    """Return True if a vector was divided by its norm, maybe before changes of shape and a factor."""
    while (node.name in _SHAPES or _scale_of(node) is not None) and (edges := graph.into(node)):
        node = graph[edges[0].source]
    divisors = [graph[edge.source].name for edge in graph.into(node)[1:]]
    return node.name == "normalize" or ("div" in node.name and any("norm" in each for each in divisors))


def _back(graph: Graph, node: Node, found: list[float], passed: Sequence[str]) -> Node | None:
    """Return the first operation before a node that is not in ``passed``, and collect the factors of those skipped."""
    while True:
        edges = graph.into(node)
        if not edges:
            return None
        node = graph[edges[0].source]
        own = _scale_of(node)
        if own is not None:
            found.append(own)
        elif node.kind != "op" or node.name not in passed:
            return node


def _scale_of(node: Node) -> float | None:
    """Return the constant factor of a multiplication or division; None for other nodes."""
    if node.kind != "op" or node.name.strip("_") not in ("mul", "div", "truediv") or len(node.inputs) != 1:
        return None
    given = [_number(value) for name, value in node.arguments if name in ("other", "value")]
    if not given or not given[0]:
        return None
    return given[0] if node.name.startswith("mul") else 1 / given[0]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@rule(
    "attention-over-queries",
    statistic="dimension of the softmax of attention",
    usual="the last one, so that the shares of the keys of a query add up to 1",
    why="The softmax runs over the queries: dim is wrong.",
    next="Use dim=-1 for scores [..., queries, keys].",
    false_alarms="Slot attention divides the shares by their sum afterwards, which is no product with the values.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("attention-collapse", "unlike-siblings", "odd-block"), _ANY),
    is_lasting=True,
)
def attention_over_queries(evidence: Evidence) -> Iterator[Finding]:
    """Yield each attention softmax that runs over the queries instead of the keys."""
    graph = evidence.graph
    users: dict[int, list[Node]] = {}
    for edge in graph.edges:
        users.setdefault(edge.source, []).append(graph[edge.target])
    found = []
    for node in graph.nodes:
        shape = node.inputs[0].shape if node.kind == "op" and node.name == "softmax" and node.inputs else ()
        if len(shape) < 3 or dict(node.arguments).get("dim") not in ("-2", str(len(shape) - 2)):
            continue
        product = _back(graph, node, [], (*_SHAPES, *_SUMS))
        readers = users.get(node.id, [])
        while len(readers) == 1 and readers[0].name in (*_SHAPES, "dropout"):
            readers = users.get(readers[0].id, [])
        is_product = product is not None and product.name in ("matmul", "bmm", "einsum", "baddbmm")
        is_first = [
            each for each in readers if each.name in ("matmul", "bmm") and each.inputs[0].shape[-1] == shape[-1]
        ]
        if is_product and is_first and len(is_first) == len(readers):
            found.append(node)
    if found:
        names = [graph[node.parent].name for node in found if node.parent is not None]
        source = f" ({found[0].source})" if found[0].source else ""
        verdict = (
            f"the softmax in {names[0] or 'the model'}{source} runs over the queries: the shares of the keys of a "
            "query do not add up to 1"
        )
        one = evidence.view(evidence.activations, names[0]).found(verdict, None, others=tuple(dict.fromkeys(names[1:])))
        yield replace(one, records=1)
