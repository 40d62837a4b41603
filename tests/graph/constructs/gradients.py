"""Checkpoints, gradients inside the forward pass, transforms, autocast and complex numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.graph.constructs.catalogue import Construct, construct
from tests.graph.nets import Net, X, linear


def _block() -> nn.Module:
    return nn.Sequential(linear(), nn.ReLU())


@construct
def checkpoint_inside_a_checkpoint() -> Construct:
    """The contents of nested checkpoints are recorded once; the checkpoints are not nodes."""

    def inside(net: Any, x: Tensor) -> Any:
        return checkpoint(net.block, net.fc(x), use_reentrant=False)

    return Construct(
        Net(lambda net, x: checkpoint(inside, net, x, use_reentrant=False), fc=linear(), block=_block()),
        (X,),
        """
        input
        fc: Linear
          linear <- input
        block: Sequential
          block.0: Linear
            linear#2 <- linear
          block.1: ReLU
            relu <- linear#2
        sum <- relu
        backward <- sum
        """,
        backward=True,
    )


@construct
def checkpointed_segments() -> Construct:
    """A sequence that is checkpointed in segments has calls of its layers but not of the container."""
    return Construct(
        Net(lambda net, x: checkpoint_sequential(net.layers, 2, x, use_reentrant=True), layers=_layers()),
        (X.clone().requires_grad_(),),
        """
        input
        layers.0: Linear
          linear <- input
        layers.1: ReLU
          relu <- linear
        layers.2: Linear
          linear#2 <- relu
        layers.3: Tanh
          tanh <- linear#2
        sum <- tanh
        backward <- sum
        """,
        backward=True,
    )


def _layers() -> nn.Sequential:
    return nn.Sequential(linear(), nn.ReLU(), linear(), nn.Tanh())


def _penalized(net: Any, x: Tensor, *, create_graph: bool) -> Any:
    x = x.clone().requires_grad_()
    score = net.critic(x).sum()
    (slope,) = torch.autograd.grad(score, x, create_graph=create_graph, retain_graph=True)
    penalty: Tensor = (slope.norm(2, dim=1) - 1).square().mean()
    return score + penalty if create_graph else score + penalty.item()


@construct
def gradient_penalty() -> Construct:
    """A gradient used in the loss is a node between the differentiated tensors and its users."""
    return Construct(
        Net(partial(_penalized, create_graph=True), critic=linear(4, 1)),
        (X,),
        """
        input
        clone <- input
        critic: Linear
          linear <- clone
        sum <- linear
        grad <- sum, clone
        norm <- grad
        sub <- norm
        square <- sub
        mean <- square
        add <- sum, mean
        sum#2 <- add
        backward <- sum#2
        """,
        backward=True,
    )


@construct
def gradient_without_a_graph() -> Construct:
    """A gradient without a graph of its own is recorded in the same way."""
    return Construct(
        Net(partial(_penalized, create_graph=False), critic=linear(4, 1)),
        (X,),
        """
        input
        clone <- input
        critic: Linear
          linear <- clone
        sum <- linear
        grad <- sum, clone
        norm <- grad
        sub <- norm
        square <- sub
        mean <- square
        add <- sum
        sum#2 <- add
        backward <- sum#2
        """,
        backward=True,
    )


@construct
def gradient_by_the_parameters() -> Construct:
    """A gradient by parameters, as in an inner loop, takes the parameters and returns a tensor for each."""

    def forward(net: Any, x: Tensor) -> Tensor:
        loss = net.fc(x).square().sum()
        weight, bias = torch.autograd.grad(loss, list(net.fc.parameters()), create_graph=True)
        return torch.nn.functional.linear(x, net.fc.weight - 0.1 * weight, net.fc.bias - 0.1 * bias)

    return Construct(
        Net(forward, fc=linear()),
        (X,),
        """
        input
        fc: Linear
          fc.weight
          fc.bias
          linear <- input, fc.weight, fc.bias
        square <- linear
        sum <- square
        grad <- sum, fc.weight, fc.bias
        mul <- grad
        sub <- fc.weight, mul
        mul#2 <- grad
        sub#2 <- fc.bias, mul#2
        linear#2 <- input, sub, sub#2
        """,
        model_tensors=True,
    )


@construct
def vectorized_map() -> Construct:
    """The mapped functions are recorded once, connected to the nodes before and after the map."""
    return Construct(
        Net(lambda net, x: vmap(lambda row: net.fc(row).tanh() * 2)(x.exp()).relu(), fc=linear()),
        (X,),
        """
        input
        exp <- input
        fc: Linear
          linear <- exp
        tanh <- linear
        mul <- tanh
        relu <- mul
        """,
    )


@construct
def gradient_transform() -> Construct:
    """Under ``torch.func.grad`` the forward pass is recorded, followed by a node for the gradient."""
    return Construct(
        Net(lambda net, x: grad(lambda y: net.fc(y).tanh().sum())(x.exp()).relu(), fc=linear()),
        (X,),
        """
        input
        exp <- input
        fc: Linear
          linear <- exp
        tanh <- linear
        sum <- tanh
        grad <- sum, exp
        relu <- grad
        """,
    )


@construct
def gradient_of_each_row() -> Construct:
    """Nested transforms are recorded like a single one."""
    return Construct(
        Net(lambda net, x: vmap(grad(lambda row: net.fc(row).tanh().sum()))(x), fc=linear()),
        (X,),
        """
        input
        fc: Linear
          linear <- input
        tanh <- linear
        sum <- tanh
        grad <- sum, input
        """,
    )


@construct
def forward_mode_gradient() -> Construct:
    """A Jacobian-vector product follows the values through the same functions and is unpacked after them."""

    def forward(net: Any, x: Tensor) -> Any:
        pair: Any = jvp(lambda y: net.fc(y).tanh(), (x,), (torch.ones_like(x),))
        value, slope = pair
        return value * slope

    return Construct(
        Net(forward, fc=linear()),
        (X,),
        """
        input
        ones_like <- input
        make_dual <- input, ones_like
        fc: Linear
          linear <- make_dual
        tanh <- linear
        unpack_dual <- tanh
        mul <- tanh, unpack_dual
        """,
    )


@construct
def autocast() -> Construct:
    """Casts to lower precision are not recorded: a layer under autocast has the same inputs as without it."""
    return Construct(
        nn.Sequential(linear(), nn.Softmax(-1), linear()),
        (X,),
        """
        input
        0: Linear
          0.weight
          0.bias
          linear <- input, 0.weight, 0.bias
        1: Softmax
          softmax <- linear
        2: Linear
          2.weight
          2.bias
          linear#2 <- softmax, 2.weight, 2.bias
        """,
        model_tensors=True,
        around=partial(torch.autocast, "cpu", torch.bfloat16),
    )


@construct
def complex_numbers() -> Construct:
    """Complex tensors, their parts and their views as real tensors are tracked like others."""

    def forward(_: Net, x: Tensor) -> Any:
        z = torch.fft.fft(torch.complex(x, x.exp())) * 1j
        return torch.view_as_real(z).sum(-1) + z.conj().real

    return Construct(
        Net(forward),
        (X,),
        """
        input
        exp <- input
        complex <- input, exp
        fft_fft <- complex
        mul <- fft_fft
        view_as_real <- mul
        sum <- view_as_real
        conj <- mul
        real <- conj
        add <- sum, real
        """,
    )


@construct
def frozen_part() -> Construct:
    """A part that runs without gradients is recorded like the rest."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = net.frozen(x)
        return torch.sum(net.head(features))

    return Construct(
        Net(forward, frozen=_block(), head=linear(4, 1)),
        (X,),
        """
        input
        frozen: Sequential
          frozen.0: Linear
            linear <- input
          frozen.1: ReLU
            relu <- linear
        head: Linear
          linear#2 <- relu
        sum <- linear#2
        """,
    )
