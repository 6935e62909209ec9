// Steps between numbers and a base, and back; compiled once per instruction set.
#pragma once

#include "format.h"

namespace netweight {
namespace {

// A number as one that grows with the float it stands for, and back: negative floats count down from -1.
template <typename T, bool kFloat>
T ordered(T v) {
  constexpr int top = 8 * sizeof(T) - 1;
  return kFloat ? static_cast<T>(v ^ (static_cast<T>(T{0} - (v >> top)) >> 1)) : v;
}

template <typename T, bool kFloat>
void subtract_as(const u8* in, const u8* base, size_t count, u8* out) {
  for (size_t i = 0; i < count; i++) {
    T v, b;
    std::memcpy(&v, in + i * sizeof v, sizeof v);
    std::memcpy(&b, base + i * sizeof b, sizeof b);
    const T d = static_cast<T>(ordered<T, kFloat>(v) - ordered<T, kFloat>(b));
    const T folded = static_cast<T>((d << 1) ^ (T{0} - (d >> (8 * sizeof(T) - 1))));
    std::memcpy(out + i * sizeof v, &folded, sizeof v);
  }
}

template <typename T, bool kFloat>
void add_as(const u8* base, size_t count, u8* numbers) {
  constexpr size_t kBlock = 128 / sizeof(T);
  for (size_t start = 0; start < count; start += kBlock) {
    __builtin_prefetch(base + start * sizeof(T) + 4096);  // the base comes from memory
    __builtin_prefetch(base + start * sizeof(T) + 4160);
    const size_t end = count - start < kBlock ? count : start + kBlock;
    for (size_t i = start; i < end; i++) {
      T f, b;
      std::memcpy(&f, numbers + i * sizeof f, sizeof f);
      std::memcpy(&b, base + i * sizeof b, sizeof b);
      const T d = static_cast<T>((f >> 1) ^ (T{0} - (f & 1)));
      const T v = ordered<T, kFloat>(static_cast<T>(ordered<T, kFloat>(b) + d));
      std::memcpy(numbers + i * sizeof v, &v, sizeof v);
    }
  }
}

inline void subtract(const u8* in, const u8* base, size_t count, int unit, bool floats, u8* out) {
  (unit == 1   ? floats ? subtract_as<u8, true> : subtract_as<u8, false>
   : unit == 2 ? floats ? subtract_as<u16, true> : subtract_as<u16, false>
   : unit == 4 ? floats ? subtract_as<u32, true> : subtract_as<u32, false>
   : floats    ? subtract_as<u64, true>
               : subtract_as<u64, false>)(in, base, count, out);
}

inline void add(const u8* base, size_t count, int unit, bool floats, u8* numbers) {
  (unit == 1   ? floats ? add_as<u8, true> : add_as<u8, false>
   : unit == 2 ? floats ? add_as<u16, true> : add_as<u16, false>
   : unit == 4 ? floats ? add_as<u32, true> : add_as<u32, false>
   : floats    ? add_as<u64, true>
               : add_as<u64, false>)(base, count, numbers);
}

}  // namespace
}  // namespace netweight
