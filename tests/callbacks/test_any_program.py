"""Programs that are recorded by ``LIGHTNING_RECORDER`` alone."""

from __future__ import annotations

import copy
import gc
import importlib
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor, nn

from lightning_recorder import (
    ActivationRecorder,
    GradientRecorder,
    GraphRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    RecorderWarning,
    Schedule,
    SelectionError,
    StepWatch,
    default_recorders,
    open_recording,
)
from lightning_recorder.callbacks import attach
from lightning_recorder.callbacks.base import RecorderCallback
from lightning_recorder.entry_point import callbacks_from_environment
from lightning_recorder.switch import CHECK_ONLY
from tests import forks
from tests.callbacks.models import digits
from tests.entry_points import ROOT, write_entry_points

DEFAULT: list[type[Any]] = [GraphRecorder, ActivationRecorder, GradientRecorder, ParameterRecorder, StepWatch]
PACKAGES = {"lightning.pytorch": lightning.pytorch, "pytorch_lightning": pytorch_lightning}
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
    "max_epochs": 1,
}


def net(package: Any = lightning.pytorch) -> Any:
    """Return a small model of a package, always with the same parameters."""

    class Net(package.LightningModule):  # type: ignore[misc]  # the class of one of two packages
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
            self.lr = 0.1

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.body(batch[0]), batch[1])

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("loss", self.training_step(batch, batch_idx))

        def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

        predict_step = test_step

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), self.lr)

    torch.manual_seed(1)
    return Net()


