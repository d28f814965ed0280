// The formats of weights, and how those of few bits lie in memory.
//
// A block holds 16 outputs (`block_bytes`). Inputs go in groups of 32, the last filled up. For every eight groups, or as many as are left, come
// their values, [groups][bits * 64] bytes, and behind these their scales, filled up to 64 bytes: so that products read a block from its first byte to
// its last, which memory gives fastest. A value is a whole number of `bits` bits, without sign; a weight is (value - offset) * scale,
// value * scale + lowest, or a number of a table times scale.
//
// Values of a group are in parts of 8, 4, 2 or 1 bits, the lowest first, as many as a value's bits add up to (5: 4 and 1). A part of n bits is
// [n][16][4]: each byte has the bits of 8 / n inputs, the first lowest, every next input the fourth behind. So of 8 bits [8][16][4] are four
// inputs of each output, and of 4 bits the first row holds inputs 0 to 3 in its low halves and inputs 4 to 7 in its high ones.
#pragma once
#include <type_traits>

#include "bytes.h"

#ifdef __GNUC__
#define QB_OF_ITS_OWN __attribute__((noinline))
#define QB_UNROLL _Pragma("GCC unroll 8")  // what is kept in registers
#else
#define QB_OF_ITS_OWN
#define QB_UNROLL
#endif

