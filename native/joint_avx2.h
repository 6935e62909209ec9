// Elements of the mode joint taken apart and put together by AVX2, 32 at a time. Rows of the vectors have the quarters 0, 2, 1, 3, of eight
// elements each, because that is how packing and interleaving by halves of a register arrange them. A file that includes this has
// included kernels_shuffle.h and joint.h.
#pragma once

namespace netweight {
namespace {

inline Bytes quarters(Bytes v) { return _mm256_permute4x64_epi64(v, 0xd8); }  // there and back
inline u32 mask_of(Bytes v) { return static_cast<u32>(_mm256_movemask_epi8(v)); }

// For each mask of eight lanes: these lanes, one behind the other.
struct GatherLanes {
  alignas(64) u8 index[256][8] = {};
  constexpr GatherLanes() {
    for (int m = 0; m < 256; m++)
      for (int i = 0, n = 0; i < 8; i++)
        if (m >> i & 1) index[m][n++] = static_cast<u8>(i);
  }
};
constexpr GatherLanes kGatherLanes;

// Numbers by the upper part of a symbol, which several neighboring symbols share. For sixteen parts in a row: the number of the first
// symbol, and which bits of the lower part are added to it. Weights rarely have others.
struct NumbersBySymbol {
  int base = 0;
  u8 first[16], fine[16];

  explicit NumbersBySymbol(const Joint& j) {
    const u32 fine_mask = (1u << j.more_bits) - 1;
    std::vector<int> number(size_t{1} << (j.split.symbol_bits() - j.more_bits), -1);  // -1: does not occur, or does not fit the scheme
    std::vector<u8> is_fine(number.size());
    for (int i = 0; i < j.listed(); i++) {
      if (i >= j.symbols && i < j.before_coarse()) continue;
      const u32 symbol = j.split.symbol(j.placed[i]), part = symbol >> j.more_bits;
      const int start = i < j.symbols ? i - static_cast<int>(symbol & fine_mask) : i;
      if (is_fine[part] && number[part] != start) number[part] = -1;
      else number[part] = start;
      is_fine[part] = i < j.symbols;
    }
    int best = -1;
    for (size_t from = 0; from < number.size(); from++) {
      int score = 0;
      for (size_t part = from; part < std::min(from + 16, number.size()); part++) score += number[part] < 0 ? 0 : is_fine[part] ? 16 : 1;
      if (score > best) best = score, base = static_cast<int>(from);
    }
    for (size_t i = 0; i < 16; i++) {
      const size_t part = static_cast<size_t>(base) + i;
      const bool there = part < number.size() && number[part] >= 0;
      first[i] = there ? static_cast<u8>(number[part]) : 255;
      fine[i] = there && is_fine[part] ? static_cast<u8>(fine_mask) : 0;
    }
  }
};

template <bool kValues>
size_t part_vectors(Joint& j, const u8* in, size_t count, u8* numbers, u8* raw, u8* more) {
  const NumbersBySymbol by_symbol(j);
  const Split& split = j.split;
  const u32 sign = split.signed_raw ? 1u << (split.raw_bits - 1) : 0;
  const ShiftDown to_lower(j.more_shift()), to_upper(j.more_shift() + j.more_bits), to_sign(16 - split.raw_bits);
  const Bytes upper_mask = all_words((1 << (split.symbol_bits() - j.more_bits)) - 1), lower_mask = all_words((1 << j.more_bits) - 1);
  const Bytes sign_bit = all_words(static_cast<int>(sign)), raw_mask = all_words(static_cast<int>(sign ? sign - 1 : (1u << split.raw_bits) - 1));
  const Bytes base = all_words(by_symbol.base), most = all_words(255), beyond = all_bytes(0x70), zero = all_bytes(0), nowhere = all_bytes(255);
  const Bytes first = table16(by_symbol.first), fine = table16(by_symbol.fine), first_coarse = all_bytes(j.before_coarse());
  const u32 more_mask = (1u << j.more_bits) - 1;
  size_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const Bytes v0 = load(in + 2 * i), v1 = load(in + 2 * i + 32);
    const auto upper = [&](Bytes v) __attribute__((always_inline)) { return _mm256_min_epu16(sub16(to_upper(v) & upper_mask, base), most); };
    const auto raw_of = [&](Bytes v) __attribute__((always_inline)) { return (v & raw_mask) | (to_sign(v) & sign_bit); };
    const Bytes place = _mm256_adds_epu8(saturated(upper(v0), upper(v1)), beyond);
    const Bytes lower = saturated(to_lower(v0) & lower_mask, to_lower(v1) & lower_mask);
    Bytes number = add8(look_up16(first, place), lower & look_up16(fine, place)) | above8(zero, place);
    u32 whole = 0;
    if constexpr (kValues) {
      Bytes any = zero;
      for (int k = 0; k < j.values; k++) {
        const Bytes value = all_words(j.placed[j.symbols + k]);
        const Bytes here = _mm256_packs_epi16(_mm256_cmpeq_epi16(v0, value), _mm256_cmpeq_epi16(v1, value));
        number = select(here, all_bytes(j.symbols + k), number);
        any = any | here;
        j.occurrences[k] += static_cast<u32>(__builtin_popcount(mask_of(here)));
      }
      whole = mask_of(quarters(any));
    }
    number = quarters(number);
    store(numbers + i, number);
    if (u32 far = mask_of(equal8(number, nowhere)); __builtin_expect(far != 0, 0)) {
      for (; far; far &= far - 1) {
        const size_t at = i + static_cast<size_t>(__builtin_ctz(far));
        numbers[at] = j.number_of[in[2 * at] | in[2 * at + 1] << 8];
      }
      number = load(numbers + i);
    }
    const Bytes fields = quarters(saturated(raw_of(v0), raw_of(v1)));
    if constexpr (kValues) {
      alignas(32) u8 eights[32];
      _mm256_store_si256(reinterpret_cast<__m256i*>(eights), fields);
      for (int g = 0; g < 4; g++) {
        const u32 kept = ~whole >> 8 * g & 255;
        const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(eights + 8 * g));
        const __m128i order = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kGatherLanes.index[kept]));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(raw + j.fields), _mm_shuffle_epi8(eight, order));
        j.fields += static_cast<size_t>(__builtin_popcount(kept));
      }
    } else {
      store(raw + j.fields, fields);
      j.fields += 32;
    }
    for (u32 coarse = mask_of(not_below8(number, first_coarse)); coarse; coarse &= coarse - 1) {
      const size_t at = i + static_cast<size_t>(__builtin_ctz(coarse));
      more[j.more_fields++] = static_cast<u8>((in[2 * at] | static_cast<u32>(in[2 * at + 1]) << 8) >> j.more_shift() & more_mask);
    }
  }
  return i;
}

