"""Rules about the value of the loss. Rules about the whole run yield notes, which count only without other findings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log, prod, sqrt

import numpy as np

from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import LOSS_OF_A_GUESS, STILL_FALLS, Finding
from lightning_recorder.insight.recorded_step import setting, shape_of, step_of
from lightning_recorder.insight.rule import GRAPH, rule
from lightning_recorder.names import Site
from lightning_recorder.records.classes import CLASS_COUNTS, classes_in
from lightning_recorder.records.table import Floats

_OF_CLASSES = ("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")


def _only_loss(evidence: Evidence) -> View | None:
    """Return the view of the loss, if the run has a single loss."""
    names = {site.name for site in evidence.losses.places if site.name and site.path == "in.target"}
    view = View(evidence, evidence.results, Site(min(names, default=""), "out"))
    return view if len(names) == 1 and view else None


def _quarters(values: Floats) -> tuple[Floats, Floats]:
    """Return the mean of the values in each quarter of a run, ``[4]``, and the standard error of each mean, ``[4]``."""
    parts = np.array_split(values, 4)
    return np.array([each.mean() for each in parts]), np.array([each.std() / sqrt(len(each)) for each in parts])


@rule(
    "first-loss",
    statistic="cross-entropy of the first step, against the logarithm of the number of classes",
    usual="0.3 to 1.5 × that",
    why="The model is sure before it has learned anything: the weights of the last layer, what they get, or a factor "
    "of the logits is too large. An embedding of torch has std 1, too much for a last layer.",
    next="Scale the weights of the last layer, such as std=0.02, or divide the logits, until the first loss is near "
    "the logarithm of the number of classes.",
    false_alarms="A run that is resumed has no first step. A loss that is a sum over the samples, and "
    "logits with a margin for the target, are left out.",
    needs=("activations", GRAPH),
    records=1,
    explains=dict.fromkeys(
        ("sudden-change", "gradient-spike", "exploding-gradient", "weight-drift", "scale-jump", "still-falls"), ("any",)
    ),
    is_lasting=True,
)
def first_loss(evidence: Evidence, *, factor: float = 5.0) -> Iterator[Finding]:
    """Yield a cross-entropy that is far above the loss of a random guess before the first update."""
    step = step_of(evidence)
    for node in step.operations:
        names, shape = (step.function_names.get(node.id, ""), step.owner(node)), shape_of(node)
        sources = step.sources(node) if node.name == "cross_entropy" and not setting(node, "reduction") else []
        if len(sources) < 2 or not shape:
            continue
        # A margin, as in ArcFace, lowers the logit of the target, so that the loss begins high.
        if step.made_by(sources[1]).id in step.ancestors(sources[0]):
            continue
        views = [View(evidence, evidence.results, Site(name, "out")) for name in names]
        means, steps = next((each.column("mean") for each in views if each), (np.zeros(0), np.zeros(0)))
        classes = shape[min(1, len(shape) - 1)]
        if classes < 2 or not len(means) or steps[0] != 0 or not means[0] > factor * log(classes):
            continue
        ratio = float(means[0]) / log(classes)
        verdict = (
            f"{node.name} in {step.place(node)} is {means[0]:.3g} at step 0, {ratio:.3g} × that of a guess among "
            f"{classes} classes"
        )
        found = next(each for each in views if each).found(verdict, "mean", ratio=ratio, loss=means[0])
        yield replace(found, module=step.owner(node), path="")
        return


@rule(
    LOSS_OF_A_GUESS,
    "note",
    statistic="mean loss in each quarter of the run, against the entropy of the classes or the variance of the targets",
    usual="below 0.9 of that after 200 steps",
    why="The targets do not follow from the inputs, or nothing that matters for them is learned.",
    next="Look at some samples with their targets. `lightning-recorder check` tries whether the model fits one batch.",
    false_alarms="A run with several losses, weights of classes, or any other finding is left out. Large models may "
    "stay there for a while before they learn.",
    needs=("activations", GRAPH),
    records=12,
)
def loss_of_a_guess(
    evidence: Evidence,
    *,
    persistence: int = 12,
    steps: int = 200,
    low: float = 0.95,
    high: float = 1.1,
    error: float = 0.03,
    errors: float = 3.0,
    samples: int = 64,
) -> Iterator[Finding]:
    """Yield a note if, in the whole run, the loss is no better than that of a constant prediction."""
    view = _only_loss(evidence)
    if view is None or len(view.mean) < persistence or np.ptp(view.column("mean")[1]) < steps:
        return
    guesses, of = _guess(evidence, view.module, samples)
    if len(guesses) not in (1, len(view.mean)) or not guesses.all():
        return
    means, deviations = _quarters(view.mean / guesses)
    is_level = means[-1] >= means[1] - errors * np.hypot(deviations[1], deviations[-1])
    if low <= means[1:].mean() <= high and is_level and deviations[-1] < error:
        loss, guess = float(np.mean(view.mean)), float(np.mean(guesses))
        verdict = f"{view.module} stays at {loss:.3g}, the loss of a guess: {of} is {guess:.3g}"
        yield view.found(verdict, "mean", share=loss / guess, loss=loss, guess=guess)


def _guess(evidence: Evidence, name: str, samples: int) -> tuple[Floats, str]:
    """Return the smallest loss of a constant prediction, and the name of that quantity; empty if it is unknown.

    The shape of the loss is ``[records]`` if it is known for each record, or ``[1]`` for all records together.
    """
    step = step_of(evidence)
    nodes = [node for node in step.operations if name in (step.function_names.get(node.id), step.owner(node))]
    kinds = {node.name for node in nodes}
    target = View(evidence, evidence.losses, Site(name, "in.target"))
    if "mse_loss" in kinds and prod(target.shape[1:]) == 1 and len(target.std):
        return target.std**2, "the variance of its targets"
    # A third input tensor would be class weights, which change the loss of a guess.
    usual = [node for node in nodes if node.name in _OF_CLASSES and len(step.sources(node)) == 2]
    if not usual or any(setting(node, "label_smoothing") not in ("", "0.0") for node in usual):
        return np.zeros(0), ""
    counts: dict[int, int] = {}
    for histogram in View(evidence, evidence.losses, Site(name, f"in.target{CLASS_COUNTS}")).histograms():
        for label, count in classes_in(histogram).items():
            counts[label] = counts.get(label, 0) + count
    total = sum(counts.values())
    if total < samples or len(counts) < 2:
        return np.zeros(0), ""
    entropy = -sum(count / total * log(count / total) for count in counts.values())
    # The Miller-Madow correction: a small sample lacks rare classes, which makes its entropy too low.
    return np.array([entropy + (len(counts) - 1) / (2 * total)]), f"the entropy of its {len(counts)} classes"


@rule(
    STILL_FALLS,
    "note",
    statistic="mean loss in each quarter of the run",
    usual="falls less and less",
    why="The loss has not levelled off: the run has too few steps, or its learning rate is low.",
    next="Train longer, or try a higher learning rate.",
    false_alarms="A run that is not at its end, one with several losses, one whose loss has halved, or with any other "
    "finding is left out.",
    needs=("activations",),
    records=12,
)
def still_falls(
    evidence: Evidence, *, persistence: int = 12, errors: float = 4.0, share: float = 0.5, ends: float = 0.9
) -> Iterator[Finding]:
    """Yield a note if the loss falls in the last quarter of the run as fast as before."""
    view = _only_loss(evidence)
    planned = evidence.parameters.about.get("planned_steps")
    if view is None or len(view.mean) < persistence:
        return
    _, steps = view.column("mean")
    if isinstance(planned, (int, float)) and steps[-1] < ends * planned:
        return
    means, deviations = _quarters(view.mean)
    falls = -np.diff(means)
    is_steady = falls[-1] > errors * deviations[-1] and falls[-1] >= share * falls.max() and falls.min() > 0
    if is_steady and means[-1] > share * means[0] > 0:
        verdict = (
            f"{view.module} still falls at step {steps[-1]}, the last one with a record: the means of the quarters are "
            f"{', '.join(f'{each:.3g}' for each in means)}"
        )
        yield view.found(verdict, "mean", loss=means[-1], fall=falls[-1])
