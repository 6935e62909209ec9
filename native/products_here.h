// The kernels of products.h, written for vectors of 32 bytes and compiled once for each instruction set that has its file.
#include "products.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace netweight {
namespace {

using Bytes16 = u8 __attribute__((vector_size(16)));
using Bytes = u8 __attribute__((vector_size(32)));
using Words = u32 __attribute__((vector_size(32)));
using Halves = u16 __attribute__((vector_size(32)));
using Floats = float __attribute__((vector_size(32)));
using Floats4 = float __attribute__((vector_size(16)));

template <typename T>
inline T load(const void* from) {
  T v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline Bytes swapped(Bytes v) {  // the bytes of each half
  return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14, 17, 16, 19, 18, 21, 20, 23, 22, 25, 24, 27, 26, 29, 28, 31, 30);
}

// Two lanes of 16 bytes side by side, and one lane twice.
inline Bytes side_by_side(const u8* first, const u8* second) {
#if defined(__AVX2__)
  const __m256i low = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(first)));
  return (Bytes)_mm256_inserti128_si256(low, _mm_loadu_si128(reinterpret_cast<const __m128i*>(second)), 1);
#else
  return __builtin_shufflevector(load<Bytes16>(first), load<Bytes16>(second), 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22,
                                 23, 24, 25, 26, 27, 28, 29, 30, 31);
#endif
}

// A word of codes serves two pairs; for the second it is turned by a byte.
inline Words codes_of(const u8* lane) {
#if defined(__AVX2__)
  const __m256i four = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(lane)));
  return (Words)_mm256_shuffle_epi8(four, _mm256_setr_epi8(0, 1, 2, 3, 1, 2, 3, 0, 4, 5, 6, 7, 5, 6, 7, 4,
                                                           8, 9, 10, 11, 9, 10, 11, 8, 12, 13, 14, 15, 13, 14, 15, 12));
#else
  const Bytes16 four = load<Bytes16>(lane);
  return (Words)__builtin_shufflevector(four, four, 0, 1, 2, 3, 1, 2, 3, 0, 4, 5, 6, 7, 5, 6, 7, 4, 8, 9, 10, 11, 9, 10, 11, 8, 12, 13, 14, 15, 13, 14, 15, 12);
#endif
}

// `lift` where a code is not zero, which has none of the upper bits.
inline Halves lift_of(Halves code, Halves lift) {
#if defined(__AVX2__)
  return (Halves)_mm256_sign_epi16((__m256i)lift, (__m256i)code);
#else
  return (Halves)(code != 0) & lift;
#endif
}

// Sixteen neighbors of a row from sign and mantissa, and from words whose bits 7 to 10 and 23 to 26 are the codes.
inline void join(Bytes rest, Words codes, Halves lift, u16* out) {
  const Halves code = (Halves)(codes & 0x07800780u);
  const Halves weights = ((Halves)rest & 0x807f) | code;
  const Halves lifted = weights + lift_of(code, lift);
  std::memcpy(out, &lifted, sizeof lifted);
}

constexpr size_t kAhead = 16 * 1536;  // three streams of lines, which processors do not foresee

// One tile to 16 rows of 64 weights. Lines are fetched into the second cache: the first has no room beside the decoded rows.
inline void decode_tile(const u8* tile, Halves lift, u16* out, size_t stride) {
  for (int g = 0; g < 8; g++) {
    for (int part = 0; part < 3; part++) __builtin_prefetch(tile + kAhead + 64 * (3 * g + part), 0, 2);
    for (int t = 0; t < 4; t++) {
      const u8* lane = tile + 16 * (4 * g + t);
      const Bytes rest = side_by_side(lane, lane + 512);
      const Words codes = codes_of(lane + 1024);
      join(rest, codes, lift, out + g * stride + 16 * t);
      join(swapped(rest), codes >> 4, lift, out + (g + 8) * stride + 16 * t);
    }
  }
}

