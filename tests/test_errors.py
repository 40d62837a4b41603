"""Exceptions, warnings and their messages."""

from __future__ import annotations

import warnings

import pytest

from lightning_recorder.errors import (
    ArgumentError,
    DumpError,
    RecorderError,
    RecorderWarning,
    RecordingError,
    RenderError,
    SelectionError,
    check_integer,
    describe_error,
    warn,
)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (ArgumentError, ValueError),
        (SelectionError, ValueError),
        (RecordingError, RuntimeError),
        (RenderError, RuntimeError),
        (DumpError, ValueError),
    ],
)
def test_an_error_is_also_the_builtin_of_its_kind(error: type[Exception], builtin: type[Exception]) -> None:
    """Each error can be caught as the package's base class and as the matching built-in class."""
    assert error.__bases__ == (RecorderError, builtin)


def test_a_warning_points_to_the_caller() -> None:
    """A fault that costs a record becomes a RecorderWarning that points at the line of the caller."""
    with pytest.warns(RecorderWarning, match=r"^the disk is full$") as warned:
        warn("the disk is full")
    assert [warning.filename for warning in warned] == [__file__]


def test_a_fault_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    """If warnings are errors, a fault is logged as an error of the package's logger and nothing is raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn("the disk is full")
    assert caplog.record_tuples == [("lightning_recorder", 40, "the disk is full")]


def test_a_fault_can_be_silenced(caplog: pytest.LogCaptureFixture) -> None:
    """A filter that ignores RecorderWarning silences all faults."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("ignore", RecorderWarning)
        warn("the disk is full")
    assert (warned, caplog.record_tuples) == ([], [])


@pytest.mark.parametrize("value", [2, 3, 10**30])
def test_an_integer_from_the_bound_on_passes(value: int) -> None:
    """An integer that equals or exceeds the minimum is accepted."""
    check_integer("depth", value, 2)


@pytest.mark.parametrize("value", [0, -5, 2.0, "2", None, True, float("nan")])
def test_anything_else_is_refused_by_name(value: object) -> None:
    """A smaller number, a boolean or another type is rejected with the argument's name, the bound and the value."""
    with pytest.raises(ArgumentError) as raised:
        check_integer("depth", value, 1)
    hint = ": write 2" if isinstance(value, float) and value == 2 else ""
    assert str(raised.value) == f"depth must be an integer of at least 1, got {value!r}{hint}"


def test_an_error_without_a_text_is_described() -> None:
    """An error whose text cannot be obtained is described by its class."""

    class SilentError(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert describe_error(SilentError()) == "SilentError"
    assert describe_error(KeyError("x")) == "KeyError: 'x'"


def test_warning_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """If an application's own way to show warnings raises, the message is logged."""

    def show(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        warn("a picture is lost")
    assert "a picture is lost" in caplog.text
