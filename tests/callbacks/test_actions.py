"""Tests of the actions of the watch: a step is left out, an earlier state is restored, or the rate is lowered."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recorder import (
    ArgumentError,
    Monitor,
    Outputs,
    ParameterRecorder,
    RecorderWarning,
    StepWatch,
    open_recording,
)
from lightning_recorder.insight import ACTED, Finding
from tests import forks

# The run without the step returns no loss.
pytestmark = pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")

ROWS, WIDTH, STEPS, BAD = 4, 6, 40, 30
QUIET = Outputs(plots=False, dumps=False)


class Net(LightningModule):
    """A net with running statistics, dropout and a fraction of its own that follows the loss.

    Args:
        bad: The batches that are poisoned.
        factor: The factor of the loss of a poisoned batch.
        left_out: Run no step for these batches.
        optimizer: A function that makes the optimizer.
    """

    def __init__(
        self,
        bad: tuple[int, ...] = (BAD,),
        factor: float = math.nan,
        *,
        left_out: bool = False,
        optimizer: Callable[[Any], Any] = torch.optim.AdamW,
        schedule: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.bad, self.factor, self.left_out, self.optimizer = bad, factor, left_out, optimizer
        self.schedule, self.usual, self.losses = schedule, 1.0, []  # type: ignore[var-annotated]  # numbers

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        is_bad = batch_idx in self.bad
        if is_bad and self.left_out:
            return None
        x = batch[0] * (self.factor if is_bad else 1.0)
        loss: Tensor = (self.net(x) - batch[1]).square().mean() * (self.factor if is_bad else 1.0)
        self.usual = 0.9 * self.usual + 0.1 * float(loss.detach())
        self.losses.append(float(loss.detach()))
        return loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        if self.left_out and batch_idx in self.bad:
            closure()  # Lightning expects its result
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def batches(steps: int) -> Any:
    numbers = torch.Generator().manual_seed(1)
    x, y = torch.randn(steps * ROWS, WIDTH, generator=numbers), torch.randn(steps * ROWS, 1, generator=numbers)
    return DataLoader(TensorDataset(x, y), batch_size=ROWS)


def fit(model: LightningModule, folder: Path, *callbacks: Callback, steps: int = STEPS, **options: Any) -> Trainer:
    seed_everything(5, verbose=False)
    options = {"max_epochs": 1, "logger": False, **options}
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(model, batches(steps))
    return trainer


def left(trainer: Trainer) -> dict[str, Any]:
    """Return everything that a run leaves behind."""
    model: Any = trainer.lightning_module
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": trainer.optimizers[0].state_dict(),
        "random": torch.get_rng_state(),
        "usual": model.usual,
        "scaler": None if scaler is None else scaler.state_dict(),
    }


def assert_same(one: Any, other: Any, path: str = "") -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), path
        for place, (first, second) in enumerate(zip(one, other, strict=True)):
            assert_same(first, second, f"{path}[{place}]")
    else:
        assert one == other, path


def acted(watch_or_folder: Path) -> list[Finding]:
    return [each for each in open_recording(watch_or_folder).findings if each.rule == ACTED]


class Averaged(torch.optim.SGD):
    """An optimizer that counts its steps in its group and changes parameters without gradients."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
                for each in group["params"]:
                    each.mul_(0.999)
                    mean = self.state[each].setdefault("mean", each.clone())
                    mean.lerp_(each, 1 / group["k"])
        return loss


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": torch.optim.AdamW,
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.1),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, 0.01, max_iter=3),
    "averaged": lambda parameters: Averaged(parameters, 0.05, momentum=0.9),
}


