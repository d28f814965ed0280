// A pass as a list of operations over the rows of a batch, carried out in one call by all threads. Operations name their buffers by number;
// who calls says where each buffer is. Python makes the lists (`program.py`, with the same structures) and holds every operation
// to a plain reference (`reference.py`).
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "activation.h"
#include "attention.h"
#include "blocks.h"
#include "experts.h"
#include "noise.h"
#include "quantise.h"
#include "ranking.h"
#include "recurrent.h"
#include "threads.h"

#if defined(QB_AMX) && !defined(QB_AMX_EMULATED)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace qb {

enum Kind : int32_t { EMBED, NORM, LINEAR, HEADS, ATTEND, COPY, SELECTED, EXPERTS, RECUR, GATE, LATENT, REORDER, CONVOLVE, ADD_ROWS };
enum Epilogue : int32_t { STORE, ADD, GATED, ACTIVATE, BEST };

// One operation. Buffers are numbers into the caller's table, -1 for none. Strides, offsets and sizes are in numbers, not bytes.
struct Op {
  int32_t kind, epilogue;
  int32_t source, target, best;             // buffers; best: [wanted] int64, of BEST
  int32_t source_float, target_float;       // float32 instead of bfloat16
  int32_t wanted;                           // over the wanted rows: 1 gathers them from the source, 2 finds them gathered
  int64_t source_stride, source_offset, target_stride, target_offset;
  const void *weight, *bias;                // a norm's weight and every bias: float32
  int64_t inputs, outputs;
  int64_t heads, kv_heads, head_dim, value_dim;
  const float *query_norm, *key_norm;       // [head_dim], or [heads][head_dim] where `norm_stride` says so
  int64_t offset, window;                   // of the layer in a page
  const float* sinks;
  float epsilon, scaling, softcap;          // scaling: of products, embeddings, copies, attention's scores, what is added
  int32_t key, value;                       // buffers of EXPERTS and LATENT; key: of GATE
  int32_t format;                           // of the weight of LINEAR, SELECTED, EMBED and EXPERTS (but what comes last)
  int64_t key_stride, key_head, value_stride, value_head;  // of LATENT and GATE: numbers between rows, and the first column
  int64_t norm_stride;                      // numbers between the norms of two heads
  int64_t rotary, angles;                   // of HEADS: how many dimensions turn, and where their angles begin in the table's rows
  int64_t query_scale;                      // 1 + the column of the cosines that holds a factor of the queries, 0 for none
  int32_t activation;
  int32_t centred;                          // a layer norm: the mean is taken away first
  int32_t interleaved;                      // dimensions 2i and 2i + 1 turn together, not i and i + rotary / 2
  int32_t norm_last;                        // queries and keys are normed after they are turned
  int32_t value_norm;                       // of HEADS: values are normed, without a weight
  int32_t values_are_keys;                  // of HEADS: values are what keys are made of, and not in the source
  int32_t borrowed;                         // of HEADS: only queries; keys and values are another layer's
  int32_t bidirectional;                    // of ATTEND: the rows of a sequence see one another
  int32_t causal;                           // of ATTEND: the rows of an image do not
  Experts* experts;                         // of EXPERTS, whose scores are in `key`, routes in `value`, inner numbers in `best`
  int64_t first_expert, last_expert;        // only these, the last excluded; -1 first: the first one, with routes made and the target cleared
  const uint8_t* grid;                      // of EMBED: of the weight's format (`blocks.h`), null for none
};

struct Call {
  Batch batch;
  void* const* buffer;
  const int64_t* block;  // SELECTED: which blocks of 16 outputs, in the order of the results
  int64_t blocks;
  const MemoryNodes* nodes;  // none on a machine with one
};

struct Scratch {  // grows with use, kept by the thread that calls
  std::vector<float> scores, sums, peaks;
  std::vector<Entry> weights;
  std::vector<float> wide_weights;  // of attention in float32
  std::vector<int64_t> best, waves;
  std::vector<QueryTile> tiles;
};

class Worker {
 public:
  Worker(const Call& call, Scratch& scratch, Barrier& barrier, Pieces& pieces, int64_t thread, const Team& team)
      : call_(call), batch_(call.batch), scratch_(scratch), barrier_(barrier), pieces_(pieces), thread_(thread), threads_(team.threads),
        team_(team), node_(team.node_of(thread)) {}

  void run(const Op* ops, int64_t count) {
    const Op* product = ops;  // the next one that is not done
    for (int64_t i = 0; i < count; ++i) {
      const Op& op = ops[i];
      if (product <= &op) {
        do ++product;
        while (product < ops + count && product->kind != LINEAR);
        ahead_ = product < ops + count ? first_read(*product) : Ahead();
      }
      switch (op.kind) {
        case EMBED: embed(op); break;
        case NORM: norm(op); break;
        case LINEAR: linear(op); break;
        case SELECTED: selected(op); break;
        case HEADS: heads(op); break;
        case ATTEND: attend(op); break;
        case COPY: copy(op); break;
        case EXPERTS: experts(op); break;
        case LATENT: latent(op); break;
        case RECUR: recur(op); break;
        case GATE: gate(op); break;
        case REORDER: reorder(op); break;
        case CONVOLVE: convolve_blocks(op); break;
        case ADD_ROWS:
          if (!call_.buffer[op.source]) continue;  // a call without such rows: there is nothing to wait for
          add_rows(op);
          break;
      }
      wait_for_all();
    }
#ifdef QB_AMX
    release_tiles();
#endif
  }

