// The rans mode: a warp decodes a stream of 64 lanes, two neighboring ones in each thread.
//
// A row is 64 elements. Both lanes look their slots up, a dot product gives the new states, two ballots and population
// counts tell each lane which byte of the stream is its. The stream goes through a ring in shared memory, 512 bytes of
// which are loaded ahead in registers; raw bits are loaded a batch of rows ahead.
#pragma once

#include "patches.cuh"
#include "slots.cuh"

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
    put();
    load(bounds);
    put();
    load(bounds);
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
  const u32 entry_a = shared.slots[x.a & 255], entry_b = shared.slots[x.b & 255];
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

// Puts raw bits where they stand, for two elements at once in the halves of a word.
struct RawPlacer {
  u32 spread, spread_rest;  // powers of two that move the second field of a pair to the upper half
  u32 low_mask;             // raw bits that stay
  u32 sign_factor, sign_mask;

  // `low` and `rest` hold a pair of fields each, from bit 0; higher bits may be anything.
  template <bool kRest>
  __device__ __forceinline__ u32 place(u32 low, u32 rest) const {
    u32 raw = __byte_perm(low, low * spread, 0x7610);
    if (kRest) raw = __byte_perm(raw, __byte_perm(rest, rest * spread_rest, 0x7610), 0x6240);
    return (raw & low_mask) | (raw * sign_factor & sign_mask);
  }
};

NETWEIGHT_DEVICE RawPlacer raw_placer(const Split& split, u32 low_bits, u32 rest_bits, u32 width) {
  RawPlacer placer;
  const u32 stay = split.raw_bits - (split.is_signed ? 1 : 0);
  placer.spread = 1u << (16 - low_bits);
  placer.spread_rest = 1u << (16 - rest_bits);
  placer.low_mask = ((1u << stay) - 1) * 0x10001u;
  placer.sign_factor = 1u << (8 * width - split.raw_bits);
  placer.sign_mask = split.is_signed ? (1u << (8 * width - 1)) * 0x10001u : 0;
  return placer;
}

// What the header of a plane says of its streams.
struct RansLayout {
  Split split;
  RawPlacer placer;
  u32 streams, rows;
  u32 low_bits, rest_bits;  // raw bits of an element in the low and in the upper region
  u32 folded;               // bytes of the last row but one that lie in the final states
  const u8* low;
  const u8* rest;
};

// The words in which this thread's pair of fields stands, in every row of a stream. Only words that hold some of its bits
// are read; without any, a word of the chunk's is read in vain.
struct Window {
  const u32* first;
  const u32* second;  // the next word if the pair goes on there, else the same
  u32 shift;
  u32 row_words;

  __device__ __forceinline__ Window(const u8* region, u32 bits, u32 stream, u32 streams, u64 readable) {
    const u64 block = address(region) + static_cast<u64>(stream) * 8 * bits;
    const u32 bit = static_cast<u32>(block & 3) * 8 + 2 * bits * lane_id();
    first = reinterpret_cast<const u32*>(bits ? (block & ~3ull) + bit / 32 * 4 : (readable + 3) & ~3ull);
    shift = bit % 32;
    second = first + (bits && shift + 2 * bits > 32 ? 1 : 0);
    row_words = streams * 2 * bits;
  }
  __device__ __forceinline__ void load(u32 row, u32& low, u32& high) const {
    low = __ldg(first + static_cast<u64>(row) * row_words);
    high = __ldg(second + static_cast<u64>(row) * row_words);
  }
  __device__ __forceinline__ void advance(u32 rows) {
    first += static_cast<u64>(rows) * row_words;
    second += static_cast<u64>(rows) * row_words;
  }
};

