// A Mamba2 layer between its projections, over draft trees; README.md describes it, reference.py specifies it.
#include "parallel.h"
#include "replayable.h"
#include "rowwise/heads.h"
#include "ssd/tree.h"
#include "state_records/row.h"

namespace {

using namespace specmamba;

constexpr int64_t kSerialBelow = 1 << 14;  // fewer elements than this are normed by one thread

// Strides are in elements; dimensions without one are contiguous. Activations, and conv_inputs, are float32 or
// bfloat16.

// Parts of the input projection's output for the nodes. Tokens of a tensor have one stride.
struct Inputs {
  const void *mixed, *gate, *dt;  // [B, N, C] [B, N, H P] [B, N, H]
  void* out;                      // [B, N, H P]
  float* before_norm;             // [B, N, H P], which may be out; not used without a norm
  int64_t mixed_token, gate_token, dt_token;
};

struct Weights {
  const float *conv, *conv_bias;                   // [W, C] [C] or null
  const float *negative_a, *dt_bias, *skip, *norm;  // [H] [H] [H] [H P] or null
  int64_t width;
  Heads heads;  // keys are B and C, values x
  int64_t norm_groups, norm_before_gate;
  double norm_eps, dt_min, dt_max;

  int64_t inner() const { return heads.value_heads * heads.value_dim; }
};

// Operands of a call; threads only read them.
struct Call {
  const Inputs& in;
  const Weights& w;
  const Buffers& buffers;
  const Trees& trees;
};

// Neighbouring heads, one after the other. The rows that a group shares are computed at the group's first head in the
// run. T is the type of activations.
template <typename T>
class HeadRun {
 public:
  explicit HeadRun(const Call& call)
      : in_(call.in), w_(call.w), call_(call), N(call.trees.nodes), S(w_.heads.key_dim), P(w_.heads.value_dim) {}

  // Heads are numbered through all rows.
  void run(int64_t first, int64_t last) {
    const int64_t heads = w_.heads.value_heads;
    for (int64_t t = first; t < last; ++t) {
      const int64_t h = t % heads, place_in_group = h % w_.heads.group();
      if (t == first || h == 0) begin_row(t / heads);
      if (t == first || place_in_group == 0) begin_group(h / w_.heads.group(), place_in_group == 0);
      head(h);
    }
  }

 private:
  void begin_row(int64_t b) {
    b_ = b;
    const Convolution convolution{w_.conv, w_.conv_bias, w_.width};
    row_.begin(call_.buffers, call_.trees, w_.heads, convolution, b, in_.mixed, in_.mixed_token);
  }

  // Several threads may have heads of a group; one of them writes the group's inputs and records.
  void begin_group(int64_t g, bool writes) {
    const int64_t b = w_.inner() + g * S, c = b + w_.heads.key_heads * S, pending = row_.pending();
    tree_.begin(N, pending, S, P, row_.ancestors());
    for (int64_t j = 0; j < pending; ++j) std::copy_n(row_.key(j, g), S, tree_.b(j));
    for (int64_t i = 0; i < N; ++i) {
      row_.mix(i, b, S, tree_.b(pending + i));
      row_.mix(i, c, S, tree_.c(i));
      if (!writes) continue;
      row_.keep(i, b, S);
      row_.keep(i, c, S);
      row_.keep_key(i, g, tree_.b(pending + i));
    }
    tree_.look();
  }

  void head(int64_t h) {
    const int64_t pending = row_.pending();
    for (int64_t j = 0; j < pending; ++j) {
      std::copy_n(row_.update(j, h), P, tree_.update(j));
      tree_.decay(j) = row_.decay(j, h);
    }
    x_.resize(N * P);
    for (int64_t i = 0; i < N; ++i) {
      row_.mix(i, h * P, P, &x_[i * P]);
      row_.keep(i, h * P, P);
      const float dt = step_size(i, h);
      tree_.log_decay(i) = dt * w_.negative_a[h];
      for (int64_t p = 0; p < P; ++p) tree_.update(pending + i)[p] = dt * x_[i * P + p];
    }
    tree_.verify({row_.state(h), S, P});
    for (int64_t i = 0; i < N; ++i) {
      row_.keep_update(i, h, tree_.update(pending + i), tree_.decay(pending + i));
      finish(i, h);
    }
  }

