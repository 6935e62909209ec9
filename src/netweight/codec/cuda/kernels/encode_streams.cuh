// The streams of the mode rans: a warp for each codes its rows from the last to the first.
#pragma once

#include "encode_layout.cuh"

// How a symbol is coded: 2^31 / f, rounded up, in the upper half; 256 - f, f and the first slot in the lower. With x < 256 f
// the quotient x / f is 2 x * reciprocal >> 32.
NETWEIGHT_DEVICE u64 entry_of(u32 frequency, u32 start) {
  const u32 reciprocal = (0x80000000u + frequency - 1) / frequency;
  return static_cast<u64>(reciprocal) << 32 | (256 - frequency) << 16 | frequency << 8 | start;
}

// Fills the lookup by symbol; symbols that the table lacks are coded as the host. By a whole block.
NETWEIGHT_DEVICE void fill_entries(const Table& table, u32 bins, u64* entries) {
  u64 host = 0;
  for (u32 i = 0; i < table.count; i++)
    if (table.symbol[i] == table.host) host = entry_of(table.frequency[i], table.start[i]);
  for (u32 i = threadIdx.x; i < bins; i += kThreads) entries[i] = host | kRareBit;
  __syncthreads();
  for (u32 i = threadIdx.x; i < table.count; i += kThreads) entries[table.symbol[i]] = entry_of(table.frequency[i], table.start[i]);
  __syncthreads();
}

// Notes a row's patches above `patches` others that `top` is behind, the last lane's first, and returns how many there are then.
// Rows seldom need any, and the loops over rows stay short without this.
static __device__ __noinline__ u32 note_patches(u32* top, u32 patches, u32 position, bool even_rare, bool odd_rare, u32 even_symbol, u32 odd_symbol) {
  const u32 evens = __ballot_sync(kAllLanes, even_rare), odds = __ballot_sync(kAllLanes, odd_rare);
  const u32 above = 0xfffffffeu << lane_id();
  u32 at = patches + __popc(evens & above) + __popc(odds & above);
  if (odd_rare) *(top - ++at) = (position + 1) << 12 | odd_symbol;
  if (even_rare) *(top - ++at) = position << 12 | even_symbol;
  return patches + __popc(evens) + __popc(odds);
}

// Codes rows of one stream; thread t of the warp has lanes 2t and 2t + 1.
struct Coder {
  const u64* entries;
  u32 shift, symbol_mask;
  u32 patch_limit;
  u8* stream;      // grows downwards from its end
  u32* patch_top;  // and its patches from here
  u32 left;        // bytes of the stream's memory that are not used yet
  u32 patches;
  u32 even, odd;  // states

  __device__ __forceinline__ u32 symbol(u32 element) const { return element >> shift & symbol_mask; }

  // A state after one more symbol; `given` is whether it gave its low byte away before.
  static __device__ __forceinline__ u32 next_state(u32 state, u32 given, u32 entry, u32 reciprocal) {
    const u32 x = given ? state >> 8 : state;
    return x + (entry & 0xff) + __umulhi(2 * x, reciprocal) * (entry >> 16 & 0x1ff);
  }

  // Codes a row; `rare` is false if it is known to need no patch. False if there were too many before it and it needs one.
  __device__ __forceinline__ bool put_row(u32 pair, u64 even_entry, u64 odd_entry, bool rare, u32 row) {
    const u32 e = static_cast<u32>(even_entry), o = static_cast<u32>(odd_entry);
    if (rare && __any_sync(kAllLanes, ((e | o) & kRareBit) != 0)) {
      if (patches > patch_limit) return false;
      const u32 position = row * kRow + 2 * lane_id();
      patches = note_patches(patch_top, patches, position, (e & kRareBit) != 0, (o & kRareBit) != 0, symbol(pair & 0xffff), symbol(pair >> 16));
    }
    const u32 even_full = even >= (e & 0xff00), odd_full = odd >= (o & 0xff00);
    const u32 evens = __ballot_sync(kAllLanes, even_full), odds = __ballot_sync(kAllLanes, odd_full);
    const u32 above = 0xfffffffeu << lane_id();  // the last lane gives its byte first
    const u32 at = left - __popc(evens & above) - __popc(odds & above);
    if (odd_full) stream[at - 1] = static_cast<u8>(odd);
    if (even_full) stream[at - 1 - odd_full] = static_cast<u8>(even);
    left -= __popc(evens) + __popc(odds);
    even = next_state(even, even_full, e, static_cast<u32>(even_entry >> 32));
    odd = next_state(odd, odd_full, o, static_cast<u32>(odd_entry >> 32));
    return true;
  }

  __device__ __forceinline__ bool put_row(u32 pair, u32 row) {
    return put_row(pair, entries[symbol(pair & 0xffff)], entries[symbol(pair >> 16)], true, row);
  }
};

// Where in a row the elements of a thread's lanes stand: two neighbors.
NETWEIGHT_DEVICE u32 pair_place(u32 unit) {
  const u32 lane = 2 * lane_id();
  return unit == 1 ? lane : group_place(2, lane / 8) + lane % 8;
}