@pytest.fixture(autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the entry points, and forget the messages of other tests."""
    monkeypatch.syspath_prepend(str(write_entry_points(tmp_path_factory.mktemp("site") / "packages")))
    monkeypatch.setattr(attach, "_said", set())
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Ask for the default set in an empty current folder, and return the folder."""
    monkeypatch.setenv("LIGHTNING_RECORDER", "on")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(model: Any = None, **options: Any) -> Any:
    """Train a model as a program would, and return the trainer."""
    path = options.pop("ckpt_path", None)
    trainer = lightning.pytorch.Trainer(**{**QUIET, **options})
    trainer.fit(net() if model is None else model, digits(2), digits(1), ckpt_path=path)
    return trainer


def added(trainer: Any) -> list[type[Any]]:
    """Return the classes of the recorders of a trainer that the program has not passed to it."""
    return [type(each) for each in trainer.callbacks if getattr(each, "_is_from_environment", False)]


def folders(root: Path) -> list[str]:
    """Return the folders of runs with records."""
    return sorted(path.parents[1].relative_to(root).as_posix() for path in root.rglob("recorder/records"))


def told(run: Callable[[], object]) -> list[str]:
    """Return the warnings of this package."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught if each.category is RecorderWarning]


@pytest.mark.parametrize("value", [None, "", "off", "0", "False", " no "])
def test_nothing_is_added_or_imported_unless_requested(value: str | None) -> None:
    """Without the variable, or switched off, the factory returns nothing and imports only the standard library."""
    code = (
        "import sys; from lightning_recorder.entry_point import callbacks_from_environment as go; assert go() == []\n"
        "print(*{name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names))\n"
        "print(*(name for name in sys.modules if name.startswith('lightning_recorder')))"
    )
    environment = {name: each for name, each in os.environ.items() if name != "LIGHTNING_RECORDER"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({} if value is None else {"LIGHTNING_RECORDER": value})
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}\n{code}"]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert set(out[0].split()) <= {"__main__", "lightning_recorder"}
    files = ("", ".entry_point", ".lazy", ".switch", ".version")
    assert set(out[1].split()) == {f"lightning_recorder{name}" for name in files}


@pytest.mark.parametrize("name", PACKAGES)
def test_the_default_set_records_a_program(name: str, on: Path) -> None:
    """Trainers of both packages are recorded by the default set, in the folder of their log."""
    package = PACKAGES[name]
    trainer = package.Trainer(**QUIET)
    trainer.fit(net(package), digits(2))
    assert added(trainer) == DEFAULT
    run = open_recording("lightning_logs")["version_0"]
    assert list(run) == ["activations", "gradients", "parameters", "watch"]
    assert run["activations"].steps == [0, 1]
    assert run.graph is not None


def test_training_is_bitwise_the_same(on: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and random numbers are those of the program without the variable."""
    found = []
    for value in ("on", "off"):
        monkeypatch.setenv("LIGHTNING_RECORDER", value)
        model = net()
        assert added(train(model, max_epochs=2)) == (DEFAULT if value == "on" else [])
        found.append([*model.state_dict().values(), torch.get_rng_state()])
    assert all(map(torch.equal, *found))


class _History(Logger):
    """A logger in which a program keeps its own results."""

    name = version = "mine"

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Keep nothing."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.seen.update(metrics)


def test_a_logger_of_the_program_is_left_alone(on: Path) -> None:
    """A logger of an unknown class gets nothing that the program does not log, but one in the code does."""
    history = _History()
    trainer = train(logger=history)
    assert added(trainer) == DEFAULT
    assert history.seen == {"epoch", "loss"}
    assert open_recording(on).run["activations"].steps
    asked = _History()
    train(logger=asked, callbacks=[ActivationRecorder(every_n_train_steps=1)])
    assert {name.partition("/")[0] for name in asked.seen} == {"epoch", "loss", "activations", "watch"}


def test_recorders_of_the_program_are_not_doubled(on: Path) -> None:
    """A recorder of the trainer or of the model takes the place of the added one of its kind, in the same folder."""
    trainer = train(callbacks=[ActivationRecorder(name="mine")])
    assert added(trainer) == [GraphRecorder, GradientRecorder, ParameterRecorder]
    assert list(open_recording("lightning_logs")["version_0"]) == [
        "activations-mine",
        "gradients",
        "parameters",
        "watch",
    ]
    model = net()
    model.configure_callbacks = lambda: [GradientRecorder(), ParameterRecorder("body.1")]
    assert added(train(model)) == [GraphRecorder, ActivationRecorder, StepWatch]
    assert folders(on) == ["lightning_logs/version_0", "lightning_logs/version_1"]


def test_the_list_of_the_program_is_unchanged(on: Path) -> None:
    """A list that the program passes to several trainers has no callback of this package after a run."""
    given: list[Any] = [lightning.pytorch.callbacks.EarlyStopping("loss", patience=9)]
    for _ in range(3):
        assert added(train(callbacks=given)) == DEFAULT
        assert [each for each in given if type(each).__module__.startswith("lightning_recorder")] == []


def test_trainers_write_to_folders_of_their_own(on: Path) -> None:
    """With loggers, without and with the same logger, each trainer has its folder, for all of its fits."""
    trainer = train()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net(), digits(2))
    train()
    assert folders(on) == ["lightning_logs/version_0", "lightning_logs/version_1"]
    assert len(open_recording("lightning_logs")["version_0"]["activations"].sessions) == 2
    for _ in range(2):
        train(logger=False, enable_checkpointing=False)
    assert folders(on / "recordings") == ["version_0", "version_1"]
    logger = lightning.pytorch.loggers.CSVLogger("same", version="a")
    for _ in range(2):
        trainer = train(logger=logger)
    assert folders(on / "same") == ["lightning_logs/a", "lightning_logs/a-2"]
    path = trainer.checkpoint_callback.best_model_path
    train(logger=logger, ckpt_path=path, max_epochs=2)
    assert folders(on / "same") == ["lightning_logs/a", "lightning_logs/a-2"]
    assert {each.suffix for each in Path(path).parent.iterdir()} == {".ckpt"}


def test_many_trainers_keep_nothing(on: Path) -> None:
    """The recorders and the model of a trainer are freed with it."""

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(each), (RecorderCallback, nn.ReLU)) for each in gc.get_objects())

    train(logger=False, enable_checkpointing=False)
    before = alive()
    for _ in range(3):
        train(logger=False, enable_checkpointing=False)
        assert alive() == before


