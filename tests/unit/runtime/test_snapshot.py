# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The machine as a value: taken here, written to JSON, read back."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import machines
import pytest

from xpuruntime.errors import InputError
from xpuruntime.runtime.machine import EngineFacts, Machine
from xpuruntime.runtime.snapshot import (
    core_problem,
    load_machine,
    machine_from_json,
    machine_snapshot,
    machine_to_json,
)


class Present:
    name = "present"

    def probe(self) -> EngineFacts:
        return EngineFacts(name="present", version="1.2", loadable=True, providers=("one",))


def test_this_machine() -> None:
    machine = machine_snapshot()
    assert machine.cpu.name
    assert machine.cpu.cores == os.cpu_count()
    assert machine.cpu.total_memory > 1 << 20
    assert machine.python == ".".join(map(str, sys.version_info[:3]))
    assert bool(machine.cuda) != bool(machine.cuda_reason)
    if sys.platform.startswith("linux") and machine.architecture == "x86_64":
        flags = next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")
        ).split()
        assert ("avx2" in machine.cpu.features) == ("avx2" in flags)


def test_engines_are_probed_in_order_and_only_those_given() -> None:
    other = type("Other", (Present,), {"name": "other"})()
    assert list(machine_snapshot([other, Present()]).engines) == ["other", "present"]
    assert machine_snapshot({"any": Present()}).engines["present"].version == "1.2"
    assert machine_snapshot().engines == {}


def test_json_and_back() -> None:
    machine = machine_snapshot([Present()])
    assert machine_from_json(machine_to_json(machine)) == machine
    gpu = machines.gpu(dtypes=("fp32", "bf16"))
    other = Machine(**{**{field: getattr(machine, field) for field in machine.__struct_fields__}, "cuda": (gpu,)})
    assert machine_from_json(machine_to_json(other)) == other


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not a machine"),
        (b"\xff\xfe", "not a machine"),
        (b"[1]", "a machine is a JSON object, this is list"),
        (b"{}", "the schema is None"),
        (b'{"schema": "xpuruntime.machine/9"}', "xpuruntime.machine/9"),
        (b'{"schema": "xpuruntime.machine/1"}', "missing required field"),
        (b"[" * 100_000, "not a machine"),
    ],
)
def test_what_is_no_machine_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(text)
    with pytest.raises(InputError, match=r"xrt devices --json") as caught:
        load_machine(path)
    assert message in str(caught.value)
    assert "machine.json" in str(caught.value)


def test_a_wrong_type_names_the_field(tmp_path: Path) -> None:
    plain = json.loads(machine_to_json(machine_snapshot()))
    plain["cpu"]["cores"] = "two"
    with pytest.raises(InputError, match=r"cpu\.cores"):
        machine_from_json(json.dumps(plain))
    with pytest.raises(InputError, match="cannot read the machine file"):
        load_machine(tmp_path / "missing.json")


def test_without_a_core_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def broken(name: str, package: str | None = None) -> object:
        if name == "xpuruntime._core":
            raise ImportError("undefined symbol: cuGetProcAddress")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", broken)
    assert core_problem() == "undefined symbol: cuGetProcAddress"
    machine = machine_snapshot()
    assert machine.cpu.cores >= 1
    assert not machine.core_cuda
    assert "undefined symbol" in (machine.cuda_reason or "")
