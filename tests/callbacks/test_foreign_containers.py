"""Containers whose own code draws random numbers or raises change no training, and cost no other module its record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_recorder import default_recorders, open_recording


class Drawing(list[Tensor]):
    """A list that draws when it is iterated."""

    @override
    def __iter__(self) -> Iterator[Tensor]:
        torch.randn(1)
        return super().__iter__()


class DrawingDict(dict[str, Tensor]):
    """A dictionary that draws when it is read."""

    @override
    def items(self) -> Any:
        torch.randn(1)
        return super().items()


class Other(Mapping[str, Tensor]):
    """A mapping that is no dictionary and draws when it is iterated."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    @override
    def __getitem__(self, key: str) -> Tensor:
        return self.value

    @override
    def __iter__(self) -> Iterator[str]:
        torch.randn(1)
        return iter(["y"])

    @override
    def __len__(self) -> int:
        return 1


class Broken(Other):
    """A mapping that cannot be iterated."""

    @override
    def __iter__(self) -> Iterator[str]:
        raise KeyError("foreign")


class Key:
    """A key that draws when it is printed."""

    @override
    def __repr__(self) -> str:
        torch.randn(1)
        return "key"


@dataclass
class Fields:
    """A dataclass that draws when an attribute is read."""

    y: Tensor

    @override
    def __getattribute__(self, name: str) -> Any:
        if name == "y":
            torch.randn(1)
        return object.__getattribute__(self, name)


class Gives(nn.Module):
    """Return the output of a layer in a container."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))  # owns a parameter, so that it is recorded
        self.wrap = wrap

    @override
    def forward(self, x: Tensor) -> Any:
        return self.wrap(x * self.weight)


class Takes(nn.Module):
    """Return the tensor of a container."""

    def __init__(self, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.read = read

    @override
    def forward(self, container: Any) -> Tensor:
        return self.read(container) + 1


class Net(LightningModule):
    """Modules that pass on each kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(Gives(lambda y: Drawing([y])), Takes(lambda each: each[0])),
            *(Gives(lambda y: DrawingDict(y=y)), Takes(lambda each: each["y"])),
            *(Gives(Other), Takes(lambda each: each["y"])),
            *(Gives(Broken), Takes(lambda each: each["y"])),
            *(Gives(lambda y: {Key(): y}), Takes(lambda each: next(iter(each.values())))),
            *(Gives(Fields), Takes(lambda each: object.__getattribute__(each, "y"))),
        )
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(4, 1)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.head(self.drop(self.body(batch))).square().mean()
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-4)


def trained(folder: Path, *recorders: Any) -> dict[str, Tensor]:
    """Return the parameters after a few steps, and the next random number."""
    seed_everything(0, verbose=False)
    net, logger = Net(), CSVLogger(folder)
    options: dict[str, Any] = {"enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_steps=3, accelerator="cpu", logger=logger, callbacks=list(recorders), **options)
    trainer.fit(net, DataLoader(torch.ones(12, 4), 4))  # type: ignore[arg-type]  # a tensor is a data set
    return {**net.state_dict(), "next": torch.rand(1)}


def test_containers_with_code_of_their_own_change_nothing(tmp_path: Path) -> None:
    """Training is bitwise equal; a container that raises costs its own output only, and the graph stays complete."""
    bare, recorded = trained(tmp_path / "bare"), trained(tmp_path, *default_recorders(every_n_train_steps=1))
    assert {name: torch.equal(each, bare[name]) for name, each in recorded.items()} == dict.fromkeys(bare, True)

    record = open_recording(tmp_path)
    modules = {f"body.{place}" for place in range(12)} | {"drop", "head"}
    assert {name for name, _ in record["activations"]} == (modules - {"body.6"}) | {""}  # the batch
    assert record.graph is not None
    called = {node.name for node in record.graph.nodes if node.kind == "module"}
    assert called >= modules
