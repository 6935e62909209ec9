// AVX2 kernels: decoding only. A slot finds its symbol by a binary search whose thresholds are looked up in registers, which
// serves tables of up to 32 symbols; the encoder does not choose more for weights.
#include "digest.h"
#include "interleave.h"
#include "merge.h"
#include "rounding.h"

#if defined(__AVX2__)
#include <immintrin.h>

namespace netweight {
namespace {

constexpr int kMostSymbols = 32;

inline __m256i twice(const u8* p) { return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(p))); }

// A 32-entry byte table in two registers; each half yields zero for the other's indices.
struct Lookup {
  __m256i lower, upper;
  explicit Lookup(const u8* t) : lower(twice(t)), upper(twice(t + 16)) {}
  __m256i operator()(__m256i lower_index, __m256i upper_index) const {
    return _mm256_or_si256(_mm256_shuffle_epi8(lower, lower_index), _mm256_shuffle_epi8(upper, upper_index));
  }
};

// Shuffles that spread the next bytes of a stream over the lanes of an 8-lane mask.
struct Expand {
  alignas(64) u8 index[256][8] = {};
  constexpr Expand() {
    for (int m = 0; m < 256; m++)
      for (int i = 0, n = 0; i < 8; i++) index[m][i] = m >> i & 1 ? static_cast<u8>(n++) : 0x80;
  }
};
constexpr Expand kExpand;  // constant: no code of this file may run before the processor was checked

