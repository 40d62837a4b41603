"""Tests of the tags of statistics."""

from __future__ import annotations

import pytest

from lightning_recorder.names import make_tag


@pytest.mark.parametrize(
    ("parts", "tag"),
    [
        (("activations", "encoder.conv1", "out", "mean"), "activations/encoder.conv1/mean"),
        (("activations", "encoder.lstm", "out[1][0]", "rms"), "activations/encoder.lstm/out[1][0]/rms"),
        (("gradients", "head", "out.logits", "abs_max"), "gradients/head/out.logits/abs_max"),
        (("gradients", "", "out", "std"), "gradients/(root)/std"),
        (("activations", "head", "out"), "activations/head"),
        (("activations", "head", "out.loss"), "activations/head/out.loss"),
        (("activations", "a/b", "out['c/d']", "mean"), "activations/a_b/out['c_d']/mean"),
        (("activations", "out", "out", "mean"), "activations/out/mean"),
        (("activations", "größe", "out", "mean"), "activations/größe/mean"),
        (("activations", "bad\ud800", "out", "mean"), "activations/bad?/mean"),
    ],
)
def test_a_tag_has_one_level_for_each_part(parts: tuple[str, ...], tag: str) -> None:
    """A tag is group/name/path/statistic, without the path of a whole output; a slash in a part adds no level."""
    assert make_tag(*parts) == tag
