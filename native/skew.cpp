// Planes of skewed data, in modes of their own: one value split off, a palette, bytes apart, symbols below a bit.
#include <algorithm>

#include "plane.h"

namespace netweight {
namespace {

constexpr size_t kMaxPalette = 256;
constexpr PlaneShape kNibbles = {1, PlaneKind::integer, 0, 0, true};

// The values of two-byte elements, ascending; none when they are more than a palette holds.
std::vector<u16> values_of(const u8* in, size_t count) {
  std::vector<u8> seen(size_t{1} << 16);
  std::vector<u16> values;
  for (size_t i = 0; i < count; i++) {
    u16 v;
    std::memcpy(&v, in + 2 * i, 2);
    if (seen[v]) continue;
    if (values.size() == kMaxPalette) return {};
    seen[v] = 1;
    values.push_back(v);
  }
  std::sort(values.begin(), values.end());
  return values;
}

// Set bits in the upper halves of eight bytes; not every processor counts bits by an instruction.
size_t marks_of(u64 nibbles) {
  const u64 pairs = (nibbles >> 4 & 0x0505050505050505ull) + (nibbles >> 5 & 0x0505050505050505ull);
  return static_cast<size_t>(((pairs & 0x0303030303030303ull) + (pairs >> 2 & 0x0303030303030303ull)) * 0x0101010101010101ull >> 56);
}

}  // namespace

Probe probe(const u8* in, size_t count, int unit) {
  const size_t width = static_cast<size_t>(unit);
  const auto look = [&](size_t sampled) {
    u64 v[kMoreSamples];
    std::memset(v, 0, sampled * sizeof *v);
    for (size_t i = 0; i < sampled; i++) std::memcpy(&v[i], in + sample_place(i, count) * width, width);
    std::sort(v, v + sampled);
    Probe found{v[0], sampled, 0, 0, false};
    for (size_t i = 0, run = 0; i < sampled; i++) {
      run = i && v[i] == v[i - 1] ? run + 1 : 1;
      found.distinct += run == 1;
      if (run > found.occurrences) found.occurrences = run, found.value = v[i];
    }
    return found;
  };
  Probe found = look(std::min(kSamples, count));
  if (unit == 2 && found.few(2)) {  // dense weights, too, repeat themselves now and then
    const Probe more = look(std::min(kMoreSamples, count));
    found.varied = 2 * more.distinct > more.sampled;
  }
  return found;
}

// Numbers that are not the value go to `rest`, a mark for each into the upper half of a byte for four. Returns how many there are.
template <typename Number>
static size_t split_off(const u8* in, size_t count, u64 value, u8* nibbles, u8* rest) {
  size_t left = 0;
  for (size_t group = 0; group < count; group += 4) {
    u32 marks = 0;
    for (size_t i = group; i < std::min(group + 4, count); i++) {
      Number v;
      std::memcpy(&v, in + i * sizeof v, sizeof v);
      std::memcpy(rest + left * sizeof v, &v, sizeof v);
      left += v != static_cast<Number>(value);
      marks |= static_cast<u32>(v != static_cast<Number>(value)) << (4 + i - group);
    }
    nibbles[group / 4] = static_cast<u8>(marks);
  }
  return left;
}

u8* encode_sparse(const u8* in, size_t count, int unit, u64 value, Level level, const Kernels& kernels, Scratch& scratch, u8* out, int nesting,
                  const std::function<u8*(const u8* rest, size_t count, u8* out)>& write_rest) {
  const size_t width = static_cast<size_t>(unit), groups = (count + 3) / 4;
  const auto nibbles = padded(groups), rest = padded(count * width);
  const size_t left = by_width(unit, [&](auto number) { return split_off<decltype(number)>(in, count, value, nibbles.get(), rest.get()); });
  std::memcpy(out, &value, width);
  out = encode_plane(kNibbles, nibbles.get(), groups, level, kernels, scratch, out + width, nesting - 1);
  return left ? write_rest(rest.get(), left, out) : out;
}

void decode_sparse(Reader& in, const u8* readable_end, int unit, size_t count, const Kernels& kernels, u8* out, int nesting,
                   const std::function<void(size_t count, u8* rest)>& read_rest) {
  const u8* value = in.take(static_cast<size_t>(unit), "a sparse plane");
  const size_t groups = (count + 3) / 4;
  const auto nibbles = padded(groups);
  decode_plane(in, readable_end, 1, groups, kernels, nibbles.get(), nesting - 1);
  size_t left = 0, i = 0;
  u64 any = 0;
  for (u64 eight; i + 8 <= groups; i += 8) {
    std::memcpy(&eight, nibbles.get() + i, 8);
    any |= eight;
    left += marks_of(eight);
  }
  any |= any >> 32;
  any |= any >> 16;
  any |= any >> 8;
  for (; i < groups; i++) {
    any |= nibbles[i];
    left += marks_of(nibbles[i]);
  }
  if (any & 15 || (count % 4 && nibbles[groups - 1] >> (4 + count % 4))) throw CorruptError("a sparse plane marks elements that it does not have");
  const auto rest = padded(left * static_cast<size_t>(unit));
  if (left) read_rest(left, rest.get());
  kernels.spread(nibbles.get(), rest.get(), count, unit, value, out);
}

void decode_palette(Reader& in, const u8* readable_end, size_t count, const Kernels& kernels, u8* out, int nesting) {
  const size_t size = in.byte("a palette") + size_t{1};
  const u8* values = in.take(2 * size, "a palette");
  u16 palette[kMaxPalette] = {};
  std::memcpy(palette, values, 2 * size);
  const auto index = padded(count);
  decode_plane(in, readable_end, 1, count, kernels, index.get(), nesting - 1);
  u8 largest = 0;
  for (size_t i = 0; i < count; i++) largest = std::max(largest, index[i]);
  if (largest >= size) throw CorruptError("a palette lacks a value");
  kernels.recall(index.get(), count, palette, size, out);
}

void decode_halves(Reader& in, const u8* readable_end, size_t count, const Kernels& kernels, u8* out, int nesting) {
  const auto high = padded(count), low = padded(count);
  decode_plane(in, readable_end, 1, count, kernels, high.get(), nesting - 1);
  decode_plane(in, readable_end, 1, count, kernels, low.get(), nesting - 1);
  for (size_t i = 0; i < count; i++) {
    out[2 * i] = low[i];
    out[2 * i + 1] = high[i];
  }
}

u8* encode_skewed(const PlaneShape& shape, const Probe& found, const u8* in, size_t count, Level level, const Kernels& kernels, Scratch& scratch, u8* out,
                  int nesting) {
  // The bytes of what a sparse plane left may have a likeliest value of their own, which may be split off.
  const PlaneShape part = {1, PlaneKind::integer, 0, 0, true};
  if (shape.unit == 2 && found.few(2)) {
    if (const std::vector<u16> values = values_of(in, count); !values.empty()) {
      const auto index = padded(count);
      std::vector<u8> of(size_t{1} << 16);
      for (size_t i = 0; i < values.size(); i++) of[values[i]] = static_cast<u8>(i);
      for (size_t i = 0; i < count; i++) index[i] = of[static_cast<size_t>(in[2 * i] | in[2 * i + 1] << 8)];
      *out++ = static_cast<u8>(Mode::palette);
      *out++ = static_cast<u8>(values.size() - 1);
      for (u16 v : values) out = put16(out, v);
      return encode_plane(part, index.get(), count, level, kernels, scratch, out, nesting - 1);
    }
  }
  if (found.often() && !shape.split_off) {
    PlaneShape left = shape;
    left.inner = left.split_off = true;
    *out++ = static_cast<u8>(Mode::sparse);
    return encode_sparse(in, count, shape.unit, found.value, level, kernels, scratch, out, nesting,
                         [&](const u8* rest, size_t n, u8* to) { return encode_plane(left, rest, n, level, kernels, scratch, to, nesting - 1); });
  }
  if (shape.unit == 1 || (shape.kind != PlaneKind::integer && !found.few(2))) return nullptr;
  const auto high = padded(count), low = padded(count);
  for (size_t i = 0; i < count; i++) {
    low[i] = in[2 * i];
    high[i] = in[2 * i + 1];
  }
  *out++ = static_cast<u8>(Mode::halves);
  out = encode_plane(part, high.get(), count, level, kernels, scratch, out, nesting - 1);
  return encode_plane(part, low.get(), count, level, kernels, scratch, out, nesting - 1);
}

}  // namespace netweight
