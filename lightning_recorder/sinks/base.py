"""The sink interface: the base classes of all back ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, override

from lightning_recorder.records.histogram import Histogram

if TYPE_CHECKING:
    from lightning_recorder.graph.model import Graph

__all__ = ["Image", "Sink", "UniformSink"]

Image = NDArray[np.uint8]
"""An RGB image, uint8, of shape ``[height, width, 3]``."""


class Sink:
    """Base class of the sinks, which store or display results.

    The methods that write, such as :meth:`write_scalars`, are called verbs. Each verb takes the step and a mapping from
    tags to values, and returns True if the sink supports that kind of result. The return value depends only on the
    kind. For an empty mapping, it is the same, and nothing is written. A verb that a sink does not override
    returns ``False`` without writing or raising, so that the caller can pass the results to another sink. A sink with a
    disabled back end returns ``False`` from every verb.

    Writing a tag twice at the same step adds a second entry or replaces the first entry, depending on the back end.
    Steps may decrease. ``NaN`` and infinities are valid values. A sink may skip a histogram without a finite value. A
    tag is any nonempty string of any length. If a back end rejects a tag, the sink writes it under another key.
    Different tags get different keys. No tag is used as a path, so nothing is written outside the run. A sink writes
    all values of a call at once if the back end supports that.

    Errors of the back end are raised to the caller, including errors of a flush or a close.
    :class:`~lightning_recorder.sinks.MultiSink` isolates the sinks from each other's errors and always closes all of
    them.

    The step is the same as in Lightning's ``self.log``: the number of optimizer steps done before this one. All values
    are on the CPU.

    :meth:`flush` makes the written results readable, or starts their upload if the back end uploads on its own.
    :meth:`close` flushes and is idempotent. Nothing may be written after a close. A sink does not close a logger, a run
    or a writer that the caller passed in.
    """

    any_thread: bool = False
    """True if a thread other than the training thread may write to the sink. The callbacks then write in the
    background. Otherwise they write between two batches. Two threads never write at the same time."""

    written_bytes: int | None = None
    """The number of bytes of scalars, histograms and images written so far, or None if the sink does not count them."""

    def __str__(self) -> str:
        return type(self).__name__

    def supports(self, verb: str) -> bool:
        """Return True if the sink overrides a verb such as ``"write_files"``. The verb may still return ``False``."""
        return getattr(type(self), verb) is not getattr(Sink, verb)

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        """Write scalars by tag."""
        return False

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> bool:
        """Write histograms by tag."""
        return False

    def write_images(self, step: int, images: Mapping[str, Image]) -> bool:
        """Write images by tag, each uint8 of shape ``[height, width, 3]``."""
        return False

    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        """Write Markdown texts by tag."""
        return False

    def write_files(self, step: int, files: Mapping[str, Path]) -> bool:
        """Copy or upload existing files. The original files are not moved.

        Args:
            step: The step.
            files: The paths by target name. A target name is relative and uses ``/``.

        Raises:
            ArgumentError: If a name points outside the run, for example with ``..``.
            OSError: If a file does not exist.
        """
        return False

    def write_graph(self, step: int, graphs: Mapping[str, Graph]) -> bool:
        """Write execution graphs by tag."""
        return False

    def joined(self) -> AbstractContextManager[object]:
        """Return a context. Inside it, the sink may hold back this thread's results, and write them when it ends."""
        return nullcontext()

    def flush(self) -> None:
        """Make all written results readable."""

    def close(self) -> None:
        """Flush, and release the resources that the sink has opened itself."""
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class UniformSink(Sink, ABC):
    """Base class of sinks that handle all kinds of results in one method."""

    @abstractmethod
    def _write(self, verb: str, step: int, values: Mapping[str, Any]) -> bool:
        """Write results with a verb such as ``"write_scalars"``. Return True if that kind is supported."""

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        return self._write("write_scalars", step, scalars)

    @override
    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> bool:
        return self._write("write_histograms", step, histograms)

    @override
    def write_images(self, step: int, images: Mapping[str, Image]) -> bool:
        return self._write("write_images", step, images)

    @override
    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        return self._write("write_text", step, texts)

    @override
    def write_files(self, step: int, files: Mapping[str, Path]) -> bool:
        return self._write("write_files", step, files)

    @override
    def write_graph(self, step: int, graphs: Mapping[str, Graph]) -> bool:
        return self._write("write_graph", step, graphs)
