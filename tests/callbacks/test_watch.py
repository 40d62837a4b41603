"""Tests of the watch on every step during a fit."""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_recorder import (
    ActivationRecorder,
    ArgumentError,
    GradientRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    RecorderWarning,
    StepWatch,
    default_recorders,
    open_recording,
)
from lightning_recorder.callbacks import watch as watch_module
from lightning_recorder.callbacks.reproduce import need_parameters, reproduce
from lightning_recorder.callbacks.watched_run import WatchedRun
from lightning_recorder.errors import RecorderError
from lightning_recorder.insight import ROSE, Finding
from tests import forks
from tests.reductions.test_base import NoReading
from tests.watch.late import arrive_late
from tests.watch.nets import BATCHES, WIDTH, Planted, batches, plant

QUIET = Outputs(plots=False, dumps=False)
ROOT = Path(__file__).parents[2]


def fit(model: LightningModule, folder: Path, *callbacks: Callback, loader: Any = None, **options: Any) -> Trainer:
    seed_everything(5, verbose=False)
    options = {"logger": False, "enable_checkpointing": False, "max_epochs": 1, **options}
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, loader or batches())
    return trainer


def planted(name: str = "net.0", value: float = math.nan, *, backward: bool = False, at: int = 5) -> Planted:
    model = Planted("mlp", at)
    plant(model, name, 1, value, backward=backward)
    return model


def only(watch: StepWatch) -> Finding:
    assert len(watch.found) == 1, [each.verdict for each in watch.found]
    return watch.found[0]


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for each in caplog.records for line in each.getMessage().splitlines()]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    return caplog


# Part of the recorders.


@pytest.mark.parametrize("kind", [ActivationRecorder, GradientRecorder, ParameterRecorder])
def test_a_trainer_with_a_recorder_has_one_watch(kind: Callable[..., Callback], tmp_path: Path) -> None:
    """The first recorder of statistics adds a watch, in each fit of its trainer the same one."""
    trainer = fit(Planted(), tmp_path, kind(outputs=QUIET), ActivationRecorder(outputs=QUIET, name="second"))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Planted(), batches())
    assert [type(each) for each in trainer.callbacks].count(StepWatch) == 1  # type: ignore[attr-defined]  # set in Trainer.__init__


def test_a_watch_of_the_user_is_kept(tmp_path: Path) -> None:
    """A watch that the trainer has is not replaced; without findings there is none."""
    own = StepWatch(spikes=20)
    trainer = fit(Planted(), tmp_path, ActivationRecorder(outputs=QUIET), own)
    assert [each for each in trainer.callbacks if isinstance(each, StepWatch)] == [own]  # type: ignore[attr-defined]
    quiet = ActivationRecorder(outputs=Outputs(plots=False, dumps=False, findings=False))
    trainer = fit(Planted(), tmp_path, quiet)
    assert not [each for each in trainer.callbacks if isinstance(each, StepWatch)]  # type: ignore[attr-defined]
    assert [type(each) for each in default_recorders()].count(StepWatch) == 1
    assert [type(each) for each in default_recorders(outputs=Outputs(findings=False))].count(StepWatch) == 0


@pytest.mark.parametrize("place", [0, 5])
def test_a_watch_of_the_user_replaces_that_of_the_default_set(place: int, tmp_path: Path) -> None:
    """Wherever it stands, also if the same list is given to two trainers, only the watch of the user reports."""
    found: list[Finding] = []
    callbacks = default_recorders(outputs=QUIET, strict=True)
    default = callbacks[-1]
    callbacks.insert(place, StepWatch(on_finding=found.append, strict=True))
    assert isinstance(default, StepWatch)
    for number in (1, 2):
        fit(planted("net.1", at=5), tmp_path / str(number), *callbacks)
        assert len(found) == number
        assert default.found == []
        assert [each for each in open_recording(tmp_path / str(number)).run if "watch" in each] == ["watch"]


def test_two_watches_of_the_user_are_an_error(tmp_path: Path) -> None:
    """Two watches that the user made are refused before the first step; of two default ones, the first is used."""
    with pytest.raises(ArgumentError, match="callbacks contains two StepWatch: pass one with the arguments of both"):
        fit(Planted(), tmp_path, StepWatch(), StepWatch(spikes=5))
    first, second = default_recorders(outputs=QUIET, strict=True)[-1], default_recorders(outputs=QUIET, strict=True)[-1]
    fit(planted("net.1", at=5), tmp_path, first, second)
    assert isinstance(first, StepWatch)
    assert isinstance(second, StepWatch)
    assert (len(first.found), len(second.found)) == (1, 0)


