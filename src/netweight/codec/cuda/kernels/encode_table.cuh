// Histograms, frequency tables and the choice of a split: the same as in native/table.cpp and plane.cpp, in integers only.
// Everything here is done by a whole block.
#pragma once

#include "encode_plane.cuh"
#include "reductions.cuh"

constexpr u32 kSlots = 256;
constexpr u32 kMaxFrequency = 127;
constexpr u32 kMaxSymbols = 63;
constexpr u32 kMinSymbols = 3;
constexpr u64 kPatchCost = 33u << 15;  // 16.5 bits; costs are in 1/65536 bits
constexpr u64 kNever = ~u64{0};
constexpr u32 kCandidates = 3;  // tables that are compared for each split

// By frequency f: round(65536 * log2((f + 1) / f)), what a slot more gains per occurrence.
static __device__ const u32 kGain[128] = {
    0, 65536, 38336, 27200, 21098, 17238, 14575, 12625, 11136, 9962, 9011, 8227, 7568, 7007, 6523, 6102,
    5732, 5404, 5112, 4850, 4613, 4398, 4203, 4024, 3860, 3708, 3568, 3439, 3318, 3205, 3100, 3002,
    2909, 2823, 2741, 2664, 2591, 2521, 2456, 2394, 2335, 2278, 2225, 2174, 2125, 2078, 2033, 1991,
    1950, 1910, 1872, 1836, 1801, 1767, 1735, 1704, 1673, 1644, 1616, 1589, 1563, 1537, 1513, 1489,
    1466, 1444, 1422, 1401, 1380, 1360, 1341, 1322, 1304, 1286, 1269, 1252, 1236, 1220, 1204, 1189,
    1175, 1160, 1146, 1132, 1119, 1106, 1093, 1081, 1068, 1056, 1045, 1033, 1022, 1011, 1001, 990,
    980, 970, 960, 950, 941, 932, 922, 914, 905, 896, 888, 880, 871, 863, 856, 848,
    840, 833, 826, 819, 812, 805, 798, 791, 785, 778, 772, 766, 759, 753, 747, 742,
};

// By frequency f: round(65536 * log2(256 / f)), what an occurrence costs.
static __device__ const u32 kBits[128] = {
    0, 524288, 458752, 420416, 393216, 372118, 354880, 340305, 327680, 316544, 306582, 297571, 289344, 281776, 274769, 268246,
    262144, 256412, 251008, 245896, 241046, 236433, 232035, 227832, 223808, 219948, 216240, 212672, 209233, 205915, 202710, 199610,
    196608, 193699, 190876, 188135, 185472, 182881, 180360, 177904, 175510, 173175, 170897, 168672, 166499, 164374, 162296, 160262,
    158272, 156322, 154412, 152540, 150704, 148903, 147136, 145401, 143697, 142024, 140379, 138763, 137174, 135611, 134074, 132561,
    131072, 129606, 128163, 126741, 125340, 123960, 122599, 121258, 119936, 118632, 117345, 116076, 114824, 113588, 112368, 111163,
    109974, 108800, 107639, 106493, 105361, 104242, 103136, 102043, 100963, 99894, 98838, 97793, 96760, 95738, 94726, 93726,
    92736, 91756, 90786, 89826, 88876, 87935, 87004, 86082, 85168, 84263, 83367, 82479, 81600, 80728, 79865, 79009,
    78161, 77321, 76488, 75662, 74843, 74032, 73227, 72429, 71638, 70853, 70075, 69303, 68538, 67778, 67025, 66278,
};

// A split of elements into symbols and raw bits, and a table of symbols in ascending order.
struct Table {
  u64 cost;  // of the whole plane; kNever for no table
  u32 raw_bits;
  bool signed_raw;
  u32 count;
  u32 host;  // the likeliest symbol, which stands in for those not listed
  u16 symbol[64];
  u8 frequency[64];
  u8 start[64];
  u8 second[64];  // in the second class of slots
};

