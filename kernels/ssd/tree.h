// One head's draft tree from one read of its checkpoint; README.md has the mathematics.
#pragma once

#include <vector>

#include "state_records/paths.h"
#include "state_records/state.h"

namespace specmamba {

inline float dot(const float* x, const float* y, int64_t size) {
  Vector total = zero();
  for_vectors(size, [&](int64_t i, auto lanes) {
    total = fma(load(x + i, lanes), load(y + i, lanes), total);
  });
  return sum(total);
}

// The tree of one row for one group, and then for each of its heads.
//
// Operands are copied into contiguous memory first: rows of one head have a stride of a power of two in the tensors, so
// most of them would share a few sets of the L1 cache. Row j of b, updates and decays is pending record j, or node j -
// pending.
class GroupTree {
 public:
  // Makes room for a tree. The caller fills in b and c and then, for each head, updates, decays of pending rows and log
  // decays of nodes. `ancestors` as for Paths. Memory is kept from tree to tree.
  void begin(int64_t nodes, int64_t pending, int64_t state_dim, int64_t head_dim, const bool* ancestors,
             int64_t ancestors_node) {
    nodes_ = nodes, pending_ = pending, state_dim_ = state_dim, head_dim_ = head_dim;
    paths_.begin(nodes, pending, ancestors, ancestors_node);
    b_.resize((pending + nodes) * state_dim);
    c_.resize(nodes * state_dim);
    updates_.resize((pending + nodes) * head_dim);
    for (auto* x : {&outputs_, &read_}) x->resize(nodes * head_dim);
    weights_.resize(pending + nodes);
    seen_c_b_.resize(paths_.seen().size());
    c_b_.resize(nodes);
    rows_.resize(nodes);
  }

  float* b(int64_t row) { return b_.data() + row * state_dim_; }
  float* c(int64_t node) { return c_.data() + node * state_dim_; }
  float* update(int64_t row) { return updates_.data() + row * head_dim_; }
  float* output(int64_t node) { return outputs_.data() + node * head_dim_; }
  float& decay(int64_t row) { return paths_.decay(row); }
  float& log_decay(int64_t node) { return paths_.log_decay(node); }

  // Called after b and c are filled in: the weights, before decay, of the rows that each node sees.
  void look() {
    for (int64_t i = 0; i < nodes_; ++i) {
      for (int64_t s = paths_.first(i); s < paths_.first(i) + paths_.count(i); ++s)
        seen_c_b_[s] = dot(c(i), b(paths_.seen()[s]), state_dim_);
      c_b_[i] = dot(c(i), b(pending_ + i), state_dim_);
      rows_[i] = c(i);
    }
  }

  // Called after the rest is filled in: outputs, and decays of the nodes.
  void verify(const StateView& state) {
    paths_.start();
    read_all(rows_.data(), nodes_, state, read_.data());
    for (int64_t i = 0; i < nodes_; ++i) {
      const float whole_decay = paths_.advance(i);
      for_vectors(paths_.count(i), [&](int64_t j, auto lanes) {
        const Vector c_b = load(&seen_c_b_[paths_.first(i) + j], lanes);
        store(&weights_[j], load(paths_.between() + j, lanes) * c_b, lanes);
      });
      for_columns<4>(head_dim_, [&](int64_t column, auto vectors, auto lanes) {
        sum_up<decltype(vectors)::value>(i, whole_decay, column, lanes);
      });
    }
  }

 private:
  // y = e^G c S + sum of weights u_j + (c.b) u, on kLanes Vectors columns.
  template <int Vectors, typename Lanes>
  void sum_up(int64_t node, float whole_decay, int64_t column, Lanes lanes) {
    const int64_t *seen = paths_.seen().data() + paths_.first(node), count = paths_.count(node);
    const Vector decay = broadcast(whole_decay);
    Vector sums[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v)
      sums[v] = decay * load(&read_[node * head_dim_ + column + v * kLanes], lanes);
    auto add = [&](float weight, const float* u) {
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v)
        sums[v] = fma(broadcast(weight), load(u + column + v * kLanes, lanes), sums[v]);
    };
    for (int64_t j = 0; j < count; ++j) add(weights_[j], update(seen[j]));
    add(c_b_[node], update(pending_ + node));
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) store(output(node) + column + v * kLanes, sums[v], lanes);
  }

  int64_t nodes_, pending_, state_dim_, head_dim_;
  Paths paths_;
  std::vector<float> b_, c_, updates_, outputs_, read_;
  // Products of c with the node's own b, and with the rows that it sees, in the order of paths_.seen().
  std::vector<float> c_b_, seen_c_b_;
  std::vector<float> weights_;         // of the current node
  std::vector<const float*> rows_;
};

}  // namespace specmamba
