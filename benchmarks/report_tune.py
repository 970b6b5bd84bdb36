# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The section of ``docs/benchmarks.md`` on policies that a search found."""

from __future__ import annotations

from typing import Any

from report_parts import Check, Section, machine, number, spread, table, target_table

_NAMES = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}


def tuned_policies(record: dict[str, Any]) -> Section:
    """Return times of the defaults and of the policy that was found, and the ratios of rounds."""
    rows, policies, checks, remarks = [], [], [], []
    for name, found in record["models"].items():
        times = {case: spread(values)[0] for case, values in found["samples_us"].items()}
        ratios = [_ratio(found["ratios"][case]) for case in _NAMES]
        rows.append([name, *(number(times[case]) for case in (*_NAMES, "tuned")), *ratios, found["verdict"]])
        policies.append(
            [
                name,
                _changes(found["changes"]),
                f"{found['seconds']:.0f} of {found['budget']:.0f} s",
                str(found["stages"]["opened"]),
            ]
        )
        best = min(_NAMES, key=times.__getitem__)
        low = found["ratios"][best][1]
        checks.append(Check(f"{name}, time of the tuned policy to {_NAMES[best]}'s, lower end", low, 1.0, ""))
        remarks += [f"{name}: {remark}" for remark in found["remarks"]]
    heads = [f"{name}, µs" for name in (*_NAMES.values(), "tuned")]
    to = [f"tuned to {name}" for name in _NAMES.values()]
    text = (
        "Does `xrt tune` find, unaided, a policy that is at least as fast as the better of ONNX Runtime and OpenVINO "
        f"at their defaults? Each search had the device `cpu` and kept fp32. The "
        f"comparison came after it: each of {record['rounds']} rounds opens all three in fresh processes and times "
        "them forwards and backwards. Ratios are medians of the rounds with intervals of "
        f"{record['confidence']:.0%}; below 1, the tuned policy is faster.\n\n"
        f"{machine(record)}\n`python benchmarks/bench_tune.py`\n\n"
        f"{table(('median', *heads, *to, 'verdict'), rows)}\n"
        f"{table(('policy that was found', 'changed', 'search', 'candidates opened'), policies)}\n"
        f"{target_table(checks)}"
    )
    if record.get("remark"):
        text += f"\n{record['remark']}\n"
    if remarks:
        text += (
            f"\nThe machine was loaded, by the sessions themselves or by other programs: {'; '.join(remarks)}. That of "
            "others widens the intervals, and favors policies with few threads.\n"
        )
    return Section("Tuned policies on cpu", text, tuple(checks))


def tuned_on_cuda(record: dict[str, Any]) -> Section:
    """Return times of what is tuned by hand and of the policy that was found, for each model, and the ratios."""
    rows, policies, checks = [], [], []
    for model, found in record["models"].items():
        by_hand = list(found["ratios"])
        for name in (*by_hand, "tuned"):
            value, low, high = spread(found["samples_us"][name])
            ratio = "" if name == "tuned" else _ratio(found["ratios"][name])
            rows.append([model, name, number(value), number(low), number(high), ratio])
        search = f"{found['seconds']:.0f} of {found['budget']:.0f} s"
        policies.append([model, _changes(found["changes"]), search, found["headline"]])
        best = min(by_hand, key=lambda name: spread(found["samples_us"][name])[0])
        checks.append(Check(f"{model}, tuned to {best}, lower end", found["ratios"][best][1], 1.0, ""))
    text = (
        "Does `xrt tune` find, unaided, a policy that is as fast as those found by hand, and for an exported program "
        "as `torch.compile`? Bound runs; random inputs and weights; allowed is what keeps a cosine of "
        f"{record['accuracy']['cosine']:g} to fp32. All are timed in {record['rounds']} interleaved rounds after the "
        f"search, with intervals of {record['confidence']:.0%}.\n\n"
        f"{machine(record)}\n`python benchmarks/bench_tune_gpu.py`\n\n"
        f"{table(('model', 'policy', 'median, µs', 'p10', 'p90', 'tuned to it'), rows)}\n"
        f"{table(('model', 'what was found', 'search', 'verdict'), policies)}\n{target_table(checks)}"
    )
    if record.get("remark"):
        text += f"\n{record['remark']}\n"
    return Section("Tuned policies on CUDA", text, tuple(checks))


def _ratio(ratio: list[float]) -> str:
    value, low, high = ratio
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _changes(changes: dict[str, Any]) -> str:
    shown = {key.rpartition(".")[2]: value for key, value in changes.items() if key != "execution.device"}
    return ", ".join(f"{key}: {value}" for key, value in shown.items()) or "nothing"
