# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Installed plugins that exit, print, hang in `repr` or fail in any other way: named, and every command goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import xpuruntime as xrt

_ENGINE = """
from xpuruntime.engines.null import NullEngine
class Mine(NullEngine):
    name = NAME
    aliases = ()
    automatic = True
    formats = frozenset({"onnx"})
"""
#: Module by the name of its plugin; each fails while it is loaded.
FAIL_TO_LOAD = {
    "exits0": "import sys\nsys.exit(0)",
    "exits5": "import sys\nsys.exit(5)",
    "untold": "class E(Exception):\n def __str__(self): return 1 / 0\nraise E",
    "base": "class B(BaseException): pass\nraise B",
    "missing": "import no_such_package_at_all",
    "syntax": "def (",
    "deep": "def f(): f()\nf()",
    "escapes": "raise ValueError('\\x1b]0;owned\\x07')",
    "wrong": "def register(): return 3",
    "hangs": "class R:\n def __repr__(self):\n  while True: pass\n"
    + _ENGINE.replace("NAME", "'hangs'")
    + "\n aliases = (R(),)\n".replace(" aliases", "    aliases")
    + "def register(): return Mine()",
}
#: These load, and fail when they are asked.
FAIL_LATER = {
    "probes": _ENGINE + "    def probe(self): raise SystemExit(7)\ndef register(): return Mine()",
    "probes-none": _ENGINE + "    def probe(self): return None\ndef register(): return Mine()",
    "prints": "print('at import')\n" + _ENGINE + "    def probe(self):\n        print('in probe')\n"
    "        return super().probe()\n    def judge(self, request, machine):\n        print('in judge')\n"
    "        raise ZeroDivisionError('no')\ndef register():\n    print('in register')\n    return Mine()",
    "places": _ENGINE + "    def devices(self, machine): raise MemoryError\ndef register(): return Mine()",
}
KERNELS = {
    "kexits": "import sys\nsys.exit(0)",
    "kprints": "def register(): print('hello')",
    "kuntold": "class E(Exception):\n def __str__(self): raise SystemExit\ndef register(): raise E",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with all of these plugins."""
    folder = tmp_path_factory.mktemp("site")
    points: dict[str, list[str]] = {"xpuruntime.engines": [], "xpuruntime.kernels": []}
    for group, modules in (("xpuruntime.engines", {**FAIL_TO_LOAD, **FAIL_LATER}), ("xpuruntime.kernels", KERNELS)):
        for name, code in modules.items():
            module = f"plugin_{name.replace('-', '_')}"
            (folder / f"{module}.py").write_text(code.replace("NAME", repr(name)) + "\n")
            points[group].append(f"{name} = {module}:register")
    package = folder / "evil-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "\n".join(f"[{group}]\n" + "\n".join(lines) for group, lines in points.items()) + "\n"
    )
    return folder


def command(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    found = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", "from xpuruntime.cli.entry import main; main()", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": found, "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=120,
        check=False,
    )


def test_doctor_names_each(site: Path) -> None:
    done = command(site, "doctor", "--json")
    document = json.loads(done.stdout)
    told = [finding["what"] for finding in document["findings"] if finding["code"] == "plugin_failed"]
    for name in (*FAIL_TO_LOAD, "kexits", "kuntold"):
        assert sum(repr(name) in sentence for sentence in told) == 1, (name, told)
    broken = [finding["what"] for finding in document["findings"] if finding["code"] == "engine_broken"]
    assert all(any(what.startswith(name + " ") for what in broken) for name in ("probes", "probes-none"))
    assert "\x1b" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_devices(site: Path) -> None:
    done = command(site, "devices", "--json")
    assert done.returncode == 0
    engines = json.loads(done.stdout)["engines"]
    assert engines["null"]["loadable"]
    assert "SystemExit" in engines["probes"]["reason"] or "exits" in engines["probes"]["reason"]
    assert not engines["probes"]["loadable"]
    assert "evil 1.0 is left out" in done.stderr


def test_plan_says_which_is_broken_and_goes_on(site: Path) -> None:
    model = str(xrt.demo_model_path())
    done = command(site, "plan", model, "--json", "--device", "cpu", "--engine", "prints,places,null")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["engine"] in ("places", "null")
    verdicts = {verdict["candidate"]: verdict for verdict in plan["verdicts"]}
    assert verdicts["prints@cpu"]["code"] == "engine_broken"
    assert "ZeroDivisionError: no" in verdicts["prints@cpu"]["reason"]
    assert "in judge" in done.stderr


@pytest.mark.parametrize("line", ["kernels --json", "run MODEL --json --device cpu --engine null", "policy schema"])
def test_other_commands_go_on(site: Path, line: str) -> None:
    words = [str(xrt.demo_model_path()) if word == "MODEL" else word for word in line.split()]
    done = command(site, *words)
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_doctor_outlives_a_library_that_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xpuruntime.cli import diagnosing
    from xpuruntime.engines import registry

    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    few = registry.default_registry().engines()
    monkeypatch.setattr(registry.EngineRegistry, "engines", lambda _: {"null": few["null"]})  # one probe is enough
    diagnosis = diagnosing.diagnosis_apart()
    assert diagnosis.facts.machine.engines["null"].loadable
    [broken] = [finding for finding in diagnosis.findings if finding.code == "engine_broken"]
    assert broken.what.startswith("torch ")
    assert broken.why == "importing torch ends the process by SIGSEGV"
    assert not diagnosis.healthy
