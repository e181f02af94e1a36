// y = x W^T in bfloat16 with float32 accumulation: in tiles or pairs where the instruction set multiplies them, else
// widened.
#pragma once

#include <memory>

#include "linear/panels.h"
#include "linear/widened.h"
#include "vector.h"

#if SPECMAMBA_HAS_TILES
#include "linear/bf16_tiles.h"
#endif

namespace specmamba {

#if SPECMAMBA_HAS_TILES

using Bf16Product = TileProduct;

#elif SPECMAMBA_MULTIPLIES_PAIRS

constexpr int kPrefetchRows = 6;  // with fewer rows the hardware's own prefetching is faster on CPUs that multiply pairs

struct Bf16Product {
  const BFloat16* x;       // [rows, k]
  const BFloat16* weight;  // packed
  BFloat16* y;             // [rows, n]
  int64_t rows, n, k, stride;  // of x

  static constexpr bool kHasParts = false;  // nothing is widened
  static constexpr int64_t kStepBytes = 2 * kPanel * sizeof(BFloat16);  // of a panel, for a pair of inputs
  int64_t panel_bytes() const { return panel_size(k) * 2; }

  // Every sum runs over k in ascending order, whatever Rows and Panels are.
  template <int Rows, int Panels>
  void tile(int64_t row, int64_t panel) const {
    Vector sum[Rows][2 * Panels];
    for (auto& of_row : sum)
      for (auto& s : of_row) s = zero();
    const int64_t size = panel_size(k);
    const BFloat16* w = weight + panel * size;
    const Ahead ahead(w, panel_bytes(), row, rows);
    const char* prefetched = ahead.at;
    const int64_t per_step = kStepBytes / ahead.shares;  // a line that is asked for twice costs less than a branch
    // three rows share a pointer: base, base + stride, base + 2 stride are addresses the instruction can form
    constexpr int kBases = (Rows + 2) / 3;
    const BFloat16* base[kBases];
    for (int i = 0; i < kBases; ++i) base[i] = x + (row + 3 * i) * stride;

    auto step = [&](auto input) __attribute__((always_inline)) {
      Pairs both[2 * Panels];
      for (int j = 0; j < Panels; ++j) {
        both[2 * j] = load_pairs(w + j * size);
        both[2 * j + 1] = load_pairs(w + j * size + kPanel);
      }
      if constexpr (Rows >= kPrefetchRows) {
        for (int64_t line = 0; line < kStepBytes; line += kLineBytes) __builtin_prefetch(prefetched + line, 0, 2);
        prefetched += per_step;
      }
#pragma GCC unroll 16
      for (int i = 0; i < Rows; ++i) {
        const Pairs pair = input(base[i / 3] + i % 3 * stride);
        for (int j = 0; j < 2 * Panels; ++j) sum[i][j] = add_products(sum[i][j], pair, both[j]);
      }
      w += 2 * kPanel;
      for (auto& b : base) b += 2;
    };
    for (int64_t pair = 0; pair < k / 2; ++pair) step([](const BFloat16* x) { return broadcast_pair(x); });
    if (k % 2) step([](const BFloat16* last) { return as_pairs(broadcast_pair(int32_t{last->bits})); });

    store_tile(sum, y, n, row, panel);
  }
};

#else

using Bf16Product = WidenedProduct<BFloat16, BFloat16>;

#endif

// Inputs as products take them.
#if SPECMAMBA_MULTIPLIES_PAIRS

struct Bf16Inputs : PlainInputs<BFloat16> {
  Bf16Inputs(const BFloat16* x, int64_t, int64_t k, int) : PlainInputs{x, k} {}
};

#else

class Bf16Inputs {
 public:
  Bf16Inputs(const BFloat16* x, int64_t rows, int64_t k, int num_threads)
      : stride_(apart(k)), x_(new float[rows * stride_]) {
    parallel_for(rows, std::max<int64_t>(1, kInputsPart / k), num_threads, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r)
        for_vectors(k, [&](int64_t i, auto lanes) {
          store(x_.get() + r * stride_ + i, load(x + r * k + i, lanes), lanes);
        });
    });
  }
  const float* row(int64_t r) const { return x_.get() + r * stride_; }
  int64_t stride() const { return stride_; }

 private:
  // An odd number of cache lines: rows a power of two apart would share one set of the L1 cache.
  static int64_t apart(int64_t k) {
    constexpr int64_t kLine = kLineBytes / sizeof(float);
    return ((k + kLine - 1) / kLine | 1) * kLine;
  }

  int64_t stride_;
  std::unique_ptr<float[]> x_;
};

#endif

inline void multiply_bf16(const BFloat16* x, int64_t rows, const BFloat16* packed, BFloat16* y, int64_t n, int64_t k,
                          int num_threads) {
  const Bf16Inputs inputs(x, rows, k, num_threads);
  multiply(Bf16Product{inputs.row(0), packed, y, rows, n, k, inputs.stride()}, num_threads);
}

}  // namespace specmamba
