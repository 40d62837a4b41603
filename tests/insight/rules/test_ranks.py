"""Tests of the rule about ranks whose parameters drift apart."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.insight import Finding
from tests.insight.records import Examination, record

SITES = tuple(
    (name, f"weight{part}") for name in ("first", "norm", "head") for part in ("", ".grad", ".update", ".exp_avg")
)
BUFFERS = (("norm", "running_mean"), ("norm", "running_var"))


def findings(*diverged: Sequence[tuple[str, str]], graph: Graph | None = None) -> list[Finding]:
    """Return the findings of records in which these sites differ between two ranks."""
    examination = Examination(graph)
    for number, sites in enumerate(diverged):
        values = {site: {"rms": 1.0, "update_ratio": 1e-3} for site in (*SITES, *BUFFERS)}
        about = {"ranks": 2, "diverged": sites}
        examination.add(record("parameters", 10 * number, values, about=about))
    return [each for each in examination.findings() if each.rule == "ranks-differ"]


def test_parameters_that_differ_between_all_ranks() -> None:
    """If all gradients differ, they are not averaged; the finding has the steps between which it began."""
    (found,) = findings([], [], SITES, SITES)
    assert (found.severity, found.module, found.first_step, found.others) == ("critical", "first", 20, ("norm", "head"))
    assert found.verdict == (
        "all 3 trained parameters differ between the 2 ranks from step 20 on, and the gradients of 3 from step 20 on; "
        "all were equal at step 10"
    )
    assert "not averaged" in found.why


def test_gradients_that_ddp_does_not_see() -> None:
    """If the recorded step computes all gradients with torch.autograd.grad, that is the cause."""
    (found,) = findings(SITES, graph=Graph((Node(0, "module", "", None, 0), Node(1, "backward", "grad", 0, 1)), ()))
    assert "torch.autograd.grad" in found.why
    (found,) = findings(SITES, graph=Graph((Node(0, "module", "", None, 0), Node(1, "backward", "backward", 0, 1)), ()))
    assert "torch.autograd.grad" not in found.why


@pytest.mark.parametrize("parts", [("", ".update"), ("", ".grad", ".update")])
def test_one_parameter_that_differs(parts: Sequence[str]) -> None:
    """A change on one rank is named with its parameter, whether the gradient has it or the update alone."""
    (found,) = findings([], [("norm", f"weight{part}") for part in parts])
    assert (found.module, found.others, found.numbers["parameters"]) == ("norm", (), 1)
    assert found.verdict.startswith("norm.weight differs between the 2 ranks from step 10 on")
    assert found.verdict.endswith("; all were equal at step 0")
    assert "clipping" in found.why


def test_running_statistics_alone_are_a_note() -> None:
    """Each rank has its own running statistics without SyncBatchNorm."""
    (found,) = findings([], BUFFERS)
    assert (found.severity, found.module) == ("note", "norm")
    assert findings([], []) == []
