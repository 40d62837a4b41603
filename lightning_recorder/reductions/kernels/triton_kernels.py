"""Triton kernels of the fused statistics on a GPU.

This module imports Triton, which few CPU installations have. It is therefore imported only when a device is prepared.

A program runs on one multiprocessor and reduces one share of the values, tile by tile. A second kernel merges the
results of the programs in a fixed order. Sums of deviations are float64, one per column of the tiles, so repeated
launches have bitwise equal results. Only bins are added in the order in which the programs arrive, but these are
integers, whose sums are exact in any order.

Bins are counted by atomic additions, because the time of ``tl.histogram`` is proportional to the number of bins.
Additions to the same address wait for each other. Programs therefore count in up to 32 copies of the bins, and zeros,
the most frequent value, are counted in registers.

Note:
    Kernels use only literals and parameters as constants, because Triton 3.2 reuses a cached kernel even if a module
    constant has changed.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["COLUMNS", "COPIES", "MOST_PROGRAMS", "RESULTS", "ROWS", "merge_shares", "reduce_share"]

# A tile is the number of values that 128 threads process at a time. Each thread has 8 values in its registers, and
# neighboring threads have neighboring values.
ROWS, COLUMNS = 2, 512
MOST_PROGRAMS = 2048
RESULTS = 7  # numbers per program to merge
COPIES = 32  # maximum number of copies of the bins; at least 8 programs share a copy


@triton.jit
def _values_at(
    data: tl.tensor, places: tl.tensor, inside: tl.tensor, factor: tl.tensor, scaled: tl.tensor
) -> tl.tensor:
    """Return the values at the given indices, widened and multiplied by the factor; zero outside of the array."""
    values = tl.load(data + places, mask=inside, other=0.0)
    if values.dtype == tl.bfloat16:  # converts the bits, which preserves every NaN, as torch does
        values = (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif values.dtype == tl.float16:
        values = values.to(tl.float32)
    # Multiplying by one would change the bits of a NaN. The flag hides a factor of one from the compiler, which would
    # simplify this expression.
    return tl.where(scaled != 0, values * factor.to(values.dtype), values)


@triton.jit
def _sizes_of(values: tl.tensor) -> tl.tensor:
    """Return the bits of the magnitudes as integers, so that subnormals are never mistaken for zeros."""
    return (
        values.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
        if values.dtype == tl.float64
        else values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    )


@triton.jit
def _infinity_of(values: tl.tensor) -> tl.tensor:
    """Return the bits of positive infinity in the dtype of the values. The bits of a NaN magnitude are larger."""
    return 0x7FF0000000000000 if values.dtype == tl.float64 else 0x7F800000


@triton.jit
def _bins_of(values: tl.tensor, bin_count: tl.constexpr, bin_shift: tl.constexpr) -> tl.tensor:
    """Return the upper bits of the values as float32. Finite values beyond its range become the largest float32."""
    if values.dtype == tl.float64:
        bounded = tl.minimum(tl.maximum(values, -3.4028234663852886e38), 3.4028234663852886e38)
        values = tl.where(_sizes_of(values) < _infinity_of(values), bounded, values).to(tl.float32)
    return (values.to(tl.int32, bitcast=True) >> bin_shift) & (bin_count - 1)


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
    """Return the tile of values that starts at ``at``, ``[rows, columns]``, and a mask of the values before the end."""
    places = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    inside = places < tl.minimum(end - at, rows * columns).to(tl.int32)
    return _values_at(data + at, places, inside, factor, scaled), inside


@triton.jit
def _deviations_of(values: tl.tensor, inside: tl.tensor, pivot: tl.tensor) -> tl.tensor:
    """Return the deviations from the pivot as float64; zero for nonfinite values."""
    finite = inside & (_sizes_of(values) < _infinity_of(values))
    return tl.where(finite, values.to(tl.float64) - pivot, 0.0)


@triton.jit
def _total(counts: tl.tensor) -> tl.tensor:
    """Return the sum of integers as float64."""
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
    """Return the mean of the finite values of one tile; zero if no value is finite."""
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
    """Return the sum of the squared deviations from the pivot over one share of the values."""
    squares = tl.zeros([columns], tl.float64)
    for at in range(start, end, rows * columns):
        values, inside = _tile_at(data, at, end, factor, scaled, rows, columns)
        deviations = _deviations_of(values, inside, pivot)
        squares += tl.sum(deviations * deviations, axis=0)
    return tl.sum(squares, axis=0)


@triton.jit
def _count_places(
    data: tl.tensor,
    factor: tl.tensor,
    scaled: tl.tensor,
    places: tl.tensor,
    sampled: tl.tensor,
    histogram: tl.tensor,
    bin_count: tl.constexpr,
    bin_shift: tl.constexpr,
) -> None:
    """Count the values at this program's share of the sampled indices in the bins."""
    part = tl.cdiv(sampled, tl.num_programs(0))
    start = tl.program_id(0) * part
    end = tl.minimum(start + part, sampled)
    for at in range(start, end, 256):
        chosen = at + tl.arange(0, 256)
        inside = chosen < end
        values = _values_at(data, tl.load(places + chosen, mask=inside, other=0), inside, factor, scaled)
        tl.atomic_add(histogram + _bins_of(values, bin_count, bin_shift), 1.0, mask=inside, sem="relaxed")


