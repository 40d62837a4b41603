"""Inputs, outputs and state that is kept between two calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.graph.constructs.catalogue import Construct, construct
from tests.graph.nets import Net, X, linear, scaled


@dataclass
class Result:
    loss: Tensor
    hidden: tuple[Tensor, ...]


@construct
def outputs_in_a_structure() -> Construct:
    """Every returned tensor in dictionaries, lists and dataclasses is an output named by its path; nothing else is."""

    def forward(_: Net, x: Tensor) -> Any:
        return {"parts": [x.exp(), None, (x.cos(),)], "result": Result(x.sum(), (x.sin(),)), "length": 3, 4: x.tan()}

    return Construct(
        Net(forward),
        (X,),
        """
        input
        exp <- input
        cos <- input
        sum <- input
        sin <- input
        tan <- input
        output.parts[0] <- exp
        output.parts[2][0] <- cos
        output.result.loss <- sum
        output.result.hidden[0] <- sin
        output[4] <- tan
        """,
        outputs=True,
    )


@construct
def output_that_is_used_again() -> Construct:
    """A tensor that is returned, used inside, and returned again is an output each time."""

    def forward(_: Net, x: Tensor) -> Any:
        hidden = x.exp()
        return hidden, hidden.cos(), hidden

    return Construct(
        Net(forward),
        (X,),
        """
        input
        exp <- input
        cos <- exp
        output[0] <- exp
        output[1] <- cos
        output[2] <- exp
        """,
        outputs=True,
    )


@construct
def input_given_back() -> Construct:
    """An input that is returned unchanged is connected directly to its output."""
    return Construct(
        Net(lambda _, x, y: (x, x + y)),
        (X, X.clone()),
        """
        input[0]
        input[1]
        add <- input[0], input[1]
        output[0] <- input[0]
        output[1] <- add
        """,
        outputs=True,
    )


@construct
def inputs_by_keyword_alone() -> Construct:
    """Keyword inputs are named by their keywords, including those inside a structure and unused ones."""
    return Construct(
        Net(lambda _, *, pair, other, unused: pair["x"] * pair["y"][0] + other),
        (),
        """
        input.pair.x
        input.pair.y[0]
        input.other
        input.unused
        mul <- input.pair.x, input.pair.y[0]
        add <- mul, input.other
        """,
        keywords={"pair": {"x": X, "y": [X.clone(), 2]}, "other": X.clone(), "unused": X.clone()},
    )


@construct
def integer_inputs() -> Construct:
    """Integer inputs, such as indices, and tensors computed from them are recorded like others."""
    return Construct(
        Net(lambda net, words: net.embedding(words) * (words != 0).unsqueeze(-1), embedding=nn.Embedding(9, 4)),
        (torch.tensor([[5, 3, 0], [2, 0, 0]]),),
        """
        input
        embedding: Embedding
          embedding.weight
          embedding <- input, embedding.weight
        ne <- input
        unsqueeze <- ne
        mul <- embedding, unsqueeze
        """,
        model_tensors=True,
    )


@construct
def model_without_parts() -> Construct:
    """A model without submodules has its functions and parameters directly in the root."""
    return Construct(
        scaled(lambda net, x: (x * net.scale).relu()),
        (X,),
        """
        input
        scale
        mul <- input, scale
        relu <- mul
        output <- relu
        """,
        model_tensors=True,
        outputs=True,
    )


@construct
def module_fed_by_a_parameter() -> Construct:
    """A module may take only a parameter of another, such as the queries of a decoder."""
    return Construct(
        scaled(lambda net: net.decoder(net.scale.expand(2, 4)), decoder=linear()),
        (),
        """
        scale
        expand <- scale
        decoder: Linear
          decoder.weight
          decoder.bias
          linear <- expand, decoder.weight, decoder.bias
        """,
        model_tensors=True,
    )


def _step_with_memory(net: Any, x: Tensor, memory: dict[str, Tensor]) -> Any:
    key, value = net.project(x).chunk(2, dim=1)
    for name, new in (("key", key), ("value", value)):
        memory[name] = torch.cat((memory[name], new)) if name in memory else new
    scores = torch.softmax(x @ memory["key"].T, dim=1)
    return scores @ memory["value"]


@construct
def memory_between_calls() -> Construct:
    """A tensor that a call stores in an object is an input of the next call that reads it."""

    def forward(net: Any, x: Tensor) -> Any:
        memory: dict[str, Tensor] = {}
        return net.attend(net.attend(x, memory), memory)

    return Construct(
        Net(forward, attend=Net(_step_with_memory, project=linear(4, 8))),
        (X,),
        """
        input
        attend: Net
          attend.project: Linear
            linear <- input
          chunk <- linear
          T <- chunk
          matmul <- input, T
          softmax <- matmul
          matmul#2 <- softmax, chunk
        attend: Net (call 2)
          attend.project: Linear (call 2)
            linear#2 <- matmul#2
          chunk#2 <- linear#2
          cat <- chunk, chunk#2
          cat#2 <- chunk, chunk#2
          T#2 <- cat
          matmul#3 <- matmul#2, T#2
          softmax#2 <- matmul#3
          matmul#4 <- softmax#2, cat#2
        """,
    )
