// Weights in the fixed-length form (codec/fixed.py describes it): their products, decoding and encoding.
//
// A warp loads 16 rows and 64 columns of weights with three loads of 16 bytes per lane, makes of them the registers that
// tensor cores want, some four instructions for two weights, and multiplies. Batches of 1 to 64 rows of inputs are the
// columns of these products, so that a weight is loaded and decoded once for all. Escapes are zeros there and are
// multiplied apart, so that where an input is infinite or NaN an output may be NaN though a dense product were
// infinite. Sums are fp32, taken in an order that depends on sizes only: the same call gives the same bits. Launched by
// codec/cuda/fixed_products.py, which checks sizes and addresses.
#include "reductions.cuh"

constexpr u32 kTileRows = 16, kTileColumns = 64, kTileBytes = 1536, kTilesAt = 128, kBaseAt = 13;
constexpr u32 kTileOutputs = 128;  // 16 rows times 8 columns: what a product on tensor cores sums up
constexpr u32 kCodes = 15, kEscapesAt = 32, kChecksumAt = 40;
constexpr u32 kMostEscapes = 32;   // of so many weights at most one may escape
constexpr u32 kListed = 512;       // most escapes of 16 rows when a weight is encoded here

// ---- what the GPU does in one instruction ----------------------------------------------------------------------------

// Loads what is read once, past the first cache, which inputs have more use for.
NETWEIGHT_DEVICE uint4 load_once(const u8* p) {
#ifdef NETWEIGHT_EMULATED
  return *reinterpret_cast<const uint4*>(p);
#else
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(p));
  return value;
#endif
}

// Two bf16 numbers times two powers of two, exact as long as nothing overflows; zeros keep their sign.
NETWEIGHT_DEVICE u32 times_power(u32 pair, u32 powers) {
#ifdef NETWEIGHT_EMULATED
  float low = __uint_as_float(pair << 16) * __uint_as_float(powers << 16);
  float high = __uint_as_float(pair & 0xffff0000u) * __uint_as_float(powers & 0xffff0000u);
  return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
#elif __CUDA_ARCH__ < 800
  __trap();  // fixed_products.py launches nothing there
  return 0;
#else
  u32 result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(pair), "r"(powers), "r"(0x80008000u));
  return result;
#endif
}

