"""Record statistics of parameters, their gradients and their updates during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from torch import nn
from typing_extensions import override

from lightning_recorder.callbacks.arguments import checked_arguments
from lightning_recorder.callbacks.base import guarded
from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.errors import SelectionError, check_some
from lightning_recorder.names import default_modules, named_submodules, own_parameters
from lightning_recorder.selection import SelectedModules, Selection
from lightning_recorder.statistics import (
    PARAMETER_PARTS,
    BaseStatisticsRecorder,
    OptimizerRecorder,
    RunPhase,
)

__all__ = ["ParameterRecorder"]

_SYNONYMS = {
    "weights": "values",
    "weight": "values",
    "parameters": "values",
    "optimizer": "moments",
    "state": "moments",
}


class ParameterRecorder(StatisticsCallback):
    """Records statistics of the parameters of the selected modules, their gradients, updates and optimiser state.

    The statistics are recorded at each optimiser step of a sampled training step, for the parameters of that optimiser.
    For a parameter ``weight``, the tags are:

    - ``parameters/<module>/weight/<statistic>``: the values before the step;
    - ``weight.grad``: the gradient that the optimiser uses: unscaled, accumulated, reduced across ranks, and before
      clipping;
    - ``weight.update``: the change of the values in the step;
    - ``weight.exp_avg`` and so on: the optimiser state;
    - ``weight/update_ratio``: the update-to-weight ratio ``rms(update) / rms(values)``.

    By default, it records all modules that have parameters of their own, including the LightningModule.

    Args:
        names: Module names or globs, such as ``"encoder.**"``; see :class:`~lightning_recorder.Selection`. Only a
            module's own parameters are recorded, not those of its children.
        parts: The parts to record: any of ``"values"``, ``"gradients"``, ``"updates"`` and ``"moments"``.
        options: Further arguments of :class:`~lightning_recorder.callbacks.statistics.StatisticsCallback`.

    Raises:
        ArgumentError: If an argument is invalid. Raised at construction.
        SelectionError: If a name matches no module. Raised when the fit starts; the message lists the closest names.

    Note:
        Recording updates keeps a copy of the recorded parameters during a recorded step. If there is not enough memory
        for the copy, updates are left out with a warning. A replicated parameter is counted once, and a warning is
        given if its values differ between ranks. The shards of a sharded parameter are merged. Everything else is the
        same as for :class:`~lightning_recorder.ActivationRecorder`.

    Example::

        Trainer(callbacks=[ParameterRecorder("encoder.**", parts=["gradients", "updates"])])
    """

    group = "parameters"

    @checked_arguments
    def __init__(
        self,
        names: str | Sequence[str] | None = None,
        *,
        parts: str | Sequence[Literal["values", "gradients", "updates", "moments"]] = PARAMETER_PARTS,  # type: ignore[assignment]  # a tuple of just these
        **options: Any,
    ) -> None:
        self.parts = check_some("parts", parts, PARAMETER_PARTS, _SYNONYMS)
        super().__init__(names, **options)

    @override
    def choose(self, pl_module: LightningModule) -> SelectedModules:
        if self.selection.is_default:
            owners = _owners(pl_module)
            chosen = Selection(predicate=lambda name, module: module in owners, exclude=self.selection.exclude)
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
    def make_recorder(self, modules: Mapping[str, nn.Module], stage: str) -> BaseStatisticsRecorder:
        return OptimizerRecorder(modules, parts=self.parts, **self.options)

    @guarded
    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        run = self._run
        if run is None or run.phase is RunPhase.IDLE:
            return
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        # The call above may fail and release the run.
        if self._run is run and isinstance(run.recorder, OptimizerRecorder):
            # Lightning does not unscale the gradients for optimisers that unscale them themselves.
            scaled = getattr(optimizer, "_step_supports_amp_scaling", False)
            with run.contained():
                run.recorder.before_step(optimizer, 1 / self.loss_scale.value if scaled else 1.0)

    @override
    def prepare(self, trainer: Trainer, pl_module: LightningModule, recorder: BaseStatisticsRecorder) -> None:
        # Lightning does not see the steps of an optimiser that was unwrapped from LightningOptimizer.
        if isinstance(recorder, OptimizerRecorder) and not pl_module.automatic_optimization:
            recorder.optimizers = tuple(trainer.optimizers)

    @property
    @override
    def counts_overflow(self) -> bool:
        return True


def _owners(root: nn.Module) -> set[nn.Module]:
    """Return the root and default modules that own a parameter which no earlier one owns.

    Unlike for activations, the root is included: its parameters can be read without knowing what a call of it means.
    """
    named = named_submodules(root, remove_duplicate=False)
    found: set[nn.Module] = set()
    seen: set[int] = set()
    for name in ["", *default_modules(root)]:
        own = {id(parameter) for _, parameter in own_parameters(named[name])}
        if own - seen:
            found.add(named[name])
            seen |= own
    return found
