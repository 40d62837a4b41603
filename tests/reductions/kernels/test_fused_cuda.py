"""Tests of the Triton kernels against separate torch passes.

Without a GPU the kernels run in the Triton interpreter, in another process, because Triton enables it at import.
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import io
import math
import multiprocessing
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from numpy.typing import NDArray
from torch import Tensor

from lightning_recorder.bins import BIN_SHIFT, BINS
from lightning_recorder.reductions import Combined, Statistics, Values
from lightning_recorder.reductions.kernels import fused_cuda
from lightning_recorder.reductions.kernels.fused_cuda import (
    add_statistics_on_device,
    add_tensor_on_device,
    launch,
    prepare_device,
)
from lightning_recorder.reductions.row import HISTOGRAM, SAMPLED_NUMEL
from tests.effort import profiled
from tests.pairs import pairwise
from tests.reductions.kernels.test_fused import SHAPES, Subclass, assert_equal, numbers, plain
from tests.reductions.reference import assert_statistics
from tests.reductions.strategies import streams

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
TILE = 1024
FEW = 8 * TILE  # values that a single program processes

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def reduced(saved: bytes, factor: float, sample: int | None, most_programs: int) -> NDArray[np.float64]:
    """Return the state of a stream of tensors from the kernels; runs in the process of the interpreter."""
    from lightning_recorder.reductions.kernels import triton_kernels

    state = Statistics(sample=sample).state
    for tensor in torch.load(io.BytesIO(saved), weights_only=True):
        launch(triton_kernels, state, Values(tensor, factor), sample, most_programs)
    return state.numpy()


class Interpreter:
    """The Triton interpreter in another process."""

    def __init__(self, process: Executor) -> None:
        self._process = process

    def state(self, *stream: Tensor, factor: float = 1.0, sample: int | None = None, most_programs: int = 3) -> Tensor:
        """Return the state from the kernels with at most the given number of programs."""
        saved = io.BytesIO()
        torch.save(list(stream), saved)
        found = self._process.submit(reduced, saved.getvalue(), factor, sample, most_programs)
        return torch.from_numpy(found.result())


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            process.submit(int).result()  # start the process now
        yield Interpreter(process)


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Assert that states are equal, except that NaN bins are summed: torch may widen a float16 NaN to other bits."""
    of_nan = 9 + torch.tensor([[1021, 1022, 1023], [2045, 2046, 2047]]).flatten()
    both = []
    for state in (found, expected):
        both.append(state.clone())
        both[-1][of_nan] = 0.0
        both[-1][of_nan[0]] = state[of_nan].sum()
    assert_equal(*both)


@needs_triton
@pytest.mark.parametrize(
    ("count", "factor", "special", "dtype"),
    pairwise(
        [1, 2, TILE - 1, TILE, TILE + 1, FEW, FEW + 1, 10 * TILE, 11 * TILE + 1], [1.0, 1 / 3], [False, True], DTYPES
    ),
)
def test_the_kernels_give_what_separate_passes_give(
    interpreter: Interpreter, count: int, factor: float, special: bool, dtype: torch.dtype
) -> None:
    """For each dtype, factor and size around those of tiles, programs and equal shares, the states are equal."""
    tensor = numbers(count, dtype, special)
    assert_same(interpreter.state(tensor, factor=factor), plain(tensor, factor))


@needs_triton
@pytest.mark.parametrize("most_programs", [1, 2, 5, 17, 1024])
def test_the_number_of_programs_does_not_matter(interpreter: Interpreter, most_programs: int) -> None:
    """The state depends on neither the number of programs nor on that of the copies of the bins."""
    tensor = numbers(40 * TILE + 3, torch.float32, special=True)
    assert_same(interpreter.state(tensor, most_programs=most_programs), plain(tensor))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_what_a_slow_reference_gives(interpreter: Interpreter, dtype: torch.dtype) -> None:
    """All statistics equal those of a slow reference in Python."""
    tensor = numbers(FEW + 100, dtype, special=True)
    assert_statistics(Statistics().summarize(interpreter.state(tensor)), [tensor])


