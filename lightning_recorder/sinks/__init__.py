"""Sinks: back ends for scalars, histograms, images, texts, files and graphs."""

from lightning_recorder.sinks.background import BackgroundQueue, DeferredSink, for_any_thread
from lightning_recorder.sinks.base import Image, Sink
from lightning_recorder.sinks.comet import CometSink
from lightning_recorder.sinks.csv import CsvSink
from lightning_recorder.sinks.files import FilesSink
from lightning_recorder.sinks.loggers import register_sink, sink_for_logger, sinks_for_loggers
from lightning_recorder.sinks.memory import MemorySink
from lightning_recorder.sinks.metrics import LitLoggerSink, MetricsSink
from lightning_recorder.sinks.mlflow import MlflowSink
from lightning_recorder.sinks.multi import Destination, MultiSink
from lightning_recorder.sinks.tensorboard import RankedScalars, TensorBoardSink
from lightning_recorder.sinks.wandb import WandbSink

__all__ = [
    "BackgroundQueue",
    "CometSink",
    "CsvSink",
    "DeferredSink",
    "Destination",
    "FilesSink",
    "Image",
    "LitLoggerSink",
    "MemorySink",
    "MetricsSink",
    "MlflowSink",
    "MultiSink",
    "RankedScalars",
    "Sink",
    "TensorBoardSink",
    "WandbSink",
    "for_any_thread",
    "register_sink",
    "sink_for_logger",
    "sinks_for_loggers",
]
