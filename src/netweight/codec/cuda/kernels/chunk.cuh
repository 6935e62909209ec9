// What decoding a chunk works on: the blob's bounds, the plane that is being read, where its elements go, and the memory
// that a block shares. For decode.cu alone.
#pragma once

#include "types.cuh"

// Reasons for refusing a blob, to be ORed together; `decoding.py` holds their words.
constexpr u32 kBadIndex = 1, kTruncated = 2, kBadMode = 4, kBadSplit = 8, kBadStreams = 16, kBadTable = 32, kBadStates = 64,
              kBadStream = 128, kBadPacked = 256, kBadPatch = 512, kLeftOver = 1024;

enum Mode : u32 { kRaw, kConstant, kPacked, kRans, kWideRans };

#ifndef NETWEIGHT_NUMBER_BYTES
#define NETWEIGHT_NUMBER_BYTES 0
#endif
constexpr u32 kNumberBytes = NETWEIGHT_NUMBER_BYTES;  // of every number that this file decodes; 0: as jobs say
#if NETWEIGHT_NUMBER_BYTES
#define NETWEIGHT_ROWS_CALLED NETWEIGHT_DEVICE  // one kind of plane: functions over its rows are entered once
#else
#define NETWEIGHT_ROWS_CALLED NETWEIGHT_CALLED
#endif

constexpr u32 kMostWarps = 4;
constexpr u32 kStagedBytes = 816;  // holds any header of a rans plane: 3 + 1 + 63 * 3 + 63 + 4 * (6 + 128), and 15 before it
constexpr u32 kSlice = 512;         // bytes of a stream that a warp loads at once
constexpr u32 kRing = 2 * kSlice, kRingBytes = kRing + kSlice + 16;
constexpr u32 kSlots = 256, kMostSymbols = 63;

// A table's symbols in the order of their slots.
struct TableRows {
  u16 start[64];
  u16 symbol[64];
};

struct Shared {
  uint4 staged[kStagedBytes / 16];
  uint4 rings[kMostWarps][kRingBytes / 16];  // also the tables of wide_rans
  u32 slots[kSlots];
  TableRows rows;
  u16 unordered[64];
  u32 failure;      // reasons, ORed
  u64 plane_bytes;  // of a plane that one warp decodes
};
__shared__ Shared shared;  // no argument, so that the compiler knows which kind of memory it is

// A piece of memory, as addresses: pointers beyond an array must not even be computed, and streams that are damaged would.
struct Bounds {
  u64 begin, end;
};

NETWEIGHT_DEVICE u64 address(const void* p) { return reinterpret_cast<u64>(p); }

// Memory outside the multiprocessor at an address, said so that the compiler knows which kind of memory it is.
template <typename T>
NETWEIGHT_DEVICE T* global_memory(u64 at) {
  return static_cast<T*>(__cvta_global_to_generic(at));
}

// Asks for the 32 bytes around an address to be brought to the L2 cache.
NETWEIGHT_DEVICE void prefetch(u64 at) {
#ifndef NETWEIGHT_EMULATED
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#else
  static_cast<void>(*reinterpret_cast<const volatile u8*>(at));  // so that a place outside is found
#endif
}

NETWEIGHT_CALLED uint4 load16_by_bytes(u64 at, Bounds bounds) {
  u64 halves[2] = {0, 0};
  for (u32 i = 0; i < 16; i++) {
    if (at + i < bounds.begin || at + i >= bounds.end) continue;
    halves[i / 8] |= static_cast<u64>(*reinterpret_cast<const u8*>(at + i)) << 8 * (i % 8);
  }
  return make_uint4(static_cast<u32>(halves[0]), static_cast<u32>(halves[0] >> 32), static_cast<u32>(halves[1]),
                    static_cast<u32>(halves[1] >> 32));
}

// 16 bytes at a multiple of 16; what lies outside the bounds is 0.
NETWEIGHT_DEVICE uint4 load16(u64 at, const Bounds& bounds) {
  if (at >= bounds.begin && at + 16 <= bounds.end) return __ldg(reinterpret_cast<const uint4*>(at));
  return load16_by_bytes(at, bounds);
}

