"""Tests of the event encoder, compared with the events of torch's ``SummaryWriter``."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from torch.utils.tensorboard import SummaryWriter

from lightning_recorder.reductions import SUMMED, Histogram, SparseCounts, Statistics, TaggedHistograms, sums_of
from lightning_recorder.sinks import TensorBoardSink
from lightning_recorder.sinks.tensorboard import EventFile
from tests.disks import files_up_to

SCALARS = [0.1, -2.0, 0.0, -0.0, 1e-45, 1e-50, 3.4e38, 1e39, -1e300, math.inf, -math.inf, math.nan, 2**24 + 1.0]
TAGS = ["a", "activations/encoder.layers.10.fc/rms", "größe", "x" * 200, "y" * 20_000]


def events(folder: Path) -> list[Event]:
    """Return the events of a folder in the order of its files, as TensorBoard parses them."""
    paths = sorted(folder.glob("events.out.*"))
    return [event for path in paths for event in LegacyEventFileLoader(str(path)).Load() if event.HasField("summary")]


def values_of(folder: Path) -> list[tuple[int, str, bytes]]:
    """Return the step, the tag and the serialized value of each value."""
    found = []
    for event in events(folder):
        for value in event.summary.value:
            if value.tag == "custom_scalars__config__":
                continue
            value.ClearField("metadata")  # torch adds the plugin, which TensorBoard adds when it reads
            found.append((event.step, value.tag, value.SerializeToString(deterministic=True)))
    return found


@pytest.mark.parametrize("step", [0, 1, 127, 128, 2**40])
def test_scalars_equal_those_of_a_summary_writer(step: int, tmp_path: Path) -> None:
    """Scalars are read with the same step, tag and bits."""
    scalars = {f"{tag}/{number}": value for tag in TAGS for number, value in enumerate(SCALARS)}
    with SummaryWriter(str(tmp_path / "theirs")) as writer, TensorBoardSink(tmp_path / "ours") as sink:
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, step)
        sink.write_scalars(step, scalars)
    assert values_of(tmp_path / "ours") == values_of(tmp_path / "theirs")


def states(*tensors: torch.Tensor) -> tuple[torch.Tensor, list[dict[str, float]]]:
    """Return the bins and the statistics of tensors."""
    summaries = []
    for tensor in tensors:
        statistics = Statistics()
        statistics.update(tensor)
        summaries.append(statistics.compute())
    scalars = [{name: float(value) for name, value in each.items() if value.dim() == 0} for each in summaries]
    return torch.stack([each["histogram"] for each in summaries]), scalars


def tagged(tags: list[str], bins: torch.Tensor, scalars: list[dict[str, float]]) -> TaggedHistograms:
    values = np.array([[each.get(name, np.nan) for name in SUMMED] for each in scalars])
    return TaggedHistograms(tags, SparseCounts(bins.numpy()), sums_of(values))


@pytest.mark.parametrize("as_mapping", [dict, lambda histograms: histograms], ids=["one by one", "all at once"])
def test_histograms_equal_those_of_a_summary_writer(as_mapping: Callable[[Any], Any], tmp_path: Path) -> None:
    """Histograms are read with the same step, tag and bits, and those without a finite value are left out."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(5000, generator=generator) * scale for scale in (1e-30, 1.0, 1e4)]
    tensors += [torch.zeros(3), torch.full((2,), math.nan), torch.randn(500, generator=generator).relu()]
    bins, scalars = states(*tensors)
    histograms = tagged([f"{tag}/{len(tag)}" for tag in [*TAGS, "last"]], bins, scalars)
    with SummaryWriter(str(tmp_path / "theirs")) as writer, TensorBoardSink(tmp_path / "ours") as sink:
        for tag, histogram in histograms.items():
            drawn: Histogram = histogram.coarsened(64)
            if drawn.count:
                writer.add_histogram_raw(
                    tag,
                    min=drawn.min,
                    max=drawn.max,
                    num=drawn.count,
                    sum=drawn.sum,
                    sum_squares=drawn.sum_squares,
                    bucket_limits=drawn.edges[1:].tolist(),
                    bucket_counts=drawn.counts.tolist(),
                    global_step=7,
                )
        sink.write_histograms(7, as_mapping(histograms))
    assert values_of(tmp_path / "ours") == values_of(tmp_path / "theirs")
    assert len(values_of(tmp_path / "ours")) == 5


def test_joined_events_are_one_write(tmp_path: Path) -> None:
    """The events of a joined block appear together at its end, in order; those of other threads are not held back."""
    sink, other = TensorBoardSink(tmp_path), TensorBoardSink(tmp_path)
    with sink.joined():
        for step in range(3):
            sink.write_scalars(step, {"a": float(step)})
        assert not list(tmp_path.iterdir())
        assert sink.written_bytes > 0
    assert [event.step for event in events(tmp_path) if event.summary.value[0].tag == "a"] == [0, 1, 2]
    other.write_scalars(3, {"b": 1.0})
    assert events(tmp_path)[-1].step == 3


def test_a_summary_writer_gets_the_same_events(tmp_path: Path) -> None:
    """Through torch's writer, scalars and histograms have the same values as in a file of the sink's own."""
    bins, scalars = states(torch.arange(5.0))
    with SummaryWriter(str(tmp_path / "theirs")) as writer, TensorBoardSink(tmp_path / "ours") as own:
        for sink in (TensorBoardSink(writer), own):
            sink.write_scalars(4, {"a": 0.5})
            sink.write_histograms(4, tagged(["h"], bins, scalars))
    assert values_of(tmp_path / "ours") == values_of(tmp_path / "theirs")


@pytest.mark.filterwarnings("ignore::lightning_recorder.RecorderWarning")
def test_an_event_that_is_skipped_has_no_size(tmp_path: Path) -> None:
    """The sizes of the events add up to that of the file, also when the disk is full in between."""
    file = EventFile(tmp_path)
    file.add(b"one")
    begun = file.path.stat().st_size
    with files_up_to(begun + 20):
        sizes = [file.add(b"x" * 100), file.add(b"two")]
    sizes.append(file.add(b"three"))
    assert sizes[0] == 0 < sizes[1] < sizes[2]
    assert file.path.stat().st_size == begun + sum(sizes)
