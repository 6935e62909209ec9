// Kernels that encode a tensor into the bytes of docs/format.md, the same as the CPU's encoder writes. encoding.py launches
// them: for each wave of chunks encode_planes, place_planes and copy_planes; then finish_blob. Checks come from check_chunks.cu.
#include "digest.cuh"
#include "encode_packed.cuh"
#include "encode_rans.cuh"

constexpr u32 kSmallest = 512;  // bytes; below this no table pays
constexpr u32 kManyElements = 1u << 16;  // from here on a sample is looked at first
constexpr u32 kMaxTailRawBits = 5;
constexpr u64 kFixedHeader = 28;
constexpr u32 kCopiers = 8;  // blocks of copy_planes for each plane
constexpr u32 kPlacers = 1024;  // threads of place_planes
constexpr u32 kFinishers = 256;  // threads of finish_blob and seal_blob
constexpr u32 kBlocksAtOnce = 6;  // of a multiprocessor that encode planes; with 4 an H200 encodes 10 to 15 % slower
constexpr i64 kOverflow = 1;

// How a tensor, whose address 16 divides, falls into planes.
struct Tensor {
  const u8* data;
  u64 numbers;
  u32 number_bytes, chunk_log2, planes;
  SplitRange head;

  __device__ __forceinline__ Plane plane(u64 chunk, u32 number) const {
    const u64 first = chunk << chunk_log2, left = numbers - first;
    const u32 unit = number == 0 && number_bytes > 1 ? 2 : 1;
    Plane p;
    const u32 shift = 8 * (number_bytes - (number == 0 ? unit : number + 2));
    p.at = data + first * number_bytes + shift / 32 * 4;
    p.number_bytes = number_bytes;
    p.shift = shift % 32;
    p.unit = unit;
    p.count = static_cast<u32>(left < (u64{1} << chunk_log2) ? left : u64{1} << chunk_log2);
    return p;
  }
};

NETWEIGHT_DEVICE Tensor tensor_of(const u8* data, i64 numbers, i64 number_bytes, i64 chunk_log2, i64 least, i64 most, i64 signed_raw) {
  const u32 bytes = static_cast<u32>(number_bytes);
  const SplitRange head = {static_cast<u32>(least), static_cast<u32>(most), signed_raw != 0, false};
  return {data, static_cast<u64>(numbers), bytes, static_cast<u32>(chunk_log2), bytes <= 2 ? 1 : bytes - 1, head};
}

// Encodes a plane to `out`, by a whole block. Returns its size, with kRawBit if it is raw, which is copied later.
NETWEIGHT_DEVICE u32 encode_plane(const Plane& plane, SplitRange range, u32 sampling, u8* out, u8* work, Memory& m) {
  const u32 bytes = plane.bytes();
  if (with_loads(plane, [&](auto load) { return is_constant(load, plane, &m.flag); })) {
    if (threadIdx.x == 0) out[0] = kConstant;
    if (threadIdx.x < plane.unit) out[1 + threadIdx.x] = byte_of(plane, threadIdx.x);
    return 1 + plane.unit;
  }
  if (bytes < kSmallest) return (1 + bytes) | kRawBit;
  const u64 worthwhile = (static_cast<u64>(bytes) << 19) / 200 * 199;  // half a percent at least
  const u32 packed = plane.unit == 2 ? bytes : with_loads(plane, [&](auto load) { return packed_size(load, plane, m.parts); });
  const u64 packed_cost = static_cast<u64>(packed) << 19;
  for (u32 stride = plane.count < kManyElements ? 1 : sampling;; stride = 1) {
    choose_split(plane, range, stride, m.search, m.table);
    __syncthreads();
    const u64 cost = m.table.cost;
    if (packed_cost < worthwhile && packed_cost <= cost) return write_packed(plane, out, m.parts);
    if (cost >= worthwhile) return (1 + bytes) | kRawBit;
    const u32 size = encode_rans(plane, out, work, m);
    if (size != 0) return size;
    if (stride == 1) return (1 + bytes) | kRawBit;  // else the sample misled: look at everything
    __syncthreads();
  }
}

