// What an instruction set must offer to the codec. Every implementation yields the same bytes; they differ in speed only.
#pragma once

#include "table.h"

namespace netweight {

// Raw bits of the rows: region `low` holds the low eight bits (or all, when there are at most eight), region `rest` the bits
// above eight. Of region `low` the last row of every stream, and as much of the end of the row before as there are bytes
// left, is folded into the 64 states that the stream's decoder ends with.
struct RawRegions {
  size_t row_low_bytes = 0;  // one 64-lane row of one stream
  size_t row_rest_bytes = 0;
  size_t folded_bytes = 0;   // of the last row but one
  size_t low_bytes = 0;      // whole regions
  size_t rest_bytes = 0;

  NETWEIGHT_INLINE RawRegions(const Split& split, int streams, size_t rows) {
    int low_bits = split.raw_bits < 8 ? split.raw_bits : 8;
    row_low_bytes = field_block_bytes(low_bits);
    row_rest_bytes = field_block_bytes(split.raw_bits - low_bits);
    if (rows > 1) folded_bytes = row_low_bytes < 32 ? row_low_bytes : 64 - row_low_bytes;
    low_bytes = (row_low_bytes * (rows - 1) - folded_bytes) * static_cast<size_t>(streams);
    rest_bytes = row_rest_bytes * static_cast<size_t>(streams) * rows;
  }
};

// A parsed rans block. Row r of stream g holds elements (r * streams + g) * 64 .. + 63 of the chunk.
struct RansBlock {
  Split split;
  int streams;
  bool steep;    // frequencies above 127
  size_t count;  // elements
  size_t rows;   // ceil(count / (64 * streams)), the last may be partial
  const u8* raw_low;
  const u8* raw_rest;
  const u8* stream_end[kMaxStreams];
  const u8* readable_end;  // reading below this address is safe
  const DecodeTable* table;
};

struct Lanes {
  alignas(64) u8 low[kMaxStreams][64];
  alignas(64) u8 high[kMaxStreams][64];
  const u8* at[kMaxStreams];
};

// Decodes whole rows [row, row_end) to `out` (the chunk's first element) and returns the row where it had to stop, because
// reading on might pass readable_end. The portable one returns row_end, or npos when a stream runs out: corrupt.
using DecodeRows = size_t (*)(const RansBlock&, Lanes&, size_t row, size_t row_end, void* out);
inline constexpr size_t npos = ~size_t{0};

// A parsed wide_rans block. Element i of a block of 64 belongs to lane i % 32.
struct WideTable {
  u32 step[kWideSlots];    // per slot: frequency | slot - start << 12 | placed symbol << 24, of which eight bits have room
  u16 placed[kWideSlots];  // the placed symbol
};

struct WideBlock {
  Split split;
  const WideTable* table;
  const u8* raw_low;
  const u8* raw_rest;
  const u8* stream_end;
  const u8* readable_end;  // reading below this address is safe
};

struct WideLanes {
  alignas(64) u32 state[kWideLanes];
  const u8* at;
};

// Decodes whole blocks [block, block_end) and returns the block where it had to stop, because reading on might pass
// readable_end; npos when the stream runs out: corrupt. The portable one returns block_end or npos.
using DecodeWide = size_t (*)(const WideBlock&, WideLanes&, size_t block, size_t block_end, u8* out);

// How a vector encoder finds the index of a symbol in a table of 64.
enum class SymbolLookup {
  range,  // symbol - base + 1: the table's symbols lie close together, as those of weights do
  map,    // map[symbol], and map[255] for all symbols above: the table's are bytes, also those of nine bits whose top bit is never set
  pairs,  // 2 * map[symbol >> 1] + (symbol & 1), for symbols of nine bits
  none,   // too many symbols for any of these: the portable encoder serves
};

struct alignas(64) EncodeTable {
  u8 map[256];
  u8 frequency[64];  // 0: not in the table
  u8 start[64];
  u8 reciprocal_low[64], reciprocal_high[64];  // x * reciprocal >> 16 is x / f or one less, for x < 256 f
  SymbolLookup lookup;
  int base;           // least symbol of a range
  int host;           // index that stands in for symbols not in the table
  struct Entry {
    u64 reciprocal;   // x / f == x * reciprocal >> 32 for x < 65536
    u16 frequency, start;
  };
  std::vector<Entry> by_symbol;

