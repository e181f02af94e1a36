// Operands of a Mamba2 layer between its projections, of trees and of runs, and what both do to a token. T is the type of
// activations.
#pragma once

#include <algorithm>
#include <cstdint>

#include "parallel.h"
#include "rowwise/heads.h"
#include "state_records/operands.h"

namespace specmamba::mamba2 {

constexpr int64_t kSerialBelow = 1 << 14;  // fewer elements than this are normed by one thread

// Strides are in elements; dimensions without one are contiguous. Activations are float32 or bfloat16.

// Parts of the input projection's output for N tokens or nodes. Those of a tensor have one stride.
struct Inputs {
  const void *mixed, *gate, *dt;  // [B, N, C] [B, N, H P] [B, N, H]
  void* out;                      // [B, N, H P]
  float* before_norm;             // [B, N, H P], which may be out; not used without a norm
  int64_t mixed_token, gate_token, dt_token;
};

struct Weights {
  const float *conv, *conv_bias;                   // [W, C] [C] or null
  const float *negative_a, *dt_bias, *skip, *norm;  // [H] [H] [H] [H P] or null
  int64_t width;
  Heads heads;  // keys are B and C, values x
  int64_t norm_groups, norm_before_gate;
  double norm_eps, dt_min, dt_max;

  int64_t inner() const { return heads.value_heads * heads.value_dim; }
};

// Of a token and head, numbered through all rows.
template <typename T>
inline float step_size(const Inputs& in, const Weights& w, int64_t token, int64_t h, T) {
  const T dt = static_cast<const T*>(in.dt)[token * in.dt_token + h];
  return std::clamp(softplus(to_float(dt) + w.dt_bias[h]), static_cast<float>(w.dt_min), static_cast<float>(w.dt_max));
}

// y + D x, times the gate where the gate comes before the norm or there is no norm; y, x [P].
template <typename T>
inline void finish(const Inputs& in, const Weights& w, int64_t token, int64_t h, const float* y, const float* x) {
  const int64_t P = w.heads.value_dim, at = token * w.inner() + h * P;
  const T* gate = static_cast<const T*>(in.gate) + token * in.gate_token + h * P;
  const bool has_norm = w.norm != nullptr, is_gated = !has_norm || !w.norm_before_gate;
  const Vector skip = broadcast(w.skip[h]);
  for_vectors(P, [&](int64_t i, auto lanes) {
    Vector v = fma(skip, load(x + i, lanes), load(y + i, lanes));
    if (is_gated) v = v * silu(load(gate + i, lanes));
    has_norm ? store(in.before_norm + at + i, v, lanes) : store(static_cast<T*>(in.out) + at + i, v, lanes);
  });
}

// Norms one part of one token's channels; it may include several heads.
template <typename T>
void norm_part(const Inputs& in, const Weights& w, int64_t token, int64_t part) {
  const int64_t width = w.inner() / w.norm_groups, channel = part * width, at = token * w.inner() + channel;
  const float eps = static_cast<float>(w.norm_eps);
  const T* gate = static_cast<const T*>(in.gate) + token * in.gate_token + channel;
  T* out = static_cast<T*>(in.out) + at;
  if (w.norm_before_gate)
    normalize<Gate::kSilu>(in.before_norm + at, gate, w.norm + channel, width, eps, out);
  else
    normalize<Gate::kNone>(in.before_norm + at, gate, w.norm + channel, width, eps, out);
}

// Calls body(token, part) for all parts that are normed.
template <typename Body>
void for_norms(const Weights& w, int64_t tokens, int num_threads, const Body& body) {
  if (w.norm == nullptr) return;
  const int64_t parts = tokens * w.norm_groups;
  if (tokens * w.inner() < kSerialBelow) num_threads = 1;
  parallel_for(parts, std::max<int64_t>(1, parts / (8 * std::max(num_threads, 1))), num_threads,
               [&](int64_t first, int64_t last) {
                 for (int64_t t = first; t < last; ++t) body(t / w.norm_groups, t % w.norm_groups);
               });
}

}  // namespace specmamba::mamba2
