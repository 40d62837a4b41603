"""A record: the statistics of one or more steps with their metadata."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_recorder.statistics.sites import Snapshot
from lightning_recorder.taps import Site

__all__ = ["Record"]


@dataclass(frozen=True)
class Record:
    """The statistics of one or more steps with their metadata.

    Args:
        step: The position on the step axis.
        epoch: The epoch.
        snapshot: The states.
        steps: The number of recorded steps.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        loader: The index of the data loader, or ``None`` if there is only one.
        overflowed: True if the gradients of the step overflowed, so that the optimizer skipped the step.
        overflow_steps: The number of recorded steps with an overflow so far.
        recording_ms: The time spent in the hooks, in milliseconds.
        flush_ms: The time spent on copying and merging, in milliseconds.
        every_n_train_steps: The interval from now on, in steps.
        ranks: The number of merged ranks.
    """

    step: int
    epoch: int
    snapshot: Snapshot
    steps: int = 1
    stage: str = "train"
    loader: int | None = None
    overflowed: bool = False
    overflow_steps: int = 0
    recording_ms: float = 0.0
    flush_ms: float = 0.0
    every_n_train_steps: int = 1
    ranks: int = 1

    def in_order_of_execution(self, sites: Iterable[Site], *, backward: bool = False) -> list[Site]:
        """Return the sites in the order of the forward pass. Sites that only other ranks have seen come last.

        Args:
            sites: The sites.
            backward: True if the sites are seen in the backward pass, which visits them in reverse.
        """
        seen = list(self.snapshot.kinds)
        places = {site: place for place, site in enumerate(reversed(seen) if backward else seen)}
        return sorted(sites, key=lambda site: places.get(site, len(places)))
