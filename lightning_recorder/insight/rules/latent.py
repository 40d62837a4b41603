"""The rules about random latent variables: their variation between samples, and their terms in the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from lightning_recorder.graph.model import Edge, Graph, Node
from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import PRIOR_PUSHED_AWAY, Finding
from lightning_recorder.insight.recorded_step import (
    RecordedStep,
    factor_of,
    found_in,
    keeps_values,
    setting,
    step_of,
)
from lightning_recorder.insight.rule import GRAPH, rule

_LAYERS = ("linear", "conv1d", "conv2d", "conv3d")
_SPLITS = ("chunk", "split", "unbind")
_NOISE = ("randn", "randn_like", "normal", "normal_")


@rule(
    "posterior-collapse",
    statistic="std of the outputs that give the mean and the logarithmic scale of a random variable",
    usual="0.3 to 2 for the mean, so that it differs between samples",
    why="The KL term outweighs the reconstruction, for example because one is summed over the values of a sample "
    "and the other one averaged. Or the decoder does not get the random variable with its gradient.",
    next="Compare the two terms of the loss per sample; sum the reconstruction loss over the values, and lower or "
    "warm up the weight of the KL term. Use rsample() rather than sample().",
    false_alarms="Hierarchical models that do not use some of their variables: all of them must collapse. Outputs "
    "that were as constant at the beginning do not count.",
    needs=("activations", "parameters", GRAPH),
    records=10,
    explains=dict.fromkeys(("weight-drift", "vanishing-gradient", "unlike-siblings", "sudden-change"), ("any",)),
)
def posterior_collapse(
    evidence: Evidence, *, records: int = 10, most_nats: float = 0.01, shrink: float = 0.3, most_scale: float = 0.5
) -> Iterator[Finding]:
    """Yield a random variable whose mean and scale are the same for all samples."""
    pairs = list(dict.fromkeys((mean, scale) for mean, scale, _ in _latents(evidence.graph, _learned(evidence))))
    outputs = [(evidence.output(mean), evidence.output(scale)) for mean, scale in pairs]
    since = [_collapse(mean, scale, records, most_nats, shrink, most_scale) for mean, scale in outputs]
    if not since or None in since:  # all must collapse: hierarchical models may leave some variables unused
        return
    mean, scale = pairs[0]
    names = f"outputs of {mean} and {scale} are" if mean != scale else f"output of {mean} is"
    verdict = f"the {names} nearly the same for all samples, so that the random variable tells nothing about a sample"
    view = outputs[0][0]
    first = max(step for step in since if step is not None)
    others = tuple(dict.fromkeys(each for pair in pairs for each in pair if each != mean))
    yield view.found(verdict, "std", since=first, others=others, std=view.std[-1])


@rule(
    "uniform-noise",
    statistic="random numbers that are multiplied by a scale which the model computes with exp, softplus or sqrt, and "
    "noise that is the target of a loss and a part of the input",
    usual="normal ones: randn_like",
    why="rand and rand_like return numbers from 0 to 1, with a mean of 0.5. The KL divergence, the schedule and the "
    "samples that are drawn later are those of a normal distribution.",
    next="Use torch.randn_like in place of torch.rand_like.",
    false_alarms="Random numbers between two ends, whose difference is the scale, and those that are transformed are "
    "left out. So are a scale beside a mean that is never squared, as it is in the KL divergence of normal ones, and a "
    "random number that is no noise of the data, such as the level of the noise.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("latent-scale", "posterior-collapse"), ("any",)),
    is_lasting=True,
)
def uniform_noise(evidence: Evidence) -> Iterator[Finding]:
    """Yield uniform random numbers that a learned scale multiplies, or that a model of diffusion has to predict."""
    step = step_of(evidence)
    for node in step.operations:
        sides = step.sources(node)[:2] if step.signs.get(node.id) and step.is_loss(node) else []
        noise = step.made_by(sides[-1]) if sides else node
        is_noise = bool(sides) and noise.name in ("rand", "rand_like") and noise.id in step.ancestors(sides[0])
        if is_noise and any(_adds_noise(step, step.graph[each], noise) for each in step.ancestors(sides[0])):
            verdict = (
                f"the noise that the model gets and {node.name} in {step.place(node)} compares is that of "
                f"{noise.name}, which returns numbers from 0 to 1 instead of normal ones"
            )
            yield found_in(evidence, step.owner(node), verdict)
            return
        sources = step.sources(node) if node.name.strip("_") in ("mul", "rmul") else []
        for noise, scale in (sources, sources[::-1]) if len(sources) == 2 else ():
            is_scale = scale.id in step.trained and step.made_by(scale).name in ("exp", "softplus", "sqrt")
            sums = [each for each in step.readers(node) if each.name.strip("_") in ("add", "radd")]
            if (
                noise.name in ("rand", "rand_like")
                and is_scale
                and any(
                    other is not node and other.id in step.trained and _is_squared(step, other)
                    for each in sums
                    for other in step.sources(each)
                )
            ):
                verdict = (
                    f"the scale of a random variable in {step.place(node)} is multiplied by {noise.name}, which "
                    "returns numbers from 0 to 1 instead of normal ones"
                )
                yield found_in(evidence, step.owner(node), verdict)
                return


def _adds_noise(step: RecordedStep, node: Node, noise: Node) -> bool:
    """Return True if a node adds noise, maybe times a factor, to data of the same shape."""
    if node.name.strip("_") not in ("add", "radd", "lerp") or node.outputs[:1] != noise.outputs[:1]:
        return False
    sources = step.sources(node)
    with_noise = [each for each in sources if each is noise or noise in map(step.made_by, step.sources(each))]
    return any("input" in step.roots[each.id] and each not in with_noise for each in sources) and bool(with_noise)


def _is_squared(step: RecordedStep, node: Node) -> bool:
    """Return True if the step computes the square of a tensor."""
    for each in step.users(node):
        is_product = len(each.inputs) == 2 and all(source is node for source in step.sources(each))
        if each.name.strip("_") in ("pow", "square") or (each.name.strip("_") == "mul" and is_product):
            return True
    return False


@rule(
    "latent-without-prior",
    statistic="what reads the mean and the logarithmic scale of a random variable that a decoder gets",
    usual="the sample, and a term of the loss, such as the KL divergence",
    why="Without a term for the mean and the scale, the loss is smallest without noise: the scale falls towards zero, "
    "and samples of the prior do not look like the data.",
    next="Add the KL term to the loss, and check that it is not detached or computed without being added.",
    false_alarms="Another reader of the mean, the scale or the sample, such as an entropy, a log-probability or a "
    "discriminator, counts as such a term. Samples that a loss gets without a layer in between are left out.",
    needs=("parameters", GRAPH),
    explains={"unlike-siblings": ("any",)},
    is_lasting=True,
)
def latent_without_prior(evidence: Evidence) -> Iterator[Finding]:
    """Yield a random variable whose mean and scale affect the loss only through its samples."""
    step, graph = step_of(evidence), evidence.graph
    latents = list(_latents(graph, _learned(evidence)))
    used = _before(step, [node for node in graph.nodes if node.kind == "backward"], set())
    ends = {sample.id for _, _, sample in latents}
    # All operations between the layers and the samples. The operation that draws the noise reads only the shape of one
    # of them, so it is left out.
    known = _before(step, [sample for _, _, sample in latents], {name for pair in latents for name in pair[:2]})
    readers = [user for each in known - ends for user in step.users(graph[each]) if user.name not in _NOISE]
    if not latents or any(each.id in used - known for each in readers):
        return
    for mean, scale, sample in latents:
        decoders = {step.owner(each) for each in step.readers(sample) if each.id in used}
        if sample.id in used and len(decoders) == 1 and _is_decoded(step, sample):
            scales = f" and {scale}" if scale != mean else ""
            verdict = (
                f"the loss gets the output of {mean}{scales} through the samples in {step.place(sample)} alone: no "
                "term, such as a KL divergence, keeps their mean and scale near those of the prior"
            )
            yield _about(evidence, mean, scale, verdict)
            return


@rule(
    PRIOR_PUSHED_AWAY,
    statistic="sign in the loss of the squared mean and of the exponential of the scale of a random variable",
    usual="both are positive, as in a KL divergence",
    why="The KL divergence has the wrong sign, so that the loss falls without bound while the random variable leaves "
    "the prior.",
    next="The term is -0.5 × (1 + log σ² - μ² - σ²), and it is added to the loss.",
    false_alarms="Both must be negative, and reach the loss through sums and constant factors alone.",
    needs=("parameters", GRAPH),
    explains=dict.fromkeys(
        (
            *("exploding-gradient", "weight-drift", "sudden-change", "gradient-spike", "scale-jump", "saturation"),
            *("unlike-siblings", "learning-rate-too-large", "learning-rate-outlier", "gradient-step"),
        ),
        ("any",),
    ),
    is_lasting=True,
)
def prior_pushed_away(evidence: Evidence) -> Iterator[Finding]:
    """Yield a random variable with a loss that falls as its squared mean or its variance grows."""
    step = step_of(evidence)
    learned = _learned(evidence)
    for mean, scale, sample in _latents(evidence.graph, learned):
        squares, exponentials = (
            [node for node in step.operations if node.name in names and step.signs.get(node.id)]
            for names in (("pow", "square", "__pow__"), ("exp",))
        )
        of_mean = [node for node in squares if _owner_of(step, node, learned) == mean]
        of_scale = [node for node in exponentials if _owner_of(step, node, learned) == scale]
        signs = [step.signs[node.id] for node in (*of_mean, *of_scale)]
        if of_mean and of_scale and all(each == {-1} for each in signs):
            verdict = (
                f"the loss falls with the square of {mean} and with the exponential of {scale}, the mean and the scale "
                f"of the samples in {step.place(sample)}: the KL divergence is subtracted"
            )
            yield _about(evidence, mean, scale, verdict)
            return


@rule(
    "latent-scale",
    statistic="exponents of an output in the samples of a random variable and in the loss",
    usual="the samples have exp(0.5 × log σ²), and the loss exp(log σ²)",
    why="The samples take for the standard deviation what the loss takes for its logarithm or for the variance, so "
    "that the divergence is that of another distribution.",
    next="Compute the samples as mean + noise × exp(0.5 × log σ²).",
    false_alarms="Only a loss with the exponential of the same output, or a normal likelihood, is examined, for the "
    "factor of the exponent and for an activation without negative outputs before it.",
    needs=("parameters", GRAPH),
    is_lasting=True,
)
def latent_scale(evidence: Evidence) -> Iterator[Finding]:
    """Yield a random variable whose scale is computed differently for samples and loss, or is limited."""
    step, learned = step_of(evidence), _learned(evidence)
    for power in step.operations:
        if power.name == "exp" and _is_deviation(step, power) and (limit := _limit(step, power)):
            scale = _owner_of(step, power, learned)
            verdict = (
                f"the likelihood in the loss takes the {limit} of {scale or 'a layer'} for the logarithm of the "
                "standard deviation, which is so at least 1"
            )
            yield replace(found_in(evidence, scale, verdict), why=_WHY_LIMIT, next=_NEXT_LIMIT)
            return
    for mean, scale, sample in _latents(evidence.graph, learned, any_scale=True):
        known = _before(step, [sample], {mean, scale})
        powers = [node for node in step.operations if node.name == "exp" and _owner_of(step, node, learned) == scale]
        parts = [_part(step, each) for each in _sides(step, sample)]
        if scale == mean and any(node.id in known for node in powers) and parts[0] == parts[1]:
            verdict = (
                f"the samples in {step.place(sample)} take the same part of the output of {mean} as mean and as "
                "logarithm of the scale"
            )
            yield replace(found_in(evidence, mean, verdict), why=_WHY_PART, next=_NEXT_PART)
            return
        if scale == mean:
            powers = [node for node in powers if parts[0] != _part(step, step.graph.into(node)[0]) == parts[1]]
        inside = [_exponent(step, node) for node in powers if node.id in known]
        outside = [_exponent(step, node) for node in powers if node.id not in known]
        own = inside[0] if len(inside) == 1 else None if inside else 0.0
        limits = [_limit(step, node) for node in powers]
        if limits and any(node.id not in known for node in powers) and None not in limits:
            verdict = (
                f"the loss and the samples in {step.place(sample)} take the {limits[0]} of {scale} for the logarithm "
                "of the variance, so that the standard deviation is at least 1"
            )
            yield replace(_about(evidence, mean, scale, verdict), why=_WHY_LIMIT, next=_NEXT_LIMIT)
            return
        if own is None or None in outside or not outside:
            continue
        # Without an exponential, only the raw output of the layer counts as a fault, since a softplus or a square gives
        # a valid scale, too.
        if not inside and not _is_raw(step, sample, scale):
            continue
        if not any(math.isclose(each, 2 * own) for each in outside if each is not None):
            used = f"exp({own:.3g} × {scale})" if own else f"the output of {scale} itself"
            verdict = (
                f"the samples in {step.place(sample)} have {used} as standard deviation, and the loss has "
                f"exp({outside[0]:.3g} × {scale}) for the variance"
            )
            yield _about(evidence, mean, scale, verdict)
            return


_WHY_PART = "Two slices have the same bounds, or the same number of a chunk is taken twice."
_NEXT_PART = "Split the output with mean, log_variance = output.chunk(2, dim=-1)."


_WHY_LIMIT = (
    "A logarithm of a variance has both signs: without negative ones, the noise is at least as large as that of the "
    "prior."
)
_NEXT_LIMIT = (
    "Remove the activation, or take its output for the standard deviation itself, with its square and its logarithm in "
    "the divergence."
)


def _about(evidence: Evidence, mean: str, scale: str, verdict: str) -> Finding:
    """Return a finding about the modules of mean and scale, which may be the same module."""
    return replace(found_in(evidence, mean, verdict), others=(scale,) if scale != mean else ())


def _sides(step: RecordedStep, sample: Node) -> tuple[Edge, Edge]:
    """Return the edges through which a sample gets its mean and its scale."""
    edges = step.graph.into(sample)
    if sample.name in _NOISE:
        return edges[0], edges[1]
    product = next(step.graph[each.source] for each in edges if _is_noisy(step, step.graph[each.source]))
    scale = next(each for each in step.graph.into(product) if step.graph[each.source].name not in _NOISE)
    return next(each for each in edges if each.source != product.id), scale


def _is_noisy(step: RecordedStep, node: Node) -> bool:
    return any(each.name in _NOISE for each in step.sources(node))


def _part(step: RecordedStep, edge: Edge) -> tuple[int, tuple[str, ...]]:
    """Return the id of the layer that an edge starts from, with the slices of its output that are used."""
    parts: list[str] = []
    while True:
        node = step.graph[edge.source]
        parts += [str(edge.outputs)] if node.name in _SPLITS else []
        parts += [setting(node, "index")] if node.name == "getitem" else []
        edges = step.graph.into(node) if node.kind == "op" and node.name not in _LAYERS else ()
        if not edges:
            return node.id, tuple(parts)
        edge = edges[0]


def _is_deviation(step: RecordedStep, node: Node) -> bool:
    """Return True for a standard deviation: its square divides a squared error, and the loss has its logarithm."""
    users = step.users(node)
    squares = {each.id for each in users if each.name in ("pow", "square", "__pow__")}
    divisors = [step.sources(each)[-1:] for each in step.operations if each.name in ("div", "__truediv__")]
    squared = [step.behind(each) if factor_of(each) else each for found in divisors for each in found]
    is_divisor = any(each is not None and each.id in squares for each in squared)
    return is_divisor and any(each.name == "log" for each in users)


def _limit(step: RecordedStep, power: Node) -> str | None:
    """Return the name of the non-negative activation before an exponential; None if there is none."""
    source = step.behind(power)
    while source is not None and (factor := factor_of(source)) is not None:
        if factor < 0:
            return None
        source = step.behind(source)
    return source.name if source is not None and source.name in ("softplus", "relu", "sigmoid") else None


def _exponent(step: RecordedStep, power: Node) -> float | None:
    """Return the constant factor between a layer's output and an exponential; None if there are other operations."""
    factor, node = 1.0, power
    while sources := step.sources(node):
        source = sources[0]
        if source.name in _LAYERS:
            return factor
        own = factor_of(source)
        if own is None and not keeps_values(source) and source.name not in (*_SPLITS, "getitem", "clamp"):
            return None
        factor, node = factor * (1.0 if own is None else own), source
    return None


