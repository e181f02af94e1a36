// What a Mamba1 layer computes for one token around its scan; see README.md and reference.py.
#pragma once

#include "rowwise/heads.h"

namespace specmamba {

// steps = softplus(raw + bias), weighted = steps x, of one token's channels.
template <typename T>
inline void time_steps_of(const T* raw, const float* bias, const float* x, int64_t channels, float* steps,
                          float* weighted) {
  for_vectors(channels, [&](int64_t i, auto lanes) {
    const Vector step = softplus(load(raw + i, lanes) + load(bias + i, lanes));
    store(steps + i, step, lanes);
    store(weighted + i, step * load(x + i, lanes), lanes);
  });
}

// out = (y + skip x) silu(gate), of one token's channels.
template <typename T>
inline void skip_gate_of(const float* y, const float* x, const float* skip, const T* gate, int64_t channels, T* out) {
  for_vectors(channels, [&](int64_t i, auto lanes) {
    const Vector skipped = fma(load(skip + i, lanes), load(x + i, lanes), load(y + i, lanes));
    store(out + i, skipped * silu(load(gate + i, lanes)), lanes);
  });
}

}  // namespace specmamba
