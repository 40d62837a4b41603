"""A recorder of parameters, gradients, parameter updates and optimizer states."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_recorder.errors import ArgumentError, RecordingError, check_some, describe_error, warn
from lightning_recorder.internals.autograd import adds_to
from lightning_recorder.internals.module_tree import modules_of, stored_attribute
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.internals.stopwatch import Stopwatch
from lightning_recorder.internals.storage import is_uninitialized
from lightning_recorder.module_names import named_submodules, own_parameters
from lightning_recorder.names import RUNNING_STATISTICS
from lightning_recorder.records.table import Table
from lightning_recorder.reductions import Reduction
from lightning_recorder.reductions.values import PLAIN_TYPES
from lightning_recorder.statistics.held import HeldParameters
from lightning_recorder.statistics.recorder import BaseStatisticsRecorder
from lightning_recorder.statistics.sites import SiteStates
from lightning_recorder.structure import ignore_unknown, iter_tensors
from lightning_recorder.taps import ParameterGradientTap, Site

__all__ = ["EVERY_PARAMETER_PART", "PARAMETER_PARTS", "OptimizerRecorder", "with_update_ratios"]

PARAMETER_PARTS = ("values", "gradients", "updates", "moments", "buffers")
"""The tensors of a parameter and of its module that are recorded by default."""

EVERY_PARAMETER_PART = (*PARAMETER_PARTS, "batch_gradients")
"""All tensors of a parameter and of its module that can be recorded."""

_BATCH_GRADIENT, _BATCH_GRADIENTS = ".batch_grad", "batch_gradients"
_UPDATE = ".update"
_COUNTERS = ("step", "eta", "mu", "mu_product")  # 0-d states of torch's optimizers for parameters of any shape
_SETTINGS = {"lr": "learning_rate", "weight_decay": "weight_decay"}  # settings recorded at the site of a parameter


class _Parameter(NamedTuple):
    site: Site
    tensor: Tensor
    counts: bool
    """True if this rank's shard is not a copy of another rank's shard."""


class _Step(NamedTuple):
    """An optimizer step in progress."""

    optimizer: Optimizer
    parameters: list[_Parameter]
    before: list[Tensor | None]


class OptimizerRecorder(BaseStatisticsRecorder):
    """Record statistics of the parameters of modules at optimizer steps, usable as a context manager.

    The sites of a module's parameter ``weight`` are:

    - ``weight``: the values before the step;
    - ``weight.grad``: the gradient used by the step;
    - ``weight.update``: the change of the values by the step, at least in float32;
    - ``weight.exp_avg`` and similar: the optimizer states after the step that have the shape of the parameter. Counters
      are excluded, such as the ``step`` of a 0-d parameter;
    - ``weight.batch_grad``, on request: the gradient of each backward pass on each rank, before accumulation and
      reduction, without ``extra`` reductions.

    The sites ``running_mean`` and ``running_var`` are recorded at the step for normalization layers whose parameters
    are in the optimizer. :func:`with_update_ratios` adds ``update_ratio`` to the statistics of ``weight``:
    ``rms(update) / rms(values)``, over the recorded steps. :meth:`settings` returns the learning rate and the weight
    decay of each parameter. :meth:`about` returns all numeric settings of the parameter groups.

    A parameter that several modules share is recorded for the first of them. Frozen parameters, and parameters that no
    recorded step updates, are not recorded.

    Args:
        modules: The modules by name. Each module's own parameters are recorded, without those of its children.
        optimizers: The optimizers whose steps are recorded while this recorder is attached. For other optimizers, and
            if a closure computes the gradients inside the step, call :meth:`before_step`.
        parts: The tensors to record: some of ``"values"``, ``"gradients"``, ``"updates"``, ``"moments"``, ``"buffers"``
            (the running statistics) and ``"batch_gradients"``.
        extra: See :class:`~lightning_recorder.StatisticsRecorder`.
        sample: See :class:`~lightning_recorder.StatisticsRecorder`.
        quantiles: See :class:`~lightning_recorder.StatisticsRecorder`.
        strict: Raise errors instead of warning once and ignoring the failed module.

    Raises:
        ArgumentError: If an argument is invalid.
        RecordingError: From the optimizer step, if ``strict``. The message names the module.

    Note:
        Updates need a copy of the optimizer's recorded parameters during a recorded step. For a parameter that is
        sharded across ranks, each rank records its shard. When ranks are merged, only rank zero's copy of a replicated
        parameter counts.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.constant_(net.weight, 2.0)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        >>> with OptimizerRecorder({"net": net}, [optimizer]) as recorder:
        ...     net(torch.ones(1, 2)).sum().backward()
        ...     _ = optimizer.step()
        >>> found = with_update_ratios(recorder.collect())
        >>> [(site.path, seen.scalars["mean"]) for site, seen in found.items()]
        [('weight', 2.0), ('weight.grad', 1.0), ('weight.update', -0.5)]
        >>> found["net", "weight"].scalars["update_ratio"]
        0.25
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        optimizers: Iterable[Optimizer] = (),
        *,
        parts: Sequence[str] = PARAMETER_PARTS,
        extra: Iterable[Reduction] = (),
        sample: int | None = None,
        quantiles: Iterable[float] = (),
        strict: bool = False,
    ) -> None:
        super().__init__(SiteStates(extra=extra, sample=sample, quantiles=quantiles, strict=strict))
        self._modules = dict(modules)
        self.parts = check_some("parts", parts, EVERY_PARAMETER_PART)
        self.optimizers = tuple(optimizers)
        for each in self.optimizers:
            if not isinstance(each, Optimizer):
                raise ArgumentError(f"optimizers takes torch.optim.Optimizer instances, got {each!r:.80}")
        self.strict = strict
        self._replicated: set[Site] = set()
        self._stopwatch: Stopwatch | None = None
        self._attached = False
        self._handles: list[RemovableHandle] = []
        self._hooked: list[Optimizer] = []  # the optimizers with a post-step hook
        self._steps: list[_Step] = []
        self._kept: dict[int, Tensor] = {}  # values before a step that calls no hooks
        self._failed: set[str] = set()
        self._groups: dict[int, list[dict[str, Any]]] = {}  # by the id of the optimizer
        self._earlier_groups: list[dict[str, Any]] = []  # groups from before a resume, used until an optimizer steps
        self._settings: dict[Site, dict[str, float]] = {}
        self.facts: dict[str, Any] = {}
        """Facts about the fit, such as how gradients are clipped, which :meth:`about` includes."""
        self.root: nn.Module | None = None
        """The model, or None. If set, modules that are no longer part of the model are not recorded."""
        self.trained: list[Tensor] = []
        """The parameters of the optimizers, if known. Batch gradients are recorded for these parameters only."""
        self._held: HeldParameters | None = None
        self.batch_factor = 1.0
        """The factor that converts the gradient of a backward pass to the gradient of the loss of its batch."""
        self.batches = 1
        """The number of batches per step over all ranks. A step uses the mean of their losses."""
        self._batch_size = 0
        self._batch_tap: ParameterGradientTap | None = None
        self._batch_parameters: dict[Site, Tensor] = {}
        if _BATCH_GRADIENTS in self.parts:
            self._batch_tap = ParameterGradientTap(self._modules, self._add_batch_gradient, strict=strict)
            self._batch_tap.eager = False  # hooks on parameters do not change compiled code

    @property
    @override
    def modules(self) -> dict[str, nn.Module]:
        return self._modules

    @property
    @override
    def replicated(self) -> frozenset[Site]:
        return frozenset(self._replicated)

    @override
    def watch(self, stopwatch: Stopwatch | None) -> None:
        self._stopwatch = stopwatch
        if self._batch_tap is not None:
            self._batch_tap.stopwatch = stopwatch

    @property
    @override
    def failed(self) -> frozenset[str]:
        return frozenset(self._failed if self._batch_tap is None else self._failed | self._batch_tap.failed)

    @override
    def revive(self) -> None:
        self._failed.clear()
        if self._batch_tap is not None:
            self._batch_tap.revive()
        super().revive()

    @override
    def traces(self) -> dict[str, Any]:
        return {**super().traces(), "parts": self.parts}

    @override
    def settings(self) -> dict[Site, dict[str, float]]:
        """Return ``learning_rate`` and ``weight_decay`` of each parameter at its latest recorded step."""
        return dict(self._settings)

    @override
    def about(self) -> dict[str, Any]:
        """Return ``groups``, the numeric settings of each parameter group at its latest recorded step.

        Each group also has ``optimizer``, the class of its optimizer, and ``parameters``, its number of parameter
        tensors. ``held`` has :meth:`HeldParameters.facts`, once :meth:`begin_batch` has been called. With
        ``"batch_gradients"``, ``batches`` is the number of batches per step, and ``batch_size`` is the number of
        samples of the latest batch, or 0 if unknown.
        """
        groups = [group for each in self._groups.values() for group in each] or self._earlier_groups
        batches = {"batches": self.batches, "batch_size": self._batch_size} if self._batch_tap is not None else {}
        held = {} if self._held is None else self._held.facts()
        return {**self.facts, **({"groups": groups} if groups else {}), **({"held": held} if held else {}), **batches}

    @override
    def settings_state(self) -> dict[str, Any]:
        sites = [[*site, values] for site, values in self._settings.items()]
        return {"sites": sites, "groups": self.about().get("groups", [])}

    @override
    def load_settings(self, state: Mapping[str, Any]) -> None:
        self._settings = {Site(name, path): dict(values) for name, path, values in state.get("sites", ())}
        self._earlier_groups = list(state.get("groups", ()))

    @property
    @override
    def attached(self) -> bool:
        return self._attached

    @override
    def attach(self) -> None:
        self.prepare()
        if not self._attached:
            self._attached = True
            for optimizer in self.optimizers:
                self._handles.append(optimizer.register_step_pre_hook(partial(_before, self)))
            if self._batch_tap is not None:
                trained = {id(each) for each in self.trained}
                found = ((site, each) for site, each in self._first_sites() if not trained or id(each) in trained)
                self._batch_parameters = dict(found)
                self._batch_tap.attach()

    def begin_batch(self, step: int) -> None:
        """Look at the parameters that no optimizer has, before a recorded batch. A no-op without a model."""
        if self.root is not None and self.trained:
            with self._stopwatch or nullcontext():
                self._held = self._held or HeldParameters(self.root, self.trained)
                self._held.begin(step)
                self.waits_for_batch = self._held.waits

    @override
    def look(self, step: int) -> None:
        self.waits_for_batch = False
        if self._held is not None:
            with self._stopwatch or nullcontext():
                self._held.look(step)

    @override
    def observe_batch(self, batch: Any) -> None:
        if self._batch_tap is not None:
            found = (tensor for _, tensor in iter_tensors(batch, "", unknown=ignore_unknown))
            self._batch_size = next((len(tensor) for tensor in found if tensor.dim()), 0)

    def _first_sites(self) -> Iterator[tuple[Site, Tensor]]:
        """Yield each parameter with its site in the first module that has it."""
        seen: set[int] = set()
        for name, module in self._modules.items():
            for path, parameter in own_parameters(module):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield Site(name, path), parameter

    def _add_batch_gradient(self, site: Site, tensor: Tensor) -> None:
        parameter = self._batch_parameters.get(site)
        if parameter is not None and adds_to(parameter):  # not a gradient that torch.autograd.grad returns
            with self.states.times["noise_scale"]:
                own = Site(site.name, site.path + _BATCH_GRADIENT)
                # Skip the extra reductions, which would take additional time in each batch.
                self.states.add(own, tensor, self.batch_factor, extra=False)

    @override
    def pause(self) -> None:
        self.remove()

    @override
    def remove(self) -> None:
        # First complete steps in progress, because an optimizer without hooks does not report the end of a step. For
        # optimizers that are not subclasses of torch's, it is unknown whether the step has ended, so discard it.
        for step in list(self._steps):
            if isinstance(step.optimizer, Optimizer):
                self._after(step)
        self._steps.clear()
        self._kept.clear()
        self._attached = False
        if self._batch_tap is not None:
            self._batch_tap.remove()
        handles, self._handles, self._hooked = self._handles, [], []
        for handle in handles:
            handle.remove()

    def keep_values(self) -> None:
        """Keep the values of the trained parameters until :meth:`before_step`, which is then called after the step.

        Call this for steps without hooks, such as those of an optimizer that is not a ``torch.optim.Optimizer``.
        """
        if self._attached and not self._kept and {"values", "updates"}.intersection(self.parts):
            with pause_recording(), self._stopwatch or nullcontext():
                trained = [each for _, each in self._first_sites() if each.requires_grad and not is_uninitialized(each)]
                try:
                    self._kept = {id(each): each.detach().clone() for each in trained}
                except torch.OutOfMemoryError as error:
                    self._give_up_updates(error)

    def _give_up_updates(self, error: Exception) -> None:
        self.parts = tuple(part for part in self.parts if part != "updates")
        warn(f"updates of parameters are not recorded, because a copy is too large: {describe_error(error)}")

    def before_step(self, optimizer: Optimizer, factor: float = 1.0) -> None:
        """Record the tensors before a step, and arrange to record the updates after the step.

        A no-op during a step of the same optimizer, for example in the closure of LBFGS, or of one that wraps it.

        Args:
            optimizer: The optimizer of the step.
            factor: The factor that the gradients are multiplied by.
        """
        groups = optimizer.param_groups
        if not self._attached or any(step.optimizer.param_groups is groups for step in self._steps):
            return
        with pause_recording(), self._stopwatch or nullcontext():
            parameters = self._parameters_of(optimizer)
            self._note_settings(optimizer, parameters)
            for each in self._running_statistics(parameters):
                self._add(each, "", each.tensor, wanted="buffers")
            # With hooks, this runs before the step, while the parameters have the old values: no need for kept values.
            kept = {} if hasattr(optimizer, "register_step_post_hook") else self._kept
            self._kept = {}
            for each in parameters:
                self._add(each, "", kept.get(id(each.tensor), each.tensor), wanted="values")
                self._add(each, ".grad", each.tensor.grad, wanted="gradients", factor=factor)
            if kept:
                self._after(_Step(optimizer, parameters, [kept.get(id(each.tensor)) for each in parameters]))
            else:
                self._begin(optimizer, parameters)

    def _begin(self, optimizer: Optimizer, parameters: list[_Parameter]) -> None:
        before: list[Tensor | None] = [None] * len(parameters)
        if "updates" in self.parts:
            try:
                before = [each.tensor.detach().clone() for each in parameters]
            except torch.OutOfMemoryError as error:
                self._give_up_updates(error)
        after = getattr(optimizer, "register_step_post_hook", None)
        if after is not None and not any(each is optimizer for each in self._hooked):
            # Only remove() removes the hook, because torch iterates over the optimizer's hooks while it calls the hook.
            with suppress(AttributeError):  # a class that does not call ``Optimizer.__init__`` has no hooks
                self._handles.append(after(partial(_after, self)))
                self._hooked.append(optimizer)
        self._steps.append(_Step(optimizer, parameters, before))

    def after_step(self, optimizer: Optimizer) -> None:
        """Record the result of a step. A no-op if no step of the optimizer is in progress."""
        for step in self._steps:
            if step.optimizer is optimizer:
                self._after(step)
                return

    def _after(self, step: _Step) -> None:
        self._steps = [each for each in self._steps if each is not step]
        with pause_recording(), self._stopwatch or nullcontext():
            for each, before in zip(step.parameters, step.before, strict=True):
                if before is not None:
                    # The difference of two half-precision numbers may need more digits than half precision has.
                    before = before.to(torch.promote_types(before.dtype, torch.float32))
                    self._add(each, _UPDATE, each.tensor.detach() - before, wanted="updates")
                for name, kept in self._moments(step.optimizer, each.tensor):
                    self._add(each, f".{name}", kept, wanted="moments")

    def _note_settings(self, optimizer: Optimizer, parameters: list[_Parameter]) -> None:
        groups = [_numbers(group) for group in optimizer.param_groups]
        kind = type(optimizer).__name__
        self._groups[id(optimizer)] = [
            {"optimizer": kind, "parameters": len(group["params"]), **numbers}
            for group, numbers in zip(optimizer.param_groups, groups, strict=True)
        ]
        by_parameter = {
            id(tensor): {name: float(numbers[key]) for key, name in _SETTINGS.items() if key in numbers}
            for group, numbers in zip(optimizer.param_groups, groups, strict=True)
            for tensor in group["params"]
        }
        self._settings.update({each.site: by_parameter[id(each.tensor)] for each in parameters})

    def _running_statistics(self, parameters: list[_Parameter]) -> list[_Parameter]:
        """Return, on the first rank only, the running statistics of the modules that have the parameters.

        DDP keeps the buffers of the first rank: it broadcasts them to the other ranks before each forward pass.
        """
        found = []
        for name in dict.fromkeys(each.site.name for each in parameters if "buffers" in self.parts):
            for path in RUNNING_STATISTICS:
                tensor = stored_attribute(self._modules[name], path)
                if isinstance(tensor, Tensor) and tensor.is_floating_point() and is_own_part(tensor):
                    found.append(_Parameter(Site(name, path), tensor, counts=True))
        return found

    @staticmethod
    def _moments(optimizer: Optimizer, parameter: Tensor) -> list[tuple[str, Tensor]]:
        """Return the optimizer states that have the shape of the parameter."""
        kept: Any = optimizer.state.get(parameter)
        if not isinstance(kept, Mapping):
            return []
        return [
            (str(name), value)
            for name, value in kept.items()
            if isinstance(value, Tensor)
            and value.shape == parameter.shape
            and (value.is_floating_point() or value.is_complex())
            and (value.dim() or name not in _COUNTERS)
        ]

    def _parameters_of(self, optimizer: Optimizer) -> list[_Parameter]:
        """Return the parameters of the modules that a step of the optimizer can change, without duplicates."""
        theirs = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        present = None if self.root is None else {id(each) for each in modules_of(self.root)}
        if self.root is not None and present is not None and not present.issuperset(map(id, self._modules.values())):
            present = {id(each) for each in named_submodules(self.root, with_lent=True).values()}
        found = []
        for name, module in self._modules.items():
            # The optimizer may still have the parameters of a module that was replaced.
            if present is not None and id(module) not in present:
                continue
            for path, parameter in own_parameters(module):
                if id(parameter) in theirs and parameter.requires_grad and not is_uninitialized(parameter):
                    theirs.discard(id(parameter))
                    found.append(_Parameter(Site(name, path), parameter, is_own_part(parameter)))
        return found

    def _add(
        self, parameter: _Parameter, suffix: str, tensor: Tensor | None, *, wanted: str, factor: float = 1.0
    ) -> None:
        name, path = parameter.site
        if tensor is None or wanted not in self.parts or name in self._failed:
            return
        site = Site(name, path + suffix)
        if not parameter.counts:
            if _is_sharded(parameter.tensor):
                return  # a copy of one shard would be compared with the merge of all other shards
            self._replicated.add(site)
        try:
            # Try the fast path before detaching the tensor and calling add(), because it needs neither.
            if type(tensor) not in PLAIN_TYPES or not self.states.try_fast_path(site, tensor, factor):
                self.states.add(site, tensor.detach(), factor)
        except Exception as error:
            message = f"recording {site.path!r} of module {name!r} failed: {describe_error(error)}"
            if self.strict:
                raise RecordingError(message) from error
            self._failed.add(name)
            warn(f"{message}. The module is no longer recorded; strict=True raises instead.")


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numeric settings of a parameter group. Tensors on a GPU are left out, because reading them waits."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
            value = value.item()
        parts = value if isinstance(value, (tuple, list)) and key != "params" else (value,)
        if parts and all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in parts):
            numbers = [float(each) if math.isfinite(each) else repr(float(each)) for each in parts]
            found[str(key)] = numbers if isinstance(value, (tuple, list)) else numbers[0]
    return found


