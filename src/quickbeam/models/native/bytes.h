// Sixteen int32 sums, and products of unsigned bytes with signed ones, on each instruction set; beside `simd.h`, and chosen as there.
//
// 64 bytes of weights hold 4 inputs of 16 outputs. All sums are exact: a group has 32 inputs, so none exceeds 32 * 255 * 127 < 2^24, and
// nothing on the way saturates. So every instruction set gives the same numbers.
#pragma once
#include <algorithm>

#include "simd.h"

namespace qb {

constexpr int64_t GROUP = 32;  // inputs

template <class T>
inline int32_t word(const T* p) {  // the first four bytes
  int32_t all;
  std::memcpy(&all, p, 4);
  return all;
}

// `Bytes`: 64 unsigned ones. `shifted<S>`: each to the right by S bits (to the left where S is negative), of which those of `mask` stay.
// `whole`: bytes of at most 127 as products read them; `whole_wide`: any bytes, less `ABOVE`. Bytes of at most 15 are read as they are (`dot_half`).
// `WholeValue`: what products of whole bytes read of a row. `dot_two`: of 64 bytes and the 64 behind them, all at most 63, with 8 inputs.
// `start`: sums go on from a number. `raised`: sums as numbers, times two to the power of `by`, which are below 2^24. `WordPairs`: of each of 16 outputs two numbers of 16 bits, side by side, which `dot_words` multiplies with two.
#if defined(QB_VNNI) && defined(QB_ZMM)

struct Bytes {
  __m512i v;
};
struct WholeSums {
  __m512i v;
};
struct WordPairs {
  __m512i v;
};
using WholeBytes = Bytes;
using HalfSums = WholeSums;
using WholeValue = int8_t;
inline void start(WholeSums& s, int32_t n) { s.v = _mm512_set1_epi32(n); }
inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
template <int S>
inline Bytes shifted(Bytes x, int mask) {
  const __m512i moved = S >= 0 ? _mm512_srli_epi16(x.v, S >= 0 ? S : 0) : _mm512_slli_epi16(x.v, S < 0 ? -S : 0);
  return {_mm512_and_si512(moved, _mm512_set1_epi8(char(mask)))};
}
inline Bytes either(Bytes x, Bytes y) { return {_mm512_or_si512(x.v, y.v)}; }
inline Bytes looked_up(Bytes x, const uint8_t* table) {
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), x.v)};
}
inline WholeBytes whole(Bytes x) { return x; }
inline WholeSums dot_whole(WholeSums s, WholeBytes w, const int8_t* x) { return {_mm512_dpbusd_epi32(s.v, w.v, _mm512_set1_epi32(word(x)))}; }
inline HalfSums dot_half(HalfSums s, Bytes w, const int8_t* x) { return dot_whole(s, w, x); }
inline Lanes to_lanes(WholeSums s) { return {_mm512_cvtepi32_ps(s.v)}; }
inline Lanes raised(WholeSums s, int32_t by) { return {_mm512_cvtepi32_ps(_mm512_sllv_epi32(s.v, _mm512_set1_epi32(by)))}; }
inline WordPairs load_word_pairs(const uint8_t* first, const uint8_t* second) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(first)), b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(second));
  return {_mm512_cvtepu8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)))};
}
inline WholeSums dot_words(WholeSums s, WordPairs w, const int16_t* x) { return {_mm512_dpwssd_epi32(s.v, w.v, _mm512_set1_epi32(word(x)))}; }

#elif defined(QB_AVX2) || defined(QB_ZMM)

