"""Escaping of text that any format shows."""

from __future__ import annotations

import pytest

from lightning_recorder.graph.renderers.escape import printable
from tests.graph.sketch import UNPRINTABLE


@pytest.mark.parametrize("text", UNPRINTABLE, ids=ascii)
def test_printable(text: str) -> None:
    """The result can be printed on one line and written as UTF-8; its length is the same."""
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) == len(text)
    assert shown.encode()
