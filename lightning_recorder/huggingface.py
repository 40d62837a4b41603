"""A callback for the Trainers of transformers and TRL, with the recorders of the Lightning callbacks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.callbacks.attach import is_set_everywhere, new_checks, new_recorders, say
from lightning_recorder.callbacks.default_set import default_recorders
from lightning_recorder.disk import attempt
from lightning_recorder.errors import ArgumentError, RecorderError, describe_error, warn
from lightning_recorder.loops import Monitor
from lightning_recorder.switch import is_check, is_switched_off
from lightning_recorder.temporary import write_whole

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise RecorderError("lightning_recorder.huggingface needs transformers: pip install transformers") from error

__all__ = ["RecorderCallback"]

STATE_FILE = "recorder.pt"
"""The file in a checkpoint folder with the saved state of the recorders."""

_MOST_FRAMES = 8  # maximum number of stack frames between a hook and the loop of the trainer


class RecorderCallback(TrainerCallback):
    """Records the training of a ``transformers.Trainer``.

    If ``report_to`` includes TensorBoard, the files are written to the folder of its callback, and TensorBoard shows
    them. Otherwise, they are written to ``<output_dir>/recorder``.

    Args:
        log_dir: Another folder for the files.
        options: The arguments of :func:`~lightning_recorder.default_recorders`, or ``recorders=`` with a list of
            recorders.

    Raises:
        ArgumentError: If an argument is invalid.

    Note:
        The step is ``state.global_step``, starting at 0. Parameter gradients are recorded as the optimizer receives
        them, after clipping by the trainer. The loss of a step is the loss of the trainer. The state of the recorders
        is saved in each checkpoint, as ``recorder.pt``, and loaded when the training is resumed. Repeating a step is
        not supported.

    Example::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[RecorderCallback(every_n_train_steps=100)])
    """

    def __init__(self, *, log_dir: str | Path | None = None, **options: Any) -> None:
        if "recorders" not in options:
            default_recorders(**options)  # to raise errors for wrong arguments now
        elif len(options) > 1:
            others = ", ".join(name for name in options if name != "recorders")
            raise ArgumentError(f"RecorderCallback: pass {others} to the recorders, since recorders is given")
        self._log_dir, self._options = log_dir, options
        self.monitor: Monitor | None = None
        """The monitor of the current or the latest training."""
        self._step: AbstractContextManager[Any] | None = None
        self._evaluation: AbstractContextManager[Any] | None = None
        self._handle: Any = None
        self._scaler: Any = None
        self._ends_epoch = False

    # The run.

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if model is None or is_switched_off():
            return
        if self.monitor is not None:
            self.monitor.close()
        trainer = next((each["self"] for each in _frames() if hasattr(each.get("self"), "accelerator")), None)
        writer = next((each.tb_writer for each in _callbacks(trainer) if getattr(each, "tb_writer", None)), None)
        folder = self._log_dir or getattr(writer, "log_dir", None) or args.output_dir
        optimizer = kwargs.get("optimizer")
        self._scaler = getattr(getattr(trainer, "accelerator", None), "scaler", None)
        self.monitor = Monitor(
            model,
            [] if optimizer is None else optimizer,
            log_dir=folder,
            every_n_steps=max(1, int(args.logging_steps)) if args.logging_steps >= 1 else 50,
            scaler=self._scaler,
            loggers=[each for each in (_wandb(),) if each is not None and "wandb" in (args.report_to or ())],
            tensorboard=writer is not None or self._log_dir is not None,
            step_function=_step_of(trainer, model) if is_check() and trainer is not None else None,
            **self._options,
        )
        self.monitor.__enter__()
        self._ends_epoch = False
        if state.global_step:
            self.monitor.load_state_dict(_saved_state(state))

    @override
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_step(None)
        self._end_evaluation()
        if self.monitor is not None:
            self._end_epoch(self.monitor)
            self.monitor.close()

    @override
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.monitor is not None:
            self._end_epoch(self.monitor)

    @override
    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._ends_epoch = True  # the epoch ends after the evaluation that may follow
        if control.should_evaluate:
            self._begin_evaluation(model)

    def _end_epoch(self, monitor: Monitor) -> None:
        if self._ends_epoch and monitor.has_begun:
            monitor.end_epoch()
        self._ends_epoch = False

    # Steps. The trainer passes neither batches nor losses to callbacks, so read the local variables of its loop.

    @override
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loop = _loop()
        if self.monitor is not None and not self.monitor.has_begun and "num_items_in_batch" in loop:
            # The trainer divides the loss by the number of batches unless the model divides it by the number of tokens.
            is_divided = loop["num_items_in_batch"] is None
            self.monitor.accumulate = args.gradient_accumulation_steps if is_divided else 1
        self._begin_step(loop.get("inputs"))

    @override
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note_loss(_loop())

    @override
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loop = _loop()
        self._note_loss(loop)
        self._end_step(None)
        batches, index = loop.get("batch_samples"), loop.get("i")
        left = batches[index + 1 :] if isinstance(batches, list) and isinstance(index, int) else []
        self._begin_step(left[0] if left else None)

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._end_step(True)
        if control.should_evaluate:
            self._begin_evaluation(model)
        if self.monitor is not None and self.monitor.should_stop:
            control.should_training_stop = True

    def _begin_step(self, batch: Any) -> None:
        self._end_step(None)
        self._end_evaluation()
        if self.monitor is not None:
            self._step = self.monitor.step(batch)
            self._step.__enter__()

    def _end_step(self, has_stepped: bool | None) -> None:
        step, self._step = self._step, None
        if step is not None:
            if has_stepped:  # an optimizer that is not a subclass of torch's has no hooks
                step.has_stepped = True  # type: ignore[attr-defined]  # of the context of Monitor
            step.__exit__(None, None, None)

    def _note_loss(self, loop: Mapping[str, Any]) -> None:
        loss = loop.get("tr_loss_step")
        if self.monitor is not None and isinstance(loss, Tensor):
            self.monitor.note_loss(loss if self._scaler is None else self._scaler.scale(loss))

    # Evaluations. There is no callback hook before the batches of an evaluation.

    def _begin_evaluation(self, model: Any) -> None:
        if self.monitor is None or self._evaluation is not None or model is None:
            return
        self._evaluation = self.monitor.evaluation()
        self._evaluation.__enter__()
        self._handle = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def _before_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        if self._step is None and self.monitor is not None:
            self._step = self.monitor.step(kwargs or args)
            self._step.__enter__()

    @override
    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._evaluation is not None:
            self._end_step(None)

    @override
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_evaluation()

    def _end_evaluation(self) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            self._end_step(None)
            self._handle.remove()
            evaluation.__exit__(None, None, None)

    # Checkpoints.

    @override
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        monitor = self.monitor
        if monitor is None or not monitor.has_begun:
            return
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        saved = monitor.state_dict()
        if state.is_world_process_zero and folder.is_dir():
            path, size = folder / STATE_FILE, sum(each.nbytes for each in _tensors(saved))
            attempt(path, size, lambda: write_whole(path, lambda file: torch.save(saved, file)))
            monitor.saved(folder)


class CallbackFromEnvironment(RecorderCallback):
    """Records what ``LIGHTNING_RECORDER`` asks for, unless the program has its own recorder callback.

    Nothing is written to the checkpoints, and an error causes one warning.
    """

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        try:
            trainer = next((each["self"] for each in _frames() if hasattr(each.get("self"), "accelerator")), None)
            has_own = any(each is not self and isinstance(each, RecorderCallback) for each in _callbacks(trainer))
            if has_own or is_switched_off() or not is_set_everywhere(args.world_size):
                return
            recorders = new_checks([]) if is_check() else new_recorders([])
            if recorders:
                self._options = {"recorders": recorders}
                super().on_train_begin(args, state, control, model, **kwargs)
        except Exception as error:  # noqa: BLE001 - the program must not end because of a recorder
            self.monitor = None
            say(warn, f"nothing is recorded, {describe_error(error)}")

    @override
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Do not save a state."""


