"""The callback ``Check``, the variable ``LIGHTNING_RECORDER=check`` and the command ``check``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_recorder import ArgumentError, Check
from lightning_recorder.check import QUESTIONS, Answer, Bench, Question, Result
from lightning_recorder.switch import CHECK_ONLY
from tests import forks
from tests.check.programs import COUNT, Function, Lit, Program, cnn, gan, integers, mlp, normal, regression
from tests.entry_points import ROOT, write_entry_points

pytestmark = pytest.mark.filterwarnings("ignore:.*(shuffle|workers|Using a target size)")


def fit(program: Program, check: Check, folder: Path, **options: Any) -> Trainer:
    """Train a program for one step."""
    defaults: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_steps": 1}
    defaults |= {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder}
    trainer = Trainer(callbacks=[check], **{**defaults, **program.options, **options})
    trainer.fit(program.model, program.loader, program.validation)
    return trainer


def answers(program: Program, folder: Path, *questions: str | Question, **options: Any) -> dict[str, Answer]:
    check = Check(questions or None, strict=True)
    fit(program, check, folder, **options)
    assert check.result is not None
    return {each.question: each for each in check.result.answers}


def test_every_question_is_described() -> None:
    """Each question has its own name, a question, an expectation and a file with a docstring, and all fit the limit."""
    assert len({each.name for each in QUESTIONS}) == len(QUESTIONS)
    assert all(each.asks.endswith("?") and each.expects for each in QUESTIONS)
    assert all(sys.modules[each.answer.__module__].__doc__ for each in QUESTIONS)
    assert sum(each.steps for each in QUESTIONS) <= 30


def test_every_question_is_in_the_documentation() -> None:
    """The page about checks has a row for each question, in the order in which they are asked."""
    page = (ROOT / "docs" / "how-to" / "check.md").read_text()
    assert re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE) == [each.name for each in QUESTIONS]


def test_questions_can_be_chosen_and_added(tmp_path: Path) -> None:
    """Only the named questions are asked, and a question of the user is asked like the others."""

    def answer(bench: Bench) -> Answer:
        return Answer("look", f"the batch has {bench.rows} samples", {"samples": bench.rows})

    own = Question("many-samples", "Are there many samples?", "at least 100", answer)
    found = answers(mlp(), tmp_path, "samples-mix", own)
    assert list(found) == ["samples-mix", "many-samples"]
    assert found["many-samples"].text == "the batch has 12 samples"
    assert found["many-samples"].expected == "at least 100"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"questions": ["sample-mix"]}, "there is no 'sample-mix': did you mean 'samples-mix'?"),
        ({"questions": ["cost", "cost"]}, "questions must have different names"),
        ({"questions": [3]}, "questions must be names or Question objects"),
        ({"seconds": -1}, "seconds must be a number of at least 0"),
        ({"onyl": True}, "only"),
    ],
)
def test_wrong_arguments_raise(arguments: Any, message: str) -> None:
    """A wrong argument raises at construction, and names the closest one."""
    with pytest.raises(ArgumentError, match="^(?s:.*)" + message.replace("?", r"\?")):
        Check(**arguments)


def test_the_result_is_written(tmp_path: Path) -> None:
    """``check.json`` has each answer with question, verdict, expectation, numbers and line of code."""
    fit(regression(lambda net, batch: F.mse_loss(net(batch[0]), batch[1])), Check(), tmp_path)
    written = json.loads((tmp_path / "recorder" / "check.json").read_text())
    found = {each["question"]: each for each in written["answers"]}
    bad = found["target-is-used"]
    assert (bad["asks"], bad["verdict"], bad["text"]) == (
        "Does the loss use its target?",
        "wrong",
        "mse_loss compares every prediction with every target: [12, 1] and [12] broadcast",
    )
    assert bad["line"].rpartition(":")[0] == __file__
    assert found["loss-at-start"]["verdict"] == "no answer"
    assert 0 < written["steps"] <= 30


def test_a_question_beyond_the_limit_is_left_out(tmp_path: Path) -> None:
    """A question that would exceed 30 steps is left out and says so, and the later ones are asked."""
    long = Question("long", "Is it long?", "no", lambda bench: Answer("wrong", "yes"), steps=29.0)
    found = answers(mlp(), tmp_path, "deterministic", long, "cost")
    assert found["long"].text == "left out, since a check does at most 30 steps of work"
    assert found["cost"].verdict == "ok"


def test_no_time_is_a_reason(tmp_path: Path) -> None:
    """Without time, every question says so, and the training goes on."""
    check = Check(seconds=0.0)
    trainer = fit(mlp(), check, tmp_path)
    assert check.result is not None
    assert {each.text for each in check.result.answers} == {"left out, since the time is up"}
    assert trainer.global_step == 1


def test_an_error_in_a_question_is_a_reason(tmp_path: Path) -> None:
    """A question that raises has no answer, and the training goes on."""

    def fail(bench: Bench) -> Answer:
        raise KeyError("nothing")

    found = answers(mlp(), tmp_path, Question("bad", "Is it bad?", "no", fail))
    assert (found["bad"].verdict, found["bad"].text) == ("no answer", "the repeated step failed: KeyError: 'nothing'")


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_without_a_loss_has_reasons(tmp_path: Path) -> None:
    """A model whose step returns no loss is trained as without the check."""

    class Silent(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    program = mlp()
    program.model = Silent(nn.Linear(8, 4), lambda net, batch: net(batch[0]))
    found = answers(program, tmp_path, max_epochs=1, max_steps=-1)
    assert {each.verdict for each in found.values()} <= {"ok", "no answer"}
    assert found["overfits-one-batch"].text == "the training step returns no loss"


def test_a_step_that_differs_has_no_other_answers(tmp_path: Path) -> None:
    """If a repeated step has another loss, questions that compare steps have no answer instead of a wrong one."""
    numbers = iter(range(100))
    found = answers(mlp(lambda net, batch: net(batch[0]).mean() + next(numbers)), tmp_path)
    assert found["deterministic"].verdict == "look"
    assert found["samples-mix"].text == "a repeated step has another loss, so its changes have no meaning"


def test_manual_optimization_is_not_stepped(tmp_path: Path) -> None:
    """With manual optimization, the optimizers do not step in a check, and questions about them say why."""
    found = answers(gan(), tmp_path)
    assert found["overfits-one-batch"].text.startswith("manual optimization")
    assert found["parameters-learn"].verdict == "ok"


def test_a_resumed_run_is_not_checked(tmp_path: Path) -> None:
    """A run that resumes has no first step, which is said."""
    trainer = fit(mlp(), Check(), tmp_path, max_steps=2)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    check = Check()
    options: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    again = Trainer(max_steps=4, accelerator="cpu", callbacks=[check], enable_checkpointing=False, **options)
    again.fit(mlp().model, mlp().loader, ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert check.result is not None
    assert {each.text for each in check.result.answers} == {"the run is resumed at step 2"}


def test_iterable_data_are_not_read_ahead(tmp_path: Path) -> None:
    """The check uses the batch that Lightning has loaded, so an iterable data set is read once."""
    read: list[int] = []

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            for index in range(COUNT):
                read.append(index)
                yield normal(8, seed=index), integers(4, 1, seed=index)[0]

    program = mlp()
    program.loader = DataLoader(Stream(), batch_size=6)
    found = answers(program, tmp_path, max_epochs=1, max_steps=-1)
    assert read == list(range(COUNT))
    assert found["samples-mix"].verdict == "ok"


def test_iterable_data_in_several_workers_are_asked_about(tmp_path: Path) -> None:
    """An iterable data set that does not ask which worker it is in is named."""

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from ((normal(8, seed=index), integers(4, 1, seed=index)[0]) for index in range(COUNT))

    program = mlp()
    program.loader = DataLoader(Stream(), batch_size=6, num_workers=2)
    found = answers(program, tmp_path, "workers")
    assert found["workers"].verdict == "look"
    assert found["workers"].text.startswith("Stream does not ask which worker it is in")


class HalfSum(torch.autograd.Function):
    """Returns its input, with the gradient of another function on purpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Rounded(torch.autograd.Function):
    """Rounds, with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize("function", [HalfSum, Rounded])
def test_intended_gradients_are_no_mistake(function: Any, tmp_path: Path) -> None:
    """A gradient reversal and a straight-through estimator are recognized, and their ``apply`` is left as it was."""
    before = dict(vars(function))
    net = Function(lambda self, x: self.two(function.apply(self.one(x))), one=nn.Linear(8, 16), two=nn.Linear(16, 4))
    found = answers(mlp(net=net), tmp_path, "custom-gradients")
    assert found["custom-gradients"].verdict == "ok"
    assert dict(vars(function)) == before


def test_batch_norm_is_named_as_the_cause_in_training(tmp_path: Path) -> None:
    """Samples that mix in a BatchNorm during training only are as intended, and the module is named."""
    found = answers(cnn(), tmp_path, "samples-mix")["samples-mix"]
    assert (found.verdict, found.module) == ("ok", "net.1")
    assert found.text == "samples mix in training only, in BatchNorm2d, as intended"


def test_statistics_that_have_seen_no_batch_may_hide_the_input(tmp_path: Path) -> None:
    """A prediction that depends on the batch in training mode alone is unusual; one that never does is wrong."""
    layers = [module for _ in range(4) for module in (nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))]
    for layer in layers[::2]:
        nn.init.normal_(layer.weight, std=1e-3)
    last = nn.Linear(8, 4)
    found = answers(mlp(net=nn.Sequential(*layers, last)), tmp_path, "input-is-used")["input-is-used"]
    assert found.verdict == "look"
    assert found.text.endswith("whatever the batch contains; in training mode it depends on the batch")
    ignoring = Function(lambda self, x: self.last(x * 0), last=last)
    assert answers(mlp(net=ignoring), tmp_path, "input-is-used")["input-is-used"].verdict == "wrong"


def test_the_text_has_the_answers_and_the_reasons() -> None:
    """The text of a result has a line per answer, and one line for all questions without an answer for one reason."""
    result = Result(
        (
            Answer("ok", "fine", question="cost", asks="What will it cost?"),
            Answer("wrong", "they mix", line="train.py:3", asks="Do samples mix?", expected="they do not"),
            Answer("no answer", "no loss", question="a"),
            Answer("no answer", "no loss", question="b"),
        ),
        12.0,
        0.5,
    )
    assert result.text().splitlines() == [
        "  no answer  a, b: no loss",
        "  ok         What will it cost? Fine.",
        "  WRONG      Do samples mix? They mix at train.py:3.",
        "             Expected: they do not.",
        "checked before the training: 1 ok, 1 wrong, 2 no answer (12 steps of work, 0.5 s)",
    ]


PROGRAM = """
import torch
from lightning.pytorch import Trainer
from torch import nn
from tests.check.programs import mlp
program = mlp({arguments})
Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False).fit(
    program.model, program.loader
)
print("trained")
"""
MIXING = "lambda net, b: (net(b[0])[:, 0] - b[1]).square().mean(), net=nn.Sequential(nn.Linear(8, 4), nn.Softmax(0))"


def train(folder: Path, value: str, arguments: str = "") -> tuple[int, str]:
    """Run a program with a value of the variable, beside the entry points; return the status and the output."""
    write_entry_points(folder)
    (folder / "train.py").write_text(PROGRAM.format(arguments=arguments))
    (code,), log = forks.run(folder / "train.py", folder=folder, variables={"LIGHTNING_RECORDER": value})
    return code, log


@pytest.mark.slow
def test_the_command_ends_the_program(tmp_path: Path) -> None:
    """The command prints the answers, and ends the program before it trains, with status 0 if nothing is wrong."""
    write_entry_points(tmp_path / "site")
    (tmp_path / "train.py").write_text(PROGRAM.format(arguments=""))
    variables = {name: value for name, value in os.environ.items() if name != "LIGHTNING_RECORDER"}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_recorder", "check", "train.py"],
        cwd=tmp_path,
        env={**variables, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Do samples mix?" in done.stdout
    assert "checked before the training" in done.stdout
    assert "trained" not in done.stdout.splitlines()
    assert (tmp_path / "recorder" / "check.json").exists()


@pytest.mark.slow
def test_the_program_of_the_command_fails_if_something_is_wrong(tmp_path: Path) -> None:
    """With the value that the command sets, the program ends before it trains, with status 1 if an answer is wrong."""
    code, log = train(tmp_path, CHECK_ONLY, MIXING)
    assert code == 1, log
    assert "WRONG" in log
    assert "trained" not in log.splitlines()


@pytest.mark.slow
def test_the_variable_checks_and_trains(tmp_path: Path) -> None:
    """With ``LIGHTNING_RECORDER=check``, the program is checked and then trains, even if something is wrong."""
    code, log = train(tmp_path, "check", MIXING)
    assert code == 0, log
    assert "WRONG" in log
    assert "trained" in log.splitlines()


def test_only_ends_the_program(tmp_path: Path) -> None:
    """``Check(only=True)`` ends the program before the first step, with the status of the answers."""
    check, program = Check(only=True), mlp()
    before = {name: each.clone() for name, each in program.model.state_dict().items()}
    with pytest.raises(SystemExit) as ended:
        fit(program, check, tmp_path)
    assert ended.value.code == 0
    torch.testing.assert_close(program.model.state_dict(), before, rtol=0, atol=0)


RANKS = """
import json
import sys
from pathlib import Path

