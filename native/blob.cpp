// Whole tensors: header, index, chunks, threads.
#include "blob.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "chunk.h"
#include "digest.h"
#include "threads.h"

namespace netweight {

ChunkCheck::ChunkCheck(const Kernels& kernels, const u8* from) : kernels_(kernels), from_(from), at_(from) {
  for (u32 i = 0; i < 64; i++) states_[i] = 0x03020100 + 0x04040404 * i;
}

u64 ChunkCheck::finish(const u8* end) {
  up_to(end);
  u8 last[256] = {};
  std::memcpy(last, at_, static_cast<size_t>(end - at_));
  if (at_ != end) kernels_.aes_rounds(states_, last, 1);
  const u64 size = static_cast<u64>(end - from_), zero[2] = {};
  u32 folded[4] = {static_cast<u32>(size), static_cast<u32>(size >> 32), 0, 0};
  for (int k = 0; k < 16; k++) aes_round(folded, reinterpret_cast<const u8*>(states_ + 4 * k));
  for (int k = 0; k < 3; k++) aes_round(folded, reinterpret_cast<const u8*>(zero));
  return folded[0] | static_cast<u64>(folded[1]) << 32;
}

u64 check_of(const Kernels& kernels, const u8* in, size_t size) { return ChunkCheck(kernels, in).finish(in + size); }

namespace {

// ---- threads ---------------------------------------------------------------------------------------------------------

// Calls work(worker, item) for every item; the first exception stops the rest and is thrown again here.
template <typename Work>
void parallel_for(size_t items, int threads, Work work) {
  threads = static_cast<int>(std::clamp<size_t>(static_cast<size_t>(std::max(threads, 1)), 1, std::max<size_t>(items, 1)));
  if (threads == 1) {
    for (size_t i = 0; i < items; i++) work(0, i);
    return;
  }
  std::atomic<size_t> next{0};
  std::exception_ptr failure;
  std::mutex guard;
  auto loop = [&](int worker) {
    try {
      for (size_t i; (i = next++) < items;) work(worker, i);
    } catch (...) {
      std::lock_guard<std::mutex> lock(guard);
      if (!failure) failure = std::current_exception();
      next = items;
    }
  };
  run_on_threads(threads, loop);
  if (failure) std::rethrow_exception(failure);
}

EncodedChunk encode_with(Scratch& scratch, std::span<const u8> numbers, const Dtype& dtype, const Encoding& how, const Kernels& kernels, u8* out) {
  EncodedChunk found{0, 0, 0, false};
  found.check = check_of(kernels, numbers.data(), numbers.size());
  if (how.base) found.base_check = check_of(kernels, how.base, numbers.size());
  const ChunkStyle style{&dtype, !how.gpu_modes, how.base != nullptr};
  const u8* end = encode_chunk(style, numbers.data(), how.base, numbers.size() / dtype.unit_bytes, how.level, kernels, scratch, out, found.cpu_modes);
  found.size = static_cast<size_t>(end - out);
  return found;
}

// Decodes a chunk and, if asked, compares it with its check.
void decode_checked(Reader in, const u8* readable_end, const BlobHeader& h, size_t chunk, const u8* base, bool compare, const Kernels& kernels,
                    Scratch& scratch, u8* out) {
  const size_t count = h.numbers_in_chunk(chunk);
  ChunkCheck check(kernels, out);
  decode_chunk({h.dtype, h.cpu_modes, h.has_base}, in, readable_end, base, count, kernels, scratch, out, compare ? &check : nullptr);
  if (!compare || check.finish(out + count * h.dtype->unit_bytes) == h.checks[chunk]) return;
  throw CorruptError(std::string("the decoded bytes do not have the digest that was stored with them") + (h.has_base ? ", or the base is another tensor" : ""));
}

// Work whose second half must be done in the order of the items. The items must be begun in that order, too.
class Turns {
  static constexpr int kPatience = 1000;

