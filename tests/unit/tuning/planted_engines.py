# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""An engine plugin, ONNX Runtime with an option that plants a fault: fast and wrong, or the end of the process."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np

from xpuruntime.engines.base import Judgement, LoadedModel, Request
from xpuruntime.engines.control_builder import Option
from xpuruntime.engines.onnxruntime import OnnxRuntimeEngine
from xpuruntime.engines.onnxruntime.options import OnnxRuntimeSettings
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.evidence.records import Control
from xpuruntime.runtime.machine import EngineFacts, Machine

FAULTS = (
    "right", "two_percent", "nan_once", "before", "late", "segv", "hang", "memory", "noise", "leak", "unbound", "stale",
    "stops",
)  # fmt: skip


class PlantedSettings(OnnxRuntimeSettings, frozen=True, kw_only=True):
    """Those of ONNX Runtime, and what is planted."""

    fault: str


class PlantedEngine(OnnxRuntimeEngine):
    """Runs the model once, and answers from memory or plants what its option ``fault`` names."""

    name: ClassVar[str] = "planted"
    aliases: ClassVar[tuple[str, ...]] = ()
    device_kinds: ClassVar[tuple[str, ...]] = ("cpu",)

    def option_table(self, device: str) -> Mapping[str, Option]:
        del device
        return {"fault": Option(meaning="what is planted", values=FAULTS, search=FAULTS)}

    def probe(self) -> EngineFacts:
        return msgspec.structs.replace(super().probe(), name=self.name)

    def judge(self, request: Request, machine: Machine) -> Judgement:
        options = request.policy.execution.provider_options.get(self.name, {})
        execution = request.policy.execution.replace(provider_options={})
        plain = msgspec.structs.replace(request, policy=request.policy.replace(execution=execution))
        facts = {"onnxruntime": machine.engines[self.name]}
        judgement = OnnxRuntimeEngine().judge(plain, msgspec.structs.replace(machine, engines=facts))
        fault = str(options.get("fault", "slow"))
        key = f"execution.provider_options.{self.name}.fault"
        control = Control(key=key, requested=fault, resolved=fault, enforceability="enforced", reason="it is planted")
        return msgspec.structs.replace(
            judgement,
            settings=PlantedSettings(**msgspec.structs.asdict(judgement.settings), fault=fault),
            controls=(*judgement.controls, *([control] if options else [])),
        )

    def load(self, request: Request, judgement: Judgement, machine: Machine) -> LoadedModel:
        loaded = super().load(request, judgement, machine)
        loaded.run = Faulty(loaded.run, judgement.settings.fault)  # type: ignore[method-assign]
        loaded.runner = lambda: loaded.run  # type: ignore[method-assign]
        loaded.bind = FaultyBind(loaded.bind, judgement.settings.fault)  # type: ignore[method-assign]
        return loaded


class FaultyBind:
    """Stands in for `bind`: refuses, or writes no results, from the first run on or after some hundred of them."""

    def __init__(self, bind: Any, fault: str) -> None:
        self.bind, self.fault = bind, fault
        self.calls = 0

    def __call__(self, inputs: Any, outputs: Any, stream: Any = None) -> Any:
        if self.fault == "unbound":
            raise UnsupportedOperationError("planted has no fixed buffers", engine="planted")
        binding = self.bind(inputs, outputs, stream)
        run = binding.run

        def faulty() -> None:
            self.calls += 1
            if self.fault == "slow":
                time.sleep(0.002)
            if self.fault != "stale" and (self.fault != "stops" or self.calls < 200):
                run()

        run()  # what is there before passes for the result of a run that writes nothing
        binding.run = faulty
        return binding


class Faulty:
    """Stands in for `run`: quick answers by input, which some faults change."""

    def __init__(self, run: Any, fault: str) -> None:
        self.run, self.fault = run, fault
        self.known: dict[bytes, dict[str, Any]] = {}
        self.last: dict[str, Any] | None = None
        self.calls = 0
        self.kept: list[Any] = []

    def __call__(self, feeds: Any, stream: Any = None) -> dict[str, Any]:
        self.calls += 1
        if self.fault == "slow":
            time.sleep(0.002)
            return dict(self.run(feeds, stream))
        key = b"".join(np.asarray(feed).tobytes() for feed in feeds.values())
        if key not in self.known:
            self.known[key] = dict(self.run(feeds, stream))
        right = self.known[key]
        last, self.last = self.last, right
        return self.planted(right, last)

    def planted(self, right: dict[str, Any], last: dict[str, Any] | None) -> dict[str, Any]:
        if self.fault == "two_percent":
            return {name: value * np.float32(1.02) for name, value in right.items()}
        if self.fault == "nan_once" and len(self.known) == 50 and right is list(self.known.values())[49]:
            return {name: np.full_like(value, np.nan) for name, value in right.items()}
        if self.fault == "before" and last is not None:
            return last
        if self.fault == "late" and self.calls > 400:  # right while it is checked, wrong while it is timed
            return {name: np.zeros_like(value) for name, value in right.items()}
        if self.fault == "segv":
            ctypes.string_at(0)
        if self.fault == "hang":
            time.sleep(600)
        if self.fault == "memory":
            self.kept.append(np.ones(1 << 29, dtype=np.uint8))
        if self.fault == "leak" and self.calls % 8 == 0:  # the median of a turn stays quick on a busy machine too
            self.kept.append(np.ones(1 << 23, dtype=np.uint8))
        if self.fault == "noise":
            os.write(1, b'{"id": 1, "value": 0}\n')
            print("noise", flush=True)
        return right
