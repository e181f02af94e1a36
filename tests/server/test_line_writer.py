"""Output that is read slowly, not at all, or cannot be written: lines are dropped and counted, and nothing waits."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from specmamba.server.observe.line_writer import LineStream, LineWriter, ProcessOutput, descriptor_of


def dropped(num_lines: int) -> str:
    return f"{num_lines} dropped\n"


class Pipe:
    """A small pipe, whose reader begins when it is told to."""

    def __init__(self) -> None:
        self.receiver, self.sender = os.pipe()
        fcntl.fcntl(self.sender, fcntl.F_SETPIPE_SZ, 4096)
        self._data = b""
        self._thread = threading.Thread(target=self._read)

    def start_reading(self) -> None:
        self._thread.start()

    def _read(self) -> None:
        while data := os.read(self.receiver, 1 << 16):
            self._data += data

    def lines(self) -> list[str]:
        """All lines that were written; ends the pipe."""
        os.close(self.sender)
        self._thread.join()
        return self._data.decode().splitlines()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    os.close(pipe.receiver)


@pytest.mark.parametrize("is_blocking", [True, False])
def test_lines_for_a_reader_that_stalls_are_dropped_and_counted(pipe: Pipe, is_blocking: bool) -> None:
    os.set_blocking(pipe.sender, is_blocking)
    writer = LineWriter(pipe.sender, dropped)
    num_lines = 3000
    for number in range(num_lines):
        writer.put(f"{number} {'x' * 1000}\n")
    assert not writer.flush(0.01)
    num_dropped = writer.num_dropped
    assert 0 < num_dropped < num_lines
    pipe.start_reading()
    assert writer.flush(10)
    lines = pipe.lines()
    assert [line for line in lines if "dropped" in line] == [f"{num_dropped} dropped"]
    assert [line for line in lines if "x" in line] == [f"{i} {'x' * 1000}" for i in range(num_lines - num_dropped)]


def test_a_full_disk_and_a_closed_pipe_count_and_do_not_end_the_writer() -> None:
    receiver, sender = os.pipe()
    os.close(receiver)
    for descriptor in (os.open("/dev/full", os.O_WRONLY), sender):
        writer = LineWriter(descriptor, dropped)
        for number in range(10):
            writer.put(f"{number}\n")
        assert writer.flush(10)
        assert writer.num_dropped == 10
        os.close(descriptor)


def test_a_line_after_a_torn_one_begins_on_a_line_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "log"
    writer = LineWriter(os.open(file, os.O_WRONLY | os.O_CREAT), dropped)
    write, room = os.write, [3]

    def write_little(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        num_written = write(descriptor, data[: room[0]])
        room[0] -= num_written
        return num_written

    with monkeypatch.context() as patch:
        patch.setattr("os.write", write_little)
        writer.put("first\n")
        writer.put("second\n")
        assert writer.flush(10)
        room[0] = 1000
        writer.put("third\n")
        assert writer.flush(10)
    os.close(writer.descriptor)
    assert file.read_text() == "fir\nthird\n2 dropped\n"


def test_the_writer_gives_up_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    writer = LineWriter(2)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    writer.put("x\n")
    assert writer.num_dropped == 1
    assert writer.flush(10)


def test_a_stream_gives_whole_lines_to_its_writer(pipe: Pipe) -> None:
    pipe.start_reading()
    writer = LineWriter(pipe.sender)
    stream = LineStream(writer)
    print("one\ntwo", "\udcff", file=stream)
    stream.write("90%")
    stream.flush()
    stream.write("end\n")
    assert (stream.fileno(), stream.isatty(), stream.writable(), stream.encoding) == (pipe.sender, False, True, "utf-8")
    assert writer.flush(10)
    assert pipe.lines() == ["one", "two \\udcff", "90%end"]


def test_the_flush_at_the_end_of_a_process_is_bounded(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specmamba.server.observe.line_writer.FLUSH_S", 0.05)
    writer = LineWriter(pipe.sender)
    writer.put("x" * 10_000 + "\n")
    ProcessOutput((writer, writer)).flush()  # returns, although a write blocks
    pipe.start_reading()
    assert writer.flush(10)
    assert pipe.lines() == ["x" * 10_000]


def test_a_process_without_a_standard_stream_writes_to_the_null_device() -> None:
    descriptor = descriptor_of(None)
    assert os.write(descriptor, b"x") == 1
    os.close(descriptor)
