// The mode rans: a warp for each stream codes its rows from the last to the first, while the other warps of the block pack
// raw bits; then the streams are moved to their places and patches are written.
#pragma once

#include "encode_table.cuh"

constexpr u32 kMaxStreams = 4;
constexpr u32 kRareBit = 0x80000000u;  // in an entry: the symbol is not in the table
constexpr u32 kMaxRare = 14;           // symbols with codes of their own; code 14: literal, 15: skip
constexpr u32 kLiteral = 14, kSkip = 15;
constexpr u32 kPatchSpread = 4096;  // gaps that a patch can state
constexpr u32 kAhead = 4;           // rows whose elements are on their way

// Where the parts of a plane in this mode lie, and what follows from its split.
struct Layout {
  u32 streams, rows;
  u32 raw_bits, low_bits, rest_bits, shift, symbol_mask;
  u32 row_low, row_rest;  // bytes of a row of a stream in the two regions of raw bits
  u32 folded;             // bytes of the last row but one that stand in states
  u32 table_bytes, lengths, states, low, rest, bodies;  // offsets in the plane
  bool signed_raw;
};

// What a stream's warp has made.
struct Stream {
  u32 bytes, patches;  // these many before the ends of its memory
  u32 words;
};

// Shared memory of a block while it codes.
struct Coding {
  u64 entries[kMaxBins];  // by symbol: see entry_of
};

// What the two share, and what outlives them.
struct Memory {
  union {
    Search search;
    Coding coding;
  };
  Table table;
  Ranking rare;
  Stream streams[kMaxStreams];
  u8 fields[kMaxStreams][2][kRow];  // raw bits of each stream's last row, and of the one before
  u32 parts[kWarps];
  u32 flag, sum;
};

NETWEIGHT_DEVICE u32 stream_count(u32 count) { return count < (1u << 14) ? 1 : count < (1u << 18) ? 2 : 4; }

// Memory of a stream while it grows: rows * 64 bytes, and 2 * rows + 192 patches of 32 bits (position << 12 | symbol).
NETWEIGHT_DEVICE u32 patch_room(u32 rows) { return 2 * rows + 192; }
NETWEIGHT_DEVICE u32 patch_limit(u32 rows) { return 2 * rows + 128; }  // of patches before a row that needs any

NETWEIGHT_DEVICE Layout layout_of(const Plane& plane, const Table& table) {
  Layout a;
  a.streams = stream_count(plane.count);
  a.rows = (plane.count + kRow * a.streams - 1) / (kRow * a.streams);
  a.raw_bits = table.raw_bits;
  a.signed_raw = table.signed_raw;
  a.low_bits = a.raw_bits < 8 ? a.raw_bits : 8;
  a.rest_bits = a.raw_bits - a.low_bits;
  a.shift = a.signed_raw ? a.raw_bits - 1 : a.raw_bits;
  a.symbol_mask = (1u << symbol_bits_of(plane, a.raw_bits)) - 1;
  a.row_low = 8 * a.low_bits;
  a.row_rest = 8 * a.rest_bits;
  a.folded = a.rows == 1 ? 0 : a.row_low < 32 ? a.row_low : 64 - a.row_low;
  u32 runs = 0;
  for (u32 i = 0; i < table.count; i++) runs += i == 0 || table.symbol[i] != table.symbol[i - 1] + 1;
  a.table_bytes = 1 + 3 * runs + table.count;
  a.lengths = 3 + a.table_bytes;
  a.states = a.lengths + 6 * a.streams;
  a.low = a.states + 128 * a.streams;
  a.rest = a.low + (a.row_low * (a.rows - 1) - a.folded) * a.streams;
  a.bodies = a.rest + a.row_rest * a.streams * a.rows;
  return a;
}

NETWEIGHT_DEVICE u32 raw_of(const Layout& a, u32 unit, u32 v) {
  if (!a.signed_raw) return v & ((1u << a.raw_bits) - 1);
  const u32 low = a.raw_bits - 1;
  return v >> (8 * unit - 1) << low | (v & ((1u << low) - 1));
}