def test_the_last_lines_name_the_module(tmp_path: Path, logged: pytest.LogCaptureFixture) -> None:
    """With recorders that sample other steps, the list at the end of the fit names module, step, line and batch."""
    recorders = [kind(every_n_train_steps=4, outputs=QUIET) for kind in (ActivationRecorder, ParameterRecorder)]
    fit(planted("net.1", at=5), tmp_path, *recorders)
    lines = lines_of(logged)[-3:]
    assert any(line.startswith("1 finding") for line in lines)
    found = next(line for line in lines if line.startswith("  critical: "))
    assert "NaN values first in the forward pass of net.1 at step 5 (batch 5 of epoch 0): mul at" in found
    run = open_recording(tmp_path).run
    assert [each.verdict in found for each in run.findings if each.rule == "non-finite"] == [True]
    written = json.loads((run.directory / "findings.json").read_text())["findings"]
    assert [each["verdict"] for each in written] == [each.verdict for each in run.findings]


class LogBetweenModules(Planted):
    """The code of the model itself makes NaN between two modules at a step."""

    def __init__(self) -> None:
        super().__init__("mlp", 5)
        self.head = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        hidden = self.net(batch[0])
        if batch_idx == self.at:
            hidden = hidden.abs().neg().log()
        return F.mse_loss(self.head(hidden), batch[1])


@pytest.mark.parametrize("interval", [3, 4])
def test_the_operation_is_named_whether_its_step_is_recorded_or_not(interval: int, tmp_path: Path) -> None:
    """A record of the same step, which only shows modules, does not replace the operation that the watch names."""
    fit(LogBetweenModules(), tmp_path, ActivationRecorder(every_n_train_steps=interval, outputs=QUIET))
    (found,) = open_recording(tmp_path).run.findings
    assert "in the forward pass of training_step at step 5 (batch 5 of epoch 0): log at" in found.verdict


def test_the_series_has_every_step(tmp_path: Path) -> None:
    """Loss and gradient norm of each step are records, bitwise as float32; the logged steps are scalars."""

    class Measured(Planted):
        norms: list[float]

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.norms.append(float(torch.nn.utils.get_total_norm([each.grad for each in self.parameters()])))  # type: ignore[misc]

    model, sink = Measured(), MemorySink()
    model.norms = []
    fit(model, tmp_path, StepWatch(sinks=[sink], strict=True), log_every_n_steps=4)
    series = open_recording(tmp_path).run["watch"]
    assert series["loss"].statistic("value").tolist() == [float(each) for each in model.losses]
    assert series["grad_norm"].statistic("value").tolist() == pytest.approx(model.norms, rel=1e-6)
    assert series.steps == list(range(BATCHES))
    assert list(sink.scalars["watch/loss"]) == list(sink.scalars["watch/grad_norm"]) == [3, 7]
    assert sink.scalars["watch/loss"][7] == float(model.losses[7])


def test_a_healthy_fit_has_no_incident(tmp_path: Path, logged: pytest.LogCaptureFixture) -> None:
    """Nothing is found or written to the incidents; the last message says that only the watch has examined the run."""
    watch = StepWatch(strict=True)
    fit(Planted(at=-1), tmp_path, watch)
    assert watch.found == []
    text = "  not examined: activations, gradients and parameters, because "
    assert [line for line in lines_of(logged) if line.startswith(text)]
    assert not (tmp_path / "recorder" / "incidents").exists()


# Modes of training.


def test_the_batch_of_an_accumulated_step_is_named(tmp_path: Path) -> None:
    """The loss is the mean of the batches, and the bad one is named."""
    watch = StepWatch(strict=True)
    model = planted("net.3", at=5)
    fit(model, tmp_path, watch, accumulate_grad_batches=3)
    finding = only(watch)
    assert (finding.module, finding.first_step, finding.numbers["batch"]) == ("net.3", 1, 5)
    values = open_recording(tmp_path).run["watch"]["loss"].statistic("value").tolist()
    assert values[0] == pytest.approx(sum(float(each) for each in model.losses[:3]) / 3)


def test_the_loss_of_a_shorter_last_window(tmp_path: Path) -> None:
    """The loss of a step is the mean of its batches, also if they are fewer than in other steps."""
    model = Planted(at=-1)
    fit(model, tmp_path, StepWatch(strict=True), accumulate_grad_batches=3)
    means = [sum(map(float, model.losses[first : first + 3])) / min(3, BATCHES - first) for first in (0, 3, 6)]
    assert open_recording(tmp_path).run["watch"]["loss"].statistic("value").tolist() == pytest.approx(means)


