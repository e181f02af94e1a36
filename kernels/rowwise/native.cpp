// What is computed for each token on its own; see README.md and reference.py.
#include <cmath>

#include "live.h"
#include "parallel.h"
#include "replayable.h"
#include "rowwise/activations.h"
#include "rowwise/heads.h"
#include "rowwise/scan_layer.h"
#include "vector.h"

namespace {

using namespace specmamba;

constexpr int64_t kSerialBelow = 1 << 14;  // elements that one thread has done before a second one begins

template <typename Body>
void for_tokens(int64_t tokens, int64_t size, int num_threads, const Body& body) {
  if (tokens * size < kSerialBelow) num_threads = 1;
  parallel_for(tokens, std::max<int64_t>(1, tokens / (8 * std::max(num_threads, 1))), num_threads,
               [&](int64_t first, int64_t last) {
                 for (int64_t t = first; t < last; ++t) body(t);
               });
}

// Tokens of heads of a width; tokens of x lie x_stride apart, those of a gate gate_stride, those of y follow each
// other.
struct Norm {
  const void *x, *gate;
  const float* weight;  // [heads or 1, width]
  void* y;
  const int64_t* live;  // tokens that are no padding; null: all
  int64_t tokens, heads, width, x_stride, gate_stride, weight_stride;  // weight_stride: from head to head, or 0
  int64_t is_sigmoid;  // the gate's activation; else SiLU
  double eps;
};

template <typename X, typename Y, Gate Kind>
void normalize_token(const Norm& p, int64_t token) {
  for (int64_t h = 0; h < p.heads; ++h) {
    const X* x = static_cast<const X*>(p.x) + token * p.x_stride + h * p.width;
    const Y* gate = static_cast<const Y*>(p.gate) + (Kind == Gate::kNone ? 0 : token * p.gate_stride + h * p.width);
    Y* y = static_cast<Y*>(p.y) + (token * p.heads + h) * p.width;
    normalize<Kind>(x, gate, p.weight + h * p.weight_stride, p.width, static_cast<float>(p.eps), y);
  }
}

template <typename X, typename Y, Gate Kind>
void run_norm(const Norm& p, int num_threads) {
  for_tokens(live_rows(p.tokens, p.live), p.heads * p.width, num_threads,
             [&](int64_t t) { normalize_token<X, Y, Kind>(p, t); });
}

// What is normed is x + gate, which is kept in `total`, [tokens, width], rounded to T.
template <typename T>
void run_add_norm(const Norm& p, T* total, int num_threads) {
  for_tokens(live_rows(p.tokens, p.live), p.width, num_threads, [&](int64_t t) {
    const T *x = static_cast<const T*>(p.x) + t * p.x_stride, *added = static_cast<const T*>(p.gate) + t * p.gate_stride;
    T* sum = total + t * p.width;
    for_vectors(p.width, [&](int64_t i, auto lanes) { store(sum + i, load(x + i, lanes) + load(added + i, lanes), lanes); });
    normalize<Gate::kNone>(sum, sum, p.weight, p.width, static_cast<float>(p.eps), static_cast<T*>(p.y) + t * p.width);
  });
}

template <typename T>
void run_silu_mul(const T* gate_up, T* y, int64_t tokens, int64_t width, int num_threads) {
  for_tokens(tokens, width, num_threads, [&](int64_t t) {
    const T *gate = gate_up + t * 2 * width, *up = gate + width;
    for_vectors(width, [&](int64_t i, auto lanes) {
      store(y + t * width + i, silu(load(gate + i, lanes)) * load(up + i, lanes), lanes);
    });
  });
}

// As run_silu_mul, with min(silu(gate), limit) and up clipped to [-limit, limit].
template <typename T>
void run_clamped_silu_mul(const T* gate_up, T* y, int64_t tokens, int64_t width, float limit, int num_threads) {
  const Vector most = broadcast(limit), least = broadcast(-limit);
  for_tokens(tokens, width, num_threads, [&](int64_t t) {
    const T *gate = gate_up + t * 2 * width, *up = gate + width;
    for_vectors(width, [&](int64_t i, auto lanes) {
      const Vector activated = silu(load(gate + i, lanes)), of_up = load(up + i, lanes);
      store(y + t * width + i, smaller(most, activated) * smaller(most, larger(least, of_up)), lanes);
    });
  });
}

enum Activation { kSigmoid, kSilu, kGelu, kGeluTanh };  // as in native_ops.py

// Numbers in parts of a vector's multiple: each has the same bits wherever it stands.
template <typename T, typename Function>
void run_each(const T* x, T* y, int64_t count, int num_threads, const Function& function) {
  constexpr int64_t kPart = 1024;
  for_tokens((count + kPart - 1) / kPart, kPart, num_threads, [&](int64_t part) {
    const int64_t at = part * kPart;
    for_vectors(std::min(kPart, count - at),
                [&](int64_t i, auto lanes) { store(y + at + i, function(load(x + at + i, lanes)), lanes); });
  });
}

template <typename T>
void run_activation(int64_t kind, const T* x, T* y, int64_t count, int num_threads) {
  if (kind == kSigmoid) return run_each(x, y, count, num_threads, [](Vector v) { return sigmoid(v); });
  if (kind == kSilu) return run_each(x, y, count, num_threads, [](Vector v) { return silu(v); });
  if (kind == kGelu) return run_each(x, y, count, num_threads, [](Vector v) { return gelu(v); });
  run_each(x, y, count, num_threads, [](Vector v) { return gelu_tanh(v); });
}

template <typename T>
void run_rotate(const T* x, const T* cos, const T* sin, T* y, int64_t tokens, int64_t heads, int64_t width,
                int64_t rotated, int num_threads) {
  for_tokens(tokens, heads * width, num_threads, [&](int64_t t) {
    for (int64_t at = t * heads * width; at < (t + 1) * heads * width; at += width) {
      rotate_head(x + at, cos + t * rotated, sin + t * rotated, rotated, y + at);
      std::copy(x + at + rotated, x + at + width, y + at + rotated);
    }
  });
}

struct DeltaInputs {
  const float* mixed;          // [tokens, channels], of which the first 2 key_heads * key_dim are queries and keys
  const void *a, *b;           // [tokens, value_heads], gates_stride apart
  const float *negative_a, *dt_bias;  // [value_heads]
  float *q, *k, *g, *beta;     // [tokens, key_heads, key_dim] twice, [tokens, value_heads] twice
  int64_t tokens, channels, gates_stride, key_heads, key_dim, value_heads;
  double eps, step_scale;
};

void unit_heads(const DeltaInputs& p, const float* x, float* y, float factor) {
  for (int64_t at = 0; at < p.key_heads * p.key_dim; at += p.key_dim)
    make_unit(x + at, p.key_dim, static_cast<float>(p.eps), factor, y + at);
}

template <typename T>
void run_delta_inputs(const DeltaInputs& p, int num_threads) {
  const int64_t size = p.key_heads * p.key_dim;
  const float q_factor = query_factor(p.key_dim), step_scale = static_cast<float>(p.step_scale);
  for_tokens(p.tokens, 2 * size, num_threads, [&](int64_t t) {
    unit_heads(p, p.mixed + t * p.channels, p.q + t * size, q_factor);
    unit_heads(p, p.mixed + t * p.channels + size, p.k + t * size, 1.0f);
    const T *a = static_cast<const T*>(p.a) + t * p.gates_stride, *b = static_cast<const T*>(p.b) + t * p.gates_stride;
    for (int64_t h = 0; h < p.value_heads; ++h) {
      p.g[t * p.value_heads + h] = log_decay_of(to_float(a[h]), p.negative_a[h], p.dt_bias[h]);
      p.beta[t * p.value_heads + h] = step_size_of(to_float(b[h]), step_scale);
    }
  });
}

// Around the scan of a Mamba1 layer: tokens lie x_stride and gate_stride apart, those of float32 results side by side.
struct ScanLayer {
  const void* gate;         // [tokens, channels]: the raw time steps, or the gate
  const float *x, *of_channel, *y;  // [tokens, channels], [channels]: the bias or the skip, [tokens, channels]
  void *first, *second;     // [tokens, channels]: time steps and what they weigh, or the output and nothing
  int64_t tokens, channels, gate_stride, x_stride, y_stride;
};

template <typename T>
void run_time_steps(const ScanLayer& p, int num_threads) {
  for_tokens(p.tokens, p.channels, num_threads, [&](int64_t t) {
    time_steps_of(static_cast<const T*>(p.gate) + t * p.gate_stride, p.of_channel, p.x + t * p.x_stride, p.channels,
                  static_cast<float*>(p.first) + t * p.channels, static_cast<float*>(p.second) + t * p.channels);
  });
}

template <typename T>
void run_skip_gate(const ScanLayer& p, int num_threads) {
  for_tokens(p.tokens, p.channels, num_threads, [&](int64_t t) {
    skip_gate_of(p.y + t * p.y_stride, p.x + t * p.x_stride, p.of_channel,
                 static_cast<const T*>(p.gate) + t * p.gate_stride, p.channels, static_cast<T*>(p.first) + t * p.channels);
  });
}

constexpr int64_t kSerialAngles = 1 << 12;  // angles that one thread has done before a second one begins

template <typename T>
void run_angles(const int64_t* positions, const float* frequencies, T* cos, T* sin, int64_t tokens, int64_t size,
            float scaling, int num_threads) {
  const int64_t half = size / 2;
  if (tokens * half < kSerialAngles) num_threads = 1;
  parallel_for(tokens, std::max<int64_t>(1, tokens / (8 * std::max(num_threads, 1))), num_threads,
               [&](int64_t first, int64_t last) {
                 for (int64_t t = first; t < last; ++t)
                   for (int64_t i = 0; i < half; ++i) {
                     const float phase = static_cast<float>(positions[t]) * frequencies[i];
                     const float c = std::cos(phase) * scaling, s = std::sin(phase) * scaling;
                     for (const int64_t at : {t * size + i, t * size + half + i}) {
                       put(cos + at, c);
                       put(sin + at, s);
                     }
                   }
               });
}

}  // namespace