// The symbols that a histogram counts most, the most frequent first and equal ones by symbol.
struct Ranking {
  u32 present;  // symbols that occur, however many are listed
  u16 symbol[64];
  u32 count[64];
};

// Shared memory of a block while it looks for a table.
struct Search {
  u32 counts[kMaxBins];
  u32 halves[kMaxBins / 2];  // counts of pairs; the two take turns as splits get narrower
  u16 listed[kMaxBins];
  u64 sum;
  Ranking ranking;
  u8 frequency[kCandidates][64];
  u64 cost[kCandidates];
};

NETWEIGHT_DEVICE u32 symbol_bits_of(const Plane& plane, u32 raw_bits) { return 8 * plane.unit - raw_bits; }

// ---- histograms ------------------------------------------------------------------------------------------------------

// Counts the symbols of groups of eight elements: of all, or of one in each `stride`, which moves on from run to run.
template <typename Load>
static __device__ __forceinline__ void count_symbols(Load, const Plane& plane, u32 shift, u32 mask, u32 stride, u32* counts) {
  const u32 runs = plane.count / kGroup / stride;
#pragma unroll 4
  for (u32 run = threadIdx.x; run < runs; run += kThreads) {
    u32 v[kGroup];
    Load::group(plane, (run * stride + run % stride) * kGroup, v);
#pragma unroll
    for (u32 k = 0; k < kGroup; k++) atomicAdd(&counts[v[k] >> shift & mask], 1u);
  }
  if (stride == 1)
    for (u32 i = runs * kGroup + threadIdx.x; i < plane.count; i += kThreads) atomicAdd(&counts[Load::element(plane, i) >> shift & mask], 1u);
}

// Symbols to `s.counts`; returns how many elements were counted.
NETWEIGHT_DEVICE u32 histogram(const Plane& plane, u32 shift, u32 bins, u32 stride, Search& s) {
  const u32 copies = kMaxBins / bins < kWarps ? kMaxBins / bins : kWarps;  // so that warps seldom wait for each other
  for (u32 i = threadIdx.x; i < copies * bins; i += kThreads) s.counts[i] = 0;
  __syncthreads();
  with_loads(plane, [&](auto load) { count_symbols(load, plane, shift, bins - 1, stride, s.counts + warp_id() % copies * bins); });
  __syncthreads();
  for (u32 i = threadIdx.x; i < bins; i += kThreads)
    for (u32 copy = 1; copy < copies; copy++) s.counts[i] += s.counts[copy * bins + i];
  __syncthreads();
  return stride == 1 ? plane.count : plane.count / kGroup / stride * kGroup;
}

// Would coding save less than about a twentieth of a bit?
NETWEIGHT_DEVICE bool looks_random(u32 bins, u32 total, Search& s) {
  if (threadIdx.x == 0) s.sum = 0;
  __syncthreads();
  u64 squares = 0;
  for (u32 i = threadIdx.x; i < bins; i += kThreads) squares += static_cast<u64>(s.counts[i]) * s.counts[i];
  squares = warp_sum(squares);
  if (lane_id() == 0) atomicAdd(&s.sum, squares);
  __syncthreads();
  return s.sum * bins <= static_cast<u64>(total) * total / 10 * 11;
}

// Lists the symbols that occur and finds the place of each among them; those up to 63 are kept.
NETWEIGHT_DEVICE void rank(const u32* counts, u32 bins, u16* listed, Ranking& r) {
  if (threadIdx.x == 0) r.present = 0;
  __syncthreads();
  for (u32 i = threadIdx.x; i < bins; i += kThreads)
    if (counts[i] != 0) listed[atomicAdd(&r.present, 1u)] = static_cast<u16>(i);
  __syncthreads();
  const u32 present = r.present;
  for (u32 k = threadIdx.x; k < present; k += kThreads) {
    const u32 symbol = listed[k], count = counts[symbol];
    u32 before = 0;
    for (u32 other = 0; other < present && before < 64; other++) {
      const u32 theirs = listed[other], their_count = counts[theirs];
      before += their_count > count || (their_count == count && theirs < symbol);
    }
    if (before < 64) {
      r.symbol[before] = static_cast<u16>(symbol);
      r.count[before] = count;
    }
  }
  __syncthreads();
}

