// One head's recurrence over a chunk of known tokens, with a log decay for each key channel; README.md has the mathematics.
#pragma once

#include <vector>

#include "gated_delta_rule/chunk.h"
#include "gated_delta_rule/tree.h"

namespace specmamba {

// As HeadChunk, with decays in the products of keys: factors of one, so that earlier keys are decayed for every token.
class ChannelChunk : public ChunkOfHead {
 public:
  void begin(int64_t key_dim, int64_t value_dim) {
    begin_operands(key_dim, value_dim);
    for (auto* x : {&own_, &between_, &read_query_, &read_key_, &left_key_}) x->resize(kChunk, key_dim);
    left_.resize(key_dim);
  }

  float* log_decays(int64_t token) { return own_.row(token); }

  void look(int64_t size) { size_ = size; }  // decays, which differ from value head to value head, are in all products

  // Called after everything is filled in: outputs, and the state [K, V] after the chunk.
  void advance(float* state) {
    for (int64_t i = 0; i < size_; ++i)
      for_channels([&](int64_t c, auto lanes) { store(own_.row(i) + c, decay_of(load(own_.row(i) + c, lanes)), lanes); });
    weigh();
    decay_from_start();
    const Matrix before{state, value_dim_};
    const Decayed decayed;
    subtract_read(decayed, read_key_.matrix(), before);
    solve();
    put_outputs(decayed, read_query_.matrix(), before, weights_.matrix(), update_.matrix(), size_, output_,
                {key_dim_, value_dim_});
    decay_until_end();
    add_updates(left_key_.transposed(), update_.matrix(), size_, state, {key_dim_, value_dim_},
                [&](int64_t channel) { return left_[channel]; });
  }

 private:
  struct Decayed {  // queries and keys are multiplied by their decays already
    float since_start(int64_t) const { return 1.0f; }
  };

  template <typename Body>
  void for_channels(const Body& body) const {
    for_vectors(key_dim_, body);
  }

  // Weights of earlier updates for the outputs and in the triangular system.
  void weigh() {
    for (int64_t i = 0; i < size_; ++i) {
      const float *own = own_.row(i), *q = query_.row(i), *k = key_.row(i);
      float *of_q = weights_.row(i), *of_k = system_.row(i);
      for (int64_t j = 0; j < i; ++j) {
        const float* earlier = key_.row(j);
        float* between = between_.row(j);
        Vector q_sum = zero(), k_sum = zero();
        for_channels([&](int64_t c, auto lanes) {
          const Vector decay = without_tiny(load(between + c, lanes) * load(own + c, lanes));
          store(between + c, decay, lanes);
          const Vector left = decay * load(earlier + c, lanes);
          q_sum = fma(left, load(q + c, lanes), q_sum);
          k_sum = fma(left, load(k + c, lanes), k_sum);
        });
        of_q[j] = sum(q_sum), of_k[j] = beta_[i] * sum(k_sum);
      }
      float unused;
      dot_both(q, k, k, key_dim_, &of_q[i], &unused);
      of_k[i] = 0;
      for (float* row : {of_q, of_k}) std::fill(row + i + 1, row + size_, 0.0f);
      std::fill_n(between_.row(i), key_dim_, 1.0f);
    }
  }

  // What queries and keys read of the state before the chunk; left_ is the decay of all tokens.
  void decay_from_start() {
    std::fill(left_.begin(), left_.end(), 1.0f);
    for (int64_t i = 0; i < size_; ++i)
      for_channels([&](int64_t c, auto lanes) {
        const Vector decay = without_tiny(load(&left_[c], lanes) * load(own_.row(i) + c, lanes));
        store(&left_[c], decay, lanes);
        store(read_query_.row(i) + c, decay * load(query_.row(i) + c, lanes), lanes);
        store(read_key_.row(i) + c, decay * load(key_.row(i) + c, lanes), lanes);
      });
  }

  // Keys, as they are in the state behind the chunk: between_ has the decays up to its last token.
  void decay_until_end() {
    for (int64_t i = 0; i < size_; ++i)
      for_channels([&](int64_t c, auto lanes) {
        store(left_key_.row(i) + c, load(between_.row(i) + c, lanes) * load(key_.row(i) + c, lanes), lanes);
      });
  }

  ScratchMatrix own_, between_;                     // [C, K], decays: of each token, and up to the current one
  ScratchMatrix read_query_, read_key_, left_key_;  // [C, K]
  std::vector<float> left_;                         // [K]
};

}  // namespace specmamba
