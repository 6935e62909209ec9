// Whole tensors: header, index, chunks, threads.
#include "blob.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "digest.h"
#include "plane.h"
#include "threads.h"

namespace netweight {

// What a thread needs to encode or decode. Kept from call to call, because its pages cost more to touch again than to hold.
struct Worker {
  Scratch scratch;
  std::unique_ptr<u8[]> memory;
  size_t capacity = 0;

  u8* chunk(size_t room) {
    if (room > capacity) {
      memory.reset(new u8[room]);
      capacity = room;
    }
    return memory.get();
  }
};

namespace {

// ---- chunks ----------------------------------------------------------------------------------------------------------

PlaneShape head_shape(const Dtype& d) {
  if (d.exponent_bits == 0) return {head_bytes(d), PlaneKind::integer, 0, 0};
  int inside = 8 * head_bytes(d) - 1 - d.exponent_bits;
  return {head_bytes(d), PlaneKind::floating, d.exponent_bits, std::min<int>(inside, d.mantissa_bits)};
}

constexpr PlaneShape kTail = {1, PlaneKind::tail, 0, 0};

u8* encode_chunk(const Dtype& d, const u8* in, size_t count, Level level, const Kernels& kernels, Scratch& scratch, u8* out) {
  const int tails = plane_count(d) - 1;
  if (tails == 0) return encode_plane(head_shape(d), in, count, level, kernels, scratch, out);
  u8* head = scratch.planes(count * d.unit_bytes);
  u8* tail[6];
  for (int t = 0; t < tails; t++) tail[t] = head + (2 + static_cast<size_t>(t)) * count;
  (d.unit_bytes == 4 ? kernels.split4 : kernels.split8)(in, count, head, tail);
  out = encode_plane(head_shape(d), head, count, level, kernels, scratch, out);
  for (int t = 0; t < tails; t++) out = encode_plane(kTail, tail[t], count, level, kernels, scratch, out);
  return out;
}

void decode_chunk(const Dtype& d, Reader in, const u8* readable_end, size_t count, const Kernels& kernels, Scratch& scratch, u8* out) {
  const int tails = plane_count(d) - 1;
  if (tails == 0) {
    decode_plane(in, readable_end, head_bytes(d), count, kernels, out);
  } else {
    u8* head = scratch.planes(count * d.unit_bytes);
    decode_plane(in, readable_end, 2, count, kernels, head);
    const u8* tail[6];
    for (int t = 0; t < tails; t++) {
      tail[t] = raw_plane(in, 1, count);  // the usual case: used where it lies
      if (tail[t]) continue;
      u8* to = head + (2 + static_cast<size_t>(t)) * count;
      decode_plane(in, readable_end, 1, count, kernels, to);
      tail[t] = to;
    }
    (d.unit_bytes == 4 ? kernels.join4 : kernels.join8)(head, tail, count, out);
  }
  if (in.at != in.end) throw CorruptError("a chunk holds more bytes than its planes");
}

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

class BorrowedWorkers {
 public:
  explicit BorrowedWorkers(size_t count) {
    std::lock_guard<std::mutex> lock(shelf().guard);
    for (; count > workers_.size() && !shelf().idle.empty(); shelf().idle.pop_back()) workers_.push_back(std::move(shelf().idle.back()));
    while (workers_.size() < count) workers_.push_back(std::make_unique<Worker>());
    for (auto& worker : workers_) worker->scratch.chunks_ahead = count;
  }
  ~BorrowedWorkers() {
    std::lock_guard<std::mutex> lock(shelf().guard);
    for (auto& worker : workers_)
      if (shelf().idle.size() < kMostIdle) shelf().idle.push_back(std::move(worker));
  }
  BorrowedWorkers(const BorrowedWorkers&) = delete;
  BorrowedWorkers& operator=(const BorrowedWorkers&) = delete;
  Worker& operator[](size_t i) { return *workers_[i]; }
  static void forget_idle() {
    std::lock_guard<std::mutex> lock(shelf().guard);
    shelf().idle.clear();
  }

