"""The base classes of streaming statistics."""

from __future__ import annotations

import copy
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions.values import Values

__all__ = [
    "Reduction",
    "ScalarReduction",
    "UnequalBatchError",
    "is_foreign",
    "merged_along",
    "slots_of_all",
    "without_autocast",
]

_ROWS = "the state has the shape [..., width]: write state[..., 0] for the first slot"


class UnequalBatchError(ArgumentError):
    """A function cannot combine batches of different sizes. The accumulated value is unchanged."""


class Reduction(ABC):
    """Base class of a statistic over a stream of tensors, with a state that is one row of float64 numbers.

    A reduction has settings and a state. The settings are its public attributes, which never change. The state is a
    fixed number of slots (float64 numbers) on the device of the tensors, so that the rows of many sites form one
    block and are copied in one transfer. Counts are exact up to 2**53.

    A subclass defines :attr:`width`, :attr:`statistics`, :meth:`update_state` and :meth:`summarize`. If its slots are
    not sums that start at zero, it sets ``additive = False`` and overrides :meth:`initial` and :meth:`merge_states`.
    Every reduction satisfies these laws, which the tests check:

    * ``merge_states`` is associative and, unless :attr:`ordered`, commutative. A row from :meth:`initial` is its
      neutral element.
    * Updating with two tensors is equal to merging the states of two separate updates. Counts, extrema and histograms
      are bitwise equal. Other statistics agree within the error bound that the reduction documents.

    Note:
        An update does not synchronize the device and does not keep a reference to the tensor. The state is not part of
        the autograd graph.

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
    """Number of float64 slots in the state; 0 while the number is unknown."""
    statistics: tuple[str, ...]
    """The names of the statistics that :meth:`summarize` returns."""
    additive: bool = True
    """True if states are merged by adding them slot by slot."""
    piecewise: bool = False
    """True if the result depends only on the values and not on their shape. Tensors may then be passed in pieces."""
    ordered: bool = False
    """True if the order of the tensors matters. Then ``a.merge(b)`` means that ``b`` came after ``a``."""
    option: str = ""
    """The name of the reduction in the report of recording times; by default the name of the class."""

    _state: Tensor | None = None

    def initial(self) -> Tensor:
        """Return the state of an empty stream, ``[width]`` float64 on the CPU."""
        return torch.zeros(self.width, dtype=torch.float64, device="cpu")

    @abstractmethod
    def update_state(self, state: Tensor, values: Values) -> None:
        """Update the state, ``[width]``, with values in place."""

    def applies_to(self, values: Values) -> bool:
        """Return False if the statistics are undefined for a tensor. Recorders skip such tensors without a warning."""
        return True

    def check(self, values: Values) -> None:  # noqa: B027 - most reductions accept any values
        """Check that the values can be added to the state of this reduction.

        Raises:
            ArgumentError: If the reduction depends on the shape and an earlier tensor had a different shape.
        """

    def add(self, state: Tensor, values: Values) -> None:
        """Update the state, ``[width]``, with values in place, in pieces if the reduction allows it."""
        for piece in values.pieces() if self.piecewise else (values,):
            self.update_state(state, piece)

    def update_deferred(self, state: Tensor, values: Values) -> Tensor | None:
        """Update the state with values and return the part of the update that can be merged later.

        The returned state belongs to :attr:`partial`. Merging takes many small operations. Merging the states of many
        sites in one batch reduces this overhead.
        """
        self.add(state, values)
        return None

    @property
    def partial(self) -> Reduction | None:
        """The reduction of the states that :meth:`update_deferred` returns, for the first slots; or ``None``."""
        return None

    def merge_states(self, state: Tensor, other: Tensor) -> None:
        """Merge the states ``other``, ``[..., width]``, into ``state`` of the same shape, in place."""
        state += other

    def merge_ranks(self, state: Tensor, other: Tensor) -> None:
        """Merge states ``other`` of a higher rank, ``[..., width]``, into ``state``, in place.

        Tensors of different ranks have no order. An :attr:`ordered` reduction that compares tensors must override this
        method. All other reductions are merged as by :meth:`merge_states`.
        """
        self.merge_states(state, other)

    def restart(self, state: Tensor) -> None:
        """Start a new stream in the states, ``[..., width]``, in place. Recorders call this after each result.

        An :attr:`ordered` reduction may keep part of its state. All other reductions are reset to :meth:`initial`,
        either by this method or by the caller.
        """
        state.copy_(self.initial())

    @abstractmethod
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        """Return the statistics of the states, ``[..., width]``, by name, each ``[...]`` or ``[..., k]`` float64.

        Recorders pass the states of all sites in one call. ``state[..., 0]`` is the first slot of each state.
        """

    @property
    def is_sized(self) -> bool:
        """True if the width is known. A width that depends on the tensors is unknown before the first tensor."""
        return True

    def sized_for(self, values: Values) -> Self:
        """Return this reduction sized for values of this shape, or itself if it does not depend on the shape."""
        return self

    def additive_slots(self) -> Tensor:
        """Return a mask of the state slots that are merged by addition, ``[width]`` bool."""
        return torch.full((self.width,), self.additive, device="cpu")

    @property
    def nbytes(self) -> int:
        """Size of the state, in bytes."""
        return 8 * self.width

    @property
    def state(self) -> Tensor:
        """The state of this object's own stream, ``[width]`` float64."""
        if not self.is_sized:
            return torch.zeros(0, dtype=torch.float64, device="cpu")
        if self._state is None:
            with torch.inference_mode(False):
                self._state = self.initial()
        return self._state

    def on(self, state: Tensor) -> Self:
        """Return a reduction with the same settings that uses the given row as its state, without a copy.

        Raises:
            ArgumentError: If the row does not have the shape and dtype of a state.
        """
        if state.shape != (self.width,) or state.dtype != torch.float64:
            needed = f"{type(self).__name__} needs a float64 state of shape ({self.width},)"
            raise ArgumentError(f"{needed}, got {state.dtype} of shape {tuple(state.shape)}")
        fresh = copy.copy(self)
        fresh._state = state
        return fresh

    @torch.no_grad()
    def update(self, tensor: Tensor) -> None:
        """Update the stream with a tensor of any shape. The state moves to the device of the tensor.

        Raises:
            ArgumentError: If the reduction depends on the shape and an earlier tensor had a different shape.
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
        """Merge the state of another stream into this one. The other stream does not change.

        Raises:
            ArgumentError: If the other reduction has a different class or different settings.
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
        """Return the current statistics by name. The state does not change."""
        if not self.is_sized:
            return {name: torch.tensor(torch.nan, dtype=torch.float64, device="cpu") for name in self.statistics}
        return self.summarize(self.state)

    def reset(self) -> None:
        """Discard the stream. A shape that was fixed by the first tensor remains."""
        if self._state is not None:
            self._state.copy_(self.initial())

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the state as plain tensors, with a fingerprint of the class and settings."""
        return {"state": self.state.detach().clone(), "kind": self._kind}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Continue the stream of a state dict.

        Raises:
            ArgumentError: If the state was saved by another reduction or with different settings.
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
        """The class and the settings as a text that is the same in every process."""
        return f"{type(self).__name__} {_described(self.settings)}"

    @property
    def _kind(self) -> Tensor:
        """A fingerprint of the class and settings, 0-d int64."""
        text = f"{type(self).__name__} {_described(self.choices)}"
        return torch.tensor(zlib.crc32(text.encode()), device="cpu")

    def _check_kind(self, state_dict: Mapping[str, Tensor]) -> None:
        if "kind" in state_dict and int(state_dict["kind"]) != int(self._kind):
            raise ArgumentError(f"the saved state is not of {self}: it has another class or other settings")

    def validate(self) -> None:
        """Check the contract before any data is recorded.

        Raises:
            ArgumentError: If the reduction violates the contract. The message names the violation.
        """
        name = type(self).__name__
        width, statistics = getattr(self, "width", None), getattr(self, "statistics", None)
        if not isinstance(width, int) or not isinstance(statistics, tuple):
            raise ArgumentError(f"{name} must have a width, an integer, and statistics, a tuple of names")
        state = self.initial()
        if state.shape != (width,) or state.dtype != torch.float64:
            got = f"{state.dtype} of shape {tuple(state.shape)}"
            raise ArgumentError(f"{name}.initial must return float64 of shape ({width},), got {got}")
        merges = type(self).merge_states is not Reduction.merge_states
        if not merges and (not self.additive or bool(state.any())):
            raise ArgumentError(
                f"{name} is merged by addition, so its initial state must be zero, or it must override merge_states"
            )
        rows = 3 if width == 2 else 2  # must differ from the width, so that rows are not mistaken for slots
        try:
            found = self.summarize(state.repeat(rows, 1))
            shapes = {key: value.shape[:1] == (rows,) for key, value in found.items()}
        except Exception as error:
            raise ArgumentError(f"{name}.summarize must accept several states at once, {_ROWS}: {error!r}") from error
        if set(shapes) != set(statistics):
            raise ArgumentError(f"{name}.summarize gives {sorted(shapes)}, its statistics are {sorted(statistics)}")
        if not all(shapes.values()):
            wrong = sorted(key for key, is_right in shapes.items() if not is_right)
            raise ArgumentError(f"{name}.summarize must return a number for each site, {_ROWS}; wrong is {wrong}")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of this reduction by name."""
        derived = ("width", "statistics", "additive", "piecewise", "ordered")
        return {name: value for name, value in vars(self).items() if not name.startswith("_") and name not in derived}

    @property
    def choices(self) -> dict[str, Any]:
        """The settings, except for settings that were inferred from a tensor."""
        return self.settings

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"


