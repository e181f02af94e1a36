// The selective scan over draft trees and over runs, and the fold of its records; README.md describes it, reference.py
// specifies it. Channels do not read each other, so lanes are channels, and a task has some of them in one row.
#include <algorithm>
#include <vector>

#include "parallel.h"
#include "replayable.h"
#include "state_records/chunk.h"
#include "state_records/operands.h"
#include "state_records/paths.h"

namespace {

using namespace specmamba;

constexpr int64_t kChannels = 128;      // of a task: rows of memory a task reads are not too short, its state is in L1
constexpr int64_t kEntries = 1 << 13;  // entries of states that a thread advances before it claims more

// Strides are in elements; dimensions without one are contiguous.
struct Inputs {
  const float *c, *b, *u, *dt;  // [B, N, M] [B, N, M] [B, N, C] [B, N, C]
  const float* rates;           // [M, C]
  float* out;                   // [B, N, C]
  int64_t c_token, b_token, u_token, dt_token;
  int64_t state_dim, channels;
};

// Advances states over records; `folded` does not overlap them.
struct Fold {
  const float *state, *records_b, *records_u, *records_dt, *rates;  // [B, M, C] [B, R, M] [B, R, C] twice, [B, M, C]
  const int64_t* num_pending;                                       // [B]
  float* folded;                                                    // [B, M, C]
  int64_t batch, state_dim, channels;
  int64_t state_batch, b_batch, u_batch, dt_batch, rates_batch, folded_batch;  // from one batch entry to the next
};

// Memory of a thread, at the start of a line.
float* scratch(int64_t size) {
  constexpr uintptr_t kLine = 64;
  thread_local std::vector<float> of_thread;
  if (of_thread.size() < size + kLine / sizeof(float)) of_thread.resize(size + kLine / sizeof(float));
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(of_thread.data()) + kLine - 1) / kLine * kLine);
}

// y [M, kLanes] = a vector of channels of x [M, C]; lanes that there are not are 0, and stay 0.
template <typename Lanes>
inline void gather(const float* x, int64_t M, int64_t C, float* y, Lanes lanes) {
  for (int64_t m = 0; m < M; ++m) store(y + m * kLanes, load(x + m * C, lanes), All{});
}

template <typename Lanes>
inline void scatter(const float* x, int64_t M, int64_t C, float* y, Lanes lanes) {
  for (int64_t m = 0; m < M; ++m) store(y + m * C, load(x + m * kLanes, All{}), lanes);
}

// after = e^(A dt) before + b u for a vector of channels; `after` may be `before`. Returns c after, where it is read.
template <bool IsRead>
inline Vector step(int64_t M, const float* rates, const float* before, float* after, const float* b, Vector u,
                   Vector dt, const float* c) {
  Vector sum = zero();
  for (int64_t m = 0; m < M; ++m) {
    const Vector decay = decay_of(load(rates + m * kLanes, All{}) * dt);
    const Vector s = fma(decay, load(before + m * kLanes, All{}), broadcast(b[m]) * u);
    store(after + m * kLanes, s, All{});
    if constexpr (IsRead) sum = fma(broadcast(c[m]), s, sum);
  }
  return sum;
}

// state [M, kLanes] after the first `count` records; u and dt begin at its channels, b has all of M.
template <typename Lanes>
inline void advance(int64_t M, int64_t C, const float* rates, float* state, const float* b, const float* u,
                    const float* dt, int64_t count, Lanes lanes) {
  for (int64_t j = 0; j < count; ++j)
    step<false>(M, rates, state, state, b + j * M, load(u + j * C, lanes), load(dt + j * C, lanes), nullptr);
}

// Calls body(b, first, size) for all runs of kChannels channels in all rows.
template <typename Body>
void for_blocks(int64_t batch, int64_t steps, int64_t M, int64_t C, int num_threads, const Body& body) {
  const int64_t blocks = (C + kChannels - 1) / kChannels;
  const int64_t entries = std::max<int64_t>(1, steps) * M * std::min(C, kChannels);
  parallel_for(batch * blocks, std::max<int64_t>(1, kEntries / entries), num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t first = t % blocks * kChannels;
      body(t / blocks, first, std::min(kChannels, C - first));
    }
  });
}

// The parents of a row's nodes; -1 for those without one.
const int64_t* parents_of(const Trees& trees, int64_t b) {
  thread_local std::vector<int64_t> of_thread;
  const int64_t count = trees.count(b);
  const bool* ancestors = trees.ancestors + b * trees.ancestors_batch;
  of_thread.resize(count);
  for (int64_t i = 0; i < count; ++i) of_thread[i] = parent_of(ancestors + i * trees.nodes, i);
  return of_thread.data();
}

// A vector of channels of one row: the states of all nodes are in scratch memory, [N, M, kLanes].
template <typename Lanes>
void verify(const Inputs& in, const Buffers& buffers, const Trees& trees, const int64_t* parents, int64_t b,
            int64_t channel, Lanes lanes) {
  const int64_t M = in.state_dim, C = in.channels, size = M * kLanes, count = trees.count(b), row = trees.rows[b];
  const float* k = buffers.k + row * buffers.k_row;
  float* kept_u = buffers.u + row * buffers.u_row + channel;
  float* kept_dt = buffers.decay + row * buffers.decay_row + channel;
  float *rates = scratch((2 + count) * size), *root = rates + size, *nodes = root + size;
  gather(in.rates + channel, M, C, rates, lanes);
  gather(buffers.states + trees.slots[b] * buffers.states_slot + channel, M, C, root, lanes);
  const int64_t pending = trees.num_pending == nullptr ? trees.node_offset : trees.num_pending[b];
  advance(M, C, rates, root, k, kept_u, kept_dt, pending, lanes);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = b * trees.nodes + i, record = trees.node_offset + i;
    const Vector u = load(in.u + token * in.u_token + channel, lanes);
    const Vector dt = load(in.dt + token * in.dt_token + channel, lanes);
    const float *of_b = in.b + token * in.b_token, *of_c = in.c + token * in.c_token;
    const float* before = parents[i] < 0 ? root : nodes + parents[i] * size;
    const Vector y = step<true>(M, rates, before, nodes + i * size, of_b, u, dt, of_c);
    store(in.out + token * C + channel, y, lanes);
    store(kept_u + record * C, finite_or_zero(u), lanes);
    store(kept_dt + record * C, finite_or_zero(dt), lanes);
  }
}

