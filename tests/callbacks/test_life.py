"""The recorded steps and batches in every way of running a trainer, and the cleanup afterwards."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_recorder import (
    ActivationRecorder,
    GradientRecorder,
    GraphRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    RecorderWarning,
    Schedule,
)
from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.taps import Site
from tests.callbacks.models import hooks_left

Batches = dict[int, list[int]]
"""The indices of the batches of each step."""

BATCHES = 6
WIDTH = 2
"""The number of output values of the last layer per row."""

# Warnings of Lightning about what these tests do on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument:UserWarning"),
    pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning"),
]


@pytest.fixture(autouse=True)
def _nothing_is_told(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check that only runs without the batches to record cause a warning, logged because warnings are errors."""
    yield
    reasons = ("trains on no batch", "records no step", "validates nothing", "the fit had no validation")
    warned = [each.getMessage() for each in caplog.get_records("call") if each.name == "lightning_recorder"]
    assert [message for message in warned if not any(reason in message for reason in reasons)] == []


def batches(count: int = BATCHES, first: int = 0) -> list[Tensor]:
    """Return batches with twice the rows of the previous one, so that a row count identifies the batches."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(2 ** (first + index), 4, generator=generator) for index in range(count)]


def loader(count: int = BATCHES, first: int = 0) -> DataLoader[Any]:
    """Return a loader of :func:`batches`."""
    return DataLoader(batches(count, first), batch_size=None)  # type: ignore[arg-type]  # a list is a dataset


class Endless(IterableDataset[Tensor]):
    """The same batches, without a known length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(batches())


class Net(LightningModule):
    """Two layers; stores the output and the output gradient of each call of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.head = nn.Linear(3, WIDTH)
        self.given: list[Tensor] = []
        self.trained = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out

    def loss(self, x: Tensor) -> Tensor:
        self.given.append(self(x))
        if self.given[-1].requires_grad:
            self.given[-1].retain_grad()
        return self.given[-1].square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.trained += 1
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch).sum()

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch).sum()

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def recorders(sink: MemorySink, **options: Any) -> list[Callback]:
    """Return one recorder of each kind that records every step and counts values."""
    outputs = Outputs(histograms=False, plots=False)  # pictures take most of the time of a short fit
    options = {"every_n_train_steps": 1, "statistics": ["count"], "outputs": outputs, **options}
    kinds: tuple[type[StatisticsCallback], ...] = (ActivationRecorder, GradientRecorder, ParameterRecorder)
    statistics = [kind(sinks=[sink], strict=True, **options) for kind in kinds]
    return [*statistics, GraphRecorder(formats=[], sinks=[sink], strict=True)]


def trainer_of(folder: Path, callbacks: Sequence[Callback], **options: Any) -> Trainer:
    """Return a silent CPU trainer without loggers and checkpoints."""
    seed_everything(1, verbose=False)
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **options}
    if not options.get("barebones"):
        options = {"enable_progress_bar": False, "enable_model_summary": False, **options}
    return Trainer(default_root_dir=folder, accelerator="cpu", callbacks=list(callbacks), **options)


def batches_of(counts: Mapping[int, float], per_row: int = WIDTH, first: int = 0) -> Batches:
    """Return the batches counted at each step, with repetitions."""
    found: Batches = {}
    for step, count in counts.items():
        rows = count / per_row
        assert rows == int(rows)
        found[step] = [index - first for index in range(20) if int(rows) >> index & 1]
    return found


def recorded(sink: MemorySink, kind: str = "activations") -> Batches:
    return batches_of(sink.scalars.get(f"{kind}/head/count", {}))


def numbered(steps: Iterable[int]) -> Batches:
    """Return steps of one batch each, over epochs of all batches."""
    return {step: [step % BATCHES] for step in steps}


def accumulated(*parts: Sequence[int]) -> Batches:
    return {step: list(part) for step, part in enumerate(parts)}


def stance() -> str:
    """Return the compiler stance, which says whether compiled code runs."""
    import torch._dynamo.eval_frame as frames

    return str(frames._stance.stance)


def assert_nothing_left(trainer: Trainer, model: nn.Module) -> None:
    """Check that no hook is on the model or an optimizer, and that compiled code runs as before."""
    assert hooks_left(model) == []
    for optimizer in trainer.optimizers:
        assert not optimizer._optimizer_step_post_hooks
        assert not optimizer._optimizer_step_pre_hooks
    assert stance() == "default"
    assert type(trainer.strategy.checkpoint_io).__name__ == "TorchCheckpointIO"


def run(model: LightningModule, folder: Path, callbacks: Sequence[Callback] = (), **options: Any) -> MemorySink:
    """Fit with all recorders, followed by the given callbacks, and check the cleanup."""
    sink = MemorySink()
    stance()
    loaders = options.pop("loaders") if "loaders" in options else loader()
    validation = options.pop("validation", None)
    trainer = trainer_of(folder, [*recorders(sink), *callbacks], **options)
    trainer.fit(model, None if loaders == "own" else loaders, validation)
    assert_nothing_left(trainer, model)
    return sink


class Returns(Net):
    """Returns a dictionary."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "more": batch}


class Skips(Net):
    """Ends each epoch when the fourth batch starts."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 3 else None


class Stops(Net):
    """Requests the end of the training after the third batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = batch_idx == 2


class Manual(Net):
    """Uses manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Raw(Manual):
    """Also runs the backward pass itself."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Late(Net):
    """Creates its layers when the fit configures the model."""

    def __init__(self) -> None:
        super().__init__()
        del self.body, self.head

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            self.body, self.head = nn.Linear(4, 3), nn.Linear(3, WIDTH)


