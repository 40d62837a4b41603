"""Modules in various places, with repeated calls and changes of their class."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.graph.constructs.catalogue import Construct, construct
from tests.graph.nets import Net, X, linear


class Plain(nn.Module):
    """Keeps its layers where torch does not register them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [linear(), linear()]
        self.last = (nn.Sigmoid(),)
        self.heads = {"wide": nn.Tanh(), "narrow": [nn.ReLU()]}

    def forward(self, x: Tensor) -> Any:
        for layer in (*self.layers, *self.last):
            x = layer(x)
        wide, narrow = self.heads.values()
        return wide(x) + narrow[0](x)  # type: ignore[operator,index]  # a dictionary of both kinds


@construct
def modules_in_plain_containers() -> Construct:
    """A module in a list, a tuple or a dictionary, or in nested ones, is named by its location."""
    return Construct(
        Net(lambda net, x: net.plain(x), plain=Plain()),
        (X,),
        """
        input
        plain: Plain
          plain.layers[0]: Linear
            linear <- input
          plain.layers[1]: Linear
            linear#2 <- linear
          plain.last[0]: Sigmoid
            sigmoid <- linear#2
          plain.heads['wide']: Tanh
            tanh <- sigmoid
          plain.heads['narrow'][0]: ReLU
            relu <- sigmoid
          add <- tanh, relu
        """,
    )


@construct
def module_in_a_closure() -> Construct:
    """A module that only the forward pass can access is named by its class, and its calls are counted."""
    hidden = nn.Sequential(linear(), nn.ReLU())
    return Construct(
        Net(lambda _, x: hidden(hidden(x))),
        (X,),
        """
        input
        Sequential: Sequential
          Sequential.0: Linear
            Sequential.0.weight
            Sequential.0.bias
            linear <- input, Sequential.0.weight, Sequential.0.bias
          Sequential.1: ReLU
            relu <- linear
        Sequential: Sequential (call 2)
          Sequential.0: Linear (call 2)
            linear#2 <- relu, Sequential.0.weight, Sequential.0.bias
          Sequential.1: ReLU (call 2)
            relu#2 <- linear#2
        """,
        model_tensors=True,
    )


@construct
def module_under_two_parents() -> Construct:
    """A shared module keeps its first name in its second parent; the parameters are in the call of their first use."""
    shared = linear()
    one, other = nn.Sequential(shared, nn.ReLU()), nn.Sequential(shared, nn.Tanh())
    return Construct(
        Net(lambda net, x: net.one(x) + net.other(x), one=one, other=other),
        (X,),
        """
        input
        one: Sequential
          one.0: Linear
            one.0.weight
            one.0.bias
            linear <- input, one.0.weight, one.0.bias
          one.1: ReLU
            relu <- linear
        other: Sequential
          one.0: Linear (call 2)
            linear#2 <- input, one.0.weight, one.0.bias
          other.1: Tanh
            tanh <- linear#2
        add <- relu, tanh
        """,
        model_tensors=True,
    )


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()

    def forward(self, x: Tensor, times: int = 2) -> Any:
        x = self.fc(x)
        return self(x, times - 1) if times else x


@construct
def module_that_calls_itself() -> Construct:
    """Recursive calls of a module are nested."""
    return Construct(
        nn.Sequential(Recursive(), nn.ReLU()),
        (X,),
        """
        input
        0: Recursive
          0.fc: Linear
            linear <- input
          0: Recursive (call 2)
            0.fc: Linear (call 2)
              linear#2 <- linear
            0: Recursive (call 3)
              0.fc: Linear (call 3)
                linear#3 <- linear#2
        1: ReLU
          relu <- linear#3
        """,
    )


@construct
def model_that_calls_itself() -> Construct:
    """Recursive calls of the model itself are merged into the root."""
    return Construct(
        Recursive(),
        (X,),
        """
        input
        fc: Linear
          linear <- input
        fc: Linear (call 2)
          linear#2 <- linear
        fc: Linear (call 3)
          linear#3 <- linear#2
        """,
    )


def _routed(net: Any, x: Tensor) -> Any:
    while x.sum() < 3:
        x = net.positive(x) if bool(x.mean() > 0) else net.negative(x)
    return x


@construct
def dynamic_control_flow() -> Construct:
    """The branches taken are recorded; the comparisons that decided them have no users."""
    return Construct(
        Net(_routed, positive=Net(lambda _, x: x * 2), negative=Net(lambda _, x: x + 0.3)),
        (torch.zeros(2, 4),),
        """
        input
        sum <- input
        lt <- sum
        mean <- input
        gt <- mean
        negative: Net
          add <- input
        sum#2 <- add
        lt#2 <- sum#2
        mean#2 <- add
        gt#2 <- mean#2
        positive: Net
          mul <- add
        sum#3 <- mul
        lt#3 <- sum#3
        """,
    )


