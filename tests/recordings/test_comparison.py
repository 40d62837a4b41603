"""Tests of the comparison of two runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_recorder import ArgumentError, StatisticsRecorder
from lightning_recorder.recordings import (
    Comparison,
    RecordWriter,
    Tolerance,
    compare,
    open_recording,
    reader,
    records_path,
)
from lightning_recorder.recordings.call_order import in_execution_order
from lightning_recorder.recordings.reader import Part
from lightning_recorder.taps import ParameterGradientTap, Site
from tests.recordings.runs import record_run, site_of, write_simple

Values = dict[str, float]


def compared(one: Path, other: Path, tolerance: Tolerance | None = None) -> Comparison:
    return compare(open_recording(one).run, open_recording(other).run, tolerance)


def poke(net: nn.Module) -> None:
    """Change one weight of the second layer."""
    with torch.no_grad():
        net.get_submodule("head").weight[1, 2] += 0.05  # type: ignore[operator,index]  # a Linear has a tensor there


def test_equal_runs_are_the_same_to_the_bit(tmp_path: Path) -> None:
    """Two runs of the same program are equal under every tolerance, including their histograms."""
    for name in ("a", "b"):
        record_run(tmp_path / name)
    for tolerance in (Tolerance(), Tolerance(exact=True), Tolerance(0.0, 0.0)):
        found = compared(tmp_path / "a", tmp_path / "b", tolerance)
        assert (found.same, found.steps, found.first, found.first_bits, found.notes) == (True, 4, None, None, [])


def test_one_weight_parts_where_it_is_changed(tmp_path: Path) -> None:
    """If one weight is changed before step 2, the runs agree until then and diverge at the output of that layer."""
    record_run(tmp_path / "a")
    record_run(tmp_path / "b", change=poke, at=2)
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found.first is not None
    assert (found.last_same, found.first.step) == (1, 2)
    assert (found.first.recorder, found.first.site) == ("activations", Site("head", "out"))
    exact = compared(tmp_path / "a", tmp_path / "b", Tolerance(exact=True))
    assert exact.first is not None
    assert (exact.first.step, exact.first.site, exact.first.statistic) == (2, Site("head", "out"), "rms")


def test_another_seed_parts_at_once(tmp_path: Path) -> None:
    """Runs with different seeds diverge at the first step in the first module, and every site diverges."""
    record_run(tmp_path / "a")
    record_run(tmp_path / "b", seed=1)
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found.first is not None
    assert (found.last_same, found.first.step, found.first.site.name) == (None, 0, "encoder.fc")
    assert {each.first.recorder for each in found.sites} == {"activations", "gradients"}
    assert len(found.sites) == 6
    distances = [each.furthest.distance for each in found.sites]
    assert distances == sorted(distances, reverse=True)


def test_another_dtype_is_a_difference(tmp_path: Path) -> None:
    """A run in bfloat16 diverges immediately, and the dtypes of all sites are reported."""
    record_run(tmp_path / "a")
    record_run(tmp_path / "b", dtype=torch.bfloat16)
    found = compared(tmp_path / "a", tmp_path / "b")
    kinds = [(each.what, each.one, each.other) for each in found.differences if each.recorder == "activations"]
    assert kinds == [(name, "float32", "bfloat16") for name in ("encoder.fc", "encoder.act", "head")]
    assert found.first is not None
    assert found.first.site == Site("encoder.fc", "out")


def test_gradients_part_after_activations_and_from_the_end(tmp_path: Path) -> None:
    """Among divergences at one step, gradients follow activations, and the last module comes first."""

    def doubled(net: nn.Module) -> None:
        # The output is unchanged, but its gradient is doubled.
        net.register_forward_hook(lambda module, inputs, output: 2 * output - output.detach())

    record_run(tmp_path / "a")
    record_run(tmp_path / "b", change=doubled, at=1)
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found.first is not None
    assert (found.first.step, found.first.recorder, found.first.site.name) == (1, "gradients", "head")


def write(log_dir: Path, values: dict[int, dict[str, Values]], label: str = "activations") -> None:
    writer = RecordWriter(records_path(log_dir / "recorder", label))
    writer.begin(label=label, group=label)
    for step, sites in values.items():
        writer.write({"step": step}, [site_of(name, "out", scalars) for name, scalars in sites.items()])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"rms": 1.0}, {"rms": 1.0009}, True),
        ({"rms": 1.0}, {"rms": 1.0012}, False),
        ({"rms": 1.0, "mean": 1e-9}, {"rms": 1.0, "mean": -9e-4}, True),
        ({"rms": 1.0, "mean": 1e-9}, {"rms": 1.0, "mean": -1.1e-3}, False),
        ({"rms": 1e-8, "mean": 1e-9}, {"rms": 9e-8, "mean": -7e-8}, True),
        ({"rms": 1e-8, "zero_fraction": 0.0}, {"rms": 9e-8, "zero_fraction": 0.5}, True),
        ({"rms": 1e-8}, {"rms": 2.1e-7}, False),
        ({"rms": 1.0, "zero_fraction": 0.5}, {"rms": 1.0, "zero_fraction": 0.5009}, True),
        ({"rms": 1.0, "zero_fraction": 0.5}, {"rms": 1.0, "zero_fraction": 0.502}, False),
        ({"rms": 1.0, "nan_count": 0.0}, {"rms": 1.0, "nan_count": 1.0}, False),
        ({"rms": 1.0, "count": 1e6}, {"rms": 1.0, "count": 1e6 + 1}, False),
        ({"rms": math.nan}, {"rms": math.nan}, True),
        ({"rms": math.nan}, {"rms": 0.0}, False),
        ({"rms": 1.0, "max": math.inf}, {"rms": 1.0, "max": math.inf}, True),
        ({"rms": 1.0, "max": math.inf}, {"rms": 1.0, "max": 1.0}, False),
        ({"rms": 1.0, "skewness": 1e-5}, {"rms": 1.0, "skewness": 2e-5}, False),
        ({"mean": 1.0}, {"mean": 1.0009}, True),
        ({"rms": 0.0}, {"rms": -0.0}, True),
    ],
)
def test_the_tolerance(one: Values, other: Values, same: bool, tmp_path: Path) -> None:
    """Values are relative to the rms and fractions to 1, counts must be equal, and values below atol count as 0."""
    for name, values in (("a", one), ("b", other)):
        write(tmp_path / name, {0: {"fc": values}})
    assert compared(tmp_path / "a", tmp_path / "b").same is same
    exact = compared(tmp_path / "a", tmp_path / "b", Tolerance(exact=True))
    assert exact.same is (str(one) == str(other))
    assert str(compared(tmp_path / "a", tmp_path / "b").first_bits) == str(exact.first)  # NaN differs from itself


def test_a_histogram_that_differs(tmp_path: Path) -> None:
    """With ``exact``, runs with equal statistics differ if a histogram differs."""
    for name, place in (("a", 5), ("b", 6)):
        bins = torch.zeros(2048, dtype=torch.int64)
        bins[[place, 9]] = 1
        writer = RecordWriter(records_path(tmp_path / name / "recorder", "activations"))
        writer.begin(label="activations", group="activations")
        writer.write({"step": 0}, [site_of("fc", "out", {"rms": 1.0}, bins)])
    assert compared(tmp_path / "a", tmp_path / "b").same
    found = compared(tmp_path / "a", tmp_path / "b", Tolerance(exact=True)).first
    assert found is not None
    assert (found.statistic, found.one, found.other, found.distance) == ("histogram", 2.0, 2.0, 0.5)


def test_what_only_one_run_has(tmp_path: Path) -> None:
    """Recorders, stages, steps, sites and statistics of only one run are differences; the comparison continues."""
    write(tmp_path / "a", {0: {"fc": {"rms": 1.0}, "old": {"rms": 1.0}}, 1: {"fc": {"rms": 1.0}}})
    write(tmp_path / "a", {0: {"fc": {"rms": 1.0}}}, "gradients")
    write(tmp_path / "b", {0: {"fc": {"rms": 1.0, "max": 1.0}}, 2: {"fc": {"rms": 1.0}}})
    found = compared(tmp_path / "a", tmp_path / "b")
    assert (found.first, found.same, found.steps) == (None, False, 1)
    assert [(each.kind, each.what, each.one) for each in found.differences] == [
        ("recorder", "gradients", "yes"),
        ("step", "1", "yes"),
        ("step", "2", "no"),
        ("site", "old", "yes"),
        ("statistic", "max", "no"),
    ]


def test_a_site_that_was_not_executed(tmp_path: Path) -> None:
    """A site that one run has recorded at fewer of the common steps is a difference."""
    write(tmp_path / "a", {0: {"fc": {"rms": 1.0}}, 1: {"fc": {"rms": 1.0}, "x": {"rms": 1.0}}})
    write(tmp_path / "b", {0: {"fc": {"rms": 1.0}, "x": {"rms": 1.0}}, 1: {"fc": {"rms": 1.0}, "x": {"rms": 1.0}}})
    (found,) = compared(tmp_path / "a", tmp_path / "b").differences
    assert (found.kind, found.what, found.one, found.other) == ("site", "x", "1 of 2 steps", "2 of 2 steps")


def test_no_step_in_common(tmp_path: Path) -> None:
    """Runs without a common step are different."""
    for name, step in (("a", 0), ("b", 1)):
        write_simple(tmp_path / name, {step: 1.0})
    found = compared(tmp_path / "a", tmp_path / "b")
    assert (found.same, found.steps, found.first) == (False, 0, None)


def test_a_recorder_or_stage_alone(tmp_path: Path) -> None:
    """A selected recorder or stage is compared alone, and at least one of the runs must contain it."""
    record_run(tmp_path / "a")
    record_run(tmp_path / "b", seed=1)
    one, other = (open_recording(tmp_path / name).run for name in "ab")
    found = compare(one, other, recorder="gradients", stage="train")
    assert {each.first.recorder for each in found.sites} == {"gradients"}
    with pytest.raises(ArgumentError, match="neither run has the recorder 'x'; there are 'activations', 'gradients'"):
        compare(one, other, recorder="x")
    with pytest.raises(ArgumentError, match="neither run recorded the stage 'test'"):
        compare(one, other, stage="test")
    with pytest.raises(ArgumentError, match="rtol must be a number of at least 0"):
        compare(one, other, Tolerance(rtol=-1.0))


def test_the_order_of_execution() -> None:
    """The output of a parent follows those of its children, its input precedes them; the backward order is reversed."""
    names = ["", "block", "block.a", "block.b", "head"]
    sites = [Site(name, path) for name in names for path in ("in[0]", "out")]
    order = [f"{site.name}:{site.path}" for site in in_execution_order(site for site in sites if site.path == "out")]
    assert order == ["block.a:out", "block.b:out", "block:out", "head:out", ":out"]
    inputs = in_execution_order([site for site in sites if site.name == "block"])
    assert [site.path for site in inputs] == ["in[0]", "out"]
    assert in_execution_order(sites, is_backward=True) == in_execution_order(sites)[::-1]


@pytest.mark.slow
def test_another_number_of_threads_is_the_same(tmp_path: Path) -> None:
    """In the first SGD steps, a convolutional network with batch norm gives equal runs with one thread and with two."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            train_convolutions(tmp_path / str(threads))
    finally:
        torch.set_num_threads(before)
    found = compared(tmp_path / "1", tmp_path / "2")
    assert (found.same, found.steps) == (True, 10)


