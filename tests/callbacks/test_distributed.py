"""The callbacks on several processes.

What two processes do is a scenario, a function of this file that ``python -m tests.callbacks.test_distributed`` runs.
Many of them follow each other in one pair of processes, which each leave what the scenario gave as a file.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from lightning_recorder import (
    ActivationRecorder,
    Change,
    GradientRecorder,
    GraphRecorder,
    MemorySink,
    ParameterRecorder,
    RecorderWarning,
    Reduction,
    Site,
    Statistics,
    Values,
    read_dump,
)
from lightning_recorder.recorders import SHOWN_STATISTICS, SiteRecorder
from lightning_recorder.reductions import to_histogram
from tests.callbacks.models import LEAVES, Classifier, digits
from tests.reductions.reference import Moments, values_of

# The checkpoints are kept by a callback that the run which goes on does without.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")]

ROOT = Path(__file__).parents[2]
STEPS, ROWS = 3, 8
WEIGHTS_ONLY: dict[str, Any] = (
    {"weights_only": True} if "weights_only" in inspect.signature(Trainer.fit).parameters else {}
)


class Net(LightningModule):
    """Two linear layers that remember what they gave while they trained, behind one whose bits know no batch size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.squash = nn.Softsign()
        self.hidden = nn.Linear(64, 7)
        self.head = nn.Linear(7, 10)
        self.kept: dict[str, list[Tensor]] = {"squash": [], "hidden": [], "gradient": []}

    def forward(self, x: Tensor) -> Tensor:
        squashed = self.squash(x.flatten(1) - 0.5)
        hidden = self.hidden(squashed)
        if self.training:
            self.kept["squash"].append(squashed.detach().clone())
            self.kept["hidden"].append(hidden.detach().clone())
            hidden.register_hook(lambda grad: self.kept["gradient"].append(grad.clone()))
        logits: Tensor = self.head(F.relu(hidden))
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self(batch[0])

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_of(folder: Path, callbacks: Sequence[Callback], **options: Any) -> Trainer:
    seed_everything(5, verbose=False)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    defaults: dict[str, Any] = {**quiet, "strategy": "ddp", "devices": 2, "max_epochs": 1, "logger": False}
    options = {**defaults, **options}
    return Trainer(default_root_dir=folder, accelerator="cpu", callbacks=list(callbacks), **options)


def train(
    folder: Path,
    callbacks: Sequence[Callback],
    model: LightningModule | None = None,
    *,
    loader: Any = None,
    validation: Any = None,
    checkpoint: Path | None = None,
    **options: Any,
) -> LightningModule:
    """Train for three steps on each of two ranks, of eight rows each unless a loader says otherwise."""
    trainer = trainer_of(folder, callbacks, **options)
    model = model or Net()
    trainer.fit(model, loader or digits(2 * STEPS, ROWS), validation, ckpt_path=checkpoint, **WEIGHTS_ONLY)
    return model


def watching(sink: MemorySink, *names: str, **options: Any) -> ActivationRecorder:
    """Records every step in full."""
    options = {"every_n_train_steps": 1, "statistics": SHOWN_STATISTICS, "dump": False, "sinks": [sink], **options}
    return ActivationRecorder(names or None, **options)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def written(sink: MemorySink) -> dict[str, Any]:
    return {"scalars": sink.scalars, "histograms": sink.histograms}


def this_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


# Scenarios.

Scenario = Callable[[Path], Any]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


@scenario
def merged(folder: Path) -> dict[str, Any]:
    sink = MemorySink()
    options: dict[str, Any] = {"every_n_train_steps": 1, "statistics": SHOWN_STATISTICS, "sinks": [sink]}
    gradients, parameters = GradientRecorder("hidden", **options), ParameterRecorder(**options)
    model: Any = train(folder, [watching(sink, "squash", "hidden"), gradients, parameters])
    bare = train(folder, [])
    return {**written(sink), "kept": model.kept, "final": state_of(model), "bare": state_of(bare)}


