// The recurrence of a vector of channels: one entry of the state after the other, each in a register along all records.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "rowwise/heads.h"
#include "state_records/chunk.h"
#include "state_records/operands.h"
#include "state_records/paths.h"

namespace specmamba::mamba1 {

constexpr int64_t kAhead = 64;  // channels; states are read from memory, at more places than the processor foresees

// Strides are in elements; dimensions without one are contiguous. Activations are float32 or bfloat16.
struct Inputs {
  const float* x;                   // [B, N, C], convolved
  const void *dt, *b, *c, *gate;    // [B, N, C] [B, N, M] [B, N, M] [B, N, C]
  void* out;                        // [B, N, C]
  int64_t dt_token, b_token, c_token, gate_token;
};

struct Weights {
  const float *conv, *conv_bias, *dt_bias, *rates, *skip;  // [W, C] [C] or null, [C] [M, C] [C]
  int64_t width, state_dim, channels;
};

// The first records of a row: b of all entries, u and dt of some channels; records of u and dt lie `distance` apart.
struct Records {
  const float *b, *u, *dt;  // [R, M] [R, ..] twice
  int64_t count, distance;
};

// 2^x for x <= 0, within 3 units in the last place; 0 where decay_of is 0, NaN for NaN. By the polynomial of degree 6
// through Chebyshev's points, |r| <= 1/2.
inline Vector power_of_two(Vector x) {
  const Vector n = whole(x), r = x - n;
  Vector p = broadcast(1.546144472e-4f);
  for (const float c : {1.340042818e-3f, 9.618056678e-3f, 5.550327227e-2f, 2.402265092e-1f, 6.931472067e-1f, 1.0f})
    p = fma(p, r, broadcast(c));
  return chosen(is_less(x, broadcast(-83.0482f)), zero(), scaled(p, n));
}

// A by which steps are multiplied to powers of two: one multiplication for an entry, instead of one for each step.
inline Vector by_powers(Vector rate) { return rate * broadcast(1.44269504088896341f); }

// e^(A dt) s + b u
inline Vector step(Vector rate, Vector dt, Vector s, float b, Vector u) {
  return fma(power_of_two(rate * dt), s, broadcast(b) * u);
}

// Entry m of the states of a vector of channels, after all records.
inline Vector after(const Records& records, Vector rate, Vector s, int64_t m, int64_t M) {
  const float* b = records.b + m;
  for (int64_t j = 0; j < records.count; ++j) {
    const int64_t at = j * records.distance;
    s = step(rate, load(records.dt + at, All{}), s, b[j * M], load(records.u + at, All{}));
  }
  return s;
}

// Copies u and dt of the channels from `at` on to `room`, [2, count, kLanes]: rows of the records lie as far apart as those
// of states, and would share a few sets of the L1 cache with them.
template <typename Lanes>
inline Records gathered(const Records& records, int64_t at, float* room, Lanes lanes) {
  float* dt = room + records.count * kLanes;
  for (int64_t j = 0; j < records.count; ++j) {
    store(room + j * kLanes, load(records.u + j * records.distance + at, lanes), All{});
    store(dt + j * kLanes, load(records.dt + j * records.distance + at, lanes), All{});
  }
  return {records.b, room, dt, records.count, kLanes};
}

// Advances the states of the channels from `at` on over records; `room` has 2 kLanes numbers for each.
template <typename Lanes>
inline void fold_vector(const Records& records, const float* rates, float* state, int64_t M, int64_t C, int64_t at,
                        float* room, Lanes lanes) {
  const Records own = gathered(records, at, room, lanes);
  for (int64_t m = 0; m < M; ++m) {
    float* s = state + m * C + at;
    __builtin_prefetch(s + kAhead, 1);
    store(s, after(own, by_powers(load(rates + m * C + at, lanes)), load(s, lanes), m, M), lanes);
  }
}

// One row of a verify. T is the type of activations.
template <typename T>
class RowScan {
 public:
  void begin(const Inputs& in, const Weights& w, const Buffers& buffers, const Trees& trees, int64_t b) {
    const int64_t row = trees.rows[b], M = w.state_dim;
    in_ = &in, w_ = &w, first_ = trees.first(b), nodes_ = trees.count(b);
    k_ = buffers.k + row * buffers.k_row, new_k_ = k_ + trees.node_offset * M;
    u_ = buffers.u + row * buffers.u_row, new_u_ = u_ + trees.node_offset * w.channels;
    dt_ = buffers.decay + row * buffers.decay_row, new_dt_ = dt_ + trees.node_offset * w.channels;
    state_ = buffers.states + trees.slots[b] * buffers.states_slot;
    pending_ = trees.num_pending == nullptr ? trees.node_offset : trees.num_pending[b];
    find_parents(trees.ancestors + b * trees.ancestors_batch, trees.nodes);
    b_.resize(nodes_ * M), c_.resize(nodes_ * M), vectors_.resize((4 * nodes_ + 2 * pending_) * kLanes);
    for (int64_t i = 0; i < nodes_; ++i) {
      widen(static_cast<const T*>(in.b) + (first_ + i) * in.b_token, M, &b_[i * M]);
      widen(static_cast<const T*>(in.c) + (first_ + i) * in.c_token, M, &c_[i * M]);
    }
  }

