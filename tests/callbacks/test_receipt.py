"""The receipt lists for each selected module whether it was recorded and why not, and the overhead of recording."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_recorder import (
    ActivationRecorder,
    GradientRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    Schedule,
    StatisticsRecorder,
    StepWatch,
    default_recorders,
    open_recording,
)
from lightning_recorder.internals.stopwatch import Stopwatch
from lightning_recorder.reductions import Norms
from lightning_recorder.schedule import Sampling
from lightning_recorder.statistics import OverheadLimit, Record, RunRecorder, sites
from tests.callbacks.models import Classifier, digits, fit
from tests.callbacks.small import Small, go, small
from tests.sinks.events import read_events

RECEIPT_LINE = "lightning.pytorch.utilities.rank_zero"


class Opaque:
    """An object without any tensor that can be found."""

    def __init__(self, tensor: Tensor) -> None:
        self.__slots = (tensor,)

    def open(self) -> Tensor:
        return self.__slots[0]


class Odd(Classifier):
    """One module for each reason why nothing is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(64, 8)  # type: ignore[assignment]  # a different encoder
        self.dropout = nn.Identity()  # type: ignore[assignment]  # as above
        self.head = nn.Linear(8, 10)
        self.bypassed = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.silent = Silent()
        self.opaque = Wrapping()
        self.detached = nn.Linear(8, 8)
        self.apart = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x.flatten(1))
        hidden = hidden + self.bypassed.forward(hidden)
        self.silent(hidden)
        hidden = self.opaque(hidden).open() + self.frozen(hidden)
        with torch.no_grad():
            self.detached(hidden)
        self.apart(hidden)
        hidden = hidden + self.attention(hidden[:, None], hidden[:, None], hidden[:, None])[0][:, 0]
        logits: Tensor = self.head(hidden)
        return logits


class Silent(nn.Module):
    """Returns nothing."""

    def forward(self, x: Tensor) -> None:
        return None


class Wrapping(nn.Module):
    """Returns an object of an unknown class."""

    def forward(self, x: Tensor) -> Opaque:
        return Opaque(x)


def receipt(folder: Path, label: str) -> dict[str, Any]:
    """Return the receipt of a callback from the folder."""
    about: dict[str, Any] = json.loads((folder / "recorder" / "receipt.json").read_text(encoding="utf-8"))[label]
    return about


def why(about: dict[str, Any]) -> dict[str, str]:
    """Return for each module the recorded tensors, or the reason why there are none."""
    return {name: ", ".join(each["sites"]) if each["fired"] else each["why"] for name, each in about["modules"].items()}


NEVER = "never called: no recorded step called it"
WITHOUT_CALL = "bypassed: its parameters have a gradient, so .forward() or a function used them without a call"
ATTENTION = "bypassed: nn.MultiheadAttention uses its parameters without calling it"
NO_LOSS = "no gradient: its output was not used by the loss, or is not a tensor"
NO_STEP = (
    "no step: no optimizer that stepped has its parameters, or they are recorded for another module that shares them"
)

EXPECTED: dict[str, tuple[Any, dict[str, str]]] = {
    "activations": (
        ActivationRecorder,
        {
            "encoder": "out",
            "head": "out",
            "bypassed": WITHOUT_CALL,
            "unused": NEVER,
            "silent": "unsupported output: its output has no tensors",
            "opaque": "unsupported output: its output has no tensors",
            "detached": "out",
            "apart": "out",
            "attention": "out[0], out[1]",
            "attention.out_proj": ATTENTION,
            "frozen": "out",
        },
    ),
    "gradients": (
        GradientRecorder,
        {
            "encoder": "out",
            "head": "out",
            "bypassed": WITHOUT_CALL,
            "unused": NEVER,
            "silent": NO_LOSS,
            "opaque": NO_LOSS,
            "detached": "no gradient: its output does not require one",
            "apart": NO_LOSS,
            "attention": "out[0]",
            "attention.out_proj": ATTENTION,
            "frozen": "out",
        },
    ),
    "parameters": (
        ParameterRecorder,
        {
            "encoder": "weight, bias",
            "head": "weight, bias",
            "bypassed": "weight, bias",
            "unused": "weight, bias",
            "detached": "weight, bias",
            "apart": "weight, bias",
            "attention": "in_proj_weight, in_proj_bias, out_proj.weight, out_proj.bias",
            "attention.out_proj": "shared: its parameters are recorded as those of attention",
            "frozen": "frozen: none of its own parameters requires a gradient",
        },
    ),
}


@pytest.mark.filterwarnings("ignore:.* ignores:lightning_recorder.RecorderWarning")
@pytest.mark.parametrize("label", EXPECTED)
def test_every_module_has_its_reason(label: str, tmp_path: Path) -> None:
    """The receipt has the tensors or a reason for each selected module, except for those that cannot have any."""
    kind, expected = EXPECTED[label]
    options: dict[str, Any] = {"parts": ["values"]} if kind is ParameterRecorder else {}
    fit(Odd(), tmp_path, [kind(list(EXPECTED["activations"][1]), **options)], logger=False)
    about = receipt(tmp_path, label)
    assert why(about) == expected
    assert (about["step"], about["merged_ranks"]) == (0, 1)


