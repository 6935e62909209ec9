// Most rows of a stream of the rans mode, in batches: the loop that decoding spends its time in.
//
// Both lanes of a thread look their slots up, a dot product gives the new states, two ballots and population counts tell each
// lane which byte of the stream is its. Raw bits are loaded a batch of rows ahead, and brought to the L2 cache before that.
#pragma once

#include "raw_bits.cuh"
#include "stream.cuh"

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

// How a row's elements are written: next to each other, or apart, or as numbers of four bytes with both tails.
enum class Store { packed, apart, merged };

template <u32 kWidth, Store kStore>
NETWEIGHT_DEVICE void put_pair(u64 at, u32 stride, u32 pair, u32 tails) {
  if (kStore == Store::merged) {
    *global_memory<uint2>(at) = make_uint2(__byte_perm(tails, pair, 0x5410), __byte_perm(tails, pair, 0x7632));
  } else if (kStore == Store::packed && kWidth == 2) {
    *global_memory<u32>(at) = pair;
  } else if (kStore == Store::packed) {
    *global_memory<u16>(at) = static_cast<u16>(__byte_perm(pair, 0, 0x4420));
  } else if (kWidth == 2) {
    *global_memory<u16>(at) = static_cast<u16>(pair);
    *global_memory<u16>(at + stride) = static_cast<u16>(pair >> 16);
  } else {
    *global_memory<u8>(at) = static_cast<u8>(pair);
    *global_memory<u8>(at + stride) = static_cast<u8>(pair >> 16);
  }
}

template <bool kRest, Store kStore>
constexpr u32 kWindows = 1 + (kRest ? 1 : 0) + (kStore == Store::merged ? 2 : 0);

// Rows that are loaded at once, as registers allow.
template <bool kRest, Store kStore>
constexpr u32 kBatch = kWindows<kRest, kStore> <= 2 ? 4 : 2;

// Rows that decode_batches decodes: all but the last three, if there are enough for a batch.
template <bool kRest, Store kStore>
NETWEIGHT_DEVICE u32 rows_in_batches(u32 rows) {
  return rows >= 3 + kBatch<kRest, kStore> ? rows - 3 : 0;
}

// Decodes the rows of a stream but the last three, which are left out so that whole words of raw bits can be read. `kUsual` is
// for two streams with eight raw bits that stand next to the symbols: bf16 weights in the chunks that GPUs encode.
template <u32 kWidth, bool kRest, Store kStore, bool kUsual>
NETWEIGHT_ROWS_CALLED void decode_batches(const RansLayout& layout, const Tails& tails, const Plane& plane, u32 stream,
                                          const Bounds& blob_bounds, const u8* readable, Lanes& lanes_kept, ByteRing& bytes_kept) {
  constexpr u32 kInputs = kWindows<kRest, kStore>, kRows = kBatch<kRest, kStore>;
  const u32 rows = rows_in_batches<kRest, kStore>(layout.rows), batches = rows / kRows, streams = kUsual ? 2 : layout.streams;
  if (batches == 0) return;
  const Bounds blob = blob_bounds;
  Lanes lanes = lanes_kept;  // in registers
  ByteRing bytes = bytes_kept;
  const RawPlacer placer = layout.placer;
  const u32 below = lanes_below(), stride = kStore == Store::packed ? kWidth : plane.stride, row_bytes = streams * 64 * stride;
  u32 tail_mask[2] = {0, 0}, tail_value[2] = {0, 0};
  Window windows[kInputs];
  windows[0].start_fields(layout.low, kUsual ? 8 : layout.low_bits, stream, streams, address(readable));
  if constexpr (kRest) {
    windows[1].start_fields(layout.rest, layout.rest_bits, stream, streams, address(readable));
  }
  if constexpr (kStore == Store::merged) {
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      windows[kInputs - 2 + i].start_bytes(tails.at[i], tails.mask[i] != 0, stream, streams, address(readable));
      tail_mask[i] = tails.mask[i];
      tail_value[i] = tails.value[i];
    }
  }
  const u32 element = stream * 64 + place_in_row(2 * lane_id(), kWidth);
  u64 out = address(plane.out) - (kStore == Store::merged ? 2 : 0) + static_cast<u64>(stride) * element;

  u32 first[kInputs][kRows], second[kInputs][kRows] = {};
  const auto load = [&](u32 row) {
#pragma unroll
    for (u32 i = 0; i < kInputs; i++) windows[i].load(row, first[i][row], second[i][row]);
  };
  const auto bits = [&](u32 i, u32 row) { return __funnelshift_r(first[i][row], second[i][row], windows[i].shift); };
  const auto put = [&](u64 at, u32 symbols, u32 row) {
    const u32 pair = symbols | placer.place<kRest>(bits(0, row), bits(kRest ? 1 : 0, row));
    u32 lower = 0;
    if constexpr (kStore == Store::merged) {
      const u32 upper_tail = (bits(kInputs - 2, row) & tail_mask[0]) | tail_value[0];
      const u32 lower_tail = (bits(kInputs - 1, row) & tail_mask[1]) | tail_value[1];
      lower = __byte_perm(lower_tail, upper_tail, 0x5140);
    }
    put_pair<kWidth, kStore>(at, stride, pair, lower);
  };

  // Brings a row behind the window to the L2 cache. Each thread asks for its own bits of one row, and those of all threads
  // lie near enough to each other to bring nearly everything.
  const auto bring = [&](u32 standing, u32 row) {
    if (standing + row >= rows) return;
#pragma unroll
    for (u32 i = 0; i < kInputs; i++) windows[i].prefetch_row(row);
  };

  bring(0, kRows + lane_id() % 8);
