#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
#
# Fetches the C headers of ONNX Runtime, with which `_core` is built to hold our kernels as its custom operators.
# Usage: tools/fetch_onnxruntime_headers.sh [FOLDER]      (default: build/onnxruntime-headers)
#
# They come from Debian's package libonnxruntime-dev, from the mirror that apt on this machine is set up with; apt checks
# the signature. Needs no root and changes nothing outside of FOLDER: apt works in a temporary folder. Nothing is
# linked: the headers are versioned, and every ONNX Runtime from API version 21 on serves what is asked for there.
#   XPURUNTIME_DEBIAN_MIRROR   the mirror, where apt is not set up with one of Debian
#   XPURUNTIME_DEBIAN_KEYRING  the file of Debian's keys, where apt's own settings name none
#   XPURUNTIME_DEBIAN_SUITE    the release, trixie unless said otherwise
set -u
LC_ALL=C
export LC_ALL
folder=${1:-build/onnxruntime-headers}
suite=${XPURUNTIME_DEBIAN_SUITE:-trixie}
mirror=${XPURUNTIME_DEBIAN_MIRROR:-}
keyring=${XPURUNTIME_DEBIAN_KEYRING:-}
package=libonnxruntime-dev
lowest=21

fail() { # reason, fix
  printf 'the headers of ONNX Runtime cannot be fetched into %s\n  reason: %s\n  fix:    %s\n' "$folder" "$1" "$2" >&2
  exit 1
}

by_hand="unpack onnxruntime_c_api.h of ONNX Runtime 1.21 or newer into a folder and build with -DXPURUNTIME_ONNXRUNTIME_INCLUDE_DIR=that folder"
for tool in apt-get dpkg-deb; do
  command -v "$tool" >/dev/null 2>&1 || fail "there is no $tool: this is no Debian or Ubuntu" "$by_hand"
done

if [ -z "$mirror" ]; then
  # shellcheck disable=SC2016  # apt fills in the fields
  targets=$(apt-get indextargets --format '$(REPO_URI) $(ORIGIN) $(COMPONENT) $(SIGNED_BY)' 'Created-By: Packages' 2>/dev/null)
  # Sources that were never updated are not listed with an origin: then the address has to tell.
  found=$(printf '%s\n' "$targets" | awk '$1 ~ /\/debian\/?$/ && ($3 == "main" || $2 == "main") {print; exit}')
  mirror=${found%% *}
  for word in $found; do
    case $word in /*) [ -n "$keyring" ] || keyring=$word ;; esac
  done
fi
[ -n "$mirror" ] || fail "apt on this machine is set up with no mirror of Debian" \
  "name one in XPURUNTIME_DEBIAN_MIRROR (and its keys in XPURUNTIME_DEBIAN_KEYRING), or $by_hand"
if [ -z "$keyring" ] && [ -f /usr/share/keyrings/debian-archive-keyring.gpg ]; then
  keyring=/usr/share/keyrings/debian-archive-keyring.gpg
fi
[ -z "$keyring" ] || [ -f "$keyring" ] || fail "the keyring $keyring is not there" \
  "install the package debian-archive-keyring, or name the file in XPURUNTIME_DEBIAN_KEYRING"

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
mkdir -p "$work/etc" "$work/state/lists/partial" "$work/cache/archives/partial" "$work/out" "$work/tree"
: >"$work/state/status"
printf 'deb %s%s %s main\n' "${keyring:+[signed-by=$keyring] }" "$mirror" "$suite" >"$work/etc/sources.list"

private_apt() {
  apt-get -q -o "Dir::Etc::sourcelist=$work/etc/sources.list" -o Dir::Etc::sourceparts=- \
    -o "Dir::State=$work/state" -o "Dir::State::status=$work/state/status" -o "Dir::Cache=$work/cache" \
    -o "APT::Sandbox::User=$(id -un)" -o APT::Get::List-Cleanup=0 -o Acquire::Languages=none -o Acquire::Retries=2 "$@"
}
last() { grep -E '^[EW]:' "$work/log" | head -n 3 | tr '\n' ' '; }

private_apt update >"$work/log" 2>&1 && ! grep -qE '^(E|Err|W: Failed)' "$work/log" ||
  fail "the list of packages of '$suite' could not be had from $mirror: $(last)" \
    "check the network and the mirror, or name another in XPURUNTIME_DEBIAN_MIRROR"
(cd "$work/out" && private_apt download "$package") >"$work/log" 2>&1 ||
  fail "$package of '$suite' could not be had from $mirror: $(last)" \
    "name a release that has it in XPURUNTIME_DEBIAN_SUITE, or $by_hand"
dpkg-deb -x "$work"/out/*.deb "$work/tree" >"$work/log" 2>&1 ||
  fail "$package could not be unpacked: $(head -n 1 "$work/log")" "run it again"

header=$(find "$work/tree" -name onnxruntime_c_api.h | head -n 1)
[ -n "$header" ] || fail "$package of '$suite' holds no onnxruntime_c_api.h" "$by_hand"
version=$(sed -n 's/^#define ORT_API_VERSION \([0-9][0-9]*\).*/\1/p' "$header")
[ -n "$version" ] || fail "onnxruntime_c_api.h of '$suite' names no ORT_API_VERSION" "$by_hand"
[ "$version" -ge "$lowest" ] || fail "$package of '$suite' has API version $version, and $lowest is needed" \
  "name a newer release in XPURUNTIME_DEBIAN_SUITE"

unwritable() { fail "the folder cannot be written" "name another: tools/fetch_onnxruntime_headers.sh FOLDER"; }
mkdir -p "$folder" 2>/dev/null || unwritable
# With the C header those that it includes in later versions. Moved into place, so that none is ever half there.
for file in "$(dirname "$header")"/onnxruntime_*c_api.h; do
  name=$(basename "$file")
  cp "$file" "$folder/.$name.$$" 2>/dev/null && mv "$folder/.$name.$$" "$folder/$name" || unwritable
done
printf 'ONNX Runtime, API version %s: %s\n' "$version" "$folder"
