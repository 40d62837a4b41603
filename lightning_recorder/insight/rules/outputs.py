"""Rules about module outputs that are dead, saturated, collapsed or far larger than the input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.functions import function_sites
from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.recorded_step import LOSSES, sides_of, step_of
from lightning_recorder.insight.rule import GRAPH, rule
from lightning_recorder.names import site_title
from lightning_recorder.records.histogram import Histogram
from lightning_recorder.records.table import Floats

_RELUS = ("ReLU", "ReLU6", "LeakyReLU", "Threshold", "RReLU")
_FUNCTIONS = ("Tanh", "Hardtanh", "Softsign")
_BOUNDED = (*_FUNCTIONS, "LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell")
_GATES = ("Sigmoid", "Hardsigmoid")
_RNNS = ("RNN", "RNNCell")  # their outputs are unbounded with a ReLU instead of tanh
_SURE = (*_GATES, "Softmax", "LogSoftmax", "LogSigmoid", "Softplus", "Exp")  # these may learn constant outputs
_EVERYTHING_AFTER, _ANYWHERE = ("downstream", "same"), ("any",)
_WHY_NEGATIVE = "All inputs of the ReLU are negative: the bias before it is too low, or a step was too large."
_NEXT_NEGATIVE = "Look at the bias and the updates of the layer before it; lower the learning rate, or use LeakyReLU."
_WHY_ZERO = "The weight of the layer is zero in all records, so that its output does not depend on its input."
_NEXT_ZERO = "Look at how the weight is initialized, and at masks and pruning that set it to zero."
_STATES = ("out[1]", "out[1][1]")  # the unbounded cell states of an LSTMCell and of an LSTM


@rule(
    "dead-output",
    statistic="zero_fraction of the output",
    usual="at most 0.8, for a ReLU about 0.5",
    why="A ReLU that gets negative inputs only, or a factor, a mask, an input or a weight that is zero.",
    next="Look at the inputs of this module, and at what they are multiplied with.",
    false_alarms="Sparse gates and masks. Between 95 % and 99 % a ReLU is a note.",
    needs=("activations",),
    records=2,
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
        "collapsed-embedding": ("any",),
        "one-class-predicted": ("any",),
    },
)
def dead_output(
    evidence: Evidence,
    *,
    persistence: int = 2,
    zero_fraction: float = 0.99,
    nearly: float = 0.95,
    large_update: float = 0.1,
) -> Iterator[Finding]:
    """Yield the layers that return only zeros."""
    for view in evidence.outputs:
        if view.is_scalar or not (view.dtype or "float").startswith(("float", "bfloat", "complex")):
            continue  # such as one of several losses, or passed-on indices of a batch
        values, steps = view.column("zero_fraction")
        if len(values) < persistence or (values[-persistence:] < nearly).any():
            continue
        dead = bool((values[-persistence:] >= zero_fraction).all())
        if not dead and view.kind not in _RELUS:
            continue
        if view.kind.startswith("Softmax") and values[-persistence:].min() < 1:
            continue  # with one sure class, nearly all outputs of a softmax over many classes are zero
        since = _since(values >= (zero_fraction if dead else nearly), steps)
        if since == steps[0] and len(evidence.gradients) and not view.gradient:
            continue  # a constant without a gradient, such as the logarithm of a determinant, has not died
        least = values[steps >= since].min()
        share = "only zeros" if least == 1 else f"at least {np.floor(1000 * least) / 10:.1f}% zeros"
        zero = _zero_weight(view, persistence)
        feed = f": {zero} is zero" if zero else _feed(view, since, large_update)
        verdict = f"{site_title(*view.site)} returns {share} {_from(since, steps)}{feed}"
        found = view.found(verdict, "zero_fraction", since=since, zero_fraction=values[-1])
        if zero:
            found = replace(found, why=_WHY_ZERO, next=_NEXT_ZERO)
        elif feed.startswith(": "):  # the input was recorded
            found = replace(found, why=_WHY_NEGATIVE, next=_NEXT_NEGATIVE)
        yield found if dead else replace(found, severity="note")


def _zero_weight(view: View, persistence: int) -> str:
    """Return the name of a module's only weight if it is zero in all records; for a ReLU, of the module before it."""
    evidence, wiring = view.evidence, view.evidence.wiring
    names = [view.module]
    if view.kind in _RELUS:
        names += [
            wiring.calls[each]
            for call in wiring.calls_of.get(view.module, ())
            for each in wiring.producers[call]
            if each >= 0
        ]
    weights = [each for name in names for each in evidence.weights_of.get(name, ())]
    is_zero = len(weights) == 1 and len(weights[0].rms) >= persistence and not weights[0].rms.any()
    return weights[0].name if is_zero else ""