def _eager(part: Any) -> Construct:
    return Construct(
        Net(lambda net, x: net.part(x).tanh(), part=part),
        (X,),
        """
        input
        part: Sequential
          part.0: Linear
            linear <- input
          part.1: ReLU
            relu <- linear
        tanh <- relu
        """,
        around=partial(torch.compiler.set_stance, "force_eager"),
    )


@construct
def compiled_part() -> Construct:
    """A compiled submodule that runs eagerly is recorded under its own name, without a node for its wrapper."""
    return _eager(torch.compile(nn.Sequential(linear(), nn.ReLU()), backend="eager"))


@construct
def part_that_was_compiled_in_place() -> Construct:
    """A submodule compiled in place by ``compile`` is recorded in the same way."""
    part = nn.Sequential(linear(), nn.ReLU())
    part.compile(backend="eager")
    return _eager(part)


@construct
def data_parallel_model() -> Construct:
    """If a model is wrapped for several devices, the wrapped model is the root."""
    return Construct(
        nn.DataParallel(nn.Sequential(linear(), nn.ReLU())),
        (X,),
        """
        input
        0: Linear
          linear <- input
        1: ReLU
          relu <- linear
        """,
    )


@construct
def data_parallel_part() -> Construct:
    """A wrapped submodule is inside the call of its wrapper."""
    return Construct(
        Net(lambda net, x: net.part(x), part=nn.DataParallel(linear())),
        (X,),
        """
        input
        part: DataParallel
          part.module: Linear
            linear <- input
        """,
    )


@construct
def weight_norm() -> Construct:
    """A weight computed from a direction and a length has a call of its own, before that of the layer."""
    return Construct(
        nn.Sequential(parametrizations.weight_norm(linear())),
        (X,),
        """
        input
        0: ParametrizedLinear
          0.parametrizations.weight: ParametrizationList
            0.parametrizations.weight.0: _WeightNorm
            0.parametrizations.weight.original1
            0.parametrizations.weight.original0
              weight_norm <- 0.parametrizations.weight.original1, 0.parametrizations.weight.original0
          0.bias
          linear <- input, weight_norm, 0.bias
        """,
        model_tensors=True,
    )


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


@construct
def parametrized_weight() -> Construct:
    """The module that computes a weight is called like any other, with its contents."""
    layer = linear()
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return Construct(
        nn.Sequential(layer),
        (X,),
        """
        input
        0: ParametrizedLinear
          0.parametrizations.weight: ParametrizationList
            0.parametrizations.weight.0: Symmetric
            0.parametrizations.weight.original
              triu <- 0.parametrizations.weight.original
              triu#2 <- 0.parametrizations.weight.original
              mT <- triu#2
              add <- triu, mT
          0.bias
          linear <- input, add, 0.bias
        """,
        model_tensors=True,
    )


@construct
def lazy_module() -> Construct:
    """The parameters of a lazy module are created and initialized in its first call."""
    return Construct(
        nn.Sequential(nn.LazyLinear(3), nn.ReLU()),
        (X,),
        """
        input
        0: Linear
          empty
          empty#2
          0.weight
          kaiming_uniform <- 0.weight
          0.bias
          uniform <- 0.bias
          linear <- input, kaiming_uniform, uniform
        1: ReLU
          relu <- linear
        """,
        model_tensors=True,
    )


@construct
def module_called_with_no_tensor() -> Construct:
    """A module that takes and returns no tensors is a call with the functions inside it, if there are any."""
    return Construct(
        Net(
            lambda net, x: x * net.count(3) + net.embed("text"),
            count=Net(lambda _, number: number * 2),
            embed=Net(lambda _, words: torch.ones(4) * len(words)),
        ),
        (X,),
        """
        input
        count: Net
        mul <- input
        embed: Net
          ones
          mul#2 <- ones
        add <- mul, mul#2
        """,
    )


@construct
def module_that_yields() -> Construct:
    """The functions of a generator are recorded where it is consumed, after the call of the module that created it."""
    return Construct(
        Net(
            lambda net, x: sum(net.yielding(x)),
            yielding=Net(lambda net, x: (net.fc(x) * number for number in (1, 2)), fc=linear()),
        ),
        (X,),
        """
        input
        yielding: Net
        yielding.fc: Linear
          linear <- input
        mul <- linear
        add <- mul
        yielding.fc: Linear (call 2)
          linear#2 <- input
        mul#2 <- linear#2
        add#2 <- add, mul#2
        """,
    )
