// Products of bfloat16 rows with weights of 8 or 4 bits, which are read once.
//
// Inputs go in groups of 32, the last filled up with zeros. A row is quantised by itself, each group to whole numbers of -127 to 127 with a
// scale of its own; groups' sums are whole numbers; scaled, they are added in float32, first group to last, each multiplication and addition
// rounded by itself. So a row's bits depend neither on the other rows, nor on threads, nor on the instruction set: `models/quantised.py` has
// the same in PyTorch.
//
// A block of 16 outputs (a piece of `block_bytes`):
//   INT8: [inputs / 4][16][4] bytes, 128 above the weight, then [16] float32 scales.
//   INT4: [groups][4][16][4] bytes, each of which holds the weight of an input (low half, 0 to 15) and that of the fourth input behind it
//   (high half), then [groups][2][16] of half precision: scales, and what is added to the scaled weights.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "bytes.h"
#include "product.h"

namespace qb {

enum Format : int32_t { BFLOAT16, INT8, INT4, FLOAT32 };

constexpr float LEAST = 7.8886090522101181e-31f;  // 2^-100: groups whose largest number is smaller count as zeros

inline int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }
inline int64_t block_bytes(int32_t format, int64_t inputs) {
  switch (format) {
    case BFLOAT16: return inputs * 32;
    case FLOAT32: return inputs * 64;
    case INT8: return groups_of(inputs) * 512 + 64;
    default: return groups_of(inputs) * 320;
  }
}

struct Whole {  // INT8
  static constexpr Format FORMAT = INT8;
  static constexpr int64_t GROUP_BYTES = 512;
  using Sums = WholeSums;
  using Value = WholeValue;
  struct Scale {};
  static void arrange(const float* from, Value* to) { arrange_whole(from, to); }
  static Sums start(int32_t shift) { return whole_from(shift); }
  static Scale scale(const uint8_t*, int64_t, int64_t) { return {}; }
  static Lanes scaled(const Lanes& sum, const Scale&, float row, float) { return mul(sum, all(row)); }
  static Lanes finished(const Lanes& y, const uint8_t* w, int64_t groups) {
    return mul(y, load(reinterpret_cast<const float*>(w + groups * GROUP_BYTES)));
  }

  template <int R, int B>
  static void add(Sums (&s)[R][B], const Value* x, const uint8_t* w, int64_t stride) {
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      WholeBytes v[B];
      for (int b = 0; b < B; ++b) v[b] = load_whole(w + b * stride + k * 64);
      for (int r = 0; r < R; ++r)
        for (int b = 0; b < B; ++b) s[r][b] = dot_whole(s[r][b], v[b], x + r * GROUP + k * 4);
    }
  }
};

struct Halves {  // INT4
  static constexpr Format FORMAT = INT4;
  static constexpr int64_t GROUP_BYTES = 256;
  using Sums = HalfSums;
  using Value = int8_t;
  static void arrange(const float* from, Value* to) {
    for (int64_t i = 0; i < GROUP; ++i) to[i] = Value(from[i]);
  }
  struct Scale {
    Lanes by, plus;
  };
  static Sums start(int32_t) { return halves_from_zero(); }
  static Scale scale(const uint8_t* w, int64_t groups, int64_t g) {
    const uint16_t* p = reinterpret_cast<const uint16_t*>(w + groups * GROUP_BYTES) + g * 32;
    return {load_half_floats(p), load_half_floats(p + 16)};
  }
  static Lanes scaled(const Lanes& sum, const Scale& scale, float row, float total) {
    return mul(qb::add(mul(sum, scale.by), mul(scale.plus, all(total))), all(row));
  }
  static Lanes finished(const Lanes& y, const uint8_t*, int64_t) { return y; }

  template <int R, int B>
  static void add(Sums (&s)[R][B], const Value* x, const uint8_t* w, int64_t stride) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      HalfBytes low[B], high[B];
      for (int b = 0; b < B; ++b) load_halves(w + b * stride + k * 64, low[b], high[b]);
      for (int r = 0; r < R; ++r)
        for (int b = 0; b < B; ++b) {
          const Value* p = x + r * GROUP + k * 8;
          s[r][b] = dot_half(dot_half(s[r][b], low[b], p), high[b], p + 4);
        }
    }
  }
};

