"""The graph of a training step run by Lightning: its scopes and optimizer steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_recorder import GraphRecorder
from lightning_recorder.graph import Graph
from tests.callbacks.models import Classifier, fit
from tests.graph.outline import outline, scoped, text
from tests.graph.queries import into_steps


class Gan(Classifier):
    """A GAN with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Linear(4, 64)
        self.critic = nn.Linear(64, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        optimizers: Any = self.optimizers()
        of_critic, of_generator = optimizers
        real = batch[0].flatten(1)
        fake = self.generator(real[:, :4])
        judged = self.critic(fake.detach()).mean() - self.critic(real).mean()
        of_critic.zero_grad()
        self.manual_backward(judged)
        of_critic.step()
        fooled = self.critic(fake).mean().neg()
        of_generator.zero_grad()
        self.manual_backward(fooled)
        of_generator.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.critic.parameters()), torch.optim.Adam(self.generator.parameters())


def recorded_fit(model: LightningModule, folder: Path, **options: Any) -> Graph:
    """Return the graph of the first step of a real run."""
    recorder = GraphRecorder(strict=True)
    fit(model, folder, [recorder], **options)
    assert recorder.graph is not None
    return recorder.graph


def test_automatic_optimization(tmp_path: Path) -> None:
    """A real run has the loss after the last layer, then the backward pass and the optimizer step."""
    graph = recorded_fit(Classifier(), tmp_path)
    assert scoped(graph) == text(
        """
        training_step:
          batch[0]
          batch[1]
          encoder: Encoder
            encoder.conv1: Conv2d
              conv2d <- batch[0]
            encoder.norm: BatchNorm2d
              add
              batch_norm <- conv2d
            encoder.relu: ReLU
              relu <- batch_norm
            encoder.conv2: Conv2d
              conv2d#2 <- relu
            add#2 <- relu, conv2d#2
            relu#2 <- add#2
            flatten <- relu#2
          dropout: Dropout
            dropout <- flatten
          head: Linear
            linear <- dropout
        loss:
          cross_entropy <- linear, batch[1]
        training_step:
          detach <- cross_entropy
          clone <- detach
          backward <- cross_entropy
          Adam <- backward
        """
    )


def test_accumulation(tmp_path: Path) -> None:
    """The first of several accumulated batches is recorded; it has no optimizer step."""
    graph = recorded_fit(Classifier(), tmp_path, accumulate_grad_batches=2)
    assert into_steps(graph) == []
    assert [graph[edge.source].name for edge in graph.edges if graph[edge.target].kind == "backward"] == [
        "cross_entropy"
    ]


class Evaluated(Classifier):
    """A model whose optimizer evaluates the loss twice in each step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


def test_two_evaluations(tmp_path: Path) -> None:
    """Both evaluations of an LBFGS step under Lightning are parts of the step."""
    graph = recorded_fit(Evaluated(), tmp_path)
    assert [(node.call, node.scope) for node in graph.nodes if node.name == "head"] == [
        (1, "training_step"),
        (2, "training_step 2"),
    ]
    assert into_steps(graph) == ["LBFGS <- cross_entropy, cross_entropy"]


def test_manual_optimization(tmp_path: Path) -> None:
    """Both parts of a GAN's step are recorded with their optimizers, which Lightning wraps."""
    graph = recorded_fit(Gan(), tmp_path)
    assert into_steps(graph) == ["SGD · critic <- sub", "Adam · generator <- neg"]
    scopes = [(node.name, node.scope) for node in graph.nodes if node.kind in ("op", "backward", "optimizer")]
    assert scopes == [
        ("flatten", "training_step"),
        ("getitem", "training_step"),
        ("linear", "training_step"),
        ("detach", "training_step"),
        ("linear", "training_step"),
        ("mean", "loss"),
        ("linear", "training_step"),
        ("mean", "loss"),
        ("sub", "loss"),
        ("backward", "training_step"),
        ("SGD · critic", "training_step"),
        ("linear", "training_step 2"),
        ("mean", "loss 2"),
        ("neg", "loss 2"),
        ("backward", "training_step 2"),
        ("Adam · generator", "training_step 2"),
    ]


