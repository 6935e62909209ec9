// Decodes blobs (docs/format.md): a block of threads takes one chunk, a warp one stream of a plane.
//
// Every length and place is compared with the chunk before it is used, so that no bytes, whatever they are, make a kernel
// read outside the blob or write outside the output. A chunk that is refused leaves its part of the output undefined and
// its reason in `status`.
#pragma once

#include "rans.cuh"
#include "simple_planes.cuh"
#include "wide.cuh"

constexpr u32 kBlocksAtOnce = 7;  // of a multiprocessor: with 6 or 8 an H200 decodes large matrices 4 to 15 % slower

// A blob to decode. Python writes this as an array of eight 64-bit integers.
struct Job {
  const u8* blob;
  i64 size;
  const i64* starts;  // where each chunk starts in the blob, and where the last one ends
  u8* out;
  i64 numbers;
  i64 number_bytes;
  i64 chunk_log2;
  i64 first_block;  // the first of the grid's blocks that decodes this blob
};

// Stages the header of a plane in shared memory, all of it or what the blob has.
NETWEIGHT_DEVICE const u8* stage(const u8* at, const Bounds& blob) {
  const u64 from = address(at) & ~15ull;
  for (u32 unit = threadIdx.x; unit < kStagedBytes / 16; unit += blockDim.x) shared.staged[unit] = load16(from + 16 * unit, blob);
  __syncthreads();
  return reinterpret_cast<const u8*>(shared.staged) + (address(at) & 15);
}

// Decodes a plane that `left` bytes begin with and gives its size. The first `merged` elements of a tail are there already;
// a head may set this number for the tails after it. Returns a reason for refusal, the same in all threads.
NETWEIGHT_DEVICE u32 decode_plane(const u8* at, u64 left, const Plane& plane, const Bounds& blob, u64& size, u32& merged) {
  if (left == 0) return kTruncated;
  const u8* header = stage(at, blob);
  const u64 raw_bytes = static_cast<u64>(plane.count) * plane.width;
  u32 reason = 0;
  u64 used = 0;
  switch (header[0]) {
    case kRaw:
      if (raw_bytes > left - 1) return kTruncated;
      size = 1 + decode_raw(at + 1, plane, merged, blob);
      return 0;
    case kConstant:
      if (plane.width > left - 1) return kTruncated;
      size = 1 + decode_constant(header + 1, plane, merged);
      return 0;
    case kPacked:
      reason = decode_packed(at + 1, left - 1, plane, used);
      size = 1 + used;
      return reason;
    case kRans:
      return decode_rans(at, left, header, plane, blob, size, merged);
    case kWideRans:
      if (warp_id() == 0) {
        reason = decode_wide(at, left, plane, *reinterpret_cast<WideTable*>(shared.rings), used);
        if (lane_id() == 0) {
          shared.plane_bytes = used;
          if (reason) fail(reason);
        }
      }
      __syncthreads();
      size = shared.plane_bytes;
      return shared.failure;
    default:
      return kBadMode;
  }
}

// Decodes a chunk, whose first number goes to `to`.
NETWEIGHT_DEVICE void decode_chunk(const Job& job, i64 chunk, u8* to, u32* status) {
  const Bounds blob{address(job.blob), address(job.blob) + static_cast<u64>(job.size)};
  const i64 start = job.starts[chunk], end = job.starts[chunk + 1], first = chunk << job.chunk_log2;
  if (threadIdx.x == 0) shared.failure = 0;
  u32 reason = start < 0 || start > end || end > job.size ? kBadIndex : 0;
  const u32 bytes = kNumberBytes ? kNumberBytes : static_cast<u32>(job.number_bytes), head = min(bytes, 2u);
  Plane plane{};
  plane.count = static_cast<u32>(min(job.numbers - first, 1ll << job.chunk_log2));
  plane.stride = bytes;
  plane.width = head;
  plane.out = to + (bytes - head);
  i64 at = start;
  u32 merged = 0;
  for (u32 planes = bytes - head + 1; planes > 0 && !reason; planes--) {
    __syncthreads();  // the plane before is done
    reason = shared.failure;
    if (reason) break;
    u64 size = 0;
    reason = decode_plane(job.blob + at, static_cast<u64>(end - at), plane, blob, size, merged);
    at += static_cast<i64>(size);
    plane.width = 1;
    plane.out--;
  }
  if (!reason && at != end) reason = kLeftOver;
  __syncthreads();
  if (threadIdx.x == 0 && (reason | shared.failure)) atomicOr(status, reason | shared.failure);
}

// Decodes blobs; a block of the grid for each chunk. `jobs` ascend by their first block, the first of which is 0. Without
// any (a null pointer) the other arguments are the only job.
extern "C" __global__ void __launch_bounds__(128, kBlocksAtOnce)
    decode_chunks(const Job* jobs, i64 count, const u8* blob, i64 size, const i64* starts, u8* out, i64 numbers, i64 number_bytes,
                  i64 chunk_log2, u32* status) {
  Job job{blob, size, starts, out, numbers, number_bytes, chunk_log2, 0};
  if (jobs != nullptr) {
    i64 found = 0, beyond = count;  // the last job whose first block is not behind this one
    while (beyond - found > 1) {
      const i64 middle = (found + beyond) / 2;
      if (jobs[middle].first_block <= static_cast<i64>(blockIdx.x)) found = middle;
      else beyond = middle;
    }
    job = jobs[found];
  }
  const i64 chunk = blockIdx.x - job.first_block;
  decode_chunk(job, chunk, job.out + (chunk << job.chunk_log2) * job.number_bytes, status);
}

// Decodes rows of a matrix: for each of `ids` the `across` chunks from the one in which its row begins, each by a block of
// the grid and into a slot of its own, from where the row is copied to out[ids][width].
extern "C" __global__ void __launch_bounds__(128, kBlocksAtOnce)
    decode_rows(const i64* ids, i64 across, const u8* blob, i64 size, const i64* starts, u8* slots, u8* out, i64 rows, i64 width,
                i64 number_bytes, i64 chunk_log2, u32* status) {
  const i64 place = blockIdx.x / across, id = ids[place];
  if (id < 0 || id >= rows) {
    if (threadIdx.x == 0) atomicOr(status, kNoSuchRow);
    return;
  }
  const i64 chunk = (id * width >> chunk_log2) + blockIdx.x % across, first = chunk << chunk_log2;
  const i64 from = max(id * width, first), to = min((id + 1) * width, (chunk + 1) << chunk_log2);
  if (from >= to) return;
  u8* slot = slots + (static_cast<i64>(blockIdx.x) << chunk_log2) * number_bytes;
  decode_chunk(Job{blob, size, starts, slot, rows * width, number_bytes, chunk_log2, 0}, chunk, slot, status);
  __syncthreads();
  const u8* source = slot + (from - first) * number_bytes;
  u8* target = out + (place * width + from - id * width) * number_bytes;
  const i64 bytes = (to - from) * number_bytes;
  const i64 wide = (address(source) | address(target)) % 16 ? 0 : bytes / 16 * 16;
  for (i64 i = 16 * threadIdx.x; i < wide; i += 16 * blockDim.x)
    *reinterpret_cast<uint4*>(target + i) = *reinterpret_cast<const uint4*>(source + i);
  for (i64 i = wide + threadIdx.x; i < bytes; i += blockDim.x) target[i] = source[i];
}