class Lazy(Net):
    """Has a layer whose parameters are created by the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LazyLinear(3)


class Own(Net):
    """Has its own loader, which is created anew."""

    def train_dataloader(self) -> Any:
        return loader()


class Fetching(Net):
    """Fetches its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]  # a different signature, which Lightning supports
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class Normalized(Net):
    """Has running statistics, which weight averaging has to recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))  # type: ignore[assignment]  # also a sequence of layers

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(batch.repeat(2, 1), batch_idx)


class Monitored(Net):
    """Has a metric that never improves."""

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("worse", float(self.current_epoch), batch_size=1)
        return super().validation_step(batch, batch_idx)


LIVES: dict[str, tuple[type[Net], dict[str, Any], Batches]] = {
    "epochs": (Net, {"max_epochs": 3}, numbered(range(18))),
    "dictionary": (Returns, {}, numbered(range(6))),
    "validated": (Net, {"max_epochs": 2, "validation": loader(2, 6)}, numbered(range(12))),
    "validated in between": (Net, {"validation": loader(2, 6), "val_check_interval": 2}, numbered(range(6))),
    "validated in a step": (
        Net,
        {"validation": loader(2, 6), "val_check_interval": 1, "accumulate_grad_batches": 2},
        accumulated([0, 1], [2, 3], [4, 5]),
    ),
    "accumulated": (
        Net,
        {"accumulate_grad_batches": 2, "max_epochs": 2},
        accumulated([0, 1], [2, 3], [4, 5], [0, 1], [2, 3], [4, 5]),
    ),
    "last incomplete": (
        Net,
        {"accumulate_grad_batches": 4, "max_epochs": 2},
        accumulated([0, 1, 2, 3], [4, 5], [0, 1, 2, 3], [4, 5]),
    ),
    "unknown length": (
        Net,
        {"loaders": DataLoader(Endless(), batch_size=None), "accumulate_grad_batches": 4, "max_epochs": 2},
        accumulated([0, 1, 2, 3], [4, 5], [0, 1, 2, 3], [4, 5]),
    ),
    "scheduled": (
        Net,
        {"callbacks": [GradientAccumulationScheduler({0: 2, 1: 3})], "max_epochs": 2},
        accumulated([0, 1], [2, 3], [4, 5], [0, 1, 2], [3, 4, 5]),
    ),
    "dataloader_iter": (
        Fetching,
        {"accumulate_grad_batches": 4, "max_epochs": 2},
        accumulated([0, 1, 2, 3], [4, 5], [0, 1, 2, 3], [4, 5]),
    ),
    "manual": (Manual, {"max_epochs": 2}, numbered(range(12))),
    "raw backward": (Raw, {"max_epochs": 2}, numbered(range(12))),
    "epoch cut off": (Skips, {"max_epochs": 2}, accumulated([0], [1], [2], [0], [1], [2])),
    "epoch cut off in a step": (
        Skips,
        {"max_epochs": 2, "accumulate_grad_batches": 2},
        accumulated([0, 1], [0, 1]),
    ),
    "stopped in a step": (Stops, {"accumulate_grad_batches": 2}, accumulated([0, 1])),
    "overfit_batches": (Net, {"overfit_batches": 2, "max_epochs": 2}, accumulated([0], [1], [0], [1])),
    "limit_train_batches": (
        Net,
        {"limit_train_batches": 3, "limit_val_batches": 1, "validation": loader(2, 6), "max_epochs": 2},
        accumulated([0], [1], [2], [0], [1], [2]),
    ),
    "limited in a step": (
        Net,
        {"limit_train_batches": 3, "accumulate_grad_batches": 2, "max_epochs": 2},
        accumulated([0, 1], [2], [0, 1], [2]),
    ),
    "no batch": (Net, {"limit_train_batches": 0}, {}),
    "fast_dev_run": (Net, {"fast_dev_run": True, "validation": loader(2, 6)}, {0: [0]}),
    "fast_dev_run of 3": (Net, {"fast_dev_run": 3}, numbered(range(3))),
    "barebones": (Net, {"barebones": True}, numbered(range(6))),
    "reloaded": (
        Own,
        {"loaders": "own", "reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
        numbered(range(18)),
    ),
    "max_steps": (Net, {"max_steps": 8, "max_epochs": 5}, numbered(range(8))),
    "max_steps of two": (
        Net,
        {"max_steps": 2, "max_epochs": 5, "accumulate_grad_batches": 2},
        accumulated([0, 1], [2, 3]),
    ),
    "stopped early": (
        Monitored,
        {"validation": loader(2, 6), "max_epochs": 9, "callbacks": [EarlyStopping("worse", patience=2)]},
        numbered(range(18)),
    ),
    "configure_model": (Late, {}, numbered(range(6))),
    "lazy": (Lazy, {}, numbered(range(6))),
    "stochastic average": (
        Net,
        {"max_epochs": 3, "callbacks": [StochasticWeightAveraging(1e-2, swa_epoch_start=1)]},
        numbered(range(18)),
    ),
}


# Lightning 2.5.0 does not have these callbacks.
for average, options in {"WeightAveraging": {}, "EMAWeightAveraging": {"decay": 0.5}}.items():
    if hasattr(lightning_callbacks, average):
        LIVES[average] = (
            Net,
            {
                "max_epochs": 2,
                "validation": loader(2, 6),
                "callbacks": [getattr(lightning_callbacks, average)(**options)],
            },
            numbered(range(12)),
        )


@pytest.mark.parametrize("life", LIVES)
def test_each_step_has_the_record_of_its_batches(life: str, tmp_path: Path) -> None:
    """In every way of running, each optimizer step has one record of exactly its batches."""
    kind, options, expected = LIVES[life]
    options = dict(options)
    model = kind()
    sink = run(model, tmp_path, options.pop("callbacks", ()), **options)
    assert recorded(sink) == expected
    assert recorded(sink, "gradients") == expected
    assert sink.scalars.get("parameters/head/weight.update/count", {}) == dict.fromkeys(expected, 6.0)
    assert sink.scalars.get("parameters/head/weight.grad/count", {}) == dict.fromkeys(expected, 6.0)
    assert {tag: list(graphs) for tag, graphs in sink.graphs.items()} == ({"graph": [0]} if expected else {})


def test_a_pass_without_steps_for_running_statistics_is_one_step(tmp_path: Path) -> None:
    """The last pass of stochastic weight averaging, which has no backward pass, counts as one step."""
    sink = run(Normalized(), tmp_path, [StochasticWeightAveraging(1e-2, swa_epoch_start=1)], max_epochs=3)
    steps = {step: [index + 1 for index in found] for step, found in numbered(range(18)).items()}
    assert recorded(sink, "gradients") == steps
    assert recorded(sink) == {**steps, 18: [1, 2, 3, 4, 5, 6]}


class Twice(Manual):
    """Has an optimizer and a loss for each layer."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        for optimizer in self.optimizers():  # type: ignore[union-attr]  # there are two
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.body, self.head)]


def test_two_optimizers_have_their_own_parameters(tmp_path: Path) -> None:
    """If two optimizers step in a batch, each records its own parameters once, and both losses count."""
    sink = run(Twice(), tmp_path, max_epochs=2)
    twice = {step: 2.0 * WIDTH * 2 ** (step % BATCHES) for step in range(12)}
    assert sink.scalars["activations/head/count"] == twice
    assert sink.scalars["gradients/head/count"] == twice
    for path, size in {"body/weight": 12.0, "body/bias": 3.0, "head/weight": 6.0, "head/bias": 2.0}.items():
        for part in ("", ".grad", ".update"):
            assert sink.scalars[f"parameters/{path}{part}/count"] == dict.fromkeys(range(12), size)


