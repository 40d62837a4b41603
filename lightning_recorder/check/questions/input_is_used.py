"""Find inputs, channels and positions that the model does not use.

Each tensor of the batch is permuted among the samples. The prediction must change for at least one tensor. For
floating-point inputs, the gradient shows channels and features without influence. A second pass, in which only these
channels or features are permuted, confirms the result. For sequences, blocks of positions are permuted one after
another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_recorder.check.answer import Answer, NoAnswerError, Question
from lightning_recorder.check.batches import changed, named_tensors
from lightning_recorder.check.influence import Influences, is_changed

if TYPE_CHECKING:
    from lightning_recorder.check.bench import Bench

__all__ = ["QUESTION"]

_BLOCKS = 4
_FEW = 6  # the maximum number of indices in a text
_KINDS = {2: ("feature",), 4: ("channel", "row", "column")}


def answer(bench: Bench) -> Answer:
    """Permute inputs, features and positions among the samples."""
    found = bench.influences
    if not found.tensors:
        raise NoAnswerError("the samples of the batch are all equal")
    if not found.base.predictions:
        raise NoAnswerError("no prediction was seen")
    if not all(bool(torch.isfinite(each).any()) for each in found.base.predictions):
        raise NoAnswerError("the prediction is not finite")
    line = found.base.losses[0].line if found.base.losses else ""
    if not found.inputs:
        same = "the prediction is the same whatever the batch contains"
        if _matters_in_training(bench, found):
            return Answer("look", f"in evaluation mode, {same}; in training mode it depends on the batch", line=line)
        return Answer("wrong", f"{same}: the model does not use its input", line=line)
    unused = _unused_features(bench, found) + _unused_positions(bench, found)
    if unused:
        return Answer("look", "no influence on the prediction: " + "; ".join(unused), line=line)
    ignored = [name for name in found.unused if named_tensors(found.batch)[name].dim() > 1]
    if ignored:
        return Answer("look", f"no influence on prediction or loss: {', '.join(ignored)}", line=line)
    return Answer("ok", f"the prediction depends on {', '.join(found.inputs)}", line=line)


def _matters_in_training(bench: Bench, found: Influences) -> bool:
    """Return True if the prediction depends on the batch in training mode.

    In evaluation mode, a normalization with initial running statistics can shrink this dependence below rounding.
    """
    before = bench.observe(found.batch, training=True)
    after = bench.observe(changed(found.batch, lambda _, each: each.roll(1, 0) if each.dim() else each), training=True)
    return is_changed(before.predictions, after.predictions)


def _unused_features(bench: Bench, found: Influences) -> list[str]:
    """Return the features of tables, and the channels, rows and columns of images, that have no influence."""
    texts = []
    for name in found.inputs:
        tensor = named_tensors(found.batch)[name]
        kinds = _KINDS.get(tensor.dim(), ()) if tensor.is_floating_point() else ()
        gradient = _gradient(bench, found, name) if kinds else None
        for dim, kind in enumerate(kinds if gradient is not None else (), 1):
            places = _places(gradient, tensor, dim)
            # A strided convolution may not use the last row, so a few unused rows or columns are no fault.
            few = kind in ("row", "column") and 4 * len(places) < tensor.shape[dim]
            if places and not few and not _matters(bench, found, name, places, dim):
                listed = ", ".join(map(str, places[:_FEW])) + (" …" if len(places) > _FEW else "")
                texts.append(f"{name}, {len(places)} of {tensor.shape[dim]} {kind}s ({listed})")
    return texts


def _gradient(bench: Bench, found: Influences, name: str) -> Tensor | None:
    """Return the gradient of the squared predictions with respect to a batch tensor; None if there is no gradient."""
    leaves: list[Tensor] = []

    def watched(path: str, tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        if path == name:
            leaves.append(copy.requires_grad_())
        return copy

    try:
        with bench.restored(training=False):
            seen = bench.forward(changed(found.batch, watched), is_own=True)
            predictions = [each for each in seen.predictions if each.requires_grad]
            if not predictions:
                return None
            total = torch.stack([each.double().square().sum() for each in predictions]).sum()
            return torch.autograd.grad(total, leaves[-1:], allow_unused=True)[0]
    except RuntimeError:  # an in-place operation, or an operation without a gradient
        return None


def _places(gradient: Tensor | None, tensor: Tensor, dim: int) -> list[int]:
    """Return the indices of a dimension that vary among the samples and have no gradient."""
    if gradient is None:
        return []
    is_zero, varies = (each.movedim(dim, 0).flatten(1) for each in (gradient == 0, tensor != tensor[:1]))
    return torch.nonzero(is_zero.all(1) & varies.any(1)).flatten().tolist()


def _matters(bench: Bench, found: Influences, name: str, places: list[int], dim: int = 1) -> bool:
    def exchanged(path: str, tensor: Tensor) -> Tensor:
        new = tensor.clone()
        if path == name:
            new.movedim(dim, 0)[places] = tensor.roll(1, 0).movedim(dim, 0)[places]
        return new

    other = bench.observe(changed(found.batch, exchanged), training=False)
    return is_changed(found.base.predictions, other.predictions)


def _unused_positions(bench: Bench, found: Influences) -> list[str]:
    """Return the blocks of sequence positions, and the columns of tables, that have no influence.

    Unused positions may be intended if the batch has masks or lengths.
    """
    tensors = named_tensors(found.batch)
    has_lengths = any(tensors[name].dim() == 1 and not tensors[name].is_floating_point() for name in found.inputs)
    if has_lengths or any("mask" in name.lower() for name in tensors):
        return []
    texts = []
    for number, name in enumerate(found.inputs):
        tensor, kind = tensors[name], ""
        size, is_whole = (tensor.shape[1], not tensor.is_floating_point()) if tensor.dim() in (2, 3) else (0, False)
        if number == 0 and size >= 2 * _BLOCKS and (tensor.dim() == 3 or is_whole):
            kind = "positions"
        elif tensor.dim() == 2 and is_whole and 1 < size < 2 * _BLOCKS and not found.tensors[name].on_target:
            kind = "columns"  # the columns of a table; the last token of a short sequence may only be a target
        for block in torch.arange(size, device="cpu").chunk(size if kind == "columns" else _BLOCKS) if kind else ():
            places = block.tolist()
            varies = bool((tensor[:, places] != tensor.roll(1, 0)[:, places]).any())
            if varies and not _matters(bench, found, name, places):
                texts.append(f"{name}, {kind} {places[0]} to {places[-1]}")
    return texts


QUESTION = Question(
    "input-is-used",
    "Does the model use its input, all of it?",
    "the prediction depends on every input, channel and position that differs among the samples",
    answer,
    steps=2.0,
)