// sums[16 x 8] += a[16 x 16] * b[16 x 8], spread over a warp as PTX says for mma.m16n8k16; all lanes must come.
NETWEIGHT_DEVICE void multiply(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef NETWEIGHT_EMULATED
  int g = static_cast<int>(lane_id() / 4), t = static_cast<int>(lane_id() % 4);
  for (int p = 0; p < 2; p++) {
    for (int k = 0; k < 4; k++) {
      u64 rows = __shfl_sync(kAllLanes, a[2 * p] | static_cast<u64>(a[2 * p + 1]) << 32, 4 * g + k);
      u32 left = __shfl_sync(kAllLanes, p ? b1 : b0, 8 * t + k);
      u32 right = __shfl_sync(kAllLanes, p ? b1 : b0, 8 * t + 4 + k);
      for (int e = 0; e < 2; e++) {
        for (int i = 0; i < 4; i++) {
          u32 weights = static_cast<u32>(i < 2 ? rows : rows >> 32), inputs = i & 1 ? right : left;
          sums[i] += __uint_as_float(weights >> 16 * e << 16) * __uint_as_float(inputs >> 16 * e << 16);
        }
      }
    }
  }
#elif __CUDA_ARCH__ < 800
  __trap();
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// ---- numbers ---------------------------------------------------------------------------------------------------------

NETWEIGHT_DEVICE float to_float(u32 bf16) { return __uint_as_float(bf16 << 16); }

// The nearest bf16 number, the even one of two.
NETWEIGHT_DEVICE u16 to_bf16(float value) {
  u32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<u16>(bits >> 16 | 0x40);
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// ---- payloads --------------------------------------------------------------------------------------------------------

// The parts of a payload; see codec/fixed.py.
struct Weight {
  const u8* tiles;
  const u32* first;    // first[row]: where the escapes of a row begin; first[rows]: their number
  const u32* escapes;  // column, and above 16 bits the weight
  u32 powers;          // 2 ** (base - 1), twice, as bf16
  u32 rows, columns, tile_rows, tile_columns;

  __device__ __forceinline__ Weight(const u8* payload, i64 rows_, i64 columns_)
      : tiles(payload + kTilesAt),
        rows(static_cast<u32>(rows_)),
        columns(static_cast<u32>(columns_)),
        tile_rows((rows + kTileRows - 1) / kTileRows),
        tile_columns((columns + kTileColumns - 1) / kTileColumns) {
    first = reinterpret_cast<const u32*>(tiles + static_cast<u64>(tile_rows) * tile_columns * kTileBytes);
    escapes = first + rows + 1;
    u32 power = (payload[kBaseAt] + 126u) << 7;
    powers = power | power << 16;
  }
};

// What a lane holds of a tile: sign and mantissa of 32 weights, and their codes.
struct Tile {
  u32 words[8], codes[4];
};

NETWEIGHT_DEVICE void load_tile(Tile& tile, const Weight& weight, u32 tile_row, u32 tile_column) {
  const u8* p = weight.tiles + (static_cast<u64>(tile_row) * weight.tile_columns + tile_column) * kTileBytes + 16 * lane_id();
#pragma unroll
  for (u32 i = 0; i < 3; i++) {
    uint4 loaded = load_once(p + 512 * i);
    u32* to = i < 2 ? tile.words + 4 * i : tile.codes;
    to[0] = loaded.x;
    to[1] = loaded.y;
    to[2] = loaded.z;
    to[3] = loaded.w;
  }
}

// Two weights: of row g for even i, of row g + 8 for odd ones.
NETWEIGHT_DEVICE u32 decode_pair(u32 word, u32 codes, u32 i, u32 powers) {
  if (i & 1) word = __byte_perm(word, 0, 0x2301);
  codes = __funnelshift_r(codes, codes, 4 * i);
  return times_power((word & 0x807f807fu) | (codes & 0x07800780u), powers);
}

// Of product q: two weights of row g, of row g + 8, and the next two of either, as bf16.
NETWEIGHT_DEVICE void decode_product(u32 (&pairs)[4], const Tile& tile, u32 q, u32 powers) {
#pragma unroll
  for (u32 i = 0; i < 4; i++) pairs[i] = decode_pair(tile.words[2 * q + i / 2], tile.codes[q], i, powers);
}

// ---- decoding --------------------------------------------------------------------------------------------------------

// out[rows][columns] bf16, 16-byte aligned. So many blocks share 16 rows.
extern "C" __global__ void __launch_bounds__(256)
    decode_fixed(const u8* payload, u16* out, i64 rows, i64 columns, i64 splits) {
  Weight weight(payload, rows, columns);
  u32 tile_row = blockIdx.x / static_cast<u32>(splits), split = blockIdx.x % static_cast<u32>(splits);
  u32 row = tile_row * kTileRows + lane_id() / 4, warps = blockDim.x / kWarp;
  u32 each = (weight.tile_columns + static_cast<u32>(splits) - 1) / static_cast<u32>(splits);
  u32 begin = split * each, end = min(begin + each, weight.tile_columns);
  bool wide = columns % 8 == 0;
  for (u32 k = begin + warp_id(); k < end; k += warps) {
    Tile tile;
    load_tile(tile, weight, tile_row, k);
    u32 pairs[4][4];
#pragma unroll
    for (u32 q = 0; q < 4; q++) decode_product(pairs[q], tile, q, weight.powers);
    u32 column = k * kTileColumns + lane_id() % 4 * 16;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      if (row + 8 * h >= weight.rows) continue;
      u16* to = out + static_cast<u64>(row + 8 * h) * weight.columns + column;
#pragma unroll
      for (u32 half = 0; half < 2; half++) {  // eight weights
        u32 left = column + 8 * half;
        const u32 eight[4] = {pairs[2 * half][h], pairs[2 * half][h + 2], pairs[2 * half + 1][h], pairs[2 * half + 1][h + 2]};
        if (wide && left < weight.columns) {
          *reinterpret_cast<uint4*>(to + 8 * half) = make_uint4(eight[0], eight[1], eight[2], eight[3]);
        } else {
#pragma unroll
          for (u32 i = 0; i < 8; i++) {
            if (left + i < weight.columns) to[8 * half + i] = static_cast<u16>(eight[i / 2] >> 16 * (i % 2));
          }
        }
      }
    }
  }
  __syncthreads();
  u32 top = tile_row * kTileRows, bottom = min(top + kTileRows, weight.rows);
  for (u32 i = weight.first[top] + threadIdx.x; i < weight.first[bottom]; i += blockDim.x) {
    u32 escape = weight.escapes[i], k = (escape & 0xffff) / kTileColumns;
    if (k < begin || k >= end) continue;
    u32 at = top;
    while (weight.first[at + 1] <= i) at++;
    out[static_cast<u64>(at) * weight.columns + (escape & 0xffff)] = static_cast<u16>(escape >> 16);
  }
}

// out[ids][columns] bf16: rows of the weight, a block of the grid for each.
extern "C" __global__ void __launch_bounds__(256)
    fixed_rows(const i64* ids, const u8* payload, u16* out, i64 rows, i64 columns, u32* status) {
  Weight weight(payload, rows, columns);
  i64 id = ids[blockIdx.x];
  if (id < 0 || id >= rows) {
    if (threadIdx.x == 0) atomicOr(status, kNoSuchRow);
    return;
  }
  u32 row = static_cast<u32>(id), g = row % 8, h = row % kTileRows / 8;
  const u8* tiles = weight.tiles + static_cast<u64>(row / kTileRows) * weight.tile_columns * kTileBytes;
  u16* to = out + static_cast<u64>(blockIdx.x) * weight.columns;
  for (u32 column = 2 * threadIdx.x; column < weight.columns; column += 2 * blockDim.x) {
    u32 q = column % 16 / 4, p = column % 4 / 2, lane = 4 * g + column % kTileColumns / 16;
    const u8* tile = tiles + column / kTileColumns * kTileBytes + 16 * lane;
    u32 word = *reinterpret_cast<const u32*>(tile + 512 * (q / 2) + 4 * (2 * (q % 2) + p));
    u32 pair = decode_pair(word, *reinterpret_cast<const u32*>(tile + 1024 + 4 * q), h + 2 * p, weight.powers);
    to[column] = static_cast<u16>(pair);
    if (column + 1 < weight.columns) to[column + 1] = static_cast<u16>(pair >> 16);
  }
  __syncthreads();
  for (u32 i = weight.first[row] + threadIdx.x; i < weight.first[row + 1]; i += blockDim.x)
    to[weight.escapes[i] & 0xffff] = static_cast<u16>(weight.escapes[i] >> 16);
}

// ---- encoding --------------------------------------------------------------------------------------------------------

// Where a warp puts its escapes: of 16 rows, in any order.
struct Escapes {
  u32 *count, *of_row;  // in all, and of each row
  u64* list;            // the first kListed: row, column, weight from the highest bits on

  __device__ __forceinline__ void add(u32 row, u32 column, u32 bits) {
    u32 place = atomicAdd(count, 1u);
    atomicAdd(of_row + row, 1u);
    if (place < kListed) list[place] = static_cast<u64>(row) << 32 | column << 16 | bits;
  }
};

// Two weights from a column on: their signs and mantissas, and their codes from bits 7 and 23 on.
NETWEIGHT_DEVICE uint2 encode_pair(u32 pair, u32 base, u32 row, u32 column, Escapes& escapes) {
  u32 codes = 0;
#pragma unroll
  for (u32 e = 0; e < 2; e++) {
    u32 bits = pair >> 16 * e & 0xffff, code = (bits >> 7 & 0xff) - base + 1;
    if (code - 1 < kCodes) {
      codes |= code << (7 + 16 * e);
    } else if (bits & 0x7fff) {
      escapes.add(row, column + e, bits);
      pair &= e ? 0xffffu : 0xffff0000u;
    }
  }
  return make_uint2(pair & 0x807f807fu, codes);
}

NETWEIGHT_DEVICE void load_inputs(u32 (&pairs)[8], const u16* row, u32 column, u32 columns, bool wide);

// Writes weight[rows][columns], bf16 and 16-byte aligned, into the tiles of a payload, with the base that is there;
// first[row + 1]: the number of a row's escapes; listed[16 rows][kListed]: the escapes, by row and column, or if they
// are more, 1 ORed into the status. One block per 16 rows.
extern "C" __global__ void __launch_bounds__(512)
    encode_fixed(const u16* from, u8* payload, u32* listed, u32* status, i64 rows, i64 columns) {
  __shared__ u32 count, of_row[kTileRows];
  __shared__ u64 list[kListed];
  Weight weight(payload, rows, columns);
  if (threadIdx.x == 0) count = 0;
  if (threadIdx.x < kTileRows) of_row[threadIdx.x] = 0;
  __syncthreads();
  Escapes escapes{&count, of_row, list};
  u32 top = blockIdx.x * kTileRows, g = lane_id() / 4, base = payload[kBaseAt];
  bool wide = columns % 8 == 0;
  for (u32 k = warp_id(); k < weight.tile_columns; k += blockDim.x / kWarp) {
    u32 column = k * kTileColumns + lane_id() % 4 * 16, pairs[2][8], words[8], codes[4] = {};
    for (u32 h = 0; h < 2; h++) {
      u32 row = top + g + 8 * h;
      load_inputs(pairs[h], row < weight.rows ? from + static_cast<u64>(row) * weight.columns : nullptr, column, weight.columns, wide);
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
      uint2 upper = encode_pair(pairs[0][i], base, g, column + 2 * i, escapes);
      uint2 lower = encode_pair(pairs[1][i], base, g + 8, column + 2 * i, escapes);
      words[i] = upper.x | __byte_perm(lower.x, 0, 0x2301);
      u32 turn = 32 - 8 * (i % 2);  // to the right; by 32 is not at all
      codes[i / 2] |= __funnelshift_r(upper.y, upper.y, turn % 32) | __funnelshift_r(lower.y, lower.y, turn - 4);
    }
    u8* to = payload + kTilesAt + (static_cast<u64>(blockIdx.x) * weight.tile_columns + k) * kTileBytes + 16 * lane_id();
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    *reinterpret_cast<uint4*>(to + 512) = make_uint4(words[4], words[5], words[6], words[7]);
    *reinterpret_cast<uint4*>(to + 1024) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
  }
  __syncthreads();
  if (threadIdx.x < kTileRows && top + threadIdx.x < weight.rows)
    const_cast<u32*>(weight.first)[top + threadIdx.x + 1] = of_row[threadIdx.x];
  if (count > kListed) {
    if (threadIdx.x == 0) atomicOr(status, 1u);
    return;
  }
  for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
    u32 place = 0;
    for (u32 j = 0; j < count; j++) place += list[j] < list[i];
    u64 escape = list[i];
    listed[static_cast<u64>(blockIdx.x) * kListed + place] =
        static_cast<u32>(escape >> 16 & 0xffff) | static_cast<u32>(escape) << 16;
  }
}

