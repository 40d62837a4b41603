"""``precision``: show the errors of weights, activations and gradients in narrow number formats, worst first."""

from __future__ import annotations

import functools
import json
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from lightning_recorder.commands.terminal import counted, number, printable, table
from lightning_recorder.dumps import read_metadata
from lightning_recorder.errors import DumpError, describe_missing
from lightning_recorder.recordings import DumpEntry, open_recording
from lightning_recorder.records.file import json_values
from lightning_recorder.reductions.number_formats import (
    NUMBER_FORMATS,
    FormatError,
    MeasuredTensor,
    Outlier,
    measure_formats,
)

__all__ = ["run"]

_MOST_ROWS = 14
_MOST_NAMES = 10
_MOST_OUTLIERS = 5
_STATES = ("state_dict", "model_state_dict", "model", "module")
"""The keys under which training programs usually save the parameters."""


class _Source(NamedTuple):
    """A tensor that is read only when needed."""

    name: str
    is_weight: bool
    load: Callable[[], Tensor]


@dataclass(frozen=True)
class _Row:
    name: str
    is_weight: bool
    shape: tuple[int, ...]
    found: MeasuredTensor

    def error(self, chosen: str) -> FormatError:
        return self.found.errors[chosen]


def run(arguments: Namespace, out: TextIO) -> int:
    """Print the tensors, those with the largest error in the chosen format first."""
    rows: list[_Row] = []
    left_out: dict[str, str] = {}
    for source in _sources(Path(arguments.path)):
        tensor = source.load()
        found = measure_formats(tensor, is_weight=source.is_weight)
        if isinstance(found, str):
            left_out[source.name] = found
        else:
            rows.append(_Row(source.name, source.is_weight, tuple(tensor.shape), found))
    if not rows:
        reasons = f": {_reasons(left_out)}" if left_out else ""
        raise DumpError(
            f"{arguments.path} has no floating-point tensor of two dimensions that can be measured{reasons}"
        )
    chosen = arguments.format
    rows.sort(key=lambda row: row.error(chosen).lower)
    least = (
        (14.0 if chosen in ("int4-32", "int4-128", "nvfp4") else 20.0) if arguments.below is None else arguments.below
    )
    worst = [row for row in rows if row.error(chosen).lower < least]
    if arguments.json:
        plain = {"format": chosen, "below": least, "keep": [row.name for row in worst]}
        about = {**plain, "tensors": [_about(row) for row in rows], "left_out": left_out}
        out.write(json.dumps(about, indent=1) + "\n")
        return 0
    lines = [_sentence(rows, worst, chosen, least), "", *_table(rows, chosen, is_long=arguments.all)]
    lines += _outlier_lines(rows, is_long=arguments.all)
    if left_out:
        lines += ["", f"not measured: {_reasons(left_out)}"]
    out.write("\n".join(lines) + "\n")
    return 0


def _sources(path: Path) -> Iterator[_Source]:
    if path.is_dir():
        yield from _of_runs(path)
    elif not path.exists():
        raise DumpError(f"nothing can be opened at {str(path)!r}: {describe_missing(path)}")
    elif path.suffix == ".safetensors":
        yield from _of_safetensors(path)
    else:
        for name, tensor in _state(path).items():
            yield _Source(name, True, tensor.detach)


def _of_runs(path: Path) -> Iterator[_Source]:
    """Yield the tensors of the latest dump of each run."""
    runs = open_recording(path).runs
    latest = {name: [dump for dump in run.dumps if dump.kind == "tensors"][-1:] for name, run in runs.items()}
    if not any(latest.values()):
        checkpoints = sorted(path.glob("checkpoints/*.ckpt"), key=lambda each: each.stat().st_mtime)
        known = f", such as {checkpoints[-1]}" if checkpoints else ""
        give = f"give a checkpoint (.ckpt, .pt, .safetensors){known}"
        raise DumpError(f"{path} has no tensors: record some with TensorDumper, or {give}")
    for name, dumps in latest.items():
        for dump in dumps:
            yield from _of_dump(dump, f"{name}: " if len(runs) > 1 else "")


def _of_dump(dump: DumpEntry, prefix: str = "") -> Iterator[_Source]:
    for name in dump.names:
        yield _Source(prefix + name, False, functools.partial(dump.load, name))


def _of_safetensors(path: Path) -> Iterator[_Source]:
    from safetensors import SafetensorError, safe_open

    about = read_metadata(path) or {}
    if about.get("format", "").startswith("lightning_recorder."):
        if about.get("group", "tensors") != "tensors":
            raise DumpError(f"{path} has statistics: give a dump of TensorDumper or a checkpoint")
        yield from _of_dump(DumpEntry(path, {"kind": "tensors"}))
        return
    try:
        with safe_open(str(path), framework="pt") as file:
            for name in list(file.keys()):
                yield _Source(name, True, functools.partial(_tensor, path, file, name))
    except (SafetensorError, OSError) as error:
        raise DumpError(f"{path} is not a readable safetensors file: {error}") from error


