// Sums and extremes over a warp, and running sums over a warp or a block. All threads take part.
#pragma once

#include "types.cuh"

template <typename T>
static __device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) value += __shfl_xor_sync(kAllLanes, value, other);
  return value;
}

NETWEIGHT_DEVICE u64 warp_max(u64 value) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) {
    const u64 theirs = __shfl_xor_sync(kAllLanes, value, other);
    if (theirs > value) value = theirs;
  }
  return value;
}

// The sum of this lane's value and those of the lanes below it.
template <typename T>
static __device__ __forceinline__ T warp_running_sum(T value) {
#pragma unroll
  for (u32 below = 1; below < kWarp; below *= 2) {
    const T theirs = __shfl_up_sync(kAllLanes, value, below);
    if (lane_id() >= below) value += theirs;
  }
  return value;
}

// The sum of the values of the threads below this one, and to `total` that of all. `parts` is shared memory for a value per
// warp; it may be used again at once.
template <typename T>
static __device__ __forceinline__ T block_running_sum(T value, T* parts, T& total) {
  const T upto = warp_running_sum(value);
  if (lane_id() == kWarp - 1) parts[warp_id()] = upto;
  __syncthreads();
  T before = 0;
  total = 0;
  for (u32 w = 0; w < blockDim.x / kWarp; w++) {
    if (w == warp_id()) before = total;
    total += parts[w];
  }
  __syncthreads();
  return before + upto - value;
}
