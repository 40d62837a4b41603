"""A run that resumes from a checkpoint records the same as it would without the interruption."""

from __future__ import annotations

import copy
import functools
import pickle
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from typing_extensions import override

from lightning_recorder import (
    ActivationRecorder,
    GradientRecorder,
    GraphRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    open_recording,
)
from lightning_recorder.reductions import Change, Norms, statistics
from lightning_recorder.reductions.kernels import fused
from tests import forks
from tests.callbacks.models import digits, hooks_left
from tests.callbacks.small import BATCHES, EPOCHS, WEIGHTS_ONLY, Resumable, Small, go, shown, small, warnings_by

# The resumed run does not have the callback that saves the checkpoints.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")

# Pictures take most of the time of a short fit, and no checkpoint holds anything of them.
QUIET = Outputs(curves="all", plots=False, dumps=False)


def recorders(sink: MemorySink, **options: Any) -> list[Callback]:
    """Return one recorder of each kind, all with the same sink."""
    options = {"every_n_train_steps": 1, "sinks": [sink], "outputs": QUIET, **options}
    return [
        ActivationRecorder(**options),
        GradientRecorder(**options),
        ParameterRecorder(parts=["values", "updates"], **options),
    ]


def every_step(folder: Path) -> ModelCheckpoint:
    """Return a callback that keeps a checkpoint of each optimizer step, such as ``step=3.ckpt``."""
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "step": ({"outputs": Outputs(curves="all", dumps=False)}, {}),  # with pictures, like any run by default
    "every-third": ({"every_n_train_steps": 3, "statistics": ["mean", "quantile_0.5"]}, {}),
    "window": ({"reduce": 3}, {}),
    "window-of-some": (
        {"reduce": 5, "every_n_train_steps": 2, "outputs": Outputs(histograms=20, plots=False, dumps=False)},
        {},
    ),
    "epoch": ({"reduce": "epoch"}, {}),
    "accumulated": ({"reduce": 3}, {"accumulate_grad_batches": 2}),
    "change": ({"extra": [Change()]}, {}),
    "change-window": ({"extra": [Norms(), Change()], "reduce": 3}, {}),
}
"""The settings of the recorders and of the trainer."""

EVERY_STEP = ("window", "change-window")
"""The cases that resume at every step. The others resume at every second one and between the epochs."""

BY_TORCH = ("change-window", "accumulated")
"""The cases that also run without the compiled function."""


def steps_of(case: str) -> int:
    """Return the number of optimizer steps in a run of the case."""
    return EPOCHS * BATCHES // int(CASES[case][1].get("accumulate_grad_batches", 1))


@pytest.fixture
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select the compiled function, or the torch operations that run on any device, to compute the statistics."""
    by = str(request.param)
    if not fused.prepare(wait=True) and by == "compiled":
        pytest.skip("there is no C compiler")
    if by == "torch":
        monkeypatch.setattr(fused._Loaded, "kernel", None)
        monkeypatch.setattr(statistics, "_QUICK", ())
    return by


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[MemorySink, Path]]:
    """Return the records of an uninterrupted run of a case and the folder of its checkpoints."""

    @functools.cache
    def make(case: str, computed_by: str) -> tuple[MemorySink, Path]:
        folder, sink = tmp_path_factory.mktemp(f"{case}-{computed_by}"), MemorySink()
        recording, training = CASES[case]
        go(folder, [*recorders(sink, **recording), every_step(folder)], enable_checkpointing=True, **training)
        return sink, folder

    return make


@pytest.mark.parametrize(
    ("computed_by", "case", "step"),
    [
        (by, case, step)
        for by, cases in (("compiled", tuple(CASES)), ("torch", BY_TORCH))
        for case in cases
        for step in range(1, steps_of(case) + 1)
        if case in EVERY_STEP or step % 2 or step == BATCHES
    ],
    indirect=["computed_by"],
)
def test_a_resumed_run_records_what_the_whole_one_does(
    whole: Callable[[str, str], tuple[MemorySink, Path]], computed_by: str, case: str, step: int, tmp_path: Path
) -> None:
    """From the resumed step on, every scalar and histogram is bitwise that of the whole run."""
    expected, folder = whole(case, computed_by)
    sink = MemorySink()
    recording, training = CASES[case]
    go(tmp_path, recorders(sink, **recording), ckpt=folder / f"step={step}.ckpt", **training)
    assert shown(sink, step) == shown(expected, step)
    assert_part(sink, expected)


def assert_part(sink: MemorySink, expected: MemorySink) -> None:
    """Check that all output of a sink is also in the other one."""
    found, whole = shown(sink), shown(expected)
    assert found == {key: value for key, value in whole.items() if key in found}


class Saving(Callback):
    """Saves a checkpoint in one of the trainer's hooks at the batch with the given number."""

    def __init__(self, folder: Path, hook: str, batch: int) -> None:
        self.path = folder / "saved.ckpt"
        self.batch = batch
        self.hook = hook

    def _save(self, trainer: Trainer, hook: str) -> None:
        if hook == self.hook and trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.batch:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._save(trainer, "on_train_batch_end")

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        self._save(trainer, "on_validation_end")

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        self._save(trainer, "on_train_epoch_end")