@pytest.mark.parametrize("factor", [math.nan, 1e3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_skipped_step_is_left_out_to_the_bit(optimizer: str, factor: float, tmp_path: Path) -> None:
    """After a NaN or a spike, everything is as in a run in which that batch was left out."""
    make = OPTIMIZERS[optimizer]
    without = left(fit(Net(left_out=True, optimizer=make), tmp_path / "without"))
    watch = StepWatch(on_finding="skip", strict=True)
    skipped = left(fit(Net(factor=factor, optimizer=make), tmp_path / "skipped", watch))
    assert_same(skipped, without)
    assert {each.rule for each in watch.found} == {"non-finite" if math.isnan(factor) else "spike"}


def test_a_step_that_was_left_out_hides_no_later_one(tmp_path: Path) -> None:
    """Three spikes of about the same size within ten steps are all left out."""
    bad = (BAD, BAD + 2, BAD + 5)
    without = left(fit(Net(bad, left_out=True), tmp_path / "without"))
    watch = StepWatch(on_finding="skip", strict=True)
    skipped = left(fit(Net(bad, 100.0), tmp_path / "skipped", watch))
    assert_same(skipped, without)
    assert [each.records for each in acted(tmp_path / "skipped")] == [3]


@pytest.mark.parametrize("how", ["accumulated", "scaled", "fused", "scheduled", "clipped"])
def test_a_skipped_step_is_left_out_in_other_ways_to_train(how: str, tmp_path: Path) -> None:
    """A step is skipped with accumulated gradients, with a loss scale, with a schedule, and with clipping, too."""
    # The last two batches of a step with accumulated gradients.
    bad = (BAD, BAD + 1) if how == "accumulated" else (BAD,)
    all_options: dict[str, dict[str, Any]] = {
        "accumulated": {"accumulate_grad_batches": 2},
        "clipped": {"gradient_clip_val": 0.1},
    }
    options = all_options.get(how, {})

    def make(*, left_out: bool) -> Net:
        optimizer = partial(torch.optim.AdamW, fused=True) if how == "fused" else torch.optim.AdamW
        return Net(bad, left_out=left_out, optimizer=optimizer, schedule=how == "scheduled")

    def run(folder: str, model: Net, *callbacks: Callback) -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=7)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)] if how in ("scaled", "fused") else []
        return left(fit(model, tmp_path / folder, *callbacks, plugins=plugins, **options))

    without = run("without", make(left_out=True))
    watch = StepWatch(on_finding="skip", strict=True)
    skipped = run("skipped", make(left_out=False), watch)
    if how == "scaled":
        assert without["scaler"]["scale"] > 1
    assert_same(skipped, without)
    assert [each.last_step for each in acted(tmp_path / "skipped")] == [BAD // 2 if how == "accumulated" else BAD]


def test_the_learning_rate_is_lowered_for_good(tmp_path: Path) -> None:
    """A spike lowers the rate from its step on, and a schedule goes on from the lower rate; a NaN is left out, too."""
    trainer = fit(Net(factor=1e3, schedule=True), tmp_path / "spike", StepWatch(on_finding="lower_lr", strict=True))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5 * 1e-3 * 0.99**STEPS)
    watch = StepWatch(on_finding="lower_lr", lr_factor=0.1, strict=True)
    trainer = fit(Net(schedule=True), tmp_path / "nan", watch)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 1e-3 * 0.99**STEPS)
    for name, text in (("spike", "0.5 at step 30, because"), ("nan", "0.1 at step 30, which was left out, because")):
        (note,) = acted(tmp_path / name)
        assert note.verdict.startswith(f"the learning rate was multiplied by {text} of this: ")
    assert all(bool(value.isfinite().all()) for value in trainer.lightning_module.state_dict().values())


def test_an_action_is_a_record_a_line_and_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The findings of the run have a note with all steps, the log one line for each, and there is a limit."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    bad = (25, 28, 31, 34)
    model = Net(bad)
    watch = StepWatch(on_finding="skip", max_actions=3, strict=True)
    fit(model, tmp_path, watch, ParameterRecorder(every_n_train_steps=5, outputs=QUIET))
    (note,) = acted(tmp_path)
    assert (note.severity, note.records, note.first_step, note.last_step) == ("note", 3, 25, 31)
    assert note.trace is not None
    assert note.trace.steps == (25, 28, 31)
    data = json.loads((tmp_path / "recorder" / "findings.json").read_text())
    assert [each["path"] for each in data["findings"] if each["rule"] == ACTED] == ["skip"]
    # Where another test has loaded Lightning's logger, the handler of pytest is on both loggers.
    lines = [each.getMessage() for each in {id(each): each for each in caplog.records}.values()]
    for place, step in enumerate(bad[:3], 1):
        times = "" if place == 1 else f" (action {place} of this kind)"
        assert sum(line.startswith(f"Step {step} was left out{times}, because of this: ") for line in lines) == 1
    assert lines.count("StepWatch has acted 3 times and acts no more, because of max_actions") == 1
    assert math.isnan(model.losses[-1])  # the fourth step was taken


