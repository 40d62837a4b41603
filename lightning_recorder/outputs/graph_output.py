"""Write a recorded graph to files, and its picture to the loggers."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from lightning_recorder.disk import attempt, has_room, warn_of_error
from lightning_recorder.errors import RenderError, warn
from lightning_recorder.graph import Graph, GraphPicture
from lightning_recorder.sinks import Image, MultiSink
from lightning_recorder.temporary import write_bytes

__all__ = ["GraphOutput"]

# Upper bounds for a graph of 150 nodes: its document, one picture, and the temporary files of the renderer.
_DOCUMENT_BYTES = 2**17
_PICTURE_BYTES = 2**20
_SCRATCH_BYTES = 2**20

_RETRY_S = 1.0


class GraphOutput:
    """Writes a graph to a sink and to files, and draws its picture in a separate process.

    Without a directory, no files are written. The formats are any of ``svg``, ``png`` and ``pdf``. The sink, if there
    is one, receives the PNG. ``options`` are passed to :class:`~lightning_recorder.graph.GraphPicture`. With
    ``strict``, errors are raised instead of warned about, unless the disk is full.
    """

    def __init__(
        self,
        name: str,
        directory: Path | None,
        sink: MultiSink | None,
        *,
        formats: tuple[str, ...],
        strict: bool = False,
        **options: Any,
    ) -> None:
        self.picture: GraphPicture | None = None
        """The picture that is being drawn, if there is one."""
        self._name, self._directory, self._sink = name, directory, sink
        self._formats, self._strict, self._options = formats, strict, options
        self._step = 0
        self._waiting: Graph | None = None  # the graph while its files are not complete
        self._document = b""  # the contents of the graph's file, until the file is written
        self._retry_s = 0.0

    @property
    def is_waiting(self) -> bool:
        """True if a file of the graph could not be written, so that :meth:`retry` must write it."""
        return self._waiting is not None

    def write(self, step: int, graph: Graph) -> None:
        """Write the graph, and start drawing its picture.

        Raises:
            RenderError: If the picture cannot be drawn; only with ``strict``.
        """
        self._step = step
        if self._sink is not None:
            self._sink.write_graph(step, {self._name: graph})
            self._sink.replay()
        if self._directory is not None:
            self._waiting, self._document = graph, json.dumps(graph.to_json()).encode("utf-8")
            self.retry(at_once=True)

    def retry(self, *, at_once: bool = False) -> None:
        """Try again to write the files that failed, at most once per second, or immediately with ``at_once``.

        Raises:
            RenderError, OSError: If the picture cannot be drawn or a file not be written; only with ``strict``.
        """
        graph, directory, now = self._waiting, self._directory, time.monotonic()
        if graph is None or directory is None or (now < self._retry_s and not at_once):
            return
        self._retry_s = now + _RETRY_S
        path, data = directory / f"{self._name}.json", self._document
        if data and not attempt(path, len(data), partial(write_bytes, path, data), strict=self._strict):
            return
        self._document = b""
        nbytes = _DOCUMENT_BYTES + len(self._formats) * _PICTURE_BYTES
        try:
            if not self._formats or has_room(gettempdir(), _SCRATCH_BYTES):
                attempt(directory, nbytes, partial(self._draw, graph, directory), strict=self._strict)
        except RenderError as error:
            self._waiting = None
            self._warn_of_no_picture(error)

    def _draw(self, graph: Graph, directory: Path) -> None:
        self.picture = GraphPicture(graph, directory / f"{self._name}.dot", self._formats, **self._options)
        self._waiting = None

    def show(self, wait_s: float | None) -> None:
        """Send the picture to the sink, if there is one, after a last attempt to write the files.

        Args:
            wait_s: The maximum time to wait for the renderer, in seconds; ``None`` waits until it ends.

        Raises:
            RenderError, OSError: If the picture cannot be drawn; only with ``strict``.
        """
        self.retry(at_once=True)
        picture, self.picture = self.picture, None
        if picture is None:
            return
        try:
            paths = picture.finish(wait_s)
        except (RenderError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None and not self._strict:
                warn_of_error(self._directory or Path(), error)
            else:
                self._warn_of_no_picture(error)
            return
        if picture.note:
            warn(f"the picture of the graph is reduced: {picture.note}")
        for path in paths:
            if path.suffix == ".png" and self._sink is not None:
                self._sink.write_images(self._step, {self._name: _pixels(path)})
                self._sink.flush()
                self._sink.replay()

    def _warn_of_no_picture(self, error: Exception) -> None:
        if self._strict:
            raise error
        names = [f"{self._name}.{each}" for each in ("dot", "json")]
        there = [name for name in names if self._directory is not None and (self._directory / name).exists()]
        warn(f"the graph is in {self._directory}/{' and '.join(there)}, without a picture: {error}")


def _pixels(path: Path) -> Image:
    import numpy as np
    from PIL import Image as Picture

    with Picture.open(path) as picture:
        return np.asarray(picture.convert("RGB"))
