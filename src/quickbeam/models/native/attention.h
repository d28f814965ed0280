// Attention of the rows of several sequences over their pages of keys and values.
//
// A page holds PAGE tokens of every layer: of a layer, keys [kv_heads][PAGE / 16][key_dim / 2][16][2] (tokens are a product's outputs), then
// values [kv_heads][value_blocks][PAGE / 2][16][2] (tokens are its inputs); in float32, [key_dim][16] and [PAGE][16] at their ends. A token's
// *order* says where it lives: page order / PAGE.
//
// A row sees the orders below its `prefix`, and then its `path`: orders of the draft tree, ancestors first, itself last. In a layer whose rows
// see one another (`bidirectional`), which has no paths, it sees the orders below the prefix of its sequence's last row. In a layer that is
// `causal`, a row without a path sees none behind its own order, though its prefix, of an image's row, may have some. What it sees stands at
// positions 0, 1, 2, ... in that sequence, and every sum is taken by position: scores one by one, weights in lanes of position % 16, values
// pair by pair of positions (2i, 2i + 1). So the bits depend on the tokens seen alone, wherever they live.
#pragma once
#include <algorithm>
#include <vector>

#include "product.h"

namespace qb {

constexpr int64_t PAGE = 64;

struct Span {  // rows of one sequence
  int64_t row, rows;
  void* const* pages;
  const void* nodes;  // of recurrent.h; null where a model has no recurrent layers
};

struct Batch {
  int64_t rows, spans, wanted;
  const Span* span;
  const int64_t* token;      // [rows]
  const int64_t* position;   // [rows], of the rotary angles
  const int64_t* order;      // [rows], where a row's own key lives; of a row that has none, the last that it sees
  const int64_t* prefix;     // [rows]
  const int64_t* path_from;  // [rows + 1], into `path`
  const int64_t* path;
  const int64_t* want;  // [wanted]: rows that are gathered for the head
  const float* cosine;  // by position, `angle_stride` apart
  const float* sine;
  int64_t angle_stride;
};

struct KVShape {
  int64_t kv_heads, key_dim, value_dim, offset;  // offset: of this layer in a page, in numbers
  int64_t value_blocks() const { return (value_dim + 15) / 16; }
  int64_t keys() const { return kv_heads * PAGE * key_dim; }
};

// Where a layer's keys and values lie in a page of numbers T. INPUTS: those that stand side by side, of a product's inputs.
template <class T>
struct PageOf {
  static constexpr int64_t INPUTS = Reads<T>::INPUTS;
  T* at;  // the layer's
  const KVShape& kv;

  PageOf(void* page, const KVShape& kv) : at(static_cast<T*>(page) + kv.offset), kv(kv) {}
  T* keys(int64_t head) const { return at + head * PAGE * kv.key_dim; }
  T* values(int64_t head) const { return at + kv.keys() + head * kv.value_blocks() * PAGE * 16; }
  // The first number of a token's key, whose next INPUTS are 16 * INPUTS on; and of its value, which stand INPUTS apart, blocks PAGE * 16.
  T* key(int64_t head, int64_t slot) const { return keys(head) + slot / 16 * 16 * kv.key_dim + slot % 16 * INPUTS; }
  T* value(int64_t head, int64_t slot) const { return values(head) + slot / INPUTS * 16 * INPUTS + slot % INPUTS; }
  static int64_t of_value(int64_t i) { return i / 16 * PAGE * 16 + i % 16 * INPUTS; }

