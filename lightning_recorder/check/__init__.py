"""Answer the questions that an expert asks before a long training, by repeating the first step a few times."""

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
