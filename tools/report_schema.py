# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Write the JSON Schemas of what xpuruntime writes as JSON, and the page with their keys, into ``docs/reference``.

``python tools/report_schema.py`` writes; ``--check`` only says whether they are up to date (``make lint``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from xpuruntime.evidence.documents import schema_of
from xpuruntime.evidence.report import Report
from xpuruntime.evidence.report_comparison import ReportComparison
from xpuruntime.lockfile.records import Lock
from xpuruntime.locks.verification.result import VerificationResult
from xpuruntime.tuning.spec.tune_spec import tune_schema
from xpuruntime.tuning.tune_result import TuneResult

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
PAGE = FOLDER / "report-keys.md"
#: File to the type that it describes, and the title.
TYPES = {
    "report": (Report, "A report of xpuruntime"),
    "report_comparison": (ReportComparison, "A comparison of two reports of xpuruntime"),
    "verification": (VerificationResult, "A verification of xpuruntime"),
    "lock": (Lock, "A lock of xpuruntime"),
    "tune_result": (TuneResult, "A search of xpuruntime for a policy"),
}
BEGIN, END = "<!-- schema: begin -->\n", "<!-- schema: end -->\n"


def kind_of(one: dict[str, Any]) -> str:
    """Say which values a property takes."""
    if "const" in one:
        return f'`"{one["const"]}"`'
    if "enum" in one:
        return ", ".join(f"`{value}`" for value in one["enum"])
    if "$ref" in one:
        name = one["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in one:
        return " or ".join(kind_of(part) for part in one["anyOf"])
    if "prefixItems" in one:
        return f"[{', '.join(kind_of(part) for part in one['prefixItems'])}]"
    if one.get("type") == "array":
        return f"list of {kind_of(one.get('items', {}))}"
    if one.get("type") == "object":
        inside = one.get("additionalProperties")
        names = one.get("propertyNames", {}).get("enum")
        return (
            f"object of {kind_of(inside)}" if inside else "object" if not names else f"object, keys {', '.join(names)}"
        )
    return str(one.get("type", "anything"))


def table(properties: dict[str, Any]) -> str:
    """Return the properties as a Markdown table."""
    rows = []
    for name, one in properties.items():
        text = one.get("description", "").replace("``", "`").replace("|", "\\|")
        rows.append(f"| `{name}` | {kind_of(one)} | {text} |\n")
    return "| key | value | meaning |\n|---|---|---|\n" + "".join(rows)


def table_of(one: dict[str, Any]) -> str:
    """Return the properties of an object, or the words of an enumeration with their meanings, as a Markdown table."""
    if "properties" in one:
        return table(one["properties"])
    rows = [f"| `{word}` | {text} |\n" for word, text in zip(one["enum"], one["enumDescriptions"], strict=True)]
    return "| word | meaning |\n|---|---|\n" + "".join(rows)


def tables() -> str:
    """Return the tables of all schemas, each type once."""
    tops = {kind.__name__: schema_of(kind, title) for kind, title in TYPES.values()}
    parts = [*tops.items(), *sorted({name: one for top in tops.values() for name, one in top["$defs"].items()}.items())]
    return "".join(f"\n### {name}\n\n{one['description']}\n\n{table_of(one)}" for name, one in parts)


def main() -> int:
    """Write or check the files."""
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    fresh = {
        PAGE: f"{head}{BEGIN}{tables()}\n{END}{rest.split(END)[1]}",
        FOLDER / "tune.schema.json": json.dumps(tune_schema(), indent=2) + "\n",
        **{
            FOLDER / f"{name}.schema.json": json.dumps(schema_of(kind, title), indent=2) + "\n"
            for name, (kind, title) in TYPES.items()
        },
    }
    stale = 0
    for path, text in fresh.items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if "--check" in sys.argv[1:]:
            print(f"error: {path.name} does not match the code: run python tools/report_schema.py")
            stale = 1
        else:
            path.write_text(text, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main())
