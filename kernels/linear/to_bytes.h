// Quantized weights whose codes no product has -> signed bytes with a scale for every 128 inputs; see grouped.to_bytes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "parallel.h"

namespace specmamba {

constexpr int64_t kByteGroup = 128;
constexpr int64_t kWeightsPart = int64_t{1} << 18;  // that a thread rounds at a time

// A matrix [n, k] as checkpoints have it. `table`: 256 numbers that codes are places in, or null.
struct StoredCodes {
  const uint8_t* codes;
  bool is_signed;
  const float *table, *scale, *minimum;  // minimum: or null
  int64_t n, k, group;

  // `count` weights of a row from input `first` on.
  void dequantize(int64_t row, int64_t first, int64_t count, float* out) const {
    const uint8_t* in = codes + row * k + first;
    const int64_t groups = (k + group - 1) / group;
    if (table != nullptr)
      for (int64_t i = 0; i < count; ++i) out[i] = table[in[i]];
    else if (is_signed)
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(static_cast<int8_t>(in[i]));
    else
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(in[i]);
    for (int64_t at = 0, end; at < count; at = end) {
      const int64_t g = (first + at) / group, place = row * groups + g;
      end = std::min(count, (g + 1) * group - first);
      for (int64_t i = at; i < end; ++i) out[i] *= scale[place];
      if (minimum != nullptr)
        for (int64_t i = at; i < end; ++i) out[i] += minimum[place];
    }
  }
};

// Gives the scale: 1/127 of the largest magnitude, NaN where a weight is. Weights without a ratio to it become zero.
inline float round_to_bytes(const float* weights, int64_t count, int8_t* out) {
  int32_t most = 0;  // magnitudes as integers are in the same order, and NaN is the largest
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, weights + i, sizeof bits);
    most = std::max(most, bits & 0x7fffffff);
  }
  float magnitude;
  std::memcpy(&magnitude, &most, sizeof magnitude);
  const float scale = magnitude / 127.0f;
  for (int64_t i = 0; i < count; ++i) {
    float ratio = weights[i] / scale;
    ratio = std::fabs(ratio) < std::numeric_limits<float>::infinity() ? ratio : 0.0f;
    ratio = ratio < -127.0f ? -127.0f : ratio > 127.0f ? 127.0f : ratio;
    out[i] = static_cast<int8_t>(__builtin_nearbyintf(ratio));
  }
  return scale;
}

// -> out [n, k] and out_scale [n, ceil(k / 128)].
inline void to_bytes(const StoredCodes& from, int8_t* out, float* out_scale, int num_threads) {
  const int64_t groups = (from.k + kByteGroup - 1) / kByteGroup;
  parallel_for(from.n, std::max<int64_t>(1, kWeightsPart / from.k), num_threads, [&](int64_t row, int64_t last) {
    float weights[kByteGroup];
    for (; row < last; ++row)
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t first = g * kByteGroup, count = std::min(kByteGroup, from.k - first);
        from.dequantize(row, first, count, weights);
        out_scale[row * groups + g] = round_to_bytes(weights, count, out + row * from.k + first);
      }
  });
}

}  // namespace specmamba
