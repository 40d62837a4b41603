"""Error messages for wrong arguments, which name the class and suggest the intended argument."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast, get_type_hints

from lightning_recorder.errors import ArgumentError, UnknownArgumentError, closest

__all__ = [
    "check_names",
    "checked_arguments",
    "described_like",
    "extended_arguments",
    "repr_of_changed",
    "with_checked_arguments",
    "with_replacements",
]

Function = TypeVar("Function", bound=Callable[..., Any])
Init = TypeVar("Init", bound=Callable[..., None])
Kind = TypeVar("Kind", bound=type)

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
    "schedule": ("sampling",),
    "when": ("condition", "predicate"),
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
    "dumps": ("dump", "save"),
}  # fmt: skip
"""Each argument of this package, with the names that other packages and users have for it."""

_PARTS = {
    "quantiles": ("statistics", 'statistics=[…, "quantile_0.99"]'),
}
"""Names that correspond to part of another argument: this argument, and the code to write."""


def with_checked_arguments(kind: Kind) -> Kind:
    """Decorate a dataclass as :func:`checked_arguments` decorates an ``__init__``."""
    kind.__init__ = checked_arguments(kind.__init__)  # type: ignore[misc]  # subclasses define their own
    return kind


def checked_arguments(init: Init) -> Init:
    """Decorate an ``__init__`` so that argument errors name the class and suggest the intended argument.

    An argument whose default is a dataclass instance is a group of options. The class may have a mapping ``_ignored``
    with the group fields that it does not use. It maps each field name to the code to write instead, or to an empty
    string.

    Raises:
        UnknownArgumentError: If an argument does not exist, or if there are too many positional arguments.
        ArgumentError: If a group has the wrong type or sets an unused field, or if ``init`` raises this error. The
            message is prefixed with the name of the class.
    """
    parameters = inspect.signature(init).parameters
    positional = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD][1:]
    groups = _groups(parameters)

    @functools.wraps(init)
    def wrapper(self: object, *args: Any, **kwargs: Any) -> None:
        kind = type(self)
        check_names(kind, kwargs)
        if len(args) > len(positional):
            raise UnknownArgumentError(_too_many(kind, positional, args))
        try:
            for name in groups.keys() & kwargs.keys():
                _check_group(kind, name, groups[name], kwargs[name])
            init(self, *args, **kwargs)
        except ArgumentError as error:
            head = f"{kind.__name__}: "
            if not str(error).startswith((head, f"{kind.__name__} ")):
                error.args = (f"{head}{error}",)
            raise

    return cast("Init", wrapper)


def extended_arguments(base: type, options: type) -> Callable[[Init], Init]:
    """Decorate an ``__init__`` with ``**options`` like :func:`checked_arguments`, with the options in its signature.

    Args:
        base: The base class to which the options are passed, which defines their defaults.
        options: The ``TypedDict`` with the names of the options.
    """

    def decorate(init: Init) -> Init:
        wrapper = checked_arguments(init)
        *own, _ = inspect.signature(init).parameters.values()
        shared = [each for name, each in inspect.signature(base).parameters.items() if name in options.__annotations__]
        types = get_type_hints(vars(base)["__init__"])
        vars(wrapper)["__signature__"] = inspect.Signature([*own, *shared])
        wrapper.__annotations__ = {
            **{each.name: each.annotation for each in own[1:]},
            **{each.name: types[each.name] for each in shared},
            "return": None,
        }
        return wrapper

    return decorate


def described_like(other: type) -> Callable[[Kind], Kind]:
    """Decorate a class whose docstring omits the arguments that another class describes.

    The omitted descriptions are copied from the other class, in the order of the signature, so that ``help``, the
    command line and the reference show all arguments.
    """

    def decorate(kind: Kind) -> Kind:
        if kind.__doc__ and other.__doc__:  # python -OO removes docstrings
            docs = [inspect.cleandoc(each.__doc__ or "") for each in (other, kind)]
            entries = dict(re.findall(r"^    (\w+): (.*?\n)(?=\n|    \w)", "\n".join(docs), re.DOTALL | re.MULTILINE))
            found = "".join(f"    {name}: {entries[name]}" for name in inspect.signature(kind).parameters)
            kind.__doc__ = re.sub(r"(?<=^Args:\n).*?(?=^\n)", lambda _: found, docs[1], flags=re.DOTALL | re.MULTILINE)
        return kind

    return decorate


def check_names(kind: type, names: Iterable[str]) -> None:
    """Raise UnknownArgumentError if a name is not an argument of a class."""
    known = _known(kind)
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise UnknownArgumentError(_unknown(kind, unknown))


def with_replacements(replacements: Mapping[str, str]) -> Callable[[Function], Function]:
    """Decorate a function so that the error for an unknown argument has the code to write instead.

    Args:
        replacements: The code to write for arguments of other libraries. For any other unknown argument, the error
            suggests to pass the argument to the model, if the function takes ``input_kwargs``.

    Raises:
        UnknownArgumentError: When the function is called with an unknown argument.
    """

    def decorate(function: Function) -> Function:
        known = inspect.signature(function).parameters
        names = [name for name in known if name != "self"]
        title = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            unknown = next((name for name in kwargs if name not in known), None)
            if unknown is None:
                return function(*args, **kwargs)
            near = closest(unknown, names, similarity=0.75)
            head = f"{title} has no argument {unknown}: "
            of_model = f"write input_kwargs={{{unknown!r}: …}} for an argument of the model"
            if unknown in replacements:
                raise UnknownArgumentError(f"{head}write {replacements[unknown]}")
            if near:
                more = f" Or {of_model}" if "input_kwargs" in known else ""
                raise UnknownArgumentError(f"{head}did you mean {near}?{more}")
            if "input_kwargs" in known:
                raise UnknownArgumentError(f"{head}{of_model}")
            raise UnknownArgumentError(f"{head}its arguments are {', '.join(names)}")

        return cast("Function", wrapper)

    return decorate


def _groups(parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return the default values that are dataclass instances, by the name of the argument."""
    return {name: each.default for name, each in parameters.items() if is_dataclass(each.default)}


