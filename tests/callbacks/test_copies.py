"""Copies of callbacks at any time: YAML, pickle, deep copy and torch files."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]  # its stubs are another package
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import Tensor
from typing_extensions import override

from lightning_recorder import (
    ActivationRecorder,
    GradientRecorder,
    GraphRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    RecorderWarning,
    Schedule,
    TensorDumper,
)
from lightning_recorder.callbacks.base import RecorderCallback
from lightning_recorder.graph import GraphvizStyler
from lightning_recorder.reductions import ChannelMoments, Norms
from lightning_recorder.statistics import SiteStatistics
from tests.callbacks.models import Classifier, fit, hooks_left

KINDS: dict[str, Callable[[], RecorderCallback]] = {
    "activations": lambda: ActivationRecorder(
        "encoder.*", extra=[Norms()], schedule=Schedule(stages=("train",)), outputs=Outputs(dump_when=is_large)
    ),
    "gradients": lambda: GradientRecorder(
        types=torch.nn.Conv2d, every_n_train_steps=1, schedule=Schedule(when=is_even)
    ),
    "parameters": lambda: ParameterRecorder(
        parts=("values", "moments"), extra=[ChannelMoments()], schedule=Schedule(max_overhead=0.9)
    ),
    "graph": lambda: GraphRecorder(formats=(), depth=2),
    "tensors": lambda: TensorDumper(
        "head", at=("steps", "checkpoints"), dtype=torch.bfloat16, outputs=Outputs(dump_when=is_large)
    ),
}

LOGGERS: dict[str, Callable[[Path], Logger | bool]] = {
    "none": lambda folder: False,
    "tensorboard": TensorBoardLogger,
    "csv": CSVLogger,
}


def is_large(seen: SiteStatistics) -> bool:
    return seen.abs_max > 0


def is_even(step: int) -> bool:
    return step % 2 == 0


def through_torch(callback: RecorderCallback) -> Any:
    file = io.BytesIO()
    torch.save({"hyper_parameters": {"callbacks": [callback]}}, file)
    file.seek(0)
    return torch.load(file, weights_only=False)["hyper_parameters"]["callbacks"][0]


COPIES: dict[str, Callable[[Any], Any]] = {
    "yaml": lambda callback: yaml.unsafe_load(yaml.dump([callback]))[0],
    "pickle": lambda callback: pickle.loads(pickle.dumps(callback)),
    "oldest pickle": lambda callback: pickle.loads(pickle.dumps(callback, protocol=0)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch": through_torch,
}


class Configured(Classifier):
    """A model whose hyperparameters contain the callbacks, as in some libraries."""

    def __init__(self, callbacks: Sequence[Callback], hook: Callable[[], object] | None = None) -> None:
        super().__init__()
        self.save_hyperparameters("callbacks")
        self.hook = hook

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.hook is not None:
            self.hook()
        return loss


def configured(callbacks: Sequence[Callback], hook: Callable[[], object] | None = None) -> Configured:
    seed_everything(1, verbose=False)
    return Configured(callbacks, hook)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Configured:
    """Return the model of a run without callbacks."""
    model = configured([])
    fit(model, tmp_path_factory.mktemp("bare"), logger=False)
    return model


@pytest.mark.parametrize(
    ("kind", "logger"),
    [
        ("activations", "tensorboard"),
        ("gradients", "csv"),
        ("parameters", "none"),
        ("graph", "csv"),
        ("tensors", "tensorboard"),
    ],
)
def test_a_callback_survives_every_copy_at_any_time(kind: str, logger: str, bare: Configured, tmp_path: Path) -> None:
    """A copy before, during or after a fit has the arguments and no run state, and the run continues."""
    callback, fresh = KINDS[kind](), yaml.dump(KINDS[kind]())
    most = len(pickle.dumps(KINDS[kind]())) + 100
    seen: list[dict[str, Any]] = []

    def copy_it() -> None:
        if len(seen) < 5:
            seen.append({name: duplicate(callback) for name, duplicate in COPIES.items()})
            assert len(yaml.dump(callback)) < 3000

    copy_it()
    model = configured([callback], copy_it)
    trainer = fit(model, tmp_path, [callback], logger=LOGGERS[logger](tmp_path), enable_checkpointing=True)
    seen.append({name: duplicate(callback) for name, duplicate in COPIES.items()})
    for copies in seen:
        for name, each in copies.items():
            assert type(each) is type(callback), name
            assert yaml.dump(each) == fresh, name
            assert len(pickle.dumps(each)) < most, name
    assert hooks_left(model) == []
    assert torch.equal(torch.stack(model.losses), torch.stack(bare.losses))
    path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]  # there is one
    loaded = Configured.load_from_checkpoint(path, weights_only=False)
    assert yaml.dump(loaded.hparams["callbacks"][0]) == fresh
    if logger in ("tensorboard", "csv"):
        text = Path(str(trainer.log_dir), "hparams.yaml").read_text(encoding="utf-8")
        assert type(yaml.unsafe_load(text)["callbacks"][0]) is type(callback)


@pytest.mark.parametrize("duplicate", COPIES)
def test_a_copy_from_inside_a_run_records_like_the_original(duplicate: str, tmp_path: Path) -> None:
    """A copy made in a recorded step can record its own run."""
    callback = ActivationRecorder("head", every_n_train_steps=2, statistics=["mean"], schedule=Schedule(when=is_even))
    copies: list[ActivationRecorder] = []
    model = configured([], lambda: copies.append(COPIES[duplicate](callback)))
    fit(model, tmp_path / "first", [callback], logger=False)
    fit(configured([]), tmp_path / "second", [copies[0]], logger=False)
    (one,), (other,) = callback.latest.values(), copies[0].latest.values()
    assert one.scalars == other.scalars
    assert callback.latest_step == copies[0].latest_step == 0


def test_a_copy_shares_the_sinks(tmp_path: Path) -> None:
    """A deep copy writes to the sinks of the original, which the user reads."""
    sink = MemorySink()
    fit(Classifier(), tmp_path, [copy.deepcopy(ActivationRecorder("head", sinks=[sink]))], logger=False)
    assert "activations/head/rms" in sink.scalars


def test_a_copy_has_the_styler() -> None:
    """A pickle contains the styler of the graph picture, and a deep copy shares it."""
    callback = GraphRecorder(styler=GraphvizStyler())
    assert type(COPIES["torch"](callback).styler) is GraphvizStyler
    assert copy.deepcopy(callback).styler is callback.styler


def test_a_disabled_callback_has_disabled_copies() -> None:
    """Processes that are spawned with a disabled recorder record nothing."""
    callback = ActivationRecorder()
    callback.disable()
    assert not any(duplicate(callback).enabled for duplicate in COPIES.values())


def test_attributes_of_a_subclass_are_copied() -> None:
    """A subclass with its own attributes and constructor needs no further methods to be copied."""
    callback = Ours(3)
    callback.note = "seen"
    for name, duplicate in COPIES.items():
        copied = duplicate(callback)
        assert (copied.note, copied.limit, copied.selection) == ("seen", 3, callback.selection), name


class Ours(ActivationRecorder):
    def __init__(self, limit: int) -> None:
        super().__init__("head")
        self.limit = limit
        self.note = ""


class Locked:
    """A function of the statistics that cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, seen: SiteStatistics) -> bool:
        return True


