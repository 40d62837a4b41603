"""Recorders that the variable ``LIGHTNING_RECORDER`` adds to the trainers of an unmodified program."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import pkgutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are another package
from typing_extensions import override

from lightning_recorder.callbacks.base import RecorderCallback
from lightning_recorder.callbacks.check import Check
from lightning_recorder.callbacks.default_set import default_recorders
from lightning_recorder.callbacks.guard import SET_BY_LIGHTNING
from lightning_recorder.callbacks.labels import check_names
from lightning_recorder.callbacks.lightning import Callback, LightningModule, Trainer, rank_zero_info
from lightning_recorder.callbacks.output_options import Outputs
from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.errors import ArgumentError, describe_error, describe_missing, did_you_mean, warn
from lightning_recorder.internals.rendezvous import missing_ranks
from lightning_recorder.signatures import check_names as check_arguments
from lightning_recorder.statistics import Exchange
from lightning_recorder.switch import CHECK_ONLY, VARIABLE, is_check, is_default_set, is_switched_off, setting

__all__ = ["AttachRecorders", "is_set_everywhere", "new_checks", "new_recorders", "say"]

_SUFFIXES = (".yaml", ".yml")
_TIMEOUT_S = 30.0  # no process is far behind, because Lightning has just synchronized them

# A program may make thousands of trainers, so each message is given once.
_said: set[str] = set()


class AttachRecorders(Callback):
    """Adds the recorders that ``LIGHTNING_RECORDER`` asks for to a trainer at the start of its first run.

    The recorders are not added at the construction of the trainer: the recorders of the program and of the model are
    known only when the run starts.

    Lightning appends this callback to the list that the program gave the trainer. This callback removes itself from
    that list when a run starts, so that a program which uses its list again, or saves it, does not find a callback of
    this package.
    """

    def __init__(self) -> None:
        self._given = _list_to_extend()

    def __setattr__(self, name: str, value: object) -> None:
        if name not in SET_BY_LIGHTNING:  # these attributes would keep the model alive
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[type[AttachRecorders], tuple[()]]:
        return AttachRecorders, ()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        given, self._given = self._given, None
        try:
            if given is not None and given is not trainer.callbacks:  # type: ignore[attr-defined]  # set in Trainer.__init__
                given[:] = [each for each in given if each is not self]
            _attach(trainer, self)
        except Exception as error:  # noqa: BLE001 - the program must not end because of a recorder
            say(warn, f"nothing is recorded, {describe_error(error)}")


def _list_to_extend() -> list[Any] | None:
    """Return the list of callbacks that a Trainer under construction extends, or ``None`` if it cannot be found.

    Lightning passes nothing to a factory, so the list is read from the frame of the caller.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "on_trainer_init":
        frame = frame.f_back
    connector = None if frame is None else frame.f_locals.get("self")
    found = getattr(getattr(connector, "trainer", None), "callbacks", None)
    return found if isinstance(found, list) else None


