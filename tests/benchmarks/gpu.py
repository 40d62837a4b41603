"""Everything that is measured on a GPU, in one command of at most eight minutes: python -m tests.benchmarks.gpu.

Each part runs in a process of its own with a limit of time, so a failing, crashing or hanging part ends no other one.
The table is written as JSON and as Markdown after each part. ``--device cpu --tiny`` runs everything without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_recorder import ActivationRecorder, GradientRecorder, MemorySink, Outputs, StepWatch
from lightning_recorder.reductions.kernels import fused, fused_cuda
from lightning_recorder.reductions.kernels.self_test import empty_row
from lightning_recorder.reductions.values import Values
from tests.watch.nets import BATCHES, NETS, Planted, batches, calls, plant

if TYPE_CHECKING:
    from transformers import GPT2Config

__all__ = ["PARTS", "Part", "Report", "Row", "markdown", "run_all", "take_over"]

ROOT = Path(__file__).parents[2]
LIMIT_S = 480
"""The seconds for all parts together."""
_PLANTED = 12  # NaN
_BEGIN, _END = "<!-- measured on: {device} -->", "<!-- end of the measured table -->"


@dataclass(frozen=True)
class Row:
    """A number of the table.

    Args:
        what: The measurements.
        value: The number.
        unit: Its unit; ``"×"`` for a ratio to the bare step.
        goal: The largest value that is wanted, or None.
    """

    what: str
    value: float
    unit: str
    goal: float | None = None


@dataclass
class Part:
    """The result of a part.

    Args:
        name: Its name, as in :data:`PARTS`.
        rows: Its numbers; those before an error, too.
        error: The reason why it ended early; empty if it did not.
        seconds: Its time.
    """

    name: str
    rows: list[Row] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """The table of one run."""

    device: str
    about: dict[str, str]
    parts: list[Part] = field(default_factory=list)


@dataclass(frozen=True)
class Options:
    """How the parts run.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        tiny: Use sizes that take a second on a CPU, and no limits of single parts, since the CPU may be busy.
    """

    device: str
    tiny: bool


# Models.


class Trained(LightningModule):
    """A model that is trained on the same batch in each step.

    Args:
        net: The network.
        inputs: The batch.
        loss: A function from the output to the loss; None if the network gives it.
    """

    def __init__(self, net: nn.Module, inputs: list[Tensor], loss: Callable[[Any], Tensor] | None) -> None:
        super().__init__()
        self.net, self.inputs, self.loss = net, inputs, loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.net(*self.inputs)
        found: Tensor = output.loss if self.loss is None else self.loss(output)
        return found

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


class Gpt2(nn.Module):
    """GPT-2, which gives its loss."""

    def __init__(self, config: GPT2Config) -> None:
        from transformers import GPT2LMHeadModel  # most parts run without its import, which takes seconds

        super().__init__()
        self.net = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Any:
        return self.net(input_ids=tokens, labels=tokens)


class Bottleneck(nn.Module):
    """The block of a ResNet-50."""

    def __init__(self, taken: int, inner: int, stride: int) -> None:
        super().__init__()
        given = 4 * inner
        self.conv1, self.norm1 = nn.Conv2d(taken, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.norm2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.norm3 = nn.Conv2d(inner, given, 1, bias=False), nn.BatchNorm2d(given)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or taken != given:
            self.shortcut = nn.Sequential(nn.Conv2d(taken, given, 1, stride, bias=False), nn.BatchNorm2d(given))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.relu(self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x))))))
        given: Tensor = self.relu(self.norm3(self.conv3(inner)) + self.shortcut(x))
        return given


def mlp(options: Options) -> Trained:
    """784-512-512-10 with a batch of 128: the host limits its step."""
    width = 32 if options.tiny else 512
    net = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    images, classes = torch.randn(128, 784, device=options.device), torch.randint(0, 10, (128,), device=options.device)
    return Trained(net, [images], lambda output: F.cross_entropy(output, classes))


def resnet(options: Options) -> Trained:
    """A ResNet-50 on 64 images of 3×224×224."""
    width, depths, count, size = (8, (1, 1), 2, 32) if options.tiny else (64, (3, 4, 6, 3), 64, 224)
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    taken = width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            layers.append(Bottleneck(taken, width << stage, 2 if stage and not block else 1))
            taken = 4 * (width << stage)
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(taken, 1000))
    images = torch.randn(count, 3, size, size, device=options.device)
    classes = torch.randint(0, 1000, (count,), device=options.device)
    return Trained(net, [images], lambda output: F.cross_entropy(output, classes))


def gpt2_small(options: Options) -> Trained:
    """GPT-2 with 6 layers of width 384 on 4 texts of 256 tokens: the host limits its step."""
    return _gpt2(options, 6, 384, 6, 1000, 4, 256)


def gpt2(options: Options) -> Trained:
    """GPT-2 124M on 16 texts of 1,024 tokens: the device limits its step."""
    return _gpt2(options, 12, 768, 12, 50257, 16, 1024)


def _gpt2(options: Options, layers: int, width: int, heads: int, words: int, count: int, length: int) -> Trained:
    if options.tiny:
        layers, width, heads, words, count, length = 1, 32, 2, 50, 2, 16
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=words,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    tokens = torch.randint(0, words, (count, length), device=options.device)
    return Trained(Gpt2(config), [tokens], None)


# Measuring.


class Timer(Callback):
    """Measures the steps after the first ones, until the device has done them.

    Args:
        skip: The number of steps that are not measured.
    """

    def __init__(self, skip: int) -> None:
        self.skip = skip
        self.steps = 0
        self.seconds = math.nan
        self.memory_mib = math.nan

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.skip:
            wait(pl_module.device)
            if pl_module.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if args[-1] + 1 == trainer.num_training_batches:
            wait(pl_module.device)
            self.steps = args[-1] + 1 - self.skip
            self.seconds = (time.perf_counter() - self._start) / self.steps
            if pl_module.device.type == "cuda":
                self.memory_mib = torch.cuda.max_memory_allocated() / 2**20


def wait(device: torch.device | str) -> None:
    """Wait until a GPU has done all its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the messages of Lightning and of the recorders."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trainer_of(options: Options, folder: Path, callbacks: list[Any], **more: Any) -> Trainer:
    """Return a trainer that writes nothing of its own."""
    return Trainer(
        default_root_dir=folder,
        accelerator="gpu" if options.device == "cuda" else options.device,
        devices=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **more},
    )


