// Blocks of weights as they stand in GGUF files, or as checkpoints' weights are handed over, to the layouts of `formats.h`, and from these back
// to numbers.
//
// A row of a file is blocks of 32 or 256 inputs (ggml, `ggml-common.h`). Their bits are moved, never rounded: the numbers that a layout
// stands for (`dense`) are those that the file stands for, as the Python package `gguf` has them, bit for bit.
//
// Of a checkpoint's weights (`prequantised.py`): a float scale; a byte, the zero point (not of float8); the values of 32 inputs at a time, of 4 bits
// those of inputs 0 to 15 in the low halves.
#pragma once
#include <algorithm>
#include <vector>

#include "float8.h"
#include "formats.h"

namespace qb {

struct FileBlock {
  int64_t inputs, bytes;
};
inline FileBlock file_block(int32_t format) {  // {0, 0} for what no file holds
  switch (format) {
    case Q4_0:
    case IQ4_NL: return {32, 18};
    case INT4: return {32, 20};
    case Q5_0: return {32, 22};
    case Q5_1: return {32, 24};
    case Q8_0: return {32, 34};
    case MXFP4: return {32, 17};
    case IQ4_XS: return {256, 136};
    case Q2_K: return {256, 84};
    case Q3_K: return {256, 110};
    case Q4_K: return {256, 144};
    case Q5_K: return {256, 176};
    case Q6_K: return {256, 210};
    case IQ1_S: return {256, 50};
    case IQ1_M: return {256, 56};
    case IQ2_XXS: return {256, 66};
    case IQ2_XS: return {256, 74};
    case IQ2_S: return {256, 82};
    case IQ3_XXS: return {256, 98};
    case IQ3_S: return {256, 110};
    case TQ1_0: return {256, 54};
    case TQ2_0: return {256, 66};
    case W4_G32: return {32, 21};
    case W4_G128: return {128, 69};
    case W8_G32: return {32, 37};
    case W8_G128: return {128, 133};
    case FP8_G32: return {32, 36};
    case FP8_G128: return {128, 132};
    default: return {0, 0};
  }
}

static uint32_t word_at(const uint8_t* p, size_t bytes) {
  uint32_t word = 0;
  std::memcpy(&word, p, bytes);
  return word;
}

// Of the formats with a grid: inputs that a row of the grid is for; the row for inputs from i * grid_width on; the signs of inputs from i * 8 on, a bit
// each (1: minus; of IQ1: less an eighth).
static int64_t grid_width(int32_t format) { return format == IQ3_XXS || format == IQ3_S ? 4 : 8; }
static int64_t grid_row(int32_t format, const uint8_t* block, int64_t i) {
  switch (format) {
    case IQ1_S: return block[2 + i] | (word_at(block + 34 + i / 4 * 2, 2) >> i % 4 * 3 & 7) << 8;
    case IQ1_M: return block[i] | (block[32 + i / 2] >> i % 2 * 4 & 7) << 8;
    case IQ2_XXS: return block[2 + i / 4 * 8 + i % 4];
    case IQ2_XS: return word_at(block + 2 + i * 2, 2) & 511;
    case IQ2_S: return block[2 + i] | (block[66 + i / 4] >> i % 4 * 2 & 3) << 8;
    case IQ3_XXS: return block[2 + i];
    default: return block[2 + i] | (block[66 + i / 8] >> i % 8 & 1) << 8;  // IQ3_S
  }
}
static uint8_t grid_signs(int32_t format, const uint8_t* block, int64_t i) {
  const auto eight = [](uint32_t seven) {  // an even number of them is minus
    uint32_t odd = seven ^ seven >> 4;
    odd ^= odd >> 2, odd ^= odd >> 1;
    return uint8_t(seven | (odd & 1) << 7);
  };
  switch (format) {
    case IQ1_S: return block[35 + i / 4 * 2] & 128 ? 255 : 0;
    case IQ1_M: return block[32 + i / 2] >> i % 2 * 4 & 8 ? 255 : 0;
    case IQ2_XXS: return eight(word_at(block + 6 + i / 4 * 8, 4) >> i % 4 * 7 & 127);
    case IQ2_XS: return eight(block[3 + i * 2] >> 1);
    case IQ2_S: return block[34 + i];
    case IQ3_XXS: return eight(word_at(block + 66 + i / 4 * 4, 4) >> i % 4 * 7 & 127);
    default: return block[74 + i];  // IQ3_S
  }
}

// The values of a block, from 0 on. `grid`: [rows][grid_width] ranks of magnitudes, null for a format without.
static void values_of(int32_t format, const uint8_t* grid, const uint8_t* block, uint8_t* q) {
  const auto halves = [&q](const uint8_t* from, int count) {  // the low halves are the first inputs, the high ones those behind
    for (int i = 0; i < count; ++i) q[i] = from[i] & 15, q[count + i] = from[i] >> 4;
  };
  uint32_t high = 0;
  switch (format) {
    case Q4_0:
    case IQ4_NL: halves(block + 2, 16); break;
    case INT4: halves(block + 4, 16); break;
    case IQ4_XS:
      for (int i = 0; i < 256; i += 32, q += 32) halves(block + 8 + i / 2, 16);
      break;
    case MXFP4: halves(block + 1, 16); break;
    case Q5_0:
    case Q5_1:
      block += format == Q5_0 ? 2 : 4;
      std::memcpy(&high, block, 4);
      halves(block + 4, 16);
      for (int i = 0; i < 32; ++i) q[i] = uint8_t(q[i] | (high >> i & 1) << 4);
      break;
    case Q8_0:
      for (int i = 0; i < 32; ++i) q[i] = uint8_t(block[2 + i] ^ 128);
      break;
    case Q2_K:
    case Q3_K:
    case TQ2_0: {
      const uint8_t* low = block + (format == Q2_K ? 16 : format == Q3_K ? 32 : 0);
      for (int i = 0; i < 256; ++i) {
        q[i] = low[i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3;
        if (format == Q3_K) q[i] = uint8_t(q[i] | (block[i % 32] >> i / 32 & 1) << 2);
      }
      break;
    }
    case Q4_K:
    case Q5_K: {
      const uint8_t* low = block + (format == Q4_K ? 16 : 48);
      for (int part = 0; part < 4; ++part, q += 64)
        for (int i = 0; i < 32; ++i) {
          q[i] = low[part * 32 + i] & 15, q[32 + i] = low[part * 32 + i] >> 4;
          if (format == Q4_K) continue;
          const int bits = block[16 + i] >> 2 * part;
          q[i] = uint8_t(q[i] | (bits & 1) << 4), q[32 + i] = uint8_t(q[32 + i] | (bits >> 1 & 1) << 4);
        }
      break;
    }
    case W4_G32:
    case W4_G128:
      for (int64_t i = 0; i < file_block(format).inputs; i += 32, q += 32) halves(block + 5 + i / 2, 16);
      break;
    case W8_G32:
    case W8_G128: std::memcpy(q, block + 5, size_t(file_block(format).inputs)); break;
    case FP8_G32:
    case FP8_G128: std::memcpy(q, block + 4, size_t(file_block(format).inputs)); break;
    case IQ1_S:
    case IQ1_M:
    case IQ2_XXS:
    case IQ2_XS:
    case IQ2_S:
    case IQ3_XXS:
    case IQ3_S: {
      const int64_t width = grid_width(format), sign_bit = LAYOUTS[format].bits - 1;
      for (int64_t i = 0; i < 256; ++i) {
        const uint8_t rank = grid[grid_row(format, block, i / width) * width + i % width];
        q[i] = uint8_t(rank | (grid_signs(format, block, i / 8) >> i % 8 & 1) << sign_bit);
      }
      break;
    }
    case TQ1_0: {
      const auto digits = [&q](const uint8_t* from, int count, int each) {  // to base 3, the first of all bytes before the second
        for (int n = 0, power = 1; n < each; ++n, power *= 3)
          for (int i = 0; i < count; ++i) *q++ = uint8_t(uint8_t(from[i] * power) * 3 >> 8);
      };
      digits(block, 32, 5), digits(block + 32, 16, 5), digits(block + 48, 4, 4);
      break;
    }
    default:  // Q6_K
      for (int part = 0; part < 2; ++part, q += 128)
        for (int i = 0; i < 32; ++i) {
          const int a = block[part * 64 + i], b = block[part * 64 + 32 + i], bits = block[128 + part * 32 + i];
          q[i] = uint8_t((a & 15) | (bits & 3) << 4), q[32 + i] = uint8_t((b & 15) | (bits >> 2 & 3) << 4);
          q[64 + i] = uint8_t(a >> 4 | (bits >> 4 & 3) << 4), q[96 + i] = uint8_t(b >> 4 | bits >> 6 << 4);
        }
  }
}

// The whole number that scale j of a block is, of those that have signs.
static int whole_scale(int32_t format, const uint8_t* block, int64_t j) {
  const auto half = [j](const uint8_t* from) { return from[j / 2] >> j % 2 * 4 & 15; };
  const auto odd = [](uint32_t n) { return int(2 * n + 1); };
  switch (format) {
    case Q3_K: {  // 6 bits, less 32
      const uint8_t* s = block + 96;
      return ((j < 8 ? s[j] & 15 : s[j - 8] >> 4) | (s[8 + j % 4] >> j / 4 * 2 & 3) << 4) - 32;
    }
    case Q6_K: return int8_t(block[192 + j]);
    case IQ4_XS: return (half(block + 4) | (block[2 + j / 4] >> j % 4 * 2 & 3) << 4) - 32;
    case IQ1_S: return odd(block[35 + j * 2] >> 4 & 7);
    case IQ1_M: return odd(word_at(block + 48 + j / 4 * 2, 2) >> j % 4 * 3 & 7);
    case IQ2_XXS: return odd(block[9 + j * 8] >> 4);
    case IQ2_XS: return odd(half(block + 66));
    case IQ2_S: return odd(half(block + 74));
    case IQ3_XXS: return odd(block[69 + j * 4] >> 4);
    case IQ3_S: return odd(half(block + 106));
    default: return 1;  // TQ1_0, TQ2_0
  }
}

// The bits of the half precision number that these are taken times.
static uint16_t super_scale(int32_t format, const uint8_t* block) {
  switch (format) {
    case Q3_K: return uint16_t(word_at(block + 108, 2));
    case Q6_K: return uint16_t(word_at(block + 208, 2));
    case TQ1_0: return uint16_t(word_at(block + 52, 2));
    case TQ2_0: return uint16_t(word_at(block + 64, 2));
    case IQ1_M: return uint16_t(block[49] >> 4 | (block[51] & 240) | (block[53] & 240) << 4 | (block[55] & 240) << 8);
    default: return uint16_t(word_at(block, 2));
  }
}

// Scales of a block to those of output `lane`. `scales`: of the `groups` groups, eight at most, of which the block's first is group g.
static void put_scales(int32_t format, const uint8_t* block, uint8_t* scales, int64_t groups, int64_t g, int64_t lane) {
  uint8_t* super = scales + SUPER_GROUPS * 32;
  const int64_t by = shared_by(LAYOUTS[format].scales);
  switch (LAYOUTS[format].scales) {
    case HALF: std::memcpy(scales + g * 32 + lane * 2, block, 2); break;
    case PAIR:
      std::memcpy(scales + g * 64 + lane * 2, block, 2);
      std::memcpy(scales + g * 64 + 32 + lane * 2, block + 2, 2);
      break;
    case EXPONENT: scales[g * 16 + lane] = block[0]; break;
    case SUPER: {
      const uint8_t* s = block + 4;
      for (int64_t j = 0; j < 8; ++j) {
        scales[(g + j) * 32 + lane] = uint8_t(j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4);
        scales[(g + j) * 32 + 16 + lane] = uint8_t(j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4);
      }
      std::memcpy(super + lane * 2, block, 2);
      std::memcpy(super + 32 + lane * 2, block + 2, 2);
      break;
    }
    case SUPER_16:
      for (int64_t j = 0; j < 16; ++j) scales[(g + j / 2) * 32 + j % 2 * 16 + lane] = block[j];
      std::memcpy(super + lane * 2, block + 80, 2);
      std::memcpy(super + 32 + lane * 2, block + 82, 2);
      break;
    case ZERO:
    case ZERO_4: scales[(groups + by - 1) / by * 64 + g / by * 16 + lane] = block[4]; [[fallthrough]];
    case FLOAT:
    case FLOAT_4: std::memcpy(scales + g / by * 64 + lane * 4, block, 4); break;
    default: {  // SIGNED, SIGNED_16
      const int64_t pieces = pieces_of(LAYOUTS[format].scales);
      const uint16_t half = super_scale(format, block);
      for (int64_t j = 0; j < SUPER_GROUPS * pieces; ++j) scales[(g * pieces + j) * 16 + lane] = uint8_t(whole_scale(format, block, j));
      std::memcpy(scales + SUPER_GROUPS * pieces * 16 + lane * 2, &half, 2);
    }
  }
}

// A group's values to those of output `lane`; `to`: of the group.
static void put_values(int32_t bits, const uint8_t* q, uint8_t* to, int64_t lane) {
  uint32_t of[8];
  std::memcpy(of, q, 32);
  for (int32_t n = 8, each = 1, from = 0; n > 0; n /= 2, each *= 2) {  // parts of n bits
    if (!(bits & n)) continue;
    const uint32_t mask = 0x01010101u * ((1u << n) - 1);
    for (int32_t row = 0; row < n; ++row) {
      uint32_t four = 0;
      for (int32_t k = 0; k < each; ++k) four |= (of[row * each + k] >> from & mask) << k * n;
      std::memcpy(to + (from + row) * 64 + lane * 4, &four, 4);
    }
    from += n;
  }
}

static uint8_t value_at(int32_t bits, const uint8_t* group, int64_t lane, int64_t i) {
  int value = 0;
  for (int32_t n = 8, each = 1, from = 0; n > 0; n /= 2, each *= 2) {
    if (!(bits & n)) continue;
    const int64_t row = from + i / 4 / each, place = i / 4 % each;
    value |= (group[row * 64 + lane * 4 + i % 4] >> place * n & ((1 << n) - 1)) << from;
    from += n;
  }
  return uint8_t(value);
}

// The same of float8 numbers, which stand input by input.
static void put_float8(const uint8_t* q, uint8_t* to, int64_t lane) {
  for (int64_t i = 0; i < GROUP; ++i) to[i * 16 + lane] = q[i];
}

// `outputs` rows (at most 16), `row_bytes` apart, to a block.
static void repack(int32_t format, const uint8_t* grid, const uint8_t* rows, int64_t row_bytes, int64_t outputs, int64_t inputs, uint8_t* to) {
  const Layout& of = LAYOUTS[format];
  const FileBlock block = file_block(format);
  const int64_t groups = groups_of(inputs);
  std::memset(to, 0, size_t(block_bytes(format, inputs)));
  uint8_t q[256];
  for (int64_t lane = 0; lane < outputs; ++lane) {
    const uint8_t* from = rows + lane * row_bytes;
    for (int64_t i = 0; i < inputs; i += block.inputs, from += block.bytes) {
      values_of(format, grid, from, q);
      const int64_t g = i / GROUP, eight = g / SUPER_GROUPS * SUPER_GROUPS;
      put_scales(format, from, to + scales_place(of, groups, eight), eight_count(groups, eight), g - eight, lane);
      for (int64_t k = 0; k < block.inputs; k += GROUP) {
        uint8_t* group = to + group_place(of, (i + k) / GROUP);
        if (is_float8(of.scales)) put_float8(q + k, group, lane);
        else put_values(of.bits, q + k, group, lane);
      }
    }
  }
}

// The numbers that output `lane` of a block stands for, [inputs].
static void dense(int32_t format, const uint8_t* block, int64_t inputs, int64_t lane, float* to) {
  const Layout& of = LAYOUTS[format];
  const int64_t groups = groups_of(inputs);
  const uint8_t* scales = block + group_place(of, groups);  // of OUTPUT
  const auto lane_of = [lane](const Lanes& x) {
    float v[16];
    store(v, x);
    return v[lane];
  };
  Scales8 eight;
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* values = block + group_place(of, g);
    if (g % SUPER_GROUPS == 0 && of.scales != OUTPUT) {
      scales = block + scales_place(of, groups, g);
      load_scales(of, scales, eight_count(groups, g), eight);
    }
    const auto& own = eight.of[g % SUPER_GROUPS];
    float by[2], plus[2] = {};  // of the two halves of the group
    for (int half = 0; half < 2; ++half) {
      const bool second = half == 1 && pieces_of(of.scales) == 2;
      by[half] = of.scales == OUTPUT ? reinterpret_cast<const float*>(scales)[lane] : lane_of(second ? own.plus : own.by);
      if (by_eight(of.scales)) by[half] *= lane_of(eight.by);
      if (of.scales == PAIR || zeroed(of.scales)) plus[half] = lane_of(own.plus);
      if (of.scales == SUPER) plus[half] = lane_of(eight.lowest_by) / TOTAL_STEP * float(scales[g % SUPER_GROUPS * 32 + 16 + lane]);
      if (of.scales == SUPER_16) plus[half] = lane_of(eight.lowest_by) / TOTAL_STEP * float(scales[g % SUPER_GROUPS * 32 + half * 16 + lane] >> 4);
    }
    for (int64_t i = 0; i < std::min(GROUP, inputs - g * GROUP); ++i) {
      const int64_t half = i / 16;
      if (is_float8(of.scales)) {
        to[g * GROUP + i] = by[half] * float8(values[i * 16 + lane]);
        continue;
      }
      const uint8_t q = value_at(of.bits, values, lane, i);
      if (zeroed(of.scales)) {
        to[g * GROUP + i] = by[half] * (float(q) - plus[half]);
        continue;
      }
      const float value = by[half] * float((of.table ? of.table[q] : q) - of.offset);
      to[g * GROUP + i] = of.scales == PAIR || has_whole_lowest(of.scales) ? value + plus[half] : value;
    }
  }
}

// The numbers of a file's row. `block`: scratch.
static void dense_row(int32_t format, const uint8_t* grid, const uint8_t* row, int64_t inputs, std::vector<uint8_t>& block, float* to) {
  block.resize(size_t(block_bytes(format, inputs)));
  repack(format, grid, row, 0, 1, inputs, block.data());
  dense(format, block.data(), inputs, 0, to);
}

// How a checkpoint holds values: [outputs][inputs] numbers, of 4 bits two in a byte, the first in the low half; [inputs / n][outputs] words of n
// inputs, the first in the lowest bits; or [inputs][outputs / 8] words of 8 outputs, in an order of their own (AWQ).
enum Stored : int32_t { BY_OUTPUT, WORDS_OF_INPUTS, WORDS_OF_OUTPUTS };

struct StoredWeight {
  int32_t format, stored;
  uint8_t flip;           // of values: bits that are turned, 128 for signed ones
  const uint8_t* values;
  int64_t outputs, inputs;
  const int32_t* order;   // of inputs, null for their own
  const float* scales;    // [outputs][blocks of a row]
  const uint8_t* zeros;   // likewise, null for none

