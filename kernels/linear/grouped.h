// y = x W^T with weights of 4, 6 or 8 bits that share a scale in groups of inputs, and inputs rounded to bytes by the same
// groups; see README.md.
#pragma once

#include <cstring>
#include <limits>
#include <memory>

#include "linear/panels.h"
#include "vector.h"

namespace specmamba {

constexpr int kGroupedRows = kRegisters / 4;  // of a pass: with two vectors of sums each, they fill half of the registers
constexpr int64_t kVectorBytes = 4 * kLanes;  // four inputs of kLanes outputs
constexpr int64_t kGroupedPrefetch = 2048;    // bytes ahead, into L1
// As for bf16: the hardware's own prefetching is faster for few rows on CPUs that multiply pairs.
constexpr int kGroupedPrefetchRows = SPECMAMBA_MULTIPLIES_PAIRS ? 6 : 1;

// How the weights of a matrix are grouped.
struct Grouping {
  int64_t n, k, group;
  int bits;  // of a code: 4, 6 or 8
  bool has_minimum;

  int64_t groups() const { return (k + group - 1) / group; }
  int64_t padded() const { return groups() * group; }
  int64_t group_bytes() const {  // of a panel: codes, scales and perhaps minima
    return group * kPanel * bits / 8 + kPanel * (has_minimum ? 4 : 2);
  }
  int64_t panel_bytes() const { return groups() * group_bytes(); }
};

// Writes codes of `inputs` inputs from `at` on of a panel's outputs; code(row, at) gives one. 4 and 8 bits: four inputs
// of all outputs, and with 4 bits in the high halves the next four. 6 bits: for each vector of outputs the low four bits
// of sixteen inputs in the same way, and then their high bits, two by two.
template <typename Code>
uint8_t* put_codes(uint8_t* out, const Grouping& of, int64_t row, int64_t at, int64_t inputs, const Code& code) {
  const auto put = [&](int64_t first, int64_t rows, const auto& value) {
    for (int64_t r = first; r < first + rows; ++r)
      for (int64_t i = 0; i < 4; ++i) *out++ = static_cast<uint8_t>(value(r, i));
  };
  const auto both = [&](int64_t from) {
    return [&code, from](int64_t r, int64_t i) { return (code(r, from + i) & 15) | code(r, from + i + 4) << 4; };
  };
  if (of.bits == 4)
    for (int64_t k = at; k < at + inputs; k += 8) put(row, kPanel, both(k));
  else if (of.bits == 8)
    for (int64_t k = at; k < at + inputs; k += 4) put(row, kPanel, [&](int64_t r, int64_t i) { return code(r, k + i); });
  else
    for (int64_t k = at; k < at + inputs; k += 16)
      for (int64_t r = row; r < row + kPanel; r += kLanes) {
        put(r, kLanes, both(k));
        put(r, kLanes, both(k + 8));
        put(r, kLanes, [&](int64_t n, int64_t i) {
          return code(n, k + i) >> 4 | code(n, k + i + 4) >> 4 << 2 | code(n, k + i + 8) >> 4 << 4 |
                 code(n, k + i + 12) >> 4 << 6;
        });
      }
  return out;
}

// codes [n, k], a byte each, with scales and minima [n, groups] in float16 -> panels: groups one after the other, each
// with its codes and then its scales. Beyond n and k codes are zero.
inline void pack_grouped(const uint8_t* codes, const uint16_t* scale, const uint16_t* minimum, uint8_t* packed,
                         const Grouping& of, int num_threads) {
  const auto code = [&](int64_t row, int64_t at) { return row < of.n && at < of.k ? codes[row * of.k + at] : 0; };
  parallel_for(panels_of(of.n), 1, num_threads, [&](int64_t panel, int64_t last) {
    for (; panel < last; ++panel) {
      uint8_t* out = packed + panel * of.panel_bytes();
      const int64_t first = panel * kPanel;
      for (int64_t g = 0; g < of.groups(); ++g) {
        out = put_codes(out, of, first, g * of.group, of.group, code);
        for (const uint16_t* each : {scale, minimum})
          for (int64_t row = first; each != nullptr && row < first + kPanel; ++row, out += 2) {
            const uint16_t value = row < of.n ? each[row * of.groups() + g] : 0;
            std::memcpy(out, &value, sizeof value);
          }
      }
    }
  });
}

// Rows of inputs as bytes, in the order in which passes read them: rows of a pass side by side, input by input.
class GroupedInputs {
 public:
  GroupedInputs(int64_t rows, const Grouping& of, int offset)
      : of_(of), offset_(offset), bytes_(new int8_t[rows * of.padded()]), scale_(new float[rows * of.groups()]),
        sum_(new float[rows * of.groups()]), start_(new int32_t[rows * of.groups()]) {}

