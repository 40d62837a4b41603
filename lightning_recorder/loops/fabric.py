"""A callback for loops of Lightning's Fabric that call hooks by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_recorder.callbacks.default_set import default_recorders
from lightning_recorder.loops.monitor import Monitor

__all__ = ["FabricCallback"]


class FabricCallback:
    """Records a loop that calls ``fabric.call`` with the names of the Trainer's hooks.

    The hooks are ``on_train_batch_start`` and ``on_train_batch_end``, and, if the loop has them, ``on_before_backward``
    with the loss, ``on_train_epoch_end``, ``on_validation_start``, ``on_validation_batch_start``,
    ``on_validation_batch_end``, ``on_validation_end``, ``on_exception`` and ``on_train_end`` or ``on_fit_end``. Without
    either of the last two, the run ends with the program.

    Args:
        model: The model. Defaults to the first model that is passed to ``fabric.setup``. Pass a dictionary to record
            several models.
        options: The arguments of :class:`~lightning_recorder.Monitor` and of
            :func:`~lightning_recorder.default_recorders`.

    Example::

        fabric = Fabric(callbacks=[FabricCallback(log_dir="runs/1")])
        fabric.call("on_train_batch_start", batch, batch_idx)
    """

    def __init__(self, model: nn.Module | Mapping[str, nn.Module] | None = None, **options: Any) -> None:
        of_monitor = Monitor.__init__.__kwdefaults__ or {}
        default_recorders(**{name: each for name, each in options.items() if name not in of_monitor})  # checks them
        self._model, self._options = model, options
        self.monitor: Monitor | None = None
        """The monitor, once a step has begun."""
        self._step: Any = None
        self._evaluation: Any = None

    def on_after_setup(self, fabric: Any, module: nn.Module) -> None:
        """Keep the first model that Fabric sets up, and the scaler. Called by Fabric."""
        if self._model is None:
            self._model = module
        scaler = getattr(getattr(getattr(fabric, "strategy", None), "precision", None), "scaler", None)
        self._options.setdefault("scaler", scaler)

    def _begin(self, batch: Any) -> None:
        if self.monitor is None and self._model is not None:
            self.monitor = Monitor(self._model, **self._options).__enter__()
        if self.monitor is not None:
            self._step = self.monitor.step(batch)
            self._step.__enter__()

    def _end(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def on_train_batch_start(self, batch: Any = None, batch_idx: int = 0) -> None:
        """Begin a step."""
        self._end()
        self._begin(batch)

    def on_before_backward(self, loss: Tensor) -> None:
        """Record a loss."""
        if self.monitor is not None:
            self.monitor.log(loss=loss)

    def on_train_batch_end(self, outputs: Any = None, batch: Any = None, batch_idx: int = 0) -> None:
        """End a step. ``outputs`` may be the loss, or a mapping with the key ``"loss"``."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self.monitor is not None and isinstance(loss, Tensor) and loss.numel() == 1:
            self.monitor.log(loss=loss)
        self._end()

    def on_train_epoch_end(self) -> None:
        """End an epoch."""
        if self.monitor is not None:
            self.monitor.end_epoch()

    def on_validation_start(self) -> None:
        """Begin a validation."""
        if self.monitor is not None:
            self._evaluation = self.monitor.evaluation()
            self._evaluation.__enter__()

    def on_validation_batch_start(self, batch: Any = None, batch_idx: int = 0) -> None:
        """Begin a batch of a validation."""
        if self._evaluation is not None:
            self._begin(batch)

    def on_validation_batch_end(self) -> None:
        """End a batch of a validation."""
        self._end()

    def on_validation_end(self) -> None:
        """End a validation."""
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            self._end()
            evaluation.__exit__(None, None, None)

    def on_train_end(self) -> None:
        """End the run."""
        self.on_validation_end()
        self._end()
        if self.monitor is not None:
            self.monitor.close()

    on_fit_end = on_train_end

    def on_exception(self, exception: BaseException) -> None:
        """End the run after an exception."""
        if self.monitor is not None:
            self.monitor.close(exception)