@needs_triton
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16], ids=["float32", "bfloat16"])
def test_a_nan_keeps_its_bits(interpreter: Interpreter, dtype: torch.dtype) -> None:
    """Without a factor each NaN goes to the bin of its own bits, of either sign."""
    halves = torch.tensor([0x7FC0, 0x7FA0, 0x7FFF, 0xFFC0, 0xFFFF, 0x7F81, 0x7F80, 0xFF80], dtype=torch.int32)
    bits = halves << 16 if dtype == torch.int32 else halves.to(torch.int16)
    tensor = bits.view(torch.float32 if dtype == torch.int32 else torch.bfloat16)
    bins = interpreter.state(tensor)[9:]
    assert bins.nonzero().flatten().tolist() == [1020, 1021, 1022, 1023, 2044, 2046, 2047]
    assert bins[1020] == 2


@needs_triton
@settings(max_examples=50)
@given(stream=streams)
def test_a_stream_in_launches(interpreter: Interpreter, stream: list[Tensor]) -> None:
    """Any stream of floating-point tensors leads to the same state as separate passes."""
    stream = [tensor for tensor in stream if tensor.dtype in DTYPES]
    state = Statistics().state
    for tensor in stream:
        plain(tensor, state=state)
    assert_same(interpreter.state(*stream), state)


@needs_triton
def test_a_stream_of_large_and_small_tensors(interpreter: Interpreter) -> None:
    """One and two launches lead to the same state as separate passes, even for empty tensors and only NaN."""
    nothing = torch.full((5000,), math.nan)
    stream = [nothing, numbers(FEW + 1, torch.bfloat16), torch.ones(0), nothing.repeat(3), numbers(10, torch.float64)]
    state = Statistics().state
    for tensor in stream:
        plain(tensor, state=state)
    assert_same(interpreter.state(*stream), state)


def around_ten_thousand() -> Tensor:
    torch.manual_seed(0)
    return 1e4 + 1e-3 * torch.randn(8 * TILE, dtype=torch.float64)


@needs_triton
@pytest.mark.parametrize(
    "values",
    [
        around_ten_thousand(),
        torch.cat([torch.tensor([1e9]).double(), around_ten_thousand()]),
        torch.cat([torch.zeros(TILE).double(), around_ten_thousand()]),
        torch.cat([torch.full((TILE,), math.inf).double(), around_ten_thousand()]),
        torch.full((8 * TILE,), 0.1, dtype=torch.float64),
    ],
    ids=["alone", "behind a huge value", "behind zeros", "behind infinities", "without any"],
)
@pytest.mark.parametrize("most_programs", [1, 3])
def test_a_small_variance_beside_a_large_mean_is_kept(
    interpreter: Interpreter, values: Tensor, most_programs: int
) -> None:
    """The variance of 1e4 ± 1e-3 is accurate, whatever value comes first, and that of a constant is not negative."""
    count, mean, m2 = interpreter.state(values, most_programs=most_programs)[:3].tolist()
    finite = values[values.isfinite()].tolist()
    exact_mean = math.fsum(finite) / len(finite)
    exact = math.fsum((value - exact_mean) ** 2 for value in finite)
    rms = math.sqrt(exact_mean**2 + exact / len(finite))
    assert count == len(finite)
    assert abs(mean - exact_mean) <= 1e-12 * rms
    assert m2 >= 0
    assert abs(m2 - exact) <= 1e-12 * (exact + count * 2e-4 * exact_mean**2)


@needs_triton
@pytest.mark.parametrize("first", [math.inf, math.nan])
def test_a_first_tile_far_from_the_mean_costs_no_precision(interpreter: Interpreter, first: float) -> None:
    """The variance of 1e4 ± 1e-3 has nine digits even after a first tile without a finite value."""
    values = around_ten_thousand()
    exact_mean = math.fsum(values.tolist()) / len(values)
    exact = math.fsum((value - exact_mean) ** 2 for value in values.tolist())
    state = interpreter.state(torch.cat([torch.full((TILE,), first).double(), values]))
    assert abs(state[2] - exact) <= 1e-9 * exact


