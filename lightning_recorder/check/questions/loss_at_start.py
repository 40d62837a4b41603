"""Compare the loss at the start with the loss of a model without knowledge.

The cross entropy of an untrained classifier is near the logarithm of the number of classes. The loss of an untrained
regression is near the spread of its targets. A much larger loss means that outputs or targets have another scale. The
function that made the prediction must fit the loss: logits for a cross entropy, log probabilities for ``nll_loss``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_recorder.check.answer import Answer, NoAnswerError, Question
from lightning_recorder.check.passes import REGRESSION, LossCall

if TYPE_CHECKING:
    from lightning_recorder.check.bench import Bench

__all__ = ["QUESTION"]

_WIDE = 2.0  # a multiple of the expected cross entropy
_FAR = 100.0  # a multiple of the spread of the targets, or of the size of the predictions
_MANY = 8  # the minimum number of values to measure a spread
_SHAPES = ("view", "unsafe_view", "squeeze", "unsqueeze", "reshape_alias", "transpose", "permute", "to_copy", "t")


def answer(bench: Bench) -> Answer:
    """Compare each loss at the start with the loss of a model without knowledge."""
    with bench.restored():
        seen = bench.forward(bench.batch)
        calls = list(seen.losses)
        found = [_of_form(each) or _of_size(each) for each in calls]
    if seen.loss is not None and not bool(torch.isfinite(seen.loss).all()):
        return Answer("wrong", f"the loss is {float(seen.loss)}")
    known = [each for each in found if each is not None]
    if not known:
        raise NoAnswerError("no loss function was seen whose value at the start is known")
    return min(known, key=lambda each: ("wrong", "look", "ok").index(each.verdict))


def _of_form(call: LossCall) -> Answer | None:
    """Return an answer if the function that made a prediction does not fit its loss, otherwise None."""
    made_by, prediction = _made_by(call.prediction), call.prediction.detach().double()
    if call.name == "cross_entropy" and made_by in ("softmax", "sigmoid"):
        text = f"cross_entropy expects logits, but receives the result of {made_by}: it applies a softmax of its own"
        return Answer("wrong", text, line=call.line)
    if call.name == "cross_entropy" and made_by == "relu":
        text = "cross_entropy expects logits, but receives the result of relu: a class cannot become unlikely"
        return Answer("wrong", text, line=call.line)
    if call.name == "binary_cross_entropy_with_logits" and made_by in ("softmax", "sigmoid", "relu"):
        return Answer("wrong", f"{call.name} expects logits, but receives the result of {made_by}", line=call.line)
    if call.name == "nll_loss" and prediction.dim() > 1 and prediction.numel():
        total = float(prediction.logsumexp(1).abs().max())
        if total > 0.1:
            text = "nll_loss expects logarithms of probabilities, but those of the classes do not sum to 1"
            return Answer("wrong", text, {"log of the sum": total}, call.line)
    return None


def _made_by(tensor: Tensor) -> str:
    """Return the operation that made a tensor, skipping changes of its shape or dtype."""
    node = tensor.grad_fn
    while node is not None:
        name = type(node).__name__.partition("Backward")[0]
        name = "".join(f"_{char.lower()}" if char.isupper() else char for char in name).lstrip("_")
        following = node.next_functions
        if name not in _SHAPES or not following:
            return "softmax" if name == "softmax" else name
        node = following[0][0]
    return ""


def _of_size(call: LossCall) -> Answer | None:
    prediction, target = call.prediction.detach().double(), call.target
    if call.has_classes and prediction.dim() > 1:
        return _of_classes(call, prediction)
    if call.name in REGRESSION and prediction.shape == target.shape and target.numel() >= _MANY:
        return _of_values(call, prediction, target.double())
    return None


def _of_classes(call: LossCall, prediction: Tensor) -> Answer | None:
    classes = prediction.shape[1]
    if classes < 2 or bool((call.target == call.ignored).all()):
        return None
    loss = float(getattr(F, call.name)(prediction, call.target, ignore_index=call.ignored))
    expected = math.log(classes)
    numbers = {"loss": loss, "expected": expected}
    if loss > _WIDE * expected + 1.0:
        size = float(prediction.std())
        text = (
            f"the cross entropy is {loss:.3g} instead of {expected:.3g}: logits have a standard deviation of {size:.3g}"
        )
        return Answer("look", text, {**numbers, "logits std": size}, call.line)
    return Answer("ok", f"the cross entropy is {loss:.3g}, and {expected:.3g} without knowledge", numbers, call.line)


def _of_values(call: LossCall, prediction: Tensor, target: Tensor) -> Answer | None:
    spread, size = float(target.std()), float(target.square().mean().sqrt())
    own = float(prediction.square().mean().sqrt())
    error = float((prediction - target).square().mean().sqrt())
    numbers = {"error": error, "spread of the targets": spread, "size of the predictions": own}
    if not spread:
        return None
    if error > _FAR * spread and own > _FAR * size:
        text = f"the predictions ({own:.3g}) are much larger than the targets ({size:.3g})"
        return Answer("look", text, numbers, call.line)
    if size > _FAR * max(own, 1.0):
        text = f"the targets ({size:.3g}) are much larger than the predictions ({own:.3g}): they are not normalized"
        return Answer("look", text, numbers, call.line)
    if error > _FAR * spread:
        text = f"the error ({error:.3g}) is much larger than the spread of the targets ({spread:.3g})"
        return Answer("look", text, numbers, call.line)
    return Answer("ok", f"the error is {error:.3g}, and the targets have a spread of {spread:.3g}", numbers, call.line)


QUESTION = Question(
    "loss-at-start",
    "Is the loss right at the start?",
    "the cross entropy is near the logarithm of the number of classes, the error near the spread of the targets",
    answer,
    steps=0.5,
)
