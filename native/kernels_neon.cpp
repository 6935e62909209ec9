// NEON kernels, for every 64-bit ARM processor.
#include "kernels.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <type_traits>

#include "difference.h"
#include "digest.h"
#include "interleave.h"
#include "joint.h"
#include "rounding.h"

namespace netweight {
namespace {

using Bytes = uint8x16_t;
constexpr int kBytes = 16;

inline uint16x8_t words(Bytes v) { return vreinterpretq_u16_u8(v); }
inline Bytes bytes(uint16x8_t v) { return vreinterpretq_u8_u16(v); }

inline Bytes load(const u8* p) { return vld1q_u8(p); }
inline void store(u8* p, Bytes v) { vst1q_u8(p, v); }
inline Bytes all_bytes(int b) { return vdupq_n_u8(static_cast<u8>(b)); }
inline Bytes all_words(int w) { return bytes(vdupq_n_u16(static_cast<u16>(w))); }

inline Bytes add8(Bytes a, Bytes b) { return vaddq_u8(a, b); }
inline Bytes sub8(Bytes a, Bytes b) { return vsubq_u8(a, b); }
inline Bytes sub16(Bytes a, Bytes b) { return bytes(vsubq_u16(words(a), words(b))); }
inline Bytes above8(Bytes a, Bytes b) { return vcgtq_s8(vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b)); }
inline Bytes equal8(Bytes a, Bytes b) { return vceqq_u8(a, b); }
inline Bytes least8(Bytes a, Bytes b) { return vminq_u8(a, b); }
inline Bytes not_below8(Bytes a, Bytes b) { return vcgeq_u8(a, b); }
inline Bytes select(Bytes mask, Bytes a, Bytes b) { return vbslq_u8(mask, a, b); }
inline Bytes low_halves(Bytes a, Bytes b) { return vzip1q_u8(a, b); }
inline Bytes high_halves(Bytes a, Bytes b) { return vzip2q_u8(a, b); }
inline Bytes saturated(Bytes a, Bytes b) { return vqmovun_high_s16(vqmovun_s16(vreinterpretq_s16_u8(a)), vreinterpretq_s16_u8(b)); }
inline Bytes low_bytes(Bytes a, Bytes b) { return vuzp1q_u8(a, b); }
inline Bytes high_bytes(Bytes a, Bytes b) { return vuzp2q_u8(a, b); }
inline Bytes multiply_low(Bytes a, Bytes b) { return bytes(vmulq_u16(words(a), words(b))); }
// The doubling product of a and half of b, which may make the result one less; a is below 2^15.
inline Bytes multiply_high(Bytes a, Bytes b) {
  return vreinterpretq_u8_s16(vqdmulhq_s16(vreinterpretq_s16_u8(a), vreinterpretq_s16_u16(vshrq_n_u16(words(b), 1))));
}
// x0, x1 = f * h + k as words.
template <bool>
inline void multiply_add(Bytes f, Bytes h, Bytes k, Bytes& x0, Bytes& x1) {
  x0 = bytes(vmlal_u8(vmovl_u8(vget_low_u8(k)), vget_low_u8(f), vget_low_u8(h)));
  x1 = bytes(vmlal_high_u8(vmovl_high_u8(k), f, h));
}

struct ShiftDown {  // words
  int16x8_t count;
  explicit ShiftDown(int n) : count(vdupq_n_s16(static_cast<int16_t>(-n))) {}
  Bytes operator()(Bytes v) const { return bytes(vshlq_u16(words(v), count)); }
};

// Which lanes of a row a mask names: for groups of eight, and how many of them are before a group.
struct NamedLanes {
  u64 mask;
  u64 so_far;  // in groups 0 .. i
  explicit NamedLanes(const Bytes* masks) {
    const Bytes bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201ull));
    const Bytes a = vpaddq_u8(masks[0] & bit, masks[1] & bit), b = vpaddq_u8(masks[2] & bit, masks[3] & bit), c = vpaddq_u8(a, b);
    const uint8x8_t groups = vget_low_u8(vpaddq_u8(c, c));
    mask = vget_lane_u64(vreinterpret_u64_u8(groups), 0);
    so_far = vget_lane_u64(vreinterpret_u64_u8(vcnt_u8(groups)), 0) * 0x0101010101010101ull;
  }
  u64 all() const { return mask; }
  u64 of(int group) const { return mask >> 8 * group & 0xff; }
  size_t before(int group) const { return group == 0 ? 0 : so_far >> 8 * (group - 1) & 0xff; }
};

