"""The states of heads and experts obey the laws of reductions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_recorder.reductions.scores import (
    EXPERT_SLOTS,
    EXPERT_STATISTICS,
    HEAD_SLOTS,
    HEAD_STATISTICS,
    ExpertScores,
    HeadScores,
    slots_of_scores,
)


@pytest.mark.parametrize(
    ("kind", "slots", "statistics"),
    [(HeadScores, HEAD_SLOTS, HEAD_STATISTICS), (ExpertScores, EXPERT_SLOTS, EXPERT_STATISTICS)],
)
def test_merge_is_an_update(kind: Any, slots: tuple[str, ...], statistics: tuple[str, ...]) -> None:
    """Updates with two blocks are equal to the merge of two updates, also through a saved state."""
    torch.manual_seed(0)
    blocks = [torch.rand(len(slots), 5, dtype=torch.float64) for _ in range(3)]
    whole, one, other = kind(), kind(), kind()
    for block in blocks:
        whole.update(block)
    one.update(blocks[0])
    other.update(blocks[1])
    other.update(blocks[2])
    resumed = kind()
    resumed.load_state_dict(one.state_dict())
    resumed.merge(other)
    assert torch.allclose(resumed.state, whole.state)
    found = resumed.compute()
    assert tuple(found) == statistics
    assert all(each.shape == (5,) for each in found.values())


def test_maxima_of_heads() -> None:
    """The largest score is that of any call; other statistics are means over the queries."""
    scores = HeadScores()
    for largest, queries, entropy in ((3.0, 2.0, 1.0), (-1.0, 6.0, 7.0)):
        given: dict[str, torch.Tensor | float] = {
            "max_logit": torch.tensor([largest, -5.0]),
            "queries": queries,
            "entropy": torch.tensor([entropy, 0]),
            "minus_least_alike": -torch.inf,
        }
        scores.update(slots_of_scores(HEAD_SLOTS, given, torch.zeros(2)))
    found = scores.compute()
    assert found["attention_max_logit"].tolist() == [3.0, -5.0]
    assert found["attention_entropy"].tolist() == [1.0, 0.0]
    assert found["attention_alike"].isnan().all()
