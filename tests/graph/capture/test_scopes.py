"""The scopes of the nodes of a training step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.graph.nets import Net, linear, record_step, scaled
from tests.graph.outline import scoped, text
from tests.graph.queries import into_steps

CLASSES = torch.tensor([0, 1])


class Model(nn.Module):
    """Two layers and a criterion that is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(linear(), nn.ReLU(), linear(4, 2))
        self.criterion = nn.CrossEntropyLoss()
        self.classes: Tensor
        self.register_buffer("classes", CLASSES)


def test_a_recording_without_a_backward_pass() -> None:
    """Without a backward pass no node has a scope."""
    graph = record_step(Model(), lambda net, x: net.net(x).sum())
    assert [node.scope for node in graph.nodes] == [""] * len(graph.nodes)
    assert graph.scope == "training_step"


def test_loss_that_is_a_module() -> None:
    """A criterion without parameters between the last layer and the backward pass is the loss, with its contents."""

    def step(net: Any, x: Tensor) -> None:
        net.criterion(net.net(x), net.classes).backward()

    graph = record_step(Model(), step)
    assert scoped(graph) == text(
        """
        training_step:
          input
          net: Sequential
            net.0: Linear
              linear <- input
            net.1: ReLU
              relu <- linear
            net.2: Linear
              linear#2 <- relu
        loss:
          criterion: CrossEntropyLoss
            cross_entropy <- linear#2
        training_step:
          backward <- cross_entropy
        """
    )
    assert {node.scope for node in graph.nodes if node.kind in ("parameter", "buffer")} == {"training_step"}


def test_loss_of_several_parts() -> None:
    """All functions between the last layer and the backward pass are in the loss; its targets are not."""

    def step(net: Any, x: Tensor) -> None:
        out = net.fc(x)
        (F.cross_entropy(out, torch.tensor([0, 1])) + 0.1 * out.abs().mean()).backward()

    assert scoped(record_step(Net(lambda _: None, fc=linear()), step)) == text(
        """
        training_step:
          input
          fc: Linear
            linear <- input
          tensor
        loss:
          cross_entropy <- linear, tensor
          abs <- linear
          mean <- abs
          mul <- mean
          add <- cross_entropy, mul
        training_step:
          backward <- add
        """
    )


def test_layer_of_the_model_itself() -> None:
    """A function that takes a parameter of the model itself is a layer and not part of the loss."""

    def step(net: Any, x: Tensor) -> None:
        net(x).square().sum().backward()

    assert scoped(record_step(linear(), step)) == text(
        """
        training_step:
          input
          linear <- input
        loss:
          square <- linear
          sum <- square
        training_step:
          backward <- sum
        """
    )


def test_parameters_in_the_loss() -> None:
    """A penalty on parameters and a parameter that scales a loss are part of the loss."""

    def step(net: Any, x: Tensor) -> None:
        loss = net.scale * net.fc(x).mean()
        (loss + net.fc.weight.square().sum() / net.scale.exp()).backward()

    assert scoped(record_step(scaled(lambda _: None, fc=linear()), step)) == text(
        """
        training_step:
          input
          fc: Linear
            linear <- input
        loss:
          mean <- linear
          mul <- mean
          square
          sum <- square
          exp
          div <- sum, exp
          add <- mul, div
        training_step:
          backward <- add
        """
    )


def test_criterion_with_weights() -> None:
    """A criterion with class weights is part of the loss, together with the weights."""
    criterion = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 1.0, 1.0]))

    def step(net: Any, x: Tensor) -> None:
        net.criterion(net.fc(x), CLASSES).backward()

    graph = record_step(Net(lambda _: None, fc=linear(), criterion=criterion), step)
    assert [node.name for node in graph.nodes if node.scope == "loss"] == [
        "criterion",
        "",
        "criterion.weight",
        "cross_entropy",
    ]


def test_loss_with_layers_in_it() -> None:
    """A loss that is computed by a network starts after the last layer of that network."""

    def step(net: Any, x: Tensor) -> None:
        F.mse_loss(net.judge(net.made(x).exp()), net.judge(x).detach()).backward()

    net = Net(lambda _: None, made=linear(), judge=linear())
    assert scoped(record_step(net, step)) == text(
        """
        training_step:
          input
          made: Linear
            linear <- input
          exp <- linear
          judge: Linear
            linear#2 <- exp
          judge: Linear (call 2)
            linear#3 <- input
        loss:
          detach <- linear#3
          mse_loss <- linear#2, detach
        training_step:
          backward <- mse_loss
        """
    )


