"""A uniform random sample of the values of a stream."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.errors import check_integer
from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.values import Values

__all__ = ["Reservoir"]


class Reservoir(Reduction):
    """A random sample of fixed size in which each value of the stream appears with equal probability.

    Each value of the stream has a random key, and the values with the smallest keys are kept (bottom-k sampling: Cohen
    & Kaplan, "Summarizing Data Using Bottom-k Sketches", 2007), so a merged sample is a sample of the whole stream. For
    each tensor, only the smallest keys are generated, as the order statistics of uniform numbers. The tensor is divided
    into as many equal parts as there are keys, and each key is assigned to a value in one part, in random order. Keys
    and positions are a hash (SplitMix64: Steele, Lea & Flood, 2014) of the seed and the number of earlier values. The
    random number generators of torch are not used, so recording does not change the training and runs are reproducible.

    State: ``[values seen]``, ``size`` keys in ascending order and ``size`` values: ``8 + 16 * size`` bytes. Statistic:
    ``sample``, ``[size]``, in random order, padded with NaN. NaN and infinities of the stream are sampled like any
    other value.

    Args:
        size: The number of values in the sample.
        seed: The seed of the hash. Streams that are recorded in parallel and merged later, such as on several ranks,
            need different seeds. Streams with equal seeds choose the same positions, so their merged sample has less
            variety than its size suggests.
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
        """The seed. Samples with different seeds can be merged."""
        return self._seed

    @override
    def initial(self) -> Tensor:
        state = torch.full((self.width,), torch.nan, dtype=torch.float64, device="cpu")
        state[0] = 0
        state[1 : 1 + self.size] = torch.inf
        return state

    @override
    def update_state(self, state: Tensor, values: Values) -> None:
        drawn = min(values.numel, self.size)
        if not drawn:
            return
        numbers = torch.arange(drawn, device=state.device)
        # The counters are unique in the stream, because a tensor never needs more keys than it has values.
        counters = (state[0].long() + numbers) * 4
        first, inside, spacing, order = (_uniform(counters + draw, self._seed) for draw in range(4))
        # The k smallest of n uniform numbers. Each is the smallest of the remaining numbers above the previous one.
        keys = -torch.expm1(_running_sum(torch.log1p(-spacing) / (values.numel - numbers)))
        # One position per part, so the positions are distinct. A random start evens out the sizes of the parts.
        bounds = torch.arange(drawn + 1, device=state.device) * values.numel // drawn
        places = bounds[:-1] + (inside * bounds.diff()).long() + (first[0] * values.numel).long()
        places %= values.numel
        fresh = torch.full_like(state, torch.nan)  # filled on the device, since a copy from the host would synchronize
        fresh[1 : 1 + self.size] = torch.inf
        fresh[0] = values.numel
        fresh[1 : 1 + drawn] = keys
        fresh[1 + self.size : 1 + self.size + drawn] = values.at(places[order.argsort()])
        self.merge_states(state, fresh)

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        both = torch.cat((state[..., 1:].unflatten(-1, (2, -1)), other[..., 1:].unflatten(-1, (2, -1))), dim=-1)
        # Sort by key, and by value if two streams have the same seed, so that the order of the streams does not matter.
        values, order = both[..., 1, :].sort(dim=-1, stable=True)
        keys, order = both[..., 0, :].gather(-1, order).sort(dim=-1, stable=True)
        values = values.gather(-1, order)
        state[..., 0] += other[..., 0]
        state[..., 1:] = torch.cat((keys[..., : self.size], values[..., : self.size]), dim=-1)

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        return {"sample": state[..., 1 + self.size :]}


def _running_sum(numbers: Tensor) -> Tensor:
    """Return the cumulative sum of the numbers. The cumulative sum of torch is not deterministic on a GPU."""
    shift = 1
    while shift < len(numbers):
        numbers = numbers + torch.nn.functional.pad(numbers[:-shift], (shift, 0))
        shift *= 2
    return numbers


def _uniform(counters: Tensor, seed: int) -> Tensor:
    """Return SplitMix64 of the counters as float64 in [0, 1), computed only with integer operations."""
    bits = (counters + seed * 0x5851F42D4C957F2D % 2**62) * _signed(0x9E3779B97F4A7C15)
    bits = (bits ^ _shifted(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shifted(bits, 27)) * _signed(0x94D049BB133111EB)
    return _shifted(bits ^ _shifted(bits, 31), 11).double() * 2.0**-53


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Return the bits shifted right, filled with zeros from the left."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(bits: int) -> int:
    """Return the int64 with the same 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits
