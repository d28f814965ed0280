// AMX: 16 rows of 32 inputs times 16 outputs in one instruction. `QB_AMX_EMULATED` replaces the instructions by plain C++, for tests elsewhere.
#pragma once
#include "simd.h"

#ifdef QB_AMX_EMULATED
namespace qb::emulated {
struct Tile {
  uint8_t bytes[16][64];
};
static thread_local Tile tiles[8];
static thread_local int rows_of[8];
inline void load(int t, const void* from, int64_t stride) {
  for (int r = 0; r < rows_of[t]; ++r) std::memcpy(tiles[t].bytes[r], static_cast<const char*>(from) + r * stride, 64);
}
inline void store(int t, void* to, int64_t stride) {
  for (int r = 0; r < rows_of[t]; ++r) std::memcpy(static_cast<char*>(to) + r * stride, tiles[t].bytes[r], 64);
}
inline void clear(int t) { std::memset(&tiles[t], 0, sizeof(Tile)); }
inline void dot(int c, int a, int b) {  // even and odd inputs apart, as the instruction's definition has it
  for (int r = 0; r < rows_of[c]; ++r) {
    float sums[16], even[16] = {}, odd[16] = {};
    std::memcpy(sums, tiles[c].bytes[r], 64);
    const bf16* x = reinterpret_cast<const bf16*>(tiles[a].bytes[r]);
    for (int k = 0; k < 16; ++k) {
      const bf16* w = reinterpret_cast<const bf16*>(tiles[b].bytes[k]);
      for (int n = 0; n < 16; ++n) {
        even[n] += widen(x[2 * k]) * widen(w[2 * n]);
        odd[n] += widen(x[2 * k + 1]) * widen(w[2 * n + 1]);
      }
    }
    for (int n = 0; n < 16; ++n) sums[n] += even[n] + odd[n];
    std::memcpy(tiles[c].bytes[r], sums, 64);
  }
}
}  // namespace qb::emulated
#define QB_TILE_LOAD(t, p, s) qb::emulated::load(t, p, s)
#define QB_TILE_STORE(t, p, s) qb::emulated::store(t, p, s)
#define QB_TILE_ZERO(t) qb::emulated::clear(t)
#define QB_TILE_DOT(c, a, b) qb::emulated::dot(c, a, b)
#else
#define QB_TILE_LOAD(t, p, s) _tile_loadd(t, p, s)
#define QB_TILE_STORE(t, p, s) _tile_stored(t, p, s)
#define QB_TILE_ZERO(t) _tile_zero(t)
#define QB_TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
#endif

