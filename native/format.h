// The bytes of a blob: constants, element types, bounds-checked reading and writing. docs/format.md is the prose of this file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace netweight {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

// Small functions shared with files that are compiled for newer processors: inlined always, so that the linker never keeps
// such a copy for everybody.
#define NETWEIGHT_INLINE __attribute__((always_inline)) inline

// Thrown for damaged bytes and for bytes of a newer format; bind.cpp turns them into Python's CorruptBlob and Unsupported.
struct CorruptError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct UnsupportedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline constexpr u8 kMagic[3] = {'N', 'W', 'T'};
inline constexpr u8 kVersion = 1;           // the only one
inline constexpr size_t kFixedHeader = 28;  // magic .. header checksum
inline constexpr u8 kHasBase = 0x80, kHasCpuModes = 0x40;  // flags beside the level
inline constexpr int kMaxDims = 64;
inline constexpr int kMinChunkLog2 = 10, kMaxChunkLog2 = 22;

enum class Level : u8 { fast = 0, standard = 1, high = 2, max = 3 };

// How one plane of one chunk is stored. Steep and what follows need kHasCpuModes: GPU kernels do not decode them.
enum class Mode : u8 { raw = 0, constant = 1, packed = 2, rans = 3, wide_rans = 4, steep = 5, sparse = 6, palette = 7, halves = 8, joint = 9 };

// work() with the unsigned type of so many bytes.
template <typename Work>
NETWEIGHT_INLINE auto by_width(int bytes, Work work) {
  return bytes == 1 ? work(u8{}) : bytes == 2 ? work(u16{}) : bytes == 4 ? work(u32{}) : work(u64{});
}

constexpr int kClasses = 8;  // of numbers by the magnitude of their base's
// What a chunk may begin with instead of its first plane; needs kHasCpuModes.
enum class Transform : u8 { sparse = 16, delta = 17, difference = 18, classes = 19, runs = 20 };

inline constexpr int kLanes = 64;           // lanes of one rans stream: 64 states of 16 bits, one byte stream
inline constexpr int kMaxStreams = 4;
inline constexpr int kSlots = 256;          // frequencies of a rans table add up to this
inline constexpr int kMaxFrequency = 127;   // so that a step fits signed 16-bit multiplication
inline constexpr int kMaxSymbols = 63;
inline constexpr int kMaxRareSymbols = 14;  // codes 0..13 of a patch; 14: literal, 15: skip
inline constexpr int kPatchLiteral = 14, kPatchSkip = 15;
inline constexpr size_t kMaxPatchGap = 4096;

inline constexpr int kWideLanes = 32;       // lanes of the wide_rans stream: 32 states of 32 bits, 16-bit renormalization
inline constexpr int kWideSlots = 4096;
inline constexpr int kMaxWideSymbols = 1024;

// One element type: `units` equal numbers of `unit_bytes` bytes make an element (2 for complex types); sub-byte types are bytes.
struct Dtype {
  u8 code;
  const char* name;  // safetensors' name where it has one
  u8 bits;           // of one element
  u8 unit_bytes;     // of one number: 1, 2, 4 or 8
  u8 exponent_bits;  // 0 for integers and opaque bytes
  u8 mantissa_bits;
};

const Dtype& dtype_by_code(u8 code);           // throws UnsupportedError
const Dtype& dtype_by_name(const char* name);  // throws UnsupportedError
const std::vector<Dtype>& all_dtypes();

// Planes of one number, most significant first: the head (top 2 bytes, or the only byte), then one plane per further byte.
inline int plane_count(const Dtype& d) { return d.unit_bytes <= 2 ? 1 : d.unit_bytes - 1; }
inline int head_bytes(const Dtype& d) { return d.unit_bytes == 1 ? 1 : 2; }

inline int default_chunk_log2(const Dtype& d) { return d.code == 1 ? 20 : d.unit_bytes <= 2 ? 18 : 17; }  // masks take few bits

// A reader that never passes its end.
struct Reader {
  const u8* at;
  const u8* end;

  const u8* take(size_t n, const char* what) {
    if (n > static_cast<size_t>(end - at)) throw CorruptError(std::string("the data ends inside ") + what);
    const u8* p = at;
    at += n;
    return p;
  }
  u8 byte(const char* what) { return *take(1, what); }
  u16 word(const char* what) {
    const u8* p = take(2, what);
    return static_cast<u16>(p[0] | p[1] << 8);
  }
  u32 word24(const char* what) {
    const u8* p = take(3, what);
    return p[0] | p[1] << 8 | static_cast<u32>(p[2]) << 16;
  }
};

inline u8* put16(u8* p, u32 v) {
  p[0] = static_cast<u8>(v);
  p[1] = static_cast<u8>(v >> 8);
  return p + 2;
}
inline u8* put24(u8* p, u32 v) {
  p[2] = static_cast<u8>(v >> 16);
  return put16(p, v) + 1;
}
inline u8* put32(u8* p, u32 v) {
  for (int i = 0; i < 4; i++) p[i] = static_cast<u8>(v >> (8 * i));
  return p + 4;
}
inline u32 get32(const u8* p) { return p[0] | p[1] << 8 | p[2] << 16 | static_cast<u32>(p[3]) << 24; }

// Bytes of one block of 64 fields of `bits` bits: a byte plane for the low eight, then the rest.
NETWEIGHT_INLINE size_t field_block_bytes(int bits) { return 8u * static_cast<size_t>(bits); }

// Where lane i of a 64-lane row stands among its 64 elements. Two-byte elements: the order in which vector instructions
// interleave two byte registers; one-byte elements: as they come.
NETWEIGHT_INLINE int lane_position(int lane, int unit) {
  return unit == 1 ? lane : ((lane >> 3) & 1) * 32 + (lane >> 4) * 8 + (lane & 7);
}

}  // namespace netweight
