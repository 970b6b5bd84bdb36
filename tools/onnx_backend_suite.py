# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Run the test cases of the `onnx` package on an engine, directly and through a session, and keep what came of it.

``python tools/onnx_backend_suite.py onnxruntime openvino`` runs every case on these engines and writes
``docs/results/conformance.json``; ``--report`` writes ``docs/results/conformance.md`` from it; ``--check`` says whether
that page is up to date. Cases run in processes of their own, so that one which ends its process costs only itself.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results" / "conformance.json"
PAGE = ROOT / "docs" / "results" / "conformance.md"
KINDS = ("simple", "pytorch-converted", "pytorch-operator")
PACKAGES = {
    "onnxruntime": ("onnxruntime-gpu", "onnxruntime"),
    "openvino": ("openvino",),
    "qnn": ("onnxruntime-qnn",),
    "tensorrt-rtx": ("tensorrt-rtx-cu13", "tensorrt-rtx"),
}
#: Provider options of a session.
OPTIONS: dict[str, dict[str, Any]] = {"qnn": {"soc": "sm8650"}, "tensorrt-rtx": {"compute_capability": "8.6"}}
#: The device of each engine.
DEVICES = {"qnn": "npu", "tensorrt-rtx": "cuda:0"}
#: Engines whose plans are built and cannot be run on a machine without a GPU.
BUILT_ONLY = ("tensorrt-rtx",)
#: Reasons that fewer cases share are counted together on the page.
_FEW = 5
#: Relative tolerance of results in fp16: the suite allows one unit in the last place, which arithmetic in fp16 exceeds.
_HALF = 2.0**-8
#: Errors by which a session declares that it does not do something; any other is a failure.
DECLARED = ("UnsupportedOperationError", "EngineError", "ModelError", "PolicyError", "InputError")


