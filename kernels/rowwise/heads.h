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

// Within 4 units in the last place: x, where it is positive, + ln(1 + y) with y = e^-|x|, of which the series in
// y / (2 + y) <= 1/3 has its first seven terms. NaN for NaN.
inline Vector softplus(Vector x) {
  const Vector y = exp(zero() - larger(zero() - x, x));
  const Vector s = y / (broadcast(2.0f) + y), z = s * s;
  Vector p = broadcast(1.0f / 13);
  for (const float c : {1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f}) p = fma(p, z, broadcast(c));
  return larger(zero(), x) + broadcast(2.0f) * s * p;
}

inline float query_factor(int64_t key_dim) { return 1.0f / std::sqrt(static_cast<float>(key_dim)); }
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Of the gated delta rule, from what the projections say of a token: how much of the state is left, and how much of the
// new value is written.
inline float log_decay_of(float a, float negative_a, float dt_bias) { return negative_a * softplus(a + dt_bias); }
// As log_decay_of for key channels; with a bound they are bound sigmoid(-negative_a (a + dt_bias)).
template <typename T>
inline void log_decays_of(const T* a, const float* dt_bias, float negative_a, int64_t size, const float* bound, float* g) {
  const Vector rate = broadcast(negative_a);
  for_vectors(size, [&](int64_t i, auto lanes) {
    const Vector step = load(a + i, lanes) + load(dt_bias + i, lanes);
    if (bound == nullptr)
      store(g + i, rate * softplus(step), lanes);
    else
      store(g + i, broadcast(*bound) * sigmoid(zero() - rate * step), lanes);
  });
}
inline float step_size_of(float b, float scale) { return scale * sigmoid(b); }

}  // namespace specmamba
