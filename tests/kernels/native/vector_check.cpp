// Compares vector.h of one instruction set with scalar code. Prints what differs; exit status 0: nothing does.
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "vector.h"

using namespace specmamba;

namespace {

constexpr int kSize = static_cast<int>(kLanes);
const float kInfinity = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();
int num_differences = 0;

void expect(bool holds, const char* what, double got = 0, double wanted = 0) {
  if (!holds && ++num_differences <= 20) std::printf("%s: %.9g, not %.9g\n", what, got, wanted);
}

bool is_near(double got, double wanted) { return std::fabs(got - wanted) <= 1e-5; }

void expect_lanes(Vector got, const char* what, const std::function<double(int)>& wanted) {
  float lanes[kLanes];
  store(lanes, got, All{});
  for (int i = 0; i < kSize; ++i) expect(lanes[i] == wanted(i), what, lanes[i], wanted(i));
}

// Magnitudes up to 100, what is no number, and what is at the ends of float32 and of exponentials.
std::vector<float> many_numbers() {
  std::mt19937 generator(0);
  std::normal_distribution<float> normal;
  std::vector<float> x = {0.0f, -0.0f, kInfinity, -kInfinity, kNaN, 1e-40f, -1e-40f, 88.7f, 89.5f, -103.0f, -105.0f};
  for (int i = 0; i < 100000; ++i) x.push_back(30 * normal(generator));
  return x;
}

void check_exponentials(const std::vector<float>& x) {
  std::vector<float> y(x.size());
  for_vectors(x.size(), [&](int64_t i, auto lanes) { store(&y[i], exp(load(&x[i], lanes)), lanes); });
  for (size_t i = 0; i < x.size(); ++i) {
    const double wanted = std::exp(static_cast<double>(x[i]));
    if (std::isnan(x[i]))
      expect(std::isnan(y[i]), "exp of NaN", y[i]);
    else if (wanted > std::numeric_limits<float>::max())
      expect(y[i] == kInfinity, "exp", y[i], kInfinity);
    else
      expect(std::fabs(y[i] - wanted) <= 3 * 0x1p-23 * wanted + 0x1p-149, "exp", y[i], wanted);
  }
}

void check_bfloat16(const std::vector<float>& x) {
  std::vector<BFloat16> y(x.size());
  std::vector<float> back(x.size());
  for_vectors(x.size(), [&](int64_t i, auto lanes) { store(&y[i], load(&x[i], lanes), lanes); });
  for_vectors(x.size(), [&](int64_t i, auto lanes) { store(&back[i], load(&y[i], lanes), lanes); });
  for (size_t i = 0; i < x.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &x[i], sizeof bits);
    const BFloat16 nearest{static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
    if (std::isnan(x[i]))
      expect(std::isnan(back[i]), "bfloat16 of NaN", back[i]);
    else if (x[i] == 0 || std::fabs(x[i]) > std::numeric_limits<float>::min())  // AVX512-BF16 has no subnormal numbers
      expect(back[i] == to_float(nearest), "bfloat16", back[i], to_float(nearest));
  }
}

void check_arithmetic(const float* a, const float* b) {
  const Vector x = load(a, All{}), y = load(b, All{});
  double total = 0, most = -kInfinity;
  for (int i = 0; i < kSize; ++i) total += a[i], most = std::max<double>(most, a[i]);
  expect(is_near(sum(x), total), "sum", sum(x), total);
  expect(largest(x) == most, "largest", largest(x), most);
  expect_lanes(fma(x, y, x), "fma", [&](int i) { return std::fma(a[i], b[i], a[i]); });
  expect_lanes(fms(x, y, x), "fms", [&](int i) { return std::fma(a[i], b[i], -a[i]); });
  expect_lanes(fnma(x, y, x), "fnma", [&](int i) { return std::fma(-a[i], b[i], a[i]); });
  const Vector four[] = {x, y, x * y, x - y};
  float sums[4];
  store_sums(sums, four);
  for (int i = 0; i < 4; ++i) expect(is_near(sums[i], sum(four[i])), "store_sums", sums[i], sum(four[i]));
}

void check_parts(const float* a, const float* b) {
  for (int count = 1; count < kSize; ++count) {
    const First lanes(count);
    float y[kLanes];
    std::fill_n(y, kLanes, -5.0f);
    store(y, load(a, lanes), lanes);
    for (int i = 0; i < kSize; ++i) expect(y[i] == (i < count ? a[i] : -5), "part", y[i]);
    expect_lanes(load(a, lanes), "zeros behind a part", [&](int i) { return i < count ? a[i] : 0; });
    const Vector both = chosen(lanes, load(a, All{}), load(b, All{}));
    expect_lanes(both, "chosen", [&](int i) { return i < count ? a[i] : b[i]; });
  }
}

void check_masks(const float* a) {
  const Vector x = load(a, All{});
  float flawed[kLanes];
  std::copy_n(a, kLanes, flawed);
  flawed[0] = kInfinity, flawed[kLanes - 1] = kNaN;
  const Vector y = load(flawed, All{});
  expect_lanes(finite_or_zero(y), "finite_or_zero", [&](int i) { return i == 0 || i == kSize - 1 ? 0 : a[i]; });
  expect_lanes(smaller(y, x), "smaller", [&](int i) { return a[i]; });
  expect(!any(is_finite(larger(x, broadcast(kNaN)))), "larger");
  expect(first(is_equal(x, broadcast(a[2]))) == 2, "first");
  expect(!any(is_less(x, broadcast(-kInfinity))) && all(is_less(x, broadcast(kInfinity))), "is_less");
  expect(!any(none()) && all(every()) && any(none() | every()) && !any(none() & every()), "none and every");
  uint8_t bytes[16] = {};
  bytes[1] = 1, bytes[2] = 255;
  expect(first(flags(bytes)) == 1, "flags");
}

void check_pairs(const float* a, const float* b) {
  BFloat16 p[2 * kLanes], q[2 * kLanes];
  for (int i = 0; i < 2 * kSize; ++i) p[i] = to_bfloat16(a[i]), q[i] = to_bfloat16(b[i]);
  const auto compare = [&](Vector got, int count) {
    float y[kLanes];
    store(y, got, All{});
    for (int i = 0; i < kSize; ++i) {
      double wanted = a[i];
      for (int j = 2 * i; j < 2 * i + 2 && j < count; ++j) wanted += double{to_float(p[j])} * to_float(q[j]);
      expect(is_near(y[i], wanted), "pairs", y[i], wanted);
    }
  };
  const Vector x = load(a, All{});
  compare(add_products(x, load_pairs(p), load_pairs(q)), 2 * kSize);
  expect_lanes(even_of(load_shorts(p)), "even of pairs", [&](int i) { return to_float(p[2 * i]); });
  expect_lanes(odd_of(load_shorts(p)), "odd of pairs", [&](int i) { return to_float(p[2 * i + 1]); });
  for (int count = 1; count < 2 * kSize; ++count)
    compare(add_products(x, load_pairs(p, count), load_pairs(q, count)), count);
}

// All codes, in parts of every size, as vectors and one by one.
void check_codes() {
  int8_t whole[256];
  Float8 eights[256];
  for (int i = 0; i < 256; ++i) whole[i] = static_cast<int8_t>(i - 128), eights[i].bits = static_cast<uint8_t>(i);
  for (int size = 1; size <= 256; ++size) {
    float x[256], y[256];
    for_vectors(size, [&](int64_t i, auto lanes) { store(x + i, load(whole + i, lanes), lanes); });
    for_vectors(size, [&](int64_t i, auto lanes) { store(y + i, load(eights + i, lanes), lanes); });
    for (int i = 0; i < size; ++i) {
      expect(x[i] == i - 128 && to_float(whole[i]) == i - 128, "int8", x[i], i - 128);
      const int exponent = i >> 3 & 15, digits = i & 7;
      if (exponent == 15 && digits == 7) continue;  // NaN
      const double size_of = exponent == 0 ? digits * 0x1p-9 : std::ldexp(1 + digits / 8.0, exponent - 7);
      const double wanted = (i < 128 ? size_of : -size_of) / kUnit<Float8>;
      expect(y[i] == wanted && to_float(eights[i]) == wanted, "FP8", y[i], wanted);
    }
  }
}

void check_integers() {
  int8_t weights[2 * kLanes];
  for (int i = 0; i < 2 * kSize; ++i) weights[i] = static_cast<int8_t>(37 * i % 255 - 127);
  const int16_t inputs[] = {-32768, 32767};
  const Integers sums = add_products(Integers{}, broadcast_pair(inputs), load_widened(weights));
  expect_lanes(to_floats(sums), "products of integers", [&](int i) {
    return static_cast<float>(weights[2 * i] * -32768 + weights[2 * i + 1] * 32767);
  });
  const float x[] = {1e9f, -1e9f, 2.5f, 3.5f, -2.5f, 0.4f, 32767.6f, -32769.0f, 1.0f};
  const int16_t wanted[] = {32767, -32768, 2, 4, -2, 0, 32767, -32768, 1};
  int16_t y[9];
  for_vectors(9, [&](int64_t i, auto lanes) { store(y + i, load(x + i, lanes), lanes); });
  for (int i = 0; i < 9; ++i) expect(y[i] == wanted[i], "int16", y[i], wanted[i]);
  expect(largest(magnitudes(broadcast(-2.0f))) == 0x40000000, "magnitudes");
}

}  // namespace

int main() {
  const std::vector<float> x = many_numbers();
  float a[64], b[64];
  for (int i = 0; i < 64; ++i) a[i] = x[100 + i] / 32, b[i] = x[200 + i] / 32;
  check_exponentials(x);
  check_bfloat16(x);
  check_arithmetic(a, b);
  check_parts(a, b);
  check_masks(a);
  check_pairs(a, b);
  check_codes();
  check_integers();
  std::printf("%d differences in vectors of %d\n", num_differences, kSize);
  return num_differences != 0;
}
