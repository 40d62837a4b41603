"""Small nets of many kinds, and faults planted at one call of one of their modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["NETS", "Planted", "batches", "plant"]

WIDTH = 12
BATCHES = 8


class Shared(nn.Module):
    """Calls one activation and one layer several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.act = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        for _ in range(3):
            x = x + self.act(self.middle(x))
        return x


class Convolutions(nn.Module):
    """Convolutions with batch normalization, an in-place activation and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.relu, self.conv = nn.ReLU(inplace=True), nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.relu(self.norm(self.stem(x.unsqueeze(1))))
        out: Tensor = (hidden + self.conv(hidden)).mean(1)
        return out


class Attention(nn.Module):
    """A causal transformer layer with dropout; its mask has infinities at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.norm, self.feed, self.out = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.GELU()), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x.unsqueeze(-1))
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        hidden = self.norm(hidden + self.attention(hidden, hidden, hidden, attn_mask=mask)[0])
        out: Tensor = self.out(self.feed(hidden)).squeeze(-1)
        return out


class Masked(nn.Module):
    """Attention scores written by hand, with masked_fill of minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(1, 4) for _ in range(3))
        self.scores, self.out = nn.Identity(), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(-1)
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = self.scores(scores.masked_fill(hidden, float("-inf"))).softmax(-1)
        out: Tensor = self.out(weights @ self.value(x)).squeeze(-1)
        return out


class Recurrent(nn.Module):
    """An LSTM cell called at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(3, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, memory = x.new_zeros(len(x), 6), x.new_zeros(len(x), 6)
        outputs = []
        for part in x.chunk(4, 1):
            hidden, memory = self.cell(part, (hidden, memory))
            outputs.append(self.out(hidden))
        return torch.cat(outputs, 1)


class Checkpointed(nn.Module):
    """Two checkpointed blocks."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:  # the batch requires no gradient, the output of the stem does
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Reentrant(Checkpointed):
    """The same with reentrant checkpointing."""

    reentrant = True


class Branches(nn.Module):
    """Two branches that are joined, one of them with a spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(WIDTH, 8), nn.SiLU())
        self.right = nn.Sequential(spectral_norm(nn.Linear(WIDTH, 8)), nn.Softplus())
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(torch.cat([self.left(x), self.right(x)], 1)))
        return out


class Dictionary(nn.Module):
    """Modules that return dictionaries and tuples."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"sum": self.one(x) + self.other(x), "parts": (self.one(x), None)}

    def __init__(self) -> None:
        super().__init__()
        self.two, self.act = self.Two(), nn.ELU()

    def forward(self, x: Tensor) -> Tensor:
        found = self.two(x)
        out: Tensor = self.act(found["sum"]) + found["parts"][0]
        return out


class Embedded(nn.Module):
    """An embedding of rounded inputs, and a tied output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(8, 8), nn.GroupNorm(2, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        words = (x * 3).long().clamp(0, 7)
        out: Tensor = self.head(self.norm(self.embed(words).mean(1)))
        return F.pad(out, (0, WIDTH - 8))


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, WIDTH)),
    "deep": lambda: nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]),
    **{
        kind.__name__.lower(): kind
        for kind in (
            Shared,
            Convolutions,
            Attention,
            Masked,
            Recurrent,
            Checkpointed,
            Reentrant,
            Branches,
            Dictionary,
            Embedded,
        )
    },
}


class Planted(LightningModule):
    """A regression with a net, whose faults depend on the batch.

    Args:
        kind: The name of the net.
        at: The batch with the fault.
    """

    def __init__(self, kind: str = "mlp", at: int = 5) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(4)
        self.net = NETS[kind]()
        self.at = at
        self.is_due = False
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.is_due = batch_idx == self.at and self.current_epoch == 0
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.detach())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def batches(count: int = BATCHES) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.rand(count * 4, WIDTH, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.flip(1) * 0.5), batch_size=4)


def calls(model: Planted) -> dict[str, int]:
    """Return the number of calls of each module of the net in a step."""
    found: dict[str, int] = {}
    handles = [
        module.register_forward_hook(lambda *_, name=name: found.update({name: found.get(name, 0) + 1}))
        for name, module in model.named_modules()
        if name
    ]
    with torch.random.fork_rng():
        model.net(next(iter(batches()))[0])
    for handle in handles:
        handle.remove()
    return found


def plant(model: Planted, name: str, call: int, value: float, *, backward: bool, root: bool = False) -> None:
    """Plant a value in the output of a call of a module, or in the gradient of that output.

    With ``root``, the output is that of the module plus the square root of zero, whose gradient is infinite.
    """
    count, total = 0, calls(model)[name]

    def begin(module: nn.Module, args: Any) -> None:
        nonlocal count
        count = 0

    def spoil(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal count
        count += 1
        # Checkpointing repeats the calls in the backward pass.
        if not model.is_due or (count - 1) % total + 1 != call:
            return None
        if root:
            return changed(output, lambda tensor: tensor + (tensor * value).sqrt())
        return changed(output, with_bad_gradient if backward else lambda tensor: tensor * value)

    def with_bad_gradient(tensor: Tensor) -> Tensor:
        # A tensor of the module's own, since a container returns the output of its last child.
        own = tensor * 1.0
        if own.requires_grad:
            own.register_hook(lambda grad: grad * value)
        return own

    # The counter begins with each run of the net, so a second run of a step has the fault again.
    model.net.register_forward_pre_hook(begin)
    model.get_submodule(name).register_forward_hook(spoil)


def changed(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return an output with its first tensor changed."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, dict):
        first = next(iter(output))
        return {**output, first: changed(output[first], change)}
    return (changed(output[0], change), *output[1:])
