"""Record the time and the memory of each module during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn
from typing_extensions import Unpack, override

from lightning_recorder.callbacks.activation import ActivationRecorder
from lightning_recorder.callbacks.lightning import LightningModule
from lightning_recorder.callbacks.output_options import Outputs
from lightning_recorder.callbacks.statistics import SampledOptions, StatisticsCallback
from lightning_recorder.internals.module_tree import is_a, named_modules_of
from lightning_recorder.selection import SelectedModules, Selection
from lightning_recorder.signatures import described_like, extended_arguments
from lightning_recorder.statistics import BaseStatisticsRecorder, StatisticsRecorder
from lightning_recorder.taps import CostTap

__all__ = ["CostRecorder"]


@described_like(ActivationRecorder)
class CostRecorder(StatisticsCallback):
    """Records the time and the memory of the calls of each module, over the whole run.

    The tags are ``costs/<module>/<cost>/mean``, the mean over the calls of a recorded step:

    - ``forward_ms``: the time of a call, including all calls inside it;
    - ``backward_ms``: the time from the first gradient of its output to the last gradient of its input, or of its
      parameters if the input needs none;
    - ``saved_bytes``: the memory that its operations keep for the backward pass, without the model's own tensors;
    - ``allocated_bytes``: on a GPU, the largest allocated memory at the beginning or end of the call and of the calls
      inside it.

    The recorder records one step later than other recorders of the same interval, so that their time is not measured.
    With an interval of one step, their time is included.

    Args:
        names: Module names or globs, such as ``"encoder.*"``; see :class:`~lightning_recorder.Selection`. By default
            all modules that are called, without the model itself.

    Raises:
        ArgumentError: If an argument is invalid. Raised at construction.
        SelectionError: If a name matches no module. Raised when the fit starts; the message lists the closest names.

    Note:
        On a GPU, times are measured between events in its stream, and the recorder waits for the GPU once per recorded
        step. Modules in compiled code are not measured. Training is not changed.

    Example::

        Trainer(callbacks=[CostRecorder(every_n_train_steps=100)])
    """

    group = "costs"
    _compiled_choices = ("skip",)

    @extended_arguments(StatisticsCallback, SampledOptions)
    def __init__(
        self,
        names: str | Sequence[str] | None = None,
        *,
        outputs: Outputs = Outputs(),
        **options: Unpack[SampledOptions],
    ) -> None:
        outputs = replace(outputs, histograms=False, plots=False, dumps=False)
        super().__init__(names, statistics="mean", outputs=outputs, compiled="skip", **options)
        self.sampling = replace(self.sampling, delay=1)

    @override
    def _choose(self, pl_module: LightningModule) -> SelectedModules:
        if not self.selection.is_default:
            return super()._choose(pl_module)
        chosen = Selection(predicate=_is_called, exclude=self.selection.exclude)
        return (
            chosen.resolve(pl_module)
            if any(_is_called(*each) for each in named_modules_of(pl_module))
            else (SelectedModules({}, {}))
        )

    @override
    def _make_recorder(self, modules: Mapping[str, nn.Module], stage: str) -> BaseStatisticsRecorder:
        return StatisticsRecorder(modules, CostTap, eager=False, **self.options)


def _is_called(name: str, module: nn.Module) -> bool:
    return bool(name) and not is_a(module, (nn.ModuleList, nn.ModuleDict, nn.modules.loss._Loss))
