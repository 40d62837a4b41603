"""Tests of the base class of all sinks; ``test_contract.py`` tests each of them."""

import pytest

from lightning_recorder import Sink


def test_leaving_the_context_closes() -> None:
    """Leaving the context of a sink closes it, even after an error."""

    class Counting(Sink):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    with Counting() as sink:
        assert sink.closed == 0
    assert sink.closed == 1
    with pytest.raises(ArithmeticError), sink:
        raise ArithmeticError
    assert sink.closed == 2


def test_closing_flushes() -> None:
    """A sink that only overrides flush is flushed when it is closed."""

    class Flushing(Sink):
        flushed = 0

        def flush(self) -> None:
            self.flushed += 1

    sink = Flushing()
    sink.close()
    assert sink.flushed == 1
