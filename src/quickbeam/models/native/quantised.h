// Products of bfloat16 rows with weights of few bits (`formats.h`), which are read once.
//
// A row is quantised by itself, each group of 32 inputs to whole numbers of -127 to 127 with a scale of its own. Where eight groups of weights
// share a scale, eight groups of the row do: a small group's numbers are then finer by a power of two, by which its sums are moved. Groups' sums
// are whole numbers; scaled, they are added in float32, first group to last, by the same few operations everywhere. So a row's bits depend
// neither on the other rows, nor on threads, nor on the instruction set:
// `tests/quantised.py` has the same in PyTorch.
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

// How the rows of a product are quantised. `wide`: values are kept as WholeValue, else in 8 bits. `pieces`: of a group, which are summed apart.
// `offset`: what all weights are above the numbers that they stand for. `scaled`: totals are taken times scales. `span`: groups that share a
// scale; of eight, totals are kept as whole numbers of TOTAL_STEPs.
struct RowKind {
  bool wide, scaled;
  int64_t pieces, span;
  int32_t offset;
};

// Quantised rows, kept by each thread for itself: parts of a few rows that are worked on together, in each group by group, row beside row.
class QuantisedRows {
 public:
  int64_t groups = 0;

  static int64_t rows_at_once(int64_t inputs, const RowKind& kind) {
    return std::max<int64_t>(16, MOST / (groups_of(inputs) * GROUP * (kind.wide ? int64_t(sizeof(WholeValue)) : 1)));
  }

  void resize(int64_t rows, int64_t inputs, const RowKind& kind) {
    groups = groups_of(inputs), kind_ = kind;
    const size_t all = size_t(rows * groups);
    values_.resize(all * size_t(GROUP)), scales_.resize(all), totals_.resize(all), starts_.resize(all * size_t(kind.pieces));
    if (kind.span > 1) whole_totals_.resize(all * size_t(kind.pieces)), finer_.resize(all);
  }

  // A part: rows [first, first + count).
  void take(const bf16* x, int64_t stride, int64_t first, int64_t count, int64_t inputs) {
    const int64_t span = kind_.span * GROUP;
    for (int64_t r = 0; r < count; ++r)
      for (int64_t i = 0; i < inputs; i += span) {
        const bf16* from = x + (first + r) * stride + i;
        bf16 part[SUPER_GROUPS * GROUP] = {};
        if (i + span > inputs) {
          std::memcpy(part, from, size_t(inputs - i) * 2);
          from = part;
        }
        quantise(from, first * groups, i / GROUP, count, r);
      }
  }

  // From row `row` on, which is the first of a part: [groups][rows][32] values, [groups / span][rows] scales, [groups][rows] sums of values or
  // [groups / span][rows][span][pieces] whole ones, [groups][rows] powers of two by which numbers are finer than the scale says, [groups][rows][pieces]
  // numbers that sums of products start from.
  template <class Value>
  const Value* values(int64_t row) const {
    return reinterpret_cast<const Value*>(values_.data()) + row * groups * GROUP;
  }
  const float* scales(int64_t row) const { return scales_.data() + row * groups / kind_.span; }
  const float* totals(int64_t row) const { return totals_.data() + row * groups; }
  const int16_t* whole_totals(int64_t row) const { return whole_totals_.data() + row * groups * kind_.pieces; }
  const int32_t* finer(int64_t row) const { return finer_.data() + row * groups; }
  const int32_t* starts(int64_t row) const { return starts_.data() + row * groups * kind_.pieces; }

 private:
  static constexpr int64_t MOST = 1 << 19;  // bytes that a part of the rows may take, about: they stay in the cache meanwhile
  std::vector<int16_t> values_, whole_totals_;
  std::vector<float> scales_, totals_;
  std::vector<int32_t> starts_, finer_;
  RowKind kind_ = {};