  // Rows [first, first + rows) of x, which one product takes.
  template <typename X>
  void set(const X* x, int64_t first, int64_t rows, int num_threads) {
    const int64_t step = rows_per_pass(rows, kGroupedRows);
    parallel_for(rows, std::max<int64_t>(1, kInputsPart / of_.k), num_threads, [&](int64_t row, int64_t last) {
      for (; row < last; ++row) {
        const int64_t begin = row / step * step;
        set_row(x + (first + row) * of_.k, first + begin, row - begin, std::min(step, rows - begin));
      }
    });
  }

  const int8_t* bytes(int64_t row) const { return bytes_.get() + row * of_.padded(); }
  const float* scale(int64_t row) const { return scale_.get() + row * of_.groups(); }
  const float* sum(int64_t row) const { return sum_.get() + row * of_.groups(); }      // times scale
  const int32_t* start(int64_t row) const { return start_.get() + row * of_.groups(); }  // of sums of products

 private:
  // Place `at` of the `rows` rows of the pass that begins with the row `begin`.
  template <typename X>
  void set_row(const X* x, int64_t begin, int64_t at, int64_t rows) {
    const int64_t unit = std::min<int64_t>(of_.group, 32);
    int8_t* bytes = bytes_.get() + begin * of_.padded() + at * unit;
    const int64_t place = begin * of_.groups() + at;
    for (int64_t g = 0; g < of_.groups(); ++g) {
      const int64_t count = std::min(of_.group, of_.k - g * of_.group), to = place + g * rows;
      int32_t sum = 0;
      scale_[to] = round_group(x + g * of_.group, count, unit, bytes, rows * unit, &sum);
      sum_[to] = scale_[to] * static_cast<float>(sum);
      start_[to] = -offset_ * sum;
      bytes += rows * of_.group;
    }
  }

  // `count` inputs -> bytes in runs of `unit` that lie `stride` apart. Gives their scale, NaN where an input is no
  // number, and their sum.
  template <typename X>
  float round_group(const X* x, int64_t count, int64_t unit, int8_t* bytes, int64_t stride, int32_t* sum) const {
    Integers most{};
    for_vectors(count, [&](int64_t i, auto lanes) { most = larger(most, magnitudes(load(x + i, lanes))); });
    const int32_t bits = largest(most);
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    const bool is_number = bits >> 23 != 255, is_tiny = magnitude < 0x1p-100f;
    const Vector inverse = broadcast(is_number && !is_tiny ? 127.0f / magnitude : 0.0f);
    for (int64_t at = 0; at < of_.group; at += unit, bytes += stride) {
      if (at + unit > count || !is_number) std::memset(bytes, 0, unit);
      if (is_number)
        for_vectors(std::min(unit, count - at), [&](int64_t i, auto lanes) {
          store_bytes(bytes + i, load(x + at + i, lanes) * inverse);
        });
      for (int64_t i = 0; i < unit; ++i) *sum += bytes[i];
    }
    return !is_number ? std::numeric_limits<float>::quiet_NaN() : is_tiny ? 0.0f : magnitude / 127.0f;
  }

