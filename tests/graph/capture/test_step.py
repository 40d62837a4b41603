"""The graph of a training step around the model, and interaction with other code."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from lightning_recorder import StatisticsRecorder
from lightning_recorder.graph import GraphCapture, capture_graph
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.taps import OutputGradientTap, OutputTap
from tests.graph.nets import Net, X, linear, scaled
from tests.graph.outline import outline, text
from tests.graph.queries import only

# Grad modes, transforms, checkpoints.


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_without_gradients(mode: Any) -> None:
    """Except for the autograd types, the graph does not depend on the grad mode."""
    net = nn.Sequential(linear(), nn.ReLU(inplace=True), linear())
    expected = capture_graph(net, X)
    bare = replace(expected, nodes=tuple(replace(node, autograd=()) for node in expected.nodes))
    with mode():
        assert capture_graph(net, X.clone()) == bare


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpoint(reentrant: bool) -> None:
    """The recomputation of a checkpoint during the backward pass is not recorded."""
    net = Net(
        lambda net, x: checkpoint(net.block, x, use_reentrant=reentrant).sum(),
        block=nn.Sequential(linear(), nn.ReLU()),
    )
    x = X.clone().requires_grad_()
    with GraphCapture(net, x) as recording:
        net(x).backward()
    assert outline(recording.graph()) == text(
        """
        input
        block: Sequential
          block.0: Linear
            linear <- input
          block.1: ReLU
            relu <- linear
        sum <- relu
        backward <- sum
        """
    )


def test_gradient_inside_the_forward_pass() -> None:
    """A gradient computed in the forward pass has edges from the differentiated tensor and from the inputs."""

    def forward(net: Any, x: Tensor) -> Tensor:
        score: Tensor = net.fc(x).sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        return score + slope.exp().sum()

    x = X.clone().requires_grad_()
    net = Net(forward, fc=linear())
    with GraphCapture(net, x) as recording:
        net(x).backward()
    assert outline(recording.graph()) == text(
        """
        input
        fc: Linear
          linear <- input
        sum <- linear
        grad <- sum, input
        exp <- grad
        sum#2 <- exp
        add <- sum, sum#2
        backward <- add
        """
    )


def test_vmap() -> None:
    """Calls under ``vmap`` are recorded, although their tensors are wrapped."""
    graph = capture_graph(Net(lambda net, x: torch.func.vmap(net.fc)(x), fc=linear()), X)
    assert [node.name for node in graph.nodes if node.kind == "op"] == ["linear"]
    assert only(graph, "linear").parent == only(graph, "fc").id


@pytest.mark.parametrize(
    "view", [Tensor.detach, lambda x: x.transpose(0, 1), lambda x: x[:, :2], lambda x: x.reshape(2, -1)]
)
def test_vmap_takes_a_view(view: Callable[[Tensor], Tensor]) -> None:
    """The input of a transform has the same memory as earlier tensors, but comes from the last one."""
    graph = capture_graph(
        Net(lambda net, x: torch.func.vmap(torch.softmax, (0, None))(view(net.fc(x)), 0), fc=linear()), X
    )
    softmax = only(graph, "softmax")
    (edge,) = graph.into(softmax)
    before = graph[edge.source]
    assert before.name in ("detach", "transpose", "getitem", "reshape")
    assert [graph[each.source].name for each in graph.into(before)] == ["linear"]


def test_vmap_takes_a_parameter() -> None:
    """A parameter that is an argument of a transform is used, as often as it is passed."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.func.vmap(torch.mul, (0, None))(x, net.scale)
        return x

    graph = capture_graph(scaled(forward), X)
    assert [node.name for node in graph.nodes if node.kind in ("parameter", "tensor")] == ["scale"]
    assert [graph[edge.target].name for edge in graph.edges if graph[edge.source].name == "scale"] == ["mul", "mul"]
    assert graph.root.used_parameters == graph.parameters


# The training step around the model.


def test_backward_is_a_node_behind_the_loss() -> None:
    """The start of a backward pass is a node of the root with an edge from the loss."""
    net = nn.Sequential(linear(4, 1))
    with GraphCapture(net, X, scope="training_step") as recording:
        F.mse_loss(net(X), torch.zeros(2, 1)).backward()
    graph = recording.graph()
    assert outline(graph) == text(
        """
        input
        0: Linear
          linear <- input
        zeros
        mse_loss <- linear, zeros
        backward <- mse_loss
        """
    )
    assert (only(graph, "backward").kind, only(graph, "backward").parent, graph.scope) == (
        "backward",
        0,
        "training_step",
    )


