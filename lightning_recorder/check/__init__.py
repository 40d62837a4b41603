"""The questions that an expert asks before a long training, answered by a few repeated steps on copies."""

from lightning_recorder.check.answer import Answer, NoAnswerError, Question
from lightning_recorder.check.bench import Bench, Training
from lightning_recorder.check.examination import Result
from lightning_recorder.check.questions import QUESTIONS

__all__ = [
    "QUESTIONS",
    "Answer",
    "Bench",
    "NoAnswerError",
    "Question",
    "Result",
    "Training",
]
