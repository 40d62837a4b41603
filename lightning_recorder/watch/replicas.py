"""Compares what should be equal on all ranks: parameters, buffers and the states of the optimizer."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_recorder.insight import Finding
from lightning_recorder.insight.finding import RANKS_DIFFER
from lightning_recorder.insight.rules.ranks import (
    NEXT_ALL,
    NEXT_BUFFERS,
    NEXT_SOME,
    WHY_ALL,
    WHY_BUFFERS,
    WHY_SOME,
    listed,
)
from lightning_recorder.internals.module_tree import named_buffers_of, named_parameters_of
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.statistics import PendingMerge
from lightning_recorder.statistics.fingerprint import exact_checksum

__all__ = ["Differences", "ReplicaValues", "Replicas", "WatchedRanks", "compare_replicas", "finding_of_differences"]

_FIRST_STEPS = (1, 10, 100)
_EVERY = 1000
_VALUES = 8  # of a tensor, to say how far it differs


class _Tensor(NamedTuple):
    name: str
    kind: str
    """``"parameter"``, ``"buffer"`` or ``"state"``."""
    values: Tensor
    part: int
    """The number of the shard. Only equal shards are compared."""


@dataclass(frozen=True)
class ReplicaValues:
    """The checksums of one rank, as they are sent.

    Args:
        rank: The rank.
        names: A checksum of the names of the tensors. Ranks with other tensors are not compared.
        parts: The number of the shard of each tensor, ``[tensors]``.
        numbers: The checksum of each tensor, ``[tensors]`` int64.
        values: Some values of each tensor, ``[tensors, 8]`` float32, the last one repeated in short tensors.
    """

    rank: int
    names: int
    parts: NDArray[np.int32]
    numbers: NDArray[np.int64]
    values: NDArray[np.float32]


class _Arriving:
    """The numbers of a rank on their way from the device. A background thread pickles it and waits for them."""

    def __init__(self, rank: int, names: int, parts: Sequence[int], numbers: Tensor, values: Tensor) -> None:
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
    """Computes the checksums of one rank.

    Args:
        module: The model.
        optimizers: Its optimizers.
        rank: The rank.
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Any], rank: int) -> None:
        self._module, self._optimizers, self._rank = module, list(optimizers), rank
        self.names: tuple[str, ...] = ()
        """The names of the tensors of the latest checksums."""
        self.kinds: tuple[str, ...] = ()
        """Their kinds."""

    @torch.no_grad()
    def values(self) -> object:
        """Return the checksums, as an object whose pickle is that of :class:`ReplicaValues`. Waits for no device."""
        with pause_recording():
            found = list(self._tensors())
            self.names, self.kinds = tuple(each.name for each in found), tuple(each.kind for each in found)
            device = next((each.values.device for each in found), torch.device("cpu"))
            numbers = [exact_checksum(each.values).to(device) for each in found]
            values = [_some(each.values).to(device) for each in found]
            about = self._rank, zlib.crc32("\n".join(self.names).encode())
            if not found:
                parts, numbers_of, values_of = np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.float32)
                return ReplicaValues(about[0], about[1], parts, numbers_of, values_of)
            return _Arriving(*about, [each.part for each in found], torch.stack(numbers), torch.stack(values))

    def _tensors(self) -> Iterator[_Tensor]:
        names: dict[int, str] = {}
        for name, each in named_parameters_of(self._module):
            names[id(each)] = name
            yield from _made(name, "parameter", each)
        for name, buffer in named_buffers_of(self._module):
            yield from _made(name, "buffer", buffer)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
                    for key in sorted(state, key=str):
                        if isinstance(state[key], Tensor) and id(parameter) in names:
                            yield from _made(f"{names[id(parameter)]}.{key}", "state", state[key], like=parameter)


def _made(name: str, kind: str, tensor: Tensor, like: Tensor | None = None) -> Iterator[_Tensor]:
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


