// The convolution of one token; reference.py specifies it.
#pragma once

#include "vector.h"

namespace specmamba {

struct Convolution {
  const float *weight, *bias;  // [W, C] [C], or null
  int64_t width;
};

// bias + sum weight[w] taps[w] of the channels from c on; taps[w] begin at channel c - at.
template <typename T, typename Lanes>
inline Vector weighted_sum(const T* const* taps, int64_t at, const Convolution& convolution, int64_t channels,
                           int64_t c, Lanes lanes) {
  Vector total = convolution.bias == nullptr ? zero() : load(convolution.bias + c, lanes);
  for (int64_t w = 0; w < convolution.width; ++w)
    total = fma(load(taps[w] + at, lanes), load(convolution.weight + w * channels + c, lanes), total);
  return total;
}

// y = silu(bias + sum weight[w] taps[w]) over the channels [first, first + size) of inputs taps[w], weights
// [width, channels] and biases, which may be null.
template <typename T>
inline void convolve(const T* const* taps, const Convolution& convolution, int64_t channels, int64_t first,
                     int64_t size, float* y) {
  for_vectors(size, [&](int64_t i, auto lanes) {
    store(y + i, silu(weighted_sum(taps, first + i, convolution, channels, first + i, lanes)), lanes);
  });
}

}  // namespace specmamba
