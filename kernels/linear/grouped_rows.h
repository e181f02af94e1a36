// Rows of a matrix in panels of codes, as an embedding takes them; layout and arithmetic are those of grouped.h.
#pragma once

#include <limits>

#include "linear/grouped.h"

namespace specmamba {

constexpr int64_t kMaxGroup = 128;

// Reads single weights of a packed matrix.
struct GroupedRow {
  const uint8_t* panel;
  const uint8_t* table;  // or null
  Grouping of;
  int offset;
  int64_t row;  // of the panel

  // The code of input k of a group whose codes begin at w.
  int code(const uint8_t* w, int64_t k) const {
    const int64_t four = k % 4, half = k % 8 / 4 * 4;
    if (of.bits == 8) return w[(k / 4 * kPanel + row) * 4 + four];
    if (of.bits == 4) return w[(k / 8 * kPanel + row) * 4 + four] >> half & 15;
    const uint8_t* sixteen = w + (k / 16 * kPanel + row / kLanes * kLanes) * 12 + row % kLanes * 4 + four;
    const int low = sixteen[k % 16 / 8 * kVectorBytes] >> half & 15;
    return low | (sixteen[2 * kVectorBytes] >> (k % 16 / 4 * 2) & 3) << 4;
  }

  // scale (value - offset) + minimum, times factor, for all inputs -> out, rounded once.
  template <typename Out>
  void read(float factor, Out* out) const {
    for (int64_t g = 0; g < of.groups(); ++g, out += of.group) {
      const uint8_t* w = panel + g * of.group_bytes();
      const uint8_t* scales = w + of.group * kPanel * of.bits / 8;
      const float scale = half_at(scales), minimum = of.has_minimum ? half_at(scales + 2 * kPanel) : 0.0f;
      const int64_t count = std::min(of.group, of.k - g * of.group);
      float weights[kMaxGroup];
      for (int64_t k = 0; k < count; ++k) {
        const int found = code(w, k), value = table == nullptr ? found : table[found];
        const float weight = static_cast<float>(value - offset) * scale;
        weights[k] = (of.has_minimum ? weight + minimum : weight) * factor;
      }
      for_vectors(count, [&](int64_t i, auto lanes) { store(out + i, load(weights + i, lanes), lanes); });
    }
  }

  float half_at(const uint8_t* halves) const {
    float lanes[kLanes];
    store(lanes, load_halves(reinterpret_cast<const uint16_t*>(halves) + row / kLanes * kLanes), All{});
    return lanes[row % kLanes];
  }
};

// Rows `index` [count] of packed codes -> out [count, k]; NaN for a row that there is not.
template <typename Out>
void take_rows(const int64_t* index, int64_t count, const uint8_t* packed, const float* factor, const uint8_t* table,
               Out* out, const Grouping& of, int offset, int num_threads) {
  parallel_for(count, std::max<int64_t>(1, kInputsPart / of.k), num_threads, [&](int64_t i, int64_t last) {
    for (; i < last; ++i) {
      const int64_t row = index[i];
      Out* to = out + i * of.k;
      if (row < 0 || row >= of.n) {
        const Vector none = broadcast(std::numeric_limits<float>::quiet_NaN());
        for_vectors(of.k, [&](int64_t k, auto lanes) { store(to + k, none, lanes); });
      } else {
        const uint8_t* panel = packed + row / kPanel * of.panel_bytes();
        GroupedRow{panel, table, of, offset, row % kPanel}.read(factor[row], to);
      }
    }
  });
}

}  // namespace specmamba
