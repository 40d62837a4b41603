"""Tests of the callback for the Trainer of transformers, on tiny models."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from lightning_recorder import ActivationRecorder, ArgumentError, GradientRecorder, ParameterRecorder, open_recording
from lightning_recorder.huggingface import RecorderCallback
from tests.loops.test_monitor import lines, same_bits, watched


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens."""

    def __init__(self, rows: int = 24) -> None:
        self.rows = torch.randint(0, 40, (rows, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def gpt2() -> nn.Module:
    """Return a tiny language model."""
    set_seed(1)
    made: nn.Module = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=16))
    return made


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Ignore warnings of transformers and accelerate, which tests of others turn into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def train(
    folder: Path, callbacks: list[Any], *, resume: str | None = None, model: nn.Module | None = None, **options: Any
) -> nn.Module:
    """Train a tiny model in a Trainer of transformers."""
    model = gpt2() if model is None else model
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**{**arguments, **options}),
        train_dataset=Tokens(),
        eval_dataset=Tokens(8),
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resume)
    return model


def test_training_is_the_same_and_everything_is_recorded(tmp_path: Path) -> None:
    """One line gives records, loss, findings and graph, and the bits of the model stay."""
    plain = train(tmp_path / "plain", [], gradient_accumulation_steps=2, eval_strategy="epoch")
    callback = RecorderCallback(every_n_train_steps=1)
    recorded = train(tmp_path / "run", [callback], gradient_accumulation_steps=2, eval_strategy="epoch")
    assert same_bits(plain, recorded)
    steps = [each["step"] for each in lines(tmp_path / "run", "activations")[1:] if each["stage"] == "train"]
    assert steps == list(range(6))
    assert len(watched(tmp_path / "run", "loss")) == 6
    assert all(2 < loss < 5 for loss in watched(tmp_path / "run", "loss").values())
    folder = tmp_path / "run" / "recorder"
    assert {"graph.json", "findings.json", "receipt.json"} <= {each.name for each in folder.iterdir()}
    assert [each["samples"] for each in json.loads((folder / "data.json").read_text())["epochs"]] == [24, 24]
    names = {node["name"] for node in json.loads((folder / "graph.json").read_text())["nodes"]}
    assert "transformer.h.1.mlp.c_fc" in names
    assert "batch.input_ids" in names or any("input_ids" in name for name in names)


def test_the_loss_is_that_of_the_trainer(tmp_path: Path) -> None:
    """The watched loss is the one that the trainer logs."""
    logged: dict[int, float] = {}

    class Logs(RecorderCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                logged[state.global_step - 1] = logs["loss"]

    train(tmp_path, [Logs(every_n_train_steps=100)], gradient_accumulation_steps=2)
    assert watched(tmp_path, "loss") == pytest.approx(logged, abs=1e-3)


def test_gradients_are_those_of_the_undivided_loss(tmp_path: Path) -> None:
    """Accumulation over batches does not change the gradients of module outputs in the first step."""
    found = []
    for count in 1, 2:
        recorder = GradientRecorder(every_n_train_steps=1)
        train(
            tmp_path / str(count),
            [RecorderCallback(recorders=[recorder])],
            gradient_accumulation_steps=count,
            max_steps=1,
        )
        found.append(recorder.latest)
    assert found[0].keys() == found[1].keys()


def test_an_evaluation_is_recorded(tmp_path: Path) -> None:
    """Batches of an evaluation are records of validation."""
    from lightning_recorder import Schedule

    recorder = ActivationRecorder(every_n_train_steps=1, schedule=Schedule(stages=("train", "validate")))
    train(tmp_path, [RecorderCallback(recorders=[recorder])], eval_strategy="steps", eval_steps=3, max_steps=6)
    found = [(each["step"], each["stage"]) for each in lines(tmp_path, "activations")[1:]]
    assert [step for step, stage in found if stage == "validate"] == [2, 5]
    assert [step for step, stage in found if stage == "train"] == list(range(6))


def test_a_resumed_training_goes_on(tmp_path: Path) -> None:
    """The state of the recorders is in the checkpoint, and a training in two parts has the records of a whole one."""

    def recorders() -> list[Any]:
        return [ActivationRecorder(every_n_train_steps=1, reduce=4), ParameterRecorder(every_n_train_steps=1)]

    train(tmp_path / "whole", [RecorderCallback(recorders=recorders())], max_steps=8)
    parts = tmp_path / "parts"
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 6}
    train(parts, [RecorderCallback(recorders=recorders())], max_steps=8, **saves)
    assert (parts / "checkpoint-6" / "recorder.pt").is_file()
    for each in (parts / "recorder" / "records").iterdir():
        each.unlink()
    train(parts, [RecorderCallback(recorders=recorders())], resume=str(parts / "checkpoint-6"), max_steps=8, **saves)
    found, expected = lines(parts, "activations")[-1], lines(tmp_path / "whole", "activations")[-1]
    assert {key: found[key] for key in ("step", "steps", "packed")} == {
        key: expected[key] for key in ("step", "steps", "packed")
    }
    assert lines(parts, "parameters")[-1]["packed"] == lines(tmp_path / "whole", "parameters")[-1]["packed"]


def test_adapters_are_recorded(tmp_path: Path) -> None:
    """A model of PEFT has records of its adapters, and no update of a frozen parameter."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True)
    recorder = ParameterRecorder(every_n_train_steps=1)
    plain = train(tmp_path / "plain", [], model=peft.get_peft_model(gpt2(), config), max_steps=2)
    callbacks = [RecorderCallback(recorders=[recorder])]
    recorded = train(tmp_path / "run", callbacks, model=peft.get_peft_model(gpt2(), config), max_steps=2)
    assert same_bits(plain, recorded)
    names = {site.name for site in recorder.latest if site.path == "weight.update"}
    assert names
    assert all("lora_" in name for name in names)


def test_event_files_are_beside_those_of_the_trainer(tmp_path: Path) -> None:
    """With TensorBoard in `report_to`, the recorder writes to the folder of its run."""
    train(tmp_path, [RecorderCallback()], report_to=["tensorboard"], max_steps=2)
    own = list(tmp_path.rglob("recorder/events.out.tfevents.*"))
    assert len(own) == 1
    assert list(own[0].parents[1].glob("events.out.tfevents.*"))
    assert open_recording(own[0].parents[1]).runs


def test_an_exception_of_the_training_passes(tmp_path: Path) -> None:
    """The exception is raised as it is, no hook stays, and a new training is recorded."""

    class Fails(Tokens):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            raise OSError("no such row")

    callback = RecorderCallback()
    model = gpt2()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True),
        train_dataset=Fails(),
        callbacks=[callback],
    )
    with pytest.raises(OSError, match="no such row"):
        trainer.train()
    train(tmp_path / "next", [callback], max_steps=1)
    assert len(lines(tmp_path / "next", "activations")) == 2


def test_wrong_arguments_raise_at_construction() -> None:
    """The message is that of the recorders."""
    with pytest.raises(ArgumentError, match="every_n_steps"):
        RecorderCallback(every_n_steps=3)
    with pytest.raises(ArgumentError, match="names"):
        RecorderCallback(recorders=[ActivationRecorder()], names="a")
