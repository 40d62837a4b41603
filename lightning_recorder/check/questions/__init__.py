"""The questions of the check, each in its own file."""

from __future__ import annotations

from lightning_recorder.check.answer import Question
from lightning_recorder.check.questions import (
    cost,
    custom_gradients,
    deterministic,
    evaluation_mode,
    input_is_used,
    learning_rate,
    loss_at_start,
    numbers_large_enough,
    overfits_one_batch,
    parameters_learn,
    past_sees_future,
    ranks,
    same_data,
    sample_weights,
    samples_mix,
    target_is_used,
    workers,
)

__all__ = ["QUESTIONS"]

QUESTIONS: tuple[Question, ...] = tuple(
    each.QUESTION
    for each in (
        deterministic,
        samples_mix,
        past_sees_future,
        input_is_used,
        target_is_used,
        loss_at_start,
        overfits_one_batch,
        parameters_learn,
        learning_rate,
        evaluation_mode,
        same_data,
        sample_weights,
        numbers_large_enough,
        custom_gradients,
        workers,
        ranks,
        cost,
    )
)
"""All questions, in the order in which they are asked."""
