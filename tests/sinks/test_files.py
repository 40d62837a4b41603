"""Tests of safe file names and keys, and of the files sink, which read each file back."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from lightning_recorder import ArgumentError, Graph
from lightning_recorder.errors import RecorderWarning
from lightning_recorder.reductions import Histogram
from lightning_recorder.sinks import FilesSink
from lightning_recorder.sinks.files import copy_file, path_below, path_of_tag, safe_segment, shortened, to_png
from tests.sinks.samples import ODD_TAGS, OUTSIDE, graph, histogram, picture


@pytest.mark.parametrize("name", OUTSIDE, ids=ascii)
def test_a_name_that_leads_out(name: str, tmp_path: Path) -> None:
    """A name that is outside the folder on some operating system raises an error that quotes it."""
    with pytest.raises(ArgumentError, match="inside the folder"):
        path_below(tmp_path, name)


def test_a_name_inside(tmp_path: Path) -> None:
    """A name may contain folders."""
    assert path_below(tmp_path, "a/./b.svg") == tmp_path / "a" / "b.svg"


def test_the_files_of_tags(tmp_path: Path) -> None:
    """Each combination of tag, step and suffix has its own file below the folder."""
    paths = [
        path_of_tag(tmp_path, tag, step, suffix) for tag in ODD_TAGS for step in (3, 4) for suffix in (".md", ".json")
    ]
    assert len(set(paths)) == 4 * len(ODD_TAGS)
    for path in paths:
        assert path.resolve().is_relative_to(tmp_path.resolve())
        path.write_text("can be written")


@pytest.mark.parametrize("longest", [50, 100, 250])
def test_shortened(longest: int) -> None:
    """A short tag is unchanged; a long one keeps its beginning and its end at the maximum length."""
    short = [shortened(tag, longest) for tag in ODD_TAGS]
    assert len(set(short)) == len(ODD_TAGS)
    for tag, each in zip(ODD_TAGS, short, strict=True):
        if len(tag) <= longest:
            assert each == tag
        else:
            assert len(each) == longest
            assert (each[:15], each[-15:]) == (tag[:15], tag[-15:])


def test_a_safe_segment_counts_bytes() -> None:
    """A long segment is truncated to the maximum number of bytes, without splitting a character."""
    assert safe_segment("層" * 300).rpartition("-")[0] == "層" * 26
    assert safe_segment("x" * 80) == "x" * 80
    assert safe_segment("x" * 81).rpartition("-")[0] == "x" * 80


def test_copying_a_file_onto_itself(tmp_path: Path) -> None:
    """A file that is already at its target stays unchanged, whichever path refers to it."""
    (tmp_path / "folder").mkdir()
    path = tmp_path / "a.txt"
    path.write_text("text")
    copy_file(tmp_path / "folder" / ".." / "a.txt", path)
    assert path.read_text() == "text"


def lines(path: Path) -> list[Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_nothing_is_made_before_the_first_result(tmp_path: Path) -> None:
    """The folder is created by the first result, not by the constructor."""
    folder = tmp_path / "deep" / "inside"
    sink = FilesSink(str(folder))
    sink.flush()
    assert not folder.exists()
    sink.write_scalars(0, {"a": 1.0})
    assert files(folder) == {"scalars.jsonl"}


def test_scalars_are_lines_of_json(tmp_path: Path) -> None:
    """Each call writes one line that any JSON parser reads, with bit-exact numbers."""
    sink = FilesSink(tmp_path)
    values = {"activations/fc/mean": 0.1, "b": 1e-310, "c": -0.0, "d": np.float32(0.1).item(), "e": 3}
    sink.write_scalars(3, values)
    sink.write_scalars(5, {"a": 2.0})
    first, second = lines(tmp_path / "scalars.jsonl")
    assert (first, second) == ({"step": 3, "scalars": values}, {"step": 5, "scalars": {"a": 2.0}})
    assert math.copysign(1, first["scalars"]["c"]) == -1


def test_numbers_that_json_lacks_are_words(tmp_path: Path) -> None:
    """NaN and infinities are strings that float() accepts, so that strict parsers read the file."""
    FilesSink(tmp_path).write_scalars(3, {"a": math.nan, "b": math.inf, "c": -math.inf})
    (line,) = lines(tmp_path / "scalars.jsonl")
    assert line["scalars"] == {"a": "nan", "b": "inf", "c": "-inf"}
    assert math.isnan(float(line["scalars"]["a"]))


def test_histograms_are_lines_of_json(tmp_path: Path) -> None:
    """A histogram can be rebuilt from its line; an empty one has NaN for its statistics."""
    empty = Histogram(np.array([0.0, 0.0]), np.array([0]), math.nan, math.nan, 0.0, 0.0)
    FilesSink(tmp_path).write_histograms(3, {"h": histogram(), "none": empty})
    (line,) = lines(tmp_path / "histograms.jsonl")
    assert line["step"] == 3
    assert line["histograms"]["h"] == {
        "edges": [-2.0, 0.0, 1.0, 4.0],
        "counts": [1, 2, 1],
        "min": -1.5,
        "max": 3.0,
        "sum": 2.5,
        "sum_squares": 11.75,
        "fraction": 1.0,
    }
    assert (line["histograms"]["none"]["min"], line["histograms"]["none"]["counts"]) == ("nan", [0])


def test_images_texts_and_graphs_have_a_file_each(tmp_path: Path) -> None:
    """An image is a PNG with the same pixels, a text is Markdown, a graph is JSON, each with its step in the name."""
    sink = FilesSink(tmp_path)
    sink.write_images(3, {"graph": picture(1), "group/name": picture(2)})
    sink.write_images(4, {"graph": picture(3)})
    sink.write_text(3, {"group/note": "# ünïcode"})
    sink.write_graph(3, {"graph": graph()})
    assert files(tmp_path) == {
        "images/graph-step3.png",
        "images/graph-step4.png",
        "images/group/name-step3.png",
        "texts/group/note-step3.md",
        "graphs/graph-step3.json",
    }
    for name, seed in (("graph-step3", 1), ("group/name-step3", 2), ("graph-step4", 3)):
        with Image.open(tmp_path / "images" / f"{name}.png") as read:
            assert np.array_equal(np.asarray(read), picture(seed))
    assert (tmp_path / "texts/group/note-step3.md").read_text(encoding="utf-8") == "# ünïcode"
    data = json.loads((tmp_path / "graphs/graph-step3.json").read_text(encoding="utf-8"))
    assert Graph.from_json(data) == graph()


@given(arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(3))), st.booleans())
def test_pixels_survive_a_png_file(pixels: Any, turned: bool) -> None:
    """A PNG file has the pixels that were written, also those of a view such as a transposed image."""
    pixels = pixels.transpose(1, 0, 2) if turned else pixels
    with Image.open(io.BytesIO(to_png(pixels))) as read:
        assert read.mode == "RGB"
        assert np.array_equal(np.asarray(read), pixels)


def test_files_are_copied(tmp_path: Path) -> None:
    """A file is copied byte for byte to its target name, and the source stays."""
    source = tmp_path / "source.bin"
    source.write_bytes(bytes(range(256)))
    sink = FilesSink(tmp_path / "sink")
    sink.write_files(3, {"pictures/graph.bin": source, "./a/./b": source})
    for name in ("pictures/graph.bin", "a/b"):
        assert (tmp_path / "sink" / name).read_bytes() == source.read_bytes()


def test_a_file_that_is_in_its_place(tmp_path: Path) -> None:
    """A file that is already at its target stays unchanged."""
    source = tmp_path / "graph.svg"
    source.write_text("<svg/>")
    assert FilesSink(tmp_path).write_files(3, {"graph.svg": source})
    assert source.read_text() == "<svg/>"


@pytest.mark.parametrize(
    "name",
    ["/etc/x", "../x", "a/../../x", "..", "a/..", "", ".", "C:x", "C:/x", "..\\x", "\\\\server\\x", "a\\b", "nul\0"],
)
def test_a_name_that_leads_out_is_refused(name: str, tmp_path: Path) -> None:
    """A file name that points outside the folder on any operating system is rejected."""
    source = tmp_path / "source"
    source.write_text("text")
    folder = tmp_path / "sink"
    with pytest.raises(ArgumentError):
        FilesSink(folder).write_files(3, {name: source})
    assert files(tmp_path) == {"source"}


def test_a_source_that_is_missing(tmp_path: Path) -> None:
    """A missing source raises the error of the operating system."""
    with pytest.raises(FileNotFoundError):
        FilesSink(tmp_path).write_files(3, {"a": tmp_path / "nothing"})


TAGS = [
    "../../outside",
    "/etc/passwd",
    "..",
    ".",
    "",
    "/",
    "a//b",
    "a/../../../b",
    "..\\..\\outside",
    "C:\\windows",
    "nul\0byte",
    "new\nline",
    "quote\"s'<>|?*",
    "$(rm -rf)",
    "名前/é",
    ".hidden",
    "trailing. ",
    "-option",
    "x" * 400,
]


@pytest.mark.parametrize("tag", TAGS, ids=lambda tag: ascii(tag)[:25])
@pytest.mark.parametrize("kind", ["images", "texts", "graphs"])
def test_a_tag_is_no_path(tag: str, kind: str, tmp_path: Path) -> None:
    """Any tag leads to a file inside the folder of its kind, with the step and the suffix at the end."""
    folder = tmp_path / "sink"
    sink = FilesSink(folder)
    {
        "images": lambda: sink.write_images(3, {tag: picture()}),
        "texts": lambda: sink.write_text(3, {tag: "text"}),
        "graphs": lambda: sink.write_graph(3, {tag: graph()}),
    }[kind]()
    (name,) = files(tmp_path)
    suffix = {"images": ".png", "texts": ".md", "graphs": ".json"}[kind]
    assert name.startswith(f"sink/{kind}/")
    assert name.endswith(f"-step3{suffix}")
    assert not set(name) & set('\0\n\\:*?"<>|$ ')
    assert not any(part.startswith(".") for part in name.split("/"))


@pytest.mark.parametrize(
    ("one", "other"), [("a b", "a_b"), ("a:b", "a?b"), (".a", "a"), ("a//b", "a/_/b"), ("x" * 400, "x" * 401)]
)
def test_two_tags_are_two_files(one: str, other: str, tmp_path: Path) -> None:
    """Tags that differ only in characters that file names lack do not overwrite each other."""
    FilesSink(tmp_path).write_text(3, {one: "one", other: "other"})
    assert sorted(path.read_text() for path in tmp_path.rglob("*.md")) == ["one", "other"]


def test_hostile_tags_in_lines(tmp_path: Path) -> None:
    """In the lines of scalars, any tag is kept as it is and stays on one line."""
    FilesSink(tmp_path).write_scalars(3, dict.fromkeys(TAGS, 0.5))
    FilesSink(tmp_path).write_histograms(3, dict.fromkeys(TAGS, histogram()))
    assert list(lines(tmp_path / "scalars.jsonl")[0]["scalars"]) == TAGS
    assert list(lines(tmp_path / "histograms.jsonl")[0]["histograms"]) == TAGS


def test_a_second_run_appends(tmp_path: Path) -> None:
    """A second sink on the same folder appends."""
    for step in (3, 4):
        with FilesSink(tmp_path) as sink:
            sink.write_scalars(step, {"a": 1.0})
    assert [line["step"] for line in lines(tmp_path / "scalars.jsonl")] == [3, 4]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A folder that cannot be created costs what is written, with one warning."""
    (tmp_path / "taken").write_text("a file")
    with pytest.warns(RecorderWarning, match="taken"), FilesSink(tmp_path / "taken" / "sink") as sink:
        sink.write_scalars(3, {"a": 1.0})
