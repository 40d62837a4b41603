"""The callbacks with ``pytorch_lightning``, the other package of Lightning, whose classes are different."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder import (
    ActivationRecorder,
    ArgumentError,
    GradientRecorder,
    GraphRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    RecorderWarning,
    Schedule,
    SelectionError,
    read_dump,
)
from lightning_recorder.schedule import Reduce
from lightning_recorder.taps import Site
from tests.callbacks.models import digits, hooks_left

pl: Any = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
callbacks_of_pl: Any = pytest.importorskip("pytorch_lightning.callbacks")
loggers_of_pl: Any = pytest.importorskip("pytorch_lightning.loggers")

GROUPS = ["activations", "gradients", "parameters"]
Module: Any = pl.LightningModule


class Net(Module):  # type: ignore[misc]  # from an optional package
    """Two layers with dropout in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(64, 8), nn.Dropout(0.2), nn.Linear(8, 10)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(self.dropout(F.relu(self.first(x.flatten(1)))))
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.detach().clone())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self(batch[0])

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits: Tensor = self(batch[0])
        return logits

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


LAYERS = ["first", "dropout", "second"]


def make_trainer(folder: Path, callbacks: Sequence[Any], **options: Any) -> Any:
    """Return a silent trainer of the other package."""
    pl.seed_everything(5, verbose=False)
    options = {"max_epochs": 1, "log_every_n_steps": 2, "enable_checkpointing": False, **options}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(default_root_dir=folder, accelerator="cpu", callbacks=list(callbacks), **quiet, **options)


def fit(model: Any, folder: Path, callbacks: Sequence[Any], **options: Any) -> Any:
    path = options.pop("ckpt_path", None)
    trainer = make_trainer(folder, callbacks, **options)
    trainer.fit(model, digits(), digits(2), ckpt_path=path)
    return trainer


def recorders(sink: MemorySink | None = None, reduce: Reduce = "step", *, pictures: bool = True) -> list[Any]:
    """Return all callbacks, recording every step."""
    options: dict[str, Any] = {"every_n_train_steps": 1, "reduce": reduce, "strict": True}
    options["outputs"] = Outputs(plots=pictures)
    options["statistics"] = ["count", "mean"]
    options["sinks"] = [] if sink is None else [sink]
    kinds: list[Any] = [ActivationRecorder, GradientRecorder, ParameterRecorder]
    graph = GraphRecorder(strict=True) if pictures else GraphRecorder(formats=(), strict=True)
    return [graph, *(kind(**options) for kind in kinds)]


def test_all_callbacks_record(tmp_path: Path) -> None:
    """Every callback has its records, on the axis of ``self.log``, and its files beside the logs."""
    sink = MemorySink()
    callbacks = recorders(sink)
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecorderWarning)
        trainer = fit(model, tmp_path, callbacks)
    for group, path in zip(GROUPS, ("", "", "/weight"), strict=True):
        assert list(sink.scalars[f"{group}/second{path}/mean"]) == list(range(6))
    tags = {tag.split("/")[1] for tag in sink.scalars if tag.startswith("activations/")}
    assert tags - {"cross_entropy", "mse_loss", "relu"} == set(LAYERS)
    folder = Path(str(trainer.log_dir)) / "recorder"
    assert {"graph.json", "graph.dot", "graph.svg", "graph.png", "receipt.json"} <= {
        each.name for each in folder.iterdir()
    }
    names = {node["name"] for node in json.loads((folder / "graph.json").read_text())["nodes"]}
    assert set(LAYERS) <= names
    assert hooks_left(model) == []


def test_the_loggers_of_the_other_package_are_served(tmp_path: Path) -> None:
    """Its TensorBoard logger has scalars, histograms and the picture; its CSV logger has the scalars."""
    board, table = loggers_of_pl.TensorBoardLogger(tmp_path / "board"), loggers_of_pl.CSVLogger(tmp_path / "table")
    fit(Net(), tmp_path, recorders(), logger=[board, table])
    read = EventAccumulator(f"{board.log_dir}/recorder", size_guidance={"scalars": 0, "histograms": 0, "images": 0})
    read.Reload()
    assert [event.step for event in read.Scalars("z_recorder/activations/second/mean")] == list(range(6))
    assert [event.step for event in read.Histograms("z_recorder/gradients/second/histogram")] == list(range(6))
    assert [event.step for event in read.Scalars("z_recorder/parameters/second/weight/update_ratio")] == list(range(6))
    own = EventAccumulator(str(board.log_dir))
    own.Reload()
    assert [event.step for event in own.Scalars("train_loss")] == [1, 3, 5]
    assert [event.step for event in read.Images("z_recorder/graph")] == [0]
    header, *rows = Path(str(table.log_dir), "recorder", "metrics.csv").read_text().splitlines()
    column = header.split(",").index("activations/second/mean")
    assert sum(bool(row.split(",")[column]) for row in rows) == 6


@pytest.mark.parametrize("kind", ["TensorBoardLogger", "CSVLogger"])
def test_no_histogram_is_lost(kind: str, tmp_path: Path) -> None:
    """The records have every histogram, whether its logger shows them or not, and no other file repeats them."""
    trainer = fit(Net(), tmp_path, recorders(), logger=getattr(loggers_of_pl, kind)(tmp_path))
    folder = Path(str(trainer.log_dir)) / "recorder"
    assert sorted(path.name for path in folder.glob("records/*")) == [f"{group}.jsonl" for group in (*GROUPS, "watch")]
    assert list(folder.glob("*.jsonl")) == []


