"""Find a loss that does not use its target, and a prediction that uses the target.

The targets are permuted among the samples. The loss must change, and the prediction must not change. The question also
finds shapes of prediction and target that broadcast, targets that are all ignored, and targets of a single class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_recorder.check.answer import Answer, NoAnswerError, Question
from lightning_recorder.check.batches import named_tensors, rows_of
from lightning_recorder.check.influence import Influences
from lightning_recorder.check.passes import LossCall, Pass

if TYPE_CHECKING:
    from lightning_recorder.check.bench import Bench

__all__ = ["QUESTION"]

_MANY = 16  # this many samples of a single class are hardly chance
_FLOATS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


def answer(bench: Bench) -> Answer:
    """Permute the targets among the samples, and compare shapes."""
    found = bench.influences
    first = bench.first
    bad = next(filter(None, map(_of_call, first.losses)), None) or _of_broadcast(first)
    if bad is not None:
        return bad
    leaked = _leaked(found)
    if leaked is not None:
        return leaked
    idle = _idle(found)
    if idle is not None:
        return idle
    if not found.targets and not found.base.losses:
        raise NoAnswerError("the loss is computed without a loss function of torch, and no tensor is only a target")
    names = ", ".join(found.targets) or "a tensor that is also an input"
    return Answer("ok", f"the loss depends on its target ({names})", line=_line(found.base))


def _of_call(call: LossCall) -> Answer | None:
    """Return an answer if the shapes or the values of a loss call are wrong, otherwise None."""
    prediction, target = call.prediction, call.target
    if not call.has_classes and prediction.shape != target.shape and call.name != "cross_entropy":
        try:
            shape = torch.broadcast_shapes(prediction.shape, target.shape)
        except RuntimeError:
            return None
        if shape.numel() > max(prediction.numel(), target.numel()):
            text = f"{call.name} compares every prediction with every target: {_shapes(call)} broadcast"
            return Answer("wrong", text, line=call.line)
    if torch.equal(prediction, target) and bool((target != target.flatten()[:1]).any()):
        return Answer("look", f"{call.name} compares the prediction with itself, or with a copy of it", line=call.line)
    if call.has_classes and target.numel():
        ignored = float((target == call.ignored).double().mean())
        if ignored == 1.0:
            return Answer("wrong", "all targets are ignored", {"ignored": ignored}, call.line)
        kept = target[target != call.ignored]
        classes = prediction.shape[1] if prediction.dim() > 1 else prediction.shape[0]
        if kept.numel() >= _MANY and classes > 1 and bool((kept == kept[0]).all()):
            text = f"all {kept.numel()} targets are class {int(kept[0])}: the data may be sorted"
            return Answer("look", text, {"ignored": ignored}, call.line)
    return None


def _shapes(call: LossCall) -> str:
    return f"{list(call.prediction.shape)} and {list(call.target.shape)}"


def _of_broadcast(seen: Pass) -> Answer | None:
    if seen.broadcasts:
        line, shapes = seen.broadcasts[0]
        text = f"a subtraction compares every prediction with every target: {shapes} broadcast"
        return Answer("look", text, line=line)
    return None


def _leaked(found: Influences) -> Answer | None:
    """Return an answer if the prediction depends on the target of its own sample."""
    tensors = named_tensors(found.batch)
    for call in found.base.losses:
        for name in found.inputs:
            tensor = tensors[name]
            is_target = tensor.shape == call.target.shape and torch.equal(tensor, call.target.to(tensor.dtype))
            has_other = any(other != name for other in found.inputs)
            if is_target and has_other and ((call.has_classes and tensor.dim() == 1) or call.name in _FLOATS):
                text = f"the prediction depends on {name}, which is its target"
                return Answer("look", f"{text}; a loss with margins does so on purpose", line=call.line)
    return None


def _idle(found: Influences) -> Answer | None:
    """Return an answer if a tensor that looks like a target has no influence."""
    rows = rows_of(found.batch)
    # A square prediction compares samples with each other, so it needs no target.
    supervised = [each for each in found.base.losses if len({*each.prediction.shape[:2], rows}) > 1]
    tensors = named_tensors(found.batch)
    idle = [name for name in found.unused if _could_be_target(tensors[name], supervised)]
    is_reconstruction = any(each.on_target for each in found.tensors.values())
    if not found.targets and idle and supervised and not is_reconstruction:
        text = f"neither loss nor prediction depends on {', '.join(idle)}, and nothing else is a target"
        return Answer("look", text, line=_line(found.base))
    return None


def _could_be_target(tensor: Tensor, calls: list[LossCall]) -> bool:
    return tensor.dim() == 1 or any(tensor.shape == each.target.shape for each in calls)


def _line(seen: Pass) -> str:
    return seen.losses[0].line if seen.losses else ""


QUESTION = Question(
    "target-is-used",
    "Does the loss use its target?",
    "the loss depends on the target of each sample, and the prediction does not",
    answer,
    steps=0.0,
)
