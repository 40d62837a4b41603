"""A sink for Lightning's CSV logger."""

from __future__ import annotations

import locale
from collections.abc import Mapping

from typing_extensions import override

from lightning_recorder.sinks.metrics import MetricsSink

__all__ = ["CsvSink"]

_STEP = "step"  # the column that the logger itself writes


class CsvSink(MetricsSink):
    """Writes scalars into the ``metrics.csv`` of a ``CSVLogger``, each step's as a row of its own.

    A column may appear late: the logger then writes its file anew with one column more and all of its rows. A tag that
    would keep it from doing so, since the file's encoding lacks a character or Python's reader refuses it, is written
    with an escape in its place, as the logger would raise at each row from then on, the user's included. A tag
    ``step`` is written as ``(step)``. What is no number is not supported.

    Note:
        Not for any thread: a row that comes while the logger saves is lost, or raises in the training. The logger
        deletes the ``metrics.csv`` of an earlier run in its folder when it is made, with a warning of Lightning's;
        a run that is resumed into the same ``version`` keeps its earlier rows only if the file is moved away before.
    """

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        return super().write_scalars(step, {_column(tag): value for tag, value in scalars.items()})


def _column(tag: str) -> str:
    if tag == _STEP:
        return f"({tag})"
    encoding = locale.getpreferredencoding(False)
    text = tag.encode(encoding, "backslashreplace").decode(encoding)
    return text.replace("\0", "\\x00")  # csv.reader raises on it before Python 3.11
