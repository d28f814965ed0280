// Products of bfloat16 rows with weights of few bits (`formats.h`), which are read once.
//
// A row is quantised by itself, each group of 32 inputs to whole numbers of -127 to 127 with a scale of its own; groups' sums are whole
// numbers; scaled, they are added in float32, first group to last, by the same few operations everywhere. So a row's bits depend neither on
// the other rows, nor on threads, nor on the instruction set: `tests/quantised.py` has the same in PyTorch.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "float8.h"
#include "formats.h"
#include "product.h"

namespace qb {

constexpr float LEAST = 7.8886090522101181e-31f;  // 2^-100: groups whose largest number is smaller count as zeros

inline Lanes size_of(const Lanes& x) { return greatest(x, sub(zero(), x)); }

// Quantised rows, kept by each thread for itself: parts of a few rows that are worked on together, in each group by group, row beside row.
class QuantisedRows {
 public:
  int64_t groups = 0;

  static int64_t rows_at_once(int64_t inputs) { return std::max<int64_t>(16, MOST / (groups_of(inputs) * GROUP * 2)); }

  // `wide`: values are kept as WholeValue, else in 8 bits. `pieces`: of a group, which are summed apart. `offset`: what all weights are above
  // the numbers that they stand for. `scaled`: totals are taken times scales.
  void resize(int64_t rows, int64_t inputs, bool wide, int64_t pieces, int32_t offset, bool scaled) {
    groups = groups_of(inputs), wide_ = wide, pieces_ = pieces, offset_ = offset, scaled_ = scaled;
    const size_t all = size_t(rows * groups);
    values_.resize(all * size_t(GROUP)), scales_.resize(all), totals_.resize(all), starts_.resize(all * size_t(pieces));
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
        quantise(from, first * groups + g * count + r);
      }
  }

  // From row `row` on, which is the first of a part: [groups][rows][32] values, [groups][rows] scales and sums of values,
  // [groups][rows][pieces] numbers that sums of products start from.
  template <class Value>
  const Value* values(int64_t row) const {
    return reinterpret_cast<const Value*>(values_.data()) + row * groups * GROUP;
  }
  const float* scales(int64_t row) const { return scales_.data() + row * groups; }
  const float* totals(int64_t row) const { return totals_.data() + row * groups; }
  const int32_t* starts(int64_t row) const { return starts_.data() + row * groups * pieces_; }

 private:
  static constexpr int64_t MOST = 1 << 19;  // bytes that a part of the rows may take, about: they stay in the cache meanwhile
  std::vector<int16_t> values_;
  std::vector<float> scales_, totals_;
  std::vector<int32_t> starts_;
  int64_t pieces_ = 1;
  int32_t offset_ = 0;
  bool wide_ = false, scaled_ = false;

  // One group, to place `at`. What is not finite makes the scale NaN, and so the whole row of results.
  void quantise(const bf16* x, int64_t at) {
    Lanes a = load(x), b = load(x + 16);
    const Lanes size = size_of(a), other = size_of(b);
    const bool finite = !any_above(size, FLT_MAX) && !any_above(other, FLT_MAX);
    const float largest = highest(greatest(size, other));
    const bool used = finite && largest >= LEAST;
    const Lanes by = all(127.0f / largest);
    a = used ? round_even(mul(a, by)) : zero(), b = used ? round_even(mul(b, by)) : zero();
    const float scale = !finite ? NAN : used ? largest / 127.0f : 0.0f, first = total(a), second = total(b);
    scales_[size_t(at)] = scale, totals_[size_t(at)] = scaled_ ? scale * (first + second) : first + second;
    int32_t* from = starts_.data() + at * pieces_;
    from[0] = -offset_ * int32_t(pieces_ == 1 ? first + second : first);
    if (pieces_ == 2) from[1] = -offset_ * int32_t(second);
    if (wide_) arrange(a, b, reinterpret_cast<WholeValue*>(values_.data()) + at * GROUP);
    else arrange(a, b, reinterpret_cast<int8_t*>(values_.data()) + at * GROUP);
  }
};

