"""Rules about module outputs: dead, saturated, collapsed, far larger than the input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import Evidence, Rule
from lightning_recorder.insight.wiring import INPUT
from lightning_recorder.names import site_title
from lightning_recorder.records.history import History
from lightning_recorder.records.table import Floats
from lightning_recorder.reductions import Histogram
from lightning_recorder.taps import Site

__all__ = ["RULES"]

_RELUS = ("ReLU", "ReLU6", "LeakyReLU", "Threshold", "RReLU")
_FUNCTIONS = ("Tanh", "Hardtanh", "Softsign")
_BOUNDED = (*_FUNCTIONS, "LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell")
_GATES = ("Sigmoid", "Hardsigmoid")
_RNNS = ("RNN", "RNNCell")  # with a ReLU instead of tanh, their outputs have no bounds
_LARGE_UPDATE = 0.1  # relative to the size of the weight
_WHY_NEGATIVE = "All inputs of the ReLU are negative: the bias before it is too low, or a step was too large."
_NEXT_NEGATIVE = "Look at the bias and the updates of the layer before it; lower the learning rate, or use LeakyReLU."
_STATES = ("out[1]", "out[1][1]")  # the memory of an LSTMCell and of an LSTM, which has no bounds


def _dead(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    table = evidence.activations
    for site, place in table.places.items():
        if table.shapes[place] == () or not (table.dtypes[place] or "float").startswith(("float", "bfloat", "complex")):
            continue  # such as one of several losses, or the indices of a batch that is passed on
        values, steps = table.column(site, "zero_fraction")
        limit = rule.thresholds["zero_fraction"]
        if len(values) < rule.persistence or (values[-rule.persistence :] < rule.thresholds["nearly"]).any():
            continue
        dead = bool((values[-rule.persistence :] >= limit).all())
        if not dead and evidence.type_of(site.name) not in _RELUS:
            continue
        since = _since(values >= (limit if dead else rule.thresholds["nearly"]), steps)
        if since == steps[0] and len(evidence.gradients) and site not in evidence.gradients.places:
            continue  # a constant that no gradient passes, such as the logarithm of a determinant: nothing has died
        least = values[steps >= since].min()
        share = "only zeros" if least == 1 else f"at least {np.floor(1000 * least) / 10:.1f}% zeros"
        feed = _feed(evidence, site, since)
        verdict = f"{site_title(*site)} returns {share} {_from(since, steps)}{feed}"
        found = rule.found(
            evidence, table, site, verdict, statistic="zero_fraction", since=since, zero_fraction=values[-1]
        )
        if feed.startswith(": "):  # its input was recorded
            found = replace(found, why=_WHY_NEGATIVE, next=_NEXT_NEGATIVE)
        yield found if dead else replace(found, severity="note")


def _feed(evidence: Evidence, site: Site, since: int) -> str:
    """Describe the input of a dead ReLU, or of the ReLU before a dead module: negative, or after a large update."""
    table, wiring = evidence.activations, evidence.wiring
    update = ""
    for call, name in enumerate(wiring.calls):
        feeds = wiring.producers[call] if name == site.name else frozenset()
        # A ReLU that is called several times is not dead as a whole.
        relus = [each for each in feeds if each >= 0 and evidence.type_of(wiring.calls[each]) in _RELUS]
        sources = [(each, "its input") for each in feeds]
        sources += [(each, f"the input of {wiring.calls[relu]}") for relu in relus for each in wiring.producers[relu]]
        for each, what in sources:
            source = Site(wiring.calls[each], "out") if each >= 0 else Site("", "")
            update = update or _large_update(evidence, source.name, since)
            high, steps = table.column(source, "max") if source in table.places else (np.zeros(0), np.zeros(0))
            if (high[-1:] <= 0).any():
                update = _large_update(evidence, source.name, since)
                largest = high[steps >= since].max(initial=high[-1])
                return f": {what} from {source.name} is at most {largest:.3g}{update}"
    return update


def _large_update(evidence: Evidence, name: str, until: int) -> str:
    """Describe the largest recorded update of a layer up to a step, if it was large."""
    for each in evidence.weights:
        ratios, steps = evidence.parameters.column(each.site, "update_ratio")
        known = np.where((steps <= until) & np.isfinite(ratios), ratios, 0.0)
        if each.site.name == name and known.max(initial=0.0) >= _LARGE_UPDATE:
            rates = evidence.setting(each, "learning_rate")
            at = f" at learning rate {np.median(rates):.3g}" if len(rates) else ""
            return f", after step {steps[known.argmax()]} changed {each.name} by {known.max():.0%}{at}"
    return ""


def _since(holds: NDArray[np.bool_], steps: NDArray[np.int64]) -> int:
    """Return the first step from which on a condition holds in all records."""
    failing = np.flatnonzero(~holds)
    return int(steps[min(failing[-1] + 1, len(steps) - 1)] if len(failing) else steps[0])


def _from(since: int, steps: NDArray[np.int64]) -> str:
    return "in every record" if since == steps[0] else f"from step {since} on"


def _share_rule(
    kinds: tuple[str, ...], share: Callable[[Histogram], float], text: str, limit: str = "share"
) -> Callable[[Rule, Evidence], Iterator[Finding]]:
    """Return a rule on the share of a histogram, in the last records of modules of some classes."""

    def examine(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
        table = evidence.activations
        for site in table.places:
            kind = evidence.type_of(site.name)
            is_other = kind not in kinds or not site.path.startswith("out") or site.path in _STATES
            if is_other or (kind in _RNNS and _largest(table, site) > 1):
                continue
            shares = [share(each) for each in table.histograms(site)]
            if len(shares) >= rule.persistence and min(shares) > rule.thresholds[limit]:
                verdict = text.format(name=site_title(*site), share=shares[-1])
                # Few records have histograms. The more values are at -1 and 1, the larger is the rms.
                rms, steps = table.column(site, "rms")
                since = _since(rms >= 0.9 * rms[-len(shares) :].min(), steps) if kind in _BOUNDED and len(rms) else None
                yield rule.found(evidence, table, site, verdict, statistic="rms", since=since, share=shares[-1])

    return examine


def _collapsed(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    shapes, places, wiring = evidence.activations.shapes, evidence.activations.places, evidence.wiring
    for found in _mass_on_few(rule, evidence):
        # The probabilities of classes are no attention, nor are the weights of a few experts or variables.
        is_last = wiring.has_graph and not wiring.outputs.get(found.module)
        entries = shapes[places[Site(found.module, found.path)]]
        if not is_last and (not entries or entries[-1] >= rule.thresholds["entries"]):
            yield found


def _largest(table: History, site: Site) -> float:
    """Return the largest absolute value in all records."""
    ends = [np.abs(table.column(site, name)[0]) for name in ("min", "max")]
    return float(max(each.max(initial=0.0) for each in ends))


def _middles(histogram: Histogram) -> Floats:
    middles: Floats = (histogram.edges[1:] + histogram.edges[:-1]) / 2
    return middles


def _at_the_bounds(histogram: Histogram) -> float:
    return float(histogram.counts[np.abs(_middles(histogram)) >= 0.95].sum() / max(histogram.count, 1))


def _at_the_ends(histogram: Histogram) -> float:
    middles = _middles(histogram)
    return float(histogram.counts[(middles <= 0.005) | (middles >= 0.95)].sum() / max(histogram.count, 1))


def _near_the_bounds(histogram: Histogram) -> float:
    """Estimate the share of values whose magnitude is 0.97 or more.

    A bin reaches from 0.875 to 1. Its mean square, what the other bins leave of the sum of squares, tells how many of
    its values are near its upper end.
    """
    middles = np.abs(_middles(histogram))
    is_top = middles >= 0.9
    number = float(histogram.counts[is_top].sum())
    if not number:
        return 0.0
    rest = float((histogram.counts[~is_top] * middles[~is_top] ** 2).sum())
    mean_square = (histogram.sum_squares * histogram.fraction - rest) / number
    return number / histogram.count * float(np.clip((mean_square - 0.92**2) / (0.985**2 - 0.92**2), 0, 1))


def _mass_of_large(histogram: Histogram) -> float:
    mass = histogram.counts * _middles(histogram)
    return float(mass[_middles(histogram) > 0.875].sum() / mass.sum()) if mass.sum() else 0.0


def _saturated(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    text = "{share:.0%} of the outputs of {name} are at the ends of their range"
    found = [
        *_share_rule(_BOUNDED, _at_the_bounds, text)(rule, evidence),
        *_share_rule(_GATES, _at_the_ends, text)(rule, evidence),
    ]
    known = {each.module for each in found}
    # Memory and gates learn to be sure. Values near the ends only count if they were there from the start, or if they
    # are at both ends of a tanh that lets hardly any gradient pass.
    for each in _share_rule((*_FUNCTIONS, *_GATES), _near_the_bounds, text, "nearly")(rule, evidence):
        begin = evidence.activations.column(Site(each.module, each.path), "rms")[0]
        is_early = len(begin) > 0 and begin[0] >= rule.thresholds["first"]
        if each.module not in known and (is_early or _stops_gradient(rule, evidence, each)):
            found.append(each)
    for each in found:
        is_activation = evidence.type_of(each.module) in (*_FUNCTIONS, *_GATES)
        if not (evidence.wiring.has_graph and is_activation) or evidence.wiring.outputs.get(each.module):
            yield each  # no prediction, which should be sure


def _stops_gradient(rule: Rule, evidence: Evidence, found: Finding) -> bool:
    """Return True if a tanh with values at both ends shrinks the gradient by a large factor in the last records."""
    site, table = Site(found.module, found.path), evidence.gradients
    feeds = [Site(name, "out") for name in evidence.wiring.inputs.get(site.name, ())]
    if evidence.type_of(site.name) not in _FUNCTIONS or not feeds or not {site, *feeds} <= table.places.keys():
        return False
    last = slice(-rule.persistence, None)
    spread = min(evidence.activations.column(site, "std")[0][last], default=0.0)
    after = min(table.column(site, "rms")[0][last], default=0.0)
    before = max(table.column(each, "rms")[0][last].max(initial=0.0) for each in feeds)
    return bool(spread >= rule.thresholds["spread"] and np.inf > after > rule.thresholds["shrink"] * before)


def _jump(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    table = evidence.activations
    middle, spreads = evidence.medians(table, "rms"), evidence.medians(table, "std")
    for site, rms in middle.items():
        feeds = evidence.wiring.inputs.get(site.name, [])
        before = [middle.get(Site(name, "out"), np.nan) for name in feeds]
        is_last = evidence.wiring.has_graph and not evidence.wiring.outputs.get(site.name)  # logits may be large
        if (
            is_last
            or site.path not in ("out", "out[0]")
            or not feeds
            or INPUT in feeds
            or np.isnan([rms, *before]).any()
            or not 0 < max(before) < np.inf
        ):
            continue
        # A mean that is far from zero may be a bias by design, as before the softplus of a state-space model.
        spread = spreads.get(site, rms)
        largest, least = max(before), min(spread / max(before), _first_gain(evidence, site, feeds))
        if least > rule.thresholds["gain"] and spread > rule.thresholds["rms"]:
            gain, feed = rms / largest, feeds[before.index(largest)]
            verdict = f"the output of {site.name} has rms {rms:.3g}, {gain:.3g} × that of its input from {feed}"
            yield rule.found(evidence, table, site, verdict, statistic="rms", rms=rms, gain=gain, input=largest)


def _first_gain(evidence: Evidence, site: Site, feeds: list[str]) -> float:
    """Return the gain of the first record. A gain that is learned, for predictions in large units, begins small."""
    first = [evidence.activations.column(each, "rms")[0][0] for each in (site, *(Site(name, "out") for name in feeds))]
    return float(first[0] / max(first[1:])) if max(first[1:]) > 0 else np.inf


_EVERYTHING_AFTER = {"downstream", "same"}

_mass_on_few = _share_rule(
    ("Softmax",), _mass_of_large, "{share:.0%} of the attention of {name} lies on single positions"
)

RULES = (
    Rule(
        name="dead-output",
        severity="warning",
        statistic="zero_fraction of the output",
        thresholds={"zero_fraction": 0.99, "nearly": 0.95},
        persistence=2,
        usual="at most 0.8, for a ReLU about 0.5",
        why="A ReLU that gets negative inputs only, or a factor, a mask, an input or a weight that is zero.",
        next="Look at the inputs of this module, and at what they are multiplied with.",
        false_alarms="Sparse gates and masks. Between 95 % and 99 % a ReLU is a note.",
        examine=_dead,
        explains={
            "dead-output": _EVERYTHING_AFTER,
            "odd-block": ("same",),
            "scale-jump": ("upstream",),
            "gradient-stops": ("upstream", "same", "downstream"),
            "does-not-move": ("upstream", "same", "downstream"),
            "vanishing-gradient": ("any",),
            "gradient-step": ("any",),
            "exploding-gradient": ("any",),
            "unlike-siblings": ("upstream", "same", "downstream"),
            "weight-drift": ("any",),
            "sudden-change": ("upstream", "same", "downstream"),
            "barely-moves": ("any",),
            "updates-lost": ("any",),
            "train-differs": _EVERYTHING_AFTER,
            "norm-ineffective": ("any",),
            "frozen": ("same",),
        },
    ),
    Rule(
        name="saturation",
        severity="warning",
        statistic="share of the outputs of tanh, LSTM or sigmoid at the ends of the range, or near them from the start",
        thresholds={"share": 0.4, "nearly": 0.9, "first": 0.9, "spread": 0.9, "shrink": 100.0},
        persistence=2,
        usual="at most 0.2",
        why="The inputs of the activation are too large, so that its derivative is almost zero.",
        next=(
            "Look at the sign and the size of its inputs. Scale down the weights or the bias of the layer before it, "
            "normalize its inputs or the targets, or lower the learning rate."
        ),
        false_alarms=(
            "Activations that nothing follows are left out. Values of 0.97 to 1 that training has made count only at "
            "both ends of a tanh that shrinks the gradient 100-fold."
        ),
        examine=_saturated,
        explains=dict.fromkeys(
            ("saturation", "vanishing-gradient", "gradient-step", "unlike-siblings", "barely-moves"), ("any",)
        )
        | {"scale-jump": ("upstream", "same")},
    ),
    Rule(
        name="attention-collapse",
        severity="warning",
        statistic="share of the mass of a softmax in entries above 0.875",
        thresholds={"share": 0.3, "entries": 8},
        persistence=2,
        usual="at most 0.2",
        why="The scores are too large: the queries and keys are not scaled by 1/√d, or their weights grow.",
        next="Check the scale of the scores, the initialization of query and key, or normalize both.",
        false_alarms="Sharp heads of trained models. Fewer than 8 entries and probabilities of classes are left out.",
        examine=_collapsed,
        explains={
            "attention-collapse": ("any",),
            "unlike-siblings": ("any",),
        },
    ),
    Rule(
        name="scale-jump",
        severity="warning",
        statistic="std(output) / rms(input) of a module",
        thresholds={"gain": 8.0, "rms": 3.0},
        persistence=2,
        usual="at most 3",
        why="Weights that are too large for the number of inputs.",
        next="Check the initialization and the learning rate of this layer.",
        false_alarms="Logits and predictions in large units: modules that nothing follows, and gains that are learned.",
        examine=_jump,
        explains={
            "scale-jump": ("any",),
            "never-chosen": ("any",),
            "unlike-siblings": ("any",),
            "exploding-gradient": ("any",),
        },
    ),
)
