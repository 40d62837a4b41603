"""The two sides of a loss: what was predicted, and what was to be predicted."""

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

# They compare predictions with each other.
_WITHOUT_TARGET = ("triplet_margin_loss", "triplet_margin_with_distance_loss")
_OF_PAIRS = ("cosine_embedding_loss", "margin_ranking_loss")  # the target is their third argument
_IGNORING = {"cross_entropy": 4, "nll_loss": 4}  # the place of the argument ``ignore_index``
_IGNORED = -100  # its default
# The argument with the weights of the classes, and its place.
_WEIGHTING = {
    "cross_entropy": ("weight", 2),
    "nll_loss": ("weight", 2),
    "binary_cross_entropy_with_logits": ("pos_weight", 6),
}
_OF_CLASSES = ("cross_entropy", "nll_loss", "multi_margin_loss")
# The least output that stands for the second class.
_OF_TWO_CLASSES = {"binary_cross_entropy": 0.5, "binary_cross_entropy_with_logits": 0.0}


def sides_of_loss(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the prediction and the target of a loss function by their paths; empty for one that has no target.

    A loss of pairs has its target alone.

    The third, ``in.target.ignored``, is True where a class number is the one to ignore. Its mean is the share of
    ignored targets. Likewise, ``in.target.blank`` is True where a label of ``ctc_loss`` is the blank, without padding.
    A loss that weights classes has their weights as ``in.target.weights``, and ``in.target.weight`` is that of each
    target.

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
    """Return the weight of each class and that of each target, which is 0 for one to ignore; empty without weights."""
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
        if weights.numel() != 1:  # several outputs have classes of their own
            return {}
        weights = torch.cat([torch.ones_like(weights).reshape(1), weights.reshape(1)])
        return {"in.target.weights": weights, "in.target.weight": 1 + (weights[1] - 1) * target.detach()}
    if target.is_floating_point() or not weights.numel():
        return {}
    counts = ~some_of(sides["in.target.ignored"])
    of_each = weights[(target * counts).clamp(0, len(weights) - 1)]
    return {"in.target.weights": weights, "in.target.weight": of_each * counts}


def _blanks(labels: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return True where a label is the blank, of the shape of the labels; the padding behind them does not count."""
    lengths = args[3] if len(args) > 3 else kwargs.get("target_lengths")
    blank = args[4] if len(args) > 4 else kwargs.get("blank", 0)
    found: Tensor = labels == blank
    if labels.dim() != 2:  # one after the other
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
    """Return the classes of both sides of a loss, as numbers that have one bin for each class.

    These are the most probable class of each prediction, and the class of each target, or the most probable one if the
    targets are probabilities. A loss of two classes must have one prediction for each sample. Targets to ignore, and
    those outside of the classes, get a bin of their own; see :mod:`lightning_recorder.records.classes`. Nothing is
    returned for more than 1000 classes, and for tensors without values.
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
    # Each operation takes as long as the statistics of a small tensor. Only a target may be outside of the classes.
    return {f"{path}{CLASS_COUNTS}": _in_bins(each, ignored, each is target) for path, each in values.items()}


def _in_bins(classes: Tensor, ignored: int, may_be_outside: bool) -> Tensor:
    table = _table(classes.device, ignored)
    # Not in place, because the classes may be the user's targets.
    numbers = classes.long()
    return table.take(numbers.clamp(-1, CLASSES) if may_be_outside else numbers)


@lru_cache(maxsize=16)
def _table(device: torch.device, ignored: int) -> Tensor:
    """Return a number in the bin of each class from 0 to 1000 and of -1, which is the last of ``[1002]`` float32.

    These 4 KB stay on the device.
    """
    bins = [*range(FIRST_CLASS_BIN, FIRST_CLASS_BIN + CLASSES), NO_CLASS_BIN, NO_CLASS_BIN]
    if 0 <= ignored < CLASSES:
        bins[ignored] = NO_CLASS_BIN
    with torch.inference_mode(False):
        words = torch.tensor(bins, dtype=torch.int64, device="cpu") << BIN_SHIFT
        # A plain copy to the device would synchronize it.
        return words.to(torch.int32).view(torch.float32).to(device, non_blocking=True)


def share_of_next(target: Tensor, tokens: Tensor, *, ahead: int = 1) -> Tensor | None:
    """Return the share of targets that are the next token of the input, as for a language model; 0-d.

    Targets that are ignored by default, -100, and those that follow an equal token do not count.

    Args:
        target: The targets, of any shape, with or without one for the last token.
        tokens: The tokens, ``[samples, positions]``.
        ahead: 2 for the token after the next one.

    Returns:
        The share, 0 if no target counts; None if the numbers of targets and tokens do not fit.

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
    """Return the share of sequences whose first end token behind another token is a target; 0-d.

    Args:
        target: The targets, as for :func:`share_of_next`.
        tokens: The tokens, ``[samples, positions]``.
        end: The token that ends a sequence.

    Returns:
        The share, -1 if a sequence has no end; None if the numbers of targets and tokens do not fit.

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
    """Return True for the padding at the beginning and the end of sequences, ``[samples, positions]``.

    Args:
        tokens: The tokens, ``[samples, positions]``.
        padding: The token that stands for padding. Elsewhere in a sequence it may have a meaning, as the first token
            alone of all sequences has.

    Example:
        >>> import torch
        >>> padding_of(torch.tensor([[0, 0, 5, 0, 6, 0]]), 0).long().tolist()
        [[1, 1, 0, 0, 0, 1]]
        >>> padding_of(torch.tensor([[0, 5, 6, 7], [0, 5, 6, 0]]), 0).long().tolist()
        [[0, 0, 0, 0], [0, 0, 0, 1]]
    """
    same = (tokens == padding).long()
    before, after = same.cumprod(1), same.flip(1).cumprod(1).flip(1)
    # The token that starts each sequence of a decoder may be that of the padding.
    before = before * (before.sum(1) != 1).any()
    return (before + after) > 0


def some_of(tensor: Tensor) -> Tensor:
    """Return a tensor, or the first samples of a large one, with about a million values, to bound the cost."""
    if type(tensor) is not Tensor or not tensor.dim() or tensor.numel() <= _MOST_VALUES:
        return tensor
    return tensor[: max(1, _MOST_VALUES * len(tensor) // tensor.numel())]