class Evaluated(Planted):
    """Trained by LBFGS, which evaluates loss and gradients several times per step."""

    norms: dict[int, float]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [each.grad for each in self.parameters() if each.grad is not None]
        self.norms.setdefault(self.trainer.global_step, float(torch.nn.utils.get_total_norm(gradients)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def test_loss_and_norm_are_those_of_the_first_evaluation(tmp_path: Path) -> None:
    """If an optimizer evaluates its closure several times, loss, norm and ``weight.grad`` belong to the first time."""
    model = Evaluated(at=-1)
    model.norms = {}
    fit(model, tmp_path, StepWatch(strict=True), ParameterRecorder(every_n_train_steps=1, strict=True))
    assert len(model.losses) > 2 * BATCHES
    run = open_recording(tmp_path).run
    norms = run["watch"]["grad_norm"].statistic("value")
    assert norms.tolist() == pytest.approx(list(model.norms.values()), rel=1e-6)
    recorded = run["parameters"]
    gradients = [recorded[site] for site in recorded.sites if site.path.endswith(".grad")]
    squares = torch.stack([each.statistic("rms").square() * each.statistic("count") for each in gradients])
    assert squares.sum(0).sqrt().tolist() == pytest.approx(norms.tolist(), rel=1e-5)
    assert run["watch"]["loss"].statistic("value")[0] == pytest.approx(float(model.losses[0]), rel=1e-6)


class Words(LightningModule):
    """An embedding with sparse gradients that looks up one word several times."""

    def __init__(self, at: int = -1) -> None:
        super().__init__()
        self.embedding, self.at, self.norms = nn.Embedding(20, WIDTH, sparse=True), at, list[float]()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.embedding(torch.arange(len(batch[0])) // 3).square().mean()
        return loss.log() - loss.log() + (loss - loss.detach()).sqrt() if batch_idx == self.at else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = self.embedding.weight.grad
        assert gradient is not None
        assert not gradient.is_coalesced()
        self.norms.append(float(gradient.to_dense().norm()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_norm_of_sparse_gradients(tmp_path: Path) -> None:
    """Gradients of one word are added before they are squared."""
    model = Words()
    fit(model, tmp_path, StepWatch(strict=True))
    series = open_recording(tmp_path).run["watch"]["grad_norm"]
    assert series.statistic("value").tolist() == pytest.approx(model.norms, rel=1e-6)


def test_a_sparse_gradient_that_is_not_finite(tmp_path: Path) -> None:
    """The operation whose backward pass makes it is found."""
    watch = StepWatch(strict=True)
    fit(Words(at=3), tmp_path, watch)
    finding = only(watch)
    assert (finding.first_step, "backward of sqrt" in finding.verdict) == (3, True)


@pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary:UserWarning")
@pytest.mark.parametrize("backward", [False, True])
def test_mixed_precision_is_replayed(backward: bool, tmp_path: Path) -> None:
    """Under autocast the module is named, too."""
    watch = StepWatch(strict=True)
    fit(planted("net.0", backward=backward), tmp_path, watch, precision="bf16-mixed")
    assert only(watch).module == "net.0"


def scaled(scale: float = 1024.0) -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))]}


def test_an_overflow_that_the_scaler_handles_is_no_finding(tmp_path: Path) -> None:
    """Gradients that are not finite because of the loss scale are skipped by the scaler, and the watch is silent."""
    watch, model = StepWatch(strict=True), Planted(at=-1)
    fit(model, tmp_path, watch, **scaled(2.0**127))
    assert watch.found == []
    values = open_recording(tmp_path).run["watch"]["grad_norm"].statistic("value").tolist()
    assert not math.isfinite(values[0])


def test_a_bad_loss_under_a_scaler_is_a_finding(tmp_path: Path) -> None:
    """A loss that is not finite is no overflow of the gradients; the recorded loss is unscaled."""
    watch, model = StepWatch(strict=True), planted("net.3")
    fit(model, tmp_path, watch, **scaled())
    assert only(watch).module == "net.3"
    values = open_recording(tmp_path).run["watch"]["loss"].statistic("value").tolist()
    assert values[:5] == pytest.approx([float(each) for each in model.losses[:5]], rel=1e-3)


class Steep(Planted):
    """A loss whose gradients are finite, while the sum of their squares exceeds float32."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * 1e25 if batch_idx == self.at else loss


def test_a_norm_that_overflows_blames_no_gradient(tmp_path: Path) -> None:
    """A gradient norm beyond float32 is named as such if each gradient is finite."""
    watch = StepWatch(strict=True, spikes=0)
    fit(Steep(at=3), tmp_path, watch)
    finding = only(watch)
    assert finding.verdict.startswith("the gradient norm overflows first at step 3 (batch 3 of epoch 0): the loss is ")
    assert finding.module == ""
    assert finding.numbers[ROSE] == math.inf  # a divergence, so that a cause in the records is named before it


class Diverging(LightningModule):
    """A regression whose loss grows by a constant factor per step until its gradients overflow."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.rate = rate

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        output: Tensor = self.layer(batch[0])
        return output.square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.rate)