  EncodeTable(const Table& table, const Split& split);
  // The index of a symbol that is looked up by map or pairs.
  NETWEIGHT_INLINE u8 index(u32 symbol) const {
    return lookup == SymbolLookup::map ? map[symbol < 255 ? symbol : 255] : static_cast<u8>(2 * map[symbol >> 1] + (symbol & 1));
  }
};

struct Patch {
  u32 position;  // row * 64 + lane within the stream
  u32 symbol;
};

struct RansEncoder {
  Split split;
  int streams;
  size_t count, rows;
  const EncodeTable* table;
  u8* raw_low;
  u8* raw_rest;
  u8* at[kMaxStreams];                // byte streams grow downwards from here
  Patch* patch[kMaxStreams];          // patches grow downwards likewise
  Patch* patch_limit[kMaxStreams];    // lowest address that may still take a row's worth of patches
  alignas(64) u8 low[kMaxStreams][64];
  alignas(64) u8 high[kMaxStreams][64];
  u16 padding = 0;                    // element that fills the last row
  size_t ahead = 0;                   // bytes from here to the chunk that the thread will encode next
};

// Encodes rows row-1, row-2, ..., 0 of `in`, full rows only; false when there are more patches than fit.
using EncodeRows = bool (*)(RansEncoder&, const void* in, size_t row);

// Numbers of 4 or 8 bytes as planes: the two top bytes as 16-bit words, then one plane per byte, most significant first.
using Join = void (*)(const u8* head, const u8* const* tail, size_t count, u8* out);
using TakeApart = void (*)(const u8* in, size_t count, u8* head, u8* const* tail);

// Folded steps from a base's numbers to others of `unit` bytes, and numbers from steps, in place.
using Subtract = void (*)(const u8* in, const u8* base, size_t count, int unit, bool floats, u8* steps);
using Add = void (*)(const u8* base, size_t count, int unit, bool floats, u8* steps);

// Steps of 16 bits in the order of a base's numbers, from those of each class (see Classes), behind which 64 bytes may be read.
using ClassSizes = void (*)(const u8* base, size_t count, const u8* thresholds, size_t* sizes);
using Interleave = void (*)(const u8* base, size_t count, const u8* thresholds, const u8** steps, u8* out);

// A round of AES of all sixteen states for each 256 bytes; see digest.h.
using AesRounds = void (*)(u32* states, const u8* in, size_t blocks);

// Elements of which bit i % 4 of nibble i / 4 says whether it is the next of `rest`, behind which 64 bytes may be read, or `value`.
using Spread = void (*)(const u8* nibbles, const u8* rest, size_t count, int unit, const u8* value, u8* out);

// Two-byte elements from their numbers in a palette of 256, of which the first `size` are used.
using Recall = void (*)(const u8* numbers, size_t count, const u16* palette, size_t size, u8* out);

// A plane in the mode joint: of each element the number of a symbol, which raw bits complete; of a value, which needs none; or of
// a coarse symbol, which lacks more bits.
struct Joint {
  Split split;
  int more_bits = 0;                           // that a coarse symbol lacks beside its raw bits, right above the lowest of them
  int symbols = 0, values = 0, coarse = 0;     // numbered in this order
  u16 placed[256];                             // by number: what stands in the element
  const u8* number_of = nullptr;               // encoder: by element
  u32 occurrences[8] = {};                     // encoder: by value
  const u8 *raw = nullptr, *more = nullptr;    // decoder: fields, one behind the other
  size_t fields = 0, more_fields = 0;          // so many
  size_t next = 0, next_more = 0;              // decoder: the next ones
  const u8* readable_end = nullptr;            // decoder

