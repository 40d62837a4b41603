"""The callbacks on the command line and in configuration files of ``LightningCLI``."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]  # its stubs are another package

from lightning_recorder import (
    ActivationRecorder,
    ArgumentError,
    GradientRecorder,
    GraphRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    Schedule,
    TensorDumper,
)
from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.graph import GraphvizStyler
from lightning_recorder.reductions import ChannelMoments, ExponentHistogram
from lightning_recorder.statistics import SiteStatistics
from tests.callbacks.models import Classifier, digits

pytest.importorskip("jsonargparse", reason="needs jsonargparse[signatures]")
from lightning.pytorch.cli import LightningCLI

KINDS: list[type[Any]] = [ActivationRecorder, GradientRecorder, ParameterRecorder, TensorDumper, GraphRecorder]
MODULE = "tests.callbacks.test_command_line"


def even(step: int) -> bool:
    """Return True if a step is even."""
    return step % 2 == 0


def is_large(seen: SiteStatistics) -> bool:
    """Return True if a site has large values."""
    return seen.abs_max > 1e4


def output(field: str) -> Any:
    return lambda callback: getattr(callback.outputs, field)


def reductions(callback: StatisticsCallback) -> list[str]:
    return [getattr(each, "name", type(each).__name__) for each in callback.options["extra"]]


def ignoring(callback: StatisticsCallback) -> str:
    """Return the argument of the extra metrics."""
    given: list[Any] = [getattr(each, "given", None) for each in callback.options["extra"]]
    return ", ".join(each.nan_strategy for each in given if hasattr(each, "nan_strategy"))


def sinks(callback: Any) -> list[str]:
    return [type(each).__name__ for each in callback._own_sinks]


def selected(field: str) -> Any:
    return lambda callback: getattr(callback.selection, field)


def sampled(field: str) -> Any:
    return lambda callback: getattr(callback.sampling, field)


def plain(field: str) -> Any:
    return lambda callback: getattr(callback, field)


def quantiles(callback: StatisticsCallback) -> tuple[tuple[str, ...], tuple[float, ...]]:
    return callback.statistics, callback.options["quantiles"]


def histograms(callback: StatisticsCallback) -> tuple[bool, int | None]:
    return callback.histograms, callback.options["sample"]


MEMORY = {"class_path": "lightning_recorder.MemorySink"}
EXTRA: list[Any] = [
    {"class_path": "lightning_recorder.reductions.Norms"},
    {"class_path": "lightning_recorder.reductions.DeadChannels"},
]

MIXED = ["add", "max_metric", "Norms"]

SHARED: list[tuple[str, Any, Any, Any]] = [
    ("name", "mine", plain("name"), "mine"),
    ("compiled", "skip", plain("compiled"), "skip"),
    ("sinks", [MEMORY], sinks, ["MemorySink"]),
    ("strict", True, plain("strict"), True),
]
SELECTED: list[tuple[str, Any, Any, Any]] = [
    ("names", "encoder.*", selected("names"), ("encoder.*",)),
    ("names", ["head", "encoder.*"], selected("names"), ("head", "encoder.*")),
    ("types", "Linear", selected("types"), ("Linear",)),
    ("types", ["Linear", "Conv2d"], selected("types"), ("Linear", "Conv2d")),
    ("types", ["torch.nn.Linear"], selected("types"), ("torch.nn.Linear",)),
    ("types", "torch.nn.Linear", selected("types"), ("torch.nn.Linear",)),
    ("exclude", "head", selected("exclude"), ("head",)),
    ("exclude", ["head", "dropout"], selected("exclude"), ("head", "dropout")),
    ("every_n_train_steps", 7, sampled("every_n_train_steps"), 7),
    ("schedule", {"every_n_epochs": 2}, sampled("every_n_epochs"), 2),
    ("schedule", {"first_n_steps": 3}, sampled("first_n_steps"), 3),
    ("schedule", {"step_window": [2, 9]}, sampled("step_window"), (2, 9)),
    ("schedule", {"when": f"{MODULE}.even"}, sampled("when"), even),
    ("outputs", {"dump_when": f"{MODULE}.is_large"}, output("dump_when"), is_large),
    ("outputs", {"upload": True}, output("upload"), True),
    ("outputs", {"max_upload_bytes": 2000}, output("max_upload_bytes"), 2000),
    ("outputs", {"max_total_bytes": 1000}, output("max_total_bytes"), 1000),
]
STATISTICS: list[tuple[str, Any, Any, Any]] = [
    *SELECTED,
    ("schedule", {"max_overhead": 0.02}, sampled("max_overhead"), 0.02),
    ("reduce", "epoch", plain("reduce"), "epoch"),
    ("reduce", 5, plain("reduce"), 5),
    ("statistics", "count", plain("statistics"), ("count",)),
    ("statistics", ["mean", "rank_mean_min"], plain("statistics"), ("mean", "rank_mean_min")),
    ("statistics", ["mean", "quantile_0.5", "quantile_0.99"], quantiles, (("mean",), (0.5, 0.99))),
    ("extra", "torch.maximum", reductions, ["maximum"]),
    ("extra", {"peak": "torch.maximum"}, reductions, ["peak"]),
    ("extra", {"class_path": "torchmetrics.MeanMetric", "init_args": {"nan_strategy": "ignore"}}, ignoring, "ignore"),
    ("extra", ["torch.add", {"class_path": "torchmetrics.MaxMetric"}, EXTRA[0]], reductions, [*MIXED]),
    ("extra", EXTRA, reductions, ["Norms", "DeadChannels"]),
    ("extra", EXTRA[0], reductions, ["Norms"]),
    ("outputs", {"histograms": False}, histograms, (False, None)),
    ("outputs", {"histograms": True}, histograms, (True, None)),
    ("outputs", {"histograms": 100}, histograms, (True, 100)),
    ("outputs", {"curves": "all"}, output("curves"), "all"),
    ("outputs", {"max_tags": 40}, lambda callback: callback._pipeline.formatter._budget.max_tags, 40),
    ("outputs", {"dumps": False}, output("dumps"), False),
    ("outputs", {"dumps": "epochs"}, output("dumps"), "epochs"),
    ("outputs", {"dumps": ["records", "checkpoints"]}, output("dumps"), ("records", "checkpoints")),
    ("outputs", {"records": False}, output("records"), False),
    ("outputs", {"plots": False}, output("plots"), False),
    ("outputs", {"plot_every_n_records": 3}, output("plot_every_n_records"), 3),
    ("outputs", {"numbered_tags": True}, output("numbered_tags"), True),
    ("outputs", {"findings": False}, output("findings"), False),
    ("outputs", {"ignored_rules": ["frozen"]}, output("ignored_rules"), ("frozen",)),
    ("outputs", {"report": False}, output("report"), False),
    ("outputs", {"max_images": 2}, output("max_images"), 2),
    *SHARED,
]
TENSORS: list[tuple[str, Any, Any, Any]] = [
    ("tensors", "inputs", plain("tensors"), ("inputs",)),
    ("tensors", ["outputs", "inputs"], plain("tensors"), ("inputs", "outputs")),
    ("per_call", True, plain("per_call"), True),
    ("functions", "relu", plain("functions"), ("relu",)),
    ("functions", ["relu", "cross_entropy"], plain("functions"), ("relu", "cross_entropy")),
    ("functions", False, plain("functions"), ()),
]
CASES: dict[type[Any], list[tuple[str, Any, Any, Any]]] = {
    ActivationRecorder: [
        ("schedule", {"stages": "validate"}, plain("stages"), ("validate",)),
        ("schedule", {"stages": ["validate", "train"]}, plain("stages"), ("train", "validate")),
        *TENSORS,
        *STATISTICS,
    ],
    GradientRecorder: [*TENSORS, *STATISTICS],
    ParameterRecorder: [
        ("parts", "updates", plain("parts"), ("updates",)),
        ("parts", ["values", "moments"], plain("parts"), ("values", "moments")),
        *STATISTICS,
    ],
    TensorDumper: [
        *SELECTED,
        ("tensors", "inputs", plain("tensors"), ("inputs",)),
        ("tensors", ["inputs", "output_gradients"], plain("tensors"), ("inputs", "output_gradients")),
        ("at", "steps", plain("at"), ("steps",)),
        ("at", ["epochs", "checkpoints"], plain("at"), ("epochs", "checkpoints")),
        ("samples", 4, plain("samples"), 4),
        ("dtype", "bfloat16", plain("dtype"), torch.bfloat16),
        ("outputs", {"max_bytes": 1000}, output("max_bytes"), 1000),
        ("per_rank", True, plain("per_rank"), True),
        *SHARED,
    ],
    GraphRecorder: [
        ("depth", 2, plain("depth"), 2),
        ("max_nodes", 40, plain("max_nodes"), 40),
        ("stage", "validate", plain("stage"), "validate"),
        ("direction", "LR", plain("direction"), "LR"),
        ("formats", "pdf", plain("formats"), ("pdf",)),
        ("formats", ["pdf"], plain("formats"), ("pdf",)),
        ("legend", True, plain("legend"), True),
        ("costs", True, plain("costs"), True),
        ("unused", True, plain("show_unused"), True),
        ("timeout_s", 5, plain("timeout_s"), 5),
        ("timeout_s", 2.5, plain("timeout_s"), 2.5),
        (
            "styler",
            {"class_path": "lightning_recorder.graph.GraphvizStyler"},
            lambda callback: type(callback.styler),
            GraphvizStyler,
        ),
        *SHARED,
    ],
}
GROUPS = ("schedule", "outputs")


def arguments(kind: type[Any]) -> list[str]:
    """Return the arguments that a callback accepts, with an entry such as ``schedule.when`` for each option it uses."""
    found = []
    for name, each in inspect.signature(kind).parameters.items():
        if is_dataclass(each.default):
            found += [f"{name}.{field.name}" for field in fields(each.default) if field.name not in kind._ignored]
        else:
            found.append(name)
    return found


def whole(kind: type[Any]) -> dict[str, Any]:
    """Return a value for each argument of a callback, the last one of its cases."""
    given: dict[str, Any] = {}
    for name, value, *_ in CASES[kind]:
        given[name] = {**given.get(name, {}), **value} if name in GROUPS else value
    return given


@pytest.fixture(autouse=True)
def _program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep only the test's own arguments on the command line."""
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 uses what 4.53 deprecates