// ---- tables ----------------------------------------------------------------------------------------------------------

// A warp's frequencies for up to 64 weights, two a lane: shares rounded down, then slots given or taken where that is worth
// most or costs least. An entry's place breaks ties, lower first.
struct Share {
  u32 weight, frequency, place;
  bool used;

  __device__ __forceinline__ u64 gain() const {  // larger is better; 0: cannot grow
    return used && frequency < kMaxFrequency ? (static_cast<u64>(weight) * kGain[frequency] << 6 | (63 - place)) + 1 : 0;
  }
  __device__ __forceinline__ u64 saving() const {  // larger is better: the complement of what a slot less costs
    return used && frequency > 1 ? ~(static_cast<u64>(weight) * kGain[frequency - 1] << 6 | place) : 0;
  }
};

NETWEIGHT_DEVICE void quantize(Share* shares, u32 total) {
  u32 sum = 0;
#pragma unroll
  for (u32 k = 0; k < 2; k++) {
    const u32 f = shares[k].used ? shares[k].weight * kSlots / total : 0;
    shares[k].frequency = !shares[k].used ? 0 : f < 1 ? 1 : f > kMaxFrequency ? kMaxFrequency : f;
    sum += shares[k].frequency;
  }
  sum = warp_sum(sum);
  while (sum != kSlots) {
    const bool grow = sum < kSlots;
    const u64 first = grow ? shares[0].gain() : shares[0].saving(), second = grow ? shares[1].gain() : shares[1].saving();
    const u64 best = warp_max(first > second ? first : second);
    const u32 step = grow ? 1 : ~0u;
    if (first == best) shares[0].frequency += step;
    else if (second == best) shares[1].frequency += step;
    sum += step;
  }
}

// A warp's table of the `count` likeliest symbols: frequencies to `frequency`; returns what it costs.
NETWEIGHT_DEVICE u64 candidate(const Ranking& r, u32 count, u32 total, u8* frequency) {
  Share shares[2];
  u32 kept = 0;
#pragma unroll
  for (u32 k = 0; k < 2; k++) {
    const u32 place = lane_id() + kWarp * k;
    shares[k] = {place < count ? r.count[place] : 0, 0, place, place < count};
    kept += shares[k].weight;
  }
  const u32 rest = total - warp_sum(kept);
  if (lane_id() == 0) shares[0].weight += rest;  // rare symbols are coded as the likeliest one
  quantize(shares, total);
  u64 cost = 0;
#pragma unroll
  for (u32 k = 0; k < 2; k++) {
    frequency[shares[k].place] = static_cast<u8>(shares[k].frequency);
    cost += static_cast<u64>(shares[k].weight) * kBits[shares[k].frequency];
  }
  return warp_sum(cost) + rest * kPatchCost + (static_cast<u64>(count) << 19);
}

// Sorts a candidate's symbols and gives out their slots: symbols that got less than their share first, because low slots
// leave a smaller state.
NETWEIGHT_DEVICE void lay_out(const Ranking& r, const u8* frequency, u32 count, u32 total, Table& table) {
  const u32 i = threadIdx.x;
  if (i >= count) return;
  u32 before = 0, start = 0;
  const u32 symbol = r.symbol[i];
  const bool second = r.count[i] * kSlots < total * frequency[i];
  for (u32 other = 0; other < count; other++) {
    const u32 theirs = r.symbol[other];
    const bool their_second = r.count[other] * kSlots < total * frequency[other];
    before += theirs < symbol;
    if (their_second != second ? second : theirs < symbol) start += frequency[other];
  }
  table.symbol[before] = static_cast<u16>(symbol);
  table.frequency[before] = frequency[i];
  table.start[before] = static_cast<u8>(start);
  table.second[before] = second;
}

