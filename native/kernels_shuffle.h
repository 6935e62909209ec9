// Rans kernels for instruction sets whose shuffles look up sixteen bytes at a time. A file that includes this has defined, for
// its vectors of kBytes bytes (16, or 32 as two halves that instructions treat alike): Bytes, load, store, all_bytes, all_words,
// table16, look_up16, Lookup, Places, low_halves, high_halves, saturated, low_bytes, high_bytes, multiply_add, multiply_high, multiply_low,
// add8, sub8, sub16, above8, equal8, least8, not_below8, select, ShiftDown, NamedLanes, PackFields, load_fields,
// load_words, store_words.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "spread.h"

namespace netweight {
namespace {  // compiled with different instruction sets: never shared between translation units

constexpr int kVectors = 64 / kBytes;  // per row of a stream
constexpr int kGroups = kBytes / 8;    // of eight lanes, per vector

// Indices for moving bytes between the lanes that a mask of eight names and a stream; for eight lanes in a shuffle's lower or
// upper half.
struct Movements {
  alignas(64) u8 expand[2][256][8] = {};    // to the lanes of the mask from the next bytes
  alignas(64) u8 compress[2][256][8] = {};  // from the lanes of the mask to the last bytes
  constexpr Movements() {
    for (int half = 0; half < 2; half++)
      for (int m = 0; m < 256; m++) {
        int n = 0;
        for (int i = 0; i < 8; i++) expand[half][m][i] = m >> i & 1 ? static_cast<u8>(8 * half + n++) : 0x80;
        for (int i = 0; i < 8; i++)
          if (m >> i & 1) compress[half][m][8 - n--] = static_cast<u8>(8 * half + i);
      }
  }
};
constexpr Movements kMovements;  // constant: no code of this file may run before the processor was checked

// Where the raw bits of an element are.
enum class Raw {
  none,    // elements of one byte without any
  byte,    // of one byte
  fields,  // of two bytes, fewer than eight raw bits
  whole,   // of two bytes, eight raw bits
  rest,    // of two bytes, more than eight raw bits: low bytes and fields of the others
};

// kSteep: frequencies above 127.
template <int N, Raw kRaw, bool kSteep = false>
__attribute__((noinline)) size_t decode(const RansBlock& b, Lanes& lanes, size_t row, size_t row_end, u8* out) {
  const DecodeTable& t = *b.table;
  // A slot finds its symbol by binary search. Thresholds of level l stand in level[l][0 .. 1 << l): a slot belongs to the right
  // half when it is greater (as signed bytes).
  constexpr int kLevels = N > 2 ? 6 : 3 + N, kMost = 1 << kLevels;
  alignas(64) u8 level[6][32];
  int count = 1;
  while (count < kMost && t.frequency[count]) count++;
  for (int l = 0; l < kLevels; l++)
    for (int p = 0; p < 32; p++) {
      const int symbol = p * (kMost >> l) + (kMost >> (l + 1));
      level[l][p] = p < 1 << l && symbol < count ? static_cast<u8>((t.start[symbol] - 1) ^ 0x80) : 0x7f;
    }
  const Bytes level0 = all_bytes(level[0][0]), level1 = table16(level[1]), level2 = table16(level[2]), level3 = table16(level[3]),
              level4 = table16(level[4]);
  const Lookup<2> level5(level[5]);
  const Lookup<N> frequency(t.frequency), start(t.start), sym_low(t.low), sym_high(t.high);
  const Bytes zero = all_bytes(0), top_bit = all_bytes(0x80);
  // Field j of eight starts in byte j * bits / 8; multiplying a word moves it to the word's top.
  const RawRegions region(b.split, b.streams, b.rows);
  const int bits = kRaw == Raw::rest ? b.split.raw_bits - 8 : b.split.raw_bits;
  alignas(32) u8 even[16], odd[16];
  alignas(32) u16 factor[8];
  for (int j = 0; j < 8; j++) {
    for (int k = 0; k < 2; k++) {
      const int from = j * bits / 8 + k;
      even[2 * j + k] = static_cast<u8>(from);
      odd[2 * j + k] = static_cast<u8>(from + bits < 16 ? from + bits : 0x80);
    }
    factor[j] = static_cast<u16>(1u << (16 - bits - j * bits % 8));
  }
  const Bytes even_bytes = table16(even), odd_bytes = table16(odd), factors = table16(reinterpret_cast<const u8*>(factor));
  const ShiftDown down(8 - bits);
  const Bytes sign = all_bytes(b.split.signed_raw ? 0x80 : 0), mantissa = all_bytes((1 << (b.split.signed_raw ? bits - 1 : bits)) - 1);
  const size_t streams = static_cast<size_t>(b.streams);
  const u8* raw = b.raw_low + row * streams * region.row_low_bytes;
  const u8* rest = b.raw_rest + row * streams * region.row_rest_bytes;
  constexpr size_t kUnit = kRaw <= Raw::byte ? 1 : 2;
  u8* to = out + row * streams * 64 * kUnit;

  auto step = [&](size_t g) __attribute__((always_inline)) {
    Bytes low[kVectors], high[kVectors], refill[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      const Bytes L = load(lanes.low[g] + kBytes * v), H = load(lanes.high[g] + kBytes * v);
      const Bytes slot = L ^ top_bit;
      Bytes p = sub8(zero, above8(slot, level0));
      auto descend = [&](Bytes threshold) __attribute__((always_inline)) { p = sub8(add8(p, p), above8(slot, threshold)); };
      descend(look_up16(level1, p));
      descend(look_up16(level2, p));
      descend(look_up16(level3, p));
      if constexpr (N > 1) descend(look_up16(level4, p));
      if constexpr (N > 2) descend(level5(Places<2>(p)));
      const Places<N> index(p);
      Bytes x0, x1;
      multiply_add<kSteep>(frequency(index), H, sub8(L, start(index)), x0, x1);
      low[v] = low_bytes(x0, x1);
      high[v] = high_bytes(x0, x1);
      refill[v] = equal8(high[v], zero);

      if constexpr (kRaw == Raw::none) {
        store(to + kBytes * v, sym_low(index));
        continue;
      }
      Bytes r;
      if constexpr (kRaw == Raw::whole) {
        r = load(raw + kBytes * v);
      } else {
        const Bytes packed = load_fields((kRaw == Raw::rest ? rest : raw) + kGroups * bits * v, 2 * bits);
        r = high_bytes(multiply_low(look_up16(packed, even_bytes), factors), multiply_low(look_up16(packed, odd_bytes), factors));
      }
      const Bytes m = down(r) & mantissa, s = r & sign;
      if constexpr (kRaw == Raw::byte) {
        store(to + kBytes * v, sym_low(index) | m | s);
      } else {
        const Bytes upper = sym_high(index) | s;
        const Bytes first = kRaw == Raw::rest ? load(raw + kBytes * v) : sym_low(index) | m, second = kRaw == Raw::rest ? upper | m : upper;
        store(to + kBytes * v, low_halves(first, second));
        store(to + 64 + kBytes * v, high_halves(first, second));
      }
    }
    const NamedLanes needy(refill);
    const u8* at = lanes.at[g];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      const u8 *bytes[kGroups], *index[kGroups];
#pragma GCC unroll 4
      for (int i = 0; i < kGroups; i++) {
        const int group = v * kGroups + i;
        bytes[i] = at + needy.before(group);
        index[i] = kMovements.expand[i % 2][needy.of(group)];
      }
      const Bytes fresh = look_up16(load_words(bytes), load_words(index));
      store(lanes.high[g] + kBytes * v, select(refill[v], low[v], high[v]));
      store(lanes.low[g] + kBytes * v, select(refill[v], fresh, low[v]));
    }
    lanes.at[g] = at + needy.before(8);
    raw += region.row_low_bytes;
    rest += region.row_rest_bytes;
    to += 64 * kUnit;
  };

