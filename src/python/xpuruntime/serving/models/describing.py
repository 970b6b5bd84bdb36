# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Metadata and configuration of a served model, in the words of the protocol and of Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.inference.session import InferenceSession
    from xpuruntime.serving.batching.layout import InputLayout, Layout, OutputLayout
    from xpuruntime.serving.batching.settings import BatchSettings

__all__ = ["config_of", "memory_usage_of", "metadata_of"]


def metadata_of(name: str, versions: Sequence[int], session: InferenceSession, layout: Layout) -> dict[str, Any]:
    """Return the metadata of a model; free dimensions are -1."""
    return {
        "name": name,
        "versions": [str(version) for version in versions],
        "platform": f"xpuruntime_{session.plan.engine}",
        "inputs": [_tensor(one) for one in layout.inputs.values()],
        "outputs": [_tensor(one) for one in layout.outputs.values()],
    }


def config_of(
    name: str,
    versions: Sequence[int],
    session: InferenceSession,
    layout: Layout,
    batching: BatchSettings,
    instances: int,
    parameters: dict[str, str],
) -> dict[str, Any]:
    """Return the configuration of a model; `batching` has the sizes and delays in force."""
    device = session.plan.device
    gpu = device.partition(":")[2] if device.startswith("cuda") else None
    made: dict[str, Any] = {
        "name": name,
        "platform": f"xpuruntime_{session.plan.engine}",
        "backend": "xpuruntime",
        "version_policy": {"specific": {"versions": list(versions)}},
        "max_batch_size": batching.max_batch_size,
        "input": [
            {**_config(one, batching.max_batch_size), "optional": not one.required} for one in layout.inputs.values()
        ],
        "output": [_config(one, batching.max_batch_size) for one in layout.outputs.values()],
        "instance_group": [
            {
                "name": name,
                "kind": "KIND_CPU" if gpu is None else "KIND_GPU",
                "count": instances,
                "gpus": [] if gpu is None else [int(gpu or 0)],
            }
        ],
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }
    if batching.max_batch_size:
        made["dynamic_batching"] = {
            "preferred_batch_size": list(batching.preferred_batch_size),
            "max_queue_delay_microseconds": batching.max_queue_delay_us,
            "preserve_ordering": batching.preserve_ordering,
            "priority_levels": batching.priority_levels,
            "default_priority_level": batching.default_level,
            "default_queue_policy": {
                "timeout_action": batching.timeout_action.upper(),
                "default_timeout_microseconds": batching.timeout_us,
                "allow_timeout_override": True,
                "max_queue_size": batching.max_queue_size,
            },
        }
    return made


def memory_usage_of(device: str, size: int) -> dict[str, Any]:
    """Return an entry of ``memory_usage`` in the statistics, whose types Triton calls CPU and GPU."""
    kind, _, number = device.partition(":")
    return {"type": "GPU" if kind in ("cuda", "rocm") else kind.upper(), "id": int(number or 0), "byte_size": size}


def _dims(one: InputLayout | OutputLayout) -> list[int]:
    return [dim if isinstance(dim, int) else -1 for dim in one.dims or ()]


def _tensor(one: InputLayout | OutputLayout) -> dict[str, Any]:
    return {"name": one.name, "datatype": one.datatype, "shape": _dims(one)}


def _config(one: InputLayout | OutputLayout, most: int) -> dict[str, Any]:
    dims = _dims(one)
    if most and one.batch is not None:
        del dims[one.batch]
    word = "STRING" if one.datatype == "BYTES" else one.datatype
    return {"name": one.name, "data_type": f"TYPE_{word}", "dims": dims}