// The nodes' b, which all channels share.
void keep_keys(const Inputs& in, const Buffers& buffers, const Trees& trees, int64_t b) {
  float* k = buffers.k + trees.rows[b] * buffers.k_row + trees.node_offset * in.state_dim;
  for (int64_t i = 0; i < trees.count(b); ++i)
    store_finite(in.b + (b * trees.nodes + i) * in.b_token, k + i * in.state_dim, in.state_dim);
}

// Outputs 0 for the tokens from `first` on, which are padding.
void clear(const Inputs& in, int64_t b, int64_t first, int64_t tokens, int64_t channel, int64_t size) {
  for (int64_t t = first; t < tokens; ++t) std::fill_n(in.out + (b * tokens + t) * in.channels + channel, size, 0.0f);
}

// Some channels of one run, token by token: their rates and their state are in scratch memory, [M, kLanes] each vector.
void extend(const Inputs& in, const Runs& runs, int64_t b, int64_t first, int64_t size) {
  const int64_t M = in.state_dim, C = in.channels, room = (size + kLanes - 1) / kLanes * kLanes * M;
  float *state = runs.states + runs.states_of_rows[b] * runs.states_slot + first, *rates = scratch(2 * room);
  float* current = rates + room;
  for_vectors(size, [&](int64_t i, auto lanes) {
    gather(in.rates + first + i, M, C, rates + i * M, lanes);
    gather(state + i, M, C, current + i * M, lanes);
  });
  for (int64_t t = 0; t < runs.lengths[b]; ++t) {
    const int64_t token = b * runs.tokens + t;
    const float *of_b = in.b + token * in.b_token, *of_c = in.c + token * in.c_token;
    const float *u = in.u + token * in.u_token + first, *dt = in.dt + token * in.dt_token + first;
    for_vectors(size, [&](int64_t i, auto lanes) {
      float* s = current + i * M;
      const Vector y = step<true>(M, rates + i * M, s, s, of_b, load(u + i, lanes), load(dt + i, lanes), of_c);
      store(in.out + token * C + first + i, y, lanes);
    });
  }
  for_vectors(size, [&](int64_t i, auto lanes) { scatter(current + i * M, M, C, state + i, lanes); });
}

template <typename Lanes>
void fold(const Fold& p, int64_t b, int64_t channel, Lanes lanes) {
  const int64_t M = p.state_dim, C = p.channels;
  float *rates = scratch(2 * M * kLanes), *state = rates + M * kLanes;
  gather(p.rates + b * p.rates_batch + channel, M, C, rates, lanes);
  gather(p.state + b * p.state_batch + channel, M, C, state, lanes);
  const float *u = p.records_u + b * p.u_batch + channel, *dt = p.records_dt + b * p.dt_batch + channel;
  advance(M, C, rates, state, p.records_b + b * p.b_batch, u, dt, p.num_pending[b], lanes);
  scatter(state, M, C, p.folded + b * p.folded_batch + channel, lanes);
}

}  // namespace

extern "C" {

void selective_scan_tree_verify(const Inputs* in, const Buffers* buffers, const Trees* trees, int num_threads) {
  const int64_t M = in->state_dim, C = in->channels;
  for_blocks(trees->batch, trees->nodes, M, C, num_threads, [&](int64_t b, int64_t first, int64_t size) {
    const int64_t* parents = parents_of(*trees, b);
    for_vectors(size, [&](int64_t i, auto lanes) { verify(*in, *buffers, *trees, parents, b, first + i, lanes); });
    if (first == 0) keep_keys(*in, *buffers, *trees, b);
    clear(*in, b, trees->count(b), trees->nodes, first, size);
  });
}

void selective_scan_extend(const Inputs* in, const Runs* runs, int num_threads) {
  const int64_t M = in->state_dim, C = in->channels;
  for_blocks(runs->batch, runs->tokens, M, C, num_threads, [&](int64_t b, int64_t first, int64_t size) {
    if (runs->lengths[b] > 0) extend(*in, *runs, b, first, size);
    clear(*in, b, runs->lengths[b], runs->tokens, first, size);
  });
}

void selective_scan_fold(const Fold* p, int num_threads) {
  const int64_t M = p->state_dim, C = p->channels;
  for_blocks(p->batch, p->num_pending[0], M, C, num_threads, [&](int64_t b, int64_t first, int64_t size) {
    for_vectors(size, [&](int64_t i, auto lanes) { fold(*p, b, first + i, lanes); });
  });
}

}  // extern "C"

SPECMAMBA_REPLAYABLE(selective_scan_tree_verify)
SPECMAMBA_REPLAYABLE(selective_scan_extend)
SPECMAMBA_REPLAYABLE(selective_scan_fold)
