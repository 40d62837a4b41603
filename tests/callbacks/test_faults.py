"""An error inside a callback costs its own records and one warning, and never the run."""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn

from lightning_recorder import (
    ActivationRecorder,
    GradientRecorder,
    GraphRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    RecordingError,
    TensorDumper,
    open_recording,
)
from lightning_recorder.callbacks.guard import guarded
from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.outputs import SinkFormatter
from lightning_recorder.reductions import Change
from lightning_recorder.sinks import CsvSink, MetricsSink, loggers
from lightning_recorder.statistics import BaseStatisticsRecorder, RunRecorder, SiteStates
from lightning_recorder.taps import Site, Tap
from tests.callbacks.models import hooks_left
from tests.callbacks.small import BATCHES, Small, go, shown, small, warnings_by
from tests.disks import files_up_to

KINDS: tuple[Any, ...] = (ActivationRecorder, GradientRecorder, ParameterRecorder)
# The callback that runs beside a faulty one. Each kind is beside one of the others.
BESIDE: dict[Any, Any] = {
    ActivationRecorder: ParameterRecorder,
    ParameterRecorder: GradientRecorder,
    GraphRecorder: ActivationRecorder,
}
STEPS = 2 * BATCHES


def fails(*args: Any, **kwargs: Any) -> Any:
    """Raise an internal error."""
    raise ZeroDivisionError("of ours")


def made(kind: Any, sink: MemorySink, **options: Any) -> Callback:
    """Return a callback that records every step."""
    if issubclass(kind, GraphRecorder):
        callback: Callback = kind(formats=(), sinks=[sink], **options)
        return callback
    plain = {
        "every_n_train_steps": 1,
        "reduce": 3,
        "extra": [Change()],
        "sinks": [sink],
        "outputs": Outputs(plots=False),  # pictures take most of the time of a short fit
    }
    recorder: Callback = kind(**{**plain, **options})
    return recorder


