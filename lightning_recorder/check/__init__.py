"""The questions that an expert asks before a long training, answered by a few repeated steps on copies."""

from lightning_recorder.check.answer import Answer, NoAnswerError, Question, Verdict
from lightning_recorder.check.bench import Bench, StepFunctions, Training
from lightning_recorder.check.examination import Result, chosen_questions, examine
from lightning_recorder.check.questions import QUESTIONS

__all__ = [
    "QUESTIONS",
    "Answer",
    "Bench",
    "NoAnswerError",
    "Question",
    "Result",
    "StepFunctions",
    "Training",
    "Verdict",
    "chosen_questions",
    "examine",
]
