// A pass as a list of operations over the rows of a batch, carried out in one call by all threads. Operations name their buffers by number;
// who calls says where each buffer is. Python makes the lists (`program.py`, with the same structures) and holds every operation
// to a plain reference (`reference.py`).
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <thread>
#include <vector>

#include "attention.h"
#include "noise.h"
#include "quantised.h"
#include "ranking.h"

#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(QB_AMX) && !defined(QB_AMX_EMULATED)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace qb {

enum Kind : int32_t { EMBED, NORM, LINEAR, HEADS, SPLIT, ATTEND, COPY, CHOSEN };
enum Epilogue : int32_t { STORE, ADD, GATED, ACTIVATE, BEST };

// One operation. Buffers are numbers into the caller's table, -1 for none. Strides, offsets and sizes are in numbers, not bytes.
struct Op {
  int32_t kind, epilogue;
  int32_t source, target, best;             // buffers; best: [wanted] int64, of BEST
  int32_t source_float, target_float;       // float32 instead of bfloat16
  int32_t wanted;                           // over the wanted rows: 1 gathers them from the source, 2 finds them gathered
  int64_t source_stride, source_offset, target_stride, target_offset;
  const void *weight, *bias;                // bias: float32
  int64_t inputs, outputs;
  int64_t heads, kv_heads, head_dim, value_dim;
  const void *query_norm, *key_norm;        // bfloat16 [head_dim]
  int64_t offset, window;                   // of the layer in a page
  const float* sinks;
  float epsilon, scaling, softcap;
  int32_t key, value;                       // buffers of SPLIT
  int32_t format;                           // of LINEAR's weight
  int64_t query_stride, key_stride, key_head, value_stride, value_head;  // of SPLIT: numbers between rows and heads
};

struct Call {
  Batch batch;
  void* const* buffer;
  const int64_t* block;  // CHOSEN: which blocks of 16 outputs, in the order of the results
  int64_t blocks;
};

using Clock = std::chrono::steady_clock;

// Threads of one call wait for each other here: a short spin, then they give way, so that a busy machine is not held up. `lost`: the time of
// long waits, as for a thread whose core does other work.
// Bytes that a thread will soon read.
struct Ahead {
  const char *next = nullptr, *end = nullptr;
};

class Meeting {
 public:
  explicit Meeting(int threads) : threads_(threads) {}
  // Who has to wait fetches from `ahead` meanwhile.
  void wait(Ahead& ahead) {
    if (threads_ == 1) return;
    const uint32_t turn = turn_.load(std::memory_order_acquire);
    if (count_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      count_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; spins < 4000; ++spins) {
      if (turn_.load(std::memory_order_acquire) != turn) return;
      if (ahead.next < ahead.end) {
        QB_PREFETCH(ahead.next);
        ahead.next += 64;
        continue;
      }
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    const Clock::time_point began = Clock::now();
    while (turn_.load(std::memory_order_acquire) == turn) std::this_thread::yield();
    const Clock::duration waited = Clock::now() - began;
    if (waited > std::chrono::milliseconds(1)) lost_.fetch_add(waited.count(), std::memory_order_relaxed);
  }
  Clock::duration lost() const { return Clock::duration(lost_.load()); }

 private:
  std::atomic<Clock::rep> lost_{0};
  const int threads_;
  alignas(64) std::atomic<int> count_{0};
  alignas(64) std::atomic<uint32_t> turn_{0};
};

struct Scratch {  // grows with use, kept by the thread that calls
  std::vector<float> scores, sums, peaks;
  std::vector<Entry> weights;
  std::vector<int64_t> best, waves;
  std::vector<QueryTile> tiles;
};

class Worker {
 public:
  Worker(const Call& call, Scratch& scratch, Meeting& meeting, int64_t thread, int64_t threads)
      : call_(call), batch_(call.batch), scratch_(scratch), meeting_(meeting), thread_(thread), threads_(threads) {}

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
        case CHOSEN: chosen(op); break;
        case HEADS: heads(op); break;
        case SPLIT: split(op); break;
        case ATTEND: attend(op); break;
        case COPY: copy(op); break;
      }
      meet();
    }
