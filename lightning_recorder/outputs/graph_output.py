"""The files of a recorded graph, and its picture in the loggers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from lightning_recorder.disk import attempt, has_room, is_full, warn_of_full
from lightning_recorder.errors import RenderError, warn
from lightning_recorder.graph import Graph, GraphPicture
from lightning_recorder.sinks import Image, MultiSink
from lightning_recorder.temporary import write_whole

__all__ = ["GraphOutput"]

# Upper bounds for a graph of 150 nodes: its document, one picture, and the scratch files of the renderer.
_DOCUMENT_BYTES = 2**17
_PICTURE_BYTES = 2**20
_SCRATCH_BYTES = 2**20


class GraphOutput:
    """Write a graph to a sink and to files, and draw its picture in a separate process.

    Args:
        name: The name of the files and of the tag.
        directory: The folder of the files; ``None`` writes none.
        sink: The sink for the graph and its picture; may be ``None``.
        formats: The formats of the pictures: any of ``svg``, ``png`` and ``pdf``. The sink receives the PNG.
        strict: Raise errors of the renderer instead of warning about them.
        options: The keyword arguments of :class:`~lightning_recorder.graph.GraphPicture`.
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

    def write(self, step: int, graph: Graph) -> None:
        """Write the graph, and begin to draw its picture.

        Args:
            step: The recorded step.
            graph: The graph.

        Raises:
            RenderError: If the picture cannot be drawn; only with ``strict``.
        """
        self._step = step
        if self._sink is not None:
            self._sink.write_graph(step, {self._name: graph})
            self._sink.replay()
        directory = self._directory
        if directory is None:
            return
        path, data = directory / f"{self._name}.json", json.dumps(graph.to_json()).encode("utf-8")
        if not attempt(path, len(data), partial(_write, path, data)):
            return
        try:
            if not self._formats or has_room(gettempdir(), _SCRATCH_BYTES):
                nbytes = _DOCUMENT_BYTES + len(self._formats) * _PICTURE_BYTES
                attempt(directory, nbytes, partial(self._draw, graph, directory))
        except RenderError as error:
            self._warn_of_no_picture(error)

    def _draw(self, graph: Graph, directory: Path) -> None:
        self.picture = GraphPicture(graph, directory / f"{self._name}.dot", self._formats, **self._options)

    def show(self, wait_s: float | None) -> None:
        """Send the picture to the sink, if there is one. A no-op if it was sent before.

        Args:
            wait_s: The maximum time to wait for the renderer, in seconds; ``None`` waits until it ends.

        Raises:
            RenderError, OSError: If the picture cannot be drawn; only with ``strict``.
        """
        picture, self.picture = self.picture, None
        if picture is None:
            return
        try:
            paths = picture.finish(wait_s)
        except (RenderError, OSError) as error:
            if is_full(error) and not self._strict:
                warn_of_full(self._directory or Path(), error)
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
        there = f"{self._directory}/{self._name}.dot and {self._name}.json"
        warn(f"the graph is in {there}, without a picture: {error}")


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: file.write(data))


def _pixels(path: Path) -> Image:
    import numpy as np
    from PIL import Image as Picture

    with Picture.open(path) as picture:
        return np.asarray(picture.convert("RGB"))
