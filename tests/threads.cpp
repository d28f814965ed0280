// Who takes which pieces of a product's work, and whether threads pass a barrier together, with fake memory nodes. See test_memory_nodes.py.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "threads.h"

// program N THREADS PROCESSORS_OF_NODE...: for each thread, if it were alone, the pieces [first, last) of [0, N) in the order it takes them.
int main(int count, char** arguments) {
  const int64_t n = std::atoll(arguments[1]), threads = std::atoll(arguments[2]);
  std::vector<int64_t> processors{0};
  for (int i = 3; i < count; ++i) processors.push_back(processors.back() + std::atoll(arguments[i]));
  const qb::MemoryNodes nodes{int64_t(processors.size()) - 1, processors.data(), nullptr, 0};
  const qb::Team team{nodes.count > 1 ? &nodes : nullptr, threads};
  for (int64_t thread = 0; thread < threads; ++thread) {
    qb::Pieces pieces(team);
    std::printf("%lld", static_cast<long long>(team.node_of(thread)));
    pieces.run(n, thread, 0, 4, [](int64_t first, int64_t last, int64_t) {
      std::printf(" %lld-%lld", static_cast<long long>(first), static_cast<long long>(last));
    });
    std::puts("");
  }

  // between two barriers every thread has come as often as the others
  constexpr int64_t ROUNDS = 100;
  qb::Barrier barrier(team);
  std::vector<std::atomic<int64_t>> rounds(static_cast<size_t>(threads));
  std::atomic<int64_t> apart{0};
  std::vector<std::thread> all;
  for (int64_t thread = 0; thread < threads; ++thread)
    all.emplace_back([&, thread] {
      qb::Ahead ahead;
      for (int64_t round = 1; round <= ROUNDS; ++round) {
        rounds[static_cast<size_t>(thread)] = round;
        barrier.wait(team, team.node_of(thread), ahead);
        for (std::atomic<int64_t>& other : rounds) apart += other != round;
        barrier.wait(team, team.node_of(thread), ahead);
      }
    });
  for (std::thread& thread : all) thread.join();
  std::printf("apart %lld\n", static_cast<long long>(apart));
}
