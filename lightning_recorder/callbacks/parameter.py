"""Record statistics of parameters, their gradients and their updates during training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from lightning_recorder.callbacks.activation import ActivationRecorder
from lightning_recorder.callbacks.guard import guarded
from lightning_recorder.callbacks.lightning import LightningModule, Trainer, rank_zero_info
from lightning_recorder.callbacks.statistics import StatisticsCallback, StatisticsOptions
from lightning_recorder.callbacks.trainer import averaged_ranks, gradient_factor, is_automatic, logged_step
from lightning_recorder.errors import SelectionError, check_some
from lightning_recorder.internals.module_tree import ModuleSet, class_name, stored_attribute
from lightning_recorder.module_names import default_modules, named_submodules, own_parameters
from lightning_recorder.selection import SelectedModules, Selection
from lightning_recorder.signatures import described_like, extended_arguments
from lightning_recorder.statistics import (
    EVERY_PARAMETER_PART,
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


@described_like(ActivationRecorder)
class ParameterRecorder(StatisticsCallback):
    """Records statistics of the parameters of the selected modules, their gradients, updates and optimizer state.

    The statistics are recorded at each optimizer step of a sampled training step, for the parameters of that optimizer.
    For a parameter ``weight``, the tags are:

    - ``parameters/<module>/weight/<statistic>``: the values before the step;
    - ``weight.grad``: the gradient for the optimizer: unscaled, accumulated, reduced across ranks, and before
      clipping. LBFGS evaluates the gradient several times in a step; the first evaluation is recorded;
    - ``weight.update``: the change of the values in the step;
    - ``weight.exp_avg`` and so on: the optimizer state;
    - ``running_mean`` and ``running_var``: the running statistics of a normalization layer before the step, on the
      first rank, if the optimizer has parameters of the layer;
    - ``weight.batch_grad``, on request: the gradient of each backward pass on each rank, before accumulation and
      reduction. The gradient noise scale is computed from it;
    - ``weight/update_ratio``: the update-to-weight ratio ``rms(update) / rms(values)``.

    By default, it records all modules that have parameters of their own, including the LightningModule.

    Each record also has ``learning_rate`` and ``weight_decay`` among the statistics of a parameter. The record file has
    ``groups`` with all numeric settings of each parameter group, such as ``betas``, and ``gradient_clip_val``. ``held``
    has facts about parameters that no optimizer has: layers with the values of an initialization, and how the copies of
    trained parts follow them.

    During and after a run, :attr:`latest` has the statistics of the latest record by site, and :attr:`latest_step` has
    the step of this record. :meth:`disable` and :meth:`enable` switch the recorder during a run.

    Args:
        names: Module names or globs, such as ``"encoder.**"``; see :class:`~lightning_recorder.Selection`. Only a
            module's own parameters are recorded, not those of its children.
        parts: The tensors to record: any of ``"values"``, ``"gradients"``, ``"updates"``, ``"moments"`` (the optimizer
            state), ``"buffers"`` (the running statistics) and ``"batch_gradients"``, which is not among the defaults.
        statistics: The statistics to show as scalars: any of ``count``, ``mean``, ``std``, ``rms``, ``min``, ``max``,
            ``zero_fraction``, ``nan_count``, ``inf_count``, ``rank_mean_min``, ``rank_mean_max`` and quantiles such as
            ``quantile_0.99``. ``rank_mean_min`` and ``rank_mean_max`` are the smallest and the largest mean on any
            single rank. Quantiles are estimated from the histogram.
        compiled: ``"skip"`` does not record the parameters of compiled modules. All other values record them, and
            differ only for the recorders of activations and gradients.

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

    @extended_arguments(StatisticsCallback, StatisticsOptions)
    def __init__(
        self,
        names: str | Sequence[str] | None = None,
        *,
        parts: str
        | Sequence[
            Literal["values", "gradients", "updates", "moments", "buffers", "batch_gradients"]
        ] = PARAMETER_PARTS,  # type: ignore[assignment]  # a tuple of just these
        **options: Unpack[StatisticsOptions],
    ) -> None:
        self.parts = check_some("parts", parts, EVERY_PARAMETER_PART, _SYNONYMS)
        super().__init__(names, **options)

    @override
    def _choose(self, pl_module: LightningModule) -> SelectedModules:
        if self.selection.is_default:
            owners = _owners(pl_module)
            chosen = Selection(predicate=lambda name, module: module in owners, exclude=self.selection.exclude)
            return chosen.resolve(pl_module) if owners else SelectedModules({}, {})
        modules = self.selection.resolve(pl_module)
        if not any(True for module in modules.values() for _ in own_parameters(module)):
            first = next(iter(modules))
            raise SelectionError(
                f"no selected module has parameters of its own, such as {first!r}: write "
                f"'{first}.**' for those of its children"
            )
        return modules

    @property
    @override
    def _tag_kinds(self) -> set[str]:
        return set(self.parts)

    @override
    def _begin_results(self, trainer: Trainer, pl_module: LightningModule, directory: Path | None) -> None:
        super()._begin_results(trainer, pl_module, directory)
        if "batch_gradients" in self.parts and trainer.accumulate_grad_batches * averaged_ranks(trainer) == 1:
            rank_zero_info(
                f"{self} cannot derive the gradient noise scale: each step has one batch. It needs "
                "accumulate_grad_batches of at least 2, or several ranks."
            )

    @override
    def _make_recorder(self, modules: Mapping[str, nn.Module], stage: str) -> BaseStatisticsRecorder:
        return OptimizerRecorder(modules, parts=self.parts, **self.options)

    @guarded
    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        run = self._run
        if run is None or run.phase is RunPhase.IDLE:
            return
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        # The call above may fail and release the run, so check that the run is still the same.
        if self._run is run and isinstance(run.recorder, OptimizerRecorder):
            # Lightning does not unscale the gradients for optimizers that unscale them themselves.
            scaled = getattr(optimizer, "_step_supports_amp_scaling", False)
            with run.contained():
                run.recorder.before_step(optimizer, 1 / self.loss_scale.value if scaled else 1.0)

    def keep_values(self) -> None:
        """Keep the parameter values before an optimizer step without hooks, which the loop reports only afterwards."""
        run = self._run
        if run is not None and run.phase is RunPhase.RECORDING and isinstance(run.recorder, OptimizerRecorder):
            with run.contained():
                run.recorder.keep_values()

    @override
    def _set_up_recorder(self, trainer: Trainer, pl_module: LightningModule, recorder: BaseStatisticsRecorder) -> None:
        if not isinstance(recorder, OptimizerRecorder):
            return
        recorder.root = pl_module
        groups = [group for each in trainer.optimizers for group in each.param_groups]
        recorder.trained = [each for group in groups for each in group["params"]]
        recorder.batch_factor = gradient_factor(trainer, self.loss_scale.value)
        recorder.batches = trainer.accumulate_grad_batches * averaged_ranks(trainer)
        # Lightning does not see the steps of an optimizer that was unwrapped from LightningOptimizer, so the recorder
        # observes the optimizers.
        if not is_automatic(pl_module):
            recorder.optimizers = (*trainer.optimizers, *_inner(trainer.optimizers))
        if isinstance(trainer.gradient_clip_val, (int, float)):
            algorithm = trainer.gradient_clip_algorithm or "norm"
            recorder.facts = {
                "gradient_clip_val": float(trainer.gradient_clip_val),
                "gradient_clip_algorithm": str(getattr(algorithm, "value", algorithm)),
            }
        if is_automatic(pl_module):  # otherwise the number of optimizer steps is not known
            recorder.facts |= _plan(trainer)
        if trainer.is_global_zero:
            recorder.begin_batch(logged_step(trainer))

    @property
    @override
    def _counts_overflow(self) -> bool:
        return True


