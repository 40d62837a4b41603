"""The callbacks on several processes.

Each scenario is a function of this file, which ``python -m tests.callbacks.test_distributed`` runs in two processes.
A pair of processes runs many scenarios in a row, and each process writes the result of a scenario to a file.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from lightning_recorder import (
    ActivationRecorder,
    BackwardInput,
    BackwardOutput,
    ForwardOutput,
    ForwardPre,
    GradientRecorder,
    GraphRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    RecorderWarning,
    Schedule,
    open_recording,
    read_dump,
)
from lightning_recorder.callbacks import attach
from lightning_recorder.callbacks.attach import AttachRecorders
from lightning_recorder.reductions import (
    BatchMean,
    Change,
    ChannelExtrema,
    ChannelMoments,
    Norms,
    Reduction,
    Statistics,
    Values,
    to_histogram,
)
from lightning_recorder.statistics import SHOWN_STATISTICS, BaseStatisticsRecorder
from lightning_recorder.statistics.rank_channel import RankChannel
from lightning_recorder.tensors import Recorder
from tests import forks
from tests.callbacks.models import LEAVES, Classifier, LeaveGroup, digits, leave_group
from tests.reductions.reference import Moments, values_of

# The resumed run does not have the callback that saves the checkpoints.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")]

ROOT = Path(__file__).parents[2]
STEPS, ROWS = 3, 8
WEIGHTS_ONLY: dict[str, Any] = (
    {"weights_only": True} if "weights_only" in inspect.signature(Trainer.fit).parameters else {}
)


class Net(LightningModule):
    """Two linear layers that store their training outputs, after a layer whose bits do not depend on the batch size."""

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

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
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


def shared(batches: int) -> DataLoader[Any]:
    """Return every second row of the given number of batches, in order; Lightning would shuffle them."""
    dataset = digits(batches, ROWS).dataset
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, 2, this_rank(), shuffle=False)
    return DataLoader(dataset, batch_size=ROWS, sampler=sampler)


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
    """Train for three steps on each of two ranks, with eight rows each by default."""
    trainer = trainer_of(folder, callbacks, **options)
    model = Net() if model is None else model
    trainer.fit(model, loader or shared(2 * STEPS), validation, ckpt_path=checkpoint, **WEIGHTS_ONLY)
    return model


def watching(sink: MemorySink, *names: str, **options: Any) -> ActivationRecorder:
    """Return the callbacks that record every step in full."""
    options = {
        "every_n_train_steps": 1,
        "statistics": SHOWN_STATISTICS,
        "sinks": [sink],
        "outputs": Outputs(dumps=False),
        **options,
    }
    return ActivationRecorder(names or None, **options)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def written(sink: MemorySink) -> dict[str, Any]:
    return {"scalars": sink.scalars, "histograms": sink.histograms}


def this_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


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
    recorders = [
        watching(sink, "squash", "hidden"),
        GradientRecorder("hidden", **options),
        ParameterRecorder(**options),
    ]
    model: Any = train(folder, recorders)
    bare = train(folder, [])
    return {**written(sink), "kept": model.kept, "final": state_of(model), "bare": state_of(bare)}


@scenario
def noise(folder: Path) -> dict[str, Any]:
    """Record the gradient of each batch of both ranks, and keep them."""
    recorder = ParameterRecorder(
        "head", parts=["gradients", "batch_gradients"], every_n_train_steps=1, outputs=Outputs(plots=False)
    )
    model = Net()
    kept: list[Tensor] = []
    model.head.weight.register_hook(lambda grad: kept.append(grad.clone()))
    train(folder, [recorder], model, accumulate_grad_batches=STEPS)
    seen = {site.path: found.scalars["rms"] for site, found in recorder.latest.items()} if this_rank() == 0 else {}
    return {"seen": seen, "kept": kept}


def rows(total: Tensor, new: Tensor) -> Tensor:
    """Sum the rows of all batches; unknown to be associative."""
    return total.sum(0, keepdim=True) + new.sum(0, keepdim=True)


USER: dict[str, Any] = {
    "peak": torch.maximum,
    "total": torch.add,
    "rows": rows,
    "average": torchmetrics.MeanMetric,
    "all": torchmetrics.CatMetric,
    "norms": Norms,
    "channels": ChannelMoments(-1),
}


class Kept(Callback):
    """Keeps the inputs and outputs of a module, and their gradients, at each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, list[Tensor]]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        kinds: dict[str, type[Recorder]]
        kinds = {"in": ForwardPre, "out": ForwardOutput, "in.grad": BackwardInput, "out.grad": BackwardOutput}
        self.below = {name: kind().select(pl_module, "head") for name, kind in kinds.items()}

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps.append({name: [each.clone() for each in below["head"]] for name, below in self.below.items()})
        for below in self.below.values():
            below.reset()


@scenario
def user_reductions(folder: Path) -> dict[str, Any]:
    """Record inputs, outputs and their gradients with reductions of the user, at every step, with accumulation."""
    seen: dict[str, Any] = {}
    options: dict[str, Any] = {"tensors": ["inputs", "outputs"], "extra": USER, "every_n_train_steps": 1}
    recorders = [
        kind("head", outputs=Outputs(plots=False), **options) for kind in (ActivationRecorder, GradientRecorder)
    ]
    kept = Kept()
    train(folder, [*recorders, kept], accumulate_grad_batches=STEPS)
    if this_rank() == 0:
        for recorder in recorders:
            for site, found in recorder.latest.items():
                path = site.path.partition("[")[0] + (".grad" if recorder.group == "gradients" else "")
                seen[path] = {**found.scalars, **found.tensors}
    return {"seen": seen, "kept": kept.steps}


