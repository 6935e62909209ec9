// Planes: choosing how to store one, and the raw, constant, packed and rans modes.
#include "plane.h"

#include <algorithm>
#include <bit>
#include <mutex>

#include "fields.h"
#include "patches.h"

namespace netweight {
namespace {

constexpr size_t kSmallest = 512;  // bytes; below this no table pays

constexpr u64 kLeastPerStream = u64{1} << 12;  // bytes of skewed planes, which else are mostly states

int stream_count(size_t count, bool inner, u64 least_bytes) {  // states cost more than speed gains in parts of skewed planes
  int streams = count < (inner ? 1u << 17 : 1u << 14) ? 1 : count < (1u << 18) ? 2 : 4;
  while (streams > 1 && least_bytes < kLeastPerStream * static_cast<u64>(streams)) streams /= 2;
  return streams;
}

// ---- histograms ----------------------------------------------------------------------------------------------------

// Counts symbols of groups of eight elements: all groups, or one of every `stride`. The group within each run of `stride`
// groups moves on from run to run, so that a sample meets every column of a matrix.
template <typename Element>
size_t count_symbols(const u8* in, size_t count, const Split& split, size_t stride, std::vector<u32>& counts) {
  const u32 mask = (1u << split.symbol_bits()) - 1;
  const int shift = split.signed_raw ? split.raw_bits - 1 : split.raw_bits;
  const size_t bins = size_t{1} << split.symbol_bits();
  std::vector<u32> parts(4 * bins);  // four counters, since equal neighbors would wait for each other
  u32* p = parts.data();
  const size_t groups = count / 8, runs = groups / stride;
  size_t total = runs * 8;
  // Four two-byte or eight one-byte elements at a time: bits from the neighbor end up above the mask.
  constexpr size_t kPerWord = 8 / sizeof(Element);
  const u64 masks = u64{mask} * (sizeof(Element) == 1 ? 0x0101010101010101ull : 0x0001000100010001ull);
  for (size_t run = 0; run < runs; run++) {
    const u8* group = in + (run * stride + run % stride) * 8 * sizeof(Element);
    for (size_t w = 0; w < sizeof(Element); w++) {
      u64 x;
      std::memcpy(&x, group + 8 * w, 8);
      x = x >> shift & masks;
      for (size_t i = 0; i < kPerWord; i++) p[i % 4 * bins + static_cast<Element>(x >> 8 * sizeof(Element) * i)]++;
    }
  }
  if (stride == 1)
    for (size_t i = groups * 8; i < count; i++, total++) {
      Element v;
      std::memcpy(&v, in + i * sizeof v, sizeof v);
      p[v >> shift & mask]++;
    }
  counts.resize(bins);
  for (size_t i = 0; i < bins; i++) counts[i] = p[i] + p[bins + i] + p[2 * bins + i] + p[3 * bins + i];
  return total;
}

}  // namespace

size_t histogram(const u8* in, size_t count, const Split& split, size_t stride, std::vector<u32>& counts) {
  return split.unit == 1 ? count_symbols<u8>(in, count, split, stride, counts) : count_symbols<u16>(in, count, split, stride, counts);
}

namespace {

// One more raw bit: neighboring symbols become one.
std::vector<u32> folded(const std::vector<u32>& counts) {
  std::vector<u32> half(counts.size() / 2);
  for (size_t i = 0; i < half.size(); i++) half[i] = counts[2 * i] + counts[2 * i + 1];
  return half;
}

// Are equal symbols at most tenths / 10 times as common as in noise? Up to 11, order-0 coding saves less than about a twentieth
// of a bit. (Collision probability, exact in integers.)
bool looks_random(const std::vector<u32>& counts, u64 total, u64 tenths) {
  u64 squares = 0;
  for (u64 c : counts) squares += c * c;
  return squares * counts.size() <= total * total / 10 * tenths;
}

// ---- choosing a split ----------------------------------------------------------------------------------------------

struct Choice {
  Mode mode = Mode::raw;
  u64 cost = ~u64{0};  // estimated bits / 65536 of the whole plane
  Split split{};
  Table table;
  std::vector<u16> wide_symbols, wide_frequencies;
};

// Raw bits of the splits worth trying, narrowest symbol last.
struct SplitRange {
  bool signed_raw;
  int least, most;
};

SplitRange split_range(const PlaneShape& shape, Level level) {
  if (shape.kind == PlaneKind::floating) {
    int whole = 1 + shape.mantissa_bits;  // all of sign and mantissa raw: symbol = exponent
    const bool narrow = shape.unit == 1 || shape.exponent_bits == 5;
    int finest = level == Level::fast ? 0 : level == Level::standard ? 1 + narrow : level == Level::high ? 2 + narrow : 3;
    return {!shape.one_sign, std::max(1, whole - finest) - shape.one_sign, whole - shape.one_sign};
  }
  if (shape.unit == 1) return {false, 0, 5};
  return {false, level == Level::max ? 6 : 8, 12};
}

size_t sampling_stride(Level level, size_t count) {
  if (count < (1u << 16)) return 1;
  return level == Level::fast ? 16 : level == Level::standard ? 8 : level == Level::high ? 2 : 1;
}

u64 scaled(u64 cost, size_t count, size_t total) {
  return static_cast<u64>(static_cast<unsigned __int128>(cost) * count / std::max<size_t>(total, 1));
}

// For skewed bytes: tables without raw bits, steep ones among them.
void choose_whole(const std::vector<u32>& counts, size_t total, size_t count, Level level, Choice& best) {
  const Split whole{1, 0, false};
  for (bool steep : {false, true}) {
    Table table;
    table.steep = steep;
    const u64 cost = scaled(build_table(counts.data(), 8, level == Level::max, table), count, total);
    if (cost < best.cost) best = {Mode::rans, cost, whole, table, {}, {}};
  }
  std::vector<u16> symbols, frequencies;
  u64 wide = build_wide_table(counts.data(), 8, symbols, frequencies);
  if (wide == ~u64{0}) return;
  wide = scaled(wide, count, total);
  if ((level == Level::max ? wide : wide + wide / 32) < best.cost) best = {Mode::wide_rans, wide, whole, {}, symbols, frequencies};  // it decodes more slowly
}

Choice choose_split(const PlaneShape& shape, const u8* in, size_t count, Level level, size_t stride, bool skewed) {
  SplitRange range = split_range(shape, level);
  Choice best;
  std::vector<u32> counts;
  Split split{shape.unit, range.least, range.signed_raw};
  size_t total = histogram(in, count, split, stride, counts);
  const bool tail = shape.kind == PlaneKind::tail;
  if (tail && looks_random(counts, total, 11)) return best;
  if (tail && !shape.inner && looks_random(counts, total, 20)) skewed = false;
  for (int raw_bits = range.least; raw_bits <= range.most; raw_bits++, counts = folded(counts)) {
    split.raw_bits = raw_bits;
    u64 raw_cost = (static_cast<u64>(count) * static_cast<u64>(raw_bits)) << 16;
    Table table;
    u64 cost = scaled(build_table(counts.data(), split.symbol_bits(), level == Level::max, table), count, total) + raw_cost;
    if (cost < best.cost) best = {Mode::rans, cost, split, table, {}, {}};
    if (level != Level::max || count < (1u << 12)) continue;
    std::vector<u16> symbols, frequencies;
    u64 wide = build_wide_table(counts.data(), split.symbol_bits(), symbols, frequencies);
    if (wide == ~u64{0}) continue;
    wide += raw_cost;
    if (wide < best.cost) best = {Mode::wide_rans, wide, split, {}, symbols, frequencies};
  }
  if (skewed && shape.unit == 1) {
    total = histogram(in, count, {1, 0, false}, stride, counts);
    choose_whole(counts, total, count, level, best);
  }
  return best;
}

// ---- rans and steep --------------------------------------------------------------------------------------------------

// Returns nullptr when there are too many patches for this table to be the right one.
u8* encode_rans(const Split& split, const Table& table, const u8* in, size_t count, int streams, const Kernels& kernels, Scratch& scratch, u8* out) {
  const size_t rows = (count + 64u * static_cast<size_t>(streams) - 1) / (64u * static_cast<size_t>(streams));
  const RawRegions region(split, streams, rows);
  const EncodeTable lookups(table, split);

  u8* p = out;
  *p++ = static_cast<u8>(table.steep ? Mode::steep : Mode::rans);
  *p++ = static_cast<u8>(split.raw_bits | (split.signed_raw ? 0x80 : 0));
  *p++ = static_cast<u8>(streams);
  p = table.write(p);
  u8* lengths = p;
  u8* states = lengths + 6 * streams;
  u8* raw_low = states + 128 * streams;
  u8* raw_rest = raw_low + region.low_bytes;
  u8* bodies = raw_rest + region.rest_bytes;

  RansEncoder e{};
  e.split = split;
  e.streams = streams;
  e.count = count;
  e.rows = rows;
  e.table = &lookups;
  e.raw_low = raw_low;
  e.raw_rest = raw_rest;
  e.ahead = scratch.chunks_ahead * count * static_cast<size_t>(split.unit);
  e.padding = static_cast<u16>(split.place_symbol(table.symbol[table.host]));
  const size_t stream_room = rows * 64 + 128, patch_room = rows * 2 + 192;
  u8* bytes = scratch.bytes(stream_room * static_cast<size_t>(streams));
  Patch* patches = scratch.patches(patch_room * static_cast<size_t>(streams));
  u8* top[kMaxStreams];
  Patch* patch_top[kMaxStreams];
  for (int g = 0; g < streams; g++) {
    top[g] = e.at[g] = bytes + stream_room * static_cast<size_t>(g + 1) - 64;
    patch_top[g] = e.patch[g] = patches + patch_room * static_cast<size_t>(g + 1);
    e.patch_limit[g] = patches + patch_room * static_cast<size_t>(g) + 64;
  }
  if (!encode_last_rows(e, in) || !kernels.encode_rows(e, in, rows_before_last_two(rows))) return nullptr;

  RareSymbols rare(split.symbol_bits());
  for (int g = 0; g < streams; g++) rare.add(e.patch[g], static_cast<size_t>(patch_top[g] - e.patch[g]));
  rare.choose();
  size_t size = static_cast<size_t>(bodies - out) + rare.written_bytes();
  for (int g = 0; g < streams; g++) {
    size_t length = static_cast<size_t>(top[g] - e.at[g]);
    size_t words = rare.encoded_words(e.patch[g], static_cast<size_t>(patch_top[g] - e.patch[g]));
    lengths = put24(put24(lengths, static_cast<u32>(length)), static_cast<u32>(words));
    std::memcpy(states + 128 * g, e.low[g], 64);
    std::memcpy(states + 128 * g + 64, e.high[g], 64);
    size += length + 2 * words;
  }
  if (size >= plane_bound(count, split.unit)) return nullptr;
  p = bodies;
  for (int g = 0; g < streams; g++) {
    size_t length = static_cast<size_t>(top[g] - e.at[g]);
    std::memcpy(p, e.at[g], length);
    p += length;
  }
  p = rare.write(p);
  for (int g = 0; g < streams; g++) p = rare.encode(p, e.patch[g], static_cast<size_t>(patch_top[g] - e.patch[g]));
  return p;
}

void decode_rans(Reader& in, const u8* readable_end, int unit, size_t count, bool steep, const Kernels& kernels, u8* out, Follower* check) {
  RansBlock b{};
  b.split = read_split(in, unit);
  b.streams = in.byte("a plane's header");
  if (b.streams != 1 && b.streams != 2 && b.streams != 4) throw CorruptError("a plane's header asks for an impossible number of streams");
  b.count = count;
  b.steep = steep;
  const size_t streams = static_cast<size_t>(b.streams);
  b.rows = (count + 64 * streams - 1) / (64 * streams);
  Table table;
  table.steep = steep;
  table.read(in, b.split.symbol_bits());
  const DecodeTable lookups(table, b.split);
  b.table = &lookups;
  u32 length[kMaxStreams], words[kMaxStreams];
  for (int g = 0; g < b.streams; g++) {
    length[g] = in.word24("a plane's header");
    words[g] = in.word24("a plane's header");
  }
  Lanes lanes;
  for (int g = 0; g < b.streams; g++) {
    std::memcpy(lanes.low[g], in.take(64, "a plane's states"), 64);
    std::memcpy(lanes.high[g], in.take(64, "a plane's states"), 64);
    for (u8 high : lanes.high[g])
      if (high == 0) throw CorruptError("a plane's states are out of range");
  }
  const RawRegions region(b.split, b.streams, b.rows);
  b.raw_low = in.take(region.low_bytes, "raw bits");
  b.raw_rest = in.take(region.rest_bytes, "raw bits");
  for (int g = 0; g < b.streams; g++) {
    lanes.at[g] = in.take(length[g], "an entropy-coded stream");
    b.stream_end[g] = in.at;
  }
  b.readable_end = readable_end;

  RareList rare;
  rare.read(in, b.split.symbol_bits());
  PatchWords patches[kMaxStreams];
  for (int g = 0; g < b.streams; g++) {
    const u8* from = in.take(2 * size_t{words[g]}, "patches");
    patches[g] = {from, in.at};
  }
  const auto patch_rows = [&](size_t end) {
    for (size_t g = 0; g < streams; g++)
      apply_patches(patches[g], end, rare, b.split, out, [&](size_t position) {
        size_t at = (position / 64 * streams + g) * 64 + static_cast<size_t>(lane_position(static_cast<int>(position % 64), unit));
        return at < count ? at : npos;
      });
  };
  const size_t end = rows_before_last_two(b.rows), row_bytes = 64 * streams * static_cast<size_t>(unit), slab = check ? kSlab / row_bytes : end;
  size_t row = 0;
  while (row < end) {
    const size_t stop = std::min(end, row + slab);
    row = kernels.decode_rows(b, lanes, row, stop, out);
    if (row != npos && row < stop) row = portable_kernels().decode_rows(b, lanes, row, stop, out);
    if (row == npos) break;
    if (!check) continue;
    patch_rows(64 * row);
    check->up_to(out + row * row_bytes);
  }
  if (row == npos || !decode_last_rows(b, lanes, out)) throw CorruptError("an entropy-coded stream does not end where it should");
  patch_rows(npos);
}

// ---- packed: blocks of 64 bytes that share their number of low zero bits ---------------------------------------------

u8* encode_packed(const u8* in, size_t count, u8* out) {
  const size_t blocks = (count + 63) / 64;
  u8* p = out;
  *p++ = static_cast<u8>(Mode::packed);
  u8* widths = p;
  p += (blocks + 1) / 2;
  std::memset(widths, 0, (blocks + 1) / 2);
  for (size_t block = 0; block < blocks; block++) {
    alignas(64) u8 v[64] = {};
    std::memcpy(v, in + 64 * block, std::min<size_t>(64, count - 64 * block));
    u8 any = 0;
    for (u8 x : v) any |= x;
    int bits = any ? 8 - std::countr_zero(any) : 0;
    widths[block / 2] |= static_cast<u8>(bits << (block % 2 * 4));
    for (u8& x : v) x = static_cast<u8>(x >> (8 - bits) % 8);
    pack_fields(bits, v, p);
    p += field_block_bytes(bits);
  }
  return p;
}

size_t packed_size(const u8* in, size_t count) {
  const size_t blocks = (count + 63) / 64;
  size_t size = 1 + (blocks + 1) / 2;
  for (size_t block = 0; block < blocks; block++) {
    u8 any = 0;
    const size_t n = std::min<size_t>(64, count - 64 * block);
    for (size_t i = 0; i < n; i++) any |= in[64 * block + i];
    size += any ? field_block_bytes(8 - std::countr_zero(any)) : 0;
  }
  return size;
}

void decode_packed(Reader& in, size_t count, u8* out) {
  const size_t blocks = (count + 63) / 64;
  const u8* widths = in.take((blocks + 1) / 2, "packed widths");
  for (size_t block = 0; block < blocks; block++) {
    int bits = widths[block / 2] >> (block % 2 * 4) & 15;
    if (bits > 8) throw CorruptError("a packed block is wider than a byte");
    const u8* fields = in.take(field_block_bytes(bits), "a packed block");
    const size_t n = std::min<size_t>(64, count - 64 * block);
    if (bits == 8) {
      std::memcpy(out + 64 * block, fields, n);
      continue;
    }
    alignas(64) u8 v[64];
    unpack_fields(bits, fields, v);
    for (u8& x : v) x = static_cast<u8>(x << (8 - bits) % 8);
    std::memcpy(out + 64 * block, v, n);
  }
}

// ---- raw and constant ------------------------------------------------------------------------------------------------

u8* encode_raw(const u8* in, size_t bytes, u8* out) {
  *out++ = static_cast<u8>(Mode::raw);
  std::memcpy(out, in, bytes);
  return out + bytes;
}

bool is_constant(const u8* in, size_t count, int unit) {
  return count > 1 && std::memcmp(in, in + unit, (count - 1) * static_cast<size_t>(unit)) == 0;
}

void fill(const u8* value, int unit, size_t count, u8* out) {
  if (unit == 1 || value[0] == value[1]) {
    std::memset(out, value[0], count * static_cast<size_t>(unit));
    return;
  }
  for (size_t i = 0; i < count; i++) std::memcpy(out + 2 * i, value, 2);
}

// Raw, packed or entropy coded, and no larger than raw; all that there is for GPUs.
u8* encode_dense(const PlaneShape& shape, const u8* in, size_t count, Level level, bool skewed, const Kernels& kernels, Scratch& scratch, u8* out) {
  const size_t bytes = count * static_cast<size_t>(shape.unit);
  if (bytes < kSmallest) {
    if (shape.inner && shape.unit == 1 && packed_size(in, count) < bytes) return encode_packed(in, count, out);
    return encode_raw(in, bytes, out);
  }

  const u64 worthwhile = (static_cast<u64>(bytes) << 19) / 200 * 199;  // half a percent at least
  const size_t packed = shape.unit == 1 ? packed_size(in, count) : bytes;
  size_t stride = shape.inner ? 1 : sampling_stride(level, count);
  for (;;) {
    Choice choice = choose_split(shape, in, count, level, stride, skewed);
    const u64 packed_cost = static_cast<u64>(packed) << 19;
    if (packed_cost < worthwhile && packed_cost <= choice.cost) return encode_packed(in, count, out);
    if (choice.mode == Mode::raw || choice.cost >= worthwhile) return encode_raw(in, bytes, out);
    const int streams = stream_count(count, shape.inner, skewed ? choice.cost >> 19 : ~u64{0});
    u8* end = choice.mode == Mode::rans ? encode_rans(choice.split, choice.table, in, count, streams, kernels, scratch, out)
                                        : encode_wide(choice.split, choice.wide_symbols, choice.wide_frequencies, in, count, scratch, out);
    if (end && static_cast<size_t>(end - out) <= bytes) return end;
    if (stride == 1) return encode_raw(in, bytes, out);
    stride = 1;  // the sample misled: look at everything
  }
}

}  // namespace

u8* encode_numbers(const u8* in, const std::vector<u32>& counts, size_t count, Level level, const Kernels& kernels, Scratch& scratch, u8* out) {
  if (is_constant(in, count, 1)) {
    *out++ = static_cast<u8>(Mode::constant);
    *out++ = *in;
    return out;
  }
  Choice choice;
  if (level == Level::max) {
    choose_whole(counts, count, count, level, choice);
  } else {
    choice.mode = Mode::rans;
    choice.split = {1, 0, false};
    build_table(counts.data(), 8, false, choice.table);
  }
  u8* end = choice.mode == Mode::rans ? encode_rans(choice.split, choice.table, in, count, stream_count(count, false, ~u64{0}), kernels, scratch, out)
                                      : encode_wide(choice.split, choice.wide_symbols, choice.wide_frequencies, in, count, scratch, out);
  return end && static_cast<size_t>(end - out) <= count ? end : encode_raw(in, count, out);
}

Split read_split(Reader& in, int unit) {
  u8 bits = in.byte("a plane's header");
  Split split{unit, bits & 0x7f, (bits & 0x80) != 0};
  if (split.raw_bits >= 8 * unit || (split.signed_raw && split.raw_bits == 0)) throw CorruptError("a plane's header asks for impossible raw bits");
  return split;
}

namespace {

constexpr size_t kLargestRoom = size_t{1} << 21, kMostRooms = 64;

struct Rooms {
  std::mutex guard;
  std::vector<std::pair<size_t, std::unique_ptr<u8[]>>> idle;
};
Rooms& rooms() {
  static Rooms* s = new Rooms;  // never destroyed: threads may still work while the program ends
  return *s;
}

}  // namespace

Room::Room(size_t bytes) : size_(std::bit_ceil(bytes)) {
  if (size_ <= kLargestRoom) {
    std::lock_guard<std::mutex> lock(rooms().guard);
    auto& idle = rooms().idle;
    for (size_t i = idle.size(); i-- > 0;)
      if (idle[i].first == size_) {
        memory_ = std::move(idle[i].second);
        idle.erase(idle.begin() + static_cast<std::ptrdiff_t>(i));
        return;
      }
  }
  memory_.reset(new u8[size_]);
}

Room::~Room() {
  if (size_ > kLargestRoom) return;
  std::lock_guard<std::mutex> lock(rooms().guard);
  if (rooms().idle.size() < kMostRooms) rooms().idle.emplace_back(size_, std::move(memory_));
}

void Room::forget_idle() {
  std::lock_guard<std::mutex> lock(rooms().guard);
  rooms().idle.clear();
}

namespace {

// Do all elements have the same top bit? Mostly a few tell.
bool has_one_sign(const u8* in, size_t count, int unit) {
  const auto top = [&](size_t i) { return in[(i + 1) * static_cast<size_t>(unit) - 1] & 0x80; };
  for (size_t i = 0; i < kSamples; i++)
    if (top(sample_place(i, count)) != top(0)) return false;
  u8 any = 0;
  for (size_t i = 0; i < count; i++) any |= static_cast<u8>(top(i) ^ top(0));
  return any == 0;
}

}  // namespace

u8* encode_plane(const PlaneShape& given, const u8* in, size_t count, Level level, const Kernels& kernels, Scratch& scratch, u8* out, int nesting) {
  PlaneShape shape = given;
  if (is_constant(in, count, shape.unit)) {
    *out++ = static_cast<u8>(Mode::constant);
    std::memcpy(out, in, static_cast<size_t>(shape.unit));
    return out + shape.unit;
  }
  if (nesting <= 0 || count < 32) return encode_dense(shape, in, count, level, shape.inner, kernels, scratch, out);
  shape.one_sign = shape.kind == PlaneKind::floating && has_one_sign(in, count, shape.unit);
  const bool dense_tail = shape.kind == PlaneKind::tail && !shape.inner && count >= kSmallest;
  Probe found{};
  if (!dense_tail) found = probe(in, count, shape.unit);
  const bool skewed = shape.inner || shape.kind != PlaneKind::floating || found.often() || found.few(shape.unit);
  const bool joint = shape.kind == PlaneKind::floating && shape.unit == 2 && !shape.one_sign && (level == Level::high || level == Level::max);
  const bool small = count < (1u << 16);
  if (joint && level == Level::high && !skewed && !small)
    if (u8* end = encode_joint(shape, in, count, 2, level, kernels, scratch, out)) return end;
  u8* end = encode_dense(shape, in, count, level, skewed, kernels, scratch, out);
  for (int finer = 2; joint && (small || level == Level::max) && finer <= (level == Level::max ? 3 : 2); finer++) {
    const Room trial(plane_bound(count, 2));
    const u8* trial_end = encode_joint(shape, in, count, finer, level, kernels, scratch, trial.get());
    if (trial_end && trial_end - trial.get() < end - out) {
      std::memcpy(out, trial.get(), static_cast<size_t>(trial_end - trial.get()));
      end = out + (trial_end - trial.get());
    }
  }
  if (!skewed || (dense_tail && *out == static_cast<u8>(Mode::raw))) return end;  // the usual tail is noise
  if (dense_tail) found = probe(in, count, shape.unit);
  if (shape.unit == 1 && (!found.often() || shape.split_off)) return end;
  const Room trial(2 * count * static_cast<size_t>(shape.unit) + 8192 * static_cast<size_t>(nesting + 1));
  const u8* trial_end = encode_skewed(shape, found, in, count, level, kernels, scratch, trial.get(), nesting);
  if (!trial_end) return end;
  const size_t size = static_cast<size_t>(trial_end - trial.get());
  if (200 * size > 199 * static_cast<size_t>(end - out)) return end;
  std::memcpy(out, trial.get(), size);
  return out + size;
}

void decode_plane(Reader& in, const u8* readable_end, int unit, size_t count, const Kernels& kernels, u8* out, int nesting, Follower* check) {
  const size_t bytes = count * static_cast<size_t>(unit);
  const Mode mode = static_cast<Mode>(in.byte("a plane"));
  if (mode >= Mode::steep && mode <= Mode::joint) {
    if (nesting == kFlat) throw CorruptError("a plane has an unknown mode");
    if (nesting == 0 && mode != Mode::steep) throw CorruptError("planes lie too deep in planes");
    if (unit == 1 && mode >= Mode::palette) throw CorruptError("a plane of one-byte elements has a mode of two-byte ones");
  }
  switch (mode) {
    case Mode::raw: std::memcpy(out, in.take(bytes, "a raw plane"), bytes); return;
    case Mode::constant: fill(in.take(static_cast<size_t>(unit), "a constant plane"), unit, count, out); return;
    case Mode::packed:
      if (unit != 1) throw CorruptError("a packed plane must have one-byte elements");
      decode_packed(in, count, out);
      return;
    case Mode::rans:
    case Mode::steep: decode_rans(in, readable_end, unit, count, mode == Mode::steep, kernels, out, check); return;
    case Mode::wide_rans: decode_wide(in, readable_end, unit, count, kernels, out); return;
    case Mode::sparse:
      decode_sparse(in, readable_end, unit, count, kernels, out, nesting,
                    [&](size_t left, u8* rest) { decode_plane(in, readable_end, unit, left, kernels, rest, nesting - 1); });
      return;
    case Mode::palette: decode_palette(in, readable_end, count, kernels, out, nesting); return;
    case Mode::halves: decode_halves(in, readable_end, count, kernels, out, nesting); return;
    case Mode::joint: decode_joint(in, readable_end, count, kernels, out, nesting, check); return;
  }
  throw CorruptError("a plane has an unknown mode");
}

const u8* raw_plane(Reader& in, int unit, size_t count) {
  if (in.at == in.end || *in.at != static_cast<u8>(Mode::raw)) return nullptr;
  in.at++;
  return in.take(count * static_cast<size_t>(unit), "a raw plane");
}

}  // namespace netweight
