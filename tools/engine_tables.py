# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Write the tables of ``docs/engines/index.md`` and ``docs/reference/engine-keys.md`` from what the engines answer.

Facts (devices, formats, extras, compiling) are read from the classes. What becomes of a policy key is what
`judge` answers, on a machine that is stated below and has every engine: planning is pure, so no vendor's package and no
device is needed. ``python tools/engine_tables.py`` writes; ``--check`` only says whether the pages are up to date
(``make lint``). The table of keys needs a core built with CUDA; without one it stays as it is.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from xpuruntime import _core
from xpuruntime.engines.model import ModelInfo, inspect_model, with_shapes
from xpuruntime.engines.quantization import Calibration
from xpuruntime.engines.registry import default_registry
from xpuruntime.errors import XpuRuntimeError
from xpuruntime.planning import PlanRequest, resolve
from xpuruntime.policies import Policy
from xpuruntime.runtime.machine import CpuFacts, CudaFacts, EngineFacts, Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MODELS = ROOT / "tests" / "models"

#: A machine with every engine. Its GPU is one that all of the GPU engines have kernels for.
MACHINE = Machine(
    system="Linux",
    architecture="x86_64",
    python="3.11.7",
    cpu=CpuFacts(name="cpu", cores=8, features=("avx2", "avx512f", "avx512_bf16", "avx512_vnni")),
    cuda=(
        CudaFacts(
            index=0,
            name="a GPU of compute capability 8.9",
            compute_capability=(8, 9),
            total_memory=48 << 30,
            sm_count=142,
            driver_version=(13, 0),
            runtime_version=(13, 0),
            pci_id="0000:01:00.0",
            dtypes=("fp32", "tf32", "fp16", "bf16", "int8"),
        ),
    ),
    core_cuda=True,
    engines={
        "onnxruntime": EngineFacts(
            name="onnxruntime",
            version="1.31.1",
            loadable=True,
            providers=("CUDAExecutionProvider", "CPUExecutionProvider"),
            detail={"wheel": "onnxruntime-gpu 1.31.1", "cuda": "13.0"},
        ),
        "openvino": EngineFacts(name="openvino", version="2026.4.1", loadable=True, providers=("CPU", "GPU", "NPU")),
        "qnn": EngineFacts(
            name="qnn",
            version="2.7.0",
            loadable=True,
            providers=("QNNExecutionProvider",),
            detail={"sdk": "2.51.0", "runs_on": "simulator"},
        ),
        "tensorrt": EngineFacts(
            name="tensorrt",
            version="11.4.0",
            loadable=True,
            providers=("cuda",),
            detail={
                "capabilities": "timing_cache tactic_pinning weight_streaming refit hardware_compatibility tiling "
                "runtime_platform async_allocator",
                "compute_capabilities": "",
            },
        ),
        "tensorrt-rtx": EngineFacts(
            name="tensorrt-rtx",
            version="1.7.1.116",
            loadable=True,
            providers=("cuda",),
            detail={
                "capabilities": "targets runtime_cache graph_strategy kernel_specialization validity weight_streaming "
                "refit tiling runtime_platform async_allocator capturability",
                "compute_capabilities": "7.5 8.0 8.6 8.9 12.0 12.1",
            },
        ),
        "torch": EngineFacts(name="torch", version="2.13.0", loadable=True, providers=("cpu", "cuda")),
        "null": EngineFacts(name="null", version="1", loadable=True, providers=("null",)),
    },
)

#: Title, engine and device of each column.
COLUMNS = (
    ("ONNX Runtime, CPU", "onnxruntime", "cpu"),
    ("ONNX Runtime, CUDA", "onnxruntime", "cuda:0"),
    ("OpenVINO, CPU", "openvino", "cpu"),
    ("QNN, HTP", "qnn", "npu"),
    ("TensorRT", "tensorrt", "cuda:0"),
    ("TensorRT-RTX", "tensorrt-rtx", "cuda:0"),
    ("PyTorch, CPU", "torch", "cpu"),
    ("PyTorch, CUDA", "torch", "cuda:0"),
)
PAGES = {"onnxruntime": "onnxruntime", "openvino": "openvino", "qnn": "qnn", "tensorrt": "tensorrt"}
PAGES |= {"tensorrt-rtx": "tensorrt", "torch": "torch", "null": "null", "onnxruntime-genai": "onnxruntime-genai"}
PAGES |= {"openvino-genai": "openvino-genai"}

#: The models that are planned, with a size for each open dimension: engines that compile for sizes need them.
SIZES = {"encoder.onnx": {"ids": [2, 16]}, "convnet.onnx": {"image": [2, 3, 32, 32]}}
RANGES = {"encoder.onnx": {"ids": ["1..4", "1..16..128"]}}
#: What an engine cannot do without, whatever else is asked.
NEEDED = {"qnn": {"provider_options": {"qnn": {"soc": "sm8650"}}}}
FIXED = ("qnn", "tensorrt", "tensorrt-rtx")