class Seeded(nn.Module):
    """A layer without weights that keeps a state as a parameter, as the layers of Keras do."""

    def __init__(self, state: Tensor, *, is_trainable: bool | None = None) -> None:
        super().__init__()
        self.state = nn.Parameter(state, requires_grad=False)
        if is_trainable is not None:
            self._trainable = is_trainable

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.state.sum()


@pytest.mark.parametrize(
    ("state", "is_trainable", "reason"),
    [
        (torch.zeros(2, dtype=torch.int32), None, "state"),  # no gradient can move whole numbers
        (torch.zeros(2), True, "state"),  # running statistics
        (torch.zeros(2), False, "frozen"),
        (torch.zeros(2), None, "frozen"),
    ],
)
def test_a_state_is_not_frozen(state: Tensor, is_trainable: bool | None, reason: str, tmp_path: Path) -> None:
    """A layer whose parameters are a seed or running statistics is no frozen layer between trained ones."""
    model = Classifier()
    model.dropout = Seeded(state, is_trainable=is_trainable)  # type: ignore[assignment]  # a different layer
    fit(model, tmp_path, [ParameterRecorder(every_n_train_steps=1)], logger=False)
    assert why(receipt(tmp_path, "parameters"))["dropout"].partition(":")[0] == reason
    found = open_recording(tmp_path).diagnosis.findings
    assert ("frozen" in {each.rule for each in found}) == (reason == "frozen")


class Condition(nn.Module):
    """A loss with a parameter without elements, as physics-informed losses have."""

    def __init__(self) -> None:
        super().__init__()
        self.coefficient = nn.Parameter(torch.zeros(1, 0))

    def forward(self, loss: Tensor) -> Tensor:
        return loss + self.coefficient.sum()


class Conditioned(Odd):
    """A model with such a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = Condition()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.condition(super().training_step(batch, batch_idx))


def test_a_parameter_without_elements_has_a_reason(tmp_path: Path) -> None:
    """It has no record, and no finding says that no optimizer has it."""
    fit(Conditioned(), tmp_path, [ParameterRecorder(["condition", "head"], parts=["values"])], logger=False)
    expected = {"condition": "empty: its own parameters have no elements", "head": "weight, bias"}
    assert why(receipt(tmp_path, "parameters")) == expected
    assert "not-in-optimizer" not in {each.rule for each in open_recording(tmp_path).findings}


class OwnCall(nn.Module):
    """A class that overrides ``__call__``, as some losses of other packages do."""

    def __call__(self, x: Tensor) -> Tensor:
        return x.square().mean()


def test_a_module_that_overrides_call_is_bypassed(tmp_path: Path) -> None:
    """A module without hook calls is not reported as never called, and a loss is not reported at all by default."""

    class Model(Small):
        def __init__(self) -> None:
            super().__init__()
            self.scaler, self.loss = OwnCall(), OwnCall()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.scaler(x) + self.loss(x)

    fit(Model(), tmp_path, [ActivationRecorder()], logger=False)
    missing = {name: text for name, text in why(receipt(tmp_path, "activations")).items() if "out" not in text}
    assert missing == {"scaler": "bypassed: OwnCall overrides __call__, so its hooks are not called"}


def test_a_compiled_module_that_is_left_out_has_its_reason(tmp_path: Path) -> None:
    """With ``compiled="skip"``, a compiled module and its children are in the receipt as left out."""
    model = small()
    model.encoder.compile(backend="eager")
    go(tmp_path, [ActivationRecorder(["encoder", "encoder.1", "head"], compiled="skip")], model=model)
    reason = "compiled: skipped because of compiled='skip'"
    assert why(receipt(tmp_path, "activations")) == {"head": "out", "encoder": reason, "encoder.1": reason}
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch 2.13 deprecates it, and it still works
@pytest.mark.parametrize("kind", [torch.jit.script, lambda part: torch.jit.trace(part, torch.ones(2, 4))])
def test_a_part_of_torchscript_has_its_reason(kind: Any, tmp_path: Path) -> None:
    """The modules inside have no hooks: no warning is given, each has its reason, and its parameters are recorded."""

    class Model(Small):
        def __init__(self) -> None:
            super().__init__()
            self.part = kind(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))

        def forward(self, x: Tensor) -> Tensor:
            scale: Tensor = self.part(torch.ones(2, 4)).mean()
            return super().forward(x) * scale

    recorders = [kind(strict=True) for kind in (ActivationRecorder, GradientRecorder, ParameterRecorder)]
    fit(Model(), tmp_path, [*recorders, StepWatch(every_module=True, strict=True)], logger=False)
    for label in ("activations", "gradients"):
        missing = {name: text for name, text in why(receipt(tmp_path, label)).items() if name.startswith("part.")}
        assert missing == dict.fromkeys(
            ("part.0", "part.1"), "TorchScript: its calls run outside of Python and have no hooks"
        )
    assert "part.0" in {name for name, _ in open_recording(tmp_path).run["parameters"].sites}


def test_parameters_that_no_optimizer_has_say_so(tmp_path: Path) -> None:
    """A module whose parameters are in no optimizer, or belong to another module, has its own reason."""

    class Partly(Odd):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.encoder.parameters(), *self.head.parameters()], lr=0.1)

    model = Partly()
    model.head = model.head
    model.unused.weight, model.unused.bias = model.bypassed.weight, model.bypassed.bias
    names = ["encoder", "head", "unused", "apart"]
    fit(model, tmp_path, [ParameterRecorder(names, parts="values")], logger=False)
    assert why(receipt(tmp_path, "parameters")) == {
        "encoder": "weight, bias",
        "head": "weight, bias",
        "unused": NO_STEP,
        "apart": NO_STEP,
    }


@pytest.mark.parametrize(
    "options", [{}, {"extra": [Norms()]}, {"reduce": 3}, {"outputs": Outputs(histograms=10)}], ids=str
)
def test_the_bytes_of_state_are_those_of_the_recorder(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of state equal those of a recorder with the same modules and settings after a step."""
    made: list[StatisticsRecorder] = []
    inner = ActivationRecorder._make_recorder

    def _make_recorder(self: Any, modules: Any, stage: str) -> Any:
        made.append(inner(self, modules, stage))  # type: ignore[arg-type]  # self has this class
        return made[-1]

    monkeypatch.setattr(ActivationRecorder, "_make_recorder", _make_recorder)
    go(tmp_path, [ActivationRecorder(every_n_train_steps=1, **options)])
    (held,) = {each.nbytes for each in made} - {0}
    assert receipt(tmp_path, "activations")["state_bytes"] == held
    tensors = [
        block.states
        for each in made
        for bank in each.states._banks
        for blocks in bank._blocks.values()
        for block in blocks
    ]
    assert held == sum(each.untyped_storage().nbytes() for each in tensors)


