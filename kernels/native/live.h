// Operands whose last rows are padding; see live.py.
#pragma once

#include <algorithm>
#include <cstdint>

namespace specmamba {

// Of `rows` rows the first *live are no padding; null: all.
inline int64_t live_rows(int64_t rows, const int64_t* live) {
  return live == nullptr ? rows : std::clamp<int64_t>(*live, 0, rows);
}

}  // namespace specmamba
