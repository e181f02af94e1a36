// Operands of a gated delta net layer between its projections, of trees and of runs.
#pragma once

#include <cstdint>

#include "state_records/operands.h"

namespace specmamba::delta_net {

// Strides are in elements; dimensions without one are contiguous. Activations are float32 or bfloat16.

// Parts of the input projection's output for N tokens or nodes. Those of a tensor have one stride.
struct Inputs {
  const void *mixed, *gate, *b, *a;  // [B, N, C] [B, N, Hv, V] [B, N, Hv] [B, N, Hv]
  void* out;                         // [B, N, Hv, V]
  int64_t mixed_token, gate_token, b_token, a_token;
};

struct Weights {
  const float *conv, *negative_a, *dt_bias, *norm;  // [W, C] [Hv] [Hv] [V]
  int64_t width;
  Heads heads;
  double norm_eps, unit_eps, step_scale;
};

}  // namespace specmamba::delta_net
