// One head's draft tree from one read of its checkpoint; README.md has the mathematics.
#pragma once

#include <vector>

#include "state_records/paths.h"
#include "state_records/state.h"

namespace specmamba {

// x.z and y.z
inline void dot_both(const float* x, const float* y, const float* z, int64_t size, float* x_z, float* y_z) {
  Vector of_x = zero(), of_y = zero();
  for_vectors(size, [&](int64_t i, auto lanes) {
    const Vector z_i = load(z + i, lanes);
    of_x = fma(load(x + i, lanes), z_i, of_x);
    of_y = fma(load(y + i, lanes), z_i, of_y);
  });
  *x_z = sum(of_x);
  *y_z = sum(of_y);
}

// What trees of both kinds of decay have in common. The tree is that of one row for one key head, and then for each of its
// value heads.
//
// Operands are copied into contiguous memory first: rows of one head have a stride of a power of two in the tensors, so
// most of them would share a few sets of the L1 cache. Row j of keys, updates and decays is pending record j, or node j
// - pending.
class TreeOfHead {
 public:
  float* key(int64_t row) { return keys_.data() + row * key_dim_; }
  float* query(int64_t node) { return queries_.data() + node * key_dim_; }
  float* update(int64_t row) { return updates_.data() + row * value_dim_; }
  float* value(int64_t node) { return values_.data() + node * value_dim_; }
  float* output(int64_t node) { return outputs_.data() + node * value_dim_; }
  float& beta(int64_t node) { return betas_[node]; }

 protected:
  void begin_operands(int64_t nodes, int64_t pending, int64_t key_dim, int64_t value_dim) {
    nodes_ = nodes, pending_ = pending, key_dim_ = key_dim, value_dim_ = value_dim;
    keys_.resize((pending + nodes) * key_dim);
    queries_.resize(nodes * key_dim);
    updates_.resize((pending + nodes) * value_dim);
    for (auto* x : {&values_, &outputs_}) x->resize(nodes * value_dim);
    for (auto* x : {&betas_, &q_k_}) x->resize(nodes);
    read_.resize(2 * nodes * value_dim);
    rows_.resize(2 * nodes);
  }

  // What a node takes: of its two rows of read_, and of the updates that it sees.
  struct Weights {
    float whole_decay;
    const int64_t* seen;
    int64_t count;
    const float *of_k, *of_q;  // [count]
  };

  // Outputs, and the update of a node; those of its ancestors are final.
  void solve(int64_t node, const Weights& weights) {
    for_columns<4>(value_dim_, [&](int64_t column, auto vectors, auto lanes) {
      solve_columns<decltype(vectors)::value>(node, weights, column, lanes);
    });
  }

  int64_t nodes_, pending_, key_dim_, value_dim_;
  std::vector<float> keys_, queries_, updates_, values_, outputs_, read_;
  std::vector<float> betas_, q_k_;
  std::vector<const float*> rows_;

 private:
  // u = beta (v - e^G k S - sum of_k u_j)  and  out = e^G q S + sum of_q u_j + (q.k) u, on kLanes Vectors columns.
  template <int Vectors, typename Lanes>
  void solve_columns(int64_t node, const Weights& weights, int64_t column, Lanes lanes) {
    const float *k_read = read_.data() + 2 * node * value_dim_ + column, *q_read = k_read + value_dim_;
    const Vector decay = broadcast(weights.whole_decay);
    Vector k_sum[Vectors], q_sum[Vectors];
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) {
      k_sum[c] = decay * load(k_read + c * kLanes, lanes);
      q_sum[c] = decay * load(q_read + c * kLanes, lanes);
    }
    for (int64_t j = 0; j < weights.count; ++j) {
      const Vector of_k = broadcast(weights.of_k[j]), of_q = broadcast(weights.of_q[j]);
      const float* u = update(weights.seen[j]) + column;
#pragma GCC unroll 8
      for (int c = 0; c < Vectors; ++c) {
        const Vector u_j = load(u + c * kLanes, lanes);
        k_sum[c] = fma(of_k, u_j, k_sum[c]);
        q_sum[c] = fma(of_q, u_j, q_sum[c]);
      }
    }
    const Vector beta = broadcast(betas_[node]), q_k = broadcast(q_k_[node]);
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) {
      const int64_t at = column + c * kLanes;
      const Vector u = beta * (load(value(node) + at, lanes) - k_sum[c]);
      store(update(pending_ + node) + at, u, lanes);
      store(output(node) + at, fma(q_k, u, q_sum[c]), lanes);
    }
  }
};

// With a log decay for each head.
class HeadTree : public TreeOfHead {
 public:
  // Makes room for a tree. The caller fills in keys and queries and then, for each value head, values, log decays,
  // betas and the pending rows. `ancestors` [nodes, nodes] as for Paths. Memory is kept from tree to tree.
  void begin(int64_t nodes, int64_t pending, int64_t key_dim, int64_t value_dim, const bool* ancestors,
             int64_t ancestors_node) {
    begin_operands(nodes, pending, key_dim, value_dim);
    paths_.begin(nodes, pending, ancestors, ancestors_node);
    for (auto* x : {&of_k_, &of_q_}) x->resize(pending + nodes);
    for (auto* x : {&k_k_, &seen_q_k_}) x->resize(paths_.seen().size());
  }

  float* decays(int64_t row) { return &paths_.decay(row); }
  float* log_decays(int64_t node) { return &paths_.log_decay(node); }

  // Called after keys and queries are filled in: the weights, before decay, of the rows that each node sees.
  void look() {
    for (int64_t i = 0; i < nodes_; ++i) {
      const float *k = key(pending_ + i), *q = query(i);
      for (int64_t s = paths_.first(i); s < paths_.first(i) + paths_.count(i); ++s)
        dot_both(k, q, key(paths_.seen()[s]), key_dim_, &k_k_[s], &seen_q_k_[s]);
      float k_k;
      dot_both(k, q, k, key_dim_, &k_k, &q_k_[i]);
      rows_[2 * i] = k, rows_[2 * i + 1] = q;
    }
  }

  // Called after the rest is filled in: outputs, and updates and decays of the nodes. Ancestors come before their
  // descendants, so every update that is read is final.
  void verify(const StateView& state) {
    paths_.start();
    read_all(rows_.data(), 2 * nodes_, state, read_.data());
    for (int64_t i = 0; i < nodes_; ++i) {
      const float whole_decay = weigh(i);
      const int64_t* seen = paths_.seen().data() + paths_.first(i);
      solve(i, {whole_decay, seen, paths_.count(i), of_k_.data(), of_q_.data()});
    }
  }

 private:
  // The weights of_k_ and of_q_ with which a node takes the updates that it sees; returns its decay.
  float weigh(int64_t node) {
    const int64_t first = paths_.first(node);
    const float whole_decay = paths_.advance(node);
    for_vectors(paths_.count(node), [&](int64_t j, auto lanes) {
      const Vector between = load(paths_.between() + j, lanes);
      store(&of_k_[j], between * load(&k_k_[first + j], lanes), lanes);
      store(&of_q_[j], between * load(&seen_q_k_[first + j], lanes), lanes);
    });
    return whole_decay;
  }

  Paths paths_;
  std::vector<float> of_k_, of_q_;     // of the current node
  std::vector<float> k_k_, seen_q_k_;  // products with the rows that nodes see, in the order of paths_.seen()
};

}  // namespace specmamba
