// The modes constant and packed. Everything here is done by a whole block.
#pragma once

#include "encode_plane.cuh"
#include "reductions.cuh"

NETWEIGHT_DEVICE bool is_constant(const Plane& plane, u32* flag) {
  if (plane.count < 2) return false;
  const u32 first = plane.element(0);
  if (threadIdx.x == 0) *flag = 0;
  __syncthreads();
  for (u32 base = 0; base < plane.count; base += kThreads * kGroup) {
    const u32 i = base + threadIdx.x * kGroup;
    if (i < plane.count) {
      u32 v[kGroup], different = 0;
      plane.group_or(i, first, v);
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

NETWEIGHT_DEVICE u32 bits_used(const Plane& plane, u32 i) {
  u32 v[kGroup], used = 0;
  plane.group_or(i, 0, v);
#pragma unroll
  for (u32 k = 0; k < kGroup; k++) used |= v[k];
  return used;
}

// What write_packed would write. Eight lanes look at a block of 64 elements.
NETWEIGHT_DEVICE u32 packed_size(const Plane& plane, u32* parts) {
  u32 widths = 0;
  for (u32 base = 0; base < plane.count; base += kThreads * kGroup) {
    const u32 i = base + threadIdx.x * kGroup;
    u32 used = i < plane.count ? bits_used(plane, i) : 0;
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
    u32 used = 0;
    if (block < blocks)
      for (u32 group = 0; group < 8; group++)
        if (block * 64 + group * kGroup < plane.count) used |= bits_used(plane, block * 64 + group * kGroup);
    const u32 width = packed_width(used), neighbor = __shfl_down_sync(kAllLanes, width, 1);
    if (block < blocks && block % 2 == 0) out[1 + block / 2] = static_cast<u8>(width | neighbor << 4);
    u32 total = 0;
    u8* to = fields + 8 * block_running_sum(width, parts, total);
    for (u32 group = 0; group < 8 && width > 0; group++, to += width) {
      u32 v[kGroup];
      plane.group_or(block * 64 + group * kGroup, 0, v);
      u64 packed = 0;
#pragma unroll
      for (u32 k = 0; k < kGroup; k++) packed |= static_cast<u64>(v[k] >> (8 - width)) << width * k;
      for (u32 k = 0; k < width; k++) to[k] = static_cast<u8>(packed >> 8 * k);
    }
    fields += 8 * total;
  }
  return static_cast<u32>(fields - out);
}
