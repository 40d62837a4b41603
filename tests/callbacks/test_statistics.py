"""The schedule of the statistics callbacks, and their output in loggers, files and dumps."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder import (
    ActivationRecorder,
    ArgumentError,
    GradientRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    RecorderWarning,
    SelectionError,
    default_recorders,
    open_recording,
    read_dump,
    read_manifest,
)
from lightning_recorder.outputs import pipeline
from lightning_recorder.reductions import ChannelMoments, Extrema, Norms
from lightning_recorder.taps import Site
from tests.callbacks.models import LEAVES, Classifier, digits, events, fit, hooks_left


def steps_of(sink: MemorySink, tag: str) -> list[int]:
    return list(sink.scalars[tag])


def test_leaf_modules_are_recorded_by_default(tmp_path: Path) -> None:
    """Without arguments, every leaf module that ran has a record, under its name and in module order."""
    sink = MemorySink()
    fit(Classifier(), tmp_path, [ActivationRecorder(sinks=[sink], functions=False)], logger=False)
    names = list(dict.fromkeys(tag.split("/")[1] for tag in sink.scalars))
    assert names == LEAVES
    assert set(sink.histograms) == {f"activations/{name}/histogram" for name in LEAVES}


def test_default_cadence_is_that_of_self_log(tmp_path: Path) -> None:
    """The first step is recorded, and then the steps at which ``self.log`` logs, on the same axis."""
    trainer = fit(Classifier(), tmp_path, [ActivationRecorder()], max_epochs=2, log_every_n_steps=4)
    read = events(trainer)
    own = [event.step for event in events(trainer, ".").Scalars("train_loss")]
    ours = [event.step for event in read.Scalars("z_recorder/activations/head/rms")]
    assert own == [3, 7, 11]
    assert ours == [0, *own]


def test_every_n_train_steps_sets_the_cadence(tmp_path: Path) -> None:
    """``every_n_train_steps`` overrides the trainer's own interval."""
    sink = MemorySink()
    fit(Classifier(), tmp_path, [ActivationRecorder(every_n_train_steps=5, sinks=[sink])], logger=False)
    assert steps_of(sink, "activations/head/rms") == [0, 4]


def test_no_logging_cadence_records_nothing(tmp_path: Path) -> None:
    """An interval of 0 records nothing, as it logs nothing."""
    sink = MemorySink()
    fit(Classifier(), tmp_path, [ActivationRecorder(every_n_train_steps=0, sinks=[sink])], logger=False)
    assert not sink.scalars