// The first element of a group of eight lanes, counted from its row's.
NETWEIGHT_DEVICE u32 group_place(u32 unit, u32 group) { return unit == 1 ? 8 * group : (group & 1) * 32 + group / 2 * 8; }

// ---- raw bits --------------------------------------------------------------------------------------------------------

struct Fields {
  u64 low, rest;  // eight fields each
};

// The raw bits of a group of a block of 64 elements, zero beyond the plane's end.
NETWEIGHT_DEVICE Fields fields_of(const Plane& plane, const Layout& a, u32 block, u32 group) {
  u32 v[kGroup];
  plane.group_or(block * kRow + group_place(plane.unit, group), 0, v);
  Fields fields = {0, 0};
#pragma unroll
  for (u32 k = 0; k < kGroup; k++) {
    const u32 raw = raw_of(a, plane.unit, v[k]);
    fields.low |= static_cast<u64>(raw & 0xff) << a.low_bits * k;
    fields.rest |= static_cast<u64>(raw >> 8) << a.rest_bits * k;
  }
  return fields;
}

NETWEIGHT_DEVICE void write_low_bytes(u8* to, u64 value, u32 bytes) {
  for (u32 i = 0; i < bytes; i++) to[i] = static_cast<u8>(value >> 8 * i);
}

// Packs the raw bits of all rows, but for those that states hold; `worker` of `workers` threads does its share.
NETWEIGHT_DEVICE void pack_raw_bits(const Plane& plane, const Layout& a, u8* out, u32 worker, u32 workers) {
  const u32 blocks = a.rows * a.streams, last = blocks - a.streams;
  for (u32 i = worker; i < blocks * 8; i += workers) {
    const u32 block = i / 8, group = i % 8;
    const Fields fields = fields_of(plane, a, block, group);
    write_low_bytes(out + a.rest + block * a.row_rest + group * a.rest_bits, fields.rest, a.rest_bits);
    if (block >= last) continue;
    u32 room = a.low_bits, at = block * a.row_low;
    if (block + a.streams >= last) {  // the last row but one ends sooner
      const u32 kept = a.row_low - a.folded, place = group * a.low_bits;
      at = (last - a.streams) * a.row_low + (block + a.streams - last) * kept;
      room = place >= kept ? 0 : kept - place < a.low_bits ? kept - place : a.low_bits;
    }
    write_low_bytes(out + a.low + at + group * a.low_bits, fields.low, room);
  }
}

// ---- streams ---------------------------------------------------------------------------------------------------------

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

// Codes rows of one stream; thread t of the warp has lanes 2t and 2t + 1.
struct Coder {
  const u64* entries;
  u32 shift, symbol_mask;
  u32 patch_limit;
  u8* top;         // the stream grows downwards from here
  u32* patch_top;  // and its patches from here
  u32 bytes, patches;
  u32 even, odd;  // states

  __device__ __forceinline__ u32 symbol(u32 element) const { return element >> shift & symbol_mask; }

  // A state after one more symbol; `given` is whether it gave its low byte away before.
  static __device__ __forceinline__ u32 next_state(u32 state, u32 given, u32 entry, u32 reciprocal) {
    const u32 x = given ? state >> 8 : state;
    return x + (entry & 0xff) + __umulhi(2 * x, reciprocal) * (entry >> 16 & 0x1ff);
  }

  // False if there were too many patches before this row and it needs one.
  __device__ __forceinline__ bool note_patches(u32 pair, bool even_rare, bool odd_rare, u32 row) {
    if (patches > patch_limit) return false;
    const u32 evens = __ballot_sync(kAllLanes, even_rare), odds = __ballot_sync(kAllLanes, odd_rare);
    const u32 above = 0xfffffffeu << lane_id();
    u32 at = patches + __popc(evens & above) + __popc(odds & above);
    const u32 position = row * kRow + 2 * lane_id();
    if (odd_rare) patch_top[-1 - static_cast<i64>(at++)] = (position + 1) << 12 | symbol(pair >> 16);
    if (even_rare) patch_top[-1 - static_cast<i64>(at)] = position << 12 | symbol(pair & 0xffff);
    patches += __popc(evens) + __popc(odds);
    return true;
  }

