"""Effective ranks of the features of a stream."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.errors import check_integer
from lightning_recorder.reductions.shaped import ShapedReduction, check_dim, dimension, whole_dimension
from lightning_recorder.reductions.values import Values, finite_or_zero

__all__ = ["FeatureRank"]

_SEED = 0x5EED  # the same on all ranks, so that their sketches can be added


class FeatureRank(ShapedReduction):
    """Stable rank and effective rank of the matrix whose rows are all feature vectors of a stream.

    With the eigenvalues ``λ`` of ``Xᵀ X``, where ``X`` is ``[vectors, features]``:

    - ``stable_rank``: ``Σ λ / max λ = ‖X‖_F² / ‖X‖₂²`` (`Rudelson and Vershynin
      <https://arxiv.org/abs/math/0503442>`_);
    - ``effective_rank``: ``exp(-Σ p ln p)`` with ``p = √λ / Σ √λ``, the singular values (Roy and Vetterli, "The
      effective rank", EUSIPCO 2007).

    Both are 1 if all vectors are multiples of one, at most the number of features, and NaN without a vector other than
    zero. A matrix, such as a weight, is a stream of its rows. Values that are not finite count as zero.

    State: ``Xᵀ X``, 8 bytes · features². It is merged by addition. If there are more than ``sketch`` features, they are
    first projected to that number by a fixed random matrix with entries ±1/√sketch. The ranks are then those of the
    projection, at most ``sketch``; ``‖X‖_F²`` is kept in expectation (`Achlioptas
    <https://doi.org/10.1016/S0022-0000(03)00025-4>`_).

    Args:
        dim: The dimension of the features: -1 for transformers and weights, 1 for images.
        sketch: The largest number of features that are not projected.

    Raises:
        ArgumentError: If ``sketch`` is not an integer of at least 2.
    """

    blocks = 1
    lead = 0
    statistics = ("stable_rank", "effective_rank")

    def __init__(self, dim: int = -1, sketch: int = 64) -> None:
        super().__init__()
        check_integer("sketch", sketch, 2)
        self.dim = check_dim(dim)
        self.sketch = sketch

    @override
    def shape_of(self, values: Values) -> tuple[int, ...]:
        kept = min(values.shaped.shape[whole_dimension(self.dim, values)], self.sketch)
        return kept, kept

    @override
    def update_shaped(self, lead: Tensor, blocks: Tensor, values: Values) -> None:
        rows = values.shaped.movedim(dimension(self.dim, values), -1)
        rows = finite_or_zero(rows.reshape(-1, rows.shape[-1]).double())
        if rows.shape[1] > self.sketch:
            rows = rows @ _projection(rows.shape[1], self.sketch).to(rows.device)
        blocks[0] += rows.T @ rows

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        squares = torch.linalg.eigvalsh(self.parts(state)[1][..., 0, :, :]).clamp(min=0)
        sizes = squares.sqrt()
        shares = sizes / sizes.sum(-1, keepdim=True)
        return {
            "stable_rank": squares.sum(-1) / squares.amax(-1),
            "effective_rank": torch.exp(-torch.special.xlogy(shares, shares).sum(-1)),
        }


def _projection(features: int, kept: int) -> Tensor:
    """Return a random matrix of signs, ``[features, kept]``, scaled to keep squared lengths in expectation."""
    generator = torch.Generator().manual_seed(_SEED)
    signs = torch.randint(0, 2, (features, kept), generator=generator, dtype=torch.int8, device="cpu")
    scaled: Tensor = (2 * signs - 1).double() / kept**0.5
    return scaled