def _described(value: object) -> str:
    """Convert settings to a text that is the same in every process."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_described(each)}" for key, each in sorted(value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_described, value)) + "]"
    if isinstance(value, type):
        return value.__name__
    return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__


class ScalarReduction(Reduction):
    """Base class of reductions in which each slot is one number that is computed from the values."""

    piecewise = True

    @abstractmethod
    def slots_of(self, values: Values) -> Sequence[Tensor]:
        """Return the state of these values alone as ``width`` 0-d tensors."""

    @override
    def update_state(self, state: Tensor, values: Values) -> None:
        if values.numel:
            self.merge_states(state, _stacked(self.slots_of(values)))

    @override
    def update_deferred(self, state: Tensor, values: Values) -> Tensor | None:
        return slots_of_all([self], values)

    @property
    @override
    def partial(self) -> Reduction | None:
        return self


def slots_of_all(reductions: Iterable[ScalarReduction], values: Values) -> Tensor | None:
    """Return the concatenated states of several reductions for values; ``None`` without reductions or values."""
    slots = [slot for reduction in reductions for slot in reduction.slots_of(values)] if values.numel else []
    return _stacked(slots) if slots else None


def _stacked(slots: Sequence[Tensor]) -> Tensor:
    """Stack 0-d tensors into one float64 tensor, ``[k]``."""
    # Widen all float32 numbers in one operation: stacking different dtypes takes several times as long.
    narrow = [slot for slot in slots if slot.dtype != torch.float64]
    if narrow:
        widened = iter(torch.stack(narrow).double().unbind())
        slots = [slot if slot.dtype == torch.float64 else next(widened) for slot in slots]
    return torch.stack(tuple(slots))


def merged_along(reduction: Reduction, states: Tensor) -> Tensor:
    """Merge states, ``[..., k, width]``, along the second to last dimension and return ``[..., width]``.

    States are merged in pairs to keep the number of operations small. The given states are overwritten.
    """
    while (count := states.shape[-2]) > 1:
        half = count // 2
        reduction.merge_states(states[..., :half, :], states[..., half : 2 * half, :])
        if count % 2:
            reduction.merge_states(states[..., :1, :], states[..., -1:, :])
        states = states[..., :half, :]
    return states[..., 0, :]


def is_foreign(reduction: Reduction) -> bool:
    """Return True for a user's reduction, which may write to the values or draw random numbers."""
    if type(reduction).__module__.partition(".")[0] != __name__.partition(".")[0]:
        return True
    parts = getattr(reduction, "parts", ())  # the parts of a Combined reduction
    return isinstance(parts, tuple) and any(map(is_foreign, parts))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that disables the model's autocast, which would reduce the precision of reductions."""
    is_on = device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()
