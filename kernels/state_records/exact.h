// Recurrences in one fixed arithmetic, one token after the other; README.md has the reason.
//
// Every number of a state, an update or an output comes of the same operations in the same order, wherever its token stands:
// in a chunk of known tokens, among the nodes of a tree or the pending records before it. Lanes are columns of the state,
// which never meet, so nothing depends on how columns are divided either.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "state_records/chunk.h"
#include "state_records/paths.h"
#include "state_records/state.h"

namespace specmamba {

constexpr int kExactVectors = 4;  // columns at a time: their part of a state stays in L1

// Factors of a state's rows, from log decays; what is not finite becomes NaN, since no record can express it.
inline void put_factors(const float* log_decays, int64_t size, float* factors) {
  for_vectors(size, [&](int64_t i, auto lanes) {
    const Vector given = load(log_decays + i, lanes);
    const Vector nan = broadcast(std::numeric_limits<float>::quiet_NaN());
    store(factors + i, chosen(is_finite(given), decay_of(given), nan), lanes);
  });
}

// Records of one head, oldest first. Distances are in elements.
struct ExactRecords {
  const float *keys, *updates, *factors;
  int64_t count, keys_record, updates_record, factors_record;
  int64_t factor_row;  // 1: each row of the state has its own factor; 0: one for all

  float factor(int64_t j, int64_t row) const { return factors[j * factors_record + row * factor_row]; }
};

// to = from, and then to = factor to + k u^T for one record after the other, on Rows rows of a state.
template <int Rows, int Vectors, typename Lanes>
inline void add_records_to(const ExactRecords& records, const float* from, int64_t from_row, float* to, int64_t to_row,
                           int64_t row, int64_t column, Lanes lanes) {
  Vector s[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) s[r][c] = load(from + (row + r) * from_row + c * kLanes, lanes);
  for (int64_t j = 0; j < records.count; ++j) {
    const float *k = records.keys + j * records.keys_record + row, *u = records.updates + j * records.updates_record + column;
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) {
      const Vector u_j = load(u + c * kLanes, lanes);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) s[r][c] = fma(broadcast(k[r]), u_j, broadcast(records.factor(j, row + r)) * s[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) store(to + (row + r) * to_row + c * kLanes, s[r][c], lanes);
}

// On all rows of some columns, from `column` on; `from` and `to` begin there, and may be the same.
template <int Vectors, typename Lanes>
inline void add_records(const ExactRecords& records, const float* from, int64_t from_row, float* to, int64_t to_row,
                        int64_t rows, int64_t column, Lanes lanes) {
  int64_t i = 0;
  for (; i + 2 <= rows; i += 2) add_records_to<2, Vectors>(records, from, from_row, to, to_row, i, column, lanes);
  if (i < rows) add_records_to<1, Vectors>(records, from, from_row, to, to_row, i, column, lanes);
}

// A token of one head: what it is given, [K] or [V], and where its update and its output go.
struct ExactToken {
  const float *key, *query, *factors, *value;
  float *update, *output;
  float beta;
  int64_t factor_row;
};

// to = S' = a S + k u^T with S = from, and output = q S'. With the delta rule u = beta (v - k a S); else it is given.
template <bool IsDelta, int Vectors, typename Lanes>
inline void take_token(const ExactToken& x, const float* from, int64_t from_row, float* to, int64_t to_row, int64_t rows,
                       int64_t column, Lanes lanes) {
  Vector u[Vectors], out[Vectors];
  if constexpr (IsDelta) {
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) u[c] = zero();
    for (int64_t i = 0; i < rows; ++i) {
      const Vector k = broadcast(x.key[i]), factor = broadcast(x.factors[i * x.factor_row]);
#pragma GCC unroll 8
      for (int c = 0; c < Vectors; ++c) u[c] = fma(k, factor * load(from + i * from_row + c * kLanes, lanes), u[c]);
    }
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) {
      u[c] = broadcast(x.beta) * (load(x.value + column + c * kLanes, lanes) - u[c]);
      store(x.update + column + c * kLanes, u[c], lanes);
    }
  } else {
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) u[c] = load(x.update + column + c * kLanes, lanes);
  }
