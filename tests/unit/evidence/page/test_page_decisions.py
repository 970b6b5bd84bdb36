# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""xpuruntime kernels on the page of a report and in its comparison, whatever names and reasons say."""

from __future__ import annotations

import msgspec
import pytest
from page_models import HOSTILE
from test_page import Page, data_of

from xpuruntime.evidence import KernelCandidate, KernelDecision, Report, compare_reports
from xpuruntime.evidence.kernel_records import merged


def candidate(name, *, reason="", us=None):
    return KernelCandidate(id=name, config="", accepted=not reason, reason=reason, measured_us=us)


def decision(node, *, chosen="cpu.blas", **facts):
    stated = {
        "op": "matmul",
        "description": "matmul fp32 [3, 6] x [6, 8], cpu",
        "nodes": (node,),
        "module": "",
        "shapes": {"a": (3, 6), "b": (6, 8)},
        "dtype": "fp32",
        "device": "cpu",
        "phase": "infer",
        "asked": ("cpu.blas",),
        "asked_by": "kernels.matmul",
        "source": "pinned",
        "chosen": chosen,
        "config": "",
        "candidates": (candidate("cpu.blas", us=12.5), candidate("cublas.cublas", reason="serves cuda")),
        "notes": (),
        "count": 4,
    }
    return KernelDecision(**{**stated, **facts})


def texts(browser, selector):
    return browser.evaluate(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")


def test_the_page_shows_what_ran_and_what_did_not(show):
    own = decision("c", chosen=None, source="fallback", count=None, notes=("a note",), description="matmul on cpu")
    report = Report(decisions=(decision("a", nodes=("a", "b")), own))
    browser = show(report)
    assert browser.complaints == []
    rows = texts(browser, "#decisions table.policy tbody tr")
    assert rows == [
        "matmul fp32 [3, 6] x [6, 8], cpua + 1 morecpu.blascpu.blasas asked (kernels.matmul)4",
        "matmul on cpuccpu.blasthe engine's owninstead of what was asked (kernels.matmul)-",
    ]
    browser.click("#decisions details summary")
    others = texts(browser, "#decisions details[open] tbody td")
    assert others == ["cpu.blas", "yes", "ran", "12.5", "cublas.cublas", "no", "serves cuda", "-"]
    assert texts(browser, "#decisions details li") == ["a note"]


def test_names_and_reasons_are_text_and_nothing_else(show):
    report = Report(
        decisions=(
            decision(
                HOSTILE,
                description=HOSTILE,
                asked=(HOSTILE,),
                notes=(HOSTILE,),
                candidates=(candidate(HOSTILE, reason=HOSTILE),),
            ),
        )
    )
    browser = show(report)
    assert browser.complaints == []
    assert texts(browser, "#decisions tbody td")[0] == HOSTILE


def test_a_report_without_decisions_says_so_in_one_line(show):
    browser = show(Report())
    assert texts(browser, "#decisions .body > *") == ["None: no xpuruntime kernel was asked for."]
    assert data_of(Page(Report().to_html()))["decisions"] == []


def test_decisions_that_differ_in_their_nodes_are_one():
    one, two, other = decision("a"), decision("b", count=3), decision("c", chosen="cpu.reference")
    together, alone = merged((one, two, other))
    assert (together.nodes, together.count) == (("a", "b"), 7)
    assert alone == other
    own = [msgspec.structs.replace(one, chosen=None, count=None, nodes=(name,)) for name in ("a", "b")]
    assert [(d.nodes, d.count) for d in merged(own)] == [(("a", "b"), None)]


@pytest.mark.parametrize(
    ("after", "changed"),
    [
        (decision("a", chosen="cpu.reference"), [("cpu.blas", "cpu.reference")]),
        (decision("a", config="7"), [("cpu.blas", "cpu.blas@7")]),
        (decision("a", source="tuned", asked=("auto",)), []),  # the same kernel, chosen otherwise
        (decision("a", description="matmul fp32 [9, 6] x [6, 8], cpu", chosen="cpu.reference"), []),  # another call
        (decision("b", chosen="cpu.reference"), []),  # another node
        (decision("a", chosen=None, description="matmul on cpu"), [("cpu.blas", "the engine's own")]),
        (decision("a", chosen="torch.mm", description="matmul, by PyTorch", shapes={}), [("cpu.blas", "torch.mm")]),
        (decision("a", op="attention", chosen=None, description="by PyTorch", shapes={}), []),  # of another operation
    ],
)
def test_which_calls_another_kernel_serves(after, changed):
    plan = {"model": {"path": "m.onnx", "sha256": "0"}}
    reports = [Report(plan=plan, decisions=(one,)) for one in (decision("a"), after)]
    comparison = compare_reports(*reports)
    assert [(one.kernel_before, one.kernel_after) for one in comparison.decisions] == changed
    assert comparison.same is not bool(changed)
    if changed:
        assert "1 kind of calls by another kernel" in comparison.headline
        assert comparison.to_dict()["decisions"][0]["nodes"] == ["a"]
