// Output buffers that keep their pages.
#include "buffer_pool.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <new>

#if defined(__linux__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

namespace netweight::buffer_pool {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kMostIdle = std::size_t{256} << 20;
constexpr std::align_val_t kAlignment{kHugePage};
constexpr std::align_val_t kSmallAlignment{64};

struct Pool {
  std::mutex guard;
  std::map<void*, std::size_t> in_use;           // capacity by address
  std::multimap<std::size_t, void*> idle;        // by capacity
  std::size_t idle_bytes = 0;
};

Pool& pool() {
  static Pool* p = new Pool;  // never destroyed: buffers may be released while the interpreter ends
  return *p;
}

std::size_t capacity_for(std::size_t bytes) {
  const std::size_t grain = bytes < kHugePage ? 4096 : kHugePage;
  return (bytes + grain - 1) / grain * grain + (bytes == 0 ? grain : 0);
}

std::align_val_t alignment_for(std::size_t capacity) { return capacity < kHugePage ? kSmallAlignment : kAlignment; }

void free_idle(Pool& p, std::size_t keep) {
  while (p.idle_bytes > keep) {
    auto largest = std::prev(p.idle.end());
    p.idle_bytes -= largest->first;
    ::operator delete(largest->second, alignment_for(largest->first));
    p.idle.erase(largest);
  }
}

}  // namespace

void advise_huge_pages(void* start, std::size_t bytes) {
#if defined(__linux__)
  const std::uintptr_t first = (reinterpret_cast<std::uintptr_t>(start) + 4095) & ~std::uintptr_t{4095};
  const std::uintptr_t last = (reinterpret_cast<std::uintptr_t>(start) + bytes) & ~std::uintptr_t{4095};
  if (last >= first + kHugePage) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)start, (void)bytes;
#endif
}

void* acquire(std::size_t bytes) {
  const std::size_t capacity = capacity_for(bytes);
  Pool& p = pool();
  {
    std::lock_guard<std::mutex> lock(p.guard);
    auto found = p.idle.lower_bound(capacity);
    if (found != p.idle.end() && found->first <= capacity + capacity / 2) {
      void* buffer = found->second;
      p.in_use[buffer] = found->first;
      p.idle_bytes -= found->first;
      p.idle.erase(found);
      return buffer;
    }
  }
  void* buffer = ::operator new(capacity, alignment_for(capacity));
  advise_huge_pages(buffer, capacity);
  std::lock_guard<std::mutex> lock(p.guard);
  p.in_use[buffer] = capacity;
  return buffer;
}

void release(void* buffer) {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.guard);
  auto found = p.in_use.find(buffer);
  const std::size_t capacity = found->second;
  p.in_use.erase(found);
  p.idle.emplace(capacity, buffer);
  p.idle_bytes += capacity;
  free_idle(p, kMostIdle);
}

void trim(std::size_t keep) {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.guard);
  free_idle(p, keep);
}

std::size_t idle_bytes() {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.guard);
  return p.idle_bytes;
}

}  // namespace netweight::buffer_pool