#: Title, key whose control is shown, model, and the policy: of `execution`, of `kernels`, of the whole.
ROWS: tuple[tuple[str, str, str, dict[str, Any], dict[str, Any], dict[str, Any]], ...] = (
    ("`precision: fp32`", "execution.precision", "encoder.onnx", {"precision": "fp32"}, {}, {}),
    ("`precision: tf32`", "execution.precision", "encoder.onnx", {"precision": "tf32"}, {}, {}),
    ("`precision: fp16`", "execution.precision", "encoder.onnx", {"precision": "fp16"}, {}, {}),
    ("`precision: bf16`", "execution.precision", "encoder.onnx", {"precision": "bf16"}, {}, {}),
    ("`precision: int8`, with calibration", "execution.precision", "encoder.onnx", {"precision": "int8"}, {}, {}),
    ("`shapes`, sizes", "execution.shapes.ids", "encoder.onnx", {"shapes": SIZES["encoder.onnx"]}, {}, {}),
    ("`shapes`, ranges", "execution.shapes.ids", "encoder.onnx", {"shapes": RANGES["encoder.onnx"]}, {}, {}),
    ("`artifacts.cache`", "execution.artifacts.cache", "encoder.onnx", {"artifacts": {"cache": "default"}}, {}, {}),
    ("`determinism: run_to_run`", "execution.determinism", "encoder.onnx", {"determinism": "run_to_run"}, {}, {}),
    ("`determinism: concurrency`", "execution.determinism", "encoder.onnx", {"determinism": "concurrency"}, {}, {}),
    ("`cuda_graph: require`", "execution.cuda_graph", "encoder.onnx", {"cuda_graph": "require"}, {}, {}),
    ("`memory.pool: caching`", "execution.memory.pool", "encoder.onnx", {"memory": {"pool": "caching"}}, {}, {}),
    ("`memory.limit`", "execution.memory.limit", "encoder.onnx", {"memory": {"limit": "1GiB"}}, {}, {}),
    ("`threads`", "execution.threads", "encoder.onnx", {"threads": 2}, {}, {}),
    ("`layout: nhwc`", "execution.layout", "convnet.onnx", {"layout": "nhwc"}, {}, {}),
    ("`kernels.matmul`", "kernels.matmul", "encoder.onnx", {}, {"matmul": ["cublas.cublasLt", "cpu.blas"]}, {}),
    (
        "`kernels.attention`, under fp16",
        "kernels.attention",
        "encoder.onnx",
        {"precision": "fp16"},
        {"attention": ["cudnn.sdpa", "cuda_raw.flash_attention_v2", "cpu.reference"]},
        {},
    ),
    ("`kernels.conv`", "kernels.conv", "convnet.onnx", {}, {"conv": ["cudnn.conv_heuristic", "cpu.gemm_conv"]}, {}),
    (
        "`kernels.rules` with `precision: fp32` for nodes, under int8",
        "kernels.rules[0]",
        "encoder.onnx",
        {"precision": "int8"},
        {"rules": [{"match": {"node": "*linear*"}, "precision": "fp32"}]},
        {},
    ),
    ("`accuracy`", "accuracy.rtol", "encoder.onnx", {}, {}, {"accuracy": {"rtol": 1e-2}}),
)


#: Keys whose reasons are shown beside those of `ROWS`.
MORE: tuple[tuple[str, str, str, dict[str, Any], dict[str, Any], dict[str, Any]], ...] = (
    ("`tf32: true`", "execution.tf32", "encoder.onnx", {"tf32": True}, {}, {}),
    ("`allow_cpu_ops`", "execution.allow_cpu_ops", "encoder.onnx", {"allow_cpu_ops": ["Cast"]}, {}, {}),
    (
        "`static_shape: true`",
        "execution.static_shape",
        "encoder.onnx",
        {"static_shape": True, "shapes": SIZES["encoder.onnx"]},
        {},
        {},
    ),
    ("`layout: nchw`", "execution.layout", "convnet.onnx", {"layout": "nchw"}, {}, {}),
    ("`cuda_graph: prefer`", "execution.cuda_graph", "encoder.onnx", {"cuda_graph": "prefer"}, {}, {}),
    ("`memory.pool: driver`", "execution.memory.pool", "encoder.onnx", {"memory": {"pool": "driver"}}, {}, {}),
)


def models() -> dict[str, ModelInfo]:
    """Return what is known of the models, by file name."""
    return {name: inspect_model(MODELS / name) for name in SIZES}


#: Operators of ONNX to what PyTorch calls them.
PYTORCH = {
    "MatMul": "aten.linear",
    "Gemm": "aten.linear",
    "Conv": "aten.conv2d",
    "Softmax": "aten.scaled_dot_product_attention",
    "LayerNormalization": "aten.layer_norm",
}


def as_program(info: ModelInfo) -> ModelInfo:
    """Return what would be known of a model if it were a program of PyTorch."""
    nodes = tuple(msgspec.structs.replace(node, op=PYTORCH.get(node.op, node.op)) for node in info.nodes)
    return msgspec.structs.replace(info, format="pt2", nodes=nodes)