def fit_time(options: Options, model: Trained, callbacks: list[Any], steps: int, skip: int) -> Timer:
    """Train a model, and return the time of a step and the memory."""
    timer = Timer(skip)
    precision: Any = "bf16-mixed" if options.device == "cuda" else "32-true"
    with tempfile.TemporaryDirectory() as folder, quiet():
        trainer = trainer_of(options, Path(folder), [timer, *callbacks], precision=precision)
        trainer.fit(model, DataLoader(range(steps)))  # type: ignore[arg-type]  # a sequence is a dataset
    return timer


def every(interval: int) -> list[Any]:
    """Return recorders of activations and gradients, without the watch."""
    outputs = Outputs(plots=False, findings=False)
    kinds = (ActivationRecorder, GradientRecorder)
    return [kind(every_n_train_steps=interval, outputs=outputs, sinks=[MemorySink()]) for kind in kinds]


STYLES: dict[str, Callable[[], list[Any]]] = {
    "every step": lambda: every(1),
    "1 in 50": lambda: every(50),
    "watch": lambda: [StepWatch(incidents=False)],
}


def ratios(
    options: Options,
    make: Callable[[Options], Trained],
    goals: dict[str, float],
    *,
    steps: int,
    rounds: int,
    compiled: bool = False,
) -> Iterator[Row]:
    """Yield the ratios of all styles to the bare step. They take turns, so that a slow machine is slow for all."""
    steps, skip, rounds = (8, 4, 1) if options.tiny else (steps + 10, 10, rounds)
    models = {}
    for style in ("bare", *STYLES):
        seed_everything(0, verbose=False)
        models[style] = model = make(options)
        if compiled:
            # The code of a backend takes longer than all tiny steps.
            backend = "eager" if options.tiny else "inductor"
            model.net = torch.compile(model.net, backend=backend)  # type: ignore[assignment]  # a module again
    found: dict[str, list[Timer]] = {style: [] for style in models}
    for _ in range(rounds):
        for style, model in models.items():
            gc.collect()
            found[style].append(fit_time(options, model, STYLES[style]() if style != "bare" else [], steps, skip))
    bare = statistics.median(each.seconds for each in found["bare"])
    yield Row("bare step", 1e3 * bare, "ms")
    for style in STYLES:
        pairs = zip(found[style], found["bare"], strict=True)
        yield Row(style, statistics.median(mine.seconds / base.seconds for mine, base in pairs), "×", goals.get(style))
        more = statistics.median(each.memory_mib for each in found[style]) - statistics.median(
            each.memory_mib for each in found["bare"]
        )
        if not math.isnan(more):
            yield Row(f"{style}, more memory at the peak", more, "MiB")


