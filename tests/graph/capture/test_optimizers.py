"""The backward passes that an optimizer step uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_recorder.graph import collapse, fold_repeats, without
from tests.graph.nets import Net, linear, record_step
from tests.graph.queries import into_steps


def _two(first: Any, second: Any) -> Callable[[Any, Tensor], None]:
    """Return a step with one optimizer for each of two layers."""

    def step(net: Any, x: Tensor) -> None:
        optimizers = torch.optim.SGD(net.one.parameters()), torch.optim.Adam(net.other.parameters())
        first(net, x).backward()
        second(net, x).backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param(
            lambda net, x: net.one(x).sum(),
            lambda net, x: net.other(x).mean(),
            ["SGD · one <- sum", "Adam · other <- mean"],
            id="one each",
        ),
        pytest.param(
            lambda net, x: net.other(net.one(x)).sum(),
            lambda net, x: net.other(x).mean(),
            ["SGD · one <- sum", "Adam · other <- sum, mean"],
            id="one through both",
        ),
        pytest.param(
            lambda net, x: net.other(net.one(x).detach()).sum(),
            lambda net, x: net.one(x).mean(),
            ["SGD · one <- mean", "Adam · other <- sum"],
            id="one through neither, being detached",
        ),
        pytest.param(
            lambda net, x: checkpoint(lambda y: net.other(net.one(y).exp()), x, use_reentrant=False).sum(),
            lambda net, x: net.other(x).mean(),
            ["SGD · one <- sum", "Adam · other <- sum, mean"],
            id="through a checkpoint",
        ),
        pytest.param(
            lambda net, x: checkpoint(lambda y: net.other(y).tanh().exp(), net.one(x), use_reentrant=True).sum(),
            lambda net, x: net.other(x).mean(),
            ["SGD · one <- sum", "Adam · other <- sum, mean"],
            id="through a reentrant checkpoint",
        ),
        pytest.param(
            lambda net, x: nn.Identity()(net.one(x)).sum(),
            lambda net, x: nn.Identity()(net.other(x)).mean(),
            ["SGD · one <- sum", "Adam · other <- mean"],
            id="through a call in which nothing happens",
        ),
    ],
)
def test_two_optimizers(first: Any, second: Any, expected: list[str]) -> None:
    """A step uses the backward passes whose gradients reach the parameters of its optimizer."""
    graph = record_step(Net(lambda _: None, one=linear(), other=linear()), _two(first, second))
    assert into_steps(graph) == expected


def _with_closure(net: Any, x: Tensor) -> None:
    """Make a step as a trainer does, with a closure that computes the loss, resets the gradients and computes them."""
    optimizer = torch.optim.SGD(net.parameters())

    def closure() -> Tensor:
        place = x.clone().requires_grad_()
        output = net.one(place)
        (gradient,) = torch.autograd.grad(output.sum(), place, create_graph=True)
        loss: Tensor = gradient.square().mean() + output.sum()
        optimizer.zero_grad()
        loss.backward()
        return loss

    optimizer.step(closure)


def test_steps_of_one_optimizer_are_not_side_by_side() -> None:
    """Each of several steps changes what the next one begins with."""

    def train(net: Any, x: Tensor) -> None:
        optimizer = torch.optim.SGD(net.one.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            net.one(x).sum().backward()
            optimizer.step()

    graph = without(record_step(Net(lambda _: None, one=linear()), train), "parameter")
    view = fold_repeats(collapse(graph))
    assert [(node.repeats, node.parallel) for node in view.nodes if node.repeats > 1] == [(3, False)]


def test_gradients_inside_of_a_loss() -> None:
    """A gradient that ``torch.autograd.grad`` returns for the loss is not one that the optimizer uses."""
    graph = record_step(Net(lambda _: None, one=linear()), _with_closure)
    assert into_steps(graph) == ["SGD <- add"]


def test_one_step_after_two_backward_passes() -> None:
    """A step uses all gradients since the last step of the same optimizer, and none from before."""

    def step(net: Any, x: Tensor) -> None:
        optimizer = torch.optim.SGD(net.parameters())
        for loss in (torch.sum, torch.mean):
            loss(net.fc(x)).backward()
        optimizer.step()
        net.fc(x).exp().max().backward()
        optimizer.step()

    graph = record_step(Net(lambda _: None, fc=linear()), step)
    assert into_steps(graph) == ["SGD <- sum, mean", "SGD <- max"]


def test_a_step_that_no_gradient_was_seen_for() -> None:
    """An optimizer step whose parameters have no gradient is connected to no backward pass."""

    def step(net: Any, x: Tensor) -> None:
        optimizer = torch.optim.SGD(net.unused.parameters())
        optimizer.step()
        net.fc(x).sum().backward()
        net.fc(x).mean().backward()
        optimizer.step()

    graph = record_step(Net(lambda _: None, fc=linear(), unused=linear()), step)
    assert into_steps(graph) == ["SGD · unused <- ", "SGD · unused <- "]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("foreach", [False, True])
def test_complex_parameters(kind: type[torch.optim.Optimizer], foreach: bool) -> None:
    """The step of an optimizer that changes complex parameters as real numbers is recorded, without a warning."""

    def step(net: Any, x: Tensor) -> None:
        optimizer = kind(net.parameters(), lr=0.1, foreach=foreach)  # type: ignore[call-arg]
        net.other(net.fc(x.to(torch.cfloat)).abs()).sum().backward()
        optimizer.step()

    graph = record_step(Net(lambda _: None, fc=nn.Linear(4, 4, dtype=torch.cfloat), other=linear()), step)
    assert into_steps(graph) == [f"{kind.__name__} <- sum"]
