// The modes raw, constant and packed: planes without entropy coding, by all threads of a block.
#pragma once

#include "chunk.cuh"

// Copies bytes; 16 of them at once where the output has room for whole, aligned ones.
NETWEIGHT_DEVICE void copy_bytes(const u8* from, u64 count, u8* to, const Bounds& blob) {
  const u64 head = min(count, static_cast<u64>(bytes_to_alignment(to, 16))), units = (count - head) / 16;
  if (threadIdx.x < head) to[threadIdx.x] = from[threadIdx.x];
  const u64 source = address(from) + head;
  const u32 shift = static_cast<u32>(source & 3) * 8;
  for (u64 unit = threadIdx.x; unit < units; unit += blockDim.x) {
    const u64 at = source + 16 * unit;
    u8* target = to + head + 16 * unit;
    const u64 end = shift ? at + 20 : at + 16;
    if ((end & ~3ull) > blob.end) {  // the last words hold bytes beyond the blob
      for (u32 i = 0; i < 16; i++) target[i] = *reinterpret_cast<const u8*>(at + i);
      continue;
    }
    const u32* words = reinterpret_cast<const u32*>(at & ~3ull);
    u32 w[5];
#pragma unroll
    for (u32 i = 0; i < 4; i++) w[i] = __ldg(words + i);
    w[4] = shift ? __ldg(words + 4) : 0;
    *reinterpret_cast<uint4*>(target) = make_uint4(__funnelshift_r(w[0], w[1], shift), __funnelshift_r(w[1], w[2], shift),
                                                   __funnelshift_r(w[2], w[3], shift), __funnelshift_r(w[3], w[4], shift));
  }
  for (u64 i = head + 16 * units + threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}

// Raw and constant planes, whose bytes are there, of which the first `done` elements need not be written (0 if they lie next
// to each other). Both give the plane's bytes after the mode.
NETWEIGHT_CALLED u64 decode_raw(const u8* from, Plane plane, u32 done, Bounds blob) {
  const u64 bytes = static_cast<u64>(plane.count) * plane.width;
  if (plane.contiguous()) {
    copy_bytes(from, bytes, plane.out, blob);
  } else {
    for (u32 i = done + threadIdx.x; i < plane.count; i += blockDim.x) plane.put(i, plane.width == 1 ? from[i] : read_u16(from + 2 * i));
  }
  return bytes;
}

NETWEIGHT_CALLED u64 decode_constant(const u8* from, Plane plane, u32 done) {
  const u32 value = plane.width == 1 ? from[0] : read_u16(from);
  const u32 word = plane.width == 1 ? value * 0x01010101u : value * 0x00010001u;
  u32 first = 0, units = 0;  // elements before the aligned ones, and the number of 16 bytes of these
  if (plane.contiguous()) {
    first = min(plane.count, bytes_to_alignment(plane.out, 16) / plane.width);
    units = (plane.count - first) / (16 / plane.width);
    uint4* target = reinterpret_cast<uint4*>(plane.at(first));
    for (u32 unit = threadIdx.x; unit < units; unit += blockDim.x) target[unit] = make_uint4(word, word, word, word);
  }
  for (u32 i = threadIdx.x; i < first; i += blockDim.x) plane.put(i, value);
  for (u32 i = done + first + units * (16 / plane.width) + threadIdx.x; i < plane.count; i += blockDim.x) plane.put(i, value);
  return plane.width;
}

// A packed plane. Every warp adds up all widths and decodes its share of blocks. Gives the bytes after the mode; returns a
// reason for refusal, the same in all threads.
NETWEIGHT_CALLED u32 decode_packed(const u8* from, u64 left, Plane plane, u64& size) {
  if (plane.width != 1) return kBadPacked;
  const u32 blocks = (plane.count + 63) / 64, lane = lane_id(), warps = blockDim.x / kWarp;
  const u8* widths = from;
  size = (blocks + 1) / 2;
  if (size > left) return kTruncated;
  for (u32 first = 0; first < blocks; first += kWarp) {
    const u32 block = first + lane;
    const u32 width = block < blocks ? widths[block / 2] >> block % 2 * 4 & 15 : 0;
    if (__any_sync(kAllLanes, width > 8)) return kBadPacked;
    const u32 sum = inclusive_sum(8 * width), total = __shfl_sync(kAllLanes, sum, kWarp - 1);
    if (size + total > left) return kTruncated;
    for (u32 k = 0; k < min(kWarp, blocks - first); k++) {
      const u32 bits = __shfl_sync(kAllLanes, width, static_cast<int>(k)), end = __shfl_sync(kAllLanes, sum, static_cast<int>(k));
      if (k % warps != warp_id()) continue;
      const u32 pair = field_pair(from + size + end - 8 * bits, bits, lane), element = (first + k) * 64 + 2 * lane;
      const u32 mask = (1u << bits) - 1, shift = 8 - bits;
      if (element < plane.count) plane.put(element, (pair & mask) << shift);
      if (element + 1 < plane.count) plane.put(element + 1, (pair >> bits & mask) << shift);
    }
    size += total;
  }
  return 0;
}