// Adds up the numbers of escapes of rows to where each row's begin. One block.
extern "C" __global__ void __launch_bounds__(1024) add_up_escapes(u8* payload, i64 rows, i64 columns) {
  __shared__ u32 parts[32];
  Weight weight(payload, rows, columns);
  u32* first = const_cast<u32*>(weight.first);
  u32 each = (weight.rows + blockDim.x - 1) / blockDim.x, begin = threadIdx.x * each, end = min(begin + each, weight.rows);
  u32 sum = 0, all;
  for (u32 row = begin; row < end; row++) sum += first[row + 1];
  sum = block_running_sum(sum, parts, all);
  for (u32 row = begin; row < end; row++) first[row + 1] = sum += first[row + 1];
}

// Puts the escapes behind the tiles, once `first` adds up, and writes the header; ORs 1 into the status if they are too
// many, and then touches nothing. One block per 16 rows.
extern "C" __global__ void __launch_bounds__(128)
    place_escapes(u8* payload, const u32* listed, u32* status, i64 rows, i64 columns, i64 capacity) {
  Weight weight(payload, rows, columns);
  u32 top = blockIdx.x * kTileRows, bottom = min(top + kTileRows, weight.rows), all = weight.first[weight.rows];
  u8* escapes = reinterpret_cast<u8*>(const_cast<u32*>(weight.escapes));
  u64 size = (escapes - payload + 4ull * all + 15) / 16 * 16;
  if (size > static_cast<u64>(capacity) || static_cast<u64>(all) * kMostEscapes > static_cast<u64>(rows * columns)) {
    if (blockIdx.x == 0 && threadIdx.x == 0) atomicOr(status, 1u);
    return;
  }
  u32 begin = weight.first[top], count = min(weight.first[bottom] - begin, kListed);
  for (u32 i = threadIdx.x; i < count; i += blockDim.x)
    reinterpret_cast<u32*>(escapes)[begin + i] = listed[static_cast<u64>(blockIdx.x) * kListed + i];
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  for (u8* p = escapes + 4ull * all; p < payload + size; p++) *p = 0;
  *reinterpret_cast<u64*>(payload) = size - 8;
  *reinterpret_cast<u64*>(payload + kEscapesAt) = all;
  u32 crc = ~0u;  // CRC-32, bit by bit
  for (u32 i = 8; i < kChecksumAt; i++) {
    crc ^= payload[i];
    for (u32 bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
  }
  *reinterpret_cast<u32*>(payload + kChecksumAt) = ~crc;
}

// ---- products --------------------------------------------------------------------------------------------------------

// Sixteen bf16 inputs from a column on as eight pairs; zeros beyond the row's end, and for rows that are not there.
NETWEIGHT_DEVICE void load_inputs(u32 (&pairs)[8], const u16* row, u32 column, u32 columns, bool wide) {
  if (row != nullptr && wide && column + 16 <= columns) {
    const uint4* p = reinterpret_cast<const uint4*>(row + column);
    uint4 left = __ldg(p), right = __ldg(p + 1);
    pairs[0] = left.x, pairs[1] = left.y, pairs[2] = left.z, pairs[3] = left.w;
    pairs[4] = right.x, pairs[5] = right.y, pairs[6] = right.z, pairs[7] = right.w;
    return;
  }
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    u32 at = column + 2 * i;
    pairs[i] = row != nullptr && at < columns ? row[at] : 0;
    if (row != nullptr && at + 1 < columns) pairs[i] |= static_cast<u32>(row[at + 1]) << 16;
  }
}

