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
constexpr int64_t kQuantizePart = 1 << 15;  // inputs that a thread takes at a time

inline void store_int16(int16_t* q, __m256i x, All) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), x); }
inline void store_int16(int16_t* q, __m256i x, First lanes) { _mm256_mask_storeu_epi16(q, lanes.mask, x); }

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
  __m512i magnitude = _mm512_setzero_si512();  // of float32 as integers, which are in the same order
  for_vectors(k, [&](int64_t i, auto lanes) {
    const __m512i bits = _mm512_castps_si512(load(x + i, lanes));
    magnitude = _mm512_max_epi32(magnitude, _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF)));
  });
  const int biased = _mm512_reduce_max_epi32(magnitude) >> 23;
  const int exponent = std::max(biased - 127 - 14, -126);  // neither the scale nor its inverse may be subnormal
  const Vector inverse = _mm512_set1_ps(power_of_two(-exponent));
  for_vectors(k, [&](int64_t i, auto lanes) {
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(load(x + i, lanes), inverse));  // to nearest even
    store_int16(q + i, _mm512_cvtsepi32_epi16(whole), lanes);
  });
  if (k % 2) q[k] = 0;
  return biased == 255 ? std::numeric_limits<float>::quiet_NaN() : power_of_two(exponent);
}

// Sixteen int32. With __m512i, whose lanes are int64, GCC 12 copies every sum around its instruction and spills them.
using Integers = int32_t __attribute__((vector_size(64)));

// Adds two products to each of 16 sums, exactly.
inline Integers add_products(Integers sum, __m512i a, __m512i b) {
#ifdef __AVX512VNNI__
  return (Integers)_mm512_dpwssd_epi32((__m512i)sum, a, b);
#else
  return sum + (Integers)_mm512_madd_epi16(a, b);
#endif
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

  static __m512i pair_at(const int16_t* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return _mm512_set1_epi32(pair);
  }

  // Blocks of k are added in ascending order, and within them every sum is exact, whatever Rows and Panels are.
  template <int Rows, int Panels>
  void tile(int64_t row, int64_t panel) const {
    Vector total[Rows][2 * Panels];
    for (auto& of_row : total)
      for (auto& t : of_row) t = _mm512_setzero_ps();
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
        __m512i both[2 * Panels];
        for (int j = 0; j < 2 * Panels; ++j) {
          const int8_t* of_16 = w + j / 2 * size + j % 2 * kPanel;
          both[j] = _mm512_cvtepi8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(of_16)));
        }
        if constexpr (Rows >= kPrefetchRows) _mm_prefetch(w + kPrefetch, _MM_HINT_T1);
#pragma GCC unroll 16
        for (int i = 0; i < Rows; ++i) {
          const __m512i of_row = pair_at(base[i / 3] + i % 3 * stride);
          for (int j = 0; j < 2 * Panels; ++j) sum[i][j] = add_products(sum[i][j], of_row, both[j]);
        }
        w += 2 * kPanel;
        for (auto& b : base) b += 2;
      }
      for (int i = 0; i < Rows; ++i)
        for (int j = 0; j < 2 * Panels; ++j)
          total[i][j] = _mm512_add_ps(total[i][j], _mm512_cvtepi32_ps((__m512i)sum[i][j]));
    }

    for (int i = 0; i < Rows; ++i)
      for (int j = 0; j < 2 * Panels; ++j) finish(row + i, panel * kPanel + j * kLanes, total[i][j]);
  }

  void finish(int64_t row, int64_t column, Vector total) const {
    for_columns(n - column, [&](auto lanes) {
      const Vector of_channels = _mm512_mul_ps(total, load(scale + column, lanes));
      const Vector result = _mm512_mul_ps(of_channels, _mm512_set1_ps(x_scale[row]));
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
  const int64_t part = std::max<int64_t>(1, kQuantizePart / k);
  parallel_for(rows, part, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      x_scale[row] = quantize_row(x + row * k, k, q.get() + row * even(k));
  });
  multiply(Int8Product{q.get(), x_scale.get(), packed, scale, y, std::is_same_v<X, float>, rows, n, k}, num_threads);
}

}  // namespace specmamba
