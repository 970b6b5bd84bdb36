# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The client of Triton against the server: every datatype, both forms of data, async, streams and errors.

It needs versions of protobuf and others that this package does not, so it runs in an interpreter of its own, which the
variable ``TRITONCLIENT_PYTHON`` names: one where ``pip install "tritonclient[http,grpc]==2.73.0"`` was done.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest


def test_every_check_with_tritonclient(served):
    interpreter = os.environ.get("TRITONCLIENT_PYTHON")
    if not interpreter:
        pytest.skip("TRITONCLIENT_PYTHON names no interpreter with tritonclient[http,grpc]")
    script = Path(__file__).with_name("tritonclient_checks.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [interpreter, str(script), served.server.http_address, served.server.grpc_address],
        capture_output=True, text=True, check=False, timeout=200, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert len(document) > 30
    wrong = {name: reason for name, reason in document.items() if reason}
    assert not wrong, "\n".join(f"{name}: {reason}" for name, reason in wrong.items())