// The part of an output that escapes contribute.
NETWEIGHT_DEVICE float sum_escapes(const Weight& weight, u32 row, const u16* inputs) {
  float sum = 0;
  for (u32 i = weight.first[row], end = weight.first[row + 1]; i < end; i++) {
    u32 escape = weight.escapes[i];
    sum += to_float(escape >> 16) * to_float(inputs[escape & 0xffff]);
  }
  return sum;
}

// Tiles beyond the weight are zeros.
NETWEIGHT_DEVICE void load_tile_or_zeros(Tile& tile, const Weight& weight, u32 tile_row, u32 tile_column) {
  if (tile_row < weight.tile_rows && tile_column < weight.tile_columns) load_tile(tile, weight, tile_row, tile_column);
  else tile = Tile{};
}

// A sum of one split of the columns: to y if it is the only one.
NETWEIGHT_DEVICE void put_sum(const Weight& weight, float sum, u32 split, u32 splits, u32 row, u32 input, u32 batch, const u16* bias, u16* y,
                              float* partial) {
  const u64 at = static_cast<u64>(input) * weight.rows + row;
  if (splits > 1) partial[static_cast<u64>(split) * batch * weight.rows + at] = sum;
  else y[at] = to_bf16(bias == nullptr ? sum : sum + to_float(bias[row]));
}

