// The wide_rans mode: one stream of 32 lanes, which one warp decodes. Only the level "max" writes it; it is slower by nature.
#pragma once

#include "patches.cuh"

constexpr u32 kMostWideSymbols = 1024, kWideSlots = 4096, kSlotsPerGroup = 16;

// The table, where other modes have their streams' rings.
struct WideTable {
  u16 symbol[kMostWideSymbols];
  u16 start[kMostWideSymbols + 8];        // and, behind the last symbol's, kWideSlots
  u16 first[kWideSlots / kSlotsPerGroup];  // the symbol of every 16th slot, by its index
};
static_assert(sizeof(WideTable) <= sizeof(Shared::rings), "the rings have no room for the wide table");

// Reads the runs of symbols. The bytes that were read are added to `used`. Returns a reason for refusal, the same in all lanes.
NETWEIGHT_DEVICE u32 read_wide_symbols(const u8* from, u64 left, u32 symbol_bits, WideTable& table, u32& count, u64& used) {
  if (used + 2 > left) return kTruncated;
  const u32 runs = read_u16(from + used);
  used += 2;
  count = 0;
  if (runs > kMostWideSymbols) return kBadTable;
  if (used + 4 * runs > left) return kTruncated;
  u32 following = 0;
  for (u32 first = 0; first < runs; first += kWarp) {
    const u32 i = first + lane_id();
    const bool here = i < runs;
    const u32 base = here ? read_u16(from + used + 4 * i) : 0, length = here ? read_u16(from + used + 4 * i + 2) : 0;
    const u32 end = base + length, end_before = __shfl_up_sync(kAllLanes, end, 1), least = lane_id() == 0 ? following : end_before;
    const u32 sum = inclusive_sum(length);
    const bool bad = here && (length == 0 || base < least || end > 1u << symbol_bits || count + sum > kMostWideSymbols);
    if (__any_sync(kAllLanes, bad)) return kBadTable;
    for (u32 k = 0; k < length; k++) table.symbol[count + sum - length + k] = static_cast<u16>(base + k);
    count += __shfl_sync(kAllLanes, sum, kWarp - 1);
    following = __shfl_sync(kAllLanes, end, kWarp - 1);
  }
  used += 4 * runs;
  return 0;
}

// Reads the frequencies of `count` symbols, of one byte or two each, and gives out the slots.
NETWEIGHT_DEVICE u32 read_wide_frequencies(const u8* from, u64 left, u32 count, WideTable& table, u64& used) {
  u32 read = 0, total = 0;  // symbols so far, and their slots
  bool carry = false;
  while (read < count) {
    const u64 at = used + lane_id();
    const bool here = at < left;
    const u32 byte = here ? from[at] : 0;
    const u32 present = __ballot_sync(kAllLanes, here), claims = __ballot_sync(kAllLanes, byte >= 128);
    const u32 seconds = claimed_items(claims, carry), firsts = present & ~seconds;
    const u32 rank = __popc(firsts & lanes_below());
    const bool mine = (firsts >> lane_id() & 1) && read + rank < count;
    const bool two = mine && byte >= 128;
    if (__any_sync(kAllLanes, two && at + 1 >= left)) return kTruncated;
    const u32 frequency = two ? (byte & 127) << 8 | from[at + 1] : mine ? byte : 0;
    if (__any_sync(kAllLanes, mine && (frequency == 0 || frequency >= kWideSlots))) return kBadTable;
    const u32 sum = inclusive_sum(frequency);
    if (mine) table.start[read + rank] = static_cast<u16>(min(total + sum - frequency, kWideSlots));
    total = min(total + __shfl_sync(kAllLanes, sum, kWarp - 1), 2 * kWideSlots);
    // Go on behind the last symbol of these, which may have a byte among the next 32.
    const u32 last = inclusive_sum(mine ? (two ? 2 : 1) : 0);
    const u32 bytes = __shfl_sync(kAllLanes, last, kWarp - 1);
    const u32 got = static_cast<u32>(__popc(__ballot_sync(kAllLanes, mine)));
    if (got == 0) return kTruncated;
    used += bytes;
    read += got;
    carry = false;
  }
  if (total != kWideSlots) return kBadTable;
  if (lane_id() == 0) table.start[count] = kWideSlots;
  __syncwarp();
  for (u32 group = lane_id(); group < kWideSlots / kSlotsPerGroup; group += kWarp) {
    u32 row = 0, beyond = count;
    while (beyond - row > 1) {
      const u32 middle = (row + beyond) / 2;
      if (table.start[middle] <= group * kSlotsPerGroup) row = middle;
      else beyond = middle;
    }
    table.first[group] = static_cast<u16>(row);
  }
  __syncwarp();
  return 0;
}

