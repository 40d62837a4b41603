"""Tests of the error in number formats against a direct computation, value by value, and of outliers."""

from __future__ import annotations

import math
import statistics
from importlib import import_module

import pytest
import torch
from torch import Tensor

from lightning_recorder.reductions.number_formats import (
    NUMBER_FORMATS,
    FormatError,
    MeasuredTensor,
    Outlier,
    measure_formats,
)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def normal(*shape: int, power: int = 1) -> Tensor:
    values: Tensor = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** power
    return values.float()


def measured(tensor: Tensor, *, is_weight: bool = True) -> MeasuredTensor:
    found = measure_formats(tensor, is_weight=is_weight)
    assert isinstance(found, MeasuredTensor)
    return found


def integer(value: float, peak: float, bits: int) -> tuple[float, bool]:
    """Return the value after the conversion, and whether it was clipped."""
    scale = peak / (2 ** (bits - 1) - 0.5)
    most = 2 ** (bits - 1) - 1
    return min(round(value / scale), most) * scale, value / scale > most


def float8(value: float, scale: float, dtype: torch.dtype) -> tuple[float, bool]:
    most = torch.finfo(dtype).max
    inside = min(max(value / scale, -most), most)
    return float(torch.tensor(inside).to(dtype)) * scale, abs(value / scale) > most * (1 + 1e-6)


def e2m1(value: float, scale: float) -> tuple[float, bool]:
    size = abs(value / scale)
    code = min(range(8), key=lambda code: (abs(E2M1[code] - size), code % 2))
    return math.copysign(E2M1[code], value) * scale, size > 6 * (1 + 1e-6)


def ratio(converted: list[tuple[float, float, bool]]) -> float:
    """Return the energy of the error, divided by that of the values."""
    noise = math.fsum((value - other) ** 2 for value, other, _ in converted)
    return noise / math.fsum(value**2 for value, *_ in converted)