// Rows row - 1 to 0 of a stream, whose elements all exist.
template <typename Load>
static __device__ __forceinline__ bool put_rows(Load, const Plane& plane, const Layout& a, u32 stream, u32 row, Coder& coder) {
  if (row == 0) return true;
  const u32 step = a.streams * kRow, at = stream * kRow + pair_place(plane.unit);  // of the thread's elements in row 0
  LoadedPair next[kRowsAhead];
#pragma unroll
  for (u32 k = 0; k < kRowsAhead; k++) next[k] = Load::pair(plane, at + (row > k ? row - 1 - k : 0) * step);
  for (; row >= kRowsAhead; row -= kRowsAhead) {
    u32 now[kRowsAhead], flags = 0;
    u64 evens[kRowsAhead], odds[kRowsAhead];
#pragma unroll
    for (u32 k = 0; k < kRowsAhead; k++) {
      now[k] = Load::unpacked(plane, next[k]);
      evens[k] = coder.entries[coder.symbol(now[k] & 0xffff)];
      odds[k] = coder.entries[coder.symbol(now[k] >> 16)];
      flags |= static_cast<u32>(evens[k] | odds[k]);
    }
#pragma unroll
    for (u32 k = 0; k < kRowsAhead; k++) next[k] = Load::pair(plane, at + (row > k + kRowsAhead ? row - 1 - kRowsAhead - k : 0) * step);
    const bool rare = __any_sync(kAllLanes, (flags & kRareBit) != 0);
#pragma unroll
    for (u32 k = 0; k < kRowsAhead; k++)
      if (!coder.put_row(now[k], evens[k], odds[k], rare, row - 1 - k)) return false;
  }
  while (row-- > 0)
    if (!coder.put_row(Load::unpacked(plane, Load::pair(plane, at + row * step)), row)) return false;
  return true;
}

// The last row of a stream, which may be partial or lie beyond the end; `padding` fills it.
NETWEIGHT_DEVICE bool put_last_row(const Plane& plane, const Layout& a, u32 stream, u32 padding, Coder& coder) {
  const u32 i = ((a.rows - 1) * a.streams + stream) * kRow + pair_place(plane.unit);
  const u32 even = i < plane.count ? element_of(plane, i) : padding, odd = i + 1 < plane.count ? element_of(plane, i + 1) : padding;
  return coder.put_row(even | odd << 16, a.rows - 1);
}

// The states that a stream starts from: 256, and the raw bits that are folded in. `fields` is shared memory of this warp's.
NETWEIGHT_DEVICE void first_states(const Plane& plane, const Layout& a, u32 stream, u8 fields[2][kRow], Coder& coder) {
  const u32 lane = lane_id(), row = lane / 8, group = lane % 8;
  if (row < 2 && row < a.rows) {
    u32 v[kGroup];
    group_at(plane, (a.rows - 1 - row) * a.streams + stream, group, v);
    keep_raw_bits(a, v);
    write_fields(fields[row] + group * a.low_bits, gathered(v, 0, a.low_bits), a.low_bits);
  }
  __syncwarp();
  u32 states[2];
#pragma unroll
  for (u32 k = 0; k < 2; k++) {
    const u32 i = 2 * lane + k;
    states[k] = 256u + (i < a.row_low ? fields[0][i] : i < a.row_low + a.folded ? fields[1][i - a.folded] : 0);
  }
  coder.even = states[0];
  coder.odd = states[1];
}

// Codes one stream: its bytes and patches end at the ends of its memory, its states go to the plane. By a warp; false if there
// are too many patches for this table to be the right one.
template <typename Load>
static __device__ __forceinline__ bool code_stream(Load load, const Plane& plane, const Layout& a, u32 stream, u8* out, u8* work, Memory& m) {
  Coder coder;
  coder.entries = m.coding.entries;
  coder.shift = a.shift;
  coder.symbol_mask = a.symbol_mask;
  coder.patch_limit = patch_limit(a.rows);
  coder.patch_top = reinterpret_cast<u32*>(work) + patch_room(a.rows) * (stream + 1);
  coder.stream = work + 4 * patch_room(a.rows) * a.streams + a.rows * kRow * stream;
  coder.left = a.rows * kRow;
  coder.patches = 0;
  first_states(plane, a, stream, m.fields[stream], coder);
  const bool sound = put_last_row(plane, a, stream, m.table.host << a.shift, coder) && put_rows(load, plane, a, stream, a.rows - 1, coder);
  u8* const states = out + a.states + 128 * stream + 2 * lane_id();
  states[0] = static_cast<u8>(coder.even);
  states[1] = static_cast<u8>(coder.odd);
  states[64] = static_cast<u8>(coder.even >> 8);
  states[65] = static_cast<u8>(coder.odd >> 8);
  if (lane_id() == 0) m.streams[stream] = {a.rows * kRow - coder.left, coder.patches, 0};
  return sound;
}
