"""The receipt says of each selected module whether it was recorded and why not, and what recording costs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_recorder import (
    ActivationRecorder,
    GradientRecorder,
    MemorySink,
    Norms,
    ParameterRecorder,
    StatisticsRecorder,
)
from lightning_recorder.recorders import Budget, Record, RunRecorder
from lightning_recorder.schedule import Sampling
from tests.callbacks.models import Classifier, digits, fit
from tests.callbacks.small import Small, go, small

RECEIPT_LINE = "lightning.pytorch.utilities.rank_zero"


class Opaque:
    """An object in which no tensor can be found."""

    def __init__(self, tensor: Tensor) -> None:
        self.__slots = (tensor,)

    def open(self) -> Tensor:
        return self.__slots[0]


class Odd(Classifier):
    """A module for each reason for which nothing is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(64, 8)  # type: ignore[assignment]  # another encoder
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
    """Gives nothing."""

    def forward(self, x: Tensor) -> None:
        return None


class Wrapping(nn.Module):
    """Gives an object that nobody knows."""

    def forward(self, x: Tensor) -> Opaque:
        return Opaque(x)


def receipt(folder: Path, label: str) -> dict[str, Any]:
    """What the folder's receipt says of a callback."""
    about: dict[str, Any] = json.loads((folder / "recorder" / "receipt.json").read_text(encoding="utf-8"))[label]
    return about


def why(about: dict[str, Any]) -> dict[str, str]:
    """Of each module why nothing was recorded of it, or which tensors were."""
    return {name: ", ".join(each["sites"]) if each["fired"] else each["why"] for name, each in about["modules"].items()}


NEVER = "never called: no call of it in the recorded step"
WITHOUT_CALL = "bypassed: its parameters have a gradient, so .forward() or a function used them without a call"
ATTENTION = "bypassed: nn.MultiheadAttention uses its parameters without calling it"
NO_LOSS = "no gradient: what it returned took no part in the loss, or is no tensor"
NO_STEP = "no step: no optimiser that stepped has its parameters, or another module that shares them has the record"

EXPECTED: dict[str, tuple[Any, dict[str, str]]] = {
    "activations": (
        ActivationRecorder,
        {
            "encoder": "out",
            "head": "out",
            "bypassed": WITHOUT_CALL,
            "unused": NEVER,
            "silent": "unsupported output: no tensor was found in what it returned",
            "opaque": "unsupported output: no tensor was found in what it returned",
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
            "detached": "no gradient: what it returned needs none",
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
            "silent": "no parameters of its own",
            "opaque": "no parameters of its own",
            "detached": "weight, bias",
            "apart": "weight, bias",
            "attention": "in_proj_weight, in_proj_bias, out_proj.weight, out_proj.bias",
            "attention.out_proj": NO_STEP,
            "frozen": "frozen: no parameter of its own requires a gradient",
        },
    ),
}


@pytest.mark.filterwarnings("ignore:.* passes over:lightning_recorder.RecorderWarning")
@pytest.mark.parametrize("label", EXPECTED)
def test_every_module_has_its_reason(label: str, tmp_path: Path) -> None:
    """Each selected module is in the receipt, with the tensors that were recorded or with why there are none."""
    kind, expected = EXPECTED[label]
    options: dict[str, Any] = {"parts": ["values"]} if kind is ParameterRecorder else {}
    fit(Odd(), tmp_path, [kind(list(expected), **options)], logger=False)
    about = receipt(tmp_path, label)
    assert why(about) == expected
    assert (about["step"], about["merged_ranks"]) == (0, 1)


def test_a_compiled_module_that_is_left_out_has_its_reason(tmp_path: Path) -> None:
    """With ``compiled="skip"`` a compiled module and those in it are in the receipt as left out."""
    model = small()
    model.encoder.compile(backend="eager")
    go(tmp_path, [ActivationRecorder(["encoder", "encoder.1", "head"], compiled="skip")], model=model)
    reason = "compiled: skipped, as compiled='skip' says"
    assert why(receipt(tmp_path, "activations")) == {"head": "out", "encoder": reason, "encoder.1": reason}
    torch._dynamo.reset()


def test_parameters_that_no_optimiser_has_say_so(tmp_path: Path) -> None:
    """A module whose parameters are in no optimiser, or are another module's, has a reason of its own."""

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


