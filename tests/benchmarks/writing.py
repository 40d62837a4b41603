"""The cost of writing: records to TensorBoard and to files, and dumps of tensors."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from lightning_recorder import StatisticsRecorder
from lightning_recorder.outputs import DumpFolder, Plotter, RecordFile, RecordPipeline, SinkFormatter, TensorDumps
from lightning_recorder.sinks import MultiSink, TensorBoardSink
from lightning_recorder.statistics import Record
from lightning_recorder.tensors import BufferPool, TensorCapture
from tests.benchmarks.models import gpt2

SITES = 200
STATISTICS = ("count", "mean", "std", "rms", "min", "max", "zero_fraction", "nan_count", "inf_count")


def milliseconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ms ({min(values):.1f}-{max(values):.1f})"


def step_of_gpt2() -> Callable[[], None]:
    case = gpt2()
    optimizer = torch.optim.SGD(case.module.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        case.loss().backward()
        optimizer.step()

    return step


def flushing(repeats: int) -> list[str]:
    """The time of a flush of 200 sites, in the training thread and until it is written, and of 50 GPT-2 steps."""
    modules: dict[str, nn.Module] = {f"layers.{number}": nn.Identity() for number in range(SITES)}
    recorder = StatisticsRecorder(modules)
    step = step_of_gpt2()
    step()
    here: list[float] = []
    all_: list[float] = []
    steps: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        results = RecordPipeline(SinkFormatter("activations", STATISTICS), log=lambda line: None)
        results.begin(MultiSink([TensorBoardSink(folder)]), None, "activations")
        results.consumers = [RecordFile(Path(folder), "activations", group="activations")]
        for number in range(repeats + 1):
            steps.append(milliseconds(lambda: [step() for _ in range(5)]) / 5)
            with recorder:
                for module in modules.values():
                    module(torch.randn(10_000))

            def flush(number: int = number) -> None:
                results.add(Record(number, 0, recorder.snapshot()))
                recorder.reset()

            here.append(milliseconds(flush))
            all_.append(here[-1] + milliseconds(results.wait))
    fifty = 50 * statistics.median(steps)
    mine, whole = statistics.median(here[1:]), statistics.median(all_[1:])
    of_each = f"{len(STATISTICS)} statistics + histogram"
    what = f"A flush of {SITES} sites x ({of_each}) to TensorBoard and to the file of records"
    percent = [100 * part / fifty for part in (mine, whole)]
    return [
        f"A step of the GPT-2 takes {spread(steps)}.",
        f"{what}: {spread(here[1:])} of the training thread, {spread(all_[1:])} until all is written.",
        f"Of 50 steps that is {percent[0]:.2f} % on the training thread, {percent[1]:.2f} % in all.",
    ]


def dumping(repeats: int) -> list[str]:
    """The time of dumping 100 tensors of a megabyte, in the training thread, and of saving them directly."""
    modules: dict[str, nn.Module] = {f"layers.{number}": nn.Identity() for number in range(100)}
    tensors = {name: torch.randn(512, 512) for name in modules}
    here: list[float] = []
    saved: list[float] = []
    synced: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pool = BufferPool()
        dumps = TensorDumps(DumpFolder("tensors", group="tensors", directory=folder), ("steps",), buffers=pool)
        capture = TensorCapture(modules, buffers=pool)

        def dump(number: int) -> None:
            with capture:
                for key, module in modules.items():
                    module(tensors[key])
            dumps.add(number, 0, capture.take())

        def save(*, sync: bool) -> None:
            save_file(tensors, folder / "at-once.safetensors")
            if sync:
                with (folder / "at-once.safetensors").open("rb") as file:
                    os.fsync(file.fileno())

        for number in range(repeats + 2):
            here.append(milliseconds(lambda number=number: dump(number)))  # type: ignore[misc]  # its default is bound
            dumps.wait()
            (folder / f"tensors-step={number}.safetensors").unlink()
            saved.append(milliseconds(lambda: save(sync=False)))
            synced.append(milliseconds(lambda: save(sync=True)))
    here, saved, synced = here[2:], saved[2:], synced[2:]
    mine = statistics.median(here)
    fast_path, on_disk = (mine / statistics.median(each) for each in (saved, synced))
    return [
        f"Dumping 100 tensors of 1 MB takes {spread(here)} of the training thread.",
        f"safetensors.torch.save_file takes {spread(saved)}, with the wait for the disk {spread(synced)}.",
        f"That is {fast_path:.2f} x and {on_disk:.2f} x the time of saving at once; a dump waits for the disk, too.",
    ]


def drawing(repeats: int) -> list[str]:
    """The time of the pictures of 50 sites and 200 records, and of a step meanwhile."""
    modules: dict[str, nn.Module] = {f"layers.{number}": nn.Identity() for number in range(50)}
    recorder = StatisticsRecorder(modules)
    plotter = Plotter("activations", every=10**9, max_images=4, show=lambda step, images: len(images))
    for number in range(200):
        with recorder:
            for module in modules.values():
                module(torch.randn(1000) * (1 + number / 100))
        record = Record(number, 0, recorder.snapshot())
        recorder.reset()
        plotter.on_record(record.table())
    drawn = [milliseconds(plotter._draw) for _ in range(repeats)]
    return [f"Drawing all pictures of 50 layers and 200 records: {spread(drawn)} of the thread that writes."]


def main() -> None:
    """Measure, and write the sentences to the terminal and to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path("build/bench-writing.md"))
    options = parser.parse_args()
    lines = [f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.repeats} repeats."]
    for measure in (flushing, dumping, drawing):
        lines += ["", *measure(options.repeats)]
    text = "\n".join(lines) + "\n"
    print(text)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