def test_the_divergence_before_a_bad_value_is_named_first(tmp_path: Path) -> None:
    """If the loss rose over several steps before the bad value, the finding says so, with the learning rate."""
    watch = StepWatch(strict=True)
    fit(Diverging(2.0), tmp_path, watch, max_epochs=4)
    finding = only(watch)
    said = re.match(r"the loss rose from (\S+) to (\S+) in (\d+) steps at learning rate 2; then (.*)", finding.verdict)
    assert said is not None, finding.verdict
    series = open_recording(tmp_path).run["watch"]
    losses = series["loss"].statistic("value").tolist()[: finding.first_step]
    assert (said[1], said[2]) == (f"{losses[0]:.3g}", f"{losses[-1]:.3g}")
    assert int(said[3]) == sum(each > 2 * losses[0] for each in losses)
    assert "first" in said[4]
    assert finding.why.startswith("The training diverged")


class WrongSign(Diverging):
    """A net that is trained to have a large error."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return -super().training_step(batch, batch_idx)


def test_a_loss_that_falls_without_bound_is_found_once(tmp_path: Path) -> None:
    """A loss with the wrong sign is a finding, with its first value; the spikes of a falling loss are none."""
    watch = StepWatch(strict=True)
    fit(WrongSign(0.02), tmp_path, watch, max_epochs=6)
    finding = only(watch)
    assert (finding.rule, finding.severity, finding.records) == ("unbounded-loss", "warning", 1)
    losses = open_recording(tmp_path).run["watch"]["loss"].statistic("value").tolist()
    step = finding.first_step
    assert finding.verdict.startswith(f"the loss fell from {losses[0]:.3g} to {losses[step]:.3g} in {step} steps at")
    assert "the wrong sign" in finding.why


def test_a_loss_that_falls_until_it_overflows_is_one_finding(tmp_path: Path) -> None:
    """The finding about the first bad value begins with the fall, and stands for that about the fall."""
    watch = StepWatch(strict=True)
    fit(WrongSign(0.1), tmp_path, watch, max_epochs=8)
    assert [each.rule for each in watch.found] == ["unbounded-loss", "non-finite"]
    (finding,) = open_recording(tmp_path).findings
    assert finding.verdict.startswith("the loss fell from ")
    assert "; then " in finding.verdict
    assert "the wrong sign" in finding.why
    assert finding.consequences == ("unbounded-loss",)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_batch_is_no_consequence_of_a_divergence(value: float, tmp_path: Path) -> None:
    """The loss rises before a batch that is not finite, which is named alone."""
    rows = torch.stack([torch.full((WIDTH,), value if index == 4 else 10.0**index) for index in range(6)])
    watch = StepWatch(strict=True)
    fit(Diverging(0.0), tmp_path, watch, loader=DataLoader(TensorDataset(rows)))
    assert only(watch).verdict.startswith("the batch itself is not finite at step 4")


class Manual(Planted):
    """Two optimizers, of which each steps once per batch; the fault is in the loss of one of them."""

    def __init__(self, part: str, *, how: str = "manual_backward") -> None:
        super().__init__("mlp", 5)
        self.automatic_optimization = False
        self.other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
        self.part, self.how = part, how

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        parts = {"net": self.net, "other": self.other}
        for (name, part), optimizer in zip(parts.items(), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            hidden = part(batch[0] + torch.rand(()))
            if name == self.part and batch_idx == self.at:
                hidden = hidden.abs().neg().log()
            loss = F.mse_loss(hidden, batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("seen", torch.rand(()))

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.net, self.other)]


@pytest.mark.parametrize("part", ["net", "other"])
def test_manual_optimization_is_replayed_up_to_the_step(part: str, tmp_path: Path) -> None:
    """The operation is named for the first and for the second optimizer of a batch."""
    watch = StepWatch(strict=True)
    fit(Manual(part), tmp_path, watch)
    finding = only(watch)
    assert "in the forward pass of training_step at step 5 (batch 5 of epoch 0): log at" in finding.verdict


class LanguageModel(LightningModule):
    """A GPT-2 with a fault in the third of its blocks at one batch."""

    def __init__(self, at: int) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=16, n_positions=16, n_embd=8, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0
        )
        self.model, self.at, self.batch_idx = GPT2LMHeadModel(config), at, -1
        self.model.get_submodule("transformer.h.2.mlp.act").register_forward_hook(self.spoil)

    def spoil(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return output / 0 if self.batch_idx == self.at else None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.batch_idx = batch_idx
        words = (batch[0] * 15).long()
        return self.model(input_ids=words, labels=words).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_a_model_of_another_package_is_named(tmp_path: Path) -> None:
    """The module and the line of a transformers model are named, although its attention has masks."""
    watch = StepWatch(strict=True)
    fit(LanguageModel(3), tmp_path, watch)
    finding = only(watch)
    assert finding.module == "model.transformer.h.2.mlp.act"
    assert "div at callbacks/test_watch.py" in finding.verdict


# What cannot be known.


class OutsideTorch(Planted):
    """A net whose step depends on a counter outside of the model, and fails once."""

    counter = itertools.count()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        count = next(self.counter)
        loss = super().training_step(batch, batch_idx) * (1 + count)
        return loss * math.nan if count == 5 else loss


def test_a_step_that_depends_on_more_is_not_blamed_on_a_module(tmp_path: Path) -> None:
    """If the loss differs in the replay, no module is named; the step is, and the arguments to run it again."""
    watch, OutsideTorch.counter = StepWatch(strict=True), itertools.count()
    fit(OutsideTorch(at=-1), tmp_path, watch)
    finding = only(watch)
    assert (finding.module, finding.first_step, finding.numbers["batch"]) == ("", 5, 5)
    assert "the loss is nan first at step 5 (batch 5 of epoch 0): it arose in the forward pass" in finding.verdict
    assert "the step depends on more than its batch and torch" in finding.next
    assert "schedule=Schedule(step_window=(4, 6))" in finding.next


@pytest.mark.parametrize("late", [False, True])
def test_with_flags_a_step_that_cannot_be_repeated_is_named(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``every_module=True``, module, call, direction and batch are known without a second run."""
    monkeypatch.setattr(WatchedRun, "_is_host", staticmethod(lambda device: not late))
    for name, call, backward in (("net.act", 3, False), ("net.middle", 2, True)):
        seen: Counter[int] = Counter()

        class Once(Planted):
            def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
                seen[self.global_step * 10 + batch_idx] += 1  # noqa: B023 - called within the loop
                return super().training_step(batch, batch_idx) * seen[self.global_step * 10 + batch_idx]  # noqa: B023

        watch, model = StepWatch(strict=True, every_module=True), Once("shared", 5)
        plant(model, name, call, 0.0 if backward else math.nan, backward=False, root=backward)
        fit(model, tmp_path, watch, accumulate_grad_batches=2)
        finding = only(watch)
        assert (finding.first_step, finding.numbers["batch"], finding.numbers["call"]) == (2, 5, call)
        assert finding.module == name
        assert f"in the {'backward' if backward else 'forward'} pass of" in finding.verdict
        assert not [each for each in model.modules() if len(each._forward_hooks) > 1]


