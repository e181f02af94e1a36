// A gated delta net layer between its projections, over runs of known tokens, chunk by chunk.
#pragma once

#include "causal_conv1d/run.h"
#include "delta_net/layer.h"
#include "gated_delta_rule/channel_chunk.h"
#include "gated_delta_rule/chunk.h"
#include "parallel.h"
#include "state_records/exact.h"

namespace specmamba::delta_net {

// All work of one key head of one run. T is the type of activations, Chunk that of the head's decays.
template <typename T, typename Chunk>
class KeyHeadRun {
 public:
  KeyHeadRun(const Inputs& inputs, const Weights& weights, const Runs& runs, int64_t b, int64_t h)
      : in_(inputs), w_(weights), runs_(runs), b_(b), key_head_(h), K(w_.heads.key_dim), V(w_.heads.value_dim),
        convolved_(convolved_run(inputs, weights, runs, b)) {}

  void run() {
    const int64_t length = runs_.lengths[b_], group = w_.heads.group();
    chunk_.begin(K, V);
    for (int64_t first = 0; first < length; first += kChunk) {
      first_ = first, size_ = std::min(kChunk, length - first);
      convolved_.look_at(first, size_);
      keys_and_queries();
      for (int64_t h = key_head_ * group; h < (key_head_ + 1) * group; ++h) value_head(h);
    }
    const int64_t width = group * V;  // outputs of padding
    for (int64_t t = length; t < runs_.tokens; ++t)
      std::fill_n(out(t, key_head_ * group), width, T{});
  }

  static ConvolvedRun<T> convolved_run(const Inputs& inputs, const Weights& weights, const Runs& runs, int64_t b) {
    T* window = static_cast<T*>(runs.windows) + runs.windows_of_rows[b] * runs.windows_slot;
    const T* mixed = static_cast<const T*>(inputs.mixed) + b * runs.tokens * inputs.mixed_token;
    return {{weights.conv, nullptr, weights.width}, weights.heads.channels(), window, mixed, inputs.mixed_token};
  }

 private:
  void keys_and_queries() {
    const int64_t query = key_head_ * K, key = query + w_.heads.key_heads * K;
    const float eps = static_cast<float>(w_.unit_eps);
    for (int64_t i = 0; i < size_; ++i) {
      float *q = chunk_.query(i), *k = chunk_.key(i);
      convolved_.mix(i, query, K, q);
      convolved_.mix(i, key, K, k);
      make_unit(q, K, eps, query_factor(K), q);
      make_unit(k, K, eps, 1.0f, k);
    }
    chunk_.look(size_);
  }

  void value_head(int64_t h) {
    const int64_t channel = 2 * w_.heads.key_heads * K + h * V;
    for (int64_t i = 0; i < size_; ++i) {
      convolved_.mix(i, channel, V, chunk_.value(i));
      w_.put_log_decays(of_token(in_.a, in_.a_token, i) + h * w_.heads.decay_dim, h, chunk_.log_decays(i));
      const float b = to_float(of_token(in_.b, in_.b_token, i)[h]);
      chunk_.beta(i) = step_size_of(b, static_cast<float>(w_.step_scale));
    }
    chunk_.advance(runs_.states + runs_.states_of_rows[b_] * runs_.states_slot + h * K * V);
    for (int64_t i = 0; i < size_; ++i) {
      const T* gate = of_token(in_.gate, in_.gate_token, i) + h * V;
      w_.norm_and_gate(chunk_.output(i), gate, out(first_ + i, h));
    }
  }

  const T* of_token(const void* tensor, int64_t distance, int64_t i) const {
    return static_cast<const T*>(tensor) + (b_ * runs_.tokens + first_ + i) * distance;
  }
  T* out(int64_t token, int64_t h) const {
    return static_cast<T*>(in_.out) + ((b_ * runs_.tokens + token) * w_.heads.value_heads + h) * V;
  }

  static Chunk& chunk() {
    thread_local Chunk of_thread;
    return of_thread;
  }

  const Inputs& in_;
  const Weights& w_;
  const Runs& runs_;
  const int64_t b_, key_head_, K, V;
  int64_t first_, size_;  // of the chunk
  ConvolvedRun<T> convolved_;
  Chunk& chunk_ = chunk();
};

template <typename T, typename Chunk>
void extend_runs(const Inputs& inputs, const Weights& weights, const Runs& runs, int num_threads) {
  for_heads(runs.batch, weights.heads.key_heads, num_threads,
            [&](int64_t b, int64_t h) { KeyHeadRun<T, Chunk>(inputs, weights, runs, b, h).run(); });
  // all heads read the window before it moves
  for (int64_t b = 0; b < runs.batch; ++b)
    KeyHeadRun<T, Chunk>::convolved_run(inputs, weights, runs, b).move_window(runs.lengths[b]);
}

template <typename T>
void extend(const Inputs& inputs, const Weights& weights, const Runs& runs, int num_threads) {
  const bool by_channel = weights.heads.decay_dim != 1;
  if (runs.is_exact)
    by_channel ? extend_runs<T, ExactChunk<true, true>>(inputs, weights, runs, num_threads)
               : extend_runs<T, ExactChunk<true, false>>(inputs, weights, runs, num_threads);
  else
    by_channel ? extend_runs<T, ChannelChunk>(inputs, weights, runs, num_threads)
               : extend_runs<T, HeadChunk>(inputs, weights, runs, num_threads);
}

}  // namespace specmamba::delta_net
