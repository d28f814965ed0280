// The largest of a row of numbers (drafters/largest.py).
#pragma once
#include <algorithm>
#include <cstdint>

namespace qb {

// Names and numbers of the `most` largest of those of `count` numbers that exceed `floor`, the largest first, of equal ones the first. NaN is
// left out. `token`: the name of each number, or null where number i is token i. Returns how many there are.
inline int64_t ranked(const float* row, int64_t count, const int64_t* token, int64_t most, float floor, int64_t* name, float* number) {
  constexpr int64_t CHUNK = 64;
  int64_t kept = 0;
  float bar = floor;  // what a number must exceed
  for (int64_t first = 0; first < count && most > 0; first += CHUNK) {
    const int64_t end = std::min(count, first + CHUNK);
    int any = 0;
    for (int64_t i = first; i < end; ++i) any |= row[i] > bar;
    if (!any) continue;
    for (int64_t i = first; i < end; ++i) {
      if (!(row[i] > bar)) continue;
      int64_t at = kept < most ? kept++ : most - 1;
      for (; at > 0 && number[at - 1] < row[i]; --at) number[at] = number[at - 1], name[at] = name[at - 1];
      number[at] = row[i], name[at] = token == nullptr ? i : token[i];
      if (kept == most) bar = number[most - 1];
    }
  }
  return kept;
}

}  // namespace qb
