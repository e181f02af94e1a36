// AVX-512 (F, BW, DQ, VL); with VNNI and BF16 where the compiler may use them. Included by vector.h.
#pragma once

#include <immintrin.h>

namespace specmamba {

using Vector = __m512;
constexpr int64_t kLanes = 16;
constexpr int kRegisters = 32;

struct Mask {
  __mmask16 bits;
  Mask operator&(Mask other) const { return {static_cast<__mmask16>(bits & other.bits)}; }
  Mask operator|(Mask other) const { return {static_cast<__mmask16>(bits | other.bits)}; }
};
inline Mask none() { return {0}; }
inline Mask every() { return {0xFFFF}; }
inline bool any(Mask x) { return x.bits != 0; }
inline bool all(Mask x) { return x.bits == 0xFFFF; }
inline int64_t first(Mask x) { return __builtin_ctz(x.bits); }  // of a mask with any

class First {
 public:
  explicit First(int64_t count) : bits_(static_cast<__mmask16>((1u << count) - 1)) {}
  Mask mask() const { return {bits_}; }
  __mmask16 bits() const { return bits_; }

 private:
  __mmask16 bits_;
};

inline Vector zero() { return _mm512_setzero_ps(); }
inline Vector broadcast(float x) { return _mm512_set1_ps(x); }

inline Vector widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

// To nearest even.
inline __m256i rounded(Vector x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
  const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  up = _mm512_mask_or_epi32(up, is_nan, bits, _mm512_set1_epi32(0x400000));  // a quiet NaN, which no carry changes
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
#endif
}

inline Vector load(const float* x, All) { return _mm512_loadu_ps(x); }
inline Vector load(const float* x, First lanes) { return _mm512_maskz_loadu_ps(lanes.bits(), x); }
inline Vector load(const BFloat16* x, All) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }
inline Vector load(const BFloat16* x, First lanes) { return widened(_mm256_maskz_loadu_epi16(lanes.bits(), x)); }

inline void store(float* y, Vector x, All) { _mm512_storeu_ps(y, x); }
inline void store(float* y, Vector x, First lanes) { _mm512_mask_storeu_ps(y, lanes.bits(), x); }
inline void store(BFloat16* y, Vector x, All) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), rounded(x)); }
inline void store(BFloat16* y, Vector x, First lanes) { _mm256_mask_storeu_epi16(y, lanes.bits(), rounded(x)); }

inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }    // a b + c
inline Vector fms(Vector a, Vector b, Vector c) { return _mm512_fmsub_ps(a, b, c); }    // a b - c
inline Vector fnma(Vector a, Vector b, Vector c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
inline Vector smaller(Vector a, Vector b) { return _mm512_min_ps(a, b); }               // b where one is NaN
inline Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }                // b where one is NaN
inline Vector whole(Vector x) { return _mm512_roundscale_ps(x, 0); }                    // to nearest even
inline Vector scaled(Vector x, Vector n) { return _mm512_scalef_ps(x, n); }             // x 2^n for a whole n

inline Mask is_equal(Vector a, Vector b) { return {_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ)}; }
inline Mask is_less(Vector a, Vector b) { return {_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ)}; }
inline Mask is_finite(Vector x) { return {static_cast<__mmask16>(~_mm512_fpclass_ps_mask(x, 0x99))}; }
inline Vector chosen(Mask mask, Vector x, Vector others) { return _mm512_mask_mov_ps(others, mask.bits, x); }
// Lanes whose byte is not 0.
inline Mask flags(const uint8_t* x) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return {_mm_test_epi8_mask(bytes, bytes)};
}

inline float sum(Vector x) { return _mm512_reduce_add_ps(x); }
inline float largest(Vector x) { return _mm512_reduce_max_ps(x); }

// y[i] = the sum of x[i], for four vectors.
inline void store_sums(float* y, const Vector* x) {
  const Vector a = _mm512_unpacklo_ps(x[0], x[1]) + _mm512_unpackhi_ps(x[0], x[1]);
  const Vector b = _mm512_unpacklo_ps(x[2], x[3]) + _mm512_unpackhi_ps(x[2], x[3]);
  const Vector c = _mm512_shuffle_ps(a, b, 0x44) + _mm512_shuffle_ps(a, b, 0xEE);
  const __m256 d = _mm512_castps512_ps256(c) + _mm512_extractf32x8_ps(c, 1);
  _mm_storeu_ps(y, _mm256_castps256_ps128(d) + _mm256_extractf128_ps(d, 1));
}

// Stops the compiler from reading x from memory at each use.
inline void keep_in_register(Vector& x) { asm("" : "+v"(x)); }

// ---- pairs of 16-bit numbers ----------------------------------------------------------------------------------------

using Shorts = __m512i;
inline Shorts load_shorts(const void* x) { return _mm512_loadu_si512(x); }
inline Shorts load_shorts(const void* x, int64_t count) {  // behind them 0
  return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << count) - 1), x);
}
inline Shorts broadcast_pair(int32_t pair) { return _mm512_set1_epi32(pair); }