def load(*args: str) -> Any:
    """Run the command line with these arguments, up to the point at which it would start the run."""
    quiet = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    return LightningCLI(
        Classifier, run=False, save_config_callback=None, seed_everything_default=1, args=[*quiet, *args]
    )


def callback_of(cli: Any, kind: type[Any]) -> Any:
    (callback,) = (each for each in cli.trainer.callbacks if isinstance(each, kind))
    return callback


def written(folder: Path, kind: type[Any], *values: dict[str, Any]) -> Path:
    """Write a configuration file with a callback for each of the given arguments, and return its path."""
    path = folder / "config.yaml"
    entries = [{"class_path": f"lightning_recorder.{kind.__name__}", "init_args": each} for each in values]
    path.write_text(yaml.safe_dump({"trainer": {"callbacks": entries}}))
    return path


def settings(callback: Any) -> dict[str, Any]:
    """Return the settings of a callback in a comparable form."""
    found = {str(position): read(callback) for position, (_, _, read, _) in enumerate(CASES[type(callback)])}
    return {name: value.__name__ if callable(value) else value for name, value in found.items()}


def test_a_misspelt_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Jsonargparse names class and key in two lines; with the usage that the FAQ shows, the whole error is short."""
    path = written(tmp_path, ActivationRecorder, {"nmaes": "net"})
    with pytest.raises(SystemExit):
        LightningCLI(
            Classifier,
            parser_kwargs={"fit": {"usage": "%(prog)s --config FILE"}},
            args=["fit", "--config", str(path)],
        )
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    at = lines.index("- Problem with given class_path 'lightning_recorder.ActivationRecorder':")
    assert (lines[at + 1], lines[0].startswith("usage: ")) == ("Option 'nmaes' is not accepted", True)
    assert not any(line.startswith("[--trainer") for line in lines)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cases_are_all_arguments(kind: type[Any]) -> None:
    """These tests cover exactly the arguments of each callback."""
    given = whole(kind)
    names = {f"{name}.{field}" for name in GROUPS for field in given.get(name, ())} | (given.keys() - {*GROUPS})
    assert names == set(arguments(kind))


def packed(kind: type[Any]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the arguments of few callbacks that have all cases of a kind together, and the callback of each case."""
    callbacks: list[dict[str, Any]] = []
    places = []
    for name, value, *_ in CASES[kind]:
        used = [name in each and (name not in GROUPS or bool(each[name].keys() & value)) for each in callbacks]
        places.append(place := [*used, False].index(False))
        if place == len(callbacks):
            callbacks.append({})
        callbacks[place][name] = {**callbacks[place].get(name, {}), **value} if name in GROUPS else value
    return callbacks, places