@pytest.mark.parametrize("options", [{}, {"extra": [Norms()]}, {"reduce": 3}, {"histogram_sample": 10}], ids=str)
def test_the_bytes_of_state_are_those_of_the_recorder(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of state are what the recorder of the same modules and settings holds after a step."""
    made: list[StatisticsRecorder] = []
    inner = ActivationRecorder.make_recorder

    def make_recorder(self: Any, modules: Any, stage: str) -> Any:
        made.append(inner(self, modules, stage))  # type: ignore[arg-type]  # that is its class
        return made[-1]

    monkeypatch.setattr(ActivationRecorder, "make_recorder", make_recorder)
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


class Still(Small):
    """Each step is the same: the batch is always the first one, and nothing is learnt."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        images, classes = next(iter(digits()))
        return nn.functional.cross_entropy(self(images), classes)  # without self.log, whose events are not ours

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("kind", [ActivationRecorder, GradientRecorder, ParameterRecorder])
@pytest.mark.parametrize("every", [1, 3])
def test_the_forecast_of_the_event_file_holds(kind: Any, every: int, tmp_path: Path) -> None:
    """Where all records are as large and nothing is drawn, the event file grows by the forecast, within 2 %."""
    sizes: dict[int, int] = {}

    class Measuring(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            assert recorder.latest_of("validate") == {}  # waits until everything is written
            trainer.logger.experiment.flush()  # type: ignore[union-attr]  # TensorBoard's
            (path,) = Path(str(trainer.log_dir)).glob("events.*")
            sizes[trainer.global_step] = path.stat().st_size

    recorder = kind(every_n_train_steps=every, plots=False)
    trainer = go(tmp_path, [recorder, Measuring()], model=Still(), logger=True, max_epochs=16)
    about = json.loads((Path(str(trainer.log_dir)) / "recorder" / "receipt.json").read_text())[recorder.group]
    first, last = 3, 63  # a multiple of the cadence apart
    grown = (sizes[last] - sizes[first]) * 1000 / (last - first)
    assert about["event_bytes_per_1000_steps"] == pytest.approx(grown, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ActivationRecorder, GradientRecorder, ParameterRecorder])
def test_the_forecast_holds_with_pictures(kind: Any, tmp_path: Path) -> None:
    """After a thousand steps the event file is as large as the receipt says, pictures included, within 20 %."""
    recorder = kind(every_n_train_steps=10)
    trainer = go(tmp_path, [recorder], model=Still(), logger=True, max_epochs=250)
    folder = Path(str(trainer.log_dir))
    (path,) = folder.glob("events.*")
    about = json.loads((folder / "recorder" / "receipt.json").read_text())[recorder.group]
    assert about["event_bytes_per_1000_steps"] == pytest.approx(path.stat().st_size, rel=0.2)


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
def test_the_cadence_is_told(options: dict[str, Any], every: int, records: int, tmp_path: Path) -> None:
    """The receipt has the cadence, the trainer's own where none is given, and the number of records in 1,000 steps."""
    fit(small(), tmp_path, [ActivationRecorder(**options)], logger=False, log_every_n_steps=50)
    about = receipt(tmp_path, "activations")
    assert (about["every_n_train_steps"], about["records_per_1000_steps"]) == (every, records)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of receipts in the log."""
    return [record.getMessage() for record in caplog.records if "modules recorded" in record.getMessage()]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The lines of receipts that were logged so far."""
    logger = logging.getLogger(RECEIPT_LINE)
    with caplog.at_level(logging.INFO, logger=RECEIPT_LINE):
        logger.addHandler(caplog.handler)
        yield lambda: list(dict.fromkeys(lines(caplog)))
        logger.removeHandler(caplog.handler)


def test_one_line_is_logged(told: Callable[[], list[str]], tmp_path: Path) -> None:
    """After the first recorded step one line says how many modules were recorded, which were not, and what it costs."""
    fit(
        Odd(),
        tmp_path,
        [ActivationRecorder(["head", "unused", "bypassed", "attention.out_proj", "apart", "frozen"], plots=False)],
        logger=False,
        max_steps=1,
    )
    (line,) = told()
    assert line.startswith(
        "ActivationRecorder: 3 of 6 modules recorded, not bypassed (bypassed), "
        "unused (never called), attention.out_proj (bypassed); "
    )
    about = receipt(tmp_path, "activations")
    size = f"{about['event_bytes_per_1000_steps'] / 1e6:.1f} MB of files per 1,000 steps"
    assert line.endswith(f" ms in step 0, {size}")
    assert f"; {about['state_bytes'] / 1e6:.1f} MB of state, " in line


@pytest.mark.parametrize("reduce", [4, "epoch"])
def test_a_window_is_announced_after_its_first_step(reduce: Any, told: Callable[[], list[str]], tmp_path: Path) -> None:
    """A window's line and receipt are there after its first recorded step, the bytes with the first record."""
    seen: list[tuple[int, int | None]] = []

    class Reading(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            assert recorder.latest_of("validate") == {}  # waits for what is being written
            about = receipt(tmp_path, "activations")
            seen.append((len(told()), about["event_bytes_per_1000_steps"]))

    recorder = ActivationRecorder(every_n_train_steps=1, reduce=reduce, plots=False)
    go(tmp_path, [recorder, Reading()])
    lines_then, bytes_then = zip(*seen, strict=True)
    assert lines_then == (1,) * 8
    known = 3 if reduce == 4 else 4
    assert bytes_then[:known] == (None,) * known
    scalars, histograms = (
        list(map(len, (tmp_path / "recorder" / f"{kind}.jsonl").read_bytes().splitlines(keepends=True)))
        for kind in ("scalars", "histograms")
    )
    sizes, records = [sum(each) for each in zip(scalars, histograms, strict=True)], 250 if reduce == 4 else 1
    assert bytes_then[known:] == (sizes[0] * records,) * (8 - known)
    # In the end it is by the mean size of all.
    assert receipt(tmp_path, "activations")["event_bytes_per_1000_steps"] == sum(sizes) * records // len(sizes)


def test_all_callbacks_share_the_file(tmp_path: Path) -> None:
    """Each callback has its own part of the receipt, also two of a kind, and a part of an earlier run is replaced."""
    for head in ("head", "encoder.1"):
        callbacks: list[Callback] = [
            ActivationRecorder(head),
            ActivationRecorder("*"),
            ActivationRecorder(name="mine"),
            GradientRecorder(),
        ]
        go(tmp_path, callbacks)
        written = json.loads((tmp_path / "recorder" / "receipt.json").read_text())
        assert sorted(written) == ["activations", "activations-2", "activations-mine", "gradients"]
        assert list(written["activations"]["modules"]) == [head]
    assert sorted(path.name for path in (tmp_path / "recorder").iterdir()) == [
        "histograms.jsonl",
        "images",
        "receipt.json",
        "records",
        "scalars.jsonl",
        "texts",
    ]
    assert sorted(path.stem for path in (tmp_path / "recorder" / "records").iterdir()) == sorted(written)


# Budget.


@pytest.mark.parametrize(
    ("share", "step_ms", "spent_ms", "interval"),
    [(0.02, 10.0, 10.0, 50), (0.02, 10.0, 1.0, 5), (1.0, 10.0, 10.0, 1), (0.1, 3.0, 1.0, 4), (0.5, 8.0, 100.0, 25)],
)
def test_the_interval_is_what_the_share_needs(share: float, step_ms: float, spent_ms: float, interval: int) -> None:
    """The interval is the least at which ``recording / (interval * step)`` is no more than the share."""
    budget = Budget(share)
    budget.add_recorded(1, 10**6, 10**6)  # the first record does not count
    for _ in range(3):
        budget.add_step(step_ms)
        budget.add_recorded(1, step_ms + spent_ms, spent_ms)
    assert budget.interval(1) == interval
    assert spent_ms / (interval * step_ms) <= share * (1 + 1e-9)
    assert interval == 1 or spent_ms / ((interval - 1) * step_ms) > share
    assert budget.interval(60) == 60


class Clock:
    """Seconds that go on only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def cadences(
    share: float, hook_ms: Callable[[int], float], steps: int, every: int = 1, flush_ms: float = 0.0
) -> list[tuple[int, int]]:
    """The recorded steps of a plain loop of steps of 10 ms, each with the cadence from then on.

    Args:
        share: The budget.
        hook_ms: What the hooks take in a step.
        steps: How many steps there are.
        every: The cadence at first.
        flush_ms: What the copy of the states takes for each record.
    """
    clock, net, records = Clock(), nn.Linear(2, 2), list[Record]()
    recorder = StatisticsRecorder({"net": net})
    run = RunRecorder(recorder, Sampling(every), records.append, budget=Budget(share), clock=clock)
    add, snapshot = recorder.states.add, recorder.states.snapshot

    def slow_add(*args: Any) -> None:
        clock.now += hook_ms(step) / 1000
        add(*args)

    def slow_snapshot(*args: Any) -> Any:
        clock.now += flush_ms / 1000
        return snapshot(*args)

    recorder.states.add = slow_add  # type: ignore[assignment,method-assign]  # takes time
    recorder.states.snapshot = slow_snapshot  # type: ignore[assignment,method-assign]  # as above
    for step in range(steps):
        run.start_batch(step, 0)
        net(torch.ones(1, 2))
        clock.now += 0.010
        run.end_batch(stepped=True)
    run.finish()
    return [(record.step, record.every_n_train_steps) for record in records]


def test_a_cadence_is_widened_as_the_formula_says() -> None:
    """A record of 10 ms in steps of 10 ms is one in 50 steps for 2 %, as soon as one but the first was measured."""
    expected = [(0, 1), (1, 1), (2, 50), (49, 50), (99, 50), (149, 50)]
    assert cadences(0.02, lambda step: 10.0, 160) == expected


@pytest.mark.parametrize(("hook_ms", "flush_ms"), [(10.0, 0.0), (4.0, 6.0), (0.0, 10.0)])
def test_all_that_recording_takes_counts_alike(hook_ms: float, flush_ms: float) -> None:
    """Whether hooks or copies take the time, the step itself takes what it does without them."""
    found = cadences(0.02, lambda step: hook_ms, 60, flush_ms=flush_ms)
    assert found == [(0, 1), (1, 1), (2, 50), (49, 50)]


def test_a_cadence_that_costs_little_stays() -> None:
    """Where recording takes less than its share, the cadence is the given one."""
    assert cadences(0.5, lambda step: 4.0, 12, every=3) == [(step, 3) for step in (0, 2, 5, 8, 11)]


def test_a_cadence_is_never_narrowed() -> None:
    """When recording gets cheaper the cadence stays as wide as it has become."""
    found = cadences(0.1, lambda step: 10.0 if step < 3 else 0.0, 60)
    assert found == [(0, 1), (1, 1), *((step, 10) for step in (2, 9, 19, 29, 39, 49, 59))]


def test_a_cadence_is_widened_again_when_recording_gets_dearer() -> None:
    """The mean of all records counts: 10 ms and 50 ms are 30 ms, one in 30 steps; with another 50 ms one in 37."""
    found = cadences(0.1, lambda step: 50.0 if step > 1 else 10.0, 39)
    assert found == [(0, 1), (1, 1), (2, 10), (9, 30), (29, 37), (36, 40)]


TAG = "recorder/activations/every_n_train_steps"


def wide(sink: MemorySink, **options: Any) -> Callback:
    """A recorder that must take next to nothing."""
    return ActivationRecorder("head", every_n_train_steps=1, max_overhead=1e-9, sinks=[sink], **options)


def test_a_fit_is_recorded_less_often_and_says_so(told: Callable[[], list[str]], caplog: Any, tmp_path: Path) -> None:
    """The cadence as it is given and each wider one are scalars, and a line says what it was and is."""
    sink = MemorySink()
    go(tmp_path, [wide(sink)])
    # The first record does not count, and what the second one took is known at the third.
    assert list(sink.scalars["activations/head/mean"]) == [0, 1, 2]
    (first, before), (second, after) = sink.scalars[TAG].items()
    assert (first, before, second) == (0, 1.0, 2)
    assert after > 1000
    line = f"ActivationRecorder records every {after:.0f} steps instead of 1, to take at most 1e-07 %"
    assert line in [record.getMessage() for record in caplog.records]


def test_a_wider_cadence_goes_on_after_a_resume(tmp_path: Path) -> None:
    """A run that is resumed keeps the cadence of the checkpoint, and a run without a budget its own."""
    before, sink, plain = MemorySink(), MemorySink(), MemorySink()
    go(tmp_path, [wide(before)], max_epochs=1).save_checkpoint(tmp_path / "saved.ckpt")
    go(tmp_path, [wide(sink)], ckpt=tmp_path / "saved.ckpt")
    assert "activations/head/mean" not in sink.scalars
    assert sink.scalars[TAG] == {4: before.scalars[TAG][2]}
    go(tmp_path, [ActivationRecorder("head", every_n_train_steps=1, sinks=[plain])], ckpt=tmp_path / "saved.ckpt")
    assert list(plain.scalars["activations/head/mean"]) == [4, 5, 6, 7]