  void write_key(int64_t head, int64_t slot, const T* from) const {
    T* to = key(head, slot);
    for (int64_t i = 0; i < kv.key_dim; i += INPUTS) std::memcpy(to + i * 16, from + i, 4);
  }
  void write_value(int64_t head, int64_t slot, const T* from) const {
    T* to = value(head, slot);
    for (int64_t i = 0; i < kv.value_dim; ++i) to[of_value(i)] = from[i];
  }
};

template <class T>
void move_token(void* const* pages, const KVShape& kv, int64_t from, int64_t to) {
  const PageOf<T> a(pages[from / PAGE], kv), b(pages[to / PAGE], kv);
  for (int64_t head = 0; head < kv.kv_heads; ++head) {
    const T *k = a.key(head, from % PAGE), *v = a.value(head, from % PAGE);
    T *l = b.key(head, to % PAGE), *w = b.value(head, to % PAGE);
    for (int64_t i = 0; i < kv.key_dim; i += a.INPUTS) std::memcpy(l + i * 16, k + i * 16, 4);
    for (int64_t i = 0; i < kv.value_blocks() * 16; ++i) w[a.of_value(i)] = v[a.of_value(i)];
  }
}

// The first `count` tokens' keys [kv_heads][count][key_dim] and values.
template <class T>
void read_tokens(void* const* pages, const KVShape& kv, int64_t count, T* keys, T* values) {
  for (int64_t h = 0; h < kv.kv_heads; ++h)
    for (int64_t o = 0; o < count; ++o) {
      const PageOf<T> page(pages[o / PAGE], kv);
      const T *k = page.key(h, o % PAGE), *v = page.value(h, o % PAGE);
      for (int64_t i = 0; i < kv.key_dim; ++i) keys[(h * count + o) * kv.key_dim + i] = k[i / page.INPUTS * 16 * page.INPUTS + i % page.INPUTS];
      for (int64_t i = 0; i < kv.value_dim; ++i) values[(h * count + o) * kv.value_dim + i] = v[page.of_value(i)];
    }
}

struct AttentionShape {
  KVShape kv;
  int64_t heads, window;  // window 0: none
  float scaling, softcap;  // softcap 0: none
  const float* sinks;      // [heads], or null
  bool bidirectional;      // rows of a sequence see one another; a window begins where the row's own prefix has it begin
  bool causal;             // rows of an image see none behind themselves
};

// Rows of one sequence that share keys: the queries of a group of heads. Scratch is the tile's own.
struct QueryTile {
  const Span* span;
  int64_t head, row, rows, queries;  // row: in the batch; queries = rows * group
  int64_t begin, end;                // orders whose keys are read, begin a multiple of PAGE
  int64_t common;                    // positions below it (even) are read from pages by all rows
  int64_t scratch;                   // in numbers
  int64_t width() const { return end - begin; }
};

template <class T>
class Attention {
  using Weight = typename Reads<T>::X;

 public:
  static constexpr int64_t QUERIES = 48, ROWS = 16;
  static constexpr int64_t WAVE = 1 << 20;  // scores that tiles worked on together may have

  // query: [kv_heads][rows of the batch][group][key_dim]. Tiles go in waves, each in three phases that all threads share.
  Attention(const AttentionShape& shape, const Batch& batch, const T* query, T* out, std::vector<float>& scores, std::vector<Weight>& weights,
            std::vector<float>& sums)
      : shape_(shape), batch_(batch), query_(query), out_(out), group_(shape.heads / shape.kv.kv_heads), scores_(scores), weights_(weights),
        sums_(sums) {}

  template <class Sync>
  void run(int64_t thread, int64_t threads, bool fresh, Sync sync, std::vector<QueryTile>& tiles, std::vector<int64_t>& waves) {
    if (fresh) {  // the same for all layers of a pass that have the same shape
      if (thread == 0) plan(tiles, waves, threads);
      sync();
    }
    for (size_t w = 0; w + 1 < waves.size(); ++w) {
      const QueryTile *first = tiles.data() + waves[w], *last = tiles.data() + waves[w + 1];
      const auto pages = [](const QueryTile& t) { return t.width() / PAGE; };
      const auto queries = [](const QueryTile& t) { return t.queries; };
      share(first, last, thread, threads, pages, queries, [&](const QueryTile& t, int64_t i, int64_t j) { score(t, i, j); });
      sync();
      share(first, last, thread, threads, queries, pages, [&](const QueryTile& t, int64_t i, int64_t j) { weigh(t, i, j); });
      sync();
      const auto blocks = [this](const QueryTile&) { return shape_.kv.value_blocks(); };
      const auto all = [](const QueryTile& t) { return t.queries * t.width(); };
      share(first, last, thread, threads, blocks, all, [&](const QueryTile& t, int64_t i, int64_t j) { values(t, i, j); });
      sync();
    }
  }

