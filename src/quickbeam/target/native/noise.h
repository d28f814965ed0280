// The noise of a place (noise.py): Philox4x32-10, and the likeliest of a row of probabilities once it is perturbed.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace qb {

// Four words [4][n] for each counter [4][n], 32 bits in 64 each.
inline void philox(const uint64_t* counter, int64_t n, uint32_t key0, uint32_t key1, uint64_t* words) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    uint32_t a = uint32_t(counter[i]), b = uint32_t(counter[n + i]), c = uint32_t(counter[2 * n + i]), d = uint32_t(counter[3 * n + i]);
    uint32_t k0 = key0, k1 = key1;
    for (int round = 0; round < 10; ++round) {
      const uint64_t first = uint64_t(a) * 0xD2511F53u, second = uint64_t(c) * 0xCD9E8D57u;
      a = uint32_t(second >> 32) ^ b ^ k0;
      b = uint32_t(second);
      c = uint32_t(first >> 32) ^ d ^ k1;
      d = uint32_t(first);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    words[i] = a, words[n + i] = b, words[2 * n + i] = c, words[3 * n + i] = d;
  }
}

inline double uniform(const uint64_t* words) { return (double(words[0] << 20 | words[1] >> 12) + 0.5) * 0x1p-52; }

// Of each chunk of 64 tokens at a position its largest number, and whose it is.
inline void peaks(int64_t position, int64_t choice, uint32_t key0, uint32_t key1, int64_t chunks, double* peak, int64_t* owner) {
  for (int64_t c = 0; c < chunks; ++c) {
    const uint64_t counter[4] = {uint64_t(c), uint64_t(position), uint64_t(choice), 0};
    uint64_t words[4];
    philox(counter, 1, key0, key1, words);
    peak[c] = -std::log(-std::log1p(-uniform(words)) / 64);
    owner[c] = 64 * c + int64_t(words[2] >> 26);
  }
}

// What a number of a token is made of: `peak`, `owner`: of each chunk of 64 tokens its largest number, and whose it is.
struct Luck {
  const double* peak;
  const int64_t* owner;
  int64_t position, choice;
  uint32_t key0, key1;

  double of(int64_t token) const {
    const int64_t chunk = token / 64;
    if (owner[chunk] == token) return peak[chunk];
    const uint64_t counter[4] = {uint64_t(token), uint64_t(position), uint64_t(choice), 1};
    uint64_t words[4];
    philox(counter, 1, key0, key1, words);
    return -std::log(std::exp(-peak[chunk]) - std::log1p(-uniform(words)));
  }
};

// The largest of `count` numbers; no order of comparisons changes it. NaN where there is one.
inline float top_of(const float* row, int64_t count) {
  float lanes[16];
  for (float& lane : lanes) lane = row[0];
  int bad = 0;
  int64_t i = 0;
  for (; i + 16 <= count; i += 16)
    for (int64_t j = 0; j < 16; ++j) {
      lanes[j] = row[i + j] > lanes[j] ? row[i + j] : lanes[j];
      bad |= row[i + j] != row[i + j];
    }
  for (; i < count; ++i) {
    lanes[0] = row[i] > lanes[0] ? row[i] : lanes[0];
    bad |= row[i] != row[i];
  }
  if (bad) return std::numeric_limits<float>::quiet_NaN();
  return *std::max_element(lanes, lanes + 16);
}

// The token with the largest scale * score + number, as `Loops.largest` in noise.py has it; -1 where a score is NaN or the largest infinite.
inline int64_t largest(const float* row, int64_t vocab, const Luck& luck, double scale) {
  static thread_local std::vector<double> bound;
  const int64_t chunks = (vocab + 63) / 64;
  bound.resize(size_t(chunks));
  float top = -std::numeric_limits<float>::infinity();
  for (int64_t c = 0; c < chunks; ++c) {
    const float here = top_of(row + 64 * c, std::min<int64_t>(64, vocab - 64 * c));
    if (here != here) return -1;
    top = std::max(top, here);
    bound[size_t(c)] = double(here) * scale + luck.peak[c];
  }
  if (!std::isfinite(top)) return -1;
  double best = -std::numeric_limits<double>::infinity();
  int64_t token = -1;
  while (true) {
    const int64_t c = std::max_element(bound.begin(), bound.end()) - bound.begin();
    if (!(bound[size_t(c)] > best)) return token;
    bound[size_t(c)] = -std::numeric_limits<double>::infinity();
    for (int64_t i = 64 * c; i < std::min(vocab, 64 * c + 64); ++i) {
      if (double(row[i]) * scale + luck.peak[c] <= best) continue;
      const double sum = double(row[i]) * scale + luck.of(i);
      if (sum > best || (sum == best && i < token)) best = sum, token = i;
    }
  }
}

// One row of probabilities at one place, as `Loops.perturb` in noise.py has it: gives the columns of the `wanted` largest chances above
// `floor`, the largest first, and how many. `token`: of each column, or null where column i is token i.
struct Place {
  Luck luck;
  double least, floor;
};

struct Candidate {
  double chance;
  int64_t column;
};

inline int64_t perturb(const float* row, int64_t columns, const int64_t* token, int64_t chunks, const Place& place, double temperature,
                       double cut, int64_t wanted, int64_t* column, double* chance) {
  static thread_local std::vector<float> lift;
  static thread_local std::vector<Candidate> found;
  const float top = columns ? top_of(row, columns) : 0;
  lift.resize(size_t(chunks));
  float likeliest = top * float(std::pow(2.3, -temperature));  // USUAL of noise.py
  for (int64_t c = 0; c < chunks; ++c) {
    lift[size_t(c)] = std::exp(float(temperature * place.luck.peak[c]));
    const int64_t owner = place.luck.owner[c];  // whose chance needs no look, where it is a column of its own
    if (token == nullptr && owner < columns) likeliest = std::max(likeliest, row[owner] * lift[size_t(c)]);
  }
  const float bar = float(std::max(cut * likeliest, 0x1p-120)), least = float(place.least);

  found.clear();
  double seen = 0, sum = 0;
  const auto look = [&](int64_t i, int64_t name) {
    const double number = place.luck.of(name);
    const double chance_of = double(row[i]) * std::exp(temperature * number);
    seen += double(row[i]), sum += chance_of;
    found.push_back({chance_of, i});
  };
  if (token != nullptr) {
    for (int64_t i = 0; i < columns; ++i)
      if (row[i] * lift[size_t(token[i] / 64)] > bar && row[i] >= least) look(i, token[i]);
  } else {
    for (int64_t first = 0; first < columns; first += 64) {
      const int64_t end = std::min(columns, first + 64);
      const float here = lift[size_t(first / 64)];
      int any = 0;
      for (int64_t i = first; i < end; ++i) any |= row[i] * here > bar;
      if (!any) continue;
      for (int64_t i = first; i < end; ++i)
        if (row[i] * here > bar && row[i] >= least) look(i, i);
    }
  }
  sum += std::max(0.0, 1 - seen);
  const int64_t count = std::min<int64_t>(wanted, int64_t(found.size()));
  std::partial_sort(found.begin(), found.begin() + count, found.end(), [](const Candidate& a, const Candidate& b) {
    return a.chance > b.chance || (a.chance == b.chance && a.column < b.column);
  });
  int64_t kept = 0;
  for (; kept < count && found[size_t(kept)].chance / sum > place.floor; ++kept) {
    column[kept] = found[size_t(kept)].column;
    chance[kept] = found[size_t(kept)].chance / sum;
  }
  return kept;
}

}  // namespace qb
