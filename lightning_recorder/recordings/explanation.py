"""One sentence about a comparison: the cause, if it is known, and its effect."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lightning_recorder.names import RUNNING_STATISTICS, Site
from lightning_recorder.recordings.bands import lower_median
from lightning_recorder.recordings.call_order import RANDOM_CLASSES
from lightning_recorder.recordings.comparison import Comparison
from lightning_recorder.recordings.divergence import Divergence, SeriesPair
from lightning_recorder.recordings.run_changes import Change, Phase

__all__ = ["explain", "place", "site_name", "written_apart"]

_MOST_CAUSES = 3
_SAME_FACTOR = 2e-3  # the largest relative difference between factors that count as equal
_SIGMAS = 4.0


def explain(found: Comparison, *, exact: bool = False) -> str:
    """Return one sentence about a comparison."""
    if not found.compared:
        return _nothing(found)
    if found.first is None:
        return _same(found, exact=exact)
    until = "" if found.last_same is None else f"same until step {found.last_same}, then "
    return until + _Explanation(found).text(found.first)


def site_name(site: Site) -> str:
    """Return a site as text: the module, and the path unless it is the output."""
    return (site.name or "(root)") + ("" if site.path == "out" else f" {site.path}")


def written_apart(one: float, other: float) -> tuple[str, str]:
    """Format two numbers with enough digits to distinguish them."""
    for digits in (3, 4, 6, 9, 17):
        texts = f"{one:.{digits}g}", f"{other:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


def place(divergence: Divergence) -> str:
    """Return the site, the recorder, the statistic and both values of a divergence as text."""
    one, other = written_apart(divergence.one, divergence.other)
    values = "" if divergence.statistic == "histogram" else f" {one} vs {other}"
    stage = "" if divergence.stage == "train" else f" {divergence.stage}"
    stage += "" if divergence.loader is None else f"/{divergence.loader}"
    return f"{site_name(divergence.site)} ({divergence.recorder}{stage}, {divergence.statistic}{values})"


def _nothing(found: Comparison) -> str:
    if found.pairs and any(pair.steps for pair in found.pairs):
        return "nothing to compare: no site has the same name in both runs; --map NAME_IN_A=NAME_IN_B maps names"
    if found.pairs:
        return "nothing to compare: they have no common step"
    return "nothing to compare: they have no recorder and stage in common"


def _same(found: Comparison, *, exact: bool) -> str:
    what = "the same" if found.first_bits is not None else "bitwise equal"
    what += ", histograms too," if exact else ""
    steps = "the only step" if found.steps == 1 else f"all {found.steps} steps"
    text = f"{what} in {steps}" + (" that both have" if found.differences else "")
    if found.first_bits is not None:
        text += f", but not bitwise from step {found.first_bits.step}, {place(found.first_bits)}"
    if found.rules and any(each.kind == "module name" for each in found.differences):
        text = f"modules are renamed, {', '.join(found.rules)}; apart from that {text}"
    causes = [*_Explanation(found).causes(found.first_bits)] if found.first_bits is not None else found.changes
    return text + (f"; {_listed(causes)}" if causes else "")


def _listed(causes: Iterable[Change]) -> str:
    texts = [str(each) for each in causes]
    more = f" and {len(texts) - _MOST_CAUSES} more" if len(texts) > _MOST_CAUSES else ""
    return ", ".join(texts[:_MOST_CAUSES]) + more


@dataclass(frozen=True)
class _Factor:
    """The common factor between the values of two runs at all sites of a kind."""

    sites: int
    value: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ×" if 0.01 <= self.value < 1e4 else f"{self.value:.3g} ×"


class _Explanation:
    """The cause of a divergence, found from differences of models and settings and from the pattern of the values."""

    def __init__(self, found: Comparison) -> None:
        self.found = found

    def text(self, first: Divergence) -> str:
        """Return the cause, if it is known, and its effect."""
        causes, effect = self.causes(first), self.effect(first)
        renamed = [each for each in self.found.differences if each.kind == "module name"]
        prefix = f"modules are renamed, {', '.join(each.what for each in renamed)}; " if renamed else ""
        bad = "; ".join(f"in {run}, {verdict}" for run, verdict in zip("AB", self.found.bad, strict=True) if verdict)
        if bad:
            return prefix + (f"{_listed(causes)}: {bad}" if causes else bad)
        if not causes:
            return prefix + effect[0]
        return f"{prefix}{_listed(causes)}" + (f": {effect[1]}" if effect[1] else "")

    def causes(self, first: Divergence) -> list[Change]:
        """Return the differences that can explain a divergence; differences of the model come first."""
        changes = [each for each in self.found.changes if not each.what.startswith("hparams.")]
        hyperparameters = [each for each in self.found.changes if each.what.startswith("hparams.")]
        for divergence in (first, self.found.first_bits):
            phases: list[Phase | None] = [None if divergence is None else self.phase(divergence)]
            if divergence is not None and self._follows_unknown_update(divergence):
                phases.append(Phase.UPDATE)
            for phase, known in itertools.product(phases, (changes, hyperparameters)):
                fitting = [each for each in known if phase is None or phase in each.phases]
                if fitting:
                    return self._preferred(fitting)
        return []

    def _follows_unknown_update(self, first: Divergence) -> bool:
        """Return True if parameters may differ at a divergence, because they were not recorded at that step."""
        pair = self.pair(first)
        if pair.group == "parameters" or not pair.steps or first.step <= pair.steps[0]:
            return False
        return not any(each.group == "parameters" and first.step in each.steps for each in self.found.pairs)

    def _preferred(self, fitting: list[Change]) -> list[Change]:
        """Return the most probable causes. If the graph has changed, all settings except the precision are left out."""
        graph = [each for each in fitting if each.is_graph]
        precision = [each for each in fitting if each.what == "precision"]
        if graph:
            # A missing module draws no random numbers, so the initial values of all later ones differ.
            return [*graph, *precision]
        # The number of samples usually follows from the number of steps, so it is named only if nothing else changed.
        main = [each for each in fitting if each.what != "number of samples"]
        return sorted(main or fitting, key=lambda each: not each.what.endswith("seed"))

    def pair(self, divergence: Divergence) -> SeriesPair:
        """Return the series of a divergence."""
        key = divergence.recorder, divergence.stage, divergence.loader
        return next(each for each in self.found.pairs if (each.recorder, each.one.stage, each.one.loader) == key)

    def phase(self, first: Divergence) -> Phase | None:
        """Return the phase of the training in which a divergence arose."""
        pair = self.pair(first)
        if pair.group == "gradients":
            return Phase.BACKWARD
        if pair.group != "parameters" or first.site.path in RUNNING_STATISTICS:
            return Phase.FORWARD
        if first.site in pair.held and first.statistic != "update_ratio":
            return Phase.START if first.step == 0 else Phase.UPDATE
        return Phase.GRADIENT if first.site.path.endswith(".grad") else Phase.UPDATE

    def effect(self, first: Divergence) -> tuple[str, str]:
        """Return two descriptions of a divergence: one for an unknown cause, and one for a known cause."""
        pair, phase = self.pair(first), self.phase(first)
        if pair.one.stage != "train":
            text = f"{site_name(first.site)} differs in {pair.one.stage} only"
            return text, text
        if phase is Phase.START:
            return self._start(pair, first)
        if phase is Phase.FORWARD:
            return self._forward(pair, first)
        if phase is Phase.BACKWARD:
            return self._backward(pair, first)
        if phase is Phase.GRADIENT:
            return self._gradient(pair, first)
        return self._update(pair, first)

    def _start(self, pair: SeriesPair, first: Divergence) -> tuple[str, str]:
        apart, scaled = [], []
        has_rms = "rms" in pair.statistics
        one, other = (each.tolist() for each in pair.values_at("rms", first.step)) if has_rms else ([], [])
        differing = {
            each.first.site
            for each in self.found.sites
            if (each.first.recorder, each.first.step) == (pair.recorder, first.step)
            and each.first.statistic != "update_ratio"
        }
        for index, site in enumerate(pair.sites):
            if site in pair.held and site in differing:
                apart.append(site)
                count = math.prod(pair.one[site].shape or (1,))
                # The rms of n independent values varies by a factor of 1 ± sqrt(1 / 2n).
                if one and min(one[index], other[index]) > 0:
                    distance = abs(math.log(other[index] / one[index]))
                    scaled += [(site, one[index], other[index])] if distance > _SIGMAS / math.sqrt(count) else []
                elif one and one[index] != other[index]:
                    scaled.append((site, one[index], other[index]))
        known = f"{len(apart)} of {len(pair.held)} parameters start from other values"
        if not apart:
            return f"{site_name(first.site)} starts from other values", ""
        if scaled:
            site, mine, theirs = scaled[0]
            more = f" and {len(scaled) - 1} more" if len(scaled) > 1 else ""
            ratio = f" ({theirs / mine:.3f} ×)" if mine else ""
            values = " → ".join(written_apart(mine, theirs))
            return f"another initialization of {site_name(site)}{more}, rms {values}{ratio}: {known}", known
        if len(apart) > 1:
            return f"another seed: {known}, of the same size", known
        return f"{site_name(apart[0])} starts from other values, of the same size", known

    def _forward(self, pair: SeriesPair, first: Divergence) -> tuple[str, str]:
        batch = self._batch(first.step)
        name = site_name(first.site)
        if batch:
            where = f"{first.site.name or 'the model'}'s input" if first.site.path.startswith("in") else name
            return f"{batch}: {where}", batch
        if first.site.path in RUNNING_STATISTICS:
            return f"{name} differs: its initial value, the input of its layer, or the momentum", f"{name} differs"
        module = self._class_of(first.site.name)
        if any(name in module for name in RANDOM_CLASSES):
            text = f"{name} draws other random numbers for equal inputs"
            return f"another state of the random number generator: {text}", f"{name} is the first output that differs"
        dtypes = pair.one[first.site].dtype, pair.other[pair.counterparts[first.site]].dtype
        if dtypes[0] != dtypes[1]:
            text = f"the dtype of {name} is {dtypes[0]} in A and {dtypes[1]} in B"
            return text, text
        if first.site.path.startswith("in"):
            factor = self._factor_of([first])
            return f"the inputs differ: {name}" + (f" is {factor}" if factor else ""), f"{name} differs"
        known = f"{name} is the first output that differs"
        if self._follows_unknown_update(first):
            return f"{known}; its parameters are not recorded at that step", known
        return f"{known}, from equal {self._equal()}: its code, its buffers or random numbers differ", known

    def _equal(self) -> str:
        has_parameters = any(pair.group == "parameters" for pair in self.found.pairs)
        has_batch = any("batch" in pair.one.about(step) for pair in self.found.pairs for step in pair.steps[:1])
        return " and ".join(filter(None, ["parameters" * has_parameters, "batches" * has_batch])) or "recorded values"

    def _class_of(self, name: str) -> str:
        classes = self.found.classes
        return classes.get(name, "")

    def _batch(self, step: int) -> str:
        """Describe the difference between the batches of a step; an empty string if they are equal or unknown."""
        batches = [self._batches(place) for place in range(2)]
        mine, theirs = (each.get(step) for each in batches)
        if mine is None or theirs is None or mine == theirs:
            return ""
        if mine[1] == theirs[1]:
            return "the samples of the batch are in another order"
        elsewhere = next((other for other, each in batches[0].items() if each == theirs), None)
        if elsewhere is not None:
            return f"the batches come in another order, B has in step {step} the batch of step {elsewhere} of A"
        return "the batch differs"

    def _batches(self, place: int) -> dict[int, list[int]]:
        found = {}
        for pair in self.found.pairs:
            series = (pair.one, pair.other)[place]
            for step in series.steps if series.stage == "train" else ():
                batch = series.about(step).get("batch")
                if isinstance(batch, list) and len(batch) == 2:
                    found[step] = batch
        return found

    def _backward(self, pair: SeriesPair, first: Divergence) -> tuple[str, str]:
        factor = self._factor(pair, first.step, [site for site in pair.sites if not site.path.startswith("in")])
        if factor is not None:
            text = f"all {factor.sites} gradients are {factor}"
            return f"the loss is scaled: {text}", text
        name = site_name(first.site)
        known = f"the gradient of {name} is the first that differs"
        return f"{known}, from equal outputs: the loss, a hook or its backward differ", known

    def _gradient(self, pair: SeriesPair, first: Divergence) -> tuple[str, str]:
        factor = self._factor(pair, first.step, [site for site in pair.sites if site.path.endswith(".grad")])
        if factor is not None:
            text = f"all {factor.sites} parameter gradients are {factor}"
            return f"clipping or a scaled loss: {text}", text
        known = f"{site_name(first.site)} is the first gradient that differs"
        return f"{known}: clipping, accumulation or the backward pass differ", known

    def _update(self, pair: SeriesPair, first: Divergence) -> tuple[str, str]:
        held = [site for site in pair.sites if site in pair.held]
        factor = self._factor(pair, first.step, held, "update_ratio")
        if factor is None:
            updates = [site for site in pair.sites if site.path.endswith(".update")]
            factor = self._factor(pair, first.step, updates)
        if factor is not None:
            text = f"all {factor.sites} update ratios are {factor}"
            return f"a learning rate {factor.value:.4g} times as high: {text}", text
        for moment in ("exp_avg", "momentum_buffer"):
            moments = [site for site in pair.sites if site.path.endswith(f".{moment}")]
            factor = self._factor(pair, first.step, moments)
            if factor is not None:
                text = f"all {factor.sites} moments {moment} are {factor}"
                return f"gradients that are clipped or scaled before the step: {text}", text
        known = f"{site_name(first.site)} is the first update that differs"
        return f"{known}, from equal gradients: the optimizer or its settings differ", known

    def _factor(self, pair: SeriesPair, step: int, sites: Iterable[Site], statistic: str = "rms") -> _Factor | None:
        """Return the factor between the runs' values at a step; None if the sites have different factors."""
        if statistic not in pair.statistics or step not in pair.steps:
            return None
        one, other = pair.values_at(statistic, step)
        index = {site: place for place, site in enumerate(pair.sites)}
        left_out = set(self.found.rounding)
        places = np.array([index[site] for site in sites if site not in left_out], dtype=np.int64)
        places = places[one[places] != 0]
        with np.errstate(all="ignore"):
            ratios = other[places] / one[places]
        ratios = ratios[np.isfinite(ratios)]
        if len(ratios) < 2 or bool(ratios.min() <= 0):
            return None
        value = float(lower_median(ratios))
        is_common = bool((ratios.max() / ratios.min() - 1) <= _SAME_FACTOR)
        return _Factor(len(ratios), value) if is_common and abs(value - 1) > _SAME_FACTOR else None

    def _factor_of(self, found: list[Divergence]) -> _Factor | None:
        ratios = [each.other / each.one for each in found if each.statistic == "rms" and each.one]
        return _Factor(1, ratios[0]) if ratios else None
