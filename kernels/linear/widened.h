// y = x W^T in float32, with weights that are widened to float32 where they are used.
#pragma once

#include <type_traits>

#include "linear/panels.h"
#include "vector.h"

namespace specmamba {

// Inputs of a panel that lie beside each other: two bfloat16 fill a lane, and are widened by a shift and a mask.
template <typename W>
constexpr int kInputsOf = std::is_same_v<W, float> ? 1 : 2;

// Weights are float32 or bfloat16; results are float32 or bfloat16.
template <typename W, typename Y>
struct WidenedProduct {
  const float* x;   // [rows, k], rows `stride` apart
  const W* weight;  // packed, kInputsOf<W> beside each other
  Y* y;             // [rows, n]
  int64_t rows, n, k, stride;

  int64_t panel_bytes() const { return panel_size(k) * static_cast<int64_t>(sizeof(W)); }

  // Every sum runs over k in ascending order, whatever Rows and Panels are.
  template <int Rows, int Panels>
  void tile(int64_t row, int64_t panel) const {
    Vector sum[Rows][2 * Panels];
    for (auto& of_row : sum)
      for (auto& s : of_row) s = zero();
    const W* const w = weight + panel * panel_size(k);
    Ahead ahead(w, panel_bytes(), row, rows);
    add(sum, w, x + row * stride, k, stride, &ahead);
    store_tile(sum, y, n, row, panel);
  }

  // Panels for many rows: parts of k one after the other, widened once. Sums wait in memory, unrounded, so that they
  // are those of tile().
  static constexpr bool kHasParts = !std::is_same_v<W, float>;  // what needs no widening is no faster in parts
  using Inputs = InputParts<float, kDepth>;
  Inputs inputs_in_parts(int num_threads) const { return {x, rows, k, stride, num_threads}; }
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
  static constexpr int kInputs = kInputsOf<W>;

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
      p.add(sum, weight, x + row * Inputs::kStride, depth, std::integral_constant<int64_t, Inputs::kStride>{},
            nullptr);
      first + depth < p.k ? keep_sums(sum, sums, row) : store_tile(sum, p.y, p.n, row, panel);
    }
  };

  static void copy_widened(const W* weight, int64_t depth, float* widened) {
    for (int64_t at = 0; at < depth; at += kInputs)
      for (int j = 0; j < 2; ++j) {
        Vector of_inputs[kInputs];
        load_weights(weight + (at * 2 + j * kInputs) * kLanes, of_inputs);
        for (int t = 0; t < kInputs; ++t) store(widened + (at + t) * kPanel + j * kLanes, of_inputs[t], All{});
      }
  }

  static void load_weights(const float* w, Vector (&of_inputs)[1]) { of_inputs[0] = load(w, All{}); }
  static void load_weights(const BFloat16* w, Vector (&of_inputs)[2]) {
    const Shorts both = load_shorts(w);
    of_inputs[0] = even_of(both), of_inputs[1] = odd_of(both);
  }

  // Adds `depth` inputs of rows that lie `stride` apart times panels that lie panel_size(k) apart. Prefetching is Ahead*
  // or nullptr_t.
  template <typename Weight, int Rows, int Vectors, typename Stride, typename Prefetching>
  __attribute__((always_inline)) void add(Vector (&sum)[Rows][Vectors], const Weight* w, const float* in,
                                          int64_t depth, Stride stride, Prefetching ahead) const {
    constexpr bool kPrefetches = std::is_same_v<Prefetching, Ahead*>;
    constexpr int kBeside = kInputsOf<Weight>;
    constexpr int64_t kBytes = kBeside * kPanel * sizeof(Weight);
    const int64_t size = panel_size(k);
    constexpr int kBases = (Rows + 2) / 3;  // as in bf16.h
    const float* base[kBases];
    for (int i = 0; i < kBases; ++i) base[i] = in + 3 * i * stride;
    const char* prefetched = nullptr;
    int64_t per_step = 0;
    if constexpr (kPrefetches) prefetched = ahead->at, per_step = kBytes / ahead->shares;
    const auto step = [&](auto inputs) __attribute__((always_inline)) {
      Vector both[Vectors][kBeside];
      for (int j = 0; j < Vectors; ++j) load_weights(w + j / 2 * size + j % 2 * kBeside * kLanes, both[j]);
      // not in a function: GCC takes one that only prefetches for one without effects, and drops the call
      if constexpr (kPrefetches) {
        for (int j = 0; j < Vectors; j += 2)
          for (int64_t line = 0; line < kBytes; line += kLineBytes)
            __builtin_prefetch(prefetched + j / 2 * panel_bytes() + line, 0, 2);
        prefetched += per_step;
      }
      for (int t = 0; t < inputs; ++t)
#pragma GCC unroll 16
        for (int i = 0; i < Rows; ++i) {
          const Vector input = broadcast(base[i / 3][i % 3 * stride + t]);
          for (int j = 0; j < Vectors; ++j) sum[i][j] = fma(input, both[j][t], sum[i][j]);
        }
      w += kBeside * kPanel;
      for (auto& b : base) b += kBeside;
    };
    for (int64_t at = 0; at + kBeside <= depth; at += kBeside) step(std::integral_constant<int, kBeside>{});
    if (depth % kBeside != 0) step(std::integral_constant<int, 1>{});
  }
};

}  // namespace specmamba