  // The groups that share a scale, of which the first is group g of row r of `rows`, whose first number lies behind `begin` groups. What is not
  // finite makes the scale NaN, and so the whole row of results.
  void quantise(const bf16* x, int64_t begin, int64_t g, int64_t rows, int64_t r) {
    const int64_t span = kind_.span;
    float sizes[SUPER_GROUPS], largest = 0.0f;  // of groups
    bool finite = true;
    for (int64_t i = 0; i < span; ++i) {
      const Lanes size = size_of(load(x + i * GROUP)), other = size_of(load(x + i * GROUP + 16));
      finite = finite && !any_above(size, FLT_MAX) && !any_above(other, FLT_MAX);
      sizes[i] = highest(greatest(size, other)), largest = std::max(largest, sizes[i]);
    }
    const bool used = finite && largest >= LEAST;
    const float scale = !finite ? NAN : used ? largest / 127.0f : 0.0f;
    const int64_t shared = (begin + g * rows) / span + r;
    scales_[size_t(shared)] = span > 1 ? scale / (1 << FINEST) : scale;
    for (int64_t i = 0; i < span; ++i, x += GROUP) {
      int32_t finer = 0;
      while (span > 1 && finer < FINEST && sizes[i] * float(2 << finer) <= largest) ++finer;
      const Lanes by = all(127.0f / largest * float(1 << finer));
      const Lanes a = used ? round_even(mul(load(x), by)) : zero(), b = used ? round_even(mul(load(x + 16), by)) : zero();
      const float halves[2] = {total(a), total(b)}, both = halves[0] + halves[1];
      const int64_t at = begin + (g + i) * rows + r;
      if (span > 1) finer_[size_t(at)] = finer;
      else totals_[size_t(at)] = kind_.scaled ? scale * both : both;
      for (int64_t piece = 0; piece < kind_.pieces; ++piece) {
        const float sum = kind_.pieces == 1 ? both : halves[piece], raised = sum * float(1 << (FINEST - finer));
        starts_[size_t(at * kind_.pieces + piece)] = -kind_.offset * int32_t(sum);
        if (span > 1) whole_totals_[size_t((shared * span + i) * kind_.pieces + piece)] = int16_t(std::nearbyint(raised / TOTAL_STEP));
      }
      if (kind_.wide) arrange(a, b, reinterpret_cast<WholeValue*>(values_.data()) + at * GROUP);
      else arrange(a, b, reinterpret_cast<int8_t*>(values_.data()) + at * GROUP);
    }
  }
};

// A part of the rows from `row` on x a block of 16 outputs to y. `ready`: scales, [groups / 8], null where they are still to be made. `ahead`: what
// will be read later, of which `lines` of 64 bytes are fetched meanwhile.
template <class F, int R>
static void quantised_tile(const Layout& of, const QuantisedRows& x, int64_t row, const uint8_t* w, const Scales8* ready, float* y, int64_t y_stride,
                           const uint8_t* ahead, int64_t lines) {
  const int64_t groups = x.groups;
  const int32_t *starts = x.starts(row), *finer = x.finer(row);
  const float *scales = x.scales(row), *totals = x.totals(row);
  const auto* values = x.values<typename F::Value>(row);
  Scales8 own;
  Lanes f[R];
  for (Lanes& sum : f) sum = zero();
  for (int64_t first = 0; first < groups; first += SUPER_GROUPS) {
    const int64_t end = F::BY_EIGHT ? first + SUPER_GROUPS : std::min(groups, first + SUPER_GROUPS), count = end - first;
    const uint8_t* here = w + group_place(of, first);
    if (F::SCALED && !ready) scales_of(of, here, count, &own);
    const Scales8& scale = ready ? ready[first / SUPER_GROUPS] : own;
    const int64_t last_line = lines * end / groups;
    int64_t line = lines * first / groups, step = (last_line - line + count - 1) / count;
    Lanes eight[R];
    for (int r = 0; r < R; ++r) eight[r] = F::BY_EIGHT ? zero() : f[r];
    for (int64_t g = first; g < end; ++g) {
      for (const int64_t until = std::min(last_line, line + step); line < until; ++line) QB_PREFETCH(ahead + line * 64);
      typename F::Sums s[R][F::PIECES];
      for (int r = 0; r < R; ++r)
        for (int piece = 0; piece < F::PIECES; ++piece) start(s[r][piece], F::ADDS ? 0 : starts[(g * R + r) * F::PIECES + piece]);
      F::template add<R>(s, values + g * R * GROUP, here + (g - first) * F::GROUP_BYTES, of.table);
      for (int r = 0; r < R; ++r) {
        if constexpr (F::BY_EIGHT) eight[r] = F::plus_group(eight[r], s[r], scale.of[g - first], finer[g * R + r]);
        else eight[r] = F::plus(eight[r], s[r], scale.of[g - first], scales[g * R + r], totals[g * R + r]);
      }
    }
    QB_UNROLL for (int r = 0; r < R; ++r) {
      const int64_t shared = first / SUPER_GROUPS * R + r;
      if constexpr (!F::BY_EIGHT) f[r] = eight[r];
      else f[r] = F::plus_eight(f[r], eight[r], scale, scales[shared], x.whole_totals(row) + shared * SUPER_GROUPS * F::PIECES);
    }
  }
  const float* by = reinterpret_cast<const float*>(w + group_place(of, groups));
  for (int r = 0; r < R; ++r) store(y + r * y_stride, of.scales == OUTPUT ? mul(f[r], load(by)) : f[r]);
}

