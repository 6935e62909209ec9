// XXH3, compiled anew in every translation unit that includes this, with that unit's vector instructions.
#pragma once

#include "format.h"

#define XXH_INLINE_ALL
#include "third_party/xxhash.h"

namespace netweight {
namespace {

inline u64 check(const u8* in, size_t size) { return XXH3_64bits(in, size); }

}  // namespace
}  // namespace netweight
