"""A recorder that recorded or wrote nothing reports the reason, and nothing is reported otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_recorder import (
    ActivationRecorder,
    GradientRecorder,
    GraphRecorder,
    Outputs,
    ParameterRecorder,
    RecorderWarning,
    Schedule,
    TensorDumper,
)
from lightning_recorder.callbacks import base, statistics
from tests.callbacks.models import digits
from tests.callbacks.small import WEIGHTS_ONLY, Small, go, small

Says = Callable[[Callable[[], object]], tuple[list[str], list[str]]]


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Says:
    """Return the messages of a run: warnings and information lines, except those of receipts."""

    def run(function: Callable[[], object]) -> tuple[list[str], list[str]]:
        lines: list[str] = []
        for module in (base, statistics):
            monkeypatch.setattr(module, "rank_zero_info", lines.append)
        monkeypatch.setattr("lightning_recorder.callbacks.graph.rank_zero_info", lines.append)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()
        warned = [str(each.message) for each in caught if each.category is RecorderWarning]
        return warned, [line for line in lines if "modules recorded" not in line]

    return run


def run(folder: Path, *callbacks: Callback, **options: Any) -> Callable[[], object]:
    """Fit one epoch of four steps."""
    return lambda: go(folder, list(callbacks), **{"max_epochs": 1, **options})


NO_CHECKPOINTS = "the run saves no checkpoints. Save checkpoints, or pass"
LATER = "Change the schedule, or train for longer."
NOTHING: dict[str, tuple[Callable[[], Callback], dict[str, Any], str]] = {
    "an interval of 0": (
        lambda: ActivationRecorder(every_n_train_steps=0),
        {},
        "ActivationRecorder recorded nothing: every_n_train_steps=0 records no step. Pass a number of at least 1.",
    ),
    "no validation loader": (
        lambda: ActivationRecorder(schedule=Schedule(stages=["validate"])),
        {},
        (
            "ActivationRecorder recorded nothing: the fit had no validation. "
            "Add a validation loader and a validation_step."
        ),
    ),
    "no validation loader beside the training": (
        lambda: ActivationRecorder(schedule=Schedule(stages=["train", "validate"])),
        {},
        (
            "ActivationRecorder recorded nothing in the validation: the fit had no validation. "
            "Add a validation loader and a validation_step."
        ),
    ),
    "only the sanity check": (
        lambda: ActivationRecorder(schedule=Schedule(stages=["validate"])),
        {"validation": True, "check_val_every_n_epoch": 2},
        (
            "ActivationRecorder recorded nothing: the fit ran no validation except the sanity check "
            "(check_val_every_n_epoch=2, val_check_interval=1.0). Validate more often, or train for longer."
        ),
    ),
    "validation switched off": (
        lambda: ActivationRecorder(schedule=Schedule(stages="validate")),
        {"validation": True, "limit_val_batches": 0},
        "ActivationRecorder recorded nothing: Trainer(limit_val_batches=0) validates nothing. Raise limit_val_batches.",
    ),
    "a window behind the end": (
        lambda: GradientRecorder(schedule=Schedule(step_window=(100, 200))),
        {},
        f"GradientRecorder recorded nothing: steps 0 to 3 lie outside of step_window=(100, 200). {LATER}",
    ),
    "a function that is never true": (
        lambda: ParameterRecorder(schedule=Schedule(when=lambda step: False)),
        {},
        f"ParameterRecorder recorded nothing: when= was not true for any step that was due. {LATER}",
    ),
    "no batches": (
        ActivationRecorder,
        {"limit_train_batches": 0},
        (
            "ActivationRecorder recorded nothing: Trainer(limit_train_batches=0) trains on no batch. "
            "Raise limit_train_batches."
        ),
    ),
    "no steps": (
        GraphRecorder,
        {"max_steps": 0},
        "GraphRecorder recorded no graph: Trainer(max_steps=0) trains on no batch. Raise max_steps.",
    ),
    "a graph of a validation that is not there": (
        lambda: GraphRecorder(stage="validate"),
        {},
        ("GraphRecorder recorded no graph: the fit had no validation. Add a validation loader and a validation_step."),
    ),
    "dumps of tensors without checkpoints": (
        TensorDumper,
        {},
        f"TensorDumper wrote nothing: {NO_CHECKPOINTS} every_n_train_steps or at='steps'.",
    ),
    "dumps of statistics without checkpoints": (
        lambda: ActivationRecorder(outputs=Outputs(dumps="checkpoints")),
        {},
        f"ActivationRecorder dumped nothing: {NO_CHECKPOINTS} outputs=Outputs(dumps='records').",
    ),
    "no tensor to dump": (
        lambda: TensorDumper("encoder.0", tensors="output_gradients", at="steps"),
        {},
        ("TensorDumper wrote no tensors: the selected modules produced none of the requested tensors. Select others."),
    ),
    "no step to dump": (
        lambda: TensorDumper(schedule=Schedule(step_window=(50, 60))),
        {},
        f"TensorDumper wrote nothing: steps 0 to 3 lie outside of step_window=(50, 60). {LATER}",
    ),
}


@pytest.mark.parametrize("case", NOTHING)
def test_a_recorder_that_brought_nothing_says_why(case: str, says: Says, tmp_path: Path) -> None:
    """One warning names the recorder, the reason and the fix."""
    make, options, message = NOTHING[case]
    assert says(run(tmp_path, make(), **options)) == ([message], [])


def test_the_interval_of_the_trainer_may_be_what_records_nothing(says: Says, tmp_path: Path) -> None:
    """With ``Trainer(log_every_n_steps=0)``, the message names that argument."""
    trainer = Trainer(default_root_dir=tmp_path, max_epochs=1, log_every_n_steps=0, logger=False, **QUIET)
    trainer.callbacks.append(ActivationRecorder())  # type: ignore[attr-defined]  # set in Trainer.__init__
    message = (
        "ActivationRecorder recorded nothing: Trainer(log_every_n_steps=0) sets the interval, and every_n_train_steps "
        "is not given. Give every_n_train_steps."
    )
    assert says(lambda: trainer.fit(small(), digits())) == ([message], [])


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def test_a_reason_that_the_user_chose_is_logged_without_a_warning(says: Says, tmp_path: Path) -> None:
    """A disabled recorder and the environment switch are reported by one information line each."""
    recorder = ActivationRecorder()
    recorder.disable()
    assert says(run(tmp_path, recorder)) == ([], ["ActivationRecorder recorded nothing: it is disabled"])


def test_the_switch_is_logged_once(says: Says, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the environment switches recording off, only the first recorder reports it."""
    monkeypatch.setenv("LIGHTNING_RECORDER", "off")
    line = "LIGHTNING_RECORDER=off in the environment: nothing is recorded"
    assert says(run(tmp_path, ActivationRecorder(), GraphRecorder(), TensorDumper())) == ([], [line])


