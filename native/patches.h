// Patches: corrections of symbols that a table does not hold, put right after the entropy decoder has run.
#pragma once

#include "kernels.h"

namespace netweight {

// Counts every patch's symbol and keeps the most frequent ones, which get four-bit codes; the others are literals.
class RareSymbols {
 public:
  explicit RareSymbols(int symbol_bits) : seen_(size_t{1} << symbol_bits), code_(seen_.size(), kPatchLiteral) {}
  void add(const Patch* patches, size_t count);
  void choose();
  size_t written_bytes() const { return 1 + 2 * size_t(count_); }
  u8* write(u8* p) const;
  size_t encoded_words(const Patch* patches, size_t count) const;  // patches ascending by position
  u8* encode(u8* p, const Patch* patches, size_t count) const;

 private:
  std::vector<u32> seen_;  // occurrences by symbol
  std::vector<u8> code_;   // by symbol
  int count_ = 0;
  u16 symbol_[kMaxRareSymbols];
};

struct RareList {
  int count;
  u16 symbol[kMaxRareSymbols];
  void read(Reader& in, int symbol_bits);
};

// 16-bit words of patches that wait for their elements.
struct PatchWords {
  const u8* at;
  const u8* end;
  size_t next = 0;  // position that a gap of one would reach
};

// Applies the patches of positions below `before` to decoded elements. element_at(position) gives the index of an element in
// the chunk, or npos beyond its end.
template <typename ElementAt>
void apply_patches(PatchWords& words, size_t before, const RareList& rare, const Split& split, void* out, ElementAt element_at) {
  const u32 mask = split.symbol_mask();
  for (; words.at != words.end; words.at += 2) {
    const u32 word = words.at[0] | words.at[1] << 8, code = word >> 12;
    if (words.next + (word & 0xfff) >= before) return;
    words.next += (word & 0xfff) + 1;
    if (code == kPatchSkip) continue;
    u32 symbol;
    if (code == kPatchLiteral) {
      words.at += 2;
      if (words.at == words.end) throw CorruptError("a patch lacks its symbol");
      symbol = words.at[0] | words.at[1] << 8;
      if (symbol >> split.symbol_bits()) throw CorruptError("a patch holds a symbol that cannot be");
    } else {
      if (code >= static_cast<u32>(rare.count)) throw CorruptError("a patch names a rare symbol that is not listed");
      symbol = rare.symbol[code];
    }
    size_t at = element_at(words.next - 1);
    if (at == npos) throw CorruptError("a patch lies outside its chunk");
    if (split.unit == 1) {
      u8& v = static_cast<u8*>(out)[at];
      v = static_cast<u8>((v & ~mask) | split.place_symbol(symbol));
    } else {
      u16 v;  // copied, because the caller's buffer need not be aligned
      std::memcpy(&v, static_cast<u8*>(out) + 2 * at, 2);
      v = static_cast<u16>((v & ~mask) | split.place_symbol(symbol));
      std::memcpy(static_cast<u8*>(out) + 2 * at, &v, 2);
    }
  }
}

}  // namespace netweight
