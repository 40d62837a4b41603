"""Dumps are written beside every checkpoint and removed with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from typing_extensions import override

from lightning_recorder import (
    ActivationRecorder,
    MemorySink,
    Outputs,
    RecorderWarning,
    Schedule,
    read_dump,
    read_manifest,
)
from lightning_recorder.callbacks import TensorDumper
from tests import forks
from tests.callbacks.models import Classifier, digits, fit


def tensors(**options: Any) -> TensorDumper:
    return TensorDumper("head", **{"every_n_train_steps": 1, "at": "checkpoints", "strict": True, **options})


def statistics(**options: Any) -> ActivationRecorder:
    return ActivationRecorder("head", **{"every_n_train_steps": 1, "strict": True, **options})


Make = Callable[..., Callback]
BOTH: list[tuple[Make, str]] = [(tensors, "tensors"), (statistics, "activations")]
both = pytest.mark.parametrize(("make", "label"), BOTH, ids=["tensors", "statistics"])


class Stepping(Classifier):
    """Logs one metric that falls and one that rises."""

    @override
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        self.log("falling", -float(self.global_step))
        self.log("rising", float(self.global_step))
        return super().training_step(batch, batch_idx)


def train(folder: Path, callbacks: list[Callback], **options: Any) -> Trainer:
    options = {"enable_checkpointing": True, "logger": False, "log_every_n_steps": 1, **options}
    return fit(options.pop("model", None) or Stepping(), folder, callbacks, **options)


def checkpoints_of(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.ckpt")}


def dumped(folder: Path, label: str) -> dict[str, int]:
    """Return the step of each dump by its checkpoint, and check that manifest and file agree."""
    if not folder.exists():  # nothing was saved
        return {}
    lines = [line for line in read_manifest(folder) if line["file"].endswith(f".{label}.safetensors")]
    assert {line["file"] for line in lines} == {path.name for path in folder.glob(f"*.{label}.safetensors")}
    for line in lines:
        about = read_dump(folder / line["file"]).about
        assert (about["step"], about["checkpoint"]) == (str(line["step"]), line["checkpoint"])
    return {line["checkpoint"]: line["step"] for line in lines}


def step_of(folder: Path, checkpoint: str) -> int:
    """Return the step after which a checkpoint was saved."""
    return int(torch.load(folder / checkpoint, weights_only=False)["global_step"]) - 1


def check(folder: Path, label: str, names: set[str]) -> None:
    """Check that these checkpoints exist and that each has the dump of its step."""
    assert checkpoints_of(folder) == names
    assert dumped(folder, label) == {name: step_of(folder, name) for name in names}


@both
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"save_top_k": -1, "every_n_train_steps": 2}, {f"epoch=0-step={step}.ckpt" for step in (2, 4, 6)}),
        ({"save_top_k": 1, "every_n_train_steps": 2}, {"epoch=0-step=6.ckpt"}),
        ({"save_top_k": 0}, set()),
        (
            {"save_top_k": 2, "monitor": "rising", "every_n_train_steps": 1},
            {f"epoch=0-step={step}.ckpt" for step in (1, 2)},
        ),
        (
            {"save_top_k": 2, "monitor": "falling", "every_n_train_steps": 1},
            {f"epoch=0-step={step}.ckpt" for step in (5, 6)},
        ),
        ({"save_last": True}, {"last.ckpt", "epoch=0-step=6.ckpt"}),
        ({"save_last": True, "save_top_k": 0}, {"last.ckpt"}),
        ({"save_last": "link", "every_n_train_steps": 4}, {"last.ckpt", "epoch=0-step=4.ckpt"}),
        ({"save_last": "link", "every_n_train_steps": 3}, {"last.ckpt", "epoch=0-step=6.ckpt"}),
        ({"save_last": "link", "every_n_train_steps": 1}, {"last.ckpt", "epoch=0-step=6.ckpt"}),
        ({"filename": "a.b{step}", "save_weights_only": True}, {"a.bstep=6.ckpt"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_each_checkpoint_has_its_dump(
    make: Make, label: str, options: dict[str, Any], names: set[str], tmp_path: Path
) -> None:
    """Each checkpoint that ``ModelCheckpoint`` keeps has a dump of its step beside it, and there are no other dumps."""
    kept = tmp_path / "kept"
    train(tmp_path, [make(), ModelCheckpoint(kept, **options)])
    check(kept, label, names)


@pytest.mark.parametrize("at", ["steps", "epochs"])
@pytest.mark.parametrize("saved", [{"save_last": "link"}, {"save_top_k": -1, "every_n_train_steps": 2}], ids=str)
def test_dumps_beside_checkpoints_are_written_only_if_requested(at: str, saved: dict[str, Any], tmp_path: Path) -> None:
    """A dumper that writes at steps or at epochs writes nothing beside the checkpoints of its run."""
    kept = tmp_path / "kept"
    train(tmp_path, [tensors(at=at), ModelCheckpoint(kept, **saved)], max_epochs=2)
    assert {path.suffix for path in kept.iterdir()} == {".ckpt"}


@both
def test_several_monitors(make: Make, label: str, tmp_path: Path) -> None:
    """Each of several checkpoint callbacks prunes its own dumps, in its own folder or in a shared one."""
    saved: dict[str, Any] = {"save_top_k": 1, "every_n_train_steps": 1}
    train(
        tmp_path,
        [
            ModelCheckpoint(tmp_path / "one", monitor="rising", filename="low-{step}", **saved),
            make(),
            ModelCheckpoint(tmp_path / "one", monitor="falling", filename="new-{step}", **saved),
            ModelCheckpoint(tmp_path / "two", monitor="rising", mode="max", filename="new-{step}", **saved),
        ],
    )
    check(tmp_path / "one", label, {"low-step=1.ckpt", "new-step=6.ckpt"})
    check(tmp_path / "two", label, {"new-step=6.ckpt"})


@both
def test_asynchronous_checkpoints(make: Make, label: str, tmp_path: Path) -> None:
    """If checkpoints are written in the background, each dump still has the step of its checkpoint."""
    kept = ModelCheckpoint(tmp_path / "kept", save_top_k=2, monitor="falling", every_n_train_steps=1, save_last=True)
    trainer = train(tmp_path, [make(), kept], plugins=[AsyncCheckpointIO()])
    check(tmp_path / "kept", label, {"epoch=0-step=5.ckpt", "epoch=0-step=6.ckpt", "last.ckpt"})
    assert type(trainer.strategy.checkpoint_io) is AsyncCheckpointIO


@both
@pytest.mark.parametrize(("cadence", "step"), [(1, 2), (2, 1), (5, 0)])
def test_the_latest_sampled_step_is_in_it(make: Make, label: str, cadence: int, step: int, tmp_path: Path) -> None:
    """A checkpoint saved manually between two sampled steps has a dump of the earlier one."""

    class Saver(Callback):
        @override
        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "kept" / "mine.ckpt")

    train(tmp_path, [make(every_n_train_steps=cadence), Saver()], enable_checkpointing=False)
    assert dumped(tmp_path / "kept", label) == {"mine.ckpt": step}


@both
def test_before_anything_is_sampled_there_is_no_dump(make: Make, label: str, tmp_path: Path) -> None:
    """A checkpoint before the first sampled step has no dump, also in a second run of the callback."""
    callback = make(every_n_train_steps=None, schedule=Schedule(step_window=(4, 6)))
    for run in ("first", "second"):
        kept = tmp_path / run
        train(tmp_path, [callback, ModelCheckpoint(kept, save_top_k=-1, every_n_train_steps=2)])
        assert len(checkpoints_of(kept)) == 3
        assert dumped(kept, label) == {"epoch=0-step=6.ckpt": 5}


# Lightning regards its own checkpoint of an exception as one to resume from.
@pytest.mark.filterwarnings("ignore:.*fit.ckpt_path=:UserWarning")
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@both
def test_a_checkpoint_of_an_exception(make: Make, label: str, error: type[BaseException], tmp_path: Path) -> None:
    """A checkpoint saved because a run ends early has a dump of the last sampled step."""

    class Brittle(Stepping):
        @override
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
            if batch_idx == 3:
                raise error("the model's own")
            return super().training_step(batch, batch_idx)

    saved = ModelCheckpoint(tmp_path / "two", save_on_exception=True, save_top_k=-1)
    callbacks = [OnExceptionCheckpoint(tmp_path / "one", "failed"), saved, make()]
    with pytest.raises((error, SystemExit)):
        train(tmp_path, callbacks, model=Brittle())
    assert dumped(tmp_path / "one", label) == {"failed.ckpt": 2}
    assert set(dumped(tmp_path / "two", label)) == checkpoints_of(tmp_path / "two")
    assert set(dumped(tmp_path / "two", label).values()) <= {2}


@both
def test_a_resumed_run_prunes_what_the_first_one_left(make: Make, label: str, tmp_path: Path) -> None:
    """If a later run removes checkpoints of an earlier run, their dumps are removed as well."""
    kept = tmp_path / "kept"

    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(kept, save_top_k=2, monitor="falling", every_n_train_steps=3)

    train(tmp_path, [make(), saver()])
    first = checkpoints_of(kept)
    assert first == {"epoch=0-step=3.ckpt", "epoch=0-step=6.ckpt"}
    trainer = Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        callbacks=[make(), saver()],
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(Stepping(), digits(), ckpt_path=str(kept / "epoch=0-step=6.ckpt"), weights_only=False)
    check(
        kept, label, {"epoch=1-step=9.ckpt", "epoch=1-step=12.ckpt"} | ({"epoch=0-step=6.ckpt"} & checkpoints_of(kept))
    )
    assert "epoch=0-step=3.ckpt" not in checkpoints_of(kept)


@both
def test_strict_raises_what_a_dump_beside_a_checkpoint_raises(make: Make, label: str, tmp_path: Path) -> None:
    """With ``strict``, a failed dump ends the run with its error, even if another checkpoint follows."""
    kept = tmp_path / "kept"
    (kept / f"a.{label}.safetensors" / "in the way").mkdir(parents=True)
    callback = make()

    class Saver(Callback):
        @override
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            for name in "ab":
                trainer.save_checkpoint(kept / f"{name}.ckpt")
                wait_for(callback)

    with pytest.raises(OSError, match=rf"a\.{label}\.safetensors"):
        train(tmp_path, [callback, Saver()], enable_checkpointing=False)


def wait_for(callback: Any) -> None:
    """Wait until all queued writes have finished, without raising."""
    queue = callback._pipeline._queue if isinstance(callback, ActivationRecorder) else callback._dumps._queue
    queue.wait()


@both
def test_a_dump_that_fails_leaves_the_removals(make: Make, label: str, tmp_path: Path) -> None:
    """After a dump has failed, dumps of pruned checkpoints are still removed."""
    kept = tmp_path / "kept"
    (kept / f"epoch=0-step=4.{label}.safetensors" / "in the way").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecorderWarning)
        train(tmp_path, [make(strict=False), ModelCheckpoint(kept, save_top_k=1, every_n_train_steps=2)])
    assert checkpoints_of(kept) == {"epoch=0-step=6.ckpt"}
    assert not (kept / f"epoch=0-step=2.{label}.safetensors").exists()


class OneThread(MemorySink):
    """A sink that must be written from the training thread only, and that reads the files that it receives."""

    any_thread = False

    @override
    def write_files(self, step: int, files: Any) -> bool:
        for path in files.values():
            path.read_bytes()
        return super().write_files(step, files)


@both
def test_a_checkpoint_that_lives_shortly_costs_no_upload(make: Make, label: str, tmp_path: Path) -> None:
    """A dump that is pruned before the training thread uploads it is skipped, and later dumps are uploaded."""
    sink = OneThread()
    callback = make(sinks=[sink], strict=False, outputs=Outputs(upload=True))

    class Saver(Callback):
        @override
        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            path = tmp_path / "kept" / f"{batch_idx}.ckpt"
            trainer.save_checkpoint(path)
            if batch_idx == 1:
                trainer.strategy.remove_checkpoint(path)
            wait_for(callback)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        train(tmp_path, [callback, Saver()], enable_checkpointing=False)
    assert set(sink.files) - {f"dumps/1.{label}.safetensors"} == {
        f"dumps/{index}.{label}.safetensors" for index in (0, 2, 3, 4, 5)
    }


@both
def test_the_last_link_has_the_last_record(make: Make, label: str, tmp_path: Path) -> None:
    """The dump beside a link that is created at the end has the latest step, even if records are written slowly."""

    class SlowSink(MemorySink):
        @override
        def write_scalars(self, step: int, scalars: Any) -> bool:
            if step == 5:
                import time

                time.sleep(0.5)
            return super().write_scalars(step, scalars)

    kept = tmp_path / "kept"
    saver = ModelCheckpoint(kept, save_last="link", save_on_train_epoch_end=True)
    train(tmp_path, [make(sinks=[SlowSink()]), saver])
    assert dumped(kept, label) == {"last.ckpt": 5, "epoch=0-step=6.ckpt": 5}


SHARDED = """
import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from lightning_recorder.callbacks import TensorDumper
from tests.callbacks.models import Classifier, digits, fit


