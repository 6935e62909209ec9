// CUDA on the CPU, for tests: lets g++ compile a kernel's own source and runs the threads of a block as fibers.
//
// A fiber runs until it reaches a collective (a warp's ballot or shuffle, __syncwarp, __syncthreads) and waits there
// until every thread that must take part stands at the same one. So data that passes between threads without a
// collective shows as a wrong result, in one of the two orders in which lanes can run (`backwards`). A launch fails with a
// reason if threads part ways at a collective, if one exits while others wait, or if memory that is not its own
// is touched: guard pages around the arguments (see emulated_kernels.py) and the checks that the compiler adds raise a
// signal, which is caught. Shared memory is filled with rubbish before each block. Blocks run one after the other.
//
// Limits: blocks of whole warps, full masks only, static shared memory declared in the kernel function or
// for the whole file.
#pragma once

#define NETWEIGHT_EMULATED 1

#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <tuple>
#include <utility>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

// ---- the language ----------------------------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static __attribute__((section("emulated_shared")))

struct uint2 { unsigned x, y; } __attribute__((aligned(8)));
struct uint4 { unsigned x, y, z, w; } __attribute__((aligned(16)));
struct uchar4 { unsigned char x, y, z, w; } __attribute__((aligned(4)));
struct ushort2 { unsigned short x, y; } __attribute__((aligned(4)));
struct float2 { float x, y; } __attribute__((aligned(8)));
struct float4 { float x, y, z, w; } __attribute__((aligned(16)));
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulated {

struct Index { unsigned x, y, z; };

// A place in the kernel's source, to tell collectives apart.
struct Site {
  const char* kind;
  int line;
};

enum class State { ready, at_warp, at_block, done };

struct Thread {
  void* stack_pointer;
  State state;
  Site site;
  uint64_t value;  // what it brings to a collective
};

constexpr unsigned kMostThreads = 1024;
constexpr size_t kStack = 128 * 1024, kGuard = 64 * 1024;

static Index thread_index, block_index, block_size, grid_size;
static Thread threads[kMostThreads];
static unsigned current;
static bool backwards;
static char message[256];
static sigjmp_buf escape;
static char* stacks;
static void (*run_entry)();
static void* scheduler_stack;

[[noreturn]] static inline void fail(const char* reason, const Site& site, unsigned thread) {
  snprintf(message, sizeof message, "%s: %s, line %d, block %u, thread %u", reason, site.kind, site.line, block_index.x, thread);
  siglongjmp(escape, 1);
}

// ---- fibers ----------------------------------------------------------------------------------------------------------

#if defined(__x86_64__)
// Keeps the callee-saved registers on the stack that is left and takes them from the one that is entered.
extern "C" void netweight_switch_stack(void** from, void* to);
asm(R"(
.text
.local netweight_switch_stack
.type netweight_switch_stack, @function
netweight_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size netweight_switch_stack, .-netweight_switch_stack
)");

static void begin_thread();
static inline void* new_stack(unsigned thread) {
  uintptr_t top = reinterpret_cast<uintptr_t>(stacks) + (kStack + kGuard) * (thread + 1);
  void** p = reinterpret_cast<void**>(top) - 2;  // begin_thread is entered as by a call: stack 8 bytes off alignment
  *p = reinterpret_cast<void*>(&begin_thread);
  p -= 6;
  memset(p, 0, 6 * sizeof *p);
  return p;
}
static inline void enter(unsigned thread) { netweight_switch_stack(&scheduler_stack, threads[thread].stack_pointer); }
static inline void leave() { netweight_switch_stack(&threads[current].stack_pointer, scheduler_stack); }
#else
static void begin_thread();
static ucontext_t scheduler_context, contexts[kMostThreads];
static inline void* new_stack(unsigned thread) {
  getcontext(&contexts[thread]);
  contexts[thread].uc_stack = {};
  contexts[thread].uc_stack.ss_sp = stacks + (kStack + kGuard) * thread + kGuard;
  contexts[thread].uc_stack.ss_size = kStack;
  makecontext(&contexts[thread], begin_thread, 0);
  return nullptr;
}
static inline void enter(unsigned thread) { swapcontext(&scheduler_context, &contexts[thread]); }
static inline void leave() { swapcontext(&contexts[current], &scheduler_context); }
#endif

static void begin_thread() {
  run_entry();
  threads[current].state = State::done;
  leave();
  __builtin_unreachable();
}

static inline void run_thread(unsigned thread) {
  current = thread;
  thread_index = {thread, 0, 0};
  threads[thread].state = State::ready;
  enter(thread);
}

static inline unsigned in_order(unsigned i, unsigned count) { return backwards ? count - 1 - i : i; }

// Runs a warp until all its threads are done or wait for the block.
static void run_warp(unsigned first) {
  for (;;) {
    for (unsigned i = 0; i < 32; i++) {
      unsigned thread = first + in_order(i, 32);
      if (threads[thread].state != State::done) run_thread(thread);
    }
    const Thread& leader = threads[first];
    for (unsigned i = 1; i < 32; i++) {
      const Thread& other = threads[first + i];
      if (other.state == leader.state && (leader.state == State::done || (other.site.line == leader.site.line && !strcmp(other.site.kind, leader.site.kind)))) continue;
      bool leader_waits = leader.state != State::done;
      fail("the threads of a warp part ways at a collective", leader_waits ? leader.site : other.site, leader_waits ? first : first + i);
    }
    if (leader.state != State::at_warp) return;
  }
}

static void run_block() {
  extern char shared_begin[] __asm__("__start_emulated_shared"), shared_end[] __asm__("__stop_emulated_shared");
  memset(shared_begin, 0xa5, static_cast<size_t>(shared_end - shared_begin));
  unsigned count = block_size.x;
  for (unsigned i = 0; i < count; i++) {
    threads[i] = {};
    threads[i].stack_pointer = new_stack(i);
  }
  for (;;) {
    for (unsigned i = 0; i < count; i += 32) {
      unsigned first = 32 * in_order(i / 32, count / 32);
      if (threads[first].state != State::done) run_warp(first);
    }
    unsigned done = 0;
    for (unsigned i = 0; i < count; i++) done += threads[i].state == State::done;
    if (done == count) return;
    for (unsigned i = 0; i < count; i++)
      if (threads[i].state != State::done && (done || threads[i].site.line != threads[0].site.line))
        fail("the threads of a block part ways at a collective", threads[i].site, i);
  }
}

// ---- collectives -----------------------------------------------------------------------------------------------------

// Waits for the whole warp and returns its first thread.
static inline const Thread* gather(const Site& site, uint32_t mask, uint64_t value = 0) {
  if (mask != 0xffffffffu) fail("the mask is not full", site, current);
  Thread& self = threads[current];
  self.site = site;
  self.value = value;
  self.state = State::at_warp;
  leave();
  return &threads[current & ~31u];
}

template <typename T>
static inline uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= 8, "too wide for a shuffle");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  return bits;
}
template <typename T>
static inline T from_bits(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// What a warp brought to a collective. The first thread that goes on copies it, since it may bring something else to the
// next collective before the others have taken theirs.
struct Gathered {
  uint64_t value[32];
  uint32_t ballot;
  unsigned left;  // threads that have not taken theirs
};
static Gathered gathered[kMostThreads / 32];

static inline const Gathered& exchange(const Site& site, uint32_t mask, uint64_t value) {
  const Thread* warp = gather(site, mask, value);
  Gathered& g = gathered[current / 32];
  if (g.left == 0) {
    g.ballot = 0;
    for (unsigned i = 0; i < 32; i++) {
      g.value[i] = warp[i].value;
      g.ballot |= static_cast<uint32_t>(warp[i].value & 1) << i;
    }
    g.left = 32;
  }
  g.left--;
  return g;
}

static inline uint32_t ballot(const Site& site, uint32_t mask, bool predicate) { return exchange(site, mask, predicate).ballot; }

template <typename T>
static inline T shuffle(const Site& site, uint32_t mask, T value, int64_t source, bool stays) {
  const Gathered& g = exchange(site, mask, bits_of(value));
  return stays ? value : from_bits<T>(g.value[source & 31]);
}

}  // namespace emulated

