"""Recorders: taps combined with storage for their tensors, for any PyTorch loop."""

from lightning_recorder.recorders.backward import BackwardInput, BackwardOutput
from lightning_recorder.recorders.base import Recorder
from lightning_recorder.recorders.budget import Budget, check_overhead
from lightning_recorder.recorders.buffers import BufferPool
from lightning_recorder.recorders.dump import DUMP_TIMES, Event, StatisticsDumps, check_dump
from lightning_recorder.recorders.dumpfolder import DumpContent, DumpFolder
from lightning_recorder.recorders.evaluation import EvaluationRecorder
from lightning_recorder.recorders.exchange import Exchange, Merged
from lightning_recorder.recorders.forward import ForwardInput, ForwardOutput, ForwardPre
from lightning_recorder.recorders.net import RecordedNet
from lightning_recorder.recorders.optimizer import PARAMETER_PARTS, OptimizerRecorder, with_update_ratios
from lightning_recorder.recorders.outlet import Outlet
from lightning_recorder.recorders.plotter import Plotter
from lightning_recorder.recorders.receipt import Receipt, Watched, paths_by_module, with_gradients, write_receipt
from lightning_recorder.recorders.record import Record
from lightning_recorder.recorders.recordfile import RecordFile
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
from lightning_recorder.recorders.tagbudget import TagBudget
from lightning_recorder.recorders.tensordumps import TENSOR_DUMP_TIMES, TensorDumps
from lightning_recorder.recorders.tensors import TENSOR_KINDS, Captured, TensorCapture
from lightning_recorder.recorders.worker import Worker

__all__ = [
    "DUMP_TIMES",
    "PARAMETER_PARTS",
    "RANK_STATISTICS",
    "SHOWN_STATISTICS",
    "TENSOR_DUMP_TIMES",
    "TENSOR_KINDS",
    "BackwardInput",
    "BackwardOutput",
    "Budget",
    "BufferPool",
    "Captured",
    "DumpContent",
    "DumpFolder",
    "EvaluationRecorder",
    "Event",
    "Exchange",
    "ForwardInput",
    "ForwardOutput",
    "ForwardPre",
    "Merged",
    "OptimizerRecorder",
    "Outlet",
    "Plotter",
    "Receipt",
    "Record",
    "RecordFile",
    "RecordedNet",
    "Recorder",
    "Report",
    "Results",
    "RunRecorder",
    "SiteRecorder",
    "SiteStates",
    "SiteStatistics",
    "Snapshot",
    "StatisticsDumps",
    "StatisticsRecorder",
    "SubRecorder",
    "Summary",
    "SummaryRow",
    "TagBudget",
    "TensorCapture",
    "TensorDumps",
    "Watched",
    "Worker",
    "check_dump",
    "check_overhead",
    "paths_by_module",
    "with_gradients",
    "with_update_ratios",
    "write_receipt",
]
