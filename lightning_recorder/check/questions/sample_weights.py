"""Find samples that weigh more than others.

The gradient of a batch is compared with the gradients of its two halves, in evaluation mode. If the loss is a mean over
the samples, each half has the weight 0.5. If it is a sum, each half has the weight 1. Other weights mean that the
weight of a sample depends on its length or its padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_recorder.check.answer import Answer, NoAnswerError, Question
from lightning_recorder.check.batches import rows_of, take_rows

if TYPE_CHECKING:
    from lightning_recorder.check.bench import Bench

__all__ = ["QUESTION"]

_SMALL = 0.01  # the largest relative error that rounding can cause
_UNEVEN = 1.2  # the limit of the ratio of the two weights


def answer(bench: Bench) -> Answer:
    """Find the weights of the two halves of a batch in its gradient."""
    bench.optimizer  # noqa: B018 - manual optimization has no answer
    rows = rows_of(bench.few)
    half = rows // 2
    if rows < 2:
        raise NoAnswerError("the batch has a single sample")
    parts = [take_rows(bench.few, list(range(half))), take_rows(bench.few, list(range(half, 2 * half)))]
    whole = _gradient(bench, take_rows(bench.few, list(range(2 * half))))
    one, other = (_gradient(bench, each) for each in parts)
    size = float(whole.norm())
    if not 0 < size < float("inf"):
        raise NoAnswerError("the gradient is zero" if size == 0 else "the gradient is not finite")
    solution = torch.linalg.lstsq(torch.stack([one, other], 1), whole[:, None]).solution
    weights = solution.flatten().tolist()
    residual = float((whole - weights[0] * one - weights[1] * other).norm() / size)
    numbers = {"first half": weights[0], "second half": weights[1], "rest": residual}
    if residual > _SMALL or min(weights) <= 0:
        raise NoAnswerError("the loss of a sample depends on the other samples of its batch")
    if max(weights) > _UNEVEN * min(weights):
        text = f"samples do not weigh the same: halves of the batch weigh {weights[0]:.2f} and {weights[1]:.2f}"
        return Answer("look", text, numbers)
    if min(weights) > 0.8:
        text = "the loss is a sum over samples: the learning rate depends on the size of the batch"
        return Answer("ok", text, numbers)
    return Answer("ok", "the gradient of a batch is the mean over its samples", numbers)


def _gradient(bench: Bench, batch: object) -> Tensor:
    with bench.restored(training=False):
        found = bench.gradients(bench.forward(batch).loss, batch)
    return torch.cat(
        [each.double().flatten() for name in found if (each := found[name]) is not None]
        or [torch.zeros(1, device="cpu")]
    )


QUESTION = Question(
    "sample-weights",
    "Does one sample weigh as another?",
    "the gradient of a batch is the mean, or the sum, of the gradients of its samples",
    answer,
    steps=1.5,
)