// A part of the rows from `row` on x blocks of 16 outputs to y. `ready`: scales, [blocks][groups], null where they are still to be made. `ahead`: what
// will be read next, of which `lines` of 64 bytes are fetched meanwhile.
template <class F, int R, int B>
static void quantised_tile(const Layout& of, const QuantisedRows& x, int64_t row, const uint8_t* w, int64_t stride, const Scale* ready, float* y,
                           int64_t y_stride, const uint8_t* ahead, int64_t lines) {
  const int64_t groups = x.groups, step = (lines + groups - 1) / groups;
  const int32_t* starts = x.starts(row);
  const float *scales = x.scales(row), *totals = x.totals(row);
  const auto* values = x.values<typename F::Value>(row);
  const uint8_t* by = w + groups * F::GROUP_BYTES;
  Scale own[B][SUPER_GROUPS];
  Lanes f[R][B];
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) f[r][b] = zero();
  for (int64_t first = 0; first < groups; first += SUPER_GROUPS) {
    const int64_t end = std::min(groups, first + SUPER_GROUPS);
    if (F::SCALED && !ready) scales_of(of.scales, by, stride, groups, first, end, B, own[0], SUPER_GROUPS);
    const Scale* scale = ready ? ready + first : own[0];
    const int64_t apart = ready ? groups : SUPER_GROUPS;
    for (int64_t g = first; g < end; ++g) {
      for (int64_t l = g * step; l < (g + 1) * step && l < lines; ++l) QB_PREFETCH(ahead + l * 64);
      typename F::Sums s[R][B][F::PIECES];
      for (int r = 0; r < R; ++r)
        for (int b = 0; b < B; ++b)
          for (int piece = 0; piece < F::PIECES; ++piece) start(s[r][b][piece], F::ADDS ? 0 : starts[(g * R + r) * F::PIECES + piece]);
      F::template add<R, B>(s, values + g * R * GROUP, w + g * F::GROUP_BYTES, stride, of.table);
      for (int b = 0; b < B; ++b)
        for (int r = 0; r < R; ++r) f[r][b] = F::plus(f[r][b], s[r][b], scale[b * apart + g - first], scales[g * R + r], totals[g * R + r]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) {
      const Lanes sum = of.scales == OUTPUT ? mul(f[r][b], load(reinterpret_cast<const float*>(by + b * stride))) : f[r][b];
      store(y + r * y_stride + b * 16, sum);
    }
}

using QuantisedTile = void (*)(const Layout&, const QuantisedRows&, int64_t, const uint8_t*, int64_t, const Scale*, float*, int64_t, const uint8_t*,
                               int64_t);

// What fits the registers: by rows, how many blocks of outputs side by side.
#if defined(QB_VNNI) && defined(QB_ZMM)
constexpr int MOST_QUANTISED = 8;
constexpr int WIDEST_QUANTISED[MOST_QUANTISED + 1] = {0, 1, 1, 1, 2, 2, 2, 2, 2};
#else
constexpr int MOST_QUANTISED = 5;
constexpr int WIDEST_QUANTISED[MOST_QUANTISED + 1] = {0, 2, 1, 1, 1, 1};
#endif

template <class F, int R = 1, int B = 1>
static QuantisedTile quantised_tile_for(int64_t rows, int64_t blocks) {
  if constexpr (R < MOST_QUANTISED)
    if (rows > R) return quantised_tile_for<F, R + 1>(rows, blocks);
  if constexpr (B < WIDEST_QUANTISED[R])
    if (blocks > B) return quantised_tile_for<F, R, B + 1>(rows, blocks);
  return quantised_tile<F, R, B>;
}

// As `panels` of product.h: blocks of outputs, handed to `done(row, rows, block, blocks, sums, stride)` part by part. `each(f)` calls
// f(first, last, end) for ranges of blocks one after the other; rows are quantised once for all of them.
template <class Each, class Done>
static void quantised_panels(int32_t format, const bf16* x, int64_t x_stride, int64_t rows, const void* weight, int64_t inputs, Each each,
                             bool even, float* sums, Done done) {
  const Layout& of = LAYOUTS[format];
  QuantisedTile (*tile_for)(int64_t, int64_t) = nullptr;
  bool wide = false, scaled = false;
  int64_t pieces = 1;
  int32_t offset = 0;
  with_values(of, [&](auto which) {
    using F = decltype(which);
    tile_for = quantised_tile_for<F>, wide = sizeof(typename F::Value) > 1, pieces = F::PIECES, scaled = F::SCALED_TOTALS;
    if (!F::ADDS) offset = of.offset - (F::WIDE ? ABOVE : 0);
  });
  static thread_local QuantisedRows taken;
  static thread_local std::vector<Scale> scales;  // of a panel, where several parts need them
  const int64_t stride = block_bytes(format, inputs), most_rows = QuantisedRows::rows_at_once(inputs);
  for (int64_t begin = 0; begin < rows; begin += most_rows) {
    const Parts parts(std::min(most_rows, rows - begin), MOST_QUANTISED);
    taken.resize(parts.rows, inputs, wide, pieces, offset, scaled);
    for (int64_t part = 0; part < parts.count; ++part)
      taken.take(x + begin * x_stride, x_stride, parts.begin(part), parts.begin(part + 1) - parts.begin(part), inputs);
    const auto tile = [&](int64_t low, int64_t count, const char* block, int64_t blocks, float* to, int64_t to_stride, const char* ahead,
                          int64_t lines) {
      const uint8_t* w = reinterpret_cast<const uint8_t*>(block);
      Scale* ready = nullptr;
      if (parts.count > 1 && of.scales != OUTPUT) {
        const int64_t groups = taken.groups, place = (to - sums) / 16 * groups;
        if (int64_t(scales.size()) < place + blocks * groups) scales.resize(size_t(place + blocks * groups));
        ready = scales.data() + place;
        if (low == 0) scales_of(of.scales, w + groups * of.bits * 64, stride, groups, 0, groups, blocks, ready, groups);
      }
      tile_for(count, blocks)(of, taken, low, w, stride, ready, to, to_stride, reinterpret_cast<const uint8_t*>(ahead), lines);
    };
    const auto made = [&](int64_t low, int64_t count, int64_t block, int64_t blocks, const float* from, int64_t from_stride) {
      done(begin + low, count, block, blocks, from, from_stride);
    };
    walk_panels(parts, WIDEST_QUANTISED, weight, stride, each, even, sums, tile, made);
  }
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
  if (is_float8(LAYOUTS[format].scales)) float8_panels(format, x, x_stride, rows, weight, inputs, each, even, sums, done);
  else if (format != BFLOAT16) quantised_panels(format, x, x_stride, rows, weight, inputs, each, even, sums, done);
  else panels(x, x_stride, rows, static_cast<const bf16*>(weight), inputs, each, even, sums, done);
}

}  // namespace qb
