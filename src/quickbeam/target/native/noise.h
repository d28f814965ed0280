// The noise of a place (noise.py): Philox4x32-10, and the likeliest of a row of probabilities once it is perturbed.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "simd.h"

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

inline double uniform(uint64_t high, uint64_t low) { return (double(high << 20 | low >> 12) + 0.5) * 0x1p-52; }

// Counters [4][n] of chunks or tokens at one position, and the four words [4][n] of each.
struct Words {
  std::vector<uint64_t> counter, word;

  // `first(i)`: the chunk or token of number i. Returns the words.
  template <class F>
  const uint64_t* of(int64_t n, F first, int64_t position, int64_t choice, uint64_t purpose, uint32_t key0, uint32_t key1) {
    counter.resize(size_t(4 * n)), word.resize(size_t(4 * n));
    for (int64_t i = 0; i < n; ++i) counter[size_t(i)] = uint64_t(first(i));
    std::fill_n(counter.begin() + n, n, uint64_t(position));
    std::fill_n(counter.begin() + 2 * n, n, uint64_t(choice));
    std::fill_n(counter.begin() + 3 * n, n, purpose);
    philox(counter.data(), n, key0, key1, word.data());
    return word.data();
  }
};

// Of each chunk of 64 tokens at a position its largest number, and whose it is.
inline void peaks(int64_t position, int64_t choice, uint32_t key0, uint32_t key1, int64_t chunks, double* peak, int64_t* owner) {
  static thread_local Words words;
  const uint64_t* word = words.of(chunks, [](int64_t c) { return c; }, position, choice, 0, key0, key1);
  for (int64_t c = 0; c < chunks; ++c) {
    peak[c] = -std::log(-std::log1p(-uniform(word[c], word[chunks + c])) / 64);
    owner[c] = 64 * c + int64_t(word[2 * chunks + c] >> 26);
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
    return -std::log(std::exp(-peak[chunk]) - std::log1p(-uniform(words[0], words[1])));
  }
};

// The largest of `count` numbers; no order of comparisons changes it. NaN where there is one.
inline float top_of(const float* row, int64_t count) {
  constexpr float infinite = std::numeric_limits<float>::infinity();
  Lanes top = all(-infinite);
  bool bad = false;
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const Lanes here = load(row + i);
    bad |= any_above(here, infinite);  // only NaN is
    top = greatest(here, top);
  }
  float lane[16];
  store(lane, top);
  for (int width = 8; width; width /= 2)
    for (int j = 0; j < width; ++j) lane[j] = lane[j + width] > lane[j] ? lane[j + width] : lane[j];
  float best = lane[0];
  for (; i < count; ++i) {
    bad |= row[i] != row[i];
    best = row[i] > best ? row[i] : best;
  }
  return bad ? std::numeric_limits<float>::quiet_NaN() : best;
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
  const auto look = [&](int64_t c) {
    for (int64_t i = 64 * c; i < std::min(vocab, 64 * c + 64); ++i) {
      if (double(row[i]) * scale + luck.peak[c] <= best) continue;
      const double sum = double(row[i]) * scale + luck.of(i);
      if (sum > best || (sum == best && i < token)) best = sum, token = i;
    }
  };
  // The likeliest chunk first: few others can then hold a larger sum.
  const int64_t first = std::max_element(bound.begin(), bound.end()) - bound.begin();
  look(first);
  for (int64_t c = 0; c < chunks; ++c)
    if (c != first && bound[size_t(c)] > best) look(c);
  return token;
}

struct Candidate {
  double chance;
  int64_t column;
};

// One row of probabilities at one place, as `Loops.perturb` in noise.py has it: gives the columns of the `wanted` largest chances above
// `floor`, the largest first, and how many. Probabilities below `lowest` don't count. `token`: of each column, or null where column i is
// token i.
inline int64_t perturb(const float* row, int64_t columns, const int64_t* token, int64_t chunks, const Luck& luck, double lowest, double floor,
                       double temperature, double cut, int64_t wanted, int64_t* column, double* chance) {
  static thread_local std::vector<float> lift;
  static thread_local std::vector<int64_t> near;
  static thread_local std::vector<double> lifted;
  static thread_local std::vector<Candidate> found;
  static thread_local Words words;
  const auto name = [&](int64_t i) { return token == nullptr ? i : token[i]; };
  lift.resize(size_t(chunks + 15) / 16 * 16);
  for (int64_t c = 0; c < chunks; ++c) lift[size_t(c)] = float(temperature * luck.peak[c]);
  for (size_t c = 0; c < lift.size(); c += 16) store(&lift[c], exponential(load(&lift[c])));
  float likeliest = (columns ? top_of(row, columns) : 0) * float(std::pow(2.3, -temperature));  // USUAL of noise.py
  if (token == nullptr)
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t owner = luck.owner[c];  // whose chance needs no look, where it is a column of its own
      if (owner < columns) likeliest = std::max(likeliest, row[owner] * lift[size_t(c)]);
    }
  const float bar = float(std::max(cut * likeliest, 0x1p-120)), least = float(lowest);

  near.resize(size_t(columns));  // the columns that may be likely enough
  int64_t looked = 0;
  const auto sift = [&](int64_t i, float here) {  // without a branch, as nobody could foresee it
    near[size_t(looked)] = i;
    looked += (row[i] * here > bar) & (row[i] >= least);
  };
  if (token != nullptr) {
    for (int64_t i = 0; i < columns; ++i) sift(i, lift[size_t(uint64_t(token[i]) / 64)]);
  } else {
    for (int64_t first = 0; first < columns; first += 64) {
      const int64_t end = std::min(columns, first + 64);
      const float here = lift[size_t(first / 64)];
      int any = 0;
      for (int64_t i = first; i < end; ++i) any |= row[i] * here > bar;
      for (int64_t i = first; any && i < end; ++i) sift(i, here);
    }
  }

  const uint64_t* word = words.of(looked, [&](int64_t i) { return name(near[size_t(i)]); }, luck.position, luck.choice, 1, luck.key0, luck.key1);
  lifted.resize(size_t(looked));
  double seen = 0, sum = 0;
  for (int64_t i = 0; i < looked; ++i) {
    const int64_t at = near[size_t(i)], own = name(at), c = own / 64;
    // e^-number. Its logarithm is not needed where the temperature is 1; log1p, which is slow, only where u is small.
    const double u = uniform(word[i], word[looked + i]), more = u > 0x1p-10 ? std::log(1 - u) : std::log1p(-u);
    const double e = std::exp(-luck.peak[c]) - (luck.owner[c] == own ? 0 : more), q = double(row[at]);
    lifted[size_t(i)] = q * (temperature == 1 ? 1 / e : std::exp(-temperature * std::log(e)));
    seen += q, sum += lifted[size_t(i)];
  }
  sum += std::max(0.0, 1 - seen);
  found.clear();
  for (int64_t i = 0; i < looked; ++i)
    if (lifted[size_t(i)] / sum > floor) found.push_back({lifted[size_t(i)] / sum, near[size_t(i)]});
  const int64_t count = std::min<int64_t>(wanted, int64_t(found.size()));
  std::partial_sort(found.begin(), found.begin() + count, found.end(), [](const Candidate& a, const Candidate& b) {
    return a.chance > b.chance || (a.chance == b.chance && a.column < b.column);
  });
  for (int64_t i = 0; i < count; ++i) column[i] = found[size_t(i)].column, chance[i] = found[size_t(i)].chance;
  return count;
}

}  // namespace qb
