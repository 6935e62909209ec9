// libFuzzer target: bytes that claim to be a blob, through every set of kernels this processor has. They must be refused, or
// decode to the same bytes everywhere; a part of a tensor must equal that part of the whole; and what was decoded must be
// encoded to the same blob everywhere, which gives it back. Elements of two bytes are also taken for the words of a lossy blob,
// and decoded bytes for weights to be rounded: with the same results everywhere. Sanitizers watch the memory.
//
// Blobs that hold differences get a base made of the input, and what was decoded is encoded against it. What came from a blob
// that GPU kernels could decode is encoded for them, too.
//
// The first input byte says how: bit 0 makes index and header check fit first, so that planes are reached; bits 1 and up
// choose a part. The rest is the blob, copied to a buffer of its size so that reading on is noticed.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>

#include "blob.h"
#include "digest.h"

using namespace netweight;

namespace {

constexpr u64 kLargest = u64{1} << 22;  // tensors larger than this are left alone: they only cost time
constexpr u64 kLargestEncoded = u64{1} << 18;

// Makes the last chunk end where the blob ends and the header check fit, as far as there is a header.
void repair(std::vector<u8>& blob) {
  if (blob.size() < kFixedHeader) return;
  std::memcpy(blob.data(), kMagic, 3);
  blob[3] = kVersion;
  size_t at = kFixedHeader;
  unsigned __int128 elements = 1;
  for (int i = 0; i < blob[7]; i++) {
    u64 value = 0;
    for (int shift = 0;; shift += 7) {
      if (at == blob.size() || shift == 63) return;
      value |= static_cast<u64>(blob[at] & 127) << shift;
      if (blob[at++] < 128) break;
    }
    elements *= value;
    if (elements > kLargest) return;
  }
  const Dtype* dtype;
  try {
    dtype = &dtype_by_code(blob[4]);
  } catch (const UnsupportedError&) {
    return;
  }
  if (blob[6] > kMaxChunkLog2) return;
  const u64 numbers = static_cast<u64>(elements) * dtype->bits / 8 / dtype->unit_bytes;
  const u64 chunks = (numbers + (u64{1} << blob[6]) - 1) >> blob[6];
  if (blob[5] & kHasBase) at += 16;
  if (at > blob.size() || chunks > (blob.size() - at) / 12) return;
  const size_t checks = at + 4 * static_cast<size_t>(chunks), end = checks + 8 * static_cast<size_t>(chunks);
  u64 others = 0;
  for (size_t i = at; i + 4 < checks; i += 4) others += get32(blob.data() + i);
  if (chunks && others <= blob.size() - end) put32(blob.data() + checks - 4, static_cast<u32>(blob.size() - end - others));
  XXH128_canonical_t digest;
  XXH128_canonicalFromHash(&digest, XXH3_128bits(blob.data() + checks, end - checks));
  std::memcpy(blob.data() + 8, digest.digest, 16);
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, blob.data(), 24);
  XXH3_64bits_update(&state, blob.data() + kFixedHeader, end - kFixedHeader);
  put32(blob.data() + 24, static_cast<u32>(XXH3_64bits_digest(&state)));
}

[[noreturn]] void fail(const char* what, const Kernels& kernels) {
  std::fprintf(stderr, "%s (%s)\n", what, kernels.name);
  std::abort();
}

// The base of a blob: bytes that repeat those of the input.
std::vector<u8> base_of(std::span<const u8> blob, const BlobHeader& h) {
  std::vector<u8> base(h.has_base ? static_cast<size_t>(h.nbytes) : 0);
  for (size_t i = 0; i < base.size(); i++) base[i] = blob[i % blob.size()];
  return base;
}

// The bytes of numbers [first, last), or nothing when the blob is refused.
std::optional<std::vector<u8>> decoded(std::span<const u8> blob, const BlobHeader& h, u64 first, u64 last, const std::vector<u8>& base, bool check,
                                       int threads, const Kernels& kernels) {
  std::vector<u8> out(static_cast<size_t>((last - first) * h.dtype->unit_bytes));
  try {
    decode_range(blob, h, first, last, h.has_base ? base.data() : nullptr, check, threads, kernels, out.data());
  } catch (const CorruptError&) {
    return std::nullopt;
  }
  return out;
}

std::vector<u8> encoded(const BlobHeader& h, std::span<const u8> tensor, const std::vector<u8>& base, int threads, const Kernels& kernels) {
  const size_t bound = encode_bound(*h.dtype, h.shape, h.chunk_log2);
  const std::unique_ptr<u8[]> out(new u8[bound]);
  const Encoding how{h.level, h.chunk_log2, !h.has_base && !h.cpu_modes, h.has_base ? base.data() : nullptr};
  const size_t size = encode(tensor, *h.dtype, h.shape, how, threads, kernels, out.get());
  return {out.get(), out.get() + size};
}

