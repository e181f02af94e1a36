// Drafts that are drawn without replacement, and their acceptance in rounds; see README.md and reference.py.
#pragma once

#include <vector>

#include "sampling/rows.h"

namespace specmamba {

constexpr double kLeastMass = 0x1p-110;  // less counts as none

// The weights of a row without the tokens that were removed.
class Remaining {
 public:
  Remaining(const float* weights, int64_t size) : weights_(weights), size_(size), masses_(num_blocks(size)) { sum(); }

  // Sum up anew: the weights have changed.
  void sum() {
    for (int64_t block = 0; block < num_blocks(size_); ++block) sum(block);
  }

  double mass() const {
    double total = 0;
    for (const float mass : masses_) total += mass;
    return total;
  }

  float at(int64_t token) const {
    const bool is_there = has(token) && std::find(removed_.begin(), removed_.end(), token) == removed_.end();
    return is_there ? weights_[token] : 0;
  }

  void remove(int64_t token) {
    if (!has(token)) return;
    removed_.push_back(token);
    sum(token / kBlock);
  }

  int64_t draw(double uniform) const {
    const auto fill = [&](int64_t block, float* weights) { copy(block, weights); };
    return specmamba::draw(masses_.data(), size_, uniform, fill);
  }

 private:
  bool has(int64_t token) const { return token >= 0 && token < size_; }

  void copy(int64_t block, float* weights) const {
    std::copy_n(weights_ + block * kBlock, block_size(size_, block), weights);
    for (const int64_t token : removed_)
      if (token / kBlock == block) weights[token % kBlock] = 0;
  }

  void sum(int64_t block) {
    float weights[kBlock];
    const bool is_whole =
        std::none_of(removed_.begin(), removed_.end(), [&](int64_t token) { return token / kBlock == block; });
    if (!is_whole) copy(block, weights);
    masses_[block] = sum_of(is_whole ? weights_ + block * kBlock : weights, block_size(size_, block));
  }

  const float* weights_;
  int64_t size_;
  std::vector<float> masses_;  // of blocks
  std::vector<int64_t> removed_;
};

// k draws; where no mass is left the token is 0 and not drawn.
inline void draw_children(const float* probs, int64_t size, const float* uniforms, int64_t k, int64_t* tokens,
                          bool* is_drawn) {
  Remaining left(probs, size);
  for (int64_t i = 0; i < k; ++i) {
    is_drawn[i] = left.mass() > kLeastMass;
    tokens[i] = is_drawn[i] ? left.draw(uniforms[i]) : 0;
    if (is_drawn[i]) left.remove(tokens[i]);
  }
}

struct Child {
  int64_t token;
  double uniform;  // decides whether it is accepted
};

// r = max(r - scale q, 0)
inline void subtract(float* r, const float* q, float scale, int64_t size) {
  for_vectors(size, [&](int64_t i, auto lanes) {
    const Vector rest = fnma(load(q + i, lanes), broadcast(scale), load(r + i, lanes));
    store(r + i, larger(rest, zero()), lanes);
  });
}

// The token after one node: p [size] is the target's distribution, q (or null) what the children were drawn from.
inline int64_t choose(const float* p, const float* q, int64_t size, const std::vector<Child>& children,
                      double uniform) {
  if (children.empty()) return Remaining(p, size).draw(uniform);
  static thread_local std::vector<float> residual;
  residual.assign(p, p + size);
  Remaining rest(residual.data(), size), left(q, q == nullptr ? 0 : size);
  for (const Child& child : children) {
    const double mass = rest.mass(), q_mass = left.mass(), q_token = left.at(child.token);
    const bool is_drawn = q != nullptr && q_token > 0 && q_mass > kLeastMass;
    const double density = is_drawn ? q_token / q_mass : 1;
    if (child.uniform * density * mass < rest.at(child.token)) return child.token;
    rest.remove(child.token);
    left.remove(child.token);
    if (!is_drawn) continue;
    subtract(residual.data(), q, static_cast<float>(mass / q_mass), size);
    rest.sum();
  }
  if (rest.mass() > 0) return rest.draw(uniform);
  Remaining others(p, size);  // rounding emptied the residual
  for (const Child& child : children) others.remove(child.token);
  return others.mass() > 0 ? others.draw(uniform) : Remaining(p, size).draw(uniform);
}

}  // namespace specmamba