def test_a_disabled_recorder_has_no_receipt(tmp_path: Path) -> None:
    """While nothing is recorded, the receipt has the reason alone, and no modules as bypassed or uncalled."""
    recorder = ActivationRecorder(every_n_train_steps=1)
    recorder.disable()
    go(tmp_path, [recorder], max_epochs=1)
    receipt = json.loads((tmp_path / "recorder" / "receipt.json").read_text())
    assert ["modules" in each for each in receipt.values()] == [False]


def test_a_fast_dev_run_says_that_it_writes_nothing(says: Says, tmp_path: Path) -> None:
    """The recorders report it, and each callback that writes files reports that it wrote none."""
    callbacks = (ActivationRecorder(), GraphRecorder(formats=[]), TensorDumper())
    warned, lines = says(run(tmp_path, *callbacks, fast_dev_run=True))
    assert warned == []
    assert sorted(lines) == [
        "GraphRecorder: fast_dev_run writes no files, the graph is in the callback's graph alone",
        "TensorDumper wrote nothing: fast_dev_run writes no files",
    ]


def test_the_receipt_of_a_fast_dev_run_says_that_no_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receipt line ends with the statement that no files are written."""
    lines: list[str] = []
    monkeypatch.setattr(statistics, "rank_zero_info", lines.append)
    go(tmp_path, [ActivationRecorder()], fast_dev_run=True)
    (line,) = lines
    assert line.endswith(" ms in step 0; fast_dev_run writes no files")


def test_an_interval_alone_dumps_at_steps(tmp_path: Path) -> None:
    """A dumper with an interval but without ``at`` writes at these steps."""
    go(tmp_path, [TensorDumper("head", every_n_train_steps=2)], max_epochs=1)
    names = sorted(path.name for path in (tmp_path / "recorder" / "dumps").glob("*.safetensors"))
    assert names == [f"tensors-step={step}.safetensors" for step in (0, 1, 3)]


@pytest.mark.parametrize(
    ("options", "at"),
    [
        ({}, ("checkpoints",)),
        ({"every_n_train_steps": 5}, ("steps",)),
        ({"schedule": Schedule(first_n_steps=5)}, ("steps",)),
        ({"schedule": Schedule(step_window=(1, 2))}, ("steps",)),
        ({"schedule": Schedule(every_n_epochs=2)}, ("epochs",)),
        ({"every_n_train_steps": 5, "schedule": Schedule(every_n_epochs=2)}, ("steps",)),
        ({"at": "checkpoints", "every_n_train_steps": 5}, ("checkpoints",)),
        ({"every_n_train_steps": 5, "outputs": Outputs(dump_when="builtins.bool")}, ()),
    ],
    ids=str,
)
def test_when_dumps_are_written_by_default(options: dict[str, Any], at: tuple[str, ...]) -> None:
    """Arguments about steps imply ``"steps"``; ``at`` and ``dump_when`` take precedence."""
    assert TensorDumper(**options).at == at


class Interrupted(Small):
    """Raises KeyboardInterrupt before its first step ends."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        raise KeyboardInterrupt