// Puts a pair of elements of `kWidth` bytes that stand in the halves of a word; packed: one next to the other.
template <u32 kWidth, bool kPacked>
NETWEIGHT_DEVICE void put_pair(u8* at, u32 stride, u32 pair) {
  if (kPacked && kWidth == 2) {
    __stwb(reinterpret_cast<u32*>(at), pair);
  } else if (kPacked) {
    __stwb(reinterpret_cast<u16*>(at), static_cast<u16>(__byte_perm(pair, 0, 0x4420)));
  } else if (kWidth == 2) {
    __stwb(reinterpret_cast<u16*>(at), static_cast<u16>(pair));
    __stwb(reinterpret_cast<u16*>(at + stride), static_cast<u16>(pair >> 16));
  } else {
    __stwb(at, static_cast<u8>(pair));
    __stwb(at + stride, static_cast<u8>(pair >> 16));
  }
}

// Decodes the rows of a stream that can be decoded in batches, all but the last ten at most, and returns their number.
// The last three are never among them, so that whole words of raw bits can be read.
template <u32 kWidth, bool kRest, bool kPacked>
NETWEIGHT_CALLED u32 decode_batches(const RansLayout& layout, const Plane& plane, u32 stream, const Bounds& blob_bounds,
                                    const u8* readable, Lanes& lanes_kept, ByteRing& bytes_kept) {
  constexpr u32 kBatch = kRest ? 4 : 8;
  const u32 batches = layout.rows > 3 ? (layout.rows - 3) / kBatch : 0;
  if (batches == 0) return 0;
  const Bounds blob = blob_bounds;
  Lanes lanes = lanes_kept;  // in registers
  ByteRing bytes = bytes_kept;
  const RawPlacer placer = layout.placer;
  const u32 below = lanes_below(), stride = plane.stride, row_bytes = layout.streams * 64 * stride;
  Window low(layout.low, layout.low_bits, stream, layout.streams, address(readable));
  Window rest(layout.rest, layout.rest_bits, stream, layout.streams, address(readable));
  u8* out = plane.at(stream * 64 + place_in_row(2 * lane_id(), kWidth));
  u32 low_first[kBatch], low_second[kBatch], rest_first[kBatch], rest_second[kBatch];
#pragma unroll
  for (u32 k = 0; k < kBatch; k++) {
    low.load(k, low_first[k], low_second[k]);
    if (kRest) rest.load(k, rest_first[k], rest_second[k]);
  }
  for (u32 batch = 1; batch <= batches; batch++) {
    if (batch < batches) {  // after the last batch nothing comes: load its rows again
      low.advance(kBatch);
      if (kRest) rest.advance(kBatch);
    }
    bytes.refill(blob);
    u32 from = bytes.place();
    const u32 started = from;
#pragma unroll
    for (u32 k = 0; k < kBatch; k++) {
      const u32 symbols = step(lanes, from, below);
      const u32 low_fields = __funnelshift_r(low_first[k], low_second[k], low.shift);
      low.load(k, low_first[k], low_second[k]);
      u32 rest_fields = 0;
      if (kRest) {
        rest_fields = __funnelshift_r(rest_first[k], rest_second[k], rest.shift);
        rest.load(k, rest_first[k], rest_second[k]);
      }
      put_pair<kWidth, kPacked>(out + static_cast<u64>(k) * row_bytes, stride, symbols | placer.place<kRest>(low_fields, rest_fields));
    }
    out += static_cast<u64>(kBatch) * row_bytes;
    bytes.at += from - started;
  }
  lanes_kept = lanes;
  bytes_kept = bytes;
  return batches * kBatch;
}

// One row, its raw bits read byte by byte: `low` and `rest` are its field blocks. Elements beyond the plane are dropped.
NETWEIGHT_CALLED void put_row(const RansLayout& layout, const Plane& plane, u32 stream, u32 row, u32 symbols, const u8* low,
                              const u8* rest) {
  const RawPlacer& placer = layout.placer;
  const u32 lane = lane_id();
  const u32 low_fields = field_pair(low, layout.low_bits, lane), rest_fields = field_pair(rest, layout.rest_bits, lane);
  const u32 pair = symbols | (layout.rest_bits ? placer.place<true>(low_fields, rest_fields) : placer.place<false>(low_fields, 0));
  const u32 element = (row * layout.streams + stream) * 64 + place_in_row(2 * lane, plane.width);
  if (element < plane.count) plane.put(element, pair & 0xffff);
  if (element + 1 < plane.count) plane.put(element + 1, pair >> 16);
}

