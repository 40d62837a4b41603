"""Statistics of the parameters, their gradients and their updates while a model trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from torch import nn
from typing_extensions import override

from lightning_recorder.callbacks.base import guarded
from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.errors import SelectionError, check_some, tell
from lightning_recorder.names import named_submodules
from lightning_recorder.recorders import (
    PARAMETER_PARTS,
    OptimizerRecorder,
    Record,
    SiteRecorder,
    SiteStatistics,
    with_update_ratios,
)
from lightning_recorder.selection import SelectedModules, Selection
from lightning_recorder.taps import Site
from lightning_recorder.taps.parameter import own_parameters

__all__ = ["ParameterRecorder"]


class ParameterRecorder(StatisticsCallback):
    """Records the parameters of the selected modules, their gradients and what the optimiser makes of them.

    It records at each optimiser step of a sampled step, of the parameters that this optimiser has. For a parameter
    ``weight`` the tags are ``parameters/<module>/weight/<statistic>`` for the values before the step, ``weight.grad``
    for the gradient that the optimiser uses, unscaled, accumulated and reduced over the ranks, before it is clipped,
    ``weight.update`` for what the step changes, and ``weight.exp_avg`` and the like for what the optimiser keeps. The
    update-to-weight ratio is ``weight/update_ratio``: ``rms(update) / rms(values)``.

    Without arguments it records all modules that have parameters of their own.

    Args:
        names: Module names or globs, as ``"encoder.**"``; see :class:`~lightning_recorder.Selection`. Of each module
            its own parameters are recorded, not those of its children.
        parts: What is recorded: some of ``"values"``, ``"gradients"``, ``"updates"`` and ``"moments"``.
        options: Further arguments as for :class:`~lightning_recorder.callbacks.statistics.StatisticsCallback`.

    Raises:
        ArgumentError: At construction, if an argument can never work.
        SelectionError: When the fit starts, if a name matches no module; with the closest names.

    Note:
        For the updates a copy of the recorded parameters is kept during a recorded step; where there is no memory for
        it they are left out, with a warning. A replicated parameter is counted once, and a warning says if the ranks do
        not have the same values; of a sharded one all parts are merged. Otherwise as
        :class:`~lightning_recorder.ActivationRecorder`.

    Example::

        Trainer(callbacks=[ParameterRecorder("encoder.**", parts=["gradients", "updates"])])
    """

    group = "parameters"

    def __init__(
        self,
        names: str | Sequence[str] | None = None,
        *,
        parts: str | Sequence[Literal["values", "gradients", "updates", "moments"]] = PARAMETER_PARTS,  # type: ignore[assignment]  # a tuple of just these
        **options: Any,
    ) -> None:
        self.parts = check_some("parts", parts, PARAMETER_PARTS)
        self._told_apart = False
        super().__init__(names, **options)

    @override
    def choose(self, pl_module: LightningModule) -> SelectedModules:
        owners = _owners(pl_module)
        if self.selection == Selection(exclude=self.selection.exclude):
            chosen = Selection(predicate=lambda name, module: name in owners, exclude=self.selection.exclude)
            return chosen.resolve(pl_module) if owners else SelectedModules({}, {})
        modules = self.selection.resolve(pl_module)
        if not any(True for module in modules.values() for _ in own_parameters(module)):
            first = next(iter(modules))
            raise SelectionError(
                f"none of the selected modules has parameters of its own, {first!r} is the first: write "
                f"'{first}.**' for those of its children"
            )
        return modules

    @property
    @override
    def tags(self) -> set[str]:
        return set(self.parts)

    @override
    def make_recorder(self, modules: Mapping[str, nn.Module], stage: str) -> SiteRecorder:
        return OptimizerRecorder(modules, parts=self.parts, **self.options)

    @guarded
    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        if self._run is not None and isinstance(self._run.recorder, OptimizerRecorder):
            # Lightning leaves the gradients of optimisers scaled that take the scale out by themselves.
            scaled = getattr(optimizer, "_step_supports_amp_scaling", False)
            with self._run.contained():
                self._run.recorder.before_step(optimizer, 1 / self.loss_scale.value if scaled else 1.0)

    @override
    def prepare(self, trainer: Trainer, pl_module: LightningModule, recorder: SiteRecorder) -> None:
        # Steps of optimisers that were taken out of their wrappers tell Lightning nothing.
        if isinstance(recorder, OptimizerRecorder) and not pl_module.automatic_optimization:
            recorder.optimizers = tuple(trainer.optimizers)

    @property
    @override
    def counts_overflow(self) -> bool:
        return True

    @override
    def summarize(self, record: Record) -> dict[Site, SiteStatistics]:
        found = super().summarize(record)
        if not self._told_apart:
            apart = sorted(record.snapshot.apart & found.keys())
            if apart:
                self._told_apart = True
                name = ".".join(part for part in apart[0] if part)
                tell(
                    f"the ranks do not have the same {name!r} at step {record.step}, nor of {len(apart) - 1} further "
                    "parameters or gradients: they are trained apart"
                )
        return with_update_ratios(found)


def _owners(root: nn.Module) -> dict[str, nn.Module]:
    """The modules that have parameters of their own which no module before them has."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for name, module in named_submodules(root).items():
        own = {id(parameter) for _, parameter in own_parameters(module)}
        if own - seen:
            found[name] = module
            seen |= own
    return found