def _inner(optimizers: list[Optimizer]) -> Iterator[Optimizer]:
    """Yield the optimizers that wrappers such as SAM step, with the parameter groups of the wrapper."""
    for each in optimizers:
        for value in vars(each).values():
            if isinstance(value, Optimizer) and value.param_groups is each.param_groups:
                yield value


def _plan(trainer: Trainer) -> dict[str, Any]:
    """Return the planned number of optimizer steps, and the learning-rate schedules that have a fixed length.

    ``times`` is the number of times that the fit steps a schedule. ``unit`` is the number of epochs of the fit for a
    schedule with the interval ``"step"``, and the number of steps of the fit for the interval ``"epoch"``. The result
    is empty if the number of steps has no limit.
    """
    per_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
    limits = [trainer.max_steps, math.ceil(per_epoch) * (trainer.max_epochs or -1) if per_epoch < math.inf else -1]
    limits = [each for each in limits if each > 0]
    if not limits:
        return {}
    steps = min(limits)
    counts = {"step": steps}
    if 0 < per_epoch < math.inf:
        counts["epoch"] = math.ceil(steps / math.ceil(per_epoch))
    schedules = []
    for each in getattr(trainer, "lr_scheduler_configs", ()):
        # Reading a property of a user's class could run any code, so read only stored attributes.
        lengths = [stored_attribute(each.scheduler, name) for name in _LENGTHS]
        length = next((number for number in lengths if type(number) is int), None)
        if length is not None and each.interval in counts and len(counts) == 2:
            (unit,) = (counts[name] for name in counts if name != each.interval)
            about = {"class": class_name(type(each.scheduler)), "interval": each.interval, "length": length}
            schedules.append({**about, "times": counts[each.interval] // max(1, each.frequency), "unit": unit})
    return {"planned_steps": steps, **({"schedules": schedules} if schedules else {})}


_LENGTHS = ("total_steps", "T_max", "total_iters")  # attributes of the schedulers of torch


def _owners(root: nn.Module) -> ModuleSet:
    """Return the root and the default modules that own a parameter which no earlier module in the list owns.

    Unlike for activations, the root is included: reading its parameters does not require a call of the root.
    """
    registered = named_submodules(root, remove_duplicate=False)
    named = named_submodules(root, remove_duplicate=False, with_lent=True)
    found = ModuleSet()
    seen: set[int] = set()
    # A Keras model registers the parameters of its layers, but not the layers. Registered modules come first.
    for name in sorted(["", *default_modules(root)], key=registered.__contains__):
        own = {id(parameter) for _, parameter in own_parameters(named[name])}
        if own - seen:
            found.add(named[name])
            seen |= own
    return found
