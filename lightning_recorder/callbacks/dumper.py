"""Dump the tensors of training steps to files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from typing_extensions import override

from lightning_recorder.callbacks.base import RecorderCallback
from lightning_recorder.callbacks.checkpoints import CheckpointWatch, why_no_checkpoint
from lightning_recorder.callbacks.guard import guarded
from lightning_recorder.callbacks.lightning import LightningModule, Trainer
from lightning_recorder.callbacks.messages import Silence, say_ran_eagerly, why_no_files, why_no_step, write_ran_eagerly
from lightning_recorder.callbacks.output_options import Outputs
from lightning_recorder.callbacks.trainer import LossScale, gradient_factor, logged_step
from lightning_recorder.dumps import can_hold
from lightning_recorder.errors import ArgumentError, check_bool, check_integer, check_some, did_you_mean, warn
from lightning_recorder.outputs import TENSOR_DUMP_TIMES, DumpFolder, Event, TensorDumps
from lightning_recorder.schedule import Sampling, Schedule
from lightning_recorder.selection import Selection
from lightning_recorder.signatures import checked_arguments
from lightning_recorder.sinks import Sink
from lightning_recorder.tensors import TENSOR_KINDS, BufferPool, TensorCapture

__all__ = ["TensorDumper"]

_KIND_SYNONYMS = {
    "activations": "outputs",
    "gradients": "output_gradients",
    "grad_output": "output_gradients",
    "grad_outputs": "output_gradients",
    "grad_input": "input_gradients",
    "grad_inputs": "input_gradients",
}
_DTYPE_SYNONYMS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


class TensorDumper(RecorderCallback):
    """Dumps the inputs, outputs and gradients of the selected modules to safetensors files.

    On each sampled step, the tensors of its first batch are copied. A safetensors file (a *dump*) is written beside
    each checkpoint, on each sampled step, at the end of each epoch, or when ``Outputs(dump_when=…)`` returns true. Each
    dump has a line in the file ``recorder-manifest.jsonl`` in the same folder. Read a dump with
    :func:`~lightning_recorder.read_dump`.

    Args:
        names: Module names or globs, such as ``"encoder.*"``; see :class:`~lightning_recorder.Selection`. The default
            is every leaf module and every module that owns parameters.
        types: Module classes or their names. If ``names`` is also given, a module must match both.
        exclude: Names or globs of modules to leave out.
        tensors: The tensors to dump: any of ``"inputs"``, ``"outputs"``, ``"input_gradients"`` and
            ``"output_gradients"``. Gradients are those of the loss that ``training_step`` returned.
        at: The times at which dumps are written. ``"checkpoints"`` writes the latest sampled step beside each
            checkpoint. ``"steps"`` writes each sampled step, and ``"epochs"`` writes the latest sampled step of each
            epoch, to ``<log_dir>/recorder/dumps``. The default is ``"steps"`` if ``every_n_train_steps``, or
            ``first_n_steps``, ``step_window`` or ``when`` of the schedule, is given, ``"epochs"`` if only
            ``every_n_epochs`` is given, and ``"checkpoints"`` otherwise. With ``Outputs(dump_when=…)``, the default is
            none of the three. An explicit value takes precedence: ``at="checkpoints", every_n_train_steps=10`` samples
            every tenth step and writes the latest sample beside each checkpoint.
        every_n_train_steps: Sample the first optimizer step and then every n-th one. Defaults to
            ``Trainer(log_every_n_steps=…)``, or to every step if ``schedule`` has a window or a predicate.
        schedule: Further conditions on the sampled steps, such as ``Schedule(when=lambda step: step in (3, 70))``.
            ``max_overhead`` is not used.
        samples: The number of rows of each tensor to copy. By default, the whole batch is copied.
        dtype: The dtype to which floating-point tensors are rounded, such as ``"bfloat16"``.
        per_rank: Write the tensors of each rank, with ``-rank1`` and so on in the file names. By default, only rank 0
            writes its tensors.
        outputs: The condition ``dump_when`` on a sampled step, uploads, and the limits ``max_bytes``,
            ``max_total_bytes`` and ``max_upload_bytes``. The statistics that ``dump_when`` receives are computed before
            ``samples`` and ``dtype`` are applied. The other options are not used.
        compiled: ``"eager"`` runs compiled modules and functions eagerly on sampled steps; ``"skip"`` leaves compiled
            code compiled and does not dump the modules in it.
        name: A name that distinguishes this callback from others of the same class. It is part of the file names.
        sinks: Further sinks, which receive the files with ``Outputs(upload=True)``.
        strict: Raise errors of the recorder instead of warning about them.

    Raises:
        ArgumentError: If an argument is invalid. Raised at construction.
        SelectionError: If a name matches no module. Raised when the fit starts; the message lists the closest names.

    Note:
        The training thread only copies the tensors. A background thread writes the files, one tensor at a time. Two
        more steps can be queued; after that, training waits. At most four steps are held in memory, plus the latest
        step if it may still have to be written. Recording does not change training. With ``Outputs(dump_when=…)``, a
        sampled step synchronizes with the device.

    Example::

        Trainer(callbacks=[TensorDumper("encoder.*", at="steps", samples=4, dtype="bfloat16")])
    """

    group = "tensors"
    _ignored: ClassVar = {
        **dict.fromkeys(
            ("max_overhead", "stages", "histograms", "records", "plots", "findings", "ignored_rules", "report"), ""
        ),
        **dict.fromkeys(("plot_every_n_records", "max_images", "curves", "max_tags", "numbered_tags"), ""),
        "dumps": "at=…",
    }

    _event: Event | None
    _scale: LossScale
    _checkpoints: CheckpointWatch
    _capture: TensorCapture | None
    _dumps: TensorDumps | None
    _schedule: Sampling
    _step: int | None  # the latest sampled step

    @checked_arguments
    def __init__(
        self,
        names: str | Sequence[str] | None = None,
        *,
        types: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = None,
        exclude: str | Sequence[str] | None = None,
        tensors: str | Sequence[Literal["inputs", "outputs", "input_gradients", "output_gradients"]] = ("outputs",),
        at: str | Sequence[Literal["checkpoints", "steps", "epochs"]] | None = None,
        every_n_train_steps: int | None = None,
        schedule: Schedule = Schedule(),
        samples: int | None = None,
        dtype: str | torch.dtype | None = None,
        per_rank: bool = False,
        outputs: Outputs = Outputs(),
        compiled: Literal["eager", "skip"] = "eager",
        name: str = "",
        sinks: Iterable[Sink] = (),
        strict: bool = False,
    ) -> None:
        super().__init__(name=name, compiled=compiled, sinks=sinks, strict=strict)
        self.selection = Selection(names, types, exclude)
        self.tensors = check_some("tensors", tensors, TENSOR_KINDS, _KIND_SYNONYMS)
        self.outputs = outputs
        self.sampling = Sampling(every_n_train_steps, **vars(schedule))
        self.at = self._default_at() if at is None else check_some("at", at, TENSOR_DUMP_TIMES)
        if samples is not None:
            check_integer("samples", samples, 1)
        check_bool("per_rank", per_rank)
        self.samples, self.dtype, self.per_rank = samples, _dtype(dtype), per_rank
        if re.fullmatch(r"(.*-)?rank\d+", name):
            raise ArgumentError(f"name must not end like a rank, such as 'rank1', got {name!r}")
        self.__dict__.update(self._idle())

    @override
    def _idle(self) -> dict[str, Any]:
        when = self.outputs.dump_when
        return {
            **super()._idle(),
            "_scale": LossScale(),
            "_event": None if when is None else Event(when, "dump_when", name=str(self), strict=self.strict),
            "_checkpoints": CheckpointWatch(
                self._checkpoint_saved, self._checkpoint_removed, self._saving_ended, name=str(self)
            ),
            "_capture": None,
            "_dumps": None,
            "_schedule": self.sampling,
            "_step": None,
            "_ran_eagerly": 0,  # the number of compiled functions that ran eagerly so far
        }

    def _default_at(self) -> tuple[str, ...]:
        """Return the default of ``at``, which depends on the schedule and on ``dump_when``."""
        if self.outputs.dump_when is not None:
            return ()
        sampling = self.sampling
        windows = sampling.every_n_train_steps, sampling.step_window, sampling.when
        if sampling.first_n_steps or any(each is not None for each in windows):
            return ("steps",)
        return ("epochs",) if sampling.every_n_epochs > 1 else ("checkpoints",)

    @override
    def _silences(self, trainer: Trainer, function: str) -> Iterator[Silence]:
        dumps, capture = self._dumps, self._capture
        if dumps is None or capture is None:
            return
        dumps.wait()
        if dumps.failed:
            return  # already warned
        what = "wrote nothing"
        if not dumps.steps:
            why_not = why_no_step(trainer, self.sampling, self._began, is_enabled=self.enabled)
            yield why_not._replace(what=what)
        elif not dumps.tensors:
            why = "the selected modules produced none of the requested tensors"
            yield Silence(why, "Select others.", "wrote no tensors")
        elif dumps.folder.written or dumps.folder.is_full:
            return
        elif self.at and (why := why_no_files(trainer, self._directory)):
            yield Silence(why, "", what)
        elif self.at == ("checkpoints",):
            fix = "Save checkpoints, or pass every_n_train_steps or at='steps'."
            yield Silence(why_no_checkpoint(trainer), fix, what)

    @override
    def _begin_run(self, trainer: Trainer, pl_module: LightningModule, directory: Path | None) -> None:
        modules = self.selection.resolve(pl_module)
        self._skip_modules(pl_module, modules)
        if not modules and trainer.is_global_zero:
            warn(f"{self} dumps nothing: {type(pl_module).__name__} has no submodules, or all are compiled or scripted")
        if not modules or not (self.per_rank or trainer.is_global_zero):
            return
        self._open_sinks(trainer)
        outputs, label = self.outputs, self.label(trainer)
        folder = DumpFolder(
            label,
            group=self.group,
            directory=None if directory is None else directory / "dumps",
            rank=trainer.global_rank,
            max_total_bytes=2**32 if outputs.max_total_bytes is None else outputs.max_total_bytes,
            upload=self._artifact_sinks if outputs.upload else None,
            max_upload_bytes=outputs.max_upload_bytes,
            name=str(self),
            quiet=bool(trainer.fast_dev_run),  # type: ignore[attr-defined]  # set in Trainer.__init__
            strict=self.strict,
        )
        buffers = BufferPool()
        self._dumps = TensorDumps(folder, self.at, self._event, buffers=buffers, name=str(self), strict=self.strict)
        self._capture = TensorCapture(
            modules,
            self.tensors,
            samples=self.samples,
            dtype=self.dtype,
            max_bytes=outputs.max_bytes,
            statistics=self._event is not None,
            buffers=buffers,
            strict=self.strict,
        )
        for tap in self._capture.taps:
            tap.eager = self.compiled == "eager"
        self._schedule = self.sampling.with_default(trainer.log_every_n_steps)  # type: ignore[attr-defined]  # set in Trainer.__init__
        self._step = None
        self._ran_eagerly = 0
        if "checkpoints" in self.at:
            self._checkpoints.begin(trainer)

    @override
    def _release(self, trainer: Trainer | None) -> None:
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
                if trainer is None or not trainer.interrupted:  # after an exception, keep it: a checkpoint follows
                    self._dumps = None

    # Batches.

    @guarded
    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._checkpoints.is_pending:
            self._checkpoints.look(trainer)
        if self.outputs.upload:
            self._replay()
        step = logged_step(trainer)
        if self._capture is None or not self._enabled or step == self._step:
            return
        if self._capture.attached:
            self._leave(self._capture)  # the previous batch started but did not end
        if self._schedule(step, trainer.current_epoch):
            self._step = step
            self._scale.begin_batch(trainer)
            self._capture.factor = gradient_factor(trainer, self._scale.value)
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
        names = self._capture.ran_eagerly
        if len(names) > self._ran_eagerly:
            self._ran_eagerly = len(names)
            say_ran_eagerly(trainer, names)
            directory, label = self._rank_zero_directory(trainer), self.label(trainer)
            write_ran_eagerly(directory, label, self._step or 0, names)

    @override
    def _before_evaluation(self, trainer: Trainer) -> None:
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
        """Remove the hooks of a step that will not end, and drop its tensors."""
        if capture.attached:
            capture.remove()
            capture.drop()

    def _replay(self) -> None:
        if self._artifact_sinks is not None:
            self._artifact_sinks.replay()

    # Checkpoints.

    @guarded
    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._checkpoints.expect()

    def _checkpoint_saved(self, path: Path) -> None:
        if self._dumps is not None:
            self._dumps.write_beside(path)
            if self._capture is None:  # after an exception, wait now, because nothing waits later
                self._dumps.wait()

    def _checkpoint_removed(self, path: Path) -> None:
        if self._dumps is not None:
            self._dumps.remove_beside(path)

    def _saving_ended(self) -> None:
        if self._capture is None:  # the run failed, and this is the checkpoint for its exception
            self._dumps = None

    @guarded
    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.per_rank and trainer.world_size > 1 and "checkpoints" in self.at:
            # Rank 0 may still remove checkpoints after the previous hook has ended on this rank, so wait for rank 0.
            trainer.strategy.barrier("TensorDumper")
        super().on_fit_end(trainer, pl_module)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.dtype = _dtype(self.dtype)  # YAML stores it as text


def _dtype(given: object) -> torch.dtype | None:
    """Return the dtype, which may be given by its name.

    Raises:
        ArgumentError: If it is not a floating-point dtype that safetensors supports.
    """
    found = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if found is None and given is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point or not can_hold(found):
        hint = did_you_mean(given, ("float64", "float32", "float16", "bfloat16"), _DTYPE_SYNONYMS)
        raise ArgumentError(
            f"dtype must be a floating-point type that safetensors supports, such as 'bfloat16', got {given!r}{hint}"
        )
    return found
