// Products for processors with AVX-512 and its instructions for bf16: dot products of pairs, as oneDNN takes them there.
#include "products.h"

#if defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#include <immintrin.h>

#include <array>
#include <utility>

#include "products_here.h"

namespace netweight {
namespace {

constexpr size_t kTileRows = 16, kStep = 32, kInputsAtOnce = 8;  // weights of a row that a vector holds; accumulators in registers

// 32 neighbors of a row from sign and mantissa, and from words whose bits 7 to 10 and 23 to 26 are the codes.
inline __m512i joined(__m512i rest, __m512i codes, __m512i lift) {
  const __m512i code = _mm512_and_si512(codes, _mm512_set1_epi32(0x07800780));
  const __m512i weights = _mm512_or_si512(_mm512_and_si512(rest, _mm512_set1_epi16(static_cast<short>(0x807f))), code);
  return _mm512_mask_add_epi16(weights, _mm512_test_epi16_mask(code, code), weights, lift);
}

// One tile to 16 rows of 64 weights; the layout is that of decode_tile in products_here.h, two of its lanes at a time.
inline void decode_wide_tile(const u8* tile, __m512i lift, u16* out, size_t stride) {
  // Of two lanes the sign and mantissa of the first eight pairs, then those of the others; and for each four bytes of codes the same
  // turned by a byte behind them.
  const __m512i halves = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  alignas(64) static const auto kTurned = [] {
    std::array<u8, 64> at{};
    for (int word = 0; word < 8; word++)
      for (int byte = 0; byte < 4; byte++) {
        at[8 * word + byte] = static_cast<u8>(4 * word + byte);
        at[8 * word + 4 + byte] = static_cast<u8>(4 * word + (byte + 1) % 4);
      }
    return at;
  }();
  const __m512i turned = _mm512_load_si512(kTurned.data());
  const __m512i swap = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  for (int g = 0; g < 8; g++) {
    for (int part = 0; part < 3; part++) _mm_prefetch(reinterpret_cast<const char*>(tile + kAhead + 64 * (3 * g + part)), _MM_HINT_T1);
    for (int t = 0; t < 4; t += 2) {
      const u8* lane = tile + 16 * (4 * g + t);
      const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(lane)));
      const __m512i high = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(lane + 512)));
      const __m512i four = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(lane + 1024)));
      const __m512i rest = _mm512_permutex2var_epi64(low, halves, high), codes = _mm512_permutexvar_epi8(turned, four);
      _mm512_storeu_si512(out + g * stride + 16 * t, joined(rest, codes, lift));
      _mm512_storeu_si512(out + (g + 8) * stride + 16 * t, joined(_mm512_shuffle_epi8(rest, swap), _mm512_srli_epi32(codes, 4), lift));
    }
  }
}

bool decode_fixed_wide(const FixedMatrix& m, size_t tile, size_t tile_end, u16* out) {
  const __m512i lift = _mm512_set1_epi16(static_cast<short>((m.base - 1) << 7));
  return decode_fixed_by(m, tile, tile_end, out, [&](const u8* from, u16* to, size_t stride) { decode_wide_tile(from, lift, to, stride); });
}

// Vector r holds 16 pairs of row r; afterwards vector j holds pair j of 16 rows.
inline void transpose(__m512i* v) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int k = 0; k < 2; k++) {
      v[i + 2 * k] = _mm512_unpacklo_epi64(t[i + k], t[i + k + 2]);
      v[i + 2 * k + 1] = _mm512_unpackhi_epi64(t[i + k], t[i + k + 2]);
    }
  // Quarter q of vector 4 i + c holds pair 4 q + c of rows 4 i to 4 i + 3.
  for (int c = 0; c < 4; c++) {
    const __m512i a = _mm512_shuffle_i32x4(v[c], v[4 + c], 0x88), b = _mm512_shuffle_i32x4(v[c], v[4 + c], 0xdd);
    const __m512i d = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0x88), e = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(a, d, 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(b, e, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(a, d, 0xdd);
    t[12 + c] = _mm512_shuffle_i32x4(b, e, 0xdd);
  }
  for (int i = 0; i < 16; i++) v[i] = t[i];
}

inline __m512i pair_for_all(const u16* x) { return _mm512_set1_epi32(static_cast<int>(load<u32>(x))); }

inline __m512 evens(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 odds(__m512i pairs) { return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))); }

