"""Statistics of module tensors and of the optimizer, recorded step by step in any PyTorch loop."""

from lightning_recorder.records.table import SiteStatistics
from lightning_recorder.statistics.evaluation import EvaluationRecorder, EvaluationSampler
from lightning_recorder.statistics.fingerprint import batch_fingerprint
from lightning_recorder.statistics.optimizer import (
    EVERY_PARAMETER_PART,
    PARAMETER_PARTS,
    OptimizerRecorder,
    with_update_ratios,
)
from lightning_recorder.statistics.overhead import OverheadLimit
from lightning_recorder.statistics.rank_merging import Exchange, Merged, PendingMerge, RankMergingRecorder
from lightning_recorder.statistics.recorder import BaseStatisticsRecorder, StatisticsRecorder
from lightning_recorder.statistics.run_recorder import RunPhase, RunRecorder
from lightning_recorder.statistics.sites import SiteStates
from lightning_recorder.statistics.snapshot import SHOWN_STATISTICS, Record, Snapshot

__all__ = [
    "EVERY_PARAMETER_PART",
    "PARAMETER_PARTS",
    "SHOWN_STATISTICS",
    "BaseStatisticsRecorder",
    "EvaluationRecorder",
    "EvaluationSampler",
    "Exchange",
    "Merged",
    "OptimizerRecorder",
    "OverheadLimit",
    "PendingMerge",
    "RankMergingRecorder",
    "Record",
    "RunPhase",
    "RunRecorder",
    "SiteStates",
    "SiteStatistics",
    "Snapshot",
    "StatisticsRecorder",
    "batch_fingerprint",
    "with_update_ratios",
]
