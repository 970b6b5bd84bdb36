# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Modules of PyTorch whose results may share memory with inputs, weights or one another; see `buffer_cases`."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from buffer_cases import WIDTH, BufferCase

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["PROGRAMS", "open_program"]

_X: dict[str, tuple[str, list[Any]]] = {"x": ("float32", ["n", WIDTH])}


class _Net(torch.nn.Module):
    def __init__(self, forward: Callable[..., dict[str, Any]]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(WIDTH, dtype=torch.float32))
        self.register_buffer("table", torch.ones(3, WIDTH))
        self.drop = torch.nn.Dropout(0.5)
        self.act = torch.nn.ReLU(inplace=True)
        self._forward = forward

    def forward(self, x: Any, b: Any = None) -> dict[str, Any]:
        return self._forward(self, x) if b is None else self._forward(self, x, b)


def _values(net: Any, *tensors: Any) -> dict[str, Any]:
    with torch.no_grad():
        results = net(*(torch.from_numpy(array.copy()) for array in tensors))
    return {name: value.detach().numpy().copy() for name, value in results.items()}


def _case(name: str, forward: Callable[..., dict[str, Any]], **inputs: Any) -> BufferCase:
    """Return a case; its nodes hold the module."""
    net = _Net(forward).eval()
    return BufferCase(name, [net], inputs or _X, {}, lambda f: _values(net, *f.values()))  # type: ignore[list-item]


PROGRAMS = (
    _case("input_is_output", lambda net, x: {"y": x, "z": net.weight + x}),
    _case("view", lambda net, x: {"y": x.view(-1, 32, 2), "z": net.weight * x}),
    _case("slice", lambda net, x: {"y": x[:, 8:], "z": net.weight * x}),
    _case("transpose", lambda net, x: {"y": x.t(), "z": net.weight * x}),
    _case("expand", lambda net, x: {"y": x[None].expand(3, -1, -1), "z": net.weight * x}),
    _case("dropout", lambda net, x: {"y": net.drop(x), "z": net.weight * x}),
    _case("contiguous", lambda net, x: {"y": x.contiguous(), "z": x.to(torch.float32), "w": net.weight * x}),
    _case(
        "weight",
        lambda net, x: {"y": net.weight, "t": net.table, "v": net.table[1:], "z": net.weight * x + net.table[0]},
    ),
    _case("two_names", lambda net, x: (lambda y: {"y": y, "z": y, "w": y[:, ::2], "v": y.view(-1)})(net.weight * x)),
    _case("chunks", lambda net, x: dict(zip("yz", (net.weight * x).chunk(2, 1), strict=True))),
    _case("in_place", lambda net, x: {"y": net.act(x.clone()), "z": net.weight * x}),
    _case("writes_its_input", lambda net, x: {"y": net.act(x), "z": net.weight * x}),
    _case("two_inputs", lambda net, x, b: {"y": x + b * net.weight, "z": b, "w": x}, x=_X["x"], b=_X["x"]),
)  # fmt: skip


def open_program(case: BufferCase, rows: int, folder: Path | None = None, **options: Any) -> Any:
    """Open a session of a module; with a folder, of the program that it is exported to."""
    import xpuruntime as xrt

    options = {"device": "cpu", "engine": "torch", **options}
    module: Any = copy.deepcopy(case.nodes[0]).to(options["device"])
    examples = {name: torch.from_numpy(array).to(options["device"]) for name, array in case.feeds(0, rows).items()}
    if folder is None:
        return xrt.InferenceSession(module, example_inputs=examples, **options)
    path = folder / f"{case.name}.pt2"
    torch.export.save(torch.export.export(module, tuple(examples.values())), path)
    return xrt.InferenceSession(path, **options)
