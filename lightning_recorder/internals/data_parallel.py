"""The gradients that ``DistributedDataParallel`` averages over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch.nn.parallel import DistributedDataParallel

__all__ = ["averaged_parameters", "has_no_sync", "is_uneven"]


def has_no_sync(model: object) -> bool:
    """Return True if ``no_sync`` is active, so that the backward pass does not average gradients.

    Args:
        model: The model as the loop calls it, or several models by name.
    """
    return any(not getattr(each, "require_backward_grad_sync", True) for each in _wrappers(model) or ())


def is_uneven(model: object) -> bool:
    """Return True inside torch's ``Join``, where ranks may have different numbers of batches.

    Args:
        model: The model as the loop calls it, or several models by name.
    """
    return any(getattr(getattr(each, "_join_config", None), "enable", False) for each in _wrappers(model) or ())


def averaged_parameters(model: object) -> frozenset[int] | None:
    """Return the ids of the parameters whose gradients DDP averages; None for other wrappers and unknown versions.

    DDP collects the parameters once, when it wraps the model.

    Args:
        model: The model as the loop calls it, or several models by name.
    """
    found: list[Any] = [getattr(each, "_module_parameters", None) for each in _wrappers(model) or ()]
    return frozenset(map(id, chain(*found))) if found and None not in found else None


def _wrappers(model: object) -> list[DistributedDataParallel] | None:
    """Return the DDP models, unwrapped from Fabric; None if a model is not wrapped by DDP."""
    given = list(model.values()) if isinstance(model, Mapping) else [model]
    found = [getattr(each, "_forward_module", each) for each in given]
    known = [each for each in found if isinstance(each, DistributedDataParallel)]
    return known if len(known) == len(found) else None
