// One head's recurrence over a chunk of known tokens; README.md has the mathematics.
#pragma once

#include <cmath>
#include <vector>

#include "tiles.h"

namespace specmamba {

constexpr int64_t kChunk = 64;  // tokens

// A matrix of the scratch memory of a thread. Rows lie a little more than their width apart: with a power of two they
// would share a few sets of the L1 cache.
class ScratchMatrix {
 public:
  void resize(int64_t rows, int64_t columns) {
    stride_ = (columns + kLanes - 1) / kLanes * kLanes + kLanes;
    data_.resize(rows * stride_);
  }
  float* row(int64_t r) { return data_.data() + r * stride_; }
  Matrix matrix() const { return {data_.data(), stride_}; }
  Matrix transposed() const { return {data_.data(), 1, stride_}; }

 private:
  std::vector<float> data_;
  int64_t stride_;
};

// y [columns, rows] = x [rows, columns] transposed.
inline void transpose(ScratchMatrix& x, int64_t rows, int64_t columns, ScratchMatrix& y) {
  for (int64_t c = 0; c < columns; ++c) {
    float* of_c = y.row(c);
    for (int64_t r = 0; r < rows; ++r) of_c[r] = x.row(r)[c];
  }
}

// Log decays of a chunk's tokens, and what they make of it.
class ChunkDecay {
 public:
  float& log_decay(int64_t token) { return log_decay_[token]; }

  // Called after the log decays are filled in, which become those of all tokens up to each.
  void sum_up(int64_t size) {
    float sum = 0;
    for (int64_t i = 0; i < size; ++i) log_decay_[i] = sum += log_decay_[i];
    for_vectors(size, [&](int64_t i, auto lanes) {
      const Vector at_i = load(log_decay_ + i, lanes);
      store(since_start_ + i, exp(at_i), lanes);
      store(until_end_ + i, exp(broadcast(sum) - at_i), lanes);
    });
  }

  float since_start(int64_t token) const { return since_start_[token]; }
  float until_end(int64_t token) const { return until_end_[token]; }

  // y[j] = factor e^(sum of log decays behind j up to i) x[j] for j < count, then 0 up to `size`.
  void weigh(int64_t i, int64_t count, int64_t size, float factor, const float* x, float* y) const {
    for_vectors(count, [&](int64_t j, auto lanes) {
      const Vector decay = exp(broadcast(log_decay_[i]) - load(log_decay_ + j, lanes));
      store(y + j, broadcast(factor) * decay * load(x + j, lanes), lanes);
    });
    for (int64_t j = count; j < size; ++j) y[j] = 0;
  }

 private:
  float log_decay_[kChunk], since_start_[kChunk], until_end_[kChunk];
};

// A chunk for one key head, and then for each of its value heads. Inside a chunk all updates are solved as one unit
// lower triangular system, row tile by row tile; only chunks follow each other. Memory is kept from chunk to chunk.
class DeltaChunk {
 public:
  void begin(int64_t key_dim, int64_t value_dim) {
    key_dim_ = key_dim, value_dim_ = value_dim;
    for (auto* x : {&query_, &key_}) x->resize(kChunk, key_dim);
    key_columns_.resize(key_dim, kChunk);
    for (auto* x : {&query_key_, &key_key_, &weights_, &system_}) x->resize(kChunk, kChunk);
    for (auto* x : {&update_, &output_}) x->resize(kChunk, value_dim);
    beta_.resize(kChunk);
  }

  float* query(int64_t token) { return query_.row(token); }
  float* key(int64_t token) { return key_.row(token); }
  float* value(int64_t token) { return update_.row(token); }
  const float* output(int64_t token) { return output_.row(token); }
  float& log_decay(int64_t token) { return decay_.log_decay(token); }
  float& beta(int64_t token) { return beta_[token]; }

