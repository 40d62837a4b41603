"""A background thread that merges the states of all ranks on rank zero, along a tree of ranks."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import distributed as dist
from typing_extensions import Self

from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.internals.threads import compute_alone
from lightning_recorder.statistics.packing import Contribution, Decoder, Encoder

__all__ = ["RankChannel"]

_TAG = 71
_MOST_PENDING = 4  # maximum number of pending merges, each of which holds a copy of the states
WAIT_S = 1800.0
"""The timeout of a background thread that waits for another rank: the default of ``torch.distributed``."""
_END_S = 300.0  # timeout of a training thread that waits for merges at the end of a run
_BACKLOG_S = 60.0  # timeout if too many merges are pending; ranks rarely drift so far apart
_GRACE_S = 2.0  # timeout for merges in progress when a run is interrupted


class _Job(NamedTuple):
    number: int
    scope: str
    own: Callable[[], Contribution]
    result: Future[Contribution]


class RankChannel:
    """Merges the states of all ranks in the background, and returns the result on rank zero.

    Each rank receives messages from up to log2(N) other ranks, merges their states with its own states in rank order,
    and sends the result to one rank. A message is about as long as the states of one rank, even if it merges several.
    The channel has its own gloo process group, so that it does not interfere with the collectives of the training.

    The training thread only appends to a queue. Every rank must submit the same merges in the same order. If a rank
    cannot be reached, the merge continues without this rank and without the ranks below it in the tree. If a rank
    cannot send, it closes the channel on its side.

    Args:
        group: A process group of all ranks with the gloo backend.
    """

    current: RankChannel | None = None
    """The open channel of this process."""
    _opened = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.is_open = True
        """False if this rank can no longer send, or no longer waits for merges."""
        self.users = 0
        """The number of exchanges that use the channel."""
        self.sent_bytes = self.received_bytes = 0
        RankChannel._opened += 1
        self.serial = RankChannel._opened
        """The number of channels opened in this process so far, which identifies the channel. The same on all ranks."""
        self.parent, self.children = _tree(self.rank, self.ranks)
        self._lost: set[int] = set()
        self._encoder, self._decoders = Encoder(), {child: Decoder() for child in self.children}
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._free = threading.Semaphore(_MOST_PENDING)
        self._pending: list[_Job] = []
        self._lock = threading.Lock()
        self._number = 0
        self._thread = threading.Thread(target=self._run, name="lightning-recorder-ranks", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls) -> Self:
        """Create a process group and open a channel. A collective: every rank must call it.

        Raises:
            RuntimeError: On all ranks, if the ranks cannot be connected.
        """
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_S))
        dist.barrier(group)  # a rank must not close the group before the other ranks have connected
        channel = cls(group)
        RankChannel.current = channel
        return channel

    def submit(self, scope: str, own: Callable[[], Contribution]) -> Future[Contribution]:
        """Begin to merge the states of all ranks.

        Returns:
            The merged states on the first rank, and an empty contribution on the others.
        """
        result: Future[Contribution] = Future()
        if self.is_open and not self._free.acquire(timeout=_BACKLOG_S):
            self.give_up(TimeoutError(f"no record could be merged for {_BACKLOG_S:.0f} s"))
        with self._lock:
            job = _Job(self._number, scope, own, result)
            self._number += 1
            if self.is_open:
                self._pending.append(job)
                self._jobs.put(job)
                return result
        result.set_exception(ConnectionError("the ranks are no longer merged"))
        return result

    def wait(self, timeout_s: float = _END_S) -> None:
        """Wait until all submitted merges are done. After the timeout, close the channel."""
        with self._lock:
            last = self._pending[-1].result if self._pending else None
        if last is None:
            return
        try:
            last.exception(timeout=timeout_s)
        except FutureTimeoutError as error:
            self.give_up(error)

    def close(self, *, interrupted: bool = False) -> None:
        """End the use of the channel by one exchange. The last exchange closes the channel.

        Args:
            interrupted: Wait for a short time only, because the other ranks may submit no more merges.
        """
        if interrupted:
            self.wait(_GRACE_S)
            self.give_up(ConnectionError("the run was interrupted"))
        self.users -= 1
        if self.users > 0:
            return
        self.wait()
        self.give_up(ConnectionError("the run has ended"))
        if RankChannel.current is self:
            RankChannel.current = None
        self._thread.join(timeout=_GRACE_S)
        if not self._thread.is_alive():
            with suppress(ValueError, RuntimeError, AssertionError):  # the trainer may have destroyed all groups
                dist.destroy_process_group(self.group)

    def give_up(self, error: Exception) -> None:
        """Close the channel on this rank, and fail all pending merges with an error."""
        with self._lock:
            pending, self._pending = self._pending, []
            was_open, self.is_open = self.is_open, False
        for job in pending:
            _fail(job.result, error)
        if was_open:
            self._jobs.put(None)

    def _run(self) -> None:
        compute_alone()
        with pause_recording(), torch.no_grad():
            while (job := self._jobs.get()) is not None:
                try:
                    merged = self._merge(job)
                except Exception as error:  # noqa: BLE001 - from the connection, or from a reduction of the user
                    self.give_up(error)
                    _fail(job.result, error)
                    return
                with self._lock:
                    self._pending = [each for each in self._pending if each is not job]
                with suppress(InvalidStateError):  # give_up() has failed the job
                    job.result.set_result(merged)
                self._free.release()

    def _merge(self, job: _Job) -> Contribution:
        merged = job.own()
        for child in self.children:
            states = None if child in self._lost else self._receive(child, job, merged)
            if states is None:
                # The states of the child, and of the ranks below it in the tree, are missing.
                merged.absent += tuple(range(child, min(2 * child - self.rank, self.ranks)))
            else:
                merged.merge(states)
        if self.parent is None:
            return merged
        message = self._encoder.encode(job.scope, merged)
        head = torch.tensor([job.number, _fingerprint(job.scope), len(message)], dtype=torch.int64, device="cpu")
        dist.send(head, self.parent, self.group, tag=_TAG)
        dist.send(torch.frombuffer(message, dtype=torch.uint8), self.parent, self.group, tag=_TAG)
        self.sent_bytes += len(message)
        return Contribution(error=merged.error)

    def _receive(self, child: int, job: _Job, own: Contribution) -> Contribution | None:
        """Return the states that a rank has merged, or None if it cannot be reached."""
        try:
            head = torch.empty(3, dtype=torch.int64, device="cpu")
            dist.recv(head, child, self.group, tag=_TAG)
            number, fingerprint, size = head.tolist()
            message = bytearray(size)
            dist.recv(torch.frombuffer(message, dtype=torch.uint8), child, self.group, tag=_TAG)
            self.received_bytes += size
        except (RuntimeError, ConnectionError):  # gloo raises RuntimeError
            self._lost.add(child)
            return None
        if (number, fingerprint) != (job.number, _fingerprint(job.scope)):
            return None  # the child has submitted another merge
        try:
            return self._decoders[child].decode(job.scope, message, own)
        except Exception:  # noqa: BLE001 - unpickling a reduction may raise anything; later messages may be readable
            return None


def _tree(rank: int, ranks: int) -> tuple[int | None, list[int]]:
    """Return the parent and the children of a rank in the merge tree. Children send their states to their parent.

    Example:
        >>> [_tree(rank, 6) for rank in range(6)]
        [(None, [1, 2, 4]), (0, []), (0, [3]), (2, []), (0, [5]), (4, [])]
    """
    children: list[int] = []
    step = 1
    while step < ranks:
        if rank & step:
            return rank - step, children
        if rank + step < ranks:
            children.append(rank + step)
        step *= 2
    return None, children


def _fingerprint(scope: str) -> int:
    return zlib.crc32(scope.encode())


def _fail(result: Future[Contribution], error: Exception) -> None:
    with suppress(InvalidStateError):  # the job is done
        result.set_exception(error)
