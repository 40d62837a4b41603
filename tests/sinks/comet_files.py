"""A reader for the ZIP file of an offline Comet experiment."""

from __future__ import annotations

import json
import math
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["CometFile", "Experiment", "read_experiment"]


@dataclass(frozen=True)
class CometFile:
    """A file to upload."""

    kind: str
    name: str
    step: int | None
    metadata: dict[str, Any]
    data: bytes


@dataclass
class Experiment:
    """The content of an experiment's messages."""

    metrics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    files: list[CometFile] = field(default_factory=list)
    pages: list[str] = field(default_factory=list)

    def files_of(self, kind: str) -> dict[str, CometFile]:
        """Return the files of a kind by name."""
        return {each.name: each for each in self.files if each.kind == kind}


def read_experiment(folder: Path) -> Experiment:
    """Return the only experiment in a folder."""
    (path,) = folder.glob("*.zip")
    read = Experiment()
    with zipfile.ZipFile(path) as archive:
        for line in archive.read("messages.json").decode().splitlines():
            message = json.loads(line)
            payload = message["payload"]
            if message["type"] == "metric_msg":
                metric = payload["metric"]
                value = float(metric["metricValue"])
                read.metrics.setdefault(metric["metricName"], []).append((metric["step"], value))
            elif message["type"] == "file_upload":
                about = payload["additional_params"]
                data = archive.read(payload["file_path"])
                name = about.get("fileName") or about.get("figName")
                read.files.append(
                    CometFile(payload["upload_type"], name, about["step"], payload["metadata"] or {}, data)
                )
            elif message["type"] == "html":
                read.pages.append(payload["html"])
    read.metrics.pop("process duration", None)  # written by Comet itself
    assert not any(math.isnan(step) for points in read.metrics.values() for step, _ in points)
    return read
