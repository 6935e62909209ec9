#!/bin/sh
# Runs the fuzzing target on blobs with the kernels of 64-bit ARM, under an emulator: fuzz/arm.sh ARGUMENTS..., those of
# fuzz/run_files.cpp. FUZZ_WORK names another folder than build/fuzz, FUZZ_OPTIMIZE another optimization than -O1, and
# QEMU_OPTIONS are the emulator's.
set -eu
native=$(dirname "$0")/../native
fuzz=$(dirname "$0")
work=${FUZZ_WORK:-$fuzz/../build/fuzz}/arm

for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
    command -v $tool >/dev/null || { echo "fuzz/arm.sh needs $tool: apt-get install g++-aarch64-linux-gnu qemu-user" >&2; exit 2; }
done
mkdir -p "$work"
if [ ! -x "$work/run_files" ] || [ -n "$(find "$native" "$fuzz" -newer "$work/run_files" \( -name '*.cpp' -o -name '*.h' \))" ]; then
    find "$native" "$fuzz" -maxdepth 1 -name '*.cpp' ! -name bind.cpp ! -name buffer_pool.cpp | xargs -P 2 -I{} sh -c '
        aarch64-linux-gnu-g++ -std=c++20 -march=armv8-a+crypto $2 -I"$3" -c "$1" -o "$4/$(basename "$1" .cpp).o"' - {} "${FUZZ_OPTIMIZE:--O1}" "$native" "$work"
    aarch64-linux-gnu-g++ "$work"/*.o -pthread -o "$work/run_files"
fi
# shellcheck disable=SC2086  # a list of options
exec qemu-aarch64 ${QEMU_OPTIONS:-} -L /usr/aarch64-linux-gnu "$work/run_files" "$@"
