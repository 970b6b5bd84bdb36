# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Imports go one way, and importing the package is quick and needs no vendor."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from import_graph import ROOT, SOURCE, module_graph, nearest_tests, runtime_imports, syntax_nodes

#: The rooms in order: each may import those before it. `SHARED` is for all; `testing` imports what it tests.
ORDER = (
    "files",
    "policies",
    "runtime",
    "measuring",
    "evidence",
    "generation",
    "lockfile",
    "engines",
    "artifacts",
    "planning",
    "inference",
    "locks",
    "tuning",
    "serving",
    "demo",
    "cli",
)
ALLOWED = {room: set(ORDER[:i]) for i, room in enumerate(ORDER)}
ALLOWED["policies"] = {"files"}
ALLOWED["ops"] = {"files", "policies", "runtime", "measuring", "evidence"}
ALLOWED["lockfile"] |= {"ops"}
ALLOWED["pytorch"] = {"files", "policies", "runtime", "measuring", "evidence", "generation", "lockfile", "ops"}
ALLOWED["distributed"] = {"files", "policies", "runtime", "evidence"}
ALLOWED["engines"] |= {"ops"}
ALLOWED["serving"] -= {"tuning"}
ALLOWED["cli"] |= {"ops"}
ALLOWED["training"] = {"pytorch"}
ALLOWED["testing"] = set(ORDER) - {"cli"} | {"ops", "pytorch"}
ALLOWED["integrations"] = set(ORDER) - {"cli"} | {"ops", "pytorch"}
SHARED = {
    "argument_types",
    "codes",
    "errors",
    "lazy_names",
    "notebook",
    "printable",
    "tables",
    "_core",
    "_version",
}

#: Engines and what they are built on: ONNX Runtime's engine where the vendor builds on ONNX Runtime, and the room of
#: PyTorch, which applies policies to PyTorch's calls.
BUILT_ON = {"qnn": {"onnxruntime"}, "onnxruntime_genai": {"onnxruntime"}, "torch": {"pytorch"}}

