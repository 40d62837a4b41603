"""Streaming statistics: fixed-size states that are updated on the device and merged exactly."""

from lightning_recorder.reductions.bank import StateBank
from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.extrema import Extrema
from lightning_recorder.reductions.fused import prepare
from lightning_recorder.reductions.histogram import ExponentHistogram, Histogram
from lightning_recorder.reductions.moments import RunningMoments
from lightning_recorder.reductions.statistics import SCALAR_STATISTICS, Statistics, to_histogram
from lightning_recorder.reductions.tallies import Tallies
from lightning_recorder.reductions.values import Values

__all__ = [
    "SCALAR_STATISTICS",
    "ExponentHistogram",
    "Extrema",
    "Histogram",
    "Reduction",
    "RunningMoments",
    "StateBank",
    "Statistics",
    "Tallies",
    "Values",
    "prepare",
    "to_histogram",
]