static emulated::Index& threadIdx = emulated::thread_index;
static emulated::Index& blockIdx = emulated::block_index;
static emulated::Index& blockDim = emulated::block_size;
static emulated::Index& gridDim = emulated::grid_size;

#define EMULATED_SITE(kind) emulated::Site{kind, line}
#define EMULATED_LINE int line = __builtin_LINE()

static inline void __syncthreads(EMULATED_LINE) {
  emulated::Thread& self = emulated::threads[emulated::current];
  self.site = EMULATED_SITE("__syncthreads");
  self.state = emulated::State::at_block;
  emulated::leave();
}
static inline void __syncwarp(uint32_t mask = 0xffffffffu, EMULATED_LINE) { emulated::gather(EMULATED_SITE("__syncwarp"), mask); }
static inline uint32_t __ballot_sync(uint32_t mask, int predicate, EMULATED_LINE) {
  return emulated::ballot(EMULATED_SITE("__ballot_sync"), mask, predicate != 0);
}
static inline int __any_sync(uint32_t mask, int predicate, EMULATED_LINE) {
  return emulated::ballot(EMULATED_SITE("__any_sync"), mask, predicate != 0) != 0;
}
static inline int __all_sync(uint32_t mask, int predicate, EMULATED_LINE) {
  return emulated::ballot(EMULATED_SITE("__all_sync"), mask, predicate != 0) == 0xffffffffu;
}
template <typename T>
static inline T __shfl_sync(uint32_t mask, T value, int source, EMULATED_LINE) {
  return emulated::shuffle(EMULATED_SITE("__shfl_sync"), mask, value, source, false);
}
template <typename T>
static inline T __shfl_up_sync(uint32_t mask, T value, unsigned delta, EMULATED_LINE) {
  int64_t source = int64_t{emulated::current & 31} - delta;
  return emulated::shuffle(EMULATED_SITE("__shfl_up_sync"), mask, value, source, source < 0);
}
template <typename T>
static inline T __shfl_down_sync(uint32_t mask, T value, unsigned delta, EMULATED_LINE) {
  int64_t source = int64_t{emulated::current & 31} + delta;
  return emulated::shuffle(EMULATED_SITE("__shfl_down_sync"), mask, value, source, source > 31);
}
template <typename T>
static inline T __shfl_xor_sync(uint32_t mask, T value, int bits, EMULATED_LINE) {
  return emulated::shuffle(EMULATED_SITE("__shfl_xor_sync"), mask, value, int64_t{emulated::current & 31} ^ bits, false);
}

