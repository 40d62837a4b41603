"""A tensor made ready to be reduced, with the intermediate results that several reductions share."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

__all__ = ["BINS", "Values", "finite_or_zero"]

_FLOAT32_MAX = torch.finfo(torch.float32).max
_EXPONENT_MASK = 0xFF
_BIN_SHIFT = 21  # drops all but sign, exponent and the first two bits of the mantissa of a float32
BINS = 1 << (32 - _BIN_SHIFT)


class Values:
    """The real values of one tensor: detached, flat, widened, and each shared pass over them made at most once.

    Args:
        tensor: Any dense tensor. Half precision is widened to float32 first; integers and booleans become float64,
            which holds them exactly up to 2**53; a complex tensor counts as its real and imaginary parts.
        factor: A number by which the values are multiplied, such as the inverse of a loss scale.

    Note:
        Nothing here waits for the device or has a shape that depends on data, so it runs on ``meta`` tensors and inside
        a CUDA graph.
    """

    def __init__(self, tensor: Tensor, factor: float = 1.0) -> None:
        self.tensor = tensor.detach()
        self.factor = factor

    @cached_property
    def flat(self) -> Tensor:
        """The real values, widened and multiplied, ``[numel]`` float32 or float64."""
        tensor = self.tensor
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        tensor = tensor.resolve_neg()
        if not tensor.is_floating_point():
            tensor = tensor.double()
        elif tensor.dtype not in (torch.float32, torch.float64):
            tensor = tensor.float()
        return tensor.reshape(-1) if self.factor == 1.0 else tensor.reshape(-1) * self.factor

    @property
    def numel(self) -> int:
        """How many real values there are."""
        return self.flat.numel()

    @cached_property
    def nan_count(self) -> Tensor:
        """Number of NaN, 0-d int64."""
        return (self.flat != self.flat).sum()

    @cached_property
    def zero_count(self) -> Tensor:
        """Number of values equal to zero, of either sign, 0-d int64."""
        return self.numel - torch.count_nonzero(self.flat)

    @cached_property
    def histogram(self) -> Tensor:
        """Number of values per bin, ``[2048]`` int64; the bin is the upper eleven bits of the value as a float32.

        A finite float64 beyond the range of float32 goes to the end bin of its sign and one too small for it to the bin
        of its signed zero.
        """
        narrow = self.flat
        if narrow.dtype == torch.float64:
            narrow = torch.where(narrow.isfinite(), narrow.clamp(-_FLOAT32_MAX, _FLOAT32_MAX), narrow).float()
        index = (narrow.contiguous().view(torch.int32) >> _BIN_SHIFT) & (BINS - 1)
        counts = torch.zeros(BINS, dtype=torch.int64, device=narrow.device)
        # index_add_ and not bincount: bincount looks at the largest value first, which makes a GPU wait and fails on
        # meta tensors.
        return counts.index_add_(0, index, torch.ones(1, dtype=torch.int64, device=narrow.device).expand(self.numel))

    @cached_property
    def nonfinite_count(self) -> Tensor:
        """Number of NaN and infinities, 0-d int64: the bins in which all bits of the exponent are set."""
        return self.histogram.view(2, _EXPONENT_MASK + 1, -1)[:, _EXPONENT_MASK].sum()

    @cached_property
    def doubles(self) -> Tensor:
        """The values as float64, flat."""
        return self.flat.double()


def finite_or_zero(values: Tensor) -> Tensor:
    """The values with zero in place of every NaN and infinity."""
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
