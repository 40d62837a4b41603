"""Record statistics of activations during training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn
from typing_extensions import override

from lightning_recorder.callbacks.lightning import LightningModule, Trainer
from lightning_recorder.callbacks.tensors import TensorsCallback
from lightning_recorder.internals.compiled import compiled_modules
from lightning_recorder.statistics import BaseStatisticsRecorder
from lightning_recorder.taps import InputTap, OutputTap

__all__ = ["ActivationRecorder"]


class ActivationRecorder(TensorsCallback):
    """Records statistics of module outputs, and on request inputs, on sampled steps for every logger of the trainer.

    By default, it records every leaf module and every module that owns parameters (see
    :class:`~lightning_recorder.Selection`), on the first step and then whenever ``self.log`` logs. The tags are
    ``activations/<module>/<statistic>``. A record covers all batches that are accumulated into the step and merges all
    calls of a module. The statistics are computed on the device of the tensors and copied to the host once, after the
    step.

    During and after a run, :attr:`latest` has the statistics of the latest record by site, and :attr:`latest_step` has
    the step of this record. :meth:`disable` and :meth:`enable` switch the recorder during a run.

    Args:
        names: Module names or globs, such as ``"encoder.*"``; see :class:`~lightning_recorder.Selection`.
        tensors: The tensors of a module to record: any of ``"inputs"`` and ``"outputs"``. Inputs are recorded as they
            are before the call, positional or by keyword, also in nested containers. Their tags are
            ``activations/<module>/in[0]/…`` and ``activations/<module>/in.mask/…``.
        per_call: Record each call separately if a module is called several times in a batch. The tags of its second
            call are ``activations/<module>#2/…``. By default, the statistics of all calls are merged.
        functions: The torch functions whose outputs are recorded as well: any of ``"activations"``, ``"losses"``,
            ``"dropout"``, ``"normalizations"``, ``"attention"``, ``"embedding"``, ``"routing"``, names such as
            ``"relu"``, and ``"heads"`` and ``"experts"``, the scores of each head inside of attention and of each
            expert of a router. True for all of them, False for none; the default is activations, losses, heads and
            experts. Tags have the form of module tags: ``activations/encoder.relu/…`` for the first call of the
            function in a call of ``encoder``, ``encoder.relu#2`` for the second. ``names``, ``types`` and ``exclude``
            apply to functions, too. If a module only calls the function, as ``nn.ReLU`` does, the module is recorded
            instead. Functions in compiled code are recorded only if this code runs eagerly.
        types: Module classes or their names. If ``names`` is also given, a module must match both.
        exclude: Names or globs of modules to leave out.
        every_n_train_steps: Record the first optimizer step and then every n-th one. Defaults to
            ``Trainer(log_every_n_steps=…)``, or to every step if ``schedule`` has a window or a predicate. Steps count
            from 0, so 100 records steps 0, 99, 199, …. With ``every_n_train_steps=0``, nothing is recorded.
        schedule: Further conditions on the steps, and a limit on the overhead; see
            :class:`~lightning_recorder.Schedule`.
        reduce: The steps that are merged into one record. ``"step"``: each recorded step is a record. A number n: all
            recorded steps in a window of n optimizer steps. ``"epoch"``: all recorded steps of an epoch.
        statistics: The statistics to show as scalars: any of ``count``, ``mean``, ``std``, ``rms``, ``min``, ``max``,
            ``zero_fraction``, ``nan_count``, ``inf_count``, ``batch_spread``, ``rank_mean_min``, ``rank_mean_max`` and
            quantiles such as ``quantile_0.99``. ``batch_spread`` is the root mean square of the deviations of an output
            ``[samples, features]`` from its mean over the samples, relative to the root mean square of the output.
            ``rank_mean_min`` and ``rank_mean_max`` are the smallest and the largest mean on any single rank. Quantiles
            are estimated from the histogram.
        extra: Further reductions of the same tensors, computed with torch operations: a reduction of this package, such
            as ``Norms()``; a ``torchmetrics.Metric``; a function of the previous result, initially the first tensor,
            and the next tensor, such as ``torch.maximum``; the import path of one of these; or a list, or a mapping
            from names to these. A mapping names functions and metrics; a ``Reduction`` keeps the names of its own
            statistics. Results that are one number are shown as scalars, vectors as heat maps over the steps, matrices
            and images as pictures. Results of a function are merged across ranks only if the function is an associative
            function of torch.
        outputs: Files, plots and their limits; see :class:`~lightning_recorder.Outputs`. By default: record files and
            plots in ``<log_dir>/recorder``, and a file of tensors beside each checkpoint.
        compiled: ``"inside"`` records compiled modules inside their compiled code, which is compiled once more for
            recorded steps; the other steps stay bitwise equal to the compiled run. ``"eager"`` runs compiled modules
            and functions eagerly on recorded steps and lists them in the log and in the receipt. ``"auto"`` chooses
            ``"inside"`` where this mode is tested, and otherwise ``"eager"``, with the reason in the log. ``"skip"``
            leaves compiled code compiled and does not record the modules in it.
        name: A name that distinguishes this callback from others of the same class. It is used in checkpoints, in the
            names of dumps and in the tags, which then begin with ``<group>-<name>``.
        sinks: Further sinks, in addition to the loggers of the trainer and the files in ``<log_dir>/recorder``.
        strict: Raise errors of the recorder instead of warning about them.

    Raises:
        ArgumentError: If an argument is invalid. Raised at construction.
        SelectionError: If a name matches no module. Raised when the run starts; the message lists the closest names.

    Note:
        Recording does not change training: values, gradients and random numbers stay the same, and the model has no
        hooks between recorded steps. A compiled model runs eagerly on recorded steps. Records are merged exactly across
        ranks, and rank 0 writes them. Recording synchronizes with the device once per record, after the step.

    Example::

        Trainer(callbacks=[ActivationRecorder("encoder.*", every_n_train_steps=100)])
    """

    group = "activations"
    _ignored: ClassVar = {"max_bytes": ""}

    @property
    @override
    def stages(self) -> tuple[str, ...]:
        return tuple(self.sampling.stages)

    @override
    def _samples_validation(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        is_chosen = self.stages == ("train",) and trainer.state.fn == "fit" and self.outputs.findings
        return is_chosen and not compiled_modules(pl_module)

    @override
    def _make_recorder(self, modules: Mapping[str, nn.Module], stage: str) -> BaseStatisticsRecorder:
        return self._tapping(modules, stage, {"inputs": InputTap, "outputs": OutputTap})
