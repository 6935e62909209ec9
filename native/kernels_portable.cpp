// Kernels for any processor: the behaviour that every other set must match. Written in short passes over 64 lanes.
#include "difference.h"
#include "digest.h"
#include "fields.h"
#include "interleave.h"
#include "joint.h"
#include "merge.h"
#include "rounding.h"
#include "spread.h"

#include <algorithm>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace netweight {

EncodeTable::EncodeTable(const Table& t, const Split& split) {
  std::memset(map, 63, sizeof map);
  std::memset(frequency, 0, sizeof frequency);
  std::memset(start, 0, sizeof start);
  std::memset(reciprocal_low, 0, sizeof reciprocal_low);
  std::memset(reciprocal_high, 0, sizeof reciprocal_high);
  by_symbol.assign(size_t{1} << split.symbol_bits(), Entry{});
  const auto [least, greatest] = std::minmax_element(t.symbol, t.symbol + t.count);
  base = *least;
  lookup = t.steep ? SymbolLookup::none  // vector code multiplies signed bytes
           : *greatest - base < 62    ? SymbolLookup::range
           : split.symbol_bits() <= 8 || (split.symbol_bits() == 9 && *greatest < 255) ? SymbolLookup::map  // without signs
           : split.symbol_bits() == 9 ? SymbolLookup::pairs
                                      : SymbolLookup::none;
  if (lookup == SymbolLookup::pairs) std::memset(map, 31, sizeof map);
  host = 0;
  int pairs = 0;
  for (int i = 0; i < t.count; i++) {
    const int f = t.frequency[i], s = t.symbol[i];
    const Entry entry{((u64{1} << 32) + static_cast<u64>(f) - 1) / static_cast<u64>(f), static_cast<u16>(f), t.start[i]};
    by_symbol[s] = entry;
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
      x[i] = (x[i] & 0xfff) * (lanes.state[i] >> 12) + (x[i] >> 12 & 0xfff);
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

// ---- passes over 64 lanes --------------------------------------------------------------------------------------------
// In SSE2, which every x86-64 processor has, or in plain C++.

#if defined(__SSE2__)

inline __m128i load16(const void* p) { return _mm_load_si128(static_cast<const __m128i*>(p)); }
inline void store16(void* p, __m128i v) { _mm_store_si128(static_cast<__m128i*>(p), v); }

// By the table's entries for the slots in `low`: x = frequency * high + rest, and the placed symbols. Where x has no high byte, its low byte
// becomes the high one and a bit of `need` says so.
inline void advance(const DecodeTable& t, u8* low, u8* high, u8* need, u16* placed) {
  const __m128i byte = _mm_set1_epi16(0xff), zero = _mm_setzero_si128();
  auto halves = [&](int i, __m128i& lower) {
    u64 s;
    std::memcpy(&s, low + i, 8);
    auto entry = [&](u64 slot) { return _mm_cvtsi32_si128(static_cast<int>(t.entry[slot & 0xff])); };
    auto four = [&](u64 s) {  // lower halves of four entries, then upper ones
      return _mm_unpacklo_epi32(_mm_unpacklo_epi16(entry(s), entry(s >> 8)), _mm_unpacklo_epi16(entry(s >> 16), entry(s >> 24)));
    };
    const __m128i a = four(s), b = four(s >> 32);
    store16(placed + i, _mm_unpackhi_epi64(a, b));
    lower = _mm_unpacklo_epi64(a, b);
  };
#pragma GCC unroll 4
  for (int i = 0; i < 64; i += 16) {
    __m128i a, b;
    halves(i, a);
    halves(i + 8, b);
    const __m128i h = load16(high + i);
    const __m128i x0 = _mm_add_epi16(_mm_mullo_epi16(_mm_and_si128(a, byte), _mm_unpacklo_epi8(h, zero)), _mm_srli_epi16(a, 8));
    const __m128i x1 = _mm_add_epi16(_mm_mullo_epi16(_mm_and_si128(b, byte), _mm_unpackhi_epi8(h, zero)), _mm_srli_epi16(b, 8));
    const __m128i new_low = _mm_packus_epi16(_mm_and_si128(x0, byte), _mm_and_si128(x1, byte));
    const __m128i new_high = _mm_packus_epi16(_mm_srli_epi16(x0, 8), _mm_srli_epi16(x1, 8));
    const __m128i empty = _mm_cmpeq_epi8(new_high, zero);
    const u16 mask = static_cast<u16>(_mm_movemask_epi8(empty));
    std::memcpy(need + i / 8, &mask, 2);
    store16(low + i, new_low);
    store16(high + i, _mm_or_si128(new_high, _mm_and_si128(empty, new_low)));
  }
}

// merge_row for whole rows.
struct MergeRows {
  const Split& split;
  const bool rest;
  const int bits;
  const __m128i sign, mantissa, top;

  explicit MergeRows(const Split& s)
      : split(s),
        rest(s.raw_bits > 8),
        bits(rest ? s.raw_bits - 8 : s.raw_bits),
        sign(_mm_set1_epi8(static_cast<char>(s.signed_raw ? 1 << (bits - 1) : 0))),
        mantissa(_mm_set1_epi8(static_cast<char>((1 << (s.signed_raw ? bits - 1 : bits)) - 1))),
        top(_mm_cvtsi32_si128(8 - bits)) {}

  void operator()(const u16* placed, const u8* raw_low, const u8* raw_rest, u8* out) const {
    const auto loaded = [](const u8* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
    const bool bytes = split.unit == 1;
#pragma GCC unroll 4
    for (int i = 0; i < 64; i += 16) {
      const __m128i r = loaded((rest ? raw_rest : raw_low) + i), m = _mm_and_si128(r, mantissa), s = _mm_sll_epi16(_mm_and_si128(r, sign), top);
      const __m128i p0 = load16(placed + i), p1 = load16(placed + i + 8), both = _mm_or_si128(m, s);
      auto put = [&](int at, __m128i v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at), v); };
      if (bytes) {
        put(i, _mm_or_si128(_mm_packus_epi16(p0, p1), both));
        continue;
      }
      const __m128i first = rest ? loaded(raw_low + i) : m, second = rest ? both : s;
      put(2 * lane_position(i, 2), _mm_or_si128(p0, _mm_unpacklo_epi8(first, second)));
      put(2 * lane_position(i + 8, 2), _mm_or_si128(p1, _mm_unpackhi_epi8(first, second)));
    }
  }
};

#else

inline void advance(const DecodeTable& t, u8* low, u8* high, u8* need, u16* placed) {
  u8 empty[64];
  for (int i = 0; i < 64; i++) {
    const u32 entry = t.entry[low[i]], x = (entry & 0xff) * high[i] + (entry >> 8 & 0xff);
    empty[i] = x < 256;
    low[i] = static_cast<u8>(x);
    high[i] = static_cast<u8>(empty[i] ? x : x >> 8);
    placed[i] = static_cast<u16>(entry >> 16);
  }
  for (int q = 0; q < 8; q++) {
    u64 flags;
    std::memcpy(&flags, empty + 8 * q, 8);
    need[q] = static_cast<u8>(flags * 0x0102040810204080ull >> 56);
  }
}

struct MergeRows {
  const Split& split;
  void operator()(const u16* placed, const u8* raw_low, const u8* raw_rest, u8* out) const { merge_row(split, placed, raw_low, raw_rest, out, 64); }
};

#endif

// For each mask of eight lanes: how to move the next bytes of a stream to the lanes it names. A byte that has to go up by
// d lanes goes by 4, by 2 and by 1, as the bits of d say; arrives[k] marks where bytes land in step k.
struct Expansion {
  u64 arrives[3];
  u64 named;  // the lanes of the mask
  u64 count;
};

struct Expansions {
  Expansion of[256];
  constexpr Expansions() : of{} {
    for (u32 mask = 0; mask < 256; mask++) {
      Expansion& e = of[mask];
      for (u32 lane = 0; lane < 8; lane++) {
        if (!(mask >> lane & 1)) continue;
        e.named |= u64{0xff} << 8 * lane;
        u32 at = static_cast<u32>(e.count++);
        const u32 distance = lane - at;
        for (int k = 0; k < 3; k++) {
          if (!(distance & (4u >> k))) continue;
          at += 4u >> k;
          e.arrives[k] |= u64{0xff} << 8 * at;
        }
      }
    }
  }
};
constexpr Expansions kExpansions;

// Gives the next bytes of a stream to the lanes that a and b name, of the first and the second eight.
#if defined(__SSE2__)
inline void give(const Expansion& a, const Expansion& b, const u8* from, u8* low) {
  auto both = [](const void* x, const void* y) {
    return _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(_mm_loadl_epi64(static_cast<const __m128i*>(x))), static_cast<const __m64*>(y)));
  };
  __m128i fresh = both(from, from + a.count);
  auto move = [&](__m128i moved, int k) { fresh = _mm_xor_si128(fresh, _mm_and_si128(_mm_xor_si128(fresh, moved), both(a.arrives + k, b.arrives + k))); };
  move(_mm_slli_epi64(fresh, 32), 0);
  move(_mm_slli_epi64(fresh, 16), 1);
  move(_mm_slli_epi64(fresh, 8), 2);
  const __m128i now = load16(low), named = both(&a.named, &b.named);
  store16(low, _mm_xor_si128(now, _mm_and_si128(_mm_xor_si128(now, fresh), named)));
}
#else
inline void give(const Expansion& e, const u8* from, u8* low) {
  u64 fresh, now;
  std::memcpy(&fresh, from, 8);
  fresh ^= (fresh ^ fresh << 32) & e.arrives[0];
  fresh ^= (fresh ^ fresh << 16) & e.arrives[1];
  fresh ^= (fresh ^ fresh << 8) & e.arrives[2];
  std::memcpy(&now, low, 8);
  now ^= (now ^ fresh) & e.named;
  std::memcpy(low, &now, 8);
}
inline void give(const Expansion& a, const Expansion& b, const u8* from, u8* low) {
  give(a, from, low);
  give(b, from + a.count, low + 8);
}
#endif

