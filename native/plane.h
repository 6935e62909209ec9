// One plane of one chunk: a run of one- or two-byte numbers, stored raw, constant, packed, or entropy coded.
#pragma once

#include <memory>

#include "kernels.h"

namespace netweight {

// What the encoder may assume about a plane; it tries the splits that such data can profit from.
enum class PlaneKind {
  floating,  // the top bytes of floating-point numbers: sign, exponent, mantissa
  integer,   // the top bytes of integers, or opaque bytes
  tail,      // lower bytes of a wider number: usually noise, sometimes zero or zero-ended
};

struct PlaneShape {
  int unit;           // 1 or 2 bytes
  PlaneKind kind;
  int exponent_bits;  // floating only
  int mantissa_bits;  // floating only: those inside the unit
};

// Working memory of a thread, reused from plane to plane and from call to call.
class Scratch {
 public:
  u8* bytes(size_t n) { return grow(bytes_, bytes_size_, n); }
  Patch* patches(size_t n) { return grow(patches_, patches_size_, n); }
  u8* planes(size_t n) { return grow(planes_, planes_size_, n); }
  size_t chunks_ahead = 1;  // which chunk this thread is likely to encode next, counted from the present one

 private:
  template <typename T>
  static T* grow(std::unique_ptr<T[]>& p, size_t& size, size_t n) {
    if (n > size) {
      p.reset(new T[n]);  // not initialized: no page is touched before it is used
      size = n;
    }
    return p.get();
  }
  std::unique_ptr<u8[]> bytes_, planes_;
  std::unique_ptr<Patch[]> patches_;
  size_t bytes_size_ = 0, patches_size_ = 0, planes_size_ = 0;
};

// An upper bound of what encode_plane writes, and of what it touches while writing.
inline size_t plane_bound(size_t count, int unit) { return count * static_cast<size_t>(unit) + 4096; }

// Writes `count` numbers at `in` to `out`; returns the end of what was written.
u8* encode_plane(const PlaneShape& shape, const u8* in, size_t count, Level level, const Kernels& kernels, Scratch& scratch, u8* out);

// Reads one plane. readable_end bounds what may be read beyond `in` (it may lie past in.end, never before it).
void decode_plane(Reader& in, const u8* readable_end, int unit, size_t count, const Kernels& kernels, u8* out);

// If the next plane is stored raw, skips it and returns where its bytes are; otherwise nullptr and nothing is read.
const u8* raw_plane(Reader& in, int unit, size_t count);

// Parts of the above with files of their own.
u64 build_wide_table(const u32* counts, int symbol_bits, std::vector<u16>& symbols, std::vector<u16>& frequencies);
u8* encode_wide(const Split& split, const std::vector<u16>& symbols, const std::vector<u16>& frequencies, const u8* in, size_t count,
                Scratch& scratch, u8* out);
void decode_wide(Reader& in, int unit, size_t count, const Kernels& kernels, u8* out);

}  // namespace netweight
