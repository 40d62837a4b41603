"""Tests of the states of many sites, most of which share rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.reductions import CompactStates, compact, prepare
from lightning_recorder.reductions.row import COUNT
from lightning_recorder.statistics import sites
from lightning_recorder.statistics.sites import SiteStates
from lightning_recorder.taps import Site

pytestmark = pytest.mark.skipif(not prepare(wait=True), reason="there is no C compiler")

SITES = [Site(f"{place}", "out") for place in range(12)]


@pytest.fixture(autouse=True, scope="module")
def few_rows() -> Iterator[None]:
    """Let few sites have rows of their own, and the others share few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sites, "_LASTING", 2)
        patch.setattr(compact, "_ROWS", 2)
        yield


def with_lasting_rows() -> SiteStates:
    """Return states in which each site has a row of its own."""
    found = SiteStates()
    found._can_recycle = False
    return found


def add(states: SiteStates, site: Site, tensor: Tensor) -> None:
    """Add a tensor as a tap does."""
    if not states.try_fast_path(site, tensor):
        with pause_recording():
            states.add(site, tensor)


def bits(states: SiteStates) -> dict[Site, list[int]]:
    """Return the bits of the state of each site that has received values."""
    groups = states.snapshot([], compact=True).groups[0]
    pairs = [pair for group in groups for pair in zip(group.keys, group.states, strict=True)]
    return {site: state.view(torch.int64).tolist() for site, state in pairs if state[COUNT]}


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TENSORS = st.tuples(st.sampled_from(SITES), st.sampled_from(["float32", *DTYPES]), st.integers(0, 3))
ACTIONS = st.sampled_from(["compare", "reset", "save", "restore", "reload"])


@pytest.mark.slow
@given(st.lists(st.tuples(st.lists(TENSORS, min_size=15, max_size=30), ACTIONS), max_size=4))
def test_shared_rows_give_the_same_states(actions: list[tuple[list[tuple[Site, str, int]], str]]) -> None:
    """Whatever happens in which order, sites that share rows have the states of sites with rows of their own."""
    shared, lasting = SiteStates(), with_lasting_rows()
    savepoint = None
    for tensors, action in [*actions, ([], "compare")]:
        for number, (site, dtype, size) in enumerate(tensors):
            tensor = torch.linspace(-number - 1, 3 * number, 10**size).to(DTYPES[dtype])
            add(shared, site, tensor)
            add(lasting, site, tensor)
        if action == "compare":
            assert bits(shared) == bits(lasting)
        elif action == "reset":
            shared.reset()
            lasting.reset()
        elif action == "save":
            savepoint = shared.saved(), lasting.saved()
        elif action == "restore" and savepoint is not None:
            shared.restore(savepoint[0])
            lasting.restore(savepoint[1])
        elif action == "reload":
            state = shared.state_dict()
            shared, savepoint = SiteStates(), None
            shared.load_state_dict(state, torch.device("cpu"))


def test_most_sites_of_a_large_model_share_rows() -> None:
    """One tensor for each site in each step leaves a few whole rows in memory, and all sites in the snapshot."""
    states = SiteStates()
    for step in range(3):
        for site in SITES:
            add(states, site, torch.full((50,), float(step)))
        (group,) = states.snapshot([], compact=True).groups[0]
        assert isinstance(group, CompactStates)
        assert group.keys == states.sites == SITES
        assert len(states._banks[0]) == 2
        assert states._recycled.nbytes < 5 * 8 * group.states.shape[1]
        states.reset()


def test_a_site_that_comes_again_later_keeps_a_row() -> None:
    """A module that is called again after many others gets a row of its own, and the others do not."""
    states = SiteStates()
    for site in (*SITES, SITES[3]):
        add(states, site, torch.ones(5))
    assert states._banks[0].keys == [*SITES[:2], SITES[3]]
    (group,) = states.snapshot([], compact=True).groups[0]
    assert dict(zip(group.keys, group.states[:, COUNT].tolist(), strict=True)) == {
        **dict.fromkeys(SITES, 5),
        SITES[3]: 10,
    }


def test_all_sites_get_rows_if_many_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """When several batches are merged into a record, all sites get rows of their own together."""
    monkeypatch.setattr(sites, "_MOST_AGAIN", 3)
    states = SiteStates()
    for site in (*SITES, *SITES[2:5]):
        add(states, site, torch.ones(5))
    assert set(states._banks[0].keys) == set(SITES)
    assert states._recycled.keys == []
    assert {*bits(states)} == {*SITES}


def test_another_thread_gets_rows_of_its_own() -> None:
    """A second thread takes no shared row, because the first one may free it while the second updates it."""
    states = SiteStates()
    for site in SITES[:4]:
        add(states, site, torch.ones(5))
    thread = threading.Thread(target=add, args=(states, SITES[5], torch.ones(5)))
    thread.start()
    thread.join()
    assert SITES[5] in states._banks[0].keys
    assert set(states.sites) == {*SITES[:4], SITES[5]}


def test_no_torch_operation_runs_when_rows_are_freed() -> None:
    """A dispatch mode, such as that of a compiler, sees no operation of the fast path."""
    seen: list[Any] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    states, tensor = SiteStates(), torch.ones(5)
    for site in SITES[:3]:
        add(states, site, tensor)
    with Mode():  # type: ignore[no-untyped-call]  # of torch
        assert all(states.try_fast_path(site, tensor) for site in SITES[3:])
    assert seen == []
    assert len(states._recycled._packed) == 3


def test_rows_are_not_shared_without_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiled function, each site has a row of its own."""
    monkeypatch.setattr(compact, "compact_states", lambda _: None)
    states = SiteStates()
    for site in SITES:
        add(states, site, torch.ones(5))
    assert states._banks[0].keys == SITES
