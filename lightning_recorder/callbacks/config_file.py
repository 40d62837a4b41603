"""Recorders from a YAML file in the form of a LightningCLI configuration."""

from __future__ import annotations

import argparse
import contextlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are another package

from lightning_recorder.callbacks.base import RecorderCallback
from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.errors import ArgumentError, describe_error, describe_missing, did_you_mean
from lightning_recorder.signatures import check_names

__all__ = ["read_recorders"]

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
    """Return the callbacks of a file; a single one may be given without a list."""
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
        check_names(pkgutil.resolve_name(alone.recorder.class_path), given)
    config = parser.parse_object({"recorder": dict(entry)})
    outputs = given.get("outputs") or {}
    kind = pkgutil.resolve_name(config.recorder.class_path)
    if issubclass(kind, StatisticsCallback) and "dumps" not in outputs:
        # By default, dumps are beside the checkpoints, where the program may expect its own files only.
        config["recorder.init_args.outputs.dumps"] = False
    return config


def _make(parser: Any, config: Any) -> RecorderCallback:
    # jsonargparse 4.49 renamed the method.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    made: RecorderCallback = instantiate(config).recorder
    return made


def _in_one_line(error: BaseException) -> str:
    """Return the text of an error in one line, without the name of the argument that only this file uses."""
    return " ".join(str(error).split()).removeprefix('Parser key "recorder": ') or type(error).__name__
