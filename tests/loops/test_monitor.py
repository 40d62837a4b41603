"""Tests of `Monitor` in loops, against the callbacks in a real Trainer and against the loop without it."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_recorder import (
    ActivationRecorder,
    ArgumentError,
    Check,
    GradientRecorder,
    GraphRecorder,
    MemorySink,
    Monitor,
    Outputs,
    ParameterRecorder,
    RecorderWarning,
    RecordingError,
    SelectionError,
    StepWatch,
    default_recorders,
    open_recording,
)
from lightning_recorder.testing import assert_same
from tests import forks

Batch = list[Tensor]
Body = Callable[[nn.Module, torch.optim.Optimizer, Batch, int], Tensor]


class Net(nn.Module):
    """A model with batch statistics and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.2))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.encoder(x)))
        return logits


class Lit(LightningModule):
    """The same model for a Trainer."""

    encoder: nn.Module
    head: nn.Module
    forward = Net.forward

    def __init__(self, rate: float = 1e-2) -> None:
        super().__init__()
        net = Net()
        self.encoder, self.head, self.rate = net.encoder, net.head, rate

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.rate)


def data(rows: int = 48) -> TensorDataset:
    """Return rows of 8 numbers with their classes."""
    source = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(rows, 8, generator=source), torch.randint(0, 3, (rows,), generator=source))


def loader(**options: Any) -> DataLoader[Any]:
    """Return 6 batches."""
    # Its own generator, since each iterator over a loader draws a number.
    return DataLoader(data(), 8, generator=torch.Generator(), **options)


def new(model: type[nn.Module] = Net) -> nn.Module:
    """Return a model, and set the random numbers of its training."""
    torch.manual_seed(1)
    made = model()
    torch.manual_seed(2)
    return made


def train(
    monitor: Callable[[nn.Module, torch.optim.Optimizer], Monitor] | None,
    *,
    epochs: int = 2,
    accumulate: int = 1,
    validates: bool = False,
) -> nn.Module:
    """Train a new model in a loop, with or without a monitor."""
    net = new()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    found = None if monitor is None else monitor(net, optimizer)
    with contextlib.nullcontext() if found is None else found:
        for _ in range(epochs):
            for index, batch in enumerate(loader()):
                with contextlib.nullcontext() if found is None else found.step(batch):
                    loss = F.cross_entropy(net(batch[0]), batch[1])
                    (loss / accumulate).backward()
                    if (index + 1) % accumulate == 0:
                        optimizer.step()
                        optimizer.zero_grad()
                    if found is not None:
                        found.log(loss=loss)
            if validates:
                net.eval()
                with contextlib.nullcontext() if found is None else found.evaluation(batches=6), torch.no_grad():
                    for batch in loader():
                        with contextlib.nullcontext() if found is None else found.step(batch):
                            F.cross_entropy(net(batch[0]), batch[1])
                net.train()
            if found is not None:
                found.end_epoch()
    return net


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    """Return True if all parameters and buffers are equal."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def fit(folder: Path, *, validates: bool = False, **options: Any) -> nn.Module:
    """Train the same model in a Trainer with the callbacks."""
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=TensorBoardLogger(folder, "fit", "run"),
        callbacks=[*default_recorders(every_n_train_steps=2)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=1.0 if validates else 0,
        **options,
    )
    model = new(Lit)
    trainer.fit(model, loader(), loader())  # type: ignore[arg-type]  # it is a LightningModule
    return model


def lines(log_dir: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of a file of records without the times that they took, and what only a Trainer plans."""
    path = log_dir / "recorder" / "records" / f"{name}.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    left_out = ("time", "planned_steps", "schedules")
    return [
        {key: each for key, each in line.items() if key not in left_out and not key.endswith("_ms")} for line in found
    ]


def watched(log_dir: Path, series: str) -> dict[int, float]:
    """Return the loss or the gradient norm of each step."""
    found: dict[int, float] = {}
    layout: list[list[Any]] = []
    for line in lines(log_dir, "watch"):
        if "values" in line and line["stage"] == "train":  # otherwise it begins a session, or has logged values
            layout = line.get("layout", layout)
            values = np.frombuffer(base64.b64decode(line["values"]))
            found[line["step"]] = float(values[[name for name, *_ in layout].index(series)])
    return found


@pytest.mark.parametrize(("accumulate", "validates"), [(1, False), (1, True), (3, False)])
def test_records_equal_those_of_the_callbacks(tmp_path: Path, accumulate: int, validates: bool) -> None:
    """Activations, gradients, parameters, loss, gradient norm and graph are equal to the bit, and so is the model."""
    lit = fit(tmp_path, validates=validates, accumulate_grad_batches=accumulate)
    log_dir = tmp_path / "loop"
    net = train(
        lambda net, optimizer: Monitor(net, optimizer, log_dir=log_dir, accumulate=accumulate, every_n_train_steps=2),
        accumulate=accumulate,
        validates=validates,
    )
    assert same_bits(lit, net)
    fitted = tmp_path / "fit" / "run"
    for name in "activations", "gradients", "parameters":
        # The first line has the settings of the run, which a Trainer has more of.
        assert lines(log_dir, name)[1:] == lines(fitted, name)[1:]
    assert_same(log_dir, fitted, exact=True)
    assert watched(log_dir, "grad_norm") == watched(fitted, "grad_norm")
    assert watched(log_dir, "loss") == watched(fitted, "loss")
    graphs = [json.loads((each / "recorder" / "graph.json").read_text()) for each in (log_dir, fitted)]
    kinds = [[(node["kind"], node["name"]) for node in each["nodes"]][1:] for each in graphs]
    assert [each for each in kinds[0] if each[0] == "module"] == [each for each in kinds[1] if each[0] == "module"]
    assert (log_dir / "recorder" / "findings.json").exists()


def test_training_is_the_same_with_and_without(tmp_path: Path) -> None:
    """The model is equal to the bit after a loop with every part recorded on each step."""
    made = train(
        lambda net, optimizer: Monitor(net, optimizer, log_dir=tmp_path, every_n_steps=1), accumulate=2, validates=True
    )
    assert same_bits(made, train(None, accumulate=2, validates=True))


