// Elements of the mode joint taken apart and put together; compiled once per instruction set.
#pragma once

#include "fields.h"
#include "kernels.h"

namespace netweight {
namespace {  // compiled with different instruction sets: never shared between translation units

// From element `first` on.
inline void part_elements(Joint& joint, const u8* in, size_t first, size_t count, u8* numbers, u8* raw, u8* more) {
  const int shift = joint.more_shift();
  const u32 mask = (1u << joint.more_bits) - 1;
  for (size_t i = first; i < count; i++) {
    u16 v;
    std::memcpy(&v, in + 2 * i, 2);
    const int number = joint.number_of[v];
    numbers[i] = static_cast<u8>(number);
    raw[joint.fields] = static_cast<u8>(joint.split.raw(v));
    more[joint.more_fields] = static_cast<u8>(v >> shift & mask);
    if (number < joint.symbols) joint.fields++;
    else if (number < joint.before_coarse()) joint.occurrences[number - joint.symbols]++;
    else joint.fields++, joint.more_fields++;
  }
}

inline void part_all(Joint& joint, const u8* in, size_t count, u8* numbers, u8* raw, u8* more) { part_elements(joint, in, 0, count, numbers, raw, more); }

inline u32 field_at(const u8* fields, size_t number, int bits) {
  const size_t at = number * static_cast<size_t>(bits);
  u32 two = fields[at / 8];
  if (at % 8 + static_cast<size_t>(bits) > 8) two |= static_cast<u32>(fields[at / 8 + 1]) << 8;
  return two >> at % 8 & ((1u << bits) - 1);
}

inline bool unite_elements(Joint& joint, const u8* numbers, size_t count, u8* out) {
  for (size_t i = 0; i < count; i++) {
    const int number = numbers[i];
    if (number >= joint.listed()) return false;
    u32 v = joint.placed[number];
    if (number < joint.symbols || number >= joint.before_coarse()) {
      if (joint.next == joint.fields) return false;
      v |= joint.split.place_raw(field_at(joint.raw, joint.next++, joint.split.raw_bits));
    }
    if (number >= joint.before_coarse()) {
      if (joint.next_more == joint.more_fields) return false;
      v |= field_at(joint.more, joint.next_more++, joint.more_bits) << joint.more_shift();
    }
    const u16 element = static_cast<u16>(v);
    std::memcpy(out + 2 * i, &element, 2);
  }
  return true;
}

inline void pack_some(int bits, const u8* fields, size_t blocks, u8* out) {
  for (size_t i = 0; i < blocks; i++) pack_fields(bits, fields + 64 * i, out + i * field_block_bytes(bits));
}

}  // namespace
}  // namespace netweight
