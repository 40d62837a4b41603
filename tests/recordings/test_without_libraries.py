"""Test of reading with only torch, NumPy and safetensors installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from lightning_recorder import capture_graph
from lightning_recorder.dumps import write_dump
from lightning_recorder.functions import SCORES
from lightning_recorder.names import Site
from lightning_recorder.recordings import SiteStatistics
from lightning_recorder.records.parts import HEAD_STATISTICS
from tests.recordings.runs import make_net, record_run, write_simple

SCRIPT = """
import json, sys

BLOCKED = {"pandas", "pyarrow", "lightning", "pytorch_lightning", "tensorboard", "graphviz", "pygraphviz",
           "PIL"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
from lightning_recorder.recordings import Tolerance, compare, open_recording
from lightning_recorder.commands import main

recording = open_recording(sys.argv[1])
series = recording["activations"]
found = {
    "steps": series.steps,
    "rms": series.values("rms").tolist(),
    "bins": series["head"].bins(1).sum().item(),
    "dump": [dump.load("fc/mean").item() for dump in recording.dumps],
    "same": compare(recording.run, recording.run, Tolerance(exact=True)).same,
    "receipt": recording.receipt,
    "graph": recording.graph.to_json(),
    "status": [main(["ls", sys.argv[1]]), main(["diff", sys.argv[1], sys.argv[1]])],
    "exported": [main(["export", sys.argv[1], sys.argv[1] + f"/x.{suffix}"]) for suffix in ("csv", "pt", "parquet")],
}
try:
    series.frame()
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
found["loaded"] = sorted(BLOCKED & set(sys.modules))
print("result", json.dumps(found))
"""


def test_without_libraries(tmp_path: Path) -> None:
    """Reading, comparing and exporting need no pandas, Lightning, TensorBoard or Graphviz."""
    expected = record_run(tmp_path, steps=range(2))["activations"]
    write_dump(tmp_path / "checkpoints" / "a.safetensors", {"fc/mean": torch.tensor(0.25)}, {"fc": 1}, step=1)
    graph = capture_graph(make_net(), torch.ones(1, 6)).to_json()
    (tmp_path / "recorder" / "graph.json").write_text(json.dumps(graph))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.partition("result ")[2])
    assert found["steps"] == [0, 1]
    assert found["rms"] == [[seen.scalars["rms"] for seen in each.values()] for each in expected.values()]
    assert (found["bins"], found["dump"], found["receipt"]) == (48, [0.25], None)
    assert (found["same"], found["status"], found["exported"]) == (True, [0, 0], [0, 0, 2])
    assert found["error"] == "ArgumentError: a frame needs pandas: pip install pandas"
    assert found["loaded"] == []
    assert found["graph"] == json.loads(json.dumps(graph))
    assert "a Parquet file needs pyarrow: pip install pyarrow" in done.stderr


WITHOUT_TORCH = """
import sys
from lightning_recorder.commands import main

status = [main(each.split("|")) for each in sys.argv[1:]]
print("result", status, "torch" in sys.modules)
"""


def test_without_torch(tmp_path: Path) -> None:
    """Listing, showing, examining and comparing runs does not import torch, which takes more memory than long runs."""
    graph = json.dumps(capture_graph(make_net(), torch.ones(1, 6)).to_json())
    runs = [tmp_path / "one", tmp_path / "other"]
    for seed, path in enumerate(runs):
        record_run(path, steps=range(2), seed=seed)
        (path / "recorder" / "graph.json").write_text(graph)
    heads = {name: torch.ones(2, dtype=torch.float64) for name in (*HEAD_STATISTICS, "nan_count", "inf_count")}
    writer = write_simple(tmp_path / "scores", {})
    writer.write({"step": 0}, [(Site("attention", SCORES), SiteStatistics({"count": 8.0}, tensors=heads))])
    one, other, scores = map(str, (*runs, tmp_path / "scores"))
    calls = (("ls", one), ("show", one), ("doctor", one), ("show", scores), ("doctor", scores), ("diff", one, other))
    commands = ["|".join(each) for each in calls]
    exact = f"diff|{one}|{other}|--exact|--json"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *commands, exact], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "result [0, 0, 0, 0, 0, 1, 1] False"