namespace qb {

// Tiles 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights. `upper`, `lower`: rows in the first and second tile of rows.
static thread_local int shaped_upper = 0, shaped_lower = 0;

static void shape_tiles(int upper, int lower) {
  if (shaped_upper == upper && shaped_lower == lower) return;
  shaped_upper = upper, shaped_lower = lower;
  const int rows[8] = {upper, upper, lower ? lower : upper, lower ? lower : upper, upper, lower ? lower : upper, 16, 16};
#ifdef QB_AMX_EMULATED
  for (int t = 0; t < 8; ++t) emulated::rows_of[t] = rows[t];
#else
  struct alignas(64) Shape {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } shape;
  for (int t = 0; t < 8; ++t) shape.bytes[t] = 64, shape.rows[t] = uint8_t(rows[t]);
  asm volatile("" ::"r"(&shape) : "memory");  // the intrinsic names 8 of the 64 bytes that it reads
  _tile_loadconfig(&shape);
#endif
}

static void release_tiles() {
  if (!shaped_upper) return;
  shaped_upper = shaped_lower = 0;
#ifndef QB_AMX_EMULATED
  _tile_release();
#endif
}

static void clear_sums() {
  QB_TILE_ZERO(0);
  QB_TILE_ZERO(1);
  QB_TILE_ZERO(2);
  QB_TILE_ZERO(3);
}

// Up to 16 rows and 4 blocks, or up to 32 rows and 2 blocks; sums to y. `next`: weights of as many blocks to fetch meanwhile, or null.
static void tile_part(const bf16* x, int64_t x_stride, int64_t rows, const bf16* w, int64_t w_stride, int64_t inputs, int64_t blocks, float* y,
                      int64_t y_stride, const char* next) {
  const int64_t ws = w_stride, xs = x_stride * 2, ys = y_stride * 4;
  auto fetch = [&](int64_t k) {
    if (!next) return;
    for (int64_t b = 0; b < blocks; ++b)
      for (int l = 0; l < 1024; l += 64) QB_PREFETCH(next + (b * ws + k * 16) * 2 + l);
  };
  asm volatile("" ::: "memory");  // the intrinsics don't say that they read memory
  if (rows <= 16) {
    shape_tiles(int(rows), 0);
    clear_sums();
    for (int64_t k = 0; k < inputs; k += 32) {
      const bf16* p = w + k * 16;
      fetch(k);
      QB_TILE_LOAD(4, x + k, xs);
      QB_TILE_LOAD(6, p, 64);
      QB_TILE_DOT(0, 4, 6);
      if (blocks > 1) {
        QB_TILE_LOAD(7, p + ws, 64);
        QB_TILE_DOT(1, 4, 7);
      }
      if (blocks > 2) {
        QB_TILE_LOAD(6, p + 2 * ws, 64);
        QB_TILE_DOT(2, 4, 6);
      }
      if (blocks > 3) {
        QB_TILE_LOAD(7, p + 3 * ws, 64);
        QB_TILE_DOT(3, 4, 7);
      }
    }
    QB_TILE_STORE(0, y, ys);
    if (blocks > 1) QB_TILE_STORE(1, y + 16, ys);
    if (blocks > 2) QB_TILE_STORE(2, y + 32, ys);
    if (blocks > 3) QB_TILE_STORE(3, y + 48, ys);
    return;
  }
  shape_tiles(16, int(rows - 16));
  clear_sums();
  for (int64_t k = 0; k < inputs; k += 32) {
    const bf16* p = w + k * 16;
    fetch(k);
    QB_TILE_LOAD(4, x + k, xs);
    QB_TILE_LOAD(5, x + 16 * x_stride + k, xs);
    QB_TILE_LOAD(6, p, 64);
    QB_TILE_DOT(0, 4, 6);
    QB_TILE_DOT(2, 5, 6);
    if (blocks > 1) {
      QB_TILE_LOAD(7, p + ws, 64);
      QB_TILE_DOT(1, 4, 7);
      QB_TILE_DOT(3, 5, 7);
    }
  }
  QB_TILE_STORE(0, y, ys);
  QB_TILE_STORE(2, y + 16 * y_stride, ys);
  if (blocks > 1) {
    QB_TILE_STORE(1, y + 16, ys);
    QB_TILE_STORE(3, y + 16 * y_stride + 16, ys);
  }
}

static void tile_product(const bf16* x, int64_t x_stride, int64_t rows, const bf16* w, int64_t w_stride, int64_t inputs, int64_t blocks, float* y,
                         int64_t y_stride, const void* ahead, int64_t lines) {
  for (int64_t l = 0; l < lines; ++l) QB_PREFETCH(static_cast<const char*>(ahead) + l * 64);
  const int64_t group = rows > 16 ? 32 : 16, most = rows > 16 ? 2 : 4;
  for (int64_t r = 0; r < rows; r += group)
    for (int64_t b = 0; b < blocks; b += most)
      tile_part(x + r * x_stride, x_stride, r + group < rows ? group : rows - r, w + b * w_stride, w_stride, inputs,
                b + most < blocks ? most : blocks - b, y + r * y_stride + b * 16, y_stride, nullptr);
}

}  // namespace qb
