// Threads of a call: OpenMP's where the compiler uses it, which PyTorch's own are then, else threads that last as long as the call.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "simd.h"

#if defined(__MINGW32__) && !defined(__clang__)
#error "GCC on Windows frees a thread's variables before it ends them (GCC bug 83562): compile with clang-cl, cl or clang++"
#endif

namespace qb {

using Clock = std::chrono::steady_clock;

// How many threads a call may have.
inline int64_t most_threads() {
#ifdef _OPENMP
  return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
  return std::max<int64_t>(1, std::thread::hardware_concurrency());
#endif
}

// work(thread, threads) by `threads` threads, or fewer where there are fewer.
template <class Work>
static void together(int64_t threads, const Work& work) {
  if (threads < 2) return work(int64_t(0), int64_t(1));
#ifdef _OPENMP
#pragma omp parallel num_threads(int(threads))
  work(int64_t(omp_get_thread_num()), int64_t(omp_get_num_threads()));
#else
  std::vector<std::thread> others;
  for (int64_t thread = 1; thread < threads; ++thread) others.emplace_back([&work, thread, threads] { work(thread, threads); });
  work(int64_t(0), threads);
  for (std::thread& other : others) other.join();
#endif
}

// work(i) for all i below n, by all threads.
template <class Work>
static void share_out(int64_t n, const Work& work) {
  together(std::min(n, most_threads()), [&](int64_t thread, int64_t threads) {
    for (int64_t i = n * thread / threads; i < n * (thread + 1) / threads; ++i) work(i);
  });
}

// Bytes that a thread will soon read.
struct Ahead {
  const char *next = nullptr, *end = nullptr;
};

// Threads of one call wait for each other here: a short spin, then they give way, so that a busy machine is not held up. `lost`: the time of
// long waits, as for a thread whose core does other work.
class Barrier {
 public:
  // Who has to wait fetches from `ahead` meanwhile.
  void wait(int64_t threads, Ahead& ahead) {
    if (threads == 1) return;
    const uint32_t turn = turn_.load(std::memory_order_acquire);
    if (count_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      count_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; spins < 4000; ++spins) {
      if (turn_.load(std::memory_order_acquire) != turn) return;
      if (ahead.next < ahead.end) {
        QB_PREFETCH(ahead.next);
        ahead.next += 64;
        continue;
      }
      QB_PAUSE();
    }
    const Clock::time_point began = Clock::now();
    while (turn_.load(std::memory_order_acquire) == turn) std::this_thread::yield();
    const Clock::duration waited = Clock::now() - began;
    if (waited > std::chrono::milliseconds(1)) lost_.fetch_add(waited.count(), std::memory_order_relaxed);
  }
  Clock::duration lost() const { return Clock::duration(lost_.load()); }

 private:
  std::atomic<Clock::rep> lost_{0};
  alignas(64) std::atomic<int64_t> count_{0};
  alignas(64) std::atomic<uint32_t> turn_{0};
};

// Work in pieces: each thread takes those of its own part, then what others have left of theirs, so that slow cores hold nobody up. Each
// thread asks for the same works in the same order.
class Pieces {
 public:
  explicit Pieces(int64_t threads) : threads_(threads), taken_(size_t(threads)) {}

  // Calls work(first, last, end) for pieces of [0, n), about `most` of each thread's part; `end` is that of the part. `turn`: how many works
  // went before.
  template <class Work>
  void run(int64_t n, int64_t thread, int64_t turn, int64_t most, const Work& work) {
    for (int64_t k = 0; k < threads_; ++k) {
      const int64_t part = (thread + k) % threads_, low = n * part / threads_, high = n * (part + 1) / threads_;
      const int64_t size = std::max<int64_t>(LEAST, (high - low) / most / LEAST * LEAST);
      for (int64_t i; (i = take(part, turn)) < (high - low + size - 1) / size;)
        work(low + i * size, std::min(high, low + (i + 1) * size), high);
    }
  }

 private:
  static constexpr int64_t LEAST = 4, ALL = 1 << 20;  // the size of a piece, and more pieces than a part can have
  struct alignas(64) Count {
    std::atomic<int64_t> next{0};
  };
  const int64_t threads_;
  std::vector<Count> taken_;  // by part: turn * ALL + pieces that are taken

  int64_t take(int64_t part, int64_t turn) {
    std::atomic<int64_t>& next = taken_[size_t(part)].next;
    int64_t seen = next.load(std::memory_order_relaxed), mine;
    do {
      if (seen >= (turn + 1) * ALL) return ALL;  // who took it is in a later turn
      mine = std::max(seen, turn * ALL);
    } while (!next.compare_exchange_weak(seen, mine + 1, std::memory_order_relaxed));
    return mine - turn * ALL;
  }
};

}  // namespace qb
