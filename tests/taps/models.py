"""Modules of every kind that a tap may be used with, each with a second way to compute the expected tensors.

The taps run on ``forward``. ``reference`` computes the same loss with functions instead of submodules and without
in-place operations, and passes each tensor that a submodule would return to a callback, in the order of the calls. The
expected gradient is then the result of ``torch.autograd.grad`` for the tensor in the callback.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

See = Callable[[str, str, Tensor], Tensor]
"""A callback for the name of a module, a path in its output and the tensor at that path, which returns the tensor."""


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """Return the output of a linear layer without calling it."""
    assert isinstance(module, nn.Linear)
    return F.linear(x, module.weight, module.bias)


class Model(nn.Module, ABC):
    """A model from a batch ``[3, 4]`` to a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)

    @abstractmethod
    def reference(self, x: Tensor, see: See) -> Tensor:
        """Return the loss, computed in the second way."""


class Single(Model):
    """Modules at which every tap sees exactly one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4, bias=False)
        self.act = nn.PReLU()
        self.head = nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.stem(x))).square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("stem", "out", linear(self.stem, x))
        return see("head", "out", linear(self.head, see("act", "out", F.prelu(h, self.act.weight)))).square().sum()


class Plain(Model):
    """Layers in sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.stem(x))).square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("act", "out", see("stem", "out", linear(self.stem, x)).tanh())
        return see("head", "out", linear(self.head, h)).square().sum()


class InPlace(Model):
    """In-place operations, by a module and directly, on outputs of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h *= 2
        y = self.head(self.relu(h))
        y.add_(1).tanh_()
        return y.square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("relu", "out", (see("stem", "out", linear(self.stem, x)) * 2).relu())
        return (see("head", "out", linear(self.head, h)) + 1).tanh().square().sum()


class Residual(Model):
    """A branch around several layers, one of which works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return F.relu(h + self.branch(h.clone()), inplace=True).square().sum()

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("stem", "out", linear(self.stem, x))
        y = linear(self.branch[1], see("branch.0", "out", h.relu()))
        return (h + see("branch", "out", see("branch.1", "out", y))).relu().square().sum()


class Views(Model):
    """Parts of one output, some of them unused."""

    def __init__(self) -> None:
        super().__init__()
        self.split = Split()
        self.rows = Rows()

    def forward(self, x: Tensor) -> Tensor:
        left, _ = self.split(self.stem(x))
        _, second, _ = self.rows(left * 2)
        return second.square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("stem", "out", linear(self.stem, x))
        left, right = h.chunk(2, dim=1)
        left, right = see("split", "out[0]", left), see("split", "out[1]", right)
        rows = [see("rows", f"out[{row}]", part) for row, part in enumerate((left * 2).unbind())]
        return rows[1].square().sum()


class Split(nn.Module):
    """Returns both halves of its input as views."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.chunk(2, dim=1))


class Rows(nn.Module):
    """Returns each row of its input as a view."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.unbind())


class Base(Model):
    """An in-place operation on a tensor after a module has returned a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.view = View()

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        view = self.view(h)
        h.mul_(2)
        return view.square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("stem", "out", linear(self.stem, x))
        return (see("view", "out", h[:, :2]) * 2).square().sum()


class View(nn.Module):
    """Returns two columns of its input as a view."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2]


class Repeated(Model):
    """One layer that is called three times."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.stem(x).tanh()
        return x.square().sum()

    def reference(self, x: Tensor, see: See) -> Tensor:
        for _ in range(3):
            x = see("stem", "out", linear(self.stem, x)).tanh()
        return x.square().sum()


class Shared(Model):
    """One layer under two names, of which the tap knows the first."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.stem

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.stem(x).tanh()).square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("stem", "out", linear(self.stem, x)).tanh()
        return see("stem", "out", linear(self.stem, h)).square().sum()


class Through(Model):
    """A module that returns its input, which is also used elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.identity = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return (self.identity(h) * 2 + h.square()).sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("stem", "out", linear(self.stem, x))
        return (see("identity", "out", h) * 2 + h.square()).sum()


class Pair(NamedTuple):
    """A named tuple of two tensors."""

    first: Tensor
    second: Tensor


@dataclass
class Record:
    """A tensor with other attributes."""

    hidden: Tensor
    steps: int
    parts: list[Tensor | None]


class Nest(nn.Module):
    """Returns the double and the square of its input in a container."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(x * 2, x.square())