class ToggledGan(Classifier):
    """A GAN that trains its generator with the critic switched off, the generator first."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 64))
        self.critic = nn.Linear(64, 1)
        del self.encoder, self.dropout, self.head

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        optimizers: Any = self.optimizers()
        of_generator, of_critic = optimizers
        real = batch[0].flatten(1)
        self.toggle_optimizer(of_generator)
        fooled = self.critic(self.generator(real[:, :4])).mean().neg()
        self.manual_backward(fooled)
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)
        self.toggle_optimizer(of_critic)
        fake = self.generator(real[:, :4]).detach()
        judged = self.critic(fake).mean().sub(self.critic(real).mean())
        self.manual_backward(judged)
        of_critic.step()
        of_critic.zero_grad()
        self.untoggle_optimizer(of_critic)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.generator.parameters()), torch.optim.Adam(self.critic.parameters())


def test_a_gan_with_toggled_optimizers(tmp_path: Path) -> None:
    """An optimizer takes only the gradients that it used; buffers are no data flow between calls of the generator."""
    graph = recorded_fit(ToggledGan(), tmp_path)
    assert into_steps(graph) == ["Adam · generator <- neg", "Adam · critic <- sub"]
    between = {
        (graph[edge.source].name, graph[edge.target].name)
        for edge in graph.edges
        if graph[edge.source].scope != graph[edge.target].scope
        and graph[edge.source].kind == "op"
        and "loss" not in graph[edge.source].scope + graph[edge.target].scope
    }
    # The two halves share the batch, and nothing else that was computed.
    assert between == {("flatten", "getitem"), ("flatten", "linear")}
    assert graph.unused.parameters == ()
    # While the critic trains, the generator is frozen, so that its detached output stops no gradient.
    assert graph.unused.stops == ()


class NotResetGan(Gan):
    """A GAN whose generator's gradients also reach the critic, which resets them before its own backward pass."""

    def __init__(self, set_to_none: bool) -> None:
        super().__init__()
        self.set_to_none = set_to_none

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        optimizers: Any = self.optimizers()
        of_critic, of_generator = optimizers
        real = batch[0].flatten(1)
        self.manual_backward(self.critic(self.generator(real[:, :4])).mean().neg())
        of_generator.step()
        of_critic.zero_grad(set_to_none=self.set_to_none)
        self.manual_backward(self.critic(real).mean().exp())
        of_critic.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_were_reset(set_to_none: bool, tmp_path: Path) -> None:
    """A step does not take a backward pass whose gradients were reset before the step."""
    graph = recorded_fit(NotResetGan(set_to_none), tmp_path)
    assert into_steps(graph) == ["Adam · generator <- neg", "SGD · critic <- exp"]


class Meddling(Callback):
    """Computes with the loss, the model and a tensor of its own in every hook around the step."""

    def __init__(self) -> None:
        self.kept = torch.zeros(())

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self.seen = loss.detach().sqrt().add(1)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.norm = sum(each.grad.square().sum() for each in pl_module.parameters() if each.grad is not None)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        with torch.no_grad():
            self.size = torch.stack([each.norm() for each in pl_module.parameters()]).sum()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        with torch.no_grad():
            self.output = pl_module(batch[0]).softmax(1).argmax(1)
            self.kept.copy_(self.kept + self.norm)
        pl_module.log("accuracy", (self.output == batch[1]).float().mean())


class MeddlingLogger(CSVLogger):
    """Computes with tensors when it logs."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        super().log_metrics({name: float(torch.tensor(value).cos()) for name, value in metrics.items()}, step)


def test_other_callbacks_are_not_recorded(tmp_path: Path) -> None:
    """The operations and calls of other callbacks and loggers are not part of the model, whatever their order."""
    plain = recorded_fit(Classifier(), tmp_path / "plain")
    recorder = GraphRecorder(strict=True)
    fit(
        Classifier(), tmp_path / "others", [Meddling(), recorder, Meddling()],
        logger=MeddlingLogger(tmp_path), log_every_n_steps=1,
    )  # fmt: skip
    assert recorder.graph is not None
    assert outline(recorder.graph) == outline(plain)
    assert recorder.graph.structural_hash() == plain.structural_hash()


def test_costs(tmp_path: Path) -> None:
    """A recorder that measures has the floating-point operations of the step, and trains the same weights."""
    torch.manual_seed(0)
    plain, recorder = Classifier(), GraphRecorder(costs=True, strict=True)
    model = copy.deepcopy(plain)
    fit(plain, tmp_path / "plain")
    fit(model, tmp_path / "measured", [recorder])
    assert recorder.graph is not None
    # Two convolutions with kernels of 3×3 on 8 images of 8×8, and a layer from 256 to 10 units.
    assert recorder.graph.root.flops == 2 * 8 * 64 * 9 * (1 * 4 + 4 * 4) + 2 * 8 * 256 * 10
    assert [loss.item() for loss in model.losses] == [loss.item() for loss in plain.losses]