def _feed(view: View, since: int, large: float) -> str:
    """Describe the cause if a module is a dead ReLU or follows one: a negative input, or a large update before it."""
    evidence, wiring = view.evidence, view.evidence.wiring
    update = ""
    for feeds in (wiring.producers[call] for call in wiring.calls_of.get(view.module, ())):
        # A ReLU with several calls may be dead in some of them only.
        relus = [each for each in feeds if each >= 0 and evidence.type_of(wiring.calls[each]) in _RELUS]
        sources = [(each, "its input") for each in feeds]
        sources += [(each, f"the input of {wiring.calls[relu]}") for relu in relus for each in wiring.producers[relu]]
        for each, what in sources:
            source = evidence.output(wiring.calls[each]) if each >= 0 else evidence.view(evidence.activations, "")
            update = update or _large_update(evidence, source.module, since, large)
            high, steps = source.column("max")
            if (high[-1:] <= 0).any():
                update = _large_update(evidence, source.module, since, large)
                largest = high[steps >= since].max(initial=high[-1])
                return f": {what} from {source.module} is at most {largest:.3g}{update}"
    return update


def _large_update(evidence: Evidence, name: str, until: int, large: float) -> str:
    """Describe the largest recorded update of a layer up to a step if it was large compared with the weight."""
    for each in evidence.weights_of.get(name, ()):
        ratios, steps = each.column("update_ratio")
        known = np.where((steps <= until) & np.isfinite(ratios), ratios, 0.0)
        if known.max(initial=0.0) >= large:
            rates = each.learning_rate
            at = f" at learning rate {np.median(rates):.3g}" if len(rates) else ""
            return f", after step {steps[known.argmax()]} changed {each.name} by {known.max():.0%}{at}"
    return ""


def _since(holds: NDArray[np.bool_], steps: NDArray[np.int64]) -> int:
    """Return the first step from which on a condition holds in all records."""
    failing = np.flatnonzero(~holds)
    return int(steps[min(failing[-1] + 1, len(steps) - 1)] if len(failing) else steps[0])


def _from(since: int, steps: NDArray[np.int64]) -> str:
    return "in every record" if since == steps[0] else f"from step {since} on"


def _shares(
    evidence: Evidence, kinds: tuple[str, ...], share: Callable[[Histogram], float]
) -> Iterator[tuple[View, list[float]]]:
    """Yield the outputs of modules of some classes, each with the ``share`` of its histograms in the last records."""
    for view in evidence.outputs:
        is_one = view.kind in kinds and view.path.startswith("out") and view.path not in _STATES
        if is_one and not (view.kind in _RNNS and _largest(view) > 1):
            yield view, [share(each) for each in view.histograms()]


@rule(
    "saturation",
    statistic="share of the outputs of tanh, LSTM or sigmoid at the ends of the range, or near them from the start",
    usual="at most 0.2",
    why="The inputs of the activation are too large, so that its derivative is almost zero.",
    next="Look at the sign and the size of its inputs. Scale down the weights or the bias of the layer before it, "
    "normalize its inputs or the targets, or lower the learning rate.",
    false_alarms="Activations that nothing follows are left out. Values of 0.97 to 1 that training has made count "
    "only at both ends of a tanh that shrinks the gradient 100-fold.",
    needs=("activations",),
    records=2,
    explains=dict.fromkeys(
        ("saturation", "vanishing-gradient", "gradient-step", "unlike-siblings", "barely-moves"), ("any",)
    )
    | {"scale-jump": ("upstream", "same")},
)
def saturation(
    evidence: Evidence,
    *,
    persistence: int = 2,
    share: float = 0.4,
    end: float = 0.95,
    zero: float = 0.005,
    nearly: float = 0.9,
    first: float = 0.9,
    spread: float = 0.9,
    shrink: float = 100.0,
) -> Iterator[Finding]:
    """Yield the activations with most outputs at the ends of their range."""
    known = set()
    for kinds, share_of in (
        (_BOUNDED, lambda histogram: _at_the_ends(histogram, -end, end)),
        (_GATES, lambda histogram: _at_the_ends(histogram, zero, end)),
    ):
        for view, shares in _shares(evidence, kinds, share_of):
            if len(shares) >= persistence and min(shares) > share:
                known.add(view.module)
                yield from _saturated(view, shares)
    # Gates and the outputs of cells learn to saturate. So outputs near the ends of the range count only if they were
    # there from the start, or if they are at both ends of a tanh that passes hardly any gradient.
    for view, shares in _shares(evidence, (*_FUNCTIONS, *_GATES), _near_the_bounds):
        is_new = view.module not in known and len(shares) >= persistence and min(shares) > nearly
        if is_new and ((view.rms[:1] >= first).any() or _stops_gradient(view, persistence, spread, shrink)):
            yield from _saturated(view, shares)


