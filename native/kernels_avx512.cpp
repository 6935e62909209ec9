// AVX-512 (VBMI, VBMI2) kernels. A stream's 64 states are two registers, low bytes and high bytes; every table fits in
// registers; a refill is one expand. Compiled with -mavx512*; only called after a check of the processor.
#include "kernels.h"

#if defined(__AVX512VBMI2__) && defined(__AVX512BW__) && defined(__AVX512VBMI__)
#include <cpuid.h>
#include <immintrin.h>

#include "difference.h"
#include "digest.h"
#include "interleave.h"
#include "joint.h"
#include "rounding.h"
#include "spread.h"

namespace netweight {
namespace {

// How the fields of a block reach the bytes of the elements: spread 8 fields into each 8-byte word, then shift every byte.
struct FieldPlacement {
  __m512i spread;      // byte index of each word's bytes
  __m512i low_shift;   // bit offset, within the word, of what lands in the low byte
  __m512i high_shift;
  __m512i low_mask;    // which bits of the low byte are raw
  __m512i high_mask;
  __mmask64 present;   // bytes of a block
};

FieldPlacement placement(int bits, int low_offset, u8 low_mask, int high_offset, u8 high_mask) {
  alignas(64) u8 spread[64], low[64], high[64];
  for (int i = 0; i < 64; i++) {
    int at = i / 8 * bits + i % 8;
    spread[i] = static_cast<u8>(at < 64 ? at : 63);
    low[i] = static_cast<u8>((i % 8 * bits + low_offset) & 63);
    high[i] = static_cast<u8>((i % 8 * bits + high_offset) & 63);
  }
  return {_mm512_load_si512(spread),
          _mm512_load_si512(low),
          _mm512_load_si512(high),
          _mm512_set1_epi8(static_cast<char>(low_mask)),
          _mm512_set1_epi8(static_cast<char>(high_mask)),
          bits == 8 ? ~__mmask64{0} : (__mmask64{1} << (8 * bits)) - 1};
}

constexpr u8 ones(int bits) { return static_cast<u8>((1 << bits) - 1); }

// For at most eight raw bits per element: both output bytes come from one block. For more: the low byte is a plain byte and
// the high byte comes from the block of the remaining bits.
FieldPlacement element_placement(const Split& s) {
  int b = s.raw_bits <= 8 ? s.raw_bits : s.raw_bits - 8;
  if (s.raw_bits > 8) return placement(b, s.signed_raw ? b - 8 : 0, s.signed_raw ? 0x80 : 0, 0, ones(s.signed_raw ? b - 1 : b));
  if (!s.signed_raw) return placement(b, 0, ones(b), 0, 0);
  return placement(b, 0, ones(b - 1), b - 8, 0x80);
}

inline __m512i choose(__m512i mask, __m512i a, __m512i b) { return _mm512_ternarylogic_epi64(mask, a, b, 0xCA); }
inline __m512i merge_or(__m512i mask, __m512i a, __m512i b) { return _mm512_ternarylogic_epi64(mask, a, b, 0xEA); }

enum class Raw { none, some, more };  // more: than eight bits

// Rows of 64 * S elements. kSteep: frequencies of more than seven bits.
template <int S, int kUnit, Raw kRaw, bool kSteep = false>
__attribute__((noinline)) size_t decode(const RansBlock& b, Lanes& lanes, size_t row, size_t row_end, u8* out) {
  const DecodeTable& t = *b.table;
  const __m512i slots0 = _mm512_load_si512(t.slot_to_index), slots1 = _mm512_load_si512(t.slot_to_index + 64),
                slots2 = _mm512_load_si512(t.slot_to_index + 128), slots3 = _mm512_load_si512(t.slot_to_index + 192);
  const __m512i frequency = _mm512_load_si512(t.frequency), start = _mm512_load_si512(t.start),
                sym_low = _mm512_load_si512(t.low), sym_high = _mm512_load_si512(t.high);
  const FieldPlacement place = element_placement(b.split);
  const __m512i one = _mm512_set1_epi8(1), even = _mm512_set1_epi16(0xff);
  const RawRegions region(b.split, S, b.rows);
  const u8* raw = b.raw_low + row * S * region.row_low_bytes;
  const u8* rest = b.raw_rest + row * S * region.row_rest_bytes;
  const u8* at[S];
  __m512i L[S], H[S];
#pragma GCC unroll 4
  for (int g = 0; g < S; g++) {
    at[g] = lanes.at[g];
    L[g] = _mm512_load_si512(lanes.low[g]);
    H[g] = _mm512_load_si512(lanes.high[g]);
  }
  u8* to = out + row * S * 64 * kUnit;

  auto step = [&](int g) __attribute__((always_inline)) {
    __m512i q0 = _mm512_permutex2var_epi8(slots0, L[g], slots1), q1 = _mm512_permutex2var_epi8(slots2, L[g], slots3);
    __m512i index = _mm512_mask_mov_epi8(q0, _mm512_movepi8_mask(L[g]), q1);
    __m512i f = _mm512_permutexvar_epi8(index, frequency);
    __m512i k = _mm512_sub_epi8(L[g], _mm512_permutexvar_epi8(index, start));
    // x = f * H + k as sums of pairs of bytes, for even and odd lanes apart: shifts and blends instead of shuffles.
    __m512i x0, x1;
    if constexpr (kSteep) {
      x0 = _mm512_add_epi16(_mm512_mullo_epi16(_mm512_and_si512(even, H[g]), _mm512_and_si512(even, f)), _mm512_and_si512(even, k));
      x1 = _mm512_add_epi16(_mm512_mullo_epi16(_mm512_srli_epi16(H[g], 8), _mm512_srli_epi16(f, 8)), _mm512_srli_epi16(k, 8));
    } else {
      x0 = _mm512_maddubs_epi16(choose(even, H[g], one), choose(even, f, _mm512_slli_epi16(k, 8)));
      x1 = _mm512_maddubs_epi16(choose(even, one, H[g]), choose(even, _mm512_srli_epi16(k, 8), f));
    }
    __m512i low = choose(even, x0, _mm512_slli_epi16(x1, 8)), high = choose(even, _mm512_srli_epi16(x0, 8), x1);
    __mmask64 refill = _mm512_testn_epi8_mask(high, high);
    H[g] = _mm512_mask_mov_epi8(high, refill, low);
    L[g] = _mm512_mask_expand_epi8(low, refill, _mm512_loadu_si512(at[g]));
    at[g] += __builtin_popcountll(refill);

    if constexpr (kUnit == 2) {
      __m512i lo = _mm512_permutexvar_epi8(index, sym_low), hi = _mm512_permutexvar_epi8(index, sym_high);
      if constexpr (kRaw == Raw::more) {
        __m512i r = _mm512_permutexvar_epi8(place.spread, _mm512_maskz_loadu_epi8(place.present, rest));
        hi = merge_or(place.high_mask, _mm512_multishift_epi64_epi8(place.high_shift, r), hi);
        hi = merge_or(place.low_mask, _mm512_multishift_epi64_epi8(place.low_shift, r), hi);
        lo = _mm512_or_si512(lo, _mm512_loadu_si512(raw));
        rest += region.row_rest_bytes;
      } else {
        __m512i r = _mm512_permutexvar_epi8(place.spread, _mm512_maskz_loadu_epi8(place.present, raw));
        lo = choose(place.low_mask, _mm512_multishift_epi64_epi8(place.low_shift, r), lo);
        hi = choose(place.high_mask, _mm512_multishift_epi64_epi8(place.high_shift, r), hi);
      }
      __builtin_prefetch(raw + 4096, 0);  // blobs that come from memory decode a tenth faster for it
      __builtin_prefetch(to + 2048, 1);
      __builtin_prefetch(to + 2112, 1);
      _mm512_storeu_si512(to, _mm512_unpacklo_epi8(lo, hi));
      _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi8(lo, hi));
    } else if constexpr (kRaw == Raw::none) {
      __builtin_prefetch(to + 2048, 1);
      _mm512_storeu_si512(to, _mm512_permutexvar_epi8(index, sym_low));
    } else {
      __m512i r = _mm512_permutexvar_epi8(place.spread, _mm512_maskz_loadu_epi8(place.present, raw));
      __m512i v = merge_or(place.low_mask, _mm512_multishift_epi64_epi8(place.low_shift, r), _mm512_permutexvar_epi8(index, sym_low));
      v = merge_or(place.high_mask, _mm512_multishift_epi64_epi8(place.high_shift, r), v);
      _mm512_storeu_si512(to, v);
    }
    raw += region.row_low_bytes;
    to += 64 * kUnit;
  };