def test_backward_inside_a_module() -> None:
    """A backward pass that a module starts is a node of the root as well."""

    def forward(net: Any, x: Tensor) -> Tensor:
        net.fc(x).sum().backward()
        return x.exp()

    net = Net(lambda net, x: net.learner(x), learner=Net(forward, fc=linear()))
    assert outline(capture_graph(net, X)) == text(
        """
        input
        learner: Net
          learner.fc: Linear
            linear <- input
          sum <- linear
        backward <- sum
          exp <- input
        """
    )


def test_backward_of_several_losses() -> None:
    """A backward pass may have several losses."""
    net = nn.Sequential(linear())
    with GraphCapture(net, X) as recording:
        out = net(X)
        torch.autograd.backward([out.sum(), out.exp().mean()])
    assert outline(recording.graph()).splitlines()[-1] == "backward <- sum, mean"


@pytest.mark.parametrize(
    "optimizer_class", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop], ids=lambda each: each.__name__
)
def test_step_of_an_optimizer(optimizer_class: Any) -> None:
    """A step is one node after the backward pass; its writes to parameters and gradient clipping are not recorded."""
    net = nn.Sequential(linear(4, 1))
    optimizer = optimizer_class(net.parameters(), lr=0.1)
    with GraphCapture(net, X) as recording:
        optimizer.zero_grad()
        net(X).sum().backward()
        clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    assert outline(recording.graph()) == text(
        f"""
        input
        0: Linear
          linear <- input
        sum <- linear
        backward <- sum
        {optimizer_class.__name__} <- backward
        """
    )


def test_closure_of_an_optimizer_is_recorded() -> None:
    """Each evaluation by LBFGS is recorded, but none of its own computations."""
    net = nn.Sequential(linear(4, 1))
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(X).square().sum()
        loss.backward()
        return loss

    with GraphCapture(net, X) as recording:
        optimizer.step(closure)
    assert outline(recording.graph()) == text(
        """
        input
        0: Linear
          linear <- input
        square <- linear
        sum <- square
        backward <- sum
        0: Linear (call 2)
          linear#2 <- input
        square#2 <- linear#2
        sum#2 <- square#2
        backward#2 <- sum#2
        LBFGS <- backward, backward#2
        """
    )


def test_gan_step() -> None:
    """The two forward and two backward passes of a step are recorded, and they share the fake batch."""
    net = nn.ModuleDict({"generator": linear(), "critic": linear(4, 1)})
    generator, critic = net["generator"], net["critic"]
    steps = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in net.items()}
    with GraphCapture(net, X, name="noise") as recording:
        fake = generator(X)
        critic_loss = critic(fake.detach()).mean()
        steps["critic"].zero_grad()
        critic_loss.backward()
        steps["critic"].step()
        generator_loss = critic(fake).sum()
        steps["generator"].zero_grad()
        generator_loss.backward()
        steps["generator"].step()
    assert outline(recording.graph(), model_tensors=True) == text(
        """
        noise
        generator: Linear
          generator.weight
          generator.bias
          linear <- noise, generator.weight, generator.bias
        detach <- linear
        critic: Linear
          critic.weight
          critic.bias
          linear#2 <- detach, critic.weight, critic.bias
        mean <- linear#2
        backward <- mean
        SGD · critic <- backward
        critic: Linear (call 2)
          linear#3 <- linear, critic.weight, critic.bias
        sum <- linear#3
        backward#2 <- sum
        SGD · generator <- backward#2
        """
    )