// Three symbols at least, since two frequencies of at most 127 cannot add up to 256. By one thread.
NETWEIGHT_DEVICE u32 fill_up(Ranking& r, u32 listed) {
  for (u32 symbol = 0; listed < kMinSymbols; symbol++) {
    bool there = false;
    for (u32 i = 0; i < listed; i++) there |= r.symbol[i] == symbol;
    if (there) continue;
    r.symbol[listed] = static_cast<u16>(symbol);
    r.count[listed++] = 0;
  }
  return listed;
}

// Puts the cheapest table for a histogram into `best` if it costs less than what is there, for the whole plane.
NETWEIGHT_DEVICE void try_table(const Plane& plane, u32 raw_bits, bool signed_raw, const u32* counts, u32 total, Search& s, Table& best) {
  Ranking& r = s.ranking;
  rank(counts, 1u << symbol_bits_of(plane, raw_bits), s.listed, r);
  if (threadIdx.x == 0) fill_up(r, r.present);
  __syncthreads();
  const u32 listed = r.present < kMinSymbols ? kMinSymbols : r.present, most = listed < kMaxSymbols ? listed : kMaxSymbols;
  u32 estimate = kMinSymbols;  // a symbol rarer than about 1 in 2048 is cheaper as a patch
  while (estimate < most && static_cast<u64>(r.count[estimate]) * 2048 >= total) estimate++;
  const u32 lowest = estimate - 1 > kMinSymbols ? estimate - 1 : kMinSymbols, highest = estimate + 1 < most ? estimate + 1 : most;
  const u32 tables = highest - lowest + 1, w = warp_id();
  if (w < tables) {
    const u64 cost = candidate(r, lowest + w, total, s.frequency[w]);
    if (lane_id() == 0) s.cost[w] = cost;
  }
  __syncthreads();
  u32 cheapest = 0;
  for (u32 i = 1; i < tables; i++)
    if (s.cost[i] < s.cost[cheapest]) cheapest = i;
  // Of a sample only a part was counted, and then the product fits 64 bits; without one there is nothing to scale.
  const u64 scaled = total == plane.count ? s.cost[cheapest] : s.cost[cheapest] * plane.count / total;
  const u64 cost = scaled + (static_cast<u64>(plane.count) * raw_bits << 16);
  const bool better = cost < best.cost;
  __syncthreads();
  if (better) {
    lay_out(r, s.frequency[cheapest], lowest + cheapest, total, best);
    if (threadIdx.x == 0) {
      best.cost = cost;
      best.raw_bits = raw_bits;
      best.signed_raw = signed_raw;
      best.count = lowest + cheapest;
      best.host = r.symbol[0];
    }
  }
  __syncthreads();
}

// The cheapest table of all splits, to `best`; its cost is kNever if none is worth trying.
NETWEIGHT_DEVICE void choose_split(const Plane& plane, SplitRange range, u32 stride, Search& s, Table& best) {
  if (threadIdx.x == 0) best.cost = kNever;
  u32 bins = 1u << symbol_bits_of(plane, range.least);
  const u32 total = histogram(plane, range.signed_raw ? range.least - 1 : range.least, bins, stride, s);
  if (range.tail && looks_random(bins, total, s)) return;
  u32 *now = s.counts, *next = s.halves;
  for (u32 raw_bits = range.least;; raw_bits++) {
    try_table(plane, raw_bits, range.signed_raw, now, total, s, best);
    if (raw_bits == range.most) return;
    bins /= 2;  // one more raw bit: neighboring symbols become one
    for (u32 i = threadIdx.x; i < bins; i += kThreads) next[i] = now[2 * i] + now[2 * i + 1];
    __syncthreads();
    u32* const old = now;
    now = next;
    next = old;
  }
}