#pragma GCC unroll 8
  for (int c = 0; c < Vectors; ++c) out[c] = zero();
  for (int64_t i = 0; i < rows; ++i) {
    const Vector k = broadcast(x.key[i]), q = broadcast(x.query[i]), factor = broadcast(x.factors[i * x.factor_row]);
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) {
      const Vector s = fma(k, u[c], factor * load(from + i * from_row + c * kLanes, lanes));
      store(to + i * to_row + c * kLanes, s, lanes);
      out[c] = fma(q, s, out[c]);
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < Vectors; ++c) store(x.output + column + c * kLanes, out[c], lanes);
}

// Where the states behind a tree's nodes lie: a node that is the last to continue its parent takes the parent's block, and
// blocks of nodes that none continues are used again, so a chain has one block. Block 0 is the state before the tree.
class ExactBlocks {
 public:
  // `ancestors` [nodes, nodes], rows `distance` apart, is true from a node's ancestors and itself.
  void begin(int64_t nodes, const bool* ancestors, int64_t distance) {
    parents_.resize(nodes), places_.resize(nodes);
    last_child_.assign(nodes + 1, -1), free_.clear();  // the first: of no node
    for (int64_t i = 0; i < nodes; ++i) {
      parents_[i] = parent_of(ancestors + i * distance, i);
      last_child_[parents_[i] + 1] = i;
    }
    count_ = 1;
    for (int64_t i = 0; i < nodes; ++i) {
      places_[i] = last_child_[parents_[i] + 1] == i ? before(i) : take();
      if (last_child_[i + 1] < 0) free_.push_back(places_[i]);
    }
  }

  int64_t count() const { return count_; }
  int64_t behind(int64_t node) const { return places_[node]; }
  int64_t before(int64_t node) const { return parents_[node] < 0 ? 0 : places_[parents_[node]]; }

 private:
  int64_t take() {
    if (free_.empty()) return count_++;
    const int64_t place = free_.back();
    free_.pop_back();
    return place;
  }

  int64_t count_;
  std::vector<int64_t> parents_, places_, last_child_, free_;
};

// One head's draft tree, as HeadTree: of one row for one key head, and then for each of its value heads. Row j of keys,
// updates and decays is pending record j, or node j - pending. Memory is kept from tree to tree.
template <bool IsDelta, bool ByChannel>
class ExactTree {
 public:
  void begin(int64_t nodes, int64_t pending, int64_t key_dim, int64_t value_dim, const bool* ancestors,
             int64_t ancestors_node) {
    nodes_ = nodes, pending_ = pending, key_dim_ = key_dim, value_dim_ = value_dim;
    decay_dim_ = ByChannel ? key_dim : 1;
    blocks_.begin(nodes, ancestors, ancestors_node);
    keys_.resize((pending + nodes) * key_dim);
    queries_.resize(nodes * key_dim);
    updates_.resize((pending + nodes) * value_dim);
    for (auto* x : {&values_, &outputs_}) x->resize(nodes * value_dim);
    for (auto* x : {&decays_, &factors_}) x->resize((pending + nodes) * decay_dim_);
    betas_.resize(nodes);
    states_.resize(blocks_.count() * key_dim * kExactVectors * kLanes);
  }

  float* key(int64_t row) { return keys_.data() + row * key_dim_; }
  float* query(int64_t node) { return queries_.data() + node * key_dim_; }
  float* update(int64_t row) { return updates_.data() + row * value_dim_; }
  float* value(int64_t node) { return values_.data() + node * value_dim_; }
  float* output(int64_t node) { return outputs_.data() + node * value_dim_; }
  float& beta(int64_t node) { return betas_[node]; }
  float* decays(int64_t row) { return decays_.data() + row * decay_dim_; }
  float* log_decays(int64_t node) { return decays(pending_ + node); }

  void look() {}  // products of keys are taken with the state alone

  // Called after everything is filled in: outputs, and updates of the nodes.
  void verify(const StateView& state) {
    for (int64_t row = 0; row < pending_ + nodes_; ++row) put_factors(decays(row), decay_dim_, factors(row));
    for_columns<kExactVectors>(value_dim_, [&](int64_t column, auto vectors, auto lanes) {
      verify_columns<decltype(vectors)::value>(state, column, lanes);
    });
  }

