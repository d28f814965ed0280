// Sixteen int32 sums, and products of unsigned bytes with signed ones, on each instruction set; beside `simd.h`, and chosen as there.
//
// A block of weights holds 16 outputs, of 4 inputs each, in 64 bytes. All sums are exact: a group has 32 inputs, so none exceeds
// 32 * 127 * 127 < 2^24, and nothing on the way saturates. So every instruction set gives the same numbers.
#pragma once
#include "simd.h"

namespace qb {

constexpr int64_t GROUP = 32;  // inputs

template <class T>
inline int32_t word(const T* p) {  // the first four bytes
  int32_t all;
  std::memcpy(&all, p, 4);
  return all;
}

// Whole weights stand as they are stored, 128 above their value; their sums begin with what that adds, taken away. `WholeValue`: what products
// with them read of a row; `arrange_whole`: a group of those.
#ifdef QB_VNNI

struct WholeSums {
  __m512i v;
};
using HalfSums = WholeSums;
struct WholeBytes {
  __m512i v;
};
using HalfBytes = WholeBytes;
using WholeValue = int8_t;
inline void arrange_whole(const float* from, int8_t* to) {
  for (int64_t i = 0; i < GROUP; ++i) to[i] = int8_t(from[i]);
}
inline HalfSums halves_from_zero() { return {_mm512_setzero_si512()}; }
inline WholeSums whole_from(int32_t start) { return {_mm512_set1_epi32(start)}; }
inline WholeBytes load_whole(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void load_halves(const uint8_t* p, HalfBytes& low, HalfBytes& high) {
  const __m512i v = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
  low = {_mm512_and_si512(v, mask)}, high = {_mm512_and_si512(_mm512_srli_epi16(v, 4), mask)};
}
inline WholeSums dot_whole(WholeSums s, WholeBytes w, const int8_t* x) { return {_mm512_dpbusd_epi32(s.v, w.v, _mm512_set1_epi32(word(x)))}; }
inline HalfSums dot_half(HalfSums s, HalfBytes w, const int8_t* x) { return dot_whole(s, w, x); }
inline Lanes to_lanes(WholeSums s) { return {_mm512_cvtepi32_ps(s.v)}; }

#elif defined(QB_AVX2) || defined(QB_ZMM)

// Whole weights are widened to 16 bits, those of even and of odd inputs apart, and added in 32. Halves are small: their products with all
// inputs of a group add up in 16 bits, at most 16 * 15 * 127 < 2^15.
struct WholeSums {
  __m256i a, b;
};
struct HalfSums {
  __m256i a, b;
};
struct WholeBytes {
  __m256i even_a, even_b, odd_a, odd_b;
};
struct HalfBytes {
  __m256i a, b;
};
using WholeValue = int16_t;
inline void arrange_whole(const float* from, int16_t* to) {
  for (int64_t i = 0; i < GROUP; i += 4) {
    const int16_t four[4] = {int16_t(from[i]), int16_t(from[i + 2]), int16_t(from[i + 1]), int16_t(from[i + 3])};
    std::memcpy(to + i, four, sizeof four);
  }
}
inline HalfSums halves_from_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline WholeSums whole_from(int32_t start) { return {_mm256_set1_epi32(start), _mm256_set1_epi32(start)}; }
inline __m256i load_32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline WholeBytes load_whole(const uint8_t* p) {
  const __m256i a = load_32(p), b = load_32(p + 32), low = _mm256_set1_epi16(255);
  return {_mm256_and_si256(a, low), _mm256_and_si256(b, low), _mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8)};
}
inline void load_halves(const uint8_t* p, HalfBytes& low, HalfBytes& high) {
  const __m256i a = load_32(p), b = load_32(p + 32), mask = _mm256_set1_epi8(15);
  low = {_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)};
  high = {_mm256_and_si256(_mm256_srli_epi16(a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(b, 4), mask)};
}
// One sum after the other: added up as a tree, as compilers like it, they need more registers than there are.
inline __m256i keep(__m256i sum) {
#ifdef __GNUC__
  asm("" : "+x"(sum));
#endif
  return sum;
}
inline __m256i plus_whole(__m256i s, __m256i w, __m256i x) { return keep(_mm256_add_epi32(s, _mm256_madd_epi16(w, x))); }
inline __m256i plus_half(__m256i s, __m256i w, __m256i x) { return keep(_mm256_add_epi16(s, _mm256_maddubs_epi16(w, x))); }
inline WholeSums dot_whole(WholeSums s, const WholeBytes& w, const int16_t* x) {
  const __m256i even = _mm256_set1_epi32(word(x)), odd = _mm256_set1_epi32(word(x + 2));
  return {plus_whole(plus_whole(s.a, w.even_a, even), w.odd_a, odd), plus_whole(plus_whole(s.b, w.even_b, even), w.odd_b, odd)};
}
inline HalfSums dot_half(HalfSums s, const HalfBytes& w, const int8_t* x) {
  const __m256i v = _mm256_set1_epi32(word(x));
  return {plus_half(s.a, w.a, v), plus_half(s.b, w.b, v)};
}
inline Lanes to_lanes(__m256i a, __m256i b) {
#ifdef QB_ZMM
  return {_mm512_cvtepi32_ps(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1))};
#else
  return {_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)};
