# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Validators: collected of what a process has mapped, and a drift named for each fact that is another one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

import machines
import msgspec
import numpy as np
import onnxruntime
import pytest

import xpuruntime as xrt
from xpuruntime.lockfile.differences import compare_identities
from xpuruntime.lockfile.drift import ValidatorKind, drift_error, lacking
from xpuruntime.lockfile.engine_dependencies import compiler_packages, libraries_of, variables_of
from xpuruntime.lockfile.records import CallEntry, Identity, LockedModel, UnitEntry, Validator
from xpuruntime.lockfile.validators import Surroundings, collect_validators, compare_validators
from xpuruntime.ops import plugins
from xpuruntime.ops.torch_kernels import forget_torch_kernels
from xpuruntime.runtime.libraries.loading import find_file, library_identity, mapped_libraries, path_in_packages
from xpuruntime.runtime.libraries.search import read_elf
from xpuruntime.runtime.machine import CpuFacts, EngineFacts, Machine

if TYPE_CHECKING:
    from collections.abc import Callable

CUDA = machines.gpu(total_memory=1 << 37, pci_id="0")
MACHINE = machines.machine(
    cpu=CpuFacts(name="AMD EPYC", cores=2, features=("avx2", "avx512f")),
    cuda=(CUDA,),
    engines={"onnxruntime": EngineFacts(name="onnxruntime", version="1.31.1", loadable=True)},
)
MODEL = LockedModel(
    name="m.onnx", format="onnx", sha256="a", graph_sha256="g", initializers_sha256="i", external={"w.bin": "e"}
)
HERE = Surroundings(
    engine="onnxruntime",
    device="cpu",
    machine=MACHINE,
    model=MODEL,
    policy={"execution.threads": "1"},
    calibration={"samples": 2, "ordered": "c", "content": "c"},
    artifact="f",
    environment={
        "ORT_DISABLE_FLASH_ATTENTION": "2",
        "OMP_NUM_THREADS": "2",
        "HOME": "/root",
        "ORT_DISABLE_FLASH_ATTENTIONPI_KEY": "secret",
    },
)


def identity_of(here: Surroundings, kernel: str = "cuda_raw.skinny") -> Identity:
    validators = collect_validators(here, kernels=(kernel,))
    call = CallEntry(op="matmul", dtype="fp32", kernel=kernel)
    entry = UnitEntry(
        unit="fc1",
        op="Gemm",
        relation="exact",
        at="s0",
        on="onnxruntime cpu",
        depends_on=tuple(validator.id for validator in validators),
        known="unobservable",
    )
    return Identity(subject="inference", validators=validators, entries=(entry,), calls=(call,))


def machine(**changes: Any) -> Machine:
    return msgspec.structs.replace(MACHINE, **changes)


def test_nothing_drifts_where_nothing_changed() -> None:
    identity = identity_of(HERE)
    assert not compare_validators(identity, HERE)
    assert identity == identity_of(replace(HERE, mapped=mapped_libraries()))
    kinds = {validator.kind for validator in identity.validators}
    assert kinds == {
        "model", "external_data", "policy", "device", "engine", "library", "kernel_source", "cpu_isa", "environment",
        "package", "calibration", "artifact",
    }  # fmt: skip


def here(base: Surroundings = HERE, **changes: Any) -> Callable[[], tuple[Identity, Surroundings]]:
    """Plant a deviation where the lock is used."""
    return lambda: (identity_of(base), replace(base, **changes))


def lock(kind: str, **facts: Any) -> Callable[[], tuple[Identity, Surroundings]]:
    """Plant a deviation in the lock, of what a process cannot have otherwise."""

    def deviation() -> tuple[Identity, Surroundings]:
        identity = identity_of(HERE)
        first = next(validator for validator in identity.validators if validator.kind == kind)
        other = msgspec.structs.replace(first, expect=facts.get("expect") or {**first.expect, **facts})
        validators = tuple(other if validator is first else validator for validator in identity.validators)
        return msgspec.structs.replace(identity, validators=validators), HERE

    return deviation


class Foreign(plugins.TorchKernel):
    """A kernel of another package, whose adapter and comparison a lock has."""

    id, op = "lock_test.rms_norm", "rms_norm"


@pytest.fixture(autouse=True)
def _foreign():
    plugins.register(plugins.KernelBackend("lock_test", "cpu", "1"), Foreign())
    yield
    forget_torch_kernels("lock_test")
    plugins._sources.pop("lock_test", None)


