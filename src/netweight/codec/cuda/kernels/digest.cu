// Kernels for the digest of a tensor that lies in the device's memory: see digest.cuh. Launched by encoding.py.
#include "digest.cuh"

// Sums of 1-KiB blocks, eight for each; a warp takes one block after the other. Any grid, blocks of whole warps.
extern "C" __global__ void sum_digest_blocks(const u8* data, i64 blocks, u64* sums) {
  const u32 lane = lane_id(), place = lane & 7, stripe = lane / 8;
  u64 key[4];
#pragma unroll
  for (u32 k = 0; k < 4; k++) key[k] = kSecret[stripe + 4 * k + place];
  const i64 warps = static_cast<i64>(gridDim.x) * (blockDim.x / kWarp);
  for (i64 block = static_cast<i64>(blockIdx.x) * (blockDim.x / kWarp) + warp_id(); block < blocks; block += warps) {
    const u8* from = data + block * static_cast<i64>(kDigestBlock) + 8 * lane;
    u64 products = 0, words = 0;
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
      const u64 word = read_u64(from + 256 * k), keyed = word ^ key[k];
      products += (keyed & 0xffffffffu) * (keyed >> 32);
      words += word;
    }
    const u64 sum = long_total(products, words);
    if (lane < 8) sums[block * 8 + lane] = sum;
  }
}

// One warp: see advance_digest. `data` is the whole tensor's.
extern "C" __global__ void chain_digest(const u8* data, i64 size, const u64* sums, i64 blocks, u64* state, i64 first, i64 last, u8* out) {
  advance_digest(Text::of(data, static_cast<u64>(size)), sums, static_cast<u64>(blocks), state, first != 0, last != 0, out);
}
