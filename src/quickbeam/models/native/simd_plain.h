// Plain C++, for any machine; and what the others are held to.
#pragma once

namespace qb {

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
#ifdef __MINGW32__  // whose `fma` rounds twice; of a sum in double that is odd where it is not exact, the second rounding alone counts
inline float fused(float a, float b, float c) {
  const double product = double(a) * b, sum = product + c, back = sum - product, rest = (product - (sum - back)) + (c - back);
  int64_t bits;
  double odd;
  std::memcpy(&bits, &sum, 8);
  if ((rest < 0 || rest > 0) && !(bits & 1)) bits += (rest > 0) == (sum > 0) ? 1 : -1;
  std::memcpy(&odd, &bits, 8);
  return float(odd);
}
#else
inline float fused(float a, float b, float c) { return std::fma(a, b, c); }
#endif
inline Lanes fused(const Lanes& a, const Lanes& b, const Lanes& c) { return each([&](int i) { return fused(a.v[i], b.v[i], c.v[i]); }); }
inline Lanes least(const Lanes& a, const Lanes& b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline Lanes greatest(const Lanes& a, const Lanes& b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline float highest(const Lanes& a) {
  float best = a.v[0];
  for (int i = 1; i < 16; ++i) best = a.v[i] > best ? a.v[i] : best;
  return best;
}
inline float total(const Lanes& a) {
  float all = 0;
  for (int i = 0; i < 16; ++i) all += a.v[i];
  return all;
}
inline bool any_above(const Lanes& a, float y) {
  int above = 0;
  for (int i = 0; i < 16; ++i) above |= !(a.v[i] <= y);
  return above != 0;
}
inline Lanes round_even(const Lanes& a) { return each([&](int i) { return std::nearbyint(a.v[i]); }); }
inline Lanes two_to(const Lanes& n) {
  return each([&](int i) { return n.v[i] > -127.0f ? std::ldexp(1.0f, int(n.v[i])) : 0.0f; });
}

inline Lanes load_even(const bf16* p) {
  return each([p](int i) { return widen(p[2 * i]); });
}
inline Lanes load_odd(const bf16* p) {
  return each([p](int i) { return widen(p[2 * i + 1]); });
}

}  // namespace qb
