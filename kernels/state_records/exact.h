// Recurrences in one fixed arithmetic, one token after the other; README.md has the reason.
//
// Every number of a state, an update or an output comes of the same operations in the same order, wherever its token stands:
// in a chunk of known tokens, among the nodes of a tree or the pending records before it. Lanes are columns of the state,
// which never meet, so nothing depends on how columns are divided either.
#pragma once

#include <algorithm>
#include <vector>

#include "state_records/exact_rows.h"
#include "state_records/paths.h"
#include "state_records/state.h"

namespace specmamba {

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
  int64_t parent(int64_t node) const { return parents_[node]; }
  bool is_leaf(int64_t node) const { return last_child_[node + 1] < 0; }

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
    Vector sums[Vectors];
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) sums[c] = zero();
    const ExactToken root = token(0);
    add_records<Vectors>(pending, state.data + column, value_dim_, states_.data(), kWidth, key_dim_, column, lanes,
                         [&](int64_t row, const Vector* s) {
                           if constexpr (IsDelta) add_key_products<Vectors>(root, row, s, sums);
                         });
    // While the first node is computed, what is read next comes nearer: other columns, or the head that follows.
    const float* ahead = column + kWidth < value_dim_ ? state.data + column + kWidth : state.data + key_dim_ * value_dim_;
    bool is_summed = true;
    for (int64_t i = 0; i < nodes_; ++i) {
      const ExactToken x = token(i), next = token(std::min(i + 1, nodes_ - 1));
      const float* from = &states_[blocks_.before(i) * size];
      float* to = &states_[blocks_.behind(i) * size];
      if (IsDelta && !is_summed) sum_key_products<Vectors>(x, from, kWidth, key_dim_, sums, lanes);
      is_summed = IsDelta && i + 1 < nodes_ && blocks_.parent(i + 1) == i;
      const auto take = [&](auto then) {
        take_token<IsDelta, decltype(then), Vectors>(x, next, from, kWidth, to, kWidth, key_dim_, column,
                                                     i == 0 ? ahead : nullptr, value_dim_, sums, lanes);
      };
      if (blocks_.is_leaf(i)) {
        take(Nothing{});
      } else if (is_summed) {
        take(StoredAndSummed{});
      } else {
        take(Stored{});
      }
    }
  }

  ExactToken token(int64_t i) {
    const int64_t row = pending_ + i;
    return {key(row), query(i), factors(row), value(i), update(row), output(i), betas_[i], ByChannel};
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
    Vector sums[Vectors];
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) sums[c] = zero();
    const ExactToken first = token(0);
    add_records<Vectors>(none, state, value_dim_, state_.data(), kWidth, key_dim_, column, lanes,
                         [&](int64_t row, const Vector* s) {
                           if (IsDelta && size_ > 0) add_key_products<Vectors>(first, row, s, sums);
                         });
    for (int64_t i = 0; i < size_; ++i) {
      const ExactToken x = token(i), next = token(std::min(i + 1, size_ - 1));
      const auto take = [&](auto then) {
        take_token<IsDelta, decltype(then), Vectors>(x, next, state_.data(), kWidth, state_.data(), kWidth, key_dim_,
                                                     column, nullptr, 0, sums, lanes);
      };
      if (IsDelta && i + 1 < size_) {
        take(StoredAndSummed{});
      } else {
        take(Stored{});
      }
    }
    add_records<Vectors>(none, state_.data(), kWidth, state, value_dim_, key_dim_, column, lanes);
  }

  ExactToken token(int64_t i) {
    return {key(i), query(i), factors(i), value(i), value(i), output(i), betas_[i], ByChannel};
  }

  int64_t key_dim_, value_dim_, decay_dim_, size_;
  std::vector<float> keys_, queries_, updates_, outputs_, betas_;
  std::vector<float> decays_, factors_;  // [C, D]
  std::vector<float> state_;             // some columns of the state, [K, columns]
};

}  // namespace specmamba