@needs_triton
def test_a_float64_has_the_bin_of_the_nearest_float32(interpreter: Interpreter) -> None:
    """Float64 values beyond the range of float32 go to the end bin, those too small for it to the bin of their zero."""
    largest = torch.finfo(torch.float32).max
    beyond, small = [1e39, 1e300, largest, largest * (1 + 1e-7)], [1e-46, 5e-324, 0.0]
    values = torch.tensor([*beyond, *small, math.inf], dtype=torch.float64)
    bins = interpreter.state(values, -values[:-2])[9:]
    assert {place: int(bins[place]) for place in bins.nonzero().flatten().tolist()} == {
        0: len(small),
        1019: len(beyond),
        1020: 1,
        1024: len(small) - 1,
        2043: len(beyond),
    }


@needs_triton
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sample", [None, 50])
def test_the_layout_does_not_matter(interpreter: Interpreter, shape: str, sample: int | None) -> None:
    """Transposed, strided, expanded, sliced and empty tensors are read correctly; samples follow the index order."""
    tensor = SHAPES[shape](numbers(10_000, torch.float32))
    assert_same(interpreter.state(tensor, sample=sample), plain(tensor.clone(), sample=sample))


@needs_triton
@pytest.mark.parametrize(
    ("count", "sample", "dtype"), pairwise([1, 100, TILE + 1, FEW + 1], [1, 7, 1000, 10**6], DTYPES)
)
def test_a_sample_is_the_same(interpreter: Interpreter, count: int, sample: int, dtype: torch.dtype) -> None:
    """A sample counts the same values as separate passes, and the fraction of counted values is correct."""
    tensor = numbers(count, dtype, special=True)
    assert_same(interpreter.state(tensor, factor=0.5, sample=sample), plain(tensor, 0.5, sample=sample))


@needs_triton
def test_complex_numbers_are_two_each(interpreter: Interpreter) -> None:
    """Real and imaginary parts are counted, even for a conjugated tensor."""
    tensor = torch.complex(numbers(3000, torch.float32), numbers(3000, torch.float32).flip(0)).conj()
    assert_same(interpreter.state(tensor.resolve_conj()), plain(tensor))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_values_are_all_counted(interpreter: Interpreter, dtype: torch.dtype) -> None:
    """Constant zeros and ones are in one bin and equal both extrema, without the padding of the last tile."""
    for value, place in ((0.0, 0), (-0.0, 1024), (1.0, 508), (-1.0, 1532)):
        state = interpreter.state(torch.full((FEW + 5,), value, dtype=dtype))
        assert state[:5].tolist() == [FEW + 5, value, 0, value, value]
        assert state[9:].nonzero().tolist() == [[place]]
        assert state[9 + place] == FEW + 5


# Fallback to torch


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3), torch.ones(3, device="meta"), torch.ones(3).as_subclass(Subclass), torch.ones(3).to_sparse()],
    ids=["on the CPU", "meta", "subclass", "sparse"],
)
def test_a_tensor_on_another_device_is_rejected(tensor: Tensor) -> None:
    """A tensor on another device is rejected, and the state does not change."""
    state = Statistics().state
    assert not add_statistics_on_device(state, Values(tensor), None)
    assert torch.equal(state, Statistics().initial())


@pytest.mark.parametrize("device", ["cpu", "meta", "mps"])
def test_other_devices_are_never_ready(device: str, caplog: pytest.LogCaptureFixture) -> None:
    """Other kinds of devices are never ready, and nothing is logged for them."""
    with caplog.at_level("DEBUG", "lightning_recorder"):
        assert not prepare_device(torch.device(device))
    assert caplog.messages == []