// `count` pairs of 16 rows and of kInputs inputs, added to the sums.
template <Order::Kind kKind, size_t kInputs>
inline void add_pairs(const __m512i* pairs, size_t count, const u16* x, size_t columns, __m512* sums) {
  if constexpr (kKind == Order::kPairs) {
    for (size_t j = 0; j < count; j++)
      for (size_t i = 0; i < kInputs; i++) sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)pairs[j], (__m512bh)pair_for_all(x + i * columns + 2 * j));
  } else {
    __m512 even[kInputs], odd[kInputs];
    for (size_t i = 0; i < kInputs; i++) even[i] = odd[i] = _mm512_setzero_ps();
    for (size_t j = 0; j < count; j++)
      for (size_t i = 0; i < kInputs; i++) {
        const __m512i pair = pair_for_all(x + i * columns + 2 * j);
        even[i] = _mm512_fmadd_ps(evens(pairs[j]), evens(pair), even[i]);
        odd[i] = _mm512_fmadd_ps(odds(pairs[j]), odds(pair), odd[i]);
      }
    for (size_t i = 0; i < kInputs; i++) sums[i] = _mm512_add_ps(sums[i], _mm512_add_ps(even[i], odd[i]));
  }
}

// At most 16 rows and kInputs inputs.
template <Order::Kind kKind, size_t kInputs>
void multiply_tile(const u16* weights, size_t rows, size_t columns, size_t block, const u16* x, const u16* bias, u16* y, size_t stride) {
  __m512 sums[kInputs], total[kInputs];
  for (size_t i = 0; i < kInputs; i++) sums[i] = total[i] = _mm512_setzero_ps();
  size_t left = block;
  for (size_t c = 0; c < columns; c += kStep) {
    const size_t width = columns - c < kStep ? columns - c : kStep;
    const __mmask32 inside = width == kStep ? ~__mmask32{0} : static_cast<__mmask32>((u64{1} << width) - 1);
    __m512i pairs[kTileRows];
    for (size_t r = 0; r < kTileRows; r++)
      pairs[r] = r < rows ? _mm512_maskz_loadu_epi16(inside, weights + r * columns + c) : _mm512_setzero_si512();
    transpose(pairs);
    if (width == kStep)
      add_pairs<kKind, kInputs>(pairs, kStep / 2, x + c, columns, sums);  // of a length that the compiler knows
    else
      add_pairs<kKind, kInputs>(pairs, width / 2, x + c, columns, sums);
    left -= width < left ? width : left;
    if (kKind == Order::kPairs && !left) {
      left = block;
      for (size_t i = 0; i < kInputs; i++) {
        total[i] = _mm512_add_ps(total[i], sums[i]);
        sums[i] = _mm512_setzero_ps();
      }
    }
  }
  const __mmask16 here = static_cast<__mmask16>((u32{1} << rows) - 1);
  for (size_t i = 0; i < kInputs; i++) {
    __m512 sum = kKind == Order::kPairs ? _mm512_add_ps(total[i], sums[i]) : sums[i];
    if (bias) sum = _mm512_add_ps(sum, evens(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, bias))));
    _mm256_mask_storeu_epi16(y + i * stride, here, (__m256i)_mm512_cvtneps_pbh(sum));
  }
}

using TileProduct = void (*)(const u16*, size_t, size_t, size_t, const u16*, const u16*, u16*, size_t);

template <Order::Kind kKind, size_t... kCounts>
constexpr std::array<TileProduct, sizeof...(kCounts)> tile_products(std::index_sequence<kCounts...>) {
  return {multiply_tile<kKind, kCounts + 1>...};
}

void multiply_in_blocks_here(const u16* weights, size_t rows, size_t columns, Order order, const u16* x, size_t inputs, const u16* bias, u16* y,
                             size_t stride) {
  constexpr auto kPairProducts = tile_products<Order::kPairs>(std::make_index_sequence<kInputsAtOnce>{});
  constexpr auto kTileProducts = tile_products<Order::kTiles>(std::make_index_sequence<kInputsAtOnce>{});
  const auto& products = order.kind == Order::kPairs ? kPairProducts : kTileProducts;
  for (size_t r = 0; r < rows; r += kTileRows) {
    const size_t some = rows - r < kTileRows ? rows - r : kTileRows;
    for (size_t i = 0; i < inputs; i += kInputsAtOnce) {
      const size_t at_once = inputs - i < kInputsAtOnce ? inputs - i : kInputsAtOnce;
      products[at_once - 1](weights + r * columns, some, columns, order.width, x + i * columns, bias ? bias + r : nullptr, y + i * stride + r, stride);
    }
  }
}

}  // namespace

const Products* avx512_products() {
  static const Products set = {"avx512bf16", decode_fixed_wide, encode_fixed_here, multiply_here, multiply_in_blocks_here};
  static const bool usable = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vl") &&
                             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
  return usable ? &set : nullptr;
}

}  // namespace netweight
#else
namespace netweight {
const Products* avx512_products() { return nullptr; }
}  // namespace netweight
#endif