inline __m128i load8(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline __m128i expand16(const u8* a, const u8* b, unsigned ma, unsigned mb) {
  return _mm_unpacklo_epi64(_mm_shuffle_epi8(load8(a), load8(kExpand.index[ma])), _mm_shuffle_epi8(load8(b), load8(kExpand.index[mb])));
}

enum class Raw { seven, eight, other };  // signed two-byte elements with 7 or 8 raw bits have their own merge

template <int S, Raw kRaw>
__attribute__((noinline)) size_t decode(const RansBlock& b, Lanes& lanes, size_t row, size_t row_end, u8* out) {
  const DecodeTable& t = *b.table;
  // Thresholds of level l stand in level[l][0 .. 1 << l): a slot belongs to the right half when it is greater (signed bytes).
  alignas(16) u8 level[5][16];
  int count = 1;
  while (count < 64 && t.frequency[count]) count++;
  for (int l = 0; l < 5; l++)
    for (int p = 0; p < 16; p++) {
      int symbol = p * (32 >> l) + (16 >> l);
      level[l][p] = p < 1 << l && symbol < count ? static_cast<u8>((t.start[symbol] - 1) ^ 0x80) : 0x7f;
    }
  const __m256i level0 = _mm256_set1_epi8(static_cast<char>(level[0][0])), level1 = twice(level[1]), level2 = twice(level[2]),
                level3 = twice(level[3]), level4 = twice(level[4]);
  const Lookup frequency(t.frequency), start(t.start), sym_low(t.low), sym_high(t.high);
  const __m256i zero = _mm256_setzero_si256(), one = _mm256_set1_epi8(1), byte = _mm256_set1_epi16(0xff);
  const __m256i high_bit = _mm256_set1_epi8(static_cast<char>(0x80)), low_seven = _mm256_set1_epi8(0x7f);
  const __m256i to_upper = _mm256_set1_epi8(-16), to_lower = _mm256_set1_epi8(0x70);
  // Seven-bit field j of eight starts in byte 7j / 8; multiplying a word by 2^(9 - 7j % 8) moves it to the word's top.
  const __m256i field_bytes = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -128, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, -128));
  const __m256i field_shift = _mm256_broadcastsi128_si256(_mm_setr_epi16(512, 4, 8, 16, 32, 64, 128, 256));
  const RawRegions region(b.split, S, b.rows);
  const u8* raw = b.raw_low + row * S * region.row_low_bytes;
  const u8* rest = b.raw_rest + row * S * region.row_rest_bytes;
  const int low_bits = b.split.raw_bits < 8 ? b.split.raw_bits : 8, rest_bits = b.split.raw_bits - low_bits;
  const size_t unit = static_cast<size_t>(b.split.unit);
  u8* to = out + row * S * 64 * unit;

  auto step = [&](int g) __attribute__((always_inline)) {
    __m256i placed_low[2], placed_high[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      __m256i* low_at = reinterpret_cast<__m256i*>(lanes.low[g] + 32 * h);
      __m256i* high_at = reinterpret_cast<__m256i*>(lanes.high[g] + 32 * h);
      __m256i L = _mm256_load_si256(low_at), H = _mm256_load_si256(high_at);
      __m256i slot = _mm256_xor_si256(L, high_bit);
      __m256i p = _mm256_sub_epi8(zero, _mm256_cmpgt_epi8(slot, level0));
      auto descend = [&](__m256i thresholds) __attribute__((always_inline)) {
        p = _mm256_sub_epi8(_mm256_add_epi8(p, p), _mm256_cmpgt_epi8(slot, _mm256_shuffle_epi8(thresholds, p)));
      };
      descend(level1);
      descend(level2);
      descend(level3);
      descend(level4);
      __m256i lower = _mm256_add_epi8(p, to_lower), upper = _mm256_add_epi8(p, to_upper);
      placed_low[h] = sym_low(lower, upper);
      placed_high[h] = sym_high(lower, upper);
      __m256i f = frequency(lower, upper), k = _mm256_sub_epi8(L, start(lower, upper));
      __m256i x0 = _mm256_maddubs_epi16(_mm256_unpacklo_epi8(H, one), _mm256_unpacklo_epi8(f, k));
      __m256i x1 = _mm256_maddubs_epi16(_mm256_unpackhi_epi8(H, one), _mm256_unpackhi_epi8(f, k));
      __m256i low = _mm256_packus_epi16(_mm256_and_si256(x0, byte), _mm256_and_si256(x1, byte));
      __m256i high = _mm256_packus_epi16(_mm256_srli_epi16(x0, 8), _mm256_srli_epi16(x1, 8));
      __m256i refill = _mm256_cmpeq_epi8(high, zero);
      unsigned m = static_cast<unsigned>(_mm256_movemask_epi8(refill));
      const u8* s = lanes.at[g];
      const u8 *s1 = s + __builtin_popcount(m & 0xff), *s2 = s + __builtin_popcount(m & 0xffff), *s3 = s + __builtin_popcount(m & 0xffffff);
      lanes.at[g] = s + __builtin_popcount(m);
      __m256i fresh = _mm256_inserti128_si256(_mm256_castsi128_si256(expand16(s, s1, m & 0xff, m >> 8 & 0xff)),
                                              expand16(s2, s3, m >> 16 & 0xff, m >> 24), 1);
      _mm256_store_si256(high_at, _mm256_blendv_epi8(high, low, refill));
      _mm256_store_si256(low_at, _mm256_blendv_epi8(low, fresh, refill));
    }
    if constexpr (kRaw == Raw::eight) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        __m256i r = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(raw + 32 * h));
        __m256i low = _mm256_or_si256(_mm256_and_si256(r, low_seven), placed_low[h]);
        __m256i high = _mm256_or_si256(_mm256_and_si256(r, high_bit), placed_high[h]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32 * h), _mm256_unpacklo_epi8(low, high));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 64 + 32 * h), _mm256_unpackhi_epi8(low, high));
      }
    } else if constexpr (kRaw == Raw::seven) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const u8* r = raw + 28 * h;
        auto finish = [&](const u8* a, const u8* c, __m256i placed) __attribute__((always_inline)) {
          __m256i w = _mm256_inserti128_si256(_mm256_castsi128_si256(load8(a)), load8(c), 1);
          w = _mm256_mullo_epi16(_mm256_shuffle_epi8(w, field_bytes), field_shift);
          __m256i sign = _mm256_and_si256(w, _mm256_set1_epi16(static_cast<short>(0x8000)));
          __m256i mantissa = _mm256_and_si256(_mm256_srli_epi16(w, 9), _mm256_set1_epi16(0x3f));
          return _mm256_or_si256(_mm256_or_si256(sign, mantissa), placed);
        };
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32 * h), finish(r, r + 14, _mm256_unpacklo_epi8(placed_low[h], placed_high[h])));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 64 + 32 * h),
                            finish(r + 7, r + 21, _mm256_unpackhi_epi8(placed_low[h], placed_high[h])));
      }
    } else {
      alignas(32) u16 placed[64];
      alignas(32) u8 raw_low[64], raw_rest[64];
      for (int h = 0; h < 2; h++) {
        __m256i a = _mm256_unpacklo_epi8(placed_low[h], placed_high[h]), c = _mm256_unpackhi_epi8(placed_low[h], placed_high[h]);
        _mm256_store_si256(reinterpret_cast<__m256i*>(placed + 32 * h), _mm256_permute2x128_si256(a, c, 0x20));
        _mm256_store_si256(reinterpret_cast<__m256i*>(placed + 32 * h + 16), _mm256_permute2x128_si256(a, c, 0x31));
      }
      unpack_fields(low_bits, raw, raw_low);
      if (rest_bits) unpack_fields(rest_bits, rest, raw_rest);
      merge_row(b.split, placed, raw_low, raw_rest, to, 64);
      rest += region.row_rest_bytes;
    }
    raw += region.row_low_bytes;
    to += 64 * unit;
  };

  // A step reads up to 8 bytes past what it uses of each stream and up to 64 raw bytes.
  for (size_t many : {size_t{16}, size_t{1}})
    while (row + many <= row_end) {
      bool safe = static_cast<size_t>(b.readable_end - raw) >= 64 * S * many;
      for (int g = 0; g < S; g++) safe &= static_cast<size_t>(b.readable_end - lanes.at[g]) >= 64 * many + 8;
      if (!safe) break;
      for (size_t r = 0; r < many; r++) {
#pragma GCC unroll 4
        for (int g = 0; g < S; g++) step(g);
      }
      row += many;
      for (int g = 0; g < S; g++)
        if (lanes.at[g] > b.stream_end[g]) return npos;
    }
  return row;
}

