# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Damaged and hostile ``.pt2`` files: planning gives a result or our errors, and runs nothing."""

from __future__ import annotations

import io
import json
import os
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fuzzing import TEXTS, cases, change_json, expect_ours, flip_bytes

torch = pytest.importorskip("torch", reason="needs PyTorch")

import xpuruntime as xrt  # noqa: E402

if TYPE_CHECKING:
    import random

pytestmark = pytest.mark.torch
#: A file that code of a hostile model would make.
MARK = "xpuruntime-fuzz-mark"


class Evil:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (MARK,)


def pickle_of_code() -> bytes:
    stream = io.BytesIO()
    torch.save(Evil(), stream)
    return stream.getvalue()


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("pt2") / "a.pt2"
    size = torch.export.Dim("N", max=64)
    program = torch.export.export(
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval(),
        (torch.ones(2, 4),),
        dynamic_shapes=({0: size},),
    )
    torch.export.save(program, path)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def text_for(rng: random.Random) -> str:
    code = f"__import__('os').mkdir('{MARK}')"
    return rng.choice((code, f"x={code}", f"s0 + {code}", f"x):\n    {code}\n    return (x", "torch.os.mkdir"))


def with_code(value: Any, rng: random.Random) -> Any:
    """Put code in place of one text."""
    spots: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        for key, inner in one.items() if isinstance(one, dict) else enumerate(one):
            if isinstance(inner, str):
                spots.append((one, key))
            elif isinstance(inner, (dict, list)):
                waiting.append(inner)
    if not spots:
        return value
    holder, key = rng.choice(spots)
    holder[key] = text_for(rng)
    return value


def damaged(members: dict[str, bytes], rng: random.Random) -> bytes:
    """Return an archive with a member changed, or with other bytes."""
    found = dict(members)
    for _ in range(rng.randint(1, 2)):
        name = rng.choice(list(found))
        data = found[name]
        table = name.endswith(".json") and data == members.get(name)
        kind = rng.randrange(6)
        if kind == 0:
            found[name] = flip_bytes(data, rng)
        elif kind == 1:
            del found[name]
        elif kind == 2:
            found[name] = pickle_of_code()
        elif table:
            value = json.loads(data)
            value = with_code(value, rng) if kind == 3 and value else change_json(value, rng)
            found[name] = json.dumps(value).encode()
        elif kind == 4:
            found[f"a/extra/xpuruntime.{rng.choice(TEXTS)[:100]}"] = rng.choice(TEXTS).encode()
        if not found:
            break
    stream = io.BytesIO()
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w", method) as archive:
        warnings.simplefilter("ignore")  # two members of one name
        for name, data in found.items():
            archive.writestr(name or "x", data)
    return flip_bytes(stream.getvalue(), rng) if rng.random() < 0.15 else stream.getvalue()


def test_programs(members: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("logging.raiseExceptions", False)  # PyTorch logs with a format that does not fit
    path = tmp_path / "a.pt2"
    for seed, rng in cases():
        path.write_bytes(damaged(members, rng))
        expect_ours(seed, lambda: xrt.plan(path, device="cpu"), Warning)
        assert not Path(MARK).exists(), f"seed {seed}: code of the file ran"
