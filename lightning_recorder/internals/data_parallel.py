"""The gradients that ``DistributedDataParallel`` averages over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch.nn.parallel import DistributedDataParallel

__all__ = ["averaged_parameters", "has_no_sync", "is_uneven"]


def has_no_sync(model: object) -> bool:
    """Return True if ``no_sync`` is active, so that a backward pass averages no gradients.

    Args:
        model: The model as the loop calls it, or several by name.
    """
    return any(not getattr(each, "require_backward_grad_sync", True) for each in _wrappers(model) or ())


def is_uneven(model: object) -> bool:
    """Return True in torch's ``Join``, where ranks may have different numbers of batches.

    Args:
        model: The model as the loop calls it, or several by name.
    """
    return any(getattr(getattr(each, "_join_config", None), "enable", False) for each in _wrappers(model) or ())


def averaged_parameters(model: object) -> frozenset[int] | None:
    """Return the ids of the parameters whose gradients are averaged; None for other classes and versions of torch.

    DDP looks for parameters once, when it wraps the model.

    Args:
        model: The model as the loop calls it, or several by name.
    """
    found: list[Any] = [getattr(each, "_module_parameters", None) for each in _wrappers(model) or ()]
    return frozenset(map(id, chain(*found))) if found and None not in found else None


def _wrappers(model: object) -> list[DistributedDataParallel] | None:
    """Return the models, which Fabric may wrap once more; None if one of them is not replicated by DDP."""
    given = list(model.values()) if isinstance(model, Mapping) else [model]
    found = [getattr(each, "_forward_module", each) for each in given]
    known = [each for each in found if isinstance(each, DistributedDataParallel)]
    return known if len(known) == len(found) else None
