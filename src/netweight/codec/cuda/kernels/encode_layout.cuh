// The mode rans: where the parts of a plane lie, what its block shares, and the packing of raw bits.
#pragma once

#include "encode_table.cuh"

constexpr u32 kMaxStreams = 4;
constexpr u32 kRareBit = 0x80000000u;  // in an entry: the symbol is not in the table
constexpr u32 kMaxRare = 14;           // symbols with codes of their own; code 14: literal, 15: skip
constexpr u32 kLiteral = 14, kSkip = 15;
constexpr u32 kPatchSpread = 4096;  // gaps that a patch can state
constexpr u32 kRowsAhead = 4;        // rows whose elements are on their way while others are coded
constexpr u32 kPackedAhead = 4;      // groups that a thread loads before it packs them

// Where the parts of a plane in this mode lie, and what follows from its split.
struct Layout {
  u32 streams, rows;
  u32 raw_bits, low_bits, rest_bits, shift, symbol_mask;
  u32 raw_mask, sign_mask, sign_shift;  // raw bits are v & raw_mask | v >> sign_shift & sign_mask
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
  a.sign_mask = a.signed_raw ? 1u << (a.raw_bits - 1) : 0;
  a.raw_mask = (a.signed_raw ? a.sign_mask : 1u << a.raw_bits) - 1;
  a.sign_shift = 8 * plane.unit - a.raw_bits;
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

// The first element of a group of eight lanes, counted from its row's.
NETWEIGHT_DEVICE u32 group_place(u32 unit, u32 group) { return unit == 1 ? 8 * group : (group & 1) * 32 + group / 2 * 8; }

// ---- raw bits --------------------------------------------------------------------------------------------------------

// Eight fields of so many bits, one behind the other; larger ones are cut off.
NETWEIGHT_DEVICE u64 gathered(const u32* fields, u32 shift, u32 bits) {
  const u32 mask = (1u << bits) - 1;
  u32 quads[2];
#pragma unroll
  for (u32 k = 0; k < 2; k++) {
    const u32* f = fields + 4 * k;
    const u32 first = (f[0] >> shift & mask) | (f[1] >> shift & mask) << bits, second = (f[2] >> shift & mask) | (f[3] >> shift & mask) << bits;
    quads[k] = first | second << 2 * bits;
  }
  return quads[0] | static_cast<u64>(quads[1]) << 4 * bits;
}

NETWEIGHT_DEVICE void write_fields(u8* to, u64 fields, u32 bytes) {
  if (bytes == 8 && bytes_to_alignment(to, 8) == 0) {
    *reinterpret_cast<u64*>(to) = fields;
    return;
  }
#pragma unroll 1
  for (u32 i = 0; i < bytes; i++) to[i] = static_cast<u8>(fields >> 8 * i);
}

// Elements become their raw bits.
NETWEIGHT_DEVICE void keep_raw_bits(const Layout& a, u32* v) {
#pragma unroll
  for (u32 k = 0; k < kGroup; k++) v[k] = (v[k] & a.raw_mask) | (v[k] >> a.sign_shift & a.sign_mask);
}

// A group's raw bits: to `low`, at most `room` bytes of them, and those above the lower eight to `rest`.
NETWEIGHT_DEVICE void write_raw_bits(const Layout& a, u32* v, u8* low, u32 room, u8* rest) {
  keep_raw_bits(a, v);
  write_fields(low, gathered(v, 0, a.low_bits), room);
  if (a.rest_bits != 0) write_fields(rest, gathered(v, 8, a.rest_bits), a.rest_bits);
}

// The elements of a group of a block of 64, zero beyond the plane's end.
NETWEIGHT_DEVICE void group_at(const Plane& plane, u32 block, u32 group, u32* v) {
  const u32 first = block * kRow + group_place(plane.unit, group);
#pragma unroll
  for (u32 k = 0; k < kGroup; k++) v[k] = first + k < plane.count ? element_of(plane, first + k) : 0;
}

// Packs the raw bits of the last two rows, but for those that states hold.
NETWEIGHT_DEVICE void pack_last_rows(const Plane& plane, const Layout& a, u8* out, u32 worker, u32 workers) {
  const u32 blocks = a.rows * a.streams, last = blocks - a.streams, first = a.rows > 2 ? last - a.streams : 0;
  for (u32 i = first * 8 + worker; i < blocks * 8; i += workers) {
    const u32 block = i / 8, group = i % 8;
    const u32 kept = block < last ? a.row_low - a.folded : 0, place = group * a.low_bits;  // the last row but one ends sooner
    const u32 room = place >= kept ? 0 : kept - place < a.low_bits ? kept - place : a.low_bits;
    u32 v[kGroup];
    group_at(plane, block, group, v);
    write_raw_bits(a, v, out + a.low + first * a.row_low + (block - first) * kept + place, room, out + a.rest + block * a.row_rest + group * a.rest_bits);
  }
}

// Packs the raw bits of all rows; `worker` of `workers` threads does its share.
template <typename Load>
static __device__ __forceinline__ void pack_raw_bits(Load, const Plane& plane, const Layout& a, u8* out, u32 worker, u32 workers) {
  const u32 groups = a.rows > 2 ? (a.rows - 2) * a.streams * 8 : 0;
  for (u32 base = worker; base < groups; base += workers * kPackedAhead) {
    u32 v[kPackedAhead][kGroup];
#pragma unroll
    for (u32 k = 0; k < kPackedAhead; k++) {
      const u32 i = base + k * workers < groups ? base + k * workers : base;
      Load::group(plane, i / 8 * kRow + group_place(plane.unit, i % 8), v[k]);
    }
#pragma unroll
    for (u32 k = 0; k < kPackedAhead; k++) {
      const u32 i = base + k * workers;
      if (i < groups) write_raw_bits(a, v[k], out + a.low + i * a.low_bits, a.low_bits, out + a.rest + i * a.rest_bits);
    }
  }
  pack_last_rows(plane, a, out, worker, workers);
}
