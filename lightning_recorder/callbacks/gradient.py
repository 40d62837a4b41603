"""Statistics of the gradients with respect to the activations while a model trains."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_recorder.callbacks.run import gradient_factor
from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.taps import OutputGradientTap

__all__ = ["GradientRecorder"]


class GradientRecorder(StatisticsCallback):
    """Records the gradient of the loss with respect to what the selected modules give, on sampled training steps.

    The gradient is that of the loss which ``training_step`` returned: the scale of a ``GradScaler`` and the division by
    the number of accumulated batches are taken out. The tags are ``gradients/<module>/<statistic>``. A module whose
    output needs no gradient has no record.

    Args:
        names: Module names or globs, as ``"encoder.*"``; see :class:`~lightning_recorder.Selection`.
        types: Module classes or their names; with ``names``, both must hold.
        exclude: Names or globs to leave out.
        every_n_train_steps: Record the first optimiser step and then each n-th; by default
            ``Trainer(log_every_n_steps=…)``. Steps count from 0, so 100 records 0, 99, 199, …; 0 records nothing.
        statistics: Which scalars to show, of ``count``, ``mean``, ``std``, ``rms``, ``min``, ``max``,
            ``zero_fraction``, ``nan_count`` and ``inf_count``.
        extra: Further reductions, such as ``[Norms(), DeadChannels()]``, computed by torch. Those of their statistics
            that are one number are shown, the others are in the dumps and in ``latest``.
        quantiles: Shares, as 0.99, whose quantiles are read from the histogram and shown as ``quantile_0.99``.
        histograms: Whether to write histograms.
        histogram_sample: How many values of a tensor go into the histogram; by default all.
        dump: Whether to write the latest statistics beside each checkpoint, as ``<checkpoint>.gradients.safetensors``,
            for a second recorder of the kind as ``…gradients-2.safetensors``.
        sinks: Further sinks, beside the loggers of the trainer and the files under ``<log_dir>/recorder``.
        strict: Raise errors of the recorder instead of warning of them.

    Raises:
        ArgumentError: At construction, if an argument can never work.
        SelectionError: When the fit starts, if a name matches no module; with the closest names.

    Note:
        The gradients are taken by hooks on the output tensors, so in-place modules, dictionaries and dataclasses do no
        harm and the gradients stay bitwise what they are. A backward pass that is run twice in a step counts twice.
        Otherwise as :class:`~lightning_recorder.ActivationRecorder`.

    Example::

        Trainer(callbacks=[GradientRecorder(types=torch.nn.Linear)])
    """

    group = "gradients"
    tap = OutputGradientTap

    @override
    def factor(self, trainer: Trainer, pl_module: LightningModule) -> float:
        return gradient_factor(trainer, pl_module)
