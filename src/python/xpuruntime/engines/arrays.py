# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Arrays of any framework at the border: what they are, and how results go back in the caller's own kind.

No framework is imported here; a framework is used only when the caller has already imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from xpuruntime.errors import InputError, UnsupportedOperationError

if TYPE_CHECKING:
    import numpy as np

    from xpuruntime import _core

Kind = Literal["numpy", "torch", "cupy", "tensor", "jax", "dlpack"]

#: Types seen so far; a type that is no array raises and is not kept.
_KINDS: dict[type, Kind] = {}

#: torch.dtype to xpuruntime's name, filled as dtypes are met.
_TORCH_DTYPES: dict[Any, str] = {}

#: What to do with an array that cannot be shared.
_DENSE = "pass a dense array that is in memory (torch: not on meta; a sparse one as x.to_dense())"
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13


def kind_of(name: str, array: Any) -> Kind:
    """Return which framework `array` belongs to."""
    known = _KINDS.get(type(array))
    if known is None:
        known = _KINDS[type(array)] = _kind_of(name, array)
    return known


def _kind_of(name: str, array: Any) -> Kind:
    module = type(array).__module__
    root = module.partition(".")[0] if isinstance(module, str) else ""
    if root == "numpy" and module.startswith("numpy.ma"):
        msg = f"input {name!r} is a masked array, and a model has no masks. Fix: pass x.filled(value), or x.data"
        raise InputError(msg)
    if root == "numpy" and hasattr(array, "dtype") and hasattr(array, "flags"):
        return "numpy"
    shared = _has(array, "__dlpack__") and _has(array, "__dlpack_device__")
    if shared and root in ("torch", "cupy"):
        return root  # type: ignore[return-value]
    if shared and root == "xpuruntime":
        return "tensor"
    if shared and root in ("jax", "jaxlib"):
        return "jax"
    import numpy as np

    if isinstance(array, np.ndarray):
        return "numpy"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return "torch"
    if shared:
        return "dlpack"
    msg = (
        f"input {name!r} is a {type(array).__name__}, not an array. "
        "Fix: pass a NumPy array, a torch or CuPy tensor, or "
        "anything that supports DLPack (a list: np.asarray(x, dtype=...))"
    )
    raise InputError(msg)


def kind_of_feeds(feeds: Mapping[str, Any]) -> Kind:
    """Return the kind in which results go back: the first that is not NumPy, else NumPy."""
    for name, array in feeds.items():
        kind = kind_of(name, array)
        if kind != "numpy":
            return kind
    return "numpy"


def device_of(name: str, array: Any, kind: Kind) -> str:
    """Return ``"cpu"`` or ``"cuda:N"``."""
    if kind == "numpy":
        return "cpu"
    try:
        code, index = array.__dlpack_device__()
        code, index = int(code), int(index)
    except Exception as error:
        msg = (
            f"input {name!r} ({type(array).__name__}) does not say through DLPack where it is: {_told(error)}; {_DENSE}"
        )
        raise InputError(msg) from error
    if code in (_CPU, _CUDA_HOST):
        return "cpu"
    if code in (_CUDA, _CUDA_MANAGED):
        return f"cuda:{index}"
    msg = (
        f"input {name!r} is on DLPack device type {code}, which is neither cpu nor cuda; copy it to the "
        "session's device first"
    )
    raise InputError(msg)


def to_host(name: str, array: Any, kind: Kind) -> np.ndarray[Any, Any]:
    """Return a NumPy view of a CPU array of any framework, without a copy."""
    import numpy as np

    if kind == "numpy":
        return np.asarray(array)
    device = device_of(name, array, kind)
    if device != "cpu":
        msg = f"input {name!r} is on {device}, but this session runs on the CPU; move it first (torch: x.cpu())"
        raise InputError(msg)
    if kind == "tensor":
        view: np.ndarray[Any, Any] = array.numpy()
        return view
    if kind == "torch" and array.requires_grad:
        msg = f"input {name!r} is a torch tensor that requires grad. Fix: pass x.detach()"
        raise InputError(msg)
    try:
        return np.from_dlpack(array)
    except Exception as error:
        what = f"input {name!r} ({type(array).__name__})"
        msg = f"{what} cannot be shared with NumPy through DLPack: {_told(error)}; {_DENSE}"
        raise InputError(msg) from error


def to_tensor(name: str, array: Any, kind: Kind) -> _core.Tensor:
    """Return a tensor on the memory of an array of any framework, of a type that NumPy may not have."""
    from xpuruntime import _core

    device = device_of(name, array, kind)
    if device != "cpu":
        msg = f"input {name!r} is on {device}, but this session runs on the CPU; move it first (torch: x.cpu())"
        raise InputError(msg)
    if kind == "torch" and array.requires_grad:
        msg = f"input {name!r} is a torch tensor that requires grad. Fix: pass x.detach()"
        raise InputError(msg)
    if kind == "numpy":
        try:
            return _core.Tensor.from_numpy(array)
        except UnsupportedOperationError as error:
            raise InputError(f"input {name!r}: {error}") from error
    try:
        return _core.Tensor.from_dlpack(array)
    except Exception as error:
        msg = f"input {name!r} ({type(array).__name__}) cannot be shared: {_told(error)}; {_DENSE}"
        raise InputError(msg) from error


def _has(array: Any, name: str) -> bool:
    try:
        return hasattr(array, name)
    except Exception:  # a property of the caller's
        return False


def _told(error: Exception) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__


def from_host(array: np.ndarray[Any, Any], kind: Kind) -> Any:
    """Return a NumPy result in the caller's kind, without a copy. Strings stay NumPy."""
    if kind in ("numpy", "dlpack", "cupy") or array.dtype == object:
        return array
    if kind == "torch":
        return sys.modules["torch"].from_numpy(array)
    if kind == "jax":
        import importlib

        return importlib.import_module("jax").dlpack.from_dlpack(array)
    from xpuruntime import _core

    return _core.Tensor.from_numpy(array)


def torch_dtype_name(dtype: Any) -> str:
    """Return xpuruntime's name of a ``torch.dtype``."""
    return _TORCH_DTYPES.get(dtype) or _name_torch_dtype(dtype)


def _name_torch_dtype(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    name = {"float8_e4m3fn": "float8e4m3fn", "float8_e5m2": "float8e5m2"}.get(name, name)
    _TORCH_DTYPES[dtype] = name
    return name


def digest_parts(arrays: Mapping[str, np.ndarray[Any, Any]]) -> Iterator[Any]:
    """Yield what a digest of arrays is of: names, types, shapes and values, in the order of the names."""
    import json

    import numpy as np

    for name, array in sorted(arrays.items()):
        yield json.dumps([name, array.dtype.str, array.shape]).encode()
        if array.dtype.hasobject:
            yield repr(array.tolist()).encode()
        elif array.size:
            yield np.ascontiguousarray(array).reshape(-1).view(np.uint8)
