// Packing of blocks of 64 small fields: field i of b bits is bits i*b .. i*b+b-1 of a little-endian bit string of 8*b bytes.
#pragma once

#include "format.h"

namespace netweight {
namespace {  // compiled with different instruction sets: never shared between translation units

using TwoWords = u64 __attribute__((vector_size(16)));

// Of each word eight b-bit fields in the low 8*b bits -> eight bytes, and back.
template <int B>
inline TwoWords spread_fields(TwoWords x) {
  if constexpr (B == 8) return x;
  constexpr u64 four = (u64{1} << (4 * B)) - 1;
  constexpr u64 two = ((u64{1} << (2 * B)) - 1) * 0x0000000100000001ull;
  constexpr u64 one = ((u64{1} << B) - 1) * 0x0001000100010001ull;
  x = (x & four) | (x << (32 - 4 * B) & four << 32);
  x = (x & two) | (x << (16 - 2 * B) & two << 16);
  return (x & one) | (x << (8 - B) & one << 8);
}

template <int B>
inline u64 gather_fields(u64 x) {
  if constexpr (B == 8) return x;
  constexpr u64 one = ((u64{1} << B) - 1) * 0x0001000100010001ull;
  constexpr u64 two = ((u64{1} << (2 * B)) - 1) * 0x0000000100000001ull;
  constexpr u64 four = (u64{1} << (4 * B)) - 1;
  x = (x & one) | (x >> 8 & one) << B;
  x = (x & two) | (x >> 16 & two) << (2 * B);
  return (x & four) | (x >> 32 & four) << (4 * B);
}

template <int B>
inline void unpack_block(const u8* in, u8* out) {
  u64 x[8];
  for (int q = 0; q < 8; q++) {  // whole words, though only their low 8 * B bits count, as long as they lie within the block
    const int inside = q * B <= 8 * B - 8 ? q * B : 8 * B - 8;
    std::memcpy(&x[q], in + inside, 8);
    x[q] >>= 8 * (q * B - inside);
  }
  for (int q = 0; q < 8; q += 2) {
    const TwoWords fields = spread_fields<B>(TwoWords{x[q], x[q + 1]});
    std::memcpy(out + 8 * q, &fields, 16);
  }
}

template <int B>
inline void pack_block(const u8* in, u8* out) {
  for (int q = 0; q < 8; q++) {
    u64 x;
    std::memcpy(&x, in + 8 * q, 8);
    x = gather_fields<B>(x);
    std::memcpy(out + q * B, &x, B);
  }
}

// The same for a width known at run time, 0 to 8.
inline void unpack_fields(int bits, const u8* in, u8* out) {
  switch (bits) {
    case 0: std::memset(out, 0, 64); break;
    case 1: unpack_block<1>(in, out); break;
    case 2: unpack_block<2>(in, out); break;
    case 3: unpack_block<3>(in, out); break;
    case 4: unpack_block<4>(in, out); break;
    case 5: unpack_block<5>(in, out); break;
    case 6: unpack_block<6>(in, out); break;
    case 7: unpack_block<7>(in, out); break;
    default: std::memcpy(out, in, 64); break;
  }
}

inline void pack_fields(int bits, const u8* in, u8* out) {
  switch (bits) {
    case 0: break;
    case 1: pack_block<1>(in, out); break;
    case 2: pack_block<2>(in, out); break;
    case 3: pack_block<3>(in, out); break;
    case 4: pack_block<4>(in, out); break;
    case 5: pack_block<5>(in, out); break;
    case 6: pack_block<6>(in, out); break;
    case 7: pack_block<7>(in, out); break;
    default: std::memcpy(out, in, 64); break;
  }
}

}  // namespace
}  // namespace netweight
