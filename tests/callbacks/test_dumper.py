"""The tensors that ``TensorDumper`` writes during training, and its cleanup."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml  # type: ignore[import-untyped]  # its stubs are another package
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_recorder import (
    ArgumentError,
    MemorySink,
    Outputs,
    RecorderWarning,
    Schedule,
    SelectionError,
    read_dump,
    read_manifest,
)
from lightning_recorder.callbacks import TensorDumper
from lightning_recorder.schedule import Sampling
from lightning_recorder.statistics import SiteStatistics
from lightning_recorder.tensors.capture import Captured
from tests import forks
from tests.callbacks import test_noninterference as noninterference
from tests.callbacks.models import LEAVES, Classifier, digits, fit, hooks_left
from tests.disks import files_up_to

KINDS: Any = ("inputs", "outputs", "input_gradients", "output_gradients")


def dumper(*names: str, **options: Any) -> TensorDumper:
    """Return a dumper that writes each step and raises errors."""
    options = {"at": "steps", "every_n_train_steps": 1, "strict": True, **options}
    return TensorDumper(list(names) or None, **options)


def dumps_of(trainer: Trainer) -> Path:
    return Path(trainer.log_dir or trainer.default_root_dir) / "recorder" / "dumps"


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Collect the warnings of this package, and ignore all others."""
    logged: list[str] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield logged
    logged += [str(each.message) for each in warned if issubclass(each.category, RecorderWarning)]


def lines_of(trainer: Trainer) -> list[dict[str, Any]]:
    return read_manifest(dumps_of(trainer))


def tensors_of(trainer: Trainer, step: int, label: str = "tensors") -> dict[str, Tensor]:
    return read_dump(dumps_of(trainer) / f"{label}-step={step}.safetensors").tensors


# Content of files.


