"""The tensors of a step in files, while a model trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from typing_extensions import override

from lightning_recorder.callbacks.base import Compiled, RecorderCallback, guarded
from lightning_recorder.callbacks.checkpoints import CheckpointWatch
from lightning_recorder.callbacks.run import gradient_factor, logged_step
from lightning_recorder.callbacks.scale import LossScale
from lightning_recorder.compiled import compiled_modules
from lightning_recorder.dumps import can_hold
from lightning_recorder.errors import ArgumentError, check_bool, check_integer, check_some, tell
from lightning_recorder.recorders import (
    TENSOR_DUMP_TIMES,
    TENSOR_KINDS,
    BufferPool,
    DumpFolder,
    Event,
    SiteStatistics,
    TensorCapture,
    TensorDumps,
)
from lightning_recorder.schedule import Sampling
from lightning_recorder.selection import SelectedModules, Selection
from lightning_recorder.sinks import Sink

__all__ = ["TensorDumper"]


class TensorDumper(RecorderCallback):
    """Writes what the selected modules take and give in a step to files of tensors.

    On each sampled step the tensors of its first batch are copied; they become a safetensors file beside each
    checkpoint, at each of these steps, at the end of each epoch, or when something is out of the ordinary. Each file
    has a line in the ``recorder-manifest.jsonl`` beside it, and is read by :func:`~lightning_recorder.read_dump`.

    Args:
        names: Module names or globs, as ``"encoder.*"``; see :class:`~lightning_recorder.Selection`. By default all
            leaf modules.
        types: Module classes or their names; with ``names``, both must hold.
        exclude: Names or globs to leave out.
        tensors: Which: some of ``"inputs"``, ``"outputs"``, ``"input_gradients"`` and ``"output_gradients"``. Gradients
            are those of the loss that ``training_step`` returned.
        at: When they are written: ``"checkpoints"``, those of the latest sampled step beside each; ``"steps"``, each
            sampled step, and ``"epochs"``, the latest one, into ``<log_dir>/recorder/dumps``.
        when: A function of the statistics of a tensor, as ``lambda seen: seen.abs_max > 1e4``, or its import path; a
            sampled step is written as well if it is true of any of its tensors, as they are before ``samples`` and
            ``dtype``.
        every_n_train_steps: Sample the first optimiser step and then each n-th; by default
            ``Trainer(log_every_n_steps=…)``.
        every_n_epochs: Sample in the first epoch and then in each n-th.
        first_n_steps: So many steps at the beginning are sampled as well.
        step_window: ``(start, stop)``: nothing before step ``start``, and nothing from ``stop`` on.
        samples: So many rows of each tensor are copied; by default all of the batch.
        dtype: What floating-point tensors are rounded to, as ``"bfloat16"``.
        max_bytes: The most bytes of a step; what comes later in it is left out, which the manifest says.
        max_total_bytes: So much is written, beside checkpoints apart, before one warning says that no more is.
        per_rank: Whether each process writes its own tensors, with ``-rank1`` in the file names, or the first alone.
        upload: Whether the loggers that keep files get the dumps as well.
        max_upload_bytes: So much is uploaded.
        compiled: What becomes of compiled modules: ``"eager"``, a sampled step runs without the compiled code;
            ``"skip"``, they are left out.
        name: Tells this callback from others of its kind, also in the names of files.
        sinks: Further sinks, which are offered the files where ``upload`` is true.
        strict: Raise errors of the recorder instead of warning of them.

    Raises:
        ArgumentError: At construction, if an argument can never work.
        SelectionError: When the fit starts, if a name matches no module; with the closest names.

    Note:
        The training thread pays the copy. Files are written in the background, one tensor at a time, while two more
        steps may wait; with a further one the training waits. So at most four steps are held, and the latest one where
        it may be wanted. Training is not changed. With ``when`` a sampled step waits for the device.

    Example::

        Trainer(callbacks=[TensorDumper("encoder.*", at="steps", samples=4, dtype="bfloat16")])
    """

    def __init__(
        self,
        names: str | Sequence[str] | None = None,
        *,
        types: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = None,
        exclude: str | Sequence[str] | None = None,
        tensors: str | Sequence[Literal["inputs", "outputs", "input_gradients", "output_gradients"]] = ("outputs",),
        at: str | Sequence[Literal["checkpoints", "steps", "epochs"]] | None = None,
        when: Callable[[SiteStatistics], object] | str | None = None,
        every_n_train_steps: int | None = None,
        every_n_epochs: int = 1,
        first_n_steps: int = 0,
        step_window: Sequence[int] | None = None,
        samples: int | None = None,
        dtype: str | torch.dtype | None = None,
        max_bytes: int = 2**28,
        max_total_bytes: int = 2**32,
        per_rank: bool = False,
        upload: bool = False,
        max_upload_bytes: int = 2**28,
        compiled: Compiled = "eager",
        name: str = "",
        sinks: Iterable[Sink] = (),
        strict: bool = False,
    ) -> None:
        super().__init__(name=name, compiled=compiled, sinks=sinks, strict=strict)
        self.selection = Selection(names, types, exclude)
        self.tensors = check_some("tensors", tensors, TENSOR_KINDS)
        self.event = None if when is None else Event(when, "when", strict=strict)
        default = ("checkpoints",) if when is None else ()
        self.at = default if at is None else check_some("at", at, TENSOR_DUMP_TIMES)
        self.sampling = Sampling(every_n_train_steps, every_n_epochs, first_n_steps, step_window)
        if samples is not None:
            check_integer("samples", samples, 1)
        for argument, number in (("max_bytes", max_bytes), ("max_total_bytes", max_total_bytes)):
            check_integer(argument, number, 1)
        check_integer("max_upload_bytes", max_upload_bytes, 0)
        check_bool("per_rank", per_rank)
        check_bool("upload", upload)
        self.samples, self.dtype, self.max_bytes = samples, _dtype(dtype), max_bytes
        self.max_total_bytes, self.max_upload_bytes = max_total_bytes, max_upload_bytes
        self.per_rank, self.upload = per_rank, upload
        self._scale = LossScale()
        self._checkpoints = CheckpointWatch(
            self._checkpoint_saved, self._checkpoint_removed, self._no_more, name=str(self)
        )
        self._capture: TensorCapture | None = None
        self._dumps: TensorDumps | None = None
        self._schedule = self.sampling
        self._step: int | None = None  # the latest that was sampled

    @override
    def begin(self, trainer: Trainer, pl_module: LightningModule, directory: Path | None) -> None:
        modules = self._chosen(pl_module)
        if not modules and trainer.is_global_zero:
            tell(f"{self} dumps nothing: {type(pl_module).__name__} has no submodules, or all are compiled")
        if not modules or not (self.per_rank or trainer.is_global_zero):
            return
        self.open_sinks(trainer)
        label = self.label(trainer, "tensors")
        folder = DumpFolder(
            label,
            group="tensors",
            directory=None if directory is None else directory / "dumps",
            rank=trainer.global_rank,
            max_total_bytes=self.max_total_bytes,
            upload=self._keepers if self.upload else None,
            max_upload_bytes=self.max_upload_bytes,
            name=str(self),
            quiet=bool(trainer.fast_dev_run),  # type: ignore[attr-defined]  # set in Trainer.__init__
        )
        buffers = BufferPool()
        self._dumps = TensorDumps(folder, self.at, self.event, buffers=buffers, name=str(self), strict=self.strict)
        self._capture = TensorCapture(
            modules,
            self.tensors,
            samples=self.samples,
            dtype=self.dtype,
            max_bytes=self.max_bytes,
            statistics=self.event is not None,
            buffers=buffers,
            strict=self.strict,
        )
        for tap in self._capture.taps:
            tap.eager = self.compiled == "eager"
        self._schedule = self.sampling.with_default(trainer.log_every_n_steps)  # type: ignore[attr-defined]  # set in Trainer.__init__
        self._step = None
        if "checkpoints" in self.at:
            self._checkpoints.begin(trainer)

    def _chosen(self, pl_module: LightningModule) -> SelectedModules:
        modules = self.selection.resolve(pl_module)
        compiled = compiled_modules(pl_module) if self.compiled == "skip" else set()
        for name in [name for name, module in modules.items() if module in compiled]:
            del modules[name]
        return modules

    @override
    def release(self, trainer: Trainer | None) -> None:
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.remove()
            if trainer is not None:
                self._checkpoints.end(trainer)
        if self._dumps is not None:
            try:
                self._dumps.wait()
            finally:
                self._replay()
                if trainer is None or not trainer.interrupted:  # else the checkpoint of the exception is still to come
                    self._dumps = None

    # Batches.

    @guarded
    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._checkpoints.look(trainer)
        self._replay()
        step = logged_step(trainer)
        if self._capture is None or not self.enabled or step == self._step:
            return
        self._leave(self._capture)  # a batch that had a start and no end
        if self._schedule(step, trainer.current_epoch):
            self._step = step
            self._scale.begin_batch(trainer)
            self._capture.factor = gradient_factor(trainer, pl_module, self._scale.value)
            self._capture.attach()

    @guarded
    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._capture is None or not self._capture.attached:
            return
        self._capture.remove()
        if self._dumps is not None and self._step is not None:
            self._dumps.add(self._step, trainer.current_epoch, self._capture.take())

    @override
    def before_evaluation(self, trainer: Trainer) -> None:
        if self._capture is not None:
            self._leave(self._capture)

    @guarded
    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._checkpoints.look(trainer)
        if self._capture is not None and self._dumps is not None:
            self._leave(self._capture)
            self._dumps.end_epoch()

    def _leave(self, capture: TensorCapture) -> None:
        """Take off the hooks of a step that will not end."""
        if capture.attached:
            capture.remove()
            capture.drop()

    def _replay(self) -> None:
        if self._keepers is not None:
            self._keepers.replay()

    # Checkpoints.

    @guarded
    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._checkpoints.expect()

    def _checkpoint_saved(self, path: Path) -> None:
        if self._dumps is not None:
            self._dumps.write_beside(path)
            if self._capture is None:  # behind an exception, when nobody waits any more
                self._dumps.wait()

    def _checkpoint_removed(self, path: Path) -> None:
        if self._dumps is not None:
            self._dumps.remove_beside(path)

    def _no_more(self) -> None:
        if self._capture is None:  # the run has failed, and its exception's checkpoint is saved
            self._dumps = None

    @guarded
    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.per_rank and trainer.world_size > 1 and "checkpoints" in self.at:
            # The first rank removes checkpoints behind the last hook but this one.
            trainer.strategy.barrier("TensorDumper")
        super().on_fit_end(trainer, pl_module)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_capture": None, "_dumps": None}


def _dtype(given: object) -> torch.dtype | None:
    """The dtype, which may be given by its name."""
    found = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if found is None and given is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point or not can_hold(found):
        raise ArgumentError(f"dtype must be a floating-point type that safetensors has, as 'bfloat16', got {given!r}")
    return found