class Closures(Net):
    """Needs several loss evaluations per step, and counts them for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[int, int] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.losses[batch_idx] = self.losses.get(batch_idx, 0) + 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@pytest.mark.parametrize("parts", [["values"], ["gradients"], ["updates"], ["moments"], ["values", "updates"]])
def test_a_step_of_several_closures_is_one_step(parts: list[Any], tmp_path: Path) -> None:
    """With LBFGS, all closure calls count for the layers, and the step counts once for the parameters."""
    sink, model = MemorySink(), Closures()
    parameters = ParameterRecorder(parts=parts, every_n_train_steps=1, statistics=["count"], sinks=[sink], strict=True)
    trainer = trainer_of(tmp_path, [parameters, *recorders(own := MemorySink())[:2]])
    trainer.fit(model, loader())
    assert_nothing_left(trainer, model)
    assert set(model.losses.values()) == {3}
    for group in ("activations", "gradients"):
        assert own.scalars[f"{group}/head/count"] == {step: 3.0 * WIDTH * 2**step for step in range(6)}
    shown = {"values": "", "gradients": ".grad", "updates": ".update"}
    expected = {f"parameters/head/weight{shown[part]}/count" for part in parts if part in shown}
    assert {tag for tag in sink.scalars if "/head/weight" in tag and tag.endswith("count")} == expected
    for tag in expected:
        assert sink.scalars[tag] == dict.fromkeys(range(6), 6.0)


def test_all_recorders_bear_several_closures(tmp_path: Path) -> None:
    """A step of LBFGS is one graph and one record of each kind."""
    sink = run(Closures(), tmp_path, max_epochs=2)
    assert list(sink.scalars["parameters/head/weight.grad/count"]) == list(range(12))
    assert set(sink.scalars["parameters/head/weight.grad/count"].values()) == {6.0}
    assert list(sink.graphs["graph"]) == [0]


class Nones(Net):
    """Returns no loss for odd batches, and does not call a layer for the second of them."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == 3:
            return None
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


def test_a_step_without_a_loss_has_no_gradient(tmp_path: Path) -> None:
    """If ``training_step`` returns None, layers that ran are recorded, without gradients and updates."""
    sink = run(Nones(), tmp_path)
    assert recorded(sink) == {step: [step] for step in (0, 1, 2, 4, 5)}
    assert recorded(sink, "gradients") == {step: [step] for step in (0, 2, 4)}
    assert list(sink.scalars["parameters/head/weight.grad/count"]) == [0, 2, 4]
    assert sink.scalars["parameters/head/weight/count"] == dict.fromkeys(range(6), 6.0)


