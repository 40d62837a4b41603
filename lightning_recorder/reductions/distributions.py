"""Statistics of softmax distributions: attention weights and the router of a mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.errors import ArgumentError, check_integer
from lightning_recorder.reductions.shaped import ShapedReduction, check_dim, dimension, whole_dimension
from lightning_recorder.reductions.values import Values, finite_or_zero

__all__ = ["ExpertLoad", "HeadEntropy"]


class HeadEntropy(ShapedReduction):
    """Entropy and largest logit of each attention head.

    Record this at the module that computes the softmax of eager attention. The output of ``nn.Softmax`` has the
    probabilities, its input has the logits. State: ``[3, heads]`` with the number of distributions, the sum of their
    entropies, and the largest logit or probability; 24 bytes per head. Statistics, each ``[heads]``:

    - ``head_entropy``: the mean of ``-Σ p ln p`` over all queries and samples, in nats: 0 if a query attends to one
      position, ``ln(keys)`` if it attends to all positions equally. Weights are divided by their sum, which is not 1
      after dropout. Rows with a NaN or a negative number, and rows of zeros, are ignored.
    - ``head_max``: the largest finite logit, or the largest probability. Large logits precede divergence: `Stabilizing
      Transformer Training <https://arxiv.org/abs/2303.06296>`_ describes the collapse of the entropy, and `Scaling
      Vision Transformers to 22 Billion Parameters <https://arxiv.org/abs/2302.05442>`_ the growth of the logits.

    Args:
        logits: True if the tensors are logits, to which the reduction applies a softmax; False for probabilities.
        dim: The dimension of the heads: 1 for ``[batch, heads, queries, keys]``. The keys are the last dimension.
    """

    blocks = 3
    lead = 0
    additive = False
    statistics = ("head_entropy", "head_max")

    def __init__(self, logits: bool = False, dim: int = 1) -> None:
        super().__init__()
        self.logits = bool(logits)
        self.dim = check_dim(dim)

    @override
    def initial(self) -> Tensor:
        state = torch.zeros(self.width, dtype=torch.float64, device="cpu")
        state[2 * self.width // 3 :] = -torch.inf
        return state

    @override
    def shape_of(self, values: Values) -> tuple[int, ...]:
        place = whole_dimension(self.dim, values)
        if place == whole_dimension(-1, values):
            raise ArgumentError("the last dimension is that of the keys; choose another dim for the heads")
        return (values.shaped.shape[place],)

    @override
    def update_shaped(self, lead: Tensor, blocks: Tensor, values: Values) -> None:
        rows = values.shaped.movedim(dimension(self.dim, values), 0)
        rows = rows.reshape(len(rows), -1, rows.shape[-1]).double()
        if not rows.shape[1] or not rows.shape[2]:
            return
        if self.logits:
            weights = rows.softmax(-1)
        else:
            # Normalize the weights again, since dropout zeroes some weights and scales the others.
            rows = weights = torch.where((rows < 0).any(-1, keepdim=True), torch.nan, rows / rows.sum(-1, keepdim=True))
        entropies = -torch.special.xlogy(weights, weights).sum(-1)
        known = entropies.isfinite()
        blocks[0] += known.sum(1)
        blocks[1] += torch.where(known, entropies, 0.0).sum(1)
        largest = torch.where(rows.isfinite(), rows, -torch.inf).amax((1, 2))
        blocks[2] = torch.maximum(blocks[2], largest)

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        blocks, others = self.parts(state)[1], self.parts(other)[1]
        blocks[..., :2, :] += others[..., :2, :]
        blocks[..., 2, :] = torch.maximum(blocks[..., 2, :], others[..., 2, :])

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        count, total, largest = self.parts(state)[1].unbind(-2)
        return {"head_entropy": total / count, "head_max": torch.where(largest > -torch.inf, largest, torch.nan)}


class ExpertLoad(ShapedReduction):
    """Load of each expert of a mixture of experts, and the entropy of its router.

    Record this at the output of the router, whose last dimension must be the experts. State:
    ``[tokens, sum of entropies]`` and ``[2, experts]`` with the number of tokens that choose each expert and the sum of
    its probabilities. States are merged by addition; the counts are exact. Statistics:

    - ``expert_load``, ``[experts]``: the fraction of the choices that fall on each expert; 1 / experts is balanced;
    - ``expert_probability``, ``[experts]``: the mean probability of each expert;
    - ``load_imbalance``: ``experts · Σ load · probability``, 1 if balanced, ``experts`` if all tokens choose one expert
      with certainty. It is the auxiliary loss of `Switch Transformers <https://arxiv.org/abs/2101.03961>`_, without its
      factor.
    - ``router_entropy``: the mean of ``-Σ p ln p`` over the tokens, in nats.

    Tokens with a nonfinite value are ignored. If several experts have the same probability, the expert with the lowest
    index is chosen.

    Args:
        top_k: The number of experts that a token chooses.
        logits: True if the tensors are logits, to which the reduction applies a softmax; False for probabilities.

    Raises:
        ArgumentError: If ``top_k`` is not a positive integer.
    """

    blocks = 2
    lead = 2
    statistics = ("expert_load", "expert_probability", "load_imbalance", "router_entropy")

    def __init__(self, top_k: int = 1, logits: bool = True) -> None:
        super().__init__()
        check_integer("top_k", top_k, 1)
        self.top_k = top_k
        self.logits = bool(logits)

    @override
    def shape_of(self, values: Values) -> tuple[int, ...]:
        experts = values.shaped.shape[whole_dimension(-1, values)]
        if experts < self.top_k:
            raise ArgumentError(f"a token cannot choose {self.top_k} of {experts} experts")
        return (experts,)

    @override
    def update_shaped(self, lead: Tensor, blocks: Tensor, values: Values) -> None:
        rows = values.shaped.reshape(-1, values.shaped.shape[-1]).double()
        known = rows.isfinite().all(-1, keepdim=True)
        weights = finite_or_zero(rows)
        weights = (weights.softmax(-1) if self.logits else weights) * known
        # Use a stable sort, so that all devices and ranks break ties in the same way.
        chosen = weights.sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        lead[0] += known.sum()
        lead[1] -= torch.special.xlogy(weights, weights).sum()
        blocks[0].index_add_(0, chosen.flatten(), known.expand_as(chosen).flatten().double())
        blocks[1] += weights.sum(0)

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        lead, blocks = self.parts(state)
        tokens = lead[..., :1]
        load, probability = blocks[..., 0, :] / (self.top_k * tokens), blocks[..., 1, :] / tokens
        return {
            "expert_load": load,
            "expert_probability": probability,
            "load_imbalance": load.shape[-1] * (load * probability).sum(-1),
            "router_entropy": lead[..., 1] / lead[..., 0],
        }
