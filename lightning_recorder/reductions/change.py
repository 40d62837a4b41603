"""The difference between each tensor and the previous one."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.reductions.shaped import ShapedReduction
from lightning_recorder.reductions.values import Values

__all__ = ["Change"]


class Change(ShapedReduction):
    """Direction and size of each tensor relative to the previous one, such as a gradient from step to step.

    State: ``[pairs, sum of cosines, sum of ratios, updates, carried]``, followed by the first and the last tensor, 16
    bytes per element. The reduction is ordered: ``a.merge(b)`` also counts the last tensor of ``a`` and the first
    tensor of ``b`` as a pair. When a recorder starts a new stream after a result, it carries the last tensor over as
    the predecessor of the next one, so that no pair is lost between results. Values that are not finite count as zero.

    Statistics, as means over all pairs of consecutive tensors ``p``, ``x``: ``cosine_to_previous`` is
    ``x . p / (|x| * |p|)``, between -1 and 1; ``ratio_to_previous`` is ``|x| / |p|``. Pairs in which a norm is zero are
    ignored. Both are NaN if there is no pair. Norms above 1e150 or below 1e-150 exceed the range of float64 when they
    are squared.
    """

    statistics: tuple[str, ...] = ("cosine_to_previous", "ratio_to_previous")
    additive = False
    ordered = True
    lead = 5
    blocks = 2

    @override
    def shape_of(self, values: Values) -> tuple[int, ...]:
        return tuple(values.shaped.shape)

    @override
    def update_shaped(self, lead: Tensor, blocks: Tensor, values: Values) -> None:
        single = torch.zeros_like(lead)
        single[3] = 1
        self._follow(lead, blocks.view(2, -1), single, values.doubles.expand(2, -1))

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        self._follow(*self._flat(state), *self._flat(other))

    @override
    def restart(self, state: Tensor) -> None:
        lead, (first, last) = self._flat(state)[0], self._flat(state)[1].unbind(-2)
        carried = (lead[..., 3:].sum(-1) > 0).double()
        lead.zero_()
        lead[..., 4] = carried
        first.copy_(last)

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        pairs, cosines, ratios = state[..., :3].unbind(-1)
        return {"cosine_to_previous": cosines / pairs, "ratio_to_previous": ratios / pairs}

    def _flat(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the lead, ``[..., 5]``, and of the first and last tensor, ``[..., 2, numel]``."""
        return state[..., : self.lead], state[..., self.lead :].unflatten(-1, (2, -1))

    @staticmethod
    def _follow(lead: Tensor, ends: Tensor, next_lead: Tensor, next_ends: Tensor) -> None:
        """Append the stream that follows to a stream, in place."""
        (_, last), (first, _) = ends.unbind(-2), next_ends.unbind(-2)
        there = (lead[..., 3:].sum(-1) > 0).double()
        there_next = (next_lead[..., 3:].sum(-1) > 0).double()
        norm, next_norm = (torch.linalg.vector_norm(each, dim=-1) for each in (last, first))
        # A carried tensor is the last one of the previous stream, so it must not be paired with itself.
        joined = (there > 0) & (next_lead[..., 3] > 0) & (next_lead[..., 4] == 0) & (norm > 0) & (next_norm > 0)
        cosine = ((last * first).sum(-1) / (norm * next_norm)).clamp(-1, 1)
        ratio = next_norm / norm
        pair = torch.stack((torch.ones_like(cosine), cosine, ratio), dim=-1)
        ends.copy_(
            torch.stack(
                (
                    torch.where(there[..., None] > 0, ends[..., 0, :], next_ends[..., 0, :]),
                    torch.where(there_next[..., None] > 0, next_ends[..., 1, :], ends[..., 1, :]),
                ),
                dim=-2,
            )
        )
        carried = torch.where(there > 0, lead[..., 4], next_lead[..., 4])
        lead[..., :4] += next_lead[..., :4]
        lead[..., :3] += torch.where(joined[..., None], pair, 0)
        lead[..., 4] = carried