class Plain(Classifier):
    """Two layers without randomness that store their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(inplace=True))  # type: ignore[assignment]  # a different encoder
        self.dropout = nn.Identity()  # type: ignore[assignment]  # a different module
        self.head = nn.Linear(8, 10)
        self.before: list[dict[str, Tensor]] = []
        self.batches: list[tuple[Tensor, Tensor]] = []

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.before.append({name: value.detach().clone() for name, value in self.state_dict().items()})
        self.batches.append((batch[0].clone(), batch[1].clone()))
        return super().training_step(batch, batch_idx)


def recomputed(model: Plain, batch: int) -> dict[str, Tensor]:
    """Recompute the tensors of the first layer and the head for a batch, with functions only."""
    state, (x, y) = model.before[batch], model.batches[batch]
    flat = x.flatten(1)
    first = F.linear(flat, state["encoder.1.weight"], state["encoder.1.bias"]).requires_grad_()
    hidden = F.relu(first)
    hidden.retain_grad()
    logits = F.linear(hidden, state["head.weight"], state["head.bias"])
    logits.retain_grad()
    F.cross_entropy(logits, y).backward()
    expected = {
        "encoder.1/in[0]": flat,
        "encoder.1/out": first,
        "encoder.1/out.grad": first.grad,
        "head/in[0]": hidden,
        "head/in[0].grad": hidden.grad,
        "head/out": logits,
        "head/out.grad": logits.grad,
    }
    return {name: value.detach() for name, value in expected.items() if value is not None}


@pytest.mark.parametrize("accumulated", [1, 2, 4])
def test_the_values_are_those_of_the_step(accumulated: int, tmp_path: Path) -> None:
    """Each file has bitwise the inputs, outputs and gradients of the first batch of its step."""
    model = Plain()
    trainer = fit(
        model,
        tmp_path,
        [dumper("encoder.1", "head", tensors=KINDS)],
        accumulate_grad_batches=accumulated,
        loader=digits(8),
        max_epochs=2,
    )
    assert [(line["step"], line["epoch"]) for line in lines_of(trainer)] == [
        (step, step // (8 // accumulated)) for step in range(16 // accumulated)
    ]
    for step in range(16 // accumulated):
        expected, found = recomputed(model, step * accumulated), tensors_of(trainer, step)
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert torch.equal(found[name], value), (step, name)


def test_the_scale_of_a_scaler_is_removed(tmp_path: Path) -> None:
    """Gradients are those of the loss that ``training_step`` returned, whatever its scale."""
    found: list[dict[str, Tensor]] = []
    for scale in (1.0, 256.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        torch.manual_seed(1)
        options: dict[str, Any] = {"plugins": [plugin], "loader": digits(1)}
        trainer = fit(Plain(), tmp_path / str(scale), [dumper("head", tensors=KINDS)], **options)
        found.append(tensors_of(trainer, 0))
    one, other = (each["head/out.grad"].double() for each in found)
    assert torch.allclose(one, other, rtol=2**-9, atol=2**-20)
    assert torch.equal(found[0]["head/out"], found[1]["head/out"])


def test_leaves_are_dumped_by_default(tmp_path: Path) -> None:
    """Without names, the output of each leaf module is dumped, including that of in-place modules."""
    trainer = fit(Classifier(), tmp_path, [TensorDumper(at="steps", strict=True)], log_every_n_steps=4)
    assert [line["step"] for line in lines_of(trainer)] == [0, 3]
    assert set(tensors_of(trainer, 0)) == {f"{name}/out" for name in LEAVES}


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"every_n_train_steps": 4}, [0, 3, 7, 11]),
        ({"every_n_train_steps": 0, "schedule": Schedule(first_n_steps=2)}, [0, 1]),
        ({"every_n_train_steps": None, "schedule": Schedule(step_window=(4, 6))}, [4, 5]),
        ({"every_n_train_steps": 3, "schedule": Schedule(every_n_epochs=3)}, [0, 2, 5]),
        ({"at": "epochs", "every_n_train_steps": 4}, [3, 11]),
        ({"at": ("steps", "epochs"), "every_n_train_steps": 6}, [0, 5, 11]),
    ],
)
def test_the_schedule(options: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    """The sampled steps are dumped, or the latest one of each epoch."""
    trainer = fit(Classifier(), tmp_path, [dumper("head", **options)], max_epochs=2)
    assert [line["step"] for line in lines_of(trainer)] == steps


def test_samples_and_dtype(tmp_path: Path) -> None:
    """The first rows are dumped, rounded as torch rounds them."""
    model = Plain()
    trainer = fit(model, tmp_path, [dumper("head", samples=3, dtype="bfloat16")], loader=digits(1))
    expected = recomputed(model, 0)["head/out"][:3].bfloat16()
    assert torch.equal(tensors_of(trainer, 0)["head/out"], expected)


def test_tensors_without_room_give_one_warning(tmp_path: Path) -> None:
    """If each step exceeds ``max_bytes``, one warning is given, and the manifest lists the missing tensors."""
    with recorded_warnings() as warned:
        trainer = fit(Classifier(), tmp_path, [dumper("dropout", "head", outputs=Outputs(max_bytes=8 * 10 * 4))])
    (message,) = warned
    assert message == (
        "TensorDumper: 1 tensors of step 0 are left out, the first is 'dropout/out': use a larger max_bytes or fewer "
        "samples"
    )
    assert [(list(line["tensors"]), line["left_out"]) for line in lines_of(trainer)] == [
        (["head/out"], ["dropout/out"])
    ] * 6


def test_the_limit_of_the_total_gives_one_warning(tmp_path: Path) -> None:
    """From the step that exceeds the limit on, no file is written, one warning is given, and training continues."""
    model = Classifier()
    with recorded_warnings() as warned:
        trainer = fit(model, tmp_path, [dumper("head", outputs=Outputs(max_total_bytes=1200))])
    assert warned == ["TensorDumper writes no more dumps from step 2 on: the size would exceed max_total_bytes=1200"]
    assert [line["step"] for line in lines_of(trainer)] == [0, 1]
    assert len(model.losses) == 6


class Burst(Callback):
    """Makes the weights of the head large in one batch."""

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            cast("Any", pl_module).head.weight.mul_({3: 1e6, 4: 1e-6}.get(batch_idx, 1.0))


def large(seen: SiteStatistics) -> bool:
    """The condition that the tests use."""
    return seen.abs_max > 1e4


@pytest.mark.parametrize("when", [large, "tests.callbacks.test_dumper.large", "tests.callbacks.test_dumper:large"])
def test_an_event_is_dumped_by_itself(when: Any, tmp_path: Path) -> None:
    """With ``dump_when`` alone, a step is dumped only if one of its tensors matches, and the manifest names it."""
    callbacks = [
        Burst(),
        TensorDumper(
            ["head", "dropout"], every_n_train_steps=1, samples=1, strict=True, outputs=Outputs(dump_when=when)
        ),
    ]
    trainer = fit(Classifier(), tmp_path, callbacks)
    assert [(line["step"], line["reason"], line["event"]) for line in lines_of(trainer)] == [
        (3, "event", [["head", "out"]])
    ]
    assert tuple(tensors_of(trainer, 3)["head/out"].shape) == (1, 10)


def test_steps_that_a_function_chooses(tmp_path: Path) -> None:
    """A predicate alone chooses among all steps, each of which is dumped."""
    schedule = Schedule(when=lambda step: step in (1, 4))
    trainer = fit(Classifier(), tmp_path, [TensorDumper("head", schedule=schedule, strict=True)])
    assert [(line["step"], line["reason"]) for line in lines_of(trainer)] == [(1, "step"), (4, "step")]


def test_a_predicate_that_fails_is_one_warning(tmp_path: Path) -> None:
    """Training goes on without dumps."""
    model = Classifier()
    with recorded_warnings() as warned:
        fit(model, tmp_path, [TensorDumper("head", schedule=Schedule(when=lambda step: 1 // (step - 2)))])
    assert len(warned) == 1
    assert "ZeroDivisionError" in warned[0]
    assert len(model.losses) == 6


def test_two_calls_in_a_step(tmp_path: Path) -> None:
    """The file has both results of a module that is called twice."""

    class Twice(Classifier):
        @override
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + super().forward(2 * x)

    trainer = fit(Twice(), tmp_path, [dumper("head", tensors=("inputs", "outputs"))])
    assert set(tensors_of(trainer, 0)) == {"head/in[0]", "head/in[0]#2", "head/out", "head/out#2"}


def test_a_gradient_is_that_of_the_call_with_its_number(tmp_path: Path) -> None:
    """The gradient of each of three calls is dumped under the number of its output; that of a target has none."""

    class Target(Classifier):
        @override
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                super().forward(x)
            return super().forward(x) + 10 * super().forward(x)

    trainer = fit(Target(), tmp_path, [dumper("head", tensors=("outputs", "output_gradients"))])
    found = tensors_of(trainer, 0)
    assert set(found) == {"head/out", "head/out#2", "head/out#3", "head/out.grad#2", "head/out.grad#3"}
    assert torch.allclose(found["head/out.grad#3"], 10 * found["head/out.grad#2"])


def test_the_validation_is_in_no_file(tmp_path: Path) -> None:
    """Calls between the batches of a step and calls in the validation are not dumped."""

    class Busy(Callback):
        @override
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            pl_module(torch.ones(3, 1, 8, 8))

    options: dict[str, Any] = {"validation": digits(2), "val_check_interval": 1, "accumulate_grad_batches": 2}
    trainer = fit(Classifier(), tmp_path, [dumper("head"), Busy()], **options)
    for step in range(3):
        (tensor,) = tensors_of(trainer, step).values()
        assert tuple(tensor.shape) == (8, 10)


# Training is unchanged.


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Classifier, {}),
        (Classifier, {"accumulate_grad_batches": 3}),
        (Classifier, {"precision": "bf16-mixed"}),
        (Classifier, {"precision": "scaled", "accumulate_grad_batches": 3}),
        (Classifier, {"val_check_interval": 2}),
        (noninterference.Overflowing, {"precision": "scaled"}),
        (noninterference.Checkpointed, {"precision": "bf16-mixed", "accumulate_grad_batches": 3}),
        (noninterference.Reentrant, {}),
        (noninterference.TwoOptimizers, {"precision": "scaled"}),
        (noninterference.Gan, {}),
        (noninterference.UNet, {}),
        (noninterference.TwoTower, {}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(map(str, value.values())) or "plain",
)
@pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary:UserWarning")
def test_training_is_bitwise_the_same(make: type[Classifier], options: dict[str, Any], tmp_path: Path) -> None:
    """With every step and kind dumped, a run ends bitwise as without, from losses to random states."""
    bare = noninterference.run(make, tmp_path / "bare", [], dict(options))
    callbacks: list[Callback] = [
        dumper(tensors=KINDS, at=("steps", "epochs"), samples=2, outputs=Outputs(dump_when=large))
    ]
    left = noninterference.run(make, tmp_path / "dumped", callbacks, dict(options))
    noninterference.assert_same(left, bare)
    (manifest,) = (tmp_path / "dumped").rglob("recorder-manifest.jsonl")
    lines = read_manifest(manifest.parent)
    assert lines
    for line in lines:
        assert set(read_dump(manifest.parent / line["file"]).tensors) == set(line["tensors"])


def test_hooks_are_on_for_the_first_batch_of_a_sampled_step_alone(tmp_path: Path) -> None:
    """Only the first accumulated batch of a sampled step has hooks."""
    hooked: list[bool] = []

    class Coverage(Classifier):
        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            hooked.append(bool(hooks_left(self)))
            return super().training_step(batch, batch_idx)

    fit(Coverage(), tmp_path, [dumper(every_n_train_steps=2)], accumulate_grad_batches=2, loader=digits(8))
    assert hooked == [True, False, True, False, False, False, True, False]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("failing", [0, 2])
def test_an_end_that_was_not_planned_leaves_no_hook(error: type[BaseException], failing: int, tmp_path: Path) -> None:
    """An error or Ctrl-C in a dumped step propagates, leaves no hook, and earlier steps are on disk."""

    class Brittle(nn.Linear):
        @override
        def forward(self, x: Tensor) -> Tensor:
            if model.global_step == failing:
                raise error("the model's own")
            return super().forward(x)

    model: LightningModule = Classifier()
    model.head = Brittle(256, 10)
    callback = dumper(tensors=KINDS)
    with pytest.raises((error, SystemExit)):
        fit(model, tmp_path, [callback], logger=False)
    assert hooks_left(model) == []
    assert [line["step"] for line in read_manifest(tmp_path)] == list(range(failing))


@pytest.mark.parametrize("error", [None, KeyError])
def test_nothing_of_a_run_is_kept(error: type[Exception] | None, tmp_path: Path) -> None:
    """After a run, successful or not, the callback keeps neither its model nor a tensor alive."""

    class Kept(Classifier):
        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            if error is not None and batch_idx == 3:
                raise error
            return super().training_step(batch, batch_idx)

    def held() -> list[Captured]:
        gc.collect()
        return [each for each in gc.get_objects() if type(each) is Captured]

    before = held()
    callback = dumper(at=("steps", "epochs", "checkpoints"), tensors=KINDS)
    model = Kept()
    reference = weakref.ref(model)
    with suppress(KeyError):
        fit(model, tmp_path, [callback], logger=False)
    del model
    assert len(held()) == len(before)
    assert reference() is None


# Errors.


def test_a_full_disk_is_one_warning(tmp_path: Path) -> None:
    """On a full disk, training continues, no partial file remains, and there is one warning."""
    model = Classifier()
    with recorded_warnings() as warned, files_up_to(1000):
        trainer = fit(model, tmp_path, [dumper("encoder.conv1", strict=False)], logger=False)
    (message,) = warned
    assert message.startswith(f"lightning_recorder could not write to {tmp_path}")
    assert "File too large" in message
    assert len(model.losses) == 6
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert hooks_left(model) == []
    assert trainer.state.finished


@pytest.mark.parametrize("at", ["steps", "epochs", "checkpoints"])
def test_a_folder_that_cannot_be_written_is_one_warning(at: str, tmp_path: Path) -> None:
    """A file in place of the folder prevents the dumps and nothing else."""
    (tmp_path / "recorder").write_text("in the way")
    kept = tmp_path / "checkpoints"
    kept.mkdir()
    (kept / "epoch=0-step=6.tensors.safetensors" / "in the way").mkdir(parents=True)
    model = Classifier()
    with recorded_warnings() as warned:
        fit(model, tmp_path, [dumper("head", at=at, strict=False)], logger=False, enable_checkpointing=True)
    (message,) = warned
    assert message.startswith(f"lightning_recorder could not write to {tmp_path}")
    assert len(model.losses) == 6
    assert (kept / "epoch=0-step=6.ckpt").is_file()


@pytest.mark.parametrize("at", ["steps", "epochs", "checkpoints"])
def test_strict_raises_what_fails(at: str, tmp_path: Path) -> None:
    """With ``strict``, a failed dump ends the run with its error, whenever it is written."""
    (tmp_path / "recorder").write_text("in the way")
    (tmp_path / "checkpoints" / "epoch=0-step=6.tensors.safetensors" / "in the way").mkdir(parents=True)
    model = Classifier()
    with pytest.raises(OSError, match=r"recorder|tensors\.safetensors"):
        fit(model, tmp_path, [dumper("head", at=at)], logger=False, enable_checkpointing=True)
    assert hooks_left(model) == []


def test_a_fault_gives_the_trainer_its_checkpoint_io_back(tmp_path: Path) -> None:
    """After an internal error disables the callback, the trainer's own checkpoint IO is restored."""

    class Faulty(TensorDumper):
        @override
        def _before_evaluation(self, trainer: Trainer) -> None:
            raise RuntimeError("ours")

    callback = Faulty("head", every_n_train_steps=1)
    with pytest.warns(RecorderWarning, match="Faulty is off for the rest of the run"):
        trainer = fit(Classifier(), tmp_path, [callback], validation=digits(1), enable_checkpointing=True)
    assert type(trainer.strategy.checkpoint_io).__name__ == "TorchCheckpointIO"


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"tensors": "weights"},
        "tensors must be one or more of 'inputs', 'outputs', 'input_gradients', 'output_gradients'",
    ),
    ({"tensors": []}, "tensors must be one or more of .*got none"),
    ({"tensors": 3}, "tensors must be one or more of"),
    ({"at": "records"}, "at must be one or more of 'checkpoints', 'steps', 'epochs'; got 'records'"),
    ({"at": []}, "at must be one or more of"),
    ({"at": True}, "at must be one or more of"),
    ({"samples": 0}, "samples must be an integer of at least 1"),
    ({"samples": 1.5}, "samples must be an integer"),
    ({"dtype": "int8"}, "dtype must be a floating-point type"),
    ({"dtype": "half-ish"}, "dtype must be a floating-point type"),
    ({"dtype": "nn"}, "dtype must be a floating-point type"),
    ({"dtype": 16}, "dtype must be a floating-point type"),
    ({"dtype": torch.complex64}, "dtype must be a floating-point type"),
    ({"dtype": "float8_e4m3fnuz"}, "dtype must be"),
    ({"dtype": "float8_e8m0fnu"}, "dtype must be"),
    ({"dtype": "float4_e2m1fn_x2"}, "dtype must be"),
    ({"per_rank": "yes"}, "per_rank must be True or False"),
    ({"strict": 1}, "strict must be True or False"),
    ({"compiled": "always"}, "compiled must be 'eager' or 'skip'"),
    ({"name": "../a"}, "name must be a file name"),
    ({"sinks": MemorySink()}, "sinks takes a list of sinks"),
    ({"every_n_train_steps": -1}, "every_n_train_steps must be"),
]