 private:
  const AttentionShape& shape_;
  const Batch& batch_;
  const T* query_;
  T* out_;
  int64_t group_;
  std::vector<float>& scores_;
  std::vector<Weight>& weights_;
  std::vector<float>& sums_;

  int64_t prefix_of(const QueryTile& t, int64_t row) const {
    if (shape_.causal) return std::min(batch_.prefix[row], batch_.order[row] + 1);  // the prefix ends before the order of a row with a path
    return batch_.prefix[shape_.bidirectional ? t.span->row + t.span->rows - 1 : row];
  }
  int64_t path_length(int64_t row) const { return batch_.path_from[row + 1] - batch_.path_from[row]; }
  int64_t seen(const QueryTile& t, int64_t row) const { return prefix_of(t, row) + path_length(row); }
  // A window ends with the row itself, also where the row sees later ones of an image.
  int64_t first_seen(int64_t row) const {
    const int64_t path = path_length(row), end = path ? batch_.prefix[row] + path : batch_.order[row] + 1;
    return shape_.window ? std::max<int64_t>(0, end - shape_.window) : 0;
  }
  int64_t order_at(const QueryTile& t, int64_t row, int64_t position) const {
    const int64_t prefix = prefix_of(t, row);
    return position < prefix ? position : batch_.path[batch_.path_from[row] + position - prefix];
  }

  void plan(std::vector<QueryTile>& tiles, std::vector<int64_t>& waves, int64_t threads) {
    tiles.clear();
    waves.assign(1, 0);
    const int64_t most = std::max<int64_t>(1, std::min(ROWS, QUERIES / group_));
    int64_t used = 0, largest = 0;
    for (int64_t s = 0; s < batch_.spans; ++s) {
      const Span& span = batch_.span[s];
      for (int64_t r = 0; r < span.rows; r += most) {
        QueryTile t{&span, 0, span.row + r, std::min(most, span.rows - r), 0, INT64_MAX, 0, INT64_MAX, 0};
        t.queries = t.rows * group_;
        for (int64_t row = t.row; row < t.row + t.rows; ++row) {
          int64_t last = prefix_of(t, row);
          if (path_length(row)) last = std::max(last, batch_.path[batch_.path_from[row + 1] - 1] + 1);
          t.begin = std::min(t.begin, first_seen(row) / PAGE * PAGE);
          t.end = std::max(t.end, (last + PAGE - 1) / PAGE * PAGE);
          t.common = std::min(t.common, prefix_of(t, row) & ~int64_t(1));
        }
        t.begin = std::min(t.begin, t.common / PAGE * PAGE);
        for (t.head = 0; t.head < shape_.kv.kv_heads; ++t.head) {
          const int64_t size = t.queries * t.width();
          if (used && used + size > WAVE * threads) {
            waves.push_back(int64_t(tiles.size()));
            used = 0;
          }
          t.scratch = used;
          tiles.push_back(t);
          used += size;
          largest = std::max(largest, used);
        }
      }
    }
    waves.push_back(int64_t(tiles.size()));
    if (int64_t(scores_.size()) < largest) scores_.resize(size_t(largest));
    if (int64_t(weights_.size()) < largest) weights_.resize(size_t(largest));
    const size_t all = size_t(batch_.rows * shape_.heads);
    if (sums_.size() < all) sums_.resize(all);
  }

  // A thread's part of the tiles' units, each of which weighs as much as `weight` says: rows of prompts take longer than lone ones.
  template <class Count, class Weight, class Work>
  static void share(const QueryTile* first, const QueryTile* last, int64_t thread, int64_t threads, Count count, Weight weight, Work work) {
    int64_t total = 0;
    for (const QueryTile* t = first; t < last; ++t) total += count(*t) * weight(*t);
    const int64_t low = total * thread / threads, high = total * (thread + 1) / threads;
    int64_t at = 0;
    for (const QueryTile* t = first; t < last && at < high; ++t) {
      const int64_t n = count(*t), w = weight(*t);
      const int64_t i = std::min(n, (std::max(low - at, int64_t(0)) + w - 1) / w), j = std::min(n, (high - at + w - 1) / w);
      if (i < j) work(*t, i, j);
      at += n * w;
    }
  }

