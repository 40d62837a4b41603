"""Find numbers that are too small or too large for the precision.

The gradients in the chosen precision are compared with the gradients without autocast, with the same random numbers.
Gradients that become zero are an underflow. Gradients that are not finite are an overflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lightning_recorder.check.answer import Answer, NoAnswerError, Question

if TYPE_CHECKING:
    from lightning_recorder.check.bench import Bench

__all__ = ["QUESTION"]

_WRONG, _LOST = 0.5, 0.1  # the limits of the relative error of a gradient, and of the share of its lost elements


def answer(bench: Bench) -> Answer:
    """Compare the gradients with and without autocast."""
    chosen = bench.first_gradients
    bad = [name for name, each in chosen.items() if each is not None and not bool(torch.isfinite(each).all())]
    if bad:
        text = f"the gradient of {bad[0]} is not finite in the first step"
        is_scaled = bench.functions.loss_scale != 1.0
        return Answer("look" if is_scaled else "wrong", text, {"parameters": float(len(bad))}, module=bad[0])
    if bench.functions.without_autocast is None:
        raise NoAnswerError("the precision is that of the parameters, and their gradients are finite")
    with bench.functions.without_autocast(), bench.restored():
        exact = bench.gradients(bench.forward(bench.batch).loss)
    errors, lost = {}, {}
    for name, each in chosen.items():
        other = exact[name]
        if each is not None and other is not None and bool(other.any()):
            errors[name] = float((each.double() - other.double()).norm() / other.double().norm())
            lost[name] = float(((each == 0) & (other != 0)).double().mean())
    if not errors:
        raise NoAnswerError("no parameter has a gradient")
    worst, gone = max(errors, key=errors.__getitem__), max(lost, key=lost.__getitem__)
    numbers = {"largest error": errors[worst], "lost share": lost[gone]}
    if lost[gone] > _LOST:
        return Answer("look", f"{lost[gone]:.0%} of the gradient of {gone} become zero", numbers, module=gone)
    if sorted(errors.values())[len(errors) // 2] > _WRONG:
        text = f"half of the gradients differ by more than {_WRONG:.0%} from those in full precision"
        return Answer("look", text, numbers, module=worst)
    return Answer("ok", f"gradients differ by at most {errors[worst]:.1%} from those in full precision", numbers)


QUESTION = Question(
    "numbers-large-enough",
    "Are numbers large enough?",
    "gradients are finite, and near those in full precision",
    answer,
    steps=1.0,
)
