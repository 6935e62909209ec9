// Threads: those of the OpenMP that the process has already, else new ones.
#include "threads.h"

#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <dlfcn.h>
#include <pthread.h>
#endif

namespace netweight {
namespace {

// torch's threads wait for their next work by spinning. New threads beside them would have to share their processors, which makes
// decoding between two layers several times slower than with one thread. So their pool is borrowed: libgomp's entry point, which
// LLVM's and Intel's OpenMP offer as well, is looked up at run time; nothing is linked. A forked child must not use the pool of
// its parent, whose threads it does not have.
#if defined(__linux__)
using ParallelRegion = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
using ThreadNumber = int (*)();

bool forked = false;

struct OpenMp {
  ParallelRegion parallel = reinterpret_cast<ParallelRegion>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  ThreadNumber number = reinterpret_cast<ThreadNumber>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
  ThreadNumber inside = reinterpret_cast<ThreadNumber>(dlsym(RTLD_DEFAULT, "omp_in_parallel"));
  OpenMp() { pthread_atfork(nullptr, nullptr, [] { forked = true; }); }
};

bool run_on_openmp(int threads, const std::function<void(int)>& body) {
  static const OpenMp openmp;
  if (forked || !openmp.parallel || !openmp.number || !openmp.inside || openmp.inside()) return false;
  openmp.parallel([](void* data) { (*static_cast<const std::function<void(int)>*>(data))(openmp.number()); },
                  const_cast<std::function<void(int)>*>(&body), static_cast<unsigned>(threads), 0);
  return true;
}
#else
bool run_on_openmp(int, const std::function<void(int)>&) { return false; }
#endif

}  // namespace

void run_on_threads(int threads, const std::function<void(int)>& body) {
  if (threads <= 1) return body(0);
  if (run_on_openmp(threads, body)) return;
  std::vector<std::thread> others;
  try {
    for (int worker = 1; worker < threads; worker++) others.emplace_back(body, worker);
  } catch (const std::system_error&) {  // the system grants no more threads: those there are do the work
  }
  body(0);
  for (std::thread& t : others) t.join();
}

}  // namespace netweight
