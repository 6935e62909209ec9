// XXH3 of 64 and 128 bits, seed 0: the digest of a tensor's checks and the check of a header (docs/format.md).
//
// The algorithm and its constants are those of xxHash (BSD 2-Clause, Yann Collet; see native/third_party). A long text is
// hashed in blocks of 1 KiB. What a block adds to the eight accumulators does not depend on them, so the sums of several blocks
// are found side by side; only adding and scrambling go block by block, in the eight accumulators of one warp at once.
// Functions named `long_` are for a whole warp, whose lane is accumulator lane & 7; the others are for any thread.
#pragma once

#include "types.cuh"

constexpr u64 kDigestBlock = 1024;  // bytes
constexpr u32 kStripes = 16;        // of 64 bytes, in a block
constexpr u64 kLongText = 241;      // bytes; shorter ones are hashed otherwise
constexpr u32 kSumsAtOnce = 32;     // blocks whose sums are found side by side
constexpr u32 kLastStripeKey = 121, kMergeLowKey = 11, kMergeHighKey = 117;  // places in the secret

constexpr u64 kPrime32First = 0x9E3779B1u, kPrime32Second = 0x85EBCA77u, kPrime32Third = 0xC2B2AE3Du;
constexpr u64 kPrimeFirst = 0x9E3779B185EBCA87ull, kPrimeSecond = 0xC2B2AE3D27D4EB4Full, kPrimeThird = 0x165667B19E3779F9ull;
constexpr u64 kPrimeFourth = 0x85EBCA77C2B2AE63ull, kPrimeFifth = 0x27D4EB2F165667C5ull;
constexpr u64 kMixer = 0x165667919E3779F9ull, kStrongMixer = 0x9FB21C651E98DF25ull;

static __device__ const u64 kSecret[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82,
    0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5,
    0x49daf0b751dd0d17, 0x9e68d429265516d3, 0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};

static __device__ const u64 kFirstAccumulators[8] = {
    kPrime32Third, kPrimeFirst, kPrimeSecond, kPrimeThird, kPrimeFourth, kPrime32Second, kPrimeFifth, kPrime32First,
};

struct Hash128 {
  u64 low, high;
};

NETWEIGHT_DEVICE u64 secret_at(u32 place) {
  const u32 shift = place % 8 * 8;
  const u64 word = kSecret[place / 8] >> shift;
  return shift == 0 ? word : word | kSecret[place / 8 + 1] << (64 - shift);
}

NETWEIGHT_DEVICE u64 read_u64(const u8* p) {
  const u32 odd = bytes_to_alignment(p, 8);
  if (odd == 0) return *reinterpret_cast<const u64*>(p);
  if (odd % 2 == 0) {
    const u16* halves = reinterpret_cast<const u16*>(p);
    return halves[0] | static_cast<u64>(halves[1]) << 16 | static_cast<u64>(halves[2]) << 32 | static_cast<u64>(halves[3]) << 48;
  }
  return read_u32(p) | static_cast<u64>(read_u32(p + 4)) << 32;
}

// Eight bytes from place i on, of which those from place `gap_at` on lie `gap` bytes further on. No loop that counts asks for it.
static __device__ __noinline__ u64 word_across(const u8* at, u64 gap_at, u32 gap, u64 i) {
  if (i + 8 <= gap_at) return read_u64(at + i);
  if (i >= gap_at) return read_u64(at + i + gap);
  u64 word = 0;
  for (u32 k = 0; k < 8; k++) word |= static_cast<u64>(at[i + k + (i + k < gap_at ? 0 : gap)]) << 8 * k;
  return word;
}

// What is hashed: `size` bytes, of which those from place `gap_at` on lie `gap` bytes further on.
struct Text {
  const u8* at;
  u64 size;
  u64 gap_at;
  u32 gap;

  NETWEIGHT_DEVICE Text of(const u8* at, u64 size) { return {at, size, size, 0}; }
  __device__ __forceinline__ u64 word(u64 i) const { return word_across(at, gap_at, gap, i); }
};

// ---- mixing ----------------------------------------------------------------------------------------------------------

NETWEIGHT_DEVICE u64 folded_product(u64 a, u64 b) { return (a * b) ^ __umul64hi(a, b); }

NETWEIGHT_DEVICE u64 avalanche(u64 h) {
  h = (h ^ h >> 37) * kMixer;
  return h ^ h >> 32;
}

NETWEIGHT_DEVICE u64 older_avalanche(u64 h) {
  h = (h ^ h >> 33) * kPrimeSecond;
  h = (h ^ h >> 29) * kPrimeThird;
  return h ^ h >> 32;
}