 private:
  static constexpr size_t kMostIdle = 16;
  struct Shelf {
    std::mutex guard;
    std::vector<std::unique_ptr<Worker>> idle;
  };
  static Shelf& shelf() {
    static Shelf* s = new Shelf;  // never destroyed: threads may still encode while the program ends
    return *s;
  }
  std::vector<std::unique_ptr<Worker>> workers_;
};

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
  return static_cast<size_t>(kFixedHeader + 10 * shape.size() + bytes + chunks * (4 + 4096 * static_cast<u64>(plane_count(dtype))));
}

BlobHeader read_header(std::span<const u8> blob) {
  if (blob.size() < kFixedHeader) throw CorruptError("it is shorter than a header (" + megabytes(blob.size()) + ")");
  if (std::memcmp(blob.data(), kMagic, 3) != 0) throw CorruptError("it does not start with the marker NWT");
  if (blob[3] != kVersion) throw UnsupportedError("format version " + std::to_string(blob[3]) + " is newer than this release reads (1)");
  BlobHeader h;
  h.dtype = &dtype_by_code(blob[4]);
  if (blob[5] > static_cast<u8>(Level::max)) throw UnsupportedError("level number " + std::to_string(blob[5]) + " is not known to this release");
  h.level = static_cast<Level>(blob[5]);
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
  const u64 chunks = chunk_count(h.numbers, h.chunk_log2);
  if (chunks > static_cast<u64>(in.end - in.at) / 4) throw CorruptError("the data ends inside the index of chunks");
  const u8* index = in.take(static_cast<size_t>(chunks) * 4, "the index of chunks");
  if (get32(blob.data() + 24) != header_check(blob.data(), static_cast<size_t>(in.at - blob.data())))
    throw CorruptError("the header's checksum does not fit its bytes");
  h.chunk_start.resize(static_cast<size_t>(chunks) + 1);
  h.chunk_start[0] = static_cast<u64>(in.at - blob.data());
  for (size_t c = 0; c < chunks; c++) h.chunk_start[c + 1] = h.chunk_start[c] + get32(index + 4 * c);
  if (h.chunk_start.back() != blob.size())
    throw CorruptError("it has " + megabytes(blob.size()) + " where its index adds up to " + std::to_string(h.chunk_start.back()));
  return h;
}

size_t encode(std::span<const u8> tensor, const Dtype& dtype, const std::vector<u64>& shape, Level level, int chunk_log2, int threads,
              const Kernels& kernels, u8* out) {
  u8* p = out;
  std::memcpy(p, kMagic, 3);
  p[3] = kVersion;
  p[4] = dtype.code;
  p[5] = static_cast<u8>(level);
  p[6] = static_cast<u8>(chunk_log2);
  p[7] = static_cast<u8>(shape.size());
  p = out + kFixedHeader;
  for (u64 d : shape) p = put_varint(p, d);
  u8* index = p;
  const size_t unit = dtype.unit_bytes, step = size_t{1} << chunk_log2;
  const size_t numbers = tensor.size() / unit;
  const size_t chunks = static_cast<size_t>(chunk_count(numbers, chunk_log2));
  u8* payload = index + 4 * chunks;
  auto chunk_of = [&](size_t c) { return tensor.subspan(c * step * unit, std::min(step, numbers - c * step) * unit); };

  XXH3_state_t hash;
  XXH3_128bits_reset(&hash);
  u8* end = payload;
  if (threads <= 1 || chunks < 2) {
    BorrowedWorkers workers(1);
    Scratch& scratch = workers[0].scratch;
    for (size_t c = 0; c < chunks; c++) {
      std::span<const u8> chunk = chunk_of(c);
      kernels.update_digest(&hash, chunk.data(), chunk.size());  // brings the chunk into the cache for the encoder
      u8* start = end;
      end = encode_chunk(dtype, chunk.data(), chunk.size() / unit, level, kernels, scratch, start);
      put32(index + 4 * c, static_cast<u32>(end - start));
    }
  } else {
    // In their order, chunks enter the digest, which brings them into their core's cache. They are encoded side by side, get
    // their places in their order again, and are copied there side by side.
    const size_t room = step * unit + 4096 * static_cast<size_t>(plane_count(dtype));
    BorrowedWorkers workers(static_cast<size_t>(threads));
    Turns hashing, placing;
    parallel_for(chunks, threads, [&](int number, size_t c) {
      std::span<const u8> chunk = chunk_of(c);
      Worker& worker = workers[static_cast<size_t>(number)];
      u8* encoded = worker.chunk(room);
      size_t size = 0;
      u8* place = nullptr;
      hashing.take(c, [] {}, [&] { kernels.update_digest(&hash, chunk.data(), chunk.size()); });
      placing.take(
          c,
          [&] {
            size = static_cast<size_t>(encode_chunk(dtype, chunk.data(), chunk.size() / unit, level, kernels, worker.scratch, encoded) - encoded);
          },
          [&] {
            put32(index + 4 * c, static_cast<u32>(size));
            place = end;
            end += size;
          });
      if (place) std::memcpy(place, encoded, size);
    });
  }
  XXH128_canonical_t digest;
  XXH128_canonicalFromHash(&digest, XXH3_128bits_digest(&hash));
  std::memcpy(out + 8, digest.digest, 16);
  put32(out + 24, header_check(out, static_cast<size_t>(payload - out)));
  return static_cast<size_t>(end - out);
}

RangeDecoder::RangeDecoder(std::span<const u8> blob, const BlobHeader& header, u64 first, u64 last, const Kernels& kernels, u8* out,
                           std::optional<Words> words)
    : blob_(blob),
      header_(header),
      first_(first),
      last_(last),
      kernels_(kernels),
      out_(out),
      words_(words),
      end_(first < last ? static_cast<size_t>((last - 1) >> header.chunk_log2) + 1 : 0),
      next_(first < last ? static_cast<size_t>(first >> header.chunk_log2) : 0) {}

void RangeDecoder::work() noexcept {
  try {
    BorrowedWorkers workers(1);
    for (size_t chunk; (chunk = next_++) < end_;) decode_item(chunk, workers[0]);
  } catch (...) {
    std::lock_guard<std::mutex> lock(guard_);
    if (!failure_) failure_ = std::current_exception();
    stop();
  }
}

void RangeDecoder::check() const {
  if (failure_) std::rethrow_exception(failure_);
}

void RangeDecoder::decode_item(size_t chunk, Worker& worker) const {
  if (words_) return decode_words_item(chunk, worker);
  const size_t unit = header_.dtype->unit_bytes, count = header_.numbers_in_chunk(chunk);
  const u64 start = static_cast<u64>(chunk) << header_.chunk_log2;
  const u8* readable_end = blob_.data() + blob_.size();
  Reader in{blob_.data() + header_.chunk_start[chunk], blob_.data() + header_.chunk_start[chunk + 1]};
  if (start >= first_ && start + count <= last_) {
    decode_chunk(*header_.dtype, in, readable_end, count, kernels_, worker.scratch, out_ + (start - first_) * unit);
    return;
  }
  u8* whole = worker.chunk(count * unit);
  decode_chunk(*header_.dtype, in, readable_end, count, kernels_, worker.scratch, whole);
  const u64 begin = std::max(first_, start), end = std::min<u64>(last_, start + count);
  std::memcpy(out_ + (begin - first_) * unit, whole + (begin - start) * unit, static_cast<size_t>(end - begin) * unit);
}

void RangeDecoder::decode_words_item(size_t chunk, Worker& worker) const {
  const Rounding& r = words_->rounding;
  const size_t count = header_.numbers_in_chunk(chunk);
  const u64 start = static_cast<u64>(chunk) << header_.chunk_log2;
  u8* words = worker.chunk(count * sizeof(u16));
  Reader in{blob_.data() + header_.chunk_start[chunk], blob_.data() + header_.chunk_start[chunk + 1]};
  decode_chunk(*header_.dtype, in, blob_.data() + blob_.size(), count, kernels_, worker.scratch, words);
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

void decode_range(std::span<const u8> blob, const BlobHeader& h, u64 first, u64 last, int threads, const Kernels& kernels, u8* out) {
  RangeDecoder decoder(blob, h, first, last, kernels, out);
  run(decoder, h, first, last, threads);
}

void decode_words(std::span<const u8> blob, const BlobHeader& h, u64 first, u64 last, const Words& words, int threads, const Kernels& kernels, u8* out) {
  RangeDecoder decoder(blob, h, first, last, kernels, out, words);
  run(decoder, h, first, last, threads);
}

void trim_working_memory() { BorrowedWorkers::forget_idle(); }

bool digest_matches(const BlobHeader& header, std::span<const u8> tensor) {
  XXH128_canonical_t digest;
  XXH128_canonicalFromHash(&digest, XXH3_128bits(tensor.data(), tensor.size()));
  return std::memcmp(digest.digest, header.digest, 16) == 0;
}

const std::vector<const Kernels*>& usable_kernels() {
  static const std::vector<const Kernels*> usable = [] {
    std::vector<const Kernels*> all;
    for (const Kernels* k : {avx512_kernels(), avx2_kernels(), &portable_kernels()})
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
