# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A layer norm on CUDA, in Triton. Triton and PyTorch are imported when a kernel is prepared, not before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata, util
from typing import Any

from xpuruntime import UnsupportedOperationError
from xpuruntime.ops.plugins import KernelBackend, PythonKernel

__all__ = ["TritonBackend", "TritonLayerNorm"]

#: A row must fit into the registers of one block.
MOST_COLUMNS = 16384


class TritonBackend(KernelBackend):
    """Triton, on CUDA; it asks PyTorch for the current device."""

    def __init__(self) -> None:
        super().__init__("example_triton", "cuda", "0.1.0")

    def available(self) -> tuple[bool, str]:
        """Look whether both are installed, without importing them."""
        missing = [name for name in ("triton", "torch") if util.find_spec(name) is None]
        if missing:
            return False, f"not installed: {', '.join(missing)}; pip install 'xpuruntime-example-kernels[triton]'"
        return True, ""

    def version(self) -> str:
        """Return the versions of this package and of Triton, which compiles it."""
        return f"{super().version()}, triton {metadata.version('triton')}"


class TritonLayerNorm(PythonKernel):
    """One program a row, which is read once and kept in registers."""

    id = "example_triton.layer_norm"
    op = "layer_norm"
    description = "an example of a kernel in Triton: one pass over memory, a row to a block"
    limits = f"fp16, bf16 and fp32, rows without gaps, up to {MOST_COLUMNS} columns, no residual; CUDA"

    def supports(self, op: Mapping[str, Any]) -> tuple[bool, str]:
        """Answer from the description alone."""
        operands = op["operands"]
        x = operands["x"]
        if x["dtype"] not in ("float16", "bfloat16", "float32"):
            return False, f"it computes float16, bfloat16 and float32, and this is {x['dtype']}"
        if "residual" in operands:
            return False, "it adds no residual"
        rows, columns = x["shape"]
        if columns > MOST_COLUMNS:
            return False, f"it takes up to {MOST_COLUMNS} columns, and these are {columns}"
        if rows >= 2**31:
            return False, f"a grid has fewer than 2^31 blocks, and there are {rows} rows"
        for name, operand in operands.items():
            # For which addresses it is compiled is settled before it runs.
            if operand["alignment"] < 16:
                return False, f"the address of {name} must be a multiple of 16 bytes"
            if operand["strides"][-1] != 1 and operand["shape"][-1] != 1:
                return False, f"the elements of {name} must lie next to each other"
        return True, ""

    def prepare(  # a kernel with one way to do it has no use for `config`
        self,
        op: Mapping[str, Any],
        config: str,  # noqa: ARG002
    ) -> Callable[[Mapping[str, Any], int], None]:
        """Compile it and load it onto the device, so that launches do neither."""
        import torch
        import triton

        if torch.version.cuda is None:
            raise UnsupportedOperationError("PyTorch is installed without CUDA, and Triton asks it for the device")
        from example_kernels.triton_code import layer_norm

        operands = op["operands"]
        names = ("x", "weight", "bias", "y", "mean", "rstd")
        dtypes = [getattr(torch, operands[name]["dtype"]) if name in operands else None for name in names]
        rows, columns = operands["x"]["shape"]
        block = triton.next_power_of_2(columns)
        sizes = (operands["x"]["strides"][0], operands["y"]["strides"][0], columns, op["attributes"]["epsilon"], block)
        with torch.cuda.device(torch.device(op["device"])):
            warps = min(max(block // 512, 1), 16)
            compiled = layer_norm.warmup(*dtypes, *sizes, num_warps=warps, grid=(rows, 1, 1))
            launcher = compiled[(rows, 1, 1)]

        def run(operands: Mapping[str, Any], stream: int) -> None:
            pointers = [operands[name].data_ptr if name in operands else None for name in names]
            launcher(*pointers, *sizes, stream=stream)

        return run