#pragma unroll
  for (u32 k = 0; k < kRows; k++) load(k);
  // Rows behind the last batch are loaded with it, and more that are not looked at, if these lie within the blob.
  bool goes_on = true;
#pragma unroll
  for (u32 i = 0; i < kInputs; i++) goes_on = goes_on && windows[i].readable((batches + 1) * kRows, blob);
  for (u32 batch = 1; batch <= batches; batch++) {
    if (batch < batches || goes_on) {  // else the last batch's rows are loaded again
#pragma unroll
      for (u32 i = 0; i < kInputs; i++) windows[i].advance(kRows);
      bring(batch * kRows, 8 + lane_id() % kRows);
    }
    bytes.refill(blob);
    u32 from = bytes.place();
    const u32 started = from;
#pragma unroll
    for (u32 k = 0; k < kRows; k++) {
      put(out + static_cast<u64>(k) * row_bytes, step(lanes, from, below), k);
      load(k);
    }
    out += static_cast<u64>(kRows) * row_bytes;
    bytes.at += from - started;
  }
  if (goes_on) {
    bytes.refill(blob);
    u32 from = bytes.place();
    const u32 started = from;
#pragma unroll
    for (u32 k = 0; k < kRows; k++)
      if (batches * kRows + k < rows) put(out + static_cast<u64>(k) * row_bytes, step(lanes, from, below), k);
    bytes.at += from - started;
  }
#pragma unroll
  for (u32 i = 0; i < kInputs; i++) windows[i].advance(kRows);  // behind the last batch
  for (u32 row = batches * kRows; row < rows && !goes_on; row++) {
    load(0);
    bytes.refill(blob);
    u32 from = bytes.place();
    const u32 started = from;
    put(out, step(lanes, from, below), 0);
    out += row_bytes;
    bytes.at += from - started;
#pragma unroll
    for (u32 i = 0; i < kInputs; i++) windows[i].advance(1);
  }
  lanes_kept = lanes;
  bytes_kept = bytes;
}

template <u32 kWidth, bool kRest, Store kStore, bool kUsual = false>
NETWEIGHT_DEVICE u32 decode_rows_as(const RansLayout& layout, const Tails& tails, const Plane& plane, u32 stream,
                                    const Bounds& blob, const u8* readable, Lanes& lanes, ByteRing& bytes) {
  decode_batches<kWidth, kRest, kStore, kUsual>(layout, tails, plane, stream, blob, readable, lanes, bytes);
  return rows_in_batches<kRest, kStore>(layout.rows);
}

// Decodes the rows of a stream that can be decoded fast, and returns their number.
NETWEIGHT_DEVICE u32 decode_rows(const RansLayout& layout, const Tails& tails, const Plane& plane, u32 stream, const Bounds& blob,
                                 const u8* readable, Lanes& lanes, ByteRing& bytes) {
  if constexpr (kNumberBytes == 2) {
    if (layout.rest_bits) return decode_rows_as<2, true, Store::packed>(layout, tails, plane, stream, blob, readable, lanes, bytes);
    if (layout.streams == 2 && layout.low_bits == 8)
      return decode_rows_as<2, false, Store::packed, true>(layout, tails, plane, stream, blob, readable, lanes, bytes);
    return decode_rows_as<2, false, Store::packed>(layout, tails, plane, stream, blob, readable, lanes, bytes);
  }
  const bool packed = plane.contiguous() && (address(plane.out) & (2 * plane.width - 1)) == 0;
#define NETWEIGHT_ROWS(width, rest, store) \
  decode_rows_as<width, rest, store>(layout, tails, plane, stream, blob, readable, lanes, bytes)
  if (plane.width == 1) return packed ? NETWEIGHT_ROWS(1, false, Store::packed) : NETWEIGHT_ROWS(1, false, Store::apart);
  if (layout.rest_bits) return packed ? NETWEIGHT_ROWS(2, true, Store::packed) : NETWEIGHT_ROWS(2, true, Store::apart);
  if (tails.merged) return NETWEIGHT_ROWS(2, false, Store::merged);
  return packed ? NETWEIGHT_ROWS(2, false, Store::packed) : NETWEIGHT_ROWS(2, false, Store::apart);
#undef NETWEIGHT_ROWS
}
