"""The merging of recorded states across ranks."""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_recorder.errors import describe_error, warn
from lightning_recorder.internals.garbage_collection import RareCollections
from lightning_recorder.statistics.packing import Contribution, Key
from lightning_recorder.statistics.rank_channel import WAIT_S, RankChannel
from lightning_recorder.statistics.recorder import BaseStatisticsRecorder
from lightning_recorder.statistics.snapshot import Snapshot
from lightning_recorder.statistics.user_states import UserSnapshot, merge_snapshots
from lightning_recorder.taps import Site

__all__ = ["Exchange", "Merged", "PendingMerge", "RankMergingRecorder"]


@dataclass(frozen=True)
class Merged:
    """The result of a merge.

    Args:
        snapshot: On rank zero, the merged states of all ranks on the CPU, or ``None`` if nothing was recorded. ``None``
            on the other ranks.
        absent: The ranks without states, because their recorder has failed or because they could not be reached.
        ranks: The number of merged ranks.
        values: On rank zero, the pickled objects of the ranks in rank order.
    """

    snapshot: Snapshot | None
    absent: tuple[int, ...] = ()
    ranks: int = 1
    values: tuple[bytes, ...] = ()


class PendingMerge:
    """A merge in the background.

    Args:
        exchange: The exchange that merges the states.
        scope: The origin of the states.
        own: The states of this rank.
        result: A future of the merged states.
    """

    def __init__(self, exchange: Exchange, scope: str, own: Snapshot | None, result: Future[Contribution]) -> None:
        self._exchange, self._scope, self._own, self._future = exchange, scope, own, result

    @property
    def is_done(self) -> bool:
        """True if :meth:`result` does not wait."""
        return self._future.done()

    @property
    def error(self) -> Exception | None:
        """The error that kept the states of this rank out of the merge; None until the merge is done."""
        is_merged = self._future.done() and self._future.exception() is None
        return self._future.result().error if is_merged else None

    def result(self) -> Merged:
        """Wait for the merge and return its result. If the merge fails, return rank zero's own states on rank zero."""
        exchange = self._exchange
        try:
            merged = self._future.result(timeout=WAIT_S)
        except Exception as error:  # noqa: BLE001 - gloo raises RuntimeError, and the wait may time out
            exchange.give_up(error)
            return Merged(self._own if exchange.rank == 0 else None)
        snapshot = None
        if exchange.rank == 0:
            refused = exchange.refused_by(self._scope, merged)
            snapshot = merged.snapshot(self._own, refused)
        values = tuple(merged.values[rank] for rank in sorted(merged.values))
        absent = tuple(sorted(set(merged.absent)))
        return Merged(snapshot, absent, exchange.ranks - len(absent), values)


