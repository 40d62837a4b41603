"""Statistics of the activations while a model trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn
from typing_extensions import override

from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.errors import check_some
from lightning_recorder.recorders import SiteRecorder, StatisticsRecorder
from lightning_recorder.taps import OutputTap

__all__ = ["ActivationRecorder"]

_STAGES = ("train", "validate", "test", "predict")


class ActivationRecorder(StatisticsCallback):
    """Records what the selected modules give, on sampled training steps, in every logger of the trainer.

    Without arguments it records the leaf modules on the first step and then whenever ``self.log`` logs. The tags are
    ``activations/<module>/<statistic>``. All batches that are accumulated into a recorded step count, and all calls of
    a module in it are merged. The statistics are computed on the device of the tensors and brought to the host once,
    after the step.

    Args:
        names: Module names or globs, as ``"encoder.*"``; see :class:`~lightning_recorder.Selection`.
        stages: What is recorded: some of ``"train"``, ``"validate"``, ``"test"`` and ``"predict"``. Of an evaluation
            all batches are one record, under ``activations_validate/…`` and so on; the sanity check is left out.
        options: Further arguments as for :class:`~lightning_recorder.callbacks.statistics.StatisticsCallback`.

    Raises:
        ArgumentError: At construction, if an argument can never work.
        SelectionError: When the run starts, if a name matches no module; with the closest names.

    Note:
        Training is not changed: no value, gradient or random number, and between recorded steps no hook is on the
        model. A recorded step of a compiled model runs eagerly. The records of all ranks are merged, exactly, and rank
        zero writes them. Recording waits for the device once per record, after the step.

    Example::

        Trainer(callbacks=[ActivationRecorder("encoder.*", every_n_train_steps=100)])
    """

    group = "activations"

    def __init__(
        self,
        names: str | Sequence[str] | None = None,
        *,
        stages: str | Sequence[Literal["train", "validate", "test", "predict"]] = ("train",),
        **options: Any,
    ) -> None:
        chosen = check_some("stages", stages, _STAGES)
        self._stages = tuple(stage for stage in _STAGES if stage in chosen)
        super().__init__(names, **options)

    @property
    @override
    def stages(self) -> tuple[str, ...]:
        return self._stages

    @override
    def make_recorder(self, modules: Mapping[str, nn.Module], stage: str) -> SiteRecorder:
        recorder = StatisticsRecorder(modules, OutputTap, **self.options)
        recorder.tap.eager = self.compiled == "eager"
        return recorder
