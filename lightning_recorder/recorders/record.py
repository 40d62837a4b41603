"""What was recorded between two results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_recorder.recorders.sites import Snapshot
from lightning_recorder.taps import Site

__all__ = ["Record"]


@dataclass(frozen=True)
class Record:
    """What becomes one record.

    Args:
        step: Where it stands on the axis of steps.
        epoch: The epoch.
        snapshot: The states.
        steps: How many recorded steps it is of.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        loader: The number of the loader, where there are several.
        overflowed: Whether it is of a step whose gradients overflowed, so that the optimiser passed it over.
        overflow_steps: How many recorded steps did so up to now.
        recording_ms: Milliseconds that the hooks took.
        flush_ms: Milliseconds that copying and merging took.
        every_n_train_steps: The cadence from now on.
        ranks: Of how many ranks it is.
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
        """Sites in the order in which the forward pass comes to them; those that only other ranks have seen last.

        Args:
            sites: The sites.
            backward: Whether they are seen in the backward pass, which comes to them in reverse.
        """
        seen = list(self.snapshot.kinds)
        places = {site: place for place, site in enumerate(reversed(seen) if backward else seen)}
        return sorted(sites, key=lambda site: places.get(site, len(places)))
