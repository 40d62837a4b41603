"""Hooks that record validation, test and predict runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from typing_extensions import override

from lightning_recorder.callbacks.base import RecorderCallback
from lightning_recorder.callbacks.guard import guarded
from lightning_recorder.callbacks.lightning import LightningModule, Trainer
from lightning_recorder.callbacks.messages import say_ran_eagerly
from lightning_recorder.callbacks.trainer import logged_step
from lightning_recorder.internals.module_tree import is_a, modules_of
from lightning_recorder.schedule import Sampling
from lightning_recorder.statistics import EvaluationRecorder, EvaluationSampler

__all__ = ["EvaluationCallback", "never_fused"]

_SETTLING_STEPS = 100
"""No validation is sampled before this step, since the running statistics of normalizations lag behind."""


def _start_hook(stage: str, name: str) -> Callable[..., None]:
    """Return a hook of the given name that starts to record a batch of an evaluation."""

    def start(
        self: EvaluationCallback,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self.evaluations:
            self._start_evaluation_batch(trainer, stage, dataloader_idx)
        sampler = self.sampler
        if sampler is not None and (sampler.is_recording or batch_idx == 0) and stage == sampler.stage:
            self._start_sampled_batch(trainer, sampler, batch_idx, dataloader_idx)

    start.__name__, start.__qualname__ = name, f"EvaluationCallback.{name}"
    return guarded(start)


def _end_hook(stage: str, name: str) -> Callable[..., None]:
    """Return a hook of the given name that stops recording until the next batch."""

    def end(self: EvaluationCallback, trainer: Trainer, pl_module: LightningModule, *batch: Any, **more: Any) -> None:
        if stage in self.evaluations:
            self.evaluations[stage].end_batch()
        if self.sampler is not None and self.sampler.is_recording and stage == self.sampler.stage:
            self.sampler.end_batch()

    end.__name__, end.__qualname__ = name, f"EvaluationCallback.{name}"
    return guarded(end)


def _first(batches: object) -> float:
    """Return the number of batches of the first data loader. Lightning stores a list or a number."""
    number = next(iter(batches), 1) if isinstance(batches, Sequence) else batches
    return number if isinstance(number, (int, float)) else 1


def never_fused(modules: Mapping[str, nn.Module], root: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model whose hooks change no value in an evaluation.

    An ``nn.TransformerEncoderLayer`` in eval mode does not use its fused path if the layer, or a module inside it, has
    a hook. Without the fused path, its values differ in the last bits, and in rows that are masked completely.
    """
    layers = (each for each in modules_of(root) if is_a(each, nn.TransformerEncoderLayer))
    fused = {id(inner) for layer in layers for inner in modules_of(layer)}
    return {name: each for name, each in modules.items() if id(each) not in fused}


class EvaluationCallback(RecorderCallback):
    """Base class that starts and stops the evaluation recorders at each batch. The sanity check is ignored."""

    sampling: Sampling
    evaluations: dict[str, EvaluationRecorder]
    """The evaluation recorders of the recorded stages, by stage."""
    sampler: EvaluationSampler | None
    """The recorder of the first batches of validations inside a fit, if validation is not a recorded stage."""

    @override
    def _idle(self) -> dict[str, Any]:
        return {**super()._idle(), "evaluations": {}, "sampler": None}

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages to record: ``"train"`` and evaluations."""
        return ("train",)

    @override
    def _begins_with(self, function: str) -> bool:
        return function in self.stages or (function == "fit" and bool({"train", "validate"} & set(self.stages)))

    def _start_evaluation_batch(self, trainer: Trainer, stage: str, loader: int) -> None:
        evaluation = self.evaluations.get(stage)
        if evaluation is not None and self._is_due(trainer):
            evaluation.enabled = self.enabled
            evaluation.start_batch(loader)

    @property
    def _has_failure(self) -> bool:
        """True if recording has failed in any module."""
        return False

    def _start_sampled_batch(self, trainer: Trainer, sampler: EvaluationSampler, batch_idx: int, loader: int) -> None:
        if not self._is_due(trainer):
            return
        if self._has_failure:  # its warning is enough
            self.sampler = None
            return
        if logged_step(trainer) < _SETTLING_STEPS:
            return
        if batch_idx == 0 and loader == 0:
            sampler.begin(_first(trainer.num_val_batches))
        sampler.enabled = self.enabled
        sampler.start_batch(loader)

    def _is_due(self, trainer: Trainer) -> bool:
        """Return True if the evaluation is recorded. Inside a fit, it is recorded only in recorded epochs."""
        in_fit = trainer.state.fn == "fit"
        return not trainer.sanity_checking and not (in_fit and not self.sampling.in_epoch(trainer.current_epoch))

    def _end_evaluation(self, trainer: Trainer, stage: str, batches: object) -> None:
        evaluation = self.evaluations.get(stage)
        if evaluation is not None and self._is_due(trainer):
            loaders = len(batches) if isinstance(batches, Sequence) else 1
            evaluation.finish(logged_step(trainer), trainer.current_epoch, loaders)
            say_ran_eagerly(trainer, evaluation.recorder.ran_eagerly)
        sampler = self.sampler
        if sampler is not None and stage == sampler.stage and self._is_due(trainer):
            sampler.finish(logged_step(trainer), trainer.current_epoch)
            if sampler.recorder.ran_eagerly:  # running compiled code eagerly is not cheap
                self.sampler = None

    on_validation_batch_start = _start_hook("validate", "on_validation_batch_start")
    on_validation_batch_end = _end_hook("validate", "on_validation_batch_end")
    on_test_batch_start = _start_hook("test", "on_test_batch_start")
    on_test_batch_end = _end_hook("test", "on_test_batch_end")
    on_predict_batch_start = _start_hook("predict", "on_predict_batch_start")
    on_predict_batch_end = _end_hook("predict", "on_predict_batch_end")

    @guarded
    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_evaluation(trainer, "validate", trainer.num_val_batches)

    @guarded
    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_evaluation(trainer, "test", trainer.num_test_batches)

    @guarded
    @override
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_evaluation(trainer, "predict", trainer.num_predict_batches)