COLLECTIVES = [
    name
    for name in (
        "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast",
        "broadcast_object_list", "gather", "gather_object", "isend", "irecv", "monitored_barrier", "recv", "reduce",
        "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
    )
    if hasattr(dist, name)
]  # fmt: skip


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of functions that wait for other ranks, in this thread."""
    calls: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
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
    """Counts the calls per batch. Comes after the recorder in the list of callbacks."""

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
    """Has one module per rank, which the other rank does not run, and one whose output shape differs between ranks."""

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
    """Rank 0 has training batches of 4 rows and 2 validation batches; rank 1 has batches of 12 rows and 3."""
    sink = MemorySink()
    rank = this_rank()
    rows, batches = (4, 12)[rank], (2, 3)[rank]
    train(
        folder,
        [watching(sink, schedule=Schedule(stages=["train", "validate"]))],
        OneSided(),
        loader=digits(STEPS, rows),
        validation=digits(batches, rows),
        use_distributed_sampler=False,
    )
    return written(sink)


@scenario
def shapes(folder: Path) -> dict[str, Any]:
    """Use an elementwise reduction on tensors whose shape differs between the ranks."""
    sink = MemorySink()
    train(folder, [watching(sink, "varied", "head", extra=[Change()])], OneSided())
    return written(sink)


@scenario
def stage_shapes(folder: Path) -> dict[str, Any]:
    """Use the same reduction when training and two validations have different batch sizes."""
    sink = MemorySink()
    recorder = watching(sink, "head", schedule=Schedule(stages=["train", "validate"]), extra=[Change()])
    train(folder, [recorder], validation=[digits(4, 4), digits(4, 2)])
    return written(sink)


class Doubling:
    """A setting whose text contains its memory address, like that of any object without its own ``__repr__``."""

    def __call__(self, values: Tensor) -> Tensor:
        return 2 * values


class Scaled(Reduction):
    """The sum of a function of the values."""

    width = 1
    statistics = ("scaled_sum",)

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def update_state(self, state: Tensor, values: Values) -> None:
        state[0] += self.function(values.flat.double()).sum()

    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        return {"scaled_sum": state[..., 0]}


@scenario
def own_reduction(folder: Path) -> dict[str, Any]:
    sink = MemorySink()
    model: Any = train(folder, [watching(sink, "squash", extra=[Scaled(Doubling())])])
    return {**written(sink), "kept": model.kept}


@scenario
def local_reduction(folder: Path) -> dict[str, Any]:
    class Local(Scaled):
        pass

    sink = MemorySink()
    model: Any = train(folder, [watching(sink, "squash", extra=[Local(Doubling())])])
    return {**written(sink), "kept": model.kept}


class Unmergeable(Scaled):
    """A reduction that cannot merge non-empty states."""

    additive = False

    def merge_states(self, state: Tensor, other: Tensor) -> None:
        if bool(other.any()):
            raise ValueError("these do not merge")


@scenario
def unmergeable(folder: Path) -> dict[str, Any]:
    sink = MemorySink()
    model: Any = train(folder, [watching(sink, "squash", extra=[Unmergeable(torch.neg)])])
    return {**written(sink), "trained": len(model.kept["squash"])}


@scenario
def unsendable(folder: Path) -> dict[str, Any]:
    """Only rank 1 reports a reduction, and its class cannot be pickled."""

    class Local(Scaled):
        pass

    sink = MemorySink()
    model: Any = train(folder, [watching(sink, "second", extra=[Local(torch.neg)])], OneSided())
    return {**written(sink), "trained": len(model.kept["squash"])}


class Sabotage(Callback):
    """Makes a method of one rank's recorder raise from a step on. Comes before the recorder in the list."""

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
    """Fails on rank 1 after the ranks have agreed to record."""

    def _make_recorder(self, modules: Mapping[str, nn.Module], stage: str) -> BaseStatisticsRecorder:
        if modules and this_rank() == 1:
            raise ValueError("injected")
        return super()._make_recorder(modules, stage)


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


def attached_on(folder: Path, ranks: Collection[int]) -> dict[str, Any]:
    """Train with the variable set on some ranks only."""
    attach._TIMEOUT_S = 2.0
    value = os.environ.pop("LIGHTNING_RECORDER", None)
    if this_rank() in ranks:
        os.environ["LIGHTNING_RECORDER"] = "on"
    try:
        model: Any = train(folder, [AttachRecorders()])
    finally:
        os.environ.pop("LIGHTNING_RECORDER", None)
        os.environ.update({} if value is None else {"LIGHTNING_RECORDER": value})
    return {"trained": len(model.kept["squash"])}


@scenario
def attached_on_all(folder: Path) -> dict[str, Any]:
    return attached_on(folder, (0, 1))


@scenario
def attached_on_0(folder: Path) -> dict[str, Any]:
    return attached_on(folder, (0,))


@scenario
def attached_on_1(folder: Path) -> dict[str, Any]:
    return attached_on(folder, (1,))


@scenario
def other_modules(folder: Path) -> dict[str, Any]:
    """Rank 1 has a different module from rank 0."""
    sink = MemorySink()
    model = Net()
    model.add_module(f"extra{this_rank()}", nn.Identity())
    train(folder, [watching(sink)], model)
    return written(sink)