  // Values of one input, of outputs first to last, `stride` bytes apart.
  void take(int64_t input, int64_t first, int64_t last, uint8_t* to, int64_t stride) const {
    const int64_t bits = LAYOUTS[format].bits, each = 32 / bits;
    const int mask = (1 << bits) - 1;
    if (stored == WORDS_OF_OUTPUTS) {
      constexpr int NIBBLE[8] = {0, 4, 1, 5, 2, 6, 3, 7};
      const uint8_t* row = values + input * outputs / 2;
      for (int64_t o = first; o < last; ++o) to[(o - first) * stride] = row[o / 8 * 4 + NIBBLE[o % 8] / 2] >> NIBBLE[o % 8] % 2 * 4 & 15;
      return;
    }
    const int64_t place = stored == BY_OUTPUT ? input : input % each, step = stored == BY_OUTPUT ? inputs * bits / 8 : 4;
    const uint8_t* from = values + (stored == BY_OUTPUT ? 0 : input / each * outputs * 4) + place * bits / 8;
    const int64_t shift = place * bits % 8;
    for (int64_t o = first; o < last; ++o) to[(o - first) * stride] = uint8_t((from[o * step] >> shift & mask) ^ flip);
  }

  // Outputs first to last (at most MOST) to a file's blocks. Gives whether all are finite.
  static constexpr int64_t MOST = 128;
  bool to_blocks(int64_t first, int64_t last, uint8_t* to) const {
    const FileBlock block = file_block(format);
    const int64_t blocks = inputs / block.inputs, head = zeros ? 5 : 4, bits = LAYOUTS[format].bits;
    uint8_t q[MOST][GROUP];
    bool fine = true;
    for (int64_t i = 0; i < inputs; i += GROUP) {
      for (int64_t k = 0; k < GROUP; ++k) take(order ? order[i + k] : i + k, first, last, &q[0][k], GROUP);
      for (int64_t o = first; o < last; ++o) {
        const uint8_t* from = q[o - first];
        const int64_t at = o * blocks + i / block.inputs;
        uint8_t* own = to + at * block.bytes;
        std::memcpy(own, scales + at, 4);
        if (zeros) own[4] = zeros[at];
        else
          for (int64_t k = 0; k < GROUP; ++k) fine = fine && (from[k] & 127) != 127;
        own += head + i % block.inputs * bits / 8;
        if (bits == 8) std::memcpy(own, from, GROUP);
        else
          for (int64_t k = 0; k < GROUP / 2; ++k) own[k] = uint8_t(from[k] | from[GROUP / 2 + k] << 4);
      }
    }
    return fine;
  }
};

}  // namespace qb
