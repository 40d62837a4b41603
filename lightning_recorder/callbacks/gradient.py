"""Record statistics of gradients with respect to module outputs during training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_recorder.callbacks.activation import ActivationRecorder
from lightning_recorder.callbacks.guard import guarded
from lightning_recorder.callbacks.lightning import LightningModule, Trainer
from lightning_recorder.callbacks.tensors import TensorsCallback
from lightning_recorder.callbacks.trainer import averaged_ranks, gradient_factor
from lightning_recorder.internals.autograd import adds_to, graph_task
from lightning_recorder.internals.module_tree import parameters_of
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.signatures import described_like
from lightning_recorder.statistics import BaseStatisticsRecorder, StatisticsRecorder
from lightning_recorder.taps import InputGradientTap, OutputGradientTap

__all__ = ["GradientRecorder"]


class _LossPasses:
    """Distinguishes the backward passes of losses from others in a step, such as the pass of a gradient penalty.

    A backward pass belongs to a loss if Lightning runs it. With manual optimization, a model may call
    ``loss.backward()`` itself, so a pass that adds to the gradient of a parameter belongs to a loss as well.
    """

    def __init__(self, pl_module: LightningModule) -> None:
        self.is_of_loss = False
        """True while Lightning runs a backward pass."""
        self._pl_module = pl_module
        self._known = -1, False

    def are_others(self) -> bool:
        """Return True during a backward pass that does not begin at a loss."""
        task = graph_task()
        if self.is_of_loss or task == -1:
            return False
        if task != self._known[0]:
            with pause_recording():
                self._known = task, not any(map(adds_to, parameters_of(self._pl_module)))
        return self._known[1]


@described_like(ActivationRecorder)
class GradientRecorder(TensorsCallback):
    """Records the gradients of the loss with respect to module outputs, and on request inputs, on sampled steps.

    The loss is the value that ``training_step`` returned: the scale of a ``GradScaler`` and the division by the number
    of accumulated batches are undone. In distributed training, it is the mean of the losses of all ranks. The tags are
    ``gradients/<module>/<statistic>``. A module whose output needs no gradient is not recorded. If gradients overflow
    in half precision, the optimizer skips the step, and the step is not recorded. ``gradients/overflow_steps`` counts
    these steps, and ``gradients_overflow/…`` shows the modules with NaN or infinite gradients.

    During and after a run, :attr:`latest` has the statistics of the latest record by site, and :attr:`latest_step` has
    the step of this record. :meth:`disable` and :meth:`enable` switch the recorder during a run.

    Args:
        tensors: The tensors of a module to record: any of ``"inputs"`` and ``"outputs"``. Inputs are recorded as they
            are before the call, positional or by keyword, also in nested containers. Their tags are
            ``gradients/<module>/in[0]/…`` and ``gradients/<module>/in.mask/…``. The gradient of an input is the part
            that flows through the module.
        per_call: Record each call separately if a module is called several times in a batch. The tags of its second
            call are ``gradients/<module>#2/…``. By default, the gradients of all calls are merged. Calls are numbered
            in the order of the forward pass, also with checkpointing.
        functions: The torch functions for whose outputs the gradients are recorded as well: any of ``"activations"``,
            ``"dropout"``, ``"normalizations"``, ``"attention"``, ``"embedding"``, ``"routing"`` and names such as
            ``"relu"``. True for all of them, False for none; the default is activations. Losses have no gradient. Tags
            have the form of module tags: ``gradients/encoder.relu/…`` for the first call of the function in a call of
            ``encoder``, ``encoder.relu#2`` for the second. ``names``, ``types`` and ``exclude`` apply to functions,
            too. If a module only calls the function, as ``nn.ReLU`` does, the module is recorded instead. Functions in
            compiled code are recorded only if this code runs eagerly.
        statistics: The statistics to show as scalars: any of ``count``, ``mean``, ``std``, ``rms``, ``min``, ``max``,
            ``zero_fraction``, ``nan_count``, ``inf_count``, ``rank_mean_min``, ``rank_mean_max`` and quantiles such as
            ``quantile_0.99``. ``rank_mean_min`` and ``rank_mean_max`` are the smallest and the largest mean on any
            single rank. Quantiles are estimated from the histogram.

    Raises:
        ArgumentError: If an argument is invalid. Raised at construction.
        SelectionError: If a name matches no module. Raised when the fit starts; the message lists the closest names.

    Note:
        Gradients are captured by hooks on the output tensors. In-place modules and outputs that are dictionaries or
        dataclasses are therefore supported, and the gradients stay bitwise identical. All backward passes of a step
        that add to the gradients of parameters are counted. Gradients that ``torch.autograd.grad`` computes before
        these passes, as for a penalty, are not counted. If the loss is a mean over the batch and the ranks have batches
        of equal size, N ranks record the same as one process with the batches of all ranks. Otherwise the gradients are
        those of the mean of the losses of all ranks, like the gradients of the parameters. Everything else is the same
        as for :class:`~lightning_recorder.ActivationRecorder`.

    Example::

        Trainer(callbacks=[GradientRecorder(types=torch.nn.Linear)])
    """

    group = "gradients"

    @override
    def _make_recorder(self, modules: Mapping[str, nn.Module], stage: str) -> BaseStatisticsRecorder:
        return self._tapping(modules, stage, {"inputs": InputGradientTap, "outputs": OutputGradientTap})

    @override
    def _set_up_recorder(self, trainer: Trainer, pl_module: LightningModule, recorder: BaseStatisticsRecorder) -> None:
        if isinstance(recorder, StatisticsRecorder):
            factor = gradient_factor(trainer, self.loss_scale.value)
            recorder.factor = factor / averaged_ranks(trainer)
            self._passes = _LossPasses(pl_module)
            recorder.ignores = self._passes.are_others

    @override
    def _idle(self) -> dict[str, Any]:
        return {**super()._idle(), "_passes": None}

    _passes: _LossPasses | None

    @override
    def _release(self, trainer: Trainer | None) -> None:
        self._passes = None
        super()._release(trainer)

    @guarded
    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._passes is not None:
            self._passes.is_of_loss = True

    @guarded
    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._passes is not None:
            self._passes.is_of_loss = False

    @property
    @override
    def _counts_overflow(self) -> bool:
        return True
