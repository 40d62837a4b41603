"""The contract of a streaming statistic."""

from __future__ import annotations

import copy
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions.values import Values

__all__ = ["Reduction"]

_ROWS = "state being [..., width]: write state[..., 0] for the first word"


class Reduction(ABC):
    """A statistic over a stream of tensors, whose whole state is one row of float64 numbers.

    An object has settings, which are its public attributes and never change, and a state: a fixed number of float64
    words on the device of the tensors, so that the rows of many sites lie packed in one block and travel in one
    transfer. Counts are exact up to 2**53.

    A subclass states :attr:`width` and :attr:`statistics`, :meth:`update_state` and :meth:`summarize`. If its words are
    not sums that begin with zero, it says ``additive = False`` and has :meth:`initial` and :meth:`merge_states` of its
    own. The laws, which the tests check:

    * ``merge_states`` is associative and, unless :attr:`ordered`, commutative, and a row as :meth:`initial` gives it is
      its neutral element;
    * updating with two tensors equals merging the two states of updating with one each, to the bit for counts, extrema
      and histograms and within the bound that the reduction states for the rest.

    Note:
        An update waits for nothing and keeps nothing of the tensor that it is given. The state takes no part in
        autograd.

    Example:
        >>> class NegativeShare(Reduction):
        ...     width = 2
        ...     statistics = ("negative_fraction",)
        ...
        ...     def update_state(self, state, values):
        ...         state[0] += (values.flat < 0).sum()
        ...         state[1] += values.numel
        ...
        ...     def summarize(self, state):
        ...         return {"negative_fraction": state[..., 0] / state[..., 1]}
        >>> share = NegativeShare()
        >>> share.update(torch.tensor([-1.0, 2.0]))
        >>> share.update(torch.tensor([3, 4]))
        >>> float(share.compute()["negative_fraction"])
        0.25
    """

    width: int
    """Number of float64 words in the state; 0 as long as it is not known."""
    statistics: tuple[str, ...]
    """The names of what :meth:`summarize` gives."""
    additive: bool = True
    """Whether merging is adding, word by word; such states are merged over ranks by one sum."""
    piecewise: bool = False
    """Whether only the values count and not their shape, so that they may come in pieces."""
    ordered: bool = False
    """Whether the order of the tensors matters: then ``a.merge(b)`` means that ``b`` came after ``a``."""

    _state: Tensor | None = None

    def initial(self) -> Tensor:
        """The state of an empty stream, ``[width]`` float64 on the CPU."""
        return torch.zeros(self.width, dtype=torch.float64)

    @abstractmethod
    def update_state(self, state: Tensor, values: Values) -> None:
        """Take values into the state, ``[width]``, in place."""

    def check(self, values: Values) -> None:  # noqa: B027 - most take anything
        """Refuse values that cannot be taken into this reduction's state.

        Raises:
            ArgumentError: If the reduction depends on the shape, and an earlier tensor had another.
        """

    def add(self, state: Tensor, values: Values) -> None:
        """Take values into the state, ``[width]``, in place, in pieces where that is possible."""
        for piece in values.pieces() if self.piecewise else (values,):
            self.update_state(state, piece)

    def begin(self, state: Tensor, values: Values) -> Tensor | None:
        """Take values into the state and give back what can be merged later: the state that :attr:`head` has of them.

        Merging takes many small operations, which many sites share when it is done for all of them at once.
        """
        self.add(state, values)
        return None

    @property
    def head(self) -> Reduction | None:
        """The reduction of the first words, as :meth:`begin` leaves them to be merged, or none."""
        return None

    def merge_states(self, state: Tensor, other: Tensor) -> None:
        """Take the states ``other``, ``[..., width]``, into ``state`` of equal shape, in place."""
        state += other

    def restart(self, state: Tensor) -> None:
        """Begin a new stream in the states, ``[..., width]``, in place: what recorders do after each result.

        A reduction that is :attr:`ordered` may have something go on. The states of others become those of
        :meth:`initial`, whoever does it.
        """
        state.copy_(self.initial())

    @abstractmethod
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        """The statistics of the states, ``[..., width]``, by name, each ``[...]`` or ``[..., k]`` float64.

        Recorders give the states of all sites at once: ``state[..., 0]`` is the first word of each.
        """

    @property
    def is_sized(self) -> bool:
        """Whether the width is known: always, unless it depends on the shape of a tensor that is still to come."""
        return True

    def sized_for(self, values: Values) -> Self:
        """This reduction with the width that values of this shape need: itself, unless it depends on the shape."""
        return self

    def additive_words(self) -> Tensor:
        """Which words of the state are merged by adding them, ``[width]`` bool."""
        return torch.full((self.width,), self.additive)

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return 8 * self.width

    @property
    def state(self) -> Tensor:
        """The row of this object's own stream, ``[width]`` float64."""
        if not self.is_sized:
            return torch.zeros(0, dtype=torch.float64)
        if self._state is None:
            with torch.inference_mode(False):
                self._state = self.initial()
        return self._state

    def on(self, state: Tensor) -> Self:
        """A reduction with the same settings that works on the given row, where it lies.

        Raises:
            ArgumentError: If the row does not have the shape and type of a state.
        """
        if state.shape != (self.width,) or state.dtype != torch.float64:
            needed = f"{type(self).__name__} needs a float64 state of shape ({self.width},)"
            raise ArgumentError(f"{needed}, got {state.dtype} of shape {tuple(state.shape)}")
        fresh = copy.copy(self)
        fresh._state = state
        return fresh

    @torch.no_grad()
    def update(self, tensor: Tensor) -> None:
        """Take a tensor of any shape into the stream; the state moves to its device.

        Raises:
            ArgumentError: If the reduction depends on the shape, and an earlier tensor had another.
        """
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"a reduction takes tensors, got {type(tensor).__name__}")
        values = Values(tensor.detach())
        if not self.is_sized:
            self.__dict__.update(vars(self.sized_for(values)))
        if self.state.device != tensor.device:
            with torch.inference_mode(False):
                self._state = self.state.to(tensor.device)
        self.add(self.state, values)

    @torch.no_grad()
    def merge(self, other: Self) -> None:
        """Take another stream's state into this one; the other stays as it is.

        Raises:
            ArgumentError: If the other one is of another kind, or has other settings.
        """
        alike = type(other) is type(self) and other.choices == self.choices
        if alike and not other.is_sized:
            return
        if alike and not self.is_sized:
            self.__dict__.update(vars(other), _state=None)
        if not alike or other.settings != self.settings:
            raise ArgumentError(f"{self} cannot be merged with {other}: both must have the same settings")
        self.merge_states(self.state, other.state.to(self.state.device))

    def compute(self) -> dict[str, Tensor]:
        """The statistics so far, by name; the state stays as it is."""
        if not self.is_sized:
            return {name: torch.tensor(torch.nan, dtype=torch.float64) for name in self.statistics}
        return self.summarize(self.state)

    def reset(self) -> None:
        """Forget the stream; a shape that was fixed by the first tensor stays."""
        if self._state is not None:
            self._state.copy_(self.initial())

    def state_dict(self) -> dict[str, Tensor]:
        """The state as plain tensors, independent of this object's future; with what tells other settings apart."""
        return {"state": self.state.detach().clone(), "kind": self._kind}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Continue the stream of a state dict.

        Raises:
            ArgumentError: If the state was saved by another reduction, or one with other settings.
        """
        if "state" not in state_dict:
            raise ArgumentError(f"the saved state of {self} must have a part 'state', got {sorted(state_dict)}")
        state = state_dict["state"]
        if state.shape != self.state.shape:
            needed = f"{type(self).__name__} needs {tuple(self.state.shape)}"
            raise ArgumentError(f"{needed}, the saved state has shape {tuple(state.shape)}")
        self._check_kind(state_dict)
        self.state.copy_(state)

    @property
    def described(self) -> str:
        """The class and the settings, in a text that is the same in every process."""
        return f"{type(self).__name__} {_described(self.settings)}"

    @property
    def _kind(self) -> Tensor:
        """A number that differs between classes and settings, 0-d int64."""
        text = f"{type(self).__name__} {_described(self.choices)}"
        return torch.tensor(zlib.crc32(text.encode()))

    def _check_kind(self, state_dict: Mapping[str, Tensor]) -> None:
        if "kind" in state_dict and int(state_dict["kind"]) != int(self._kind):
            raise ArgumentError(f"the saved state is not of {self}: it has another class or other settings")

    def validate(self) -> None:
        """Refuse a reduction that does not keep the contract, before anything is lost by it.

        Raises:
            ArgumentError: Saying what is wrong.
        """
        name = type(self).__name__
        width, statistics = getattr(self, "width", None), getattr(self, "statistics", None)
        if not isinstance(width, int) or not isinstance(statistics, tuple):
            raise ArgumentError(f"{name} must have a width, an integer, and statistics, a tuple of names")
        state = self.initial()
        if state.shape != (width,) or state.dtype != torch.float64:
            got = f"{state.dtype} of shape {tuple(state.shape)}"
            raise ArgumentError(f"{name}.initial must give float64 of shape ({width},), got {got}")
        merges = type(self).merge_states is not Reduction.merge_states
        if not merges and (not self.additive or bool(state.any())):
            raise ArgumentError(
                f"{name} is merged by adding, so it begins with zeros, or else has its own merge_states"
            )
        rows = 3 if width == 2 else 2  # told apart from the words of a state
        try:
            found = self.summarize(state.repeat(rows, 1))
            shapes = {key: value.shape[:1] == (rows,) for key, value in found.items()}
        except Exception as error:
            raise ArgumentError(f"{name}.summarize must take several states at once, {_ROWS}: {error!r}") from error
        if set(shapes) != set(statistics):
            raise ArgumentError(f"{name}.summarize gives {sorted(shapes)}, its statistics are {sorted(statistics)}")
        if not all(shapes.values()):
            wrong = sorted(key for key, is_right in shapes.items() if not is_right)
            raise ArgumentError(f"{name}.summarize must give a number for each site, {_ROWS}; wrong is {wrong}")

    @property
    def settings(self) -> dict[str, Any]:
        """What distinguishes this reduction from others of its class, by name."""
        derived = ("width", "statistics", "additive", "piecewise", "ordered")
        return {name: value for name, value in vars(self).items() if not name.startswith("_") and name not in derived}

    @property
    def choices(self) -> dict[str, Any]:
        """The settings without those that came from a tensor."""
        return self.settings

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"


def _described(value: object) -> str:
    """Settings as a text that is the same in every process."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_described(each)}" for key, each in sorted(value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_described, value)) + "]"
    if isinstance(value, type):
        return value.__name__
    return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__
