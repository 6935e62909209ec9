// Chunks: numbers taken apart into planes, and what may be done to them before.
#pragma once

#include "plane.h"

namespace netweight {

// What the chunks of a blob share. With a base, chunks hold differences from the same numbers of another tensor.
struct ChunkStyle {
  const Dtype* dtype;
  bool cpu_modes;  // whether there may be transforms and modes that GPU kernels do not decode
  bool has_base;
};

// What encode_chunk may write.
inline size_t chunk_bound(const Dtype& d, size_t count) { return count * d.unit_bytes + 4096 * static_cast<size_t>(plane_count(d)) + 64; }

// Encodes `count` numbers; `base` holds the base's, or is nullptr. Sets `cpu_modes` when GPU kernels could not decode them.
u8* encode_chunk(const ChunkStyle& style, const u8* in, const u8* base, size_t count, Level level, const Kernels& kernels, Scratch& scratch, u8* out,
                 bool& cpu_modes);

// Decodes all of `in`; readable_end bounds what may be read beyond it. `check` may take in what is there for good; nullptr for none.
void decode_chunk(const ChunkStyle& style, Reader in, const u8* readable_end, const u8* base, size_t count, const Kernels& kernels, Scratch& scratch,
                  u8* out, ChunkCheck* check);

// The planes of a chunk without transform. Inner ones belong to skewed data.
u8* encode_planes(const Dtype& d, const u8* in, size_t count, Level level, const Kernels& kernels, Scratch& scratch, u8* out, int nesting, bool inner,
                  bool* cpu_modes = nullptr);
void decode_planes(const Dtype& d, Reader& in, const u8* readable_end, size_t count, const Kernels& kernels, Scratch& scratch, u8* out, int nesting,
                   ChunkCheck* check = nullptr);

}  // namespace netweight
