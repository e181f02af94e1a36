// Products of rows with one head's state.
#pragma once

#include <algorithm>

#include "tiles.h"

namespace specmamba {

// A head's state [key_dim, value_dim].
struct StateView {
  const float* data;
  int64_t key_dim, value_dim;
};

// read[r] = x[r] S for Rows rows x[r] = rows[r] and kLanes Vectors columns of S.
template <int Rows, int Vectors, typename Lanes>
inline void read_state(const float* const* rows, const StateView& state, int64_t column, float* read, Lanes lanes) {
  Vector sums[Rows][Vectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < Vectors; ++j) sums[r][j] = zero();
  for (int64_t i = 0; i < state.key_dim; ++i) {
    const float* of_i = state.data + i * state.value_dim + column;
    if constexpr (Rows <= Vectors) {
      Vector x[Rows];
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) x[r] = broadcast(rows[r][i]);
#pragma GCC unroll 16
      for (int j = 0; j < Vectors; ++j) {
        Vector s = load(of_i + j * kLanes, lanes);
        keep_in_register(s);  // as an operand in memory it would be loaded for every row
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) sums[r][j] = fma(x[r], s, sums[r][j]);
      }
    } else {  // what there is less of is held in registers
      Vector s[Vectors];
#pragma GCC unroll 16
      for (int j = 0; j < Vectors; ++j) s[j] = load(of_i + j * kLanes, lanes);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        Vector x = broadcast(rows[r][i]);
        keep_in_register(x);
#pragma GCC unroll 16
        for (int j = 0; j < Vectors; ++j) sums[r][j] = fma(x, s[j], sums[r][j]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < Vectors; ++j) store(read + r * state.value_dim + column + j * kLanes, sums[r][j], lanes);
}

// read[r] = x[r] S for all rows, up to MaxRows rows and kLanes Widest columns at a time.
template <int MaxRows, int Widest>
inline void read_rows(const float* const* rows, int64_t num_rows, const StateView& state, float* read) {
  for_columns<Widest>(state.value_dim, [&](int64_t column, auto vectors, auto lanes) {
    constexpr int V = decltype(vectors)::value;
    using L = decltype(lanes);
    using Read = void (*)(const float* const*, const StateView&, int64_t, float*, L);
    constexpr Read all[6] = {read_state<1, V, L>,
                             read_state<std::min(2, MaxRows), V, L>, read_state<std::min(3, MaxRows), V, L>,
                             read_state<std::min(4, MaxRows), V, L>, read_state<std::min(5, MaxRows), V, L>,
                             read_state<std::min(6, MaxRows), V, L>};
    for (int64_t r = 0; r < num_rows; r += MaxRows)
      all[std::min<int64_t>(MaxRows, num_rows - r) - 1](rows + r, state, column, read + r * state.value_dim, lanes);
  });
}

// read[r] = x[r] S for all rows. The order of the sums does not depend on how many rows there are.
//
// The first rows read S in memory order, as fast as memory delivers it. Then S is in a cache, and the other rows read
// fewer columns for more rows at a time, at most six: of 32 registers 24 have sums, of 16 registers 12. A narrow S is
// read in memory order with six rows at once. Two rows have registers for more columns: where these are all of S, it is
// read from beginning to end.
inline void read_all(const float* const* rows, int64_t num_rows, const StateView& state, float* read) {
  constexpr int kWidest = 3 * kRegisters / 8, kWide = kRegisters / 4, kNarrow = kRegisters / 8;
  if (state.value_dim < kWide * kLanes) return read_rows<6, kNarrow>(rows, num_rows, state, read);
  const bool is_widest = state.value_dim == kWidest * kLanes;
  const int64_t first = std::min<int64_t>(num_rows, is_widest || num_rows % 6 == 4 ? 2 : 3);
  is_widest ? read_rows<2, kWidest>(rows, first, state, read) : read_rows<3, kWide>(rows, first, state, read);
  read_rows<6, kNarrow>(rows + first, num_rows - first, state, read + first * state.value_dim);
}

}  // namespace specmamba