  // A step reads up to 8 bytes past what it uses of each stream, and as many past its raw bits, after which streams follow.
  for (size_t many : {size_t{16}, size_t{1}})
    while (row + many <= row_end) {
      bool safe = true;
      for (size_t g = 0; g < streams; g++) safe &= static_cast<size_t>(b.readable_end - lanes.at[g]) >= 64 * many + 16;
      if (!safe) break;
      for (size_t r = 0; r < many; r++)
        for (size_t g = 0; g < streams; g++) step(g);
      row += many;
      for (size_t g = 0; g < streams; g++)
        if (lanes.at[g] > b.stream_end[g]) return npos;
    }
  return row;
}

size_t decode_rows(const RansBlock& b, Lanes& lanes, size_t row, size_t row_end, void* out) {
  u8* to = static_cast<u8*>(out);
  const int bits = b.split.raw_bits;
  auto with = [&]<int N>() {
    return b.split.unit == 1 ? bits ? decode<N, Raw::byte>(b, lanes, row, row_end, to) : decode<N, Raw::none>(b, lanes, row, row_end, to)
           : bits < 8        ? decode<N, Raw::fields>(b, lanes, row, row_end, to)
           : bits == 8       ? decode<N, Raw::whole>(b, lanes, row, row_end, to)
                             : decode<N, Raw::rest>(b, lanes, row, row_end, to);
  };
  const u8* frequency = b.table->frequency;
  if (b.steep && b.split.unit == 2) return row;  // the portable code goes on
  if (b.steep) {
    if (bits) return decode<4, Raw::byte, true>(b, lanes, row, row_end, to);
    return frequency[16] ? decode<4, Raw::none, true>(b, lanes, row, row_end, to) : decode<1, Raw::none, true>(b, lanes, row, row_end, to);
  }
  return frequency[48]   ? with.template operator()<4>()
         : frequency[32] ? with.template operator()<3>()
         : frequency[16] ? with.template operator()<2>()
                         : with.template operator()<1>();
}

// Stores the fields of 64 lanes so that every store ends where its fields end: what it writes before them, the rows to come
// overwrite, or after row 0 the caller.
struct FieldPacking {
  int bits;
  PackFields pack;
  explicit FieldPacking(int bits) : bits(bits), pack(bits) {}
  void operator()(const Bytes* fields, u8* row) const {
#pragma GCC unroll 4
    for (int v = kVectors - 1; v >= 0; v--) store_words(pack(fields[v]), [&](int i) { return row + bits * (v * kGroups + i + 1) - 8; });
  }
};

// Rows from the last to the first.
template <int N, int kUnit>
__attribute__((noinline)) bool encode(RansEncoder& e, const u8* in, size_t row) {
  const EncodeTable& t = *e.table;
  const Lookup<N> frequency(t.frequency), start(t.start), reciprocal_low(t.reciprocal_low), reciprocal_high(t.reciprocal_high);
  const Bytes zero = all_bytes(0), host = all_bytes(t.host), before_base = all_words(t.base - 1), last_index = all_bytes(16 * N - 1);
  const Split split = e.split;
  const int low_bits = split.raw_bits < 8 ? split.raw_bits : 8, rest_bits = split.raw_bits - low_bits;
  const RawRegions region(split, e.streams, e.rows);
  const FieldPacking pack_low(low_bits & 7), pack_rest(rest_bits);
  // Symbol and raw bits as shifts and masks of 16-bit words (one-byte elements are widened first).
  const ShiftDown to_symbol(split.signed_raw ? split.raw_bits - 1 : split.raw_bits), to_sign(8 * split.unit - split.raw_bits);
  const Bytes symbol_mask = all_words((1 << split.symbol_bits()) - 1), sign_bit = all_words(split.signed_raw ? 1 << (split.raw_bits - 1) : 0),
              raw_mask = all_words((1 << (split.signed_raw ? split.raw_bits - 1 : split.raw_bits)) - 1);
  const size_t streams = static_cast<size_t>(e.streams);
  u8* raw = e.raw_low + row * streams * region.row_low_bytes;
  u8* rest = e.raw_rest + row * streams * region.row_rest_bytes;
  const u8* from = in + row * streams * 64 * kUnit;
  bool room = true;

  auto step = [&](size_t g, size_t r) __attribute__((always_inline)) {
    from -= 64 * kUnit;
    __builtin_prefetch(from + e.ahead, 0, 2);  // what this thread will read next
    if (kUnit == 2) __builtin_prefetch(from + e.ahead + 64, 0, 2);
    auto symbol = [&](int lane) {
      u16 element = 0;
      std::memcpy(&element, from + kUnit * lane_position(lane, kUnit), kUnit);
      return split.symbol(element);
    };
    Bytes index[kVectors], raw_low[kVectors], raw_rest[kVectors], f[kVectors], mask[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      Bytes v0, v1;  // words: elements in two halves, so that packing them gives lane order
      if constexpr (kUnit == 2) {
        v0 = load(from + kBytes * v);
        v1 = load(from + 64 + kBytes * v);
      } else {
        const Bytes both = load(from + kBytes * v);
        v0 = low_halves(both, zero);
        v1 = high_halves(both, zero);
      }
      // Below the range: 0; above: at most the last; both have no frequency.
      index[v] = least8(saturated(sub16(to_symbol(v0) & symbol_mask, before_base), sub16(to_symbol(v1) & symbol_mask, before_base)), last_index);
      const Bytes r0 = (v0 & raw_mask) | (to_sign(v0) & sign_bit), r1 = (v1 & raw_mask) | (to_sign(v1) & sign_bit);
      raw_low[v] = low_bytes(r0, r1);
      raw_rest[v] = high_bytes(r0, r1);
    }
    raw -= region.row_low_bytes;
    rest -= region.row_rest_bytes;
    if (low_bits == 8) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) store(raw + kBytes * v, raw_low[v]);
    } else if (low_bits) {
      pack_low(raw_low, raw);
    }
    if (rest_bits) pack_rest(raw_rest, rest);

