"""Ask all questions about a step, within the limits of work and time, and format the answers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from lightning_recorder.check.answer import Answer, NoAnswerError, Question
from lightning_recorder.check.bench import Bench
from lightning_recorder.check.questions import QUESTIONS
from lightning_recorder.errors import ArgumentError, RecorderError, describe_error, did_you_mean

__all__ = ["Result", "chosen_questions", "examine"]

_MOST_STEPS = 30.0
_WIDTH = 110  # the width of the text in characters
_SIGNS = {"ok": "ok", "look": "LOOK", "wrong": "WRONG", "no answer": "-"}


@dataclass(frozen=True)
class Result:
    """The answers of a check.

    Args:
        answers: The answers, in the order of the questions.
        steps: The cost of the check in training steps.
        seconds: The time of the check in seconds.
    """

    answers: tuple[Answer, ...]
    steps: float
    seconds: float

    @property
    def wrong(self) -> list[Answer]:
        """The answers that are *wrong*."""
        return [each for each in self.answers if each.verdict == "wrong"]

    @property
    def status(self) -> int:
        """The exit status of a program that ends after the check."""
        return 1 if self.wrong else 0 if any(each.verdict != "no answer" for each in self.answers) else 2

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "steps": round(self.steps, 2),
            "seconds": round(self.seconds, 3),
            "answers": [each.to_json() for each in self.answers],
        }

    def text(self) -> str:
        """Return the result as text. Questions without an answer come first, and *wrong* answers last."""
        lines: list[str] = []
        reasons: dict[str, list[str]] = {}
        for each in self.answers:
            if each.verdict == "no answer":
                reasons.setdefault(each.text, []).append(each.question)
        for reason, names in reasons.items():
            names = ["all questions"] if len(names) == len(self.answers) > 1 else names
            lines += _wrapped("  no answer  ", f"{', '.join(names)}: {reason}")
        for each in sorted(self.answers, key=lambda each: list(_SIGNS).index(each.verdict)):
            if each.verdict != "no answer":
                lines += _lines(each)
        return "\n".join([*lines, self.summary])

    @property
    def summary(self) -> str:
        """One line with the number of answers of each kind."""
        counts = {verdict: sum(each.verdict == verdict for each in self.answers) for verdict in _SIGNS}
        parts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        return f"checked before the training: {parts} ({self.steps:.0f} steps of work, {self.seconds:.1f} s)"


def _lines(answer: Answer) -> list[str]:
    sign = _SIGNS[answer.verdict]
    place = f" at {answer.line}" if answer.line and answer.verdict != "ok" else ""
    first, space, rest = answer.text.partition(" ")
    # The names of functions and modules are not capitalized.
    first = first if set(first) & set("_.") else f"{first[:1].upper()}{first[1:]}"
    lines = _wrapped(f"  {sign:<9}  ", f"{answer.asks or answer.question} {first}{space}{rest}{place}.")
    if answer.verdict in ("look", "wrong"):
        lines += _wrapped(" " * 13, f"Expected: {answer.expected}.")
    return lines


def _wrapped(prefix: str, text: str) -> list[str]:
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, _WIDTH, initial_indent=prefix, subsequent_indent=" " * len(prefix), **options)


def chosen_questions(questions: Iterable[str | Question] | None) -> tuple[Question, ...]:
    """Return the questions with these names, and the user's own questions unchanged. By default, return all questions.

    Raises:
        ArgumentError: If no question has a given name, or if two questions have the same name.
    """
    if questions is None:
        return QUESTIONS
    if isinstance(questions, (str, Question)):
        questions = [questions]
    known = {each.name: each for each in QUESTIONS}
    found: list[Question] = []
    for each in questions:
        if isinstance(each, str) and each not in known:
            raise ArgumentError(f"questions: there is no {each!r}{did_you_mean(each, known)}")
        if not isinstance(each, (str, Question)):
            raise ArgumentError(f"questions must be names or Question objects, got {each!r}")
        found.append(known[each] if isinstance(each, str) else each)
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        raise ArgumentError(f"questions must have different names, got {', '.join(names)}")
    return tuple(found)


def examine(bench: Bench, questions: Iterable[Question] = QUESTIONS) -> Result:
    """Ask the questions in turn. A question that would exceed the limit of cost or time gets no answer."""
    before = bench.seconds_left
    answers = []
    for each in questions:
        if bench.spent + each.steps > _MOST_STEPS:
            found = Answer("no answer", f"left out, since a check does at most {_MOST_STEPS:.0f} steps of work")
        elif bench.seconds_left < 0:
            found = Answer("no answer", "left out, since the time is up")
        else:
            found = _asked(bench, each)
        answers.append(replace(found, question=each.name, asks=each.asks, expected=each.expects))
    return Result(tuple(answers), bench.spent, before - bench.seconds_left)


def _asked(bench: Bench, question: Question) -> Answer:
    try:
        if question.needs_repetition and not bench.is_repeatable:
            raise NoAnswerError("a repeated step has another loss, so its changes have no meaning")
        return question.answer(bench)
    except RecorderError as error:
        return Answer("no answer", str(error))
    except Exception as error:  # noqa: BLE001 - the step of the user may raise anything when it is repeated
        return Answer("no answer", f"the repeated step failed: {describe_error(error)}")
