// y = x W^T in bfloat16 with float32 accumulation; see README.md for the layout.
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "parallel.h"

namespace {

constexpr int kLanes = 16;                          // outputs of one vector
constexpr int kPanel = 2 * kLanes;                  // outputs of one panel
constexpr int kMaxRows = 12;                        // rows of a pass: 24 sums, 2 weights, 1 input of 32 registers
constexpr int kPrefetchRows = 6;                    // with fewer rows the hardware's own prefetching is faster
constexpr int64_t kPrefetch = 8192;                 // bytes ahead, into L2
constexpr int64_t kSerialBelow = int64_t{1} << 17;  // products that one thread has done before a second one begins

// The two bfloat16 of one k pair, in every lane.
inline __m512bh pair_at(const uint16_t* x) {
  int32_t pair;
  std::memcpy(&pair, x, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// The first `columns` of 16 sums, rounded; all of them where there are more.
inline void store(uint16_t* y, __m512 sum, int64_t columns) {
  if (columns <= 0) return;
  const __mmask16 mask = columns >= kLanes ? 0xFFFF : static_cast<__mmask16>((1u << columns) - 1);
  _mm256_mask_storeu_epi16(y, mask, (__m256i)_mm512_cvtneps_pbh(sum));
}

struct Product {
  const uint16_t* x;       // [rows, k]
  const uint16_t* weight;  // packed
  uint16_t* y;             // [rows, n]
  int64_t rows, n, k;

  int64_t panel_size() const { return (k + 1) / 2 * 2 * kPanel; }
};

// Rows x panels of the result. Every sum runs over k in ascending order, whatever Rows and Panels are.
template <int Rows, int Panels>
void tile(const Product& p, int64_t row, int64_t panel) {
  __m512 sum[Rows][2 * Panels];
  for (auto& of_row : sum)
    for (auto& s : of_row) s = _mm512_setzero_ps();
  const int64_t size = p.panel_size(), stride = p.k;
  const uint16_t* w = p.weight + panel * size;
  // three rows share a pointer: base, base + stride, base + 2 stride are addresses the instruction can form
  constexpr int kBases = (Rows + 2) / 3;
  const uint16_t* base[kBases];
  for (int i = 0; i < kBases; ++i) base[i] = p.x + (row + 3 * i) * stride;

  auto step = [&](auto input) __attribute__((always_inline)) {
    __m512bh weight[2 * Panels];
    for (int j = 0; j < Panels; ++j) {
      weight[2 * j] = (__m512bh)_mm512_load_si512(w + j * size);
      weight[2 * j + 1] = (__m512bh)_mm512_load_si512(w + j * size + kPanel);
      if constexpr (Rows >= kPrefetchRows) {
        const char* ahead = reinterpret_cast<const char*>(w + j * size) + kPrefetch;
        _mm_prefetch(ahead, _MM_HINT_T1);
        _mm_prefetch(ahead + 64, _MM_HINT_T1);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      const __m512bh x = input(base[i / 3] + i % 3 * stride);
      for (int j = 0; j < 2 * Panels; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], x, weight[j]);
    }
    w += 2 * kPanel;
    for (auto& b : base) b += 2;
  };
  for (int64_t pair = 0; pair < p.k / 2; ++pair) step(pair_at);
  if (p.k % 2) step([](const uint16_t* x) { return (__m512bh)_mm512_set1_epi32(*x); });

  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < 2 * Panels; ++j) {
      const int64_t column = panel * kPanel + j * kLanes;
      store(p.y + (row + i) * p.n + column, sum[i][j], p.n - column);
    }
}

using Tile = void (*)(const Product&, int64_t, int64_t);
constexpr Tile kTiles[kMaxRows + 1] = {nullptr,    tile<1, 1>, tile<2, 1>, tile<3, 1>,  tile<4, 1>,
                                       tile<5, 1>, tile<6, 1>, tile<7, 1>, tile<8, 1>,  tile<9, 1>,
                                       tile<10, 1>, tile<11, 1>, tile<12, 1>};
// With few rows one panel's sums wait for each other: an addition takes longer than a load.
constexpr Tile kPairTiles[] = {nullptr, tile<1, 2>, tile<2, 2>, tile<3, 2>, tile<4, 2>};
constexpr int64_t kFewRows = 4;

// Rows of similar passes: 13 rows are 7 + 6, not 12 + 1.
int64_t rows_per_pass(int64_t rows) {
  const int64_t passes = (rows + kMaxRows - 1) / kMaxRows;
  return (rows + passes - 1) / passes;
}

// Streaming a weight of many megabytes through 4 KiB pages would miss the TLB at every one of them.
void use_huge_pages(void* data, int64_t size) {
  constexpr uintptr_t kHuge = uintptr_t{1} << 21;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data), first = (begin + kHuge - 1) & ~(kHuge - 1);
  const uintptr_t last = (begin + size) & ~(kHuge - 1);
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // a wish: failure is fine
}

void panels(const Product& p, int64_t first, int64_t last) {
  const int64_t step = rows_per_pass(p.rows);
  if (p.rows <= kFewRows)
    for (; first + 2 <= last; first += 2) kPairTiles[p.rows](p, 0, first);
  for (int64_t panel = first; panel < last; ++panel)
    for (int64_t row = 0; row < p.rows; row += step) kTiles[std::min(step, p.rows - row)](p, row, panel);
}

}  // namespace

extern "C" {

// Elements of a packed weight [n, k].
int64_t linear_packed_size(int64_t n, int64_t k) { return (n + kPanel - 1) / kPanel * kPanel * ((k + 1) / 2 * 2); }

// weight [n, k] -> packed, 64-byte aligned; what is beyond n and k is zero.
void linear_pack(const uint16_t* weight, uint16_t* packed, int64_t n, int64_t k, int num_threads) {
  use_huge_pages(packed, linear_packed_size(n, k) * 2);
  const int64_t pairs = (k + 1) / 2, num_panels = (n + kPanel - 1) / kPanel;
  specmamba::parallel_for(num_panels, 1, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; ++panel) {
      uint16_t* out = packed + panel * pairs * 2 * kPanel;
      for (int64_t pair = 0; pair < pairs; ++pair)
        for (int64_t row = panel * kPanel; row < (panel + 1) * kPanel; ++row)
          for (int64_t at = 2 * pair; at < 2 * pair + 2; ++at) *out++ = row < n && at < k ? weight[row * k + at] : 0;
    }
  });
}

// x [rows, k] times packed -> y [rows, n], all contiguous.
void linear_multiply(const uint16_t* x, int64_t rows, const uint16_t* packed, uint16_t* y, int64_t n, int64_t k,
                     int num_threads) {
  if (rows == 0) return;
  const Product p{x, packed, y, rows, n, k};
  const int64_t num_panels = (n + kPanel - 1) / kPanel;
  if (rows * n * k < kSerialBelow) num_threads = 1;
  // a thread takes about 256 KiB of weight at a time, and there are several such parts for each
  int64_t part = std::max<int64_t>(1, (int64_t{1} << 18) / (p.panel_size() * 2));
  part = std::min(part, std::max<int64_t>(1, num_panels / (4 * std::max(num_threads, 1))));
  specmamba::parallel_for(num_panels, part, num_threads, [&](int64_t first, int64_t last) { panels(p, first, last); });
}

}  // extern "C"