struct Bytes {
  __m256i a, b;
};
struct WholeSums {
  __m256i a, b;
};
struct WordPairs {
  __m256i a, b;
};
inline void start(WholeSums& s, int32_t n) { s.a = s.b = _mm256_set1_epi32(n); }
inline __m256i load_32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Bytes load_bytes(const uint8_t* p) { return {load_32(p), load_32(p + 32)}; }
template <int S>
inline Bytes shifted(Bytes x, int mask) {
  const __m256i those = _mm256_set1_epi8(char(mask));
  const auto part = [&](__m256i v) {
    return _mm256_and_si256(S >= 0 ? _mm256_srli_epi16(v, S >= 0 ? S : 0) : _mm256_slli_epi16(v, S < 0 ? -S : 0), those);
  };
  return {part(x.a), part(x.b)};
}
inline Bytes either(Bytes x, Bytes y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline Bytes looked_up(Bytes x, const uint8_t* table) {
  const __m256i of = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(of, x.a), _mm256_shuffle_epi8(of, x.b)};
}
inline Lanes to_lanes(__m256i a, __m256i b) {
#ifdef QB_ZMM
  return {_mm512_cvtepi32_ps(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1))};
#else
  return {_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)};
#endif
}
inline Lanes to_lanes(WholeSums s) { return to_lanes(s.a, s.b); }
inline WordPairs load_word_pairs(const uint8_t* first, const uint8_t* second) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(first)), b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(second));
  return {_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b)), _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b))};
}
inline WholeSums dot_words(WholeSums s, const WordPairs& w, const int16_t* x) {
  const __m256i v = _mm256_set1_epi32(word(x));
  return {_mm256_add_epi32(s.a, _mm256_madd_epi16(w.a, v)), _mm256_add_epi32(s.b, _mm256_madd_epi16(w.b, v))};
}

#ifdef QB_VNNI

using WholeBytes = Bytes;
using HalfSums = WholeSums;
using WholeValue = int8_t;
inline __m256i plus_four(__m256i s, __m256i w, __m256i x) {
#ifdef QB_VNNI_EMULATED  // for tests on machines without the instruction
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
  return _mm256_add_epi32(s, _mm256_add_epi32(even, _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8))));
#else
  return _mm256_dpbusd_avx_epi32(s, w, x);
#endif
}
inline WholeBytes whole(Bytes x) { return x; }
inline WholeSums dot_whole(WholeSums s, const WholeBytes& w, const int8_t* x) {
  const __m256i v = _mm256_set1_epi32(word(x));
  return {plus_four(s.a, w.a, v), plus_four(s.b, w.b, v)};
}
inline HalfSums dot_half(HalfSums s, const Bytes& w, const int8_t* x) { return dot_whole(s, w, x); }

#else

// Bytes are widened to 16 bits, those of even and of odd inputs apart, and their products added in 32. Halves are small: their products with all
// inputs of a group add up in 16 bits, at most 16 * 15 * 127 < 2^15.
struct HalfSums {
  __m256i a, b;
  int32_t from;  // does not fit 16 bits
};
struct WholeBytes {
  __m256i even_a, even_b, odd_a, odd_b;
};
using WholeValue = int16_t;
inline void start(HalfSums& s, int32_t n) { s.a = s.b = _mm256_setzero_si256(), s.from = n; }
inline WholeBytes whole(Bytes x) {
  const __m256i low = _mm256_set1_epi16(255);
  return {_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low), _mm256_srli_epi16(x.a, 8), _mm256_srli_epi16(x.b, 8)};
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
inline HalfSums dot_half(HalfSums s, const Bytes& w, const int8_t* x) {
  const __m256i v = _mm256_set1_epi32(word(x));
  return {plus_half(s.a, w.a, v), plus_half(s.b, w.b, v), s.from};
}
inline WholeSums dot_two(WholeSums s, const Bytes& w, const Bytes& behind, const int8_t* x) {  // in 16 bits: 4 * 63 * 127 < 2^15
  const __m256i v = _mm256_set1_epi32(word(x)), next = _mm256_set1_epi32(word(x + 4)), one = _mm256_set1_epi16(1);
  const auto both = [&](__m256i first, __m256i second) {
    return _mm256_madd_epi16(plus_half(_mm256_maddubs_epi16(first, v), second, next), one);
  };
  return {keep(_mm256_add_epi32(s.a, both(w.a, behind.a))), keep(_mm256_add_epi32(s.b, both(w.b, behind.b)))};
}
inline Lanes to_lanes(HalfSums s) {
  const __m256i one = _mm256_set1_epi16(1), from = _mm256_set1_epi32(s.from);
  return to_lanes(_mm256_add_epi32(_mm256_madd_epi16(s.a, one), from), _mm256_add_epi32(_mm256_madd_epi16(s.b, one), from));
}

