// Steps between numbers and a base, and back; compiled once per instruction set.
#pragma once

#include <algorithm>

#include "format.h"

namespace netweight {
namespace {

// Numbers of 16 bits by the magnitude of the base's: by how many thresholds do not exceed the eight bits below its sign.
struct ClassOf {
  u8 of[256];
  explicit ClassOf(const u8* thresholds) {
    for (int v = 0, k = 0; v < 256; v++) {
      while (k < kClasses - 1 && thresholds[k] <= v) k++;
      of[v] = static_cast<u8>(k);
    }
  }
  u8 operator()(const u8* number) const { return of[magnitude(number)]; }
  static u8 magnitude(const u8* number) { return static_cast<u8>(number[1] << 1 | number[0] >> 7); }
};

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

// How many numbers each class has.
inline void class_sizes(const u8* base, size_t count, const u8* thresholds, size_t* sizes) {
  size_t above[kClasses + 1] = {count};
  u16 least[kClasses - 1];
  std::copy(thresholds, thresholds + kClasses - 1, least);
  for (size_t start = 0; start < count; start += 4096) {
    const size_t end = std::min(start + 4096, count);
    u16 here[kClasses - 1] = {};
    for (size_t i = start; i < end; i++) {
      u16 b;
      std::memcpy(&b, base + 2 * i, 2);
#pragma GCC unroll 7
      for (int k = 0; k < kClasses - 1; k++) here[k] = static_cast<u16>(here[k] + ((b >> 7 & 255) >= least[k]));
    }
    for (int k = 0; k < kClasses - 1; k++) above[k + 1] += here[k];
  }
  for (int k = 0; k < kClasses; k++) sizes[k] = above[k] - above[k + 1];
}

inline void interleave(const u8* base, size_t count, const u8* thresholds, const u8** steps, u8* out) {
  const ClassOf class_of(thresholds);
  for (size_t i = 0; i < count; i++) {
    const u8*& step = steps[class_of(base + 2 * i)];
    std::memcpy(out + 2 * i, step, 2);
    step += 2;
  }
}

inline void subtract(const u8* in, const u8* base, size_t count, int unit, bool floats, u8* out) {
  by_width(unit, [&](auto n) { (floats ? subtract_as<decltype(n), true> : subtract_as<decltype(n), false>)(in, base, count, out); });
}

inline void add(const u8* base, size_t count, int unit, bool floats, u8* numbers) {
  by_width(unit, [&](auto n) { (floats ? add_as<decltype(n), true> : add_as<decltype(n), false>)(base, count, numbers); });
}

}  // namespace
}  // namespace netweight
