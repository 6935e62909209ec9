// A plane of a chunk as the encoder sees it: elements in the tensor's own memory, and what is known of them beforehand.
#pragma once

#include "digest.cuh"

constexpr u32 kThreads = 256;  // of a block of every kernel that encodes
constexpr u32 kWarps = kThreads / kWarp;
constexpr u32 kGroup = 8;    // elements that are loaded together
constexpr u32 kRow = 64;     // lanes of a stream
constexpr u32 kMaxBins = 4096;  // of a histogram: symbols have at most 12 bits
constexpr u32 kRawBit = 0x80000000u;  // in a plane's size: it is raw and was not written

enum Mode : u8 { kRaw = 0, kConstant = 1, kPacked = 2, kRans = 3 };

// The splits worth trying, from the widest symbol to the narrowest, by their raw bits.
struct SplitRange {
  u32 least, most;
  bool signed_raw;  // the top bit is raw: floats
  bool tail;        // lower bytes of wider numbers: usually noise
};

// Element i is `8 * unit` bits of number i, from bit `shift` on.
struct Plane {
  const u8* numbers;
  u32 number_bytes;  // 1, 2, 4 or 8, which divide the address
  u32 shift;
  u32 unit;   // bytes of an element, 1 or 2
  u32 count;  // elements
  bool aligned;  // 16 divides the address

  __device__ __forceinline__ u32 bytes() const { return count * unit; }
  __device__ __forceinline__ bool dense() const { return number_bytes == unit; }
  __device__ __forceinline__ u32 mask() const { return unit == 1 ? 0xffu : 0xffffu; }

  template <u32 kBytes>
  __device__ __forceinline__ u32 element_of(u32 i) const {
    if (kBytes == 1) return numbers[i];
    if (kBytes == 2) return reinterpret_cast<const u16*>(numbers)[i];
    if (kBytes == 4) return reinterpret_cast<const u32*>(numbers)[i] >> shift & mask();
    return static_cast<u32>(reinterpret_cast<const u64*>(numbers)[i] >> shift) & mask();
  }
  __device__ __forceinline__ u32 element(u32 i) const {
    if (number_bytes == 1) return element_of<1>(i);
    if (number_bytes == 2) return element_of<2>(i);
    return number_bytes == 4 ? element_of<4>(i) : element_of<8>(i);
  }

  // Elements i and i + 1, in the lower and the upper half; i is even.
  template <u32 kBytes>
  __device__ __forceinline__ u32 pair_of(u32 i) const {
    if (aligned && kBytes == 1) {
      const u32 both = reinterpret_cast<const u16*>(numbers)[i / 2];
      return (both & 0xff) | (both & 0xff00) << 8;
    }
    if (aligned && kBytes == 2) return reinterpret_cast<const u32*>(numbers)[i / 2];
    return element_of<kBytes>(i) | element_of<kBytes>(i + 1) << 16;
  }

  // Elements i to i + 7; 8 divides i.
  __device__ __forceinline__ void group(u32 i, u32* v) const {
    if (aligned && number_bytes == 1) {
      const uint2 all = reinterpret_cast<const uint2*>(numbers)[i / 8];
#pragma unroll
      for (u32 k = 0; k < kGroup; k++) v[k] = (k < 4 ? all.x : all.y) >> 8 * (k % 4) & 0xff;
      return;
    }
    if (aligned && number_bytes == 2) {
      const uint4 all = reinterpret_cast<const uint4*>(numbers)[i / 8];
      const u32 words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
      for (u32 k = 0; k < kGroup; k++) v[k] = words[k / 2] >> 16 * (k % 2) & 0xffff;
      return;
    }
#pragma unroll
    for (u32 k = 0; k < kGroup; k++) v[k] = element(i + k);
  }

  // The same, where elements beyond the end are `beyond`.
  __device__ __forceinline__ void group_or(u32 i, u32 beyond, u32* v) const {
    if (i + kGroup <= count) return group(i, v);
#pragma unroll
    for (u32 k = 0; k < kGroup; k++) v[k] = i + k < count ? element(i + k) : beyond;
  }

  __device__ __forceinline__ u8 byte(u32 i) const {
    return static_cast<u8>(unit == 1 ? element(i) : element(i / 2) >> 8 * (i % 2));
  }
};

// ---- copying ---------------------------------------------------------------------------------------------------------

// Sixteen bytes from an address of any alignment. Only words of four bytes are touched that hold one of them.
NETWEIGHT_DEVICE uint4 read_16(const u8* p) {
  const u32 odd = static_cast<u32>(reinterpret_cast<u64>(p)) & 3;
  const u32* words = reinterpret_cast<const u32*>(p - odd);
  const u32 a = words[0], b = words[1], c = words[2], d = words[3], e = odd == 0 ? 0 : words[4], pick = 0x3210 + 0x1111 * odd;
  return make_uint4(__byte_perm(a, b, pick), __byte_perm(b, c, pick), __byte_perm(c, d, pick), __byte_perm(d, e, pick));
}

// Copies bytes between addresses of any alignment; `worker` of `workers` threads does its share.
NETWEIGHT_DEVICE void copy_bytes(u8* to, const u8* from, u32 size, u32 worker, u32 workers) {
  const u32 whole = bytes_to_alignment(to, 16), head = whole < size ? whole : size;
  const u32 quads = (size - head) / 16, done = head + 16 * quads;
  for (u32 i = worker; i < head; i += workers) to[i] = from[i];
  for (u32 i = worker; i < quads; i += workers) *reinterpret_cast<uint4*>(to + head + 16 * i) = read_16(from + head + 16 * i);
  for (u32 i = done + worker; i < size; i += workers) to[i] = from[i];
}