class ChangesBatch(Planted):
    """Adds noise to its batch in place."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        batch[0].add_(torch.rand(()))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("at", [0, 5])
def test_a_step_that_changes_its_batch_is_replayed_with_a_copy(at: int, tmp_path: Path) -> None:
    """After the first step that changes its batch in place, batches are copied, so the module is named."""
    model, watch = ChangesBatch("mlp", at), StepWatch(strict=True)
    plant(model, "net.0", 1, math.nan, backward=False)
    fit(model, tmp_path, watch)
    finding = only(watch)
    assert finding.first_step == at
    assert finding.module == ("net.0" if at else "")
    if not at:
        assert "the step changed its batch in place" in finding.next


class FailsAgain(Planted):
    """A net whose step cannot run twice."""

    seen: set[tuple[int, int]]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if (self.current_epoch, batch_idx) in self.seen:
            raise ValueError("planted")
        self.seen.add((self.current_epoch, batch_idx))
        return super().training_step(batch, batch_idx)


def test_an_error_in_the_replay_gives_one_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """The fit continues, and the finding has the reason."""
    model, watch = FailsAgain("mlp", 5), StepWatch()
    model.seen = type("Seen", (set,), {})()  # a set that is not restored after the replay
    plant(model, "net.0", 1, math.nan, backward=False)
    trainer = fit(model, tmp_path, watch)
    texts = [str(each.message) for each in recwarn if issubclass(each.category, RecorderWarning)]
    assert texts == ["StepWatch could not run step 5 again: ValueError: planted"]
    assert "running the step again failed: ValueError: planted" in only(watch).next
    assert trainer.global_step == BATCHES


def test_an_error_of_the_watch_gives_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """An error in a hook switches the watch off; the recorders continue."""

    def fail(self: WatchedRun, *args: Any, **kwargs: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(WatchedRun, "end_batch", fail)
    recorder = ActivationRecorder(every_n_train_steps=1, outputs=QUIET)
    fit(Planted(), tmp_path, recorder)
    texts = [str(each.message) for each in recwarn if issubclass(each.category, RecorderWarning)]
    assert texts == ["StepWatch is off for the rest of the run, on_train_batch_end failed: ValueError: planted"]
    assert recorder.latest_step == BATCHES - 1


# Devices.


class GuardedWatch(StepWatch):
    """Runs the hooks of a step under a mode that fails if a value is read."""

    hooks: set[str]

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith(("on_train_batch", "on_before_")) or found is None:
            return found

        def guarded(*args: Any, **kwargs: Any) -> None:
            with NoReading():  # type: ignore[no-untyped-call]  # the constructor of torch is untyped
                found(*args, **kwargs)
            self.hooks.add(name)

        return guarded


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as a device whose values arrive later."""
    monkeypatch.setattr(WatchedRun, "_is_host", staticmethod(lambda device: False))


