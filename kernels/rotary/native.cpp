// Cosines and sines of rotary position embedding; see README.md and reference.py.
#include <cmath>

#include "parallel.h"
#include "vector.h"

namespace {

using namespace specmamba;

constexpr int64_t kSerialBelow = 1 << 12;  // angles that one thread has done before a second one begins

inline void put(float* y, float x) { *y = x; }
inline void put(BFloat16* y, float x) {
  const __m128i rounded = (__m128i)_mm_cvtneps_pbh(_mm_set_ss(x));
  y->bits = static_cast<uint16_t>(_mm_extract_epi16(rounded, 0));
}

template <typename T>
void angles(const int64_t* positions, const float* frequencies, T* cos, T* sin, int64_t tokens, int64_t size,
            float scaling, int num_threads) {
  const int64_t half = size / 2;
  if (tokens * half < kSerialBelow) num_threads = 1;
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

// positions [tokens], frequencies [size], of which the second half repeats the first -> cos, sin [tokens, size].
extern "C" void rotary_angles(const int64_t* positions, const float* frequencies, void* cos, void* sin, int64_t tokens,
                              int64_t size, double scaling, int is_bfloat16, int num_threads) {
  auto run = [&](auto type) {
    using T = decltype(type);
    angles(positions, frequencies, static_cast<T*>(cos), static_cast<T*>(sin), tokens, size,
           static_cast<float>(scaling), num_threads);
  };
  is_bfloat16 ? run(BFloat16{}) : run(float{});
}