def test_a_function_decides_on_each_step(tmp_path: Path) -> None:
    """A function that returns an action is called again at the next such step, and may decide otherwise then."""
    seen: list[int] = []

    def skip_the_first(finding: Finding) -> str | None:
        seen.append(finding.first_step)
        return "skip" if len(seen) == 1 else None

    model = Net((22, 35, 48), factor=1e3)
    fit(model, tmp_path, StepWatch(on_finding=skip_the_first, strict=True))
    assert seen == [22, 35]
    assert [(each.records, each.last_step) for each in acted(tmp_path)] == [(1, 22)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (RuntimeError("no"), r"on_finding is not called again: it raised at .*test_actions.py:\d+: RuntimeError: no"),
        ("jump", "on_finding returned 'jump', which is no action: it may return 'lower_lr', 'skip', 'rollback'"),
        ("rollback", "on_finding returned 'rollback', but StepWatch does not act: pass rollback_steps"),
    ],
)
def test_a_function_that_fails_costs_a_warning(answer: Any, message: str, tmp_path: Path) -> None:
    """An error or an unknown word gives one warning, the training and the watch go on, and nothing is done."""

    def decide(finding: Finding) -> str:
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    watch = StepWatch(on_finding=decide)
    with pytest.warns(RecorderWarning, match=message) as caught:
        trainer = fit(Net((22, 35), factor=1e3), tmp_path, watch)
    assert len([each for each in caught if issubclass(each.category, RecorderWarning)]) == 1
    assert trainer.global_step == STEPS
    assert acted(tmp_path) == []
    assert [each.records for each in watch.found] == [2]


class Manual(Net):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)  # type: ignore[arg-type]  # it is None for no batch of this test
        optimizer.step()


def test_manual_optimization_gets_a_clear_word(tmp_path: Path) -> None:
    """With manual optimization, nothing is done, and a warning at the start says so."""
    words = "does not act ('skip'): with manual optimization, training_step itself steps the optimizers"
    with pytest.warns(RecorderWarning, match=re.escape(words)):
        fit(Manual(), tmp_path, StepWatch(on_finding="skip"))
    assert acted(tmp_path) == []
    assert [each.rule for each in open_recording(tmp_path).findings] == ["non-finite"]


def test_a_loop_of_your_own_gets_a_clear_word(tmp_path: Path) -> None:
    """In a plain loop, nothing is done, and a warning at the start says so."""
    net, watch = nn.Linear(WIDTH, 1), StepWatch(on_finding="skip", strict=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def train() -> None:
        with Monitor(net, optimizer, log_dir=tmp_path, recorders=[watch]) as monitor, monitor.step():
            loss = net(torch.ones(ROWS, WIDTH)).mean() * math.nan
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss)

    words = "does not act ('skip'): in a loop of your own, it steps the optimizers"
    with pytest.warns(RecorderWarning, match=re.escape(words)):
        train()
    assert not any(bool(each.isfinite().all()) for each in net.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_finding": "rolback"}, "did you mean 'rollback'"),
        ({"max_actions": 0}, "max_actions must be an integer of at least 1"),
        ({"rollback_steps": 0}, "rollback_steps must be an integer of at least 1"),
        ({"lr_factor": 1.0}, "lr_factor must be between 0 and 1, got 1.0"),
    ],
)
def test_wrong_arguments_raise(options: dict[str, Any], message: str) -> None:
    """The message names the argument and what it may be."""
    with pytest.raises(ArgumentError, match=message):
        StepWatch(**options)


