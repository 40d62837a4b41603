"""Fractions of values that a narrow floating-point format cannot represent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.errors import ArgumentError, check_number, did_you_mean
from lightning_recorder.reductions.base import ScalarReduction
from lightning_recorder.reductions.values import Values

__all__ = ["FORMATS", "PrecisionShares"]

FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
"""The names of the formats, as in torch."""


class PrecisionShares(ScalarReduction):
    """Fractions of the values that underflow or overflow if they are converted to a narrow floating-point format.

    State, 32 bytes: the number of finite nonzero values, and how many of them become zero, become subnormal, or exceed
    the largest number. States are merged by addition, which is exact in any order. Statistics, with the format
    ``float16`` as an example:

    - ``float16_underflow``: ``|x| <= tiny / 2``, which rounds to zero, where ``tiny`` is the smallest subnormal number;
    - ``float16_subnormal``: ``tiny / 2 < |x| < smallest normal``, which loses digits;
    - ``float16_overflow``: ``|x| > max``. Values above ``max`` that round to it are included.

    All three are fractions of the finite nonzero values, and NaN if there are none. Tensors that already have this
    format have no underflow and no overflow: an overflowed value is an infinity and does not count.

    Args:
        dtype: The format: one of ``float16``, ``bfloat16``, ``float8_e4m3fn``, ``float8_e5m2``, ``float8_e4m3fnuz`` and
            ``float8_e5m2fnuz``.
        scale: A factor that is applied before the conversion, such as the loss scale of float16 or the tensor scale of
            float8.

    Note:
        The limits are those of ``torch.finfo``. The formats are described in `FP8 Formats for Deep Learning
        <https://arxiv.org/abs/2209.05433>`_ and IEEE 754.

    Raises:
        ArgumentError: If the format is unknown, or the scale is not positive.

    Example:
        >>> shares = PrecisionShares("float8_e4m3fn")  # up to 448; 2**-6 is the smallest normal number
        >>> shares.update(torch.tensor([0.0, 1.0, 1000.0, 2.0**-8, 2.0**-10]))
        >>> {name: float(value) for name, value in shares.compute().items()}
        {'float8_e4m3fn_underflow': 0.25, 'float8_e4m3fn_subnormal': 0.25, 'float8_e4m3fn_overflow': 0.25}
    """

    width = 4

    def __init__(self, dtype: str = "float16", scale: float = 1.0) -> None:
        if dtype not in FORMATS:
            known = ", ".join(FORMATS)
            raise ArgumentError(f"dtype must be one of {known}, got {dtype!r:.80}{did_you_mean(str(dtype), FORMATS)}")
        check_number("scale", scale, 0.0)
        if not 0 < scale < float("inf"):
            raise ArgumentError(f"scale must be positive and finite, got {scale!r}")
        self.dtype = dtype
        self.scale = float(scale)

    @property
    @override
    def statistics(self) -> tuple[str, ...]:  # type: ignore[override]  # read-only here, because it follows from the format
        """The names of the statistics, which begin with the format."""
        return tuple(f"{self.dtype}_{what}" for what in ("underflow", "subnormal", "overflow"))

    @override
    def slots_of(self, values: Values) -> Sequence[Tensor]:
        limits = torch.finfo(getattr(torch, self.dtype))
        sizes = values.flat.double().abs() * self.scale
        known = (sizes > 0) & sizes.isfinite()
        tiny = limits.smallest_normal * limits.eps  # the smallest subnormal number
        lost = known & (sizes <= tiny / 2)
        return [
            known.sum().double(),
            lost.sum().double(),
            (known & (sizes < limits.smallest_normal) & ~lost).sum().double(),
            (known & (sizes > limits.max)).sum().double(),
        ]

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        shares = state[..., 1:] / state[..., :1]
        return dict(zip(self.statistics, shares.unbind(-1), strict=True))