  float step_size(int64_t node, int64_t h) const {
    const float dt = softplus(to_float(of_node(in_.dt, in_.dt_token, node)[h]) + w_.dt_bias[h]);
    return std::clamp(dt, static_cast<float>(w_.dt_min), static_cast<float>(w_.dt_max));
  }

  // y + D x, times the gate where the gate comes before the norm or there is no norm.
  void finish(int64_t node, int64_t h) {
    const int64_t at = (b_ * N + node) * w_.inner() + h * P;
    const T* gate = of_node(in_.gate, in_.gate_token, node) + h * P;
    const float *y = tree_.output(node), *x = &x_[node * P];
    const bool has_norm = w_.norm != nullptr, is_gated = !has_norm || !w_.norm_before_gate;
    const Vector skip = broadcast(w_.skip[h]);
    for_vectors(P, [&](int64_t i, auto lanes) {
      Vector v = fma(skip, load(x + i, lanes), load(y + i, lanes));
      if (is_gated) v = v * silu(load(gate + i, lanes));
      has_norm ? store(in_.before_norm + at + i, v, lanes) : store(static_cast<T*>(in_.out) + at + i, v, lanes);
    });
  }

  const T* of_node(const void* tensor, int64_t distance, int64_t node) const {
    return static_cast<const T*>(tensor) + (b_ * N + node) * distance;
  }

  static GroupTree& tree() {
    thread_local GroupTree of_thread;
    return of_thread;
  }
  static Row<T>& row() {
    thread_local Row<T> of_thread;
    return of_thread;
  }
  static std::vector<float>& x() {
    thread_local std::vector<float> of_thread;
    return of_thread;
  }

  const Inputs& in_;
  const Weights& w_;
  const Call& call_;
  const int64_t N, S, P;
  int64_t b_;
  GroupTree& tree_ = tree();
  Row<T>& row_ = row();
  std::vector<float>& x_ = x();  // [N, P], of the current head
};

// Norms one part of one token's channels; it may include several heads.
template <typename T>
void norm_part(const Inputs& in, const Weights& w, int64_t token, int64_t part) {
  const int64_t width = w.inner() / w.norm_groups, channel = part * width, at = token * w.inner() + channel;
  const float eps = static_cast<float>(w.norm_eps);
  const T* gate = static_cast<const T*>(in.gate) + token * in.gate_token + channel;
  T* out = static_cast<T*>(in.out) + at;
  if (w.norm_before_gate)
    normalize<true>(in.before_norm + at, gate, w.norm + channel, width, eps, out);
  else
    normalize<false>(in.before_norm + at, gate, w.norm + channel, width, eps, out);
}

template <typename T>
void run(const Call& call, int num_threads) {
  const Inputs& in = call.in;
  const Weights& w = call.w;
  const int64_t tokens = call.trees.batch * call.trees.nodes, heads = call.trees.batch * w.heads.value_heads;
  parallel_for(heads, std::max<int64_t>(1, heads / (4 * std::max(num_threads, 1))), num_threads,
               [&](int64_t first, int64_t last) { HeadRun<T>(call).run(first, last); });
  if (w.norm == nullptr) return;
  const int64_t parts = tokens * w.norm_groups;
  if (tokens * w.inner() < kSerialBelow) num_threads = 1;
  parallel_for(parts, std::max<int64_t>(1, parts / (8 * std::max(num_threads, 1))), num_threads,
               [&](int64_t first, int64_t last) {
                 for (int64_t t = first; t < last; ++t) norm_part<T>(in, w, t / w.norm_groups, t % w.norm_groups);
               });
}

}  // namespace

extern "C" void mamba2_tree_verify(const Inputs* inputs, const Weights* weights, const Buffers* buffers,
                                   const Trees* trees, int is_bfloat16, int num_threads) {
  const Call call{*inputs, *weights, *buffers, *trees};
  is_bfloat16 ? run<BFloat16>(call, num_threads) : run<float>(call, num_threads);
}

SPECMAMBA_REPLAYABLE(mamba2_tree_verify)
