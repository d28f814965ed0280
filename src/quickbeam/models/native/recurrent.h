// Layers with a state: what a row computes depends on the rows before it by a recurrence that goes from parent to child.
//
// A sequence has one state, that of its committed tokens, which a pass only reads. Behind them come the *nodes* of a draft tree, or of a text as
// a chain; a node's result is that of the path from the committed tokens to it, whatever else is in the pass. The pass keeps each node's inputs
// of the recurrence, so that a path of nodes can be folded into the state afterwards. Of a chain it writes the state behind the last node, too.
// All steps are in float32, one after the other in the path's order, by the same function wherever they are done: so the bits are the path's.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "activation.h"
#include "attention.h"

namespace qb {

enum RecurrenceKind : int64_t { CONVOLUTION, DELTA_RULE, STATE_SPACE };

// One recurrence of a layer. `state`, `input`: where its numbers begin in a sequence's state, and in a node's inputs.
struct Recurrence {
  int64_t kind, state, input, inputs;   // inputs: numbers of a node, of all recurrences
  // A convolution over the last `taps` tokens of each channel.
  int64_t channels, taps;
  int64_t column, gate, gate_out;       // columns of the source: what is convolved, a factor of it, and one of the result; -1 for none
  int64_t activated;                    // SiLU before the last factor
  // A matrix of each head, [value_dim / 16][key_dim][16]. `query`, `key`, `value`, `factors`: columns of the target.
  int64_t heads, key_heads, key_dim, value_dim, query, key, value, factors;
  int64_t kept, kept_count;             // columns of the target that are a node's inputs
  int64_t decay, rate;                  // columns of the source: of each head, what its decay and its rate (of the delta rule) are made of
  const float *weight, *bias;           // of a convolution: [taps][channels], the oldest token first; [channels] or null
  const float *slope, *shift, *skip;    // [heads]: of decays, and a factor of the value that is added to the result, or null
  float least, most, step_scale;        // of steps: after the shift, and before it
  int64_t width(int64_t dim) const { return (dim + 15) / 16; }
  int64_t units() const { return heads * width(value_dim); }  // of work: 16 columns of a head's matrix
  int64_t unit_at(int64_t unit) const { return state + unit * key_dim * 16; }
};

struct Nodes {  // those of one sequence in a pass
  const float* state;     // behind the committed tokens
  float* next;            // behind the last node, where the nodes are a chain; else null
  float* border;          // behind node `border_node` of a chain; null for none
  float* inputs;          // [nodes][inputs]; null where nothing but the whole chain is going to be committed
  const int64_t* parent;  // [nodes], -1: the committed tokens; null for a chain
  int64_t border_node, base, nodes;  // base: how many of them earlier passes have run
  int64_t above(int64_t node) const { return node < 0 ? node - 1 : parent ? parent[node] : node - 1; }  // -1, -2, ...: committed tokens
};

// y[c] = sum over the last `taps` tokens z of the path of weight[tap][c] * z[c], for channels of blocks [low, high) of 16, which one thread makes.
// The state: the last taps - 1 tokens' z, the oldest first. `put` takes a row, a column, how many, and the results.
template <class Put>
void convolve(const Recurrence& of, const Batch& batch, const float* source, int64_t stride, int64_t low, int64_t high, const Put& put) {
  struct Input {  // of a token: its numbers, and factors of them or null
    const float *x, *gate;
    Lanes at(int64_t c, int64_t n) const { return gate ? mul(load_first(x + c, n), load_first(gate + c, n)) : load_first(x + c, n); }
  };
  const int64_t past = of.taps - 1, end = std::min(high * 16, of.channels);
  std::vector<Input> last(size_t(of.taps));
  for (int64_t s = 0; s < batch.spans; ++s) {
    const Span& span = batch.span[s];
    const Nodes& nodes = *static_cast<const Nodes*>(span.nodes);
    const auto row = [&](int64_t node) { return source + (span.row + node - nodes.base) * stride; };
    const auto input = [&](int64_t node) -> Input {
      if (node < 0) return {nodes.state + of.state + (past + node) * of.channels, nullptr};
      if (node < nodes.base) return {nodes.inputs + node * of.inputs + of.input, nullptr};
      return {row(node) + of.column, of.gate < 0 ? nullptr : row(node) + of.gate};
    };
    const auto find = [&](int64_t node) {  // the inputs of the last tokens up to a node
      for (int64_t k = past; k >= 0; --k, node = nodes.above(node)) last[size_t(k)] = input(node);
    };
    const auto keep = [&](float* state, int64_t node) {
      find(node);
      for (int64_t k = 0; k < past; ++k)
        for (int64_t c = low * 16; c < end; c += 16) {
          const int64_t n = std::min<int64_t>(16, end - c);
          store_first(state + of.state + k * of.channels + c, last[size_t(k + 1)].at(c, n), n);
        }
    };
    for (int64_t node = nodes.base; node < nodes.nodes; ++node) {
      find(node);
      for (int64_t c = low * 16; c < end; c += 16) {
        const int64_t n = std::min<int64_t>(16, end - c);
        Lanes y = of.bias ? load_first(of.bias + c, n) : zero(), z = y;
        for (int64_t k = 0; k <= past; ++k) {
          z = last[size_t(k)].at(c, n);
          y = fma(load_first(of.weight + k * of.channels + c, n), z, y);
        }
        if (nodes.inputs) store_first(nodes.inputs + node * of.inputs + of.input + c, z, n);
        if (of.activated) y = activate(SILU, y);
        if (of.gate_out >= 0) y = mul(y, load_first(row(node) + of.gate_out + c, n));
        put(span.row + node - nodes.base, c, n, y);
      }
    }
    if (nodes.border) keep(nodes.border, nodes.border_node);
    if (nodes.next) keep(nodes.next, nodes.nodes - 1);
  }
}

// The state behind `count` nodes of a path: `next` from `state` and the nodes' inputs.
inline void fold_convolution(const Recurrence& of, const float* state, const float* inputs, const int64_t* path, int64_t count, float* next) {
  const int64_t past = of.taps - 1;
  for (int64_t k = 0; k < past; ++k) {
    const int64_t at = count - past + k;  // of the path; below 0 a token of the state
    const float* from = at >= 0 ? inputs + path[at] * of.inputs + of.input : state + of.state + (past + at) * of.channels;
    std::memcpy(next + of.state + k * of.channels, from, size_t(of.channels) * 4);
  }
}

// --- matrices of heads ---

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// x / sqrt(sum of squares + 1e-6) * scale
inline void to_length(float* x, int64_t n, float scale) {
  Lanes squares = zero();
  for (int64_t i = 0; i < n; i += 16) {
    const Lanes some = load_first(x + i, std::min<int64_t>(16, n - i));
    squares = fma(some, some, squares);
  }
  const float factor = scale / std::sqrt(sum(squares) + 1e-6f);
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

// What one row brings to the recurrence, in the target: behind queries, keys and values the heads' decays, and then their rates (of the delta
// rule) or steps. With the delta rule, queries and keys get length 1, and queries are scaled as attention's are.
inline void prepare_row(const Recurrence& of, const float* source, float* row) {
  for (int64_t h = 0; h < of.heads; ++h) {
    const float step = std::min(std::max(softplus(source[of.decay + h] * of.step_scale + of.shift[h]), of.least), of.most);
    const float decay = std::exp(of.slope[h] * step);
    row[of.factors + h] = decay < 1e-20f ? 0.0f : decay;  // less than rounding is left, and products with it would be denormal, which are slow
    row[of.factors + of.heads + h] = of.kind == DELTA_RULE ? 1.0f / (1.0f + std::exp(-source[of.rate + h])) : step;
  }
  if (of.kind != DELTA_RULE) return;
  for (int64_t h = 0; h < of.key_heads; ++h) {
    to_length(row + of.query + h * of.key_dim, of.key_dim, 1.0f / std::sqrt(float(of.key_dim)));
    to_length(row + of.key + h * of.key_dim, of.key_dim, 1.0f);
  }
}

// 16 columns of a head's matrix S [key_dim][16] behind one more token: S * decay + k u. u is (v - (S * decay)' k) * rate by the delta rule, else
// v * step. Gives S' q where there is a query. Sums over keys are in four parts, of keys i % 4.
inline Lanes matrix_step(bool delta, int64_t n, const float* from, float* to, const float* k, const float* q, Lanes v, float decay, float factor) {
  const Lanes d = all(decay);
  Lanes part[4] = {zero(), zero(), zero(), zero()};
  const auto total = [&] { return add(add(part[0], part[1]), add(part[2], part[3])); };
  if (delta) {
    for (int64_t i = 0; i < n; i += 4)
      for (int64_t j = 0; j < 4; ++j) part[j] = fma(all(k[i + j]), mul(load(from + (i + j) * 16), d), part[j]);
    v = sub(v, total());
    for (Lanes& one : part) one = zero();
  }
  const Lanes u = mul(v, all(factor));
  for (int64_t i = 0; i < n; i += 4)
    for (int64_t j = 0; j < 4; ++j) {
      const Lanes s = fma(all(k[i + j]), u, mul(load(from + (i + j) * 16), d));
      store(to + (i + j) * 16, s);
      if (q) part[j] = fma(all(q[i + j]), s, part[j]);
    }
  return total();
}

// A token's step of one unit. `kept`: its inputs, `row`: those of the target or null where no result is wanted; the result takes the value's place.
inline void unit_step(const Recurrence& of, int64_t unit, const float* from, float* to, const float* kept, float* row) {
  const int64_t blocks = of.width(of.value_dim), h = unit / blocks, c = unit % blocks * 16, n = std::min<int64_t>(16, of.value_dim - c);
  const int64_t group = h / (of.heads / of.key_heads) * of.key_dim;
  const float *inputs = kept - of.kept, *factor = inputs + of.factors + h;
  const Lanes v = load_first(inputs + of.value + h * of.value_dim + c, n);
  const float* q = row ? row + of.query + group : nullptr;
  Lanes y = matrix_step(of.kind == DELTA_RULE, of.key_dim, from, to, inputs + of.key + group, q, v, factor[0], factor[of.heads]);
  if (!row) return;
  if (of.skip) y = fma(v, all(of.skip[h]), y);
  store_first(row + of.value + h * of.value_dim + c, y, n);
}

// The order in which a tree's nodes are run so that only states on one path are kept: depth first. `from`, `to`: places of the parent's state and of
// the node's, -1 the committed tokens'; the last child takes its parent's place. Nodes of earlier passes are run again where new ones are below.
struct Walk {
  struct Step {
    int64_t node, from, to;
  };
  std::vector<Step> steps;
  int64_t places = 0;

  explicit Walk(const Nodes& nodes) {
    std::vector<int64_t> last(size_t(nodes.nodes), -1), place(last);
    std::vector<std::vector<int64_t>> below(size_t(nodes.nodes));
    std::vector<char> wanted(size_t(nodes.nodes), 0);
    for (int64_t node = nodes.nodes - 1; node >= 0; --node) {
      wanted[size_t(node)] |= node >= nodes.base;
      if (wanted[size_t(node)] && nodes.above(node) >= 0) wanted[size_t(nodes.above(node))] = 1;
    }
    std::vector<int64_t> open;
    for (int64_t node = nodes.nodes - 1; node >= 0; --node) {  // the last child is opened first and so comes last
      if (!wanted[size_t(node)]) continue;
      if (nodes.above(node) < 0) open.insert(open.begin(), node);
      else below[size_t(nodes.above(node))].push_back(node);
    }
    while (!open.empty()) {
      const int64_t node = open.back(), parent = nodes.above(node);
      open.pop_back();
      const int64_t from = parent < 0 ? -1 : place[size_t(parent)];
      const bool final = parent >= 0 && below[size_t(parent)].front() == node;
      const int64_t to = final ? from : from + 1;
      place[size_t(node)] = to;
      places = std::max(places, to + 1);
      steps.push_back({node, from, to});
      for (int64_t child : below[size_t(node)]) open.push_back(child);
    }
  }
};

// One unit over the nodes of one sequence, whose rows of the target begin at `rows`.
inline void run_unit(const Recurrence& of, int64_t unit, const Nodes& nodes, const Walk* walk, float* rows, int64_t stride, std::vector<float>& places) {
  const int64_t size = of.key_dim * 16, at = of.unit_at(unit);
  const auto step = [&](int64_t node, const float* from, float* to) {
    float* row = node < nodes.base ? nullptr : rows + (node - nodes.base) * stride;
    unit_step(of, unit, from, to, row ? row + of.kept : nodes.inputs + node * of.inputs + of.input, row);
  };
  if (walk) {
    places.resize(std::max(places.size(), size_t(walk->places * size)));
    for (const Walk::Step& one : walk->steps)
      step(one.node, one.from < 0 ? nodes.state + at : &places[size_t(one.from * size)], &places[size_t(one.to * size)]);
    return;
  }
  for (int64_t node = 0; node < nodes.nodes; ++node) {
    step(node, (node ? nodes.next : nodes.state) + at, nodes.next + at);
    if (nodes.border && node == nodes.border_node) std::memcpy(nodes.border + at, nodes.next + at, size_t(size) * 4);
  }
}

inline void fold_matrices(const Recurrence& of, const float* state, const float* inputs, const int64_t* path, int64_t count, float* next) {
  for (int64_t unit = 0; unit < of.units(); ++unit)
    for (int64_t i = 0; i < count; ++i) {
      const float* kept = inputs + path[i] * of.inputs + of.input;
      unit_step(of, unit, (i ? next : state) + of.unit_at(unit), next + of.unit_at(unit), kept, nullptr);
    }
}

inline void fold(const Recurrence& of, const float* state, const float* inputs, const int64_t* path, int64_t count, float* next) {
  if (of.kind == CONVOLUTION) fold_convolution(of, state, inputs, path, count, next);
  else fold_matrices(of, state, inputs, path, count, next);
}

}  // namespace qb
