# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Check the repository's own rules over its tracked files; part of ``make lint``.

* A source file has at most 800 lines; those over 400 are listed.
* Every source file begins with the two SPDX lines.
* No file names an absolute path of somebody's machine.
* Every public C++ header compiles by itself (headers that need the CUDA toolkit are left out where there is none).
* The name of a test has at most 80 characters.
* Text files are UTF-8, end with a newline, and have no trailing blanks or tabs where the language has none.
* The demo's data stay within 300 kB.

``--lengths`` only lists the longest files.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOFT, HARD = 400, 800
SPDX = ("SPDX-License-Identifier: Apache-2.0", "SPDX-FileCopyrightText: The xpuruntime developers")
CPP = {".h", ".hpp", ".cpp", ".cu", ".cuh"}
SOURCES = CPP | {".py", ".pyi", ".sh", ".cmake", ".js"}
NAMED_SOURCES = {"Makefile", "CMakeLists.txt", ".clang-format", ".clang-tidy"}
TEXT = SOURCES | {".md", ".yaml", ".yml", ".toml", ".json", ".txt", ".css", ".html"}
#: With its "test_", over 80 characters.
LONG_TEST = re.compile(r"^ *(?:async )?def (test_\w{76,})\(", re.MULTILINE)
#: Folders of other people's files, kept as they came.
VENDORED = ("src/cpp/third_party/", "tests/cpp/third_party/")
DEMO_FOLDER, DEMO_LIMIT = "src/python/xpuruntime/demo/", 300_000
#: Home folders and the like. A path in a message or a test may be made up, but not look like one of these. The one with
#: models is KServe's, the same in every container.
MACHINE_PATH = re.compile(r"(?<![\w.:/$}~-])/(?:home|root|Users|work|mnt(?!/models\b)|workspace)/[\w.-]+")


def tracked() -> list[str]:
    """Return the tracked files and those that git would take, relative to the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return sorted(name for name in listing.split("\0") if name and (ROOT / name).is_file())


def is_source(name: str) -> bool:
    """Whether the file is a program or build xpuruntime file."""
    path = Path(name)
    return path.suffix in SOURCES or path.name in NAMED_SOURCES or name.startswith(".ci/")


def check_text(name: str) -> list[str]:
    """Return what is wrong with the text of one file."""
    raw = (ROOT / name).read_bytes()
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        return [f"{name}: not UTF-8 ({error})"]
    found = []
    lines = text.splitlines()
    if text and not text.endswith("\n"):
        found.append(f"{name}: no newline at the end")
    for number, line in enumerate(lines, 1):
        if line != line.rstrip():
            found.append(f"{name}:{number}: blanks at the end of the line")
        if match := MACHINE_PATH.search(line):
            found.append(f"{name}:{number}: absolute path of a machine: {match.group()}")
    if is_source(name):
        if len(lines) > HARD:
            found.append(f"{name}: {len(lines)} lines, at most {HARD}: split it, one noun a file")
        head = "\n".join(lines[:4])
        found += [f"{name}: {one}: name the behavior in fewer words" for one in LONG_TEST.findall(text)]
        missing = [tag for tag in SPDX if tag not in head]
        if missing and text.strip():
            found.append(f"{name}: no SPDX header ({'; '.join(missing)})")
    return found


def check_header(name: str, compiler: str, cuda: Path | None) -> list[str]:
    """Compile one header by itself."""
    if cuda is None and re.search(r"#include <(cuda|nvtx|cupti)", (ROOT / name).read_text()):
        return []
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder) / "unit.cpp"
        unit.write_text(f'#include "{ROOT / name}"\n')
        command = [compiler, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
        command += ["-I", str(ROOT / "src/cpp/include"), "-isystem", str(ROOT / "src/cpp/third_party")]
        command += ["-isystem", str(cuda)] if cuda else []
        done = subprocess.run([*command, str(unit)], capture_output=True, text=True, check=False)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        return [f"{name}: does not compile by itself: {first.replace(str(ROOT) + '/', '')}"]
    return []


def find_cuda_headers() -> Path | None:
    """Return the folder of ``cuda_runtime.h``, or ``None``."""
    nvcc = shutil.which("nvcc")
    places = [Path(nvcc).resolve().parent.parent / "include"] if nvcc else []
    return next((p for p in places if (p / "cuda_runtime.h").exists()), None)


def main() -> int:
    """Print every violation; return 1 when there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", action="store_true", help="list the twenty longest source files and stop")
    options = parser.parse_args()

    files = [name for name in tracked() if not name.startswith(VENDORED)]
    texts = [name for name in files if Path(name).suffix in TEXT or is_source(name)]
    lengths = {name: len((ROOT / name).read_bytes().splitlines()) for name in texts if is_source(name)}
    if options.lengths:
        for name, count in sorted(lengths.items(), key=lambda item: -item[1])[:20]:
            print(f"{count:5d} {name}")
        return 0

    problems = [problem for name in texts for problem in check_text(name)]
    headers = [n for n in files if n.startswith("src/cpp/include/") and Path(n).suffix in CPP]
    compiler = os.environ.get("CXX") or next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        problems.append("no C++ compiler was found, so the public headers were not checked")
    else:
        cuda = find_cuda_headers()
        with ThreadPoolExecutor(os.cpu_count()) as workers:
            for found in workers.map(lambda name: check_header(name, compiler, cuda), headers):
                problems += found
    demo = sum((ROOT / name).stat().st_size for name in files if name.startswith(DEMO_FOLDER))
    if demo > DEMO_LIMIT:
        problems.append(f"{DEMO_FOLDER}: {demo:,} bytes, at most {DEMO_LIMIT:,}")

    for name, count in sorted(lengths.items(), key=lambda item: -item[1]):
        if SOFT < count <= HARD:
            print(f"note: {name} has {count} lines; the habit is {SOFT}")
    for problem in problems:
        print(f"error: {problem}")
    print(f"checked {len(texts)} text files and {len(headers)} public headers: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