// Decodes rows from `first` on to the end of the stream. The raw bits of the last row, and of the last but one in part, are
// the final states. Returns a reason for refusal, the same in all lanes.
NETWEIGHT_CALLED u32 decode_last_rows(const RansLayout& layout, const Plane& plane, u32 stream, u32 first, const Bounds& blob,
                                      Lanes& lanes, ByteRing& bytes, u32 end) {
  const u32 lane = lane_id(), below = lanes_below(), rows = layout.rows, streams = layout.streams;
  const u32 low_row = 8 * layout.low_bits, rest_row = 8 * layout.rest_bits;
  const u32 whole = rows > 2 ? rows - 2 : 0;  // rows whose low region is whole
  const u8* last_two = layout.low + static_cast<u64>(whole) * streams * low_row;
  u32 kept[2] = {0, 0};  // symbols of the last row but one and of the last
  for (u32 row = first; row < rows; row++) {
    bytes.refill(blob);
    u32 from = bytes.place();
    const u32 started = from, symbols = step(lanes, from, below);
    bytes.at += from - started;
    if (row < whole) {
      const u64 block = static_cast<u64>(row) * streams + stream;
      put_row(layout, plane, stream, row, symbols, layout.low + block * low_row, layout.rest + block * rest_row);
    }
    kept[0] = kept[1];
    kept[1] = symbols;
  }
  const u32 used = low_row + layout.folded;
  const bool bad = lanes.a >> 8 != 1 || lanes.b >> 8 != 1 || (2 * lane >= used && (lanes.a & 255)) || (2 * lane + 1 >= used && (lanes.b & 255));
  if (__any_sync(kAllLanes, bad || bytes.at != end)) return kBadStream;

  u8* last = ring_memory() + bytes.ring;  // two field blocks, put together where the stream was
  u8* before = last + 64;
  const u32 stored = low_row - layout.folded;
  __syncwarp();
  last[2 * lane] = static_cast<u8>(lanes.a);
  last[2 * lane + 1] = static_cast<u8>(lanes.b);
  __syncwarp();
  if (rows > 1) {
    for (u32 i = lane; i < low_row; i += kWarp) before[i] = i < stored ? last_two[stream * stored + i] : last[low_row + i - stored];
    __syncwarp();
    const u64 block = static_cast<u64>(rows - 2) * streams + stream;
    put_row(layout, plane, stream, rows - 2, kept[0], before, layout.rest + block * rest_row);
  }
  const u64 block = static_cast<u64>(rows - 1) * streams + stream;
  put_row(layout, plane, stream, rows - 1, kept[1], last, layout.rest + block * rest_row);
  __syncwarp();
  return 0;
}

template <u32 kWidth, bool kRest>
NETWEIGHT_DEVICE u32 decode_rows(const RansLayout& layout, const Plane& plane, u32 stream, const Bounds& blob, const u8* readable,
                                 Lanes& lanes, ByteRing& bytes) {
  const bool packed = plane.contiguous() && (address(plane.out) & (2 * kWidth - 1)) == 0;
  return packed ? decode_batches<kWidth, kRest, true>(layout, plane, stream, blob, readable, lanes, bytes)
                : decode_batches<kWidth, kRest, false>(layout, plane, stream, blob, readable, lanes, bytes);
}

