// A gated short convolution over draft trees and over runs; README.md describes it, reference.py specifies it.
#include <algorithm>
#include <vector>

#include "causal_conv1d/taps.h"
#include "parallel.h"
#include "replayable.h"
#include "state_records/operands.h"

namespace {

using namespace specmamba;

constexpr int64_t kChannels = 256, kTokens = 32;  // of one part of the work, whose inputs stay in a core's cache

// Strides are in elements; dimensions without one are contiguous. Activations are float32 or bfloat16.
struct Inputs {
  const void *in_gate, *gate, *mixed;  // [B, N, C]
  void* out;                           // [B, N, C]
  int64_t in_gate_token, gate_token, mixed_token;
};

struct Weights {
  const float *conv, *conv_bias;  // [W, C] [C], or null
  int64_t width, channels;
};

// Some channels of a layer, from `first` on. T is the type of activations.
template <typename T>
class Part {
 public:
  Part(const Inputs& inputs, const Weights& weights, int64_t part)
      : in_(inputs), w_(weights), first_(part * kChannels), size_(std::min(kChannels, weights.channels - first_)) {
    taps_.resize(w_.width);
  }

  int64_t first() const { return first_; }
  int64_t size() const { return size_; }
  const T** taps() const { return taps_.data(); }

  // gated = in_gate * mixed of a token.
  void gate_input(int64_t token, T* gated) const {
    const T *gate = of_token(in_.in_gate, in_.in_gate_token, token), *mixed = of_token(in_.mixed, in_.mixed_token, token);
    for_vectors(size_, [&](int64_t i, auto lanes) { store(gated + i, load(gate + i, lanes) * load(mixed + i, lanes), lanes); });
  }

  // out = gate * convolution of a token over `taps`, which begin at these channels.
  void finish(int64_t token) const {
    const T* gate = of_token(in_.gate, in_.gate_token, token);
    T* out = static_cast<T*>(in_.out) + token * w_.channels + first_;
    const Convolution convolution{w_.conv, w_.conv_bias, w_.width};
    for_vectors(size_, [&](int64_t i, auto lanes) {
      const Vector sum = weighted_sum(taps_.data(), i, convolution, w_.channels, first_ + i, lanes);
      store(out + i, load(gate + i, lanes) * sum, lanes);
    });
  }

  void clear(int64_t token) const {
    std::fill_n(static_cast<T*>(in_.out) + token * w_.channels + first_, size_, T{});
  }

 private:
  const T* of_token(const void* tensor, int64_t distance, int64_t token) const {
    return static_cast<const T*>(tensor) + token * distance + first_;
  }

  const Inputs& in_;
  const Weights& w_;
  const int64_t first_, size_;
  std::vector<const T*>& taps_ = taps_of_thread();

  static std::vector<const T*>& taps_of_thread() {
    thread_local std::vector<const T*> taps;
    return taps;
  }
};

// Calls body(b, part) for all parts of all rows, in one thread where they are little work.
template <typename Body>
void for_parts(int64_t batch, int64_t tokens, const Weights& weights, int num_threads, const Body& body) {
  const int64_t parts = (weights.channels + kChannels - 1) / kChannels;
  parallel_for(batch * parts, std::max<int64_t>(1, kTokens / std::max<int64_t>(1, tokens)), num_threads,
               [&](int64_t first, int64_t last) {
                 for (int64_t t = first; t < last; ++t) body(t / parts, t % parts);
               });
}

template <typename T>
void verify(const Part<T>& part, const Weights& w, const Buffers& buffers, const Trees& trees, int64_t b) {
  T* kept = static_cast<T*>(buffers.conv_inputs) + trees.rows[b] * buffers.conv_inputs_row + part.first();
  const int64_t first = trees.first(b), count = trees.count(b), begin = w.width - 1 + trees.node_offset;
  const int64_t* index = trees.conv_index + b * trees.nodes * w.width;
  for (int64_t i = 0; i < count; ++i) part.gate_input(first + i, kept + (begin + i) * w.channels);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < w.width; ++j) part.taps()[j] = kept + index[i * w.width + j] * w.channels;
    part.finish(first + i);
  }
}

// The last W - 1 gated inputs stay in front of those of the next kTokens tokens, and are the window in the end.
template <typename T>
void extend(const Part<T>& part, const Weights& w, const Runs& runs, int64_t b) {
  thread_local std::vector<T> of_thread;
  const int64_t length = runs.lengths[b], before = w.width - 1, size = part.size(), row = b * runs.tokens;
  T* window = static_cast<T*>(runs.windows) + runs.windows_of_rows[b] * runs.windows_slot + part.first();
  of_thread.resize((before + kTokens) * size);
  T* gated = of_thread.data();
  for (int64_t j = 0; j < before; ++j) std::copy_n(window + j * w.channels, size, gated + j * size);
  for (int64_t at = 0; at < length; at += kTokens) {
    const int64_t count = std::min(kTokens, length - at);
    for (int64_t i = 0; i < count; ++i) {
      part.gate_input(row + at + i, gated + (before + i) * size);
      for (int64_t j = 0; j < w.width; ++j) part.taps()[j] = gated + (i + j) * size;
      part.finish(row + at + i);
    }
    std::copy_n(gated + count * size, before * size, gated);
  }
  for (int64_t j = 0; j < before; ++j) std::copy_n(gated + j * size, size, window + j * w.channels);
  for (int64_t t = length; t < runs.tokens; ++t) part.clear(row + t);
}

template <typename T>
void verify_all(const Inputs& inputs, const Weights& weights, const Buffers& buffers, const Trees& trees,
                int num_threads) {
  for_parts(trees.batch, trees.nodes, weights, num_threads, [&](int64_t b, int64_t part) {
    verify(Part<T>(inputs, weights, part), weights, buffers, trees, b);
  });
  const int64_t last = trees.num_packed();
  std::fill_n(static_cast<T*>(inputs.out) + last * weights.channels, (trees.tokens - last) * weights.channels, T{});
}

template <typename T>
void extend_all(const Inputs& inputs, const Weights& weights, const Runs& runs, int num_threads) {
  for_parts(runs.batch, runs.tokens, weights, num_threads,
            [&](int64_t b, int64_t part) { extend(Part<T>(inputs, weights, part), weights, runs, b); });
}

}  // namespace

extern "C" {

void short_conv_tree_verify(const Inputs* inputs, const Weights* weights, const Buffers* buffers, const Trees* trees,
                            int is_bfloat16, int num_threads) {
  is_bfloat16 ? verify_all<BFloat16>(*inputs, *weights, *buffers, *trees, num_threads)
              : verify_all<float>(*inputs, *weights, *buffers, *trees, num_threads);
}

void short_conv_extend(const Inputs* inputs, const Weights* weights, const Runs* runs, int is_bfloat16,
                       int num_threads) {
  is_bfloat16 ? extend_all<BFloat16>(*inputs, *weights, *runs, num_threads)
              : extend_all<float>(*inputs, *weights, *runs, num_threads);
}

}  // extern "C"

SPECMAMBA_REPLAYABLE(short_conv_tree_verify)
