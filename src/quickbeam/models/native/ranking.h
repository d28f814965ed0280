// What drafters make of a row of scores: its largest numbers (drafters/largest.py), and what a token adds to them (drafters/block.py).
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "simd.h"

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

// Columns of scores [rows][stride] that are NaN in some row, or at most `within` below its largest: their names, and their scores [rows][kept] to
// `to`. `token`: the name of each of `count` columns, or null where column i is token i. Returns how many are kept.
inline int64_t candidates(const float* scores, int64_t rows, int64_t stride, int64_t count, const int64_t* token, float within, int64_t* name,
                          float* to) {
  std::vector<uint8_t> marked(static_cast<size_t>(count));
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = scores + r * stride;
    Lanes most = all(-INFINITY);
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) most = greatest(load(row + i), most);
    float floor = highest(most);
    for (; i < count; ++i) floor = row[i] > floor ? row[i] : floor;
    floor -= within;
    for (int64_t c = 0; c < count; ++c) marked[size_t(c)] |= uint8_t(!(row[c] < floor));
  }
  int64_t kept = 0;
  for (int64_t c = 0; c < count; ++c) {
    name[kept] = c;
    kept += marked[size_t(c)];
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < kept; ++i) to[r * kept + i] = scores[r * stride + name[i]];
  for (int64_t i = 0; token != nullptr && i < kept; ++i) name[i] = token[name[i]];
  return kept;
}

// Scores of the tokens after one token: those of its depth, and the product of that token's row `before` [rank] with each one's row of `after`
// [tokens][rank]. `token`: the name of each of `count` scores, or null where score i is of token i.
inline void follow(const float* scores, int64_t count, const int64_t* token, const bf16* before, const bf16* after, int64_t rank, float* to) {
  constexpr int64_t AHEAD = 24;  // rows lie anywhere
  std::vector<float> row(static_cast<size_t>(rank));
  for (int64_t k = 0; k < rank; ++k) row[size_t(k)] = widen(before[k]);
  const auto of = [&](int64_t i) { return after + (token == nullptr ? i : token[i]) * rank; };
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t k = 0; i + AHEAD < count && k < rank; k += 32) QB_PREFETCH(of(i + AHEAD) + k);
    const bf16* w = of(i);
    Lanes lanes = zero();
    int64_t k = 0;
    for (; k + 16 <= rank; k += 16) lanes = fma(load(w + k), load(&row[size_t(k)]), lanes);
    float all = scores[i] + sum(lanes);
    for (; k < rank; ++k) all += widen(w[k]) * row[size_t(k)];
    to[i] = all;
  }
}

}  // namespace qb
