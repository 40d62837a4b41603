"""The kernels of the fused statistics on a GPU, in Triton's language.

Importing this file imports Triton, which few CPUs have, so it is imported when there is a device to prepare.

A program, which runs on one multiprocessor, takes a share of the values, tile by tile; a second kernel merges in order
what the programs found. Sums of deviations are float64, one for each column of the tiles, so equal launches give equal
bits. Bins alone are added up in whatever order programs end: whole numbers are exact in any.

Note:
    Numbers are written out or are parameters: Triton 3.2 takes a compiled kernel from its cache although a constant of
    the module has changed that it uses.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["COLUMNS", "MOST_PROGRAMS", "ROWS", "merge_shares", "reduce_share"]

# A tile is what 128 threads take at once: each has 16 values in its registers, and neighbours in memory are those of
# neighbouring threads.
ROWS, COLUMNS = 4, 512
MOST_PROGRAMS = 1024


@triton.jit
def _values_at(
    data: tl.tensor, places: tl.tensor, inside: tl.tensor, factor: tl.tensor, scaled: tl.tensor
) -> tl.tensor:
    """The values at places, widened and multiplied; zero outside."""
    values = tl.load(data + places, mask=inside, other=0.0)
    if values.dtype == tl.bfloat16:  # by its bits, which keeps each NaN, as torch does
        values = (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif values.dtype == tl.float16:
        values = values.to(tl.float32)
    # Not by one either, which would change a NaN. That it is one the compiler must not see, or it leaves this out.
    return tl.where(scaled != 0, values * factor.to(values.dtype), values)


@triton.jit
def _sizes_of(values: tl.tensor) -> tl.tensor:
    """The bits of values but for their signs, as integers: a subnormal number is never taken for a zero."""
    return (
        values.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
        if values.dtype == tl.float64
        else values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    )


@triton.jit
def _infinity_of(values: tl.tensor) -> tl.tensor:
    """The size of an infinity of that type; those of NaN are larger."""
    return 0x7FF0000000000000 if values.dtype == tl.float64 else 0x7F800000


@triton.jit
def _bins_of(values: tl.tensor) -> tl.tensor:
    """The upper eleven bits of values as float32; a finite one beyond its range has those of the largest."""
    if values.dtype == tl.float64:
        bounded = tl.minimum(tl.maximum(values, -3.4028234663852886e38), 3.4028234663852886e38)
        values = tl.where(_sizes_of(values) < _infinity_of(values), bounded, values).to(tl.float32)
    return (values.to(tl.int32, bitcast=True) >> 21) & 2047


@triton.jit
def _tile_at(
    data: tl.tensor,
    at: tl.tensor,
    end: tl.tensor,
    factor: tl.tensor,
    scaled: tl.tensor,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The values from a place on, ``[rows, columns]``, and which of these are before the end."""
    places = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    inside = places < tl.minimum(end - at, rows * columns).to(tl.int32)
    return _values_at(data + at, places, inside, factor, scaled), inside


@triton.jit
def _deviations_of(values: tl.tensor, inside: tl.tensor, pivot: tl.tensor) -> tl.tensor:
    """Those from the pivot, float64; zero for what is not finite."""
    finite = inside & (_sizes_of(values) < _infinity_of(values))
    return tl.where(finite, values.to(tl.float64) - pivot, 0.0)


@triton.jit
def _total(counts: tl.tensor) -> tl.tensor:
    """The sum of integers, as float64."""
    return tl.sum(counts, axis=0).to(tl.float64)