def is_own_part(tensor: Tensor) -> bool:
    """Return True if this rank's shard of a tensor counts, and is not a copy of another rank's shard.

    A plain tensor is the same on every rank and counts on rank zero. For a ``DTensor``, each rank has a shard. If
    several ranks have the same shard, the first of these ranks counts. Shards may also be replicated along dimensions
    of the whole device mesh that are missing in the submesh of the tensor.
    """
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)
    if mesh is None or placements is None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return not distributed or torch.distributed.get_rank() == 0
    place: Sequence[int] | None = mesh.get_coordinate()
    if place is None:
        return False
    # FSDP2 with tensor parallelism has a separate placement class, for which is_shard() is False.
    is_first = all(index == 0 for index, each in zip(place, placements, strict=True) if each.is_replicate())
    return is_first and _is_first_mesh(mesh)


def _is_sharded(tensor: Tensor) -> bool:
    return any(not each.is_replicate() for each in getattr(tensor, "placements", ()))


def _is_first_mesh(mesh: Any) -> bool:
    """Return True if this rank has index 0 in each dimension of the root mesh that the given submesh lacks.

    There is no public API for the root mesh. Fallback: treat the submesh as the root mesh.
    """
    try:
        whole = mesh._get_root_mesh()
        names, own, place = whole.mesh_dim_names, mesh.mesh_dim_names, whole.get_coordinate()
        if not names or not own or place is None or not set(own) <= set(names):
            return True
        return all(index == 0 for name, index in zip(names, place, strict=True) if name not in own)
    except AttributeError:
        return True


def with_update_ratios(found: Table) -> Table:
    """Add ``update_ratio``, ``rms(update) / rms(values)``, to the statistics of the parameters that have an update."""
    updates = [found.rows.get(Site(site.name, site.path + _UPDATE), -1) for site in found.sites]
    has = np.array(updates, dtype=np.int64) >= 0
    if not has.any():
        return found
    weight = found.column("rms")
    change = weight[updates]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return found.with_column("update_ratio", change / weight, has)


# Functions instead of methods, so that pickling an optimizer in the middle of a step does not pickle the recorder.
def _before(recorder: OptimizerRecorder, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:  # with a closure, the gradients are not computed yet
        recorder.before_step(optimizer)


def _after(recorder: OptimizerRecorder, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    recorder.after_step(optimizer)