extern "C" {

void rowwise_rms_norm(const Norm* p, int is_bfloat16, int num_threads) {
  is_bfloat16 ? run_norm<BFloat16, BFloat16, Gate::kNone>(*p, num_threads)
              : run_norm<float, float, Gate::kNone>(*p, num_threads);
}

void rowwise_add_rms_norm(const Norm* p, void* total, int is_bfloat16, int num_threads) {
  is_bfloat16 ? run_add_norm(*p, static_cast<BFloat16*>(total), num_threads)
              : run_add_norm(*p, static_cast<float*>(total), num_threads);
}

// x is float32; y and the gate are bfloat16 or float32.
void rowwise_gated_rms_norm(const Norm* p, int is_bfloat16, int num_threads) {
  auto run = [&](auto type) {
    using T = decltype(type);
    p->is_sigmoid ? run_norm<float, T, Gate::kSigmoid>(*p, num_threads)
                  : run_norm<float, T, Gate::kSilu>(*p, num_threads);
  };
  is_bfloat16 ? run(BFloat16{}) : run(float{});
}

void rowwise_silu_mul(const void* gate_up, void* y, int64_t tokens, const int64_t* live, int64_t width,
                      int is_bfloat16, int num_threads) {
  tokens = live_rows(tokens, live);
  is_bfloat16
      ? run_silu_mul(static_cast<const BFloat16*>(gate_up), static_cast<BFloat16*>(y), tokens, width, num_threads)
      : run_silu_mul(static_cast<const float*>(gate_up), static_cast<float*>(y), tokens, width, num_threads);
}

void rowwise_clamped_silu_mul(const void* gate_up, void* y, int64_t tokens, const int64_t* live, int64_t width,
                              double limit, int is_bfloat16, int num_threads) {
  auto run = [&](auto type) {
    using T = decltype(type);
    run_clamped_silu_mul(static_cast<const T*>(gate_up), static_cast<T*>(y), live_rows(tokens, live), width,
                         static_cast<float>(limit), num_threads);
  };
  is_bfloat16 ? run(BFloat16{}) : run(float{});
}

// x [tokens, width] -> y [tokens, width], each number by itself; kind: an Activation.
void rowwise_activate(const void* x, void* y, int64_t tokens, const int64_t* live, int64_t width, int64_t kind,
                      int is_bfloat16, int num_threads) {
  const int64_t count = live_rows(tokens, live) * width;
  is_bfloat16 ? run_activation(kind, static_cast<const BFloat16*>(x), static_cast<BFloat16*>(y), count, num_threads)
              : run_activation(kind, static_cast<const float*>(x), static_cast<float*>(y), count, num_threads);
}

// positions [tokens], frequencies [size], of which the second half repeats the first -> cos, sin [tokens, size].
void rowwise_rotary_angles(const int64_t* positions, const float* frequencies, void* cos, void* sin, int64_t tokens,
                           int64_t size, double scaling, int is_bfloat16, int num_threads) {
  auto run = [&](auto type) {
    using T = decltype(type);
    run_angles(positions, frequencies, static_cast<T*>(cos), static_cast<T*>(sin), tokens, size,
           static_cast<float>(scaling), num_threads);
  };
  is_bfloat16 ? run(BFloat16{}) : run(float{});
}

void rowwise_rotate(const void* x, const void* cos, const void* sin, void* y, int64_t tokens, int64_t heads,
                    int64_t width, int64_t rotated, int is_bfloat16, int num_threads) {
  auto run = [&](auto type) {
    using T = decltype(type);
    run_rotate(static_cast<const T*>(x), static_cast<const T*>(cos), static_cast<const T*>(sin), static_cast<T*>(y),
               tokens, heads, width, rotated, num_threads);
  };
  is_bfloat16 ? run(BFloat16{}) : run(float{});
}

void rowwise_delta_inputs(const DeltaInputs* p, int is_bfloat16, int num_threads) {
  is_bfloat16 ? run_delta_inputs<BFloat16>(*p, num_threads) : run_delta_inputs<float>(*p, num_threads);
}

void rowwise_time_steps(const ScanLayer* p, int is_bfloat16, int num_threads) {
  is_bfloat16 ? run_time_steps<BFloat16>(*p, num_threads) : run_time_steps<float>(*p, num_threads);
}

void rowwise_skip_gate(const ScanLayer* p, int is_bfloat16, int num_threads) {
  is_bfloat16 ? run_skip_gate<BFloat16>(*p, num_threads) : run_skip_gate<float>(*p, num_threads);
}

}  // extern "C"

SPECMAMBA_REPLAYABLE(rowwise_rms_norm)
SPECMAMBA_REPLAYABLE(rowwise_add_rms_norm)
SPECMAMBA_REPLAYABLE(rowwise_gated_rms_norm)
SPECMAMBA_REPLAYABLE(rowwise_silu_mul)
SPECMAMBA_REPLAYABLE(rowwise_activate)
SPECMAMBA_REPLAYABLE(rowwise_rotary_angles)
SPECMAMBA_REPLAYABLE(rowwise_rotate)
SPECMAMBA_REPLAYABLE(rowwise_delta_inputs)
SPECMAMBA_REPLAYABLE(rowwise_time_steps)
SPECMAMBA_REPLAYABLE(rowwise_skip_gate)
SPECMAMBA_REPLAYABLE(rowwise_clamped_silu_mul)
