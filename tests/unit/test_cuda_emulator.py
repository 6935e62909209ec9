"""The emulator of CUDA that other tests stand on: collectives give what CUDA documents, and faults are caught."""

import emulated_kernels
import numpy as np
import pytest
from emulated_kernels import KernelFault, guarded, launch

SOURCE = r"""
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(128) collectives(u32* out) {
  u32 i = threadIdx.x, at = blockIdx.x * blockDim.x + i;
  u32 odd = __ballot_sync(kAllLanes, i & 1);
  u32 rotated = __shfl_sync(kAllLanes, i, (i + 1) & 31);
  u32 sum = i;
  for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(kAllLanes, sum, d);
  u32 above = __shfl_up_sync(kAllLanes, i, 2);
  u64 wide = __shfl_down_sync(kAllLanes, static_cast<u64>(i) << 40, 1);
  out[at * 5 + 0] = odd;
  out[at * 5 + 1] = rotated;
  out[at * 5 + 2] = sum;
  out[at * 5 + 3] = above;
  out[at * 5 + 4] = static_cast<u32>(wide >> 40);
}

extern "C" __global__ void reverse_block(const u32* in, u32* out, i64 synchronized) {
  __shared__ u32 buffer[128];
  buffer[threadIdx.x] = in[threadIdx.x];
  if (synchronized) __syncthreads();
  out[threadIdx.x] = buffer[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void scalars(u8 a, i32 b, float c, double d, i64 e, double* out) {
  if (threadIdx.x == 0) out[0] = a + b + c + d + static_cast<double>(e);
}

extern "C" __global__ void part_ways(u32* out, i64 where) {
  if (where == 0 && lane_id() == 3) return;
  if (where == 1 && threadIdx.x >= 32) return;
  if (where == 2 && lane_id() < 16) out[0] = __ballot_sync(kAllLanes, 1);
  if (where == 3) out[0] = __ballot_sync(0xffff, 1);
  __syncthreads();
}

extern "C" __global__ void touch(u8* bytes, i64 at, i64 kind) {
  __shared__ u32 words[8];
  if (threadIdx.x == 0) {
    if (kind == 0) bytes[at] = 1;
    if (kind == 1) *reinterpret_cast<u32*>(bytes + at) = 1;
    if (kind == 2) bytes[0] = static_cast<u8>(words[at]);
    if (kind == 3) bytes[0] = static_cast<u8>(1u << at);
  }
}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "emulated.cu"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("backwards", [False, True])
def test_collectives(file, backwards):
    out = np.zeros((3, 128, 5), np.uint32)
    launch(file, "collectives", 3, 128, [out], backwards=backwards)
    i = np.arange(128)
    lane, first = i % 32, i // 32 * 32
    wanted = [
        np.full(128, 0xAAAAAAAA),
        first + (i + 1) % 32,
        32 * first + 496,
        np.where(lane < 2, i, i - 2),
        np.where(lane == 31, i, i + 1),
    ]
    assert (out == np.stack(wanted, axis=1)).all()


@pytest.mark.parametrize("backwards", [False, True])
def test_shared_memory_needs_a_barrier(file, backwards):
    values = np.arange(128, dtype=np.uint32)
    for synchronized in (1, 0):
        out = np.zeros(128, np.uint32)
        launch(file, "reverse_block", 1, 128, [values, out, synchronized], backwards=backwards)
        assert np.array_equal(out, values[::-1]) == bool(synchronized)


def test_arguments_keep_their_types(file):
    out = np.zeros(1)
    launch(file, "scalars", 1, 32, [np.uint8(1), np.int32(-3), np.float32(0.5), 0.25, 1 << 40, out])
    assert out[0] == 2.0**40 - 1.25
    with pytest.raises(KernelFault, match="number and sizes"):
        launch(file, "scalars", 1, 32, [1, np.int32(-3), np.float32(0.5), 0.25, 1 << 40, out])


@pytest.mark.parametrize("where", range(4))
def test_threads_that_part_ways_are_found(file, where):
    with pytest.raises(KernelFault, match="the mask is not full" if where == 3 else "part ways at a collective"):
        launch(file, "part_ways", 1, 64, [np.zeros(1, np.uint32), where])
    launch(file, "part_ways", 1, 64, [np.zeros(1, np.uint32), 9])


def test_foreign_memory_is_found(file):
    for size in (1, 100, 4096, 5000):
        for at, first_bad in (("end", size), ("start", -1)):
            array = guarded(np.zeros(size, np.uint8), at=at)
            launch(file, "touch", 1, 32, [array, size - 1, 0])
            assert array[-1] == 1
            with pytest.raises(KernelFault, match="touches memory"):
                launch(file, "touch", 1, 32, [array, first_bad, 0])


@pytest.mark.parametrize(("kind", "good", "bad"), [(1, 4, 6), (2, 7, 8), (3, 31, 32)])
def test_what_differs_between_machines_is_found(file, kind, good, bad):
    array = guarded(np.zeros(64, np.uint8), alignment=16)
    launch(file, "touch", 1, 32, [array, good, kind])
    with pytest.raises(KernelFault, match="compiler's checks"):
        launch(file, "touch", 1, 32, [array, bad, kind])


def test_names_of_kernels_are_found():
    assert emulated_kernels.entries(SOURCE) == ["collectives", "reverse_block", "scalars", "part_ways", "touch"]