 private:
  float* factors(int64_t row) { return factors_.data() + row * decay_dim_; }

  template <int Vectors, typename Lanes>
  void verify_columns(const StateView& state, int64_t column, Lanes lanes) {
    constexpr int64_t kWidth = Vectors * kLanes;
    const int64_t size = key_dim_ * kWidth;
    const ExactRecords pending{keys_.data(), updates_.data(), factors_.data(), pending_, key_dim_, value_dim_, decay_dim_, ByChannel};
    add_records<Vectors>(pending, state.data + column, value_dim_, states_.data(), kWidth, key_dim_, column, lanes);
    for (int64_t i = 0; i < nodes_; ++i) {
      const int64_t row = pending_ + i;
      const ExactToken token{key(row), query(i), factors(row), value(i), update(row), output(i), betas_[i], ByChannel};
      take_token<IsDelta, Vectors>(token, &states_[blocks_.before(i) * size], kWidth, &states_[blocks_.behind(i) * size],
                                   kWidth, key_dim_, column, lanes);
    }
  }

  int64_t nodes_, pending_, key_dim_, value_dim_, decay_dim_;
  ExactBlocks blocks_;
  std::vector<float> keys_, queries_, updates_, values_, outputs_, betas_;
  std::vector<float> decays_, factors_;  // [pending + nodes, D], log decays and what they make of it
  std::vector<float> states_;            // some columns of the states, [blocks, K, columns]
};

// One head's chunk of known tokens, as HeadChunk. What is given as a value becomes the update.
template <bool IsDelta, bool ByChannel>
class ExactChunk {
 public:
  void begin(int64_t key_dim, int64_t value_dim) {
    key_dim_ = key_dim, value_dim_ = value_dim, decay_dim_ = ByChannel ? key_dim : 1;
    for (auto* x : {&keys_, &queries_}) x->resize(kChunk * key_dim);
    for (auto* x : {&updates_, &outputs_}) x->resize(kChunk * value_dim);
    for (auto* x : {&decays_, &factors_}) x->resize(kChunk * decay_dim_);
    betas_.resize(kChunk);
    state_.resize(key_dim * kExactVectors * kLanes);
  }

  float* query(int64_t token) { return queries_.data() + token * key_dim_; }
  float* key(int64_t token) { return keys_.data() + token * key_dim_; }
  float* value(int64_t token) { return updates_.data() + token * value_dim_; }
  float* output(int64_t token) { return outputs_.data() + token * value_dim_; }
  float* log_decays(int64_t token) { return decays_.data() + token * decay_dim_; }
  float& beta(int64_t token) { return betas_[token]; }

  void look(int64_t size) { size_ = size; }

  // Called after everything is filled in: outputs, and the state [K, V] after the chunk.
  void advance(float* state) {
    for (int64_t i = 0; i < size_; ++i) put_factors(log_decays(i), decay_dim_, factors(i));
    for_columns<kExactVectors>(value_dim_, [&](int64_t column, auto vectors, auto lanes) {
      advance_columns<decltype(vectors)::value>(state + column, column, lanes);
    });
  }

 private:
  float* factors(int64_t token) { return factors_.data() + token * decay_dim_; }

  template <int Vectors, typename Lanes>
  void advance_columns(float* state, int64_t column, Lanes lanes) {
    constexpr int64_t kWidth = Vectors * kLanes;
    const ExactRecords none{};
    add_records<Vectors>(none, state, value_dim_, state_.data(), kWidth, key_dim_, column, lanes);
    for (int64_t i = 0; i < size_; ++i) {
      const ExactToken token{key(i), query(i), factors(i), value(i), value(i), output(i), betas_[i], ByChannel};
      take_token<IsDelta, Vectors>(token, state_.data(), kWidth, state_.data(), kWidth, key_dim_, column, lanes);
    }
    add_records<Vectors>(none, state_.data(), kWidth, state, value_dim_, key_dim_, column, lanes);
  }

  int64_t key_dim_, value_dim_, decay_dim_, size_;
  std::vector<float> keys_, queries_, updates_, outputs_, betas_;
  std::vector<float> decays_, factors_;  // [C, D]
  std::vector<float> state_;             // some columns of the state, [K, columns]
};

}  // namespace specmamba