@pytest.mark.parametrize("step", [3, BATCHES])
def test_the_learning_rate_of_an_unfinished_record_is_kept(step: int, tmp_path: Path) -> None:
    """The record of an epoch has the settings of the optimizer, even if no step follows after the checkpoint."""
    make = functools.partial(ParameterRecorder, every_n_train_steps=1, reduce="epoch", outputs=QUIET)
    go(tmp_path / "whole", [make(), every_step(tmp_path)], enable_checkpointing=True)
    go(tmp_path / "resumed", [make()], ckpt=tmp_path / f"step={step}.ckpt")
    whole, resumed = (open_recording(tmp_path / name)["parameters"] for name in ("whole", "resumed"))
    assert resumed.steps == whole.steps
    rates = [each["head", "weight"].statistic("learning_rate").tolist() for each in (whole, resumed)]
    assert rates[0] == rates[1]
    assert all(rate > 0 for rate in rates[0])
    assert [resumed.about(each)["groups"] for each in whole.steps] == [
        whole.about(each)["groups"] for each in whole.steps
    ]


@pytest.mark.parametrize("reduce", ["step", 3, "epoch"])
@pytest.mark.parametrize(
    ("hook", "batch"), [("on_validation_end", 2), ("on_validation_end", 4), ("on_train_epoch_end", 4)]
)
def test_a_checkpoint_between_batches_resumes(hook: str, batch: int, reduce: Any, tmp_path: Path) -> None:
    """A checkpoint from a validation or the end of an epoch loses nothing and counts nothing twice."""
    expected, sink = MemorySink(), MemorySink()
    saving = Saving(tmp_path, hook, batch)
    options: dict[str, Any] = {"validation": True, "val_check_interval": 2, "num_sanity_val_steps": 0}
    go(tmp_path, [*recorders(expected, reduce=reduce), saving], **options)
    go(tmp_path, recorders(sink, reduce=reduce), ckpt=saving.path, **options)
    assert shown(sink, batch) == shown(expected, batch)
    assert_part(sink, expected)


def test_a_checkpoint_amid_accumulated_batches_resumes(tmp_path: Path) -> None:
    """Accumulated batches from before and after the checkpoint are in one record."""
    expected, sink = MemorySink(), MemorySink()
    saving = Saving(tmp_path, "on_train_batch_end", 3)
    go(tmp_path, [*recorders(expected), saving], accumulate_grad_batches=4)
    go(tmp_path, recorders(sink), ckpt=saving.path, accumulate_grad_batches=4, max_epochs=1)
    # Lightning does not save accumulated gradients, so the parameter records of the step differ.
    of_batches = {key: each for key, each in shown(sink).items() if not key[0].startswith("parameters/")}
    assert {step for _, step in of_batches} == {0}
    assert of_batches == {key: shown(expected)[key] for key in of_batches}