class Exchange:
    """Merge the states of all ranks on rank zero, in the background.

    All exchanges of a process use one :class:`~lightning_recorder.statistics.rank_channel.RankChannel`. Every rank must
    call the same methods in the same order. A rank whose recorder has failed calls them without states. The ranks may
    have different sites, because a module may run on one rank only. If this rank can no longer communicate,
    :attr:`is_open` becomes False.

    Args:
        device: The device of the model's tensors, for collectives of the training's process group.

    Note:
        ``torch.distributed`` must be initialized. :meth:`agree` and :meth:`from_first` wait for the other ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._device = torch.device("cpu") if dist.get_backend() == "gloo" else device
        self._channel: RankChannel | None = None
        self._refused: dict[str, set[Key]] = {}
        self._has_warned_of_loss = False

    @staticmethod
    def is_needed() -> bool:
        """Return True if there are several processes that can communicate."""
        return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    @property
    def is_open(self) -> bool:
        """True if the ranks have agreed to merge, and this rank can still communicate."""
        return self._channel is not None and self._channel.is_open

    def agree(self, ready: bool, description: str) -> str:
        """Open the channel if all ranks record with the same settings. A collective.

        Args:
            ready: True if this rank records.
            description: A description of what this rank records.

        Returns:
            The reason why the ranks are not merged, or an empty string if they are.
        """
        self.close()
        digest = float(zlib.crc32(description.encode()))
        current = RankChannel.current
        serial = current.serial if current is not None and current.is_open else 0
        facts = torch.tensor([float(ready), digest, float(serial)], dtype=torch.float64, device=self._device)
        answers = self._gather(facts)
        absent = [rank for rank, each in enumerate(answers.tolist()) if not each[0]]
        if absent:
            return f"rank {', '.join(map(str, absent))} does not record"
        if bool((answers[:, :2] != answers[0, :2]).any()):
            return "the ranks record different modules, or with different settings"
        # Opening is a collective, so all ranks must make the same decision.
        is_shared = serial > 0 and bool((answers[:, 2] == serial).all())
        try:
            channel = current if current is not None and is_shared else RankChannel.open()
        except RuntimeError as error:
            return f"their gloo process group cannot be created: {describe_error(error)}"
        channel.users += 1
        self._channel = channel
        return ""

    def submit(
        self, snapshot: Snapshot | None, *, copies: Collection[Site] = (), scope: str = "", value: object = None
    ) -> PendingMerge:
        """Begin to merge the states of all ranks.

        Args:
            snapshot: The states of this rank on the CPU, or ``None`` if its recorder has failed.
            copies: The sites whose states are copies of another rank's states. They are not merged.
            scope: A name for the origin of the states. The same site may have another shape in another scope.
            value: An object to send to rank zero with the states, or None.
        """
        own = partial(Contribution.of, snapshot, self.rank, copies=frozenset(copies), value=value)
        if self._channel is None:
            failed: Future[Contribution] = Future()
            failed.set_exception(ConnectionError("the ranks have not agreed to merge"))
            return PendingMerge(self, scope, snapshot, failed)
        return PendingMerge(self, scope, snapshot, self._channel.submit(scope, own))

    def from_first(self, number: float) -> float:
        """Return the argument of rank zero on every rank. A collective of the channel's process group.

        Raises:
            RuntimeError: If the ranks can no longer communicate.
        """
        if self._channel is None:
            return number
        found = torch.tensor([number], dtype=torch.float64, device="cpu")
        dist.broadcast(found, 0, self._channel.group)
        return float(found)

    def refused_by(self, scope: str, merged: Contribution) -> set[Key]:
        """Return all sites of a scope whose states could not be merged so far, and warn of newly added sites."""
        refused = self._refused.setdefault(scope, set())
        for key, why in merged.refused.items():
            if key not in refused:
                refused.add(key)
                what, _, reason = why.partition(": ")
                warn(f"{what} is not recorded at {key[1].path!r} of module {key[1].name!r}, since {reason}")
        return refused

    def give_up(self, error: Exception) -> None:
        """Stop merging states, and warn on rank zero."""
        if self._channel is not None:
            self._channel.give_up(error)
        if self.rank == 0 and not self._has_warned_of_loss:
            self._has_warned_of_loss = True
            warn(f"the last records are those of rank 0 only: {describe_error(error)}")

    def close(self, *, interrupted: bool = False) -> None:
        """Wait until all merges are done, and close the channel if no other exchange uses it.

        Args:
            interrupted: Wait for a short time only, because the other ranks may not submit the same merges.
        """
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close(interrupted=interrupted)

    def _gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, of shape ``[ranks, *shape]``, on the CPU."""
        answers = [torch.empty_like(tensor) for _ in range(self.ranks)]
        dist.all_gather(answers, tensor)
        return torch.stack(answers).cpu()


