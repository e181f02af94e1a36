// A Mamba2 layer between its projections, over runs of known tokens, chunk by chunk.
#pragma once

#include <vector>

#include "causal_conv1d/run.h"
#include "mamba2/layer.h"
#include "ssd/chunk.h"
#include "ssd/exact.h"

namespace specmamba::mamba2 {

constexpr int64_t kHeadsAtOnce = 8;  // of one run, which share what their groups need; their states stay in L2

// Neighbouring heads of one run. T is the type of activations, Chunk that of their recurrence.
template <typename T, typename Chunk>
class HeadsOfRun {
 public:
  HeadsOfRun(const Inputs& inputs, const Weights& weights, const Runs& runs, int64_t b)
      : in_(inputs), w_(weights), runs_(runs), b_(b), S(w_.heads.key_dim), P(w_.heads.value_dim),
        convolved_(convolved_run(inputs, weights, runs, b)) {}

  void run(int64_t begin, int64_t end) {
    const int64_t length = runs_.lengths[b_], group = w_.heads.group();
    chunk_.begin(S, P);
    x_.resize(kChunk * P);
    for (int64_t first = 0; first < length; first += kChunk) {
      first_ = first, size_ = std::min(kChunk, length - first);
      convolved_.look_at(first, size_);
      for (int64_t h = begin; h < end; ++h) {
        if (h == begin || h % group == 0) look(h / group);
        head(h);
      }
    }
  }

  static ConvolvedRun<T> convolved_run(const Inputs& inputs, const Weights& weights, const Runs& runs, int64_t b) {
    T* window = static_cast<T*>(runs.windows) + runs.windows_of_rows[b] * runs.windows_slot;
    const T* mixed = static_cast<const T*>(inputs.mixed) + b * runs.tokens * inputs.mixed_token;
    const Convolution convolution{weights.conv, weights.conv_bias, weights.width};
    return {convolution, weights.heads.channels(), window, mixed, inputs.mixed_token};
  }

 private:
  void look(int64_t g) {
    const int64_t b = w_.inner() + g * S, c = b + w_.heads.key_heads * S;
    for (int64_t i = 0; i < size_; ++i) {
      convolved_.mix(i, b, S, chunk_.b(i));
      convolved_.mix(i, c, S, chunk_.c(i));
    }
    chunk_.look(size_);
  }

  void head(int64_t h) {
    for (int64_t i = 0; i < size_; ++i) {
      float *x = &x_[i * P], *u = chunk_.update(i);
      convolved_.mix(i, h * P, P, x);
      const float dt = step_size(in_, w_, token(i), h, T{});
      chunk_.log_decay(i) = dt * w_.negative_a[h];
      for_vectors(P, [&](int64_t at, auto lanes) { store(u + at, broadcast(dt) * load(x + at, lanes), lanes); });
    }
    chunk_.advance(runs_.states + runs_.states_of_rows[b_] * runs_.states_slot + h * S * P);
    for (int64_t i = 0; i < size_; ++i) finish<T>(in_, w_, token(i), h, chunk_.output(i), &x_[i * P]);
  }

  int64_t token(int64_t i) const { return b_ * runs_.tokens + first_ + i; }

  static Chunk& chunk() {
    thread_local Chunk of_thread;
    return of_thread;
  }
  static std::vector<float>& x() {
    thread_local std::vector<float> of_thread;
    return of_thread;
  }

  const Inputs& in_;
  const Weights& w_;
  const Runs& runs_;
  const int64_t b_, S, P;
  int64_t first_, size_;  // of the chunk
  ConvolvedRun<T> convolved_;
  Chunk& chunk_ = chunk();
  std::vector<float>& x_ = x();  // [C, P], of the current head
};

template <typename T, typename Chunk>
void extend_runs(const Inputs& in, const Weights& w, const Runs& runs, int num_threads) {
  const int64_t heads = w.heads.value_heads, wanted = runs.batch * heads / (4 * std::max(num_threads, 1));
  const int64_t size = std::clamp<int64_t>(wanted, 1, kHeadsAtOnce), parts = (heads + size - 1) / size;
  parallel_for(runs.batch * parts, 1, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const int64_t begin = t % parts * size;
      HeadsOfRun<T, Chunk>(in, w, runs, t / parts).run(begin, std::min(begin + size, heads));
    }
  });
  // all heads read the window before it moves
  for (int64_t b = 0; b < runs.batch; ++b) {
    HeadsOfRun<T, Chunk>::convolved_run(in, w, runs, b).move_window(runs.lengths[b]);
    T* const out = static_cast<T*>(in.out) + b * runs.tokens * w.inner();
    std::fill(out + runs.lengths[b] * w.inner(), out + runs.tokens * w.inner(), T{});
  }
  for_norms(w, runs.batch * runs.tokens, num_threads, [&](int64_t token, int64_t part) {
    if (token % runs.tokens < runs.lengths[token / runs.tokens]) norm_part<T>(in, w, token, part);
  });
}

template <typename T>
void extend(const Inputs& in, const Weights& w, const Runs& runs, int num_threads) {
  runs.is_exact ? extend_runs<T, ExactGroupChunk>(in, w, runs, num_threads)
                : extend_runs<T, GroupChunk>(in, w, runs, num_threads);
}

}  // namespace specmamba::mamba2