@pytest.mark.usefixtures("device")
def test_no_step_waits_for_the_device(tmp_path: Path) -> None:
    """No hook of a step reads a value, and all values are in the series afterwards."""
    model, watch = Planted("convolutions", -1), GuardedWatch(strict=True)
    watch.hooks = set()
    fit(model, tmp_path, watch)
    assert watch.hooks >= {
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_backward",
        "on_before_optimizer_step",
    }
    series = open_recording(tmp_path).run["watch"]
    assert series["loss"].statistic("value").tolist() == [float(each) for each in model.losses]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("backward", [False, True])
def test_a_value_that_arrives_late_names_step_and_direction(backward: bool, tmp_path: Path) -> None:
    """Without a copy, the finding has the step, the direction and the option that knows more."""
    watch = StepWatch(strict=True, keep_parameters=False)
    fit(planted("net.3", backward=backward), tmp_path, watch)
    finding = only(watch)
    part = "backward" if backward else "forward"
    assert finding.first_step == finding.numbers["batch"] == 5
    assert f"it arose in the {part} pass" in finding.verdict
    assert "StepWatch(wait=True)" in finding.next
    if backward:  # the gradients of all parameters up to there are bad
        assert "the last parameter with a bad gradient is net.3.bias" in finding.verdict


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("option", ["wait", "keep_parameters"])
@pytest.mark.parametrize("backward", [False, True])
def test_options_name_the_module_on_a_device(option: str, backward: bool, tmp_path: Path) -> None:
    """With either option, the step is replayed with the parameters from before it."""
    watch = StepWatch(strict=True, wait=option == "wait", keep_parameters=option == "keep_parameters")
    fit(planted("net.3", backward=backward), tmp_path, watch)
    finding = only(watch)
    assert (finding.module, finding.first_step, finding.numbers["batch"]) == ("net.3", 5, 5)