void part_any(Joint& j, const u8* in, size_t count, u8* numbers, u8* raw, u8* more) {
  const size_t done = (j.values ? part_vectors<true> : part_vectors<false>)(j, in, count, numbers, raw, more);
  part_elements(j, in, done, count, numbers, raw, more);
}

// Blocks from the last to the second: a store ends where its fields end and writes before them what others overwrite.
void pack_any(int bits, const u8* fields, size_t blocks, u8* out) {
  if (bits == 8) {
    std::memcpy(out, fields, 64 * blocks);
    return;
  }
  const FieldPacking pack(bits);
  for (; blocks > 1; blocks--) {
    const u8* from = fields + 64 * (blocks - 1);
    const Bytes both[kVectors] = {load(from), load(from + kBytes)};
    pack(both, out + (blocks - 1) * field_block_bytes(bits));
  }
  pack_some(bits, fields, blocks, out);
}

// Eight fields, of which the first lies in the lowest bits of a word, at the tops of eight bytes.
struct SpreadFields {
  Bytes of_first, of_second, factors;
  explicit SpreadFields(int bits) {
    alignas(16) u8 first[16], second[16];
    alignas(16) u16 factor[8];
    for (int i = 0; i < 8; i++) {
      for (int k = 0; k < 2; k++) first[2 * i + k] = static_cast<u8>(i * bits / 8 + k), second[2 * i + k] = static_cast<u8>(8 + i * bits / 8 + k);
      factor[i] = static_cast<u16>(1u << (16 - bits - i * bits % 8));
    }
    of_first = table16(first), of_second = table16(second), factors = table16(reinterpret_cast<const u8*>(factor));
  }
  Bytes operator()(Bytes words) const {
    return high_bytes(multiply_low(look_up16(words, of_first), factors), multiply_low(look_up16(words, of_second), factors));
  }
};