  // Stores the nodes' b, which all channels share. Values that are not finite are stored as 0, here and below.
  void keep_keys() const { store_finite(b_.data(), new_k_, nodes_ * w_->state_dim); }

  // The channels from `channel` on.
  template <typename Lanes>
  void run(int64_t channel, Lanes lanes) {
    float *u = vectors_.data(), *dt = u + nodes_ * kLanes, *y = dt + nodes_ * kLanes;
    for (int64_t i = 0; i < nodes_; ++i) prepare(i, channel, u + i * kLanes, dt + i * kLanes, lanes);
    if (!is_chain_)
      recur(channel, u, dt, y, lanes);
    else
      recur_chains(channel, u, dt, y, lanes);
    for (int64_t i = 0; i < nodes_; ++i) finish(i, channel, load(y + i * kLanes, All{}), lanes);
  }

 private:
  static void widen(const T* x, int64_t size, float* y) {
    for_vectors(size, [&](int64_t i, auto lanes) { store(y + i, load(x + i, lanes), lanes); });
  }

  void find_parents(const bool* ancestors, int64_t distance) {
    parents_.resize(nodes_), is_chain_ = true;
    for (int64_t i = 0; i < nodes_; ++i) {
      parents_[i] = parent_of(ancestors + i * distance, i);
      is_chain_ = is_chain_ && parents_[i] == i - 1;
    }
  }

  template <typename Lanes>
  void prepare(int64_t i, int64_t channel, float* u, float* dt, Lanes lanes) const {
    const int64_t C = w_->channels, token = first_ + i;
    const T* given = static_cast<const T*>(in_->dt) + token * in_->dt_token + channel;
    const Vector step = softplus(load(given, lanes) + load(w_->dt_bias + channel, lanes));
    const Vector update = step * load(in_->x + token * C + channel, lanes);
    store(u, update, All{}), store(dt, step, All{});
    store(new_u_ + i * C + channel, finite_or_zero(update), lanes);
    store(new_dt_ + i * C + channel, finite_or_zero(step), lanes);
  }

  // Short chains have all they need in registers.
  template <typename Lanes>
  void recur_chains(int64_t channel, const float* u, const float* dt, float* y, Lanes lanes) {
    switch (nodes_) {
      case 0: return;
      case 1: return recur_chain<1>(channel, u, dt, y, lanes);
      case 2: return recur_chain<2>(channel, u, dt, y, lanes);
      case 3: return recur_chain<3>(channel, u, dt, y, lanes);
      case 4: return recur_chain<4>(channel, u, dt, y, lanes);
      default: return recur(channel, u, dt, y, lanes);
    }
  }

