// What is done to one head of one token; see README.md and reference.py.
#pragma once

#include <cmath>

#include "vector.h"

namespace specmamba {

template <typename T>
inline float sum_of_squares(const T* x, int64_t size) {
  Vector total = zero();
  for_vectors(size, [&](int64_t i, auto lanes) {
    const Vector v = load(x + i, lanes);
    total = fma(v, v, total);
  });
  return sum(total);
}

enum class Gate { kNone, kSilu, kSigmoid };

// y = x / sqrt(mean(x^2) + eps) * weight, and then * silu(gate) or * sigmoid(gate).
template <Gate Kind, typename X, typename Y>
inline void normalize(const X* x, const Y* gate, const float* weight, int64_t width, float eps, Y* y) {
  const float mean = sum_of_squares(x, width) / static_cast<float>(width);
  const Vector scale = broadcast(1.0f / std::sqrt(mean + eps));
  for_vectors(width, [&](int64_t i, auto lanes) {
    Vector v = load(x + i, lanes) * scale * load(weight + i, lanes);
    if constexpr (Kind == Gate::kSilu) v = v * silu(load(gate + i, lanes));
    if constexpr (Kind == Gate::kSigmoid) v = v * sigmoid(load(gate + i, lanes));
    store(y + i, v, lanes);
  });
}

// y = factor x / sqrt(sum(x^2) + eps); y may be x.
inline void make_unit(const float* x, int64_t width, float eps, float factor, float* y) {
  const Vector scale = broadcast(factor / std::sqrt(sum_of_squares(x, width) + eps));
  for_vectors(width, [&](int64_t i, auto lanes) { store(y + i, load(x + i, lanes) * scale, lanes); });
}

// Components i and i + rotated / 2 of the first `rotated` turn together; y may be x.
template <typename T>
inline void rotate_head(const T* x, const T* cos, const T* sin, int64_t rotated, T* y) {
  const int64_t half = rotated / 2;
  for_vectors(half, [&](int64_t i, auto lanes) {
    const int64_t j = i + half;
    const Vector first = load(x + i, lanes), second = load(x + j, lanes);
    const Vector of_first = second * load(sin + i, lanes);
    const Vector of_second = first * load(sin + j, lanes);
    store(y + i, fms(first, load(cos + i, lanes), of_first), lanes);
    store(y + j, fma(second, load(cos + j, lanes), of_second), lanes);
  });
}

inline float query_factor(int64_t key_dim) { return 1.0f / std::sqrt(static_cast<float>(key_dim)); }
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Of the gated delta rule, from what the projections say of a token: how much of the state is left, and how much of the
// new value is written.
inline float log_decay_of(float a, float negative_a, float dt_bias) { return negative_a * softplus(a + dt_bias); }
inline float step_size_of(float b, float scale) { return scale * sigmoid(b); }

}  // namespace specmamba
