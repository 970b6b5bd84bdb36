# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Worker that runs an exported script of PyTorch, and its operators one by one; copied out."""

from __future__ import annotations

import importlib
from typing import Any


def run(script: str, inputs: str, outputs: str, folder: str) -> dict[str, Any]:
    """Run the script's module, and return each operator of its graph with the types of its results.

    A compiled module is one whole: of it there are no operators.
    """
    del folder
    native, module, feeds = importlib.import_module("native_side").first_run(script, inputs, outputs)
    torch: Any = importlib.import_module("torch")
    facts = {"version": str(torch.__version__), "device": native.DEVICE}
    return {"facts": facts, "operators": None if native.COMPILE is not None else _operators(native, module, feeds)}


def _operators(native: Any, module: Any, feeds: dict[str, Any]) -> dict[str, list[str]]:
    fx: Any = importlib.import_module("torch.fx")
    torch: Any = importlib.import_module("torch")
    dtypes: dict[str, list[str]] = {}

    class Seen(fx.Interpreter):  # type: ignore[misc]
        def run_node(self, n: Any) -> Any:
            result = super().run_node(n)
            if n.op == "call_function":
                tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
                strays = [tensor for tensor in tensors if tensor.device != torch.device(native.DEVICE)]
                if strays:
                    raise RuntimeError(f"{n.name} gave a tensor on {strays[0].device}, not on {native.DEVICE}")
                dtypes[n.name] = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
            return result

    tensors = [_tensor(native, name, feeds[name]).to(native.DEVICE) for name in native.INPUTS]
    with torch.no_grad():
        Seen(module).run(*tensors, enable_io_processing=False)
    return dtypes


def _tensor(native: Any, name: str, array: Any) -> Any:
    if hasattr(native, "tensor_of"):  # of scripts with bfloat16, which NumPy lacks
        return native.tensor_of(name, array)
    return importlib.import_module("torch").from_numpy(array)
