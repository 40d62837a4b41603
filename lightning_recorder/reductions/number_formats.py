"""Errors of tensors in narrow number formats with scales, and outlier channels and tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from lightning_recorder.errors import check_some
from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.precision import FORMATS
from lightning_recorder.reductions.values import Values, finite_or_zero

__all__ = [
    "NUMBER_FORMATS",
    "FormatError",
    "FormatErrors",
    "MassiveValues",
    "MeasuredTensor",
    "Outlier",
    "measure_formats",
    "why_not_measured",
]

_CHUNK = 2**21  # values converted at a time, in float64
_FAR_ABOVE = 20.0
_SAMPLED = 2**13  # values per tensor converted for a record
_GROUP = 128  # neighboring values of a row sampled together; a multiple of all block sizes
_ROUNDS = 4
_ROUNDING = 1 + 1e-6  # after rounding, the largest value divided by its own scale may exceed the limit


class FormatError(NamedTuple):
    """The error of a tensor in one format."""

    snr: float
    """The signal-to-noise ratio in dB, ``10 log10(sum x^2 / sum error^2)``; infinity without an error."""
    channel_snr: float
    """The median signal-to-noise ratio of the channels in dB. In ``snr``, one large value can hide all other errors."""
    clipped: float
    """The fraction of the nonzero values that are beyond the largest number of the format."""
    flushed: float
    """The fraction of the nonzero values that become zero."""

    @property
    def lower(self) -> float:
        """The lower of the two ratios."""
        return min(self.snr, self.channel_snr)


class Outlier(NamedTuple):
    """A channel or token with much larger values than the others."""

    place: tuple[int, ...]
    """The index of the channel, or the indices of the token in all dimensions but the last."""
    times: float
    """The largest magnitude of this channel or token, divided by the median of the largest magnitudes of the others."""


@dataclass(frozen=True)
class MeasuredTensor:
    """The errors of a tensor by format, and the outliers of the tensor, largest first."""

    errors: dict[str, FormatError]
    channels: list[Outlier]
    tokens: list[Outlier]


class _Peaks(NamedTuple):
    """The largest magnitudes of a tensor and of its channels."""

    tensor: Tensor
    """The largest magnitude of the whole tensor, 0-d."""
    channels: Tensor
    """The largest magnitude of each channel: ``[rows of the chunk, 1]`` of a weight, ``[1, columns]`` of others."""


def why_not_measured(tensor: Tensor) -> str:
    """Return the reason why a tensor of this dtype and shape cannot be measured, or an empty string."""
    if tensor.is_quantized or tensor.layout != torch.strided:
        return "quantized" if tensor.is_quantized else "sparse"
    if tensor.is_complex():
        return "complex"
    if not tensor.is_floating_point():
        return "not floating-point"
    if str(tensor.dtype).removeprefix("torch.") not in ("float32", "float64", *FORMATS):
        return "quantized"  # a dtype for packed values or for the scales of blocks
    if tensor.dim() < 2:
        return "fewer than two dimensions"
    if tensor.is_meta:
        return "without values"
    return "" if tensor.numel() else "empty"


def measure_formats(tensor: Tensor, *, is_weight: bool) -> MeasuredTensor | str:
    """Measure the error of a tensor in each of :data:`NUMBER_FORMATS`.

    A weight is ``[output channels, …]``. Other tensors with two or three dimensions are ``[…, tokens, channels]``, and
    with more dimensions ``[batch, channels, …]``. Blocks and groups lie along the inputs of a weight, and along the
    channels of other tensors. The last block of a row may be shorter.

    The formats are those of torchao: integers are symmetric, with the scale ``max / 127.5`` or ``max / 7.5``; float8
    has the scale ``max / largest number``; the scale of MXFP8 is ``2 ** (floor(log2(max)) - 8)``, as in the OCP
    Microscaling Formats specification 1.0; a block of NVFP4 has the scale ``max / 6`` in e4m3, relative to the scale
    ``max / 6 / 448`` of the tensor, and at least the smallest normal number of e4m3.

    A channel or token is an outlier if its largest magnitude is more than 20 times the median of the largest magnitudes
    of the others. Only tensors with two or three dimensions that are not weights have tokens.

    Returns:
        The errors and outliers, or the reason why the tensor cannot be measured, such as ``"NaN or infinity"``.
    """
    if reason := why_not_measured(tensor):
        return reason
    has_tokens = not is_weight and tensor.dim() <= 3
    ordered = tensor.detach() if is_weight or has_tokens else tensor.detach().movedim(1, -1)
    matrix = ordered.flatten(1) if is_weight else ordered.flatten(0, -2)
    row_peaks, column_peaks = _peaks(matrix)
    peak = column_peaks.max()
    if reason := _why_out_of_range(float(peak)):
        return reason
    within = 1 if is_weight else 0  # the matrix dimension along which a channel extends
    signal: list[Tensor] = []  # the energy of each channel, per chunk
    noise: dict[str, list[Tensor]] = {name: [] for name in NUMBER_FORMATS}
    counts = {name: torch.zeros(3, dtype=torch.int64, device=matrix.device) for name in NUMBER_FORMATS}
    for start, chunk in _chunks(matrix):
        signal.append(chunk.square().sum(within))
        rows = row_peaks[start : start + len(chunk), None]
        peaks = _Peaks(peak, rows if is_weight else column_peaks[None])
        known = chunk != 0
        for name, convert in NUMBER_FORMATS.items():
            converted, clipped = convert(chunk, peaks)
            noise[name].append((chunk - converted).square().sum(within))
            counts[name] += torch.stack([clipped.sum(), (known & (converted == 0)).sum(), known.sum()])
    join = torch.cat if is_weight else _total
    energy = join(signal)
    return MeasuredTensor(
        {name: _error(energy, join(noise[name]), *counts[name].tolist()) for name in NUMBER_FORMATS},
        _outliers(row_peaks if is_weight else column_peaks, ()),
        _outliers(row_peaks, tuple(tensor.shape[:-1])) if has_tokens else [],
    )


def _chunks(matrix: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield chunks of rows in float64, each with the index of its first row."""
    step = max(1, _CHUNK // matrix.shape[1])
    for start in range(0, len(matrix), step):
        yield start, matrix[start : start + step].double()


def _peaks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude of each row and of each column; NaN for a row or column with a NaN."""
    sizes = [(chunk.abs().amax(1), chunk.abs().amax(0)) for _, chunk in _chunks(matrix)]
    return torch.cat([rows for rows, _ in sizes]), torch.stack([columns for _, columns in sizes]).amax(0)


def _why_out_of_range(peak: float) -> str:
    if not math.isfinite(peak):
        return "NaN or infinity"
    if not peak:
        return "all values zero"
    limits = torch.finfo(torch.float32)
    return "" if limits.tiny * limits.eps <= peak <= limits.max else "beyond the range of float32"


def _total(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


def _error(signal: Tensor, noise: Tensor, clipped: int, flushed: int, known: int) -> FormatError:
    """Return the error, given the energy of each channel in the signal and in the noise."""
    is_used = signal > 0
    typical = _median((noise[is_used] / signal[is_used]).sort().values)
    return FormatError(
        _decibels(float(noise.sum() / signal.sum())), _decibels(typical), clipped / known, flushed / known
    )


def _decibels(noise: float) -> float:
    return 10 * math.log10(1 / noise) if noise else math.inf


def _median(ordered: Tensor) -> float:
    return float((ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2)


def _outliers(peaks: Tensor, shape: tuple[int, ...]) -> list[Outlier]:
    """Return the entries that are far above the median of all entries but the largest one.

    If the median is zero, nothing is an outlier, because there is no scale to compare with.
    """
    if len(peaks) < 2:
        return []
    median = _median(peaks.sort().values[:-1])
    if not median:
        return []
    places = (peaks > _FAR_ABOVE * median).nonzero().flatten().tolist()
    found = [Outlier(_unraveled(place, shape), float(peaks[place]) / median) for place in places]
    return sorted(found, key=lambda each: -each.times)


def _unraveled(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape[1:]):
        place, within = divmod(place, size)
        index.insert(0, within)
    return (place, *index)


_Converted = tuple[Tensor, Tensor]
"""The values converted to a format and back, and a mask of the clipped values."""


def _on_grid(values: Tensor, scale: Tensor, to_grid: Callable[[Tensor], Tensor], low: float, high: float) -> _Converted:
    scaled = values / torch.where(scale > 0, scale, torch.ones_like(scale))
    clipped = (scaled > high * _ROUNDING) | (scaled < low * _ROUNDING)
    return to_grid(scaled.clamp(low, high)) * scale, clipped


def _in_blocks(values: Tensor, size: int, convert: Callable[[Tensor, Tensor], _Converted]) -> _Converted:
    """Convert each row in blocks. ``convert`` receives ``[rows, blocks, size]`` and each block's largest magnitude."""
    columns = values.shape[1]
    blocks = functional.pad(values, (0, -columns % size)).unflatten(1, (-1, size))
    converted, clipped = convert(blocks, blocks.abs().amax(-1, keepdim=True))
    return converted.flatten(1)[:, :columns], clipped.flatten(1)[:, :columns]


def _integers(values: Tensor, peak: Tensor, bits: int) -> _Converted:
    half = 2.0 ** (bits - 1)
    return _on_grid(values, peak / (half - 0.5), torch.round, -half, half - 1)


def _to_float8(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).double()


def _float8(values: Tensor, peaks: _Peaks, dtype: torch.dtype) -> _Converted:
    high = torch.finfo(dtype).max
    return _on_grid(values, peaks.tensor / high, lambda scaled: _to_float8(scaled, dtype), -high, high)


def _mxfp8(blocks: Tensor, peak: Tensor) -> _Converted:
    exponent = (torch.frexp(peak).exponent - 1 - 8).clamp(-127, 127)  # 8 is the exponent of 448
    scale = torch.ldexp(torch.ones_like(peak), exponent)
    return _on_grid(blocks, scale, lambda scaled: _to_float8(scaled, torch.float8_e4m3fn), -448.0, 448.0)


def _to_e2m1(values: Tensor) -> Tensor:
    """Round to 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with ties to even. The spacing doubles at 2 and at 4."""
    sizes = values.abs()
    step = 0.5 + 0.5 * (sizes >= 2) + 1.0 * (sizes >= 4)
    return torch.round(values / step) * step


def _nvfp4(values: Tensor, peaks: _Peaks) -> _Converted:
    of_tensor = peaks.tensor / (6 * 448)
    limits = torch.finfo(torch.float8_e4m3fn)

    def convert(blocks: Tensor, peak: Tensor) -> _Converted:
        scale = (peak / 6 / of_tensor).clamp(limits.tiny, limits.max)
        return _on_grid(blocks, _to_float8(scale, torch.float8_e4m3fn) * of_tensor, _to_e2m1, -6.0, 6.0)

    return _in_blocks(values, 16, convert)


NUMBER_FORMATS: dict[str, Callable[[Tensor, _Peaks], _Converted]] = {
    "int8": lambda values, peaks: _integers(values, peaks.tensor, 8),
    "int8-channel": lambda values, peaks: _integers(values, peaks.channels, 8),
    "int4-32": lambda values, _: _in_blocks(values, 32, lambda blocks, peak: _integers(blocks, peak, 4)),
    "int4-128": lambda values, _: _in_blocks(values, 128, lambda blocks, peak: _integers(blocks, peak, 4)),
    "e4m3": lambda values, peaks: _float8(values, peaks, torch.float8_e4m3fn),
    "e5m2": lambda values, peaks: _float8(values, peaks, torch.float8_e5m2),
    "mxfp8": lambda values, _: _in_blocks(values, 32, _mxfp8),
    "nvfp4": _nvfp4,
}
"""The conversion of each format: integers and float8 per tensor, per channel or in groups, MXFP8 and NVFP4."""


def _matrix(values: Values, *, is_weight: bool) -> Tensor:
    """Return a weight as a matrix ``[channels, …]``, any other tensor as ``[…, channels]``; empty for a vector."""
    shaped = values.shaped
    if shaped.dim() < 2:
        return shaped.new_zeros(0, 1)
    ordered = shaped if is_weight or shaped.dim() <= 3 else shaped.movedim(1, -1)
    return ordered.flatten(1) if is_weight else ordered.flatten(0, -2)


class _Sample(NamedTuple):
    """A sample of groups of neighboring values in the rows of a matrix.

    Args:
        groups: The values, ``[groups, width]`` float64, padded with zeros beyond the end of a row.
        peaks: The largest magnitude of the whole matrix, and of the channel of each value in the groups.
        weights: The number of groups of the matrix that each group represents, ``[groups]`` float64.
    """

    groups: Tensor
    peaks: _Peaks
    weights: Tensor


def _sampled(matrix: Tensor, *, is_weight: bool) -> _Sample:
    """Return all groups of a small matrix, or a sample of about ``_SAMPLED`` values of a large matrix.

    See :func:`_chosen`.
    """
    columns = matrix.shape[1]
    width = min(columns, _GROUP)
    of_groups, of_columns = _sizes(matrix, width, with_columns=not is_weight)
    places, weights = _chosen(of_groups.flatten(), _SAMPLED // width)
    rows = places // of_groups.shape[1]
    index = (places % of_groups.shape[1] * width)[:, None] + torch.arange(width, device=matrix.device)
    inside = index < columns
    index = index.clamp(max=columns - 1)
    groups = finite_or_zero(matrix[rows[:, None], index].double()) * inside
    channels = of_groups.amax(1).double()[rows, None] if is_weight else of_columns.double()[index]
    return _Sample(groups, _Peaks(of_groups.max().double(), channels), weights)


def _sizes(matrix: Tensor, width: int, *, with_columns: bool) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude of each group, ``[rows, groups]``, and of each column if ``with_columns``."""
    groups, columns = [], []
    step = max(1, _CHUNK // matrix.shape[1])
    for start in range(0, len(matrix), step):
        sizes = finite_or_zero(matrix[start : start + step]).abs_()
        if with_columns:
            columns.append(sizes.amax(0))
        groups.append(functional.pad(sizes, (0, -sizes.shape[1] % width)).unflatten(1, (-1, width)).amax(-1))
    return torch.cat(groups), torch.stack(columns).amax(0) if with_columns else groups[0]


def _chosen(sizes: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the groups of a sample, and the number of groups that each of them represents.

    The weight of a group is the mean of a constant, which is needed to estimate fractions of values, and of its share
    of the energy, so that rare large values are included but do not represent other groups. The groups are sorted by
    magnitude and divided into ``most`` parts of equal weight, and one group of each part is chosen. The choice is the
    same in each run.

    Args:
        sizes: The largest magnitude of each group.
        most: The number of groups to choose.
    """
    count, device = len(sizes), sizes.device
    if count <= most:
        return torch.arange(count, device=device), torch.ones(count, dtype=torch.float64, device=device)
    sizes, order = sizes.double().sort()
    energy = sizes.square()
    shares = most * (0.5 / count + 0.5 * energy / energy.sum().clamp(min=torch.finfo(torch.float64).tiny))
    for _ in range(_ROUNDS):  # repeated, so that no group is chosen twice
        shares = shares.clamp(max=1.0)
        shares *= most / shares.sum()
    ends = shares.cumsum(0)
    points = torch.from_numpy(_points(most)).to(device, non_blocking=True) * ends[-1]
    places = torch.searchsorted(ends, points).clamp(max=count - 1)
    return order[places], 1 / shares[places]


@lru_cache(maxsize=8)
def _points(most: int) -> NDArray[np.float64]:
    """Divide 0 to 1 into ``most`` equal parts, and return a random number in each part."""
    return (np.arange(most) + np.random.default_rng(0).random(most)) / most


class FormatErrors(Reduction):
    """Error that the conversion to narrow number formats would cause, for each record of a run.

    The formats are those of ``lightning-recorder precision``: ``int8`` and ``int8-channel``, ``int4-32`` and
    ``int4-128`` in groups, ``e4m3`` and ``e5m2``, ``mxfp8`` and ``nvfp4``, with scales computed from each tensor.
    Statistics, with ``nvfp4`` as an example: ``nvfp4_snr``, the signal-to-noise ratio in dB,
    ``10 log10(Σ x² / Σ error²)``; ``nvfp4_clipped``, the fraction of the nonzero values beyond the largest number of
    the format; ``nvfp4_flushed``, the fraction of the nonzero values that become zero. Vectors are ignored, and
    nonfinite values count as zero.

    The scales are computed from the whole tensor. If a tensor has more than 8,192 values, a sample of about 8,192
    values is converted, in groups of up to 128 neighboring values. Half of the groups are spread evenly over the
    tensor, and half over its energy. In tests with normal, heavy-tailed, sparse and massive values, the ratios from the
    sample were within 0.5 dB of the exact ratios, and the fractions within 0.02. The choice is the same in each run.

    State: the energy, the number of nonzero values, and three numbers for each format. States are merged by addition.

    Args:
        formats: The formats.
        weights: True for weights, ``[output channels, …]``; False for activations and gradients, ``[…, channels]`` or
            ``[batch, channels, …]`` with more than three dimensions. Groups lie along the inputs of a weight, and along
            the channels of other tensors.

    Raises:
        ArgumentError: If a format is unknown.

    Example:
        >>> errors = FormatErrors("int8", weights=True)
        >>> errors.update(torch.linspace(-1, 1, 64).reshape(8, 8))
        >>> {name: round(float(value), 3) for name, value in errors.compute().items()}
        {'int8_snr': 48.114, 'int8_clipped': 0.016, 'int8_flushed': 0.0}
    """

    option = "formats"

    def __init__(self, formats: str | Sequence[str] = tuple(NUMBER_FORMATS), *, weights: bool = False) -> None:
        self.formats = check_some("formats", formats, tuple(NUMBER_FORMATS))
        self.weights = bool(weights)

    @property
    @override
    def width(self) -> int:  # type: ignore[override]  # read-only here, because it follows from the formats
        """Number of float64 slots in the state."""
        return 2 + 3 * len(self.formats)

    @property
    @override
    def statistics(self) -> tuple[str, ...]:  # type: ignore[override]  # likewise
        """The names of the statistics, which begin with the formats."""
        return tuple(f"{name}_{what}" for name in self.formats for what in ("snr", "clipped", "flushed"))

    @override
    def update_state(self, state: Tensor, values: Values) -> None:
        matrix = _matrix(values, is_weight=self.weights)
        if not matrix.numel():
            return
        sample = _sampled(matrix, is_weight=self.weights)
        results = [NUMBER_FORMATS[name](sample.groups, sample.peaks) for name in self.formats]
        converted, clipped = (torch.stack(each) for each in zip(*results, strict=True))
        known = sample.groups != 0
        found = (sample.groups - converted).square(), clipped, known & (converted == 0)
        sums = torch.stack([each.sum(-1, dtype=torch.float64) @ sample.weights for each in found], dim=1)
        state[0] += sample.groups.square().sum(-1) @ sample.weights
        state[1] += known.sum(-1, dtype=torch.float64) @ sample.weights
        state[2:] += sums.flatten()

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        signal, known, parts = state[..., 0], state[..., 1], state[..., 2:].unflatten(-1, (-1, 3))
        snr = 10 * torch.log10(signal[..., None] / parts[..., 0])
        shares = parts[..., 1:] / known[..., None, None]
        found = torch.cat([snr[..., None], shares], -1).flatten(-2)
        return dict(zip(self.statistics, found.unbind(-1), strict=True))


class MassiveValues(Reduction):
    """The channel and the token with the largest magnitude, compared with the others.

    In transformers, a few activations are thousands of times as large as the rest, always in the same channels and at
    the same tokens (`Massive Activations in Large Language Models <https://arxiv.org/abs/2402.17762>`_). The statistics
    describe the largest value in a record: ``massive_value``, its magnitude; ``massive_times``, its magnitude divided
    by the median of the largest magnitudes of all channels of its tensor; ``massive_channel`` and ``massive_token``,
    its indices. Channels are the last dimension and tokens the dimension before it. With more than three dimensions,
    channels are the second dimension, and the token is the flat index in the dimensions after it. Vectors are ignored,
    and nonfinite values count as zero.

    State: four numbers. A merge keeps the state with the larger value.

    Example:
        >>> massive = MassiveValues()
        >>> tokens = torch.ones(2, 5, 8)
        >>> tokens[1, 3, 6] = -100.0
        >>> massive.update(tokens)
        >>> {name: float(value) for name, value in massive.compute().items()}
        {'massive_value': 100.0, 'massive_times': 100.0, 'massive_channel': 6.0, 'massive_token': 3.0}
    """

    width = 4
    option = "formats"
    statistics: tuple[str, ...] = ("massive_value", "massive_times", "massive_channel", "massive_token")
    additive = False

    @override
    def initial(self) -> Tensor:
        return torch.full((self.width,), -torch.inf, dtype=torch.float64, device="cpu")

    @override
    def update_state(self, state: Tensor, values: Values) -> None:
        matrix = finite_or_zero(_matrix(values, is_weight=False)).abs_()
        if not matrix.numel():
            return
        shape = values.shaped.shape
        tokens = shape[-2] if len(shape) <= 3 else shape[2:].numel()
        peaks = matrix.amax(0)
        channel = peaks.argmax()
        token = matrix.take_along_dim(channel.reshape(1, 1), 1).argmax() % tokens
        peak = peaks.max()
        found = (peak, peak / peaks.median(), channel, token)
        self.merge_states(state, torch.stack([each.double() for each in found]))

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        state.copy_(torch.where(other[..., :1] > state[..., :1], other, state))

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        known = torch.where(state[..., :1] > -torch.inf, state, torch.nan)
        return dict(zip(self.statistics, known.unbind(-1), strict=True))
