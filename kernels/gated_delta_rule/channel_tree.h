// One head's draft tree with a log decay for each key channel; README.md has the mathematics.
#pragma once

#include <limits>
#include <vector>

#include "gated_delta_rule/tree.h"
#include "state_records/chunk.h"

namespace specmamba {

// As HeadTree, with decays in the products of keys: factors of one, so that every row that a node sees is decayed for it.
// Decays from a row to a node are products along the path between the two, never quotients of longer ones.
class ChannelTree : public TreeOfHead {
 public:
  void begin(int64_t nodes, int64_t pending, int64_t key_dim, int64_t value_dim, const bool* ancestors,
             int64_t ancestors_node) {
    begin_operands(nodes, pending, key_dim, value_dim);
    paths_.begin(nodes, pending, ancestors, ancestors_node);
    const int64_t num_seen = static_cast<int64_t>(paths_.seen().size());
    for (auto* x : {&of_k_, &of_q_}) x->resize(num_seen);
    between_.resize(num_seen * key_dim);
    behind_.resize(pending * key_dim);
    decays_.resize((pending + nodes) * key_dim);
    for (auto* x : {&log_decays_, &wholes_}) x->resize(nodes * key_dim);
    for (auto* x : {&own_, &before_root_}) x->resize(key_dim);
    scaled_.resize(2 * nodes * key_dim);
  }

  float* decays(int64_t row) { return decays_.data() + row * key_dim_; }             // a row's own log decays
  float* log_decays(int64_t node) { return log_decays_.data() + node * key_dim_; }  // a node's own, as they are given

  void look() {}  // decays, which differ from value head to value head, are in all products

  // Called after everything is filled in: outputs, and updates and decays of the nodes.
  void verify(const StateView& state) {
    start();
    for (int64_t i = 0; i < nodes_; ++i) {
      weigh(i);
      for (int64_t x = 2 * i; x < 2 * i + 2; ++x) rows_[x] = &scaled_[x * key_dim_];
    }
    read_all(rows_.data(), 2 * nodes_, state, read_.data());
    for (int64_t i = 0; i < nodes_; ++i) {
      const int64_t first = paths_.first(i);
      solve(i, {1.0f, paths_.seen().data() + first, paths_.count(i), of_k_.data() + first, of_q_.data() + first});
    }
  }

 private:
  // Decays behind pending records, up to the last one, and of all of them.
  void start() {
    std::fill(before_root_.begin(), before_root_.end(), 1.0f);
    for (int64_t j = pending_ - 1; j >= 0; --j) {
      std::copy(before_root_.begin(), before_root_.end(), &behind_[j * key_dim_]);
      for_vectors(key_dim_, [&](int64_t c, auto lanes) {
        const Vector left = decay_of(load(decays(j) + c, lanes));
        store(&before_root_[c], without_tiny(left * load(&before_root_[c], lanes)), lanes);
      });
    }
  }

  // What a node reads of the checkpoint and of the updates that it sees, after its ancestors.
  void weigh(int64_t node) {
    const float *k = key(pending_ + node), *q = query(node);
    for_vectors(key_dim_, [&](int64_t c, auto lanes) {
      const Vector given = load(log_decays(node) + c, lanes);
      const Vector own = chosen(is_finite(given), given, broadcast(std::numeric_limits<float>::quiet_NaN()));
      store(decays(pending_ + node) + c, own, lanes);  // a record cannot express what is not finite
      store(&own_[c], decay_of(own), lanes);
    });
    const int64_t first = paths_.first(node), count = paths_.count(node);
    const bool has_parent = count > pending_;
    const int64_t parent = has_parent ? paths_.seen()[first + count - 1] - pending_ : -1;
    const float* before = has_parent ? &between_[paths_.first(parent) * key_dim_] : behind_.data();
    for (int64_t s = 0; s < count; ++s) {
      const bool is_parent = has_parent && s == count - 1;
      see(key(paths_.seen()[first + s]), is_parent ? nullptr : before + s * key_dim_, k, q, first + s);
    }
    const float* whole_before = has_parent ? &wholes_[parent * key_dim_] : before_root_.data();
    float *whole = &wholes_[node * key_dim_], *k_scaled = &scaled_[2 * node * key_dim_], *q_scaled = k_scaled + key_dim_;
    for_vectors(key_dim_, [&](int64_t c, auto lanes) {
      const Vector decay = without_tiny(load(whole_before + c, lanes) * load(&own_[c], lanes));
      store(whole + c, decay, lanes);
      store(k_scaled + c, decay * load(k + c, lanes), lanes);
      store(q_scaled + c, decay * load(q + c, lanes), lanes);
    });
    float k_k;
    dot_both(k, q, k, key_dim_, &k_k, &q_k_[node]);
  }

  // The weights of a row for a node with k and q. `before` is the decay from the row to the node's parent; null: it is
  // the parent.
  void see(const float* row, const float* before, const float* k, const float* q, int64_t at) {
    Vector of_k = zero(), of_q = zero();
    float* between = &between_[at * key_dim_];
    for_vectors(key_dim_, [&](int64_t c, auto lanes) {
      Vector decay = load(&own_[c], lanes);
      if (before != nullptr) decay = without_tiny(decay * load(before + c, lanes));
      store(between + c, decay, lanes);
      const Vector left = decay * load(row + c, lanes);
      of_k = fma(left, load(k + c, lanes), of_k);
      of_q = fma(left, load(q + c, lanes), of_q);
    });
    of_k_[at] = sum(of_k), of_q_[at] = sum(of_q);
  }

  Paths paths_;                            // what nodes see
  std::vector<float> decays_, log_decays_;  // [pending + nodes, K] [nodes, K]
  std::vector<float> own_, before_root_;    // [K], decays: of the current node, of all pending records
  std::vector<float> behind_, wholes_;      // [pending, K] behind each record, [nodes, K] from the checkpoint
  std::vector<float> between_;              // [rows that nodes see, K]
  std::vector<float> of_k_, of_q_;          // weights of these rows
  std::vector<float> scaled_;               // [2 nodes, K], keys and queries times decay from the checkpoint
};

}  // namespace specmamba
