"""Find predictions that see the future.

If the target of a sequence is its own next element, the prediction at a position must not depend on later elements. The
later elements are replaced by those of another sample, and earlier predictions must not change. If they change, a
missing or shifted causal mask is the usual cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_recorder.check.answer import Answer, NoAnswerError, Question
from lightning_recorder.check.batches import changed, named_tensors, rows_of
from lightning_recorder.check.influence import agreement, tolerance
from lightning_recorder.check.passes import LossCall

if TYPE_CHECKING:
    from lightning_recorder.check.bench import Bench

__all__ = ["QUESTION"]

_SAME = 0.95  # the share of targets that must be the next element


def answer(bench: Bench) -> Answer:
    """Replace the later elements, and compare the earlier predictions."""
    batch = bench.few
    rows = rows_of(batch)
    base = bench.influences.base
    inputs = set(bench.influences.inputs)
    ahead = (inputs.intersection(_shifts(each, batch, rows).get(1, ())) for each in base.losses)
    place, call = next(((place, base.losses[place]) for place, names in enumerate(ahead) if names), (0, None))
    if call is None:
        return _of_copied_target(bench, rows)
    shifts = _shifts(call, batch, rows)
    share, middle = _changed_later(bench, place, shifts, rows)
    numbers = {"share of the future": share, "position": middle}
    if share > tolerance(call.prediction):
        text = f"the prediction at position {middle} depends on later elements, which it has to predict"
        return Answer("wrong", f"{text}: a causal mask is missing or shifted", numbers, call.line)
    return Answer("ok", "predictions do not depend on later elements", numbers, call.line)


def _of_copied_target(bench: Bench, rows: int) -> Answer:
    """Return an answer if the target is the input element at the same position, or two positions ahead.

    The decoder of a translation model receives its targets, but each position must depend only on earlier targets. If
    the labels are already shifted and the model shifts them again, the target lies two positions ahead.
    """
    found = bench.influences
    for place, call in enumerate(found.base.losses):
        copies, twice = (
            [name for name in _shifts(call, bench.few, rows).get(shift, []) if name in found.inputs] for shift in (0, 2)
        )
        if call.has_classes and twice:
            text = f"the target is {twice[0]} two positions ahead: is it shifted twice?"
            return Answer("look", text, line=call.line)
        if call.has_classes and copies:
            share, _ = _changed_later(bench, place, {0: copies}, rows)
            if share > tolerance(call.prediction):
                text = (
                    f"the target is {copies[0]} at the same position, which the prediction depends on: is it shifted?"
                )
                return Answer("look", text, {"share of the future": share}, call.line)
            return Answer("ok", "predictions do not depend on their targets or later ones", line=call.line)
    raise NoAnswerError("no loss has the next element of a sequence as its target")


def _shifts(call: LossCall, batch: Any, rows: int) -> dict[int, list[str]]:
    """Return the batch tensors that the target is a copy of, by the number of positions that the copy is shifted."""
    target = call.target
    if target.dim() == 1 and target.numel() % rows == 0:
        target = target.reshape(rows, -1)
    if target.dim() < 2 or target.shape[0] != rows:
        return {}
    found: dict[int, list[str]] = {}
    for name, each in named_tensors(batch).items():
        if each.dim() and each.shape[0] == rows:
            for shift in (1, 0, 2):
                if agreement(target, each, shift, call.ignored) >= _SAME:
                    found.setdefault(shift, []).append(name)
                    break
    return found


def _changed_later(bench: Bench, place: int, shifts: dict[int, list[str]], rows: int) -> tuple[float, int]:
    """Change the later elements. Return the change of earlier predictions relative to later ones, and the position."""
    batch = bench.few
    first = min(shifts, key=lambda shift: -shift)
    middle = min(each.shape[1] for name, each in named_tensors(batch).items() if name in shifts[first]) // 2
    other = bench.observe(changed(batch, lambda name, each: _later(name, each, shifts, middle)), training=False)
    before, after = (_by_position(each, rows) for each in (bench.influences.base.losses[place], other.losses[place]))
    return _leak(before, after, middle), middle


def _later(name: str, tensor: Tensor, shifts: dict[int, list[str]], middle: int) -> Tensor:
    """Return a copy of a tensor in which the elements after a position come from another sample."""
    new = tensor.clone()
    for shift, names in shifts.items():
        if name in names:
            new[:, middle + shift :] = tensor.roll(1, 0)[:, middle + shift :]
    return new


def _by_position(call: LossCall, rows: int) -> Tensor:
    """Return a prediction as ``[sample, position, ...]``."""
    prediction = call.prediction
    if prediction.shape[0] != rows:
        return prediction.reshape(rows, prediction.shape[0] // rows, *prediction.shape[1:])
    return prediction.movedim(1, -1) if call.has_classes and prediction.dim() > call.target.dim() else prediction


def _leak(before: Tensor, after: Tensor, middle: int) -> float:
    """Return the change of predictions up to a position, relative to the change of later predictions."""
    change = (before - after).double().abs()
    signal = float(change[:, middle + 1 :].max()) if change.shape[1] > middle + 1 else 0.0
    leak = float(change[:, : middle + 1].max())
    if not signal and not leak:
        raise NoAnswerError("the prediction does not depend on the sequence")
    return leak / max(signal, leak)


QUESTION = Question(
    "past-sees-future",
    "Does the past see the future?",
    "if the target is the next element, a prediction does not depend on later elements",
    answer,
    steps=0.5,
)
