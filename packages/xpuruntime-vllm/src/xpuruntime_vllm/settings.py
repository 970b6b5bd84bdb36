# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`VllmSettings`: a policy as vLLM's configuration, and what has to be read back."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, get_args

from xpuruntime.errors import PolicyError
from xpuruntime.policies import Policy

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
#: Keys that say nothing of a run of vLLM, and so cannot be missed by it.
_SILENT = frozenset({"schema", "mode", "execution.engine", "verify", "auto_strategy", "tuning"})


@dataclass(frozen=True)
class VllmSettings:
    """A policy as vLLM takes it.

    Attributes
    ----------
    mode : {"strict", "prefer", "auto"}
    arguments : dict
        Of vLLM's engine, such as ``{"dtype": "float32"}``.
    environment : dict of str to str
        Variables that vLLM reads.
    requested : dict of str to str
        Policy key to the value that is read back in every worker.
    unsupported : dict of str to str
        Policy keys that vLLM cannot be given, each with the reason.
    """

    mode: str = "strict"
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    requested: dict[str, str] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)


def read_policy(policy: Policy | dict[str, Any] | str | os.PathLike[str]) -> VllmSettings:
    """Return the settings of a policy, a mapping, or a policy file.

    Raises
    ------
    PolicyError
        A key cannot be given to vLLM, and the mode is strict; or the policy names another engine.
    """
    if isinstance(policy, dict):
        policy = Policy(**policy)
    elif not isinstance(policy, Policy):
        policy = Policy.load(policy)
    stated = policy.to_dict()
    settings = VllmSettings(mode=policy.mode)
    for key, value in _leaves(stated):
        _apply(settings, key, value)
    if settings.unsupported and settings.mode == "strict":
        lines = "; ".join(f"{key}: {reason}" for key, reason in settings.unsupported.items())
        msg = f"vLLM cannot be held to this policy, and its mode is strict: {lines}"
        raise PolicyError(f"{msg}. Fix: remove them, or set mode: prefer")
    return settings


def _leaves(stated: dict[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in stated.items():
        if key in ("execution", "kernels"):
            found += [(f"{key}.{name}", inner) for name, inner in value.items()]
        else:
            found.append((key, value))
    return found


def _apply(settings: VllmSettings, key: str, value: Any) -> None:
    if key == "execution.engine":
        if value not in ("vllm", "auto", ["vllm"]):
            raise PolicyError(f"the policy is for engine {value!r}. Fix: state execution: {{engine: vllm}}")
    elif key == "execution.device":
        settings.requested[key] = str(value).partition(":")[0]
    elif key == "execution.precision" and value in _DTYPES:
        settings.arguments["dtype"] = settings.requested[key] = _DTYPES[value]
    elif key == "execution.cuda_graph":
        if value != "prefer":
            mode = "NONE" if value == "off" else "FULL_AND_PIECEWISE"
            settings.arguments.setdefault("compilation_config", {})["cudagraph_mode"] = mode
            settings.requested[key] = "NONE" if value == "off" else "captured"
    elif key == "execution.determinism" and value == "batch_invariant":
        settings.environment["VLLM_BATCH_INVARIANT"] = settings.requested[key] = "1"
    elif key == "execution.provider_options":
        for name, option in value.get("vllm", {}).items():
            settings.arguments[name] = option
            settings.requested[f"{key}.vllm.{name}"] = str(option)
    elif key in ("kernels.attention", "kernels.matmul", "kernels.grouped_matmul") and _word(value):
        settings.requested[key] = _word(value)
        _choose(settings, key, _word(value))
    elif key not in _SILENT:
        settings.unsupported[key] = f"{value!r} has no counterpart in vLLM that can be read back"


def _word(value: Any) -> str:
    return value.removeprefix("vllm.") if isinstance(value, str) and value.startswith("vllm.") else ""


def _choose(settings: VllmSettings, key: str, word: str) -> None:
    """Set the configuration that selects a kernel; a class name is read back only."""
    if key == "kernels.attention":
        settings.arguments.setdefault("attention_config", {})["backend"] = word
        return
    from vllm.config import kernel

    name, words = {
        "kernels.matmul": ("linear_backend", kernel.LinearBackend),
        "kernels.grouped_matmul": ("moe_backend", kernel.MoEBackend),
    }[key]
    if word in get_args(words):
        settings.arguments.setdefault("kernel_config", {})[name] = word