# Parts.


def host_time(options: Options) -> Iterator[Row]:
    """Yield the time of the host to reduce one tensor."""
    device = torch.device(options.device)
    fused.prepare(wait=True)
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (100, 1000) if options.tiny else (1000, 400_000):
            values = torch.randn(numel, device=device).to(dtype)
            row = empty_row().to(device)
            fused_cuda.add_statistics_on_device(row, Values(values), None)  # compiles the kernels
            add = fused_cuda.add_tensor_on_device if device.type == "cuda" else fused.add_tensor
            times = []
            for _ in range(3 if options.tiny else 20):
                wait(device)
                start = time.perf_counter()
                for _ in range(50):  # fewer than a driver queues
                    if not add(row, values, 1.0, None):
                        raise RuntimeError(f"the kernel refuses {dtype}")
                times.append((time.perf_counter() - start) / 50)
            name = str(dtype).removeprefix("torch.")
            yield Row(f"host time per tensor, {numel:,} × {name}", 1e6 * statistics.median(times), "µs", 25)


def planted(options: Options) -> Iterator[Row]:
    """Yield how many planted NaN the default watch names by module, direction, step and batch."""
    generator, named, count = random.Random(0), 0, 2 if options.tiny else _PLANTED
    kinds = [kind for kind in NETS if kind not in ("attention", "masked")]  # these make their masks on the CPU
    for number in range(count):
        kind = kinds[number % len(kinds)]
        name, times = generator.choice(sorted(calls(Planted(kind)).items()))
        call, at, backward = generator.randint(1, times), generator.randrange(BATCHES), generator.random() < 0.5
        model, watch = Planted(kind, at), StepWatch(incidents=False)
        plant(model, name, call, math.nan, backward=backward)
        with tempfile.TemporaryDirectory() as folder, quiet():
            trainer_of(options, Path(folder), [watch]).fit(model, batches())
        part = f"in the {'backward' if backward else 'forward'} pass of {name}"
        where = f"at step {at} (batch {at} of epoch 0"
        named += len(watch.found) == 1 and part in watch.found[0].verdict and where in watch.found[0].verdict
        yield Row(f"planted NaN named, of {number + 1}", named, "")