BATCH = next(iter(digits()))


class Still(Small):
    """A model whose steps are all the same: the batch is always the first one, and the learning rate is zero."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        images, classes = BATCH
        return nn.functional.cross_entropy(self(images), classes)  # self.log would add to the event files

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("kind", [ActivationRecorder, GradientRecorder, ParameterRecorder])
@pytest.mark.parametrize(("every", "logger"), [(1, TensorBoardLogger), (3, TensorBoardLogger), (3, CSVLogger)])
def test_the_forecast_of_the_files_holds(kind: Any, every: int, logger: Any, tmp_path: Path) -> None:
    """With records of equal size and no plots, the files grow as forecast, within 2 %."""
    sizes: dict[int, int] = {}

    class Measuring(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            assert recorder.latest_of("validate") == {}  # waits for pending writes
            folder = Path(str(trainer.log_dir), "recorder")
            paths = [*folder.glob("events.*"), *folder.glob("metrics.csv"), *folder.glob(f"records/{recorder.group}*")]
            sizes[trainer.global_step] = sum(path.stat().st_size for path in paths)

    # The watch of the findings writes its own values, which the receipt of a recorder leaves out.
    recorder = kind(every_n_train_steps=every, outputs=Outputs(plots=False, findings=False))
    trainer = go(tmp_path, [recorder, Measuring()], model=Still(), logger=logger(tmp_path), max_epochs=16)
    about = json.loads((Path(str(trainer.log_dir)) / "recorder" / "receipt.json").read_text())[recorder.group]
    first, last = 3, 63  # their distance is a multiple of the interval
    grown = (sizes[last] - sizes[first]) * 1000 / (last - first)
    assert about["event_bytes_per_1000_steps"] == pytest.approx(grown, rel=0.02)


def forecast_and_size(recorder: Any, tmp_path: Path) -> tuple[int, int]:
    """Train 1,000 steps with pictures. Return the bytes that the receipt forecasts, and the size of the files."""
    batches: Any = [BATCH] * 1000  # a list is a dataset
    loader = DataLoader(batches, batch_size=None)
    trainer = fit(Still(), tmp_path, [recorder], loader=loader, logger=True, log_every_n_steps=1)
    folder = Path(str(trainer.log_dir), "recorder")
    size = sum(path.stat().st_size for path in [*folder.glob("events.*"), *folder.glob(f"records/{recorder.group}*")])
    about = json.loads((folder / "receipt.json").read_text())[recorder.group]
    return about["event_bytes_per_1000_steps"], size


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ActivationRecorder, GradientRecorder, ParameterRecorder])
def test_the_forecast_holds_with_pictures(kind: Any, tmp_path: Path) -> None:
    """After 1,000 steps, the size of the files is as forecast within 20 %, without the pictures of the end of a run."""
    recorder = kind(every_n_train_steps=10, outputs=Outputs(plot_every_n_records=20))
    forecast, size = forecast_and_size(recorder, tmp_path)
    events = read_events(next(tmp_path.rglob("recorder")))
    pictures = [each for tag in events.Tags()["images"] for each in events.Images(tag)]
    last = [each for each in pictures if each.step == max(each.step for each in pictures)]
    assert forecast == pytest.approx(size - sum(len(each.encoded_image_string) for each in last), rel=0.2)


@pytest.mark.slow
def test_the_forecast_counts_all_pictures_that_the_time_limit_allows(tmp_path: Path) -> None:
    """By default, a run that is too short to draw while it trains writes less than the forecast."""
    forecast, size = forecast_and_size(ActivationRecorder(every_n_train_steps=10), tmp_path)
    assert 0.5 * forecast < size < 1.2 * forecast


@pytest.mark.parametrize(
    ("options", "every", "records"),
    [
        ({"every_n_train_steps": 1}, 1, 1000),
        ({"every_n_train_steps": 3}, 3, 333),
        ({"every_n_train_steps": 2, "reduce": 5}, 2, 200),
        ({}, 50, 20),
    ],
    ids=str,
)
def test_the_interval_is_in_the_receipt(options: dict[str, Any], every: int, records: int, tmp_path: Path) -> None:
    """The receipt has the interval, by default that of the trainer, and the number of records in 1,000 steps."""
    fit(small(), tmp_path, [ActivationRecorder(**options)], logger=False, log_every_n_steps=50)
    about = receipt(tmp_path, "activations")
    assert (about["every_n_train_steps"], about["records_per_1000_steps"]) == (every, records)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Collect the log lines of receipts."""
    return [record.getMessage() for record in caplog.records if "modules recorded" in record.getMessage()]


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Return the receipt lines logged so far."""
    logger = logging.getLogger(RECEIPT_LINE)
    with caplog.at_level(logging.INFO, logger=RECEIPT_LINE):
        logger.addHandler(caplog.handler)
        yield lambda: list(dict.fromkeys(lines(caplog)))
        logger.removeHandler(caplog.handler)


def test_one_line_is_logged(warned: Callable[[], list[str]], tmp_path: Path) -> None:
    """After the first recorded step, one line has the number of recorded modules, the others, and the overhead."""
    fit(
        Odd(),
        tmp_path,
        [
            ActivationRecorder(
                ["head", "unused", "bypassed", "attention.out_proj", "apart", "frozen"], outputs=Outputs(plots=False)
            )
        ],
        logger=False,
        max_steps=1,
    )
    (line,) = warned()
    assert line.startswith(
        "ActivationRecorder: 3 of 6 modules recorded, not bypassed (bypassed), "
        "attention.out_proj (bypassed), unused (never called); "
    )
    about = receipt(tmp_path, "activations")
    size = f"{about['event_bytes_per_1000_steps'] / 1e3:.1f} KB of files per 1,000 steps"
    assert line.endswith(f" ms in step 0, {size}")
    assert f"; {about['state_bytes'] / 1e6:.1f} MB reserved for statistics, " in line


class Inside(LightningModule):
    """A model with a head of attention, a router and two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.router = nn.Linear(4, 4, bias=False), Router()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.mix(batch[0])[:, None]
        found = self.router(F.scaled_dot_product_attention(hidden, hidden, hidden))
        loss: Tensor = (found - batch[0][:, None]).abs().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Router(nn.Module):
    """Scales tokens by the probability of the best of three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.eye(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        best: Tensor = (x @ self.gate.T).softmax(-1).topk(1).values
        return best * x


def test_each_option_has_its_time(
    warned: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receipt has the time of each option in a recorded step, and so has the text for loggers."""
    # Each piece of work takes a second.
    monkeypatch.setattr(sites, "Stopwatch", lambda: Stopwatch(clock=map(float, count()).__next__))
    sink = MemorySink()
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        logger=False,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_checkpointing=False,
        callbacks=[
            *default_recorders(formats=True, spectra=True, noise_scale=True, outputs=Outputs(plots=False), sinks=[sink])
        ],
    )
    trainer.fit(Inside(), DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4))
    shown = "in a recorded step."
    # Two batches of a step. The loss has no massive values.
    found = receipt(tmp_path, "activations")["option_ms"]
    assert (found["attention"], found["experts"]) == (2000.0, 2000.0)
    assert f"`experts` takes 2000.00 ms {shown}" in sink.texts["recorder/activations/receipt"][2]
    # The values, gradients and updates of two matrices; the gradients of two batches.
    assert receipt(tmp_path, "parameters")["option_ms"] == {"noise_scale": 4000.0, "formats": 6000.0, "spectra": 6000.0}
    assert receipt(tmp_path, "gradients")["option_ms"] == {}
    assert shown not in sink.texts["recorder/gradients/receipt"][2]
    (line,) = (each for each in warned() if each.startswith("ParameterRecorder: "))
    assert " ms in step 0 (noise_scale 4000.0, formats 6000.0, spectra 6000.0), " in line


