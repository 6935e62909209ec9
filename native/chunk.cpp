// Chunks: their planes, and the transforms before them.
#include "chunk.h"

#include <algorithm>

#include "difference.h"

namespace netweight {
namespace {

PlaneShape head_shape(const Dtype& d) {
  if (d.exponent_bits == 0) return {head_bytes(d), PlaneKind::integer, 0, 0};
  int inside = 8 * head_bytes(d) - 1 - d.exponent_bits;
  return {head_bytes(d), PlaneKind::floating, d.exponent_bits, std::min<int>(inside, d.mantissa_bits)};
}

constexpr PlaneShape kTail = {1, PlaneKind::tail, 0, 0};

// ---- delta: every number less the one before -------------------------------------------------------------------------

template <typename T>
void take_deltas(const u8* in, size_t count, u8* out) {
  T before = 0;
  for (size_t i = 0; i < count; i++) {
    T v;
    std::memcpy(&v, in + i * sizeof v, sizeof v);
    const T step = static_cast<T>(v - before);
    std::memcpy(out + i * sizeof v, &step, sizeof v);
    before = v;
  }
}

template <typename T>
void add_deltas(u8* numbers, size_t count) {
  T sum = 0;
  for (size_t i = 0; i < count; i++) {
    T step;
    std::memcpy(&step, numbers + i * sizeof step, sizeof step);
    sum = static_cast<T>(sum + step);
    std::memcpy(numbers + i * sizeof sum, &sum, sizeof sum);
  }
}

// Do numbers mostly go on by the same step? Looked at where the samples of `probe` lie.
template <typename T>
bool goes_on(const u8* in, size_t count) {
  size_t same = 0;
  for (size_t i = 0; i < kSamples; i++) {
    T v[3];
    std::memcpy(v, in + sample_place(i, count - 2) * sizeof(T), sizeof v);
    same += static_cast<T>(v[1] - v[0]) == static_cast<T>(v[2] - v[1]);
  }
  return 2 * same >= kSamples;
}

bool goes_on(const Dtype& d, const u8* in, size_t count) {
  if (d.exponent_bits || d.unit_bytes == 1 || count < 256) return false;
  return by_width(d.unit_bytes, [&](auto number) { return goes_on<decltype(number)>(in, count); });
}

}  // namespace

// ---- planes ----------------------------------------------------------------------------------------------------------

u8* encode_planes(const Dtype& d, const u8* in, size_t count, Level level, const Kernels& kernels, Scratch& scratch, u8* out, int nesting, bool inner,
                  bool* cpu_modes) {
  const int tails = plane_count(d) - 1;
  const auto plane = [&](PlaneShape shape, const u8* numbers) {
    shape.inner = inner;
    u8* end = encode_plane(shape, numbers, count, level, kernels, scratch, out, nesting);
    if (cpu_modes) *cpu_modes |= *out > static_cast<u8>(Mode::wide_rans);
    out = end;
  };
  if (tails == 0) {
    plane(head_shape(d), in);
    return out;
  }
  const Room planes(inner ? count * d.unit_bytes : 0);  // the scratch's are those of the chunk around
  u8* head = inner ? planes.get() : scratch.planes(count * d.unit_bytes);
  u8* tail[6];
  for (int t = 0; t < tails; t++) tail[t] = head + (2 + static_cast<size_t>(t)) * count;
  (d.unit_bytes == 4 ? kernels.split4 : kernels.split8)(in, count, head, tail);
  plane(head_shape(d), head);
  for (int t = 0; t < tails; t++) plane(kTail, tail[t]);
  return out;
}

void decode_planes(const Dtype& d, Reader& in, const u8* readable_end, size_t count, const Kernels& kernels, Scratch& scratch, u8* out, int nesting,
                   ChunkCheck* check) {
  const int tails = plane_count(d) - 1;
  if (tails == 0) return decode_plane(in, readable_end, head_bytes(d), count, kernels, out, nesting, check);
  u8* head = scratch.planes(count * d.unit_bytes);
  decode_plane(in, readable_end, 2, count, kernels, head, nesting);
  const u8* tail[6] = {};
  for (int t = 0; t < tails; t++) {
    tail[t] = raw_plane(in, 1, count);  // the usual case: used where it lies
    if (tail[t]) continue;
    u8* to = head + (2 + static_cast<size_t>(t)) * count;
    decode_plane(in, readable_end, 1, count, kernels, to, nesting);
    tail[t] = to;
  }
  const size_t slab = kSlab / d.unit_bytes;
  for (size_t start = 0; start < count; start += slab) {
    const size_t some = std::min(slab, count - start);
    (d.unit_bytes == 4 ? kernels.join4 : kernels.join8)(head + 2 * start, tail, some, out);
    for (int t = 0; t < tails; t++) tail[t] += some;
    out += some * d.unit_bytes;
    if (check) check->up_to(out);
  }
}

// ---- chunks ----------------------------------------------------------------------------------------------------------

namespace {

// Room for a trial; nested planes need more than their bytes.
size_t trial_bytes(const Dtype& d, size_t count) { return 2 * count * d.unit_bytes + (size_t{1} << 18); }

u8* keep_smaller(const u8* trial, const u8* trial_end, u8* out, u8* end, bool& cpu_modes) {
  const size_t size = static_cast<size_t>(trial_end - trial);
  if (size >= static_cast<size_t>(end - out)) return end;
  std::memcpy(out, trial, size);
  cpu_modes = true;
  return out + size;
}

// Planes, or what is left of wider numbers when their likeliest value is split off.
u8* encode_body(const Dtype& d, const u8* in, size_t count, Level level, const Kernels& kernels, Scratch& scratch, u8* out, bool& cpu_modes) {
  u8* end = encode_planes(d, in, count, level, kernels, scratch, out, kMaxNesting, false, &cpu_modes);
  if (d.unit_bytes < 4) return end;
  const Probe found = probe(in, count, d.unit_bytes);
  if (!found.often()) return end;
  const auto trial = padded(trial_bytes(d, count));
  trial[0] = static_cast<u8>(Transform::sparse);
  const u8* trial_end = encode_sparse(in, count, d.unit_bytes, found.value, level, kernels, scratch, trial.get() + 1, kMaxNesting,
                                      [&](const u8* rest, size_t left, u8* to) {
                                        return encode_planes(d, rest, left, level, kernels, scratch, to, kMaxNesting - 1, true);
                                      });
  return keep_smaller(trial.get(), trial_end, out, end, cpu_modes);
}

void decode_body(const Dtype& d, Reader& in, const u8* readable_end, size_t count, const Kernels& kernels, Scratch& scratch, u8* out, ChunkCheck* check) {
  if (d.unit_bytes < 4 || in.at == in.end || *in.at != static_cast<u8>(Transform::sparse))
    return decode_planes(d, in, readable_end, count, kernels, scratch, out, kMaxNesting, check);
  in.at++;
  decode_sparse(in, readable_end, d.unit_bytes, count, kernels, out, kMaxNesting,
                [&](size_t left, u8* rest) { decode_planes(d, in, readable_end, left, kernels, scratch, rest, kMaxNesting - 1); });
}

// Differences are the planes of an integer type of the same size.
Dtype unsigned_of(const Dtype& d) {
  Dtype plain = d;
  plain.exponent_bits = plain.mantissa_bits = 0;
  return plain;
}

// Steps of numbers of 16 bits in classes of about equal size, each with planes of its own.
u8* encode_classes(const Dtype& d, const u8* steps, const u8* base, size_t count, Level level, const Kernels& kernels, Scratch& scratch, u8* out) {
  size_t below[257] = {};
  for (size_t i = 0; i < count; i++) below[ClassOf::magnitude(base + 2 * i) + 1]++;
  for (int v = 0; v < 256; v++) below[v + 1] += below[v];
  u8* thresholds = out;
  for (size_t k = 1; k < kClasses; k++)
    *out++ = static_cast<u8>(std::find_if(below, below + 255, [&](size_t n) { return kClasses * n >= k * count; }) - below);
  const ClassOf class_of(thresholds);
  const auto sorted = padded(2 * count);
  u8 *begin[kClasses + 1], *next[kClasses];
  for (int k = 0; k < kClasses; k++) begin[k] = next[k] = sorted.get() + 2 * (k ? below[thresholds[k - 1]] : 0);
  begin[kClasses] = sorted.get() + 2 * count;
  for (size_t i = 0; i < count; i++) {
    u8*& to = next[class_of(base + 2 * i)];
    std::memcpy(to, steps + 2 * i, 2);
    to += 2;
  }
  for (int k = 0; k < kClasses; k++) {
    const size_t some = static_cast<size_t>(next[k] - begin[k]) / 2;
    if (some) out = encode_planes(d, begin[k], some, level, kernels, scratch, out, kMaxNesting, true);
  }
  return out;
}

// Numbers from steps, which `fetch` puts in their place, while they are in the nearest cache.
template <typename Fetch>
void add_steps(const Dtype& d, const u8* base, size_t count, const Kernels& kernels, u8* out, ChunkCheck* check, Fetch fetch) {
  const size_t unit = d.unit_bytes, slab = kSlab / unit;
  for (size_t start = 0; start < count; start += slab, base += slab * unit, out += slab * unit) {
    const size_t some = std::min(slab, count - start);
    fetch(base, some, out);
    kernels.add(base, some, d.unit_bytes, d.exponent_bits != 0, out);
    if (check) check->up_to(out + some * unit);
  }
}

void decode_difference(const Dtype& d, Reader& in, const u8* readable_end, const u8* base, size_t count, const Kernels& kernels, Scratch& scratch, u8* out,
                       ChunkCheck* check) {
  decode_planes(unsigned_of(d), in, readable_end, count, kernels, scratch, out, kMaxNesting);
  add_steps(d, base, count, kernels, out, check, [](const u8*, size_t, u8*) {});
}

void decode_classes(const Dtype& d, Reader& in, const u8* readable_end, const u8* base, size_t count, const Kernels& kernels, Scratch& scratch, u8* out,
                    ChunkCheck* check) {
  const u8* thresholds = in.take(kClasses - 1, "thresholds of classes");
  if (!std::is_sorted(thresholds, thresholds + kClasses - 1)) throw CorruptError("thresholds of classes do not ascend");
  size_t sizes[kClasses];
  kernels.class_sizes(base, count, thresholds, sizes);
  const auto sorted = padded(2 * count);
  const u8* steps[kClasses];
  u8* to = sorted.get();
  for (int k = 0; k < kClasses; to += 2 * sizes[k++]) {
    steps[k] = to;
    if (sizes[k]) decode_planes(unsigned_of(d), in, readable_end, sizes[k], kernels, scratch, to, kMaxNesting);
  }
  add_steps(d, base, count, kernels, out, check, [&](const u8* of_base, size_t some, u8* where) { kernels.interleave(of_base, some, thresholds, steps, where); });
}

constexpr size_t kLeastOfClasses = size_t{1} << 14;  // numbers; below this they do not pay

// ---- runs of two values, as of masks ---------------------------------------------------------------------------------

constexpr size_t kLongest = 65535, kLeastOfRuns = 64;  // the longest run, and how long runs are on average at least
const Dtype& pairs_type() { return dtype_by_code(14); }

// Pairs of lengths, of the first value and of the second; empty when there are other values or runs are too short.
std::vector<u32> runs_of(const u8* in, size_t count, u8* values) {
  std::vector<u32> pairs;
  const u8* other = std::find_if(in, in + count, [&](u8 v) { return v != in[0]; });
  if (other == in + count) return pairs;
  values[0] = in[0];
  values[1] = *other;
  for (size_t at = 0; at < count;) {
    u32 length[2];
    for (int k = 0; k < 2; k++) {
      const size_t most = std::min(kLongest, count - at), start = at;
      while (at - start < most && in[at] == values[k]) at++;
      length[k] = static_cast<u32>(at - start);
    }
    pairs.push_back(length[0] | length[1] << 16);
    if (!pairs.back() || 2 * kLeastOfRuns * pairs.size() > count) return {};
  }
  return pairs;
}

void decode_runs(Reader& in, const u8* readable_end, size_t count, const Kernels& kernels, Scratch& scratch, u8* out) {
  const u8* values = in.take(2, "runs");
  const size_t size = in.word24("runs");
  if (size == 0 || 4 * size > count) throw CorruptError("a chunk has an impossible number of runs");
  const auto pairs = padded(4 * size);
  decode_chunk({&pairs_type(), true, false}, in, readable_end, nullptr, size, kernels, scratch, pairs.get(), nullptr);
  in.at = in.end;
  for (size_t i = 0; i < 2 * size; i++) {
    const size_t length = pairs[2 * i] | static_cast<size_t>(pairs[2 * i + 1]) << 8;
    if (length > count) throw CorruptError("runs are not as long as their chunk");
    std::memset(out, values[i % 2], length);
    out += length;
    count -= length;
  }
  if (count) throw CorruptError("runs are not as long as their chunk");
}

}  // namespace

u8* encode_chunk(const ChunkStyle& style, const u8* in, const u8* base, size_t count, Level level, const Kernels& kernels, Scratch& scratch, u8* out,
                 bool& cpu_modes) {
  const Dtype& d = *style.dtype;
  if (!style.cpu_modes) return encode_planes(d, in, count, level, kernels, scratch, out, kFlat, false);
  u8* end = encode_body(d, in, count, level, kernels, scratch, out, cpu_modes);
  if (goes_on(d, in, count)) {
    const auto deltas = padded(count * d.unit_bytes), trial = padded(trial_bytes(d, count));
    by_width(d.unit_bytes, [&](auto number) { take_deltas<decltype(number)>(in, count, deltas.get()); });
    trial[0] = static_cast<u8>(Transform::delta);
    bool ignored = false;
    end = keep_smaller(trial.get(), encode_body(d, deltas.get(), count, level, kernels, scratch, trial.get() + 1, ignored), out, end, cpu_modes);
  }
  if (d.unit_bytes == 1 && count >= 1024 && probe(in, count, 1).distinct <= 2) {
    u8 values[2];
    if (const std::vector<u32> pairs = runs_of(in, count, values); !pairs.empty()) {
      const auto trial = padded(trial_bytes(d, count));
      trial[0] = static_cast<u8>(Transform::runs);
      std::memcpy(trial.get() + 1, values, 2);
      bool ignored = false;
      u8* trial_end = encode_chunk({&pairs_type(), true, false}, reinterpret_cast<const u8*>(pairs.data()), nullptr, pairs.size(), level, kernels, scratch,
                                   put24(trial.get() + 3, static_cast<u32>(pairs.size())), ignored);
      end = keep_smaller(trial.get(), trial_end, out, end, cpu_modes);
    }
  }
  if (base) {
    const auto steps = padded(count * d.unit_bytes), trial = padded(trial_bytes(d, count));
    kernels.subtract(in, base, count, d.unit_bytes, d.exponent_bits != 0, steps.get());
    trial[0] = static_cast<u8>(Transform::difference);
    u8* trial_end = encode_planes(unsigned_of(d), steps.get(), count, level, kernels, scratch, trial.get() + 1, kMaxNesting, true);
    end = keep_smaller(trial.get(), trial_end, out, end, cpu_modes);
    if (*out == trial[0] && d.unit_bytes == 2 && d.exponent_bits && count >= kLeastOfClasses) {
      trial[0] = static_cast<u8>(Transform::classes);
      trial_end = encode_classes(unsigned_of(d), steps.get(), base, count, level, kernels, scratch, trial.get() + 1);
      end = keep_smaller(trial.get(), trial_end, out, end, cpu_modes);
    }
  }
  return end;
}

void decode_chunk(const ChunkStyle& style, Reader in, const u8* readable_end, const u8* base, size_t count, const Kernels& kernels, Scratch& scratch,
                  u8* out, ChunkCheck* check) {
  const Dtype& d = *style.dtype;
  const u8 first = in.at == in.end ? 0 : *in.at;
  if (!style.cpu_modes) {
    decode_planes(d, in, readable_end, count, kernels, scratch, out, kFlat, check);
  } else if (first == static_cast<u8>(Transform::delta) && d.unit_bytes > 1) {
    in.at++;
    decode_body(d, in, readable_end, count, kernels, scratch, out, nullptr);
    by_width(d.unit_bytes, [&](auto number) { add_deltas<decltype(number)>(out, count); });
  } else if (first == static_cast<u8>(Transform::runs) && d.unit_bytes == 1) {
    in.at++;
    decode_runs(in, readable_end, count, kernels, scratch, out);
  } else if (style.has_base && (first == static_cast<u8>(Transform::difference) || (first == static_cast<u8>(Transform::classes) && d.unit_bytes == 2))) {
    in.at++;
    (first == static_cast<u8>(Transform::classes) ? decode_classes : decode_difference)(d, in, readable_end, base, count, kernels, scratch, out, check);
  } else {
    decode_body(d, in, readable_end, count, kernels, scratch, out, check);
  }
  if (in.at != in.end) throw CorruptError("a chunk holds more bytes than its planes");
}

}  // namespace netweight
