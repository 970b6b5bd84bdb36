#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
#
# Print linker flags by which this system's GCC links for the glibc of manylinux_2_28, whatever glibc is here: the
# symbols of that glibc come from zig, libstdc++ is linked in, and what neither has is defined beside. `make wheel`:
#
#     cmake -DCMAKE_MODULE_LINKER_FLAGS="$(tools/old_glibc.sh FOLDER PYTHON-WITH-ZIGLANG)" ...
set -euo pipefail
mkdir -p "$1"
folder=$(realpath "$1") python=$2
export ZIG_GLOBAL_CACHE_DIR=$folder/zig ZIG_LOCAL_CACHE_DIR=$folder/zig
echo 'int main(void) { return 0; }' >"$folder/empty.c"
"$python" -m ziglang cc -target "$(uname -m)-linux-gnu.2.28" "$folder/empty.c" -o "$folder/empty" -lpthread -ldl -lm >&2
libraries=$(dirname "$(find "$folder/zig" -name libc.so.6 | head -n 1)")
for library in c m pthread dl rt ld; do
  cp "$libraries/lib$library".so.* "$folder/lib$library.so"
done
rm -rf "$folder/zig"
cat >"$folder/missing.c" <<'C'
#include <stdlib.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

extern int __cxa_atexit(void (*call)(void*), void* argument, void* module);
extern void* __dso_handle;
#define HIDDEN __attribute__((visibility("hidden")))

HIDDEN char __libc_single_threaded = 0;
HIDDEN int atexit(void (*call)(void)) { return __cxa_atexit((void (*)(void*))call, 0, __dso_handle); }
HIDDEN unsigned arc4random(void) {
  unsigned value = 0;
  if (getrandom(&value, sizeof value, 0) != sizeof value) abort();
  return value;
}
HIDDEN int fstat64(int file, void* facts) { return (int)syscall(SYS_fstat, file, facts); }
C
missing=$folder/missing-$(sha256sum "$folder/missing.c" | cut -c1-8).o # another name links again
"${CC:-gcc}" -O2 -fPIC -Wno-builtin-declaration-mismatch -c "$folder/missing.c" -o "$missing" >&2
echo "-L$folder -static-libstdc++ $missing -Wl,--allow-shlib-undefined" \
  "-Wl,--push-state,--no-as-needed -lpthread -ldl -lm -lld -Wl,--pop-state"
