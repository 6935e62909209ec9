// Products of bf16 weights with few rows of inputs, and the fixed-length form of weights, which netweight/codec/fixed.py describes.
#pragma once

#include <array>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "format.h"

namespace netweight {

// A payload in the fixed-length form, its header checked.
struct FixedMatrix {
  const u8* tiles;
  const u8* first;    // where the escapes of each row begin: u32, one more than there are rows
  const u8* escapes;  // u32: column, and above 16 bits the weight
  size_t rows, columns, escape_count;
  int base;
};

// How the products of a row are added up.
struct Order {
  enum Kind {
    kSums,   // in `width` partial sums by column, 64 or 128, which are then added by halves
    kPairs,  // in blocks of `width` columns: pairs in sequence by the processor's dot product; the blocks' sums in sequence
    kTiles,  // in blocks of 32 columns, as AMX does: the even columns in sequence, the odd ones likewise, and the sum of both
  } kind;
  size_t width;
};

struct Products {
  const char* name;
  // The weights of whole rows of tiles, row by row; false when the escapes contradict themselves.
  bool (*decode_fixed)(const FixedMatrix&, size_t tile, size_t tile_end, u16* out);
  // Whole rows of tiles from the weights, of which code 1 has the exponent `base`.
  void (*encode_fixed)(const u16* weights, size_t rows, size_t columns, int base, size_t tile, size_t tile_end, u8* tiles);
  // y[i * stride + r], in bf16, of row r of the weights and input i, which `spread_inputs` has laid out. Products are exact in fp32
  // and added up as torch's own kernel for bf16 does on processors with vectors of `sums` / 8 numbers: in so many partial sums by
  // column, which are then added by halves. `columns` is a multiple of `sums`, 64 or 128.
  void (*multiply)(const u16* weights, size_t rows, size_t columns, int sums, const float* x, size_t inputs, const u16* bias, u16* y, size_t stride);
  // The same from plain inputs, in the other two orders; nullptr where the processor has no dot products of bf16 pairs.
  void (*multiply_in_blocks)(const u16* weights, size_t rows, size_t columns, Order order, const u16* x, size_t inputs, const u16* bias, u16* y,
                             size_t stride);
};

// Inputs as multiply reads them: fp32, of each 16 columns the even ones and then the odd ones.
void spread_inputs(const u16* x, size_t count, float* out);

const std::vector<const Products*>& usable_products();        // by speed, the fastest first; the portable ones are always there
const Products& products_by_name(const std::string& name);  // "auto" for the fastest; throws UnsupportedError
const Products& portable_products();
const Products* avx512_products();  // nullptr when this build or this processor has none
const Products* avx2_products();  // nullptr when this build or this processor has none

FixedMatrix read_fixed(const u8* payload, size_t size, size_t rows, size_t columns);

// The whole weight to memory of the caller's; throws CorruptError.
void decode_fixed(const FixedMatrix& weight, int threads, const Products& products, u16* out);

// How many weights have each exponent, and how many are zeros.
struct Exponents {
  std::array<u64, 256> weights{};
  u64 zeros = 0;
};
Exponents exponents_of(const u16* weights, size_t count, int threads);

// What follows the header of a payload in the fixed-length form, up to its end; throws CorruptError if the weights have another number of escapes.
void encode_fixed(const u16* weights, size_t rows, size_t columns, int base, size_t escapes, int threads, const Products& products, std::span<u8> payload);

// y of shape (inputs, rows) from x of shape (inputs, columns), and of weights that are plain or, where `plain` is nullptr, fixed.
void multiply(const u16* plain, const FixedMatrix& weight, const u16* x, size_t inputs, const u16* bias, Order order, int threads, const Products& products,
              u16* y, size_t stride);

// Numbers [first, last) of a bf16 weight, row after row, to memory of the caller's; called by several threads at once. It may throw.
using Decode = std::function<void(u64 first, u64 last, u16* out)>;

// The same of a weight that is decoded `step` numbers at a time; each thread multiplies what it has decoded while that is in its cache.
void multiply_decoded(const Decode& decode, u64 step, size_t rows, size_t columns, const u16* x, size_t inputs, const u16* bias, Order order, int threads,
                      const Products& products, u16* y, size_t stride);

}  // namespace netweight
