// Numbers of a sparse plane back to their places; compiled once per instruction set.
#pragma once

#include "format.h"

namespace netweight {
namespace {

template <typename T>
inline void spread_as(const u8* nibbles, const u8* rest, size_t count, const u8* value, u8* out) {
  T common;
  std::memcpy(&common, value, sizeof common);
  for (size_t i = 0; i < count; i++) {
    T next;
    std::memcpy(&next, rest, sizeof next);
    const bool differs = nibbles[i / 4] >> (4 + i % 4) & 1;
    const T v = differs ? next : common;
    std::memcpy(out + i * sizeof v, &v, sizeof v);
    rest += differs ? sizeof v : 0;
  }
}

inline void spread(const u8* nibbles, const u8* rest, size_t count, int unit, const u8* value, u8* out) {
  by_width(unit, [&](auto number) { spread_as<decltype(number)>(nibbles, rest, count, value, out); });
}

inline void recall(const u8* numbers, size_t count, const u16* palette, size_t, u8* out) {
  for (size_t i = 0; i < count; i++) std::memcpy(out + 2 * i, &palette[numbers[i]], 2);
}

}  // namespace
}  // namespace netweight
