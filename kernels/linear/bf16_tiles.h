// y = x W^T in bfloat16 with float32 accumulation in tile registers: panels are as they are without them.
#pragma once

#include "linear/panels.h"
#include "vector.h"

namespace specmamba {

struct TileProduct {
  const BFloat16* x;       // [rows, k]
  const BFloat16* weight;  // packed
  BFloat16* y;             // [rows, n]
  int64_t rows, n, k, stride;  // of x

  static constexpr bool kHasParts = false;  // nothing is widened
  static constexpr int64_t kMost = 2 * tiles::kRows;  // of a pass
  int64_t panel_bytes() const { return panel_size(k) * static_cast<int64_t>(sizeof(BFloat16)); }

  // Passes of the same height share a configuration, whatever the panel.
  void panels(int64_t first, int64_t last) const {
    const int64_t step = rows_per_pass(rows, kMost), whole = rows / step * step;
    const Ends ends(*this);
    passes(ends, 0, whole, step, first, last);
    if (whole < rows) passes(ends, whole, rows, rows - whole, first, last);
    tiles::release();
  }

 private:
  static_assert(kPanel == tiles::kOutputs);

  // The last inputs of all rows, where they do not fill a tile, and zeros behind them.
  struct Ends {
    explicit Ends(const TileProduct& p) : first(p.k / tiles::kInputs * tiles::kInputs), count(p.k - first) {
      if (count == 0) return;
      x.resize(p.rows * tiles::kInputs);
      for (int64_t row = 0; row < p.rows; ++row)
        std::copy_n(p.x + row * p.stride + first, count, x.data() + row * tiles::kInputs);
    }
    int64_t first, count;
    std::vector<BFloat16> x;
  };

  void passes(const Ends& ends, int64_t begin, int64_t end, int64_t height, int64_t first, int64_t last) const {
    tiles::configure(height);
    for (int64_t panel = first; panel < last; ++panel)
      for (int64_t row = begin; row < end; row += height)
        height > tiles::kRows ? pass<true>(ends, row, height, panel) : pass<false>(ends, row, height, panel);
  }

  template <bool Both>
  void pass(const Ends& ends, int64_t row, int64_t height, int64_t panel) const {
    const BFloat16 *w = weight + panel * panel_size(k), *in = x + row * stride;
    constexpr int64_t kStep = tiles::kInputs * kPanel, kStepBytes = kStep * sizeof(BFloat16);
    const char* prefetched = reinterpret_cast<const char*>(w) + kPrefetch;
    tiles::clear<Both>();
    for (int64_t at = 0; at < ends.first; at += tiles::kInputs, w += kStep, prefetched += kStepBytes) {
      if (row == 0)  // later passes find the panel in L2
        for (int64_t line = 0; line < kStepBytes; line += kLineBytes) __builtin_prefetch(prefetched + line, 0, 2);
      tiles::add_products<Both>(in + at, stride, w);
    }
    if (ends.count > 0) {
      alignas(64) BFloat16 pairs[kStep] = {};
      std::copy_n(w, even(ends.count) * kPanel, pairs);
      asm volatile("" ::: "memory");  // as in amx.h
      tiles::add_products<Both>(ends.x.data() + row * tiles::kInputs, tiles::kInputs, pairs);
    }
    alignas(64) float sums[kMost * kPanel];
    tiles::store<Both>(sums);
    for (int64_t i = 0; i < height; ++i)
      for (int64_t column = panel * kPanel, from = i * kPanel; column < (panel + 1) * kPanel;
           column += kLanes, from += kLanes)
        for_columns(n - column, [&](auto lanes) {
          store(y + (row + i) * n + column, load(sums + from, All{}), lanes);
        });
  }
};

inline void multiply_panels(const TileProduct& p, int64_t first, int64_t last) { p.panels(first, last); }

}  // namespace specmamba
