"""Record statistics of activations during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn
from typing_extensions import override

from lightning_recorder.callbacks.arguments import STAGE_SYNONYMS, checked_arguments
from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.errors import check_some
from lightning_recorder.statistics import BaseStatisticsRecorder, StatisticsRecorder
from lightning_recorder.taps import OutputTap

__all__ = ["ActivationRecorder"]

_STAGES = ("train", "validate", "test", "predict")


class ActivationRecorder(StatisticsCallback):
    """Records statistics of module outputs on sampled training steps and writes them to every logger of the trainer.

    By default, it records every leaf module and every module that owns parameters (see
    :class:`~lightning_recorder.Selection`), on the first step and then whenever ``self.log`` logs. The tags are
    ``activations/<module>/<statistic>``. A record covers all batches that are accumulated into the step and merges all
    calls of a module. The statistics are computed on the device of the tensors and copied to the host once, after the
    step.

    Args:
        names: Module names or globs, such as ``"encoder.*"``; see :class:`~lightning_recorder.Selection`.
        stages: The stages to record: any of ``"train"``, ``"validate"``, ``"test"`` and ``"predict"``. Each evaluation
            is one record over all of its batches, under ``activations_validate/…`` and so on. The sanity check is not
            recorded.
        options: Further arguments of :class:`~lightning_recorder.callbacks.statistics.StatisticsCallback`.

    Raises:
        ArgumentError: If an argument is invalid. Raised at construction.
        SelectionError: If a name matches no module. Raised when the run starts; the message lists the closest names.

    Note:
        Recording does not change training: values, gradients and random numbers stay the same, and the model has no
        hooks between recorded steps. A compiled model runs eagerly on recorded steps. Records are merged exactly across
        ranks, and rank 0 writes them. Recording synchronises with the device once per record, after the step.

    Example::

        Trainer(callbacks=[ActivationRecorder("encoder.*", every_n_train_steps=100)])
    """

    group = "activations"

    @checked_arguments
    def __init__(
        self,
        names: str | Sequence[str] | None = None,
        *,
        stages: str | Sequence[Literal["train", "validate", "test", "predict"]] = ("train",),
        **options: Any,
    ) -> None:
        chosen = check_some("stages", stages, _STAGES, STAGE_SYNONYMS)
        self._stages = tuple(stage for stage in _STAGES if stage in chosen)
        super().__init__(names, **options)

    @property
    @override
    def stages(self) -> tuple[str, ...]:
        return self._stages

    @override
    def make_recorder(self, modules: Mapping[str, nn.Module], stage: str) -> BaseStatisticsRecorder:
        recorder = StatisticsRecorder(modules, OutputTap, **self.options)
        recorder.tap.eager = self.compiled == "eager"
        return recorder