class Drift(Callback):
    """Changes a parameter on rank 1 only, when training starts."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        self.change = change

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.global_rank == 1:
            with torch.no_grad():
                self.change(pl_module.hidden.weight)


def drifted(folder: Path, change: Callable[[Tensor], object]) -> dict[str, Any]:
    sink = MemorySink()
    outputs = Outputs(findings=False)  # a finding would take the place of the warning
    recorder = ParameterRecorder(every_n_train_steps=1, statistics=SHOWN_STATISTICS, sinks=[sink], outputs=outputs)
    train(folder, [Drift(change), recorder])
    return written(sink)


@scenario
def shifted(folder: Path) -> dict[str, Any]:
    return drifted(folder, lambda weight: weight.add_(1e-3))


@scenario
def negated(folder: Path) -> dict[str, Any]:
    """Change the values of a tensor and keep their mean."""
    return drifted(folder, lambda weight: weight.sub_(2 * (weight - weight.double().mean())))


@scenario
def spoilt(folder: Path) -> dict[str, Any]:
    return drifted(folder, lambda weight: weight.fill_(math.nan))


class Sharded(Net):
    """Seven and ten rows of weights, sharded over two ranks."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh: Any = self.device_mesh
        for layer in self.hidden, self.head:
            fully_shard(layer, mesh=mesh["data_parallel"])


class Whole(Callback):
    """Stores the full parameters before each step."""

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
def sharded_channels(folder: Path) -> dict[str, Any]:
    whole = Whole()
    extra = [ChannelMoments(dim=0), ChannelExtrema(dim=-1), BatchMean()]
    recorder = ParameterRecorder("hidden", every_n_train_steps=1, parts=["values"], extra=extra)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    train(folder, [whole, recorder], Sharded(), strategy=strategy)
    return {"found": {site.path: dict(each.tensors) for site, each in recorder.latest.items()}, "whole": whole.by_step}


@scenario
def unused(folder: Path) -> dict[str, Any]:
    sink = MemorySink()
    model = Net()
    model.extra = nn.Linear(2, 2)
    train(folder, [watching(sink, "hidden")], model, strategy="ddp_find_unused_parameters_true")
    return written(sink)


@scenario
def windows(folder: Path) -> dict[str, Any]:
    """Record windows of two steps or epochs over two epochs of three steps, and evaluations."""
    found: dict[str, Any] = {}
    for reduce in 2, "epoch":
        sink = MemorySink()
        recorder = watching(sink, "squash", reduce=reduce, schedule=Schedule(stages=["train", "validate"]))
        train(folder, [recorder], validation=digits(4, 4), max_epochs=2)
        found[str(reduce)] = sink.scalars
    return found


@scenario
def evaluated(folder: Path) -> dict[str, Any]:
    sink = MemorySink()
    trainer_of(folder, [watching(sink, "squash", schedule=Schedule(stages=["test"]))]).test(
        Net(), digits(4, 4), verbose=False
    )
    return written(sink)


class Cadence(Callback):
    """Stores the recording interval after each batch. Comes after the recorder in the list of callbacks."""

    def __init__(self, recorder: ActivationRecorder) -> None:
        self.recorder = recorder
        self.found: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        assert self.recorder._run is not None
        self.found.append(self.recorder._run.every_n_train_steps)


@scenario
def budgeted(folder: Path) -> dict[str, Any]:
    sink = MemorySink()
    recorder = watching(sink, "squash", schedule=Schedule(max_overhead=1e-6))
    cadence = Cadence(recorder)
    train(folder, [recorder, cadence], loader=digits(16, 8))
    return {**written(sink), "cadence": cadence.found}


def resumable(sink: MemorySink) -> ActivationRecorder:
    """Record windows of four steps, which do not align with the epochs of three."""
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
    """Rank 1 has no validation batches, which the model allows."""
    sink = MemorySink()
    model = Net()
    model.allow_zero_length_dataloader_with_multiple_devices = True
    nothing: Any = []
    validation = digits(2, 4) if this_rank() == 0 else DataLoader(nothing)
    train(
        folder,
        [watching(sink, "squash", schedule=Schedule(stages=["train", "validate"]))],
        model,
        loader=digits(STEPS, ROWS),
        validation=validation,
        use_distributed_sampler=False,
        max_epochs=2,
    )
    return written(sink)


# Scenarios that Lightning itself ends.


class Complete(Classifier):
    """Has a module that runs on rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 3).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if self.global_rank == 0:
            with torch.no_grad():
                self.extra(torch.ones(2, 3))
        return super().training_step(batch, batch_idx)


class Final(Callback):
    """Saves the parameters of a run beside its results."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            torch.save(state_of(pl_module), Path(trainer.default_root_dir) / "final.pt")


def complete(folder: Path, strategy: str) -> dict[str, Any]:
    """Train with the recorders, a logger and checkpoints, and without the recorders if that is fast."""
    for how in ("bare", "recorded") if strategy == "ddp" else ("recorded",):
        torch.manual_seed(0)
        recorders = [GraphRecorder(strict=True), ActivationRecorder(strict=True), GradientRecorder(strict=True)]
        callbacks = [*([] if how == "bare" else recorders), Final(), LeaveGroup()]
        options: dict[str, Any] = {
            "strategy": strategy,
            "logger": True,
            "enable_checkpointing": True,
            "log_every_n_steps": 2,
        }
        train(folder / how, callbacks, Complete(), loader=digits(2 * STEPS, ROWS), **options)
    latest = [len(each.latest) for each in recorders[1:] if isinstance(each, (ActivationRecorder, GradientRecorder))]
    return {"latest": latest, "is_open": RankChannel.current is not None}


for _strategy in "ddp", "ddp_spawn", "ddp_fork", "ddp_notebook":
    SCENARIOS[_strategy] = lambda folder, strategy=_strategy: complete(folder, strategy)  # type: ignore[misc]  # bound here


class Doomed(Net):
    """Ends one rank in its second step."""

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
def raises_1(folder: Path) -> None:
    doomed(folder, 1, raise_error)


@scenario
def dies_1(folder: Path) -> None:
    doomed(folder, 1, lambda: os._exit(1))


