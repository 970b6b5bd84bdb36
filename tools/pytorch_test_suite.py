# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Run PyTorch's own test files without a policy and under policies, and name the cases that a policy loses.

PyTorch's wheels have no tests, so the files come from its sources:

``python tools/pytorch_test_suite.py pytorch/test test_transformers.py nn/test_convolution.py``

A case that passes without a policy has to pass under each policy of `POLICIES`, but for those of `MEANT`; the exit
status is 1 where one does not. It needs PyTorch, pytest, and what PyTorch's test tools import (``pip install expecttest
hypothesis``). A file whose version is not that of the PyTorch at hand has cases that fail without a policy; these are
counted and not compared. A case that ends its process is counted as failed, and the rest of its file is run in another
process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

_OPS = ("matmul", "attention", "layer_norm", "rms_norm", "conv")
_OURS = {
    "matmul": ["cublas.cublasLt", "cpu.blas", "cpu.reference", "torch"],
    "attention": ["cuda_raw.flash_attention_v2", "cpu.reference", "torch"],
    "layer_norm": ["cuda_raw.layer_norm", "cpu.vectorised", "cpu.reference", "torch"],
    "rms_norm": ["cuda_raw.rms_norm", "cpu.vectorised", "cpu.reference", "torch"],
    "conv": ["cudnn.conv_heuristic", "cpu.gemm_conv", "cpu.reference", "torch"],
}
_BACKWARD = [{"match": {"op": op, "phase": "backward"}, "use": _OURS[op]} for op in _OPS]
#: Kernels of a policy: every call looked up and left to PyTorch; every call by ours where one can serve; ours in the
#: backward alone; the same beside a rule of a module, which guards tell, too.
POLICIES: dict[str, dict[str, Any]] = {
    "looked-up": {"rules": [{"match": {"op": op, "dtype": "int4"}, "use": "cpu.reference"} for op in _OPS]},
    "ours": dict(_OURS),
    "by-phase": {"rules": _BACKWARD},
    "by-module": {"rules": [{"match": {"module": "no.such.module"}, "use": "cpu.reference"}, *_BACKWARD]},
}
_ALL = tuple(POLICIES)
_SERVING = ("ours", "by-phase", "by-module")


class _Meant(NamedTuple):
    """Cases that have to fail under some policies.

    Attributes
    ----------
    cases : str
        A regular expression.
    policies : tuple of str
    why : str
    """

    cases: str
    policies: tuple[str, ...]
    why: str


_FAST_PATH = "it expects the fast path of nn.MultiheadAttention, which policies of attention turn off"
MEANT = (
    _Meant(
        r"test_(disable|mask_check)_fastpath|test_multihead\w+_(outside_fast_path|fast_path_mock)", _ALL, _FAST_PATH
    ),
    _Meant(r"test_(TransformerEncoderLayer_empty|transformerencoderlayer_cpu)", _ALL, _FAST_PATH),
    _Meant(r"test_sdpa_(prev|rewriter)_\d+_", _SERVING, "it looks for PyTorch's own attention in compiled code"),
    _Meant(
        r"test_scaled_dot_product_attention_\w+_dropout_p_0_[25]_",
        ("ours",),
        "it expects the numbers that PyTorch's own kernel draws for its dropout",
    ),
    _Meant(
        r"test_(hook_registration|always_called_forward_hooks)$",
        ("by-module",),
        "it counts PyTorch's global hooks of modules, two of which follow modules while a rule names one",
    ),
    _Meant(
        r"test_layer_norm_reduce_ragged_idx_1_",
        ("ours",),
        "it allows 1e-5 of numbers near zero, whose rounding errors are larger",
    ),
)
_POLICY = "XPURUNTIME_SUITE_POLICY"
_ROWS = "XPURUNTIME_SUITE_ROWS"
#: Stands for a case where pytest has come to its end.
_FINISHED = ""


