// AVX2 kernels. The rans kernels' vectors are two halves of sixteen bytes.
#include "kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>

#include "difference.h"
#include "digest.h"
#include "interleave.h"
#include "joint.h"
#include "merge.h"
#include "rounding.h"

namespace netweight {
namespace {

using Bytes = __m256i;
constexpr int kBytes = 32;

inline Bytes load(const u8* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store(u8* p, Bytes v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
inline Bytes all_bytes(int b) { return _mm256_set1_epi8(static_cast<char>(b)); }
inline Bytes all_words(int w) { return _mm256_set1_epi16(static_cast<short>(w)); }
inline __m128i half_at(const u8* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline Bytes halves(__m128i a, __m128i b) { return _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1); }

inline Bytes add8(Bytes a, Bytes b) { return _mm256_add_epi8(a, b); }
inline Bytes sub8(Bytes a, Bytes b) { return _mm256_sub_epi8(a, b); }
inline Bytes sub16(Bytes a, Bytes b) { return _mm256_sub_epi16(a, b); }
inline Bytes above8(Bytes a, Bytes b) { return _mm256_cmpgt_epi8(a, b); }
inline Bytes equal8(Bytes a, Bytes b) { return _mm256_cmpeq_epi8(a, b); }
inline Bytes least8(Bytes a, Bytes b) { return _mm256_min_epu8(a, b); }
inline Bytes not_below8(Bytes a, Bytes b) { return equal8(_mm256_max_epu8(a, b), a); }
inline Bytes select(Bytes mask, Bytes a, Bytes b) { return _mm256_blendv_epi8(b, a, mask); }
inline Bytes low_halves(Bytes a, Bytes b) { return _mm256_unpacklo_epi8(a, b); }
inline Bytes high_halves(Bytes a, Bytes b) { return _mm256_unpackhi_epi8(a, b); }
inline Bytes saturated(Bytes a, Bytes b) { return _mm256_packus_epi16(a, b); }
inline Bytes low_bytes(Bytes a, Bytes b) { return saturated(a & all_words(0xff), b & all_words(0xff)); }
inline Bytes high_bytes(Bytes a, Bytes b) { return saturated(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8)); }
inline Bytes multiply_low(Bytes a, Bytes b) { return _mm256_mullo_epi16(a, b); }
inline Bytes multiply_high(Bytes a, Bytes b) { return _mm256_mulhi_epu16(a, b); }
// x0, x1 = f * h + k as words; without kSteep f and k are below 128.
template <bool kSteep>
inline void multiply_add(Bytes f, Bytes h, Bytes k, Bytes& x0, Bytes& x1) {
  if constexpr (kSteep) {
    const Bytes zero = all_bytes(0);
    x0 = _mm256_add_epi16(multiply_low(low_halves(f, zero), low_halves(h, zero)), low_halves(k, zero));
    x1 = _mm256_add_epi16(multiply_low(high_halves(f, zero), high_halves(h, zero)), high_halves(k, zero));
  } else {
    const Bytes one = all_bytes(1);
    x0 = _mm256_maddubs_epi16(low_halves(h, one), low_halves(f, k));
    x1 = _mm256_maddubs_epi16(high_halves(h, one), high_halves(f, k));
  }
}

struct ShiftDown {  // words
  __m128i count;
  explicit ShiftDown(int n) : count(_mm_cvtsi32_si128(n)) {}
  Bytes operator()(Bytes v) const { return _mm256_srl_epi16(v, count); }
};

// Which lanes of a row a mask names: for groups of eight, and how many of them are before a group.
struct NamedLanes {
  u32 part[2];
  explicit NamedLanes(const Bytes* masks)
      : part{static_cast<u32>(_mm256_movemask_epi8(masks[0])), static_cast<u32>(_mm256_movemask_epi8(masks[1]))} {}
  u64 all() const { return part[0] | static_cast<u64>(part[1]) << 32; }
  u32 of(int group) const { return part[group / 4] >> 8 * (group % 4) & 0xff; }
  size_t before(int group) const {
    const size_t others = group < 4 ? 0 : count(part[0]);
    return group % 4 ? others + count(part[group / 4] << (32 - 8 * (group % 4))) : group < 8 ? others : others + count(part[1]);
  }
  static size_t count(u32 m) { return static_cast<size_t>(__builtin_popcount(m)); }
};

inline Bytes table16(const u8* t) { return _mm256_broadcastsi128_si256(half_at(t)); }
inline Bytes look_up16(Bytes table, Bytes index) { return _mm256_shuffle_epi8(table, index); }  // zero where the index's top bit is set

// Indices into a table of 16 * N bytes: for each register of the table those that are not its own have their top bit set.
template <int N>
struct Places {
  Bytes of[N];
  explicit Places(Bytes index) {
    of[0] = add8(index, all_bytes(0x70));
    for (int i = 1; i < N; i++) of[i] = i + 1 < N ? _mm256_adds_epu8(sub8(index, all_bytes(16 * i)), all_bytes(0x70)) : sub8(index, all_bytes(16 * i));
  }
};

template <int N>
struct Lookup {
  Bytes table[N];
  explicit Lookup(const u8* t) {
    for (int i = 0; i < N; i++) table[i] = table16(t + 16 * i);
  }
  Bytes operator()(const Places<N>& index) const {
    Bytes found = look_up16(table[0], index.of[0]);
#pragma GCC unroll 4
    for (int i = 1; i < N; i++) found = found | look_up16(table[i], index.of[i]);
    return found;
  }
};

// Eight fields of a vector become the low bytes of a 64-bit word, which is then moved to its top.
struct PackFields {
  Bytes pairs, quads, four;
  __m128i middle, top;
  explicit PackFields(int bits)
      : pairs(all_words(1 | 1 << (8 + bits))),
        quads(_mm256_set1_epi32(1 | 1 << (16 + 2 * bits))),
        four(_mm256_set1_epi64x((1ll << (4 * bits)) - 1)),
        middle(_mm_cvtsi32_si128(32 - 4 * bits)),
        top(_mm_cvtsi32_si128(64 - 8 * bits)) {}
  Bytes operator()(Bytes fields) const {
    const Bytes x = _mm256_madd_epi16(_mm256_maddubs_epi16(pairs, fields), quads);
    return _mm256_sll_epi64((x & four) | _mm256_andnot_si256(four, _mm256_srl_epi64(x, middle)), top);
  }
};

inline Bytes load_fields(const u8* p, int stride) { return halves(half_at(p), half_at(p + stride)); }

inline Bytes load_words(const u8* const* from) {
  auto half = [](const u8* a, const u8* b) {
    return _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(a))), reinterpret_cast<const __m64*>(b)));
  };
  return halves(half(from[0], from[1]), half(from[2], from[3]));
}

