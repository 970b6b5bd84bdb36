# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The core's recorder of ranges, from Python: nesting, threads, limits, and what it says where there is no device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from xpuruntime import _core
from xpuruntime.errors import InputError
from xpuruntime.runtime import profiler
from xpuruntime.runtime.profiler import profiled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xpuruntime.runtime.profiler import Range


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert not _core.profiler_active()


def named(ranges: tuple[Range, ...], name: str) -> Range:
    [result] = [range_ for range_ in ranges if range_.name == name]
    return result


def test_ranges_nest() -> None:
    profiler.start(devices=False)
    with profiled("outer", "a"):
        with profiled("inner", "b"):
            pass
        with profiled("second"):
            pass
    with profiled("after"):
        pass
    ranges = profiler.stop().ranges
    assert [range_.name for range_ in ranges] == ["outer", "inner", "second", "after"]
    outer = ranges[0]
    assert [range_.parent for range_ in ranges] == [0, outer.id, outer.id, 0]
    assert [range_.category for range_ in ranges] == ["a", "b", "range", "range"]
    assert outer.start_ns <= ranges[1].start_ns <= ranges[1].end_ns <= ranges[2].start_ns <= outer.end_ns
    assert {range_.thread for range_ in ranges} == {threading.get_native_id()}


def test_an_error_ends_its_range() -> None:
    profiler.start(devices=False)
    with pytest.raises(ZeroDivisionError), profiled("failed"):
        raise ZeroDivisionError
    with profiled("after"):
        pass
    ranges = profiler.stop().ranges
    assert [(range_.name, range_.parent, range_.finished) for range_ in ranges] == [
        ("failed", 0, True),
        ("after", 0, True),
    ]


def test_sixteen_threads_have_ranges_of_their_own() -> None:
    ready = threading.Barrier(16)

    def work(number: int) -> None:
        ready.wait()
        for turn in range(50):
            with profiled(f"outer {number}"), profiled(f"inner {number}.{turn}"):
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    profiler.start(devices=False)
    with profiled("main"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    recording = profiler.stop()
    assert len(recording.ranges) == 1 + 16 * 50 * 2
    by_id = {range_.id: range_ for range_ in recording.ranges}
    assert len(by_id) == len(recording.ranges)
    assert len({range_.thread for range_ in recording.ranges}) == 17
    for range_ in recording.ranges:
        assert recording.start_ns <= range_.start_ns <= range_.end_ns <= recording.end_ns
        if range_.name.startswith("inner"):
            around = by_id[range_.parent]
            assert around.name == "outer " + range_.name.split(" ")[1].split(".")[0]
            assert around.thread == range_.thread
        else:
            assert range_.parent == 0


def test_a_range_that_goes_on_says_so() -> None:
    profiler.start(devices=False)
    open_ = profiled("open")
    open_.__enter__()
    recording = profiler.stop()
    [one] = recording.ranges
    assert (one.finished, one.end_ns) == (False, recording.end_ns)
    profiler.start(devices=False)
    open_.__exit__(None, None, None)  # of a recording that is over
    assert profiler.stop().ranges == ()


def test_nothing_is_kept_while_nobody_records() -> None:
    with profiled("before"):
        profiler.start(devices=False)
    assert profiler.stop().ranges == ()


def test_beyond_the_limit_records_are_counted_and_said() -> None:
    profiler.start(devices=False, limit=5)
    for _ in range(8):
        with profiled("one"):
            pass
    recording = profiler.stop()
    assert (len(recording.ranges), recording.dropped) == (5, 3)
    [note] = recording.notes
    assert "3 records are lost" in note
    assert "raise the limit" in note


def test_a_second_recording_and_an_end_of_none_are_refused() -> None:
    with pytest.raises(InputError, match="no recording goes on"):
        profiler.stop()
    profiler.start(devices=False)
    try:
        with pytest.raises(InputError, match="goes on already"):
            profiler.start(devices=False)
    finally:
        profiler.stop()


WITHOUT_A_DEVICE = """
from xpuruntime.runtime import profiler
profiler.start(devices=True)
with profiler.profiled("host"):
    pass
recording = profiler.stop()
assert recording.source == "none", recording.source
assert [one.name for one in recording.ranges] == ["host"]
print(*recording.notes, sep=chr(10))
"""


def test_without_a_device_a_note_says_why() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_DEVICE],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [note] = done.stdout.splitlines()
    assert re.fullmatch(r"ranges of the host only: .*(driver|device|CUDA).*", note), note


@pytest.mark.parametrize("name", ["", "naïve 模型 🚀", "x" * 100_000, 'quote " backslash \\ \n'])
def test_names_are_kept_as_they_are(name: str) -> None:
    profiler.start(devices=False)
    with profiled(name):
        pass
    assert [range_.name for range_ in profiler.stop().ranges] == [name]