def test_loss_scale_is_not_recorded() -> None:
    """The factor of a gradient scaler is not recorded between the loss and its backward pass."""
    net = nn.Sequential(linear(4, 1))
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with GraphCapture(net, X) as recording:
        scaler.scale(net(X).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert outline(recording.graph()) == text(
        """
        input
        0: Linear
          linear <- input
        sum <- linear
        backward <- sum
        SGD <- backward
        """
    )


def test_arithmetic_of_the_trainer_is_not_recorded() -> None:
    """Computations of Lightning on the loss are not recorded."""
    trainer: dict[str, Any] = {"__name__": "lightning.pytorch.loops.optimization"}
    exec("def normalize(loss): return loss / 4", trainer)
    net = nn.Sequential(linear(4, 1))
    with GraphCapture(net, X) as recording:
        trainer["normalize"](net(X).sum()).backward()
    assert outline(recording.graph()).splitlines()[-2:] == ["sum <- linear", "backward <- sum"]


def test_models_that_trainers_ship_are_recorded() -> None:
    """A model is recorded even if its code is part of Lightning or of torch's weight averaging."""
    boring = "input\nlayer: Linear\n  linear <- input"
    assert outline(capture_graph(BoringModel(), torch.ones(2, 32))) == boring
    averaged = torch.optim.swa_utils.AveragedModel(linear())
    assert outline(capture_graph(averaged, X)) == "input\nmodule: Linear\n  linear <- input"


# Other code in the same step.


def test_recorders_are_not_recorded() -> None:
    """Statistics computed in hooks on the same step are not part of the graph."""
    net = nn.Sequential(linear(), nn.ReLU(), linear(4, 1))
    with GraphCapture(net, X) as alone:
        net(X).sum().backward()
    modules = {name: module for name, module in net.named_modules() if name}
    with (
        StatisticsRecorder(modules, OutputTap) as outputs,
        GraphCapture(net, X) as recording,
        StatisticsRecorder(modules, OutputGradientTap) as gradients,
    ):
        net(X).sum().backward()
    assert len(outputs.collect()) == len(gradients.collect()) == 3
    assert recording.graph() == alone.graph()


def test_unrecorded() -> None:
    """Inside ``unrecorded``, neither functions nor module calls are recorded."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with pause_recording():
            net.fc(x.cos())
        return x.exp()

    assert outline(capture_graph(Net(forward, fc=linear()), X)) == "input\nexp <- input"


def test_other_threads_are_not_recorded() -> None:
    """Only the thread that entered the capture is recorded, even if another thread calls the same modules."""
    net = nn.Sequential(linear())
    with GraphCapture(net, X) as recording:
        other = threading.Thread(target=net, args=(X,))
        other.start()
        other.join()
        net(X)
    assert outline(recording.graph()) == "input\n0: Linear\n  linear <- input"


def test_models_of_others() -> None:
    """A module that is not part of the model is a call named by its class, with its contents."""
    other = nn.Sequential(linear(), nn.ReLU())
    net = Net(lambda net, x: net.fc(x) + other(x) + nn.Sequential(nn.Tanh())(x), fc=linear())
    assert outline(capture_graph(net, X), model_tensors=True) == text(
        """
        input
        fc: Linear
          fc.weight
          fc.bias
          linear <- input, fc.weight, fc.bias
        Sequential: Sequential
          Sequential.0: Linear
            Sequential.0.weight
            Sequential.0.bias
            linear#2 <- input, Sequential.0.weight, Sequential.0.bias
          Sequential.1: ReLU
            relu <- linear#2
        add <- linear, relu
        Sequential#2: Sequential
          Sequential#2.0: Tanh
            tanh <- input
        add#2 <- add, tanh
        """
    )


def test_two_captures_at_once() -> None:
    """Nested captures record the same graph and do not record each other."""
    net = nn.Sequential(linear(), nn.ReLU())
    with GraphCapture(net, X) as outer, GraphCapture(net, X) as inner:
        net(X)
    assert outer.graph() == inner.graph()
    assert outline(inner.graph()) == outline(capture_graph(net, X))


def test_other_function_modes_keep_working() -> None:
    """A function mode around a capture stays active, and calls inside a mode that is entered later are recorded."""

    def forward(_: Net, x: Tensor) -> Tensor:
        with torch.device("cpu"):
            return torch.zeros(4) + x

    with torch.device("meta"):
        assert only(capture_graph(Net(lambda _: torch.zeros(3))), "zeros").outputs[0].device == "meta"
        net = Net(lambda _: torch.zeros(3))
        with GraphCapture(net):
            assert net().device.type == "meta"
    assert outline(capture_graph(Net(forward), X)) == "input\nzeros\nadd <- zeros, input"


def test_capture_of_a_compiled_model() -> None:
    """A compiled submodule is recorded under its own name, whether or not it was compiled before."""
    part: Any = torch.compile(nn.Sequential(linear(), nn.ReLU()), backend="eager")
    net = nn.Sequential(part)
    net(X)
    with torch.compiler.set_stance("force_eager"):
        graph = capture_graph(net, X)
    assert outline(graph) == text(
        """
        input
        0: Sequential
          0.0: Linear
            linear <- input
          0.1: ReLU
            relu <- linear
        """
    )


def test_the_same_net_twice_gives_the_same_graph() -> None:
    """Recording is deterministic, and one capture does not affect the next."""
    net = nn.Sequential(linear(), nn.Dropout(), nn.BatchNorm1d(4), nn.LSTM(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert capture_graph(net, X) == capture_graph(net, X)


@pytest.mark.parametrize("name", ["reshape_as", "view_as", "expand_as", "type_as"])
def test_a_tensor_of_which_only_the_form_is_used_has_no_edge(name: str) -> None:
    """A normalization between two changes of the shape is not drawn with a skip connection around it."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.fc(x)
        return getattr(net.norm(y).double(), name)(y)  # type: ignore[no-any-return]

    graph = capture_graph(Net(forward, fc=linear(), norm=nn.LayerNorm(4)), X)
    (node,) = (each for each in graph.nodes if each.name == name)
    assert [graph[edge.source].name for edge in graph.into(node)] == ["double"]
    assert len(node.inputs) == 1
