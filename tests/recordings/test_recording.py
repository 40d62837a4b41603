"""Tests of reading the recording of a training loop."""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path

import pytest
import torch

from lightning_recorder import ArgumentError, DumpError, capture_graph
from lightning_recorder.recordings import (
    Recording,
    RecordWriter,
    Series,
    open_recording,
    records_path,
)
from lightning_recorder.taps import Site
from tests.recordings.runs import Expected, make_net, record_run, site_of, write_simple

SITES = [Site("encoder.fc", "out"), Site("encoder.act", "out"), Site("head", "out")]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    """A run in ``lightning_logs/version_0``, and the statistics written to it."""
    log_dir = tmp_path_factory.mktemp("root") / "lightning_logs" / "version_0"
    return log_dir, record_run(log_dir)


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def test_every_number_comes_back(recorded: tuple[Path, Expected]) -> None:
    """All statistics and histograms of all sites and steps are restored to the bit."""
    log_dir, expected = recorded
    recording = open_recording(log_dir)
    assert recording.recorders == ["activations", "gradients"]
    for label, steps in expected.items():
        series = recording[label]
        assert series.steps == list(steps) == [0, 1, 2, 3]
        assert series.sites == SITES
        for index, (step, found) in enumerate(steps.items()):
            for place, (site, seen) in enumerate(found.items()):
                one = series[site.name]
                assert {name: bits(value) for name, value in one.scalars(step).items()} == {
                    name: bits(value) for name, value in seen.scalars.items()
                }
                assert torch.equal(one.bins(step), seen.bins)
                assert bits(series.values("rms")[index, place].item()) == bits(seen.scalars["rms"])
                assert bits(one.statistic("rms")[index].item()) == bits(seen.scalars["rms"])


def test_a_site_is_looked_up(recorded: tuple[Path, Expected]) -> None:
    """A site is found without a comparison with the others, as there may be tens of thousands."""
    compared: list[object] = []

    class Key(Site):
        __slots__ = ()
        __hash__ = Site.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return super().__eq__(other)

    series = open_recording(recorded[0])["activations"]
    assert series[Key(*SITES[-1])].name == "head"
    assert Key("head", "nothing") not in series
    assert (["head"], "out") not in series
    assert len(compared) <= 1


def test_what_a_series_says(recorded: tuple[Path, Expected]) -> None:
    """A series has the stages, epochs, statistics and sessions that were written, and no skipped records."""
    series = open_recording(recorded[0])["activations"]
    assert (series.stage, series.loader, series.stages, series.loaders) == ("train", None, ["train"], [None])
    assert series.epochs == [0, 0, 1, 1]
    assert series.statistics == list(recorded[1]["activations"][0][SITES[0]].scalars)
    assert [series.session(step) for step in series.steps] == [1, 1, 1, 1]
    assert (series.skipped, series.replaced, series.overflow_steps) == (0, 0, [])
    assert series.sessions[0].about["versions"]["torch"] == torch.__version__
    assert (series["head"].dtype, series["head"].shape) == ("float32", (16, 3))
    assert repr(series) == "<activations, train: 4 records of 3 sites, steps 0 to 3>"


def test_a_histogram(recorded: tuple[Path, Expected]) -> None:
    """The histogram equals that of the recorded statistics."""
    log_dir, expected = recorded
    found = open_recording(log_dir)["activations"]["head"].histogram(2)
    seen = expected["activations"][2][SITES[2]].histogram
    assert (found.edges.tolist(), found.counts.tolist()) == (seen.edges.tolist(), seen.counts.tolist())
    assert (found.min, found.max, found.sum, found.sum_squares) == (seen.min, seen.max, seen.sum, seen.sum_squares)


@pytest.mark.parametrize("place", [".", "recorder", "..", "../.."])
def test_where_a_recording_is_opened(place: str, recorded: tuple[Path, Expected]) -> None:
    """The folder of a run, its recording folder and a parent folder lead to the same run."""
    name = "lightning_logs/version_0" if place == "../.." else "version_0"
    recording = open_recording(str(recorded[0] / place))
    assert list(recording) == [name]
    assert recording[name].log_dir == recorded[0].resolve()
    assert recording["activations"].steps == recording[name]["activations"].steps == [0, 1, 2, 3]


