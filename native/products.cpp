// Products and the fixed-length form, for every processor; the work is spread over threads here.
#include "products_here.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <vector>

#include "threads.h"

namespace netweight {
namespace {

constexpr size_t kRowsAtOnce = 16;  // a row of tiles

constexpr size_t kTilesAt = 128, kTileBytes = 1536;  // where the tiles of a payload begin

constexpr size_t kTilesAtOnce = 16;  // that a thread takes: neighbors, since threads that write to one line of the cache wait for each other

// Runs work(tile, scratch for that many weights) until all are done.
template <typename Work>
void by_tiles(size_t tiles, int threads, size_t scratch, Work work, size_t at_once = 1) {
  std::atomic<size_t> next{0};
  std::atomic<bool> sound{true};
  run_on_threads(threads, [&](int) {
    thread_local std::vector<u16> room;
    if (room.size() < scratch) room.resize(scratch);
    for (size_t tile; (tile = next.fetch_add(at_once)) < tiles;)
      for (const size_t end = std::min(tile + at_once, tiles); tile < end; tile++)
        if (!work(tile, room.data())) sound = false;
  });
  if (!sound) throw CorruptError("its escapes contradict themselves");
}

bool has_code(u16 weight, int base) {
  const u16 place = static_cast<u16>((weight >> 7 & 0xff) - base);
  return (place < 15) | ((weight & 0x7fff) == 0);
}

u32 escapes_of_row(const u16* row, size_t columns, int base) {
  u32 escapes = 0;
  for (size_t c = 0; c < columns; c++) escapes += !has_code(row[c], base);
  return escapes;
}

}  // namespace

const Products& portable_products() {
  static const Products set = {"portable", decode_fixed_here, encode_fixed_here, multiply_here, nullptr};
  return set;
}

const std::vector<const Products*>& usable_products() {
  static const std::vector<const Products*> usable = [] {
    std::vector<const Products*> all;
    for (const Products* set : {avx512_products(), avx2_products(), &portable_products()})
      if (set) all.push_back(set);
    return all;
  }();
  return usable;
}

const Products& products_by_name(const std::string& name) {
  for (const Products* set : usable_products())
    if (name == "auto" || name == set->name) return *set;
  throw UnsupportedError("this processor or build has no products named " + name);
}

void spread_inputs(const u16* x, size_t count, float* out) {
  for (size_t i = 0; i < count; i++) {
    const u32 bits = u32{x[i]} << 16;
    std::memcpy(out + i / 16 * 16 + i % 2 * 8 + i % 16 / 2, &bits, 4);
  }
}

FixedMatrix read_fixed(const u8* payload, size_t size, size_t rows, size_t columns) {
  const auto number = [&](size_t at) { return load<u64>(payload + at); };
  if (size < 128 || std::memcmp(payload + 8, "NWF\1\1", 5) != 0 || number(16) != rows || number(24) != columns || columns > 65536)
    throw CorruptError("it does not begin as a weight of this shape in the fixed-length form");
  const size_t first = kTilesAt + (rows + 15) / 16 * ((columns + 63) / 64) * kTileBytes;
  const size_t escapes = first + 4 * (rows + 1);
  if (size < escapes || number(32) > (size - escapes) / 4) throw CorruptError("it is too short");
  if (load<u32>(payload + first) != 0 || load<u32>(payload + escapes - 4) != number(32)) throw CorruptError("its escapes do not add up");
  return {payload + kTilesAt, payload + first, payload + escapes, rows, columns, static_cast<size_t>(number(32)), payload[13]};
}

void decode_fixed(const FixedMatrix& m, int threads, const Products& products, u16* out) {
  by_tiles((m.rows + 15) / 16, threads, 0, [&](size_t tile, u16*) { return products.decode_fixed(m, tile, tile + 1, out + tile * kRowsAtOnce * m.columns); });
}

Exponents exponents_of(const u16* weights, size_t count, int threads) {
  constexpr size_t kAtOnce = size_t{1} << 18;
  Exponents all;
  std::mutex guard;
  by_tiles((count + kAtOnce - 1) / kAtOnce, threads, 0, [&](size_t number, u16*) {
    const u16 *at = weights + number * kAtOnce, *end = weights + std::min(count, (number + 1) * kAtOnce);
    u32 counts[4][256] = {};  // four, since equal neighbors would wait for each other
    u32 zeros = 0;
    for (const u16* w = at; w < end; w++) zeros += (*w & 0x7fff) == 0;
    for (; end - at >= 4; at += 4) {
      const u64 four = load<u64>(at);
      for (int i = 0; i < 4; i++) counts[i][four >> (16 * i + 7) & 0xff]++;
    }
    for (; at < end; at++) counts[0][*at >> 7 & 0xff]++;
    std::lock_guard<std::mutex> lock(guard);
    for (int e = 0; e < 256; e++) all.weights[static_cast<size_t>(e)] += u64{counts[0][e]} + counts[1][e] + counts[2][e] + counts[3][e];
    all.zeros += zeros;
    return true;
  });
  return all;
}

void encode_fixed(const u16* weights, size_t rows, size_t columns, int base, size_t escapes, int threads, const Products& products, std::span<u8> payload) {
  const size_t tiles = (rows + kRowsAtOnce - 1) / kRowsAtOnce, first_at = kTilesAt + tiles * ((columns + 63) / 64) * kTileBytes;
  const size_t escapes_at = first_at + 4 * (rows + 1), end = escapes_at + 4 * escapes;
  if (payload.size() < end) throw CorruptError("it is too short");
  // Rows of tiles, and where the escapes of each row begin; then the escapes.
  std::vector<u32> first(rows + 1);
  by_tiles(tiles, threads, 0, [&](size_t tile, u16*) {
    products.encode_fixed(weights, rows, columns, base, tile, tile + 1, payload.data() + kTilesAt);
    for (size_t row = tile * kRowsAtOnce; row < std::min(rows, (tile + 1) * kRowsAtOnce); row++)
      first[row + 1] = escapes_of_row(weights + row * columns, columns, base);
    return true;
  });
  for (size_t row = 0; row < rows; row++) first[row + 1] += first[row];
  if (first[rows] != escapes) throw CorruptError("its escapes do not add up");
  std::memcpy(payload.data() + first_at, first.data(), 4 * first.size());
  for (size_t row = 0; row < rows; row++) {
    if (first[row] == first[row + 1]) continue;
    u8* to = payload.data() + escapes_at + 4 * first[row];
    for (size_t c = 0; c < columns; c++)
      if (const u16 weight = weights[row * columns + c]; !has_code(weight, base)) to = put32(to, static_cast<u32>(c) | static_cast<u32>(weight) << 16);
  }
  std::memset(payload.data() + end, 0, payload.size() - end);
}

namespace {

// What all rows of a weight are multiplied with, laid out as the kernels read it.
class Factor {
 public:
  Factor(const u16* x, size_t inputs, size_t columns, Order order, const Products& products)
      : x_(x), inputs_(inputs), columns_(columns), order_(order), products_(products), spread_(order.kind == Order::kSums ? inputs * columns : 0) {
    spread_inputs(x, spread_.size(), spread_.data());
  }

