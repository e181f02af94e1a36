// One head's recurrence over a chunk of known tokens; README.md has the mathematics.
#pragma once

#include <vector>

#include "state_records/chunk.h"

namespace specmamba {

// What chunks of both kinds of decay have in common. The chunk is that of a key head, and then of each of its value
// heads. Inside a chunk all updates are solved as one unit lower triangular system, row tile by row tile; only chunks
// follow each other. Memory is kept from chunk to chunk.
class ChunkOfHead {
 public:
  float* query(int64_t token) { return query_.row(token); }
  float* key(int64_t token) { return key_.row(token); }
  float* value(int64_t token) { return update_.row(token); }
  const float* output(int64_t token) { return output_.row(token); }
  float& beta(int64_t token) { return beta_[token]; }

 protected:
  void begin_operands(int64_t key_dim, int64_t value_dim) {
    key_dim_ = key_dim, value_dim_ = value_dim;
    for (auto* x : {&query_, &key_}) x->resize(kChunk, key_dim);
    for (auto* x : {&weights_, &system_}) x->resize(kChunk, kChunk);
    for (auto* x : {&update_, &output_}) x->resize(kChunk, value_dim);
    beta_.resize(kChunk);
  }

  // Values become beta (v - e^G k S).
  template <typename Decay>
  void subtract_read(const Decay& decay, const Matrix& keys, const Matrix& state) {
    for_tiles(size_, value_dim_, [&](auto& tile) __attribute__((always_inline)) {
      tile.multiply(keys, state, key_dim_);
      tile.each([&](int i, int64_t at, Vector sum) __attribute__((always_inline)) {
        const int64_t token = tile.row + i;
        float* v = update_.row(token) + at;
        const Vector left = fnma(broadcast(decay.since_start(token)), sum, load(v, tile.lanes));
        store(v, broadcast(beta_[token]) * left, tile.lanes);
      });
    });
  }

  // Updates: each less what the updates of earlier tokens have written under its key.
  void solve() {
    const Matrix system = system_.matrix(), updates = update_.matrix();
    for_tiles(size_, value_dim_, [&](auto& tile) __attribute__((always_inline)) {
      tile.multiply(system, updates, tile.row);
      tile.each([&](int i, int64_t at, Vector& sum) __attribute__((always_inline)) {
        sum = load(update_.row(tile.row + i) + at, tile.lanes) - sum;
      });
#pragma GCC unroll 8
      for (int i = 0; i < tile.kRows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < i; ++j)
#pragma GCC unroll 8
          for (int v = 0; v < tile.kVectors; ++v) {
            const Vector weight = broadcast(system.at(tile.row + i, tile.row + j));
            tile.sums[i][v] = fnma(weight, tile.sums[j][v], tile.sums[i][v]);
          }
      tile.each([&](int i, int64_t at, Vector sum) __attribute__((always_inline)) {
        store(update_.row(tile.row + i) + at, sum, tile.lanes);
      });
    });
  }

  int64_t key_dim_, value_dim_, size_;
  std::vector<float> beta_;
  ScratchMatrix query_, key_;        // [C, K]
  ScratchMatrix weights_, system_;  // [C, C]
  ScratchMatrix update_, output_;   // [C, V]: values that become updates; outputs
};

// With a log decay for each head.
class HeadChunk : public ChunkOfHead {
 public:
  void begin(int64_t key_dim, int64_t value_dim) {
    begin_operands(key_dim, value_dim);
    key_columns_.resize(key_dim, kChunk);
    for (auto* x : {&query_key_, &key_key_}) x->resize(kChunk, kChunk);
  }

  float* log_decays(int64_t token) { return &decay_.log_decay(token); }

  // Called after the queries and keys of `size` tokens are filled in.
  void look(int64_t size) {
    size_ = size;
    transpose(key_, size, key_dim_, key_columns_);
    put_scores(query_.matrix(), key_columns_.matrix(), size, key_dim_, query_key_);
    put_scores(key_.matrix(), key_columns_.matrix(), size, key_dim_, key_key_);
  }

  // Called after values, log decays and betas are filled in: outputs, and the state [K, V] after the chunk.
  void advance(float* state) {
    decay_.sum_up(size_);
    for (int64_t i = 0; i < size_; ++i) {
      decay_.step_to(i);
      decay_.weigh(i + 1, size_, 1.0f, query_key_.row(i), weights_.row(i));
      decay_.weigh(i, size_, beta_[i], key_key_.row(i), system_.row(i));
    }
    const Matrix before{state, value_dim_};
    subtract_read(decay_, key_.matrix(), before);
    solve();
    put_outputs(decay_, query_.matrix(), before, weights_.matrix(), update_.matrix(), size_, output_,
                {key_dim_, value_dim_});
    put_state(decay_, key_.transposed(), size_, update_, state, {key_dim_, value_dim_});
  }

 private:
  ChunkDecay decay_;
  ScratchMatrix key_columns_;             // [K, C]
  ScratchMatrix query_key_, key_key_;  // [C, C]
};

}  // namespace specmamba
