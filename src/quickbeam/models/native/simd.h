// Sixteen float32 lanes, and pairs of bfloat16 numbers, on each instruction set. All kernels are written in these; one set is chosen when
// this folder is compiled. Nothing here reorders a sum: `add` and `fma` act lane by lane, `sum` adds the lanes in one fixed tree.
//
//   QB_AMX, QB_AVX512BF16, QB_AVX512, QB_AVX2, QB_NEON: what the compiler may use; none of them: plain C++. Beside: products of bytes by QB_VNNI
//   and, of NEON, QB_SDOT; products of bfloat16 by QB_BFDOT.
//
// `simd_plain.h` is the interface in the fewest words: lanes, and pairs of bfloat16 (below).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(QB_AMX) || defined(QB_AVX512BF16) || defined(QB_BFDOT)
#define QB_DOT 1  // the machine multiplies pairs of bfloat16
#endif
#if defined(QB_AMX) || defined(QB_AVX512BF16) || defined(QB_AVX512)
#define QB_ZMM 1
#endif
// QB_PREFETCH: into the second cache, as the first is too small. QB_PAUSE: in loops that wait for another thread.
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#define QB_PREFETCH(p) _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1)
#define QB_PAUSE() _mm_pause()
#elif defined(__aarch64__)
#include <arm_neon.h>
#define QB_PREFETCH(p) __builtin_prefetch(p, 0, 2)
#define QB_PAUSE() asm volatile("yield")
#else
#define QB_PREFETCH(p) ((void)(p))
#define QB_PAUSE() ((void)0)
#endif

namespace qb {

using bf16 = uint16_t;

inline float widen(bf16 v) {
  uint32_t bits = uint32_t(v) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline bf16 narrow(float v) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16((bits >> 16) | 0x40);
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace qb

#if defined(QB_ZMM)
#include "simd_avx512.h"
#elif defined(QB_AVX2)
#include "simd_avx2.h"
#elif defined(QB_NEON)
#include "simd_neon.h"
#else
#include "simd_plain.h"
#define QB_PLAIN 1
#endif

namespace qb {

// a * b + c, rounded once on every set. Plain C++'s `fma` rounds twice, as one rounding is a slow call there.
#ifndef QB_PLAIN
inline Lanes fused(const Lanes& a, const Lanes& b, const Lanes& c) { return fma(a, b, c); }
#endif

// 16 pairs of bfloat16. A product adds both products of each pair to its lane, the first number's and then the second's, or as the machine's
// instruction has it: in the same order everywhere on a machine. `Entry`: a number of a row as products read it. Where the machine multiplies
// pairs of bfloat16 that is bfloat16; elsewhere rows are widened once, so that a number is put into all lanes by one load.
#ifdef QB_DOT
using Entry = bf16;
#else
using Entry = float;
#endif

// 16 pairs whose numbers come from different places: (p[2i + p_odd], q[2i + q_odd]), 0 for the second where q is null.
inline void join(const bf16* p, int p_odd, const bf16* q, int q_odd, bf16* to) {
  uint32_t a[16], b[16] = {};
  std::memcpy(a, p, 64);
  if (q) std::memcpy(b, q, 64);
  for (int i = 0; i < 16; ++i) a[i] = ((a[i] >> (16 * p_odd)) & 0xffff) | (b[i] >> (16 * q_odd) << 16);
  std::memcpy(to, a, 64);
}

inline float sum(const Lanes& a) {
  float v[16];
  store(v, a);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) v[i] += v[i + width];
  return v[0];
}

inline float peak(const Lanes& a) {  // NaN where any lane is
  float v[16], best;
  store(v, a);
  best = v[0];
  for (int i = 1; i < 16; ++i) best = v[i] > best || v[i] != v[i] ? v[i] : best;
  return best;
}

// e^x as 2^n * 2^r with |r| <= 1/2, a polynomial for the latter; 0 below about -88, NaN stays NaN. Relative error below 3e-7 * max(1, |x|).
inline Lanes exponential(const Lanes& x) {
  const Lanes t = least(all(127.0f), greatest(all(-127.0f), mul(x, all(1.44269504f)))), n = round_even(t), r = sub(t, n);
  Lanes p = all(1.535336188e-4f);
  for (float c : {1.339887440e-3f, 9.618437357e-3f, 5.550332471e-2f, 2.402264791e-1f, 6.931472029e-1f, 1.0f}) p = fma(p, r, all(c));
  return mul(p, two_to(n));
}

inline Lanes hyperbolic_tangent(const Lanes& x) {  // 1 - 2 / (exp(2x) + 1)
  return sub(all(1.0f), div(all(2.0f), add(exponential(greatest(all(-43.0f), add(x, x))), all(1.0f))));
}

}  // namespace qb