# Changes.


class Changing(Small):
    """A model with parts that stop, start late, alternate, are frozen, or never have a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stops = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.late, self.never = nn.Linear(8, 8), nn.Linear(8, 8)
        self.turns = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        for module in [*(self.stops if self.steps < 10 else []), *([self.late] if self.steps >= 20 else [])]:
            hidden = hidden + module(hidden)
        logits: Tensor = self.head(hidden + self.turns[self.steps % 2](hidden))
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.steps += 1
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.steps == 10:
            self.encoder.requires_grad_(False)


LATE = "the 20 records before have none"
UNGRADED = "its output no longer requires a gradient"
STOPPED = "no record of 4 modules of stops.* after step 9: no longer called"
CHANGES: dict[str, tuple[Any, list[str]]] = {
    "activations": (ActivationRecorder, [f"first record of late at step 20, {LATE}", STOPPED]),
    "gradients": (
        GradientRecorder,
        [
            f"first record of late at step 20, {LATE}",
            f"no record of encoder.1 after step 9: {UNGRADED}, its parameters are frozen",
            f"no record of encoder.2 after step 9: {UNGRADED}",
            STOPPED,
        ],
    ),
    "parameters": (
        ParameterRecorder,
        [
            f"first gradient of late.weight and late.bias at step 20, {LATE}",
            "no gradient of encoder.1.weight and encoder.1.bias after step 9: frozen, requires_grad is False",
            "no gradient of 8 parameters of stops.* after step 9: backward passes no longer reach it",
        ],
    ),
}


@pytest.mark.parametrize("label", CHANGES)
def test_changes_are_logged_once(label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that stops or starts late is logged once and is in the receipt, with its steps, and in the final text."""
    kind, expected = CHANGES[label]
    sink, logged = MemorySink(), list[str]()
    monkeypatch.setattr("lightning_recorder.callbacks.statistics.rank_zero_info", logged.append)
    go(
        tmp_path,
        [kind(every_n_train_steps=1, sinks=[sink], outputs=Outputs(plots=False))],
        model=Changing(),
        max_epochs=15,
    )
    about = receipt(tmp_path, label)
    (first,) = (index for index, line in enumerate(logged) if "modules recorded" in line)
    assert sorted(line.partition(": ")[2] for line in logged[first + 1 :]) == sorted(expected)
    assert sorted(change["text"] for change in about["changes"]) == sorted(expected)
    assert (about["step"], about["last_step"]) == (0, 59)
    steps = {name: (each["first_step"], each["last_step"]) for name, each in about["modules"].items() if each["fired"]}
    assert steps["head"] == (0, 59)
    if label != "parameters":  # parameter values are always recorded
        assert (steps["stops.2"], steps["late"]) == ((0, 9), (20, 59))
        assert (steps["turns.0"], steps["turns.1"]) == ((0, 58), (1, 59))
        assert not about["modules"]["never"]["fired"]
    texts = sink.texts[f"recorder/{label}/receipt"]
    assert list(texts) == [0, 59]
    assert all(change not in texts[0] and change in texts[59] for change in expected)