namespace qb {

// In the order of `library.FORMATS`. INT4 is Q4_1 of GGUF files, and those from Q4_0 to TQ2_0 are named as there. The last are of checkpoints:
// whole numbers of 4 and 8 bits, and float8 numbers (`float8.h`), with a scale for 32 or for 128 inputs.
enum Format : int32_t {
  BFLOAT16, INT8, INT4, FLOAT32, Q4_0, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4,
  IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, TQ1_0, TQ2_0,
  W4_G32, W4_G128, W8_G32, W8_G128, FP8_G32, FP8_G128
};

// Scales, and lowest values where there are any. By group but for OUTPUT:
//   OUTPUT: float [16] for all groups, behind the last of them. HALF: half precision [16]. PAIR: half precision [2][16], scales and lowest
//   values. EXPONENT: bytes [16], each the exponent of a power of two. ZERO: float [16], and behind all of them bytes [16], zero points: whole
//   numbers that are taken from values first. FLOAT: float [16], of float8 numbers. ZERO_4, FLOAT_4: for every four groups.
// By eight groups: whole numbers, behind all of them half precision numbers for the eight groups, which they are taken times. A name in _16
// has them for the first and for the second 16 inputs of the group.
//   SUPER: bytes [2][16], scales and minus the lowest values, half precision [2][16]. SUPER_16: bytes [2][16], each a scale (low half) and a
//   lowest value (high half). SIGNED: signed bytes [16], half precision [16]. SIGNED_16: signed bytes [2][16].
enum Scales : int32_t { NONE, OUTPUT, HALF, PAIR, EXPONENT, SUPER, SUPER_16, SIGNED, SIGNED_16, ZERO, ZERO_4, FLOAT, FLOAT_4 };

struct Layout {
  int32_t bits;
  Scales scales;
  int32_t offset;        // of values
  const uint8_t* table;  // of 16 numbers, from which `offset` is taken; null for none
  float factor = 1.0f;   // of the scales of eight groups, a power of two
};

constexpr uint8_t IQ4_NL_TABLE[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t MXFP4_TABLE[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};
// Of the formats with a grid: the magnitudes first, behind them the same with a minus. Of IQ1 eighths: -1, 0 and 1 plus an eighth, and less one.
constexpr uint8_t IQ1_TABLE[16] = {121, 129, 137, 128, 119, 127, 135, 128};
constexpr uint8_t IQ2_TABLE[16] = {136, 153, 171, 128, 120, 103, 85, 128};
constexpr uint8_t IQ3_XXS_TABLE[16] = {132, 140, 148, 156, 164, 172, 180, 190, 124, 116, 108, 100, 92, 84, 76, 66};
constexpr uint8_t IQ3_S_TABLE[16] = {129, 131, 133, 135, 137, 139, 141, 143, 127, 125, 123, 121, 119, 117, 115, 113};
constexpr Layout LAYOUTS[] = {
    {16, NONE, 0, nullptr}, {8, OUTPUT, 128, nullptr}, {4, PAIR, 0, nullptr}, {32, NONE, 0, nullptr},
    // from Q4_0 on
    {4, HALF, 8, nullptr}, {5, HALF, 16, nullptr}, {5, PAIR, 0, nullptr}, {8, HALF, 128, nullptr},
    // from Q2_K on
    {2, SUPER_16, 0, nullptr}, {3, SIGNED_16, 4, nullptr}, {4, SUPER, 0, nullptr}, {5, SUPER, 0, nullptr}, {6, SIGNED_16, 32, nullptr},
    // from IQ4_NL on
    {4, HALF, 128, IQ4_NL_TABLE}, {4, SIGNED, 128, IQ4_NL_TABLE}, {4, EXPONENT, 128, MXFP4_TABLE},
    // from IQ1_S on
    {3, SIGNED, 128, IQ1_TABLE, 0.125f}, {3, SIGNED_16, 128, IQ1_TABLE, 0.125f}, {3, SIGNED, 128, IQ2_TABLE, 0.125f},
    {3, SIGNED_16, 128, IQ2_TABLE, 0.125f}, {3, SIGNED_16, 128, IQ2_TABLE, 0.125f},
    // from IQ3_XXS on
    {4, SIGNED, 128, IQ3_XXS_TABLE, 0.25f}, {4, SIGNED, 128, IQ3_S_TABLE}, {2, SIGNED, 1, nullptr}, {2, SIGNED, 1, nullptr},
    // of checkpoints
    {4, ZERO, 0, nullptr}, {4, ZERO_4, 0, nullptr}, {8, ZERO, 0, nullptr}, {8, ZERO_4, 0, nullptr}, {8, FLOAT, 0, nullptr}, {8, FLOAT_4, 0, nullptr}};

constexpr int64_t SUPER_GROUPS = 8;  // that share a scale
constexpr int64_t shared_by(Scales scales) { return scales == ZERO_4 || scales == FLOAT_4 ? 4 : 1; }
constexpr bool zeroed(Scales scales) { return scales == ZERO || scales == ZERO_4; }
constexpr bool has_whole_lowest(Scales scales) { return scales == SUPER || scales == SUPER_16; }
constexpr bool by_eight(Scales scales) { return has_whole_lowest(scales) || scales == SIGNED || scales == SIGNED_16; }
constexpr int pieces_of(Scales scales) { return scales == SUPER_16 || scales == SIGNED_16 ? 2 : 1; }  // of a group, with a scale each
constexpr bool is_float8(Scales scales) { return scales == FLOAT || scales == FLOAT_4; }

inline int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }
inline int64_t scale_bytes(Scales scales, int64_t groups) {  // of at most eight groups, their own
  const int64_t shared = (groups + shared_by(scales) - 1) / shared_by(scales);
  switch (scales) {
    case NONE:
    case OUTPUT: return 0;
    case HALF: return groups * 32;
    case PAIR: return groups * 64;
    case EXPONENT: return groups * 16;
    case SUPER:
    case SUPER_16: return groups * 32 + 64;
    case SIGNED: return groups * 16 + 32;
    case SIGNED_16: return groups * 32 + 32;
    case ZERO:
    case ZERO_4: return shared * 80;
    case FLOAT:
    case FLOAT_4: return shared * 64;
  }
  return 0;
}
// Bytes of at most eight groups, values and scales.
inline int64_t eight_bytes(const Layout& of, int64_t groups) {
  return groups == 0 ? 0 : (groups * of.bits * 64 + scale_bytes(of.scales, groups) + 63) / 64 * 64;
}
inline int64_t block_bytes(int32_t format, int64_t inputs) {
  const Layout& of = LAYOUTS[format];
  if (of.scales == NONE) return inputs * of.bits * 2;
  const int64_t groups = groups_of(inputs), eights = groups / SUPER_GROUPS;
  return eights * eight_bytes(of, SUPER_GROUPS) + eight_bytes(of, groups % SUPER_GROUPS) + (of.scales == OUTPUT ? 64 : 0);
}
// Where the values of group g of a block stand.
inline int64_t group_place(const Layout& of, int64_t g) {
  return g / SUPER_GROUPS * eight_bytes(of, SUPER_GROUPS) + g % SUPER_GROUPS * of.bits * 64;
}
// Of `groups` groups in all: how many there are of the eight that begin with group g, and where their scales stand.
inline int64_t eight_count(int64_t groups, int64_t g) { return std::min(SUPER_GROUPS, groups - g); }
inline int64_t scales_place(const Layout& of, int64_t groups, int64_t g) { return group_place(of, g) + eight_count(groups, g) * of.bits * 64; }

// 2^(x - 128), as GGUF has it.
inline Lanes load_exponents(const uint8_t* p) {
  float v[16];
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = p[i] < 2 ? 0x00200000u << p[i] : uint32_t(p[i] - 1) << 23;
    std::memcpy(v + i, &bits, 4);
  }
  return load(v);
}