def prepared(environment: dict[str, str], *, gpu: bool) -> list[str]:
    """Prepare a device twice in a process with or without a simulated GPU; return its output lines."""
    code = f"""
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
import torch
from lightning_recorder.reductions.kernels.fused_cuda import prepare_device
torch.cuda.is_available, torch.cuda.is_current_stream_capturing = lambda: {gpu}, lambda: False
print([prepare_device(torch.device("cuda", 0)) for _ in range(2)], "triton" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [False, True])
def test_they_can_be_switched_off(gpu: bool) -> None:
    """If they are switched off, or without a GPU, nothing is ready, Triton is not imported and nothing is logged."""
    environment = {"LIGHTNING_RECORDER_TRITON": "0" if gpu else "1"}
    assert prepared(environment, gpu=gpu) == ["[False, False] False"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_failure_gives_one_warning() -> None:
    """Without Triton or a driver, preparing a GPU returns False and logs the reason once."""
    warned, answers = prepared({"LIGHTNING_RECORDER_TRITON": "1"}, gpu=True)
    assert warned.startswith("statistics on cuda:0 are computed by torch: ")
    assert answers.startswith("[False, False]")


@needs_triton
@pytest.mark.slow
def test_interpreted_kernels_are_not_used() -> None:
    """If Triton is set to interpret kernels, which would copy all tensors to the host, torch is used instead."""
    warned, answers = prepared({"LIGHTNING_RECORDER_TRITON": "1", "TRITON_INTERPRET": "1"}, gpu=True)
    assert "TRITON_INTERPRET is set" in warned
    assert answers == "[False, False] True"


# Compilation, which needs no GPU


def assembly(target: tuple[str, int | str, int], dtype: str, gathered: bool | None) -> dict[str, Any]:
    """Return the assembly of the share kernel, with or without gathering, or of the merge kernel for ``None``."""
    return dict(compiled_for(target, dtype, gathered).asm)


def compiled_for(target: tuple[str, int | str, int], dtype: str, gathered: bool | None) -> Any:
    """Return the compiled share kernel, with or without gathering, or the merge kernel for ``None``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_recorder.reductions.kernels import triton_kernels as kernels

    fixed: dict[str, int]
    if gathered is None:
        kernel, fixed = kernels.merge_shares, {"first_bin": HISTOGRAM, "bin_count": BINS}
        fixed |= {"most_programs": kernels.MOST_PROGRAMS, "most_copies": kernels.COPIES}
        types = {"programs": "i32", "numel": "i64", "sampled": "i64", "row": "*fp64"}
    else:
        kernel = kernels.reduce_share
        fixed = {"gathered": gathered, "rows": kernels.ROWS, "columns": kernels.COLUMNS}
        fixed |= {"first_bin": HISTOGRAM, "bin_count": BINS, "bin_shift": BIN_SHIFT, "most_copies": kernels.COPIES}
        whole = dict.fromkeys(("numel", "share", "factor", "sampled"), "i64")
        places = "*i64" if gathered else "*fp64"
        types = {"data": f"*{dtype}", "scaled": "i32", "places": places, "row": "*fp64", **whole}
    types |= {"parts": "*fp64", "counts": "*i32"}
    types.update(dict.fromkeys(fixed, "constexpr"))
    signature = {name: types[name] for name in inspect.signature(kernel.fn).parameters}
    return triton.compile(
        ASTSource(kernel, signature, constexprs=fixed),
        target=GPUTarget(*target),
        options={"num_warps": 4, "enable_fp_fusion": False},
    )


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def instructions(ptx: str, *parts: str) -> list[str]:
    """Return the instructions, without operands, whose name contains all the parts."""
    slots = (line.split()[1 if line.lstrip().startswith("@") else 0] for line in ptx.splitlines() if line.strip())
    return [slot for slot in slots if all(part in slot.split(".") for part in parts)]


@needs_triton
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize(
    ("dtype", "capability", "gathered"),
    [
        # All pairs of values occur.
        ("fp32", 75, False),
        ("fp32", 90, True),
        ("fp64", 75, True),
        ("fp64", 90, False),
        ("bf16", 75, False),
        ("bf16", 90, True),
        ("fp16", 75, True),
        ("fp16", 90, False),
    ],
)
def test_they_compile_for_nvidia(capability: int, dtype: str, gathered: bool) -> None:
    """The code adds in float64 only, does not flush subnormals, spills no registers and uses atomics only for bins."""
    found = assembly(("cuda", capability, 32), dtype, gathered)
    ptx = found["ptx"]
    assert len(found["cubin"]) > 0
    assert ".ftz" not in ptx
    assert ".local" not in ptx
    assert instructions(ptx, "add", "f32") + instructions(ptx, "fma", "f32") + instructions(ptx, "sub", "f32") == []
    assert len(instructions(ptx, "add", "f64")) > 0
    atomics = {f"{kind}.global.gpu.relaxed.add.{dtype}" for kind in ("atom", "red") for dtype in ("f64", "u32", "s32")}
    assert set(instructions(ptx, "global", "add")) <= atomics


