"""A capture has no side effects on values, gradients, random numbers, hooks, modes and memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import warnings
import weakref
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_recorder import RecorderWarning
from lightning_recorder.graph import GraphCapture, capture_graph
from tests.graph.nets import Net
from tests.graph.outline import outline, text
from tests.graph.queries import only

X = torch.linspace(-1.0, 1.0, 48).reshape(3, 4, 4)


def _residual() -> nn.Module:
    return Net(lambda net, x: torch.relu_(x + net.fc(x)), fc=nn.Linear(4, 4))


def _checkpointed(reentrant: bool) -> nn.Module:
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.ReLU())
    return Net(
        lambda net, x: checkpoint(net.block, net.fc(x), use_reentrant=reentrant), fc=nn.Linear(4, 4), block=block
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "in-place ReLU": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)),
    "residual": _residual,
    "dropout": lambda: nn.Sequential(nn.Linear(4, 64), nn.Dropout(), nn.RReLU(inplace=True)),
    "batch norm": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Conv1d(4, 4, 2), nn.BatchNorm1d(4)),
    "LSTM": lambda: Net(lambda net, x: net.lstm(x)[0], lstm=nn.LSTM(4, 3, num_layers=2, dropout=0.5)),
    "attention": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2),
    "attention, batch first": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2),
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))),
    "checkpoint": lambda: _checkpointed(False),
    "checkpoint, reentrant": lambda: _checkpointed(True),
}


def _train(model: nn.Module, *, captured: bool) -> dict[str, Any]:
    """Return all results and state of two training steps."""
    torch.manual_seed(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = X.clone().requires_grad_()
    left: dict[str, Any] = {}
    for step in range(2):
        with GraphCapture(model, x) if captured else warnings.catch_warnings():
            optimizer.zero_grad()
            out = model(x)
            out.square().mean().backward()
            left[f"out {step}"] = out.detach()
            left.update(
                {f"{name}.grad {step}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            )
            optimizer.step()
    return {
        **left,
        "input.grad": x.grad,
        "random state": torch.get_rng_state(),
        "train flags": [module.training for module in model.modules()],
        **model.state_dict(),
    }


def _assert_bitwise_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        assert same, name


# The layers warn that this configuration has no nested-tensor fast path.
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_training_is_the_same_to_the_bit(make: Callable[[], nn.Module]) -> None:
    """Outputs, gradients, parameters, buffers, train flags and random state are bitwise equal without a capture."""
    torch.manual_seed(0)
    model = make()
    _assert_bitwise_equal(_train(copy.deepcopy(model), captured=True), _train(copy.deepcopy(model), captured=False))


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(
    "make",
    [
        lambda layer: nn.TransformerEncoder(layer, 2),
        lambda layer: layer,
        lambda layer: Net(
            lambda net, x, src_key_padding_mask: net.attention(x, x, x, key_padding_mask=src_key_padding_mask)[0],
            attention=layer.self_attn,
        ),
        lambda layer: Net(
            lambda net, *args, **kwargs: net.encoder(*args, **kwargs), encoder=nn.TransformerEncoder(layer, 2)
        ),
    ],
    ids=["encoder", "layer", "attention", "encoder inside"],
)
# torch warns about the nested tensors inside its fast path.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_fused_inference_is_the_same_to_the_bit(make: Callable[[nn.Module], nn.Module], padded: bool) -> None:
    """A frozen transformer in eval mode keeps torch's fused code path."""
    torch.manual_seed(0)
    model = make(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)).eval()
    x = torch.randn(3, 5, 16)
    mask = (torch.arange(5) >= torch.tensor([[3], [5], [5]])) if padded else None
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=mask)
        with GraphCapture(model, x):
            seen = model(x, src_key_padding_mask=mask)
    assert torch.equal(seen, expected)


def test_state_dict_keys_stay() -> None:
    """During a capture the model has the same submodules, parameters and buffers as before."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    expected = list(model.state_dict()), [name for name, _ in model.named_modules()]
    with GraphCapture(model):
        assert (list(model.state_dict()), [name for name, _ in model.named_modules()]) == expected


# Hooks and modes.


def _hooks(model: nn.Module) -> int:
    """Return the number of hooks on the modules of a model, and of global module hooks."""
    kinds = (
        "forward_hooks",
        "forward_pre_hooks",
        "backward_hooks",
        "backward_pre_hooks",
        "forward_hooks_always_called",
    )
    own = sum(len(getattr(module, f"_{kind}")) for module in model.modules() for kind in kinds)
    return own + sum(len(getattr(nn.modules.module, f"_global_{kind}")) for kind in kinds)


def _modes() -> list[TorchFunctionMode]:
    return list(torch.overrides._get_current_function_mode_stack())


def test_nothing_is_left_on_the_model() -> None:
    """After a capture no hook of it is on any module and no mode is on the thread; those of the user remain."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].register_forward_hook(lambda *_: None)
    before = _hooks(model)
    capture_graph(model, X)
    assert (_hooks(model), _modes()) == (before, [])


