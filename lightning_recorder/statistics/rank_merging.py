"""The merging of recorded states across ranks."""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch import device as Device
from torch import distributed as dist

from lightning_recorder.errors import describe_error, warn
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.statistics.packing import Key, MergedStates, SharedReduction, StatePacking, States
from lightning_recorder.statistics.recorder import BaseStatisticsRecorder
from lightning_recorder.statistics.sites import Snapshot
from lightning_recorder.statistics.user_states import UserSnapshot, merge_snapshots
from lightning_recorder.taps import Site

__all__ = ["Exchange", "Merged", "RankMergingRecorder"]

_FAILED, _UNKNOWN, _SEEN = range(3)  # the indices of the first numbers that a rank sends


@dataclass(frozen=True)
class Merged:
    """The result of an exchange.

    Args:
        snapshot: The merged states of all ranks, on the CPU; ``None`` on the other ranks, and if nothing was recorded.
        numbers: The numbers passed by each rank, of shape ``[ranks][numbers]``.
        absent: The ranks whose recorder has failed.
        ranks: The number of merged ranks.
        error: The error on this rank, if the ranks could nevertheless complete the exchange.
    """

    snapshot: Snapshot | None
    numbers: list[list[float]] = field(default_factory=list)
    absent: tuple[int, ...] = ()
    ranks: int = 1
    error: Exception | None = None


