// Products of bfloat16 rows with weights of float8 numbers (E4M3: a sign, four bits of an exponent, three behind the point; no infinity).
//
// Groups of 32 numbers of 16 outputs stand input by input, [32][16]. A number becomes float32, exactly; the products of the inputs that share a
// scale are added first to last, each fused; the sums, scaled, first to last. So a row's bits don't depend on the other rows.
#pragma once
#include <algorithm>
#include <vector>

#include "formats.h"
#include "product.h"

namespace qb {

// 2^-8 times a number: its bits, moved, are those of half precision, numbers below the smallest normal one included.
constexpr float FLOAT8_BY = 256.0f;
inline uint16_t float8_as_half(uint8_t x) { return uint16_t((x & 0x7f) << 7 | (x & 0x80) << 8); }
inline Lanes load_float8(const uint8_t* p) {
  uint16_t halves[16];
  for (int i = 0; i < 16; ++i) halves[i] = float8_as_half(p[i]);
  return load_half_floats(halves);
}
inline float float8(uint8_t x) {
  const uint8_t same[16] = {x};
  float v[16];
  store(v, load_float8(same));
  return v[0] * FLOAT8_BY;
}

// R rows, x_stride apart, on B blocks of 16 outputs, w_stride bytes apart, to y. `ahead`: of which `lines` of 64 bytes are fetched meanwhile.
template <int R, int B>
static void float8_tile(const Layout& of, const float* x, int64_t x_stride, const uint8_t* w, int64_t w_stride, int64_t inputs, float* y,
                        int64_t y_stride, const char* ahead, int64_t lines) {
  const int64_t groups = groups_of(inputs), shared = shared_by(of.scales), count = (groups + shared - 1) / shared;
  Lanes f[R][B];
  for (auto& of_row : f)
    for (Lanes& sum : of_row) sum = zero();
  for (int64_t k = 0; k < count; ++k) {
    for (int64_t l = lines * k / count; l < lines * (k + 1) / count; ++l) QB_PREFETCH(ahead + l * 64);
    Lanes s[R][B];
    for (auto& of_row : s)
      for (Lanes& sum : of_row) sum = zero();
    const int64_t first = k * shared * GROUP, eight = k * shared / SUPER_GROUPS * SUPER_GROUPS;
    const uint8_t *values = w + group_place(of, k * shared), *scales = w + scales_place(of, groups, eight);
    for (int64_t i = first; i < std::min(inputs, first + shared * GROUP); ++i) {
      Lanes v[B];
      for (int b = 0; b < B; ++b) v[b] = load_float8(values + b * w_stride + (i - first) * 16);
      for (int r = 0; r < R; ++r) {
        const Lanes q = all(x[r * x_stride + i]);
        for (int b = 0; b < B; ++b) s[r][b] = fma(q, v[b], s[r][b]);
      }
    }
    for (int b = 0; b < B; ++b) {
      const Lanes by = mul(load(reinterpret_cast<const float*>(scales + b * w_stride) + (k - eight / shared) * 16), all(FLOAT8_BY));
      for (int r = 0; r < R; ++r) f[r][b] = add(f[r][b], mul(s[r][b], by));
    }
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) store(y + r * y_stride + b * 16, f[r][b]);
}

using Float8Tile = void (*)(const Layout&, const float*, int64_t, const uint8_t*, int64_t, int64_t, float*, int64_t, const char*, int64_t);

// What fits the registers: by rows, how many blocks of outputs side by side.
#ifdef QB_ZMM
constexpr int MOST_FLOAT8 = 8;
constexpr int WIDEST_FLOAT8[MOST_FLOAT8 + 1] = {0, 4, 4, 2, 2, 2, 1, 1, 1};
#else
constexpr int MOST_FLOAT8 = 3;
constexpr int WIDEST_FLOAT8[MOST_FLOAT8 + 1] = {0, 2, 1, 1};
#endif

template <int R = 1, int B = 1>
static Float8Tile float8_tile_for(int64_t rows, int64_t blocks) {
  if constexpr (R < MOST_FLOAT8)
    if (rows > R) return float8_tile_for<R + 1>(rows, blocks);
  if constexpr (B < WIDEST_FLOAT8[R])
    if (blocks > B) return float8_tile_for<R, B + 1>(rows, blocks);
  return float8_tile<R, B>;
}

// As `panels` of product.h.
template <class Each, class Done>
static void float8_panels(int32_t format, const bf16* x, int64_t x_stride, int64_t rows, const void* weight, int64_t inputs, Each each, bool even,
                          float* sums, Done done) {
  constexpr int64_t MOST = 1 << 19, GAP = 16;  // bytes that widened rows may take, about; numbers between two of them
  static thread_local std::vector<float> widened;
  const int64_t stride = inputs + GAP, most_rows = std::max<int64_t>(16, MOST / (4 * stride));
  for (int64_t begin = 0; begin < rows; begin += most_rows) {
    const Parts parts(std::min(most_rows, rows - begin), MOST_FLOAT8);
    if (int64_t(widened.size()) < parts.rows * stride) widened.resize(size_t(parts.rows * stride));
    float* taken = widened.data();
    for (int64_t r = 0; r < parts.rows; ++r)
      for (int64_t i = 0; i < inputs; i += 16) store(taken + r * stride + i, load(x + (begin + r) * x_stride + i));
    const int64_t block_stride = block_bytes(format, inputs);
    const auto tile = [&](int64_t low, int64_t count, const char* block, int64_t blocks, float* to, int64_t to_stride, const char* ahead,
                          int64_t lines) {
      float8_tile_for(count, blocks)(LAYOUTS[format], taken + low * stride, stride, reinterpret_cast<const uint8_t*>(block), block_stride, inputs, to,
                                     to_stride, ahead, lines);
    };
    const auto made = [&](int64_t low, int64_t count, int64_t block, int64_t blocks, const float* from, int64_t from_stride) {
      done(begin + low, count, block, blocks, from, from_stride);
    };
    walk_panels(parts, WIDEST_FLOAT8, weight, block_stride, each, even, sums, tile, made);
  }
}

}  // namespace qb
