# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Process-wide switches of PyTorch, counted for the sessions and policies that need them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xpuruntime.pytorch.dispatch.context import CONTEXT
from xpuruntime.pytorch.switches import fp32_precision

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["SWITCHES", "SwitchClaim", "SwitchTakenError", "claim"]

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
            fp32_precision.put_back(before, written, stored())

    return Switch(lambda: fp32_precision.reads(name), write, stored, restore)


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
    "matmul.allow_tf32": _fp32("matmul", fp32_precision.stored_products, fp32_precision.set_products),
    "cudnn.allow_tf32": _fp32("cudnn", fp32_precision.stored_convolutions, fp32_precision.set_convolutions),
    "cudnn.benchmark": _plain(lambda: bool(torch.backends.cudnn.benchmark), _set_benchmark),
    "deterministic_algorithms": _plain(_deterministic, _set_deterministic),
    "num_threads": _plain(lambda: int(torch.get_num_threads()), torch.set_num_threads),
    "matmul.fp16_reduction": _reduction("allow_fp16_reduced_precision_reduction"),
    "matmul.bf16_reduction": _reduction("allow_bf16_reduced_precision_reduction"),
    "matmul.fp16_accumulation": _reduction("allow_fp16_accumulation"),
    "blas_library": _plain(_blas, _set_blas),
    "mha.fastpath": _plain(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
}
