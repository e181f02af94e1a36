// Gated delta rule over draft trees, and the fold of pending records; see README.md and reference.py.
#include "gated_delta_rule/tree.h"

#include "parallel.h"

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

// All value heads of one key head of one batch entry.
void verify(const Verify& p, int64_t b, int64_t key_head) {
  thread_local HeadTree tree;
  const int64_t K = p.key_dim, V = p.value_dim, N = p.nodes, group = p.value_heads / p.key_heads;
  const int64_t pending = p.num_pending == nullptr ? p.node_offset : p.num_pending[b];
  float* records_k = p.records_k + b * p.k_batch + key_head * K;
  tree.begin(N, pending, K, V);
  for (int64_t j = 0; j < pending; ++j) std::copy_n(records_k + j * p.key_heads * K, K, tree.key(j));
  for (int64_t i = 0; i < N; ++i) {
    const int64_t at = ((b * N + i) * p.key_heads + key_head) * K;
    std::copy_n(p.k + at, K, tree.key(pending + i));
    std::copy_n(p.k + at, K, records_k + (p.node_offset + i) * p.key_heads * K);
    std::copy_n(p.q + at, K, tree.query(i));
  }
  tree.look(p.ancestors + b * p.ancestors_batch);
  const float* state = p.state + b * p.state_batch;
  for (int64_t h = key_head * group; h < (key_head + 1) * group; ++h) {
    float *records_u = p.records_u + b * p.u_batch + h * V, *records_decay = p.records_decay + b * p.decay_batch + h;
    for (int64_t j = 0; j < pending; ++j) {
      std::copy_n(records_u + j * p.value_heads * V, V, tree.update(j));
      tree.decay(j) = records_decay[j * p.value_heads];
    }
    for (int64_t i = 0; i < N; ++i) {
      const int64_t at = (b * N + i) * p.value_heads + h;
      std::copy_n(p.v + b * p.v_batch + i * p.v_node + h * V, V, tree.value(i));
      tree.log_decay(i) = p.g[at];
      tree.beta(i) = p.beta[at];
    }
    tree.verify({state + h * K * V, K, V});
    for (int64_t i = 0; i < N; ++i) {
      std::copy_n(tree.output(i), V, p.out + ((b * N + i) * p.value_heads + h) * V);
      std::copy_n(tree.update(pending + i), V, records_u + (p.node_offset + i) * p.value_heads * V);
      records_decay[(p.node_offset + i) * p.value_heads] = tree.decay(pending + i);
    }
  }
}

// Everything of one fold; distances as above. `folded` may be the state itself.
struct Fold {
  const float *state, *records_k, *records_u, *records_decay;
  const int64_t* num_pending;  // [B]
  float* folded;               // [B, Hv, K, V]
  int64_t batch, key_heads, value_heads, key_dim, value_dim;
  int64_t state_batch, k_batch, u_batch, decay_batch, folded_batch;
};

// One head's records, copied together; keys take the decay from their record to the last one.
struct FoldedRecords {
  int64_t count = 0;
  float whole_decay = 1.0f;
  std::vector<float> keys, updates;  // [count, key_dim], [count, value_dim]

  void gather(const Fold& p, int64_t b, int64_t h) {
    const int64_t K = p.key_dim, V = p.value_dim, key_head = h / (p.value_heads / p.key_heads);
    const float *k = p.records_k + b * p.k_batch + key_head * K, *u = p.records_u + b * p.u_batch + h * V;
    const float* decay = p.records_decay + b * p.decay_batch + h;
    count = p.num_pending[b];
    const float total = count == 0 ? 0.0f : decay[(count - 1) * p.value_heads];
    whole_decay = std::exp(total);
    keys.resize(count * K);
    updates.resize(count * V);
    for (int64_t j = 0; j < count; ++j) {
      const float weight = std::exp(total - decay[j * p.value_heads]);
      for (int64_t i = 0; i < K; ++i) keys[j * K + i] = weight * k[j * p.key_heads * K + i];
      std::copy_n(u + j * p.value_heads * V, V, &updates[j * V]);
    }
  }
};

// folded = e^G S + sum k_j u_j^T on Rows rows of S from row i on and 16 Vectors columns.
template <int Rows, int Vectors, typename Lanes>
void fold_tile(const FoldedRecords& records, const float* state, float* folded, int64_t i, int64_t K, int64_t V,
               int64_t column, Lanes lanes) {
  Vector sums[Rows][Vectors];
  const Vector decay = _mm512_set1_ps(records.whole_decay);
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c)
      sums[r][c] = _mm512_mul_ps(decay, load(state + (i + r) * V + column + c * kLanes, lanes));
  for (int64_t j = 0; j < records.count; ++j) {
    const float *k = &records.keys[j * K + i], *u = &records.updates[j * V + column];
    Vector x[Rows];
    for (int r = 0; r < Rows; ++r) x[r] = _mm512_set1_ps(k[r]);
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) {
      Vector u_j = load(u + c * kLanes, lanes);
      asm("" : "+v"(u_j));  // stays in a register: as an operand in memory it would be loaded for every row
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) sums[r][c] = _mm512_fmadd_ps(x[r], u_j, sums[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) store(folded + (i + r) * V + column + c * kLanes, sums[r][c], lanes);
}

// One value head of one batch entry, some rows of S at a time. The order of the sums is the same for every shape.
void fold(const Fold& p, int64_t b, int64_t h) {
  thread_local FoldedRecords records;
  constexpr int kRows = 2;
  const int64_t K = p.key_dim, V = p.value_dim;
  const float* state = p.state + b * p.state_batch + h * K * V;
  float* folded = p.folded + b * p.folded_batch + h * K * V;
  records.gather(p, b, h);
  int64_t i = 0;
  for (; i + kRows <= K; i += kRows) {
    for (int64_t at = 0; at < kRows * V; at += kLanes)  // a tile has too much arithmetic for the next to begin early
      _mm_prefetch(reinterpret_cast<const char*>(state + (i + 2 * kRows) * V + at), _MM_HINT_T0);
    for_columns<8>(V, [&](int64_t column, auto vectors, auto lanes) {
      fold_tile<kRows, decltype(vectors)::value>(records, state, folded, i, K, V, column, lanes);
    });
  }
  for (; i < K; ++i)
    for_columns<8>(V, [&](int64_t column, auto vectors, auto lanes) {
      fold_tile<1, decltype(vectors)::value>(records, state, folded, i, K, V, column, lanes);
    });
}

}  // namespace

extern "C" {

void delta_tree_verify(const Verify* p, int num_threads) {
  for_heads(p->batch, p->key_heads, num_threads, [&](int64_t b, int64_t h) { verify(*p, b, h); });
}

void delta_fold(const Fold* p, int num_threads) {
  for_heads(p->batch, p->value_heads, num_threads, [&](int64_t b, int64_t h) { fold(*p, b, h); });
}

}  // extern "C"
