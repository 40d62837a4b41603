"""The default statistics as one reduction that shares intermediate results."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.reductions.combined import Combined
from lightning_recorder.reductions.kernels.fused import add_statistics, prepare
from lightning_recorder.reductions.kernels.fused_cuda import add_statistics_on_device
from lightning_recorder.reductions.kernels.host import add_statistics_on_host
from lightning_recorder.reductions.row import COUNT, M2, MAX, MEAN, MIN, row_reductions
from lightning_recorder.reductions.values import Values

__all__ = ["Statistics"]

# Fast paths that compute all statistics together. Each returns True if it updated the state.
_QUICK = (add_statistics, add_statistics_on_device, add_statistics_on_host)

_ROUNDING = 1e-10  # relative error of float64 sums that were added in a different order


class Statistics(Combined):
    """Moments, extrema, tallies and the histogram in one row.

    Statistics: all statistics of :class:`RunningMoments`, :class:`Extrema`, :class:`Tallies` and
    :class:`ExponentHistogram`, with the same names. On a CPU with a C compiler and on a GPU with Triton, they are
    computed in one pass; see :func:`prepare` and :func:`prepare_device`.

    Args:
        sample: The sample size, as for :class:`ExponentHistogram`. Only the histogram and its quantiles are estimated
            from the sample; all other statistics remain exact.
        quantiles: The fractions of the quantiles, as for :class:`ExponentHistogram`.

    Example:
        >>> import torch
        >>> statistics = Statistics(quantiles=[0.5])
        >>> statistics.update(torch.tensor([0.0, 1.0, 2.0, float("nan")]))
        >>> {name: round(float(value), 4) for name, value in statistics.compute().items() if name != "histogram"}
        {'count': 3.0, 'sum': 3.0, 'mean': 1.0, 'variance': 0.6667, 'std': 0.8165, 'rms': 1.291, 'min': 0.0, 'max': 2.0,
        'zero_fraction': 0.25, 'nan_count': 1.0, 'inf_count': 0.0, 'quantile_0.5': 1.125}
    """

    def __init__(self, *, sample: int | None = None, quantiles: Iterable[float] = ()) -> None:
        super().__init__(row_reductions(sample=sample, quantiles=quantiles))
        self._sample = sample
        prepare()

    @override
    def update_deferred(self, state: Tensor, values: Values) -> Tensor | None:
        for add in _QUICK:
            if add(state, values, self._sample):
                return None
        return super().update_deferred(state, values)

    def means(self, state: Tensor) -> Tensor:
        """Return the means of states ``[..., width]``, as ``[...]``; NaN without a finite value."""
        return torch.where(state[..., COUNT] > 0, state[..., MEAN], torch.nan)

    @staticmethod
    def are_alike(one: Tensor, other: Tensor) -> Tensor:
        """Return True, as bool ``[...]``, where two states, ``[..., width]``, may cover the same values in any order.

        The counts, means, squares and extrema are compared.
        """
        count, mean, m2 = (one[..., slot] for slot in (COUNT, MEAN, M2))
        size = (mean.square() + m2 / count.clamp(min=1)).sqrt()
        near = (mean - other[..., MEAN]).abs() <= _ROUNDING * size
        squares = (m2 - other[..., M2]).abs() <= _ROUNDING * (m2 + count * mean.square())
        exact = (one[..., [COUNT, MIN, MAX]] == other[..., [COUNT, MIN, MAX]]).all(-1)
        return near & squares & exact

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        found = super().summarize(state)
        for name, value in found.items():
            if name.startswith("quantile_"):  # the bin may extend beyond the values
                found[name] = torch.minimum(torch.maximum(value, found["min"]), found["max"])
        return found

    @override
    def __repr__(self) -> str:
        histogram = self.parts[-1].settings
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in histogram.items())})"