    if (t.lookup != SymbolLookup::range) {
      alignas(64) u8 found[64];
      for (int i = 0; i < 64; i++) found[i] = t.index(symbol(i));
      for (int v = 0; v < kVectors; v++) index[v] = load(found + kBytes * v);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      f[v] = frequency(Places<N>(index[v]));
      mask[v] = equal8(f[v], zero);
    }
    if (const u64 rare = NamedLanes(mask).all(); __builtin_expect(rare != 0, 0)) {
      if (e.patch[g] < e.patch_limit[g]) room = false;
      else
        for (u64 m = rare; m;) {
          const int i = 63 - __builtin_clzll(m);
          m &= ~(u64{1} << i);
          *--e.patch[g] = {static_cast<u32>(r * 64 + static_cast<size_t>(i)), symbol(i)};
        }
      for (int v = 0; v < kVectors; v++) {
        index[v] = select(mask[v], host, index[v]);
        f[v] = frequency(Places<N>(index[v]));
      }
    }

    Bytes L[kVectors], H[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      L[v] = load(e.low[g] + kBytes * v);
      H[v] = load(e.high[g] + kBytes * v);
      mask[v] = not_below8(H[v], f[v]);
    }
    const NamedLanes full(mask);
    u8* at = e.at[g] -= full.before(8);
#pragma GCC unroll 4
    for (int v = kVectors - 1; v >= 0; v--) {
      const u8* order[kGroups];
#pragma GCC unroll 4
      for (int i = 0; i < kGroups; i++) order[i] = kMovements.compress[i % 2][full.of(v * kGroups + i)];
      store_words(look_up16(L[v], load_words(order)), [&](int i) { return at + full.before(v * kGroups + i + 1) - 8; });
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      const Bytes low = select(mask[v], H[v], L[v]), high = select(mask[v], zero, H[v]);
      // x = 256 q' + slot: q = x / f and the remainder; the estimate of q may be one too small.
      const Places<N> places(index[v]);
      const Bytes d0 = reciprocal_low(places), d1 = reciprocal_high(places);
      const Bytes x0 = low_halves(low, high), x1 = high_halves(low, high);
      const Bytes q0 = multiply_high(x0, low_halves(d0, d1)), q1 = multiply_high(x1, high_halves(d0, d1));
      const Bytes remainder = saturated(sub16(x0, multiply_low(q0, low_halves(f[v], zero))), sub16(x1, multiply_low(q1, high_halves(f[v], zero))));
      const Bytes short_by_one = not_below8(remainder, f[v]);
      store(e.high[g] + kBytes * v, sub8(saturated(q0, q1), short_by_one));
      store(e.low[g] + kBytes * v, add8(sub8(remainder, f[v] & short_by_one), start(places)));
    }
  };

  // Row 0's fields of the rest write before their region, where other rows' low bits are.
  u8 kept[8];
  if (rest_bits) std::memcpy(kept, e.raw_rest - 8, 8);
  while (row-- > 0 && room)
    for (size_t g = streams; g-- > 0;) step(g, row);
  if (rest_bits) std::memcpy(e.raw_rest - 8, kept, 8);
  return room;
}