def train_convolutions(log_dir: Path) -> None:
    """Train with SGD for ten steps; record activations and parameter gradients."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 14 * 14, 10))
    images, target = torch.randn(64, 3, 16, 16), torch.randint(0, 10, (64,))
    chosen = dict(net.named_children())
    recorders = {
        "activations": StatisticsRecorder(chosen),
        "gradients": StatisticsRecorder(chosen, ParameterGradientTap),
    }
    writers = {label: RecordWriter(records_path(log_dir / "recorder", label)) for label in recorders}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(10):
        optimizer.zero_grad()
        with recorders["activations"], recorders["gradients"]:
            nn.functional.cross_entropy(net(images), target).backward()
        for label, recorder in recorders.items():
            writers[label].write({"step": step}, recorder.collect())
            recorder.reset()
        optimizer.step()


def test_the_training_parts_before_an_evaluation(tmp_path: Path) -> None:
    """Among divergences at one step, training comes before evaluation, even if only its gradients diverge."""
    for name, value in (("a", 1.0), ("b", 2.0)):
        for label, stage in (("activations", "validate"), ("gradients", "train")):
            writer = RecordWriter(records_path(tmp_path / name / "recorder", label))
            writer.begin(label=label, group=label)
            writer.write({"step": 5, "stage": stage}, [site_of("fc", "out", {"rms": value})])
    first = compared(tmp_path / "a", tmp_path / "b").first
    assert first is not None
    assert (first.recorder, first.stage) == ("gradients", "train")


def write_parameters(log_dir: Path, scale: float = 1.0, *, update: float = 1.0) -> None:
    """Write two steps of a run: a parameter with the given rms, its module's output, and its update."""
    for label, sites in (
        ("activations", [site_of("fc", "out", {"rms": 1.0})]),
        (
            "parameters",
            [
                site_of("fc", "weight", {"rms": scale, "update_ratio": update}),
                site_of("fc", "weight.update", {"rms": update}),
            ],
        ),
    ):
        writer = RecordWriter(records_path(log_dir / "recorder", label))
        writer.begin(label=label, group=label)
        for step in range(2):
            writer.write({"step": step}, sites)


