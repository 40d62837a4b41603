"""The JSON Schemas of the package describe every file that a run writes, and the output of every ``--json``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it has no types
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_recorder import Check, Monitor, StepWatch, TensorDumper, default_recorders
from lightning_recorder.recordings import RecordWriter, records_path
from tests.commands.console import run
from tests.recordings.runs import record_run, site_of
from tests.watch.nets import Planted, batches, plant

SCHEMAS = Path(str(resources.files("lightning_recorder"))) / "schemas"

FILES = {
    "check.json": "check",
    "data.json": "data",
    "finding.json": "findings",
    "findings.json": "findings",
    "graph.json": "graph",
    "incident.json": "incident",
    "receipt.json": "receipt",
    "records.json": "incident-records",
    "recorder-manifest.jsonl": "manifest",
    "activations.jsonl": "records",
    "gradients.jsonl": "records",
    "parameters.jsonl": "records",
    "watch.jsonl": "records",
}
"""The schema of each JSON file in the folder of a run."""


def closed(schema: Any) -> Any:
    """Return a schema that forbids the properties that it does not describe, in all objects that it describes."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    is_schema = isinstance(schema.get("properties"), dict) and "type" in schema
    return {"additionalProperties": False, **made} if is_schema else made


@cache
def validator(name: str, *, strict: bool = True) -> Any:
    """Return the validator of a schema; strict also about properties that it does not describe."""
    schema = json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(closed(schema) if strict else schema)


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def documents(path: Path) -> Iterator[Any]:
    """Yield the JSON values of a file."""
    text = path.read_text(encoding="utf-8")
    for each in text.splitlines() if path.suffix == ".jsonl" else [text]:
        yield json.loads(each, parse_constant=refuse)