using QuantisedTile = void (*)(const Layout&, const QuantisedRows&, int64_t, const uint8_t*, const Scales8*, float*, int64_t, const uint8_t*,
                               int64_t);

// What fits the registers. Blocks go one after the other: memory gives one stream faster than two.
#if defined(QB_VNNI) && defined(QB_ZMM)
constexpr int MOST_QUANTISED = 8;
#else
constexpr int MOST_QUANTISED = 5;
#endif
constexpr int WIDEST_QUANTISED[] = {0, 1, 1, 1, 1, 1, 1, 1, 1};  // by rows

template <class F, int R = 1>
static QuantisedTile quantised_tile_for(int64_t rows) {
  if constexpr (R < MOST_QUANTISED)
    if (rows > R) return quantised_tile_for<F, R + 1>(rows);
  return quantised_tile<F, R>;
}

// As `panels` of product.h: blocks of outputs, handed to `done(row, rows, block, blocks, sums, stride)` part by part. `each(f)` calls
// f(first, last, end) for ranges of blocks one after the other; rows are quantised once for all of them.
template <class Each, class Done>
static void quantised_panels(int32_t format, const bf16* x, int64_t x_stride, int64_t rows, const void* weight, int64_t inputs, Each each,
                             bool even, float* sums, Done done) {
  const Layout& of = LAYOUTS[format];
  QuantisedTile (*tile_for)(int64_t) = nullptr;
  RowKind kind = {};
  with_values(of, [&](auto which) {
    using F = decltype(which);
    tile_for = quantised_tile_for<F>;
    const int32_t offset = F::ADDS ? 0 : of.offset - (F::WIDE ? ABOVE : 0);
    kind = {sizeof(typename F::Value) > 1, F::SCALED_TOTALS, F::PIECES, F::BY_EIGHT ? SUPER_GROUPS : 1, offset};
  });
  static thread_local QuantisedRows taken;
  static thread_local std::vector<Scales8> scales;  // of a panel, where several parts need them
  const int64_t stride = block_bytes(format, inputs);
  const Parts turns(rows, QuantisedRows::rows_at_once(inputs, kind));
  for (int64_t turn = 0; turn < turns.count; ++turn) {
    const int64_t begin = turns.begin(turn);
    const Parts parts(turns.begin(turn + 1) - begin, MOST_QUANTISED);
    taken.resize(parts.rows, inputs, kind);
    for (int64_t part = 0; part < parts.count; ++part)
      taken.take(x + begin * x_stride, x_stride, parts.begin(part), parts.begin(part + 1) - parts.begin(part), inputs);
    const bool alone = parts.count == 1;
    const auto tile = [&](int64_t low, int64_t count, const char* block, int64_t, float* to, int64_t to_stride, const char* ahead, int64_t lines) {
      const uint8_t* w = reinterpret_cast<const uint8_t*>(block);
      Scales8* ready = nullptr;
      if (!alone && of.scales != OUTPUT) {
        const int64_t each_block = (taken.groups + SUPER_GROUPS - 1) / SUPER_GROUPS, place = (to - sums) / 16 * each_block;
        if (int64_t(scales.size()) < place + each_block) scales.resize(size_t(place + each_block));
        ready = scales.data() + place;
        if (low == 0) scales_of(of, w, taken.groups, ready);
      }
      tile_for(count)(of, taken, low, w, ready, to, to_stride, reinterpret_cast<const uint8_t*>(ahead), lines);
    };
    const auto made = [&](int64_t low, int64_t count, int64_t block, int64_t blocks, const float* from, int64_t from_stride) {
      done(begin + low, count, block, blocks, from, from_stride);
    };
    walk_panels(parts, WIDEST_QUANTISED, weight, stride, each, even, sums, tile, made, alone ? AHEAD : 0);
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
