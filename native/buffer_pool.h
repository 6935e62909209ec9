// Output buffers that keep their pages: large, huge-page advised, and reused, because first touches cost more than decoding.
#pragma once

#include <cstddef>

namespace netweight::buffer_pool {

// At least `bytes` bytes, 64-byte aligned, contents undefined; throws std::bad_alloc.
void* acquire(std::size_t bytes);
void release(void* buffer);

// Gives unused buffers back to the system until at most `keep` bytes of them are held.
void trim(std::size_t keep);
std::size_t idle_bytes();

// Asks for huge pages in the whole pages of an address range (a hint; failure is ignored on purpose).
void advise_huge_pages(void* start, std::size_t bytes);

}  // namespace netweight::buffer_pool
