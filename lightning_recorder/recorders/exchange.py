"""Merging what the processes of a run have recorded."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_recorder.errors import tell
from lightning_recorder.recorders.layout import Key, Layout, MergedStates, States, Told
from lightning_recorder.recorders.sites import Snapshot
from lightning_recorder.taps import Site
from lightning_recorder.unrecorded import unrecorded

__all__ = ["Exchange", "Merged"]

_FAILED, _UNKNOWN, _SEEN = range(3)  # the first numbers that a rank says


@dataclass(frozen=True)
class Merged:
    """What an exchange has brought.

    Args:
        snapshot: The states of all ranks together, on the host; ``None`` on the other ranks, and where nothing was
            recorded.
        words: The numbers that each rank has given, ``[ranks][words]``.
        absent: The ranks whose recorder has failed.
        ranks: Of how many ranks the states are.
        error: What went wrong on this rank, though the ranks have talked to each other as ever.
    """

    snapshot: Snapshot | None
    words: list[list[float]] = field(default_factory=list)
    absent: tuple[int, ...] = ()
    ranks: int = 1
    error: Exception | None = None


class Exchange:
    """Merges the states of all ranks on rank zero, in two packed transfers.

    The layout of what is sent is agreed on: sites that a rank has seen for the first time are made known to the others
    before their states are sent, so a module that runs on one rank only hangs nobody. Words that are merged by adding
    are summed over the ranks; the others, a few numbers for each site, are gathered and merged in the order of the
    ranks.

    Every rank must call the same methods in the same order, whether its recorder is well or has failed: then it says so
    and gives nothing. When a transfer itself fails, :attr:`is_open` is false from then on, and nothing more is sent.

    Args:
        device: Where the tensors of the model are; used where the processes talk from GPU to GPU.

    Note:
        ``torch.distributed`` must be initialised. Every call waits for the other ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cpu") if dist.get_backend() == "gloo" else device
        """Where the states have to lie."""
        self.is_open = True
        """Whether the ranks have agreed to merge, and no transfer has failed."""
        self._layouts: dict[str, Layout] = {}

    @staticmethod
    def is_needed() -> bool:
        """Whether there are several processes that can talk to each other."""
        return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def agree(self, ready: bool, about: str) -> str:
        """Find out whether all ranks take part and record the same.

        Args:
            ready: Whether this rank takes part.
            about: What it records.

        Returns:
            Why nothing is merged, or an empty string.
        """
        self.is_open = False
        digest = float(zlib.crc32(about.encode()))
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
        words: Sequence[float] = (),
        scope: str = "",
    ) -> Merged:
        """Merge the states of all ranks.

        Args:
            snapshot: The states of this rank, on :attr:`device`; ``None`` if its recorder has failed.
            copies: The sites of which another rank has the same, which do not count.
            words: Numbers to tell the other ranks, equally many on each.
            scope: What the states are of; in another one a site may have another shape.

        Raises:
            RuntimeError: If the ranks cannot talk to each other any more.
        """
        with unrecorded(), torch.inference_mode(False), torch.no_grad():
            return self._merge(snapshot, copies, words, self._layouts.setdefault(scope, Layout()))

    def _merge(
        self, snapshot: Snapshot | None, copies: Collection[Site], words: Sequence[float], layout: Layout
    ) -> Merged:
        error: Exception | None = None
        while True:
            try:
                own = _states(snapshot)
                unknown = layout.unknown(own)
                left_out = _left_out(snapshot)
                packed = layout.pack(own, self.device, copies=copies, left_out=left_out)
            except Exception as caught:
                if snapshot is None:  # not even nothing can be said
                    raise
                error, snapshot = caught, None  # told by the caller; the other ranks are not to wait for ever
                continue
            said = [float(snapshot is None), float(len(unknown)), float(bool(own)), *words]
            head = torch.tensor(said, dtype=torch.float64, device=self.device)
            answers = self._gather(torch.cat([head, packed.apart])).cpu()
            heads = answers[:, : len(said)].tolist()
            if not any(each[_UNKNOWN] for each in heads):
                break
            self._make_known(layout, unknown)
        told = [each[_SEEN + 1 :] for each in heads]
        absent = tuple(rank for rank, each in enumerate(heads) if each[_FAILED])
        present = self.ranks - len(absent)
        if not any(each[_SEEN] for each in heads):
            return Merged(snapshot if self.rank == 0 else None, told, absent, present, error)
        self._add_up(packed.added)
        merged = None
        if self.rank != 0:
            return Merged(merged, told, absent, present, error)
        try:
            merged = _snapshot(snapshot, layout.merge(answers[:, len(said) :].unbind(), packed.added.cpu()))
        except Exception as caught:  # noqa: BLE001 - as above
            error = caught
        return Merged(merged, told, absent, present, error)

    def _make_known(self, layout: Layout, unknown: list[tuple[Key, Told]]) -> None:
        """Tell the other ranks of sites that they may not know."""
        told: list[list[tuple[Key, Told]]] = [[] for _ in range(self.ranks)]
        with self._closing():
            dist.all_gather_object(told, unknown)
        for (_, site), about in layout.extend(told):
            if self.rank == 0:
                why = "the tensor has another shape on each rank" if about.reduction else "its class cannot be pickled"
                what = about.described.partition(" ")[0]
                tell(f"{what} is not recorded at {site.path!r} of module {site.name!r}, since {why}")

    def _gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, ``[ranks, *shape]``."""
        answers = [torch.empty_like(tensor) for _ in range(self.ranks)]
        with self._closing():
            dist.all_gather(answers, tensor)
        return torch.stack(answers)

    def _add_up(self, tensor: Tensor) -> None:
        """The sum over all ranks, in place on rank zero."""
        with self._closing():
            dist.reduce(tensor, dst=0)

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """After a transfer that failed there is no other one."""
        try:
            yield
        except BaseException:
            self.is_open = False
            raise


def _states(snapshot: Snapshot | None) -> States:
    """The states of a rank by their keys."""
    return {
        (bank, site): (group.reduction, state)
        for bank, groups in enumerate([] if snapshot is None else snapshot.groups)
        for group in groups
        for site, state in zip(group.keys, group.states, strict=True)
    }


def _snapshot(own: Snapshot | None, merged: MergedStates) -> Snapshot:
    """The merged states in the form of this rank's own."""
    banks = [merged.groups.get(bank, []) for bank in range(1 + max(merged.groups, default=0))]
    if own is None:  # the recorder of this rank has failed, and what it would say of the order with it
        own = Snapshot((), [], [frozenset()] * len(banks))
    banks += [[]] * (len(own.groups) - len(banks))
    return replace(own, groups=banks, rank_means=merged.rank_means, apart=merged.apart)


def _left_out(snapshot: Snapshot | None) -> set[Key]:
    """What a rank has left out, by the number of the reduction."""
    return (
        set() if snapshot is None else {(bank, site) for bank, sites in enumerate(snapshot.left_out) for site in sites}
    )
