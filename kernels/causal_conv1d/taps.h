// The convolution of one token; reference.py specifies it.
#pragma once

#include "vector.h"

namespace specmamba {

struct Convolution {
  const float *weight, *bias;  // [W, C] [C], or null
  int64_t width;
};

// y = silu(bias + sum weight[w] taps[w]) over the channels [first, first + size) of inputs taps[w], weights
// [width, channels] and biases, which may be null.
template <typename T>
inline void convolve(const T* const* taps, const float* weight, const float* bias, int64_t width, int64_t channels,
                     int64_t first, int64_t size, float* y) {
  for_vectors(size, [&](int64_t i, auto lanes) {
    const int64_t c = first + i;
    Vector total = bias == nullptr ? zero() : load(bias + c, lanes);
    for (int64_t w = 0; w < width; ++w)
      total = fma(load(taps[w] + c, lanes), load(weight + w * channels + c, lanes), total);
    store(y + i, silu(total), lanes);
  });
}

}  // namespace specmamba