  Grouping of_;
  int offset_;
  std::unique_ptr<int8_t[]> bytes_;
  std::unique_ptr<float[]> scale_, sum_;
  std::unique_ptr<int32_t[]> start_;
};

// Codes of a vector of kLanes outputs, the first or second of a panel: of four inputs of a step of eight, and of the next
// four; bytes without a sign. `w`: of the unit. kSums: products of so many fours of inputs may be summed in pairs of 16
// bits, where bytes are multiplied in pairs; 0: the codes go there in two planes of four bits.
struct FourBits {
  static constexpr int kBits = 4, kSums = 8;
  void load(const uint8_t* w, int step, int j, Bytes* first, Bytes* second) const {
    const Bytes both = load_bytes(w + (2 * step + j) * kVectorBytes);
    *first = low_halves(both), *second = high_halves(both);
  }
};
template <int Sums>
struct FourBitsOfTable {
  static constexpr int kBits = 4, kSums = Sums;
  Bytes table;
  void load(const uint8_t* w, int step, int j, Bytes* first, Bytes* second) const {
    FourBits{}.load(w, step, j, first, second);
    *first = looked_up(table, *first), *second = looked_up(table, *second);
  }
};
struct SixBits {
  static constexpr int kBits = 6, kSums = 2;
  void load(const uint8_t* w, int step, int j, Bytes* first, Bytes* second) const {
    const uint8_t* of_sixteen = w + (step / 2 * 2 + j) * 3 * kVectorBytes;
    const Bytes both = load_bytes(of_sixteen + step % 2 * kVectorBytes);
    const Bytes high = load_bytes(of_sixteen + 2 * kVectorBytes);
    *first = with_high_bits(low_halves(both), step % 2 == 0 ? shifted_left<4>(high) : high);
    *second = with_high_bits(high_halves(both), step % 2 == 0 ? shifted_left<2>(high) : shifted_right<2>(high));
  }
};
struct EightBits {
  static constexpr int kBits = 8, kSums = 0;
  void load(const uint8_t* w, int step, int j, Bytes* first, Bytes* second) const {
    *first = load_bytes(w + (4 * step + j) * kVectorBytes);
    *second = load_bytes(w + (4 * step + 2 + j) * kVectorBytes);
  }
};

template <typename Codes, int Unit>  // inputs that are summed at a time: 16 or 32
struct GroupedProduct {
  const GroupedInputs& x;
  int64_t first;  // row of x
  const uint8_t* weight;
  const float* factor;  // [n]
  Codes codes;
  Grouping of;
  void* y;  // [rows, n] bfloat16 or float32
  bool is_float;
  int64_t rows, n, k;

  static constexpr bool kHasParts = false;
  int64_t panel_bytes() const { return of.panel_bytes(); }

  // Groups are added in ascending order, and within them every sum is exact, whatever Rows are.
  template <int Rows, int Panels>
  void tile(int64_t row, int64_t panel) const {
    Vector total[Rows][2];
    for (auto& of_row : total) of_row[0] = of_row[1] = zero();
    const uint8_t* w = weight + panel * of.panel_bytes();
    const int8_t* in = x.bytes(first + row);
    const float *scale = x.scale(first + row), *sum = x.sum(first + row);
    const int32_t* start = x.start(first + row);
    for (int64_t g = 0; g < of.groups(); ++g, scale += Rows, sum += Rows, start += Rows) {
      Integers products[Rows][2];
      for (int i = 0; i < Rows; ++i) products[i][0] = products[i][1] = broadcast_integer(start[i]);
      for (int64_t at = 0; at < of.group; at += Unit, w += kUnitBytes, in += Rows * Unit) {
        if (Rows >= kGroupedPrefetchRows && row == 0)
          for (int64_t ahead = 0; ahead < kUnitBytes; ahead += kLineBytes)
            __builtin_prefetch(w + kGroupedPrefetch + ahead, 0, 3);
        add_unit(products, w, in);
      }
      const Vector scales[2] = {halves(w, 0), halves(w, 1)};
      w += 2 * kPanel;
      for (int i = 0; i < Rows; ++i)
        for (int j = 0; j < 2; ++j)
          total[i][j] = fma(to_floats(products[i][j]), scales[j] * broadcast(scale[i]), total[i][j]);
      if (!of.has_minimum) continue;
      const Vector minima[2] = {halves(w, 0), halves(w, 1)};
      w += 2 * kPanel;
      for (int i = 0; i < Rows; ++i)
        for (int j = 0; j < 2; ++j) total[i][j] = fma(minima[j], broadcast(sum[i]), total[i][j]);
    }
    for (int i = 0; i < Rows; ++i)
      for (int j = 0; j < 2; ++j) finish(row + i, panel * kPanel + j * kLanes, total[i][j]);
  }

 private:
  static constexpr int64_t kUnitBytes = int64_t{Unit} * kPanel * Codes::kBits / 8;