// N registers hold the bytes of what numbers stand for, and kAll says that these are all numbers; elements with others, which are rare, are
// the plain code's. Returns how many elements were made; `bad`: one of them has a number that is not listed, or raw bits ran out.
template <int N, bool kAll, bool kValues>
size_t unite_vectors(Joint& j, const u8* numbers, size_t count, u8* out, bool& bad) {
  alignas(32) u8 low[16 * N] = {}, high[16 * N] = {};
  const int known = std::min(j.listed(), 16 * N);
  for (int i = 0; i < known; i++) low[i] = static_cast<u8>(j.placed[i]), high[i] = static_cast<u8>(j.placed[i] >> 8);
  const Lookup<N> lows(low), highs(high);
  const size_t bits = static_cast<size_t>(j.split.raw_bits);
  const SpreadFields spread_out(j.split.raw_bits);
  const ShiftDown down(8 - j.split.raw_bits);
  const Bytes sign = all_bytes(j.split.signed_raw ? 0x80 : 0), mantissa = all_bytes((1 << (j.split.raw_bits - j.split.signed_raw)) - 1);
  // Numbers of the tables are below 128, so that signed comparisons serve.
  const Bytes last_symbol = all_bytes(std::min(j.symbols, 128) - 1), last_value = all_bytes(std::min(j.before_coarse(), 128) - 1), last = all_bytes(known - 1);
  const auto word = [](const u8* p) __attribute__((always_inline)) {
    u64 x;
    std::memcpy(&x, p, 8);
    return x;
  };
  Bytes greatest = all_bytes(0);
  size_t next = j.next, i = 0;
  for (; i + 32 <= count; i += 32, out += 64) {
    const size_t bit = next * bits;
    const u8* at = j.raw + bit / 8;
    if (j.readable_end - at < 64) break;
    const Bytes number = load(numbers + i);
    if constexpr (kAll) {
      greatest = _mm256_max_epu8(greatest, number);
    } else if (__builtin_expect(mask_of(equal8(least8(number, last), number)) != ~u32{0}, 0)) {
      j.next = next;
      if (!unite_elements(j, numbers + i, 32, out)) {
        bad = true;
        return i;
      }
      next = j.next;
      continue;
    }
    u32 coarse = mask_of(above8(number, last_value));
    Bytes raw;
    if constexpr (kValues) {
      const u32 completed = ~mask_of(above8(number, last_symbol)) | coarse;
      const auto before = [&](int g) __attribute__((always_inline)) { return bit + bits * static_cast<size_t>(__builtin_popcount(completed << (32 - 8 * g))); };
      const auto fields = [&](size_t first) __attribute__((always_inline)) { return static_cast<long long>(word(j.raw + first / 8) >> first % 8); };
      const auto order = [&](int g) __attribute__((always_inline)) { return kMovements.expand[g % 2][completed >> 8 * g & 255]; };
      const u8* orders[4] = {order(0), order(1), order(2), order(3)};
      const Bytes words = halves(_mm_set_epi64x(fields(before(1)), fields(bit)), _mm_set_epi64x(fields(before(3)), fields(before(2))));
      raw = look_up16(spread_out(words), load_words(orders));
      next += static_cast<size_t>(__builtin_popcount(completed));
    } else {
      const u8* words[4] = {at, at + bits, at + 2 * bits, at + 3 * bits};
      raw = spread_out(_mm256_srl_epi64(load_words(words), _mm_cvtsi32_si128(static_cast<int>(bit % 8))));
      next += 32;
    }
    if (__builtin_expect(next > j.fields, 0)) {
      bad = true;
      return i;
    }
    const Places<N> index(number);
    const Bytes lo = lows(index) | (down(raw) & mantissa), hi = highs(index) | (raw & sign);
    const Bytes even = low_halves(lo, hi), odd = high_halves(lo, hi);  // eight elements of each half
    const auto put = [&](int g, __m128i eight) __attribute__((always_inline)) { _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * g), eight); };
    put(0, _mm256_castsi256_si128(even));
    put(1, _mm256_castsi256_si128(odd));
    put(2, _mm256_extracti128_si256(even, 1));
    put(3, _mm256_extracti128_si256(odd, 1));
    for (; coarse; coarse &= coarse - 1) {
      if (j.next_more == j.more_fields) {
        bad = true;
        return i;
      }
      u8* element = out + 2 * __builtin_ctz(coarse);
      element[0] |= static_cast<u8>(field_at(j.more, j.next_more++, j.more_bits) << j.more_shift());
    }
  }
  j.next = next;
  if (kAll) bad = mask_of(equal8(least8(greatest, last), greatest)) != ~u32{0};
  return i;
}

bool unite_any(Joint& j, const u8* numbers, size_t count, u8* out) {
  if (j.listed() == 0) return count == 0;
  bool bad = false;
  const auto with = [&]<bool kValues>() {
    return (j.listed() <= 32    ? unite_vectors<2, true, kValues>
            : j.listed() <= 64  ? unite_vectors<4, true, kValues>
            : j.listed() <= 128 ? unite_vectors<8, true, kValues>
                                : unite_vectors<8, false, kValues>)(j, numbers, count, out, bad);
  };
  const size_t done = j.values ? with.template operator()<true>() : with.template operator()<false>();
  return !bad && unite_elements(j, numbers + done, count - done, out + 2 * done);
}

}  // namespace
}  // namespace netweight