def _attach(trainer: Trainer, after: AttachRecorders) -> None:
    """Insert new recorders into the callbacks of a trainer, directly after another callback.

    Lightning iterates over this list in ``setup``, so it also calls ``setup`` of the inserted recorders.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set in Trainer.__init__
    present = [each for each in callbacks if isinstance(each, RecorderCallback)]
    if any(each._is_from_environment for each in present) or not setting() or is_switched_off():
        return
    for flag in ("fast_dev_run", "barebones"):
        if getattr(trainer, flag) and not is_check():
            say(rank_zero_info, f"Trainer({flag}=True) is not recorded")
            return
    if not is_set_everywhere(trainer.world_size):
        return
    made = new_checks(callbacks) if is_check() else new_recorders(present)
    place = next(index for index, each in enumerate(callbacks) if each is after) + 1
    callbacks[place:place] = list(made)


@dataclass
class _Agreements:
    """The agreements between the processes of a training."""

    number: int = 0
    has_failed: bool = False


_agreements = _Agreements()


def is_set_everywhere(world_size: int) -> bool:
    """Return True if all processes have the variable with the same value and the same configuration file.

    The recorders use collectives. If only some processes had recorders, these processes would wait for the others
    forever.
    """
    if world_size == 1 or not Exchange.is_needed():
        return True
    if _agreements.has_failed:  # not tried again, because the environment of the other processes does not change
        return False
    _agreements.number += 1
    path = Path(setting()).expanduser()
    content = path.read_bytes() if path.is_file() else b""
    digest = zlib.crc32(content, zlib.crc32(setting().encode()))
    missing = missing_ranks(f"lightning_recorder/{_agreements.number}/{digest}", timeout_s=_TIMEOUT_S)
    _agreements.has_failed = missing != []
    if missing:
        ranks = ", ".join(map(str, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        say(warn, f"nothing is recorded, since rank {ranks} lacks this variable or has another value of it")
    return not _agreements.has_failed


def new_checks(callbacks: list[Any]) -> list[Check]:
    """Return a new check, unless the program has one. The check ends the program if the variable asks for this."""
    only = setting().lower() == CHECK_ONLY
    own = [each for each in callbacks if isinstance(each, Check)]
    for each in own:
        each.only |= only
    made = [] if own else [Check(only=only)]
    for each in made:
        each._is_from_environment = True
    return made


def new_recorders(present: list[RecorderCallback]) -> list[RecorderCallback]:
    """Return new recorders, except those that would duplicate or conflict with a recorder of the program."""
    is_default = is_default_set(setting())
    found: list[RecorderCallback] = []
    for make in [None] if is_default else _configured(setting()):
        try:
            made = default_recorders(outputs=Outputs(dumps=False)) if make is None else [make()]
            for each in made:
                each._is_from_environment = True
                if any(each.group == other.group and (is_default or each.name == other.name) for other in present):
                    continue
                check_names(each, [*present, *found, each])
                found.append(each)
        except Exception as error:  # noqa: BLE001 - a class of the user may raise anything
            say(warn, f"a recorder is left out: {describe_error(error)}")
    return found


def _configured(value: str) -> list[Callable[[], RecorderCallback]]:
    """Return the functions that make the recorders of a configuration file."""
    path = Path(value).expanduser()
    if path.suffix.lower() not in _SUFFIXES and not path.is_file():
        hint = did_you_mean(value, ("on", "off", "check"))
        say(warn, f"nothing is recorded, the value must be on, off, check or the path of a YAML file{hint}")
        return []
    try:
        makers, left_out = _read(path, path.stat().st_mtime_ns if path.is_file() else 0, Path.cwd())
    except ArgumentError as error:
        say(warn, f"nothing is recorded, {error}")
        return []
    for message in left_out:
        say(warn, message)
    return makers


@lru_cache(maxsize=1)
def _read(path: Path, mtime_ns: int, folder: Path) -> tuple[list[Callable[[], RecorderCallback]], list[str]]:
    """Read a configuration file. The result is cached until the file or the current folder changes."""
    return read_recorders(path)


def say(show: Callable[[str], object], message: str) -> None:
    """Show a message with the variable and its value, once per process."""
    message = f"{VARIABLE}={setting()}: {message}"
    if message not in _said:
        _said.add(message)
        show(message)


_KEYS = ("class_path", "init_args", "dict_kwargs")
_FORM = "write a list under 'callbacks:', as for LightningCLI, such as '- class_path: lightning_recorder.GraphRecorder'"


def read_recorders(path: Path) -> tuple[list[Callable[[], RecorderCallback]], list[str]]:
    """Read the callbacks of a configuration file.

    The list of callbacks is the whole file, or is under ``callbacks`` or ``trainer.callbacks``. All other keys are
    ignored, so that the file may be the configuration of a LightningCLI.

    Returns:
        A function for each recorder that returns a new one, and a message for each entry that is left out.

    Raises:
        ArgumentError: If the file cannot be read or has no list of callbacks, or if jsonargparse is not installed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ArgumentError(f"{describe_missing(path)}. The current folder is {str(Path.cwd())!r}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"the file cannot be read: {describe_error(error)}") from error
    try:
        entries = _entries(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ArgumentError(f"the file is not valid YAML: {_in_one_line(error)}") from error
    parser = _parser()
    found = [_maker(parser, number, entry) for number, entry in enumerate(entries, 1)]
    return [each for each in found if not isinstance(each, str)], [each for each in found if isinstance(each, str)]


def _entries(content: Any) -> list[Any]:
    """Return the list of callbacks in a configuration file. A single callback may be given without a list."""
    found = content
    for key in ("trainer", "callbacks"):
        if isinstance(found, Mapping) and key in found:
            found = found[key]
    if isinstance(found, (str, Mapping)) and found is not content:
        found = [found]
    if not isinstance(found, list) or not found:
        raise ArgumentError(f"the file has no list of callbacks: {_FORM}")
    return found


def _parser() -> Any:
    try:
        from jsonargparse import ArgumentParser
    except ImportError as error:
        raise ArgumentError("a file of recorders needs jsonargparse: pip install 'lightning-recorder[yaml]'") from error
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--recorder", type=RecorderCallback)
    return parser


def _maker(parser: Any, number: int, entry: Any) -> Callable[[], RecorderCallback] | str:
    """Return a function that makes new callbacks of an entry, or a message if the entry is wrong."""
    try:
        return partial(_make, parser, _config(parser, entry))
    except Exception as error:  # noqa: BLE001 - importing a class of the user may raise anything
        return f"callback {number} is left out: {_in_one_line(error)}"


def _config(parser: Any, entry: Any) -> Any:
    """Return the checked configuration of an entry.

    Raises:
        ArgumentError: If the form of the entry is wrong. jsonargparse raises other errors for wrong values.
    """
    if isinstance(entry, str):
        entry = {"class_path": entry}
    if not isinstance(entry, Mapping) or "class_path" not in entry:
        raise ArgumentError(f"it has no class_path, got {entry!r}: {_FORM}")
    unknown = [key for key in entry if key not in _KEYS]
    if unknown:
        raise ArgumentError(f"it has no key {unknown[0]!r}{did_you_mean(unknown[0], _KEYS)}")
    given = entry.get("init_args") or {}
    with contextlib.suppress(argparse.ArgumentError):  # raised again below, where a required argument is known
        alone = parser.parse_object({"recorder": {"class_path": entry["class_path"]}})
        check_arguments(pkgutil.resolve_name(alone.recorder.class_path), given)
    config = parser.parse_object({"recorder": dict(entry)})
    outputs = given.get("outputs") or {}
    kind = pkgutil.resolve_name(config.recorder.class_path)
    if issubclass(kind, StatisticsCallback) and "dumps" not in outputs:
        # By default, dumps are written beside the checkpoints, where the program may expect only its own files. So
        # write none.
        config["recorder.init_args.outputs.dumps"] = False
    return config


def _make(parser: Any, config: Any) -> RecorderCallback:
    # jsonargparse 4.49 renamed the method.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    made: RecorderCallback = instantiate(config).recorder
    return made


def _in_one_line(error: BaseException) -> str:
    """Return the text of an error in one line, without the argument name that only this module uses."""
    return " ".join(str(error).split()).removeprefix('Parser key "recorder": ') or type(error).__name__
