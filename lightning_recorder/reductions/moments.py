"""Count, mean and variance of a stream."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.values import Values, finite_or_zero

__all__ = ["RunningMoments"]


class RunningMoments(Reduction):
    """Count, mean, standard deviation and root mean square of the finite values, in float64.

    State: ``[count, mean, m2]`` with ``m2`` the sum of squared deviations from the mean. Two states are merged by

    ::

        n    = n_a + n_b
        d    = mean_b - mean_a
        mean = mean_a + d * n_b / n
        m2   = m2_a + m2_b + d**2 * n_a * n_b / n

    (Chan, Golub & LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979), which
    does not lose a small variance beside a large mean as sums of squares do. However a stream is split, the mean stays
    within ``1e-12 * rms`` and the variance within ``1e-12 * (variance + 2e-4 * mean**2)``; beyond a magnitude of about
    1e154 squares leave the range of float64, and ``std`` and ``rms`` are infinite or NaN.

    Statistics: ``count``; ``mean``; ``std``, that of the population (correction 0: ``sqrt(m2 / count)``); ``rms``,
    which is ``sqrt(mean**2 + m2 / count)``. All but the count are NaN for an empty stream.
    """

    width = 3

    @classmethod
    @override
    def initial(cls) -> Tensor:
        return torch.zeros(cls.width, dtype=torch.float64)

    @classmethod
    @override
    def update_state(cls, state: Tensor, values: Values) -> None:
        count = (values.numel - values.nonfinite_count).double()
        mean = finite_or_zero(values.doubles).sum() / count.clamp(min=1)
        # A NaN or an infinity is still one after the subtraction, and adds nothing.
        m2 = finite_or_zero(values.doubles - mean).square_().sum()
        cls.merge_states(state, torch.stack((count, mean, m2)))

    @classmethod
    @override
    def merge_states(cls, state: Tensor, other: Tensor) -> None:
        count_a, mean_a, m2_a = state.unbind(-1)
        count_b, mean_b, m2_b = other.unbind(-1)
        count = count_a + count_b
        share = count_b / count.clamp(min=1)
        delta = mean_b - mean_a
        mean = mean_a + delta * share
        m2 = m2_a + m2_b + delta.square() * count_a * share
        state.copy_(torch.stack((count, mean, m2), dim=-1))

    @classmethod
    @override
    def summarize(cls, state: Tensor) -> dict[str, Tensor]:
        count, mean, m2 = state.unbind(-1)
        mean = torch.where(count > 0, mean, torch.nan)
        variance = m2 / count
        return {"count": count, "mean": mean, "std": variance.sqrt(), "rms": (mean.square() + variance).sqrt()}