// Up to 32 inputs: a block takes `kRowTiles` times 16 rows, its warps share the columns and load their inputs, `kBatchTiles`
// times eight, themselves; blocks are `splits` over columns for the same rows.
constexpr u32 kNarrowWarps = 16;
template <u32 kRowTiles, u32 kBatchTiles>
struct Narrow {
  static constexpr u32 kOutputs = kRowTiles * kBatchTiles * kTileOutputs;
  static constexpr u32 kSummed = kOutputs > 512 ? kNarrowWarps / 2 : kNarrowWarps;  // warps whose sums have room at once

  const Weight weight;
  const u16* x;
  u32 batch;

  // y[batch][rows] = x[batch][columns] times the weight, plus bias[rows] if it is not null. With more than one split
  // sums go to partial[splits][batch][rows] instead, for `finish`. `shared` holds kOutputs for each of kSummed warps.
  __device__ __forceinline__ void run(const u16* bias, u16* y, float* partial, u32 splits, float* shared, float* escaped) const {
    const u32 warps = blockDim.x / kWarp, split = blockIdx.x % splits, top = blockIdx.x / splits * kRowTiles, step = warps * splits;
    u32 k = split * warps + warp_id();
    Tile tiles[kRowTiles];
#pragma unroll
    for (u32 t = 0; t < kRowTiles; t++) load_tile_or_zeros(tiles[t], weight, top + t, k);
    if (split == 0) {  // while the first weights are on their way
      for (u32 i = threadIdx.x; i < kOutputs; i += blockDim.x) {
        const Place place(i, top);
        const bool there = place.row < weight.rows && place.input < batch;
        escaped[i] = there ? sum_escapes(weight, place.row, x + static_cast<u64>(place.input) * weight.columns) : 0;
      }
    }
    float sums[kRowTiles][kBatchTiles][4] = {};
    for (; k < weight.tile_columns; k += step) multiply_column(sums, tiles, k, step, top);
    add_up(sums, shared);
    for (u32 i = threadIdx.x; i < kOutputs; i += blockDim.x) {
      const Place place(i, top);
      if (place.row >= weight.rows || place.input >= batch) continue;
      float sum = split == 0 ? escaped[i] : 0;
      for (u32 warp = 0; warp < min(warps, kSummed); warp++) sum += shared[warp * kOutputs + i];
      put_sum(weight, sum, split, splits, place.row, place.input, batch, bias, y, partial);
    }
  }