// Decodes a plane whose header is staged: `header` holds `staged` bytes from its mode on, or as many as it has. Gives the
// plane's bytes. Returns a reason for refusal, the same in all threads; a stream's own faults go to shared.failure.
NETWEIGHT_DEVICE u32 decode_rans(const u8* at, u64 left, const u8* header, const Plane& plane, const Bounds& blob,
                                 u64& size) {
  RansLayout layout;
  if (left < 4) return kTruncated;
  if (!read_split(header[1], plane.width, layout.split)) return kBadSplit;
  const u32 streams = layout.streams = header[2];
  if (streams != 1 && streams != 2 && streams != 4) return kBadStreams;
  layout.rows = (plane.count + 64 * streams - 1) / (64 * streams);
  const u32 here = static_cast<u32>(min(left, static_cast<u64>(kStagedBytes - 16)));  // staged bytes
  u32 symbols, table_bytes;
  u32 reason = read_symbols(header + 3, here - 3, layout.split.symbol_bits, symbols, table_bytes);
  if (reason) return reason;
  u32 offset = 3 + table_bytes + symbols;
  if (offset + 134 * streams > left) return kTruncated;
  __syncthreads();  // the symbols are there
  reason = order_symbols(header + 3 + table_bytes, symbols);
  if (reason) return reason;
  const u8* sizes = header + offset;
  const u8* states = sizes + 6 * streams;
  offset += 134 * streams;
  __syncthreads();  // their order is there
  fill_slots(symbols, layout.split);

  layout.low_bits = min(layout.split.raw_bits, 8u);
  layout.rest_bits = layout.split.raw_bits - layout.low_bits;
  layout.placer = raw_placer(layout.split, layout.low_bits, layout.rest_bits, plane.width);
  const u32 low_row = 8 * layout.low_bits, rest_row = 8 * layout.rest_bits;
  layout.folded = layout.rows > 1 ? min(low_row, 64 - low_row) : 0;
  const u64 low_bytes = static_cast<u64>(streams) * (static_cast<u64>(low_row) * (layout.rows - 1) - layout.folded);
  const u64 rest_bytes = static_cast<u64>(streams) * rest_row * layout.rows;
  layout.low = at + offset;
  layout.rest = layout.low + low_bytes;
  u64 stream_bytes = 0, words = 0;
  for (u32 g = 0; g < streams; g++) {
    stream_bytes += read_u24(sizes + 6 * g);
    words += read_u24(sizes + 6 * g + 3);
  }
  size = offset + low_bytes + rest_bytes + stream_bytes;  // up to the rare symbols
  if (size + 1 > left) return kTruncated;
  RareSymbols rare;
  reason = read_rare(at + size, left - size, layout.split.symbol_bits, rare);
  if (reason) return reason;
  size += 1 + 2 * rare.count;
  if (size + 2 * words > left) return kTruncated;
  const u8* patches = at + size;
  size += 2 * words;
  __syncthreads();  // the slots are there

  const u8* stream_at = layout.rest + rest_bytes;
  for (u32 g = 0; g < streams; g++) {
    const u32 length = read_u24(sizes + 6 * g), patch_words = read_u24(sizes + 6 * g + 3);
    if (g % (blockDim.x / kWarp) == warp_id()) {
      const u8* low = states + 128 * g + 2 * lane_id();
      Lanes lanes{low[0] | static_cast<u32>(low[64]) << 8, low[1] | static_cast<u32>(low[65]) << 8};
      u32 fault = __any_sync(kAllLanes, lanes.a < 256 || lanes.b < 256) ? kBadStates : 0;
      ByteRing bytes;
      if (!fault) {
        bytes.start(stream_at, blob);
        const u32 end = bytes.at + length;
        const u32 done = plane.width == 1       ? decode_rows<1, false>(layout, plane, g, blob, at, lanes, bytes)
                         : layout.rest_bits == 0 ? decode_rows<2, false>(layout, plane, g, blob, at, lanes, bytes)
                                                 : decode_rows<2, true>(layout, plane, g, blob, at, lanes, bytes);
        fault = decode_last_rows(layout, plane, g, done, blob, lanes, bytes, end);
      }
      if (!fault) {
        fault = apply_patches(patches, patch_words, rare, layout.split, plane, StreamOrder{streams, g, plane.width});
      }
      if (fault && lane_id() == 0) fail(fault);
    }
    stream_at += length;
    patches += 2 * patch_words;
  }
  return 0;
}