  NETWEIGHT_INLINE int before_coarse() const { return symbols + values; }
  NETWEIGHT_INLINE int listed() const { return symbols + values + coarse; }
  NETWEIGHT_INLINE int more_shift() const { return split.raw_bits - split.signed_raw; }
};

// Numbers, and a byte for each field of raw bits; behind all of them 64 bytes may be written.
using Part = void (*)(Joint&, const u8* in, size_t count, u8* numbers, u8* raw, u8* more);
// Elements from numbers and the next raw bits; false for numbers that are not listed and when raw bits run out.
using Unite = bool (*)(Joint&, const u8* numbers, size_t count, u8* out);
// Blocks of 64 fields of one to eight bits, from bytes.
using Pack = void (*)(int bits, const u8* fields, size_t blocks, u8* out);

// How the weights of a lossy blob are rounded; see rounding.h.
enum class FloatType { brain, half, single };

struct Rounding {
  FloatType type;
  int mantissa_bits;  // kept: 0 .. 6
  u64 block;          // weights that share a normalizer; 0: no normalizers
  bool reference;     // the arithmetic of the paper's code; else the corrected one
  double numerator, denominator;  // of the bound on a weight's relative change; only the encoder looks at it

  size_t unit() const { return type == FloatType::single ? 4 : 2; }
  NETWEIGHT_INLINE u32 largest_word() const { return (255u << mantissa_bits) - (reference ? 0 : 1); }
};

// Weights from words, of which the first belongs to weight number `first`, counted from the first normalizer's first weight;
// true when a word cannot be.
using DecodeWords = bool (*)(const u16* words, size_t count, u64 first, const u8* normalizers, const Rounding&, u8* out);

// Rounds weights, of which the first begins a block: to words, normalizers, values. Returns the largest relative change and
// adds to `escapes` which weights are to be kept exactly.
using RoundWeights = double (*)(const u8* in, size_t count, const Rounding&, u16* words, u8* normalizers, u8* values, std::vector<u64>& escapes);

struct Kernels {
  const char* name;
  DecodeRows decode_rows;
  EncodeRows encode_rows;
  DecodeWide decode_wide;
  Join join4, join8;
  TakeApart split4, split8;
  AesRounds aes_rounds;
  DecodeWords decode_words;
  RoundWeights round_weights;
  Spread spread;
  Recall recall;
  Subtract subtract;
  Add add;
  Interleave interleave;
  ClassSizes class_sizes;
  Part part;
  Unite unite;
  Pack pack;
};

// What goes on with decoded bytes as they come, while they are in the nearest cache.
struct Follower {
  virtual void up_to(const u8* end) = 0;

 protected:
  ~Follower() = default;
};

// The check of a chunk's bytes.
class ChunkCheck final : public Follower {
 public:
  ChunkCheck(const Kernels& kernels, const u8* from);
  void up_to(const u8* end) override {
    const size_t blocks = static_cast<size_t>(end - at_) / 256;
    kernels_.aes_rounds(states_, at_, blocks);
    at_ += 256 * blocks;
  }
  u64 finish(const u8* end);

 private:
  const Kernels& kernels_;
  const u8 *from_, *at_;
  alignas(64) u32 states_[64];
};

u64 check_of(const Kernels& kernels, const u8* in, size_t size);

// How much of a chunk is decoded before it is taken into the check: less than the nearest cache holds.
inline constexpr size_t kSlab = 1 << 14;

const Kernels& portable_kernels();
const Kernels* avx2_kernels();    // nullptr when this build or this processor has none
const Kernels* avx512_kernels();
const Kernels* neon_kernels();

// One block of the wide mode: placed symbols and states by plain code. False when the stream runs out.
bool step_wide(const WideBlock& block, WideLanes& lanes, u16* placed);

// The last two rows (folded raw bits, perhaps partial) are the portable code's in every set.
inline size_t rows_before_last_two(size_t rows) { return rows > 2 ? rows - 2 : 0; }
bool decode_last_rows(const RansBlock& block, Lanes& lanes, void* out);
bool encode_last_rows(RansEncoder& encoder, const void* in);

}  // namespace netweight