@pytest.mark.parametrize("kind", KINDS)
def test_each_argument_can_be_given_in_a_file(kind: type[Any], tmp_path: Path) -> None:
    """The value of an argument in a configuration file reaches the callback."""
    given, places = packed(kind)
    cli = load("--config", str(written(tmp_path, kind, *given)))
    callbacks = [each for each in cli.trainer.callbacks if type(each) is kind]
    for (name, value, read, expected), place in zip(CASES[kind], places, strict=True):
        assert read(callbacks[place]) == expected, (name, value)


@pytest.mark.parametrize("kind", KINDS)
def test_all_defaults_are_those_of_the_class(kind: type[Any], tmp_path: Path) -> None:
    """Without arguments, a callback from a file has the same settings as one created in Python."""
    assert settings(callback_of(load("--config", str(written(tmp_path, kind, {}))), kind)) == settings(kind())


@pytest.mark.parametrize("kind", KINDS)
def test_a_callback_can_be_given_on_the_command_line(kind: type[Any]) -> None:
    """The name of the class is enough, and arguments can follow."""
    cli = load(f"--trainer.callbacks+={kind.__name__}", "--trainer.callbacks.strict=true", "--trainer.callbacks.name=a")
    callback = callback_of(cli, kind)
    assert (callback.strict, callback.name) == (True, "a")


