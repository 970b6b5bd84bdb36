#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
#
# Checks that this machine can build xpuruntime, before anything is downloaded.
# Usage: tools/preflight.sh PYTHON [CXX]
# Prints one message for everything that is missing and exits 1, or prints nothing and exits 0.
set -u
python=${1:?usage: tools/preflight.sh PYTHON [CXX]}
cxx=${2:-}
failed=0

complain() { # what, why, fix
  failed=1
  printf 'xpuruntime cannot be built here: %s\n  reason: %s\n  fix:    %s\n' "$1" "$2" "$3" >&2
}

if ! command -v "$python" >/dev/null 2>&1; then
  complain "no Python" "the command '$python' was not found" \
    "install Python 3.11 or newer (Debian, Ubuntu: apt-get install python3 python3-venv python3-dev), or name one: make PYTHON=/path/to/python3"
elif ! "$python" -c 'pass' 2>/dev/null; then
  complain "Python does not run" "'$python -c pass' fails" "name one that works: make PYTHON=/path/to/python3"
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  complain "Python is too old" "'$python' is $("$python" -V 2>&1); 3.11 or newer is needed" \
    "name a newer one: make PYTHON=python3.12"
else
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    complain "no virtual environments" "'$python' has no 'venv' or 'ensurepip' module" \
      "Debian, Ubuntu: apt-get install python3-venv"
  fi
  header=$("$python" -c 'import os, sysconfig; print(os.path.join(sysconfig.get_path("include"), "Python.h"))')
  if [ ! -f "$header" ]; then
    complain "no Python headers" "$header is not there" \
      "Debian, Ubuntu: apt-get install python3-dev; Fedora: dnf install python3-devel"
  fi
fi

if [ -z "$cxx" ]; then
  for candidate in c++ g++ clang++; do
    if command -v "$candidate" >/dev/null 2>&1; then
      cxx=$candidate
      break
    fi
  done
fi
if [ -z "$cxx" ] || ! command -v "$cxx" >/dev/null 2>&1; then
  if [ -n "$cxx" ]; then why="the command '$cxx' was not found"; else why="none of c++, g++, clang++ was found"; fi
  complain "no C++ compiler" "$why" \
    "Debian, Ubuntu: apt-get install g++; or name one: make CXX=/path/to/g++"
else
  work=$(mktemp -d) || exit 1
  trap 'rm -rf "$work"' EXIT
  probe=$(dirname "$0")/../cmake/cxx20_probe.cpp
  if ! "$cxx" -std=c++20 "$probe" -o "$work/probe" >"$work/log" 2>&1; then
    version=$("$cxx" --version 2>/dev/null | head -n 1)
    complain "the C++ compiler does not do C++20" "'$cxx' (${version:-unknown version}) could not compile cmake/cxx20_probe.cpp: $(grep -m 1 error "$work/log" || head -n 1 "$work/log")" \
      "use GCC 11 or Clang 16 or newer, with its standard library: make CXX=g++-12"
  fi
fi
exit $failed