def test_dumps_lie_beside_its_checkpoints(tmp_path: Path) -> None:
    """Each checkpoint has a dump of the latest record, which is removed with it."""
    kept = callbacks_of_pl.ModelCheckpoint(tmp_path / "kept", save_top_k=1)
    callbacks = recorders()
    fit(Net(), tmp_path, [*callbacks, kept], enable_checkpointing=True, max_epochs=2)
    names = sorted(path.name for path in (tmp_path / "kept").glob("*.safetensors"))
    assert names == [f"epoch=1-step=12.{group}.safetensors" for group in GROUPS]
    dump = read_dump(tmp_path / "kept" / names[0])
    assert dump.about["step"] == "11"
    latest = callbacks[1].latest[Site("second", "out")]
    assert float(dump.tensors["second/mean"]) == latest.scalars["mean"]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("reduce", ["step", 5, "epoch"])
def test_a_run_resumes_from_a_checkpoint(reduce: Reduce, tmp_path: Path) -> None:
    """A run interrupted in a window and its resumed run together record the same as one run."""
    whole, parts = MemorySink(), MemorySink()
    fit(Net(), tmp_path / "whole", recorders(whole, reduce, pictures=False), max_steps=9, max_epochs=2)
    for sink, steps in ((None, 4), (parts, 9)):
        options: dict[str, Any] = {"max_steps": steps}
        kept = callbacks_of_pl.ModelCheckpoint(tmp_path / "kept", every_n_train_steps=3, save_top_k=-1)
        options |= {} if sink is None else {"ckpt_path": tmp_path / "kept" / "epoch=0-step=3.ckpt"}
        fit(
            Net(),
            tmp_path / "part",
            [*recorders(sink, reduce, pictures=False), kept],
            max_epochs=2,
            enable_checkpointing=True,
            **options,
        )
    assert set(parts.scalars) == set(whole.scalars)
    for tag, values in whole.scalars.items():
        rest = {step: value for step, value in values.items() if step >= 3}
        assert list(parts.scalars[tag]) == list(rest)
        if tag.endswith("/count"):
            assert parts.scalars[tag] == rest


def test_training_is_bitwise_the_same(tmp_path: Path) -> None:
    """Losses, parameters and random numbers are those of a run without callbacks."""
    found = []
    for callbacks in ([], recorders()):
        pl.seed_everything(3, verbose=False)
        model = Net()
        fit(model, tmp_path / str(len(callbacks)), callbacks, max_epochs=2)
        found.append(([each.item() for each in model.losses], model.state_dict(), torch.get_rng_state()))
    (losses, state, numbers), (other_losses, other_state, other_numbers) = found
    assert other_losses == losses
    assert all(torch.equal(other_state[name], value) for name, value in state.items())
    assert torch.equal(numbers, other_numbers)


@pytest.mark.parametrize("function", ["validate", "test", "predict"])
def test_evaluations_are_recorded(function: str, tmp_path: Path) -> None:
    """All batches of an evaluation by its trainer are one record."""
    sink = MemorySink()
    recorder = ActivationRecorder(
        "second", schedule=Schedule(stages=function), statistics="count", strict=True, sinks=[sink]
    )
    trainer = make_trainer(tmp_path, [recorder], logger=False)
    getattr(trainer, function)(Net(), digits(2), **({} if function == "predict" else {"verbose": False}))
    assert sink.scalars == {f"activations_{function}/second/count": {0: 160.0}}


def test_a_compiled_model_is_recorded(tmp_path: Path) -> None:
    """A compiled submodule is recorded eagerly under its own name."""
    model = Net()
    model.first.compile(backend="eager")
    sink = MemorySink()
    fit(model, tmp_path, recorders(sink), logger=False)
    assert list(sink.scalars["activations/first/mean"]) == list(range(6))


@pytest.mark.parametrize("kind", [ActivationRecorder, GradientRecorder, ParameterRecorder])
def test_a_name_that_matches_nothing_raises(kind: Any, tmp_path: Path) -> None:
    """A selection without a match ends the fit before the first step with the closest names."""
    model = Net()
    with pytest.raises(SelectionError, match=r"no module matches 'frist'.*'first'"):
        fit(model, tmp_path, [kind("frist")], logger=False)
    assert model.losses == []


def test_the_example_of_the_module_is_used(tmp_path: Path) -> None:
    """``stage="example"`` uses the module's example, and raises an error that names it if it is missing."""
    with pytest.raises(ArgumentError, match=r"needs Net\.example_input_array"):
        fit(Net(), tmp_path, [GraphRecorder(stage="example")], logger=False)
    model = Net()
    model.example_input_array = torch.zeros(1, 1, 8, 8)
    recorder = GraphRecorder(stage="example", strict=True)
    fit(model, tmp_path, [recorder], logger=False)
    assert recorder.graph is not None
    assert set(LAYERS) <= {node.name for node in recorder.graph.nodes}


def test_an_error_of_the_model_comes_through(tmp_path: Path) -> None:
    """An error of the model in a recorded step propagates from the fit, and no hook is left."""

    class Failing(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self(batch[0])
            raise ZeroDivisionError("the model's own")

    model = Failing()
    with pytest.raises(ZeroDivisionError, match="the model's own"):
        fit(model, tmp_path, recorders(), logger=False)
    assert hooks_left(model) == []