// Decodes a plane, by one warp. `left` bytes begin with its mode. Gives the plane's bytes; returns a reason for refusal.
NETWEIGHT_CALLED u32 decode_wide(const u8* from, u64 left, Plane plane, WideTable& table, u64& size) {
  Split split;
  if (left < 2) return kTruncated;
  if (!read_split(from[1], plane.width, split)) return kBadSplit;
  u64 used = 2;
  u32 count;
  u32 reason = read_wide_symbols(from, left, split.symbol_bits, table, count, used);
  if (reason) return reason;
  __syncwarp();
  reason = read_wide_frequencies(from, left, count, table, used);
  if (reason) return reason;
  if (used + 134 > left) return kTruncated;
  const u32 words = read_u24(from + used), patch_words = read_u24(from + used + 3), lane = lane_id();
  u32 x = read_u32(from + used + 6 + 4 * lane);
  used += 134;
  if (__any_sync(kAllLanes, x < 1u << 16)) return kBadStates;

  const u32 blocks = (plane.count + 63) / 64, low_bits = min(split.raw_bits, 8u), rest_bits = split.raw_bits - low_bits;
  const u8* low = from + used;
  const u8* rest = low + static_cast<u64>(blocks) * 8 * low_bits;
  const u8* stream = rest + static_cast<u64>(blocks) * 8 * rest_bits;
  used += static_cast<u64>(blocks) * 8 * split.raw_bits + 2 * static_cast<u64>(words);
  if (used + 1 > left) return kTruncated;
  u32 next = 0;  // word of the stream
  bool ran_out = false;
  for (u32 row = 0; row < 2 * blocks; row++) {
    const u32 slot = x & (kWideSlots - 1);
    u32 i = table.first[slot / kSlotsPerGroup];
    while (table.start[i + 1] <= slot) i++;
    x = (table.start[i + 1] - table.start[i]) * (x >> 12) + slot - table.start[i];
    const bool hungry = x < 1u << 16;
    const u32 all = __ballot_sync(kAllLanes, hungry), mine = next + static_cast<u32>(__popc(all & lanes_below()));
    if (hungry) {
      ran_out = ran_out || mine >= words;
      x = x << 16 | (mine < words ? read_u16(stream + 2 * mine) : 0);
    }
    next += static_cast<u32>(__popc(all));
    const u32 field = row % 2 * kWarp + lane, pick = field & 1;
    const u64 block = row / 2;
    const u32 low_pair = field_pair(low + block * 8 * low_bits, low_bits, field / 2);
    const u32 rest_pair = field_pair(rest + block * 8 * rest_bits, rest_bits, field / 2);
    const u32 raw = (low_pair >> pick * low_bits & ((1u << low_bits) - 1)) | (rest_pair >> pick * rest_bits & ((1u << rest_bits) - 1)) << low_bits;
    const u32 element = row * kWarp + lane;
    if (element < plane.count) plane.put(element, static_cast<u32>(table.symbol[i]) << split.symbol_shift | split.place_raw(raw, plane.width));
  }
  if (__any_sync(kAllLanes, ran_out || x != 1u << 16) || next != words) return kBadStream;
  __syncwarp();

  RareSymbols rare;
  reason = read_rare(from + used, left - used, split.symbol_bits, rare);
  if (reason) return reason;
  used += 1 + 2 * rare.count;
  size = used + 2 * static_cast<u64>(patch_words);
  if (size > left) return kTruncated;
  return apply_patches(from + used, patch_words, first_patch_word(from + used, patch_words), rare, split, plane, StreamOrder{1, 0, 1});
}
