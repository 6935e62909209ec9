// Patches: choosing codes for rare symbols, writing them, reading the list back.
#include "patches.h"

#include <algorithm>

namespace netweight {

void RareSymbols::add(const Patch* patches, size_t count) {
  for (size_t i = 0; i < count; i++) seen_[patches[i].symbol]++;
}

void RareSymbols::choose() {
  std::vector<std::pair<u32, u16>> ranked;  // (occurrences, symbol)
  for (size_t s = 0; s < seen_.size(); s++)
    if (seen_[s]) ranked.push_back({seen_[s], static_cast<u16>(s)});
  count_ = static_cast<int>(std::min<size_t>(kMaxRareSymbols, ranked.size()));
  std::partial_sort(ranked.begin(), ranked.begin() + count_, ranked.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  for (int i = 0; i < count_; i++) {
    symbol_[i] = ranked[static_cast<size_t>(i)].second;
    code_[symbol_[i]] = static_cast<u8>(i);
  }
}

u8* RareSymbols::write(u8* p) const {
  *p++ = static_cast<u8>(count_);
  for (int i = 0; i < count_; i++) p = put16(p, symbol_[i]);
  return p;
}

size_t RareSymbols::encoded_words(const Patch* patches, size_t count) const {
  size_t words = 0, next = 0;
  for (size_t i = 0; i < count; i++) {
    size_t gap = patches[i].position - next;
    words += gap / kMaxPatchGap + 1 + (code_[patches[i].symbol] == kPatchLiteral);
    next = patches[i].position + 1u;
  }
  return words;
}

u8* RareSymbols::encode(u8* p, const Patch* patches, size_t count) const {
  size_t next = 0;
  for (size_t i = 0; i < count; i++) {
    size_t gap = patches[i].position - next;
    for (; gap >= kMaxPatchGap; gap -= kMaxPatchGap) p = put16(p, kPatchSkip << 12 | (kMaxPatchGap - 1));
    int code = code_[patches[i].symbol];
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
