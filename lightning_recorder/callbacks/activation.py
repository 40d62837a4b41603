"""Statistics of the activations while a model trains."""

from __future__ import annotations

from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.taps import OutputTap

__all__ = ["ActivationRecorder"]


class ActivationRecorder(StatisticsCallback):
    """Records what the selected modules give, on sampled training steps, in every logger of the trainer.

    Without arguments it records the leaf modules on the first step and then whenever ``self.log`` logs. The tags are
    ``activations/<module>/<statistic>``. All batches that are accumulated into a recorded step count, and all calls of
    a module in it are merged. The statistics are computed on the device of the tensors and brought to the host once,
    after the step.

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
        dump: Whether to write the latest statistics beside each checkpoint, as
            ``<checkpoint>.activations.safetensors``, for a second recorder of the kind as
            ``…activations-2.safetensors``.
        sinks: Further sinks, beside the loggers of the trainer and the files under ``<log_dir>/recorder``.
        strict: Raise errors of the recorder instead of warning of them.

    Raises:
        ArgumentError: At construction, if an argument can never work.
        SelectionError: When the fit starts, if a name matches no module; with the closest names.

    Note:
        Training is not changed: no value, gradient or random number, and between recorded steps no hook is on the
        model. A recorded step of a compiled model runs eagerly. Under DDP rank zero writes what it has seen itself.
        Recording waits for the device once per recorded step, after it.

    Example::

        Trainer(callbacks=[ActivationRecorder("encoder.*", every_n_train_steps=100)])
    """

    group = "activations"
    tap = OutputTap