def cases() -> list[Any]:
    """Return every case of the package, by name: those of single operators, of simple graphs, of exported models."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases
        from onnx.backend.test.loader import load_model_tests

        found = list(collect_testcases(None))
        for kind in KINDS:
            found.extend(load_model_tests(kind=kind))
    return sorted(found, key=lambda case: (case.kind, case.name))


def load(case: Any) -> tuple[Any, list[tuple[list[Any], list[Any]]]]:
    """Return the model of a case and its pairs of inputs and expected outputs."""
    import onnx
    from onnx import numpy_helper

    if case.model is not None:
        model, sets = case.model, case.data_sets
    else:
        folder = Path(case.model_dir)
        model = onnx.load(folder / "model.onnx")
        sets = []
        for data in sorted(folder.glob("test_data_set_*")):
            sets.append(
                (
                    _read(data, "input", [value.type for value in model.graph.input]),
                    _read(data, "output", [value.type for value in model.graph.output]),
                )
            )

    def plain(values: Sequence[Any]) -> list[Any]:
        return [numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v for v in values]

    return model, [(plain(inputs), plain(outputs)) for inputs, outputs in sets]


def _read(folder: Path, role: str, types: Sequence[Any]) -> list[Any]:
    import onnx
    from onnx import numpy_helper

    values = []
    for index in range(len(list(folder.glob(f"{role}_*.pb")))):
        data = (folder / f"{role}_{index}.pb").read_bytes()
        if types[index].WhichOneof("value") == "sequence_type":
            values.append(numpy_helper.to_list(onnx.SequenceProto.FromString(data)))
        else:
            values.append(onnx.TensorProto.FromString(data))
    return values


#: fp32, where OpenVINO would choose another type, also for the operands of compressed weights.
_OPENVINO = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


def directly(engine: str, model: Any) -> Callable[[list[Any]], list[Any]]:
    """Open a model on an engine as its own documentation does, in fp32 where the engine would choose another type."""
    data = model.SerializeToString()
    names = _inputs(model)
    if engine == "onnxruntime":
        import onnxruntime as ort

        ort.set_default_logger_severity(4)
        session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
        return lambda values: list(session.run(None, dict(zip(names, values, strict=False))))
    if engine == "openvino":
        import openvino as ov

        core, bf16 = ov.Core(), np.dtype(ml_dtypes.bfloat16)
        compiled = core.compile_model(core.read_model(data), "CPU", _OPENVINO)
        taken = [port.names for port in compiled.inputs]

        def infer(values: list[Any]) -> list[Any]:
            named = {k: v for k, v in zip(names, values, strict=False) if any(k in port for port in taken)}
            missing = [" or ".join(sorted(port)) for port in taken if not port & named.keys()]
            if missing:  # OpenVINO takes what is in its memory
                raise ValueError(f"the case has no value for {', '.join(missing)}")
            for name, value in named.items():
                if getattr(value, "dtype", None) == bf16:
                    named[name] = ov.Tensor(value.view(np.uint16), value.shape, ov.Type.bf16)
            made = compiled(named).to_tuple()  # by name: a port as a key is never freed, nor its model's threads
            kinds = [port.element_type for port in compiled.outputs]
            return [
                value.view(bf16) if kind == ov.Type.bf16 else value for value, kind in zip(made, kinds, strict=True)
            ]

        return infer
    if engine == "qnn":
        session = _qnn(data)
        return lambda values: list(session.run(None, dict(zip(names, values, strict=False))))
    if engine == "tensorrt-rtx":
        _build_plan(data)
        return lambda _: []
    raise SystemExit(f"no direct way is known for {engine}")


def _qnn(data: bytes) -> Any:
    """Open a model on the simulator of QNN for the chip of `OPTIONS`, without the CPU."""
    import onnxruntime as ort
    import onnxruntime_qnn

    ort.set_default_logger_severity(4)
    devices = [device for device in ort.get_ep_devices() if device.ep_name == "QNNExecutionProvider"]
    if not devices:
        ort.register_execution_provider_library("QNNExecutionProvider", onnxruntime_qnn.get_library_path())
        devices = [device for device in ort.get_ep_devices() if device.ep_name == "QNNExecutionProvider"]
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    chip = {"backend_type": "htp", "soc_model": "57", "htp_arch": "75", "offload_graph_io_quantization": "0"}
    options.add_provider_for_devices(devices[:1], chip)
    return ort.InferenceSession(data, options, enable_fallback=0)


def _build_plan(data: bytes) -> None:
    """Build a plan of TensorRT-RTX for the GPU of `OPTIONS`; it cannot run on a machine without one."""
    import tensorrt_rtx as trt

    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(data):
        raise RuntimeError(str(parser.get_error(0)))
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM86, 0)
    if builder.build_serialized_network(network, config) is None:
        raise RuntimeError("no plan was built")


def _inputs(model: Any) -> list[str]:
    return [value.name for value in model.graph.input]


def through(engine: str, device: str, model: Any, folder: Path) -> Callable[[list[Any]], list[Any]]:
    """Open a model in a session."""
    import xpuruntime as xrt

    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    policy = {"execution": {"provider_options": {engine: OPTIONS[engine]}}} if engine in OPTIONS else None
    if engine in BUILT_ONLY:
        shutil.rmtree(folder / "model.xrt", ignore_errors=True)
        xrt.compile_model(path, folder / "model.xrt", engine=engine, device=device, policy=policy)
        return lambda _: []
    session = xrt.InferenceSession(path, engine=engine, device=device, policy=policy)
    names = _inputs(model)
    outputs = [value.name for value in model.graph.output]

    def run(values: list[Any]) -> list[Any]:
        result = session.run(dict(zip(names, values, strict=False)))
        return [result[name] for name in outputs]

    return run


def outcome(
    opened: Callable[[], Callable[[list[Any]], list[Any]]], sets: list[Any], case: Any, *, built_only: bool
) -> tuple[str, str]:
    """Return ``passed``, ``wrong`` or the name of the error, and its first lines."""
    from onnx.backend.test.runner import Runner

    try:
        run = opened()
        for inputs, expected in sets:
            given = run(inputs)
            if built_only:
                continue
            try:
                half = any(getattr(array, "dtype", None) == np.float16 for array in expected)
                rtol, atol = (max(case.rtol, _HALF), max(case.atol, _HALF / 4)) if half else (case.rtol, case.atol)
                Runner.assert_similar_outputs(expected, given, rtol=rtol, atol=atol)
            except Exception as error:
                return "wrong", _line(error)
    except Exception as error:
        return type(error).__name__, _line(error)
    return "passed", ""


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = re.sub(r"\S*/model\.onnx", "the model", " ".join(lines[:3]))
    return text[:110]


def work(engine: str, device: str, first: int, every: int, out: Path, *, crashed: bool) -> None:
    """Run each `every`th case from `first` on, a line of JSON each; a line without a result names case and side.

    The engine runs by itself only where the session did not pass: what passes there cannot be worse. `crashed`: the
    session ended an earlier process on the first case, and is not tried again.
    """
    warnings.simplefilter("ignore")
    found = cases()
    only = engine in BUILT_ONLY
    with out.open("a", encoding="utf-8") as file, tempfile.TemporaryDirectory() as folder:

        def write(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        for index in range(first, len(found), every):
            case = found[index]
            model, sets = load(case)
            row = {"index": index, "name": case.name, "kind": case.kind, "ours": "crashed", "reason": ""}
            if index > first or not crashed:
                write({"index": index, "side": "ours"})
                ours = partial(through, engine, device, model, Path(folder))
                row["ours"], row["reason"] = outcome(ours, sets, case, built_only=only)
            row["raw"], row["raw_reason"] = "not needed", ""
            if row["ours"] != "passed":
                write({"index": index, "side": "raw", "row": row})
                row["raw"], row["raw_reason"] = outcome(partial(directly, engine, model), sets, case, built_only=only)
            write({"index": index, "row": row})


def run_engine(engine: str, every: int = 1) -> list[dict[str, Any]]:
    """Run the cases, or each `every`th, on an engine, starting again at or behind a case that ended its process."""
    device = DEVICES.get(engine, "cpu")
    rows: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        first, crashed = 0, ""
        while True:
            out.unlink(missing_ok=True)
            command = [sys.executable, __file__, "--work", engine, device, str(first), str(every), str(out), crashed]
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
            lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
            rows.update({line["index"]: line["row"] for line in lines if "side" not in line})
            if done.returncode == 0:
                break
            if not lines or "side" not in lines[-1]:
                raise SystemExit(done.stderr.decode()[-2000:])
            first, crashed = lines[-1]["index"], "crashed"
            if lines[-1]["side"] == "raw":
                raw = {"raw": "crashed", "raw_reason": f"exit {done.returncode}"}
                rows[first] = lines[-1]["row"] | raw
                first, crashed = first + every, ""
    return [rows[index] for index in sorted(rows)]


def version(engine: str) -> str:
    """Return the version of an engine's package."""
    for package in PACKAGES[engine]:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def worse(row: dict[str, Any], engine: str) -> bool:
    """Say whether a case passes on the engine and not through a session.

    Where only plans are built, nobody has seen the numbers: a session may refuse what would silently run in another
    type.
    """
    refused = engine in BUILT_ONLY and row["ours"] in DECLARED
    return row["raw"] == "passed" and row["ours"] != "passed" and not refused


