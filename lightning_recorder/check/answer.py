"""Questions about a training step, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lightning_recorder.errors import RecorderError

if TYPE_CHECKING:
    from lightning_recorder.check.bench import Bench

__all__ = ["Answer", "NoAnswerError", "Question", "Verdict"]

Verdict = Literal["ok", "look", "wrong", "no answer"]
"""The verdict of an answer. The program may intend what ``"look"`` reports. ``"wrong"`` reports a mistake."""


class NoAnswerError(RecorderError, RuntimeError):
    """A question has no answer for this training step. The message is the reason."""


@dataclass(frozen=True)
class Answer:
    """The answer to a question.

    Args:
        verdict: ``"ok"``, ``"look"``, ``"wrong"`` or ``"no answer"``.
        text: The observation, or the reason why there is no answer.
        numbers: The measured values.
        line: The responsible line of code, as ``file:line``, if it is known.
        module: The name of the responsible module or parameter, if it is known.
        question: The name of the question. :class:`~lightning_recorder.Check` fills it in.
        asks: The question in words. :class:`~lightning_recorder.Check` fills it in.
        expected: The expectation of the question. :class:`~lightning_recorder.Check` fills it in.
    """

    verdict: Verdict
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    line: str = ""
    module: str = ""
    question: str = ""
    asks: str = ""
    expected: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON values."""
        return {
            "question": self.question,
            "asks": self.asks,
            "verdict": self.verdict,
            "text": self.text,
            "expected": self.expected,
            "numbers": {name: float(value) for name, value in self.numbers.items()},
            "module": self.module,
            "line": self.line,
        }


@dataclass(frozen=True)
class Question:
    """A question about a training step.

    Args:
        name: The name, such as ``"samples-mix"``.
        asks: The question in words.
        expects: The answer of a correct program.
        answer: A function from a :class:`~lightning_recorder.check.Bench` to an :class:`Answer`. It may raise
            :class:`NoAnswerError`.
        steps: The cost of the question in training steps. A forward pass is a third of a step.
        needs_repetition: True if the question can only be answered when a repeated step has the same loss.
    """

    name: str
    asks: str
    expects: str
    answer: Callable[[Bench], Answer]
    steps: float = 1.0
    needs_repetition: bool = True