// Quantised rows, kept by each thread for itself: parts of a few rows that are worked on together, in each group by group, row beside row.
template <class F>
struct QuantisedRows {
  using Value = typename F::Value;
  static constexpr int64_t MOST = 1 << 19;  // bytes that a part of the rows may take, about: they stay in the cache meanwhile

  std::vector<Value> values;    // [parts][groups][rows][32]
  std::vector<float> scales;    // [parts][groups][rows]
  std::vector<float> totals;    // likewise: sums of the values
  std::vector<int32_t> shifts;  // likewise: those times -128
  int64_t groups = 0;

  static int64_t rows_at_once(int64_t inputs) { return std::max<int64_t>(16, MOST / (groups_of(inputs) * GROUP * int64_t(sizeof(Value)))); }

  void resize(int64_t rows, int64_t inputs) {
    groups = groups_of(inputs);
    const size_t all = size_t(rows * groups);
    values.resize(all * size_t(GROUP)), scales.resize(all), totals.resize(all), shifts.resize(all);
  }

  // A part: rows [first, first + count).
  void take(const bf16* x, int64_t stride, int64_t first, int64_t count, int64_t inputs) {
    for (int64_t r = 0; r < count; ++r)
      for (int64_t g = 0; g < groups; ++g) {
        const bf16* from = x + (first + r) * stride + g * GROUP;
        bf16 part[GROUP] = {};
        if ((g + 1) * GROUP > inputs) {
          std::memcpy(part, from, size_t(inputs - g * GROUP) * 2);
          from = part;
        }
        const size_t at = size_t(first * groups + g * count + r);
        const int32_t total = quantise(from, values.data() + at * size_t(GROUP), scales[at]);
        totals[at] = float(total), shifts[at] = -128 * total;
      }
  }

  // One group; the sum of its values. What is not finite makes the scale NaN, and so the whole row of results.
  static int32_t quantise(const bf16* x, Value* values, float& scale) {
    uint16_t top = 0;  // sizes of bfloat16 numbers are in the order of their bits, NaN above all
    for (int64_t i = 0; i < GROUP; ++i) top = std::max<uint16_t>(top, x[i] & 0x7fff);
    const float largest = widen(top);
    if (top >= 0x7f80 || largest < LEAST) {
      scale = top >= 0x7f80 ? NAN : 0.0f;
      std::fill(values, values + GROUP, Value(0));
      return 0;
    }
    scale = largest / 127.0f;
    const Lanes factor = all(127.0f / largest);
    float rounded[GROUP];
    store(rounded, round_even(mul(load(x), factor)));
    store(rounded + 16, round_even(mul(load(x + 16), factor)));
    int32_t total = 0;
    for (int64_t i = 0; i < GROUP; ++i) total += int32_t(rounded[i]);
    F::arrange(rounded, values);
    return total;
  }
};

