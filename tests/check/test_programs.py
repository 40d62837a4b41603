"""A check finds planted mistakes, and calls nothing wrong in healthy programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_recorder import Check
from lightning_recorder.check import Result
from tests.check.healthy import HEALTHY
from tests.check.planted import PLANTED
from tests.check.programs import Program

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # other packages, small data sets, and shapes that broadcast
]


def check(program: Program) -> Result:
    """Check a program and train it for one step."""
    each = Check(strict=True)
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    options |= {"max_steps": 1, "enable_model_summary": False, **program.options}
    Trainer(callbacks=[each], **options).fit(program.model, program.loader, program.validation)
    assert each.result is not None
    return each.result


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_program_has_nothing_wrong(name: str) -> None:
    """No answer is *wrong*, no repeated step fails, and the work is at most that of 30 steps."""
    torch.manual_seed(0)
    try:
        program = HEALTHY[name]()
    except ModuleNotFoundError as error:  # packages that the tests do not install, such as timm and diffusers
        pytest.skip(f"{error.name} is not installed")
    result = check(program)
    assert [(each.question, each.text) for each in result.wrong] == []
    assert [each for each in result.answers if "failed" in each.text] == []
    assert result.steps <= 30


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found(name: str) -> None:
    """The right question has the answer *look* or *wrong*."""
    torch.manual_seed(0)
    make, question = PLANTED[name]
    answers = {each.question: each for each in check(make()).answers}
    assert answers[question].verdict in ("look", "wrong"), answers[question]
    assert answers[question].expected