@triton.jit
def _mean_at(
    data: tl.tensor,
    at: tl.tensor,
    end: tl.tensor,
    factor: tl.tensor,
    scaled: tl.tensor,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> tl.tensor:
    """The mean of the finite values of one tile; zero where there is none."""
    values, inside = _tile_at(data, at, end, factor, scaled, rows, columns)
    finite = inside & (_sizes_of(values) < _infinity_of(values))
    total = tl.sum(tl.sum(_deviations_of(values, inside, 0.0), axis=0), axis=0)
    return total / tl.maximum(_total(tl.sum(finite.to(tl.int32), axis=0)), 1.0)


@triton.jit
def _squares_from(
    pivot: tl.tensor,
    data: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    factor: tl.tensor,
    scaled: tl.tensor,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> tl.tensor:
    """The sum of the squared deviations of a share from the pivot."""
    squares = tl.zeros([columns], tl.float64)
    for at in range(start, end, rows * columns):
        values, inside = _tile_at(data, at, end, factor, scaled, rows, columns)
        deviations = _deviations_of(values, inside, pivot)
        squares += tl.sum(deviations * deviations, axis=0)
    return tl.sum(squares, axis=0)


@triton.jit
def _count_places(
    data: tl.tensor, factor: tl.tensor, scaled: tl.tensor, places: tl.tensor, sampled: tl.tensor, row: tl.tensor
) -> None:
    """Add to the bins the values at this program's part of the places."""
    part = tl.cdiv(sampled, tl.num_programs(0))
    start = tl.program_id(0) * part
    end = tl.minimum(start + part, sampled)
    for at in range(start, end, 256):
        chosen = at + tl.arange(0, 256)
        inside = chosen < end
        values = _values_at(data, tl.load(places + chosen, mask=inside, other=0), inside, factor, scaled)
        tl.atomic_add(row + 9 + _bins_of(values), 1.0, mask=inside, sem="relaxed")


@triton.jit
def _add_bins(bins: tl.tensor, taken: tl.tensor, row: tl.tensor, tile: tl.constexpr) -> None:
    """Add the bins of all tiles, ``[2048]`` int32, to those of the row."""
    place = tl.arange(0, 2048)
    # What lies behind the end in the last tile was counted as so many zeros.
    behind = tl.cdiv(taken, tile) * tile - taken
    bins -= tl.where(place == 0, behind, 0).to(tl.int32)
    tl.atomic_add(row + 9 + place, bins.to(tl.float64), mask=bins != 0, sem="relaxed")


@triton.jit
def _merge(
    row: tl.tensor,
    count: tl.tensor,
    mean: tl.tensor,
    m2: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    zeros: tl.tensor,
    nans: tl.tensor,
    numel: tl.tensor,
    sampled: tl.tensor,
) -> None:
    """Merge what was found into the head of a state (Chan, Golub & LeVeque 1979)."""
    before, mean_before, m2_before = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    total = before + count
    share = count / tl.maximum(total, 1.0)
    delta = mean - mean_before
    tl.store(row, total)
    tl.store(row + 1, mean_before + delta * share)
    tl.store(row + 2, m2_before + m2 + delta * delta * before * share)
    tl.store(row + 3, tl.minimum(tl.load(row + 3), low))
    tl.store(row + 4, tl.maximum(tl.load(row + 4), high))
    tl.store(row + 5, tl.load(row + 5) + numel)
    tl.store(row + 6, tl.load(row + 6) + zeros)
    tl.store(row + 7, tl.load(row + 7) + nans)
    tl.store(row + 8, tl.load(row + 8) + (numel - count - nans))
    if sampled >= 0:
        tl.store(row + 2057, tl.load(row + 2057) + numel)


@triton.jit
def _write_part(
    part: tl.tensor,
    programs: tl.tensor,
    count: tl.tensor,
    mean: tl.tensor,
    m2: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    zeros: tl.tensor,
    nans: tl.tensor,
) -> None:
    """Leave what was found to :func:`merge_shares`, the same numbers of all programs side by side."""
    tl.store(part, count)
    tl.store(part + programs, mean)
    tl.store(part + 2 * programs, m2)
    tl.store(part + 3 * programs, low)
    tl.store(part + 4 * programs, high)
    tl.store(part + 5 * programs, zeros)
    tl.store(part + 6 * programs, nans)


# Compiled once for each type of the values, and not again for numbers and addresses that can be divided by sixteen.
@triton.jit(do_not_specialize=["data", "numel", "share", "factor", "scaled", "places", "sampled", "parts", "row"])
def reduce_share(
    data: tl.tensor,
    numel: tl.int64,
    share: tl.int64,
    factor: tl.int64,
    scaled: tl.int32,
    places: tl.tensor,
    sampled: tl.int64,
    parts: tl.tensor,
    row: tl.tensor,
    gathered: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Reduce one share of the values: bins go to the row, all else to the parts, or to the row from a single program.

    Args:
        data: The values, ``[numel]`` float16, bfloat16, float32 or float64.
        numel: Their number, at least one.
        share: Values for each program, a multiple of those in a tile.
        factor: The bits of the float64 by which they are multiplied; a float would come as float32.
        scaled: 0 if that is one, else 1.
        places: Of the values that go to the bins, ``[sampled]`` int64, if gathered.
        sampled: The most values that go to the bins; negative for a row that has no word for that.
        parts: ``[7, programs]`` float64, for :func:`merge_shares`.
        row: The state, ``[2057]`` float64, or ``[2058]``.
        gathered: Whether only the values at the places go to the bins.
        rows: Of a tile.
        columns: Of a tile.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    factor = factor.to(tl.float64, bitcast=True)
    start = program.to(tl.int64) * share
    end = tl.minimum(start + share, numel)
    pivot = _mean_at(data, start, end, factor, scaled, rows, columns)
    sums = tl.zeros([columns], tl.float64)
    squares = tl.zeros([columns], tl.float64)
    lows = tl.full([columns], float("inf"), tl.float64 if data.dtype.element_ty == tl.float64 else tl.float32)
    highs = -lows
    counts = tl.zeros([columns], tl.int32)
    zeros = tl.zeros([columns], tl.int32)
    nans = tl.zeros([columns], tl.int32)
    bins = tl.zeros([2048], tl.int32)
    for at in range(start, end, rows * columns):
        values, inside = _tile_at(data, at, end, factor, scaled, rows, columns)
        sizes = _sizes_of(values)
        finite = inside & (sizes < _infinity_of(values))
        deviations = _deviations_of(values, inside, pivot)
        sums += tl.sum(deviations, axis=0)
        squares += tl.sum(deviations * deviations, axis=0)
        lows = tl.minimum(lows, tl.min(tl.where(finite, values, float("inf")), axis=0))
        highs = tl.maximum(highs, tl.max(tl.where(finite, values, float("-inf")), axis=0))
        counts += tl.sum(finite.to(tl.int32), axis=0)
        zeros += tl.sum((inside & (sizes == 0)).to(tl.int32), axis=0)
        nans += tl.sum((inside & (sizes > _infinity_of(values))).to(tl.int32), axis=0)
        if not gathered:
            bins += tl.histogram(tl.ravel(_bins_of(values)), 2048)
    if gathered:
        _count_places(data, factor, scaled, places, sampled, row)
    else:
        _add_bins(bins, end - start, row, rows * columns)
    count = _total(counts)
    total = tl.sum(sums, axis=0)
    square = tl.sum(squares, axis=0)
    shift = total / tl.maximum(count, 1.0)
    mean = pivot + shift
    m2 = square - total * shift
    # Where the first tile is so far from the mean that the squares say little about the spread, they are summed again.
    if not (square <= 16 * m2):
        m2 = _squares_from(mean, data, start, end, factor, scaled, rows, columns)
    low, high = tl.min(lows, axis=0).to(tl.float64), tl.max(highs, axis=0).to(tl.float64)
    if programs == 1:
        _merge(row, count, mean, m2, low, high, _total(zeros), _total(nans), numel.to(tl.float64), sampled)
    else:
        _write_part(parts + program, programs, count, mean, m2, low, high, _total(zeros), _total(nans))


@triton.jit(do_not_specialize=["parts", "programs", "numel", "sampled", "row"])
def merge_shares(
    parts: tl.tensor,
    programs: tl.int32,
    numel: tl.int64,
    sampled: tl.int64,
    row: tl.tensor,
    most_programs: tl.constexpr,
) -> None:
    """Merge what the programs found into the head of the state; one program does it.

    Args:
        parts: ``[7, programs]`` float64, of :func:`reduce_share`.
        programs: How many there were.
        numel: As there.
        sampled: As there.
        row: The state.
        most_programs: A power of two that is not less.
    """
    program = tl.arange(0, most_programs)
    inside = program < programs
    part = parts + program
    counts = tl.load(part, mask=inside, other=0.0)
    means = tl.load(part + programs, mask=inside, other=0.0)
    spreads = tl.load(part + 2 * programs, mask=inside, other=0.0)
    lows = tl.load(part + 3 * programs, mask=inside, other=float("inf"))
    highs = tl.load(part + 4 * programs, mask=inside, other=float("-inf"))
    zeros = tl.load(part + 5 * programs, mask=inside, other=0.0)
    nans = tl.load(part + 6 * programs, mask=inside, other=0.0)
    count = tl.sum(counts, axis=0)
    mean = tl.sum(counts * means, axis=0) / tl.maximum(count, 1.0)
    deltas = means - mean
    m2 = tl.sum(spreads + counts * deltas * deltas, axis=0)
    low, high = tl.min(lows, axis=0), tl.max(highs, axis=0)
    _merge(row, count, mean, m2, low, high, tl.sum(zeros, axis=0), tl.sum(nans, axis=0), numel.to(tl.float64), sampled)