@pytest.mark.parametrize("copy", [0.001, 0.025])
def test_parameters_of_a_few_steps_before_name_the_module(
    copy: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that takes 2.5 % of a step is taken every three steps, and the finding says how old its parameters are."""
    arrive_late(monkeypatch, 1, copy=copy)
    model, watch = planted("net.3", backward=True, at=19), StepWatch(strict=True, save_parameters=True)
    fit(model, tmp_path, watch, loader=batches(24))
    finding = only(watch)
    assert (finding.module, finding.first_step) == ("net.3", 19)
    is_exact = copy < 0.01
    words = "(the step was run again with the parameters of 2 steps before)"
    assert (words in finding.verdict) != is_exact
    assert finding.numbers.get("parameters_age") == (None if is_exact else 2)
    # Only the parameters of the step itself are written as such.
    assert (tmp_path / "recorder/incidents/step-19/parameters.safetensors").exists() == is_exact


def test_a_bad_value_that_older_parameters_do_not_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the step is finite with older parameters, the finding says so, and names the options that know more."""

    class Overwritten(Planted):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.is_due:  # the gradients of this step are finite, and its update is not
                self.net[0].weight.data.fill_(math.nan)  # type: ignore[index]  # a Sequential

    arrive_late(monkeypatch, 1, copy=0.025)
    watch = StepWatch(strict=True)
    fit(Overwritten("mlp", 18), tmp_path, watch, loader=batches(24))
    finding = only(watch)
    assert (finding.module, finding.first_step) == ("", 19)
    because = "its batches give finite values with the parameters of 2 steps before, the last ones that were kept"
    assert because in finding.next
    assert "StepWatch(wait=True)" in finding.next


# Spikes.


class Spiky(Planted):
    """A net with a large loss at some steps."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * {30: 1000, 50: 5000}.get(batch_idx, 1)


def test_a_spike_is_found_and_the_next_step_recorded(tmp_path: Path) -> None:
    """One finding has the first and the farthest spike and their number; the step after each is recorded."""
    watch, recorder = StepWatch(strict=True), ActivationRecorder(every_n_train_steps=25, outputs=QUIET, strict=True)
    fit(Spiky(at=-1), tmp_path, watch, recorder, loader=batches(60))
    finding = only(watch)
    assert (finding.rule, finding.severity, finding.first_step, finding.last_step) == ("spike", "warning", 30, 50)
    assert (finding.numbers["batch"], finding.records) == (30, 2)
    begin, largest = finding.verdict.split("; ")
    assert begin.startswith(
        "2 spikes (each above 3 × the largest of the 10 steps before it), the first at step 30 (batch 30 of epoch 0): "
    )
    assert largest.startswith("the farthest above the median at step 50 (batch 50 of epoch 0): the loss to ")
    assert finding.verdict.count(" × its running median and the gradient norm to ") == 2
    assert finding.numbers["largest_step"] == 50
    assert open_recording(tmp_path).run["activations"].steps == [0, 24, 31, 49, 51]


class Converged(Planted):
    """A net whose loss is near zero after 30 steps, with other values at some later steps."""

    later: ClassVar[dict[int, float]] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss / loss.detach() * self.later.get(batch_idx, 1.0 if batch_idx < 30 else 1e-3)


@pytest.mark.parametrize(
    ("later", "severity", "words"),
    [
        ({150: 0.45, 151: 0.05}, "note", "; that is 0.45 × the first losses"),
        ({150: 0.55}, "warning", "550 × its running median and the gradient norm to "),
        (dict.fromkeys(range(150, 201), 0.2), "warning", "; 50 steps after step 150, the loss is still 0.2, 200 × as "),
        ({150: 0.2, 180: 0.6}, "warning", "; the farthest above the median at step 180 (batch 180 of epoch 0): "),
    ],
)
def test_a_spike_of_a_loss_close_to_zero(
    later: dict[int, float], severity: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a note, unless it takes back half of the first losses, or the loss does not come back from it."""
    monkeypatch.setattr(Converged, "later", later)
    watch = StepWatch(strict=True, on_finding="stop")
    trainer = fit(Converged(at=-1), tmp_path, watch, loader=batches(210))
    finding = only(watch)
    assert (finding.rule, finding.severity, finding.first_step) == ("spike", severity, 150)
    assert words in finding.verdict
    assert (trainer.global_step < 210) == (severity == "warning")


class Rising(Planted):
    """A net with a large loss at one step, and a larger one two steps later."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * {30: 1000, 32: 2000, 33: 500}.get(batch_idx, 1)


def test_the_largest_value_of_a_spike_is_named(tmp_path: Path) -> None:
    """A larger value soon after a spike is no spike of its own, but the finding names it, and a last batch as such."""
    watch = StepWatch(strict=True)
    fit(Rising(at=-1), tmp_path, watch, loader=batches(33))
    finding = only(watch)
    assert finding.records == 1
    begin, largest = finding.verdict.split("; ")
    assert begin.startswith("a spike at step 30 (batch 30 of epoch 0): the loss to ")
    last = "(batch 32 of epoch 0, the last of each epoch)"
    assert largest.startswith(f"the farthest above the median at step 32 {last}: the loss to ")


def test_a_spike_of_accumulated_gradients_names_its_batches(tmp_path: Path) -> None:
    """A step of several batches has the first and the last of them, and is the last of its epoch if it has the last."""
    watch = StepWatch(strict=True)
    fit(Spiky(at=-1), tmp_path, watch, loader=batches(52), accumulate_grad_batches=2)
    where = "at step 25 (batches 50 and 51 of epoch 0, the last of each epoch): the loss to "
    assert where in only(watch).verdict


class SteepAtTimes(Planted):
    """A net with large gradients at a step whose loss is as usual."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + 1000 * (loss - loss.detach()) if batch_idx == 30 else loss


@pytest.mark.parametrize(("clip", "severity"), [(None, "warning"), (1.0, "note")])
def test_a_spike_that_is_clipped_is_a_note(clip: float | None, severity: str, tmp_path: Path) -> None:
    """If gradients are clipped, a spike of their norm is only noted, and does not end the fit."""
    watch = StepWatch(strict=True, on_finding="stop")
    trainer = fit(SteepAtTimes(at=-1), tmp_path, watch, loader=batches(60), gradient_clip_val=clip)
    finding = only(watch)
    assert (finding.rule, finding.path, finding.severity) == ("spike", "gradient norm", severity)
    assert trainer.global_step == (31 if clip is None else 60)


def test_spikes_can_be_switched_off(tmp_path: Path) -> None:
    """With ``spikes=0`` there are none."""
    watch = StepWatch(spikes=0)
    fit(Spiky(at=-1), tmp_path, watch, loader=batches(60))
    assert watch.found == []


# What happens then.


def test_a_function_receives_each_finding_once(tmp_path: Path) -> None:
    """A function is called with the finding, once per kind and module."""
    found: list[Finding] = []
    watch = StepWatch(on_finding=found.append)
    fit(planted(), tmp_path, watch, max_epochs=3)
    assert found == watch.found
    assert len(found) == 1


@pytest.mark.parametrize("backward", [False, True])
def test_the_fit_stops_with_a_checkpoint_from_before_the_step(backward: bool, tmp_path: Path) -> None:
    """With ``"stop"``, the bad step is not taken: the checkpoint has the parameters of a run that ended before."""
    model = planted("net.3", backward=backward)
    trainer = fit(model, tmp_path, StepWatch(on_finding="stop", strict=True), max_epochs=3)
    assert trainer.current_epoch == 1
    assert trainer.state.finished
    path = tmp_path / "recorder" / "incidents" / "step-5" / "checkpoint.ckpt"
    state = torch.load(path, weights_only=True)["state_dict"]
    before = planted("net.3", backward=backward)
    fit(before, tmp_path / "before", limit_train_batches=5)
    for name, value in before.state_dict().items():
        assert torch.equal(state[name], value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spikes": 0.5}, "spikes must be a number above 1, or 0 for none, got 0.5"),
        ({"on_finding": "raise"}, "on_finding must be 'warn', 'stop', .* or a function, got 'raise'"),
        ({"on_finding": lambda: None}, "on_finding takes a function"),
        ({"wait": "no"}, "wait must be True or False"),
        ({"max_bytes": -1}, "max_bytes must be an integer of at least 0"),
    ],
)
def test_wrong_arguments_raise(options: dict[str, Any], message: str) -> None:
    """The message names the argument and what it may be."""
    with pytest.raises(ArgumentError, match=message):
        StepWatch(**options)


