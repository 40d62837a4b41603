"""Recorders: taps with what is kept of their tensors, for any PyTorch loop."""

from lightning_recorder.recorders.backward import BackwardInput, BackwardOutput
from lightning_recorder.recorders.base import Recorder
from lightning_recorder.recorders.forward import ForwardInput, ForwardOutput, ForwardPre
from lightning_recorder.recorders.net import RecordedNet
from lightning_recorder.recorders.statistics import SiteStatistics, Snapshot, StatisticsRecorder
from lightning_recorder.recorders.subrecorder import SubRecorder
from lightning_recorder.recorders.summary import Summary, SummaryRow

__all__ = [
    "BackwardInput",
    "BackwardOutput",
    "ForwardInput",
    "ForwardOutput",
    "ForwardPre",
    "RecordedNet",
    "Recorder",
    "SiteStatistics",
    "Snapshot",
    "StatisticsRecorder",
    "SubRecorder",
    "Summary",
    "SummaryRow",
]
