// Products and the fixed-length form, for every processor; the work is spread over threads here.
#include "products_here.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "threads.h"

namespace netweight {
namespace {

constexpr size_t kRowsAtOnce = 16;  // a row of tiles

// Runs work(first row of tiles, the next, scratch for that many weights) until all are done.
template <typename Work>
void by_tiles(size_t tiles, int threads, size_t scratch, Work work) {
  std::atomic<size_t> next{0};
  std::atomic<bool> sound{true};
  run_on_threads(threads, [&](int) {
    thread_local std::vector<u16> room;
    if (room.size() < scratch) room.resize(scratch);
    for (size_t tile; (tile = next++) < tiles;)
      if (!work(tile, room.data())) sound = false;
  });
  if (!sound) throw CorruptError("its escapes contradict themselves");
}

}  // namespace

const Products& portable_products() {
  static const Products set = {"portable", decode_fixed_here, multiply_here, nullptr};
  return set;
}

const Products& products_by_name(const std::string& name) {
  for (const Products* set : {avx512_products(), avx2_products()})
    if (set && (name == "auto" || name == set->name)) return *set;
  return portable_products();
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
  const size_t first = 128 + (rows + 15) / 16 * ((columns + 63) / 64) * 1536;
  const size_t escapes = first + 4 * (rows + 1);
  if (size < escapes || number(32) > (size - escapes) / 4) throw CorruptError("it is too short");
  if (load<u32>(payload + first) != 0 || load<u32>(payload + escapes - 4) != number(32)) throw CorruptError("its escapes do not add up");
  return {payload + 128, payload + first, payload + escapes, rows, columns, static_cast<size_t>(number(32)), payload[13]};
}

void decode_fixed(const FixedMatrix& m, int threads, const Products& products, u16* out) {
  by_tiles((m.rows + 15) / 16, threads, 0, [&](size_t tile, u16*) { return products.decode_fixed(m, tile, tile + 1, out + tile * kRowsAtOnce * m.columns); });
}

void multiply(const u16* plain, const FixedMatrix& m, const u16* x, size_t inputs, const u16* bias, Order order, int threads, const Products& products, u16* y,
              size_t stride) {
  std::vector<float> spread(order.kind == Order::kSums ? inputs * m.columns : 0);
  spread_inputs(x, spread.size(), spread.data());
  by_tiles((m.rows + 15) / 16, threads, plain ? 0 : kRowsAtOnce * m.columns, [&](size_t tile, u16* room) {
    const size_t row = tile * kRowsAtOnce, rows = std::min(kRowsAtOnce, m.rows - row);
    if (!plain && !products.decode_fixed(m, tile, tile + 1, room)) return false;
    const u16 *weights = plain ? plain + row * m.columns : room, *added = bias ? bias + row : nullptr;
    if (order.kind == Order::kSums)
      products.multiply(weights, rows, m.columns, static_cast<int>(order.width), spread.data(), inputs, added, y + row, stride);
    else
      products.multiply_in_blocks(weights, rows, m.columns, order, x, inputs, added, y + row, stride);
    return true;
  });
}

}  // namespace netweight
