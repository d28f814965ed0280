// Products of a few rows with weights that are read once.
//
// Weights of bfloat16 are packed as [outputs / 16][inputs / 2][16][2]: a lane is one output, inputs come in pairs, in order. A result is one
// lane's sum over all pairs, first to last, whatever the number of rows: so a row's bits don't depend on its neighbours. AMX reads the same
// layout; its sums go 32 inputs at a time, in an order of their own, again the same for every number of rows. A machine uses one of the two for
// a given number of inputs, at every width. Weights of float32 are packed as [outputs / 16][inputs][16], with rows of float32, and summed input
// by input.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "simd.h"

#ifdef QB_AMX
#include "tiles.h"
#endif

namespace qb {

constexpr int64_t PACE = 4;  // pairs of inputs between two looks at what to fetch

// What belongs to a weight's numbers: those of a row as products read them, and how many inputs stand side by side.
template <class W>
struct Reads;
template <>
struct Reads<bf16> {
  using X = Entry;
  static constexpr int64_t INPUTS = 2;
};
template <>
struct Reads<float> {
  using X = float;
  static constexpr int64_t INPUTS = 1;
};

// rows x blocks of 16 outputs, `steps` steps of one or two inputs. x: [rows][x_stride], w: blocks w_stride apart, y: [rows][y_stride], which the
// sums go on from (`more`) or begin in. `ahead`: what will be read next, of which `lines` of 64 bytes are fetched meanwhile.
template <class W, int R, int B>
static void tile(const typename Reads<W>::X* x, int64_t x_stride, const W* w, int64_t w_stride, int64_t steps, float* y, int64_t y_stride,
                 bool more, const char* ahead, int64_t lines) {
  Lanes s[R][B];
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) s[r][b] = more ? load(y + r * y_stride + b * 16) : zero();
  for (int64_t k = 0; k < steps;) {
    const int64_t end = std::min(steps, k + PACE);
    for (int64_t l = lines * k / steps; l < lines * end / steps; ++l) QB_PREFETCH(ahead + l * 64);
    for (; k < end; ++k) {
      if constexpr (std::is_same_v<W, float>) {
        Lanes v[B];
        for (int b = 0; b < B; ++b) v[b] = load(w + b * w_stride + k * 16);
        for (int r = 0; r < R; ++r) {
          const Lanes q = all(x[r * x_stride + k]);
          for (int b = 0; b < B; ++b) s[r][b] = fma(q, v[b], s[r][b]);
        }
        continue;
      } else {
#ifdef QB_DOT
      Pairs v[B];
      for (int b = 0; b < B; ++b) v[b] = load_pairs(w + b * w_stride + k * 32);
      for (int r = 0; r < R; ++r) {
        Pairs q = all_pair(x + r * x_stride + 2 * k);
        for (int b = 0; b < B; ++b) s[r][b] = dot(q, v[b], s[r][b]);
      }
#else
      for (int b = 0; b < B; ++b) {
        const Lanes v = load_even(w + b * w_stride + k * 32);
        for (int r = 0; r < R; ++r) s[r][b] = fma(all(x[r * x_stride + 2 * k]), v, s[r][b]);
      }
      for (int b = 0; b < B; ++b) {
        const Lanes v = load_odd(w + b * w_stride + k * 32);
        for (int r = 0; r < R; ++r) s[r][b] = fma(all(x[r * x_stride + 2 * k + 1]), v, s[r][b]);
      }
#endif
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) store(y + r * y_stride + b * 16, s[r][b]);
}

template <class W>
using Tile = void (*)(const typename Reads<W>::X*, int64_t, const W*, int64_t, int64_t, float*, int64_t, bool, const char*, int64_t);

// What fits the registers: by rows, how many blocks of outputs side by side.
#if defined(QB_DOT) && defined(QB_ZMM)
constexpr int MOST_ROWS = 12;
constexpr int WIDEST[MOST_ROWS + 1] = {0, 8, 8, 6, 6, 4, 4, 2, 2, 2, 2, 2, 2};
#elif defined(QB_ZMM)
constexpr int MOST_ROWS = 8;
constexpr int WIDEST[MOST_ROWS + 1] = {0, 4, 4, 4, 4, 2, 2, 2, 2};
#else
constexpr int MOST_ROWS = 6;
constexpr int WIDEST[MOST_ROWS + 1] = {0, 4, 2, 1, 1, 1, 1};
#endif

// How many bytes ahead rows of one part fetch what they read. Not a multiple of 4096: what lies so far apart shares places in the first cache.
constexpr int64_t AHEAD = 6 << 10;

// How many blocks of a weight rows of one part, and of several, go through side by side. PART_ROWS: the most rows that one of several parts
// has. STREAM: whether rows of one part fetch AHEAD, else the next panel. On processors with fast products rows wait for memory, which is read
// fastest as few streams.
#if defined(QB_DOT) && defined(QB_ZMM)
constexpr int WIDEST_ALONE[MOST_ROWS + 1] = {0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, WIDEST_PARTS[] = {0, 2, 2, 2, 2, 2, 2, 2, 2};
constexpr int64_t PART_ROWS = 8;
constexpr bool STREAM = true;
#else
constexpr const int *WIDEST_ALONE = WIDEST, *WIDEST_PARTS = WIDEST;
constexpr int64_t PART_ROWS = MOST_ROWS;
constexpr bool STREAM = false;
#endif

template <class W, int R = 1, int B = 1>
static Tile<W> tile_for(int64_t rows, int64_t blocks) {
  if constexpr (R < MOST_ROWS)
    if (rows > R) return tile_for<W, R + 1>(rows, blocks);
  if constexpr (B < WIDEST[R])
    if (blocks > B) return tile_for<W, R, B + 1>(rows, blocks);
  return tile<W, R, B>;
}

// Rows of a product in parts of nearly as many each, at most `most`.
struct Parts {
  int64_t rows, count;
  Parts(int64_t rows, int64_t most) : rows(rows), count((rows + most - 1) / most) {}
  int64_t begin(int64_t part) const { return rows * part / count; }
  int64_t tallest() const { return (rows + count - 1) / count; }
};

// y [rows][y_stride] of all `blocks` blocks of 16 outputs (y has room for whole blocks), step by step. `more`: go on from what is in y.
template <class W>
static void step_product(const typename Reads<W>::X* x, int64_t x_stride, int64_t rows, const W* w, int64_t w_stride, int64_t steps,
                         int64_t blocks, float* y, int64_t y_stride, bool more, const void* ahead = nullptr, int64_t lines = 0) {
  int64_t tallest = MOST_ROWS;
#ifdef QB_ZMM  // as many rows as leave room for all blocks side by side
  while (tallest > MOST_ROWS / 2 && WIDEST[tallest] < blocks && WIDEST[tallest] < 4) --tallest;
#endif
  const Parts parts(rows, tallest);
  for (int64_t part = 0; part < parts.count; ++part) {
    const int64_t first = parts.begin(part), count = parts.begin(part + 1) - first;
    const int64_t most = WIDEST[count];
    for (int64_t b = 0; b < blocks; b += most) {
      const int64_t some = std::min(most, blocks - b);
      tile_for<W>(count, some)(x + first * x_stride, x_stride, w + b * w_stride, w_stride, steps, y + first * y_stride + b * 16,
                               y_stride, more, static_cast<const char*>(ahead), part + b == 0 ? lines : 0);
    }
  }
}

// The same from zero, by AMX where the machine has it and the inputs come in 32s.
template <class W>
static void product(const typename Reads<W>::X* x, int64_t x_stride, int64_t rows, const W* w, int64_t w_stride, int64_t inputs, int64_t blocks,
                    float* y, int64_t y_stride, const void* ahead, int64_t lines) {
#ifdef QB_AMX
  if constexpr (std::is_same_v<W, bf16>)
    if (inputs % 32 == 0) return tile_product(x, x_stride, rows, w, w_stride, inputs, blocks, y, y_stride, ahead, lines);
#endif
  step_product(x, x_stride, rows, w, w_stride, inputs / Reads<W>::INPUTS, blocks, y, y_stride, false, ahead, lines);
}

// Rows as products read them, kept by each thread for itself.
template <class W>
class Entries;

template <>
class Entries<float> {
 public:
  static int64_t rows_at_once(int64_t) { return INT64_MAX; }
  const float* take(const float* x, int64_t x_stride, int64_t, int64_t) {
    stride_ = x_stride;
    return x;
  }
  int64_t stride() const { return stride_; }

 private:
  int64_t stride_ = 0;
};

template <>
class Entries<bf16> {
 public:
  static constexpr int64_t MOST = 1 << 19;  // bytes that widened rows may take, about: they stay in the cache meanwhile

  static int64_t rows_at_once([[maybe_unused]] int64_t inputs) {
#ifdef QB_DOT
    return INT64_MAX;
#else
    return std::max<int64_t>(MOST_ROWS, MOST / (4 * (inputs + GAP)) / MOST_ROWS * MOST_ROWS);
#endif
  }

  const Entry* take(const bf16* x, int64_t x_stride, [[maybe_unused]] int64_t rows, [[maybe_unused]] int64_t inputs) {
#ifdef QB_DOT
    stride_ = x_stride;
    return x;
#else
    stride_ = inputs + GAP;
    if (int64_t(values_.size()) < rows * stride_) values_.resize(size_t(rows * stride_));
    for (int64_t r = 0; r < rows; ++r) {
      const bf16* from = x + r * x_stride;
      float* to = values_.data() + r * stride_;
      int64_t i = 0;
      for (; i + 16 <= inputs; i += 16) store(to + i, load(from + i));
      for (; i < inputs; ++i) to[i] = widen(from[i]);
    }
    return values_.data();
#endif
  }
  int64_t stride() const { return stride_; }

 private:
  static constexpr int64_t GAP = 16;  // between rows, so that those of a tile don't share places in the first cache
  int64_t stride_ = 0;
#ifndef QB_DOT
  std::vector<float> values_;
#endif
};

constexpr int64_t PANEL = 32 * 8 * 16;  // numbers a panel's sums have room for

// Panels of blocks, `block_bytes` each, one after the other; a tile of R rows has at most widest[R] blocks. `each(f)` calls f(first, last, end)
// for ranges of blocks, after which those up to `end` are likely to follow. `even`: blocks go in twos. `tile(low, rows, block's bytes, blocks,
// sums, stride, ahead, lines)` makes the sums of a part and fetches `lines` from `ahead`: what lies `distance` bytes behind its own blocks, or
// of the next panel where that is 0. `done(low, rows, block, blocks, sums, stride)` takes the sums.
template <class Each, class Tile, class Done>
static void walk_panels(const Parts& parts, const int* widest, const void* weight, int64_t block_bytes, Each each, bool even, float* sums,
                        Tile tile, Done done, int64_t distance = 0) {
  const int64_t tallest = parts.tallest();
  const int64_t most = even ? std::max(2, widest[tallest] & ~1) : widest[tallest];  // even: maybe two tiles, one after the other
  each([&](int64_t first, int64_t last, int64_t end) {
    for (int64_t b = first; b < last; b += most) {
      const int64_t some = std::min(most, last - b), follow = distance ? some : std::min(most, end - b - some);
      const char *here = static_cast<const char*>(weight) + b * block_bytes, *ahead = here + (distance ? distance : some * block_bytes);
      const int64_t lines = follow * block_bytes / 64;  // spread over all tiles
      for (int64_t part = 0; part < parts.count; ++part) {
        const int64_t low = parts.begin(part), count = parts.begin(part + 1) - low;
        for (int64_t c = 0, now; c < some; c += now) {
          now = std::min<int64_t>(widest[count], some - c);
          const int64_t before = part * some + c, tiles = parts.count * some;
          const int64_t from = lines * before / tiles, share = lines * (before + now) / tiles - from;
          tile(low, count, here + c * block_bytes, now, sums + c * 16, some * 16, ahead + from * 64, share);
        }
        done(low, count, b, some, sums, some * 16);
      }
    }
  });
}

// A whole product: panels of blocks, each handed to `done(row, rows, block, blocks, sums, stride)` part by part as it is made. `each` and
// `even` as above. `sums`: scratch of PANEL floats. While the rows of one panel are worked through, the next is fetched.
template <class W, class Each, class Done>
static void panels(const W* x, int64_t x_stride, int64_t rows, const W* w, int64_t inputs, Each each, bool even, float* sums, Done done) {
  const int64_t w_stride = inputs * 16;
#ifdef QB_AMX
  if constexpr (std::is_same_v<W, bf16>) if (inputs % 32 == 0 && rows) {
    constexpr int64_t HELD = 1 << 18;  // numbers of rows that stay in the second cache while weights pass by, where all would not
    const int64_t most = rows > 16 ? 2 : 4, group = rows > 16 ? 32 : 16;
    const int64_t held = rows * inputs <= 2 * HELD ? rows : std::max<int64_t>(2, HELD / 32 / inputs) * 32;
    for (int64_t low = 0; low < rows; low += held)
      each([&](int64_t first, int64_t last, int64_t end) {
        const int64_t high = std::min(rows, low + held);
        for (int64_t b = first; b < last; b += most) {
          const int64_t some = b + most < last ? most : last - b;
          const char* next = b + some + most <= end ? reinterpret_cast<const char*>(w + (b + some) * w_stride) : nullptr;
          for (int64_t r = low; r < high; r += group) {
            const int64_t count = std::min(group, high - r);
            tile_part(x + r * x_stride, x_stride, count, w + b * w_stride, w_stride, inputs, some, sums, some * 16, r > low ? nullptr : next);
            done(r, count, b, some, sums, some * 16);
          }
        }
      });
    return;
  }
#endif
  static thread_local Entries<W> entries;
  const int64_t most_rows = Entries<W>::rows_at_once(inputs);
  for (int64_t begin = 0; begin < rows; begin += most_rows) {
    const int64_t n = std::min(most_rows, rows - begin);
    const typename Reads<W>::X* taken = entries.take(x + begin * x_stride, x_stride, n, inputs);
    const int64_t stride = entries.stride();
    const auto tile = [&](int64_t low, int64_t count, const char* block, int64_t blocks, float* to, int64_t to_stride, const char* ahead,
                          int64_t lines) {
      tile_for<W>(count, blocks)(taken + low * stride, stride, reinterpret_cast<const W*>(block), w_stride,
                                 inputs / Reads<W>::INPUTS, to, to_stride, false, ahead, lines);
    };
    const auto made = [&](int64_t low, int64_t count, int64_t block, int64_t blocks, const float* from, int64_t from_stride) {
      done(begin + low, count, block, blocks, from, from_stride);
    };
    const Parts parts(n, n > MOST_ROWS ? PART_ROWS : MOST_ROWS);
    const bool alone = parts.count == 1;
    const int* widest = alone ? WIDEST_ALONE : WIDEST_PARTS;
    walk_panels(parts, widest, w, w_stride * int64_t(sizeof(W)), each, even, sums, tile, made, alone && STREAM ? AHEAD : 0);
  }
}

}  // namespace qb
