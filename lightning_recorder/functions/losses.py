"""The predictions and targets of loss functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_recorder.bins import BIN_SHIFT, CLASSES, FIRST_CLASS_BIN, NO_CLASS_BIN
from lightning_recorder.records.classes import CLASS_COUNTS

__all__ = ["classes_of_loss", "padding_of", "share_of_ends", "share_of_next", "sides_of_loss", "some_of"]

_MOST_VALUES = 1 << 20
_FEWEST_POSITIONS = 2

# Losses without a target, which compare predictions with each other.
_WITHOUT_TARGET = ("triplet_margin_loss", "triplet_margin_with_distance_loss")
_OF_PAIRS = ("cosine_embedding_loss", "margin_ranking_loss")  # the target is their third argument
_IGNORING = {"cross_entropy": 4, "nll_loss": 4}  # the position of the argument ``ignore_index``
_IGNORED = -100  # the default of ``ignore_index``
# The argument with the class weights, and its position.
_WEIGHTING = {
    "cross_entropy": ("weight", 2),
    "nll_loss": ("weight", 2),
    "binary_cross_entropy_with_logits": ("pos_weight", 6),
}
_OF_CLASSES = ("cross_entropy", "nll_loss", "multi_margin_loss")
# An output above this threshold predicts the second class.
_OF_TWO_CLASSES = {"binary_cross_entropy": 0.5, "binary_cross_entropy_with_logits": 0.0}


def sides_of_loss(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the prediction and the target of a loss function by their paths; empty for a loss without a target.

    For losses of pairs, such as ``margin_ranking_loss``, only the target is returned.

    Further paths depend on the loss. ``in.target.ignored`` is True where a target is the ignored class, so its mean is
    the fraction of ignored targets. ``in.target.blank`` is True where a label of ``ctc_loss`` is the blank; padding is
    excluded. For a loss with class weights, ``in.target.weights`` has the weights of the classes, and
    ``in.target.weight`` the weight of each target.

    Example:
        >>> import torch
        >>> sides = sides_of_loss("cross_entropy", [torch.zeros(2, 3), torch.tensor([1, -100])], {})
        >>> {path: tuple(side.shape) for path, side in sides.items()}
        {'in.prediction': (2, 3), 'in.target': (2,), 'in.target.ignored': (2,)}
        >>> sides["in.target.ignored"].tolist()
        [False, True]
    """
    if name in _WITHOUT_TARGET:
        return {}
    if name in _OF_PAIRS:
        target = args[2] if len(args) > 2 else kwargs.get("target")
        return {"in.target": target} if isinstance(target, Tensor) else {}
    named = [kwargs.get("input", kwargs.get("log_probs")), kwargs.get("target", kwargs.get("targets"))]
    prediction, target = [*args[:2], *named[len(args[:2]) :]]
    if not isinstance(prediction, Tensor) or not isinstance(target, Tensor):
        return {}
    sides = {"in.prediction": prediction, "in.target": target}
    if name in _IGNORING and not target.is_floating_point():
        sides["in.target.ignored"] = target == _ignored_class(name, args, kwargs)
    if name == "ctc_loss" and target.numel():
        sides["in.target.blank"] = _blanks(target, args, kwargs)
    return sides | _weights(name, sides, args, kwargs)


