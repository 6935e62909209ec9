// The arithmetic of lossy coding: weights to words and back. src/netweight/codec/rounding.py is the readable account of it;
// both give the same bits. Products and quotients here are exact or rounded once, so that fusing them would change nothing.
#pragma once

#include <bit>
#include <cmath>

#include "kernels.h"

namespace netweight {
namespace {  // compiled with different instruction sets: never shared between translation units

inline constexpr u32 kInfinite = 0x7f800000, kLeastNormal = 0x00800000, kMagnitude = 0x7fffffff;

// Weights as float32, exactly, and back, half to even; what is narrowed is never NaN.
struct Brain {
  using Stored = u16;
  static NETWEIGHT_INLINE float widened(u16 v) { return std::bit_cast<float>(static_cast<u32>(v) << 16); }
  static NETWEIGHT_INLINE u16 narrowed(float f) {
    const u32 bits = std::bit_cast<u32>(f);
    return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

struct Half {
  using Stored = u16;
  static NETWEIGHT_INLINE float widened(u16 v) {
    const u32 m = v & 0x7fffu, sign = static_cast<u32>(v & 0x8000) << 16;
    const u32 normal = m >= 0x7c00 ? m << 13 | kInfinite : (m << 13) + 0x38000000;
    const u32 subnormal = std::bit_cast<u32>(static_cast<float>(static_cast<int>(m)) * 0x1p-24f);
    return std::bit_cast<float>(sign | (m < 0x400 ? subnormal : normal));
  }
  static NETWEIGHT_INLINE u16 narrowed(float f) {
    const u32 bits = std::bit_cast<u32>(f), m = bits & kMagnitude;
    const u32 normal = (m - 0x38000000 + 0xfff + (m >> 13 & 1)) >> 13;
    const u32 subnormal = std::bit_cast<u32>(std::bit_cast<float>(m) + 0.5f) - 0x3f000000;  // one half's last bit is 2^-24
    const u32 v = m >= 0x477ff000 ? 0x7c00u : m >= 0x38800000 ? normal : subnormal;
    return static_cast<u16>(v | (bits >> 16 & 0x8000));
  }
};

struct Single {
  using Stored = u32;
  static NETWEIGHT_INLINE float widened(u32 v) { return std::bit_cast<float>(v); }
  static NETWEIGHT_INLINE u32 narrowed(float f) { return std::bit_cast<u32>(f); }
};

NETWEIGHT_INLINE float factor_of(u8 normalizer) { return static_cast<float>(256 + normalizer) * 0x1p-8f; }

NETWEIGHT_INLINE float number_of(u32 word, int mantissa_bits) {
  return std::bit_cast<float>((word & 0x7fff) << (23 - mantissa_bits) | (word & 0x8000) << 16);
}

// ---- reading ---------------------------------------------------------------------------------------------------------

// Words of one block; returns whether any cannot be.
template <typename Type>
inline bool decode_block(const u16* __restrict words, size_t count, const Rounding& r, float factor, typename Type::Stored* __restrict out) {
  const u32 least = 1u << r.mantissa_bits, span = r.largest_word() - least;
  u32 bad = 0;
  for (size_t i = 0; i < count; i++) {
    const u32 word = words[i], code = word & 0x7fff;
    bad |= static_cast<u32>(code != 0) & static_cast<u32>(code - least > span);
    out[i] = Type::narrowed(number_of(word, r.mantissa_bits) * factor);
  }
  return bad != 0;
}

template <typename Type>
inline bool decode_blocks(const u16* words, size_t count, u64 first, const u8* normalizers, const Rounding& r, u8* to) {
  auto* out = reinterpret_cast<typename Type::Stored*>(to);
  if (r.block == 0) return decode_block<Type>(words, count, r, 1.0f, out);
  bool bad = false;
  for (size_t at = 0; at < count;) {
    const u64 place = first + at, block = place / r.block;
    const u64 left = r.block - place % r.block;
    const size_t length = left < count - at ? static_cast<size_t>(left) : count - at;
    bad |= decode_block<Type>(words + at, length, r, factor_of(normalizers[block]), out + at);
    at += length;
  }
  return bad;
}

inline bool decode_words_here(const u16* words, size_t count, u64 first, const u8* normalizers, const Rounding& r, u8* out) {
  switch (r.type) {
    case FloatType::brain: return decode_blocks<Brain>(words, count, first, normalizers, r, out);
    case FloatType::half: return decode_blocks<Half>(words, count, first, normalizers, r, out);
    default: return decode_blocks<Single>(words, count, first, normalizers, r, out);
  }
}

// ---- writing ---------------------------------------------------------------------------------------------------------

// The word of a quotient without its sign; 0 for what cannot be rounded.
template <bool kReference>
NETWEIGHT_INLINE u32 code_of(float quotient, const Rounding& r) {
  const int shift = 23 - r.mantissa_bits;
  const u32 m = std::bit_cast<u32>(quotient) & kMagnitude, half = 1u << (shift - 1);
  const u32 code = kReference ? (m + half) >> shift : (m + (half - 1) + (m >> shift & 1)) >> shift;
  return m < kLeastNormal || code > r.largest_word() ? 0 : code;
}

inline constexpr size_t kTile = 256;  // weights looked at together

// Rounds up to kTile weights of one block, marks those to be kept exactly, and returns the largest change of the others.
template <typename Type, bool kReference>
inline double round_tile(const typename Type::Stored* __restrict in, size_t count, const Rounding& r, float factor, u16* __restrict words,
                         typename Type::Stored* __restrict values, u8* __restrict exact) {
  double change[kTile];
  for (size_t i = 0; i < count; i++) {
    const float weight = Type::widened(in[i]);
    const u32 bits = std::bit_cast<u32>(weight), m = bits & kMagnitude;
    float quotient = weight / factor;
    if (kReference && r.block != 0) quotient = Type::widened(Type::narrowed(quotient));
    const u32 code = m < kInfinite ? code_of<kReference>(quotient, r) : 0;
    const u32 word = (bits >> 16 & 0x8000) | code;
    const auto value = Type::narrowed(number_of(word, r.mantissa_bits) * factor);
    const float rounded = Type::widened(value);
    const double size = std::fabs(static_cast<double>(weight));
    const double moved = std::fabs(static_cast<double>(rounded) - static_cast<double>(weight));
    bool within = moved * r.denominator <= size * r.numerator;  // exact: less than 53 bits on both sides
    if (kReference) within |= (std::bit_cast<u32>(rounded) & kMagnitude) == kInfinite;
    const bool keep = (m < kInfinite) & within & ((code != 0) | (m == 0));
    change[i] = keep && m != 0 ? moved / size : 0.0;
    exact[i] = !keep;
    words[i] = keep ? static_cast<u16>(word) : u16{0};
    values[i] = keep ? value : in[i];
  }
  double worst = 0;
  for (size_t i = 0; i < count; i++) worst = change[i] > worst ? change[i] : worst;
  return worst;
}

template <typename Type>
inline u8 normalizer_of(const typename Type::Stored* in, size_t count) {
  u32 largest = 0;
  for (size_t i = 0; i < count; i++) {
    const u32 m = std::bit_cast<u32>(Type::widened(in[i])) & kMagnitude;
    const u32 sound = m < kInfinite && m >= kLeastNormal ? m : 0;
    largest = sound > largest ? sound : largest;
  }
  return static_cast<u8>(largest >> 15);
}

template <typename Type, bool kReference>
inline double round_blocks(const u8* from, size_t count, const Rounding& r, u16* words, u8* normalizers, u8* to, std::vector<u64>& escapes) {
  const auto* in = reinterpret_cast<const typename Type::Stored*>(from);
  auto* values = reinterpret_cast<typename Type::Stored*>(to);
  double worst = 0;
  for (size_t start = 0; start < count;) {
    const size_t size = r.block == 0 || r.block > count - start ? count - start : static_cast<size_t>(r.block);
    float factor = 1;
    if (r.block != 0) factor = factor_of(*normalizers++ = normalizer_of<Type>(in + start, size));
    for (size_t at = start; at < start + size; at += kTile) {
      const size_t tile = start + size - at < kTile ? start + size - at : kTile;
      u8 exact[kTile];
      const double change = round_tile<Type, kReference>(in + at, tile, r, factor, words + at, values + at, exact);
      worst = change > worst ? change : worst;
      u8 any = 0;
      for (size_t i = 0; i < tile; i++) any |= exact[i];
      for (size_t i = 0; any && i < tile; i++)
        if (exact[i]) escapes.push_back(at + i);
    }
    start += size;
  }
  return worst;
}

inline double round_weights_here(const u8* in, size_t count, const Rounding& r, u16* words, u8* normalizers, u8* values,
                                 std::vector<u64>& escapes) {
  switch (r.type) {
    case FloatType::brain:
      return r.reference ? round_blocks<Brain, true>(in, count, r, words, normalizers, values, escapes)
                         : round_blocks<Brain, false>(in, count, r, words, normalizers, values, escapes);
    case FloatType::half: return round_blocks<Half, false>(in, count, r, words, normalizers, values, escapes);
    default: return round_blocks<Single, false>(in, count, r, words, normalizers, values, escapes);
  }
}

}  // namespace
}  // namespace netweight
