"""Record statistics of gradients with respect to module outputs during training."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import LightningModule, Trainer
from torch import nn
from typing_extensions import override

from lightning_recorder.callbacks.run import gradient_factor
from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.statistics import BaseStatisticsRecorder, StatisticsRecorder
from lightning_recorder.taps import OutputGradientTap

__all__ = ["GradientRecorder"]


class GradientRecorder(StatisticsCallback):
    """Records the gradients of the loss with respect to module outputs, on sampled training steps.

    The loss is the one that ``training_step`` returned: the scale of a ``GradScaler`` and the division by the number of
    accumulated batches are undone. The tags are ``gradients/<module>/<statistic>``. A module whose output needs no
    gradient is not recorded. If gradients overflow in half precision, the optimiser skips the step, and the step is not
    recorded. ``gradients/overflow_steps`` counts these steps, and ``gradients_overflow/…`` shows the modules with NaN
    or infinite gradients.

    The arguments are those of :class:`~lightning_recorder.callbacks.statistics.StatisticsCallback`.

    Raises:
        ArgumentError: If an argument is invalid. Raised at construction.
        SelectionError: If a name matches no module. Raised when the fit starts; the message lists the closest names.

    Note:
        Gradients are captured by hooks on the output tensors. In-place modules and outputs that are dictionaries or
        dataclasses are therefore supported, and the gradients stay bitwise identical. If a backward pass runs twice in
        a step, both runs are counted. In distributed training, the gradients are those of each rank's own loss, before
        DDP averages them. Everything else is the same as for :class:`~lightning_recorder.ActivationRecorder`.

    Example::

        Trainer(callbacks=[GradientRecorder(types=torch.nn.Linear)])
    """

    group = "gradients"

    @override
    def make_recorder(self, modules: Mapping[str, nn.Module], stage: str) -> BaseStatisticsRecorder:
        recorder = StatisticsRecorder(modules, OutputGradientTap, **self.options)
        recorder.tap.eager = self.compiled == "eager"
        return recorder

    @override
    def prepare(self, trainer: Trainer, pl_module: LightningModule, recorder: BaseStatisticsRecorder) -> None:
        if isinstance(recorder, StatisticsRecorder):
            recorder.factor = gradient_factor(trainer, pl_module, self.loss_scale.value)

    @property
    @override
    def counts_overflow(self) -> bool:
        return True