  static Vector halves(const uint8_t* w, int j) {
    return load_halves(reinterpret_cast<const uint16_t*>(w) + j * kLanes);
  }

  template <int Rows>
  __attribute__((always_inline)) void add_unit(Integers (&sum)[Rows][2], const uint8_t* w, const int8_t* in) const {
#if SPECMAMBA_MULTIPLIES_BYTES
#pragma GCC unroll 4
    for (int step = 0; step < Unit / 8; ++step) {
      Bytes even[2], odd[2];
      for (int j = 0; j < 2; ++j) codes.load(w, step, j, &even[j], &odd[j]);
#pragma GCC unroll 16
      for (int i = 0; i < Rows; ++i) {
        const Bytes a = broadcast_four(in + i * Unit + 8 * step), b = broadcast_four(in + i * Unit + 8 * step + 4);
        for (int j = 0; j < 2; ++j)
          sum[i][j] = add_four_products(add_four_products(sum[i][j], even[j], a), odd[j], b);
      }
    }
#else
    constexpr int kSums = Codes::kSums == 0 ? 8 : Codes::kSums, kSteps = std::min(kSums / 2, Unit / 8);
    for (int plane = 0; plane < (Codes::kSums == 0 ? 2 : 1); ++plane)
      for (int first = 0; first < Unit / 8; first += kSteps) {
        ShortSums part[Rows][2] = {};
#pragma GCC unroll 4
        for (int step = first; step < first + kSteps; ++step) {
          Bytes even[2], odd[2];
          for (int j = 0; j < 2; ++j) {
            codes.load(w, step, j, &even[j], &odd[j]);
            if constexpr (Codes::kSums == 0) {
              even[j] = plane == 0 ? low_halves(even[j]) : high_halves(even[j]);
              odd[j] = plane == 0 ? low_halves(odd[j]) : high_halves(odd[j]);
            }
          }
#pragma GCC unroll 16
          for (int i = 0; i < Rows; ++i) {
            const Bytes a = broadcast_four(in + i * Unit + 8 * step), b = broadcast_four(in + i * Unit + 8 * step + 4);
            for (int j = 0; j < 2; ++j)
              part[i][j] = add_two_products(add_two_products(part[i][j], even[j], a), odd[j], b);
          }
        }
        for (int i = 0; i < Rows; ++i)
          for (int j = 0; j < 2; ++j) sum[i][j] = add_pairs(sum[i][j], part[i][j], plane == 0 ? 1 : 16);
      }
#endif
  }

  void finish(int64_t row, int64_t column, Vector total) const {
    for_columns(n - column, [&](auto lanes) {
      const Vector result = total * load(factor + column, lanes);
      if (is_float)
        store(static_cast<float*>(y) + row * n + column, result, lanes);
      else
        store(static_cast<BFloat16*>(y) + row * n + column, result, lanes);
    });
  }
};

template <typename Codes, int Unit>
void multiply_panels(const GroupedProduct<Codes, Unit>& p, int64_t first, int64_t last) {
  const int64_t step = rows_per_pass(p.rows, kGroupedRows);
  for (; first < last; ++first)
    for (int64_t row = 0; row < p.rows; row += step)
      tile<1>(p, std::min(step, p.rows - row), row, first, std::make_integer_sequence<int, kGroupedRows>{});
}

// Calls body(codes, unit as a constant) for codes of so many bits, places in a table where there is one, in these groups.
template <typename Body>
void with_codes(int bits, const uint8_t* table, int64_t group, const Body& body) {
  const auto with_unit = [&](auto codes) {
    if (group % 32 == 0)
      body(codes, std::integral_constant<int, 32>{});
    else
      body(codes, std::integral_constant<int, 16>{});
  };
  if (bits == 8)
    with_unit(EightBits{});
  else if (bits == 6)
    with_unit(SixBits{});
  else if (table == nullptr)
    with_unit(FourBits{});
#if !SPECMAMBA_MULTIPLIES_BYTES
  else if (*std::max_element(table, table + 16) <= 32)  // as of e2m1: four times 2 * 32 * 127 fits into 16 bits
    with_unit(FourBitsOfTable<4>{load_table(table)});
#endif
  else
    with_unit(FourBitsOfTable<0>{load_table(table)});
}

}  // namespace specmamba
