"""The contract of a sink: where results go."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from lightning_recorder.reductions.binned import Histogram

if TYPE_CHECKING:
    from lightning_recorder.graph.model import Graph

__all__ = ["Image", "Sink"]

Image = NDArray[np.uint8]
"""A picture, ``[height, width, 3]``, RGB."""


class Sink:
    """Takes results of several kinds and shows or stores them.

    Each verb takes the step first and then what to write by tag, and answers whether this sink shows that kind. The
    answer depends on the kind alone: it is the same for an empty mapping, of which nothing is written. A kind that a
    sink does not override is not supported: the answer is ``False``, nothing is written and nothing is raised, so that
    the caller can hand the results to another sink. A sink whose back end is switched off answers ``False`` throughout.

    Writing a tag again at the same step adds a second entry or replaces the first, as the back end has it; steps may go
    back. ``NaN`` and infinities are values like others; a histogram without a finite value may be left out. A tag is
    any text that is not empty, of any length. Where a back end refuses it, the sink writes it under another key, no two
    tags under the same, and never as a path: nothing is written outside of the run. What a verb gets is written in one
    call where the back end has such a call.

    An error of the back end is raised to the caller, also one while it is flushed or closed;
    :class:`~lightning_recorder.MultiSink` keeps one sink's error from the others, and closes all in any case.

    The step is the one that ``self.log`` uses in Lightning: the number of optimiser steps done before this one. Results
    arrive on the host.

    :meth:`flush` brings what was written to where it can be read, or on its way there where the back end sends it by
    itself; :meth:`close` flushes, and may be called twice. After it nothing may be written. A sink does not close a
    logger, a run or a writer that it was given.
    """

    any_thread: bool = False
    """Whether the sink may be written to from another thread while the training goes on. The callbacks then write in
    the background; otherwise between two batches. Never from two threads at once."""

    written_bytes: int | None = None
    """Bytes of the scalars, histograms and images written so far, where the sink counts them."""

    def __str__(self) -> str:
        return type(self).__name__

    def supports(self, verb: str) -> bool:
        """Whether the sink overrides a verb, as ``"write_files"``; it may answer ``False`` nevertheless."""
        return getattr(type(self), verb) is not getattr(Sink, verb)

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        """Write numbers by tag."""
        return False

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> bool:
        """Write binned values by tag."""
        return False

    def write_images(self, step: int, images: Mapping[str, Image]) -> bool:
        """Write pictures by tag, each ``[height, width, 3]`` uint8."""
        return False

    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        """Write Markdown by tag."""
        return False

    def write_files(self, step: int, files: Mapping[str, Path]) -> bool:
        """Hand over existing files by the name under which they are to be kept, relative and with ``/``.

        They are copied or sent; the caller's own stay.

        Raises:
            ArgumentError: If a name leads out of the run, as with ``..``.
            OSError: If a file is not there.
        """
        return False

    def write_graph(self, step: int, graphs: Mapping[str, Graph]) -> bool:
        """Write execution graphs by tag."""
        return False

    def flush(self) -> None:
        """Make everything that was written readable."""

    def close(self) -> None:
        """Flush and give up what the sink itself has opened."""
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
