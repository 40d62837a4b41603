"""Rules about weights and inputs that are too large."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import Evidence, Rule
from lightning_recorder.insight.wiring import INPUT
from lightning_recorder.taps import Site

__all__ = ["RULES"]


def _weight_gain(evidence: Evidence, name: str, path: str = "weight") -> float | None:
    """Return the factor by which a layer scales independent inputs of rms 1: rms(weight) √inputs in the first record.

    An embedding has one input, which is 1. None if the module has no weight of a known shape.
    """
    table = evidence.parameters
    site = Site(name, path)
    kind = evidence.type_of(name)
    if site not in table.places:
        return None
    shape = table.shapes[table.places[site]] or ()
    values, _ = table.column(site, "rms")
    if len(shape) < 2 or not len(values):
        return None
    # transformers' Conv1D and transposed convolutions have the inputs first.
    first = kind == "Conv1D" or "Transpose" in kind
    inputs = 1 if "Embedding" in kind else shape[0] if first else int(np.prod(shape[1:]))
    return float(values[0]) * float(np.sqrt(inputs))


def _large_weights(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    table = evidence.parameters
    for parameter in evidence.weights:
        name, path = parameter.site
        gain = _weight_gain(evidence, name, path) if "weight" in path else None  # other matrices are not multiplied
        is_last = evidence.wiring.has_graph and not evidence.wiring.outputs.get(name)
        if gain is None or gain <= rule.thresholds["logits" if is_last else "gain"]:
            continue
        verdict = f"{parameter.name} is too large for its number of inputs: it scales its input about {gain:.3g}-fold"
        yield rule.found(evidence, table, parameter.site, verdict, statistic="rms", gain=gain)


def _input_scale(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    table = evidence.activations
    middle = evidence.medians(table, "rms")
    for site, rms in middle.items():
        if evidence.wiring.inputs.get(site.name) != [INPUT] and not (
            not evidence.wiring.has_graph and table.places[site] == 0
        ):
            continue
        recorded = [each for each in evidence.inputs_of(site.name) if "float" in evidence.inputs.dtype(each)]
        yield from _large_inputs(rule, evidence, recorded)
        scale = None if recorded or "Embedding" in evidence.type_of(site.name) else _input_rms(evidence, site)
        if scale is not None and scale > rule.thresholds["rms"]:
            verdict = f"the input of {site.name} has rms {scale:.3g}, estimated from its output and weights"
            yield rule.found(evidence, table, site, verdict, statistic="rms", input_rms=scale, rms=rms)


def _large_inputs(rule: Rule, evidence: Evidence, sites: list[Site]) -> Iterator[Finding]:
    """Yield the recorded inputs that are too large."""
    for site, rms in evidence.medians(evidence.inputs, "rms").items():
        if site in sites and rms > rule.thresholds["rms"]:
            verdict = f"the input {site.path} of {site.name or '(root)'} has rms {rms:.3g}"
            yield rule.found(evidence, evidence.inputs, site, verdict, statistic="rms", input_rms=rms)


def _input_rms(evidence: Evidence, site: Site) -> float | None:
    """Estimate the rms of the input of a layer: √(rms(output)² - rms(bias)²) / (rms(weight) √inputs), the median."""
    table, weight, bias = evidence.parameters, Site(site.name, "weight"), Site(site.name, "bias")
    gain = _weight_gain(evidence, site.name)
    if not gain:
        return None
    sizes, steps = table.column(weight, "rms")
    offsets, at = table.column(bias, "rms") if bias in table.places else (np.zeros(len(steps)), steps)
    outputs, seen = evidence.activations.column(site, "rms")
    common = np.intersect1d(np.intersect1d(steps, at), seen)
    sizes, offsets, outputs = (
        values[np.isin(where, common)] for values, where in ((sizes, steps), (offsets, at), (outputs, seen))
    )
    if not len(common) or not (sizes > 0).all():
        return None
    inputs = np.sqrt(np.maximum(outputs**2 - offsets**2, 0)) / (sizes * gain / sizes[0])
    return float(np.median(inputs))


_EVERYTHING_AFTER = {"downstream", "same"}

RULES = (
    Rule(
        name="weights-too-large",
        severity="warning",
        statistic="rms(weight) × √(number of inputs) in the first record",
        thresholds={"gain": 8.0, "logits": 16.0},
        persistence=0,
        usual="0.3 to 3",
        why="A wrong initialization: the variance of the weights does not match the number of inputs.",
        next="Compare with torch.nn.init.kaiming_normal_ or xavier_normal_; look for a factor or a custom init.",
        false_alarms=(
            "First layers that encode coordinates with many frequencies; they have few inputs. Logits, the outputs of "
            "modules that nothing follows, may be larger."
        ),
        examine=_large_weights,
        explains={
            "weights-too-large": ("any",),
            "scale-jump": _EVERYTHING_AFTER,
            "saturation": _EVERYTHING_AFTER,
            "attention-collapse": _EVERYTHING_AFTER,
            "vanishing-gradient": ("any",),
            "gradient-step": ("any",),
            "exploding-gradient": ("any",),
            "block-trend": ("any",),
            "unlike-siblings": ("any",),
            "norm-ineffective": _EVERYTHING_AFTER,
            "dead-output": _EVERYTHING_AFTER,
            "weight-drift": ("any",),
            "barely-moves": ("any",),
            "learning-rate-outlier": ("any",),
        },
    ),
    Rule(
        name="input-scale",
        severity="warning",
        statistic="√(rms(output)² - rms(bias)²) / (rms(weight) √inputs) of a first layer, about the rms of its input",
        thresholds={"rms": 20.0},
        persistence=0,
        usual="0.2 to 3, as of normalized data",
        why="The inputs are not normalized, for example images from 0 to 255.",
        next="Normalize the inputs to mean 0 and standard deviation 1, and check the scale of each feature.",
        false_alarms="Embeddings are left out.",
        examine=_input_scale,
        explains=dict.fromkeys(
            (
                "input-scale",
                "scale-jump",
                "saturation",
                "unlike-siblings",
                "exploding-gradient",
                "vanishing-gradient",
                "gradient-step",
                "dead-output",
                "sudden-change",
                "barely-moves",
                "norm-ineffective",
                "weight-drift",
                "train-differs",
            ),
            ("any",),
        ),
    ),
)