class OpenSink(MemorySink):
    """A sink that cannot be pickled, such as one with an open file."""

    @override
    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError("this sink has an open file")


@pytest.mark.parametrize("logger", ["none", "tensorboard", "csv"])
@pytest.mark.parametrize("make", [lambda: lambda seen: seen.abs_max > 0, Locked], ids=["lambda", "object"])
def test_what_cannot_be_pickled_does_not_end_the_fit(make: Any, logger: str, tmp_path: Path) -> None:
    """A run with unpicklable hyperparameters saves its checkpoints, and a loaded copy reports the missing arguments."""
    callback = TensorDumper("head", sinks=[OpenSink()], outputs=Outputs(dump_when=make()))
    model = Configured([callback])
    options: dict[str, Any] = {"logger": LOGGERS[logger](tmp_path), "enable_checkpointing": True}
    trainer = fit(model, tmp_path, [callback], **options)
    assert len(model.losses) == 6
    path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]  # there is one
    loaded = Configured.load_from_checkpoint(path, weights_only=False).hparams["callbacks"][0]
    with pytest.warns(RecorderWarning) as warned:
        fit(Classifier(), tmp_path / "again", [loaded], logger=False)
    messages = [str(each.message) for each in warned if each.category is RecorderWarning]
    assert messages[0] == (
        "TensorDumper is a copy without sinks=tests.callbacks.test_copies.OpenSink, which cannot be pickled"
    )
    if make is Locked:
        (lost,) = messages[1:]
        assert "dump_when=tests.callbacks.test_copies.Locked is missing in this copy of the recorder, because" in lost
        assert "give a function that is defined at the top level of a module, or its import path" in lost


def test_without_cloudpickle_a_lambda_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy names the lambda and its line when it is needed; a deep copy keeps the lambda."""
    monkeypatch.setitem(__import__("sys").modules, "cloudpickle", None)
    callback = ActivationRecorder("head", schedule=Schedule(when=lambda step: step == 3))
    with pytest.warns(RecorderWarning, match=r"when=<lambda> \(.*test_copies.py:\d+\) is missing in this copy"):
        fit(Classifier(), tmp_path / "pickled", [pickle.loads(pickle.dumps(callback))], logger=False)
    copied = copy.deepcopy(callback)
    fit(Classifier(), tmp_path / "copied", [copied], logger=False)
    assert copied.latest_step == 3


def test_a_function_that_holds_the_recorder_can_be_pickled(tmp_path: Path) -> None:
    """A model's method as ``when=`` is pickled once, even if the model's hyperparameters contain the recorder."""
    model = Asked()
    model.hparams["callbacks"] = [ActivationRecorder("head", schedule=Schedule(when=model.is_due))]
    fit(model, tmp_path, model.hparams["callbacks"], logger=False, enable_checkpointing=True)
    assert len(pickle.dumps(model.hparams["callbacks"][0])) < 100_000


class Asked(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()

    def is_due(self, step: int) -> bool:
        return True


def test_copies_while_records_are_written(tmp_path: Path) -> None:
    """Copies from another callback do not wait for pending writes of records."""

    class Slow(MemorySink):
        def __init__(self) -> None:
            super().__init__()
            self.may_go_on = threading.Event()

        @override
        def write_scalars(self, step: int, scalars: Any) -> bool:
            assert self.may_go_on.wait(60)
            return super().write_scalars(step, scalars)

    sink = Slow()

    class Copier(Callback):
        @override
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            copy.deepcopy(callback)
            yaml.dump(callback)
            sink.may_go_on.set()

    callback = ActivationRecorder("head", sinks=[sink], outputs=Outputs(plots=False))
    fit(Classifier(), tmp_path, [callback, Copier()], logger=False)
    assert list(sink.scalars["activations/head/rms"]) == [0, 1, 3, 5]
