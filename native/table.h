// Frequency tables of the rans mode: built from a histogram, written, read, and expanded for kernels.
#pragma once

#include "format.h"

namespace netweight {

// How an element splits into a symbol (entropy coded) and raw bits (stored as they are).
// signed_raw: the top bit travels with the raw bits (floats); otherwise the symbol is simply the top bits (integers).
struct Split {
  int unit;         // bytes of an element: 1 or 2
  int raw_bits;     // 0 .. 8 * unit - 1
  bool signed_raw;  // needs raw_bits >= 1

  NETWEIGHT_INLINE int symbol_bits() const { return 8 * unit - raw_bits; }
  NETWEIGHT_INLINE u32 symbol(u32 v) const {
    return signed_raw ? (v >> (raw_bits - 1)) & ((1u << symbol_bits()) - 1) : v >> raw_bits;
  }
  NETWEIGHT_INLINE u32 raw(u32 v) const {
    if (!signed_raw) return v & ((1u << raw_bits) - 1);
    return (v >> (8 * unit - 1)) << (raw_bits - 1) | (v & ((1u << (raw_bits - 1)) - 1));
  }
  NETWEIGHT_INLINE u32 place_symbol(u32 s) const { return signed_raw ? s << (raw_bits - 1) : s << raw_bits; }
  NETWEIGHT_INLINE u32 place_raw(u32 r) const {
    if (!signed_raw) return r;
    return (r >> (raw_bits - 1)) << (8 * unit - 1) | (r & ((1u << (raw_bits - 1)) - 1));
  }
  NETWEIGHT_INLINE u32 symbol_mask() const { return place_symbol((1u << symbol_bits()) - 1); }
};

// Symbols in slot order: class 0 by symbol, then class 1 by symbol. A steep table has one class and frequencies to 255.
struct Table {
  int count = 0;
  u16 symbol[kMaxSymbols];
  u8 frequency[kMaxSymbols];
  u8 start[kMaxSymbols];
  bool second_class[kMaxSymbols];
  int host = 0;  // index of the likeliest symbol; stands in for rare ones and for padding
  bool steep = false;

  size_t written_bytes() const;
  u8* write(u8* p) const;
  void read(Reader& in, int symbol_bits);
};

// Builds the table that costs least for counts[0 .. 1 << symbol_bits) and returns that cost in 1/65536 bits per `total`
// counted elements, raw bits not included. `exhaustive` tries every number of symbols, otherwise those near the estimate. The
// table says before whether it is steep.
u64 build_table(const u32* counts, int symbol_bits, bool exhaustive, Table& table);

// What a decoding kernel looks up. Index 63 of the per-symbol arrays is never used by a valid table.
struct alignas(64) DecodeTable {
  u8 slot_to_index[256];
  u8 frequency[64];
  u8 start[64];
  u8 low[64];   // low byte of the placed symbol (the only byte for one-byte elements)
  u8 high[64];
  u32 entry[256];  // per slot: frequency | slot - start << 8 | placed symbol << 16

  DecodeTable(const Table& table, const Split& split);
};

}  // namespace netweight
