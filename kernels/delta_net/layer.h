// Operands of a gated delta net layer between its projections, of trees and of runs.
#pragma once

#include <cstdint>

#include "rowwise/heads.h"
#include "state_records/operands.h"

namespace specmamba::delta_net {

// Strides are in elements; dimensions without one are contiguous. Activations are float32 or bfloat16.

// Parts of the input projection's output for N tokens or nodes. Those of a tensor have one stride.
struct Inputs {
  const void *mixed, *gate, *b, *a;  // [B, N, C] [B, N, Hv, V] [B, N, Hv] [B, N, Hv, D]
  void* out;                         // [B, N, Hv, V]
  int64_t mixed_token, gate_token, b_token, a_token;
};

struct Weights {
  const float *conv, *negative_a, *dt_bias, *norm;  // [W, C] [Hv] [Hv, D] [V]
  int64_t width;
  Heads heads;
  int64_t has_sigmoid_gate, has_bound;  // the gate's activation, else SiLU; a bound of log decays by channel
  double norm_eps, unit_eps, step_scale, bound;

  // Log decays of one head of a token, from its part of `a`.
  template <typename T>
  void put_log_decays(const T* of_head, int64_t head, float* g) const {
    if (heads.decay_dim == 1) {
      *g = log_decay_of(to_float(*of_head), negative_a[head], dt_bias[head]);
    } else {
      const float of_bound = static_cast<float>(bound);
      const float* given = has_bound ? &of_bound : nullptr;
      log_decays_of(of_head, dt_bias + head * heads.decay_dim, negative_a[head], heads.decay_dim, given, g);
    }
  }

  // out = RMSNorm(x) * gate's activation, of one head.
  template <typename T>
  void norm_and_gate(const float* x, const T* gate, T* out) const {
    const float eps = static_cast<float>(norm_eps);
    has_sigmoid_gate ? normalize<Gate::kSigmoid>(x, gate, norm, heads.value_dim, eps, out)
                     : normalize<Gate::kSilu>(x, gate, norm, heads.value_dim, eps, out);
  }
};

}  // namespace specmamba::delta_net
