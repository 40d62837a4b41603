"""Find the first difference between two runs of the same step.

The same step with the same random numbers must have bitwise the same loss and gradients. Otherwise the answer names the
first module with another output. If the step cannot be repeated at all, the other questions have no answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_recorder.check.answer import Answer, Question

if TYPE_CHECKING:
    from lightning_recorder.check.bench import Bench
    from lightning_recorder.check.passes import Pass

__all__ = ["QUESTION"]


def answer(bench: Bench) -> Answer:
    """Repeat the step, and compare losses, outputs and gradients."""
    first, second = bench.repeated
    pairs = zip(first.modules, second.modules, strict=False)
    place = next((one for one, other in pairs if not all(map(torch.equal, one.outputs, other.outputs))), None)
    if place is not None:
        text = f"the output of {place.name} ({place.kind}) differs when the step is repeated"
        return Answer("look", text, module=place.name)
    if _loss(first) != _loss(second):
        return Answer("look", f"the loss differs when the step is repeated: {_loss(first)} and {_loss(second)}")
    if first.loss is None:
        return Answer("ok", "the outputs of all modules are equal when the step is repeated")
    with bench.restored():
        again = bench.gradients(bench.forward(bench.batch).loss)
    for name, each in bench.first_gradients.items():
        other = again[name]
        if (each is None) != (other is None) or (each is not None and other is not None and not _equal(each, other)):
            return Answer("look", f"the gradient of {name} differs when the step is repeated", module=name)
    return Answer("ok", "loss and gradients are equal to the bit when the step is repeated")


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


def _loss(seen: Pass) -> str:
    return "none" if seen.loss is None else repr(seen.loss.tolist())


QUESTION = Question(
    "deterministic",
    "Is it deterministic?",
    "a repeated step with the same random numbers is equal to the bit",
    answer,
    steps=2.7,
    needs_repetition=False,
)
