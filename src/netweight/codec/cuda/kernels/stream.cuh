// A stream of the rans mode: its bytes, through a ring in shared memory, and the step that a warp makes for a row of 64
// elements, two neighboring lanes in each thread.
#pragma once

#include "chunk.cuh"

NETWEIGHT_DEVICE u8* ring_memory() { return reinterpret_cast<u8*>(shared.rings); }

// The bytes of a stream, through a ring in shared memory. `at` counts from the multiple of 16 at or below the stream.
struct ByteRing {
  u64 source;  // address of what is to be loaded next
  u32 ring;    // where the warp's ring begins in ring_memory()
  u32 filled;  // bytes that the ring has been given
  u32 at;
  uint4 ahead;

  __device__ __forceinline__ void load(const Bounds& bounds) {
    ahead = load16(source + 16 * lane_id(), bounds);
    source += kSlice;
  }
  // Puts the slice that was loaded ahead into the half of the ring whose bytes have all been taken. The first half also
  // stands behind the second, so that rows of a batch need not wrap around.
  __device__ __forceinline__ void put() {
    const u32 place = (filled & (kRing - 1)) + 16 * lane_id();
    __syncwarp();
    *reinterpret_cast<uint4*>(ring_memory() + ring + place) = ahead;
    if (place < kSlice) *reinterpret_cast<uint4*>(ring_memory() + ring + kRing + place) = ahead;
    __syncwarp();
    filled += kSlice;
  }
  __device__ __forceinline__ void start(const u8* stream, const Bounds& bounds) {
    ring = warp_id() * kRingBytes;
    source = address(stream) & ~15ull;
    at = static_cast<u32>(address(stream) & 15);
    filled = 0;
    load(bounds);
    const uint4 first = ahead;
    load(bounds);
    const uint4 second = ahead;
    load(bounds);
    const uint4 third = ahead;  // all three are under way
    ahead = first;
    put();
    ahead = second;
    put();
    ahead = third;
  }
  // Makes sure that 512 bytes are there, enough for eight rows.
  __device__ __forceinline__ void refill(const Bounds& bounds) {
    if (at + kSlice > filled) {
      put();
      load(bounds);
    }
  }
  // The place of the next byte in ring_memory().
  __device__ __forceinline__ u32 place() const { return ring + (at & (kRing - 1)); }
};

// Two lanes of 16-bit states.
struct Lanes {
  u32 a, b;
};

// A row's step. `from` is the place of the stream's next byte; returns both symbols, placed, in the halves of a word.
NETWEIGHT_DEVICE u32 step(Lanes& x, u32& from, u32 below) {
  const u32 entry_a = shared.slots[__byte_perm(x.a, 0, 0x4440)], entry_b = shared.slots[__byte_perm(x.b, 0, 0x4440)];
  // Bytes 0, x >> 8, 1, 0 times those of the entry: see slot_entry.
  const u32 a = __dp4a(__byte_perm(x.a, 1, 0x5415), entry_a, 0u), b = __dp4a(__byte_perm(x.b, 1, 0x5415), entry_b, 0u);
  const bool hungry_a = a < 256, hungry_b = b < 256;
  const u32 all_a = __ballot_sync(kAllLanes, hungry_a), all_b = __ballot_sync(kAllLanes, hungry_b);
  const u32 mine = from + __popc(all_a & below) + __popc(all_b & below);
  const u32 byte_a = ring_memory()[mine], byte_b = ring_memory()[mine + ((a - 256) >> 31)];
  x.a = hungry_a ? a << 8 | byte_a : a;
  x.b = hungry_b ? b << 8 | byte_b : b;
  from += __popc(all_a) + __popc(all_b);
  return __byte_perm(entry_a, entry_b, 0x7430);
}
