"""The heads of all attention share a picture, and so do the experts of all routers."""

from __future__ import annotations

import pytest
import torch

from lightning_recorder.outputs.tensor_pictures import TensorPictures
from lightning_recorder.records.table import SiteStatistics
from lightning_recorder.taps import Site


@pytest.mark.parametrize("max_images", [0, 1])
def test_heads_of_all_layers_share_a_picture(max_images: int) -> None:
    """Each statistic of heads and experts has one picture, whatever the number of layers, if pictures are wanted."""
    found = {
        Site(f"blocks.{layer}.attn.softmax", "in.scores"): SiteStatistics(
            {},
            tensors={"attention_entropy_ratio": torch.rand(4), "attention_max_logit": torch.rand(4)},
        )
        for layer in range(3)
    }
    found[Site("gate.topk", "in.scores")] = SiteStatistics({}, tensors={"router_load": torch.rand(6)})
    pictures = TensorPictures(max_images)
    for step in range(2):
        pictures.add(step, list(found), found)
    drawn = pictures.draw("activations", "activations")
    wanted = {
        "activations_plots/attention_entropy_ratio/heads",
        "activations_plots/attention_max_logit/heads",
        "activations_plots/router_load/experts",
    }
    assert set(drawn) == (wanted if max_images else set())
