"""Recorders that the variable ``LIGHTNING_RECORDER`` adds to the trainers of an unmodified program."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_recorder.callbacks.base import RecorderCallback
from lightning_recorder.callbacks.check import Check
from lightning_recorder.callbacks.config_file import read_recorders
from lightning_recorder.callbacks.default_set import default_recorders
from lightning_recorder.callbacks.guard import SET_BY_LIGHTNING
from lightning_recorder.callbacks.labels import check_names
from lightning_recorder.callbacks.lightning import Callback, LightningModule, Trainer, rank_zero_info
from lightning_recorder.callbacks.output_options import Outputs
from lightning_recorder.errors import ArgumentError, describe_error, did_you_mean, warn
from lightning_recorder.internals.rendezvous import missing_ranks
from lightning_recorder.statistics import Exchange
from lightning_recorder.switch import CHECK, CHECK_ONLY, VARIABLE, is_default_set, is_switched_off, setting

__all__ = ["AttachRecorders", "is_set_everywhere", "new_recorders", "say"]

_SUFFIXES = (".yaml", ".yml")
_TIMEOUT_S = 30.0  # Lightning has just synchronized the processes

# A program may make thousands of trainers, so each message is given once.
_said: set[str] = set()


class AttachRecorders(Callback):
    """Adds the recorders that ``LIGHTNING_RECORDER`` asks for to a trainer at the start of its first run.

    The recorders are not added when the trainer is made, since only then is it known which recorders the program and
    the model have themselves.

    Lightning appends this callback to the list that the program gave the trainer. It removes itself from that list when
    a run starts, so that a program which uses its list again, or saves it, does not find a callback of this package.
    """

    def __init__(self) -> None:
        self._given = _list_to_extend()

    def __setattr__(self, name: str, value: object) -> None:
        if name not in SET_BY_LIGHTNING:  # they would keep the model alive
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

    Lightning passes nothing to a factory, so it is read from the frame of the caller.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "on_trainer_init":
        frame = frame.f_back
    connector = None if frame is None else frame.f_locals.get("self")
    found = getattr(getattr(connector, "trainer", None), "callbacks", None)
    return found if isinstance(found, list) else None


def _attach(trainer: Trainer, after: AttachRecorders) -> None:
    """Insert new recorders into the callbacks of a trainer, behind another callback.

    Lightning iterates over this list in ``setup``, so it also calls the hook of the inserted recorders.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set in Trainer.__init__
    present = [each for each in callbacks if isinstance(each, RecorderCallback)]
    if any(each._is_from_environment for each in present) or not setting() or is_switched_off():
        return
    is_check = setting().lower() in (CHECK, CHECK_ONLY)
    for flag in ("fast_dev_run", "barebones"):
        if getattr(trainer, flag) and not is_check:
            say(rank_zero_info, f"Trainer({flag}=True) is not recorded")
            return
    if not is_set_everywhere(trainer.world_size):
        return
    made = _new_checks(callbacks) if is_check else new_recorders(present)
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

    The recorders use collectives. If only some processes had recorders, these would wait for the others forever.
    """
    if world_size == 1 or not Exchange.is_needed():
        return True
    if _agreements.has_failed:  # the environment of the other processes does not change
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


def _new_checks(callbacks: list[Any]) -> list[Callback]:
    """Return a new check, unless the program has one, which is then told to end the program if that is asked for."""
    only = setting().lower() == CHECK_ONLY
    own = [each for each in callbacks if isinstance(each, Check)]
    for each in own:
        each.only |= only
    made = [] if own else [Check(only=only)]
    for each in made:
        each._is_from_environment = True
    return list(made)


def new_recorders(present: list[RecorderCallback]) -> list[RecorderCallback]:
    """Return new recorders, except those that would repeat or clash with one that the program has."""
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
    """Read a configuration file, again only if it or the current folder has changed."""
    return read_recorders(path)


def say(show: Callable[[str], object], message: str) -> None:
    """Show a message with the variable and its value, once per process."""
    message = f"{VARIABLE}={setting()}: {message}"
    if message not in _said:
        _said.add(message)
        show(message)
