"""Tests of the one-pass C function against separate torch passes."""

from __future__ import annotations

import math
import platform
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_recorder.recordings import open_recording
from lightning_recorder.reductions import Combined, Statistics, Values
from lightning_recorder.reductions.kernels import fused
from tests import forks
from tests.pairs import pairwise
from tests.reductions.strategies import streams

needs_compiler = pytest.mark.skipif(not fused.prepare(wait=True), reason="there is no C compiler")
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SPECIAL = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e-45, -1e-40, 3.4e38, 1.1754944e-38]


def plain(tensor: Tensor, factor: float = 1.0, state: Tensor | None = None, sample: int | None = None) -> Tensor:
    """Return the state from the separate torch passes, without a kernel."""
    statistics = Statistics(sample=sample)
    state = statistics.state if state is None else state
    Combined.add(Combined(statistics.parts), state, Values(tensor, factor))
    return state


def in_one_pass(tensor: Tensor, factor: float = 1.0, sample: int | None = None) -> Tensor:
    """Return the state from the C function, which must accept the tensor."""
    state = Statistics(sample=sample).state
    assert fused.add_statistics(state, Values(tensor, factor), sample)
    return state


def assert_equal(found: Tensor, expected: Tensor) -> None:
    """Assert bitwise equal counts, extrema and bins, the mean within 1e-12 of the rms, and m2 within its bound."""
    assert torch.equal(found[3:], expected[3:])
    assert found[0] == expected[0]
    mean, variance = expected[1], expected[2] / expected[0].clamp(min=1)
    assert abs(found[1] - mean) <= 1e-12 * (mean.square() + variance).sqrt()
    assert abs(found[2] - expected[2]) <= 1e-12 * (variance + 2e-4 * mean.square()) * expected[0]


def numbers(count: int, dtype: torch.dtype, special: bool = False) -> Tensor:
    """Return numbers of very different magnitude, some of them special."""
    torch.manual_seed(count)
    values = torch.randn(count, dtype=torch.float64) * 10.0 ** torch.randint(-6, 7, (count,)) + 3
    if special:
        places = torch.arange(0, count, max(1, count // 20))
        values[places] = torch.tensor(SPECIAL, dtype=torch.float64)[torch.arange(len(places)) % len(SPECIAL)]
    return values.to(dtype)


@needs_compiler
@pytest.mark.parametrize(
    ("count", "factor", "special", "dtype"),
    pairwise([0, 1, 2, 3, 2047, 2048, 2049, 32767, 32768, 100_003], [1.0, 0.5, 1 / 3, 65536.0], [False, True], DTYPES),
)
def test_one_pass_gives_what_separate_passes_give(count: int, factor: float, special: bool, dtype: torch.dtype) -> None:
    """For each dtype, factor and size around those of a block and a thread share, both ways give the same state."""
    tensor = numbers(count, dtype, special)
    assert_equal(in_one_pass(tensor, factor), plain(tensor, factor))


@needs_compiler
@settings(max_examples=100)
@given(streams)
def test_a_stream_in_one_pass_each(stream: list[Tensor]) -> None:
    """For any stream, the tensors that the function accepts lead to the same state as separate passes."""
    ours, theirs = Statistics().state, Statistics().state
    for tensor in stream:
        if fused.add_statistics(ours, Values(tensor), None):
            plain(tensor, state=theirs)
    assert_equal(ours, theirs)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_the_number_of_threads_does_not_matter(threads: int) -> None:
    """The state does not depend on the number of threads, even if a thread has no values."""
    tensor = numbers(40_000, torch.float32, special=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_equal(in_one_pass(tensor), plain(tensor))
    finally:
        torch.set_num_threads(before)


def assert_small_variances_are_kept(state_of: Callable[[Tensor], Tensor]) -> None:
    """Assert that a function computes the variance of 1e4 ± 1e-3 accurately, whatever value comes first."""
    torch.manual_seed(0)
    tensor = 1e4 + 1e-3 * torch.randn(100_000, dtype=torch.float64)
    for values in (tensor, torch.cat([torch.tensor([1e9]).double(), tensor]), tensor.flip(0)):
        exact = (values - values.mean()).square().sum()
        assert abs(state_of(values)[2] - exact) <= 1e-12 * (exact + len(values) * 2e-4 * values.mean().square())


@needs_compiler
def test_a_small_variance_beside_a_large_mean_is_kept() -> None:
    """The variance of 1e4 ± 1e-3 is accurate, whatever value comes first."""
    assert_small_variances_are_kept(in_one_pass)


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.view(10, 20, 50).transpose(0, 2),
    "strided": lambda x: x[::3],
    "expanded": lambda x: x[:1].expand(7, 5),
    "channels last": lambda x: x.view(10, 5, 20, 10).contiguous(memory_format=torch.channels_last),
    "part of another": lambda x: x[17:400],
    "0-d": lambda x: x[3],
    "empty": lambda x: x[:0],
    "of a graph": lambda x: (x.clone().requires_grad_() * 2).detach(),
    "parameter": lambda x: nn.Parameter(x).detach(),
}


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_layout_does_not_matter(shape: Callable[[Tensor], Tensor]) -> None:
    """Transposed, strided, expanded, sliced and empty tensors are read correctly, without the memory around them."""
    whole = numbers(10_000, torch.float32)
    tensor = shape(whole)
    assert_equal(in_one_pass(tensor), plain(tensor.clone()))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool], ids=str)