 private:
  const Call& call_;
  const Batch& batch_;
  Scratch& scratch_;
  Barrier& barrier_;
  Pieces& pieces_;
  const int64_t thread_, threads_;
  const Team team_;
  const int64_t node_;
  int64_t turn_ = 0;              // of `pieces_`
  int64_t rows_ = 0;              // of BEST
  const Op* planned_ = nullptr;   // whose tiles of queries the scratch holds
  Ahead ahead_;                   // of the next product's weight
  alignas(64) float sums_[PANEL];

  template <class T>
  T* at(int32_t buffer) const {
    return static_cast<T*>(call_.buffer[buffer]);
  }
  int64_t rows(const Op& op) const { return op.wanted ? batch_.wanted : batch_.rows; }
  int64_t low(int64_t n) const { return part_begin(n, thread_, threads_); }
  int64_t high(int64_t n) const { return part_begin(n, thread_ + 1, threads_); }

  void wait_for_all() { barrier_.wait(team_, node_, ahead_); }

  // work(first, last, end) for this thread's pieces of [0, n), about `most` or as many more as others have left (`Pieces`).
  template <class Work>
  void in_pieces(int64_t n, int64_t most, const Work& work) {
    pieces_.run(n, thread_, turn_++, most, work);
  }

  // How many blocks of a product go together: those of gates go in twos. And how many such steps it has.
  static int64_t step_of(const Op& op) { return op.epilogue == GATED ? 2 : 1; }
  static int64_t steps_of(const Op& op) { return (op.outputs / step_of(op) + 15) / 16; }

  // The first weights that this thread reads of a product, as many as stay in its second cache until then.
  Ahead first_read(const Op& op) const {
    constexpr int64_t MOST = 1 << 17;
    const int64_t bytes = block_bytes(op.format, op.inputs) * step_of(op), steps = steps_of(op);
    const char* begin = static_cast<const char*>(op.weight) + low(steps) * bytes;
    return {begin, begin + std::min(MOST, (high(steps) - low(steps)) * bytes)};
  }

  static float number(const Op& op, const void* base, int64_t at) {
    return op.source_float ? static_cast<const float*>(base)[at] : widen(static_cast<const bf16*>(base)[at]);
  }

  // target [rows] = weight[token] * scaling; with ADD, target += weight[position]. The weight is of bfloat16, float32, or a file's blocks.
  // The source, if any: the addresses [rows] of float32 rows that a float32 target gets in place of the tokens'; 0 for none.
  void embed(const Op& op) {
    const bool learned = op.epilogue == ADD;
    const int64_t* given = op.source < 0 ? nullptr : at<int64_t>(op.source);
    const FileBlock block = file_block(op.format);
    std::vector<float> x(size_t(op.inputs));
    std::vector<uint8_t> room;
    for (int64_t r = low(batch_.rows); r < high(batch_.rows); ++r) {
      const int64_t row = (learned ? batch_.position : batch_.token)[r], to = r * op.target_stride + op.target_offset;
      if (given && given[r]) {
        std::memcpy(at<float>(op.target) + to, reinterpret_cast<const float*>(given[r]), size_t(op.inputs) * 4);
        continue;
      }
      if (!op.target_float && op.format == BFLOAT16) {
        std::memcpy(at<bf16>(op.target) + to, static_cast<const bf16*>(op.weight) + row * op.inputs, size_t(op.inputs) * 2);
        continue;
      }
      if (block.bytes) {
        const uint8_t* rows = static_cast<const uint8_t*>(op.weight);
        dense_row(op.format, op.grid, rows + row * (op.inputs / block.inputs * block.bytes), op.inputs, room, x.data());
      } else
        for (int64_t i = 0; i < op.inputs; ++i) x[size_t(i)] = number(op, op.weight, row * op.inputs + i);
      if (!op.target_float) {
        narrow_all(x.data(), at<bf16>(op.target) + to, op.inputs);
        continue;
      }
      float* y = at<float>(op.target) + to;
      for (int64_t i = 0; i < op.inputs; ++i) y[i] = learned ? y[i] + x[size_t(i)] * op.scaling : x[size_t(i)] * op.scaling;
    }
  }

  // target [rows] += the float32 row at the source's address, from its number `source_offset` on; nothing where the address is 0.
  void add_rows(const Op& op) {
    const int64_t* given = at<int64_t>(op.source);
    for (int64_t r = low(batch_.rows); r < high(batch_.rows); ++r) {
      if (!given[r]) continue;
      const float* x = reinterpret_cast<const float*>(given[r]) + op.source_offset;
      float* y = at<float>(op.target) + r * op.target_stride;
      for (int64_t i = 0; i < op.inputs; ++i) y[i] += x[i];
    }
  }

