#!/bin/sh
# Fuzzes the decoder of blobs: fuzz/run.sh [SECONDS], 120 if not said. Finds are left in build/fuzz/ and fail the run.
#
# Every input starts with a byte for the target (fuzz/decode_blob.cpp), so the golden blobs are copied with one in front. What
# an earlier run learned is kept in build/fuzz/corpus. FUZZ_WORK names another folder than build/fuzz, FUZZ_OPTIMIZE another
# optimization than -O1: -O0 compiles in a quarter of the time and fuzzes at a third of the speed.
set -eu
cd "$(dirname "$0")/.."
seconds=${1:-120}
work=${FUZZ_WORK:-build/fuzz}

compiler=$(command -v clang++ || true)
if [ -z "$compiler" ]; then
    echo "fuzz/run.sh needs clang++ with its runtime libraries: apt-get install clang libclang-rt-dev" >&2
    exit 2
fi
mkdir -p "$work/corpus"

# Compiled again only when something in native/ or the target is newer.
echo "src:*/third_party/*" >"$work/not_ours"
sanitize="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fsanitize-ignorelist=$work/not_ours"
base="-std=c++20 ${FUZZ_OPTIMIZE:--O1} -g1 -fno-omit-frame-pointer -Inative"
avx2=""
avx512=""
case $(uname -m) in
x86_64 | amd64)
    avx2="-mavx2 -mbmi -mbmi2 -mlzcnt -mpopcnt -maes"
    avx512="$avx2 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vbmi -mavx512vbmi2 -mvaes"
    ;;
esac
if [ ! -x "$work/decode_blob" ] || [ -n "$(find native fuzz -newer "$work/decode_blob" \( -name '*.cpp' -o -name '*.h' \))" ]; then
    echo "compiling the fuzzing target"
    objects=""
    for source in native/*.cpp fuzz/decode_blob.cpp; do
        case $source in
        native/bind.cpp | native/buffer_pool.cpp) continue ;;
        native/*_avx2.cpp) flags=$avx2 ;;
        native/*_avx512.cpp) flags=$avx512 ;;
        *) flags="" ;;
        esac
        object=$work/$(basename "$source" .cpp).o
        # shellcheck disable=SC2086  # lists of flags
        "$compiler" $base $sanitize -fsanitize=fuzzer-no-link $flags -c "$source" -o "$object"
        objects="$objects $object"
    done
    # shellcheck disable=SC2086
    if ! "$compiler" $sanitize -fsanitize=fuzzer $objects -pthread -o "$work/decode_blob"; then
        echo "fuzz/run.sh needs the runtime libraries of $compiler: apt-get install libclang-rt-dev" >&2
        exit 2
    fi
fi

rm -rf "$work/seeds"
mkdir "$work/seeds"
for blob in tests/golden/accept/*.nwt tests/golden/refuse/*.nwt; do
    name=$(basename "$(dirname "$blob")")-$(basename "$blob" .nwt)
    { printf '\001'; cat "$blob"; } >"$work/seeds/$name"
done

# Tensors of more than 4 MiB are skipped in the target, so that any large allocation is a find. Not by exec: a process that
# replaces another inherits its peak of memory, and with it that of whoever started this script.
"$work/decode_blob" -max_total_time="$seconds" -max_len=8192 \
    -rss_limit_mb=2048 -malloc_limit_mb=64 -timeout=20 -print_final_stats=1 -artifact_prefix="$work/" \
    "$work/corpus" "$work/seeds"