#ifdef QB_AMX
    release_tiles();
#endif
  }

 private:
  const Call& call_;
  const Batch& batch_;
  Scratch& scratch_;
  Meeting& meeting_;
  const int64_t thread_, threads_;
  int64_t rows_ = 0;              // of BEST
  const Op* planned_ = nullptr;   // whose tiles of queries the scratch holds
  Ahead ahead_;                   // of the next product's weight
  alignas(64) float sums_[PANEL];

  template <class T>
  T* at(int32_t buffer) const {
    return static_cast<T*>(call_.buffer[buffer]);
  }
  int64_t rows(const Op& op) const { return op.wanted ? batch_.wanted : batch_.rows; }
  int64_t low(int64_t n) const { return n * thread_ / threads_; }
  int64_t high(int64_t n) const { return n * (thread_ + 1) / threads_; }

  void meet() { meeting_.wait(ahead_); }

  // The blocks of a product that this thread makes; those of gates go in twos.
  struct Blocks {
    int64_t first, last, step;
  };
  Blocks share(const Op& op) const {
    const int64_t step = op.epilogue == GATED ? 2 : 1, pairs = (op.outputs / step + 15) / 16;
    return {low(pairs) * step, high(pairs) * step, step};
  }

  // The first weights that this thread reads of a product, as many as stay in its second cache until then.
  Ahead first_read(const Op& op) const {
    constexpr int64_t MOST = 1 << 17;
    const Blocks blocks = share(op);
    const int64_t bytes = op.format == BFLOAT16 ? op.inputs * 32 : block_bytes(op.format, op.inputs);
    const char* begin = static_cast<const char*>(op.weight) + blocks.first * bytes;
    return {begin, begin + std::min(MOST, (blocks.last - blocks.first) * bytes)};
  }

  static float number(const Op& op, const void* base, int64_t at) {
    return op.source_float ? static_cast<const float*>(base)[at] : widen(static_cast<const bf16*>(base)[at]);
  }

  void embed(const Op& op) {  // target [rows] float32 or bfloat16 = weight[token]
    const bf16* table = static_cast<const bf16*>(op.weight);
    for (int64_t r = low(batch_.rows); r < high(batch_.rows); ++r) {
      const bf16* from = table + batch_.token[r] * op.inputs;
      const int64_t to = r * op.target_stride + op.target_offset;
      if (!op.target_float) std::memcpy(at<bf16>(op.target) + to, from, size_t(op.inputs) * 2);
      else
        for (int64_t i = 0; i < op.inputs; ++i) at<float>(op.target)[to + i] = widen(from[i]) * op.scaling;
    }
  }

  // x / sqrt(mean(x^2) + epsilon) * weight; squares in lanes of place % 16.
  static void normalise(const float* x, float* y, int64_t n, float epsilon, const bf16* weight) {
    Lanes squares = zero();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) squares = fma(load(x + i), load(x + i), squares);
    if (i < n) squares = fma(load_first(x + i, n - i), load_first(x + i, n - i), squares);
    const float factor = 1.0f / std::sqrt(sum(squares) / float(n) + epsilon);
    for (i = 0; i < n; ++i) y[i] = x[i] * factor;
    if (weight)
      for (i = 0; i < n; ++i) y[i] *= widen(weight[i]);
  }

  void norm(const Op& op) {
    std::vector<float> x(size_t(op.inputs));
    for (int64_t r = low(rows(op)); r < high(rows(op)); ++r) {
      const int64_t from = (op.wanted == 1 ? batch_.want[r] : r) * op.source_stride + op.source_offset;
      const float* in = x.data();
      if (op.source_float) in = at<float>(op.source) + from;
      else
        for (int64_t i = 0; i < op.inputs; ++i) x[size_t(i)] = widen(at<bf16>(op.source)[from + i]);
      normalise(in, x.data(), op.inputs, op.epsilon, static_cast<const bf16*>(op.weight));
      const int64_t to = r * op.target_stride + op.target_offset;
      if (op.target_float) std::copy(x.begin(), x.end(), at<float>(op.target) + to);
      else narrow_all(x.data(), at<bf16>(op.target) + to, op.inputs);
    }
  }

  static void narrow_all(const float* x, bf16* y, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(y + i, load(x + i));
    for (; i < n; ++i) y[i] = narrow(x[i]);
  }

  void copy(const Op& op) {  // and, with ADD, added to what is there
    for (int64_t r = low(rows(op)); r < high(rows(op)); ++r) {
      const int64_t from = (op.wanted == 1 ? batch_.want[r] : r) * op.source_stride + op.source_offset, to = r * op.target_stride + op.target_offset;
      for (int64_t i = 0; i < op.inputs; ++i) {
        const float x = number(op, call_.buffer[op.source], from + i);
        if (op.epilogue == ADD) at<float>(op.target)[to + i] += x;
        else if (op.target_float) at<float>(op.target)[to + i] = x;
        else at<bf16>(op.target)[to + i] = narrow(x);
      }
    }
  }

  template <class Each, class Done>
  void product(const Op& op, int64_t n, Each each, bool even, Done done) {
    const bf16* x = at<bf16>(op.source) + op.source_offset;
    if (op.format != BFLOAT16) quantised_panels(op.format, x, op.source_stride, n, op.weight, op.inputs, each, even, sums_, done);
    else panels(x, op.source_stride, n, static_cast<const bf16*>(op.weight), op.inputs, each, even, sums_, done);
  }

  void linear(const Op& op) {
    const Blocks blocks = share(op);
    const int64_t n = rows(op);
    if (op.epilogue == BEST) start_best(n);
    const auto done = [&](int64_t row, int64_t count, int64_t block, int64_t some, const float* sums, int64_t stride) {
      for (int64_t r = 0; r < count; ++r) finish(op, row + r, block, some, sums + r * stride);
    };
    product(op, n, [&](auto panel) { panel(blocks.first, blocks.last); }, blocks.step == 2, done);
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
        put(op, row, to, count, mul(silu(gate), up));
      }
      return;
    }
    for (int64_t b = 0; b < some; ++b) {
      const int64_t to = (block + b) * 16, count = std::min<int64_t>(16, op.outputs - to);
      Lanes y = load(sums + b * 16);
      if (bias) y = add(y, load_first(bias + to, count));
      if (op.epilogue == ACTIVATE) y = silu(y);
      if (op.epilogue == ADD) {
        float* p = at<float>(op.target) + row * op.target_stride + op.target_offset + to;
        store_first(p, add(load_first(p, count), y), count);
        continue;
      }
      put(op, row, to, count, y);
      if (op.epilogue == BEST) note_best(row, to, count, y);
    }
  }

  static Lanes silu(Lanes x) { return div(x, add(all(1.0f), exponential(sub(zero(), x)))); }

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

  // The largest result of each row: by thread, then over threads; in a tie the first. -1 where a result is NaN or the largest infinite.
  void start_best(int64_t n) {
    rows_ = n;
    if (thread_ == 0) {
      scratch_.peaks.assign(size_t(n * threads_), -INFINITY);
      scratch_.best.assign(size_t(n * threads_), 0);
    }
    meet();
  }

  void note_best(int64_t row, int64_t column, int64_t count, Lanes y) {
    float& top = scratch_.peaks[size_t(thread_ * rows_ + row)];
    float v[16];
    if (count < 16) {
      store(v, y);
      for (int64_t i = count; i < 16; ++i) v[i] = -INFINITY;
      y = load(v);
    }
    if (!any_above(y, top) || top != top) return;
    store(v, y);
    for (int64_t i = 0; i < count; ++i)
      if (v[i] > top || v[i] != v[i]) top = v[i], scratch_.best[size_t(thread_ * rows_ + row)] = column + i;
  }

  void finish_best(const Op& op, int64_t n) {
    meet();
    for (int64_t r = low(n); r < high(n); ++r) {
      int64_t best = scratch_.best[size_t(r)];
      float top = scratch_.peaks[size_t(r)];
      for (int64_t t = 1; t < threads_; ++t) {
        const float other = scratch_.peaks[size_t(t * n + r)];
        if (other > top || other != other) top = other, best = scratch_.best[size_t(t * n + r)];
      }
      at<int64_t>(op.best)[r] = std::isfinite(top) ? best : -1;
    }
  }

  // A product with chosen blocks of the weight; results side by side in the order they are named.
  void chosen(const Op& op) {
    const int64_t n = rows(op);
    int64_t shift = 0;  // from a block's number to its place in the results
    const auto ranges = [&](auto panel) {
      for (int64_t i = low(call_.blocks), end = high(call_.blocks); i < end;) {  // blocks that follow one another go together
        int64_t j = i + 1;
        while (j < end && call_.block[j] == call_.block[j - 1] + 1) ++j;
        shift = i - call_.block[i];
        panel(call_.block[i], call_.block[j - 1] + 1);
        i = j;
      }
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

  // The sequence of a row; rows come in order, so the search goes on from the last one's.
  const Span& span_of(int64_t row, int64_t& s) const {
    while (row >= batch_.span[s].row + batch_.span[s].rows) ++s;
    return batch_.span[s];
  }

  static KVShape kv_of(const Op& op) { return {op.kv_heads, op.head_dim, op.value_dim, op.offset}; }

  // Queries, keys and values side by side in float32: norms, rotary angles (the first half of a head turns with the second), then queries
  // to `target` [kv_heads][rows][group][head_dim], keys and values to their page.
  void heads(const Op& op) {
    const int64_t dim = op.head_dim, half = dim / 2, all_heads = op.heads + 2 * op.kv_heads, group = op.heads / op.kv_heads;
    const KVShape kv = kv_of(op);
    std::vector<float> x(size_t(std::max(dim, op.value_dim)));
    std::vector<bf16> y(x.size());
    int64_t span = 0;
    for (int64_t unit = low(batch_.rows * all_heads); unit < high(batch_.rows * all_heads); ++unit) {
      const int64_t r = unit / all_heads, h = unit % all_heads;
      const float* from = at<float>(op.source) + r * op.source_stride + op.source_offset + h * dim;
      bf16* page = span_of(r, span).pages[batch_.order[r] / PAGE];
      if (h >= op.heads + op.kv_heads) {
        narrow_all(from, y.data(), dim);
        write_value(page, kv, h - op.heads - op.kv_heads, batch_.order[r], y.data());
        continue;
      }
      const void* weight = h < op.heads ? op.query_norm : op.key_norm;
      std::copy(from, from + dim, x.begin());
      if (weight) normalise(x.data(), x.data(), dim, op.epsilon, static_cast<const bf16*>(weight));
      const float *cosine = batch_.cosine + batch_.position[r] * half, *sine = batch_.sine + batch_.position[r] * half;
      for (int64_t i = 0; i < half; ++i) {
        const float a = x[size_t(i)], b = x[size_t(i + half)];
        x[size_t(i)] = a * cosine[i] - b * sine[i];
        x[size_t(i + half)] = b * cosine[i] + a * sine[i];
      }
      if (h < op.heads) {
        narrow_all(x.data(), at<bf16>(op.target) + ((h / group * batch_.rows + r) * group + h % group) * dim, dim);
      } else {
        narrow_all(x.data(), y.data(), dim);
        write_key(page, kv, h - op.heads, batch_.order[r], y.data());
      }
    }
  }

  // The same for heads that come apart, turned already, in bfloat16: queries (`source`), `key`, `value`, each with its own strides.
  void split(const Op& op) {
    const int64_t group = op.heads / op.kv_heads, all_heads = op.heads + 2 * op.kv_heads;
    const KVShape kv = kv_of(op);
    int64_t span = 0;
    for (int64_t unit = low(batch_.rows * all_heads); unit < high(batch_.rows * all_heads); ++unit) {
      const int64_t r = unit / all_heads, h = unit % all_heads;
      bf16* page = span_of(r, span).pages[batch_.order[r] / PAGE];
      if (h < op.heads) {
        const bf16* from = at<bf16>(op.source) + r * op.query_stride + h * op.head_dim;
        std::memcpy(at<bf16>(op.target) + ((h / group * batch_.rows + r) * group + h % group) * op.head_dim, from, size_t(op.head_dim) * 2);
      } else if (h < op.heads + op.kv_heads) {
        write_key(page, kv, h - op.heads, batch_.order[r], at<bf16>(op.key) + r * op.key_stride + (h - op.heads) * op.key_head);
      } else {
        const int64_t v = h - op.heads - op.kv_heads;
        write_value(page, kv, v, batch_.order[r], at<bf16>(op.value) + r * op.value_stride + v * op.value_head);
      }
    }
  }

  void attend(const Op& op) {
    const AttentionShape shape{kv_of(op), op.heads, op.window, op.scaling, op.softcap, op.sinks};
    Attention attention(shape, batch_, at<bf16>(op.source), at<bf16>(op.target), scratch_.scores, scratch_.weights, scratch_.sums);
    const bool fresh = !planned_ || planned_->window != op.window || planned_->heads != op.heads || planned_->kv_heads != op.kv_heads;
    planned_ = &op;
    attention.run(thread_, threads_, fresh, [this] { meet(); }, scratch_.tiles, scratch_.waves);
  }
};

}  // namespace qb

