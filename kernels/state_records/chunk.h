// What chunks of known tokens have in common: scratch memory, and decays between their tokens.
#pragma once

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

// e^x, but 0 below 1e-25: what is so small beside numbers of the size of 1 would only make subnormal numbers, which are
// a hundred times as slow.
inline Vector without_tiny(Vector decay) { return chosen(is_less(decay, broadcast(1e-25f)), zero(), decay); }
inline Vector decay_of(Vector x) { return without_tiny(exp(x)); }

// Log decays of a chunk's tokens, and what they make of it. What lies between two tokens is summed up, and is no difference
// of sums since the start: behind a strong decay these have lost the digits of weak ones.
class ChunkDecay {
 public:
  float& log_decay(int64_t token) { return log_decay_[token]; }

  // Called after the log decays are filled in.
  void sum_up(int64_t size) {
    float before = 0, behind = 0;
    for (int64_t i = 0; i < size; ++i) since_start_[i] = before += log_decay_[i];
    for (int64_t i = size - 1; i >= 0; --i) {
      until_end_[i] = behind;
      behind += log_decay_[i];
    }
    for (float* sums : {since_start_, until_end_})
      for_vectors(size, [&](int64_t i, auto lanes) { store(sums + i, decay_of(load(sums + i, lanes)), lanes); });
  }

  float since_start(int64_t token) const { return since_start_[token]; }
  float until_end(int64_t token) const { return until_end_[token]; }

  // Called for all tokens, one after the other: makes the decays from tokens j <= i to i.
  void step_to(int64_t i) {
    const Vector own = broadcast(log_decay_[i]);
    for_vectors(i, [&](int64_t j, auto lanes) {
      const Vector sum = load(sums_ + j, lanes) + own;
      store(sums_ + j, sum, lanes);
      store(between_ + j, decay_of(sum), lanes);
    });
    sums_[i] = 0, between_[i] = 1;
  }

  // y[j] = factor x[j] times the decay from j to the token that was stepped to, for j < count; then 0 up to `size`.
  void weigh(int64_t count, int64_t size, float factor, const float* x, float* y) const {
    for_vectors(count, [&](int64_t j, auto lanes) {
      store(y + j, broadcast(factor) * load(between_ + j, lanes) * load(x + j, lanes), lanes);
    });
    for (int64_t j = count; j < size; ++j) y[j] = 0;
  }

 private:
  float log_decay_[kChunk], since_start_[kChunk], until_end_[kChunk];
  float sums_[kChunk], between_[kChunk];  // of the token that was stepped to: log decays from earlier ones, and decays
};

// Of a head's state, [key_dim, value_dim].
struct StateSize {
  int64_t key_dim, value_dim;
};

// y[i, j] = x[i].k[j] from the columns of k; of j > i only what is in the same tile.
inline void put_scores(const Matrix& x, const Matrix& key_columns, int64_t size, int64_t key_dim, ScratchMatrix& y) {
  for_tiles(size, size, [&](auto& tile) __attribute__((always_inline)) {
    if (tile.column >= tile.row + tile.kRows) return;
    tile.multiply(x, key_columns, key_dim);
    tile.each([&](int i, int64_t at, Vector sum) __attribute__((always_inline)) {
      store(y.row(tile.row + i) + at, sum, tile.lanes);
    });
  });
}

// o = e^G q S + sum of weights u
template <typename Decay>
inline void put_outputs(const Decay& decay, const Matrix& query, const Matrix& state, const Matrix& weights,
                        const Matrix& updates, int64_t size, ScratchMatrix& output, StateSize of_state) {
  for_tiles(size, of_state.value_dim, [&](auto& tile) __attribute__((always_inline)) {
    tile.multiply(query, state, of_state.key_dim);
    tile.each([&](int i, int64_t, Vector& sum) __attribute__((always_inline)) {
      sum = broadcast(decay.since_start(tile.row + i)) * sum;
    });
    tile.multiply(weights, updates, tile.row + tile.kRows);
    tile.each([&](int i, int64_t at, Vector sum) __attribute__((always_inline)) {
      store(output.row(tile.row + i) + at, sum, tile.lanes);
    });
  });
}

// S becomes e^G S + sum of k u^T; left(r) is e^G of row r.
template <typename Left>
inline void add_updates(const Matrix& key_columns, const Matrix& updates, int64_t size, float* state,
                        StateSize of_state, const Left& left) {
  for_tiles(of_state.key_dim, of_state.value_dim, [&](auto& tile) __attribute__((always_inline)) {
    tile.multiply(key_columns, updates, size);
    tile.each([&](int i, int64_t at, Vector sum) __attribute__((always_inline)) {
      float* s = state + (tile.row + i) * of_state.value_dim + at;
      store(s, fma(broadcast(left(tile.row + i)), load(s, tile.lanes), sum), tile.lanes);
    });
  });
}

// S becomes e^G S + sum of k u^T, each with the decay behind it, which the updates are multiplied by.
inline void put_state(const ChunkDecay& decay, const Matrix& key_columns, int64_t size, ScratchMatrix& update,
                      float* state, StateSize of_state) {
  for (int64_t i = 0; i < size; ++i) {
    const Vector left = broadcast(decay.until_end(i));
    float* u = update.row(i);
    for_vectors(of_state.value_dim, [&](int64_t at, auto lanes) { store(u + at, left * load(u + at, lanes), lanes); });
  }
  add_updates(key_columns, update.matrix(), size, state, of_state,
              [left = decay.since_start(size - 1)](int64_t) { return left; });
}

}  // namespace specmamba