class NoneFirst(Net):
    """Returns no loss for the first batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx else None


def test_the_graph_is_of_the_first_step_that_computes(tmp_path: Path) -> None:
    """A first step that computed nothing is skipped, and the graph shows a later step."""
    assert list(run(NoneFirst(), tmp_path).graphs["graph"]) == [1]


# Evaluations.

STAGES = ["validate", "test", "predict"]


def evaluated(sink: MemorySink, stage: str, place: str = "") -> Batches:
    return batches_of(sink.scalars.get(f"activations_{stage}/head/count{place}", {}))


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_an_evaluation_alone_is_one_record(stage: str, inference_mode: bool, tmp_path: Path) -> None:
    """``trainer.validate``, ``test`` and ``predict`` alone are one record at step 0, and a later fit is recorded."""
    sink, model = MemorySink(), Net()
    callbacks = recorders(sink)[1:]
    callbacks.append(
        ActivationRecorder(
            schedule=Schedule(stages=["train", *STAGES]),  # type: ignore[list-item]  # of just these strings
            every_n_train_steps=1,
            statistics=["count"],
            sinks=[sink],
            strict=True,
        )
    )
    trainer = trainer_of(tmp_path, callbacks, inference_mode=inference_mode)
    for _ in range(2):
        getattr(trainer, stage)(model, loader(), **({} if stage == "predict" else {"verbose": False}))
        assert_nothing_left(trainer, model)
    assert {tag.split("/")[0] for tag in sink.scalars} == {f"activations_{stage}"}
    assert evaluated(sink, stage) == {0: list(range(BATCHES))}
    trainer.fit(model, loader(), loader(2, 6))
    assert_nothing_left(trainer, model)
    assert recorded(sink) == recorded(sink, "gradients") == numbered(range(6))
    getattr(trainer, stage)(model, loader(3), **({} if stage == "predict" else {"verbose": False}))
    assert evaluated(sink, stage)[6] == [0, 1, 2]


@pytest.mark.parametrize("stage", STAGES)
def test_each_loader_has_a_record(stage: str, tmp_path: Path) -> None:
    """With several loaders, each one has a record of its own batches under its index."""
    sink, model = MemorySink(), Net()
    recorder = ActivationRecorder(schedule=Schedule(stages=stage), statistics=["count"], sinks=[sink], strict=True)
    trainer = trainer_of(tmp_path, [recorder], limit_val_batches=2, limit_test_batches=2, limit_predict_batches=2)
    getattr(trainer, stage)(model, [loader(3), loader(2, 6)], **({} if stage == "predict" else {"verbose": False}))
    assert_nothing_left(trainer, model)
    assert {tag for tag in sink.scalars if "/head/" in tag} == {
        f"activations_{stage}/head/count/dataloader_idx_{index}" for index in range(2)
    }
    assert evaluated(sink, stage, "/dataloader_idx_0") == {0: [0, 1]}
    assert evaluated(sink, stage, "/dataloader_idx_1") == {0: [6, 7]}
    assert recorder.latest_of(f"{stage}/1")[Site("head", "out")].scalars["count"] == 2 * (64 + 128)
    assert recorder.latest == {}


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_epochs": 2}, [5, 11]),
        ({"max_epochs": 1, "val_check_interval": 2}, [1, 3, 5]),
        ({"max_epochs": 1, "val_check_interval": 1, "accumulate_grad_batches": 4}, [0, 1]),
        ({"max_epochs": 2, "val_check_interval": 4, "check_val_every_n_epoch": None}, [3, 7, 11]),
        ({"max_epochs": 2, "check_val_every_n_epoch": 2}, [11]),
        ({"max_epochs": 1, "limit_val_batches": 0}, []),
    ],
)
def test_validation_inside_a_fit(options: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    """Each validation in a fit is one record at the step that ``self.log`` uses; the sanity check is not recorded."""
    seen: dict[int, float] = {}

    class Logged(Net):
        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                seen[self.trainer.fit_loop.epoch_loop._batches_that_stepped] = 2 * 192.0

    sink = MemorySink()
    recorder = ActivationRecorder(
        schedule=Schedule(stages=["train", "validate"]),
        every_n_train_steps=1,
        statistics=["count"],
        sinks=[sink],
        strict=True,
    )
    model = Logged()
    trainer = trainer_of(tmp_path, [recorder, *recorders(MemorySink())[1:]], num_sanity_val_steps=2, **options)
    trainer.fit(model, loader(), loader(2, 6))
    assert_nothing_left(trainer, model)
    assert sink.scalars.get("activations_validate/head/count", {}) == dict.fromkeys(steps, 384.0) == seen
    rows = sum(sink.scalars["activations/head/count"].values()) / WIDTH
    assert rows == 63 * options["max_epochs"]


def test_an_evaluation_after_epochs_that_are_left_out_is_recorded(tmp_path: Path) -> None:
    """``every_n_epochs`` applies to a fit only; a separate test run is always recorded."""
    sink, model = MemorySink(), Net()
    recorder = ActivationRecorder(
        statistics=["count"], sinks=[sink], strict=True, schedule=Schedule(every_n_epochs=3, stages=["train", "test"])
    )
    trainer = trainer_of(tmp_path, [recorder])
    trainer.fit(model, loader())
    trainer.test(model, loader(), verbose=False)
    assert evaluated(sink, "test") == {6: list(range(BATCHES))}


# Sampling.


# Over four epochs of six steps; epochs 0, 1 and 3 are every second one, epochs 0 and 2 every third one.
SAMPLINGS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "every_n_train_steps": ({"every_n_train_steps": 5}, [0, 4, 9, 14, 19]),
    "nothing": ({"every_n_train_steps": 0}, []),
    "every_n_epochs": (
        {"every_n_train_steps": 2, "schedule": Schedule(every_n_epochs=2)},
        [0, 1, 3, 5, 7, 9, 11, 19, 21, 23],
    ),
    "every third epoch": (
        {"every_n_train_steps": 1, "schedule": Schedule(every_n_epochs=3)},
        [*range(6), *range(12, 18)],
    ),
    "first_n_steps": ({"every_n_train_steps": 10, "schedule": Schedule(first_n_steps=4)}, [0, 1, 2, 3, 9, 19]),
    "first_n_steps alone": ({"every_n_train_steps": 0, "schedule": Schedule(first_n_steps=4)}, [0, 1, 2, 3]),
    "step_window": ({"schedule": Schedule(step_window=(3, 7))}, [3, 4, 5, 6]),
    "step_window and cadence": (
        {"every_n_train_steps": 4, "schedule": Schedule(step_window=(3, 20))},
        [3, 7, 11, 15, 19],
    ),
    "when": ({"schedule": Schedule(when=lambda step: step % 7 == 2)}, [2, 9, 16, 23]),
    "all": (
        {
            "every_n_train_steps": 4,
            "schedule": Schedule(every_n_epochs=2, first_n_steps=3, step_window=(1, 22), when=lambda step: step != 7),
        },
        [1, 2, 3, 11, 19],
    ),
}


# With accumulation, batches and steps are counted differently.
SAMPLED = [*((sampling, 2) for sampling in SAMPLINGS), ("every_n_train_steps", 1), ("all", 1)]


@pytest.mark.parametrize(("sampling", "accumulate"), SAMPLED)
def test_sampling_chooses_steps(sampling: str, accumulate: int, tmp_path: Path) -> None:
    """The schedule arguments are combined, on the axis of ``self.log``, for each kind of recorder."""
    options, steps = SAMPLINGS[sampling]
    sink = MemorySink()
    kinds = (ActivationRecorder, GradientRecorder, ParameterRecorder)
    callbacks = [
        kind(statistics=["count"], outputs=Outputs(histograms=False, plots=False), sinks=[sink], strict=True, **options)
        for kind in kinds
    ]
    trainer = trainer_of(tmp_path, callbacks, max_epochs=4, accumulate_grad_batches=accumulate)
    trainer.fit(Net(), DataLoader(batches() * accumulate, batch_size=None))  # type: ignore[arg-type]  # a list
    expected = {
        step: sum(2.0 * 2 ** (index % BATCHES) for index in range(step * accumulate, (step + 1) * accumulate))
        for step in steps
    }
    assert sink.scalars.get("activations/head/count", {}) == expected
    assert sink.scalars.get("gradients/head/count", {}) == expected
    assert sink.scalars.get("parameters/head/weight/count", {}) == dict.fromkeys(steps, 6.0)


def statistics(values: Tensor) -> dict[str, float]:
    """Return the shown statistics of values, computed in one float64 pass."""
    values = values.detach().double().flatten()
    return {
        "count": float(values.numel()),
        "mean": float(values.mean()),
        "std": float(values.std(correction=0)),
        "rms": float(values.square().mean().sqrt()),
        "min": float(values.min()),
        "max": float(values.max()),
        "zero_fraction": float((values == 0).double().mean()),
    }


SHOWN = tuple(statistics(torch.zeros(1)))


def assert_equal(sink: MemorySink, prefix: str, step: int, values: Sequence[Tensor], rel: float = 1e-12) -> None:
    """Check that the record of a step equals the statistics of all values together."""
    together = torch.cat([each.flatten().double() for each in values])
    for name, value in statistics(together).items():
        assert sink.scalars[f"{prefix}/{name}"][step] == pytest.approx(value, rel=rel, abs=rel), (prefix, name, step)


REDUCTIONS: list[tuple[dict[str, Any], dict[str, Any], dict[int, list[int]]]] = [
    # arguments of the recorder, arguments of the trainer, and the steps of each record by its step
    ({"reduce": "step"}, {}, {step: [step] for step in range(12)}),
    ({"reduce": 4}, {}, {3: [0, 1, 2, 3], 7: [4, 5, 6, 7], 11: [8, 9, 10, 11]}),
    ({"reduce": 5}, {}, {4: [0, 1, 2, 3, 4], 9: [5, 6, 7, 8, 9], 11: [10, 11]}),
    ({"reduce": 100}, {}, {11: list(range(12))}),
    ({"reduce": "epoch"}, {}, {5: list(range(6)), 11: list(range(6, 12))}),
    ({"reduce": "epoch", "schedule": Schedule(every_n_epochs=3)}, {}, {5: list(range(6))}),
    ({"reduce": 4, "every_n_train_steps": 3}, {}, {3: [0, 2], 7: [5], 11: [8, 11]}),
    ({"reduce": 2, "schedule": Schedule(step_window=(3, 6))}, {}, {3: [3], 5: [4, 5]}),
    ({"reduce": "epoch", "schedule": Schedule(when=lambda step: step in (1, 7, 8))}, {}, {5: [1], 11: [7, 8]}),
    ({"reduce": "epoch"}, {"max_steps": 8}, {5: list(range(6)), 7: [6, 7]}),
    ({"reduce": 5}, {"max_steps": 8}, {4: [0, 1, 2, 3, 4], 7: [5, 6, 7]}),
    ({"reduce": 2}, {"accumulate_grad_batches": 4}, {1: [0, 1], 3: [2, 3]}),
    ({"reduce": "epoch"}, {"accumulate_grad_batches": 4}, {1: [0, 1], 3: [2, 3]}),
    ({"reduce": 3}, {"accumulate_grad_batches": 2, "val_check_interval": 1}, {2: [0, 1, 2], 5: [3, 4, 5]}),
]


@pytest.mark.parametrize(("options", "life", "expected"), REDUCTIONS)
def test_a_record_equals_a_reference_over_its_batches(
    options: dict[str, Any], life: dict[str, Any], expected: dict[int, list[int]], tmp_path: Path
) -> None:
    """Each record equals the float64 statistics over exactly the batches of its steps."""
    sink, model = MemorySink(), Net()
    options = {"every_n_train_steps": 1, "statistics": SHOWN, "sinks": [sink], "strict": True, **options}
    callbacks = [ActivationRecorder("head", **options), GradientRecorder("head", **options)]
    trainer = trainer_of(tmp_path, callbacks, max_epochs=2, num_sanity_val_steps=0, **life)
    trainer.fit(model, loader(), loader(2, 6) if "val_check_interval" in life else None)
    factor = life.get("accumulate_grad_batches", 1)
    ends = [index for index in range(12) if (index % 6 + 1) % factor == 0 or index % 6 == 5]
    step_of = [sum(end < index for end in ends) for index in range(len(model.given))]
    assert list(sink.scalars["activations/head/rms"]) == list(sink.scalars["gradients/head/rms"]) == list(expected)
    for step, steps in expected.items():
        given = [out for out, place in zip(model.given, step_of, strict=True) if place in steps]
        assert_equal(sink, "activations/head", step, given)
        assert_equal(sink, "gradients/head", step, [factor * out.grad for out in given if out.grad is not None], 1e-6)


# Parameters.


class Kept(Callback):
    """Stores the parameters before each step, their gradients, and the parameters after it."""

    def __init__(self) -> None:
        self.found: list[dict[str, Tensor]] = []
        self.grads: list[dict[str, Tensor | None]] = []
        self.left: list[dict[str, Tensor]] = []
        self.moments: list[dict[str, dict[str, Tensor]]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.found.append({name: each.detach().clone() for name, each in pl_module.named_parameters()})

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.grads.append(
            {name: None if each.grad is None else each.grad.clone() for name, each in pl_module.named_parameters()}
        )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.left.append({name: each.detach().clone() for name, each in pl_module.named_parameters()})
        states = {id(key): state for each in trainer.optimizers for key, state in each.state.items()}
        self.moments.append(
            {
                name: {
                    key: value.clone() for key, value in states.get(id(each), {}).items() if value.shape == each.shape
                }
                for name, each in pl_module.named_parameters()
            }
        )


@pytest.mark.parametrize("reduce", ["step", 3])
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_parameters_gradients_updates_and_moments_are_those_of_the_step(
    reduce: Any, clip: float | None, tmp_path: Path
) -> None:
    """Values are from before the step, gradients from before clipping, and moments from after the step."""
    sink, model, kept = MemorySink(), Net(), Kept()
    recorder = ParameterRecorder(every_n_train_steps=1, reduce=reduce, statistics=SHOWN, sinks=[sink], strict=True)
    trainer_of(tmp_path, [kept, recorder], gradient_clip_val=clip).fit(model, loader())
    size = reduce if isinstance(reduce, int) else 1
    for end in range(size - 1, BATCHES, size):
        steps = range(end - size + 1, end + 1)
        for name, path in {
            "body.weight": "body/weight",
            "body.bias": "body/bias",
            "head.weight": "head/weight",
        }.items():
            before = [kept.found[step][name] for step in steps]
            change = [kept.left[step][name] - kept.found[step][name] for step in steps]
            assert_equal(sink, f"parameters/{path}", end, before)
            assert_equal(
                sink,
                f"parameters/{path}.grad",
                end,
                [each for step in steps if (each := kept.grads[step][name]) is not None],
            )
            assert_equal(sink, f"parameters/{path}.update", end, change)
            for moment in ("exp_avg", "exp_avg_sq"):
                assert_equal(
                    sink, f"parameters/{path}.{moment}", end, [kept.moments[step][name][moment] for step in steps]
                )
            ratio = statistics(torch.stack(change))["rms"] / statistics(torch.stack(before))["rms"]
            assert sink.scalars[f"parameters/{path}/update_ratio"][end] == pytest.approx(ratio, rel=1e-12)
    assert len(sink.scalars["parameters/head/weight/mean"]) == BATCHES // size


def test_accumulated_gradients_are_recorded_as_the_optimizer_finds_them(tmp_path: Path) -> None:
    """With accumulation, a gradient is the sum over the batches of a step, once per step."""
    sink, kept = MemorySink(), Kept()
    recorder = ParameterRecorder(every_n_train_steps=1, statistics=SHOWN, sinks=[sink], strict=True)
    trainer_of(tmp_path, [kept, recorder], accumulate_grad_batches=4).fit(Net(), loader())
    assert list(sink.scalars["parameters/head/weight.grad/mean"]) == [0, 1]
    for step, grads in enumerate(kept.grads):
        assert grads["head.weight"] is not None
        assert_equal(sink, "parameters/head/weight.grad", step, [grads["head.weight"]])
        last = (3, 5)[step]
        change = kept.left[last]["head.weight"] - kept.found[last]["head.weight"]
        assert_equal(sink, "parameters/head/weight.update", step, [change])


class Tied(Net):
    """Uses one weight in two layers, and has a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(4, 3)
        self.again.weight = self.body.weight
        self.still = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.still(x)
        out: Tensor = self.head(torch.tanh(self.body(x) + self.again(x)))
        return out