 public:
  template <typename Before, typename InTurn>
  void take(size_t item, Before before, InTurn in_turn) {
    try {
      before();
    } catch (...) {
      std::lock_guard<std::mutex> lock(guard_);
      failed_ = true;  // those behind would wait forever
      changed_.notify_all();
      throw;
    }
    for (int i = 0; i < kPatience && next_ != item; i++) std::this_thread::yield();  // being woken takes longer than most turns
    std::unique_lock<std::mutex> lock(guard_);
    changed_.wait(lock, [&] { return next_ == item || failed_; });
    if (failed_) return;
    in_turn();
    next_++;
    changed_.notify_all();
  }

 private:
  std::mutex guard_;
  std::condition_variable changed_;
  std::atomic<size_t> next_{0};
  bool failed_ = false;
};

// ---- header ----------------------------------------------------------------------------------------------------------

u8* put_varint(u8* p, u64 v) {
  for (; v >= 128; v >>= 7) *p++ = static_cast<u8>(v | 128);
  *p++ = static_cast<u8>(v);
  return p;
}

u64 read_varint(Reader& in) {
  u64 v = 0;
  for (int shift = 0; shift < 63; shift += 7) {
    u8 b = in.byte("the header");
    v |= static_cast<u64>(b & 127) << shift;
    if (b < 128) return v;
  }
  throw CorruptError("a dimension in the header is too large");
}

// The digest of a tensor: that of its chunks' checks.
void digest_of_checks(const u8* checks, size_t chunks, u8* to) {
  XXH128_canonical_t digest;
  XXH128_canonicalFromHash(&digest, XXH3_128bits(checks, 8 * chunks));
  std::memcpy(to, digest.digest, 16);
}

u8* put64(u8* p, u64 v) { return put32(put32(p, static_cast<u32>(v)), static_cast<u32>(v >> 32)); }
u64 get64(const u8* p) { return get32(p) | static_cast<u64>(get32(p + 4)) << 32; }

u32 header_check(const u8* header, size_t size) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, header, 24);
  XXH3_64bits_update(&state, header + kFixedHeader, size - kFixedHeader);
  return static_cast<u32>(XXH3_64bits_digest(&state));
}

u64 chunk_count(u64 numbers, int chunk_log2) { return (numbers >> chunk_log2) + ((numbers & ((u64{1} << chunk_log2) - 1)) != 0); }

std::string megabytes(size_t n) { return std::to_string(n) + " bytes"; }

}  // namespace

size_t BlobHeader::numbers_in_chunk(size_t chunk) const {
  return static_cast<size_t>(std::min<u64>(u64{1} << chunk_log2, numbers - (static_cast<u64>(chunk) << chunk_log2)));
}

u64 tensor_bytes(const Dtype& dtype, const std::vector<u64>& shape) {
  unsigned __int128 bits = dtype.bits;
  if (std::find(shape.begin(), shape.end(), 0u) != shape.end()) return 0;
  for (u64 d : shape) {
    bits *= d;
    if (bits >> 62) throw UnsupportedError("a tensor of this shape is too large");
  }
  if (bits % 8) throw UnsupportedError(std::string("a tensor of type ") + dtype.name + " must fill whole bytes");
  return static_cast<u64>(bits / 8);
}

size_t encode_bound(const Dtype& dtype, const std::vector<u64>& shape, int chunk_log2) {
  u64 bytes = tensor_bytes(dtype, shape);
  u64 chunks = chunk_count(bytes / dtype.unit_bytes, chunk_log2);
  return static_cast<size_t>(kFixedHeader + 16 + 10 * shape.size() + bytes + chunks * (12 + chunk_bound(dtype, 0)));
}

