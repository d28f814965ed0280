// Memory nodes: the parts of a large machine's memory, each near some of its processors. A call's threads are shared out over the nodes in
// order, and a thread reads weights that lie in its own node.
#pragma once
#include <cstdint>

#ifdef __linux__
#include <sched.h>
#endif

namespace qb {

// The structure `MemoryNodes` of library.py.
struct MemoryNodes {
  int64_t count;
  const int64_t* processors;  // [count + 1]: how many the nodes before have, all together at the end
  const uint8_t* masks;       // [count][bytes]: which processors a node has, as Linux writes sets of them
  int64_t bytes;
};

// Where the parts of `n` pieces of work begin, of which each thread has one. Weights are placed by it and read by it.
inline int64_t part_begin(int64_t n, int64_t part, int64_t threads) { return n * part / threads; }

// The threads of a call by node. Without `nodes` there is one.
struct Team {
  const MemoryNodes* nodes;
  int64_t threads;

  int64_t node_count() const { return nodes ? nodes->count : 1; }
  // The first thread of a node; the next node's is the one after its last.
  int64_t first(int64_t node) const { return nodes ? part_begin(nodes->processors[node], threads, nodes->processors[nodes->count]) : node * threads; }
  int64_t size(int64_t node) const { return first(node + 1) - first(node); }
  int64_t node_of(int64_t thread) const {
    int64_t node = 0;
    while (first(node + 1) <= thread) ++node;
    return node;
  }
};

// While it lasts, a thread of a call runs on its node's processors alone. The threads that OpenMP keeps for the caller go on doing so; the
// caller's own, which is thread 0, gets back what it had.
class Pinned {
 public:
#ifdef __linux__
  Pinned(const Team& team, int64_t thread) : bytes_(team.nodes ? team.nodes->bytes : 0) {
    if (!bytes_) return;
    if (thread == 0) had_ = sched_getaffinity(0, sizeof before_, &before_) == 0;
    const uint8_t* mask = team.nodes->masks + team.node_of(thread) * bytes_;
    sched_setaffinity(0, size_t(bytes_), reinterpret_cast<const cpu_set_t*>(mask));  // where it is refused, threads run anywhere
  }
  ~Pinned() {
    if (had_) sched_setaffinity(0, sizeof before_, &before_);
  }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 private:
  const int64_t bytes_;
  bool had_ = false;
  cpu_set_t before_;
#else
  Pinned(const Team&, int64_t) {}
#endif
};

}  // namespace qb