// Gives the next bytes of a stream to the lanes whose bits are set in `need`; false when it runs out.
inline bool refill(const u8* need, u8* low, const u8*& at, const u8* end) {
  const u8* from = at;
  u8 last[72];
  if (end - from < 72) {  // reading on would pass the end
    std::memset(last, 0, sizeof last);
    std::memcpy(last, from, static_cast<size_t>(end - from));
    from = last;
  }
  const u8* const start = from;
  for (int q = 0; q < 8; q += 2) {
    const Expansion &a = kExpansions.of[need[q]], &b = kExpansions.of[need[q + 1]];
    give(a, b, from, low + 8 * q);
    from += a.count + b.count;
  }
  if (from - start > end - at) return false;
  at += from - start;
  return true;
}

// One step of 64 lanes: placed symbols to `placed`, states advanced and refilled. False when the stream runs out.
inline bool step(const DecodeTable& t, u8* low, u8* high, const u8*& at, const u8* end, u16* placed) {
  u8 need[8];
  advance(t, low, high, need, placed);
  return refill(need, low, at, end);
}

inline void* element(void* out, int unit, size_t i) { return static_cast<u8*>(out) + i * static_cast<size_t>(unit); }

size_t decode_rows(const RansBlock& b, Lanes& lanes, size_t row, size_t row_end, void* out) {
  const int low_bits = b.split.raw_bits < 8 ? b.split.raw_bits : 8, rest_bits = b.split.raw_bits - low_bits;
  const MergeRows merge{b.split};
  alignas(64) u16 placed[64];
  alignas(64) u8 raw_low[64], raw_rest[64];
  for (; row < row_end; row++)
    for (int g = 0; g < b.streams; g++) {
      const size_t block = row * static_cast<size_t>(b.streams) + static_cast<size_t>(g);
      const u8* low = b.raw_low + block * field_block_bytes(low_bits);
      if (low_bits < 8) {
        unpack_fields(low_bits, low, raw_low);
        low = raw_low;
      }
      if (!step(*b.table, lanes.low[g], lanes.high[g], lanes.at[g], b.stream_end[g], placed)) return npos;
      if (rest_bits) unpack_fields(rest_bits, b.raw_rest + block * field_block_bytes(rest_bits), raw_rest);
      merge(placed, low, raw_rest, static_cast<u8*>(out) + block * 64 * static_cast<size_t>(b.split.unit));
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
inline void load_row(const RansEncoder& e, const void* in, size_t block, u16* v) {
  const u8* from = static_cast<const u8*>(in) + block * 64 * static_cast<size_t>(e.split.unit);
  const size_t left = e.count > block * 64 ? std::min<size_t>(64, e.count - block * 64) : 0;
  u16 ordered[64];
  if (left < 64) std::fill(ordered, ordered + 64, e.padding);
  if (e.split.unit == 1) {
    for (size_t i = 0; i < left; i++) v[i] = from[i];
    std::copy(ordered + left, ordered + 64, v + left);
    return;
  }
  std::memcpy(ordered, from, 2 * left);
  for (int q = 0; q < 8; q++) std::memcpy(v + 8 * q, ordered + lane_position(8 * q, 2), 16);
}

inline void split_raw(const Split& split, const u16* v, u8* raw_low, u8* raw_rest) {
  const int shift = 8 * split.unit - split.raw_bits;
  const u32 sign = split.signed_raw ? 1u << (split.raw_bits - 1) : 0, rest = (split.signed_raw ? sign : 1u << split.raw_bits) - 1;
  u16 raw[64];
  for (int i = 0; i < 64; i++) raw[i] = static_cast<u16>((v[i] & rest) | (v[i] >> shift & sign));
  for (int i = 0; i < 64; i++) raw_low[i] = static_cast<u8>(raw[i]);
  for (int i = 0; i < 64; i++) raw_rest[i] = static_cast<u8>(raw[i] >> 8);
}

// Puts the host in the place of symbols that the table lacks and notes patches, last lane first.
inline bool note_patches(RansEncoder& e, int g, size_t row, u16* symbol, u16 host) {
  if (e.patch[g] < e.patch_limit[g]) return false;
  for (int i = 63; i >= 0; i--) {
    if (e.table->by_symbol[symbol[i]].frequency) continue;
    *--e.patch[g] = {static_cast<u32>(row * 64 + static_cast<size_t>(i)), symbol[i]};
    symbol[i] = host;
  }
  return true;
}

// Encodes 64 lanes, last lane first; false when the row needs patches and there were too many before it.
inline bool put_row(RansEncoder& e, int g, size_t row, const u16* v) {
  const EncodeTable::Entry* table = e.table->by_symbol.data();
  const int shift = e.split.signed_raw ? e.split.raw_bits - 1 : e.split.raw_bits;
  const u16 mask = static_cast<u16>((1u << e.split.symbol_bits()) - 1);
  u16 symbol[64];
  for (int i = 0; i < 64; i++) symbol[i] = static_cast<u16>(v[i] >> shift & mask);
  u32 rare = 0;
  for (int i = 0; i < 64; i++) rare |= table[symbol[i]].frequency == 0;
  if (rare && !note_patches(e, g, row, symbol, static_cast<u16>(e.split.symbol(e.padding)))) return false;
  u8* at = e.at[g];
  u8 low[64], high[64];
  std::memcpy(low, e.low[g], 64);
  std::memcpy(high, e.high[g], 64);
  for (int i = 63; i >= 0; i--) {
    const EncodeTable::Entry entry = table[symbol[i]];
    const u32 full = high[i] >= entry.frequency;
    at[-1] = low[i];  // kept if the state is full; no branch, because nothing could predict it
    at -= full;
    const u32 x = (low[i] | static_cast<u32>(high[i]) << 8) >> 8 * full;
    const u32 next = x + entry.start + static_cast<u32>(x * entry.reciprocal >> 32) * (256u - entry.frequency);
    low[i] = static_cast<u8>(next);
    high[i] = static_cast<u8>(next >> 8);
  }
  e.at[g] = at;
  std::memcpy(e.low[g], low, 64);
  std::memcpy(e.high[g], high, 64);
  return true;
}

bool encode_rows(RansEncoder& e, const void* in, size_t row) {
  const int low_bits = e.split.raw_bits < 8 ? e.split.raw_bits : 8, rest_bits = e.split.raw_bits - low_bits;
  u16 v[64];
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
  u16 v[2][64];
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
  static const Kernels set = {"portable", decode_rows, encode_rows, decode_wide, join4, join8,
                              split4, split8, aes_rounds, decode_words_here, round_weights_here, spread, recall, subtract, add, interleave, class_sizes, part_all, unite_elements, pack_some};
  return set;
}

}  // namespace netweight
