"""A random sample of the values of a stream."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.errors import check_integer
from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.values import Values

__all__ = ["Reservoir"]


class Reservoir(Reduction):
    """A sample of a fixed size in which each value of the stream is with equal probability.

    Each value of the stream has a random key, and those with the least keys stay (bottom-k sampling: Cohen & Kaplan,
    "Summarizing Data Using Bottom-k Sketches", 2007), so that a merged sample is again one of the whole. Of a tensor
    only the least keys are made, as the order statistics of so many uniform numbers, and given to a value in each of
    as many equal parts of the tensor, in random order. Keys and places are a hash (SplitMix64:
    Steele, Lea & Flood, 2014) of the seed and of the number of values before, not random numbers of torch: training
    draws the same with and without, and a run repeats itself.

    State: ``[values seen]``, ``size`` keys in ascending order and ``size`` values: ``8 + 16 * size`` bytes. Statistic:
    ``sample``, ``[size]``, in random order, NaN in the places that are not taken yet; NaN and infinities of the stream
    are values like others.

    Args:
        size: How many values are kept.
        seed: Of the hash. Streams that are recorded side by side and merged later, as on several ranks, take different
            seeds: with the same one they choose the same places, and the sample has less variety than it seems.
    """

    statistics: tuple[str, ...] = ("sample",)
    additive = False

    def __init__(self, size: int = 256, seed: int = 0) -> None:
        check_integer("size", size, 1)
        check_integer("seed", seed, 0)
        self.size = size
        self.width = 1 + 2 * size
        self._seed = seed

    @property
    def seed(self) -> int:
        """The seed, which may differ between samples that are merged."""
        return self._seed

    @override
    def initial(self) -> Tensor:
        state = torch.full((self.width,), torch.nan, dtype=torch.float64)
        state[0] = 0
        state[1 : 1 + self.size] = torch.inf
        return state

    @override
    def update_state(self, state: Tensor, values: Values) -> None:
        drawn = min(values.numel, self.size)
        if not drawn:
            return
        numbers = torch.arange(drawn, device=state.device)
        # Different for each value of the stream, as no more are drawn than there are.
        counters = (state[0].long() + numbers) * 4
        first, inside, spacing, order = (_uniform(counters + draw, self._seed) for draw in range(4))
        # The k least of n uniform numbers: each is the least of those that are left above the one before.
        keys = -torch.expm1(_running_sum(torch.log1p(-spacing) / (values.numel - numbers)))
        # One in each of equal parts, so all are different; from a random place on, since parts are equal but for one.
        bounds = torch.arange(drawn + 1, device=state.device) * values.numel // drawn
        places = bounds[:-1] + (inside * bounds.diff()).long() + (first[0] * values.numel).long()
        places %= values.numel
        fresh = torch.full_like(state, torch.nan)  # filled on the device: a copy to it would wait
        fresh[1 : 1 + self.size] = torch.inf
        fresh[0] = values.numel
        fresh[1 : 1 + drawn] = keys
        fresh[1 + self.size : 1 + self.size + drawn] = values.at(places[order.argsort()])
        self.merge_states(state, fresh)

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        both = torch.cat((state[..., 1:].unflatten(-1, (2, -1)), other[..., 1:].unflatten(-1, (2, -1))), dim=-1)
        # By key, and where two streams had the same seed by value, so that it does not matter which came first.
        values, order = both[..., 1, :].sort(dim=-1, stable=True)
        keys, order = both[..., 0, :].gather(-1, order).sort(dim=-1, stable=True)
        values = values.gather(-1, order)
        state[..., 0] += other[..., 0]
        state[..., 1:] = torch.cat((keys[..., : self.size], values[..., : self.size]), dim=-1)

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        return {"sample": state[..., 1 + self.size :]}


def _running_sum(numbers: Tensor) -> Tensor:
    """The sum of each number and those before it; torch's own is not deterministic on a GPU."""
    shift = 1
    while shift < len(numbers):
        numbers = numbers + torch.nn.functional.pad(numbers[:-shift], (shift, 0))
        shift *= 2
    return numbers


def _uniform(counters: Tensor, seed: int) -> Tensor:
    """SplitMix64 of the counters, as float64 in [0, 1), from integer operations alone."""
    bits = (counters + seed * 0x5851F42D4C957F2D % 2**62) * _signed(0x9E3779B97F4A7C15)
    bits = (bits ^ _shifted(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shifted(bits, 27)) * _signed(0x94D049BB133111EB)
    return _shifted(bits ^ _shifted(bits, 31), 11).double() * 2.0**-53


def _shifted(bits: Tensor, by: int) -> Tensor:
    """The bits moved to the right, with zeros from the left."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(bits: int) -> int:
    """The int64 with the same 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits
