"""The execution graph of the first training step, as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_recorder.callbacks.base import Compiled, RecorderCallback, guarded
from lightning_recorder.callbacks.run import logged_step
from lightning_recorder.compiled import compiled_modules
from lightning_recorder.errors import (
    ArgumentError,
    RenderError,
    check_bool,
    check_integer,
    check_some,
    describe_error,
    tell,
)
from lightning_recorder.graph import Direction, Graph, GraphCapture, GraphPicture, GraphvizStyler, record
from lightning_recorder.graph.graphviz import check_direction
from lightning_recorder.sinks import Image, Sink

__all__ = ["GraphRecorder"]

_FORMATS = ("svg", "png", "pdf")
_STAGES = ("train", "validate", "example")
# A run that ends early, or fails, does not wait longer than this for its picture.
_LAST_WAIT_S = 5.0


class GraphRecorder(RecorderCallback):
    """Records the execution graph of the first real training step, loss included, and renders it once.

    No extra forward pass is made and no example input is needed. ``graph.json`` (all of the graph), ``graph.dot``,
    ``graph.svg`` and ``graph.png`` (a view that can be read) are written to ``<log_dir>/recorder``, the picture to
    every logger that shows images, under the tag ``graph``, and the graph to TensorBoard's Graphs tab. Graphviz runs in
    a process of its own while the training goes on.

    Args:
        depth: How many levels of modules to open at most; by default as many as ``max_nodes`` allows.
        max_nodes: The most nodes of the picture. Repeated blocks are drawn once with their number. Where Graphviz needs
            too long, or a bitmap would be too small to read, a smaller view is drawn.
        stage: What is recorded: ``"train"``, the first training step; ``"validate"``, the first validation step behind
            the sanity check; ``"example"``, a call of the model with its ``example_input_array`` when the fit starts,
            which leaves no trace in it.
        direction: Where the data flows: ``"TB"``, ``"LR"``, ``"BT"`` or ``"RL"``.
        formats: Which pictures, of ``svg``, ``png`` and ``pdf``; loggers get the PNG.
        legend: Explain colours and shapes in the picture.
        timeout_s: Seconds that Graphviz may take.
        styler: How nodes and edges look.
        name: What the files and the tag are called; two of these callbacks in one trainer need two names.
        compiled: What becomes of a model of which parts are compiled: ``"eager"``, the recorded step runs without the
            compiled code; ``"skip"``, no graph is recorded.
        sinks: Further sinks, beside the loggers of the trainer.
        strict: Raise errors of the recorder instead of warning of them.

    Raises:
        ArgumentError: At construction, if an argument can never work; at fit start, if the model has no
            ``example_input_array`` and is to be recorded with it.

    Note:
        The step's values, gradients and random numbers stay as they are. With gradient accumulation the graph is that
        of the first batch. A compiled model runs this step eagerly. All ranks record, rank zero writes. When the step
        raises, what was done until then is written, with what failed marked. A run that is resumed from a checkpoint
        is not recorded again. Without a renderer the ``.dot`` file is written and one warning says how to get a
        picture.

    Example::

        Trainer(callbacks=[GraphRecorder(depth=2, direction="LR")])
    """

    def __init__(
        self,
        depth: int | None = None,
        *,
        max_nodes: int = 150,
        stage: Literal["train", "validate", "example"] = "train",
        direction: Direction = "TB",
        formats: str | Sequence[Literal["svg", "png", "pdf"]] = ("svg", "png"),
        legend: bool = False,
        timeout_s: float = 60.0,
        styler: GraphvizStyler | None = None,
        name: str = "graph",
        compiled: Compiled = "eager",
        sinks: Iterable[Sink] = (),
        strict: bool = False,
    ) -> None:
        super().__init__(name=name, compiled=compiled, sinks=sinks, strict=strict)
        if depth is not None:
            check_integer("depth", depth, 1)
        check_integer("max_nodes", max_nodes, 1)
        check_bool("legend", legend)
        check_direction(direction)
        self.formats = check_some("formats", formats, _FORMATS) if formats != [] and formats != () else ()
        if stage not in _STAGES:
            raise ArgumentError(f"stage must be one of {', '.join(_STAGES)}, got {stage!r}")
        if styler is not None and not isinstance(styler, GraphvizStyler):
            raise ArgumentError(f"styler must be a GraphvizStyler, got {styler!r}")
        given: object = timeout_s
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not given > 0:
            raise ArgumentError(f"timeout_s must be positive, got {timeout_s!r}")
        if not name:
            raise ArgumentError(f"name must be that of a file, without a folder, got {name!r}")
        self.depth = depth
        self.max_nodes = max_nodes
        self.stage = stage
        self.direction = direction
        self.legend = legend
        self.timeout_s = timeout_s
        self.styler = styler
        self.graph: Graph | None = None
        self._directory: Path | None = None
        self._capture: GraphCapture | None = None
        self._picture: GraphPicture | None = None
        self._step = 0
        self._waiting = False
        self._recorded = False
        self._resumed = False

    def __str__(self) -> str:
        return type(self).__name__ + (f" {self.name!r}" if self.name != "graph" else "")

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(name=self.name)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"recorded": self._recorded}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = bool(state_dict.get("recorded"))

    @override
    def begins_with(self, function: str) -> bool:
        return function in ("fit", self.stage)

    @override
    def begin(self, trainer: Trainer, pl_module: LightningModule, directory: Path | None) -> None:
        self.graph = None
        self._recorded = self._waiting = False
        self._directory = directory
        self.open_sinks(trainer)
        self.warn_of_eager_memory(pl_module)
        if self.compiled == "skip" and compiled_modules(pl_module):
            tell(f"{self} records no graph, since parts of the model are compiled and compiled='skip' is given")
            return
        if self._resumed:
            self._recorded, self._resumed = True, False
        elif self.stage == "example":
            self._record_example(trainer, pl_module)
        else:
            self._waiting = True

    @override
    def release(self, trainer: Trainer | None) -> None:
        self._waiting = False
        self._leave_capture()
        self._show(_LAST_WAIT_S)

    # What is recorded.

    @guarded
    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # When a model's own on_train_batch_start ends the epoch, the batch before this one had a start and no end.
        self._leave_capture()
        if self.stage == "train":
            self._start(trainer, pl_module, batch, "training_step")

    @guarded
    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._stop(trainer)

    @guarded
    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._leave_capture()
        if self.stage == "validate" and not trainer.sanity_checking:
            self._start(trainer, pl_module, batch, "validation_step")

    @guarded
    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._stop(trainer)

    def _record_example(self, trainer: Trainer, pl_module: LightningModule) -> None:
        example = pl_module.example_input_array
        if example is None:
            raise ArgumentError(
                f"stage='example' needs {type(pl_module).__name__}.example_input_array, which is not set: set it, or "
                "leave stage at 'train', which needs no example"
            )
        example = pl_module.transfer_batch_to_device(example, pl_module.device, 0)
        with trainer.precision_plugin.forward_context():
            self._keep(trainer, record(pl_module, input_data=example))

    def _start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, scope: str) -> None:
        if self._waiting and self.enabled:
            self._step = logged_step(trainer)
            self._capture = GraphCapture(pl_module, batch, name="batch", scope=scope)
            self._capture.__enter__()

    def _stop(self, trainer: Trainer) -> None:
        if self._capture is not None:
            graph = self._capture.graph()
            self._leave_capture()
            self._keep(trainer, graph)
        elif self._picture is not None and self._picture.done():
            self._show(0.0)

    def _keep(self, trainer: Trainer, graph: Graph) -> None:
        # A step that computed nothing, whose training_step gave None at once, is not the one to be shown.
        if any(node.kind in ("op", "backward") for node in graph.nodes):
            self._waiting = False
            self._recorded = True
            self.graph = graph
            if trainer.is_global_zero:
                self._write(graph)

    @override
    def before_evaluation(self, trainer: Trainer) -> None:
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

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        capture = self._capture
        if capture is not None and isinstance(exception, Exception):
            self._leave_failed(trainer, capture, exception)
        super().on_exception(trainer, pl_module, exception)

    def _leave_failed(self, trainer: Trainer, capture: GraphCapture, exception: Exception) -> None:
        """Show the step up to where it failed; nothing that goes wrong here takes the place of the exception."""
        try:
            self._leave_capture(exception)
            self._keep(trainer, capture.graph())
            self._recorded = False  # of the run that goes on from a checkpoint the step is still to be recorded
        except Exception as error:  # noqa: BLE001 - see above
            tell(f"the graph of the failed step could not be written: {describe_error(error)}")

    def _leave_capture(self, exception: Exception | None = None) -> None:
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.__exit__(type(exception) if exception else None, exception, None)

    # What becomes of it.

    def _write(self, graph: Graph) -> None:
        if self._sink is not None:
            self._sink.write_graph(self._step, {self.name: graph})
            self._sink.replay()
        if self._directory is None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / f"{self.name}.json").write_text(json.dumps(graph.to_json()), encoding="utf-8")
        try:
            self._picture = GraphPicture(
                graph,
                self._directory / f"{self.name}.dot",
                self.formats,
                depth=self.depth,
                max_nodes=self.max_nodes,
                styler=self.styler,
                direction=self.direction,
                legend=self.legend,
                timeout_s=self.timeout_s,
            )
        except RenderError as error:
            self._tell_no_picture(error)

    def _show(self, wait_s: float | None) -> None:
        """Hand the picture to the loggers, when there is one."""
        picture, self._picture = self._picture, None
        if picture is None:
            return
        try:
            paths = picture.finish(wait_s)
        except (RenderError, OSError) as error:
            self._tell_no_picture(error)
            return
        if picture.note:
            tell(f"the picture of the graph is smaller than asked for: {picture.note}")
        for path in paths:
            if path.suffix == ".png" and self._sink is not None:
                self._sink.write_images(self._step, {self.name: _pixels(path)})
                self._sink.flush()
                self._sink.replay()

    def _tell_no_picture(self, error: Exception) -> None:
        if self.strict:
            raise error
        there = f"{self._directory}/{self.name}.dot and {self.name}.json"
        tell(f"the graph is in {there}, without a picture: {error}")

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_capture": None,
            "_picture": None,
            "_waiting": False,
        }


def _pixels(path: Path) -> Image:
    import numpy as np
    from PIL import Image as Picture

    with Picture.open(path) as picture:
        return np.asarray(picture.convert("RGB"))
