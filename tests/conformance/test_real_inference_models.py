# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models of published wheels against the raw engines: the small ones of `tools/real_models.py`, all of its checks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "real_models.py"
#: Folders of the cache that `--small --fetch` fills.
MODELS = {"basic-pitch": "basic_pitch-*", "silero-vad": "silero_vad-*", "swift-f0": "swift_f0-*"}


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_published_models_do_as_on_the_raw_engine_or_are_refused_as_expected(engine, tmp_path):
    if not all(list((ROOT / "build" / "real-models").glob(f"{place}/*.onnx")) for place in MODELS.values()):
        pytest.skip("the models are not here: python tools/real_models.py --small --fetch")
    if find_spec(engine) is None:
        pytest.skip(f"could not import '{engine}'")
    rows = tmp_path / "rows.json"
    command = [sys.executable, str(TOOL), "--models", ",".join(MODELS), "--engines", engine, "--json", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(rows.read_text())) == 7 * len(MODELS)


def test_the_page_has_every_model_and_each_of_its_reasons_is_in_the_table() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    import real_model_table as table

    text = (ROOT / "docs" / "results" / "real-models.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and " | " in line][1:]
    assert [(row[0].removeprefix("| "), row[1]) for row in rows] == [
        (model.name, engine) for model in table.MODELS for engine in ("onnxruntime", "openvino")
    ]
    reasons = set(re.findall(r"^\d+\. `(.*)`$", text, re.M))
    assert reasons == set(table.EXPECTED.values()) | set(table.PROCESSOR.values())
