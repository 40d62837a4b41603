"""Objects that the callbacks have seen are freed with the step, the fit or the model that owns them."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from lightning_recorder import (
    ActivationRecorder,
    CostRecorder,
    GradientRecorder,
    GraphRecorder,
    Outputs,
    ParameterRecorder,
    Schedule,
    default_recorders,
)
from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.schedule import Reduce
from lightning_recorder.watch.epoch_samples import AT_ONCE
from tests.callbacks.models import digits, fit

STEPS = 200


class Token:
    """An object attached to a node of the autograd graph, which is freed with it."""


class Plain(LightningModule):
    """A tiny model with weak references to the tensors of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(64, 8), nn.ReLU(inplace=True), nn.Linear(8, 10)
        self.seen: dict[str, weakref.ref[Any]] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        passing = nn.Dropout(0.1)
        hidden = self.act(self.first(batch[0].flatten(1)))
        logits = self.second(passing(hidden))
        loss = F.cross_entropy(logits, batch[1])
        for name, tensor in (("hidden", hidden), ("logits", logits), ("loss", loss)):
            token = Token()
            node: Any = tensor.grad_fn
            node.metadata["token"] = token
            self.seen[name], self.seen[f"node of {name}"] = weakref.ref(tensor), weakref.ref(token)
        self.seen["module"] = weakref.ref(passing)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.second(self.act(self.first(batch[0].flatten(1)))), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def recorders(reduce: Reduce = "step") -> list[Callback]:
    """Return all callbacks, recording every step."""
    kinds: list[type[StatisticsCallback]] = [ActivationRecorder, GradientRecorder, ParameterRecorder]
    each = [kind("**", every_n_train_steps=1, reduce=reduce, strict=True) for kind in kinds]
    return [GraphRecorder(strict=True), *each]


def hooks(trainer: Trainer, model: nn.Module) -> int:
    """Return the number of hooks on the model, on its optimizers, and on all modules."""
    owners: list[Any] = [*model.modules(), *model.parameters(), *trainer.optimizers]
    tables = [value for owner in owners for name, value in _attributes(owner) if name.endswith("_hooks")]
    tables += [value for name, value in vars(torch_module).items() if name.startswith("_global_") and "_hooks" in name]
    return sum(len(table) for table in tables if isinstance(table, dict))


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    return [("_backward_hooks", owner._backward_hooks)] if isinstance(owner, Tensor) else list(vars(owner).items())


class Census(Callback):
    """Before each step, and before the watched callbacks, lists the objects of the previous step that are alive."""

    def __init__(self, watched: list[Callback]) -> None:
        self.watched = watched
        self.alive: set[str] = set()
        self.tensors: dict[int, int] = {}
        self.hooks: dict[int, int] = {}
        self.threads: dict[int, int] = {}
        self.files: dict[int, int] = {}
        self.recorded: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        assert isinstance(pl_module, Plain)
        self.alive |= {name for name, reference in pl_module.seen.items() if reference() is not None}
        self.hooks[step] = hooks(trainer, pl_module)
        for callback in self.watched:
            if step < 50 and isinstance(callback, GraphRecorder):
                give_time_for(Path(str(trainer.log_dir)) / "recorder" / "graph.png")
            if isinstance(callback, StatisticsCallback) and step > callback.sampling.delay:
                assert callback.latest_step == step - 1  # waits for what is being written
        if step % 50 == 0:
            self.tensors[step] = sum(issubclass(type(each), Tensor) for each in gc.get_objects())
            self.threads[step] = threading.active_count()
            self.files[step] = open_files(at_most=self.files.get(50, 0))


def give_time_for(path: Path) -> None:
    """Wait for the process that draws the picture, which the callback checks after each step."""
    if not path.exists():
        time.sleep(0.2)


