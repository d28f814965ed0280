// Sixteen int32 sums, and products of unsigned bytes with signed ones, on each instruction set; beside `simd.h`, and chosen as there.
//
// A block of weights holds 16 outputs, of 4 inputs each, in 64 bytes. All sums are exact: a group has 32 inputs, so none exceeds
// 32 * 127 * 127 < 2^24, and nothing on the way saturates. So every instruction set gives the same numbers.
#pragma once
#include "simd.h"

namespace qb {

inline int32_t four(const int8_t* p) {
  int32_t all;
  std::memcpy(&all, p, 4);
  return all;
}

#ifdef QB_VNNI

// Whole weights stand as they are stored, 128 above their value; their sums begin with what that adds, taken away.
struct Sums {
  __m512i v;
};
struct Bytes {
  __m512i v;
};
inline Sums halves_from_zero() { return {_mm512_setzero_si512()}; }
inline Sums whole_from(int32_t start) { return {_mm512_set1_epi32(start)}; }
inline Bytes load_whole(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void load_halves(const uint8_t* p, Bytes& low, Bytes& high) {
  const __m512i v = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
  low = {_mm512_and_si512(v, mask)}, high = {_mm512_and_si512(_mm512_srli_epi16(v, 4), mask)};
}
inline Sums dot_whole(Sums s, Bytes w, const int8_t* x) { return {_mm512_dpbusd_epi32(s.v, w.v, _mm512_set1_epi32(four(x)))}; }
inline Sums dot_half(Sums s, Bytes w, const int8_t* x) { return dot_whole(s, w, x); }
inline Lanes to_lanes(Sums s) { return {_mm512_cvtepi32_ps(s.v)}; }

#elif defined(QB_AVX2) || defined(QB_ZMM)

// Two products are added in 16 bits: whole weights go in signed, by the sign of the input, so that 2 * 127 * 127 fits; halves are small.
struct Sums {
  __m256i a, b;
};
struct Bytes {
  __m256i a, b;
};
inline Sums halves_from_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Sums whole_from(int32_t) { return halves_from_zero(); }
inline __m256i load_32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Bytes load_whole(const uint8_t* p) {
  const __m256i top = _mm256_set1_epi8(char(128));
  return {_mm256_xor_si256(load_32(p), top), _mm256_xor_si256(load_32(p + 32), top)};
}
inline void load_halves(const uint8_t* p, Bytes& low, Bytes& high) {
  const __m256i a = load_32(p), b = load_32(p + 32), mask = _mm256_set1_epi8(15);
  low = {_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)};
  high = {_mm256_and_si256(_mm256_srli_epi16(a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(b, 4), mask)};
}
inline __m256i add_pairs(__m256i s, __m256i pairs) { return _mm256_add_epi32(s, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))); }
inline Sums dot_whole(Sums s, Bytes w, const int8_t* x) {
  const __m256i v = _mm256_set1_epi32(four(x)), size = _mm256_abs_epi8(v);
  return {add_pairs(s.a, _mm256_maddubs_epi16(size, _mm256_sign_epi8(w.a, v))),
          add_pairs(s.b, _mm256_maddubs_epi16(size, _mm256_sign_epi8(w.b, v)))};
}
inline Sums dot_half(Sums s, Bytes w, const int8_t* x) {
  const __m256i v = _mm256_set1_epi32(four(x));
  return {add_pairs(s.a, _mm256_maddubs_epi16(w.a, v)), add_pairs(s.b, _mm256_maddubs_epi16(w.b, v))};
}
#ifdef QB_ZMM
inline Lanes to_lanes(Sums s) { return {_mm512_cvtepi32_ps(_mm512_inserti64x4(_mm512_castsi256_si512(s.a), s.b, 1))}; }
#else
inline Lanes to_lanes(Sums s) { return {_mm256_cvtepi32_ps(s.a), _mm256_cvtepi32_ps(s.b)}; }
#endif

#else

struct Sums {
  int32_t v[16];
};
struct Bytes {
  uint8_t v[64];
};
inline Sums whole_from(int32_t start) {
  Sums s;
  for (int i = 0; i < 16; ++i) s.v[i] = start;
  return s;
}
inline Sums halves_from_zero() { return whole_from(0); }
inline Bytes load_whole(const uint8_t* p) {
  Bytes w;
  std::memcpy(w.v, p, 64);
  return w;
}
inline void load_halves(const uint8_t* p, Bytes& low, Bytes& high) {
  for (int i = 0; i < 64; ++i) low.v[i] = p[i] & 15, high.v[i] = p[i] >> 4;
}
inline Sums dot_whole(Sums s, const Bytes& w, const int8_t* x) {
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 4; ++k) s.v[i] += int32_t(w.v[4 * i + k]) * x[k];
  return s;
}
inline Sums dot_half(Sums s, const Bytes& w, const int8_t* x) { return dot_whole(s, w, x); }
inline Lanes to_lanes(const Sums& s) {
  return each([&](int i) { return float(s.v[i]); });
}

#endif

// Sixteen numbers of IEEE half precision.
#if defined(QB_ZMM)
inline Lanes load_half_floats(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
#elif defined(QB_AVX2)
inline Lanes load_half_floats(const uint16_t* p) {
  auto half = [](const uint16_t* q) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q))); };
  return {half(p), half(p + 8)};
}
#else
inline float half_float(uint16_t h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 31) return fraction ? NAN : h >> 15 ? -INFINITY : INFINITY;
  const float size = exponent ? std::ldexp(float(1024 + fraction), exponent - 25) : std::ldexp(float(fraction), -24);
  return h >> 15 ? -size : size;
}
inline Lanes load_half_floats(const uint16_t* p) {
  return each([p](int i) { return half_float(p[i]); });
}
#endif

inline uint16_t to_half_float(float v) {  // to nearest, ties to even; what is too large becomes the largest
  const uint16_t sign = std::signbit(v) ? 0x8000 : 0;
  const float size = std::fabs(v);
  if (!(size < 65504.0f)) return uint16_t(sign | 0x7bff);
  if (size < 6.103515625e-5f) return uint16_t(sign | int(std::nearbyint(size * 16777216.0f)));  // subnormal, in steps of 2^-24
  int exponent;
  const float fraction = std::frexp(size, &exponent);  // [0.5, 1)
  return uint16_t(sign | (((exponent + 14) << 10) + int(std::nearbyint(fraction * 2048.0f)) - 1024));
}

}  // namespace qb