  __device__ __forceinline__ bool put_row(u32 pair, u64 even_entry, u64 odd_entry, u32 row) {
    const u32 e = static_cast<u32>(even_entry), o = static_cast<u32>(odd_entry);
    if (__any_sync(kAllLanes, ((e | o) & kRareBit) != 0) && !note_patches(pair, (e & kRareBit) != 0, (o & kRareBit) != 0, row)) return false;
    const u32 even_full = even >= (e & 0xff00), odd_full = odd >= (o & 0xff00);
    const u32 evens = __ballot_sync(kAllLanes, even_full), odds = __ballot_sync(kAllLanes, odd_full);
    const u32 above = 0xfffffffeu << lane_id();  // the last lane gives its byte first
    u8* at = top - bytes - __popc(evens & above) - __popc(odds & above);
    if (odd_full) *--at = static_cast<u8>(odd);
    if (even_full) *--at = static_cast<u8>(even);
    bytes += __popc(evens) + __popc(odds);
    even = next_state(even, even_full, e, static_cast<u32>(even_entry >> 32));
    odd = next_state(odd, odd_full, o, static_cast<u32>(odd_entry >> 32));
    return true;
  }

  __device__ __forceinline__ bool put_row(u32 pair, u32 row) {
    return put_row(pair, entries[symbol(pair & 0xffff)], entries[symbol(pair >> 16)], row);
  }
};

// Rows row - 1 to 0 of a stream, whose elements all exist.
template <u32 kBytes>
static __device__ __forceinline__ bool put_rows(const Plane& plane, u32 streams, u32 stream, u32 row, Coder& coder) {
  const u32 lane = 2 * lane_id(), place = plane.unit == 1 ? lane : group_place(2, lane / 8) + lane % 8;
  const u32 step = streams * kRow;
  u32 at = stream * kRow + place;  // of the thread's elements in row 0
  u32 next[kAhead];
#pragma unroll
  for (u32 k = 0; k < kAhead; k++) next[k] = k < row ? plane.pair_of<kBytes>(at + (row - 1 - k) * step) : 0;
  while (row > 0) {
    u32 now[kAhead];
    u64 evens[kAhead], odds[kAhead];
#pragma unroll
    for (u32 k = 0; k < kAhead; k++) {
      now[k] = next[k];
      evens[k] = coder.entries[coder.symbol(now[k] & 0xffff)];
      odds[k] = coder.entries[coder.symbol(now[k] >> 16)];
      next[k] = k + kAhead < row ? plane.pair_of<kBytes>(at + (row - 1 - kAhead - k) * step) : 0;
    }
#pragma unroll
    for (u32 k = 0; k < kAhead; k++)
      if (k < row && !coder.put_row(now[k], evens[k], odds[k], row - 1 - k)) return false;
    row = row > kAhead ? row - kAhead : 0;
  }
  return true;
}

// The last row of a stream, which may be partial or lie beyond the end; `padding` fills it.
NETWEIGHT_DEVICE bool put_last_row(const Plane& plane, const Layout& a, u32 stream, u32 padding, Coder& coder) {
  const u32 lane = 2 * lane_id(), place = plane.unit == 1 ? lane : group_place(2, lane / 8) + lane % 8;
  const u32 i = ((a.rows - 1) * a.streams + stream) * kRow + place;
  const u32 even = i < plane.count ? plane.element(i) : padding, odd = i + 1 < plane.count ? plane.element(i + 1) : padding;
  return coder.put_row(even | odd << 16, a.rows - 1);
}

