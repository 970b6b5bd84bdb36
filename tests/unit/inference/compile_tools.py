# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""An engine whose compilation is slow and counted, so that tests can stop it half way."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

import xpuruntime as xrt
from xpuruntime.engines.base import Compiled
from xpuruntime.engines.null import NullEngine
from xpuruntime.engines.registry import EngineRegistry

if TYPE_CHECKING:
    from xpuruntime.engines.base import Judgement, LoadedModel, Request
    from xpuruntime.runtime.machine import Machine


class SlowEngine(NullEngine):
    """Computes nothing, but compiles: each time it adds a line to a log and writes a file in two parts.

    Parameters
    ----------
    log : path
        Gets the line ``compile`` or ``load`` for each.
    seconds : float
        How long a compilation takes, between the two.
    version : str
        What an artifact is tied to.
    """

    name: ClassVar[str] = "slow"
    compiles: ClassVar[bool] = True
    runtime_keys: ClassVar[tuple[str, ...]] = ("execution.threads",)

    def __init__(self, log: Path, seconds: float = 0.0, version: str = "1") -> None:
        self.log, self.seconds, self.version = Path(log), seconds, version

    def note(self, word: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{word}\n")

    def target(self, request: Request, judgement: Judgement, machine: Machine) -> dict[str, str]:
        del request, judgement, machine
        return {"slow": self.version}

    def compile(self, request: Request, judgement: Judgement, machine: Machine, folder: Path) -> Compiled:
        del judgement, machine
        assert request.purpose == "compile"
        assert not list(folder.iterdir())
        self.note("compile")
        with (folder / "model.bin").open("wb") as file:
            file.write(b"first half")
            file.flush()
            time.sleep(self.seconds)
            file.write(b", second half")
        (folder / "scratch").write_bytes(b"not a part of it")
        return Compiled(files=("model.bin",), node_map={"all": tuple(n.name for n in request.model.nodes)})

    def load(self, request: Request, judgement: Judgement, machine: Machine) -> LoadedModel:
        if request.artifact is not None:
            assert request.artifact.entry.read_bytes() == b"first half, second half"
            self.note("load artifact")
        else:
            self.note("load model")
        return super().load(request, judgement, machine)

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def registry(self) -> EngineRegistry:
        registry = EngineRegistry()
        registry.register(self)
        return registry


def policy_of(cache: Path, **execution: Any) -> dict[str, Any]:
    artifacts = {"cache": str(cache), **execution.pop("artifacts", {})}
    return {"execution": {"engine": "slow", "device": "cpu", "artifacts": artifacts, **execution}}


def open_cached(engine: SlowEngine, model: Path, cache: Path, **execution: Any) -> xrt.InferenceSession:
    return xrt.InferenceSession(model, policy=policy_of(cache, **execution), registry=engine.registry())


def edit_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    plain = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode({**plain, **changes}))


if __name__ == "__main__":  # compile_tools.py MODEL CACHE LOG SECONDS
    given, cached, told, length = sys.argv[1:]
    print(f"ready {os.getpid()}", flush=True)
    with open_cached(SlowEngine(Path(told), float(length)), Path(given), Path(cached)) as opened:
        print(opened.plan.notes[-1], flush=True)
