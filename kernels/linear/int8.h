// y = x W^T with int8 weights and inputs that were turned into int16; see README.md.
#pragma once

#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>

#include "linear/panels.h"
#include "vector.h"

namespace specmamba {

// Pairs of inputs whose products an int32 can hold the sum of: 256 * 2 * 127 * 32768 < 2^31.
constexpr int64_t kBlockPairs = 256;

inline float power_of_two(int exponent) {  // -126 to 127
  const int32_t bits = (exponent + 127) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// One row x [k] -> q [even(k)] and its scale, a power of two: x = q * scale, rounded. The scale is NaN where x holds
// what is no number.
template <typename X>
float quantize_row(const X* x, int64_t k, int16_t* q) {
  Integers most{};
  for_vectors(k, [&](int64_t i, auto lanes) { most = larger(most, magnitudes(load(x + i, lanes))); });
  const int biased = largest(most) >> 23;
  const int exponent = std::max(biased - 127 - 14, -126);  // neither the scale nor its inverse may be subnormal
  const Vector inverse = broadcast(power_of_two(-exponent));
  for_vectors(k, [&](int64_t i, auto lanes) { store(q + i, load(x + i, lanes) * inverse, lanes); });
  if (k % 2) q[k] = 0;
  return biased == 255 ? std::numeric_limits<float>::quiet_NaN() : power_of_two(exponent);
}

struct Int8Product {
  const int16_t* x;      // [rows, even(k)]
  const float* x_scale;  // [rows]
  const int8_t* weight;  // packed
  const float* scale;    // [n]
  void* y;               // [rows, n] bfloat16 or float32
  bool is_float;
  int64_t rows, n, k;

  int64_t panel_bytes() const { return panel_size(k); }

  // Blocks of k are added in ascending order, and within them every sum is exact, whatever Rows and Panels are.
  template <int Rows, int Panels>
  void tile(int64_t row, int64_t panel) const {
    Vector total[Rows][2 * Panels];
    for (auto& of_row : total)
      for (auto& t : of_row) t = zero();
    const int64_t size = panel_size(k), stride = even(k);
    const int8_t* w = weight + panel * size;
    constexpr int kBases = (Rows + 2) / 3;  // as in bf16.h
    const int16_t* base[kBases];
    for (int i = 0; i < kBases; ++i) base[i] = x + (row + 3 * i) * stride;

    for (int64_t left = stride / 2; left > 0; left -= kBlockPairs) {
      Integers sum[Rows][2 * Panels];
      for (auto& of_row : sum)
        for (auto& s : of_row) s = Integers{};
      for (int64_t pair = std::min(left, kBlockPairs); pair > 0; --pair) {
        Shorts both[2 * Panels];
        for (int j = 0; j < 2 * Panels; ++j) both[j] = load_widened(w + j / 2 * size + j % 2 * kPanel);
        if constexpr (Rows >= kPrefetchRows) __builtin_prefetch(w + kPrefetch, 0, 2);
#pragma GCC unroll 16
        for (int i = 0; i < Rows; ++i) {
          const Shorts of_row = broadcast_pair(base[i / 3] + i % 3 * stride);
          for (int j = 0; j < 2 * Panels; ++j) sum[i][j] = add_products(sum[i][j], of_row, both[j]);
        }
        w += 2 * kPanel;
        for (auto& b : base) b += 2;
      }
      for (int i = 0; i < Rows; ++i)
        for (int j = 0; j < 2 * Panels; ++j)
          total[i][j] = total[i][j] + to_floats(sum[i][j]);
    }

    for (int i = 0; i < Rows; ++i)
      for (int j = 0; j < 2 * Panels; ++j) finish(row + i, panel * kPanel + j * kLanes, total[i][j]);
  }

  void finish(int64_t row, int64_t column, Vector total) const {
    for_columns(n - column, [&](auto lanes) {
      const Vector of_channels = total * load(scale + column, lanes);
      const Vector result = of_channels * broadcast(x_scale[row]);
      if (is_float)
        store(static_cast<float*>(y) + row * n + column, result, lanes);
      else
        store(static_cast<BFloat16*>(y) + row * n + column, result, lanes);
    });
  }
};

// x [rows, k] -> y [rows, n], both bfloat16 or both float32.
template <typename X>
void multiply_int8(const X* x, int64_t rows, const int8_t* packed, const float* scale, X* y, int64_t n, int64_t k,
                   int num_threads) {
  const std::unique_ptr<int16_t[]> q(new int16_t[rows * even(k)]);
  const std::unique_ptr<float[]> x_scale(new float[rows]);
  const int64_t part = std::max<int64_t>(1, kInputsPart / k);
  parallel_for(rows, part, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      x_scale[row] = quantize_row(x + row * k, k, q.get() + row * even(k));
  });
  multiply(Int8Product{q.get(), x_scale.get(), packed, scale, y, std::is_same_v<X, float>, rows, n, k}, num_threads);
}

}  // namespace specmamba
