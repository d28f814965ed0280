// Layers with a state: what a row computes depends on the rows before it by a recurrence that goes from parent to child.
//
// A sequence has one state, that of its committed tokens, which a pass only reads. Behind them come the *nodes* of a draft tree, or of a text as
// a chain; a node's result is that of the path from the committed tokens to it, whatever else is in the pass. The pass keeps each node's inputs
// of the recurrence, so that a path of nodes can be folded into the state afterwards. Of a chain it writes the state behind the last node, too.
// All steps are in float32, one after the other in the path's order, by the same function wherever they are done: so the bits are the path's.
#pragma once
#include <algorithm>

#include "activation.h"
#include "attention.h"

namespace qb {

enum RecurrenceKind : int64_t { CONVOLUTION };

// One recurrence of a layer. `state`, `input`: where its numbers begin in a sequence's state, and in a node's inputs.
struct Recurrence {
  int64_t kind, state, input, inputs;   // inputs: numbers of a node, of all recurrences
  int64_t channels, taps;               // of a convolution over the last `taps` tokens of each channel
  int64_t column, gate, gate_out;       // columns of the source: what is convolved, a factor of it, and one of the result; -1 for none
  int64_t activated;                    // SiLU before the last factor
  const float *weight, *bias;           // [taps][channels], the oldest token first; [channels] or null
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
  const int64_t past = of.taps - 1, end = std::min(high * 16, of.channels);
  for (int64_t s = 0; s < batch.spans; ++s) {
    const Span& span = batch.span[s];
    const Nodes& nodes = *static_cast<const Nodes*>(span.nodes);
    const auto row = [&](int64_t node) { return source + (span.row + node - nodes.base) * stride; };
    const auto input = [&](int64_t node, int64_t c, int64_t n) {
      if (node < 0) return load_first(nodes.state + of.state + (past + node) * of.channels + c, n);
      if (node < nodes.base) return load_first(nodes.inputs + node * of.inputs + of.input + c, n);
      const Lanes z = load_first(row(node) + of.column + c, n);
      return of.gate < 0 ? z : mul(z, load_first(row(node) + of.gate + c, n));
    };
    const auto back = [&](int64_t node, int64_t by) {
      while (by--) node = nodes.above(node);
      return node;
    };
    const auto keep = [&](float* state, int64_t last) {
      for (int64_t k = 0; k < past; ++k)
        for (int64_t c = low * 16, node = back(last, past - 1 - k); c < end; c += 16) {
          const int64_t n = std::min<int64_t>(16, end - c);
          store_first(state + of.state + k * of.channels + c, input(node, c, n), n);
        }
    };
    for (int64_t node = nodes.base; node < nodes.nodes; ++node)
      for (int64_t c = low * 16; c < end; c += 16) {
        const int64_t n = std::min<int64_t>(16, end - c);
        Lanes y = of.bias ? load_first(of.bias + c, n) : zero(), z = y;
        for (int64_t k = 0; k <= past; ++k) {
          z = input(back(node, past - k), c, n);
          y = fma(load_first(of.weight + k * of.channels + c, n), z, y);
        }
        if (nodes.inputs) store_first(nodes.inputs + node * of.inputs + of.input + c, z, n);
        if (of.activated) y = activate(SILU, y);
        if (of.gate_out >= 0) y = mul(y, load_first(row(node) + of.gate_out + c, n));
        put(span.row + node - nodes.base, c, n, y);
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

inline void fold(const Recurrence& of, const float* state, const float* inputs, const int64_t* path, int64_t count, float* next) {
  fold_convolution(of, state, inputs, path, count, next);
}

}  // namespace qb
