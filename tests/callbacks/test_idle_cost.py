"""The overhead of a recorder on steps that it does not record."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

import lightning_recorder
from lightning_recorder import (
    ActivationRecorder,
    GradientRecorder,
    GraphRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    Schedule,
    StepWatch,
    TensorDumper,
    open_recording,
)
from lightning_recorder.callbacks import watched_samples
from lightning_recorder.callbacks.guard import BATCH_HOOKS
from tests.callbacks.models import digits, fit
from tests.callbacks.small import small
from tests.watch.late import arrive_late

PACKAGE = str(Path(lightning_recorder.__file__).parent)
UNWATCHED = Outputs(findings=False)
BATCHES = range(23, 30)
"""The counted batches, after the background work for the first step and the values of the first 20 steps."""


class CallCounter(Callback):
    """Counts the calls of the package's functions in some batches. Comes first in the list of callbacks."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.train = 0
        self.validation = 0

    def count(self, batch_idx: int, kind: str) -> None:
        # The picture of the graph is drawn in the meantime. The hooks are hidden after the first batch that finds it.
        if batch_idx == BATCHES.start and getattr(self.recorder, "_output", None) is not None:
            self.recorder._show(None)

        def see(frame: FrameType, event: str, argument: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
                setattr(self, kind, getattr(self, kind) + 1)

        if batch_idx == BATCHES.start:
            # A collection would count the finalizers of the recorders of earlier tests.
            gc.disable()
            sys.setprofile(see)
        elif batch_idx == BATCHES.stop:
            sys.setprofile(None)
            gc.enable()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.count(batch_idx, "train")

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.count(batch_idx, "validation")


@pytest.mark.parametrize(
    ("make", "train", "validation"),
    [
        (partial(ActivationRecorder, outputs=UNWATCHED), 8, 4),
        (partial(GradientRecorder, outputs=UNWATCHED), 8, 4),
        (partial(ParameterRecorder, outputs=UNWATCHED), 8, 4),
        # 55 of the calls, and those of the first validation, identify samples. 10 of them end after 64 batches, the
        # others if they take 0.1 % of the time.
        (StepWatch, 88, 35),
        (TensorDumper, 6, 0),
        (GraphRecorder, 4, 0),  # hides its hooks once
    ],
)
@pytest.mark.parametrize("logger", [False, True])
def test_a_step_that_is_not_recorded_costs_few_calls(
    make: Callable[[], Any], train: int, validation: int, logger: bool, tmp_path: Path
) -> None:
    """On an unrecorded batch, a recorder calls at most the stated number of functions."""
    recorder = make()
    counter = CallCounter(recorder)
    options = {"log_every_n_steps": 1000, "num_sanity_val_steps": 0, "logger": logger}
    model = small()
    try:
        fit(model, tmp_path, [counter, recorder], loader=digits(32), validation=digits(32), **options)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert counter.train <= train * len(BATCHES)
    assert counter.validation <= validation * len(BATCHES)


@pytest.mark.parametrize("late", [0, 2])
def test_a_watched_step_costs_few_calls(late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the search in samples, a watched step takes 30 calls, and 38 where its values arrive some steps later."""
    if late:
        arrive_late(monkeypatch, late)
    monkeypatch.setattr(watched_samples, "_FIRST_BATCHES", 4)
    monkeypatch.setattr(watched_samples, "_SHARE", 0.0)
    watch = StepWatch()
    counter = CallCounter(watch)
    try:
        fit(small(), tmp_path, [counter, watch], loader=digits(32), log_every_n_steps=1000, logger=False)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert 0 < counter.train <= (38 if late else 30) * len(BATCHES)


class Renamed(Callback):
    """Changes a setting of a recorder before the fit and reads its key in each step."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.keys: set[str] = set()
        self.is_fixed = False

    def on_train_batch_end(self, *args: Any) -> None:
        self.keys.add(self.recorder.state_key)
        self.is_fixed |= "state_key" in vars(self.recorder)


@pytest.mark.parametrize("kind", [ActivationRecorder, ParameterRecorder, GraphRecorder])
def test_the_state_key_follows_the_settings_outside_of_a_run(kind: Any, tmp_path: Path) -> None:
    """In all steps of a fit and in copies made there, the key is that of the settings at the start of the fit."""
    recorder = kind(name="first")
    before = recorder.state_key
    recorder.name = "second"
    watching = Renamed(recorder)
    fit(small(), tmp_path, [recorder, watching], logger=False)
    assert watching.is_fixed
    assert watching.keys == {kind(name="second").state_key} != {before}
    recorder.name = "first"
    assert recorder.state_key == before


def visible(recorder: Callback) -> set[str]:
    """Return the names of the hooks of a training batch that Lightning would call."""
    return {name for name in BATCH_HOOKS if "validation" not in name and callable(getattr(recorder, name))}


class Watching(Callback):
    """Calls a function at the end of each batch of training, with its index."""

    def __init__(self, function: Callable[[int], object]) -> None:
        self.function = function

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.function(batch_idx)


def test_lightning_skips_the_hooks_that_a_recorder_does_not_need(tmp_path: Path) -> None:
    """While no step is due, a recorder has the hook at the start alone. After the fit, and in copies, it has all."""
    kinds: list[Any] = [ActivationRecorder, GradientRecorder, ParameterRecorder]
    recorders = [kind(every_n_train_steps=1000) for kind in kinds]
    watch, graph = StepWatch(), GraphRecorder()
    seen: list[list[set[str]]] = []
    copies: list[Callback] = []

    def see(batch_idx: int) -> None:
        if batch_idx == 3:
            graph._show(None)
        if batch_idx >= 5:
            seen.append([visible(each) for each in (*recorders, graph, watch)])
            copies.extend(map(copy.copy, recorders))

    fit(small(), tmp_path, [*recorders, watch, graph, Watching(see)], loader=digits(8))
    start = {"on_train_batch_start"}
    of_watch = start | {"on_before_backward", "on_before_optimizer_step", "on_train_batch_end"}
    assert seen == [[start, start, start, set(), of_watch]] * 3
    assert all(len(visible(each)) == 6 for each in (*recorders, graph, watch, *copies))


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"every_n_train_steps": 5},
        {"every_n_train_steps": 2},
        {"every_n_train_steps": 6, "schedule": Schedule(first_n_steps=2)},
        {"every_n_train_steps": 4, "schedule": Schedule(step_window=(6, 14))},
        {"every_n_train_steps": 4, "schedule": Schedule(every_n_epochs=2)},
        {"every_n_train_steps": 3, "schedule": Schedule(when=lambda step: step % 2)},
        {"every_n_train_steps": 5, "reduce": 10},
        {"every_n_train_steps": 5, "reduce": "epoch"},
    ],
    ids=["5", "2", "first steps", "window", "epochs", "when", "reduce 10", "reduce epoch"],
)
def test_no_record_is_lost_with_hidden_hooks(
    options: dict[str, Any], accumulated: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same steps are recorded as by a recorder that hides nothing."""

    def steps(folder: str) -> list[int]:
        sink = MemorySink()
        recorder = ActivationRecorder("head", sinks=[sink], **options)
        batch = next(iter(digits(1)))
        # Lightning calls no hook at the start of a batch that is None, and counts its step nevertheless.
        loader: Any = DataLoader(range(9 * accumulated), collate_fn=lambda rows: None if rows == [3] else batch)  # type: ignore[arg-type]  # a sequence is a dataset
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "train_dataloader yielded None")
            fit(
                small(), tmp_path / folder, [recorder], loader=loader, max_epochs=2, accumulate_grad_batches=accumulated
            )
        return list(sink.scalars["activations/head/rms"])

    hidden = steps("hidden")
    monkeypatch.setattr(ActivationRecorder, "_hide_hooks", lambda *args: None)
    assert hidden == steps("shown") != []


def recorded_steps(folder: Path) -> list[int]:
    return [int(step) for step in open_recording(folder).run["activations"]["head"].steps]


def test_a_step_is_recorded_on_request(tmp_path: Path) -> None:
    """``record_step`` is not missed while hooks are hidden."""
    recorder = ActivationRecorder("head", every_n_train_steps=100)
    request = Watching(lambda batch_idx: recorder.record_step(9) if batch_idx == 4 else None)
    fit(small(), tmp_path, [recorder, request], loader=digits(12))
    assert recorded_steps(tmp_path) == [0, 9]


def test_hooks_of_a_subclass_and_of_an_instance_are_always_called(tmp_path: Path) -> None:
    """Only hooks of this package are hidden, and those that the base class of Lightning does not have."""
    called: list[str] = []

    class Other(Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            called.append("backward")

    class Mine(ActivationRecorder, Other):
        on_before_optimizer_step = None  # type: ignore[assignment]  # Lightning skips it

        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            super().on_train_batch_end(*args, **kwargs)
            called.append("end")

        functools.update_wrapper(on_train_batch_end, ActivationRecorder.on_train_batch_end)

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            called.append("after")

    recorder = Mine("head", every_n_train_steps=100)
    recorder.on_before_zero_grad = lambda *args: called.append("zero")  # type: ignore[method-assign]
    fit(small(), tmp_path, [recorder], loader=digits(6))
    assert {name: called.count(name) for name in called} == dict.fromkeys(("end", "after", "zero", "backward"), 6)
    assert recorded_steps(tmp_path) == [0]


def test_hooks_may_be_replaced_at_the_start_of_a_training(tmp_path: Path) -> None:
    """A callback that measures the hooks of all others finds functions to wrap."""
    called: list[str] = []

    class Instrument(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for each in trainer.callbacks:
                for name in BATCH_HOOKS:
                    setattr(each, name, self.counted(name, getattr(each, name)))

        def counted(self, name: str, hook: Callable[..., object]) -> Callable[..., object]:
            def count(*args: Any, **kwargs: Any) -> None:
                called.append(name)
                hook(*args, **kwargs)

            return count

    recorders = [ActivationRecorder("head", every_n_train_steps=3), GraphRecorder()]
    fit(small(), tmp_path, [*recorders, Instrument()], loader=digits(6))
    assert recorded_steps(tmp_path) == [0, 2, 5]
    assert called.count("on_train_batch_end") == 6 * 4


class Forwarding(Callback):
    """Calls each hook of another callback, which is not in the list of the trainer."""

    def __init__(self, inner: Callback) -> None:
        self.inner = inner

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__(name)
        return getattr(self.inner, name) if name.startswith("on_") or name in ("setup", "teardown") else own


def test_a_callback_that_forwards_hooks_finds_all_of_them(tmp_path: Path) -> None:
    """Nothing is hidden from a callback that calls the hooks itself."""
    recorder = ActivationRecorder("head", every_n_train_steps=3, outputs=UNWATCHED)
    fit(small(), tmp_path, [Forwarding(recorder)], loader=digits(6))
    assert recorded_steps(tmp_path) == [0, 2, 5]