def printed(*arguments: object) -> Any:
    """Return the JSON output of a command."""
    said = run(*arguments, "--json")
    assert (said.status in (0, 1), said.err) == (True, "")
    return json.loads(said.out, parse_constant=refuse)


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that writes all files: it checks its first step, keeps tensors and meets a NaN."""
    folder = tmp_path_factory.mktemp("run")
    seed_everything(5, verbose=False)
    model = Planted("mlp", 5)
    plant(model, "net.0", 1, math.nan, backward=False)
    recorders = default_recorders(every_n_train_steps=2)
    recorders = [*(each for each in recorders if not isinstance(each, StepWatch)), StepWatch(), TensorDumper("net.0")]
    trainer = Trainer(
        logger=CSVLogger(folder),
        max_epochs=1,
        accelerator="cpu",
        callbacks=[Check(), *recorders],
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(model, batches())
    assert trainer.log_dir is not None
    return Path(trainer.log_dir)


def test_the_schemas_describe_all_files_of_a_run(log_dir: Path) -> None:
    """Each JSON file of a run has a schema, which describes all of its properties."""
    found = [path for path in sorted(log_dir.rglob("*.json*")) if path.is_file()]
    assert {path.name for path in found} == FILES.keys()
    for path in found:
        for each in documents(path):
            validator(f"files/{FILES[path.name]}").validate(each)


def test_the_schemas_describe_the_files_of_any_loop(tmp_path: Path) -> None:
    """The files of a ``Monitor``, with an evaluation and a bad step, follow the same schemas."""
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Monitor(net, optimizer, log_dir=tmp_path, every_n_steps=2) as monitor:
        for step in range(6):
            batch = torch.full((3, 4), math.nan if step == 4 else 1.0)
            with monitor.step(batch):
                loss = net(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.log(loss=loss)
        with monitor.evaluation(), monitor.step(batch):
            net(batch)
    found = [path for path in sorted(tmp_path.rglob("*.json*")) if path.is_file()]
    assert {"findings.json", "incident.json", "receipt.json", "watch.jsonl"} <= {path.name for path in found}
    for path in found:
        for each in documents(path):
            validator(f"files/{FILES[path.name]}").validate(each)


def test_the_schemas_refuse_wrong_values(log_dir: Path) -> None:
    """A file without one of its properties, or with a property of another type, is not valid; a further one is."""
    for path in sorted(log_dir.rglob("*.json*")):
        check, each = validator(f"files/{FILES[path.name]}", strict=False), next(documents(path))
        key = next(iter(each))
        assert not check.is_valid({**each, key: ["wrong"]}), path
        if path.name not in ("receipt.json", "records.json"):  # their keys are labels
            assert not check.is_valid({name: value for name, value in each.items() if name != key}), path
            assert check.is_valid({**each, "of a later release": {}}), path


def test_each_schema_is_of_a_file_or_a_command() -> None:
    """There is no schema of something else."""
    found = {path.relative_to(SCHEMAS).with_suffix("").as_posix() for path in SCHEMAS.rglob("*.json")}
    commands = {f"commands/{name}" for name in ("diff", "doctor", "ls", "precision", "scale", "show")}
    assert found == commands | {f"files/{name}" for name in FILES.values()}


def properties(schema: Any) -> set[str]:
    """Return the names of all properties in a schema."""
    if isinstance(schema, list):
        return set().union(*map(properties, schema))
    if not isinstance(schema, dict):
        return set()
    own = schema["properties"].keys() if isinstance(schema.get("properties"), dict) else ()
    return set(own).union(*map(properties, schema.values()))


def test_the_documented_fields_are_in_the_schemas() -> None:
    """Each field that the page for scripts promises is a property of a schema."""
    page = (Path(__file__).parents[1] / "docs" / "reference" / "scripts.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (`\w+ --json`|a finding) \| (.+) \|$", page.partition("## Fields that stay")[2], re.MULTILINE
    )
    assert len(rows) == 6
    known = properties([json.loads(path.read_text(encoding="utf-8")) for path in SCHEMAS.rglob("*.json")])
    known |= {"true", "false", "null", "critical", "warning", "note"}
    for row, text in rows:
        named = set(re.findall(r"`(\w+)(?:\[\])?`", text))
        assert named, row
        assert named <= known, row


def test_what_doctor_prints(log_dir: Path) -> None:
    """Each run has the contents of ``findings.json`` and its name."""
    found = printed("doctor", log_dir)
    validator("commands/doctor", strict=False).validate(found)
    (each,) = found["runs"]
    assert each.pop("name") == log_dir.name
    validator("files/findings").validate(each)
    assert each["findings"][0]["rule"] == "non-finite"


def test_what_show_prints(log_dir: Path) -> None:
    """It has the values of each site at each step, with the names that ``show`` takes; NaN is text."""
    found = printed("show", log_dir)
    validator("commands/show").validate(found)
    (each,) = found["runs"]
    assert [recorder["label"] for recorder in each["recorders"]] == ["activations", "gradients", "parameters", "watch"]
    site = next(site for site in each["recorders"][0]["sites"] if site["module"] == "net.0")
    assert site["steps"] == [0, 1, 3, 5, 7]
    assert {len(values) for values in site["statistics"].values()} == {5}
    assert site["statistics"]["mean"][3:] == ["nan", "nan"]


def test_what_show_prints_is_chosen(log_dir: Path) -> None:
    """Sites, statistics and conditions choose what is printed, as without ``--json``."""
    options = ("--recorder", "activations", "--statistic", "rms", "--where", "nan_count>0")
    found = printed("show", log_dir, *options)
    validator("commands/show").validate(found)
    sites = found["runs"][0]["recorders"][0]["sites"]
    assert {tuple(site["statistics"]) for site in sites} == {("rms",)}
    table = run("show", log_dir, "--recorder", "activations", "--where", "nan_count>0").out
    assert len(sites) == len(table.splitlines()) - 1
    assert run("show", log_dir, "nowhere", "--json").status == 2
    assert run("show", log_dir, "--json", "--where", "nothing>0").status == 2


def kill(net: nn.Module) -> None:
    """Make the ReLU of the net return zeros."""
    nn.init.constant_(net.get_submodule("encoder.fc").bias, -100.0)  # type: ignore[arg-type]  # a parameter


def test_show_marks_unusual_sites(tmp_path: Path) -> None:
    """The sites that stand out have the places of the lines of ``show``."""
    record_run(tmp_path / "sick", steps=range(6), change=kill, at=2)
    found = printed("show", tmp_path / "sick", "--recorder", "activations")
    sites = found["runs"][0]["recorders"][0]["sites"]
    first = min((each for each in sites if each["unusual"]), key=lambda each: each["unusual"])
    table = run("show", tmp_path / "sick", "--recorder", "activations").out.splitlines()
    assert table[2].split()[:2] == ["1", first["module"]]


def test_what_graph_prints(log_dir: Path) -> None:
    """The whole graph is that of the file, and a view has the same form; colors and other formats are errors."""
    check = validator("files/graph")
    whole = printed("graph", log_dir)
    (written,) = documents(log_dir / "recorder" / "graph.json")
    assert whole == written
    view = printed("graph", log_dir, "--depth", "0")
    check.validate(view)
    assert len(view["nodes"]) < len(whole["nodes"])
    assert run("graph", log_dir, "--json", "--color", "activations/rms").status == 2
    assert run("graph", log_dir, "--json", "--format", "svg").status == 2


def test_what_the_other_commands_print(log_dir: Path, tmp_path: Path) -> None:
    """The output of ``ls``, ``diff``, ``scale`` and ``precision`` is what their schemas describe."""
    for seed, name in enumerate(("a", "b", "c")):
        record_run(tmp_path / name, seed=min(seed, 1))
    one, other, same = (tmp_path / name for name in ("a", "b", "c"))
    validator("commands/ls").validate(printed("ls", log_dir))
    validator("commands/diff").validate(printed("diff", one, other))
    validator("commands/diff").validate(printed("diff", other, same))
    validator("commands/diff").validate(printed("diff", one, other, same))
    writer = RecordWriter(records_path(tmp_path / "ranks" / "recorder", "parameters"))
    writer.begin(label="parameters", group="parameters", ranks=2)
    spread = {"rms": 1.0, "std": 1.0, "rank_mean_min": 0.25, "rank_mean_max": 0.75}
    sites = [site_of(name, "weight", spread) for name in ("fc", "head")]
    writer.write({"step": 9, "ranks": 2, "diverged": [["fc", "weight"]]}, sites)
    validator("commands/diff").validate(printed("diff", "--ranks", tmp_path / "ranks"))
    torch.save(nn.Linear(64, 64).state_dict(), tmp_path / "net.pt")
    validator("commands/scale").validate(printed("scale", one, other, "--widths", "8", "16"))
    validator("commands/precision").validate(printed("precision", tmp_path / "net.pt"))