  // Rows of plain weights; `bias`, `y` and `stride` as in products.h, of these rows.
  void multiply(const u16* weights, size_t rows, const u16* bias, u16* y, size_t stride) const {
    if (order_.kind == Order::kSums)
      products_.multiply(weights, rows, columns_, static_cast<int>(order_.width), spread_.data(), inputs_, bias, y, stride);
    else
      products_.multiply_in_blocks(weights, rows, columns_, order_, x_, inputs_, bias, y, stride);
  }

 private:
  const u16* x_;
  size_t inputs_, columns_;
  Order order_;
  const Products& products_;
  std::vector<float> spread_;
};

// The rows of a weight that two steps or more share. Each step writes its part of them; when all have, they are multiplied.
class SharedRows {
 public:
  SharedRows(u64 step, size_t rows, size_t columns) : columns_(columns), place_{0} {
    for (u64 at = step; at < u64{rows} * columns; at += step) {
      if (at % columns != 0 && (rows_.empty() || rows_.back() != at / columns)) rows_.push_back(static_cast<size_t>(at / columns));
      place_.push_back(rows_.size());
    }
    weights_.resize(rows_.size() * columns);
  }

  size_t count() const { return rows_.size(); }

  // Numbers of the row that begins before step `number`, or with `ending` of the one that ends after it; `column` is that of the first.
  void put(size_t number, bool ending, size_t column, const u16* numbers, size_t count) {
    const size_t row = place_[number + ending] - 1;
    std::memcpy(weights_.data() + row * columns_ + column, numbers, 2 * count);
  }

