"""Tests of the images and tags of an overview."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from lightning_recorder import ArgumentError
from lightning_recorder.plots import History, gradient_flow, heat_map, histogram_over_time, overview, ridge
from lightning_recorder.reductions import SCALAR_STATISTICS, Statistics, to_histogram


class Where(NamedTuple):
    """A site as the recorders identify it."""

    name: str
    path: str


SITES = [Where("encoder.0", "out"), Where("encoder/0", "out"), Where("lstm", "out[1]"), Where("", "out")]


def values(step: int, row: int) -> torch.Tensor:
    return torch.randn(300, generator=torch.Generator().manual_seed(10 * step + row)) * (row + 1)


def measured(step: int, row: int) -> tuple[dict[str, float], torch.Tensor]:
    statistics = Statistics()
    statistics.update(values(step, row))
    found = statistics.compute()
    return {name: float(found[name]) for name in SCALAR_STATISTICS}, found["histogram"]


@pytest.fixture
def history() -> History:
    history = History(16)
    for step in range(3):
        history.add(step, {site: measured(step, row) for row, site in enumerate(SITES)})
    return history


def test_each_picture_has_a_tag(history: History) -> None:
    """Each image has its tag: slashes in names are replaced, the root is named, and a path follows its module."""
    assert list(overview(history, group="activations", statistics=("rms", "mean"))) == [
        "activations_plots/heat_map/rms",
        "activations_plots/heat_map/mean",
        "activations_plots/ridge",
        "activations_plots/over_time/encoder.0",
        "activations_plots/over_time/encoder_0",
        "activations_plots/over_time/lstm out[1]",
        "activations_plots/over_time/(root)",
    ]


def test_sites_whose_tags_are_equal_have_numbers() -> None:
    """Sites with equal tags are numbered, so that no image replaces another."""
    history = History()
    history.add(0, {name: measured(0, row) for row, name in enumerate(("a/b", "a_b"))})
    tags = list(overview(history, group="g", statistics=()))
    assert tags == ["g_plots/ridge", "g_plots/over_time/a_b", "g_plots/over_time/a_b (2)"]


def test_pictures_are_those_of_the_values(history: History) -> None:
    """Each image equals, pixel for pixel, the plot of the recorded values and histograms."""
    found = overview(history, group="gradients", statistics=("rms",))
    names = ["encoder.0", "encoder/0", "lstm out[1]", "(root)"]
    table = [[measured(step, row)[0]["rms"] for step in range(3)] for row in range(4)]
    histograms = [[to_histogram(*measured(step, row)) for step in range(3)] for row in range(4)]
    largest = [float(values(2, row).abs().max()) for row in range(4)]
    expected = {
        "gradients_plots/heat_map/rms": heat_map(range(3), names, table, statistic="rms", title="gradients: rms"),
        "gradients_plots/ridge": ridge(names, [each[2] for each in histograms], title="gradients: histograms", step=2),
        "gradients_plots/flow": gradient_flow(
            names,
            [row[2] for row in table],
            largest,
            title="gradients: flow",
            step=2,
            statistic="rms",
            largest="largest magnitude",
        ),
        "gradients_plots/over_time/lstm out[1]": histogram_over_time(
            range(3), histograms[2], title="gradients: lstm out[1]"
        ),
    }
    assert {tag: (found[tag].shape, found[tag].tobytes()) for tag in expected} == {
        tag: (image.shape, image.tobytes()) for tag, image in expected.items()
    }


@pytest.mark.parametrize("group", ["parameters_grad", "parameters-slow_grad"])
def test_gradients_of_parameters_have_their_flow(group: str) -> None:
    """Parameter gradients have a flow plot with the parameter names, and no plots over time."""
    history = History()
    for step in range(2):
        history.add(step, {Where("head", f"{name}.grad"): measured(step, row) for row, name in enumerate(("w", "b"))})
    found = overview(history, group=group, statistics=("rms",))
    assert list(found) == [f"{group}_plots/{kind}" for kind in ("heat_map/rms", "ridge", "flow")]
    latest = [measured(1, row)[0]["rms"] for row in range(2)]
    largest = [float(values(1, row).abs().max()) for row in range(2)]
    expected = gradient_flow(
        ["head w", "head b"],
        latest,
        largest,
        title=f"{group}: flow",
        step=1,
        statistic="rms",
        largest="largest magnitude",
    )
    assert (found[f"{group}_plots/flow"] == expected).all()


@pytest.mark.parametrize("group", ["activations", "parameters", "parameters-slow"])
def test_what_is_no_gradient_has_no_flow(history: History, group: str) -> None:
    """Groups that are not gradients have plots over time but no flow plot."""
    tags = overview(history, group=group, statistics=())
    assert f"{group}_plots/flow" not in tags
    assert sum("over_time" in tag for tag in tags) == 4


@pytest.mark.parametrize("most", [0, 1, 2, 9])
def test_pictures_of_single_sites_are_limited(history: History, most: int) -> None:
    """The number of plots of single sites is at most ``max_images``."""
    tags = overview(history, group="activations", statistics=(), max_images=most)
    assert sum("over_time" in tag for tag in tags) == min(most, 4)


def test_an_empty_history_has_no_pictures() -> None:
    """An empty history, a missing statistic and missing histograms have no images."""
    assert overview(History(), group="activations") == {}
    history = History()
    history.add(0, {"a": ({"rms": 1.0}, None)})
    assert list(overview(history, group="activations")) == ["activations_plots/heat_map/rms"]


def test_a_statistic_that_is_not_held_is_refused(history: History) -> None:
    """A statistic that is not kept raises an error that lists those that are."""
    with pytest.raises(ArgumentError, match="the history holds mean, std, rms"):
        overview(history, group="activations", statistics=("median",))


def test_what_was_not_recorded_is_marked(history: History) -> None:
    """A site is grey at the steps at which it was not recorded, and not marked as NaN."""
    history.add(3, {SITES[0]: measured(3, 0)})
    image = overview(history, group="activations", statistics=("rms",))["activations_plots/heat_map/rms"]
    assert (image == np.uint8(200)).all(axis=-1).sum() > 3 * 20 * 60