def foreign(kind: str = "", here: Surroundings = HERE, **facts: str) -> Callable[[], tuple[Identity, Surroundings]]:
    """Plant a deviation where a kernel of another package ran."""

    def deviation() -> tuple[Identity, Surroundings]:
        identity = identity_of(HERE, Foreign.id)
        validators = tuple(
            msgspec.structs.replace(validator, expect={**validator.expect, **facts})
            if validator.kind == kind
            else validator
            for validator in identity.validators
        )
        return msgspec.structs.replace(identity, validators=validators), here

    return deviation


ON_CUDA = replace(HERE, device="cuda:0")
COMPILED = replace(HERE, engine="torch", settings={"mode": "compile"}, environment={"CXX": sys.executable})
GENERATES = replace(
    HERE,
    facts={
        (ValidatorKind.GENERATION, "LlamaForCausalLM"): {"cache": "DynamicCache"},
        (ValidatorKind.TOKENIZER, "tokenizer"): {"chat_template": "c"},
    },
)
CPU, H100 = MACHINE.cpu, msgspec.structs.replace(CUDA, name="NVIDIA H100")
#: By code, and another word where a code has several: what is planted, and what is named as expected and found.
DEVIATIONS: dict[str, tuple[Callable[[], tuple[Identity, Surroundings]], str, str]] = {
    "model": (here(model=msgspec.structs.replace(MODEL, sha256="b", graph_sha256="h")), "graph g", "graph h"),
    "model initializers": (
        here(model=msgspec.structs.replace(MODEL, sha256="b", initializers_sha256="j")),
        "initializers i",
        "initializers j",
    ),
    "external_data": (here(model=msgspec.structs.replace(MODEL, external={"w.bin": "x"})), "e", "x"),
    "policy": (here(policy={"execution.threads": "2"}), "execution.threads 1", "execution.threads 2"),
    "device": (here(machine=machine(cpu=msgspec.structs.replace(CPU, cores=4))), "cores 2", "cores 4"),
    "device cuda": (here(ON_CUDA, machine=machine(cuda=(H100,))), "name NVIDIA H200", "name NVIDIA H100"),
    "driver": (
        here(ON_CUDA, machine=machine(cuda=(msgspec.structs.replace(CUDA, driver_version=(12, 8)),))),
        "cuda 13.0",
        "cuda 12.8",
    ),
    "cpu_isa": (here(machine=machine(cpu=msgspec.structs.replace(CPU, features=("avx2",)))), "avx512f", "1 features"),
    "engine": (here(machine=machine(engines={"onnxruntime": EngineFacts(name="x", version="1.32.0")})), "31", "1.32"),
    "library": (lock("library", build_id="0" * 40), "build_id 0", "build_id "),
    "kernel_source": (lock("kernel_source", build_id="0" * 40), "build_id 0", "build_id "),
    "adapter": (foreign("adapter", code="sha256 0"), "code sha256 0", "code sha256 "),
    "canary": (foreign("canary", cases="sha256 0"), "cases sha256 0", "cases sha256 "),
    "canary off": (
        foreign(here=replace(HERE, environment={**HERE.environment, "XPURUNTIME_CANARY": "off"})),
        "result passed",
        "result not compared",
    ),
    "package": (lock("package", expect="0.9"), "0.9", str(xrt.__version__)),
    "compiler": (here(COMPILED, environment={"CXX": "no-such-compiler"}), "Python 3", "nothing"),
    "environment": (
        here(environment={"ORT_DISABLE_FLASH_ATTENTION": "3", "ORT_QMOE_CPU_QNBIT_GEMM": "1"}),
        "ORT_DISABLE_FLASH_ATTENTION 2, ORT_QMOE_CPU_QNBIT_GEMM",
        "ORT_QMOE_CPU_QNBIT_GEMM 1",
    ),
    "environment gone": (here(environment={}), "ORT_DISABLE_FLASH_ATTENTION 2", "ORT_DISABLE_FLASH_ATTENTION nothing"),
    "environment compiled": (
        here(COMPILED, environment={**COMPILED.environment, "TORCHINDUCTOR_MAX_AUTOTUNE": "1"}),
        "TORCHINDUCTOR_MAX_AUTOTUNE nothing",
        "TORCHINDUCTOR_MAX_AUTOTUNE 1",
    ),
    "calibration": (here(calibration={"samples": 2, "ordered": "d", "content": "c"}), "ordered c", "ordered d"),
    "artifact": (here(artifact=None), "f", "nothing"),
    "generation": (
        here(GENERATES, facts={(ValidatorKind.GENERATION, "LlamaForCausalLM"): {"cache": "StaticCache"}}),
        "cache DynamicCache",
        "cache StaticCache",
    ),
    "tokenizer": (
        here(GENERATES, facts={(ValidatorKind.TOKENIZER, "tokenizer"): {"chat_template": "d"}}),
        "chat_template c",
        "chat_template d",
    ),
}


