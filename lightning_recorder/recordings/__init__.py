"""Recorded statistics on disk: records written line by line, read back as tensors, and compared between runs."""

from lightning_recorder.recordings.comparison import Comparison, Difference, compare
from lightning_recorder.recordings.divergence import Divergence, SiteDivergence, Tolerance
from lightning_recorder.recordings.dumped import DumpEntry
from lightning_recorder.recordings.files import records_path
from lightning_recorder.recordings.history import Session
from lightning_recorder.recordings.lines import SiteRecord
from lightning_recorder.recordings.reader import Recording, open_recording
from lightning_recorder.recordings.run import Run
from lightning_recorder.recordings.series import Series
from lightning_recorder.recordings.siteseries import SiteSeries
from lightning_recorder.recordings.writer import RecordWriter

__all__ = [
    "Comparison",
    "Difference",
    "Divergence",
    "DumpEntry",
    "RecordWriter",
    "Recording",
    "Run",
    "Series",
    "Session",
    "SiteDivergence",
    "SiteRecord",
    "SiteSeries",
    "Tolerance",
    "compare",
    "open_recording",
    "records_path",
]
