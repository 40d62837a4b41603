"""Training with the callbacks is bitwise equal to training without them."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_recorder import (
    ActivationRecorder,
    CostRecorder,
    GradientRecorder,
    GraphRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    Schedule,
)
from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.schedule import Reduce
from tests import forks
from tests.callbacks.models import Classifier, digits, fit, hooks_left
from tests.pairs import covering


class Mlp(Classifier):
    """Linear layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Dropout(0.3))  # type: ignore[assignment]  # another encoder
        self.head = nn.Linear(32, 10)


class Checkpointed(Mlp):
    """The same model with activation checkpointing of its encoder."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_(self.reentrant)
        logits: Tensor = self.head(checkpoint(self.encoder, x, use_reentrant=self.reentrant))
        return logits


class Reentrant(Checkpointed):
    """The same model with reentrant checkpointing."""

    reentrant = True


class Gpt2(Classifier):
    """A language model with dropout that reads pixels as words."""

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


class Functional(Classifier):
    """Functions, methods and in-place functions in place of modules, and a checkpoint around some of them."""

    def __init__(self) -> None:
        super().__init__()
        del self.encoder, self.dropout
        self.first, self.second, self.third = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x.flatten(1)), inplace=True)
        x = F.dropout(checkpoint(self._middle, x, use_reentrant=False), 0.2, self.training)
        weights = self.third(x).softmax(-1)
        logits: Tensor = self.head(F.layer_norm(x * weights, (32,)))
        return logits.tanh_() * 3

    def _middle(self, x: Tensor) -> Tensor:
        x = self.second(x)
        x[:, :8].sigmoid_()
        return F.gelu(x).clamp(-2, 2)


class TwoOptimizers(Mlp):
    """Manual optimization of two parts with one loss each."""

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


class Gan(Classifier):
    """A generator and a discriminator of bounded slope, which takes two steps per generator step."""

    n_critic = 2

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        del self.encoder, self.dropout, self.head
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True), nn.Linear(32, 64))
        layers = [spectral_norm(nn.Linear(64, 32)), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.2)]
        self.discriminator = nn.Sequential(*layers, spectral_norm(nn.Linear(32, 1)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        real = batch[0].flatten(1)
        generator, discriminator = self.trainer.strategy._lightning_optimizers
        self.toggle_optimizer(discriminator)
        fake = self.generator(torch.randn(len(real), 4)).detach()
        self._step(
            discriminator, F.relu(1 - self.discriminator(real)).mean() + F.relu(1 + self.discriminator(fake)).mean()
        )
        if (batch_idx + 1) % self.n_critic == 0:
            self.toggle_optimizer(generator)
            self._step(generator, -self.discriminator(self.generator(torch.randn(len(real), 4))).mean())

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        self.losses.append(loss.detach().clone())
        self.log("loss", loss)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_score", self.discriminator(batch[0].flatten(1)).mean())

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.9)) for part in parts]


class TwoTower(Classifier):
    """Two towers for an image and a noisy copy of it; the other images of the batch are the negatives."""

    def __init__(self) -> None:
        super().__init__()
        del self.encoder, self.dropout, self.head
        self.left, self.right = (nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(2))
        self.log_temperature = nn.Parameter(torch.tensor(math.log(0.1)))

    def loss_of(self, batch: list[Tensor]) -> Tensor:
        images = batch[0].flatten(1)
        one = F.normalize(self.left(images), dim=1)
        other = F.normalize(self.right(images + 0.1 * torch.randn_like(images)), dim=1)
        similarity, same = one @ other.T / self.log_temperature.exp(), torch.arange(len(images))
        return (F.cross_entropy(similarity, same) + F.cross_entropy(similarity.T, same)) / 2

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.losses.append(loss.detach().clone())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch))


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class UNet(TwoTower):
    """A segmentation model at two resolutions with one loss each; the finer one has two."""

    def __init__(self) -> None:
        super().__init__()
        del self.left, self.right, self.log_temperature
        self.down, self.bottom, self.up = convolution(1, 4), convolution(4, 8), convolution(12, 4)
        self.coarse, self.fine = nn.Conv2d(8, 1, 1), nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Any:
        high = self.down(x)
        low = self.bottom(F.max_pool2d(high, 2))
        joined = torch.cat([F.interpolate(low, scale_factor=2.0), high], 1)
        return {"coarse": self.coarse(low), "fine": self.fine(self.up(joined))}

    def loss_of(self, batch: list[Tensor]) -> Tensor:
        mask = (batch[0] > 0.5).float()
        found = self(batch[0])
        chance = found["fine"].sigmoid()
        entropy = F.binary_cross_entropy_with_logits(found["fine"], mask)
        dice = 1 - 2 * (chance * mask).sum() / (chance.sum() + mask.sum())
        deep = F.binary_cross_entropy_with_logits(found["coarse"], F.avg_pool2d(mask, 2))
        loss: Tensor = entropy + dice + 0.4 * deep
        return loss


class Attention(nn.Module):
    """A causal block with dropout, normalized before each part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, width))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        normal = self.norm1(x)
        x = x + self.mix(normal, normal, normal, attn_mask=mask, need_weights=False)[0]
        mixed: Tensor = x + self.feed(self.norm2(x))
        return mixed