// The weights of whole rows of tiles; decode(tile, to, stride) writes 16 rows of 64 of them.
template <typename Decode>
bool decode_fixed_by(const FixedMatrix& m, size_t tile, size_t tile_end, u16* out, Decode decode) {
  const size_t across = (m.columns + 63) / 64;
  alignas(64) u16 part[16 * 64];
  for (; tile < tile_end; tile++) {
    const size_t rows = m.rows - 16 * tile < 16 ? m.rows - 16 * tile : 16;
    for (size_t i = 0; i < across; i++) {
      const u8* from = m.tiles + (tile * across + i) * 1536;
      u16* to = out + 64 * i;
      if (rows == 16 && 64 * (i + 1) <= m.columns) {
        decode(from, to, m.columns);
        continue;
      }
      decode(from, part, 64);
      const size_t width = m.columns - 64 * i < 64 ? m.columns - 64 * i : 64;
      for (size_t r = 0; r < rows; r++) std::memcpy(to + r * m.columns, part + 64 * r, 2 * width);
    }
    for (size_t r = 0; r < rows; r++, out += m.columns) {
      u32 i = load<u32>(m.first + 4 * (16 * tile + r));
      const u32 end = load<u32>(m.first + 4 * (16 * tile + r + 1));
      if (end < i || end > m.escape_count) return false;
      for (size_t least = 0; i < end; i++) {  // columns ascend
        const u32 escape = load<u32>(m.escapes + 4 * i);
        const size_t column = escape & 0xffff;
        if (column < least || column >= m.columns) return false;
        out[column] = static_cast<u16>(escape >> 16);
        least = column + 1;
      }
    }
  }
  return true;
}

[[maybe_unused]] bool decode_fixed_here(const FixedMatrix& m, size_t tile, size_t tile_end, u16* out) {
  const Halves lift = Halves{} + static_cast<u16>((m.base - 1) << 7);
  return decode_fixed_by(m, tile, tile_end, out, [&](const u8* from, u16* to, size_t stride) { decode_tile(from, lift, to, stride); });
}

// ---- the fixed-length form written ------------------------------------------------------------------------------------

// Sixteen neighbors of a row: what stands beside their codes, and the codes. Escapes become +0 with code 0.
struct Coded {
  Halves rest, code;
  Coded(Halves weights, Halves base) {
    const Halves exponent = (weights >> 7) & 0xff, place = exponent - base;
    const Halves coded = (Halves)(place < 15), inside = coded | (Halves)((weights & 0x7fff) == 0);
    code = (place + 1) & coded;
    rest = weights & inside & 0x807f;
  }
};

inline Bytes16 low_bytes_of_codes(Halves codes) {  // of each four columns the first, the third, the second, the fourth
  const Bytes b = (Bytes)codes;
  return __builtin_shufflevector(b, b, 0, 4, 2, 6, 8, 12, 10, 14, 16, 20, 18, 22, 24, 28, 26, 30);
}

// 16 rows of 64 weights to one tile.
inline void encode_tile(const u16* in, size_t stride, Halves base, u8* tile) {
  using Words4 = u32 __attribute__((vector_size(16)));
  for (int g = 0; g < 8; g++)
    for (int t = 0; t < 4; t++) {
      const Coded upper(load<Halves>(in + g * stride + 16 * t), base), lower(load<Halves>(in + (g + 8) * stride + 16 * t), base);
      const Bytes rest = (Bytes)upper.rest | swapped((Bytes)lower.rest);
      const Words4 codes = (Words4)low_bytes_of_codes(upper.code | lower.code << 4), turned = codes << 7 | codes >> 25;
      u8* lane = tile + 16 * (4 * g + t);
      std::memcpy(lane, &rest, 16);
      std::memcpy(lane + 512, reinterpret_cast<const u8*>(&rest) + 16, 16);
      std::memcpy(lane + 1024, &turned, 16);
    }
}