def test_integers_are_read(dtype: torch.dtype) -> None:
    """A tensor of integers or booleans has the statistics that torch computes."""
    tensor = torch.arange(-300, 700).to(dtype)
    assert_equal(in_one_pass(tensor), plain(tensor))


class Subclass(Tensor):
    """A tensor subclass with unknown contents."""


@needs_compiler
@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, dtype=torch.float16),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, device="meta"),
        torch.ones(3).to_sparse(),
        torch.ones(3).as_subclass(Subclass),
        torch.ones(3, dtype=torch.complex64).conj().imag,
    ],
    ids=["float16", "complex", "meta", "sparse", "subclass", "negated"],
)
def test_what_it_cannot_read_is_left_to_torch(tensor: Tensor) -> None:
    """Other dtypes, devices, layouts and classes are rejected, and the state does not change."""
    state = Statistics().state
    assert not fused.add_statistics(state, Values(tensor), None)
    assert torch.equal(state, Statistics().initial())


def test_zeros_without_memory_are_counted() -> None:
    """A gradient of zeros without memory, such as that of ``sgn``, is counted as zeros."""
    seen: list[Tensor] = []
    statistics = Statistics()

    def see(grad: Tensor) -> None:
        seen.append(grad.clone())
        statistics.update(grad)

    x = torch.randn(2, 3, requires_grad=True)
    y = x * 1
    y.register_hook(see)
    y.sgn().sum().backward()
    assert seen[0].tolist() == [[0.0] * 3] * 2
    summary = statistics.compute()
    assert (float(summary["count"]), float(summary["zero_fraction"])) == (6.0, 1.0)


