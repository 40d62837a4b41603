"""The layout of TensorBoard's Custom Scalars page: the layers of one statistic in one chart."""

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

_TAG = b"custom_scalars__config__"  # under which TensorBoard looks for a layout
_LOADER = re.compile(r"dataloader_idx_\d+")


class Dashboard:
    """The charts of a writer: one for each statistic of each group of tags, with all modules in it.

    A chart finds its lines by a pattern, so that the layout is small however many modules there are. It is written when
    a statistic is new. Where somebody else has given the run a layout, that stays, and ours is not written.

    Args:
        directory: Where the writer's event files are.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._charts: dict[str, dict[str, str]] = {}
        self._seen: set[str] = set()
        self._is_ours: bool | None = None
        self._lock = threading.Lock()  # recorders write in threads of their own, and the last layout counts

    def update(self, tags: Collection[str], write: Callable[[dict[str, dict[str, str]]], object]) -> None:
        """Have the layout written, if it is another one than before: group to title to a pattern of tags."""
        with self._lock:
            if self._seen.issuperset(tags):  # as nearly always
                return
            self._seen.update(tags)
            if self._take(tags):
                write(dict(sorted(self._charts.items())))

    def _take(self, tags: Iterable[str]) -> bool:
        """Whether the layout is another one with these tags, and ours to write."""
        is_new = False
        for tag in tags:
            group, title, pattern = _chart(tag)
            charts = self._charts.setdefault(group, {}) if pattern else {}
            if pattern and title not in charts:
                charts[title] = pattern
                is_new = True
        if is_new and self._is_ours is None:
            self._is_ours = not _has_layout(self._directory)
        return is_new and bool(self._is_ours)


def _chart(tag: str) -> tuple[str, str, str]:
    """The group, the title and the pattern of the chart that a tag belongs in; empty for one without a module."""
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
    # Beside the values of parameters, as weight, are those of weight.grad, weight.update and what the optimiser keeps.
    part = path.rpartition(".")[2] if "." in path else ""
    if not part:
        return group, statistic, f"^{head}/.+/[^/.]+/{tail}"
    return group, f"{part} {statistic}", rf"^{head}/.+\.{re.escape(part)}/{tail}"


def _has_layout(directory: Path) -> bool:
    """Whether the run has a layout already."""
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
    """The one dashboard of a writer, to which several sinks may write."""
    with _LOCK:
        if writer not in _DASHBOARDS:
            _DASHBOARDS[writer] = Dashboard(writer.get_logdir())
        return _DASHBOARDS[writer]
