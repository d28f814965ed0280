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
  // A matrix of each head, [value_dim / 16][key_dim][16]. `alike`: how many heads in a row have the same key. `query`, `key`, `value`, `factors`: columns of the target.
  int64_t heads, key_heads, alike, key_dim, value_dim, query, key, value, factors;
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
  float* boundary;          // behind node `boundary_node` of a chain; null for none
  float* inputs;          // [nodes][inputs]; null where nothing but the whole chain is going to be committed
  const int64_t* parent;  // [nodes], -1: the committed tokens; null for a chain
  int64_t boundary_node, base, nodes;  // base: how many of them earlier passes have run
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
      const float* next = node + 1 < nodes.nodes ? row(node + 1) + of.column : nullptr;
      for (int64_t c = low * 16; c < end; c += 16) {
        const int64_t n = std::min<int64_t>(16, end - c);
        if (next) QB_PREFETCH(next + c);
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
    if (nodes.boundary) keep(nodes.boundary, nodes.boundary_node);
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

// What a unit is: 16 columns of a head's matrix.
struct Columns {
  int64_t head, value, key, decay, left;  // where its values, keys (and queries) and factors begin; columns of the head from here on

  Columns(const Recurrence& of, int64_t unit) : head(unit / of.width(of.value_dim)) {
    const int64_t first = unit % of.width(of.value_dim) * 16;
    value = of.value + head * of.value_dim + first, left = of.value_dim - first;
    key = head / of.alike % of.key_heads * of.key_dim, decay = of.factors + head;
  }
  int64_t count(int64_t unit = 0) const { return std::min<int64_t>(16, left - unit * 16); }  // of so many units further
};

// A token's step of one unit. `kept`: its inputs, `row`: those of the target or null where no result is wanted; the result takes the value's place.
inline void unit_step(const Recurrence& of, int64_t unit, const float* from, float* to, const float* kept, float* row) {
  const Columns at(of, unit);
  const float* inputs = kept - of.kept;
  const Lanes v = load_first(inputs + at.value, at.count());
  const float* q = row ? row + of.query + at.key : nullptr;
  const float decay = inputs[at.decay], factor = inputs[at.decay + of.heads];
  Lanes y = matrix_step(of.kind == DELTA_RULE, of.key_dim, from, to, inputs + of.key + at.key, q, v, decay, factor);
  if (!row) return;
  if (of.skip) y = fma(v, all(of.skip[at.head]), y);
  store_first(row + at.value, y, at.count());
}

// --- chains ---
//
// `count` tokens one behind the other, their rows of the target `stride` apart, for B units of a head side by side: what `unit_step` computes, in
// its order, with fewer loads and stores. `from` and `to` as in `matrix_step`, of the first unit; `to` may be `from`.

#ifdef QB_ZMM
constexpr int64_t LONG = 4;  // tokens that are worth it
#else
constexpr int64_t LONG = INT64_MAX;  // there are too few registers
#endif

template <int B>
struct Sums {  // of B units, in four parts each
  Lanes part[B][4];
  Sums() {
    for (auto& one : part)
      for (Lanes& lanes : one) lanes = zero();
  }
  void put(const Recurrence& of, const Columns& at, float* row) const {
    for (int b = 0; b < B; ++b) {
      float* to = row + at.value + b * 16;
      Lanes y = total(b);
      if (of.skip) y = fma(load_first(to, at.count(b)), all(of.skip[at.head]), y);
      store_first(to, y, at.count(b));
    }
  }
  Lanes total(int b) const { return add(add(part[b][0], part[b][1]), add(part[b][2], part[b][3])); }
};

// A token's step leaves the state as the next token's decay makes it, and what that gives for the next token's key: each number is read once.
template <int B>
inline void delta_chain(const Recurrence& of, int64_t unit, const float* from, float* to, float* row, int64_t stride, int64_t count) {
  const Columns at(of, unit);
  const int64_t n = of.key_dim;
  Sums<B> known;
  const Lanes first = all(row[at.decay]);
  for (int64_t i = 0; i < n; i += 4)
    for (int j = 0; j < 4; ++j)
      for (int b = 0; b < B; ++b) {
        const Lanes s = mul(load(from + (b * n + i + j) * 16), first);
        known.part[b][j] = fma(all(row[of.key + at.key + i + j]), s, known.part[b][j]);
        store(to + (b * n + i + j) * 16, s);
      }
  for (; count > 0; --count, row += stride) {
    const float *next = count > 1 ? row + stride : row, *k = row + of.key + at.key, *q = row + of.query + at.key, *next_k = next + of.key + at.key;
    const Lanes decay = all(count > 1 ? next[at.decay] : 1.0f), rate = all(row[at.decay + of.heads]);
    Lanes u[B];
    for (int b = 0; b < B; ++b) u[b] = mul(sub(load_first(row + at.value + b * 16, at.count(b)), known.total(b)), rate);
    known = Sums<B>();
    Sums<B> result;
    for (int64_t i = 0; i < n; i += 4)
      for (int j = 0; j < 4; ++j) {
        const Lanes ks = all(k[i + j]), qs = all(q[i + j]), next_ks = all(next_k[i + j]);
        for (int b = 0; b < B; ++b) {
          const Lanes s = fma(ks, u[b], load(to + (b * n + i + j) * 16)), decayed = mul(s, decay);
          result.part[b][j] = fma(qs, s, result.part[b][j]);
          known.part[b][j] = fma(next_ks, decayed, known.part[b][j]);
          store(to + (b * n + i + j) * 16, decayed);
        }
      }
    result.put(of, at, row);
  }
}

// T tokens over one number of the state before the next. `count` is a multiple of T.
template <int B, int T>
inline void state_space_chain(const Recurrence& of, int64_t unit, const float* from, float* to, float* row, int64_t stride, int64_t count) {
  const Columns at(of, unit);
  const int64_t n = of.key_dim;
  for (; count > 0; count -= T, row += T * stride, from = to) {
    Sums<B> result[T];
    Lanes u[T][B], decay[T];
    for (int t = 0; t < T; ++t) {
      const float* one = row + t * stride;
      decay[t] = all(one[at.decay]);
      for (int b = 0; b < B; ++b) u[t][b] = mul(load_first(one + at.value + b * 16, at.count(b)), all(one[at.decay + of.heads]));
    }
    for (int j = 0; j < 4; ++j) {
      Lanes part[T][B];
      for (auto& one : part)
        for (Lanes& lanes : one) lanes = zero();
      for (int64_t i = j; i < n; i += 4) {
        Lanes s[B];
        for (int b = 0; b < B; ++b) s[b] = load(from + (b * n + i) * 16);
        for (int t = 0; t < T; ++t) {
          const float* one = row + t * stride + at.key + i;
          const Lanes k = all(one[of.key]), q = all(one[of.query]);
          for (int b = 0; b < B; ++b) {
            s[b] = fma(k, u[t][b], mul(s[b], decay[t]));
            part[t][b] = fma(q, s[b], part[t][b]);
          }
        }
        for (int b = 0; b < B; ++b) store(to + (b * n + i) * 16, s[b]);
      }
      for (int t = 0; t < T; ++t)
        for (int b = 0; b < B; ++b) result[t].part[b][j] = part[t][b];
    }
    for (int t = 0; t < T; ++t) result[t].put(of, at, row + t * stride);
  }
}

template <int B>
inline void chain_of(const Recurrence& of, int64_t unit, const float* from, float* to, float* row, int64_t stride, int64_t count) {
  if (of.kind == DELTA_RULE) return delta_chain<B>(of, unit, from, to, row, stride, count);
  const int64_t most = count / 4 * 4;
  state_space_chain<B, 4>(of, unit, from, to, row, stride, most);
  state_space_chain<B, 1>(of, unit, most ? to : from, to, row + most * stride, stride, count - most);
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

// One unit over the nodes of one sequence, whose rows of the target begin at `rows`, in a tree.
inline void run_unit(const Recurrence& of, int64_t unit, const Nodes& nodes, const Walk& walk, float* rows, int64_t stride,
                     std::vector<float>& places) {
  const int64_t size = of.key_dim * 16, at = of.unit_at(unit);
  places.resize(std::max(places.size(), size_t(walk.places * size)));
  for (const Walk::Step& one : walk.steps) {
    float* row = one.node < nodes.base ? nullptr : rows + (one.node - nodes.base) * stride;
    const float* kept = row ? row + of.kept : nodes.inputs + one.node * of.inputs + of.input;
    unit_step(of, unit, one.from < 0 ? nodes.state + at : &places[size_t(one.from * size)], &places[size_t(one.to * size)], kept, row);
  }
}

// Nodes [node, end) of a chain, for one unit or for two of a head.
inline void run_part(const Recurrence& of, int64_t unit, int64_t units, const Nodes& nodes, int64_t node, int64_t end, float* rows, int64_t stride) {
  const int64_t size = of.key_dim * 16, at = of.unit_at(unit);
  const float* from = (node ? nodes.next : nodes.state) + at;
  float* to = nodes.next + at;
  float* row = rows + (node - nodes.base) * stride;
  if (node >= nodes.base && end - node >= LONG) {
    if (units == 2) chain_of<2>(of, unit, from, to, row, stride, end - node);
    else chain_of<1>(of, unit, from, to, row, stride, end - node);
  } else
    for (int64_t u = 0; u < units; ++u)
      for (int64_t i = node; i < end; ++i) {
        float* here = i < nodes.base ? nullptr : rows + (i - nodes.base) * stride;
        const float* kept = here ? here + of.kept : nodes.inputs + i * of.inputs + of.input;
        unit_step(of, unit + u, (i > node ? to : from) + u * size, to + u * size, kept, here);
      }
  if (nodes.boundary && end - 1 == nodes.boundary_node) std::memcpy(nodes.boundary + at, to, size_t(units * size) * 4);
}

// Units [first, last) over a chain: those of a key head over some tokens, whose keys stay in the cache meanwhile, before the next tokens.
inline void run_chain(const Recurrence& of, int64_t first, int64_t last, const Nodes& nodes, float* rows, int64_t stride) {
  constexpr int64_t SOME = 64;
  const int64_t width = of.width(of.value_dim), together = of.alike * width;
  for (int64_t low = first, high; low < last; low = high) {
    high = std::min(last, (low / together + 1) * together);
    for (int64_t node = 0, end; node < nodes.nodes; node = end) {
      end = node < nodes.base ? nodes.base : std::min(nodes.nodes, node + SOME);
      if (nodes.boundary && node <= nodes.boundary_node) end = std::min(end, nodes.boundary_node + 1);
      for (int64_t unit = low, units; unit < high; unit += units) {
        units = unit % width + 1 < width && unit + 1 < high ? 2 : 1;
        run_part(of, unit, units, nodes, node, end, rows, stride);
      }
    }
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