def test_a_deviation_of_each_kind_is_planted() -> None:
    assert {name.partition(" ")[0] for name in DEVIATIONS} == set(ValidatorKind)


@pytest.mark.parametrize("name", DEVIATIONS)
def test_each_fact_that_changed_is_named(name: str) -> None:
    deviation, expected, found = DEVIATIONS[name]
    if name == "canary":
        pytest.importorskip("torch", reason="needs torch")
    (drift,) = compare_validators(*deviation())
    assert drift.code == name.partition(" ")[0]
    assert expected in drift.before
    assert found in drift.after
    assert drift.entries == ("fc1",)
    assert drift.restore
    text = str(drift_error("m.lock", (drift,)))
    assert f"validator {drift.validator}; entry fc1" in text
    follows = " --accept output" if drift.code in ("model", "external_data") else ""
    assert f"xrt lock MODEL -o m.lock --accept {drift.code}{follows} --why" in text


def test_environment_has_the_commands_that_restore_it() -> None:
    (drift,) = compare_validators(
        identity_of(HERE),
        replace(HERE, environment={"ORT_DISABLE_FLASH_ATTENTION": "3", "ORT_QMOE_CPU_QNBIT_GEMM": "1"}),
    )
    assert drift.restore == "export ORT_DISABLE_FLASH_ATTENTION=2; unset ORT_QMOE_CPU_QNBIT_GEMM"


def test_commands_that_restore_are_quoted_for_a_shell() -> None:
    here = replace(HERE, environment={"ORT_DISABLE_FLASH_ATTENTION": "$(a) b"})
    (drift,) = compare_validators(identity_of(here), replace(here, environment={}))
    assert drift.restore == "export 'ORT_DISABLE_FLASH_ATTENTION=$(a) b'"


@pytest.mark.parametrize(
    ("variables", "kept"),
    [
        ({"PYTORCH_JIT": "1", "TORCHDYNAMO_DISABLE": "0", "TORCH_USE_RTLD_GLOBAL": ""}, set()),
        ({"PYTORCH_JIT": "0", "TORCHDYNAMO_DISABLE": "1"}, {"PYTORCH_JIT", "TORCHDYNAMO_DISABLE"}),
        ({"TORCH_USE_RTLD_GLOBAL": "0"}, {"TORCH_USE_RTLD_GLOBAL"}),  # PyTorch reads "0" as yes
    ],
)
def test_a_variable_at_its_default_is_no_drift(variables: dict[str, str], kept: set[str]) -> None:
    assert variables_of("torch", "cpu", variables).keys() == kept


READ = {
    "openvino": ["OV_CPU_MAX_ISA", "OV_CPU_LEGACY_ATTN", "ONEDNN_MAX_CPU_ISA", "DNNL_DEFAULT_FPMATH_MODE"],
    "onnxruntime": ["ORT_DISABLE_FLASH_ATTENTION", "ORT_MLAS_QKGEMM_S8_APPROX_VNNI"],
    "torch": ["OMP_NUM_THREADS", "OMP_SCHEDULE", "ATEN_CPU_CAPABILITY", "TORCH_MKLDNN_MATMUL_MIN_DIM"],
}
IDLE = {
    "openvino": ["OV_CPU_INVENTED", "TBB_NUM_THREADS", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "OMP_NUM_THREADS"],
    "onnxruntime": ["ORT_INVENTED", "ORT_DISABLE_FLASH_ATTENTIONS", "MLAS_INVENTED", "OMP_NUM_THREADS"],
    "torch": ["TORCH_INVENTED", "OMP_INVENTED", "OMP_STACKSIZE", "TORCHDYNAMO_INVENTED"],
}


@pytest.mark.parametrize("engine", READ)
def test_of_variables_an_engine_is_asked_for_those_that_it_reads(engine: str) -> None:
    pytest.importorskip(engine)
    names = [*READ[engine], *IDLE[engine]]
    assert list(variables_of(engine, "cpu", dict.fromkeys(names, "1"))) == sorted(READ[engine])


def test_a_device_of_cuda_that_is_gone() -> None:
    gone = compare_validators(identity_of(ON_CUDA), replace(ON_CUDA, machine=machine(cuda=())))
    assert [(one.code, one.after) for one in gone] == [("device", "nothing"), ("driver", "nothing")]


