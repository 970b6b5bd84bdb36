# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`export`: a module, its policy and its lock in one file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.argument_types import COUNT, FLAG, check_types
from xpuruntime.errors import InputError, ModelError, PolicyError
from xpuruntime.files.paths import kind_of, refuse_overwriting, user_path
from xpuruntime.policies import KernelPolicy, Policy
from xpuruntime.pytorch.exporter.exported import OPSET, Exported, in_force, training_mode
from xpuruntime.pytorch.exporter.onnx_program import write_onnx
from xpuruntime.pytorch.exporter.torch_program import write_program

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

__all__ = ["Exported", "export"]


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
        raise InputError(f"cannot export to {str(target)!r}: name a file that ends in .onnx or in .pt2")
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
            what = f"<{type(model).__qualname__}>" + (f": its part {name!r}" if name else "")
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
        f"example_inputs is a {type(example).__name__}; pass a tensor, a tuple of what forward takes, or a mapping by "
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
            raise InputError(f"{argument} is {names!r}; pass a list of names, one for each")
        all_names += names
    twice = next((name for name in all_names if all_names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{twice!r} is twice among input_names and output_names; each names one tensor of the graph")


def _refuse_for_pt2(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise InputError(f"{name} has no meaning for a .pt2 file; leave it out, or export to .onnx")
