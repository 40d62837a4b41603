"""Settings of the tests of checks."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainers without a logger write into a folder of the test."""
    monkeypatch.chdir(tmp_path)
