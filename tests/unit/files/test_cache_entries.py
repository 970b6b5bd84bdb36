# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Entries that are kept between processes are whole, bounded, and the user's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xpuruntime.files.digests import CacheEntries

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such permissions")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "xpuruntime" / "results"


def entries(most: int = 20) -> CacheEntries:
    return CacheEntries("results", most=most, largest=100)


@pytest.mark.parametrize("held", [b"", b"text", bytes(100)])
def test_an_entry_is_read_by_another_object(folder: Path, held: bytes) -> None:
    assert entries().read("name") is None
    entries().write("name", held)
    assert entries().read("name") == held
    assert [path.stat().st_mode & 0o077 for path in (folder, *folder.iterdir())] == [0, 0]


def test_an_entry_that_is_too_large_is_not_kept(folder: Path) -> None:
    entries().write("name", bytes(101))
    assert entries().read("name") is None
    assert not folder.exists()


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: b"", lambda data: b"T" + data[1:]])
def test_a_damaged_entry_is_none(folder: Path, change) -> None:
    entries().write("name", b"text")
    (path,) = folder.iterdir()
    path.write_bytes(change(path.read_bytes()))
    assert entries().read("name") is None
    entries().write("name", b"text")
    assert entries().read("name") == b"text"


@pytest.mark.parametrize("place", ["entry", "folder"])
def test_an_entry_that_others_can_write_is_none(folder: Path, place: str) -> None:
    entries().write("name", b"text")
    (folder / "name" if place == "entry" else folder).chmod(0o777)
    assert entries().read("name") is None
    if place == "entry":
        entries().write("name", b"text")
        assert entries().read("name") == b"text"


@pytest.mark.parametrize("name", ["entry", "a\0b", "x" * 300])
def test_where_nothing_can_be_kept_nothing_is(folder: Path, name: str) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file")
    entries().write(name, b"text")
    assert entries().read(name) is None


def test_the_oldest_go(folder: Path) -> None:
    for number in range(20):
        entries().write(f"{number}", b"text")
        os.utime(folder / f"{number}", (number, number))
    (folder / "cut off").write_bytes(b"by a writer that was killed")
    os.utime(folder / "cut off", (0, 0))
    entries().write("new", b"text")
    left = {path.name for path in folder.iterdir()}
    assert left == {f"{number}" for number in range(1, 20)} | {"new"}


def test_a_writer_that_is_killed_leaves_whole_entries_or_none(folder: Path) -> None:
    code = """
from xpuruntime.files.digests import CacheEntries
entries, number = CacheEntries("results", most=20, largest=100), 0
while True:
    entries.write(f"{number % 3}", b"%d " % number * 10)
    print(number, flush=True)
    number += 1
"""
    for lines in (1, 5, 23):
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        for _ in range(lines):
            writer.stdout.readline()
        writer.kill()
        writer.communicate()
        for path in folder.iterdir():
            held = entries().read(path.name)
            assert held is None or (len(held.split()) == 10 and len(set(held.split())) == 1)
    entries().write("0", b"text")
    assert entries().read("0") == b"text"