  // A step reads up to 64 bytes of each stream: sixteen rows at a time while that is safe, then row by row.
  for (size_t many : {size_t{16}, size_t{1}})
    while (row + many <= row_end) {
      bool safe = true;
      for (int g = 0; g < S; g++) safe &= static_cast<size_t>(b.readable_end - at[g]) >= 64 * many;
      if (!safe) break;
      for (size_t r = 0; r < many; r++) {
#pragma GCC unroll 4
        for (int g = 0; g < S; g++) step(g);
      }
      row += many;
      for (int g = 0; g < S; g++)
        if (at[g] > b.stream_end[g]) return npos;
    }
#pragma GCC unroll 4
  for (int g = 0; g < S; g++) {
    lanes.at[g] = at[g];
    _mm512_store_si512(lanes.low[g], L[g]);
    _mm512_store_si512(lanes.high[g], H[g]);
  }
  return row;
}

template <int S>
size_t decode_streams(const RansBlock& b, Lanes& lanes, size_t row, size_t row_end, u8* out) {
  if (b.steep && b.split.unit == 2) return row;
  if (b.steep) return decode<S, 1, Raw::some, true>(b, lanes, row, row_end, out);
  if (b.split.unit == 1) return b.split.raw_bits ? decode<S, 1, Raw::some>(b, lanes, row, row_end, out) : decode<S, 1, Raw::none>(b, lanes, row, row_end, out);
  return b.split.raw_bits > 8 ? decode<S, 2, Raw::more>(b, lanes, row, row_end, out) : decode<S, 2, Raw::some>(b, lanes, row, row_end, out);
}

size_t decode_rows(const RansBlock& b, Lanes& lanes, size_t row, size_t row_end, void* out) {
  u8* to = static_cast<u8*>(out);
  return b.streams == 1   ? decode_streams<1>(b, lanes, row, row_end, to)
         : b.streams == 2 ? decode_streams<2>(b, lanes, row, row_end, to)
                          : decode_streams<4>(b, lanes, row, row_end, to);
}

// Packs 64 bytes holding fields of `bits` < 8 bits into the last 8 * bits bytes of a register.
struct FieldPacking {
  __m512i pairs, quads;
  __m512i shift;  // of the last step
  __m512i four;   // mask of four fields
  __m512i compact;
  __mmask64 present;

