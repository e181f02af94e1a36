// Activations of single numbers; see README.md and reference.py. A number's result has the same bits in every lane.
#pragma once

#include "vector.h"

namespace specmamba {

// The share of a normal distribution below x: the factor of GELU. Below -|x| there is e^(-x^2/2) h(|x|), and h is t p(t)
// with t = 1 / (1 + 0.35 |x|): p was fitted to 0.5 erfcx(|x| / sqrt(2)) / t at Chebyshev's points of |x| <= 14.5, from
// where on the share is 0 in float32. Within 4e-7 of h, so the share is exact near 0 and keeps its digits far below it.
inline Vector normal_share(Vector x) {
  const Vector size = larger(zero() - x, x), one = broadcast(1.0f);
  const Vector t = one / fma(broadcast(0.35f), size, one);
  Vector p = broadcast(-0.02952965721487999f);
  for (const float c : {0.1457834392786026f, -0.2593279778957367f, 0.16313549876213074f, -0.025708604604005814f,
                        0.10654790699481964f, 0.11958617717027664f, 0.13989345729351044f, 0.13961973786354065f})
    p = fma(p, t, broadcast(c));
  const Vector below = t * p * exp(broadcast(-0.5f) * size * size);
  return chosen(is_less(zero(), x), one - below, below);
}

inline Vector gelu(Vector x) { return x * normal_share(x); }

// 0.5 x (1 + tanh(u)) is x sigmoid(2 u), of u = sqrt(2 / pi) (x + 0.044715 x^3).
inline Vector gelu_tanh(Vector x) {
  const Vector doubled = x * fma(broadcast(1.5957691216057308f * 0.044715f) * x, x, broadcast(1.5957691216057308f));
  return x / (broadcast(1.0f) + exp(zero() - doubled));
}

}  // namespace specmamba