class Sharded(Classifier):
    def configure_model(self):
        for layer in (self.encoder, self.head):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    kept = ModelCheckpoint(folder / "kept", save_top_k=2, monitor="step", mode="max", every_n_train_steps=1)
    dumper = TensorDumper("head", every_n_train_steps=1, at="checkpoints", per_rank=True, strict=True)

    class Step(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            trainer.callback_metrics["step"] = torch.tensor(float(trainer.global_step))

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=True)
    fit(
        Sharded(), folder, [dumper, Step(), kept], strategy=strategy, devices=2, logger=False,
        enable_checkpointing=True, loader=digits(8),
    )
"""


@pytest.mark.slow
def test_sharded_checkpoints(tmp_path: Path) -> None:
    """A checkpoint that two processes write to one folder has a dump of each process, which is pruned with it."""
    (tmp_path / "train.py").write_text(SHARDED)
    codes, log = forks.run(tmp_path / "train.py", tmp_path, folder=tmp_path, ranks=2)
    assert codes == [0, 0], log[-3000:]
    assert "RecorderWarning" not in log
    kept = tmp_path / "kept"
    names = {path.name for path in kept.glob("*.ckpt")}
    assert all((kept / name).is_dir() for name in names)
    assert names == {"epoch=0-step=3.ckpt", "epoch=0-step=4.ckpt"}
    assert [dumped(kept, label) for label in ("tensors", "tensors-rank1")] == [
        {"epoch=0-step=3.ckpt": 2, "epoch=0-step=4.ckpt": 3}
    ] * 2
