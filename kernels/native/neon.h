// ARM NEON (64-bit); with BF16 where the compiler may use it. Included by vector.h.
#pragma once

#include <arm_neon.h>

namespace specmamba {

using Vector = float32x4_t;
constexpr int64_t kLanes = 4;
constexpr int kRegisters = 32;

// Lanes that hold have all bits set.
struct Mask {
  uint32x4_t bits;
  Mask operator&(Mask other) const { return {vandq_u32(bits, other.bits)}; }
  Mask operator|(Mask other) const { return {vorrq_u32(bits, other.bits)}; }
};
inline Mask none() { return {vdupq_n_u32(0)}; }
inline Mask every() { return {vdupq_n_u32(0xFFFFFFFF)}; }
inline bool any(Mask x) { return vmaxvq_u32(x.bits) != 0; }
inline bool all(Mask x) { return vminvq_u32(x.bits) != 0; }
inline int64_t first(Mask x) {  // of a mask with any
  int64_t i = 0;
  while (x.bits[i] == 0) ++i;
  return i;
}

class First {
 public:
  explicit First(int64_t count) : count_(count) {}
  Mask mask() const {
    const uint32x4_t lanes = {0, 1, 2, 3};
    return {vcgtq_u32(vdupq_n_u32(static_cast<uint32_t>(count_)), lanes)};
  }
  int64_t count() const { return count_; }

 private:
  int64_t count_;
};

inline Vector zero() { return vdupq_n_f32(0); }
inline Vector broadcast(float x) { return vdupq_n_f32(x); }

inline Vector widened(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }

// To nearest even.
inline uint16x4_t rounded(Vector x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t is_odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t up = vaddq_u32(bits, vaddq_u32(is_odd, vdupq_n_u32(0x7FFF)));
  const uint32x4_t nan = vorrq_u32(bits, vdupq_n_u32(0x400000));  // a quiet one, which no carry changes
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), up, nan), 16);
}

// The first `count` of some numbers; the others are 0. In variables of their own: clang's loads are macros, which commas
// between template arguments would part.
template <typename T, int Size>
struct Part {
  alignas(16) T values[Size] = {};
  Part(const void* x, int64_t count) { std::memcpy(values, x, count * sizeof(T)); }
};

inline Vector load(const float* x, All) { return vld1q_f32(x); }
inline Vector load(const float* x, First lanes) {
  const Part<float, 4> part(x, lanes.count());
  return vld1q_f32(part.values);
}
inline Vector load(const BFloat16* x, All) { return widened(vld1_u16(&x->bits)); }
inline Vector load(const BFloat16* x, First lanes) {
  const Part<uint16_t, 4> part(x, lanes.count());
  return widened(vld1_u16(part.values));
}

inline void store(float* y, Vector x, All) { vst1q_f32(y, x); }
inline void store(float* y, Vector x, First lanes) { std::memcpy(y, &x, lanes.count() * sizeof *y); }
inline void store(BFloat16* y, Vector x, All) { vst1_u16(&y->bits, rounded(x)); }
inline void store(BFloat16* y, Vector x, First lanes) {
  const uint16x4_t bits = rounded(x);
  std::memcpy(y, &bits, lanes.count() * sizeof *y);
}

inline Vector fma(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }               // a b + c
inline Vector fms(Vector a, Vector b, Vector c) { return vfmaq_f32(vnegq_f32(c), a, b); }    // a b - c
inline Vector fnma(Vector a, Vector b, Vector c) { return vfmsq_f32(c, a, b); }              // c - a b
inline Vector smaller(Vector a, Vector b) { return vbslq_f32(vcltq_f32(a, b), a, b); }       // b where one is NaN
inline Vector larger(Vector a, Vector b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }        // b where one is NaN
inline Vector whole(Vector x) { return vrndnq_f32(x); }                                      // to nearest even

inline Vector power_of_two(int32x4_t n) {  // -126 to 127
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}

// x 2^n for a whole n of -252 to 254, in two steps: 2^n itself may be too small or too large.
inline Vector scaled(Vector x, Vector n) {
  const int32x4_t all = vcvtnq_s32_f32(n), half = vshrq_n_s32(all, 1);
  return x * power_of_two(half) * power_of_two(vsubq_s32(all, half));
}

inline Mask is_equal(Vector a, Vector b) { return {vceqq_f32(a, b)}; }
inline Mask is_less(Vector a, Vector b) { return {vcltq_f32(a, b)}; }
inline Mask is_finite(Vector x) { return is_equal(x - x, zero()); }
inline Vector chosen(Mask mask, Vector x, Vector others) { return vbslq_f32(mask.bits, x, others); }
// Lanes whose byte is not 0.
inline Mask flags(const uint8_t* x) {
  const uint32x4_t bytes = {x[0], x[1], x[2], x[3]};
  return {vcgtq_u32(bytes, vdupq_n_u32(0))};
}

inline float sum(Vector x) { return vaddvq_f32(x); }
inline float largest(Vector x) { return vmaxnmvq_f32(x); }

// y[i] = the sum of x[i], for four vectors.
inline void store_sums(float* y, const Vector* x) {
  vst1q_f32(y, vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])));
}

// Stops the compiler from reading x from memory at each use.
inline void keep_in_register(Vector& x) { asm("" : "+w"(x)); }

// ---- pairs of 16-bit numbers ----------------------------------------------------------------------------------------

