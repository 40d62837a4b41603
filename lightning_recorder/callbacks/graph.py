"""Record and draw the execution graph of the first training step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from lightning_recorder.callbacks.base import RecorderCallback, fixed_in_run
from lightning_recorder.callbacks.guard import BATCH_HOOKS, guarded
from lightning_recorder.callbacks.lightning import LightningModule, Trainer, rank_zero_info
from lightning_recorder.callbacks.messages import (
    Silence,
    say_ran_eagerly,
    warn_of_eager_memory,
    why_no_files,
    why_no_training,
    why_no_validation,
    write_ran_eagerly,
)
from lightning_recorder.callbacks.trainer import logged_step
from lightning_recorder.errors import (
    ArgumentError,
    check_bool,
    check_integer,
    check_some,
    describe_error,
    did_you_mean,
    warn,
)
from lightning_recorder.graph import Direction, Graph, GraphCapture, GraphvizStyler, record
from lightning_recorder.graph.capture.call_arguments import prepare
from lightning_recorder.graph.renderers.details import check_measured
from lightning_recorder.graph.renderers.graphviz import check_direction
from lightning_recorder.inputs import as_arguments
from lightning_recorder.outputs import GraphOutput
from lightning_recorder.portable import Portable, unwrap
from lightning_recorder.schedule import STAGE_SYNONYMS
from lightning_recorder.signatures import checked_arguments
from lightning_recorder.sinks import Sink

__all__ = ["GraphRecorder"]

_FORMATS = ("svg", "png", "pdf")
_STAGES = ("train", "validate", "example")
# The maximum time that a run waits for its picture if it ends early or fails.
_LAST_WAIT_S = 5.0


class GraphRecorder(RecorderCallback):
    """Records the execution graph of the first training step, including the loss, and renders it once.

    The graph is captured from the real step, without an extra forward pass or an example input. The full graph
    (``graph.json``) and a readable view of it (``graph.dot``, ``graph.svg`` and ``graph.png``) are written to
    ``<log_dir>/recorder``. Loggers that show images receive the picture under the tag ``graph``, and TensorBoard's
    Graphs tab receives the graph. Graphviz runs in a separate process while training continues.

    Args:
        depth: The maximum number of module levels to expand. By default, as many as ``max_nodes`` allows.
        max_nodes: The maximum number of nodes in the picture. Repeated blocks are drawn once, with a repeat count. A
            smaller view is drawn if Graphviz takes too long or if a bitmap would be too small to read.
        stage: The step to record. ``"train"`` is the first training step. ``"validate"`` is the first validation step
            after the sanity check. ``"example"`` is a call of the model with its ``example_input_array`` when the fit
            starts; this call leaves the model unchanged.
        direction: The direction of the data flow: ``"TB"``, ``"LR"``, ``"BT"`` or ``"RL"``.
        formats: The formats of the pictures: any of ``svg``, ``png`` and ``pdf``. Loggers receive the PNG.
        legend: Explain colors and shapes in the picture.
        unused: Also draw the modules that were never called. ``graph.json`` lists them in any case.
        timeout_s: The time limit of Graphviz in seconds.
        styler: The style of nodes and edges.
        name: The name of the files and of the tag. Two of these callbacks in one trainer need different names.
        costs: Also measure the wall time, the floating-point operations and the bytes kept for the backward pass of
            each function. The recorded step then takes longer.
        compiled: ``"eager"`` runs compiled modules and functions eagerly on the recorded step, so that their contents
            are drawn; ``"skip"`` leaves compiled code compiled and draws each call of it as one node.
        sinks: Further sinks, in addition to the loggers of the trainer.
        strict: Raise errors of the recorder instead of warning about them.

    Raises:
        ArgumentError: If an argument is invalid (at construction), or if ``stage="example"`` and the model has no
            ``example_input_array`` (when the fit starts).

    Note:
        Recording does not change the values, gradients or random numbers of the step. With gradient accumulation, the
        graph is that of the first batch. All ranks record, and rank 0 writes. If the step raises an exception, the
        graph up to that point is written and the failed part is marked. A run that is resumed from a checkpoint is not
        recorded again. If no renderer is available, the ``.dot`` file is written and one warning explains how to get a
        picture.

    Example::

        Trainer(callbacks=[GraphRecorder(depth=2, direction="LR")])
    """

    group = "graph"

    graph: Graph | None
    _directory: Path | None
    _capture: GraphCapture | None
    _output: GraphOutput | None
    _step: int
    _waiting: bool
    _has_seen_step: bool
    _recorded: bool
    _is_in_checkpoint: bool

    @checked_arguments
    def __init__(
        self,
        depth: int | None = None,
        *,
        max_nodes: int = 150,
        stage: Literal["train", "validate", "example"] = "train",
        direction: Direction = "TB",
        formats: str | Sequence[Literal["svg", "png", "pdf"]] = ("svg", "png"),
        legend: bool = False,
        unused: bool = False,
        timeout_s: float = 60.0,
        styler: GraphvizStyler | None = None,
        name: str = "graph",
        costs: bool = False,
        compiled: Literal["eager", "skip"] = "eager",
        sinks: Iterable[Sink] = (),
        strict: bool = False,
    ) -> None:
        super().__init__(name=name, compiled=compiled, sinks=sinks, strict=strict)
        if depth is not None:
            check_integer("depth", depth, 1)
        check_integer("max_nodes", max_nodes, 1)
        check_bool("legend", legend)
        check_bool("unused", unused)
        check_bool("costs", costs)
        check_direction(direction)
        self.formats = check_some("formats", formats, _FORMATS) if formats != [] and formats != () else ()
        if stage not in _STAGES:
            hint = did_you_mean(stage, _STAGES, STAGE_SYNONYMS)
            raise ArgumentError(f"stage must be one of {', '.join(_STAGES)}, got {stage!r}{hint}")
        if styler is not None and not isinstance(styler, GraphvizStyler):
            raise ArgumentError(f"styler must be a GraphvizStyler, got {styler!r}")
        if styler is not None and not costs:
            check_measured(getattr(styler, "color_by", None))
        given: object = timeout_s
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not given > 0:
            raise ArgumentError(f"timeout_s must be positive, got {timeout_s!r}")
        if not name:
            raise ArgumentError(f"name must be a file name without a folder, got {name!r}")
        if name.casefold() == "receipt":
            raise ArgumentError(f"name must not be {name!r}: the other recorders write receipt.json")
        self.depth = depth
        self.max_nodes = max_nodes
        self.stage = stage
        self.direction = direction
        self.legend = legend
        self.show_unused = unused
        self.costs = costs
        self.timeout_s = timeout_s
        self.styler = styler
        self.__dict__.update(self._idle())

    @override
    def _idle(self) -> dict[str, Any]:
        return {
            **super()._idle(),
            "graph": None,
            "_capture": None,
            "_output": None,
            "_step": 0,
            "_waiting": False,
            "_has_seen_step": False,
            "_recorded": False,
            "_is_in_checkpoint": False,
        }

    def __str__(self) -> str:
        return type(self).__name__ + (f" {self.name!r}" if self.name != "graph" else "")

    @fixed_in_run
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint."""
        return self._generate_state_key(name=self.name)

    @guarded
    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Does not use state_dict; StatisticsCallback.on_save_checkpoint has the reason.
        checkpoint.setdefault("callbacks", {}).setdefault(self.state_key, {})["recorded"] = self._recorded

    @guarded
    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._is_in_checkpoint = bool(checkpoint.get("callbacks", {}).get(self.state_key, {}).get("recorded"))

    @override
    def _begins_with(self, function: str) -> bool:
        return function in ("fit", self.stage)

    @override
    def _begin_run(self, trainer: Trainer, pl_module: LightningModule, directory: Path | None) -> None:
        self.graph = None
        self._recorded = self._waiting = self._has_seen_step = False
        self._open_sinks(trainer)
        if self.compiled == "eager":
            warn_of_eager_memory(pl_module, str(self))
        if self._is_in_checkpoint:
            self._recorded, self._is_in_checkpoint = True, False
        elif self.stage == "example":
            self._record_example(trainer, pl_module)
        else:
            prepare()
            self._waiting = True

    @override
    def _release(self, trainer: Trainer | None) -> None:
        self._waiting = False
        self._leave_capture()
        self._show(_LAST_WAIT_S)

    @override
    def _silences(self, trainer: Trainer, function: str) -> Iterator[Silence]:
        if not self._waiting:
            return
        if not self.enabled:
            why = Silence("it is disabled")
        elif self._has_seen_step:
            why = Silence("no step ran an operation", "Run the model in the step.")
        elif function == "fit" and self._began is None:
            why = why_no_training(trainer)
        elif function == "fit" and self.stage == "validate":
            why = why_no_validation(trainer)
        else:
            why = Silence("it was disabled at every step")
        yield why._replace(what="recorded no graph")

    # Recording.

    @guarded
    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # If the model's own on_train_batch_start ended the epoch, the previous batch started but did not end, so its
        # capture is still open.
        if self._capture is not None:
            self._leave_capture()
        if self._waiting and self.stage == "train":
            self._start(trainer, pl_module, batch, "training_step")

    @guarded
    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._capture is not None or self._output is not None:
            self._stop(trainer)
        if not self._waiting and self._capture is None and self._output is None:
            self._hide_hooks(trainer, *BATCH_HOOKS)  # until the end of the run

    @guarded
    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._capture is not None:
            self._leave_capture()
        if self._waiting and self.stage == "validate" and not trainer.sanity_checking:
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
        if self._capture is not None or self._output is not None:
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
            self._keep(trainer, record(pl_module, input_data=as_arguments(pl_module, example), costs=self.costs))

    def _start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, scope: str) -> None:
        if self.enabled:
            self._has_seen_step = True
            self._step = logged_step(trainer)
            eager = self.compiled == "eager"
            self._capture = GraphCapture(pl_module, batch, name="batch", scope=scope, eager=eager, costs=self.costs)
            self._capture.__enter__()

    def _stop(self, trainer: Trainer) -> None:
        if self._capture is not None:
            graph, names, broken = self._capture.graph(), self._capture.ran_eagerly, self._capture.is_broken
            self._leave_capture()
            self._keep(trainer, graph, broken=broken)
            say_ran_eagerly(trainer, names)
            write_ran_eagerly(self._rank_zero_directory(trainer), self.name, self._step, names)
        elif self._output is not None:
            self._output.retry()
            if not self._output.is_waiting and (self._output.picture is None or self._output.picture.done()):
                self._show(0.0)

    def _keep(self, trainer: Trainer, graph: Graph, *, broken: bool = False) -> None:
        # The graph is not shown if training_step returned None at once and computed nothing. After a recording error,
        # no later step is recorded, because the warning about the incomplete graph would then be wrong.
        if broken or any(node.kind in ("op", "backward") for node in graph.nodes):
            self._waiting = False
            self._recorded = True
            self.graph = graph
            if trainer.is_global_zero:
                self._write(graph)
                if self._directory is None:
                    rank_zero_info(f"{self}: {why_no_files(trainer, None)}, the graph is in the callback's graph alone")

    @override
    def _before_evaluation(self, trainer: Trainer) -> None:
        self._leave_capture()

    @guarded
    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_capture()
        if self._output is not None:
            self._output.retry(at_once=True)

    @guarded
    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_capture()
        self._show(None)

    @guarded
    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        capture = self._capture
        if capture is not None and isinstance(exception, Exception):
            self._leave_failed(trainer, capture, exception)
        super().on_exception(trainer, pl_module, exception)

    @override
    def _abandon_batch(self, trainer: Trainer, exception: Exception | None) -> None:
        capture = self._capture
        if capture is not None and exception is not None:
            self._leave_failed(trainer, capture, exception)
            self._waiting = True  # if the loop handles the exception, the next step replaces the graph
        self._leave_capture()

    def _leave_failed(self, trainer: Trainer, capture: GraphCapture, exception: Exception) -> None:
        """Write the graph up to the failure. Errors become warnings, so that they do not replace the exception."""
        try:
            self._leave_capture(exception)
            self._keep(trainer, capture.graph())
            self._recorded = False  # a run that resumes from a checkpoint still records the step
        except Exception as error:  # noqa: BLE001 - must not replace the user's exception
            warn(f"the graph of the failed step could not be written: {describe_error(error)}")

    def _leave_capture(self, exception: Exception | None = None) -> None:
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.__exit__(type(exception) if exception else None, exception, None)

    def _write(self, graph: Graph) -> None:
        self._output = GraphOutput(
            self.name,
            self._directory,
            self._sink,
            formats=self.formats,
            strict=self.strict,
            depth=self.depth,
            max_nodes=self.max_nodes,
            styler=self.styler,
            direction=self.direction,
            legend=self.legend,
            unused=self.show_unused,
            timeout_s=self.timeout_s,
        )
        self._output.write(self._step, graph)

    def _show(self, wait_s: float | None) -> None:
        """Send the picture to the loggers, if there is one, after waiting for it for at most ``wait_s`` seconds."""
        output, self._output = self._output, None
        if output is not None:
            output.show(wait_s)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "styler": None if self.styler is None else Portable(self.styler, "styler")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        styler = None if state["styler"] is None else unwrap(state["styler"])
        self.styler = styler if isinstance(styler, GraphvizStyler) else None
        self._lose([styler])
