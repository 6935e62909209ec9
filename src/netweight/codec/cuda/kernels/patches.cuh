// Rare symbols and patches: corrections of symbols that a table does not hold, applied by one warp to its own stream.
#pragma once

#include "chunk.cuh"

constexpr u32 kMostRare = 14, kLiteral = 14, kSkip = 15;

// The list of rare symbols and what it needs of the chunk. Every lane holds one symbol.
struct RareSymbols {
  u32 count;
  u32 symbol;
};

// Reads a list that lies within the chunk as far as its first byte. Returns a reason for refusal, the same in all lanes.
NETWEIGHT_DEVICE u32 read_rare(const u8* at, u64 left, u32 symbol_bits, RareSymbols& rare) {
  static_assert(1 + 2 * kMostRare <= kWarp, "the list is read at once, a byte by each lane");
  const u32 byte = lane_id() < left ? at[lane_id()] : 0;
  rare.count = __shfl_sync(kAllLanes, byte, 0);
  const u32 low = __shfl_sync(kAllLanes, byte, static_cast<int>(1 + 2 * lane_id()) & 31);
  const u32 high = __shfl_sync(kAllLanes, byte, static_cast<int>(2 + 2 * lane_id()) & 31);
  rare.symbol = 0;
  if (rare.count > kMostRare) return kBadPatch;
  if (1 + 2 * rare.count > left) return kTruncated;
  if (lane_id() < rare.count) rare.symbol = low | high << 8;
  return __any_sync(kAllLanes, rare.symbol >> symbol_bits != 0) ? kBadPatch : 0;
}

// The order of a stream's elements in its plane.
struct StreamOrder {
  u32 streams, stream, width;

  __device__ __forceinline__ u32 element_at(u32 position) const {
    const u32 lane = position % 64, pair = place_in_row(lane & ~1u, width) + (lane & 1);
    return (position / 64 * streams + stream) * 64 + pair;
  }
};

// A lane's of the first patch words of a stream.
NETWEIGHT_DEVICE u32 first_patch_word(const u8* words, u32 count) { return lane_id() < count ? read_u16(words + 2 * lane_id()) : 0; }

// Applies `count` patch words of a stream, the first of which are loaded. Returns a reason for refusal, the same in all lanes.
NETWEIGHT_CALLED u32 apply_patches(const u8* words, u32 count, u32 first_word, RareSymbols rare, Split split, Plane plane, StreamOrder order) {
  const u32 mask = split.symbol_mask();
  constexpr u32 kBeyond = 1u << 24;  // more than any chunk has
  u32 next = 0;                      // position that a gap of one would reach
  bool carry = false;
  for (u32 first = 0; first < count; first += kWarp) {
    const u32 i = first + lane_id();
    const bool here = i < count;
    const u32 word = first == 0 ? first_word : here ? read_u16(words + 2 * i) : 0, code = word >> 12;
    const bool is_symbol = claimed_items(__ballot_sync(kAllLanes, here && code == kLiteral), carry) >> lane_id() & 1;
    const bool is_patch = here && !is_symbol;
    const u32 sum = inclusive_sum(is_patch ? (word & 0xfff) + 1 : 0);
    const u32 position = next + sum - 1;
    next = min(next + __shfl_sync(kAllLanes, sum, kWarp - 1), kBeyond);
    u32 symbol = __shfl_sync(kAllLanes, rare.symbol, static_cast<int>(code & 15));
    bool bad = false, changes = is_patch && code != kSkip;
    if (changes && code == kLiteral) {
      bad = i + 1 >= count;
      symbol = bad ? 0 : read_u16(words + 2 * (i + 1));
      bad = bad || symbol >> split.symbol_bits != 0;
    } else if (changes) {
      bad = code >= rare.count;
    }
    const u32 element = changes ? order.element_at(position) : 0;
    bad = bad || element >= plane.count;
    if (changes && !bad) plane.put(element, (plane.get(element) & ~mask) | symbol << split.symbol_shift);
    if (__any_sync(kAllLanes, bad)) return kBadPatch;
  }
  return 0;
}