import torch

from lightning_recorder import Check
from tests.check.programs import regression
from tests.check.test_check import fit

folder = Path(sys.argv[1])
for name in ("divided", "same", "other"):
    program, check = regression(), Check(strict=True)
    if name == "other":
        weight = program.model.net[2].weight
        program.model.on_train_start = lambda: weight.data.add_(torch.distributed.get_rank())
    options = {"use_distributed_sampler": False} if name == "same" else {}
    trainer = fit(program, check, folder / name, strategy="ddp", devices=2, **options)
    found = {each.question: (each.verdict, each.text) for each in check.result.answers}
    (folder / f"{name}-{trainer.global_rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.slow
def test_ranks_are_compared_in_two_processes(tmp_path: Path) -> None:
    """Ranks with a part of the data each are fine; the same samples, and other parameters, are wrong on all ranks."""
    (tmp_path / "train.py").write_text(RANKS)
    codes, log = forks.run(tmp_path / "train.py", tmp_path, folder=tmp_path, ranks=2, timeout_s=120)
    assert codes == [0, 0], log[-3000:]
    wanted = {
        "divided": ["ok", "the first batches of 2 ranks have other samples"],
        "same": ["wrong", "100% of the samples in the first batch of a rank are also in that of another one"],
        "other": ["wrong", "the 2 ranks start with other values of net.2.weight"],
    }
    for name, found in wanted.items():
        for rank in range(2):
            answers = json.loads((tmp_path / f"{name}-{rank}.json").read_text())
            assert answers.pop("ranks") == found
            assert {verdict for verdict, _ in answers.values()} == {"no answer"}
