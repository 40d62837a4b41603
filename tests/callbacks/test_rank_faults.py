"""Ranks that drift apart: each planted fault is named first, with its parameter, its rank and its step.

The faults of the data are in ``test_watched_samples.py``: an iterable data set that is not divided between ranks, or
between workers, a loader without a sampler for ranks, the same batches for ever, few samples, a cached batch, samples
of validation in training, samples in the order of their classes, and equal augmentations.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recorder import Outputs, open_recording
from tests import forks

pytestmark = pytest.mark.slow

QUIET = Outputs(plots=False, dumps=False)
STEPS = 12


def rank() -> int:
    return int(os.environ["LOCAL_RANK"])


class Net(LightningModule):
    """Two layers with a normalization in between, which has no running statistics."""

    at = 6
    """The step of a fault that comes later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.first(x)).relu())
        return found

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return (self(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


class ClippedOnOne(Net):
    """The gradient of the normalization is clipped on rank 1 only."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if rank() == 1:
            torch.nn.utils.clip_grad_norm_(self.norm.parameters(), 1e-3)


class NotReduced(Net):
    """DDP does not average the gradient of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self._ddp_params_and_buffers_to_ignore = ["module.head.weight", "head.weight"]


class Bypassed(Net):
    """The gradients come from ``autograd.grad``, which DDP does not see."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        parameters = list(self.parameters())
        for each, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            each.grad = gradient


class LostMessage(Net):
    """At one step, rank 1 keeps its own gradient of one bias instead of the mean."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == self.at and rank() == 1:
            self.head.bias.grad.mul_(2)  # type: ignore[union-attr]  # after a backward pass


class UnsyncedStep(Net):
    """At one step, the optimizer of rank 1 does not step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        if self.global_step == self.at and rank() == 1:
            closure()
            optimizer._on_before_step()
            optimizer._on_after_step()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, closure)


class OtherRate(Net):
    """Rank 1 has another learning rate for the head."""

    def configure_optimizers(self) -> Any:
        rate = 0.02 if rank() == 1 else 0.01
        groups: list[dict[str, Any]] = [{"params": [*self.first.parameters(), *self.norm.parameters()]}]
        return torch.optim.AdamW([*groups, {"params": list(self.head.parameters()), "lr": rate}], 0.01)


class TensorRate(Net):
    """The learning rate is a tensor, with another value on rank 1."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), torch.tensor(0.02 if rank() == 1 else 0.01))


class AddedLater(Net):
    """A layer is added to the model after DDP has wrapped it."""

    def on_train_start(self) -> None:
        torch.manual_seed(3)
        self.extra = nn.Linear(6, 1)
        self.trainer.optimizers[0].add_param_group({"params": list(self.extra.parameters())})

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x) + self.extra(x)
        return found


class NotLeft(Net):
    """From one step on, no_sync is never left."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            wrapper: Any = self.trainer.strategy.model
            self.left_open = wrapper.no_sync()
            self.left_open.__enter__()


class ExtraStep(Net):
    """At one step, the optimizer of rank 1 steps twice."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at and rank() == 1:
            self.trainer.optimizers[0].step()


class WrittenOnOne(Net):
    """Rank 0 alone writes to a weight after a step, as code for a checkpoint or a constraint may."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == self.at and rank() == 0:
            self.first.weight.data.clamp_(-0.2, 0.2)


class OtherState(Net):
    """The states of the optimizer are those of another checkpoint on rank 1."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == self.at and rank() == 1:
            optimizer: Any = self.optimizers()
            optimizer.state[self.head.weight]["exp_avg"].zero_()


class Normalized(Net):
    """Has running statistics, which differ between ranks and are meant to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)  # type: ignore[assignment]  # another normalization


FAULTS: dict[str, tuple[type[Net], str, str]] = {
    "clipped on one rank": (ClippedOnOne, "norm", "norm.weight, norm.bias"),
    "not reduced": (NotReduced, "head", "head.weight"),
    "bypassed": (Bypassed, "first", "all 6"),
    "lost message": (LostMessage, "head", "head.bias"),
    "unsynced step": (UnsyncedStep, "first", "all 6"),
    "other rate": (OtherRate, "head", "head.weight, head.bias"),
    "tensor rate": (TensorRate, "first", "all 6"),
    "added later": (AddedLater, "extra", "extra.weight, extra.bias"),
    "no_sync not left": (NotLeft, "first", "all 6"),
    "extra step": (ExtraStep, "first", "all 6"),
    "written on one rank": (WrittenOnOne, "first", "first.weight"),
    "other states": (OtherState, "head", "head.weight"),
}
CAUSES = {
    "other rate": "The optimizers have other settings: lr of group 1: 0.01 (rank 0), 0.02 (rank 1).",
    "tensor rate": "The optimizers have other settings: lr of group 0: 0.01 (rank 0), 0.02 (rank 1).",
    "unsynced step": "The optimizer has counted other numbers of steps: 8 (rank 0), 7 (rank 1).",
    "extra step": "The optimizer has counted other numbers of steps: 8 (rank 0), 9 (rank 1).",
    "added later": "DDP does not average their gradients: they were added",
    "not reduced": "DDP does not average their gradients: they were added",
    "no_sync not left": "DDP does not average the gradients: no_sync is still active after the step.",
}
LATER = ("lost message", "unsynced step", "written on one rank", "other states")
HEALTHY: dict[str, type[Net]] = {"plain": Net, "running statistics": Normalized}


def fit(folder: Path, model: LightningModule, callbacks: list[Any], **options: Any) -> None:
    seed_everything(1, verbose=False)
    x = torch.randn(STEPS * 8, 6)
    options = {"devices": 2, "max_epochs": 1, **options}
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        strategy="ddp",
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4))


SCRIPT = """
import sys
from pathlib import Path
from lightning_recorder import ParameterRecorder, StepWatch
from tests.callbacks.test_rank_faults import FAULTS, HEALTHY, QUIET, fit

folder = Path(sys.argv[1])
for name, model in {**{name: each[0] for name, each in FAULTS.items()}, **HEALTHY}.items():
    for way in ("watch", "records"):
        callbacks = [StepWatch(check_ranks_every_n_steps=2, strict=True)]
        if way == "records":
            callbacks.append(ParameterRecorder(every_n_train_steps=3, outputs=QUIET, strict=True))
        fit(folder / way / name, model(), callbacks)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the runs of two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    script = folder / "train.py"
    script.write_text(SCRIPT)
    codes, log = forks.run(script, folder, folder=folder, ranks=2, timeout_s=400)
    assert codes == [0, 0], log[-3000:]
    # The watch and the records see the same ranks. The log names them once, and warns of nothing else.
    assert log.count("Found at step") == 2 * len(FAULTS), log[-3000:]
    assert "RecorderWarning" not in log
    assert "have diverged" not in log
    return folder


@pytest.mark.parametrize("way", ["watch", "records"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_first(name: str, way: str, runs: Path) -> None:
    """With the watch alone and with records, the first finding has the parameter, the step and the ranks."""
    _, module, what = FAULTS[name]
    found = open_recording(runs / way / name).findings[0]
    assert (found.rule, found.severity, found.module) == ("ranks-differ", "critical", module)
    if name == "other states":
        assert "exp_avg" in found.verdict or what in found.verdict
    else:
        assert found.verdict.startswith((what, f"the gradients or updates of {what}")), found.verdict
    assert "distance is about" in found.verdict
    if way == "watch" and name in CAUSES:
        assert found.why.startswith(CAUSES[name])
    if way == "watch" and name in LATER:
        assert "and all were equal after step 6; " in found.verdict
    assert f"between the 2 ranks {'after step' if way == 'watch' else ''}" in found.verdict


@pytest.mark.parametrize("way", ["watch", "records"])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_at_most_a_note(name: str, way: str, runs: Path) -> None:
    """Equal ranks are silent, and running statistics that differ are a note."""
    found = [each for each in open_recording(runs / way / name).findings if each.rule == "ranks-differ"]
    assert [each.severity for each in found] == (["note"] if name == "running statistics" else [])


DYING = """
import os, sys
from pathlib import Path
from lightning.pytorch import Callback
from lightning_recorder import StepWatch
from tests.callbacks.test_rank_faults import Net, fit, rank

class Dies(Callback):
    def __init__(self, epoch):
        self.epoch = epoch

    def on_train_epoch_end(self, trainer, pl_module):
        if rank() == 1 and trainer.current_epoch == self.epoch:
            os._exit(9)

watch, dies = StepWatch(check_ranks_every_n_steps=2), Dies(int(sys.argv[3]))
callbacks = [dies, watch] if sys.argv[2] == "before" else [watch, dies]
fit(Path(sys.argv[1]), Net(), callbacks, max_epochs=3, devices=3)
"""


@pytest.mark.parametrize(("when", "epoch", "code"), [("before", 1, 1), ("after", 1, 1), ("before", 2, 0)])
def test_a_rank_that_dies_at_the_end_of_an_epoch_hangs_nobody(when: str, epoch: int, code: int, tmp_path: Path) -> None:
    """Before and after it has sent its samples. The others fail in the next step of DDP; after the last, they end."""
    script = tmp_path / "train.py"
    script.write_text(DYING)
    codes, log = forks.run(script, tmp_path / "run", when, epoch, folder=tmp_path, ranks=3, timeout_s=120)
    assert codes == [code, 9, code], log[-3000:]