  // Query times key of every order in pages [first, last) from the tile's begin: lanes are orders, so what is hidden stays in its lane.
  void score(const QueryTile& t, int64_t first, int64_t last) {
    const int64_t dim = shape_.kv.key_dim;
    static thread_local Entries<T> entries;
    const Weight* q = entries.take(query_ + (t.head * batch_.rows + t.row) * group_ * dim, dim, t.queries, dim);
    for (int64_t p = first; p < last; ++p) {
      void* const* page = t.span->pages + t.begin / PAGE + p;
      const T* keys = PageOf<T>(*page, shape_.kv).keys(t.head);
      const T* next = p + 1 < last ? PageOf<T>(page[1], shape_.kv).keys(t.head) : nullptr;
      product(q, entries.stride(), t.queries, keys, dim * 16, dim, PAGE / 16, scores_.data() + t.scratch + p * PAGE, t.width(), next,
              next ? PAGE * dim * int64_t(sizeof(T)) / 64 : 0);
    }
  }

  // Scores to weights of positions, unnormalised, and their sums.
  void weigh(const QueryTile& t, int64_t first, int64_t last) {
    // With a cap, scores are scaled before it.
    const float before = shape_.softcap > 0 ? shape_.scaling / shape_.softcap : 1.0f, scale = shape_.softcap > 0 ? 1.0f : shape_.scaling;
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = t.row + i / group_, head = t.head * group_ + i % group_;
      const int64_t length = seen(t, row) - t.begin, skip = first_seen(row) - t.begin, prefix = prefix_of(t, row);
      float* s = scores_.data() + t.scratch + i * t.width();
      Weight* w = weights_.data() + t.scratch + i * t.width();
      // orders of a path never lie before positions
      for (int64_t p = prefix; p < t.begin + length; ++p) s[p - t.begin] = s[order_at(t, row, p) - t.begin];
      const int64_t padded = (length + 15) / 16 * 16;
      for (int64_t p = length; p < padded; ++p) s[p] = -INFINITY;
      for (int64_t p = 0; p < skip; ++p) s[p] = -INFINITY;
      if (shape_.softcap > 0)
        for (int64_t p = 0; p < padded; p += 16)
          store(s + p, hide(mul(hyperbolic_tangent(mul(load(s + p), all(before))), all(shape_.softcap)), s + p));
      Lanes high = all(-INFINITY);  // a NaN is no peak, but its weight is NaN, and so is the sum
      for (int64_t p = 0; p < padded; p += 16) high = greatest(load(s + p), high);
      float top = peak(high) * scale;
      const bool sink = shape_.sinks != nullptr;
      if (sink) top = std::max(top, shape_.sinks[head]);
      Lanes total = zero();
      for (int64_t p = 0; p < padded; p += 16) {
        Lanes e = exponential(fma(load(s + p), all(scale), all(-top)));
        total = add(total, e);
        store(w + p, e);
      }
      float whole = sum(total);
      if (sink) {
        float part[16];
        store(part, exponential(all(shape_.sinks[head] - top)));
        whole += part[0];
      }
      sums_[size_t(row * shape_.heads + head)] = whole;
    }
  }

  static Lanes hide(Lanes x, const float* before) {  // what was hidden stays hidden through the cap
    float v[16];
    store(v, x);
    for (int i = 0; i < 16; ++i)
      if (before[i] == -INFINITY) v[i] = -INFINITY;
    return load(v);
  }