# Tests.

HEALTHY = (
    "merged", "transfers", "one_sided", "shapes", "unused", "sharded", "windows", "evaluated", "budgeted",
    "resumed", "switched_off", "other_modules", "shifted", "negated", "spoilt", "stage_shapes", "own_reduction",
    "local_reduction", "broken_attach_0", "broken_attach_1", "broken_snapshot_0", "broken_snapshot_1", "broken_reset_0",
    "broken_reset_1", "ddp", "user_reductions", "sharded_channels", "noise",
)  # fmt: skip
SPAWNED = ("ddp_spawn", "ddp_fork", "ddp_notebook")


def go(folder: Path, *names: str, timeout_s: float = 150.0, of: str = __name__) -> tuple[int, str]:
    """Run scenarios of a module in a process, for which Lightning starts the second rank; return status and output."""
    (code,), log = forks.run("-m", of, folder, *names, folder=folder, timeout_s=timeout_s)
    return code, log


def go_in_forks(folder: Path, name: str, timeout_s: float = 150.0) -> None:
    """Run a scenario in two ranks that another program has started, and check that both end."""
    codes, log = forks.run(
        "-m", "tests.callbacks.test_distributed", folder, name, folder=folder, ranks=2, timeout_s=timeout_s
    )
    assert codes == [0, 0], log[-3000:]


def outcome(folder: Path, name: str) -> tuple[list[Any], list[list[str]]]:
    """Return the result of a scenario on each rank, and the warnings of this package."""
    found = [torch.load(folder / f"{name}.{rank}.pt", weights_only=False) for rank in (0, 1)]
    return [result for result, _ in found], [warned for _, warned in found]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the results of all scenarios that end normally."""
    folder = tmp_path_factory.mktemp("pair")
    code, log = go(folder, *HEALTHY, timeout_s=400.0)
    assert code == 0, log[-3000:]
    return folder


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the results of a process that spawns its workers."""
    folder = tmp_path_factory.mktemp("launched")
    code, log = go(folder, *SPAWNED, timeout_s=300.0)
    assert code == 0, log[-3000:]
    assert "RecorderWarning" not in log
    return folder


def union(results: Sequence[Mapping[str, Any]], name: str, step: int) -> list[Tensor]:
    return [result["kept"][name][step] for result in results]


def at(scalars: Mapping[str, Mapping[int, float]], place: str, step: int) -> dict[str, float]:
    """Return the scalars of a site, such as ``activations/hidden``, by statistic, without the per-rank ones."""
    tags = {tag.rpartition("/")[2]: found for tag, found in scalars.items() if tag.rpartition("/")[0] == place}
    return {statistic: found[step] for statistic, found in tags.items() if step in found}


def counted_values(scalars: Mapping[str, Any], place: str) -> dict[int, float]:
    found: dict[int, float] = scalars[f"{place}/count"]
    return found


def same_histogram(one: Any, other: Any) -> bool:
    arrays = [(each.edges.tolist(), each.counts.tolist()) for each in (one, other)]
    return bool(one.min == other.min and one.max == other.max and arrays[0] == arrays[1])


def same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


PLACES = [("activations/squash", "squash"), ("activations/hidden", "hidden"), ("gradients/hidden", "gradient")]


def test_gradients_of_batches_are_merged(pair: Path) -> None:
    """The gradients of the batches are those of both ranks before they are averaged, with the division undone."""
    (one, other), _ = outcome(pair, "noise")
    every = torch.stack(one["kept"] + other["kept"]) * STEPS
    assert len(every) == 2 * STEPS
    assert one["seen"]["weight.batch_grad"] == pytest.approx(float(every.square().mean().sqrt()), rel=1e-6)
    assert one["seen"]["weight.grad"] == pytest.approx(float(every.mean(0).square().mean().sqrt()), rel=1e-5)


@pytest.mark.parametrize("step", range(STEPS))
@pytest.mark.parametrize(("place", "name"), PLACES)
def test_merged_states_are_one_reduction_over_the_ranks(pair: Path, place: str, name: str, step: int) -> None:
    """Counts, extrema and bins are bitwise those of the tensors of both ranks; moments agree within their bounds.

    Gradients are those of the mean of both losses, so each is half of the gradient of its rank's own loss.
    """
    results, warned = outcome(pair, "merged")
    tensors = [tensor / 2 if name == "gradient" else tensor for tensor in union(results, name, step)]
    scalars = at(results[0]["scalars"], place, step)
    values = values_of(tensors)
    Moments.of(values).assert_near(scalars)
    assert (scalars["min"], scalars["max"]) == (min(values), max(values))
    assert scalars["zero_fraction"] == values.count(0.0) / len(values)
    assert (scalars["nan_count"], scalars["inf_count"]) == (0, 0)
    means = [math.fsum(values_of([each])) / each.numel() for each in tensors]
    found = (scalars["rank_mean_min"], scalars["rank_mean_max"])
    assert found == pytest.approx((min(means), max(means)), rel=1e-9, abs=1e-12 * scalars["rms"])
    once = Statistics()
    once.update(torch.cat(tensors))
    computed = once.compute()
    bins = computed.pop("histogram").long()
    expected = to_histogram({key: float(value) for key, value in computed.items()}, bins)
    assert same_histogram(results[0]["histograms"][f"{place}/histogram"][step], expected)
    assert warned == [[], []]


def test_rank_zero_alone_writes(pair: Path) -> None:
    """Only rank 0 writes to its sinks."""
    assert outcome(pair, "merged")[0][1]["scalars"] == {}