  // (x - m) / sqrt(mean((x - m)^2) + epsilon) * weight + bias, m the mean if `centred`, else 0; sums in lanes of place % 16.
  static void normalise(const float* x, float* y, int64_t n, float epsilon, const float* weight, const float* bias, bool centred) {
    float mean = 0;
    if (centred) {
      Lanes total = zero();
      for (int64_t i = 0; i < n; i += 16) total = add(total, load_first(x + i, std::min<int64_t>(16, n - i)));
      mean = sum(total) / float(n);
      for (int64_t i = 0; i < n; ++i) y[i] = x[i] - mean;
      x = y;
    }
    Lanes squares = zero();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) squares = fma(load(x + i), load(x + i), squares);
    if (i < n) squares = fma(load_first(x + i, n - i), load_first(x + i, n - i), squares);
    const float factor = 1.0f / std::sqrt(sum(squares) / float(n) + epsilon);
    for (i = 0; i < n; ++i) y[i] = x[i] * factor;
    if (weight)
      for (i = 0; i < n; ++i) y[i] *= weight[i];
    if (bias)
      for (i = 0; i < n; ++i) y[i] += bias[i];
  }

  void norm(const Op& op) {  // with ADD, scaled and added to the target
    std::vector<float> x(size_t(op.inputs));
    for (int64_t r = low(rows(op)); r < high(rows(op)); ++r) {
      const int64_t from = (op.wanted == 1 ? batch_.want[r] : r) * op.source_stride + op.source_offset;
      const float* in = x.data();
      if (op.source_float) in = at<float>(op.source) + from;
      else
        for (int64_t i = 0; i < op.inputs; ++i) x[size_t(i)] = widen(at<bf16>(op.source)[from + i]);
      normalise(in, x.data(), op.inputs, op.epsilon, static_cast<const float*>(op.weight), static_cast<const float*>(op.bias), op.centred);
      const int64_t to = r * op.target_stride + op.target_offset;
      if (op.epilogue == ADD)
        for (int64_t i = 0; i < op.inputs; ++i) at<float>(op.target)[to + i] += x[size_t(i)] * op.scaling;
      else if (op.target_float) std::copy(x.begin(), x.end(), at<float>(op.target) + to);
      else narrow_all(x.data(), at<bf16>(op.target) + to, op.inputs);
    }
  }

  static void narrow_all(const float* x, float* y, int64_t n) { std::copy(x, x + n, y); }
  static void narrow_all(const float* x, bf16* y, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(y + i, load(x + i));
    for (; i < n; ++i) y[i] = narrow(x[i]);
  }

  void copy(const Op& op) {  // scaled and, with ADD, added to what is there
    for (int64_t r = low(rows(op)); r < high(rows(op)); ++r) {
      const int64_t from = (op.wanted == 1 ? batch_.want[r] : r) * op.source_stride + op.source_offset, to = r * op.target_stride + op.target_offset;
      for (int64_t i = 0; i < op.inputs; ++i) {
        const float x = number(op, call_.buffer[op.source], from + i) * op.scaling;
        if (op.epilogue == ADD) at<float>(op.target)[to + i] += x;
        else if (op.target_float) at<float>(op.target)[to + i] = x;
        else at<bf16>(op.target)[to + i] = narrow(x);
      }
    }
  }

  void reorder(const Op& op) {  // column i of the target is column weight[i] of the source; both bfloat16
    const int32_t* order = static_cast<const int32_t*>(op.weight);
    for (int64_t r = low(rows(op)); r < high(rows(op)); ++r) {
      const bf16* from = at<bf16>(op.source) + r * op.source_stride + op.source_offset;
      bf16* to = at<bf16>(op.target) + r * op.target_stride;
      for (int64_t i = 0; i < op.inputs; ++i) to[i] = from[order[i]];
    }
  }

  // target = a causal convolution of the rows of blocks of `outputs` rows, or with ADD added: of the last `heads` rows, by `weight` [heads][inputs]
  // plus coefficients in `key` [heads][inputs / kv_heads], each of `kv_heads` columns.
  void convolve_blocks(const Op& op) {
    const int64_t n = op.inputs, groups = n / op.kv_heads;
    const float* base = static_cast<const float*>(op.weight);
    for (int64_t r = low(batch_.rows); r < high(batch_.rows); ++r) {
      const float* shared = at<float>(op.key) + r * op.key_stride + op.key_head;
      const int64_t taps = std::min(op.heads, r % op.outputs + 1), to = r * op.target_stride + op.target_offset;
      for (int64_t i = 0; i < n; ++i) {
        float x = 0;
        for (int64_t t = 0; t < taps; ++t)
          x += (base[t * n + i] + shared[t * groups + i / op.kv_heads]) * number(op, call_.buffer[op.source], (r - t) * op.source_stride + op.source_offset + i);
        if (op.epilogue == ADD) at<float>(op.target)[to + i] += x;
        else if (op.target_float) at<float>(op.target)[to + i] = x;
        else at<bf16>(op.target)[to + i] = narrow(x);
      }
    }
  }

  template <class Each, class Done>
  void product(const Op& op, int64_t n, Each each, bool even, Done done) {
    const auto of = [&](auto* x) {
      any_panels(op.format, x + op.source_offset, op.source_stride, n, op.weight, op.inputs, each, even, sums_, done);
    };
    if (op.format == FLOAT32) of(at<float>(op.source));
    else of(at<bf16>(op.source));
  }

  void linear(const Op& op) {
    const int64_t n = rows(op), step = step_of(op), steps = steps_of(op);
    if (op.epilogue == BEST) start_best(n);
    const auto done = [&](int64_t row, int64_t count, int64_t block, int64_t some, const float* sums, int64_t stride) {
      for (int64_t r = 0; r < count; ++r) finish(op, row + r, block, some, sums + r * stride);
    };
    const auto each = [&](auto panel) {
      in_pieces(steps, 16, [&](int64_t first, int64_t last, int64_t end) { panel(first * step, last * step, end * step); });
    };
    product(op, n, each, step == 2, done);
    if (op.epilogue == BEST) finish_best(op, n);
  }

  // The sums of one row, blocks [block, block + some), to where they go.
  void finish(const Op& op, int64_t row, int64_t block, int64_t some, const float* sums) {
    const float* bias = static_cast<const float*>(op.bias);
    if (op.epilogue == GATED) {  // blocks of gates and of what they let through in turn
      const int64_t columns = op.outputs / 2;
      for (int64_t b = 0; b < some; b += 2) {
        const int64_t to = (block + b) / 2 * 16, count = std::min<int64_t>(16, columns - to);
        Lanes gate = load(sums + b * 16), up = load(sums + b * 16 + 16);
        if (bias) gate = add(gate, load(bias + (block + b) * 16)), up = add(up, load(bias + (block + b) * 16 + 16));
        put(op, row, to, count, mul(activate(op.activation, op.scaling == 1.0f ? gate : mul(gate, all(op.scaling))), up));
      }
      return;
    }
    for (int64_t b = 0; b < some; ++b) {
      const int64_t to = (block + b) * 16, count = std::min<int64_t>(16, op.outputs - to);
      Lanes y = load(sums + b * 16);
      if (bias) y = add(y, load_first(bias + to, count));
      if (op.epilogue == ACTIVATE && op.activation == XIELU) {
        put(op, row, to, count, xielu(y, op.scaling, op.softcap));
        continue;
      }
      if (op.epilogue == ACTIVATE) y = activate(op.activation, y);
      if (op.epilogue == ADD) {
        float* p = at<float>(op.target) + row * op.target_stride + op.target_offset + to;
        store_first(p, add(load_first(p, count), mul(y, all(op.scaling))), count);
        continue;
      }
      if (op.scaling != 1.0f) y = mul(y, all(op.scaling));
      if (op.softcap > 0) y = mul(hyperbolic_tangent(div(y, all(op.softcap))), all(op.softcap));
      put(op, row, to, count, y);
      if (op.epilogue == BEST) note_best(row, to, count, y);
    }
  }

  void put(const Op& op, int64_t row, int64_t column, int64_t count, Lanes y) {
    const int64_t to = row * op.target_stride + op.target_offset + column;
    if (op.target_float) {
      store_first(at<float>(op.target) + to, y, count);
      return;
    }
    if (count == 16) return store(at<bf16>(op.target) + to, y);
    bf16 part[16];
    store(part, y);
    std::memcpy(at<bf16>(op.target) + to, part, size_t(count) * 2);
  }

  // The largest result of each row: by thread, then over threads; in a tie the first. -1 where a result is NaN or the largest infinite. A
  // thread may come to earlier columns after later ones.
  void start_best(int64_t n) {
    rows_ = n;
    if (thread_ == 0) {
      scratch_.peaks.assign(size_t(n * threads_), -INFINITY);
      scratch_.best.assign(size_t(n * threads_), 0);
    }
    wait_for_all();
  }

  void note_best(int64_t row, int64_t column, int64_t count, Lanes y) {
    float& top = scratch_.peaks[size_t(thread_ * rows_ + row)];
    int64_t& best = scratch_.best[size_t(thread_ * rows_ + row)];
    float v[16];
    if (count < 16) {
      store(v, y);
      for (int64_t i = count; i < 16; ++i) v[i] = -INFINITY;
      y = load(v);
    }
    if (!any_above(y, column < best ? std::nextafter(top, -INFINITY) : top) || top != top) return;
    store(v, y);
    for (int64_t i = 0; i < count; ++i)
      if (first_best(v[i], column + i, top, best)) top = v[i], best = column + i;
  }

  // Whether a result is to be taken instead of the best so far.
  static bool first_best(float y, int64_t column, float top, int64_t best) { return y > top || y != y || (y == top && column < best); }

  void finish_best(const Op& op, int64_t n) {
    wait_for_all();
    for (int64_t r = low(n); r < high(n); ++r) {
      int64_t best = scratch_.best[size_t(r)];
      float top = scratch_.peaks[size_t(r)];
      for (int64_t t = 1; t < threads_; ++t) {
        const float other = scratch_.peaks[size_t(t * n + r)];
        const int64_t column = scratch_.best[size_t(t * n + r)];
        if (first_best(other, column, top, best)) top = other, best = column;
      }
      at<int64_t>(op.best)[r] = std::isfinite(top) ? best : -1;
    }
  }

  // A product with selected blocks of the weight; results side by side in the order they are named.
  void selected(const Op& op) {
    const int64_t n = rows(op);
    int64_t shift = 0;  // from a block's number to its place in the results
    const int64_t* block = call_.block;
    const auto ranges = [&](auto panel) {
      in_pieces(call_.blocks, 16, [&](int64_t first, int64_t last, int64_t end) {
        for (int64_t i = first, j; i < last; i = std::min(j, last)) {  // blocks that follow one another go together
          for (j = i + 1; j < end && block[j] == block[j - 1] + 1;) ++j;
          shift = i - block[i];
          panel(block[i], block[i] + std::min(j, last) - i, block[i] + j - i);
        }
      });
    };
    const auto done = [&](int64_t row, int64_t count, int64_t block, int64_t some, const float* sums, int64_t stride) {
      for (int64_t r = 0; r < count; ++r)
        for (int64_t b = 0; b < some; ++b) {
          Lanes y = load(sums + r * stride + b * 16);
          if (op.bias) y = add(y, load(static_cast<const float*>(op.bias) + (block + b) * 16));
          put(op, row + r, (block + b + shift) * 16, 16, y);
        }
    };
    product(op, n, ranges, false, done);
  }

  void experts(const Op& op) {
    if (op.source_float) experts_of<float>(op);
    else experts_of<bf16>(op);
  }

  template <class T>
  void experts_of(const Op& op) {
    const Experts& of = *op.experts;
    const int64_t stride = of.count + of.gated;
    const float* scores = at<float>(op.key);
    Route* routes = at<Route>(op.value);
    if (op.first_expert < 0) {
      Router router(of);
      for (int64_t r = low(batch_.rows); r < high(batch_.rows); ++r) {
        router.route(scores + r * stride, routes + r * of.top);
        std::fill_n(at<float>(op.target) + r * op.target_stride, op.outputs, 0.0f);
      }
      wait_for_all();
    }
    const Grouped grouped(of, routes, batch_.rows, scores, stride);
    const ExpertPass<T> pass{of, op.format, op.activation, op.softcap, op.scaling, at<T>(op.source), op.source_stride, batch_.rows, op.inputs,
                             op.outputs, at<T>(op.best), at<float>(op.target), op.target_stride,
                             std::max<int64_t>(0, op.first_expert), op.last_expert};
    if (thread_ == 0) op.experts->read = grouped.read(of.count);
    // few pieces, each of which reads its rows anew
    const auto share = [&](int64_t n, const auto& work) { in_pieces(n, 4, work); };
    pass.up(grouped, share, sums_);
    wait_for_all();
    pass.down(grouped, share, sums_);
  }

  // The sequence of a row; rows come in order, so the search goes on from the last one's.
  const Span& span_of(int64_t row, int64_t& s) const {
    while (row >= batch_.span[s].row + batch_.span[s].rows) ++s;
    return batch_.span[s];
  }

  static KVShape kv_of(const Op& op) { return {op.kv_heads, op.head_dim, op.value_dim, op.offset}; }

  void heads(const Op& op) {
    if (op.target_float) heads_of<float>(op);
    else heads_of<bf16>(op);
  }

  // Queries, keys and values side by side in float32: norms, rotary angles, then queries to `target` [kv_heads][rows][group][head_dim], keys
  // and values to their page.
  template <class T>
  void heads_of(const Op& op) {
    const int64_t dim = op.head_dim, all_heads = op.heads + (op.borrowed ? 0 : 2 * op.kv_heads), group = op.heads / op.kv_heads;
    const KVShape kv = kv_of(op);
    std::vector<float> x(size_t(std::max(dim, op.value_dim)));
    std::vector<T> y(x.size());
    int64_t span = 0;
    for (int64_t unit = low(batch_.rows * all_heads); unit < high(batch_.rows * all_heads); ++unit) {
      const int64_t r = unit / all_heads, h = unit % all_heads, slot = batch_.order[r] % PAGE;
      const bool value = h >= op.heads + op.kv_heads;
      const int64_t place = value && op.values_are_keys ? h - op.kv_heads : h;
      const float* from = at<float>(op.source) + r * op.source_stride + op.source_offset + place * dim;
      const PageOf<T> page(span_of(r, span).pages[batch_.order[r] / PAGE], kv);
      if (value) {
        if (op.value_norm) {
          std::copy(from, from + dim, x.begin());
          normalise(x.data(), x.data(), dim, op.epsilon, nullptr, nullptr, false);
          from = x.data();
        }
        narrow_all(from, y.data(), dim);
        page.write_value(h - op.heads - op.kv_heads, slot, y.data());
        continue;
      }
      const bool query = h < op.heads;
      const float* weight = query ? op.query_norm : op.key_norm;
      if (weight) weight += (query ? h : h - op.heads) * op.norm_stride;
      std::copy(from, from + dim, x.begin());
      if (weight && !op.norm_last) normalise(x.data(), x.data(), dim, op.epsilon, weight, nullptr, op.centred);
      turn(op, x.data(), batch_.position[r]);
      if (weight && op.norm_last) normalise(x.data(), x.data(), dim, op.epsilon, weight, nullptr, op.centred);
      if (query) {
        if (op.query_scale) {
          const float factor = batch_.cosine[batch_.position[r] * batch_.angle_stride + op.query_scale - 1];
          for (float& value : x) value *= factor;
        }
        narrow_all(x.data(), at<T>(op.target) + ((h / group * batch_.rows + r) * group + h % group) * dim, dim);
      } else {
        narrow_all(x.data(), y.data(), dim);
        page.write_key(h - op.heads, slot, y.data());
      }
    }
  }

  void latent(const Op& op) {
    if (op.target_float) latent_of<float>(op);
    else latent_of<bf16>(op);
  }

  // The same for a latent attention: the last `rotary` dimensions of a head turn, those of keys are one for all heads, in `value` from column
  // `value_head` on; the rest of each head's key and its value are in `key`.
  template <class T>
  void latent_of(const Op& op) {
    const int64_t dim = op.head_dim, still = dim - op.rotary, heads = op.heads;
    const KVShape kv = kv_of(op);
    std::vector<float> x(size_t(dim), 0.0f);
    std::vector<T> y(size_t(std::max(dim, op.value_dim)));
    int64_t span = 0;
    for (int64_t unit = low(batch_.rows * 2 * heads); unit < high(batch_.rows * 2 * heads); ++unit) {
      const int64_t r = unit / (2 * heads), h = unit % heads, slot = batch_.order[r] % PAGE;
      const bool query = unit % (2 * heads) < heads;
      const float* from = query ? at<float>(op.source) + r * op.source_stride + op.source_offset + h * dim
                                : at<float>(op.key) + r * op.key_stride + h * (still + op.value_dim);
      const float* turning = query ? from + still : at<float>(op.value) + r * op.value_stride + op.value_head;
      std::copy_n(from, still, x.begin());
      std::copy_n(turning, op.rotary, x.begin() + still);
      turn(op, x.data() + still, batch_.position[r]);
      if (query) {
        narrow_all(x.data(), at<T>(op.target) + (h * batch_.rows + r) * dim, dim);
        continue;
      }
      const PageOf<T> page(span_of(r, span).pages[batch_.order[r] / PAGE], kv);
      narrow_all(x.data(), y.data(), dim);
      page.write_key(h, slot, y.data());
      narrow_all(from + still, y.data(), op.value_dim);
      page.write_value(h, slot, y.data());
    }
  }

  // Rotary angles of a position on the first `rotary` dimensions of a head.
  void turn(const Op& op, float* x, int64_t position) const {
    const int64_t half = op.rotary / 2, from = position * batch_.angle_stride + op.angles;
    const float *cosine = batch_.cosine + from, *sine = batch_.sine + from;
    if (op.interleaved) {
      for (int64_t i = 0; i < half; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cosine[i] - b * sine[i];
        x[2 * i + 1] = b * cosine[i] + a * sine[i];
      }
      return;
    }
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[i], b = x[i + half];
      x[i] = a * cosine[i] - b * sine[i];
      x[i + half] = b * cosine[i] + a * sine[i];
    }
  }

  void recur(const Op& op) {
    const Recurrence& of = *static_cast<const Recurrence*>(op.weight);
    if (of.kind != CONVOLUTION) return recur_matrices(op, of);
    const auto result = [&](int64_t row, int64_t column, int64_t count, Lanes y) { put(op, row, column, count, y); };
    const int64_t blocks = (of.channels + 15) / 16;
    convolve(of, batch_, at<float>(op.source) + op.source_offset, op.source_stride, low(blocks), high(blocks), result);
  }

  // In place: the target holds queries, keys and values, which the results take the place of.
  void recur_matrices(const Op& op, const Recurrence& of) {
    float* rows = at<float>(op.target);
    int64_t s = 0;
    for (int64_t r = low(batch_.rows); r < high(batch_.rows); ++r) {
      float* row = rows + r * op.target_stride;
      prepare_row(of, at<float>(op.source) + r * op.source_stride, row);
      const Nodes& nodes = *static_cast<const Nodes*>(span_of(r, s).nodes);
      const int64_t node = nodes.base + r - batch_.span[s].row;
      if (nodes.inputs) std::memcpy(nodes.inputs + node * of.inputs + of.input, row + of.kept, size_t(of.kept_count) * 4);
    }
    wait_for_all();
    std::vector<float> places;
    const int64_t units = of.units(), first = low(batch_.spans * units), last = high(batch_.spans * units);
    for (int64_t i = first; i < last;) {
      const Span& span = batch_.span[i / units];
      const Nodes& nodes = *static_cast<const Nodes*>(span.nodes);
      float* const row = rows + span.row * op.target_stride;
      const int64_t unit = i % units, count = std::min(last - i, units - unit);
      i += count;
      if (nodes.next) {
        run_chain(of, unit, unit + count, nodes, row, op.target_stride);
        continue;
      }
      const Walk walk(nodes);
      for (int64_t u = unit; u < unit + count; ++u) run_unit(of, u, nodes, walk, row, op.target_stride, places);
    }
  }

  // target = source * activation(gate), in groups of `inputs` numbers with `outputs` gates, 1 or as many; with a weight, a group is normed before, or with `norm_last` after.
  void gate(const Op& op) {
    const int64_t n = op.inputs;
    const float* weight = static_cast<const float*>(op.weight);
    std::vector<float> x(size_t(n + 15));
    for (int64_t unit = low(batch_.rows * op.heads); unit < high(batch_.rows * op.heads); ++unit) {
      const int64_t r = unit / op.heads, g = unit % op.heads, from = r * op.source_stride + op.source_offset + g * n;
      const float* gates = at<float>(op.key) + r * op.key_stride + op.key_head + g * op.outputs;
      const bool one = op.outputs == 1;
      for (int64_t i = 0; i < n; ++i) x[size_t(i)] = number(op, call_.buffer[op.source], from + i);
      const auto norm = [&] { normalise(x.data(), x.data(), n, op.epsilon, weight + g * op.norm_stride, nullptr, false); };
      if (weight && !op.norm_last) norm();
      for (int64_t i = 0; i < n; i += 16) {
        const int64_t count = std::min<int64_t>(16, n - i);
        const Lanes mine = one ? all(gates[0]) : load_first(gates + i, count);
        store(&x[size_t(i)], mul(load_first(&x[size_t(i)], count), activate(op.activation, mul(mine, all(op.scaling)))));
      }
      if (weight && op.norm_last) norm();
      for (int64_t i = 0; i < n; i += 16) put(op, r, g * n + i, std::min<int64_t>(16, n - i), load(&x[size_t(i)]));
    }
  }

  void attend(const Op& op) {
    if (op.source_float) attend_in<float>(op, scratch_.wide_weights);
    else attend_in<bf16>(op, scratch_.weights);
  }

  template <class T>
  void attend_in(const Op& op, std::vector<typename Reads<T>::X>& weights) {
    const AttentionShape shape{kv_of(op), op.heads, op.window, op.scaling, op.softcap, op.sinks, op.bidirectional != 0, op.causal != 0};
    Attention<T> attention(shape, batch_, at<T>(op.source), at<T>(op.target), scratch_.scores, weights, scratch_.sums);
    const bool fresh = !planned_ || planned_->window != op.window || planned_->heads != op.heads || planned_->kv_heads != op.kv_heads ||
                       planned_->bidirectional != op.bidirectional || planned_->causal != op.causal;
    planned_ = &op;
    attention.run(thread_, threads_, fresh, [this] { wait_for_all(); }, scratch_.tiles, scratch_.waves);
  }
};

}  // namespace qb