class Take(nn.Module):
    """Takes such a container as its input."""

    def __init__(self, unpack: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.unpack = unpack

    def forward(self, value: Any) -> Tensor:
        double, square = self.unpack(value)
        return double * 3 + square.square()


class Nested(Model):
    """A container that is passed between two modules and has two tensors, both used."""

    def __init__(
        self, pack: Callable[[Tensor, Tensor], Any], unpack: Callable[[Any], tuple[Tensor, Tensor]], paths: list[str]
    ) -> None:
        super().__init__()
        self.nest = Nest(pack)
        self.take = Take(unpack)
        self.paths = paths

    def forward(self, x: Tensor) -> Tensor:
        return self.take(self.nest(self.stem(x))).sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("stem", "out", linear(self.stem, x))
        double, square = (see("nest", path, part) for path, part in zip(self.paths, (h * 2, h.square()), strict=True))
        return see("take", "out", double * 3 + square.square()).sum()


def pack_dict(double: Tensor, square: Tensor) -> Any:
    return {"a": double, "b": [square, None]}


def unpack_dict(output: Any) -> tuple[Tensor, Tensor]:
    return output["a"], output["b"][0]


def pack_record(double: Tensor, square: Tensor) -> Any:
    return Record(double, 2, [None, square])


def unpack_record(output: Any) -> tuple[Tensor, Tensor]:
    return output.hidden, output.parts[1]


def pack_model_output(double: Tensor, square: Tensor) -> Any:
    return BaseModelOutput(last_hidden_state=double, hidden_states=(square,))


def unpack_model_output(output: Any) -> tuple[Tensor, Tensor]:
    return output.last_hidden_state, output.hidden_states[0]


def unpack_pair(output: Pair) -> tuple[Tensor, Tensor]:
    return output.first, output.second


class Recurrent(Model):
    """An LSTM with a nested tuple as output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, (h, _) = self.lstm(self.stem(x))
        return out.square().sum() + h.sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        out, (h, c) = self.lstm(see("stem", "out", linear(self.stem, x)))
        out, h, _ = see("lstm", "out[0]", out), see("lstm", "out[1][0]", h), see("lstm", "out[1][1]", c)
        return out.square().sum() + h.sum()


class Packed(Model):
    """A GRU with packed sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        out, _ = self.gru(pack_sequence([y[:1], y], enforce_sorted=False))
        return out.data.square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        y = see("stem", "out", linear(self.stem, x))
        out, h = self.gru(pack_sequence([y, y[:1]]))
        assert isinstance(out, PackedSequence)
        data = see("gru", "out[0].data", out.data)
        see("gru", "out[1]", h.flip(1))
        return data.square().sum()


class Attention(Model):
    """An attention block with unused weights and a projection that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.attn(h, h, h)[0].square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("stem", "out", linear(self.stem, x))
        out, weights = self.attn(h, h, h)
        see("attn", "out[1]", weights)
        return see("attn", "out[0]", out).square().sum()


class Parametric(Model):
    """A module that returns a parameter and one that returns a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Holder(nn.Parameter(torch.ones(4)))
        self.offset = Holder(torch.full((4,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.stem(x) * self.weight() + self.offset()).square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("stem", "out", linear(self.stem, x))
        weight, offset = see("weight", "out", self.weight.held), see("offset", "out", self.offset.held)
        return (h * weight + offset).square().sum()


class Holder(nn.Module):
    """Returns the tensor that it holds."""

    held: Tensor

    def __init__(self, held: Tensor) -> None:
        super().__init__()
        if isinstance(held, nn.Parameter):
            self.held = held
        else:
            self.register_buffer("held", held)

    def forward(self) -> Tensor:
        return self.held


class Frozen(Plain):
    """A frozen stem, at which gradients end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())

    def reference(self, x: Tensor, see: See) -> Tensor:
        return super().reference(x.detach(), see)


class Whole(Model):
    """A module with integers, and one that changes its buffers and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.best = Best()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.embed(self.best(self.stem(x))) + x)).square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        best = see("best", "out", see("stem", "out", linear(self.stem, x)).argmax(1))
        h = see("embed", "out", F.embedding(best, self.embed.weight)) + x
        norm = self.norm
        h = F.batch_norm(h, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=True)
        return see("drop", "out", F.dropout(see("norm", "out", h), 0.5)).square().sum()


class Best(nn.Module):
    """Returns the index of the largest number."""

    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(1)


class Checkpointed(Model):
    """Two layers whose forward pass is repeated inside the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        out = checkpoint(self.block, self.stem(x), use_reentrant=self.use_reentrant)
        return out.square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("block.0", "out", linear(self.block[0], see("stem", "out", linear(self.stem, x))))
        return see("block", "out", see("block.1", "out", h.tanh())).square().sum()


class Complex(Model):
    """A module that returns complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fourier = Fourier()

    def forward(self, x: Tensor) -> Tensor:
        return self.fourier(self.stem(x)).abs().square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = fourier(see("stem", "out", linear(self.stem, x)))
        return see("fourier", "out", h).abs().square().sum()


def fourier(x: Tensor) -> Tensor:
    """Return the Fourier transform, which torch does not support for bfloat16."""
    return torch.fft.fft(x.to(torch.promote_types(x.dtype, torch.float32)))  # type: ignore[no-any-return]


class Fourier(nn.Module):
    """Returns the Fourier transform of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return fourier(x)


class Lazy(Model):
    """A layer whose parameters are created by the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x)).square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("stem", "out", linear(self.stem, x))
        if self.head.has_uninitialized_params():
            self.head.initialize_parameters(h)
        return see("head", "out", F.linear(h, self.head.weight, self.head.bias)).square().sum()