// A part of the rows from `row` on x blocks of 16 outputs to y. `ahead`: what will be read next, of which `lines` of 64 bytes are fetched meanwhile.
template <class F, int R, int B>
static void quantised_tile(const QuantisedRows<F>& x, int64_t row, const uint8_t* w, int64_t stride, float* y, int64_t y_stride,
                           const uint8_t* ahead, int64_t lines) {
  const int64_t groups = x.groups;
  const typename F::Value* values = x.values.data() + row * groups * GROUP;
  const float *scales = x.scales.data() + row * groups, *totals = x.totals.data() + row * groups;
  const int32_t* shifts = x.shifts.data() + row * groups;
  const int64_t step = (lines + groups - 1) / groups;
  Lanes f[R][B];
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) f[r][b] = zero();
  for (int64_t g = 0; g < groups; ++g) {
    typename F::Sums s[R][B];
    for (int r = 0; r < R; ++r)
      for (int b = 0; b < B; ++b) s[r][b] = F::start(shifts[g * R + r]);
    for (int64_t l = g * step; l < (g + 1) * step && l < lines; ++l) QB_PREFETCH(ahead + l * 64);
    F::template add<R, B>(s, values + g * R * GROUP, w + g * F::GROUP_BYTES, stride);
    for (int b = 0; b < B; ++b) {
      const typename F::Scale scale = F::scale(w + b * stride, groups, g);
      for (int r = 0; r < R; ++r) {
        const int64_t at = g * R + r;
        f[r][b] = add(f[r][b], F::scaled(to_lanes(s[r][b]), scale, scales[at], totals[at]));
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) store(y + r * y_stride + b * 16, F::finished(f[r][b], w + b * stride, groups));
}

template <class F>
using QuantisedTile = void (*)(const QuantisedRows<F>&, int64_t, const uint8_t*, int64_t, float*, int64_t, const uint8_t*, int64_t);

// What fits the registers: by rows, how many blocks of outputs side by side.
#ifdef QB_VNNI
constexpr int MOST_QUANTISED = 8;
constexpr int WIDEST_QUANTISED[MOST_QUANTISED + 1] = {0, 4, 4, 2, 2, 2, 1, 1, 1};
#else
constexpr int MOST_QUANTISED = 5;
constexpr int WIDEST_QUANTISED[MOST_QUANTISED + 1] = {0, 2, 1, 1, 1, 1};
#endif

template <class F, int R>
static QuantisedTile<F> quantised_tile_of(int64_t blocks) {
  constexpr int most = WIDEST_QUANTISED[R];
  switch (blocks) {
    case 1: return quantised_tile<F, R, 1>;
    case 2: return quantised_tile<F, R, most >= 2 ? 2 : 1>;
    case 3: return quantised_tile<F, R, most >= 3 ? 3 : 1>;
    default: return quantised_tile<F, R, most >= 4 ? 4 : 1>;
  }
}

template <class F>
static QuantisedTile<F> quantised_tile_for(int64_t rows, int64_t blocks) {
  switch (rows) {
    case 1: return quantised_tile_of<F, 1>(blocks);
    case 2: return quantised_tile_of<F, 2>(blocks);
    case 3: return quantised_tile_of<F, 3>(blocks);
    case 4: return quantised_tile_of<F, 4>(blocks);
#ifdef QB_VNNI
    case 5: return quantised_tile_of<F, 5>(blocks);
    case 6: return quantised_tile_of<F, 6>(blocks);
    case 7: return quantised_tile_of<F, 7>(blocks);
    default: return quantised_tile_of<F, 8>(blocks);
#else
    default: return quantised_tile_of<F, 5>(blocks);
#endif
  }
}

// As `panels` of product.h: blocks of outputs, handed to `done(row, rows, block, blocks, sums, stride)` part by part. `each(f)` calls
// f(first, last) for ranges of blocks one after the other; rows are quantised once for all of them.
template <class F, class Each, class Done>
static void quantised_panels_of(const bf16* x, int64_t x_stride, int64_t rows, const uint8_t* w, int64_t inputs, Each each, bool even,
                                float* sums, Done done) {
  static thread_local QuantisedRows<F> taken;
  const int64_t stride = block_bytes(F::FORMAT, inputs), most_rows = QuantisedRows<F>::rows_at_once(inputs);
  for (int64_t begin = 0; begin < rows; begin += most_rows) {
    const Parts parts(std::min(most_rows, rows - begin), MOST_QUANTISED);
    taken.resize(parts.rows, inputs);
    for (int64_t part = 0; part < parts.count; ++part)
      taken.take(x + begin * x_stride, x_stride, parts.begin(part), parts.begin(part + 1) - parts.begin(part), inputs);
    const auto tile = [&](int64_t low, int64_t count, const char* block, int64_t blocks, float* to, int64_t to_stride, const char* ahead,
                          int64_t lines) {
      quantised_tile_for<F>(count, blocks)(taken, low, reinterpret_cast<const uint8_t*>(block), stride, to, to_stride,
                                           reinterpret_cast<const uint8_t*>(ahead), lines);
    };
    const auto made = [&](int64_t low, int64_t count, int64_t block, int64_t blocks, const float* from, int64_t from_stride) {
      done(begin + low, count, block, blocks, from, from_stride);
    };
    walk_panels(parts, WIDEST_QUANTISED, w, stride, each, even, sums, tile, made);
  }
}

template <class Each, class Done>
static void quantised_panels(int32_t format, const bf16* x, int64_t x_stride, int64_t rows, const void* weight, int64_t inputs, Each each,
                             bool even, float* sums, Done done) {
  const uint8_t* w = static_cast<const uint8_t*>(weight);
  if (format == INT8) quantised_panels_of<Whole>(x, x_stride, rows, w, inputs, each, even, sums, done);
  else quantised_panels_of<Halves>(x, x_stride, rows, w, inputs, each, even, sums, done);
}

// A product with a weight of any format, as `panels`.
template <class Each, class Done>
static void any_panels(int32_t, const float* x, int64_t x_stride, int64_t rows, const void* weight, int64_t inputs, Each each, bool even,
                       float* sums, Done done) {
  panels(x, x_stride, rows, static_cast<const float*>(weight), inputs, each, even, sums, done);
}
template <class Each, class Done>
static void any_panels(int32_t format, const bf16* x, int64_t x_stride, int64_t rows, const void* weight, int64_t inputs, Each each, bool even,
                       float* sums, Done done) {
  if (format != BFLOAT16) quantised_panels(format, x, x_stride, rows, weight, inputs, each, even, sums, done);
  else panels(x, x_stride, rows, static_cast<const bf16*>(weight), inputs, each, even, sums, done);
}

// --- weights ---

// 16 outputs of 32 inputs by input, zeros where the weight ends.
struct Tall {
  float of[GROUP][16];
  Tall(const bf16* weight, int64_t stride, int64_t output, int64_t outputs, int64_t input, int64_t inputs) {
    for (int64_t o = 0; o < 16; ++o)
      for (int64_t i = 0; i < GROUP; ++i)
        of[i][o] = output + o < outputs && input + i < inputs ? widen(weight[(output + o) * stride + input + i]) : 0.0f;
  }
};

inline Lanes size_of(const Lanes& x) { return greatest(x, sub(zero(), x)); }

static bool finite(const bf16* weight, int64_t stride, int64_t block, int64_t outputs, int64_t inputs) {
  uint16_t top = 0;
  for (int64_t o = block * 16; o < std::min(outputs, block * 16 + 16); ++o)
    for (int64_t i = 0; i < inputs; ++i) top = std::max<uint16_t>(top, weight[o * stride + i] & 0x7fff);
  return top < 0x7f80;
}

// Block `block` to INT8: by output, the largest number becomes 127.
static void quantise_whole(const bf16* weight, int64_t stride, int64_t block, int64_t outputs, int64_t inputs, uint8_t* to) {
  const int64_t groups = groups_of(inputs);
  Lanes top = zero();
  for (int64_t g = 0; g < groups; ++g) {
    const Tall w(weight, stride, block * 16, outputs, g * GROUP, inputs);
    for (int64_t i = 0; i < GROUP; ++i) top = greatest(size_of(load(w.of[i])), top);
  }
  top = greatest(top, all(LEAST));
  const Lanes factor = div(all(127.0f), top);
  for (int64_t g = 0; g < groups; ++g) {
    const Tall w(weight, stride, block * 16, outputs, g * GROUP, inputs);
    for (int64_t i = 0; i < GROUP; ++i) {
      float v[16];
      store(v, round_even(mul(load(w.of[i]), factor)));
      for (int64_t o = 0; o < 16; ++o) to[g * 512 + i / 4 * 64 + o * 4 + i % 4] = uint8_t(int(v[o]) + 128);
    }
  }
  store(reinterpret_cast<float*>(to + groups * 512), div(top, all(127.0f)));
}

// One output to place `lane` of a block, as `quantise_whole` has it; the scale is NaN where a weight is not finite.
static void put_whole(const bf16* weight, int64_t inputs, int64_t lane, uint8_t* to) {
  const int64_t groups = groups_of(inputs);
  float top = LEAST;
  bool fine = true;
  for (int64_t i = 0; i < inputs; ++i) {
    const float size = std::fabs(widen(weight[i]));
    fine = fine && std::isfinite(size);
    top = std::max(top, size);
  }
  const float factor = 127.0f / top, scale = fine ? top / 127.0f : NAN;
  for (int64_t i = 0; i < groups * GROUP; ++i) {
    const float value = fine && i < inputs ? std::nearbyint(widen(weight[i]) * factor) : 0.0f;
    to[i / 4 * 64 + lane * 4 + i % 4] = uint8_t(int(value) + 128);
  }
  std::memcpy(to + groups * 512 + lane * 4, &scale, 4);
}

// Block `block` to INT4: of several distances between levels, the one whose least-squares fit leaves the smallest error. Weights that lie
// on 16 levels or fewer already, as those of many 4-bit checkpoints, stay on them.
static void quantise_halves(const bf16* weight, int64_t stride, int64_t block, int64_t outputs, int64_t inputs, uint8_t* to) {
  constexpr float LEVELS[] = {8, 9, 10, 11, 12, 13, 14, 15, 15.5f, 16, 17};  // from the smallest to the largest
  const int64_t groups = groups_of(inputs);
  uint16_t* scales = reinterpret_cast<uint16_t*>(to + groups * 256);
  for (int64_t g = 0; g < groups; ++g) {
    Tall w(weight, stride, block * 16, outputs, g * GROUP, inputs);
    Lanes low = load(w.of[0]), high = low;
    for (int64_t i = 1; i < GROUP; ++i) low = least(low, load(w.of[i])), high = greatest(high, load(w.of[i]));
    Lanes above = zero();
    for (int64_t i = 0; i < GROUP; ++i) {
      store(w.of[i], sub(load(w.of[i]), low));
      above = add(above, load(w.of[i]));
    }
    float lowest[16], range[16], best[16], by[16], slope[16] = {}, base[16] = {};
    store(lowest, low), store(range, sub(high, low)), store(best, all(INFINITY)), store(by, zero());
    for (const float levels : LEVELS) {
      float tried[16], fit[16], rest[16], error[16];
      for (int64_t o = 0; o < 16; ++o) tried[o] = range[o] < LEAST ? 0.0f : levels / range[o];
      const Lanes factor = load(tried);
      Lanes level = zero(), across = zero(), square = zero(), q[GROUP];
      for (int64_t i = 0; i < GROUP; ++i) {
        q[i] = least(all(15.0f), round_even(mul(load(w.of[i]), factor)));
        level = add(level, q[i]), across = add(across, mul(load(w.of[i]), q[i])), square = add(square, mul(q[i], q[i]));
      }
      float spread[16], shared[16];
      store(spread, sub(mul(all(32.0f), square), mul(level, level)));
      store(shared, sub(mul(all(32.0f), across), mul(above, level)));
      for (int64_t o = 0; o < 16; ++o) fit[o] = spread[o] > 0 ? shared[o] / spread[o] : 0.0f;
      const Lanes line = load(fit), start = mul(sub(above, mul(line, level)), all(0.03125f));
      Lanes wrong = zero();
      for (int64_t i = 0; i < GROUP; ++i) {
        const Lanes off = sub(load(w.of[i]), add(mul(line, q[i]), start));
        wrong = add(wrong, mul(off, off));
      }
      store(rest, start), store(error, wrong);
      for (int64_t o = 0; o < 16; ++o)
        if (error[o] < best[o]) best[o] = error[o], by[o] = tried[o], slope[o] = fit[o], base[o] = rest[o];
    }
    for (int64_t o = 0; o < 16; ++o) {
      scales[g * 32 + o] = to_half_float(slope[o]);
      scales[g * 32 + 16 + o] = to_half_float(base[o] + lowest[o]);
    }
    for (int64_t i = 0; i < GROUP; ++i) {
      float v[16];
      store(v, least(all(15.0f), round_even(mul(load(w.of[i]), load(by)))));
      for (int64_t o = 0; o < 16; ++o) {
        uint8_t& byte = to[g * 256 + i / 8 * 64 + o * 4 + i % 4];
        byte = i % 8 < 4 ? uint8_t(int(v[o])) : uint8_t(byte | int(v[o]) << 4);
      }
    }
  }
}

}  // namespace qb
