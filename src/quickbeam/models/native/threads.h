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

#include "nodes.h"
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
// long waits, as for a thread whose core does other work. Threads count themselves by node, then the last of each node counts for it: a count
// that threads of two sockets change goes back and forth between them.
class Barrier {
 public:
  explicit Barrier(const Team& team) : arrived_(size_t(team.node_count())) {}

  // Who has to wait fetches from `ahead` meanwhile.
  void wait(const Team& team, int64_t node, Ahead& ahead) {
    if (team.threads == 1) return;
    const uint32_t turn = turn_.load(std::memory_order_acquire);
    if (is_last(arrived_[size_t(node)], team.size(node)) && (arrived_.size() == 1 || is_last(nodes_, nodes_of(team)))) {
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
  struct alignas(64) Count {
    std::atomic<int64_t> arrived{0};
  };
  std::vector<Count> arrived_;  // by node
  Count nodes_;
  std::atomic<Clock::rep> lost_{0};
  alignas(64) std::atomic<uint32_t> turn_{0};

  // Whether who counts itself is the last of `all`. The count then begins anew.
  static bool is_last(Count& count, int64_t all) {
    if (count.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < all) return false;
    count.arrived.store(0, std::memory_order_relaxed);
    return true;
  }

  static int64_t nodes_of(const Team& team) {  // that have a thread
    int64_t count = 0;
    for (int64_t node = 0; node < team.node_count(); ++node) count += team.size(node) > 0;
    return count;
  }
};

// Work in pieces: each thread takes those of its own part, then what others have left of theirs, those of its node first, so that slow cores
// hold nobody up. Each thread asks for the same works in the same order.
class Pieces {
 public:
  explicit Pieces(const Team& team) : team_(team), taken_(size_t(team.threads)) {}

  // Calls work(first, last, end) for pieces of [0, n), about `most` of each thread's part; `end` is that of the part. `turn`: how many works
  // went before.
  template <class Work>
  void run(int64_t n, int64_t thread, int64_t turn, int64_t most, const Work& work) {
    const int64_t threads = team_.threads, node = team_.node_of(thread), first = team_.first(node), near = team_.size(node);
    for (int64_t k = 0; k < threads; ++k) {
      const int64_t part = k < near ? first + (thread - first + k) % near : (first + k) % threads;
      const int64_t low = part_begin(n, part, threads), high = part_begin(n, part + 1, threads);
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
  const Team team_;
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
