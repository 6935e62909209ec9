// Chunks as differences from the same numbers of a base.
#include "chunk.h"

namespace netweight {
namespace {

// A number as one that grows with the float it stands for, and back: negative floats count down from -1.
template <typename T, bool kFloat>
T ordered(T v) {
  constexpr int top = 8 * sizeof(T) - 1;
  return kFloat ? static_cast<T>(v ^ (static_cast<T>(T{0} - (v >> top)) >> 1)) : v;
}

template <typename T, bool kFloat>
void subtract(const u8* in, const u8* base, size_t count, u8* out) {
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
void add(const u8* base, size_t count, u8* numbers) {
  for (size_t i = 0; i < count; i++) {
    T f, b;
    std::memcpy(&f, numbers + i * sizeof f, sizeof f);
    std::memcpy(&b, base + i * sizeof b, sizeof b);
    const T d = static_cast<T>((f >> 1) ^ (T{0} - (f & 1)));
    const T v = ordered<T, kFloat>(static_cast<T>(ordered<T, kFloat>(b) + d));
    std::memcpy(numbers + i * sizeof v, &v, sizeof v);
  }
}

// The integer type of a float's size.
Dtype unsigned_of(const Dtype& d) {
  Dtype plain = d;
  plain.exponent_bits = plain.mantissa_bits = 0;
  return plain;
}

}  // namespace

u8* encode_difference(const Dtype& d, const u8* in, const u8* base, size_t count, Level level, const Kernels& kernels, Scratch& scratch, u8* out) {
  const auto steps = padded(count * d.unit_bytes);
  const bool floats = d.exponent_bits != 0;
  (d.unit_bytes == 1   ? floats ? subtract<u8, true> : subtract<u8, false>
   : d.unit_bytes == 2 ? floats ? subtract<u16, true> : subtract<u16, false>
   : d.unit_bytes == 4 ? floats ? subtract<u32, true> : subtract<u32, false>
   : floats            ? subtract<u64, true>
                       : subtract<u64, false>)(in, base, count, steps.get());
  *out++ = static_cast<u8>(Transform::difference);
  return encode_planes(unsigned_of(d), steps.get(), count, level, kernels, scratch, out, kMaxNesting, true);
}

void decode_difference(const Dtype& d, Reader& in, const u8* readable_end, const u8* base, size_t count, const Kernels& kernels, Scratch& scratch, u8* out) {
  decode_planes(unsigned_of(d), in, readable_end, count, kernels, scratch, out, kMaxNesting);
  const bool floats = d.exponent_bits != 0;
  (d.unit_bytes == 1   ? floats ? add<u8, true> : add<u8, false>
   : d.unit_bytes == 2 ? floats ? add<u16, true> : add<u16, false>
   : d.unit_bytes == 4 ? floats ? add<u32, true> : add<u32, false>
   : floats            ? add<u64, true>
                       : add<u64, false>)(base, count, out);
}

}  // namespace netweight