// Rows that are quantised by eight groups: the most that a group's numbers are finer than those of the largest group, as a power of two; and in how
// many of the finest steps a group's total is counted.
constexpr int32_t FINEST = 7, TOTAL_STEP = 16;

// The scales of eight groups that follow one another.
struct Scales8 {
  struct {
    Lanes by, plus;  // plus: lowest values of PAIR, zero points of ZERO. By eight whole numbers: by, and plus of a group's second piece
  } of[SUPER_GROUPS];
  Lanes by, lowest_by;             // what whole numbers are taken times; lowest values times TOTAL_STEP as well
  WordPairs lowest[SUPER_GROUPS];  // two pieces each: of SUPER two groups, of SUPER_16 the two of a group
};

// Of `count` groups that follow one another, behind whose values stand `scales`.
inline void load_scales(const Layout& layout, const uint8_t* scales, int64_t count, Scales8& to) {
  const Scales kind = layout.scales;
  const auto halves = [](const uint8_t* p) { return load_half_floats(reinterpret_cast<const uint16_t*>(p)); };
  const uint8_t *own = scales, *super = scales + SUPER_GROUPS * 32;
  const int64_t by = shared_by(kind), shared = (count + by - 1) / by;
  switch (kind) {
    case HALF:
      for (int64_t i = 0; i < count; ++i) to.of[i].by = halves(scales + i * 32);
      break;
    case PAIR:
      for (int64_t i = 0; i < count; ++i) to.of[i] = {halves(scales + i * 64), halves(scales + i * 64 + 32)};
      break;
    case EXPONENT:
      for (int64_t i = 0; i < count; ++i) to.of[i].by = load_exponents(scales + i * 16);
      break;
    case SUPER:
      to.by = halves(super), to.lowest_by = mul(halves(super + 32), all(float(-TOTAL_STEP)));
      for (int64_t i = 0; i < SUPER_GROUPS; ++i) to.of[i].by = load_numbers(own + i * 32);
      for (int64_t i = 0; i < SUPER_GROUPS; i += 2) to.lowest[i / 2] = load_word_pairs(own + i * 32 + 16, own + i * 32 + 48);
      break;
    case SUPER_16:
      to.by = halves(super), to.lowest_by = mul(halves(super + 32), all(float(-TOTAL_STEP)));
      for (int64_t i = 0; i < SUPER_GROUPS; ++i, own += 32) {
        uint8_t scale[32], lowest[32];
        for (int64_t k = 0; k < 32; ++k) scale[k] = own[k] & 15, lowest[k] = own[k] >> 4;
        to.of[i] = {load_numbers(scale), load_numbers(scale + 16)};
        to.lowest[i] = load_word_pairs(lowest, lowest + 16);
      }
      break;
    case SIGNED:
      to.by = mul(halves(scales + SUPER_GROUPS * 16), all(layout.factor));
      for (int64_t i = 0; i < SUPER_GROUPS; ++i) to.of[i].by = load_numbers(reinterpret_cast<const int8_t*>(scales + i * 16));
      break;
    case SIGNED_16:
      to.by = mul(halves(super), all(layout.factor));
      for (int64_t i = 0; i < SUPER_GROUPS; ++i) {
        const int8_t* two = reinterpret_cast<const int8_t*>(own + i * 32);
        to.of[i] = {load_numbers(two), load_numbers(two + 16)};
      }
      break;
    case ZERO:
    case ZERO_4:
      for (int64_t i = 0; i < count; ++i) to.of[i].plus = load_numbers(scales + shared * 64 + i / by * 16);
      [[fallthrough]];
    case FLOAT:
    case FLOAT_4:
      for (int64_t i = 0; i < count; ++i) to.of[i].by = load(reinterpret_cast<const float*>(scales) + i / by * 16);
      break;
    default: break;
  }
}

