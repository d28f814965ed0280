// Feed-forwards of experts: a router chooses a few of many small feed-forwards for each row.
//
// Rows are grouped by expert, so a pass reads each chosen expert once. A row's result is a sum over its experts by rising number, from zero on,
// each times its weight; what a product gives for a row doesn't depend on the other rows (product.h). So neither do the row's bits, whatever
// the others chose.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "activation.h"
#include "quantised.h"

namespace qb {

// What the weights of the chosen are, before they are renormalised: softmax of all scores, sigmoid of each, softmax of those chosen; MIXER is
// Phi-MoE's rule for two, which leaves out of a softmax what is far below the largest.
enum Scores : int32_t { SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN, MIXER };

struct Expert {
  const void *up, *down;
  const float *up_bias, *down_bias;
};

struct Experts {
  const Expert* expert;     // `count` to choose from, then that of all rows if `shared`
  const float* correction;  // [count], added to the scores for the choice alone; null for none
  const float* scale;       // [count], of the weights in the end; null for none
  int64_t count, top, inner;
  int64_t shared;  // numbers inside the one of all rows, 0 for none
  int64_t groups, top_groups, best_of_group;  // only experts of the groups whose best ones have the largest sums are chosen
  int32_t scores, renormalised;
  int32_t gated;              // the last score's sigmoid is the weight of the one of all rows, else 1
  int32_t down_format;        // of the weights that come last
  int32_t shared_up, shared_down;  // formats of the one of all rows
  float plus, least, factor;  // renormalised: divided by max(sum + plus, least); in the end, times `factor`
  float jitter;               // of MIXER
  int64_t read;               // of the last pass: how many of `count` any row chose
};

struct Route {
  int32_t expert;
  float weight;
};

// Chooses a row's experts by its scores.
class Router {
 public:
  explicit Router(const Experts& of) : of_(of), weight_(padded()), choice_(padded()) {}

  // logits: [count]; to: [top] by rising expert.
  void route(const float* logits, Route* to) {
    std::fill(std::copy(logits, logits + of_.count, weight_.begin()), weight_.end(), LOWEST);
    if (of_.scores == MIXER) mix(to);
    else {
      score();
      std::copy(weight_.begin(), weight_.end(), choice_.begin());
      if (of_.correction)
        for (int64_t i = 0; i < of_.count; ++i) choice_[size_t(i)] += of_.correction[i];
      if (of_.groups > 1) leave_groups();
      for (int64_t k = 0; k < of_.top; ++k) to[k] = take();
      if (of_.scores == SOFTMAX_OF_CHOSEN) soften(to);
    }
    float total = 0;
    for (int64_t k = 0; k < of_.top; ++k) total += to[k].weight;
    const float by = of_.renormalised ? std::max(total + of_.plus, of_.least) : 1.0f;
    for (int64_t k = 0; k < of_.top; ++k) {
      to[k].weight = to[k].weight / by * of_.factor;
      if (of_.scale) to[k].weight *= of_.scale[to[k].expert];
    }
    std::sort(to, to + of_.top, [](const Route& a, const Route& b) { return a.expert < b.expert; });
  }

 private:
  static constexpr float LOWEST = -std::numeric_limits<float>::infinity();
  const Experts& of_;
  std::vector<float> weight_, choice_;  // whole sixteens

  std::vector<float> padded() const { return std::vector<float>(size_t((of_.count + 15) / 16 * 16), LOWEST); }

  void score() {
    if (of_.scores == SOFTMAX_OF_CHOSEN) return;
    if (of_.scores == SIGMOID) {
      for (size_t i = 0; i < weight_.size(); i += 16)
        store(&weight_[i], div(all(1.0f), add(all(1.0f), exponential(sub(zero(), load(&weight_[i]))))));
      return;
    }
    const float top = *std::max_element(weight_.begin(), weight_.end());
    Lanes total = zero();
    for (size_t i = 0; i < weight_.size(); i += 16) {
      const Lanes e = exponential(sub(load(&weight_[i]), all(top)));
      store(&weight_[i], e);
      total = add(total, e);
    }
    const Lanes whole = all(sum(total));
    for (size_t i = 0; i < weight_.size(); i += 16) store(&weight_[i], div(load(&weight_[i]), whole));
  }

  // The expert with the largest number that is left, the first of equal ones; then it is no longer left.
  Route take() {
    int64_t best = 0;
    while (best + 1 < of_.count && choice_[size_t(best)] == LOWEST) ++best;
    for (int64_t i = best + 1; i < of_.count; ++i)
      if (choice_[size_t(i)] > choice_[size_t(best)]) best = i;
    choice_[size_t(best)] = LOWEST;
    return {int32_t(best), weight_[size_t(best)]};
  }