def _some(tensor: Tensor) -> Tensor:
    """Return eight values at regular distances."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    if not flat.numel():
        return torch.zeros(_VALUES, device=tensor.device)
    step = max(1, flat.numel() // _VALUES)
    found = flat[::step][:_VALUES].to(torch.float32)
    return torch.cat([found, found[-1:].expand(_VALUES - len(found))])


@dataclass(frozen=True)
class Differences:
    """The tensors that differ between ranks.

    Args:
        ranks: The number of compared ranks.
        names: The names of the tensors by their kind.
        counts: The number of compared tensors by their kind.
        distance: The largest difference of a compared value of a parameter, or else of any tensor, relative to the root
            mean square of the compared values of its tensor.
        groups: The ranks in groups of equal values, for the first tensor that differs.
    """

    ranks: int
    names: Mapping[str, tuple[str, ...]]
    counts: Mapping[str, int]
    distance: float
    groups: tuple[tuple[int, ...], ...]

    def __bool__(self) -> bool:
        return any(self.names.values())


def compare_replicas(names: Sequence[str], kinds: Sequence[str], ranks: Sequence[ReplicaValues]) -> Differences:
    """Compare the checksums of ranks.

    Args:
        names: The names of the tensors.
        kinds: Their kinds.
        ranks: The checksums of each rank.
    """
    about = zlib.crc32("\n".join(names).encode())
    ranks = [each for each in ranks if each.names == about]
    differing: dict[str, list[str]] = {kind: [] for kind in ("parameter", "state", "buffer")}
    distances = dict.fromkeys(differing, 0.0)
    groups: tuple[tuple[int, ...], ...] = ()
    if len(ranks) > 1 and names:
        numbers, parts = np.stack([each.numbers for each in ranks]), np.stack([each.parts for each in ranks])
        # Most tensors are equal everywhere, and only the others are looked at.
        for place in np.flatnonzero((numbers != numbers[0]).any(0)).tolist():
            found = [group for group in _groups(numbers[:, place], parts[:, place]) if len(group) > 1]
            if not found:
                continue
            kind = kinds[place]
            differing[kind].append(names[place])
            places = [rank for part in found for same in part for rank in same]
            distances[kind] = max(distances[kind], _distance(np.stack([ranks[each].values[place] for each in places])))
            groups = groups or tuple(tuple(ranks[each].rank for each in same) for same in found[0])
    counts = {kind: sum(each == kind for each in kinds) for kind in differing}
    worst = next((distances[kind] for kind in differing if differing[kind]), 0.0)
    return Differences(len(ranks), {kind: tuple(each) for kind, each in differing.items()}, counts, worst, groups)


def _groups(numbers: NDArray[np.int64], parts: NDArray[np.int32]) -> list[list[list[int]]]:
    """Return for each shard the ranks with equal numbers."""
    found: dict[int, dict[int, list[int]]] = {}
    for place, (number, part) in enumerate(zip(numbers.tolist(), parts.tolist(), strict=True)):
        found.setdefault(part, {}).setdefault(number, []).append(place)
    return [list(each.values()) for each in found.values()]


def _distance(values: NDArray[np.float32]) -> float:
    """Return the largest difference from the first rank relative to the root mean square."""
    with np.errstate(all="ignore"):
        wide = values.astype(np.float64)
        size = np.sqrt(np.nanmean(wide**2))
        most = np.abs(wide - wide[0]).max()
    return float(most / size) if size > 0 and np.isfinite(most) else float("inf") if not np.isfinite(most) else 0.0


def finding_of_differences(found: Differences, step: int, equal: int | None) -> Finding:
    """Return the finding about tensors that differ between ranks.

    Args:
        found: The tensors that differ.
        step: The number of steps after which they were compared.
        equal: The same for the last comparison in which all were equal, if there was one.
    """
    parameters, states, buffers = (found.names[kind] for kind in ("parameter", "state", "buffer"))
    first = next(names for names in (parameters, states, buffers) if names)[0]
    is_all = len(parameters) == found.counts["parameter"]
    if parameters:
        what = f"all {len(parameters)} parameters" if is_all else listed(list(parameters))
    elif states:
        what = f"the optimizer states {listed(list(states)).replace('more parameters', 'more')}"
    else:
        what = f"the buffers {listed(list(buffers)).replace('more parameters', 'more')}"
    verb = "differs" if len(parameters) == 1 else "differ"
    verdict = f"{what} {verb} between the {found.ranks} ranks after step {step}"
    verdict += "" if equal is None else f", and all were equal after step {equal}"
    far = (
        f"by up to {found.distance:.2g} × their size in the compared values"
        if found.distance
        else (f"not in the {_VALUES} compared values of each")
    )
    groups = found.groups
    if len(groups) == found.ranks:
        who = "each rank has values of its own"
    else:
        who = "equal values have ranks " + " and ranks ".join(", ".join(map(str, each)) for each in groups)
    more = f"; so do {len(states)} optimizer states" if parameters and states else ""
    is_note = not parameters and not states
    why, following = (WHY_ALL, NEXT_ALL) if is_all and parameters else (WHY_SOME, NEXT_SOME)
    return Finding(
        rule=RANKS_DIFFER,
        severity="note" if is_note else "critical",
        module=_module_of(first, is_state=not parameters and bool(states)),
        path="",
        first_step=step,
        last_step=step,
        records=1,
        verdict=f"{verdict}; {far}; {who}{more}",
        why=WHY_BUFFERS if is_note else why,
        next=NEXT_BUFFERS if is_note else following,
        usual="equal on all ranks after each step",
        numbers={
            "distance": found.distance,
            **{f"{kind}s": float(len(names)) for kind, names in found.names.items()},
            "ranks": float(found.ranks),
        },
    )


def _module_of(name: str, *, is_state: bool) -> str:
    owner = name.rpartition(".")[0] if is_state else name
    return owner.rpartition(".")[0]


class WatchedRanks:
    """Compares the ranks of one fit now and then, in the background.

    Args:
        replicas: The checksums of this rank.
        submit: A function that begins to send an object to the first rank, and returns the pending merge.
        report: A function that receives the finding, on the first rank.
        every: The number of steps between two comparisons; None for the steps 1, 10 and 100, and then every 1,000.
    """

    def __init__(
        self,
        replicas: Replicas,
        submit: Callable[[object], PendingMerge],
        report: Callable[[Finding], object],
        every: int | None,
    ) -> None:
        self._replicas, self._submit, self._report, self._every = replicas, submit, report, every
        self._steps = 0  # of this fit
        self._pending: tuple[PendingMerge, int] | None = None
        self._equal: int | None = None
        self._found: Finding | None = None

    def end_step(self, step: int) -> None:
        """End a step. Every rank calls this equally often.

        Args:
            step: The number of steps so far.
        """
        self._steps += 1
        self._take()
        if not self._is_due():
            return
        value: object = None
        try:
            value = self._replicas.values()
        finally:  # otherwise the other ranks would take a later object for this one
            self._take(wait=True)
            self._pending = self._submit(value), step

    def _is_due(self) -> bool:
        if self._every is None:
            return self._steps in _FIRST_STEPS or self._steps % _EVERY == 0
        return self._steps == 1 or (self._every > 0 and self._steps % self._every == 0)

    def end(self) -> None:
        """Wait for the last comparison."""
        self._take(wait=True)

    def _take(self, *, wait: bool = False) -> None:
        if self._pending is None or not (wait or self._pending[0].is_done):
            return
        (pending, step), self._pending = self._pending, None
        values = [pickle.loads(each) for each in pending.result().values]
        found = compare_replicas(self._replicas.names, self._replicas.kinds, values)
        if not found.ranks:
            return
        if not found:
            self._equal = step
            return
        finding = finding_of_differences(found, step, self._equal)
        if self._found is None or (self._found.is_note and not finding.is_note):
            self._found = finding
            self._report(finding)
