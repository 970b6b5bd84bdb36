# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Run what the documentation shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from docs_blocks import Block, blocks, pages

PAGES = [pytest.param(page, id=str(page.name)) for page in pages()]
PYTHON = [p for p in PAGES if any(b.language == "python" for b in blocks(p.values[0]))]
POLICIES = [
    pytest.param(b, id=str(b))
    for p in pages()
    for b in blocks(p)
    if b.language == "yaml" and "xpuruntime.policy/1" in b.body
]
COMMANDS = [
    pytest.param(b, line, id=f"{b} {line}")
    for page in pages()
    for b in blocks(page)
    if b.language == "console" and b.mark != "not run"
    for line in b.body.splitlines()
    if line.removeprefix("$ ").startswith(("xrt ", "xpuruntime "))
]


def has_cuda() -> bool:
    from xpuruntime.runtime.snapshot import machine_snapshot

    return bool(machine_snapshot().cuda)


@pytest.mark.parametrize("page", PYTHON)
def test_python_blocks_run_in_order(page: Path, reader_folder: Path):
    """One page is one story: names of a block are there in the next."""
    names: dict[str, object] = {"__name__": "__main__"}
    ran = 0
    for block in blocks(page):
        if block.language != "python" or block.mark == "not run":
            continue
        # Line numbers of a traceback are those of the page.
        code = compile("\n" * (block.line - 1) + block.body, str(block.page), "exec")
        if block.mark == "needs" and block.value == "cuda" and not has_cuda():
            continue
        exec(code, names)
        ran += 1
    if not ran:
        pytest.skip(f"{page.name}: its Python blocks need a CUDA device or are marked as not to be run")


@pytest.mark.parametrize(("block", "line"), COMMANDS)
def test_commands_exit_as_shown(block: Block, line: str, reader_folder: Path):
    """A command that names a CUDA device must say so, and exit with 3, on a machine without one."""
    words = shlex.split(line.removeprefix("$ "), comments=True)
    program = Path(sys.executable).with_name(words[0])
    done = subprocess.run([program, *words[1:]], capture_output=True, text=True, check=False, timeout=240)
    allowed = {int(block.value) if block.mark == "exit" and block.value else 0}
    if words[1] == "doctor":  # reports on the machine, which may lack something
        allowed = {0, 3}
    elif "cuda:0" in words and not has_cuda():
        allowed = {3}
        assert "cuda:0" in done.stderr
    assert done.returncode in allowed, f"{line}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("block", POLICIES)
def test_policies_load(block: Block):
    from xpuruntime import Policy

    policy = Policy.loads(block.body, format="yaml")
    assert Policy.loads(policy.dumps(format="yaml"), format="yaml") == policy


def test_both_readmes_show_the_same_commands_and_code():
    english, korean = ([(b.language, re.sub(r"#.*|f\".*\"", "", b.body)) for b in blocks(page)] for page in pages()[:2])
    assert english == korean


def test_each_mark_is_one_we_know():
    wrong = [
        f"{page.name}: <!-- {comment} -->"
        for page in pages()
        for comment in re.findall(r"<!-- (.*?) -->\n+ *```", page.read_text(encoding="utf-8"))
        if not comment.startswith(("needs: cuda", "exit: ", "not run: "))
    ]
    assert not wrong, wrong
