"""The contract of a streaming statistic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions.values import Values

__all__ = ["Reduction"]


class Reduction(ABC):
    """A statistic over a stream of tensors, whose whole state is one row of float64 numbers.

    The state is a fixed number of float64 words on the device of the tensors, so that the rows of many sites lie packed
    in one block and travel in one transfer. Counts are exact up to 2**53. A subclass states four things: :attr:`width`,
    :meth:`initial`, :meth:`update_state` and :meth:`merge_states`, with :meth:`summarize` to read the result. The laws,
    which the tests check:

    * ``merge_states`` is associative and commutative, and a row as :meth:`initial` leaves it is its neutral element;
    * updating with two tensors equals merging the two states of updating with one each, to the bit for counts, extrema
      and histograms and within the bound that the reduction states for the rest.

    Args:
        state: The row to work on, ``[width]`` float64, already initial or restored; by default a new one.
        device: Where a new row lives.

    Note:
        An update waits for nothing and keeps nothing of the tensor that it is given. The state takes no part in
        autograd.
    """

    width: ClassVar[int]
    """Number of float64 words in the state."""

    def __init__(self, state: Tensor | None = None, *, device: torch.device | str | None = None) -> None:
        if state is None:
            state = self.initial().to(device)
        if state.shape != (self.width,) or state.dtype != torch.float64:
            needed = f"{type(self).__name__} needs a float64 state of shape ({self.width},)"
            raise ArgumentError(f"{needed}, got {state.dtype} of shape {tuple(state.shape)}")
        self.state = state

    @classmethod
    @abstractmethod
    def initial(cls) -> Tensor:
        """The state of an empty stream, ``[width]`` float64 on the CPU."""

    @classmethod
    @abstractmethod
    def update_state(cls, state: Tensor, values: Values) -> None:
        """Take values into the state, ``[width]``, in place."""

    @classmethod
    @abstractmethod
    def merge_states(cls, state: Tensor, other: Tensor) -> None:
        """Take the states ``other``, ``[..., width]``, into ``state`` of equal shape, in place."""

    @classmethod
    @abstractmethod
    def summarize(cls, state: Tensor) -> dict[str, Tensor]:
        """The statistics of the states, ``[..., width]``, by name, each ``[...]`` or ``[..., k]`` float64."""

    @torch.no_grad()
    def update(self, tensor: Tensor) -> None:
        """Take a tensor of any shape into the stream."""
        self.update_state(self.state, Values(tensor))

    @torch.no_grad()
    def merge(self, other: Self) -> None:
        """Take another stream's state into this one; the other stays as it is."""
        self.merge_states(self.state, other.state.to(self.state.device))

    def compute(self) -> dict[str, Tensor]:
        """The statistics so far, by name; the state stays as it is."""
        return self.summarize(self.state)

    def reset(self) -> None:
        """Forget the stream."""
        self.state.copy_(self.initial())

    def state_dict(self) -> dict[str, Tensor]:
        """The state as plain tensors, independent of this object's future."""
        return {"state": self.state.detach().clone()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Continue the stream of a state dict.

        Raises:
            ArgumentError: If the state was saved by a reduction of another width.
        """
        state = state_dict["state"]
        if state.shape != self.state.shape:
            needed = f"{type(self).__name__} needs {tuple(self.state.shape)}"
            raise ArgumentError(f"{needed}, the saved state has shape {tuple(state.shape)}")
        self.state.copy_(state)