def test_event_files_have_the_values(tmp_path: Path) -> None:
    """Values of `log` are written to the event files of the folder at the interval, those of recorders to theirs."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(lambda net, optimizer: Monitor(net, optimizer, log_dir=tmp_path, every_n_steps=4))
    own, of_recorders = EventAccumulator(str(tmp_path)), EventAccumulator(str(tmp_path / "recorder"))
    own.Reload()
    of_recorders.Reload()
    assert [each.step for each in own.Scalars("loss")] == [3, 7, 11]
    assert "z_recorder/activations/encoder.0/rms" in of_recorders.Tags()["scalars"]


def test_an_optimizer_that_is_not_given_is_found(tmp_path: Path) -> None:
    """An optimizer that comes later is recorded from its first step on."""
    net, sink = new(), MemorySink()
    recorder = ParameterRecorder(every_n_train_steps=1, sinks=[sink])
    with Monitor(net, log_dir=tmp_path, recorders=[recorder]) as monitor:
        for batch in loader():
            with monitor.step(batch):
                net(batch[0]).sum().backward()
                torch.optim.SGD(net.parameters(), 1e-3).step()
                net.zero_grad()
                monitor.log(loss=0.0)
    assert recorder.latest_step == 5
    assert "weight.grad" in {site.path for site in recorder.latest}


def test_a_gan_has_both_models(tmp_path: Path) -> None:
    """Names of modules begin with those of the models, and each optimizer has the updates of its own."""
    models = {"generator": nn.Linear(4, 2), "discriminator": nn.Linear(2, 1)}
    optimizers = [torch.optim.Adam(each.parameters()) for each in models.values()]
    recorder = ParameterRecorder(every_n_train_steps=1)
    with Monitor(models, optimizers, log_dir=tmp_path, recorders=[recorder, StepWatch()]) as monitor:
        for _ in range(3):
            with monitor.step():
                fake = models["generator"](torch.randn(8, 4))
                monitor.backward(models["discriminator"](fake.detach()).mean())
                optimizers[1].step()
                monitor.backward(-models["discriminator"](fake).mean())
                optimizers[0].step()
                for each in optimizers:
                    each.zero_grad()
    updates = {site.name for site in recorder.latest if site.path == "weight.update"}
    assert updates == {"generator", "discriminator"}
    assert recorder.latest_step == 2
    assert list(watched(tmp_path, "loss")) == [0, 1, 2]


def test_a_closure_is_recorded_after_its_first_evaluation(tmp_path: Path) -> None:
    """An optimizer that computes the gradients itself has the same records and the same bits as in a Trainer."""

    class Closed(Lit):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    recorders = [ParameterRecorder(every_n_train_steps=1), ParameterRecorder(every_n_train_steps=1)]
    trainer = Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=TensorBoardLogger(tmp_path, "fit", "run"),
        callbacks=[recorders[0]],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    lit, net = new(Closed), new()
    torch.manual_seed(2)
    trainer.fit(lit, loader())  # type: ignore[arg-type]  # it is a LightningModule
    torch.manual_seed(2)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    with Monitor(net, optimizer, log_dir=tmp_path / "loop", recorders=[recorders[1]]) as monitor:
        for batch in [each for each, _ in zip(loader(), range(2), strict=False)]:

            def closure(batch: Batch = batch) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(net(batch[0]), batch[1])
                loss.backward()
                return loss

            with monitor.step(batch):
                optimizer.step(closure)
    assert same_bits(lit, net)
    assert lines(tmp_path / "loop", "parameters")[1:] == lines(tmp_path / "fit" / "run", "parameters")[1:]


@pytest.mark.parametrize("is_given", [True, False])
def test_a_gradient_scaler_is_undone(tmp_path: Path, is_given: bool) -> None:
    """Gradients are those of the loss without its scale; an overflow is counted as a step, as in Lightning."""

    def run(folder: Path, scale: float | None) -> GradientRecorder:
        net = new()
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        recorder = GradientRecorder(every_n_train_steps=1)
        given: dict[str, Any] = {"scaler": scaler} if is_given and scale else {}
        with Monitor(net, optimizer, log_dir=folder, recorders=[recorder, StepWatch()], **given) as monitor:
            for index, batch in enumerate(loader()):
                with monitor.step(batch):
                    loss = F.cross_entropy(net(batch[0]), batch[1])
                    scaler.scale(loss * (float("inf") if scale and index == 3 else 1.0)).backward()
                    scaler.step(optimizer) if not (scale is None and index == 3) else optimizer.step()
                    scaler.update()
                    optimizer.zero_grad()
                    monitor.log(loss=loss)
                    if index == 2:
                        break
        return recorder

    with contextlib.nullcontext() if is_given else pytest.warns(RecorderWarning, match=r"pass Monitor\(scaler"):
        scaled = run(tmp_path / "scaled", 1024.0)
    plain = run(tmp_path / "plain", None)
    assert scaled.latest_step == plain.latest_step == 2
    assert {site: seen.scalars for site, seen in scaled.latest.items()} == {
        site: seen.scalars for site, seen in plain.latest.items()
    }
    assert watched(tmp_path / "scaled", "loss") == watched(tmp_path / "plain", "loss")


def test_a_skipped_step_counts_as_a_step(tmp_path: Path) -> None:
    """A step that the scaler skips because of an overflow is counted, and is no record."""
    net = new()
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    recorder = GradientRecorder(every_n_train_steps=1)
    with Monitor(net, optimizer, log_dir=tmp_path, recorders=[recorder], scaler=scaler) as monitor:
        for index, batch in enumerate(loader()):
            with monitor.step(batch):
                loss = F.cross_entropy(net(batch[0]), batch[1])
                scaler.scale(loss * (float("inf") if index == 5 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                monitor.log(loss=loss)
    assert monitor.state_dict()["global_step"] == 6
    assert recorder.latest_step == 4


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    """A run in two parts has the records of one that is not interrupted."""

    def part(folder: Path, state: Any, parts: list[int]) -> Any:
        net = new()
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)
        if state is not None:
            net.load_state_dict(state["net"])
            torch.set_rng_state(state["random"])
        recorders = [ActivationRecorder(reduce=4, every_n_train_steps=1), StepWatch()]
        monitor = Monitor(net, optimizer, log_dir=folder, recorders=recorders)
        if state is not None:
            monitor.load_state_dict(state["monitor"])
        batches = list(loader())
        with monitor:
            for index in parts:
                with monitor.step(batches[index]):
                    loss = F.cross_entropy(net(batches[index][0]), batches[index][1])
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    monitor.log(loss=loss)
            saved = {"net": net.state_dict(), "random": torch.get_rng_state(), "monitor": monitor.state_dict()}
            torch.save(saved, folder / "checkpoint.pt")
        return torch.load(folder / "checkpoint.pt", weights_only=True)

    for name in "whole", "parts":
        (tmp_path / name).mkdir()
    part(tmp_path / "whole", None, [0, 1, 2, 3, 4, 5])
    state = part(tmp_path / "parts", None, [0, 1, 2])
    assert state["monitor"]["global_step"] == 3
    part(tmp_path / "parts", state, [3, 4, 5])
    assert_same(tmp_path / "parts", tmp_path / "whole", exact=True)
    assert watched(tmp_path / "parts", "loss") == watched(tmp_path / "whole", "loss")
    assert list(watched(tmp_path / "whole", "loss")) == [0, 1, 2, 3, 4, 5]


def test_findings_name_the_origin_with_a_step_function(tmp_path: Path) -> None:
    """A step with a bad value is run again by the function of the loop, and the finding names the sample."""
    net = new()
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    rows = data()
    rows.tensors[0][19, 3] = float("nan")

    def compute(batch: Batch) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1])

    watch = StepWatch()
    with Monitor(net, optimizer, log_dir=tmp_path, recorders=[watch], step_function=compute) as monitor:
        for batch in monitor.steps(DataLoader(rows, 8)):
            optimizer.zero_grad()
            loss = compute(batch)
            monitor.log(loss=loss)
            loss.backward()
            optimizer.step()
    first = watch.found[0]
    assert first.first_step == 2
    assert "row 19" in first.line
    assert "batch[0]" in first.line
    # No script is promised that cannot run a step of a loop.
    assert not (tmp_path / "recorder" / "incidents" / "step-2" / "replay.py").exists()
    assert (tmp_path / "recorder" / "incidents" / "step-2" / "incident.json").exists()


@pytest.mark.parametrize("has_function", [True, False])
def test_a_loop_is_checked_with_a_step_function(tmp_path: Path, has_function: bool) -> None:
    """A check answers the questions about the first step, which needs a function of the loop, and changes no bit."""
    check = Check(strict=True)

    def monitor(net: nn.Module, optimizer: torch.optim.Optimizer) -> Monitor:
        def compute(batch: Batch) -> Tensor:
            return F.cross_entropy(net(batch[0]), batch[1])

        function = compute if has_function else None
        return Monitor(net, optimizer, log_dir=tmp_path, recorders=[check], step_function=function)

    assert same_bits(train(monitor), train(None))
    assert check.result is not None
    verdicts = {each.question: each.verdict for each in check.result.answers}
    assert verdicts["parameters-learn"] == verdicts["evaluation"] == ("ok" if has_function else "no answer")
    assert check.result.status == (0 if has_function else 2)
    assert (tmp_path / "recorder" / "check.json").is_file()


@pytest.mark.parametrize("value", ["check", "check-only"])
def test_the_variable_checks_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """`LIGHTNING_RECORDER=check` checks before the recorders record, and the command ends the loop after the check."""
    monkeypatch.setenv("LIGHTNING_RECORDER", value)
    with pytest.raises(SystemExit) if value == "check-only" else contextlib.nullcontext():
        train(lambda net, optimizer: Monitor(net, optimizer, log_dir=tmp_path, recorders=[ActivationRecorder()]))
    assert (tmp_path / "recorder" / "check.json").is_file()
    assert (tmp_path / "recorder" / "records").exists() == (value == "check")


def test_without_a_function_the_finding_says_how_to_get_the_origin(tmp_path: Path) -> None:
    """The body of a loop cannot be run again, which the finding says."""
    net = new()
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    watch = StepWatch()
    with Monitor(net, optimizer, log_dir=tmp_path, recorders=[watch]) as monitor:
        for batch in loader():
            with monitor.step(batch):
                loss = net(batch[0]).sum() * float("inf")
                monitor.log(loss=loss)
                loss.backward()
                optimizer.step()
    assert "step_function" in watch.found[0].line + str(vars(watch.found[0]))


def test_an_action_in_a_loop_gets_a_clear_word(tmp_path: Path) -> None:
    """The watch acts in no loop: it steps the optimizers itself. A warning at the start says so, and it watches."""
    watch = StepWatch(on_finding="skip", strict=True)
    with pytest.warns(
        RecorderWarning, match=r"does not act \('skip'\): in a loop of your own, it steps the optimizers"
    ):
        trained = train(lambda net, optimizer: Monitor(net, optimizer, log_dir=tmp_path, recorders=[watch]))
    assert same_bits(trained, train(None))


def test_samples_are_counted_in_epochs(tmp_path: Path) -> None:
    """`data.json` has the samples of each epoch, and only if the loop says when epochs end."""

    def run(folder: Path, ends: bool) -> Path:
        net = new()
        with Monitor(net, log_dir=folder, recorders=[StepWatch()]) as monitor:
            for _ in range(2):
                for batch in loader():
                    with monitor.step(batch):
                        net(batch[0])
                if ends:
                    monitor.end_epoch()
        return folder / "recorder" / "data.json"

    path = run(tmp_path / "epochs", ends=True)
    data = json.loads(path.read_text())
    assert [each["samples"] for each in data["epochs"]] == [48, 48]
    assert data["loader"]["sampler"] == ""  # the loop did not say what it iterates over
    assert not run(tmp_path / "none", ends=False).exists()


# Bad input.


def _step(monitor: Monitor, net: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    with monitor.step(batch):
        loss = F.cross_entropy(net(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss)


def _evaluate(monitor: Monitor, net: nn.Module, batch: Batch) -> None:
    with monitor.step(batch):
        net(batch[0])


def _parts(folder: Path, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Monitor, ActivationRecorder]:
    net = new()
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    recorder = ActivationRecorder(every_n_train_steps=1)
    return net, optimizer, Monitor(net, optimizer, log_dir=folder, recorders=[recorder], **options), recorder


def _hooks(net: nn.Module) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in net.modules())


def test_a_step_that_raises_is_left_out(tmp_path: Path) -> None:
    """A loop that handles an exception goes on, and the failed step has no record and leaves no hook."""
    net, optimizer, monitor, recorder = _parts(tmp_path)
    batches = list(loader())
    with monitor:
        _step(monitor, net, optimizer, batches[0])
        with contextlib.suppress(ValueError), monitor.step(batches[1]):
            net(batches[1][0])
            raise ValueError("no more memory")
        assert _hooks(net) == 0
        _step(monitor, net, optimizer, batches[2])
    assert recorder.latest_step == 1
    assert recorder.latest[next(iter(recorder.latest))].scalars["count"] == 8 * 16


def test_an_exception_ends_the_run(tmp_path: Path) -> None:
    """An exception passes unchanged, everything so far is written, and the graph has the failed part."""
    net, optimizer, monitor, recorder = _parts(tmp_path)
    graph = GraphRecorder()
    monitor = Monitor(net, optimizer, log_dir=tmp_path, recorders=[recorder, graph])

    def fail() -> None:
        with monitor, monitor.step():
            net(next(iter(loader()))[0])
            raise ValueError("as it was")

    with pytest.raises(ValueError, match="as it was"):
        fail()
    assert _hooks(net) == 0
    assert graph.graph is not None
    assert (tmp_path / "recorder" / "graph.json").exists()


def test_break_ends_a_step_and_the_run(tmp_path: Path) -> None:
    """A `break` in a step is its end."""
    net, optimizer, monitor, recorder = _parts(tmp_path)
    with monitor:
        for index, batch in enumerate(loader()):
            with monitor.step(batch):
                net(batch[0]).sum().backward()
                optimizer.step()
                if index == 2:
                    break
    assert recorder.latest_step == 2
    assert _hooks(net) == 0


def test_a_loop_in_a_generator(tmp_path: Path) -> None:
    """A generator that is not asked for more ends its step and its run."""
    net, optimizer, monitor, recorder = _parts(tmp_path)

    def losses() -> Iterator[float]:
        with monitor:
            for batch in monitor.steps(loader()):
                loss = net(batch[0]).sum()
                loss.backward()
                optimizer.step()
                yield float(loss.detach())

    found = losses()
    next(found)
    next(found)
    found.close()  # type: ignore[attr-defined]  # of a generator
    assert recorder.latest_step == 1
    assert _hooks(net) == 0


def test_a_step_without_loss_is_recorded_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Everything but the loss is recorded."""
    net, optimizer, monitor, recorder = _parts(tmp_path)
    with caplog.at_level("INFO"), monitor, monitor.step():
        net(next(iter(loader()))[0]).sum().backward()
        optimizer.step()
    assert recorder.latest_step == 0
    assert "call monitor.log(loss=loss)" in caplog.text
    assert list(watched(tmp_path, "grad_norm")) == [0]
    assert math.isnan(watched(tmp_path, "loss")[0])


