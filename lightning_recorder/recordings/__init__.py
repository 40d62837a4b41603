"""Recordings on disk: read records as tensors, and compare runs."""

from lightning_recorder.recordings.comparison import Comparison, Difference, compare
from lightning_recorder.recordings.divergence import Divergence, SiteDivergence, Tolerance
from lightning_recorder.recordings.dump_entries import DumpEntry
from lightning_recorder.recordings.reader import Session
from lightning_recorder.recordings.recording import Recording, Run, open_recording
from lightning_recorder.recordings.series import Series, SiteSeries
from lightning_recorder.records.file import WATCH, RecordWriter, records_path
from lightning_recorder.records.table import Schema, SiteStatistics, Table

__all__ = [
    "WATCH",
    "Comparison",
    "Difference",
    "Divergence",
    "DumpEntry",
    "RecordWriter",
    "Recording",
    "Run",
    "Schema",
    "Series",
    "Session",
    "SiteDivergence",
    "SiteSeries",
    "SiteStatistics",
    "Table",
    "Tolerance",
    "compare",
    "open_recording",
    "records_path",
]
