// AVX2: sixteen lanes are two registers.
#pragma once

namespace qb {

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
inline float total(Lanes x) {
  const __m256 one = _mm256_add_ps(x.a, x.b);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(one), _mm256_extractf128_ps(one, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
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

inline Lanes load_even(const bf16* p) {
  auto half = [](const bf16* q) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)), 16)); };
  return {half(p), half(p + 16)};
}
inline Lanes load_odd(const bf16* p) {
  const __m256 high = _mm256_castsi256_ps(_mm256_set1_epi32(int(0xffff0000)));
  auto half = [&](const bf16* q) { return _mm256_and_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(q)), high); };
  return {half(p), half(p + 16)};
}

}  // namespace qb