def tests(options: Options, files: Iterable[str], *arguments: str) -> Iterator[Row]:
    """Yield how many tests passed, failed and were skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *files, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    summary = next((line for line in reversed(lines) if re.search(r"\d+ (passed|failed|skipped|error)", line)), "")
    for what in ("passed", "failed", "error", "skipped"):
        match = re.search(rf"(\d+) {what}", summary)
        if match or what in ("passed", "failed"):
            yield Row(what, int(match[1]) if match else 0, "tests", 0 if what == "failed" else None)
    if done.returncode not in (0, 5):
        failed = [line.removeprefix("FAILED ").partition(" - ")[0] for line in lines if line.startswith("FAILED ")]
        raise RuntimeError("; ".join(failed) or (lines or [done.stderr.strip()])[-1])


_GPU = "tests/callbacks/test_gpu.py"
_KERNELS = {False: ["tests/reductions/kernels"], True: []}
_SAME = "test_training_is_bitwise_the_same"
_HOST = {"every step": 1.35, "1 in 50": 1.01, "watch": 1.005}
_DEVICE = {"every step": 1.05, "1 in 50": 1.005, "watch": 1.005}

PARTS: dict[str, tuple[int, Callable[[Options], Iterator[Row]]]] = {
    "bits in four formats": (70, lambda options: tests(options, [_GPU], "-k", _SAME)),
    "host time": (30, host_time),
    "MLP": (45, lambda options: ratios(options, mlp, _HOST, steps=500, rounds=3)),
    "GPT-2, 6 layers": (45, lambda options: ratios(options, gpt2_small, _HOST, steps=150, rounds=2)),
    "GPT-2 124M": (75, lambda options: ratios(options, gpt2, _DEVICE, steps=50, rounds=1)),
    "ResNet-50": (50, lambda options: ratios(options, resnet, _DEVICE, steps=50, rounds=1)),
    "planted NaN": (40, planted),
    "GPT-2 124M, compiled": (
        120,
        lambda options: ratios(options, gpt2, {**_DEVICE, "1 in 50": 1.01}, steps=50, rounds=1, compiled=True),
    ),
    "tests": (90, lambda options: tests(options, [_GPU, *_KERNELS[options.tiny]], "-k", f"not {_SAME}")),
}
"""The parts, each with the seconds that it may take, the most important first."""


def run_part(name: str, options: Options, limit_s: float) -> Part:
    """Run a part in a process of its own, and return what it measured until it ended or its time was over."""
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--part", name, "--device", options.device]
    command += ["--tiny"] if options.tiny else []
    start, error = time.perf_counter(), ""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        with subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err, env=environment) as process:
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                code, error = 0, f"ended after {limit_s:.0f} s"
        out.seek(0)
        err.seek(0)
        rows = [Row(**json.loads(line)) for line in out if line.startswith('{"what"')]
        if code:
            error = (err.read().strip().splitlines() or [""])[-1] or f"exit status {code}"
    return Part(name, rows, error, time.perf_counter() - start)


def run_all(report: Report, names: Iterable[str], options: Options, limit_s: float, written: Path) -> None:
    """Run parts until the time is over, and write the table after each.

    Args:
        report: Receives the parts.
        names: The parts to run, in order.
        options: How they run.
        limit_s: The seconds for all of them together.
        written: The path of the files without their suffix.
    """
    end = time.monotonic() + limit_s
    for name in names:
        left = end - time.monotonic()
        limit = left if options.tiny else min(left, PARTS[name][0])
        part = run_part(name, options, limit) if left > 5 else Part(name, error="no time was left")
        report.parts.append(part)
        written.parent.mkdir(parents=True, exist_ok=True)
        written.with_suffix(".json").write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
        written.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
        print(f"{name}: {part.error or 'done'} ({part.seconds:.0f} s)", flush=True)


def markdown(report: Report) -> str:
    """Return the table as Markdown, with the name of the device.

    A part that failed has a row with the reason; goals that are missed are bold.
    """
    about = ", ".join(f"{name} {value}" for name, value in report.about.items())
    lines = [f"Measured on one {report.device} ({about}).", "", "| part | what | value | goal |", "|---|---|---|---|"]
    for part in report.parts:
        for row in part.rows:
            number = f"{row.value:,.3f}" if row.unit == "×" else f"{row.value:,.1f}" if row.unit else f"{row.value:g}"
            number = f"{row.value:g} tests" if row.unit == "tests" else f"{number} {row.unit}".strip()
            is_missed = row.goal is not None and row.value > row.goal
            goal = "" if row.goal is None else f"≤ {row.goal:g}"
            lines.append(f"| {part.name} | {row.what} | {f'**{number}**' if is_missed else number} | {goal} |")
        if part.error:
            error = part.error.replace("|", "\\|")
            lines.append(f"| {part.name} | *not complete* | {error} | |")
    return "\n".join(lines) + "\n"


def take_over(page: Path, report: Report) -> None:
    """Write the table into a page, in place of an earlier one of the same device, or at the end."""
    text, begin = page.read_text(encoding="utf-8"), _BEGIN.format(device=report.device)
    table = f"{begin}\n\n{markdown(report)}\n{_END}\n"
    before, found, after = text.partition(begin)
    text = before + table + after.partition(f"{_END}\n")[2] if found else f"{text.rstrip()}\n\n{table}"
    page.write_text(text, encoding="utf-8")


def about_machine(device: str) -> Report:
    """Return an empty table with the name of the device, and the versions that the figures depend on."""
    about = {"torch": torch.__version__, "Python": platform.python_version()}
    if device == "cuda":
        about |= {"CUDA": str(torch.version.cuda), "host": _processor()}
        return Report(torch.cuda.get_device_name(), about)
    return Report(_processor() or "CPU", about)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    """Measure, or run one part and print its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="sizes for a machine without a GPU")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="for all parts together")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu", help="the files without their suffix")
    parser.add_argument("--page", type=Path, help="a page of the documentation that takes the table over")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    options = Options(given.device, given.tiny)
    if given.part:
        for row in PARTS[given.part][1](options):
            print(json.dumps(asdict(row)), flush=True)
        return
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; pass --device cpu --tiny to try the command")
    report = about_machine(given.device)
    run_all(report, given.parts or list(PARTS), options, given.seconds, given.output)
    if given.page is not None:
        take_over(given.page, report)
    print(f"\n{markdown(report)}\nwritten to {given.output}.json and {given.output}.md")


if __name__ == "__main__":
    main()
