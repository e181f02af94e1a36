// One head's recurrence over a chunk of known tokens; README.md has the mathematics.
#pragma once

#include "state_records/chunk.h"

namespace specmamba {

// A chunk for one group, and then for each of its heads. Only chunks follow each other. Memory is kept from chunk to
// chunk.
class GroupChunk {
 public:
  void begin(int64_t state_dim, int64_t head_dim) {
    state_dim_ = state_dim, head_dim_ = head_dim;
    for (auto* x : {&b_, &c_}) x->resize(kChunk, state_dim);
    b_columns_.resize(state_dim, kChunk);
    for (auto* x : {&c_b_, &weights_}) x->resize(kChunk, kChunk);
    for (auto* x : {&update_, &output_}) x->resize(kChunk, head_dim);
  }

  float* b(int64_t token) { return b_.row(token); }
  float* c(int64_t token) { return c_.row(token); }
  float* update(int64_t token) { return update_.row(token); }
  const float* output(int64_t token) { return output_.row(token); }
  float& log_decay(int64_t token) { return decay_.log_decay(token); }

  // Called after b and c of `size` tokens are filled in.
  void look(int64_t size) {
    size_ = size;
    transpose(b_, size, state_dim_, b_columns_);
    put_scores(c_.matrix(), b_columns_.matrix(), size, state_dim_, c_b_);
  }

  // Called after updates and log decays are filled in: outputs, and the state [S, P] after the chunk.
  void advance(float* state) {
    decay_.sum_up(size_);
    for (int64_t i = 0; i < size_; ++i) {
      decay_.step_to(i);
      decay_.weigh(i + 1, size_, 1.0f, c_b_.row(i), weights_.row(i));
    }
    put_outputs(decay_, c_.matrix(), {state, head_dim_}, weights_.matrix(), update_.matrix(), size_, output_,
                {state_dim_, head_dim_});
    put_state(decay_, b_.transposed(), size_, update_, state, {state_dim_, head_dim_});
  }

 private:
  int64_t state_dim_, head_dim_, size_;
  ChunkDecay decay_;
  ScratchMatrix b_, c_, b_columns_;  // [C, S] twice, [S, C]
  ScratchMatrix c_b_, weights_;      // [C, C]
  ScratchMatrix update_, output_;    // [C, P]
};

}  // namespace specmamba
