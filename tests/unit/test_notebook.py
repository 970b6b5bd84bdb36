# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Records in Jupyter: `str()` returns the text and prints nothing, and the HTML is escaped tables."""

from __future__ import annotations

import ast
import html.parser
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xpuruntime.notebook import Badge, fragment, fragment_lines, fragment_table, rich_fragment

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "python" / "xpuruntime"
HOSTILE = "<img src=x onerror=alert(1)>'\"&</td></table></div>\x1b[31m\u202e"

#: What a notebook shows: a name, how it is made, and a word that its text and its HTML have.
RECORDS = {
    "report": ("session.explain(runs=1)", "onnxruntime"),
    "plan_": ("session.plan", "candidates"),
    "comparison": ("xrt.compare_engines(model, ['onnxruntime', 'null'], device='cpu', runs=1)", "differs"),
    "changes": ("xrt.compare_reports(report, report)", "nothing moved"),
    "profile_": ("run_profiled()", "device work"),
    "block": ("profiled_block()", "device work"),
    "decided": ("xrt.decisions()", "cpu.reference"),
    "pools": ("memory_report()", "pool"),
    "diagnosis": ("diagnose()", "libraries loaded"),
    "verified": ("xrt.verify(model, {'execution': {'device': 'cpu'}}, only=['accuracy'])", "accuracy"),
    "grades": ("xrt.determinism(model, engine='onnxruntime', device='cpu', grade='run_to_run')", "run_to_run"),
    "diff": ("xrt.compare_environments('report.json', 'report.json')", "nothing differs"),
    "bisected": ("bisected()", "is the last good version"),
    "exported_lock": ("export_of_a_lock()", "execution.device"),
    "conformance": ("conformance()", "metadata"),
    "tuned": ("tuned()", "control"),
    "gates": ("gates()", "next tokens"),
    "generations": ("generations()", "the same bits"),
    "history": ("history()", "abc"),
    "folder_index": ("folder_index()", "odd"),
    "locked": ("xrt.lock(model, {'execution': {'device': 'cpu', 'precision': 'fp16'}})", "1 deviation from the policy"),
}
TORCH_RECORDS = {
    "explanation": ("explained()", "by default"),
    "parity": ("xt.parity(net, exported_session, x)", "results of modules agree"),
    "capture": ("captured()", "step on cpu"),
    "torch_memory": ("xt.memory_report('cpu')", "holder"),
    "exported": ("written", "net.onnx"),
    "tuned_step": ("tuned_step()", "no CUDA graphs"),
    "decoded": ("decoded()", "decode on cpu"),
}
SETUP = """
import numpy as np
import xpuruntime as xrt
from xpuruntime.runtime.doctor import diagnose
from xpuruntime.runtime.memory import memory_report

model = xrt.demo_model_path()
session = xrt.InferenceSession(model, device='cpu', engine='onnxruntime')
feeds = {session.inputs[0].name: xrt.demo_images()[0][:1]}
xrt.ops.matmul(np.ones((2, 3)), np.ones((3, 4)), kernel='cpu.reference')
_ = session.explain(runs=1).save('report.json')

def bisected():
    from xpuruntime.locks.bisect_versions import VersionBisect, VersionVerdict

    versions = tuple(VersionVerdict(version=v, verdict=w, reason='seen') for v, w in (('1', 'good'), ('2', 'bad')))
    return VersionBisect(package='p', good='1', bad='2', model='m.onnx', claim='runs', outcome='found', last_good='1',
                         first_bad='2', versions=versions)

def export_of_a_lock():
    policy = {'execution': {'device': 'cpu', 'engine': 'onnxruntime'}}
    xrt.lock(model, policy, 'digits.lock')
    return xrt.export_lock('digits.lock', 'ort-python', 'native', model=model)

def conformance():
    from xpuruntime.serving.conformance.result import Check, ConformanceResult

    check = Check(transport='rest', name='metadata', outcome='pass', detail='seen')
    return ConformanceResult(url='http://127.0.0.1:1', grpc='', server='s 1', models=('m',), checks=(check,))

def tuned():
    space = {'engine': ['onnxruntime'], 'threads': ['engine'], 'options': {'onnxruntime': {}}, 'kernels': 'off'}
    return xrt.tune(model, inputs='random', spec={'space': space}, budget=5.0)

def gates():
    from xpuruntime.generation.gates import Gate, GateReport

    gate = Gate(name='kl', verdict='pass', observed='0', requested='at most 0.1', reason='')
    return GateReport(gates=(gate,), texts=1, positions=3)

def generations():
    from xpuruntime.generation.gates import GateReport
    from xpuruntime.inference import GenerationComparison

    return GenerationComparison(reference='a', candidate='b', texts='t',
                                gates=GateReport(gates=(), texts=1, positions=3),
                                logprobs=3, bits=True, max_difference=0.0, first='', atol=1e-4)

def history():
    from xpuruntime.locks.history import LockHistory, LockRevision

    return LockHistory(path='m.lock', revisions=(LockRevision(commit='abc', date='2026-01-01', title='first'),))

def folder_index():
    from xpuruntime.locks.folder_index import index_folder

    return index_folder('.')

def profiled_block():
    with xrt.profile(devices=False) as block:
        session.run(feeds)
    return block

def run_profiled():
    return profiled_block().result
"""
TORCH_SETUP = """
import torch
import xpuruntime.pytorch as xt

net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()).eval()
x = torch.randn(2, 8)
written = xt.export(net, (x,), 'net.onnx')
exported_session = xrt.InferenceSession('net.onnx', device='cpu', engine='onnxruntime')

def explained():
    with xt.explain() as found:
        net(x)
    return found

def tuned_step():
    return xt.tune(net, (x,), launches=['eager', 'capture'], kernels={'native': None}, rounds=(7, 7), budget=1.0)

def decoded():
    from xpuruntime.pytorch.generation.captured_decode import DecodeReport

    return DecodeReport(device='cpu', reasons={}, notes=(), graphs=(), captures=0, replays=0, eager_tokens=1,
                        host_reads=1, kv_ranges=(128,), cache_bytes=0)

def captured():
    step = xt.capture_graph(net)
    step(x)
    return step.report
"""


