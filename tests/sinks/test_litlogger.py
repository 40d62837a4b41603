"""Tests of the sink for Lightning's platform, with a stub for the network."""

from __future__ import annotations

import math
from pathlib import Path

from lightning_recorder.sinks import LitLoggerSink
from tests.sinks.lit_logger import lit_logger
from tests.sinks.samples import ODD_TAGS, histogram, same_value


def test_scalars_are_series(tmp_path: Path) -> None:
    """Each scalar is in the series of its tag with its step; a repeated one is added as a second entry."""
    logger = lit_logger(tmp_path)
    sink = LitLoggerSink(logger)
    sink.write_scalars(3, {"activations/fc/mean": 0.1, "b": -2.0})
    sink.write_scalars(3, {"b": 0.5})
    sink.write_scalars(1, dict.fromkeys(ODD_TAGS, math.nan))
    assert logger.experiment["activations/fc/mean"].points == [(3, 0.1)]
    assert logger.experiment["b"].points == [(3, -2.0), (3, 0.5)]
    for tag in ODD_TAGS:
        ((step, value),) = logger.experiment[tag].points
        assert step == 1
        assert same_value(value, math.nan)


def test_files_are_logged_from_the_folder_of_the_run(tmp_path: Path) -> None:
    """A file is logged from its copy in the folder of the run, which stays even if the source changes."""
    logger = lit_logger(tmp_path / "logs")
    source = tmp_path / "source.svg"
    source.write_text("<svg/>")
    LitLoggerSink(logger).write_files(3, {"pictures/graph.svg": source, "b.svg": source})
    source.unlink()
    folder = Path(logger.log_dir, "recorder")
    assert logger.logged == {
        str(folder / "pictures" / "graph.svg"): b"<svg/>",
        str(folder / "b.svg"): b"<svg/>",
    }
    assert (folder / "b.svg").read_text() == "<svg/>"


def test_a_file_that_lies_there_already(tmp_path: Path) -> None:
    """A file that is already in the folder of the run is logged from there."""
    logger = lit_logger(tmp_path)
    path = Path(logger.log_dir, "recorder", "graph.svg")
    path.parent.mkdir(parents=True)
    path.write_text("<svg/>")
    assert LitLoggerSink(logger).write_files(3, {"graph.svg": path})
    assert logger.logged == {str(path): b"<svg/>"}


def test_what_it_has_no_place_for(tmp_path: Path) -> None:
    """Histograms are left to another sink."""
    logger = lit_logger(tmp_path)
    assert not LitLoggerSink(logger).write_histograms(3, {"h": histogram()})
    assert (dict(logger.experiment), logger.logged) == ({}, {})