using Shorts = int16x8_t;
inline Shorts load_shorts(const void* x) { return vld1q_s16(static_cast<const int16_t*>(x)); }
inline Shorts load_shorts(const void* x, int64_t count) {  // behind them 0
  const Part<int16_t, 8> part(x, count);
  return vld1q_s16(part.values);
}
inline Shorts broadcast_pair(int32_t pair) { return vreinterpretq_s16_s32(vdupq_n_s32(pair)); }

// bfloat16 of pairs
inline Vector even_of(Shorts x) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_s16(x), 16)); }
inline Vector odd_of(Shorts x) {
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_s16(x), vdupq_n_u32(0xFFFF0000)));
}

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define SPECMAMBA_MULTIPLIES_PAIRS 1
using Pairs = bfloat16x8_t;
inline Pairs as_pairs(Shorts x) { return vreinterpretq_bf16_s16(x); }
// sum[i] + x[2 i] y[2 i] + x[2 i + 1] y[2 i + 1]
inline Vector add_products(Vector sum, Pairs x, Pairs y) { return vbfdotq_f32(sum, x, y); }
#else
#define SPECMAMBA_MULTIPLIES_PAIRS 0
#endif

// ---- integers -------------------------------------------------------------------------------------------------------

using Integers = int32x4_t;

// sum[i] + x[2 i] y[2 i] + x[2 i + 1] y[2 i + 1], exactly.
inline Integers add_products(Integers sum, Shorts x, Shorts y) {
  return vaddq_s32(sum, vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y)));
}

inline Shorts load_widened(const int8_t* x) { return vmovl_s8(vld1_s8(x)); }

inline Vector from_codes(int16x8_t x, const int8_t*) { return vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))); }
inline Vector from_codes(int16x8_t x, const Float8*) {
  const int16x4_t halves = vand_s16(vshl_n_s16(vget_low_s16(x), 7), vdup_n_s16(static_cast<int16_t>(0xBFFF)));
  return vcvt_f32_f16(vreinterpret_f16_s16(halves));
}
template <typename Code, typename = std::enable_if_t<sizeof(Code) == 1>>
inline Vector load(const Code* x, First lanes) {
  uint64_t bytes = 0;
  std::memcpy(&bytes, x, lanes.count());
  return from_codes(vmovl_s8(vcreate_s8(bytes)), x);
}
template <typename Code, typename = std::enable_if_t<sizeof(Code) == 1>>
inline Vector load(const Code* x, All) {
  return load(x, First(kLanes));
}
inline Vector to_floats(Integers x) { return vcvtq_f32_s32(x); }

// The magnitudes of float32 as integers, which are in the same order.
inline Integers magnitudes(Vector x) { return vandq_s32(vreinterpretq_s32_f32(x), vdupq_n_s32(0x7FFFFFFF)); }
inline Integers larger(Integers a, Integers b) { return vmaxq_s32(a, b); }
inline int32_t largest(Integers x) { return vmaxvq_s32(x); }

// x, rounded to nearest even and limited to int16.
inline int16x4_t to_shorts(Vector x) { return vqmovn_s32(vcvtnq_s32_f32(x)); }
inline void store(int16_t* y, Vector x, All) { vst1_s16(y, to_shorts(x)); }
inline void store(int16_t* y, Vector x, First lanes) {
  const int16x4_t shorts = to_shorts(x);
  std::memcpy(y, &shorts, lanes.count() * sizeof *y);
}

// ---- bytes, four neighbours in a lane -------------------------------------------------------------------------------

using Bytes = uint8x16_t;
inline Bytes load_bytes(const void* x) { return vld1q_u8(static_cast<const uint8_t*>(x)); }
inline Bytes low_halves(Bytes x) { return vandq_u8(x, vdupq_n_u8(15)); }
inline Bytes high_halves(Bytes x) { return vshrq_n_u8(x, 4); }
template <int Bits>
inline Bytes shifted_left(Bytes x) {
  return vshlq_n_u8(x, Bits);
}
template <int Bits>
inline Bytes shifted_right(Bytes x) {
  return vshrq_n_u8(x, Bits);
}
// Bits 0 to 3 of low, which has no others, and bits 4 and 5 of high.
inline Bytes with_high_bits(Bytes low, Bytes high) { return vorrq_u8(low, vandq_u8(high, vdupq_n_u8(0x30))); }
inline Bytes broadcast_four(int32_t four) { return vreinterpretq_u8_s32(vdupq_n_s32(four)); }
inline Integers broadcast_integer(int32_t x) { return vdupq_n_s32(x); }
// 16 bytes, and those of them at the places that the bytes of a vector name.
inline Bytes load_table(const void* x) { return load_bytes(x); }
inline Bytes looked_up(Bytes table, Bytes places) { return vqtbl1q_u8(table, places); }

#define SPECMAMBA_MULTIPLIES_BYTES 0
using ShortSums = int16x8_t;
inline ShortSums add_two_products(ShortSums sum, Bytes x, Bytes y) {
  const int8x16_t a = vreinterpretq_s8_u8(x), b = vreinterpretq_s8_u8(y);
  return vaddq_s16(sum, vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b)));
}
inline Integers add_pairs(Integers sum, ShortSums x, int16_t factor) {
  return vmlaq_n_s32(sum, vpaddlq_s16(x), factor);
}

inline Vector load_halves(const uint16_t* x) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x))); }  // float16
// x, rounded to nearest even and limited to int8.
inline void store_bytes(int8_t* y, Vector x) {
  const int8x8_t bytes = vqmovn_s16(vcombine_s16(to_shorts(x), vdup_n_s16(0)));
  std::memcpy(y, &bytes, kLanes);
}

}  // namespace specmamba
