"""Tests of the tags of statistics."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_recorder.records.tags import Tag, make_tag, numbered, parse_tag, without_number


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


_PART = st.text(st.sampled_from("ab1_.[]'é-"), min_size=1, max_size=6)
_NAMES = st.one_of(st.just(""), _PART, st.builds(numbered, _PART, st.integers(0, 2000), st.just(3)))
_PATHS = st.one_of(st.just("out"), _PART)


@given(
    group=_PART,
    name=_NAMES,
    path=_PATHS,
    call=st.sampled_from(["", "#2", "#13"]),
    statistic=_PART,
    loader=st.one_of(st.none(), st.integers(0, 30)),
)
def test_parsing_a_tag_returns_its_parts(
    group: str, name: str, path: str, call: str, statistic: str, loader: int | None
) -> None:
    """Every tag of a site's statistic is parsed to the parts that it was made of, and made of them again."""
    tag = Tag(group, name, path + call, statistic, loader)
    assert parse_tag(make_tag(*tag)) == tag


@given(st.text(st.sampled_from("ab/#1(root)_"), max_size=20))
def test_any_text_can_be_parsed(text: str) -> None:
    """A tag of the user's code may be any text; what is parsed of it is stable."""
    found = parse_tag(text)
    assert found is None or parse_tag(make_tag(*found)) in (found, None)


@pytest.mark.parametrize("name", ["fc", "0", "12", "a_1"])
def test_a_number_is_removed(name: str) -> None:
    """The position in front of a name is removed again, and only that."""
    assert without_number(numbered(name, 7, 3)) == without_number(name) == name


def test_tags_without_a_module() -> None:
    """Curves of the whole run, and of the recorder itself, are no statistics of a site."""
    assert [parse_tag(each) for each in ("loss", "watch/loss", "recorder/activations/overhead")] == [None] * 3
