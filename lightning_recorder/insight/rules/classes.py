"""Rules about the target classes and the predicted classes of losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import ALL_IGNORED, NON_FINITE, Finding
from lightning_recorder.insight.recorded_step import setting, shape_of, step_of
from lightning_recorder.insight.rule import GRAPH, rule
from lightning_recorder.names import Site
from lightning_recorder.records.classes import CLASS_COUNTS, classes_in

_ANY = ("any",)
_PREDICTED, _MEANT = (f"in.{side}{CLASS_COUNTS}" for side in ("prediction", "target"))


def _sides(evidence: Evidence, path: str) -> Iterator[View]:
    """Yield the loss sites with a path. Later calls of a loss in a step have other paths, so only the first counts."""
    for site in evidence.losses.places:
        if site.path == path:
            yield View(evidence, evidence.losses, site)


@rule(
    ALL_IGNORED,
    "critical",
    statistic="share of the targets of a loss that are ignore_index",
    usual="below 1",
    why="The loss has no target, so that it is zero or NaN and the model learns nothing.",
    next="Look at the targets of a batch, and at what replaces them by ignore_index, such as truncation or masking.",
    false_alarms="Single batches do not count: all targets of the last records must be ignored.",
    needs=("activations",),
    records=2,
    explains=dict.fromkeys((NON_FINITE, "does-not-move", "gradient-stops"), _ANY),
)
def all_ignored(evidence: Evidence, *, persistence: int = 2) -> Iterator[Finding]:
    """Yield the losses that ignore all of their targets."""
    for view in _sides(evidence, "in.target.ignored"):
        shares, steps = view.column("mean")
        if len(shares) >= persistence and (shares[-persistence:] == 1).all():
            since = int(steps[np.flatnonzero(shares < 1)[-1] + 1]) if (shares < 1).any() else int(steps[0])
            verdict = f"all targets of {view.module} are ignored in each record from step {since} on"
            yield view.found(verdict, "mean", since=since, share=1.0)


@rule(
    "class-ignored",
    statistic="share of the targets of cross_entropy or nll_loss that are ignore_index, if each sample has one target",
    usual="0, or a number that is no class, such as -100",
    why="ignore_index is one of the classes, so its samples do not count: nothing teaches the model to predict it.",
    next="Leave out ignore_index, or mark the samples to ignore with a number that is no class.",
    false_alarms="Targets of sequences and images, where the number may stand for padding or unknown pixels, are left "
    "out.",
    needs=("activations", GRAPH),
    records=4,
    explains={"one-class-predicted": _ANY},
)
def class_ignored(evidence: Evidence, *, persistence: int = 4, most: float = 0.5) -> Iterator[Finding]:
    """Yield the losses that ignore all samples of a class, although the model has an output for it."""
    step = step_of(evidence)
    for node in step.operations:
        text, shape, sources = setting(node, "ignore_index"), shape_of(node), step.sources(node)
        if node.name not in ("cross_entropy", "nll_loss") or not text.isdigit() or not shape or len(shape) != 2:
            continue
        target = step.made_by(sources[1]) if len(sources) > 1 else node
        # Only logits with one row for each sample count, not those of flattened sequences.
        if int(text) >= shape[1] or target.kind != "input" or step.batch != shape[0]:
            continue
        names = (step.function_names.get(node.id, ""), step.owner(node))
        for view in _sides(evidence, "in.target.ignored"):
            shares = view.mean
            if view.module in names and len(shares) >= persistence and 0 < np.median(shares) < most:
                verdict = (
                    f"{node.name} in {step.place(node)} ignores class {text}, one of {shape[1]} that the model "
                    f"predicts: {np.median(shares):.0%} of the samples do not count"
                )
                yield replace(view.found(verdict, "mean", share=float(np.median(shares))), path="")
                return


@rule(
    "one-class-predicted",
    statistic="classes of the predictions that a loss gets in a record whose targets have several",
    usual="several after the first 50 steps",
    why="The model does not use its input, or one class outweighs the others in the loss.",
    next="See the other findings first. Otherwise compare the numbers of samples of the classes, and weight them.",
    false_alarms="The first 50 steps of a run do not count. It is a note if most targets have the class, or if the "
    "predictions differ between samples.",
    needs=("activations",),
    records=8,
)
def one_class_predicted(
    evidence: Evidence,
    *,
    persistence: int = 8,
    begun: int = 50,
    predictions: int = 64,
    most: float = 0.6,
    spread: float = 0.1,
) -> Iterator[Finding]:
    """Yield the losses whose predicted class is the same for all samples of a record."""
    for view in _sides(evidence, _PREDICTED):
        target = View(evidence, evidence.losses, Site(view.module, _MEANT))
        (low, high), steps = view.columns("min", "max")
        (least, largest), at = target.columns("min", "max")
        last = slice(-persistence, None)
        if (
            len(steps) < persistence
            or steps[-persistence] < begun
            or not np.array_equal(steps, at)
            or view.count[last].sum() < predictions
        ):
            continue
        # If the targets have a single class, equal predictions are fine.
        if (low[last] < high[last]).any() or (least[last] == largest[last]).any():
            continue
        counts, only = [classes_in(each) for each in target.histograms()], int(low[-1])
        share = sum(each.get(only, 0) for each in counts) / max(1, sum(sum(each.values()) for each in counts))
        if counts:
            which = f"class {only}" if (low[last] == only).all() else "one class"
            verdict = (
                f"the predictions that {view.module} gets have {which} for all samples of each of the last "
                f"{persistence} records; {share:.0%} of the targets are of class {only}"
            )
            found = view.found(verdict, "std", since=int(steps[-persistence]), share=share)
            # A model that learns slowly may predict one class for a while, but its outputs still depend on the input,
            # so the finding is a note.
            spreads = View(evidence, evidence.losses, Site(view.module, "in.prediction")).batch_spread[last]
            is_constant = len(spreads) == persistence and bool((spreads <= spread).all())
            yield found if share <= most and is_constant else replace(found, severity="note")


@rule(
    "inverted-weights",
    statistic="mean weight of the targets of a loss that weights classes, against the mean of the weights",
    usual="at most 1, since frequent classes have small weights",
    why="The weights are the shares of the classes, where their inverses are meant: rare classes count even less.",
    next="Invert them: 1 / share for the weights of classes, and negative / positive samples for pos_weight.",
    false_alarms="Weights of other sizes than the shares of the classes, classes with the weight 0, and a vector of "
    "pos_weight are left out.",
    needs=("activations",),
    records=4,
    explains={"one-class-predicted": _ANY},
)
def inverted_weights(
    evidence: Evidence, *, records: int = 4, targets: int = 64, factor: float = 1.4, tolerance: float = 0.25
) -> Iterator[Finding]:
    """Yield the losses whose class weights are proportional to the class frequencies."""
    for view in _sides(evidence, "in.target.weight"):
        weights = View(evidence, evidence.losses, Site(view.module, "in.target.weights"))
        (means, sizes, least), _ = weights.columns("mean", "rms", "min")
        ignored = View(evidence, evidence.losses, Site(view.module, "in.target.ignored")).mean
        (of_targets, counts), _ = view.columns("mean", "count")
        if min(len(means), len(counts)) < records or not least.min() > 0:
            continue
        number = float((counts * (1 - ignored)).sum() if len(ignored) == len(counts) else counts.sum())
        if number < targets:
            continue
        mean = float((of_targets * counts).sum() / number)
        # Weights proportional to the class frequencies have this mean over the targets.
        expected = float(np.median(sizes**2 / means))
        ratio = mean / float(np.median(means))
        if ratio > factor and abs(mean / expected - 1) < tolerance:
            verdict = (
                f"frequent classes have the largest weights in {view.module}: the mean weight of its targets is "
                f"{mean:.3g}, {ratio:.3g} × that of the classes"
            )
            yield replace(view.found(verdict, "mean", factor=ratio, mean=mean), path="")
