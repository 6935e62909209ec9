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

// Elements of a and b in turn, the first halves and then the others.
template <typename V>
struct Zipped {
  V first, second;
  Zipped(V a, V b) {
    if constexpr (sizeof a[0] == 1) {
      first = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      second = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    } else if constexpr (sizeof a[0] == 2) {
      first = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
      second = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
    } else {
      first = __builtin_shufflevector(a, b, 0, 4, 1, 5);
      second = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    }
  }
};

void join8(const u8* head, const u8* const* tail, size_t count, u8* out) {
  using Bytes16 = u8 __attribute__((vector_size(16)));
  using Words8 = u16 __attribute__((vector_size(16)));
  using Words4 = u32 __attribute__((vector_size(16)));
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    Bytes16 t[6];
    Words8 h[2];
    for (int k = 0; k < 6; k++) std::memcpy(&t[k], tail[k] + i, 16);
    std::memcpy(h, head + 2 * i, 32);
    const Zipped<Bytes16> bytes01(t[5], t[4]), bytes23(t[3], t[2]), bytes45(t[1], t[0]);
    const auto half = [&](Bytes16 b01, Bytes16 b23, Bytes16 b45, Words8 b67, u8* to) {
      const Zipped<Words8> low((Words8)b01, (Words8)b23), high((Words8)b45, b67);
      const Zipped<Words4> pairs[2] = {{(Words4)low.first, (Words4)high.first}, {(Words4)low.second, (Words4)high.second}};
      std::memcpy(to, pairs, 64);
    };
    half(bytes01.first, bytes23.first, bytes45.first, h[0], out + 8 * i);
    half(bytes01.second, bytes23.second, bytes45.second, h[1], out + 8 * i + 64);
  }
  for (; i < count; i++) {
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