bool encode_rows(RansEncoder& e, const void* in, size_t row) {
  const EncodeTable& t = *e.table;
  if (t.lookup == SymbolLookup::none) return portable_kernels().encode_rows(e, in, row);
  const u8* from = static_cast<const u8*>(in);
  const bool few = t.lookup == SymbolLookup::range && std::all_of(t.frequency + 31, t.frequency + 64, [](u8 f) { return f == 0; });
  if (e.split.unit == 1) return few ? encode<2, 1>(e, from, row) : encode<4, 1>(e, from, row);
  return few ? encode<2, 2>(e, from, row) : encode<4, 2>(e, from, row);
}

// Which bytes of word w of the elements are of the rest.
template <int kUnit>
inline u8 bytes_of_rest(const u8* nibbles, size_t w) {
  constexpr u8 twice[16] = {0, 3, 12, 15, 48, 51, 60, 63, 192, 195, 204, 207, 240, 243, 252, 255}, four_times[4] = {0, 15, 240, 255};
  if constexpr (kUnit == 1) return static_cast<u8>(nibbles[2 * w] >> 4 | (nibbles[2 * w + 1] & 0xf0));
  if constexpr (kUnit == 2) return twice[nibbles[w] >> 4];
  if constexpr (kUnit == 4) return four_times[nibbles[w / 2] >> (4 + 2 * (w % 2)) & 3];
  if constexpr (kUnit == 8) return static_cast<u8>(0 - (nibbles[w / 4] >> (4 + w % 4) & 1));
}