def answer(
    engine: str, device: str, info: ModelInfo, sizes: dict[str, Any], key: str, policy: dict[str, Any]
) -> tuple[str, str]:
    """Return what one engine says of one key: a word, and its reason."""
    if engine in FIXED and "shapes" not in policy["execution"]:
        policy["execution"]["shapes"] = sizes
    policy["execution"] |= {"engine": engine, "device": device, **NEEDED.get(engine, {})}
    if engine == "torch":
        info = as_program(info)
    asked, calibration = Policy.coerce({"mode": "auto", **policy}), None
    info = with_shapes(info, asked)
    if policy["execution"].get("precision") == "int8":
        name, shape = next(iter(sizes.items()))
        calibration = Calibration.of([{name: np.zeros(shape, info.inputs[0].dtype)}], info)
    try:
        plan = resolve(PlanRequest(model=info, calibration=calibration), asked, MACHINE, default_registry().engines())
    except XpuRuntimeError as error:
        rejected = re.search(r"@\S+: \w+: (.*)", str(error))
        return "refused", rejected[1] if rejected else str(error)
    found = plan.control(key)
    if found is None:
        message = f"{engine}@{device} says nothing of {key}: {[c.key for c in plan.controls]}"
        raise AssertionError(message)
    return found.enforceability, f"{found.resolved}: {found.reason}"


def answers(row: tuple[str, str, str, dict[str, Any], dict[str, Any], dict[str, Any]]) -> list[tuple[str, str]]:
    """Return what each column says of one row."""
    _, key, name, execution, kernels, whole = row
    ask = partial(answer, info=inspect_model(MODELS / name), sizes=SIZES[name], key=key)
    return [
        ask(engine, device, policy={"execution": dict(execution), "kernels": kernels, **whole})
        for _, engine, device in COLUMNS
    ]


def keys_table() -> Iterator[str]:
    """Yield the lines of the table of policy keys."""
    yield f"| policy key | {' | '.join(title for title, _, _ in COLUMNS)} |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for row in ROWS:
        yield f"| {row[0]} | {' | '.join(word for word, _ in answers(row))} |"


def reasons_table() -> Iterator[str]:
    """Yield the lines of the table of reasons: each answer once, with the engines that give it."""
    yield "| policy key | engines | answer |"
    yield "|---|---|---|"
    for row in sorted((row for row in (*ROWS, *MORE) if not row[1].startswith("kernels")), key=lambda row: row[0]):
        said: dict[tuple[str, str], list[str]] = {}
        for (column, _, _), words in zip(COLUMNS, answers(row), strict=True):
            said.setdefault(words, []).append(column)
        for (word, reason), columns in said.items():
            text = reason.replace("|", "\\|").removeprefix("-: ")
            yield f"| {row[0]} | {'; '.join(columns)} | {word}: {text} |"


def facts_table() -> Iterator[str]:
    """Yield the lines of the table of facts."""
    yield "| engine | in a policy | devices | models | installed by | `engine: auto` | compiles |"
    yield "|---|---|---|---|---|---|---|"
    for engine in default_registry():
        if engine.name not in PAGES:
            continue
        words = ", ".join(f"`{word}`" for word in (engine.name, *engine.aliases))
        devices = ", ".join(f"`{kind}`" for kind in engine.device_kinds or ()) or "any"
        formats = {"onnx": "ONNX", "pt2": "`.pt2`", "torch": "`nn.Module`", "genai": "a folder"}
        formats |= {"transformers": "a folder of transformers", "openvino-genai": "a folder of OpenVINO"}
        yield (
            f"| [{engine.name}]({PAGES[engine.name]}.md) | {words} | {devices} "
            f"| {', '.join(formats[f] for f in engine.formats)} "
            f"| {f'`xpuruntime[{engine.extra}]`' if engine.extra else 'the core'} "
            f"| {'takes part' if engine.automatic else 'no, must be named'} "
            f"| {'yes' if engine.compiles else 'no'} |"
        )


#: The tables of each page, by name.
TABLES = {
    "engines/index.md": {"facts": facts_table},
    "reference/engine-keys.md": {"keys": keys_table, "reasons": reasons_table},
}


def page(text: str, tables: dict[str, Callable[[], Iterator[str]]]) -> str:
    """Return a page with fresh tables."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{chr(10).join(table())}\n\n{end}{rest.split(end)[1]}"
    return text


def main() -> int:
    """Write or check the pages."""
    check, stale = "--check" in sys.argv[1:], 0
    if missing := [part for part in ("cuda", "cublas", "cudnn") if not _core.build_info()[part]]:
        # Plans for kernels on CUDA need the kernels of every backend.
        print(f"note: keys of kernels left as they are: this core was built without {', '.join(missing)}")
        del TABLES["reference/engine-keys.md"]["keys"]
    for name, tables in TABLES.items():
        text = (DOCS / name).read_text(encoding="utf-8")
        fresh = page(text, tables)
        if fresh == text:
            continue
        if check:
            print(f"error: docs/{name} does not match the code: run python tools/engine_tables.py")
            stale = 1
        else:
            (DOCS / name).write_text(fresh, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main())