// Encodes the planes of chunks from `first_chunk` on, a block for each: plane k of the wave to slots + k * slot_bytes, with its
// size in sizes[k]. `work` holds work_bytes for each, which a multiple of 16 must be.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    encode_planes(const u8* data, i64 numbers, i64 number_bytes, i64 chunk_log2, i64 least, i64 most, i64 signed_raw, i64 sampling, i64 first_chunk,
                  u8* slots, i64 slot_bytes, u8* work, i64 work_bytes, u32* sizes) {
  __shared__ Memory m;
  const u32 item = blockIdx.x;
  const Tensor tensor = tensor_of(data, numbers, number_bytes, chunk_log2, least, most, signed_raw);
  const u32 number = item % tensor.planes;
  const Plane plane = tensor.plane(static_cast<u64>(first_chunk) + item / tensor.planes, number);
  const SplitRange tail = {0, kMaxTailRawBits, false, true};
  const u32 size = encode_plane(plane, number == 0 ? tensor.head : tail, static_cast<u32>(sampling), slots + item * static_cast<u64>(slot_bytes),
                                work + item * static_cast<u64>(work_bytes), m);
  if (threadIdx.x == 0) sizes[item] = size;
}

NETWEIGHT_DEVICE void write_u64(u8* p, u64 value) {
#pragma unroll
  for (u32 k = 0; k < 8; k++) p[k] = static_cast<u8>(value >> 8 * k);
}

// Gives the wave's planes their places in the blob, the first one `payload_at` and those of later waves behind the
// `progress[0]` bytes that are there already, and writes the chunks' lengths and checks into the index; without `has_checks`
// zeros for checks. One block. `progress[1]` becomes kOverflow when the blob would pass `capacity`, and is 0 before.
extern "C" __global__ void __launch_bounds__(kPlacers)
    place_planes(const u32* sizes, i64 items, i64 planes, i64 first_chunk, const u64* checks, i64 has_checks, u8* blob, i64 index_at, i64 checks_at,
                 i64 payload_at, i64 capacity, u64* progress, u64* places) {
  __shared__ u64 parts[kPlacers / kWarp];
  u64 done = first_chunk == 0 ? static_cast<u64>(payload_at) : progress[0];
  for (i64 base = 0; base < items; base += kPlacers) {
    const i64 item = base + threadIdx.x;
    const u64 size = item < items ? size_of(sizes[item]) : 0;
    u64 total = 0;
    const u64 before = block_running_sum(size, parts, total);
    if (item < items) places[item] = done + before;
    done += total;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    progress[0] = done;
    if (first_chunk == 0 || done > static_cast<u64>(capacity)) progress[1] = done > static_cast<u64>(capacity) ? kOverflow : 0;
  }
  for (i64 chunk = threadIdx.x; chunk < items / planes; chunk += kPlacers) {
    u32 size = 0;
    for (i64 k = 0; k < planes; k++) size += size_of(sizes[chunk * planes + k]);
    const i64 number = first_chunk + chunk, at = index_at + 4 * number, check_at = checks_at + 8 * number;
    if (check_at + 8 > capacity) continue;
    write_u16(blob + at, size);
    write_u16(blob + at + 2, size >> 16);
    write_u64(blob + check_at, has_checks != 0 ? checks[number] : 0);
  }
}

// Copies the wave's planes to their places, raw ones from the tensor; kCopiers blocks for each.
extern "C" __global__ void __launch_bounds__(kThreads)
    copy_planes(const u8* data, i64 numbers, i64 number_bytes, i64 chunk_log2, i64 first_chunk, const u8* slots, i64 slot_bytes, const u32* sizes,
                const u64* places, u8* blob, i64 capacity) {
  const u32 item = blockIdx.x / kCopiers, worker = blockIdx.x % kCopiers * kThreads + threadIdx.x, workers = kCopiers * kThreads;
  const u32 noted = sizes[item], size = size_of(noted);
  if (places[item] + size > static_cast<u64>(capacity)) return;
  u8* const out = blob + places[item];
  if ((noted & kRawBit) == 0) return copy_bytes(out, slots + item * static_cast<u64>(slot_bytes) + skipped_bytes(noted), size, worker, workers);
  const Tensor tensor = tensor_of(data, numbers, number_bytes, chunk_log2, 0, 0, 0);
  const Plane plane = tensor.plane(static_cast<u64>(first_chunk) + item / tensor.planes, item % tensor.planes);
  if (worker == 0) out[0] = kRaw;
  if (plane.dense()) return copy_bytes(out + 1, plane.at, plane.bytes(), worker, workers);
  const u32 head = bytes_to_alignment(out + 1, 4), words = plane.bytes() < head ? 0 : (plane.bytes() - head) / 4, done = head + 4 * words;
  u8* const to = out + 1;
  for (u32 i = worker; i < words; i += workers) {
    u32 word = 0;
#pragma unroll
    for (u32 k = 0; k < 4; k++) word |= static_cast<u32>(byte_of(plane, head + 4 * i + k)) << 8 * k;
    *reinterpret_cast<u32*>(to + head + 4 * i) = word;
  }
  if (worker < head && worker < plane.bytes()) to[worker] = byte_of(plane, worker);
  if (done + worker < plane.bytes()) to[done + worker] = byte_of(plane, done + worker);
}

