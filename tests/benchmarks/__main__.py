"""What recording costs: the time of a training step as a ratio to the bare step, styles interleaved in one process."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.benchmarks.models import CASES, Case
from tests.benchmarks.styles import STYLES

# Each of them is slow enough that a step in fifty could not be repeated in reasonable time.
_FEW_STEPS = {".item() and histc": 10, "TensorBoard add_histogram": 2}


def train_step(case: Case) -> Callable[[], None]:
    """A whole step: forward, backward, optimiser."""
    optimizer = torch.optim.SGD(case.module.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        case.loss().backward()
        optimizer.step()

    return step


def time_per_step_s(case: Case, style: str, step: Callable[[], None], steps: int) -> float:
    """Seconds of a step, the mean of some of them, the number of the first divisible by all cadences."""
    for _ in range(3):
        # What the style before this one has left in the caches and allocators is not to be paid by this one.
        step()
    with STYLES[style](case.module) as run:
        start = time.perf_counter()
        for number in range(steps):
            run(number, step)
        return (time.perf_counter() - start) / steps


def measure(case: Case, repeats: int, steps: int) -> list[str]:
    """The rows of the table for one model."""
    step = train_step(case)
    for style in STYLES:
        time_per_step_s(case, style, step, 2)
    times: dict[str, list[float]] = {style: [] for style in STYLES}
    for _ in range(repeats):
        # Interleaved, so that a machine that grows slower does so for all styles.
        for style, seen in times.items():
            seen.append(time_per_step_s(case, style, step, min(steps, _FEW_STEPS.get(style, steps))))
    rows = []
    for style, seen in times.items():
        ratios = [mine / base for mine, base in zip(seen, times["bare"], strict=True)]
        middle = statistics.median(seen) / statistics.median(times["bare"])
        span = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append(f"| {case.name} | {style} | {statistics.median(seen) * 1e3:.1f} | {middle:.2f} | {span} |")
    return rows


def main() -> None:
    """Measure all models and write the table to the terminal and to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=Path("build/bench.md"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = [
        "Every leaf's output and its gradient, on the CPU.",
        f"torch {torch.__version__}, {options.threads} threads, {options.repeats} repeats of {options.steps} steps.",
        "",
        "| model | style | ms per step, median | ratio of medians to bare | least and greatest ratio |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for make in CASES:
        torch.manual_seed(0)
        for row in measure(make(), options.repeats, options.steps):
            lines.append(row)
            print(row, flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()