  explicit FieldPacking(int bits) {
    pairs = _mm512_set1_epi16(static_cast<short>(1 | 1 << (8 + bits)));
    quads = _mm512_set1_epi32(1 | 1 << (16 + 2 * bits));
    shift = _mm512_set1_epi64(32 - 4 * bits);
    four = _mm512_set1_epi64((1ll << (4 * bits)) - 1);
    alignas(64) u8 index[64] = {};
    for (int i = 0; i < 8 * bits; i++) index[64 - 8 * bits + i] = static_cast<u8>(i / bits * 8 + i % bits);
    compact = _mm512_load_si512(index);
    present = bits ? ~__mmask64{0} << (64 - 8 * bits) : 0;
  }
  __m512i operator()(__m512i fields) const {
    __m512i x = _mm512_madd_epi16(_mm512_maddubs_epi16(pairs, fields), quads);
    return _mm512_permutexvar_epi8(compact, choose(four, x, _mm512_srlv_epi64(x, shift)));
  }
};

// Rows of 64 * S elements, from the last to the first.
template <int S, int kUnit, SymbolLookup kLookup>
__attribute__((noinline)) bool encode(RansEncoder& e, const u8* in, size_t row) {
  const EncodeTable& t = *e.table;
  const __m512i map0 = _mm512_load_si512(t.map), map1 = _mm512_load_si512(t.map + 64), map2 = _mm512_load_si512(t.map + 128),
                map3 = _mm512_load_si512(t.map + 192);
  const __m512i frequency = _mm512_load_si512(t.frequency), start = _mm512_load_si512(t.start),
                reciprocal_low = _mm512_load_si512(t.reciprocal_low), reciprocal_high = _mm512_load_si512(t.reciprocal_high);
  const __m512i zero = _mm512_setzero_si512(), even = _mm512_set1_epi16(0xff), one = _mm512_set1_epi8(1), ones = _mm512_set1_epi8(-1);
  const __m512i host = _mm512_set1_epi8(static_cast<char>(t.host)), before_base = _mm512_set1_epi16(static_cast<short>(t.base - 1)),
                last_index = _mm512_set1_epi8(63);
  const Split split = e.split;
  const int low_bits = split.raw_bits < 8 ? split.raw_bits : 8, rest_bits = split.raw_bits - low_bits;
  const RawRegions region(split, S, e.rows);
  const FieldPacking pack_low(low_bits & 7), pack_rest(rest_bits);
  const bool has_rest = rest_bits > 0, whole_low = low_bits == 8, some_low = low_bits > 0;
  // Symbol and raw bits as shifts and masks of 16-bit words (one-byte elements are widened first).
  const __m512i symbol_shift = _mm512_set1_epi16(static_cast<short>(split.signed_raw ? split.raw_bits - 1 : split.raw_bits));
  const __m512i symbol_mask = _mm512_set1_epi16(static_cast<short>((1 << split.symbol_bits()) - 1));
  const __m512i sign_shift = _mm512_set1_epi16(static_cast<short>(8 * split.unit - split.raw_bits));
  const __m512i sign_bit = _mm512_set1_epi16(static_cast<short>(split.signed_raw ? 1 << (split.raw_bits - 1) : 0));
  const __m512i raw_mask =
      _mm512_set1_epi16(static_cast<short>(split.signed_raw ? (1 << (split.raw_bits - 1)) - 1 : (1 << split.raw_bits) - 1));

  u8* at[S];
  __m512i L[S], H[S];
#pragma GCC unroll 4
  for (int g = 0; g < S; g++) {
    at[g] = e.at[g];
    L[g] = _mm512_load_si512(e.low[g]);
    H[g] = _mm512_load_si512(e.high[g]);
  }
  u8* raw = e.raw_low + row * S * region.row_low_bytes;
  u8* rest = e.raw_rest + row * S * region.row_rest_bytes;
  const u8* from = in + row * S * 64 * kUnit;
  bool room = true;

  auto step = [&](int g, size_t r) __attribute__((always_inline)) {
    from -= 64 * kUnit;
    // What this thread will read next.
    _mm_prefetch(reinterpret_cast<const char*>(from + e.ahead), _MM_HINT_T1);
    __m512i v0, v1;  // words: elements in two halves, so that packing them gives lane order
    if constexpr (kUnit == 2) {
      _mm_prefetch(reinterpret_cast<const char*>(from + e.ahead + 64), _MM_HINT_T1);
      v0 = _mm512_loadu_si512(from);
      v1 = _mm512_loadu_si512(from + 64);
    } else {
      __m512i v = _mm512_loadu_si512(from);
      v0 = _mm512_unpacklo_epi8(v, zero);
      v1 = _mm512_unpackhi_epi8(v, zero);
    }
    __m512i s0 = _mm512_and_si512(_mm512_srlv_epi16(v0, symbol_shift), symbol_mask);
    __m512i s1 = _mm512_and_si512(_mm512_srlv_epi16(v1, symbol_shift), symbol_mask);
    __m512i index;
    if constexpr (kLookup == SymbolLookup::range) {  // below the range: 0; above: at most 63; both have no frequency
      index = _mm512_packus_epi16(_mm512_sub_epi16(s0, before_base), _mm512_sub_epi16(s1, before_base));
      index = _mm512_min_epu8(index, last_index);
    } else if constexpr (kLookup == SymbolLookup::pairs) {
      __m512i head = _mm512_packus_epi16(_mm512_srli_epi16(s0, 1), _mm512_srli_epi16(s1, 1));
      __m512i tail = _mm512_and_si512(_mm512_packus_epi16(_mm512_and_si512(s0, even), _mm512_and_si512(s1, even)), one);
      index = _mm512_mask_mov_epi8(_mm512_permutex2var_epi8(map0, head, map1), _mm512_movepi8_mask(head),
                                   _mm512_permutex2var_epi8(map2, head, map3));
      index = _mm512_or_si512(_mm512_add_epi8(index, index), tail);
    } else {
      __m512i symbol = _mm512_packus_epi16(s0, s1);
      index = _mm512_mask_mov_epi8(_mm512_permutex2var_epi8(map0, symbol, map1), _mm512_movepi8_mask(symbol),
                                   _mm512_permutex2var_epi8(map2, symbol, map3));
    }
    __m512i r0 = choose(raw_mask, v0, _mm512_and_si512(_mm512_srlv_epi16(v0, sign_shift), sign_bit));
    __m512i r1 = choose(raw_mask, v1, _mm512_and_si512(_mm512_srlv_epi16(v1, sign_shift), sign_bit));
    if (has_rest) {
      raw -= 64;
      _mm512_storeu_si512(raw, _mm512_packus_epi16(_mm512_and_si512(r0, even), _mm512_and_si512(r1, even)));
      rest -= region.row_rest_bytes;
      __m512i packed = pack_rest(_mm512_packus_epi16(_mm512_srli_epi16(r0, 8), _mm512_srli_epi16(r1, 8)));
      _mm512_mask_storeu_epi8(rest + region.row_rest_bytes - 64, pack_rest.present, packed);
    } else if (whole_low) {
      raw -= 64;
      _mm512_storeu_si512(raw, _mm512_packus_epi16(r0, r1));
    } else if (some_low) {
      // Stored with bytes below it that the rows to come, or after row 0 the caller's header, overwrite.
      raw -= region.row_low_bytes;
      _mm512_storeu_si512(raw + region.row_low_bytes - 64, pack_low(_mm512_packus_epi16(r0, r1)));
    }

    __m512i f = _mm512_permutexvar_epi8(index, frequency);
    __mmask64 rare = _mm512_testn_epi8_mask(f, f);
    if (__builtin_expect(rare != 0, 0)) {
      if (e.patch[g] < e.patch_limit[g]) room = false;
      else {
        alignas(64) u16 symbols[64];
        // Words s0, s1 of one 128-bit part are lanes 16q..16q+7 and 16q+8..16q+15.
        _mm512_store_si512(symbols, s0);
        _mm512_store_si512(symbols + 32, s1);
        for (u64 m = rare; m;) {
          int i = 63 - __builtin_clzll(m);
          m &= ~(u64{1} << i);
          *--e.patch[g] = {static_cast<u32>(r * 64 + static_cast<size_t>(i)), symbols[((i >> 3) & 1) * 32 + (i >> 4) * 8 + (i & 7)]};
        }
      }
      index = _mm512_mask_mov_epi8(index, rare, host);
      f = _mm512_permutexvar_epi8(index, frequency);
    }
    __mmask64 full = _mm512_cmpge_epu8_mask(H[g], f);
    unsigned emitted = static_cast<unsigned>(__builtin_popcountll(full));
    at[g] -= emitted;
    _mm512_mask_storeu_epi8(at[g], _bzhi_u64(~0ull, emitted), _mm512_maskz_compress_epi8(full, L[g]));
    __m512i low = _mm512_mask_mov_epi8(L[g], full, H[g]), high = _mm512_maskz_mov_epi8(~full, H[g]);

    // x = 256 q' + slot: q = x / f and the remainder, for even and odd lanes apart; the estimate of q may be one too small.
    __m512i b = _mm512_permutexvar_epi8(index, start), d0 = _mm512_permutexvar_epi8(index, reciprocal_low),
            d1 = _mm512_permutexvar_epi8(index, reciprocal_high);
    __m512i q0 = _mm512_mulhi_epu16(choose(even, low, _mm512_slli_epi16(high, 8)), choose(even, d0, _mm512_slli_epi16(d1, 8)));
    __m512i q1 = _mm512_mulhi_epu16(choose(even, _mm512_srli_epi16(low, 8), high), choose(even, _mm512_srli_epi16(d0, 8), d1));
    __m512i q = _mm512_or_si512(q0, _mm512_slli_epi16(q1, 8));
    __m512i product = choose(even, _mm512_mullo_epi16(q0, f), _mm512_slli_epi16(_mm512_mullo_epi16(q1, _mm512_srli_epi16(f, 8)), 8));
    __m512i remainder = _mm512_sub_epi8(low, product);
    __mmask64 short_by_one = _mm512_cmpge_epu8_mask(remainder, f);
    H[g] = _mm512_mask_sub_epi8(q, short_by_one, q, ones);
    L[g] = _mm512_add_epi8(_mm512_mask_sub_epi8(remainder, short_by_one, remainder, f), b);
  };

  while (row-- > 0 && room) {
#pragma GCC unroll 4
    for (int g = S - 1; g >= 0; g--) step(g, row);
  }
#pragma GCC unroll 4
  for (int g = 0; g < S; g++) {
    e.at[g] = at[g];
    _mm512_store_si512(e.low[g], L[g]);
    _mm512_store_si512(e.high[g], H[g]);
  }
  return room;
}

template <int S>
bool encode_streams(RansEncoder& e, const u8* in, size_t row) {
  using enum SymbolLookup;
  if (e.split.unit == 1) return e.table->lookup == range ? encode<S, 1, range>(e, in, row) : encode<S, 1, map>(e, in, row);
  return e.table->lookup == range   ? encode<S, 2, range>(e, in, row)
         : e.table->lookup == pairs ? encode<S, 2, pairs>(e, in, row)
                                    : encode<S, 2, map>(e, in, row);
}

bool encode_rows(RansEncoder& e, const void* in, size_t row) {
  if (e.table->lookup == SymbolLookup::none) return portable_kernels().encode_rows(e, in, row);
  const u8* from = static_cast<const u8*>(in);
  return e.streams == 1 ? encode_streams<1>(e, from, row) : e.streams == 2 ? encode_streams<2>(e, from, row) : encode_streams<4>(e, from, row);
}

// Bytes without raw bits, which planes of skewed data mostly are; others are left to AVX2.
size_t decode_wide(const WideBlock& b, WideLanes& lanes, size_t block, size_t block_end, u8* out) {
  if (b.split.unit != 1 || b.split.raw_bits) return avx2_kernels()->decode_wide(b, lanes, block, block_end, out);
  const __m512i twelve = _mm512_set1_epi32(kWideSlots - 1), full = _mm512_set1_epi32(1 << 16);
  __m512i state[2] = {_mm512_load_si512(lanes.state), _mm512_load_si512(lanes.state + 16)};
  const u8* at = lanes.at;
  for (; block < block_end && b.readable_end - at >= 128; block++) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
      __m512i& s = state[q % 2];
      const __m512i e = _mm512_i32gather_epi32(_mm512_and_si512(s, twelve), b.table->step, 4);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 64 * block + 16 * static_cast<size_t>(q)), _mm512_cvtepi32_epi8(_mm512_srli_epi32(e, 24)));
      const __m512i product = _mm512_mullo_epi32(_mm512_and_si512(e, twelve), _mm512_srli_epi32(s, 12));
      const __m512i x = _mm512_add_epi32(product, _mm512_and_si512(_mm512_srli_epi32(e, 12), twelve));
      const __mmask16 need = _mm512_cmplt_epu32_mask(x, full);
      const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
      s = _mm512_mask_or_epi32(x, need, _mm512_slli_epi32(x, 16), _mm512_maskz_expand_epi32(need, words));
      at += 2 * __builtin_popcount(need);
    }
    if (at > b.stream_end) return npos;
  }
  _mm512_store_si512(lanes.state, state[0]);
  _mm512_store_si512(lanes.state + 16, state[1]);
  lanes.at = at;
  return block;
}

