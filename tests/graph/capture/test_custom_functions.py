"""The recorded outputs of an ``autograd.Function``: one tensor for each of its results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_recorder.graph import TensorMeta, capture_graph
from tests.graph.constructs.custom import Foreign, Inner, Mixed, Two, Written
from tests.graph.nets import X, scaled
from tests.graph.queries import only

ROWS, SUM, COLUMNS = (TensorMeta(shape, "float32") for shape in ((2, 4), (), (4,)))


@pytest.mark.parametrize(
    ("function", "use", "expected"),
    [
        (Inner, torch.cos, (ROWS,)),
        (Two, sum, (ROWS, SUM)),
        (Foreign, torch.cos, (ROWS,)),
        (Mixed, lambda results: torch.add(*results), (ROWS, COLUMNS)),
        (Written, torch.cos, (ROWS,)),
    ],
)
@pytest.mark.parametrize("given_back", [False, True], ids=["used", "given back"])
def test_results(function: Any, use: Any, expected: tuple[TensorMeta, ...], given_back: bool) -> None:
    """Each result is listed once, whether it is used or returned by the model, and wherever it was computed."""

    def forward(net: Any, x: Tensor) -> Any:
        results = function.apply(x * net.scale)
        return results if given_back else use(results)

    assert only(capture_graph(scaled(forward), X), function.__name__).outputs == expected


def test_results_without_gradients() -> None:
    """Without gradients the listed results are those that were computed in torch and are still alive."""
    with torch.no_grad():
        graph = capture_graph(scaled(lambda net, x: Two.apply(x)[0].cos()), X)
    assert only(graph, "Two").outputs == (ROWS,)


def test_assignment() -> None:
    """The output of an assignment is the tensor that it wrote into."""

    def forward(_: Any, x: Tensor) -> None:
        x = x.exp()
        x[0] = 1

    assert only(capture_graph(scaled(forward), X), "setitem").outputs == (ROWS,)