@pytest.mark.parametrize("name", ["merged", "sharded"])
def test_parameters_are_those_of_a_run_without_callbacks(pair: Path, name: str) -> None:
    """Recording leaves the trained parameters bitwise unchanged on both ranks."""
    for result in outcome(pair, name)[0]:
        assert same_tensors(result["final"], result["bare"])


def test_two_processes_record_what_one_does_over_their_batches(pair: Path, tmp_path: Path) -> None:
    """One process over both ranks' batches gives equal records, up to a relative 1e-5 from matrix products."""
    sink = MemorySink()
    options: dict[str, Any] = {"every_n_train_steps": 1, "sinks": [sink], "statistics": SHOWN_STATISTICS}
    recorders = [
        watching(sink, "squash", "hidden"),
        GradientRecorder("hidden", **options),
        ParameterRecorder(**options),
    ]
    train(tmp_path, recorders, loader=digits(STEPS, 2 * ROWS), devices=1, strategy="auto")
    two = outcome(pair, "merged")[0][0]
    assert {tag for tag in two["scalars"] if "/rank_mean_" not in tag} == set(sink.scalars)
    for tag, by_step in sink.scalars.items():
        place, _, statistic = tag.rpartition("/")
        if statistic == "batch_spread":  # of the batch of each process, which has a mean of its own
            continue
        is_size = statistic in ("mean", "std", "rms", "min", "max")
        for step, value in by_step.items():
            size = sink.scalars[f"{place.removesuffix('/update_ratio')}/rms"][step] if is_size else 1.0
            assert two["scalars"][tag][step] == pytest.approx(value, rel=1e-5, abs=1e-5 * size), (tag, step)
    histograms = two["histograms"]["activations/squash/histogram"]
    alone = sink.histograms["activations/squash/histogram"]
    assert all(same_histogram(histograms[step], alone[step]) for step in range(STEPS))


def test_replicated_parameters_count_once(pair: Path) -> None:
    """Parameters, averaged gradients and updates are recorded once, and all ranks agree on them."""
    scalars = outcome(pair, "merged")[0][0]["scalars"]
    sizes = {"hidden/weight": 448, "hidden/bias": 7, "head/weight": 70, "head/bias": 10}
    for name, size in sizes.items():
        for suffix in ("", ".grad", ".update"):
            place = f"parameters/{name}{suffix}"
            assert counted_values(scalars, place) == dict.fromkeys(range(STEPS), size)
            assert scalars[f"{place}/rank_mean_min"] == scalars[f"{place}/rank_mean_max"]
            assert scalars[f"{place}/mean"] == scalars[f"{place}/rank_mean_min"]


@pytest.mark.parametrize("name", ["merged", "one_sided", "sharded", "unused"])
def test_tags_name_modules_as_the_model_does(pair: Path, name: str) -> None:
    """Tags do not contain the wrappers that the strategy adds to the model."""
    scalars = outcome(pair, name)[0][0]["scalars"]
    functions = {"relu", "cross_entropy"}
    known = {"squash", "hidden", "head", "first", "second", "varied", *functions}
    assert {tag.split("/")[1] for tag in scalars} <= known
    assert not [tag for tag in scalars if "module" in tag]


def test_a_record_takes_no_transfer_in_the_training_thread(pair: Path) -> None:
    """The training thread calls no function that waits for other ranks, with and without recorders."""
    for result in outcome(pair, "transfers")[0]:
        assert result == {"bare": [{}] * STEPS, "recorded": [{}] * STEPS}


def test_a_module_of_one_rank_has_its_record(pair: Path) -> None:
    """A module that runs on one rank only is recorded, and values of different shapes are merged."""
    results, warned = outcome(pair, "one_sided")
    scalars = results[0]["scalars"]
    assert counted_values(scalars, "activations/first") == dict.fromkeys(range(STEPS), 6)
    assert counted_values(scalars, "activations/second") == dict.fromkeys(range(STEPS), 5)
    for name, mean in ("first", 1), ("second", 2):
        found = at(scalars, f"activations/{name}", 0)
        assert [found[key] for key in ("mean", "rank_mean_min", "rank_mean_max")] == [mean] * 3
    varied = at(scalars, "activations/varied", 2)
    assert [varied[key] for key in ("count", "mean", "min", "max", "rank_mean_min", "rank_mean_max")] == [
        20,
        3,
        1,
        6,
        1,
        6,
    ]
    assert warned == [[], []]


def test_uneven_batches_count_by_their_values(pair: Path) -> None:
    """Batches of 4 and 12 rows, and 2 and 3 validation batches, are weighted by their number of values."""
    scalars = outcome(pair, "one_sided")[0][0]["scalars"]
    assert counted_values(scalars, "activations/squash") == dict.fromkeys(range(STEPS), (4 + 12) * 64)
    assert counted_values(scalars, "activations_validate/squash") == {STEPS - 1: (2 * 4 + 3 * 12) * 64}


def test_elements_of_another_shape_on_each_rank_are_left_out(pair: Path) -> None:
    """An elementwise reduction is left out with one warning if shapes differ between ranks."""
    results, warned = outcome(pair, "shapes")
    places = [tag for tag in results[0]["scalars"] if tag.endswith("cosine_to_previous")]
    assert places == ["activations/head/cosine_to_previous"]
    assert counted_values(results[0]["scalars"], "activations/varied") == dict.fromkeys(range(STEPS), 20)
    assert [len(each) for each in warned] == [1, 0]
    assert "is not recorded at 'out' of module 'varied'" in warned[0][0]


