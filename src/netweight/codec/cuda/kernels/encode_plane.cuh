// A plane of a chunk as the encoder sees it: elements in the tensor's own memory, and what is known of them beforehand.
#pragma once

#include "digest.cuh"

constexpr u32 kThreads = 128;  // of a block that encodes a plane or copies it
constexpr u32 kWarps = kThreads / kWarp;
constexpr u32 kGroup = 8;  // elements that are loaded together
constexpr u32 kCopiedAhead = 4;  // times 16 bytes that a thread reads before it writes them
constexpr u32 kRow = 64;  // lanes of a stream
constexpr u32 kMaxBins = 4096;  // of a histogram: symbols have at most 12 bits
constexpr u32 kRawBit = 0x80000000u;  // in a plane's size: it is raw and was not written
constexpr u32 kSizeBits = 28;  // of a plane's size; those between it and kRawBit say how many bytes into its slot the plane begins

NETWEIGHT_DEVICE u32 size_of(u32 noted) { return noted & ((1u << kSizeBits) - 1); }
NETWEIGHT_DEVICE u32 skipped_bytes(u32 noted) { return noted >> kSizeBits & 7; }

enum Mode : u8 { kRaw = 0, kConstant = 1, kPacked = 2, kRans = 3 };

// The splits worth trying, from the widest symbol to the narrowest, by their raw bits.
struct SplitRange {
  u32 least, most;
  bool signed_raw;  // the top bit is raw: floats
  bool tail;        // lower bytes of wider numbers: usually noise
};

// Element i is `8 * unit` bits, from bit `shift` on, of the word of min(number_bytes, 4) bytes at `at + i * number_bytes`.
struct Plane {
  const u8* at;
  u32 number_bytes;  // 1, 2, 4 or 8; 16 divides the address of number 0
  u32 shift;
  u32 unit;   // bytes of an element, 1 or 2
  u32 count;  // elements

  __device__ __forceinline__ u32 bytes() const { return count * unit; }
  __device__ __forceinline__ bool dense() const { return number_bytes == unit; }
  __device__ __forceinline__ u32 part(u32 word) const { return word >> shift & (unit == 1 ? 0xffu : 0xffffu); }
};

// A thread's two elements as they were loaded: a value that is not looked at need not have arrived.
struct LoadedPair {
  u32 first, second;
};

// Elements of planes whose numbers have kBytes bytes.
template <u32 kBytes>
struct Loads {
  static __device__ __forceinline__ u32 element(const Plane& plane, u32 i) {
    if constexpr (kBytes == 1) return plane.at[i];
    else if constexpr (kBytes == 2) return reinterpret_cast<const u16*>(plane.at)[i];
    else return plane.part(*reinterpret_cast<const u32*>(plane.at + kBytes * i));
  }

  // Elements i and i + 1, where i is even; `unpacked` gives the first one in the lower half of a word.
  static __device__ __forceinline__ LoadedPair pair(const Plane& plane, u32 i) {
    if constexpr (kBytes == 1) return {reinterpret_cast<const u16*>(plane.at)[i / 2], 0};
    else if constexpr (kBytes == 2) return {reinterpret_cast<const u32*>(plane.at)[i / 2], 0};
    else return {*reinterpret_cast<const u32*>(plane.at + kBytes * i), *reinterpret_cast<const u32*>(plane.at + kBytes * (i + 1))};
  }
  static __device__ __forceinline__ u32 unpacked(const Plane& plane, LoadedPair pair) {
    if constexpr (kBytes == 1) return (pair.first & 0xff) | (pair.first & 0xff00) << 8;
    else if constexpr (kBytes == 2) return pair.first;
    else return plane.part(pair.first) | plane.part(pair.second) << 16;
  }