// The same of `groups` groups from w on, the first of eight. One function for all products, which would be large otherwise.
QB_OF_ITS_OWN static void scales_of(const Layout& of, const uint8_t* w, int64_t groups, Scales8* to) {
  for (int64_t g = 0; g < groups; g += SUPER_GROUPS, ++to) load_scales(of, w + scales_place(of, groups, g), eight_count(groups, g), *to);
}

// Products of values of `BITS` bits with scales of a KIND: OUTPUT, HALF (of a group, whatever holds it), PAIR (lowest values as well), ZERO
// (zero points as well), or those `by_eight`. BY_EIGHT: rows are quantised by eight groups, so that these are added up before scales that they
// share. TABLE: values stand for numbers of a table.
template <int BITS, Scales KIND, bool TABLE>
struct Values {
  static constexpr bool SMALL = BITS <= 4 && !TABLE, TWO = BITS == 5 || BITS == 6;
  static constexpr bool WIDE = BITS == 8 || TABLE;  // up to 255
  static constexpr bool SCALED = KIND != OUTPUT, LOWEST = has_whole_lowest(KIND);
  static constexpr bool ADDS = KIND == PAIR || KIND == ZERO || LOWEST, SCALED_TOTALS = KIND == PAIR;
  static constexpr bool BY_EIGHT = by_eight(KIND);
  static constexpr int PIECES = pieces_of(KIND);  // which are summed apart
  static constexpr int LOW = BITS >= 8 ? 8 : BITS >= 4 ? 4 : 2, HIGH = BITS - LOW;  // the parts of values
  static constexpr int64_t GROUP_BYTES = BITS * 64;
  using Sums = std::conditional_t<SMALL, HalfSums, WholeSums>;
  using Value = std::conditional_t<SMALL || TWO, int8_t, WholeValue>;

  template <int C, int N, int FROM>  // of inputs 4 * C to 4 * C + 3 the part of N bits, which begins with bit FROM
  static Bytes part(const uint8_t* w) {
    return shifted<C % (8 / N) * N - FROM>(load_bytes(w + (FROM + C / (8 / N)) * 64), ((1 << N) - 1) << FROM);
  }

  template <int C>
  static Bytes four(const uint8_t* w, [[maybe_unused]] const uint8_t* table) {
    if constexpr (BITS == 8) return load_bytes(w + C * 64);
    else {
      const Bytes low = part<C, LOW, 0>(w);
      if constexpr (TABLE && HIGH > 0) return looked_up(either(low, part<C, HIGH, LOW>(w)), table);
      else if constexpr (TABLE) return looked_up(low, table);
      else if constexpr (HIGH > 0) return either(low, part<C, HIGH, LOW>(w));
      else return low;
    }
  }

  template <int C, int R>
  static void step(Sums (&s)[R][PIECES], const Value* x, const uint8_t* w, const uint8_t* table) {
    constexpr int piece = C * PIECES / 8;
    x += C * 4;
    if constexpr (SMALL) {
      const Bytes v = four<C>(w, table);
      for (int r = 0; r < R; ++r) s[r][piece] = dot_half(s[r][piece], v, x + r * GROUP);
    } else if constexpr (TWO) {
      if constexpr (C % 2 == 0) {
        const Bytes v = four<C>(w, table), behind = four<C + 1>(w, table);
        for (int r = 0; r < R; ++r) s[r][piece] = dot_two(s[r][piece], v, behind, x + r * GROUP);
      }
    } else {
      const WholeBytes v = WIDE ? whole_wide(four<C>(w, table)) : whole(four<C>(w, table));
      for (int r = 0; r < R; ++r) s[r][piece] = dot_whole(s[r][piece], v, x + r * GROUP);
    }
  }