def _saturated(view: View, shares: list[float]) -> Iterator[Finding]:
    """Yield a finding about a saturated output, except for a final activation, since a prediction may be sure."""
    if view.is_last and view.kind in (*_FUNCTIONS, *_GATES):
        return
    # Few records have histograms, so the rms shows when the fault began: it grows with the number of values near the
    # limits -1 and 1.
    rms, steps = view.column("rms")
    is_known = view.kind in _BOUNDED and len(rms) > 0
    since = _since(rms >= 0.9 * rms[-len(shares) :].min(), steps) if is_known else None
    verdict = f"{shares[-1]:.0%} of the outputs of {site_title(*view.site)} are at the ends of their range"
    source = view.inputs[0] if len(view.inputs) == 1 and view.kind in (*_FUNCTIONS, *_GATES) else None
    if not source or not len(source.column("min")[0]) or not len(source.column("max")[0]):
        yield view.found(verdict, "rms", since=since, share=shares[-1])
        return
    low, high = source.column("min")[0], source.column("max")[0]
    verdict += f": its input from {source.module} is between {low[-1]:.3g} and {high[-1]:.3g}"
    found = view.found(verdict, "rms", since=since, share=shares[-1])
    if low[-1] * high[-1] > 0:
        why = f"All inputs of the activation are {'positive' if low[-1] > 0 else 'negative'} and far from 0."
        look = f"Look at the bias of {source.module}, and at the sign and the size of what it receives."
    else:
        why = "The inputs of the activation are large with both signs."
        look = f"Scale down the weights of {source.module} or normalize what it receives, or lower the learning rate."
    yield replace(found, why=f"{why} The derivative there is almost 0.", next=look)


@rule(
    "narrow-range",
    statistic="share of the outputs of Hardtanh or clamp at the ends of a range that is at most 0.1 wide",
    usual="at most 0.2",
    why="The range is far smaller than the inputs, so that nearly all values are cut off and pass no gradient.",
    next="Widen the range, or scale the inputs down.",
    false_alarms="Wider ranges, as of pixels, and activations that nothing follows are left out.",
    needs=("activations", GRAPH),
    records=2,
    explains=dict.fromkeys(
        ("vanishing-gradient", "gradient-step", "gradient-stops", "unlike-siblings", "barely-moves", "saturation"),
        ("any",),
    ),
)
def narrow_range(
    evidence: Evidence, *, persistence: int = 2, share: float = 0.5, width: float = 0.1
) -> Iterator[Finding]:
    """Yield the modules and functions that clip nearly all values to their limits."""
    ranges = dict(_ranges(evidence))
    for view in evidence.outputs:
        low, high = ranges.get(view.module, (0.0, np.inf))
        if high - low > width or view.is_last:
            continue
        near = (high - low) / 16  # the middle of the bin at a limit is within this distance
        shares = [_at_the_ends(each, low + near, high - near) for each in view.histograms()]
        if len(shares) >= persistence and min(shares) > share:
            verdict = (
                f"{shares[-1]:.0%} of the outputs of {site_title(*view.site)} are at the ends of its range, "
                f"{low:.3g} to {high:.3g}"
            )
            yield view.found(verdict, "rms", share=shares[-1], low=low, high=high)