@pytest.mark.parametrize(
    ("options", "message"), WRONG, ids=[f"{'-'.join(options)}-{message}" for options, message in WRONG]
)
def test_wrong_arguments_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    """The error names the argument and the allowed values."""
    with pytest.raises(ArgumentError, match=message):
        TensorDumper(**options)


def test_a_name_that_matches_nothing_ends_the_fit_before_its_first_step(tmp_path: Path) -> None:
    """The error lists the closest names, as for recorders."""
    model = Classifier()
    with pytest.raises(SelectionError, match=r"no module matches 'heat'.*'head'"):
        fit(model, tmp_path, [TensorDumper("heat")])
    assert model.losses == []
    assert hooks_left(model) == []


# Life cycle of the callback.


def test_two_without_a_name_have_a_file_each(tmp_path: Path) -> None:
    """A second dumper without a name writes files under its own name."""
    trainer = fit(Classifier(), tmp_path, [dumper("head"), dumper("dropout")])
    assert sorted(tuple(line["tensors"]) for line in lines_of(trainer) if line["step"] == 3) == [
        ("dropout/out",),
        ("head/out",),
    ]


def test_named_ones_have_files_of_their_own(tmp_path: Path) -> None:
    """File names contain the name of the dumper."""
    callbacks = [dumper("head", name="a"), dumper("dropout", name="b"), dumper("head")]
    trainer = fit(Classifier(), tmp_path, callbacks, loader=digits(1))
    assert {line["file"]: list(line["tensors"]) for line in lines_of(trainer)} == {
        "tensors-a-step=0.safetensors": ["head/out"],
        "tensors-b-step=0.safetensors": ["dropout/out"],
        "tensors-step=0.safetensors": ["head/out"],
    }


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
@pytest.mark.parametrize("after", [False, True])
def test_a_copy_dumps_as_the_original(duplicate: Callable[[Any], Any], after: bool, tmp_path: Path) -> None:
    """A copy or pickle made before or after a run dumps the same as the original."""
    original = dumper("head", at=("steps", "checkpoints"), outputs=Outputs(dump_when=large, upload=True))
    if after:
        fit(Classifier(), tmp_path / "first", [original])
    copied = duplicate(original)
    model = Classifier()
    trainer = fit(model, tmp_path / "second", [copied], enable_checkpointing=True)
    assert [line["step"] for line in lines_of(trainer)] == list(range(6))
    assert len(list(tmp_path.glob("second/**/checkpoints/*.safetensors"))) == 1
    assert hooks_left(model) == []


