"""Checksums of event files."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

from lightning_recorder import TensorBoardSink
from lightning_recorder.sinks.records import quicken_records
from tests.sinks.events import read_events


def written_by(writer: SummaryWriter) -> RecordWriter:
    """The object of TensorBoard's that writes the records of a writer."""
    records: RecordWriter = writer._get_file_writer().event_writer._async_writer._writer
    return records


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> RecordWriter:
    """A record writer that was quickened."""
    with SummaryWriter(str(tmp_path_factory.mktemp("run"))) as writer:
        assert quicken_records(writer)
        return written_by(writer)


@given(st.binary(max_size=5000))
def test_a_record_is_the_same_to_the_bit(records: RecordWriter, data: bytes) -> None:
    """Length, checksums and content of any record are those that TensorBoard itself writes."""
    ours, theirs = io.BytesIO(), io.BytesIO()
    records.write.func(ours, *records.write.args[1:], data)
    RecordWriter(theirs).write(data)
    assert ours.getvalue() == theirs.getvalue()


def test_only_the_writer_of_the_sink_is_quickened(tmp_path: Path) -> None:
    """The sink's own writer is quickened, and what it writes can be read; another writer is left as it is."""
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
    """Where the library cannot be imported, the sink writes as TensorBoard does."""
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with SummaryWriter(str(tmp_path)) as writer:
        assert not quicken_records(writer)
        with TensorBoardSink(writer) as sink:
            sink.write_scalars(3, {"a": 1.0})
    assert [event.value for event in read_events(tmp_path).Scalars("a")] == [1.0]


def test_a_writer_of_another_make_is_left_alone() -> None:
    """What is not made as TensorBoard's writer, such as that of a rank without one, is not touched."""

    class Other:
        pass

    assert not quicken_records(Other())  # type: ignore[arg-type]
