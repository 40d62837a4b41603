"""Tests of the checksums in event files."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

from lightning_recorder.sinks import TensorBoardSink
from lightning_recorder.sinks.event_file import frame_record, patch_crc32c
from tests.sinks.events import read_events


def written_by(writer: SummaryWriter) -> RecordWriter:
    """Return the TensorBoard object that writes the records of a writer."""
    records: RecordWriter = writer._get_file_writer().event_writer._async_writer._writer
    return records


@given(st.binary(max_size=5000))
def test_a_record_is_the_same_to_the_bit(data: bytes) -> None:
    """Any record is identical to the one that TensorBoard writes, in length, checksums and content."""
    theirs = io.BytesIO()
    RecordWriter(theirs).write(data)
    assert frame_record(data) == theirs.getvalue()


def test_only_the_writer_of_the_sink_is_quickened(tmp_path: Path) -> None:
    """Only the sink's own writer is patched, and its file can be read; another writer is unchanged."""
    other = SummaryWriter(str(tmp_path / "other"))
    with SummaryWriter(str(tmp_path / "ours")) as writer, TensorBoardSink(writer) as sink:
        sink.write_scalars(3, {"a": 1.0})
        writer.add_scalar("b", 2.0, 4)
        assert "write" in vars(written_by(writer))
        assert "write" not in vars(written_by(other))
    other.close()
    read = read_events(tmp_path / "ours")
    assert [(event.step, event.value) for tag in "ab" for event in read.Scalars(tag)] == [(3, 1.0), (4, 2.0)]


def test_without_the_library_all_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the library cannot be imported, the writer writes as TensorBoard does."""
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with SummaryWriter(str(tmp_path)) as writer:
        assert not patch_crc32c(writer)
        with TensorBoardSink(writer) as sink:
            sink.write_scalars(3, {"a": 1.0})
    assert [event.value for event in read_events(tmp_path).Scalars("a")] == [1.0]


def test_a_writer_of_another_make_is_left_alone() -> None:
    """A writer of another structure, such as that of a rank without a file, is not patched."""

    class Other:
        pass

    assert not patch_crc32c(Other())  # type: ignore[arg-type]