# Incidents.


@pytest.mark.slow
@pytest.mark.parametrize("parameters", ["saved", "checkpoint"])
def test_the_script_of_an_incident_reproduces_the_finding(parameters: str, tmp_path: Path) -> None:
    """In a new process, ``replay.py`` prints the verdict of the finding, from the folder and a checkpoint alone."""
    is_saved = parameters == "saved"
    watch = StepWatch(strict=True, save_parameters=is_saved, on_finding="warn" if is_saved else "stop")
    model = FaultyDropout()
    fit(model, tmp_path, watch)
    finding = only(watch)
    assert finding.module == "drop"
    folder = tmp_path / "recorder" / "incidents" / "step-5"
    assert forks.output_of(folder / "replay.py", folder=tmp_path).splitlines()[-1:] == [finding.line]


def test_a_script_without_parameters_says_how_to_get_them(tmp_path: Path) -> None:
    """Without parameters in the folder and without a checkpoint, the error names both ways to get them."""
    fit(FaultyDropout(), tmp_path, StepWatch(strict=True))
    folder = tmp_path / "recorder" / "incidents" / "step-5"
    missing = r"run `python replay\.py CHECKPOINT` .* StepWatch\(save_parameters=True\)"
    with pytest.raises(RecorderError, match=missing):
        reproduce(folder, FaultyDropout())
    # It says so before it imports the program, which may train when it is imported.
    script = (folder / "replay.py").read_text()
    assert script.index("need_parameters(HERE, checkpoint)") < script.index("make_model(HERE)")
    with pytest.raises(RecorderError, match=missing):
        need_parameters(folder)


class NaNDropout(nn.Dropout):
    """Drops values, and divides by the first one in its sixth call."""

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.calls += 1
        return out / (out[0, 0] != 0) if self.calls == 6 else out


class FaultyDropout(LightningModule):
    """A net whose fault depends on the random numbers, the batch and a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net, self.drop = nn.Linear(WIDTH, WIDTH), NaNDropout(0.999)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.drop(self.net(batch[0])).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def files_of(folder: Path) -> set[str]:
    return {each.name for each in (folder / "recorder" / "incidents" / "step-5").iterdir()}


@pytest.mark.parametrize(
    ("options", "absent"),
    [
        ({}, {"parameters.safetensors"}),
        ({"save_batch": False}, {"parameters.safetensors", "batch.safetensors"}),
        ({"max_bytes": 10, "save_parameters": True}, {"parameters.safetensors", "batch.safetensors"}),
        ({"save_parameters": True}, set()),
    ],
)
def test_an_incident_has_what_was_asked_for(options: dict[str, Any], absent: set[str], tmp_path: Path) -> None:
    """The folder has the finding, states, records and a script, and the batch and parameters only as allowed."""
    fit(planted(), tmp_path, StepWatch(strict=True, **options), ActivationRecorder(outputs=QUIET))
    everything = {"batch.safetensors", "parameters.safetensors", "random.safetensors"}
    everything |= {"finding.json", "incident.json", "records.json", "replay.py"}
    assert files_of(tmp_path) == everything - absent
    about = json.loads((tmp_path / "recorder" / "incidents" / "step-5" / "incident.json").read_text())
    assert (about["step"], about["batch_idx"], about["epoch"]) == (5, 5, 0)
    assert bool(about["left_out"]) == ("max_bytes" in options or "save_batch" in options)


def test_without_incidents_only_the_finding_is_written(tmp_path: Path) -> None:
    """With ``incidents=False``, nothing of the batch or the model is written, and the finding is still listed."""
    fit(planted(), tmp_path, StepWatch(incidents=False))
    assert files_of(tmp_path) == {"finding.json"}
    assert [each.rule for each in open_recording(tmp_path).run.findings] == ["non-finite"]


def test_a_folder_that_cannot_be_written_gives_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """The finding is still reported."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("planted")

    monkeypatch.setattr(watch_module, "write_finding", fail)
    watch = StepWatch()
    fit(planted(), tmp_path, watch)
    texts = [str(each.message) for each in recwarn if issubclass(each.category, RecorderWarning)]
    assert len(texts) == 1
    assert "PermissionError: planted" in texts[0]
    assert only(watch).module == "net.0"
