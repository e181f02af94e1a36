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
    const int64_t size = panel_size(k), pairs = even(k) / 2;
    Ahead ahead(weight + panel * size, size, row, rows);
    for (int64_t first = 0; first < pairs; first += kBlockPairs)
      add(total, weight + panel * size + first * kPairs, x + row * even(k) + 2 * first,
          std::min(kBlockPairs, pairs - first), even(k), &ahead);
    for (int i = 0; i < Rows; ++i)
      for (int j = 0; j < 2 * Panels; ++j) finish(row + i, panel * kPanel + j * kLanes, total[i][j]);
  }

  // Panels for many rows: block by block, widened once. Sums of blocks wait in memory.
  static constexpr bool kHasParts = true;
  using Inputs = InputParts<int16_t, 2 * kBlockPairs>;
  Inputs inputs_in_parts(int num_threads) const { return {x, rows, even(k), even(k), num_threads}; }
  void in_parts(const Inputs& inputs, int64_t begin, int64_t end) const {
    alignas(64) int16_t widened[kBlockPairs * kPairs];
    float* const sums = sums_of(end - begin, rows);
    for (int64_t first = 0; first < even(k) / 2; first += kBlockPairs)
      for (int64_t panel = begin; panel < end; ++panel) {
        const int64_t pairs = std::min(kBlockPairs, even(k) / 2 - first);
        const int8_t* of_block = weight + panel * panel_size(k) + first * kPairs;
        for (int64_t i = 0; i < pairs * kPairs; i += kPanel) store_shorts(widened + i, load_widened(of_block + i));
        float* const of_panel = sums + (panel - begin) * rows * kPanel;
        pass_rows(Part{*this, inputs.part(2 * first), widened, of_panel, first, pairs}, rows, panel);
      }
  }

 private:
  static constexpr int64_t kPairs = 2 * kPanel;  // weights of a pair of inputs in a panel

  struct Part {
    const Int8Product& product;
    const int16_t *x, *weight;
    float* sums;
    int64_t first, pairs;

    template <int Rows, int Panels>
    void tile(int64_t row, int64_t panel) const {
      Vector total[Rows][2];
      begin_sums(total, sums, row, first == 0);
      product.add(total, weight, x + row * Inputs::kStride, pairs,
                  std::integral_constant<int64_t, Inputs::kStride>{}, nullptr);
      if (first + pairs < even(product.k) / 2) return keep_sums(total, sums, row);
      for (int i = 0; i < Rows; ++i)
        for (int j = 0; j < 2; ++j) product.finish(row + i, panel * kPanel + j * kLanes, total[i][j]);
    }
  };

  static Shorts shorts_of(const int8_t* weight) { return load_widened(weight); }
  static Shorts shorts_of(const int16_t* weight) { return load_shorts(weight); }

  // Adds one block: `pairs` pairs of inputs of rows that lie `stride` apart times panels that lie panel_size(k) apart.
  // Prefetching is Ahead* or nullptr_t.
  template <typename Weight, int Rows, int Vectors, typename Stride, typename Prefetching>
  __attribute__((always_inline)) void add(Vector (&total)[Rows][Vectors], const Weight* w, const int16_t* in,
                                          int64_t pairs, Stride stride, Prefetching ahead) const {
    constexpr bool kPrefetches = std::is_same_v<Prefetching, Ahead*>;
    const int64_t size = panel_size(k);
    constexpr int kBases = (Rows + 2) / 3;  // as in bf16.h
    const int16_t* base[kBases];
    for (int i = 0; i < kBases; ++i) base[i] = in + 3 * i * stride;
    Integers sum[Rows][Vectors];
    for (auto& of_row : sum)
      for (auto& s : of_row) s = Integers{};
    const char* at = nullptr;
    int64_t per_step = 0;
    if constexpr (kPrefetches) at = ahead->at, per_step = kPairs / ahead->shares;
    for (; pairs > 0; --pairs) {
      Shorts both[Vectors];
      for (int j = 0; j < Vectors; ++j) both[j] = shorts_of(w + j / 2 * size + j % 2 * kPanel);
      if constexpr (kPrefetches) {
        for (int j = 0; j < Vectors; j += 2) __builtin_prefetch(at + j / 2 * size, 0, 2);
        at += per_step;
      }
#pragma GCC unroll 16
      for (int i = 0; i < Rows; ++i) {
        const Shorts of_row = broadcast_pair(base[i / 3] + i % 3 * stride);
        for (int j = 0; j < Vectors; ++j) sum[i][j] = add_products(sum[i][j], of_row, both[j]);
      }
      w += kPairs;
      for (auto& b : base) b += 2;
    }
    if constexpr (kPrefetches) ahead->at = at;
    for (int i = 0; i < Rows; ++i)
      for (int j = 0; j < Vectors; ++j) total[i][j] = total[i][j] + to_floats(sum[i][j]);
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
