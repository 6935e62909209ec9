// The wide_rans mode: 4,096 slots, 32-bit states, 16-bit renormalization. A little denser than rans, and slower.
#include <algorithm>
#include <cmath>
#include <memory>

#include "merge.h"
#include "patches.h"
#include "plane.h"

namespace netweight {
namespace {

constexpr u64 kPatchBits = 33u << 15;

// 2^16 log2(4096 / f), rounded.
struct WideLogarithms {
  u32 bits[kWideSlots + 1];
  WideLogarithms() {
    bits[0] = 0;
    for (int f = 1; f <= kWideSlots; f++) bits[f] = static_cast<u32>(std::llround(65536.0 * std::log2(4096.0 / f)));
  }
};
const WideLogarithms kLog;

// Frequencies that add up to 4,096: shares rounded down, at least 1, then greedily adjusted.
void quantize(const std::vector<u64>& weight, u64 total, std::vector<u16>& frequency) {
  const size_t count = weight.size();
  frequency.resize(count);
  u64 used = 0;
  for (size_t i = 0; i < count; i++) {
    u64 f = std::clamp<u64>(weight[i] * kWideSlots / total, 1, kWideSlots - 1);
    frequency[i] = static_cast<u16>(f);
    used += f;
  }
  while (used != kWideSlots) {
    const bool grow = used < kWideSlots;
    size_t best = count;
    u64 value = 0;
    for (size_t i = 0; i < count; i++) {
      u32 f = frequency[i];
      if (grow ? f == kWideSlots - 1 : f == 1) continue;
      u64 v = grow ? weight[i] * (kLog.bits[f] - kLog.bits[f + 1]) : weight[i] * (kLog.bits[f - 1] - kLog.bits[f]);
      if (best == count || (grow ? v > value : v < value)) best = i, value = v;
    }
    frequency[best] = static_cast<u16>(grow ? frequency[best] + 1 : frequency[best] - 1);
    used = grow ? used + 1 : used - 1;
  }
}

struct WideEntry {
  u32 frequency, start;
};

size_t words_of(size_t blocks, int bits) { return blocks * field_block_bytes(bits); }

}  // namespace

u64 build_wide_table(const u32* counts, int symbol_bits, std::vector<u16>& symbols, std::vector<u16>& frequencies) {
  u64 total = 0;
  for (int s = 0; s < 1 << symbol_bits; s++) total += counts[s];
  // A symbol below a quarter of a slot is cheaper as a patch.
  std::vector<u64> weight;
  u64 rest = 0;
  size_t host = 0;
  symbols.clear();
  for (int s = 0; s < 1 << symbol_bits; s++) {
    if (counts[s] == 0) continue;
    if (u64{counts[s]} * (4 * kWideSlots) < total) {
      rest += counts[s];
      continue;
    }
    if (!weight.empty() && counts[s] > weight[host]) host = weight.size();
    symbols.push_back(static_cast<u16>(s));
    weight.push_back(counts[s]);
  }
  if (symbols.size() < 2 || symbols.size() > kMaxWideSymbols) return ~u64{0};
  weight[host] += rest;
  quantize(weight, total, frequencies);
  u64 cost = rest * kPatchBits + ((static_cast<u64>(symbols.size()) * 3 / 2) << 19);
  for (size_t i = 0; i < weight.size(); i++) cost += weight[i] * kLog.bits[frequencies[i]];
  return cost;
}

u8* encode_wide(const Split& split, const std::vector<u16>& symbols, const std::vector<u16>& frequencies, const u8* in, size_t count,
                Scratch& scratch, u8* out) {
  std::vector<WideEntry> entry(size_t{1} << split.symbol_bits(), WideEntry{0, 0});
  size_t host = 0;
  u32 start = 0;
  for (size_t i = 0; i < symbols.size(); i++) {
    entry[symbols[i]] = {frequencies[i], start};
    start += frequencies[i];
    if (frequencies[i] > frequencies[host]) host = i;
  }
  const size_t blocks = (count + 63) / 64;
  const int low_bits = std::min(split.raw_bits, 8), rest_bits = split.raw_bits - low_bits;

  u8* p = out;
  *p++ = static_cast<u8>(Mode::wide_rans);
  *p++ = static_cast<u8>(split.raw_bits | (split.signed_raw ? 0x80 : 0));
  u8* runs = p;
  p += 2;
  u32 run_count = 0;
  for (size_t i = 0; i < symbols.size(); run_count++) {
    size_t length = 1;
    while (i + length < symbols.size() && symbols[i + length] == symbols[i] + length) length++;
    p = put16(put16(p, symbols[i]), static_cast<u32>(length));
    i += length;
  }
  put16(runs, run_count);
  for (u32 f : frequencies) {
    if (f >= 128) *p++ = static_cast<u8>(0x80 | f >> 8);
    *p++ = static_cast<u8>(f);
  }
  u8* lengths = p;
  u8* states = lengths + 6;
  u8* raw_low = states + 4 * kWideLanes;
  u8* raw_rest = raw_low + words_of(blocks, low_bits);
  u8* body = raw_rest + words_of(blocks, rest_bits);
  if (static_cast<size_t>(body - out) >= plane_bound(count, split.unit)) return nullptr;

  const size_t stream_room = 2 * (blocks * 64) + 2, patch_room = count / 16 + 64;
  u8* top = scratch.bytes(stream_room) + stream_room;
  u8* at = top;
  Patch* patch_top = scratch.patches(patch_room) + patch_room;
  Patch* patch = patch_top;
  u32 state[kWideLanes];
  std::fill(state, state + kWideLanes, 1u << 16);
  for (size_t block = blocks; block-- > 0;) {
    u32 v[64];
    alignas(64) u8 low[64], high[64];
    const size_t n = std::min<size_t>(64, count - 64 * block);
    if (static_cast<size_t>(patch - (patch_top - patch_room)) < 64) return nullptr;
    for (size_t i = 0; i < 64; i++) {
      u16 element = 0;
      if (i < n) std::memcpy(&element, in + (64 * block + i) * static_cast<size_t>(split.unit), static_cast<size_t>(split.unit));
      else element = static_cast<u16>(split.place_symbol(symbols[host]));
      v[i] = split.symbol(element);
      u32 raw = split.raw(element);
      low[i] = static_cast<u8>(raw);
      high[i] = static_cast<u8>(raw >> 8);
    }
    pack_fields(low_bits, low, raw_low + block * field_block_bytes(low_bits));
    pack_fields(rest_bits, high, raw_rest + block * field_block_bytes(rest_bits));
    for (int i = 63; i >= 0; i--) {
      WideEntry e = entry[v[i]];
      if (e.frequency == 0) {
        *--patch = {static_cast<u32>(64 * block) + static_cast<u32>(i), v[i]};
        e = entry[symbols[host]];
      }
      u32& x = state[i % kWideLanes];
      if (x >> 20 >= e.frequency) {  // x >= f * 2^20: give away 16 bits
        at -= 2;
        put16(at, x & 0xffff);
        x >>= 16;
      }
      x = (x / e.frequency << 12) + x % e.frequency + e.start;
    }
  }

  RareSymbols rare(split.symbol_bits());
  rare.add(patch, static_cast<size_t>(patch_top - patch));
  rare.choose();
  const size_t length = static_cast<size_t>(top - at), words = rare.encoded_words(patch, static_cast<size_t>(patch_top - patch));
  if (static_cast<size_t>(body - out) + length + rare.written_bytes() + 2 * words >= plane_bound(count, split.unit)) return nullptr;
  put24(put24(lengths, static_cast<u32>(length / 2)), static_cast<u32>(words));
  for (int i = 0; i < kWideLanes; i++) put32(states + 4 * i, state[i]);
  std::memcpy(body, at, length);
  return rare.encode(rare.write(body + length), patch, static_cast<size_t>(patch_top - patch));
}

void decode_wide(Reader& in, const u8* readable_end, int unit, size_t count, const Kernels& kernels, u8* out) {
  const Split split = read_split(in, unit);
  std::vector<u16> symbols;
  int next = 0;
  for (int runs = in.word("a wide table"); runs > 0; runs--) {
    int base = in.word("a wide table"), length = in.word("a wide table");
    if (base < next || length == 0 || base + length > 1 << split.symbol_bits() || symbols.size() + static_cast<size_t>(length) > kMaxWideSymbols)
      throw CorruptError("a wide table lists symbols that cannot be");
    for (int i = 0; i < length; i++) symbols.push_back(static_cast<u16>(base + i));
    next = base + length;
  }
  const auto table = std::make_unique<WideTable>();
  size_t slot = 0;
  for (u16 symbol : symbols) {
    u32 f = in.byte("a wide table");
    if (f >= 128) f = (f & 0x7f) << 8 | in.byte("a wide table");
    if (f == 0 || slot + f > kWideSlots || f == kWideSlots) throw CorruptError("a wide table does not add up to 4,096");
    for (u32 k = 0; k < f; k++, slot++) {
      table->placed[slot] = static_cast<u16>(split.place_symbol(symbol));
      table->step[slot] = f | k << 12 | static_cast<u32>(table->placed[slot]) << 24;
    }
  }
  if (slot != kWideSlots) throw CorruptError("a wide table does not add up to 4,096");

  const size_t length = in.word24("a plane's header"), words = in.word24("a plane's header");
  WideLanes lanes;
  const u8* states = in.take(4 * kWideLanes, "a plane's states");
  for (int i = 0; i < kWideLanes; i++) {
    lanes.state[i] = get32(states + 4 * i);
    if (lanes.state[i] < 1u << 16) throw CorruptError("a plane's states are out of range");
  }
  const size_t blocks = (count + 63) / 64, whole = count / 64;
  const int low_bits = std::min(split.raw_bits, 8), rest_bits = split.raw_bits - low_bits;
  WideBlock b{split, table.get(), nullptr, nullptr, nullptr, readable_end};
  b.raw_low = in.take(words_of(blocks, low_bits), "raw bits");
  b.raw_rest = in.take(words_of(blocks, rest_bits), "raw bits");
  lanes.at = in.take(2 * length, "an entropy-coded stream");
  b.stream_end = in.at;
  size_t block = kernels.decode_wide(b, lanes, 0, whole, out);
  if (block < whole) block = portable_kernels().decode_wide(b, lanes, block, whole, out);
  alignas(64) u16 placed[64];
  bool sound = block == whole;
  if (sound && whole < blocks) {
    sound = step_wide(b, lanes, placed);
    if (sound) merge_wide(b, whole, placed, out + whole * 64 * static_cast<size_t>(unit), count - 64 * whole);
  }
  if (!sound || lanes.at != b.stream_end || std::any_of(lanes.state, lanes.state + kWideLanes, [](u32 x) { return x != 1u << 16; }))
    throw CorruptError("an entropy-coded stream does not end where it should");
  RareList rare;
  rare.read(in, split.symbol_bits());
  const u8* patches = in.take(2 * words, "patches");
  PatchWords waiting{patches, in.at};
  apply_patches(waiting, npos, rare, split, out, [&](size_t position) { return position < count ? position : npos; });
}

}  // namespace netweight
