// Tile registers: products of 32 rows at the most, 32 inputs and 32 outputs at a time. Included by vector.h.
#pragma once

#include <immintrin.h>

namespace specmamba::tiles {

constexpr int64_t kRows = 16, kInputs = 32, kOutputs = 32;  // of one tile: rows, inputs; of two: outputs

// The shapes of registers: sums in 0 to 3 (two for 16 rows), inputs in 4 and 5, weights in 6 and 7. A thread that has
// them must release() them, or the system saves eight more KiB whenever it switches threads.
inline void configure(int64_t rows) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } shapes;
  const auto upper = static_cast<uint8_t>(std::min(rows, kRows));
  const auto lower = static_cast<uint8_t>(rows > kRows ? rows - kRows : 1);
  for (const int tile : {0, 1, 4, 2, 3, 5, 6, 7}) shapes.row_bytes[tile] = 64;
  for (const int tile : {0, 1, 4}) shapes.rows[tile] = upper;
  for (const int tile : {2, 3, 5}) shapes.rows[tile] = lower;
  for (const int tile : {6, 7}) shapes.rows[tile] = kInputs / 2;
  asm volatile("" ::: "memory");  // the compiler does not know that tiles are loaded from memory
  _tile_loadconfig(&shapes);
}
inline void release() { _tile_release(); }

template <bool Both>
inline void clear() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (Both) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

// Adds x [rows, kInputs], of which rows lie `stride` apart, times pairs of weights [kInputs / 2, kOutputs]; Both: there
// are more than kRows rows. For each sum products of even inputs are added in ascending order, those of odd inputs too,
// and both to the sum: whatever the other rows are.
template <bool Both>
inline void add_products(const BFloat16* x, int64_t stride, const BFloat16* pairs) {
  constexpr int64_t kPairBytes = 2 * kOutputs * sizeof(BFloat16);
  const int64_t row_bytes = stride * static_cast<int64_t>(sizeof(BFloat16));
  _tile_loadd(6, pairs, kPairBytes);
  _tile_loadd(4, x, row_bytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, pairs + kOutputs, kPairBytes);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (Both) {
    _tile_loadd(5, x + kRows * stride, row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Stores the sums of all rows: y [rows, kOutputs].
template <bool Both>
inline void store(float* y) {
  constexpr int64_t kRowBytes = kOutputs * sizeof(float);
  _tile_stored(0, y, kRowBytes);
  _tile_stored(1, y + kLanes, kRowBytes);
  if constexpr (Both) {
    _tile_stored(2, y + kRows * kOutputs, kRowBytes);
    _tile_stored(3, y + kRows * kOutputs + kLanes, kRowBytes);
  }
}

}  // namespace specmamba::tiles
