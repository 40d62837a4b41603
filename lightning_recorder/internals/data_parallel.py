"""The gradients that ``DistributedDataParallel`` averages over the ranks."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

__all__ = ["averaged_parameters", "has_no_sync"]


def has_no_sync(model: object) -> bool:
    """Return True if ``no_sync`` is active, so that a backward pass averages no gradients."""
    return isinstance(model, DistributedDataParallel) and not getattr(model, "require_backward_grad_sync", True)


def averaged_parameters(model: object) -> frozenset[int] | None:
    """Return the ids of the parameters whose gradients are averaged; None for other classes and versions of torch.

    DDP looks for parameters once, when it wraps the model.
    """
    found = getattr(model, "_module_parameters", None) if isinstance(model, DistributedDataParallel) else None
    return None if found is None else frozenset(map(id, found))