@pytest.mark.parametrize("reduce", [3, 5])
def test_a_partial_window_is_written_and_kept(reduce: int, tmp_path: Path) -> None:
    """An open window at the end of a fit is written, and a run with more epochs writes the complete window."""
    expected, first, sink = MemorySink(), MemorySink(), MemorySink()
    options: dict[str, Any] = {"reduce": reduce, "statistics": ("count", "mean")}
    go(tmp_path, recorders(expected, **options))
    trainer = go(tmp_path, recorders(first, **options), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    go(tmp_path, recorders(sink, **options), ckpt=tmp_path / "end.ckpt")
    batch = 8 * 10
    written = {3: {2: 3 * batch, 3: batch}, 5: {3: 4 * batch}}[reduce]
    assert first.scalars["activations/head/count"] == written
    assert shown(sink) == shown(expected, BATCHES)


def test_a_second_fit_of_the_trainer_continues(tmp_path: Path) -> None:
    """A second fit without a checkpoint continues the window in which the first fit ended."""
    sink, model = MemorySink(), small()
    recorder = ActivationRecorder("head", every_n_train_steps=1, reduce=3, statistics="count", sinks=[sink])
    trainer = go(tmp_path, [recorder], model=model, max_epochs=1)
    trainer.fit_loop.max_epochs = EPOCHS
    trainer.fit(model, Resumable())
    # The part of the window of steps 3 to 5 at the end of the first fit is also a record.
    assert sink.scalars["activations/head/count"] == {2: 240.0, 3: 80.0, 5: 240.0, 7: 160.0}


def saved_by(folder: Path, callbacks: list[Callback], **options: Any) -> Path:
    """Return a checkpoint of a run of one epoch."""
    trainer = go(folder, callbacks, max_epochs=1, **options)
    trainer.save_checkpoint(folder / "saved.ckpt")
    return folder / "saved.ckpt"


def test_checkpoints_hold_plain_data_alone(tmp_path: Path) -> None:
    """A checkpoint in the middle of a window can be loaded without running pickled code."""
    path = saved_by(tmp_path, [*recorders(MemorySink(), reduce=5, extra=[Change()]), GraphRecorder(formats=())])
    saved = torch.load(path, weights_only=True)
    states = [state for state in saved["callbacks"].values() if "banks" in state.get("states", {})]
    # Statistics, the extra reduction, scores of heads and of experts, and for activations the spread along the batch.
    assert [len(state["states"]["banks"]) for state in states] == [5, 4, 4]
    assert [state["open_steps"] for state in states] == [BATCHES] * 3


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, {}),
        ({"reduce": 3}, {"reduce": 2}),
        ({"extra": [Norms()]}, {}),
        ({}, {"extra": [Norms()]}),
        ({"statistics": ["mean", "quantile_0.5"]}, {"statistics": ["mean", "quantile_0.25"]}),
        (
            {"outputs": Outputs(histograms=10, plots=False, dumps=False)},
            {"outputs": Outputs(histograms=20, plots=False, dumps=False)},
        ),
        ({"tensors": "inputs"}, {}),
        ({}, {"per_call": True}),
        ({"names": "head"}, {}),
        ({"every_n_train_steps": 2}, {}),
        ({"name": "other"}, {}),
    ],
    ids=str,
)
def test_a_state_of_other_settings_is_one_warning(
    before: dict[str, Any] | None, after: dict[str, Any], tmp_path: Path
) -> None:
    """A checkpoint without the callback, or with other settings, gives one warning, and recording starts anew."""
    plain = {"every_n_train_steps": 1, "outputs": QUIET}
    path = saved_by(tmp_path, [] if before is None else [ActivationRecorder(**{**plain, **before})])
    sink, model = MemorySink(), small()
    warned = warnings_by(
        lambda: go(tmp_path, [ActivationRecorder(**{**plain, "sinks": [sink], **after})], model=model, ckpt=path)
    )
    assert len(warned) == 1
    assert warned[0].startswith("ActivationRecorder starts without saved statistics: ")
    expected = [5, 7] if after.get("reduce") else [4, 5, 6, 7]
    assert list(sink.scalars[f"activations/head/{after.get('statistics', ['rms'])[0]}"]) == expected
    assert len(model.losses) == BATCHES