NETWEIGHT_DEVICE u64 swapped(u64 x) {
  return static_cast<u64>(__byte_perm(static_cast<u32>(x), 0, 0x0123)) << 32 | __byte_perm(static_cast<u32>(x >> 32), 0, 0x0123);
}

NETWEIGHT_DEVICE u64 mix_16(const Text& text, u64 i, u32 key) {
  return folded_product(text.word(i) ^ secret_at(key), text.word(i + 8) ^ secret_at(key + 8));
}

NETWEIGHT_DEVICE void mix_32(Hash128& h, const Text& text, u64 first, u64 second, u32 key) {
  h.low = (h.low + mix_16(text, first, key)) ^ (text.word(second) + text.word(second + 8));
  h.high = (h.high + mix_16(text, second, key + 16)) ^ (text.word(first) + text.word(first + 8));
}

// ---- short texts -----------------------------------------------------------------------------------------------------

NETWEIGHT_DEVICE Hash128 hash_8(const Text& text) {
  const u64 keyed = text.word(0) ^ (secret_at(16) ^ secret_at(24));
  const u64 factor = kPrimeFirst + (text.size << 2);
  Hash128 h = {keyed * factor, __umul64hi(keyed, factor)};
  h.high += h.low << 1;
  h.low ^= h.high >> 3;
  h.low = (h.low ^ h.low >> 35) * kStrongMixer;
  return {h.low ^ h.low >> 28, avalanche(h.high)};
}

NETWEIGHT_DEVICE Hash128 hash_9_to_16(const Text& text) {
  const u64 first = text.word(0), second = text.word(text.size - 8);
  const u64 mixed = first ^ second ^ secret_at(32) ^ secret_at(40), keyed = second ^ secret_at(48) ^ secret_at(56);
  Hash128 m = {mixed * kPrimeFirst + ((text.size - 1) << 54), __umul64hi(mixed, kPrimeFirst)};
  m.high += keyed + (keyed & 0xffffffffu) * (kPrime32Second - 1);
  m.low ^= swapped(m.high);
  return {avalanche(m.low * kPrimeSecond), avalanche(__umul64hi(m.low, kPrimeSecond) + m.high * kPrimeSecond)};
}

NETWEIGHT_DEVICE Hash128 merge_short(const Hash128& h, u64 size) {
  const u64 high = h.low * kPrimeFirst + h.high * kPrimeFourth + size * kPrimeSecond;
  return {avalanche(h.low + h.high), 0 - avalanche(high)};
}

// 128 bits of 8 to 240 bytes; checks have eight bytes each.
NETWEIGHT_DEVICE Hash128 short_hash_128(const Text& text) {
  const u64 size = text.size;
  if (size == 8) return hash_8(text);
  if (size <= 16) return hash_9_to_16(text);
  Hash128 h = {size * kPrimeFirst, 0};
  if (size <= 128) {
    for (u32 i = static_cast<u32>(size - 1) / 32 + 1; i-- > 0;) mix_32(h, text, 16 * i, size - 16 * (i + 1), 32 * i);
    return merge_short(h, size);
  }
  for (u32 i = 0; i < 4; i++) mix_32(h, text, 32 * i, 32 * i + 16, 32 * i);
  h = {avalanche(h.low), avalanche(h.high)};
  for (u32 i = 4; i < size / 32; i++) mix_32(h, text, 32 * i, 32 * i + 16, 3 + 32 * (i - 4));
  mix_32(h, text, size - 16, size - 32, 103);
  return merge_short(h, size);
}

// 64 bits of 17 to 240 bytes; no header is shorter.
NETWEIGHT_DEVICE u64 short_hash_64(const Text& text) {
  const u64 size = text.size;
  u64 h = size * kPrimeFirst;
  if (size <= 128) {
    for (u32 i = static_cast<u32>(size - 1) / 32 + 1; i-- > 0;) h += mix_16(text, 16 * i, 32 * i) + mix_16(text, size - 16 * (i + 1), 32 * i + 16);
    return avalanche(h);
  }
  for (u32 i = 0; i < 8; i++) h += mix_16(text, 16 * i, 16 * i);
  h = avalanche(h);
  for (u32 i = 8; i < size / 16; i++) h += mix_16(text, 16 * i, 3 + 16 * (i - 8));
  return avalanche(h + mix_16(text, size - 16, 119));
}

// ---- long texts ------------------------------------------------------------------------------------------------------

NETWEIGHT_DEVICE u64 long_first_accumulator() { return kFirstAccumulators[lane_id() & 7]; }

// Blocks that end in scrambling: all but the last, which may be whole, too.
NETWEIGHT_DEVICE u64 long_blocks(u64 size) { return (size - 1) / kDigestBlock; }

