"""Modules of every kind that a tap meets, each with a second way to compute what the tap should see.

``forward`` is what is tapped. ``reference`` computes the same loss with functions instead of submodules and without
in-place operations, and shows each tensor that a submodule would have given, in the order of the calls. The gradient
that a tap should see is then what ``torch.autograd.grad`` gives for the tensor that was shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

See = Callable[[str, str, Tensor], Tensor]
"""Shows the tensor at a path of the output of the module of that name, and gives it back."""


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """What the linear layer gives, without calling it."""
    assert isinstance(module, nn.Linear)
    return F.linear(x, module.weight, module.bias)


class Model(nn.Module):
    """A model from a batch ``[3, 4]`` to a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)

    def reference(self, x: Tensor, see: See) -> Tensor:
        """The loss, computed in the other way."""
        raise NotImplementedError


class Plain(Model):
    """Layers one after another."""

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
    """In-place operations, by a module and by hand, behind and on the outputs of others."""

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
    """A branch around some layers, one of which works in place."""

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
    """Pieces of one output, some of them unused."""

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
    """Gives both halves of its input, as views."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.chunk(2, dim=1))


class Rows(nn.Module):
    """Gives each row of its input, as views."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.unbind())


class Base(Model):
    """An in-place operation on a tensor of which a module gave a view before."""

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
        see("view", "out", h[:, :2])  # what the loss is computed from is a later value of the same memory
        return (h * 2)[:, :2].square().sum()


class View(nn.Module):
    """Gives two columns of its input, as a view."""

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
    """A module that gives its input back, where the input is used beside it."""

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
    """Two tensors by name."""

    first: Tensor
    second: Tensor


@dataclass
class Record:
    """A tensor and some other things."""

    hidden: Tensor
    steps: int
    parts: list[Tensor | None]


class Nest(nn.Module):
    """Gives the double and the square of its input in a container."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(x * 2, x.square())


class Nested(Model):
    """A container as output, of which both tensors are used."""

    def __init__(
        self, pack: Callable[[Tensor, Tensor], Any], unpack: Callable[[Any], tuple[Tensor, Tensor]], paths: list[str]
    ) -> None:
        super().__init__()
        self.nest = Nest(pack)
        self.unpack = unpack
        self.paths = paths

    def forward(self, x: Tensor) -> Tensor:
        double, square = self.unpack(self.nest(self.stem(x)))
        return (double * 3 + square.square()).sum()

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = see("stem", "out", linear(self.stem, x))
        double, square = (see("nest", path, part) for path, part in zip(self.paths, (h * 2, h.square()), strict=True))
        return (double * 3 + square.square()).sum()


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
    """An LSTM, whose output is a nested tuple."""

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
    """A GRU over packed sequences of different lengths."""

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
    """An attention block, whose weights nobody uses and whose projection nobody calls."""

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
    """A module that gives a parameter and one that gives a buffer."""

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
    """Gives what it holds."""

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
    """A stem that is not trained, so that its output has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)


class Whole(Model):
    """A module of integers and one that changes its buffers and draws random numbers."""

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
    """Gives the place of the largest number."""

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


class Cast(Plain):
    """Layers in bfloat16 by autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)

    def reference(self, x: Tensor, see: See) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().reference(x, see)


class Complex(Model):
    """A module that gives complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fourier = Fourier()

    def forward(self, x: Tensor) -> Tensor:
        return self.fourier(self.stem(x)).abs().square().sum()  # type: ignore[no-any-return]

    def reference(self, x: Tensor, see: See) -> Tensor:
        h = torch.fft.fft(see("stem", "out", linear(self.stem, x)))
        return see("fourier", "out", h).abs().square().sum()


class Fourier(nn.Module):
    """Gives the Fourier transform of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], Model]] = {
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
    "autocast": Cast,
    "complex": Complex,
}


def make(name: str) -> tuple[Model, Tensor]:
    """The model of that name and a batch for it, always the same."""
    torch.manual_seed(0)
    return MODELS[name](), torch.randn(3, 4)
