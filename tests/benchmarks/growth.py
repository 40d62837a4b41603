"""Costs that grow with the model or the run: commands on recordings and the end of a fit, with the slope of each."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_recorder import Outputs, default_recorders
from tests.benchmarks.__main__ import peak_memory_mib
from tests.benchmarks.fits import Model, quiet
from tests.benchmarks.models import Case
from tests.benchmarks.page import write_run

_LEAST = 10  # modules and records of a run that costs hardly more than the import
_OF_BLOCK = 20  # modules
_COMMANDS = {
    "ls": ["ls", "{run}"],
    "show": ["show", "{run}"],
    "doctor": ["doctor", "{run}"],
    "view": ["view", "{run}", "--output", "{run}/page.html"],
    "diff": ["diff", "{run}", "{other}"],
}


class EndOfFit(Callback):
    """Notes time and memory when the training is over, before the recorders end."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before_mib, self.begin_s = memory_mib(), time.process_time()
        peak_memory_mib(forget=True)


def memory_mib() -> float:
    """Return the resident memory of the process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def model(modules: int) -> nn.Sequential:
    """Return a model of blocks of linear layers and activations."""
    leaves = [nn.Linear(4, 4) if number % 2 == 0 else nn.ReLU() for number in range(modules)]
    return nn.Sequential(*[nn.Sequential(*leaves[begin : begin + _OF_BLOCK]) for begin in range(0, modules, _OF_BLOCK)])


def end_of_fit(modules: int, records: int) -> tuple[float, float]:
    """Train with all recorders at every step; return the processor time of the end, and the memory that it adds."""
    net = model(modules)
    case = Case("chain", net, lambda: net(torch.randn(2, 4)).square().mean())
    end = EndOfFit()
    with tempfile.TemporaryDirectory() as folder, quiet():
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=[end, *default_recorders(every_n_train_steps=1, outputs=Outputs(report=True))],  # at any speed
            logger=TensorBoardLogger(Path(folder)),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Model(case), DataLoader(range(records)))  # type: ignore[arg-type]  # a sequence is a dataset
        return time.process_time() - end.begin_s, peak_memory_mib() - end.before_mib


# Without the imports of this file, which cost more than those of a command.
_COMMAND = """
import json, sys, time
from lightning_recorder.commands import main
if main(sys.argv[1:]) > 1:
    sys.exit("the command has failed")
(peak,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(chr(10) + json.dumps([time.process_time(), int(peak.split()[1]) / 1024]))
"""


def cost_of(command: list[str]) -> tuple[float, float]:
    """Return the processor time and the memory that a process states in its last line."""
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, check=True)
    seconds, mib = json.loads(done.stdout.splitlines()[-1])
    return seconds, mib


def commands_of(modules: int, records: int, names: list[str]) -> dict[str, tuple[float, float]]:
    """Return the costs of commands on a recording of a model with this many modules."""
    with tempfile.TemporaryDirectory() as folder:
        places = {name: Path(folder) / name for name in ("run", "other")}
        net = model(modules)
        for path in places.values():
            write_run(path, net, sites=modules, records=records)
        return {name: cost_of(["-c", _COMMAND, *(part.format(**places) for part in _COMMANDS[name])]) for name in names}


def costs(modules: int, records: int, names: list[str]) -> dict[str, tuple[float, float]]:
    """Return the costs of the chosen commands, and of the end of a fit."""
    found = commands_of(modules, records, [name for name in names if name != "fit"])
    if "fit" in names:
        found["fit"] = cost_of(["-m", "tests.benchmarks.growth", "fit", str(modules), str(records)])
    return found


def slope(costs: list[float], sizes: tuple[int, int]) -> float:
    """Return the exponent of the growth from the first size to the second, beyond the least cost; 1 is linear."""
    least, one, other = costs
    if min(one, other) <= least:
        return math.nan
    return math.log((other - least) / (one - least)) / math.log(sizes[1] / sizes[0])


def main() -> None:
    """Print the table: each command at a quarter of the size and at the size, for modules and for records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", type=int, default=10_000)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--costs", nargs="*", choices=[*_COMMANDS, "fit"], default=[*_COMMANDS, "fit"])
    options = parser.parse_args()
    print("Memory of a fit: what its end adds. A slope of 1 is linear.\n")
    print("| cost of | size | processor s | slope | MiB | slope |")
    print("|---|---|---|---|---|---|", flush=True)
    least = costs(_LEAST, _LEAST, options.costs)
    for what, size in (("modules", options.modules), ("records", options.records)):
        sizes = size // 4, size
        pairs = [(each, _LEAST) if what == "modules" else (_LEAST, each) for each in sizes]
        found = [costs(modules, records, options.costs) for modules, records in pairs]
        for name in options.costs:
            seconds, mib = ([each[name][place] for each in (least, *found)] for place in range(2))
            print(
                f"| {name} | {size} {what} | {seconds[-1]:.1f} | {slope(seconds, sizes):.2f} "
                f"| {mib[-1]:.0f} | {slope(mib, sizes):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["fit"]:
        print(json.dumps(end_of_fit(int(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()