// The states that a stream starts from: 256, and the raw bits that are folded in. `fields` is shared memory of this warp's.
NETWEIGHT_DEVICE void first_states(const Plane& plane, const Layout& a, u32 stream, u8 fields[2][kRow], Coder& coder) {
  const u32 lane = lane_id(), row = lane / 8, group = lane % 8;
  if (row < 2 && row < a.rows) {
    const Fields raw = fields_of(plane, a, (a.rows - 1 - row) * a.streams + stream, group);
    write_low_bytes(fields[row] + group * a.low_bits, raw.low, a.low_bits);
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
NETWEIGHT_DEVICE bool code_stream(const Plane& plane, const Layout& a, u32 stream, u8* out, u8* work, Memory& m) {
  Coder coder;
  coder.entries = m.coding.entries;
  coder.shift = a.shift;
  coder.symbol_mask = a.symbol_mask;
  coder.patch_limit = patch_limit(a.rows);
  coder.patch_top = reinterpret_cast<u32*>(work) + patch_room(a.rows) * (stream + 1);
  coder.top = work + 4 * patch_room(a.rows) * a.streams + a.rows * kRow * (stream + 1);
  coder.bytes = coder.patches = 0;
  first_states(plane, a, stream, m.fields[stream], coder);
  bool sound = put_last_row(plane, a, stream, m.table.host << a.shift, coder);
  if (sound) {
    if (plane.number_bytes == 1) sound = put_rows<1>(plane, a.streams, stream, a.rows - 1, coder);
    else if (plane.number_bytes == 2) sound = put_rows<2>(plane, a.streams, stream, a.rows - 1, coder);
    else if (plane.number_bytes == 4) sound = put_rows<4>(plane, a.streams, stream, a.rows - 1, coder);
    else sound = put_rows<8>(plane, a.streams, stream, a.rows - 1, coder);
  }
  u8* const states = out + a.states + 128 * stream + 2 * lane_id();
  states[0] = static_cast<u8>(coder.even);
  states[1] = static_cast<u8>(coder.odd);
  states[64] = static_cast<u8>(coder.even >> 8);
  states[65] = static_cast<u8>(coder.odd >> 8);
  if (lane_id() == 0) m.streams[stream] = {coder.bytes, coder.patches, 0};
  return sound;
}

// ---- patches ---------------------------------------------------------------------------------------------------------

// A stream's patches in ascending order.
NETWEIGHT_DEVICE const u32* patches_of(const Layout& a, u32 stream, const u8* work, const Memory& m) {
  return reinterpret_cast<const u32*>(work) + patch_room(a.rows) * (stream + 1) - m.streams[stream].patches;
}

// Ranks the symbols that need patches, over all streams. By a whole block; the lookup of symbols is lost.
NETWEIGHT_DEVICE void rank_rare(const Layout& a, const u8* work, Memory& m) {
  Search& s = m.search;
  const u32 bins = a.symbol_mask + 1;
  for (u32 i = threadIdx.x; i < bins; i += kThreads) s.counts[i] = 0;
  __syncthreads();
  for (u32 g = 0; g < a.streams; g++) {
    const u32* patches = patches_of(a, g, work, m);
    for (u32 i = threadIdx.x; i < m.streams[g].patches; i += kThreads) atomicAdd(&s.counts[patches[i] & 0xfff], 1u);
  }
  __syncthreads();
  rank(s.counts, bins, s.listed, m.rare);
}

NETWEIGHT_DEVICE u32 rare_count(const Memory& m) { return m.rare.present < kMaxRare ? m.rare.present : kMaxRare; }

NETWEIGHT_DEVICE u32 code_of(u32 symbol, const Memory& m) {
  u32 code = 0;
  while (code < rare_count(m) && m.rare.symbol[code] != symbol) code++;
  return code < rare_count(m) ? code : kLiteral;
}

// A stream's patch words: counted, and written if `out` is not null. By a warp; returns their number.
NETWEIGHT_DEVICE u32 patch_words(const u32* patches, u32 count, const Memory& m, u8* out) {
  u32 total = 0;
  for (u32 first = 0; first < count; first += kWarp) {
    const u32 i = first + lane_id();
    u32 gap = 0, code = 0, words = 0;
    if (i < count) {
      gap = (patches[i] >> 12) - (i > 0 ? (patches[i - 1] >> 12) + 1 : 0);
      code = code_of(patches[i] & 0xfff, m);
      words = gap / kPatchSpread + 1 + (code == kLiteral);
    }
    const u32 upto = warp_running_sum(words);
    if (out != nullptr && i < count) {
      u8* p = out + 2 * (total + upto - words);
      for (; gap >= kPatchSpread; gap -= kPatchSpread, p += 2) write_u16(p, kSkip << 12 | (kPatchSpread - 1));
      write_u16(p, code << 12 | gap);
      if (code == kLiteral) write_u16(p + 2, patches[i] & 0xfff);
    }
    total += __shfl_sync(kAllLanes, upto, kWarp - 1);
  }
  return total;
}

// ---- the plane -------------------------------------------------------------------------------------------------------

NETWEIGHT_DEVICE void write_u24(u8* p, u32 value) {
  write_u16(p, value);
  p[2] = static_cast<u8>(value >> 16);
}

// Mode, split, streams and table. By one thread.
NETWEIGHT_DEVICE void write_table(const Table& table, const Layout& a, u8* p) {
  *p++ = kRans;
  *p++ = static_cast<u8>(a.raw_bits | (a.signed_raw ? 0x80 : 0));
  *p++ = static_cast<u8>(a.streams);
  u8* const runs = p++;
  u32 count = 0;
  for (u32 i = 0; i < table.count; count++) {
    u32 length = 1;
    while (i + length < table.count && table.symbol[i + length] == table.symbol[i] + length) length++;
    write_u16(p, table.symbol[i]);
    p[2] = static_cast<u8>(length);
    p += 3;
    i += length;
  }
  *runs = static_cast<u8>(count);
  for (u32 i = 0; i < table.count; i++) *p++ = static_cast<u8>(table.frequency[i] | (table.second[i] ? 0x80 : 0));
}

// Moves streams to their places and writes what stands around them. By a whole block.
NETWEIGHT_DEVICE void assemble(const Layout& a, u8* out, const u8* work, const Memory& m) {
  if (threadIdx.x == 0) write_table(m.table, a, out);
  const u8* ends = work + 4 * patch_room(a.rows) * a.streams;
  u8* to = out + a.bodies;
  for (u32 g = 0; g < a.streams; g++) {
    const Stream& stream = m.streams[g];
    ends += a.rows * kRow;
    copy_bytes(to, ends - stream.bytes, stream.bytes, threadIdx.x, kThreads);
    to += stream.bytes;
    if (threadIdx.x == g) {
      write_u24(out + a.lengths + 6 * g, stream.bytes);
      write_u24(out + a.lengths + 6 * g + 3, stream.words);
    }
  }
  const u32 rare = rare_count(m);
  if (threadIdx.x == 0) *to = static_cast<u8>(rare);
  if (threadIdx.x < rare) write_u16(to + 1 + 2 * threadIdx.x, m.rare.symbol[threadIdx.x]);
  to += 1 + 2 * rare;
  for (u32 g = 0; g < a.streams; g++) {
    if (warp_id() == g) patch_words(patches_of(a, g, work, m), m.streams[g].patches, m, to);
    to += 2 * m.streams[g].words;
  }
}

// Writes a plane by the table in `m`; returns its size, or 0 if it would have too many patches or be larger than the plane.
// By a whole block.
NETWEIGHT_DEVICE u32 encode_rans(const Plane& plane, u8* out, u8* work, Memory& m) {
  const Layout a = layout_of(plane, m.table);
  __syncthreads();
  fill_entries(m.table, a.symbol_mask + 1, m.coding.entries);
  if (threadIdx.x == 0) m.flag = 0;
  __syncthreads();
  const u32 w = warp_id();
  if (w < a.streams) {
    if (!code_stream(plane, a, w, out, work, m) && lane_id() == 0) m.flag = 1;
  } else {
    pack_raw_bits(plane, a, out, threadIdx.x - a.streams * kWarp, kThreads - a.streams * kWarp);
  }
  __syncthreads();
  if (m.flag != 0) return 0;
  rank_rare(a, work, m);
  if (w < a.streams) {
    const u32 words = patch_words(patches_of(a, w, work, m), m.streams[w].patches, m, nullptr);
    if (lane_id() == 0) m.streams[w].words = words;
  }
  __syncthreads();
  u32 size = a.bodies + 1 + 2 * rare_count(m);
  for (u32 g = 0; g < a.streams; g++) size += m.streams[g].bytes + 2 * m.streams[g].words;
  if (size > plane.bytes()) return 0;
  assemble(a, out, work, m);
  return size;
}
