// The rans mode: planes of one, two or four streams, each of which a warp decodes.
#pragma once

#include "patches.cuh"
#include "rans_rows.cuh"
#include "slots.cuh"

// Raw bits of this thread's pair in a row.
struct Fields {
  u32 low, rest;
};

// Reads them byte by byte from a row's field blocks.
NETWEIGHT_DEVICE Fields fields_at(const RansLayout& layout, const u8* low, const u8* rest) {
  return {field_pair(low, layout.low_bits, lane_id()), field_pair(rest, layout.rest_bits, lane_id())};
}

// Writes a row. Elements beyond the plane are dropped.
NETWEIGHT_DEVICE void put_row(const RansLayout& layout, const Plane& plane, u32 stream, u32 row, u32 symbols, Fields fields) {
  const RawPlacer& placer = layout.placer;
  const u32 raw = layout.rest_bits ? placer.place<true>(fields.low, fields.rest) : placer.place<false>(fields.low, 0);
  const u32 pair = symbols | raw;
  const u32 element = (row * layout.streams + stream) * 64 + place_in_row(2 * lane_id(), plane.width);
  if (element < plane.count) plane.put(element, pair & 0xffff);
  if (element + 1 < plane.count) plane.put(element + 1, pair >> 16);
}

// Decodes rows from `first` on to the end of the stream. The raw bits of the last row, and of the last but one in part, are
// the final states. Returns a reason for refusal, the same in all lanes.
NETWEIGHT_ROWS_CALLED u32 decode_last_rows(const RansLayout& layout, const Plane& plane, u32 stream, u32 first, const Bounds& blob,
                                           Lanes& lanes, ByteRing& bytes, u32 end) {
  const u32 lane = lane_id(), below = lanes_below(), rows = layout.rows, streams = layout.streams;
  const u32 low_row = 8 * layout.low_bits, rest_row = 8 * layout.rest_bits;
  const u32 whole = rows > 2 ? rows - 2 : 0;  // rows whose low region is whole
  const u8* last_two = layout.low + static_cast<u64>(whole) * streams * low_row;
  const auto rest_of = [&](u32 row) { return layout.rest + (static_cast<u64>(row) * streams + stream) * rest_row; };
  const auto whole_fields = [&](u32 row) {
    return fields_at(layout, layout.low + (static_cast<u64>(row) * streams + stream) * low_row, rest_of(row));
  };
  // Raw bits are on their way while the rows before them are decoded; of the last but one if none of them are in the states.
  const bool stored_before = rows > 1 && layout.folded == 0;
  Fields ahead{}, before_last{};
  if (first < whole) ahead = whole_fields(first);
  if (stored_before) before_last = fields_at(layout, last_two + stream * low_row, rest_of(rows - 2));
  u32 kept[2] = {0, 0};  // symbols of the last row but one and of the last
  for (u32 row = first; row < rows; row++) {
    const Fields now = ahead;
    if (row + 1 < whole) ahead = whole_fields(row + 1);
    bytes.refill(blob);
    u32 from = bytes.place();
    const u32 started = from, symbols = step(lanes, from, below);
    bytes.at += from - started;
    if (row < whole) put_row(layout, plane, stream, row, symbols, now);
    kept[0] = kept[1];
    kept[1] = symbols;
  }
  const u32 used = low_row + layout.folded;
  const u32 final_a = 2 * lane < used ? lanes.a >> 8 : lanes.a - 255, final_b = 2 * lane + 1 < used ? lanes.b >> 8 : lanes.b - 255;
  if (__any_sync(kAllLanes, final_a != 1 || final_b != 1 || bytes.at != end)) return kBadStream;

  u8* last = ring_memory() + bytes.ring;  // two field blocks, put together where the stream was
  u8* before = last + 64;
  const u32 stored = low_row - layout.folded;
  __syncwarp();
  last[2 * lane] = static_cast<u8>(lanes.a);
  last[2 * lane + 1] = static_cast<u8>(lanes.b);
  __syncwarp();
  if (rows > 1) {
    if (!stored_before) {
      for (u32 i = lane; i < low_row; i += kWarp)
        before[i] = i < stored ? last_two[stream * stored + i] : last[low_row + i - stored];
      __syncwarp();
      before_last = fields_at(layout, before, rest_of(rows - 2));
    }
    put_row(layout, plane, stream, rows - 2, kept[0], before_last);
  }
  put_row(layout, plane, stream, rows - 1, kept[1], fields_at(layout, last, rest_of(rows - 1)));
  __syncwarp();
  return 0;
}

