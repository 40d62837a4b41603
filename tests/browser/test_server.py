"""A real TensorBoard server finds what the callbacks wrote."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from lightning_recorder.graph import Graph, to_graph_def
from tests.browser.server import get, get_json
from tests.callbacks.models import LEAVES
from tests.sinks.events import parse_graph_def

STEPS = [0, 1, 3, 5, 7, 9, 11, 13, 15, 17]


def test_images_holds_the_picture_of_the_graph(address: str, recorded_run: Path) -> None:
    """The image that the server gives for the tag ``graph`` is the PNG of the recorder folder."""
    tags = get_json(address, "images/tags")
    assert list(tags["version_0/recorder"]) == ["z_recorder/graph"]
    (entry,) = get_json(address, "images/images", run="version_0/recorder", tag="z_recorder/graph", sample=0)
    assert entry["step"] == 0
    served = Image.open(io.BytesIO(get(address, f"images/individualImage?{entry['query']}&")))
    with Image.open(recorded_run / "version_0" / "recorder" / "graph.png") as written:
        assert served.size == written.size
        assert served.convert("RGB").tobytes() == written.convert("RGB").tobytes()


def test_graphs_holds_the_graph(address: str, recorded_run: Path) -> None:
    """The graph that the server gives for the run has the nodes of the recorder folder's, and there is no profile."""
    assert get_json(address, "graphs/info") == {
        "version_0/recorder": {"run": "version_0/recorder", "tags": {}, "run_graph": True}
    }
    served = parse_graph_def(get(address, "graphs/graph", run="version_0/recorder").decode())
    recorded = json.loads((recorded_run / "version_0" / "recorder" / "graph.json").read_text(encoding="utf-8"))
    assert served == to_graph_def(Graph.from_json(recorded))
    assert {"batch_0", "encoder/conv1/conv2d", "cross_entropy", "backward"} <= {node.name for node in served.node}


@pytest.mark.parametrize("group", ["activations", "gradients"])
def test_scalars_are_grouped_by_kind_and_layer(group: str, address: str) -> None:
    """Every leaf has one curve below the kind, and a series has one point for each recorded step."""
    below = f"z_recorder/{group}/"
    tags = [tag for tag in get_json(address, "scalars/tags")["version_0/recorder"] if tag.startswith(below)]
    assert {f"{below}{name}/rms" for name in LEAVES} <= set(tags)
    assert {tag.rpartition("/")[2] for tag in tags} == {"rms"}
    series = get_json(address, "scalars/scalars", run="version_0/recorder", tag=f"{below}head/rms")
    assert [step for _, step, _ in series] == STEPS
    assert all(value > 0 for _, _, value in series)


@pytest.mark.parametrize("group", ["activations", "gradients"])
def test_histograms_hold_every_value(group: str, address: str) -> None:
    """A histogram's buckets add up to the number of values, 8 rows of 10 logits in each recorded step."""
    below = f"z_recorder/{group}/"
    tags = [tag for tag in get_json(address, "histograms/tags")["version_0/recorder"] if tag.startswith(below)]
    assert {f"{below}{name}/histogram" for name in LEAVES} <= set(tags)
    series = get_json(address, "histograms/histograms", run="version_0/recorder", tag=f"{below}head/histogram")
    assert [step for _, step, _ in series] == STEPS
    for _, _, buckets in series:
        assert sum(count for _, _, count in buckets) == 80
