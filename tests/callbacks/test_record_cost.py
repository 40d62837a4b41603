"""The calls on a record's way from the states to a TensorBoard event."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

import lightning_recorder
from lightning_recorder import ActivationRecorder, Outputs, default_recorders, open_recording
from lightning_recorder.outputs import RecordPipeline
from lightning_recorder.records import history
from tests.callbacks.models import digits, fit
from tests.callbacks.small import small
from tests.effort import profiled

PACKAGE = Path(lightning_recorder.__file__).parent
NAMES = ["encoder.1", "encoder.2", "head"]

MULTI_CALLS = 8
"""The calls in the composite sink: three for the scalars, three for the histograms, two for the written bytes."""
ALL_CALLS = 130
"""The calls in the package for a record of three modules, without those that joined records share. Python 3.12 and
later count no comprehensions."""
EXAMINING_CALLS = 20
"""The calls with which the findings take a record; the rules run more rarely."""
MOST_FILES = 18
"""The files of the package that the writer thread enters for a record, from the states to both files of the run."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Counter[str]]:
    """Return the number of calls in each file of the package for each record, in the thread that writes it."""
    counts: list[Counter[str]] = []
    write = RecordPipeline._write

    def counting(*args: Any) -> None:
        found: Counter[str] = Counter()

        def see(frame: FrameType, event: str, argument: object) -> None:
            path = Path(frame.f_code.co_filename)
            # Lengths are cached, so that their calls depend on the tests before.
            if event == "call" and PACKAGE in path.parents and frame.f_code.co_name != "_varint":
                found[path.relative_to(PACKAGE).as_posix()] += 1

        profiled(lambda: write(*args), see)
        counts.append(found)

    monkeypatch.setattr(RecordPipeline, "_write", counting)
    return counts


@pytest.mark.parametrize(("findings", "all_calls"), [(False, ALL_CALLS), (True, ALL_CALLS + EXAMINING_CALLS)])
def test_a_record_crosses_each_layer_once(
    calls: list[Counter[str]], tmp_path: Path, findings: bool, all_calls: int
) -> None:
    """After the first record, which also completes the receipt, each record takes the stated number of calls."""
    outputs = Outputs(plots=False, findings=findings)
    recorder = ActivationRecorder(NAMES, every_n_train_steps=1, outputs=outputs)
    fit(small(), tmp_path, [recorder], loader=digits(4), logger=TensorBoardLogger(tmp_path))
    assert sorted(Path(tmp_path).rglob("recorder/events.out.tfevents.*"))
    assert len(calls) == 4
    for count in calls[1:]:
        assert count["sinks/multi.py"] <= MULTI_CALLS
        assert count.total() <= all_calls
        assert not [file for file in count if file.startswith("callbacks/")]


def test_a_record_enters_few_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The writer thread enters a bounded number of files for each record after the first one, with findings on."""
    batches: list[set[str]] = []
    write_batch = RecordPipeline._write_batch

    def noting(*args: Any) -> None:
        entered: set[str] = set()

        def see(frame: FrameType, event: str, argument: object) -> None:
            path = Path(frame.f_code.co_filename)
            if event == "call" and PACKAGE in path.parents:
                entered.add(path.relative_to(PACKAGE).as_posix())

        profiled(lambda: write_batch(*args), see)
        batches.append(entered)

    monkeypatch.setattr(RecordPipeline, "_write_batch", noting)
    recorder = ActivationRecorder(NAMES, every_n_train_steps=1, outputs=Outputs(plots=False))

    class Wait(Callback):
        """Waits until each record is written, so that no others join it."""

        def on_train_batch_end(self, *args: object) -> None:
            assert recorder.latest_step is not None

    fit(small(), tmp_path, [recorder, Wait()], loader=digits(4), logger=TensorBoardLogger(tmp_path))
    assert len(batches) == 4
    for entered in batches[1:]:
        assert "records/file.py" in entered
        assert len(entered) <= MOST_FILES


def test_rules_read_a_large_history_column_by_column(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A history keeps few arrays of a large model: rules read as many for sixty layers as for thirty."""
    monkeypatch.setattr(history, "_MOST_CELLS", 0)  # each model is large
    together = history.History._together
    counts: list[int] = []

    def counting(*args: Any) -> Any:
        counts[-1] += 1
        return together(*args)

    monkeypatch.setattr(history.History, "_together", counting)
    for number in (30, 60):
        counts.append(0)
        model, blocks = small(), [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(number)]
        model.encoder = nn.Sequential(nn.Flatten(), *blocks)  # type: ignore[assignment]  # a different encoder
        model.head = nn.Linear(64, 10)
        callbacks = default_recorders(every_n_train_steps=1, outputs=Outputs(plots=False))
        fit(model, tmp_path / str(number), callbacks, loader=digits(8))
        counts[-1] = 0  # how often a fit examines its records depends on the time
        assert open_recording(tmp_path / str(number) / "lightning_logs" / "version_0").run.diagnosis.findings
    assert counts[0] == counts[1] > 0
