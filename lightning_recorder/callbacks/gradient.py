"""Statistics of the gradients with respect to the activations while a model trains."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import LightningModule, Trainer
from torch import nn
from typing_extensions import override

from lightning_recorder.callbacks.run import gradient_factor
from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.recorders import SiteRecorder, StatisticsRecorder
from lightning_recorder.taps import OutputGradientTap

__all__ = ["GradientRecorder"]


class GradientRecorder(StatisticsCallback):
    """Records the gradient of the loss with respect to what the selected modules give, on sampled training steps.

    The gradient is that of the loss which ``training_step`` returned: the scale of a ``GradScaler`` and the division by
    the number of accumulated batches are taken out. The tags are ``gradients/<module>/<statistic>``. A module whose
    output needs no gradient has no record. A step that the optimiser passes over, since gradients overflowed the half
    precision, is in no record; ``gradients/overflow_steps`` counts them, and ``gradients_overflow/…`` says where NaN
    and infinities were.

    The arguments are those of :class:`~lightning_recorder.callbacks.statistics.StatisticsCallback`.

    Raises:
        ArgumentError: At construction, if an argument can never work.
        SelectionError: When the fit starts, if a name matches no module; with the closest names.

    Note:
        The gradients are taken by hooks on the output tensors, so in-place modules, dictionaries and dataclasses do no
        harm and the gradients stay bitwise what they are. A backward pass that is run twice in a step counts twice. On
        several ranks they are those of each rank's own loss, before DDP takes the mean. Otherwise as
        :class:`~lightning_recorder.ActivationRecorder`.

    Example::

        Trainer(callbacks=[GradientRecorder(types=torch.nn.Linear)])
    """

    group = "gradients"

    @override
    def make_recorder(self, modules: Mapping[str, nn.Module], stage: str) -> SiteRecorder:
        recorder = StatisticsRecorder(modules, OutputGradientTap, **self.options)
        recorder.tap.eager = self.compiled == "eager"
        return recorder

    @override
    def prepare(self, trainer: Trainer, pl_module: LightningModule, recorder: SiteRecorder) -> None:
        if isinstance(recorder, StatisticsRecorder):
            recorder.factor = gradient_factor(trainer, pl_module, self.loss_scale.value)

    @property
    @override
    def counts_overflow(self) -> bool:
        return True
