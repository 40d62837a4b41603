"""Tests of the rules about samples that also look at the recorded step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_recorder.graph import capture_graph
from lightning_recorder.insight.data_facts import DataFacts, EpochFacts, LoaderFacts
from tests.insight.records import Examination, record
from tests.insight.rules.test_operations import Function, Shaped, Step, mlp, rows, series


@pytest.mark.parametrize(
    ("read", "rules"),
    [
        (lambda x: x, ["target-in-inputs"]),
        (lambda x: x.float(), ["target-in-inputs"]),
        (lambda x: F.pad(x[:, :4], (0, 1)), []),
        (lambda x: x * torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]), []),
        (lambda x: torch.cat((*x.split([4, 1], 1)[:1], torch.zeros(8, 1)), 1), []),
    ],
)
def test_a_step_that_leaves_the_target_out(read: Function, rules: list[str]) -> None:
    """A target among the inputs is a finding unless the step selects from them, or masks them."""
    net = torch.nn.Sequential(Shaped(read), mlp(1))

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y.squeeze(-1), target)

    examination = Examination(capture_graph(Step(net, loss), rows, rows[:, 4]))
    examination.set_data(DataFacts(LoaderFacts(target_place=4, compared=64), (EpochFacts(0, 0, 9, 8, 64, 64.0, 8.0),)))
    assert [each.rule for each in examination.findings()] == rules


@pytest.mark.parametrize(
    ("place", "is_wrong"),
    [((5, 0), True), ((0, 0), False), ((2, 4), True)],
    ids=["the last step", "the first step", "the last of the second dimension"],
)
def test_a_step_of_a_sequence_that_is_the_target(place: tuple[int, int], is_wrong: bool) -> None:
    """A window that ends with its target is a finding; to remember an earlier step is a task."""
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(30, 1))
    step = Step(net, lambda y, target: F.mse_loss(y.squeeze(-1), target))
    examination = Examination(capture_graph(step, series, series[:, place[0], place[1]]))
    loader = LoaderFacts(target_place=place[0] * 5 + place[1], compared=64)
    examination.set_data(DataFacts(loader, (EpochFacts(0, 0, 9, 8, 64, 64.0, 8.0),)))
    assert [each.rule for each in examination.findings()] == ["target-in-inputs"] * is_wrong


@pytest.mark.parametrize(("batches", "is_wrong"), [(8, True), (7, False)])
def test_few_batches_may_be_equal_by_chance(batches: int, is_wrong: bool) -> None:
    """From eight batches on, an epoch in which all are equal is a loader that fills the same buffer."""
    examination = Examination()
    epoch = EpochFacts(0, 0, 9, batches, 64, 64.0, float(batches), equal=batches)
    examination.set_data(DataFacts(LoaderFacts(has_rows=True), (epoch,)))
    assert [each.rule for each in examination.findings()].count("reused-buffer") == is_wrong


class Recurrent(torch.nn.Module):
    """A recurrent layer that begins with a state."""

    def __init__(self, keeps: bool, state: Tensor | None) -> None:
        super().__init__()
        self.cell, self.keeps, self.state = torch.nn.GRUCell(5, 7), keeps, state

    def forward(self, x: Tensor) -> Tensor:
        state: Tensor = self.cell(x, self.state)
        if self.keeps:
            self.state = state.detach()
        return state[:, :1]


@pytest.mark.parametrize(
    ("keeps", "state", "sampler", "is_wrong"),
    [
        (True, torch.zeros(8, 7), "RandomSampler", True),
        (True, torch.zeros(8, 7), "SequentialSampler", False),
        (False, torch.zeros(8, 7), "RandomSampler", False),  # the same state in each step
        (True, None, "RandomSampler", False),  # kept, but not read
    ],
)
def test_a_state_that_goes_from_batch_to_batch(keeps: bool, state: Tensor | None, sampler: str, is_wrong: bool) -> None:
    """A state that a step reads and keeps belongs to other samples if the sampler shuffles."""
    examination = Examination(capture_graph(Step(Recurrent(keeps, state), F.mse_loss), rows, rows[:, :1]))
    examination.add(record("activations", 0, {("net", "out"): {}}))
    examination.set_data(DataFacts(LoaderFacts(sampler=sampler), (EpochFacts(0, 0, 9, 8, 64, 64.0, 8.0),)))
    assert [each.rule for each in examination.findings()].count("carried-state") == is_wrong