VENDORS = {
    "onnxruntime", "onnxruntime_genai", "onnx", "torch", "tensorrt", "openvino", "cupy", "nncf", "ml_dtypes",
    "google.protobuf", "nvidia", "rich", "typer", "click", "yaml", "sklearn", "jsonschema",
}  # fmt: skip


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def imported_by(path: Path) -> list[tuple[int, str]]:
    """Return line and full name of everything a file imports, wherever in the file, except for type checkers only."""
    inside_package = path.relative_to(SOURCE.parent).with_suffix("").parts
    package = inside_package[:-1]
    found = []
    for node in runtime_imports(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        else:
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "xpuruntime":
                found += [(node.lineno, f"xpuruntime.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, module))
    return found


def room_of(path: Path) -> str | None:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else None


def engine_of(path: Path) -> str | None:
    """Return the engine in whose folder a module is."""
    parts = path.relative_to(SOURCE).parts
    return parts[1] if parts[0] == "engines" and len(parts) > 2 else None


def test_every_room_has_a_place_in_the_order():
    rooms = {room for path in modules() if (room := room_of(path))}
    assert rooms, f"no packages under {SOURCE}"
    assert rooms <= ALLOWED.keys(), f"say in this test which rooms {sorted(rooms - ALLOWED.keys())} may import"


def wrong_imports(path: Path) -> list[str]:
    """Return what a file imports of rooms that its own comes before."""
    room = room_of(path)
    wrong = []
    for line, name in imported_by(path):
        parts = name.split(".")
        if parts[0] != "xpuruntime":
            continue
        target = parts[1] if len(parts) > 1 else None
        if room is None or target is None or target == room or target in SHARED:
            continue
        if target in ALLOWED and target not in ALLOWED[room] | BUILT_ON.get(engine_of(path) or "", set()):
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} imports {name}")
    return wrong


def test_imports_go_one_way():
    wrong = [line for path in modules() for line in wrong_imports(path)]
    assert not wrong, "\n".join(wrong)


#: Whose private names this package leaves alone, and what would read the bytecode that runs next.
HOOKED = {"threading", "asyncio", "signal", "uvicorn", "httptools"}
BYTECODE = {"f_lasti", "co_code", "_co_code_adaptive"}


def private_hooks(path: Path) -> list[str]:
    """Return the expressions of a file that use private names of `HOOKED`, or read bytecode."""
    return [
        ast.unparse(node)
        for node in syntax_nodes(path)
        if isinstance(node, ast.Attribute)
        and (node.attr in BYTECODE or (node.attr.startswith("_") and ast.unparse(node).partition(".")[0] in HOOKED))
    ]


def test_no_private_hooks():
    assert {str(path): hooks for path in modules() if (hooks := private_hooks(path))} == {}


def test_the_hook_test_can_fail(tmp_path):
    path = tmp_path / "hooks.py"
    path.write_text(
        "import threading\nthreading._register_atexit(f)\nold = code.co_code[frame.f_lasti]\nthreading.Lock()"
    )
    assert private_hooks(path) == ["threading._register_atexit", "code.co_code", "frame.f_lasti"]


def test_a_connection_replaces_no_private_method_of_uvicorn():
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from xpuruntime.serving.http.connections import Connection

    ours = {name for name in vars(Connection) if name.startswith("_") and not name.startswith("__")}
    assert "_take" in ours
    assert ours.isdisjoint(dir(HttpToolsProtocol))


def import_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or over others (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
            if other in stack:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                cycles.append(sorted(group))

    for name in graph:
        if name not in order:
            visit(name)
    return cycles


def test_no_modules_import_each_other():
    """Also not inside of a room, and not by an import inside of a function; type checkers' imports are left out."""
    graph = module_graph()
    assert len(graph) > 500
    cycles = import_cycles(graph)
    assert not cycles, "\n".join(
        f"{name} imports {', '.join(sorted(graph[name] & set(group)))}" for group in cycles for name in group
    )


def test_the_cycle_test_can_fail(tmp_path):
    source = tmp_path / "src" / "python" / "xpuruntime"
    (source / "policies").mkdir(parents=True)
    (source / "policies" / "__init__.py").write_text("")
    (source / "policies" / "one.py").write_text("from xpuruntime.policies import two\n")
    (source / "policies" / "two.py").write_text("def f():\n    from xpuruntime.policies.three import g\n")
    (source / "policies" / "three.py").write_text("import xpuruntime.policies.one\n")
    (source / "policies" / "four.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from xpuruntime.policies.four import x\n"
    )
    assert import_cycles(module_graph(source)) == [[f"xpuruntime.policies.{name}" for name in ("one", "three", "two")]]


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("errors.py", "test_errors.py"),  # imports the module
        ("locks/relock.py", "cli/test_inputs.py"),  # uses a public name of it
        (
            "engines/onnxruntime/rewriting/norm.py",
            "engines/onnxruntime_engine/test_rewriting_norms.py",
        ),
    ],
)
def test_the_tests_of_a_file_are_those_that_reach_it(file: str, test: str):
    tests = nearest_tests([SOURCE / file])
    assert ROOT / "tests" / "unit" / test in tests
    assert ROOT / "tests" / "docs" / "test_words.py" not in tests


def test_the_direction_test_can_fail(tmp_path, monkeypatch):
    source = tmp_path / "src" / "python" / "xpuruntime"
    (source / "policies").mkdir(parents=True)
    bad = source / "policies" / "bad.py"
    bad.write_text("def f():\n    from xpuruntime.inference import InferenceSession\n")
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", source)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert [line.partition(": ")[2] for line in wrong_imports(bad)] == ["policies imports xpuruntime.inference"]


def run_python(code: str, text: str = "", **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], input=text,
        capture_output=True, text=True, check=False, env={**os.environ, **env}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_vendor_package():
    code = "import sys, json, xpuruntime; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(run_python(code)))
    assert not loaded & VENDORS, f"import xpuruntime also imports {sorted(loaded & VENDORS)}"


def test_import_needs_no_gpu_and_opens_no_cuda_library():
    code = "import xpuruntime; print(open('/proc/self/maps').read())"
    if not Path("/proc/self/maps").exists():
        pytest.skip("this system has no /proc/self/maps to read the loaded libraries from")
    maps = run_python(code, CUDA_VISIBLE_DEVICES="")
    wrong = {
        line.split("/", 1)[1] for line in maps.splitlines() if "/" in line and ".so" in line and "cuda" in line.lower()
    }
    assert not wrong, f"import xpuruntime opens {sorted(wrong)}"


def test_import_starts_no_thread():
    assert run_python("import threading, xpuruntime; print(threading.active_count())").strip() == "1"


#: What a session that is opened and run does not need: other engines, and what compares, tunes, observes and renders.
UNUSED = (
    "artifacts.store", "cli", "engines.native_export", "engines.onnxruntime.compiling",
    "engines.onnxruntime.observing", "engines.onnxruntime.rewriting.graph_edit",
    "engines.onnxruntime.rewriting.loading", "engines.onnxruntime.trial",
    "engines.openvino.controls", "engines.openvino.probing", "engines.precision.conversion",
    "engines.precision.probe", "engines.qnn.controls", "engines.qnn.opening", "engines.quantization.calibration",
    "engines.quantization.quantized", "engines.tensorrt.controls",
    "engines.torch.controls", "evidence.profile", "evidence.render_text", "evidence.report", "inference.intermediates",
    "inference.comparing", "inference.compiling", "inference.explain", "inference.profiling",
    "inference.session_spec", "lockfile", "locks", "measuring", "ops", "pytorch", "serving", "testing", "tuning",
)  # fmt: skip


@pytest.mark.parametrize("engine", ["auto", "onnxruntime"])
def test_a_session_loads_no_more_than_it_runs(engine: str):
    pytest.importorskip("onnxruntime")
    code = (
        "import sys, numpy, xpuruntime as xrt\n"
        f"with xrt.InferenceSession(xrt.demo_model_path(), device='cpu', engine={engine!r}) as session:\n"
        "    session.run({'image': numpy.zeros((1, 1, 8, 8), numpy.float32)})\n"
        "print(*sys.modules)\n"
    )
    loaded = set(run_python(code).split())
    unused = {f"xpuruntime.{name}" for name in UNUSED}
    assert unused <= {".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in modules()} | {
        ".".join(path.parent.relative_to(SOURCE.parent).parts) for path in modules()
    }, "the list names what there is"
    wrong = {one for one in loaded if any(one == name or one.startswith(f"{name}.") for name in unused)}
    assert not wrong, sorted(wrong)
    assert not loaded & {
        "concurrent", "dataclasses", "difflib", "email", "google.protobuf.text_format", "html", "importlib.metadata",
        "json", "logging", "onnx",
        "openvino", "packaging", "queue", "rich", "statistics", "subprocess", "tempfile", "tensorrt", "torch", "typer",
        "yaml",
    }  # fmt: skip
    assert len([name for name in loaded if name.startswith("xpuruntime")]) <= MOST_MODULES


_ENGINES = {"onnxruntime", "onnx", "torch", "openvino", "tensorrt", "tensorrt_rtx", "onnxruntime_qnn", "nncf"}
#: What is done in the order of one process, and what each step does not load.
STEPS: dict[str, dict[str, set[str]]] = {
    "plans and sessions": {
        "import xpuruntime.planning": {*_ENGINES, "xpuruntime._core", "rich", "yaml"},
        "import xpuruntime.engines.model, xpuruntime.engines.qnn, xpuruntime.engines.tensorrt": _ENGINES,
        "from xpuruntime.engines.openvino import OpenVinoEngine, probing\n"
        "probing._accelerator_nodes = lambda: False\n"
        "assert OpenVinoEngine().probe().providers == ('CPU',)": _ENGINES,
        "import xpuruntime as xrt\n"
        "for options in ({'engine': 'onnxruntime'}, {'device': 'cpu'}, {'engine': 'ort', 'device': 'cpu'}):\n"
        "    xrt.InferenceSession(xrt.demo_model_path(), **options).close()": _ENGINES - {"onnxruntime"},
    },
    "reports and servers": {
        "import xpuruntime.evidence": {*_ENGINES, "numpy", "rich", "yaml"},
        "from xpuruntime.runtime.snapshot import machine_snapshot; machine_snapshot()": {
            *_ENGINES, "numpy", "rich", "yaml"
        },
        "import xpuruntime as xrt; xrt.serving.asgi_app\n"
        "from xpuruntime.serving.protocol import grpc_messages, infer_messages": {
            *_ENGINES, "uvicorn", "httptools", "grpc", "google.protobuf", "starlette", "pydantic"
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("process", STEPS)
def test_no_step_loads_what_it_does_not_need(process: str):
    pytest.importorskip("openvino")
    code = (
        "import json, sys\n"
        "for step, unneeded in json.loads(sys.stdin.readline()):\n"
        "    exec(step)\n"
        "    print(*sorted(set(unneeded) & set(sys.modules)))\n"
    )
    steps = json.dumps([(step, sorted(unneeded)) for step, unneeded in STEPS[process].items()])
    loaded = dict(zip(STEPS[process], run_python(code, text=steps).splitlines(), strict=True))
    assert loaded == dict.fromkeys(STEPS[process], "")


def test_a_first_opening_builds_no_schemas_of_onnx(tmp_path: Path):
    """A later one does not even parse the model: it reads its facts from the cache."""
    pytest.importorskip("onnxruntime")
    code = (
        "import xpuruntime as xrt\n"
        "from xpuruntime.engines.model import file\n"
        "xrt.InferenceSession(xrt.demo_model_path(), device='cpu').close()\n"
        "print(*file._PARTS._loaded)\n"
    )
    first, later = (run_python(code, XDG_CACHE_HOME=str(tmp_path)).split() for _ in range(2))
    assert (first, later) == (["onnx.onnx_ml_pb2"], [])


def test_msgspec_comes_without_typing_extensions():
    code = (
        "import sys, xpuruntime\n"
        "assert 'msgspec' in sys.modules and 'typing_extensions' not in sys.modules\n"
        "import typing_extensions, typing, msgspec\n"
        "assert msgspec._utils.Required is typing_extensions.Required is typing.Required\n"
        "class Kind(typing_extensions.TypedDict):\n"
        "    need: int\n"
        "    may: typing_extensions.NotRequired['str']\n"
        "assert msgspec.convert({'need': 1}, Kind) == {'need': 1}\n"
    )
    run_python(code)


#: Modules of this package that opening and running a small model loads; each costs a third of a millisecond.
MOST_MODULES = 126


def test_the_command_line_loads_the_command_that_runs():
    pytest.importorskip("onnxruntime")
    code = (
        "import gc, json, sys\n"
        "from xpuruntime_command import main\n"
        "from xpuruntime.demo import demo_model_path\n"
        "oldest = []\n"
        "gc.callbacks.append(lambda phase, info: oldest.append(phase) if info['generation'] == 2 else None)\n"
        "sys.argv = ['xrt', 'run', str(demo_model_path()), '--device', 'cpu']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "print(json.dumps([sorted(sys.modules), oldest, gc.get_freeze_count()]))\n"
    )
    found, collections, frozen = json.loads(run_python(code).splitlines()[-1])
    loaded = set(found)
    assert not collections, "modules are searched for garbage"
    assert frozen > 10_000
    commands = {name for name in loaded if name.startswith("xpuruntime.cli.commands.")}
    assert commands == {"xpuruntime.cli.commands.run"}
    unused = {"logging", "onnx", "rich", "statistics", "torch", "xpuruntime.evidence.report", "yaml"}
    assert not loaded & {*unused, "xpuruntime.lockfile"}
    if tuple(map(int, version("typer").split(".")[:2])) < (0, 29):  # as pyproject.toml asks for
        assert "pydantic" not in loaded
    assert len([name for name in loaded if name.startswith("xpuruntime")]) <= MOST_MODULES + 20


def test_onnx_can_be_imported_after_its_parts():
    """A session loads two modules of onnx without the package; the package then takes these."""
    code = (
        "import os\n"
        "os.environ['XPURUNTIME_DIGEST_CACHE'] = 'off'\n"  # checked before, the model needs neither
        "import xpuruntime as xrt\n"
        "from xpuruntime.engines.model import file\n"
        "from xpuruntime.engines.registry import read_model\n"
        "read_model(str(xrt.demo_model_path()))\n"
        "import onnx\n"
        "assert onnx.onnx_ml_pb2 is file.onnx_messages() and onnx.onnx_cpp2py_export is file.onnx_checks()\n"
        "model = onnx.load(xrt.demo_model_path())\n"
        "onnx.checker.check_model(model)\n"
        "assert type(model) is file.onnx_messages().ModelProto\n"
        "assert onnx.onnx_cpp2py_export.checker.ValidationError is onnx.checker.ValidationError\n"
        "onnx.shape_inference.infer_shapes(model)\n"
        "from google.protobuf import text_format\n"
        "assert text_format.MessageToString(model) == str(model)\n"
    )
    run_python(code)


def test_engines_import_the_interface_alone():
    """Engines do not import each other, and what several of them need, beside their folders, imports none of them."""
    folders = {path.parent.name for path in (SOURCE / "engines").glob("*/engine.py")}
    assert {"onnxruntime", "openvino", "qnn", "tensorrt", "torch"} <= folders
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((SOURCE / "engines").rglob("*.py"))
        for own in [path.relative_to(SOURCE / "engines").parts[0]]
        for line, name in imported_by(path)
        if name.startswith("xpuruntime.engines.") and name.split(".")[2] in folders - {own} - BUILT_ON.get(own, set())
    ]
    assert not wrong, "\n".join(wrong)


#: What the parts of evidence may use of each other, and the values that are told.
SECTIONS = {"cuda_graphs", "determinism", "memory_over_time", "shape_coverage"}
TOLD = {"records", "difference", "report", "report_comparison", "kernel_records", "documents", *SECTIONS}
EVIDENCE = {
    "metadata": set(),
    "profile": {"kernel_records"},
    "kernel_records": {"records"},
    **{name: {"records", "kernel_records", "documents"} for name in SECTIONS},
    "determinism": {"records", "documents", "render_text"},
    "key_observations": TOLD,
    "report_building": TOLD | {"key_observations"},
    "section_comparing": TOLD,
    "report_comparing": TOLD | {"section_comparing"},
    "render_text": TOLD,
    "page": TOLD | {"render_text"},
}


def test_parts_of_evidence_import_one_way():
    parts = {own: [SOURCE / "evidence" / f"{own}.py", *(SOURCE / "evidence" / own).rglob("*.py")] for own in EVIDENCE}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for own, paths in parts.items()
        for path in filter(Path.exists, paths)
        for line, name in imported_by(path)
        if name == "xpuruntime.evidence"
        or (name.startswith("xpuruntime.evidence.") and name.split(".")[2] not in EVIDENCE[own] | {own})
    ]
    assert not wrong, "\n".join(wrong)
    assert all(any(map(Path.exists, paths)) for paths in parts.values()), "the table names what there is"


def test_one_place_asks_an_engine_for_its_judgement():
    asking = {
        str(path.relative_to(SOURCE))
        for path in modules()
        for node in syntax_nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "judge"
    }
    assert {one for one in asking if not one.startswith("testing")} == {"engines/base.py"}
