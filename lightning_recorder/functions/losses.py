"""The two sides of a loss: what was predicted, and what was to be predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["sides_of_loss", "some_of"]

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


def some_of(tensor: Tensor) -> Tensor:
    """Return a tensor, or the first samples of a large one, with about a million values, to bound the cost."""
    if type(tensor) is not Tensor or tensor.dim() < 2 or tensor.numel() <= _MOST_VALUES:
        return tensor
    return tensor[: max(1, _MOST_VALUES * len(tensor) // tensor.numel())]
