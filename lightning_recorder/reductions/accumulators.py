"""Accumulators, which collect the tensors of one site with or without a reduction."""

from __future__ import annotations

import copy
import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lightning_recorder.errors import ArgumentError, check_callable, check_integer, warn
from lightning_recorder.reductions.base import Reduction, UnequalBatchError, is_foreign
from lightning_recorder.reductions.nested_values import as_tensor, copied, nbytes_of, tensors_in, trimmed

__all__ = [
    "Accumulator",
    "ByteBudget",
    "Fold",
    "MergeableAccumulator",
    "Metric",
    "make_accumulator",
    "make_mergeable",
]

_WHOLE = ""
"""The key in a state dict of a value that is the entire state."""

Fold = Callable[[Any, Tensor], Any]
"""A function of the previous result and the next tensor, as for ``functools.reduce``. The first previous result is the
first tensor. Both arguments are copies.
"""


@runtime_checkable
class Metric(Protocol):
    """The methods of ``torchmetrics.Metric`` that accumulators use."""

    def update(self, tensor: Tensor) -> object:
        """Update the state with a tensor."""

    def compute(self) -> Any:
        """Return the result so far."""

    def reset(self) -> object:
        """Clear the state."""


class Accumulator(ABC):
    """The accumulated tensors of one site.

    An accumulator keeps no step alive: its tensors do not share memory with the model and are not part of an autograd
    graph. They are normal tensors even if the model ran in inference mode.
    """

    @property
    @abstractmethod
    def value(self) -> Any:
        """The current value."""

    @abstractmethod
    def update(self, tensor: Tensor) -> bool:
        """Add a tensor. Return False if the accumulator does not accept the tensor."""

    @abstractmethod
    def replace(self, value: Any) -> None:
        """Replace the value."""

    def release(self) -> None:  # noqa: B027 - a no-op for accumulators that use no budget
        """Return the bytes in use to the budget, before the accumulator is discarded."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return the value as tensors by name.

        Raises:
            ArgumentError: If the value contains something other than tensors and numbers.
        """

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state. Raise ArgumentError if the state belongs to another kind of reduction."""
        try:
            if _WHOLE in state:
                self.replace(state[_WHOLE].clone())
            else:
                self._load(state)
        except (ArgumentError, KeyError, RuntimeError) as error:
            raise ArgumentError(
                f"the state has the parts {sorted(state)}, which belong to another kind of reduction ({error})"
            ) from error

    @abstractmethod
    def _load(self, state: Mapping[str, Tensor]) -> None:
        """Load a state that has several entries or none."""


class MergeableAccumulator(Accumulator):
    """An accumulator whose state can be cleared, copied, and merged with the states of other processes."""

    @abstractmethod
    def reset(self) -> None:
        """Discard the tensors so far."""

    @abstractmethod
    def copy(self, device: torch.device | str | None = None) -> MergeableAccumulator:
        """Return a copy that shares no memory with this accumulator, on ``device`` if given."""

    @property
    @abstractmethod
    def payload(self) -> Any:
        """The state in a form that :meth:`merged` accepts from other processes."""

    @abstractmethod
    def merged(self, payloads: Sequence[Any]) -> MergeableAccumulator:
        """Return an accumulator with the merged states of several processes, each from :attr:`payload`."""

    @property
    def nbytes(self) -> int:
        """The size of the tensors of the state, in bytes."""
        return sum(nbytes_of(each) for each in tensors_in(self.payload))


def make_accumulator(reduction: Fold | Reduction | Metric | type | None, budget: ByteBudget) -> Accumulator:
    """Create the accumulator of a new site.

    Args:
        reduction: A function of two arguments, a :class:`~lightning_recorder.reductions.Reduction`, a metric, or the
            class of a reduction or metric; ``None`` keeps every tensor.
        budget: The limit in bytes for the tensors that are kept without a reduction at all sites together.

    Raises:
        ArgumentError: If the reduction is none of these.
    """
    if reduction is None:
        return _ListAccumulator(budget)
    given = reduction() if isinstance(reduction, type) else reduction
    if isinstance(given, Reduction):
        return _ReductionAccumulator(given)
    return make_mergeable(given)


def make_mergeable(given: Fold | Metric, argument: str = "reduction") -> MergeableAccumulator:
    """Create the accumulator of a function or a metric. Raise ArgumentError for any other argument."""
    if isinstance(given, Metric):
        return _MetricAccumulator(given)
    if not callable(given):
        raise ArgumentError(
            f"{argument} takes a function of two arguments, a Reduction, a torchmetrics.Metric or None; got {given!r}"
        )
    check_callable(argument, given, "before, new", " that returns the new result, as in functools.reduce")
    return _FoldAccumulator(given)


class ByteBudget:
    """The limit in bytes for all lists of one recorder together.

    Raises:
        ArgumentError: If the limit is not a positive integer.
    """

    def __init__(self, max_bytes: int) -> None:
        check_integer("max_bytes", max_bytes, 1)
        self.max_bytes = max_bytes
        self.used = 0
        self._has_warned = False

    def take(self, nbytes: int) -> bool:
        """Reserve bytes and return True. If too few bytes are left, return False, and warn the first time."""
        if self.used + nbytes <= self.max_bytes:
            self.used += nbytes
            return True
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"a recorder without a reduction has kept {self.used:,} bytes, and a tensor of {nbytes:,} more would "
                f"exceed max_bytes={self.max_bytes:,}: further tensors that do are not kept. Give it a reduction, or a "
                "greater max_bytes."
            )
        return False

    def give_back(self, nbytes: int) -> None:
        """Return bytes to the budget."""
        self.used -= nbytes


class _ListAccumulator(Accumulator):
    """All tensors, in order."""

    def __init__(self, budget: ByteBudget) -> None:
        self._value: Any = []
        self._budget = budget
        self._nbytes = 0

    @property
    def value(self) -> Any:
        return self._value

    def update(self, tensor: Tensor) -> bool:
        nbytes = nbytes_of(tensor)
        if not self._budget.take(nbytes):
            return False
        self._nbytes += nbytes
        self._value.append(tensor.clone())
        return True

    def replace(self, value: Any) -> None:
        self.release()
        self._value = value

    def release(self) -> None:
        self._budget.give_back(self._nbytes)
        self._nbytes = 0

    def state_dict(self) -> dict[str, Tensor]:
        if not isinstance(self._value, list):
            return {_WHOLE: as_tensor(self._value)}
        return {str(index): as_tensor(each) for index, each in enumerate(self._value)}

    def _load(self, state: Mapping[str, Tensor]) -> None:
        self.replace([state[str(index)].clone() for index in range(len(state))])
        self._nbytes = sum(map(nbytes_of, self._value))
        self._budget.used += self._nbytes


class _FoldAccumulator(MergeableAccumulator):
    """The result of a two-argument function applied to the tensors."""

    def __init__(self, function: Fold) -> None:
        self._function = function
        self._value: Any = None
        self._empty = True

    @property
    def value(self) -> Any:
        return self._value

    def update(self, tensor: Tensor) -> bool:
        # Copy the tensor, because the function may keep it or write to it.
        new = tensor.clone()
        if isinstance(self._value, Tensor) and self._value.device != new.device:  # loaded on another device
            self._value = self._value.to(new.device)
        try:
            self._value = trimmed(new if self._empty else self._function(self._value, new))
        except RuntimeError as error:
            if not _differ_in_rows(self._value, new):
                raise
            raise UnequalBatchError(
                f"the reduction cannot combine its result of shape {tuple(self._value.shape)} with a batch of shape "
                f"{tuple(new.shape)}: sum the rows first, as in lambda total, new: total.sum(0, keepdim=True) + "
                "new.sum(0, keepdim=True), or set drop_last=True in the DataLoader"
            ) from error
        self._empty = False
        return True

    def replace(self, value: Any) -> None:
        self._value, self._empty = value, False

    def reset(self) -> None:
        self._value, self._empty = None, True

    def copy(self, device: torch.device | str | None = None) -> MergeableAccumulator:
        return self._with(copied(self._value, device))

    def _with(self, value: Any) -> MergeableAccumulator:
        new = _FoldAccumulator(self._function)
        new.replace(value)
        return new

    @property
    def payload(self) -> Any:
        return self._value

    def merged(self, payloads: Sequence[Any]) -> MergeableAccumulator:
        return self._with(functools.reduce(self._function, payloads))

    def state_dict(self) -> dict[str, Tensor]:
        if self._empty:
            return {}
        if isinstance(self._value, dict):
            return {str(key): as_tensor(part) for key, part in self._value.items()}
        return {_WHOLE: as_tensor(self._value)}

    def _load(self, state: Mapping[str, Tensor]) -> None:
        self._empty = not state
        self._value = {key: part.clone() for key, part in state.items()} or None


class _ComputedAccumulator(Accumulator):
    """An accumulator whose value is computed from its state.

    After ``apply()`` or an assignment has replaced the value, the accumulator accepts no tensors until ``reset()``.
    """

    def __init__(self) -> None:
        self._replaced: tuple[Any, ...] = ()

    @property
    def value(self) -> Any:
        return self._replaced[0] if self._replaced else self._compute()

    def update(self, tensor: Tensor) -> bool:
        if self._replaced:
            raise ArgumentError(
                "the result of the reduction was replaced, by apply() or an assignment: reset() starts again"
            )
        self._update(tensor)
        return True

    def replace(self, value: Any) -> None:
        self._replaced = (value,)

    def state_dict(self) -> dict[str, Tensor]:
        return {_WHOLE: as_tensor(self._replaced[0])} if self._replaced else self._state()

    @abstractmethod
    def _compute(self) -> Any: ...

    @abstractmethod
    def _update(self, tensor: Tensor) -> None: ...

    @abstractmethod
    def _state(self) -> dict[str, Tensor]: ...


class _ReductionAccumulator(_ComputedAccumulator):
    """The statistics of a :class:`~lightning_recorder.reductions.Reduction`."""

    def __init__(self, reduction: Reduction) -> None:
        super().__init__()
        self._reduction = copy.deepcopy(reduction)
        self._reduction.reset()

    def _compute(self) -> Any:
        return self._reduction.compute()

    def _update(self, tensor: Tensor) -> None:
        self._reduction.update(tensor.clone() if is_foreign(self._reduction) else tensor)

    def _state(self) -> dict[str, Tensor]:
        return self._reduction.state_dict()

    def _load(self, state: Mapping[str, Tensor]) -> None:
        self._replaced = ()
        self._reduction.load_state_dict(state)


class _MetricAccumulator(_ComputedAccumulator, MergeableAccumulator):
    """The result of a torchmetrics metric."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self._metric = copy.deepcopy(metric)
        self._metric.reset()
        self._metric.persistent(True)
        # Computing the result on one rank must not wait for other ranks. This also holds for nested metrics.
        # torchmetrics reads ``sync_on_compute`` only at construction and in ``forward``, so set ``_to_sync``, too.
        inner = self._metric.modules() if isinstance(self._metric, nn.Module) else [self._metric]
        for each in inner:
            each.sync_on_compute = each._to_sync = False

    def reset(self) -> None:
        self._replaced = ()
        self._metric.reset()

    def copy(self, device: torch.device | str | None = None) -> _MetricAccumulator:
        new = copy.copy(self)
        new._metric = copy.deepcopy(self._metric)
        if device is not None:
            new._metric.to(device)
        return new

    @property
    def payload(self) -> Any:
        return {name: getattr(self._metric, name) for name in self._metric._defaults}

    def merged(self, payloads: Sequence[Any]) -> MergeableAccumulator:
        new = self.copy()
        for name, reduce in self._metric._reductions.items():
            states = [each[name] for each in payloads]
            # Reduce the states as ``Metric.sync`` of torchmetrics does.
            if isinstance(states[0], list):
                found = [part for state in states for part in state]
                setattr(new._metric, name, reduce(found) if reduce is not None and found else found)
            else:
                stacked = torch.stack(states)
                setattr(new._metric, name, stacked if reduce is None else reduce(stacked))
        new._metric._computed = None
        return new

    def _compute(self) -> Any:
        with warnings.catch_warnings(), torch.inference_mode(False):
            # torchmetrics warns because it does not count loading a state as an update.
            warnings.filterwarnings("ignore", "The ``compute`` method of metric", UserWarning)
            return self._metric.compute()

    def _update(self, tensor: Tensor) -> None:
        self._metric.to(tensor.device)
        self._metric.update(tensor.clone())  # cloned, because some metrics keep the tensor

    def _state(self) -> dict[str, Tensor]:
        return {
            f"{name}.{index}" if isinstance(value, list) else name: part
            for name, value in self._metric.state_dict().items()
            for index, part in enumerate(value if isinstance(value, list) else [value])
        }

    def _load(self, state: Mapping[str, Tensor]) -> None:
        self._replaced = ()
        lists = {name for name, value in self._metric.state_dict().items() if isinstance(value, list)}
        grouped: dict[str, Any] = {name: [] for name in lists}
        for name, value in state.items():
            group = name.rpartition(".")[0]
            if group in lists:
                grouped[group].append(value.clone())
            else:
                grouped[name] = value.clone()
        self._metric.load_state_dict(grouped)


def _differ_in_rows(value: Any, tensor: Tensor) -> bool:
    """Return True if the value is a tensor of the same shape, except for the number of rows."""
    same = isinstance(value, Tensor) and value.dim() > 0 and value.shape[1:] == tensor.shape[1:]
    return same and value.shape != tensor.shape