BlobHeader read_header(std::span<const u8> blob, u64 size) {
  if (blob.size() < kFixedHeader) throw CorruptError("it is shorter than a header (" + megabytes(blob.size()) + ")");
  if (std::memcmp(blob.data(), kMagic, 3) != 0) throw CorruptError("it does not start with the marker NWT");
  BlobHeader h{};
  if (blob[3] != kVersion)
    throw UnsupportedError("format version " + std::to_string(blob[3]) + " is not known to this release, which reads version " + std::to_string(kVersion));
  h.dtype = &dtype_by_code(blob[4]);
  h.has_base = blob[5] & kHasBase;
  h.cpu_modes = blob[5] & kHasCpuModes;
  const u8 level = blob[5] & static_cast<u8>(~(kHasBase | kHasCpuModes));
  if (level > static_cast<u8>(Level::max)) throw UnsupportedError("level number " + std::to_string(level) + " is not known to this release");
  h.level = static_cast<Level>(level);
  h.chunk_log2 = blob[6];
  if (h.chunk_log2 < kMinChunkLog2 || h.chunk_log2 > kMaxChunkLog2) throw CorruptError("the header states an impossible chunk size");
  if (blob[7] > kMaxDims) throw CorruptError("the header states an impossible number of dimensions");
  std::memcpy(h.digest, blob.data() + 8, 16);
  Reader in{blob.data() + kFixedHeader, blob.data() + blob.size()};
  h.elements = 1;
  for (int i = 0; i < blob[7]; i++) h.shape.push_back(read_varint(in));
  h.nbytes = tensor_bytes(*h.dtype, h.shape);
  for (u64 d : h.shape) h.elements = h.nbytes ? h.elements * d : 0;
  if (std::find(h.shape.begin(), h.shape.end(), 0u) != h.shape.end()) h.elements = 0;
  h.numbers = h.nbytes / h.dtype->unit_bytes;
  if (h.has_base) std::memcpy(h.base_digest, in.take(16, "the header"), 16);
  const u64 chunks = chunk_count(h.numbers, h.chunk_log2);
  if (chunks > static_cast<u64>(in.end - in.at) / 12) throw CorruptError("the data ends inside the index of chunks");
  const u8* index = in.take(static_cast<size_t>(chunks) * 4, "the index of chunks");
  const u8* checks = in.take(static_cast<size_t>(chunks) * 8, "the index of chunks");
  if (get32(blob.data() + 24) != header_check(blob.data(), static_cast<size_t>(in.at - blob.data())))
    throw CorruptError("the header's checksum does not fit its bytes");
  h.chunk_start.resize(static_cast<size_t>(chunks) + 1);
  h.chunk_start[0] = static_cast<u64>(in.at - blob.data());
  for (size_t c = 0; c < chunks; c++) h.chunk_start[c + 1] = h.chunk_start[c] + get32(index + 4 * c);
  for (size_t c = 0; c < chunks; c++) h.checks.push_back(get64(checks + 8 * c));
  u8 digest[16];
  digest_of_checks(checks, static_cast<size_t>(chunks), digest);
  if (std::memcmp(digest, h.digest, 16) != 0) throw CorruptError("the header's digest does not fit its checks");
  if (h.chunk_start.back() != size)
    throw CorruptError("it has " + megabytes(size) + " where its index adds up to " + std::to_string(h.chunk_start.back()));
  return h;
}

