// The arithmetic of lossy coding: weights to words and back. src/netweight/codec/numpy_codec.py is the readable account of it;
// both give the same bits. Products and quotients here are exact or rounded once, so that fusing them would change nothing.
#pragma once

#include <bit>
#include <cmath>

#include "kernels.h"

namespace netweight {
namespace {  // compiled with different instruction sets: never shared between translation units

inline constexpr u32 kInfinite = 0x7f800000, kLeastNormal = 0x00800000, kMagnitude = 0x7fffffff;

// All bits if it is so, else none. Loops without branches are vectorized.
NETWEIGHT_INLINE u32 mask(bool so) { return -static_cast<u32>(so); }

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
  return code & mask(m >= kLeastNormal) & mask(code <= r.largest_word());
}

inline constexpr size_t kTile = 256;  // weights looked at together

// Rounds up to kTile weights of one block, marks those to be kept exactly, and returns the largest change of the others.
// In passes of which each is simple enough to be vectorized.
template <typename Type, bool kReference>
inline double round_tile(const typename Type::Stored* __restrict in, size_t count, const Rounding& r, float factor, u16* __restrict words,
                         typename Type::Stored* __restrict values, u8* __restrict exact) {
  u32 weights[kTile], rounded[kTile], word[kTile], sound[kTile];  // the first two: bits of float32
  double change[kTile];
  const Rounding rounding = r;  // a copy, which nothing written here can change
  for (size_t i = 0; i < count; i++) {
    const float weight = Type::widened(in[i]);
    float quotient = weight / factor;
    if (kReference && rounding.block != 0) quotient = Type::widened(Type::narrowed(quotient));
    const u32 bits = std::bit_cast<u32>(weight), m = bits & kMagnitude, code = code_of<kReference>(quotient, rounding);
    const u32 finite = mask(m < kInfinite);
    weights[i] = bits;
    word[i] = (bits >> 16 & 0x8000) | (code & finite);
    sound[i] = finite & (mask(code != 0) | mask(m == 0));
    rounded[i] = std::bit_cast<u32>(Type::widened(Type::narrowed(number_of(word[i], rounding.mantissa_bits) * factor)));
  }
  for (size_t i = 0; i < count; i++) {
    // The difference is exact in float, since one number is less than twice the other where the bound is kept; and the
    // products are in double.
    const float weight = std::bit_cast<float>(weights[i]), difference = std::bit_cast<float>(rounded[i]) - weight;
    const double size = std::fabs(weight), moved = std::fabs(difference);
    const u32 infinite = mask(kReference) & mask((rounded[i] & kMagnitude) == kInfinite);
    const u32 within = mask(moved * rounding.denominator <= size * rounding.numerator);
    sound[i] &= within | infinite;
    change[i] = sound[i] != 0 ? moved / (size > 0 ? size : 1) : 0.0;
  }
  std::int64_t worst = 0;  // numbers that are not negative are ordered as their bits are
  for (size_t i = 0; i < count; i++) {
    const auto bits = std::bit_cast<std::int64_t>(change[i]);
    worst = bits > worst ? bits : worst;
  }
  for (size_t i = 0; i < count; i++) {
    words[i] = static_cast<u16>(word[i] & sound[i]);
    const auto value = Type::narrowed(std::bit_cast<float>(rounded[i]));
    values[i] = static_cast<typename Type::Stored>((value & sound[i]) | (in[i] & ~sound[i]));
    exact[i] = static_cast<u8>(~sound[i]);
  }
  return std::bit_cast<double>(worst);
}

template <typename Type>
inline u8 normalizer_of(const typename Type::Stored* in, size_t count) {
  u32 largest = 0;
  for (size_t i = 0; i < count; i++) {
    const u32 m = std::bit_cast<u32>(Type::widened(in[i])) & kMagnitude;
    const u32 sound = m & mask(m < kInfinite) & mask(m >= kLeastNormal);
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
