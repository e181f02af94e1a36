// AVX2 with FMA. Included by vector.h.
#pragma once

#include <immintrin.h>

namespace specmamba {

using Vector = __m256;
constexpr int64_t kLanes = 8;
constexpr int kRegisters = 16;

// Lanes that hold have all bits set.
struct Mask {
  __m256 bits;
  Mask operator&(Mask other) const { return {_mm256_and_ps(bits, other.bits)}; }
  Mask operator|(Mask other) const { return {_mm256_or_ps(bits, other.bits)}; }
};
inline Mask as_mask(__m256i x) { return {_mm256_castsi256_ps(x)}; }
inline Mask none() { return as_mask(_mm256_setzero_si256()); }
inline Mask every() { return as_mask(_mm256_set1_epi32(-1)); }
inline bool any(Mask x) { return _mm256_movemask_ps(x.bits) != 0; }
inline bool all(Mask x) { return _mm256_movemask_ps(x.bits) == 0xFF; }
inline int64_t first(Mask x) { return __builtin_ctz(_mm256_movemask_ps(x.bits)); }  // of a mask with any

class First {
 public:
  explicit First(int64_t count) : count_(count) {}
  Mask mask() const { return as_mask(bits()); }
  __m256i bits() const {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int32_t>(count_)), lanes);
  }
  int64_t count() const { return count_; }

 private:
  int64_t count_;
};

inline Vector zero() { return _mm256_setzero_ps(); }
inline Vector broadcast(float x) { return _mm256_set1_ps(x); }

inline Vector widened(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }

// The low halves of eight int32, which are in 0 to 2^16 - 1.
inline __m128i narrowed(__m256i x) {
  return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}

// To nearest even.
inline __m128i rounded(Vector x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7FFF)));
  // a quiet NaN, which no carry changes
  const Vector nan = _mm256_or_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x400000)));
  const Vector is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  const Vector result = _mm256_blendv_ps(_mm256_castsi256_ps(up), nan, is_nan);
  return narrowed(_mm256_srli_epi32(_mm256_castps_si256(result), 16));
}

// The first `count` of eight 16-bit numbers; the others are 0.
inline __m128i load_part(const void* x, int64_t count) {
  alignas(16) uint16_t part[8] = {};
  std::memcpy(part, x, count * sizeof *part);
  return _mm_load_si128(reinterpret_cast<const __m128i*>(part));
}
inline void store_part(void* y, __m128i x, int64_t count) {
  alignas(16) uint16_t part[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(part), x);
  std::memcpy(y, part, count * sizeof *part);
}

inline Vector load(const float* x, All) { return _mm256_loadu_ps(x); }
inline Vector load(const float* x, First lanes) { return _mm256_maskload_ps(x, lanes.bits()); }
inline Vector load(const BFloat16* x, All) { return widened(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); }
inline Vector load(const BFloat16* x, First lanes) { return widened(load_part(x, lanes.count())); }

inline void store(float* y, Vector x, All) { _mm256_storeu_ps(y, x); }
inline void store(float* y, Vector x, First lanes) { _mm256_maskstore_ps(y, lanes.bits(), x); }
inline void store(BFloat16* y, Vector x, All) { _mm_storeu_si128(reinterpret_cast<__m128i*>(y), rounded(x)); }
inline void store(BFloat16* y, Vector x, First lanes) { store_part(y, rounded(x), lanes.count()); }

inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }    // a b + c
inline Vector fms(Vector a, Vector b, Vector c) { return _mm256_fmsub_ps(a, b, c); }    // a b - c
inline Vector fnma(Vector a, Vector b, Vector c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a b
inline Vector smaller(Vector a, Vector b) { return _mm256_min_ps(a, b); }               // b where one is NaN
inline Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }                // b where one is NaN
inline Vector whole(Vector x) {                                                         // to nearest even
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline Vector power_of_two(__m256i n) {  // -126 to 127
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

// x 2^n for a whole n of -252 to 254, in two steps: 2^n itself may be too small or too large.
inline Vector scaled(Vector x, Vector n) {
  const __m256i all = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(all, 1);
  return x * power_of_two(half) * power_of_two(_mm256_sub_epi32(all, half));
}

inline Mask is_equal(Vector a, Vector b) { return {_mm256_cmp_ps(a, b, _CMP_EQ_OQ)}; }
inline Mask is_less(Vector a, Vector b) { return {_mm256_cmp_ps(a, b, _CMP_LT_OQ)}; }
inline Mask is_finite(Vector x) { return is_equal(x - x, zero()); }
inline Vector chosen(Mask mask, Vector x, Vector others) { return _mm256_blendv_ps(others, x, mask.bits); }
// Lanes whose byte is not 0.
inline Mask flags(const uint8_t* x) {
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
  return as_mask(_mm256_cmpgt_epi32(bytes, _mm256_setzero_si256()));
}

inline float sum(Vector x) {
  const __m128 four = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return _mm_cvtss_f32(two) + _mm_cvtss_f32(_mm_movehdup_ps(two));
}
inline float largest(Vector x) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return std::max(_mm_cvtss_f32(two), _mm_cvtss_f32(_mm_movehdup_ps(two)));
}

// y[i] = the sum of x[i], for four vectors.
inline void store_sums(float* y, const Vector* x) {
  const Vector sums = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  _mm_storeu_ps(y, _mm256_castps256_ps128(sums) + _mm256_extractf128_ps(sums, 1));
}

// Stops the compiler from reading x from memory at each use.
inline void keep_in_register(Vector& x) { asm("" : "+x"(x)); }

// ---- pairs of 16-bit numbers ----------------------------------------------------------------------------------------

using Shorts = __m256i;
inline Shorts load_shorts(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }
inline Shorts load_shorts(const void* x, int64_t count) {  // behind them 0
  alignas(32) uint16_t part[16] = {};
  std::memcpy(part, x, count * sizeof *part);
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(part));
}
inline Shorts broadcast_pair(int32_t pair) { return _mm256_set1_epi32(pair); }

