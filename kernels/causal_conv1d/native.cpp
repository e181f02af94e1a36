// Causal depthwise convolution with SiLU over draft trees; see README.md and reference.py.
#include <vector>

#include "causal_conv1d/taps.h"
#include "parallel.h"

namespace {

using namespace specmamba;

constexpr int64_t kSerialBelow = 1 << 14;  // outputs that one thread has done before a second one begins

struct Nodes {
  const void* inputs;      // [batch, S, channels], rows of a batch entry contiguous
  const int64_t* index;    // [batch, nodes, width]
  const float* weight;     // [width, channels]
  float* y;                // [batch, nodes, channels]
  int64_t batch_stride;    // of inputs
  int64_t nodes, width, channels;
};

// Channels [first, last) of one node.
template <typename T>
void convolve_node(const Nodes& p, int64_t node, int64_t first, int64_t last) {
  thread_local std::vector<const T*> taps;
  taps.resize(p.width);
  const T* inputs = static_cast<const T*>(p.inputs) + node / p.nodes * p.batch_stride;
  for (int64_t w = 0; w < p.width; ++w) taps[w] = inputs + p.index[node * p.width + w] * p.channels;
  convolve(taps.data(), p.weight, p.width, p.channels, first, last - first, p.y + node * p.channels + first);
}

template <typename T>
void run(const Nodes& p, int64_t batch, int num_threads) {
  constexpr int64_t kBlock = 1024;  // channels of a task
  const int64_t blocks = (p.channels + kBlock - 1) / kBlock, tasks = batch * p.nodes * blocks;
  if (batch * p.nodes * p.channels < kSerialBelow) num_threads = 1;
  parallel_for(tasks, std::max<int64_t>(1, tasks / (8 * std::max(num_threads, 1))), num_threads,
               [&](int64_t begin, int64_t end) {
                 for (int64_t t = begin; t < end; ++t) {
                   const int64_t first = t % blocks * kBlock;
                   convolve_node<T>(p, t / blocks, first, std::min(first + kBlock, p.channels));
                 }
               });
}

}  // namespace

extern "C" void conv_tree_verify(const void* inputs, int is_bfloat16, const int64_t* index, const float* weight, float* y,
                                 int64_t batch, int64_t batch_stride, int64_t nodes, int64_t width, int64_t channels,
                                 int num_threads) {
  const Nodes p{inputs, index, weight, y, batch_stride, nodes, width, channels};
  is_bfloat16 ? run<BFloat16>(p, batch, num_threads) : run<float>(p, batch, num_threads);
}