@needs_triton
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("gathered", [False, True, None])
def test_they_compile_for_amd(gathered: bool | None) -> None:
    """The code compiles for an AMD GPU without spilling registers."""
    text = assembly(("hip", "gfx942", 64), "fp32", gathered)["amdgcn"]
    assert ".vgpr_spill_count: 0" in text


@needs_triton
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_cache")
def test_the_merge_compiles() -> None:
    """The merge kernel adds in float64 and has no atomic operation."""
    ptx = assembly(("cuda", 90, 32), "fp64", None)["ptx"]
    assert instructions(ptx, "global", "add") == []
    assert len(instructions(ptx, "add", "f64")) > 0


# Launching by the driver, which a stub stands for

KERNELS: Any = SimpleNamespace(ROWS=2, COLUMNS=512, RESULTS=7, COPIES=32, MOST_PROGRAMS=2048)
"""The constants of the kernels, which are in a module that imports Triton."""
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


class Driver:
    """The stub of the driver, with access to the launches that it has written down."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._calls = ((ctypes.c_int64 * 24) * 64).in_dll(self._library, "calls")

    def set(self, **numbers: int) -> None:
        """Set variables of the stub."""
        for name, number in numbers.items():
            ctypes.c_int.in_dll(self._library, name).value = number

    def launches(self) -> list[list[int]]:
        """Return kernel, grid, threads, shared memory, stream and arguments of all launches since the last call."""
        count = ctypes.c_int.in_dll(self._library, "count").value
        self.set(count=0)
        return [list(call) for call in self._calls[:count]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stub as a library."""
    path = tmp_path_factory.mktemp("driver") / "libcuda.so"
    source = Path(__file__).with_name("driver.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", str(source), "-o", str(path)], check=True)
    return path


