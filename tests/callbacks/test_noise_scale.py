"""The gradient noise scale of a fit, and the arguments of the default recorders for what is inside."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recorder import Outputs, RecorderWarning, default_recorders, open_recording
from lightning_recorder.taps import Site

ACCUMULATED, SIZE, STEPS = 4, 8, 10
QUIET = Outputs(plots=False, dumps=False, report=False)


class Net(LightningModule):
    """A regression of noise, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss: Tensor = (self.head(x) - y).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Kept(Callback):
    """Keeps the gradient of each batch, computed once more from its definition, and that of each step."""

    def __init__(self) -> None:
        self.single: list[Tensor] = []
        self.whole: list[Tensor] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        of_batch = torch.autograd.grad(loss, pl_module.head.weight, retain_graph=True)[0]
        self.single.append(of_batch * trainer.accumulate_grad_batches)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.whole.append(pl_module.head.weight.grad.clone())


def fit(folder: Path, callbacks: list[Any], accumulated: int = ACCUMULATED, net: Net | None = None) -> Net:
    seed_everything(3, verbose=False)
    data = TensorDataset(torch.randn(STEPS * ACCUMULATED * SIZE, 4).double(), torch.randn(1, 1).expand(320, 1).double())
    net = Net() if net is None else net
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=accumulated,
        log_every_n_steps=1,
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=callbacks,
    )
    trainer.fit(net, DataLoader(data, batch_size=SIZE))
    return net


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Kept, Net]:
    """Return the recording of a fit, the gradients of its batches and steps, and the trained model."""
    folder, kept = tmp_path_factory.mktemp("run"), Kept()
    net = fit(folder, [*default_recorders(noise_scale=True, outputs=QUIET, strict=True), kept])
    return open_recording(folder), kept, net


def test_gradients_of_batches_are_those_of_their_losses(run: tuple[Any, Kept, Net]) -> None:
    """The record of a step has the gradients of all its batches, undivided, beside that of the step."""
    recording, kept, _ = run
    parameters = recording["parameters"]
    single = torch.stack(kept.single).unflatten(0, (STEPS, ACCUMULATED)).square().mean((1, 2, 3)).sqrt()
    assert parameters[Site("head", "weight.batch_grad")].statistic("rms").tolist() == pytest.approx(single.tolist())
    whole = torch.stack(kept.whole).square().mean((1, 2)).sqrt()
    assert parameters[Site("head", "weight.grad")].statistic("rms").tolist() == pytest.approx(whole.tolist())


def test_the_scale_is_a_note(run: tuple[Any, Kept, Net]) -> None:
    """The run has a note with the size of a step in samples; the records have the number of batches."""
    (note,) = (each for each in run[0].findings if each.rule == "gradient-noise")
    assert note.is_note
    assert note.numbers["step"] == ACCUMULATED * SIZE
    assert 0 < note.numbers["low"] < note.numbers["high"]


def test_training_is_bitwise_the_same(run: tuple[Any, Kept, Net], tmp_path: Path) -> None:
    """Recording the gradients of batches changes no bit of the parameters."""
    bare = fit(tmp_path, [])
    assert all(torch.equal(one, other) for one, other in zip(run[2].parameters(), bare.parameters(), strict=True))


def test_a_step_of_one_batch_says_what_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With one batch a step there is no scale, and a message says what it needs."""
    with caplog.at_level("INFO"):
        fit(tmp_path, default_recorders(noise_scale=True, outputs=QUIET, strict=True), accumulated=1)
    assert "accumulate_grad_batches of at least 2, or several ranks" in caplog.text
    assert not [each for each in open_recording(tmp_path).findings if each.rule == "gradient-noise"]


@pytest.mark.parametrize(("attention", "experts"), [(True, True), (False, True), (True, False)])
def test_heads_and_experts_can_be_left_out(attention: bool, experts: bool) -> None:
    """Each has an argument of its own, and both are recorded by default."""
    made = default_recorders(attention=attention, experts=experts)
    functions = next(each.functions for each in made if hasattr(each, "functions"))
    assert ("heads" in functions, "experts" in functions) == (attention, experts)


class Left(Net):
    """The same with a layer that the optimizer does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([self.left(batch[0]), batch[1]], batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=1e-3)


def test_a_layer_without_an_optimizer_is_named_as_without_the_scale(tmp_path: Path) -> None:
    """Gradients of batches do not make a parameter one that an optimizer has."""
    fit(tmp_path, default_recorders(noise_scale=True, outputs=QUIET, strict=True), net=Left())
    found = [each.rule for each in open_recording(tmp_path).findings if not each.is_note]
    assert "not-in-optimizer" in found
    assert "gradient-stops" not in found


def test_biases_have_no_spectral_norm_and_no_warning(tmp_path: Path) -> None:
    """Only matrices have spectra; other parameters are left out without a warning."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always", RecorderWarning)
        fit(tmp_path, default_recorders(spectra=True, outputs=QUIET))
    assert not [str(each.message) for each in given if issubclass(each.category, RecorderWarning)]
    parameters = open_recording(tmp_path)["parameters"]
    for path, has in (("weight", True), ("weight.grad", True), ("bias", False)):
        assert bool(parameters[Site("head", path)].statistic("spectral_norm").isfinite().all()) is has
