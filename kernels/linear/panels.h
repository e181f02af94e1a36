// What the forms of a packed weight share: panels, passes over rows, parts for threads. See README.md.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "parallel.h"
#include "vector.h"

namespace specmamba {

constexpr int kPanel = 2 * kLanes;                  // outputs of one panel
constexpr int kMaxRows = 3 * kRegisters / 8;        // of a pass: of 32 registers 24 have sums, 2 weights, 1 an input
constexpr int kPairRows = kRegisters / 8;           // up to these, a pass takes two panels
constexpr int64_t kManyRows = 4 * kMaxRows;         // from these on, products go through k in parts
constexpr int64_t kDepth = 256;                     // float32 inputs in a part; a panel's weights fill half of L1
constexpr int64_t kPanelsAtOnce = 8;                // that a part of the inputs of all rows stays in L2 for
constexpr int64_t kPrefetch = 8192;                 // bytes ahead, into L2
constexpr int64_t kShares = 4;                      // passes that share the prefetching of a panel, at most
constexpr int64_t kLineBytes = 64;                  // of a cache
constexpr int64_t kSerialBelow = int64_t{1} << 17;  // products that one thread has done before a second one begins
constexpr int64_t kPartBytes = int64_t{1} << 17;    // of weight that a thread claims at a time
constexpr int64_t kInputsPart = int64_t{1} << 15;   // inputs that a thread converts at a time

inline int64_t panels_of(int64_t n) { return (n + kPanel - 1) / kPanel; }
inline int64_t even(int64_t k) { return (k + 1) / 2 * 2; }
inline int64_t panel_size(int64_t k) { return even(k) * kPanel; }

// Rows of similar passes of at most so many rows: 13 rows are 7 + 6, not 12 + 1.
inline int64_t rows_per_pass(int64_t rows, int64_t most = kMaxRows) {
  const int64_t passes = (rows + most - 1) / most;
  return (rows + passes - 1) / passes;
}

// Where a pass over a panel prefetches. Several passes read the same panel, the first of them from memory: each then
// prefetches a share of what follows, so that memory is read all the time.
struct Ahead {
  const char* at;
  int64_t shares;  // of what follows: one for each of the last passes

  Ahead(const void* panel, int64_t bytes, int64_t row, int64_t rows) {
    const int64_t step = rows_per_pass(rows), passes = (rows + step - 1) / step;
    shares = std::min(passes, kShares);
    const int64_t share = std::max<int64_t>(0, row / step - (passes - shares));
    at = static_cast<const char*>(panel) + bytes * (share + shares - 1) / shares + kPrefetch;
  }
};

// weight [n, k] -> packed; what is beyond n and k is zero. Inputs of a panel lie beside each other as pairs
// (Inputs = 2) or one by one (1).
template <int Inputs, typename Element>
void pack(const Element* weight, Element* packed, int64_t n, int64_t k, int num_threads) {
  parallel_for(panels_of(n), 1, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; ++panel) {
      Element* out = packed + panel * panel_size(k);
      for (int64_t group = 0; group < even(k); group += Inputs)
        for (int64_t row = panel * kPanel; row < (panel + 1) * kPanel; ++row)
          for (int64_t at = group; at < group + Inputs; ++at)
            *out++ = row < n && at < k ? weight[row * k + at] : Element{};
    }
  });
}

// Calls body(lanes) for those of kLanes outputs that there are, of which `columns` are left.
template <typename Body>
inline void for_columns(int64_t columns, const Body& body) {
  if (columns >= kLanes)
    body(All{});
  else if (columns > 0)
    body(First(columns));
}

// Reads the sums of a tile from `sums` [rows, kPanel], or makes them zero; and writes them.
template <int Rows, int Vectors>
inline void begin_sums(Vector (&sum)[Rows][Vectors], const float* sums, int64_t row, bool is_first) {
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Vectors; ++j)
      sum[i][j] = is_first ? zero() : load(sums + (row + i) * kPanel + j * kLanes, All{});
}
template <int Rows, int Vectors>
inline void keep_sums(const Vector (&sum)[Rows][Vectors], float* sums, int64_t row) {
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Vectors; ++j) store(sums + (row + i) * kPanel + j * kLanes, sum[i][j], All{});
}

// Stores the sums of a tile: y [rows, n] from `row` on, and the outputs of its panels that there are.
template <int Rows, int Vectors, typename Y>
inline void store_tile(const Vector (&sum)[Rows][Vectors], Y* y, int64_t n, int64_t row, int64_t panel) {
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Vectors; ++j) {
      const int64_t column = panel * kPanel + j * kLanes;
      for_columns(n - column, [&](auto lanes) { store(y + (row + i) * n + column, sum[i][j], lanes); });
    }
}