def _is_raw(step: RecordedStep, sample: Node, scale: str) -> bool:
    """Return True if noise is multiplied with the output of a layer, or a slice of it, without another function."""
    node = step.graph[_sides(step, sample)[1].source]
    while (keeps_values(node) or node.name in (*_SPLITS, "getitem")) and (sources := step.sources(node)):
        node = sources[0]
    return node.name in _LAYERS and step.owner(node) == scale


def _owner_of(step: RecordedStep, node: Node, learned: set[str]) -> str:
    return _source(step.graph, step.sources(node)[:1], learned)[0]


def _before(step: RecordedStep, nodes: Sequence[Node], layers: set[str]) -> set[int]:
    """Return the ids of some nodes and of the operations before them, up to the operations of some layers."""
    found, todo = set(), list(nodes)
    while todo:
        node = todo.pop()
        if node.id not in found and node.kind in ("op", "backward"):
            found.add(node.id)
            is_end = node.kind == "op" and step.owner(node) in layers
            todo += [] if is_end else step.sources(node)
    return found


def _is_decoded(step: RecordedStep, sample: Node) -> bool:
    """Return True if a loss compares a target with the output of layers that decode a sample."""
    seen, todo = {sample.id}, [sample]
    while todo:
        for user in step.users(todo.pop()):
            if user.id not in seen:
                seen.add(user.id)
                todo.append(user)
    behind = [step.graph[each] for each in seen]
    has_layer = any(one.kind == "parameter" for each in behind for one in step.sources(each))
    return has_layer and any(step.is_loss(each) for each in behind)


