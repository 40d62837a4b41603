"""Conversion of every kind of tensor to a plain dense tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_recorder.errors import ArgumentError

__all__ = ["PLAIN_TYPES", "as_plain"]

PLAIN_TYPES = (Tensor, nn.Parameter)
"""The tensor classes that hold nothing but their values."""

_MOST_DENSE = 1 << 28  # the largest numel of a sparse tensor that is made dense: 1 GiB of float32


def as_plain(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as a dense strided tensor, which shares its memory if possible.

    A ``DTensor`` is replaced by its local part and a nested tensor by the concatenated values of its parts. A quantised
    tensor is dequantised. A sparse tensor is made dense, zeros included.

    Raises:
        ArgumentError: If a sparse tensor is so large that its dense copy could take memory that the training needs.
    """
    if type(tensor) not in PLAIN_TYPES and hasattr(
        tensor, "to_local"
    ):  # a DTensor, without importing torch.distributed.tensor
        tensor = tensor.to_local()
    if tensor.is_nested:
        # If there are gaps between the parts, as after torch.nested.narrow, values() includes the gaps.
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