inline Bytes table16(const u8* t) { return load(t); }
inline Bytes look_up16(Bytes table, Bytes index) { return vqtbl1q_u8(table, index); }  // zero where the index is above 15

template <int N>
struct Places {
  Bytes of;
  explicit Places(Bytes index) : of(index) {}
};

template <int N>
struct Lookup {
  std::conditional_t<N <= 2, uint8x16x2_t, std::conditional_t<N == 3, uint8x16x3_t, uint8x16x4_t>> table;
  explicit Lookup(const u8* t) {
    for (int i = 0; i < N; i++) table.val[i] = load(t + 16 * i);
  }
  Bytes operator()(const Places<N>& index) const {
    if constexpr (N == 1) return vqtbl1q_u8(table.val[0], index.of);
    else if constexpr (N == 2) return vqtbl2q_u8(table, index.of);
    else if constexpr (N == 3) return vqtbl3q_u8(table, index.of);
    else return vqtbl4q_u8(table, index.of);
  }
};

// Eight fields of a vector become the low bytes of a 64-bit word, which is then moved to its top.
struct PackFields {
  uint16x8_t pair;
  uint32x4_t quad;
  uint64x2_t four;
  int64x2_t middle, top;
  explicit PackFields(int bits)
      : pair(vdupq_n_u16(static_cast<u16>(256 - (1 << bits)))),
        quad(vdupq_n_u32(65536u - (1u << 2 * bits))),
        four(vdupq_n_u64((u64{1} << 4 * bits) - 1)),
        middle(vdupq_n_s64(4 * bits - 32)),
        top(vdupq_n_s64(64 - 8 * bits)) {}
  Bytes operator()(Bytes fields) const {
    uint16x8_t w = words(fields);
    w = vmlsq_u16(w, vshrq_n_u16(w, 8), pair);  // a + 256 b - b (256 - 2^bits)
    uint32x4_t d = vreinterpretq_u32_u16(w);
    d = vmlsq_u32(d, vshrq_n_u32(d, 16), quad);
    const uint64x2_t q = vreinterpretq_u64_u32(d);
    return vreinterpretq_u8_u64(vshlq_u64(vbslq_u64(four, q, vshlq_u64(q, middle)), top));
  }
};

inline Bytes load_fields(const u8* p, int) { return load(p); }
inline Bytes load_words(const u8* const* from) { return vcombine_u8(vld1_u8(from[0]), vld1_u8(from[1])); }

// The last word first.
template <typename Place>
inline void store_words(Bytes v, Place place) {
  vst1_u8(place(1), vget_high_u8(v));
  vst1_u8(place(0), vget_low_u8(v));
}

}  // namespace
}  // namespace netweight

#include "kernels_shuffle.h"

namespace netweight {
namespace {

#if defined(__linux__)
bool has_aes() { return getauxval(AT_HWCAP) & HWCAP_AES; }
#else
bool has_aes() { return true; }
#endif

}  // namespace

const Kernels* neon_kernels() {
  static const Kernels set = {"neon", decode_rows, encode_rows, portable_kernels().decode_wide, join4, join8, split4, split8,
                              has_aes() ? aes_rounds : portable_kernels().aes_rounds, decode_words_here, round_weights_here, spread_any, recall_any, subtract, add, interleave, class_sizes, part_all, unite_elements, pack_some};
  return &set;
}

}  // namespace netweight

#else
namespace netweight {
const Kernels* neon_kernels() { return nullptr; }
}  // namespace netweight
#endif