def test_parameters_that_differ_at_step_0_are_reported_whatever_the_tolerance(tmp_path: Path) -> None:
    """A different weight at step 0 is a difference under any tolerance, because nothing has been rounded yet."""
    write_parameters(tmp_path / "a")
    write_parameters(tmp_path / "b", 1 + 1e-6)
    write_parameters(tmp_path / "c", 1 + 1e-12)
    first = compared(tmp_path / "a", tmp_path / "b").first
    assert first is not None
    assert (first.step, first.recorder, first.site, first.statistic) == (0, "parameters", ("fc", "weight"), "rms")
    assert compared(tmp_path / "a", tmp_path / "c").same


def test_parameters_come_before_what_is_computed_from_them(tmp_path: Path) -> None:
    """Within a step, parameter values come first and optimizer updates come last."""
    write_parameters(tmp_path / "a")
    write_parameters(tmp_path / "b", 2.0, update=3.0)
    write_parameters(tmp_path / "c", update=3.0)
    found = {name: compared(tmp_path / "a", tmp_path / name) for name in "bc"}
    firsts = {name: each.first and (each.first.site.path, each.first.statistic) for name, each in found.items()}
    assert firsts == {"b": ("weight", "rms"), "c": ("weight", "update_ratio")}
    assert {each.first.site.path for each in found["b"].sites} == {"weight", "weight.update"}