@triton.jit
def _copies_for(programs: tl.tensor, most_copies: tl.constexpr) -> tl.tensor:
    """Return the number of copies of the bins for a number of programs."""
    return tl.maximum(tl.minimum(programs // 8, most_copies), 1)


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
    sampled_numel: tl.constexpr,
) -> None:
    """Merge the results into the first slots of a row; see ``row.py`` (Chan, Golub & LeVeque 1979)."""
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
        tl.store(row + sampled_numel, tl.load(row + sampled_numel) + numel)


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
    """Write the results of this program for :func:`merge_shares`, as a column of ``[7, programs]``."""
    tl.store(part, count)
    tl.store(part + programs, mean)
    tl.store(part + 2 * programs, m2)
    tl.store(part + 3 * programs, low)
    tl.store(part + 4 * programs, high)
    tl.store(part + 5 * programs, zeros)
    tl.store(part + 6 * programs, nans)


# The kernel is compiled once per dtype, because it is not specialized for numbers and addresses divisible by 16.
@triton.jit(
    do_not_specialize=["data", "numel", "share", "factor", "scaled", "places", "sampled", "parts", "counts", "row"]
)
def reduce_share(
    data: tl.tensor,
    numel: tl.int64,
    share: tl.int64,
    factor: tl.int64,
    scaled: tl.int32,
    places: tl.tensor,
    sampled: tl.int64,
    parts: tl.tensor,
    counts: tl.tensor,
    row: tl.tensor,
    gathered: tl.constexpr,
    first_bin: tl.constexpr,
    bin_count: tl.constexpr,
    bin_shift: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    most_copies: tl.constexpr,
) -> None:
    """Reduce one share of the values. A single program writes to the row; several programs write to parts and counts.

    Args:
        data: The values, ``[numel]`` float16, bfloat16, float32 or float64.
        numel: The number of values, at least one.
        share: The number of values per program, a multiple of the tile size.
        factor: The bits of the float64 factor. A float argument would arrive as float32.
        scaled: 0 if the factor is one, otherwise 1.
        places: The indices of the values to count in the bins, ``[sampled]`` int64, if ``gathered``.
        sampled: The maximum number of values to count in the bins; negative if the row has no slot for the sample.
        parts: The results of all programs, ``[7, programs]`` float64, for :func:`merge_shares`.
        counts: The copies of the bins, ``[most_copies, bin_count]`` int32, zero before the launch. Unused if
            ``gathered``, because sampled values are counted in the row.
        row: The state, ``[width]`` float64, in the layout of :class:`Statistics`.
        gathered: True to count only the values at ``places`` in the bins.
        first_bin: The slot of the first bin in the row.
        bin_count: The number of bins, a power of two. With a sample, the slot after the bins is the number of values.
        bin_shift: The shift that turns the bits of a float32 into its bin.
        rows: The number of rows of a tile.
        columns: The number of columns of a tile.
        most_copies: The maximum number of copies of the bins.
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
    finites = tl.zeros([columns], tl.int32)
    zeros = tl.zeros([columns], tl.int32)
    negatives = tl.zeros([columns], tl.int32)  # the number of negative zeros
    nans = tl.zeros([columns], tl.int32)
    counts += (program % _copies_for(programs, most_copies)) * bin_count
    for at in range(start, end, rows * columns):
        values, inside = _tile_at(data, at, end, factor, scaled, rows, columns)
        sizes = _sizes_of(values)
        finite = inside & (sizes < _infinity_of(values))
        deviations = _deviations_of(values, inside, pivot)
        sums += tl.sum(deviations, axis=0)
        squares += tl.sum(deviations * deviations, axis=0)
        lows = tl.minimum(lows, tl.min(tl.where(finite, values, float("inf")), axis=0))
        highs = tl.maximum(highs, tl.max(tl.where(finite, values, float("-inf")), axis=0))
        finites += tl.sum(finite.to(tl.int32), axis=0)
        zeros += tl.sum((inside & (sizes == 0)).to(tl.int32), axis=0)
        nans += tl.sum((inside & (sizes > _infinity_of(values))).to(tl.int32), axis=0)
        if not gathered:
            bins = _bins_of(values, bin_count, bin_shift)
            counted = inside & (sizes != 0)
            negatives += tl.sum((inside & (sizes == 0) & (bins != 0)).to(tl.int32), axis=0)
            if programs == 1:
                tl.atomic_add(row + first_bin + bins, 1.0, mask=counted, sem="relaxed")
            else:
                tl.atomic_add(counts + bins, 1, mask=counted, sem="relaxed")
    zero_count = tl.sum(zeros, axis=0)
    if gathered:
        _count_places(data, factor, scaled, places, sampled, row + first_bin, bin_count, bin_shift)
    else:
        negative = tl.sum(negatives, axis=0)
        sign: tl.constexpr = bin_count // 2  # the bin of negative zeros
        if programs == 1:
            tl.atomic_add(row + first_bin, (zero_count - negative).to(tl.float64), sem="relaxed")
            tl.atomic_add(row + first_bin + sign, negative.to(tl.float64), sem="relaxed")
        else:
            tl.atomic_add(counts, zero_count - negative, sem="relaxed")
            tl.atomic_add(counts + sign, negative, sem="relaxed")
    count = _total(finites)
    total = tl.sum(sums, axis=0)
    square = tl.sum(squares, axis=0)
    shift = total / tl.maximum(count, 1.0)
    mean = pivot + shift
    m2 = square - total * shift
    # If the pivot, the mean of the first tile, is too far from the mean, the squares lose precision. Sum them again.
    if not (square <= 16 * m2):
        m2 = _squares_from(mean, data, start, end, factor, scaled, rows, columns)
    low, high = tl.min(lows, axis=0).to(tl.float64), tl.max(highs, axis=0).to(tl.float64)
    nan_count = _total(nans)
    if programs == 1:
        sampled_numel: tl.constexpr = first_bin + bin_count
        zero_total = zero_count.to(tl.float64)
        _merge(row, count, mean, m2, low, high, zero_total, nan_count, numel.to(tl.float64), sampled, sampled_numel)
    else:
        _write_part(parts + program, programs, count, mean, m2, low, high, zero_count.to(tl.float64), nan_count)


@triton.jit(do_not_specialize=["parts", "counts", "programs", "numel", "sampled", "row"])
def merge_shares(
    parts: tl.tensor,
    counts: tl.tensor,
    programs: tl.int32,
    numel: tl.int64,
    sampled: tl.int64,
    row: tl.tensor,
    first_bin: tl.constexpr,
    bin_count: tl.constexpr,
    most_programs: tl.constexpr,
    most_copies: tl.constexpr,
) -> None:
    """Merge the results of the programs into the row, with one program, and set the counts to zero.

    Args:
        parts: The results of :func:`reduce_share`, ``[7, programs]`` float64.
        counts: The copies of the bins, as for :func:`reduce_share`.
        programs: The number of programs of :func:`reduce_share`.
        numel: The number of values, as for :func:`reduce_share`.
        sampled: The sample size, as for :func:`reduce_share`.
        row: The state.
        first_bin: The slot of the first bin in the row.
        bin_count: The number of bins. With a sample, the slot after the bins is the number of values.
        most_programs: A power of two that is not less than ``programs``.
        most_copies: The maximum number of copies of the bins.
    """
    place = tl.arange(0, bin_count)
    bins = tl.zeros([bin_count], tl.float64)
    for copy in range(_copies_for(programs, most_copies)):
        bins += tl.load(counts + copy * bin_count + place)
        tl.store(counts + copy * bin_count + place, tl.zeros([bin_count], tl.int32))
    tl.store(row + first_bin + place, tl.load(row + first_bin + place) + bins)
    program = tl.arange(0, most_programs)
    inside = program < programs
    part = parts + program
    finites = tl.load(part, mask=inside, other=0.0)
    means = tl.load(part + programs, mask=inside, other=0.0)
    spreads = tl.load(part + 2 * programs, mask=inside, other=0.0)
    lows = tl.load(part + 3 * programs, mask=inside, other=float("inf"))
    highs = tl.load(part + 4 * programs, mask=inside, other=float("-inf"))
    zeros = tl.load(part + 5 * programs, mask=inside, other=0.0)
    nans = tl.load(part + 6 * programs, mask=inside, other=0.0)
    count = tl.sum(finites, axis=0)
    mean = tl.sum(finites * means, axis=0) / tl.maximum(count, 1.0)
    deltas = means - mean
    m2 = tl.sum(spreads + finites * deltas * deltas, axis=0)
    low, high = tl.min(lows, axis=0), tl.max(highs, axis=0)
    zeros, nans = tl.sum(zeros, axis=0), tl.sum(nans, axis=0)
    sampled_numel: tl.constexpr = first_bin + bin_count
    _merge(row, count, mean, m2, low, high, zeros, nans, numel.to(tl.float64), sampled, sampled_numel)
