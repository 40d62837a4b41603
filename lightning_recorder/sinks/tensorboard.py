"""A sink that writes TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_recorder.graph.graphdef import to_graph_def
from lightning_recorder.reductions.binned import Histogram
from lightning_recorder.sinks.base import Image, Sink
from lightning_recorder.sinks.dashboard import dashboard_of
from lightning_recorder.sinks.records import quicken_records

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter

    from lightning_recorder.graph.model import Graph

__all__ = ["TensorBoardSink"]

# TensorBoard draws a histogram in 30 bins; beyond twice as many the event file grows and the picture does not change.
_MAX_BINS = 64

# What a file has of an event beside its summary: a length and two checksums, the time and the step.
_EVENT_BYTES = 32


class TensorBoardSink(Sink):
    """Writes scalars, histograms, images, texts and graphs as events.

    Under Custom Scalars each statistic of a group has one chart with all modules, unless the run has a layout already.

    A histogram is written from its bins, joined to at most 64 (about 1.1 KB); its ``min``, ``max``, ``sum`` and
    ``sum_squares`` are exact, and so is ``num`` unless the histogram is of a sample. One without a finite value is left
    out, since TensorBoard cannot draw it. Of graphs TensorBoard shows one in a run, under Graphs: the last that was
    written, whatever its tag. A file cannot be shown.

    Args:
        writer: A ``SummaryWriter``, such as ``TensorBoardLogger.experiment``, which stays the caller's and is not
            closed; or a folder, for which a writer is opened and closed.
    """

    any_thread = True

    def __init__(self, writer: SummaryWriter | str | Path) -> None:
        self._owned = isinstance(writer, (str, Path))
        if isinstance(writer, (str, Path)):
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(writer))
        self._writer = writer
        self.written_bytes: int = 0
        self._dashboard = dashboard_of(writer)
        quicken_records(writer)

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._add(step, Summary(value=values))
        self._dashboard.update(scalars, self._write_layout)
        return True

    def _write_layout(self, layout: Mapping[str, Mapping[str, str]]) -> None:
        self._writer.add_custom_scalars(
            {
                group: {title: ["Multiline", [pattern]] for title, pattern in charts.items()}
                for group, charts in layout.items()
            }
        )

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
        # All in one event: the writer waits for the disk after every ten of them, and a model has hundreds of numbers.
        if summary.value:
            self._events().add_summary(summary, step)
            self.written_bytes += summary.ByteSize() + _EVENT_BYTES

    def _events(self) -> Any:
        """What writes events of any contents: private to torch's writer, whose verbs write one value each, or trace."""
        return self._writer._get_file_writer()

    @override
    def write_images(self, step: int, images: Mapping[str, Image]) -> bool:
        from torch.utils.tensorboard.summary import image

        for tag, pixels in images.items():
            self._add(step, image(tag, pixels, dataformats="HWC"))
        return True

    @override
    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        for tag, text in texts.items():
            self._writer.add_text(tag, text, step)
        return True

    @override
    def write_graph(self, step: int, graphs: Mapping[str, Graph]) -> bool:
        from tensorboard.compat.proto.event_pb2 import Event

        for graph in graphs.values():
            # Not by add_graph, which writes an empty profile beside it.
            self._events().add_event(Event(graph_def=to_graph_def(graph).SerializeToString()), step)
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
