// What is done to one head of one token; see README.md and reference.py.
#pragma once

#include <cmath>

#include "vector.h"

namespace specmamba {

template <typename T>
inline float sum_of_squares(const T* x, int64_t size) {
  Vector total = _mm512_setzero_ps();
  for_vectors(size, [&](int64_t i, auto lanes) {
    const Vector v = load(x + i, lanes);
    total = _mm512_fmadd_ps(v, v, total);
  });
  return sum(total);
}

// y = x / sqrt(mean(x^2) + eps) * weight, and then * silu(gate).
template <bool Gated, typename X, typename Y>
inline void normalize(const X* x, const Y* gate, const float* weight, int64_t width, float eps, Y* y) {
  const float mean = sum_of_squares(x, width) / static_cast<float>(width);
  const Vector scale = _mm512_set1_ps(1.0f / std::sqrt(mean + eps));
  for_vectors(width, [&](int64_t i, auto lanes) {
    Vector v = _mm512_mul_ps(_mm512_mul_ps(load(x + i, lanes), scale), load(weight + i, lanes));
    if constexpr (Gated) v = _mm512_mul_ps(v, silu(load(gate + i, lanes)));
    store(y + i, v, lanes);
  });
}

// y = factor x / sqrt(sum(x^2) + eps); y may be x.
inline void make_unit(const float* x, int64_t width, float eps, float factor, float* y) {
  const Vector scale = _mm512_set1_ps(factor / std::sqrt(sum_of_squares(x, width) + eps));
  for_vectors(width, [&](int64_t i, auto lanes) { store(y + i, _mm512_mul_ps(load(x + i, lanes), scale), lanes); });
}

inline float query_factor(int64_t key_dim) { return 1.0f / std::sqrt(static_cast<float>(key_dim)); }
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

}  // namespace specmamba