  void leave_groups() {
    const int64_t size = of_.count / of_.groups;
    std::vector<float> worth(size_t(of_.groups), 0.0f), part(static_cast<size_t>(size));
    for (int64_t g = 0; g < of_.groups; ++g) {
      std::copy_n(choice_.begin() + g * size, size, part.begin());
      std::partial_sort(part.begin(), part.begin() + of_.best_of_group, part.end(), std::greater<float>());
      for (int64_t i = 0; i < of_.best_of_group; ++i) worth[size_t(g)] += part[size_t(i)];
    }
    for (int64_t left = of_.groups; left > of_.top_groups; --left) {  // the smallest goes, the last of equal ones
      int64_t worst = -1;
      for (int64_t g = 0; g < of_.groups; ++g)
        if (worth[size_t(g)] != INFINITY && (worst < 0 || worth[size_t(g)] <= worth[size_t(worst)])) worst = g;
      if (worst < 0) return;
      worth[size_t(worst)] = INFINITY;
      std::fill_n(choice_.begin() + worst * size, size, LOWEST);
    }
  }

  void soften(Route* to) const {
    float top = to[0].weight, total = 0;
    for (int64_t k = 0; k < of_.top; ++k) top = std::max(top, to[k].weight);
    for (int64_t k = 0; k < of_.top; ++k) total += to[k].weight = std::exp(to[k].weight - top);
    for (int64_t k = 0; k < of_.top; ++k) to[k].weight /= total;
  }

  void mix(Route* to) {
    choice_ = weight_;
    for (int64_t k = 0; k < of_.top; ++k) {
      const std::vector<float> left = choice_;
      to[k] = take();
      const float top = to[k].weight;
      float total = 0;
      for (int64_t i = 0; i < of_.count; ++i)
        if (!((top - weight_[size_t(i)]) / std::max(std::fabs(weight_[size_t(i)]), top) > 2 * of_.jitter))
          total += std::exp(left[size_t(i)] - top);
      to[k].weight = 1 / total;
    }
  }
};

// The rows of each expert one after the other, those of the one of all rows behind. Each thread makes the same for itself.
struct Grouped {
  std::vector<int64_t> begin, row;  // [experts + 1], [slots]
  std::vector<float> weight;        // [slots]

  Grouped(const Experts& of, const Route* routes, int64_t rows, const float* scores, int64_t scores_stride) {
    const int64_t routed = rows * of.top, slots = routed + (of.shared ? rows : 0);
    begin.assign(size_t(of.count + 2), 0), row.resize(size_t(slots)), weight.resize(size_t(slots));
    for (int64_t i = 0; i < routed; ++i) ++begin[size_t(routes[i].expert) + 1];
    for (int64_t e = 0; e < of.count; ++e) begin[size_t(e) + 1] += begin[size_t(e)];
    std::vector<int64_t> next(begin.begin(), begin.end());
    for (int64_t i = 0; i < routed; ++i) {
      const size_t slot = size_t(next[size_t(routes[i].expert)]++);
      row[slot] = i / of.top, weight[slot] = routes[i].weight;
    }
    begin[size_t(of.count) + 1] = slots;
    for (int64_t r = 0; r < slots - routed; ++r) {
      row[size_t(routed + r)] = r;
      weight[size_t(routed + r)] = of.gated ? 1 / (1 + std::exp(-scores[r * scores_stride + of.count])) : 1.0f;
    }
  }

  int64_t read(int64_t count) const {  // experts that any row chose
    int64_t chosen = 0;
    for (int64_t e = 0; e < count; ++e) chosen += begin[size_t(e) + 1] > begin[size_t(e)];
    return chosen;
  }
};

// Some experts of a feed-forward over the rows of a call, one after the other. T: numbers of `x` and `inner`.
template <class T>
struct ExpertPass {
  const Experts& of;
  int32_t format, activation;
  float limit, slope;
  const T* x;
  int64_t x_stride, rows, inputs, outputs;
  T* inner;       // [rows * top][of.inner], then [rows][of.shared]
  float* target;  // [rows][target_stride], to which the results are added
  int64_t target_stride;
  int64_t begin, end;  // of the experts that it runs

  int64_t wide(int64_t e) const { return e < of.count ? of.inner : of.shared; }
  int32_t up_format(int64_t e) const { return e < of.count ? format : of.shared_up; }
  int32_t down_format(int64_t e) const { return e < of.count ? of.down_format : of.shared_down; }
  T* inside(const Grouped& grouped, int64_t e) const {
    return e < of.count ? inner + grouped.begin[size_t(e)] * of.inner : inner + rows * of.top * of.inner;
  }

