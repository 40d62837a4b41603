"""The folder of a finding: the state before its step, and a script that runs the step again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_recorder.disk import attempt, readable_size
from lightning_recorder.dumps import can_hold, file_bytes, read_tensors, write_tensors
from lightning_recorder.errors import DumpError, describe_error
from lightning_recorder.insight import Finding, findings_to_json
from lightning_recorder.internals.random_states import RandomStates
from lightning_recorder.records.file import STATES
from lightning_recorder.temporary import write_bytes
from lightning_recorder.untrusted import is_finite, is_whole, read_json
from lightning_recorder.watch.kept import KeptBatch

__all__ = ["CHECKPOINT", "Incident", "read_incident", "write_finding", "write_incident"]

_FORMAT = "lightning_recorder.incident/1"
_ABOUT = "incident.json"
_BATCH = "batch.safetensors"
_RANDOM = "random.safetensors"
_PARAMETERS, CHECKPOINT = STATES
FINDING = "finding.json"
"""The file with the finding, in the format of ``findings.json``."""

_SCRIPT = '''"""Runs step {step} again and prints the origin of its bad value: python replay.py [CHECKPOINT]

Without an argument, the parameters are read from the folder of this script: from {parameters!r}, which has those
from before the step, or else from {checkpoint!r}.
"""

import sys
from pathlib import Path

from lightning_recorder.callbacks.reproduce import make_model, need_parameters, reproduce
from lightning_recorder.errors import RecorderError

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    checkpoint = sys.argv[1] if len(sys.argv) > 1 else None
    try:
        need_parameters(HERE, checkpoint)
        # This imports the program: keep its training under if __name__ == "__main__".
        model = make_model(HERE)  # replace this line if the model needs other arguments
        reproduce(HERE, model, checkpoint=checkpoint)
    except RecorderError as error:
        sys.exit(f"error: {{error}}")
'''


@dataclass(frozen=True)
class Incident:
    """The contents of the folder of a finding."""

    about: Mapping[str, Any]  # the step, the batch index, the class of the model, and further settings of the run
    batch: Any
    random: RandomStates  # the states of the random number generators before the batch
    # the parameters and buffers from before the step, by name; ``None`` if they were not written
    state: dict[str, Tensor] | None


def write_finding(folder: Path, finding: Finding) -> None:
    """Write a finding to its folder."""
    _write_text(folder / FINDING, json.dumps(findings_to_json([finding]), indent=1))


def write_incident(
    folder: Path,
    about: Mapping[str, Any],
    kept: KeptBatch,
    *,
    state: Mapping[str, Tensor],
    records: Mapping[str, Any],
    graph: str,
    max_bytes: int,
    save_batch: bool,
    has_script: bool,
) -> None:
    """Write the state before the step of a finding. Raise OSError if a file cannot be written.

    ``has_script`` is True if :func:`~lightning_recorder.callbacks.reproduce.reproduce` can run the step again.
    """
    left_out: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    structure = None
    if not save_batch:
        left_out["batch"] = "save_batch=False"
    elif kept.is_changed:
        left_out["batch"] = "the step changed it in place"
    else:
        try:
            structure = _plain(kept.batch, "batch", tensors)
        except TypeError as error:
            left_out["batch"], tensors = str(error), {}
    for name, file, values in (("batch", _BATCH, tensors), ("parameters", _PARAMETERS, state)):
        if values and (size := file_bytes(values, {})) > max_bytes:
            left_out[name] = f"{readable_size(size)} are more than max_bytes={max_bytes}"
        elif values:
            _write_tensors(folder / file, values)
    _write_tensors(folder / _RANDOM, kept.random.tensors())
    data = {
        "format": _FORMAT,
        **about,
        "random": kept.random.numbers(),
        "batch": None if "batch" in left_out else structure,
        "left_out": left_out,
    }
    _write_text(folder / _ABOUT, json.dumps(data, indent=1))
    if records:
        _write_text(folder / "records.json", json.dumps(_finite(records), indent=1))
    if graph:
        _write_text(folder / "graph.txt", graph)
    if has_script:
        script = _SCRIPT.format(step=kept.step, parameters=_PARAMETERS, checkpoint=CHECKPOINT)
        _write_text(folder / "replay.py", script.rstrip("\n"))


def read_incident(folder: Path) -> Incident:
    """Read the folder of a finding. Nothing in it is executed.

    Raises:
        DumpError: If a file is damaged, or the batch was not written.
        FileNotFoundError: If there is no such folder.
    """
    about = read_json(folder / _ABOUT)
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        raise DumpError(f"{folder / _ABOUT} was not written by lightning_recorder")
    left_out = about.get("left_out")
    if isinstance(left_out, dict) and "batch" in left_out:
        raise DumpError(f"{folder} has no batch: {left_out['batch']}")
    try:
        _check(about)
        return _incident(folder, about)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        if isinstance(error, DumpError):
            raise
        raise DumpError(f"{folder / _ABOUT} is damaged: {describe_error(error)}") from error


def _incident(folder: Path, about: dict[str, Any]) -> Incident:
    path = folder / _BATCH
    tensors = read_tensors(path, _FORMAT)[0] if path.exists() else {}
    states = read_tensors(folder / _RANDOM, _FORMAT)[0]
    path = folder / _PARAMETERS
    state = read_tensors(path, _FORMAT)[0] if path.exists() else None
    return Incident(about, _rebuilt(about["batch"], tensors), RandomStates.of(states, about["random"]), state)


def _check(about: Mapping[str, Any]) -> None:
    """Raise an error if ``incident.json`` does not have the format that :func:`write_incident` writes."""
    if not all(isinstance(about["model"][name], str) for name in ("module", "name")):
        raise TypeError("the class of the model is not named")
    if not isinstance(about["model"]["hparams"], dict) or not isinstance(about["model"]["file"], (str, type(None))):
        raise TypeError("the model is described wrongly")
    numbers = ("step", "epoch", "batch_idx", "global_step", "accumulate_grad_batches")
    if not all(is_whole(about[name]) and about[name] >= 0 for name in numbers):
        raise TypeError("a number is not whole")
    if not all(isinstance(about[name], str) for name in ("precision", "accelerator")):
        raise TypeError("a setting of the trainer is not a string")
    if not isinstance(about["eval"], list) or not all(isinstance(name, str) for name in about["eval"]):
        raise TypeError("the modules in eval mode are not named")
    counters = about.get("counters", {})
    if not all(map(is_finite, (value for values in counters.values() for value in values.values()))):
        raise TypeError("a counter is not a number")


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    own = {name: each.detach() for name, each in tensors.items()}
    _attempt(path, file_bytes(own, {}), partial(write_tensors, path, own, {"format": _FORMAT}))


def _write_text(path: Path, text: str) -> None:
    data = (text + "\n").encode("utf-8", "replace")
    attempt(path, len(data), partial(write_bytes, path, data))


def _attempt(path: Path, nbytes: int, write: Callable[[], object]) -> None:
    def write_in_folder() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write()

    attempt(path, nbytes, write_in_folder)


def _plain(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a batch as JSON values, and add its tensors to ``tensors`` by their paths.

    Raises:
        TypeError: If the batch contains an unsupported object.
    """
    if isinstance(value, Tensor):
        if not can_hold(value.dtype) or value.is_sparse:
            raise TypeError(f"{path} is a tensor of {value.dtype} that safetensors cannot hold")
        tensors[path] = value
        return {"tensor": path}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": repr(value) if isinstance(value, float) and not math.isfinite(value) else value}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"{path} has keys that are no strings")
        return {"dict": {key: _plain(each, f"{path}.{key}", tensors) for key, each in value.items()}}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_plain(each, f"{path}[{index}]", tensors) for index, each in enumerate(value)]}
    raise TypeError(f"{path} is a {type(value).__name__}, which cannot be written as JSON")


def _rebuilt(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    ((kind, value),) = data.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _rebuilt(each, tensors) for key, each in value.items()}
    if kind in ("list", "tuple"):
        found = [_rebuilt(each, tensors) for each in value]
        return found if kind == "list" else tuple(found)
    return value


def _finite(value: Any) -> Any:
    """Return JSON values with NaN and infinities as strings."""
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
