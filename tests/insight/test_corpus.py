"""Tests on real trainings: healthy ones give no warning, and planted faults are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lightning.pytorch import seed_everything

from lightning_recorder import open_recording
from lightning_recorder.insight import Finding
from tests.insight.corpus.faults import FAULTS
from tests.insight.corpus.runs import halves, train
from tests.insight.corpus.table import is_named
from tests.insight.corpus.task import HEALTHY, Task

pytestmark = pytest.mark.filterwarnings("ignore")  # planted faults cause warnings of other libraries

# Of the halves that no threshold was chosen on, every second training. `nox -s findings` runs all of them.
_FAULTS, _TRAININGS = (halves(list(names))[1][::2] for names in (FAULTS, HEALTHY))
# The quick tests train these; the slow tests do not repeat them.
_QUICK = ("dead_relu_after_batchnorm", "detached_pool", "learning_rate_of_one_layer", "nan_at_a_recorded_step")
_QUICK_HEALTHY = ("mlp_adam", "lora", "lstm")


def findings(task: Task, folder: Path) -> list[Finding]:
    """Train a task and return its findings, which are the same live and when its files are read."""
    train(task, folder)
    recording = open_recording(folder)
    written = json.loads((recording.run.directory / "findings.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(recording.diagnosis.to_json()))
    return recording.findings


@pytest.mark.parametrize("name", _QUICK)
def test_a_planted_fault(name: str, tmp_path: Path) -> None:
    """The first finding names the module at fault."""
    seed_everything(3, verbose=False)
    found = findings(FAULTS[name].make(), tmp_path)
    assert is_named(name, found), [each.line for each in found]


@pytest.mark.parametrize("name", _QUICK_HEALTHY)
def test_a_healthy_training(name: str, tmp_path: Path) -> None:
    """A healthy training gives no warning."""
    seed_everything(3, verbose=False)
    found = findings(HEALTHY[name](), tmp_path)
    assert [each.line for each in found if not each.is_note] == []


@pytest.mark.slow
def test_healthy_trainings(tmp_path: Path) -> None:
    """At most one in ten healthy trainings on which no threshold was chosen has a warning."""
    alarms = {}
    for name in set(_TRAININGS).difference(_QUICK_HEALTHY):
        seed_everything(3, verbose=False)
        found = [each.line for each in findings(HEALTHY[name](), tmp_path / name) if not each.is_note]
        alarms.update({name: found} if found else {})
    assert len(alarms) <= len(_TRAININGS) // 10, alarms


@pytest.mark.slow
def test_planted_faults(tmp_path: Path) -> None:
    """At least nine in ten faults on which no threshold was chosen are named first."""
    missed = {}
    for name in set(_FAULTS).difference(_QUICK):
        seed_everything(3, verbose=False)
        found = findings(FAULTS[name].make(), tmp_path / name)
        missed.update({} if is_named(name, found) else {name: [each.line for each in found]})
    assert len(missed) <= len(_FAULTS) // 10, missed
