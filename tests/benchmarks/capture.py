"""The cost of recording the graph of one forward pass, beside other packages; python -m tests.benchmarks.capture."""

from __future__ import annotations

import argparse
import gc
import io
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from lightning_recorder.graph import GraphCapture, GraphPicture
from tests.benchmarks.__main__ import peak_memory_mib


@dataclass
class Case:
    """A model with its input.

    Args:
        name: The name in the table.
        module: Takes one tensor and gives one tensor, so that every package can record it.
        tensor: The input.
    """

    name: str
    module: nn.Module
    tensor: Tensor


class Logits(nn.Module):
    """A language model that gives its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens).logits
        return logits


class Block(nn.Module):
    """A residual block of tiny operations, in which nothing but the recording takes time."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.fc(x))


def gpt2() -> Case:
    """GPT-2 with 6 layers of width 384 on 4 texts of 256 tokens, without its cache."""
    config: Any = {"vocab_size": 1000, "n_positions": 256, "n_embd": 384, "n_layer": 6, "n_head": 6, "use_cache": False}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **config))
    return Case("GPT-2", Logits(model), torch.randint(0, 1000, (4, 256)))


def bert() -> Case:
    """BERT with 6 layers of width 384 on 4 texts of 256 tokens."""
    config: Any = {"vocab_size": 1000, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6}
    model = BertForMaskedLM(BertConfig(intermediate_size=1536, **config))
    return Case("BERT", Logits(model), torch.randint(0, 1000, (4, 256)))


def blocks(number: int) -> Callable[[], Case]:
    """A chain of residual blocks on 4 rows of 8 numbers."""
    return lambda: Case(f"{number} blocks", nn.Sequential(*(Block() for _ in range(number))), torch.randn(4, 8))


CASES = {"gpt2": gpt2, "bert": bert, "blocks100": blocks(100), "blocks1000": blocks(1000)}


# Ways to record.


def plain(case: Case) -> None:
    case.module(case.tensor)


def captured(case: Case) -> None:
    with GraphCapture(case.module, case.tensor) as recording:
        case.module(case.tensor)
    recording.graph()


def torchview(case: Case) -> None:
    from torchview import draw_graph

    draw_graph(case.module, input_data=case.tensor, depth=100, device="cpu", mode="train")


def traced(case: Case) -> None:
    torch.jit.trace(case.module, case.tensor, check_trace=False)


def tensorboard(case: Case) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        writer.add_graph(case.module, case.tensor)


def torchlens(case: Case) -> None:
    import torchlens

    torchlens.trace(case.module, case.tensor)


WAYS: dict[str, Callable[[Case], None]] = {
    "forward pass alone": plain,
    "lightning_recorder": captured,
    "torchview": torchview,
    "torch.jit.trace": traced,
    "TensorBoard add_graph": tensorboard,
    "torchlens": torchlens,
}


@contextmanager
def quiet() -> Iterator[None]:
    """Without what other packages print and warn of."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def rows(make: Callable[[], Case], ways: list[str], repeats: int) -> list[str]:
    """The rows of the table for one model: the ways take turns, so that a slow machine is slow for all."""
    torch.manual_seed(0)
    case = make()
    times: dict[str, list[float]] = {way: [] for way in ways}
    failed: dict[str, str] = {}
    for number in range(repeats + 1):
        for way in ways:
            if way in failed:
                continue
            gc.collect()
            start = time.perf_counter()
            try:
                with quiet():
                    WAYS[way](case)
            except Exception as error:  # noqa: BLE001 - other packages raise what they like
                failed[way] = type(error).__name__
                continue
            if number:  # the first is a warm-up
                times[way].append(time.perf_counter() - start)
    bare = times["forward pass alone"]
    lines = []
    for way in ways:
        if way in failed:
            lines.append(f"| {case.name} | {way} | raises {failed[way]} | | |")
            continue
        ratios = [mine / base for mine, base in zip(times[way], bare, strict=True)]
        middle = statistics.median(times[way]) / statistics.median(bare)
        milliseconds = statistics.median(times[way]) * 1e3
        lines.append(
            f"| {case.name} | {way} | {milliseconds:.1f} | {middle:.2f} | {min(ratios):.2f} to {max(ratios):.2f} |"
        )
    return lines


def memory_of_a_step(*, recorded: bool) -> float:
    """The peak of memory of a training step of the GPT-2, in MiB; asked in a process of its own."""
    torch.manual_seed(0)
    case = gpt2()
    optimizer = torch.optim.AdamW(case.module.parameters())

    def step() -> None:
        optimizer.zero_grad()
        case.module(case.tensor).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    gc.collect()
    peak_memory_mib(forget=True)
    if recorded:
        with GraphCapture(case.module, case.tensor):
            step()
    else:
        step()
    return peak_memory_mib()


def peaks(repeats: int) -> str:
    """The increase of the peak memory of a step by the recording."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeats):
        for recorded in (False, True):
            command = f"from tests.benchmarks import capture; print(capture.memory_of_a_step(recorded={recorded}))"
            printed = subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, text=True).stdout
            found[recorded].append(float(printed))
    bare, mine = (statistics.median(found[recorded]) for recorded in (False, True))
    return f"Peak memory of a training step of the GPT-2: {bare:.0f} MiB, recorded {mine:.0f} MiB ({mine / bare:.3f})."


def time_to_svg() -> str:
    """How long it takes from the graph of a BERT's forward pass to its picture."""
    case = bert()
    with GraphCapture(case.module, case.tensor) as recording:
        case.module(case.tensor)
    graph = recording.graph()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        GraphPicture(graph, Path(folder) / "graph.dot").finish()
        return f"From the graph of the BERT ({len(graph.nodes)} nodes) to its SVG: {time.perf_counter() - start:.2f} s."


def main() -> None:
    """Measure all models and write the table to the terminal and to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--models", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--ways", nargs="*", default=[""], help="parts of the names of those wanted; default: all")
    parser.add_argument("--output", type=Path, default=Path("build/bench-capture.md"))
    options = parser.parse_args()
    ways = [
        "forward pass alone",
        *(way for way in WAYS if way != "forward pass alone" and any(part in way for part in options.ways)),
    ]
    lines = [
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.repeats} repeats in turns.",
        "",
        "| model | way | ms | ratio of medians to the forward pass | range of ratios |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for name in options.models:
        for row in rows(CASES[name], ways, options.repeats):
            lines.append(row)
            print(row, flush=True)
    for sentence in (peaks(3), time_to_svg()):
        lines += ["", sentence]
        print(f"\n{sentence}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()