  // Weighted values, blocks [first, last) of 16 dimensions.
  void values(const QueryTile& t, int64_t first, int64_t last) {
    float sums[PART * 4 * 16];
    for (int64_t b = first; b < last; b += 4)
      for (int64_t q = 0; q < t.queries; q += PART)
        part(t, q, std::min(PART, t.queries - q), b, std::min<int64_t>(4, last - b), sums, shape_.kv.value_dim);
  }

  static constexpr int64_t PART = 48;  // queries at a time

  void part(const QueryTile& t, int64_t first, int64_t queries, int64_t block, int64_t blocks, float* sums, int64_t dim) {
    const int64_t stride = blocks * 16, width = t.width();
    const Weight* w = weights_.data() + t.scratch + first * width;
    std::fill(sums, sums + queries * stride, 0.0f);
    for (int64_t at = t.begin; at < t.common; at += PAGE) {
      void* const* page = t.span->pages + at / PAGE;
      const T* values = PageOf<T>(*page, shape_.kv).values(t.head) + block * PAGE * 16;
      const T* next = at + PAGE < t.common ? PageOf<T>(page[1], shape_.kv).values(t.head) + block * PAGE * 16 : nullptr;
      step_product(w + at - t.begin, width, queries, values, PAGE * 16, std::min(PAGE, t.common - at) / Reads<T>::INPUTS, blocks, sums, stride,
                   true, next, next ? blocks * PAGE * int64_t(sizeof(T)) / 4 : 0);
    }
    for (int64_t i = 0, end; i < queries; i = end) {
      end = std::min(queries, ((first + i) / group_ + 1) * group_ - first);
      own(t, t.row + (first + i) / group_, end - i, w + i * width - t.begin, block, blocks, sums + i * stride);
    }
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t row = t.row + (first + i) / group_;
      const int64_t head = t.head * group_ + (first + i) % group_;
      const Lanes whole = all(sums_[size_t(row * shape_.heads + head)]);
      for (int64_t c = 0; c < blocks; ++c) {
        T result[16];
        store(result, div(load(sums + i * stride + c * 16), whole));
        const int64_t at = (block + c) * 16;
        std::memcpy(out_ + (row * shape_.heads + head) * dim + at, result, size_t(std::min<int64_t>(16, dim - at)) * sizeof(T));
      }
    }
  }

  // What a row sees from the tile's common positions on, for some queries of that row, whose weights are given by position. Pairs of values
  // that live apart are put side by side, as they stand in a page.
  void own(const QueryTile& t, int64_t row, int64_t queries, const Weight* weights, int64_t block, int64_t blocks, float* sums) {
    constexpr int64_t INPUTS = Reads<T>::INPUTS;
    alignas(64) T joined[4][PAGE * 16];
    const int64_t length = seen(t, row);
    const auto value = [&](int64_t order) {  // of 16 dimensions, and of the order beside it where two stand side by side
      const PageOf<T> page(t.span->pages[order / PAGE], shape_.kv);
      return page.values(t.head) + block * PAGE * 16 + order % PAGE / INPUTS * 16 * INPUTS;
    };
    for (int64_t from = std::max(t.common, first_seen(row) & ~int64_t(1)), to; from < length; from = to) {
      to = std::min(length, from + PAGE);
      for (int64_t p = from; p < to; p += INPUTS) {
        const int64_t a = order_at(t, row, p), b = INPUTS == 2 && p + 1 < length ? order_at(t, row, p + 1) : -1;
        const T *first = value(a), *second = b < 0 ? nullptr : value(b);
        for (int64_t c = 0; c < blocks; ++c) {
          T* place = joined[c] + (p - from) * 16;
          if constexpr (INPUTS == 1) std::memcpy(place, first + c * PAGE * 16, 64);
          else join(first + c * PAGE * 16, a & 1, second ? second + c * PAGE * 16 : nullptr, b & 1, place);
        }
      }
      // of an odd number of positions, the last pair's second weight and value are 0
      step_product(weights + from, t.width(), queries, static_cast<const T*>(joined[0]), PAGE * 16, (to - from + INPUTS - 1) / INPUTS, blocks,
                   sums, blocks * 16, true);
    }
  }
};

}  // namespace qb
