// Taking 4- and 8-byte numbers apart into planes and putting them together; compiled once per instruction set.
#pragma once

#include "format.h"

namespace netweight {
namespace {

// out[i] = head[i] : tail[0][i] : tail[1][i] ..., most significant first.
void join4(const u8* head, const u8* const* tail, size_t count, u8* out) {
  const u8 *t0 = tail[0], *t1 = tail[1];
  for (size_t i = 0; i < count; i++) {
    u16 h;
    std::memcpy(&h, head + 2 * i, 2);
    u32 v = static_cast<u32>(h) << 16 | static_cast<u32>(t0[i]) << 8 | t1[i];
    std::memcpy(out + 4 * i, &v, 4);
  }
}

void join8(const u8* head, const u8* const* tail, size_t count, u8* out) {
  for (size_t i = 0; i < count; i++) {
    u16 h;
    std::memcpy(&h, head + 2 * i, 2);
    u64 v = static_cast<u64>(h) << 48;
    for (int t = 0; t < 6; t++) v |= static_cast<u64>(tail[t][i]) << (40 - 8 * t);
    std::memcpy(out + 8 * i, &v, 8);
  }
}

void split4(const u8* in, size_t count, u8* head, u8* const* tail) {
  u8 *t0 = tail[0], *t1 = tail[1];
  for (size_t i = 0; i < count; i++) {
    u32 v;
    std::memcpy(&v, in + 4 * i, 4);
    u16 h = static_cast<u16>(v >> 16);
    std::memcpy(head + 2 * i, &h, 2);
    t0[i] = static_cast<u8>(v >> 8);
    t1[i] = static_cast<u8>(v);
  }
}

void split8(const u8* in, size_t count, u8* head, u8* const* tail) {
  for (size_t i = 0; i < count; i++) {
    u64 v;
    std::memcpy(&v, in + 8 * i, 8);
    u16 h = static_cast<u16>(v >> 48);
    std::memcpy(head + 2 * i, &h, 2);
    for (int t = 0; t < 6; t++) tail[t][i] = static_cast<u8>(v >> (40 - 8 * t));
  }
}

}  // namespace
}  // namespace netweight