class _Reader(html.parser.HTMLParser):
    """Tags, attributes and text of a fragment; closed tags must match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name.startswith("on") or name in ("src", "href", "style") for name, _ in attrs), (tag, attrs)
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(markup: str) -> _Reader:
    """Return what is in a fragment, after checking that it is whole, styled, and made of harmless tags."""
    reader = _Reader()
    reader.feed(markup)
    reader.close()
    assert not reader.open
    assert markup.startswith("<div class='xrt-report'><style>")
    allowed = {
        "div",
        "style",
        "p",
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "span",
        "b",
        "ul",
        "li",
        "code",
    }
    assert reader.tags <= allowed, reader.tags - allowed
    assert not {"\x1b", "\u202e"} & set(markup)
    return reader


def execute(folder: Path, cells: list[str]) -> list[list[Any]]:
    """Run cells in a kernel of IPython and return the outputs of each."""
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    source, target = folder / "in.ipynb", folder / "out.ipynb"
    nbformat.write(notebook, source)
    code = (
        "import sys, nbformat, nbclient\n"
        "book = nbformat.read(sys.argv[1], 4)\n"
        "nbclient.NotebookClient(book, timeout=200, kernel_name='python3').execute()\n"
        "nbformat.write(book, sys.argv[2])\n"
    )
    kernel = folder / "kernels" / "python3"
    kernel.mkdir(parents=True)
    spec = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps({**spec, "display_name": "python3"}))
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(target)], capture_output=True, text=True, check=False,
        timeout=250, cwd=folder, env={**os.environ, "JUPYTER_PATH": str(folder), "IPYTHONDIR": str(folder / "ipython")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [list(cell.outputs) for cell in nbformat.read(target, 4).cells]


def check_executed(folder: Path, setup: list[str], records: dict[str, tuple[str, str]]) -> None:
    """Make each record in a notebook, turn it to text in one cell, print it in the next, show it in the third."""
    pytest.importorskip("nbclient", reason="a notebook is executed with nbclient")
    pytest.importorskip("ipykernel", reason="a notebook is executed by the kernel of ipykernel")
    cells = list(setup)
    for name, (made, _) in records.items():
        cells += [f"{name} = {made}", f"text = str({name})", "print(text)", name]
    outputs = execute(folder, cells)
    for outcome in outputs[: len(setup)]:
        assert not [one for one in outcome if one.output_type in ("display_data", "execute_result")]
    for index, (name, (_, word)) in enumerate(records.items()):
        at = len(setup) + 4 * index
        _, silent, printed, shown = outputs[at : at + 4]
        assert silent == [], f"str({name}) prints: {silent}"
        text = "".join(one.text for one in printed if one.output_type == "stream")
        assert word in text, f"str({name}) is {text!r}"
        (result,) = (one for one in shown if one.output_type == "execute_result")
        assert word in read(result.data["text/html"]).text, f"the HTML of {name}"
        told = result.data["text/plain"]
        assert "\n" not in told, f"repr({name}) is {told}"
        assert len(told) <= 200, f"repr({name}) is {told}"


def test_a_notebook_shows_every_record(tmp_path: Path):
    check_executed(tmp_path, [SETUP], RECORDS)


@pytest.mark.torch
def test_a_notebook_shows_every_record_of_training(tmp_path: Path):
    pytest.importorskip("torch")
    check_executed(tmp_path, [SETUP, TORCH_SETUP], TORCH_RECORDS)


def records_of_the_source() -> dict[str, set[str]]:
    """Return the methods of each class that shows itself: as rich renderables, or by a text of several lines."""
    records = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
                text = ast.unparse(methods["__str__"]) if "__str__" in methods else ""
                inherited = {ast.unparse(base) for base in node.bases} & {"Shown", "Document", "Page"}
                if node.name != "Shown" and ("__rich__" in methods or "'\\n'.join" in text):
                    name = f"{path.relative_to(SOURCE).with_suffix('')}:{node.name}"
                    records[name] = {*methods, *(("__str__", "_repr_html_") if inherited else ())}
    return records


def test_every_record_with_a_text_has_html():
    records = records_of_the_source()
    assert len(records) >= 13, sorted(records)
    missing = {
        name: {"__str__", "_repr_html_"} - methods
        for name, methods in records.items()
        if not {"__str__", "_repr_html_"} <= methods
    }
    assert not missing


def test_every_record_is_executed_in_a_notebook():
    shown = {
        "Artifact", "CaptureReport", "Comparison", "ConformanceResult", "Decisions", "DecodeReport", "DeterminismTests",
        "DeviceMemoryReport", "Diagnosis", "Diff", "Explanation", "ExportResult", "Exported", "FolderIndex",
        "GateReport", "GenerationComparison", "LockHistory", "LockResult", "MemoryReport", "Parity",
        "Plan", "Profile", "Report", "ReportComparison", "TuneResult", "TunedStep", "VerificationResult",
        "VersionBisect", "profile",
    }  # fmt: skip
    assert {name.rpartition(":")[2] for name in records_of_the_source()} <= shown


def test_consoles_never_write_to_the_cell():
    """A console that believes to be in Jupyter displays what it prints, and leaves its stream empty."""
    consoles = 0
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = getattr(node, "func", None)
            if "Console" in (getattr(called, "id", ""), getattr(called, "attr", "")):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("force_jupyter") == "False", f"{path}:{node.lineno}"
                consoles += 1
    assert consoles >= 1


def test_names_stay_text():
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_column("n", justify="right")
    table.add_row(HOSTILE, Text(HOSTILE, style="bold red"))
    shown = Group(Text(HOSTILE, style="bold green"), HOSTILE, Text.assemble("a", (HOSTILE, "yellow")), table)
    markup = rich_fragment(shown)
    assert read(markup).text.count("onerror=alert(1)") == 7
    parts = (fragment_lines([HOSTILE]), fragment_table(HOSTILE, (">" + HOSTILE,), [(Badge(HOSTILE),), (HOSTILE,)]))
    assert "<img" not in fragment(parts)
    read(fragment((fragment_lines([HOSTILE]), fragment_table(HOSTILE, (HOSTILE,), [(HOSTILE,)]))))


def test_a_record_of_a_model_with_hostile_names(tmp_path: Path):
    import numpy as np
    import onnx
    from onnx import TensorProto, helper

    import xpuruntime as xrt

    name = HOSTILE.replace("\x1b", "").replace("\u202e", "")
    x, y = (helper.make_tensor_value_info(one, TensorProto.FLOAT, [1, 4]) for one in (f"x{name}", f"y{name}"))
    graph = helper.make_graph([helper.make_node("Relu", [x.name], [y.name], name=f"n{name}")], "g", [x], [y])
    path = tmp_path / "hostile.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    with xrt.InferenceSession(path, device="cpu", engine="onnxruntime") as session:
        session.run({x.name: np.ones((1, 4), np.float32)})
        with xrt.profile(devices=False) as block, block.range(name):
            session.run({x.name: np.ones((1, 4), np.float32)})
        report = session.explain(runs=1)
        records = [session.plan, report, xrt.compare_reports(report, report), block]
    records.append(xrt.compare_engines(path, ["onnxruntime", "null"], device="cpu", runs=1, layers=True))
    assert any("onerror" in read(record._repr_html_()).text for record in records)
    assert all(read(record._repr_html_()).text for record in records)


def test_before_there_is_a_result_the_text_says_so():
    import xpuruntime as xrt

    block = xrt.profile()
    assert str(block) == "the profile has no result yet: its block has not ended"
    assert str(block) in repr(block)
    assert "profile" in read(block._repr_html_()).text


@pytest.mark.torch
def test_before_there_is_an_explanation_the_text_says_so():
    pytest.importorskip("torch")
    import xpuruntime.pytorch as xt

    explanation = xt.Explanation()
    assert "nothing yet" in str(explanation)
    assert "nothing yet" in read(explanation._repr_html_()).text