def test_a_validation_may_have_batches_of_another_size_than_training(pair: Path) -> None:
    """Elementwise reductions support a different shape in each stage."""
    results, warned = outcome(pair, "stage_shapes")
    assert warned == [[], []]
    scalars = results[0]["scalars"]
    assert list(scalars["activations/head/cosine_to_previous"]) == list(range(STEPS))
    for loader, rows in (0, 4), (1, 2):
        end = f"dataloader_idx_{loader}"
        assert scalars[f"activations_validate/head/count/{end}"] == {STEPS - 1: 4 * rows * 10}
        assert list(scalars[f"activations_validate/head/cosine_to_previous/{end}"]) == [STEPS - 1]


@pytest.mark.parametrize("name", ["own_reduction", "local_reduction"])
def test_a_reduction_of_the_user_is_merged(pair: Path, name: str) -> None:
    """A user's reduction is merged wherever its class is defined and whatever text its settings have."""
    results, warned = outcome(pair, name)
    assert warned == [[], []]
    for step in range(STEPS):
        expected = 2 * math.fsum(values_of(union(results, "squash", step)))
        assert results[0]["scalars"]["activations/squash/scaled_sum"][step] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("path", ["in", "out", "in.grad", "out.grad"])
def test_results_of_the_user_are_merged(pair: Path, path: str) -> None:
    """Results of both ranks are those of all tensors, and a function that may not be associative has rank 0's.

    One warning per recorder, when the fit starts, names that function.
    """
    results, warned = outcome(pair, "user_reductions")
    assert [len(each) for each in warned] == [2, 0], warned
    assert all("records the results of rows (" in each for each in warned[0])
    seen = results[0]["seen"][path]
    ranks = [[tensor for step in result["kept"] for tensor in step[path]] for result in results]
    scales = (STEPS, STEPS / 2) if path.endswith("grad") else (1,)  # of each rank's own loss, or of the global one
    whole = [tensor.double() for tensors in ranks for tensor in tensors]
    assert len(whole) == 2 * STEPS
    joined = torch.cat(whole)
    expected = {
        "peak": torch.stack(whole).amax(0),
        "total": torch.stack(whole).sum(0),
        "rows": torch.cat(ranks[0]).double().sum(0, keepdim=True),
        "all": joined,
        "average": joined.mean(),
        "l2_norm": joined.norm(),
        "abs_max": joined.abs().max(),
        "channel_mean": joined.mean(0),
        "channel_rms": joined.square().mean(0).sqrt(),
    }
    found = {name: torch.as_tensor(seen[name], dtype=torch.float64) for name in expected}

    def fits(scale: float) -> bool:
        return all(torch.allclose(found[name], scale * value, 1e-5, 1e-7) for name, value in expected.items())

    assert any(map(fits, scales))


def test_unused_parameters_change_nothing(pair: Path) -> None:
    """Under ``ddp_find_unused_parameters_true``, the records are those of both ranks."""
    results, warned = outcome(pair, "unused")
    assert counted_values(results[0]["scalars"], "activations/hidden") == dict.fromkeys(range(STEPS), 2 * ROWS * 7)
    assert warned == [[], []]


def test_shards_of_a_parameter_are_merged(pair: Path) -> None:
    """Under FSDP2, a record covers the full parameter, even with uneven shards, and the activations of all ranks."""
    results, warned = outcome(pair, "sharded")
    scalars = results[0]["scalars"]
    for step, whole in enumerate(results[0]["whole"]):
        for name, tensor in whole.items():
            found = at(scalars, f"parameters/{name.replace('.', '/')}", step)
            Moments.of(values_of([tensor])).assert_near(found)
            assert (found["min"], found["max"]) == (float(tensor.min()), float(tensor.max()))
        assert counted_values(scalars, "parameters/hidden/weight.grad")[step] == 448
        assert counted_values(scalars, "parameters/hidden/weight.update")[step] == 448
        for place, name in PLACES[1:]:
            tensors = [tensor / 2 if name == "gradient" else tensor for tensor in union(results, name, step)]
            Moments.of(values_of(tensors)).assert_near(at(scalars, place, step))
    assert warned == [[], []]


def test_channels_of_which_each_rank_has_others_are_left_out(pair: Path) -> None:
    """Rows sharded over the ranks have no numbers of their own, with a warning; columns and means over rows have."""
    results, warned = outcome(pair, "sharded_channels")
    weight = results[0]["whole"][-1]["hidden.weight"]
    found = results[0]["found"]
    assert set(found["weight"]) == {"channel_min", "channel_max", "channel_abs_max", "batch_mean"}
    torch.testing.assert_close(found["weight"]["channel_max"], weight.amax(0).double(), rtol=0, atol=0)
    torch.testing.assert_close(found["weight"]["batch_mean"], weight.double().mean(0))
    assert len(warned[0]) == 2
    assert all(
        "each rank has other indices of dimension 0, along which the tensor is sharded" in each for each in warned[0]
    )


@pytest.mark.parametrize("name", ["shifted", "negated", "spoilt"])
def test_replicas_that_have_diverged_give_a_warning(pair: Path, name: str) -> None:
    """Without findings, one warning on rank 0 reports replicas that differ: shifted values, equal means, or NaN."""
    warned = outcome(pair, name)[1]
    assert [len(each) for each in warned] == [1, 0]
    assert warned[0][0].startswith("the ranks have diverged: 'hidden.weight")


def test_windows_epochs_and_evaluations_are_merged(pair: Path) -> None:
    """The steps of a window or epoch, and all batches of an evaluation, are one record of both ranks."""
    results, warned = outcome(pair, "windows")
    step = 2 * ROWS * 64
    by_window, by_epoch = results[0]["2"], results[0]["epoch"]
    assert counted_values(by_window, "activations/squash") == {1: 2 * step, 3: 2 * step, 5: 2 * step}
    assert counted_values(by_epoch, "activations/squash") == {2: 3 * step, 5: 3 * step}
    for scalars in by_window, by_epoch:
        assert counted_values(scalars, "activations_validate/squash") == {2: 4 * 4 * 64, 5: 4 * 4 * 64}
    tests, warned_tests = outcome(pair, "evaluated")
    assert counted_values(tests[0]["scalars"], "activations_test/squash") == {0: 4 * 4 * 64}
    assert [*warned, *warned_tests] == [[]] * 4