// Has a warp ask for bytes that lie within the blob, as far as they do.
NETWEIGHT_DEVICE void prefetch_span(u64 at, u32 bytes, const Bounds& blob) {
  for (u32 i = 32 * lane_id(); i < bytes; i += 32 * kWarp)
    if (at + i < blob.end) prefetch(at + i);
}

// Where the elements of a plane go.
struct Plane {
  u8* out;     // the first element's bytes in the tensor
  u32 stride;  // bytes from one element to the next
  u32 width;   // bytes of an element, 1 or 2
  u32 count;   // elements

  __device__ __forceinline__ u8* at(u32 element) const { return out + static_cast<u64>(element) * stride; }
  __device__ __forceinline__ void put(u32 element, u32 value) const {
    if (width == 1) *at(element) = static_cast<u8>(value);
    else *reinterpret_cast<u16*>(at(element)) = static_cast<u16>(value);
  }
  __device__ __forceinline__ u32 get(u32 element) const {
    return width == 1 ? *at(element) : *reinterpret_cast<const u16*>(at(element));
  }
  __device__ __forceinline__ bool contiguous() const { return stride == width; }
};

// How an element falls into a symbol and raw bits.
struct Split {
  u32 raw_bits;
  bool is_signed;
  u32 symbol_bits;
  u32 symbol_shift;

  __device__ __forceinline__ u32 symbol_mask() const { return ((1u << symbol_bits) - 1) << symbol_shift; }
  // Raw bits where they stand in an element of `width` bytes.
  __device__ __forceinline__ u32 place_raw(u32 raw, u32 width) const {
    if (!is_signed) return raw;
    u32 low = raw_bits - 1;
    return (raw & ((1u << low) - 1)) | (raw >> low & 1) << (8 * width - 1);
  }
};

NETWEIGHT_DEVICE bool read_split(u32 byte, u32 width, Split& split) {
  split.raw_bits = byte & 127;
  split.is_signed = byte >= 128;
  if (split.raw_bits >= 8 * width || (split.is_signed && split.raw_bits == 0)) return false;
  split.symbol_bits = 8 * width - split.raw_bits;
  split.symbol_shift = split.raw_bits - (split.is_signed ? 1 : 0);
  return true;
}

// Two neighboring fields, 2 * i and 2 * i + 1, of a block of 64 fields of `bits` bits, 0 to 8; byte by byte.
NETWEIGHT_DEVICE u32 field_pair(const u8* block, u32 bits, u32 i) {
  u32 from = 2 * bits * i, first = from / 8, last = (from + 2 * bits + 7) / 8, value = 0;
#pragma unroll
  for (u32 k = 0; k < 3; k++)
    if (first + k < last) value |= static_cast<u32>(block[first + k]) << 8 * k;
  return value >> from % 8 & ((1u << 2 * bits) - 1);
}

// Place of lane i's element in its row, i even; lane i + 1's is the next.
NETWEIGHT_DEVICE u32 place_in_row(u32 i, u32 width) { return width == 1 ? i : (i >> 3 & 1) * 32 + (i >> 4) * 8 + (i & 7); }

// Sums over the lanes up to and including this one.
NETWEIGHT_DEVICE u32 inclusive_sum(u32 value) {
  u32 lane = lane_id();
#pragma unroll
  for (u32 distance = 1; distance < kWarp; distance *= 2) {
    u32 other = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// Of 32 items, each of which may claim the one after it: which are claimed. A claimed item claims none. `carry` says
// whether the item before the first claims it, and then whether the last one claims the next.
NETWEIGHT_DEVICE u32 claimed_items(u32 claims, bool& carry) {
  u32 claimed = carry ? 1 : 0;
  u32 open = claims & ~claimed;
  carry = false;
  while (open) {
    u32 claimant = open & (0 - open);
    claimed |= claimant << 1;
    carry = claimant >> 31;
    open &= ~(claimant | claimant << 1);
  }
  return claimed;
}

NETWEIGHT_DEVICE void fail(u32 reason) { atomicOr(&shared.failure, reason); }
