#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
#
# Install a wheel as somebody does who has Python and no compiler: a fresh environment, a fresh folder, and on PATH only
# what the commands need. Then the demo, README's code, the quickstart, and the time of an import.
#
#     tests/wheel.sh dist/xpuruntime-0.1.0-cp312-cp312-manylinux_2_28_x86_64.whl [PYTHON]
set -euo pipefail
wheel=$(realpath "$1") python=${2:-${PYTHON:-python3}}
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "$(basename "$wheel"): $(stat -c %s "$wheel") bytes"
[ "$(stat -c %s "$wheel")" -le 60000000 ] || { echo "the wheel is larger than 60 MB"; exit 1; }
if command -v objdump >/dev/null && [[ $wheel == *manylinux* ]]; then
  "$python" -m zipfile -e "$wheel" "$work/content"
  unversioned=$(objdump -T "$work"/content/xpuruntime/_core.*.so | awk '$2 == "D" && /UND/ && $NF !~ /^_?Py/ {print $NF}')
  [ -z "$unversioned" ] || { echo "not of the glibc in the wheel's name: $unversioned"; exit 1; }
fi
"$python" -m venv "$work/venv"
mkdir "$work/bin" "$work/folder"
for tool in sh env cat grep ls uname ldd dirname basename mkdir rm; do
  ln -s "$(command -v "$tool")" "$work/bin/$tool"
done
export PATH="$work/venv/bin:$work/bin" PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH CC CXX CUDACXX CUDA_HOME
for tool in cc c++ gcc g++ clang cmake ninja make nvcc; do
  if command -v "$tool"; then echo "$tool is still on PATH"; exit 1; fi
done
cd "$work/folder"
python -m pip install --quiet "$wheel"

core=$(python -c 'import xpuruntime._core as core; print(core.__file__)')
case $core in "$work"/venv/*) ;; *) echo "imported $core, not the wheel"; exit 1 ;; esac
needs=$(ldd "$core")
echo "$needs"
if grep -Eiq 'cuda|cublas|cudnn|nvinfer|nvrtc|cupti|nccl|openvino|onnxruntime' <<<"$needs"; then
  echo "_core links a vendor library"
  exit 1
fi
if grep -q 'not found' <<<"$needs"; then echo "_core links a library that is missing"; exit 1; fi
python - "$(basename "$wheel")" <<'PY'
import sys
from importlib.metadata import files
names = [str(path) for path in files("xpuruntime")]
licenses = [name for name in names if "/licenses/" in name]
print(f"{len(names)} files; licenses: {len(licenses)}")
assert any(name.endswith("licenses/LICENSE") for name in licenses), licenses
assert any("onnxruntime/LICENSE" in name for name in licenses), licenses
assert not [name for name in names if ".so" in name and "_core" not in name], "the wheel holds libraries of others"
PY

begin=$SECONDS
xrt demo >demo.txt || { cat demo.txt; exit 1; }
echo "xrt demo: $((SECONDS - begin)) s"
[ $((SECONDS - begin)) -le 60 ] || { echo "the demo takes longer than a minute"; exit 1; }

# What the pages show, run by the tests of the documentation with the installed package.
python -m pip install --quiet pytest==9.2.0 pytest-timeout==2.4.0 pytest-xdist==3.8.0
python -m pytest -q -p no:cacheprovider --rootdir "$root" -c "$root/pyproject.toml" \
  "$root/tests/docs/test_readme.py" "$root/tests/docs/test_blocks.py" -k "README or readme or excerpts or quickstart"
python -c 'import sys, xpuruntime; assert xpuruntime.__file__.startswith(sys.prefix), xpuruntime.__file__'

python - <<'PY'
import statistics, subprocess, sys, time

def run(code):
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start

run("import xpuruntime")
start = statistics.median(run("pass") for _ in range(7))
whole = statistics.median(run("import xpuruntime") for _ in range(7))
print(f"import xpuruntime: {whole - start:.3f} s beyond Python's own {start:.3f} s")
sys.exit(whole - start > 0.35)
PY
