"""Tests of the layout of TensorBoard's Custom Scalars page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.util import tensor_util
from torch.utils.tensorboard import SummaryWriter

from lightning_recorder.sinks import TensorBoardSink
from tests.sinks.events import read_events


def layouts(folder: Path) -> list[dict[str, dict[str, list[str]]]]:
    """Return the layouts of a run in writing order: group to title to patterns."""
    events = read_events(folder)
    if "custom_scalars__config__" not in events.Tags()["tensors"]:
        return []
    found = []
    for event in events.Tensors("custom_scalars__config__"):
        layout = layout_pb2.Layout.FromString(tensor_util.make_ndarray(event.tensor_proto).item())
        found.append(
            {each.title: {chart.title: list(chart.multiline.tag) for chart in each.chart} for each in layout.category}
        )
    return found


TAGS = [
    "activations/encoder.conv1/rms",
    "activations/head/rms",
    "activations/lstm/out[1][0]/mean",
    "activations_validate/head/rms/dataloader_idx_1",
    "gradients/head/rms",
    "gradients/overflow_steps",
    "recorder/gradients/every_n_train_steps",
    "parameters/head/weight/rms",
    "parameters/head/weight.grad/rms",
    "parameters/attn/out_proj.weight.exp_avg/rms",
]


def test_one_chart_for_each_statistic_of_a_group(tmp_path: Path) -> None:
    """Each chart matches the tags of all modules for one statistic, and no others."""
    with TensorBoardSink(tmp_path) as sink:
        sink.write_scalars(0, dict.fromkeys(TAGS, 1.0))
    (layout,) = layouts(tmp_path)
    lines = {
        (group, title): [tag for tag in TAGS if re.match(pattern, tag)]
        for group, charts in layout.items()
        for title, (pattern,) in charts.items()
    }
    assert lines == {
        ("activations", "rms"): TAGS[:2],
        ("activations", "mean"): TAGS[2:3],
        ("activations_validate", "rms"): TAGS[3:4],
        ("gradients", "rms"): TAGS[4:5],
        ("parameters", "rms"): TAGS[7:8],
        ("parameters", "grad rms"): TAGS[8:9],
        ("parameters", "exp_avg rms"): TAGS[9:10],
    }


def test_several_sinks_of_one_writer_have_one_layout(tmp_path: Path) -> None:
    """The latest layout covers the tags of all sinks of a writer, and is written only when it changes."""
    writer = SummaryWriter(str(tmp_path))
    sinks = [TensorBoardSink(writer), TensorBoardSink(writer)]
    for step in range(3):
        sinks[0].write_scalars(step, {"activations/head/rms": 1.0})
        sinks[1].write_scalars(step, {"gradients/head/rms": 1.0})
    writer.close()
    assert [list(layout) for layout in layouts(tmp_path)] == [["activations"], ["activations", "gradients"]]


@pytest.mark.parametrize("tags", [{"loss": 1.0}, {}, {"gradients/overflow_steps": 2.0}])
def test_without_modules_there_is_no_layout(tags: dict[str, Any], tmp_path: Path) -> None:
    """Scalars without a module get no chart."""
    with TensorBoardSink(tmp_path) as sink:
        sink.write_scalars(0, tags)
    assert layouts(tmp_path) == []


def test_the_layout_of_somebody_else_stays(tmp_path: Path) -> None:
    """A layout that the user has written stays the only one."""
    writer = SummaryWriter(str(tmp_path))
    writer.add_custom_scalars({"mine": {"losses": ["Multiline", ["loss/.*"]]}})
    writer.flush()
    TensorBoardSink(writer).write_scalars(0, {"activations/head/rms": 1.0})
    writer.close()
    assert layouts(tmp_path) == [{"mine": {"losses": ["loss/.*"]}}]