template <int kUnit>
void spread_vectors(const u8* nibbles, const u8* rest, size_t count, const u8* value, u8* out) {
  alignas(32) u8 values[kBytes];
  for (int i = 0; i < kBytes; i++) values[i] = value[i % kUnit];
  const Bytes common = load(values), zero = all_bytes(0);
  size_t done = 0;
  for (u64 marks; done + 32 <= count; done += 32, nibbles += 8, out += 32 * kUnit) {
    std::memcpy(&marks, nibbles, 8);
    for (size_t word = 0; word < 4 * kUnit; word += kGroups) {
      if (!marks) {
        store(out + 8 * word, common);
        continue;
      }
      const u8 *from[kGroups], *order[kGroups];
#pragma GCC unroll 4
      for (size_t i = 0; i < kGroups; i++) {
        const u8 mask = bytes_of_rest<kUnit>(nibbles, word + i);
        from[i] = rest;
        order[i] = kMovements.expand[i % 2][mask];
        rest += __builtin_popcount(mask);
      }
      const Bytes index = load_words(order);
      store(out + 8 * word, look_up16(load_words(from), index) | (common & above8(zero, index)));
    }
  }
  spread(nibbles, rest, count - done, kUnit, value, out);
}

void spread_any(const u8* nibbles, const u8* rest, size_t count, int unit, const u8* value, u8* out) {
  by_width(unit, [&](auto number) { spread_vectors<sizeof number>(nibbles, rest, count, value, out); });
}

// The first sixteen values of a palette lie in registers; of planes with a palette most elements are among them.
void recall_any(const u8* numbers, size_t count, const u16* palette, size_t, u8* out) {
  u8 bytes[2][16];
  for (int i = 0; i < 16; i++) bytes[0][i] = static_cast<u8>(palette[i]), bytes[1][i] = static_cast<u8>(palette[i] >> 8);
  const Bytes low = table16(bytes[0]), high = table16(bytes[1]);
  size_t i = 0;
  for (; i + kBytes <= count; i += kBytes) {
    u64 words[kGroups], any = 0;
    const u8* from[kGroups];
    std::memcpy(words, numbers + i, sizeof words);
    for (size_t g = 0; g < kGroups; g++) {
      any |= words[g];
      from[g] = numbers + i + 8 * (kGroups == 4 ? g % 2 * 2 + g / 2 : g);  // as halves of registers are put together again
    }
    if (any & 0xf0f0f0f0f0f0f0f0ull) {
      recall(numbers + i, kBytes, palette, 256, out + 2 * i);
      continue;
    }
    const Bytes index = load_words(from), a = look_up16(low, index), b = look_up16(high, index);
    store(out + 2 * i, low_halves(a, b));
    store(out + 2 * i + kBytes, high_halves(a, b));
  }
  recall(numbers + i, count - i, palette, 256, out + 2 * i);
}

}  // namespace
}  // namespace netweight