// The 64 bits of 16 nibbles, each in the upper half of a byte.
inline u64 bits_of(const u8* nibbles) {
  const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(nibbles));
  const __m128i low = _mm_and_si128(_mm_srli_epi16(pairs, 4), _mm_set1_epi16(15)), high = _mm_and_si128(_mm_srli_epi16(pairs, 8), _mm_set1_epi16(0xf0));
  return static_cast<u64>(_mm_cvtsi128_si64(_mm_packus_epi16(_mm_or_si128(low, high), low)));
}

template <int kUnit>
void spread_wide(const u8* nibbles, const u8* rest, size_t count, const u8* value, u8* out) {
  constexpr int kLanes = 64 / kUnit;
  __m512i common = _mm512_set1_epi8(static_cast<char>(*value));
  if constexpr (kUnit == 2) common = _mm512_set1_epi16(static_cast<short>(value[0] | value[1] << 8));
  if constexpr (kUnit == 4) common = _mm512_set1_epi32(static_cast<int>(get32(value)));
  if constexpr (kUnit == 8) common = _mm512_set1_epi64(static_cast<long long>(get32(value) | static_cast<u64>(get32(value + 4)) << 32));
  size_t i = 0;
  for (; i + 64 <= count; i += 64) {
    u64 bits = bits_of(nibbles + i / 4);
    for (int part = 0; part < kUnit; part++) {
      __builtin_prefetch(out + i * kUnit + 64 * static_cast<size_t>(part) + 2048, 1);
      const __m512i next = _mm512_loadu_si512(rest);
      __m512i v;
      if constexpr (kUnit == 1) v = _mm512_mask_expand_epi8(common, bits, next);
      if constexpr (kUnit == 2) v = _mm512_mask_expand_epi16(common, static_cast<__mmask32>(bits), next);
      if constexpr (kUnit == 4) v = _mm512_mask_expand_epi32(common, static_cast<__mmask16>(bits), next);
      if constexpr (kUnit == 8) v = _mm512_mask_expand_epi64(common, static_cast<__mmask8>(bits), next);
      _mm512_storeu_si512(out + i * kUnit + 64 * static_cast<size_t>(part), v);
      if constexpr (kUnit == 1) {
        rest += __builtin_popcountll(bits);
      } else {
        rest += kUnit * __builtin_popcountll(bits & ((u64{1} << kLanes) - 1));
        bits >>= kLanes;
      }
    }
  }
  spread(nibbles + i / 4, rest, count - i, kUnit, value, out + i * kUnit);
}

