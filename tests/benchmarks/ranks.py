"""The cost of merging the records of many ranks: measured with gloo processes, and a model for more of them.

The model: a tree of log2(ranks) levels. The slowest path encodes, sends, decodes and merges one message per level::

    time = levels * (encode + latency + bytes / bandwidth + decode + merge)

On one machine with few cores, all processes share these, so the time is at least the sum of all work over the cores.
The processor times are measured in one process, the latency and the bandwidth between two. The predictions are for one
rank per machine and a network of the given latency and bandwidth.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch.multiprocessing.spawn import spawn

from lightning_recorder.statistics import Exchange
from lightning_recorder.statistics.packing import Contribution, Decoder, Encoder
from lightning_recorder.statistics.rank_channel import RankChannel
from lightning_recorder.statistics.sites import SiteStates
from lightning_recorder.statistics.snapshot import Snapshot
from lightning_recorder.taps import Site

RANKS = (2, 4, 8)
PREDICTED = (64, 256, 1024)
SITES = (200, 2000)
VALUES = 4096  # of a site, which fill about 100 of the 2,048 bins
LATENCY_MS, GIGABYTES_PER_S = 0.05, 1.25  # a network of 10 Gbit/s
SMALL = 10  # slots of a state that are not additive, and its status


class Costs(NamedTuple):
    """The processor times of one message, in milliseconds, and its size."""

    work_ms: float
    nbytes: int


def snapshot(sites: int, rank: int) -> Snapshot:
    generator = torch.Generator().manual_seed(rank)
    states = SiteStates()
    for number in range(sites):
        states.add(Site(f"layers.{number}.linear", "out"), torch.randn(VALUES, generator=generator))
    return states.snapshot(())


def median_ms(function: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    times = []
    for _ in range(repeats):
        start = clock()
        function()
        times.append(1000 * (clock() - start))
    return statistics.median(times)


def costs(sites: int, repeats: int) -> Costs:
    """Measure what one message costs in one process."""
    one, other = (Contribution.of(snapshot(sites, rank), rank) for rank in (0, 1))
    encoder, decoder = Encoder(), Decoder()
    decoder.decode("", encoder.encode("", other), one)
    message = encoder.encode("", other)

    def pass_on() -> None:
        fresh = Contribution(kinds=dict(one.kinds))
        fresh.merge(decoder.decode("", encoder.encode("", other), fresh))

    return Costs(median_ms(pass_on, repeats, time.process_time), len(message))


def transport(rank: int, repeats: int) -> tuple[float, float]:
    """Return the latency in milliseconds and the bandwidth in bytes per millisecond between two processes."""

    def send(numel: int) -> Callable[[], None]:
        tensor = torch.zeros(numel)

        def there_and_back() -> None:
            for source in (0, 1):
                (dist.send if source == rank else dist.recv)(tensor, 1 - rank)

        return there_and_back

    size = 1 << 22
    latency, long = median_ms(send(1), 20 * repeats) / 2, median_ms(send(size), repeats) / 2
    return latency, 4 * size / max(long - latency, 1e-6)


def work(rank: int, ranks: int, folder: str, repeats: int) -> None:
    """Measure on one of several processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found: dict[str, Any] = {}
    if ranks == 2:
        found["transport"] = transport(rank, repeats)
    for sites in SITES:
        exchange = Exchange(torch.device("cpu"))
        exchange.agree(True, "")
        channel = RankChannel.current
        assert channel is not None
        own = snapshot(sites, rank)
        exchange.submit(own).result()  # the first message also has the names of the sites
        sent, received = channel.sent_bytes, channel.received_bytes
        submit, merged = [], []
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            pending = exchange.submit(own)
            submit.append(1000 * (time.perf_counter() - start))
            pending.result()
            merged.append(1000 * (time.perf_counter() - start))
        gathered = torch.zeros(sites * SMALL, dtype=torch.float64)
        added = torch.zeros(sites * 2048, dtype=torch.float64)

        def collectives(gathered: torch.Tensor = gathered, added: torch.Tensor = added) -> None:
            dist.all_gather([torch.empty_like(gathered) for _ in range(ranks)], gathered)
            dist.reduce(added, 0)

        found[str(sites)] = {
            "submit_ms": statistics.median(submit),
            "merged_ms": statistics.median(merged),
            "sent": (channel.sent_bytes - sent) // repeats,
            "received": (channel.received_bytes - received) // repeats,
            "collectives_ms": median_ms(collectives, repeats),
        }
        exchange.close()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def measured(ranks: int, repeats: int) -> list[dict[str, Any]]:
    """Return what each of several processes has measured."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (ranks, folder, repeats), nprocs=ranks)
        return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(ranks)]


def size(nbytes: float) -> str:
    return f"{nbytes / 1e6:.2f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--latency-ms", type=float, default=LATENCY_MS, help="of the network of the prediction")
    parser.add_argument("--gigabytes-per-s", type=float, default=GIGABYTES_PER_S, help="of that network")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {ranks: measured(ranks, arguments.repeats) for ranks in RANKS}
    message = {sites: costs(sites, arguments.repeats) for sites in SITES}
    latency_ms, bytes_per_ms = found[2][0]["transport"]
    cores = os.cpu_count() or 1
    lines = [f"{cores} cores; gloo: {latency_ms:.2f} ms, {bytes_per_ms / 1e6:.2f} GB/s between two processes", ""]
    lines += [f"{each} sites: a message takes {message[each].work_ms:.1f} ms of a processor" for each in SITES]
    head = "| ranks | sites | training waits | merged after | model | first rank receives | with collectives |"
    lines += ["", "Measured:", "", head, "|---" * 7 + "|"]
    for ranks, results in found.items():
        for sites in SITES:
            first = results[0][str(sites)]
            waits = max(each[str(sites)]["submit_ms"] for each in results)
            hop = latency_ms + message[sites].nbytes / bytes_per_ms
            path = math.log2(ranks) * (message[sites].work_ms + hop)
            expected = max(path, (ranks - 1) * (message[sites].work_ms + hop) / cores)
            lines.append(
                f"| {ranks} | {sites} | {waits:.2f} ms | {first['merged_ms']:.1f} ms | {expected:.1f} ms "
                f"| {size(first['received'])} | {first['collectives_ms']:.1f} ms |"
            )
    network = f"{arguments.latency_ms:g} ms, {arguments.gigabytes_per_s:g} GB/s"
    head = "| ranks | sites | merged after | first rank receives | others at most | each rank with all_gather |"
    lines += ["", f"Predicted for one rank per machine and a network of {network}:", "", head, "|---" * 6 + "|"]
    for ranks in PREDICTED:
        for sites in SITES:
            levels = math.log2(ranks)
            hop = arguments.latency_ms + message[sites].nbytes / (1e6 * arguments.gigabytes_per_s)
            lines.append(
                f"| {ranks} | {sites} | {levels * (message[sites].work_ms + hop):.0f} ms "
                f"| {size(levels * message[sites].nbytes)} | {size((levels - 1) * message[sites].nbytes)} "
                f"| {size(8 * SMALL * sites * ranks)} |"
            )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
