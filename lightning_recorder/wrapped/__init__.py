"""The wrapped network: a module whose outputs, shapes and costs can be recorded and summarized."""

from lightning_recorder.wrapped.net import RecordedNet
from lightning_recorder.wrapped.summary import Summary, SummaryRow

__all__ = [
    "RecordedNet",
    "Summary",
    "SummaryRow",
]
