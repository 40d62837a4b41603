"""Recording inside compiled code on two processes.

``python -m tests.callbacks.test_compiled_distributed`` runs the scenarios in two processes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch import distributed as dist
from torch._dynamo.utils import counters
from torch.nn import functional as F

from lightning_recorder import ActivationRecorder, GradientRecorder, MemorySink, Outputs, ParameterRecorder
from lightning_recorder.callbacks.statistics import StatisticsCallback
from tests.callbacks.models import digits
from tests.callbacks.test_distributed import (
    ROWS,
    STEPS,
    Scenario,
    go,
    main,
    outcome,
    same_histogram,
    same_tensors,
    train,
)

pytestmark = pytest.mark.slow

WIDTH = 512  # a matrix of this size fills a bucket of DDP


class Block(nn.Module):
    """A linear layer and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x))


class Net(nn.Module):
    """Three wide layers after one whose bits do not depend on the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.squash = nn.Softsign()
        self.first = nn.Linear(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.squash(x.flatten(1) - 0.5))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Compiled(LightningModule):
    """A classifier that is compiled as a whole, as one net, or block by block."""

    def __init__(self, how: str, backend: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.backend = how, backend
        self.net = Net()
        if how == "net":
            self.net.compile(backend=backend)

    def configure_model(self) -> None:
        if self.how == "sharded":
            from torch.distributed.fsdp import fully_shard

            mesh: Any = self.device_mesh
            for block in self.net.blocks:
                block.compile(backend=self.backend)
                fully_shard(block, mesh=mesh["data_parallel"])
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(folder: Path, how: str, stance: Any, **options: Any) -> dict[str, Any]:
    """Train with or without recorders, and return the counters of torch.compile, the records and the parameters."""
    torch._dynamo.reset()
    counters.clear()
    parts: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        parts.append(len(graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    sink = MemorySink()
    settings: dict[str, Any] = {"every_n_train_steps": 2, "sinks": [sink], "outputs": Outputs(dumps=False)}
    kinds: list[type[StatisticsCallback]] = [ActivationRecorder, GradientRecorder, ParameterRecorder]
    hidden: dict[str, Any] = {"functions": False}  # those in compiled code; each rank has a loss of its own
    callbacks = [
        kind(compiled=stance, strict=True, **settings, **({} if kind is ParameterRecorder else hidden))
        for kind in (kinds if stance else ())
    ]
    model = Compiled(how, backend)
    given: Any = torch.compile(model, backend=backend) if how == "whole" else model
    train(folder, callbacks, given, **options)
    state = {name: getattr(value, "full_tensor", value.clone)() for name, value in model.state_dict().items()}
    return {
        "scalars": sink.scalars,
        "histograms": sink.histograms,
        "state": state,
        "parts": len(parts),
        "breaks": sum(counters["graph_break"].values()),
        "recompiles": sum(counters["recompiles"].values()),
        "graphs": counters["stats"]["unique_graphs"],
    }


HOWS = ("net", "whole", "sharded")


def scenario(how: str) -> Scenario:
    """Return a function that trains without recorders and with recorders inside the compiled code."""

    def run(folder: Path) -> dict[str | None, Any]:
        def strategy() -> Any:
            if how == "sharded":
                return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
            return DDPStrategy(bucket_cap_mb=1)

        return {stance: trained(folder / str(stance), how, stance, strategy=strategy()) for stance in (None, "inside")}

    return run


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the results of two processes."""
    folder = tmp_path_factory.mktemp("pair")
    code, log = go(folder, *HOWS, timeout_s=240.0, of=__name__)
    assert code == 0, log[-3000:]
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the result of one process that trains on the batches of both."""
    options: dict[str, Any] = {"loader": digits(STEPS, 2 * ROWS), "devices": 1, "strategy": "auto"}
    return trained(tmp_path_factory.mktemp("alone"), "net", "inside", **options)


@pytest.mark.parametrize("how", HOWS)
def test_training_is_that_of_the_compiled_run(pair: Path, how: str) -> None:
    """Parameters are bitwise those of the run without recorders, and there is one more graph for recorded steps.

    With DDP, torch splits a graph into one part for each bucket of gradients.
    """
    results, warned = outcome(pair, how)
    assert warned == [[], []]
    for result in results:
        bare, recorded = result[None], result["inside"]
        assert same_tensors(recorded["state"], bare["state"])
        assert (bare["graphs"], bare["breaks"], bare["recompiles"]) == (1, 0, 0)
        assert (recorded["graphs"], recorded["breaks"], recorded["recompiles"]) == (2, 0, 0)
        assert (bare["parts"], recorded["parts"]) == ((1, 2) if how == "sharded" else (4, 8))


@pytest.mark.parametrize("how", HOWS)
def test_two_processes_record_what_one_does_over_their_batches(pair: Path, alone: Any, how: str) -> None:
    """The records are those of one process, up to a relative 1e-5 from matrix products."""
    assert (alone["graphs"], alone["breaks"], alone["recompiles"]) == (2, 0, 0)
    both, other = (result["inside"] for result in outcome(pair, how)[0])
    assert other["scalars"] == {}
    assert {tag for tag in both["scalars"] if "/rank_" not in tag} == set(alone["scalars"])
    assert both["histograms"].keys() == alone["histograms"].keys()
    for tag, steps in alone["scalars"].items():
        place, _, statistic = tag.rpartition("/")
        is_size = statistic in ("mean", "std", "rms", "min", "max", "norm")
        assert both["scalars"][tag].keys() == steps.keys()
        for step, value in steps.items():
            size = alone["scalars"].get(f"{place.removesuffix('/update_ratio')}/rms", {}).get(step, 1.0)
            bound = 1e-5 * size if is_size else 1e-5
            assert both["scalars"][tag][step] == pytest.approx(value, rel=1e-5, abs=bound), (tag, step)
    squashed = "activations/net.squash/histogram"
    assert all(
        same_histogram(both["histograms"][squashed][step], alone["histograms"][squashed][step]) for step in (0, 1)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:], {how: scenario(how) for how in HOWS})
    dist.destroy_process_group()  # gloo's threads may otherwise abort a process that ends: pytorch#190489
