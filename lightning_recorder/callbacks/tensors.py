"""The base class of the recorders of the inputs and outputs of modules, or of their gradients."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from typing_extensions import override

from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.errors import check_bool, check_some
from lightning_recorder.statistics import StatisticsRecorder
from lightning_recorder.taps import Tap

__all__ = ["TensorsCallback"]

_TENSORS = ("inputs", "outputs")


class TensorsCallback(StatisticsCallback):
    """Base class of the recorders of the inputs and outputs of modules, or of their gradients."""

    per_call: bool

    def _choose_tensors(self, tensors: object, per_call: object) -> None:
        """Check and keep the arguments of these names."""
        chosen = check_some("tensors", tensors, _TENSORS, {"input": "inputs", "output": "outputs"})
        self.tensors = tuple(each for each in _TENSORS if each in chosen)
        check_bool("per_call", per_call)
        self.per_call = bool(per_call)

    def _tapping(self, modules: Mapping[str, nn.Module], taps: Mapping[str, type[Tap]]) -> StatisticsRecorder:
        """Return a recorder with the taps of the chosen tensors."""
        chosen = [taps[each] for each in self.tensors]
        is_eager = self.compiled == "eager"
        return StatisticsRecorder(modules, chosen, per_call=self.per_call, eager=is_eager, **self.options)

    @property
    @override
    def _further_settings(self) -> list[object]:
        chosen = [] if self.tensors == ("outputs",) else [list(self.tensors)]
        return [*chosen, *(["per_call"] if self.per_call else [])]

    @property
    @override
    def _kept_apart(self) -> dict[str, object]:
        chosen = {} if self.tensors == ("outputs",) else {"tensors": list(self.tensors)}
        return {**chosen, **({"per_call": True} if self.per_call else {})}

    @property
    @override
    def tags(self) -> set[str]:
        return {f"{stage} {tensors}" for stage in self.stages for tensors in self.tensors}