void spread_any(const u8* nibbles, const u8* rest, size_t count, int unit, const u8* value, u8* out) {
  (unit == 1 ? spread_wide<1> : unit == 2 ? spread_wide<2> : unit == 4 ? spread_wide<4> : spread_wide<8>)(nibbles, rest, count, value, out);
}

// kTables: so many pairs of registers hold the palette.
template <int kTables>
void recall_from(const u8* numbers, size_t count, const u16* palette, u8* out) {
  __m512i table[2 * kTables];
  for (int t = 0; t < 2 * kTables; t++) table[t] = _mm512_loadu_si512(palette + 32 * t);
  const __m256i beyond_first = _mm256_set1_epi8(static_cast<char>(0xc0));
  const __m512i bit6 = _mm512_set1_epi16(64), bit7 = _mm512_set1_epi16(128);
  size_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers + i));
    const __m512i n = _mm512_cvtepu8_epi16(narrow);
    __builtin_prefetch(out + 2 * i + 2048, 1);
    __m512i v = _mm512_permutex2var_epi16(table[0], n, table[1]);
    if (kTables > 2 && _mm256_testz_si256(narrow, beyond_first)) {  // steps from a base are mostly few
      _mm512_storeu_si512(out + 2 * i, v);
      continue;
    }
    if constexpr (kTables > 1) v = _mm512_mask_mov_epi16(v, _mm512_test_epi16_mask(n, bit6), _mm512_permutex2var_epi16(table[2], n, table[3]));
    if constexpr (kTables > 2) {
      const __m512i upper = _mm512_mask_mov_epi16(_mm512_permutex2var_epi16(table[4], n, table[5]), _mm512_test_epi16_mask(n, bit6),
                                                  _mm512_permutex2var_epi16(table[6], n, table[7]));
      v = _mm512_mask_mov_epi16(v, _mm512_test_epi16_mask(n, bit7), upper);
    }
    _mm512_storeu_si512(out + 2 * i, v);
  }
  recall(numbers + i, count - i, palette, 256, out + 2 * i);
}

