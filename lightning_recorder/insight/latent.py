"""The rule about random latent variables that do not depend on the sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import Evidence, Rule
from lightning_recorder.taps import Site

__all__ = ["RULES"]

_NOISE = ("randn", "randn_like", "normal", "normal_")


def _collapsed(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    table, graph = evidence.activations, evidence.wiring.graph
    learned = {each.site.name for each in evidence.tensors if Site(each.site.name, "out") in table.places} - {""}
    pairs = list(dict.fromkeys(_latents(graph, learned))) if graph is not None else []
    since = [_collapse(rule, evidence, mean, scale) for mean, scale in pairs]
    if not since or None in since:  # hierarchical models do not use all of their variables
        return
    mean, scale = pairs[0]
    names = f"outputs of {mean} and {scale} are" if mean != scale else f"output of {mean} is"
    verdict = f"the {names} nearly the same for all samples, so that the random variable tells nothing about a sample"
    site = Site(mean, "out")
    first = max(step for step in since if step is not None)
    found = rule.found(
        evidence, table, site, verdict, statistic="std", since=first, std=table.column(site, "std")[0][-1]
    )
    yield replace(found, others=tuple(dict.fromkeys(each for pair in pairs for each in pair if each != mean)))


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


def _collapse(rule: Rule, evidence: Evidence, mean: str, scale: str) -> int | None:
    """Return the first step from which on mean and scale are nearly constant; None if they vary.

    A normal distribution with standard deviation 1 whose mean varies by s has at most s² / 2 nats per dimension.
    """
    table, site = evidence.activations, Site(mean, "out")
    values, steps = table.column(site, "std")
    (spreads, levels), _ = table.columns(Site(scale, "out"), "std", "rms")
    if min(len(values), len(spreads)) < rule.persistence:
        return None
    nats = values**2 / 2 * float(np.prod((table.shapes[table.places[site]] or ())[1:]))
    limits = (
        (values, rule.thresholds["shrink"] * values[0]),
        (spreads, rule.thresholds["shrink"] * spreads[0]),
        (levels, rule.thresholds["scale"]),
        (nats, rule.thresholds["nats"]),
    )
    if any(each[len(each) // 2 :].max() > limit for each, limit in limits):
        return None
    return int(steps[int(np.flatnonzero(nats > rule.thresholds["nats"]).max(initial=-1)) + 1])


RULES = (
    Rule(
        name="posterior-collapse",
        severity="warning",
        statistic="std of the outputs that give the mean and the logarithmic scale of a random variable",
        thresholds={"nats": 0.01, "shrink": 0.3, "scale": 0.5},
        persistence=10,
        usual="0.3 to 2 for the mean, so that it differs between samples",
        why=(
            "The KL term outweighs the reconstruction, for example because one is summed over the values of a sample "
            "and the other one averaged. Or the decoder does not get the random variable with its gradient."
        ),
        next=(
            "Compare the two terms of the loss per sample; sum the reconstruction loss over the values, and lower or "
            "warm up the weight of the KL term. Use rsample() rather than sample()."
        ),
        false_alarms=(
            "Hierarchical models that do not use some of their variables: all of them must collapse. Outputs that were "
            "as constant at the beginning do not count."
        ),
        examine=_collapsed,
        explains=dict.fromkeys(("weight-drift", "vanishing-gradient", "unlike-siblings", "sudden-change"), ("any",)),
    ),
)