def test_a_replaced_model_is_named(tmp_path: Path) -> None:
    """An optimizer of another model gives one warning."""
    _, _, monitor, _ = _parts(tmp_path)
    other = new()
    optimizer = torch.optim.SGD(other.parameters(), 1e-2)
    with pytest.warns(RecorderWarning, match="If the model was replaced"), monitor:
        _step(monitor, other, optimizer, next(iter(loader())))


def test_an_evaluation_inside_a_step(tmp_path: Path) -> None:
    """It is warned about, and the training stays the same."""
    net, optimizer, monitor, recorder = _parts(tmp_path)
    batches = list(loader())
    with monitor:
        _step(monitor, net, optimizer, batches[0])
        with monitor.step(batches[1]):
            net(batches[1][0])
            with pytest.warns(RecorderWarning, match="inside a step"), monitor.evaluation():
                _evaluate(monitor, net, batches[2])
        _step(monitor, net, optimizer, batches[3])
    assert recorder.latest_step in (1, 2)
    assert _hooks(net) == 0


def test_a_step_in_another_thread_at_the_same_time_is_not_recorded(tmp_path: Path) -> None:
    """One of two steps is recorded, and a warning says so."""
    net, optimizer, monitor, recorder = _parts(tmp_path)
    batch = next(iter(loader()))

    def other() -> None:
        with monitor.step(batch):
            pass

    with monitor, monitor.step(batch):
        thread = threading.Thread(target=other)
        with pytest.warns(RecorderWarning, match="two threads"):
            _run_through(thread)
        net(batch[0]).sum().backward()
        optimizer.step()
    assert recorder.latest_step == 0


