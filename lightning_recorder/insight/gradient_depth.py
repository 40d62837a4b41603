"""Rules about gradients that vanish or explode on their way back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from lightning_recorder.insight.backward import GRADIENT_CONSEQUENCES, gradient_norms, pairs_of_heads
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import Evidence, Rule
from lightning_recorder.records.table import Floats
from lightning_recorder.taps import Site

__all__ = ["RULES"]

_WHY_UNEXPLAINED = "A term of the loss that uses an output inside of the model directly, or a factor in the code there."


def _depth(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    table = evidence.gradients
    norms = gradient_norms(table)
    decades = rule.thresholds["decades"]
    sign = np.sign(decades)
    if sign > 0:
        small = _of_small_heads(evidence, norms, rule.thresholds["heads"])
        norms = {site: norm for site, norm in norms.items() if site.name not in small}
    if len(norms) < 6 or len(table) < rule.persistence:
        return
    order = sorted(norms, key=lambda site: evidence.wiring.order.get(site.name, 0))
    logs = np.log10([norms[site] for site in order])
    quarter = max(2, len(logs) // 4)
    rise = float(logs[:quarter].mean() - logs[-quarter:].mean())
    correlation = _rank_correlation(logs)
    if sign * rise < abs(decades) or -sign * correlation < rule.thresholds["correlation"]:
        return
    steps = logs[:-1] - logs[1:]
    worst = int(np.argmax(sign * steps))
    single = sign * steps[worst] > 0.6 * abs(rise)
    site = order[worst + 1] if single else order[0]
    how = "shrink" if sign < 0 else "grow"
    verdict = f"gradients {how} {10 ** abs(rise):.2g}-fold from the last to the first modules"
    limit = rule.thresholds.get("unexplained", np.inf) * _largest_growth(evidence, site.name) * norms[site]
    if single and norms[order[worst]] > limit:
        before, name = order[worst], site.name
        verdict += f", most of it between {name} and {before.name}, more than the weight of {name} explains"
        # If the gradient of another input of this layer is far smaller, the backward pass of the layer is fine.
        feeds = [norms.get(Site(each, "out"), np.inf) for each in evidence.wiring.inputs.get(name, ())]
        site = before if min(feeds, default=np.inf) * rule.thresholds["unexplained"] < norms[before] else site
        following = f"Look at what uses the output of {before.name}: the terms of the loss, their signs, and factors."
        found = rule.found(evidence, table, site, verdict, statistic="rms", decades=rise, correlation=correlation)
        yield replace(found, why=_WHY_UNEXPLAINED, next=following)
        return
    if single:
        verdict += f", most of it in {site.name}"
    else:
        verdict += f", down to {site.name}" if sign < 0 else f", up to {site.name}"
    yield rule.found(evidence, table, site, verdict, statistic="rms", decades=rise, correlation=correlation)


def _largest_growth(evidence: Evidence, name: str) -> float:
    """Return a bound of the factor by which the weight of a linear layer or convolution makes the gradient grow.

    That is the Frobenius norm, times the square root of the number of places in the kernel. It is infinite if the
    weight is not known, or if the module is none of these.
    """
    table, site = evidence.parameters, Site(name, "weight")
    if site not in table.places or not evidence.type_of(name).startswith(("Linear", "Conv")):
        return np.inf
    (rms, count), _ = table.columns(site, "rms", "count")
    places = np.prod((table.shapes[table.places[site]] or ())[2:])
    return float(np.sqrt(places) * (rms * np.sqrt(count)).max(initial=0.0)) if len(rms) else np.inf


def _of_small_heads(evidence: Evidence, norms: Mapping[Site, float], factor: float) -> set[str]:
    """Return the modules that only lead to heads whose gradient is far below that of another head: another loss."""
    wiring = evidence.wiring
    pairs = pairs_of_heads(evidence, norms)
    small = {other.name for one, other in pairs if norms[one] > factor * norms[other]}
    heads = {site.name for pair in pairs for site in pair}
    behind = {name: wiring.downstream(name) & heads for name in {site.name for site in norms}} if small else {}
    return {name for name, found in behind.items() if found and found <= small}


def _rank_correlation(values: Floats) -> float:
    ranks = values.argsort().argsort()
    return float(np.corrcoef(np.arange(len(values)), ranks)[0, 1])


RULES = (
    Rule(
        name="vanishing-gradient",
        severity="warning",
        statistic="log10 of the L2 norm of the gradients of outputs, first minus last quarter of the modules",
        thresholds={"decades": -3.5, "correlation": 0.8},
        persistence=2,
        usual="-1.2 to 0.6",
        why="Saturating activations, small weights, or too many layers without residual connections.",
        next="Use residual connections, normalization, ReLU, or an initialization that suits the activation.",
        false_alarms="A head with its own loss.",
        examine=_depth,
        explains={**GRADIENT_CONSEQUENCES, "block-trend": ("any",)},
    ),
    Rule(
        name="exploding-gradient",
        severity="warning",
        statistic="log10 of the L2 norm of the gradients of outputs, first minus last quarter of the modules",
        thresholds={"decades": 2.5, "correlation": 0.6, "heads": 10.0, "unexplained": 10.0},
        persistence=2,
        usual="-1.2 to 0.6",
        why="Weights that are too large in many layers.",
        next="Use an initialization that keeps the variance, normalization, and gradient clipping.",
        false_alarms="Pretrained models with a new head. A head with a far smaller gradient than another is left out.",
        examine=_depth,
        explains=GRADIENT_CONSEQUENCES,
    ),
)
