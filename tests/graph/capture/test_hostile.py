"""Models, inputs and errors that are designed to break a capture."""

from __future__ import annotations

import copy
from collections import Counter, UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_recorder import RecordingError
from lightning_recorder.graph import GraphCapture, capture_graph, record
from tests import forks
from tests.graph.nets import Net, X, linear
from tests.graph.outline import outline, text


def test_tensors_of_any_shape_among_the_attributes() -> None:
    """A tensor in a plain attribute, of any shape, is not treated as a list of modules."""
    net = nn.Sequential(linear())
    net.temperature, net.table = torch.tensor(1.0), torch.ones(3)
    assert outline(capture_graph(net, X)) == "input\n0: Linear\n  linear <- input"


def test_a_chain_that_is_longer_than_torch_can_free(tmp_path: Path) -> None:
    """After 60,000 functions in a step, the capture stops reading the backward graph and the process survives."""
    program = """
import torch
from lightning_recorder.graph import GraphCapture
net = torch.nn.Linear(1, 1)
with GraphCapture(net, torch.ones(1)) as recording:
    y = net(torch.ones(1))
    for _ in range(60_000):
        y = y + 1
    y.backward()
    del y
print(sum(node.kind == "op" for node in recording.graph().nodes))
"""
    assert forks.run("-c", program, folder=tmp_path) == ([0], "60002\n")  # with ones and linear


def test_views_that_are_written_to_keep_their_turn() -> None:
    """Reading a view outside of the gradient does not change any result."""

    def gradient(*, captured: bool) -> Tensor:
        torch.manual_seed(0)
        leaf = torch.randn(4096, requires_grad=True)
        with GraphCapture(nn.Identity(), leaf) if captured else torch.enable_grad():
            base = leaf * 1.1
            view = base[:]
            base.mul_(1.5)
            view.detach().mean()
            (base.sin() + base.cos() + view.tanh()).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    assert torch.equal(gradient(captured=True), gradient(captured=False))


# torch warns about the nested tensors inside its fast path.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_two_captures_of_a_fused_layer() -> None:
    """Nested captures leave a frozen layer on its fast path, including padded rows."""
    layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    x, mask = torch.randn(3, 5, 16), torch.arange(5) >= torch.tensor([[3], [5], [5]])
    with torch.no_grad():
        expected = layer(x, src_key_padding_mask=mask)
        with GraphCapture(layer, x) as outer, GraphCapture(layer, x) as inner:
            seen = layer(x, src_key_padding_mask=mask)
    assert torch.equal(seen, expected)
    assert [outline(each.graph()).splitlines()[-1] for each in (outer, inner)] == ["fused <- input, (tensor)"] * 2


class _Unreadable(UserDict[str, Tensor]):
    def items(self) -> Any:
        raise LookupError("it is closed")


class _SilentError(Exception):
    def __str__(self) -> str:
        raise ArithmeticError


class _Odd(UserDict[str, Tensor]):
    def items(self) -> Any:
        raise _SilentError


@pytest.mark.parametrize("batch", [_Unreadable(), _Odd()])
def test_inputs_that_cannot_be_read(batch: Any) -> None:
    """Inputs that raise when they are inspected have no nodes, whatever their error is; the graph is complete."""
    net = nn.Sequential(linear())
    recording = GraphCapture(net, batch)
    with recording:
        out = net(X)
    assert torch.equal(out, net(X))
    kinds = [node.kind for node in recording.graph().nodes]
    assert ("input" in kinds, kinds.count("op")) == (False, 1)


def test_a_capture_is_entered_once() -> None:
    """Entering a capture a second time raises, and leaving it removes everything."""
    net = nn.Sequential(linear())
    with GraphCapture(net, X) as recording, pytest.raises(RecordingError, match="already active: create one for each"):
        recording.__enter__()
    assert torch.overrides._get_current_function_mode_stack() == []


def test_modules_that_come_and_go() -> None:
    """A module that replaces another one, maybe at its address, has its own name; neither is kept alive."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for _round in range(20):
            x = nn.Tanh()(x)
        del net.old
        net.new = nn.ReLU()
        return torch.exp(net.new(x))

    net = Net(forward, old=nn.Sigmoid())
    names = [node.name for node in capture_graph(net, X).module_calls()]
    assert len(names) == 21
    assert "old" not in names
    assert names[-1] == "ReLU"


def test_parameters_that_are_gone() -> None:
    """A tensor that reuses the id of a parameter of a freed module is not a parameter."""
    array = np.ones((2, 4), dtype=np.float32)
    modules = [linear() for _ in range(50)]

    def forward(_: Net, x: Tensor) -> Tensor:
        while modules:
            x = modules.pop()(x).detach() + torch.from_numpy(array.copy())
        return x

    kinds = Counter(node.kind for node in capture_graph(Net(forward), X).nodes)
    assert (kinds["parameter"], kinds["tensor"]) == (100, 50)


class DataParallel(nn.Module):
    """A model with the name of a wrapper, and with methods of its own in place of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()

    def parameters(self) -> Any:  # type: ignore[override]  # deliberately incompatible
        raise LookupError

    def forward(self, x: Tensor) -> Tensor:
        given: Tensor = self.fc(x)
        return given


def test_a_model_with_methods_of_its_own() -> None:
    """The parameters of a model are counted even if its class overrides torch's methods."""
    graph = capture_graph(DataParallel(), X)
    assert (outline(graph), graph.parameters) == ("input\nfc: Linear\n  linear <- input", 20)


def test_symbolic_shapes_stay_symbols() -> None:
    """Inspecting a tensor with symbolic sizes does not specialize them."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment) as mode:
        dynamic: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
        x = mode.from_tensor(X, symbolic_context=dynamic)
        graph = capture_graph(Net(lambda _, x: x.exp()), x)
    size: Any = x.size(0)
    assert isinstance(size, torch.SymInt)
    assert environment.guards == []
    assert outline(graph) == "input\nexp <- input"


def test_a_compiled_model_is_recorded_eagerly() -> None:
    """A compiled model or submodule is recorded as the original code and stays compiled."""
    net = nn.Sequential(linear(), nn.ReLU())
    compiled: Any = torch.compile(net, backend="eager")
    expected = outline(capture_graph(net, X))
    assert outline(capture_graph(compiled, X)) == outline(record(compiled, input_data=X)) == expected
    part: Any = torch.compile(linear(), backend="eager")
    assert outline(capture_graph(nn.Sequential(part, nn.Tanh()), X)) == text(
        """
        input
        0: Linear
          linear <- input
        1: Tanh
          tanh <- linear
        """
    )


def test_a_table_that_nobody_can_write_to(tmp_path: Any) -> None:
    """A tensor over a read-only file is skipped when the state of the model is restored."""
    np.save(tmp_path / "table.npy", np.ones(4, dtype=np.float32))
    norm = nn.BatchNorm1d(4)
    net = Net(lambda net, x: net.norm(x + net.table), norm=norm)
    with pytest.warns(UserWarning, match="not writable"):
        net.table = torch.from_numpy(np.load(tmp_path / "table.npy", mmap_mode="r"))
    before = copy.deepcopy(norm.state_dict())
    record(net, input_data=X)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
