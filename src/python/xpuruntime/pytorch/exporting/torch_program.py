# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Writing a module as a program of PyTorch (``.pt2``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import ModelError
from xpuruntime.evidence.carried.export_lock import digest_tensors
from xpuruntime.evidence.carried.policy import LOCK_KEY, POLICY_KEY
from xpuruntime.pytorch import held
from xpuruntime.pytorch.exporting.carrying import lock_of, plain_path, quiet, translate
from xpuruntime.pytorch.exporting.exporter import Exported
from xpuruntime.pytorch.exporting.state import say_that_state_changes, written_state
from xpuruntime.pytorch.exporting.writing import appearing

if TYPE_CHECKING:
    from pathlib import Path

    from xpuruntime.policies import Policy

__all__ = ["node_names", "program_digest", "write_program"]


def write_program(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Path,
    policy: Policy | None,
    shapes: Any,
) -> Exported:
    """Export a module and write it; see `export`."""
    with held.holding(None), quiet():
        try:
            program = torch.export.export(model, args, kwargs or None, dynamic_shapes=shapes)
        except Exception as error:
            raise _failed(model, error) from error
    names = node_names(program)
    modules = {name.rpartition("/")[0] for name in names.values()} - {""}
    carried, notes = translate(policy, names.values(), modules, by_node=False)
    changed = written_state(program)
    if changed:
        notes.append(say_that_state_changes(model, changed, "no session opens such a .pt2 file"))
    lock = lock_of(model, (args, kwargs), exporter="torch.export", opset=0, weights=program_digest(program))
    extra = {LOCK_KEY: lock.to_json()}
    if carried is not None:
        extra[POLICY_KEY] = carried.dumps("json")
    with appearing(target) as place, quiet():
        torch.export.save(program, place, extra_files=extra)
    return Exported(path=target, format="pt2", policy=carried, lock=lock, notes=tuple(notes))


def node_names(program: Any) -> dict[str, str]:
    """Return the name of each operator in an exported program: ``"linear_1"`` to ``"layers.0.attn.qkv/linear"``.

    Names are unique: a second operator of the same kind in one module is ``"layers.0.attn/view_1"``.
    """
    names: dict[str, str] = {}
    counts: dict[str, int] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        stack = node.meta.get("nn_module_stack") or {}
        path = plain_path(str(next(reversed(stack.values()))[0])) if stack else ""
        packet = getattr(node.target, "overloadpacket", node.target)
        op = getattr(packet, "__name__", str(packet)).rpartition(".")[2]
        base = f"{path}/{op}" if path and not path.startswith("_empty_nn_module_stack") else op
        count = counts.get(base, 0)
        counts[base] = count + 1
        names[node.name] = f"{base}_{count}" if count else base
    return names


def program_digest(program: Any) -> str:
    """Return the digest of the weights and constants of an exported program."""
    parts = []
    for name, value in (*program.state_dict.items(), *program.constants.items()):
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().flatten()
            data = memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b""
            parts.append((name, str(value.dtype), tuple(value.shape), data))
    return digest_tensors(parts)


def _failed(model: torch.nn.Module, error: Exception) -> ModelError:
    text = str(error).strip().splitlines()
    reason = text[0].rstrip(".") if text else type(error).__name__
    return ModelError(
        f"torch.export cannot export <{type(model).__qualname__}>: {reason}. Fix: what PyTorch says of it stands "
        "above, and https://pytorch.org/docs/stable/export.html has the rules"
    )