class LanguageModel(TwoTower):
    """Predicts words with the weights that embed them, with a learning rate schedule by steps."""

    def __init__(self) -> None:
        super().__init__()
        del self.left, self.right, self.log_temperature
        self.embed, self.place = nn.Embedding(16, 16), nn.Embedding(64, 16)
        self.blocks = nn.Sequential(Attention(16), Attention(16))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 16, bias=False)
        self.head.weight = self.embed.weight

    def loss_of(self, batch: list[Tensor]) -> Tensor:
        words = (batch[0].flatten(1) * 15).long()
        hidden = self.blocks(self.embed(words) + self.place.weight)
        logits: Tensor = self.head(self.norm(hidden))
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), words[:, 1:])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Overflowing(Classifier):
    """A model whose loss is infinite in some batches."""

    overflows: tuple[int, ...] = (1, 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * math.inf if batch_idx in self.overflows else loss


def made(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a trainer; ``precision="scaled"`` is half precision on the CPU with a ``GradScaler``."""
    if options.get("precision") != "scaled":
        return options
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    return {"plugins": [scaled], **{name: value for name, value in options.items() if name != "precision"}}


def run(make: Callable[[], Classifier], folder: Path, callbacks: list[Callback], options: dict[str, Any]) -> Any:
    """Return the result of a run: losses, model, train flags, optimizers, schedules, scale, metrics, RNG states."""
    seed_everything(11, verbose=False)
    model = make()
    trainer = fit(model, folder, callbacks, validation=digits(2), max_epochs=2, **made(options))
    assert hooks_left(model) == []
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 - the global state, which must not change
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        "losses": model.losses,
        "model": dict(model.state_dict()),
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        "frozen": {name: not parameter.requires_grad for name, parameter in model.named_parameters()},
        "training": {name: module.training for name, module in model.named_modules()},
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedules": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
        "scale": None if scaler is None else scaler.state_dict(),
        "metrics": dict(trainer.callback_metrics),
        "steps": trainer.global_step,
        "random": [torch.get_rng_state(), str(numpy_state), random.getstate()],
    }


def _sum(total: Tensor, new: Tensor) -> Tensor:
    return total.sum() + new.mul_(2).sum()  # changes its own copy


def recorders(reduce: Reduce = "step", *, pictures: bool = True) -> list[Callback]:
    """Return all callbacks, recording every step, with the inputs and a reduction of the user."""
    outputs = Outputs(plots=pictures)
    options: dict[str, Any] = {"every_n_train_steps": 1, "reduce": reduce, "strict": True, "outputs": outputs}
    both: list[Literal["inputs", "outputs"]] = ["inputs", "outputs"]
    return [
        GraphRecorder(strict=True) if pictures else GraphRecorder(formats=(), strict=True),
        ActivationRecorder(
            schedule=Schedule(stages=["train", "validate"]), tensors=both, per_call=True, functions=True, **options
        ),
        GradientRecorder(tensors=both, extra={"seen": _sum}, functions=True, **options),
        ParameterRecorder(**options),
        CostRecorder(every_n_train_steps=1, strict=True),
    ]


def assert_recorded(callbacks: list[Callback]) -> None:
    """Check that each callback has recorded something."""
    for callback in callbacks:
        if isinstance(callback, GraphRecorder):
            assert callback.graph is not None
        if isinstance(callback, StatisticsCallback):
            assert all(callback.latest_of(stage) for stage in callback.stages)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return the result of a run without callbacks, which is made once."""

    @functools.cache
    def run_bare(make: type[Classifier], **options: Any) -> Any:
        return run(make, tmp_path_factory.mktemp("bare"), [], options)

    return run_bare


MODELS: list[tuple[type[Classifier], dict[str, Any]]] = [
    (Classifier, {}),
    (Classifier, {"accumulate_grad_batches": 3}),
    (Classifier, {"precision": "bf16-mixed"}),
    (Classifier, {"precision": "scaled"}),
    (Classifier, {"precision": "scaled", "accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
    (Classifier, {"val_check_interval": 2}),
    (Classifier, {"val_check_interval": 2, "accumulate_grad_batches": 3}),
    (Overflowing, {"precision": "scaled"}),
    (Mlp, {"gradient_clip_val": 0.1}),
    (Mlp, {"precision": "bf16-mixed"}),
    (Mlp, {"precision": "scaled"}),
    (Functional, {"accumulate_grad_batches": 3}),
    (Functional, {"precision": "scaled"}),
    (Checkpointed, {}),
    (Checkpointed, {"precision": "bf16-mixed", "accumulate_grad_batches": 3}),
    (Reentrant, {}),
    (TwoOptimizers, {}),
    (TwoOptimizers, {"precision": "scaled"}),
    (Gpt2, {}),
    (Gpt2, {"precision": "bf16-mixed"}),
    (Gpt2, {"precision": "scaled", "accumulate_grad_batches": 3}),
    (Gan, {}),
    (TwoTower, {}),
    (UNet, {}),
    (LanguageModel, {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
]

RUNS = [(make, options, reduce) for make, options in MODELS for reduce in ("step", "epoch")]


@pytest.mark.parametrize(
    ("make", "options", "reduce"),
    # Each way to reduce occurs with each model and with each option.
    covering(
        RUNS,
        [
            {(make, str(options)), *((each, reduce) for each in (make, *options.items()))}
            for make, options, reduce in RUNS
        ],
    ),
    ids=lambda value: (
        "-".join(map(str, value.values())) if isinstance(value, dict) else getattr(value, "__name__", None)
    ),
)
@pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary:UserWarning")
def test_training_is_bitwise_the_same(
    make: type[Classifier], options: dict[str, Any], reduce: Reduce, bare: Callable[..., Any], tmp_path: Path
) -> None:
    """The result of a run, from losses to random states, is that of a run without callbacks."""
    # Pictures take most of the time, and are drawn from the records, so one run of each model has them.
    callbacks = recorders(reduce, pictures=reduce == "step" and not options)
    recorded = run(make, tmp_path / "recorded", callbacks, options)
    assert_recorded(callbacks)
    assert_same(recorded, bare(make, **options))


def assert_same(one: Any, other: Any) -> None:
    """Check that nested values are bitwise equal."""
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
    """An error in a submodule's forward propagates to the caller, and no hook is left."""

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
    """If a module returns a parameter, no hook stays on that parameter."""

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


@pytest.mark.parametrize(
    ("reduce", "steps"),
    [("step", [0, 2, 3, 5, 6, 8, 9, 11]), (2, [1, 3, 5, 7, 9, 11]), (3, [2, 5, 8, 11]), ("epoch", [5, 11])],
)
def test_steps_that_overflow_are_counted_and_are_in_no_record(reduce: Reduce, steps: list[int], tmp_path: Path) -> None:
    """For skipped steps, their number and their infinities are recorded, and their values are not."""
    sink = MemorySink()
    options: dict[str, Any] = {"every_n_train_steps": 1, "reduce": reduce, "strict": True, "sinks": [sink]}
    callbacks: list[Callback] = [
        GradientRecorder("head", statistics="count", **options),
        ParameterRecorder("head", **options, outputs=Outputs(curves="all")),
    ]
    run(Overflowing, tmp_path, callbacks, {"precision": "scaled", "logger": False})
    # Six batches an epoch, of which the second and the fifth overflow.
    counted = {0: 0, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 2, 7: 3, 8: 3, 9: 3, 10: 4, 11: 4}
    warned = sorted({*steps, 1, 4, 7, 10} if reduce == "step" else steps)
    for group in ("gradients", "parameters"):
        # From the first overflow on, each record is followed by the count.
        assert sink.scalars[f"{group}/overflow_steps"] == {step: counted[step] for step in warned if counted[step]}
    sizes = {"step": 1, 2: 2, 3: 3, "epoch": 6}
    for step in steps:
        first = step + 1 - sizes[reduce]
        well = sum(each % 6 not in Overflowing.overflows for each in range(first, step + 1))
        assert sink.scalars["gradients/head/count"][step] == 80 * well
    assert list(sink.scalars["gradients/head/count"]) == steps
    assert list(sink.scalars["parameters/head/weight.grad/mean"]) == steps
    assert not [tag for tag in sink.scalars if tag.startswith(("gradients/", "parameters/")) and "inf_count" in tag]


@pytest.mark.parametrize("kind", [GradientRecorder, ParameterRecorder])
def test_the_modules_that_overflowed_are_shown(kind: type[StatisticsCallback], tmp_path: Path) -> None:
    """In addition to the count, a separate group shows the numbers of infinities and NaN by site."""
    sink = MemorySink()
    callbacks: list[Callback] = [kind("head", every_n_train_steps=1, strict=True, sinks=[sink])]
    run(Overflowing, tmp_path, callbacks, {"precision": "scaled", "logger": False})
    group = f"{kind.group}_overflow"
    warned = {tag: values for tag, values in sink.scalars.items() if tag.startswith(group)}
    sites = {"gradients": ["head"], "parameters": ["head/weight.grad", "head/bias.grad"]}[kind.group]
    expected = {f"{group}/{site}/{name}" for site in sites for name in ("nan_count", "inf_count")}
    assert set(warned) == expected
    assert all(list(values) == [1, 4, 7, 10] for values in warned.values())


class AlwaysOverflowing(Overflowing):
    """A model whose loss is infinite from the first step on, like that of a diverged run."""

    overflows = tuple(range(6))


@pytest.mark.parametrize("kind", [GradientRecorder, ParameterRecorder])
@pytest.mark.parametrize("reduce", ["step", 2, 4, "epoch"])
def test_a_run_of_which_every_step_overflows_says_so(
    kind: type[StatisticsCallback], reduce: Reduce, tmp_path: Path
) -> None:
    """If all steps of a window are skipped, their count is still recorded."""
    sink = MemorySink()
    callbacks: list[Callback] = [kind("head", every_n_train_steps=1, reduce=reduce, strict=True, sinks=[sink])]
    run(AlwaysOverflowing, tmp_path, callbacks, {"precision": "scaled", "logger": False})
    counts = sink.scalars.get(f"{kind.group}/overflow_steps", {})
    assert list(counts.items())[-1:] == [(11, 12.0)]
    assert not [tag for tag in sink.scalars if tag.startswith(f"{kind.group}/head")]


class SecondOverflowing(TwoOptimizers):
    """The second of two optimizers has an infinite loss in some batches."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        factors = (1.0, math.inf if batch_idx in Overflowing.overflows else 1.0)
        for factor, optimizer in zip(factors, self.trainer.strategy._lightning_optimizers, strict=True):
            optimizer.zero_grad()
            self.manual_backward(factor * F.cross_entropy(self(batch[0]), batch[1]))
            optimizer.step()


class WatchedScaler(torch.amp.GradScaler):
    """Stores the batches in which its scale shrinks."""

    def __init__(self, growth_interval: int) -> None:
        super().__init__("cpu", init_scale=1024.0, growth_interval=growth_interval)
        self.updates = 0
        self.shrunk: set[int] = set()

    def update(self, new_scale: Any = None) -> None:
        before = self.get_scale()
        super().update(new_scale)
        if self.get_scale() < before:
            self.shrunk.add(self.updates // 2)  # there are two optimizers
        self.updates += 1


@pytest.mark.parametrize("growth_interval", [1, 2000])
def test_an_overflow_is_seen_where_the_scale_grows_in_the_same_batch(growth_interval: int, tmp_path: Path) -> None:
    """A skipped step is detected even if another optimizer's step grows the scale in the same batch."""
    sink = MemorySink()
    scaler = WatchedScaler(growth_interval)
    callbacks: list[Callback] = [GradientRecorder("head", every_n_train_steps=1, strict=True, sinks=[sink])]
    run(
        SecondOverflowing,
        tmp_path,
        callbacks,
        {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "logger": False},
    )
    assert {1, 4, 7, 10} <= scaler.shrunk
    assert sink.scalars["gradients/overflow_steps"][11] == len(scaler.shrunk)
    assert list(sink.scalars["gradients/head/rms"]) == sorted(set(range(12)) - scaler.shrunk)


SCRIPT = """
import sys
from pathlib import Path
import torch
from tests.callbacks.test_noninterference import Classifier, assert_recorded, recorders, run

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for how in ("bare", "step", "epoch"):
        callbacks = [] if how == "bare" else recorders(how)
        left = run(Classifier, folder / how, callbacks, {"strategy": "ddp", "devices": 2})
        if torch.distributed.get_rank() == 0:
            assert_recorded(callbacks)
        torch.save(left, folder / f"{how}-{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()  # gloo's threads may otherwise abort a process that ends: pytorch#190489
"""


@pytest.mark.slow
def test_training_on_two_processes_is_bitwise_the_same(tmp_path: Path) -> None:
    """Under DDP, each rank has the same result as without callbacks."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    codes, log = forks.run(script, tmp_path, folder=tmp_path, ranks=2)
    assert codes == [0, 0], log[-3000:]
    assert "RecorderWarning" not in log
    for rank in range(2):
        bare, *recorded = (
            torch.load(tmp_path / f"{how}-{rank}.pt", weights_only=False) for how in ("bare", "step", "epoch")
        )
        for left in recorded:
            assert_same(left, bare)