// ---- arithmetic and memory -------------------------------------------------------------------------------------------

static inline int __popc(uint32_t x) { return __builtin_popcount(x); }
static inline int __popcll(uint64_t x) { return __builtin_popcountll(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(static_cast<uint32_t>(x)) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<uint64_t>(x)) : 64; }
static inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
static inline uint32_t __brev(uint32_t x) {
  uint32_t reversed = 0;
  for (int i = 0; i < 32; i++) reversed |= (x >> i & 1) << (31 - i);
  return reversed;
}
static inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  uint64_t bytes = uint64_t{y} << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t pick = selector >> 4 * i & 15, byte = static_cast<uint32_t>(bytes >> 8 * (pick & 7)) & 255;
    if (pick & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}
static inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (shift & 31));
}
static inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}
static inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t sum) {
  for (int i = 0; i < 4; i++) sum += (a >> 8 * i & 255) * (b >> 8 * i & 255);
  return sum;
}
static inline float __uint_as_float(uint32_t x) { return emulated::from_bits<float>(x); }
static inline uint32_t __float_as_uint(float x) { return static_cast<uint32_t>(emulated::bits_of(x)); }
template <typename T>
static inline T __ldg(const T* p) { return *p; }
template <typename T>
static inline T __ldcs(const T* p) { return *p; }
template <typename T>
static inline void __stcs(T* p, T value) { *p = value; }
static inline void* __cvta_global_to_generic(size_t at) { return reinterpret_cast<void*>(at); }
static inline size_t __cvta_generic_to_global(const void* p) { return reinterpret_cast<size_t>(p); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}

template <typename T, typename V>
static inline T atomicAdd(T* p, V value) { T old = *p; *p = static_cast<T>(old + static_cast<T>(value)); return old; }
template <typename T, typename V>
static inline T atomicOr(T* p, V value) { T old = *p; *p = static_cast<T>(old | static_cast<T>(value)); return old; }
template <typename T, typename V>
static inline T atomicMax(T* p, V value) { T old = *p; if (static_cast<T>(value) > old) *p = static_cast<T>(value); return old; }
template <typename T, typename V>
static inline T atomicMin(T* p, V value) { T old = *p; if (static_cast<T>(value) < old) *p = static_cast<T>(value); return old; }
template <typename T, typename V>
static inline T atomicExch(T* p, V value) { T old = *p; *p = static_cast<T>(value); return old; }
template <typename T, typename C, typename V>
static inline T atomicCAS(T* p, C compare, V value) { T old = *p; if (old == static_cast<T>(compare)) *p = static_cast<T>(value); return old; }