def _learned(evidence: Evidence) -> set[str]:
    """Return the names of the modules with parameters and a recorded output."""
    return {each.module for each in evidence.tensors if evidence.output(each.module)} - {""}


def _latents(graph: Graph, learned: set[str], *, any_scale: bool = False) -> Iterator[tuple[str, str, Node]]:
    """Yield the modules of mean and log scale, and the sample, of each random variable mean + noise * exp(scale).

    With ``any_scale``, the scale may also be computed without an exponential.
    """
    users: dict[int, list[Node]] = {}
    for edge in graph.edges:
        users.setdefault(edge.source, []).append(graph[edge.target])
    for noise in graph.nodes:
        if noise.kind != "op" or noise.name not in _NOISE:
            continue
        products = [each for each in users.get(noise.id, ()) if each.name in ("mul", "mul_")]
        sums = [(each, total) for each in products for total in users.get(each.id, ()) if "add" in total.name]
        pairs = [(_others(graph, total, each), _others(graph, each, noise), total) for each, total in sums]
        given = [graph[edge.source] for edge in graph.into(noise)]
        if len(given) == 2:  # torch.normal(mean, std)
            pairs.append((given[:1], given[1:], noise))
        for means, scales, sample in pairs:
            mean, _ = _source(graph, means, learned)
            scale, is_exponential = _source(graph, scales, learned)
            if mean and scale and (is_exponential or any_scale):
                yield mean, scale, sample