void recall_any(const u8* numbers, size_t count, const u16* palette, size_t size, u8* out) {
  (size <= 64 ? recall_from<1> : size <= 128 ? recall_from<2> : recall_from<4>)(numbers, count, palette, out);
}

void interleave_wide(const u8* base, size_t count, const u8* thresholds, const u8** steps, u8* out) {
  __m512i least[kClasses - 1];
  const u8* from[kClasses];
  for (int k = 0; k < kClasses - 1; k++) least[k] = _mm512_set1_epi16(thresholds[k]);
  std::memcpy(from, steps, sizeof from);
  size_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m512i size = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(base + 2 * i), 7), _mm512_set1_epi16(255));
    __m512i v = _mm512_setzero_si512();
    __mmask32 left = ~__mmask32{0};
#pragma GCC unroll 8
    for (int k = 0; k < kClasses; k++) {
      const __mmask32 above = k < kClasses - 1 ? _mm512_cmpge_epu16_mask(size, least[k]) : 0, here = left & ~above;
      v = _mm512_mask_expand_epi16(v, here, _mm512_loadu_si512(from[k]));
      from[k] += 2 * __builtin_popcount(here);
      left = above;
    }
    _mm512_storeu_si512(out + 2 * i, v);
  }
  std::memcpy(steps, from, sizeof from);
  if (i < count) interleave(base + 2 * i, count - i, thresholds, steps, out + 2 * i);
}

// Quarters of a register, of eight bytes each, as interleaving two registers by their halves needs them; and back.
inline __m512i for_interleaving() { return _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); }
inline __m512i from_packing() { return _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7); }

