// The mode joint: elements of floats as numbers of symbols, which raw bits complete, and of whole values, such as zeros.
#include <algorithm>
#include <tuple>

#include "plane.h"

namespace netweight {
namespace {

constexpr size_t kMostNumbers = 255, kMostValues = 8;
constexpr size_t kLeastOfJoint = size_t{1} << 13;  // elements; below this the lists do not pay
constexpr size_t kLists = 1024;                    // bytes of lists and header at most
constexpr u64 kFineShare = 64;                     // exponents with one of so many elements are told apart by bits of the mantissa, too

struct Repeated {
  u16 value;
  u32 occurrences;
};

// Values that make up a 256th of a sample and an eighth of what it has with their symbol, ascending; at most eight, the likeliest.
// The sample is all groups of eight elements, or where there are many one of 32. Returns how many elements it has.
u64 repeated_values(const u8* in, size_t count, const Split& split, std::vector<Repeated>& found) {
  const size_t stride = count < (1u << 16) ? 1 : 32, runs = count / 8 / stride;
  const auto room = padded(sizeof(u32) << 16);
  u32* counts = reinterpret_cast<u32*>(room.get());
  std::memset(counts, 0, sizeof(u32) << 16);
  for (size_t run = 0; run < runs; run++) {
    const u8* group = in + (run * stride + run % stride) * 16;
    for (size_t i = 0; i < 8; i++) counts[static_cast<size_t>(group[2 * i] | group[2 * i + 1] << 8)]++;
  }
  const u64 total = runs * 8, least = (total + 255) / 256;
  for (u32 v = 0; v < 1u << 16; v++)
    if (counts[v] >= least && counts[v]) found.push_back({static_cast<u16>(v), counts[v]});
  std::erase_if(found, [&](const Repeated& r) {
    u64 with_symbol = 0;
    const u32 run = 1u << (split.raw_bits - 1), placed = split.place_symbol(split.symbol(r.value));
    for (u32 i = 0; i < run; i++) with_symbol += u64{counts[placed + i]} + counts[(placed | 0x8000) + i];
    return u64{r.occurrences} * 8 < with_symbol;
  });
  std::stable_sort(found.begin(), found.end(), [](const Repeated& a, const Repeated& b) { return a.occurrences > b.occurrences; });
  if (found.size() > kMostValues) found.resize(kMostValues);
  std::sort(found.begin(), found.end(), [](const Repeated& a, const Repeated& b) { return a.value < b.value; });
  return total;
}

}  // namespace

u8* encode_joint(const PlaneShape& shape, const u8* in, size_t count, int finer, Level level, const Kernels& kernels, Scratch& scratch, u8* out) {
  const int whole = 1 + shape.mantissa_bits;
  if (count < kLeastOfJoint || whole > 8 || whole <= finer) return nullptr;
  Joint joint;
  joint.split = {2, whole - finer, true};
  joint.more_bits = finer;
  const Split& split = joint.split;
  std::vector<Repeated> repeated;
  const u64 sampled = repeated_values(in, count, split, repeated);
  // Without them the bits of the mantissa save less than a thousandth, for twice the time to encode and half as much again to decode.
  if (repeated.empty() && count >= (1u << 16)) return nullptr;

  // Which numbers there are.
  std::vector<u32> counts;
  histogram(in, count, split, 1, counts);
  const size_t group = size_t{1} << finer;
  std::vector<u32> left = counts;  // about so many without the values
  for (const Repeated& r : repeated) {
    u32& rest = left[split.symbol(r.value)];
    rest -= std::min(rest, static_cast<u32>(u64{r.occurrences} * count / sampled));
  }
  std::vector<u16> coarse;
  std::vector<u32> weight(256);
  const auto map = padded(size_t{1} << 16);
  joint.number_of = map.get();
  const auto name = [&](u32 placed, size_t run, int number) {
    std::memset(&map[placed], number, run);
    std::memset(&map[placed | 0x8000], number, run);
  };
  const size_t run = size_t{1} << (split.raw_bits - 1);  // elements with the same sign and symbol
  for (size_t s = 0; s < counts.size(); s += group) {
    u64 all = 0, others = 0;
    for (size_t i = s; i < s + group; i++) all += counts[i], others += left[i];
    if (all == 0) continue;
    if (others * kFineShare < count) {
      coarse.push_back(static_cast<u16>(s));
      continue;
    }
    for (size_t i = s; i < s + group; i++) {
      if (counts[i] == 0) continue;
      if (joint.symbols + repeated.size() == kMostNumbers) return nullptr;
      const u32 placed = split.place_symbol(static_cast<u32>(i));
      name(placed, run, joint.symbols);
      weight[static_cast<size_t>(joint.symbols)] = counts[i];
      joint.placed[joint.symbols++] = static_cast<u16>(placed);
    }
  }
  joint.values = static_cast<int>(repeated.size());
  joint.coarse = static_cast<int>(coarse.size());
  if (joint.listed() > static_cast<int>(kMostNumbers)) return nullptr;
  for (int i = 0; i < joint.coarse; i++) {
    const size_t s = coarse[static_cast<size_t>(i)];
    const u32 placed = split.place_symbol(static_cast<u32>(s));
    const int number = joint.before_coarse() + i;
    name(placed, run * group, number);
    for (size_t k = s; k < s + group; k++) weight[static_cast<size_t>(number)] += counts[k];
    joint.placed[number] = static_cast<u16>(placed);
  }
  u8 symbol_of_value[kMostValues];
  for (int i = 0; i < joint.values; i++) {
    const u16 value = repeated[static_cast<size_t>(i)].value;
    symbol_of_value[i] = map[value];
    joint.placed[joint.symbols + i] = value;
  }
  for (int i = 0; i < joint.values; i++) map[joint.placed[joint.symbols + i]] = static_cast<u8>(joint.symbols + i);

  u8* p = out;
  *p++ = static_cast<u8>(Mode::joint);
  *p++ = static_cast<u8>(split.raw_bits | 0x80);
  for (int n : {joint.more_bits, joint.symbols, joint.values, joint.coarse}) *p++ = static_cast<u8>(n);
  for (int i = 0; i < joint.symbols; i++) p = put16(p, split.symbol(joint.placed[i]));
  for (int i = joint.symbols; i < joint.before_coarse(); i++) p = put16(p, joint.placed[i]);
  for (u16 s : coarse) p = put16(p, static_cast<u32>(s >> finer));
  const auto numbers = padded(count), raw = padded(count + 64), more = padded(count + 64);
  kernels.part(joint, in, count, numbers.get(), raw.get(), more.get());
  for (int i = 0; i < joint.values; i++) {
    weight[static_cast<size_t>(joint.symbols + i)] = joint.occurrences[i];
    weight[symbol_of_value[i]] -= joint.occurrences[i];
  }
  p = put24(put24(p, static_cast<u32>(joint.fields)), static_cast<u32>(joint.more_fields));
  const auto packed = [](size_t fields, int bits) { return (fields + 63) / 64 * field_block_bytes(bits); };
  if (packed(joint.fields, split.raw_bits) + packed(joint.more_fields, joint.more_bits) + kLists > count) return nullptr;  // `out` has no room
  for (const auto& [fields, from, bits] : {std::tuple{joint.fields, raw.get(), split.raw_bits}, std::tuple{joint.more_fields, more.get(), joint.more_bits}}) {
    std::memset(from + fields, 0, 64);
    kernels.pack(bits, from, (fields + 63) / 64, p);
    p += packed(fields, bits);
  }
  p = encode_numbers(numbers.get(), weight, count, level, kernels, scratch, p);
  return 100 * static_cast<size_t>(p - out) <= 199 * count ? p : nullptr;  // half a percent at least
}

namespace {

// Elements from their numbers, as far as these are there for good.
class Completion final : public Follower {
 public:
  Completion(Joint& joint, const Kernels& kernels, const u8* numbers, u8* out, Follower* check)
      : joint_(joint), kernels_(kernels), at_(numbers), out_(out), check_(check) {}
  void up_to(const u8* end) override {
    while (at_ < end) {
      const size_t some = std::min(kSlab / 2, static_cast<size_t>(end - at_));
      if (!kernels_.unite(joint_, at_, some, out_)) throw CorruptError("a joint plane lacks a value or raw bits");
      at_ += some;
      out_ += 2 * some;
      if (check_) check_->up_to(out_);
    }
  }