class Replacing(Small):
    """A model that gets a new head after four steps; the optimizer keeps the parameters of the old one."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.head = nn.Linear(8, 10)
            optimizer: Any = self.optimizers()
            optimizer.add_param_group({"params": [*self.head.parameters()]})


@pytest.mark.parametrize("label", CHANGES)
def test_a_module_that_is_replaced_is_no_longer_recorded(label: str, tmp_path: Path) -> None:
    """Nothing is recorded under the name of the old module, and the receipt says why."""
    go(tmp_path, [CHANGES[label][0](every_n_train_steps=1)], model=Replacing(), max_epochs=15)
    steps = receipt(tmp_path, label)["modules"]
    assert (steps["head"]["last_step"], steps["encoder.1"]["last_step"]) == (3, 59)
    (change,) = receipt(tmp_path, label)["changes"]
    what = "gradient of head.weight and head.bias" if label == "parameters" else "record of head"
    assert change["text"] == f"no {what} after step 3: removed from the model, or replaced"


def test_a_parameter_that_never_has_a_gradient_is_named(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    """The line and the receipt name the parameters without a gradient in any recorded step."""
    go(
        tmp_path,
        [ParameterRecorder(every_n_train_steps=1, outputs=Outputs(plots=False))],
        model=Changing(),
        max_epochs=6,
    )
    assert (
        "10 of 10 modules recorded, without a gradient: late.weight, late.bias, never.weight and 3 more; "
        in warned()[0]
    )
    assert receipt(tmp_path, "parameters")["without_gradient"] == ["never.weight", "never.bias"]


def test_the_receipt_is_shown_at_the_beginning_and_at_the_end(tmp_path: Path) -> None:
    """The text is written after the first record and, with the last step of each module, when the run ends."""
    sink = MemorySink()
    go(tmp_path, [ActivationRecorder(every_n_train_steps=1, sinks=[sink])])
    texts = sink.texts["recorder/activations/receipt"]
    assert list(texts) == [0, 7]
    assert "0 to 7" in texts[7]
    assert receipt(tmp_path, "activations")["changes"] == []


def test_a_resumed_run_has_a_receipt_of_its_own(tmp_path: Path) -> None:
    """A resumed fit starts a new receipt with its own steps."""
    go(tmp_path, [ActivationRecorder(every_n_train_steps=1)], max_epochs=1).save_checkpoint(tmp_path / "saved.ckpt")
    go(tmp_path, [ActivationRecorder(every_n_train_steps=1)], ckpt=tmp_path / "saved.ckpt")
    about = receipt(tmp_path, "activations")
    assert (about["step"], about["last_step"]) == (4, 7)
    assert about["modules"]["head"] == {
        "fired": True,
        "sites": ["out"],
        "first_step": 4,
        "last_step": 7,
        "type": "Linear",
    }


def test_steps_in_which_a_recorder_is_disabled_change_nothing(tmp_path: Path) -> None:
    """While a recorder is disabled, no module counts as missing."""

    class Switching(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            (recorder.disable if 5 <= trainer.global_step < 35 else recorder.enable)()

    recorder = ActivationRecorder(every_n_train_steps=1, outputs=Outputs(plots=False))
    go(tmp_path, [Switching(), recorder], max_epochs=10)
    about = receipt(tmp_path, "activations")
    assert (about["changes"], about["modules"]["head"]["last_step"]) == ([], 39)


class Tied(Small):
    """An uncalled embedding whose weight is used by another module and a function, and idle modules."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.used = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.used.weight = self.shared.weight
        self.around = nn.Linear(8, 8)
        self.loss, self.called_loss = nn.CrossEntropyLoss(), nn.CrossEntropyLoss()
        self.accuracy = MulticlassAccuracy(10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.used(self.encoder(x))
        logits: Tensor = self.head(nn.functional.linear(hidden, self.around.weight))
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.called_loss(self(batch[0]), batch[1])


def test_a_tied_weight_is_no_bypass(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    """A module whose weight is used by another one is listed as sharing it, after the more important reasons."""
    go(tmp_path, [ActivationRecorder()], model=Tied())
    found = why(receipt(tmp_path, "activations"))
    assert found["shared"] == "shared: never called, its parameters are those of used"
    assert found["around"] == WITHOUT_CALL
    assert "6 of 9 modules recorded, not around (bypassed), shared (shared), dropout (never called); " in warned()[0]


def test_idle_losses_and_metrics_are_not_missing(tmp_path: Path) -> None:
    """By default, an uncalled loss is not in the receipt; one that is called or selected by name is."""
    go(tmp_path, [ActivationRecorder(), ActivationRecorder(["loss", "accuracy"], name="named")], model=Tied())
    found = why(receipt(tmp_path, "activations"))
    of_loss = "in.prediction, in.target, in.target.ignored, in.prediction.classes, in.target.classes, out"
    assert found["called_loss"] == of_loss
    assert not {"loss", "accuracy"} & found.keys()
    assert why(receipt(tmp_path, "activations-named")) == {"loss": NEVER, "accuracy": NEVER}


class Block(nn.Module):
    """Owns weights and calls an activation, like the layers of a KAN or the experts of a mixture."""

    def __init__(self, sizes: int = 8) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.full((sizes, sizes), 0.1)])
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        acted: Tensor = self.act(x @ self.weights[0])
        return acted


