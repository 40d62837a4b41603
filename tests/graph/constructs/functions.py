"""Calls of custom functions with their own gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.graph.constructs.catalogue import Construct, construct
from tests.graph.constructs.custom import (
    Batched,
    Best,
    Differentiating,
    Foreign,
    Moved,
    Outer,
    OuterForeign,
    Scale,
    Through,
    Two,
    WithModule,
    Written,
)
from tests.graph.nets import Net, X, linear, scaled


@construct
def function_with_a_context() -> Construct:
    """A call of an ``autograd.Function`` is one node with edges from its arguments."""
    return Construct(
        scaled(lambda net, x: Scale.apply(x.tanh(), net.scale).relu()),
        (X,),
        """
        input
        tanh <- input
        scale
        Scale <- tanh, scale
        relu <- Scale
        """,
        model_tensors=True,
    )


@construct
def function_with_setup_context() -> Construct:
    """In the style with ``setup_context``, the contents of both methods are not recorded either."""
    return Construct(
        scaled(lambda net, x: Moved.apply(x.tanh(), net.scale).relu()),
        (X,),
        """
        input
        tanh <- input
        scale
        Moved <- tanh, scale
        relu <- Moved
        """,
        model_tensors=True,
    )


@construct
def function_with_two_results() -> Construct:
    """Each result of a custom function comes from its node, including a result without a gradient."""

    def forward(net: Any, x: Tensor) -> Any:
        one, other = Two.apply(x * net.scale)
        values, places = Best.apply(one)
        return one * other, values * places

    return Construct(
        scaled(forward),
        (X,),
        """
        input
        mul <- input
        Two <- mul
        Best <- Two
        mul#2 <- Two ×2
        mul#3 <- Best ×2
        """,
    )


def _four_times(net: Any, x: Tensor) -> Any:
    chained = Scale.apply(Scale.apply(x, net.scale), net.scale)
    return chained, Scale.apply(x, net.scale), Scale.apply(x, net.scale)


FOUR_TIMES = """
    input
    Scale <- input
    Scale#2 <- Scale
    Scale#3 <- input
    Scale#4 <- input
    output[0] <- Scale#2
    output[1] <- Scale#3
    output[2] <- Scale#4
    """


@construct
def function_applied_several_times_in_a_row() -> Construct:
    """Each application is a node, whether it takes the last result or the same tensor."""
    return Construct(scaled(_four_times), (X,), FOUR_TIMES, outputs=True)


@construct
def function_applied_several_times_without_gradients() -> Construct:
    """Applications are distinguished even if they create no autograd nodes."""
    return Construct(scaled(_four_times), (X,), FOUR_TIMES, outputs=True, around=torch.no_grad)


@construct
def nested_functions() -> Construct:
    """Only the outermost of nested functions is a node."""

    def forward(net: Any, x: Tensor) -> Any:
        x = Outer.apply(x * net.scale)
        return Differentiating.apply(Outer.apply(x)).tanh()

    return Construct(
        scaled(forward),
        (X,),
        """
        input
        mul <- input
        Outer <- mul
        Outer#2 <- Outer
        Differentiating <- Outer#2
        tanh <- Differentiating
        """,
    )


@construct
def nested_functions_without_gradients() -> Construct:
    """Only the outermost of nested functions is a node, also without gradients."""
    return Construct(
        Net(lambda _, x: Outer.apply(Outer.apply(x)).tanh()),
        (X,),
        """
        input
        Outer <- input
        Outer#2 <- Outer
        tanh <- Outer#2
        """,
        around=torch.no_grad,
    )


@construct
def function_that_computes_in_numpy() -> Construct:
    """Results computed outside of torch come from the node of the function, which autograd identifies."""
    return Construct(
        scaled(lambda net, x: OuterForeign.apply(Foreign.apply(Foreign.apply(x * net.scale))).tanh()),
        (X,),
        """
        input
        mul <- input
        Foreign <- mul
        Foreign#2 <- Foreign
        OuterForeign <- Foreign#2
        tanh <- OuterForeign
        """,
    )


@construct
def numpy_without_gradients() -> Construct:
    """Without autograd the origin of a result computed outside of torch is unknown, so it is a new tensor."""
    return Construct(
        Net(lambda _, x: Foreign.apply(x.exp()).tanh()),
        (X,),
        """
        input
        exp <- input
        Foreign <- exp
        (tensor)
        tanh <- (tensor)
        """,
        around=torch.no_grad,
    )


@construct
def function_that_calls_a_module() -> Construct:
    """The call of a module is a node between the part of the function before it and the part after it."""
    return Construct(
        scaled(lambda net, x: WithModule.apply(x * net.scale, net.fc).tanh(), fc=linear()),
        (X,),
        """
        input
        mul <- input
        WithModule <- mul
        fc: Linear
          linear <- WithModule
        WithModule#2 <- mul, linear, WithModule
        tanh <- WithModule#2
        """,
    )


@construct
def function_inside_a_module() -> Construct:
    """A function that a module applies is in the call of the module, even if it is the only one there."""
    return Construct(
        Net(lambda net, x: net.turned(net.scaled(x)).tanh(), scaled=scaled(_scaled), turned=Net(_turned)),
        (X,),
        """
        input
        scaled: Net
          Scale <- input
        turned: Net
          Through <- Scale
        tanh <- Through
        """,
    )


def _scaled(net: Any, x: Tensor) -> Any:
    return Scale.apply(x, net.scale)


def _turned(_: Net, x: Tensor) -> Any:
    return Through.apply(x)


IN_A_CHECKPOINT = """
    input
    mul <- input
    Scale <- mul
    tanh <- Scale
    relu <- tanh
    sum <- relu
    backward <- sum
    """


def _in_a_checkpoint(reentrant: bool) -> Construct:
    def block(net: Any, x: Tensor) -> Any:
        return Scale.apply(x, net.scale).tanh()

    def forward(net: Any, x: Tensor) -> Tensor:
        return torch.relu(checkpoint(block, net, x * net.scale, use_reentrant=reentrant))

    return Construct(scaled(forward), (X,), IN_A_CHECKPOINT, backward=True)


@construct
def function_in_a_checkpoint() -> Construct:
    """A checkpointed function is recorded once, as without the checkpoint."""
    return _in_a_checkpoint(reentrant=False)


@construct
def function_in_a_reentrant_checkpoint() -> Construct:
    """The same holds in a reentrant checkpoint, which is itself a custom function but not a node."""
    return _in_a_checkpoint(reentrant=True)


@construct
def function_that_writes_into_its_argument() -> Construct:
    """A function that writes into its argument, or into a view of it, is the source of the tensor from then on."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = x * net.scale
        Written.apply(x)
        Written.apply(x[0])
        return x.tanh()

    return Construct(
        scaled(forward),
        (X,),
        """
        input
        mul <- input
        Written <- mul
        getitem <- Written
        Written#2 <- getitem
        tanh <- Written#2
        """,
    )


@construct
def function_under_vmap() -> Construct:
    """The function is also one node under a transform."""
    return Construct(
        scaled(lambda net, x: torch.func.vmap(Batched.apply)(x * net.scale).tanh()),
        (X,),
        """
        input
        mul <- input
        Batched <- mul
        tanh <- Batched
        """,
    )
