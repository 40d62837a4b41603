"""An agreement among all ranks without a collective."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["missing_ranks"]


def missing_ranks(name: str, *, timeout_s: float) -> list[int] | None:
    """Return the ranks that do not call this function with the same name in time; empty if all ranks do.

    The ranks write keys into the store of the default process group. All ranks that call this function agree on whether
    ranks are missing. Unlike a collective, this does not disturb ranks that do not call it.

    Args:
        name: A name that is equal on all ranks, used once.
        timeout_s: The time that the first rank waits for the other ranks. The other ranks wait three times as long for
            the decision of the first rank.

    Returns:
        On the first rank, the missing ranks. On other ranks, an empty list if no rank is missing. Otherwise, ``[0]`` if
        this rank has found that the first rank is missing, and None if another rank has decided.
    """
    store = dist.distributed_c10d._get_default_store()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    keys, decision = [f"{name}/{each}" for each in range(ranks)], f"{name}/decision"
    store.set(keys[rank], "here")
    if rank == 0:
        is_complete = _wait(store, keys, timeout_s)
        answer = "yes" if is_complete else "no"
    else:
        answer = "" if _wait(store, [decision], 3 * timeout_s) else f"no, by {rank}"
    if answer:
        # Atomic, so that all ranks use the first answer.
        store.compare_set(decision, "", answer)
    found = store.get(decision).decode()
    if found == "yes":
        return []
    if rank == 0:
        return [each for each, key in enumerate(keys) if not store.check([key])] or [0]
    return [0] if found == f"no, by {rank}" else None


def _wait(store: Any, keys: list[str], timeout_s: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:  # DistStoreError is a subclass
        return False
    return True
