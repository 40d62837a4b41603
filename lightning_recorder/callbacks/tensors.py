"""The base class of the recorders of the inputs and outputs of modules, or of their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import nn
from typing_extensions import override

from lightning_recorder.callbacks.messages import say_compiled
from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.errors import check_bool, check_some, warn
from lightning_recorder.internals.compiled import compiled_modules
from lightning_recorder.internals.compiled_operators import compile_time_s, why_not_traceable
from lightning_recorder.selection import SelectedModules
from lightning_recorder.statistics import BaseStatisticsRecorder, RunRecorder, StatisticsRecorder
from lightning_recorder.taps import Tap

__all__ = ["TensorsCallback"]

_TENSORS = ("inputs", "outputs")


class TensorsCallback(StatisticsCallback):
    """Base class of the recorders of the inputs and outputs of modules, or of their gradients."""

    compiled_choices = ("eager", "inside", "skip")
    per_call: bool
    _traced: frozenset[nn.Module] = frozenset()

    @override
    def _idle(self) -> dict[str, Any]:
        # The modules that are recorded inside compiled code, and the time of all compilations before the current step.
        return {**super()._idle(), "_traced": frozenset(), "_compiled_s": 0.0}

    def _choose_tensors(self, tensors: object, per_call: object) -> None:
        """Check and keep the arguments of these names."""
        chosen = check_some("tensors", tensors, _TENSORS, {"input": "inputs", "output": "outputs"})
        self.tensors = tuple(each for each in _TENSORS if each in chosen)
        check_bool("per_call", per_call)
        self.per_call = bool(per_call)

    def _tapping(
        self, modules: Mapping[str, nn.Module], stage: str, taps: Mapping[str, type[Tap]]
    ) -> StatisticsRecorder:
        """Return a recorder with the taps of the chosen tensors."""
        return StatisticsRecorder(
            modules,
            [taps[each] for each in self.tensors],
            per_call=self.per_call,
            eager=self.compiled != "skip" and not self._traced,
            traced=self._traced,
            key=f"{self.group} {self.name} {stage}",
            **self.options,
        )

    @property
    def _why_eager(self) -> str:
        """The argument that recording inside compiled code does not support, or an empty string."""
        if self.group != "gradients":
            return ""
        if self.per_call:
            return "per_call=True needs it for gradients"
        return "the gradients of inputs need it; tensors='outputs' does not" if "inputs" in self.tensors else ""

    @override
    def _chosen(self, pl_module: LightningModule) -> SelectedModules | None:
        modules = super()._chosen(pl_module)
        compiled = compiled_modules(pl_module) if self.compiled == "inside" else set()
        if modules is not None and compiled:
            why = self._why_eager or why_not_traceable(pl_module, modules.values())
            if why:
                warn(f"{self} runs compiled code eagerly on recorded steps instead of recording inside it: {why}")
            else:
                self._traced = frozenset(compiled)
        return modules

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

    @override
    def _prepare(self, trainer: Trainer, pl_module: LightningModule, recorder: BaseStatisticsRecorder) -> None:
        super()._prepare(trainer, pl_module, recorder)
        if self._traced:
            self._compiled_s = compile_time_s()

    @override
    def _end_step(self, trainer: Trainer, pl_module: LightningModule, run: RunRecorder) -> None:
        super()._end_step(trainer, pl_module, run)
        if self._traced:
            say_compiled(trainer, self._compiled_s, compile_time_s())