// Some way to round, chosen by the first input byte.
Rounding some_rounding(u8 choice) {
  constexpr u64 kBlocks[] = {0, 1, 7, 64};
  return {static_cast<FloatType>(choice % 3), choice % 7, kBlocks[choice / 3 % 4], choice % 3 == 0 && choice > 127, 1, 3};
}

// Weights [first, last) from words, or nothing when they are refused.
std::optional<std::vector<u8>> weights(std::span<const u8> blob, const BlobHeader& h, u64 first, u64 last, const Rounding& r, const Kernels& kernels) {
  std::vector<u8> normalizers(r.block && first < last ? (last - 1) / r.block - first / r.block + 1 : 0);
  for (size_t i = 0; i < normalizers.size(); i++) normalizers[i] = static_cast<u8>(37 * (r.block ? first / r.block + i : 0));
  std::vector<u8> out(static_cast<size_t>(last - first) * r.unit());
  try {
    decode_words(blob, h, first, last, {r, normalizers.data()}, 2, kernels, out.data());
  } catch (const CorruptError&) {
    return std::nullopt;
  }
  return out;
}

void check_words(std::span<const u8> blob, const BlobHeader& h, u64 first, u64 last, const Rounding& r) {
  const auto whole = weights(blob, h, 0, h.numbers, r, portable_kernels());
  for (const Kernels* kernels : usable_kernels()) {
    if (weights(blob, h, 0, h.numbers, r, *kernels) != whole) fail("kernels make different weights of words", *kernels);
    const auto part = weights(blob, h, first, last, r, *kernels);
    if (whole && (!part || !std::equal(part->begin(), part->end(), whole->data() + first * r.unit()))) fail("some weights differ from the whole", *kernels);
  }
}

struct RoundedWeights {
  std::vector<u16> words;
  std::vector<u8> normalizers, values;
  std::vector<u64> escapes;
  double worst;
  bool operator==(const RoundedWeights&) const = default;
};

RoundedWeights rounded(std::span<const u8> bytes, const Rounding& r, const Kernels& kernels) {
  const size_t count = bytes.size() / r.unit();
  RoundedWeights found{std::vector<u16>(count), std::vector<u8>(r.block ? (count + r.block - 1) / r.block : 0), std::vector<u8>(count * r.unit()), {}, 0};
  found.worst = kernels.round_weights(bytes.data(), count, r, found.words.data(), found.normalizers.data(), found.values.data(), found.escapes);
  return found;
}

void check_rounding(std::span<const u8> bytes, const Rounding& r) {
  const RoundedWeights expected = rounded(bytes, r, portable_kernels());
  if (expected.worst != expected.worst) fail("a change is no number", portable_kernels());
  for (const Kernels* kernels : usable_kernels())
    if (rounded(bytes, r, *kernels) != expected) fail("kernels round differently", *kernels);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const u8* data, size_t size) {
  if (size == 0) return 0;
  std::vector<u8> bytes(data + 1, data + size);
  if (data[0] & 1) repair(bytes);
  const std::unique_ptr<u8[]> exact(new u8[bytes.size()]);
  if (!bytes.empty()) std::memcpy(exact.get(), bytes.data(), bytes.size());
  const std::span<const u8> blob(exact.get(), bytes.size());
  BlobHeader h;
  try {
    h = read_header(blob);
  } catch (const CorruptError&) {
    return 0;
  } catch (const UnsupportedError&) {
    return 0;
  }
  if (h.nbytes > kLargest) return 0;
  const u64 first = h.numbers * (data[0] >> 1 & 7) / 8, last = first + (h.numbers - first) * (data[0] >> 4) / 16;
  const std::vector<u8> base = base_of(blob, h);
  const auto whole = decoded(blob, h, 0, h.numbers, base, false, 1, portable_kernels());
  for (const Kernels* kernels : usable_kernels()) {
    if (decoded(blob, h, 0, h.numbers, base, false, 1, *kernels) != whole) fail("kernels disagree", *kernels);
    const auto part = decoded(blob, h, first, last, base, false, 2, *kernels);
    if (!whole) continue;  // a part of a damaged blob may be sound
    if (!part) fail("a part is refused though the whole is sound", *kernels);
    const u8* from = whole->data() + first * h.dtype->unit_bytes;
    if (!std::equal(part->begin(), part->end(), from)) fail("a part differs from the whole", *kernels);
  }
  const Rounding rounding = some_rounding(data[0]);
  if (h.dtype->unit_bytes == 2 && !h.has_base) check_words(blob, h, first, last, rounding);
  if (!whole || h.nbytes > kLargestEncoded) return 0;
  check_rounding(*whole, rounding);
  const std::vector<u8> again = encoded(h, *whole, base, 1, portable_kernels());
  for (const Kernels* kernels : usable_kernels()) {
    if (encoded(h, *whole, base, 1 + data[0] % 3, *kernels) != again) fail("kernels encode differently", *kernels);
    if (decoded(again, read_header(again), 0, h.numbers, base, true, 1, *kernels) != whole) fail("a tensor does not come back", *kernels);
  }
  return 0;
}
