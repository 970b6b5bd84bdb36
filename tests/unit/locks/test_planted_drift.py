# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Drift that is planted: each is caught by name, with the entries that depend on it and what restores it."""

from __future__ import annotations

import ctypes
import json
import operator
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from locked_cases import ENGINES, Case, make_case, validator_of, with_entry, with_ids, with_validator

import xpuruntime as xrt
from xpuruntime.lockfile.records import Identity
from xpuruntime.testing import models

#: Of unchanged opens, by engine; `make test-unchanged` has 200 of each.
REPEATS = {"onnxruntime": 20, "openvino": 5, "torch": 5, "qnn": 1}
#: Of each engine, one that it reads.
VARIABLES = {
    "onnxruntime": "XPURUNTIME_CPU_THREADS", "openvino": "ONEDNN_MAX_CPU_ISA", "torch": "OMP_NUM_THREADS",
    "qnn": "ADSP_LIBRARY_PATH",
}  # fmt: skip
ALL_REPEATS = os.environ.get("XPURUNTIME_UNCHANGED_OPENS")


@pytest.fixture(scope="module", params=ENGINES)
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    pytest.importorskip({"qnn": "onnxruntime_qnn"}.get(request.param, request.param))
    return make_case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def ort(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case("onnxruntime", tmp_path_factory.mktemp("ort"))


def test_locking_twice_gives_the_same_identity(case: Case, tmp_path: Path) -> None:
    again = xrt.lock(case.model, case.policy, tmp_path / "m.lock", shapes={"x": (2, 64)}, **case.options)
    assert again.lock.identity == case.lock.identity
    assert again.lock.digest == case.lock.digest
    before, after = (one.read_bytes().partition(b' "measured"')[0] for one in (case.path, tmp_path / "m.lock"))
    assert before == after


def test_unchanged_opens_are_never_refused(case: Case) -> None:
    """Fewer times where an engine is slow: QNN's simulator compiles each time."""
    with xrt.InferenceSession(case.model, policy=case.policy, **case.options) as plain:
        x = {"x": np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)}
        expected = plain.run(x)
    for _ in range(int(ALL_REPEATS or REPEATS[case.engine])):
        with case.open() as session:
            outputs = session.run(x)
            assert session.plan.policy_source == "lock"
    for name, array in expected.items():
        assert np.array_equal(outputs[name], array)