class Exchange:
    """Merge the states of all ranks on rank zero, in two packed transfers.

    The ranks agree on the layout of the transfers: a rank announces new sites to the others before it sends their
    states, so a module that runs on only one rank does not cause a deadlock. Slots that are merged by addition are
    summed across ranks. The others, a few numbers per site, are gathered and merged in rank order.

    Every rank must call the same methods in the same order, even if its recorder has failed; it then sends a failure
    flag and no states. If a transfer itself fails, :attr:`is_open` becomes False and nothing more is sent.

    Args:
        device: The device of the model's tensors, used if the backend communicates between GPUs.

    Note:
        ``torch.distributed`` must be initialized. Every call waits for the other ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cpu") if dist.get_backend() == "gloo" else device
        """The device that the states must be on."""
        self.is_open = True
        """True if the ranks have agreed to merge and no transfer has failed."""
        self._layouts: dict[str, StatePacking] = {}

    @staticmethod
    def is_needed() -> bool:
        """Return True if there are several processes that can communicate."""
        return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def agree(self, ready: bool, description: str) -> str:
        """Find out if all ranks record, and with the same settings.

        Args:
            ready: True if this rank records.
            description: A description of what this rank records.

        Returns:
            The reason for not merging the ranks, or an empty string.
        """
        self.is_open = False
        digest = float(zlib.crc32(description.encode()))
        answers = self._gather(torch.tensor([float(ready), digest], dtype=torch.float64, device=self.device))
        absent = [rank for rank, (is_ready, _) in enumerate(answers.tolist()) if not is_ready]
        if absent:
            return f"rank {', '.join(map(str, absent))} does not record"
        if bool((answers != answers[0]).any()):
            return "the ranks record different modules, or with different settings"
        self.is_open = True
        return ""

    def merge(
        self,
        snapshot: Snapshot | None,
        *,
        copies: Collection[Site] = (),
        numbers: Sequence[float] = (),
        scope: str = "",
    ) -> Merged:
        """Merge the states of all ranks.

        Args:
            snapshot: The states of this rank on :attr:`device`, or ``None`` if its recorder has failed.
            copies: The sites that are copies of another rank's. They are not counted.
            numbers: Numbers to send to the other ranks, the same number on each rank.
            scope: A name for the origin of the states. The same site may have another shape in another scope.

        Raises:
            RuntimeError: If the ranks can no longer communicate.
        """
        with pause_recording(), torch.inference_mode(False), torch.no_grad():
            return self._merge(snapshot, copies, numbers, self._layouts.setdefault(scope, StatePacking()))

    def _merge(
        self, snapshot: Snapshot | None, copies: Collection[Site], numbers: Sequence[float], layout: StatePacking
    ) -> Merged:
        error: Exception | None = None
        while True:
            try:
                own = _states(snapshot)
                unknown = layout.unknown(own)
                skipped = enumerate([] if snapshot is None else snapshot.left_out)
                left_out = {(bank, site) for bank, sites in skipped for site in sites}
                packed = layout.pack(own, self.device, copies=copies, left_out=left_out)
            except Exception as caught:
                if snapshot is None:  # even an empty contribution fails
                    raise
                error, snapshot = caught, None  # the caller reports it; the other ranks must not wait forever
                continue
            header = [float(snapshot is None), float(len(unknown)), float(bool(own)), *numbers]
            head = torch.tensor(header, dtype=torch.float64, device=self.device)
            answers = self._gather(torch.cat([head, packed.gathered])).cpu()
            heads = answers[:, : len(header)].tolist()
            if not any(each[_UNKNOWN] for each in heads):
                break
            self._share_unknown(layout, unknown)
        sent = [each[_SEEN + 1 :] for each in heads]
        absent = tuple(rank for rank, each in enumerate(heads) if each[_FAILED])
        present = self.ranks - len(absent)
        if not any(each[_SEEN] for each in heads):
            return Merged(snapshot if self.rank == 0 else None, sent, absent, present, error)
        with self._closing_on_error():
            dist.reduce(packed.added, dst=0)
        if self.rank != 0:
            return Merged(None, sent, absent, present, error)
        merged = None
        try:
            merged = _snapshot(snapshot, layout.merge(answers[:, len(header) :].unbind(), packed.added.cpu()))
        except Exception as caught:  # noqa: BLE001 - the caller reports it
            error = caught
        return Merged(merged, sent, absent, present, error)

    def _share_unknown(self, layout: StatePacking, unknown: list[tuple[Key, SharedReduction]]) -> None:
        """Send unknown sites to the other ranks."""
        sent: list[list[tuple[Key, SharedReduction]]] = [[] for _ in range(self.ranks)]
        with self._closing_on_error():
            dist.all_gather_object(sent, unknown)
        for (_, site), each in layout.extend(sent):
            if self.rank == 0:
                why = "the tensor has another shape on each rank" if each.reduction else "its class cannot be pickled"
                what = each.described.partition(" ")[0]
                warn(f"{what} is not recorded at {site.path!r} of module {site.name!r}, since {why}")

    def _gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, of shape ``[ranks, *shape]``."""
        answers = [torch.empty_like(tensor) for _ in range(self.ranks)]
        with self._closing_on_error():
            dist.all_gather(answers, tensor)
        return torch.stack(answers)

    def gather_on_first(self, value: object) -> list[Any]:
        """Return the values of all ranks on the first rank, and an empty list on the others.

        A value that cannot be pickled is None.

        Raises:
            RuntimeError: If the ranks can no longer communicate.
        """
        try:
            packed = pickle.dumps(value)
        except Exception as error:  # noqa: BLE001 - pickling an object may raise anything; the other ranks wait
            warn(f"results of rank {self.rank} are not merged, because they cannot be pickled: {describe_error(error)}")
            packed = pickle.dumps(None)
        found: list[Any] = [None] * self.ranks if self.rank == 0 else []
        with self._closing_on_error():
            dist.gather_object(packed, found if self.rank == 0 else None, dst=0)
        return [pickle.loads(each) for each in found]

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """Close the exchange if a transfer in the block fails."""
        try:
            yield
        except BaseException:
            self.is_open = False
            raise


def _states(snapshot: Snapshot | None) -> States:
    """Return the states of a rank by key."""
    return {
        (bank, site): (group.reduction, state)
        for bank, groups in enumerate([] if snapshot is None else snapshot.groups)
        for group in groups
        for site, state in zip(group.keys, group.states, strict=True)
    }


def _snapshot(own: Snapshot | None, merged: MergedStates) -> Snapshot:
    """Return the merged states in the format of this rank's own."""
    banks = [merged.groups.get(bank, []) for bank in range(1 + max(merged.groups, default=0))]
    if own is None:  # this rank has failed, so the order of its sites is unknown
        own = Snapshot((), [], [frozenset()] * len(banks))
    banks += [[]] * (len(own.groups) - len(banks))
    return replace(own, groups=banks, rank_means=merged.rank_means, diverged=merged.diverged)


