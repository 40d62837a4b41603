"""Documents inside a notebook, and the code of its cells."""

from __future__ import annotations

from collections.abc import Iterator
from html import unescape

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import nn
from traitlets.config import Config

from lightning_recorder.graph import capture_graph
from lightning_recorder.notebook import cell_or_path, framed
from lightning_recorder.watch import OriginTrace

_CELL = """\
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        return x.log()

net = Net()
"""


@pytest.fixture
def net() -> Iterator[nn.Module]:
    """Return a model of a class that the second cell of a notebook defines."""
    settings = Config()
    settings.HistoryManager.enabled = False  # which would write to the home directory
    shell = InteractiveShell.instance(config=settings)
    for cell in ("1", _CELL):
        shell.run_cell(cell, store_history=True)  # type: ignore[no-untyped-call]  # IPython has no annotations there
    yield shell.user_ns["net"]
    InteractiveShell.clear_instance()


def test_the_line_of_a_cell(net: nn.Module) -> None:
    """Code in a cell is named as in IPython's errors; the file that IPython names does not exist."""
    graph = capture_graph(net, torch.ones(2))
    assert [node.source for node in graph.nodes if node.name == "log"] == ["Cell In[2]:5"]
    with OriginTrace({"net": net}, {}) as trace:
        loss = net(torch.zeros(2)).sum()
    origin = trace.origin(loss)
    assert origin is not None
    assert origin.line == "Cell In[2]:5"


def test_other_code() -> None:
    """Files have their path, with and without IPython."""
    assert cell_or_path(__file__) == __file__


def test_a_frame_that_is_removed() -> None:
    """A viewer that does not show frames shows what is in the frame."""
    frame = framed("<p>the page</p>", "<page>", height_px=100)
    document, shown = frame.partition('srcdoc="')[2].removesuffix("</iframe>").split('">')
    assert unescape(document) == "<p>the page</p>"
    assert unescape(shown) == "<page>: trust the notebook"
