"""The watch on every step of a run: its loss, its gradient norm, and the origin of the first bad value."""

from lightning_recorder.watch.flags import ModuleFlags
from lightning_recorder.watch.kept import KeptBatch, StateKeeper
from lightning_recorder.watch.kept_parameters import KeptParameters, ParameterCopies
from lightning_recorder.watch.origin import CommunicationError, Origin, OriginTrace
from lightning_recorder.watch.readings import LoggedReading, Reading, ReadingQueue
from lightning_recorder.watch.replicas import Replicas, WatchedRanks
from lightning_recorder.watch.spikes import SpikeDetector
from lightning_recorder.watch.step_series import StepSeries

__all__ = [
    "CommunicationError",
    "KeptBatch",
    "KeptParameters",
    "LoggedReading",
    "ModuleFlags",
    "Origin",
    "OriginTrace",
    "ParameterCopies",
    "Reading",
    "ReadingQueue",
    "Replicas",
    "SpikeDetector",
    "StateKeeper",
    "StepSeries",
    "WatchedRanks",
]
