"""The base class of the recorders of the inputs and outputs of modules, or of their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import Unpack, override

from lightning_recorder.callbacks.lightning import LightningModule, Trainer, rank_zero_info
from lightning_recorder.callbacks.messages import say_compiled, warn_of_eager_memory
from lightning_recorder.callbacks.statistics import StatisticsCallback, StatisticsOptions
from lightning_recorder.callbacks.trainer import device_of
from lightning_recorder.errors import check_bool, check_some, warn
from lightning_recorder.functions import DEFAULT_KINDS, FUNCTIONS, KINDS, SCORE_KINDS, ChosenFunctions, function_of
from lightning_recorder.internals.compiled import compiled_modules
from lightning_recorder.internals.compiled_operators import compile_time_s, why_not_traceable
from lightning_recorder.internals.module_tree import ModuleSet
from lightning_recorder.module_names import named_submodules
from lightning_recorder.names import compile_glob
from lightning_recorder.selection import SelectedModules
from lightning_recorder.signatures import extended_arguments
from lightning_recorder.statistics import BaseStatisticsRecorder, RunRecorder, StatisticsRecorder
from lightning_recorder.taps import Tap

__all__ = ["TensorsCallback"]

_TENSORS = ("inputs", "outputs")
_DEFAULT_FUNCTIONS = (*(name for name, each in FUNCTIONS.items() if each.kind in DEFAULT_KINDS), *SCORE_KINDS)


class TensorsCallback(StatisticsCallback):
    """Base class of the recorders of the inputs and outputs of modules, or of their gradients."""

    per_call: bool
    functions: tuple[str, ...]
    """The names of the recorded torch functions."""
    _chosen_functions: ChosenFunctions | None = None
    _traced: ModuleSet = ModuleSet()

    @extended_arguments(StatisticsCallback, StatisticsOptions)
    def __init__(
        self,
        names: str | Sequence[str] | None = None,
        *,
        tensors: str | Sequence[Literal["inputs", "outputs"]] = ("outputs",),
        per_call: bool = False,
        functions: bool | str | Sequence[str] | None = None,
        **options: Unpack[StatisticsOptions],
    ) -> None:
        chosen = check_some("tensors", tensors, _TENSORS, {"input": "inputs", "output": "outputs"})
        self.tensors = tuple(each for each in _TENSORS if each in chosen)
        check_bool("per_call", per_call)
        self.per_call = bool(per_call)
        self.functions = _checked_functions(functions)
        super().__init__(names, **options)

    @override
    def _idle(self) -> dict[str, Any]:
        # The modules that are recorded inside compiled code, and the time of all compilations before the current step.
        return {**super()._idle(), "_traced": ModuleSet(), "_compiled_s": 0.0, "_chosen_functions": None}

    @override
    def _release(self, trainer: Trainer | None) -> None:
        self._chosen_functions = None  # drops a reference to the model
        super()._release(trainer)

    def _tapping(
        self, modules: Mapping[str, nn.Module], stage: str, taps: Mapping[str, type[Tap]]
    ) -> StatisticsRecorder:
        """Return a recorder with the taps of the chosen tensors."""
        return StatisticsRecorder(
            modules,
            [taps[each] for each in self.tensors],
            per_call=self.per_call,
            eager=self._runs_eagerly,
            traced=self._traced,
            key=f"{self.group} {self.name} {stage}",
            functions=self._functions_in(stage),
            **self.options,
        )

    def _functions_in(self, stage: str) -> ChosenFunctions | None:
        """Return the functions to record in a stage. Evaluations add dropout by default, to show if it is active."""
        chosen = self._chosen_functions
        if chosen is None or stage == "train" or self.functions != _DEFAULT_FUNCTIONS:
            return chosen
        return chosen.having(name for name, each in FUNCTIONS.items() if each.kind == "dropout")

    @property
    def _runs_eagerly(self) -> bool:
        """True if compiled modules run eagerly on recorded steps."""
        return self.compiled != "skip" and not self._traced

    def _why_eager(self, device: torch.device) -> str:
        """Return the reason why the arguments prevent recording inside compiled code, or an empty string."""
        if self.compiled == "auto" and device.type != "cpu":
            return f"that is tested little on other devices; compiled='inside' does it on a {device.type} device, too"
        if self.group != "gradients":
            return ""
        if self.per_call:
            return "per_call=True needs it for gradients"
        return "the gradients of inputs need it; tensors='outputs' does not" if "inputs" in self.tensors else ""

    @override
    def _choose(self, pl_module: LightningModule) -> SelectedModules:
        names: Sequence[str] = vars(self.selection)["names"] or ()
        known = named_submodules(pl_module, remove_duplicate=False)
        of_functions = [
            each for each in names if function_of(each) and not any(map(compile_glob(each).fullmatch, known))
        ]
        if not of_functions or not self.functions:
            return super()._choose(pl_module)
        others = [each for each in names if each not in of_functions]
        return replace(self.selection, names=others).resolve(pl_module) if others else SelectedModules({}, {})

    @override
    def _chosen(self, pl_module: LightningModule) -> SelectedModules | None:
        modules = super()._chosen(pl_module)
        if modules is None and self.selection.names is not None and self.functions:
            modules = SelectedModules({}, {})  # ``names`` matched only functions
        if self.functions and self._pipeline.coverage is not None:
            chosen = {name: vars(self.selection)[name] for name in ("names", "types", "exclude")}
            self._chosen_functions = ChosenFunctions(pl_module, self.functions, **chosen)
        compiled = compiled_modules(pl_module) if modules and self.compiled != "skip" else ModuleSet()
        if modules is not None and compiled and self._pipeline.coverage is not None:
            way = self._way_to_record(pl_module, modules, compiled)
            self._pipeline.coverage = self._pipeline.coverage.having(compiled=way)
        return modules

    def _way_to_record(self, pl_module: LightningModule, modules: SelectedModules, compiled: ModuleSet) -> str:
        """Choose how to record compiled modules, and return the choice in the words of the receipt."""
        if self.compiled == "eager":
            return "eager"
        why = self._why_eager(device_of(pl_module)) or why_not_traceable(pl_module, modules.values())
        if not why:
            self._traced = compiled
            return "inside"
        say = warn if self.compiled == "inside" else rank_zero_info
        say(f"{self} runs compiled code eagerly on recorded steps instead of recording inside it: {why}")
        return f"eager: {why}"

    @override
    def _begin_results(self, trainer: Trainer, pl_module: LightningModule, directory: Path | None) -> None:
        super()._begin_results(trainer, pl_module, directory)
        if trainer.is_global_zero and self._runs_eagerly:
            warn_of_eager_memory(pl_module, str(self))

    @property
    @override
    def _further_settings(self) -> list[object]:
        chosen = [] if self.tensors == ("outputs",) else [list(self.tensors)]
        functions = [] if self.functions == _DEFAULT_FUNCTIONS else [list(self.functions)]
        return [*chosen, *(["per_call"] if self.per_call else []), *functions]

    @property
    @override
    def _kept_apart(self) -> dict[str, object]:
        chosen = {} if self.tensors == ("outputs",) else {"tensors": list(self.tensors)}
        return {**chosen, **({"per_call": True} if self.per_call else {})}

    @property
    @override
    def _tag_kinds(self) -> set[str]:
        return {f"{stage} {tensors}" for stage in self.stages for tensors in self.tensors}

    @override
    def _prepare(self, trainer: Trainer, pl_module: LightningModule, recorder: BaseStatisticsRecorder) -> None:
        super()._prepare(trainer, pl_module, recorder)
        if self._traced:
            self._compiled_s = compile_time_s()

    @override
    def _end_step(self, trainer: Trainer, pl_module: LightningModule, run: RunRecorder) -> None:
        super()._end_step(trainer, pl_module, run)
        if self._traced and run.is_active:
            say_compiled(trainer, self._compiled_s, compile_time_s())


def _checked_functions(given: object) -> tuple[str, ...]:
    """Return the names of the functions for the argument ``functions``.

    Raises:
        ArgumentError: If it names neither functions nor kinds.
    """
    if given is None:
        return _DEFAULT_FUNCTIONS
    if isinstance(given, bool):
        return (*FUNCTIONS, *SCORE_KINDS) if given else ()
    chosen = check_some("functions", given, (*KINDS, *SCORE_KINDS, *FUNCTIONS))
    named = (name for name, each in FUNCTIONS.items() if name in chosen or each.kind in chosen)
    return (*named, *(each for each in SCORE_KINDS if each in chosen))