@needs_compiler
def test_nothing_of_torch_runs() -> None:
    """The function calls no torch operator, so autograd, graph captures and modes do not see it."""

    class Refuse(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotations here

        def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            raise AssertionError(func)

    tensor, state = torch.ones(100), Statistics().state
    with Refuse():
        assert fused.add_statistics(state, Values(tensor), None)
    assert state[0] == 100


@pytest.mark.slow
@needs_compiler
def test_small_numbers_are_left_to_the_training(tmp_path: Path) -> None:
    """Loading the function does not make any thread of the process flush subnormal numbers to zero."""
    code = """
import torch
from lightning_recorder.reductions.kernels import fused
assert fused.prepare(wait=True)
small = torch.full((100_000,), 1e-40)
print((small * 0.5 > 0).all().item(), torch.tensor(1e-310, dtype=torch.float64).mul(0.5).item() > 0)
"""
    assert forks.output_of("-c", code, folder=tmp_path) == "True True\n"


@needs_compiler
@pytest.mark.parametrize(
    ("count", "sample", "dtype"),
    pairwise([0, 1, 2047, 2049, 32768, 100_003], [1, 2, 100, 4096, 10**6], DTYPES),
)
def test_a_sample_is_the_same(count: int, sample: int, dtype: torch.dtype) -> None:
    """With a sample both ways count the same values, for any block size and number of threads."""
    tensor = numbers(count, dtype, special=True)
    assert_equal(in_one_pass(tensor, 0.5, sample), plain(tensor, 0.5, sample=sample))


@needs_compiler
def test_a_sample_goes_by_the_order_of_the_indices() -> None:
    """The sample of a tensor with another memory order follows the order of its indices."""
    tensor = SHAPES["channels last"](numbers(10_000, torch.float32))
    assert_equal(in_one_pass(tensor, sample=50), plain(tensor, sample=50))


@needs_compiler
def test_equal_values_do_not_overflow_a_bin() -> None:
    """A million equal values, more than a table for the bins of a block can hold, are all counted."""
    for count in (4 * 65535, 4 * 65535 + 1, 10**6):
        state = in_one_pass(torch.ones(count))
        assert state[9 + 508] == count


@needs_compiler
@pytest.mark.slow
def test_more_values_than_an_int_counts() -> None:
    """2**31 + 7 zeros, which take no memory until they are written, are all counted in every count."""
    count = 2**31 + 7
    tensor = torch.from_numpy(np.zeros(count, dtype=np.uint16)).view(torch.bfloat16)
    state = in_one_pass(tensor)
    assert state[:9].tolist() == [count, 0, 0, 0, 0, count, count, 0, 0]
    assert state[9] == count


# Building


PREPARE = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
import torch
from lightning_recorder.reductions import Statistics
from lightning_recorder.reductions.kernels import fused
statistics = Statistics()
statistics.update(torch.ones(3))
print(fused.prepare(wait=True), float(statistics.compute()["count"]), flush=True)
"""


def prepared(folder: Path, environment: dict[str, str] | None = None, processes: int = 0) -> list[str]:
    """Return the results of preparing the function in other processes, with the folder as the cache, and the logs."""
    script = folder / "prepare.py"
    script.write_text(PREPARE, encoding="utf-8")
    (folder / "log.txt").unlink(missing_ok=True)
    variables = {"XDG_CACHE_HOME": str(folder), **(environment or {})}
    codes, log = forks.run(script, folder=folder, ranks=processes, variables=variables)
    assert set(codes) == {0}, log
    return log.splitlines()


@needs_compiler
@pytest.mark.slow
def test_it_is_built_once_for_the_user_alone(tmp_path: Path) -> None:
    """The first process builds and logs it, the second finds it; the folder is private and has no other files."""
    first, second = (prepared(tmp_path) for _ in range(2))
    assert first[0].startswith("built ")
    assert first[1:] == second == ["True 3.0"]
    folder = tmp_path / "lightning_recorder"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [each.suffix for each in folder.iterdir()] == [".so"]


@needs_compiler
@pytest.mark.slow
def test_processes_may_build_at_once(tmp_path: Path) -> None:
    """Several processes that find no library build at the same time and all end up with one."""
    lines = prepared(tmp_path, processes=4)
    assert [line for line in lines if not line.startswith("built ")] == ["True 3.0"] * 4
    assert len(lines) > 4
    assert len(list((tmp_path / "lightning_recorder").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "warned"),
    [
        ({"LIGHTNING_RECORDER_FUSED": "0"}, None),
        ({"PATH": "/nonexistent", "CC": ""}, "no C compiler"),
        ({"CC": "/bin/false"}, "/bin/false did not build it, RuntimeError: it ended with status 1. Set CC"),
        ({"CC": "/nonexistent/cc -O2"}, "/nonexistent/cc -O2 did not build it, FileNotFoundError"),
        ({"CC": "gcc '-O2"}, "ValueError: No closing quotation"),
        ({"XDG_CACHE_HOME": "/proc/nonexistent"}, "FileNotFoundError"),
    ],
    ids=["switched off", "no compiler", "one that fails", "one that is missing", "an open quote", "no folder"],
)
def test_without_it_torch_computes(environment: dict[str, str], warned: str | None, tmp_path: Path) -> None:
    """Any obstacle is logged in one line, nothing is raised, and torch computes the statistics."""
    *logged, result = prepared(tmp_path, environment)
    assert result == "False 3.0"
    assert all(warned in line for line in logged) if warned else logged == []
    assert len(logged) == bool(warned)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the code that a wheel for this machine has."""
    folder, machine = tmp_path_factory.mktemp("shipped"), platform.machine()
    compiler = next(filter(shutil.which, ("cc", "gcc", "clang")))
    names = [each.name for each in fused.build_for_wheel([compiler], machine, folder)]
    assert names == [f"fused-{machine}-threads.so", f"fused-{machine}-plain.so"]
    return folder


def with_shipped(folder: Path, program: str = PREPARE) -> str:
    return program.replace("statistics =", f"fused._SHIPPED = fused.Path({str(folder)!r})\nstatistics =")


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in fused._PORTABLE, reason="there are no wheels for this machine")
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"PATH": "/nonexistent", "CC": ""}, None),
        ({"CC": "/bin/false"}, "/bin/false did not build it"),
        ({"XDG_CACHE_HOME": "/proc/nonexistent"}, "FileNotFoundError"),
    ],
    ids=["no compiler", "one that fails", "no folder"],
)
def test_the_code_of_a_wheel_needs_no_compiler(
    environment: dict[str, str], said: str | None, shipped: Path, tmp_path: Path
) -> None:
    """On a machine without a compiler, the code of the wheel computes the statistics, without a warning."""
    variables = {"XDG_CACHE_HOME": str(tmp_path), **environment}
    codes, log = forks.run("-c", with_shipped(shipped), folder=tmp_path, variables=variables)
    *logged, result = log.splitlines()
    assert (codes, result) == ([0], "True 3.0")
    assert len(logged) == (said is not None)
    assert all(line.startswith("the C code of the wheel computes") and str(said) in line for line in logged)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("obstacle", ["features", "file"])
