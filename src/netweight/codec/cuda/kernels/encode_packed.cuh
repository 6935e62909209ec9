// The modes constant and packed. Everything here is done by a whole block.
#pragma once

#include "encode_plane.cuh"
#include "reductions.cuh"

template <typename Load>
static __device__ __forceinline__ bool is_constant(Load, const Plane& plane, u32* flag) {
  if (plane.count < 2) return false;
  const u32 first = Load::element(plane, 0);
  if (threadIdx.x == 0) *flag = 0;
  __syncthreads();
  for (u32 base = 0; base < plane.count; base += kThreads * kGroup) {
    const u32 i = base + threadIdx.x * kGroup;
    if (i < plane.count) {
      u32 v[kGroup], different = 0;
      Load::group_or(plane, i, first, v);
#pragma unroll
      for (u32 k = 0; k < kGroup; k++) different |= v[k] ^ first;
      if (different != 0) *flag = 1;
    }
    __syncthreads();
    const bool found = *flag != 0;
    __syncthreads();
    if (found) return false;
  }
  return true;
}

NETWEIGHT_DEVICE u32 packed_blocks(const Plane& plane) { return (plane.count + 63) / 64; }

// 8 less the number of low bits that are zero in all of some bytes, which are ORed.
NETWEIGHT_DEVICE u32 packed_width(u32 used) { return used == 0 ? 0 : 9 - static_cast<u32>(__ffs(static_cast<int>(used))); }

template <typename Load>
static __device__ __forceinline__ u32 bits_used(Load, const Plane& plane, u32 i) {
  u32 v[kGroup], used = 0;
  Load::group_or(plane, i, 0, v);
#pragma unroll
  for (u32 k = 0; k < kGroup; k++) used |= v[k];
  return used;
}

// What write_packed would write. Eight lanes look at a block of 64 elements.
template <typename Load>
static __device__ __forceinline__ u32 packed_size(Load load, const Plane& plane, u32* parts) {
  u32 widths = 0;
  for (u32 base = 0; base < plane.count; base += kThreads * kGroup) {
    const u32 i = base + threadIdx.x * kGroup;
    u32 used = i < plane.count ? bits_used(load, plane, i) : 0;
    for (int other = 1; other < 8; other *= 2) used |= __shfl_xor_sync(kAllLanes, used, other);
    if (threadIdx.x % 8 == 0) widths += packed_width(used);
  }
  u32 total = 0;
  block_running_sum(widths, parts, total);
  return 1 + (packed_blocks(plane) + 1) / 2 + 8 * total;
}

// Writes a plane of one-byte elements, a thread for each block of 64; returns its size.
NETWEIGHT_DEVICE u32 write_packed(const Plane& plane, u8* out, u32* parts) {
  const u32 blocks = packed_blocks(plane);
  u8* fields = out + 1 + (blocks + 1) / 2;
  if (threadIdx.x == 0) out[0] = kPacked;
  for (u32 base = 0; base < blocks; base += kThreads) {
    const u32 block = base + threadIdx.x;
    const u32 first = block * 64, last = first + 64 < plane.count ? first + 64 : plane.count;
    u32 used = 0;
    for (u32 i = first; i < last; i++) used |= element_of(plane, i);
    const u32 width = packed_width(used), neighbor = __shfl_down_sync(kAllLanes, width, 1);
    if (block < blocks && block % 2 == 0) out[1 + block / 2] = static_cast<u8>(width | neighbor << 4);
    u32 total = 0;
    u8* to = fields + 8 * block_running_sum(width, parts, total);
    for (u32 group = 0; group < 8 && width > 0; group++, to += width) {
      u64 packed = 0;
      for (u32 k = 0; k < kGroup && first + group * kGroup + k < last; k++)
        packed |= static_cast<u64>(element_of(plane, first + group * kGroup + k) >> (8 - width)) << width * k;
      for (u32 k = 0; k < width; k++) to[k] = static_cast<u8>(packed >> 8 * k);
    }
    fields += 8 * total;
  }
  return static_cast<u32>(fields - out);
}
