"""The rule about random latent variables that do not depend on the sample."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import GRAPH, rule

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
    learned = {each.module for each in evidence.tensors if evidence.output(each.module)} - {""}
    pairs = list(dict.fromkeys(_latents(evidence.graph, learned)))
    outputs = [(evidence.output(mean), evidence.output(scale)) for mean, scale in pairs]
    since = [_collapse(mean, scale, records, most_nats, shrink, most_scale) for mean, scale in outputs]
    if not since or None in since:  # hierarchical models do not use all of their variables
        return
    mean, scale = pairs[0]
    names = f"outputs of {mean} and {scale} are" if mean != scale else f"output of {mean} is"
    verdict = f"the {names} nearly the same for all samples, so that the random variable tells nothing about a sample"
    view = outputs[0][0]
    first = max(step for step in since if step is not None)
    others = tuple(dict.fromkeys(each for pair in pairs for each in pair if each != mean))
    yield view.found(verdict, "std", since=first, others=others, std=view.std[-1])


def _latents(graph: Graph, learned: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the modules of mean and logarithmic scale of each random variable: mean + noise * exp(scale)."""
    users: dict[int, list[Node]] = {}
    for edge in graph.edges:
        users.setdefault(edge.source, []).append(graph[edge.target])
    for noise in graph.nodes:
        if noise.kind != "op" or noise.name not in _NOISE:
            continue
        products = [each for each in users.get(noise.id, ()) if each.name in ("mul", "mul_")]
        sums = [(each, total) for each in products for total in users.get(each.id, ()) if "add" in total.name]
        pairs = [(_others(graph, total, each), _others(graph, each, noise)) for each, total in sums]
        given = [graph[edge.source] for edge in graph.into(noise)]
        if len(given) == 2:  # torch.normal(mean, std)
            pairs.append((given[:1], given[1:]))
        for means, scales in pairs:
            mean, _ = _source(graph, means, learned)
            scale, is_exponential = _source(graph, scales, learned)
            if mean and scale and is_exponential:
                yield mean, scale


def _others(graph: Graph, node: Node, known: Node) -> list[Node]:
    return [graph[edge.source] for edge in graph.into(node) if edge.source != known.id]


def _source(graph: Graph, nodes: list[Node], learned: set[str]) -> tuple[str, bool]:
    """Return the learned module that made some values, through functions alone, and True if they are exponentials."""
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
