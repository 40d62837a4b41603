"""Compare values that should be equal on all ranks: parameters, gradients, buffers, optimizer states and settings."""

from __future__ import annotations

import pickle
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_recorder.insight import Finding
from lightning_recorder.insight.finding import RANKS_DIFFER, RankStrip
from lightning_recorder.insight.rules.ranks import (
    NEXT_AFTER,
    NEXT_ALL,
    NEXT_BUFFERS,
    NEXT_NO_SYNC,
    NEXT_OWN_BUFFERS,
    NEXT_SETTINGS,
    NEXT_SOME,
    NEXT_STEPS,
    NEXT_UNKNOWN,
    WHY_AFTER,
    WHY_ALL,
    WHY_BUFFERS,
    WHY_GRADIENTS,
    WHY_NO_SYNC,
    WHY_OWN_BUFFERS,
    WHY_SOME,
    WHY_UNKNOWN,
    listed,
)
from lightning_recorder.internals.data_parallel import averaged_parameters, has_no_sync
from lightning_recorder.internals.module_tree import named_buffers_of, named_parameters_of
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.names import RUNNING_STATISTICS
from lightning_recorder.statistics import PendingMerge
from lightning_recorder.statistics.fingerprint import exact_checksum, signed_sums

__all__ = ["Differences", "ReplicaValues", "Replicas", "WatchedRanks", "compare_replicas", "finding_of_differences"]

_FIRST_STEPS = (1, 3, 10, 30, 100, 300)
_EVERY = 1000
_SUMS = 8  # the number of signed sums of a tensor, from which its difference between ranks is estimated
_MOST_LISTED = 8  # the maximum number of ranks that are listed for a group
_MOST_COLUMNS, _MOST_ROWS = 96, 64  # the maximum numbers of tensors and ranks in the strip
_ENOUGH_COLUMNS = 40  # if fewer tensors differ, the strip also shows some equal tensors
_KINDS = ("parameter", "gradient", "buffer", "state", "setting")


class _Tensor(NamedTuple):
    name: str
    kind: str
    """``"parameter"``, ``"gradient"``, ``"buffer"``, or ``"state"`` or ``"setting"`` of an optimizer."""
    values: Tensor
    part: int
    """The number of the shard. Only shards with the same number are compared."""


class _About(NamedTuple):
    names: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    has_no_sync: bool = False
    """True if ``no_sync`` was active after the step."""
    unknown: frozenset[str] = frozenset()
    """The parameters whose gradients DDP did not average."""


@dataclass(frozen=True)
class ReplicaValues:
    """The checksums of one rank, as sent to the first rank."""

    rank: int
    # A checksum of the name of each tensor, ``[tensors]``. Only tensors of the same name are compared.
    names: NDArray[np.uint32]
    parts: NDArray[np.int32]  # the number of the shard of each tensor, ``[tensors]``
    numbers: NDArray[np.int64]  # the checksum of each tensor, ``[tensors]`` int64
    # the ``signed_sums`` of each tensor, ``[tensors, 8]`` float32; for a setting, the first number is its value
    values: NDArray[np.float32]


class _Arriving:
    """The numbers of a rank during their copy from the device. Pickling, in a background thread, waits for it."""

    def __init__(
        self, rank: int, names: NDArray[np.uint32], parts: Sequence[int], numbers: Tensor, values: Tensor
    ) -> None:
        self._about = rank, names, np.array(parts, dtype=np.int32)
        self._event: Any = None
        self._hosts = [numbers, values]
        if numbers.device.type in ("cuda", "xpu"):
            pinned = partial(torch.empty, pin_memory=True, device="cpu")
            self._hosts = [pinned(each.shape, dtype=each.dtype) for each in (numbers, values)]
            for host, tensor in zip(self._hosts, (numbers, values), strict=True):
                host.copy_(tensor, non_blocking=True)
            self._event = torch.get_device_module(numbers.device).Event()
            self._event.record()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._event is not None:
            self._event.synchronize()
        numbers, values = (each.cpu().numpy() for each in self._hosts)
        return ReplicaValues, (*self._about, numbers, values)