def test_nothing_is_recorded_afterwards() -> None:
    """The graph does not grow after its capture was left."""
    model = nn.Sequential(nn.Linear(4, 4))
    with GraphCapture(model, X) as recording:
        model(X)
    graph = recording.graph()
    model(X).sum().backward()
    assert recording.graph() == graph


def test_a_stopped_capture_sees_nothing() -> None:
    """After ``stop`` nothing is recorded, even inside the context."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with GraphCapture(model, X) as recording:
        hidden = model[0](X)
        recording.stop()
        model[1](hidden).exp()
    assert outline(recording.graph()) == "input\n0: Linear\n  linear <- input"


def test_a_model_that_raises() -> None:
    """The model's own error propagates, all hooks are removed, and the graph has the failed nodes marked."""

    def fail(_: Net, x: Tensor) -> Tensor:
        raise ArithmeticError(f"no {x.exp().shape}")

    model = nn.Sequential(nn.Linear(4, 4), Net(fail), nn.ReLU())
    with pytest.raises(ArithmeticError, match=r"^no torch.Size\(\[3, 4, 4\]\)$"), GraphCapture(model, X) as recording:
        model(X)
    assert outline(recording.graph()) == text(
        """
        input
        0: Linear
          linear <- input
        1!: Net
          exp <- linear
        """
    )
    assert (_hooks(model), _modes()) == (0, [])


def test_an_error_that_the_model_catches() -> None:
    """A call whose error is caught is closed: later nodes are not inside it."""

    def fail(_: Net, x: Tensor) -> Tensor:
        raise ArithmeticError(str(x.exp().shape))

    def forward(net: Any, x: Tensor) -> Tensor:
        try:
            x = net.risky(x)
        except ArithmeticError:
            x = x.cos()
        return torch.sum(net.safe(x))

    assert outline(capture_graph(Net(forward, risky=Net(fail), safe=nn.Tanh()), X)) == text(
        """
        input
        risky!: Net
          exp <- input
        cos <- input
        safe: Tanh
          tanh <- cos
        sum <- tanh
        """
    )


def test_an_error_in_a_hook_of_the_user() -> None:
    """A call whose hook raised is closed together with the call around it."""

    def refuse(*_: Any) -> None:
        raise ArithmeticError

    def forward(net: Any, x: Tensor) -> Tensor:
        with contextlib.suppress(ArithmeticError):
            net.block(x)
        return x.exp()

    block = nn.Sequential(nn.Linear(4, 4))
    block[0].register_forward_hook(refuse)
    graph = capture_graph(Net(forward, block=block), X)
    assert only(graph, "exp").depth == 1


