// The noise of a place (noise.py): Philox4x32-10, and the likeliest of a row of probabilities once it is perturbed.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
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

inline double number(uint64_t bits) {
  double result;
  std::memcpy(&result, &bits, 8);
  return result;
}

inline uint64_t bits_of(double number) {
  uint64_t bits;
  std::memcpy(&bits, &number, 8);
  return bits;
}

inline double small_whole(uint64_t n) { return number(n | 0x4330000000000000) - 0x1p52; }  // of n below 2^52, which can be the bits of a fraction

inline double uniform(uint64_t high, uint64_t low) { return (small_whole(high << 20 | low >> 12) + 0.5) * 0x1p-52; }

// The logarithm of a positive number, without a branch or a call, so that the compiler makes lanes of it. Let x = 2^k * m with m between the
// roots of 1/2 and 2, and s = (m - 1) / (m + 1). Then log m = 2 * (s + s^3 / 3 + s^5 / 5 + ...). The relative error is below 1e-15, also where
// x is almost 1. So log(1 - u) needs no log1p: `uniform` gives u as a multiple of 2^-53, and 1 - u is exact.
inline double logarithm(double x) {
  constexpr uint64_t ROOT = 0x3fe6a09e667f3bcd, BIAS = 1023;  // the root of 1/2, and what exponents are raised by
  const uint64_t raised = (bits_of(x) - ROOT + (BIAS << 52)) >> 52;
  const double m = number(bits_of(x) - (raised << 52) + (BIAS << 52)), n = small_whole(raised) - double(BIAS);
  const double s = (m - 1) / (m + 1), z = s * s;
  double p = 1.0 / 23;
  for (double c : {1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3}) p = p * z + c;
  // log 2 in two parts, so that n times the first is exact
  return n * 0x1.62e42fefp-1 + (n * 0x1.473de6af278edp-34 + (2 * s + 2 * s * (z * p)));
}

// e^x as 2^n * e^r with |r| <= log(2) / 2, and the series of the latter, likewise without a branch. Beyond e^700 and e^-700 these are the result.
// The relative error is below 1e-15 * max(1, |x|).
inline double exponential(double x) {
  constexpr double MAGIC = 0x1.8p52;  // added, it leaves a number's whole part in the lowest bits
  const double t = x < -700 ? -700 : x > 700 ? 700 : x, shifted = t * 0x1.71547652b82fep0 + MAGIC, n = shifted - MAGIC;
  const double r = (t - n * 0x1.62e42fefp-1) - n * 0x1.473de6af278edp-34;
  double p = 1;
  for (double k : {13.0, 12.0, 11.0, 10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0}) p = 1 + r * p * (1 / k);
  return p * number((bits_of(shifted) - bits_of(MAGIC) + 1023) << 52);
}


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

// What a number of a token is made of. Of each of `chunks` chunks of 64 tokens at a position: its largest number, e^-number of it, and whose
// it is.
struct NoiseRow {
  double *peak, *ease;
  int64_t* owner;
  int64_t chunks, position, choice;
  uint32_t key0, key1;

  void find_peaks() const {
    static thread_local Words words;
    const uint64_t* word = words.of(chunks, [](int64_t c) { return c; }, position, choice, 0, key0, key1);
    const int64_t n = chunks;  // own names, which no store can change
    double *number = peak, *without = ease;
    int64_t* whose = owner;
#pragma GCC ivdep
    for (int64_t c = 0; c < n; ++c) {
      without[c] = -logarithm(1 - uniform(word[c], word[n + c])) / 64;
      number[c] = -logarithm(without[c]);
    }
#pragma GCC ivdep
    for (int64_t c = 0; c < n; ++c) whose[c] = 64 * c + int64_t(word[2 * n + c] >> 26);
  }