@pytest.mark.parametrize("label", ["activations", "gradients", "parameters"])
def test_a_block_that_owns_parameters_is_recorded(label: str, tmp_path: Path) -> None:
    """By default, a module with parameters and children is recorded, also if a ParameterList holds them."""
    model = small()
    encoder: Any = model.encoder
    encoder.append(Block())
    go(tmp_path, [EXPECTED[label][0]()], model=model)
    found = why(receipt(tmp_path, label))
    assert found["encoder.3"].startswith("out" if label != "parameters" else "weights.0, weights.0.grad")
    assert "encoder.3.weights" not in found


def test_parameters_of_the_root_are_recorded(tmp_path: Path) -> None:
    """The LightningModule's own parameters are recorded, but its calls are not."""

    class Scaled(Small):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    go(tmp_path, [ParameterRecorder(parts="values"), ActivationRecorder()], model=Scaled())
    assert why(receipt(tmp_path, "parameters"))[""] == "scale"
    assert "" not in why(receipt(tmp_path, "activations"))


@pytest.mark.parametrize("reduce", [4, "epoch"])
def test_a_window_is_announced_after_its_first_step(
    reduce: Any, warned: Callable[[], list[str]], tmp_path: Path
) -> None:
    """The line and receipt of a window follow its first recorded step; the bytes follow the first record."""
    seen: list[tuple[int, int | None]] = []

    class Reading(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            assert recorder.latest_of("validate") == {}  # waits for what is being written
            about = receipt(tmp_path, "activations")
            seen.append((len(warned()), about["event_bytes_per_1000_steps"]))

    recorder = ActivationRecorder(every_n_train_steps=1, reduce=reduce, outputs=Outputs(plots=False))
    go(tmp_path, [recorder, Reading()])
    lines_then, bytes_then = zip(*seen, strict=True)
    assert lines_then == (1,) * 8
    known = 3 if reduce == 4 else 4
    assert bytes_then[:known] == (None,) * known
    lines = (tmp_path / "recorder" / "records" / "activations.jsonl").read_bytes().splitlines(keepends=True)
    assert lines.pop(0).startswith(b'{"format"')
    records, per_1000_steps = (2, 250) if reduce == 4 else (2, 1)
    assert len(lines) % records == 0
    sizes = [sum(map(len, lines[len(lines) // records * k : len(lines) // records * (k + 1)])) for k in range(records)]
    assert bytes_then[known:] == (sizes[0] * per_1000_steps,) * (8 - known)
    # At the end, the forecast uses the mean size of all records.
    assert receipt(tmp_path, "activations")["event_bytes_per_1000_steps"] == sum(sizes) * per_1000_steps // records


def test_all_callbacks_share_the_file(tmp_path: Path) -> None:
    """Each callback has its own part of the receipt, which replaces its part from an earlier run."""
    for head in ("head", "encoder.1"):
        callbacks: list[Callback] = [
            ActivationRecorder(head),
            ActivationRecorder("*", exclude=head),
            ActivationRecorder(name="mine"),
            GradientRecorder(),
        ]
        go(tmp_path, callbacks)
        written = json.loads((tmp_path / "recorder" / "receipt.json").read_text())
        assert sorted(written) == ["activations", "activations-2", "activations-mine", "gradients"]
        assert list(written["activations"]["modules"]) == [head]
    assert sorted(path.name for path in (tmp_path / "recorder").iterdir()) == [
        "data.json",
        "findings.json",
        "images",
        "receipt.json",
        "records",
        "texts",
    ]
    assert sorted(path.stem for path in (tmp_path / "recorder" / "records").iterdir()) == [*sorted(written), "watch"]


# Overhead limit.


@pytest.mark.parametrize(
    ("share", "step_ms", "spent_ms", "interval"),
    [(0.02, 10.0, 10.0, 50), (0.02, 10.0, 1.0, 5), (1.0, 10.0, 10.0, 1), (0.1, 3.0, 1.0, 4), (0.5, 8.0, 100.0, 25)],
)
def test_the_interval_is_what_the_share_needs(share: float, step_ms: float, spent_ms: float, interval: int) -> None:
    """The interval is the smallest one for which ``recording / (interval * step)`` is within the limit."""
    budget = OverheadLimit(share)
    budget.add_recorded(1, 10**6, 10**6)  # the first record does not count
    for _ in range(3):
        budget.add_step(step_ms)
        budget.add_recorded(1, step_ms + spent_ms, spent_ms)
    assert budget.interval(1) == interval
    assert spent_ms / (interval * step_ms) <= share * (1 + 1e-9)
    assert interval == 1 or spent_ms / ((interval - 1) * step_ms) > share
    assert budget.interval(60) == 60


class Clock:
    """A clock that advances only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def cadences(
    share: float, hook_ms: Callable[[int], float], steps: int, every: int = 1, flush_ms: float = 0.0
) -> list[tuple[int, int]]:
    """Run a plain loop of 10 ms steps, and return the recorded steps with the interval from then on.

    Args:
        share: The overhead limit, as a fraction.
        hook_ms: The time of the hooks in a step.
        steps: The number of steps.
        every: The initial interval.
        flush_ms: The time to copy the states of a record.
    """
    clock, net, records = Clock(), nn.Linear(2, 2), list[Record]()
    recorder = StatisticsRecorder({"net": net})
    run = RunRecorder(recorder, Sampling(every), records.append, budget=OverheadLimit(share), clock=clock)
    add, snapshot = recorder.states.add, recorder.states.snapshot

    def slow_add(*args: Any) -> None:
        clock.now += hook_ms(step) / 1000
        add(*args)

    def slow_snapshot(*args: Any, **options: Any) -> Any:
        clock.now += flush_ms / 1000
        return snapshot(*args, **options)

    recorder.states.add = slow_add  # type: ignore[assignment,method-assign]  # takes time
    recorder.states.snapshot = slow_snapshot  # type: ignore[method-assign]  # as above
    for step in range(steps):
        run.start_batch(step, 0)
        net(torch.ones(1, 2))
        clock.now += 0.010
        run.end_batch(stepped=True)
    run.finish()
    return [(record.step, record.every_n_train_steps) for record in records]


def test_a_cadence_is_widened_as_the_formula_says() -> None:
    """With 10 ms per record and per step, 2 % is one record in 50 steps, from the second measured record on."""
    expected = [(0, 1), (1, 1), (2, 50), (49, 50), (99, 50), (149, 50)]
    assert cadences(0.02, lambda step: 10.0, 160) == expected


@pytest.mark.parametrize(("hook_ms", "flush_ms"), [(10.0, 0.0), (4.0, 6.0), (0.0, 10.0)])
def test_all_that_recording_takes_counts_alike(hook_ms: float, flush_ms: float) -> None:
    """Hooks and copies both count as overhead, and neither counts as step time."""
    found = cadences(0.02, lambda step: hook_ms, 60, flush_ms=flush_ms)
    assert found == [(0, 1), (1, 1), (2, 50), (49, 50)]


def test_a_cadence_that_costs_little_stays() -> None:
    """If the overhead is within the limit, the interval stays as given."""
    assert cadences(0.5, lambda step: 4.0, 12, every=3) == [(step, 3) for step in (0, 2, 5, 8, 11)]


def test_a_cadence_is_never_narrowed() -> None:
    """If recording becomes faster, the interval is not reduced."""
    found = cadences(0.1, lambda step: 10.0 if step < 3 else 0.0, 60)
    assert found == [(0, 1), (1, 1), *((step, 10) for step in (2, 9, 19, 29, 39, 49, 59))]


def test_a_cadence_is_widened_again_when_recording_gets_dearer() -> None:
    """The mean counts: 10 ms and 50 ms give 30 ms, one in 30 steps; another 50 ms gives one in 37."""
    found = cadences(0.1, lambda step: 50.0 if step > 1 else 10.0, 39)
    assert found == [(0, 1), (1, 1), (2, 10), (9, 30), (29, 37), (36, 40)]


TAG = "recorder/activations/every_n_train_steps"


def wide(sink: MemorySink, **options: Any) -> Callback:
    """Return a recorder with a very small overhead limit."""
    return ActivationRecorder(
        "head", every_n_train_steps=1, sinks=[sink], schedule=Schedule(max_overhead=1e-9), **options
    )


def test_a_fit_is_recorded_less_often_and_logs_it(warned: Callable[[], list[str]], caplog: Any, tmp_path: Path) -> None:
    """The given interval and each longer one are scalars, and a log line has the old and the new value."""
    sink = MemorySink()
    go(tmp_path, [wide(sink)])
    # The first record does not count, and the time of the second one is known at the third.
    assert list(sink.scalars["activations/head/rms"]) == [0, 1, 2]
    (first, before), (second, after) = sink.scalars[TAG].items()
    assert (first, before, second) == (0, 1.0, 2)
    assert after > 1000
    line = f"ActivationRecorder records every {after:.0f} steps instead of 1, to take at most 1e-07 %"
    assert line in [record.getMessage() for record in caplog.records]


def test_a_wider_interval_is_kept_after_a_resume(tmp_path: Path) -> None:
    """A resumed run keeps the interval of the checkpoint, and a run without a limit uses its own."""
    before, sink, plain = MemorySink(), MemorySink(), MemorySink()
    go(tmp_path, [wide(before)], max_epochs=1).save_checkpoint(tmp_path / "saved.ckpt")
    go(tmp_path, [wide(sink)], ckpt=tmp_path / "saved.ckpt")
    assert "activations/head/rms" not in sink.scalars
    assert sink.scalars[TAG] == {4: before.scalars[TAG][2]}
    go(tmp_path, [ActivationRecorder("head", every_n_train_steps=1, sinks=[plain])], ckpt=tmp_path / "saved.ckpt")
    assert list(plain.scalars["activations/head/rms"]) == [4, 5, 6, 7]


@pytest.mark.usefixtures("warned")
def test_a_run_in_the_folder_of_another_one_is_logged(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """A new run whose steps replace those of another run says so; a resumed run and one in its own folder do not."""

    def said(ckpt: Path | None = None, **options: Any) -> int:
        caplog.clear()
        recorders: list[Callback] = [kind(every_n_train_steps=1) for kind in (ActivationRecorder, ParameterRecorder)]
        go(tmp_path, recorders, ckpt=ckpt, **{"max_epochs": 1, **options}).save_checkpoint(tmp_path / "last.ckpt")
        return len({each.message for each in caplog.records if "the records of another run" in each.message})

    assert said() == 0
    assert said(tmp_path / "last.ckpt", max_epochs=2) == 0
    assert said() == 1
    assert said(logger=CSVLogger(tmp_path)) == 0
