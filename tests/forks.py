"""Programs in forks of a process that has imported torch and Lightning, since each import of them takes seconds."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
# The process that is forked imports these once. It never trains, so that it has no thread that a fork would lose.
_PRELOADED = [
    "lightning.pytorch",
    "torch.distributed.fsdp",
    "torchmetrics",
    "lightning_recorder.callbacks",
    "tests.callbacks.models",
]


def context() -> multiprocessing.context.ForkServerContext:
    """Return the context in which processes start as forks of the one that has imported torch and Lightning."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(_PRELOADED)
    # The variable of a test is for its own processes, and not for the one from which those of later tests are forked.
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LIGHTNING_RECORDER", raising=False)
        forkserver.ensure_running()
    return forks


@contextlib.contextmanager
def started(
    *command: object, folder: Path, ranks: int = 0, variables: Mapping[str, str] | None = None
) -> Iterator[list[multiprocessing.context.ForkServerProcess]]:
    """Start ``python <command>`` in the folder, with one thread and without CUDA, in a fork or in one per rank.

    The processes, and those that they have started, are killed at the end of the context.

    Args:
        command: A script, ``"-c"`` and a program, or ``"-m"`` and a module, followed by the arguments.
        folder: The working directory, which also receives the output as ``log.txt``, after that of earlier processes.
        ranks: The number of ranks, which find each other as with ``torchrun``; Lightning starts no further process.
        variables: More environment variables.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment |= variables or {}
    if ranks:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "NODE_RANK": "0"}
    log, arguments = folder / "log.txt", [str(each) for each in command]
    log.touch()
    processes = []
    for rank in range(max(1, ranks)):
        own = {**environment, "LOCAL_RANK": str(rank)} if ranks else environment
        processes.append(context().Process(target=_run, args=(arguments, own, folder, log)))
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()


def run(
    *command: object, folder: Path, ranks: int = 0, timeout_s: float = 200.0, variables: Mapping[str, str] | None = None
) -> tuple[list[int], str]:
    """Run a command as :func:`started` does, and wait for it.

    Args:
        command: See :func:`started`.
        folder: See :func:`started`.
        ranks: See :func:`started`.
        timeout_s: The time limit in seconds.
        variables: See :func:`started`.

    Returns:
        The exit status of each process, negative for a signal, and the output of all of them.

    Raises:
        TimeoutError: If a process has not ended in time; says what the processes have written.
    """
    end, log = time.monotonic() + timeout_s, folder / "log.txt"
    with started(*command, folder=folder, ranks=ranks, variables=variables) as processes:
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.exitcode is None:
                raise TimeoutError(f"{command} took more than {timeout_s} s: {log.read_text()[-2000:]}")
    return [process.exitcode or 0 for process in processes], log.read_text()


def output_of(*command: object, folder: Path, timeout_s: float = 200.0) -> str:
    """Run a command as :func:`started` does, in one process that must succeed, and return its output."""
    codes, log = run(*command, folder=folder, timeout_s=timeout_s)
    assert codes == [0], log[-3000:]
    return log


def _run(arguments: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> None:
    os.setsid()  # also ends the processes that this one starts
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in sys.stdout, sys.stderr:
        os.dup2(out, stream.fileno())
    torch.set_num_threads(1)  # the variable was read before
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = list(arguments)
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which a fork does not run
