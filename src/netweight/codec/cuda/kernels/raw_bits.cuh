// Bits that are stored next to entropy-coded streams, raw bits and tails: where a thread's lie and where they go.
#pragma once

#include "chunk.cuh"

// Puts raw bits where they stand, for two elements at once in the halves of a word.
struct RawPlacer {
  u32 spread, spread_rest;  // powers of two that move the second field of a pair to the upper half
  u32 low_mask;             // raw bits that stay
  u32 sign_factor, sign_mask;

  // `low` and `rest` hold a pair of fields each, from bit 0; higher bits may be anything.
  template <bool kRest>
  __device__ __forceinline__ u32 place(u32 low, u32 rest) const {
    u32 raw = __byte_perm(low, low * spread, 0x7610);
    if (kRest) raw = __byte_perm(raw, __byte_perm(rest, rest * spread_rest, 0x7610), 0x6240);
    return (raw & low_mask) | (raw * sign_factor & sign_mask);
  }
};

NETWEIGHT_DEVICE RawPlacer raw_placer(const Split& split, u32 low_bits, u32 rest_bits, u32 width) {
  RawPlacer placer;
  const u32 stay = split.raw_bits - (split.is_signed ? 1 : 0);
  placer.spread = 1u << (16 - low_bits);
  placer.spread_rest = 1u << (16 - rest_bits);
  placer.low_mask = ((1u << stay) - 1) * 0x10001u;
  placer.sign_factor = 1u << (8 * width - split.raw_bits);
  placer.sign_mask = split.is_signed ? (1u << (8 * width - 1)) * 0x10001u : 0;
  return placer;
}

// The lower two bytes of numbers of four, where their planes are raw or constant: then whole numbers are written at once.
struct Tails {
  bool merged;
  u64 at[2];     // address of a raw plane's elements
  u32 mask[2];   // 0 for a constant plane
  u32 value[2];  // of a constant plane, twice; else 0
};

// Looks at the planes that `left` bytes begin with. Reads nothing but their modes and constants.
NETWEIGHT_DEVICE void find_tails(const u8* from, u64 left, u32 count, Tails& tails) {
  tails.merged = true;
  for (u32 i = 0; i < 2 && tails.merged; i++) {
    const u32 mode = left ? from[0] : static_cast<u32>(kWideRans);
    const u64 bytes = mode == kRaw ? count : 1;
    tails.merged = (mode == kRaw || mode == kConstant) && left - 1 >= bytes;
    if (!tails.merged) return;
    tails.at[i] = address(from + 1);
    tails.mask[i] = mode == kRaw ? 0xffff : 0;
    tails.value[i] = mode == kRaw ? 0 : from[1] * 0x0101u;
    from += 1 + bytes;
    left -= 1 + bytes;
  }
}

// The words in which some bits of this thread stand, in every row of a stream. Only words that hold some of them are read;
// without any, a word of the chunk's is read in vain.
struct Window {
  const u32* first;
  bool crosses;  // whether the bits go on in the next word
  u32 shift;
  u32 row_words;

  __device__ __forceinline__ void start(u64 row, u32 from, u32 bits, u32 words_of_row, u64 readable) {
    const u32 bit = static_cast<u32>(row & 3) * 8 + from;
    first = reinterpret_cast<const u32*>(bits ? (row & ~3ull) + bit / 32 * 4 : (readable + 3) & ~3ull);
    shift = bit % 32;
    crosses = bits && shift + bits > 32;
    row_words = bits ? words_of_row : 0;
  }
  // A pair of fields of a region of field blocks.
  __device__ __forceinline__ void start_fields(const u8* region, u32 bits, u32 stream, u32 streams, u64 readable) {
    start(address(region) + stream * 8 * bits, 2 * bits * lane_id(), 2 * bits, streams * 2 * bits, readable);
  }
  // A pair of bytes of a tail.
  __device__ __forceinline__ void start_bytes(u64 plane, bool is_raw, u32 stream, u32 streams, u64 readable) {
    start(plane + stream * 64, 8 * place_in_row(2 * lane_id(), 2), is_raw ? 16 : 0, streams * 16, readable);
  }
  // What `high` was stays in it where the bits do not go on.
  __device__ __forceinline__ void load(u32 row, u32& low, u32& high) const {
    low = __ldg(first + static_cast<u64>(row) * row_words);
    if (crosses) high = __ldg(first + static_cast<u64>(row) * row_words + 1);
  }
  __device__ __forceinline__ void prefetch_row(u32 row) const { prefetch(address(first + static_cast<u64>(row) * row_words)); }
  __device__ __forceinline__ void advance(u32 rows) { first += static_cast<u64>(rows) * row_words; }
  // Whether so many rows from here on may be read.
  __device__ __forceinline__ bool readable(u32 rows, const Bounds& blob) const {
    return address(first + static_cast<u64>(rows) * row_words) + 8 <= blob.end;
  }
};