def trained(folder: Path, callbacks: list[Callback], **options: Any) -> Small:
    """Return the model after two epochs with validations and a checkpoint at each step."""
    model = small()
    checkpoint = ModelCheckpoint(folder / "kept", every_n_train_steps=1, save_top_k=-1)
    go(folder, [*callbacks, checkpoint], model=model, validation=True, enable_checkpointing=True, **options)
    return model


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Return the model of a run without callbacks."""
    return trained(tmp_path_factory.mktemp("bare"), [])


@pytest.fixture(scope="module")
def well(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], dict[tuple[str, int], Any]]:
    """Return the records of a callback of this kind in a run without errors."""

    @functools.cache
    def record(kind: Any) -> dict[tuple[str, int], Any]:
        sink = MemorySink()
        trained(tmp_path_factory.mktemp("well"), [made(kind, sink)])
        return shown(sink)

    return record


def assert_unharmed(model: Small, bare: Small) -> None:
    """Check that the run is bitwise the bare one and that no hook is left on the model."""
    assert len(model.losses) == STEPS
    for name, value in bare.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert hooks_left(model) == []
    assert torch.overrides._get_current_function_mode_stack() == []


def run_with(faulty: Callback, others: tuple[Any, ...], folder: Path) -> tuple[Small, list[str], dict[Any, MemorySink]]:
    """Return the model, the warnings, and the records of the other callbacks."""
    sinks: dict[Any, MemorySink] = {kind: MemorySink() for kind in others}
    models: list[Small] = []
    callbacks = [faulty, *(made(kind, sink) for kind, sink in sinks.items())]
    warned = warnings_by(lambda: models.append(trained(folder, callbacks)))
    return models[0], warned, sinks


HOOKS = {
    "statistics": [
        "on_fit_start",
        "on_train_batch_start",
        "on_before_optimizer_step",
        "on_train_batch_end",
        "on_validation_start",
        "on_train_epoch_end",
        "on_save_checkpoint",
        "on_train_end",
        "on_fit_end",
        "teardown",
    ],
    "graph": [
        "on_fit_start",
        "on_train_batch_start",
        "on_train_batch_end",
        "on_validation_start",
        "on_train_epoch_end",
        "on_train_end",
        "on_fit_end",
        "teardown",
    ],
}
# The hooks of the gradient recorder are those of the base class, which the activations test covers.
DIFFERENT = (ActivationRecorder, ParameterRecorder)
IN_HOOKS = [
    *((ActivationRecorder, hook) for hook in HOOKS["statistics"]),
    *((ParameterRecorder, hook) for hook in HOOKS["statistics"] if hook in vars(ParameterRecorder)),
    *((GraphRecorder, hook) for hook in HOOKS["graph"]),
]


def failing_in(kind: Any, hook: str, *, at: int = 2) -> Any:
    """Return a subclass whose hook fails at the start of its n-th call."""
    calls: list[int] = []
    inner = getattr(kind, hook).__wrapped__

    @functools.wraps(inner)
    def broken(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(len(calls) + 1)
        if calls[-1] == (1 if hook in ("on_fit_start", "on_train_end", "on_fit_end", "teardown") else at):
            fails()
        inner(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {hook: guarded(broken), "__module__": kind.__module__})


@pytest.mark.parametrize(("kind", "hook"), IN_HOOKS)
def test_a_fault_in_a_hook_is_one_warning(
    kind: Any, hook: str, bare: Small, well: Callable[[Any], Any], tmp_path: Path
) -> None:
    """A failing hook gives one warning, the run is the bare one, and another callback records everything."""
    faulty = made(failing_in(kind, hook), MemorySink())
    model, warned, sinks = run_with(faulty, (BESIDE[kind],), tmp_path)
    assert warned == [f"{kind.__name__} is off for the rest of the run, {hook} failed: ZeroDivisionError: of ours"]
    assert_unharmed(model, bare)
    for other, sink in sinks.items():
        assert shown(sink) == well(other), other


@pytest.mark.parametrize(("kind", "hook"), IN_HOOKS)
def test_strict_raises_what_a_hook_raised(kind: Any, hook: str, tmp_path: Path) -> None:
    """With ``strict``, an error in any hook ends the run with that error and leaves no hooks."""
    model = small()
    callback = made(failing_in(kind, hook, at=1), MemorySink(), strict=True)
    with pytest.raises(ZeroDivisionError, match="of ours"):
        go(tmp_path, [callback, ModelCheckpoint(tmp_path)], model=model, validation=True, enable_checkpointing=True)
    assert hooks_left(model) == []


@pytest.mark.parametrize("name", ["recorder/receipt.json", "recorder/findings.json", "table.csv"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_file_that_cannot_be_written(name: str, strict: bool, tmp_path: Path) -> None:
    """With ``strict``, the error of a receipt, a findings file or a sink ends the run; otherwise it is a warning."""
    (tmp_path / name).mkdir(parents=True)
    sinks = [CsvSink(tmp_path / name)] if name == "table.csv" else []
    recorder = ActivationRecorder(every_n_train_steps=1, sinks=sinks, strict=strict)
    with warnings.catch_warnings(record=True), pytest.raises(OSError, match="directory") if strict else nullcontext():
        warnings.simplefilter("always")
        go(tmp_path, [recorder], logger=CSVLogger(tmp_path, name="", version=""), max_epochs=1)


INSIDE: dict[str, Callable[[Any], list[tuple[Any, str]]]] = {
    "attach": lambda recorder: [(recorder, "attach")],
    "pause": lambda recorder: [(recorder, "pause")],
    "remove": lambda recorder: [(recorder, "remove")],
    "traces": lambda recorder: [(recorder, "traces")],
    "snapshot": lambda recorder: [(recorder.states, "snapshot")],
    "reset": lambda recorder: [(recorder.states, "reset")],
    "saved": lambda recorder: [(recorder.states, "saved")],
    "state_dict": lambda recorder: [(recorder.states, "state_dict")],
}


def failing_inside(kind: Any, place: str) -> Any:
    """Return a subclass in which a method of the recorder fails."""

    def _make_recorder(self: Any, modules: Mapping[str, nn.Module], stage: str) -> BaseStatisticsRecorder:
        recorder: BaseStatisticsRecorder = kind._make_recorder(self, modules, stage)
        if modules:  # not the recorder that validates the settings at construction
            for holder, name in INSIDE[place](recorder):
                setattr(holder, name, fails)
        return recorder

    return type(kind.__name__, (kind,), {"_make_recorder": _make_recorder, "__module__": kind.__module__})


@pytest.mark.parametrize("kind", DIFFERENT)
@pytest.mark.parametrize("place", INSIDE)
def test_a_fault_inside_is_one_warning(
    kind: Any, place: str, bare: Small, well: Callable[[Any], Any], tmp_path: Path
) -> None:
    """A failure in any part of a recorder gives one warning and leaves run, checkpoints and another recorder intact."""
    model, warned, sinks = run_with(made(failing_inside(kind, place), MemorySink()), (BESIDE[kind],), tmp_path)
    assert len(warned) == 1, warned
    assert warned[0].startswith(f"{kind.__name__} is off for the rest of the run")
    assert warned[0].endswith("ZeroDivisionError: of ours")
    if place == "remove":  # a recorder that cannot remove its hooks leaves them
        for module in model.modules():
            module._forward_hooks.clear()
    assert_unharmed(model, bare)
    assert len(list((tmp_path / "kept").glob("*.ckpt"))) == STEPS
    for other, sink in sinks.items():
        assert shown(sink) == well(other), other


OVERRIDDEN = ["_set_up_recorder", "_on_record", "_announce", "_make_recorder", "_choose"]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_a_fault_of_the_callback_is_one_warning(
    name: str, bare: Small, well: Callable[[Any], Any], tmp_path: Path
) -> None:
    """A failing method of a callback, even an overridden one, disables only this callback."""
    begun: list[bool] = []

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The settings are validated at construction, before there is a run.
        return fails() if begun else getattr(GradientRecorder, name)(self, *args, **kwargs)

    faulty = made(type("GradientRecorder", (GradientRecorder,), {name: broken}), MemorySink())
    begun.append(True)
    model, warned, sinks = run_with(faulty, (ActivationRecorder, ParameterRecorder), tmp_path)
    assert len(warned) == 1, warned
    assert warned[0].startswith("GradientRecorder is off for the rest of the run")
    assert_unharmed(model, bare)
    for other, sink in sinks.items():
        assert shown(sink) == well(other), other


PATCHED: list[tuple[Any, str, Callable[[Any], bool]]] = [
    (SinkFormatter, "write", lambda self: self.group == "gradients"),
    (RunRecorder, "start_batch", lambda self: self.name == "GradientRecorder"),
    (RunRecorder, "end_batch", lambda self: self.name == "GradientRecorder"),
    (RunRecorder, "end_epoch", lambda self: self.name == "GradientRecorder"),
    (RunRecorder, "finish", lambda self: self.name == "GradientRecorder"),
    (RunRecorder, "state_dict", lambda self: self.name == "GradientRecorder"),
    (RunRecorder, "merged_state_dict", lambda self: self.name == "GradientRecorder"),
    (StatisticsCallback, "_note_saved_checkpoint", lambda self: self.group == "gradients"),
]


@pytest.mark.parametrize(
    ("owner", "name", "is_meant"), PATCHED, ids=[f"{owner.__name__}.{name}" for owner, name, _ in PATCHED]
)
def test_a_fault_on_the_way_is_one_warning(
    owner: Any,
    name: str,
    is_meant: Callable[[Any], bool],
    bare: Small,
    well: Callable[[Any], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failure between hooks and sinks costs the records of one callback and no checkpoint."""
    inner = getattr(owner, name)

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        return fails() if is_meant(self) else inner(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, broken)
    faulty = made(GradientRecorder, MemorySink())
    model, warned, sinks = run_with(faulty, (ActivationRecorder, ParameterRecorder), tmp_path)
    assert len(warned) == 1, warned
    assert "GradientRecorder" in warned[0]
    assert_unharmed(model, bare)
    assert len(list((tmp_path / "kept").glob("*.ckpt"))) == STEPS
    for other, sink in sinks.items():
        assert shown(sink) == well(other), other


