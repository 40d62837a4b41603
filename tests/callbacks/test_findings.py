"""Tests of the findings during a fit: the list in the terminal, ``findings.json``, and the text in TensorBoard."""

from __future__ import annotations

import base64
import gzip
import json
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_recorder import (
    ActivationRecorder,
    GradientRecorder,
    GraphRecorder,
    Outputs,
    ParameterRecorder,
    RecorderWarning,
    open_recording,
)
from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.insight import Finding
from lightning_recorder.outputs import RunFindings, pipeline
from lightning_recorder.outputs.findings import REPORT
from lightning_recorder.page import page_data
from lightning_recorder.recordings.diagnose import records_of
from lightning_recorder.recordings.recording import Run
from tests.sinks.events import read_events

QUIET = Outputs(plots=False, dumps=False)
STEPS = 23
OFF = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")


class Net(LightningModule):
    """A regression net of two branches. It is healthy unless a fault is planted."""

    def __init__(self, *, fault: str = "") -> None:
        super().__init__()
        seed_everything(2, verbose=False)
        self.stem = nn.Linear(8, 16)
        self.act = nn.ReLU()
        self.left, self.right = nn.Linear(16, 4), nn.Linear(16, 4)
        self.head = nn.Linear(8, 3)
        self.fault = fault
        if fault == "dead":
            nn.init.constant_(self.stem.bias, -50.0)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.act(self.stem(batch[0]))
        right = self.right(hidden)
        right = right.detach() if self.fault == "detached" else right
        logits = self.head(torch.cat([self.left(hidden), right], 1))
        return nn.functional.cross_entropy(logits, batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.act(self.stem(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def batches() -> DataLoader[tuple[Tensor, ...]]:
    """Return batches of three classes that a linear map separates, with noise."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(STEPS * 16, 8, generator=generator)
    noise = torch.randn(len(inputs), 3, generator=generator)
    return DataLoader(TensorDataset(inputs, (inputs[:, :3] + noise).argmax(1)), batch_size=16)


def recorders(outputs: Outputs = QUIET) -> list[Callback]:
    """Return recorders of activations, gradients, parameters and the graph."""
    every = {"every_n_train_steps": 2, "outputs": outputs}
    kinds: tuple[Callable[..., Callback], ...] = (ActivationRecorder, GradientRecorder, ParameterRecorder)
    return [GraphRecorder(formats=()), *(kind(**every) for kind in kinds)]


class InStep(Callback):
    """Lets each training step wait until the records of all recorders are written and examined."""

    @override
    def on_train_batch_start(self, trainer: Trainer, *arguments: object) -> None:
        for each in trainer.callbacks:  # type: ignore[attr-defined]  # a property of the trainer, without a type
            if isinstance(each, StatisticsCallback):
                each._pipeline.wait()


def make_trainer(folder: Path, callbacks: list[Callback] | None = None, **options: Any) -> Trainer:
    """Return a trainer with a TensorBoard logger and no other output."""
    return Trainer(
        accelerator="cpu",
        callbacks=recorders() if callbacks is None else callbacks,
        **{
            "logger": TensorBoardLogger(folder, name="", version=""),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "max_epochs": 1,
            **options,
        },
    )


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the logged messages about findings."""
    lines = [each.getMessage() for each in caplog.records]
    return [each for each in lines if each.startswith(("Found at", "Healthy")) or "finding" in each.partition("\n")[0]]


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    # These fits are so short that all records would be joined and come at their end.
    monkeypatch.setattr(pipeline, "_JOIN_S", 0.0)
    monkeypatch.setattr(pipeline, "_MOST_JOINED_BYTES", 0)
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)


@pytest.mark.parametrize(
    ("fault", "module", "verdict", "latest"),
    [("dead", "act", "returns only zeros", 22), ("detached", "right", "gets no gradient", 10)],
)
def test_the_last_lines_name_the_culprit(
    fault: str, module: str, verdict: str, latest: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The fit ends with one list for all recorders: the count, the command, and the culprit in the first line.

    The culprit is logged before, after five records if it cannot settle.
    """
    make_trainer(tmp_path, [*recorders(replace(QUIET, report=True)), InStep()]).fit(Net(fault=fault), batches())
    findings = open_recording(tmp_path).findings
    bad = [each for each in findings if not each.is_note]
    lines = caplog.records[-1].getMessage().splitlines()
    assert lines[0].startswith(f"{len(bad)} finding")
    ways = f"run `lightning-recorder doctor {tmp_path}` or `lightning-recorder view {tmp_path}`"
    assert lines[0].endswith(f"; {ways}, or open {report_of(tmp_path)}")
    assert lines[1] == f"  {bad[0].line}"
    assert module in lines[1].split()
    assert verdict in lines[1]
    assert len(lines) <= 5
    early = [each for each in said(caplog) if each.startswith("Found at")]
    (line,) = (each for each in early if f": {module} {verdict}" in each)
    assert int(line.split()[3].rstrip(":")) <= latest
    assert len(said(caplog)) == len(early) + 1

    assert json.loads((tmp_path / "recorder" / "findings.json").read_text()) == json.loads(
        json.dumps(open_recording(tmp_path).diagnosis.to_json())
    )
    texts = read_events(tmp_path / "recorder").Tensors("z_recorder/findings/text_summary")
    assert [each.step for each in texts] == [bad[0].last_step]
    assert bad[0].line in texts[0].tensor_proto.string_val[0].decode()


def test_a_healthy_fit_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without findings the fit ends with one message that says healthy and how to see more, and so does the file."""
    make_trainer(tmp_path, recorders(replace(QUIET, report=True))).fit(Net(), batches(), batches())
    (line,) = said(caplog)
    assert line == (f"Healthy: no findings; run `lightning-recorder view {tmp_path}`, or open {report_of(tmp_path)}")
    assert caplog.records[-1].getMessage() == line
    assert json.loads((tmp_path / "recorder" / "findings.json").read_text())["healthy"] is True
    assert "z_recorder/findings/text_summary" not in read_events(tmp_path / "recorder").Tags()["tensors"]


def test_findings_can_be_switched_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With ``Outputs(findings=False)`` nothing is examined, said or written."""
    outputs = Outputs(plots=False, dumps=False, findings=False)
    make_trainer(tmp_path, recorders(outputs)).fit(Net(fault="dead"), batches())
    assert said(caplog) == []
    assert not (tmp_path / "recorder" / "findings.json").exists()


def test_a_rule_can_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rule that one recorder ignores gives no finding in the fit, while other rules do."""
    quiet = Outputs(plots=False, dumps=False, ignored_rules=["gradient-stops"])
    kept = recorders()[:-1]
    make_trainer(tmp_path, [*kept, ParameterRecorder(every_n_train_steps=2, outputs=quiet)]).fit(
        Net(fault="detached"), batches()
    )
    assert not [line for line in said(caplog) if "gets no gradient" in line]
    assert "gradient-stops" not in (tmp_path / "recorder" / "findings.json").read_text()
    assert "gradient-stops" in [each.rule for each in open_recording(tmp_path).findings]


def test_a_continued_run_has_the_findings_of_all_its_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A resumed fit, by the same callbacks or by others, reports what the files of the whole run show."""
    callbacks, net = recorders(), Net(fault="dead")
    trainer = make_trainer(tmp_path, callbacks)
    trainer.fit(net, batches())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    for again in (callbacks, recorders()):
        caplog.clear()
        make_trainer(tmp_path, again, max_epochs=2).fit(net, batches(), ckpt_path=tmp_path / "end.ckpt")
        findings = open_recording(tmp_path).findings
        assert findings[0].first_step == 0
        written = json.loads((tmp_path / "recorder" / "findings.json").read_text())
        assert written == json.loads(json.dumps(open_recording(tmp_path).diagnosis.to_json()))
        assert f"  {findings[0].line}" in caplog.records[-1].getMessage().splitlines()


def test_a_run_without_files_or_graph_is_examined(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a folder the findings are only logged, and the classes of the modules come from the model."""
    make_trainer(tmp_path, recorders()[1:], barebones=True, **dict.fromkeys(OFF)).fit(Net(fault="dead"), batches())
    lines = caplog.records[-1].getMessage().splitlines()
    assert "doctor" not in lines[0]
    assert "act" in lines[1].split()
    assert list(tmp_path.rglob("findings.json")) == []


@pytest.mark.parametrize("function", ["validate", "fast_dev_run"])
def test_other_runs_are_not_disturbed(function: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """A validation alone and a ``fast_dev_run`` write no findings and give no warning of ours."""
    trainer = make_trainer(tmp_path, fast_dev_run=function == "fast_dev_run")
    if function == "validate":
        trainer.validate(Net(), batches(), verbose=False)
    else:
        trainer.fit(Net(), batches(), batches())
    assert list(tmp_path.rglob("findings.json")) == []
    assert [each for each in recwarn if issubclass(each.category, RecorderWarning)] == []


def test_an_error_of_the_rules_gives_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """An error of the examination gives one warning for all recorders, and every record is still written."""

    def fail(self: RunFindings) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(RunFindings, "_examined", fail)
    make_trainer(tmp_path).fit(Net(fault="dead"), batches())
    texts = [str(each.message) for each in recwarn if issubclass(each.category, RecorderWarning)]
    assert texts == ["records are no longer examined for findings: ValueError: planted"]
    run = open_recording(tmp_path).run
    expected = {**dict.fromkeys(run.recorders, STEPS // 2 + 1), "watch": STEPS}
    assert {label: len(run[label].steps) for label in run} == expected


@pytest.mark.filterwarnings("ignore:Found 1 module")  # of Lightning, about the module in eval mode
def test_files_hold_the_settings_that_the_rules_need(tmp_path: Path) -> None:
    """Without a graph, a file has the learning rate, the clipping, the classes, and the modules in eval mode."""
    model = Net()
    dropout = nn.Dropout(0.1)
    model.act = nn.Sequential(nn.ReLU(), dropout.eval())  # type: ignore[assignment]  # any module does
    kinds: tuple[Callable[..., Callback], ...] = (ActivationRecorder, ParameterRecorder)
    trainer = make_trainer(
        tmp_path, [kind(every_n_train_steps=2, outputs=QUIET) for kind in kinds], gradient_clip_val=2
    )
    trainer.fit(model, batches())
    run = open_recording(tmp_path).run
    assert run.receipt is not None
    assert run.receipt["activations"]["modules"]["act.1"]["type"] == "Dropout"
    series = run["parameters"]
    (entry,) = [each.entries[series.steps[-1]] for each in series.parts.values()]
    assert entry.table.about["gradient_clip_val"] == 2.0
    assert [group["betas"] for group in entry.table.about["groups"]] == [[0.9, 0.999]]
    assert series["head", "weight"].scalars(series.steps[-1])["learning_rate"] == 3e-3
    assert run["activations"]["act.1"].scalars(series.steps[-1])["eval_mode"] == 1.0
    assert [(each.rule, each.module) for each in run.findings if not each.is_note] == [("eval-mode", "act.1")]


@pytest.mark.parametrize(("interval", "times", "unit"), [("epoch", 3, 9), ("step", 9, 3)])
def test_a_record_has_the_length_of_the_schedule(interval: str, times: int, unit: int, tmp_path: Path) -> None:
    """The record of parameters has the number of steps of the fit, and how often it steps the learning rate."""

    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), 1e-3)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": interval}}

    recorder = ParameterRecorder(every_n_train_steps=1, outputs=QUIET, strict=True)
    trainer = make_trainer(tmp_path, [recorder], max_epochs=3, limit_train_batches=3)
    trainer.fit(Scheduled(), batches())
    series = open_recording(tmp_path).run["parameters"]
    (entry,) = [each.entries[series.steps[-1]] for each in series.parts.values()]
    assert entry.table.about["planned_steps"] == 9
    expected = {"class": "CosineAnnealingLR", "interval": interval, "length": 20, "times": times, "unit": unit}
    assert entry.table.about["schedules"] == [expected]


class Hostile(torch.optim.lr_scheduler.StepLR):
    """A schedule with a property of its own code."""

    @property
    def T_max(self) -> int:  # noqa: N802 - the name of torch
        torch.randn(1)
        raise KeyError("T_max")


def test_the_code_of_a_schedule_is_not_called(tmp_path: Path) -> None:
    """A property of a schedule that draws and raises costs no record, and changes no bit of the training."""

    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), 1e-3)
            return [optimizer], [Hostile(optimizer, 5)]

    states = []
    recorder = ParameterRecorder(every_n_train_steps=1, outputs=QUIET, strict=True)
    recorded: list[list[Callback]] = [[], [recorder]]
    for recorders in recorded:
        seed_everything(0, verbose=False)
        model = Scheduled()
        make_trainer(tmp_path, recorders, max_epochs=1, limit_train_batches=3).fit(model, batches())
        states.append((*model.parameters(), torch.get_rng_state()))
    assert all(map(torch.equal, *states))


def report_of(folder: Path) -> Path:
    """The path of the report of the run in a folder."""
    return open_recording(folder).run.directory / REPORT


def test_the_report_has_the_findings_and_all_records(tmp_path: Path) -> None:
    """With ``report=True`` the fit ends with a page whose data are those of the finished recording."""
    quiet = replace(QUIET, report=True)
    model = Net(fault="dead")
    make_trainer(tmp_path, recorders(quiet)).fit(model, batches())
    html = report_of(tmp_path).read_text(encoding="utf-8")
    (text,) = re.findall(r'<script type="text/plain" id="data">([^<]*)<', html)
    found = json.loads(gzip.decompress(base64.b64decode(text)))
    (expected,) = page_data(open_recording(tmp_path).runs)["runs"]
    assert {**found["runs"][0], "name": expected["name"]} == expected
    assert found["runs"][0]["findings"][0]["module"] == "act"


def test_the_end_of_a_fit_examines_once_and_reads_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All recorders, the findings and the report share one examination and the graph in memory."""
    done: list[str] = []

    def counted(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def function(*arguments: object) -> object:
            done.append(name)
            return original(*arguments)

        monkeypatch.setattr(owner, name, function)

    class End(Callback):
        @override
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            InStep().on_train_batch_start(trainer)
            done.clear()

    counted(sys.modules["lightning_recorder.insight.examine"], "_findings")
    counted(Run, "_read_graph")
    callbacks = [InStep(), End(), *recorders(replace(QUIET, report=True))]
    make_trainer(tmp_path, callbacks, limit_train_batches=STEPS - 2).fit(Net(fault="dead"), batches())
    assert done == ["_findings"]
    assert '"module": "act"' in (report_of(tmp_path).parent / "findings.json").read_text()
    assert report_of(tmp_path).exists()
    assert open_recording(tmp_path).graph is not None
    assert done == ["_findings", "_read_graph"]


def test_a_finding_that_replaces_another_one_is_shown() -> None:
    """The findings so far have what the watch has said last about the same place."""
    findings = RunFindings(None, log=print, types={}, graph=lambda: None)
    words: dict[str, Any] = {"usual": "1", "why": "so", "next": "look"}
    for verdict in ("the loss rose", "the loss rose again"):
        findings.report(Finding("spike", "warning", "", "", 1, 1, 1, verdict=verdict, **words))
        assert [each.verdict for each in findings.current()] == [verdict]


@pytest.mark.parametrize(("seconds", "is_written"), [(20.0, False), (30.0, True)])
def test_the_report_takes_little_of_the_time_of_the_fit(tmp_path: Path, seconds: float, is_written: bool) -> None:
    """By default, the report of a short run is written after a fit of at least 25 seconds."""
    make_trainer(tmp_path, recorders()).fit(Net(), batches())
    assert not report_of(tmp_path).exists()
    now = 0.0
    run = open_recording(tmp_path).run
    options: dict[str, Any] = {"log": print, "types": {}, "graph": lambda: None, "clock": lambda: now}
    findings = RunFindings(run.directory, **options)
    findings.begin("activations", "activations", has_file=True)
    for record in records_of("activations", run["activations"]):
        findings.add(record)
    now = seconds
    findings.end("activations", None)
    assert report_of(tmp_path).exists() == is_written


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"report": True, "records": False}, r"a recorder has records=False; remove this setting to get it"),
        ({"records": False}, None),
        ({"report": False}, None),
    ],
)
def test_the_log_says_why_there_is_no_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], reason: str | None
) -> None:
    """The last message says why a page that was asked for is left out, and nothing if none was asked for."""
    make_trainer(tmp_path, recorders(replace(QUIET, **settings))).fit(Net(), batches())
    lines = [line for each in caplog.records for line in each.getMessage().splitlines() if REPORT in line]
    assert len(lines) == (reason is not None)
    assert all(re.fullmatch(f"  report.html is not written, because {reason}", each) for each in lines)
    assert not list(tmp_path.rglob(REPORT))


def test_a_report_without_findings_is_not_promised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A recorder that is asked for the page and examines no records says that it writes none."""
    outputs = replace(QUIET, report=True, findings=False)
    make_trainer(tmp_path, [ActivationRecorder(every_n_train_steps=2, outputs=outputs)]).fit(Net(), batches())
    (line,) = [each.getMessage() for each in caplog.records if REPORT in each.getMessage()]
    assert line == "ActivationRecorder does not write report.html, because it has findings=False."


def test_an_error_of_the_report_gives_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fit and the findings go on if the page cannot be made."""

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("no page")

    monkeypatch.setattr("lightning_recorder.page.page_data", fail)
    trainer = make_trainer(tmp_path, recorders(replace(QUIET, report=True)))
    with pytest.warns(RecorderWarning, match=r"report.html was not written: .*no page") as warned:
        trainer.fit(Net(), batches())
    assert len([each for each in warned if issubclass(each.category, RecorderWarning)]) == 1
    assert not report_of(tmp_path).exists()
    assert (report_of(tmp_path).parent / "findings.json").exists()


def test_a_finished_callback_shows_itself(tmp_path: Path) -> None:
    """In a notebook, a recorder is a summary of its run, and before the run it has none."""
    recorder = ActivationRecorder(every_n_train_steps=1, outputs=QUIET)
    assert recorder._repr_html_() is None
    make_trainer(tmp_path, [recorder]).fit(Net(fault="dead"), batches())
    shown = recorder._repr_html_()
    assert shown is not None
    assert "act returns only zeros" in shown
