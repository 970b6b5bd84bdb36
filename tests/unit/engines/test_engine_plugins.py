# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Engines of installed packages: the example as pip installs it, and packages with something wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "engine_plugin"

ENGINE = """
from xpuruntime.engines.null import NullEngine


class Mine(NullEngine):
    name = "mine"
    aliases = ("my-engine",)
    automatic = True
"""


def python(*arguments: str, folder: Path, warnings: str = "error") -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, with a folder of packages."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", warnings, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=240)


def write(folder: Path, code: str, *points: str, name: str = "mine", version: str = "1.5") -> Path:
    """Write a package as pip would install it: a module with entry points."""
    facts = folder / f"{name}-{version}.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-package\nVersion: {version}\n")
    lines = "\n".join(points or (f"{name} = {name}_code:Mine",))
    (facts / "entry_points.txt").write_text(f"[xpuruntime.engines]\n{lines}\n")
    (folder / f"{name}_code.py").write_text(code)
    return folder


#: Forks for each folder of packages on its command line, and prints the engines registered there, and warnings.
FORKING = """
import os, sys, warnings
from xpuruntime.engines import default_registry
for folder in map(str.strip, sys.stdin):
    child = os.fork()
    if not child:
        sys.path.insert(0, folder)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = default_registry().names()
            assert default_registry().names() == found
        print(*found)
        for warning in caught:
            print(warning.category.__name__, warning.message)
        sys.exit()
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def names() -> Iterator[Callable[[Path], tuple[list[str], list[str]]]]:
    """Return the engines that are registered where a folder of packages is installed, and the warnings."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env=environment,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None

        def names(folder: Path) -> tuple[list[str], list[str]]:
            process.stdin.write(f"{folder}\n")
            process.stdin.flush()
            lines = []
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                if line.startswith("ended with "):
                    break
            assert lines[-1] == "ended with 0", lines
            return lines[0].split(), lines[1:-1]

        yield names
        process.stdin.close()


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    command += ["--no-build-isolation", "--no-deps", "--target", str(folder), str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder


class TestExample:
    def test_it_passes_its_own_tests_and_the_conformance_suite(self, example: Path):
        tests = str(EXAMPLE / "tests")
        done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", tests, folder=example)
        assert done.returncode == 0, done.stdout + done.stderr
        passed = re.search(r"(\d+) passed", done.stdout)
        assert passed is not None
        assert int(passed[1]) >= 35
        assert "skipped" not in done.stdout

    def test_the_command_line_lists_and_runs_it(self, example: Path):
        main = "from xpuruntime.cli import main; main()"
        listed = python("-c", main, "devices", "--json", folder=example)
        assert '"onnx-reference"' in listed.stdout, listed.stderr
        model = str(ROOT / "src/python/xpuruntime/demo/digits.onnx")
        ran = python("-c", main, "plan", model, "--engine", "onnx-reference", "--json", folder=example)
        assert '"onnx-reference@cpu"' in ran.stdout, ran.stderr

    def test_the_code_of_the_readme_runs(self, example: Path):
        text = (EXAMPLE / "README.md").read_text(encoding="utf-8")
        (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        done = python("-c", code, folder=example)
        assert done.returncode == 0, done.stderr
        assert "policy honoured" in done.stdout

    def test_it_comes_after_the_engines_of_this_package(self, names: Any, example: Path):
        found, said = names(example)
        assert found[0] == "onnxruntime"
        assert found[-1] == "onnx-reference"
        assert said == []


class TestGood:
    @pytest.mark.parametrize(
        "point", ["mine = mine_code:Mine", "mine = mine_code:make", "mine = mine_code:made", "mine = mine_code:one"]
    )
    def test_a_class_a_function_or_an_engine(self, names: Any, tmp_path: Path, point: str):
        code = f"{ENGINE}\ndef make():\n    return Mine\n\ndef made():\n    return Mine()\n\none = Mine()\n"
        found, said = names(write(tmp_path, code, point))
        assert found[-1] == "mine"
        assert said == []

    def test_it_takes_part_in_auto(self, tmp_path: Path):
        code = (
            "import xpuruntime as xrt\n"
            "plan = xrt.plan(xrt.demo_model_path(), policy={'execution': {'device': 'npu', 'fallback': 'mine@cpu'}})\n"
            "print(plan.candidate, [v.candidate for v in plan.verdicts])"
        )
        done = python("-c", code, folder=write(tmp_path, ENGINE))
        assert done.stdout.startswith("mine@cpu ["), done.stderr
        assert "'mine@npu'" in done.stdout

    def test_a_plugin_that_asks_for_the_registry_while_it_loads(self, names: Any, tmp_path: Path):
        code = f"from xpuruntime.engines import default_registry\nassert 'null' in default_registry()\n{ENGINE}"
        assert names(write(tmp_path, code))[0][-1] == "mine"

    def test_sixteen_threads_make_one_registry(self, tmp_path: Path):
        code = """
import threading
from xpuruntime.engines import default_registry
start, found = threading.Barrier(16), []
def work():
    start.wait()
    found.append((id(default_registry()), default_registry().names()))
threads = [threading.Thread(target=work) for _ in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(found), len(set(found)), found[0][1][-1])
"""
        slow = f"import time\ntime.sleep(0.2)\n{ENGINE}"
        done = python("-c", code, folder=write(tmp_path, slow))
        assert done.stdout.split() == ["16", "1", "mine"], done.stderr


BROKEN = [
    ("import nothing_of_that_name", (), "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
    ("raise RuntimeError('no driver')", (), "RuntimeError: no driver"),
    ("def Mine(): raise OSError('no library')", (), "OSError: no library"),
    ("x = 1", (), "AttributeError: module 'mine_code' has no attribute 'Mine'"),
    ("Mine = 3", (), "mine_code:Mine is no engine but of type int; it must be a subclass of xpuruntime.engines.Engine"),
    ("class Mine: pass", (), "mine_code:Mine is no engine but the class Mine;"),
    (
        "from xpuruntime.engines import Engine\nclass Mine(Engine): name = 'mine'",
        (),
        "Mine lacks devices, judge, load, ",
    ),
    (
        ENGINE,
        ("other = mine_code:Mine",),
        "its entry point is called 'other' and the engine 'mine'. Fix: call both the same",
    ),
    (ENGINE.replace('"mine"', '"my engine"'), (), "'my engine' cannot be the name of an engine"),
    (ENGINE.replace('"mine"', '"auto"'), ("auto = mine_code:Mine",), "'auto' cannot be the name of an engine"),
    (
        ENGINE.replace('"mine"', '"onnxruntime"'),
        ("onnxruntime = mine_code:Mine",),
        "engine name 'onnxruntime' is already registered, by xpuruntime.engines.onnxruntime.engine.OnnxRuntimeEngine",
    ),
    (ENGINE.replace('"my-engine"', '"ort"'), (), "engine name 'ort' is already registered, by xpuruntime.engines.onnx"),
]


@pytest.mark.parametrize(("code", "points", "reason"), BROKEN, ids=[reason[:40] for *_, reason in BROKEN])
def test_a_broken_plugin_is_left_out_with_one_warning(
    names: Any, tmp_path: Path, code: str, points: tuple[str, ...], reason: str
):
    write(tmp_path, code, *points)
    write(tmp_path, ENGINE.replace('"mine"', '"zgood"').replace("my-engine", "zgood2"), name="zgood")
    found, said = names(tmp_path)
    assert found[0] == "onnxruntime"
    assert found[-1] == "zgood"
    assert "mine" not in found
    assert len(said) == 1, said
    point = (points or ("mine =",))[0].partition(" ")[0]
    assert said[0].startswith(
        f"XpuRuntimeWarning the engine plugin {point!r} of mine-package 1.5 is left out: {reason}"
    )


def test_two_plugins_of_one_name(names: Any, tmp_path: Path):
    write(tmp_path, ENGINE, "mine = first_code:Mine", name="first")
    write(tmp_path, ENGINE, "mine = second_code:Mine", name="second")
    found, said = names(tmp_path)
    assert found.count("mine") == 1
    assert len(said) == 1
    assert "the engine plugin 'mine' of second-package 1.5 is left out: engine name 'mine' is already" in said[0]
    assert "registered, by first_code.Mine" in said[0]


def test_a_warning_that_is_an_error_leaves_the_others_in(tmp_path: Path):
    write(tmp_path, "raise RuntimeError('no driver')")
    write(tmp_path, ENGINE.replace('"mine"', '"zgood"').replace("my-engine", "zgood2"), name="zgood")
    code = """
from xpuruntime.engines import default_registry
try:
    default_registry()
except UserWarning as warning:
    print(type(warning).__name__)
print(default_registry().names()[-1])
"""
    done = python("-c", code, folder=tmp_path)
    assert done.stdout.split() == ["XpuRuntimeWarning", "zgood"], done.stdout + done.stderr
