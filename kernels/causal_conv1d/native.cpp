// The causal convolution over draft trees and over runs; README.md describes it, reference.py specifies it.
#include <algorithm>
#include <vector>

#include "causal_conv1d/taps.h"
#include "parallel.h"
#include "replayable.h"
#include "state_records/operands.h"

namespace {

using namespace specmamba;

constexpr int64_t kChannels = 256, kTokens = 32;  // of one part of the work, whose inputs stay in a core's cache

// Strides are in elements; dimensions without one are contiguous.
struct Inputs {
  const void* x;                   // [B, N, C], float32 or bfloat16
  const float *conv, *conv_bias;  // [W, C] [C], or null
  float* out;                      // [B, N, C]
  int64_t x_token, width, channels;

  Convolution convolution() const { return {conv, conv_bias, width}; }
};

// Calls body(b, first, size) for all parts of the channels of all rows.
template <typename Body>
void for_parts(int64_t batch, int64_t tokens, int64_t channels, int num_threads, const Body& body) {
  const int64_t parts = (channels + kChannels - 1) / kChannels;
  parallel_for(batch * parts, std::max<int64_t>(1, kTokens / std::max<int64_t>(1, tokens)), num_threads,
               [&](int64_t begin, int64_t end) {
                 for (int64_t t = begin; t < end; ++t) {
                   const int64_t first = t % parts * kChannels;
                   body(t / parts, first, std::min(kChannels, channels - first));
                 }
               });
}

// out = channels [channel, channel + size) convolved over `taps`, which begin at these channels.
template <typename T>
void convolve_part(const Inputs& in, const T* const* taps, int64_t channel, int64_t size, float* out) {
  for_vectors(size, [&](int64_t i, auto lanes) {
    store(out + i, silu(weighted_sum(taps, i, in.convolution(), in.channels, channel + i, lanes)), lanes);
  });
}

template <typename T>
std::vector<T>& of_thread() {
  thread_local std::vector<T> memory;
  return memory;
}

// Outputs 0 for the tokens from `first` on, which are padding.
void clear(const Inputs& in, int64_t b, int64_t first, int64_t tokens, int64_t channel, int64_t size) {
  for (int64_t t = first; t < tokens; ++t) std::fill_n(in.out + (b * tokens + t) * in.channels + channel, size, 0.0f);
}

// Some channels of a row's nodes, whose inputs are kept first: a node's older ones may be those of other nodes.
template <typename T>
void verify(const Inputs& in, const Buffers& buffers, const Trees& trees, int64_t b, int64_t channel, int64_t size) {
  const int64_t count = trees.count(b), C = in.channels, begin = in.width - 1 + trees.node_offset;
  T* kept = static_cast<T*>(buffers.conv_inputs) + trees.rows[b] * buffers.conv_inputs_row + channel;
  const T* x = static_cast<const T*>(in.x) + channel;
  for (int64_t i = 0; i < count; ++i)
    std::copy_n(x + (b * trees.nodes + i) * in.x_token, size, kept + (begin + i) * C);
  std::vector<const T*>& taps = of_thread<const T*>();
  taps.resize(in.width);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = b * trees.nodes + i;
    for (int64_t w = 0; w < in.width; ++w) taps[w] = kept + trees.conv_index[token * in.width + w] * C;
    convolve_part(in, taps.data(), channel, size, in.out + token * C + channel);
  }
}

// Some channels of a run. Older inputs are a copy of the window, since that moves in the end.
template <typename T>
void extend(const Inputs& in, const Runs& runs, int64_t b, int64_t channel, int64_t size) {
  const int64_t before = in.width - 1, C = in.channels, length = runs.lengths[b];
  T* window = static_cast<T*>(runs.windows) + runs.windows_of_rows[b] * runs.windows_slot + channel;
  const T* x = static_cast<const T*>(in.x) + b * runs.tokens * in.x_token + channel;
  std::vector<T>& old = of_thread<T>();
  old.resize(before * size);
  for (int64_t w = 0; w < before; ++w) std::copy_n(window + w * C, size, old.data() + w * size);
  const auto input = [&](int64_t t) { return t < 0 ? old.data() + (before + t) * size : x + t * in.x_token; };
  std::vector<const T*>& taps = of_thread<const T*>();
  taps.resize(in.width);
  for (int64_t t = 0; t < length; ++t) {
    for (int64_t w = 0; w < in.width; ++w) taps[w] = input(t - before + w);
    convolve_part(in, taps.data(), channel, size, in.out + (b * runs.tokens + t) * C + channel);
  }
  for (int64_t w = 0; w < before; ++w) std::copy_n(input(length - before + w), size, window + w * C);
}

template <typename T>
void verify_all(const Inputs& in, const Buffers& buffers, const Trees& trees, int num_threads) {
  for_parts(trees.batch, trees.nodes, in.channels, num_threads, [&](int64_t b, int64_t first, int64_t size) {
    verify<T>(in, buffers, trees, b, first, size);
    clear(in, b, trees.count(b), trees.nodes, first, size);
  });
}

template <typename T>
void extend_all(const Inputs& in, const Runs& runs, int num_threads) {
  for_parts(runs.batch, runs.tokens, in.channels, num_threads, [&](int64_t b, int64_t first, int64_t size) {
    extend<T>(in, runs, b, first, size);
    clear(in, b, runs.lengths[b], runs.tokens, first, size);
  });
}

}  // namespace

extern "C" {

void causal_conv1d_tree_verify(const Inputs* in, const Buffers* buffers, const Trees* trees, int is_bfloat16,
                               int num_threads) {
  is_bfloat16 ? verify_all<BFloat16>(*in, *buffers, *trees, num_threads)
              : verify_all<float>(*in, *buffers, *trees, num_threads);
}

void causal_conv1d_extend(const Inputs* in, const Runs* runs, int is_bfloat16, int num_threads) {
  is_bfloat16 ? extend_all<BFloat16>(*in, *runs, num_threads) : extend_all<float>(*in, *runs, num_threads);
}

}  // extern "C"

SPECMAMBA_REPLAYABLE(causal_conv1d_tree_verify)
SPECMAMBA_REPLAYABLE(causal_conv1d_extend)