def test_a_budget_leaves_all_ranks_with_one_interval(pair: Path) -> None:
    """All ranks use one interval; an unreachable limit leaves the three steps of the measurement."""
    (first, second), warned = outcome(pair, "budgeted")
    assert first["cadence"] == second["cadence"]
    assert first["cadence"][:2] == [1, 1]
    assert list(first["scalars"]["activations/squash/rms"]) == [0, 1, 2]
    assert warned == [[], []]


@pytest.mark.parametrize("method", ["attach", "snapshot", "reset"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_recorder_that_fails_on_one_rank_costs_its_share(pair: Path, rank: int, method: str) -> None:
    """If a recorder fails on one rank, records and training continue, and one warning on rank 0 names the rank."""
    results, warned = outcome(pair, f"broken_{method}_{rank}")
    both, one = 2 * ROWS * 64, ROWS * 64
    # A state that is reset when the record of step 1 is made is in that record.
    expected = {0: both, 1: both if method == "reset" else one, 2: one}
    assert counted_values(results[0]["scalars"], "activations/squash") == expected
    Moments.of(values_of([results[1 - rank]["kept"]["squash"][2]])).assert_near(
        at(results[0]["scalars"], "activations/squash", 2)
    )
    assert [message for message in warned[0] if "without" in message] == [
        f"ActivationRecorder: the records are without rank {rank}, which has failed or has taken other steps"
    ]
    own = "ActivationRecorder is off for the rest of the run: ValueError: injected"
    assert [message for each in warned for message in each if "without" not in message] == [own]
    assert [result["calls"] for result in results] == [[{}] * STEPS] * 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("switched_off", "rank 1 does not record"),
        ("other_modules", "the ranks record different modules, or with different settings"),
    ],
)
def test_ranks_that_do_not_record_the_same_are_not_merged(pair: Path, name: str, reason: str) -> None:
    """If the ranks' settings differ, or one has ``LIGHTNING_RECORDER=off``, rank 0 records alone and warns."""
    results, warned = outcome(pair, name)
    assert warned == [[f"ActivationRecorder: statistics are those of rank 0 only, because {reason}"], []]
    assert counted_values(results[0]["scalars"], "activations/squash") == dict.fromkeys(range(STEPS), ROWS * 64)
    assert not [tag for tag in results[0]["scalars"] if "rank_mean" in tag]


@pytest.mark.parametrize("name", ["attached_on_0", "attached_on_1"])
def test_a_variable_that_one_rank_lacks_hangs_nobody(name: str, tmp_path: Path) -> None:
    """If only one rank has ``LIGHTNING_RECORDER=on``, nothing is recorded, and that rank warns; training continues."""
    go_in_forks(tmp_path, name)
    results, warned = outcome(tmp_path, name)
    assert [result["trained"] for result in results] == [STEPS, STEPS]
    here = int(name[-1])
    assert [len(each) for each in warned] == [int(rank == here) for rank in (0, 1)]
    assert f"nothing is recorded, since rank {1 - here} lacks this variable" in warned[here][0]
    assert not list((tmp_path / name).rglob("*.jsonl"))


def test_a_variable_on_all_ranks_records(tmp_path: Path) -> None:
    """If all ranks have ``LIGHTNING_RECORDER=on``, their records are merged."""
    go_in_forks(tmp_path, "attached_on_all")
    assert outcome(tmp_path, "attached_on_all")[1] == [[], []]
    series = open_recording(tmp_path / "attached_on_all")["activations"]
    assert series["squash"].statistic("count")[0] == 2 * ROWS * 64


def test_a_checkpoint_holds_what_all_ranks_have_seen(pair: Path) -> None:
    """The state in a checkpoint is plain data and covers both ranks."""
    callbacks = torch.load(pair / "resumed" / "epoch=0.ckpt", weights_only=True)["callbacks"]
    (state,) = (state for key, state in callbacks.items() if key.startswith("ActivationRecorder"))
    rows = {tuple(row["key"]): row["state"]["state"] for row in state["states"]["banks"][0]}
    assert [int(rows[name, "out"][0]) for name in ("squash", "hidden")] == [STEPS * 16 * 64, STEPS * 16 * 7]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_resumed_run_records_what_an_uninterrupted_one_does(pair: Path, tmp_path: Path, devices: int) -> None:
    """On two processes or one, a window resumes: counts, extrema and bins exactly, moments up to rounding."""
    results, warned = outcome(pair, "resumed")
    whole, rest = results[0]["whole"], results[0]["rest"]
    if devices == 1:
        sink = MemorySink()
        options: dict[str, Any] = {"max_epochs": 2, "devices": 1, "strategy": "auto"}
        checkpoint = pair / "resumed" / "epoch=0.ckpt"
        train(tmp_path, [resumable(sink)], loader=digits(STEPS, 16), checkpoint=checkpoint, **options)
        rest = written(sink)
    for step, steps in (3, 4), (5, 2):
        found, expected = (at(each["scalars"], "activations/squash", step) for each in (rest, whole))
        assert expected["count"] == steps * 16 * 64
        for name in "count", "min", "max", "zero_fraction":
            assert found[name] == expected[name]
        assert found["mean"] == pytest.approx(expected["mean"], abs=1e-12 * expected["rms"])
        assert found["std"] ** 2 == pytest.approx(expected["std"] ** 2, rel=1e-12)
        one, other = (each["histograms"]["activations/squash/histogram"][step] for each in (rest, whole))
        assert same_histogram(one, other)
        assert at(rest["scalars"], "activations/hidden", step)["count"] == steps * 16 * 7
        # Rank 0 resumes with the merged state, so differences between ranks are known from the next record on.
        assert ("rank_mean_min" in found) == (devices == 2 and step == 5)
    assert warned == [[], []]


