// Sixteen float32 lanes, and pairs of bfloat16 numbers, on each instruction set. All kernels are written in these; one set is chosen when
// this folder is compiled. Nothing here reorders a sum: `add` and `fma` act lane by lane, `sum` adds the lanes in one fixed tree.
//
//   QB_AMX, QB_AVX512BF16, QB_AVX512, QB_AVX2: what the compiler may use; none of them: plain C++. QB_VNNI beside: products of bytes.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(QB_AMX) || defined(QB_AVX512BF16)
#define QB_DOT 1  // the machine multiplies pairs of bfloat16
#endif
#if defined(QB_DOT) || defined(QB_AVX512)
#define QB_ZMM 1
#endif
#if defined(QB_ZMM) || defined(QB_AVX2)
#include <immintrin.h>
#define QB_PREFETCH(p) _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1)  // into the second cache: the first is too small
#else
#define QB_PREFETCH(p) ((void)(p))
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

#ifdef QB_ZMM

struct Lanes {
  __m512 v;
};
inline Lanes zero() { return {_mm512_setzero_ps()}; }
inline Lanes all(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Lanes load_first(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p)}; }
inline Lanes load(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16))};
}
inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
inline void store_first(float* p, Lanes a, int64_t n) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), a.v); }
inline void store(bf16* p, Lanes a) {
  __m512i bits = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i near = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __m512i nan = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  near = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), near, nan);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(near));
}
inline Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes sub(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes div(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes least(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }     // b where either is NaN
inline Lanes greatest(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }  // likewise
inline float highest(Lanes a) { return _mm512_reduce_max_ps(a.v); }            // of lanes without NaN
inline bool any_above(Lanes a, float b) {  // or NaN
  return _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(b), _CMP_NLE_UQ) != 0;
}
inline Lanes round_even(Lanes a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Lanes two_to(Lanes n) {  // n is whole, -127 stands for minus infinity
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}

#elif defined(QB_AVX2)

struct Lanes {
  __m256 a, b;
};
inline Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Lanes load_first(const float* p, int64_t n) {
  if (n == 16) return load(p);
  float part[16] = {};
  std::memcpy(part, p, size_t(n) * 4);
  return load(part);
}
inline Lanes load(const bf16* p) {
  auto half = [](const bf16* q) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q))), 16));
  };
  return {half(p), half(p + 8)};
}
inline void store(float* p, Lanes x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline void store_first(float* p, Lanes x, int64_t n) {
  if (n == 16) return store(p, x);
  float part[16];
  store(part, x);
  std::memcpy(p, part, size_t(n) * 4);
}
inline void store(bf16* p, Lanes x) {
  auto half = [](__m256 v) {
    __m256i bits = _mm256_castps_si256(v), high = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i near = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(near, nan, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
  };
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(half(x.a), half(x.b)), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
inline Lanes add(Lanes x, Lanes y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Lanes sub(Lanes x, Lanes y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Lanes mul(Lanes x, Lanes y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Lanes div(Lanes x, Lanes y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Lanes fma(Lanes x, Lanes y, Lanes z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline Lanes least(Lanes x, Lanes y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Lanes greatest(Lanes x, Lanes y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline float highest(Lanes x) {
  const __m256 one = _mm256_max_ps(x.a, x.b);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(one), _mm256_extractf128_ps(one, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline bool any_above(Lanes x, float y) {
  const __m256 bar = _mm256_set1_ps(y);
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, bar, _CMP_NLE_UQ), _mm256_cmp_ps(x.b, bar, _CMP_NLE_UQ))) != 0;
}
inline Lanes round_even(Lanes x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline Lanes two_to(Lanes n) {
  auto half = [](__m256 v) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(v), _mm256_set1_epi32(127)), 23));
  };
  return {half(n.a), half(n.b)};
}

#else

struct Lanes {
  float v[16];
};
template <class F>
inline Lanes each(F f) {
  Lanes out;
  for (int i = 0; i < 16; ++i) out.v[i] = f(i);
  return out;
}
inline Lanes zero() { return each([](int) { return 0.0f; }); }
inline Lanes all(float x) { return each([x](int) { return x; }); }
inline Lanes load(const float* p) { return each([p](int i) { return p[i]; }); }
inline Lanes load_first(const float* p, int64_t n) { return each([p, n](int i) { return i < n ? p[i] : 0.0f; }); }
inline Lanes load(const bf16* p) { return each([p](int i) { return widen(p[i]); }); }
inline void store(float* p, const Lanes& a) { std::memcpy(p, a.v, 64); }
inline void store_first(float* p, const Lanes& a, int64_t n) { std::memcpy(p, a.v, size_t(n) * 4); }
inline void store(bf16* p, const Lanes& a) {
  for (int i = 0; i < 16; ++i) p[i] = narrow(a.v[i]);
}
inline Lanes add(const Lanes& a, const Lanes& b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
inline Lanes sub(const Lanes& a, const Lanes& b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
inline Lanes mul(const Lanes& a, const Lanes& b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
inline Lanes div(const Lanes& a, const Lanes& b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) { return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline Lanes least(const Lanes& a, const Lanes& b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline Lanes greatest(const Lanes& a, const Lanes& b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline float highest(const Lanes& a) {
  float best = a.v[0];
  for (int i = 1; i < 16; ++i) best = a.v[i] > best ? a.v[i] : best;
  return best;
}
inline bool any_above(const Lanes& a, float y) {
  int found = 0;
  for (int i = 0; i < 16; ++i) found |= !(a.v[i] <= y);
  return found != 0;
}
inline Lanes round_even(const Lanes& a) { return each([&](int i) { return std::nearbyint(a.v[i]); }); }
inline Lanes two_to(const Lanes& n) {
  return each([&](int i) { return n.v[i] > -127.0f ? std::ldexp(1.0f, int(n.v[i])) : 0.0f; });
}

#endif

// 16 pairs of bfloat16. A product adds both products of each pair to its lane, the first number's and then the second's, or as the machine's
// instruction has it: in the same order everywhere on a machine. `Entry`: a number of a row as products read it. Where the machine multiplies
// pairs of bfloat16 that is bfloat16; elsewhere rows are widened once, so that a number is put into all lanes by one load.
#ifdef QB_DOT
using Entry = bf16;
struct Pairs {
  __m512bh v;
};
inline Pairs load_pairs(const bf16* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
inline Pairs all_pair(const bf16* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return {(__m512bh)_mm512_set1_epi32(pair)};
}
inline Lanes dot(Pairs a, Pairs b, Lanes c) { return {_mm512_dpbf16_ps(c.v, a.v, b.v)}; }
#else
using Entry = float;
#if defined(QB_ZMM)
inline Lanes load_even(const bf16* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
inline Lanes load_odd(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000))))};
}
#elif defined(QB_AVX2)
inline Lanes load_even(const bf16* p) {
  auto half = [](const bf16* q) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)), 16)); };
  return {half(p), half(p + 16)};
}
inline Lanes load_odd(const bf16* p) {
  const __m256 high = _mm256_castsi256_ps(_mm256_set1_epi32(int(0xffff0000)));
  auto half = [&](const bf16* q) { return _mm256_and_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(q)), high); };
  return {half(p), half(p + 16)};
}
#else
inline Lanes load_even(const bf16* p) {
  return each([p](int i) { return widen(p[2 * i]); });
}
inline Lanes load_odd(const bf16* p) {
  return each([p](int i) { return widen(p[2 * i + 1]); });
}
#endif
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
