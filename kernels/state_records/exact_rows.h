// What exact.h does with rows of a state: records are added, tokens are taken.
#pragma once

#include <limits>

#include "state_records/chunk.h"

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

// to = from, and then to = factor to + k u^T for one record after the other, on Rows rows of a state. `each_row(row, s)`
// gets the vectors of each finished row.
template <int Rows, int Vectors, typename Lanes, typename EachRow>
inline void add_records_to(const ExactRecords& records, const float* from, int64_t from_row, float* to, int64_t to_row,
                           int64_t row, int64_t column, Lanes lanes, const EachRow& each_row) {
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
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) store(to + (row + r) * to_row + c * kLanes, s[r][c], lanes);
    each_row(row + r, s[r]);
  }
}

// On all rows of some columns, from `column` on; `from` and `to` begin there, and may be the same.
template <int Vectors, typename Lanes, typename EachRow>
inline void add_records(const ExactRecords& records, const float* from, int64_t from_row, float* to, int64_t to_row,
                        int64_t rows, int64_t column, Lanes lanes, const EachRow& each_row) {
  int64_t i = 0;
  for (; i + 2 <= rows; i += 2) add_records_to<2, Vectors>(records, from, from_row, to, to_row, i, column, lanes, each_row);
  if (i < rows) add_records_to<1, Vectors>(records, from, from_row, to, to_row, i, column, lanes, each_row);
}

template <int Vectors, typename Lanes>
inline void add_records(const ExactRecords& records, const float* from, int64_t from_row, float* to, int64_t to_row,
                        int64_t rows, int64_t column, Lanes lanes) {
  add_records<Vectors>(records, from, from_row, to, to_row, rows, column, lanes, [](int64_t, const Vector*) {});
}

// A token of one head: what it is given, [K] or [V], and where its update and its output go.
struct ExactToken {
  const float *key, *query, *factors, *value;
  float *update, *output;
  float beta;
  int64_t factor_row;
};

// A row's part of k a S, where S is the state before the token: rows have to come in ascending order.
template <int Vectors>
inline void add_key_products(const ExactToken& x, int64_t row, const Vector* s, Vector* sums) {
  const Vector k = broadcast(x.key[row]), factor = broadcast(x.factors[row * x.factor_row]);
#pragma GCC unroll 8
  for (int c = 0; c < Vectors; ++c) sums[c] = fma(k, factor * s[c], sums[c]);
}

// All of k a S.
template <int Vectors, typename Lanes>
inline void sum_key_products(const ExactToken& x, const float* from, int64_t from_row, int64_t rows, Vector* sums,
                             Lanes lanes) {
#pragma GCC unroll 8
  for (int c = 0; c < Vectors; ++c) sums[c] = zero();
  for (int64_t i = 0; i < rows; ++i) {
    Vector s[Vectors];
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) s[c] = load(from + i * from_row + c * kLanes, lanes);
    add_key_products<Vectors>(x, i, s, sums);
  }
}

// What becomes of S' = a S + k u^T, besides the output q S'.
struct Nothing {
  static constexpr bool kStores = false, kSums = false;
};
struct Stored {
  static constexpr bool kStores = true, kSums = false;
};
struct StoredAndSummed {  // it is also multiplied with the key of the token that comes next
  static constexpr bool kStores = true, kSums = true;
};

// Take a token: with S = from, to = S' and output = q S'. With the delta rule u = beta (v - k a S), and `sums` are k a S
// when this begins, and those of `next` when it ends; else u is given. `ahead` are rows of a state that is read later.
template <bool IsDelta, typename Then, int Vectors, typename Lanes>
inline void take_token(const ExactToken& x, const ExactToken& next, const float* from, int64_t from_row, float* to,
                       int64_t to_row, int64_t rows, int64_t column, const float* ahead, int64_t ahead_row, Vector* sums,
                       Lanes lanes) {
  Vector u[Vectors], out[Vectors];
#pragma GCC unroll 8
  for (int c = 0; c < Vectors; ++c) {
    if constexpr (IsDelta) {
      u[c] = broadcast(x.beta) * (load(x.value + column + c * kLanes, lanes) - sums[c]);
      store(x.update + column + c * kLanes, u[c], lanes);
    } else {
      u[c] = load(x.update + column + c * kLanes, lanes);
    }
    out[c] = sums[c] = zero();
  }
  for (int64_t i = 0; i < rows; ++i) {
    const Vector k = broadcast(x.key[i]), q = broadcast(x.query[i]), factor = broadcast(x.factors[i * x.factor_row]);
    Vector s[Vectors];
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) {
      s[c] = fma(k, u[c], factor * load(from + i * from_row + c * kLanes, lanes));
      if constexpr (Then::kStores) store(to + i * to_row + c * kLanes, s[c], lanes);
      out[c] = fma(q, s[c], out[c]);
    }
    if constexpr (Then::kSums) add_key_products<Vectors>(next, i, s, sums);
    if (ahead != nullptr)
#pragma GCC unroll 8
      for (int c = 0; c < Vectors; ++c) __builtin_prefetch(ahead + i * ahead_row + c * kLanes, 0, 2);
  }
#pragma GCC unroll 8
  for (int c = 0; c < Vectors; ++c) store(x.output + column + c * kLanes, out[c], lanes);
}

}  // namespace specmamba
