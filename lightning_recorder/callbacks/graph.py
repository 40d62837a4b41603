"""The execution graph of the first training step, as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_recorder.callbacks.base import RecorderCallback, guarded
from lightning_recorder.callbacks.run import logged_step, recorder_directory
from lightning_recorder.errors import ArgumentError, RenderError, check_integer, tell
from lightning_recorder.graph import Direction, Graph, GraphCapture, GraphvizRenderer, GraphvizStyler, Layout, fit
from lightning_recorder.graph.graphviz import check_direction
from lightning_recorder.sinks import Image, Sink
from lightning_recorder.stance import EagerStance

__all__ = ["GraphRecorder"]

_FORMATS = ("svg", "png", "pdf")
# A run that ends early, or fails, does not wait longer than this for its picture.
_LAST_WAIT_S = 5.0


class GraphRecorder(RecorderCallback):
    """Records the execution graph of the first real training step, loss included, and renders it once.

    No extra forward pass is made and no example input is needed. ``graph.json`` (all of the graph), ``graph.dot``,
    ``graph.svg`` and ``graph.png`` (a view that can be read) are written to ``<log_dir>/recorder``, and the picture to
    every logger that shows images, under the tag ``graph``. Graphviz runs in a process of its own while the training
    goes on.

    Args:
        depth: How many levels of modules to open at most; by default as many as ``max_nodes`` allows.
        max_nodes: The most nodes of the picture. Repeated blocks are drawn once with their number.
        direction: Where the data flows: ``"TB"``, ``"LR"``, ``"BT"`` or ``"RL"``.
        formats: Which pictures, of ``svg``, ``png`` and ``pdf``; loggers get the PNG.
        timeout_s: Seconds that Graphviz may take.
        styler: How nodes and edges look.
        sinks: Further sinks, beside the loggers of the trainer.
        strict: Raise errors of the recorder instead of warning of them.

    Raises:
        ArgumentError: At construction, if an argument can never work.

    Note:
        The step's values, gradients and random numbers stay as they are. With gradient accumulation the graph is that
        of the first batch. A compiled model runs this step eagerly. All ranks record, rank zero writes. Without a
        renderer the ``.dot`` file is written and one warning says how to get a picture.

    Example::

        Trainer(callbacks=[GraphRecorder(depth=2, direction="LR")])
    """

    def __init__(
        self,
        depth: int | None = None,
        *,
        max_nodes: int = 150,
        direction: Direction = "TB",
        formats: Sequence[str] = ("svg", "png"),
        timeout_s: float = 60.0,
        styler: GraphvizStyler | None = None,
        sinks: Iterable[Sink] = (),
        strict: bool = False,
    ) -> None:
        super().__init__(sinks=sinks, strict=strict)
        for name, value in (("depth", depth), ("max_nodes", max_nodes)):
            if value is not None:
                check_integer(name, value, 1)
        check_direction(direction)
        self.formats = (formats,) if isinstance(formats, str) else tuple(formats)
        if not set(self.formats) <= set(_FORMATS):
            raise ArgumentError(f"formats knows {', '.join(_FORMATS)}; got {', '.join(map(repr, self.formats))}")
        if styler is not None and not isinstance(styler, GraphvizStyler):
            raise ArgumentError(f"styler must be a GraphvizStyler, got {styler!r}")
        if not timeout_s > 0:
            raise ArgumentError(f"timeout_s must be positive, got {timeout_s!r}")
        self.depth = depth
        self.max_nodes = max_nodes
        self.direction = direction
        self.timeout_s = timeout_s
        self.styler = styler
        self.graph: Graph | None = None
        self._directory: Path | None = None
        self._capture: GraphCapture | None = None
        self._layout: Layout | None = None
        self._stance = EagerStance()
        self._step = 0
        self._waiting = False

    @override
    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.graph = None
        self._waiting = True
        self._directory = recorder_directory(trainer)
        self.open_sinks(trainer)

    @override
    def release(self, trainer: Trainer | None) -> None:
        self._waiting = False
        self._leave_capture()
        self._show(_LAST_WAIT_S)

    @guarded
    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # When a model's own on_train_batch_start ends the epoch, the batch before this one had a start and no end.
        self._leave_capture()
        if self._waiting:
            self._step = logged_step(trainer)
            self._stance.hold()
            self._capture = GraphCapture(pl_module, batch, name="batch", scope="training_step")
            self._capture.__enter__()

    @guarded
    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._capture is not None:
            graph = self._capture.graph()
            self._leave_capture()
            # A step that computed nothing, whose training_step gave None at once, is not the one to be shown.
            if not any(node.kind in ("op", "backward") for node in graph.nodes):
                return
            self._waiting = False
            self.graph = graph
            if trainer.is_global_zero:
                self._write(self.graph)
        elif self._layout is not None and self._layout.done():
            self._show(0.0)

    @guarded
    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_capture()

    @guarded
    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_capture()

    @guarded
    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_capture()
        self._show(None)

    def _leave_capture(self) -> None:
        capture, self._capture = self._capture, None
        try:
            if capture is not None:
                capture.__exit__(None, None, None)
        finally:
            self._stance.release()

    def _write(self, graph: Graph) -> None:
        if self._sink is not None:
            self._sink.write_graph(self._step, {"graph": graph})
        if self._directory is None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        view = fit(graph, self.max_nodes, self.depth)
        document = self._directory / "graph.dot"
        document.write_text(
            GraphvizRenderer(view, self.styler, direction=self.direction).render().source, encoding="utf-8"
        )
        (self._directory / "graph.json").write_text(json.dumps(graph.to_json()), encoding="utf-8")
        if self.formats:
            try:
                self._layout = Layout(document, self.formats, self.timeout_s)
            except (RenderError, OSError) as error:
                self._tell_no_picture(error)

    def _show(self, wait_s: float | None) -> None:
        """Hand the picture to the loggers, when there is one."""
        layout, self._layout = self._layout, None
        if layout is None:
            return
        try:
            pictures = layout.finish(wait_s)
        except (RenderError, OSError) as error:
            self._tell_no_picture(error)
            return
        for path in pictures:
            if path.suffix == ".png" and self._sink is not None:
                self._sink.write_images(self._step, {"graph": _pixels(path)})
                self._sink.flush()

    def _tell_no_picture(self, error: Exception) -> None:
        if self.strict:
            raise error
        tell(f"the graph is in {self._directory}/graph.dot and graph.json, without a picture: {error}")

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_capture": None,
            "_layout": None,
            "_stance": EagerStance(),
            "_waiting": False,
        }


def _pixels(path: Path) -> Image:
    import numpy as np
    from PIL import Image as Picture

    with Picture.open(path) as picture:
        return np.asarray(picture.convert("RGB"))
