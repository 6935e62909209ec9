// The frequency table of the rans mode: read by every warp alike from the staged header, spread over 256 slots by the block.
#pragma once

#include "chunk.cuh"

// An entry of the slot table. The bytes stand so that a dot product of four bytes is a step of the state x:
//   byte 1 * (x >> 8) + byte 2 * 1 = frequency * (x >> 8) + rank;  bytes 0 and 3 are the symbol, placed in its element.
NETWEIGHT_DEVICE u32 slot_entry(u32 placed, u32 frequency, u32 rank) {
  return (placed & 255) | frequency << 8 | rank << 16 | (placed >> 8) << 24;
}

// Reads the runs of symbols at `table`, of which `left` bytes are there, into shared memory. Gives their number and that of
// the table's bytes so far; returns a reason for refusal, the same in all threads.
NETWEIGHT_DEVICE u32 read_symbols(const u8* table, u32 left, u32 symbol_bits, u32& count, u32& bytes) {
  const u32 runs = table[0];
  count = 0;
  bytes = 1 + 3 * runs;
  if (runs > kMostSymbols) return kBadTable;
  if (bytes > left) return kTruncated;
  u32 following = 0;  // the least symbol that may come
  for (u32 first = 0; first < runs; first += kWarp) {
    const u32 i = first + lane_id();
    const bool here = i < runs;
    const u32 base = here ? read_u16(table + 1 + 3 * i) : 0, length = here ? table[3 + 3 * i] : 0, end = base + length;
    const u32 end_before = __shfl_up_sync(kAllLanes, end, 1);
    const u32 least = lane_id() == 0 ? following : end_before;
    const u32 sum = inclusive_sum(length);
    const bool bad = here && (length == 0 || base < least || end > 1u << symbol_bits || count + sum > kMostSymbols);
    if (__any_sync(kAllLanes, bad)) return kBadTable;
    if (warp_id() == 0)
      for (u32 k = 0; k < length; k++) shared.unordered[count + sum - length + k] = static_cast<u16>(base + k);
    count += __shfl_sync(kAllLanes, sum, kWarp - 1);
    following = __shfl_sync(kAllLanes, end, kWarp - 1);
  }
  return 0;
}

// Orders the symbols by class and gives each its first slot; entries[i] holds symbol i's frequency and class. Reasons as above.
NETWEIGHT_DEVICE u32 order_symbols(const u8* entries, u32 count) {
  const u32 lane = lane_id(), below = lanes_below();
  u32 frequency[2], sum[2], rank[2];
  bool second_class[2], here[2];
  u32 total = 0, ranks[2] = {0, 0};  // sums and numbers so far; class 1 in the upper halves of sums
  bool bad = false;
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    const u32 i = half * kWarp + lane;
    here[half] = i < count;
    const u32 entry = here[half] ? entries[i] : 0;
    frequency[half] = entry & 127;
    second_class[half] = entry >> 7;
    bad = bad || (here[half] && frequency[half] == 0);
    sum[half] = total + inclusive_sum(second_class[half] ? frequency[half] << 16 : frequency[half]);
    total = __shfl_sync(kAllLanes, sum[half], kWarp - 1);
    const u32 seconds = __ballot_sync(kAllLanes, here[half] && second_class[half]);
    const u32 firsts = __ballot_sync(kAllLanes, here[half] && !second_class[half]);
    rank[half] = second_class[half] ? ranks[1] + __popc(seconds & below) : ranks[0] + __popc(firsts & below);
    ranks[0] += __popc(firsts);
    ranks[1] += __popc(seconds);
  }
  if (__any_sync(kAllLanes, bad) || (total & 0xffff) + (total >> 16) != kSlots) return kBadTable;
  if (warp_id() != 0) return 0;
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    if (!here[half]) continue;
    const u32 end = second_class[half] ? (total & 0xffff) + (sum[half] >> 16) : sum[half] & 0xffff;
    const u32 place = rank[half] + (second_class[half] ? ranks[0] : 0);
    shared.rows.start[place] = static_cast<u16>(end - frequency[half]);
    shared.rows.symbol[place] = shared.unordered[half * kWarp + lane];
  }
  if (lane == 0) shared.rows.start[count] = kSlots;
  return 0;
}

// Fills the slots, by all threads of the block.
NETWEIGHT_DEVICE void fill_slots(u32 count, const Split& split) {
  for (u32 slot = threadIdx.x; slot < kSlots; slot += blockDim.x) {
    u32 row = 0, beyond = count;  // start[row] <= slot < start[beyond]
    while (beyond - row > 1) {
      const u32 middle = (row + beyond) / 2;
      if (shared.rows.start[middle] <= slot) row = middle;
      else beyond = middle;
    }
    const u32 start = shared.rows.start[row], frequency = shared.rows.start[row + 1] - start;
    shared.slots[slot] = slot_entry(static_cast<u32>(shared.rows.symbol[row]) << split.symbol_shift, frequency, slot - start);
  }
}
