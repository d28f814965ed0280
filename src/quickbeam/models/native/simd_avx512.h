// AVX-512: sixteen lanes are one register. QB_DOT: pairs of bfloat16 are multiplied by the machine.
#pragma once

namespace qb {

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
inline float total(Lanes a) { return _mm512_reduce_add_ps(a.v); }              // of whole numbers, in any order
inline bool any_above(Lanes a, float b) {  // or NaN
  return _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(b), _CMP_NLE_UQ) != 0;
}
inline Lanes round_even(Lanes a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Lanes two_to(Lanes n) {  // n is whole, -127 stands for minus infinity
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}

#ifdef QB_DOT
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
inline Lanes load_even(const bf16* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
inline Lanes load_odd(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000))))};
}
#endif

}  // namespace qb
