"""Parts with computations that cannot be observed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.graph.constructs.catalogue import Construct, construct
from tests.graph.nets import Net, X, linear, scaled


@construct
def scripted_function() -> Construct:
    """A scripted function is one opaque node with the inputs that autograd reports."""

    # Scripted anew each time, since TorchScript optimizes functions after a run, which changes their autograd nodes.
    def exponential(x: Tensor, scale: Tensor) -> Tensor:
        return x.exp() * scale

    scripted: Any = torch.jit.script(exponential)
    return Construct(
        scaled(lambda net, x: scripted(net.fc(x), net.scale).cos(), fc=linear()),
        (X,),
        """
        input
        fc: Linear
          fc.weight
          fc.bias
          linear <- input, fc.weight, fc.bias
        scale
        unseen <- linear, scale
        cos <- unseen
        """,
        model_tensors=True,
    )


@construct
def module_around_a_scripted_function() -> Construct:
    """If a module only calls a scripted function, that function is a node in the call of the module."""

    def exponential(x: Tensor, scale: Tensor) -> Tensor:
        return x.exp() * scale

    scripted: Any = torch.jit.script(exponential)
    return Construct(
        Net(lambda net, x: net.part(x.sin()).cos(), part=scaled(lambda part, x: scripted(x, part.scale))),
        (X,),
        """
        input
        sin <- input
        part: Net
          part.scale
          unseen <- sin, part.scale
        cos <- unseen
        """,
        model_tensors=True,
    )


@construct
def scripted_module() -> Construct:
    """A scripted module is one opaque node with its inputs and parameters, with and without gradients."""
    part: Any = torch.jit.script(nn.Sequential(linear(), nn.ReLU()))
    return Construct(
        Net(lambda net, x: net.part(x.exp()).cos(), part=part),
        (X,),
        """
        input
        exp <- input
        part: RecursiveScriptModule
          part.0.weight
          part.0.bias
          unseen <- exp, part.0.weight, part.0.bias
        cos <- unseen
        """,
        model_tensors=True,
        around=torch.no_grad,
    )


@construct
def attention_in_eval_mode() -> Construct:
    """In eval mode an attention is one opaque node with its inputs and all of its parameters."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    return Construct(
        Net(lambda net, x: net.attention(x, x, x, need_weights=False)[0].tanh(), attention=attention).eval(),
        (X[None],),
        """
        input
        attention: MultiheadAttention
          attention.in_proj_weight
          attention.in_proj_bias
          attention.out_proj.weight
          attention.out_proj.bias
          fused <- input ×3, attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight, \
attention.out_proj.bias
        tanh <- fused
        """,
        model_tensors=True,
        around=torch.no_grad,
    )


@construct
def padded_encoder_in_eval_mode() -> Construct:
    """An encoder in eval mode, which skips the padding, is one opaque node with its input and the padding mask."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return Construct(
        Net(
            lambda net, x, padding: net.encoder(x.exp(), src_key_padding_mask=padding).tanh(),
            encoder=nn.TransformerEncoder(layer, 2),
        ).eval(),
        (X[None].repeat(2, 1, 1), torch.tensor([[False, False], [False, True]])),
        """
        input[0]
        input[1]
        exp <- input[0]
        encoder: TransformerEncoder
          fused <- exp, input[1]
        tanh <- fused
        """,
        around=torch.no_grad,
    )
