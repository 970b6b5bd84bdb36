# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Values of locks, for tests that need no engine."""

from __future__ import annotations

from xpuruntime.lockfile.measured import Measured, OutputSample
from xpuruntime.lockfile.records import (
    CallEntry,
    Identity,
    Lock,
    LockedModel,
    LockedOutput,
    LockedPlan,
    LockedPolicy,
    LockedShapes,
    Provenance,
    UnitEntry,
    Validator,
    stable_id,
)

ENGINE = stable_id("engine", "onnxruntime")


def a_lock(entries: int = 3) -> Lock:
    units = tuple(
        UnitEntry(
            unit=f"conv{i}+relu{i}",
            op="Conv",
            relation="fused",
            sources=(f"conv{i}", f"relu{i}"),
            outputs=(f"r{i}",),
            at="s0",
            on="onnxruntime cpu CPUExecutionProvider",
            precision="fp32",
            layout="nchwc",
            depends_on=(ENGINE,),
            known="unobservable",
        )
        for i in range(entries)
    )
    identity = Identity(
        subject="inference",
        model=LockedModel(name="m.onnx", format="onnx", sha256="a" * 64),
        policy=LockedPolicy(sha256="b" * 64, stated={"execution.threads": "1"}, document={"execution": {"threads": 1}}),
        plan=LockedPlan(
            engine="onnxruntime",
            device="cpu",
            precision="model",
            settings={"threads": 1, "options": {"größe": 0.1}},
            controls=(("execution.threads", "intra_op=1", "enforced"),),
        ),
        validators=(
            Validator(id=ENGINE, kind="engine", key="onnxruntime", expect={"version": "1.31.1"}),
            *(
                Validator(id=stable_id(kind, key), kind=kind, key=key, expect=expect)
                for kind, key, expect in (
                    ("device", "cpu", {"name": "X", "cores": 2}),
                    ("cpu_isa", "x86_64", ["avx2"]),
                    ("environment", "onnxruntime", {}),
                    ("model", "m.onnx", {"sha256": "a" * 64}),
                    ("package", "xpuruntime", "0.1.0"),
                    ("policy", "policy", {"execution.threads": "1"}),
                )
            ),
        ),
        shapes=(LockedShapes(id="s0", inputs={"image": (1, 1, 8, 8)}),),
        entries=units,
        calls=(CallEntry(op="matmul", dtype="fp32", kernel="cpu.blas", depends_on=(ENGINE,)),),
        outputs=(
            LockedOutput(
                input="probe:0", at="s0", name="y", dtype="float32", shape=(1, 10), grade="bitwise", sha256="c" * 64
            ),
        ),
    )
    return Lock.of(
        identity,
        measured=Measured(memory_peak=5, samples=(OutputSample(name="y", at="s0", values=(0.1, -2.5e-7)),)),
        provenance=Provenance(created="2026-11-25T16:00:00Z", command="xrt lock m.onnx", note="한글 \u202e"),
    )
