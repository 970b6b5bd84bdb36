# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Exports of modules: whether one can be exported, as an ONNX model or as a program of PyTorch."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

import torch

from xpuruntime.argument_types import COUNT, FLAG, check_types
from xpuruntime.errors import InputError, ModelError, PolicyError
from xpuruntime.evidence.metadata import DIMENSIONS_KEY, LOCK_KEY, POLICY_KEY, digest_tensors
from xpuruntime.files.paths import kind_of, refuse_overwriting, user_path
from xpuruntime.policies import KernelPolicy, Policy
from xpuruntime.printable import error_line
from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.exporter.exported import (
    OPSET,
    Exported,
    in_force,
    lock_of,
    plain_path,
    quiet,
    training_mode,
    translate,
    warn_state_changes,
    written_state,
)
from xpuruntime.pytorch.exporter.onnx_program import appearing, write_onnx

if TYPE_CHECKING:
    from xpuruntime.policies import Policy

__all__ = [
    "Exported",
    "dimension_names",
    "export",
    "node_names",
    "program_digest",
    "write_program",
]


def export(
    model: torch.nn.Module,
    example_inputs: Any,
    path: str | os.PathLike[str],
    *,
    policy: Policy | KernelPolicy | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    precision: Literal["model", "fp32", "tf32", "fp16", "bf16", "int8"] | None = None,
    opset: int | None = None,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    training: bool = False,
    external_data: bool | None = None,
) -> Exported:
    """Write a module into one file together with the policy that its kernels are chosen by.

    Parameters
    ----------
    model : torch.nn.Module
        In evaluation mode. It is neither moved nor changed.
    example_inputs : tensor, sequence, or mapping of str to tensor
        What `model` is called with: by position, or by the names of ``forward``'s parameters. On the module's device.
    path : str or path
        ``*.onnx`` for every engine, or ``*.pt2`` for the torch engine. It appears whole or not at all; a file that is
        there is replaced.
    policy : Policy, KernelPolicy, path, mapping, or ``"auto"``, optional
        Default: the one that `set_kernel_policy` or `kernel_policy` has activated, without what it says of engine,
        device, memory and artifacts, which are those of training. Rules for backward and training alone are left out;
        rules by module also become rules by node. `Exported.notes` says what was changed.
    precision : str, optional
        Written into the policy: what a session converts the model to when it is opened.
    opset : int, optional
        Of ``*.onnx``; default: 23, the first in which attention is one node.
    dynamic_shapes : optional
        As `torch.export.export` takes it. Sizes that it does not name are fixed to those of the example.
    input_names, output_names : sequence of str, optional
        Of ``*.onnx``; default: the names of ``forward``'s parameters, and of the values that are returned.
    training : bool
        Whether a module in training mode is exported as such, dropout included. Otherwise it is refused.
    external_data : bool, optional
        Whether weights lie in a file of their own beside ``*.onnx``; default: where it would have more than 1.9 GB.

    Returns
    -------
    Exported

    Raises
    ------
    InputError
        The ending of `path` is another one, its folder is missing, or an argument has no meaning for the format.
    ModelError
        The module is in training mode, or PyTorch cannot export it.
    PolicyError
        `policy` is none.
    UnsupportedOperationError
        A package that the export needs is not installed.
    XpuRuntimeError
        The file cannot be written.

    Notes
    -----
    No policy holds while the module is traced: the graph has PyTorch's own operators, and kernels are chosen where it
    runs. In ONNX files nodes are named ``"<path of the module>/<operator>"``, such as ``"layers.0.attn/Attention"``.

    Examples
    --------
    >>> import tempfile, torch, xpuruntime.pytorch as xrt_torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()).eval()
    >>> path = f"{tempfile.mkdtemp()}/model.pt2"
    >>> done = xrt_torch.export(model, torch.zeros(2, 4), path, policy={"kernels": {"matmul": "cpu.blas"}})
    >>> done.policy.kernels.matmul
    'cpu.blas'
    """
    check_types(
        {"training": FLAG, "external_data": FLAG, "opset": COUNT},
        {"training": training, "external_data": external_data, "opset": opset},
        optional=["external_data", "opset"],
    )
    target = _target(path, example_inputs)
    if isinstance(policy, (str, os.PathLike)):
        refuse_overwriting({"path": target}, [("the policy", policy)])
    _check_mode(model, training)
    stated = _policy(policy, precision)
    args, kwargs = _arguments(example_inputs)
    _check_names(input_names, output_names)
    if target.suffix == ".pt2":
        _refuse_for_pt2(opset=opset, input_names=input_names, output_names=output_names, external_data=external_data)
        with training_mode(model):
            return write_program(model, args, kwargs, target, stated, dynamic_shapes)

    with training_mode(model):
        return write_onnx(
            model,
            args,
            kwargs,
            target,
            stated,
            opset=OPSET if opset is None else opset,
            dynamic_shapes=dynamic_shapes,
            input_names=input_names,
            output_names=output_names,
            external_data=external_data,
        )


def _target(path: Any, example_inputs: Any) -> Path:
    if isinstance(example_inputs, (str, os.PathLike)) and not isinstance(path, (str, os.PathLike)):
        raise InputError("export takes the example inputs before the path. Fix: export(model, example_inputs, path)")
    target = user_path(path, "the exported model")
    if target.suffix not in (".onnx", ".pt2"):
        raise InputError(f"cannot export to {str(target)!r}. Fix: name a file that ends in .onnx or in .pt2")
    if kind_of(target.parent) != "folder":
        raise InputError(f"cannot export to {str(target)!r}: there is no folder {str(target.parent)!r}. Fix: make it")
    return target


def _check_mode(model: Any, training: bool) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"export takes a torch.nn.Module, got a {type(model).__name__}")
    if training:
        return
    for name, part in model.named_modules():
        if part.training:
            what = f"<{type(model).__qualname__}>" + (f": its part {name!r}" if name else ": it")
            raise ModelError(
                f"cannot export {what} is in training mode: dropout and batch norm would be written as they are in "
                "training. Fix: call model.eval() first, or pass training=True."
            )


def _policy(policy: Any, precision: str | None) -> Policy | None:
    if isinstance(policy, KernelPolicy):
        stated: Policy | None = Policy(kernels=policy)
    elif policy is not None:
        stated = Policy.coerce(policy)
    else:
        stated = in_force()
    if precision is None:
        return stated
    try:
        return (stated or Policy()).with_overrides(precision=precision)  # type: ignore[arg-type]
    except PolicyError as error:
        raise PolicyError(f"precision={precision!r}: {error}") from None


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    raise InputError(
        f"example_inputs is a {type(example).__name__}. "
        "Fix: pass a tensor, a tuple of what forward takes, or a mapping by "
        "the names of its parameters"
    )


def _check_names(inputs: Any, outputs: Any) -> None:
    all_names: list[str] = []
    for argument, names in (("input_names", inputs), ("output_names", outputs)):
        if names is None:
            continue
        if (
            isinstance(names, str)
            or not isinstance(names, Iterable)
            or not all(isinstance(name, str) and name for name in names)
        ):
            raise InputError(f"{argument} is {names!r}. Fix: pass a list of names, one for each")
        all_names += names
    twice = next((name for name in all_names if all_names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{twice!r} is twice among input_names and output_names; each names one tensor of the graph")


def _refuse_for_pt2(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise InputError(f"{name} has no meaning for a .pt2 file. Fix: leave it out, or export to .onnx")


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
