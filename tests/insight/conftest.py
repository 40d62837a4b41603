"""A law for all tests of rules."""

from __future__ import annotations

import pytest

from lightning_recorder.insight import Finding
from tests.insight.records import Examination


@pytest.fixture(autouse=True)
def _only_rules_that_can_run_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test if a rule finds something although it is listed among those that could not run."""
    findings = Examination.findings

    def checked(self: Examination) -> list[Finding]:
        found = findings(self)
        idle = {name for gap in self.gaps() for name in gap.rules}
        assert [each.rule for each in found if each.rule in idle] == []
        return found

    monkeypatch.setattr(Examination, "findings", checked)