def test_a_copy_of_one_that_is_at_work_is_not_at_work(tmp_path: Path) -> None:
    """A copy made during a run has no run state, and the run continues."""
    callback = dumper("head", sinks=[MemorySink()], outputs=Outputs(upload=True))
    copies: list[TensorDumper] = []

    class Copier(Callback):
        @override
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            copies.append(pickle.loads(pickle.dumps(copy.deepcopy(callback))))

    trainer = fit(Classifier(), tmp_path, [callback, Copier()])
    assert [line["step"] for line in lines_of(trainer)] == list(range(6))
    assert [each._capture for each in copies] == [None] * 6


def test_a_second_fit_writes_anew(tmp_path: Path) -> None:
    """In a second run with another trainer, the callback writes its own files and its size limit starts anew."""
    callback = dumper("head", outputs=Outputs(max_total_bytes=6 * 600))
    for run in ("first", "second"):
        with warnings.catch_warnings():
            warnings.simplefilter("error", RecorderWarning)
            trainer = fit(Classifier(), tmp_path / run, [callback])
        assert [line["step"] for line in lines_of(trainer)] == list(range(6))


def test_a_resumed_run_replaces_files_of_the_same_step(tmp_path: Path) -> None:
    """If a step is trained again in the same folder, the newer file and manifest line replace the old."""
    options: dict[str, Any] = {"logger": False, "loader": digits(4)}
    first = fit(Classifier(), tmp_path, [dumper("head")], max_epochs=2, **options)
    kept = tmp_path / "epoch.ckpt"
    first.save_checkpoint(kept)
    before = tensors_of(first, 5)["head/out"]
    model = Classifier()
    trainer = fit(model, tmp_path, [dumper("head", tensors=("inputs", "outputs"))], max_epochs=2, **options)
    lines = lines_of(trainer)
    assert [line["step"] for line in lines] == list(range(8))
    assert [set(line["tensors"]) for line in lines] == [{"head/in[0]", "head/out"}] * 8
    assert set(tensors_of(trainer, 5)) == {"head/in[0]", "head/out"}
    assert tuple(before.shape) == (8, 10)


