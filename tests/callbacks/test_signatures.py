"""The signatures of the callbacks show every argument."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any, get_type_hints

import pytest
from lightning.pytorch import Callback

from lightning_recorder import (
    ActivationRecorder,
    ArgumentError,
    CostRecorder,
    GradientRecorder,
    GraphRecorder,
    Outputs,
    ParameterRecorder,
    Schedule,
    StepWatch,
    TensorDumper,
)

CALLBACKS: list[type[Any]] = [
    ActivationRecorder,
    CostRecorder,
    GradientRecorder,
    GraphRecorder,
    ParameterRecorder,
    TensorDumper,
]
GROUPS: list[type[Any]] = [Outputs, Schedule]


def documented(kind: type[Any]) -> list[str]:
    """Return the arguments that the docstring of a class describes, in order."""
    section = re.search(r"^Args:\n(.*?)^\S", inspect.cleandoc(kind.__doc__ or ""), re.DOTALL | re.MULTILINE)
    return re.findall(r"^    (\w+): \S", section[1], re.MULTILINE) if section else []


@pytest.mark.parametrize("kind", [*CALLBACKS, StepWatch])
def test_a_hook_does_not_show_the_docstring_of_lightning(kind: type[Any]) -> None:
    """``help`` and the reference show our description of a hook, or none."""
    hooks = [name for name, hook in vars(Callback).items() if inspect.isfunction(hook) and hook.__doc__]
    ours = [name for name in hooks if getattr(kind, name) is not getattr(Callback, name)]
    assert "on_train_epoch_end" in ours
    for name in ours:
        assert inspect.getdoc(getattr(kind, name)) != inspect.getdoc(getattr(Callback, name)), name


@pytest.mark.parametrize("kind", CALLBACKS)
def test_a_callback_has_few_explicit_arguments(kind: type[Any]) -> None:
    """A callback has at most 16 arguments, none variadic, and all but the first are keyword-only."""
    first, *others = inspect.signature(kind).parameters.values()
    assert len(others) < 16
    assert first.kind is first.POSITIONAL_OR_KEYWORD
    assert {each.kind for each in others} == {inspect.Parameter.KEYWORD_ONLY}
    assert all(each.default is not each.empty for each in (first, *others))


@pytest.mark.parametrize("kind", [*CALLBACKS, *GROUPS])
def test_each_argument_is_typed_and_documented(kind: type[Any]) -> None:
    """The class's own docstring describes each argument, in the order of the signature, and each has a type."""
    names = list(inspect.signature(kind).parameters)
    assert documented(kind) == names
    hints = get_type_hints(kind.__init__)
    assert hints.keys() == {*names, "return"}
    assert Any not in hints.values()


@pytest.mark.parametrize("kind", GROUPS)
def test_options_are_keyword_only(kind: type[Any]) -> None:
    """A group of options has defaults only and takes no positional arguments."""
    assert kind() == kind(**{field.name: field.default for field in fields(kind)})
    assert all(field.kw_only for field in fields(kind))


@pytest.mark.parametrize("kind", [GradientRecorder, ParameterRecorder])
def test_shared_arguments_are_described_alike(kind: type[Any]) -> None:
    """The recorders of statistics have the same types and defaults for the arguments that they share."""
    own = dict(inspect.signature(kind).parameters)
    others = dict(inspect.signature(ActivationRecorder).parameters)
    shared = own.keys() & others.keys()
    assert len(shared) == (16 if kind is GradientRecorder else 13)
    assert {name: own[name] for name in shared} == {name: others[name] for name in shared}
    assert set(own) ^ set(others) <= {"tensors", "per_call", "functions", "parts"}


def test_type_checkers_refuse_a_mistyped_argument() -> None:
    """A wrong name is an error of mypy: its check of unused ignores fails if one of these lines has none."""
    with pytest.raises(ArgumentError, match="every_n_train_steps"):
        ActivationRecorder(every_n_train_step=5)  # type: ignore[call-arg]  # the point of the test
    with pytest.raises(ArgumentError, match="types"):
        GradientRecorder(type="Linear")  # type: ignore[call-arg]  # the point of the test
    with pytest.raises(ArgumentError, match="parts"):
        ParameterRecorder(part="values")  # type: ignore[call-arg]  # the point of the test
    with pytest.raises(ArgumentError, match="dtype"):
        TensorDumper(dtypes="bfloat16")  # type: ignore[call-arg]  # the point of the test
    with pytest.raises(ArgumentError, match="depth"):
        GraphRecorder(max_depth=3)  # type: ignore[call-arg]  # the point of the test
    with pytest.raises(ArgumentError, match="first_n_steps"):
        ActivationRecorder(schedule=Schedule(first_n_step=5))  # type: ignore[call-arg]  # the point of the test
    with pytest.raises(ArgumentError, match="every_n_train_steps must be an integer"):
        ActivationRecorder(every_n_train_steps="5")  # type: ignore[arg-type]  # the point of the test