#ifdef _WIN32
#define QB_API extern "C" __declspec(dllexport)
#else
#define QB_API extern "C" __attribute__((visibility("default")))
#endif

// Bumped whenever a structure changes; Python refuses a library that was made for another.
QB_API int64_t qb_version() { return 29; }
QB_API int64_t qb_size_of_op() { return int64_t(sizeof(qb::Op)); }
QB_API int64_t qb_page() { return qb::PAGE; }

// Whether this process may use the instruction set that this library was made for, as far as it has to be asked for.
QB_API int64_t qb_allowed() {
#if defined(QB_AMX) && !defined(QB_AMX_EMULATED)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, tile data
#else
  return 1;
#endif
}

QB_API void qb_run(const qb::Op* ops, int64_t count, const qb::Call* call, int64_t threads) {
  static thread_local qb::Scratch scratch;
  qb::Scratch& mine = scratch;
  // Where other work holds a core, threads that wait for each other after every operation wait more than they work: then the next calls go
  // alone, two at first, as a moment's work is soon over, and ever more where it is not.
  static thread_local int64_t alone_for = 0, longer = 2;
  threads = std::min(threads, qb::most_threads());
  if (threads > 1 && --alone_for >= 0) threads = 1;
  const qb::Clock::time_point began = qb::Clock::now();
  const qb::MemoryNodes* nodes = threads > 1 ? call->nodes : nullptr;
  qb::Barrier barrier({nodes, threads});
  qb::Pieces pieces({nodes, threads});
  qb::together(threads, [&](int64_t thread, int64_t all) {
    const qb::Team team{nodes, all};
    const qb::Pinned pinned(team, thread);
    qb::Worker(*call, mine, barrier, pieces, thread, team).run(ops, count);
  });
  if (threads < 2) return;
  const bool busy = barrier.lost() * 2 > qb::Clock::now() - began;
  if (busy) alone_for = longer;
  longer = busy ? std::min<int64_t>(2 * longer, 512) : 2;
}

