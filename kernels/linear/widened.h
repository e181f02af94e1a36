// y = x W^T in float32, with weights that are widened to float32 where they are used.
#pragma once

#include <type_traits>

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
    add(sum, weight + panel * panel_size(k), x + row * k, k, k);
    store_tile(sum, y, n, row, panel);
  }

  // Panels for many rows: parts of k one after the other, widened once. Sums wait in memory, unrounded, so that they
  // are those of tile().
  static constexpr bool kHasParts = !std::is_same_v<W, float>;  // what needs no widening is no faster in parts
  using Inputs = InputParts<float, kDepth>;
  Inputs inputs_in_parts(int num_threads) const { return {x, rows, k, num_threads}; }
  void in_parts(const Inputs& inputs, int64_t begin, int64_t end) const {
    alignas(64) float widened[kDepth * kPanel];
    float* const sums = sums_of(end - begin, rows);
    for (int64_t first = 0; first < k; first += kDepth)
      for (int64_t panel = begin; panel < end; ++panel) {
        const int64_t depth = std::min(kDepth, k - first);
        copy_widened(weight + panel * panel_size(k) + first * kPanel, depth, widened);
        float* const of_panel = sums + (panel - begin) * rows * kPanel;
        pass_rows(Part{*this, inputs.part(first), widened, of_panel, first, depth}, rows, panel);
      }
  }

 private:
  struct Part {
    const WidenedProduct& product;
    const float *x, *weight;
    float* sums;
    int64_t first, depth;

    template <int Rows, int Panels>
    void tile(int64_t row, int64_t panel) const {
      const WidenedProduct& p = product;
      Vector sum[Rows][2];
      begin_sums(sum, sums, row, first == 0);
      p.add(sum, weight, x + row * Inputs::kStride, depth, std::integral_constant<int64_t, Inputs::kStride>{});
      first + depth < p.k ? keep_sums(sum, sums, row) : store_tile(sum, p.y, p.n, row, panel);
    }
  };

  static void copy_widened(const W* weight, int64_t depth, float* widened) {
    for (int64_t i = 0; i < depth * kPanel; i += kLanes) store(widened + i, load(weight + i, All{}), All{});
  }

  // Adds `depth` inputs of rows that lie `stride` apart times panels that lie panel_size(k) apart.
  template <typename Weight, int Rows, int Vectors, typename Stride>
  __attribute__((always_inline)) void add(Vector (&sum)[Rows][Vectors], const Weight* w, const float* in,
                                          int64_t depth, Stride stride) const {
    const int64_t size = panel_size(k);
    for (int64_t at = 0; at < depth; ++at, w += kPanel, ++in) {
      Vector both[Vectors];
      for (int j = 0; j < Vectors; ++j) both[j] = load(w + j / 2 * size + j % 2 * kLanes, All{});
      __builtin_prefetch(reinterpret_cast<const char*>(w) + kPrefetch, 0, 2);
#pragma GCC unroll 16
      for (int i = 0; i < Rows; ++i) {
        const Vector input = broadcast(in[i * stride]);
        for (int j = 0; j < Vectors; ++j) sum[i][j] = fma(input, both[j], sum[i][j]);
      }
    }
  }
};

}  // namespace specmamba