def test_an_error_in_fused_code() -> None:
    """If fused code fails and the model continues without it, the recording continues as well."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with contextlib.suppress(AssertionError, RuntimeError):
            net.frozen(x[..., :3])
        return x.exp()

    frozen = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    model = Net(forward, frozen=frozen)
    with torch.no_grad():
        graph = capture_graph(model, X)
    assert only(graph, "exp").depth == 1
    assert (_hooks(model), _modes()) == (0, [])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # scripted models are still in use
def test_a_model_that_takes_no_hooks() -> None:
    """A scripted submodule, which takes no hooks, neither stops the capture nor leaves hooks behind."""
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.ReLU()), nn.Linear(4, 4))
    try:
        graph = capture_graph(model, X)
    finally:
        assert (_hooks(nn.Sequential(model[0], model[2])), _modes()) == (0, [])
    assert [node.name for node in graph.nodes if node.kind == "op"].count("linear") == 2


def test_a_copy_is_not_recorded() -> None:
    """A copy of the model made during a capture, such as for weight averaging, is not recorded."""
    model = nn.Sequential(nn.Linear(4, 4))
    with GraphCapture(model, X) as recording:
        twin = copy.deepcopy(model)
        twin(X)
        model(X)
    assert [node.name for node in recording.graph().module_calls()] == ["Sequential", "Sequential.0", "0"]


def test_a_copy_keeps_nothing_alive() -> None:
    """A copy made during a capture has no hooks of the capture and does not keep it alive."""
    model = nn.Sequential(nn.Linear(4, 4))
    with GraphCapture(model, X) as recording:
        twin = copy.deepcopy(model)
    held = weakref.ref(recording)
    del recording
    gc.collect()
    assert held() is None
    assert torch.equal(twin(X), model(X))


def test_a_model_can_be_pickled_during_a_capture() -> None:
    """A model that is pickled during a capture is loaded without any part of the capture."""
    model = nn.Sequential(nn.Linear(4, 4))
    file = io.BytesIO()
    with GraphCapture(model, X):
        torch.save(model, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert torch.equal(twin(X), model(X))


# Memory.


def test_no_tensor_is_kept() -> None:
    """Tensors of a step are freed as without the capture, during it and after it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    seen: list[weakref.ref[Any]] = []
    for module in model:
        module.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    x = X.clone()
    array = torch.randn(3, 4, 4).numpy()
    seen += [weakref.ref(array), weakref.ref(x)]
    with GraphCapture(model, x) as recording:
        loss = (model(x) + torch.from_numpy(array)).sum()
        loss.backward()
        seen.append(weakref.ref(loss))
        del loss, x, array
        gc.collect()
        assert [reference() for reference in seen] == [None] * 6
    assert len(recording.graph().nodes) == 16


def test_a_reused_id_is_another_tensor() -> None:
    """A tensor that reuses the id of a freed one is not mistaken for it."""
    array = torch.randn(3, 4, 4).numpy()

    def forward(net: Net, x: Tensor) -> Tensor:
        kept = []
        for _round in range(1000):
            dead = id(x.exp())
            kept.append(torch.from_numpy(array))  # not observed: it takes no tensor
            if id(kept[-1]) == dead:
                return kept[-1].cos()
        # There is nothing to test if ids are not reused, as in a Python with another allocator.
        pytest.skip("this Python gives every tensor an id of its own")

    graph = capture_graph(Net(forward), X)
    (edge,) = (edge for edge in graph.edges if graph[edge.target].name == "cos")
    assert graph[edge.source].kind == "tensor"


# Errors of the recorder.


class _Unreadable(UserDict[str, Tensor]):
    """A mapping whose items cannot be listed."""

    def items(self) -> Any:
        raise LookupError("it is closed")


def test_a_container_that_raises_costs_its_tensors_only() -> None:
    """The model continues, and the graph has all functions and no warning."""
    odd = Net(lambda _, x: _Unreadable(out=x.exp()))
    model = Net(lambda net, x: net.odd(net.odd(net.fc(x))["out"])["out"], fc=nn.Linear(4, 4), odd=odd)
    expected = model(X)
    with GraphCapture(model, X) as recording:
        out = model(X)
    assert torch.equal(out, expected)
    assert (_hooks(model), _modes()) == (0, [])
    assert [node.name for node in recording.graph().nodes if node.kind == "op"] == ["linear", "exp", "exp"]


class _WithoutVersion(Tensor):
    """A tensor whose number of writes cannot be read."""

    @property
    def _version(self) -> int:  # type: ignore[override]  # a plain attribute in torch
        raise LookupError("it has no version")


def test_an_error_before_a_function_becomes_one_warning() -> None:
    """If the arguments of a function cannot be inspected, one warning is issued, and the function is not recorded."""
    odd = X.as_subclass(_WithoutVersion)
    model = Net(lambda _, x: (x.exp(), odd.cos(), x.sin())[0])
    with (
        pytest.warns(RecorderWarning, match="the graph is incomplete: LookupError: it has no version") as told,
        GraphCapture(model, X) as recording,
    ):
        model(X)
    assert len(told) == 1
    assert outline(recording.graph()) == "input\nexp <- input"


class _Private(Tensor):
    """A tensor that refuses every function except its cosine."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "cos":
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's
        return NotImplemented


def test_a_tensor_that_answers_nothing() -> None:
    """A tensor class that refuses access to its shape or version causes at most a warning; the model never fails."""
    private = X.as_subclass(_Private)
    model = Net(lambda _, x: private.cos())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecorderWarning)
        with GraphCapture(model, X):
            out = model(X)
    assert isinstance(out, _Private)
