"""Tests of the shares of samples in the loss and in the gradient norm of a step."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.callbacks.row_shares import RowShares

ROWS, CLASSES, STEPS = 6, 4, 5
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0])


def read(batch: list[Tensor], loss: Callable[[list[Tensor]], Tensor], parameters: list[nn.Parameter]) -> RowShares:
    """Run a step, with its backward pass if parameters are given whose gradients are wanted."""
    shares = RowShares(batch, len(batch[0]), parameters, of_gradient=bool(parameters))
    with shares:
        found = loss(batch)
    shares.read_loss(found)
    if parameters:
        torch.autograd.grad(found, parameters)
    return shares


def of_classes(batch: list[Tensor]) -> Tensor:
    scores = batch[0].transpose(1, 2)
    return F.cross_entropy(scores, batch[1], WEIGHT, ignore_index=3, label_smoothing=0.1)


def of_tokens(batch: list[Tensor]) -> Tensor:
    found: Tensor = nn.NLLLoss()(batch[0].log_softmax(2).reshape(-1, CLASSES), batch[1].reshape(-1))
    return found


def by_hand(batch: list[Tensor]) -> Tensor:
    found: Tensor = torch.mean(batch[0].logsumexp(2).sum(1) ** 2)
    return found


def summed(batch: list[Tensor]) -> Tensor:
    return F.mse_loss(batch[0], torch.ones_like(batch[0]), reduction="sum")


def several(batch: list[Tensor]) -> Tensor:
    return 1e-3 * by_hand(batch) + F.binary_cross_entropy_with_logits(batch[0], torch.ones_like(batch[0]))


@pytest.mark.parametrize("loss", [of_classes, of_tokens, by_hand, summed, several])
def test_shares_of_the_loss(loss: Callable[[list[Tensor]], Tensor]) -> None:
    """The shares add up to the loss. The share of a sample is as much as the loss changes if the sample is constant."""
    generator = torch.Generator().manual_seed(0)
    batch = [
        torch.randn(ROWS, STEPS, CLASSES, generator=generator).requires_grad_(),
        torch.randint(0, CLASSES, (ROWS, STEPS), generator=generator),
    ]
    shares = read(batch, loss, [])._shares
    assert shares is not None
    total = float(loss(batch).detach())
    assert float(shares.sum()) == pytest.approx(total)
    for place in range(ROWS):
        other = batch[0].detach().clone()
        other[place] = 7 * other[place]
        changed = read([other.requires_grad_(), batch[1]], loss, [])._shares
        assert changed is not None
        same = [each for each in range(ROWS) if each != place]
        assert torch.allclose(changed[same], shares[same])
        assert float(changed[place] - shares[place]) == pytest.approx(float(loss([other, batch[1]]).detach()) - total)


def test_shares_of_the_gradient_norm() -> None:
    """For a linear layer, the share of a sample is the norm of its own gradient, also with several steps of each."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(CLASSES, 3, generator=generator))
    batch = [torch.randn(ROWS, 3, generator=generator)]

    def loss(batch: list[Tensor]) -> Tensor:
        return F.linear(batch[0], weight).pow(2).sum(1).mean()

    shares = read(batch, loss, [weight])._shares
    assert shares is not None
    for place in range(ROWS):
        (own,) = torch.autograd.grad(loss([batch[0][place : place + 1]]) / ROWS, [weight])
        assert float(shares[place]) == pytest.approx(float(own.norm()), rel=1e-5)


def below(limit: float) -> Callable[[float], bool]:
    return lambda value: not value <= limit


def squares(*values: float) -> RowShares:
    batch = [torch.tensor(values, dtype=torch.float32).requires_grad_()]
    return read(batch, lambda batch: torch.mean(batch[0] ** 2) + 5, [])


def test_suspects() -> None:
    """The suspects are the fewest samples without which the others are as usual, the worst first."""
    shares = squares(1, 3, 1, 30, 1, 20, 1, 1)
    assert shares.suspects(below(20.0), 169.25) == [[3, 5]]
    assert shares.suspects(below(100.0), 169.25) == [[3]]
    # The mean of the seven others is 59.1, and 5 are about no sample.
    assert shares.suspects(below(64.2), 169.25) == [[3]]
    assert shares.suspects(below(64.0), 169.25) == [[3, 5]]


def test_no_suspects() -> None:
    """If most samples are bad, none is a suspect."""
    assert squares(9, 9, 9, 9, 9, 9, 1, 1).suspects(below(10.0), 66.0) == []
    assert squares(math.nan, math.nan, math.nan, 1.0).suspects(below(math.inf), math.nan) == []


def test_suspects_of_a_bad_value() -> None:
    """Where a normalization spreads a NaN to all samples, the suspects are those with the first one."""
    norm = nn.BatchNorm1d(2)

    def loss(batch: list[Tensor]) -> Tensor:
        masked = (batch[0] * 0).masked_fill(torch.tensor([[True], [True], [False], [False]]), -math.inf)
        found: Tensor = norm((batch[0] + 1).sqrt()).pow(2).mean() + masked.clamp(min=0).sum()
        return found

    batch = [torch.tensor([[1.0, 2.0], [3.0, 1.0], [5.0, -9.0], [2.0, 2.0]])]
    assert read(batch, loss, []).suspects(below(math.inf), math.nan) == [[2]]


def test_a_sample_that_stands_out() -> None:
    """A sample whose numbers are ten times those of all others is a suspect where the loss shows none."""

    def loss(batch: list[Tensor]) -> Tensor:
        found: Tensor = torch.linalg.vector_norm(batch[0])
        return found

    assert read([torch.tensor([[1.0], [2.0], [-21.0], [1.0]])], loss, []).suspects(below(1.0), 21.0) == [[2]]
    assert read([torch.tensor([[1.0], [2.0], [-19.0], [1.0]])], loss, []).suspects(below(1.0), 19.0) == []
    assert read([torch.tensor([1, 2, 210, 1])], lambda batch: torch.ones(()), []).suspects(below(0.5), 1.0) == []


def test_samples_that_depend_on_each_other() -> None:
    """The shares of the other samples agree without one, unless they depend on it."""

    def without(loss: Callable[[list[Tensor]], Tensor]) -> bool:
        batch = torch.arange(1.0, 9.0).reshape(4, 2).requires_grad_()
        part = batch.detach()[[0, 1, 3]].requires_grad_()
        return read([batch], loss, []).agree(read([part], loss, []), [0, 1, 3], [0, 1, 2])

    assert without(lambda batch: (batch[0] ** 2).mean())
    assert without(lambda batch: F.mse_loss(batch[0], torch.zeros_like(batch[0]), reduction="sum"))
    assert not without(lambda batch: ((batch[0] - batch[0].mean(0)) ** 2).mean())
    assert not without(lambda batch: batch[0].norm())  # not known


def test_a_function_with_other_arguments() -> None:
    """A loss that cannot be computed without its reduction does not fail the step, and has no shares."""
    batch = [torch.ones(4, 2).requires_grad_()]
    shares = read(batch, lambda batch: torch.binary_cross_entropy_with_logits(batch[0], batch[0], reduction=1), [])
    assert shares._shares is None
