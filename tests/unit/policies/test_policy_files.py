# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Reading and writing policy files: limits, encodings, and nothing half-written."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from xpuruntime.errors import PolicyError
from xpuruntime.policies import KernelPolicy, Policy

ROOT_USER = hasattr(os, "geteuid") and os.geteuid() == 0
NEW = Policy(mode="strict", kernels=KernelPolicy(matmul="cublasLt"))


class TestLoad:
    @pytest.mark.parametrize("name", ["deep.yaml", "deep.json"])
    @pytest.mark.parametrize("opening", ["[", '{"a":', "- ", "{a: "])
    @pytest.mark.parametrize("size", [1_000_000, 10_000_000])
    def test_deep_nesting_is_refused(self, tmp_path, name, opening, size):
        (tmp_path / name).write_text(opening * (size // len(opening)))
        with pytest.raises(PolicyError, match=rf"{name}:"):
            Policy.load(tmp_path / name)

    @pytest.mark.parametrize("format", ["yaml", "json"])
    def test_the_deepest_that_is_read(self, format):
        def nested(depth):
            return '{"execution": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"

        with pytest.raises(PolicyError, match="got a list"):
            Policy.loads(nested(64), format)
        with pytest.raises(
            PolicyError, match=r"nested deeper than 64 levels; a policy needs at most 6\. Fix: close what is open"
        ):
            Policy.loads(nested(65), format)

    def test_one_mebibyte_is_read_and_one_byte_more_is_not(self, tmp_path):
        path = tmp_path / "policy.yaml"
        path.write_text("mode: strict\n#".ljust(2**20, "x"))
        assert Policy.load(path).mode == "strict"
        path.write_text("mode: strict\n#".ljust(2**20 + 1, "x"))
        with pytest.raises(PolicyError, match=r"policy\.yaml: larger than 1048576 bytes, as no policy is"):
            Policy.load(path)

    def test_a_file_without_an_end_is_refused(self, tmp_path):
        path = tmp_path / "policy.yaml"
        path.symlink_to("/dev/zero")
        with pytest.raises(PolicyError, match="it is a character device, not a regular file"):
            Policy.load(path)

    def test_missing_file_names_the_nearest(self, tmp_path):
        (tmp_path / "policy.yaml").write_text("mode: strict")
        with pytest.raises(
            PolicyError, match=r"polcy\.yaml: cannot be read: no such file; did you mean '.*policy\.yaml'\?"
        ):
            Policy.load(tmp_path / "polcy.yaml")

    def test_missing_folder(self, tmp_path):
        with pytest.raises(PolicyError, match=r"cannot be read: no such file; the folder '.*none' does not exist"):
            Policy.load(tmp_path / "none" / "policy.yaml")

    @pytest.mark.parametrize("name", ["policy.toml", "policy", "policy.YAML"])
    def test_an_ending_that_is_not_known(self, tmp_path, name):
        (tmp_path / name).write_text("mode: strict")
        with pytest.raises(PolicyError, match=r"so its format is not known\. Fix: .* \.yaml, \.yml, \.json"):
            Policy.load(tmp_path / name)

    @pytest.mark.parametrize(
        ("data", "place"),
        [
            (b"mode: strict\n# \xff", "2: not UTF-8 text (byte 0xff at offset 15)"),
            ("mode: strict".encode("utf-16"), "1: not UTF-8"),
        ],
    )
    def test_bytes_that_are_not_utf8(self, tmp_path, data, place):
        path = tmp_path / "policy.yaml"
        path.write_bytes(data)
        with pytest.raises(PolicyError) as error:
            Policy.load(path)
        assert str(error.value).startswith(f"{path}:{place}")
        assert str(error.value).endswith("save the file as UTF-8")

    @pytest.mark.parametrize("name", ["policy.yaml", "policy.json"])
    def test_byte_order_mark_and_windows_line_ends(self, tmp_path, name):
        (tmp_path / name).write_bytes(b'\xef\xbb\xbf{"mode":\r\n "strict"}\r\n')
        assert Policy.load(tmp_path / name).mode == "strict"

    @pytest.mark.skipif(ROOT_USER, reason="root may read everything")
    def test_a_file_that_may_not_be_read(self, tmp_path):
        path = tmp_path / "policy.yaml"
        path.touch(mode=0)
        with pytest.raises(PolicyError, match="cannot be read: Permission denied"):
            Policy.load(path)

    def test_a_name_that_no_file_can_have(self):
        for name in ("a\0b.yaml", "x" * 5000 + ".yaml"):
            with pytest.raises(PolicyError, match="cannot be read"):
                Policy.load(name)

    def test_not_text_and_no_format(self):
        with pytest.raises(PolicyError, match=r"got a bytes\. Fix: give text"):
            Policy.loads(b"mode: strict")
        with pytest.raises(PolicyError, match="'yml' is not a format; did you mean 'yaml'"):
            Policy.loads("mode: strict", "yml")
        with pytest.raises(PolicyError, match="'toml' is not a format"):
            NEW.dumps("toml")


class TestSave:
    @pytest.fixture
    def path(self, tmp_path):
        path = tmp_path / "policy.yaml"
        path.write_text("mode: prefer\n")
        return path

    def unchanged(self, path):
        return path.read_text() == "mode: prefer\n" and [entry.name for entry in path.parent.iterdir()] == [path.name]

    def test_a_full_disk_leaves_everything_as_it_was(self, path, monkeypatch):
        def full(_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(PolicyError, match="cannot be written: No space left on device"):
            NEW.save(path)
        assert self.unchanged(path)

    def test_folders(self, tmp_path):
        with pytest.raises(PolicyError, match="cannot be written: No such file or directory"):
            NEW.save(tmp_path / "none" / "policy.yaml")
        (tmp_path / "policy.yaml").mkdir()
        with pytest.raises(PolicyError, match="cannot be written: it is a directory"):
            NEW.save(tmp_path / "policy.yaml")

    def test_an_ending_that_is_not_known(self, tmp_path):
        with pytest.raises(PolicyError, match=r"the name ends in '\.txt', so its format is not known"):
            NEW.save(tmp_path / "policy.txt")
        assert not list(tmp_path.iterdir())

    def test_readers_and_writers_at_once_see_whole_files(self, path):
        other = Policy(mode="auto")
        seen, stop = set(), threading.Event()

        def write(policy):
            while not stop.is_set():
                policy.save(path)

        writers = [threading.Thread(target=write, args=(policy,)) for policy in (NEW, other)]
        for writer in writers:
            writer.start()
        try:
            for _ in range(200):
                seen.add(Policy.load(path))
        finally:
            stop.set()
            for writer in writers:
                writer.join()
        assert seen <= {NEW, other, Policy()}
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