class _Contained:
    """A context manager that calls ``take_error`` of a recorder with an exception of its block.

    A recorder reuses one object of this class, because each record enters it several times.
    """

    def __init__(self, recorder: RankMergingRecorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return isinstance(error, Exception) and self._recorder.take_error(error)


class RankMergingRecorder:
    """A recorder that contains its errors and merges its states across ranks.

    After a failure on this rank, the recorder keeps calling the :class:`Exchange` in step with the other ranks, without
    any states.

    Args:
        recorder: The recorder that provides the tensors.
        name: The name of the recorder in warnings.
        exchange: The exchange that merges the ranks, or None if there is only one rank.
        rank: The rank of this process. If ranks are not merged, only rank zero records.
        strict: Raise errors instead of warning and stopping to record.
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
        self.recorder, self.exchange = recorder, exchange
        self.name, self.strict = name, strict
        self.enabled = True
        """False to record nothing. May be changed between two batches."""
        self.failed = False
        """True if recording has stopped because of an error."""
        self._is_first = rank == 0
        self._contained = _Contained(self)
        self._collector, self._clock = RareCollections(), clock
        self._absent_ranks: set[int] = set()  # the absent ranks that a warning has named
        self._pending: list[PendingMerge] = []  # the merges whose errors have not been reported

    @property
    def is_active(self) -> bool:
        """True if this rank records the steps that are due."""
        merges = self.exchange is not None and self.exchange.is_open
        return self.enabled and not self.failed and (self._is_first or merges)

    def contained(self) -> _Contained:
        """Catch errors in a block and stop recording after the first one. Only the first error causes a warning."""
        return self._contained

    def take_error(self, error: Exception) -> bool:
        """Stop recording because of an error. Return True to suppress the error, False to raise it."""
        is_first_error = not self.failed
        self.fail()
        if is_first_error and not self.strict:
            warn(f"{self.name} is off for the rest of the run: {describe_error(error)}")
        return not self.strict

    def fail(self) -> None:
        """Stop recording permanently."""
        self.failed = True
        with suppress(Exception):  # cleanup after a failure may fail, too
            self.recorder.remove()

    def _attach(self) -> None:
        """Register the hooks for a batch, and let the garbage collector run rarely until :meth:`interrupt`."""
        self._collector.hold()
        self.recorder.attach()

    def interrupt(self) -> None:
        """Remove the hooks until the next recorded batch."""
        self._collector.release()
        with self.contained():
            self.recorder.remove()

    def alone(self) -> Merged:
        """Return the states of rank zero without communication, for example after a failure. Empty on other ranks."""
        return Merged(self._snapshot(compact=True) if self._is_first else None)

    def submit(self, scope: str = "") -> PendingMerge | None:
        """Begin to merge the states of all ranks; return None if ranks are not merged.

        Args:
            scope: See :meth:`Exchange.submit`.
        """
        self._report_errors()
        if self.exchange is None or not self.exchange.is_open:
            return None
        scope = f"{self.name} {scope}"
        own = self._snapshot()
        # The results of the user's functions and metrics.
        users = None if own is None or not own.users else [each.payload for each in own.users]
        pending = self.exchange.submit(own, copies=self.recorder.replicated, scope=scope, value=users)
        self._pending.append(pending)
        return pending

    def finished(self, pending: PendingMerge) -> Merged:
        """Wait for a merge, and warn of absent ranks. May be called in any thread."""
        merged = pending.result()
        if merged.snapshot is not None and merged.values:
            merged = replace(merged, snapshot=self._with_users(merged.snapshot, merged.values))
        new = set(merged.absent) - self._absent_ranks
        if new and self._is_first:
            ranks = ", ".join(map(str, sorted(new)))
            warn(f"{self.name}: the records are without rank {ranks}, which has failed or has taken other steps")
        self._absent_ranks |= new
        return merged

    def _with_users(self, merged: Snapshot, values: tuple[bytes, ...]) -> Snapshot:
        """Merge the ranks' results of the user's functions and metrics into the merged snapshot, on rank zero."""
        gathered = [pickle.loads(each) for each in values]
        users: list[UserSnapshot] = []
        with self.contained():
            for place, reduction in enumerate(self.recorder.states.users):
                users.append(merge_snapshots(reduction, [each[place] for each in gathered]))
        return replace(merged, users=users)

    def _report_errors(self) -> None:
        """Report errors that this rank raised in earlier merges. Called in the training thread."""
        done = [each for each in self._pending if each.is_done]
        self._pending = [each for each in self._pending if not each.is_done]
        for error in filter(None, (each.error for each in done)):
            with self.contained():
                raise error

    def _snapshot(self, *, compact: bool = False) -> Snapshot | None:
        snapshot = None
        if not self.failed:
            with self.contained():
                snapshot = self.recorder.states.snapshot(self.recorder.modules, compact=compact)
        return snapshot