// Touches the pages of a weight's new memory, `steps` times `bytes` that products share out. A page comes to lie in the node of the thread that
// touches it first, which is the one that will read it.
QB_API void qb_touch(uint8_t* weight, int64_t steps, int64_t bytes, const qb::MemoryNodes* nodes, int64_t threads) {
  constexpr int64_t PAGE_BYTES = 4096;
  threads = std::min(threads, qb::most_threads());
  qb::together(threads, [&](int64_t thread, int64_t all) {
    const qb::Pinned pinned({nodes, all}, thread);
    volatile uint8_t* const end = weight + qb::part_begin(steps, thread + 1, threads) * bytes;
    for (volatile uint8_t* at = weight + qb::part_begin(steps, thread, threads) * bytes; at < end; at += PAGE_BYTES) *at = 0;
  });
}

// [outputs, inputs] bfloat16 to [ceil(outputs / 16)][inputs / 2][16][2], zeros where the weight ends; blocks `stride` apart.
QB_API void qb_pack(const uint16_t* weight, int64_t outputs, int64_t inputs, int64_t row_stride, uint16_t* packed, int64_t stride) {
  qb::share_out((outputs + 15) / 16, [=](int64_t block) { qb::pack(weight, row_stride, block, outputs, inputs, packed + block * stride); });
}