def _step_of(trainer: Any, model: Any) -> Callable[[Any], Tensor]:
    """Return a function that computes the trainer's loss of a batch, for a check."""

    def loss(batch: Any) -> Tensor:
        with trainer.compute_loss_context_manager():
            found: Tensor = trainer.compute_loss(model, trainer._prepare_inputs(batch))
        return found

    return loss


def _tensors(state: object) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for each in state.values():
            yield from _tensors(each)


def _frames() -> Iterator[Mapping[str, Any]]:
    """Yield the local variables of the functions that called a hook, innermost first."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back


def _loop() -> Mapping[str, Any]:
    """Return the local variables of the trainer's loop, which are not public; empty if the loop is not found."""
    frame: Any = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        if "batch_samples" in frame.f_code.co_varnames:
            found: Mapping[str, Any] = frame.f_locals
            return found
        frame = frame.f_back
    return {}


def _saved_state(state: Any) -> dict[str, Any]:
    """Return the recorders' state in the checkpoint to resume from; without such a state, only the step and epoch."""
    place = {"global_step": state.global_step, "current_epoch": int(state.epoch or 0), "batch_idx": 0}
    given = (each.get("resume_from_checkpoint") for each in islice(_frames(), 30))
    folder = next((each for each in given if isinstance(each, str)), None)
    path = None if folder is None else Path(folder, STATE_FILE)
    if path is not None and path.is_file():
        try:
            return {**torch.load(path, weights_only=True), **place}
        except Exception as error:  # noqa: BLE001 - a file may contain anything
            warn(f"{path} cannot be read, so the recorders start anew: {describe_error(error)}")
    return place


def _callbacks(trainer: Any) -> list[Any]:
    return list(getattr(getattr(trainer, "callback_handler", None), "callbacks", ()))


class WandbLogger(SimpleNamespace):
    """A W&B run with the interface and the class name of Lightning's logger, which sinks recognize."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers without an explicit step, since the trainer counts the steps of the W&B run."""
        self.experiment.log(dict(metrics))


def _wandb() -> WandbLogger | None:
    run = getattr(sys.modules.get("wandb"), "run", None)
    return None if run is None else WandbLogger(experiment=run, save_dir=None, name="", version="")
