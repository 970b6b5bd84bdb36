# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Candidates: the pairs of engine and device that a policy allows, in the order in which they are tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from xpuruntime.policies.document import nearest
from xpuruntime.runtime.packages import guarded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xpuruntime.engines.base import Engine
    from xpuruntime.policies import Policy
    from xpuruntime.runtime.machine import Machine

__all__ = [
    "KNOWN_EXTRAS",
    "EngineCandidate",
    "chooses_among_all_engines",
    "find_engine",
    "list_candidates",
    "nearest_engine",
]

#: Engines a policy may name without an adapter being registered, and the extra that installs the vendor's package.
KNOWN_EXTRAS = {name: name for name in ("tensorrt", "tensorrt-rtx", "openvino", "qnn", "torch")}


class EngineCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """One pair to be judged."""

    engine: str
    device: str
    known: bool = True
    fallback: bool = False

    def __str__(self) -> str:
        """Return ``"engine@device"``."""
        return f"{self.engine}@{self.device}"


def devices_of(engine: Engine, machine: Machine) -> tuple[str, ...]:
    """Return the devices that an engine offers; none where a plugin fails to say, as its `judge` then reports."""
    return guarded(engine, lambda: tuple(map(str, engine.devices(machine))), lambda _: ())


def find_engine(name: str, engines: Mapping[str, Engine]) -> str | None:
    """Return the registered name for a name or an alias, or ``None``."""
    if name in engines:
        return name
    return next((key for key, engine in engines.items() if name == engine.name or name in engine.aliases), None)


def nearest_engine(name: str, engines: Mapping[str, Engine]) -> str | None:
    """Return the engine that an unknown name was probably meant to be, or ``None``."""
    words = {word: word for word in KNOWN_EXTRAS}
    words.update({word: key for key, engine in engines.items() for word in (key, *engine.aliases)})
    near = nearest(name, words)
    return None if near is None else words[near]


def list_candidates(
    policy: Policy, machine: Machine, engines: Mapping[str, Engine], model_format: str = "onnx"
) -> tuple[EngineCandidate, ...]:
    """List what may run, in order and without repeats.

    Engines in the policy's order, or in registry order all that take part in ``engine: auto`` and read models of
    `model_format`; for each the policy's device, or with ``device: auto`` each of `Engine.devices`. With both ``auto``,
    accelerators of every engine come before any CPU. Entries of ``execution.fallback`` follow.
    """
    candidates: dict[str, EngineCandidate] = {}
    for candidate in (*_primary(policy, machine, engines, model_format), *_fallback(policy, engines)):
        candidates.setdefault(str(candidate), candidate)
    return tuple(candidates.values())


def chooses_among_all_engines(policy: Policy) -> bool:
    """Whether the policy leaves the engine to the plan."""
    engine = policy.execution.engine
    return engine == "auto" or (not isinstance(engine, str) and tuple(engine) == ("auto",))


def _primary(
    policy: Policy, machine: Machine, engines: Mapping[str, Engine], model_format: str
) -> list[EngineCandidate]:
    stated, device = policy.execution.engine, normal_device(policy.execution.device)
    everything = chooses_among_all_engines(policy)
    if everything:
        names = [name for name, engine in engines.items() if engine.automatic and model_format in engine.formats]
    else:
        names = [stated] if isinstance(stated, str) else list(stated)
    pairs: list[EngineCandidate] = []
    for name in names:
        key = find_engine(name, engines)
        if key is None:
            pairs.append(EngineCandidate(engine=name, device=device, known=False))
        elif device != "auto":
            pairs.append(EngineCandidate(engine=key, device=device))
        else:
            offered = devices_of(engines[key], machine) or ("auto",)
            pairs.extend(EngineCandidate(engine=key, device=device) for device in offered)
    if everything and device == "auto":
        pairs.sort(key=lambda pair: pair.device.startswith("cpu") or pair.device == "auto")
    return pairs


def _fallback(policy: Policy, engines: Mapping[str, Engine]) -> Iterator[EngineCandidate]:
    for name, device in policy.execution.fallback_candidates:
        key = find_engine(name, engines)
        yield EngineCandidate(engine=key or name, device=normal_device(device), known=key is not None, fallback=True)


def normal_device(device: str) -> str:
    """Return the device with its index where one is always meant: ``"cuda"`` is ``"cuda:0"``."""
    text = str(device)
    return f"{text}:0" if text in {"cuda", "rocm", "dml"} else text
