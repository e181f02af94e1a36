// Gated delta rule over draft trees, and the fold of pending records; see README.md and reference.py.
#include <cmath>
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "vector.h"

namespace {

using namespace specmamba;

// Everything of one verify. Distances are in elements; what is not named is contiguous.
struct Verify {
  const float *q, *k, *v, *g, *beta;  // [B, N, Hk, K] [B, N, Hk, K] [B, N, Hv, V] [B, N, Hv] [B, N, Hv]
  const float* state;                 // [B, Hv, K, V]
  float *records_k, *records_u, *records_decay;
  const int64_t* num_pending;  // [B], or null: node_offset everywhere
  const bool* ancestors;       // [B, N, N], true from each node's ancestors and itself
  float* out;                  // [B, N, Hv, V]
  int64_t batch, nodes, key_heads, value_heads, key_dim, value_dim, node_offset;
  int64_t v_batch, v_node;                             // from one batch entry, or node, of v to the next
  int64_t state_batch, k_batch, u_batch, decay_batch;  // from one batch entry of state and records to the next
  int64_t ancestors_batch;
};

// What a loop over columns does at once: blocks of 64 columns, then single vectors, of which the last may be partial.
constexpr int64_t kBlock = 4 * kLanes;

// Calls body(column, number of vectors as a constant, lanes) for parts of [0, size).
template <typename Body>
void for_columns(int64_t size, const Body& body) {
  int64_t column = 0;
  for (; column + kBlock <= size; column += kBlock) body(column, std::integral_constant<int, 4>{}, All{});
  for (; column + kLanes <= size; column += kLanes) body(column, std::integral_constant<int, 1>{}, All{});
  if (column < size) body(column, std::integral_constant<int, 1>{}, First(size - column));
}

// read[r] = x[r] S for Rows rows x[r] = rows[r] and 16 Vectors columns of S [key_dim, value_dim].
template <int Rows, int Vectors, typename Lanes>
void read_state(const float* const* rows, const float* state, float* read, int64_t key_dim, int64_t value_dim,
                Lanes lanes) {
  Vector sums[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) sums[r][j] = _mm512_setzero_ps();
  for (int64_t i = 0; i < key_dim; ++i) {
    Vector s[Vectors];
    for (int j = 0; j < Vectors; ++j) s[j] = load(state + i * value_dim + j * kLanes, lanes);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Vector x = _mm512_set1_ps(rows[r][i]);
#pragma GCC unroll 8
      for (int j = 0; j < Vectors; ++j) sums[r][j] = _mm512_fmadd_ps(x, s[j], sums[r][j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) store(read + r * value_dim + j * kLanes, sums[r][j], lanes);
}

// read[r] = x[r] S for all rows. The order of the sums does not depend on how many rows there are.
void read_all(const float* const* rows, int64_t num_rows, const float* state, float* read, int64_t key_dim,
              int64_t value_dim) {
  constexpr int64_t kRows = 6;  // 24 sums, 4 columns of S and 1 input of 32 registers
  for_columns(value_dim, [&](int64_t column, auto vectors, auto lanes) {
    constexpr int V = decltype(vectors)::value;
    using L = decltype(lanes);
    using Read = void (*)(const float* const*, const float*, float*, int64_t, int64_t, L);
    constexpr Read of_rows[kRows] = {read_state<1, V, L>, read_state<2, V, L>, read_state<3, V, L>,
                                     read_state<4, V, L>, read_state<5, V, L>, read_state<6, V, L>};
    for (int64_t r = 0; r < num_rows; r += kRows)
      of_rows[std::min(kRows, num_rows - r) - 1](rows + r, state + column, read + r * value_dim + column, key_dim,
                                                 value_dim, lanes);
  });
}

// x.z and y.z
void dot_both(const float* x, const float* y, const float* z, int64_t size, float* x_z, float* y_z) {
  Vector of_x = _mm512_setzero_ps(), of_y = _mm512_setzero_ps();
  for_vectors(size, [&](int64_t i, auto lanes) {
    const Vector z_i = load(z + i, lanes);
    of_x = _mm512_fmadd_ps(load(x + i, lanes), z_i, of_x);
    of_y = _mm512_fmadd_ps(load(y + i, lanes), z_i, of_y);
  });
  *x_z = sum(of_x);
  *y_z = sum(of_y);
}

// The records that a node sees, with the weights by which its k and its q take their updates.
struct Seen {
  std::vector<const float*> u;
  std::vector<float> decay, of_k, of_q;

  void clear() {
    u.clear();
    for (auto* x : {&decay, &of_k, &of_q}) x->clear();
  }

  void add(const float* u_j, float log_decay, float k_k, float q_k) {
    u.push_back(u_j);
    decay.push_back(log_decay);
    of_k.push_back(k_k);
    of_q.push_back(q_k);
  }

  // The weights take the decay from each record to a node at `log_decay`.
  void decay_to(float log_decay) {
    for_vectors(static_cast<int64_t>(u.size()), [&](int64_t j, auto lanes) {
      const Vector between = exp(_mm512_sub_ps(_mm512_set1_ps(log_decay), load(&decay[j], lanes)));
      for (auto* x : {&of_k, &of_q}) store(&(*x)[j], _mm512_mul_ps(between, load(&(*x)[j], lanes)), lanes);
    });
  }
};

// A node's own quantities.
struct Node {
  const float *k_read, *q_read, *v;  // k S, q S, v
  float decay, beta, q_k;            // e^G, beta, q.k
  float *u, *out;
};

// u = beta (v - e^G k S - sum of_k u_j)  and  out = e^G q S + sum of_q u_j + (q.k) u, on 16 Vectors columns.
template <int Vectors, typename Lanes>
void update(const Seen& seen, const Node& n, int64_t column, Lanes lanes) {
  Vector k_sum[Vectors], q_sum[Vectors];
#pragma GCC unroll 8
  for (int c = 0; c < Vectors; ++c) {
    const int64_t at = column + c * kLanes;
    k_sum[c] = _mm512_mul_ps(_mm512_set1_ps(n.decay), load(n.k_read + at, lanes));
    q_sum[c] = _mm512_mul_ps(_mm512_set1_ps(n.decay), load(n.q_read + at, lanes));
  }
  for (size_t j = 0; j < seen.u.size(); ++j) {
    const Vector of_k = _mm512_set1_ps(seen.of_k[j]), of_q = _mm512_set1_ps(seen.of_q[j]);
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) {
      const Vector u_j = load(seen.u[j] + column + c * kLanes, lanes);
      k_sum[c] = _mm512_fmadd_ps(of_k, u_j, k_sum[c]);
      q_sum[c] = _mm512_fmadd_ps(of_q, u_j, q_sum[c]);
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < Vectors; ++c) {
    const int64_t at = column + c * kLanes;
    const Vector u = _mm512_mul_ps(_mm512_set1_ps(n.beta), _mm512_sub_ps(load(n.v + at, lanes), k_sum[c]));
    store(n.u + at, u, lanes);
    store(n.out + at, _mm512_fmadd_ps(_mm512_set1_ps(n.q_k), u, q_sum[c]), lanes);
  }
}

// All nodes of one value head of one batch entry.
//
// What the head sees is copied together first: rows of one head lie a power of two apart in the tensors, where most of
// them would share a few sets of the L1 cache. Row j of keys, updates and decay is pending record j, or node j - pending.
class Head {
 public:
  Head(const Verify& p, int64_t b, int64_t h) : p_(p), b_(b), h_(h), key_head_(h / (p.value_heads / p.key_heads)) {
    pending_ = p.num_pending == nullptr ? p.node_offset : p.num_pending[b];
  }

  void run() {
    gather();
    const float* state = p_.state + b_ * p_.state_batch + h_ * p_.key_dim * p_.value_dim;
    read_all(s_.rows.data(), 2 * p_.nodes, state, s_.read.data(), p_.key_dim, p_.value_dim);
    for (int64_t i = 0; i < p_.nodes; ++i) node(i);
  }

 private:
  struct Scratch {
    std::vector<float> keys, queries, updates, read, decay;
    std::vector<const float*> rows;
    Seen seen;
  };

  void gather() {
    const int64_t K = p_.key_dim, V = p_.value_dim, seen = pending_ + p_.nodes;
    s_.keys.resize(seen * K);
    s_.updates.resize(seen * V);
    s_.decay.resize(seen);
    s_.queries.resize(p_.nodes * K);
    s_.read.resize(2 * p_.nodes * V);
    s_.rows.resize(2 * p_.nodes);
    for (int64_t j = 0; j < pending_; ++j) {
      std::copy_n(stored_key(j), K, key(j));
      std::copy_n(stored_update(j), V, update_of(j));
      s_.decay[j] = *stored_decay(j);
    }
    for (int64_t i = 0; i < p_.nodes; ++i) {
      const int64_t at = ((b_ * p_.nodes + i) * p_.key_heads + key_head_) * K;
      std::copy_n(p_.k + at, K, key(pending_ + i));
      std::copy_n(p_.q + at, K, query(i));
      s_.rows[2 * i] = key(pending_ + i);
      s_.rows[2 * i + 1] = query(i);
    }
  }

  // Ancestors come before their descendants, so every update that is looked at is final.
  void node(int64_t i) {
    const bool* is_ancestor = p_.ancestors + b_ * p_.ancestors_batch + i * p_.nodes;
    const int64_t at = (b_ * p_.nodes + i) * p_.value_heads + h_, row = pending_ + i, record = p_.node_offset + i;
    const int64_t parent = row_before(is_ancestor, i);
    const float decay = (parent < 0 ? 0.0f : s_.decay[parent]) + p_.g[at];
    look(is_ancestor, i);
    s_.seen.decay_to(decay);
    float k_k, q_k;
    dot_both(key(row), query(i), key(row), p_.key_dim, &k_k, &q_k);
    const float *k_read = s_.read.data() + 2 * i * p_.value_dim, *q_read = k_read + p_.value_dim;
    const float* v = p_.v + b_ * p_.v_batch + i * p_.v_node + h_ * p_.value_dim;
    const Node n{k_read, q_read, v, std::exp(decay), p_.beta[at], q_k, update_of(row), p_.out + at * p_.value_dim};
    for_columns(p_.value_dim, [&](int64_t column, auto vectors, auto lanes) {
      update<decltype(vectors)::value>(s_.seen, n, column, lanes);
    });
    s_.decay[row] = decay;
    *stored_decay(record) = decay;
    std::copy_n(update_of(row), p_.value_dim, stored_update(record));
    if (h_ % (p_.value_heads / p_.key_heads) == 0) std::copy_n(key(row), p_.key_dim, stored_key(record));
  }

  // Collects the pending records and the strict ancestors of node i.
  void look(const bool* is_ancestor, int64_t i) {
    s_.seen.clear();
    for (int64_t j = 0; j < pending_ + i; ++j) {
      if (j >= pending_ && !is_ancestor[j - pending_]) continue;
      float k_k, q_k;
      dot_both(key(pending_ + i), query(i), key(j), p_.key_dim, &k_k, &q_k);
      s_.seen.add(update_of(j), s_.decay[j], k_k, q_k);
    }
  }

  // What a node follows: its nearest ancestor, else the last pending record, else the checkpoint (-1).
  int64_t row_before(const bool* is_ancestor, int64_t i) const {
    while (--i >= 0 && !is_ancestor[i]) continue;
    return pending_ + i;
  }

  float* key(int64_t row) { return s_.keys.data() + row * p_.key_dim; }
  float* query(int64_t i) { return s_.queries.data() + i * p_.key_dim; }
  float* update_of(int64_t row) { return s_.updates.data() + row * p_.value_dim; }
  float* stored_key(int64_t record) {
    return p_.records_k + b_ * p_.k_batch + (record * p_.key_heads + key_head_) * p_.key_dim;
  }
  float* stored_update(int64_t record) {
    return p_.records_u + b_ * p_.u_batch + (record * p_.value_heads + h_) * p_.value_dim;
  }
  float* stored_decay(int64_t record) { return p_.records_decay + b_ * p_.decay_batch + record * p_.value_heads + h_; }

  static Scratch& scratch() {
    thread_local Scratch of_thread;  // memory is kept from head to head
    return of_thread;
  }

  const Verify& p_;
  const int64_t b_, h_, key_head_;
  int64_t pending_;
  Scratch& s_ = scratch();
};

// Everything of one fold; distances as above.
struct Fold {
  const float *state, *records_k, *records_u, *records_decay;
  const int64_t* num_pending;  // [B]
  float* folded;               // [B, Hv, K, V]
  int64_t batch, key_heads, value_heads, key_dim, value_dim;
  int64_t state_batch, k_batch, u_batch, decay_batch;
};

// folded = e^G S + sum e^(G - G_j) k_j u_j^T for one value head of one batch entry, row of S by row.
void fold(const Fold& p, int64_t b, int64_t h) {
  thread_local std::vector<float> weights;
  const int64_t pending = p.num_pending[b], key_head = h / (p.value_heads / p.key_heads), size = p.key_dim * p.value_dim;
  const float* state = p.state + b * p.state_batch + h * size;
  float* folded = p.folded + (b * p.value_heads + h) * size;
  if (pending == 0) {
    std::copy(state, state + size, folded);
    return;
  }
  const float* decay = p.records_decay + b * p.decay_batch + h;
  const float total = decay[(pending - 1) * p.value_heads];
  weights.resize(pending);
  for (int64_t j = 0; j < pending; ++j) weights[j] = std::exp(total - decay[j * p.value_heads]);
  const Vector all = _mm512_set1_ps(std::exp(total));
  for (int64_t i = 0; i < p.key_dim; ++i)
    for_vectors(p.value_dim, [&](int64_t c, auto lanes) {
      Vector s = _mm512_mul_ps(all, load(state + i * p.value_dim + c, lanes));
      for (int64_t j = 0; j < pending; ++j) {
        const float k = p.records_k[b * p.k_batch + (j * p.key_heads + key_head) * p.key_dim + i];
        const float* u = p.records_u + b * p.u_batch + (j * p.value_heads + h) * p.value_dim + c;
        s = _mm512_fmadd_ps(_mm512_set1_ps(weights[j] * k), load(u, lanes), s);
      }
      store(folded + i * p.value_dim + c, s, lanes);
    });
}

template <typename Body>
void for_heads(int64_t batch, int64_t heads, int num_threads, const Body& body) {
  parallel_for(batch * heads, 1, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) body(t / heads, t % heads);
  });
}

}  // namespace

extern "C" {

void delta_tree_verify(const Verify* p, int num_threads) {
  for_heads(p->batch, p->value_heads, num_threads, [&](int64_t b, int64_t h) { Head(*p, b, h).run(); });
}

void delta_fold(const Fold* p, int num_threads) {
  for_heads(p->batch, p->value_heads, num_threads, [&](int64_t b, int64_t h) { fold(*p, b, h); });
}

}  // extern "C"