class RankMergingRecorder:
    """A recorder that contains its errors and merges its states across ranks.

    After a failure on this rank, it keeps calling the :class:`Exchange` in step with the other ranks, without any
    states.

    Args:
        recorder: The recorder that provides the tensors.
        name: The name of the recorder in warnings.
        exchange: The exchange that merges the ranks, or None if there is only one.
        rank: The rank of this process. If ranks are not merged, only rank zero records.
        strict: Raise errors.
        clock: A function that returns the time in seconds.
    """

    def __init__(
        self,
        recorder: BaseStatisticsRecorder,
        *,
        name: str = "the recorder",
        exchange: Exchange | None = None,
        rank: int = 0,
        strict: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.recorder = recorder
        self.name = name
        self.exchange = exchange
        self.strict = strict
        self.enabled = True
        """False to record nothing. May be changed between two batches."""
        self.failed = False
        """True if recording has stopped because of an error."""
        self._is_first = rank == 0
        self._clock = clock
        self._absent_ranks: set[int] = set()  # those that have caused a warning

    @property
    def is_active(self) -> bool:
        """True if this rank records the steps that are due."""
        merges = self.exchange is not None and self.exchange.is_open
        return self.enabled and not self.failed and (self._is_first or merges)

    @contextmanager
    def contained(self) -> Iterator[None]:
        """Catch errors in a block and stop recording after the first one. Only the first error causes a warning."""
        try:
            yield
        except Exception as error:
            is_first_error = not self.failed
            self.fail()
            if self.strict:
                raise
            if is_first_error:
                warn(f"{self.name} is off for the rest of the run: {describe_error(error)}")

    def fail(self) -> None:
        """Stop recording for good."""
        self.failed = True
        with suppress(Exception):  # cleanup after a failure may fail, too
            self.recorder.remove()

    def interrupt(self) -> None:
        """Remove the hooks until the next recorded batch."""
        with self.contained():
            self.recorder.remove()

    def merged(self, *, alone: bool = False, numbers: tuple[float, ...] = (), scope: str = "") -> Merged:
        """Return the states of all ranks, or those of this rank if ranks are not merged.

        Args:
            alone: Do not communicate with other ranks, for example after a failure. Rank zero then returns its own
                states.
            numbers: See :meth:`Exchange.merge`.
            scope: See :meth:`Exchange.merge`.
        """
        exchange = None if alone else self.exchange
        if exchange is None or not exchange.is_open:
            return Merged(self._snapshot("cpu") if self._is_first else None, [list(numbers)])
        own = self._snapshot(exchange.device)
        merged = exchange.merge(own, copies=self.recorder.replicated, numbers=numbers, scope=scope)
        if self.recorder.states.users:  # before an error is raised, because the other ranks wait
            merged = replace(merged, snapshot=self._with_users(exchange, own, merged.snapshot))
        if merged.error is not None:
            with self.contained():
                raise merged.error
        new = set(merged.absent) - self._absent_ranks
        if new and self._is_first:
            warn(f"{self.name}: the records are without rank {', '.join(map(str, sorted(new)))}, which has failed")
        self._absent_ranks |= new
        return merged

    def _with_users(self, exchange: Exchange, own: Snapshot | None, merged: Snapshot | None) -> Snapshot | None:
        """Merge the results of the user's functions and metrics into the snapshot of the first rank."""
        sent = None if own is None else [each.payload for each in own.users]
        gathered = [each for each in exchange.gather_on_first(sent) if each is not None]
        if merged is None or not gathered:
            return merged
        users: list[UserSnapshot] = []
        with self.contained():
            for place, reduction in enumerate(self.recorder.states.users):
                users.append(merge_snapshots(reduction, [each[place] for each in gathered]))
        return replace(merged, users=users)

    def _snapshot(self, device: Device | str) -> Snapshot | None:
        snapshot = None
        if not self.failed:
            with self.contained():
                snapshot = self.recorder.states.snapshot(self.recorder.modules, device)
        return snapshot
