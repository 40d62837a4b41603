"""The spread of a tensor along the batch."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.kernels.fused import add_spread
from lightning_recorder.reductions.values import Values

__all__ = ["MOST_COLUMNS", "MOST_ROWS", "BatchSpread", "has_spread"]

MOST_ROWS, MOST_COLUMNS = 64, 256


class BatchSpread(Reduction):
    """The part of the size of a matrix that differs between its rows, such as the samples of a batch.

    State: the sum of the squared deviations from the mean of each column, and the sum of the squares. States are merged
    by addition, so each tensor has means of its own. Statistic: ``batch_spread``, the square root of the first divided
    by the second: rms(x - mean over the first dimension) / rms(x). It is 0 for equal rows and 1 for columns of mean
    zero; NaN without values other than zero, and for tensors that are not ``[samples, features]`` or not finite.

    At most 64 rows and 256 columns at regular distances are read, which bounds the time. Rows that differ in other
    columns alone do not count.

    Example:
        >>> spread = BatchSpread()
        >>> spread.update(torch.tensor([[3.0, 1.0], [3.0, -1.0]]))
        >>> round(float(spread.compute()["batch_spread"]), 4)
        0.3162
    """

    width = 2
    statistics: tuple[str, ...] = ("batch_spread",)

    @override
    def update_state(self, state: Tensor, values: Values) -> None:
        tensor = values.plain
        if not has_spread(tensor) or add_spread(state, tensor, MOST_ROWS, MOST_COLUMNS):
            return
        rows, columns = (-(-size // most) for size, most in zip(tensor.shape, (MOST_ROWS, MOST_COLUMNS), strict=True))
        some = tensor[::rows, ::columns].double()
        # Deviations from the first row, so that equal rows have none.
        deviations = some - some[:1]
        sums = torch.stack([(deviations - deviations.mean(0)).square().sum(), some.square().sum()])
        # One value that is not finite would make all other batches unknown.
        state += torch.where(sums.isfinite().all(), sums, 0.0)

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        deviations, squares = state.unbind(-1)
        return {"batch_spread": (deviations / squares).sqrt()}


def has_spread(tensor: Tensor) -> bool:
    """Return True for a matrix of floats with several rows."""
    return tensor.dim() == 2 and tensor.is_floating_point() and tensor.shape[0] > 1 and tensor.shape[1] > 0
