// Vectors of float32 in the registers of one instruction set, which the compiler's flags choose.
//
// Kernels use what is here and know no instruction and no number of lanes. A level's header has:
//
//   Vector, kLanes, kRegisters    a register of float32, its lanes, how many registers there are
//   First, Mask                   the first lanes of a vector; lanes for which a comparison holds
//   Integers, Shorts              kLanes int32; 2 kLanes numbers of 16 bits, multiplied in pairs of neighbours
//   Pairs                         Shorts that are bfloat16; defined here unless SPECMAMBA_MULTIPLIES_PAIRS
//   Bytes                         4 kLanes bytes, multiplied and summed by four neighbours: in one instruction where
//                                 SPECMAMBA_MULTIPLIES_BYTES, else first in pairs, in ShortSums of 16 bits
//
// Where SPECMAMBA_HAS_TILES, amx.h has products of tiles, beside all of that.
//
// Results of levels differ by rounding only: sums have another order, exponentials another last bit.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace specmamba {

struct BFloat16 {
  uint16_t bits;
};

// FP8 (e4m3) of finite numbers. Loads give 1 / kUnit of its value: its bits are those of a float16 with a smaller exponent.
struct Float8 {
  uint8_t bits;
};
template <typename Code>
constexpr float kUnit = 1.0f;  // int8_t
template <>
inline constexpr float kUnit<Float8> = 256.0f;

// Which lanes of a vector there are: all, or the First of them. Loads and stores of a part are slower than those of a
// whole vector, so only ends of rows have them.
struct All {};

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline float to_float(int8_t x) { return static_cast<float>(x); }

constexpr std::array<float, 256> float8_values() {
  std::array<float, 256> values{};
  for (int bits = 0; bits < 256; ++bits) {
    const int exponent = bits >> 3 & 15, digits = bits & 7;
    float value = (exponent == 0 ? digits : 8 + digits) * 0x1p-17f;
    for (int i = 1; i < exponent; ++i) value *= 2;
    values[bits] = bits < 128 ? value : -value;
  }
  return values;
}
inline constexpr std::array<float, 256> kFloat8Values = float8_values();
inline float to_float(Float8 x) { return kFloat8Values[x.bits]; }

}  // namespace specmamba

#if defined(__AVX512F__)
#include "avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "avx2.h"
#elif defined(__aarch64__)
#include "neon.h"
#else
#error "kernels/native has no header for this instruction set"
#endif

#if defined(__AMX_BF16__)
#define SPECMAMBA_HAS_TILES 1
#include "amx.h"
#else
#define SPECMAMBA_HAS_TILES 0
#endif

namespace specmamba {

// Calls body(i, lanes) for every vector of [0, size).
template <typename Body>
inline void for_vectors(int64_t size, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) body(i, All{});
  if (i < size) body(i, First(size - i));
}

#if !SPECMAMBA_MULTIPLIES_PAIRS
struct Pairs {
  Vector even, odd;
};
inline Pairs as_pairs(Shorts x) { return {even_of(x), odd_of(x)}; }
inline Vector add_products(Vector sum, Pairs x, Pairs y) { return fma(x.odd, y.odd, fma(x.even, y.even, sum)); }
#endif

inline Pairs load_pairs(const BFloat16* x) { return as_pairs(load_shorts(x)); }
inline Pairs load_pairs(const BFloat16* x, int64_t count) { return as_pairs(load_shorts(x, count)); }

inline void store_shorts(int16_t* y, Shorts x) { std::memcpy(y, &x, sizeof x); }

// x[0] to x[3] in every lane.
inline Bytes broadcast_four(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, sizeof four);
  return broadcast_four(four);
}

// x[0] and x[1] in every lane.
inline Shorts broadcast_pair(const int16_t* x) {
  int32_t pair;
  std::memcpy(&pair, x, sizeof pair);
  return broadcast_pair(pair);
}
inline Pairs broadcast_pair(const BFloat16* x) {
  int32_t pair;
  std::memcpy(&pair, x, sizeof pair);
  return as_pairs(broadcast_pair(pair));
}

inline Vector chosen(All, Vector x, Vector) { return x; }
inline Vector chosen(First lanes, Vector x, Vector others) { return chosen(lanes.mask(), x, others); }

// x, with 0 for NaNs and infinities.
inline Vector finite_or_zero(Vector x) { return chosen(is_finite(x), x, zero()); }

template <typename T>
inline void store_finite(const T* x, T* y, int64_t size) {
  for_vectors(size, [&](int64_t i, auto lanes) { store(y + i, finite_or_zero(load(x + i, lanes)), lanes); });
}

// Within 2 units in the last place; 0 and infinity where float32 ends, NaN for NaN.
// e^x = 2^n e^r with |r| <= ln(2)/2; e^r by its Taylor polynomial of degree 7.
inline Vector exp(Vector x) {
  x = smaller(broadcast(89.0f), larger(broadcast(-104.0f), x));  // the second wins at NaN
  const Vector n = whole(x * broadcast(1.44269504088896341f));
  Vector r = fnma(n, broadcast(0.693359375f), x);  // ln 2 in two parts: the first has few digits
  r = fnma(n, broadcast(-2.12194440e-4f), r);
  Vector p = broadcast(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, broadcast(c));
  return scaled(p, n);
}

inline Vector sigmoid(Vector x) { return broadcast(1.0f) / (broadcast(1.0f) + exp(zero() - x)); }
inline Vector silu(Vector x) { return x / (broadcast(1.0f) + exp(zero() - x)); }

// To nearest even; NaN stays NaN.
inline BFloat16 to_bfloat16(float x) {
  BFloat16 y;
  store(&y, broadcast(x), First(1));
  return y;
}

inline void put(float* y, float x) { *y = x; }
inline void put(BFloat16* y, float x) { *y = to_bfloat16(x); }

}  // namespace specmamba