SITES = {
    ActivationRecorder: Site("head", "out"),
    GradientRecorder: Site("head", "out"),
    ParameterRecorder: Site("head", "weight.grad"),
}


@pytest.fixture
def failing_site(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a subclass for which one site cannot be recorded."""
    kind: Any = request.param
    inner = SiteStates.add

    def add(self: SiteStates, site: Site, tensor: Tensor, factor: float = 1.0, *, extra: bool = True) -> None:
        inner(self, site, tensor, factor, extra=extra)
        if site == SITES[kind]:
            fails()

    monkeypatch.setattr(SiteStates, "add", add)
    return kind


@pytest.mark.parametrize("failing_site", KINDS, indirect=True)
def test_a_site_that_fails_costs_its_module_alone(failing_site: Any, bare: Small, tmp_path: Path) -> None:
    """If a module cannot be recorded, a warning names it, and the callback records the others."""
    sink, models = MemorySink(), list[Small]()
    recorder = made(failing_site, sink, reduce="step", outputs=Outputs(plots=False, curves="all"))
    warned = warnings_by(lambda: models.append(trained(tmp_path, [recorder])))
    site = SITES[failing_site]
    assert len(warned) == 1
    assert f"{site.path!r}" in warned[0]
    assert f"module {site.name!r}" in warned[0]
    assert warned[0].endswith(" is no longer recorded; strict=True raises instead.")
    assert_unharmed(models[0], bare)
    group = {ActivationRecorder: "activations", GradientRecorder: "gradients"}.get(failing_site, "parameters")
    last = "encoder.1/weight.grad" if group == "parameters" else "encoder.1"
    assert list(sink.scalars[f"{group}/{last}/mean"]) == list(range(STEPS))


@pytest.mark.parametrize("failing_site", KINDS, indirect=True)
def test_strict_names_the_module_that_failed(failing_site: Any, tmp_path: Path) -> None:
    """With ``strict``, the run ends with an error that names module and tensor and has the original as its cause."""
    model, site = small(), SITES[failing_site]
    with pytest.raises(RecordingError, match=rf"(?s){site.name}.*of ours|{site.path}.*{site.name}.*of ours") as caught:
        go(tmp_path, [made(failing_site, MemorySink(), strict=True)], model=model)
    assert repr(site.path) in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert hooks_left(model) == []


@pytest.mark.parametrize("any_thread", [True, False])
@pytest.mark.parametrize("verb", ["write_scalars", "write_histograms", "flush"])
def test_a_sink_that_raises_is_one_warning(
    verb: str, any_thread: bool, bare: Small, well: Callable[[Any], Any], tmp_path: Path
) -> None:
    """A sink that raises in any method is left out, and the other sinks get every record."""
    broken, sink, models = MemorySink(), MemorySink(), list[Small]()
    setattr(broken, verb, fails)
    broken.any_thread = any_thread
    recorder = made(ActivationRecorder, sink, sinks=[broken, sink])
    warned = warnings_by(lambda: models.append(trained(tmp_path, [recorder])))
    assert len(warned) == 1, warned
    assert f".{verb} failed, and nothing more is written to it: ZeroDivisionError: of ours" in warned[0]
    assert_unharmed(models[0], bare)
    assert shown(sink) == well(ActivationRecorder)


class Deaf(CSVLogger):
    """A logger that cannot handle the recorders' data."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if any(name.startswith("activations/") for name in metrics):
            raise ConnectionError("the server is gone")
        super().log_metrics(metrics, step)


def test_a_logger_that_raises_is_one_warning(
    bare: Small, well: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A logger that raises receives no more records, and still serves the run."""
    monkeypatch.setitem(loggers._SINKS, "Deaf", MetricsSink)  # the CSV logger's own file is not written
    sink, model, logger = MemorySink(), small(), Deaf(tmp_path)
    callbacks = [made(ActivationRecorder, sink)]
    options: dict[str, Any] = {"model": model, "validation": True, "logger": logger}
    warned = warnings_by(lambda: go(tmp_path, callbacks, **options))
    (message,) = warned
    assert message == (
        "MetricsSink(Deaf).write_scalars failed, and nothing more is written to it: ConnectionError: the server is gone"
    )
    assert_unharmed(model, bare)
    assert shown(sink) == well(ActivationRecorder)
    header, *rows = Path(logger.log_dir, "metrics.csv").read_text().splitlines()
    assert sum(bool(row.split(",")[header.split(",").index("train_loss")]) for row in rows) == STEPS


@pytest.mark.parametrize("logger", [False, TensorBoardLogger, CSVLogger])
def test_a_full_disk_is_one_warning(logger: Any, bare: Small, well: Callable[[Any], Any], tmp_path: Path) -> None:
    """If files cannot grow, one warning is given, other sinks get everything, and the run continues."""
    sink, model = MemorySink(), small()
    recorder = made(ActivationRecorder, sink, outputs=Outputs(dumps=("checkpoints", "records")))
    options: dict[str, Any] = {"model": model, "validation": True, "logger": logger and logger(tmp_path)}
    with files_up_to(4_000):
        warned = warnings_by(lambda: go(tmp_path, [recorder, GraphRecorder(sinks=[sink])], **options))
    assert len(warned) == 1, warned
    assert warned[0].startswith(f"lightning_recorder could not write to {tmp_path}")
    assert "File too large" in warned[0]
    assert_unharmed(model, bare)
    assert shown(sink) == well(ActivationRecorder)
    assert max(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 4_000
    assert list(tmp_path.rglob("*.tmp*")) == []


@pytest.mark.parametrize("kind", [*KINDS, GraphRecorder])
def test_a_folder_that_cannot_be_made_is_one_warning(
    kind: Any, bare: Small, well: Callable[[Any], Any], tmp_path: Path
) -> None:
    """If the folder cannot be created, one warning names it, and other sinks get everything."""
    (tmp_path / "recorder").write_text("in the way", encoding="utf-8")
    sink, models = MemorySink(), list[Small]()
    warned = warnings_by(lambda: models.append(trained(tmp_path, [made(kind, sink)])))
    assert len(warned) == 1, warned
    assert str(tmp_path / "recorder") in warned[0]
    assert_unharmed(models[0], bare)
    if kind is GraphRecorder:
        assert list(sink.graphs["graph"]) == [0]
    else:
        assert shown(sink) == well(kind)


class InTheWay(Callback):
    """A file takes the place of the folder of the recordings at one step, and is removed at a later one."""

    def __init__(self, folder: Path, comes_at: int, goes_at: int) -> None:
        self.folder, self.comes_at, self.goes_at = folder, comes_at, goes_at

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        recordings, away = self.folder / "recorder", self.folder / "away"
        if trainer.global_step in (self.comes_at, self.goes_at):
            trainer.save_checkpoint(self.folder / "saved.ckpt")  # waits for pending writes
        if trainer.global_step == self.comes_at:
            recordings.rename(away)
            recordings.write_text("in the way", encoding="utf-8")
        elif trainer.global_step == self.goes_at:
            recordings.unlink()
            away.rename(recordings)


@pytest.mark.parametrize("comes_at", [0, 3])
def test_a_write_error_that_passes_costs_what_was_not_written(comes_at: int, bare: Small, tmp_path: Path) -> None:
    """When files can be written again, each recorder writes its next record, and the graph of the first step."""
    plain: dict[str, Any] = {"every_n_train_steps": 1, "outputs": Outputs(plots=False, dumps="records", report=True)}
    callbacks = [InTheWay(tmp_path, comes_at, 5), *(kind(**plain) for kind in KINDS), GraphRecorder(formats=())]
    model = small()
    dumper = TensorDumper("head", every_n_train_steps=1)
    (message,) = warnings_by(lambda: go(tmp_path, [*callbacks, dumper], model=model))
    assert message.startswith(f"lightning_recorder could not write to {tmp_path}")
    assert "Training continues" in message
    assert_unharmed(model, bare)
    recording, expected = open_recording(tmp_path), [*range(comes_at), 5, 6, 7]
    labels = ["activations", "gradients", "parameters", "watch"]
    assert {label: recording[label].steps for label in labels} == dict.fromkeys(labels, expected)
    assert recording.run.graph is not None
    assert sorted(each.path.name for each in recording.run.dumps) == sorted(
        f"{label}-step={step}.safetensors" for label in ("tensors", *labels[:3]) for step in expected
    )
    assert (tmp_path / "recorder" / "report.html").exists()


def test_an_error_that_returns_at_the_release_is_one_warning(
    bare: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that comes again while the recorder is released costs one warning, and not the run."""
    monkeypatch.setattr("lightning_recorder.outputs.graph_output.GraphPicture", fails)
    models: list[Small] = []
    (message,) = warnings_by(lambda: models.append(trained(tmp_path, [GraphRecorder()])))
    assert message.startswith(
        "GraphRecorder is off for the rest of the run, on_train_batch_end failed: ZeroDivisionError"
    )
    assert_unharmed(models[0], bare)


def test_a_renderer_that_hangs_is_ended(bare: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renderer that hangs is ended after its time limit; the graph remains, without a picture or a process."""
    dot = tmp_path / "bin" / "dot"
    dot.parent.mkdir()
    dot.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\nexec sleep 600\n", encoding="utf-8")
    dot.chmod(0o755)
    monkeypatch.setenv("PATH", str(dot.parent), prepend=os.pathsep)
    models: list[Small] = []
    warned = warnings_by(lambda: models.append(trained(tmp_path, [GraphRecorder(timeout_s=3)])))
    assert len(warned) == 1
    assert "graph.dot and graph.json, without a picture: Graphviz produced no picture, it was stopped" in warned[0]
    assert_unharmed(models[0], bare)
    assert {path.name for path in (tmp_path / "recorder").iterdir()} == {"graph.dot", "graph.json"}
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert pids
    # A killed process disappears when the system has noticed.
    for _ in range(600):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            break
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


class Coverage(Small):
    """Stores the modules that have hooks at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked: list[bool] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.hooked.append(bool(hooks_left(self)))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("value", ["off", "OFF", "0", "false", " no "])
def test_the_environment_switches_all_off(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``LIGHTNING_RECORDER=off``, there are no hooks, files, records or errors, even for a wrong selection."""
    monkeypatch.setenv("LIGHTNING_RECORDER", value)
    sink, model = MemorySink(), Coverage()
    callbacks = [made(kind, sink) for kind in (*KINDS, GraphRecorder)] + [ActivationRecorder("no.such.module")]
    warned = warnings_by(lambda: go(tmp_path, callbacks, model=model, validation=True, enable_checkpointing=False))
    assert warned == []
    assert list(tmp_path.iterdir()) == []
    assert (shown(sink), sink.graphs) == ({}, {})
    assert model.hooked == [False] * STEPS


class Switching(Callback):
    """Disables recorders after one step and enables them after another."""

    def __init__(self, recorders: list[Any], off: int, on: int) -> None:
        self.recorders, self.off, self.on = recorders, off, on

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        for each in self.recorders:
            if trainer.global_step == self.off:
                each.disable()
            if trainer.global_step == self.on:
                each.enable()


@pytest.mark.parametrize("first", [True, False])
def test_a_callback_is_switched_off_and_on_again(first: bool, tmp_path: Path) -> None:
    """From the next batch on, a disabled callback adds no hook and records nothing until it is enabled."""
    sink, model = MemorySink(), Coverage()
    recorders: list[Any] = [kind(every_n_train_steps=1, sinks=[sink]) for kind in KINDS]
    switching = Switching(recorders, 2, 5)
    go(tmp_path, [switching, *recorders] if first else [*recorders, switching], model=model)
    # Before the recorders in the list, it acts on its own batch; after them, on the next batch.
    off = range(2, 5) if first else range(3, 6)
    expected = [step for step in range(STEPS) if step not in off]
    for tag in ("activations/head/rms", "gradients/head/rms", "parameters/head/weight/update_ratio"):
        assert list(sink.scalars[tag]) == expected
    assert model.hooked == [step in expected for step in range(STEPS)]
    assert [each.enabled for each in recorders] == [True] * 3


def test_a_window_lacks_the_steps_that_were_switched_off(tmp_path: Path) -> None:
    """A window contains the steps at which the callback was enabled, and no others."""
    sink = MemorySink()
    recorder = ActivationRecorder("head", every_n_train_steps=1, reduce=4, statistics="count", sinks=[sink])
    go(tmp_path, [Switching([recorder], 2, 5), recorder])
    assert sink.scalars["activations/head/count"] == {3: 2 * 80.0, 7: 3 * 80.0}


def test_a_graph_is_recorded_when_it_is_switched_on(tmp_path: Path) -> None:
    """A disabled graph recorder records the first step after it is enabled."""
    sink = MemorySink()
    recorder = GraphRecorder(formats=(), sinks=[sink])
    go(tmp_path, [Switching([recorder], 0, 3), recorder])
    assert list(sink.graphs["graph"]) == [3]


def test_a_tap_that_cannot_be_put_on_names_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that rejects hooks is named in a warning, and the others are recorded."""
    inner = Tap._guarded

    def guard(self: Tap, name: str, site: Site | None, function: Any, *args: Any) -> None:
        inner(self, name, site, fails if name == "head" and function == self._register else function, *args)

    monkeypatch.setattr(Tap, "_guarded", guard)
    sink = MemorySink()
    recorder = ActivationRecorder(every_n_train_steps=1, sinks=[sink], functions=False)
    warned = warnings_by(lambda: go(tmp_path, [recorder]))
    assert len(warned) == 1
    assert "could not record module 'head'" in warned[0]
    assert {tag.split("/")[1] for tag in sink.scalars} == {"encoder.0", "encoder.1", "encoder.2", "dropout"}
