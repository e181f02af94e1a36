// A Mamba1 layer around its inner projections, over draft trees, and folds of its rows in place; README.md describes it.
// Channels do not read each other, so lanes are channels, and a task has a block of them in one row.
#include <algorithm>
#include <vector>

#include "mamba1/scan.h"
#include "parallel.h"
#include "replayable.h"
#include "state_records/row.h"
#include "state_records/row_folds.h"

namespace {

using namespace specmamba;
using namespace specmamba::mamba1;

// The convolution of all nodes: in float32, and rounded to T, the type of activations, unless that is float32.
struct Convolved {
  const void* mixed;  // [B, N, C]
  float* x;           // [B, N, C]
  void* rounded;      // [B, N, C]; may be x
  int64_t mixed_token;
};

constexpr int64_t kLeastChannels = 128;  // of a task
constexpr int64_t kTasks = 8;            // of each thread

// Calls body(b, first, size) for blocks of channels in all rows: the longest that leave every thread some of them, since
// each begins with states that no prefetch has asked for. Rows are inner: a block's rates stay in a cache.
template <typename Body>
void for_blocks(int64_t batch, int64_t C, int num_threads, const Body& body) {
  const int64_t wanted = kTasks * std::max(num_threads, 1), share = (batch * C + wanted - 1) / wanted;
  const int64_t width = std::max(kLeastChannels, (share + kLanes - 1) / kLanes * kLanes);
  const int64_t blocks = (C + width - 1) / width, even = ((C + blocks - 1) / blocks + kLanes - 1) / kLanes * kLanes;
  parallel_for(batch * blocks, 1, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t first = t / batch * even;
      if (first < C) body(t % batch, first, std::min(even, C - first));
    }
  });
}

template <typename T>
void convolve(const Convolved& in, const Weights& w, const Buffers& buffers, const Trees& trees, int num_threads) {
  const Heads heads{0, 1, w.state_dim, w.channels, w.channels};  // the convolution has the values' channels alone
  for_blocks(trees.batch, w.channels, num_threads, [&](int64_t b, int64_t first, int64_t size) {
    thread_local Row<T> row;
    row.begin(buffers, trees, heads, {w.conv, w.conv_bias, w.width}, b, in.mixed, in.mixed_token);
    for (int64_t i = 0; i < row.nodes(); ++i) {
      const int64_t at = (trees.first(b) + i) * w.channels + first;
      row.mix(i, first, size, in.x + at);
      row.keep(i, first, size);
      if (in.rounded == in.x) continue;
      T* rounded = static_cast<T*>(in.rounded) + at;
      for_vectors(size, [&](int64_t c, auto lanes) { store(rounded + c, load(in.x + at + c, lanes), lanes); });
    }
  });
}

template <typename T>
void scan(const Inputs& in, const Weights& w, const Buffers& buffers, const Trees& trees, int num_threads) {
  for_blocks(trees.batch, w.channels, num_threads, [&](int64_t b, int64_t first, int64_t size) {
    thread_local RowScan<T> row;
    row.begin(in, w, buffers, trees, b);
    for_vectors(size, [&](int64_t i, auto lanes) { row.run(first + i, lanes); });
    if (first == 0) row.keep_keys();
  });
  const int64_t live = trees.num_packed() * w.channels, all = trees.tokens * w.channels;
  std::fill(static_cast<T*>(in.out) + live, static_cast<T*>(in.out) + all, T{});
}

// Rows that fold in place, in all layers. All buffers are contiguous.
struct RowFolds {
  float* states;                                              // [layers, slots, M, C]
  char *conv_inputs, *windows;                                // [layers, rows, W - 1 + R, C] [layers, slots, W - 1, C]
  const float *records_b, *records_u, *records_dt, *rates;    // [layers, rows, R, M], [.., C] twice, [layers, M, C]
  const int64_t *rows_of_batch, *slots_of_batch;              // [B]
  int64_t* num_pending;                                       // [B]; 0 after the fold
  const bool* folds;                                          // [B], or null: all rows fold
  int64_t batch, layers, slots, rows, capacity, window, input_bytes;  // input_bytes: of one entry of conv_inputs
  int64_t state_dim, channels;

  void fold(int64_t layer, int64_t b, int64_t first, int64_t size) const {
    const int64_t row = layer * rows + rows_of_batch[b], slot = layer * slots + slots_of_batch[b];
    const int64_t M = state_dim, C = channels;
    const Records records{records_b + row * capacity * M, records_u + row * capacity * C + first,
                          records_dt + row * capacity * C + first, num_pending[b], C};
    float* state = states + slot * M * C + first;
    const float* of_layer = rates + layer * M * C + first;
    thread_local std::vector<float> room;
    room.resize(2 * records.count * kLanes);
    for_vectors(size, [&](int64_t i, auto lanes) {
      fold_vector(records, of_layer, state, M, C, i, room.data(), lanes);
    });
  }
};

}  // namespace

extern "C" {

void mamba1_convolve(const Convolved* in, const Weights* weights, const Buffers* buffers, const Trees* trees,
                     int is_bfloat16, int num_threads) {
  is_bfloat16 ? convolve<BFloat16>(*in, *weights, *buffers, *trees, num_threads)
              : convolve<float>(*in, *weights, *buffers, *trees, num_threads);
}

void mamba1_scan(const Inputs* in, const Weights* weights, const Buffers* buffers, const Trees* trees, int is_bfloat16,
                 int num_threads) {
  is_bfloat16 ? scan<BFloat16>(*in, *weights, *buffers, *trees, num_threads)
              : scan<float>(*in, *weights, *buffers, *trees, num_threads);
}

void mamba1_fold_rows(const RowFolds* p, int num_threads) {
  bool is_any = false;
  for (int64_t b = 0; b < p->batch; ++b) is_any = is_any || is_folded(*p, b);
  if (!is_any) return;
  for_blocks(p->layers, p->channels, num_threads, [&](int64_t layer, int64_t first, int64_t size) {
    for (int64_t b = 0; b < p->batch; ++b) {
      if (!is_folded(*p, b)) continue;
      p->fold(layer, b, first, size);
      if (first == 0) move_window(*p, layer, b);
    }
  });
  for (int64_t b = 0; b < p->batch; ++b)
    if (is_folded(*p, b)) p->num_pending[b] = 0;
}

}  // extern "C"

SPECMAMBA_REPLAYABLE(mamba1_convolve)
SPECMAMBA_REPLAYABLE(mamba1_scan)
SPECMAMBA_REPLAYABLE(mamba1_fold_rows)
