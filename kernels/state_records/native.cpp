// Folds of pending records into checkpoints; reference.py specifies them.
#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.h"
#include "replayable.h"
#include "state_records/exact.h"
#include "state_records/row_folds.h"
#include "state_records/state.h"

namespace {

using namespace specmamba;

// Operands of one fold. Strides are in elements; dimensions without one are contiguous. `folded` may be the state
// itself.
struct Fold {
  const float *state, *records_k, *records_u, *records_decay;  // [B, Hv, K, V] [B, R, Hk, K] [B, R, Hv, V] [B, R, Hv, D]
  const int64_t* num_pending;                                  // [B]
  float* folded;                                               // [B, Hv, K, V]
  int64_t batch, key_heads, value_heads, key_dim, value_dim, decay_dim;  // D: 1, or K: by key channel
  int64_t state_batch, k_batch, u_batch, decay_batch, folded_batch;  // from one batch entry to the next
  int64_t is_exact;  // one record after the other: exact.h
};

// One head's records in contiguous memory; keys are multiplied by the decay from their record to the last one.
struct FoldedRecords {
  int64_t count = 0;
  std::vector<float> keys, updates;  // [count, key_dim], [count, value_dim]
  std::vector<float> whole_decay;    // [key_dim], of all records

  void gather(const Fold& p, int64_t b, int64_t h) {
    const int64_t K = p.key_dim, V = p.value_dim, key_head = h / (p.value_heads / p.key_heads);
    const float *k = p.records_k + b * p.k_batch + key_head * K, *u = p.records_u + b * p.u_batch + h * V;
    const int64_t D = p.decay_dim;
    const float* decay = p.records_decay + b * p.decay_batch + h * D;
    count = p.num_pending[b];
    keys.resize(count * K);
    updates.resize(count * V);
    whole_decay.resize(K);
    behind_.assign(D, 0.0f);
    for (int64_t j = count - 1; j >= 0; --j) {
      const float* k_j = k + j * p.key_heads * K;
      weigh(D, &keys[j * K], K, [&](int64_t i) { return k_j[i]; });
      for (int64_t i = 0; i < D; ++i) behind_[i] += decay[j * p.value_heads * D + i];
      std::copy_n(u + j * p.value_heads * V, V, &updates[j * V]);
    }
    weigh(D, whole_decay.data(), K, [](int64_t) { return 1.0f; });
  }

 private:
  // y[i] = x(i) times the decay behind.
  template <typename X>
  void weigh(int64_t D, float* y, int64_t K, const X& x) const {
    if (D == 1) {
      const float weight = std::exp(behind_[0]);
      for (int64_t i = 0; i < K; ++i) y[i] = weight * x(i);
    } else {
      for_vectors(K, [&](int64_t i, auto lanes) { store(y + i, exp(load(&behind_[i], lanes)), lanes); });
      for (int64_t i = 0; i < K; ++i) y[i] *= x(i);
    }
  }

