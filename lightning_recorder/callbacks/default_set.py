"""The default set of recorders, with shared settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from lightning_recorder.callbacks.activation import ActivationRecorder
from lightning_recorder.callbacks.base import RecorderCallback
from lightning_recorder.callbacks.cost import CostRecorder
from lightning_recorder.callbacks.gradient import GradientRecorder
from lightning_recorder.callbacks.graph import GraphRecorder
from lightning_recorder.callbacks.output_options import Outputs
from lightning_recorder.callbacks.parameter import ParameterRecorder
from lightning_recorder.callbacks.watch import StepWatch
from lightning_recorder.errors import check_bool
from lightning_recorder.functions import DEFAULT_KINDS, SCORE_KINDS
from lightning_recorder.reductions import FormatErrors, MassiveValues, SpectralNorm
from lightning_recorder.schedule import Schedule
from lightning_recorder.signatures import with_replacements
from lightning_recorder.sinks import Sink
from lightning_recorder.statistics import EVERY_PARAMETER_PART, PARAMETER_PARTS

__all__ = ["default_recorders"]


@with_replacements({})
def default_recorders(
    names: str | Sequence[str] | None = None,
    *,
    types: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = None,
    exclude: str | Sequence[str] | None = None,
    every_n_train_steps: int | None = None,
    schedule: Schedule = Schedule(),
    outputs: Outputs = Outputs(),
    compiled: Literal["auto", "eager", "inside", "skip"] = "auto",
    attention: bool = True,
    experts: bool = True,
    noise_scale: bool = False,
    costs: bool = False,
    formats: bool = False,
    spectra: bool = False,
    sinks: Iterable[Sink] = (),
    strict: bool = False,
) -> list[RecorderCallback]:
    """Return a recorder of the graph, of activations, of gradients and of parameters, and a watch on every step.

    ``LIGHTNING_RECORDER=on`` in the environment adds the same set to the trainers of an unmodified program.

    Args:
        names: Module names or globs, such as ``"encoder.**"``; see :class:`~lightning_recorder.Selection`. The graph is
            always that of the whole model.
        types: Module classes or their names. If ``names`` is also given, a module must match both.
        exclude: Names or globs of modules to leave out.
        every_n_train_steps: Record the first optimizer step and then every n-th one. Defaults to
            ``Trainer(log_every_n_steps=…)``. The graph is recorded once.
        schedule: Further conditions on the steps, and a limit on the overhead of each recorder. Its ``stages`` apply
            only to the activations.
        outputs: Record files, plots, dumps, uploads, and their limits.
        compiled: ``"inside"`` records activations and gradients inside compiled modules, and runs them eagerly only for
            the graph; ``"eager"`` runs compiled modules and functions eagerly on recorded steps; ``"auto"`` chooses
            ``"inside"`` where this mode is tested, and otherwise ``"eager"``; ``"skip"`` leaves compiled code compiled
            and does not record it.
        attention: Record each head of attention. Costs nothing in a model without attention.
        experts: Record each expert of a router. Costs nothing in a model without routers.
        noise_scale: Also record the gradient of each accumulated batch, and derive the gradient noise scale of the
            model and of its blocks: about the largest batch size that still saves steps. Needs
            ``accumulate_grad_batches`` of at least 2, or several ranks.
        costs: Also record the time and the memory of each module with a :class:`CostRecorder`.
        formats: Also record the rounding error of activations, weights and gradients in narrow number formats, and the
            positions of massive activations; see :class:`~lightning_recorder.reductions.FormatErrors`. Large tensors
            are sampled.
        spectra: Also record the spectral norm and the orthogonality of weights, gradients and updates; see
            :class:`~lightning_recorder.reductions.SpectralNorm`.
        sinks: Further sinks, in addition to the loggers of the trainer and the files in ``<log_dir>/recorder``.
        strict: Raise errors of the recorders instead of warning about them.

    Returns:
        New callbacks: a :class:`GraphRecorder`, an :class:`ActivationRecorder`, a :class:`GradientRecorder`, a
        :class:`ParameterRecorder` and, unless ``outputs`` has ``findings=False``, a :class:`StepWatch`. This
        :class:`StepWatch` does nothing in a trainer that has one of your own. With ``costs``, a :class:`CostRecorder`
        is the last.

    Raises:
        ArgumentError: If an argument is invalid.

    Example::

        Trainer(callbacks=default_recorders(every_n_train_steps=100))
    """
    wanted = {"attention": attention, "experts": experts, "noise_scale": noise_scale}
    wanted |= {"costs": costs, "formats": formats, "spectra": spectra}
    for name, value in wanted.items():
        check_bool(name, value)
    scores = [kind for kind, is_wanted in zip(SCORE_KINDS, (attention, experts), strict=True) if is_wanted]
    further: dict[type[RecorderCallback], dict[str, Any]] = {
        ActivationRecorder: {
            "functions": [*DEFAULT_KINDS, *scores],
            "extra": [FormatErrors(), MassiveValues()] if formats else [],
        },
        ParameterRecorder: {
            "parts": EVERY_PARAMETER_PART if noise_scale else PARAMETER_PARTS,
            "extra": [*([FormatErrors(weights=True)] if formats else []), *([SpectralNorm()] if spectra else [])],
        },
    }
    in_training = replace(schedule, stages=("train",))
    shared: dict[str, Any] = {
        "types": types,
        "exclude": exclude,
        "every_n_train_steps": every_n_train_steps,
        "outputs": outputs,
        "sinks": (sinks := list(sinks)),
        "strict": strict,
    }
    recorders: list[RecorderCallback] = [
        GraphRecorder(compiled="skip" if compiled == "skip" else "eager", sinks=sinks, strict=strict)
    ]
    for kind in (ActivationRecorder, GradientRecorder, ParameterRecorder):
        stages = schedule if kind is ActivationRecorder else in_training
        recorders.append(kind(names, schedule=stages, compiled=compiled, **shared, **further.get(kind, {})))
    if outputs.findings:
        watch = StepWatch(sinks=sinks, strict=strict)
        watch.is_default = True
        recorders.append(watch)
    if costs:
        recorders.append(CostRecorder(names, schedule=in_training, **shared))
    return recorders
