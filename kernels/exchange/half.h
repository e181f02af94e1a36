// float16 of a processor: loads and stores of one number.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace specmamba {

struct Float16 {
  uint16_t bits;
};

#if defined(__F16C__)
inline float to_float(Float16 x) { return _cvtsh_ss(x.bits); }
inline void put(Float16* y, float x) { y->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#else
inline float to_float(Float16 x) {
  __fp16 value;
  std::memcpy(&value, &x, sizeof value);
  return value;
}
inline void put(Float16* y, float x) {
  const __fp16 value = static_cast<__fp16>(x);
  std::memcpy(y, &value, sizeof value);
}
#endif

}  // namespace specmamba
