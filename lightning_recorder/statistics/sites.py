"""The states of the statistics of all sites."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_recorder.errors import ArgumentError, describe_error, warn
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.internals.random_states import unchanged_random_numbers
from lightning_recorder.internals.stopwatch import Stopwatch
from lightning_recorder.reductions import (
    Collected,
    Combined,
    Reduction,
    StateBank,
    Statistics,
    Values,
    add_tensor,
    compacted,
)
from lightning_recorder.reductions.base import is_foreign
from lightning_recorder.reductions.compact import RecycledRows
from lightning_recorder.reductions.kernels.fused import add_spread, is_fast, may_become_available
from lightning_recorder.reductions.kernels.fused_cuda import add_tensor_on_device
from lightning_recorder.reductions.scalars import BatchSpread, has_spread
from lightning_recorder.reductions.scores import ExpertScores, HeadScores
from lightning_recorder.reductions.user import UserReduction, as_reductions
from lightning_recorder.statistics.snapshot import Snapshot, are_scalars_enough
from lightning_recorder.statistics.user_states import UserStates
from lightning_recorder.taps import Site

__all__ = ["SiteStates"]

_SCORES = (HeadScores, ExpertScores)  # reductions of precomputed numbers instead of the tensor itself
_LASTING = 256  # the first sites have a permanent row each, 4 MiB in total; all other sites share rows
_MOST_AGAIN = 64  # if more sites receive tensors again after losing their rows, a record has several batches


class SiteStates:
    """A :class:`~lightning_recorder.reductions.Statistics` state and the states of the extra reductions for each site.

    Args:
        extra: Additional reductions of the same tensors: a :class:`~lightning_recorder.reductions.Reduction`, a
            ``torchmetrics.Metric``, a function as for ``functools.reduce``, or a list or mapping of these. A reduction
            that fails for a tensor, for example because of its shape, is skipped at that site with one warning.
        sample: The number of values of a tensor that are counted in the histogram. By default, all values are counted.
        quantiles: The quantiles to estimate from the histogram, between 0 and 1. Their scalars are named
            ``quantile_<q>``.
        strict: Raise the errors of extra reductions.
        spread: Record the spread of matrices along their rows, too; see
            :class:`~lightning_recorder.reductions.BatchSpread`.

    Raises:
        ArgumentError: If an argument is invalid, or if two reductions have a statistic of the same name.

    Note:
        Only :meth:`snapshot` and :meth:`state_dict` synchronize the device.
    """

    def __init__(
        self,
        *,
        extra: Any = (),
        sample: int | None = None,
        quantiles: Iterable[float] = (),
        strict: bool = False,
        spread: bool = False,
    ) -> None:
        statistics = Statistics(sample=sample, quantiles=quantiles)
        self._extra = as_reductions(extra, taken=statistics.statistics)
        reductions = [statistics, *(each for each in self._extra if isinstance(each, Reduction))]
        self._users = [UserStates(each, strict=strict) for each in self._extra if isinstance(each, UserReduction)]
        self._extra_places = range(1, len(reductions))
        self._spread_place = len(reductions) if spread else None
        reductions += [BatchSpread()] if spread else []
        Combined(reductions)  # rejects objects that are not reductions, and duplicate names
        self.strict = strict
        self._scores = tuple(range(len(reductions), len(reductions) + len(_SCORES)))
        reductions = [*reductions, *(kind() for kind in _SCORES)]
        self._reductions = reductions
        self._are_foreign = [is_foreign(each) for each in reductions]
        self._options = [each.option or type(each).__name__ for each in reductions]
        self._sample, self._quantiles = sample, tuple(statistics.parts[-1].settings["quantiles"])
        with pause_recording():
            # One bank per reduction, so that a reduction that fails for a tensor does not affect the others.
            self._banks: list[StateBank[Site]] = [StateBank(reduction) for reduction in reductions]
        self._stores: list[StateBank[Site] | UserStates] = [*self._banks, *self._users]
        self._left_out: list[set[Site]] = [set() for _ in reductions]
        self._has_warned: set[int] = set()  # the reductions that have caused a warning
        self._kinds: dict[Site, tuple[torch.dtype, torch.Size | None]] = {}
        self._calls: dict[Site, int] = {}
        self.times: defaultdict[str, Stopwatch] = defaultdict(Stopwatch)
        """The host time of each option since the last reset, such as ``"attention"``."""
        self._rows: dict[Site, Tensor] = {}
        self._spread_rows: dict[Site, Tensor] = {}
        self._recycled: RecycledRows[Site] = RecycledRows(statistics)
        self._again = 0
        self._can_recycle = not self._extra and are_scalars_enough(statistics)
        self._warned: set[int] = set()

    def new_empty(self) -> SiteStates:
        """Return empty states of the same kind."""
        spread = self._spread_place is not None
        options: dict[str, Any] = {"sample": self._sample, "quantiles": self._quantiles, "strict": self.strict}
        return SiteStates(extra=self._extra, spread=spread, **options)

    @property
    def described(self) -> str:
        """The reductions with their settings, as a text that is the same in every process."""
        return ", ".join(each.described for each in (*self._reductions[:1], *self._extra))

    @property
    def users(self) -> tuple[UserReduction, ...]:
        """The functions and metrics of the user."""
        return tuple(states.reduction for states in self._users)

    @property
    def survives_reset(self) -> bool:
        """True if some reduction keeps state after a reset, such as the last tensor to compare with the next one."""
        return any(reduction.ordered for reduction in self._reductions)

    @property
    def sites(self) -> list[Site]:
        """The sites that have a state."""
        return self._banks[0].keys + self._recycled.keys

    @property
    def nbytes(self) -> int:
        """The size of the states on all devices, in bytes."""
        return sum(each.nbytes for each in self._stores) + self._recycled.nbytes

    def add(self, site: Site, tensor: Tensor, factor: float = 1.0, *, extra: bool = True) -> None:
        """Update the statistics of a site with a tensor multiplied by a factor.

        Args:
            site: The site.
            tensor: The tensor.
            factor: The factor.
            extra: Update the additional reductions, too.
        """
        if tensor.device.type == "meta" or hasattr(tensor, "fake_mode"):  # no values
            return
        bank = self._banks[0]
        if tensor.is_cuda and self.try_fast_path(site, tensor, factor):
            return
        if self._recycled.is_allocated:  # there are no extra reductions then
            if is_fast(tensor) and self.try_fast_path(site, tensor, factor):
                return
            state = self._recycled.pop(site)
            if state is not None:
                bank.put(site, state)
                self._again += 1
                if self._again == _MOST_AGAIN:  # moving all sites to permanent rows at once is much faster
                    self._settle()
        values = Values(tensor, factor)
        bank.add(site, values)
        if self._can_recycle and tensor.is_cpu and len(bank) >= _LASTING and not self._recycled.is_allocated:
            self._can_recycle = self._recycled.allocate() or may_become_available()
        self._kinds[site] = (tensor.dtype, None if tensor.is_nested else tensor.shape)
        self._calls[site] = self._calls.get(site, 0) + 1
        if self._spread_place is not None and has_spread(values.plain):
            self._add_spread(self._banks[self._spread_place], site, values.plain)
        if not extra:
            return
        for place in self._extra_places:
            if site not in self._left_out[place]:
                with self.times[self._options[place]]:
                    self._add_extra(place, site, values)
        for states in self._users:
            with self.times[states.reduction.name]:
                states.add(site, tensor, factor)

    def add_scores(self, site: Site, block: Tensor) -> None:
        """Update the statistics of attention heads or of the experts of a router, at a site that has a tensor.

        Args:
            site: The site.
            block: The numbers of one call, ``[slots, heads]`` or ``[slots, experts]`` float64.
        """
        place = next(each for each in self._scores if len(block) == self._reductions[each].blocks)  # type: ignore[attr-defined]
        if block.device.type != "meta":
            self._banks[place].add(site, Values(block))

    def try_fast_path(self, site: Site, tensor: Tensor, factor: float = 1.0) -> bool:
        """Try the fast path: update a site without any torch operation; return False to fall back to :meth:`add`.

        The fast path supports only the default statistics, which are computed in one pass. On a GPU, the site must
        already have a state. The tensor may require grad.
        """
        row = self._rows.get(site)
        if row is None:
            row = None if self._extra else self._banks[0].row(site, tensor.device)
            if row is not None:
                self._rows[site] = row
            elif self._can_recycle and is_fast(tensor):
                row = self._recycled.take(site)
            if row is None:
                return False
        kind = tensor.dtype, tensor.shape  # may raise, so it comes before the update
        add = add_tensor_on_device if tensor.is_cuda else add_tensor
        if not add(row, tensor, factor, self._sample):
            return False
        self._kinds[site] = kind
        self._calls[site] = self._calls.get(site, 0) + 1
        if self._spread_place is not None and len(kind[1]) == 2 and has_spread(tensor):
            self._add_spread(self._banks[self._spread_place], site, tensor)
        return True

    def _add_spread(self, bank: StateBank[Site], site: Site, tensor: Tensor) -> None:
        """Update the spread of a site, without any torch operation if possible."""
        row = self._spread_rows.get(site)
        if row is None:
            row = bank.row(site, tensor.device)
            if row is None and tensor.is_cpu:
                with pause_recording():
                    bank.put(site, bank.reduction.initial())
                row = bank.row(site, tensor.device)
            if row is not None:
                self._spread_rows[site] = row
        if row is None or not add_spread(row, tensor):
            with pause_recording():
                bank.add(site, Values(tensor.detach()))

    def _add_extra(self, place: int, site: Site, values: Values) -> None:
        try:
            if not self._banks[place].reduction.applies_to(values):
                self._left_out[place].add(site)
            elif self._are_foreign[place]:
                with unchanged_random_numbers(values.raw.device):
                    self._banks[place].add(site, Values(values.raw.clone(), values.factor))
            else:
                self._banks[place].add(site, values)
        except Exception as error:
            if self.strict:
                raise
            if place not in self._has_warned:
                self._has_warned.add(place)
                warn(
                    f"{self._banks[place].reduction} does not support {site.path!r} of module {site.name!r}: "
                    f"{describe_error(error)}. It is left out for this site and for others with this error."
                )
            self._left_out[place].add(site)

    def revive(self) -> None:
        """Resume recording the skipped reductions."""
        for left_out in self._left_out:
            left_out.clear()
        self._has_warned.clear()
        for states in self._users:
            states.revive()

    @torch.no_grad()
    def snapshot(self, names: Iterable[str], device: torch.device | str = "cpu", *, compact: bool = False) -> Snapshot:
        """Return a copy of the current states, from which another thread can compute the statistics.

        Args:
            names: The names of the modules, in order.
            device: The device of the copies. Copies on the CPU synchronize the device of the tensors.
            compact: Leave out the empty bins of the histograms, if the states are on the CPU.
        """
        small = None
        if compact and are_scalars_enough(self._reductions[0]):
            small = compacted(self._banks[0], self._recycled)
        if small is None:
            self._settle()
        groups: list[list[Collected[Site]]] = [
            [small] if small is not None and place == 0 else [*bank.collect(device)]
            for place, bank in enumerate(self._banks)
        ]
        left_out = [frozenset(sites) for sites in self._left_out]
        return Snapshot(
            tuple(names),
            groups,
            left_out,
            kinds=dict(self._kinds),
            calls=dict(self._calls),
            users=[states.snapshot() for states in self._users],
            warned=self._warned,
            strict=self.strict,
        )

    def _settle(self) -> None:
        """Move each site from the shared rows to a permanent row."""
        for site, state in self._recycled.states():
            self._banks[0].put(site, state)
        self._recycled.reset()

    @torch.no_grad()
    def saved(self) -> tuple[list[Any], dict[Site, int]]:
        """Return a copy of all states on their devices, for :meth:`restore`."""
        self._settle()
        return [each.saved() for each in self._stores], dict(self._calls)

    @torch.no_grad()
    def restore(self, saved: tuple[list[Any], dict[Site, int]]) -> None:
        """Restore the states from :meth:`saved`."""
        banks, calls = saved
        self._calls = dict(calls)
        self._recycled.reset()
        for store, states in zip(self._stores, banks, strict=True):
            store.restore(states)

    def take_ms_of_options(self) -> dict[str, float]:
        """Return the host time of each option since the last call or reset, in milliseconds."""
        found = {name: watch.take_ms() for name, watch in self.times.items()}
        return {name: spent for name, spent in found.items() if spent}

    @torch.no_grad()
    def reset(self) -> None:
        """Discard the recorded statistics."""
        self._calls.clear()
        self._recycled.reset()
        self._again = 0
        self.times.clear()
        for store in self._stores:
            store.reset()

    @torch.no_grad()
    def reset_all(self) -> None:
        """Discard the recorded statistics, including states that :meth:`reset` keeps."""
        self.restore(([*([] for _ in self._banks), *({} for _ in self._users)], {}))

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the states as plain Python objects and CPU tensors. Recording continues bit-exactly after a reload."""
        self._settle()
        return {
            "banks": [bank.state_dict() for bank in self._banks],
            "left_out": [[list(site) for site in sorted(sites)] for sites in self._left_out],
            "calls": [[*site, number] for site, number in self._calls.items()],
            **({"users": [states.state_dict() for states in self._users]} if self._users else {}),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], device: torch.device) -> None:
        """Load states.

        Args:
            state_dict: The result of :meth:`state_dict`.
            device: The device for the states that were not on a CPU.

        Raises:
            ArgumentError: If the states belong to other reductions.
        """
        banks = state_dict.get("banks")
        # Earlier versions had no spread and no scores.
        if not isinstance(banks, list) or len(banks) not in (
            self._extra_places.stop,
            self._scores[0],
            len(self._banks),
        ):
            raise ArgumentError("the saved state has other reductions")
        for bank, rows in zip(self._banks, banks, strict=False):
            bank.load_state_dict(rows, lambda key: Site(*key), device)
        for left_out, sites in zip(self._left_out, state_dict["left_out"], strict=False):
            left_out.update(Site(*site) for site in sites)
        for states, rows in zip(self._users, state_dict.get("users", ()), strict=True):
            states.load_state_dict(rows)
        self._calls.update((Site(name, path), int(number)) for name, path, number in state_dict.get("calls", ()))