  // Elements i to i + 7, where 8 divides i.
  static __device__ __forceinline__ void group(const Plane& plane, u32 i, u32* v) {
    if constexpr (kBytes == 1) {
      const uint2 all = reinterpret_cast<const uint2*>(plane.at)[i / 8];
#pragma unroll
      for (u32 k = 0; k < kGroup; k++) v[k] = (k < 4 ? all.x : all.y) >> 8 * (k % 4) & 0xff;
    } else if constexpr (kBytes == 2) {
      const uint4 all = reinterpret_cast<const uint4*>(plane.at)[i / 8];
      const u32 words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
      for (u32 k = 0; k < kGroup; k++) v[k] = words[k / 2] >> 16 * (k % 2) & 0xffff;
    } else if constexpr (kBytes == 4) {
      const uint4 lower = reinterpret_cast<const uint4*>(plane.at)[i / 4], upper = reinterpret_cast<const uint4*>(plane.at)[i / 4 + 1];
      const u32 words[8] = {lower.x, lower.y, lower.z, lower.w, upper.x, upper.y, upper.z, upper.w};
#pragma unroll
      for (u32 k = 0; k < kGroup; k++) v[k] = plane.part(words[k]);
    } else {
#pragma unroll
      for (u32 k = 0; k < kGroup; k++) v[k] = element(plane, i + k);
    }
  }

  // The same, where elements beyond the end are `beyond`.
  static __device__ __forceinline__ void group_or(const Plane& plane, u32 i, u32 beyond, u32* v) {
    if (i + kGroup <= plane.count) return group(plane, i, v);
#pragma unroll
    for (u32 k = 0; k < kGroup; k++) v[k] = i + k < plane.count ? element(plane, i + k) : beyond;
  }
};

// Calls work(Loads<...>{}) for what fits a plane, so that loops are compiled for each kind and need not ask.
template <typename Work>
static __device__ __forceinline__ auto with_loads(const Plane& plane, Work work) {
  if (plane.number_bytes == 1) return work(Loads<1>{});
  if (plane.number_bytes == 2) return work(Loads<2>{});
  return plane.number_bytes == 4 ? work(Loads<4>{}) : work(Loads<8>{});
}

// One element, where speed is no matter.
NETWEIGHT_DEVICE u32 element_of(const Plane& plane, u32 i) {
  const u8* p = plane.at + static_cast<u64>(i) * plane.number_bytes;
  return plane.part(plane.number_bytes == 1 ? *p : plane.number_bytes == 2 ? *reinterpret_cast<const u16*>(p) : *reinterpret_cast<const u32*>(p));
}

NETWEIGHT_DEVICE u8 byte_of(const Plane& plane, u32 i) {
  return static_cast<u8>(plane.unit == 1 ? element_of(plane, i) : element_of(plane, i / 2) >> 8 * (i % 2));
}

// ---- copying ---------------------------------------------------------------------------------------------------------

// Sixteen bytes from an address of any alignment. Only words of four bytes are touched that hold one of them.
NETWEIGHT_DEVICE uint4 read_16(const u8* p) {
  const u32 odd = static_cast<u32>(reinterpret_cast<u64>(p)) & 3;
  const u32* words = reinterpret_cast<const u32*>(p - odd);
  const u32 a = words[0], b = words[1], c = words[2], d = words[3], e = odd == 0 ? 0 : words[4], pick = 0x3210 + 0x1111 * odd;
  return make_uint4(__byte_perm(a, b, pick), __byte_perm(b, c, pick), __byte_perm(c, d, pick), __byte_perm(d, e, pick));
}

// Copies bytes between addresses of any alignment; `worker` of `workers` threads does its share. The pointers are not
// __restrict__: what the block itself has written must not be read through the cache for constant data.
NETWEIGHT_DEVICE void copy_bytes(u8* to, const u8* from, u32 size, u32 worker, u32 workers) {
  const u32 whole = bytes_to_alignment(to, 16), head = whole < size ? whole : size;
  const u32 quads = (size - head) / 16, done = head + 16 * quads;
  for (u32 i = worker; i < head; i += workers) to[i] = from[i];
  for (u32 base = worker; base < quads; base += kCopiedAhead * workers) {
    uint4 ahead[kCopiedAhead];
#pragma unroll
    for (u32 k = 0; k < kCopiedAhead; k++) ahead[k] = read_16(from + head + 16 * (base + k * workers < quads ? base + k * workers : base));
#pragma unroll
    for (u32 k = 0; k < kCopiedAhead; k++)
      if (base + k * workers < quads) *reinterpret_cast<uint4*>(to + head + 16 * (base + k * workers)) = ahead[k];
  }
  for (u32 i = done + worker; i < size; i += workers) to[i] = from[i];
}
