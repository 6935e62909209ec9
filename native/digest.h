// XXH3 of headers and digests; and the check of a chunk: rounds of AES over sixteen states, for which most processors have an instruction.
// Compiled anew in every translation unit that includes this, with that unit's instructions.
#pragma once

#include <array>

#include "format.h"

#define XXH_INLINE_ALL
#include "third_party/xxhash.h"

#if defined(__AES__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_AES)
#include <arm_neon.h>
#endif

namespace netweight {
namespace {

// By the byte of row 0: what it adds to its column after SubBytes and MixColumns; for row r rotated by r bytes.
constexpr std::array<u32, 256> kAesColumns = [] {
  std::array<u32, 256> columns{};
  u32 power = 1, inverse = 1;  // of 3 and of its inverse, which run through all bytes but 0
  const auto twice = [](u32 x) { return (x << 1 ^ (x >> 7) * 0x11b) & 0xff; };
  for (int i = 0; i < 256; i++) {
    const u32 of_zero = i == 255, x = of_zero ? 0 : inverse;
    const u32 s = (x ^ x << 1 ^ x << 2 ^ x << 3 ^ x << 4) & 0xff, wrapped = (x << 1 ^ x << 2 ^ x << 3 ^ x << 4) >> 8;
    const u32 substitute = s ^ wrapped ^ 0x63;
    columns[of_zero ? 0 : power] = twice(substitute) | substitute << 8 | substitute << 16 | (twice(substitute) ^ substitute) << 24;
    power = twice(power) ^ power;
    inverse ^= inverse << 1;  // divided by 3
    inverse ^= inverse << 2;
    inverse ^= inverse << 4;
    inverse &= 0xff;
    if (inverse & 0x80) inverse ^= 0x09;
  }
  return columns;
}();

inline u32 rotated(u32 v, int bits) { return v << bits | v >> (32 - bits); }

// One round without key over a state of four columns, which `data` is added to.
inline void aes_round(u32* state, const u8* data) {
  u32 next[4], add[4];
  std::memcpy(add, data, 16);
  for (int c = 0; c < 4; c++)
    next[c] = add[c] ^ kAesColumns[state[c] & 0xff] ^ rotated(kAesColumns[state[(c + 1) & 3] >> 8 & 0xff], 8) ^
              rotated(kAesColumns[state[(c + 2) & 3] >> 16 & 0xff], 16) ^ rotated(kAesColumns[state[(c + 3) & 3] >> 24], 24);
  std::memcpy(state, next, 16);
}

// A round of every state for each 256 bytes.
#if defined(__VAES__) && defined(__AVX512F__)
inline void aes_rounds(u32* states, const u8* in, size_t blocks) {
  __m512i s[4];
  for (int k = 0; k < 4; k++) s[k] = _mm512_loadu_si512(states + 16 * k);
  for (; blocks-- > 0; in += 256)
    for (int k = 0; k < 4; k++) s[k] = _mm512_aesenc_epi128(s[k], _mm512_loadu_si512(in + 64 * k));
  for (int k = 0; k < 4; k++) _mm512_storeu_si512(states + 16 * k, s[k]);
}
#elif defined(__AES__)
inline void aes_rounds(u32* states, const u8* in, size_t blocks) {
  __m128i s[16];
  std::memcpy(s, states, sizeof s);
  for (; blocks-- > 0; in += 256)
    for (int k = 0; k < 16; k++) s[k] = _mm_aesenc_si128(s[k], _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 16 * k)));
  std::memcpy(states, s, sizeof s);
}
#elif defined(__ARM_FEATURE_AES)
inline void aes_rounds(u32* states, const u8* in, size_t blocks) {
  uint8x16_t s[16];
  for (int k = 0; k < 16; k++) s[k] = vreinterpretq_u8_u32(vld1q_u32(states + 4 * k));
  for (; blocks-- > 0; in += 256)
    for (int k = 0; k < 16; k++) s[k] = veorq_u8(vaesmcq_u8(vaeseq_u8(s[k], vdupq_n_u8(0))), vld1q_u8(in + 16 * k));
  for (int k = 0; k < 16; k++) vst1q_u32(states + 4 * k, vreinterpretq_u32_u8(s[k]));
}
#else
inline void aes_rounds(u32* states, const u8* in, size_t blocks) {
  for (; blocks-- > 0; in += 256)
    for (int k = 0; k < 16; k++) aes_round(states + 4 * k, in + 16 * k);
}
#endif

}  // namespace
}  // namespace netweight