def _run_through(thread: threading.Thread) -> None:
    thread.start()
    thread.join()


def test_a_step_inside_a_step_is_ignored(tmp_path: Path) -> None:
    """The outer step is recorded."""
    net, optimizer, monitor, recorder = _parts(tmp_path)
    batch = next(iter(loader()))
    with monitor, monitor.step(batch), pytest.warns(RecorderWarning, match="a step inside a step"):
        _step(monitor, net, optimizer, batch)
    assert recorder.latest_step == 0


def test_a_step_that_is_not_entered_is_named(tmp_path: Path) -> None:
    """`monitor.step(batch)` without `with` gives a warning."""
    _, _, monitor, _ = _parts(tmp_path)
    with pytest.warns(RecorderWarning, match="write `with monitor.step"):
        monitor.step()
    with pytest.warns(RecorderWarning, match="no step ran"), monitor:
        pass


def test_a_monitor_without_with_records_until_the_program_ends(tmp_path: Path) -> None:
    """A program that forgets `with` has its records, and a warning."""
    program = (
        "import torch\nfrom lightning_recorder import ActivationRecorder, Monitor\n"
        "net = torch.nn.Sequential(torch.nn.Linear(2, 2))\noptimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "recorder = ActivationRecorder(every_n_train_steps=1, reduce=10)\n"
        "monitor = Monitor(net, optimizer, log_dir='run', recorders=[recorder])\n"
        "for _ in range(3):\n    with monitor.step():\n        net(torch.ones(1, 2)).sum().backward()\n"
        "        optimizer.step()\n"
    )
    log = forks.output_of("-c", program, folder=tmp_path)
    assert "write `with Monitor" in log
    assert [each["steps"] for each in lines(tmp_path / "run", "activations")[1:]] == [3]


