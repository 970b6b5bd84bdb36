#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
#
# Builds and runs the C++ tests: plain, with AddressSanitizer and UndefinedBehaviorSanitizer, and with ThreadSanitizer.
#
#     tests/cpp/run.sh [plain] [asan] [tsan]      all three when none is named
#
# CUDA is left out, so the result is the same with and without nvcc. JOBS sets how many files are compiled, and how many
# parts of the tests run, at once. XPURUNTIME_DEVELOPER=ON makes the compiler's warnings errors.
set -euo pipefail
cd "$(dirname "$0")/../.."

build_and_run() {
  local name=$1 type=$2 sanitize=$3 optimise=$4
  local folder="build/cpp-$name"
  cmake -S . -B "$folder" -DCMAKE_BUILD_TYPE="$type" -DXPURUNTIME_CUDA=OFF -DXPURUNTIME_TESTS=ON -DXPURUNTIME_DEVELOPER="${XPURUNTIME_DEVELOPER:-OFF}" \
    -DXPURUNTIME_SANITIZE="$sanitize" -DCMAKE_CXX_FLAGS_DEBUG="$optimise -g1" >/dev/null
  cmake --build "$folder" --parallel "${JOBS:-2}"
  echo "== C++ tests, $name"
  local log="$folder/ctest.log"
  ctest --test-dir "$folder" --parallel "${JOBS:-2}" --output-on-failure --no-tests=error | tee "$log" && return 0
  # Where others use the machine, a test that looks at time can fail once. What a sanitizer found is never run again.
  if grep -q 'Sanitizer\|runtime error:' "$log"; then return 1; fi
  echo "== C++ tests, $name, once more: the parts with these failures"
  grep '^\[  FAILED  \]' "$log" || echo "(a test ended its process)"
  ctest --test-dir "$folder" --rerun-failed --output-on-failure
}

for name in "${@:-plain asan tsan}"; do
  # Unquoted: the default is three words.
  for one in $name; do
    case $one in
      plain) build_and_run plain Release "" "" ;;
      # Checks of every access take the compiler longer to optimise than the tests gain by it.
      asan) build_and_run asan Debug address,undefined -O0 ;;
      tsan) build_and_run tsan Debug thread -O1 ;;
      *)
        echo "tests/cpp/run.sh: unknown build '$one'; take plain, asan or tsan" >&2
        exit 2
        ;;
    esac
  done
done