COLLECTIVES = [
    name
    for name in (
        "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast",
        "broadcast_object_list", "gather", "gather_object", "isend", "irecv", "monitored_barrier", "recv", "reduce",
        "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
    )
    if hasattr(dist, name)
]  # fmt: skip


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of what waits for other ranks."""
    calls: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return wrapper

    plain = {name: getattr(dist, name) for name in COLLECTIVES}
    for name, function in plain.items():
        setattr(dist, name, counting(name, function))
    try:
        yield calls
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)


class Tally(Callback):
    """Notes the calls of each batch; stands behind the recorder."""

    def __init__(self, calls: Counter[str]) -> None:
        self.calls = calls
        self.by_batch: list[dict[str, int]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.calls.clear()

    def on_train_batch_end(self, *args: Any) -> None:
        self.by_batch.append(dict(self.calls))


@scenario
def transfers(folder: Path) -> dict[str, Any]:
    found = {}
    for name, recorders in ("bare", []), ("recorded", [watching(MemorySink())]):
        with counted() as calls:
            tally = Tally(calls)
            train(folder, [*recorders, tally])
        found[name] = tally.by_batch
    return found


class OneSided(Net):
    """Has a module for each rank, which the other one does not run, and one whose output differs in shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.varied = (nn.Identity() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.global_rank == 0:
            self.first(torch.full((2, 3), 1.0))
        else:
            self.second(torch.full((5,), 2.0))
        self.varied(torch.full((3, 4), 1.0) if self.global_rank == 0 else torch.full((2, 2, 2), 6.0))
        return super().forward(x)


@scenario
def one_sided(folder: Path) -> dict[str, Any]:
    """Rank 0 has batches of 4 rows and 2 of them to validate with, rank 1 batches of 12 rows and 3 of them."""
    sink = MemorySink()
    rank = this_rank()
    rows, batches = (4, 12)[rank], (2, 3)[rank]
    train(
        folder,
        [watching(sink, stages=["train", "validate"])],
        OneSided(),
        loader=digits(STEPS, rows),
        validation=digits(batches, rows),
        use_distributed_sampler=False,
    )
    return written(sink)


@scenario
def shapes(folder: Path) -> dict[str, Any]:
    """A reduction that keeps a number for each element of what differs between the ranks."""
    sink = MemorySink()
    train(folder, [watching(sink, "varied", "head", extra=[Change()])], OneSided())
    return written(sink)


@scenario
def stage_shapes(folder: Path) -> dict[str, Any]:
    """The same where training and validation have batches of another size."""
    sink = MemorySink()
    recorder = watching(sink, "head", stages=["train", "validate"], extra=[Change()])
    train(folder, [recorder], loader=digits(2 * STEPS, 8), validation=digits(4, 4))
    return written(sink)


class Scaled(Reduction):
    """The sum of a function of the values; its settings have no text that is the same in every process."""

    width = 1
    statistics = ("scaled_sum",)

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def update_state(self, state: Tensor, values: Values) -> None:
        state[0] += self.function(values.flat).sum()

    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        return {"scaled_sum": state[..., 0]}


def doubled(values: Tensor) -> Tensor:
    return 2 * values


@scenario
def own_reduction(folder: Path) -> dict[str, Any]:
    sink = MemorySink()
    model: Any = train(folder, [watching(sink, "squash", extra=[Scaled(doubled)])])
    return {**written(sink), "kept": model.kept}


@scenario
def local_reduction(folder: Path) -> dict[str, Any]:
    class Local(Scaled):
        pass

    sink = MemorySink()
    model: Any = train(folder, [watching(sink, "squash", extra=[Local(doubled)])])
    return {**written(sink), "kept": model.kept}


class Unmergeable(Scaled):
    """Cannot merge states that have seen anything."""

    additive = False

    def merge_states(self, state: Tensor, other: Tensor) -> None:
        if bool(other.any()):
            raise ValueError("these do not merge")

@scenario
def unmergeable(folder: Path) -> dict[str, Any]:
    sink = MemorySink()
    train(folder, [watching(sink, "squash", extra=[Unmergeable(doubled)])])
    return written(sink)


class Sabotage(Callback):
    """Makes a method of the recorder of one rank raise from a step on; stands before the recorder."""

    def __init__(self, recorder: ActivationRecorder, rank: int, method: str, step: int = 1) -> None:
        self.recorder, self.rank, self.method, self.step = recorder, rank, method, step

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        run = self.recorder._run
        if trainer.global_rank == self.rank and trainer.global_step == self.step and run is not None:
            owner: Any = run.recorder.states if hasattr(run.recorder.states, self.method) else run.recorder
            setattr(owner, self.method, broken)


def broken(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("injected")


def sabotaged(folder: Path, rank: int, method: str) -> dict[str, Any]:
    sink = MemorySink()
    recorder = watching(sink, "squash")
    with counted() as calls:
        tally = Tally(calls)
        model: Any = train(folder, [Sabotage(recorder, rank, method), recorder, tally])
    return {**written(sink), "kept": model.kept, "calls": tally.by_batch}


for _rank in 0, 1:
    for _method in "attach", "snapshot", "reset":
        SCENARIOS[f"broken_{_method}_{_rank}"] = lambda folder, rank=_rank, method=_method: sabotaged(  # type: ignore[misc]  # bound here
            folder, rank, method
        )


class Late(ActivationRecorder):
    """Fails on rank 1 when the ranks have agreed to record."""

    def make_recorder(self, modules: Mapping[str, nn.Module], stage: str) -> SiteRecorder:
        if modules and this_rank() == 1:
            raise ValueError("injected")
        return super().make_recorder(modules, stage)


@scenario
def late(folder: Path) -> dict[str, Any]:
    sink = MemorySink()
    train(folder, [Late("squash", every_n_train_steps=1, statistics="count", sinks=[sink])])
    return written(sink)


@scenario
def switched_off(folder: Path) -> dict[str, Any]:
    sink = MemorySink()
    if this_rank() == 1:
        os.environ["LIGHTNING_RECORDER"] = "off"
    try:
        train(folder, [watching(sink, "squash"), GraphRecorder(formats=[])])
    finally:
        os.environ.pop("LIGHTNING_RECORDER", None)
    return written(sink)


@scenario
def other_modules(folder: Path) -> dict[str, Any]:
    """Rank 1 has another module than rank 0."""
    sink = MemorySink()
    model = Net()
    model.add_module(f"extra{this_rank()}", nn.Identity())
    train(folder, [watching(sink)], model)
    return written(sink)


class Drift(Callback):
    """Changes a parameter on rank 1 alone when the training starts."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        self.change = change

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.global_rank == 1:
            with torch.no_grad():
                self.change(pl_module.hidden.weight)


def drifted(folder: Path, change: Callable[[Tensor], object]) -> dict[str, Any]:
    sink = MemorySink()
    recorder = ParameterRecorder(every_n_train_steps=1, statistics=SHOWN_STATISTICS, sinks=[sink])
    train(folder, [Drift(change), recorder])
    return written(sink)


@scenario
def shifted(folder: Path) -> dict[str, Any]:
    return drifted(folder, lambda weight: weight.add_(1e-3))


@scenario
def negated(folder: Path) -> dict[str, Any]:
    """The mean stays, the values do not."""
    return drifted(folder, lambda weight: weight.sub_(2 * (weight - weight.double().mean())))


@scenario
def spoilt(folder: Path) -> dict[str, Any]:
    return drifted(folder, lambda weight: weight.fill_(math.nan))


class Sharded(Net):
    """Seven and ten rows of weights over two ranks."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh: Any = self.device_mesh
        for layer in self.hidden, self.head:
            fully_shard(layer, mesh=mesh["data_parallel"])


class Whole(Callback):
    """Keeps the whole parameters of each step, as they are before it."""

    def __init__(self) -> None:
        self.by_step: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        whole = {name: value.detach() for name, value in pl_module.named_parameters()}
        self.by_step.append({name: getattr(value, "full_tensor", value.clone)() for name, value in whole.items()})


@scenario
def sharded(folder: Path) -> dict[str, Any]:
    sink, whole = MemorySink(), Whole()
    options: dict[str, Any] = {"every_n_train_steps": 1, "statistics": SHOWN_STATISTICS, "sinks": [sink]}
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    recorders = [watching(sink, "hidden"), GradientRecorder("hidden", **options), ParameterRecorder(**options)]
    model: Any = train(folder, [whole, *recorders], Sharded(), strategy=strategy)
    bare_strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    bare: Any = train(folder, [], Sharded(), strategy=bare_strategy)
    final = [{name: value.full_tensor() for name, value in each.state_dict().items()} for each in (model, bare)]
    return {**written(sink), "kept": model.kept, "whole": whole.by_step, "final": final[0], "bare": final[1]}


@scenario
def unused(folder: Path) -> dict[str, Any]:
    sink = MemorySink()
    model = Net()
    model.extra = nn.Linear(2, 2)
    train(folder, [watching(sink, "hidden")], model, strategy="ddp_find_unused_parameters_true")
    return written(sink)


@scenario
def windows(folder: Path) -> dict[str, Any]:
    """Two epochs of three steps, of which windows of two or epochs are a record, and evaluations."""
    found: dict[str, Any] = {}
    for reduce in 2, "epoch":
        sink = MemorySink()
        recorder = watching(sink, "squash", reduce=reduce, stages=["train", "validate"])
        train(folder, [recorder], validation=digits(4, 4), max_epochs=2)
        found[str(reduce)] = sink.scalars
    return found


@scenario
def tested(folder: Path) -> dict[str, Any]:
    sink = MemorySink()
    trainer_of(folder, [watching(sink, "squash", stages=["test"])]).test(Net(), digits(4, 4), verbose=False)
    return written(sink)


class Cadence(Callback):
    """Notes the interval after each batch; stands behind the recorder."""

    def __init__(self, recorder: ActivationRecorder) -> None:
        self.recorder = recorder
        self.found: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        assert self.recorder._run is not None
        self.found.append(self.recorder._run.every_n_train_steps)


@scenario
def budgeted(folder: Path) -> dict[str, Any]:
    sink = MemorySink()
    recorder = watching(sink, "squash", max_overhead=1e-6)
    cadence = Cadence(recorder)
    train(folder, [recorder, cadence], loader=digits(16, 8))
    return {**written(sink), "cadence": cadence.found}


def resumable(sink: MemorySink) -> ActivationRecorder:
    """Its windows of four steps do not end with the epochs of three."""
    return watching(sink, "squash", "hidden", reduce=4)


@scenario
def resumed(folder: Path) -> dict[str, Any]:
    found = {}
    whole, rest = MemorySink(), MemorySink()
    keeper = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    train(folder, [resumable(whole), keeper], max_epochs=2, enable_checkpointing=True)
    train(folder, [resumable(rest)], max_epochs=2, checkpoint=folder / "epoch=0.ckpt")
    for name, sink in ("whole", whole), ("rest", rest):
        found[name] = written(sink)
    return found


@scenario
def empty_share(folder: Path) -> dict[str, Any]:
    """Rank 1 has nothing to validate with, which the model allows."""
    sink = MemorySink()
    model = Net()
    model.allow_zero_length_dataloader_with_multiple_devices = True
    validation = digits(2, 4) if this_rank() == 0 else torch.utils.data.DataLoader([])
    train(
        folder,
        [watching(sink, "squash", stages=["train", "validate"])],
        model,
        loader=digits(STEPS, ROWS),
        validation=validation,
        use_distributed_sampler=False,
    )
    return written(sink)


# Scenarios of which the last act is left to Lightning.


class Complete(Classifier):
    """Has a module that runs on rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 3).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if self.global_rank == 0:
            with torch.no_grad():
                self.extra(torch.ones(2, 3))
        return super().training_step(batch, batch_idx)


class Final(Callback):
    """Leaves the parameters of a run beside its results."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            torch.save(state_of(pl_module), Path(trainer.default_root_dir) / "final.pt")


def complete(folder: Path, strategy: str) -> dict[str, Any]:
    """Train with and without the recorders, with a logger and checkpoints."""
    for how in "bare", "recorded":
        torch.manual_seed(0)
        recorders = [GraphRecorder(strict=True), ActivationRecorder(strict=True), GradientRecorder(strict=True)]
        callbacks = [Final()] if how == "bare" else [*recorders, Final()]
        options = {"strategy": strategy, "logger": True, "enable_checkpointing": True, "log_every_n_steps": 2}
        train(folder / how, callbacks, Complete(), **options)
    latest = [len(each.latest) for each in recorders[1:] if isinstance(each, (ActivationRecorder, GradientRecorder))]
    return {"latest": latest, "pid": os.getpid()}


for _strategy in "ddp", "ddp_spawn", "ddp_fork", "ddp_notebook":
    SCENARIOS[_strategy] = lambda folder, strategy=_strategy: complete(folder, strategy)  # type: ignore[misc]  # bound here


class Doomed(Net):
    """Ends one rank in the second of its steps."""

    def __init__(self, rank: int, end: Callable[[], object]) -> None:
        super().__init__()
        self.rank, self.end = rank, end

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if batch_idx == 1 and self.global_rank == self.rank:
            self.end()
        return super().training_step(batch, batch_idx)


def doomed(folder: Path, rank: int, end: Callable[[], object]) -> None:
    options: dict[str, Any] = {"every_n_train_steps": 1, "statistics": "count"}
    recorders = [kind(**options) for kind in (ActivationRecorder, GradientRecorder, ParameterRecorder)]
    with counted() as calls:
        tally = Tally(calls)
        try:
            train(folder, [*recorders, tally], Doomed(rank, end))
        finally:
            folder.mkdir(exist_ok=True)
            torch.save(dict(calls), folder / f"calls.{this_rank()}.pt")


def raise_error() -> None:
    raise LookupError("a batch that cannot be read")


@scenario
def raises_0(folder: Path) -> None:
    doomed(folder, 0, raise_error)


@scenario
def raises_1(folder: Path) -> None:
    doomed(folder, 1, raise_error)


@scenario
def dies_1(folder: Path) -> None:
    doomed(folder, 1, lambda: os._exit(1))


def main(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            result = SCENARIOS[name](folder / name)
        messages = [str(each.message) for each in told if issubclass(each.category, RecorderWarning)]
        torch.save((result, messages), folder / f"{name}.{this_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