size_t encode(std::span<const u8> tensor, const Dtype& dtype, const std::vector<u64>& shape, const Encoding& how, int threads, const Kernels& kernels,
              u8* out) {
  const size_t unit = dtype.unit_bytes, step = size_t{1} << how.chunk_log2;
  const size_t numbers = tensor.size() / unit;
  const size_t chunks = static_cast<size_t>(chunk_count(numbers, how.chunk_log2));
  u8* p = out + kFixedHeader;
  for (u64 d : shape) p = put_varint(p, d);
  u8* base_digest = p;
  if (how.base) p += 16;
  u8 *index = p, *checks = index + 4 * chunks, *payload = checks + 8 * chunks, *end = payload;
  std::vector<u8> base_checks(how.base ? 8 * chunks : 0);
  std::atomic<bool> cpu_modes{false};
  // A chunk's check, which brings it into the cache, and its planes.
  const auto encode_at = [&](size_t c, Scratch& scratch, u8* to) {
    const std::span<const u8> chunk = tensor.subspan(c * step * unit, std::min(step, numbers - c * step) * unit);
    Encoding own = how;
    if (how.base) own.base += c * step * unit;
    const EncodedChunk found = encode_with(scratch, chunk, dtype, own, kernels, to);
    put32(index + 4 * c, static_cast<u32>(found.size));
    put64(checks + 8 * c, found.check);
    if (how.base) put64(base_checks.data() + 8 * c, found.base_check);
    if (found.cpu_modes) cpu_modes = true;
    return found.size;
  };
  if (threads <= 1 || chunks < 2) {
    Scratch scratch;
    for (size_t c = 0; c < chunks; c++) end += encode_at(c, scratch, end);
  } else {
    // Chunks are encoded side by side, get their places in their order, and are copied there side by side.
    std::vector<Scratch> scratches(static_cast<size_t>(threads));
    Turns placing;
    parallel_for(chunks, threads, [&](int number, size_t c) {
      Scratch& scratch = scratches[static_cast<size_t>(number)];
      scratch.chunks_ahead = scratches.size();
      u8* encoded = scratch.chunk(chunk_bound(dtype, step));
      size_t size = 0;
      u8* place = nullptr;
      placing.take(
          c, [&] { size = encode_at(c, scratch, encoded); },
          [&] {
            place = end;
            end += size;
          });
      if (place) std::memcpy(place, encoded, size);
    });
  }
  std::memcpy(out, kMagic, 3);
  out[3] = kVersion;
  out[4] = dtype.code;
  out[5] = static_cast<u8>(static_cast<int>(how.level) | (how.base ? kHasBase : 0) | (cpu_modes ? kHasCpuModes : 0));
  out[6] = static_cast<u8>(how.chunk_log2);
  out[7] = static_cast<u8>(shape.size());
  digest_of_checks(checks, chunks, out + 8);
  if (how.base) digest_of_checks(base_checks.data(), chunks, base_digest);
  put32(out + 24, header_check(out, static_cast<size_t>(payload - out)));
  return static_cast<size_t>(end - out);
}

size_t encode_one_bound(const Dtype& dtype, size_t bytes) { return chunk_bound(dtype, bytes / dtype.unit_bytes); }

EncodedChunk encode_one(std::span<const u8> numbers, const Dtype& dtype, const Encoding& how, const Kernels& kernels, u8* out) {
  Scratch scratch;
  return encode_with(scratch, numbers, dtype, how, kernels, out);
}

void decode_one(std::span<const u8> chunk, const BlobHeader& h, size_t number, const u8* base, bool check, const Kernels& kernels, u8* out) {
  Scratch scratch;
  const u8* end = chunk.data() + chunk.size();
  decode_checked(Reader{chunk.data(), end}, end, h, number, base, check, kernels, scratch, out);
}

RangeDecoder::RangeDecoder(std::span<const u8> blob, const BlobHeader& header, u64 first, u64 last, const u8* base, bool check, const Kernels& kernels,
                           u8* out, std::optional<Words> words)
    : blob_(blob),
      header_(header),
      first_(first),
      last_(last),
      base_(base),
      check_(check),
      kernels_(kernels),
      out_(out),
      words_(words),
      end_(first < last ? static_cast<size_t>((last - 1) >> header.chunk_log2) + 1 : 0),
      next_(first < last ? static_cast<size_t>(first >> header.chunk_log2) : 0) {}

void RangeDecoder::work() noexcept {
  try {
    Scratch scratch;
    for (size_t chunk; (chunk = next_++) < end_;) decode_item(chunk, scratch);
  } catch (...) {
    std::lock_guard<std::mutex> lock(guard_);
    if (!failure_) failure_ = std::current_exception();
    stop();
  }
}

void RangeDecoder::check() const {
  if (failure_) std::rethrow_exception(failure_);
}

