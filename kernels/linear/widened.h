// y = x W^T in float32, with weights that are widened to float32 where they are used.
#pragma once

#include "linear/panels.h"
#include "vector.h"

namespace specmamba {

// Weights are float32 or bfloat16, in panels of single inputs; results are float32 or bfloat16.
template <typename W, typename Y>
struct WidenedProduct {
  const float* x;   // [rows, k]
  const W* weight;  // packed
  Y* y;             // [rows, n]
  int64_t rows, n, k;

  int64_t panel_bytes() const { return panel_size(k) * static_cast<int64_t>(sizeof(W)); }

  // Every sum runs over k in ascending order, whatever Rows and Panels are.
  template <int Rows, int Panels>
  void tile(int64_t row, int64_t panel) const {
    Vector sum[Rows][2 * Panels];
    for (auto& of_row : sum)
      for (auto& s : of_row) s = zero();
    const int64_t size = panel_size(k);
    const W* w = weight + panel * size;
    const float* in = x + row * k;
    for (int64_t at = 0; at < k; ++at, w += kPanel, ++in) {
      Vector both[2 * Panels];
      for (int j = 0; j < 2 * Panels; ++j) both[j] = load(w + j / 2 * size + j % 2 * kLanes, All{});
      if constexpr (Rows >= kPrefetchRows) __builtin_prefetch(reinterpret_cast<const char*>(w) + kPrefetch, 0, 2);
#pragma GCC unroll 16
      for (int i = 0; i < Rows; ++i) {
        const Vector input = broadcast(in[i * k]);
        for (int j = 0; j < 2 * Panels; ++j) sum[i][j] = fma(input, both[j], sum[i][j]);
      }
    }
    store_tile(sum, y, n, row, panel);
  }
};

}  // namespace specmamba