// The last word first.
template <typename Place>
inline void store_words(Bytes v, Place place) {
  for (int i = 3; i > 0; i -= 2) {
    const __m128i half = i == 3 ? _mm256_extracti128_si256(v, 1) : _mm256_castsi256_si128(v);
    _mm_storeh_pi(reinterpret_cast<__m64*>(place(i)), _mm_castsi128_ps(half));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(place(i - 1)), half);
  }
}

}  // namespace
}  // namespace netweight

#include "kernels_shuffle.h"
#include "joint_avx2.h"

namespace netweight {
namespace {

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
template <int kUnit>
size_t decode_wide_as(const WideBlock& b, WideLanes& lanes, size_t block, size_t block_end, u8* out) {
  const u32* steps = b.table->step;
  const u16* symbols = b.table->placed;
  const __m256i slot_mask = _mm256_set1_epi32(kWideSlots - 1), zero = _mm256_setzero_si256();
  __m256i state[4];
  for (int q = 0; q < 4; q++) state[q] = _mm256_load_si256(reinterpret_cast<const __m256i*>(lanes.state + 8 * q));
  const u8* at = lanes.at;
  alignas(64) u16 placed[64];
  for (; block < block_end && b.readable_end - at >= 128; block++) {
    for (int half = 0; half < 2; half++) {
      alignas(64) u32 slots[kWideLanes];
#pragma GCC unroll 4
      for (int q = 0; q < 4; q++) _mm256_store_si256(reinterpret_cast<__m256i*>(slots + 8 * q), _mm256_and_si256(state[q], slot_mask));
#pragma GCC unroll 4
      for (int q = 0; q < 4; q++) {
        const u32* s = slots + 8 * q;
        u16* to = placed + 32 * half + 8 * q;
        const __m256i e = _mm256_setr_epi32(static_cast<int>(steps[s[0]]), static_cast<int>(steps[s[1]]), static_cast<int>(steps[s[2]]),
                                            static_cast<int>(steps[s[3]]), static_cast<int>(steps[s[4]]), static_cast<int>(steps[s[5]]),
                                            static_cast<int>(steps[s[6]]), static_cast<int>(steps[s[7]]));
        if constexpr (kUnit == 1) {
          const __m256i placed8 = _mm256_srli_epi32(e, 24);
          _mm_store_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi32(_mm256_castsi256_si128(placed8), _mm256_extracti128_si256(placed8, 1)));
        } else {
#pragma GCC unroll 8
          for (int j = 0; j < 8; j++) to[j] = symbols[s[j]];
        }
        const __m256i x = _mm256_add_epi32(_mm256_mullo_epi32(_mm256_and_si256(e, slot_mask), _mm256_srli_epi32(state[q], 12)),
                                           _mm256_and_si256(_mm256_srli_epi32(e, 12), slot_mask));
        const __m256i need = _mm256_cmpeq_epi32(_mm256_srli_epi32(x, 16), zero);
        const unsigned m = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(need)));
        const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
        const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(kExpandLanes.index[m]));
        const __m256i fresh = _mm256_or_si256(_mm256_slli_epi32(x, 16), _mm256_permutevar8x32_epi32(words, order));
        state[q] = _mm256_blendv_epi8(x, fresh, need);
        at += 2 * __builtin_popcount(m);
      }
    }
    if (at > b.stream_end) return npos;
    merge_wide(b, block, placed, out + block * 64 * static_cast<size_t>(b.split.unit), 64);
  }
  for (int q = 0; q < 4; q++) _mm256_store_si256(reinterpret_cast<__m256i*>(lanes.state + 8 * q), state[q]);
  lanes.at = at;
  return block;
}

