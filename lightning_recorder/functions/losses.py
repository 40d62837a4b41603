"""The two sides of a loss: what was predicted, and what was to be predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["share_of_next", "sides_of_loss", "some_of"]

_MOST_VALUES = 1 << 20

# They compare predictions with each other.
_WITHOUT_TARGET = (
    "cosine_embedding_loss",
    "margin_ranking_loss",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
)
_IGNORING = {"cross_entropy": 4, "nll_loss": 4}  # the place of the argument ``ignore_index``


def sides_of_loss(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the prediction and the target of a loss function by their paths; empty for one that has no target.

    The third, ``in.target.ignored``, is True where a class number is the one to ignore. Its mean is the share of
    ignored targets.

    Args:
        name: The name of the function.
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.

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
    named = [kwargs.get("input", kwargs.get("log_probs")), kwargs.get("target", kwargs.get("targets"))]
    prediction, target = [*args[:2], *named[len(args[:2]) :]]
    if not isinstance(prediction, Tensor) or not isinstance(target, Tensor):
        return {}
    sides = {"in.prediction": prediction, "in.target": target}
    if name in _IGNORING and not target.is_floating_point():
        place = _IGNORING[name]
        ignored = args[place] if len(args) > place else kwargs.get("ignore_index", -100)
        sides["in.target.ignored"] = target == ignored
    return sides


def share_of_next(target: Tensor, tokens: Tensor, ignored: int = -100) -> Tensor | None:
    """Return the share of targets that are the next token of the input, as for a language model; 0-d.

    Args:
        target: The targets, of any shape, with or without one for the last token.
        tokens: The tokens, ``[samples, positions]``.
        ignored: The number of the targets that do not count. Neither do those that follow an equal token.

    Returns:
        The share, 0 if no target counts; None if the numbers of targets and tokens do not fit.

    Example:
        >>> import torch
        >>> tokens = torch.tensor([[3, 1, 4, 1, 5]])
        >>> float(share_of_next(torch.tensor([[1, 4, 1, 5]]), tokens)), float(share_of_next(tokens, tokens))
        (1.0, 0.0)
    """
    samples, positions = tokens.shape
    if target.numel() == samples * positions:
        target = target.reshape(samples, positions)[:, :-1]
    elif target.numel() == samples * (positions - 1):
        target = target.reshape(samples, positions - 1)
    else:
        return None
    before, after = tokens[:, :-1], tokens[:, 1:]
    counts = (target != ignored) & (before != after)
    return ((target == after) & counts).sum() / counts.sum().clamp(min=1)


def some_of(tensor: Tensor) -> Tensor:
    """Return a tensor, or the first samples of a large one, with about a million values, to bound the cost."""
    if type(tensor) is not Tensor or tensor.dim() < 2 or tensor.numel() <= _MOST_VALUES:
        return tensor
    return tensor[: max(1, _MOST_VALUES * len(tensor) // tensor.numel())]
