# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The sections on what a lock costs and whether it holds, and on how often verify is right."""

from __future__ import annotations

from typing import Any

from report_parts import Check, Section, machine, number, table, target_table


def locks(record: dict[str, Any]) -> Section:
    """Return sizes and times of locks, and whether fresh processes ran the same kernels with the same bits."""
    sizes = [
        [
            row["model"],
            *(str(row[key]) for key in ("units", "calls", "configurations")),
            *("yes" if row[key] else "no" for key in ("same_kernels", "same_bits")),
        ]
        for row in record["rows"]
    ]
    times = [
        [
            row["model"],
            *(number(row[key]) for key in ("lock_s", "open_s", "open_locked_s")),
            " ".join(number(one) for one in row["validate_ms"]),
        ]
        for row in record["rows"]
    ]
    checks = [
        Check(
            f"{row['model']}: validators before the model is loaded",
            min(row["validate_ms"]),
            record["targets"]["validate_ms"],
            "ms",
        )
        for row in record["rows"]
    ]
    note = f" {record['note'][0].upper()}{record['note'][1:].rstrip('.')}." if record.get("note") else ""
    text = (
        "Does a fresh process under a lock run the same, and what does it cost?\n\n"
        f"{machine(record)}\n`python benchmarks/bench_lock.py`: a lock, then three fresh processes under it.{note} In "
        "a fresh process the validators include reading and hashing the model, which a plan needs, too.\n\n"
        + table(("model", "units", "calls of xpuruntime", "with a configuration", "same kernels", "same bits"), sizes)
        + "\n"
        + table(("model", "lock, s", "open, s", "open under the lock, s", "validators, ms"), times)
        + f"\n{target_table(checks)}"
    )
    return Section(f"Locks on {record['rows'][0]['device']}", text, tuple(checks))


_VERDICTS = ("pass", "fail", "inconclusive", "too noisy", "unobservable", "skipped")


def verdicts(record: dict[str, Any]) -> Section:
    """Return verdicts on an unchanged model, and on sessions that were slowed by a known share."""
    targets, checks = record["targets"], []
    words = [
        word
        for word in _VERDICTS
        if word in _VERDICTS[:3]
        or any(
            word in section
            for section in (*record["sections"].values(), *(row["verdicts"] for row in record["planted"]))
        )
    ]
    whole = [[f"`{name}`", *(str(one.get(word, 0)) for word in words)] for name, one in record["sections"].items()]
    slowed = [
        [f"{row['planted']:.0%}", str(row["claims"]), *(str(row["verdicts"].get(word, 0)) for word in words),
         f"{row['rounds']:.0f}", f"{row['ratio']:.3f}"]
        for row in record["planted"]
    ]  # fmt: skip
    allowed, missed = (100 * targets[name] for name in ("false failures", "10 % not found"))
    if record["verifications"]:
        share = 100 * record["with_failure"] / record["verifications"]
        checks.append(Check("verifications of an unchanged model with a failure", share, allowed, "%"))
    for row in record["planted"]:
        share = 100 * row["verdicts"].get("fail", 0) / row["claims"]
        if row["planted"] == 0:
            checks.append(Check("claims of speed on an unchanged session that failed", share, allowed, "%"))
        elif row["planted"] >= 0.1:
            checks.append(Check(f"{row['planted']:.0%} slower and not found", 100 - share, missed, "%"))
    wanted, (least, median, most) = record["wanted"], record["load"]
    short = (
        f" **Cut short: {wanted['verifies']} verifications and {wanted['trials']} claims of each share were wanted.**"
        if record["verifications"] < wanted["verifies"]
        or any(row["claims"] < wanted["trials"] for row in record["planted"])
        else ""
    )
    failed = "".join(f"* {one}\n" for one in record["failed"])
    text = (
        "How often does `xrt verify` fail what did not change, and find what became slower?\n\n"
        f"{machine(record)}\nLoad average: {least:.1f} to {most:.1f}, in the middle {median:.1f}. "
        f"`python benchmarks/bench_verify.py`, {record['seconds'] / 60:.0f} minutes of measuring.{short}\n\n"
        f"{record['verifications']} whole verifications of the shipped model, unchanged, with a budget of "
        f"{record['verify_budget']:g} s for speed; {record['with_failure']} had a claim that failed:\n\n"
        f"{table(('claims', *words), whole)}\n{failed}"
        "Claims of speed beside a control, at a margin of 5 % and a confidence of 99 %, where every run of the "
        "session is followed by a busy wait of the planted share, and a little more for the clock. At the margin "
        "itself nothing is to be decided:\n\n"
        f"{table(('planted', 'claims', *words, 'rounds', 'ratio found'), slowed)}\n{target_table(checks)}"
    )
    return Section("Verdicts of verify", text, tuple(checks))
