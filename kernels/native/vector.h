// Sixteen lanes of float32 at a time: loads and stores of float32 and bfloat16, sums, exponentials.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace specmamba {

using Vector = __m512;
constexpr int64_t kLanes = 16;

struct BFloat16 {
  uint16_t bits;
};

// Which lanes of a vector there are. Masked loads run at half the speed of plain ones, so only ends of rows have them.
struct All {};
struct First {
  __mmask16 mask;
  explicit First(int64_t count) : mask(static_cast<__mmask16>((1u << count) - 1)) {}
};

// Calls body(i, lanes) for every vector of [0, size).
template <typename Body>
inline void for_vectors(int64_t size, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) body(i, All{});
  if (i < size) body(i, First(size - i));
}

inline Vector widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline __m256i rounded(Vector x) { return (__m256i)_mm512_cvtneps_pbh(x); }  // to nearest even

inline Vector load(const float* x, All) { return _mm512_loadu_ps(x); }
inline Vector load(const float* x, First lanes) { return _mm512_maskz_loadu_ps(lanes.mask, x); }
inline Vector load(const BFloat16* x, All) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }
inline Vector load(const BFloat16* x, First lanes) { return widened(_mm256_maskz_loadu_epi16(lanes.mask, x)); }

inline void store(float* y, Vector x, All) { _mm512_storeu_ps(y, x); }
inline void store(float* y, Vector x, First lanes) { _mm512_mask_storeu_ps(y, lanes.mask, x); }
inline void store(BFloat16* y, Vector x, All) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), rounded(x)); }
inline void store(BFloat16* y, Vector x, First lanes) { _mm256_mask_storeu_epi16(y, lanes.mask, rounded(x)); }

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// x, with 0 for NaNs and infinities.
inline Vector finite_or_zero(Vector x) {
  constexpr int kNotFinite = 0x99;
  return _mm512_mask_mov_ps(x, _mm512_fpclass_ps_mask(x, kNotFinite), _mm512_setzero_ps());
}

template <typename T>
inline void store_finite(const T* x, T* y, int64_t size) {
  for_vectors(size, [&](int64_t i, auto lanes) { store(y + i, finite_or_zero(load(x + i, lanes)), lanes); });
}

inline float sum(Vector x) { return _mm512_reduce_add_ps(x); }

// Within 2 units in the last place; 0 and infinity where float32 ends, NaN for NaN.
// e^x = 2^n e^r with |r| <= ln(2)/2; e^r by its Taylor polynomial of degree 7.
inline Vector exp(Vector x) {
  x = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-104.0f), x));  // the second wins at NaN
  const Vector n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0);
  Vector r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);  // ln 2 in two parts: the first has few digits
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  Vector p = _mm512_set1_ps(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}

inline Vector sigmoid(Vector x) {
  const Vector one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(one, _mm512_add_ps(one, exp(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

inline Vector silu(Vector x) {
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exp(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

}  // namespace specmamba