@pytest.mark.parametrize("kind", KINDS)
def test_a_printed_configuration_loads_again(
    kind: type[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output of ``--print_config`` with all arguments can be loaded and gives an equal callback and output."""
    given = whole(kind)
    first = load("--config", str(written(tmp_path, kind, given)))
    printed = [print_config(capsys, "--config", str(written(tmp_path, kind, given)))]
    path = tmp_path / "printed.yaml"
    path.write_text(printed[0])
    second = load("--config", str(path))
    printed.append(print_config(capsys, "--config", str(path)))
    assert settings(callback_of(second, kind)) == settings(callback_of(first, kind))
    assert printed[1] == printed[0]
    (entry,) = yaml.safe_load(printed[0])["trainer"]["callbacks"]
    assert set(entry["init_args"]) == set(inspect.signature(kind).parameters)
    assert all(entry["init_args"][name].keys() >= given[name].keys() for name in GROUPS if name in given)


def print_config(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        load(*args, "--print_config")
    assert ended.value.code == 0
    return capsys.readouterr().out


def described(kind: type[Any]) -> dict[str, str]:
    """Return the arguments in the docstring of a class, with the first line of each description."""
    section = re.search(r"^Args:\n(.*?)(?:\n\n\w+:|\Z)", inspect.getdoc(kind) or "", re.S | re.M)
    return dict(re.findall(r"^ {4}(\w+): (.*)$", section[1] if section else "", re.M))


@pytest.mark.parametrize("kind", KINDS)
def test_the_help_describes_each_argument(
    kind: type[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--trainer.callbacks.help`` shows each argument and each option with the description from its docstring."""
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        load("--trainer.callbacks.help", f"lightning_recorder.{kind.__name__}")
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    texts = described(kind)
    for group, options in (("schedule", Schedule), ("outputs", Outputs)):
        texts |= {f"{group}.{name}": text for name, text in described(options).items()}
    for name in arguments(kind):
        start = " ".join(texts[name].split()[:5])
        assert re.search(rf"--trainer\.callbacks\.{re.escape(name)}\b.*?{re.escape(start)}", shown), name


WRONG: dict[str, list[tuple[Any, str]]] = {
    "names": [(3, "names takes module names or globs"), ([], "names is empty")],
    "types": [([int], "types takes subclasses of torch.nn.Module or their names"), ([], "types is empty")],
    "exclude": [([None], "exclude takes module names or globs")],
    "every_n_train_steps": [
        (-1, "integer of at least 0"),
        (1.5, "integer of at least 0"),
        (True, "write 1 to record every"),
    ],
    "schedule": [
        (3, r"takes Schedule\(…\), got 3: write schedule=Schedule"),
        ({"first_n_steps": 3}, r"write schedule=Schedule\(first_n_steps=3\)$"),
        (None, r"takes Schedule\(…\)"),
        (Schedule, r"takes Schedule\(…\)"),
    ],
    "outputs": [(3, r"takes Outputs\(…\)"), ({"upload": True}, r"write outputs=Outputs\(upload=True\)$")],
    "reduce": [("batch", "'step', 'epoch' or a number of steps of at least 1"), (0, "at least 1"), (None, "'step'")],
    "statistics": [
        ("median", "count, mean, std"),
        (["mean", "p50"], "count, mean, std"),
        (3, "statistics"),
        (["quantile_50"], "write 'quantile_0.5'"),
    ],
    "extra": [
        (3, "takes a Reduction, a torchmetrics.Metric, a function of two arguments"),
        ([ExponentHistogram(), ExponentHistogram()], "two reductions have the statistics 'histogram'"),
        ("norms", "cannot be imported"),
        (len, r"takes a function \(before, new\)"),
        ([ChannelMoments, "torch.nn.Linear"], r"Linear\(\) raised"),
    ],
    "per_call": [("no", "True or False")],
    "unused": [("no", "True or False")],
    "compiled": [("both", "'eager'.* or 'skip'"), (None, "'eager'.* or 'skip'")],
    "functions": [("tanhh", "tanh"), (3, "activations")],
    "tensors": [("weights", "'inputs', 'outputs'"), ([], "'inputs'"), (3, "'inputs'")],
    "at": [("batches", "'checkpoints', 'steps', 'epochs'"), (3, "'checkpoints'")],
    "samples": [(0, "integer of at least 1"), ("all", "integer of at least 1")],
    "dtype": [("int8", "floating-point"), ("float17", "floating-point"), (3, "floating-point")],
    "per_rank": [("no", "True or False")],
    "name": [(3, "must be a string"), (None, "must be a string")],
    "sinks": [(MemorySink(), "takes a list of sinks"), ([MemorySink], r"write MemorySink\(\)"), (3, "takes a list")],
    "strict": [("no", "True or False")],
    "parts": [("weights", "'values', 'gradients', 'updates', 'moments'"), ([], "'values'"), (3, "'values'")],
    "depth": [(0, "integer of at least 1"), ("2", "integer of at least 1")],
    "max_nodes": [(0, "integer of at least 1"), (None, "integer of at least 1")],
    "stage": [("test", "train, validate, example"), (None, "train, validate, example"), ([], "train, validate")],
    "direction": [("up", "TB"), (None, "TB"), ([], "TB")],
    "formats": [(["jpg"], "'svg', 'png', 'pdf'"), (3, "'svg', 'png', 'pdf'")],
    "legend": [("no", "True or False")],
    "costs": [("no", "True or False")],
    "timeout_s": [(0, "must be positive"), ("5", "must be positive"), (None, "must be positive")],
    "styler": [(GraphvizStyler, "must be a GraphvizStyler"), ("dark", "must be a GraphvizStyler")],
}
GRAPH_WRONG = {"name": [("a/b", "a file name"), ("", "a file name"), (3, "must be a string")]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_argument_is_named_with_what_is_allowed(kind: type[Any]) -> None:
    """An invalid value raises at construction, and the message has the argument and the allowed values."""
    wrong = {**WRONG, **(GRAPH_WRONG if kind is GraphRecorder else {})}
    for name in inspect.signature(kind).parameters:
        for value, warned in wrong[name]:
            with pytest.raises(ArgumentError, match=warned) as raised:
                kind(**{name: value})
            assert name in str(raised.value)
            assert str(raised.value).startswith(f"{kind.__name__}: ")


@pytest.mark.parametrize("kind", [ActivationRecorder, GradientRecorder, ParameterRecorder, TensorDumper])
def test_a_predicate_can_be_given_by_its_import_path(kind: type[StatisticsCallback] | type[TensorDumper]) -> None:
    """``when`` accepts the import path of a function in Python as well as in a file."""
    sampling = kind(schedule=Schedule(when=f"{MODULE}.even"), every_n_train_steps=1).sampling
    assert [step for step in range(5) if sampling(step)] == [0, 2, 4]


UNKNOWN = {
    "every_n_steps": "every_n_train_steps",
    "log_every_n_steps": "every_n_train_steps",
    "every_n_batches": "every_n_train_steps",
    "every_n_train_step": "every_n_train_steps",
    "freq": "every_n_train_steps",
    "interval": "every_n_train_steps",
    "layers": "names",
    "modules": "names",
    "type": "types",
    "excludes": "exclude",
    "statistic": "statistics",
    "per_calls": "per_call",
    "stages": "stage",
    "part": "parts",
    "logger": "sinks",
    "max_depth": "depth",
    "rankdir": "direction",
    "tensor": "tensors",
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_argument_is_refused(kind: type[Any]) -> None:
    """An unknown argument raises a TypeError that names the class and suggests the intended argument."""
    known = inspect.signature(kind).parameters
    tried = [(wrong, meant) for wrong, meant in UNKNOWN.items() if meant in known and wrong not in known]
    assert len(tried) >= 3
    for wrong, meant in tried:
        with pytest.raises(
            ArgumentError, match=f"^{kind.__name__} has no argument {wrong}: did you mean {meant}"
        ) as raised:
            kind(**{wrong: 3})
        assert isinstance(raised.value, TypeError)
    with pytest.raises(ArgumentError, match=f"^{kind.__name__} has no argument zzz; its arguments are .*, strict$"):
        kind(zzz=3)


OPTIONS = {
    ActivationRecorder: {
        "max_overhead": ": write schedule=Schedule(max_overhead=…)",
        "when": ": write schedule=Schedule(when=…)",
        "max_tags": ": write outputs=Outputs(max_tags=…)",
        "dumps": ": write outputs=Outputs(dumps=…)",
        "every_n_epoch": ": did you mean schedule=Schedule(every_n_epochs=…)?",
        "window": ": did you mean schedule=Schedule(step_window=…)?",
        "dump": ": did you mean outputs=Outputs(dumps=…)?",
        "quantiles": ': write statistics=[…, "quantile_0.99"]',
        "quantile": ': did you mean statistics=[…, "quantile_0.99"]?',
    },
    TensorDumper: {
        "when": ": write schedule=Schedule(when=…)",
        "upload": ": write outputs=Outputs(upload=…)",
        "step_window": ": write schedule=Schedule(step_window=…)",
        "dumps": ": write at=…",
        "max_overhead": "; its arguments are names, types,",
    },
}


@pytest.mark.parametrize(
    ("kind", "name", "fix"), [(kind, name, fix) for kind, fixes in OPTIONS.items() for name, fix in fixes.items()]
)
def test_an_option_is_found_in_its_group(kind: type[Any], name: str, fix: str) -> None:
    """The message about an option that is passed as an argument has the code to write."""
    with pytest.raises(TypeError, match=re.escape(f"{kind.__name__} has no argument {name}{fix}")):
        kind(**{name: 3})


UNUSED: list[tuple[type[Any], dict[str, Any], str]] = [
    (TensorDumper, {"schedule": Schedule(max_overhead=0.5)}, "schedule must not set max_overhead, .*: leave it out$"),
    (TensorDumper, {"outputs": Outputs(plots=False)}, "outputs must not set plots, .* got False: leave it out$"),
    (TensorDumper, {"outputs": Outputs(dumps="epochs")}, "outputs must not set dumps, .* got 'epochs': write at=…$"),
    (ParameterRecorder, {"outputs": Outputs(max_bytes=9)}, "outputs must not set max_bytes, .* got 9: leave it out$"),
]


@pytest.mark.parametrize(("kind", "given", "message"), UNUSED)
def test_an_option_that_is_not_used_is_refused(kind: type[Any], given: dict[str, Any], message: str) -> None:
    """An option without effect for a class raises, and the message says what to write instead."""
    with pytest.raises(ArgumentError, match=f"^{kind.__name__}: {message}"):
        kind(**given)


def test_an_unknown_argument_of_a_subclass_is_refused() -> None:
    """The message names the subclass, and the subclass's own arguments are known."""

    class Mine(ActivationRecorder):
        def __init__(self, *, colour: str = "red", **options: Any) -> None:
            self.colour = colour
            super().__init__(**options)

    assert Mine(colour="blue", strict=True).strict
    with pytest.raises(TypeError, match=r"^Mine has no argument every_n_steps: did you mean every_n_train_steps\?$"):
        Mine(every_n_steps=3)
    with pytest.raises(TypeError, match=r"^Mine has no argument color: did you mean colour\?$"):
        Mine(color="blue")


def test_several_names_are_a_list() -> None:
    """Several positional names raise an error that shows the list to write."""
    with pytest.raises(
        ArgumentError, match=r"^ActivationRecorder takes one .*: write ActivationRecorder\(\['a', 'b'\]\)$"
    ):
        ActivationRecorder("a", "b")  # type: ignore[call-arg]  # the point of the test


MISTYPED = [
    (ActivationRecorder, {"tensors": "input"}, "'inputs'"),
    (ActivationRecorder, {"reduce": "epochs"}, "'epoch'"),
    (GradientRecorder, {"statistics": "average"}, "'mean'"),
    (ParameterRecorder, {"parts": "grads"}, "'gradients'"),
    (TensorDumper, {"tensors": "output"}, "'outputs'"),
    (TensorDumper, {"tensors": ["grad_output"]}, "'output_gradients'"),
    (TensorDumper, {"at": "step"}, "'steps'"),
    (TensorDumper, {"dtype": "bf16"}, "'bfloat16'"),
    (GraphRecorder, {"stage": "val"}, "'validate'"),
]


@pytest.mark.parametrize(("kind", "given", "meant"), MISTYPED)
def test_a_mistyped_word_is_suggested(kind: type[Any], given: dict[str, Any], meant: str) -> None:
    """The message suggests the allowed word that is similar or that other packages call by the given word."""
    (name,) = given
    with pytest.raises(ArgumentError, match=rf"^{kind.__name__}: {name} .*: did you mean {meant}\?$"):
        kind(**given)


@pytest.mark.parametrize(("name", "call"), [("abs_max", r"Norms\(\)"), ("kurtosis", r"HigherMoments\(\)")])
def test_a_further_statistic_names_its_reduction(name: str, call: str) -> None:
    """The message about a statistic of an extra reduction says how to add that reduction."""
    shown = rf"extra=\[{call}\] shows it, without naming it in statistics$"
    with pytest.raises(ArgumentError, match=rf"got '{name}': {shown}"):
        ActivationRecorder(statistics=name)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_argument_in_a_file_is_refused(
    kind: type[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown argument in a configuration file ends the program with the two lines that the FAQ quotes."""
    with pytest.raises(SystemExit) as ended:
        load("--config", str(written(tmp_path, kind, {"every_n_step": 3})))
    assert ended.value.code == 2
    _, _, after = capsys.readouterr().err.partition(f"class_path 'lightning_recorder.{kind.__name__}':\n")
    assert after.lstrip().startswith("Option 'every_n_step' is not accepted\n")


@pytest.mark.parametrize(
    ("kind", "name", "value", "warned"),
    [
        (ActivationRecorder, "tensors", ["weights"], "inputs"),
        (GradientRecorder, "reduce", "batch", "epoch"),
        (ParameterRecorder, "parts", ["weights"], "moments"),
        (ParameterRecorder, "compiled", "both", "skip"),
        (GraphRecorder, "stage", "test", "example"),
        (GraphRecorder, "direction", "up", "LR"),
        (ActivationRecorder, "every_n_train_steps", "often", "int"),
    ],
)
def test_a_wrong_value_in_a_file_is_refused(
    kind: type[Any], name: str, value: Any, warned: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid value in a configuration file ends the program with a message that names the allowed values."""
    with pytest.raises(SystemExit) as ended:
        load("--config", str(written(tmp_path, kind, {name: value})))
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert name in error
    assert warned in error


def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    """An import path that does not exist ends the program with a message that names the missing part."""
    with pytest.raises(ValueError, match=r"when='tests\.nowhere\.even' cannot be imported"):
        load("--config", str(written(tmp_path, ActivationRecorder, {"schedule": {"when": "tests.nowhere.even"}})))


def test_a_run_from_the_command_line_records(tmp_path: Path) -> None:
    """``fit`` with a configuration file of all callbacks trains and writes records, a graph and the saved file."""
    entries = [{"class_path": f"lightning_recorder.{kind.__name__}", "init_args": {"strict": True}} for kind in KINDS]
    trainer = {"callbacks": entries, "max_epochs": 1, "enable_progress_bar": False, "enable_model_summary": False}
    trainer |= {"accelerator": "cpu", "log_every_n_steps": 2, "default_root_dir": str(tmp_path)}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": trainer}))
    LightningCLI(Trained, seed_everything_default=1, args=["fit", "--config", str(path)])
    (version,) = (tmp_path / "lightning_logs").iterdir()
    assert {"graph.json", "graph.png", "receipt.json"} <= {each.name for each in (version / "recorder").iterdir()}
    saved = yaml.safe_load((version / "config.yaml").read_text())["trainer"]["callbacks"]
    assert [entry["class_path"].rpartition(".")[2] for entry in saved] == [kind.__name__ for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS)
def test_the_saved_file_can_be_used_again(kind: type[Any], tmp_path: Path) -> None:
    """A run from the file that a run has saved has the same settings, for each argument and for the defaults."""
    path = written(tmp_path, kind, {}, *packed(kind)[0])
    first = load("--config", str(path))
    saved = tmp_path / "saved.yaml"
    first.parser.save(first.parser.parse_args(["--config", str(path)]), saved, skip_check=False)
    assert "Unable to serialize" not in saved.read_text()
    before, after = (
        [each for each in cli.trainer.callbacks if type(each) is kind] for cli in (first, load("--config", str(saved)))
    )
    assert [settings(each) for each in after] == [settings(each) for each in before]
    assert not getattr(after[0], "options", {}).get("extra")


FORMS: list[Any] = [
    "torch.maximum",
    "lightning_recorder.reductions.Norms",
    ["torch.maximum", {"class_path": "torchmetrics.MeanMetric"}],
    {"peak": "torch.maximum", "average": {"class_path": "torchmetrics.MeanMetric"}},
    {"class_path": "lightning_recorder.reductions.Norms"},
    {"class_path": "lightning_recorder.reductions.Norms", "init_args": {}},
    {"class_path": "lightning_recorder.reductions.ChannelMoments", "init_args": {"dim": -1}},
    [{"class_path": "lightning_recorder.reductions.ChannelMoments", "init_args": {"dim": -1}}],
]


@pytest.mark.parametrize("extra", FORMS, ids=str)
def test_each_form_of_a_reduction_survives_the_saved_file(extra: Any, tmp_path: Path) -> None:
    """A path, a class with and without arguments, a list and a mapping give the same reductions after saving."""
    path, saved = written(tmp_path, ActivationRecorder, {"extra": extra}), tmp_path / "saved.yaml"
    first = load("--config", str(path))
    first.parser.save(first.parser.parse_args(["--config", str(path)]), saved)
    callbacks = [callback_of(cli, ActivationRecorder) for cli in (first, load("--config", str(saved)))]
    names = [[str(each) for each in callback.options["extra"]] for callback in callbacks]
    assert names[0] == names[1]
    assert len(names[0]) == (2 if len(extra) == 2 and "class_path" not in extra else 1)


class Trained(Classifier):
    """A classifier that includes its own data."""

    def train_dataloader(self) -> Any:
        return digits(2)
