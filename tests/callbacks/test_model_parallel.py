"""Tensor parallelism, FSDP2 and both, in real processes: the merged records are those of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_recorder import (
    ActivationRecorder,
    GradientRecorder,
    Outputs,
    ParameterRecorder,
    StepWatch,
    open_recording,
)
from tests import forks

pytestmark = pytest.mark.slow

QUIET = Outputs(plots=False, dumps=False)
STEPS, ROWS = 3, 16


class Net(LightningModule):
    """Two linear layers that are divided among ranks, with a normalization before them that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is None or hasattr(self.up.weight, "placements"):
            return
        if mesh["tensor_parallel"].size() > 1:
            plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(self, mesh["tensor_parallel"], plan)
        if mesh["data_parallel"].size() > 1:
            for each in (self.norm, self.up, self.down):
                fully_shard(each, mesh=mesh["data_parallel"])
            fully_shard(self, mesh=mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.down(self.act(self.up(self.norm(batch[0])))), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Replicated(Net):
    """Shards over two ranks each, of which there are two copies: HSDP.

    Args:
        fault: Rank 3 changes its shard of a weight after the fourth step.
    """

    def __init__(self, fault: bool) -> None:
        super().__init__()
        self.fault = fault

    def configure_model(self) -> None:
        if not hasattr(self.up.weight, "placements"):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            for each in (self.norm, self.up, self.down, self):
                fully_shard(each, mesh=mesh)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.fault and self.global_step == 4 and os.environ["LOCAL_RANK"] == "3":
            self.up.weight._local_tensor.data.mul_(1.01)  # type: ignore[attr-defined]  # a DTensor


def fit(folder: Path, data: int = 1, tensor: int = 1, model: LightningModule | None = None, steps: int = STEPS) -> None:
    seed_everything(2, verbose=False)
    x, y = torch.randn(steps * ROWS, 8), torch.randint(0, 4, (steps * ROWS,))
    options: dict[str, Any] = {"every_n_train_steps": 1, "outputs": QUIET, "strict": True}
    watch = StepWatch(check_ranks_every_n_steps=1, strict=True)
    strategy: Any = "auto"
    if data * tensor > 1:
        strategy = ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor)
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=data * tensor,
        strategy=strategy,
        max_epochs=1,
        callbacks=[
            ActivationRecorder(["up", "act", "down"], **options),
            GradientRecorder(["up", "down"], **options),
            ParameterRecorder(**options),
            watch,
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )
    dataset = TensorDataset(x, y)
    place = int(os.environ.get("LOCAL_RANK", "0")) // tensor if data * tensor > 1 else 0
    # Lightning's own sampler would shuffle, and one process would have other batches.
    shares: Any = DistributedSampler(dataset, data, place, shuffle=False)
    trainer.fit(model or Net(), DataLoader(dataset, ROWS // data, sampler=shares))


SCRIPT = """
import sys
from pathlib import Path
from tests.callbacks.test_model_parallel import fit

fit(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
"""


@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 1), (2, 2)])
def test_records_are_those_of_one_process(data: int, tensor: int, tmp_path: Path) -> None:
    """Statistics of activations, gradients and parameters are equal, and nothing is said to differ."""
    fit(tmp_path / "one")
    (tmp_path / "train.py").write_text(SCRIPT)
    several = tmp_path / "several"
    codes, log = forks.run(
        tmp_path / "train.py", several, data, tensor, folder=tmp_path, ranks=data * tensor, timeout_s=240
    )
    assert set(codes) == {0}, log[-3000:]
    assert "RecorderWarning" not in log, log[-3000:]
    one, other = open_recording(tmp_path / "one").run, open_recording(several).run
    assert list(one) == list(other)
    for label in ("activations", "gradients", "parameters"):
        assert one[label].steps == other[label].steps == list(range(STEPS))
        assert set(one[label].sites) == set(other[label].sites)
        for site in one[label].sites:
            for statistic in ("mean", "rms", "min", "max"):
                wanted, found = (run[label][site].statistic(statistic) for run in (one, other))
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=f"{label} {site} {statistic}")
            if label == "parameters":
                assert torch.equal(*(run[label][site].statistic("count") for run in (one, other)))
    assert [each.rule for each in other.findings if each.rule == "ranks-differ"] == []


HSDP = """
import sys
from pathlib import Path
from tests.callbacks.test_model_parallel import Replicated, fit

for fault in (False, True):
    fit(Path(sys.argv[1], str(fault)), 4, model=Replicated(fault), steps=6)
"""


def test_copies_of_shards_are_compared(tmp_path: Path) -> None:
    """With FSDP2 and a dimension of copies, a changed copy of a shard is named with its ranks; equal ones are not."""
    (tmp_path / "train.py").write_text(HSDP)
    codes, log = forks.run(tmp_path / "train.py", tmp_path, folder=tmp_path, ranks=4, timeout_s=240)
    assert set(codes) == {0}, log[-3000:]
    healthy, faulty = (open_recording(tmp_path / str(fault)).findings for fault in (False, True))
    assert [each.rule for each in healthy if each.rule == "ranks-differ"] == []
    found = next(each for each in faulty if each.rule == "ranks-differ")
    assert (found.severity, found.module) == ("critical", "up")
    assert found.verdict.startswith("up.weight differs between the 4 ranks after step 5, and all were equal ")
    assert "; rank 1 differs from rank 3, which has the same shard" in found.verdict