def _train_by_hand(net: nn.Module, rate: float, monitor: Monitor | None = None) -> nn.Module:
    """Train a model in a loop that changes the parameters itself."""
    for batch in loader():
        with contextlib.nullcontext() if monitor is None else monitor.step(batch):
            net.zero_grad()
            F.cross_entropy(net(batch[0]), batch[1]).backward()
            for each in net.parameters():
                assert each.grad is not None
                each.data.add_(each.grad, alpha=-rate)
    return net


def test_a_loop_without_an_optimizer_is_recorded(tmp_path: Path) -> None:
    """A batch in which the loop changes parameters is a step. Gradients are recorded, and nothing is unusual."""
    expected = _train_by_hand(new(), 0.1)
    net = new()
    with Monitor(net, log_dir=tmp_path, every_n_steps=1) as monitor:
        _train_by_hand(net, 0.1, monitor)
    assert same_bits(net, expected)
    run = open_recording(tmp_path).run
    assert [run[name].steps for name in ("activations", "gradients", "parameters")] == [list(range(6))] * 3
    assert {site.path for site in run["parameters"].sites if site.name == "head"} == {
        "weight", "weight.grad", "weight.update", "bias", "bias.grad", "bias.update",
    }  # fmt: skip
    assert len(watched(tmp_path, "grad_norm")) == 6
    assert not run.findings