@pytest.fixture
def driver(built: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The stub in place of the driver, with memory of the host in place of that of the device."""

    def results(kernels: Any, programs: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.empty(kernels.RESULTS * programs), torch.zeros(kernels.COPIES * BINS, dtype=torch.int32)

    monkeypatch.setattr(fused_cuda, "_DRIVER", str(built))
    monkeypatch.setattr(fused_cuda, "_results", results)
    stub = Driver(built)
    stub.set(count=0, status=0, failing_kernel=0, appended=2)
    return stub


def kernel(number: int, **metadata: Any) -> Any:
    """Return what the plan reads of a compiled kernel."""
    about = {"name": f"kernel {number}", "num_ctas": 1, "num_warps": 4, "shared": 16 * number}
    return SimpleNamespace(function=number, metadata=SimpleNamespace(**{**about, **metadata}))


def launcher(*kernels: Any, most_programs: int = 24) -> Any:
    """Return a launcher by the driver, for which 7 is the current stream."""
    compiled = kernels or (kernel(1), kernel(2))
    return fused_cuda._Launcher(KERNELS, compiled, most_programs, lambda index: 7, direct=True)


def bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


@needs_compiler
@pytest.mark.parametrize("appended", [0, 1, 2])
@pytest.mark.parametrize(("numel", "factor"), [(1, 1.0), (FEW, -0.5), (FEW + 1, 1.0), (10**9 + 7, 2.5)])
def test_the_driver_gets_the_arguments(driver: Driver, numel: int, factor: float, appended: int) -> None:
    """A few values are one launch and many are two, with the shares that Triton would be given, and null pointers."""
    driver.set(appended=appended)
    by_driver = launcher()
    programs, share = fused_cuda._shares(numel, TILE, 24)
    by_driver.launch(0, 1000, 2000, numel, factor)
    first, *rest = driver.launches()
    parts, counts = by_driver._memory.of(0, 7, KERNELS, 24) if programs > 1 else (1000, 1000)
    whats = [2000, numel, share, bits(factor), int(factor != 1.0), 1000, -1, parts, counts, 1000]
    assert first == [1, programs, 128, 16, 7, *whats, *[0] * 9]
    merged = [2, 1, 128, 32, 7, parts, counts, programs, numel, -1, 1000, *[0] * 13]
    assert rest == ([merged] if programs > 1 else [])


@needs_compiler
def test_a_launch_makes_few_calls(driver: Driver) -> None:
    """After the first one, a launch of both kernels calls four functions of Python."""
    by_driver = launcher()
    by_driver.launch(0, 1000, 2000, FEW + 1, 1.0)
    called: list[str] = []
    profiled(
        partial(by_driver.launch, 0, 1000, 2000, FEW + 1, 1.0),
        lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None,
    )
    assert called == ["launch", "<lambda>", "of", "_launch_by_driver"]
    assert len(driver.launches()) == 4


@needs_compiler
@pytest.mark.parametrize("failing", [1, 2])
def test_an_error_of_the_driver_is_raised(driver: Driver, failing: int) -> None:
    """The error has the number of the driver."""
    by_driver = launcher()
    driver.set(failing_kernel=failing, status=700)
    with pytest.raises(RuntimeError, match="error 700"):
        by_driver.launch(0, 1000, 2000, FEW + 1, 1.0)
    assert len(driver.launches()) == failing - 1


@needs_compiler
@pytest.mark.parametrize(
    "metadata", [{"num_ctas": 2}, {"launch_pdl": True}, {"launch_cooperative_grid": True}, {"global_scratch_size": 8}]
)
def test_other_kernels_are_not_launched(driver: Driver, metadata: dict[str, Any]) -> None:
    """Kernels that need a launch of their own kind are refused, as are those with other arguments."""
    with pytest.raises(RuntimeError, match="kernel 2"):
        launcher(kernel(1), kernel(2, **metadata))
    with pytest.raises(RuntimeError, match="kernel 1"):
        launcher(kernel(2, name="kernel 1"), kernel(2))
    driver.set(appended=3)
    with pytest.raises(RuntimeError, match="kernel 1"):
        launcher()
    assert driver.launches() == []


@needs_triton
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("gathered", [False, None])
def test_the_compiled_kernels_take_these_arguments(gathered: bool | None) -> None:
    """The arguments in the code for an NVIDIA GPU have the sizes that the driver is to confirm."""
    found = compiled_for(("cuda", 90, 32), "fp32", gathered)
    header = found.asm["ptx"].partition(".entry")[2].partition("{")[0]
    sizes = tuple(int(size) // 8 for size in re.findall(r"\.param \.[usb](\d+)", header))
    expected = fused_cuda._MERGED if gathered is None else fused_cuda._REDUCED
    assert sizes[: len(expected)] == expected
    assert set(sizes[len(expected) :]) <= {8}
    assert len(sizes) - len(expected) <= fused_cuda._MOST_OF_TRITON
    about = found.metadata
    assert (about.num_ctas, about.num_warps, bool(about.launch_pdl), about.global_scratch_size) == (1, 4, False, 0)
    assert {"shared", "launch_cooperative_grid", "profile_scratch_size", "name"} <= set(about._fields)


# On a GPU


def on_gpu(tensors: Sequence[Tensor], factor: float = 1.0, sample: int | None = None) -> Tensor:
    """Return the state from the kernels on a GPU."""
    state = Statistics(sample=sample).initial().cuda()
    for tensor in tensors:
        assert add_statistics_on_device(state, Values(tensor, factor), sample)
    return state


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    device = torch.device("cuda", 0)
    if not prepare_device(device):
        pytest.skip("the kernels cannot be compiled here")
    return device


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
@pytest.mark.parametrize("sample", [None, 1000])
@pytest.mark.parametrize("count", [1, TILE + 1, FEW, FEW + 1, 3_000_001])
def test_a_gpu_gives_what_separate_passes_give(
    gpu: torch.device, count: int, sample: int | None, factor: float, dtype: torch.dtype
) -> None:
    """On a GPU the state is equal, even for unaligned tensors, and each launch is bitwise reproducible."""
    tensor = numbers(count + 1, dtype, special=True).to(gpu)[1:]
    expected = Statistics(sample=sample).initial().to(gpu)
    Combined.add(Combined(Statistics(sample=sample).parts), expected, Values(tensor, factor))
    found = on_gpu([tensor], factor, sample)
    assert_same(found.cpu(), expected.cpu())
    assert torch.equal(on_gpu([tensor], factor, sample), found)


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, TILE + 1, FEW, FEW + 1, 3_000_001])
def test_the_quick_launch_gives_the_same(gpu: torch.device, count: int, dtype: torch.dtype) -> None:
    """Once a dtype is prepared, kernels are launched directly, also for tensors in an autograd graph."""
    tensor = numbers(count, dtype, special=True).to(gpu)
    on_gpu([tensor])
    expected = on_gpu([tensor] * 2, sample=count)[:SAMPLED_NUMEL]  # a sample is never counted by a quick launch
    state = Statistics().initial().to(gpu)
    for _ in range(2):  # the second one uses the memory that the first one leaves
        assert add_tensor_on_device(state, tensor.requires_grad_() * 1, 1.0, None)
    assert_same(state[:SAMPLED_NUMEL].cpu(), expected.cpu())


@needs_cuda
def test_other_tensors_have_no_quick_launch(gpu: torch.device) -> None:
    """A tensor that needs a copy, a sample, or a state elsewhere is left to the other ways, and nothing changes."""
    tensor = numbers(64, torch.float32).to(gpu).view(8, 8)
    on_gpu([tensor])
    state = Statistics().initial().to(gpu)
    for other in (tensor.t()[:, 1:], tensor.long(), tensor[:0], tensor.cpu(), tensor.to_sparse()):
        assert not add_tensor_on_device(state, other, 1.0, None)
    assert not add_tensor_on_device(state, tensor, 1.0, 5)
    assert not add_tensor_on_device(state.cpu(), tensor, 1.0, None)
    assert torch.equal(state.cpu(), Statistics().initial())
    images = torch.randn(2, 3, 4, 4, device=gpu).to(memory_format=torch.channels_last)
    assert add_tensor_on_device(state, images, 1.0, None)
    assert_same(state.cpu(), plain(images.cpu()))


@needs_cuda
@pytest.mark.parametrize("sample", [None, 1000])
def test_nothing_waits_for_the_gpu(gpu: torch.device, sample: int | None) -> None:
    """No launch synchronizes the GPU, with one program or with several."""
    tensors = [numbers(count, torch.float32).to(gpu) for count in (TILE, FEW + 1)]
    on_gpu(tensors, sample=sample)  # the first tensors of a dtype wait until the kernels are checked
    state = Statistics(sample=sample).initial().to(gpu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for tensor in tensors:
            assert add_statistics_on_device(state, Values(tensor), sample)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(state, on_gpu(tensors, sample=sample))


@needs_cuda
def test_a_graph_adds_what_the_tensors_hold_when_it_runs(gpu: torch.device) -> None:
    """Each replay of a captured CUDA graph adds the current values of the tensors."""
    tensors = [torch.zeros(100, device=gpu), torch.zeros(FEW + 1, device=gpu)]
    state = Statistics().initial().to(gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for tensor in tensors:
            assert add_statistics_on_device(state, Values(tensor), None)
    for tensor in tensors:
        tensor.copy_(numbers(len(tensor), torch.float32, special=True))
    graph.replay()
    assert torch.equal(state, on_gpu(tensors))
    graph.replay()
    assert torch.equal(state, on_gpu(tensors * 2))


@needs_cuda
@pytest.mark.slow
def test_more_values_than_an_int_counts(gpu: torch.device) -> None:
    """2**31 + 7 values are all counted in every count, including the last ones."""
    count = 2**31 + 7
    tensor = torch.zeros(count, dtype=torch.bfloat16, device=gpu)
    tensor[-3:] = 1.0
    for sample in (None, 1000):
        state = on_gpu([tensor], sample=sample).cpu()
        assert state[0] == state[5] == count
        assert state[3:5].tolist() == [0, 1]
        assert state[6:9].tolist() == [count - 3, 0, 0]
        assert state[9:2057].sum() == (count if sample is None else sample)