void part(Joint& j, const u8* in, size_t count, u8* numbers, u8* raw, u8* more) {
  const Split& split = j.split;
  u32 greatest = 0;
  for (int i = 0; i < j.listed(); i++)
    if (i < j.symbols || i >= j.before_coarse()) greatest = std::max(greatest, split.symbol(j.placed[i]) | (i < j.symbols ? 0 : (1u << j.more_bits) - 1));
  const u32 base = greatest > 254 ? greatest - 254 : 0;
  alignas(64) u8 near[256];  // by symbol from `base` on; no number is 255
  std::memset(near, 255, sizeof near);
  for (int i = 0; i < j.listed(); i++) {
    if (i >= j.symbols && i < j.before_coarse()) continue;
    const u32 s = split.symbol(j.placed[i]), symbols = i < j.symbols ? 1 : 1u << j.more_bits;
    for (u32 k = s; k < s + symbols; k++)
      if (k >= base) near[k - base] = static_cast<u8>(i);
  }
  const __m512i near0 = _mm512_load_si512(near), near1 = _mm512_load_si512(near + 64), near2 = _mm512_load_si512(near + 128), near3 = _mm512_load_si512(near + 192);
  const auto words = [](u32 w) { return _mm512_set1_epi16(static_cast<short>(w)); };
  const u32 sign = split.signed_raw ? 1u << (split.raw_bits - 1) : 0;
  const __m512i symbol_shift = words(static_cast<u32>(split.raw_bits) - split.signed_raw), symbol_mask = words((1u << split.symbol_bits()) - 1);
  const __m512i sign_shift = words(static_cast<u32>(16 - split.raw_bits)), sign_bit = words(sign), raw_mask = words(sign ? sign - 1 : (1u << split.raw_bits) - 1);
  const __m512i more_shift = words(static_cast<u32>(j.more_shift())), more_mask = words((1u << j.more_bits) - 1);
  const __m512i from = words(base), most = words(255), in_order = from_packing(), nowhere = _mm512_set1_epi8(-1);
  const __m512i first_coarse = _mm512_set1_epi8(static_cast<char>(j.before_coarse()));
  size_t i = 0;
  for (; i + 64 <= count; i += 64) {
    const __m512i v0 = _mm512_loadu_si512(in + 2 * i), v1 = _mm512_loadu_si512(in + 2 * i + 64);
    const auto bytes = [&](__m512i a, __m512i b) __attribute__((always_inline)) { return _mm512_permutexvar_epi64(in_order, _mm512_packus_epi16(a, b)); };
    const auto place = [&](__m512i v) __attribute__((always_inline)) {
      return _mm512_min_epu16(_mm512_sub_epi16(_mm512_and_si512(_mm512_srlv_epi16(v, symbol_shift), symbol_mask), from), most);
    };
    const auto raw_of = [&](__m512i v) __attribute__((always_inline)) { return choose(raw_mask, v, _mm512_and_si512(_mm512_srlv_epi16(v, sign_shift), sign_bit)); };
    const auto more_of = [&](__m512i v) __attribute__((always_inline)) { return _mm512_and_si512(_mm512_srlv_epi16(v, more_shift), more_mask); };
    const __m512i at = bytes(place(v0), place(v1));
    __m512i number = _mm512_mask_mov_epi8(_mm512_permutex2var_epi8(near0, at, near1), _mm512_movepi8_mask(at), _mm512_permutex2var_epi8(near2, at, near3));
    u64 whole = 0;
    for (int k = 0; k < j.values; k++) {
      const __m512i value = words(j.placed[j.symbols + k]);
      const u64 here = _mm512_cmpeq_epi16_mask(v0, value) | u64{_mm512_cmpeq_epi16_mask(v1, value)} << 32;
      number = _mm512_mask_mov_epi8(number, here, _mm512_set1_epi8(static_cast<char>(j.symbols + k)));
      j.occurrences[k] += static_cast<u32>(__builtin_popcountll(here));
      whole |= here;
    }
    _mm512_storeu_si512(numbers + i, number);
    if (u64 far = _mm512_cmpeq_epi8_mask(number, nowhere); __builtin_expect(far != 0, 0)) {
      for (; far; far &= far - 1) {
        const size_t lane = i + static_cast<size_t>(__builtin_ctzll(far));
        numbers[lane] = j.number_of[in[2 * lane] | in[2 * lane + 1] << 8];
      }
      number = _mm512_loadu_si512(numbers + i);
    }
    const u64 coarse = _mm512_cmpge_epu8_mask(number, first_coarse);
    _mm512_storeu_si512(raw + j.fields, _mm512_maskz_compress_epi8(~whole, bytes(raw_of(v0), raw_of(v1))));
    j.fields += static_cast<size_t>(__builtin_popcountll(~whole));
    _mm512_storeu_si512(more + j.more_fields, _mm512_maskz_compress_epi8(coarse, bytes(more_of(v0), more_of(v1))));
    j.more_fields += static_cast<size_t>(__builtin_popcountll(coarse));
  }
  part_elements(j, in, i, count, numbers, raw, more);
}

// Fields of bytes from any bit on: 64 of them, shifted so that their lowest bit is bit `offset`.
struct FieldsFrom {
  __m512i spread;
  __m512i shift[8];  // by the first bit's place in its byte
  const u8* fields;
  size_t bits, bit;  // of a field, and where the next one starts
  FieldsFrom(int width, int offset, const u8* fields, size_t next) : fields(fields), bits(static_cast<size_t>(width)), bit(next * bits) {
    for (int b = 0; b < 8; b++) {
      const FieldPlacement place = placement(width, b - offset, 0, 0, 0);
      spread = place.spread;
      shift[b] = place.low_shift;
    }
  }
  const u8* at() const { return fields + bit / 8; }
  NETWEIGHT_INLINE __m512i next() const { return _mm512_multishift_epi64_epi8(shift[bit % 8], _mm512_permutexvar_epi8(spread, _mm512_loadu_si512(at()))); }
};