def test_several_runs(tmp_path: Path) -> None:
    """Runs are sorted by number, and accessing a recorder without selecting a run raises an error that lists them."""
    for number in (10, 9, 0):
        write_simple(tmp_path / f"version_{number}", {0: float(number)})
    (tmp_path / "version_5").mkdir()
    recording = open_recording(tmp_path)
    assert list(recording.runs) == ["version_0", "version_9", "version_10"]
    assert recording["version_9"]["activations"].values("rms").tolist() == [[9.0]]
    with pytest.raises(ArgumentError, match=r"there are 3 runs; choose one of 'version_0', 'version_9', 'version_10'"):
        recording["activations"]


def test_another_machine(recorded: tuple[Path, Expected], tmp_path: Path) -> None:
    """A copied folder has the same contents."""
    shutil.copytree(recorded[0], tmp_path / "copied")
    found = open_recording(tmp_path / "copied")["gradients"].values("mean")
    assert torch.equal(found, open_recording(recorded[0])["gradients"].values("mean"))


@pytest.mark.parametrize("made", ["", "recorder", "recorder/records", "recorder/scalars.jsonl/"])
def test_nothing_was_recorded(made: str, tmp_path: Path) -> None:
    """If there is no recording, the error lists the files that were searched for."""
    (tmp_path / made).mkdir(parents=True, exist_ok=True)
    with pytest.raises(DumpError, match=r"records/\*.jsonl.*graph.json.*receipt.json"):
        open_recording(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    """A path that is not a folder is named in the error."""
    with pytest.raises(DumpError, match=r"there is no 'nowhere' in '"):
        open_recording(tmp_path / "nowhere")


def test_what_is_missing_is_nan(tmp_path: Path) -> None:
    """Missing sites and missing statistics are NaN in the table; all other values are present."""
    writer = RecordWriter(records_path(tmp_path / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    writer.write({"step": 0}, [site_of("a", "out", {"rms": 1.0}), site_of("b", "out", {"rms": 2.0, "more": 3.0})])
    writer.write({"step": 1}, [site_of("c", "out", {"rms": math.nan}), site_of("a", "out", {"rms": 4.0})])
    series = open_recording(tmp_path)["activations"]
    assert [site.name for site in series.sites] == ["a", "b", "c"]
    assert series.statistics == ["rms", "more"]
    nan = math.nan
    torch.testing.assert_close(
        series.values("rms"), torch.tensor([[1, 2, nan], [4, nan, nan]], dtype=torch.float64), equal_nan=True
    )
    torch.testing.assert_close(
        series.values("more"), torch.tensor([[nan, 3, nan], [nan, nan, nan]], dtype=torch.float64), equal_nan=True
    )
    assert series.seen().tolist() == [[True, True, False], [True, False, True]]
    assert (series["b"].steps, series["c"].steps) == ([0], [1])
    assert series["b"].statistic("more").tolist() == [3.0]
    assert series["b"].statistics == ["rms", "more"]


def test_stages_and_loaders(tmp_path: Path) -> None:
    """Training comes first; other stages and dataloaders are selected by name."""
    writer = RecordWriter(records_path(tmp_path / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    for stage, loader, value in (("validate", 1, 1.0), ("validate", 0, 2.0), ("train", None, 3.0)):
        writer.write({"step": 5, "stage": stage, "loader": loader}, [site_of("a", "out", {"rms": value})])
    series = open_recording(tmp_path)["activations"]
    assert series.stages == ["train", "validate"]
    assert series.values("rms").tolist() == [[3.0]]
    assert series.of("validate").loaders == [0, 1]
    assert [series.of("validate", loader).values("rms").item() for loader in (0, 1)] == [2.0, 1.0]
    assert series.of("validate").values("rms").item() == 2.0
    with pytest.raises(ArgumentError, match="'test'; the stages are 'train', 'validate'"):
        series.of("test")


def test_overflows_are_apart(tmp_path: Path) -> None:
    """A record of an overflowed step is not part of the steps and replaces no record."""
    writer = RecordWriter(records_path(tmp_path / "recorder", "gradients"))
    writer.begin(label="gradients", group="gradients")
    for overflowed, value in ((False, 1.0), (True, 2.0)):
        writer.write({"step": 5, "overflowed": overflowed}, [site_of("a", "out", {"rms": value})])
    series = open_recording(tmp_path)["gradients"]
    assert (series.steps, series.values("rms").item(), series.overflow_steps) == ([5], 1.0, [5])


def test_several_paths_of_a_module(tmp_path: Path) -> None:
    """A module name selects the whole output; a module without one requires a path."""
    writer = RecordWriter(records_path(tmp_path / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    paths = [("lstm", "out[0]"), ("lstm", "out[1]"), ("fc", "out"), ("fc", "in[0]")]
    writer.write({"step": 0}, [site_of(*site, {"rms": float(place)}) for place, site in enumerate(paths)])
    series = open_recording(tmp_path)["activations"]
    assert series["fc"].path == "out"
    assert series["lstm", "out[1]"].statistic("rms").tolist() == [1.0]
    assert series[Site("fc", "in[0]")].site == Site("fc", "in[0]")
    assert ("lstm" in series, ("lstm", "out[2]") in series, "lst" in series) == (True, False, False)
    with pytest.raises(ArgumentError, match=r"give one of the paths 'out\[0\]', 'out\[1\]'"):
        series["lstm"]


def test_what_is_not_there_is_named(recorded: tuple[Path, Expected]) -> None:
    """An unknown recorder, site, statistic or step raises an error that lists the available ones."""
    recording = open_recording(recorded[0])
    series: Series = recording["activations"]
    with pytest.raises(ArgumentError, match="recorder 'activation'; the only run is 'version_0' with 'activations'"):
        recording["activation"]
    with pytest.raises(ArgumentError, match=r"closest names? (is|are) 'encoder\.fc'"):
        series["encoder.f"]
    with pytest.raises(ArgumentError, match="no statistic 'norm'; there are 'count'"):
        series.values("norm")
    with pytest.raises(ArgumentError, match="step 7 was not recorded; the nearest steps are 1, 2, 3"):
        series.about(7)
    with pytest.raises(ArgumentError, match="'head' was not recorded at step -1; the nearest steps are 0, 1, 2"):
        series["head"].bins(-1)


def test_a_record_without_histograms(tmp_path: Path) -> None:
    """Requesting a histogram that was not recorded raises an error that says so."""
    write_simple(tmp_path, {0: 1.0})
    site = open_recording(tmp_path)["activations"]["fc"]
    with pytest.raises(ArgumentError, match="without a histogram"):
        site.bins(0)
    with pytest.raises(ArgumentError, match="needs 'count', 'mean', 'min', 'max'"):
        site.histogram(0)


def test_labels(tmp_path: Path) -> None:
    """Recorders are sorted by group and named by their header, whatever the file name."""
    for label in ("parameters", "gradients-slow", "gradients", "activations-2", "activations", "Odd/label"):
        write_simple(tmp_path, {0: 1.0}, label)
    assert open_recording(tmp_path).recorders == [
        "activations",
        "activations-2",
        "gradients",
        "gradients-slow",
        "parameters",
        "Odd/label",
    ]


def test_graph_and_receipt(tmp_path: Path) -> None:
    """The graph and the receipt are read from the recording folder, and are None if they are missing."""
    write_simple(tmp_path, {0: 1.0})
    recording = open_recording(tmp_path)
    assert (recording.graph, recording.receipt) == (None, None)
    graph = capture_graph(make_net(), torch.ones(1, 6))
    (tmp_path / "recorder" / "graph.json").write_text(json.dumps(graph.to_json()))
    (tmp_path / "recorder" / "receipt.json").write_text('{"activations": {"step": 0}}')
    assert recording.graph == graph
    assert recording.receipt == {"activations": {"step": 0}}


def test_a_graph_alone_is_a_recording(tmp_path: Path) -> None:
    """A run that contains only a graph can be opened and has no recorders."""
    (tmp_path / "recorder").mkdir()
    (tmp_path / "recorder" / "graph.json").write_text(json.dumps(capture_graph(make_net(), torch.ones(1, 6)).to_json()))
    recording: Recording = open_recording(tmp_path)
    assert recording.recorders == []
    assert recording.graph is not None


def test_two_files_of_one_label(tmp_path: Path) -> None:
    """If two files claim the same recorder, the second one is listed under its file name."""
    writer = write_simple(tmp_path, {0: 1.0})
    shutil.copyfile(writer.path, writer.path.with_name("other.jsonl"))
    assert open_recording(tmp_path).recorders == ["activations", "other"]


def test_what_lies_in_a_run_is_no_run(tmp_path: Path) -> None:
    """A recording folder inside a run, such as a copy next to checkpoints, is not listed."""
    write_simple(tmp_path / "version_0", {0: 1.0})
    write_simple(tmp_path / "version_0" / "checkpoints", {0: 1.0})
    assert list(open_recording(tmp_path)) == ["version_0"]
