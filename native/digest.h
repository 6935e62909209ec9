// XXH3, compiled anew in every translation unit that includes this, with that unit's vector instructions.
#pragma once

#include "format.h"

#define XXH_INLINE_ALL
#include "third_party/xxhash.h"

namespace netweight {
namespace {

inline void update_digest(void* state, const u8* in, size_t size) { XXH3_128bits_update(static_cast<XXH3_state_t*>(state), in, size); }

}  // namespace
}  // namespace netweight