  // y = c S along a chain of Nodes, entry by entry. Copies of members are not read again after each store.
  template <int Nodes, typename Lanes>
  void recur_chain(int64_t channel, const float* u, const float* dt, float* y, Lanes lanes) {
    const int64_t M = w_->state_dim, C = w_->channels;
    const Records records = gathered({k_, u_, dt_, pending_, C}, channel, y + 2 * nodes_ * kLanes, lanes);
    const float *rates = w_->rates + channel, *checkpoint = state_ + channel, *b = b_.data(), *c = c_.data();
    Vector of_u[Nodes], of_dt[Nodes], of_y[Nodes];
    for (int i = 0; i < Nodes; ++i)
      of_u[i] = load(u + i * kLanes, All{}), of_dt[i] = load(dt + i * kLanes, All{}), of_y[i] = zero();
    for (int64_t m = 0; m < M; ++m) {
      __builtin_prefetch(checkpoint + m * C + kAhead);
      const Vector rate = by_powers(load(rates + m * C, lanes));
      Vector s = after(records, rate, load(checkpoint + m * C, lanes), m, M);
#pragma GCC unroll 4
      for (int i = 0; i < Nodes; ++i) {
        s = step(rate, of_dt[i], s, b[i * M + m], of_u[i]);
        of_y[i] = fma(broadcast(c[i * M + m]), s, of_y[i]);
      }
    }
    for (int i = 0; i < Nodes; ++i) store(y + i * kLanes, of_y[i], All{});
  }

  // y = c S along any tree; the states of its nodes' entries are in memory.
  template <typename Lanes>
  void recur(int64_t channel, const float* u, const float* dt, float* y, Lanes lanes) {
    const int64_t M = w_->state_dim, C = w_->channels, N = nodes_;
    const Records records = gathered({k_, u_, dt_, pending_, C}, channel, y + 2 * N * kLanes, lanes);
    const float *rates = w_->rates + channel, *checkpoint = state_ + channel, *b = b_.data(), *c = c_.data();
    const int64_t* parents = parents_.data();
    float* states = y + N * kLanes;
    std::fill_n(y, N * kLanes, 0.0f);
    for (int64_t m = 0; m < M; ++m) {
      __builtin_prefetch(checkpoint + m * C + kAhead);
      const Vector rate = by_powers(load(rates + m * C, lanes));
      const Vector root = after(records, rate, load(checkpoint + m * C, lanes), m, M);
      for (int64_t i = 0; i < N; ++i) {
        const Vector before = parents[i] < 0 ? root : load(states + parents[i] * kLanes, All{});
        const Vector s = step(rate, load(dt + i * kLanes, All{}), before, b[i * M + m], load(u + i * kLanes, All{}));
        store(states + i * kLanes, s, All{});
        store(y + i * kLanes, fma(broadcast(c[i * M + m]), s, load(y + i * kLanes, All{})), All{});
      }
    }
  }

  // y + D x, times silu(gate).
  template <typename Lanes>
  void finish(int64_t i, int64_t channel, Vector y, Lanes lanes) const {
    const int64_t C = w_->channels, token = first_ + i;
    const T* gate = static_cast<const T*>(in_->gate) + token * in_->gate_token + channel;
    const Vector v = fma(load(w_->skip + channel, lanes), load(in_->x + token * C + channel, lanes), y);
    store(static_cast<T*>(in_->out) + token * C + channel, v * silu(load(gate, lanes)), lanes);
  }

  const Inputs* in_;
  const Weights* w_;
  int64_t first_, nodes_, pending_;
  bool is_chain_;
  float *k_, *u_, *dt_, *new_k_, *new_u_, *new_dt_;
  const float* state_;
  std::vector<int64_t> parents_;
  std::vector<float> b_, c_;     // [N, M]
  std::vector<float> vectors_;  // of the current channels: [4, N, kLanes] u, dt, y and states, [2, pending, kLanes]
};

}  // namespace specmamba::mamba1
