"""Validation and normalisation of the arguments of the callbacks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from lightning_recorder.errors import ArgumentError, UnknownArgumentError, check_integer, closest, did_you_mean
from lightning_recorder.reductions import DeadChannels, HigherMoments, Norms, Reduction
from lightning_recorder.statistics import SHOWN_STATISTICS

__all__ = ["STAGE_SYNONYMS", "checked_arguments", "checked_statistics", "in_words", "recorder_options"]

Init = TypeVar("Init", bound=Callable[..., None])

_SYNONYMS = {
    "every_n_train_steps": (
        "every_n_steps", "every_n_step", "every_n_batches", "every_n_train_batches", "log_every_n_steps", "every_n",
        "every", "interval", "log_interval", "freq", "log_freq", "frequency", "cadence", "n_steps", "period",
    ),
    "every_n_epochs": ("every_n_train_epochs", "log_every_n_epochs", "epochs"),
    "names": (
        "name_filter", "layers", "layer", "layer_names", "modules", "module", "module_names", "include", "patterns",
        "pattern", "targets", "model", "net",
    ),
    "types": ("classes", "module_types", "layer_types", "type_filter"),
    "exclude": ("ignore", "skip", "except", "without", "blacklist"),
    "statistics": ("stats", "metrics", "scalars"),
    "histograms": ("hist", "hists", "bins"),
    "extra": ("reductions", "reduction"),
    "sinks": ("logger", "loggers", "writers"),
    "when": ("condition", "predicate", "schedule"),
    "step_window": ("window", "start", "stop", "steps"),
    "plots": ("images", "pictures", "figures"),
    "samples": ("rows", "batch_size"),
    "formats": ("format", "fmt", "suffix"),
    "depth": ("max_depth", "render_depth", "expand"),
    "direction": ("rankdir", "graph_dir", "orientation"),
    "stages": ("stage", "splits", "phases"),
    "stage": ("stages", "phase"),
    "parts": ("kinds", "what"),
    "tensors": ("kinds", "what"),
}  # fmt: skip
"""The names that other packages use for each argument."""

STAGE_SYNONYMS = {
    "fit": "train", "training": "train", "val": "validate", "valid": "validate", "validation": "validate",
    "eval": "validate", "testing": "test", "prediction": "predict", "inference": "predict", "example_input": "example",
}  # fmt: skip
"""Synonyms of the stages, including the names that Lightning uses."""

_STATISTIC_SYNONYMS = {
    "sd": "std", "stddev": "std", "variance": "std", "var": "std", "average": "mean", "avg": "mean", "sparsity":
    "zero_fraction", "maximum": "max", "minimum": "min", "nans": "nan_count", "infs": "inf_count",
}  # fmt: skip


def checked_arguments(init: Init) -> Init:
    """Decorate the ``__init__`` of a callback so that argument errors name the class and suggest the intended argument.

    Raises:
        UnknownArgumentError: If an argument does not exist, or if there are too many positional arguments.
        ArgumentError: If ``init`` raises it. The message is prefixed with the name of the class.
    """
    positional = [
        name
        for name, each in inspect.signature(init).parameters.items()
        if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ][1:]

    @functools.wraps(init)
    def wrapper(self: object, *args: Any, **kwargs: Any) -> None:
        kind = type(self)
        unknown = next((name for name in kwargs if name not in _known(kind)), None)
        if unknown is not None:
            raise UnknownArgumentError(_unknown(kind, unknown))
        if len(args) > len(positional):
            (only,) = positional
            hint = f"write {kind.__name__}({list(args)!r})" if all(isinstance(each, str) for each in args) else ""
            raise UnknownArgumentError(
                f"{kind.__name__} takes one argument without a name, {only}, got {len(args)}: "
                + (hint or "write the others as name=value")
            )
        try:
            init(self, *args, **kwargs)
        except ArgumentError as error:
            head = f"{kind.__name__}: "
            if not str(error).startswith((head, f"{kind.__name__} ")):
                error.args = (f"{head}{error}",)
            raise

    return cast("Init", wrapper)


def _known(kind: type) -> dict[str, None]:
    """Return the names of the arguments that a class accepts, including those that it passes to its base classes."""
    known: dict[str, None] = {}
    for each in kind.__mro__:
        if "__init__" in vars(each):
            found = list(inspect.signature(vars(each)["__init__"]).parameters.values())[1:]
            variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            known |= {every.name: None for every in found if every.kind not in variable}
    return known


def _unknown(kind: type, name: str) -> str:
    """Return the error message for an unknown argument."""
    known = _known(kind)
    meant = {synonym: argument for argument, them in _SYNONYMS.items() if argument in known for synonym in them}
    found = closest(name, known, meant)
    hint = f": did you mean {found}?" if found else f"; its arguments are {', '.join(known)}"
    return f"{kind.__name__} has no argument {name}{hint}"


def checked_statistics(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return the statistics to show as a tuple.

    Raises:
        ArgumentError: If a name is not a statistic that can be shown.
    """
    names = (given,) if isinstance(given, str) else _listed("statistics", given)
    unknown = [name for name in names if name not in SHOWN_STATISTICS]
    if unknown:
        known, got = ", ".join(SHOWN_STATISTICS), ", ".join(map(repr, unknown))
        raise ArgumentError(f"statistics takes some of {known}; got {got}{_where_it_is(unknown[0])}")
    return names


def _where_it_is(name: object) -> str:
    """Return the end of an error message: a hint on how to get a statistic that ``statistics`` does not accept."""
    if name == "histogram":
        return ": histograms=True or False chooses those"
    if isinstance(name, str) and (name == "median" or name.startswith(("quantile", "percentile"))):
        return ": quantiles=[0.5, 0.99] shows quantiles"
    meant = did_you_mean(name, SHOWN_STATISTICS, _STATISTIC_SYNONYMS)
    extra = next((each.__name__ for each in (DeadChannels, HigherMoments, Norms) if name in each.statistics), "")
    if extra:
        return f": extra=[{extra}()] shows it, without naming it in statistics"
    return meant or "; extra=[…] shows the statistics of further reductions"


def recorder_options(extra: object, quantiles: object, sample: int | None, strict: bool) -> dict[str, Any]:
    """Return the keyword arguments of a recorder.

    Raises:
        ArgumentError: If an argument has the wrong type or value.
    """
    if sample is not None:
        check_integer("histogram_sample", sample, 1)
    return {
        "extra": _reductions((extra,) if isinstance(extra, (Reduction, type)) else _listed("extra", extra)),
        "quantiles": _listed("quantiles", quantiles),
        "sample": sample,
        "strict": strict,
    }


def in_words(value: object) -> object:
    """Return a setting in a form that is equal in every process."""
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, (tuple, list)):
        return [in_words(each) for each in value]
    return value


def _reductions(given: tuple[Any, ...]) -> tuple[Reduction, ...]:
    """Check that the extra reductions are instances of :class:`Reduction`, and return them."""
    for each in given:
        if not isinstance(each, Reduction):
            called = f"the class {each.__name__}: write {each.__name__}()" if isinstance(each, type) else repr(each)
            raise ArgumentError(f"extra takes reductions, which are instances of Reduction, got {called}")
    return given


def _listed(name: str, given: object) -> tuple[Any, ...]:
    """Return an argument as a tuple, so that an iterator is not exhausted after the first fit."""
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise ArgumentError(
            f"{name} takes a list, got {given!r}" + (f": write [{given!r}]" if _is_number(given) else "")
        )
    return tuple(given)


def _is_number(given: object) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool)
