"""The latest statistics in files beside the checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lightning_recorder.dumps import remove_dump, write_dump
from lightning_recorder.recorders.record import Record
from lightning_recorder.recorders.sites import SiteStatistics
from lightning_recorder.tags import make_tag
from lightning_recorder.taps import Site

__all__ = ["StatisticsDump"]


class StatisticsDump:
    """Writes what was recorded last beside a checkpoint.

    Args:
        group: What is recorded.
        label: What the file has in its name; by default the group.
    """

    def __init__(self, group: str, label: str = "") -> None:
        self.group = group
        self.label = label or group
        self._found: Mapping[Site, SiteStatistics] = {}
        self._step = self._epoch = 0

    def keep(self, found: Mapping[Site, SiteStatistics], record: Record) -> None:
        """Take what was recorded last."""
        self._found, self._step, self._epoch = found, record.step, record.epoch

    def write_beside(self, checkpoint: Path) -> None:
        """Write it beside a checkpoint; without a record, nothing.

        Raises:
            OSError: If the file cannot be written.
        """
        if not self._found:
            return
        tensors: dict[str, Tensor] = {}
        samples: dict[str, int] = {}
        for site, seen in self._found.items():
            values = {name: torch.tensor(value, dtype=torch.float64) for name, value in seen.scalars.items()}
            for statistic, tensor in {**values, **seen.tensors, "histogram": seen.bins}.items():
                tensors[make_tag("", *site, statistic)] = tensor
            samples[make_tag("", *site)] = int(seen.scalars["count"])
        about = {
            "step": self._step,
            "epoch": self._epoch,
            "stage": "train",
            "rank": 0,
            "checkpoint": checkpoint.name,
            "group": self.group,
        }
        write_dump(self._path(checkpoint), tensors, samples, **about)

    def remove_beside(self, checkpoint: Path) -> None:
        """Remove the file beside a checkpoint."""
        remove_dump(self._path(checkpoint))

    def _path(self, checkpoint: Path) -> Path:
        return checkpoint.with_name(f"{checkpoint.name.removesuffix('.ckpt')}.{self.label}.safetensors")
