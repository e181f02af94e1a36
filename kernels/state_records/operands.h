// Operands of a verify or an extend of a recurrent layer, gated delta net or Mamba2; the structures of operands.py.
// Strides are in elements; dimensions without one are contiguous.
#pragma once

#include <cstdint>

namespace specmamba {

struct Heads {
  int64_t key_heads, value_heads, key_dim, value_dim;
  int64_t decay_dim;  // log decays of a value head: 1, or key_dim, one for each key channel

  int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
  int64_t group() const { return value_heads / key_heads; }
};

// State memory of one layer, all slots and all rows.
struct Buffers {
  const float* states;   // [slots, Hv, K, V]
  void* conv_inputs;     // [rows, W - 1 + R, C], float32 or bfloat16 as activations are
  float *k, *u, *decay;  // [rows, R, Hk, K] [rows, R, Hv, V] [rows, R, Hv, D]
  int64_t states_slot, conv_inputs_row, k_row, u_row, decay_row;
  int64_t is_exact;  // all that reads or writes them has one fixed arithmetic: exact.h
};

struct Trees {
  const int64_t *rows, *slots;  // [B]
  const int64_t* conv_index;    // [B, N, W], entries of conv_inputs
  const int64_t* num_pending;   // [B], or null: node_offset everywhere
  const bool* ancestors;        // [B, N, N], true from each node's ancestors and itself
  const int64_t *firsts, *counts;  // [B], place of each root and number of nodes in packed inputs; or null: N each
  int64_t batch, nodes, node_offset, ancestors_batch;
  int64_t tokens;  // of inputs and outputs, B N where they are not packed

  int64_t first(int64_t b) const { return firsts == nullptr ? b * nodes : firsts[b]; }
  int64_t count(int64_t b) const { return counts == nullptr ? nodes : counts[b]; }
  int64_t num_packed() const {  // tokens of nodes; those behind them are padding
    if (counts == nullptr) return tokens;
    int64_t total = 0;
    for (int64_t b = 0; b < batch; ++b) total += counts[b];
    return total;
  }
};

// Known tokens, behind the states that they advance in place.
struct Runs {
  float* states;                   // [slots, Hv, K, V]
  void* windows;                   // [slots, W - 1, C], float32 or bfloat16 as activations are
  const int64_t *states_of_rows;   // [B], slots of states
  const int64_t *windows_of_rows;  // [B], slots of windows
  const int64_t* lengths;          // [B], at most `tokens`
  int64_t batch, tokens, states_slot, windows_slot;
  int64_t is_exact;  // as in Buffers
};

}  // namespace specmamba
