"""Tests of the rules of normalization layers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.insight.records import Values, brief, chain, run, trained


def test_a_normalization_without_effect() -> None:
    """The output of a BatchNorm has the rms of its weight; a LayerNorm may differ within the range of its weight."""
    weight: dict[str, Values] = {"norm/weight": {"rms": 1.0, "min": 0.2, "max": 3.0, "update_ratio": 1e-3}}
    for kind, rms, alarm in (
        ("BatchNorm2d", 1.1, 0),
        ("BatchNorm2d", 2.0, 1),
        ("LayerNorm", 2.0, 0),
        ("LayerNorm", 5.0, 1),
    ):
        found = run({"norm": {"rms": rms}, "fc": {}}, None, weight, graph=chain("norm", "fc", norm=kind))
        assert brief(found) == [("warning", "norm-ineffective", "norm")] * alarm, (kind, rms)


@pytest.mark.parametrize(
    ("variance", "expected"),
    [
        ([25.0] * 8, [("warning", "running-statistics", "bn")]),
        ([1.5] * 8, []),
        (list(np.geomspace(400.0, 25.0, 8)), []),  # it follows slowly
    ],
)
def test_running_statistics(variance: list[float], expected: list[tuple[str, str, str]]) -> None:
    """Running statistics whose rms is four times that of the inputs, and stays so, are a finding."""
    parameters: dict[str, Values] = {
        **trained("fc"),
        "bn/running_mean": {"rms": 0.1, "mean": 0.0},
        "bn/running_var": {"rms": variance, "mean": variance},
    }
    layers: dict[str, Values] = {"fc": {"rms": 1.0}, "bn": {"rms": 1.0}}
    assert brief(run(layers, parameters=parameters, graph=chain("fc", "bn", bn="BatchNorm1d"))) == expected
