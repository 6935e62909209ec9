// Symbols and raw bits become elements again.
#pragma once

#include "fields.h"
#include "kernels.h"

namespace netweight {
namespace {  // compiled with different instruction sets: never shared between translation units

// Merges 64 placed symbols with raw bits, all in lane order, and writes the first `count` elements of the row.
inline void merge_row(const Split& split, const u16* placed, const u8* raw_low, const u8* raw_rest, void* out, size_t count) {
  u16 v[64];
  const int top = 8 * split.unit - split.raw_bits;  // from the sign's place in the raw bits to its place in the element
  if (split.signed_raw) {
    const int low_mask = (1 << (split.raw_bits - 1)) - 1, sign = 1 << (split.raw_bits - 1);
    if (split.raw_bits <= 8)
      for (int i = 0; i < 64; i++) v[i] = static_cast<u16>(placed[i] | (raw_low[i] & low_mask) | (raw_low[i] & sign) << top);
    else
      for (int i = 0; i < 64; i++) {
        int r = raw_low[i] | raw_rest[i] << 8;
        v[i] = static_cast<u16>(placed[i] | (r & low_mask) | (r & sign) << top);
      }
  } else {
    for (int i = 0; i < 64; i++) v[i] = static_cast<u16>(placed[i] | raw_low[i] | (split.raw_bits > 8 ? raw_rest[i] << 8 : 0));
  }
  if (split.unit == 1) {
    u8 b[64];
    for (int i = 0; i < 64; i++) b[i] = static_cast<u8>(v[i]);
    std::memcpy(out, b, count);
    return;
  }
  u16 ordered[64];
  u8* to = count == 64 ? static_cast<u8*>(out) : reinterpret_cast<u8*>(ordered);
  for (int q = 0; q < 8; q++) std::memcpy(to + 2 * lane_position(8 * q, 2), v + 8 * q, 16);
  if (count != 64) std::memcpy(out, ordered, 2 * count);
}

// Merges the placed symbols of a wide block with its raw bits and writes its first `count` elements.
inline void merge_wide(const WideBlock& b, size_t number, const u16* placed, u8* out, size_t count) {
  const int low_bits = b.split.raw_bits < 8 ? b.split.raw_bits : 8, rest_bits = b.split.raw_bits - low_bits;
  alignas(64) u8 low[64], rest[64];
  alignas(64) u16 v[64];
  unpack_fields(low_bits, b.raw_low + number * field_block_bytes(low_bits), low);
  unpack_fields(rest_bits, b.raw_rest + number * field_block_bytes(rest_bits), rest);
  if (b.split.signed_raw) {
    const int sign = 1 << (b.split.raw_bits - 1), top = 8 * b.split.unit - b.split.raw_bits;
    for (int i = 0; i < 64; i++) {
      const int r = low[i] | rest[i] << 8;
      v[i] = static_cast<u16>(placed[i] | (r & (sign - 1)) | (r & sign) << top);
    }
  } else {
    for (int i = 0; i < 64; i++) v[i] = static_cast<u16>(placed[i] | low[i] | rest[i] << 8);
  }
  if (b.split.unit == 2) {
    std::memcpy(out, v, 2 * count);
    return;
  }
  u8 bytes[64];
  for (int i = 0; i < 64; i++) bytes[i] = static_cast<u8>(v[i]);
  std::memcpy(out, bytes, count);
}

}  // namespace
}  // namespace netweight