// Bytes of a block of 16 outputs in a format of formats.h.
QB_API int64_t qb_block_bytes(int32_t format, int64_t inputs) { return qb::block_bytes(format, inputs); }

// [outputs, inputs] bfloat16 to blocks of that format, `stride` bytes apart. Gives whether all weights are finite.
QB_API int64_t qb_quantise(int32_t format, const uint16_t* weight, int64_t outputs, int64_t inputs, int64_t row_stride, uint8_t* blocks,
                    int64_t stride) {
  std::atomic<int64_t> fine{1};
  qb::share_out((outputs + 15) / 16, [&](int64_t block) {
    uint8_t* to = blocks + block * stride;
    std::memset(to, 0, size_t(qb::block_bytes(format, inputs)));
    if (!qb::finite(weight, row_stride, block, outputs, inputs)) fine = 0;
    if (format == qb::INT8) qb::quantise_whole(weight, row_stride, block, outputs, inputs, to);
    else qb::quantise_halves(weight, row_stride, block, outputs, inputs, to);
  });
  return fine;
}

// [outputs] rows of a file's blocks to blocks of that format, `stride` bytes apart. `grid`: of the format (`blocks.h`), null for none.
QB_API void qb_repack(int32_t format, const uint8_t* grid, const uint8_t* rows, int64_t outputs, int64_t inputs, int64_t row_bytes, uint8_t* blocks,
                      int64_t stride) {
  qb::share_out((outputs + 15) / 16, [&](int64_t block) {
    const int64_t first = block * 16;
    qb::repack(format, grid, rows + first * row_bytes, row_bytes, std::min<int64_t>(16, outputs - first), inputs, blocks + block * stride);
  });
}