  // A group of R rows, [R][32].
  template <int R>
  static void add(Sums (&s)[R][PIECES], const Value* x, const uint8_t* w, const uint8_t* table) {
    step<0>(s, x, w, table), step<1>(s, x, w, table), step<2>(s, x, w, table), step<3>(s, x, w, table);
    step<4>(s, x, w, table), step<5>(s, x, w, table), step<6>(s, x, w, table), step<7>(s, x, w, table);
  }

  // What eight groups have added so far, and what one more adds, whose numbers are 2^finer times as fine as the row's scale.
  template <class Scale>
  static Lanes plus_group(const Lanes& f, const Sums (&s)[PIECES], const Scale& scale, int32_t finer) {
    const Lanes sum = fused(raised(s[0], FINEST - finer), scale.by, f);
    return PIECES == 1 ? sum : fused(raised(s[PIECES - 1], FINEST - finer), scale.plus, sum);
  }

  // A result so far, and what a group adds. `row`: the row's scale; `total`: the sum of its values, with lowest values times the scale.
  template <class Scale>
  static Lanes plus(const Lanes& f, const Sums (&s)[PIECES], const Scale& scale, float row, [[maybe_unused]] float total) {
    Lanes sum = to_lanes(s[0]);
    if constexpr (KIND == OUTPUT) return fused(sum, all(row), f);
    if constexpr (KIND == ZERO) sum = sub(sum, mul(WIDE ? sub(scale.plus, all(float(ABOVE))) : scale.plus, all(total)));  // exact: below 2^24
    const Lanes more = fused(mul(sum, all(row)), scale.by, f);
    return KIND == PAIR ? fused(scale.plus, all(total), more) : more;
  }

  // A result so far, and what eight groups add whose sums are `eight`. `totals`: of the values of their pieces, in TOTAL_STEPs.
  static Lanes plus_eight(const Lanes& f, const Lanes& eight, const Scales8& scale, float row, [[maybe_unused]] const int16_t* totals) {
    Lanes sum = mul(eight, scale.by);
    if constexpr (LOWEST) {
      WholeSums lowest;
      start(lowest, 0);
      for (int64_t i = 0; i < SUPER_GROUPS * PIECES; i += 2) lowest = dot_words(lowest, scale.lowest[i / 2], totals + i);
      sum = fused(to_lanes(lowest), scale.lowest_by, sum);
    }
    return fused(sum, all(row), f);
  }
};

// f(Values<...>) for what a layout needs.
template <class F>
static void with_values(const Layout& of, F f) {
  const bool lowest = of.scales == PAIR, super = of.scales == SUPER, zero_point = zeroed(of.scales), by_group = of.scales == SIGNED;
  if (of.bits == 8 && zero_point) f(Values<8, ZERO, false>());
  else if (zero_point) f(Values<4, ZERO, false>());
  else if (of.scales == OUTPUT) f(Values<8, OUTPUT, false>());
  else if (of.bits == 8) f(Values<8, HALF, false>());
  else if (of.bits == 2 && by_group) f(Values<2, SIGNED, false>());
  else if (of.bits == 2) f(Values<2, SUPER_16, false>());
  else if (of.bits == 3 && by_group) f(Values<3, SIGNED, true>());
  else if (of.bits == 3 && of.table) f(Values<3, SIGNED_16, true>());
  else if (of.bits == 3) f(Values<3, SIGNED_16, false>());
  else if (of.bits == 6) f(Values<6, SIGNED_16, false>());
  else if (of.bits == 5 && super) f(Values<5, SUPER, false>());
  else if (super) f(Values<4, SUPER, false>());
  else if (of.bits == 5 && lowest) f(Values<5, PAIR, false>());
  else if (of.bits == 5) f(Values<5, HALF, false>());
  else if (by_group) f(Values<4, SIGNED, true>());
  else if (of.table) f(Values<4, HALF, true>());
  else if (lowest) f(Values<4, PAIR, false>());
  else f(Values<4, HALF, false>());
}

}  // namespace qb