@pytest.mark.parametrize("is_sample", [True, False])
def test_a_sample_of_validations_may_be_missing(is_sample: bool, tmp_path: Path) -> None:
    """A run without the default sample of validations is the same, unlike one without a recorded stage."""
    for name in ("a", "b"):
        writer = RecordWriter(records_path(tmp_path / name / "recorder", "activations"))
        writer.begin(label="activations", group="activations")
        writer.write({"step": 0}, [site_of("fc", "out", {"rms": 1.0})])
        if name == "b":
            about = {"step": 0, "stage": "validate", "is_sample": is_sample}
            writer.write(about, [site_of("fc", "out", {"rms": 1.0})])
    assert compared(tmp_path / "a", tmp_path / "b").same is is_sample
    assert compared(tmp_path / "b", tmp_path / "a").same is is_sample


def test_the_steps_are_sorted_equally_often_for_more_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorting all steps for each record takes a time that grows with the square of their number."""
    sorts = 0

    class Counted(Part):
        @property
        def steps(self) -> list[int]:
            nonlocal sorts
            sorts += 1
            return super().steps

    monkeypatch.setattr(reader, "Part", Counted)
    found = []
    for records in (10, 40):
        runs = tmp_path / f"a{records}", tmp_path / f"b{records}"
        for run in runs:
            write_simple(run, {step: step / 3 for step in range(records)})
        sorts = 0
        assert compared(*runs).same
        found.append(sorts)
    assert found[0] == found[1] > 0


def test_many_records_with_and_without_a_site(tmp_path: Path) -> None:
    """The values of many records are read at once, as far as the records have the same sites."""
    rows = {step: {"head": {"rms": step / 3}} for step in range(900)}
    write(tmp_path, {step: row if step <= 300 else {**row, "late": {"rms": -step / 7}} for step, row in rows.items()})
    series = open_recording(tmp_path).run["activations"]
    late = series.values("rms")[:, 1]
    assert series.values("rms")[:, 0].tolist() == [step / 3 for step in range(900)]
    assert late.isnan().tolist() == [step <= 300 for step in range(900)]
    assert late[301:].tolist() == [-step / 7 for step in range(301, 900)]
    assert series.seen().tolist() == [[True, step > 300] for step in range(900)]