template <typename T>
static inline T min(T a, T b) { return b < a ? b : a; }
template <typename T>
static inline T max(T a, T b) { return a < b ? b : a; }

// ---- launching -------------------------------------------------------------------------------------------------------

namespace emulated {

static void on_signal(int number, siginfo_t* info, void*) {
  const char* what = number == SIGSEGV || number == SIGBUS ? "touches memory that is not the kernel's" : number == SIGFPE ? "divides by zero" : "does what the compiler's checks forbid (alignment, bounds or shift)";
  uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr), from = reinterpret_cast<uintptr_t>(stacks);
  if (number == SIGSEGV && address >= from && address < from + (kStack + kGuard) * kMostThreads) what = "overflows its stack";
  snprintf(message, sizeof message, "block %u, thread %u %s (address %p)", block_index.x, current, what, info->si_addr);
  siglongjmp(escape, 1);
}

static void make_stacks() {
  if (stacks) return;
  size_t each = kStack + kGuard;
  void* p = mmap(nullptr, each * kMostThreads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return;
  stacks = static_cast<char*>(p);
  for (size_t i = 0; i < kMostThreads; i++) mprotect(stacks + each * i, kGuard, PROT_NONE);
}

// Catches signals while it lives.
class Signals {
 public:
  Signals() {
    stack_t alternate = {};
    alternate.ss_sp = alternate_stack_;
    alternate.ss_size = sizeof alternate_stack_;
    sigaltstack(&alternate, &old_stack_);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 4; i++) sigaction(kNumbers[i], &action, &old_[i]);
  }
  ~Signals() {
    for (int i = 0; i < 4; i++) sigaction(kNumbers[i], &old_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  static constexpr int kNumbers[4] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  struct sigaction old_[4];
  stack_t old_stack_;
  char alternate_stack_[64 * 1024];
};

template <typename... Arguments>
struct Call {
  static inline void (*entry)(Arguments...);
  static inline std::tuple<Arguments...>* arguments;
  static void run() { std::apply(entry, *arguments); }
};

// Returns nullptr, or why the launch failed. `sizes` are those of the arguments that `values` point to.
template <typename... Arguments, size_t... I>
static const char* launch(void (*entry)(Arguments...), unsigned grid, unsigned block, bool reversed, int count, void** values, const int* sizes, std::index_sequence<I...>) {
  constexpr size_t expected[] = {sizeof(Arguments)..., 0};
  bool fits = static_cast<size_t>(count) == sizeof...(Arguments);
  for (size_t i = 0; fits && i < sizeof...(Arguments); i++) fits = expected[i] == static_cast<size_t>(sizes[i]);
  if (!fits) return "the arguments do not have the number and sizes of the kernel's parameters";
  if (block == 0 || block % 32 || block > kMostThreads) return "a block must be 32 to 1024 threads in whole warps";
  make_stacks();
  if (!stacks) return "there is no memory for stacks";
  std::tuple<Arguments...> arguments{*static_cast<Arguments*>(values[I])...};
  Call<Arguments...>::entry = entry;
  Call<Arguments...>::arguments = &arguments;
  run_entry = &Call<Arguments...>::run;
  block_size = {block, 1, 1};
  grid_size = {grid, 1, 1};
  backwards = reversed;
  Signals* volatile signals = new Signals;  // not on this stack's frame alone: a jump must find it
  const char* volatile result = nullptr;
  if (sigsetjmp(escape, 1) == 0) {
    for (unsigned i = 0; i < grid; i++) {
      block_index = {in_order(i, grid), 0, 0};
      memset(gathered, 0, sizeof gathered);
      run_block();
    }
  } else {
    result = message;
  }
  delete signals;
  return result;
}

}  // namespace emulated

// A variable for the section of shared memory, so that it exists in kernels that use none.
static __attribute__((section("emulated_shared"), used)) char emulated_no_shared[1];

#define EMULATED_ENTRY(entry)                                                                                                                  \
  extern "C" const char* launch_##entry(unsigned grid, unsigned block, int backwards, int count, void** values, const int* sizes) {              \
    return emulated::with_indices(entry, grid, block, backwards != 0, count, values, sizes);                                                    \
  }
namespace emulated {
template <typename... Arguments>
static const char* with_indices(void (*entry)(Arguments...), unsigned grid, unsigned block, bool reversed, int count, void** values, const int* sizes) {
  return launch(entry, grid, block, reversed, count, values, sizes, std::index_sequence_for<Arguments...>{});
}
}  // namespace emulated
