"""Tests of the rules of updates that are zero, lost, or too small."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_recorder.graph import Edge
from tests.insight.records import Values, brief, chain, network, run, trained


def test_a_parameter_that_does_not_move() -> None:
    """A weight with a gradient but without updates is a finding."""
    found = run(None, None, network("a", "b", b=trained("b", ratio=0.0, update=0.0)))
    assert [(each.rule, each.module) for each in found] == [("does-not-move", "b")]
    assert "(dtype float32)" in found[0].verdict


@pytest.mark.parametrize(
    ("rate", "dtype", "cause"),
    [
        (1e-3, "float32", "The learning rate is not zero, and float32 is precise"),
        (0.0, "float32", "A learning rate of zero"),
        (1e-3, "bfloat16", "A learning rate of zero, or updates below the precision"),
    ],
)
def test_a_step_that_does_nothing(rate: float, dtype: str, cause: str) -> None:
    """If no parameter of float32 moves and the learning rate is not zero, something else than both is the cause."""
    weights = network("a", "b", **{name: trained(name, ratio=0.0, update=0.0) for name in "ab"})
    weights |= {f"{name}/weight": {**weights[f"{name}/weight"], "learning_rate": rate} for name in "ab"}
    (found,) = run(None, None, weights, dtype=dtype)
    assert (found.rule, found.why.startswith(cause)) == ("does-not-move", True)


def test_updates_lost_to_precision() -> None:
    """Updates of bfloat16 weights with more zeros than the gradients are lost to precision."""
    parts = {
        "a/weight": {"rms": 0.25, "update_ratio": 1e-3},
        "a/weight.grad": {"rms": 1e-3, "zero_fraction": 0.1},
        "a/weight.update": {"rms": 1e-4, "zero_fraction": 0.9},
    }
    assert [each.rule for each in run(None, None, parts, dtype="bfloat16")] == ["updates-lost"]
    assert run(None, None, parts, dtype="float32") == []  # an embedding of which a batch uses few rows


def test_weights_that_hardly_move() -> None:
    """Weights that all move by less than a millionth per step are a finding, with the settings behind it."""
    varying = [1e-3, 2e-3] * 4
    parameters = network("a", "b", a=trained("a", ratio=1e-8, grad=varying), b=trained("b", ratio=3e-7))
    (found,) = run(None, None, parameters)
    assert found.rule == "barely-moves"
    assert found.verdict == "the weights hardly move: at most 3e-07 of their size per step"
    parameters["a/weight"] = {**parameters["a/weight"], "learning_rate": 0.02}
    found = run(None, None, parameters, about={"gradient_clip_val": 1e-6})[0]
    assert found.verdict.endswith(" per step (learning rate 0.02, gradients clipped to 1e-06)")


def test_weights_that_hardly_move_because_of_clipping() -> None:
    """If the norm of all gradients is the same in each record, something clips them to it."""
    parameters = network("a", "b", a=trained("a", ratio=1e-8, grad=3e-6), b=trained("b", ratio=3e-7, grad=4e-6))
    (found,) = run(None, None, parameters)
    assert found.verdict.endswith("; the norm of all gradients is 8e-05 in each record, as after clipping to it")
    assert found.next.endswith("call scaler.unscale_(optimizer) before clip_grad_norm_.")


def _weight(ratio: float, rate: float | list[float], *, is_new: bool) -> dict[str, Values]:
    """Return a weight with uniform values, or with larger ones as training makes them."""
    parameters = dict(trained("fc", ratio=ratio, update=0.25 * ratio))
    end = 0.25 * (3**0.5 if is_new else 4)
    parameters["fc/weight"] = {**parameters["fc/weight"], "min": -end, "max": end, "learning_rate": rate}
    return parameters


@pytest.mark.parametrize(
    ("ratio", "rate", "is_new", "alarm"),
    [
        (5e-6, 1e-7, True, True),
        (5e-6, 1e-7, False, False),  # fine-tuning
        (5e-6, [1e-8 * row for row in range(8)], True, False),  # a warm-up
        (5e-5, 1e-6, True, False),
        (5e-7, 1e-8, False, True),
    ],
)
def test_new_weights_that_hardly_move(ratio: float, rate: float | list[float], is_new: bool, alarm: bool) -> None:
    """Steps of 1e-6 to 1e-5 of the size are too small for weights that are distributed as in a new layer."""
    found = run(None, None, _weight(ratio, rate, is_new=is_new))
    assert [each.rule for each in found] == ["barely-moves"] * alarm


@pytest.mark.parametrize(
    ("ratio", "rms", "alarm"),
    [
        (2e-5, 0.5, True),
        ([1e-5] * 4 + [2.5e-5] * 4, 0.5, False),  # a warm-up
        (2e-5, [0.5] * 7 + [0.6], False),  # it has moved before, and converged
        (2e-4, 0.5, False),
    ],
)
def test_a_tiny_model_that_hardly_moves(ratio: float | list[float], rms: float | list[float], alarm: bool) -> None:
    """Few values show no distribution, but nobody tunes such a model; Keras does not tell its rates."""
    parameters = dict(trained("fc", ratio=1e-3))
    parameters["fc/weight"] = {"rms": rms, "update_ratio": ratio}
    found = run(None, None, parameters, shapes={("fc", "weight"): (2, 8)})
    assert ["barely-moves" in [each.rule for each in found]] == [alarm]


@pytest.mark.parametrize(
    ("ratio", "limit", "is_new", "records", "severity"),
    [
        (3e-5, 1e-4, True, 12, "warning"),
        (3e-5, 1e-4, True, 8, "note"),  # the beginning
        (3e-5, 1e-4, False, 12, "note"),
        (3e-4, 1e-4, True, 12, "note"),
        (3e-5, 2e-4, True, 12, "note"),
    ],
)
def test_clipping_that_keeps_new_weights_from_moving(
    ratio: float, limit: float, is_new: bool, records: int, severity: str
) -> None:
    """For SGD, clipping that shrinks each gradient 100-fold is a warning if the weights are still as at the start."""
    about = {"gradient_clip_val": limit, "gradient_clip_algorithm": "norm", "groups": [{"optimizer": "SGD"}]}
    (found,) = run(None, None, _weight(ratio, 0.1, is_new=is_new), about=about, records=records)
    assert (found.rule, found.severity) == ("always-clipped", severity)


@pytest.mark.parametrize(
    ("slow", "factor", "found"),
    [
        (("head",), 100, ("head", ())),
        (("head", "aux"), 100, ("head", ("aux",))),
        (("head",), 20, None),
        (("a",), 100, None),  # fine-tuning
        (("b", "head"), 100, None),
    ],
)
def test_a_slow_last_layer(slow: tuple[str, ...], factor: float, found: tuple[str, tuple[str, ...]] | None) -> None:
    """A far smaller learning rate is a finding if the last layers alone have it."""
    names = ("a", "b", "c", "d", "e", "head", "aux")
    parameters: dict[str, Values] = {}
    for name in names:
        scale = 1 / factor if name in slow else 1.0
        parameters |= trained(name, ratio=1e-3 * scale, update=2.5e-4 * scale)
        parameters[f"{name}/weight"] = {**parameters[f"{name}/weight"], "learning_rate": 1e-3 * scale}
    graph = chain(*names)
    graph = replace(graph, edges=(*graph.edges[:-1], Edge(11, 15)))  # from e to aux
    findings = run({name: {"rms": 1.0} for name in names}, None, parameters, graph=graph)
    assert [(each.rule, each.module, each.others) for each in findings] == (
        [] if found is None else [("slow-last-layer", *found)]
    )


@pytest.mark.parametrize(
    ("means", "update", "is_wrong"),
    [([0.1] * 8, 1e-3, True), ([0.1, 0.1 + 1e-9] * 4, 1e-3, False), ([0.1] * 8, 0.0, False)],
)
def test_a_weight_that_is_set_back(means: list[float], update: float, is_wrong: bool) -> None:
    """A weight whose values are equal in all records, although steps change it, is a finding."""
    layers = network("fc", "head", fc={**trained("fc", update=update)})
    layers["fc/weight"] = {**layers["fc/weight"], "mean": means}
    found = [each for each in brief(run(None, None, layers)) if each[1] == "set-back"]
    assert found == [("warning", "set-back", "fc")] * is_wrong
