"""Pictures of a graph, reduced until they can be laid out and read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from lightning_recorder.errors import RenderError
from lightning_recorder.graph.layout import Layout
from lightning_recorder.graph.model import Graph
from lightning_recorder.graph.renderers.graphviz import Direction, GraphvizRenderer
from lightning_recorder.graph.renderers.graphviz_styler import GraphvizStyler
from lightning_recorder.graph.views.fit import fit_view
from lightning_recorder.graph.views.show_unused import show_unused

__all__ = ["GraphPicture"]

# The fractions of ``max_nodes`` to try. dot lays out a third of the nodes in about a tenth of the time.
_SHARES = (1.0, 0.35, 0.1)
# The fraction of the remaining time that each attempt except the last may take.
_PATIENCE = 0.6


class GraphPicture:
    """Pictures of a view of a graph. A child process lays them out; smaller views are the fallback.

    The ``.dot`` document of the view is always written.

    Args:
        graph: The whole graph.
        document: The path of the ``.dot`` file. The pictures are written to the same folder.
        formats: Graphviz formats; if empty, only the document is written.
        depth: As for :func:`fit_view`.
        max_nodes: As for :func:`fit_view`.
        styler: The styler that decides how nodes and edges look.
        direction: The direction of the data flow.
        legend: Add a legend that explains colors and shapes.
        unused: Add the modules that were never called; see :func:`show_unused`. They are not counted in ``max_nodes``.
        timeout_s: Seconds for all attempts together.

    Raises:
        RenderError: If no renderer is installed. The document is written nevertheless.
    """

    def __init__(
        self,
        graph: Graph,
        document: str | Path,
        formats: Sequence[str] = ("svg",),
        *,
        depth: int | None = None,
        max_nodes: int = 150,
        styler: GraphvizStyler | None = None,
        direction: Direction = "TB",
        legend: bool = False,
        unused: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        self._graph = graph
        self._document = Path(document)
        self._formats = tuple(formats)
        self._depth = depth
        self._styler = styler
        self._direction = direction
        self._legend = legend
        self._unused = unused
        self._budgets = sorted({max(1, int(max_nodes * share)) for share in _SHARES}, reverse=True)
        self._deadline = time.monotonic() + timeout_s
        self._result: list[Path] | RenderError | OSError = RenderError("nothing was tried")
        self.note = ""
        """A message that the picture has fewer nodes than requested, with the reason; empty if this is not the case."""
        self._layout: Layout | None = None
        self._try_next()

    def _try_next(self) -> None:
        budget = self._budgets.pop(0)
        view = fit_view(self._graph, budget, self._depth)
        view = show_unused(view) if self._unused else view
        renderer = GraphvizRenderer(view, self._styler, direction=self._direction, legend=self._legend)
        self._document.write_text(renderer.render().source, encoding="utf-8")
        if not self._formats:
            self._result = []
            return
        left = max(0.0, self._deadline - time.monotonic())
        self._layout = Layout(self._document, self._formats, left * _PATIENCE if self._budgets else left)

    def done(self) -> bool:
        """Return True if the pictures are complete or every attempt has failed.

        This does not block. After a failed attempt, it starts the next attempt.
        """
        if self._layout is not None and self._layout.done():
            self._finish(self._layout, 0.0)
        return self._layout is None

    def finish(self, wait_s: float | None = None) -> list[Path]:
        """Wait for the result and return the paths of the pictures.

        Args:
            wait_s: Seconds to wait; by default, the time that is left of ``timeout_s``.

        Raises:
            RenderError: If every attempt failed. The message holds the end of the renderer's output.
            OSError: If a file could not be written.
        """
        deadline = self._deadline if wait_s is None else min(self._deadline, time.monotonic() + wait_s)
        while self._layout is not None:
            self._finish(self._layout, max(0.0, deadline - time.monotonic()), last=time.monotonic() >= deadline)
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def _finish(self, layout: Layout, wait_s: float, *, last: bool = False) -> None:
        self._layout = None
        try:
            try:
                self._result = layout.finish(wait_s)
            except RenderError as error:
                self._result = error
                if self._budgets and not last and time.monotonic() < self._deadline:
                    self.note = f"it shows at most {self._budgets[0]} nodes, because with more: {error}"
                    self._try_next()
        except OSError as error:  # :meth:`finish` raises it
            self._result = error