  double of(int64_t token) const {
    const int64_t chunk = token / 64;
    if (owner[chunk] == token) return peak[chunk];
    const uint64_t counter[4] = {uint64_t(token), uint64_t(position), uint64_t(choice), 1};
    uint64_t words[4];
    philox(counter, 1, key0, key1, words);
    return -logarithm(ease[chunk] - logarithm(1 - uniform(words[0], words[1])));
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
  float best = highest(top);
  for (; i < count; ++i) {
    bad |= row[i] != row[i];
    best = row[i] > best ? row[i] : best;
  }
  return bad ? std::numeric_limits<float>::quiet_NaN() : best;
}

// The token with the largest scale * score + number, as `Noise.largest` in noise.py has it; -1 where a score is NaN or the largest infinite.
inline int64_t largest(const float* row, int64_t vocab, const NoiseRow& noise, double scale) {
  static thread_local std::vector<double> bound;
  const int64_t chunks = (vocab + 63) / 64;
  bound.resize(size_t(chunks));
  float top = -std::numeric_limits<float>::infinity();
  for (int64_t c = 0; c < chunks; ++c) {
    const float here = top_of(row + 64 * c, std::min<int64_t>(64, vocab - 64 * c));
    if (here != here) return -1;
    top = std::max(top, here);
    bound[size_t(c)] = double(here) * scale + noise.peak[c];
  }
  if (!std::isfinite(top)) return -1;
  double best = -std::numeric_limits<double>::infinity();
  int64_t token = -1;
  const auto look = [&](int64_t c) {
    for (int64_t i = 64 * c; i < std::min(vocab, 64 * c + 64); ++i) {
      if (double(row[i]) * scale + noise.peak[c] <= best) continue;
      const double sum = double(row[i]) * scale + noise.of(i);
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
  double prob;
  int64_t column;
};

// One row of probabilities at one place, as `Noise.perturb` in noise.py has it: gives the tokens of the `wanted` largest results above
// `floor`, the largest first, and how many. Probabilities below `lowest` don't count. `token`: of each column, or null where column i is
// token i.
inline int64_t perturb(const float* row, int64_t columns, const int64_t* token, const NoiseRow& noise, double lowest, double floor,
                       double temperature, double cut, int64_t wanted, int64_t* names, double* probs) {
  static thread_local std::vector<float> lift;
  static thread_local std::vector<int64_t> near;
  static thread_local std::vector<double> lifted;
  static thread_local std::vector<Candidate> candidates;
  static thread_local Words words;
  const int64_t chunks = noise.chunks;
  const auto name = [&](int64_t i) { return token == nullptr ? i : token[i]; };
  lift.resize(size_t(chunks + 15) / 16 * 16);
  for (int64_t c = 0; c < chunks; ++c) lift[size_t(c)] = float(temperature * noise.peak[c]);
  for (size_t c = 0; c < lift.size(); c += 16) store(&lift[c], exponential(load(&lift[c])));
  float likeliest = (columns ? top_of(row, columns) : 0) * float(std::pow(2.3, -temperature));  // USUAL of noise.py
  if (token == nullptr)
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t owner = noise.owner[c];  // whose result needs no look, where it is a column of its own
      if (owner < columns) likeliest = std::max(likeliest, row[owner] * lift[size_t(c)]);
    }
  const float bar = float(std::max(cut * likeliest, 0x1p-120)), least = float(lowest);

  near.resize(size_t(columns));  // the columns that may be likely enough
  int64_t looked = 0;
  float lifts[64];
  for (int64_t first = 0; first < columns; first += 64) {
    const int64_t count = std::min<int64_t>(64, columns - first);
    if (token == nullptr)
      std::fill_n(lifts, count, lift[size_t(first / 64)]);
    else
      for (int64_t i = 0; i < count; ++i) lifts[i] = lift[size_t(uint64_t(token[first + i]) / 64)];
    bool any = false;
    for (int64_t i = 0; i < count; i += 16) {
      const int64_t n = std::min<int64_t>(16, count - i);
      any |= any_above(mul(load_first(row + first + i, n), load_first(lifts + i, n)), bar);
    }
    for (int64_t i = 0; any && i < count; ++i) {  // without a branch, as nobody could foresee it
      near[size_t(looked)] = first + i;
      looked += (row[first + i] * lifts[i] > bar) & (row[first + i] >= least);
    }
  }

  const uint64_t* word = words.of(looked, [&](int64_t i) { return name(near[size_t(i)]); }, noise.position, noise.choice, 1, noise.key0, noise.key1);
  const uint64_t* own = words.counter.data();
  lifted.resize(size_t(looked));
  double* much = lifted.data();
#pragma GCC ivdep
  for (int64_t i = 0; i < looked; ++i) {  // e^-number
    const uint64_t c = own[i] / 64;
    const double more = logarithm(1 - uniform(word[i], word[looked + i]));
    much[i] = noise.ease[c] - (uint64_t(noise.owner[c]) == own[i] ? 0.0 : more);
  }
  if (temperature == 1) {
    for (int64_t i = 0; i < looked; ++i) much[i] = 1 / much[i];
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < looked; ++i) much[i] = exponential(-temperature * logarithm(much[i]));
  }
  double seen = 0, sum = 0;
  for (int64_t i = 0; i < looked; ++i) {
    const double q = double(row[near[size_t(i)]]);
    much[i] *= q, seen += q, sum += much[i];
  }
  sum += std::max(0.0, 1 - seen);
  candidates.clear();
  for (int64_t i = 0; i < looked; ++i)
    if (much[i] / sum > floor) candidates.push_back({much[i] / sum, near[size_t(i)]});
  const int64_t count = std::min<int64_t>(wanted, int64_t(candidates.size()));
  std::partial_sort(candidates.begin(), candidates.begin() + count, candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.prob > b.prob || (a.prob == b.prob && a.column < b.column);
  });
  for (int64_t i = 0; i < count; ++i) names[i] = name(candidates[size_t(i)].column), probs[i] = candidates[size_t(i)].prob;
  return count;
}

}  // namespace qb
