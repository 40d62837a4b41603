"""Training with the watch is bitwise equal to training without it, also where it runs a step again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_recorder import StepWatch, open_recording
from tests import forks
from tests.callbacks.models import Classifier
from tests.callbacks.test_noninterference import (
    Checkpointed,
    Gan,
    Gpt2,
    LanguageModel,
    Mlp,
    Reentrant,
    TwoOptimizers,
    TwoTower,
    UNet,
    assert_same,
    run,
)
from tests.watch.late import arrive_late

AT = (2, 4)
"""The batches whose loss is not finite in the first epoch; two of them, since only the first of a row is replayed."""


def spoiled(kind: type[Classifier]) -> type[Classifier]:
    """Return a model whose gradients are bad at some batches, and which replaces them by zeros before its step."""

    class Spoiled(kind):  # type: ignore[valid-type,misc]  # a base that is chosen at run time
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            self.is_due = batch_idx in AT and self.current_epoch == 0
            loss = super().training_step(batch, batch_idx)
            return self.spoil(loss) if isinstance(loss, Tensor) else loss

        def spoil(self, loss: Tensor) -> Tensor:
            # The gradient is not finite, the loss is.
            return loss + (loss.detach() * 0 * loss).sqrt() if self.is_due else loss

        def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            super().manual_backward(self.spoil(loss), *args, **kwargs)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for group in optimizer.param_groups:
                for each in group["params"]:
                    if each.grad is not None:
                        each.grad.nan_to_num_(0.0, 0.0, 0.0)

    Spoiled.__name__ = kind.__name__
    return Spoiled


CASES: list[tuple[type[Classifier], dict[str, Any]]] = [
    (Classifier, {}),
    (Classifier, {"accumulate_grad_batches": 3}),
    (Classifier, {"precision": "bf16-mixed"}),
    (Classifier, {"precision": "scaled"}),
    (Classifier, {"val_check_interval": 2, "gradient_clip_val": 0.1}),
    (Mlp, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
    (Checkpointed, {}),
    (Reentrant, {}),
    (TwoOptimizers, {}),
    (TwoOptimizers, {"precision": "scaled"}),
    (Gpt2, {}),
    (Gan, {}),
    (TwoTower, {}),
    (UNet, {}),
    (LanguageModel, {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
]


@pytest.mark.parametrize(
    ("kind", "options"),
    CASES,
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(map(str, value.values())) or "plain",
)
@pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary:UserWarning")
def test_a_replay_changes_nothing(kind: type[Classifier], options: dict[str, Any], tmp_path: Path) -> None:
    """From losses to random states, the result of a run in which steps were replayed is that of a bare run."""
    make = spoiled(kind)
    bare = run(make, tmp_path / "bare", [], options)
    watch = StepWatch(strict=True)
    watched = run(make, tmp_path / "watched", [watch], options)
    assert_same(watched, bare)
    if options.get("precision") == "scaled":  # the scaler skips these steps
        assert watch.found == []
    else:
        assert [each.rule for each in watch.found] == ["non-finite"]
        assert "in the backward pass of" in watch.found[0].verdict
        assert "backward of sqrt" in watch.found[0].verdict


@pytest.mark.parametrize("options", [{}, {"wait": True}, {"keep_parameters": True}])
@pytest.mark.parametrize("late", [1, 3])
def test_options_for_devices_change_nothing(
    options: dict[str, bool], late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training is the same if values arrive later, with the parameters that were kept."""
    arrive_late(monkeypatch, late)
    make = spoiled(Classifier)
    bare = run(make, tmp_path / "bare", [], {})
    watch = StepWatch(strict=True, **options)  # type: ignore[arg-type]  # both are booleans
    assert_same(run(make, tmp_path / "watched", [watch], {}), bare)
    assert "backward of sqrt" in watch.found[0].verdict


SCRIPT = """
import sys
from pathlib import Path
import torch
from lightning_recorder import ActivationRecorder, StepWatch
from tests.callbacks.test_noninterference import Classifier, run
from tests.callbacks.test_noninterference_watch import spoiled

Spoiled = spoiled(Classifier)

class OnOneRank(Spoiled):
    def spoil(self, loss):
        return super().spoil(loss) if self.global_rank == 1 else loss

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for how in ("bare", "watched"):
        callbacks = [] if how == "bare" else [ActivationRecorder(every_n_train_steps=2, strict=True)]
        left = run(OnOneRank, folder / how, callbacks, {"strategy": "ddp", "devices": 2})
        torch.save(left, folder / f"{how}-{torch.distributed.get_rank()}.pt")
    watch = StepWatch(strict=True, on_finding="stop")
    left = run(OnOneRank, folder / "stopped", [watch], {"strategy": "ddp", "devices": 2})
    torch.save(left, folder / f"stopped-{torch.distributed.get_rank()}.pt")
"""


@pytest.mark.slow
def test_the_rank_is_named_and_nothing_changes_under_ddp(tmp_path: Path) -> None:
    """Rank 0 reports the finding of rank 1, and each rank ends bitwise as without the watch, or both stop."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    codes, log = forks.run(script, tmp_path, folder=tmp_path, ranks=2)
    assert codes == [0, 0], log[-3000:]
    assert "RecorderWarning" not in log
    left = {
        (how, rank): torch.load(tmp_path / f"{how}-{rank}.pt", weights_only=False)
        for how in ("bare", "watched", "stopped")
        for rank in range(2)
    }
    for rank in range(2):
        assert_same(left["watched", rank], left["bare", rank])
    assert [left["stopped", rank]["steps"] for rank in range(2)] == [3, 3]
    assert_same(left["stopped", 0]["model"], left["stopped", 1]["model"])
    (path,) = (tmp_path / "watched").rglob("recorder")
    findings = open_recording(path.parent).findings
    assert [each.rule for each in findings if each.severity == "critical"] == ["non-finite"]
    assert "at step 2 (batch 2 of epoch 0, the last of each epoch, rank 1): backward of sqrt" in findings[0].verdict
    assert [each.name for each in (path / "incidents").iterdir()] == ["step-2-rank1"]
    # The last lines of the terminal are those of rank 0.
    assert f"  {findings[0].line}" in log
