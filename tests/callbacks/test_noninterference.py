"""Training with the callbacks is, bit by bit, training without them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_recorder import ActivationRecorder, GradientRecorder, GraphRecorder
from tests.callbacks.models import Classifier, digits, fit, hooks_left


class Mlp(Classifier):
    """Linear layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Dropout(0.3))  # type: ignore[assignment]  # another encoder
        self.head = nn.Linear(32, 10)


class Checkpointed(Mlp):
    """The same with its encoder computed anew in the backward pass."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_(self.reentrant)
        logits: Tensor = self.head(checkpoint(self.encoder, x, use_reentrant=self.reentrant))
        return logits


class Reentrant(Checkpointed):
    """The same in the other mode."""

    reentrant = True


class Gpt2(Classifier):
    """A language model with dropout, reading pixels as words."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=16, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
        self.encoder = GPT2LMHeadModel(config)  # type: ignore[assignment]  # another encoder

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        words = (batch[0].flatten(1) * 15).long()
        loss = self.encoder(input_ids=words, labels=words).loss
        self.losses.append(loss.detach().clone())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        words = (batch[0].flatten(1) * 15).long()
        self.log("val_loss", self.encoder(input_ids=words, labels=words).loss)


class TwoOptimisers(Mlp):
    """Manual optimisation of two parts, each with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        for sign, optimizer in zip((1, -1), self.trainer.strategy._lightning_optimizers, strict=True):
            self.toggle_optimizer(optimizer)
            loss = sign * F.cross_entropy(self(batch[0]), batch[1])
            self.losses.append(loss.detach().clone())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.encoder, self.head)]


def run(make: Callable[[], Classifier], folder: Path, callbacks: list[Callback], options: dict[str, Any]) -> Any:
    """All that a run leaves: losses, model state, optimiser state, random states."""
    seed_everything(11, verbose=False)
    model = make()
    trainer = fit(model, folder, callbacks, validation=digits(2), max_epochs=2, **options)
    assert hooks_left(model) == []
    optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 - the very state that must not be touched
    states = (torch.get_rng_state(), str(numpy_state), random.getstate())
    training = [module.training for module in model.modules()]
    return model.losses, list(model.state_dict().items()), optimizers, states, training


def recorders(**options: Any) -> list[Callback]:
    """All callbacks, on every step."""
    return [
        GraphRecorder(strict=True, **options),
        ActivationRecorder(every_n_train_steps=1, strict=True),
        GradientRecorder(every_n_train_steps=1, strict=True),
    ]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Classifier, {}),
        (Classifier, {"accumulate_grad_batches": 3}),
        (Classifier, {"precision": "bf16-mixed"}),
        (Mlp, {"gradient_clip_val": 0.1}),
        (Checkpointed, {}),
        (Reentrant, {}),
        (TwoOptimisers, {}),
        (Gpt2, {}),
        (Gpt2, {"precision": "bf16-mixed"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(map(str, value.values())) or "plain",
)
@pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary:UserWarning")
def test_training_is_bitwise_the_same(make: type[Classifier], options: dict[str, Any], tmp_path: Path) -> None:
    """Losses, parameters, buffers, optimisers, random states and train flags are those of a run without callbacks."""
    bare = run(make, tmp_path / "bare", [], options)
    recorded = run(make, tmp_path / "recorded", recorders(), options)
    assert_same(recorded, bare)


def assert_same(one: Any, other: Any) -> None:
    """Equality to the bit of nested values."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


@pytest.mark.parametrize("failing_step", [0, 2])
def test_an_exception_comes_through_and_no_hook_is_left(failing_step: int, tmp_path: Path) -> None:
    """An error in a submodule's forward is the one that the caller sees, and nothing of ours is left."""

    class Brittle(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if model.global_step == failing_step:
                raise KeyError("the model's own")
            return super().forward(x)

    model: LightningModule = Classifier()
    model.head = Brittle(256, 10)
    with pytest.raises(KeyError, match="the model's own"):
        fit(model, tmp_path, recorders())
    assert hooks_left(model) == []
    assert torch.overrides._get_current_function_mode_stack() == []


def test_gradients_of_the_parameters_have_no_hooks_of_ours(tmp_path: Path) -> None:
    """Where a module returns a parameter, no hook stays on that parameter."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(256))

        def forward(self) -> Tensor:
            return self.weight

    class Scaled(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.table = Table()

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.encoder(x) * self.table())
            return logits

    model = Scaled()
    recorder = GradientRecorder("table")
    fit(model, tmp_path, [recorder])
    assert [site.name for site in recorder.latest] == ["table"]
    assert hooks_left(model) == []
