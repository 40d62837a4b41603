"""The norms of many tensors, computed with few kernels and without communication."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

__all__ = ["local_values", "norms_of"]

_LOW = {torch.float16, torch.bfloat16}
_LAYOUT, _DTYPE = attrgetter("layout"), attrgetter("dtype")
_foreach_norm = getattr(torch, "_foreach_norm", None)


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the Euclidean norm of each tensor, as 0-d tensors.

    The public ``torch.nn.utils.get_total_norm`` uses the same kernels, but returns only the total norm. For a sharded
    tensor, the norm of the local shard is returned, so that no process waits for another. Fallback: one kernel for each
    tensor.
    """
    are_plain = set(map(type, tensors)) == {Tensor} and set(map(_LAYOUT, tensors)) == {torch.strided}
    parts = tensors if are_plain else [local_values(each) for each in tensors]
    # A norm in half precision may overflow.
    if _foreach_norm is None or not _LOW.isdisjoint(map(_DTYPE, parts)):
        return [
            torch.linalg.vector_norm(each.detach(), dtype=torch.float32 if each.dtype in _LOW else None)
            for each in parts
        ]
    if not torch.is_grad_enabled():
        return list(_foreach_norm(parts))
    with torch.no_grad():
        return list(_foreach_norm(parts))


def local_values(tensor: Tensor) -> Tensor:
    """Return the local shard of a sharded tensor, and the values of a sparse tensor, as a dense tensor.

    The values of a sparse tensor at equal indices are added, such as in the gradient of an embedding that looks up a
    word twice. Unlike ``coalesce``, this does not synchronize the device.
    """
    tensor = getattr(tensor, "_local_tensor", tensor).detach()
    if not tensor.is_sparse:
        return tensor
    values = tensor._values()
    if tensor.is_coalesced():
        return values
    flat = torch.zeros_like(tensor._indices()[0])
    for size, index in zip(tensor.shape, tensor._indices(), strict=False):  # all other dimensions are dense
        flat = flat * size + index
    flat, order = flat.sort()
    places = (flat.diff(prepend=flat[:1]) != 0).cumsum(0)
    return torch.zeros_like(values).index_add_(0, places, values[order])
