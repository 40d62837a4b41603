"""The layout of TensorBoard's Custom Scalars page: one chart per statistic with all modules."""

from __future__ import annotations

import mmap
import re
import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["Dashboard", "dashboard_of"]

_TAG = b"custom_scalars__config__"  # TensorBoard looks for a layout under this tag
_LOADER = re.compile(r"dataloader_idx_\d+")


class Dashboard:
    """The charts of a writer: one for each statistic in each group of tags, with a line for each module.

    A chart selects its lines with a pattern, so the size of the layout does not depend on the number of modules. The
    layout is written again when a new statistic appears.

    Args:
        directory: The folder of the event files if the writer is shared with other code. If that folder already has a
            layout, that layout is kept and none is written.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self._directory = None if directory is None else Path(directory)
        self._charts: dict[str, dict[str, str]] = {}
        self._seen: set[str] = set()
        self._may_write: bool | None = None
        self._is_changed = False
        self._lock = threading.Lock()  # recorders write in their own threads, and the last layout wins

    def update(self, tags: Collection[str], write: Callable[[dict[str, dict[str, str]]], bool]) -> None:
        """Write the layout if it has changed.

        Args:
            tags: The tags of the scalars that were written.
            write: A callback that writes a layout, group to title to tag pattern, and returns False if it failed.
        """
        with self._lock:
            if not self._seen.issuperset(tags):  # False in nearly every call
                self._seen.update(tags)
                self._is_changed |= self._add_charts(tags)
            if self._is_changed:
                self._is_changed = not write(dict(sorted(self._charts.items())))

    def _add_charts(self, tags: Iterable[str]) -> bool:
        """Add the charts of these tags. Return True if the layout has changed and may be written."""
        is_new = False
        for tag in tags:
            group, title, pattern = _chart(tag)
            charts = self._charts.setdefault(group, {}) if pattern else {}
            if pattern and title not in charts:
                charts[title] = pattern
                is_new = True
        if is_new and self._may_write is None:
            self._may_write = self._directory is None or not _has_layout(self._directory)
        return is_new and bool(self._may_write)


def _chart(tag: str) -> tuple[str, str, str]:
    """Return the group, title and pattern of the chart of a tag, or empty strings for a tag without a module."""
    parts = tag.split("/")
    loader = r"(/dataloader_idx_\d+)?$"
    if _LOADER.fullmatch(parts[-1]):
        parts = parts[:-1]
    if len(parts) <= 2 or parts[0] == "recorder":
        return "", "", ""
    group, path, statistic = parts[0], parts[-2], parts[-1]
    head, tail = re.escape(group), re.escape(statistic) + loader
    if not group.startswith("parameters"):
        return group, statistic, f"^{head}/.+/{tail}"
    # A parameter such as weight has related tags: weight.grad, weight.update and the optimizer states.
    part = path.rpartition(".")[2] if "." in path else ""
    if not part:
        return group, statistic, f"^{head}/.+/[^/.]+/{tail}"
    return group, f"{part} {statistic}", rf"^{head}/.+\.{re.escape(part)}/{tail}"


def _has_layout(directory: Path) -> bool:
    """Return True if an event file in the folder already has a layout."""
    try:
        return any(_holds_layout(path) for path in directory.glob("events.out.tfevents.*"))
    except OSError:
        return False


def _holds_layout(path: Path) -> bool:
    if not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(_TAG) >= 0


_DASHBOARDS: WeakKeyDictionary[SummaryWriter, Dashboard] = WeakKeyDictionary()
_LOCK = threading.Lock()


def dashboard_of(writer: SummaryWriter) -> Dashboard:
    """Return the dashboard of a writer, shared by all sinks that use the writer."""
    with _LOCK:
        if writer not in _DASHBOARDS:
            _DASHBOARDS[writer] = Dashboard(writer.get_logdir())
        return _DASHBOARDS[writer]