class Replicas:
    """Computes the checksums of one rank."""

    def __init__(
        self, module: nn.Module, optimizers: Iterable[Any], rank: int, wrapper: Callable[[], object] = lambda: None
    ) -> None:
        self._module, self._optimizers, self._rank = module, list(optimizers), rank
        self._wrapper = wrapper
        self.about = _About()
        """The facts about the latest checksums."""

    @torch.no_grad()
    def values(self, *, has_stepped: bool = True) -> object:
        """Return the checksums as an object that unpickles as :class:`ReplicaValues`. Does not wait for the device.

        Args:
            has_stepped: False if no optimizer has stepped. The gradients are then left out, since they are not averaged
                yet.
        """
        with pause_recording():
            self.about = _About()
            found, wrapper = list(self._tensors(has_gradients=has_stepped)), self._wrapper()
            known = averaged_parameters(wrapper)
            parameters = () if known is None else named_parameters_of(self._module)
            self.about = latest = _About(
                tuple(each.name for each in found),
                tuple(each.kind for each in found),
                has_stepped and has_no_sync(wrapper),
                frozenset(name for name, each in parameters if known is not None and id(each) not in known),
            )
            device = next((each.values.device for each in found), torch.device("cpu"))
            numbers = [exact_checksum(each.values).to(device) for each in found]
            values = [signed_sums(each.values, _SUMS).to(device) for each in found]
            about = self._rank, _checksums(latest.names)
            if not found:
                parts, numbers_of, values_of = np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.float32)
                return ReplicaValues(about[0], about[1], parts, numbers_of, values_of)
            return _Arriving(*about, [each.part for each in found], torch.stack(numbers), torch.stack(values))

    def _tensors(self, *, has_gradients: bool) -> Iterator[_Tensor]:
        names: dict[int, str] = {}
        for name, each in named_parameters_of(self._module):
            names[id(each)] = name
            yield from _made(name, "parameter", each)
            if has_gradients and each.grad is not None:
                yield from _made(f"{name}.grad", "gradient", each.grad)
        for name, buffer in named_buffers_of(self._module):
            yield from _made(name, "buffer", buffer)
        for number, optimizer in enumerate(self._optimizers):
            where = f" of optimizer {number}" if len(self._optimizers) > 1 else ""
            for place, group in enumerate(optimizer.param_groups):
                for key, value in _settings(group):
                    yield _Tensor(f"{key} of group {place}{where}", "setting", value, 0)
                for parameter in group["params"]:
                    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
                    for key in sorted(state, key=str):
                        if isinstance(state[key], Tensor) and id(parameter) in names:
                            yield from _made(f"{names[id(parameter)]}.{key}", "state", state[key])


