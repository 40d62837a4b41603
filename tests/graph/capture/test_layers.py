"""The graphs of torch's layers and kinds of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_recorder.graph import TensorMeta, capture_graph
from tests.graph.nets import Net, X, linear
from tests.graph.outline import outline, text
from tests.graph.queries import joined, only, reaches


def test_lstm() -> None:
    """An LSTM is one function of its input, its weights and the initial states that it creates."""
    graph = capture_graph(Net(lambda net, x: net.lstm(x)[0].sum(), lstm=nn.LSTM(4, 3)), X[None])
    assert outline(graph) == text(
        """
        input
        lstm: LSTM
          zeros
          zeros#2
          lstm <- input, zeros, zeros#2
        sum <- lstm
        """
    )
    assert [str(meta) for meta in only(graph, "lstm.weight_ih_l0").outputs] == ["12×4"]


def test_packed_sequence() -> None:
    """The values of a packed sequence are tracked into and out of a recurrent layer."""

    def forward(net: Any, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x.exp(), torch.tensor([2, 1]), batch_first=True)
        return torch.cos(net.rnn(packed)[0].data)

    graph = capture_graph(Net(forward, rnn=nn.GRU(4, 3)), X[:, None].repeat(1, 2, 1))
    assert reaches(graph, "exp", "gru")
    assert ("gru", "cos") in joined(graph)


def test_multihead_attention() -> None:
    """In train mode an attention is one function of query, key, value and all of its weights."""
    net = Net(lambda net, q, k, v: net.attention(q, k, v)[0], attention=nn.MultiheadAttention(4, 2))
    graph = capture_graph(net, *X[None].repeat(3, 1, 1, 1))
    assert outline(graph) == text(
        """
        input[0]
        input[1]
        input[2]
        attention: MultiheadAttention
          multi_head_attention_forward <- input[0], input[1], input[2]
        """
    )
    assert [graph[edge.source].name for edge in graph.edges if graph[edge.source].kind == "parameter"] == [
        "attention.in_proj_weight",
        "attention.in_proj_bias",
        "attention.out_proj.weight",
        "attention.out_proj.bias",
    ]


def test_transformer_layer_in_train_mode() -> None:
    """An encoder layer has its two residual connections around its attention and its feed-forward part."""
    graph = capture_graph(nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8)), X[None])
    assert outline(graph) == text(
        """
        input
        0: TransformerEncoderLayer
          0.self_attn: MultiheadAttention
            multi_head_attention_forward <- input ×3
          0.dropout1: Dropout
            dropout <- multi_head_attention_forward
          add <- input, dropout
          0.norm1: LayerNorm
            layer_norm <- add
          0.linear1: Linear
            linear <- layer_norm
          relu <- linear
          0.dropout: Dropout
            dropout#2 <- relu
          0.linear2: Linear
            linear#2 <- dropout#2
          0.dropout2: Dropout
            dropout#3 <- linear#2
          add#2 <- layer_norm, dropout#3
          0.norm2: LayerNorm
            layer_norm#2 <- add#2
        """
    )


def test_fused_transformer_layer() -> None:
    """A frozen layer, which computes everything in one fused function, is one op."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    with torch.no_grad():
        graph = capture_graph(Net(lambda net, x: net.frozen(x.exp()).cos(), frozen=layer), X[None])
    assert outline(graph) == text(
        """
        input
        exp <- input
        frozen: TransformerEncoderLayer
          fused <- exp
        cos <- fused
        """
    )
    # Projections into and out of the attention, two linear layers and two norms, none of which has a call of its own.
    assert only(graph, "frozen").parameters == (12 * 4 + 12) + (4 * 4 + 4) + (8 * 4 + 8) + (4 * 8 + 4) + 2 * (4 + 4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad], ids=["no_grad", "enable_grad"])
