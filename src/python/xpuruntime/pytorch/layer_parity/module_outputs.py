# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Inputs and outputs of the modules of a model, for comparing layers."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from xpuruntime.errors import InputError
from xpuruntime.evidence.metadata import module_of_node
from xpuruntime.pytorch._private_api import pytree


def feeds_and_call(
    model: torch.nn.Module, inputs: Any, names: Sequence[str], what: str
) -> tuple[dict[str, torch.Tensor], tuple[Any, ...], dict[str, Any]]:
    """Return the tensors that a session is given, by name, and the arguments of the module."""
    inputs = _several(inputs, what)
    parameters = inspect.signature(model.forward).parameters
    flat = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
    if len(flat) == len(names) and all(_is_array(value) for value in flat):
        if not isinstance(inputs, Mapping):
            inputs = dict(zip(names, flat, strict=True))
        if set(inputs) == set(names):
            feeds = {name: torch.as_tensor(inputs[name]) for name in names}
            moved = {name: _on_device_of(model, value) for name, value in feeds.items()}
            # By the names of its parameters where they are those of the session, in order.
            return (feeds, (), moved) if all(name in parameters for name in moved) else (feeds, (*moved.values(),), {})
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        unknown = [str(name) for name in inputs if name not in parameters]
        if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            raise InputError(
                f"{what}: inputs {', '.join(map(str, inputs))} are given, and the session takes {', '.join(names)}"
            )
        kwargs = {name: inputs[name] for name in sorted(inputs, key=lambda name: _place(name, names))}
    else:
        args = tuple(inputs)
    arrays = [torch.as_tensor(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if _is_array(leaf)]
    if len(arrays) != len(names):
        raise InputError(f"{what}: {len(arrays)} inputs are given, and the session takes {', '.join(names)}")
    return dict(zip(names, arrays, strict=True)), *_moved(model, args, kwargs)


def call_of(model: torch.nn.Module, inputs: Any, what: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and named arguments of a module, on its device."""
    inputs = _several(inputs, what)
    return _moved(model, (), dict(inputs)) if isinstance(inputs, Mapping) else _moved(model, tuple(inputs), {})


def _several(inputs: Any, what: str) -> Any:
    if isinstance(inputs, (torch.Tensor, np.ndarray)):
        inputs = (inputs,)
    if not isinstance(inputs, (Mapping, tuple, list)):
        raise InputError(
            f"{what}: inputs is a {type(inputs).__name__}. "
            "Fix: pass a tensor, a tuple of what forward takes, or a mapping"
        )
    return inputs


def _moved(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = pytree.tree_map(
        lambda leaf: _on_device_of(model, torch.as_tensor(leaf)) if _is_array(leaf) else leaf, (args, kwargs)
    )
    return args, kwargs


def _place(parameter: str, names: Sequence[str]) -> int:
    """Return where the inputs of a parameter begin; those of a list or dict are called after it, as ``xs_0``."""
    mine = (i for i, name in enumerate(names) if name == parameter or name.startswith(f"{parameter}_"))
    return next(mine, len(names))


def for_session(value: torch.Tensor, session: Any) -> Any:
    """Return an input as a session takes it: PyTorch's has types that NumPy lacks, such as bfloat16."""
    if session.plan.engine == "torch":
        return value.detach().to(session.plan.device)
    value = value.detach().cpu()
    try:
        return value.numpy()
    except TypeError:
        return value


def _is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def _on_device_of(model: torch.nn.Module, value: torch.Tensor) -> torch.Tensor:
    device = next((parameter.device for parameter in model.parameters()), None)
    return value if device is None else value.to(device)


class ModuleOutputs:
    """The tensors that leave the modules of a model whose nodes are called ``"<path of the module>/<operator>"``."""

    def __init__(self, model: Any) -> None:
        nodes = [node for node in model.nodes if not node.graph]
        results = {info.name for info in model.outputs}
        readers: dict[str, set[str]] = defaultdict(set)
        for node in nodes:
            path = _path_of(node)
            for name in node.inputs:
                readers[name].add(path)
        #: Path to the tensors made inside, in the order of the graph, each with whether others surely read it.
        self._found: dict[str, list[tuple[str, bool]]] = {}
        for node in nodes:
            for path in _paths_around(_path_of(node)):
                leaving = self._found.setdefault(path, [])
                for name in node.outputs:
                    read = name in results or any(not _inside(reader, path) for reader in readers.get(name, ()))
                    if name and (read or name not in readers):
                        leaving.append((name, read))

    def has(self, path: str) -> bool:
        """Say whether the model has nodes of a module."""
        return path in self._found

    def of(self, path: str, count: int) -> tuple[str, ...]:
        """Return the tensors that nodes of a module make for others, in the order of the graph.

        Those that nobody reads, such as statistics of a norm, are among them only where `count` shows that the module
        returns them.
        """
        readings = self._found.get(path, [])
        read = tuple(name for name, sure in readings if sure)
        return tuple(name for name, _ in readings) if len(read) != count == len(readings) else read


def _path_of(node: Any) -> str:
    return node.result_of or module_of_node(node.name)


def _inside(path: str, around: str) -> bool:
    return path == around or path.startswith(f"{around}.")


def _paths_around(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
