# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Random policies, any field at any valid value."""

from __future__ import annotations

from hypothesis import strategies as st

from xpuruntime.policies import (
    AccuracyPolicy,
    ArtifactPolicy,
    CalibrationPolicy,
    ExecutionPolicy,
    KernelPolicy,
    KernelRule,
    MemoryPolicy,
    Policy,
    RuleMatch,
    TuningPolicy,
    VerifyEvidence,
    VerifyGeneration,
    VerifyMemory,
    VerifyPolicy,
    VerifySpeed,
    WeightsPolicy,
)
from xpuruntime.policies.execution_policy import DETERMINISM_GRADES
from xpuruntime.policies.kernel_rules import FAMILIES, KERNEL_IDS, OPS

# Anything printable, and what trips YAML readers of some version.
TRAPS = [
    "on",
    "off",
    "yes",
    "NO",
    "null",
    "~",
    "1e-2",
    "1_000",
    "0o7",
    "0x1F",
    "12:30:00",
    "2026-01-01",
    ".inf",
    "-",
    "?",
    ": ",
]
TRAPS += [
    "- a",
    "a: b",
    "# x",
    "a #b",
    "*x",
    "&x",
    "!x",
    "%x",
    "@x",
    "`x",
    "|",
    ">",
    "'",
    '"',
    "\\n",
    "=",
    "<<",
    "[",
    "{",
    " x ",
    "x:",
]
TRAPS += ["가중치", "😀", "\u2028", "\ufeff", "\xa0", "1.", ".5", "+1", "0777", "true", "x" * 300]
text = st.one_of(
    st.sampled_from(TRAPS),
    st.text(
        st.characters(exclude_categories=("Cc", "Cs", "Cn"), exclude_characters="\ufffe\uffff"), min_size=1, max_size=20
    ),
).filter(lambda value: value.strip())

names = st.from_regex(r"\A[A-Za-z][A-Za-z0-9_-]{0,9}\Z").filter(lambda name: name not in ("auto", "error"))
devices = st.one_of(
    st.sampled_from(["cpu", "metal", "cuda", "gpu", "npu", "rocm", "dml"]),
    st.builds("{}:{}".format, st.sampled_from(["cuda", "gpu", "npu", "rocm", "dml"]), st.integers(0, 1023)),
)
sizes = st.one_of(
    st.integers(1, 2**63 - 1),
    st.builds(lambda n, unit: n * unit, st.integers(1, 999), st.sampled_from([2**10, 2**20, 2**30, 10**9])),
)
limits = st.floats(0, allow_nan=False, allow_infinity=False)


def optional(strategy):
    return st.one_of(st.none(), strategy)


def lists(strategy, least=1):
    return st.lists(strategy, min_size=least, max_size=3, unique=True)


def kernels(op):
    known = [*FAMILIES[op], *(kernel for kernel, (ops, _) in KERNEL_IDS.items() if op in ops), "vendor.name"]
    ordered = lists(st.sampled_from([kernel for kernel in known if kernel != "auto"]))
    return st.one_of(st.sampled_from(known), ordered, ordered.map(lambda some: [*some, "auto"]))


numbers = st.one_of(
    st.integers(0, 2**63 - 1),
    st.builds("{}{}".format, st.sampled_from(["<", "<=", ">", ">="]), st.integers(0, 2**63 - 1)),
    st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)).map(lambda ends: f"{min(ends)}..{max(ends)}"),
)
dtypes = st.sampled_from(["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int4"])
phases = st.sampled_from(["train", "infer", "backward"])
precisions = st.sampled_from(["fp32", "tf32", "fp16", "bf16", "int8"])


@st.composite
def rules(draw):
    op = draw(optional(st.sampled_from(OPS)))
    match = RuleMatch(
        op=op,
        m=draw(optional(numbers)),
        n=draw(optional(numbers)),
        k=draw(optional(numbers)),
        head_dim=draw(optional(numbers)),
        dtype=draw(optional(st.one_of(dtypes, lists(dtypes)))),
        device=draw(optional(st.one_of(devices, st.sampled_from(["auto", "sm90", "sm120"])))),
        node=draw(text if op is None else optional(text)),
        module=draw(optional(text)),
        phase=draw(optional(st.one_of(phases, lists(phases)))),
    )
    use = draw(kernels(op or "attention"))
    return KernelRule(match=match, use=use, precision=draw(optional(precisions)))


kernel_policies = st.builds(
    KernelPolicy,
    **{op: optional(kernels(op)) for op in OPS},
    rules=st.lists(rules(), max_size=3),
    auto_strategy=st.sampled_from(["first_supported", "best_performance"]),
    tuning=st.builds(
        TuningPolicy,
        min_effect=st.floats(0, 0.9),
        confidence=st.floats(0.5, 0.9999),
        budget=st.floats(0.001, 3600).map(lambda seconds: round(seconds, 6)),
    ),
)

options = st.one_of(
    text, st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False, allow_infinity=False)
)


