// One head's draft tree from one read of its checkpoint; see README.md and reference.py.
#pragma once

#include <cmath>
#include <type_traits>
#include <vector>

#include "vector.h"

namespace specmamba {

// What a loop over columns does at once: blocks of 128 or 64 columns, then single vectors, of which the last may be
// partial. Calls body(column, number of vectors as a constant, lanes) for parts of [0, size).
template <int Widest, typename Body>
inline void for_columns(int64_t size, const Body& body) {
  int64_t column = 0;
  for (; column + Widest * kLanes <= size; column += Widest * kLanes)
    body(column, std::integral_constant<int, Widest>{}, All{});
  for (; column + kLanes <= size; column += kLanes) body(column, std::integral_constant<int, 1>{}, All{});
  if (column < size) body(column, std::integral_constant<int, 1>{}, First(size - column));
}

// A head's state [key_dim, value_dim].
struct StateView {
  const float* data;
  int64_t key_dim, value_dim;
};

// read[r] = x[r] S for Rows rows x[r] = rows[r] and 16 Vectors columns of S.
template <int Rows, int Vectors, typename Lanes>
inline void read_state(const float* const* rows, const StateView& state, int64_t column, float* read, Lanes lanes) {
  Vector sums[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) sums[r][j] = _mm512_setzero_ps();
  for (int64_t i = 0; i < state.key_dim; ++i) {
    Vector x[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) x[r] = _mm512_set1_ps(rows[r][i]);
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) {
      Vector s = load(state.data + i * state.value_dim + column + j * kLanes, lanes);
      asm("" : "+v"(s));  // stays in a register: as an operand in memory it would be loaded for every row
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) sums[r][j] = _mm512_fmadd_ps(x[r], s, sums[r][j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) store(read + r * state.value_dim + column + j * kLanes, sums[r][j], lanes);
}

// read[r] = x[r] S for all rows, up to MaxRows rows and 16 Widest columns at a time.
template <int MaxRows, int Widest>
inline void read_rows(const float* const* rows, int64_t num_rows, const StateView& state, float* read) {
  for_columns<Widest>(state.value_dim, [&](int64_t column, auto vectors, auto lanes) {
    constexpr int V = decltype(vectors)::value;
    using L = decltype(lanes);
    using Read = void (*)(const float* const*, const StateView&, int64_t, float*, L);
    constexpr Read all[6] = {read_state<1, V, L>, read_state<2, V, L>, read_state<3, V, L>,
                             read_state<std::min(4, MaxRows), V, L>, read_state<std::min(5, MaxRows), V, L>,
                             read_state<std::min(6, MaxRows), V, L>};
    for (int64_t r = 0; r < num_rows; r += MaxRows)
      all[std::min<int64_t>(MaxRows, num_rows - r) - 1](rows + r, state, column, read + r * state.value_dim, lanes);
  });
}

// read[r] = x[r] S for all rows. The order of the sums does not depend on how many rows there are.
//
// The first rows take S in its own order, as fast as memory delivers it; then it lies in a cache, and the others take
// fewer columns for more rows at a time, six at best. 24 sums, a vector of S and six inputs fit into 32 registers.
inline void read_all(const float* const* rows, int64_t num_rows, const StateView& state, float* read) {
  const int64_t first = std::min<int64_t>(num_rows, num_rows % 6 == 4 ? 2 : 3);
  read_rows<3, 8>(rows, first, state, read);
  read_rows<6, 4>(rows + first, num_rows - first, state, read + first * state.value_dim);
}

// x.z and y.z
inline void dot_both(const float* x, const float* y, const float* z, int64_t size, float* x_z, float* y_z) {
  Vector of_x = _mm512_setzero_ps(), of_y = _mm512_setzero_ps();
  for_vectors(size, [&](int64_t i, auto lanes) {
    const Vector z_i = load(z + i, lanes);
    of_x = _mm512_fmadd_ps(load(x + i, lanes), z_i, of_x);
    of_y = _mm512_fmadd_ps(load(y + i, lanes), z_i, of_y);
  });
  *x_z = sum(of_x);
  *y_z = sum(of_y);
}

// The tree of one row under one key head, and then under each of its value heads.
//
// Everything is copied together first: rows of one head lie a power of two apart in the tensors, where most of them
// would share a few sets of the L1 cache. Row j of keys, updates and decays is pending record j, or node j - pending.
class HeadTree {
 public:
  // Room for a tree; keys, queries and then, for each value head, values, gates and the pending rows are the caller's
  // to fill. Memory is kept from tree to tree.
  void begin(int64_t nodes, int64_t pending, int64_t key_dim, int64_t value_dim) {
    nodes_ = nodes, pending_ = pending, key_dim_ = key_dim, value_dim_ = value_dim;
    keys_.resize((pending + nodes) * key_dim);
    queries_.resize(nodes * key_dim);
    updates_.resize((pending + nodes) * value_dim);
    for (auto* x : {&values_, &outputs_}) x->resize(nodes * value_dim);
    for (auto* x : {&decays_, &of_k_, &of_q_}) x->resize(pending + nodes);
    for (auto* x : {&log_decays_, &betas_, &q_k_}) x->resize(nodes);
    read_.resize(2 * nodes * value_dim);
    rows_.resize(2 * nodes);
  }

  float* key(int64_t row) { return keys_.data() + row * key_dim_; }
  float* query(int64_t node) { return queries_.data() + node * key_dim_; }
  float* update(int64_t row) { return updates_.data() + row * value_dim_; }
  float* value(int64_t node) { return values_.data() + node * value_dim_; }
  float* output(int64_t node) { return outputs_.data() + node * value_dim_; }
  float& decay(int64_t row) { return decays_[row]; }         // log decay from the checkpoint to a row
  float& log_decay(int64_t node) { return log_decays_[node]; }  // a node's own
  float& beta(int64_t node) { return betas_[node]; }

  // After keys and queries: what each node sees (the pending records and its strict ancestors), and with which weights
  // before decay. `ancestors` [nodes, nodes] is true from a node's ancestors and itself.
  void look(const bool* ancestors) {
    seen_.clear(), k_k_.clear(), seen_q_k_.clear();
    first_seen_.assign(1, 0);
    for (int64_t i = 0; i < nodes_; ++i) {
      for (int64_t j = 0; j < pending_ + i; ++j)
        if (j < pending_ || ancestors[i * nodes_ + j - pending_]) see(i, j);
      first_seen_.push_back(static_cast<int64_t>(seen_.size()));
      float k_k;
      dot_both(key(pending_ + i), query(i), key(pending_ + i), key_dim_, &k_k, &q_k_[i]);
      rows_[2 * i] = key(pending_ + i);
      rows_[2 * i + 1] = query(i);
    }
  }

  // After the rest: outputs, and updates and decays of the nodes. Ancestors come before their descendants, so every
  // update that is looked at is final.
  void verify(const StateView& state) {
    read_all(rows_.data(), 2 * nodes_, state, read_.data());
    for (int64_t i = 0; i < nodes_; ++i) {
      const int64_t count = weigh(i);
      for_columns<4>(value_dim_, [&](int64_t column, auto vectors, auto lanes) {
        solve<decltype(vectors)::value>(i, count, column, lanes);
      });
    }
  }

 private:
  void see(int64_t node, int64_t row) {
    float k_k, q_k;
    dot_both(key(pending_ + node), query(node), key(row), key_dim_, &k_k, &q_k);
    seen_.push_back(row), k_k_.push_back(k_k), seen_q_k_.push_back(q_k);
  }

  // The node's decay, and the weights of_k_ and of_q_ with which it takes the updates that it sees; says how many. A
  // node follows the last row that it sees: its parent, the last pending record, or the checkpoint.
  int64_t weigh(int64_t node) {
    const int64_t first = first_seen_[node], count = first_seen_[node + 1] - first;
    const float before = count == 0 ? 0.0f : decays_[seen_[first + count - 1]];
    const float decay = before + log_decays_[node];
    decays_[pending_ + node] = decay;
    whole_decay_ = std::exp(decay);
    for (int64_t j = 0; j < count; ++j) of_k_[j] = decays_[seen_[first + j]];
    for_vectors(count, [&](int64_t j, auto lanes) {
      const Vector between = exp(_mm512_sub_ps(_mm512_set1_ps(decay), load(&of_k_[j], lanes)));
      store(&of_k_[j], _mm512_mul_ps(between, load(&k_k_[first + j], lanes)), lanes);
      store(&of_q_[j], _mm512_mul_ps(between, load(&seen_q_k_[first + j], lanes)), lanes);
    });
    return count;
  }

  // u = beta (v - e^G k S - sum of_k u_j)  and  out = e^G q S + sum of_q u_j + (q.k) u, on 16 Vectors columns.
  template <int Vectors, typename Lanes>
  void solve(int64_t node, int64_t count, int64_t column, Lanes lanes) {
    const int64_t* seen = seen_.data() + first_seen_[node];
    const float *k_read = read_.data() + 2 * node * value_dim_ + column, *q_read = k_read + value_dim_;
    const Vector decay = _mm512_set1_ps(whole_decay_);
    Vector k_sum[Vectors], q_sum[Vectors];
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) {
      k_sum[c] = _mm512_mul_ps(decay, load(k_read + c * kLanes, lanes));
      q_sum[c] = _mm512_mul_ps(decay, load(q_read + c * kLanes, lanes));
    }
    for (int64_t j = 0; j < count; ++j) {
      const Vector of_k = _mm512_set1_ps(of_k_[j]), of_q = _mm512_set1_ps(of_q_[j]);
      const float* u = update(seen[j]) + column;
#pragma GCC unroll 8
      for (int c = 0; c < Vectors; ++c) {
        const Vector u_j = load(u + c * kLanes, lanes);
        k_sum[c] = _mm512_fmadd_ps(of_k, u_j, k_sum[c]);
        q_sum[c] = _mm512_fmadd_ps(of_q, u_j, q_sum[c]);
      }
    }
    const Vector beta = _mm512_set1_ps(betas_[node]), q_k = _mm512_set1_ps(q_k_[node]);
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) {
      const int64_t at = column + c * kLanes;
      const Vector u = _mm512_mul_ps(beta, _mm512_sub_ps(load(value(node) + at, lanes), k_sum[c]));
      store(update(pending_ + node) + at, u, lanes);
      store(output(node) + at, _mm512_fmadd_ps(q_k, u, q_sum[c]), lanes);
    }
  }

  int64_t nodes_, pending_, key_dim_, value_dim_;
  std::vector<float> keys_, queries_, updates_, values_, outputs_, read_;
  std::vector<float> decays_, log_decays_, betas_, q_k_;
  std::vector<float> of_k_, of_q_;          // of the node at hand
  float whole_decay_;                       // of the node at hand
  std::vector<int64_t> seen_, first_seen_;  // rows that node i sees: seen_[first_seen_[i]] up to first_seen_[i + 1]
  std::vector<float> k_k_, seen_q_k_;       // their keys times the node's key and query
  std::vector<const float*> rows_;
};

}  // namespace specmamba
