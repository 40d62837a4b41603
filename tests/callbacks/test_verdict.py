"""A fit is called healthy only if there was something to examine: doctor, the last message, the page and the files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recorder import (
    ActivationRecorder,
    GradientRecorder,
    Outputs,
    ParameterRecorder,
    RecorderWarning,
    Schedule,
)
from lightning_recorder.page import page_data
from lightning_recorder.recordings import open_recording
from tests.commands.console import run
from tests.sinks.events import read_events

QUIET = Outputs(plots=False, dumps=False)
SHORT = Schedule(first_n_steps=8)


class Box:
    """A value that no recorder can look into."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Boxed(nn.Linear):
    """A layer with a box for input and output."""

    def forward(self, box: Any) -> Any:
        """Transform the tensor in a box."""
        return Box(super().forward(box.tensor).tanh())


class Net(LightningModule):
    """Fits a linear function, with plain layers or with boxes between them, and with a layer that is never called."""

    def __init__(self, *, boxed: bool = False) -> None:
        super().__init__()
        self.boxed = boxed
        layers = [Boxed(4, 4) for _ in range(2)] if boxed else [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)]
        self.net = nn.Sequential(*layers)
        self.spare = nn.Linear(2, 2).requires_grad_(False)

    def training_step(self, batches: list[Tensor], batch_idx: int) -> Tensor:
        """Return the squared error."""
        (batch,) = batches
        out = self.net(Box(batch)).tensor if self.boxed else self.net(batch)
        loss: Tensor = (out - 0.5 * batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam for the layers in use."""
        return torch.optim.Adam(self.net.parameters(), 1e-3)


class Failing(ActivationRecorder):
    """Fails at the third record."""

    _records: ClassVar[int] = 0

    def _prepare(self, *arguments: Any) -> None:
        type(self)._records += 1
        if type(self)._records == 3:
            raise RuntimeError("planted")
        super()._prepare(*arguments)


class Case(NamedTuple):
    """A fit that says less than healthy, the first part of its gap, and a rule that could not run."""

    callbacks: list[Callback]
    line: str
    rule: str
    boxed: bool = False
    steps: int = 8


CASES: dict[str, Callable[[], Case]] = {
    "no tensors": lambda: Case(
        [
            ActivationRecorder(schedule=SHORT, outputs=QUIET, functions=False),
            ParameterRecorder(schedule=SHORT, outputs=QUIET),
        ],
        "not examined: activations, because 0 of 3 modules were recorded: net.0, net.1",
        "dead-output",
        boxed=True,
    ),
    "functions alone": lambda: Case(
        [ActivationRecorder(schedule=SHORT, outputs=QUIET), ParameterRecorder(schedule=SHORT, outputs=QUIET)],
        "not examined: the modules of the activations, because 0 of 3 modules were recorded: net.0, net.1",
        "",
        boxed=True,
    ),
    "never called": lambda: Case(
        [GradientRecorder("spare", schedule=SHORT, outputs=QUIET)],
        "not examined: gradients, because the only module was not recorded: spare (never called)",
        "vanishing-gradient",
    ),
    "one step": lambda: Case(
        [each(schedule=SHORT, outputs=QUIET) for each in (ActivationRecorder, GradientRecorder, ParameterRecorder)],
        "not examined: the course of the run, because there is only 1 record",
        "dead-output",
        steps=1,
    ),
    "no due step": lambda: Case(
        [
            ActivationRecorder(schedule=Schedule(step_window=(100, 200)), outputs=QUIET),
            ParameterRecorder(schedule=SHORT, outputs=QUIET),
        ],
        "not examined: activations, because steps 0 to 7 lie outside of step_window=(100, 200)",
        "dead-output",
    ),
    "failed": lambda: Case(
        [Failing(schedule=SHORT, outputs=QUIET), ParameterRecorder(schedule=SHORT, outputs=QUIET)],
        "not examined: the rest of the activations, because it failed, as a warning said",
        "",
    ),
}


def fit(folder: Path, case: Case) -> None:
    """Run a fit in a folder."""
    torch.manual_seed(0)
    Trainer(
        logger=TensorBoardLogger(folder, name="", version=""),
        callbacks=case.callbacks,
        max_steps=case.steps,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
    ).fit(Net(boxed=case.boxed), DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8))


@pytest.mark.filterwarnings("ignore::lightning_recorder.RecorderWarning")
@pytest.mark.parametrize("name", CASES)
def test_too_little_to_examine(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All outputs say the same about a run that has no findings because rules could not run; none says healthy."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    monkeypatch.setattr(Failing, "_records", 0)
    case = CASES[name]()
    fit(tmp_path, case)
    recording = open_recording(tmp_path)
    (gap,) = recording.diagnosis.open
    assert gap.line.startswith(case.line)
    assert case.rule in (gap.rules or ("",))
    assert (recording.diagnosis.is_healthy, recording.diagnosis.verdict) == (None, "no findings")

    # The handler may be on two loggers, so that it has a message twice.
    logged = {id(each): each.getMessage() for each in caplog.records}
    (last,) = (text for text in logged.values() if text.startswith("No findings, but not"))
    assert f"  {gap.line}" in last.splitlines()
    status, out, _ = run("doctor", tmp_path)
    assert (status, gap.line in out.splitlines(), "healthy:" in out) == (0, True, False)
    assert out.endswith(", but too little was examined to call the run healthy\n")
    # Dozens of names of rules say little; --all has them.
    assert ("  rules" in out, case.rule in run("doctor", tmp_path, "--all").out) == (False, True)

    stored = json.loads((tmp_path / "recorder" / "findings.json").read_text())
    (printed,) = json.loads(run("doctor", tmp_path, "--json").out)["runs"]
    for data in (stored, printed):
        assert data["healthy"] is None
        open_gaps = [each for each in data["not_examined"] if not each["is_expected"]]
        assert [(each["why"], each["rules"]) for each in open_gaps] == [(gap.why, list(gap.rules))]
    (shown,) = page_data(recording.runs)["runs"]
    assert (shown["healthy"], shown["verdict"], shown["notExamined"]) == (None, "no findings", [gap.line])
    assert "healthy" not in recording._repr_html_()
    assert "no findings" in recording._repr_html_()
    text = read_events(tmp_path / "recorder").Tensors("z_recorder/findings/text_summary")[0]
    assert gap.line in text.tensor_proto.string_val[0].decode()


def test_a_selection_of_groups_may_be_healthy(tmp_path: Path) -> None:
    """A run is healthy with the recorders that the user chose; ``--all`` lists the rules that would need others."""
    fit(tmp_path, Case([ActivationRecorder(schedule=SHORT, outputs=QUIET)], "", ""))
    status, out, _ = run("doctor", tmp_path)
    assert (status, out) == (0, "healthy: no findings in 8 records of 4 sites, steps 0 to 7\n")
    everything = run("doctor", tmp_path, "--all").out
    assert "not examined: gradients, because there was no GradientRecorder (" in everything
    assert "vanishing-gradient" in everything
    assert everything.endswith(out)


def test_a_recorder_that_fails_keeps_its_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receipt of a recorder that failed has the reason beside the modules that it had recorded."""
    monkeypatch.setattr(Failing, "_records", 0)
    with pytest.warns(RecorderWarning, match="planted"):
        fit(tmp_path, CASES["failed"]())
    receipt = json.loads((tmp_path / "recorder" / "receipt.json").read_text())["activations"]
    assert (receipt["ended"], receipt["modules"]["net.0"]["fired"]) == ("it failed, as a warning said", True)
