# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""FP32 precision switches of PyTorch for products and convolutions, in both of its interfaces.

The new interface (``fp32_precision``) has a value for each backend and operation, which may be inherited; the old one
(``set_float32_matmul_precision``, ``cudnn.allow_tf32``) has values of its own beside them, and raises where the two
disagree. Here both are read as they are stored, so that they can be put back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch import _private_api

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["put_back", "reads", "set_convolutions", "set_products", "stored_convolutions", "stored_products"]

_get = _private_api.fp32_precision
_set = _private_api.set_fp32_precision
_ROOT = ("generic", "all")
#: What a value looks like where nothing is inherited, and where ``ieee`` is, to what is stored.
_STORED = {("none", "ieee"): "none", ("tf32", "ieee"): "default"}
_PRODUCTS = (("cuda", "matmul"), ("mkldnn", "matmul"))
_CONVOLUTIONS = (("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "conv"), ("mkldnn", "rnn"))
#: Names of the values of the old interface among those that are stored.
_MATMUL, _CUDNN = "float32_matmul_precision", "cudnn.allow_tf32"


def reads(switch: str) -> bool | None:
    """Return whether products, ``"matmul"``, or convolutions, ``"cudnn"``, use TF32; ``None``: there is no one answer.

    So it is where the interfaces differ, and where oneDNN rounds on the CPU what cuDNN and cuBLAS do not.
    """
    pairs = _PRODUCTS if switch == "matmul" else _CONVOLUTIONS
    found = {_get(*pair) == "tf32" for pair in pairs if pair[0] == "cuda"}
    try:
        if switch == "matmul":
            found.add(torch.get_float32_matmul_precision() != "highest")
        else:
            found.add(bool(_private_api.cudnn_allow_tf32()))
    except RuntimeError:
        return None
    if True not in found and any(_get(*pair) in ("tf32", "bf16") for pair in pairs):
        return None
    return found.pop() if len(found) == 1 else None


def stored_products() -> Mapping[Any, Any]:
    """Return what is stored for products."""
    found: dict[Any, Any] = _stored(_PRODUCTS)
    found[_MATMUL] = _hidden(_PRODUCTS, "ieee", torch.get_float32_matmul_precision, found)
    return found


def stored_convolutions() -> Mapping[Any, Any]:
    """Return what is stored for convolutions and recurrent layers."""
    found: dict[Any, Any] = _stored(_CONVOLUTIONS)
    # PyTorch reads it where both kernels of cuDNN agree with it, and raises otherwise.
    found[_CUDNN] = _hidden(_CONVOLUTIONS[:2], "tf32", _private_api.cudnn_allow_tf32, found, otherwise=False)
    return found


def set_products(tf32: bool) -> None:
    """Let products of float32 use TF32, or not, so that both interfaces say so."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")


def set_convolutions(tf32: bool) -> None:
    """Let convolutions and recurrent layers of float32 use TF32, or not, so that both interfaces say so."""
    torch.backends.cudnn.allow_tf32 = tf32
    for backend, op in _CONVOLUTIONS[: 2 if tf32 else 4]:
        _set(backend, op, "tf32" if tf32 else "ieee")


def put_back(before: Mapping[Any, Any], xrt_kernel: Mapping[Any, Any], now: Mapping[Any, Any]) -> None:
    """Store what was before, but for what the program itself has set since."""
    changed = {key for key in now if now[key] != xrt_kernel[key]}
    pairs = [key for key in now if isinstance(key, tuple)]
    if _MATMUL in changed:
        changed.add(_PRODUCTS[0])  # the old interface sets both
    elif _CUDNN in now:
        both = {now[pair] for pair in _CONVOLUTIONS[:2]}
        by_old = changed.issuperset(_CONVOLUTIONS[:2]) and both in ({"none"}, {"tf32"})
        if _CUDNN not in changed and not by_old:
            torch.backends.cudnn.allow_tf32 = before[_CUDNN]
    else:
        torch.set_float32_matmul_precision(before[_MATMUL])
    for pair in pairs:  # the old interface has written them as well
        _store(pair[0], pair[1], now[pair] if pair in changed else before[pair])


def _stored(pairs: tuple[tuple[str, str], ...]) -> dict[Any, str]:
    """Return what is stored for pairs of backend and operation, found by setting what they inherit for a moment."""
    root = _get(*_ROOT)
    found: dict[Any, str] = {}
    try:
        _set(*_ROOT, "none")
        for backend in dict.fromkeys(backend for backend, _ in pairs):
            above = _get(backend, "all")
            mine = [pair for pair in pairs if pair[0] == backend]
            try:
                _set(backend, "all", "none")
                alone = [_get(*pair) for pair in mine]
                _set(backend, "all", "ieee")
                for pair, value in zip(mine, alone, strict=True):
                    found[pair] = _STORED.get((value, _get(*pair)), value)
            finally:
                _set(backend, "all", above)
    finally:
        _set(*_ROOT, root)
    return found


def _hidden(
    pairs: tuple[tuple[str, str], ...],
    value: str,
    read: Callable[[], Any],
    stored: Mapping[Any, Any],
    otherwise: Any = None,
) -> Any:
    """Return a value of the old interface, also where PyTorch refuses to read it beside those of the new one."""
    try:
        return read()
    except RuntimeError:
        pass
    try:
        for pair in pairs:
            _set(*pair, value)
        return read()
    except RuntimeError:
        return otherwise
    finally:
        for pair in pairs:
            _store(*pair, stored[pair])


def _store(backend: str, op: str, value: str) -> None:
    if value == "default":  # which only PyTorch itself can store: TF32 unless something is inherited
        alone = _get(*_ROOT) == _get(backend, "all") == "none"
        value = "tf32" if alone else "none"
    _set(backend, op, value)
