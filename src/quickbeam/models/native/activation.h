// Activations of feed-forwards.
#pragma once
#include "simd.h"

namespace qb {

enum Activation : int32_t { SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, CLAMPED, LOGISTIC, XIELU };

inline Lanes activate(int32_t kind, Lanes x) {
  switch (kind) {
    case GELU: {  // x * (1 + erf(x / sqrt(2))) / 2, erf by Abramowitz and Stegun's 7.1.26, off by at most 2e-7
      const Lanes z = mul(x, all(0.70710678f)), size = greatest(z, sub(zero(), z));
      const Lanes t = div(all(1.0f), fma(size, all(0.3275911f), all(1.0f)));
      Lanes p = all(1.061405429f);
      for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = fma(p, t, all(c));
      const Lanes rest = mul(mul(p, t), exponential(sub(zero(), mul(size, size))));  // 1 - erf(|z|)
      const Lanes half = mul(x, all(0.5f)), wide = greatest(half, sub(zero(), half));
      return sub(add(half, wide), mul(wide, rest));
    }
    case GELU_TANH: {
      const Lanes inner = mul(mul(x, all(0.7978845608f)), fma(mul(x, x), all(0.044715f), all(1.0f)));
      return mul(mul(x, all(0.5f)), add(all(1.0f), hyperbolic_tangent(inner)));
    }
    case LOGISTIC: return div(all(1.0f), add(all(1.0f), exponential(sub(zero(), x))));
    case RELU: return greatest(zero(), x);
    case RELU_SQUARED: {
      const Lanes y = greatest(zero(), x);
      return mul(y, y);
    }
    default: return div(x, add(all(1.0f), exponential(sub(zero(), x))));
  }
}

// What a gate lets through. CLAMPED, of GPT-OSS: (u + 1) * g * sigmoid(slope * g), g at most `limit`, u between -`limit` and `limit`.
inline Lanes let_through(int32_t kind, Lanes gate, Lanes up, float limit, float slope) {
  if (kind != CLAMPED) return mul(activate(kind, gate), up);
  const Lanes g = least(all(limit), gate), u = greatest(all(-limit), least(all(limit), up));
  const Lanes swish = div(g, add(all(1.0f), exponential(sub(zero(), mul(g, all(slope))))));
  return mul(add(u, all(1.0f)), swish);
}

// xIELU: a x^2 + x / 2 for x above 0, c (e^x - 1 - x) + x / 2 below.
inline Lanes xielu(Lanes x, float a, float c) {
  const Lanes above = greatest(zero(), x), below = least(zero(), x);
  const Lanes curve = sub(sub(exponential(below), all(1.0f)), below);
  return fma(mul(above, above), all(a), fma(curve, all(c), mul(x, all(0.5f))));
}

}  // namespace qb