class Insane(Small):
    """Fails in the sanity check."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        raise ValueError("not this one")


def every_kind(**options: Any) -> list[Callback]:
    """Return a callback of each kind that records something in any fit."""
    return [
        ActivationRecorder(schedule=Schedule(stages=["train", "validate", "test", "predict"]), **options),
        GradientRecorder(**options),
        ParameterRecorder(**options),
        GraphRecorder(formats=[]),
        TensorDumper(at="steps"),
        TensorDumper(name="odd", outputs=Outputs(dump_when=lambda seen: False)),
    ]


def test_a_run_that_records_says_nothing_more(says: Says, tmp_path: Path) -> None:
    """After a fit, a validation and a test by one trainer, there are no further messages."""

    def all_of_them() -> None:
        trainer = go(tmp_path, every_kind(), validation=True, max_epochs=1)
        trainer.validate(small(), digits(1), verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(small(), digits(2), digits(1))

    assert says(all_of_them) == ([], [])


def test_a_trainer_that_only_validates_says_nothing(says: Says, tmp_path: Path) -> None:
    """Training recorders are silent in a validation, and validation recorders record it."""
    trainer = Trainer(default_root_dir=tmp_path, logger=False, callbacks=every_kind(), **QUIET)
    assert says(lambda: trainer.validate(small(), digits(1), verbose=False)) == ([], [])


@pytest.mark.parametrize(("kind", "error"), [(Interrupted, SystemExit), (Insane, ValueError)])
def test_a_fit_that_fails_says_nothing(
    kind: type[Small], error: type[BaseException], says: Says, tmp_path: Path
) -> None:
    """After an exception, missing records are not reported."""

    def failing() -> None:
        with pytest.raises(error):
            go(tmp_path, every_kind(), model=kind(), validation=True)

    assert says(failing) == ([], [])


def test_a_fit_that_had_ended_before_says_so_without_a_warning(says: Says, tmp_path: Path) -> None:
    """A run resumed from its final checkpoint trains on nothing and logs one information line."""
    go(tmp_path, every_kind(), max_epochs=1).save_checkpoint(tmp_path / "end.ckpt")
    trainer = Trainer(default_root_dir=tmp_path, max_epochs=1, logger=False, callbacks=every_kind(), **QUIET)
    warned, lines = says(lambda: trainer.fit(small(), digits(), ckpt_path=tmp_path / "end.ckpt", **WEIGHTS_ONLY))
    why = "recorded nothing: the run had ended before, so this fit trained on no batch"
    assert warned == []
    assert f"ActivationRecorder {why}" in lines


def test_a_resumed_fit_names_the_steps_that_it_ran(says: Says, tmp_path: Path) -> None:
    """A resumed run without a due step names the steps that it ran."""
    go(tmp_path, [ActivationRecorder(every_n_train_steps=50)], max_epochs=1).save_checkpoint(tmp_path / "end.ckpt")
    again = run(tmp_path, ActivationRecorder(every_n_train_steps=50), max_epochs=2, ckpt=tmp_path / "end.ckpt")
    message = f"ActivationRecorder recorded nothing: none of steps 4 to 7 was due with every_n_train_steps=50. {LATER}"
    assert says(again) == ([message], [])


def test_an_evaluation_without_a_tensor_says_so(says: Says, tmp_path: Path) -> None:
    """If the selected modules are not called in the validation, this is reported."""

    class Training(Small):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.encoder(x)
            logits: Tensor = self.head(hidden) if self.training else hidden
            return logits

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self(batch[0])

    message = (
        "ActivationRecorder recorded nothing: the selected modules produced no tensor in the validation. Select others."
    )
    recorder = ActivationRecorder("head", schedule=Schedule(stages="validate"))
    assert says(run(tmp_path, recorder, model=Training(), validation=True)) == ([message], [])


def test_a_warning_is_shown_as_often_as_without_recorders(tmp_path: Path) -> None:
    """Python shows a warning once, unless something changes the filters in between, as a part of torch does."""
    code = """
import sys, warnings
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_recorder import default_recorders

class Net(BoringModel):
    def training_step(self, batch, batch_idx):
        warnings.warn("shown once", UserWarning)
        return super().training_step(batch, batch_idx)

callbacks = default_recorders(every_n_train_steps=1)
Trainer(max_steps=3, default_root_dir=sys.argv[1], callbacks=callbacks, enable_progress_bar=False).fit(Net())
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stderr.count("UserWarning: shown once") == 1
