// Work spread over threads.
#pragma once

#include <cstddef>
#include <functional>

namespace netweight {

// Runs body(worker) on up to `threads` threads at once, the caller being worker 0; fewer if the system grants no more. Bodies share
// their work among themselves, so that each must be able to finish alone. A body must not throw.
void run_on_threads(int threads, const std::function<void(int)>& body);

}  // namespace netweight