  // Gates and what they let through, of all experts' blocks. `share(n, work)` calls work(first, last, …) for this thread's pieces of [0, n).
  template <class Share>
  void up(const Grouped& grouped, const Share& share, float* sums) const {
    const auto cost = [&](int64_t e) { return 8 + grouped.begin[size_t(e) + 1] - grouped.begin[size_t(e)]; };  // of two blocks: reading, and rows
    const auto pairs = [&](int64_t e) { return grouped.begin[size_t(e) + 1] > grouped.begin[size_t(e)] ? (wide(e) + 15) / 16 : 0; };
    int64_t total = 0;
    for (int64_t e = begin; e < end; ++e) total += pairs(e) * cost(e);
    share(total, [&](int64_t low, int64_t high, int64_t) {
      for (int64_t e = begin, at = 0; e < end && at < high; at += pairs(e) * cost(e), ++e) {
        const auto place = [&](int64_t where) { return std::min((std::max<int64_t>(0, where - at) + cost(e) - 1) / cost(e), pairs(e)); };
        if (place(low) < place(high)) up_of(grouped, e, place(low), place(high), sums);
      }
    });
  }

  // Their products, weighted and added by rising expert.
  template <class Share>
  void down(const Grouped& grouped, const Share& share, float* sums) const {
    share((outputs + 15) / 16, [&](int64_t first, int64_t last, int64_t) { down_of(grouped, first, last, sums); });
  }

 private:
  void down_of(const Grouped& grouped, int64_t first, int64_t last, float* sums) const {
    for (int64_t e = begin; e < end; ++e) {
      const int64_t slot = grouped.begin[size_t(e)], n = grouped.begin[size_t(e) + 1] - slot;
      if (!n) continue;
      const float* bias = of.expert[e].down_bias;
      const auto done = [&](int64_t from, int64_t count, int64_t block, int64_t some, const float* y, int64_t stride) {
        for (int64_t r = from; r < from + count; ++r)
          for (int64_t b = 0; b < some; ++b) {
            const int64_t to = (block + b) * 16, width = std::min<int64_t>(16, outputs - to);
            Lanes made = load(y + (r - from) * stride + b * 16);
            if (bias) made = add(made, load_first(bias + to, width));
            float* p = target + grouped.row[size_t(slot + r)] * target_stride + to;
            store_first(p, add(load_first(p, width), mul(made, all(grouped.weight[size_t(slot + r)]))), width);
          }
      };
      any_panels(down_format(e), inside(grouped, e), wide(e), n, of.expert[e].down, wide(e), [&](auto panel) { panel(first, last, last); }, false, sums, done);
    }
  }

  void up_of(const Grouped& grouped, int64_t e, int64_t first, int64_t last, float* sums) const {
    const int64_t slot = grouped.begin[size_t(e)], n = grouped.begin[size_t(e) + 1] - slot, columns = wide(e);
    const float* bias = of.expert[e].up_bias;
    T* to = inside(grouped, e);
    const auto done = [&](int64_t from, int64_t count, int64_t block, int64_t some, const float* y, int64_t stride) {
      for (int64_t r = 0; r < count; ++r)
        for (int64_t b = 0; b < some; b += 2) {
          const int64_t column = (block + b) / 2 * 16, width = std::min<int64_t>(16, columns - column);
          const float* from_here = y + r * stride + b * 16;
          Lanes gate = load(from_here), rest = load(from_here + 16);
          if (bias) gate = add(gate, load(bias + (block + b) * 16)), rest = add(rest, load(bias + (block + b) * 16 + 16));
          put(to + (from + r) * columns + column, let_through(activation, gate, rest, limit, slope), width);
        }
    };
    int64_t stride = x_stride;
    const T* mine = together(grouped, slot, n, stride);
    any_panels(up_format(e), mine, stride, n, of.expert[e].up, inputs, [&](auto panel) { panel(2 * first, 2 * last, 2 * last); }, true, sums, done);
  }

  // An expert's rows one after the other, copied where they are not.
  const T* together(const Grouped& grouped, int64_t slot, int64_t n, int64_t& stride) const {
    const int64_t* row = grouped.row.data() + slot;
    if (row[n - 1] - row[0] == n - 1) return x + row[0] * x_stride;
    static thread_local std::vector<T> copied;
    if (int64_t(copied.size()) < n * inputs) copied.resize(size_t(n * inputs));
    for (int64_t r = 0; r < n; ++r) std::copy_n(x + row[r] * x_stride, inputs, copied.data() + r * inputs);
    stride = inputs;
    return copied.data();
  }

  static void put(float* p, Lanes y, int64_t width) { store_first(p, y, width); }
  static void put(bf16* p, Lanes y, int64_t width) {
    if (width == 16) return store(p, y);
    bf16 part[16];
    store(part, y);
    std::memcpy(p, part, size_t(width) * 2);
  }
};

}  // namespace qb