def library(identity: Identity) -> Validator:
    return next(validator for validator in identity.validators if validator.kind == "library")


@pytest.mark.parametrize(("name", "value"), [("build_id", "0" * 40), ("size", 1), ("soname", "libother.so")])
def test_another_build_of_a_library(name: str, value: Any) -> None:
    identity = identity_of(HERE)
    one = library(identity)
    other = msgspec.structs.replace(one, expect={**one.expect, name: value})
    edited = tuple(other if validator is one else validator for validator in identity.validators)
    (drift,) = compare_validators(msgspec.structs.replace(identity, validators=edited), HERE)
    assert (drift.code, drift.subject) == ("library", one.key)
    assert drift.before == f"{name} {value}"
    assert re.fullmatch(r"pip install onnxruntime\S*==[\d.]+", drift.restore)


def test_a_library_is_found_before_it_is_mapped() -> None:
    one = library(identity_of(HERE))
    path = find_file(one.key, one.expect["place"], {})
    assert path is not None
    assert library_identity(path)["build_id"] == one.expect["build_id"]
    code = (
        "import sys; from xpuruntime.runtime.libraries.loading import *\n"
        "print(library_identity(find_file(sys.argv[1], sys.argv[2], mapped_libraries()))['build_id'])\n"
        "assert 'onnxruntime' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, one.key, one.expect["place"]], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == one.expect["build_id"], done.stderr


@pytest.mark.skipif(which("readelf") is None, reason="compares with readelf of binutils")
def test_build_ids_are_those_that_readelf_shows() -> None:
    paths = [*mapped_libraries().values()]
    compared = 0
    for path in paths[:40]:
        shown = subprocess.run(["readelf", "-n", path], capture_output=True, text=True, check=False).stdout
        match = re.search(r"Build ID: ([0-9a-f]+)", shown)
        assert read_elf(path).build_id == (match[1] if match else None), path
        compared += match is not None
    assert compared > 5


def expected_of(identity: Identity, kind: str) -> dict[str, Any]:
    return {validator.key: validator.expect for validator in identity.validators if validator.kind == kind}


def test_the_blas_of_the_kernels_that_ran() -> None:
    """Its build, and the variables that choose its code; the number of its threads is not read from them."""
    pytest.importorskip("scipy_openblas32")
    xrt.ops.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32), kernel="cpu.blas")
    here = replace(
        HERE, mapped=mapped_libraries(), environment={"OPENBLAS_CORETYPE": "ZEN", "OPENBLAS_NUM_THREADS": "7"}
    )
    identity = identity_of(here, "cpu.blas")
    name = "libscipy_openblas.so"
    assert expected_of(identity, "library")[name]["build_id"]
    assert expected_of(identity, "environment")["onnxruntime"] == {"OPENBLAS_CORETYPE": "ZEN"}
    assert not compare_validators(identity, replace(here, mapped={})), "found before it is mapped"
    (drift,) = compare_validators(identity, replace(here, environment={}))
    assert drift.restore == "export OPENBLAS_CORETYPE=ZEN"
    other = identity_of(here)
    assert name not in expected_of(other, "library")
    assert expected_of(other, "environment")["onnxruntime"] == {}


@pytest.mark.parametrize(
    ("engine", "device", "names"),
    [
        ("openvino", "cpu", {"libopenvino.so.1", "libopenvino_intel_cpu_plugin.so"}),
        ("openvino", "npu", {"libopenvino.so.1", "libopenvino_intel_cpu_plugin.so", "libopenvino_intel_npu_plugin.so"}),
        ("onnxruntime", "cpu", {"libonnxruntime.so.1"}),
        ("onnxruntime", "cuda:1", {"libonnxruntime.so.1", "libonnxruntime_providers_cuda.so"}),
    ],
)
def test_libraries_of_other_devices_that_a_process_has_mapped(engine: str, device: str, names: set[str]) -> None:
    mapped = [
        "libopenvino.so.1", "libopenvino_intel_cpu_plugin.so", "libopenvino_intel_npu_plugin.so",
        "libopenvino_intel_gpu_plugin.so", "libonnxruntime.so.1", "libonnxruntime_providers_cuda.so",
    ]  # fmt: skip
    assert set(libraries_of(engine, device, dict.fromkeys(mapped, "/x"))) == names


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two processors"
)
def test_processors_that_a_process_may_use() -> None:
    """Fewer are another number of threads, unless the policy states one that fits into both."""
    usable = os.sched_getaffinity(0)
    free, stated = replace(HERE, policy={}), HERE
    own = identity_of(free, "cpu.blas"), identity_of(stated, "cpu.blas")
    identities = identity_of(free), identity_of(stated)
    os.sched_setaffinity(0, {min(usable)})
    try:
        (drift,) = compare_validators(identities[0], free)
        assert (drift.code, drift.before, drift.after) == ("device", f"usable {len(usable)}", "usable 1")
        assert not compare_identities(identities[1], identity_of(stated))
        assert not compare_validators(identities[1], stated)
        for one, here in zip(own, (free, stated), strict=True):  # which have threads of their own
            assert [drift.code for drift in compare_validators(one, here)] == ["device"]
    finally:
        os.sched_setaffinity(0, usable)


