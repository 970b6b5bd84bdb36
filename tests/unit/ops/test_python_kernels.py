# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels written in Python, through registry, dispatcher and tuning, without a device."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from xpuruntime import _core
from xpuruntime.errors import CudaError, InputError, OutOfMemoryError, UnsupportedOperationError
from xpuruntime.ops.call_context import compile_rules
from xpuruntime.ops.tuning_cache import TuningCache
from xpuruntime.policies import KernelPolicy, Policy

DESC: dict[str, Any] = {
    "op": "matmul",
    "device": "cpu",
    "operands": {
        "a": {"dtype": "float32", "shape": (4, 8)},
        "b": {"dtype": "float32", "shape": (8, 2)},
        "out": {"dtype": "float32", "shape": (4, 2)},
    },
}


class Backend:
    name = "testing_py"
    device_type = "cpu"

    def __init__(self) -> None:
        self.answer: Any = (True, "")

    def available(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def version(self) -> str:
        return "testing 1"


class Kernel:
    op = "matmul"
    description = "for tests"
    limits = "none"
    families = ("cublasLt",)

    def __init__(self, name: str = "one", *, error: Exception | None = None, seconds: float = 0.0) -> None:
        self.id = f"testing_py.{name}"
        self.error = error
        self.seconds = seconds
        self.answer: Any = (True, "")
        self.described: dict[str, Any] = {}
        self.prepared = 0
        self.operands: dict[str, Any] = {}

    def supports(self, desc: dict[str, Any]) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def prepare(self, desc: dict[str, Any], config: str) -> Any:
        self.described = desc
        self.prepared += 1
        if self.error is not None:
            raise self.error

        def run(operands: dict[str, Any], stream: int) -> None:
            self.operands = {name: (x.shape, str(x.dtype)) for name, x in operands.items()}
            time.sleep(self.seconds)

        run.config = config or "default"  # type: ignore[attr-defined]
        return run


@pytest.fixture
def backend() -> Iterator[Backend]:
    yield Backend()
    _core.KernelRegistry.instance().remove("testing_py")


def choose(policy: Policy | KernelPolicy, pin: tuple[str, ...] = (), desc: dict[str, Any] = DESC) -> dict[str, Any]:
    return _core.CallSite(compile_rules(policy), pin=pin).choose(desc)


def verdict(decision: dict[str, Any], name: str) -> dict[str, Any]:
    (results,) = (candidate for candidate in decision["candidates"] if candidate["id"] == name)
    return results


def test_it_is_listed_and_chosen(backend: Backend) -> None:
    kernel = Kernel()
    _core.register_python_kernel(backend, kernel)
    (listed,) = (one for one in _core.KernelRegistry.instance().kernels("matmul") if one["id"] == kernel.id)
    assert listed == {
        "id": "testing_py.one",
        "op": "matmul",
        "backend": "testing_py",
        "device_type": "cpu",
        "description": "for tests",
        "limits": "none",
        "families": ["cublasLt"],
        "automatic": True,
        "available": True,
        "reason": "",
        "version": "testing 1",
    }
    assert "testing_py.one" in _core.KernelRegistry.instance().find("matmul", "cublasLt")
    decision = choose(KernelPolicy(matmul="testing_py.one"))
    assert decision["chosen"] == "testing_py.one"
    assert decision["config"] == "default"
    assert decision["source"] == "pinned"
    assert decision["asked_by"] == "kernels.matmul"
    assert decision["shapes"] == {"a": (4, 8), "b": (8, 2), "out": (4, 2)}
    assert decision["dtype"] == "fp32"
    described = kernel.described
    assert described["operands"]["a"] == {"dtype": "float32", "shape": (4, 8), "strides": (8, 1), "alignment": 256}
    assert described["attributes"]["activation"] == "none"
    assert described["text"] == "matmul fp32 [4, 8] x [8, 2], cpu"
    assert "testing_py.one" in _core.Dispatcher.instance().decisions()[-1]["text"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UnsupportedOperationError("too odd"), UnsupportedOperationError),
        (OutOfMemoryError("no room"), OutOfMemoryError),
        (MemoryError("no room"), OutOfMemoryError),
        (InputError("bad config"), InputError),
        (CudaError("lost", status=700), CudaError),
        (KeyError("a mistake"), KeyError),
    ],
)
def test_what_prepare_raises_is_raised(backend: Backend, error: Exception, kind: type[Exception]) -> None:
    _core.register_python_kernel(backend, Kernel(error=error))
    with pytest.raises(kind) as caught:
        choose(KernelPolicy(), pin=("testing_py.one",))
    assert str(error.args[0]) in str(caught.value)
    if isinstance(error, CudaError):
        assert caught.value.status == 700


@pytest.mark.parametrize(
    ("where", "answer", "said"),
    [
        ("backend", (False, "pip install it"), "pip install it"),
        ("backend", RuntimeError("oops"), "testing_py.available() failed: RuntimeError: oops"),
        ("backend", None, "testing_py.available() answered None instead of (bool, reason)"),
        ("kernel", (False, "m is 3"), "m is 3"),
        ("kernel", (False, ""), "gives no reason"),
        ("kernel", ValueError("oops"), "testing_py.one.supports() failed: ValueError: oops"),
        ("kernel", True, "testing_py.one.supports() answered True instead of (bool, reason)"),
    ],
)
def test_every_no_has_its_reason(backend: Backend, where: str, answer: Any, said: str) -> None:
    kernel = Kernel()
    (backend if where == "backend" else kernel).answer = answer
    _core.register_python_kernel(backend, kernel)
    with pytest.raises(UnsupportedOperationError) as caught:
        choose(Policy(kernels=KernelPolicy(matmul="testing_py.one"), mode="strict"))
    assert said in str(caught.value)
    assert "kernels.matmul" in str(caught.value)