def test_tied_weights_are_recorded_once_and_frozen_ones_never(tmp_path: Path) -> None:
    """A shared weight is recorded under its first module; a frozen layer has no record."""
    sink = run(Tied(), tmp_path)
    sizes = {tag: values for tag, values in sink.scalars.items() if tag.startswith("parameters/") and "." not in tag}
    assert sizes == {
        "parameters/body/weight/count": dict.fromkeys(range(6), 12.0),
        "parameters/body/bias/count": dict.fromkeys(range(6), 3.0),
        "parameters/head/weight/count": dict.fromkeys(range(6), 6.0),
        "parameters/head/bias/count": dict.fromkeys(range(6), 2.0),
        "parameters/again/bias/count": dict.fromkeys(range(6), 3.0),
    } | {tag: values for tag, values in sizes.items() if tag.endswith("update_ratio")}
    assert not any("still" in tag for tag in sink.scalars if tag.startswith(("parameters", "gradients/still")))


class Thawing(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body, optimizer)


class Partly(Net):
    """Passes to the optimizer the parameters that are trainable when the fit starts."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)


@pytest.mark.parametrize("first", [True, False])
def test_a_layer_that_is_thawed_is_recorded_from_then_on(first: bool, tmp_path: Path) -> None:
    """A frozen layer has activations only; from the epoch of its unfreezing on, it has all records."""
    sink = MemorySink()
    callbacks = [*recorders(sink), Thawing()]
    trainer = trainer_of(tmp_path, callbacks if first else callbacks[::-1], max_epochs=3)
    trainer.fit(Partly(), loader())
    assert list(sink.scalars["activations/body/count"]) == list(range(18))
    for tag in ("gradients/body", "parameters/body/weight", "parameters/body/weight.grad"):
        assert list(sink.scalars[f"{tag}/count"]) == list(range(6, 18))
    assert list(sink.scalars["parameters/head/weight/count"]) == list(range(18))


def test_several_callbacks_of_a_kind_record_what_each_is_to(tmp_path: Path) -> None:
    """Callbacks of one kind with different settings record their own modules, steps and statistics."""
    sinks = [MemorySink() for _ in range(4)]
    callbacks = [
        ActivationRecorder("head", every_n_train_steps=1, statistics=["count"], sinks=[sinks[0]], strict=True),
        ActivationRecorder(
            "body", every_n_train_steps=3, reduce=3, statistics=["count"], sinks=[sinks[1]], strict=True
        ),
        ParameterRecorder("head", every_n_train_steps=1, statistics=["count"], sinks=[sinks[2]], strict=True),
        ParameterRecorder(
            "head", every_n_train_steps=4, parts="updates", statistics=["count"], name="4", sinks=[sinks[3]]
        ),
    ]
    trainer, model = trainer_of(tmp_path, callbacks), Net()
    trainer.fit(model, loader())
    assert_nothing_left(trainer, model)
    assert sinks[0].scalars == {"activations/head/count": {step: 2.0**step * WIDTH for step in range(6)}}
    assert sinks[1].scalars == {"activations/body/count": {2: 3.0 * (1 + 4), 5: 3.0 * 32}}
    assert sinks[2].scalars["parameters/head/weight.update/count"] == dict.fromkeys(range(6), 6.0)
    assert sinks[3].scalars == {
        f"parameters-4/head/{path}.update/count": dict.fromkeys([0, 3], size)
        for path, size in (("weight", 6.0), ("bias", 2.0))
    }


# Further fits, tuners.


@pytest.mark.parametrize(
    ("reduce", "last"), [("step", {11: [11]}), ("epoch", {11: [*range(6, 12)]}), (4, {11: [8, 9, 10, 11]})]
)
def test_a_second_fit_continues(reduce: Any, last: dict[int, list[int]], tmp_path: Path) -> None:
    """A second fit of the same trainer resumes where the first one ended, also in an open window."""
    sink, model = MemorySink(), Net()
    trainer = trainer_of(tmp_path, recorders(sink, reduce=reduce))
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model, loader())
        assert_nothing_left(trainer, model)
    ((step, steps),) = last.items()
    assert sink.scalars["activations/head/count"][step] == sum(2.0 * 2 ** (each % 6) for each in steps)
    expected = {"step": list(range(12)), "epoch": [5, 11], 4: [3, 5, 7, 11]}
    assert list(sink.scalars["activations/head/count"]) == expected[reduce]
    if reduce == 4:  # the first fit ends within a window, which is complete in the second
        assert sink.scalars["activations/head/count"][7] == 2.0 * (16 + 32 + 1 + 2)


class Tuned(Net):
    """Has the attributes that tuners change."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-2
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(TensorDataset(torch.randn(32, 4, generator=generator)), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return loader(2, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[0], batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def tune(trainer: Trainer, model: LightningModule, what: str) -> None:
    if what == "lr":
        Tuner(trainer).lr_find(model, num_training=5, min_lr=1e-4, max_lr=1e-2, update_attr=False)
    else:
        Tuner(trainer).scale_batch_size(model, steps_per_trial=1, max_trials=2)


FINDERS: dict[str, Callable[[], Callback]] = {
    "lr": lambda: LearningRateFinder(num_training_steps=5, min_lr=1e-4, max_lr=1e-2, update_attr=False),
    "batch size": lambda: BatchSizeFinder(steps_per_trial=1, max_trials=2),
}


@pytest.mark.parametrize("what", ["lr", "batch size"])
def test_what_a_tuner_tries_is_not_recorded(what: str, tmp_path: Path) -> None:
    """The trials of a tuner are not recorded, and every step of the following fit is."""
    sink, model = MemorySink(), Tuned()
    trainer = trainer_of(tmp_path, recorders(sink))
    tune(trainer, model, what)
    assert not sink.scalars
    assert not sink.graphs
    assert_nothing_left(trainer, model)
    trainer.fit(model)
    assert_nothing_left(trainer, model)
    size = model.batch_size
    assert size == (2 if what == "lr" else 4)
    assert sink.scalars["activations/head/count"] == dict.fromkeys(range(32 // size), 2.0 * size)
    assert list(sink.scalars["parameters/head/weight.update/count"]) == list(range(32 // size))
    assert list(sink.graphs["graph"]) == [0]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("what", FINDERS)
def test_what_a_finder_tries_is_not_recorded(what: str, first: bool, tmp_path: Path) -> None:
    """The trials of a finder callback are not recorded, wherever it is in the list, and every step of the fit is."""
    sink, model = MemorySink(), Tuned()
    callbacks = [FINDERS[what](), *recorders(sink)]
    trainer = trainer_of(tmp_path, callbacks if first else callbacks[::-1])
    trainer.fit(model)
    assert_nothing_left(trainer, model)
    size = model.batch_size
    assert size == (2 if what == "lr" else 4)
    assert sink.scalars["activations/head/count"] == dict.fromkeys(range(32 // size), 2.0 * size)
    assert list(sink.scalars["parameters/head/weight.update/count"]) == list(range(32 // size))
    assert list(sink.graphs["graph"]) == [0]
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == []


# Failures.

HOOKS = [
    "setup",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_train_batch_start",
    "training_step",
    "forward",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "validation_step",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_validation_model_eval",
    "on_validation_model_train",
    "on_validation_model_zero_grad",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
]


def failing(hook: str, error: BaseException) -> Net:
    """Return a model that raises in one of its hooks, in the second call of hooks that run several times."""
    calls = [0]
    several = {"training_step", "forward", "backward", "optimizer_step", "on_train_batch_start", "on_train_batch_end"}

    def fail(self: Net, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] < 2 and hook in several:
            return getattr(Net, hook)(self, *args, **kwargs)
        raise error

    model: Net = type("Failing", (Net,), {hook: fail})()
    return model


# Also between the batches of an accumulated step.
AMID = ["training_step", "backward", "optimizer_step", "on_train_batch_end", "validation_step", "on_train_epoch_end"]


@pytest.mark.parametrize(("hook", "accumulate"), [*((hook, 1) for hook in HOOKS), *((hook, 4) for hook in AMID)])
def test_a_failing_hook_leaves_nothing_behind(hook: str, accumulate: int, tmp_path: Path) -> None:
    """Wherever a model raises, its own error propagates, and hooks and stance are as before."""
    model, sink = failing(hook, ZeroDivisionError("the model's own")), MemorySink()
    callbacks = [*recorders(sink), ActivationRecorder(schedule=Schedule(stages="validate"), strict=True)]
    options = {"num_sanity_val_steps": 0, "val_check_interval": 3, "accumulate_grad_batches": accumulate}
    trainer = trainer_of(tmp_path, callbacks, max_epochs=2, **options)
    with pytest.raises(ZeroDivisionError, match="the model's own"):
        trainer.fit(model, loader(), loader(2))
    assert_nothing_left(trainer, model)
    assert all(each._sink is None for each in callbacks if isinstance(each, (StatisticsCallback, GraphRecorder)))


class Breaking(Callback):
    """Raises in one of a callback's hooks."""

    def __init__(self, hook: str, error: BaseException) -> None:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise error

        setattr(self, hook, fail)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "hook",
    [
        "on_fit_start",
        "on_train_start",
        "on_train_batch_start",
        "on_before_backward",
        "on_before_optimizer_step",
        "on_train_batch_end",
        "on_validation_start",
        "on_validation_batch_start",
        "on_train_end",
        "on_fit_end",
    ],
)
def test_a_failing_callback_leaves_nothing_behind(hook: str, first: bool, tmp_path: Path) -> None:
    """If another callback raises, before or after ours in the list, hooks and stance are as before."""
    broken, model = Breaking(hook, ZeroDivisionError("of another")), Net()
    callbacks = recorders(MemorySink())
    trainer = trainer_of(tmp_path, [broken, *callbacks] if first else [*callbacks, broken], num_sanity_val_steps=0)
    with pytest.raises(ZeroDivisionError, match="of another"):
        trainer.fit(model, loader(), loader(2))
    assert_nothing_left(trainer, model)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restore the Ctrl+C handler, which the trainer replaces."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("hook", ["on_fit_start", "training_step", "backward", "optimizer_step", "validation_step"])
def test_ctrl_c_leaves_nothing_behind(hook: str, tmp_path: Path) -> None:
    """After a ``KeyboardInterrupt``, which the trainer turns into an exit, hooks and stance are as before."""
    model, sink = failing(hook, KeyboardInterrupt()), MemorySink()
    trainer = trainer_of(tmp_path, recorders(sink), num_sanity_val_steps=0, val_check_interval=1)
    with pytest.raises(SystemExit):
        trainer.fit(model, loader(), loader(2))
    assert_nothing_left(trainer, model)
    expected = {"on_fit_start": {}, "validation_step": {0: [0]}, "optimizer_step": {0: [0]}}
    assert recorded(sink, "gradients") == expected.get(hook, {0: [0]})


@pytest.mark.filterwarnings("ignore:Found 3 module.* in eval mode")
@pytest.mark.parametrize("stage", STAGES)
def test_a_failing_evaluation_leaves_nothing_behind(stage: str, tmp_path: Path) -> None:
    """If a separate evaluation raises, hooks and stance are as before, and a later fit is recorded."""
    step = "validation_step" if stage == "validate" else f"{stage}_step"
    model, sink = failing(step, ZeroDivisionError()), MemorySink()
    stages = Schedule(stages=["train", *STAGES])  # type: ignore[list-item]  # of just these strings
    recorder = ActivationRecorder(schedule=stages, statistics=["count"], sinks=[sink], strict=True)
    trainer = trainer_of(tmp_path, [recorder, *recorders(MemorySink())[1:]], log_every_n_steps=1)
    with pytest.raises(ZeroDivisionError):
        getattr(trainer, stage)(model, loader(), **({} if stage == "predict" else {"verbose": False}))
    assert_nothing_left(trainer, model)
    trainer.fit(model, loader())
    assert recorded(sink) == numbered(range(6))
    assert not any(tag.startswith("activations_") for tag in sink.scalars)


@pytest.mark.parametrize("reduce", ["step", 4, "epoch"])
def test_a_failed_step_is_recorded_as_far_as_it_came(reduce: Any, tmp_path: Path) -> None:
    """Data recorded before an exception becomes a record, including the part of the failed step."""
    model, sink = failing("on_after_backward", ZeroDivisionError()), MemorySink()
    trainer = trainer_of(tmp_path, recorders(sink, reduce=reduce))
    with pytest.raises(ZeroDivisionError):
        trainer.fit(model, loader())
    assert recorded(sink) == recorded(sink, "gradients") == {0: [0]}
    assert "parameters/head/weight/count" not in sink.scalars


class FailsOnce(Net):
    """Raises in the fourth training step, after its forward pass."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.trained == 4:
            raise ZeroDivisionError
        return loss


@pytest.mark.parametrize(
    ("reduce", "accumulate", "failed", "behind"),
    [
        # The second fit restarts the epoch at the step in which the first one failed.
        ("step", 1, {0: 1, 1: 2, 2: 4, 3: 8}, {3 + index: 2 ** (index % 6) for index in range(12)}),
        ("step", 2, {0: 3, 1: 12}, {1: 3, 2: 12, 3: 48, 4: 3, 5: 12, 6: 48}),
        (4, 1, {3: 15}, {3: 1 + 2 + 4 + 1, 7: 2 + 4 + 8 + 16, 11: 32 + 1 + 2 + 4, 14: 8 + 16 + 32}),
        (4, 2, {1: 15}, {3: 3 + 3 + 12 + 48, 6: 63}),
        ("epoch", 1, {3: 15}, {8: 1 + 2 + 4 + 63, 14: 63}),
        ("epoch", 2, {1: 15}, {3: 3 + 63, 6: 63}),
    ],
)
def test_a_fit_behind_a_failed_one_repeats_the_failed_step(
    reduce: Any, accumulate: int, failed: dict[int, int], behind: dict[int, int], tmp_path: Path
) -> None:
    """If another fit repeats a failed step, its records contain only the repetition."""
    sink, model = MemorySink(), FailsOnce()
    callbacks = recorders(sink, reduce=reduce)
    trainer = trainer_of(tmp_path, callbacks, max_epochs=2, accumulate_grad_batches=accumulate)
    for expected in (failed, behind):
        sink.scalars.clear()
        if expected is failed:
            with pytest.raises(ZeroDivisionError):
                trainer.fit(model, loader())
        else:
            trainer.fit(model, loader())
        assert_nothing_left(trainer, model)
        rows = {step: count / WIDTH for step, count in sink.scalars["activations/head/count"].items()}
        assert rows == expected


@pytest.mark.parametrize(
    ("kind", "reduce", "expected"),
    [
        (Skips, 2, {1: [0, 1, 0, 1]}),
        (Skips, 4, {1: [0, 1, 0, 1]}),
        (Skips, "epoch", {0: [0, 1], 1: [0, 1]}),
        (Stops, 2, {0: [0, 1]}),
        (Stops, "epoch", {0: [0, 1]}),
    ],
)
def test_a_step_that_never_ends_is_in_no_record(
    kind: type[Net], reduce: Any, expected: Batches, tmp_path: Path
) -> None:
    """Batches accumulated for a step that never ends are in no record, with any ``reduce``."""
    sink = MemorySink()
    callbacks = recorders(sink, reduce=reduce)
    trainer_of(tmp_path, callbacks, max_epochs=2, accumulate_grad_batches=2).fit(kind(), loader())
    counts = {step: float(WIDTH * sum(2**index for index in found)) for step, found in expected.items()}
    assert sink.scalars["activations/head/count"] == sink.scalars["gradients/head/count"] == counts


def test_a_schedule_that_raises_gives_one_warning(tmp_path: Path) -> None:
    """If ``when`` raises, one warning is given, and the run continues without records."""

    def when(step: int) -> bool:
        if step == 2:
            raise ZeroDivisionError("of the schedule")
        return True

    sink, model = MemorySink(), Net()
    trainer = trainer_of(
        tmp_path, [ActivationRecorder("head", statistics="count", sinks=[sink], schedule=Schedule(when=when))]
    )
    with pytest.warns(RecorderWarning, match="of the schedule") as warned:
        trainer.fit(model, loader())
    assert sum(each.category is RecorderWarning for each in warned) == 1
    assert recorded(sink) == {0: [0], 1: [1]}
    assert model.trained == BATCHES
    assert_nothing_left(trainer, model)


# Hooks of other code.


@pytest.mark.parametrize("ours", [1, 2])
def test_an_optimizer_may_have_step_hooks_of_others(ours: int, tmp_path: Path) -> None:
    """Step hooks of other code, before and after ours, are called once each, and ours record."""
    called: list[str] = []

    class Hooked(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.register_step_pre_hook(lambda *args: called.append("pre"))
            optimizer.register_step_post_hook(lambda *args: called.append("post"))
            return optimizer

    sinks = [MemorySink() for _ in range(ours)]
    options: dict[str, Any] = {"every_n_train_steps": 2, "statistics": ["count"], "strict": True}
    callbacks = [ParameterRecorder(name=str(place), sinks=[sink], **options) for place, sink in enumerate(sinks)]
    trainer_of(tmp_path, callbacks).fit(Hooked(), loader())
    assert called == ["pre", "post"] * BATCHES
    for place, sink in enumerate(sinks):
        counts = sink.scalars[f"parameters-{place}/head/weight.update/count"]
        assert counts == dict.fromkeys([0, 1, 3, 5], 6.0)


def test_an_epoch_that_ends_before_its_first_batch_leaves_the_receipt_to_the_next(tmp_path: Path) -> None:
    """The receipt ignores a first step that was cut off and describes the next one."""
    import json

    class Hesitates(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if self.current_epoch == 0 else None

    trainer = trainer_of(tmp_path, recorders(sink := MemorySink()), max_epochs=2)
    trainer.fit(Hesitates(), loader())
    assert recorded(sink) == numbered(range(6))
    receipt = json.loads((tmp_path / "recorder" / "receipt.json").read_text())
    for group in ("activations", "gradients", "parameters"):
        assert receipt[group]["modules"]["head"]["fired"]
        assert receipt[group]["step"] == 0


def test_a_loader_that_gives_none_has_a_step_without_a_record(tmp_path: Path) -> None:
    """The trainer skips a batch that is None; it counts as a step without a record."""
    given: Any = batches(4)
    given[2] = None
    sink = MemorySink()
    with pytest.warns(UserWarning, match="train_dataloader yielded None"):
        trainer_of(tmp_path, recorders(sink)).fit(Net(), DataLoader(given, batch_size=None))
    assert recorded(sink) == recorded(sink, "gradients") == {0: [0], 1: [1], 3: [3]}


def test_another_model_may_follow(tmp_path: Path) -> None:
    """If a trainer continues with another model, in an open window, the new model's layers are recorded."""
    sink = MemorySink()
    trainer = trainer_of(tmp_path, recorders(sink, reduce=4))
    trainer.fit(Net(), loader())
    trainer.fit_loop.max_epochs = 2
    model = Tied()
    trainer.fit(model, loader())
    assert_nothing_left(trainer, model)
    assert sink.scalars["activations/again/count"] == {7: 3.0 * (1 + 2), 11: 3.0 * (4 + 8 + 16 + 32)}


def test_a_callback_may_serve_two_trainers(tmp_path: Path) -> None:
    """In a new trainer, the same callbacks start again at step 0, with a record of each step."""
    sink = MemorySink()
    callbacks = recorders(sink)
    for _ in range(2):
        sink.scalars.clear()
        trainer_of(tmp_path, callbacks).fit(Net(), loader())
        assert recorded(sink) == numbered(range(6))


class Toggled(Twice):
    """Enables gradients only for the layer of the current optimizer while its loss is computed."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        for optimizer in self.optimizers():  # type: ignore[union-attr]  # there are two
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def test_optimizers_that_are_toggled_record_their_own(tmp_path: Path) -> None:
    """A layer frozen for a loss has no gradient from it, and its parameters are recorded at their own step."""
    sink = run(Toggled(), tmp_path)
    rows = {step: 2.0**step for step in range(6)}
    assert sink.scalars["activations/body/count"] == {step: 2 * 3 * count for step, count in rows.items()}
    assert sink.scalars["gradients/body/count"] == {step: 3 * count for step, count in rows.items()}
    assert sink.scalars["gradients/head/count"] == {step: 2 * 2 * count for step, count in rows.items()}
    assert sink.scalars["parameters/body/weight.update/count"] == dict.fromkeys(range(6), 12.0)
    assert sink.scalars["parameters/head/weight.update/count"] == dict.fromkeys(range(6), 6.0)


class Leaves(Net):
    """Computes the gradients of each batch and steps after every second one."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


def test_a_step_that_the_model_leaves_out_changes_nothing(tmp_path: Path) -> None:
    """If ``optimizer_step`` does not step, there are activations and gradients but no parameter record."""
    sink = run(Leaves(), tmp_path)
    assert recorded(sink) == recorded(sink, "gradients") == numbered(range(6))
    assert sink.scalars["parameters/head/weight.update/count"] == dict.fromkeys([1, 3, 5], 6.0)
    assert list(sink.scalars["parameters/head/weight/count"]) == [1, 3, 5]


class Inner(Manual):
    """Steps twice in every second batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        for _ in range(2 * (batch_idx % 2)):
            optimizer.zero_grad()
            self.manual_backward(Net.training_step(self, batch, batch_idx))
            optimizer.step()


def test_batches_of_several_optimizer_steps_and_of_none(tmp_path: Path) -> None:
    """In manual optimization, a batch is a step, and its record covers all of its optimizer steps."""
    sink = run(Inner(), tmp_path)
    expected = {step: 2.0 * WIDTH * 2**step for step in (1, 3, 5)}
    assert sink.scalars["activations/head/count"] == sink.scalars["gradients/head/count"] == expected
    assert sink.scalars["parameters/head/weight.update/count"] == dict.fromkeys([1, 3, 5], 12.0)
