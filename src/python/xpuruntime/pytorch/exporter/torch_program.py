# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``.pt2`` export of a module, as a program of PyTorch."""

from __future__ import annotations

import io
import json
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from xpuruntime.error_text import error_line
from xpuruntime.errors import ModelError
from xpuruntime.evidence.metadata import DIMENSIONS_KEY, LOCK_KEY, POLICY_KEY, digest_tensors
from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.exporter.exported import (
    Exported,
    lock_of,
    plain_path,
    quiet,
    translate,
    warn_state_changes,
    written_state,
)
from xpuruntime.pytorch.exporter.onnx_program import appearing

if TYPE_CHECKING:
    from pathlib import Path

    from xpuruntime.policies import Policy

__all__ = ["dimension_names", "node_names", "program_digest", "write_program"]


def write_program(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Path,
    policy: Policy | None,
    shapes: Any,
) -> Exported:
    """Export a module and write it; see `export`."""
    with context.thread_policy(None), quiet():
        try:
            program = torch.export.export(model, args, kwargs or None, dynamic_shapes=shapes)
        except Exception as error:
            raise _failed(model, error) from error
    names = node_names(program)
    modules = {name.rpartition("/")[0] for name in names.values()} - {""}
    carried, notes = translate(policy, names.values(), modules, by_node=False)
    changed = written_state(program)
    if changed:
        notes.append(warn_state_changes(model, changed, "no session opens such a .pt2 file"))
    lock = lock_of(model, (args, kwargs), exporter="torch.export", opset=0, weights=program_digest(program))
    extra = {LOCK_KEY: lock.to_json()}
    if carried is not None:
        extra[POLICY_KEY] = carried.dumps("json")
    try:
        dimensions = dimension_names(program)
    except AttributeError as error:  # no promise of PyTorch's
        notes.append(f"names of sizes are left out: PyTorch {torch.__version__} does not give them ({error})")
    else:
        if dimensions:
            extra[DIMENSIONS_KEY] = json.dumps(dimensions)
    with appearing(target) as temporary, quiet(), temporary.open("wb") as file:
        writer = _Writer(file)
        torch.export.save(program, cast("IO[bytes]", writer), extra_files=extra)
        if writer.failure is not None:
            raise writer.failure
    return Exported(path=target, format="pt2", policy=carried, lock=lock, notes=tuple(notes))


class _Writer(io.RawIOBase):
    """A file of which PyTorch hears no error: where writing fails, its archive ends the process."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True  # else PyTorch warns

    def write(self, data: Any) -> int:
        """Write, and keep the first error; afterwards write nothing."""
        if self.failure is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.failure = error
        return memoryview(data).nbytes

    def seek(self, offset: int, whence: int = 0) -> int:
        """Stay at the end: PyTorch goes back to the start once it has written."""
        del offset, whence
        return 0


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


def dimension_names(program: Any) -> dict[str, str]:
    """Return the names of `torch.export.Dim` by the symbols that stand for them in a program, which a file forgets.

    Symbols without a name, as of ``Dim.AUTO``, are left out.
    """
    sizes = (size for node in program.graph.find_nodes(op="placeholder") for size in _sizes(node.meta.get("val")))
    symbolic = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
    if symbolic is None:
        return {}
    shapes = symbolic.node.shape_env
    names = {}
    for symbol, sources in shapes.var_to_sources.items():
        stands = shapes.replace(symbol)  # where two sizes turned out to be equal, one symbol is both
        for source in sources if stands.is_Symbol else ():
            text = source.name if isinstance(source.name, str) else source.name()
            # A size that only others are made of, as `half` in `2 * half`, is no size of an input: its name is its own.
            if name := text if text.isidentifier() else shapes.source_name_to_debug_name.get(text):
                names[str(stands)] = name
    return names


def _sizes(value: Any) -> tuple[Any, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


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
    reason = error_line(error).rstrip(".")
    return ModelError(
        f"torch.export cannot export <{type(model).__qualname__}>: {reason}. Fix: read PyTorch's own error "
        "above, and https://pytorch.org/docs/stable/export.html has the rules"
    )