void RangeDecoder::decode_item(size_t chunk, Scratch& scratch) const {
  if (words_) return decode_words_item(chunk, scratch);
  const size_t unit = header_.dtype->unit_bytes, count = header_.numbers_in_chunk(chunk);
  const u64 start = static_cast<u64>(chunk) << header_.chunk_log2;
  const bool whole = start >= first_ && start + count <= last_;
  u8* to = whole ? out_ + (start - first_) * unit : scratch.chunk(count * unit);
  decode_to(chunk, scratch, to);
  if (whole) return;
  const u64 begin = std::max(first_, start), end = std::min<u64>(last_, start + count);
  std::memcpy(out_ + (begin - first_) * unit, to + (begin - start) * unit, static_cast<size_t>(end - begin) * unit);
}

void RangeDecoder::decode_to(size_t chunk, Scratch& scratch, u8* out) const {
  const Reader in{blob_.data() + header_.chunk_start[chunk], blob_.data() + header_.chunk_start[chunk + 1]};
  const u8* base = base_ ? base_ + (static_cast<u64>(chunk) << header_.chunk_log2) * header_.dtype->unit_bytes : nullptr;
  decode_checked(in, blob_.data() + blob_.size(), header_, chunk, base, check_, kernels_, scratch, out);
}

void RangeDecoder::decode_words_item(size_t chunk, Scratch& scratch) const {
  const Rounding& r = words_->rounding;
  const size_t count = header_.numbers_in_chunk(chunk);
  const u64 start = static_cast<u64>(chunk) << header_.chunk_log2;
  u8* words = scratch.chunk(count * sizeof(u16));
  decode_to(chunk, scratch, words);
  const u64 begin = std::max(first_, start), end = std::min<u64>(last_, start + count);
  const u64 before = r.block == 0 ? 0 : first_ - first_ % r.block;  // the first weight whose normalizer is here
  const bool bad = kernels_.decode_words(reinterpret_cast<const u16*>(words) + (begin - start), static_cast<size_t>(end - begin), begin - before,
                                         words_->normalizers, r, out_ + (begin - first_) * r.unit());
  if (bad) throw CorruptError("a word stands for no number");
}

namespace {

void run(RangeDecoder& decoder, const BlobHeader& h, u64 first, u64 last, int threads) {
  const u64 chunks = first < last ? ((last - 1) >> h.chunk_log2) - (first >> h.chunk_log2) + 1 : 0;
  run_on_threads(static_cast<int>(std::min<u64>(static_cast<u64>(std::max(threads, 1)), chunks)), [&](int) { decoder.work(); });
  decoder.check();
}

}  // namespace

void decode_range(std::span<const u8> blob, const BlobHeader& h, u64 first, u64 last, const u8* base, bool check, int threads, const Kernels& kernels,
                  u8* out) {
  RangeDecoder decoder(blob, h, first, last, base, check, kernels, out);
  run(decoder, h, first, last, threads);
}

void decode_words(std::span<const u8> blob, const BlobHeader& h, u64 first, u64 last, const Words& words, int threads, const Kernels& kernels, u8* out) {
  RangeDecoder decoder(blob, h, first, last, nullptr, false, kernels, out, words);
  run(decoder, h, first, last, threads);
}

void trim_working_memory() { Room::forget_idle(); }

const std::vector<const Kernels*>& usable_kernels() {
  static const std::vector<const Kernels*> usable = [] {
    std::vector<const Kernels*> all;
    for (const Kernels* k : {avx512_kernels(), avx2_kernels(), neon_kernels(), &portable_kernels()})
      if (k) all.push_back(k);
    return all;
  }();
  return usable;
}

const Kernels& kernels_by_name(const char* name) {
  for (const Kernels* k : usable_kernels())
    if (std::strcmp(name, "auto") == 0 || std::strcmp(name, k->name) == 0) return *k;
  throw UnsupportedError(std::string("this processor or build has no codec path named ") + name);
}

}  // namespace netweight