fixed_sizes = st.integers(0, 2**63 - 1)
open_sizes = st.lists(st.integers(0, 10**6), min_size=2, max_size=3).map(lambda ends: "..".join(map(str, sorted(ends))))


def shapes(size):
    return st.dictionaries(text, st.lists(size, max_size=4), max_size=3)


@st.composite
def execution_policies(draw):
    static = draw(st.booleans())
    precision = draw(st.one_of(st.just("model"), precisions))
    contradicting = {"tf32": False, "fp32": True}.get(precision)
    return ExecutionPolicy(
        engine=draw(st.one_of(st.just("auto"), names, lists(names))),
        device=draw(st.one_of(st.just("auto"), devices)),
        precision=precision,
        fallback=draw(st.one_of(st.just("error"), lists(st.builds("{}@{}".format, names, devices)))),
        allow_cpu_ops=draw(lists(st.sampled_from(["Shape", "Gather", "com.microsoft:FusedConv", "On"]), least=0)),
        static_shape=static,
        shapes=draw(shapes(fixed_sizes if static else st.one_of(fixed_sizes, open_sizes))),
        cuda_graph=draw(st.sampled_from(["off", "prefer", "require"])),
        memory=MemoryPolicy(
            pool=draw(st.sampled_from(["engine", "direct", "caching", "driver"])), limit=draw(optional(sizes))
        ),
        artifacts=ArtifactPolicy(
            cache=draw(st.one_of(st.sampled_from(["off", "default", "C:\\cache"]), text.map("./{}".format))),
            stale=draw(st.sampled_from(["error", "rebuild"])),
        ),
        determinism=draw(st.sampled_from(DETERMINISM_GRADES)),
        tf32=draw(st.sampled_from([value for value in (None, True, False) if value is None or value != contradicting])),
        weights=draw(
            st.sampled_from([WeightsPolicy(), WeightsPolicy(storage="int8", compute="int8", exclude=["lm_head"])])
        ),
        layout=draw(st.sampled_from(["auto", "nchw", "nhwc"])),
        threads=draw(optional(st.integers(1, 4096))),
        provider_options=draw(st.dictionaries(names, st.dictionaries(text, options, max_size=3), max_size=2)),
    )


@st.composite
def accuracy_policies(draw):
    rtol, atol, cosine = draw(st.tuples(optional(limits), optional(limits), optional(st.floats(0, 1))))
    if rtol is None and atol is None and cosine is None:
        rtol = draw(limits)
    reference = draw(st.builds("{}.{}.{}".format, names, devices, st.one_of(st.just("model"), precisions)))
    return AccuracyPolicy(reference=reference, rtol=rtol, atol=atol, cosine=cosine)


calibration_policies = st.builds(
    CalibrationPolicy,
    path=text,
    digest=st.integers(0, 2**256 - 1).map("sha256:{:064x}".format),
    samples=optional(st.integers(1, 10**9)),
)


shares = st.one_of(st.floats(0, 10), st.integers(0, 1000).map("{}%".format), st.sampled_from([0.05, 1.0, 2.5, 5e-324]))
durations = st.one_of(
    st.floats(0.001, 604800),
    st.builds("{}{}".format, st.integers(1, 168), st.sampled_from(["ms", "s", "m", "h"])),
)
verify_policies = st.builds(
    VerifyPolicy,
    evidence=st.builds(
        VerifyEvidence,
        require=lists(st.sampled_from(["engine", "device", "precision", "placement", "kernels"]), least=0),
        allow=lists(text, least=0),
    ),
    determinism=st.sampled_from(["none", "run_to_run", "concurrency", "restart", "batch_position", "batch_invariant"]),
    metrics=st.dictionaries(
        st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_]{0,8}\Z"), st.floats(allow_nan=False, allow_infinity=False), max_size=2
    ),
    speed=optional(
        st.builds(
            VerifySpeed,
            metric=lists(st.sampled_from(["latency.p50", "latency.p99"])),
            max_slowdown=shares,
            control=st.sampled_from(["reference", "anchor"]),
            confidence=st.floats(0.5, 0.9999),
            budget=durations,
            inconclusive=optional(st.sampled_from(["fail", "warn", "pass"])),
        )
    ),
    memory=st.builds(VerifyMemory, max_growth=shares, max_peak=optional(sizes)),
    generation=optional(
        st.builds(
            VerifyGeneration,
            text=text,
            top1=st.floats(0, 1),
            kl=optional(st.floats(0, 1e300)),
            perplexity=optional(shares),
            tokens=st.integers(0, 65536),
        )
    ),
    start=optional(durations),
)

policies = st.builds(
    Policy,
    mode=st.sampled_from(["prefer", "strict", "auto"]),
    execution=execution_policies(),
    kernels=kernel_policies,
    accuracy=optional(accuracy_policies()),
    calibration=optional(calibration_policies),
    verify=optional(verify_policies),
)
