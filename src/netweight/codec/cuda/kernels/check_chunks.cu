// Checks of the chunks of a tensor that lies in the device's memory, as docs/format.md specifies them. Launched by encoding.py.
//
// A check is made of rounds of AES without key over sixteen states of four columns. A block of 64 threads works on a chunk, a
// thread for each column. SubBytes and MixColumns are one table of 256 columns in shared memory; ShiftRows is an exchange
// between the four threads of a state.
#include "types.cuh"

constexpr u32 kColumns = 64;        // threads of a block
constexpr u32 kBytesOfRound = 256;  // of the chunk, four for each thread
constexpr u32 kStates = 16, kLastRounds = 3;
constexpr u32 kAhead = 8;  // words on their way from memory, which takes longer than a round

// What a byte of row 0 adds to its column; for row r it is rotated by r bytes.
struct AesColumns {
  u32 of[256];
};

constexpr u32 twice(u32 x) { return (x << 1 ^ (x >> 7) * 0x11bu) & 0xffu; }

constexpr AesColumns aes_columns() {
  AesColumns columns = {};
  u32 power = 1, inverse = 1;  // of 3 and of its inverse, which run through all bytes but 0
  for (u32 i = 0; i < 256; i++) {
    const bool of_zero = i == 255;
    const u32 x = of_zero ? 0 : inverse, sum = x ^ x << 1 ^ x << 2 ^ x << 3 ^ x << 4;
    const u32 substitute = (sum & 0xffu) ^ sum >> 8 ^ 0x63u;
    columns.of[of_zero ? 0 : power] = twice(substitute) | substitute << 8 | substitute << 16 | (twice(substitute) ^ substitute) << 24;
    power = twice(power) ^ power;
    inverse ^= inverse << 1;  // divided by 3
    inverse ^= inverse << 2;
    inverse ^= inverse << 4;
    inverse &= 0xffu;
    if ((inverse & 0x80u) != 0) inverse ^= 0x09u;
  }
  return columns;
}

static __device__ const AesColumns kAesColumns = aes_columns();

// A round of the states whose columns four neighboring lanes hold.
NETWEIGHT_DEVICE u32 aes_round(const u32* columns, u32 column) {
  const u32 lane = lane_id(), state = lane & ~3u;
  const u32 second = __shfl_sync(kAllLanes, column, static_cast<int>(state | ((lane + 1) & 3)));
  const u32 third = __shfl_sync(kAllLanes, column, static_cast<int>(state | ((lane + 2) & 3)));
  const u32 fourth = __shfl_sync(kAllLanes, column, static_cast<int>(state | ((lane + 3) & 3)));
  const u32 b = columns[second >> 8 & 0xff], c = columns[third >> 16 & 0xff], d = columns[fourth >> 24];
  return columns[column & 0xff] ^ __funnelshift_l(b, b, 8) ^ __funnelshift_l(c, c, 16) ^ __funnelshift_l(d, d, 24);
}

// What is left of a chunk from place `at` on, less than four bytes, and zeros.
NETWEIGHT_CALLED u32 end_at(const u8* chunk, u64 bytes, u64 at) {
  u32 word = 0;
  for (u32 k = 0; at + k < bytes; k++) word |= static_cast<u32>(chunk[at + k]) << 8 * k;
  return word;
}

// Four bytes of a chunk from place `at` on, at an address that 4 divides; zeros where it has ended.
NETWEIGHT_DEVICE u32 word_at(const u8* chunk, u64 bytes, u64 at) {
  return at + 4 <= bytes ? *reinterpret_cast<const u32*>(chunk + at) : end_at(chunk, bytes, at);
}

// The check of every chunk, a block for each: checks[i] is that of chunk i. `data`, whose address 4 divides, is the whole tensor.
extern "C" __global__ void __launch_bounds__(kColumns) check_chunks(const u8* data, i64 size, i64 chunk_bytes, u64* checks) {
  __shared__ u32 columns[256];
  __shared__ u32 states[4 * kStates];
  for (u32 i = threadIdx.x; i < 256; i += kColumns) columns[i] = kAesColumns.of[i];
  __syncthreads();
  const u64 start = static_cast<u64>(blockIdx.x) * static_cast<u64>(chunk_bytes), left = static_cast<u64>(size) - start;
  const u64 bytes = left < static_cast<u64>(chunk_bytes) ? left : static_cast<u64>(chunk_bytes);
  const u8* chunk = data + start;
  u32 column = 0x03020100u + 0x04040404u * threadIdx.x;
  u32 next[kAhead];
#pragma unroll
  for (u32 k = 0; k < kAhead; k++) next[k] = word_at(chunk, bytes, static_cast<u64>(k) * kBytesOfRound + 4 * threadIdx.x);
  for (u64 at = 0; at < bytes; at += kAhead * kBytesOfRound) {
    u32 now[kAhead];
#pragma unroll
    for (u32 k = 0; k < kAhead; k++) {
      now[k] = next[k];
      next[k] = word_at(chunk, bytes, at + static_cast<u64>(kAhead + k) * kBytesOfRound + 4 * threadIdx.x);
    }
#pragma unroll
    for (u32 k = 0; k < kAhead; k++)
      if (at + static_cast<u64>(k) * kBytesOfRound < bytes) column = aes_round(columns, column) ^ now[k];
  }
  states[threadIdx.x] = column;
  __syncthreads();
  if (warp_id() > 0) return;
  const u32 place = lane_id() & 3;  // every four lanes do the same
  u32 folded = place == 0 ? static_cast<u32>(bytes) : place == 1 ? static_cast<u32>(bytes >> 32) : 0;
  for (u32 k = 0; k < kStates; k++) folded = aes_round(columns, folded) ^ states[4 * k + place];
  for (u32 k = 0; k < kLastRounds; k++) folded = aes_round(columns, folded);
  const u32 upper = __shfl_sync(kAllLanes, folded, 1);
  if (lane_id() == 0) checks[blockIdx.x] = folded | static_cast<u64>(upper) << 32;
}