def test_fast_dev_run_leaves_nothing(tmp_path: Path) -> None:
    """There is no file and no warning, since the user has nothing to fix."""
    with recorded_warnings() as warned:
        fit(Classifier(), tmp_path, [dumper("head", at=("steps", "epochs", "checkpoints"))], fast_dev_run=True)
    assert warned == []
    assert list(tmp_path.rglob("*")) == []


def test_without_a_logger_the_dumps_lie_in_the_root(tmp_path: Path) -> None:
    """``logger=False`` changes only the folder of the dumps."""
    fit(Classifier(), tmp_path, [dumper("head")], logger=False)
    assert [line["step"] for line in read_manifest(tmp_path / "recorder" / "dumps")] == list(range(6))


def test_switched_off_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``LIGHTNING_RECORDER=off`` writes no file."""
    monkeypatch.setenv("LIGHTNING_RECORDER", "off")
    fit(Classifier(), tmp_path, [dumper("head")], logger=False)
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_disabled_it_samples_nothing(tmp_path: Path) -> None:
    """``disable`` takes effect at the next batch and lasts until ``enable``."""
    callback = dumper("head")

    class Switch(Callback):
        @override
        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            callback.disable() if batch_idx == 1 else callback.enable() if batch_idx == 3 else None

    trainer = fit(Classifier(), tmp_path, [callback, Switch()])
    assert [line["step"] for line in lines_of(trainer)] == [0, 1, 4, 5]


def test_the_other_lightning(tmp_path: Path) -> None:
    """Under ``pytorch_lightning``, the files are the same."""
    pl: Any = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")

    class Net(pl.LightningModule):  # type: ignore[misc]  # from an optional package
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 10)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return F.cross_entropy(self.head(batch[0].flatten(1)), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=1,
        callbacks=[dumper("head", at=("steps", "checkpoints"), tensors=KINDS)],
        **quiet,
    )
    trainer.fit(Net(), digits(3))
    assert [line["step"] for line in read_manifest(tmp_path / "recorder" / "dumps")] == [0, 1, 2]
    assert [line["step"] for line in read_manifest(tmp_path / "checkpoints")] == [2]


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every argument can be given in a configuration file of ``LightningCLI``."""
    pytest.importorskip("jsonargparse", reason="needs jsonargparse[signatures]")
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 uses what 4.53 deprecates
    arguments: dict[str, Any] = {
        "names": ["head", "encoder.*"],
        "types": "Linear",
        "exclude": "dropout",
        "tensors": ["inputs", "output_gradients"],
        "at": "steps",
        "every_n_train_steps": 5,
        "samples": 4,
        "dtype": "bfloat16",
        "per_rank": True,
        "compiled": "skip",
        "name": "mine",
        "sinks": [{"class_path": "lightning_recorder.MemorySink"}],
        "strict": True,
        "schedule": {"every_n_epochs": 2, "first_n_steps": 1, "step_window": [0, 9]},
        "outputs": {
            "dump_when": "tests.callbacks.test_dumper.large",
            "max_bytes": 10,
            "max_total_bytes": 20,
            "upload": True,
            "max_upload_bytes": 30,
        },
    }
    entry = {"class_path": "lightning_recorder.callbacks.TensorDumper", "init_args": arguments}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"callbacks": [entry]}}))
    args = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--config", str(path)]
    cli = LightningCLI(Classifier, run=False, save_config_callback=None, seed_everything_default=1, args=args)
    (made,) = (each for each in cast("Any", cli.trainer).callbacks if isinstance(each, TensorDumper))
    assert (made.tensors, made.at) == (("inputs", "output_gradients"), ("steps",))
    assert (made.samples, made.dtype, made.per_rank) == (4, torch.bfloat16, True)
    assert made.outputs == Outputs(dump_when=large, max_bytes=10, max_total_bytes=20, upload=True, max_upload_bytes=30)
    assert made.sampling == Sampling(5, every_n_epochs=2, first_n_steps=1, step_window=(0, 9))
    assert (made.name, made.compiled, made.strict) == ("mine", "skip", True)