  // The sums of one column of tiles, which are loaded anew for a later one.
  __device__ __forceinline__ void multiply_column(float (&sums)[kRowTiles][kBatchTiles][4], Tile (&tiles)[kRowTiles], u32 k, u32 step,
                                                  u32 top) const {
    const u32 column = k * kTileColumns + lane_id() % 4 * 16;
    u32 inputs[kBatchTiles][8];
#pragma unroll
    for (u32 n = 0; n < kBatchTiles; n++) {
      const u32 input = 8 * n + lane_id() / 4;
      load_inputs(inputs[n], input < batch ? x + static_cast<u64>(input) * weight.columns : nullptr, column, weight.columns, weight.columns % 8 == 0);
    }
#pragma unroll
    for (u32 t = 0; t < kRowTiles; t++) {
      u32 pairs[4][4];
#pragma unroll
      for (u32 q = 0; q < 4; q++) decode_product(pairs[q], tiles[t], q, weight.powers);
      load_tile_or_zeros(tiles[t], weight, top + t, k + step);
#pragma unroll
      for (u32 n = 0; n < kBatchTiles; n++)
#pragma unroll
        for (u32 q = 0; q < 4; q++) multiply(sums[t][n], pairs[q], inputs[n][2 * q], inputs[n][2 * q + 1]);
    }
  }

  // Leaves the sums of the first kSummed warps in shared memory; before that each takes over those of another one.
  static __device__ __forceinline__ void add_up(float (&sums)[kRowTiles][kBatchTiles][4], float* shared) {
    const u32 warp = warp_id();
    float* const mine = shared + warp % kSummed * kOutputs + lane_id();
    const auto each = [&](auto call) {
#pragma unroll
      for (u32 i = 0; i < kOutputs / kWarp; i++) call(mine[i * kWarp], sums[i / 4 / kBatchTiles][i / 4 % kBatchTiles][i % 4]);
    };
    if (blockDim.x > kSummed * kWarp) {
      if (warp >= kSummed) each([](float& there, float& sum) { there = sum; });
      __syncthreads();
      if (warp + kSummed < blockDim.x / kWarp) each([](float& there, float& sum) { sum += there; });
      __syncthreads();
    }
    if (warp < kSummed) each([](float& there, float& sum) { there = sum; });
    __syncthreads();
  }

  // The output that a number of a warp's sums belongs to.
  struct Place {
    u32 row, input;
    __device__ __forceinline__ Place(u32 i, u32 top) {
      const u32 lane = i % kWarp, part = i / kWarp % 4, tile = i / kTileOutputs;
      row = (top + tile / kBatchTiles) * kTileRows + lane / 4 + part / 2 * 8;
      input = tile % kBatchTiles * 8 + lane % 4 * 2 + part % 2;
    }
  };
};

// Larger batches: a block takes 128 rows, 16 to a warp, and the warps go over the columns side by side, so that
// inputs are staged in shared memory once for all of them, some tiles ahead.
constexpr u32 kSideWarps = 8, kSideThreads = kSideWarps * kWarp, kSideRows = kSideWarps * kTileRows;
constexpr u32 kStages = 4;     // of inputs, in shared memory
constexpr u32 kSideAhead = 2;  // tiles of weights that a warp has under way
constexpr u32 kStagedRow = 2 * kTileColumns + 16;  // bytes of an input's 64 columns, and 16 that keep rows in different banks
constexpr u32 kSumsRow = kSideRows + 4;            // numbers of an input's sums, likewise

