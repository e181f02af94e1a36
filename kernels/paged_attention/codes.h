// Heads of keys and values as codes of 8 bits with a scale; see codes.py, whose results these are, bit for bit.
//
// In plain C++, which compilers turn into vectors: a token's heads are coded once, and read by every later query.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vector.h"

namespace specmamba {

constexpr float kSmallestCoded = 0x1p-116f;  // codes.SMALLEST
template <typename Code>
constexpr float kLargestCode = 127.0f;
template <>
inline constexpr float kLargestCode<Float8> = 448.0f;

inline int32_t bits_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float float_of(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Sums with a number of which one unit in the last place is a step, and so rounded to a step, to nearest even.
inline void encode(float x, int8_t* code) { *code = static_cast<int8_t>(bits_of(x + 0x1.8p23f) - bits_of(0x1.8p23f)); }
inline void encode(float x, Float8* code) {
  const int32_t bits = bits_of(x), magnitude = bits & 0x7FFFFFFF;
  const int32_t small = bits_of(float_of(magnitude) + 0x1p14f) - bits_of(0x1p14f);  // steps of 2^-9, below 2^-6
  const int32_t up = magnitude + 0x7FFFF + ((magnitude >> 20) & 1);                 // to three digits
  const int32_t large = (up >> 20) - (120 << 3);                                    // exponents begin at -7, not at -127
  const int32_t sign = (bits >> 24) & 0x80;
  code->bits = static_cast<uint8_t>(sign | (magnitude < bits_of(0x1p-6f) ? small : large));
}

// x [width] -> codes; returns their scale. Numbers that are not finite count as 0.
template <typename T, typename Code>
float quantize_head(const T* x, int64_t width, Code* codes) {
  constexpr int32_t kInfinity = 0x7F800000;
  int32_t most = 0;
  for (int64_t i = 0; i < width; ++i) {
    const int32_t magnitude = bits_of(to_float(x[i])) & 0x7FFFFFFF;
    most = std::max(most, magnitude < kInfinity ? magnitude : 0);
  }
  const float largest = float_of(most);
  if (largest < kSmallestCoded) {
    std::memset(codes, 0, width * sizeof *codes);
    return 0.0f;
  }
  const float inverse = kLargestCode<Code> / largest;
  for (int64_t i = 0; i < width; ++i) {
    const int32_t bits = bits_of(to_float(x[i]));
    encode(float_of((bits & 0x7FFFFFFF) < kInfinity ? bits : 0) * inverse, codes + i);
  }
  return largest * (1.0f / kLargestCode<Code>);
}

}  // namespace specmamba