def check_complete(folder: Path, bare: Path) -> None:
    """Check that there is one complete set of results and that the parameters are those of a run without callbacks."""
    final = [torch.load(path / "final.pt", weights_only=True) for path in (bare, folder / "recorded")]
    assert same_tensors(*final)
    (version,) = (folder / "recorded" / "lightning_logs").iterdir()
    assert (version / "recorder" / "graph.png").is_file()
    names = {node["name"] for node in json.loads((version / "recorder" / "graph.json").read_text())["nodes"]}
    assert {*LEAVES, "extra"} <= names
    assert len(list(version.rglob("events.out.tfevents.*"))) == 2  # the logger's and that of the recorders
    dumps = {path.name.split(".")[-2]: path for path in (version / "checkpoints").glob("*.safetensors")}
    assert set(dumps) == {"activations", "gradients"}
    receipt = json.loads((version / "recorder" / "receipt.json").read_text())
    assert {name: each["merged_ranks"] for name, each in receipt.items()} == {"activations": 2, "gradients": 2}
    assert int(read_dump(dumps["activations"]).tensors["head/count"]) == 2 * ROWS * 10


def test_ddp_trains_as_without_and_rank_zero_writes(pair: Path) -> None:
    """The parameters are bitwise those of a bare run, and there is one complete set of results."""
    check_complete(pair / "ddp", pair / "ddp" / "bare")
    assert outcome(pair, "ddp")[1] == [[], []]


def test_the_end_of_a_run_waits_for_its_last_records(pair: Path) -> None:
    """When a fit ends, the channel of its recorders is closed, so each rank has sent all of its states."""
    assert [result["is_open"] for result in outcome(pair, "ddp")[0]] == [False, False]


@pytest.mark.parametrize("strategy", SPAWNED)
def test_launched_processes_leave_their_results(pair: Path, launched: Path, strategy: str) -> None:
    """All results are on disk and in the logger, although the callback of the main process has none."""
    check_complete(launched / strategy, pair / "ddp" / "bare")
    result, warned = torch.load(launched / f"{strategy}.0.pt", weights_only=False)
    assert result["latest"] == [0, 0]
    assert warned == []


def test_a_rank_that_fails_before_its_first_record_leaves_the_others_going(tmp_path: Path) -> None:
    """If a rank fails after the agreement, the other ranks record without it, and a warning says so."""
    go_in_forks(tmp_path, "late")
    results, warned = outcome(tmp_path, "late")
    assert counted_values(results[0]["scalars"], "activations/squash") == dict.fromkeys(range(STEPS), ROWS * 64)
    assert [len(each) for each in warned] == [1, 1]


@pytest.mark.parametrize("name", ["unmergeable", "unsendable"])
def test_a_reduction_that_fails_between_the_ranks_hangs_nobody(name: str, tmp_path: Path) -> None:
    """An error in merging on rank 0, or in sending on rank 1, costs the reduction but not the run or the others."""
    go_in_forks(tmp_path, name)
    results, warned = outcome(tmp_path, name)
    assert [result["trained"] for result in results] == [STEPS, STEPS]
    module, count = ("squash", 2 * ROWS * 64) if name == "unmergeable" else ("second", 5)
    scalars = results[0]["scalars"]
    assert counted_values(scalars, f"activations/{module}") == dict.fromkeys(range(STEPS), count)
    assert f"activations/{module}/scaled_sum" not in scalars
    reason = "Unmergeable is not recorded at 'out' of module 'squash', since ValueError: these do not merge"
    assert warned == [[reason] if name == "unmergeable" else [], []]


def test_a_rank_without_a_batch_to_validate_with_hangs_nobody(tmp_path: Path) -> None:
    """If the model allows empty ranks, two epochs with validation end and all steps are recorded."""
    go_in_forks(tmp_path, "empty_share")
    results, warned = outcome(tmp_path, "empty_share")
    assert not [message for each in warned for message in each if "is off" in message]
    assert counted_values(results[0]["scalars"], "activations/squash") == dict.fromkeys(range(2 * STEPS), 2 * ROWS * 64)


@pytest.mark.parametrize("name", ["raises_1", "dies_1"])
def test_a_rank_that_ends_early_ends_the_run(name: str, tmp_path: Path) -> None:
    """Neither an exception nor a sudden death of a rank leaves a process waiting; a failing rank contacts no other."""
    code, log = go(tmp_path, name)
    assert code != 0
    if name == "raises_1":
        assert "a batch that cannot be read" in log
        assert torch.load(tmp_path / name / "calls.1.pt", weights_only=True) == {}
    series = open_recording(tmp_path / name)["activations"]
    # A process that dies may not have sent the states of the step before.
    counts = (2 * ROWS * 64,) if name == "raises_1" else (ROWS * 64, 2 * ROWS * 64)
    assert series.steps[0] == 0
    assert float(series["squash"].statistic("count")[0]) in counts


def main(folder: Path, names: Sequence[str], scenarios: Mapping[str, Scenario] = SCENARIOS) -> None:
    for name in names:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            result = scenarios[name](folder / name)
        messages = [str(each.message) for each in warned if issubclass(each.category, RecorderWarning)]
        torch.save((result, messages), folder / f"{name}.{this_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    leave_group()