def spoil(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the state of each statistics recorder in a checkpoint."""
    saved = torch.load(path, weights_only=True)
    for key, state in saved["callbacks"].items():
        if key.startswith("ActivationRecorder"):
            change(state)
    torch.save(saved, path)


SPOILT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "older": lambda state: state.update(version=0),
    "newer": lambda state: state.update(version=99),
    "no version": lambda state: state.pop("version"),
    "strange version": lambda state: state.update(version=[1]),
    "no settings": lambda state: state.pop("settings"),
    "no epoch": lambda state: state.pop("epoch"),
    "epoch of a string": lambda state: state.update(epoch="four"),
    "nonfinite of a number": lambda state: state.update(nonfinite=3),
    "nonfinite of numbers": lambda state: state.update(nonfinite=[1, 2]),
    "no open steps": lambda state: state.pop("open_steps"),
    "open steps of None": lambda state: state.update(open_steps=None),
    "no overflow": lambda state: state.pop("overflow_steps"),
    "states of a number": lambda state: state.update(states=7),
    "states of nothing": lambda state: state.update(states={}),
    "banks of None": lambda state: state["states"].update(banks=None),
    "bank of numbers": lambda state: state["states"].update(banks=[[1, 2]]),
    "row without a key": lambda state: state["states"]["banks"][0][0].pop("key"),
    "row without a state": lambda state: state["states"]["banks"][0][0].pop("state"),
    "row of another size": lambda state: state["states"]["banks"][0][0]["state"].update(state=torch.zeros(3)),
    "row of a string": lambda state: state["states"]["banks"][0][0]["state"].update(state="zeros"),
    "no left out": lambda state: state["states"].pop("left_out"),
    "left out of numbers": lambda state: state["states"].update(left_out=[[1]]),
}


WINDOWED: dict[str, Any] = {"every_n_train_steps": 1, "reduce": 3, "outputs": QUIET}


@pytest.fixture(scope="module")
def in_a_window(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint in the middle of a window."""
    return saved_by(tmp_path_factory.mktemp("window"), [ActivationRecorder(**WINDOWED)])


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_state_is_one_warning(how: str, in_a_window: Path, tmp_path: Path) -> None:
    """An invalid state in a checkpoint gives one warning, and the run continues to train and record."""
    path = Path(shutil.copy(in_a_window, tmp_path))
    spoil(path, SPOILT[how])
    sink, model = MemorySink(), small()
    warned = warnings_by(lambda: go(tmp_path, [ActivationRecorder(sinks=[sink], **WINDOWED)], model=model, ckpt=path))
    assert len(warned) == 1, warned
    assert "starts without" in warned[0]
    assert len(model.losses) == BATCHES
    assert hooks_left(model) == []
    assert list(sink.scalars["activations/head/rms"]) == [5, 7]


def test_the_state_dict_of_the_model_is_its_own(tmp_path: Path) -> None:
    """Checkpoints of a recorded run have bitwise the parameters and buffers of a bare run, with the same names."""
    bare = torch.load(saved_by(tmp_path, []), weights_only=True)["state_dict"]
    recorded = torch.load(saved_by(tmp_path, recorders(MemorySink())), weights_only=True)["state_dict"]
    assert list(recorded) == list(bare)
    assert all(torch.equal(recorded[name], bare[name]) for name in bare)


class Copying(Callback):
    """Pickles and copies the model and the other callbacks in each hook of a batch."""

    def __init__(self) -> None:
        self.kept: list[LightningModule] = []
        self.copies = 0

    def copy(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set in Trainer.__init__
        for each in callbacks:
            if each is not self:
                pickle.loads(pickle.dumps(each))
                copy.deepcopy(each)
        pl_module._trainer = None  # a trainer cannot be copied
        try:
            self.kept = [copy.deepcopy(pl_module), pickle.loads(pickle.dumps(pl_module))]
        finally:
            pl_module._trainer = trainer
        self.copies += 1

    on_train_batch_start = on_before_backward = on_after_backward = copy  # type: ignore[assignment]  # takes whatever
    on_before_optimizer_step = on_train_batch_end = copy  # type: ignore[assignment]  # as above
    on_train_epoch_end = on_exception = copy  # type: ignore[assignment]  # as above


class Brittle(Small):
    """Calls a given function in the middle of a step, and can raise there."""

    copying: ClassVar[Copying | None] = None

    def __init__(self, raises_at: int = -1) -> None:
        super().__init__()
        self.raises_at = raises_at

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        logits = self(batch[0])
        if self.copying is not None:
            self.copying.copy(self.trainer, self)
        if len(self.losses) == self.raises_at:
            raise ZeroDivisionError("of the user")
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.losses.append(loss.detach().clone())
        return loss


def brittle(raises_at: int = -1) -> Brittle:
    """Return the model with the parameters of :func:`small`."""
    seed_everything(1, verbose=False)
    return Brittle(raises_at)


@pytest.mark.parametrize("raises_at", [-1, 2])
def test_model_and_callbacks_can_be_copied_at_any_time(
    raises_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies in any hook, in a step and after an exception are possible and do not change the records."""
    expected, sink = MemorySink(), MemorySink()
    go(tmp_path / "bare", recorders(expected), max_epochs=1)
    model, copying = brittle(raises_at), Copying()
    monkeypatch.setattr(Brittle, "copying", copying)
    with nullcontext() if raises_at < 0 else pytest.raises(ZeroDivisionError, match="of the user"):
        go(tmp_path, [*recorders(sink), GraphRecorder(formats=()), copying], model=model, max_epochs=1)
    steps = BATCHES if raises_at < 0 else raises_at
    assert copying.copies == (6 * BATCHES + 1 if raises_at < 0 else 6 * raises_at + 3)
    assert up_to(sink, steps) == up_to(expected, steps)
    assert hooks_left(model) == []


def up_to(sink: MemorySink, stop: int) -> dict[tuple[str, int], Any]:
    """Return the same as :func:`shown`, for the steps before one."""
    return {key: each for key, each in shown(sink).items() if key[1] < stop}


def test_a_copy_of_the_model_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of a copy made in a recorded step are not recorded, while the step continues."""
    sinks = []
    for calls in (False, True):

        class Calling(Copying):
            def copy(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
                super().copy(trainer, pl_module)
                for each in self.kept if calls else ():  # noqa: B023 - called within the loop
                    each(torch.ones(2, 1, 8, 8)).sum().backward()

        sinks.append(MemorySink())
        monkeypatch.setattr(Brittle, "copying", Calling())
        go(tmp_path, recorders(sinks[-1], statistics="count"), model=brittle(), max_epochs=1)
    assert shown(sinks[0]) == shown(sinks[1])


def failing(kind: str, folder: Path) -> tuple[Callback, Path]:
    """Return a callback that saves a checkpoint on an exception, and its path."""
    if kind == "ModelCheckpoint":
        return ModelCheckpoint(folder, filename="on_exception", save_on_exception=True), folder / "on_exception.ckpt"

    class Kept(OnExceptionCheckpoint):
        def teardown(self, *args: Any, **kwargs: Any) -> None:
            """Keep the file."""

    return Kept(folder), folder / "on_exception.ckpt"


def failed(kind: str, folder: Path, failed_at: int, **options: Any) -> Path:
    """Return the checkpoint that is saved when a step fails."""
    saving, path = failing(kind, folder)
    with pytest.raises(ZeroDivisionError, match="of the user"):
        go(folder, [*recorders(MemorySink(), **options), saving], model=brittle(failed_at), enable_checkpointing=True)
    saved = torch.load(path, weights_only=True)
    # The loader repeats the batch of the failed step.
    saved["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]["given"] -= 1
    torch.save(saved, path)
    return path


# With an OnExceptionCheckpoint, Lightning looks for its file and warns.
ignore_search = pytest.mark.filterwarnings("ignore:`?.fit.ckpt_path=:UserWarning")


@ignore_search
@pytest.mark.parametrize("kind", ["OnExceptionCheckpoint", "ModelCheckpoint"])
@pytest.mark.parametrize("failed_at", [1, 2, 5])
def test_a_failed_step_is_repeated(kind: str, failed_at: int, tmp_path: Path) -> None:
    """A failed step that is repeated from the exception's checkpoint has the record of a successful one."""
    expected, sink = MemorySink(), MemorySink()
    go(tmp_path, recorders(expected, extra=[Change()]))
    path = failed(kind, tmp_path, failed_at, extra=[Change()])
    assert warnings_by(lambda: go(tmp_path, recorders(sink, extra=[Change()]), ckpt=path)) == []
    # On the axis of self.log, which Lightning continues one step further after such a checkpoint.
    later = {(tag, step + 1): each for (tag, step), each in shown(expected, failed_at).items()}
    assert shown(sink) == later


@ignore_search
@pytest.mark.parametrize("reduce", [3, "epoch"])
@pytest.mark.parametrize("failed_at", [1, 2, 5])
def test_a_failed_step_is_not_in_the_window_that_is_saved(reduce: Any, failed_at: int, tmp_path: Path) -> None:
    """An exception's checkpoint has only the completed steps of a window, so that the resumed window is correct."""
    expected, sink = MemorySink(), MemorySink()
    options: dict[str, Any] = {"reduce": reduce, "extra": [Change()]}
    go(tmp_path, recorders(expected, **options))
    path = failed("OnExceptionCheckpoint", tmp_path, failed_at, **options)
    saved = torch.load(path, weights_only=True)
    # Lightning counts the failed step as completed, so the windows, which use the same axis, would shift.
    saved["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    torch.save(saved, path)
    assert warnings_by(lambda: go(tmp_path, recorders(sink, **options), ckpt=path)) == []
    assert shown(sink) == shown(expected, failed_at)


class Interrupted(Small):
    """A model whose training the user interrupts in the middle of an epoch."""

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 8:
            raise KeyboardInterrupt


def test_a_part_of_an_epoch_is_replaced_when_it_is_repeated(tmp_path: Path) -> None:
    """The record of a part of an epoch, from an interruption, is not read any more when the epoch has been repeated."""

    def run(model: LightningModule, folder: Path, ckpt_path: str | None = None) -> None:
        callbacks = [ActivationRecorder(every_n_train_steps=1, reduce="epoch"), ModelCheckpoint(folder, save_last=True)]
        trainer = Trainer(
            default_root_dir=folder,
            max_epochs=3,
            logger=False,
            accelerator="cpu",
            callbacks=callbacks,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        seed_everything(3, verbose=False)
        trainer.fit(model, digits(5), ckpt_path=ckpt_path, **WEIGHTS_ONLY)

    run(Small(), tmp_path / "whole")
    with pytest.raises(SystemExit):
        run(Interrupted(), tmp_path / "parts")
    assert open_recording(tmp_path / "parts").run["activations"].steps == [4, 8]
    run(Small(), tmp_path / "parts", str(tmp_path / "parts" / "last.ckpt"))
    whole, parts = (open_recording(tmp_path / each).run["activations"] for each in ("whole", "parts"))
    assert whole.steps == parts.steps == [4, 9, 14]
    assert torch.equal(whole.values("count"), parts.values("count"))


KILLED = """
import os, signal, sys
from pathlib import Path
from lightning.pytorch import Callback
from lightning_recorder import MemorySink
from tests.callbacks.test_resume import Small, every_step, go, recorders

class Killing(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        # Later than the checkpoint of step 5, and in the middle of what follows.
        if len(pl_module.losses) == 6:
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    go(folder, [*recorders(MemorySink(), reduce=3), every_step(folder), Killing()], enable_checkpointing=True)
"""


@pytest.mark.slow
def test_a_killed_process_is_resumed(tmp_path: Path) -> None:
    """A run that is resumed from the last checkpoint of a killed one has the records and the watch of the whole run."""
    (tmp_path / "run.py").write_text(KILLED, encoding="utf-8")
    codes, log = forks.run(tmp_path / "run.py", tmp_path, folder=tmp_path)
    assert codes == [-signal.SIGKILL], log
    last = max(tmp_path.glob("step=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    assert last.stem == "step=5"
    assert open_recording(tmp_path)["watch"].steps[:5] == list(range(5))
    expected, sink = MemorySink(), MemorySink()
    go(tmp_path / "whole", recorders(expected, reduce=3))
    go(tmp_path, recorders(sink, reduce=3), ckpt=last)
    assert shown(sink) == shown(expected, 5)
    whole, resumed = (open_recording(each)["watch"] for each in (tmp_path / "whole", tmp_path))
    assert whole.steps == resumed.steps == list(range(EPOCHS * BATCHES))
    assert torch.equal(whole.values("value"), resumed.values("value"))
