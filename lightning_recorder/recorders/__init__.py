"""Recorders: a tap with a reduction, for any PyTorch loop."""

from lightning_recorder.recorders.statistics import SiteStatistics, StatisticsRecorder

__all__ = ["SiteStatistics", "StatisticsRecorder"]