// Rows of inputs that products take as they are.
template <typename X>
struct PlainInputs {
  const X* x;  // [rows, k]
  int64_t k;

  const X* row(int64_t r) const { return x + r * k; }
  int64_t stride() const { return k; }
};

// Calls product.tile<rows, Panels>(row, panel), which computes rows x panels of the result. Rows are 0, 1, 2 ...
template <int Panels, typename Product, int... Rows>
void tile(const Product& product, int64_t rows, int64_t row, int64_t panel, std::integer_sequence<int, Rows...>) {
  ((rows == Rows + 1 ? product.template tile<Rows + 1, Panels>(row, panel) : void()), ...);
}

// Inputs [rows, k] for many rows, part of k by part. In the tensor, parts of rows would share few sets of the L1 cache
// and lie in as many pages as there are rows.
template <typename X, int64_t Depth>
class InputParts {
 public:
  InputParts(const X* x, int64_t rows, int64_t k, int64_t stride, int num_threads)
      : rows_(rows), parts_((k + Depth - 1) / Depth), x_(new X[rows * parts_ * Depth]) {
    parallel_for(rows, std::max<int64_t>(1, kInputsPart / k), num_threads, [&](int64_t first, int64_t last) {
      for (int64_t at = 0; at < k; at += Depth)
        for (int64_t row = first; row < last; ++row)
          std::copy_n(x + row * stride + at, std::min(Depth, k - at), x_.get() + (at / Depth * rows_ + row) * Depth);
    });
  }

  static constexpr int64_t kStride = Depth;  // from row to row
  const X* part(int64_t first) const { return x_.get() + first * rows_; }  // of all rows, from the input `first` on

 private:
  int64_t rows_, parts_;
  std::unique_ptr<X[]> x_;
};

// Sums [panels, rows, kPanel] between parts of k. Each thread reuses its own.
inline float* sums_of(int64_t panels, int64_t rows) {
  static thread_local std::vector<float> sums;
  sums.resize(panels * rows * kPanel);
  return sums.data();
}

// Calls part.tile<rows, 1>(row, panel) for all rows of a panel.
template <typename Part>
inline void pass_rows(const Part& part, int64_t rows, int64_t panel) {
  const int64_t step = rows_per_pass(rows);
  for (int64_t row = 0; row < rows; row += step)
    tile<1>(part, std::min(step, rows - row), row, panel, std::make_integer_sequence<int, kMaxRows>{});
}

template <typename Product>
void multiply_panels(const Product& p, int64_t first, int64_t last) {
  // with few rows one panel's sums wait for each other: an addition takes longer than a load
  if (p.rows <= kPairRows)
    for (; first + 2 <= last; first += 2)
      tile<2>(p, p.rows, 0, first, std::make_integer_sequence<int, kPairRows>{});
  for (; first < last; ++first) pass_rows(p, p.rows, first);
}

// Panels that a thread claims at a time, of `panels` of so many bytes each. Passes over two panels do best with an even
// number, if there are enough for all threads.
inline int64_t panels_of_part(int64_t panels, int64_t panel_bytes, int num_threads, bool in_pairs) {
  const int64_t most = panels / (4 * std::max(num_threads, 1));  // there are several parts for each thread
  const int64_t part = std::max<int64_t>(1, std::min(kPartBytes / panel_bytes, most));
  return in_pairs && panels >= 4 * std::max(num_threads, 1) ? even(part) : part;
}

// All of a product with `rows`, `n`, `k`, whose panels have panel_bytes(). For many rows it has
// inputs_in_parts(), and in_parts(), which computes panels from them.
template <typename Product>
void multiply(const Product& p, int num_threads) {
  const int64_t num_panels = panels_of(p.n);
  if (p.rows * p.n * p.k < kSerialBelow) num_threads = 1;
  if constexpr (Product::kHasParts)
    if (p.rows >= kManyRows) {
      const int64_t part = num_panels / (4 * std::max(num_threads, 1));
      const auto inputs = p.inputs_in_parts(num_threads);
      return parallel_for(num_panels, std::clamp<int64_t>(part, 1, kPanelsAtOnce), num_threads,
                          [&](int64_t first, int64_t last) {
                            for (; first < last; first += kPanelsAtOnce)
                              p.in_parts(inputs, first, std::min(first + kPanelsAtOnce, last));
                          });
    }
  const int64_t part = panels_of_part(num_panels, p.panel_bytes(), num_threads, p.rows <= kPairRows);
  parallel_for_ranges(num_panels, part, num_threads,
                      [&](int64_t first, int64_t last) { multiply_panels(p, first, last); });
}

}  // namespace specmamba
