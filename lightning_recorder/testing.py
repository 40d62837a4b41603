"""Assertions for tests that compare a recorded run with a reference."""

from __future__ import annotations

import os
from collections.abc import Iterable

from lightning_recorder.recordings import Comparison, Recording, Run, Tolerance, compare, open_recording
from lightning_recorder.recordings.explanation import explain, place

__all__ = ["assert_same"]

_MOST_SITES = 5

_RunOrPath = Run | Recording | str | os.PathLike[str]


def assert_same(
    run: _RunOrPath,
    reference: _RunOrPath,
    *,
    rtol: float = 1e-3,
    atol: float = 1e-7,
    exact: bool = False,
    recorder: str | None = None,
    stage: str | None = None,
    names: Iterable[str] = (),
    noise: Iterable[_RunOrPath] = (),
) -> Comparison:
    """Assert that a run has the same statistics as a reference.

    Args:
        run: The ``log_dir`` of the run, or the result of :func:`~lightning_recorder.open_recording`.
        reference: The run to compare with.
        rtol: The relative tolerance; see :class:`~lightning_recorder.recordings.Tolerance`.
        atol: The absolute tolerance.
        exact: If True, all statistics and histograms must be bitwise equal.
        recorder: The label of the only recorder to compare.
        stage: The only stage to compare.
        names: Rules such as ``"model.layers.*=blocks.*"`` that map module names of the reference to names of the run.
        noise: Additional runs with the configuration of the reference. Differences within their spread are accepted.

    Returns:
        The comparison, whose first run is the reference.

    Raises:
        AssertionError: If the runs differ, or if there is nothing to compare. The message has the cause, if known, the
            first site that differs, and the sites that differ most.
        ArgumentError: If an argument is wrong.
        DumpError: If nothing was recorded, or if a file cannot be read.

    Example::

        def test_the_refactoring_changes_nothing(tmp_path):
            train(tmp_path / "version_0")
            assert_same(tmp_path / "version_0", "tests/references/version_0")
    """
    tolerance = Tolerance(rtol, atol, exact=exact)
    repeats = [_opened(each) for each in noise]
    found = compare(
        _opened(reference), _opened(run), tolerance, recorder=recorder, stage=stage, names=names, noise=repeats
    )
    if not found.same:
        raise AssertionError("\n".join(_message(found, exact=exact)))
    return found


def _opened(run: _RunOrPath) -> Run:
    if isinstance(run, Run):
        return run
    return (run if isinstance(run, Recording) else open_recording(run)).run


def _message(found: Comparison, *, exact: bool) -> list[str]:
    lines = [f"the run differs from the reference (A: reference, B: run): {explain(found, exact=exact)}"]
    if found.first is not None:
        lines.append(f"first difference: step {found.first.step}, {place(found.first)}")
    lines += [
        f"{each.kind} {each.what}: {each.one} in A, {each.other} in B" for each in found.differences[:_MOST_SITES]
    ]
    lines += [f"{_differ(each.steps)}: {place(each.furthest)}" for each in found.sites[:_MOST_SITES]]
    more = len(found.sites) - _MOST_SITES
    return [*lines, *([f"and {more} more sites"] if more > 0 else [])]


def _differ(steps: int) -> str:
    return "1 step differs" if steps == 1 else f"{steps} steps differ"
