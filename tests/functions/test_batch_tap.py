"""The tensors of a batch are sites, under the names that a recorded graph gives them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_recorder import ActivationRecorder, GraphRecorder, Outputs
from lightning_recorder.functions import FUNCTIONS, BatchTap, ChosenFunctions
from lightning_recorder.graph import GraphCapture
from lightning_recorder.insight.unusual import are_of_losses
from lightning_recorder.recordings import SiteSeries, open_recording
from lightning_recorder.taps import Site

NET = nn.Linear(3, 2)
PLAIN = {"image": torch.arange(12.0).view(4, 3), "label": torch.tensor([0, 1, 1, 0])}


def recorded(batch: Any, functions: Any = FUNCTIONS, **options: Any) -> Mapping[str, Tensor]:
    """Return the recorded tensors of a batch by the path of their site."""
    found: dict[str, Tensor] = {}

    def receive(site: Site, tensor: Tensor) -> None:
        assert site.name == ""
        found[site.path] = tensor.clone()

    with BatchTap(ChosenFunctions(NET, functions, **options), receive, strict=True) as tap:
        tap.observe(batch)
    return found


@pytest.mark.parametrize(
    "batch", [PLAIN, [*PLAIN.values()], (PLAIN, "text", [PLAIN["image"] + 1, None]), PLAIN["image"]]
)
def test_names_are_those_of_the_graph(batch: Any) -> None:
    """A recorded graph has an input node of the same name for each tensor of a batch."""
    with GraphCapture(NET, batch, name="batch") as capture:
        NET(PLAIN["image"])
    assert [*recorded(batch)] == [node.name for node in capture.graph().nodes if node.kind == "input"]


def test_a_tensor_that_a_batch_has_twice_is_recorded_once() -> None:
    """Tokens that are also the labels are one input."""
    assert [*recorded({"tokens": PLAIN["label"], "labels": PLAIN["label"]})] == ["batch.tokens"]


@pytest.mark.parametrize(
    ("functions", "options", "expected"),
    [
        (FUNCTIONS, {"exclude": ["batch.label"]}, ["batch.image"]),
        (FUNCTIONS, {"names": ["**.relu"]}, []),
        (FUNCTIONS, {"types": ["ReLU"]}, []),
        (["relu"], {}, []),
    ],
)
def test_batches_are_chosen_with_the_losses(functions: Any, options: Any, expected: list[str]) -> None:
    """Batches are recorded with all losses, unless sites are named; ``exclude`` leaves single tensors out."""
    assert [*recorded(PLAIN, functions, **options)] == expected


def test_large_and_numerous_tensors_are_bounded() -> None:
    """The first samples of a large tensor are recorded, and 16 tensors of a batch."""
    assert len(recorded([torch.zeros(1)] * 3 + [torch.zeros(1) for _ in range(40)])) == 16
    found = recorded([torch.zeros(5 << 20), torch.zeros(64, 1 << 15)])
    assert [len(tensor) for tensor in found.values()] == [1 << 20, 32]


class Wrapper(Tensor):
    """A tensor that holds its values in another one."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        made: Any = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares the default, which is disabled
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        values = tree_map(lambda each: each.held if isinstance(each, Wrapper) else each, args)
        return func(*values, **(kwargs or {}))


class Named(Tensor):
    """A tensor of a class of its own, whose functions fail."""

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("not here")


def test_tensors_of_other_classes() -> None:
    """The values of a subclass are read without its methods; a class that computes its operations is left out."""
    named = torch.ones(3).as_subclass(Named)
    assert [*recorded([Wrapper(torch.ones(3)), named, torch.ones(2)])] == ["batch[1]", "batch[2]"]


class Net(LightningModule):
    """A classifier of batches that are dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(batch["image"]), batch["label"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_run_has_batches_and_classes(tmp_path: Path) -> None:
    """Accumulated batches are merged; the file has the classes; no layer is compared with the data."""
    rows: Any = [{name: each[row] for name, each in PLAIN.items()} for row in range(4)]
    recorder = ActivationRecorder(every_n_train_steps=1, strict=True, outputs=Outputs(plots=False))
    graph = GraphRecorder(formats=(), strict=True)
    trainer = Trainer(
        max_steps=2,
        max_epochs=-1,
        accumulate_grad_batches=2,
        callbacks=[recorder, graph],
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
    )
    trainer.fit(Net(), DataLoader(rows, batch_size=2))
    latest = recorder.latest
    assert latest[Site("", "batch.image")].scalars["mean"] == 5.5
    assert latest[Site("cross_entropy", "in.target.classes")].classes == {0: 2, 1: 2}
    sites = tuple(latest)
    assert [site for site, is_data in zip(sites, are_of_losses(sites).tolist(), strict=True) if not is_data] == [
        Site("head", "out")
    ]
    series = open_recording(tmp_path)["activations"]
    assert series["batch.label"].statistic("max").tolist() == [1.0, 1.0]
    assert SiteSeries(series, Site("cross_entropy", "in.target.classes")).classes(1) == {0: 2, 1: 2}