  void multiply(size_t first, size_t count, const Factor& factor, size_t inputs, const u16* bias, u16* y, size_t stride) const {
    std::vector<u16> added(bias ? count : 0), products(inputs * count);
    for (size_t r = 0; r < added.size(); r++) added[r] = bias[rows_[first + r]];
    factor.multiply(weights_.data() + first * columns_, count, bias ? added.data() : nullptr, products.data(), count);
    for (size_t i = 0; i < inputs; i++)
      for (size_t r = 0; r < count; r++) y[i * stride + rows_[first + r]] = products[i * count + r];
  }

 private:
  size_t columns_;
  std::vector<size_t> rows_, place_;  // the shared rows; and how many of them begin before each step
  std::vector<u16> weights_;
};

}  // namespace

void multiply(const u16* plain, const FixedMatrix& m, const u16* x, size_t inputs, const u16* bias, Order order, int threads, const Products& products, u16* y,
              size_t stride) {
  const Factor factor(x, inputs, m.columns, order, products);
  const size_t tiles = (m.rows + 15) / 16, shares = 4 * static_cast<size_t>(std::max(threads, 1));  // several for each, as threads differ in speed
  by_tiles(tiles, threads, plain ? 0 : kRowsAtOnce * m.columns, [&](size_t tile, u16* room) {
    const size_t row = tile * kRowsAtOnce, rows = std::min(kRowsAtOnce, m.rows - row);
    if (!plain && !products.decode_fixed(m, tile, tile + 1, room)) return false;
    factor.multiply(plain ? plain + row * m.columns : room, rows, bias ? bias + row : nullptr, y + row, stride);
    return true;
  }, std::clamp<size_t>(tiles / shares, 1, kTilesAtOnce));
}

void multiply_decoded(const Decode& decode, u64 step, size_t rows, size_t columns, const u16* x, size_t inputs, const u16* bias, Order order, int threads,
                      const Products& products, u16* y, size_t stride) {
  const Factor factor(x, inputs, columns, order, products);
  SharedRows shared(step, rows, columns);
  const u64 numbers = u64{rows} * columns;
  const size_t steps = static_cast<size_t>((numbers + step - 1) / step);
  std::exception_ptr failure;
  std::mutex guard;
  by_tiles(steps, static_cast<int>(std::min<size_t>(static_cast<size_t>(std::max(threads, 1)), steps)), static_cast<size_t>(step), [&](size_t number, u16* room) {
    const u64 first = number * step, last = std::min(first + step, numbers);
    try {
      decode(first, last, room);
    } catch (...) {
      std::lock_guard<std::mutex> lock(guard);
      if (!failure) failure = std::current_exception();
      return true;
    }
    const u64 begin = (first + columns - 1) / columns, end = last / columns;  // the rows that are whole
    const u64 before = std::min(begin * columns, last);
    if (before > first) shared.put(number, false, static_cast<size_t>(first % columns), room, static_cast<size_t>(before - first));
    if (begin > end) return true;  // all of it belongs to one row
    const u64 after = end * columns;
    if (last > after && last < numbers) shared.put(number, true, 0, room + (after - first), static_cast<size_t>(last - after));
    if (end > begin) factor.multiply(room + (before - first), static_cast<size_t>(end - begin), bias ? bias + begin : nullptr, y + begin, stride);
    return true;
  });
  if (failure) std::rethrow_exception(failure);
  const size_t tiles = (shared.count() + kRowsAtOnce - 1) / kRowsAtOnce;
  by_tiles(tiles, static_cast<int>(std::min<size_t>(static_cast<size_t>(std::max(threads, 1)), tiles)), 0, [&](size_t tile, u16*) {
    const size_t row = tile * kRowsAtOnce;
    shared.multiply(row, std::min(kRowsAtOnce, shared.count() - row), factor, inputs, bias, y, stride);
    return true;
  });
}

}  // namespace netweight