def test_code_of_a_wheel_that_does_not_fit_is_left_alone(obstacle: str, shipped: Path, tmp_path: Path) -> None:
    """On a processor without the features, or if the files are no libraries, torch computes."""
    program = with_shipped(shipped)
    if obstacle == "features":
        program = program.replace("statistics =", 'fused._features = lambda: "flags : fpu sse2 asimd"\nstatistics =')
    else:
        for each in shipped.iterdir():
            (tmp_path / each.name).write_bytes(b"no library")
        program = with_shipped(tmp_path)
    variables = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/nonexistent", "CC": ""}
    codes, log = forks.run("-c", program, folder=tmp_path, variables=variables)
    assert (codes, log.splitlines()) == ([0], ["there is no C compiler; torch computes the statistics", "False 3.0"])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("command", ["{} -O2", "env {}", "  {} -O2 '-DTWO WORDS=1' "])
def test_the_compiler_may_be_a_command_of_several_words(command: str, tmp_path: Path) -> None:
    """``CC`` is split as a shell does, such as ``gcc -O2`` or ``ccache gcc``."""
    compiler = next(filter(shutil.which, ("cc", "gcc", "clang")))
    *logged, result = prepared(tmp_path, {"CC": command.format(compiler)})
    assert result == "True 3.0"
    assert [line.split()[0] for line in logged] == ["built"]


HANGING = """#!/bin/sh
sleep 300 &
echo $! >> {0}/pids
echo $$ >> {0}/pids
wait
"""


def hanging(folder: Path) -> str:
    """Return a compiler that waits for another process, which never ends, and notes the ids of both."""
    compiler = folder / "hanging-cc"
    compiler.write_text(HANGING.format(folder), encoding="utf-8")
    compiler.chmod(0o755)
    return str(compiler)


def has_left(folder: Path) -> bool:
    """Return True if a process of the hanging compiler is still there after a while."""
    pids = [Path("/proc", pid) for pid in (folder / "pids").read_text().split()]
    assert len(pids) == 2
    for _ in range(600):  # a killed process disappears when the system has noticed
        if not any(map(is_running, pids)):
            return False
        time.sleep(0.05)
    return True