def test_a_model_that_is_one_fused_layer(mode: Any) -> None:
    """A frozen layer that is the whole model connects its input to its output."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval().requires_grad_(False)
    with mode():
        graph = capture_graph(layer, X[None])
    assert outline(graph, outputs=True) == "input\nfused <- input\noutput <- fused"
    assert graph.root.parameters == graph.parameters


def test_parametrized_weight() -> None:
    """A parametrized weight is computed in a call of its own."""
    graph = capture_graph(nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3, bias=False))), X)
    assert outline(graph) == text(
        """
        input
        0: ParametrizedLinear
          0.parametrizations.weight: ParametrizationList
            0.parametrizations.weight.0: _WeightNorm
              weight_norm
          linear <- input, weight_norm
        """
    )


def test_functional_call() -> None:
    """A weight that replaces a parameter is tracked to its source."""
    net = Net(
        lambda net, x: torch.func.functional_call(net.fc, {"weight": torch.zeros(4, 4)}, (x,)), fc=nn.Linear(4, 4)
    )
    assert outline(capture_graph(net, X)) == text(
        """
        input
        zeros
        fc: Linear
          linear <- input, zeros
        """
    )


def test_lazy_modules() -> None:
    """A lazy module that is initialized during the capture is recorded as the class that it becomes."""
    graph = capture_graph(nn.Sequential(nn.LazyLinear(3), nn.ReLU()), X)
    shape = (TensorMeta((2, 3), "float32"),)
    assert [(node.name, node.type_name, node.parameters, node.outputs) for node in graph.module_calls()] == [
        ("0", "Linear", 15, shape),
        ("1", "ReLU", 0, shape),
    ]
    assert only(graph, "0.weight").outputs == (TensorMeta((3, 4), "float32"),)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # scripted models are still in use
def test_scripted_module() -> None:
    """A scripted submodule, which cannot be inspected, connects its inputs to its outputs."""
    net = Net(lambda net, x: net.part(x.exp()).cos(), part=torch.jit.script(nn.ReLU()))
    graph = capture_graph(net, X)
    assert reaches(graph, "exp", "cos")


def test_computation_outside_of_torch() -> None:
    """A module that computes outside of torch connects its inputs to its outputs."""

    class Foreign(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.from_numpy(x.detach().numpy() * 2)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    foreign: Any = Foreign
    net = Net(lambda net, x: net.part(x.exp()).cos(), part=Net(lambda _, x: foreign.apply(x)))
    assert reaches(capture_graph(net, X), "exp", "cos")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # raised for each of them
def test_nested_tensors() -> None:
    """A nested tensor, which has no regular shape, is tracked like others."""

    def forward(_: Net, x: Tensor) -> Tensor:
        return torch.nested.nested_tensor([x, x[:1]]).cos().relu()

    graph = capture_graph(Net(forward), X)
    assert ("cos", "relu") in joined(graph)


def test_the_ragged_size_of_a_nested_tensor() -> None:
    rows = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=torch.jagged)
    (meta,) = only(capture_graph(linear(4, 2), rows), "linear").outputs
    assert (meta.shape, str(meta), meta.nbytes) == ((2, -1, 2), "2×?×2", 0)


@pytest.mark.parametrize("convert", [Tensor.to_sparse, Tensor.to_mkldnn], ids=["sparse", "mkldnn"])
def test_tensors_without_a_storage(convert: Any) -> None:
    """A tensor without storage is tracked as an object."""
    assert outline(capture_graph(Net(lambda _, x: convert(x).to_dense().exp()), X)) == text(
        f"""
        input
        {convert.__name__} <- input
        to_dense <- {convert.__name__}
        exp <- to_dense
        """
    )


def test_meta_tensors() -> None:
    """A model on the meta device is recorded with the shapes of its outputs."""
    with torch.device("meta"):
        graph = capture_graph(nn.Sequential(nn.Linear(4, 3)), torch.empty(2, 4))
    assert outline(graph) == "input\n0: Linear\n  linear <- input"
    assert only(graph, "linear").outputs == (TensorMeta((2, 3), "float32", "meta"),)


def test_an_encoder_in_eval_mode_that_is_trained() -> None:
    """With gradients, torch fuses nothing, so the layers of an encoder in eval mode are recorded."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    net = nn.Sequential(linear(), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval())
    x = torch.ones(2, 3, 4)
    names = [node.name for node in capture_graph(net, x).module_calls()]
    assert {"1.layers.0.self_attn", "1.layers.1.norm2"} <= set(names)
    with torch.no_grad():
        assert [node.name for node in capture_graph(net, x).module_calls()] == ["0", "1"]
