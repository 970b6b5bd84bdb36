# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Hooks of pre-commit: ``python -m xpuruntime.integrations.pre_commit FILE ...`` checks policies, models and locks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from xpuruntime.errors import XpuRuntimeError
from xpuruntime.lockfile.canonical import load_lock, model_beside
from xpuruntime.locks.verification.claims import place_text, worst_first
from xpuruntime.locks.verification.verify import verify
from xpuruntime.policies import Policy
from xpuruntime.printable import printable


def main(paths: Sequence[str]) -> int:
    """Check files, print what is wrong a line each, and return the exit code.

    A ``.yaml``, ``.yml`` or ``.json`` file is a policy, which must be valid. A ``.lock`` file must hold for the model
    of its name beside it; any other file is a model, for which the locks beside it that name it must hold. Of a lock of
    a training step only its digests are checked. Files of other tools that end in ``.lock`` are left out.
    """
    files = [Path(path) for path in paths]
    policies = [file for file in files if file.suffix in (".yaml", ".yml", ".json")]
    locks = dict.fromkeys(lock for file in files if file not in policies for lock in _locks_of(file))
    problems = [problem for file in policies for problem in _of_policy(file)]
    problems += [problem for lock in locks for problem in _of_lock(lock)]
    for problem in problems:
        print(printable(problem))  # noqa: T201 - what pre-commit shows
    return 1 if problems else 0


def _locks_of(file: Path) -> list[Path]:
    """Return the file itself where it is a lock of ours, else those beside a model that name it."""
    if file.suffix == ".lock":
        return [file] if _is_ours(file) else []
    name = f'"name": "{file.name}"'
    return [path for path in sorted(file.parent.glob("*.lock")) if _is_ours(path) and name in path.read_text("utf-8")]


def _is_ours(file: Path) -> bool:
    return b'"schema": "xpuruntime.lock/' in file.read_bytes()


def _of_policy(file: Path) -> Iterator[str]:
    try:
        Policy.load(file)
    except XpuRuntimeError as error:
        yield str(error)


def _of_lock(file: Path) -> Iterator[str]:
    try:
        lock = load_lock(file)
        if lock.identity.subject != "inference":
            return
        result = verify(model_beside(lock, file), lock=file, only=["evidence", "accuracy"])
    except XpuRuntimeError as error:
        yield str(error)
        return
    failed = [claim for claim in worst_first(result.claims) if result.effect(claim) in ("fail", "undecided")]
    for claim in failed:
        fix = f" Fix: {claim.fix}" if claim.fix else ""
        yield f"{place_text(result, claim) or file}: {claim.id}: {claim.reason}.{fix}"
    if result.exit_code and not failed:
        yield f"{file}: {result.headline}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
