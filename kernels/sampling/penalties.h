// Repetition, frequency and presence penalties of one node.
#pragma once

#include <cstdint>

#include "vector.h"

namespace specmamba {

struct Penalties {
  float presence, frequency, repetition;
};

inline float penalized(float x, int32_t count, bool is_prompt, const Penalties& p) {
  const float said = count > 0, factor = count > 0 || is_prompt ? p.repetition : 1;
  return (x > 0 ? x / factor : x * factor) - p.frequency * static_cast<float>(count) - p.presence * said;
}

template <typename T>
void penalize_vectors(const T* x, const int32_t* counts, const uint8_t* is_prompt, int64_t size, const Penalties& p,
                      float* y) {
  const Vector one = broadcast(1), repetition = broadcast(p.repetition);
  for (int64_t i = 0; i < size; i += kLanes) {
    Integers integers;
    std::memcpy(&integers, counts + i, sizeof integers);
    const Vector logit = load(x + i, All{}), count = to_floats(integers);
    const Mask is_said = is_less(zero(), count);
    const Vector said = chosen(is_said, one, zero()), factor = chosen(is_said | flags(is_prompt + i), repetition, one);
    const Vector repeated = chosen(is_less(zero(), logit), logit / factor, logit * factor);
    store(y + i, repeated - broadcast(p.frequency) * count - broadcast(p.presence) * said, All{});
  }
}

// Logits [size] -> y [size]. The tokens of the path [length] count as output too.
template <typename T>
void penalize(const T* x, const int32_t* counts, const uint8_t* is_prompt, int64_t size, const int64_t* path,
              int64_t length, const Penalties& p, float* y) {
  const int64_t whole = size / kLanes * kLanes;
  penalize_vectors(x, counts, is_prompt, whole, p, y);
  for (int64_t i = whole; i < size; ++i) y[i] = penalized(to_float(x[i]), counts[i], is_prompt[i], p);
  for (int64_t i = 0; i < length; ++i) {
    const int64_t token = path[i];
    if (token < 0 || token >= size) continue;
    const auto count = counts[token] + static_cast<int32_t>(std::count(path, path + length, token));
    y[token] = penalized(to_float(x[token]), count, is_prompt[token], p);
  }
}

}  // namespace specmamba