#: Changes that no result depends on; variables of OpenMP for the engines that do not read them.
HARMLESS = {
    "HOME": "{folder}", "TMPDIR": "{folder}", "LD_LIBRARY_PATH": "{folder}", "PYTHONHASHSEED": "17", "LC_ALL": "C",
    "LANG": "C", "TZ": "Asia/Seoul", "COLUMNS": "40", "MY_VARIABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.arena_max=2",
    "KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE", "ONEDNN_VERBOSE": "0", "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_CUDA_ARCH_LIST": "9.0", "PYTORCH_BUILD_NUMBER": "0",
    "PYTORCH_VERSION": "2.13", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "ONNX_ML": "1",
    "OPENVINO_LIB_PATHS": "{folder}", "ONNX_HOME": "{folder}", "QNN_SDK_ROOT": "{folder}",
    "ORT_DEFAULT_MAX_VLOG_LEVEL": "0", "OV_CPU_INVENTED": "1", "ORT_INVENTED": "1", "TORCH_INVENTED": "1",
    "TBB_NUM_THREADS": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1", "OMP_STACKSIZE": "16M",
    "LD_PRELOAD": "{allocator}",
}  # fmt: skip
OPENMP = {"OMP_NUM_THREADS": "1", "KMP_BLOCKTIME": "0", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
CHECK = """
import json, sys, xpuruntime as xrt
found = xrt.lock(sys.argv[1], output=sys.argv[2], check=True, **json.loads(sys.argv[3]))
print(json.dumps([str(one) for one in (*found.drifts, *found.lacking)]))
"""


#: What a library that is preloaded may replace: an allocator and a clock, or a function that engines compute with.
ALLOCATOR = """
#include <stddef.h>
#include <time.h>
void *__libc_malloc(size_t);
void *malloc(size_t size) { return __libc_malloc(size); }
time_t time(time_t *at) { if (at) *at = 7; return 7; }
"""
EXPONENTIAL = "float expf(float x) { return 1.0f + x; }\ndouble exp(double x) { return 1.0 + x; }\n"


def preload_library(folder: Path, name: str, source: str) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler")
    path = folder / f"lib{name}.so"
    words = [compiler, "-shared", "-fPIC", "-fno-builtin", "-x", "c", "-", "-o", str(path)]
    subprocess.run(words, input=source, text=True, check=True)
    return path


def test_a_preloaded_library_that_replaces_what_an_engine_calls(case: Case, tmp_path: Path) -> None:
    library = preload_library(tmp_path, "exponential", EXPONENTIAL)
    words = [sys.executable, "-W", "ignore", "-c", CHECK, str(case.model), str(case.path), json.dumps(case.options)]
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    found = next(text for text in json.loads(done.stdout.splitlines()[-1]) if text.startswith("environment"))
    assert "LD_PRELOAD nothing, found LD_PRELOAD libexponential.so " in found
    assert "Fix: unset LD_PRELOAD" in found


def test_what_no_result_depends_on_breaks_no_lock(case: Case, tmp_path: Path) -> None:
    """All of it at once, in a process of another folder, whose instrumented run is compared as well."""
    allocator = preload_library(tmp_path, "allocator", ALLOCATOR)
    changes = {name: value.format(folder=tmp_path, allocator=allocator) for name, value in HARMLESS.items()}
    environment = {**os.environ, **changes, **({} if case.engine == "torch" else OPENMP)}
    words = [sys.executable, "-W", "ignore", "-c", CHECK, str(case.model), str(case.path), json.dumps(case.options)]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


ISA = pytest.param("cpu_isa", lambda expect: [*expect, "avx4096"], "avx4096", "same instruction sets", id="isa")
VALIDATORS = [
    pytest.param("library", lambda e: {**e, "build_id": "0" * 40}, "build_id 0000", "pip install", id="library build"),
    pytest.param("library", lambda e: {**e, "size": 1}, "size 1", "pip install", id="library size"),
    pytest.param("engine", lambda e: {**e, "version": "0.9"}, "version 0.9", "pip install", id="engine version"),
    pytest.param("device", lambda e: {**e, "name": "Z80"}, "name Z80", "run on", id="device"),
    pytest.param("device", lambda e: {**e, "cores": 999}, "cores 999", "run on", id="cores"),
    ISA,
    pytest.param("package", lambda _: "0.0.1", "0.0.1", "pip install xpuruntime==0.0.1", id="package"),
    pytest.param("model", lambda e: {**e, "sha256": "0"}, "sha256 0", "restore the file", id="model"),
]


@pytest.mark.parametrize(("kind", "change", "expected", "restore"), VALIDATORS)
def test_validators(case: Case, tmp_path: Path, kind: str, change: Any, expected: str, restore: str) -> None:
    path = case.edited(with_validator(kind, change), tmp_path)
    with pytest.raises(xrt.LockError) as refused:
        case.open(path)
    (drift,) = refused.value.drifts
    validator = validator_of(case.lock.identity, kind)
    assert (drift.code, drift.subject, drift.validator) == (kind, validator.key, validator.id)
    assert expected in drift.before
    assert restore in drift.restore
    assert set(drift.entries) == set(case.lock.identity.dependents().get(validator.id, ()))
    for part in (validator.id, drift.before, drift.after, drift.restore, f"--accept {kind}"):
        assert part in str(refused.value)


def test_kernel_source(ort: Case, tmp_path: Path) -> None:
    path = ort.edited(with_validator("kernel_source", lambda e: {**e, "build_id": "0" * 40}), tmp_path)
    with pytest.raises(xrt.LockError, match=r"kernel_source xpuruntime\._core.*install the build of xpuruntime"):
        ort.open(path)


def test_an_environment_variable(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    name = VARIABLES[case.engine]
    monkeypatch.setenv(name, "7")
    with pytest.raises(xrt.LockError, match=rf"{name} nothing, found {name} 7.*unset {name}"):
        case.open()


KEYS = [
    ({"threads": 2}, "execution.threads"),
    ({"determinism": "run_to_run"}, "execution.determinism"),
    ({"tf32": False}, "execution.tf32"),
]


@pytest.mark.parametrize(("changes", "names"), KEYS)
def test_a_key_of_the_policy(case: Case, changes: dict[str, Any], names: str) -> None:
    policy = {**case.policy, "execution": {**case.policy["execution"], **changes}}
    with pytest.raises(xrt.LockError, match=names) as refused:
        case.open(policy=policy)
    assert [drift.code for drift in refused.value.drifts] == ["policy"]
    assert "or none: the lock has it" in refused.value.drifts[0].restore
    with case.open(policy=case.policy) as session:
        assert session.plan.engine == case.engine


def test_the_plan(case: Case, tmp_path: Path) -> None:
    """Settings such as threads, fusion and placement: a plan that is made now has others."""

    def edit(identity: Identity) -> Identity:
        assert identity.plan is not None
        settings = {**identity.plan.settings, "threads": 64}
        return msgspec.structs.replace(identity, plan=msgspec.structs.replace(identity.plan, settings=settings))

    with pytest.raises(xrt.LockError, match=r"plan settings\.threads: expected 64"):
        case.open(case.edited(edit, tmp_path))


def test_an_output(case: Case, tmp_path: Path) -> None:
    def edit(identity: Identity) -> Identity:
        first = msgspec.structs.replace(identity.outputs[0], sha256="0" * 64)
        return msgspec.structs.replace(identity, outputs=(first,))

    name = case.lock.identity.outputs[0].name
    with pytest.raises(xrt.LockError, match=rf"output {name}: expected sha256 0000") as refused:
        case.open(case.edited(edit, tmp_path))
    blind = [entry.unit for entry in case.lock.identity.entries if entry.known == "unobservable"]
    for suspect in (*blind[:1], "a library whose bytes changed under the same build ID"):
        assert suspect in refused.value.drifts[0].restore


def test_an_output_names_what_else_differs(ort: Case, tmp_path: Path) -> None:
    """Where the lock is compared with one that is made now, its suspects are what differs as well."""

    def edit(identity: Identity) -> Identity:
        first = msgspec.structs.replace(identity.outputs[0], sha256="0" * 64)
        identity = msgspec.structs.replace(identity, outputs=(first,))
        return with_validator("library", lambda e: {**e, "build_id": "0" * 40})(identity)

    lock = xrt.lock(ort.model, output=ort.edited(edit, tmp_path), check=True)
    library, output = lock.drifts
    assert (library.code, output.code) == ("library", "output")
    assert f"library {library.subject} may have changed it" in output.restore


ENTRIES: dict[str, dict[str, Any]] = {
    "placement": {"on": "onnxruntime cuda:0 CUDAExecutionProvider"},
    "precision": {"precision": "fp64"},
    "layout": {"layout": "nchw44"},
    "accumulate": {"accumulate": "fp16"},
    "kernel": {"kernel": "cuda_raw.skinny@64x128"},
}


@pytest.mark.parametrize("code", ENTRIES)
def test_an_entry(case: Case, tmp_path: Path, code: str) -> None:
    entry = next(
        (entry for entry in case.lock.identity.entries if entry.sources and (code != "kernel" or entry.kernel)), None
    )
    if entry is None:  # QNN reports no kernel: the lock says so, and has none that could be another one
        assert all(entry.known == "unobservable" for entry in case.lock.identity.entries)
        return
    path = case.edited(with_entry(lambda one: one.unit == entry.unit, **ENTRIES[code]), tmp_path)
    with case.open(path) as session:
        report = session.explain(runs=1)
    seen = {observation.key: observation for observation in report.observations}["execution.lock"]
    assert seen.status == "substituted"
    assert f"{code} {entry.unit}: expected {ENTRIES[code][{'placement': 'on'}.get(code, code)]}" in seen.reason
    assert not report.honoured


def test_units_that_are_gone_and_new(case: Case, tmp_path: Path) -> None:
    """The lock has a unit that does not run any more, and lacks one that runs."""
    entry = next(entry for entry in case.lock.identity.entries if entry.sources and entry.relation != "folded")

    def without(identity: Identity) -> Identity:
        other = msgspec.structs.replace(entry, unit="another", sources=("another",))
        kept = tuple(one for one in identity.entries if one.unit != entry.unit)
        return msgspec.structs.replace(identity, entries=tuple(sorted((*kept, other), key=lambda one: one.unit)))

    with case.open(case.edited(without, tmp_path)) as session:
        report = session.explain(runs=1)
    seen = {observation.key: observation for observation in report.observations}["execution.lock"]
    assert seen.status == "substituted"
    assert f"gone another: expected {entry.op} on" in seen.reason
    assert f"new {entry.unit}: expected no such unit" in seen.reason


def test_a_library_that_is_not_here(case: Case, tmp_path: Path) -> None:
    def renamed(identity: Identity) -> Identity:
        first = validator_of(identity, "library")
        gone = msgspec.structs.replace(first, key="libgone.so.1", expect={**first.expect, "place": "gone/libgone.so.1"})
        validators = tuple(gone if validator is first else validator for validator in identity.validators)
        return with_ids(msgspec.structs.replace(identity, validators=validators))

    with pytest.raises(
        xrt.LockError, match=r"library libgone\.so\.1: expected build_id .*, found nothing.*pip install"
    ):
        case.open(case.edited(renamed, tmp_path))


def test_a_variable_that_is_not_set_any_more(case: Case, tmp_path: Path) -> None:
    name = VARIABLES[case.engine]
    path = case.edited(with_validator("environment", lambda expect: {**expect, name: "9"}), tmp_path)
    with pytest.raises(xrt.LockError, match=rf"{name} 9, found {name} nothing.*export {name}=9"):
        case.open(path)


#: What code sets of PyTorch in a process, by attribute, to what, and the command that restores it.
SETTINGS = [
    ("backends.mkldnn.enabled", False, r"set torch\.backends\.mkldnn\.enabled = True"),
    ("backends.mkldnn.deterministic", True, r"set torch\.backends\.mkldnn\.deterministic = False"),
    ("backends.mkldnn.matmul.fp32_precision", "bf16", r"matmul\.fp32_precision = 'none'"),
    ("backends.quantized.engine", "onednn", r"set torch\.backends\.quantized\.engine = 'x86'"),
]


@pytest.fixture(scope="module")
def pytorch(tmp_path_factory: pytest.TempPathFactory) -> Case:
    pytest.importorskip("torch")
    return make_case("torch", tmp_path_factory.mktemp("pytorch"))


@pytest.mark.torch
@pytest.mark.parametrize(("name", "value", "restore"), SETTINGS)
def test_a_setting_of_the_process(pytorch: Case, name: str, value: Any, restore: str) -> None:
    import torch

    holder, attribute = operator.attrgetter(name.rpartition(".")[0])(torch), name.rpartition(".")[2]
    before = getattr(holder, attribute)
    setattr(holder, attribute, value)
    try:
        with pytest.raises(xrt.LockError, match=rf"{name} nothing, found torch\.{name} {value}.*{restore}"):
            pytorch.open()
    finally:
        setattr(holder, attribute, before)


#: What code sets by a function of PyTorch, and the call that restores it.
CALLS = [
    ("use_deterministic_algorithms", True, False),
    ("set_default_dtype", "float64", "float32"),
    ("backends.cuda.allow_fp16_bf16_reduction_math_sdp", True, False),
    ("backends.cuda.enable_flash_sdp", False, True),
    ("backends.mha.set_fastpath_enabled", False, True),
    ("backends.nnpack.set_flags", False, True),
]


@pytest.mark.torch
@pytest.mark.parametrize(("name", "value", "usual"), CALLS)
def test_a_setting_by_a_function(pytorch: Case, name: str, value: Any, usual: Any) -> None:
    import torch

    setter = operator.attrgetter(name)(torch)
    new, before = (getattr(torch, at) if isinstance(at, str) else at for at in (value, usual))
    setter(new)
    try:
        with pytest.raises(xrt.LockError, match=rf"found torch\.{name} {new}.*call torch\.{name}\({before}\)"):
            pytorch.open()
    finally:
        setter(before)


SETTINGS_OF_COMPILER = """
import torch._inductor.config as config
from xpuruntime.lockfile.engine_dependencies import setting_text, settings_of
with config.patch({"max_autotune": True, "trace.enabled": True, "cpp.simdlen": 8}):
    found = settings_of("torch", "cuda:0", {}, compiled=True)
    assert found == {"torch._inductor.config.max_autotune": "True", "torch._inductor.config.cpp.simdlen": "8"}, found
    assert setting_text("torch._inductor.config.cpp.simdlen", None) == "set torch._inductor.config.cpp.simdlen = None"
    assert not settings_of("torch", "cuda:0", {})
assert not settings_of("torch", "cuda:0", {}, compiled=True)
"""


@pytest.mark.torch
def test_what_code_sets_of_the_compiler_counts_for_compiled_programs() -> None:
    pytest.importorskip("torch")
    words = [sys.executable, "-W", "ignore", "-c", SETTINGS_OF_COMPILER]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


PATHS_OF_EINSUM = """
import torch
from xpuruntime.lockfile.engine_dependencies import settings_of
assert settings_of("torch", "cuda:0", {}) == {}
torch.backends.opt_einsum.strategy = "greedy"
print(settings_of("torch", "cpu", {}))
torch.backends.opt_einsum.strategy, torch.backends.opt_einsum.enabled = "auto", False
print(settings_of("torch", "cpu", {}))
"""


@pytest.mark.torch
def test_the_order_of_products_in_einsum(tmp_path: Path) -> None:
    """PyTorch asks no package for it but one of this name, so an empty one does."""
    pytest.importorskip("torch")
    (tmp_path / "opt_einsum.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-W", "ignore", "-c", PATHS_OF_EINSUM]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    strategy, enabled = done.stdout.splitlines()
    assert "'torch.backends.opt_einsum.strategy': 'greedy'" in strategy
    assert "'torch.backends.opt_einsum.enabled': 'False'" in enabled
    assert "strategy" not in enabled


@pytest.mark.torch
def test_numbers_near_zero_that_become_zero(case: Case) -> None:
    """On every engine: it is the processor that does it."""
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor keeps numbers near zero")
    try:
        if case.engine == "qnn":  # whose simulator computes in a process of its own
            case.open().close()
            return
        with pytest.raises(xrt.LockError, match=r"call torch\.set_flush_denormal\(False\)"):
            case.open()
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.torch
def test_the_threads_that_a_program_has_set(pytorch: Case, tmp_path: Path) -> None:
    """A lock of an earlier release has no count of them."""
    import torch

    count = torch.get_num_threads()
    older = with_validator("environment", lambda expect: {k: v for k, v in expect.items() if "threads" not in k})
    torch.set_num_threads(count + 1)
    try:
        with pytest.raises(
            xrt.LockError, match=rf"found torch.set_num_threads {count + 1}.*set_num_threads\({count}\)"
        ):
            pytorch.open()
        pytorch.open(pytorch.edited(older, tmp_path)).close()
    finally:
        torch.set_num_threads(count)


def test_a_library_that_another_engine_has_mapped(ort: Case, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai: make engines")
    again = xrt.lock(ort.model, ort.policy, tmp_path / "again.lock", shapes={"x": (2, 64)}, **ort.options)
    libraries = [validator.key for validator in again.lock.identity.validators if validator.kind == "library"]
    assert [name for name in libraries if name.startswith("libonnxruntime.so")] == []


@pytest.mark.torch
def test_a_library_that_another_package_has_brought_for_itself(pytorch: Case, tmp_path: Path) -> None:
    import torch

    (tmp_path / "other.libs").mkdir()
    library = tmp_path / "other.libs" / "libgomp-e985bcbb.so.1"
    shutil.copy(Path(torch.__file__).parent / "lib" / "libgomp.so.1", library)
    ctypes.CDLL(str(library))
    again = xrt.lock(pytorch.model, pytorch.policy, tmp_path / "again.lock", shapes={"x": (2, 64)}, **pytorch.options)
    libraries = {validator.key for validator in again.lock.identity.validators if validator.kind == "library"}
    assert "libgomp.so.1" in libraries
    assert library.name not in libraries


TYPES = [{"shape": (2, 65)}, {"dtype": "float16"}]


@pytest.mark.parametrize("change", TYPES)
def test_an_output_of_another_type_or_shape(case: Case, tmp_path: Path, change: dict[str, Any]) -> None:
    def edit(identity: Identity) -> Identity:
        return msgspec.structs.replace(identity, outputs=(msgspec.structs.replace(identity.outputs[0], **change),))

    (locked,) = case.lock.identity.outputs
    with pytest.raises(xrt.LockError, match=rf"output {locked.name}: expected .*, found {locked.dtype}"):
        case.open(case.edited(edit, tmp_path))


def test_a_fusion(case: Case, tmp_path: Path) -> None:
    entry = next(entry for entry in case.lock.identity.entries if entry.sources)
    sources = (*entry.sources, "another")
    path = case.edited(with_entry(lambda one: one is entry, unit="+".join(sources), sources=sources), tmp_path)
    with case.open(path) as session:
        report = session.explain(runs=1)
    seen = {observation.key: observation for observation in report.observations}["execution.lock"]
    assert f"fusion {'+'.join(sources)}: expected {'+'.join(sources)}, found {entry.unit}" in seen.reason


def test_a_kernel_and_its_configuration_are_replayed(ort: Case, tmp_path: Path) -> None:
    """The lock's kernels are rules of the plan: another one in the lock is another plan."""
    assert [call.kernel for call in ort.lock.identity.calls] == ["cpu.blas", "cpu.blas"]

    def edit(identity: Identity) -> Identity:
        first = msgspec.structs.replace(identity.calls[0], kernel="cpu.reference")
        return msgspec.structs.replace(identity, calls=(first, *identity.calls[1:]))

    with pytest.raises(xrt.LockError, match=r"plan .*cpu\.blas.*cpu\.reference"):
        ort.open(ort.edited(edit, tmp_path))


def copied(case: Case, folder: Path) -> Case:
    model, path = Path(shutil.copy(case.model, folder)), Path(shutil.copy(case.path, folder))
    return Case(case.engine, model, path, case.policy, case.lock, case.options)


def test_a_byte_of_a_weight(ort: Case, tmp_path: Path) -> None:
    other = copied(ort, tmp_path)
    proto = onnx.load(other.model)
    raw = bytearray(proto.graph.initializer[0].raw_data)
    raw[0] ^= 1
    proto.graph.initializer[0].raw_data = bytes(raw)
    onnx.save(proto, other.model)
    with pytest.raises(xrt.LockError, match="expected initializers") as refused:
        other.open()
    (drift,) = refused.value.drifts
    assert drift.code == "model"
    assert "graph" not in drift.before, "the graph is the same"


def test_the_graph(ort: Case, tmp_path: Path) -> None:
    other = copied(ort, tmp_path)
    proto = onnx.load(other.model)
    proto.graph.node[1].op_type = "Sigmoid"
    onnx.save(proto, other.model)
    with pytest.raises(xrt.LockError, match="expected graph") as refused:
        other.open()
    assert "initializers" not in refused.value.drifts[0].before


def test_a_byte_of_external_data(tmp_path: Path) -> None:
    proto = models.mlp()
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    policy = {"execution": {"engine": "onnxruntime", "device": "cpu"}}
    xrt.lock(tmp_path / "m.onnx", policy, tmp_path / "m.lock")
    raw = bytearray((tmp_path / "w.bin").read_bytes())
    raw[5] ^= 1
    (tmp_path / "w.bin").write_bytes(raw)
    os.utime(tmp_path / "w.bin")
    with pytest.raises(xrt.LockError, match=r"external_data w\.bin.*restore w\.bin beside the model"):
        xrt.InferenceSession(tmp_path / "m.onnx", lock=tmp_path / "m.lock")


def test_an_artifact(tmp_path: Path) -> None:
    model = models.save(models.mlp(), tmp_path)
    policy = {"execution": {"engine": "onnxruntime", "device": "cpu"}}
    folder = tmp_path / "m.xrt"
    xrt.compile_model(model, folder, policy=policy)
    lock = xrt.lock(folder, policy, tmp_path / "m.lock")
    assert "artifact" in {validator.kind for validator in lock.lock.identity.validators}
    with xrt.InferenceSession(folder, lock=tmp_path / "m.lock") as session:
        assert session.plan.policy_source == "lock"
    models.save(models.mlp(seed=1), tmp_path)
    xrt.compile_model(model, folder, policy=policy, overwrite=True)
    with pytest.raises(xrt.LockError, match="artifact: expected ") as refused:
        xrt.InferenceSession(folder, lock=tmp_path / "m.lock")
    assert {drift.code for drift in refused.value.drifts} == {"artifact", "model"}


def test_another_model(ort: Case, tmp_path: Path) -> None:
    model = models.save(models.mlp(width=32), tmp_path)
    with pytest.raises(xrt.LockError, match=r"model model\.onnx"):
        xrt.InferenceSession(model, lock=ort.path)


def test_the_page_has_as_many_cases() -> None:
    """`docs/results/planted.md` counts them by engine; what one engine cannot have planted is left out."""
    page = (Path(__file__).resolve().parents[3] / "docs/results/planted.md").read_text(encoding="utf-8")
    rows = [
        line.split("|") for line in page.partition("## Deviations from a lock")[2].splitlines() if line.startswith("| ")
    ]
    counts = [int(row[2]) for row in rows if row[2].strip().isdigit()]
    kernels = len(ENGINES) - 1
    each = [len(VALIDATORS), 3, len(KEYS) + 1, 1 + len(TYPES), len(ENTRIES) - 1, 2]
    planted = [number * len(ENGINES) for number in each]
    planted[4] += kernels
    assert counts == [*planted, len(SETTINGS) + len(CALLS) + len(ENGINES) + 2, sum(REPEATS.values()), len(ENGINES)]