// Decodes a plane whose header is staged: `header` holds `staged` bytes from its mode on, or as many as it has. Gives the
// plane's bytes, and the number of elements, from the first on, whose tails were written with them. Returns a reason for
// refusal, the same in all threads; a stream's own faults go to shared.failure.
NETWEIGHT_DEVICE u32 decode_rans(const u8* at, u64 left, const u8* header, const Plane& plane, const Bounds& blob, u64& size,
                                 u32& merged) {
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
  const u8* entries = header + 3 + table_bytes;
  const u8* sizes = header + offset;
  const u8* states = sizes + 6 * streams;
  offset += 134 * streams;
  layout.low_bits = min(layout.split.raw_bits, 8u);
  layout.rest_bits = layout.split.raw_bits - layout.low_bits;
  layout.placer = raw_placer(layout.split, layout.low_bits, layout.rest_bits, plane.width);
  const u32 low_row = 8 * layout.low_bits, rest_row = 8 * layout.rest_bits;
  layout.folded = layout.rows > 1 ? min(low_row, 64 - low_row) : 0;
  const u64 low_bytes = static_cast<u64>(streams) * (static_cast<u64>(low_row) * (layout.rows - 1) - layout.folded);
  const u64 rest_bytes = static_cast<u64>(streams) * rest_row * layout.rows;
  layout.low = at + offset;
  layout.rest = layout.low + low_bytes;
  u64 stream_bytes = 0, words = 0, mine = 0;
  for (u32 g = 0; g < streams; g++) {
    if (g == warp_id()) mine = stream_bytes;
    stream_bytes += read_u24(sizes + 6 * g);
    words += read_u24(sizes + 6 * g + 3);
  }
  size = offset + low_bytes + rest_bytes + stream_bytes;  // up to the rare symbols
  if (size + 1 > left) return kTruncated;
  // What is needed first comes near while the table is built.
  prefetch_span(address(layout.low) + warp_id() * 8 * low_row, 8 * low_row, blob);
  prefetch_span(address(layout.rest) + warp_id() * 8 * rest_row, 8 * rest_row, blob);
  prefetch_span(address(layout.rest) + rest_bytes + mine, 3 * kSlice, blob);
  prefetch_span(address(at) + size, static_cast<u32>(min(left - size, static_cast<u64>(2 * kSlice))), blob);

  __syncthreads();  // the symbols are there
  reason = order_symbols(entries, symbols);
  if (reason) return reason;
  __syncthreads();  // their order is there
  fill_slots(symbols, layout.split);
  RareSymbols rare;
  reason = read_rare(at + size, left - size, layout.split.symbol_bits, rare);
  if (reason) return reason;
  size += 1 + 2 * rare.count;
  if (size + 2 * words > left) return kTruncated;
  const u8* patches = at + size;
  size += 2 * words;
  Tails tails{};
  if (plane.stride == 4 && plane.width == 2 && layout.rest_bits == 0 && address(plane.out) % 8 == 2) {
    find_tails(at + size, left - size, plane.count, tails);
    if (tails.merged) merged = rows_in_batches<false, Store::merged>(layout.rows) * streams * 64;
  }
  __syncthreads();  // the slots are there

  const u8* stream_at = layout.rest + rest_bytes;
  for (u32 g = 0; g < streams; g++) {
    const u32 length = read_u24(sizes + 6 * g), patch_words = read_u24(sizes + 6 * g + 3);
    if (g % (blockDim.x / kWarp) == warp_id()) {
      const u8* low = states + 128 * g + 2 * lane_id();
      Lanes lanes{low[0] | static_cast<u32>(low[64]) << 8, low[1] | static_cast<u32>(low[65]) << 8};
      u32 fault = __any_sync(kAllLanes, lanes.a < 256 || lanes.b < 256) ? kBadStates : 0;
      ByteRing bytes;
      const u32 first_word = first_patch_word(patches, patch_words);  // arrives while rows are decoded
      if (!fault) {
        bytes.start(stream_at, blob);
        const u32 end = bytes.at + length;
        const u32 done = decode_rows(layout, tails, plane, g, blob, at, lanes, bytes);
        fault = decode_last_rows(layout, plane, g, done, blob, lanes, bytes, end);
      }
      if (!fault) {
        fault = apply_patches(patches, patch_words, first_word, rare, layout.split, plane, StreamOrder{streams, g, plane.width});
      }
      if (fault && lane_id() == 0) fail(fault);
    }
    stream_at += length;
    patches += 2 * patch_words;
  }
  return 0;
}
