"""Tests of the programs of the exam: the faults that the documentation says are named, and their repaired twins."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch import seed_everything

from tests.insight.corpus.exam import PROGRAMS, findings_of, mark_of

pytestmark = pytest.mark.filterwarnings("ignore")  # planted faults cause warnings of other libraries

_QUICK = ("sigmoid_for_prices", "labels_divided_away")
# Most faults show in the first steps. `nox -s exam` trains all programs for all of their steps.
_STEPS = 40
_LATE = ("momentum_of_keras", "schedule_per_batch", "softmax_for_several_labels", "weight_decay_of_one")


def check(name: str, folder: Path) -> None:
    marks: list[str] = []
    alarms: list[str] = []
    for is_faulty in (True, False):
        seed_everything(3, verbose=False)
        task = PROGRAMS[name].make(is_faulty)
        task.steps = task.steps if name in _LATE else _STEPS
        found = findings_of(task, folder / str(is_faulty))
        if is_faulty:
            marks.append(mark_of(PROGRAMS[name], found))
        else:
            alarms = [each.line for each in found if not each.is_note]
    assert alarms == []
    assert marks == ["named" if PROGRAMS[name].rules else PROGRAMS[name].missed]


@pytest.mark.parametrize("name", _QUICK)
def test_a_reported_fault(name: str, tmp_path: Path) -> None:
    """The first finding names the cause, and the repaired program has no warning."""
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - set(_QUICK)))
def test_each_reported_fault(name: str, tmp_path: Path) -> None:
    """Each program has the mark of the documentation: named first, or known to be missed."""
    check(name, tmp_path)