# Uploads.


def test_uploads_reach_who_keeps_files(tmp_path: Path) -> None:
    """A sink that stores files receives each dump and the table of dumps."""
    sink = MemorySink()
    fit(
        Classifier(),
        tmp_path,
        [dumper("head", sinks=[sink], every_n_train_steps=3, outputs=Outputs(upload=True))],
        logger=False,
    )
    assert list(sink.files) == [f"dumps/tensors-step={step}.safetensors" for step in (0, 2, 5)]
    assert list(sink.texts["recorder/tensors/dumps"]) == [0, 2, 5]


def test_without_upload_nobody_is_given_anything(tmp_path: Path) -> None:
    """By default, dumps are not passed to sinks."""
    sink = MemorySink()
    fit(Classifier(), tmp_path, [dumper("head", sinks=[sink])], logger=False)
    assert (sink.files, sink.texts) == ({}, {})


@pytest.mark.parametrize("loggers", [[TensorBoardLogger], [TensorBoardLogger, CSVLogger]])
def test_tensorboard_has_a_table(loggers: Sequence[Callable[[Path], Any]], tmp_path: Path) -> None:
    """The event file of a real logger has a text with one row per dump, not marked as uploaded."""
    trainer = fit(
        Classifier(),
        tmp_path,
        [dumper("head", every_n_train_steps=3, outputs=Outputs(upload=True))],
        logger=[logger(tmp_path / str(index)) for index, logger in enumerate(loggers)],
    )
    accumulator = EventAccumulator(f"{trainer.loggers[0].log_dir}/recorder", size_guidance={"tensors": 0})
    accumulator.Reload()
    found = accumulator.Tensors("z_recorder/tensors/dumps/text_summary")
    assert [event.step for event in found] == [0, 2, 5]
    table = found[-1].tensor_proto.string_val[0].decode()
    sizes = {line["step"]: line["bytes"] for line in lines_of(trainer)}
    assert table.splitlines() == [
        "| step | file | why | tensors | bytes | uploaded |",
        "|---:|---|---|---:|---:|---|",
        *[f"| {step} | `tensors-step={step}.safetensors` | step | 1 | {sizes[step]:,} | - |" for step in (0, 2, 5)],
    ]