def _others(graph: Graph, node: Node, known: Node) -> list[Node]:
    return [graph[edge.source] for edge in graph.into(node) if edge.source != known.id]


def _source(graph: Graph, nodes: list[Node], learned: set[str]) -> tuple[str, bool]:
    """Return the learned module that nodes get their values from, and True if there is an exponential in between."""
    is_exponential = False
    while len(nodes) == 1 and nodes[0].kind == "op":
        node = nodes[0]
        owner = next((each.name for each in graph.ancestors(node) if each.name in learned), "")
        if owner:
            return owner, is_exponential
        is_exponential |= node.name == "exp"
        nodes = [graph[edge.source] for edge in graph.into(node)]
    return "", False


def _collapse(mean: View, scale: View, records: int, most_nats: float, shrink: float, most_scale: float) -> int | None:
    """Return the first step from which on mean and scale are nearly constant; None if they vary.

    A normal distribution with standard deviation 1 whose mean varies by s has at most s² / 2 nats per dimension.
    """
    values, steps = mean.column("std")
    (spreads, levels), _ = scale.columns("std", "rms")
    if min(len(values), len(spreads)) < records:
        return None
    nats = values**2 / 2 * float(np.prod(mean.shape[1:]))
    limits = (
        (values, shrink * values[0]),
        (spreads, shrink * spreads[0]),
        (levels, most_scale),
        (nats, most_nats),
    )
    if any(each[len(each) // 2 :].max() > limit for each, limit in limits):
        return None
    return int(steps[int(np.flatnonzero(nats > most_nats).max(initial=-1)) + 1])