#endif

#elif defined(QB_NEON)

// Signed bytes with signed ones.
struct Bytes {
  uint8x16_t v[4];
};
struct WholeSums {
  int32x4_t v[4];
};
struct WholeBytes {
  int8x16_t v[4];
};
struct WordPairs {
  int16x8_t v[4];
};
using HalfSums = WholeSums;
using WholeValue = int8_t;
inline void start(WholeSums& s, int32_t n) {
  for (int32x4_t& v : s.v) v = vdupq_n_s32(n);
}
template <class F>
inline Bytes sixteens(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}
inline Bytes load_bytes(const uint8_t* p) {
  return sixteens([p](int i) { return vld1q_u8(p + 16 * i); });
}
template <int S>
inline Bytes shifted(const Bytes& x, int mask) {
  return sixteens([&](int i) { return vandq_u8(vshlq_u8(x.v[i], vdupq_n_s8(-S)), vdupq_n_u8(uint8_t(mask))); });
}
inline Bytes either(const Bytes& x, const Bytes& y) {
  return sixteens([&](int i) { return vorrq_u8(x.v[i], y.v[i]); });
}
inline Bytes looked_up(const Bytes& x, const uint8_t* table) {
  return sixteens([&](int i) { return vqtbl1q_u8(vld1q_u8(table), x.v[i]); });
}
inline WholeBytes whole(const Bytes& x) {
  WholeBytes w;
  for (int i = 0; i < 4; ++i) w.v[i] = vreinterpretq_s8_u8(x.v[i]);
  return w;
}
constexpr int32_t ABOVE = 128;
inline WholeBytes whole_wide(const Bytes& x) {
  return whole(sixteens([&](int i) { return veorq_u8(x.v[i], vdupq_n_u8(128)); }));
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
inline HalfSums dot_half(HalfSums s, const Bytes& w, const int8_t* x) { return dot_whole(s, whole(w), x); }
inline Lanes to_lanes(const WholeSums& s) {
  return fours([&](int i) { return vcvtq_f32_s32(s.v[i]); });
}
inline WordPairs load_word_pairs(const uint8_t* first, const uint8_t* second) {
  const uint8x16_t a = vld1q_u8(first), b = vld1q_u8(second), low = vzip1q_u8(a, b), high = vzip2q_u8(a, b);
  const auto words = [](uint8x8_t x) { return vreinterpretq_s16_u16(vmovl_u8(x)); };
  return {{words(vget_low_u8(low)), words(vget_high_u8(low)), words(vget_low_u8(high)), words(vget_high_u8(high))}};
}
inline WholeSums dot_words(WholeSums s, const WordPairs& w, const int16_t* x) {
  const int16x8_t v = vreinterpretq_s16_s32(vdupq_n_s32(word(x)));
  for (int i = 0; i < 4; ++i) {
    const int32x4_t low = vmull_s16(vget_low_s16(w.v[i]), vget_low_s16(v)), high = vmull_high_s16(w.v[i], v);
    s.v[i] = vaddq_s32(s.v[i], vpaddq_s32(low, high));
  }
  return s;
}

#else

struct Bytes {
  uint8_t v[64];
};
struct WholeSums {
  int32_t v[16];
};
struct WordPairs {
  int16_t v[32];
};
using WholeBytes = Bytes;
using HalfSums = WholeSums;
using WholeValue = int8_t;
inline void start(WholeSums& s, int32_t n) { std::fill_n(s.v, 16, n); }
inline Bytes load_bytes(const uint8_t* p) {
  Bytes x;
  std::memcpy(x.v, p, 64);
  return x;
}
template <int S>
inline Bytes shifted(Bytes x, int mask) {
  for (uint8_t& v : x.v) v = uint8_t((S >= 0 ? v >> (S >= 0 ? S : 0) : v << (S < 0 ? -S : 0)) & mask);
  return x;
}
inline Bytes either(Bytes x, const Bytes& y) {
  for (int i = 0; i < 64; ++i) x.v[i] |= y.v[i];
  return x;
}
inline Bytes looked_up(Bytes x, const uint8_t* table) {
  for (uint8_t& v : x.v) v = table[v];
  return x;
}
inline WholeBytes whole(const Bytes& x) { return x; }
inline WholeSums dot_whole(WholeSums s, const WholeBytes& w, const int8_t* x) {
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 4; ++k) s.v[i] += int32_t(w.v[4 * i + k]) * x[k];
  return s;
}
inline HalfSums dot_half(HalfSums s, const Bytes& w, const int8_t* x) { return dot_whole(s, w, x); }
inline Lanes to_lanes(const WholeSums& s) {
  return each([&](int i) { return float(s.v[i]); });
}
inline WordPairs load_word_pairs(const uint8_t* first, const uint8_t* second) {
  WordPairs w;
  for (int i = 0; i < 16; ++i) w.v[2 * i] = first[i], w.v[2 * i + 1] = second[i];
  return w;
}
inline WholeSums dot_words(WholeSums s, const WordPairs& w, const int16_t* x) {
  for (int i = 0; i < 16; ++i) s.v[i] += w.v[2 * i] * x[0] + w.v[2 * i + 1] * x[1];
  return s;
}