template <int S>
size_t decode_streams(const RansBlock& b, Lanes& lanes, size_t row, size_t row_end, u8* out) {
  if (b.split.unit == 2 && b.split.signed_raw && b.split.raw_bits == 7) return decode<S, Raw::seven>(b, lanes, row, row_end, out);
  if (b.split.unit == 2 && b.split.signed_raw && b.split.raw_bits == 8) return decode<S, Raw::eight>(b, lanes, row, row_end, out);
  return decode<S, Raw::other>(b, lanes, row, row_end, out);
}

size_t decode_rows(const RansBlock& b, Lanes& lanes, size_t row, size_t row_end, void* out) {
  if (b.table->frequency[kMostSymbols]) return row;  // more symbols than the search serves: the portable code goes on
  u8* to = static_cast<u8*>(out);
  return b.streams == 1   ? decode_streams<1>(b, lanes, row, row_end, to)
         : b.streams == 2 ? decode_streams<2>(b, lanes, row, row_end, to)
                          : decode_streams<4>(b, lanes, row, row_end, to);
}

// For each mask of eight lanes: which of the next words of the stream goes to which lane.
struct ExpandLanes {
  alignas(32) u32 index[256][8] = {};
  constexpr ExpandLanes() {
    for (u32 m = 0; m < 256; m++)
      for (u32 i = 0, n = 0; i < 8; i++) {
        index[m][i] = n;
        n += m >> i & 1;
      }
  }
};
constexpr ExpandLanes kExpandLanes;

// Tables are read by plain loads: gathers are slow on processors with mitigations against leaking through them.
size_t decode_wide(const WideBlock& b, WideLanes& lanes, size_t block, size_t block_end, u8* out) {
  const u32* steps = b.table->step;
  const u16* symbols = b.table->placed;
  const __m256i slot_mask = _mm256_set1_epi32(kWideSlots - 1), zero = _mm256_setzero_si256();
  __m256i state[4];
  for (int q = 0; q < 4; q++) state[q] = _mm256_load_si256(reinterpret_cast<const __m256i*>(lanes.state + 8 * q));
  const u8* at = lanes.at;
  alignas(64) u16 placed[64];
  for (; block < block_end && b.stream_end - at >= 128; block++) {
    for (int half = 0; half < 2; half++) {
      alignas(64) u32 slots[kWideLanes];
#pragma GCC unroll 4
      for (int q = 0; q < 4; q++) _mm256_store_si256(reinterpret_cast<__m256i*>(slots + 8 * q), _mm256_and_si256(state[q], slot_mask));
#pragma GCC unroll 4
      for (int q = 0; q < 4; q++) {
        const u32* s = slots + 8 * q;
        u16* to = placed + 32 * half + 8 * q;
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) to[j] = symbols[s[j]];
        const __m256i e = _mm256_setr_epi32(static_cast<int>(steps[s[0]]), static_cast<int>(steps[s[1]]), static_cast<int>(steps[s[2]]),
                                            static_cast<int>(steps[s[3]]), static_cast<int>(steps[s[4]]), static_cast<int>(steps[s[5]]),
                                            static_cast<int>(steps[s[6]]), static_cast<int>(steps[s[7]]));
        const __m256i x = _mm256_add_epi32(_mm256_mullo_epi32(_mm256_and_si256(e, slot_mask), _mm256_srli_epi32(state[q], 12)),
                                           _mm256_srli_epi32(e, 12));
        const __m256i need = _mm256_cmpeq_epi32(_mm256_srli_epi32(x, 16), zero);
        const unsigned m = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(need)));
        const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
        const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(kExpandLanes.index[m]));
        const __m256i fresh = _mm256_or_si256(_mm256_slli_epi32(x, 16), _mm256_permutevar8x32_epi32(words, order));
        state[q] = _mm256_blendv_epi8(x, fresh, need);
        at += 2 * __builtin_popcount(m);
      }
    }
    merge_wide(b, block, placed, out + block * 64 * static_cast<size_t>(b.split.unit), 64);
  }
  for (int q = 0; q < 4; q++) _mm256_store_si256(reinterpret_cast<__m256i*>(lanes.state + 8 * q), state[q]);
  lanes.at = at;
  return block;
}

}  // namespace

const Kernels* avx2_kernels() {
  static const Kernels set = {"avx2", decode_rows, portable_kernels().encode_rows, decode_wide, join4, join8,
                              split4, split8, update_digest, decode_words_here, round_weights_here};
  static const bool usable = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt");
  return usable ? &set : nullptr;
}

}  // namespace netweight

#else
namespace netweight {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace netweight
#endif
