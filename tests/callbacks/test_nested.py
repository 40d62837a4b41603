"""Runs of other trainers inside a recorded run, with the same callback objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_recorder import (
    ActivationRecorder,
    GraphRecorder,
    MemorySink,
    Outputs,
    RecorderWarning,
    Schedule,
    TensorDumper,
)
from tests.callbacks.models import Classifier, digits, fit, hooks_left

FUNCTIONS: tuple[Literal["fit", "validate", "test", "predict"], ...] = ("fit", "validate", "test", "predict")
STAGES: tuple[Literal["train", "validate", "test", "predict"], ...] = ("train", "validate", "test", "predict")


class Evaluated(Classifier):
    @override
    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self(batch[0])

    @override
    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]  # a module's call is not annotated


class Inner(Callback):
    """Runs another trainer with the same callbacks after the third batch."""

    def __init__(self, function: str, callbacks: list[Callback], folder: Path, *, fails: bool = False) -> None:
        self.function, self.callbacks, self.folder, self.fails = function, callbacks, folder, fails

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == 3:
            inner = Trainer(
                max_epochs=1,
                accelerator="cpu",
                callbacks=[*self.callbacks, *([Failing()] if self.fails else [])],
                default_root_dir=self.folder,
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            try:
                getattr(inner, self.function)(Evaluated(), digits(2))
            except ZeroDivisionError:
                assert self.fails


class Failing(Callback):
    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        raise ZeroDivisionError


def recorders(sink: MemorySink) -> list[Callback]:
    return [
        ActivationRecorder(
            every_n_train_steps=1,
            sinks=[sink],
            schedule=Schedule(stages=STAGES),
            outputs=Outputs(curves="all", plots=False),
        ),
        GraphRecorder(formats=(), stage="validate"),
        TensorDumper("head", at="steps", every_n_train_steps=1),
    ]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_inner_run_does_not_end_the_outer_recording(function: str, fails: bool, tmp_path: Path) -> None:
    """The outer run is recorded to its end, the inner one is not, and each recorder warns once."""
    sinks = MemorySink(), MemorySink()
    alone = recorders(sinks[0])
    fit(Evaluated(), tmp_path / "alone", alone, logger=False, validation=digits(2))
    both = recorders(sinks[1])
    inner = Inner(function, both, tmp_path / "inner", fails=fails)
    model = Evaluated()
    with pytest.warns(RecorderWarning) as warned:
        fit(model, tmp_path / "outer", [*both, inner], logger=False, validation=digits(2))
    expected = {
        "ActivationRecorder": FUNCTIONS,
        "GraphRecorder": ("fit", "validate"),
        "TensorDumper": ("fit",),
    }
    assert [str(each.message) for each in warned if each.category is RecorderWarning] == [
        f"{kind} does not record the {function} of another Trainer inside the run that it records: give the inner "
        f"Trainer its own {kind}"
        for kind, functions in expected.items()
        if function in functions
    ]
    written = [{tag: list(steps) for tag, steps in sink.scalars.items()} for sink in sinks]
    assert written[0] == written[1]
    assert list(sinks[1].scalars["activations/head/rms"]) == [0, 1, 2, 3, 4, 5]
    files = [
        sorted(path.relative_to(tmp_path / name).as_posix() for path in (tmp_path / name).rglob("*.*"))
        for name in ("alone", "outer")
    ]
    assert files[0] == files[1]
    assert "recorder/graph.json" in files[1]
    assert not list((tmp_path / "inner").rglob("recorder"))
    assert hooks_left(model) == []


def test_a_checkpoint_of_an_inner_run_has_nothing_of_the_outer_one(tmp_path: Path) -> None:
    """Saving and resuming an inner run does not affect the state of the outer recording."""
    sink = MemorySink()
    recorder = ActivationRecorder("head", every_n_train_steps=1, reduce=4, statistics=["count"], sinks=[sink])
    saved: list[list[str]] = []

    class Resuming(Callback):
        @override
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            if trainer.global_step == 2:
                for epochs, path in (1, None), (2, tmp_path / "inner.ckpt"):
                    inner = Trainer(
                        max_epochs=epochs,
                        accelerator="cpu",
                        callbacks=[recorder],
                        logger=False,
                        enable_checkpointing=False,
                        enable_progress_bar=False,
                        enable_model_summary=False,
                        default_root_dir=tmp_path,
                    )
                    inner.fit(Classifier(), digits(2), ckpt_path=path)
                    inner.save_checkpoint(tmp_path / "inner.ckpt")
                    saved.append(list(inner._checkpoint_connector.dump_checkpoint()["callbacks"]))

    with pytest.warns(RecorderWarning, match="does not record the fit of another Trainer"):
        fit(Classifier(), tmp_path, [recorder, Resuming()], logger=False)
    assert saved == [[], []]
    assert sink.scalars["activations/head/count"] == {3: 4 * 8 * 10, 5: 2 * 8 * 10}


def test_the_same_callback_in_a_later_run_is_recorded(tmp_path: Path) -> None:
    """A run that ended or failed does not count as the outer run of the next one."""
    recorder = ActivationRecorder("head", every_n_train_steps=1)
    with pytest.raises(ZeroDivisionError):
        fit(Classifier(), tmp_path / "failed", [recorder, Failing()], logger=False)
    for run in ("second", "third"):
        fit(Classifier(), tmp_path / run, [recorder], logger=False)
        assert recorder.latest_step == 5
