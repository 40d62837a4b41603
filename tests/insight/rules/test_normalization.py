"""Tests of the rules of normalization layers."""

from __future__ import annotations

import math

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


@pytest.mark.parametrize(
    ("variances", "mode", "expected"),
    [
        ([[1.0] * 8, [1.0, 1.1] * 4], {}, ["bn0"]),
        ([[1.0] * 8, [1.0, 1.1] * 4], {"eval_mode": 1.0}, []),  # the backbone is frozen, with its statistics
        ([[1.0] * 8, [1.0, 1.1] * 4], {"rms": [1.0] * 2 + [math.nan] * 6}, []),  # it is called at the beginning only
        ([[1.0] * 8, [1.0] * 8], {}, []),
        ([[1.0] * 7 + [1.1], [1.0, 1.1] * 4], {}, []),
        ([[math.nan] * 8, [1.0, 1.1] * 4], {}, []),
    ],
)
def test_running_statistics_that_do_not_change(variances: list[list[float]], mode: Values, expected: list[str]) -> None:
    """In train mode, running statistics that stay bitwise equal while others change are a finding."""
    parameters: dict[str, Values] = trained("fc")
    layers: dict[str, Values] = {"fc": {"rms": 1.0}}
    for place, values in enumerate(variances):
        parameters |= {
            f"bn{place}/running_mean": {"rms": 0.1, "mean": 0.0},
            f"bn{place}/running_var": {"rms": values, "mean": values},
        }
        layers[f"bn{place}"] = {"rms": 1.0, **(mode if place == 0 else {})}
    graph = chain("fc", "bn0", "bn1", bn0="BatchNorm1d", bn1="BatchNorm1d")
    found = [each for each in run(layers, parameters=parameters, graph=graph) if each.rule == "running-statistics"]
    assert [each.module for each in found] == expected
    assert all(each.verdict.endswith("do not change, but those of 1 others do") for each in found)
