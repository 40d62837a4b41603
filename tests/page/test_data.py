"""The data of the page are those of the records."""

from __future__ import annotations

import base64
import gzip
import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it has no types
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_recorder.errors import DumpError
from lightning_recorder.graph import capture_graph
from lightning_recorder.page import page_data, page_html
from lightning_recorder.page.histograms import unpack_all
from lightning_recorder.page.html import encoded
from lightning_recorder.recordings import WATCH, RecordWriter, Run, open_recording, records_path
from lightning_recorder.records.counts import unpack_counts
from tests.recordings.runs import site_of
from tests.records.packed import pack_counts


def numbers(text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Decode an array of the data."""
    return np.frombuffer(base64.b64decode(text), "<f4")


def written(folder: Path, values: list[list[float]], names: list[str]) -> Run:
    """A run whose records hold these values, one row a step and one column a site."""
    writer = RecordWriter(records_path(folder / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    for step, row in enumerate(values):
        sites = [site_of(name, "out", {"rms": value}) for name, value in zip(names, row, strict=True)]
        writer.write({"step": step}, sites)
    return open_recording(folder).run


def test_the_data_follow_the_schema(runs: Path) -> None:
    """The data of real runs are what the schema describes, and are JSON without NaN."""
    data = page_data(open_recording(runs).runs)
    text = resources.files("lightning_recorder.page").joinpath("schema.json").read_text(encoding="utf-8")
    jsonschema.validate(data, json.loads(text))
    assert json.loads(gzip.decompress(base64.b64decode(encoded(data)))) == data


def test_tables_hold_the_values_of_the_records(runs: Path) -> None:
    """Each table of a short run has all records of all sites."""
    run = open_recording(runs / "sick").run
    (data,) = page_data({"sick": run})["runs"]
    for each in data["recorders"]:
        series = run[each["label"]]
        assert (each["steps"], each["records"], each["joined"]) == (series.steps, len(series.steps), 1)
        assert [(site["module"], site["path"]) for site in each["sites"]] == [tuple(site) for site in series.sites]
        for name, text in each["statistics"].items():
            expected = series.values(name).numpy().astype(np.float32)
            np.testing.assert_array_equal(numbers(text).reshape(expected.shape), expected)


def test_curves_are_those_of_the_watch(runs: Path) -> None:
    """Loss and gradient norm are those of every step."""
    run = open_recording(runs / "healthy").run
    (data,) = page_data({"healthy": run})["runs"]
    curves = {each["name"]: each for each in data["curves"]}
    assert [*curves] == ["loss", "gradient norm", "learning rate", "train_loss"]
    for name, site in (("loss", "loss"), ("gradient norm", "grad_norm")):
        expected = run[WATCH][site].statistic("value").numpy().astype(np.float32)
        np.testing.assert_array_equal(numbers(curves[name]["values"]), expected)
    assert WATCH not in [each["label"] for each in data["recorders"]]


def test_histograms_hold_every_finite_value(runs: Path) -> None:
    """The counts of a histogram sum to the number of finite values, in the records that are shown."""
    run = open_recording(runs / "healthy").run
    (data,) = page_data({"healthy": run})["runs"]
    (activations,) = (each for each in data["recorders"] if each["label"] == "activations")
    found = activations["histograms"]
    for site, table in zip(run["activations"].sites, found["sites"], strict=True):
        if site.path.endswith(".classes"):  # numbers of classes are no values on an axis
            assert table is None
            continue
        series = run["activations"][site.name, site.path]
        counts = numbers(table["counts"]).reshape(len(found["steps"]), table["rows"])
        assert counts.sum(1).tolist() == [series.scalars(step)["count"] for step in found["steps"]]


@pytest.mark.slow
@settings(max_examples=25)
@given(
    steps=st.tuples(*[st.integers(0, 299)] * 3),
    values=st.tuples(*[st.sampled_from([1e9, -50.0, float("nan")])] * 3),
)
def test_no_outlier_is_lost(
    tmp_path_factory: pytest.TempPathFactory, steps: tuple[int, ...], values: tuple[float, ...]
) -> None:
    """If records are joined, the values that stand out, one of each site, are in the table at their place."""
    rows = [[1.0 + 0.01 * (row % 7), 2.0, 3.0] for row in range(300)]
    for site, (step, value) in enumerate(zip(steps, values, strict=True)):
        rows[step][site] = value
    run = written(tmp_path_factory.mktemp("joined"), rows, ["a", "b", "c"])
    (data,) = page_data({"run": run}, limit=200)["runs"]
    (recorder,) = data["recorders"]
    assert (recorder["records"], recorder["steps"][0], recorder["steps"][-1]) == (300, 0, 299)
    assert recorder["joined"] > 1
    between = np.diff(recorder["steps"])
    assert between.max() == recorder["joined"]
    assert between.max() - between.min() <= 1
    table = numbers(recorder["statistics"]["rms"]).reshape(len(recorder["steps"]), 3)
    for site, (step, value) in enumerate(zip(steps, values, strict=True)):
        found = np.isnan(table[:, site]) if np.isnan(value) else table[:, site] == np.float32(value)
        place = int(np.flatnonzero(found)[0])
        before = recorder["steps"][place - 1] if place else -1
        assert before < step <= recorder["steps"][place]


@given(st.lists(st.none() | st.dictionaries(st.integers(0, 2047), st.integers(0, 2**40), max_size=40), max_size=6))
def test_histograms_are_decoded_together(given_counts: list[dict[int, int] | None]) -> None:
    """Many histograms decoded at once are those that are decoded one by one."""
    packed: list[object] = []
    for counts in given_counts:
        bins = torch.zeros(2048, dtype=torch.int64)
        for place, count in (counts or {}).items():
            bins[place] = count
        packed.append(None if counts is None else pack_counts(bins))
    index, bins_found, numbers_found = unpack_all(packed)
    for place, text in enumerate(packed):
        expected = torch.zeros(2048, dtype=torch.int64) if text is None else unpack_counts(text)
        found = np.zeros(2048, dtype=np.int64)
        found[bins_found[index == place]] = numbers_found[index == place]
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "packed",
    [
        [b"\x80"],
        [b"\x01"],
        [b"\x80", b"\x01\x02"],
        [b"\x00\x01\x00", b"\x01"],
        [b"\xff\x0f\x01\x00\x01"],
        [b"\x00" + b"\xff" * 9 + b"\x01"],
        ["!"],
        [7],
    ],
)
def test_a_damaged_histogram_is_an_error(packed: list[object]) -> None:
    """A cut or surplus number, a bin that does not exist, a count that is too large, and other types are refused."""
    with pytest.raises(DumpError, match="not a histogram"):
        unpack_all(packed)


def test_values_of_channels_are_those_of_the_records(changed: Path) -> None:
    """A statistic with a value for each channel has one row for each of its records."""
    run = open_recording(changed).run
    (data,) = page_data({"changed": run})["runs"]
    (recorder,) = (each for each in data["recorders"] if each["label"] == "activations")
    found = recorder["vectors"]
    series = run["activations"]
    assert found["steps"] == series.steps
    shown = {recorder["sites"][int(place)]["module"] for place in found["sites"]}
    assert {"encoder.conv1", "encoder.conv2"} <= shown
    for place, tables in found["sites"].items():
        site = series.sites[int(place)]
        expected = [series[site].vectors(step) for step in series.steps]
        for name, text in tables.items():
            rows = np.stack([vectors[name].numpy() for vectors in expected]).astype(np.float32)
            np.testing.assert_array_equal(numbers(text).reshape(rows.shape), rows)


def test_a_module_that_is_called_later_is_not_listed_as_never_called(tmp_path: Path) -> None:
    """The graph is that of the first step. An expert may be called in a later one, as its records show."""
    used, experts = nn.Linear(2, 2), nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))
    net = nn.ModuleDict({"used": used, "spare": nn.Linear(2, 2), "experts": experts})
    net.forward = lambda inputs: experts[0](used(inputs))
    written(tmp_path, [[1.0, 2.0], [1.0, 3.0]], ["used", "experts.2.0"])
    graph = capture_graph(net, torch.ones(1, 2))
    assert {"spare", "experts.1", "experts.2"} <= set(graph.unused.modules)
    (tmp_path / "recorder" / "graph.json").write_text(json.dumps(graph.to_json()))
    (data,) = page_data({"run": open_recording(tmp_path).run})["runs"]
    assert data["graph"]["unused"] == ["spare", "experts.1"]
    assert data["graph"]["neverCalled"] == ["spare", "experts.1"]


def test_the_page_is_small(runs: Path) -> None:
    """The page of a small run, with its program, takes less than 1.5 MB."""
    assert len(open_recording(runs / "sick").page().encode()) < 1_500_000


def test_names_are_data(tmp_path: Path) -> None:
    """A name from a model cannot end the element that holds the data, nor begin another one."""
    run = written(tmp_path, [[1.0]], ["</script><img src=x onerror=alert(1)>"])
    html = page_html(page_data({"<b>run": run}), "<b>run")
    assert "onerror" not in html
    assert "<title>&lt;b&gt;run</title>" in html
    assert "default-src 'none'" in html.replace("&#x27;", "'")
    assert "connect-src 'none'" in html.replace("&#x27;", "'")