// bfloat16 of pairs
inline Vector even_of(Shorts x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline Vector odd_of(Shorts x) {
  return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000))));
}

#ifdef __AVX512BF16__
#define SPECMAMBA_MULTIPLIES_PAIRS 1
using Pairs = __m512bh;
inline Pairs as_pairs(Shorts x) { return (__m512bh)x; }
// sum[i] + x[2 i] y[2 i] + x[2 i + 1] y[2 i + 1]
inline Vector add_products(Vector sum, Pairs x, Pairs y) { return _mm512_dpbf16_ps(sum, x, y); }
#else
#define SPECMAMBA_MULTIPLIES_PAIRS 0
#endif

// ---- integers -------------------------------------------------------------------------------------------------------

// With __m512i, whose lanes are int64, GCC 12 copies every sum around its instruction and spills them.
using Integers = int32_t __attribute__((vector_size(64)));

// sum[i] + x[2 i] y[2 i] + x[2 i + 1] y[2 i + 1], exactly.
inline Integers add_products(Integers sum, Shorts x, Shorts y) {
#ifdef __AVX512VNNI__
  return (Integers)_mm512_dpwssd_epi32((__m512i)sum, x, y);
#else
  return sum + (Integers)_mm512_madd_epi16(x, y);
#endif
}

inline Shorts load_widened(const int8_t* x) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}

inline Vector from_codes(__m128i x, const int8_t*) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)); }
inline Vector from_codes(__m128i x, const Float8*) {
  const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(x), 7);
  return _mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16(static_cast<int16_t>(0xBFFF))));
}
template <typename Code, typename = std::enable_if_t<sizeof(Code) == 1>>
inline Vector load(const Code* x, All) {
  return from_codes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)), x);
}
template <typename Code, typename = std::enable_if_t<sizeof(Code) == 1>>
inline Vector load(const Code* x, First lanes) {
  return from_codes(_mm_maskz_loadu_epi8(lanes.bits(), x), x);
}
inline Vector to_floats(Integers x) { return _mm512_cvtepi32_ps((__m512i)x); }

// The magnitudes of float32 as integers, which are in the same order.
inline Integers magnitudes(Vector x) {
  return (Integers)_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
}
inline Integers larger(Integers a, Integers b) { return (Integers)_mm512_max_epi32((__m512i)a, (__m512i)b); }
inline int32_t largest(Integers x) { return _mm512_reduce_max_epi32((__m512i)x); }

// x, rounded to nearest even and limited to int16.
inline __m256i to_shorts(Vector x) { return _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)); }
inline void store(int16_t* y, Vector x, All) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), to_shorts(x)); }
inline void store(int16_t* y, Vector x, First lanes) { _mm256_mask_storeu_epi16(y, lanes.bits(), to_shorts(x)); }

// ---- bytes, four neighbours in a lane -------------------------------------------------------------------------------

using Bytes = __m512i;
inline Bytes load_bytes(const void* x) { return _mm512_loadu_si512(x); }
inline Bytes low_halves(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Bytes high_halves(Bytes x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
// Bits may cross from byte to byte.
template <int Bits>
inline Bytes shifted_left(Bytes x) {
  return _mm512_slli_epi16(x, Bits);
}
template <int Bits>
inline Bytes shifted_right(Bytes x) {
  return _mm512_srli_epi16(x, Bits);
}
// Bits 0 to 3 of low, which has no others, and bits 4 and 5 of high.
inline Bytes with_high_bits(Bytes low, Bytes high) {
  return _mm512_or_si512(low, _mm512_and_si512(high, _mm512_set1_epi8(0x30)));
}
inline Bytes broadcast_four(int32_t four) { return _mm512_set1_epi32(four); }
inline Integers broadcast_integer(int32_t x) { return (Integers)_mm512_set1_epi32(x); }
// 16 bytes, and those of them at the places that the bytes of a vector name.
inline Bytes load_table(const void* x) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(x)));
}
inline Bytes looked_up(Bytes table, Bytes places) { return _mm512_shuffle_epi8(table, places); }

#ifdef __AVX512VNNI__
#define SPECMAMBA_MULTIPLIES_BYTES 1
// sum[i] + the sum of x[4 i + j] y[4 i + j] for j of 0 to 3, exactly; x without a sign, y with one.
inline Integers add_four_products(Integers sum, Bytes x, Bytes y) {
  return (Integers)_mm512_dpbusd_epi32((__m512i)sum, x, y);
}
#else
#define SPECMAMBA_MULTIPLIES_BYTES 0
using ShortSums = int16_t __attribute__((vector_size(64)));
inline ShortSums add_two_products(ShortSums sum, Bytes x, Bytes y) {
  return sum + (ShortSums)_mm512_maddubs_epi16(x, y);
}
inline Integers add_pairs(Integers sum, ShortSums x, int16_t factor) {
  return sum + (Integers)_mm512_madd_epi16((__m512i)x, _mm512_set1_epi16(factor));
}
#endif

inline Vector load_halves(const uint16_t* x) {  // float16
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
// x, rounded to nearest even and limited to int8.
inline void store_bytes(int8_t* y, Vector x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}

}  // namespace specmamba