def _check_group(kind: type, name: str, default: Any, given: Any) -> None:
    """Raise if the value of a group of options has the wrong type, or sets a field that the class does not use."""
    group = type(default).__name__
    if not isinstance(given, type(default)):
        fix = ", ".join(f"{key}={value!r}" for key, value in given.items()) if isinstance(given, Mapping) else "…"
        raise ArgumentError(f"{name} takes {group}(…), got {given!r}: write {name}={group}({fix})")
    unused: Mapping[str, str] = getattr(kind, "_ignored", {})
    for field in fields(given):
        value = getattr(given, field.name)
        if field.name in unused and value != field.default:
            fix = unused[field.name]
            raise ArgumentError(
                f"{name} must not set {field.name}, which {kind.__name__} does not use, got {value!r}: "
                + (f"write {fix}" if fix else "leave it out")
            )


def _known(kind: type) -> dict[str, inspect.Parameter]:
    """Return the arguments that a class accepts, including those that it passes to its base classes."""
    known: dict[str, inspect.Parameter] = {}
    for each in kind.__mro__:
        # Skip ``object``, because reading the signature of a C function takes longer than all others.
        if "__init__" in vars(each) and each is not object:
            found = list(inspect.signature(vars(each)["__init__"]).parameters.values())[1:]
            variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            known |= {every.name: every for every in found if every.kind not in variable}
    return known


def _elsewhere(kind: type, known: Mapping[str, inspect.Parameter]) -> dict[str, str]:
    """Return names that are not arguments of a class but correspond to part of an argument, with the code to write."""
    found = {word: code for word, (argument, code) in _PARTS.items() if argument in known}
    for name, default in _groups(known).items():
        found |= {each.name: f"{name}={type(default).__name__}({each.name}=…)" for each in fields(default)}
    unused: Mapping[str, str] = getattr(kind, "_ignored", {})
    found = {name: unused.get(name, code) for name, code in found.items()}
    return {name: code for name, code in found.items() if code and name not in known}


def repr_of_changed(options: Any) -> str:
    """Return the code of a dataclass instance with only the fields that differ from their defaults."""
    changed = [each.name for each in fields(options) if getattr(options, each.name) != each.default]
    return f"{type(options).__name__}({', '.join(f'{name}={getattr(options, name)!r}' for name in changed)})"


def _unknown(kind: type, name: str) -> str:
    """Return the error message for an unknown argument."""
    known = _known(kind)
    elsewhere = _elsewhere(kind, known)
    head = f"{kind.__name__} has no argument {name}"
    if name in elsewhere:
        return f"{head}: write {elsewhere[name]}"
    words = [*known, *elsewhere]
    meant = {synonym: argument for argument, them in _SYNONYMS.items() if argument in words for synonym in them}
    found = closest(name, words, meant)
    if found:
        return f"{head}: did you mean {elsewhere.get(found, found)}?"
    return f"{head}; its arguments are {', '.join(known)}"


def _too_many(kind: type, positional: list[str], args: tuple[Any, ...]) -> str:
    """Return the error message for more positional arguments than a class takes."""
    if not positional:
        return f"{kind.__name__} takes no argument without a name, got {len(args)}: write them as name=value"
    hint = f"write {kind.__name__}({list(args)!r})" if all(isinstance(each, str) for each in args) else ""
    return f"{kind.__name__} takes one argument without a name, {positional[0]}, got {len(args)}: " + (
        hint or "write the others as name=value"
    )