def open_files(at_most: int) -> int:
    """Return the number of open files, without those that a thread opens for the time of a write.

    A file that stays open is in every count. The first count that is no higher than ``at_most`` ends the search.
    """
    counts = []
    for _ in range(50):
        counts.append(sum(1 for _ in Path("/proc/self/fd").iterdir()))
        if counts[-1] <= at_most:
            break
        time.sleep(0.01)
    return min(counts)


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Disable the garbage collector, so that only reference counting frees objects."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def objects() -> Counter[str]:
    """Return the numbers of threads, open files, and objects of each class."""
    gc.collect()
    found = Counter(str(type(each)) for each in gc.get_objects() if type(each) is not logging.LogRecord)  # of pytest
    return found + Counter({"threads": threading.active_count(), "files": len(list(Path("/proc/self/fd").iterdir()))})


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux lists them")
def test_many_fits_leave_nothing(tmp_path: Path) -> None:
    """Fits in one process leave no thread, no open file, and no object that becomes more with each of them."""
    fits, counts = 30, []
    for number in range(10 + fits):
        if number in (10, 10 + fits // 2):
            counts.append(objects())
        logger = CSVLogger(tmp_path / str(number), name="", version="")
        recorders = default_recorders(every_n_train_steps=1, outputs=Outputs(plots=False, report=False))
        fit(Plain(), tmp_path, recorders, logger=logger, max_steps=3)
    one, other, last = *counts, objects()
    # A cache that is cleared from time to time has more objects at one of two times only.
    growing = [kind for kind in last if min(other[kind] - one[kind], last[kind] - other[kind]) >= fits // 2]
    assert growing == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")
@pytest.mark.usefixtures("no_gc")
def test_nothing_of_a_step_outlives_it(tmp_path: Path) -> None:
    """Over 200 recorded steps without a garbage collector, no object of a step remains and no count grows."""
    watched = recorders()
    census = Census(watched)
    options = {"max_epochs": STEPS, "max_steps": STEPS + 1, "log_every_n_steps": 50}
    fit(Plain(), tmp_path, [census, *watched], **options)
    assert census.alive == set()
    assert next(tmp_path.rglob("graph.png")).is_file()
    assert sorted(census.tensors) == list(range(0, STEPS + 1, 50))
    steady = range(50, STEPS + 1, 50)
    counts = [census.tensors[step] for step in steady]
    assert max(counts) - min(counts) < AT_ONCE  # fingerprints of batches that wait to be counted
    assert {census.threads[step] for step in steady} == {census.threads[50]}
    assert {census.files[step] for step in steady} == {census.files[50]}


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize(
    "kind", [None, ActivationRecorder, GradientRecorder, ParameterRecorder, CostRecorder, GraphRecorder]
)
def test_nothing_of_a_step_outlives_it_through_any_one_callback(kind: Any, tmp_path: Path) -> None:
    """Tensors, nodes and modules of a step are freed before the next one, as without a callback."""
    options = {} if kind in (None, GraphRecorder) else {"every_n_train_steps": 1}
    watched = [] if kind is None else [kind(**options)]
    census = Census(watched)
    fit(Plain(), tmp_path, [census, *watched])
    assert census.alive == set()


@pytest.mark.parametrize("reduce", ["step", 4, "epoch"])
def test_hooks_do_not_become_more(reduce: Reduce, tmp_path: Path) -> None:
    """There are as many hooks before every recorded step as before the second one."""

    class Counting(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            counted.append(hooks(trainer, pl_module))

    counted: list[int] = []
    model = Plain()
    trainer = fit(model, tmp_path, [Counting(), *recorders(reduce)], loader=digits(20), logger=False, max_epochs=2)
    # The first step of an epoch follows the end of the previous epoch, which removes all hooks.
    assert len(counted) == 40
    assert len(set(counted[1:20] + counted[21:])) == 1
    assert counted[20] == counted[0]
    assert hooks(trainer, model) == counted[0]


@pytest.mark.slow
def test_states_of_epochs_do_not_become_more(tmp_path: Path) -> None:
    """With one record per epoch, there are no more tensors in the middle of an epoch than in the one before."""

    class Counting(Callback):
        def on_train_batch_start(
            self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
        ) -> None:
            for callback in watched:
                if isinstance(callback, StatisticsCallback):
                    callback.latest  # noqa: B018 - waits for what is being written
            if batch_idx == 3:
                gc.collect()
                counted.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))

    counted: list[int] = []
    watched = recorders("epoch")
    options = {"validation": digits(2), "num_sanity_val_steps": 0}
    fit(Plain(), tmp_path, [Counting(), *watched], logger=False, max_epochs=5, **options)
    # In the second epoch, or later on a busy machine, the picture of the first step may still be pending.
    assert max(counted[3:]) <= counted[2]


def fails(model: Plain) -> None:
    def failing(module: nn.Module, args: Any) -> None:
        raise ZeroDivisionError("of the user")

    model.second.register_forward_pre_hook(failing)


def succeeds(model: Plain) -> None:
    pass


@pytest.mark.parametrize("end", [succeeds, fails])
@pytest.mark.parametrize("kind", [ActivationRecorder, GradientRecorder, ParameterRecorder, GraphRecorder])
def test_a_callback_keeps_nothing_of_the_model(kind: Any, end: Callable[[Plain], None], tmp_path: Path) -> None:
    """After a fit, the callback does not keep model, parameters, optimizer or trainer alive."""
    callback = kind()
    model = Plain()
    end(model)
    trainer: Trainer | None = None
    with suppress(ZeroDivisionError):
        trainer = fit(model, tmp_path, [callback], logger=False)
    kept: dict[str, Any] = {"model": weakref.ref(model), "layer": weakref.ref(model.first)}
    kept |= {"weight": weakref.ref(model.first.weight)}
    if trainer is not None:
        kept |= {"trainer": weakref.ref(trainer), "optimizer": weakref.ref(trainer.optimizers[0])}
    del model, trainer
    gc.collect()
    assert [name for name, reference in kept.items() if reference() is not None] == []


@pytest.mark.parametrize("function", ["validate", "test", "predict"])
def test_an_evaluation_leaves_nothing_of_the_model(function: str, tmp_path: Path) -> None:
    """After an evaluation, the callback that recorded it does not keep the model alive."""

    class Evaluated(Plain):
        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.second(self.act(self.first(x.flatten(1))))
            return logits

        def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self(batch[0])

        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return self(batch[0])

    callback = ActivationRecorder(schedule=Schedule(stages=function))
    model = Evaluated()
    silent = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", callbacks=[callback], **silent)  # type: ignore[arg-type]  # values of different types
    getattr(trainer, function)(model, digits(2), **({} if function == "predict" else {"verbose": False}))
    assert callback.latest_of(function)
    kept = weakref.ref(model)
    del model, trainer
    gc.collect()
    assert kept() is None