class OneThread(MemorySink):
    """A sink that must be written from the thread that created it."""

    any_thread = False

    def __init__(self) -> None:
        import threading

        super().__init__()
        self.home = threading.get_ident()
        self.elsewhere: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        return {}

    @override
    def write_files(self, step: int, files: Mapping[str, Path]) -> bool:
        self._see("files")
        for path in files.values():
            path.read_bytes()
        return super().write_files(step, files)

    @override
    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        self._see("text")
        return super().write_text(step, texts)

    def _see(self, what: str) -> None:
        import threading

        if threading.get_ident() != self.home:
            self.elsewhere.append(what)


def test_some_sinks_are_written_to_from_the_training_thread_alone(tmp_path: Path) -> None:
    """Sinks bound to the training thread still receive everything."""
    sink = OneThread()
    fit(Classifier(), tmp_path, [dumper("head", sinks=[sink], outputs=Outputs(upload=True))], logger=False)
    assert sink.elsewhere == []
    assert list(sink.files) == [f"dumps/tensors-step={step}.safetensors" for step in range(6)]
    assert list(sink.texts["recorder/tensors/dumps"]) == list(range(6))


# Two processes.

SCRIPT = """
import sys
from pathlib import Path
from lightning_recorder.callbacks import TensorDumper
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.callbacks.models import Classifier, digits, fit

if __name__ == "__main__":
    for per_rank in (False, True):
        folder = Path(sys.argv[1]) / str(per_rank)
        kept = ModelCheckpoint(folder / "kept", save_top_k=2, monitor="train_loss", mode="max", every_n_train_steps=1)
        dumper = TensorDumper(
            "head", at=("steps", "checkpoints"), every_n_train_steps=1, per_rank=per_rank, strict=True,
            tensors=("inputs", "outputs", "input_gradients", "output_gradients"),
        )
        fit(Classifier(), folder, [dumper, kept], strategy="ddp", devices=2, logger=False, enable_checkpointing=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("per_rank", [False, True])
def test_two_processes(per_rank: bool, pair: Path) -> None:
    """Rank 0 writes, or each rank writes its own tensors beside shared checkpoints; pruning removes both."""
    folder = pair / str(per_rank)
    ranks = [0, 1] if per_rank else [0]
    lines = read_manifest(folder / "recorder" / "dumps")
    assert [(line["rank"], line["step"]) for line in lines] == [(rank, step) for rank in ranks for step in range(3)]
    first = [read_dump(folder / "recorder" / "dumps" / line["file"]).tensors["head/in[0]"] for line in lines]
    assert not per_rank or not torch.equal(first[0], first[3])
    checkpoints = {path.stem for path in (folder / "kept").glob("*.ckpt")}
    assert len(checkpoints) == 2
    labels = ["tensors", "tensors-rank1"][: len(ranks)]
    assert {path.name for path in (folder / "kept").glob("*.safetensors")} == {
        f"{name}.{label}.safetensors" for name in checkpoints for label in labels
    }
    for line in read_manifest(folder / "kept"):
        assert line["checkpoint"] == f"epoch=0-step={line['step'] + 1}.ckpt"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the results of two processes."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "train.py").write_text(SCRIPT)
    codes, log = forks.run(folder / "train.py", folder, folder=folder, ranks=2)
    assert codes == [0, 0], log[-3000:]
    assert "RecorderWarning" not in log
    return folder
