"""The states of a user's reduction, one for each site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_recorder.errors import describe_error, warn
from lightning_recorder.internals.random_states import unchanged_random_numbers
from lightning_recorder.reductions.accumulators import MergeableAccumulator
from lightning_recorder.reductions.base import UnequalBatchError, without_autocast
from lightning_recorder.reductions.nested_values import check_savable, copied
from lightning_recorder.reductions.user import UserReduction
from lightning_recorder.taps import Site

__all__ = ["UserSnapshot", "UserStates", "merge_snapshots"]


class UserSnapshot:
    """The states of one reduction at one point in time, on the CPU."""

    def __init__(
        self,
        reduction: UserReduction,
        states: Mapping[Site, MergeableAccumulator],
        left_out: frozenset[Site] = frozenset(),
    ) -> None:
        self.reduction = reduction
        self.states = {site: state for site, state in states.items() if site not in left_out}
        self.left_out = left_out

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states in the format of :meth:`UserStates.load_state_dict`."""
        return _saved(self.reduction, self.states)

    @property
    def payload(self) -> tuple[dict[Site, Any], frozenset[Site]]:
        """The states as data that another process can merge."""
        return {site: state.payload for site, state in self.states.items()}, self.left_out


class UserStates:
    """A bank of the states of one function or metric, with one state per site.

    Unless ``strict``, a function that fails at a site is skipped there, with one warning.
    """

    def __init__(self, reduction: UserReduction, *, strict: bool = False) -> None:
        self.reduction = reduction
        self._strict = strict
        self._active: dict[Site, MergeableAccumulator] = {}
        self._idle: dict[Site, MergeableAccumulator] = {}  # states that got no tensor since the last reset
        self._left_out: set[Site] = set()
        self._has_warned_of_batch = False

    @property
    def nbytes(self) -> int:
        """The size of the states, in bytes."""
        return sum(state.nbytes for state in self._active.values())

    def add(self, site: Site, tensor: Tensor, factor: float) -> None:
        """Update the state of a site with a tensor multiplied by a factor."""
        if site in self._left_out:
            return
        try:
            # Leave inference mode, because tensors created in it could not be updated outside of it.
            as_alone = torch.inference_mode(False), torch.no_grad(), unchanged_random_numbers(tensor.device)
            with as_alone[0], as_alone[1], as_alone[2], without_autocast(tensor.device):
                state = self._active.get(site) or self._idle.get(site) or self.reduction.new()
                if state.update(tensor if factor == 1.0 else _scaled(tensor, factor)):
                    self._active[site] = state
                    self._idle.pop(site, None)
        except UnequalBatchError as error:
            if self._strict:
                raise
            if not self._has_warned_of_batch:
                self._has_warned_of_batch = True
                warn(f"{site.path!r} of module {site.name!r}: {error}. Such a batch is left out of {self.reduction}.")
        except Exception as error:
            if self._strict:
                raise
            if not self._left_out:
                warn(
                    f"{self.reduction} does not support {site.path!r} of module {site.name!r}: "
                    f"{describe_error(error)}. It is left out for this site and for others with this error."
                )
            self._left_out.add(site)

    def revive(self) -> None:
        """Resume recording at the skipped sites."""
        self._left_out.clear()

    def snapshot(self) -> UserSnapshot:
        """Return a copy of the states on the CPU. Synchronizes the device."""
        with torch.inference_mode(False):
            states = {site: state.copy("cpu") for site, state in self._active.items()}
        return UserSnapshot(self.reduction, states, frozenset(self._left_out))

    def saved(self) -> dict[Site, MergeableAccumulator]:
        """Return a copy of the states on their devices, for :meth:`restore`."""
        with torch.inference_mode(False):
            return {site: state.copy() for site, state in self._active.items()}

    def restore(self, saved: Mapping[Site, MergeableAccumulator]) -> None:
        """Restore the states from :meth:`saved`, which must not be used again."""
        self._idle = {}
        self._active = dict(saved)

    def reset(self) -> None:
        """Discard the recorded tensors."""
        for state in self._active.values():
            state.reset()
        self._idle |= self._active
        self._active = {}

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states as plain Python objects and CPU tensors."""
        return _saved(self.reduction, self._active)

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Load states.

        Raises:
            ArgumentError: If the states belong to another kind of reduction.
        """
        for each in saved:
            state = self.reduction.new()
            if "value" in each:
                state.replace(each["value"])
            else:
                state.load_state_dict(each["state"])
            self._active[Site(*each["key"])] = state


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    """Return the tensor multiplied by a factor, at least in float32: in half precision, the product could underflow."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * factor


def _saved(reduction: UserReduction, states: Mapping[Site, MergeableAccumulator]) -> list[dict[str, Any]]:
    saved = []
    for site, state in states.items():
        try:
            if reduction.is_function:  # saved without conversion, because a number or tuple must not become a tensor
                check_savable(state.value)
                content = {"value": copied(state.value, "cpu")}
            else:
                content = {"state": {name: each.to("cpu", copy=True) for name, each in state.state_dict().items()}}
        except Exception as error:  # noqa: BLE001 - a result may be anything
            warn(f"a checkpoint is without the unwritten results of {reduction}: {describe_error(error)}")
            return []
        saved.append({"key": list(site), **content})
    return saved


def merge_snapshots(
    reduction: UserReduction, payloads: Sequence[tuple[dict[Site, Any], frozenset[Site]]]
) -> UserSnapshot:
    """Merge the states of several processes, given in rank order. If that is impossible, keep those of the first."""
    if not reduction.is_mergeable:
        payloads = payloads[:1]
    found: dict[Site, list[Any]] = {}
    for states, _ in payloads:
        for site, payload in states.items():
            found.setdefault(site, []).append(payload)
    left_out = frozenset().union(*(skipped for _, skipped in payloads))
    empty = reduction.new()
    return UserSnapshot(reduction, {site: empty.merged(states) for site, states in found.items()}, left_out)
