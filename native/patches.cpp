// Patches: choosing codes for rare symbols, writing them, reading the list back.
#include "patches.h"

#include <algorithm>

namespace netweight {

void RareSymbols::add(const Patch* patches, size_t count) {
  for (size_t i = 0; i < count; i++) seen_.push_back(patches[i].symbol);
}

void RareSymbols::choose() {
  std::sort(seen_.begin(), seen_.end());
  std::vector<std::pair<size_t, u32>> ranked;  // (occurrences, symbol)
  for (size_t i = 0; i < seen_.size();) {
    size_t j = i;
    while (j < seen_.size() && seen_[j] == seen_[i]) j++;
    ranked.push_back({j - i, seen_[i]});
    i = j;
  }
  std::sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  count_ = static_cast<int>(std::min<size_t>(kMaxRareSymbols, ranked.size()));
  for (int i = 0; i < count_; i++) symbol_[i] = static_cast<u16>(ranked[static_cast<size_t>(i)].second);
}

u8* RareSymbols::write(u8* p) const {
  *p++ = static_cast<u8>(count_);
  for (int i = 0; i < count_; i++) p = put16(p, symbol_[i]);
  return p;
}

int RareSymbols::code_of(u32 symbol) const {
  for (int i = 0; i < count_; i++)
    if (symbol_[i] == symbol) return i;
  return kPatchLiteral;
}

size_t RareSymbols::encoded_words(const Patch* patches, size_t count) const {
  size_t words = 0, next = 0;
  for (size_t i = 0; i < count; i++) {
    size_t gap = patches[i].position - next;
    words += gap / kMaxPatchGap + 1 + (code_of(patches[i].symbol) == kPatchLiteral);
    next = patches[i].position + 1u;
  }
  return words;
}

u8* RareSymbols::encode(u8* p, const Patch* patches, size_t count) const {
  size_t next = 0;
  for (size_t i = 0; i < count; i++) {
    size_t gap = patches[i].position - next;
    for (; gap >= kMaxPatchGap; gap -= kMaxPatchGap) p = put16(p, kPatchSkip << 12 | (kMaxPatchGap - 1));
    int code = code_of(patches[i].symbol);
    p = put16(p, static_cast<u32>(code) << 12 | static_cast<u32>(gap));
    if (code == kPatchLiteral) p = put16(p, patches[i].symbol);
    next = patches[i].position + 1u;
  }
  return p;
}

void RareList::read(Reader& in, int symbol_bits) {
  count = in.byte("the list of rare symbols");
  if (count > kMaxRareSymbols) throw CorruptError("the list of rare symbols is too long");
  for (int i = 0; i < count; i++) {
    symbol[i] = in.word("the list of rare symbols");
    if (symbol[i] >> symbol_bits) throw CorruptError("the list of rare symbols holds one that cannot be");
  }
}

}  // namespace netweight