extern "C" {

// Bumped whenever a structure changes; Python refuses a library that was made for another.
int64_t qb_version() { return 8; }
int64_t qb_size_of_op() { return int64_t(sizeof(qb::Op)); }
int64_t qb_page() { return qb::PAGE; }

// Whether this process may use the instruction set that this library was made for, as far as it has to be asked for.
int64_t qb_allowed() {
#if defined(QB_AMX) && !defined(QB_AMX_EMULATED)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, tile data
#else
  return 1;
#endif
}

void qb_run(const qb::Op* ops, int64_t count, const qb::Call* call, int64_t threads) {
  static thread_local qb::Scratch scratch;
  qb::Scratch& mine = scratch;
#ifdef _OPENMP
  // Where other work holds a core, threads that meet after every operation wait more than they work: then the next calls go alone, two at
  // first, as a moment's work is soon over, and ever more where it is not.
  static thread_local int64_t alone_for = 0, longer = 2;
  if (threads > 1 && !omp_in_parallel() && --alone_for < 0) {
    const int wished = int(std::min<int64_t>(threads, omp_get_max_threads()));
    const qb::Clock::time_point began = qb::Clock::now();
    std::unique_ptr<qb::Meeting> meeting;
#pragma omp parallel num_threads(wished)
    {
#pragma omp single
      meeting = std::make_unique<qb::Meeting>(omp_get_num_threads());
      qb::Worker(*call, mine, *meeting, omp_get_thread_num(), omp_get_num_threads()).run(ops, count);
    }
    const bool busy = meeting->lost() * 2 > qb::Clock::now() - began;
    if (busy) alone_for = longer;
    longer = busy ? std::min<int64_t>(2 * longer, 512) : 2;
    return;
  }
#endif
  qb::Meeting alone(1);
  qb::Worker(*call, mine, alone, 0, 1).run(ops, count);
}

// [outputs, inputs] bfloat16 to [ceil(outputs / 16)][inputs / 2][16][2], zeros where the weight ends; blocks `stride` apart.
void qb_pack(const uint16_t* weight, int64_t outputs, int64_t inputs, int64_t row_stride, uint16_t* packed, int64_t stride) {
  constexpr int64_t PART = 256;  // pairs at a time, so that what is written stays in the cache
#ifdef _OPENMP
#pragma omp parallel for schedule(static)
#endif
  for (int64_t block = 0; block < (outputs + 15) / 16; ++block)
    for (int64_t part = 0; part < inputs / 2; part += PART)
      for (int64_t lane = 0; lane < 16; ++lane) {
        const int64_t o = block * 16 + lane, end = std::min(inputs / 2, part + PART);
        uint16_t* to = packed + block * stride + lane * 2;
        for (int64_t k = part; k < end; ++k) {
          if (o < outputs) std::memcpy(to + k * 32, weight + o * row_stride + 2 * k, 4);
          else std::memset(to + k * 32, 0, 4);
        }
      }
}

// Bytes of a block of 16 outputs in a format of quantised.h.
int64_t qb_block_bytes(int32_t format, int64_t inputs) { return qb::block_bytes(format, inputs); }

// [outputs, inputs] bfloat16 to blocks of that format, `stride` bytes apart. Gives whether all weights are finite.
int64_t qb_quantise(int32_t format, const uint16_t* weight, int64_t outputs, int64_t inputs, int64_t row_stride, uint8_t* blocks,
                    int64_t stride) {
  int64_t fine = 1;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) reduction(&& : fine)
#endif
  for (int64_t block = 0; block < (outputs + 15) / 16; ++block) {
    uint8_t* to = blocks + block * stride;
    std::memset(to, 0, size_t(qb::block_bytes(format, inputs)));
    fine = fine && qb::finite(weight, row_stride, block, outputs, inputs);
    if (format == qb::INT8) qb::quantise_whole(weight, row_stride, block, outputs, inputs, to);
    else qb::quantise_halves(weight, row_stride, block, outputs, inputs, to);
  }
  return fine;
}