def test_what_a_lock_of_an_earlier_release_lacks_is_named_and_refuses_nothing() -> None:
    new = identity_of(HERE)
    first = library(new)

    def older(one: Validator) -> Validator:
        if one.kind == "environment":
            return msgspec.structs.replace(one, expect={**one.expect, "LD_LIBRARY_PATH": "/x", "OMP_NUM_THREADS": "2"})
        if one.kind != "device":
            return one
        return msgspec.structs.replace(
            one, expect={name: one.expect[name] for name in ("architecture", "cores", "name")}
        )

    old = msgspec.structs.replace(
        new, validators=tuple(older(validator) for validator in new.validators if validator is not first)
    )
    assert not compare_validators(old, HERE)
    kept = msgspec.structs.replace(
        new, validators=tuple(validator for validator in new.validators if validator.kind != "environment")
    )
    old = msgspec.structs.replace(
        old, validators=tuple(validator for validator in old.validators if validator.kind != "environment")
    )
    drifts = compare_identities(old, kept)
    assert [(drift.code, drift.subject, lacking(drift)) for drift in drifts] == [
        ("device", "cpu", True),
        ("library", first.key, True),
    ]
    assert "usable" in drifts[0].after
    assert "not in the lock" in str(drifts[1])


@pytest.mark.parametrize(("engine", "packages"), [("openvino", {"onnxruntime", "numpy"}), ("onnxruntime", {"numpy"})])
def test_the_quantizer_and_what_it_computes_with(engine: str, packages: set[str]) -> None:
    """The distribution that quantizes, unless it is that of the engine."""
    facts = {engine: EngineFacts(name=engine, version="1", loadable=True)}
    here = replace(HERE, engine=engine, machine=machine(engines=facts))
    before = expected_of(identity_of(here), "package")
    settings = {"quantize": True, "style": "openvino"} if engine == "openvino" else {"qdq": "ort-cpu"}
    after = expected_of(identity_of(replace(here, settings=settings)), "package")
    assert packages <= {name.removesuffix("-gpu") for name in after if name not in before}


def test_the_compiler_of_a_program_that_is_compiled_when_it_is_loaded(tmp_path: Path) -> None:
    compiler = tmp_path / "my c++"
    compiler.write_text("#!/bin/sh\necho my compiler 1.0\necho more\n")
    compiler.chmod(0o755)
    environment = {"CXX": f"'{compiler}'"}
    here = replace(HERE, engine="torch", settings={"mode": "compile"}, environment=environment)
    identity = identity_of(here)
    assert expected_of(identity, "compiler") == {"CXX": "my compiler 1.0"}
    compiler.write_text("#!/bin/sh\necho my compiler 2.0\n")
    (drift,) = compare_validators(identity, here)
    assert (drift.code, drift.before, drift.after) == ("compiler", "my compiler 1.0", "my compiler 2.0")
    compiler.unlink()
    (drift,) = compare_validators(identity, here)
    assert drift.after == "nothing"
    assert not expected_of(identity_of(replace(here, settings={})), "compiler")


def test_what_compiles_kernels_for_a_gpu() -> None:
    here = replace(HERE, engine="torch", device="cuda:0", settings={"mode": "compile"})
    assert list(expected_of(identity_of(here), "compiler")) == ["CC"]
    assert "triton" in compiler_packages(here.settings, here.device)
    assert not compiler_packages(here.settings, "cpu")


def test_a_place_is_relative_to_the_search_path() -> None:
    assert path_in_packages(str(Path(onnxruntime.__file__).parent / "capi" / "x.so")) == "onnxruntime/capi/x.so"
    assert path_in_packages("/usr/lib/libm.so.6") == "/usr/lib/libm.so.6"