// Whole rows of tiles from a weight's rows; what fills up the last tiles is zero.
[[maybe_unused]] void encode_fixed_here(const u16* weights, size_t rows, size_t columns, int base, size_t tile, size_t tile_end, u8* tiles) {
  const size_t across = (columns + 63) / 64;
  const Halves lowest = Halves{} + static_cast<u16>(base);
  alignas(64) u16 part[16 * 64];
  for (; tile < tile_end; tile++) {
    const size_t present = rows - 16 * tile < 16 ? rows - 16 * tile : 16;
    const u16* from = weights + 16 * tile * columns;
    for (size_t i = 0; i < across; i++, from += 64) {
      u8* to = tiles + (tile * across + i) * 1536;
      if (present == 16 && 64 * (i + 1) <= columns) {
        encode_tile(from, columns, lowest, to);
        continue;
      }
      const size_t width = columns - 64 * i < 64 ? columns - 64 * i : 64;
      std::memset(part, 0, sizeof part);
      for (size_t r = 0; r < present; r++) std::memcpy(part + 64 * r, from + r * columns, 2 * width);
      encode_tile(part, 64, lowest, to);
    }
  }
}

inline u16 rounded(float sum) {
  const u32 bits = load<u32>(&sum);
  if (sum != sum) return 0x7fc0;
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline Floats4 first_half(Floats v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3); }
inline Floats4 second_half(Floats v) { return __builtin_shufflevector(v, v, 4, 5, 6, 7); }

// The sum of one row's partial sums: lane i of even[k] is column 16 k + 2 i, lane i of odd[k] the column after it.
template <int kSums>
float sum_of(Floats* even, Floats* odd) {
#pragma GCC unroll 4
  for (int half = kSums / 32; half; half /= 2)
    for (int k = 0; k < half; k++) {
      even[k] += even[k + half];
      odd[k] += odd[k + half];
    }
  // What is left are sums of columns 8, 4 and 2 apart, and then of the even with the odd ones.
  const Floats4 e = first_half(even[0]) + second_half(even[0]), o = first_half(odd[0]) + second_half(odd[0]);
  const Floats4 pairs = __builtin_shufflevector(e, o, 0, 1, 4, 5) + __builtin_shufflevector(e, o, 2, 3, 6, 7);
  return (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]);
}

constexpr size_t kNeighbors = 4;  // with two sums each: there are registers for eight

// The products of kRows neighbors with one input, whose numbers are read once for all of them.
template <int kSums, int kRows>
void dots(const u16* weights, const float* x, size_t columns, float* out) {
  Floats even[kRows][kSums / 16], odd[kRows][kSums / 16];
  for (int k = 0; k < kSums / 16; k++) {
    Floats e[kRows] = {}, o[kRows] = {};
    for (size_t c = 16 * k; c < columns; c += kSums) {
      const Floats x_even = load<Floats>(x + c), x_odd = load<Floats>(x + c + 8);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) {
        const Words w = load<Words>(weights + r * columns + c);
        e[r] += (Floats)(w << 16) * x_even;
        o[r] += (Floats)(w & 0xffff0000u) * x_odd;
      }
    }
    for (int r = 0; r < kRows; r++) even[r][k] = e[r], odd[r][k] = o[r];
  }
  for (int r = 0; r < kRows; r++) out[r] = sum_of<kSums>(even[r], odd[r]);
}

template <int kSums>
void multiply_by_one(const u16* weights, size_t rows, size_t columns, const float* x, const u16* bias, u16* y) {
  float sums[kNeighbors];
  for (size_t r = 0, some; r < rows; r += some) {
    some = rows - r < kNeighbors ? 1 : kNeighbors;
    (some == 1 ? dots<kSums, 1> : dots<kSums, kNeighbors>)(weights + r * columns, x, columns, sums);
    for (size_t i = 0; i < some; i++) {
      const u32 added = bias ? u32{bias[r + i]} << 16 : 0;
      y[r + i] = rounded(bias ? sums[i] + load<float>(&added) : sums[i]);
    }
  }
}

// One input after the other: it stays in the first cache, and the rows in the second.
void multiply_here(const u16* weights, size_t rows, size_t columns, int sums, const float* x, size_t inputs, const u16* bias, u16* y, size_t stride) {
  const auto multiply = sums == 64 ? multiply_by_one<64> : multiply_by_one<128>;
  for (size_t i = 0; i < inputs; i++) multiply(weights, rows, columns, x + i * columns, bias, y + i * stride);
}

}  // namespace
}  // namespace netweight
