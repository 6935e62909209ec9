// The mode rans: some warps of a block code streams while the others pack raw bits; then streams are moved to their places,
// and patches are written.
#pragma once

#include "encode_streams.cuh"

// ---- patches ---------------------------------------------------------------------------------------------------------

// A stream's patches in ascending order.
NETWEIGHT_DEVICE const u32* patches_of(const Layout& a, u32 stream, const u8* work, const Memory& m) {
  return reinterpret_cast<const u32*>(work) + patch_room(a.rows) * (stream + 1) - m.streams[stream].patches;
}

// Ranks the symbols that need patches, over all streams. By a whole block; the lookup of symbols is lost.
NETWEIGHT_DEVICE void rank_rare(const Layout& a, const u8* work, Memory& m) {
  Search& s = m.search;
  const u32 bins = a.symbol_mask + 1;
  for (u32 i = threadIdx.x; i < bins; i += kThreads) s.counts[i] = 0;
  __syncthreads();
  for (u32 g = 0; g < a.streams; g++) {
    const u32* patches = patches_of(a, g, work, m);
    for (u32 i = threadIdx.x; i < m.streams[g].patches; i += kThreads) atomicAdd(&s.counts[patches[i] & 0xfff], 1u);
  }
  __syncthreads();
  rank(s.counts, bins, s.listed, m.rare);
}

NETWEIGHT_DEVICE u32 rare_count(const Memory& m) { return m.rare.present < kMaxRare ? m.rare.present : kMaxRare; }

NETWEIGHT_DEVICE u32 code_of(u32 symbol, const Memory& m) {
  u32 code = 0;
  while (code < rare_count(m) && m.rare.symbol[code] != symbol) code++;
  return code < rare_count(m) ? code : kLiteral;
}

// A stream's patch words: counted, and written if `out` is not null. By a warp; returns their number.
NETWEIGHT_DEVICE u32 patch_words(const u32* patches, u32 count, const Memory& m, u8* out) {
  u32 total = 0;
  for (u32 first = 0; first < count; first += kWarp) {
    const u32 i = first + lane_id();
    u32 gap = 0, code = 0, words = 0;
    if (i < count) {
      gap = (patches[i] >> 12) - (i > 0 ? (patches[i - 1] >> 12) + 1 : 0);
      code = code_of(patches[i] & 0xfff, m);
      words = gap / kPatchSpread + 1 + (code == kLiteral);
    }
    const u32 upto = warp_running_sum(words);
    if (out != nullptr && i < count) {
      u8* p = out + 2 * (total + upto - words);
      for (; gap >= kPatchSpread; gap -= kPatchSpread, p += 2) write_u16(p, kSkip << 12 | (kPatchSpread - 1));
      write_u16(p, code << 12 | gap);
      if (code == kLiteral) write_u16(p + 2, patches[i] & 0xfff);
    }
    total += __shfl_sync(kAllLanes, upto, kWarp - 1);
  }
  return total;
}

// ---- the plane -------------------------------------------------------------------------------------------------------

NETWEIGHT_DEVICE void write_u24(u8* p, u32 value) {
  write_u16(p, value);
  p[2] = static_cast<u8>(value >> 16);
}

// Mode, split, streams and table. By one thread.
NETWEIGHT_DEVICE void write_table(const Table& table, const Layout& a, u8* p) {
  *p++ = kRans;
  *p++ = static_cast<u8>(a.raw_bits | (a.signed_raw ? 0x80 : 0));
  *p++ = static_cast<u8>(a.streams);
  u8* const runs = p++;
  u32 count = 0;
  for (u32 i = 0; i < table.count; count++) {
    u32 length = 1;
    while (i + length < table.count && table.symbol[i + length] == table.symbol[i] + length) length++;
    write_u16(p, table.symbol[i]);
    p[2] = static_cast<u8>(length);
    p += 3;
    i += length;
  }
  *runs = static_cast<u8>(count);
  for (u32 i = 0; i < table.count; i++) *p++ = static_cast<u8>(table.frequency[i] | (table.second[i] ? 0x80 : 0));
}

// Moves streams to their places and writes what stands around them. By a whole block.
NETWEIGHT_DEVICE void assemble(const Layout& a, u8* out, const u8* work, const Memory& m) {
  if (threadIdx.x == 0) write_table(m.table, a, out);
  const u8* ends = work + 4 * patch_room(a.rows) * a.streams;
  u8* to = out + a.bodies;
  for (u32 g = 0; g < a.streams; g++) {
    const Stream& stream = m.streams[g];
    ends += a.rows * kRow;
    copy_bytes(to, ends - stream.bytes, stream.bytes, threadIdx.x, kThreads);
    to += stream.bytes;
    if (threadIdx.x == g) {
      write_u24(out + a.lengths + 6 * g, stream.bytes);
      write_u24(out + a.lengths + 6 * g + 3, stream.words);
    }
  }
  const u32 rare = rare_count(m);
  if (threadIdx.x == 0) *to = static_cast<u8>(rare);
  if (threadIdx.x < rare) write_u16(to + 1 + 2 * threadIdx.x, m.rare.symbol[threadIdx.x]);
  to += 1 + 2 * rare;
  for (u32 g = 0; g < a.streams; g++) {
    if (warp_id() == g) patch_words(patches_of(a, g, work, m), m.streams[g].patches, m, to);
    to += 2 * m.streams[g].words;
  }
}

// Writes a plane by the table in `m`, up to seven bytes into its slot, so that raw bits can be written eight bytes at a time.
// Returns its size and these bytes, or 0 if it would have too many patches or be larger than the plane. By a whole block.
NETWEIGHT_DEVICE u32 encode_rans(const Plane& plane, u8* out, u8* work, Memory& m) {
  const Layout a = layout_of(plane, m.table);
  const u32 skipped = bytes_to_alignment(out + a.low, 8);
  out += skipped;
  __syncthreads();
  fill_entries(m.table, a.symbol_mask + 1, m.coding.entries);
  if (threadIdx.x == 0) m.flag = 0;
  __syncthreads();
  const u32 w = warp_id();
  with_loads(plane, [&](auto load) {
    if (w < a.streams && !code_stream(load, plane, a, w, out, work, m) && lane_id() == 0) m.flag = 1;
    const u32 busy = a.streams < kWarps ? a.streams : 0;  // warps that others pack beside; if all are, they pack afterwards
    if (w >= busy) pack_raw_bits(load, plane, a, out, threadIdx.x - busy * kWarp, kThreads - busy * kWarp);
  });
  __syncthreads();
  if (m.flag != 0) return 0;
  rank_rare(a, work, m);
  if (w < a.streams) {
    const u32 words = patch_words(patches_of(a, w, work, m), m.streams[w].patches, m, nullptr);
    if (lane_id() == 0) m.streams[w].words = words;
  }
  __syncthreads();
  u32 size = a.bodies + 1 + 2 * rare_count(m);
  for (u32 g = 0; g < a.streams; g++) size += m.streams[g].bytes + 2 * m.streams[g].words;
  if (size > plane.bytes()) return 0;
  assemble(a, out, work, m);
  return size | skipped << kSizeBits;
}