def page(results: dict[str, Any]) -> str:
    """Return the page with one table an engine and a line for each reason."""
    text = [
        "# ONNX conformance of the engines\n",
        "The `onnx` package brings a test suite for backends: models of one operator each, simple graphs, and models",
        "exported from PyTorch, with inputs and expected outputs. Each case runs in an `InferenceSession`. Where it",
        "does not pass, it runs on the engine directly, too. This page is made by",
        "`python tools/onnx_backend_suite.py --report`.\n",
        f"Cases: {results['cases']}, of onnx {results['onnx']}.\n",
        "| engine | passed | declared unsupported | failed | passes on the engine and not in a session |",
        "|---|---|---|---|---|",
    ]
    for engine, result in results["engines"].items():
        left = result["left"]
        counts = Counter(_class(row) for row in left)
        passed, lost = results["cases"] - len(left), sum(worse(row, engine) for row in left)
        name = f"{engine} ({result['version']})"
        text.append(f"| {name} | {passed} | {counts['unsupported']} | {counts['failed']} | {lost} |")
    text += [
        "\n*Declared unsupported*: the session says so, with the reason. *Failed*: it ran and the numbers were not",
        "those of the suite, or it broke; the engine itself does the same where the last column is 0. QNN runs as its",
        "x86-64 simulator for one chip, in fp16. TensorRT-RTX only builds: *passed* means that a plan was built, and",
        "float64, which it would silently compute in float32, is refused.",
    ]
    for engine, result in results["engines"].items():
        text.append(f"\n## {engine}\n")
        groups: dict[tuple[str, str], list[str]] = {}
        for row in result["left"]:
            groups.setdefault((_class(row), _kind(row)), []).append(row["name"])
        if not groups:
            text.append("Every case passes.")
            continue
        text += ["| | cases | reason | such as |", "|---|---|---|---|"]
        for (kind, reason), names in sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1]))):
            if len(names) < _FEW:
                continue
            shown = ", ".join(f"`{name}`" for name in names[:3])
            text.append(f"| {kind} | {len(names)} | {reason.replace('|', '/')} | {shown} |")
        rare = Counter(kind for (kind, _), names in groups.items() if len(names) < _FEW for _ in names)
        if rare:
            kinds = " and ".join(f"{count} {kind}" for kind, count in sorted(rare.items()))
            text.append(f"\nBesides {kinds}, with reasons that fewer than {_FEW} cases share.")
    return "\n".join(text) + "\n"


