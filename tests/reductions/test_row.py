"""Tests of the layout of a row."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_recorder
from lightning_recorder.bins import BINS
from lightning_recorder.reductions import ExponentHistogram, Statistics, prepare
from lightning_recorder.reductions.row import (
    DEFAULT_STATISTICS,
    HISTOGRAM,
    LAYOUT,
    SAMPLED_NUMEL,
    SCALAR_STATISTICS,
    SLOTS,
)

needs_compiler = pytest.mark.skipif(not prepare(wait=True), reason="there is no C compiler")

SCRIPT = """
import json, math, torch
from lightning_recorder import StatisticsRecorder
from lightning_recorder.reductions import SCALAR_STATISTICS, Combined, Statistics, Values, add_tensor
from lightning_recorder.reductions.kernels import fused, host

values = Values(torch.tensor([3.0, -4.0, math.nan]))
net = torch.nn.Identity()
recorder = StatisticsRecorder({"net": net})
with recorder:
    net(values.raw), net(values.raw)
((site, seen),) = recorder.collect().items()
expected = Combined(Statistics().parts)
expected.update(values.raw)
rows = {}
for add in (fused.add_statistics, host.add_statistics_on_host):
    rows[add.__name__] = row = Statistics().initial()
    assert not add(row, values, None) or torch.allclose(row, expected.state)
found = {
    "listed": sorted({"abs_max", "l1_norm", "l2_norm"} & set(SCALAR_STATISTICS)),
    "recorded": [seen.scalars[name] for name in ("mean", "abs_max", "l1_norm", "l2_norm")],
    "bins": int(seen.bins.sum()),
    "computed": [row.any().item() for row in rows.values()],
    "without torch": add_tensor(Statistics().initial(), values.raw, 1.0, None),
}
print(json.dumps(found))
"""


def test_the_layout_by_hand() -> None:
    """A row holds moments, extrema, tallies, 2048 bins and, with a sample, the number of all values."""
    assert SLOTS == ("count", "mean", "m2", "min", "max", "numel", "zeros", "nans", "infinities")
    assert (HISTOGRAM, BINS, SAMPLED_NUMEL) == (9, 2048, 2057)
    assert (Statistics().width, Statistics(sample=5).width, ExponentHistogram().width) == (2057, 2058, 2048)


def test_the_slots_of_the_parts_are_adjacent() -> None:
    """The parts cover the slots before the histogram without a gap, each with a different name for each slot."""
    slots = [part.slots for part in LAYOUT]
    assert [each.start for each in slots] == [0, *(each.stop for each in slots[:-1])]
    assert slots[-1].stop == HISTOGRAM
    assert [each.stop - each.start for each in slots] == [part.reduction.width for part in LAYOUT]
    assert len(set(SLOTS)) == len(SLOTS)


def test_the_statistics_by_hand() -> None:
    """All scalars but the sum and the variance are recorded, and all but the counts are shown by default."""
    assert SCALAR_STATISTICS == ("count", "mean", "std", "rms", "min", "max", "zero_fraction", "nan_count", "inf_count")
    assert DEFAULT_STATISTICS == ("mean", "std", "rms", "min", "max", "zero_fraction")


@needs_compiler
@pytest.mark.slow
def test_a_statistic_is_added_in_one_line(tmp_path: Path) -> None:
    """With an additional part in row.py its statistics are recorded, and no kernel leaves its slots empty."""
    shutil.copytree(Path(lightning_recorder.__file__).parent, tmp_path / "lightning_recorder")
    file = tmp_path / "lightning_recorder" / "reductions" / "row.py"
    begin, parts, rest = file.read_text().partition("PARTS: dict[type[ScalarReduction], tuple[str, ...]] = {\n")
    further = '    Norms: ("abs_max", "abs_sum", "square_sum"),\n}\n'
    begin += "from lightning_recorder.reductions.scalars import Norms\n"
    file.write_text(begin + parts + rest.replace("}\n", further, 1))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "listed": ["abs_max", "l1_norm", "l2_norm"],
        "recorded": [-0.5, 4.0, 14.0, math.sqrt(50)],
        "bins": 6,
        "computed": [True, True],
        "without torch": False,
    }