 private:
  Joint& joint_;
  const Kernels& kernels_;
  const u8* at_;
  u8* out_;
  Follower* check_;
};

}  // namespace

void decode_joint(Reader& in, const u8* readable_end, size_t count, const Kernels& kernels, u8* out, int nesting, Follower* check) {
  Joint joint;
  joint.split = read_split(in, 2);
  const Split& split = joint.split;
  joint.more_bits = in.byte("a joint plane");
  const Split coarse{2, split.raw_bits + joint.more_bits, split.signed_raw};
  if (split.raw_bits == 0 || joint.more_bits == 0 || coarse.raw_bits > 8) throw CorruptError("a plane's header asks for impossible raw bits");
  joint.symbols = in.byte("a joint plane");
  joint.values = in.byte("a joint plane");
  joint.coarse = in.byte("a joint plane");
  if (joint.listed() > static_cast<int>(kMostNumbers)) throw CorruptError("a joint plane lists too many symbols and values");
  for (int i = 0; i < joint.listed(); i++) {
    const bool value = i >= joint.symbols && i < joint.before_coarse();
    const Split& own = i < joint.symbols ? split : coarse;
    const u32 word = in.word("a joint plane");
    if (!value && word >> own.symbol_bits()) throw CorruptError("a joint plane lists a symbol that cannot be");
    joint.placed[i] = static_cast<u16>(value ? word : own.place_symbol(word));
  }
  joint.fields = in.word24("a joint plane");
  joint.more_fields = in.word24("a joint plane");
  if (joint.fields > count || joint.more_fields > count) throw CorruptError("a joint plane has more raw bits than elements");
  joint.raw = in.take((joint.fields + 63) / 64 * field_block_bytes(split.raw_bits), "raw bits");
  joint.more = in.take((joint.more_fields + 63) / 64 * field_block_bytes(joint.more_bits), "raw bits");
  joint.readable_end = readable_end;
  const auto numbers = padded(count);
  Completion completion(joint, kernels, numbers.get(), out, check);
  decode_plane(in, readable_end, 1, count, kernels, numbers.get(), nesting - 1, &completion);
  completion.up_to(numbers.get() + count);
  if (joint.next != joint.fields || joint.next_more != joint.more_fields) throw CorruptError("a joint plane has raw bits left over");
}

}  // namespace netweight