def _settings(group: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the numeric settings of a parameter group, such as ``lr`` and ``betas[1]``."""
    for key in sorted(key for key in group if key != "params"):
        several = isinstance(group[key], (tuple, list))
        for place, value in enumerate(group[key] if several else [group[key]]):
            name = f"{key}[{place}]" if several else key
            if type(value) is Tensor and value.numel() == 1:
                yield name, value.detach()
            elif isinstance(value, (int, float)):
                yield name, torch.tensor(value, dtype=torch.float64, device="cpu")


def _checksums(names: Sequence[str]) -> NDArray[np.uint32]:
    return np.array([zlib.crc32(each.encode()) for each in names], dtype=np.uint32)


def _made(name: str, kind: str, tensor: Tensor) -> Iterator[_Tensor]:
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)
    local = getattr(tensor, "_local_tensor", tensor).detach()
    part = 0
    if mesh is not None and placements is not None:
        place = mesh.get_coordinate()
        if place is None:
            return
        for index, size, each in zip(place, mesh.shape, placements, strict=True):
            part = part * size + (
                0 if each.is_replicate() else index
            )  # is_shard() is False for the shards of FSDP2 × TP
        if any(each.is_partial() for each in placements):
            return
    is_plain = type(local) is Tensor or isinstance(local, nn.Parameter)
    if is_plain and local.layout is torch.strided and not local.is_meta and not local.is_quantized:
        yield _Tensor(name, kind, local, part)


@dataclass(frozen=True)
class Differences:
    """The tensors that differ between ranks.

    Args:
        ranks: The number of compared ranks.
        names: The names of the differing tensors by kind.
        counts: The number of compared tensors by kind.
        distance: The largest relative difference of a parameter, or else of another tensor: the root mean square of the
            difference divided by the root mean square of the values. Both are estimated from the signed sums.
        groups: The ranks in groups of equal values, for the first tensor that differs.
        settings: The settings of the optimizers that differ, with their values.
        idle: The ranks whose optimizers lack a state for the differing parameters, although other ranks have one.
        steps: Each rank with the step count of its optimizer, if the counts differ.
        strip: The distances of all ranks; None if nothing differs.
    """

    ranks: int
    names: Mapping[str, tuple[str, ...]]
    counts: Mapping[str, int]
    distance: float
    groups: tuple[tuple[int, ...], ...]
    settings: tuple[str, ...] = ()
    idle: tuple[int, ...] = ()
    steps: tuple[tuple[int, int], ...] = ()
    strip: RankStrip | None = None

    def __bool__(self) -> bool:
        return any(self.names[kind] for kind in ("parameter", "state", "buffer"))


class _Column(NamedTuple):
    """A tensor that differs between ranks: the group and the distance of each rank, as in a ``RankStrip``."""

    groups: NDArray[np.int64]
    distances: NDArray[np.float64]
    first: tuple[tuple[int, ...], ...]
    """The indices of the ranks in groups of equal values, for the first shard that differs."""


def compare_replicas(names: Sequence[str], kinds: Sequence[str], ranks: Sequence[ReplicaValues]) -> Differences:
    """Compare the checksums of ranks."""
    about, columns = _checksums(names), dict[int, _Column]()
    # A rank with states that the first rank lacks is not idle: an optimizer may keep each state on one rank only.
    gradients = _checksums([f"{name}.grad" for name, kind in zip(names, kinds, strict=True) if kind == "parameter"])
    without_own = {each.rank for each in ranks if np.isin(each.names, [*about, *gradients]).all()}
    ranks = [_aligned(each, about) for each in ranks]
    parts = np.zeros((0, len(names)), np.int32)
    if len(ranks) > 1 and names:
        numbers, parts = np.stack([each.numbers for each in ranks]), np.stack([each.parts for each in ranks])
        # Most tensors are equal on all ranks. Only the other tensors are compared in detail.
        for place in np.flatnonzero((numbers != numbers[0]).any(0)).tolist():
            values = np.stack([each.values[place] for each in ranks])
            column = _column(numbers[:, place], parts[:, place], values)
            if column.first:
                columns[place] = column
    compared = [kind for kind, several in zip(kinds, (parts >= 0).sum(0) > 1, strict=False) if several]
    differing = {kind: [at for at in columns if kinds[at] == kind] for kind in _KINDS}
    first: list[int] = next((differing[kind] for kind in ("parameter", "state", "buffer") if differing[kind]), [])
    states = [at for at, kind in enumerate(kinds) if kind == "state"]
    own = tuple(f"{names[at]}." for at in differing["parameter"])
    states = [at for at in states if names[at].startswith(own)] or states
    counted = next((at for at in differing["state"] if names[at].endswith(".step")), None)
    return Differences(
        len(ranks),
        {kind: tuple(names[at] for at in places) for kind, places in differing.items()},
        {kind: sum(each == kind for each in compared) for kind in differing},
        max((float(columns[at].distances.max()) for at in first), default=0.0),
        tuple(tuple(ranks[at].rank for at in same) for same in columns[first[0]].first) if first else (),
        tuple(_values_of(names[at], ranks, at) for at in differing["setting"]),
        tuple(each.rank for each in ranks if states and each.rank in without_own and (each.parts[states] < 0).all()),
        () if counted is None else tuple((each.rank, int(each.values[counted, 0])) for each in ranks),
        _strip(names, kinds, [each.rank for each in ranks], parts, columns) if columns else None,
    )


def _aligned(values: ReplicaValues, names: NDArray[np.uint32]) -> ReplicaValues:
    """Return the values of a rank in the order of ``names``. A tensor that the rank lacks gets the shard -1."""
    if np.array_equal(values.names, names):
        return values
    known = {name: place for place, name in enumerate(values.names.tolist())}
    places = np.array([known.get(name, -1) for name in names.tolist()], dtype=np.int64)
    found = ReplicaValues(
        values.rank,
        names,
        np.full(len(names), -1, np.int32),
        np.zeros(len(names), np.int64),
        np.zeros((len(names), _SUMS), np.float32),
    )
    for own, other in ((found.parts, values.parts), (found.numbers, values.numbers), (found.values, values.values)):
        own[places >= 0] = other[places[places >= 0]]
    return found


def _values_of(name: str, ranks: Sequence[ReplicaValues], place: int) -> str:
    """Return the text for a setting and its values, such as ``"lr of group 0: 0.1 (rank 0), 0.01 (rank 1)"``."""
    found: dict[str, list[str]] = {}
    for each in ranks:
        if each.parts[place] >= 0:
            found.setdefault(f"{each.values[place, 0]:.6g}", []).append(str(each.rank))
    several = [f"{value} (rank{'s' * (len(places) > 1)} {', '.join(places[:8])})" for value, places in found.items()]
    return f"{name}: {', '.join(several[:4])}"


def _column(numbers: NDArray[np.int64], parts: NDArray[np.int32], values: NDArray[np.float32]) -> _Column:
    """Group the ranks by equal checksums, separately for each shard, and measure their distances."""
    column = _Column(np.zeros(len(numbers), np.int64), np.zeros(len(numbers)), ())
    for part in np.unique(parts[parts >= 0]).tolist():
        members = np.flatnonzero(parts == part)
        same: dict[int, list[int]] = {}
        for place in members.tolist():
            same.setdefault(int(numbers[place]), []).append(place)
        if len(same) < 2:
            continue
        column = column._replace(first=column.first or tuple(map(tuple, same.values())))
        largest = max(same.values(), key=len)
        for number, places in enumerate([largest, *(each for each in same.values() if each is not largest)]):
            column.groups[places] = number
        wide = values[members].astype(np.float64)
        with np.errstate(all="ignore"):
            # The size is the mean over all members, because the sums of a single member may be small by chance.
            size, most = np.sqrt(np.nanmean((wide**2).sum(1))), np.sqrt(((wide - values[largest[0]]) ** 2).sum(1))
            far = most / size if size > 0 else np.zeros(len(members))
        column.distances[members] = np.where(np.isfinite(most), far, np.inf)
        column.distances[largest] = 0
    return column


def _strip(
    names: Sequence[str],
    kinds: Sequence[str],
    ranks: Sequence[int],
    parts: NDArray[np.int32],
    columns: Mapping[int, _Column],
) -> RankStrip:
    """Return a strip of as many tensors and ranks as fit. Differing tensors and ranks have priority."""
    equal = _Column(np.zeros(len(ranks), np.int64), np.zeros(len(ranks)), ())
    tensors = [at for at, kind in enumerate(kinds) if kind != "setting"]
    differing = [at for at in tensors if at in columns]
    limit = max(_ENOUGH_COLUMNS, min(_MOST_COLUMNS, len(differing)))
    shown = [*differing, *(at for at in tensors if at not in columns)][:limit]
    shown.sort(key=lambda at: (_KINDS.index(kinds[at]), at))
    others = sum((each.groups > 0).astype(int) for each in columns.values())
    rows = np.sort(np.argsort(-others, kind="stable")[:_MOST_ROWS])
    found = [columns.get(at, equal) for at in shown]
    return RankStrip(
        tuple(ranks[at] for at in rows),
        tuple(names[at] for at in shown),
        tuple(kinds[at] for at in shown),
        tuple(tuple(parts[rows, at].tolist()) for at in shown),
        tuple(tuple(each.groups[rows].tolist()) for each in found),
        tuple(tuple(float(f"{far:.3g}") for far in each.distances[rows]) for each in found),
        len(tensors),
    )


def finding_of_differences(
    found: Differences,
    step: int,
    equal: int | None,
    *,
    has_no_sync: bool = False,
    unknown: frozenset[str] = frozenset(),
) -> Finding:
    """Return the finding about tensors that differ between ranks after a number of steps.

    ``equal`` is the step of the last comparison in which all tensors were equal. ``has_no_sync`` is True if ``no_sync``
    was active after the step. ``unknown`` has the parameters whose gradients DDP does not average.
    """
    parameters, states, buffers = (found.names[kind] for kind in ("parameter", "state", "buffer"))
    first = next(names for names in (parameters, states, buffers) if names)[0]
    is_all = len(parameters) == found.counts["parameter"]
    if parameters:
        what = f"all {len(parameters)} parameters" if is_all else listed(list(parameters))
    elif states:
        noun = "state" if len(states) == 1 else "states"
        what = f"the optimizer {noun} {listed(list(states)).replace('more parameters', 'more')}"
    else:
        noun = "buffer" if len(buffers) == 1 else "buffers"
        what = f"the {noun} {listed(list(buffers)).replace('more parameters', 'more')}"
    verb = "differs" if len(parameters or states or buffers) == 1 else "differ"
    verdict = f"{what} {verb} between the {found.ranks} ranks after step {step}"
    verdict += "" if equal is None else f", and all were equal after step {equal}"
    who = _groups(found)
    count = "one optimizer state" if len(states) == 1 else f"{len(states)} optimizer states"
    more = f"; so {'does' if len(states) == 1 else 'do'} {count}" if parameters and states else ""
    is_note = not parameters and not states
    why, following = _cause(found, is_note=is_note)
    numbers = {f"{kind}s": float(len(names)) for kind, names in found.names.items() if names}
    compared = found.counts["gradient"]
    numbers |= {"compared_gradients": float(compared)} if compared else {}
    numbers |= {"idle": float(len(found.idle))} if found.idle else {}
    numbers |= {"step_counts": float(len({count for _, count in found.steps}))} if found.steps else {}
    if has_no_sync and (found.names["gradient"] or not found.counts["gradient"]):  # a loop may clear gradients at once
        why, following = WHY_NO_SYNC, NEXT_NO_SYNC
        numbers["no_sync"] = 1.0
    elif parameters and set(parameters) <= unknown:
        why, following = WHY_UNKNOWN, NEXT_UNKNOWN
        numbers["not_averaged"] = float(len(parameters))
    return Finding(
        rule=RANKS_DIFFER,
        severity="note" if is_note else "critical",
        module=_module_of(first, is_state=not parameters and bool(states)),
        path="",
        first_step=step,
        last_step=step,
        records=1,
        verdict=f"{verdict}; {_distance(found.distance, several=verb == 'differ')}{who}{more}",
        why=why,
        next=following,
        usual="equal on all ranks after each step",
        numbers={
            "distance": found.distance,
            **numbers,
            "ranks": float(found.ranks),
        },
        strip=None if found.strip is None else replace(found.strip, step=step),
    )


def _distance(distance: float, *, several: bool) -> str:
    if distance == 0:  # for example, if only the sign of a zero differs
        return "the difference is too small to be measured"
    if not np.isfinite(distance):
        return "a value that is not finite is among them"
    return f"the {'largest ' * several}distance is about {distance:.2g} × the rms of the values"


def _groups(found: Differences) -> str:
    """Return the groups of ranks with equal values as text."""
    if len(found.groups) == found.ranks:
        return "; each rank has values of its own" if found.ranks > 2 else ""
    groups = sorted(found.groups, key=len)
    if len(groups) > 2:
        return f"; the values of these are equal: {'; '.join(map(_ranks, groups))}"
    verb = "differs" if len(groups[0]) == 1 else "differ"
    has = "has" if len(groups[1]) == 1 else "have"
    shard = f", which {has} the same shard" if sum(map(len, groups)) < found.ranks else ""
    return f"; {_ranks(groups[0])} {verb} from {_ranks(groups[1])}{shard}"


def _ranks(group: Sequence[int]) -> str:
    """Return the ranks of a group as text."""
    more = f" and {len(group) - _MOST_LISTED} more" if len(group) > _MOST_LISTED else ""
    return f"rank{'s' * (len(group) > 1)} {', '.join(map(str, group[:_MOST_LISTED]))}{more}"


def _cause(found: Differences, *, is_note: bool) -> tuple[str, str]:
    """Return the usual cause that fits the measured values, and the advice."""
    if is_note:
        is_usual = all(name.rpartition(".")[2] in RUNNING_STATISTICS for name in found.names["buffer"])
        return (WHY_BUFFERS, NEXT_BUFFERS) if is_usual else (WHY_OWN_BUFFERS, NEXT_OWN_BUFFERS)
    if found.settings:
        return f"The optimizers have other settings: {'; '.join(found.settings[:3])}.", NEXT_SETTINGS
    if found.idle:
        where = f"on {_ranks(found.idle)}"
        return (
            f"The optimizer has no state of them {where}, so it has not stepped them there.",
            "Call optimizer.step() on all ranks, and give it the same parameters.",
        )
    if found.steps:
        counts = ", ".join(f"{count} (rank {rank})" for rank, count in found.steps[:8])
        return f"The optimizer has counted other numbers of steps: {counts}.", NEXT_STEPS
    gradients = len(found.names["gradient"])
    if gradients and gradients == found.counts["gradient"] > 1:
        return WHY_ALL, NEXT_ALL
    if found.counts["gradient"] and not gradients:
        return WHY_AFTER, NEXT_AFTER
    changed = {f"{name}.grad" for name in found.names["parameter"]}
    if changed and changed <= {*found.names["gradient"]}:
        return WHY_GRADIENTS, NEXT_SOME
    return WHY_SOME, NEXT_SOME


def _module_of(name: str, *, is_state: bool) -> str:
    owner = name.rpartition(".")[0] if is_state else name
    return owner.rpartition(".")[0]


class WatchedRanks:
    """Compares the ranks of one fit at intervals, in the background.

    ``submit`` begins to send an object to the first rank, and returns the pending merge. ``report`` receives the
    finding on the first rank. Without ``every``, the ranks are compared after 1, 3, 10, 30, 100, 300, and then every
    1,000 steps.
    """

    def __init__(
        self,
        replicas: Replicas,
        submit: Callable[[object], PendingMerge],
        report: Callable[[Finding], object],
        every: int | None,
    ) -> None:
        self._replicas, self._submit, self._report, self._every = replicas, submit, report, every
        self._steps = 0  # the number of steps in this fit
        self._pending: deque[tuple[PendingMerge, int, _About]] = deque()
        self._equal: int | None = None
        self._found: Finding | None = None

    def end_step(self, step: int, *, has_stepped: bool = True) -> None:
        """End a step. Must be called equally often on every rank.

        Args:
            step: The number of steps of the run so far.
            has_stepped: False if no optimizer stepped on this rank. Its gradients may then differ from other ranks.
        """
        self._steps += 1
        self._take()
        if not self._is_due():
            return
        value: object = None
        try:
            value = self._replicas.values(has_stepped=has_stepped)
        finally:  # send None after an error, or the first rank would mistake a later object for this one
            # A rank that has left the loop never sends its values, so only the channel waits, not the training.
            self._pending.append((self._submit(value), step, self._replicas.about))

    def _is_due(self) -> bool:
        if self._every is None:
            return self._steps in _FIRST_STEPS or self._steps % _EVERY == 0
        return self._steps == 1 or (self._every > 0 and self._steps % self._every == 0)

    def end(self) -> None:
        """Wait for the last comparison."""
        self._take(wait=True)

    def _take(self, *, wait: bool = False) -> None:
        while self._pending and (wait or self._pending[0][0].is_done):
            pending, step, about = self._pending.popleft()
            values = [pickle.loads(each) for each in pending.result().values]
            found = compare_replicas(about.names, about.kinds, values)
            if found.ranks < 2:  # the other ranks could not be reached
                continue
            if not found:
                self._equal = step
                continue
            finding = finding_of_differences(
                found, step, self._equal, has_no_sync=about.has_no_sync, unknown=about.unknown
            )
            if self._found is None or (self._found.is_note and not finding.is_note):
                self._found = finding
                self._report(finding)
