# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""SGLang under a policy: `register` reads back what each scheduler selected, ``xrt-sglang serve`` demands it.

SGLang logs what a plugin raises while it is loaded, and goes on, so that the hooks refuse, which run in the schedulers:
behind the choice of attention, and behind the capture of graphs. Where one has not run, the launcher ends the server.
"""

from __future__ import annotations

import json
import os
import sys
import typing
from typing import Any

from xpuruntime_vllm.launch import options_of, served
from xpuruntime_vllm.settings import DTYPES, ServerSettings, read_policy, word_of
from xpuruntime_vllm.worker import SETTINGS, evidence_of, publish

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_USAGE = "usage: xrt-sglang serve MODEL --policy POLICY [--lock LOCK] [-o LOCK] [options of SGLang's server]\n"


def register() -> None:
    """Add hooks to the model runners of this process, where a launcher has set a policy; SGLang calls this."""
    if SETTINGS not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_RUNNER}.init_attention_backends", _selected, HookType.AFTER)
    HookRegistry.register(f"{_RUNNER}.init_cuda_graphs", _ready, HookType.AFTER)


def _selected(_result: Any, runner: Any, *_args: Any, **_kwargs: Any) -> None:
    if not runner.is_draft_worker:
        publish(read_back(runner), but={"execution.cuda_graph"})


def _ready(_result: Any, runner: Any, *_args: Any, **_kwargs: Any) -> None:
    if not runner.is_draft_worker:
        publish(read_back(runner), ready=True)


def read_back(runner: Any) -> dict[str, Any]:
    """Return the evidence of the scheduler of a model runner; of a draft model there is none."""
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

    settings = json.loads(os.environ[SETTINGS])
    rows = [row for name, module in runner.model.named_modules() if (row := _row(name, module)) is not None]
    rows += [
        _shown(phase, "attention", runner.attn_backend, kernel)
        for phase, kernel in (
            ("prefill", runner.prefill_attention_backend_str), ("decode", runner.decode_attention_backend_str),
        )
    ]  # fmt: skip
    facts = {
        "execution.device": str(runner.device),
        "execution.precision": str(runner.model_config.dtype).removeprefix("torch."),
        "execution.cuda_graph": "captured" if getattr(runner, "decode_cuda_graph_captured", False) else "NONE",
        "execution.determinism": str(int(is_batch_invariant_mode_enabled())),
    }
    options = "execution.provider_options.sglang."
    for key in settings["requested"]:
        if key.startswith(options) and (value := _resolved(key.removeprefix(options))) is not None:
            facts[key] = str(value)
    rank, workers = _place(runner)
    more = {"rank": rank, "workers": workers, "model": str(runner.model_config.model_path), "config": "-"}
    return evidence_of(settings, rows, facts, more)


def _row(name: str, module: Any) -> dict[str, str] | None:
    """Return the method of a linear layer, or the runner of experts."""
    method = getattr(module, "quant_method", None)
    experts = getattr(module, "w13_weight", None)
    weight = experts if experts is not None else getattr(module, "weight", None)
    if method is None or weight is None or type(method).__name__ == "UnquantizedEmbeddingMethod":
        return None
    if experts is None:
        return _shown(name, "matmul", module, type(method).__name__) | {"weights": _type_of(weight)}
    backend = getattr(getattr(method, "runner", None), "runner_backend", None)
    kernel = str(getattr(backend, "value", backend or type(method).__name__))
    return _shown(name, "grouped_matmul", module, kernel) | {"weights": _type_of(weight)}


def _shown(name: str, op: str, owner: Any, kernel: str) -> dict[str, str]:
    method = type(getattr(owner, "quant_method", owner)).__name__
    words = {"class": type(owner).__name__, "method": method, "scheme": "-", "kernel": str(kernel)}
    return {"module": name, "op": op, **words, "weights": "-", "status": "selected"}


def _type_of(weight: Any) -> str:
    return str(weight.dtype).removeprefix("torch.")


def _resolved(name: str) -> Any:
    """Return what SGLang made of an option, by the name of its field or of its command line."""
    from sglang.srt import runtime_context
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.server_args import ServerArgs

    for field, hint in typing.get_type_hints(ServerArgs, include_extras=True).items():
        words = {getattr(more, "cli_name", None) for more in getattr(hint, "__metadata__", ())}
        if name == field or f"--{name.replace('_', '-')}" in words:
            first, *path = [*namespace_of(ServerArgs)[field].split("."), field]
            value = getattr(runtime_context, f"get_{first}")()
            for part in path:
                value = getattr(value, part)
            return value
    return None


def _place(runner: Any) -> tuple[int, int]:
    """Return the number of this scheduler among all, and how many there are."""
    import torch
    from sglang.srt.runtime_context import get_parallel

    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if together else (0, 1)
    arguments = runner.server_args
    replicas = 1 if getattr(arguments, "enable_dp_attention", False) else int(getattr(arguments, "dp_size", 1) or 1)
    replica = int(getattr(get_parallel(), "dp_rank", 0) or 0) if replicas > 1 else 0
    return replica * ranks + rank, ranks * replicas


def _apply(settings: ServerSettings, key: str, value: Any) -> bool:
    """Put a policy key into the settings, and say whether SGLang has it."""
    arguments, requested = settings.arguments, settings.requested
    if key == "execution.device":
        arguments["device"] = requested[key] = str(value).partition(":")[0]
    elif key == "execution.precision" and value in DTYPES:
        arguments["dtype"] = requested[key] = DTYPES[value]
    elif key == "execution.cuda_graph":
        if value == "off":
            arguments |= {"disable_decode_cuda_graph": True, "disable_prefill_cuda_graph": True}
            requested[key] = "NONE"
        elif value != "prefer":
            arguments["cuda_graph_backend_decode"], requested[key] = "full", "captured"
    elif key == "execution.determinism" and value == "batch_invariant":
        arguments["enable_deterministic_inference"], requested[key] = True, "1"
    elif key == "execution.provider_options":
        for name, option in value.get("sglang", {}).items():
            arguments[name], requested[f"{key}.sglang.{name}"] = option, str(option)
    elif key == "kernels.attention" and word_of("sglang", value):
        arguments["attention_backend"] = requested[key] = word_of("sglang", value)
    elif key == "kernels.grouped_matmul" and word_of("sglang", value):
        arguments["moe_runner_backend"] = requested[key] = word_of("sglang", value)
    else:
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    """Run ``xrt-sglang serve MODEL --policy POLICY [--lock LOCK] [-o LOCK] [SGLang's options]``."""
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) < 2 or words[0] != "serve":
        sys.stderr.write(_USAGE)
        return 2

    def start(model: str, settings: ServerSettings, rest: list[str]) -> list[str]:
        return [sys.executable, "-m", "sglang.launch_server", "--model-path", model, *options_of(settings), *rest]

    return served(words[1], words[2:], lambda policy: read_policy(policy, "sglang", _apply), start, "30000")


if __name__ == "__main__":
    raise SystemExit(main())
