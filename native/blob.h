// Whole tensors: header, index, chunks, threads. See docs/format.md.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <span>

#include "kernels.h"

namespace netweight {

class Scratch;

struct BlobHeader {
  const Dtype* dtype;
  bool has_base, cpu_modes;  // cpu_modes: some chunk has a transform or a mode that GPU kernels do not decode
  Level level;
  int chunk_log2;
  std::vector<u64> shape;
  u8 digest[16];       // xxh3-128 of the chunks' checks, canonical (big-endian) form
  u8 base_digest[16];  // of the base, if there is one
  u64 elements;
  u64 nbytes;     // of the tensor
  u64 numbers;    // units of dtype->unit_bytes bytes
  std::vector<u64> chunk_start;  // offsets in the blob; one more than there are chunks
  std::vector<u64> checks;       // of every chunk's numbers

  size_t chunks() const { return chunk_start.size() - 1; }
  size_t numbers_in_chunk(size_t chunk) const;
};

// Reads and checks header and index, which may be all of the blob's `size` bytes that are there; throws CorruptError or UnsupportedError.
BlobHeader read_header(std::span<const u8> blob, u64 size);
inline BlobHeader read_header(std::span<const u8> blob) { return read_header(blob, blob.size()); }

// The tensor's size in bytes; throws UnsupportedError for shapes that overflow and for sub-byte types that end inside a byte.
u64 tensor_bytes(const Dtype& dtype, const std::vector<u64>& shape);

// What encode may write for such a tensor.
size_t encode_bound(const Dtype& dtype, const std::vector<u64>& shape, int chunk_log2);

// How to encode a tensor. With a base: against another tensor of the same size, else nullptr. With `gpu_modes` and no base:
// only in modes that GPU kernels decode.
struct Encoding {
  Level level;
  int chunk_log2;
  bool gpu_modes;
  const u8* base;
};

// Encodes to `out` (of encode_bound bytes); returns the blob's size.
size_t encode(std::span<const u8> tensor, const Dtype& dtype, const std::vector<u64>& shape, const Encoding& how, int threads, const Kernels& kernels,
              u8* out);

// One chunk alone: encodes it to `out` (of chunk_bound bytes).
struct EncodedChunk {
  size_t size;
  u64 check, base_check;
  bool cpu_modes;
};
EncodedChunk encode_one(std::span<const u8> numbers, const Dtype& dtype, const Encoding& how, const Kernels& kernels, u8* out);
size_t encode_one_bound(const Dtype& dtype, size_t bytes);
void decode_one(std::span<const u8> chunk, const BlobHeader& header, size_t number, const u8* base, bool check, const Kernels& kernels, u8* out);

// What makes weights of the words of a lossy blob.
struct Words {
  Rounding rounding;
  const u8* normalizers;  // of the blocks that the weights touch
};

// The decoding of numbers [first, last) to `out`, or of words to weights, on which any number of threads may work at once; only the chunks they touch are read.
class RangeDecoder {
 public:
  // `base`: the whole base of a blob that has one. With `check` chunks are compared with their checks, whole ones or in part.
  RangeDecoder(std::span<const u8> blob, const BlobHeader& header, u64 first, u64 last, const u8* base, bool check, const Kernels& kernels, u8* out,
               std::optional<Words> words = std::nullopt);

  // Decodes chunks until none is left to begin; never throws.
  void work() noexcept;
  // Begins no further chunk.
  void stop() noexcept { next_ = end_; }
  // Throws what went wrong; call it when every thread has returned from work().
  void check() const;

 private:
  void decode_item(size_t chunk, Scratch& scratch) const;
  void decode_words_item(size_t chunk, Scratch& scratch) const;
  void decode_to(size_t chunk, Scratch& scratch, u8* out) const;

  std::span<const u8> blob_;
  const BlobHeader& header_;
  u64 first_, last_;
  const u8* base_;
  bool check_;
  const Kernels& kernels_;
  u8* out_;
  std::optional<Words> words_;
  size_t end_;
  std::atomic<size_t> next_;
  std::exception_ptr failure_;
  std::mutex guard_;
};

// The same by `threads` threads.
void decode_range(std::span<const u8> blob, const BlobHeader& header, u64 first, u64 last, const u8* base, bool check, int threads, const Kernels& kernels,
                  u8* out);

// Decodes words [first, last) of a lossy blob to weights at `out`, chunk by chunk while they are in the cache.
void decode_words(std::span<const u8> blob, const BlobHeader& header, u64 first, u64 last, const Words& words, int threads, const Kernels& kernels, u8* out);

// Frees the working memory that threads left behind for the next calls.
void trim_working_memory();

const Kernels& kernels_by_name(const char* name);  // "auto" for the fastest; throws UnsupportedError
const std::vector<const Kernels*>& usable_kernels();  // fastest first

}  // namespace netweight