@pytest.mark.parametrize("flag", ["fast_dev_run", "barebones"])
def test_short_runs_are_not_recorded(flag: str, on: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A ``fast_dev_run`` and a barebones run have no recorders, which is logged once."""
    options = {**QUIET, flag: True}
    if flag == "barebones":
        options = {name: value for name, value in options.items() if name in (flag, "accelerator", "max_epochs")}
    with caplog.at_level("INFO"):
        for _ in range(2):
            trainer = lightning.pytorch.Trainer(**options)
            trainer.fit(net(), digits(2))
            assert added(trainer) == []
    assert caplog.text.count(f"LIGHTNING_RECORDER=on: Trainer({flag}=True) is not recorded") == 1


def test_other_functions_leave_nothing(on: Path) -> None:
    """Trainers that only validate, test, predict or tune write nothing and give no warning."""

    def run() -> None:
        for function in ("validate", "test", "predict"):
            trainer = lightning.pytorch.Trainer(logger=False, **QUIET)
            getattr(trainer, function)(net(), digits(1), **({} if function == "predict" else {"verbose": False}))
        trainer = lightning.pytorch.Trainer(logger=False, **QUIET)
        Tuner(trainer).lr_find(net(), digits(4), num_training=4)

    assert told(run) == []
    assert list(on.rglob("recorder")) == []


def test_copies_hold_no_model(on: Path) -> None:
    """The added callbacks can be copied and pickled after a run of a model that cannot."""
    model = net()
    model.generator = iter(())
    model.state = (number for number in range(3))
    trainer = train(model)
    ours = [each for each in trainer.callbacks if type(each).__module__.startswith("lightning_recorder")]
    for copied in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert [type(each) for each in copied] == [type(each) for each in ours]


LIST = "- class_path: lightning_recorder.ActivationRecorder\n  init_args: {every_n_train_steps: 2}\n- GraphRecorder\n"


@pytest.mark.parametrize(
    "text",
    [
        LIST,
        "callbacks:\n" + LIST,
        "seed_everything: 1\ntrainer:\n  max_epochs: 7\n  callbacks:\n    " + LIST.strip().replace("\n", "\n    "),
    ],
    ids=["list", "callbacks", "cli"],
)
def test_a_file_lists_the_recorders(text: str, on: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the form of LightningCLI replaces the default set, for each trainer anew; other keys are ignored."""
    (on / "recorder.yaml").write_text(text)
    monkeypatch.setenv("LIGHTNING_RECORDER", "recorder.yaml")
    trainers = [train(logger=False), train(logger=False)]
    assert [added(trainer) for trainer in trainers] == [[ActivationRecorder, StepWatch, GraphRecorder]] * 2
    assert trainers[0].max_epochs == 1
    assert open_recording(on / "recordings")["version_1"]["activations"].steps == [0, 1]
    assert list((on / "checkpoints").glob("*.safetensors")) == []
    (on / "recorder.yaml").write_text("- GraphRecorder")
    assert added(train(logger=False)) == [GraphRecorder]


def test_a_file_may_ask_for_dumps_beside_checkpoints(on: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dumps are written beside the checkpoints of the program if the file says so, and not by default."""
    for number, outputs in enumerate(("{plots: false}", "{dumps: checkpoints}")):
        entry = f"- class_path: lightning_recorder.ActivationRecorder\n  init_args: {{outputs: {outputs}}}"
        (on / f"{number}.yml").write_text(entry)
        monkeypatch.setenv("LIGHTNING_RECORDER", str(on / f"{number}.yml"))
        train()
        found = list((on / f"lightning_logs/version_{number}/checkpoints").glob("*.safetensors"))
        assert len(found) == number


@pytest.mark.parametrize(
    ("value", "text", "message", "kinds"),
    [
        ("onn", None, "the value must be on, off, check or the path of a YAML file: did you mean 'on'?", []),
        ("gone.yaml", None, "there is no 'gone.yaml' in the current folder", []),
        ("a.yaml", "callbacks: [", "the file is not valid YAML: while parsing", []),
        ("a.yaml", "model: {}", "the file has no list of callbacks: write a list under 'callbacks:'", []),
        ("a.yaml", "- {class: x}\n- GraphRecorder", "callback 1 is left out: it has no class_path", [GraphRecorder]),
        (
            "a.yaml",
            "- {class_path: GraphRecorder, init_arg: {}}",
            "callback 1 is left out: it has no key 'init_arg': did you mean 'init_args'?",
            [],
        ),
        (
            "a.yaml",
            "- {class_path: lightning_recorder.GraphRecorder, init_args: {deep: 2}}",
            "callback 1 is left out: GraphRecorder has no argument deep: did you mean depth?",
            [],
        ),
        (
            "a.yaml",
            "- {class_path: lightning_recorder.GraphRecorder, init_args: {depth: -2}}",
            "depth must be an integer of at least 1, got -2",
            [],
        ),
        (
            "a.yaml",
            "- {class_path: lightning.pytorch.callbacks.Timer}",
            "callback 1 is left out: Import path lightning.pytorch.callbacks.Timer does not correspond to a subclass",
            [],
        ),
    ],
    ids=["value", "missing", "yaml", "empty", "entry", "key", "argument", "range", "other class"],
)
def test_a_wrong_setting_is_one_warning(
    value: str, text: str | None, message: str, kinds: list[type[Any]], on: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong value or file gives one warning for all trainers that says what is wrong, and the program trains."""
    monkeypatch.setenv("LIGHTNING_RECORDER", value)
    if text is not None:
        (on / value).write_text(text)
    trainers: list[Any] = []
    (found,) = told(lambda: trainers.extend([train(logger=False), train(logger=False)]))
    assert found.startswith(f"LIGHTNING_RECORDER={value}: ")
    assert message in found
    assert [added(trainer) for trainer in trainers] == [kinds] * 2
    assert [trainer.global_step for trainer in trainers] == [2, 2]


def test_a_file_needs_jsonargparse(on: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without jsonargparse, the warning names the extra that installs it."""
    (on / "recorder.yaml").write_text("# without\n" + LIST)
    monkeypatch.setenv("LIGHTNING_RECORDER", "recorder.yaml")
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    (found,) = told(lambda: train(logger=False))
    assert "needs jsonargparse: pip install 'lightning-recorder[yaml]'" in found


@pytest.mark.parametrize("strict", [False, True])
def test_a_selection_that_matches_nothing_does_not_end_the_program(
    strict: bool, on: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that the model does not have gives a warning, or an error if the file says ``strict``."""
    entry = f"- class_path: lightning_recorder.ActivationRecorder\n  init_args: {{names: bdy, strict: {strict}}}"
    (on / "recorder.yaml").write_text(entry)
    monkeypatch.setenv("LIGHTNING_RECORDER", "recorder.yaml")
    model = net()
    before = model.body[1].weight.clone()
    if strict:
        with pytest.raises(SelectionError, match="no module matches 'bdy'"):
            train(model)
        return
    (found,) = told(lambda: train(model))
    assert found.startswith("ActivationRecorder: no module matches 'bdy'; the closest names are 'body'")
    assert not torch.equal(model.body[1].weight, before)


@pytest.mark.parametrize("action", ["always", "error"])
def test_a_fault_of_the_factory_never_raises(action: Any, on: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the recorders cannot be imported, the factory returns nothing, also where warnings are errors."""
    monkeypatch.setitem(sys.modules, "lightning_recorder.callbacks.attach", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        assert callbacks_from_environment() == []
    assert [str(each.message).partition(",")[0] for each in caught] == (
        ["LIGHTNING_RECORDER=on: nothing is recorded"] if action == "always" else []
    )


def test_a_fault_in_a_run_is_a_warning(on: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error while recorders are added gives one warning, and the program trains."""

    def broken(**_: object) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(importlib.import_module("lightning_recorder.callbacks.attach"), "default_recorders", broken)
    assert told(lambda: [train(), train()]) == [
        "LIGHTNING_RECORDER=on: a recorder is left out: ZeroDivisionError: planted"
    ]


SPAWN = """
import sys
sys.path.insert(0, sys.argv[1])
import lightning.pytorch as L
from tests.callbacks.models import Classifier, LeaveGroup, digits
if __name__ == "__main__":
    options = {"strategy": "ddp_spawn", "devices": 2, "accelerator": "cpu", "callbacks": [LeaveGroup()]}
    trainer = L.Trainer(max_epochs=1, log_every_n_steps=1, **options)
    trainer.fit(Classifier(), digits(4))
    print([type(each).__name__ for each in trainer.callbacks])
"""


@pytest.mark.slow
def test_spawned_ranks_are_recorded(on: Path) -> None:
    """With ``ddp_spawn``, the recorders are added in the processes of the ranks, and their statistics are merged."""
    (on / "train.py").write_text(SPAWN)
    site = write_entry_points(on / "site")
    path = f"{site}{os.pathsep}{ROOT}"  # for the ranks
    codes, log = forks.run(on / "train.py", site, folder=on, variables={"PYTHONPATH": path})
    assert codes == [0], log
    series = open_recording(on / "lightning_logs")["version_0"]["activations"]
    assert series.steps == [0, 1]
    assert folders(on) == ["lightning_logs/version_0"]


def test_default_recorders_share_their_settings() -> None:
    """All recorders of the set have the given settings, and each call returns new ones."""
    sink, schedule, outputs = MemorySink(), Schedule(first_n_steps=3), Outputs(plots=False)
    made: list[Any] = default_recorders(
        "body.**",
        types="Linear",
        exclude="head",
        every_n_train_steps=100,
        schedule=schedule,
        outputs=outputs,
        compiled="skip",
        sinks=iter([sink]),
        strict=True,
    )
    assert [type(each) for each in made] == DEFAULT
    assert all((each._own_sinks, each.strict) == ([sink], True) for each in made)
    assert all(each.compiled == "skip" for each in made if type(each) is not StepWatch)
    for each in made[1:-1]:
        assert (each.sampling.every_n_train_steps, each.sampling.first_n_steps, each.outputs) == (100, 3, outputs)
        assert (each.selection.names, each.selection.exclude) == (("body.**",), ("head",))
    assert not {id(each) for each in default_recorders()} & {id(each) for each in made}


def test_default_recorders_record(tmp_path: Path) -> None:
    """The set of one line records every part of a model in one folder, each in its own file."""
    sink = MemorySink()
    train(default_root_dir=tmp_path, callbacks=default_recorders(sinks=[sink], strict=True))
    run = open_recording(tmp_path / "lightning_logs")["version_0"]
    assert list(run) == ["activations", "gradients", "parameters", "watch"]
    assert {tag.partition("/")[0] for tag in sink.scalars} >= {"activations", "gradients", "parameters"}


TRANSFORMERS = """
def train(folder, is_wrong=False):
    set_seed(1)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=16))
    rows = torch.randint(0, 40, (8, 8))
    about = {"per_device_train_batch_size": 4, "max_steps": 3, "save_steps": 2, "report_to": [], "use_cpu": True}
    data = [{"input_ids": each, "labels": torch.full((8,), -100) if is_wrong else each} for each in rows]
    Trainer(model, TrainingArguments(output_dir=folder, **about), train_dataset=data).train()
    torch.save(model.state_dict(), folder + "/model.pt")

import os
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from lightning_recorder.entry_point import see_other_trainers
train("plain")
for value, *given in ("on", "on"), ("off", "off"), ("check-only", "right"), ("check-only", "wrong", True):
    os.environ["LIGHTNING_RECORDER"] = value
    see_other_trainers()
    try:
        train(*given)
        end = "trained"
    except SystemExit as exit:
        end = exit.code
    print(f"\\nthe end of {given[0]}: {end}", flush=True)
"""

LOOP = """
import torch
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
net(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""


def program(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with ``lightning-recorder run``: a new interpreter, in which the imports take seconds."""
    (folder / "train.py").write_text(code)
    site = write_entry_points(folder / "site")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    line = [sys.executable, "-m", "lightning_recorder", "run", "train.py"]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def forked(code: str, folder: Path, value: str) -> tuple[int, str]:
    """Run a program as the commands do, with a value of the variable, in a fork; return its status and its output."""
    begin = "from lightning_recorder.entry_point import see_other_trainers\nsee_other_trainers()\n"
    (status,), log = forks.run("-c", begin + code, folder=folder, variables={"LIGHTNING_RECORDER": value})
    return status, log


@pytest.fixture(scope="module")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder and the output of programs of transformers, in one process, which imports it once."""
    folder = tmp_path_factory.mktemp("transformers")
    return folder, forks.output_of("-c", TRANSFORMERS, folder=folder)


@pytest.mark.slow
def test_the_trainer_of_transformers_is_recorded(transformers: tuple[Path, str]) -> None:
    """A program that does not mention this package has records, a graph and the same model to the bit."""
    folder, log = transformers
    assert ("the end of on: trained" in log, "the end of off: trained" in log) == (True, True), log
    assert folders(folder) == ["on/recordings/version_0"]
    run = open_recording(folder / "on/recordings/version_0").run
    assert run.graph is not None
    assert run["activations"].steps
    plain, *others = (torch.load(folder / each / "model.pt", weights_only=True) for each in ("plain", "on", "off"))
    assert all(torch.equal(value, other[name]) for other in others for name, value in plain.items())
    assert not list(folder.glob("on/checkpoint-*/recorder*"))


@pytest.mark.slow
def test_a_plain_loop_is_told_the_five_lines(tmp_path: Path) -> None:
    """At the end of a loop that nothing records, standard error has the lines that record it."""
    assert "with monitor.step(batch):" in program(LOOP, tmp_path).stderr


@pytest.mark.slow
def test_the_trainer_of_transformers_is_checked(transformers: tuple[Path, str]) -> None:
    """The questions are answered, and a program of transformers ends before its first step, with the right status."""
    folder, log = transformers
    right, wrong = log.partition("the end of off: trained")[2].partition("the end of right: 0\n")[::2]
    assert wrong.endswith("the end of wrong: 1\n"), log
    for is_wrong, said in (False, right), (True, wrong):
        assert ("WRONG      Does the loss use its target? All targets are ignored" in said) == is_wrong
        # Without targets, there is nothing to be seen.
        is_seen = "Does the past see the future? Predictions do not depend on later elements." in said
        assert is_seen != is_wrong
    assert {path.parent.name for path in folder.rglob("model.pt")} == {"plain", "on", "off"}


@pytest.mark.slow
def test_a_plain_loop_is_not_checked(tmp_path: Path) -> None:
    """A loop ends at its first step with status 2, so that CI does not take silence for a check that passed."""
    status, log = forked(LOOP + "print('trained')\n", tmp_path, CHECK_ONLY)
    assert status == 2, log
    assert "nothing is checked" in log
    assert "trained" not in log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "is_told"),
    [
        (LOOP, True),
        (LOOP.partition("optimizer")[0], False),
        ("import lightning_recorder.loops.monitor\n" + LOOP, False),
    ],
    ids=["loop", "no optimizer", "monitor"],
)
def test_programs_that_need_no_line_are_told_nothing(code: str, is_told: bool, tmp_path: Path) -> None:
    """Only a program with an optimizer and without a monitor has a message."""
    status, log = forked(code, tmp_path, "on")
    assert status == 0, log
    assert ("with monitor.step(batch):" in log, log == "") == (is_told, not is_told)
