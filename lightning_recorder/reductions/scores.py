"""Statistics of the scores inside attention for each head, and inside a router for each expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.records.parts import EXPERT_STATISTICS, HEAD_STATISTICS
from lightning_recorder.reductions.shaped import ShapedReduction
from lightning_recorder.reductions.values import Values

__all__ = [
    "EXPERT_SLOTS",
    "EXPERT_STATISTICS",
    "HEAD_SLOTS",
    "HEAD_STATISTICS",
    "ExpertScores",
    "HeadScores",
    "slots_of_scores",
]

HEAD_SLOTS = (
    "queries",
    "entropy",
    "entropy_ratio",
    "first_key",
    "top_key",
    "variance",
    "placed",
    "distance",
    "future",
    "own",
    "rows",
    "masked",
    "visible",
    "keys",
    "samples",
    "blind",
    "valued",
    "values",
    "padded",
    "padding",
    "max_logit",
    "most_ratio",
    "minus_least_ratio",
    "minus_least_alike",
)
"""The numbers in the state of each head. The last four are maxima, all others are sums."""

_HEAD_MAXIMA = 4

EXPERT_SLOTS = ("tokens", "sampled", "chosen", "load", "probability", "entropy", "margin")
"""The numbers in the state of each expert. Numbers of the whole router are repeated for all of its experts."""


def slots_of_scores(names: tuple[str, ...], found: Mapping[str, Tensor | float], like: Tensor) -> Tensor:
    """Return the named numbers as the rows of a block, ``[names, n]`` float64. A missing number is zero.

    Each number is a tensor ``[n]``, or a scalar for all columns. ``like`` is a tensor ``[n]`` on the device of the
    numbers.
    """
    rows = [found.get(name, 0.0) for name in names]
    numbers = {row: torch.full_like(like, row, dtype=torch.float64) for row in rows if not isinstance(row, Tensor)}
    return torch.stack([row.double() if isinstance(row, Tensor) else numbers[row] for row in rows])


class _Scores(ShapedReduction):
    """Base class of a state that is a block of numbers, ``[slots, n]``, of which some are sums and some are maxima."""

    lead = 0
    maxima: ClassVar[int] = 0
    """The number of slots at the end that are maxima."""

    @override
    def initial(self) -> Tensor:
        state = torch.zeros(self.width, dtype=torch.float64, device="cpu")
        if self.maxima:
            self.parts(state)[1][-self.maxima :] = -torch.inf
        return state

    @override
    def shape_of(self, values: Values) -> tuple[int, ...]:
        return tuple(values.shaped.shape[1:])

    @override
    def update_shaped(self, lead: Tensor, blocks: Tensor, values: Values) -> None:
        self._merge(blocks, values.shaped)

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        self._merge(self.parts(state)[1], self.parts(other)[1])

    def _merge(self, blocks: Tensor, others: Tensor) -> None:
        sums = self.blocks - self.maxima
        blocks[..., :sums, :] += others[..., :sums, :]
        if self.maxima:
            blocks[..., sums:, :] = torch.maximum(blocks[..., sums:, :], others[..., sums:, :])


class HeadScores(_Scores):
    """Statistics of the attention scores of each head, from a sample of queries.

    The values are the block of one call, ``[24, heads]``, with the rows :data:`HEAD_SLOTS`. The statistics, each
    ``[heads]`` and exact in float32, are:

    - ``attention_max_logit``: the largest score before the softmax, with the scale and the mask;
    - ``attention_logit_std``: the standard deviation of the scores of a query over the keys that it may attend;
    - ``attention_entropy``: the mean of ``-Σ p ln p`` over the queries, in nats;
    - ``attention_entropy_ratio``: the entropy divided by the logarithm of the number of keys that may be attended: 0 if
      all attention is on one key, 1 if it is equal on all keys; ``attention_least_ratio`` and ``attention_most_ratio``
      are the smallest and the largest ratio of any query;
    - ``attention_first_key`` and ``attention_top_key``: the mean attention weight of the first key, and of the key with
      the largest weight;
    - ``attention_distance``: the mean number of positions between a query and the keys that it attends to; NaN if the
      numbers of queries and keys differ, as in cross-attention;
    - ``attention_future``: the mean attention weight on keys after the query; NaN like ``attention_distance``;
    - ``attention_keys`` and ``attention_visible``: the mean number and the mean fraction of keys that may be attended;
    - ``attention_masked``: the fraction of queries with a mask;
    - ``attention_blind``: the fraction of samples in which no query may attend to any key. Some queries may be padding;
    - ``attention_value_rms``: the root mean square of the value vectors; NaN if they are unknown;
    - ``attention_alike``: the smallest cosine between the query and the key of the same position; NaN if unknown;
    - ``attention_padding``: the mean attention weight on padding, for queries that are not padding, in samples that
      have padding; NaN if no tokens of the model have padding;
    - ``attention_own``: the fraction of queries that may attend to the key of their own position; NaN like
      ``attention_distance``.

    Queries that may attend to fewer than two keys count only in the largest score and in the fractions of queries and
    keys.
    """

    blocks = len(HEAD_SLOTS)
    maxima = _HEAD_MAXIMA
    additive = False
    statistics = HEAD_STATISTICS

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        slots = dict(zip(HEAD_SLOTS, self.parts(state)[1].unbind(-2), strict=True))
        queries, rows, placed = slots["queries"], slots["rows"], slots["placed"]
        largest = {name: torch.where(slots[name] > -torch.inf, slots[name], torch.nan) for name in HEAD_SLOTS[-4:]}
        found = (
            largest["max_logit"],
            (slots["variance"] / queries).sqrt(),
            slots["entropy"] / queries,
            slots["entropy_ratio"] / queries,
            -largest["minus_least_ratio"],
            largest["most_ratio"],
            slots["first_key"] / queries,
            slots["top_key"] / queries,
            slots["distance"] / placed,
            slots["future"] / placed,
            slots["keys"] / rows,
            slots["visible"] / rows,
            slots["masked"] / rows,
            slots["blind"] / slots["samples"],
            (slots["values"] / slots["valued"]).sqrt(),
            -largest["minus_least_alike"],
            slots["padding"] / slots["padded"],
            slots["own"] / placed,
        )
        # Rounded to float32, because records need half the space for such numbers.
        return {name: each.float().double() for name, each in zip(HEAD_STATISTICS, found, strict=True)}


class ExpertScores(_Scores):
    """Statistics of a router for each of its experts.

    The values are the block of one call, ``[7, experts]``, with the rows :data:`EXPERT_SLOTS`. The statistics, each
    ``[experts]`` and exact in float32, are:

    - ``router_load``: the fraction of the choices that fall on the expert; 1 / experts is balanced. The exponential of
      the entropy of these fractions is the effective number of experts;
    - ``router_probability``: the mean probability of the expert;
    - ``router_entropy``: the mean of ``-Σ p ln p`` over the tokens, in nats, the same for all experts of a router;
    - ``router_margin``: the mean difference between the lowest score of a chosen expert and the highest score of an
      expert that was not chosen;
    - ``router_chosen``: the number of experts per token;
    - ``router_tokens``: the number of tokens.
    """

    blocks = len(EXPERT_SLOTS)
    statistics = EXPERT_STATISTICS

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        slots = dict(zip(EXPERT_SLOTS, self.parts(state)[1].unbind(-2), strict=True))
        tokens = slots["sampled"]
        found = (
            slots["load"] / slots["load"].sum(-1, keepdim=True),
            slots["probability"] / tokens,
            slots["entropy"] / tokens,
            slots["margin"] / tokens,
            slots["chosen"] / slots["tokens"],
            slots["tokens"],
        )
        return {name: each.float().double() for name, each in zip(EXPERT_STATISTICS, found, strict=True)}