class Vectorised(Model):
    """Layers that are called inside torch.func transforms, where their inputs and outputs cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.mapped = nn.Linear(4, 4)
        self.sloped = nn.Linear(4, 4)
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.func.vmap(self.mapped)(self.stem(x))
        slope = torch.func.grad(lambda h: self.sloped(h).square().sum())(h)
        return self.act(slope).square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = torch.func.vmap(lambda h: linear(self.mapped, h))(see("stem", "out", linear(self.stem, x)))
        slope = torch.func.grad(lambda h: linear(self.sloped, h).square().sum())(h)
        return see("act", "out", slope.tanh()).square().sum()


class Force(Model):
    """A module whose output is a derivative, so that a backward pass runs inside the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = Slope()

    def forward(self, x: Tensor) -> Tensor:
        return self.slope(self.stem(x)).square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("stem", "out", linear(self.stem, x))
        y = see("slope.energy", "out", linear(self.slope.energy, h))
        return see("slope", "out", (2 * y) @ self.slope.energy.weight).square().sum()


class Slope(nn.Module):
    """Returns the derivative of an energy with respect to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(self.energy(x).square().sum(), x, create_graph=True)
        return slope


class Keywords(Model):
    """Modules that are called only with keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.blend = Blend()
        self.attn = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        mixed = self.blend(left=h, right=x, scale=2.0)
        return self.attn(query=h, key=mixed, value=mixed, need_weights=False)[0].square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("stem", "out", linear(self.stem, x))
        mixed = see("blend", "out", h * x * 2)
        return see("attn", "out[0]", self.attn(h, mixed, mixed, need_weights=False)[0]).square().sum()


class Blend(nn.Module):
    """Returns a product of its keyword arguments."""

    def forward(self, *, left: Tensor, right: Tensor, scale: float) -> Tensor:
        return left * right * scale


class Sometimes(Model):
    """A layer that is called only at every other step, starting with the first."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 4)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        self.steps += 1
        return (self.extra(h) if self.steps % 2 else h).square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("stem", "out", linear(self.stem, x))
        self.steps += 1
        return (see("extra", "out", linear(self.extra, h)) if self.steps % 2 else h).square().sum()


class Ungraded(Model):
    """A layer that is called without autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        with torch.no_grad():
            gate = self.gate(h)
        return (h * gate).square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("stem", "out", linear(self.stem, x))
        return (h * see("gate", "out", linear(self.gate, h).detach())).square().sum()


