"""The cost of recording: the time of a training step as a ratio to the bare step, styles interleaved in one process."""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.benchmarks.fits import HEADER, fits_table, wait_for_device
from tests.benchmarks.models import CASES, Case
from tests.benchmarks.styles import STYLES, Step

# Styles take turns after so many steps: a machine that is busy with something else for a second is so for all of them.
_TURN = 10
# Steps of a few milliseconds are repeated until the bare ones have taken so long, as their noise is larger.
_LEAST_S = 4.0
_MOST_REPEATS = 20

# Each of them is slow enough that fifty steps could not be repeated in reasonable time.
_FEW_STEPS = {
    ".item() and histc": 10,
    "Composer's four numbers": 10,
    "TensorBoard add_histogram, as Bolts": 2,
    "torchexplorer": 5,
    "wandb.watch, all": 10,
}


def train_step(case: Case) -> Callable[[], None]:
    """A whole step: forward, backward, optimizer."""
    optimizer = torch.optim.SGD(case.module.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        case.loss().backward()
        optimizer.step()

    return step


@dataclass(frozen=True)
class Cost:
    """The times of the steps of one style.

    Args:
        step_s: Seconds of a step, of a turn those of all.
        memory_mib: Most memory that the process had in its own hands while they ran.
    """

    step_s: float
    memory_mib: float


def peak_memory_mib(*, forget: bool = False) -> float:
    """The most memory of the process or the GPU since it was last forgotten; NaN where the system does not tell."""
    if torch.get_default_device().type == "cuda":
        if forget:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        if forget:
            Path("/proc/self/clear_refs").write_text("5")
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    except (OSError, ValueError):
        return math.nan
    return int(line.split()[1]) / 1024


@dataclass
class Course:
    """A model that is trained in one style, in rounds of some steps."""

    style: str
    train: Callable[[], None]
    run: Step
    steps: int
    costs: list[Cost] = field(default_factory=list)

    def warm_up(self) -> None:
        """Run a few steps, so that what comes first is not measured."""
        for number in range(3):
            self.run(number, self.train)

    def measure(self, first: int) -> Cost | None:
        """Run a turn, from that step of a round on; nothing if the round has ended for this style."""
        numbers = range(first, min(first + _TURN, self.steps))
        if not numbers:
            return None
        # What the style before this one has left in the caches and allocators is not to be paid by this one.
        self.train()
        peak_memory_mib(forget=True)
        wait_for_device()
        start = time.perf_counter()
        for number in numbers:
            self.run(number, self.train)
        wait_for_device()
        return Cost(time.perf_counter() - start, peak_memory_mib())


def run_round(running: list[Course], steps: int) -> None:
    """Run a round of steps of each style, in turns; the number of the first step is divisible by all cadences."""
    turns: dict[str, list[Cost]] = {course.style: [] for course in running}
    gc.collect()
    for first in range(0, steps, _TURN):
        for course in running:
            if (cost := course.measure(first)) is not None:
                turns[course.style].append(cost)
    for course in running:
        costs = turns[course.style]
        step_s = sum(cost.step_s for cost in costs) / course.steps
        course.costs.append(Cost(step_s, max(cost.memory_mib for cost in costs)))


def courses(make: Callable[[], Case], styles: Iterable[str], steps: int, stack: ExitStack) -> list[Course]:
    """One course for each style, each with a model of its own."""
    found = []
    for style in styles:
        torch.manual_seed(0)
        case = make()
        run = stack.enter_context(STYLES[style](case.module))
        found.append(Course(style, train_step(case), run, min(steps, _FEW_STEPS.get(style, steps))))
    return found


def failure(make: Callable[[], Case], style: str) -> str | None:
    """The error of a style on a model, which is a result too."""
    try:
        with ExitStack() as stack:
            run_round(courses(make, [style], 2, stack), 2)
    except Exception as error:  # noqa: BLE001 - other packages raise what they like
        return type(error).__name__
    return None


def table(make: Callable[[], Case], styles: list[str], repeats: int, steps: int) -> list[str]:
    """The rows of the table for one model."""
    # Apart from the others, each time beside bare steps: what the slow ones set going goes on when their turn is over.
    slow = [style for style in styles if style in _FEW_STEPS]
    rows = rows_of(make, [style for style in styles if style not in slow], repeats, steps)
    return rows + rows_of(make, ["bare", *slow], repeats, steps)[1:] if slow else rows


def rows_of(make: Callable[[], Case], styles: list[str], repeats: int, steps: int) -> list[str]:
    """The rows of styles, the first of which is bare, that take turns."""
    name = make().name
    failed = {style: error for style in styles if (error := failure(make, style)) is not None}
    with ExitStack() as stack:
        running = courses(make, [style for style in styles if style not in failed], steps, stack)
        for course in running:
            course.warm_up()
        run_round(running, steps)
        bare = running[0].costs
        for _ in range(max(repeats, min(_MOST_REPEATS, math.ceil(_LEAST_S / (bare[0].step_s * steps)))) - 1):
            run_round(running, steps)
    rows = []
    for course in running:
        ratios = [mine.step_s / base.step_s for mine, base in zip(course.costs, bare, strict=True)]
        middle = median(course.costs, "step_s") / median(bare, "step_s")
        more = median(course.costs, "memory_mib") - median(bare, "memory_mib")
        rows.append(
            f"| {name} | {course.style} | {median(course.costs, 'step_s') * 1e3:.1f} | {middle:.2f} "
            f"| {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} | {more:+.0f} |"
        )
    return rows + [f"| {name} | {style} | | raises {error} | | | |" for style, error in failed.items()]


def median(costs: list[Cost], what: str) -> float:
    """The median of one of the costs."""
    return float(statistics.median(getattr(each, what) for each in costs))


def device_name() -> str:
    """The device on which the models are trained."""
    return torch.cuda.get_device_name() if torch.get_default_device().type == "cuda" else "the CPU"


def main() -> None:
    """Measure all models and write the table to the terminal and to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="at least; of short steps more")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--models", nargs="*", choices=[make.__name__ for make in CASES], help="default: all")
    parser.add_argument("--styles", nargs="*", default=[""], help="parts of the names of those wanted; default: all")
    parser.add_argument("--output", type=Path, default=Path("build/bench.md"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_default_device(options.device)
    styles = ["bare", *(style for style in STYLES if style != "bare" and any(part in style for part in options.styles))]
    lines = [
        f"Every leaf's output and its gradient, on {device_name()}; peak memory is that beyond the bare steps.",
        f"torch {torch.__version__}, {options.threads} threads.",
        f"At least {options.repeats} repeats of {options.steps} steps, the styles in turns of {_TURN} steps.",
        "",
        "| model | style | ms per step | ratio of medians to bare | median of ratios | their range | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for make in CASES:
        if options.models and make.__name__ not in options.models:
            continue
        for row in table(make, styles, options.repeats, options.steps):
            lines.append(row)
            print(row, flush=True)
    lines += [
        "",
        "Everything a user pays: whole fits, every leaf's output and its gradient, with all that is written.",
        "",
    ]
    lines += HEADER
    print("\n".join(lines[-len(HEADER) - 3 :]))
    for row in fits_table(options.models or [], options.styles, options.repeats):
        lines.append(row)
        print(row, flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()
