"""A sink that writes TensorBoard event files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_recorder.graph.renderers.graphdef import to_graph_def
from lightning_recorder.reductions.histogram import Histogram
from lightning_recorder.sinks.base import Image, Sink
from lightning_recorder.sinks.dashboard import dashboard_of
from lightning_recorder.sinks.event_file import EVENT_FILES, EventFile, patch_crc32c

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter

    from lightning_recorder.graph.model import Graph

__all__ = ["TensorBoardSink"]

# TensorBoard draws a histogram in 30 bins. More than twice as many enlarge the event file and do not change the plot.
_MAX_BINS = 64

# The overhead of an event in the file: a length and two checksums.
_RECORD_BYTES = 16


class TensorBoardSink(Sink):
    """Write scalars, histograms, images, texts and graphs as events.

    The Custom Scalars page has one chart per statistic and group, with all modules, unless the run already has a
    layout.

    A histogram is written from its bins, merged to at most 64 (about 1.1 KB). Its ``min``, ``max``, ``sum`` and
    ``sum_squares`` are exact, and so is ``num`` unless the histogram is based on a sample. A histogram without a finite
    value is skipped, since TensorBoard cannot draw it. TensorBoard shows one graph per run, under Graphs: the one
    written last, regardless of its tag. Files are not supported.

    Args:
        writer: A ``SummaryWriter``, such as ``TensorBoardLogger.experiment``, or a folder. The sink does not close a
            ``SummaryWriter``. A folder receives its own event file. All sinks of a local folder share one file. If its
            disk is full, results are skipped with one warning.
    """

    any_thread = True

    def __init__(self, writer: SummaryWriter | str | Path) -> None:
        self._owned = isinstance(writer, (str, Path))
        self._writer = _open_writer(writer) if isinstance(writer, (str, Path)) else writer
        self.written_bytes: int = 0
        if isinstance(self._writer, EventFile):
            self._dashboard = self._writer.dashboard
        else:
            self._dashboard = dashboard_of(self._writer)
            patch_crc32c(self._writer)

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._add(step, Summary(value=values))
        self._dashboard.update(scalars, self._write_layout)
        return True

    def _write_layout(self, layout: Mapping[str, Mapping[str, str]]) -> bool:
        from tensorboard.compat.proto.event_pb2 import Event
        from torch.utils.tensorboard.summary import custom_scalars

        charts_by_group = {
            group: {title: ["Multiline", [pattern]] for title, pattern in charts.items()}
            for group, charts in layout.items()
        }
        return self._add_event(Event(summary=custom_scalars(charts_by_group))) > 0

    @override
    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> bool:
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

        values = []
        for tag, histogram in histograms.items():
            if histogram.count == 0:
                continue
            drawn = histogram.coarsened(_MAX_BINS)
            proto = HistogramProto(
                min=histogram.min,
                max=histogram.max,
                num=histogram.count,
                sum=histogram.sum,
                sum_squares=histogram.sum_squares,
                bucket_limit=drawn.edges[1:].tolist(),
                bucket=drawn.counts.tolist(),
            )
            values.append(Summary.Value(tag=tag, histo=proto))
        self._add(step, Summary(value=values))
        return True

    def _add(self, step: int, summary: Summary) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        # One event for all values: a writer waits for the disk after every ten events, and a model has hundreds of
        # values.
        if summary.value:
            self.written_bytes += self._add_event(Event(summary=summary), step)

    def _add_event(self, event: Event, step: int = 0) -> int:
        """Write an event, and return its approximate size in bytes, or 0 if it was skipped."""
        if isinstance(self._writer, EventFile):
            event.wall_time, event.step = time.time(), step
            return self._writer.add(event.SerializeToString())
        # A private attribute: the public methods of torch's writer write one value each, or trace a model.
        self._writer._get_file_writer().add_event(event, step)
        return int(event.ByteSize()) + _RECORD_BYTES

    @override
    def write_images(self, step: int, images: Mapping[str, Image]) -> bool:
        from torch.utils.tensorboard.summary import image

        for tag, pixels in images.items():
            self._add(step, image(tag, pixels, dataformats="HWC"))
        return True

    @override
    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        from tensorboard.compat.proto.event_pb2 import Event
        from torch.utils.tensorboard.summary import text as as_summary

        for tag, text in texts.items():
            self._add_event(Event(summary=as_summary(tag, text)), step)
        return True

    @override
    def write_graph(self, step: int, graphs: Mapping[str, Graph]) -> bool:
        from tensorboard.compat.proto.event_pb2 import Event

        for graph in graphs.values():
            # add_graph would also write an empty profile.
            self._add_event(Event(graph_def=to_graph_def(graph).SerializeToString()), step)
        return True

    @override
    def flush(self) -> None:
        self._writer.flush()

    @override
    def close(self) -> None:
        if self._owned:
            self._writer.close()
        else:
            self.flush()


def _open_writer(folder: str | Path) -> EventFile | SummaryWriter:
    """Return a writer for a folder, which may be on a remote file system."""
    if "://" not in str(folder):
        return EVENT_FILES[folder]
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))