  // Called after the queries and keys of `size` tokens are filled in.
  void look(int64_t size) {
    size_ = size;
    transpose(key_, size, key_dim_, key_columns_);
    scores(query_, query_key_);
    scores(key_, key_key_);
  }

  // Called after values, log decays and betas are filled in: outputs, and the state [K, V] after the chunk.
  void advance(float* state) {
    decay_.sum_up(size_);
    for (int64_t i = 0; i < size_; ++i) {
      decay_.weigh(i, i + 1, size_, 1.0f, query_key_.row(i), weights_.row(i));
      decay_.weigh(i, i, size_, beta_[i], key_key_.row(i), system_.row(i));
    }
    const Matrix before{state, value_dim_};
    subtract_read(before);
    solve();
    put_outputs(before);
    put_state(state);
  }

 private:
  // y[i, j] = x[i].k[j]; of j > i only what is in the same tile.
  void scores(ScratchMatrix& x, ScratchMatrix& y) {
    for_tiles(size_, size_, [&](auto& tile) __attribute__((always_inline)) {
      if (tile.column >= tile.row + tile.kRows) return;
      tile.multiply(x.matrix(), key_columns_.matrix(), key_dim_);
      tile.each([&](int i, int64_t at, Vector sum) __attribute__((always_inline)) {
        store(y.row(tile.row + i) + at, sum, tile.lanes);
      });
    });
  }

  // Values become beta (v - e^G k S).
  void subtract_read(const Matrix& state) {
    for_tiles(size_, value_dim_, [&](auto& tile) __attribute__((always_inline)) {
      tile.multiply(key_.matrix(), state, key_dim_);
      tile.each([&](int i, int64_t at, Vector sum) __attribute__((always_inline)) {
        const int64_t token = tile.row + i;
        float* v = update_.row(token) + at;
        const Vector left = fnma(broadcast(decay_.since_start(token)), sum, load(v, tile.lanes));
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

  // o = e^G q S + sum of weights u
  void put_outputs(const Matrix& state) {
    for_tiles(size_, value_dim_, [&](auto& tile) __attribute__((always_inline)) {
      tile.multiply(query_.matrix(), state, key_dim_);
      tile.each([&](int i, int64_t, Vector& sum) __attribute__((always_inline)) {
        sum = broadcast(decay_.since_start(tile.row + i)) * sum;
      });
      tile.multiply(weights_.matrix(), update_.matrix(), tile.row + tile.kRows);
      tile.each([&](int i, int64_t at, Vector sum) __attribute__((always_inline)) {
        store(output_.row(tile.row + i) + at, sum, tile.lanes);
      });
    });
  }

  // S becomes e^G S + sum of k u^T, each with the decay behind it. Called last: it scales the updates.
  void put_state(float* state) {
    for (int64_t i = 0; i < size_; ++i) {
      const Vector left = broadcast(decay_.until_end(i));
      float* u = update_.row(i);
      for_vectors(value_dim_, [&](int64_t at, auto lanes) { store(u + at, left * load(u + at, lanes), lanes); });
    }
    const Vector left = broadcast(decay_.since_start(size_ - 1));
    for_tiles(key_dim_, value_dim_, [&](auto& tile) __attribute__((always_inline)) {
      tile.multiply(key_.transposed(), update_.matrix(), size_);
      tile.each([&](int i, int64_t at, Vector sum) __attribute__((always_inline)) {
        float* s = state + (tile.row + i) * value_dim_ + at;
        store(s, fma(left, load(s, tile.lanes), sum), tile.lanes);
      });
    });
  }

  int64_t key_dim_, value_dim_, size_;
  ChunkDecay decay_;
  std::vector<float> beta_;
  ScratchMatrix query_, key_, key_columns_;                 // [C, K] twice, [K, C]
  ScratchMatrix query_key_, key_key_, weights_, system_;  // [C, C]
  ScratchMatrix update_, output_;                           // [C, V]: values that become updates; outputs
};

}  // namespace specmamba