def directly(rows: list[list[float]], name: str) -> FormatError:
    """Convert a weight value by value."""
    tensor_peak = max(abs(value) for row in rows for value in row)
    converted = []
    for row in rows:
        for place, value in enumerate(row):

            def peak(size: int, row: list[float] = row, place: int = place) -> float:
                return max(abs(other) for other in row[place // size * size :][:size])

            if name == "nvfp4":
                of_tensor = tensor_peak / 6 / 448
                scale = float(torch.tensor(max(peak(16) / 6 / of_tensor, 2.0**-6)).to(torch.float8_e4m3fn))
                converted.append((value, *e2m1(value, scale * of_tensor)))
            elif name == "mxfp8":
                scale = 2.0 ** (math.floor(math.log2(peak(32))) - 8)
                converted.append((value, *float8(value, scale, torch.float8_e4m3fn)))
            elif name.startswith("e"):
                dtype = torch.float8_e4m3fn if name == "e4m3" else torch.float8_e5m2
                converted.append((value, *float8(value, tensor_peak / torch.finfo(dtype).max, dtype)))
            else:
                peaks = {"int8": tensor_peak, "int8-channel": peak(len(row))}
                bits, size = (8, 0) if name.startswith("int8") else (4, int(name.partition("-")[2]))
                converted.append((value, *integer(value, peak(size) if size else peaks[name], bits)))
    width = len(rows[0])
    channels = [ratio(converted[start : start + width]) for start in range(0, len(converted), width)]
    typical = 10 * math.log10(1 / statistics.median(channels))
    flushed = sum(other == 0 for _, other, _ in converted) / len(converted)
    snr = 10 * math.log10(1 / ratio(converted))
    return FormatError(snr, typical, sum(clipped for *_, clipped in converted) / len(converted), flushed)


@pytest.mark.parametrize("name", NUMBER_FORMATS)
@pytest.mark.parametrize("power", [1, 5])
def test_errors_equal_a_direct_computation(name: str, power: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each format agrees with a conversion value by value, over several chunks and with short last blocks."""
    monkeypatch.setattr("lightning_recorder.reductions.number_formats._CHUNK", 300)
    weight = normal(7, 141, power=power)
    assert measured(weight).errors[name] == pytest.approx(directly(weight.tolist(), name), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_tensor_of_the_format_has_no_error(dtype: torch.dtype) -> None:
    """A tensor that holds the largest number of a format has no error in it."""
    weight = (normal(8, 8) * 50).to(dtype)
    weight[0, 0] = torch.finfo(dtype).max
    name = "e4m3" if dtype == torch.float8_e4m3fn else "e5m2"
    assert measured(weight).errors[name] == (math.inf, math.inf, 0.0, 0.0)


def test_zeros_do_not_count() -> None:
    """Shares are those of the values other than zero, and blocks of zeros have no error."""
    weight = torch.zeros(2, 64)
    weight[0, :2] = torch.tensor([1.0, 1e-12])
    found = measured(weight).errors
    assert {name: error.flushed for name, error in found.items()} == dict.fromkeys(NUMBER_FORMATS, 0.5)


def test_one_large_value_does_not_hide_the_others() -> None:
    """If one value leaves no room for the others, the ratio of the tensor is good and that of its channels is not."""
    weight = normal(8, 64)
    weight[3, 5] = 1e9
    error = measured(weight).errors["e4m3"]
    assert error.snr > 60
    assert (error.lower, error.channel_snr) == (0.0, 0.0)
    assert error.flushed == 511 / 512


def test_channels_of_images_and_tokens() -> None:
    """The channels of images are dimension 1, those of tokens the last one."""
    images = normal(2, 6, 5, 5)
    images[:, 2] *= 1000
    tokens = images.flatten(2).movedim(1, -1)
    in_images, in_tokens = (measured(each, is_weight=False) for each in (images, tokens))
    for name, error in in_images.errors.items():
        assert error == pytest.approx(in_tokens.errors[name], rel=1e-9)
    assert [each.place for each in in_images.channels] == [each.place for each in in_tokens.channels] == [(2,)]
    assert in_images.errors["int8-channel"].snr > in_images.errors["int8"].snr


def test_a_token_far_above_the_rest() -> None:
    """A massive token is found with its place, and its size in medians of the other tokens."""
    tokens = torch.ones(2, 5, 8)
    tokens[1, 3, 6] = -100.0
    found = measured(tokens, is_weight=False)
    assert (found.tokens, found.channels) == ([Outlier((1, 3), 100.0)], [Outlier((6,), 100.0)])
    assert measured(normal(64, 64)).channels == []


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(2, 2, dtype=torch.int8), "not floating-point"),
        (torch.ones(2, 2, dtype=torch.complex64), "complex"),
        (torch.ones(2, 2).to_sparse(), "sparse"),
        (torch.ones(4), "fewer than two dimensions"),
        (torch.ones(2, 0), "empty"),
        (torch.ones(2, 2, device="meta"), "without values"),
        (torch.zeros(2, 2), "all values zero"),
        (torch.tensor([[1.0, math.nan], [1.0, 1.0]]), "NaN or infinity"),
        (torch.tensor([[1.0, -math.inf], [1.0, 1.0]]), "NaN or infinity"),
        (torch.full((2, 2), 1e300, dtype=torch.float64), "beyond the range of float32"),
    ],
)
def test_what_cannot_be_measured_has_a_reason(tensor: Tensor, reason: str) -> None:
    """Tensors without a meaningful error give the reason instead."""
    assert measure_formats(tensor, is_weight=True) == reason


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_has_a_reason() -> None:
    """A tensor that is already quantized is not measured."""
    tensor = torch.quantize_per_tensor(torch.ones(2, 2), 1.0, 0, torch.qint8)
    assert measure_formats(tensor, is_weight=True) == "quantized"


def of_torchao(tensor: Tensor) -> dict[str, Tensor]:
    """Return a weight after the conversion of torchao to each format and back."""
    mx, nvfp4, torchao = (
        import_module(f"torchao.{name}")
        for name in (
            "prototype.mx_formats.mx_tensor",
            "prototype.mx_formats.nvfp4_tensor",
            "quantization.quant_primitives",
        )
    )

    def integer(bits: int, *block: int) -> Tensor:
        low, high, symmetric = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1, torchao.MappingType.SYMMETRIC
        limits = {"quant_min": low, "quant_max": high}
        scales = torchao.choose_qparams_affine(tensor, symmetric, block, torch.int8, **limits)
        coded = torchao.quantize_affine(tensor, block, *scales, torch.int8, low, high)
        found: Tensor = torchao.dequantize_affine(coded, block, *scales, torch.int8, low, high)
        return found

    def float8(dtype: torch.dtype) -> Tensor:
        scale = torchao._choose_scale_float8(tensor, list(tensor.shape), dtype)
        found: Tensor = torchao._dequantize_affine_float8(torchao._quantize_affine_float8(tensor, scale, dtype), scale)
        return found

    whole, row = tuple(tensor.shape), (1, tensor.shape[1])
    of_tensor = nvfp4.per_tensor_amax_to_scale(tensor.abs().max())
    return {
        "int8": integer(8, *whole),
        "int8-channel": integer(8, *row),
        "int4-32": integer(4, 1, 32),
        "int4-128": integer(4, 1, 128),
        "e4m3": float8(torch.float8_e4m3fn),
        "e5m2": float8(torch.float8_e5m2),
        "mxfp8": mx.MXTensor.to_mx(tensor, torch.float8_e4m3fn, 32).dequantize(torch.float32),
        "nvfp4": nvfp4.NVFP4Tensor.to_nvfp4(tensor, per_tensor_scale=of_tensor).dequantize(torch.float32),
    }


@pytest.mark.filterwarnings("ignore")  # those of torchao and what it imports
@pytest.mark.parametrize("power", [1, 3])
def test_torchao_agrees(power: int) -> None:
    """The ratio of each format is that of torchao's own conversion; ties in float32 may be rounded otherwise."""
    pytest.importorskip("torchao")
    tensor = normal(64, 256, power=power)
    errors = measured(tensor).errors
    converted = of_torchao(tensor)
    assert converted.keys() == errors.keys()
    for name, other in converted.items():
        noise = (tensor.double() - other.double()).square().sum() / tensor.double().square().sum()
        assert errors[name].snr == pytest.approx(-10 * math.log10(float(noise)), abs=1e-4), name