@pytest.mark.parametrize("missing", ["id", "op", "description", "limits", "supports", "prepare"])
def test_a_kernel_that_lacks_something_is_refused(backend: Backend, missing: str) -> None:
    kernel = Kernel()
    bare = {name: getattr(kernel, name) for name in ("id", "op", "description", "limits", "supports", "prepare")}
    del bare[missing]
    with pytest.raises(InputError, match=missing):
        _core.register_python_kernel(backend, type("Bare", (), bare)())


def test_a_backend_that_lacks_something_is_refused() -> None:
    for backend in (object(), type("B", (), {"name": "testing_py", "device_type": "tpu"})()):
        with pytest.raises(InputError):
            _core.register_python_kernel(backend, Kernel())  # type: ignore[arg-type]


def test_names_must_be_ids_of_the_backend_and_new(backend: Backend) -> None:
    other = Kernel()
    other.id = "other.one"
    with pytest.raises(InputError, match=r"other\.one"):
        _core.register_python_kernel(backend, other)
    _core.register_python_kernel(backend, Kernel())
    with pytest.raises(InputError, match="registered already"):
        _core.register_python_kernel(backend, Kernel())


def test_prepare_must_give_something_to_call(backend: Backend) -> None:
    kernel = Kernel()
    kernel.prepare = lambda desc, config: 3  # type: ignore[method-assign]
    _core.register_python_kernel(backend, kernel)
    with pytest.raises(UnsupportedOperationError, match="cannot be called"):
        choose(KernelPolicy(), pin=("testing_py.one",))


def test_sixteen_threads_prepare_once(backend: Backend) -> None:
    kernel = Kernel()
    _core.register_python_kernel(backend, kernel)
    site = _core.CallSite(compile_rules(KernelPolicy(matmul="testing_py.one")))
    start = threading.Barrier(16)
    chosen: list[str] = []

    def work() -> None:
        start.wait()
        chosen.append(site.choose(DESC)["chosen"])

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chosen == ["testing_py.one"] * 16
    assert kernel.prepared == 1


def only_ours(desc: dict[str, Any]) -> dict[str, Any]:
    """An operation that no other kernel on the CPU serves: measured among ours alone."""
    return {**desc, "operands": {name: {**operand, "dtype": "int16"} for name, operand in desc["operands"].items()}}


def test_the_fastest_is_measured_kept_and_found_again(backend: Backend, tmp_path: Path) -> None:
    slow, fast = Kernel("slow", seconds=0.003), Kernel("fast")
    for kernel in (slow, fast):
        _core.register_python_kernel(backend, kernel)
    dispatcher = _core.Dispatcher.instance()
    cache = TuningCache(tmp_path / "tuning.json")
    dispatcher.set_tuning_store(cache)
    policy = KernelPolicy(auto_strategy="best_performance")
    desc = only_ours(DESC)
    try:
        decision = choose(policy, desc=desc)
        assert decision["chosen"] == "testing_py.fast", decision["text"]
        assert decision["source"] == "tuned"
        assert verdict(decision, "testing_py.slow")["measured_us"] >= 3000
        assert verdict(decision, "testing_py.fast")["measured_us"] < 3000
        assert fast.operands == {"a": ((4, 8), "int16"), "b": ((8, 2), "int16"), "out": ((4, 2), "int16")}
        assert decision["notes"] == []
        prepared = slow.prepared

        dispatcher.forget_measurements()  # as in a new process
        decision = choose(policy, desc=desc)
        assert (decision["chosen"], decision["source"]) == ("testing_py.fast", "tuned")
        assert slow.prepared == prepared, "nothing was measured"

        dispatcher.forget_measurements()
        cache.path.write_bytes(cache.path.read_bytes()[:-20])
        decision = choose(policy, desc=desc)
        assert decision["source"] == "tuned"
        assert any("not used" in note for note in decision["notes"])
        assert any("started anew" in note for note in decision["notes"])
    finally:
        dispatcher.set_tuning_store(None)
        dispatcher.forget_measurements()


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        (RuntimeError("find is broken"), "find is broken"),
        (None, "find failed: Unable to cast"),
        ((None, "", 1), "find failed: Unable to cast"),
        (({"times": []}, ""), "find failed: KeyError: 'validators'"),
    ],
    ids=["raises", "no pair", "three values", "no validators"],
)
def test_a_store_that_fails_costs_a_note(backend: Backend, answer: Any, note: str) -> None:
    class Broken:
        def find(self, key: str, validators: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        def put(self, key: str, entry: Any) -> str:
            raise RuntimeError("put is broken")

    for name in ("one", "two"):
        _core.register_python_kernel(backend, Kernel(name))
    dispatcher = _core.Dispatcher.instance()
    with pytest.raises(InputError, match="find"):
        dispatcher.set_tuning_store(object())  # type: ignore[arg-type]
    dispatcher.set_tuning_store(Broken())
    try:
        notes = choose(KernelPolicy(auto_strategy="best_performance"), desc=only_ours(DESC))["notes"]
    finally:
        dispatcher.set_tuning_store(None)
        dispatcher.forget_measurements()
    assert any(note in one for one in notes)
    assert any("put is broken" in note for note in notes)
