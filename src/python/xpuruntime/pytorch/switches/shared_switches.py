# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Switches of PyTorch that several owners share, the precision of fp32 among them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.dispatch.context import CONTEXT

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
    settings = {_get(*pair) == "tf32" for pair in pairs if pair[0] == "cuda"}
    try:
        if switch == "matmul":
            settings.add(torch.get_float32_matmul_precision() != "highest")
        else:
            settings.add(bool(_private_api.cudnn_allow_tf32()))
    except RuntimeError:
        return None
    if True not in settings and any(_get(*pair) in ("tf32", "bf16") for pair in pairs):
        return None
    return settings.pop() if len(settings) == 1 else None


def stored_products() -> Mapping[Any, Any]:
    """Return what is stored for products."""
    products: dict[Any, Any] = _stored(_PRODUCTS)
    products[_MATMUL] = _hidden(_PRODUCTS, "ieee", torch.get_float32_matmul_precision, products)
    return products


def stored_convolutions() -> Mapping[Any, Any]:
    """Return what is stored for convolutions and recurrent layers."""
    convolutions: dict[Any, Any] = _stored(_CONVOLUTIONS)
    # PyTorch reads it where both kernels of cuDNN agree with it, and raises otherwise.
    convolutions[_CUDNN] = _hidden(
        _CONVOLUTIONS[:2], "tf32", _private_api.cudnn_allow_tf32, convolutions, otherwise=False
    )
    return convolutions


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
    stored: dict[Any, str] = {}
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
                    stored[pair] = _STORED.get((value, _get(*pair)), value)
            finally:
                _set(backend, "all", above)
    finally:
        _set(*_ROOT, root)
    return stored


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


_lock = threading.Lock()


class SwitchTakenError(Exception):
    """Somebody else holds a switch at another value."""

    def __init__(self, switch: str, held: Any, wanted: Any) -> None:
        self.switch = switch
        self.held = held
        self.wanted = wanted
        super().__init__(
            f"torch's switch {switch} is one for the whole process, and an open session or a policy holds it at "
            f"{held}, while this one asks for {wanted}"
        )


class Switch(NamedTuple):
    """One of PyTorch's process-wide switches."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    save: Callable[[], Any]
    restore: Callable[[Any, Any], Any]


class SwitchClaim:
    """Switches that somebody holds. They go back to what they were with the last who asked for them.

    One that has been set to another value in the meantime, by the program itself, stays at that value.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def values(self) -> dict[str, Any]:
        """Return the present value of each."""
        return {name: SWITCHES[name].read() for name in self._names}

    def release(self) -> None:
        """Give them back. Idempotent."""
        names, self._names = self._names, ()
        with _lock:
            for name in reversed(names):
                _restore(name)


class _Claim(NamedTuple):
    value: Any
    before: Any
    written: Any
    users: int


def claim(wanted: Mapping[str, Any]) -> SwitchClaim:
    """Set switches, by their names in `SWITCHES`. All or none."""
    taken: list[str] = []
    with _lock:
        try:
            for name, value in wanted.items():
                held = CONTEXT.switch_claims.get(name)
                if held is None:
                    switch = SWITCHES[name]
                    before = switch.save()
                    if switch.read() != value:
                        switch.write(value)
                    CONTEXT.switch_claims[name] = _Claim(value, before, switch.save(), 1)
                elif held.value == value:
                    CONTEXT.switch_claims[name] = held._replace(users=held.users + 1)
                else:
                    raise SwitchTakenError(name, held.value, value)
                taken.append(name)
        except BaseException:
            for name in reversed(taken):
                _restore(name)
            raise
    return SwitchClaim(tuple(taken))


def _restore(name: str) -> None:
    held = CONTEXT.switch_claims.pop(name)
    if held.users > 1:
        CONTEXT.switch_claims[name] = held._replace(users=held.users - 1)
    else:
        SWITCHES[name].restore(held.before, held.written)


def _plain(read: Callable[[], Any], write: Callable[[Any], Any], save: Callable[[], Any] | None = None) -> Switch:
    save = save or read

    def restore(before: Any, written: Any) -> None:
        if save() == written:
            write(before)

    return Switch(read, write, save, restore)


def _fp32(name: str, stored: Callable[[], Any], write: Callable[[bool], Any]) -> Switch:
    def restore(before: Any, written: Any) -> None:
        if before != written:
            put_back(before, written, stored())

    return Switch(lambda: reads(name), write, stored, restore)


def _set_deterministic(value: bool | str) -> None:
    torch.use_deterministic_algorithms(bool(value), warn_only=value == "warn")


def _deterministic() -> bool | str:
    if not torch.are_deterministic_algorithms_enabled():
        return False
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else True


def _set_benchmark(value: bool) -> None:
    torch.backends.cudnn.benchmark = value


def _reduction(name: str) -> Switch:
    matmul = torch.backends.cuda.matmul

    def save() -> Any:
        value = getattr(matmul, name)
        return value if value or not hasattr(matmul, f"{name}_split_k") else (value, getattr(matmul, f"{name}_split_k"))

    def write(value: Any) -> None:
        setattr(matmul, name, value)

    return _plain(lambda: getattr(matmul, name), write, save)


def _set_blas(value: str) -> None:
    torch.backends.cuda.preferred_blas_library(value)


def _blas() -> str:
    return str(torch.backends.cuda.preferred_blas_library().name).lower()


#: Name to switch. The values are bools, but of ``num_threads`` an int, of ``deterministic_algorithms`` a bool or
#: ``"warn"``, and of ``blas_library`` ``"cublas"`` or ``"cublaslt"``.
SWITCHES: dict[str, Switch] = {
    "matmul.allow_tf32": _fp32("matmul", stored_products, set_products),
    "cudnn.allow_tf32": _fp32("cudnn", stored_convolutions, set_convolutions),
    "cudnn.benchmark": _plain(lambda: bool(torch.backends.cudnn.benchmark), _set_benchmark),
    "deterministic_algorithms": _plain(_deterministic, _set_deterministic),
    "num_threads": _plain(lambda: int(torch.get_num_threads()), torch.set_num_threads),
    "matmul.fp16_reduction": _reduction("allow_fp16_reduced_precision_reduction"),
    "matmul.bf16_reduction": _reduction("allow_bf16_reduced_precision_reduction"),
    "matmul.fp16_accumulation": _reduction("allow_fp16_accumulation"),
    "blas_library": _plain(_blas, _set_blas),
    "mha.fastpath": _plain(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
}