// Rows `token` [count] of `weight` into places `first` on of a packed weight, of bfloat16 or INT8.
void qb_put(int32_t format, const uint16_t* weight, int64_t inputs, const int64_t* token, int64_t count, int64_t first, void* packed) {
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
void qb_unpack(const uint16_t* packed, int64_t outputs, int64_t inputs, int64_t stride, uint16_t* weight) {
  for (int64_t o = 0; o < outputs; ++o)
    for (int64_t i = 0; i < inputs; ++i) weight[o * inputs + i] = packed[o / 16 * stride + i / 2 * 32 + o % 16 * 2 + i % 2];
}

// Tokens from one order to another, in all of `layers` layers: shapes [layers] of kv_heads, key_dim, value_dim, offset.
void qb_move(uint16_t* const* pages, const int64_t* shapes, int64_t layers, const int64_t* from, const int64_t* to, int64_t count) {
  for (int64_t l = 0; l < layers; ++l) {
    const qb::KVShape kv{shapes[4 * l], shapes[4 * l + 1], shapes[4 * l + 2], shapes[4 * l + 3]};
    for (int64_t i = 0; i < count; ++i) qb::move_token(pages, kv, from[i], to[i]);
  }
}

// Keys [kv_heads][count][key_dim] and values of the first `count` orders of one layer, as plain rows.
void qb_read(uint16_t* const* pages, const int64_t* shape, int64_t count, uint16_t* keys, uint16_t* values) {
  const qb::KVShape kv{shape[0], shape[1], shape[2], shape[3]};
  for (int64_t h = 0; h < kv.kv_heads; ++h)
    for (int64_t o = 0; o < count; ++o) {
      const qb::bf16 *page = pages[o / qb::PAGE], s = qb::bf16(o % qb::PAGE);
      const qb::bf16* k = kv.key_page(page, h) + s / 16 * 16 * kv.key_dim + s % 16 * 2;
      const qb::bf16* v = kv.value_page(page, h) + s / 2 * 32 + s % 2;
      for (int64_t i = 0; i < kv.key_dim; ++i) keys[(h * count + o) * kv.key_dim + i] = k[i / 2 * 32 + i % 2];
      for (int64_t i = 0; i < kv.value_dim; ++i) values[(h * count + o) * kv.value_dim + i] = v[i / 16 * qb::PAGE * 16 + i % 16 * 2];
    }
}

void qb_philox(const uint64_t* counter, int64_t n, uint32_t key0, uint32_t key1, uint64_t* words) {
  qb::philox(counter, n, key0, key1, words);
}

void qb_find(const qb::Luck* luck) { luck->find(); }

int64_t qb_largest(const float* row, int64_t vocab, const qb::Luck* luck, double scale) { return qb::largest(row, vocab, *luck, scale); }

int64_t qb_perturb(const float* row, int64_t columns, const int64_t* token, const qb::Luck* luck, double lowest, double floor, double temperature,
                   double cut, int64_t wanted, int64_t* name, double* chance) {
  return qb::perturb(row, columns, token, *luck, lowest, floor, temperature, cut, wanted, name, chance);
}

int64_t qb_ranked(const float* row, int64_t count, const int64_t* token, int64_t most, float floor, int64_t* name, float* number) {
  return qb::ranked(row, count, token, most, floor, name, number);
}

}  // extern "C"
