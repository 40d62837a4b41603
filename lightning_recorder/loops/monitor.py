"""Record any training loop: a context around the loop, and one around each step."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from typing_extensions import Self

from lightning_recorder.callbacks.attach import new_checks
from lightning_recorder.callbacks.base import RecorderCallback
from lightning_recorder.callbacks.check import Check
from lightning_recorder.callbacks.default_set import default_recorders
from lightning_recorder.callbacks.lightning import rank_zero_info
from lightning_recorder.callbacks.parameter import ParameterRecorder
from lightning_recorder.errors import ArgumentError, RecordingError, check_callable, check_integer, warn
from lightning_recorder.internals.autograd import version_of
from lightning_recorder.internals.module_tree import parameters_of
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.loops.loop_trainer import LoopTrainer, TensorBoardLogger, as_root, free_folder
from lightning_recorder.sinks import Sink, TensorBoardSink
from lightning_recorder.switch import CHECK_ONLY, is_check, is_switched_off, setting

__all__ = ["Monitor"]

_LOSS = "loss"
_MOST_COMPARED = 16  # the maximum number of parameters that are compared to detect steps without an optimizer
_LARGEST_COMPARED = 1 << 14  # the maximum number of values of a compared parameter
_MOST_FRAMES = 8  # the maximum number of frames between ``GradScaler.step`` and the step of its optimizer


class Monitor:
    """Records a training loop with the same recorders as a Lightning Trainer.

    The optimizers are observed through the optimizer hooks of torch. The model has hooks only during recorded steps.

    Args:
        model: The model, or a mapping of several models. With several, module names begin with the name of their model.
            Wrappers such as ``DistributedDataParallel`` are removed.
        optimizer: The optimizer or optimizers, if they are known. Other optimizers with parameters of the model are
            detected when they step.
        log_dir: The folder of the run. Defaults to a new folder ``runs/version_<n>``.
        every_n_steps: Record the first step and then every n-th one. Values of :meth:`log` are written at the same
            interval.
        recorders: The recorders. Defaults to :func:`~lightning_recorder.default_recorders` with ``options``.
        scaler: The ``GradScaler`` of the loop. Recorded gradients are divided by its scale.
        step_function: A function that takes a batch and returns its loss, without a backward pass. With it, a step with
            a bad value is run again, the finding names the origin and the sample, and :class:`Check` can answer its
            questions.
        accumulate: The number of accumulated batches by which the loop divides each loss before its backward pass.
            Gradients of module outputs are recorded for the undivided loss.
        clip: The norm to which the loop clips its gradients, for the findings.
        loggers: Further loggers. Their classes must be logger classes of Lightning, or have the same names.
        tensorboard: Write event files to ``log_dir``.
        sinks: Further sinks.
        strict: Raise errors of the recorders instead of warning about them.
        options: Arguments of :func:`~lightning_recorder.default_recorders`, such as ``names``.

    Raises:
        ArgumentError: If an argument is invalid.
        SelectionError: If a name matches no module. Raised at the first step.

    Note:
        Training stays bitwise the same. With several processes, every process must have a monitor, and must call
        :meth:`step`, :meth:`end_epoch`, :meth:`evaluation` and :meth:`state_dict` equally often. A step that raises an
        exception is not recorded; if the loop handles the exception, the next step is recorded instead. Simultaneous
        steps in other threads are not recorded.

    Example::

        with Monitor(model, optimizer, log_dir="runs/1", every_n_steps=50) as monitor:
            for batch in loader:
                with monitor.step(batch):
                    loss = criterion(model(batch[0]), batch[1])
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    monitor.log(loss=loss)
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Any = (),
        *,
        log_dir: str | Path | None = None,
        every_n_steps: int = 50,
        recorders: Iterable[RecorderCallback | Check] | None = None,
        scaler: Any = None,
        step_function: Callable[[Any], Any] | None = None,
        accumulate: int = 1,
        clip: float | None = None,
        loggers: Iterable[Any] = (),
        tensorboard: bool = True,
        sinks: Iterable[Sink] = (),
        strict: bool = False,
        **options: Any,
    ) -> None:
        models = list(model.values()) if isinstance(model, Mapping) else [model]
        if not models or not all(isinstance(each, nn.Module) for each in models):
            raise ArgumentError(f"Monitor: model must be a torch.nn.Module or a dictionary of them, got {model!r:.80}")
        check_integer("every_n_steps", every_n_steps, 1)
        check_integer("accumulate", accumulate, 1)
        if step_function is not None:
            check_callable("step_function", step_function, "batch")
        if recorders is not None and options:
            raise ArgumentError(f"Monitor: pass {', '.join(options)} to the recorders, since recorders is given")
        given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        given = [_plain(each) for each in given if each is not None]
        for each in given:
            if not callable(getattr(each, "step", None)):
                raise ArgumentError(f"Monitor: optimizer takes an optimizer or a list of them, got {each!r:.80}")
        self._sinks, self._strict = list(sinks), strict
        if recorders is None:
            recorders = default_recorders(sinks=self._sinks, strict=strict, **options)
        self._recorders = _checked(recorders)
        self._root = as_root(model)
        self._settings: dict[str, Any] = {
            "model": model,
            "optimizers": [each for each in given if isinstance(each, Optimizer)],  # other objects have no hooks
            "scaler": scaler,
            "step_function": step_function,
            "accumulate_grad_batches": accumulate,
            "clip": clip,
            "log_every_n_steps": every_n_steps,
        }
        self._log_dir, self._loggers, self._tensorboard = log_dir, list(loggers), tensorboard
        self._trainer: LoopTrainer | None = None
        self._handles: list[Any] = []
        self._own: set[int] = set()  # the ids of the model's parameters
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()  # the optimizers that have parameters of the model
        self._state: dict[str, Any] | None = None
        self._values: dict[str, Any] = {}
        self._sink: TensorBoardSink | None = None
        self._step: _Step | None = None
        self._batch_idx = 0
        self._is_entered = self._has_ended = self._has_loss = self._has_waited = False
        self._scale_version: object = None
        self._said: set[str] = set()

    # The run.

    def __enter__(self) -> Self:
        self._is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """End the run and write everything. Idempotent. Leaving the context calls it.

        Args:
            error: The exception that ended the loop.
        """
        if self._has_ended:
            return
        self._has_ended = True
        atexit.unregister(self.close)
        trainer = self._trainer
        if trainer is None:
            if error is None and not is_switched_off():
                warn("Monitor recorded nothing: no step ran. Write `with monitor.step(batch):` in the loop")
            return
        if self._step is not None:
            self._step.leave(error)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        # GeneratorExit is no error: it ends a loop in a generator that is not resumed.
        if error is not None and not isinstance(error, GeneratorExit):
            trainer.interrupted, trainer.state.status = True, "interrupted"
            self._call("on_exception", error)
        else:
            trainer.state.status = "finished"
            self._call("on_train_end")
            self._call("on_fit_end")
        self._call("teardown", "fit")
        trainer.strategy.checkpoint_io.teardown()
        if is_check() or is_switched_off():
            return
        if error is None and self._has_waited and not (trainer.steps or self._said):
            warn(
                "Monitor recorded no step: no optimizer of torch stepped in a `with monitor.step(batch):`, and the "
                "parameters did not change in one"
            )
        elif not self._has_loss:
            rank_zero_info("The loss of the steps is not known: call monitor.log(loss=loss) in each step.")

    def _begin(self) -> LoopTrainer:
        """Begin the run. Called at the first step, when the model is on its device and a checkpoint has been loaded."""
        if self._trainer is not None:
            return self._trainer
        if self._has_ended:
            raise RecordingError("this Monitor has ended: make a new one for another run")
        atexit.register(self.close)  # ends the run with the program if the loop never calls close
        if not self._is_entered:
            self._say("Monitor records until the program ends: write `with Monitor(…) as monitor:` around the loop")
        callbacks: list[Any] = list(self._recorders)
        if is_check():
            callbacks[:0] = new_checks(callbacks)
        if setting().lower() == CHECK_ONLY:
            callbacks = [each for each in callbacks if isinstance(each, Check)]
        trainer = LoopTrainer(self._root, callbacks, [], "", **self._settings)
        if trainer.is_uneven and trainer.is_global_zero:
            self._say(
                "Join lets the ranks have different numbers of batches, so the records are those of rank 0, and the "
                "ranks are not compared"
            )
        folder = free_folder(Path("runs")) if self._log_dir is None else Path(self._log_dir)
        log_dir = trainer.strategy.broadcast(str(folder.absolute()))
        trainer.log_dir = trainer.default_root_dir = log_dir
        trainer.loggers = [*([TensorBoardLogger(log_dir)] if self._tensorboard else []), *self._loggers]
        trainer.save = self._save
        self._trainer = trainer
        if self._tensorboard and trainer.is_global_zero:
            self._sink = TensorBoardSink(log_dir)
        self._own = {id(each) for each in parameters_of(self._root)}
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._call("setup", "fit")
        if self._state is not None:
            trainer.steps, trainer.current_epoch = self._state["global_step"], self._state["current_epoch"]
            trainer.ckpt_path = "state_dict"
            self._batch_idx = self._state["batch_idx"]
            self._call("on_load_checkpoint", self._state)
        self._call("on_fit_start")
        self._call("on_train_start")
        return trainer

    def _call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of each recorder that has it, including the recorders that another recorder adds in ``setup``."""
        trainer = self._trainer
        for each in () if trainer is None else trainer.callbacks:
            function = getattr(each, hook, None)
            if function is not None:
                function(trainer, self._root, *arguments)

    def _say(self, message: str, *, is_warning: bool = True) -> None:
        """Show a message once."""
        if message not in self._said:
            self._said.add(message)
            (warn if is_warning else rank_zero_info)(message)

    # Steps.

    def step(self, batch: Any = None) -> _Step:
        """Return the context of a training batch. Inside :meth:`evaluation`, it is the context of a validation batch.

        With gradient accumulation, each batch has its own context. The step ends with the batch in which an optimizer
        steps.

        Args:
            batch: The input of the step, on its device. It is not changed, and not kept longer than the step.
        """
        return _Step(self, batch)

    def steps(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over the batches of a loader, each in the context of a step. Replaces the calls of :meth:`step`.

        Findings can then name the rows of the data set. Recorders receive each batch as the loader yields it, before it
        is moved to a device.
        """
        trainer = self._begin()
        trainer.train_dataloader = loader = trainer.strategy.process_dataloader(loader)
        trainer.loader_iterator = iterator = iter(loader)
        try:
            for batch in iterator:
                with self.step(batch):
                    yield batch
        finally:
            trainer.loader_iterator = None
        self.end_epoch()

    def end_epoch(self) -> None:
        """Report the end of an epoch. Without this call, all steps belong to epoch 0, and samples are not counted."""
        trainer = self._begin()
        trainer.knows_epochs = True
        self._call("on_train_epoch_end")
        trainer.current_epoch += 1
        self._batch_idx = 0

    @contextmanager
    def evaluation(self, *, batches: float = float("inf")) -> Iterator[None]:
        """Treat the steps in this context as validation batches.

        Args:
            batches: The number of batches, if it is known. With this number, further batches are recorded after the
                first one.
        """
        trainer = self._begin()
        if trainer.is_evaluating:
            self._say("monitor.evaluation() inside another one is ignored")
            yield
            return
        if self._step is not None:
            self._say("an evaluation inside a step ends the recording of that step: put it between steps")
        outer, self._step = self._step, None
        batch_idx, self._batch_idx = self._batch_idx, 0
        trainer.is_evaluating, trainer.num_val_batches, trainer.enable_validation = True, batches, True
        self._call("on_validation_start")
        try:
            yield
            self._call("on_validation_epoch_end")
            self._call("on_validation_end")
        finally:
            trainer.is_evaluating = False
            self._step, self._batch_idx = outer, batch_idx

    # What happens in a step.

    def log(self, **values: Any) -> None:
        """Write values at the interval of recorded steps, and pass the loss of every step to the recorders.

        Args:
            values: Numbers, or tensors with one element. ``loss`` is the loss of the batch, before a division by the
                number of accumulated batches. The device is only waited for when the values are written.
        """
        loss = values.get(_LOSS)
        step = self._step
        if loss is not None and step is not None and step.is_training and not step.has_loss:
            step.has_loss = True
            trainer = self._begin()
            trainer.logs_loss = True
            found = torch.as_tensor(loss).detach()
            count, scaler = trainer.accumulate_grad_batches, self._settings["scaler"]
            found = found if count == 1 else found / count
            self.note_loss(found if scaler is None else scaler.scale(found))
            self._call("on_after_backward")
        for name, each in values.items():
            self._values[name] = each.detach() if isinstance(each, Tensor) else each

    def backward(self, loss: Tensor, backward: Callable[..., Any] | None = None, **options: Any) -> None:
        """Pass a loss to the recorders, then run ``loss.backward()``. With several losses, call this method for each.

        Args:
            loss: The loss, multiplied by the scale of the ``GradScaler`` if there is one.
            backward: A function to call instead of ``loss.backward``, such as ``fabric.backward``. This function
                multiplies the loss by the scale, so pass the loss without the scale.
            options: Arguments of the backward pass.
        """
        if self._step is not None and self._step.is_training:
            self._step.has_loss = True
            # A function such as fabric.backward multiplies the loss itself.
            scaler = None if backward is None else self._settings["scaler"]
            self.note_loss(loss.detach() if scaler is None else scaler.scale(loss.detach()))
        run: Callable[..., Any] = torch.autograd.backward if backward is None else backward
        run(loss, **options)
        self._call("on_after_backward")

    def note_loss(self, loss: Tensor) -> None:
        """Record a loss, multiplied by the scale of the ``GradScaler``, before its backward pass. Losses are summed."""
        self._has_loss = True
        self._call("on_before_backward", loss)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Handle an optimizer of this process that is about to step. Called by torch."""
        step = self._step
        if step is None or not step.is_training or threading.get_ident() != step.thread:
            if step is None and optimizer in self._known:
                self._say("an optimizer stepped outside of `with monitor.step(batch):`, so this step is not recorded")
            return None
        if step.stepping is not None or not self._owns(optimizer):  # a nested step, as in ZeroRedundancyOptimizer
            return None
        step.stepping = optimizer
        self._find_scaler()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._call("on_before_optimizer_step", optimizer)
            return None

        def observed(*inputs: Any, **options: Any) -> Any:
            loss = closure(*inputs, **options)
            self._call("on_before_optimizer_step", optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": observed}
        return (args[0], observed, *args[2:]), kwargs

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Handle an optimizer of this process that has stepped. Called by torch."""
        if self._step is not None and optimizer in self._known:
            self._step.has_stepped = True
            self._step.stepping = None if self._step.stepping is optimizer else self._step.stepping

    def _owns(self, optimizer: Optimizer) -> bool:
        """Return True if an optimizer has parameters of the model. Add the optimizer to the run if it is new."""
        if optimizer in self._known:
            return True
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if not any(id(each) in self._own for each in parameters):
            self._own = {id(each) for each in parameters_of(self._root)}  # the model may have new parameters
        if not any(id(each) in self._own for each in parameters):
            self._say(
                f"{type(optimizer).__name__} stepped, but the model of the Monitor has none of its parameters. If the "
                "model was replaced, make the Monitor after that; if there are several, pass a dictionary of them"
            )
            return False
        self._known.add(optimizer)
        trainer = self._begin()
        if not any(each is optimizer for each in trainer.optimizers):
            trainer.optimizers.append(optimizer)
        return True

    def _find_scaler(self) -> None:
        """Detect a ``GradScaler`` that was not passed to the constructor."""
        trainer = self._begin()
        if trainer.precision_plugin.scaler is not None or "scaler" in self._said:
            return
        self._said.add("scaler")  # search only at the first optimizer step
        frame: Any = sys._getframe(2)
        for _ in range(_MOST_FRAMES):
            owner = None if frame is None else frame.f_locals.get("self")
            if isinstance(owner, torch.amp.GradScaler) and owner.is_enabled():
                trainer.precision_plugin.scaler = owner
                self._say(
                    "the loop uses a GradScaler: pass Monitor(scaler=scaler). Without it, gradients of outputs in the "
                    "first recorded step have its scale"
                )
            frame = None if frame is None else frame.f_back

    def _has_stepped(self, step: _Step) -> bool:
        """Return True if an optimizer stepped, or if the scaler skipped its step because of an overflow."""
        scaler = None if self._trainer is None else self._trainer.precision_plugin.scaler
        scale = getattr(scaler, "_scale", None)  # reading its version does not wait for the device
        before, self._scale_version = self._scale_version, version_of(scale) if isinstance(scale, Tensor) else None
        return step.has_stepped or (before is not None and before != self._scale_version)

    def _compared(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return some parameters with copies of their values; empty once a torch optimizer has stepped."""
        if self._known:
            return []
        own = [each for each in parameters_of(self._root) if each.requires_grad]
        small = [each for each in own if type(each.data) is Tensor and each.numel() <= _LARGEST_COMPARED]
        return [(each, each.detach().clone()) for each in small[:: 1 + len(small) // _MOST_COMPARED]]

    def _has_changed(self, step: _Step) -> bool:
        """Return True if the loop changed parameters itself, without an optimizer of torch."""
        if self._known:
            return False
        with pause_recording():
            # Compare the values and not the versions, because a loop may also assign another tensor to ``p.data``.
            if all(torch.equal(now.detach(), before) for now, before in step.compared):
                return False
        self._say(
            "no optimizer of torch steps in this loop: each batch that changes parameters counts as a step",
            is_warning=False,
        )
        self._call("on_before_optimizer_step", _ByHand(parameters_of(self._root)))
        return True

    def _start_batch(self, step: _Step) -> None:
        trainer = self._begin()
        if trainer.is_evaluating:
            self._call("on_validation_batch_start", step.batch, self._batch_idx)
        else:
            trainer.has_stepped = None
            step.compared = self._compared()
            self._has_stepped(step)  # reads the version of the scale before the step
            self._call("on_train_batch_start", step.batch, self._batch_idx)
            if not (self._known or trainer.optimizers):
                for each in trainer.callbacks:
                    if isinstance(each, ParameterRecorder):
                        each.keep_values()

    def _end_batch(self, step: _Step, error: BaseException | None) -> None:
        trainer = self._begin()
        batch, batch_idx = step.batch, self._batch_idx
        self._batch_idx += 1
        if not step.is_training:
            self._call("on_validation_batch_end", None, batch, batch_idx)
            return
        if error is not None:
            for each in trainer.callbacks:
                if isinstance(each, RecorderCallback):
                    each._abandon_batch(trainer, error if isinstance(error, Exception) else None)  # type: ignore[arg-type]  # has what it reads
            return
        trainer.has_stepped = self._has_stepped(step) or self._has_changed(step)
        self._has_waited |= not trainer.has_stepped
        self._call("on_train_batch_end", None, batch, batch_idx)
        if trainer.has_stepped:
            self._write_values(trainer)
            trainer.steps += 1

    def _write_values(self, trainer: LoopTrainer) -> None:
        values, self._values = self._values, {}
        if not values or not trainer.is_global_zero or (trainer.steps + 1) % trainer.log_every_n_steps:
            return
        found = {name: float(each) for name, each in values.items()}
        for sink in (*([] if self._sink is None else [self._sink]), *self._sinks):
            sink.write_scalars(trainer.steps, found)
        for logger in self._loggers:
            logger.log_metrics(found, step=trainer.steps)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return the step, the epoch and unwritten statistics of the run, as plain values and tensors."""
        if self._trainer is None and self._state is not None:
            return self._state
        trainer = self._begin()
        state: dict[str, Any] = {
            "global_step": trainer.steps,
            "current_epoch": trainer.current_epoch,
            "batch_idx": self._batch_idx,
        }
        self._call("on_save_checkpoint", state)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of a checkpoint. Must be called before the first step.

        Raises:
            RecordingError: If the run has begun.
            ArgumentError: If the state does not come from :meth:`state_dict`.
        """
        if self._trainer is not None:
            raise RecordingError("monitor.load_state_dict must be called before the first step")
        if not {"global_step", "current_epoch", "batch_idx"} <= state.keys():
            raise ArgumentError("the state is not one of monitor.state_dict()")
        self._state = dict(state)

    def saved(self, path: str | Path) -> None:
        """Write the dump beside a checkpoint that the loop has just saved."""
        self._begin().strategy.checkpoint_io.save_checkpoint({}, Path(path))

    @property
    def has_begun(self) -> bool:
        """True once the first step has begun."""
        return self._trainer is not None

    @property
    def accumulate(self) -> int:
        """The number of batches by which the loop divides each loss. It can be set before the first step."""
        return int(self._settings["accumulate_grad_batches"])

    @accumulate.setter
    def accumulate(self, count: int) -> None:
        self._settings["accumulate_grad_batches"] = count

    @property
    def should_stop(self) -> bool:
        """True after a finding of ``StepWatch(on_finding="stop")``. The loop should then end."""
        return self._trainer is not None and self._trainer.should_stop

    @property
    def log_dir(self) -> Path:
        """The folder of the run."""
        return Path(self._begin().log_dir)

    @property
    def recorders(self) -> Sequence[RecorderCallback]:
        """The recorders, including recorders that were added when the run began."""
        return list(self._recorders if self._trainer is None else self._trainer.callbacks)

    def _save(self, path: Path) -> None:
        trainer = self._begin()
        state = {
            "state_dict": self._root.state_dict(),
            "optimizer_states": [each.state_dict() for each in trainer.optimizers],
        }
        if trainer.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, path)


class _ByHand:
    """A stand-in for the optimizer in a loop that changes the parameters itself."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.param_groups = [{"params": parameters}]
        self.state: dict[Tensor, Any] = {}


class _Step:
    """The context of a step."""

    def __init__(self, monitor: Monitor, batch: Any) -> None:
        self._monitor, self.batch = monitor, batch
        self.compared: list[tuple[nn.Parameter, Tensor]] = []
        self.has_stepped = self.has_loss = False
        self.stepping: Optimizer | None = None
        self.is_training = True
        self.thread = 0
        self._was_entered = self._is_recorded = False

    def __enter__(self) -> Self:
        monitor = self._monitor
        self._was_entered = True
        if monitor._step is not None:
            self._refuse(monitor._step)
            return self
        trainer = monitor._begin()
        self.thread, self.is_training, self._is_recorded = threading.get_ident(), not trainer.is_evaluating, True
        monitor._step = self
        try:
            monitor._start_batch(self)
        except BaseException:
            monitor._step = None
            raise
        return self

    def _refuse(self, other: _Step) -> None:
        if other.thread == threading.get_ident():
            message = "a step inside a step is ignored: monitor.step() belongs around the body of the loop alone"
        else:
            message = "two threads run steps at the same time: only one of them is recorded. Give each its own Monitor"
        self._monitor._say(message)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(error)

    def leave(self, error: BaseException | None) -> None:
        """End the step. Idempotent. GeneratorExit counts as leaving the loop early, not as an error."""
        if self._is_recorded:
            self._is_recorded = False
            self._monitor._step = None
            self._monitor._end_batch(self, None if isinstance(error, GeneratorExit) else error)
        self.batch = None

    def __del__(self) -> None:
        if not self._was_entered:
            self._monitor._say("monitor.step(batch) does nothing alone: write `with monitor.step(batch):`")


def _plain(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper of Fabric or accelerate, or the optimizer itself."""
    return getattr(optimizer, "optimizer", optimizer)


def _checked(recorders: Iterable[Any]) -> list[RecorderCallback | Check]:
    """Return the recorders as a list. Raise ArgumentError if an item is not a recorder."""
    found = list(recorders)
    for each in found:
        if not isinstance(each, (RecorderCallback, Check)):
            raise ArgumentError(f"Monitor: recorders takes recorders such as ActivationRecorder(), got {each!r:.80}")
    if not found:
        raise ArgumentError("Monitor: recorders is empty, so nothing would be recorded")
    return found