// Writes the digest of the checks, and the header check over all bytes of a header, which are there. By a whole block.
NETWEIGHT_DEVICE void write_digest_and_check(u8* blob, u64 checks_at, u64 header_bytes, u64 (*sums)[8]) {
  const Text checks = Text::of(blob + checks_at, header_bytes - checks_at);
  const u64 of_checks = long_accumulated(checks, sums);
  if (warp_id() == 0) {
    const Hash128 digest = hash_128(checks, of_checks);
    if (lane_id() == 0) write_canonical(digest, blob + 8);
  }
  __syncthreads();
  const Text header = {blob, header_bytes - 4, kFixedHeader - 4, 4};
  const u64 of_header = long_accumulated(header, sums);
  if (warp_id() > 0) return;
  const u32 check = static_cast<u32>(hash_64(header, of_header));
  if (lane_id() == 0) {
    write_u16(blob + kFixedHeader - 4, check);
    write_u16(blob + kFixedHeader - 2, check >> 16);
  }
}

// Block 0: writes the header, before which the index must stand, and the blob's length to `length` (8 bytes before the blob,
// little-endian; 0 if it did not fit, and kOverflow is ORed into `status`). The other blocks fill what is left with zeros.
// `start` holds bytes 0 to 7 of the header; `shape` are the bytes of its varints, eight to an argument.
extern "C" __global__ void __launch_bounds__(kFinishers)
    finish_blob(u8* length, u8* blob, i64 capacity, const u64* progress, i32* status, u64 start, i64 shape_bytes, i64 checks_at, i64 payload_at,
                u64 shape0, u64 shape1, u64 shape2, u64 shape3, u64 shape4, u64 shape5, u64 shape6, u64 shape7, u64 shape8, u64 shape9) {
  __shared__ u64 sums[kSumsAtOnce][8];
  const u64 size = progress[0];
  const bool fits = progress[1] == 0;
  if (blockIdx.x > 0) {
    const u64 workers = static_cast<u64>(gridDim.x - 1) * blockDim.x, worker = static_cast<u64>(blockIdx.x - 1) * blockDim.x + threadIdx.x;
    u8* const from = blob + (fits ? size : 0);
    const u64 left = static_cast<u64>(blob + capacity - from), head = min(left, static_cast<u64>(bytes_to_alignment(from, 16)));
    const u64 quads = (left - head) / 16, done = head + 16 * quads;
    if (worker < head) from[worker] = 0;
    for (u64 i = worker; i < quads; i += workers) reinterpret_cast<uint4*>(from + head)[i] = make_uint4(0, 0, 0, 0);
    if (done + worker < left) from[done + worker] = 0;
    return;
  }
  const u32 place = threadIdx.x;
  if (place < 8) length[place] = static_cast<u8>(fits ? size >> 8 * place : 0);
  if (!fits) {
    if (place == 0) atomicOr(status, static_cast<i32>(kOverflow));
    return;
  }
  const u64 shape[10] = {shape0, shape1, shape2, shape3, shape4, shape5, shape6, shape7, shape8, shape9};
  if (place < 8) blob[place] = static_cast<u8>(start >> 8 * place);
#pragma unroll
  for (u32 word = 0; word < 10; word++)
    if (place < 8 && 8 * word + place < static_cast<u64>(shape_bytes)) blob[kFixedHeader + 8 * word + place] = static_cast<u8>(shape[word] >> 8 * place);
  __syncthreads();
  write_digest_and_check(blob, static_cast<u64>(checks_at), static_cast<u64>(payload_at), sums);
}

// One block: puts checks into a blob whose checks were left out.
extern "C" __global__ void __launch_bounds__(kFinishers) seal_blob(u8* blob, i64 checks_at, i64 payload_at, const u64* checks) {
  __shared__ u64 sums[kSumsAtOnce][8];
  for (i64 chunk = threadIdx.x; 8 * chunk < payload_at - checks_at; chunk += blockDim.x) write_u64(blob + checks_at + 8 * chunk, checks[chunk]);
  __syncthreads();
  write_digest_and_check(blob, static_cast<u64>(checks_at), static_cast<u64>(payload_at), sums);
}