def pytest_sessionstart() -> None:
    """Let the policy of this process hold, which is a plugin of pytest's there."""
    name = os.environ[_POLICY]
    if name:
        import xpuruntime.pytorch as xrt_torch

        xrt_torch.set_kernel_policy(**POLICIES[name])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what an earlier process has run."""
    done = set(_read(Path(os.environ[_ROWS])))
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note that a case begins, so that one which ends the process is known."""
    _write(nodeid, "crashed", "", {})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how a case ended, and what xpuruntime kernels served: its last report that is not `passed` counts."""
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        lines = str(getattr(crash, "message", "")).splitlines() if report.failed else []
        _write(report.nodeid, report.outcome, lines[0][:300] if lines else "", _served())


def pytest_sessionfinish() -> None:
    """Note that no case has ended the process."""
    _write(_FINISHED, "", "", {})


def _served() -> dict[str, int]:
    """Return how often each xpuruntime kernel has served since the last call."""
    if not os.environ[_POLICY]:
        return {}
    import xpuruntime as xrt

    served = Counter[str]()
    for decision in xrt.decisions():
        served[decision.chosen] += decision.count
    xrt.clear_decisions()
    return served


def _write(case: str, outcome: str, reason: str, served: dict[str, int]) -> None:
    with Path(os.environ[_ROWS]).open("a", encoding="utf-8") as file:
        file.write(json.dumps([case, outcome, reason, served]) + "\n")


class _Row(NamedTuple):
    outcome: str
    reason: str
    served: dict[str, int]


def _read(rows: Path) -> dict[str, _Row]:
    """Return what came of each case."""
    found: dict[str, _Row] = {}
    for line in rows.read_text(encoding="utf-8").splitlines() if rows.exists() else ():
        case, outcome, reason, served = json.loads(line)
        before = found[case].served if case in found else {}
        found[case] = _Row(outcome, reason, dict(Counter(before) + Counter(served)))
    return found


def run(folder: Path, file: str, policy: str, select: str | None, kept: Path) -> dict[str, _Row]:
    """Run one file under one policy (none where its name is empty) and return what came of each case."""
    path, rows = folder / file, (kept / f"{file.replace('/', '_')}-{policy or 'native'}.jsonl").resolve()
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-c", os.devnull, "--rootdir", str(folder)]
    command += ["-p", "no:cacheprovider", "-p", Path(__file__).stem, path.name, *(["-k", select] if select else [])]
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), _POLICY: policy, _ROWS: str(rows)}
    environment["OMP_NUM_THREADS"] = "1"  # the cases are small
    while True:
        before = rows.read_text(encoding="utf-8") if rows.exists() else ""
        done = subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True, check=False)
        new = (rows.read_text(encoding="utf-8") if rows.exists() else "")[len(before) :].splitlines()
        finished = any(json.loads(line)[0] == _FINISHED for line in new)
        if finished and done.returncode in (0, 1, 5):  # all passed, some failed, none left
            return {case: row for case, row in _read(rows).items() if case != _FINISHED}
        if finished or not new:
            raise SystemExit(f"{file} cannot be run by pytest:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def main(arguments: Sequence[str]) -> int:
    """Run the files, print a table and what is lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder `test` of PyTorch's sources")
    parser.add_argument("files", nargs="+", help="test files, below that folder")
    parser.add_argument("--policy", action="append", choices=sorted(POLICIES), help="only this one; may be repeated")
    parser.add_argument("--rows", type=Path, help="keep what came of each case here, and go on from what is kept")
    parser.add_argument("-k", dest="select", help="pytest's expression for the cases")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        rows = given.rows or Path(temporary)
        rows.mkdir(parents=True, exist_ok=True)
        folder, policies = given.folder.resolve(), given.policy or list(POLICIES)
        lost = sum(compare(folder, file, policies, given.select, rows) for file in given.files)
    return 1 if lost else 0


def compare(folder: Path, file: str, policies: Sequence[str], select: str | None, rows: Path) -> int:
    """Run one file without a policy and under some, and print and count the cases that these lose."""
    found = run(folder, file, "", select, rows)
    print(f"{file}, no policy: {dict(Counter(row.outcome for row in found.values()))}", flush=True)
    passing = [case for case, row in found.items() if row.outcome == "passed"]
    if not passing:
        raise SystemExit(f"{file}: no case passes without a policy, so that there is nothing to compare")
    lost = 0
    for policy in policies:
        found = run(folder, file, policy, select, rows)
        served = sum((Counter(row.served) for row in found.values()), Counter())
        bad = {case: found.get(case, _Row("not run", "", {})) for case in passing}
        bad = {case: row for case, row in bad.items() if row.outcome != "passed"}
        print(f"{file}, {policy}: {len(passing) - len(bad)} of {len(passing)} pass; served: {dict(served)}", flush=True)
        meant = {
            case: one.why
            for case, row in bad.items()
            for one in MEANT
            if policy in one.policies and row.outcome == "failed" and re.search(one.cases, case)
        }
        for why, count in Counter(meant.values()).items():
            print(f"  {count} as it has to be: {why}")
        for case in bad.keys() - meant.keys():
            print(f"  {bad[case].outcome}: {case}: {bad[case].reason}")
        lost += len(bad) - len(meant)
    return lost


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