def _weights(
    name: str, sides: Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the weight of each class and of each target; empty without class weights. Ignored targets weigh 0."""
    if name not in _WEIGHTING:
        return {}
    argument, place = _WEIGHTING[name]
    weights, target = args[place] if len(args) > place else kwargs.get(argument), some_of(sides["in.target"])
    if (
        type(weights) is not Tensor
        or type(target) is not Tensor
        or not target.numel()
        or weights.device != target.device
    ):
        return {}
    weights = weights.detach()
    if name in _OF_TWO_CLASSES:
        if weights.numel() != 1:  # each of several outputs has its own two classes
            return {}
        weights = torch.cat([torch.ones_like(weights).reshape(1), weights.reshape(1)])
        return {"in.target.weights": weights, "in.target.weight": 1 + (weights[1] - 1) * target.detach()}
    if target.is_floating_point() or not weights.numel():
        return {}
    counts = ~some_of(sides["in.target.ignored"])
    of_each = weights[(target * counts).clamp(0, len(weights) - 1)]
    return {"in.target.weights": weights, "in.target.weight": of_each * counts}


def _blanks(labels: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return a mask of the labels that are the blank, without the padding after the labels."""
    lengths = args[3] if len(args) > 3 else kwargs.get("target_lengths")
    blank = args[4] if len(args) > 4 else kwargs.get("blank", 0)
    found: Tensor = labels == blank
    if labels.dim() != 2:  # concatenated labels, without padding
        return found
    lengths = torch.as_tensor(lengths).to(labels.device, non_blocking=True)
    found &= torch.arange(labels.shape[1], device=labels.device) < lengths.reshape(-1, 1)
    return found


def _ignored_class(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    place = _IGNORING.get(name, len(args))
    found: int = args[place] if len(args) > place else kwargs.get("ignore_index", _IGNORED)
    return found


def classes_of_loss(
    name: str, sides: Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the predicted and the target classes of a loss, as numbers with one histogram bin per class.

    The predicted class is the most probable class. The target class is the target, or the most probable class if
    targets are probabilities. A loss with two classes must have one prediction per sample. Ignored targets, and targets
    that are not classes, share a separate bin; see :mod:`lightning_recorder.records.classes`. Return an empty mapping
    for more than 1000 classes, and for tensors without values.
    """
    prediction, target = sides.get("in.prediction"), sides.get("in.target")
    if prediction is None or target is None or not prediction.dim() or not (prediction.numel() and target.numel()):
        return {}
    if any(each.device.type == "meta" or hasattr(each, "fake_mode") for each in (prediction, target)):
        return {}
    if name in _OF_CLASSES:
        dim = min(prediction.dim() - 1, 1)
        if not 1 < prediction.shape[dim] <= CLASSES:
            return {}
        predicted = prediction.argmax(dim)
        meant = target.argmax(min(target.dim() - 1, 1)) if target.is_floating_point() else target
    elif name in _OF_TWO_CLASSES and prediction.numel() == len(prediction):
        predicted, meant = prediction > _OF_TWO_CLASSES[name], target > 0.5
    else:
        return {}
    values = {"in.prediction": predicted, "in.target": meant}
    ignored = _ignored_class(name, args, kwargs)
    # Only targets need a range check. It is skipped for predictions, since each additional operation costs time.
    return {f"{path}{CLASS_COUNTS}": _in_bins(each, ignored, each is target) for path, each in values.items()}


def _in_bins(classes: Tensor, ignored: int, may_be_outside: bool) -> Tensor:
    table = _table(classes.device, ignored)
    # Not in place, because ``classes`` may be the user's targets.
    numbers = classes.long()
    return table.take(numbers.clamp(-1, CLASSES) if may_be_outside else numbers)


@lru_cache(maxsize=16)
def _table(device: torch.device, ignored: int) -> Tensor:
    """Return a number in the histogram bin of each class: classes 0 to 1000, then class -1; ``[1002]`` float32.

    The tensor of 4 KB is cached on the device.
    """
    bins = [*range(FIRST_CLASS_BIN, FIRST_CLASS_BIN + CLASSES), NO_CLASS_BIN, NO_CLASS_BIN]
    if 0 <= ignored < CLASSES:
        bins[ignored] = NO_CLASS_BIN
    with torch.inference_mode(False):
        words = torch.tensor(bins, dtype=torch.int64, device="cpu") << BIN_SHIFT
        # A blocking copy would synchronize the device.
        return words.to(torch.int32).view(torch.float32).to(device, non_blocking=True)


def share_of_next(target: Tensor, tokens: Tensor, *, ahead: int = 1) -> Tensor | None:
    """Return the fraction of targets that are the next token of the input, as in a language model; 0-d.

    Targets of -100, which losses ignore by default, and targets equal to the current token are excluded.

    Args:
        target: The targets, of any shape, with or without a target for the last token.
        tokens: The tokens, ``[samples, positions]``.
        ahead: The offset of the compared token: 1 for the next token, 2 for the token after it.

    Returns:
        The fraction, 0 if all targets are excluded; None if the numbers of targets and tokens do not match.

    Example:
        >>> import torch
        >>> tokens = torch.tensor([[3, 1, 4, 1, 5]])
        >>> float(share_of_next(torch.tensor([[1, 4, 1, 5]]), tokens)), float(share_of_next(tokens, tokens))
        (1.0, 0.0)
    """
    samples, positions = tokens.shape
    if target.numel() not in (samples * positions, samples * (positions - 1)) or positions <= ahead:
        return None
    target = target.reshape(samples, -1)[:, : positions - ahead]
    after = tokens[:, ahead:]
    counts = target != _IGNORED
    for place in range(ahead):
        counts &= tokens[:, place : place - ahead] != after
    return ((target == after) & counts).sum() / counts.sum().clamp(min=1)


def share_of_ends(target: Tensor, tokens: Tensor, end: int) -> Tensor | None:
    """Return the fraction of sequences whose end token is a target; 0-d.

    The end token of a sequence is the first ``end`` that follows another token. Later ``end`` tokens are not counted.

    Args:
        target: The targets, as for :func:`share_of_next`.
        tokens: The tokens, ``[samples, positions]``.
        end: The token that ends a sequence.

    Returns:
        The fraction, -1 if a sequence has no end token; None if the numbers of targets and tokens do not match.

    Example:
        >>> import torch
        >>> tokens = torch.tensor([[5, 6, 1, 1], [7, 8, 9, 1]])
        >>> float(share_of_ends(torch.tensor([[6, 1, -100], [8, 9, 1]]), tokens, 1))
        1.0
        >>> float(share_of_ends(torch.tensor([[6, -100, -100], [8, 9, -100]]), tokens, 1))
        0.0
    """
    samples, positions = tokens.shape
    if target.numel() not in (samples * positions, samples * (positions - 1)) or positions < _FEWEST_POSITIONS:
        return None
    follows = (tokens[:, 1:] == end) & (tokens[:, :-1] != end)
    first = follows & (follows.cumsum(1) == 1)
    share = ((target.reshape(samples, -1)[:, : positions - 1] == end) & first).sum() / samples
    return torch.where(first.any(1).all(), share, -1.0)


def padding_of(tokens: Tensor, padding: int) -> Tensor:
    """Return a mask of the padding at the beginning and the end of sequences, ``[samples, positions]``.

    Args:
        tokens: The tokens, ``[samples, positions]``.
        padding: The padding token. Inside a sequence, this token is not padding. If it is inside of sequences at least
            as often as at their ends, it is an ordinary token, and there is no padding. If every sequence begins with
            exactly one padding token, that token counts as a start token.

    Example:
        >>> import torch
        >>> padding_of(torch.tensor([[0, 0, 5, 0, 6, 0]]), 0).long().tolist()
        [[1, 1, 0, 0, 0, 1]]
        >>> padding_of(torch.tensor([[0, 5, 6, 7], [0, 5, 6, 0]]), 0).long().tolist()
        [[0, 0, 0, 0], [0, 0, 0, 1]]
        >>> padding_of(torch.tensor([[0, 5, 6, 7], [5, 0, 6, 7]]), 0).long().tolist()
        [[0, 0, 0, 0], [0, 0, 0, 0]]
    """
    same = (tokens == padding).long()
    before, after = same.cumprod(1), same.flip(1).cumprod(1).flip(1)
    inside = same.sum() - ((before + after) > 0).sum()
    # The start token of a decoder may be the same as the padding token.
    before = before * (before.sum(1) != 1).any()
    at_ends = (before + after) > 0
    return at_ends & (at_ends.sum() > inside)


def some_of(tensor: Tensor) -> Tensor:
    """Return the tensor. To bound the cost, return only the first samples of a large tensor, about a million values."""
    if type(tensor) is not Tensor or not tensor.dim() or tensor.numel() <= _MOST_VALUES:
        return tensor
    return tensor[: max(1, _MOST_VALUES * len(tensor) // tensor.numel())]
