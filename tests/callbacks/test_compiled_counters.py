"""The graphs that recording inside compiled code needs, and the caches of torch.compile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_recorder import MemorySink
from tests import forks
from tests.callbacks.models import hooks_left
from tests.callbacks.test_compiled import _fresh
from tests.callbacks.test_compiled_inside import NETS, compilations, recorders, stacked, train
from tests.callbacks.test_noninterference import assert_same

# Torch reads .grad of tensors that are not leaves while it traces, and ignores the warning.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

fresh = _fresh  # a fixture for every test


def steps_of(sink: MemorySink) -> set[tuple[int, ...]]:
    """Return the different series of steps that the activations, gradients and parameters were recorded at."""
    return {tuple(steps) for tag, steps in sink.scalars.items() if tag.endswith("/rms")}


_INTERVALS: dict[int, tuple[int, set[tuple[int, ...]]]] = {1: (1, {tuple(range(12))}), 10: (2, {(0, 9)}), 0: (1, set())}
"""The graphs and the recorded steps for each interval: every step, one in ten, and none."""


def check_intervals(how: str, backend: str, folder: Path, *intervals: int) -> None:
    """Check counters, bits and recorded steps for some intervals."""
    model = stacked(how, backend)
    bare = train(model, model, folder / "bare", [])
    assert compilations() == (1, 0, 0)
    for every in intervals:
        graphs, steps = _INTERVALS[every]
        model, sink = stacked(how, backend), MemorySink()
        callbacks = recorders(sink, every_n_train_steps=every or 1)
        if not every:
            for each in callbacks:
                each.disable()
        recorded = train(model, model, folder / str(every), callbacks)
        assert compilations() == (graphs, 0, 0), every
        assert_same(recorded, bare)
        assert steps_of(sink) == steps
        assert hooks_left(model) == []


@pytest.mark.parametrize("how", list(NETS))
def test_each_interval(how: str, tmp_path: Path) -> None:
    """Recorded steps need one graph, unrecorded steps another one, and neither is compiled if it does not occur.

    The interval with both is tried in each way to compile, and the other ones where the way makes no difference.
    """
    check_intervals(how, "eager", tmp_path, *(_INTERVALS if how == "regional" else [10]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own import
def test_each_interval_with_inductor(tmp_path: Path) -> None:
    """Each interval is recorded with torch's own backend, too."""
    check_intervals("checkpoint", "inductor", tmp_path, *_INTERVALS)


_PROGRAM = """
import json
import sys
from pathlib import Path

from torch._dynamo.utils import counters

from lightning_recorder import MemorySink
from tests.callbacks.test_compiled import _fresh
from tests.callbacks.test_compiled_inside import recorders, stacked, train

model = stacked("regional", "inductor")
losses, *_ = train(model, model, Path(sys.argv[1]), recorders(MemorySink(), every_n_train_steps=4))
keys = {"hits": "fxgraph_cache_hit", "misses": "fxgraph_cache_miss", "bypasses": "fxgraph_cache_bypass"}
keys = {name: counters["inductor"][key] for name, key in keys.items()}
print(json.dumps({**keys, "aot": dict(counters["aot_autograd"]), "losses": [each.item() for each in losses]}))
"""


def in_new_process(folder: Path) -> dict[str, Any]:
    """Train in a new process with the caches of torch.compile in a folder."""
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    codes, log = forks.run("-c", _PROGRAM, folder, folder=folder, variables=variables)
    assert codes == [0], log[-3000:]
    result: dict[str, Any] = json.loads(log.strip().splitlines()[-1])
    return result


@pytest.mark.slow
def test_compiled_code_of_an_earlier_process_is_used(tmp_path: Path) -> None:
    """A second process finds the graphs with and without records in the cache, forward and backward."""
    first, second = in_new_process(tmp_path), in_new_process(tmp_path)
    assert (first["hits"], first["misses"], first["bypasses"]) == (0, 4, 0)
    assert (second["hits"], second["misses"], second["bypasses"]) == (4, 0, 0)
    assert second["aot"] == {"total": 2, "autograd_cache_hit": 2, "ok": 2}
    assert second["losses"] == first["losses"]
