"""Tests of ``precision`` on checkpoints and dumps."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_recorder import Outputs, ParameterRecorder
from lightning_recorder.callbacks import TensorDumper
from lightning_recorder.dumps import write_dump, write_tensors
from lightning_recorder.reductions.number_formats import NUMBER_FORMATS
from tests.callbacks.models import Classifier, fit
from tests.commands.console import run


def state() -> dict[str, Any]:
    """Return parameters whose second weight has an outlier, and a tensor of each kind that is not measured."""
    torch.manual_seed(0)
    last = nn.Linear(16, 8)
    model = nn.Sequential(nn.Linear(32, 16), last)
    with torch.no_grad():
        last.weight[3, 5] = 3e5
    extra = {"mask": torch.ones(2, 2, dtype=torch.bool), "broken": torch.full((2, 2), torch.nan)}
    return {**model.state_dict(), **extra}


def test_the_worst_tensor_is_named(tmp_path: Path) -> None:
    """A weight with an outlier is named with its channel; tensors that are not measured are counted."""
    torch.save({"state_dict": state(), "epoch": 3}, tmp_path / "last.ckpt")
    said = run("precision", tmp_path / "last.ckpt")
    assert said.status == 0
    first = "1 of 2 tensors lose more than 10 % of their size (below 20 dB in e4m3): keep these in bfloat16: 1.weight\n"
    assert said.out.startswith(first)
    assert "  1.weight: 1 channel: 3 (" in said.out
    unmeasured = "not measured: fewer than two dimensions: 2; not floating-point: 1; NaN or infinity: 1 (broken)\n"
    assert said.out.endswith(unmeasured)
    healthy = run("precision", tmp_path / "last.ckpt", "--format", "int8-channel").out
    assert healthy.startswith("0 of 2 tensors fall below 20 dB in int8-channel; the worst, ")


def test_json_of_each_kind_of_file(tmp_path: Path) -> None:
    """A checkpoint, its parameters alone and a safetensors file have the same errors."""
    tensors = state()
    torch.save({"state_dict": tensors}, tmp_path / "a.ckpt")
    torch.save(tensors, tmp_path / "b.pt")
    write_tensors(tmp_path / "c.safetensors", tensors, {"format": "pt"})
    a, b, c = (json.loads(run("precision", tmp_path / name, "--json", "--format", "nvfp4").out)
               for name in ("a.ckpt", "b.pt", "c.safetensors"))  # fmt: skip
    assert a == b
    assert a["tensors"] == c["tensors"]
    assert (a["format"], a["below"]) == ("nvfp4", 14.0)
    assert a["left_out"]["broken"] == "NaN or infinity"
    (outlier,) = a["tensors"][0]["channels"]
    assert outlier["place"] == [3]


def test_the_latest_dump_of_a_run(tmp_path: Path) -> None:
    """Activations and gradients are those of the latest dump of the run; the file alone gives the same."""
    kinds: Any = ("outputs", "output_gradients")
    dumper = TensorDumper("head", at="steps", every_n_train_steps=2, tensors=kinds, strict=True)
    trainer = fit(Classifier(), tmp_path, [dumper])
    log_dir = Path(trainer.log_dir or "")
    found = json.loads(run("precision", log_dir, "--json").out)
    assert sorted((each["name"], each["kind"]) for each in found["tensors"]) == [
        ("head/out", "activation"),
        ("head/out.grad", "gradient"),
    ]
    latest = sorted((log_dir / "recorder" / "dumps").glob("*.safetensors"))[-1]
    assert json.loads(run("precision", latest, "--json").out) == found


def test_a_run_without_tensors_names_its_newest_checkpoint(tmp_path: Path) -> None:
    """The path in the message can be given instead."""
    trainer = fit(Classifier(), tmp_path, [ParameterRecorder("head", outputs=Outputs(plots=False))])
    folder = Path(trainer.log_dir or "")
    for age, name in enumerate(("last.ckpt", "epoch=0.ckpt")):
        trainer.save_checkpoint(folder / "checkpoints" / name)
        os.utime(folder / "checkpoints" / name, (1000 - age, 1000 - age))
    named = run("precision", folder).err.rstrip(".\n").rpartition("such as ")[2]
    assert Path(named) == folder / "checkpoints" / "last.ckpt"
    assert run("precision", named).status == 0


def test_bad_files_give_one_line(tmp_path: Path) -> None:
    """Missing, empty, truncated and foreign files, and those without tensors, are errors of one line."""
    torch.save(state(), tmp_path / "whole.pt")
    (tmp_path / "truncated.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:900])
    write_tensors(tmp_path / "whole.safetensors", state(), {})
    (tmp_path / "truncated.safetensors").write_bytes((tmp_path / "whole.safetensors").read_bytes()[:-9])
    (tmp_path / "empty.ckpt").write_bytes(b"")
    (tmp_path / "text.pt").write_text("hello\n")
    torch.save(nn.Linear(2, 2), tmp_path / "object.pt")
    torch.save({"epoch": 1, "state_dict": {}}, tmp_path / "none.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"bias": torch.ones(3)}, tmp_path / "bias.pt")
    write_dump(tmp_path / "statistics.safetensors", {"a/mean": torch.ones(())}, {"a": 1}, group="activations")
    (tmp_path / "folder").mkdir()
    bad = ("missing.pt", "truncated.pt", "truncated.safetensors", "empty.ckpt", "text.pt", "object.pt", "none.pt")
    for name in (*bad, "list.pt", "bias.pt", "statistics.safetensors", "folder"):
        said = run("precision", tmp_path / name)
        assert (said.status, said.out, said.err.count("\n")) == (2, "", 1), name
        assert name in said.err


@pytest.mark.parametrize("key", ["model", "model_state_dict", "module"])
def test_parameters_one_level_down(key: str, tmp_path: Path) -> None:
    """Checkpoints of other training loops keep the parameters under another key."""
    torch.save({key: {"layer.weight": torch.ones(2, 2)}, "step": torch.ones(3, 3)}, tmp_path / "saved.pt")
    found = json.loads(run("precision", tmp_path / "saved.pt", "--json").out)
    assert [each["name"] for each in found["tensors"]] == ["layer.weight"]


def test_each_format_can_be_chosen() -> None:
    """The command line, which does not import torch, lists the formats that are measured."""
    said = run("precision", "last.ckpt", "--format", "fp3")
    assert said.status == 2
    assert re.findall(r"[\w-]+", said.err.partition("choose from")[2].partition(")")[0]) == list(NUMBER_FORMATS)