NETWEIGHT_DEVICE u64 long_scrambled(u64 accumulator) {
  return (accumulator ^ accumulator >> 47 ^ kSecret[kStripes + (lane_id() & 7)]) * kPrime32First;
}

// The sum of what the warp's four lanes of each accumulator have found: products, and words, which go to the neighbor.
NETWEIGHT_DEVICE u64 long_total(u64 products, u64 words) {
  for (int other = 8; other <= 16; other *= 2) {
    products += __shfl_xor_sync(kAllLanes, products, other);
    words += __shfl_xor_sync(kAllLanes, words, other);
  }
  return products + __shfl_xor_sync(kAllLanes, words, 1);
}

// What up to 16 stripes add, with the secret from `key` on.
NETWEIGHT_DEVICE u64 long_sum(const Text& text, u64 from, u32 stripes, u32 key) {
  u64 products = 0, words = 0;
  for (u32 stripe = lane_id() / 8; stripe < stripes; stripe += 4) {
    const u32 place = 8 * (lane_id() & 7);
    const u64 word = text.word(from + 64 * stripe + place), keyed = word ^ secret_at(key + 8 * stripe + place);
    products += (keyed & 0xffffffffu) * (keyed >> 32);
    words += word;
  }
  return long_total(products, words);
}

// By a whole block of threads: the accumulators after all blocks of a text that end in scrambling, in the first warp.
NETWEIGHT_DEVICE u64 long_accumulated(const Text& text, u64 (*sums)[8]) {
  const u64 blocks = text.size < kLongText ? 0 : long_blocks(text.size);
  u64 accumulator = long_first_accumulator();
  for (u64 first = 0; first < blocks; first += kSumsAtOnce) {
    const u32 some = blocks - first < kSumsAtOnce ? static_cast<u32>(blocks - first) : kSumsAtOnce;
    for (u32 i = warp_id(); i < some; i += blockDim.x / kWarp) {
      const u64 sum = long_sum(text, (first + i) * kDigestBlock, kStripes, 0);
      if (lane_id() < 8) sums[i][lane_id()] = sum;
    }
    __syncthreads();
    if (warp_id() == 0)
      for (u32 i = 0; i < some; i++) accumulator = long_scrambled(accumulator + sums[i][lane_id() & 7]);
    __syncthreads();
  }
  return accumulator;
}

// The rest of a text after its scrambled blocks: whole stripes, and once more its last 64 bytes.
NETWEIGHT_DEVICE u64 long_end(const Text& text, u64 accumulator) {
  const u64 from = long_blocks(text.size) * kDigestBlock;
  accumulator += long_sum(text, from, static_cast<u32>((text.size - 1 - from) / 64), 0);
  return accumulator + long_sum(text, text.size - 64, 1, kLastStripeKey);
}

NETWEIGHT_DEVICE u64 long_merged(u64 accumulator, u32 key, u64 start) {
  for (u32 i = 0; i < 4; i++) {
    const u64 first = __shfl_sync(kAllLanes, accumulator, static_cast<int>(2 * i)), second = __shfl_sync(kAllLanes, accumulator, static_cast<int>(2 * i + 1));
    start += folded_product(first ^ secret_at(key + 16 * i), second ^ secret_at(key + 16 * i + 8));
  }
  return avalanche(start);
}

// ---- whole texts -----------------------------------------------------------------------------------------------------

// 64 bits of at least 17 bytes; `accumulator` is that of long_accumulated.
NETWEIGHT_DEVICE u64 hash_64(const Text& text, u64 accumulator) {
  if (text.size < kLongText) return short_hash_64(text);
  return long_merged(long_end(text, accumulator), kMergeLowKey, text.size * kPrimeFirst);
}

// 128 bits of at least eight bytes; `accumulator` is that of long_accumulated.
NETWEIGHT_DEVICE Hash128 hash_128(const Text& text, u64 accumulator) {
  if (text.size < kLongText) return short_hash_128(text);
  accumulator = long_end(text, accumulator);
  return {long_merged(accumulator, kMergeLowKey, text.size * kPrimeFirst), long_merged(accumulator, kMergeHighKey, ~(text.size * kPrimeSecond))};
}

// The canonical form: most significant byte first, the high half before the low one. By one thread.
NETWEIGHT_DEVICE void write_canonical(const Hash128& h, u8* out) {
  for (u32 i = 0; i < 8; i++) {
    out[i] = static_cast<u8>(h.high >> (56 - 8 * i));
    out[8 + i] = static_cast<u8>(h.low >> (56 - 8 * i));
  }
}
