"""Tests of the sink values and tags of a record."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_recorder import MemorySink, StatisticsRecorder
from lightning_recorder.outputs import SinkFormatter
from lightning_recorder.reductions import Norms
from lightning_recorder.statistics import Record


def record(*values: float, **about: Any) -> Record:
    module = nn.Identity()
    recorder = StatisticsRecorder({"m": module}, extra=[Norms()])
    with recorder:
        module(torch.tensor(values))
    return Record(7, 1, recorder.snapshot(), **about)


def written(*records: Record, **options: Any) -> MemorySink:
    sink = MemorySink()
    report = SinkFormatter("activations", options.pop("statistics", ("mean", "max")), **options)
    for each in records:
        report.write(sink, each, each.snapshot.statistics())
    return sink


@pytest.mark.parametrize(
    ("about", "group", "end"),
    [
        ({}, "activations", ""),
        ({"stage": "validate"}, "activations_validate", ""),
        ({"stage": "test", "loader": 1}, "activations_test", "/dataloader_idx_1"),
    ],
)
def test_tags(about: dict[str, Any], group: str, end: str) -> None:
    """The stage is in the group, the loader at the end as in ``self.log``; extra statistics are shown as well."""
    sink = written(record(1.0, 3.0, **about))
    names = ["mean", "max", "abs_max", "l1_norm", "l2_norm"]
    assert {tag: by_step[7] for tag, by_step in sink.scalars.items()} == {
        f"{group}/m/{name}{end}": value for name, value in zip(names, [2.0, 3.0, 3.0, 4.0, 10**0.5], strict=True)
    }
    assert list(sink.histograms) == [f"{group}/m/histogram{end}"]


def test_overflows_are_counted_under_the_label_of_the_recorder() -> None:
    """Two recorders of one group count overflowed steps under different tags."""
    report, sink = SinkFormatter("gradients", ["mean"]), MemorySink()
    report.begin("gradients-2")
    about = record(1.0, overflowed=True, overflow_steps=3)
    report.write(sink, about, about.snapshot.statistics())
    assert sink.scalars == {"gradients-2/overflow_steps": {7: 3.0}}


def test_nonfinite_values_are_counted_from_the_first_on() -> None:
    """The counts of NaN and infinities are shown from the first record that has any."""
    finite, bad = record(1.0), record(1.0, float("nan"))
    assert "activations/m/nan_count" not in written(finite).scalars
    assert list(written(bad, finite).scalars["activations/m/nan_count"].values()) == [0.0]  # at the same step
    assert written(bad).scalars["activations/m/inf_count"] == {7: 0.0}


def test_a_step_that_overflowed_says_where() -> None:
    """For a skipped step, only the counts of nonfinite values are shown, and only where there are any."""
    sink = written(record(1.0, float("inf"), overflowed=True, overflow_steps=3))
    assert sink.scalars == {
        "activations/overflow_steps": {7: 3.0},
        "activations_overflow/m/nan_count": {7: 0.0},
        "activations_overflow/m/inf_count": {7: 1.0},
    }
    assert sink.histograms == {}


def test_statistics_of_ranks_are_left_out_where_there_is_one() -> None:
    """Statistics across ranks are skipped without an error if there is only one rank."""
    sink = written(record(1.0), statistics=("rank_mean_min", "mean"), histograms=False)
    assert [tag.rpartition("/")[2] for tag in sink.scalars] == ["mean", "abs_max", "l1_norm", "l2_norm"]
    assert sink.histograms == {}
