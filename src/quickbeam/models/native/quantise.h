// Weights of bfloat16 to the layouts that products read: to BFLOAT16 (`product.h`), INT8 and INT4 (`formats.h`).
#pragma once
#include "quantised.h"

namespace qb {

// Block `block` to BFLOAT16, zeros where the weight ends.
static void pack(const bf16* weight, int64_t stride, int64_t block, int64_t outputs, int64_t inputs, bf16* packed) {
  constexpr int64_t PART = 256;  // pairs at a time, so that what is written stays in the cache
  for (int64_t part = 0; part < inputs / 2; part += PART)
    for (int64_t lane = 0; lane < 16; ++lane) {
      const int64_t o = block * 16 + lane, end = std::min(inputs / 2, part + PART);
      bf16* to = packed + lane * 2;
      for (int64_t k = part; k < end; ++k) {
        if (o < outputs) std::memcpy(to + k * 32, weight + o * stride + 2 * k, 4);
        else std::memset(to + k * 32, 0, 4);
      }
    }
}

// 16 outputs of 32 inputs by input, zeros where the weight ends.
struct Tall {
  float of[GROUP][16];
  Tall(const bf16* weight, int64_t stride, int64_t output, int64_t outputs, int64_t input, int64_t inputs) {
    for (int64_t o = 0; o < 16; ++o)
      for (int64_t i = 0; i < GROUP; ++i)
        of[i][o] = output + o < outputs && input + i < inputs ? widen(weight[(output + o) * stride + input + i]) : 0.0f;
  }
};

static bool finite(const bf16* weight, int64_t stride, int64_t block, int64_t outputs, int64_t inputs) {
  uint16_t top = 0;
  for (int64_t o = block * 16; o < std::min(outputs, block * 16 + 16); ++o)
    for (int64_t i = 0; i < inputs; ++i) top = std::max<uint16_t>(top, weight[o * stride + i] & 0x7fff);
  return top < 0x7f80;
}

// Block `block` to INT8: by output, the largest number becomes 127.
static void quantise_whole(const bf16* weight, int64_t stride, int64_t block, int64_t outputs, int64_t inputs, uint8_t* to) {
  const int64_t groups = groups_of(inputs);
  Lanes top = zero();
  for (int64_t g = 0; g < groups; ++g) {
    const Tall w(weight, stride, block * 16, outputs, g * GROUP, inputs);
    for (int64_t i = 0; i < GROUP; ++i) top = greatest(size_of(load(w.of[i])), top);
  }
  top = greatest(top, all(LEAST));
  const Lanes factor = div(all(127.0f), top);
  for (int64_t g = 0; g < groups; ++g) {
    const Tall w(weight, stride, block * 16, outputs, g * GROUP, inputs);
    for (int64_t i = 0; i < GROUP; ++i) {
      float v[16];
      store(v, round_even(mul(load(w.of[i]), factor)));
      for (int64_t o = 0; o < 16; ++o) to[g * 512 + i / 4 * 64 + o * 4 + i % 4] = uint8_t(int(v[o]) + 128);
    }
  }
  store(reinterpret_cast<float*>(to + groups * 512), div(top, all(127.0f)));
}

// One output to place `lane` of a block, as `quantise_whole` has it; the scale is NaN where a weight is not finite.
static void put_whole(const bf16* weight, int64_t inputs, int64_t lane, uint8_t* to) {
  const int64_t groups = groups_of(inputs);
  float top = LEAST;
  bool fine = true;
  for (int64_t i = 0; i < inputs; ++i) {
    const float size = std::fabs(widen(weight[i]));
    fine = fine && std::isfinite(size);
    top = std::max(top, size);
  }
  const float factor = 127.0f / top, scale = fine ? top / 127.0f : NAN;
  for (int64_t i = 0; i < groups * GROUP; ++i) {
    const float value = fine && i < inputs ? std::nearbyint(widen(weight[i]) * factor) : 0.0f;
    to[i / 4 * 64 + lane * 4 + i % 4] = uint8_t(int(value) + 128);
  }
  std::memcpy(to + groups * 512 + lane * 4, &scale, 4);
}

// Block `block` to INT4: of several distances between levels, the one whose least-squares fit leaves the smallest error. Weights that lie
// on 16 levels or fewer already, as those of many 4-bit checkpoints, stay on them.
static void quantise_halves(const bf16* weight, int64_t stride, int64_t block, int64_t outputs, int64_t inputs, uint8_t* to) {
  constexpr float LEVELS[] = {8, 9, 10, 11, 12, 13, 14, 15, 15.5f, 16, 17};  // from the smallest to the largest
  const int64_t groups = groups_of(inputs);
  const Layout& of = LAYOUTS[INT4];
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t eight = g / SUPER_GROUPS * SUPER_GROUPS;
    uint8_t* values = to + group_place(of, g);
    uint16_t* scales = reinterpret_cast<uint16_t*>(to + scales_place(of, groups, eight)) + (g - eight) * 32;
    Tall w(weight, stride, block * 16, outputs, g * GROUP, inputs);
    Lanes low = load(w.of[0]), high = low;
    for (int64_t i = 1; i < GROUP; ++i) low = least(low, load(w.of[i])), high = greatest(high, load(w.of[i]));
    Lanes above = zero();
    for (int64_t i = 0; i < GROUP; ++i) {
      store(w.of[i], sub(load(w.of[i]), low));
      above = add(above, load(w.of[i]));
    }
    float lowest[16], range[16], best[16], by[16], slope[16] = {}, base[16] = {};
    store(lowest, low), store(range, sub(high, low)), store(best, all(INFINITY)), store(by, zero());
    for (const float levels : LEVELS) {
      float tried[16], fit[16], rest[16], error[16];
      for (int64_t o = 0; o < 16; ++o) tried[o] = range[o] < LEAST ? 0.0f : levels / range[o];
      const Lanes factor = load(tried);
      Lanes level = zero(), across = zero(), square = zero(), q[GROUP];
      for (int64_t i = 0; i < GROUP; ++i) {
        q[i] = least(all(15.0f), round_even(mul(load(w.of[i]), factor)));
        level = add(level, q[i]), across = add(across, mul(load(w.of[i]), q[i])), square = add(square, mul(q[i], q[i]));
      }
      float spread[16], shared[16];
      store(spread, sub(mul(all(32.0f), square), mul(level, level)));
      store(shared, sub(mul(all(32.0f), across), mul(above, level)));
      for (int64_t o = 0; o < 16; ++o) fit[o] = spread[o] > 0 ? shared[o] / spread[o] : 0.0f;
      const Lanes line = load(fit), start = mul(sub(above, mul(line, level)), all(0.03125f));
      Lanes wrong = zero();
      for (int64_t i = 0; i < GROUP; ++i) {
        const Lanes off = sub(load(w.of[i]), add(mul(line, q[i]), start));
        wrong = add(wrong, mul(off, off));
      }
      store(rest, start), store(error, wrong);
      for (int64_t o = 0; o < 16; ++o)
        if (error[o] < best[o]) best[o] = error[o], by[o] = tried[o], slope[o] = fit[o], base[o] = rest[o];
    }
    for (int64_t o = 0; o < 16; ++o) {
      scales[o] = to_half_float(slope[o]);
      scales[16 + o] = to_half_float(base[o] + lowest[o]);
    }
    for (int64_t i = 0; i < GROUP; ++i) {
      float v[16];
      store(v, least(all(15.0f), round_even(mul(load(w.of[i]), load(by)))));
      for (int64_t o = 0; o < 16; ++o) {
        uint8_t& byte = values[i / 8 * 64 + o * 4 + i % 4];
        byte = i % 8 < 4 ? uint8_t(int(v[o])) : uint8_t(byte | int(v[o]) << 4);
      }
    }
  }
}

}  // namespace qb
