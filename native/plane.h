// One plane of one chunk: a run of one- or two-byte numbers, stored raw, constant, packed, or entropy coded.
#pragma once

#include <functional>
#include <memory>
#include <optional>

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
  bool inner = false;      // part of a plane of skewed data
  bool one_sign = false;   // floats whose top bits are all equal, as of second moments
  bool split_off = false;  // what a sparse plane left, of which no further value is split off
};

// Memory from a shelf that all threads share, since new pages cost more than what is done with them.
class Room {
 public:
  explicit Room(size_t bytes);
  ~Room();
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  u8* get() const { return memory_.get(); }
  size_t size() const { return size_; }
  u8& operator[](size_t i) const { return memory_[i]; }
  static void forget_idle();

 private:
  std::unique_ptr<u8[]> memory_;
  size_t size_;
};

// Working memory of a thread, reused from plane to plane.
class Scratch {
 public:
  u8* bytes(size_t n) { return grow(bytes_, n); }
  Patch* patches(size_t n) { return reinterpret_cast<Patch*>(grow(patches_, n * sizeof(Patch))); }
  u8* planes(size_t n) { return grow(planes_, n); }
  u8* chunk(size_t n) { return grow(chunk_, n); }
  size_t chunks_ahead = 1;  // which chunk this thread is likely to encode next, counted from the present one

 private:
  static u8* grow(std::optional<Room>& room, size_t n) {
    if (!room || room->size() < n) room.emplace(n);
    return room->get();
  }
  std::optional<Room> bytes_, patches_, planes_, chunk_;
};

// An upper bound of what encode_plane writes, and of what it touches while writing.
inline size_t plane_bound(size_t count, int unit) { return count * static_cast<size_t>(unit) + 4096; }

// How deep planes may lie in planes: so many levels, or none and no modes beyond wide_rans.
inline constexpr int kMaxNesting = 8, kFlat = -1;

// Writes `count` numbers at `in` to `out`; returns the end of what was written.
u8* encode_plane(const PlaneShape& shape, const u8* in, size_t count, Level level, const Kernels& kernels, Scratch& scratch, u8* out, int nesting);

// Reads one plane. readable_end bounds what may be read beyond `in` (it may lie past in.end, never before it). `check` may take
// in what is there for good.
void decode_plane(Reader& in, const u8* readable_end, int unit, size_t count, const Kernels& kernels, u8* out, int nesting, Follower* check = nullptr);

// If the next plane is stored raw, skips it and returns where its bytes are; otherwise nullptr and nothing is read.
const u8* raw_plane(Reader& in, int unit, size_t count);

// Room for so many bytes, behind which 64 more may be read.
inline Room padded(size_t bytes) { return Room(bytes + 64); }

// The likeliest of a few numbers, spread over all, and how varied they are.
struct Probe {
  u64 value;
  size_t sampled, occurrences, distinct;
  bool varied;  // two-byte elements: whether more samples than usual held too many values
  bool often() const { return 4 * occurrences >= sampled; }
  bool few(int unit) const { return !varied && 64 * distinct <= (unit == 1 ? 20 : 58) * sampled; }
};
Probe probe(const u8* in, size_t count, int unit);
inline constexpr size_t kSamples = 64, kMoreSamples = 512;
// The i-th of the places that are looked at; no multiple of anything, because data often repeats.
inline size_t sample_place(size_t i, size_t count) { return static_cast<size_t>(static_cast<u64>(static_cast<u32>(i) * 0x9E3779B1u) * count >> 32); }

// Parts of the above with files of their own.
// A plane of skewed data in the mode that suits it, at `out`; nullptr when none does.
u8* encode_skewed(const PlaneShape& shape, const Probe& found, const u8* in, size_t count, Level level, const Kernels& kernels, Scratch& scratch, u8* out,
                  int nesting);
// Numbers of `unit` bytes as a value, a plane of nibbles and, by write_rest, what differs from the value.
u8* encode_sparse(const u8* in, size_t count, int unit, u64 value, Level level, const Kernels& kernels, Scratch& scratch, u8* out, int nesting,
                  const std::function<u8*(const u8* rest, size_t count, u8* out)>& write_rest);
void decode_sparse(Reader& in, const u8* readable_end, int unit, size_t count, const Kernels& kernels, u8* out, int nesting,
                   const std::function<void(size_t count, u8* rest)>& read_rest);
void decode_palette(Reader& in, const u8* readable_end, size_t count, const Kernels& kernels, u8* out, int nesting);
void decode_halves(Reader& in, const u8* readable_end, size_t count, const Kernels& kernels, u8* out, int nesting);
// Floats of which some are equal, as zeros often are: numbers of symbols and values, and raw bits; nullptr when that does not
// pay. Symbols of likely exponents have so many bits of the mantissa.
u8* encode_joint(const PlaneShape& shape, const u8* in, size_t count, int finer, Level level, const Kernels& kernels, Scratch& scratch, u8* out);
void decode_joint(Reader& in, const u8* readable_end, size_t count, const Kernels& kernels, u8* out, int nesting, Follower* check);
// One-byte elements, which occur so often each, as whole symbols.
u8* encode_numbers(const u8* in, const std::vector<u32>& counts, size_t count, Level level, const Kernels& kernels, Scratch& scratch, u8* out);
// Occurrences of the symbols of a split in all elements, or of one of `stride` groups of eight; returns how many were counted.
size_t histogram(const u8* in, size_t count, const Split& split, size_t stride, std::vector<u32>& counts);
Split read_split(Reader& in, int unit);
u64 build_wide_table(const u32* counts, int symbol_bits, std::vector<u16>& symbols, std::vector<u16>& frequencies);
u8* encode_wide(const Split& split, const std::vector<u16>& symbols, const std::vector<u16>& frequencies, const u8* in, size_t count,
                Scratch& scratch, u8* out);
void decode_wide(Reader& in, const u8* readable_end, int unit, size_t count, const Kernels& kernels, u8* out);

}  // namespace netweight
