# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Digests of large files are kept between processes while the files are the same, and are right whatever happens."""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from xpuruntime.files import digests

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who may write to a file")

SIZE = (16 << 20) + 4321


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the cache; files are taken to be settled at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(digests.VARIABLE, raising=False)
    monkeypatch.setattr(digests, "_SETTLED", -1.0)
    monkeypatch.setattr(digests, "_WITHOUT_TIMES", ())  # wherever temporary files are
    return tmp_path / "cache" / "xpuruntime" / "digests"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(os.urandom(1 << 16) * (SIZE >> 16) + os.urandom(SIZE % (1 << 16)))
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the files that were read."""
    sizes: list[int] = []
    compute = digests.digest_of

    def counted(file, size):
        sizes.append(size)
        return compute(file, size)

    monkeypatch.setattr(digests, "digest_of", counted)
    return sizes


def sealed(content: bytes) -> bytes:
    """Return an entry as it is written."""
    return content + hashlib.sha256(content).digest()


def right(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_that_did_not_change_is_read_once(folder, large, hashed):
    assert [digests.file_digest(large) for _ in range(3)] == [right(large)] * 3
    assert hashed == [large.stat().st_size]
    assert [one.stat().st_mode & 0o077 for one in (folder, *folder.iterdir())] == [0, 0]
    link = large.with_name("link")
    link.symlink_to(large)
    moved = large.rename(large.with_name("moved.bin"))
    link.unlink()
    link.symlink_to(moved)
    before = len(hashed)
    assert digests.file_digest(link) == digests.file_digest(moved) == right(moved)
    assert len(hashed) <= before + 1, "a rename may change the second time"


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(SIZE // 2)
        byte = file.read(1)
        file.seek(SIZE // 2)
        file.write(bytes([byte[0] ^ 1]))


def flip_and_set_the_time(path: Path) -> None:
    facts = path.stat()
    flip(path)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def replace_by_a_copy(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy2(path, other)
    facts = path.stat()
    flip(other)
    os.utime(other, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    other.replace(path)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def cut(path: Path) -> None:
    os.truncate(path, SIZE - 1)


@pytest.mark.parametrize("change", [flip, flip_and_set_the_time, replace_by_a_copy, append, cut])
def test_a_file_that_changed_is_read_again(folder, large, change):
    before = digests.file_digest(large)
    change(large)
    assert digests.file_digest(large) == right(large) != before


def test_a_file_that_changed_a_moment_ago_is_not_kept(folder, large, hashed, monkeypatch):
    monkeypatch.setattr(digests, "_SETTLED", 2.0)
    for _ in range(2):
        assert digests.file_digest(large) == right(large)
    assert len(hashed) == 2
    assert not folder.exists() or not list(folder.iterdir())


def test_a_file_that_changes_while_it_is_read_is_not_kept(folder, large, monkeypatch):
    compute = digests.digest_of

    def late(file, size):
        result = compute(file, size)
        flip(large)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(digests, "digest_of", late)
        digests.file_digest(large)
    assert digests.file_digest(large) == right(large)


def test_a_file_that_is_mapped_for_writing_is_not_kept(folder, large, hashed):
    """Stores into a page that is dirty already change no time of the file."""
    with large.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        file.close()
        for _ in range(3):
            view[SIZE // 2] ^= 1
            assert digests.file_digest(large) == right(large)
    assert len(hashed) == 3
    assert [digests.file_digest(large) for _ in range(2)] == [right(large)] * 2
    assert len(hashed) == 4, "it is kept once nobody can write to it"


def test_small_files_are_not_kept(folder, tmp_path):
    small = tmp_path / "small"
    small.write_bytes(b"x" * 100_000)
    assert digests.file_digest(small) == right(small)
    assert not folder.exists()


def test_the_variable_turns_it_off(folder, large, hashed, monkeypatch):
    monkeypatch.setenv(digests.VARIABLE, "off")
    for _ in range(2):
        assert digests.file_digest(large) == right(large)
    assert len(hashed) == 2
    assert not folder.exists()


@pytest.mark.parametrize("mode", [0o666, 0o602])
def test_an_entry_that_others_can_write_is_no_digest(folder, large, mode):
    digests.file_digest(large)
    (entry,) = folder.iterdir()
    forged = sealed(entry.read_bytes().split(b" ")[0] + b" " + b"0" * 64)
    entry.write_bytes(forged)
    assert digests.file_digest(large) == "0" * 64
    entry.chmod(mode)
    assert digests.file_digest(large) == right(large)
    entry.chmod(0o600)
    entry.write_bytes(forged)
    folder.chmod(0o777)
    assert digests.file_digest(large) == right(large)


def test_another_process_finds_it(folder, large):
    digests.file_digest(large)
    code = (
        "import sys; from xpuruntime.files import digests; digests.digest_of = None; "
        "print(digests.file_digest(sys.argv[1]))"
    )
    process = subprocess.run([sys.executable, "-c", code, str(large)], check=True, capture_output=True, text=True)
    assert process.stdout.strip() == right(large)
