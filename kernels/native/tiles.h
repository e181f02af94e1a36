// Products of matrices of float32 that caches hold: a tile of the result in registers at a time.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "vector.h"

namespace specmamba {

constexpr int kTileHeight = 6, kTileWidth = kRegisters / 8;  // 24 of 32 registers have sums, 12 of 16

// Loops over columns in blocks of Widest vectors, then of four, then single vectors, of which the last may be partial.
// Calls body(column, number of vectors as a constant, lanes) for parts of [0, size).
template <int Widest, typename Body>
inline void for_columns(int64_t size, const Body& body) {
  int64_t column = 0;
  for (; column + Widest * kLanes <= size; column += Widest * kLanes)
    body(column, std::integral_constant<int, Widest>{}, All{});
  if constexpr (Widest > 4)
    for (; column + 4 * kLanes <= size; column += 4 * kLanes) body(column, std::integral_constant<int, 4>{}, All{});
  for (; column + kLanes <= size; column += kLanes) body(column, std::integral_constant<int, 1>{}, All{});
  if (column < size) body(column, std::integral_constant<int, 1>{}, First(size - column));
}

// Element (r, c) is data[r * row + c * column].
struct Matrix {
  const float* data;
  int64_t row, column = 1;

  float at(int64_t r, int64_t c) const { return data[r * row + c * column]; }
};

// Rows x Vectors vectors of a result [rows, columns], from (row, column) on.
template <int Rows, int Vectors, typename Lanes>
struct Tile {
  static constexpr int kRows = Rows, kVectors = Vectors;
  int64_t row, column;
  Lanes lanes;
  Vector sums[Rows][Vectors];

  // Calls body(i, at, sum) for every vector of sums: of row `row + i`, from column `at` on.
  template <typename Body>
  __attribute__((always_inline)) void each(const Body& body) {
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) body(i, column + v * kLanes, sums[i][v]);
  }

  // Adds a times b over b's first `depth` rows, in ascending order; b's columns are contiguous.
  __attribute__((always_inline)) void multiply(const Matrix& a, const Matrix& b, int64_t depth) {
    const float *x = a.data + row * a.row, *y = b.data + column;
    for (int64_t j = 0; j < depth; ++j, x += a.column, y += b.row) {
      Vector of_b[Vectors];
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) of_b[v] = load(y + v * kLanes, lanes);
#pragma GCC unroll 8
      for (int i = 0; i < Rows; ++i) {
        Vector of_a = broadcast(x[i * a.row]);
        keep_in_register(of_a);  // as an operand in memory it would be loaded for every vector
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) sums[i][v] = fma(of_a, of_b[v], sums[i][v]);
      }
    }
  }

  __attribute__((always_inline)) void clear() {
    each([](int, int64_t, Vector& sum) __attribute__((always_inline)) { sum = zero(); });
  }
};

template <int Vectors, typename Lanes, typename Body, int... Rows>
inline void tile_of_rows(int64_t rows, int64_t row, int64_t column, Lanes lanes, const Body& body,
                         std::integer_sequence<int, Rows...>) {
  auto run = [&](auto count) __attribute__((always_inline)) {
    Tile<decltype(count)::value + 1, Vectors, Lanes> tile{row, column, lanes, {}};
    tile.clear();
    body(tile);
  };
  ((rows == Rows + 1 ? run(std::integral_constant<int, Rows>{}) : void()), ...);
}

// Calls body(tile) for all tiles of a result, with sums of 0: columns by columns, rows in ascending order.
template <typename Body>
inline void for_tiles(int64_t rows, int64_t columns, const Body& body) {
  for_columns<kTileWidth>(columns, [&](int64_t column, auto vectors, auto lanes) {
    for (int64_t row = 0; row < rows; row += kTileHeight)
      tile_of_rows<decltype(vectors)::value>(std::min<int64_t>(kTileHeight, rows - row), row, column, lanes, body,
                                             std::make_integer_sequence<int, kTileHeight>{});
  });
}

}  // namespace specmamba