def test_metrics() -> None:
    """Metrics that lead to no backward pass, and nodes after the last backward pass, are not part of the loss."""

    def step(net: Any, x: Tensor) -> None:
        out = net.fc(x)
        loss = out.square().mean()
        out.argmax(1).float().mean()
        loss.backward()
        out.detach().std()

    assert scoped(record_step(Net(lambda _: None, fc=linear()), step)) == text(
        """
        training_step:
          input
          fc: Linear
            linear <- input
        loss:
          square <- linear
          mean <- square
        training_step:
          argmax <- linear
          float <- argmax
          mean#2 <- float
          backward <- mean
          detach <- linear
          std <- detach
        """
    )


def test_two_backward_passes_over_one_forward_pass() -> None:
    """Nodes between two backward passes are the second part of the step, even without a layer."""

    def step(net: Any, x: Tensor) -> None:
        out = net.fc(x)
        out.sum().backward(retain_graph=True)
        out.exp().mean().backward()

    assert scoped(record_step(Net(lambda _: None, fc=linear()), step)) == text(
        """
        training_step:
          input
          fc: Linear
            linear <- input
        loss:
          sum <- linear
        training_step:
          backward <- sum
        loss 2:
          exp <- linear
          mean <- exp
        training_step 2:
          backward#2 <- mean
        """
    )


def test_two_losses_before_two_backward_passes() -> None:
    """Losses that are all computed before the first backward pass are in one part."""

    def step(net: Any, x: Tensor) -> None:
        out = net.fc(x)
        losses = out.sum(), out.exp().mean()
        losses[0].backward(retain_graph=True)
        losses[1].backward()

    assert scoped(record_step(Net(lambda _: None, fc=linear()), step)) == text(
        """
        training_step:
          input
          fc: Linear
            linear <- input
        loss:
          sum <- linear
          exp <- linear
          mean <- exp
        training_step:
          backward <- sum
          backward#2 <- mean
        """
    )


def test_gan_step_by_hand() -> None:
    """Each part of a step ends with its optimizer step; the second part uses the fake batch of the first."""

    def step(net: Any, x: Tensor) -> None:
        of_critic, of_generator = (torch.optim.SGD(part.parameters()) for part in (net.critic, net.generator))
        fake = net.generator(x)
        (net.critic(fake.detach()).mean() - net.critic(x).mean()).backward()
        of_critic.step()
        net.critic(fake).mean().neg().backward()
        of_generator.step()

    graph = record_step(Net(lambda _: None, generator=linear(), critic=linear(4, 1)), step)
    assert scoped(graph) == text(
        """
        training_step:
          input
          generator: Linear
            linear <- input
          detach <- linear
          critic: Linear
            linear#2 <- detach
        loss:
          mean <- linear#2
        training_step:
          critic: Linear (call 2)
            linear#3 <- input
        loss:
          mean#2 <- linear#3
          sub <- mean, mean#2
        training_step:
          backward <- sub
          SGD · critic <- backward
        training_step 2:
          critic: Linear (call 3)
            linear#4 <- linear
        loss 2:
          mean#3 <- linear#4
          neg <- mean#3
        training_step 2:
          backward#2 <- neg
          SGD · generator <- backward#2
        """
    )


def test_evaluations_of_lbfgs() -> None:
    """Each evaluation by LBFGS is a part of the step, and its single step uses all of their gradients."""

    def step(net: Any, x: Tensor) -> None:
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = net.fc(x).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    graph = record_step(Net(lambda _: None, fc=linear()), step)
    calls = [(node.name, node.call, node.scope) for node in graph.module_calls()]
    assert calls == [("fc", 1, "training_step"), ("fc", 2, "training_step 2"), ("fc", 3, "training_step 3")]
    assert [node.scope for node in graph.nodes if node.name == "sum"] == ["loss", "loss 2", "loss 3"]
    assert into_steps(graph) == ["LBFGS <- sum, sum, sum"]
    assert graph.nodes[-1].scope == "training_step 3"
