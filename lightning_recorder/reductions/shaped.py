"""Reductions with a state whose size depends on the shape of the tensor."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self, override

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.values import Values

__all__ = ["ShapedReduction"]


class ShapedReduction(Reduction):
    """Base class of reductions that keep numbers for each channel or element.

    The first tensor determines the shape of the state, and later tensors must match it. The state consists of leading
    numbers, usually one count, and a number of blocks of that shape.
    """

    blocks: ClassVar[int] = 1
    """Number of blocks, which is the number of values that are kept for each element."""
    lead: ClassVar[int] = 1
    """Number of slots before the blocks."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] | None = None

    @abstractmethod
    def shape_of(self, values: Values) -> tuple[int, ...]:
        """Return the shape of the numbers that are kept for values."""

    @abstractmethod
    def update_shaped(self, lead: Tensor, blocks: Tensor, values: Values) -> None:
        """Update the state, ``[lead]`` and ``[blocks, *shape]``, with values in place."""

    @property
    @override
    def width(self) -> int:  # type: ignore[override]  # read-only here, because the width follows from the shape
        """Number of float64 slots in the state; 0 before the first tensor."""
        return 0 if self.shape is None else self.lead + self.blocks * torch.Size(self.shape).numel()

    def parts(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the lead, ``[..., lead]``, and of the blocks, ``[..., blocks, *shape]``, of states."""
        blocks = state[..., self.lead :]
        return state[..., : self.lead], blocks.unflatten(-1, (self.blocks, *(self.shape or ())))

    @property
    @override
    def is_sized(self) -> bool:
        return self.shape is not None

    @override
    def sized_for(self, values: Values) -> Self:
        if self.shape is not None:
            return self
        sized = copy.copy(self)
        sized.shape = self.shape_of(values)
        return sized

    @override
    def check(self, values: Values) -> None:
        shape = self.shape_of(values)
        if shape != self.shape:
            raise ArgumentError(
                f"{type(self).__name__} has numbers of shape {self.shape}, but the new shape is {shape}"
            )

    @override
    def update_state(self, state: Tensor, values: Values) -> None:
        self.check(values)
        self.update_shaped(*self.parts(state), values)

    @override
    def state_dict(self) -> dict[str, Tensor]:
        # Empty until the first tensor.
        return {} if self.shape is None else {**super().state_dict(), "shape": torch.tensor(self.shape)}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        if not state_dict:
            self.reset()
            return
        if "shape" not in state_dict:
            raise ArgumentError(f"the saved state of {self} must have a part 'shape', got {sorted(state_dict)}")
        shape = tuple(map(int, state_dict["shape"].tolist()))
        if self.shape not in (None, shape):
            raise ArgumentError(
                f"{type(self).__name__} has numbers of shape {self.shape}, but the saved ones have {shape}"
            )
        self._check_kind(state_dict)
        self.shape = shape
        super().load_state_dict(state_dict)

    @property
    @override
    def choices(self) -> dict[str, Any]:
        return {name: value for name, value in self.settings.items() if name != "shape"}

    def __repr__(self) -> str:
        kept = "" if self.shape is None else f" ({self.nbytes:,} bytes)"
        return super().__repr__() + kept


def check_dim(dim: object) -> int:
    """Return the dimension if it is an integer.

    Raises:
        ArgumentError: If ``dim`` is not an integer.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise ArgumentError(f"dim must be the number of a dimension, got {dim!r}")
    return dim


def dimension(dim: int, values: Values) -> int:
    """Return the non-negative index of a dimension.

    Raises:
        ArgumentError: If the tensor has no such dimension.
    """
    dims = values.plain.dim()
    if not -dims <= dim < dims:
        raise ArgumentError(f"a tensor of shape {tuple(values.plain.shape)} has no dimension {dim}; choose another dim")
    return dim % dims
