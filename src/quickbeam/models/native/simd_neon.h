// NEON of 64-bit ARM: sixteen lanes are four registers. QB_DOT: pairs of bfloat16 are multiplied by the machine (BFDOT).
#pragma once

namespace qb {

struct Lanes {
  float32x4_t v[4];
};
template <class F>
inline Lanes fours(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}
inline Lanes zero() { return fours([](int) { return vdupq_n_f32(0.0f); }); }
inline Lanes all(float x) { return fours([x](int) { return vdupq_n_f32(x); }); }
inline Lanes load(const float* p) { return fours([p](int i) { return vld1q_f32(p + 4 * i); }); }
inline Lanes load_first(const float* p, int64_t n) {
  if (n == 16) return load(p);
  float part[16] = {};
  std::memcpy(part, p, size_t(n) * 4);
  return load(part);
}
inline Lanes load(const bf16* p) { return fours([p](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); }); }
inline void store(float* p, const Lanes& a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
inline void store_first(float* p, const Lanes& a, int64_t n) {
  if (n == 16) return store(p, a);
  float part[16];
  store(part, a);
  std::memcpy(p, part, size_t(n) * 4);
}
inline void store(bf16* p, const Lanes& a) {
  for (int i = 0; i < 4; ++i) {
    const uint32x4_t bits = vreinterpretq_u32_f32(a.v[i]), high = vshrq_n_u32(bits, 16), odd = vandq_u32(high, vdupq_n_u32(1));
    const uint32x4_t near = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
    const uint32x4_t number = vceqq_f32(a.v[i], a.v[i]);
    vst1_u16(p + 4 * i, vmovn_u32(vbslq_u32(number, near, vorrq_u32(high, vdupq_n_u32(0x40)))));
  }
}
inline Lanes add(const Lanes& a, const Lanes& b) { return fours([&](int i) { return vaddq_f32(a.v[i], b.v[i]); }); }
inline Lanes sub(const Lanes& a, const Lanes& b) { return fours([&](int i) { return vsubq_f32(a.v[i], b.v[i]); }); }
inline Lanes mul(const Lanes& a, const Lanes& b) { return fours([&](int i) { return vmulq_f32(a.v[i], b.v[i]); }); }
inline Lanes div(const Lanes& a, const Lanes& b) { return fours([&](int i) { return vdivq_f32(a.v[i], b.v[i]); }); }
inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) { return fours([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); }); }
// Not the machine's own smallest and largest: of a number and NaN these would be NaN.
inline Lanes least(const Lanes& a, const Lanes& b) { return fours([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); }); }
inline Lanes greatest(const Lanes& a, const Lanes& b) {
  return fours([&](int i) { return vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
inline float highest(const Lanes& a) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3]))); }
inline float total(const Lanes& a) { return vaddvq_f32(vaddq_f32(vaddq_f32(a.v[0], a.v[1]), vaddq_f32(a.v[2], a.v[3]))); }
inline bool any_above(const Lanes& a, float y) {
  const float32x4_t bar = vdupq_n_f32(y);
  const uint32x4_t low = vandq_u32(vcleq_f32(a.v[0], bar), vcleq_f32(a.v[1], bar)), high = vandq_u32(vcleq_f32(a.v[2], bar), vcleq_f32(a.v[3], bar));
  return vminvq_u32(vandq_u32(low, high)) == 0;
}
inline Lanes round_even(const Lanes& a) { return fours([&](int i) { return vrndnq_f32(a.v[i]); }); }
inline Lanes two_to(const Lanes& n) {
  return fours([&](int i) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23)); });
}

#ifdef QB_DOT
struct Pairs {
  bfloat16x8_t v[4];
};
inline Pairs load_pairs(const bf16* p) {
  const auto four = [p](int i) { return vreinterpretq_bf16_u16(vld1q_u16(p + 8 * i)); };
  return {{four(0), four(1), four(2), four(3)}};
}
inline Pairs all_pair(const bf16* p) {
  uint32_t pair;
  std::memcpy(&pair, p, 4);
  const bfloat16x8_t four = vreinterpretq_bf16_u32(vdupq_n_u32(pair));
  return {{four, four, four, four}};
}
inline Lanes dot(const Pairs& a, const Pairs& b, const Lanes& c) { return fours([&](int i) { return vbfdotq_f32(c.v[i], a.v[i], b.v[i]); }); }
#else
inline Lanes load_even(const bf16* p) {
  return fours([p](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(vld1q_u16(p + 8 * i)), 16)); });
}
inline Lanes load_odd(const bf16* p) {
  return fours([p](int i) { return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u16(vld1q_u16(p + 8 * i)), vdupq_n_u32(0xffff0000))); });
}
#endif

}  // namespace qb
