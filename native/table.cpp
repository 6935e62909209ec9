// Frequency tables of the rans mode. All arithmetic is integer, so that every implementation builds the same table.
#include "table.h"

#include <algorithm>
#include <cmath>

namespace netweight {
namespace {

// kGain[f]: 2^16 log2((f + 1) / f), what a symbol saves per occurrence when its frequency grows from f to f + 1.
// kBits[f]: 2^16 log2(256 / f), what an occurrence costs.
struct Logarithms {
  u32 gain[kSlots];
  u32 bits[kSlots];
  Logarithms() {
    gain[0] = bits[0] = 0;
    for (int f = 1; f < kSlots; f++) {
      gain[f] = static_cast<u32>(std::llround(65536.0 * std::log2((f + 1.0) / f)));
      bits[f] = static_cast<u32>(std::llround(65536.0 * std::log2(256.0 / f)));
    }
  }
};
const Logarithms kLog;

constexpr u64 kPatchBits = 33u << 15;  // 16.5 bits in 1/65536

struct Candidate {
  int count;
  u8 frequency[kMaxSymbols];
  u64 cost;
};

// Frequencies for the `count` likeliest symbols: start below the share of each, then hand out the rest greedily.
void quantize(const u64* weight, int count, u64 total, int most_slots, u8* frequency) {
  int used = 0;
  for (int i = 0; i < count; i++) {
    u64 f = total ? weight[i] * kSlots / total : 0;
    f = std::clamp<u64>(f, 1, static_cast<u64>(most_slots));
    frequency[i] = static_cast<u8>(f);
    used += static_cast<int>(f);
  }
  while (used > kSlots) {  // many symbols below 1/256: take from where it costs least
    int best = -1;
    u64 least = 0;
    for (int i = 0; i < count; i++) {
      if (frequency[i] == 1) continue;
      u64 loss = weight[i] * kLog.gain[frequency[i] - 1];
      if (best < 0 || loss < least) best = i, least = loss;
    }
    frequency[best]--;
    used--;
  }
  while (used < kSlots) {
    int best = -1;
    u64 most = 0;
    for (int i = 0; i < count; i++) {
      if (frequency[i] == most_slots) continue;
      u64 gain = weight[i] * kLog.gain[frequency[i]];
      if (best < 0 || gain > most) best = i, most = gain;
    }
    frequency[best]++;
    used++;
  }
}

Candidate candidate(const std::vector<std::pair<u32, u16>>& order, int count, u64 total, int most_slots) {
  Candidate c;
  c.count = count;
  u64 weight[kMaxSymbols] = {};
  u64 kept = 0;
  for (int i = 0; i < count; i++) kept += weight[i] = order[i].first;
  u64 rest = total - kept;
  weight[0] += rest;  // rare symbols are coded as the likeliest one
  quantize(weight, count, total, most_slots, c.frequency);
  c.cost = rest * kPatchBits + (static_cast<u64>(count) << 19);
  for (int i = 0; i < count; i++) c.cost += weight[i] * kLog.bits[c.frequency[i]];
  return c;
}

}  // namespace

u64 build_table(const u32* counts, int symbol_bits, bool exhaustive, Table& table) {
  const int all = 1 << symbol_bits;
  std::vector<std::pair<u32, u16>> order;
  u64 total = 0;
  for (int s = 0; s < all; s++)
    if (counts[s]) {
      order.push_back({counts[s], static_cast<u16>(s)});
      total += counts[s];
    }
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  const int most_slots = table.steep ? kSlots - 1 : kMaxFrequency;
  const int fewest = (kSlots + most_slots - 1) / most_slots;  // so many symbols, whether they occur or not, can add up to 256
  for (int s = 0; static_cast<int>(order.size()) < fewest; s++)
    if (std::none_of(order.begin(), order.end(), [&](const auto& o) { return o.second == s; }))
      order.push_back({0, static_cast<u16>(s)});

  const int most = std::min<int>(kMaxSymbols, static_cast<int>(order.size()));
  int estimate = fewest;  // a symbol rarer than about 1 in 2048 is cheaper as a patch
  while (estimate < most && u64{order[estimate].first} * 2048 >= total) estimate++;
  int lowest = exhaustive ? fewest : std::max(fewest, estimate - 1);
  int highest = exhaustive ? most : std::min(most, estimate + 1);
  Candidate best = candidate(order, lowest, total, most_slots);
  for (int count = lowest + 1; count <= highest; count++) {
    Candidate c = candidate(order, count, total, most_slots);
    if (c.cost < best.cost) best = c;
  }

  // Slot order: symbols that got less than their share first, because low slots leave a smaller state.
  struct Row {
    bool second;
    u16 symbol;
    u8 frequency;
  };
  std::vector<Row> rows;
  for (int i = 0; i < best.count; i++) {
    bool second = !table.steep && u64{order[i].first} * kSlots < total * best.frequency[i];
    rows.push_back({second, order[i].second, best.frequency[i]});
  }
  std::sort(rows.begin(), rows.end(),
            [](const Row& a, const Row& b) { return a.second != b.second ? a.second < b.second : a.symbol < b.symbol; });
  table.count = best.count;
  int start = 0;
  for (int i = 0; i < best.count; i++) {
    table.symbol[i] = rows[i].symbol;
    table.frequency[i] = rows[i].frequency;
    table.second_class[i] = rows[i].second;
    table.start[i] = static_cast<u8>(start);
    start += rows[i].frequency;
    if (rows[i].symbol == order[0].second) table.host = i;
  }
  return best.cost;
}

namespace {

// Indices of a table by ascending symbol: the order in which it is written.
std::vector<int> by_symbol(const Table& t) {
  std::vector<int> order(t.count);
  for (int i = 0; i < t.count; i++) order[i] = i;
  std::sort(order.begin(), order.end(), [&](int a, int b) { return t.symbol[a] < t.symbol[b]; });
  return order;
}

}  // namespace

size_t Table::written_bytes() const {
  std::vector<int> order = by_symbol(*this);
  size_t runs = 0;
  for (int i = 0; i < count; i++) runs += i == 0 || symbol[order[i]] != symbol[order[i - 1]] + 1;
  return 1 + 3 * runs + static_cast<size_t>(count);
}

u8* Table::write(u8* p) const {
  std::vector<int> order = by_symbol(*this);
  u8* runs = p++;
  *runs = 0;
  for (int i = 0; i < count;) {
    int length = 1;
    while (i + length < count && symbol[order[i + length]] == symbol[order[i]] + length) length++;
    p = put16(p, symbol[order[i]]);
    *p++ = static_cast<u8>(length);
    i += length;
    ++*runs;
  }
  for (int i : order) *p++ = static_cast<u8>(frequency[i] | (second_class[i] ? 0x80 : 0));
  return p;
}

void Table::read(Reader& in, int symbol_bits) {
  int runs = in.byte("a frequency table");
  u16 symbols[kMaxSymbols];
  count = 0;
  int next = 0;
  for (int r = 0; r < runs; r++) {
    int base = in.word("a frequency table"), length = in.byte("a frequency table");
    if (base < next || length == 0 || count + length > kMaxSymbols || base + length > (1 << symbol_bits))
      throw CorruptError("a frequency table lists symbols that cannot be");
    for (int i = 0; i < length; i++) symbols[count++] = static_cast<u16>(base + i);
    next = base + length;
  }
  const u8* bytes = in.take(static_cast<size_t>(count), "a frequency table");
  int n = 0, sum = 0;
  for (int pass = 0; pass < 2; pass++)
    for (int i = 0; i < count; i++) {
      if (steep ? pass != 0 : (bytes[i] >> 7) != pass) continue;
      int f = steep ? bytes[i] : bytes[i] & 0x7f;
      if (f == 0 || sum + f > kSlots) throw CorruptError("a frequency table does not add up to 256");
      symbol[n] = symbols[i];
      frequency[n] = static_cast<u8>(f);
      second_class[n] = pass;
      start[n++] = static_cast<u8>(sum);
      sum += f;
    }
  if (sum != kSlots) throw CorruptError("a frequency table does not add up to 256");
}

DecodeTable::DecodeTable(const Table& table, const Split& split) {
  std::memset(this, 0, sizeof *this);
  for (int i = 0; i < table.count; i++) {
    u32 placed = split.place_symbol(table.symbol[i]);
    frequency[i] = table.frequency[i];
    start[i] = table.start[i];
    low[i] = static_cast<u8>(placed);
    high[i] = static_cast<u8>(placed >> 8);
    for (int k = 0; k < table.frequency[i]; k++) {
      int slot = table.start[i] + k;
      slot_to_index[slot] = static_cast<u8>(i);
      entry[slot] = static_cast<u32>(table.frequency[i]) | static_cast<u32>(k) << 8 | placed << 16;
    }
  }
}

}  // namespace netweight
