// y = x W^T in bfloat16 with float32 accumulation.
#pragma once

#include <cstring>

#include "linear/panels.h"
#include "vector.h"

namespace specmamba {

struct Bf16Product {
  const uint16_t* x;       // [rows, k]
  const uint16_t* weight;  // packed
  BFloat16* y;             // [rows, n]
  int64_t rows, n, k;

  int64_t panel_bytes() const { return panel_size(k) * 2; }

  // The two bfloat16 of one k pair, in every lane.
  static __m512bh pair_at(const uint16_t* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }

  // Every sum runs over k in ascending order, whatever Rows and Panels are.
  template <int Rows, int Panels>
  void tile(int64_t row, int64_t panel) const {
    __m512 sum[Rows][2 * Panels];
    for (auto& of_row : sum)
      for (auto& s : of_row) s = _mm512_setzero_ps();
    const int64_t size = panel_size(k), stride = k;
    const uint16_t* w = weight + panel * size;
    // three rows share a pointer: base, base + stride, base + 2 stride are addresses the instruction can form
    constexpr int kBases = (Rows + 2) / 3;
    const uint16_t* base[kBases];
    for (int i = 0; i < kBases; ++i) base[i] = x + (row + 3 * i) * stride;

    auto step = [&](auto input) __attribute__((always_inline)) {
      __m512bh both[2 * Panels];
      for (int j = 0; j < Panels; ++j) {
        both[2 * j] = (__m512bh)_mm512_load_si512(w + j * size);
        both[2 * j + 1] = (__m512bh)_mm512_load_si512(w + j * size + kPanel);
        if constexpr (Rows >= kPrefetchRows) {
          const char* ahead = reinterpret_cast<const char*>(w + j * size) + kPrefetch;
          _mm_prefetch(ahead, _MM_HINT_T1);
          _mm_prefetch(ahead + 64, _MM_HINT_T1);
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < Rows; ++i) {
        const __m512bh pair = input(base[i / 3] + i % 3 * stride);
        for (int j = 0; j < 2 * Panels; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], pair, both[j]);
      }
      w += 2 * kPanel;
      for (auto& b : base) b += 2;
    };
    for (int64_t pair = 0; pair < k / 2; ++pair) step(pair_at);
    if (k % 2) step([](const uint16_t* last) { return (__m512bh)_mm512_set1_epi32(*last); });

    for (int i = 0; i < Rows; ++i)
      for (int j = 0; j < 2 * Panels; ++j) {
        const int64_t column = panel * kPanel + j * kLanes;
        for_columns(n - column, [&](auto lanes) { store(y + (row + i) * n + column, sum[i][j], lanes); });
      }
  }
};

}  // namespace specmamba