// kTables: so many registers hold the bytes of what numbers stand for. Returns how many elements were made; sets `bad`.
template <int kTables, bool kCoarse>
size_t unite_rows(Joint& j, const u8* numbers, size_t count, u8* out, bool& bad) {
  alignas(64) u8 low[256] = {}, high[256] = {};
  const int bits = j.split.raw_bits;
  for (int i = 0; i < j.listed(); i++) low[i] = static_cast<u8>(j.placed[i]), high[i] = static_cast<u8>(j.placed[i] >> 8);
  __m512i lows[4], highs[4];
  for (int t = 0; t < 4; t++) lows[t] = _mm512_load_si512(low + 64 * t), highs[t] = _mm512_load_si512(high + 64 * t);
  const auto look_up = [](const __m512i* tables, __m512i index) __attribute__((always_inline)) {
    if constexpr (kTables == 1) return _mm512_permutexvar_epi8(index, tables[0]);
    const __m512i lower = _mm512_permutex2var_epi8(tables[0], index, tables[1]);
    if constexpr (kTables == 2) return lower;
    return _mm512_mask_mov_epi8(lower, _mm512_movepi8_mask(index), _mm512_permutex2var_epi8(tables[2], index, tables[3]));
  };
  FieldsFrom raw_fields(bits, 0, j.raw, j.next), more_fields(j.more_bits, j.more_shift(), j.more, j.next_more);
  const auto byte = [](int v) { return _mm512_set1_epi8(static_cast<char>(v)); };
  const __m512i low_mask = byte(ones(j.split.signed_raw ? bits - 1 : bits)), sign_mask = byte(j.split.signed_raw ? 0x80 : 0),
                more_mask = byte(ones(j.more_bits) << j.more_shift());
  __m512i greatest = _mm512_setzero_si512();
  const __m512i symbols = byte(j.symbols), first_coarse = byte(j.before_coarse()), order = for_interleaving();
  const __m128i to_sign = _mm_cvtsi32_si128(8 - bits);
  size_t next = j.next, next_more = j.next_more, i = 0;
  for (; i + 64 <= count; i += 64) {
    if (j.readable_end - raw_fields.at() < 64 || (kCoarse && j.readable_end - more_fields.at() < 64)) break;
    const __m512i number = _mm512_loadu_si512(numbers + i);
    const u64 coarse = kCoarse ? _mm512_cmpge_epu8_mask(number, first_coarse) : 0, completed = _mm512_cmplt_epu8_mask(number, symbols) | coarse;
    const size_t some = static_cast<size_t>(__builtin_popcountll(completed)), few = static_cast<size_t>(__builtin_popcountll(coarse));
    if (next + some > j.fields || next_more + few > j.more_fields) break;
    greatest = _mm512_max_epu8(greatest, number);
    const __m512i raw = _mm512_permutexvar_epi64(order, _mm512_maskz_expand_epi8(completed, raw_fields.next()));
    const __m512i index = _mm512_permutexvar_epi64(order, number);
    __m512i lo = merge_or(low_mask, raw, look_up(lows, index));
    const __m512i hi = merge_or(sign_mask, _mm512_sll_epi16(raw, to_sign), look_up(highs, index));
    if constexpr (kCoarse) lo = merge_or(more_mask, _mm512_permutexvar_epi64(order, _mm512_maskz_expand_epi8(coarse, more_fields.next())), lo);
    __builtin_prefetch(raw_fields.at() + 4096, 0);
    next += some;
    next_more += few;
    raw_fields.bit += some * raw_fields.bits;
    more_fields.bit += few * more_fields.bits;
    __builtin_prefetch(out + 2 * i + 2048, 1);
    __builtin_prefetch(out + 2 * i + 2112, 1);
    _mm512_storeu_si512(out + 2 * i, _mm512_unpacklo_epi8(lo, hi));
    _mm512_storeu_si512(out + 2 * i + 64, _mm512_unpackhi_epi8(lo, hi));
  }
  j.next = next;
  j.next_more = next_more;
  bad = j.listed() < 256 && _mm512_cmpge_epu8_mask(greatest, byte(j.listed())) != 0;
  return i;
}

void pack_blocks(int bits, const u8* fields, size_t blocks, u8* out) {
  if (bits == 8) {
    std::memcpy(out, fields, 64 * blocks);
    return;
  }
  // From the last block to the first: a store ends where its block ends and writes before it what others overwrite.
  const FieldPacking pack(bits);
  const size_t size = field_block_bytes(bits);
  size_t left = blocks;
  for (; left * size >= 64; left--) _mm512_storeu_si512(out + left * size - 64, pack(_mm512_loadu_si512(fields + 64 * (left - 1))));
  pack_some(bits, fields, left, out);
}

bool unite(Joint& j, const u8* numbers, size_t count, u8* out) {
  bool bad = false;
  const auto with = [&]<bool kCoarse>() {
    return j.listed() <= 64    ? unite_rows<1, kCoarse>(j, numbers, count, out, bad)
           : j.listed() <= 128 ? unite_rows<2, kCoarse>(j, numbers, count, out, bad)
                               : unite_rows<4, kCoarse>(j, numbers, count, out, bad);
  };
  const size_t done = j.listed() == 0 ? 0 : j.coarse && j.more_bits ? with.template operator()<true>() : with.template operator()<false>();
  return !bad && unite_elements(j, numbers + done, count - done, out + 2 * done);
}

bool has_vaes() {  // which clang's __builtin_cpu_supports does not know
  unsigned a, b, c = 0, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && c >> 9 & 1;
}

}  // namespace

const Kernels* avx512_kernels() {
  static const bool usable = avx2_kernels() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                             __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("bmi2") && has_vaes();
  if (!usable) return nullptr;
  static const Kernels set = {"avx512", decode_rows, encode_rows, decode_wide, join4, join8,
                              split4, split8, aes_rounds, decode_words_here, round_weights_here, spread_any, recall_any, subtract, add, interleave_wide, class_sizes, part, unite, pack_blocks};
  return &set;
}

}  // namespace netweight

#else
namespace netweight {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace netweight
#endif