SCRIPT = """
import os
import sys
from pathlib import Path
import torch
from lightning_recorder import ActivationRecorder, StepWatch
from lightning_recorder.callbacks.watched_run import WatchedRun
from tests.callbacks.test_actions import BAD, STEPS, Net, fit, left

how, folder = sys.argv[1], Path(sys.argv[2])

class OnOneRank(Net):
    # The loss of rank 1 has a spike that has no gradient, so rank 0 sees nothing.
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + 1e4 if batch_idx in self.bad and self.global_rank == 1 else loss

    def optimizer_step(self, epoch, batch_idx, optimizer, closure=None):
        if batch_idx in self.bad and self.omits:
            buffers = [(each, each.clone()) for each in self.buffers()]
            state, usual = torch.get_rng_state(), self.usual
            closure()
            torch.set_rng_state(state)
            self.usual = usual
            for each, values in buffers:
                each.copy_(values)
        else:
            super(Net, self).optimizer_step(epoch, batch_idx, optimizer, closure)

if __name__ == "__main__":
    watch = [] if how == "without" else [StepWatch(on_finding="skip", strict=how != "fails")]
    is_poisoned = how == "poisoned" and os.environ["LOCAL_RANK"] == "1"
    model = OnOneRank((BAD,), factor=float("nan") if is_poisoned else 1.0)
    model.omits = how == "without"
    if how == "fails":
        before_step = WatchedRun.before_step

        def fail(self, optimizer):
            if self._trainer.global_rank == 1 and self._trainer.global_step == 10:
                raise RuntimeError("planted")
            before_step(self, optimizer)

        WatchedRun.before_step = fail
    trainer = fit(model, folder, *watch, strategy="ddp", devices=2, steps=2 * STEPS)
    torch.save((left(trainer), trainer.global_step), folder / f"{trainer.global_rank}.pt")
"""


def in_two_processes(folder: Path, how: str) -> tuple[list[Any], str]:
    (folder / how).mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    codes, log = forks.run(script, how, folder / how, folder=folder, ranks=2, timeout_s=120)
    assert codes == [0, 0], log[-3000:]
    return [torch.load(folder / how / f"{rank}.pt", weights_only=False) for rank in range(2)], log


@pytest.mark.slow
def test_all_ranks_skip_or_none(tmp_path: Path) -> None:
    """A spike that only rank 1 sees is left out on both, to the bit as in a run without that step."""
    without, _ = in_two_processes(tmp_path, "without")
    skipped, log = in_two_processes(tmp_path, "skip")
    assert "RecorderWarning" not in log
    for rank in range(2):
        assert_same(skipped[rank][0], without[rank][0])
    assert_same(skipped[0][0]["model"]["net.0.weight"], skipped[1][0]["model"]["net.0.weight"])
    (note,) = acted(tmp_path / "skip")
    assert note.verdict == f"step {BAD} was left out, because of this: a finding on rank 1"


@pytest.mark.slow
def test_an_action_names_the_rank_that_knows_its_cause(tmp_path: Path) -> None:
    """If all ranks see the NaN in the averaged gradients, the note has the rank with the batch that makes it."""
    in_two_processes(tmp_path, "poisoned")
    (note,) = acted(tmp_path / "poisoned")
    assert note.verdict == f"step {BAD} was left out, because of this: a finding on rank 1"
    found = next(each for each in open_recording(tmp_path / "poisoned").findings if each.rule == "non-finite")
    assert "rank 1" in found.verdict


@pytest.mark.slow
def test_a_watch_that_fails_on_one_rank_hangs_nobody(tmp_path: Path) -> None:
    """The rank whose watch has failed still takes part in the decisions of the others."""
    ended, log = in_two_processes(tmp_path, "fails")
    assert [steps for _, steps in ended] == [STEPS, STEPS]
    assert "StepWatch is off for the rest of the run" in log