#endif
}
inline Lanes to_lanes(WholeSums s) { return to_lanes(s.a, s.b); }
inline Lanes to_lanes(HalfSums s) {
  const __m256i one = _mm256_set1_epi16(1);
  return to_lanes(_mm256_madd_epi16(s.a, one), _mm256_madd_epi16(s.b, one));
}

#elif defined(QB_NEON)

// Signed bytes with signed ones: the weights lose what they stand above their value, and sums begin at zero.
struct WholeSums {
  int32x4_t v[4];
};
using HalfSums = WholeSums;
struct WholeBytes {
  int8x16_t v[4];
};
using HalfBytes = WholeBytes;
using WholeValue = int8_t;
inline void arrange_whole(const float* from, int8_t* to) {
  for (int64_t i = 0; i < GROUP; ++i) to[i] = int8_t(from[i]);
}
inline HalfSums halves_from_zero() {
  const int32x4_t zeros = vdupq_n_s32(0);
  return {{zeros, zeros, zeros, zeros}};
}
inline WholeSums whole_from(int32_t) { return halves_from_zero(); }
inline WholeBytes load_whole(const uint8_t* p) {
  WholeBytes w;
  for (int i = 0; i < 4; ++i) w.v[i] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 16 * i), vdupq_n_u8(128)));
  return w;
}
inline void load_halves(const uint8_t* p, HalfBytes& low, HalfBytes& high) {
  for (int i = 0; i < 4; ++i) {
    const uint8x16_t v = vld1q_u8(p + 16 * i);
    low.v[i] = vreinterpretq_s8_u8(vandq_u8(v, vdupq_n_u8(15))), high.v[i] = vreinterpretq_s8_u8(vshrq_n_u8(v, 4));
  }
}
inline int32x4_t dot_four(int32x4_t s, int8x16_t w, int8x16_t x) {
#ifdef QB_SDOT
  return vdotq_s32(s, w, x);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
  return vaddq_s32(s, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}
inline WholeSums dot_whole(WholeSums s, const WholeBytes& w, const int8_t* x) {
  const int8x16_t v = vreinterpretq_s8_s32(vdupq_n_s32(word(x)));
  for (int i = 0; i < 4; ++i) s.v[i] = dot_four(s.v[i], w.v[i], v);
  return s;
}
inline HalfSums dot_half(HalfSums s, const HalfBytes& w, const int8_t* x) { return dot_whole(s, w, x); }
inline Lanes to_lanes(const WholeSums& s) {
  return fours([&](int i) { return vcvtq_f32_s32(s.v[i]); });
}

#else

struct WholeSums {
  int32_t v[16];
};
using HalfSums = WholeSums;
struct WholeBytes {
  uint8_t v[64];
};
using HalfBytes = WholeBytes;
using WholeValue = int8_t;
inline void arrange_whole(const float* from, int8_t* to) {
  for (int64_t i = 0; i < GROUP; ++i) to[i] = int8_t(from[i]);
}
inline WholeSums whole_from(int32_t start) {
  WholeSums s;
  for (int i = 0; i < 16; ++i) s.v[i] = start;
  return s;
}
inline HalfSums halves_from_zero() { return whole_from(0); }
inline WholeBytes load_whole(const uint8_t* p) {
  WholeBytes w;
  std::memcpy(w.v, p, 64);
  return w;
}
inline void load_halves(const uint8_t* p, HalfBytes& low, HalfBytes& high) {
  for (int i = 0; i < 64; ++i) low.v[i] = p[i] & 15, high.v[i] = p[i] >> 4;
}
inline WholeSums dot_whole(WholeSums s, const WholeBytes& w, const int8_t* x) {
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 4; ++k) s.v[i] += int32_t(w.v[4 * i + k]) * x[k];
  return s;
}
inline HalfSums dot_half(HalfSums s, const HalfBytes& w, const int8_t* x) { return dot_whole(s, w, x); }
inline Lanes to_lanes(const WholeSums& s) {
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
#elif defined(QB_NEON)
inline Lanes load_half_floats(const uint16_t* p) {
  return fours([p](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
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
