// Plain C++ kernels: the behaviour that every other set must match. Written in short passes over 64 lanes, which compilers
// turn into whatever vector instructions their target has.
#include "digest.h"
#include "fields.h"
#include "interleave.h"
#include "merge.h"

#include <algorithm>
#include <bit>

namespace netweight {

EncodeTable::EncodeTable(const Table& t, const Split& split) {
  std::memset(map, 63, sizeof map);
  std::memset(frequency, 0, sizeof frequency);
  std::memset(start, 0, sizeof start);
  std::memset(reciprocal_low, 0, sizeof reciprocal_low);
  std::memset(reciprocal_high, 0, sizeof reciprocal_high);
  by_symbol.assign(size_t{1} << split.symbol_bits(), Entry{0, 0, 0});
  const auto [least, greatest] = std::minmax_element(t.symbol, t.symbol + t.count);
  base = *least;
  lookup = *greatest - base < 62           ? SymbolLookup::range
           : split.symbol_bits() <= 8 ? SymbolLookup::map
           : split.symbol_bits() == 9 ? SymbolLookup::pairs
                                      : SymbolLookup::none;
  if (lookup == SymbolLookup::pairs) std::memset(map, 31, sizeof map);
  host = 0;
  int pairs = 0;
  for (int i = 0; i < t.count; i++) {
    const int f = t.frequency[i], s = t.symbol[i];
    Entry entry{static_cast<u16>(f), t.start[i], static_cast<u32>(((u64{1} << 32) + f - 1) / f)};
    if (f == 1) entry.reciprocal = 0xffffffffu;  // x * (2^32 - 1) >> 32 == x - 1: corrected where it is used
    by_symbol[s] = entry;
    if (i == t.host) host_entry = entry;
    int index = i;
    if (lookup == SymbolLookup::range) index = s - base + 1;
    if (lookup == SymbolLookup::map) map[s] = static_cast<u8>(i);
    if (lookup == SymbolLookup::pairs) {
      if (map[s >> 1] == 31 && pairs < 31) map[s >> 1] = static_cast<u8>(pairs++);
      if (map[s >> 1] == 31) lookup = SymbolLookup::none;
      index = 2 * map[s >> 1] + (s & 1);
    }
    const u32 reciprocal = f == 1 ? 65535 : 65536 / static_cast<u32>(f);
    frequency[index] = static_cast<u8>(f);
    start[index] = t.start[i];
    reciprocal_low[index] = static_cast<u8>(reciprocal);
    reciprocal_high[index] = static_cast<u8>(reciprocal >> 8);
    if (i == t.host) host = index;
  }
}

namespace {

template <bool kAmple>
bool step_wide_lanes(const WideBlock& b, WideLanes& lanes, u16* placed) {
  const u8* at = lanes.at;
  for (int half = 0; half < 64; half += kWideLanes) {
    u32 x[kWideLanes], need[kWideLanes];
    for (int i = 0; i < kWideLanes; i++) {
      const u32 slot = lanes.state[i] & (kWideSlots - 1);
      placed[half + i] = b.table->placed[slot];
      x[i] = b.table->step[slot];
    }
    for (int i = 0; i < kWideLanes; i++) {
      x[i] = (x[i] & 0xfff) * (lanes.state[i] >> 12) + (x[i] >> 12);
      need[i] = x[i] < 1u << 16;
    }
    for (int i = 0; i < kWideLanes; i++) {
      if (!kAmple && need[i] && b.stream_end - at < 2) return false;
      u16 fresh = 0;
      if (kAmple || need[i]) std::memcpy(&fresh, at, 2);
      lanes.state[i] = x[i] << (need[i] << 4) | (fresh & (0u - need[i]));
      at += 2 * need[i];
    }
  }
  lanes.at = at;
  return true;
}

}  // namespace

bool step_wide(const WideBlock& b, WideLanes& lanes, u16* placed) {
  const bool ample = b.stream_end - lanes.at >= 128;  // what a block can use at most
  return ample ? step_wide_lanes<true>(b, lanes, placed) : step_wide_lanes<false>(b, lanes, placed);
}

namespace {

inline u32 load(const void* in, int unit, size_t i) {
  if (unit == 1) return static_cast<const u8*>(in)[i];
  u16 v;  // copied, because a mapped file need not be aligned
  std::memcpy(&v, static_cast<const u8*>(in) + 2 * i, 2);
  return v;
}

// Bit i set where byte i of the 64 is 1.
inline u64 mask_of(const u8* flags) {
  u64 mask = 0;
  for (int q = 0; q < 8; q++) {
    u64 x;
    std::memcpy(&x, flags + 8 * q, 8);
    mask |= (x * 0x0102040810204080ull >> 56) << (8 * q);
  }
  return mask;
}

// One step of 64 lanes: placed symbols to `placed`, states advanced and refilled. False when the stream runs out.
inline bool step(const DecodeTable& t, u8* low, u8* high, const u8*& at, const u8* end, u16* placed) {
  u16 x[64], fk[64];
  u8 need[64];
  for (int i = 0; i < 64; i++) {
    u32 e = t.entry[low[i]];
    fk[i] = static_cast<u16>(e);
    placed[i] = static_cast<u16>(e >> 16);
  }
  for (int i = 0; i < 64; i++) {
    x[i] = static_cast<u16>((fk[i] & 0xff) * high[i] + (fk[i] >> 8));
    need[i] = x[i] < 256;
  }
  for (int i = 0; i < 64; i++) {
    low[i] = static_cast<u8>(x[i]);
    high[i] = need[i] ? static_cast<u8>(x[i]) : static_cast<u8>(x[i] >> 8);
  }
  u64 mask = mask_of(need);
  const u8* from = at;
  if (end - from < 64 && std::popcount(mask) > end - from) return false;
  for (; mask; mask &= mask - 1) low[std::countr_zero(mask)] = *from++;
  at = from;
  return true;
}

inline void* element(void* out, int unit, size_t i) { return static_cast<u8*>(out) + i * static_cast<size_t>(unit); }

size_t decode_rows(const RansBlock& b, Lanes& lanes, size_t row, size_t row_end, void* out) {
  const int low_bits = b.split.raw_bits < 8 ? b.split.raw_bits : 8, rest_bits = b.split.raw_bits - low_bits;
  alignas(64) u16 placed[64];
  alignas(64) u8 raw_low[64], raw_rest[64];
  for (; row < row_end; row++)
    for (int g = 0; g < b.streams; g++) {
      if (!step(*b.table, lanes.low[g], lanes.high[g], lanes.at[g], b.stream_end[g], placed)) return npos;
      size_t block = row * static_cast<size_t>(b.streams) + static_cast<size_t>(g);
      unpack_fields(low_bits, b.raw_low + block * field_block_bytes(low_bits), raw_low);
      if (rest_bits) unpack_fields(rest_bits, b.raw_rest + block * field_block_bytes(rest_bits), raw_rest);
      merge_row(b.split, placed, raw_low, raw_rest, element(out, b.split.unit, block * 64), 64);
    }
  return row_end;
}

size_t decode_wide(const WideBlock& b, WideLanes& lanes, size_t block, size_t block_end, u8* out) {
  alignas(64) u16 placed[64];
  for (; block < block_end; block++) {
    if (!step_wide(b, lanes, placed)) return npos;
    merge_wide(b, block, placed, out + block * 64 * static_cast<size_t>(b.split.unit), 64);
  }
  return block;
}

// The 64 elements of one row of one stream in lane order; beyond the end: padding.
inline void load_row(const RansEncoder& e, const void* in, size_t block, u32* v) {
  for (int i = 0; i < 64; i++) {
    size_t at = block * 64 + static_cast<size_t>(lane_position(i, e.split.unit));
    v[i] = at < e.count ? load(in, e.split.unit, at) : e.padding;
  }
}

inline void split_raw(const Split& split, const u32* v, u8* raw_low, u8* raw_rest) {
  for (int i = 0; i < 64; i++) {
    u32 r = split.raw(v[i]);
    raw_low[i] = static_cast<u8>(r);
    raw_rest[i] = static_cast<u8>(r >> 8);
  }
}

// Encodes 64 lanes, last lane first; false when the row needs patches and there were too many before it.
inline bool put_row(RansEncoder& e, int g, size_t row, const u32* v) {
  const bool crowded = e.patch[g] < e.patch_limit[g];
  const EncodeTable& t = *e.table;
  u8* at = e.at[g];
  for (int i = 63; i >= 0; i--) {
    u32 symbol = e.split.symbol(v[i]);
    EncodeTable::Entry entry = t.by_symbol[symbol];
    if (entry.frequency == 0) {
      if (crowded) return false;
      *--e.patch[g] = {static_cast<u32>(row * 64 + static_cast<size_t>(i)), symbol};
      entry = t.host_entry;
    }
    u32 x = e.low[g][i] | static_cast<u32>(e.high[g][i]) << 8;
    if (e.high[g][i] >= entry.frequency) {
      *--at = static_cast<u8>(x);
      x >>= 8;
    }
    u32 q = entry.frequency == 1 ? x : static_cast<u32>(u64{x} * entry.reciprocal >> 32);
    x += entry.start + q * (256u - entry.frequency);
    e.low[g][i] = static_cast<u8>(x);
    e.high[g][i] = static_cast<u8>(x >> 8);
  }
  e.at[g] = at;
  return true;
}

bool encode_rows(RansEncoder& e, const void* in, size_t row) {
  const int low_bits = e.split.raw_bits < 8 ? e.split.raw_bits : 8, rest_bits = e.split.raw_bits - low_bits;
  u32 v[64];
  alignas(64) u8 raw_low[64], raw_rest[64];
  while (row-- > 0)
    for (int g = e.streams - 1; g >= 0; g--) {
      size_t block = row * static_cast<size_t>(e.streams) + static_cast<size_t>(g);
      load_row(e, in, block, v);
      split_raw(e.split, v, raw_low, raw_rest);
      pack_fields(low_bits, raw_low, e.raw_low + block * field_block_bytes(low_bits));
      pack_fields(rest_bits, raw_rest, e.raw_rest + block * field_block_bytes(rest_bits));
      if (!put_row(e, g, row, v)) return false;
    }
  return true;
}

}  // namespace

bool decode_last_rows(const RansBlock& b, Lanes& lanes, void* out) {
  const int low_bits = b.split.raw_bits < 8 ? b.split.raw_bits : 8, rest_bits = b.split.raw_bits - low_bits;
  const size_t streams = static_cast<size_t>(b.streams), first = rows_before_last_two(b.rows);
  const RawRegions region(b.split, b.streams, b.rows);
  const size_t used = region.row_low_bytes, folded = region.folded_bytes;
  alignas(64) u16 placed[2][64];
  alignas(64) u8 fields[64], raw_low[64], raw_rest[64];
  for (size_t g = 0; g < streams; g++) {
    for (size_t row = first; row < b.rows; row++)
      if (!step(*b.table, lanes.low[g], lanes.high[g], lanes.at[g], b.stream_end[g], placed[row - first])) return false;
    // After the last step a sound stream is used up and every state is 256 plus one byte of folded raw bits.
    if (lanes.at[g] != b.stream_end[g]) return false;
    for (size_t i = 0; i < 64; i++)
      if (lanes.high[g][i] != 1 || (i >= used + folded && lanes.low[g][i] != 0)) return false;
    for (size_t row = first; row < b.rows; row++) {
      const size_t block = row * streams + g;
      if (block * 64 >= b.count) continue;
      if (row + 1 == b.rows) {
        std::memcpy(fields, lanes.low[g], used);
      } else {
        std::memcpy(fields, b.raw_low + row * streams * used + g * (used - folded), used - folded);
        std::memcpy(fields + used - folded, lanes.low[g] + used, folded);
      }
      unpack_fields(low_bits, fields, raw_low);
      if (rest_bits) unpack_fields(rest_bits, b.raw_rest + block * region.row_rest_bytes, raw_rest);
      merge_row(b.split, placed[row - first], raw_low, raw_rest, element(out, b.split.unit, block * 64), std::min<size_t>(64, b.count - block * 64));
    }
  }
  return true;
}

bool encode_last_rows(RansEncoder& e, const void* in) {
  const int low_bits = e.split.raw_bits < 8 ? e.split.raw_bits : 8, rest_bits = e.split.raw_bits - low_bits;
  const size_t streams = static_cast<size_t>(e.streams), first = rows_before_last_two(e.rows);
  const RawRegions region(e.split, e.streams, e.rows);
  const size_t used = region.row_low_bytes, folded = region.folded_bytes;
  u32 v[2][64];
  alignas(64) u8 fields[64], raw_low[64], raw_rest[64];
  for (size_t g = 0; g < streams; g++) {
    std::memset(e.low[g], 0, 64);
    std::memset(e.high[g], 1, 64);
    for (size_t row = first; row < e.rows; row++) {
      const size_t block = row * streams + g;
      load_row(e, in, block, v[row - first]);
      split_raw(e.split, v[row - first], raw_low, raw_rest);
      pack_fields(low_bits, raw_low, fields);
      pack_fields(rest_bits, raw_rest, e.raw_rest + block * region.row_rest_bytes);
      if (row + 1 == e.rows) {
        std::memcpy(e.low[g], fields, used);
      } else {
        std::memcpy(e.raw_low + row * streams * used + g * (used - folded), fields, used - folded);
        std::memcpy(e.low[g] + used, fields + used - folded, folded);
      }
    }
    for (size_t row = e.rows; row-- > first;)
      if (!put_row(e, static_cast<int>(g), row, v[row - first])) return false;
  }
  return true;
}

const Kernels& portable_kernels() {
  static const Kernels set = {"portable", decode_rows, encode_rows, decode_wide, join4, join8, split4, split8, update_digest};
  return set;
}

}  // namespace netweight
