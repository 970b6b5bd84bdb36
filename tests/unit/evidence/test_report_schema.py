# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The published JSON Schemas: what is written is valid, what is wrong is not, and the files are those of the code."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from evidence_records import BOUNDARY, CONVERSION, LATENCY, control, unit

from xpuruntime.cli.entry import run
from xpuruntime.demo import demo_model_path
from xpuruntime.engines.base import Observed
from xpuruntime.evidence import build_report, compare_reports

ROOT = Path(__file__).resolve().parents[3]
FILES = {name: ROOT / "docs" / "reference" / f"{name}.schema.json" for name in ("report", "report_comparison")}


def validator(name, *, closed=False):
    """Return the validator of a published file; a closed one refuses keys that it does not describe."""
    schema = json.loads(FILES[name].read_text(encoding="utf-8"))
    if closed:
        for part in (schema, *schema["$defs"].values()):
            part["additionalProperties"] = False
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def full_report(device="cpu"):
    units = [
        unit("a", device=device, kernel="gemm", kernel_source="reported", layout="nchw"),
        unit("b", relation="folded", device="none", time=None),
        unit("cast", relation="inserted", serves=("a",)),
    ]
    observed = Observed(units=tuple(units), boundaries=(BOUNDARY,), notes=("a note",), partial=True)
    return build_report(
        {"engine": "onnxruntime", "device": "cpu", "precision": "fp32"},
        [control("execution.tf32", "true"), control("kernels.conv", "x", "-", "unsupported")],
        observed,
        conversions=[CONVERSION],
        latency=LATENCY,
        memory={"weights": 1 << 40},
    )


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """Return what the commands print, for a model on two engines, and for their comparison."""
    folder = tmp_path_factory.mktemp("explained")
    for engine in ("onnxruntime", "null"):
        arguments = ["explain", str(demo_model_path()), "-d", "cpu", "-e", engine, "--json"]
        code = f"import sys; from xpuruntime.cli.entry import main; main({arguments!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (folder / f"{engine}.json").write_text(done.stdout)
    return folder


@pytest.mark.parametrize("engine", ["onnxruntime", "null"])
def test_what_explain_prints_is_valid(explained, engine):
    report = json.loads((explained / f"{engine}.json").read_text())
    validator("report", closed=True).validate(report)


def test_what_the_comparison_prints_is_valid(explained, capfd):
    paths = [str(explained / f"{engine}.json") for engine in ("onnxruntime", "null")]
    assert run(["explain", *paths, "--json"]) == 1
    document = json.loads(capfd.readouterr().out)
    assert document["groups"]
    validator("report_comparison", closed=True).validate(document)


def test_every_part_is_described():
    validator("report", closed=True).validate(full_report().to_dict())
    comparison = compare_reports(full_report(), full_report("cuda:0"))
    validator("report_comparison", closed=True).validate(comparison.to_dict())


def test_later_keys_are_no_fault():
    found = {**full_report().to_dict(), "more": 1}
    validator("report").validate(found)
    with pytest.raises(jsonschema.ValidationError):
        validator("report", closed=True).validate(found)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), "xpuruntime.report/2"),
        (("headline",), None),
        (("units", 0, "relation"), "joined"),
        (("units", 0, "time", "kind"), "guess"),
        (("units", 0, "source_nodes"), "a"),
        (("observations", 0, "status"), "fine"),
        (("boundaries", 0, "count"), "two"),
        (("memory", "weights"), "1 TiB"),
        (("latency", "runs"), None),
        (("partial",), 0),
    ],
)
def test_wrong_values_are_refused(path, value):
    found = full_report().to_dict()
    wrong = copy.deepcopy(found)
    place = wrong
    for step in path[:-1]:
        place = place[step]
    assert place[path[-1]] != value
    place[path[-1]] = value
    validator("report").validate(found)
    with pytest.raises(jsonschema.ValidationError):
        validator("report").validate(wrong)


@pytest.mark.parametrize("key", ["schema", "units", "notes", "honoured"])
def test_missing_keys_are_refused(key):
    found = full_report().to_dict()
    del found[key]
    with pytest.raises(jsonschema.ValidationError, match=f"'{key}' is a required property"):
        validator("report").validate(found)


def test_the_files_are_those_of_the_code(tmp_path):
    def check(root):
        command = [sys.executable, str(root / "tools" / "report_schema.py"), "--check"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert check(ROOT).returncode == 0, check(ROOT).stdout
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "report_schema.py", tmp_path / "tools")
    shutil.copytree(ROOT / "docs" / "reference", tmp_path / "docs" / "reference")
    changed = tmp_path / "docs" / "reference" / FILES["report"].name
    changed.write_text(changed.read_text().replace('"partial"', '"partly"'))
    done = check(tmp_path)
    assert done.returncode == 1
    assert done.stdout == "error: report.schema.json does not match the code: run python tools/report_schema.py\n"


def test_the_page_says_what_each_part_is():
    text = (ROOT / "docs" / "reference" / "report.md").read_text(encoding="utf-8")
    words = text.partition("<!-- schema: begin -->")[0]
    keys = json.loads(FILES["report"].read_text())["properties"]
    assert [key for key in keys if f"`{key}`" not in words] == []
