"""Tests of the contents and the memory of a history, and of the images and tags of its overview."""

from __future__ import annotations

import math
import pickle
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_recorder import ArgumentError
from lightning_recorder.insight import Finding
from lightning_recorder.plots import PlotHistory, gradient_flow, heat_map, histogram_over_time, overview, ridge
from lightning_recorder.plots.frame import FoundAt
from lightning_recorder.plots.plot_history import Found
from lightning_recorder.reductions import SCALAR_STATISTICS, SparseCounts, Statistics, to_histogram
from lightning_recorder.taps import Site
from tests.plots.pixels import data_in


def bins(seed: int, filled: int = 200) -> torch.Tensor:
    """Return counts of the fixed bins with the given number of non-empty bins."""
    generator = np.random.default_rng(seed)
    counts = np.zeros(2048, dtype=np.int64)
    counts[generator.permutation(2048)[:filled]] = generator.integers(1, 100_000, filled)
    return torch.from_numpy(counts)


def record(step: int, *sites: Hashable) -> dict[Hashable, Found]:
    return {site: ({"rms": step + row / 10, "other": 1.0}, None) for row, site in enumerate(sites)}


@given(st.integers(2, 20), st.integers(1, 300))
def test_what_is_held_is_evenly_spread(most: int, added: int) -> None:
    """A history keeps every n-th record, with n the smallest sufficient power of two, and the latest record."""
    history = PlotHistory(most, statistics=("rms",))
    for step in range(added):
        history.add_sites(step, record(step, "a", "b"))
    steps = history.steps
    assert len(steps) <= most
    assert (steps[0], steps[-1]) == (0, added - 1)
    every = next(n for n in (2**k for k in range(10)) if [*range(0, added - 1, n), added - 1] == steps)
    assert every == 1 or len(range(0, added - 1, every // 2)) + 1 > most
    expected = [[float(step) for step in steps], [step + 0.1 for step in steps]]
    assert history.table("rms").tolist() == expected
    assert history.recorded.all()


@given(st.integers(2, 9), st.lists(st.sampled_from([0.5, -3.0, 7.0, float("nan"), float("inf"), None]), min_size=1))
def test_what_is_dropped_is_still_conspicuous(most: int, values: list[float | None]) -> None:
    """Between two kept records, an infinity, else NaN, else the value furthest from 0 is known; None is no record."""
    history = PlotHistory(most, statistics=("mean", "rms"), conspicuous=("rms",), max_histograms=0)
    for step, value in enumerate(values):
        first: dict[Hashable, Found] = {"a": ({"rms": 1.0, "mean": float(step)}, None)}
        history.add_sites(step, first if value is None else {**first, "b": ({"rms": value}, None)})
    steps = history.steps
    found, recorded = history.furthest("rms")
    assert found[0].tolist() == [1.0] * len(steps)
    assert history.furthest("mean")[0][0].tolist() == steps
    if len(found) == 1:
        assert values == [None] * len(values)
        return
    for column, (start, end) in enumerate(zip(steps, [*steps[1:], len(values)], strict=True)):
        there = [each for each in values[start:end] if each is not None]
        assert recorded[1, column] == bool(there)
        largest = max(there, key=lambda each: (math.isinf(each), math.isnan(each), abs(each)), default=math.nan)
        np.testing.assert_equal(found[1, column], largest)


def test_the_values_of_many_sites_are_kept_exactly_in_less_memory() -> None:
    """With 300 sites, statistics that all share and those of float32 take less, and are returned as they were."""
    generator = np.random.default_rng(0)
    history, tables = PlotHistory(8, statistics=("rms", "max", "nan_count"), max_histograms=0), []
    names = [f"fc{place}" for place in range(300)]
    for step in range(4):
        sizes, largest = generator.normal(size=300) ** 2, generator.normal(size=300).astype(np.float32)
        values = np.stack((sizes, largest.astype(np.float64), np.zeros(300)), axis=1)
        values[step::7] = np.nan if step == 3 else values[step::7]
        history.add_values(step, names, values, SparseCounts(np.zeros((300, 2048), dtype=np.int64)))
        tables.append(values)
    for place, name in enumerate(history.statistics):
        np.testing.assert_equal(history.table(name), np.stack([each[:, place] for each in tables], axis=1))
    latest = 300 * 320  # of the empty histograms
    assert history.nbytes - latest < 4 * 300 * (8 + 4 + 1) + 300 * 8 + 100
    assert history.has_values.all()


def test_a_site_that_appears_late_has_nan_before() -> None:
    """A late site comes last and is NaN where it was not recorded; a vanished site is NaN afterwards."""
    history = PlotHistory(8, statistics=("rms",))
    history.add_sites(0, record(0, "a", "b"))
    history.add_sites(1, record(1, "c", "a"))
    assert history.sites == ["a", "b", "c"]
    np.testing.assert_equal(history.table("rms"), [[0.0, 1.1], [0.1, np.nan], [np.nan, 1.0]])
    assert history.recorded.tolist() == [[True, True], [True, False], [False, True]]


def test_a_site_that_was_only_in_a_record_that_went_is_still_known() -> None:
    """A site stays known after its only record was replaced by the next one."""
    history = PlotHistory(2, statistics=("rms",))
    for step in range(3):
        history.add_sites(step, record(step, "a"))
    history.add_sites(3, record(3, "late"))
    history.add_sites(4, record(4, "a"))
    assert history.steps == [0, 4]
    assert history.sites == ["a", "late"]
    assert history.recorded.tolist() == [[True, True], [False, False]]


def test_many_sites_have_room() -> None:
    """The arrays grow for two hundred sites that appear at two steps."""
    history = PlotHistory(4, statistics=("rms",))
    history.add_sites(0, record(0, *range(100)))
    history.add_sites(1, record(1, *range(200)))
    assert history.table("rms").shape == (200, 2)
    assert history.table("rms")[:, 1].tolist() == [1 + row / 10 for row in range(200)]


def test_a_step_that_goes_back_is_skipped() -> None:
    """A step that is not greater than the previous one is ignored."""
    history = PlotHistory(8, statistics=("rms",))
    for step in (5, 5, 3, 6):
        history.add_sites(step, record(step, "a"))
    assert history.steps == [5, 6]


def test_counts_are_held_of_some_sites() -> None:
    """Four evenly spaced sites of ten keep exact counts of all kept steps; all sites keep their latest counts."""
    history = PlotHistory(4, max_histograms=4)
    for step in range(6):
        history.add_sites(step, {site: ({}, bins(100 * step + site)) for site in range(10)})
    assert history.histogram_sites == [0, 3, 6, 9]
    steps = history.steps
    assert steps == [0, 2, 4, 5]
    for site in (0, 3, 6, 9):
        expected = np.stack([bins(100 * step + site).numpy() for step in steps])
        assert (history.counts(site) == expected).all()
    latest = dict(history.latest_counts())
    assert list(latest) == list(range(10))
    assert all((latest[site] == bins(500 + site).numpy()).all() for site in range(10))


def test_a_site_that_becomes_unusual_has_its_past() -> None:
    """If memory is short, ordinary sites lose every second record, but a layer that explodes late keeps some."""
    history = PlotHistory(64, statistics=("rms",), max_histograms=2, max_count_bytes=150_000)
    for step in range(40):
        sick = {7: 1e3} if step >= 30 else {}
        history.add_sites(step, {site: ({"rms": sick.get(site, 1.0)}, bins(100 * step + site)) for site in range(10)})
    assert history.histogram_sites == [0, 7]
    kept = history.count_steps(7).tolist()
    assert len([step for step in kept if step < 30]) >= 3
    expected = np.stack([bins(100 * step + 7).numpy() for step in kept])
    assert (history.counts(7) == expected).all()


def test_counts_that_are_missing_are_zeros() -> None:
    """Counts of a site are zeros at steps without a record, including the first step."""
    history = PlotHistory(4)
    history.add_sites(0, {"b": ({}, None)})
    history.add_sites(1, {"a": ({}, bins(1))})
    history.add_sites(2, {"b": ({}, bins(2))})
    history.add_sites(3, {"a": ({}, bins(3))})
    expected = [np.zeros(2048), bins(1).numpy(), np.zeros(2048), bins(3).numpy()]
    assert (history.counts("a") == np.stack(expected)).all()


def test_large_counts_are_exact() -> None:
    """Counts of more than 32 bits are exact."""
    counts = torch.zeros(2048, dtype=torch.int64)
    counts[7], counts[8] = 2**40 + 1, 1
    history = PlotHistory()
    history.add_sites(0, {"a": ({}, counts)})
    assert history.counts("a")[0, 7:9].tolist() == [2**40 + 1, 1]


def test_memory_is_bounded() -> None:
    """The memory of a history stays below the documented limit and stops growing."""
    history = PlotHistory(16, statistics=("rms", "mean"), max_histograms=3, max_count_bytes=100_000)
    sizes = []
    for step in range(300):
        history.add_sites(step, {site: ({"rms": 1.0}, bins(site, 2048)) for site in range(20)})
        sizes.append(history.nbytes)
    tables = 2 * 20 * 16 * (8 * 2 + 1)
    counts = (17 * 3 + 3 * 16) * 20_480
    assert max(sizes) <= tables + counts
    assert max(sizes[:150]) == max(sizes[150:])


def test_a_history_can_be_pickled() -> None:
    """A pickled history has the same contents and continues like the original."""
    history = PlotHistory(4, statistics=("rms",))
    for step in range(5):
        history.add_sites(step, {"a": ({"rms": float(step)}, bins(step))})
    copy = pickle.loads(pickle.dumps(history))
    for each in (history, copy):
        each.add_sites(9, record(9, "a"))
    assert copy.steps == history.steps
    assert (copy.table("rms") == history.table("rms")).all()
    assert (copy.counts("a") == history.counts("a")).all()


def test_what_is_not_held_is_refused() -> None:
    """Missing statistics, missing counts, numbers that are too small and other bins raise errors."""
    history = PlotHistory(statistics=("rms",), max_histograms=0)
    history.add_sites(0, {"a": ({"rms": 1.0}, bins(0))})
    with pytest.raises(ArgumentError, match="holds rms; got 'mean'"):
        history.table("mean")
    with pytest.raises(ArgumentError, match="no counts of 'a'"):
        history.counts("a")
    with pytest.raises(ArgumentError, match="max_steps"):
        PlotHistory(1)
    with pytest.raises(ArgumentError, match=r"\[2048\], got \[3\]"):
        history.add_sites(1, {"a": ({}, torch.ones(3))})


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
def history() -> PlotHistory:
    history = PlotHistory(16)
    for step in range(3):
        history.add_sites(step, {site: measured(step, row) for row, site in enumerate(SITES)})
    return history


def test_each_picture_has_a_tag(history: PlotHistory) -> None:
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


@pytest.mark.parametrize(
    ("name", "path", "end"), [("out", "out", "out"), ("a", "out#2", "a#2"), ("out", "in", "out in")]
)
def test_the_tag_of_a_picture_has_the_name_of_the_module(name: str, path: str, end: str) -> None:
    """The name of the module is in the tag whatever it is, and so is the number of its call."""
    history = PlotHistory()
    history.add_sites(0, {Where(name, path): measured(0, 0)})
    assert list(overview(history, group="g", statistics=()))[-1] == f"g_plots/over_time/{end}"


def test_sites_whose_tags_are_equal_have_numbers() -> None:
    """Sites with equal tags are numbered, so that no image replaces another."""
    history = PlotHistory()
    history.add_sites(0, {name: measured(0, row) for row, name in enumerate(("a/b", "a_b"))})
    tags = list(overview(history, group="g", statistics=()))
    assert tags == ["g_plots/ridge", "g_plots/over_time/a_b", "g_plots/over_time/a_b (2)"]


def test_pictures_are_those_of_the_values(history: PlotHistory) -> None:
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
    history = PlotHistory()
    for step in range(2):
        history.add_sites(
            step, {Where("head", f"{name}.grad"): measured(step, row) for row, name in enumerate(("w", "b"))}
        )
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
def test_what_is_no_gradient_has_no_flow(history: PlotHistory, group: str) -> None:
    """Groups that are not gradients have plots over time but no flow plot."""
    tags = overview(history, group=group, statistics=())
    assert f"{group}_plots/flow" not in tags
    assert sum("over_time" in tag for tag in tags) == 4


@pytest.mark.parametrize("most", [0, 1, 2, 9])
def test_pictures_of_single_sites_are_limited(history: PlotHistory, most: int) -> None:
    """The number of plots of single sites is at most ``max_images``."""
    tags = overview(history, group="activations", statistics=(), max_images=most)
    assert sum("over_time" in tag for tag in tags) == min(most, 4)


def test_an_empty_history_has_no_pictures() -> None:
    """An empty history, a missing statistic and missing histograms have no images."""
    assert overview(PlotHistory(), group="activations") == {}
    history = PlotHistory()
    history.add_sites(0, {"a": ({"rms": 1.0}, None)})
    assert list(overview(history, group="activations")) == ["activations_plots/heat_map/rms"]


def test_a_statistic_that_is_not_held_is_refused(history: PlotHistory) -> None:
    """A statistic that is not kept raises an error that lists those that are."""
    with pytest.raises(ArgumentError, match="the history holds mean, std, rms"):
        overview(history, group="activations", statistics=("median",))


def test_a_heat_map_covers_dropped_records() -> None:
    """A spike is drawn, although its record was dropped."""

    def filled(at: int) -> PlotHistory:
        history = PlotHistory(8, statistics=("rms",), conspicuous=("rms",), max_histograms=0)
        for step in range(64):
            history.add_sites(step, {"a": ({"rms": 500.0 if step == at else 1.0}, None)})
        return history

    assert filled(37).steps == filled(32).steps
    assert 37 not in filled(37).steps
    drawn, expected, flat = (overview(filled(at), group="activations", statistics=("rms",)) for at in (37, 32, -1))
    tag = "activations_plots/heat_map/rms"
    assert np.array_equal(drawn[tag], expected[tag])
    assert not np.array_equal(drawn[tag], flat[tag])


def test_what_was_not_recorded_is_marked(history: PlotHistory) -> None:
    """A site is grey at the steps at which it was not recorded, and not marked as NaN."""
    history.add_sites(3, {SITES[0]: measured(3, 0)})
    image = overview(history, group="activations", statistics=("rms",))["activations_plots/heat_map/rms"]
    assert (image == np.uint8(200)).all(axis=-1).sum() > 3 * 20 * 60


RED = np.array([0xE3, 0x00, 0x0F], dtype=np.uint8)


def found(module: str, step: int, path: str = "out") -> Finding:
    """Return a finding about a tensor from a step on."""
    return Finding("dead-output", "warning", module, path, step, 90, 1, verdict="v", why="w", next="n", usual="u")


@pytest.mark.parametrize(
    ("finding", "row", "column"), [(found("b", 50), 1, 5), (found("c", 0, ""), 2, 0), (found("a", 55), 0, 6)]
)
def test_a_heat_map_marks_a_finding(finding: Finding, row: int, column: int) -> None:
    """The layer of a finding has a red frame that begins at its first step; no other pixel is red."""
    steps, sites = range(0, 100, 10), [Site(name, "out") for name in "abc"]
    history = PlotHistory(statistics=("rms",), max_histograms=0)
    for step in steps:
        history.add_sites(step, {site: ({"rms": 1.0}, None) for site in sites})
    image = overview(history, group="g", statistics=("rms",), findings=[finding])["g_plots/heat_map/rms"]
    data = data_in(image)
    height, width = len(data) / 3, data.shape[1] / 10
    rows, columns = np.nonzero((data == RED).all(-1))
    assert rows.min() == pytest.approx(row * height, abs=2)
    assert rows.max() == pytest.approx((row + 1) * height, abs=2)
    assert columns.min() == pytest.approx(column * width, abs=2)
    assert columns.max() >= data.shape[1] - 3


def test_a_plot_over_time_marks_the_findings_of_its_layer() -> None:
    """The plot of the layer has a red line at the first step; those of other layers have none."""
    history = PlotHistory(statistics=("rms", "min", "max"))
    for step in range(0, 100, 10):
        counts = {name: bins(step) for name in "ab"}
        history.add_sites(
            step, {Site(name, "out"): ({"rms": 1.0, "min": 1.0, "max": 2.0}, counts[name]) for name in "ab"}
        )
    images = overview(history, group="g", statistics=(), findings=[found("b", 50)])
    red = {name: (images[f"g_plots/over_time/{name}"] == RED).all(-1) for name in "ab"}
    assert not red["a"].any()
    (columns,) = np.nonzero(red["b"].any(0))
    assert len(columns) == 1
    assert red["b"][:, columns[0]].sum() > 200


def test_a_layer_with_a_finding_is_drawn_among_many() -> None:
    """A layer with a finding has a row in a picture of few layers, although its values are ordinary."""
    names = [f"layer{row}" for row in range(300)]
    ones = np.ones((300, 4))
    with_mark = heat_map(range(4), names, ones, statistic="rms", title="t", findings=[FoundAt(151, 2, "frozen")])
    assert (with_mark == RED).all(-1).any()
    assert not (heat_map(range(4), names, ones, statistic="rms", title="t") == RED).all(-1).any()