  std::vector<float> behind_;  // [D], log decay from record j to the last one
};

// folded = e^G S + sum k_j u_j^T on Rows rows of S from row i on and kLanes Vectors columns.
template <int Rows, int Vectors, typename Lanes>
void fold_tile(const FoldedRecords& records, const float* state, float* folded, int64_t i, int64_t K, int64_t V,
               int64_t column, Lanes lanes) {
  Vector sums[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    const Vector decay = broadcast(records.whole_decay[i + r]);
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c)
      sums[r][c] = decay * load(state + (i + r) * V + column + c * kLanes, lanes);
  }
  for (int64_t j = 0; j < records.count; ++j) {
    const float *k = &records.keys[j * K + i], *u = &records.updates[j * V + column];
    Vector x[Rows];
    for (int r = 0; r < Rows; ++r) x[r] = broadcast(k[r]);
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) {
      Vector u_j = load(u + c * kLanes, lanes);
      keep_in_register(u_j);  // as an operand in memory it would be loaded for every row
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) sums[r][c] = fma(x[r], u_j, sums[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) store(folded + (i + r) * V + column + c * kLanes, sums[r][c], lanes);
}

// As fold, one record after the other.
void fold_exactly(const Fold& p, int64_t b, int64_t h) {
  thread_local std::vector<float> factors;
  const int64_t K = p.key_dim, V = p.value_dim, D = p.decay_dim, count = p.num_pending[b];
  const int64_t key_head = h / (p.value_heads / p.key_heads);
  const float* state = p.state + b * p.state_batch + h * K * V;
  float* folded = p.folded + b * p.folded_batch + h * K * V;
  const float* decay = p.records_decay + b * p.decay_batch + h * D;
  factors.resize(count * D);
  for (int64_t j = 0; j < count; ++j) put_factors(decay + j * p.value_heads * D, D, &factors[j * D]);
  const ExactRecords records{p.records_k + b * p.k_batch + key_head * K, p.records_u + b * p.u_batch + h * V,
                             factors.data(), count, p.key_heads * K, p.value_heads * V, D, D == 1 ? 0 : 1};
  for_columns<kExactVectors>(V, [&](int64_t column, auto vectors, auto lanes) {
    add_records<decltype(vectors)::value>(records, state + column, V, folded + column, V, K, column, lanes);
  });
}

// One value head of one batch entry, some rows of S at a time. The order of the sums is the same for every shape.
void fold(const Fold& p, int64_t b, int64_t h) {
  if (p.is_exact) return fold_exactly(p, b, h);
  thread_local FoldedRecords records;
  constexpr int kRows = 2, kWidest = kRegisters / 4, kLineFloats = 16;
  const int64_t K = p.key_dim, V = p.value_dim;
  const float* state = p.state + b * p.state_batch + h * K * V;
  float* folded = p.folded + b * p.folded_batch + h * K * V;
  records.gather(p, b, h);
  int64_t i = 0;
  for (; i + kRows <= K; i += kRows) {
    // a tile has too much arithmetic for the next to begin early
    for (int64_t at = 0; at < kRows * V; at += kLineFloats)
      __builtin_prefetch(state + (i + 2 * kRows) * V + at);
    for_columns<kWidest>(V, [&](int64_t column, auto vectors, auto lanes) {
      fold_tile<kRows, decltype(vectors)::value>(records, state, folded, i, K, V, column, lanes);
    });
  }
  for (; i < K; ++i)
    for_columns<kWidest>(V, [&](int64_t column, auto vectors, auto lanes) {
      fold_tile<1, decltype(vectors)::value>(records, state, folded, i, K, V, column, lanes);
    });
}

// Rows that fold in place, in all layers. All buffers are contiguous.
struct RowFolds {
  float* states;                                  // [layers, slots, Hv, K, V]
  char *conv_inputs, *windows;                    // [layers, rows, W - 1 + R, C] [layers, slots, W - 1, C]
  const float *records_k, *records_u, *records_decay;  // [layers, rows, R, ...], as in Fold
  const int64_t *rows_of_batch, *slots_of_batch;  // [B]
  int64_t* num_pending;                           // [B]; 0 after the fold
  const bool* folds;                              // [B], or null: all rows fold
  int64_t batch, layers, slots, rows, capacity, window, input_bytes;  // input_bytes: of one entry of conv_inputs
  int64_t key_heads, value_heads, key_dim, value_dim, decay_dim;
  int64_t is_exact;  // as in Fold

  // The fold of one row in one layer.
  Fold of(int64_t layer, int64_t b) const {
    const int64_t row = layer * rows + rows_of_batch[b], slot = layer * slots + slots_of_batch[b];
    float* state = states + slot * value_heads * key_dim * value_dim;
    return {state,
            records_k + row * capacity * key_heads * key_dim,
            records_u + row * capacity * value_heads * value_dim,
            records_decay + row * capacity * value_heads * decay_dim,
            num_pending + b,
            state,
            1, key_heads, value_heads, key_dim, value_dim, decay_dim,
            0, 0, 0, 0, 0, is_exact};
  }
};

}  // namespace

extern "C" void fold_rows(const RowFolds* p, int num_threads) {
  for (int64_t b = 0; b < p->batch; ++b) {
    if (!is_folded(*p, b)) continue;
    const int64_t tasks = std::max<int64_t>(1, p->value_heads);  // a layer without heads has a window alone
    for_heads(p->layers, tasks, num_threads, [&](int64_t layer, int64_t h) {
      if (h < p->value_heads) fold(p->of(layer, b), 0, h);
      if (h == 0) move_window(*p, layer, b);
    });
    p->num_pending[b] = 0;
  }
}

SPECMAMBA_REPLAYABLE(fold_rows)

extern "C" void fold_records(const Fold* p, int num_threads) {
  for_heads(p->batch, p->value_heads, num_threads, [&](int64_t b, int64_t h) { fold(*p, b, h); });
}

SPECMAMBA_REPLAYABLE(fold_records)