def is_running(pid: Path) -> bool:
    """Return True for a process that is not one that has ended and that nobody has waited for."""
    try:
        return (pid / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


FIT = """
import sys
from pathlib import Path
from lightning_recorder import ActivationRecorder, Outputs
from lightning_recorder.reductions.kernels import fused
from tests.callbacks.small import go

quiet = Outputs(plots=False)
go(Path(sys.argv[1]), [ActivationRecorder(every_n_train_steps=1, outputs=quiet)])
print("fit", fused.prepare(), fused.may_become_available(), flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
@pytest.mark.slow
def test_a_fit_does_not_wait_for_a_compiler_that_hangs(tmp_path: Path) -> None:
    """The fit is recorded while the compiler hangs, and the end of the program ends the compiler."""
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CC": hanging(tmp_path)}
    codes, log = forks.run("-c", FIT, tmp_path, folder=tmp_path, variables=variables)
    assert codes == [0]
    assert log.splitlines()[-1] == "fit False True"
    assert not has_left(tmp_path)
    recording = open_recording(tmp_path)
    assert recording["activations"].steps == recording["watch"].steps == list(range(8))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
@pytest.mark.slow
def test_a_compiler_that_hangs_is_stopped(tmp_path: Path) -> None:
    """After the time limit, one line says why torch is used; there is one attempt, and no process is left."""
    program = PREPARE.replace("statistics =", "fused._TIMEOUT_S = 0.5\nstatistics =")
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CC": hanging(tmp_path)}
    codes, log = forks.run("-c", program, folder=tmp_path, variables=variables)
    logged, result = log.splitlines()
    assert (codes, result) == ([0], "False 3.0")
    assert f"C code: {tmp_path}/hanging-cc did not build it, it was stopped after 0.5 s. Set CC to" in logged
    assert not has_left(tmp_path)
    assert list((tmp_path / "cache" / "lightning_recorder").iterdir()) == []


@needs_compiler
@pytest.mark.parametrize("count", [100, 40_000])
def test_a_state_may_change_from_torch_to_c(count: int) -> None:
    """A state to which torch has added the first tensors is what torch would have computed alone, but for rounding."""
    tensors = [numbers(count + index, torch.float32, special=True) for index in range(4)]
    expected = plain(tensors[1], state=plain(tensors[0]))
    mixed = expected.clone()
    for tensor in tensors[2:]:
        plain(tensor, state=expected)
        assert fused.add_statistics(mixed, Values(tensor), None)
    assert_equal(mixed, expected)


@pytest.mark.slow
def test_code_that_others_could_have_written_is_not_loaded(tmp_path: Path) -> None:
    """A cache folder that others may write to is rejected."""
    folder = tmp_path / "lightning_recorder"
    folder.mkdir()
    folder.chmod(0o777)
    *logged, result = prepared(tmp_path)
    assert result == "False 3.0"
    assert "is writable by other users" in logged[0]
    assert list(folder.iterdir()) == []


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("sizes", [[0], [1], [3, 0, 70], [2048, 2049], [40_000, 5, 100_001], [20_000] * 9])
def test_norm_of_many_tensors(sizes: list[int], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is that of all values, whatever part of them a thread sums."""
    torch.manual_seed(0)
    tensors = [torch.randn(size) * 10.0**place for place, size in enumerate(sizes)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    expected = torch.cat(tensors).double().norm().item()
    assert fused.norm_of(tensors) == pytest.approx(expected, rel=1e-6)


@needs_compiler
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_norm_that_is_not_finite(value: float) -> None:
    """One value that is not finite, or whose square is not, makes the norm so, wherever it is."""
    for place in (0, 31, 2047, 2048, 69_999):
        tensor = torch.ones(70_000)
        tensor[place] = value
        assert fused.norm_of([torch.ones(3), tensor, torch.ones(3)]) == pytest.approx(
            math.nan if math.isnan(value) else math.inf, nan_ok=True
        )


@needs_compiler
def test_norm_of_channels_last() -> None:
    """A dense tensor is read in memory order. Tensors of other kinds are left to torch."""
    tensor = torch.randn(2, 5, 4, 3).to(memory_format=torch.channels_last)
    assert fused.norm_of([tensor]) == pytest.approx(tensor.double().norm().item(), rel=1e-6)
    for other in (tensor[:, 1], tensor.double(), tensor.bfloat16(), tensor.contiguous().to_sparse(), tensor.to("meta")):
        assert fused.norm_of([tensor, other]) is None
    assert fused.norm_of([nn.Parameter(tensor)]) is None