def test_hooks_are_on_sampled_steps_alone(tmp_path: Path) -> None:
    """On an unrecorded step, the model has no hook of this package."""
    hooked: list[bool] = []

    class Coverage(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            hooked.append(bool(hooks_left(self)))
            return super().training_step(batch, batch_idx)

    fit(Coverage(), tmp_path, [ActivationRecorder(every_n_train_steps=3), GradientRecorder(every_n_train_steps=3)])
    assert hooked == [True, False, True, False, False, True]


def test_between_recorded_steps_nothing_is_recorded(tmp_path: Path) -> None:
    """If every step is recorded, calls between two steps, including the validation, count for neither."""

    class Busy(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            pl_module(torch.randn(100, 1, 8, 8)).sum().backward()
            pl_module.zero_grad()

    counts: dict[bool, Any] = {}
    for busy in (False, True):
        sink = MemorySink()
        kinds = (ActivationRecorder, GradientRecorder)
        options: dict[str, Any] = {"every_n_train_steps": 1, "statistics": "count", "functions": False}
        recorders = [kind(sinks=[sink], **options) for kind in kinds]
        model = Classifier()
        fit(model, tmp_path / str(busy), [*recorders, *([Busy()] if busy else [])], logger=False)
        counts[busy] = sink.scalars
        assert hooks_left(model) == []
    assert counts[True] == counts[False]
    assert len(counts[True]) == 2 * len(LEAVES)


def test_activations_are_those_of_the_step(tmp_path: Path) -> None:
    """The statistics equal those of the step's logits, computed in one float64 pass."""
    seen: list[Tensor] = []

    class Kept(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            if self.training:
                seen.append(logits.detach().double())
            return logits

    sink = MemorySink()
    recorder = ActivationRecorder("head", every_n_train_steps=1, sinks=[sink], outputs=Outputs(curves="all"))
    fit(Kept(), tmp_path, [recorder], logger=False)
    for step, logits in enumerate(seen):
        expected = {
            "mean": logits.mean(),
            "std": logits.std(correction=0),
            "rms": logits.square().mean().sqrt(),
            "min": logits.min(),
            "max": logits.max(),
            "zero_fraction": (logits == 0).double().mean(),
        }
        for statistic, value in expected.items():
            assert sink.scalars[f"activations/head/{statistic}"][step] == pytest.approx(float(value), rel=1e-12)
        assert sink.histograms["activations/head/histogram"][step].count == logits.numel()


def test_gradients_are_those_of_the_returned_loss(tmp_path: Path) -> None:
    """The gradient of the logits is (softmax - target) / batch size, with any accumulation."""
    expected: list[Tensor] = []

    class Kept(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            logits = self(batch[0])
            grad = (F.softmax(logits, 1) - F.one_hot(batch[1], 10)) / len(batch[0])
            expected.append(grad.detach().double())
            return F.cross_entropy(logits, batch[1])

    sink = MemorySink()
    callbacks = [GradientRecorder("head", every_n_train_steps=1, sinks=[sink])]
    fit(Kept(), tmp_path, callbacks, logger=False, accumulate_grad_batches=3)
    # Six batches are two optimizer steps of three batches each.
    assert steps_of(sink, "gradients/head/rms") == [0, 1]
    for step in (0, 1):
        grads = torch.cat(expected[3 * step : 3 * step + 3])
        assert sink.scalars["gradients/head/rms"][step] == pytest.approx(float(grads.square().mean().sqrt()), rel=1e-5)
        assert sink.histograms["gradients/head/histogram"][step].count == grads.numel()


def test_all_accumulated_batches_of_a_recorded_step_count(tmp_path: Path) -> None:
    """A recorded optimizer step includes all of its batches, and an unrecorded step none."""
    sink = MemorySink()
    callbacks = [ActivationRecorder("head", every_n_train_steps=2, statistics=["count"], sinks=[sink])]
    fit(Classifier(), tmp_path, callbacks, logger=False, accumulate_grad_batches=2)
    # Three optimizer steps; the first and the second are recorded, with 2 batches × 8 rows × 10 logits each.
    assert sink.scalars["activations/head/count"] == {0: 160.0, 1: 160.0}


def test_a_loss_scale_is_removed_from_the_gradients(tmp_path: Path) -> None:
    """Gradients under a ``GradScaler`` are divided by its scale, so they equal those without one."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    sinks = {"plain": MemorySink(), "scaled": MemorySink()}
    for name, sink in sinks.items():
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)] if name == "scaled" else []
        callbacks = [GradientRecorder("head", every_n_train_steps=1, sinks=[sink])]
        torch.manual_seed(0)
        fit(Classifier(), tmp_path, callbacks, logger=False, plugins=plugins, max_steps=1)
    plain, scaled = (sink.scalars["gradients/head/rms"][0] for sink in sinks.values())
    assert scaled == pytest.approx(plain, rel=2e-2)


def test_sanity_check_and_validation_are_left_out(tmp_path: Path) -> None:
    """Only training batches are recorded, even if validation runs before and in between."""
    sink = MemorySink()
    callbacks = [ActivationRecorder("head", every_n_train_steps=1, statistics=["count"], sinks=[sink])]
    fit(Classifier(), tmp_path, callbacks, logger=False, validation=digits(2), val_check_interval=2)
    assert sink.scalars["activations/head/count"] == dict.fromkeys(range(6), 80.0)


def test_event_file_holds_scalars_and_histograms(tmp_path: Path) -> None:
    """TensorBoard's reader finds all default scalars on request, and a histogram with exact totals for each layer."""
    outputs = Outputs(curves="all")
    trainer = fit(Classifier(), tmp_path, [ActivationRecorder(outputs=outputs), GradientRecorder(outputs=outputs)])
    read = events(trainer)
    for group in ("activations", "gradients"):
        for name in LEAVES:
            for statistic in ("mean", "std", "rms", "min", "max", "zero_fraction"):
                assert [event.step for event in read.Scalars(f"z_recorder/{group}/{name}/{statistic}")] == [0, 1, 3, 5]
            histogram = read.Histograms(f"z_recorder/{group}/{name}/histogram")[0].histogram_value
            assert sum(histogram.bucket) == histogram.num
            mean = read.Scalars(f"z_recorder/{group}/{name}/mean")[0].value
            assert histogram.sum / histogram.num == pytest.approx(mean, rel=1e-5, abs=1e-12)
    assert read.Histograms("z_recorder/activations/dropout/histogram")[0].histogram_value.num == 8 * 256


def test_several_loggers_get_what_they_can_show(tmp_path: Path) -> None:
    """The scalars are in TensorBoard's event file and in the CSV file of a second logger."""
    loggers = [TensorBoardLogger(tmp_path), CSVLogger(tmp_path)]
    trainer = fit(Classifier(), tmp_path, [ActivationRecorder("head")], logger=loggers)
    assert [event.step for event in events(trainer).Scalars("z_recorder/activations/head/rms")] == [0, 1, 3, 5]
    header, *rows = Path(str(loggers[1].log_dir), "recorder", "metrics.csv").read_text().splitlines()
    column = header.split(",").index("activations/head/rms")
    assert sum(bool(row.split(",")[column]) for row in rows) == 4


def test_without_a_logger_everything_lies_in_files(tmp_path: Path) -> None:
    """With ``logger=False``, the records have all scalars and histograms, and no other file repeats them."""
    fit(Classifier(), tmp_path, [ActivationRecorder("head")], logger=False)
    series = open_recording(tmp_path)["activations"]
    assert series.steps == [0, 1, 3, 5]
    assert math.isfinite(series["head"].statistic("mean")[0])
    assert int(series["head"].bins(0).sum()) == 80
    assert sorted(path.name for path in (tmp_path / "recorder").iterdir()) == [
        "data.json",
        "findings.json",
        "images",
        "receipt.json",
        "records",
        "texts",
    ]


def test_a_logger_without_histograms_leaves_them_to_the_records(tmp_path: Path) -> None:
    """With a CSV logger, histograms are in the records only."""
    trainer = fit(Classifier(), tmp_path, [ActivationRecorder("head")], logger=CSVLogger(tmp_path))
    folder = Path(str(trainer.log_dir)) / "recorder"
    assert sorted(path.name for path in folder.iterdir()) == [
        "data.json",
        "findings.json",
        "images",
        "metrics.csv",
        "receipt.json",
        "records",
        "texts",
    ]
    assert open_recording(folder)["activations"].steps == [0, 1, 3, 5]


def test_without_records_and_loggers_no_number_is_written(tmp_path: Path) -> None:
    """With ``records=False`` and no logger, the numbers are only in ``latest`` and in the pictures."""
    recorder = ActivationRecorder("head", outputs=Outputs(records=False))
    fit(Classifier(), tmp_path, [recorder], logger=False)
    assert sorted(path.name for path in (tmp_path / "recorder").iterdir()) == [
        "data.json",
        "findings.json",
        "images",
        "receipt.json",
        "texts",
    ]
    assert recorder.latest[Site("head", "out")].scalars["count"] == 80


def test_fast_dev_run_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``fast_dev_run`` records in memory and writes no file."""
    monkeypatch.chdir(tmp_path)
    recorder = ActivationRecorder()
    fit(Classifier(), tmp_path, [recorder], fast_dev_run=True)
    assert recorder.latest[Site("head", "out")].scalars["count"] == 80
    assert list(tmp_path.iterdir()) == []


def test_a_program_may_change_its_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder is that of the beginning of the fit."""

    class Moving(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            (tmp_path / "elsewhere").mkdir(exist_ok=True)
            monkeypatch.chdir(tmp_path / "elsewhere")

    monkeypatch.chdir(tmp_path)
    fit(Moving(), Path(), default_recorders(every_n_train_steps=1), logger=False)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    run = open_recording(tmp_path).run
    assert run.graph is not None
    assert [len(run[each].steps) for each in ("activations", "gradients", "parameters")] == [6, 6, 6]


def test_latest_keeps_the_last_record_after_the_fit(tmp_path: Path) -> None:
    """After a fit, the callback still has the last record and its step."""
    recorder = ActivationRecorder("encoder.*", functions=False)
    fit(Classifier(), tmp_path, [recorder])
    assert recorder.latest_step == 5
    assert [site.name for site in recorder.latest] == LEAVES[:4]


def test_nan_and_inf_are_counted_and_shown_from_then_on(tmp_path: Path) -> None:
    """Counts of NaN and infinities appear with the first, and finite values keep their statistics."""

    class Diverging(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            images = batch[0].clone()
            if batch_idx == 1:
                images[0, 0, 0, 0] = math.inf
                images[1, 0, 0, 0] = math.nan
            return self.encoder.conv1(images).nan_to_num(0, 0, 0).mean()

    sink = MemorySink()
    callbacks = [ActivationRecorder("encoder.conv1", every_n_train_steps=1, sinks=[sink])]
    fit(Diverging(), tmp_path, callbacks, logger=False, max_steps=3)
    # A corner pixel reaches 2 × 2 positions of each of the 4 channels; an infinity times a weight is an infinity.
    for statistic in ("nan_count", "inf_count"):
        counts = sink.scalars[f"activations/encoder.conv1/{statistic}"]
        assert list(counts) == [1, 2]
        assert counts[1] == 16
    assert math.isfinite(sink.scalars["activations/encoder.conv1/rms"][1])


def test_dumps_lie_beside_the_checkpoints_and_read_back(tmp_path: Path) -> None:
    """Each checkpoint has a dump named after it whose tensors equal the latest record before it."""
    recorder = ActivationRecorder(every_n_train_steps=2)
    checkpoints = ModelCheckpoint(tmp_path / "kept", save_top_k=-1)
    fit(Classifier(), tmp_path, [recorder, GradientRecorder(), checkpoints], enable_checkpointing=True, max_epochs=2)
    saved = {path.name.removesuffix(".ckpt") for path in (tmp_path / "kept").glob("*.ckpt")}
    assert saved == {"epoch=0-step=6", "epoch=1-step=12"}
    dumped = {path.name for path in (tmp_path / "kept").glob("*.safetensors")}
    assert dumped == {f"{stem}.{group}.safetensors" for stem in saved for group in ("activations", "gradients")}
    dump = read_dump(tmp_path / "kept" / "epoch=1-step=12.activations.safetensors")
    assert dump.about["step"] == "11"
    assert dump.about["checkpoint"] == "epoch=1-step=12.ckpt"
    for site, seen in recorder.latest.items():
        key = "/".join(part for part in (site.name or "(root)", site.path) if part != "out")
        assert float(dump.tensors[f"{key}/mean"]) == seen.scalars["mean"]
        assert torch.equal(dump.tensors[f"{key}/histogram"], seen.bins)
    lines = read_manifest(tmp_path / "kept")
    assert sorted((line["step"], line["epoch"], line["group"]) for line in lines) == [
        (5, 0, "activations"),
        (5, 0, "gradients"),
        (11, 1, "activations"),
        (11, 1, "gradients"),
    ]
    assert lines[0]["sites"]["head"] == 80


def test_a_dump_is_removed_with_its_checkpoint(tmp_path: Path) -> None:
    """If ``save_top_k`` prunes a checkpoint, its dump is removed as well."""
    checkpoints = ModelCheckpoint(tmp_path / "kept", save_top_k=1)
    fit(Classifier(), tmp_path, [ActivationRecorder(), checkpoints], enable_checkpointing=True, max_epochs=3)
    assert [path.name for path in (tmp_path / "kept").glob("*.safetensors")] == [
        "epoch=2-step=18.activations.safetensors"
    ]


def test_two_recorders_of_a_kind_have_a_dump_each(tmp_path: Path) -> None:
    """A second recorder of the same kind writes its dump under its own name."""
    callbacks = [ActivationRecorder("head"), ActivationRecorder("encoder.conv1"), ModelCheckpoint(tmp_path / "kept")]
    fit(Classifier(), tmp_path, callbacks, enable_checkpointing=True)
    dumps = {path.name.split(".")[1]: read_dump(path) for path in (tmp_path / "kept").glob("*.safetensors")}
    assert {label: {key.rpartition("/")[0] for key in dump.tensors} for label, dump in dumps.items()} == {
        "activations": {"head"},
        "activations-2": {"encoder.conv1"},
    }


def test_the_trainer_has_its_checkpoint_io_back_after_the_fit(tmp_path: Path) -> None:
    """The original checkpoint IO is restored, in whatever order callbacks are released."""
    trainer = fit(Classifier(), tmp_path, [ActivationRecorder(), GradientRecorder()], enable_checkpointing=True)
    assert type(trainer.strategy.checkpoint_io).__name__ == "TorchCheckpointIO"


def test_a_dump_that_fails_costs_neither_the_run_nor_the_checkpoint(tmp_path: Path) -> None:
    """If a dump cannot be written, one warning is given and the checkpoint is saved."""
    kept = tmp_path / "kept"
    (kept / "epoch=0-step=6.activations.safetensors" / "in the way").mkdir(parents=True)
    with pytest.warns(RecorderWarning, match="lightning_recorder could not write to .*activations.safetensors"):
        fit(Classifier(), tmp_path, [ActivationRecorder(), ModelCheckpoint(kept)], enable_checkpointing=True)
    assert (kept / "epoch=0-step=6.ckpt").is_file()


def test_dump_can_be_switched_off(tmp_path: Path) -> None:
    """With ``dumps=False``, nothing is written beside the checkpoints."""
    checkpoints = ModelCheckpoint(tmp_path / "kept")
    fit(
        Classifier(),
        tmp_path,
        [ActivationRecorder(outputs=Outputs(dumps=False)), checkpoints],
        enable_checkpointing=True,
    )
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".ckpt"]


def test_an_empty_match_raises_at_fit_start_with_the_closest_names(tmp_path: Path) -> None:
    """A glob without a match ends the fit before its first step and lists the closest names."""
    model = Classifier()
    with pytest.raises(SelectionError, match=r"^ActivationRecorder: no module matches 'encodr\.\*'.*'encoder"):
        fit(model, tmp_path, [ActivationRecorder("encodr.*")])
    assert model.losses == []


def test_a_model_without_submodules_is_a_warning(tmp_path: Path) -> None:
    """Without arguments, a model without submodules trains with one warning."""

    class Bare(Classifier):
        def __init__(self) -> None:
            super().__init__()
            del self.encoder, self.dropout, self.head
            self.weight = nn.Parameter(torch.zeros(64, 10))

        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) @ self.weight

    model = Bare()
    with pytest.warns(RecorderWarning, match="ActivationRecorder records nothing: Bare has no submodules"):
        fit(model, tmp_path, [ActivationRecorder()])
    assert len(model.losses) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": 3}, "names takes module names or globs, got 3"),
        ({"types": [int]}, "types takes subclasses of torch.nn.Module or their names"),
        ({"exclude": [None]}, "exclude takes module names or globs, got None"),
        ({"every_n_train_steps": -1}, "every_n_train_steps must be an integer of at least 0, got -1"),
        ({"every_n_train_steps": 1.5}, "every_n_train_steps must be an integer of at least 0, got 1.5"),
        ({"names": []}, "names is empty; omit it"),
        ({"sinks": [MemorySink]}, r"sinks takes Sink instances, got the class MemorySink: write MemorySink\(\)"),
        ({"sinks": ["memory"]}, "sinks takes Sink instances, got 'memory'"),
        ({"statistics": ["histogram"]}, "got 'histogram': outputs=Outputs\\(histograms=True\\) or False chooses"),
        ({"statistics": ["median"]}, "statistics must be one or more of count, mean, .*; got 'median'"),
        ({"sinks": MemorySink()}, r"write sinks=\[MemorySink"),
    ],
)
def test_wrong_arguments_raise_at_construction(arguments: dict[str, Any], message: str) -> None:
    """An invalid argument raises at construction, and the message names the allowed values."""
    with pytest.raises(ArgumentError, match=message):
        ActivationRecorder(**arguments)


def test_exception_in_training_step_leaves_no_hook(tmp_path: Path) -> None:
    """If the model raises in a recorded step, its own error propagates and no hook is left."""

    class Failing(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            self(batch[0])
            raise ZeroDivisionError("the model's own")

    model = Failing()
    sink = MemorySink()
    with pytest.raises(ZeroDivisionError, match="the model's own"):
        fit(model, tmp_path, [ActivationRecorder(sinks=[sink]), GradientRecorder()])
    assert hooks_left(model) == []
    # The data of the failed step is kept, since it may show why the step failed.
    assert steps_of(sink, "activations/head/rms") == [0]


def test_ending_an_epoch_from_on_train_batch_start_leaves_no_hook(tmp_path: Path) -> None:
    """A batch that starts and does not end leaves neither hooks nor an open window."""

    class Skipping(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == 2 else None

    model = Skipping()
    sink = MemorySink()
    fit(model, tmp_path, [ActivationRecorder(every_n_train_steps=1, sinks=[sink])], logger=False, max_epochs=2)
    assert hooks_left(model) == []
    assert steps_of(sink, "activations/head/rms") == [0, 1, 2, 3]


def test_manual_optimization_is_recorded_once_per_batch(tmp_path: Path) -> None:
    """If two optimizers step in every batch, there is one record per batch, on the axis of ``self.log``."""

    class Manual(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            for optimizer in self.trainer.strategy._lightning_optimizers:
                optimizer.zero_grad()
                self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
                optimizer.step()
            self.log("step_done", 1.0)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.encoder, self.head)]

    callbacks = [ActivationRecorder("head", statistics=["count"]), GradientRecorder("head", statistics=["count"])]
    trainer = fit(Manual(), tmp_path, callbacks)
    read = events(trainer)
    assert [event.step for event in events(trainer, ".").Scalars("step_done")] == [1, 3, 5]
    for group in ("activations", "gradients"):
        recorded = [(event.step, event.value) for event in read.Scalars(f"z_recorder/{group}/head/count")]
        assert recorded == [(step, 160.0) for step in (0, 1, 3, 5)]


class Sharpness(torch.optim.Optimizer):
    """A wrapper such as SAM, whose inner optimizer has its parameter groups and makes the step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        self.inner.step()


@pytest.mark.parametrize("is_whole", [False, True])
def test_steps_of_an_optimizer_inside_of_another_one(tmp_path: Path, is_whole: bool) -> None:
    """With manual optimization, the steps of the inner optimizer of a wrapper are recorded, each of them once."""

    class Manual(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer: Any = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
            (optimizer if is_whole else optimizer.inner).step()

        def configure_optimizers(self) -> Any:
            return Sharpness(self.parameters())

    sink, model = MemorySink(), Manual()
    recorder = ParameterRecorder("head", statistics=["count"], every_n_train_steps=1, sinks=[sink])
    fit(model, tmp_path, [recorder], logger=False, max_epochs=1)
    assert list(sink.scalars["parameters/head/bias.update/count"].values()) == [10.0] * 6
    assert hooks_left(model) == []


def test_a_second_fit_records_again(tmp_path: Path) -> None:
    """A second fit of a trainer is recorded as well, and hooks are removed in between."""
    sink = MemorySink()
    model = Classifier()
    trainer = fit(model, tmp_path, [ActivationRecorder("head", sinks=[sink])], logger=False, max_epochs=1)
    assert trainer.fit_loop.max_epochs == 1
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, digits())
    assert steps_of(sink, "activations/head/rms") == [0, 1, 3, 5, 7, 9, 11]
    assert hooks_left(model) == []


def test_a_raising_sink_costs_its_records_alone(tmp_path: Path) -> None:
    """A sink that raises gives one warning, and the run and the other sinks continue."""

    class Broken(MemorySink):
        def write_scalars(self, step: int, scalars: Any) -> bool:
            raise OSError("disk full")

    sink = MemorySink()
    model = Classifier()
    with pytest.warns(RecorderWarning, match="Broken.write_scalars failed.*disk full") as warned:
        fit(model, tmp_path, [ActivationRecorder(sinks=[Broken(), sink])], logger=False)
    assert sum(each.category is RecorderWarning for each in warned) == 1
    assert len(model.losses) == 6
    assert steps_of(sink, "activations/head/rms") == [0, 1, 3, 5]


def test_a_callback_can_be_pickled_and_copied(tmp_path: Path) -> None:
    """Before and after a fit, a callback can be pickled and copied, as spawned processes require."""
    import copy
    import pickle

    recorder = ActivationRecorder("head")
    for _ in range(2):
        copied = pickle.loads(pickle.dumps(copy.deepcopy(recorder)))
        assert copied.selection == recorder.selection
        fit(Classifier(), tmp_path, [recorder], logger=False)


@pytest.mark.parametrize("how", ["submodule", "whole"])
def test_compiled_models_are_recorded_and_not_compiled_again(tmp_path: Path, how: str) -> None:
    """With ``compiled="eager"``, recorded steps run eagerly and the compiled code is compiled once."""
    gc.collect()  # recorders left attached by other tests keep the process eager until they are freed
    torch._dynamo.reset()
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return graph.forward

    class Compiled(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            # Without self.log, which a compiled LightningModule cannot call with these versions of Lightning and torch.
            return F.cross_entropy(self(batch[0]), batch[1])

    model = Compiled()
    if how == "submodule":
        model.encoder.compile(backend=backend)
    sink = MemorySink()
    callbacks = [
        ActivationRecorder(every_n_train_steps=4, compiled="eager", sinks=[sink]),
        GradientRecorder(every_n_train_steps=4, compiled="eager"),
    ]
    target: Any = torch.compile(model, backend=backend) if how == "whole" else model
    fit(target, tmp_path, callbacks, logger=False, max_epochs=2)
    assert steps_of(sink, "activations/encoder.conv1/rms") == [0, 3, 7, 11]
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("any_thread", [False, True])
def test_a_sink_says_in_which_thread_it_is_written(any_thread: bool, tmp_path: Path) -> None:
    """A sink that allows it is written in the background, any other in the training thread; nothing is lost."""

    class Coverage(MemorySink):
        def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
            threads.add(threading.get_ident())
            return super().write_scalars(step, scalars)

    threads: set[int] = set()
    sink = Coverage()
    sink.any_thread = any_thread
    fit(Classifier(), tmp_path, [ActivationRecorder(every_n_train_steps=1, sinks=[sink])], logger=False)
    assert (threading.get_ident() in threads) == (not any_thread)
    assert len(threads) == 1
    assert steps_of(sink, "activations/head/rms") == list(range(6))


def test_latest_waits_for_what_is_being_written(tmp_path: Path) -> None:
    """``latest`` waits for pending writes, so that it is the record of the last step."""
    seen: list[tuple[int | None, int]] = []

    class Slow(MemorySink):
        def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
            time.sleep(0.05)
            return super().write_scalars(step, scalars)

    class Asking(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            seen.append((recorder.latest_step, len(sink.scalars["activations/head/rms"])))

    sink = Slow()
    recorder = ActivationRecorder(every_n_train_steps=1, sinks=[sink])
    fit(Classifier(), tmp_path, [recorder, Asking()], logger=False)
    assert seen == [(step, step + 1) for step in range(6)]


def test_a_fault_in_the_background_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the background disables the callback with one warning, and the run continues."""

    def fail(snapshots: Any) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(pipeline, "statistics_of", fail)
    model = Classifier()
    with pytest.warns(RecorderWarning, match="ActivationRecorder is off for the rest of the run: .* of ours"):
        fit(model, tmp_path, [ActivationRecorder(every_n_train_steps=1)], logger=False)
    assert len(model.losses) == 6
    assert hooks_left(model) == []
    with pytest.raises(ZeroDivisionError, match="of ours"):
        fit(Classifier(), tmp_path, [ActivationRecorder(every_n_train_steps=1, strict=True)], logger=False)


def test_further_reductions_are_shown_and_dumped(tmp_path: Path) -> None:
    """Scalars of extra reductions and quantiles have their own tags; other statistics are in the dump."""
    sink = MemorySink()
    recorder = ActivationRecorder(
        "encoder.conv1",
        every_n_train_steps=3,
        statistics=["count", "quantile_0.5"],
        extra=[Norms(), ChannelMoments()],
        outputs=Outputs(histograms=100),
        sinks=[sink],
    )
    checkpoint = ModelCheckpoint(tmp_path, filename="last")
    fit(Classifier(), tmp_path, [recorder, checkpoint], logger=False, enable_checkpointing=True)
    shown = ["abs_max", "count", "histogram_fraction", "l1_norm", "l2_norm", "quantile_0.5"]
    assert sorted(sink.scalars) == [f"activations/encoder.conv1/{name}" for name in shown]
    seen = recorder.latest[Site("encoder.conv1", "out")]
    (count,) = (values[5] for tag, values in sink.scalars.items() if tag.endswith("count"))
    assert seen.scalars["l2_norm"] == pytest.approx(seen.scalars["rms"] * math.sqrt(count), rel=1e-12)
    assert seen.scalars["abs_max"] == max(-seen.scalars["min"], seen.scalars["max"])
    assert seen.scalars["histogram_fraction"] == seen.histogram.fraction == seen.histogram.count / count
    assert seen.histogram.count <= 100
    mean = read_dump(tmp_path / "last.activations.safetensors").tensors["encoder.conv1/channel_mean"]
    assert mean.shape == (4,)
    assert float(mean.mean()) == pytest.approx(seen.scalars["mean"], rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        ({"extra": [Extrema()]}, "two reductions have the statistics 'min', 'max': remove one of them"),
        ({"extra": None}, "extra takes a Reduction, a torchmetrics.Metric, a function of two arguments, .* got None"),
        ({"statistics": 0.5}, "statistics takes a list, got 0.5"),
        ({"extra": [Extrema]}, "two reductions have the statistics 'min', 'max': remove one of them"),
        ({"statistics": ["quantile_2"]}, "takes quantiles between 0 and 1, got 'quantile_2': write 'quantile_0.02'$"),
        ({"statistics": ["quantile_a"]}, "got 'quantile_a': 'quantile_0.99' shows the value below which 99 % of"),
        ({"statistics": "median"}, "got 'median': did you mean 'quantile_0.5'"),
        ({"histograms": 0}, r"no argument histograms: write outputs=Outputs\(histograms=…\)"),
        ({"stages": "test"}, r"no argument stages: write schedule=Schedule\(stages=…\)"),
        ({"statistics": "abs_max"}, r"got 'abs_max': extra=\[Norms"),
    ],
)
def test_wrong_reductions_raise_at_construction(arguments: dict[str, Any], warned: str) -> None:
    """Invalid reductions are rejected before the fit."""
    with pytest.raises(ArgumentError, match=warned):
        ActivationRecorder(**arguments)


class Failing(MemorySink):
    """A sink with a full disk."""

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        raise OSError("disk full")


def test_a_strict_error_survives_a_checkpoint(tmp_path: Path) -> None:
    """With ``strict``, a sink's background error ends the fit, even if a checkpoint waits for it first."""
    recorder = ActivationRecorder(every_n_train_steps=1, sinks=[Failing()], strict=True)
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(OSError, match="disk full"):
        fit(Classifier(), tmp_path, [recorder, checkpoint], logger=False, enable_checkpointing=True)


def test_a_strict_error_takes_no_other_exceptions_place(tmp_path: Path) -> None:
    """If the training itself raises, that error propagates, and an internal error becomes a warning."""

    class Broken(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            if batch_idx == 1:
                raise ValueError("of the user")
            return super().training_step(batch, batch_idx)

    class Slow(Failing):
        def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
            time.sleep(0.3)
            return super().write_scalars(step, scalars)

    recorder = ActivationRecorder(every_n_train_steps=2, sinks=[Slow()], strict=True)
    with (
        pytest.warns(RecorderWarning, match="could not write all of its records: OSError: disk full"),
        pytest.raises(ValueError, match="of the user"),
    ):
        fit(Broken(), tmp_path, [recorder], logger=False)


def test_what_can_be_gone_through_once_serves_every_fit(tmp_path: Path) -> None:
    """Reductions and statistics given by a generator are available in the first and in the second fit."""
    given: Any = {"extra": (each for each in [Norms()]), "statistics": iter(["quantile_0.5"])}
    recorder = ActivationRecorder("head", **given)
    for run in ("first", "second"):
        fit(Classifier(), tmp_path / run, [recorder], logger=False)
        assert {"l2_norm", "quantile_0.5"} <= set(recorder.latest[Site("head", "out")].scalars)


class Nameless(Logger):
    """A user's logger that cannot name its run."""

    name = "mine"

    @property
    def version(self) -> str:
        raise RuntimeError("there is no run yet")

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Ignore the metrics."""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Ignore the hyperparameters."""


def test_a_logger_that_cannot_name_its_run(tmp_path: Path) -> None:
    """Its recordings are in the trainer's folder, without a warning."""
    fit(Classifier(), tmp_path, [ActivationRecorder(outputs=Outputs(plots=False))], logger=Nameless())
    assert (tmp_path / "recorder" / "records" / "activations.jsonl").is_file()
