"""Rules about gradients that vanish or explode in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from lightning_recorder.insight.evidence import Evidence, View, gradient_norms
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import rule
from lightning_recorder.insight.rules.gradients import GRADIENT_CONSEQUENCES, pairs_of_heads
from lightning_recorder.names import Site
from lightning_recorder.records.table import Floats

_WHY_UNEXPLAINED = "A term of the loss that uses an output inside of the model directly, or a factor in the code there."


@rule(
    "vanishing-gradient",
    statistic="log10 of the L2 norm of the gradients of outputs, first minus last quarter of the modules",
    usual="-1.2 to 0.6",
    why="Saturating activations, small weights, or too many layers without residual connections.",
    next="Use residual connections, normalization, ReLU, or an initialization that suits the activation.",
    false_alarms="A head with its own loss.",
    needs=("gradients",),
    records=2,
    explains={**GRADIENT_CONSEQUENCES, "block-trend": ("any",)},
)
def vanishing_gradient(
    evidence: Evidence,
    *,
    persistence: int = 2,
    modules: int = 6,
    decades: float = 3.5,
    correlation: float = 0.8,
    single: float = 0.6,
) -> Iterator[Finding]:
    """Yield a finding if gradients vanish from the last to the first layers."""
    norms = gradient_norms(evidence.gradients)
    if len(norms) < modules or len(evidence.gradients) < persistence:
        return
    change = _change(evidence, norms)
    if -change.rise < decades or change.correlation < correlation:
        return
    verdict = f"gradients shrink {10**-change.rise:.2g}-fold from the last to the first modules"
    is_single = -change.steps.min() > single * -change.rise
    site = change.order[int(change.steps.argmin()) + 1] if is_single else change.order[0]
    verdict += f", most of it in {site.name}" if is_single else f", down to {site.name}"
    yield change.found(evidence, site, verdict)


@rule(
    "exploding-gradient",
    statistic="log10 of the L2 norm of the gradients of outputs, first minus last quarter of the modules",
    usual="-1.2 to 0.6",
    why="Weights that are too large in many layers.",
    next="Use an initialization that keeps the variance, normalization, and gradient clipping.",
    false_alarms="Pretrained models with a new head. A head with a far smaller gradient than another is left out.",
    needs=("gradients",),
    records=2,
    explains=GRADIENT_CONSEQUENCES,
)
def exploding_gradient(
    evidence: Evidence,
    *,
    persistence: int = 2,
    modules: int = 6,
    decades: float = 2.5,
    correlation: float = 0.6,
    single: float = 0.6,
    heads: float = 10.0,
    unexplained: float = 10.0,
) -> Iterator[Finding]:
    """Yield a finding if gradients grow from the last to the first layers."""
    norms = gradient_norms(evidence.gradients)
    small = _of_small_heads(evidence, norms, heads)
    norms = {site: norm for site, norm in norms.items() if site.name not in small}
    if len(norms) < modules or len(evidence.gradients) < persistence:
        return
    change = _change(evidence, norms)
    if change.rise < decades or -change.correlation < correlation:
        return
    verdict = f"gradients grow {10**change.rise:.2g}-fold from the last to the first modules"
    worst = int(change.steps.argmax())
    if change.steps[worst] <= single * change.rise:
        yield change.found(evidence, change.order[0], f"{verdict}, up to {change.order[0].name}")
        return
    before, site = change.order[worst], change.order[worst + 1]
    if norms[before] <= unexplained * _largest_growth(evidence, site.name) * norms[site]:
        yield change.found(evidence, site, f"{verdict}, most of it in {site.name}")
        return
    name = site.name
    verdict += f", most of it between {name} and {before.name}, more than the weight of {name} explains"
    # If another input of this layer has a far smaller gradient, the backward pass of the layer is fine, so the finding
    # names the module before it.
    feeds = [norms.get(Site(each, "out"), np.inf) for each in evidence.wiring.inputs.get(name, ())]
    site = before if min(feeds, default=np.inf) * unexplained < norms[before] else site
    following = f"Look at what uses the output of {before.name}: the terms of the loss, their signs, and factors."
    yield replace(change.found(evidence, site, verdict), why=_WHY_UNEXPLAINED, next=following)


@dataclass(frozen=True)
class _Change:
    """The change of the gradient norms from the last to the first modules.

    Args:
        order: The outputs in the order of execution.
        rise: The mean logarithm of the first quarter of the norms, minus the mean of the last quarter.
        correlation: The rank correlation between norms and positions.
        steps: The logarithm of each norm, minus the logarithm of the next norm.
    """

    order: list[Site]
    rise: float
    correlation: float
    steps: Floats

    def found(self, evidence: Evidence, site: Site, verdict: str) -> Finding:
        """Make a finding about the output of one of the modules."""
        view = View(evidence, evidence.gradients, site)
        return view.found(verdict, "rms", decades=self.rise, correlation=self.correlation)


def _change(evidence: Evidence, norms: Mapping[Site, float]) -> _Change:
    order = sorted(norms, key=lambda site: evidence.wiring.order.get(site.name, 0))
    logs = np.log10([norms[site] for site in order])
    quarter = max(2, len(logs) // 4)
    rise = float(logs[:quarter].mean() - logs[-quarter:].mean())
    return _Change(order, rise, _rank_correlation(logs), logs[:-1] - logs[1:])


def _largest_growth(evidence: Evidence, name: str) -> float:
    """Return an upper bound of the factor by which a linear layer or convolution enlarges the gradient.

    The bound is the Frobenius norm of the weight, times the square root of the number of kernel positions. It is
    infinite if the weight is unknown, or if the module is of another kind.
    """
    weight = evidence.parameter(name, "weight")
    if not weight.kind.startswith(("Linear", "Conv")):
        return np.inf
    (rms, count), _ = weight.columns("rms", "count")
    places = np.prod(weight.shape[2:])
    return float(np.sqrt(places) * (rms * np.sqrt(count)).max(initial=0.0)) if len(rms) else np.inf


def _of_small_heads(evidence: Evidence, norms: Mapping[Site, float], factor: float) -> set[str]:
    """Return the modules that feed only heads with a far smaller gradient than another head, as with two losses."""
    wiring = evidence.wiring
    pairs = pairs_of_heads(evidence, norms)
    small = {other.name for one, other in pairs if norms[one] > factor * norms[other]}
    heads = {site.name for pair in pairs for site in pair}
    behind = {name: wiring.downstream(name) & heads for name in {site.name for site in norms}} if small else {}
    return {name for name, found in behind.items() if found and found <= small}


def _rank_correlation(values: Floats) -> float:
    ranks = values.argsort().argsort()
    return float(np.corrcoef(np.arange(len(values)), ranks)[0, 1])
