"""Find predictions that depend on other samples of the batch.

The first sample is kept, and all other samples are replaced by copies of it. The prediction for the first sample must
not change. The last sample is tested in the same way, because a recurrence along the batch has a direction. In
training, BatchNorm mixes samples on purpose. In evaluation, nothing may mix samples. Typical causes are a ``view``
instead of a ``permute``, a softmax along the batch, and a recurrence or an attention along the batch dimension. If the
samples are permuted, the predictions must be permuted in the same way. They are not if a positional encoding along the
batch makes predictions depend on the index of a sample. Finally, the targets must be in the same order as the
predictions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_recorder.check.answer import Answer, NoAnswerError, Question
from lightning_recorder.check.batches import named_tensors, rows_of, take_rows
from lightning_recorder.check.influence import by_row, change_of, tolerance
from lightning_recorder.check.passes import LossCall, ModuleCall, Pass

if TYPE_CHECKING:
    from lightning_recorder.check.bench import Bench

__all__ = ["QUESTION"]

_OWN = 0.5  # the minimum share of a sample's targets that belong to its own predictions


def answer(bench: Bench) -> Answer:
    """Compare the predictions for a sample in batches with different other samples."""
    rows = rows_of(bench.few)
    in_evaluation = _mixing(bench, rows, training=False)
    if in_evaluation is None:
        if (call := _in_another_order(bench, rows)) is not None:
            text = "predictions of a sample are compared with targets of others: are both flattened in the same order?"
            return Answer("look", text, line=call.line)
        raise NoAnswerError("no prediction was seen whose samples can be told apart")
    share, culprit, line = in_evaluation
    numbers = {"share of other samples": share}
    if culprit is not None and "Norm" in culprit.kind:
        text = f"{culprit.kind} mixes samples in evaluation as well, since it has no running statistics"
        return Answer("look", text, numbers, line, culprit.name)
    if share:
        return _wrong(bench, culprit, numbers, line)
    if _depends_on_place(bench, rows):
        is_certain = _is_known(bench) and bench.functions.is_automatic
        text = "the prediction of a sample depends on its place in the batch: is something added along the batch?"
        return Answer("wrong" if is_certain else "look", text, numbers, line)
    in_training = _mixing(bench, rows, training=True)
    if in_training is None or not in_training[0]:
        return Answer("ok", "the prediction of a sample depends on that sample alone", numbers)
    share, culprit, line = in_training
    numbers = {"share of other samples": share}
    if culprit is not None and "Norm" in culprit.kind:
        text = f"samples mix in training only, in {culprit.kind}, as intended"
        return Answer("ok", text, numbers, module=culprit.name)
    place = "outside of the modules" if culprit is None else f"in {culprit.name} ({culprit.kind})"
    text = f"samples mix in training {place}, but not in evaluation"
    return Answer("look", text, numbers, line, "" if culprit is None else culprit.name)


def _wrong(bench: Bench, culprit: ModuleCall | None, numbers: dict[str, float], line: str) -> Answer:
    """Return the answer for samples that mix in evaluation.

    The answer is *wrong* only if the first dimension is known to be the batch dimension, and if a module mixes the
    samples. The training step itself may mix samples on purpose, as mixup does.
    """
    is_known = _is_known(bench)
    if culprit is None:
        text = "as in mixup, samples mix between the modules, in the code of the step or of forward"
        return Answer("look", text, numbers, line)
    text = f"{culprit.name} ({culprit.kind}) mixes samples: the prediction of one depends on the others in its batch"
    is_certain = is_known and bench.functions.is_automatic
    text += "" if is_known else ", if the first dimension is that of the samples"
    return Answer("wrong" if is_certain else "look", text, numbers, line, culprit.name)


def _is_known(bench: Bench) -> bool:
    """Return True if the first dimension is known to be the batch dimension and not the time dimension."""
    return bench.batch_size == bench.rows or any(each.dim() == 1 for each in named_tensors(bench.batch).values())


def _depends_on_place(bench: Bench, rows: int) -> bool:
    """Return True if predictions change with the order of the samples, and random numbers do not explain the change."""
    order = [*range(1, rows), 0]
    passes = [
        bench.observe(bench.few, training=False),
        bench.observe(take_rows(bench.few, order), training=False),
        bench.observe(bench.few, training=False, other_numbers=True),
    ]
    base, rolled, random = (
        [each for each in _predictions(seen, passes[0], rows, bench) if each is not None] for seen in passes
    )
    if not len(base) == len(rolled) == len(random) or any(map(_is_far, base, random)):
        return False
    return any(_is_far(one[order], other) for one, other in zip(base, rolled, strict=True))


def _is_far(one: Tensor, other: Tensor) -> bool:
    return one.is_floating_point() and change_of(one, other) > tolerance(one)


def _mixing(bench: Bench, rows: int, *, training: bool) -> tuple[float, ModuleCall | None, str] | None:
    """Return the influence of other samples on a prediction, the module that mixes samples, and the line of the loss.

    The influence is relative to the influence of the sample itself. It is 0 if rounding can explain it. None is
    returned if no prediction has a batch dimension.
    """

    def kept(tensor: Tensor) -> Tensor | None:
        has_rows = tensor.dim() and tensor.shape[0] == rows and rows not in tensor.shape[1:]
        return tensor[[0, -1]] if has_rows else None

    # One sample differs from the copies, because a model that divides by a standard deviation over the batch would
    # return NaN.
    orders = (
        [None, [0, *[1] * (rows - 1)], [*[rows - 2] * (rows - 1), rows - 1]] if rows > 2 else [None, [0, 0], [1, 1]]
    )
    base, first, last = (
        bench.observe(bench.few if each is None else take_rows(bench.few, each), training=training, keep=kept)
        for each in orders
    )
    predictions = (_predictions(seen, base, rows, bench) for seen in (base, first, last))
    found = [_leak(*each) for each in zip(*predictions, strict=False)]
    known = [each for each in found if each is not None]
    if not known:
        return None
    share = max(known)
    if not share:
        return 0.0, None, ""
    line = base.losses[0].line if base.losses else ""
    return share, _culprit(base, first, last), line


def _in_another_order(bench: Bench, rows: int) -> LossCall | None:
    """Return a loss that compares most targets of a sample with predictions for other samples, or None.

    The first sample is replaced by a copy of the second one. The predictions and targets that change belong to the
    first sample.
    """
    if rows < 2:
        return None
    passes = [bench.observe(take_rows(bench.few, [first, *range(1, rows)]), training=False) for first in (0, 1)]
    for before, after in zip(passes[0].losses, passes[1].losses, strict=False):
        prediction, target = before.prediction, before.target
        if (prediction.shape, target.shape) != (after.prediction.shape, after.target.shape):
            continue
        if target.dim() and prediction.shape[:1] == target.shape[:1] != (rows,):
            predictions = (prediction != after.prediction).reshape(len(prediction), -1).any(1)
            targets = (target != after.target).reshape(len(target), -1).any(1)
            if predictions.any() and targets.any() and predictions[targets].double().mean() < _OWN:
                return before
    return None


def _predictions(seen: Pass, base: Pass, rows: int, bench: Bench) -> list[Tensor | None]:
    """Return the predictions of a pass by sample. ``base`` is the pass with the unchanged samples."""
    if seen.losses:
        pairs = zip(seen.losses, base.losses, strict=False)
        return [by_row(each.prediction, known, rows, bench.few) for each, known in pairs]
    return [each if each.shape[0] == rows and rows not in each.shape[1:] else None for each in seen.outputs]


def _leak(base: Tensor | None, first: Tensor | None, last: Tensor | None) -> float | None:
    """Return the change of a prediction due to other samples, relative to the change due to the sample itself."""
    if base is None or first is None or last is None or not base.is_floating_point():
        return None
    if not base.shape == first.shape == last.shape:
        return None
    signal = float((first[-1] - base[-1]).double().abs().max())
    leak = max(float((one - other).double().abs().max()) for one, other in ((first[0], base[0]), (last[-1], base[-1])))
    if not signal:
        return None
    share = leak / signal
    return share if share > tolerance(base) else 0.0


def _culprit(base: Pass, first: Pass, last: Pass) -> ModuleCall | None:
    """Return the innermost module whose output for a sample changes although its inputs for that sample do not."""
    for calls in zip(base.modules, first.modules, last.modules, strict=False):
        for index, other in ((0, calls[1]), (1, calls[2])):
            is_known = bool(calls[0].inputs) and not _differ(calls[0].inputs, other.inputs, index)
            if is_known and _differ(calls[0].outputs, other.outputs, index):
                return calls[0]
    return None


def _differ(one: tuple[Tensor, ...], other: tuple[Tensor, ...], index: int) -> bool:
    return any(
        not torch.allclose(a[index].double(), b[index].double(), rtol=tolerance(a), atol=tolerance(a) * 0.1)
        for a, b in zip(one, other, strict=False)
        if a.shape == b.shape
    )


QUESTION = Question(
    "samples-mix",
    "Do samples mix?",
    "the prediction of a sample depends on no other sample of its batch; in training, BatchNorm may mix them",
    answer,
    steps=2.5,
)
