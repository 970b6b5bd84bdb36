# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ServerSettings`: a policy as the configuration of a server's engine, and what has to be read back."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from xpuruntime.errors import PolicyError
from xpuruntime.policies import Policy

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
#: Keys that say nothing of a run of such an engine, and so cannot be missed by it.
_SILENT = frozenset({"schema", "mode", "execution.engine", "verify", "auto_strategy", "tuning"})


@dataclass(frozen=True)
class ServerSettings:
    """A policy as an engine takes it.

    Attributes
    ----------
    engine : {"vllm", "sglang"}
    mode : {"strict", "prefer", "auto"}
    arguments : dict
        Of the engine, such as ``{"dtype": "float32"}``.
    environment : dict of str to str
        Variables that it reads.
    requested : dict of str to str
        Policy key to the value that is read back in every worker.
    unsupported : dict of str to str
        Policy keys that it cannot be given, each with the reason.
    """

    engine: str = "vllm"
    mode: str = "strict"
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    requested: dict[str, str] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)


def read_policy(
    policy: Policy | dict[str, Any] | str | os.PathLike[str],
    engine: str = "vllm",
    apply: Callable[[ServerSettings, str, Any], bool] | None = None,
) -> ServerSettings:
    """Return the settings of a policy, a mapping, or a policy file.

    Parameters
    ----------
    policy
    engine : {"vllm", "sglang"}
    apply : callable, optional
        Puts a key with its value into the settings, and says whether the engine has it. Default: vLLM's.

    Raises
    ------
    PolicyError
        A key cannot be given to the engine, and the mode is strict; or the policy names another engine.
    """
    if isinstance(policy, dict):
        policy = Policy(**policy)
    elif not isinstance(policy, Policy):
        policy = Policy.load(policy)
    stated = policy.to_dict()
    settings = ServerSettings(engine=engine, mode=policy.mode)
    for key, value in _leaves(stated):
        if key == "execution.engine":
            if value not in (engine, "auto", [engine]):
                raise PolicyError(f"the policy is for engine {value!r}. Fix: state execution: {{engine: {engine}}}")
        elif not (apply or _apply)(settings, key, value) and key not in _SILENT:
            settings.unsupported[key] = f"{value!r} has no counterpart in {engine} that can be read back"
    if settings.unsupported and settings.mode == "strict":
        lines = "; ".join(f"{key}: {reason}" for key, reason in settings.unsupported.items())
        msg = f"{engine} cannot be held to this policy, and its mode is strict: {lines}"
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


def _apply(settings: ServerSettings, key: str, value: Any) -> bool:
    if key == "execution.device":
        settings.requested[key] = str(value).partition(":")[0]
    elif key == "execution.precision" and value in DTYPES:
        settings.arguments["dtype"] = settings.requested[key] = DTYPES[value]
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
    elif key in ("kernels.attention", "kernels.matmul", "kernels.grouped_matmul") and word_of("vllm", value):
        settings.requested[key] = word_of("vllm", value)
        _choose(settings, key, word_of("vllm", value))
    else:
        return False
    return True


def word_of(engine: str, value: Any) -> str:
    """Return the engine's own name of a kernel, such as ``FLASH_ATTN`` of ``vllm.FLASH_ATTN``."""
    return value.removeprefix(f"{engine}.") if isinstance(value, str) and value.startswith(f"{engine}.") else ""


def _choose(settings: ServerSettings, key: str, word: str) -> None:
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