// Starts a copy of 16 bytes to shared memory; `arrive` waits until all but the last `kLeft` groups of copies are there.
NETWEIGHT_DEVICE void copy_async(void* to, const void* from) {
#if defined(NETWEIGHT_EMULATED)
  *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#elif __CUDA_ARCH__ < 800
  __trap();
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<u32>(__cvta_generic_to_shared(to))), "l"(from));
#endif
}
NETWEIGHT_DEVICE void close_group() {
#if !defined(NETWEIGHT_EMULATED) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}
template <u32 kLeft>
NETWEIGHT_DEVICE void arrive() {
#if !defined(NETWEIGHT_EMULATED) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

template <u32 kBatchTiles>
struct SideBySide {
  static constexpr u32 kInputs = 8 * kBatchTiles, kStageBytes = kInputs * kStagedRow;
  static constexpr u32 kStaged = kStages * kStageBytes, kSums = 4 * kInputs * kSumsRow;
  static constexpr u32 kShared = (kStaged > kSums ? kStaged : kSums) / 16;  // units of 16 bytes; sums come when inputs are done

  const Weight weight;
  const u16* x;
  u32 batch;
  u8* staged;

  // Copies one tile's columns of all inputs; zeros where there are none.
  __device__ __forceinline__ void stage(u32 tile_column, u32 place) const {
    const bool wide = weight.columns % 8 == 0;
#pragma unroll
    for (u32 unit = threadIdx.x; unit < 8 * kInputs; unit += kSideThreads) {
      const u32 input = unit / 8, column = tile_column * kTileColumns + unit % 8 * 8;
      uint4* to = reinterpret_cast<uint4*>(staged + place * kStageBytes + input * kStagedRow + unit % 8 * 16);
      const u16* from = x + static_cast<u64>(input) * weight.columns + column;
      if (wide && input < batch && column < weight.columns) {
        copy_async(to, from);
        continue;
      }
      u32 pairs[4];
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        const u32 at = column + 2 * i;
        pairs[i] = input < batch && at < weight.columns ? from[2 * i] : 0;
        if (input < batch && at + 1 < weight.columns) pairs[i] |= static_cast<u32>(from[2 * i + 1]) << 16;
      }
      *to = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }

  // As Narrow::run.
  __device__ __forceinline__ void run(const u16* bias, u16* y, float* partial, u32 splits) const {
    const u32 split = blockIdx.x % splits, top = blockIdx.x / splits * kSideRows, tile_row = top / kTileRows + warp_id();
    const u32 each = (weight.tile_columns + splits - 1) / splits, first = min(split * each, weight.tile_columns);
    const u32 end = min(first + each, weight.tile_columns);
    Tile tiles[kSideAhead];  // each is used and loaded anew where it is: a copy of one would wait for it
#pragma unroll
    for (u32 s = 0; s < kSideAhead; s++) load_tile_or_zeros(tiles[s], weight, tile_row, first + s);
#pragma unroll
    for (u32 s = 0; s + 1 < kStages; s++) {
      if (first + s < end) stage(first + s, s);
      close_group();
    }
    float sums[kBatchTiles][4] = {};
    for (u32 base = first; base < end; base += kSideAhead) {
#pragma unroll
      for (u32 s = 0; s < kSideAhead; s++)
        if (base + s < end) multiply_tile(sums, tiles[s], base + s, first, end, tile_row);
    }
    put_sums(sums, split, splits, top, bias, y, partial);
  }

  // The sums of one tile, which is loaded anew for a later one.
  __device__ __forceinline__ void multiply_tile(float (&sums)[kBatchTiles][4], Tile& tile, u32 k, u32 first, u32 end, u32 tile_row) const {
    const u32 place = (k - first) % kStages;
    arrive<kStages - 2>();
    __syncthreads();  // this tile's inputs are there, and those of the tile before have been used
    if (k + kStages - 1 < end) stage(k + kStages - 1, (place + kStages - 1) % kStages);
    close_group();
    u32 pairs[4][4];
#pragma unroll
    for (u32 q = 0; q < 4; q++) decode_product(pairs[q], tile, q, weight.powers);
    load_tile_or_zeros(tile, weight, tile_row, k + kSideAhead);
    const u8* from = staged + place * kStageBytes + lane_id() / 4 * kStagedRow + lane_id() % 4 * 32;
#pragma unroll
    for (u32 n = 0; n < kBatchTiles; n++) {
      const uint4 left = *reinterpret_cast<const uint4*>(from + 8 * n * kStagedRow);
      const uint4 right = *reinterpret_cast<const uint4*>(from + 8 * n * kStagedRow + 16);
      multiply(sums[n], pairs[0], left.x, left.y);
      multiply(sums[n], pairs[1], left.z, left.w);
      multiply(sums[n], pairs[2], right.x, right.y);
      multiply(sums[n], pairs[3], right.z, right.w);
    }
  }

  __device__ __forceinline__ void put_sums(const float (&sums)[kBatchTiles][4], u32 split, u32 splits, u32 top, const u16* bias, u16* y,
                                           float* partial) const {
    arrive<0>();
    __syncthreads();  // nobody reads inputs any more
    float* shared = reinterpret_cast<float*>(staged);
#pragma unroll
    for (u32 n = 0; n < kBatchTiles; n++)
#pragma unroll
      for (u32 i = 0; i < 4; i++)
        shared[(8 * n + lane_id() % 4 * 2 + i % 2) * kSumsRow + warp_id() * kTileRows + lane_id() / 4 + i / 2 * 8] = sums[n][i];
    __syncthreads();
    // Threads r and r + 128 have row r, and each half of the inputs.
    const u32 r = threadIdx.x % kSideRows, row = top + r, half = threadIdx.x / kSideRows * (kInputs / 2);
    if (row >= weight.rows) return;
    const u32 upto = min(half + kInputs / 2, batch);
    if (split == 0) {
      for (u32 i = weight.first[row], last = weight.first[row + 1]; i < last; i++) {
        const u32 escape = weight.escapes[i];
#pragma unroll 4
        for (u32 n = half; n < upto; n++)
          shared[n * kSumsRow + r] += to_float(escape >> 16) * to_float(x[static_cast<u64>(n) * weight.columns + (escape & 0xffff)]);
      }
    }
    for (u32 n = half; n < upto; n++)
      put_sum(weight, shared[n * kSumsRow + r], split, splits, row, n, batch, bias, y, partial);
  }
};

// The entries differ by the batch that they take at most. Blocks have up to 16 warps, and 8 for product_64.
#define PARAMETERS                                                                                                             \
  const u8 *payload, const u16 *x, const u16 *bias, u16 *y, float *partial, i64 batch, i64 rows, i64 columns, i64 splits
#define RUN_NARROW(kRowTiles, kBatchTiles)                                                                                     \
  using Product = Narrow<kRowTiles, kBatchTiles>;                                                                              \
  __shared__ float shared[Product::kSummed * Product::kOutputs];                                                               \
  __shared__ float escaped[Product::kOutputs];                                                                                 \
  Product{Weight(payload, rows, columns), x, static_cast<u32>(batch)}.run(bias, y, partial, static_cast<u32>(splits), shared, escaped)

extern "C" __global__ void __launch_bounds__(512, 2) product_8(PARAMETERS) { RUN_NARROW(1, 1); }
extern "C" __global__ void __launch_bounds__(512, 1) product_16(PARAMETERS) { RUN_NARROW(2, 2); }
extern "C" __global__ void __launch_bounds__(512, 1) product_32(PARAMETERS) { RUN_NARROW(2, 4); }
extern "C" __global__ void __launch_bounds__(256, 2) product_64(PARAMETERS) {
  __shared__ uint4 shared[SideBySide<8>::kShared];
  const SideBySide<8> product{Weight(payload, rows, columns), x, static_cast<u32>(batch), reinterpret_cast<u8*>(shared)};
  product.run(bias, y, partial, static_cast<u32>(splits));
}

// y[batch][rows]: the sums of splits, in their order, plus bias[rows] if it is not null.
extern "C" __global__ void __launch_bounds__(256) finish(const float* partial, const u16* bias, u16* y, i64 batch, i64 rows, i64 splits) {
  i64 count = batch * rows;
  for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += static_cast<i64>(gridDim.x) * blockDim.x) {
    float sum = 0;
    for (i64 split = 0; split < splits; split++) sum += partial[split * count + i];
    y[i] = to_bf16(bias == nullptr ? sum : sum + to_float(bias[i % rows]));
  }
}