def test_a_loop_without_an_optimizer_has_the_records_of_one_with_it(tmp_path: Path) -> None:
    """Values are those before the step, and updates the change in it."""
    net = new()
    with Monitor(net, log_dir=tmp_path / "by hand", every_n_steps=2) as monitor:
        _train_by_hand(net, 0.1, monitor)
    net = new()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with Monitor(net, log_dir=tmp_path / "optimizer", every_n_steps=2) as monitor:
        for batch in loader():
            with monitor.step(batch):
                optimizer.zero_grad()
                F.cross_entropy(net(batch[0]), batch[1]).backward()
                optimizer.step()
    found, expected = (open_recording(tmp_path / name).run["parameters"] for name in ("by hand", "optimizer"))
    assert found.steps == expected.steps == [0, 1, 3, 5]
    assert found.sites == expected.sites
    for statistic in ("mean", "rms", "min", "max", "update_ratio"):
        np.testing.assert_array_equal(found.numbers(statistic), expected.numbers(statistic))


class _Sgd:
    """An optimizer that is none of torch. It gives each parameter another tensor."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    def step(self) -> None:
        for each in self.parameters:
            each.data = each.data - 0.1 * each.grad


def test_an_optimizer_that_is_none_of_torch_is_a_loop_without_one(tmp_path: Path) -> None:
    """All recorders work, and parameters whose tensor is replaced have changed."""
    net = new()
    optimizer = _Sgd(net.parameters())
    with Monitor(net, optimizer, log_dir=tmp_path, every_n_steps=1, strict=True) as monitor:
        for batch in loader():
            with monitor.step(batch):
                net.zero_grad()
                loss = F.cross_entropy(net(batch[0]), batch[1])
                loss.backward()
                optimizer.step()
                monitor.log(loss=loss)
    assert open_recording(tmp_path).run["parameters"].steps == list(range(6))


def test_a_loop_in_which_nothing_steps_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Batches that change no parameter are no steps, and the end of the run gives a warning."""
    net = new()
    with (
        pytest.warns(RecorderWarning) as given,
        caplog.at_level("INFO"),
        Monitor(net, log_dir=tmp_path, costs=True) as monitor,
    ):
        _train_by_hand(net, 0.0, monitor)
    assert [str(each.message)[:24] for each in given] == ["Monitor recorded no step"]
    assert "CostRecorder recorded nothing: no optimizer stepped" in caplog.text


def test_the_import_draws_no_number() -> None:
    """Importing Lightning draws a number, and a loop may be seeded before it imports the monitor."""
    program = (
        "import random, sys\nrandom.seed(1)\nbefore = random.getstate()\nfrom lightning_recorder import Monitor\n"
        "print('lightning.pytorch' in sys.modules, random.getstate() == before)"
    )
    # A new interpreter: the process from which others are forked has imported Lightning.
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_wrong_arguments_raise_at_construction(tmp_path: Path) -> None:
    """Each message names the argument."""
    net = new()
    with pytest.raises(ArgumentError, match="model must be"):
        Monitor(42)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ArgumentError, match="every_n_steps"):
        Monitor(net, every_n_steps=0)
    with pytest.raises(ArgumentError, match="optimizer takes"):
        Monitor(net, {"net": torch.optim.SGD(net.parameters())})
    with pytest.raises(ArgumentError, match="recorders"):
        Monitor(net, recorders=[ActivationRecorder()], names="head")
    with pytest.raises(ArgumentError, match="ActivationRecorder"):
        Monitor(net, recorders=[ActivationRecorder])  # type: ignore[list-item]  # wrong on purpose
    with pytest.raises(SelectionError, match="heed"), Monitor(net, log_dir=tmp_path, names="heed") as m, m.step():
        pass


def test_a_state_that_comes_late_raises(tmp_path: Path) -> None:
    """A state is loaded before the first step."""
    net, optimizer, monitor, _ = _parts(tmp_path)
    with monitor:
        _step(monitor, net, optimizer, next(iter(loader())))
        with pytest.raises(RecordingError, match="before the first step"):
            monitor.load_state_dict(monitor.state_dict())
    with pytest.raises(ArgumentError, match="state_dict"):
        Monitor(net).load_state_dict({})


