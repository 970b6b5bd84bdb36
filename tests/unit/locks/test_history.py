# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt log``: what changed in a lock, commit by commit."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING

import msgspec
import pytest

import xpuruntime as xrt
from xpuruntime.cli.entry import run
from xpuruntime.lockfile.canonical import save_lock
from xpuruntime.locks.history import lock_history

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *words: str) -> str:
    names = ("-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *names, *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def commit(folder: Path, title: str) -> str:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", title)
    return git(folder, "rev-parse", "HEAD").strip()


def with_engine(lock: xrt.Lock, version: str) -> xrt.Lock:
    validators = tuple(
        msgspec.structs.replace(validator, expect={"version": version}) if validator.kind == "engine" else validator
        for validator in lock.identity.validators
    )
    return xrt.Lock.of(msgspec.structs.replace(lock.identity, validators=validators))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A lock that was made, changed, broken, repaired, and moved; the commits, the latest first."""
    root = tmp_path_factory.mktemp("repository")
    folder = root / "models é"
    folder.mkdir()
    git(root, "init", "--quiet")
    policy = {"execution": {"engine": "onnxruntime", "device": "cpu"}}
    lock = xrt.lock(xrt.demo_model_path(), policy, folder / "old.lock").lock
    commits = [commit(root, "lock the model")]
    save_lock(with_engine(lock, "1.99.0"), folder / "old.lock")
    commits.insert(0, commit(root, "take 1.99"))
    (folder / "old.lock").write_text("{}")
    commits.insert(0, commit(root, "break it"))
    save_lock(with_engine(lock, "2.0.0"), folder / "old.lock")
    commits.insert(0, commit(root, "take 2.0"))
    git(root, "mv", "models é/old.lock", "models é/model.lock")
    commits.insert(0, commit(root, "rename it"))
    return folder / "model.lock", commits


def test_each_commit_has_what_it_changed(repository: tuple[Path, list[str]]) -> None:
    path, commits = repository
    revisions = lock_history(path).revisions
    assert [one.commit for one in revisions] == commits
    renamed, second, broken, first_change, first = revisions
    assert (renamed.differences, renamed.first, renamed.error) == ((), False, "")
    assert [(difference.code, difference.subject) for difference in second.differences] == [("engine", "onnxruntime")]
    (change,) = second.differences
    assert ("1.99.0" in str(change.before), "2.0.0" in str(change.after)) == (True, True)
    assert (broken.digest, "not" in broken.error) == ("", True)
    assert first_change.title == "take 1.99"
    assert (first.first, first.differences) == (True, ())
    assert first.digest.startswith("sha256:")


def test_a_limit_keeps_what_the_last_one_is_compared_with(repository: tuple[Path, list[str]]) -> None:
    path, commits = repository
    revisions = lock_history(path, limit=4).revisions
    assert [revision.commit for revision in revisions] == commits[:4]
    assert [difference.code for difference in revisions[-1].differences] == ["engine"]


def test_a_lock_that_is_not_committed_comes_first(repository: tuple[Path, list[str]]) -> None:
    path, commits = repository
    before = path.read_bytes()
    save_lock(with_engine(xrt.load_lock(path), "3.0.0"), path)
    try:
        latest, *others = lock_history(path).revisions
    finally:
        path.write_bytes(before)
    assert (latest.commit, latest.title, len(latest.differences)) == ("", "not committed", 1)
    assert [one.commit for one in others] == commits


def test_the_command(repository: tuple[Path, list[str]], capfd: pytest.CaptureFixture[str]) -> None:
    path, commits = repository
    assert run(["log", str(path)]) == 0
    text = capfd.readouterr().out
    assert [text.index(one[:10]) for one in commits] == sorted(text.index(one[:10]) for one in commits)
    assert "engine: onnxruntime" in text
    assert "the first lock, sha256:" in text
    assert run(["log", str(path), "-n", "1", "--json"]) == 0
    record = json.loads(capfd.readouterr().out)
    assert (record["schema"], len(record["revisions"])) == ("xpuruntime.lock-history/1", 1)


def test_what_has_no_history_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "model.lock"
    lock.write_text("{}")
    with pytest.raises(xrt.InputError, match="not a git repository"):
        lock_history(lock)
    git(tmp_path, "init", "--quiet")
    (tmp_path / "other").write_text("")
    commit_of_other = git(tmp_path, "add", "other")
    assert commit_of_other == ""
    git(tmp_path, "commit", "--quiet", "-m", "other")
    with pytest.raises(xrt.InputError, match=r"no commit has .*Fix: git add model.lock && git commit"):
        lock_history(lock)
