"""Tensors of every kind as plain dense ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_recorder.errors import ArgumentError

__all__ = ["PLAIN_TYPES", "as_plain"]

PLAIN_TYPES = (Tensor, nn.Parameter)
"""The types of tensors that have nothing of their own beside their values."""

_MOST_DENSE = 1 << 28  # values that a sparse tensor may have when it is made dense: a gibibyte of float32


def as_plain(tensor: Tensor) -> Tensor:
    """The values of a tensor in a dense strided one, which shares its memory where it can.

    Of a ``DTensor`` that is the local part, of a nested tensor the values of all its parts in a row. A quantised tensor
    is dequantised; a sparse one is made dense, zeros included.

    Raises:
        ArgumentError: If a sparse tensor is so large that making it dense could take memory that training needs.
    """
    if type(tensor) not in PLAIN_TYPES and hasattr(
        tensor, "to_local"
    ):  # a DTensor, without importing torch.distributed.tensor
        tensor = tensor.to_local()
    if tensor.is_nested:
        # One with gaps between its parts, as torch.nested.narrow makes it, has values that are no part of it.
        lengths: Any = getattr(tensor, "lengths", lambda: None)()
        tensor = torch.cat([part.flatten() for part in tensor.unbind()]) if lengths is not None else tensor.values()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided:
        if tensor.numel() > _MOST_DENSE:
            size = "×".join(map(str, tensor.shape))
            raise ArgumentError(f"a sparse tensor of {size} would be made dense to be reduced; leave it out")
        tensor = tensor.to_dense()
    return tensor
