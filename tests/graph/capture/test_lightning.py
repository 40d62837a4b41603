"""The graph of a training step run by Lightning: its scopes and optimizer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_recorder import GraphRecorder
from lightning_recorder.graph import Graph
from tests.callbacks.models import Classifier, fit
from tests.graph.outline import scoped, text
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