// A checkpoint's weight to rows of a file's blocks. Gives whether all values are finite.
QB_API int64_t qb_to_blocks(const qb::StoredWeight* weight, uint8_t* rows) {
  std::atomic<int64_t> fine{1};
  constexpr int64_t MOST = qb::StoredWeight::MOST;
  qb::share_out((weight->outputs + MOST - 1) / MOST, [&](int64_t part) {
    if (!weight->to_blocks(part * MOST, std::min(weight->outputs, (part + 1) * MOST), rows)) fine = 0;
  });
  return fine;
}

// The numbers that blocks of few bits stand for, [outputs, inputs].
QB_API void qb_dense(int32_t format, const uint8_t* blocks, int64_t outputs, int64_t inputs, int64_t stride, float* to) {
  qb::share_out(outputs, [&](int64_t o) { qb::dense(format, blocks + o / 16 * stride, inputs, o % 16, to + o * inputs); });
}

// Rows `token` [count] of `weight` into places `first` on of a packed weight, of bfloat16 or INT8.
QB_API void qb_put(int32_t format, const uint16_t* weight, int64_t inputs, const int64_t* token, int64_t count, int64_t first, void* packed) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t block = (first + i) / 16, lane = (first + i) % 16;
    if (format == qb::INT8) {
      qb::put_whole(weight + token[i] * inputs, inputs, lane, static_cast<uint8_t*>(packed) + block * qb::block_bytes(format, inputs));
      continue;
    }
    uint16_t* to = static_cast<uint16_t*>(packed) + block * inputs * 16 + lane * 2;
    for (int64_t k = 0; k < inputs; k += 2) std::memcpy(to + k * 16, weight + token[i] * inputs + k, 4);
  }
}