#define SPECMAMBA_MULTIPLIES_PAIRS 0
// bfloat16 of pairs
inline Vector even_of(Shorts x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline Vector odd_of(Shorts x) {
  return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000))));
}

// ---- integers -------------------------------------------------------------------------------------------------------

using Integers = int32_t __attribute__((vector_size(32)));

// sum[i] + x[2 i] y[2 i] + x[2 i + 1] y[2 i + 1], exactly.
inline Integers add_products(Integers sum, Shorts x, Shorts y) { return sum + (Integers)_mm256_madd_epi16(x, y); }

inline Shorts load_widened(const int8_t* x) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}

inline Vector load(const int8_t* x, All) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
}
inline Vector load(const Float8* x, All) {
  const __m128i shorts = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
  return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(shorts, 7), _mm_set1_epi16(static_cast<int16_t>(0xBFFF))));
}
template <typename Code, typename = std::enable_if_t<sizeof(Code) == 1>>
inline Vector load(const Code* x, First lanes) {
  Code part[8] = {};
  std::memcpy(part, x, lanes.count());
  return load(part, All{});
}
inline Vector to_floats(Integers x) { return _mm256_cvtepi32_ps((__m256i)x); }

// The magnitudes of float32 as integers, which are in the same order.
inline Integers magnitudes(Vector x) {
  return (Integers)_mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFFFFFF));
}
inline Integers larger(Integers a, Integers b) { return (Integers)_mm256_max_epi32((__m256i)a, (__m256i)b); }
inline int32_t largest(Integers x) {
  int32_t most = x[0];
  for (int i = 1; i < 8; ++i) most = std::max(most, x[i]);
  return most;
}

// x, rounded to nearest even and limited to int16.
inline __m128i to_shorts(Vector x) {
  const __m256i whole = _mm256_cvtps_epi32(x);
  return _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
}
inline void store(int16_t* y, Vector x, All) { _mm_storeu_si128(reinterpret_cast<__m128i*>(y), to_shorts(x)); }
inline void store(int16_t* y, Vector x, First lanes) { store_part(y, to_shorts(x), lanes.count()); }

// ---- bytes, four neighbours in a lane -------------------------------------------------------------------------------

using Bytes = __m256i;
inline Bytes load_bytes(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }
inline Bytes low_halves(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Bytes high_halves(Bytes x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
// Bits may cross from byte to byte.
template <int Bits>
inline Bytes shifted_left(Bytes x) {
  return _mm256_slli_epi16(x, Bits);
}
template <int Bits>
inline Bytes shifted_right(Bytes x) {
  return _mm256_srli_epi16(x, Bits);
}
// Bits 0 to 3 of low, which has no others, and bits 4 and 5 of high.
inline Bytes with_high_bits(Bytes low, Bytes high) {
  return _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi8(0x30)));
}
inline Bytes broadcast_four(int32_t four) { return _mm256_set1_epi32(four); }
inline Integers broadcast_integer(int32_t x) { return (Integers)_mm256_set1_epi32(x); }
// 16 bytes, and those of them at the places that the bytes of a vector name.
inline Bytes load_table(const void* x) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(x)));
}
inline Bytes looked_up(Bytes table, Bytes places) { return _mm256_shuffle_epi8(table, places); }

#define SPECMAMBA_MULTIPLIES_BYTES 0
using ShortSums = int16_t __attribute__((vector_size(32)));
inline ShortSums add_two_products(ShortSums sum, Bytes x, Bytes y) {
  return sum + (ShortSums)_mm256_maddubs_epi16(x, y);
}
inline Integers add_pairs(Integers sum, ShortSums x, int16_t factor) {
  return sum + (Integers)_mm256_madd_epi16((__m256i)x, _mm256_set1_epi16(factor));
}

inline Vector load_halves(const uint16_t* x) {  // float16
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
// x, rounded to nearest even and limited to int8.
inline void store_bytes(int8_t* y, Vector x) {
  const __m128i shorts = to_shorts(x);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(y), _mm_packs_epi16(shorts, shorts));
}

}  // namespace specmamba