def _ranges(evidence: Evidence) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield the functions and modules with a lower and an upper limit, with these limits."""
    graph = evidence.graph
    names = function_sites(graph)
    for node in graph.nodes:
        given = dict(node.arguments)
        limits = [given.get(name, given.get(f"{name}_val", "")) for name in ("min", "max")]
        if node.kind == "op" and node.name in ("hardtanh", "clamp", "clip"):
            with suppress(ValueError):  # a limit may be a tensor or missing
                low, high = map(float, limits)
                owner = "" if node.parent is None else graph[node.parent].name
                yield from ((name, (low, high)) for name in {names.get(node.id, owner), owner} - {""})


def _stops_gradient(view: View, persistence: int, spread: float, shrink: float) -> bool:
    """Return True if a tanh with values at both ends greatly shrinks the gradient in the last records."""
    feeds = [each.gradient for each in view.inputs]
    if view.kind not in _FUNCTIONS or not feeds or not all((view.gradient, *feeds)):
        return False
    last = slice(-persistence, None)
    least = min(view.std[last], default=0.0)
    after = min(view.gradient.rms[last], default=0.0)
    before = max(each.rms[last].max(initial=0.0) for each in feeds)
    return bool(least >= spread and np.inf > after > shrink * before)


@rule(
    "attention-collapse",
    statistic="share of the mass of a softmax in entries above 0.875",
    usual="at most 0.2",
    why="The scores are too large: the queries and keys are not scaled by 1/√d, or their weights grow.",
    next="Check the scale of the scores, the initialization of query and key, or normalize both.",
    false_alarms="Heads that training has made sharp: the softmax must be about as sharp in the first record. Fewer "
    "than 8 entries, probabilities of classes, and a softmax whose logarithm is taken, as of an entropy, are left out.",
    needs=("activations",),
    records=2,
    explains={
        "attention-collapse": ("any",),
        "unlike-siblings": ("any",),
    },
)
def attention_collapse(
    evidence: Evidence,
    *,
    persistence: int = 2,
    share: float = 0.3,
    large: float = 0.875,
    entries: int = 8,
    first: float = 0.8,
) -> Iterator[Finding]:
    """Yield each softmax with nearly all probability in single entries."""
    probabilities = _with_logarithm(evidence)
    for view, shares in _shares(evidence, ("Softmax",), lambda histogram: _mass_of_large(histogram, large)):
        # Class probabilities and the weights of a few experts or variables are not attention.
        is_attention = not view.is_last and (not view.shape or view.shape[-1] >= entries)
        is_attention = is_attention and view.module not in probabilities
        # A head may learn to attend to one position, such as the previous token, so only a softmax that was sharp from
        # the start counts. Its std grows with its sharpness, while its mean stays.
        is_learned = (view.std[:1] < first * view.std[-1:]).any()
        if is_attention and not is_learned and len(shares) >= persistence and min(shares) > share:
            verdict = f"{shares[-1]:.0%} of the attention of {site_title(*view.site)} lies on single positions"
            yield view.found(verdict, "rms", share=shares[-1])


def _with_logarithm(evidence: Evidence) -> set[str]:
    """Return the names of softmax functions whose output is clamped before its logarithm is computed."""
    step = step_of(evidence)
    found = set()
    for node in step.operations:
        if node.name == "softmax":
            readers = list(step.readers(node))
            readers += [each for reader in readers if reader.name in _LIMITS for each in step.readers(reader)]
            if any(reader.name == "log" for reader in readers):
                found |= {step.function_names.get(node.id, ""), step.owner(node)}
    return found - {""}


_LIMITS = ("clamp", "clip", "add", "__add__")


@rule(
    "collapsed-embedding",
    statistic="rms(output - mean over the samples) / rms(output), of outputs [samples, features]",
    usual="0.2 to 1",
    why="The loss is smallest if all samples have the same embedding, as without negative pairs, a stop-gradient or a "
    "term for the variance; or the layers before it have lost the input.",
    next="Look at the loss: detach one of two views, or add negative pairs or a variance term.",
    false_alarms="Outputs that were as constant at the beginning, gates and probabilities, fewer than 8 features, and "
    "regressions whose targets have a mean far from zero, which the outputs learn, are left out.",
    needs=("activations",),
    records=8,
    explains=dict.fromkeys(
        ("vanishing-gradient", "sudden-change", "barely-moves", "norm-ineffective", "one-class-predicted"), _ANYWHERE
    )
    | {"collapsed-embedding": ("any",)},
)
def collapsed_embedding(
    evidence: Evidence, *, persistence: int = 8, least: float = 0.1, first: float = 0.4, features: int = 8
) -> Iterator[Finding]:
    """Yield the outputs that became nearly the same for all samples during training."""
    if _has_offset(evidence, first):
        return
    for view in evidence.outputs:
        spreads, steps = view.column("batch_spread")
        if len(spreads) < persistence or len(view.shape) != 2 or view.shape[1] < features:
            continue
        if view.kind in _SURE or spreads[0] < first or (spreads[-persistence:] > least).any():
            continue
        since = _since(spreads <= least, steps)
        verdict = (
            f"the output of {site_title(*view.site)} is nearly the same for all samples {_from(since, steps)}: "
            f"{spreads[-1]:.2g} of its rms differs between samples, {spreads[0]:.2g} at the beginning"
        )
        yield view.found(verdict, "batch_spread", since=since, spread=spreads[-1], first=spreads[0])


def _has_offset(evidence: Evidence, share: float) -> bool:
    """Return True if a regression loss has targets that hardly differ, compared with their size."""
    step = step_of(evidence)
    for node in step.operations:
        sources = step.sources(node)
        if node.name in LOSSES and len(sources) > 1 and "parameter" not in step.roots[sources[1].id]:
            _, target = sides_of(evidence, step, node)
            if "float" in target.dtype and (target.std < share * target.rms).any():
                return True
    return False


def _largest(view: View) -> float:
    """Return the largest absolute value over all records."""
    return float(max(np.abs(each).max(initial=0.0) for each in (view.min, view.max)))


def _middles(histogram: Histogram) -> Floats:
    middles: Floats = (histogram.edges[1:] + histogram.edges[:-1]) / 2
    return middles


def _at_the_ends(histogram: Histogram, low: float, high: float) -> float:
    """Return the share of values in bins with a middle of at most ``low`` or at least ``high``."""
    middles = _middles(histogram)
    return float(histogram.counts[(middles <= low) | (middles >= high)].sum() / max(histogram.count, 1))


def _near_the_bounds(histogram: Histogram) -> float:
    """Estimate the share of values whose magnitude is 0.97 or more.

    The top bin reaches from 0.875 to 1. Subtracting the other bins from the sum of squares gives the mean square of the
    top bin, and this shows how many of its values are near 1.
    """
    middles = np.abs(_middles(histogram))
    is_top = middles >= 0.9
    number = float(histogram.counts[is_top].sum())
    if not number:
        return 0.0
    rest = float((histogram.counts[~is_top] * middles[~is_top] ** 2).sum())
    mean_square = (histogram.sum_squares * histogram.fraction - rest) / number
    return number / histogram.count * float(np.clip((mean_square - 0.92**2) / (0.985**2 - 0.92**2), 0, 1))


def _mass_of_large(histogram: Histogram, large: float) -> float:
    mass = histogram.counts * _middles(histogram)
    return float(mass[_middles(histogram) > large].sum() / mass.sum()) if mass.sum() else 0.0


@rule(
    "scale-jump",
    statistic="std(output) / rms(input) of a module",
    usual="at most 3",
    why="Weights that are too large for the number of inputs.",
    next="Check the initialization and the learning rate of this layer.",
    false_alarms="Logits and predictions in large units: modules that nothing follows, and gains that are learned. "
    "Fourier transforms, which are sums over all positions, are left out.",
    needs=("activations",),
    records=1,
    explains={
        "scale-jump": ("any",),
        "never-chosen": ("any",),
        "unlike-siblings": ("any",),
        "exploding-gradient": ("any",),
    },
)
def scale_jump(evidence: Evidence, *, gain: float = 8.0, least_std: float = 3.0) -> Iterator[Finding]:
    """Yield the layers whose outputs have a far larger scale than their inputs."""
    table = evidence.activations
    middle, spreads = evidence.medians(table, "rms"), evidence.medians(table, "std")
    for view in evidence.outputs:
        feeds, rms = view.inputs, middle[view.site]
        before = [middle.get(each.site, np.nan) for each in feeds]
        if (
            view.is_last  # logits may be large
            or view.path not in ("out", "out[0]")
            or not feeds
            or np.isnan([rms, *before]).any()  # an input of the model has no recorded rms
            or not 0 < max(before) < np.inf
            or _is_transform(evidence, view.module)
        ):
            continue
        # Use the std of the output, since a mean far from zero may be an intended bias, as before the softplus of a
        # state-space model.
        spread = spreads[view.site]
        largest, least = max(before), min(spread / max(before), _first_gain(view, feeds))
        if least > gain and spread > least_std:
            grown, feed = rms / largest, feeds[before.index(largest)].module
            verdict = f"the output of {view.module} has rms {rms:.3g}, {grown:.3g} × that of its input from {feed}"
            yield view.found(verdict, "rms", gain=grown, rms=rms, input=largest)


def _is_transform(evidence: Evidence, name: str) -> bool:
    return any(function.startswith("fft_") for function, _ in evidence.wiring.operations.get(name, ()))


def _first_gain(view: View, feeds: list[View]) -> float:
    """Return the gain in the first record. A gain that a model learns, such as for large targets, is small at first."""
    before = max(each.rms[0] for each in feeds)
    return float(view.rms[0] / before) if before > 0 else np.inf
