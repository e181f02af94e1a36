// What all folds of rows in place have in common. P has the fields of such a fold, which native_ops.py lays out:
// num_pending and folds (null: all rows fold) by row of the batch, and the windows and kept inputs of all layers.
#pragma once
#include <cstdint>
#include <cstring>

namespace specmamba {

template <typename P>
bool is_folded(const P& p, int64_t b) {
  return (p.folds == nullptr || p.folds[b]) && p.num_pending[b] > 0;
}

// The newest inputs become the window of the checkpoint, in its slot and in front of the row's records.
template <typename P>
void move_window(const P& p, int64_t layer, int64_t b) {
  const int64_t size = p.window * p.input_bytes;
  char* inputs = p.conv_inputs + (layer * p.rows + p.rows_of_batch[b]) * (size + p.capacity * p.input_bytes);
  char* kept = p.windows + (layer * p.slots + p.slots_of_batch[b]) * size;
  std::memcpy(kept, inputs + p.num_pending[b] * p.input_bytes, size);
  std::memcpy(inputs, kept, size);
}

}  // namespace specmamba