def _tensor(path: Path, file: Any, name: str) -> Tensor:
    from safetensors import SafetensorError

    try:
        found: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError) as error:  # such as a dtype that this version of torch lacks
        raise DumpError(f"{path} has a tensor {name!r} that cannot be read: {error}") from error
    return found


def _state(path: Path) -> dict[str, Tensor]:
    """Return the parameters and buffers in a file of ``torch.save``."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # with an arbitrary file, the unpickler can raise anything
        what = str(error).partition("\n")[0].partition(". ")[0]
        raise DumpError(
            f"{path} cannot be read by torch.load(weights_only=True): {what}. If it is a whole checkpoint with other "
            "objects, save its parameters with torch.save(model.state_dict(), path)"
        ) from error
    for _ in range(2):  # the parameters may be nested one level deeper
        if isinstance(saved, Mapping):
            tensors = {str(name): value for name, value in saved.items() if isinstance(value, Tensor)}
            inner = next((saved[key] for key in _STATES if isinstance(saved.get(key), Mapping)), None)
            if inner is None and tensors:
                return tensors
            saved = inner
    raise DumpError(f"{path} has no parameters: neither tensors by name nor one of the keys {', '.join(_STATES)}")


def _about(row: _Row) -> dict[str, Any]:
    errors = {name: json_values(error._asdict()) for name, error in row.found.errors.items()}
    about = {"name": row.name, "kind": _kind(row), "shape": row.shape, "errors": errors}
    return {**about, "channels": _places(row.found.channels), "tokens": _places(row.found.tokens)}


def _places(outliers: list[Outlier]) -> list[dict[str, Any]]:
    return [each._asdict() for each in outliers]


def _kind(row: _Row) -> str:
    if row.is_weight:
        return "weight"
    return "gradient" if ".grad" in row.name.rpartition("/")[2] else "activation"


def _sentence(rows: list[_Row], worst: list[_Row], chosen: str, least: float) -> str:
    all_of = f"{len(worst)} of {counted(len(rows), 'tensor')}"
    if not worst:
        first = rows[0]
        decibels = f"{first.error(chosen).lower:.1f} dB"
        return f"{all_of} fall below {number(least)} dB in {chosen}; the worst, {printable(first.name)}, has {decibels}"
    names = ", ".join(printable(row.name) for row in worst[:_MOST_NAMES])
    more = len(worst) - _MOST_NAMES
    lost = f"lose more than {100 * 10 ** (-least / 20):.3g} % of their size (below {number(least)} dB in {chosen})"
    return f"{all_of} {lost}: keep these in bfloat16: {names}" + (f" and {more} more" if more > 0 else "")


def _table(rows: list[_Row], chosen: str, *, is_long: bool) -> list[str]:
    shown = rows if is_long else rows[:_MOST_ROWS]
    others = [name for name in NUMBER_FORMATS if name != chosen]
    cells = [["tensor", "kind", "shape", f"{chosen} dB", "in channels", "clipped", "flushed", *others]]
    for row in shown:
        error = row.error(chosen)
        about = [
            printable(row.name),
            _kind(row),
            "x".join(map(str, row.shape)),
            f"{error.snr:.1f}",
            f"{error.channel_snr:.1f}",
        ]
        shares = [_share(error.clipped), _share(error.flushed)]
        cells.append([*about, *shares, *(f"{row.error(name).lower:.1f}" for name in others)])
    hidden = len(rows) - len(shown)
    more = [f"and {counted(hidden, 'more tensor')}; --all prints them"] if hidden else []
    return [*table(cells, right=range(3, len(cells[0]))), *more]


def _share(share: float) -> str:
    return f"{100 * share:.2g} %" if share else "0"


def _outlier_lines(rows: list[_Row], *, is_long: bool) -> list[str]:
    lines = []
    for row in rows:
        for noun, outliers in (("channel", row.found.channels), ("token", row.found.tokens)):
            if outliers:
                first = ", ".join(f"{_place(each)} ({each.times:.0f} x)" for each in outliers[:_MOST_OUTLIERS])
                more = f" and {len(outliers) - _MOST_OUTLIERS} more" if len(outliers) > _MOST_OUTLIERS else ""
                lines.append(f"  {printable(row.name)}: {counted(len(outliers), noun)}: {first}{more}")
    if not lines:
        return []
    shown = lines if is_long else lines[:_MOST_ROWS]
    hidden = len(lines) - len(shown)
    rest = [f"  and {counted(hidden, 'more line')}; --all prints them"] if hidden else []
    return ["", "far above the rest (largest magnitude, in medians of the others):", *shown, *rest]


def _place(outlier: Outlier) -> str:
    return str(outlier.place[0]) if len(outlier.place) == 1 else str(list(outlier.place))


def _reasons(left_out: Mapping[str, str]) -> str:
    """Count the left-out tensors by reason; name those with non-finite values."""
    parts = []
    for reason, count in Counter(left_out.values()).most_common():
        names = [printable(name) for name, why in left_out.items() if why == reason][:_MOST_NAMES]
        is_common = reason in ("fewer than two dimensions", "not floating-point")
        parts.append(f"{reason}: {count}" + ("" if is_common else f" ({', '.join(names)})"))
    return "; ".join(parts)