class Parametrized(Model):
    """A layer whose weight is computed by its own modules."""

    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.stem)

    def forward(self, x: Tensor) -> Tensor:
        return self.stem(x).square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        name = "stem.parametrizations.weight"
        length, direction = self.get_parameter(f"{name}.original0"), self.get_parameter(f"{name}.original1")
        weight = see(f"{name}.0", "out", length * direction / direction.norm(dim=1, keepdim=True))
        return see("stem", "out", F.linear(x, see(name, "out", weight), self.stem.bias)).square().sum()


class Tied(Model):
    """Two layers with one shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x).tanh()).square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("stem", "out", linear(self.stem, x)).tanh()
        return see("head", "out", linear(self.head, h)).square().sum()


class Cubed(torch.autograd.Function):
    """A function with two outputs, the third power and the negative, and a handwritten gradient."""

    @staticmethod
    def forward(ctx: Any, power: int, x: Tensor, note: str) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x**power, -x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, Tensor, None]:
        (x,) = ctx.saved_tensors
        return None, 3 * x.square() * grads[0] - grads[1], None


class Custom(Model):
    """A module with a custom autograd.Function that also takes arguments that are not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.cube = Cube()

    def forward(self, x: Tensor) -> Tensor:
        cube, negative = self.cube(self.stem(x))
        return (cube + negative).square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("stem", "out", linear(self.stem, x))
        return (see("cube", "out[0]", h * h * h) + see("cube", "out[1]", -h)).square().sum()


class Cube(nn.Module):
    """Calls the function."""

    def forward(self, x: Tensor) -> Any:
        return Cubed.apply(3, x, "note")  # type: ignore[no-untyped-call]  # torch is untyped here


class Unregistered(Model):
    """A module in a plain list, unknown to torch, that wraps a registered module."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()
        self.hidden = [nn.Sequential(self.act, nn.Softplus())]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](self.stem(x)).square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("act", "out", see("stem", "out", linear(self.stem, x)).tanh())
        return F.softplus(h).square().sum()


MODELS: dict[str, Callable[[], Model]] = {
    "single": Single,
    "plain": Plain,
    "in-place": InPlace,
    "residual": Residual,
    "views": Views,
    "base of a view": Base,
    "repeated": Repeated,
    "shared": Shared,
    "identity": Through,
    "dict": lambda: Nested(pack_dict, unpack_dict, ["out.a", "out.b[0]"]),
    "dataclass": lambda: Nested(pack_record, unpack_record, ["out.hidden", "out.parts[1]"]),
    "namedtuple": lambda: Nested(Pair, unpack_pair, ["out.first", "out.second"]),
    "model output": lambda: Nested(
        pack_model_output, unpack_model_output, ["out.last_hidden_state", "out.hidden_states[0]"]
    ),
    "lstm": Recurrent,
    "packed": Packed,
    "attention": Attention,
    "parameter": Parametric,
    "frozen": Frozen,
    "whole numbers": Whole,
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(use_reentrant=True),
    "complex": Complex,
    "lazy": Lazy,
    "vmap": Vectorised,
    "force": Force,
    "keywords": Keywords,
    "sometimes": Sometimes,
    "no_grad": Ungraded,
    "parametrized": Parametrized,
    "tied": Tied,
    "custom function": Custom,
    "unregistered": Unregistered,
}


class Precision(NamedTuple):
    """The dtype of a model and its tolerances relative to a slower computation."""

    dtype: torch.dtype
    autocast: bool
    rtol: float
    atol: float

    def forward(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return the loss."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return module(x)  # type: ignore[no-any-return]

    def reference(self, module: Model, x: Tensor, see: See) -> Tensor:
        """Return the loss, computed in the second way."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return module.reference(x, see)


PRECISIONS = {
    "float32": Precision(torch.float32, False, 1e-5, 1e-6),
    "bfloat16": Precision(torch.bfloat16, False, 5e-2, 5e-2),
    "autocast": Precision(torch.float32, True, 5e-2, 5e-2),
}


each_model = pytest.mark.parametrize("name", MODELS)
each_precision = pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)


def make(name: str, dtype: torch.dtype = torch.float32) -> tuple[Model, Tensor]:
    """Return the named model and a batch that requires gradients, the same for every call."""
    torch.manual_seed(0)
    module = MODELS[name]()
    return module.to(dtype), torch.randn(3, 4).to(dtype).requires_grad_()
