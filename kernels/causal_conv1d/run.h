// The convolution of a run of known tokens behind its window; reference.py specifies it.
#pragma once

#include <algorithm>
#include <vector>

#include "causal_conv1d/taps.h"

namespace specmamba {

// T is the type of inputs. Token t < 0 is in the window.
template <typename T>
class ConvolvedRun {
 public:
  // window [W - 1, C]; inputs of tokens lie `distance` apart.
  ConvolvedRun(const Convolution& convolution, int64_t channels, T* window, const T* inputs, int64_t distance)
      : convolution_(convolution), channels_(channels), distance_(distance), window_(window), inputs_(inputs) {}

  // Makes the tokens [first, first + count) those that `mix` is asked for.
  void look_at(int64_t first, int64_t count) {
    const int64_t before = convolution_.width - 1;
    taps_.resize(before + count);
    for (int64_t t = 0; t < before + count; ++t) taps_[t] = input(first - before + t);
  }

  // y = channels [channel, channel + size) of token first + i, convolved.
  void mix(int64_t i, int64_t channel, int64_t size, float* y) const {
    convolve(&taps_[i], convolution_, channels_, channel, size, y);
  }

  // Makes the window the last W - 1 inputs of `length` tokens.
  void move_window(int64_t length) const {
    const int64_t before = convolution_.width - 1;
    for (int64_t w = 0; length > 0 && w < before; ++w)
      std::copy_n(input(length - before + w), channels_, window_ + w * channels_);
  }

 private:
  const T* input(int64_t t) const {
    return t < 0 ? window_ + (convolution_.width - 1 + t) * channels_ : inputs_ + t * distance_;
  }

  const Convolution convolution_;
  const int64_t channels_, distance_;
  T* const window_;
  const T* const inputs_;
  std::vector<const T*> taps_;  // of the tokens that are looked at, and of the W - 1 before them
};

}  // namespace specmamba
