#!/bin/sh
# Runs tests of the codec from Python, mutations among them, with the module compiled by gcc with sanitizers: fuzz/python.sh [PYTEST ARGUMENTS].
# So the bindings and the pool of buffers are covered, too, which fuzz/run.sh leaves out. FUZZ_WORK as there; PYTHON names the interpreter.
set -eu
cd "$(dirname "$0")/.."
work=${FUZZ_WORK:-build/fuzz}/python
python=$(command -v "${PYTHON:-python}")
[ $# -gt 0 ] || set -- tests/property/test_codec_mutations.py tests/property/test_codec_laws.py tests/unit/test_codec.py tests/unit/test_codec_queue.py

sanitize="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1 -O1"
mkdir -p "$work"
cmake -S . -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG= -DCMAKE_CXX_FLAGS="$sanitize" -DPython_EXECUTABLE="$python" \
    -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" -DSKBUILD_PROJECT_NAME=netweight -DSKBUILD_PROJECT_VERSION=0 >"$work.log"
cmake --build "$work/build" >>"$work.log"
rm -rf "$work/src"
cp -r src "$work/src"
find "$work/src" -name '_native*.so' -delete
find "$work/build" -name '_native*.so' -exec cp {} "$work/src/netweight/codec/" \;

# Python itself leaks by design; torch and numpy were compiled without sanitizers.
preload=$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libubsan.so):$(g++ -print-file-name=libstdc++.so.6)
LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 NETWEIGHT_REQUIRE_NATIVE=1 PYTHONPATH="$work/src" \
    "$python" -m pytest -q -p no:cacheprovider "$@"
