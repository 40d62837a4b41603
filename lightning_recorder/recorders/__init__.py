"""Recorders: taps with what is kept of their tensors, for any PyTorch loop."""

from lightning_recorder.recorders.backward import BackwardInput, BackwardOutput
from lightning_recorder.recorders.base import Recorder
from lightning_recorder.recorders.budget import Budget, check_overhead
from lightning_recorder.recorders.evaluation import EvaluationRecorder
from lightning_recorder.recorders.exchange import Exchange, Merged
from lightning_recorder.recorders.forward import ForwardInput, ForwardOutput, ForwardPre
from lightning_recorder.recorders.net import RecordedNet
from lightning_recorder.recorders.optimizer import PARAMETER_PARTS, OptimizerRecorder, with_update_ratios
from lightning_recorder.recorders.receipt import Receipt, Watched, paths_by_module, with_gradients
from lightning_recorder.recorders.record import Record
from lightning_recorder.recorders.report import Report
from lightning_recorder.recorders.results import Results
from lightning_recorder.recorders.run import RunRecorder
from lightning_recorder.recorders.siterecorder import SiteRecorder
from lightning_recorder.recorders.sites import (
    RANK_STATISTICS,
    SHOWN_STATISTICS,
    SiteStates,
    SiteStatistics,
    Snapshot,
)
from lightning_recorder.recorders.statistics import StatisticsRecorder
from lightning_recorder.recorders.subrecorder import SubRecorder
from lightning_recorder.recorders.summary import Summary, SummaryRow
from lightning_recorder.recorders.worker import Worker

__all__ = [
    "PARAMETER_PARTS",
    "RANK_STATISTICS",
    "SHOWN_STATISTICS",
    "BackwardInput",
    "BackwardOutput",
    "Budget",
    "EvaluationRecorder",
    "Exchange",
    "ForwardInput",
    "ForwardOutput",
    "ForwardPre",
    "Merged",
    "OptimizerRecorder",
    "Receipt",
    "Record",
    "RecordedNet",
    "Recorder",
    "Report",
    "Results",
    "RunRecorder",
    "SiteRecorder",
    "SiteStates",
    "SiteStatistics",
    "Snapshot",
    "StatisticsRecorder",
    "SubRecorder",
    "Summary",
    "SummaryRow",
    "Watched",
    "Worker",
    "check_overhead",
    "paths_by_module",
    "with_gradients",
    "with_update_ratios",
]
