"""The norms of many tensors with few kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["norms_of"]

_LOW = (torch.float16, torch.bfloat16)
_foreach_norm = getattr(torch, "_foreach_norm", None)


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the Euclidean norm of each tensor, as tensors without dimensions.

    The public ``torch.nn.utils.get_total_norm`` uses the same kernels, but returns only the norm of all tensors.
    Fallback: one kernel for each tensor. A sharded tensor counts with the part of this process, and a sparse one with
    its stored values, so no process waits for another.
    """
    parts = [each if type(each) is Tensor and each.layout is torch.strided else _local(each) for each in tensors]
    if _foreach_norm is None or any(each.dtype in _LOW for each in parts):  # a norm in half precision overflows
        return [
            torch.linalg.vector_norm(each.detach(), dtype=torch.float32 if each.dtype in _LOW else None)
            for each in parts
        ]
    with torch.no_grad():
        return list(_foreach_norm(parts))


def _local(tensor: Tensor) -> Tensor:
    tensor = getattr(tensor, "_local_tensor", tensor)
    return tensor._values() if tensor.is_sparse else tensor