size_t decode_wide(const WideBlock& b, WideLanes& lanes, size_t block, size_t block_end, u8* out) {
  return (b.split.unit == 1 ? decode_wide_as<1> : decode_wide_as<2>)(b, lanes, block, block_end, out);
}

// As `spread_any`; numbers of four and eight bytes go to their places whole.
void spread_numbers(const u8* nibbles, const u8* rest, size_t count, int unit, const u8* value, u8* out) {
  if (unit < 4) return spread_any(nibbles, rest, count, unit, value, out);
  u64 common = 0;
  std::memcpy(&common, value, static_cast<size_t>(unit));
  const __m256i repeated = unit == 4 ? _mm256_set1_epi32(static_cast<int>(common)) : _mm256_set1_epi64x(static_cast<long long>(common));
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const size_t at_once = 32 / static_cast<size_t>(unit);
  for (; count >= at_once; count -= at_once, nibbles += at_once / 4, out += 32) {
    const u8 differs = unit == 8 ? bytes_of_rest<2>(nibbles, 0) : bytes_of_rest<1>(nibbles, 0);  // of eight halves, or numbers
    const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(kExpandLanes.index[differs]));
    const __m256i mask = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(differs), bits), bits);
    store(out, select(mask, _mm256_permutevar8x32_epi32(load(rest), order), repeated));
    rest += 4 * __builtin_popcount(differs);
  }
  spread(nibbles, rest, count, unit, value, out);
}

// For each mask of eight lanes: which of the next numbers of 16 bits goes to which lane; none gives zero.
struct ExpandNumbers {
  alignas(16) u8 index[256][16] = {};
  constexpr ExpandNumbers() {
    for (u32 m = 0; m < 256; m++)
      for (u32 i = 0, n = 0; i < 16; i++) {
        index[m][i] = static_cast<u8>(m >> i / 2 & 1 ? n : 0x80);
        n += m >> i / 2 & 1;
      }
  }
};
constexpr ExpandNumbers kExpandNumbers;

void interleave_vectors(const u8* base, size_t count, const u8* thresholds, const u8** steps, u8* out) {
  __m256i below[kClasses - 1];
  const u8* from[kClasses];
  for (int k = 0; k < kClasses - 1; k++) below[k] = _mm256_set1_epi16(static_cast<short>(thresholds[k] - 1));
  std::memcpy(from, steps, sizeof from);
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m256i size = _mm256_and_si256(_mm256_srli_epi16(load(base + 2 * i), 7), all_words(255));
    u8 above[4 * kClasses] = {};  // for two classes at a time: eight lanes of the one, of the other, the other eight lanes of both
#pragma GCC unroll 4
    for (int k = 0; k < kClasses; k += 2) {
      const __m256i second = k + 1 < kClasses - 1 ? _mm256_cmpgt_epi16(size, below[k + 1]) : _mm256_setzero_si256();
      const int pair = _mm256_movemask_epi8(_mm256_packs_epi16(_mm256_cmpgt_epi16(size, below[k]), second));
      std::memcpy(above + 2 * k, &pair, 4);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      __m128i v = _mm_setzero_si128();
      unsigned left = 255;
#pragma GCC unroll 8
      for (int k = 0; k < kClasses; k++) {
        const unsigned over = above[k / 2 * 4 + 2 * half + k % 2], here = left & ~over;
        v = _mm_or_si128(v, _mm_shuffle_epi8(half_at(from[k]), half_at(kExpandNumbers.index[here])));
        from[k] += 2 * __builtin_popcount(here);
        left = over;
      }
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i + 16 * static_cast<size_t>(half)), v);
    }
  }
  std::memcpy(steps, from, sizeof from);
  interleave(base + 2 * i, count - i, thresholds, steps, out + 2 * i);
}

}  // namespace

const Kernels* avx2_kernels() {
  static const Kernels set = {"avx2", decode_rows, encode_rows, decode_wide, join4, join8, split4, split8,
                              __builtin_cpu_supports("aes") ? aes_rounds : portable_kernels().aes_rounds, decode_words_here, round_weights_here, spread_numbers, recall_any, subtract, add, interleave_vectors, class_sizes, part_any, unite_any, pack_any};
  static const bool usable = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt");
  return usable ? &set : nullptr;
}

}  // namespace netweight

#else
namespace netweight {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace netweight
#endif
