# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Run what the documentation shows."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from docs_blocks import NEEDS, ROOT, Block, blocks, not_printed, pages

from xpuruntime.cli.entry import run


def lines_of(block: Block) -> list[str]:
    """Return the commands of ours in a block."""
    lines = [line.removeprefix("$ ") for line in block.body.splitlines()]
    return [line for line in lines if line.startswith(("xrt ", "xpuruntime "))]


TRANSLATED = sorted(page.name for page in (ROOT / "docs" / "ko").glob("*.md") if (ROOT / "docs" / page.name).is_file())
# What a translated page shows runs on the page that it is a translation of: a test compares their code.
RUN = [page for page in pages() if page.parent.name != "ko" or page.name not in TRANSLATED]
PAGES = [pytest.param(page, id=str(page.name)) for page in RUN]
PYTHON = [p for p in PAGES if any(b.language == "python" for b in blocks(p.values[0]))]
POLICIES = [
    pytest.param(b, id=str(b))
    for p in pages()
    for b in blocks(p)
    if b.language == "yaml" and "xpuruntime.policy/1" in b.body
]
COMMANDS = [
    pytest.param(b, id=f"{b} {lines_of(b)[0]}")
    for page in RUN
    for b in blocks(page)
    if b.language == "console" and "not run" not in b.marks and lines_of(b)
]


@pytest.mark.parametrize("page", PYTHON)
def test_python_blocks_run_in_order(page: Path, reader_folder: Path, subtests: pytest.Subtests):
    """One page is one story: names of a block are there in the next. What is left out is a skip of its own."""
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language != "python" or "not run" in block.marks:
            continue
        # Line numbers of a traceback are those of the page.
        code = compile("\n" * (block.line - 1) + block.body, str(block.page), "exec")
        if missing := block.missing():
            with subtests.test(str(block)):
                pytest.skip(f"{block}: {', '.join(missing)}")
        else:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, names)
            assert not not_printed(block.shown, printed.getvalue()), f"{block}\n{printed.getvalue()}"


@pytest.mark.parametrize("block", COMMANDS)
def test_commands_exit_as_shown(block: Block, reader_folder: Path, capfd: pytest.CaptureFixture[str]):
    """The lines of one block run in order, in one folder; an exit code is that of the last line.

    In this process, since the start of one takes longer than most commands; README's are run as programs, too.

    A command that names a CUDA device must say so, and exit with 3, on a machine without one; a plan for another
    machine (``--machine``) needs none.
    """
    if missing := block.missing():
        pytest.skip(", ".join(missing))
    printed = ""
    for line in (lines := lines_of(block)):
        words = shlex.split(line, comments=True)
        code = run(words[1:])
        out, err = capfd.readouterr()
        allowed = {int(block.marks.get("exit", 0)) if line == lines[-1] else 0}
        if words[1] == "doctor":  # reports on the machine, which may lack something
            allowed = {0, 3}
        elif "cuda:0" in words and "--machine" not in words and not NEEDS["cuda"][0]():
            allowed = {3}
            assert "cuda:0" in err
        assert code in allowed, f"{line}: exit {code}\n{out}\n{err}"
        assert "Traceback" not in err
        printed += out + err
    if not ("cuda:0" in block.body and NEEDS["cuda"][0]()):  # outputs are those of machines without one
        assert not not_printed(block.shown, printed), printed


@pytest.mark.parametrize("block", POLICIES)
def test_policies_load(block: Block):
    from xpuruntime import Policy

    policy = Policy.loads(block.body, format="yaml")
    assert Policy.loads(policy.dumps(format="yaml"), format="yaml") == policy


def test_both_readmes_show_the_same_commands_and_code():
    english, korean = ([(b.language, re.sub(r"#.*|f\".*\"", "", b.body)) for b in blocks(page)] for page in pages()[:2])
    assert english == korean


@pytest.mark.parametrize("name", TRANSLATED)
def test_korean_pages_show_the_same_code_as_the_english_ones(name: str):
    pair = (ROOT / "docs" / name, ROOT / "docs" / "ko" / name)
    english, korean = ([(b.language, re.sub(r"#.*", "", b.body)) for b in blocks(page)] for page in pair)
    assert english == korean


def test_each_mark_is_one_we_know():
    wrong = [
        f"{page.name}: <!-- {comment} -->"
        for page in pages()
        for comment in re.findall(r"<!-- (.*?) -->\n+ *```", page.read_text(encoding="utf-8"))
        if not comment.startswith(("needs: ", "exit: ", "not run: "))
    ]
    wrong += [
        f"{block}: needs {word!r}, which is none of {', '.join(NEEDS)}"
        for page in pages()
        for block in blocks(page)
        for word in re.split(r",\s*", block.marks.get("needs", ""))
        if word and word not in NEEDS
    ]
    assert not wrong, wrong


def test_commands_are_in_blocks_that_are_run():
    """A command in a block of another language would be shown and never run."""
    hidden = [
        f"{block}: {line}"
        for page in pages()
        for block in blocks(page)
        if block.language in ("bash", "sh", "shell", "text", "")
        for line in lines_of(block)
        if "...." not in line  # of pre-commit, whose hooks begin with our name
    ]
    assert not hidden, f"write these as `console`: {hidden}"
