"""Tests of the sink values and tags of a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_recorder import MemorySink, StatisticsRecorder
from lightning_recorder.outputs import SinkFormatter, TagBudget
from lightning_recorder.records.table import Table
from lightning_recorder.reductions import Norms
from lightning_recorder.reductions.row import DEFAULT_STATISTICS
from lightning_recorder.sinks import TensorBoardSink
from lightning_recorder.sinks.tensorboard import PREFIX
from lightning_recorder.statistics import Record, SiteStatistics
from lightning_recorder.taps import Site
from tests.sinks.events import read_events


def record(*values: float, **about: Any) -> Record:
    module = nn.Identity()
    recorder = StatisticsRecorder({"m": module}, extra=[Norms()])
    with recorder:
        module(torch.tensor(values))
    return Record(7, 1, recorder.snapshot(), **about)


def written(*records: Record, **options: Any) -> MemorySink:
    sink = MemorySink()
    formatter = SinkFormatter("activations", options.pop("statistics", ("mean", "max")), **options)
    for each in records:
        formatter.write(sink, each.table())
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
    formatter, sink = SinkFormatter("gradients", ["mean"]), MemorySink()
    formatter.begin("gradients-2")
    about = record(1.0, overflowed=True, overflow_steps=3)
    formatter.write(sink, about.table())
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


BINS = torch.zeros(2048, dtype=torch.int64)


def seen(**scalars: float) -> SiteStatistics:
    usual = {"rms": 1.0, "min": -2.0, "max": 2.0, "zero_fraction": 0.0, "nan_count": 0.0, "inf_count": 0.0}
    return SiteStatistics({"count": 1.0, **usual, **scalars}, BINS)


def quick(depth: int) -> dict[Site, SiteStatistics]:
    """Return the sites of a large model: the parameters of each block with gradients, updates and optimizer states."""
    paths = [f"{part}{suffix}" for part in ("weight", "bias") for suffix in ("", ".grad", ".update", ".exp_avg")]
    return {
        Site(f"blocks.{block}.fc", path): seen(mean=0.0, std=1.0, **({} if "." in path else {"update_ratio": 1e-3}))
        for block in range(depth)
        for path in paths
    }


def shown_by_default(
    found: Mapping[Site, SiteStatistics], curves: Literal["main", "all"] = "main", group: str = "parameters"
) -> tuple[MemorySink, list[str]]:
    messages: list[str] = []
    budget = TagBudget(None, "Recorder", log=messages.append)
    formatter = SinkFormatter(group, DEFAULT_STATISTICS, curves=curves, budget=budget)
    sink = MemorySink()
    for _ in range(2):
        formatter.write(sink, Table.of(found, record(1.0).facts(group)))
    return sink, messages


def test_each_module_has_one_curve_by_default() -> None:
    """It is the rms of the first output or the update ratio of the largest parameter; histograms are of all sites."""
    outputs = [Site("lstm", "in[0]"), Site("lstm", "out[0]"), Site("lstm", "out[1]"), Site("act", "out#2")]
    found = {site: seen(mean=0.0, std=1.0) for site in [Site("act", "in[0]"), Site("act", "out"), *outputs]}
    for group in ("activations", "gradients"):
        sink, _ = shown_by_default(found, group=group)
        assert sorted(sink.scalars) == [f"{group}/{name}/rms" for name in ("act#2", "act", "lstm/out[0]")]
        assert len(sink.histograms) == len(found)
    large = replace(seen(update_ratio=1e-3), shape=(3, 4))
    small = replace(large, shape=(4,))
    parameters = {Site("fc", "bias"): small, Site("fc", "weight"): large, Site("norm", "weight"): small}
    changes = {Site(name, f"{path}.update"): seen() for name, path in parameters}
    sink, _ = shown_by_default({**parameters, **changes})
    assert sorted(sink.scalars) == ["parameters/fc/weight/update_ratio", "parameters/norm/weight/update_ratio"]
    assert len(sink.histograms) == 6


@pytest.mark.parametrize(
    ("paths", "shown"),
    [
        (["bias.grad", "weight.grad", "weight"], "weight/rms"),
        (["bias.grad", "weight.grad", "weight.exp_avg"], "weight.grad/rms"),
        (["weight.exp_avg"], "weight.exp_avg/rms"),
    ],
)
def test_the_curve_of_a_module_without_updates(paths: list[str], shown: str) -> None:
    """Without updates, the curve is the rms of the values, or of the gradient if the values are not recorded either."""
    found = {Site("fc", path): replace(seen(), shape=(4,) if "bias" in path else (3, 4)) for path in paths}
    assert list(shown_by_default(found)[0].scalars) == [f"parameters/fc/{shown}"]


def test_what_is_not_finite_has_a_curve_by_default() -> None:
    """The counts of NaN and infinities of a site without a curve are shown as soon as there are any."""
    found = {Site("fc", path): replace(seen(), shape=(4,)) for path in ("weight", "weight.grad")}
    sink, _ = shown_by_default(found | {Site("fc", "weight.grad"): seen(nan_count=2.0)})
    assert {tag: by_step[7] for tag, by_step in sink.scalars.items()} == {
        "parameters/fc/weight/rms": 1.0,
        "parameters/fc/weight.grad/nan_count": 2.0,
        "parameters/fc/weight.grad/inf_count": 0.0,
    }


def test_a_module_without_the_main_statistic_has_no_curve() -> None:
    """If the leading site of a module has no rms, there is neither a curve nor an error."""
    plain = SiteStatistics({"count": 1.0, "nan_count": 0.0, "inf_count": 0.0}, BINS)
    found = {Site("a", "in[0]"): seen(), Site("a", "out"): plain, Site("b", "out"): seen()}
    sink = MemorySink()
    formatter = SinkFormatter("activations", DEFAULT_STATISTICS, histograms=False, budget=TagBudget(None))
    formatter.write(sink, Table.of(found, record(1.0).facts("activations")))
    assert list(sink.scalars) == ["activations/b/rms"]


@pytest.mark.parametrize("place", [0, 11, 23])
def test_a_large_model_has_a_curve_of_each_module_and_of_each_parameter_that_is_shown(place: int) -> None:
    """If parameters are chosen one by one, a sick one has its curve, also in a module with a larger one."""
    found = {site: replace(each, shape=(4,) if "bias" in site.path else (3, 4)) for site, each in quick(48).items()}
    found[Site(f"blocks.{place}.fc", "bias.grad")] = seen(rms=0.0, zero_fraction=1.0, mean=0.0, std=0.0)
    sink, (message,) = shown_by_default(found)
    of_modules = {f"parameters/blocks.{block}.fc/weight/update_ratio" for block in range(48)}
    assert of_modules <= sink.scalars.keys()
    assert len({*sink.scalars, *sink.histograms} - of_modules) <= 75
    assert {tag.rpartition("/")[2] for tag in sink.scalars} == {"update_ratio"}
    assert f"parameters/blocks.{place}.fc/bias/update_ratio" in sink.scalars
    assert "Recorder shows a curve of each module, and histograms of 19 of 96 parameters: those with" in message


def test_too_many_modules_have_a_selection_of_curves() -> None:
    """Beyond 400 modules, or 200 in two stages, no further curve is shown beside the selection."""
    found = {Site(f"m{place}", "out"): seen() for place in range(401)}
    sink, (message,) = shown_by_default(found, group="activations")
    assert len([*sink.scalars, *sink.histograms]) <= 75
    assert "Recorder shows curves of 28 of 401 modules: those with" in message
    for modules, has_all in ((200, True), (201, False)):
        stages = [(stage, dict(list(found.items())[:modules])) for stage in ("train", "validate")]
        assert (len(shown_in_both_stages(stages, "main")[-1]) == 2 * modules) is has_all


def test_a_small_model_is_shown_in_full_on_request() -> None:
    """Up to 400 tags, all statistics of all sites are shown, and there is no message."""
    found = quick(6)
    sink, messages = shown_by_default(found, "all")
    assert len(sink.scalars) + len(sink.histograms) == 6 * (8 * 7 + 2)
    assert messages == []


@pytest.mark.parametrize("place", [0, 11, 23])
def test_a_selection_of_a_large_model_is_shown(place: int) -> None:
    """A large model has at most 75 tags: the main statistics of some parameters, the sick one among them."""
    found = quick(24)
    found[Site(f"blocks.{place}.fc", "bias.grad")] = seen(rms=0.0, zero_fraction=1.0, mean=0.0, std=0.0)
    sink, messages = shown_by_default(found, "all")
    tags = [*sink.scalars, *sink.histograms]
    assert len(tags) <= 75
    assert {tag.split("/", 2)[2] for tag in tags} == {
        f"{part}{name}"
        for part in ("weight", "bias")
        for name in ("/rms", "/update_ratio", "/histogram", ".grad/rms", ".grad/histogram")
    }
    assert f"parameters/blocks.{place}.fc/bias.grad/rms" in tags
    assert f"parameters/blocks.{place}.fc/bias/rms" in tags
    (message,) = messages
    assert "Recorder shows curves of 11 of 48 parameters: those with" in message


def test_a_selection_of_inputs_and_outputs_says_tensors() -> None:
    """The message about a selection calls inputs and outputs of modules tensors, not parameters."""
    found = {Site(f"blocks.{block}", path): seen(mean=0.0) for block in range(150) for path in ("in[0]", "out")}
    _, (message,) = shown_by_default(found, group="activations")
    assert " of 300 tensors: those with" in message


def test_what_the_user_asks_for_is_shown() -> None:
    """Statistics that were given are shown in a selection as well."""
    formatter, sink = (
        SinkFormatter("activations", ["std", "max"], budget=TagBudget(None, log=lambda _: None)),
        MemorySink(),
    )
    found = {Site(f"m{place}", "out"): seen(mean=0.0, std=1.0) for place in range(200)}
    formatter.write(sink, Table.of(found, record(1.0).facts("activations")))
    assert {tag.rpartition("/")[2] for tag in sink.scalars} == {"std", "max"}
    assert len(sink.scalars) + len(sink.histograms) <= 75


def test_numbered_tags_are_in_the_order_of_execution() -> None:
    """The names of modules begin with their position in the order of execution, and keep it after a resume."""
    modules = {name: nn.Identity() for name in ("b", "a", "c")}
    with StatisticsRecorder(modules) as recorder:
        for name in ("c", "a", "b"):
            modules[name](torch.ones(1))
    given = Record(0, 0, recorder.snapshot())
    formatter, sink = SinkFormatter("activations", ["rms"], numbered=True), MemorySink()
    formatter.write(sink, given.table())
    assert sorted(sink.scalars) == ["activations/000_c/rms", "activations/001_a/rms", "activations/002_b/rms"]
    other, later = SinkFormatter("activations", ["rms"], numbered=True), MemorySink()
    other.load_state_dict(formatter.state_dict())
    about = record(1.0).facts("activations")
    other.write(later, Table.of({Site(name, "out"): seen(mean=0.0) for name in "bm"}, about))
    assert sorted(later.scalars) == ["activations/002_b/rms", "activations/003_m/rms"]


def shown_in_both_stages(
    records: list[tuple[str, dict[Site, SiteStatistics]]], curves: Literal["main", "all"] = "all"
) -> list[set[str]]:
    """Return what has curves after each record, as ``stage module``, with a selection of modules."""
    budget = TagBudget(None, stages=2, log=lambda _: None)
    formatter = SinkFormatter("activations", DEFAULT_STATISTICS, curves=curves, budget=budget)
    sink, shown = MemorySink(), []
    for stage, found in records:
        formatter.write(sink, Table.of(found, record(1.0, stage=stage).facts("activations")))
        parts = [tag.split("/") for tag in sink.scalars]
        shown.append({f"{'validate' if 'validate' in part[0] else 'train'} {part[1]}" for part in parts})
    return shown


@given(st.integers(0, 99), st.integers(2, 6), st.sampled_from(["train", "validate"]))
def test_a_module_that_becomes_unusual_is_shown_from_then_on(place: int, when: int, sick_stage: str) -> None:
    """Wherever and whenever a module explodes, its curves begin with the next record of each stage, and stay."""
    usual = {Site(f"blocks.{block}.fc", "out"): seen() for block in range(100)}
    sick = {Site(f"blocks.{place}.fc", "out"): seen(rms=1e6, min=-1e6, max=1e6)}
    stages = ["train", "validate"] * 8
    first = 2 * when + (sick_stage == "validate")
    records = [(stage, usual | sick if turn == first else usual) for turn, stage in enumerate(stages)]
    shown, name = shown_in_both_stages(records), f"blocks.{place}.fc"
    assert len(shown[1]) < 200
    was_shown = f"train {name}" in shown[1]
    assert shown[1] == shown[first - 1]
    assert shown[first] - shown[first - 1] == (set() if was_shown else {f"{sick_stage} {name}"})
    assert shown[-1] == shown[first + 1] == shown[1] | {f"train {name}", f"validate {name}"}


def test_a_new_statistic_of_a_site_is_written() -> None:
    """A site that gets a further statistic in a later record has its curve, though the sites stay the same."""
    formatter, sink = SinkFormatter("activations", ["mean"], budget=TagBudget(None)), MemorySink()
    for extra in ({}, {"share": 0.5}):
        found = {Site("a", "out"): seen(mean=0.0, **extra), Site("b", "out"): seen(mean=0.0, share=0.1)}
        formatter.write(sink, Table.of(found, record(1.0).facts("activations")))
    assert "activations/a/share" in sink.scalars


@pytest.mark.parametrize("depth", [4, 300])
def test_a_module_that_is_named_at_the_end_has_a_curve(depth: int) -> None:
    """A module that a finding names after the last record is shown with the values of this record, and no other."""
    formatter, sink = SinkFormatter("activations", ["mean"], budget=TagBudget(None, log=lambda _: None)), MemorySink()
    formatter.begin("activations")
    found = {Site(f"m{place}", "out"): seen(mean=float(place)) for place in range(depth)}
    formatter.write(sink, Table.of(found, record(1.0).facts("activations")))
    before = set(sink.scalars)
    place = next((each for each in range(depth) if f"activations/m{each}/mean" not in before), 3)
    formatter.named = lambda: {f"m{place}"}
    formatter.finish(sink)
    assert len(set(sink.scalars) - before) == (1 if depth > 4 else 0)
    assert sink.scalars[f"activations/m{place}/mean"] == {7: place}


def test_the_event_file_of_a_long_run_is_small(tmp_path: Path) -> None:
    """3,000 records of seven layers take at most 3 MB by default, and each has its curves."""
    modules: dict[str, nn.Module] = {str(place): nn.Identity() for place in range(7)}
    with StatisticsRecorder(modules) as recorder:
        for module in modules.values():
            module(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)))
    table = Record(0, 1, recorder.snapshot()).table()
    formatter = SinkFormatter("activations", DEFAULT_STATISTICS, budget=TagBudget(None))
    with TensorBoardSink(tmp_path, prefix=PREFIX) as sink, sink.joined():
        for step in range(3000):
            formatter.write(sink, table.having(about={**table.about, "step": step}))
    read = read_events(tmp_path)
    assert read.Tags()["scalars"] == [f"z_recorder/activations/{name}/rms" for name in modules]
    assert [event.step for event in read.Scalars("z_recorder/activations/6/rms")] == list(range(3000))
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size < 3e6


def test_a_long_run_has_fewer_histograms() -> None:
    """The first 32 records have histograms, then 16 each time their number doubles; scalars are written for all."""
    formatter, sink = SinkFormatter("activations", ("mean",)), MemorySink()
    table = record(1.0, 3.0).table()
    for step in range(256):
        formatter.write(sink, table.having(about={**table.about, "step": step}))
    (histograms,) = sink.histograms.values()
    assert [*histograms] == [*range(32), *range(32, 64, 2), *range(64, 128, 4), *range(128, 256, 8)]
    assert len(sink.scalars["activations/m/mean"]) == 256