#endif

#if defined(QB_VNNI) || !(defined(QB_AVX2) || defined(QB_ZMM))
inline WholeSums dot_two(const WholeSums& s, const Bytes& w, const Bytes& behind, const int8_t* x) {
  return dot_whole(dot_whole(s, whole(w), x), whole(behind), x + 4);
}
#endif

#if !(defined(QB_VNNI) && defined(QB_ZMM))
template <class Sums>
inline Lanes raised(const Sums& s, int32_t by) {
  return mul(to_lanes(s), all(float(1 << by)));
}
#endif

#ifndef QB_NEON
constexpr int32_t ABOVE = 0;
inline WholeBytes whole_wide(const Bytes& x) { return whole(x); }
#endif

// A group of whole numbers as products read them.
inline void arrange(const Lanes& a, const Lanes& b, int8_t* to) {
#ifdef QB_ZMM
  const auto bytes = [](Lanes x) { return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)); };
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes(a)), _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16), bytes(b));
#else
  float from[GROUP];
  store(from, a), store(from + 16, b);
  for (int64_t i = 0; i < GROUP; ++i) to[i] = int8_t(from[i]);
#endif
}
inline void arrange(const Lanes& a, const Lanes& b, int16_t* to) {  // even inputs of a four, then its odd ones
  float from[GROUP];
  store(from, a), store(from + 16, b);
  for (int64_t i = 0; i < GROUP; i += 4) {
    const int16_t four[4] = {int16_t(from[i]), int16_t(from[i + 2]), int16_t(from[i + 1]), int16_t(from[i + 3])};
    std::memcpy(to + i, four, sizeof four);
  }
}

// Sixteen bytes as numbers.
#if defined(QB_ZMM)
inline __m128i load_16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline Lanes load_numbers(const uint8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_16(p)))}; }
inline Lanes load_numbers(const int8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(p)))}; }
#elif defined(QB_AVX2)
inline __m128i load_8(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline Lanes load_numbers(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_8(p))), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_8(p + 8)))};
}
inline Lanes load_numbers(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8(p))), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8(p + 8)))};
}
#else
template <class T>
inline Lanes load_numbers(const T* p) {
  float v[16];
  for (int i = 0; i < 16; ++i) v[i] = float(p[i]);
  return load(v);
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
