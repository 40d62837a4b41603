"""Sinks: where scalars, histograms, images, texts, files and graphs go."""

from lightning_recorder.sinks.background import BackgroundQueue
from lightning_recorder.sinks.base import Image, Sink
from lightning_recorder.sinks.files import FilesSink
from lightning_recorder.sinks.loggers import register_sink, sink_for_logger, sinks_for_loggers
from lightning_recorder.sinks.memory import MemorySink
from lightning_recorder.sinks.metrics import MetricsSink
from lightning_recorder.sinks.multi import MultiSink
from lightning_recorder.sinks.tensorboard import TensorBoardSink

__all__ = [
    "BackgroundQueue",
    "FilesSink",
    "Image",
    "MemorySink",
    "MetricsSink",
    "MultiSink",
    "Sink",
    "TensorBoardSink",
    "register_sink",
    "sink_for_logger",
    "sinks_for_loggers",
]