_RANKS = """
import os, sys, torch
from torch import nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from lightning_recorder import Monitor
rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
rows = torch.randn(32, 4, generator=torch.Generator().manual_seed(3))
monitor = Monitor(model, optimizer, log_dir="run", every_n_train_steps=1) if sys.argv[1] == "on" else None
def loop():
    for index in range(4):
        own = rows[8 * index :][4 * rank :][:4]
        if monitor is None:
            body(own)
        else:
            with monitor.step(own):
                monitor.log(loss=body(own))
def body(own):
    loss = model(own).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
if monitor is None:
    loop()
else:
    with monitor:
        loop()
if rank == 0:
    torch.save(net.state_dict(), sys.argv[1] + ".pt")
dist.destroy_process_group()
"""


def test_two_processes_make_one_record(tmp_path: Path) -> None:
    """Under DDP, records are merged over the ranks, and the bits of the training stay."""
    for way in "on", "off":
        codes, log = forks.run("-c", _RANKS, way, folder=tmp_path, ranks=2)
        assert codes == [0, 0], log[-3000:]
    on, off = (torch.load(tmp_path / f"{way}.pt", weights_only=True) for way in ("on", "off"))
    assert all(torch.equal(on[name], off[name]) for name in on)
    found = lines(tmp_path / "run", "activations")[1:]
    assert len(found) == 4
    assert found[0]["ranks"] == 2


def test_outputs_reach_the_sinks(tmp_path: Path) -> None:
    """Sinks of the monitor receive what recorders write, and the values of `log`."""
    sink = MemorySink()
    outputs = Outputs(records=False, findings=False)
    train(
        lambda net, optimizer: Monitor(net, optimizer, log_dir=tmp_path, every_n_steps=3, sinks=[sink], outputs=outputs)
    )
    assert {"loss", "activations/head/rms", "gradients/head/rms"} <= set(sink.scalars)


_UNLIKE_RANKS = """
import os, sys
import torch
from torch import distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from lightning_recorder import Monitor, Outputs, ParameterRecorder, StepWatch
rank, left_open = int(os.environ["LOCAL_RANK"]), []
dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
rows = torch.randn(13, 2, 4, 8, generator=torch.Generator().manual_seed(3))
def adam(parameters):
    return torch.optim.AdamW(parameters, 0.01)
def zero(parameters):
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01)
def train(name, make=adam, steps=13, skip=False, leave=False, uneven=False):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 3)))
    optimizer = make(model.parameters())
    quiet = Outputs(plots=False, dumps=False)
    # The recorder comes first, so that it waits for the records of the other rank before the watch ends.
    recorders = [
        ParameterRecorder(every_n_train_steps=4, outputs=quiet, strict=True),
        StepWatch(check_ranks_every_n_steps=2, strict=True),
    ]
    with Monitor(model, optimizer, log_dir=name, recorders=recorders, tensorboard=False) as monitor:
        with Join([model], enable=uneven):
            for step in range(steps):
                if leave and step == 6:
                    left_open.append(model.no_sync())
                    left_open[0].__enter__()
                with monitor.step(rows[step, rank]):
                    model(rows[step, rank]).square().mean().backward()
                    if not (skip and rank == 1 and step == 6):
                        optimizer.step()
                    optimizer.zero_grad()
train("skipped", skip=True)
train("left", leave=True)
train("joined", steps=13 if rank == 0 else 7, uneven=True)
train("zero", zero)
train("usual")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_that_differ_have_their_cause(tmp_path: Path) -> None:
    """A step that one rank leaves out and no_sync that is never left are named; ``Join`` and ZeRO are no findings.

    No rank waits for one that has fewer steps or batches.
    """
    codes, log = forks.run("-c", _UNLIKE_RANKS, folder=tmp_path, ranks=2, timeout_s=120)
    assert codes == [0, 0], log[-3000:]
    skipped, left = (open_recording(tmp_path / name).run.findings[0] for name in ("skipped", "left"))
    assert skipped.rule == left.rule == "ranks-differ"
    assert skipped.why.startswith("The optimizer has counted other numbers of steps: ")
    assert "and all were equal after step 6; " in skipped.verdict or "equal at step 3; " in skipped.verdict
    assert left.why == "DDP does not average the gradients: no_sync is still active after the step."
    for name in ("joined", "zero", "usual"):
        assert [each for each in open_recording(tmp_path / name).run.findings if not each.is_note] == []
    assert log.count("Join lets the ranks have different numbers of batches") == 1