def _text(results: dict[str, Any]) -> str:
    """Return the results as JSON with one case a line."""
    engines = []
    for engine, result in sorted(results["engines"].items()):
        left = ",\n".join(json.dumps(row, sort_keys=True) for row in result["left"])
        facts = json.dumps({key: result[key] for key in ("device", "version")})[1:-1]
        engines.append(f'{json.dumps(engine)}: {{{facts}, "left": [\n{left}\n]}}')
    facts = json.dumps({key: results[key] for key in ("cases", "onnx")})[1:-1]
    return f'{{{facts}, "engines": {{\n' + ",\n".join(engines) + "\n}}\n"


def _class(row: dict[str, Any]) -> str:
    if row["ours"] == "passed":
        return "passed"
    return "unsupported" if row["ours"] in DECLARED else "failed"


def _kind(row: dict[str, Any]) -> str:
    """Return the reason of a row without what is particular to its model."""
    text = row["reason"] or row["ours"]
    text = re.sub(r"0x[0-9a-f]+|\b\d[\d.e+-]*\b", "N", text)
    text = re.sub(r"'[^']{1,80}'|\"[^\"]{1,80}\"", "'…'", text)
    return text[:110] if row["ours"] != "wrong" else "the numbers differ from the suite's"


def main(arguments: Sequence[str]) -> int:
    """Run, report or check."""
    if arguments[:1] == ["--work"]:
        engine, device, first, every, out, crashed = arguments[1:7]
        work(engine, device, int(first), int(every), Path(out), crashed=crashed == "crashed")
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="*")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args(arguments)
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"engines": {}}
    for engine in given.engines:
        rows = run_engine(engine)
        results["cases"] = len(rows)
        results["onnx"] = importlib.metadata.version("onnx")
        left = [{key: row[key] for key in ("name", "raw", "ours", "reason")} for row in rows if row["ours"] != "passed"]
        results["engines"][engine] = {"version": version(engine), "device": DEVICES.get(engine, "cpu"), "left": left}
        counts = Counter(_class(row) for row in rows)
        print(f"{engine}: {dict(counts)}; worse than the engine: {[r['name'] for r in rows if worse(r, engine)][:20]}")
    if given.engines:
        RESULTS.write_text(_text(results), encoding="utf-8")
    if given.check:
        if PAGE.read_text(encoding="utf-8") != page(results):
            print(f"error: {PAGE.name} does not match {RESULTS.name}: run python tools/onnx_backend_suite.py --report")
            return 1
        return 0
    if given.report or given.engines:
        PAGE.write_text(page(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