// Back from it: `weight` [outputs, inputs].
QB_API void qb_unpack(const uint16_t* packed, int64_t outputs, int64_t inputs, int64_t stride, uint16_t* weight) {
  for (int64_t o = 0; o < outputs; ++o)
    for (int64_t i = 0; i < inputs; ++i) weight[o * inputs + i] = packed[o / 16 * stride + i / 2 * 32 + o % 16 * 2 + i % 2];
}

// Tokens from one order to another, in all of `layers` layers: shapes [layers] of kv_heads, key_dim, value_dim, offset. `wide`: of float32.
QB_API void qb_move(void* const* pages, const int64_t* shapes, int64_t layers, const int64_t* from, const int64_t* to, int64_t count, int64_t wide) {
  for (int64_t l = 0; l < layers; ++l) {
    const qb::KVShape kv{shapes[4 * l], shapes[4 * l + 1], shapes[4 * l + 2], shapes[4 * l + 3]};
    for (int64_t i = 0; i < count; ++i)
      if (wide) qb::move_token<float>(pages, kv, from[i], to[i]);
      else qb::move_token<qb::bf16>(pages, kv, from[i], to[i]);
  }
}

// The state behind `count` nodes of a path, of all recurrences.
QB_API void qb_fold(const qb::Recurrence* recurrences, int64_t recurring, const float* state, const float* inputs, const int64_t* path, int64_t count,
             float* next) {
  int64_t units = 0;  // few of them are folded sooner than threads meet
  for (int64_t i = 0; i < recurring; ++i) units += recurrences[i].units();
  const auto fold = [&](int64_t i) { qb::fold(recurrences[i], state, inputs, path, count, next); };
  if (units > 64) return qb::share_out(recurring, fold);
  for (int64_t i = 0; i < recurring; ++i) fold(i);
}

// Keys [kv_heads][count][key_dim] and values of the first `count` orders of one layer, as plain rows.
QB_API void qb_read(void* const* pages, const int64_t* shape, int64_t count, void* keys, void* values, int64_t wide) {
  const qb::KVShape kv{shape[0], shape[1], shape[2], shape[3]};
  if (wide) qb::read_tokens(pages, kv, count, static_cast<float*>(keys), static_cast<float*>(values));
  else qb::read_tokens(pages, kv, count, static_cast<qb::bf16*>(keys), static_cast<qb::bf16*>(values));
}

QB_API void qb_philox(const uint64_t* counter, int64_t n, uint32_t key0, uint32_t key1, uint64_t* words) {
  qb::philox(counter, n, key0, key1, words);
}

QB_API void qb_find_peaks(const qb::NoiseRow* noise) { noise->find_peaks(); }

QB_API int64_t qb_largest(const float* row, int64_t vocab, const qb::NoiseRow* noise, double scale) { return qb::largest(row, vocab, *noise, scale); }

QB_API int64_t qb_perturb(const float* row, int64_t columns, const int64_t* token, const qb::NoiseRow* noise, double lowest, double floor, double temperature,
                   double cut, int64_t wanted, int64_t* name, double* probs) {
  return qb::perturb(row, columns, token, *noise, lowest, floor, temperature, cut, wanted, name, probs);
}

QB_API int64_t qb_ranked(const float* row, int64_t count, const int64_t* token, int64_t most, float floor, int64_t* name, float* number) {
  return qb::ranked(row, count, token, most, floor, name, number);
}

QB_API int64_t qb_candidates(const float* scores, int64_t rows, int64_t stride, int64_t count, const int64_t* token, float within, int64_t* name,
                     float* to) {
  return qb::candidates(scores, rows, stride, count, token, within, name, to);
}

QB_API void qb_follow(const float* scores, int64_t count, const int64_t* token, const uint16_t* before, const uint16_t* after, int64_t rank,
              float* to) {
  qb::follow(scores, count, token, before, after, rank, to);
}
