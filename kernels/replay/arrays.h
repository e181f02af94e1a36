// Operations on strided arrays of numbers: what PyTorch does between the kernels of a step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vector.h"

namespace specmamba {

constexpr int kDims = 6;
constexpr int64_t kChunk = 256;  // numbers that are converted at a time

enum Type : int64_t { kBool, kInt32, kInt64, kFloat, kBf16 };
enum Operation : int64_t {
  kCopy, kAdd, kSubtract, kMultiply, kFloorDivide, kAnd, kOr, kXor, kNot, kEqual, kNotEqual, kLess, kLessEqual,
  kGreater, kGreaterEqual, kLeast, kMost, kChoose, kNegative, kShiftLeft, kShiftRight, kDivide
};

// Distances are in bytes; 0 where a dimension is broadcast.
struct Array {
  char* data;
  int64_t type;
  int64_t strides[kDims];
};

// out = operation(a, b, c), computed in int64 or float32.
struct Map {
  Array out, a, b, c;
  int64_t operation, is_float, dims, sizes[kDims];
};

// Calls body(offsets...) for every row along the last dimension: where it begins in each of the arrays.
template <int Arrays, typename Body>
void for_rows(int64_t dims, const int64_t* sizes, const int64_t* const (&strides)[Arrays], const Body& body) {
  int64_t rows = 1, at[kDims] = {}, offsets[Arrays] = {};
  for (int64_t d = 0; d < dims - 1; ++d) rows *= sizes[d];
  if (dims > 0 && sizes[dims - 1] == 0) return;
  for (int64_t row = 0; row < rows; ++row) {
    body(offsets, at);
    for (int64_t d = dims - 2; d >= 0; --d) {
      const bool is_inside = ++at[d] < sizes[d];
      for (int i = 0; i < Arrays; ++i) offsets[i] += is_inside ? strides[i][d] : -(sizes[d] - 1) * strides[i][d];
      if (is_inside) break;
      at[d] = 0;
    }
  }
}

template <typename T, typename Number>
Number number_at(const char* x) {
  T value;
  std::memcpy(&value, x, sizeof value);
  if constexpr (std::is_same_v<T, BFloat16>) return static_cast<Number>(to_float(value));
  else return static_cast<Number>(value);
}

template <typename Number, typename T>
void read_as(const char* x, int64_t stride, int64_t count, Number* y) {
  if (stride == sizeof(T))
    for (int64_t i = 0; i < count; ++i) y[i] = number_at<T, Number>(x + i * static_cast<int64_t>(sizeof(T)));
  else
    for (int64_t i = 0; i < count; ++i) y[i] = number_at<T, Number>(x + i * stride);
}
template <typename Number>
void read(const Array& x, const char* data, int64_t stride, int64_t count, Number* y) {
  switch (x.type) {
    case kBool: return read_as<Number, uint8_t>(data, stride, count, y);
    case kInt32: return read_as<Number, int32_t>(data, stride, count, y);
    case kInt64: return read_as<Number, int64_t>(data, stride, count, y);
    case kFloat: return read_as<Number, float>(data, stride, count, y);
    default: return read_as<Number, BFloat16>(data, stride, count, y);
  }
}

inline BFloat16 to_bf16(float x) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return {0x7FC0};
  return {static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
}

template <typename T, typename Number>
void write_as(const Number* x, char* y, int64_t stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    T value;
    if constexpr (std::is_same_v<T, BFloat16>) value = to_bf16(static_cast<float>(x[i]));
    else if constexpr (std::is_same_v<T, bool>) value = x[i] != 0;
    else value = static_cast<T>(x[i]);
    std::memcpy(y + i * stride, &value, sizeof value);
  }
}
template <typename Number>
void write(const Array& y, const Number* x, char* data, int64_t stride, int64_t count) {
  switch (y.type) {
    case kBool: return write_as<bool>(x, data, stride, count);
    case kInt32: return write_as<int32_t>(x, data, stride, count);
    case kInt64: return write_as<int64_t>(x, data, stride, count);
    case kFloat: return write_as<float>(x, data, stride, count);
    default: return write_as<BFloat16>(x, data, stride, count);
  }
}

// Rounds towards minus infinity, as PyTorch's floor_divide. A division by zero gives 0: PyTorch refuses it.
inline int64_t floor_divided(int64_t a, int64_t b) {
  if (b == 0) return 0;
  const int64_t quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}
inline float floor_divided(float a, float b) { return std::floor(a / b); }

template <typename Number>
Number least(Number a, Number b) { return a != a || a < b ? a : b; }  // NaN where one of them is
template <typename Number>
Number most(Number a, Number b) { return a != a || a > b ? a : b; }

template <typename Number>
void operate(int64_t operation, const Number* a, const Number* b, const Number* c, Number* y, int64_t count) {
  const auto each = [&](const auto& body) {
    for (int64_t i = 0; i < count; ++i) y[i] = static_cast<Number>(body(i));
  };
  const auto whole = [](Number x) { return static_cast<int64_t>(x); };
  switch (operation) {
    case kCopy: return each([&](int64_t i) { return a[i]; });
    case kAdd: return each([&](int64_t i) { return a[i] + b[i]; });
    case kSubtract: return each([&](int64_t i) { return a[i] - b[i]; });
    case kMultiply: return each([&](int64_t i) { return a[i] * b[i]; });
    case kFloorDivide: return each([&](int64_t i) { return floor_divided(a[i], b[i]); });
    case kAnd: return each([&](int64_t i) { return whole(a[i]) & whole(b[i]); });
    case kOr: return each([&](int64_t i) { return whole(a[i]) | whole(b[i]); });
    case kXor: return each([&](int64_t i) { return whole(a[i]) ^ whole(b[i]); });
    case kNot: return each([&](int64_t i) { return a[i] == 0; });
    case kEqual: return each([&](int64_t i) { return a[i] == b[i]; });
    case kNotEqual: return each([&](int64_t i) { return a[i] != b[i]; });
    case kLess: return each([&](int64_t i) { return a[i] < b[i]; });
    case kLessEqual: return each([&](int64_t i) { return a[i] <= b[i]; });
    case kGreater: return each([&](int64_t i) { return a[i] > b[i]; });
    case kGreaterEqual: return each([&](int64_t i) { return a[i] >= b[i]; });
    case kLeast: return each([&](int64_t i) { return b[i] != b[i] ? b[i] : least(a[i], b[i]); });
    case kMost: return each([&](int64_t i) { return b[i] != b[i] ? b[i] : most(a[i], b[i]); });
    case kChoose: return each([&](int64_t i) { return a[i] != 0 ? b[i] : c[i]; });
    case kNegative: return each([&](int64_t i) { return -a[i]; });
    case kDivide: return each([&](int64_t i) { return b[i] == 0 && std::is_integral_v<Number> ? 0 : a[i] / b[i]; });
    case kShiftLeft: return each([&](int64_t i) { return whole(a[i]) << whole(b[i]); });
    default: return each([&](int64_t i) { return whole(a[i]) >> whole(b[i]); });
  }
}

template <typename Number>
void map(const Map& p) {
  const int64_t last = p.dims - 1, size = p.dims == 0 ? 1 : p.sizes[last];
  const Array* inputs[3] = {&p.a, &p.b, &p.c};
  const int64_t* strides[4] = {p.out.strides, p.a.strides, p.b.strides, p.c.strides};
  const auto stride = [&](int i) { return p.dims == 0 ? 0 : strides[i][last]; };
  for_rows(p.dims, p.sizes, {strides[0], strides[1], strides[2], strides[3]}, [&](const int64_t* offsets, auto) {
    for (int64_t begin = 0; begin < size; begin += kChunk) {
      const int64_t count = std::min(kChunk, size - begin);
      Number x[3][kChunk], y[kChunk];
      for (int i = 0; i < 3; ++i)
        if (inputs[i]->data != nullptr)
          read(*inputs[i], inputs[i]->data + offsets[i + 1] + begin * stride(i + 1), stride(i + 1), count, x[i]);
      operate(p.operation, x[0], x[1], x[2], y, count);
      write(p.out, y, p.out.data + offsets[0] + begin * stride(0), stride(0), count);
    }
  });
}

// ---- indexed copies -------------------------------------------------------------------------------------------------

constexpr int kIndices = 3;

struct Index {
  const char* data;
  int64_t is_int32, strides[kDims];  // strides in bytes
  int64_t step, size;                // bytes from one place to the next; how many places there are
};

// out = in, with one of the two found by `count` indices: out[i] = in[i, indices(i)], or where it writes_indexed,
// out[i, indices(i)] = in[i]. A negative index counts from the end. False: an index is outside.
struct Move {
  char *out, *in;
  int64_t element, writes_indexed, count, dims, sizes[kDims], out_strides[kDims], in_strides[kDims];
  Index index[kIndices];
};

inline bool find(const Index& index, int64_t offset, int64_t* place) {
  int64_t i;
  if (index.is_int32) i = number_at<int32_t, int64_t>(index.data + offset);
  else i = number_at<int64_t, int64_t>(index.data + offset);
  if (i < 0) i += index.size;
  *place += i * index.step;
  return 0 <= i && i < index.size;
}

inline bool move(const Move& p) {
  const int64_t last = p.dims - 1, size = p.dims == 0 ? 1 : p.sizes[last];
  const auto stride = [&](const int64_t* strides) { return p.dims == 0 ? 0 : strides[last]; };
  bool varies = false, is_valid = true;  // whether indices vary along the last dimension
  for (int64_t k = 0; k < p.count; ++k) varies = varies || stride(p.index[k].strides) != 0;
  const int64_t out_step = stride(p.out_strides), in_step = stride(p.in_strides);
  const bool is_block = !varies && out_step == p.element && in_step == p.element;
  const auto put = [&](char* out, const char* in, int64_t bytes) {
    if (bytes == 8) std::memcpy(out, in, 8);
    else std::memmove(out, in, bytes);
  };
  for_rows(p.dims, p.sizes, {p.out_strides, p.in_strides}, [&](const int64_t* offsets, const int64_t* at) {
    int64_t places[kIndices] = {}, place = 0;
    for (int64_t k = 0; k < p.count; ++k) {
      for (int64_t d = 0; d < last; ++d) places[k] += at[d] * p.index[k].strides[d];
      if (!varies) is_valid = find(p.index[k], places[k], &place) && is_valid;
    }
    if (!is_valid) return;
    for (int64_t i = 0; i < (is_block ? 1 : size); ++i) {
      int64_t found = place;
      for (int64_t k = 0; varies && k < p.count; ++k)
        is_valid = find(p.index[k], places[k] + i * stride(p.index[k].strides), &found) && is_valid;
      if (!is_valid) return;
      char* out = p.out + offsets[0] + i * out_step + (p.writes_indexed ? found : 0);
      const char* in = p.in + offsets[1] + i * in_step + (p.writes_indexed ? 0 : found);
      put(out, in, is_block ? size * p.element : p.element);
    }
  });
  return is_valid;
}

// ---- reductions and orders of rows ----------------------------------------------------------------------------------

enum Reduction : int64_t { kSum, kAll, kAny, kLeastOf, kMostOf, kRunningSum };

// The last `reduced` dimensions of a, of integers or bools; kRunningSum: along the last one, which out has too.
struct Reduce {
  Array out, a;
  int64_t reduction, reduced, dims, sizes[kDims];
};

inline int64_t reduced(int64_t reduction, int64_t x, int64_t y) {
  switch (reduction) {
    case kAll: return x != 0 && y != 0;
    case kAny: return x != 0 || y != 0;
    case kLeastOf: return std::min(x, y);
    case kMostOf: return std::max(x, y);
    default: return x + y;
  }
}

inline void reduce(const Reduce& p) {
  const int64_t last = p.dims - 1, size = p.sizes[last];
  const bool runs = p.reduction == kRunningSum;
  const auto is_first = [&](const int64_t* at) {
    return std::all_of(at + p.dims - p.reduced, at + last, [](int64_t i) { return i == 0; });
  };
  for_rows(p.dims, p.sizes, {p.out.strides, p.a.strides}, [&](const int64_t* offsets, const int64_t* at) {
    char* out = p.out.data + offsets[0];
    int64_t total = 0, begin = 0;
    const auto element = [&](int64_t i) {
      int64_t x;
      read(p.a, p.a.data + offsets[1] + i * p.a.strides[last], 0, 1, &x);
      return x;
    };
    if (is_first(at)) {
      total = p.reduction == kAll || p.reduction == kAny ? element(0) != 0 : element(0);
      begin = 1;
      if (runs) write(p.out, &total, out, 0, 1);
    } else {
      read(p.out, out, 0, 1, &total);
    }
    for (int64_t i = begin; i < size; ++i) {
      total = reduced(p.reduction, total, element(i));
      if (runs) write(p.out, &total, out + i * p.out.strides[last], 0, 1);
    }
    if (!runs) write(p.out, &total, out, 0, 1);
  });
}

// Rows of a along the last dimension, sorted: the first `kept` values and their places. Equal numbers keep their order.
struct Sort {
  Array values, places, a;
  int64_t descends, is_float, kept, dims, sizes[kDims];
};

template <typename Number>
void sort(const Sort& p) {
  const int64_t last = p.dims - 1, size = p.sizes[last];
  std::vector<Number> row(size), values(p.kept);
  std::vector<int64_t> order(size);
  const auto is_before = [&](int64_t i, int64_t j) {
    const Number x = row[i], y = row[j];
    if (x != x || y != y) return p.descends ? x != x && y == y : x == x && y != y;  // NaN is the largest
    return p.descends ? x > y : x < y;
  };
  const auto is_before_or_first = [&](int64_t i, int64_t j) { return is_before(i, j) || (!is_before(j, i) && i < j); };
  const auto body = [&](const int64_t* offsets, auto) {
    read(p.a, p.a.data + offsets[2], p.a.strides[last], size, row.data());
    for (int64_t i = 0; i < size; ++i) order[i] = i;
    if (p.kept == size) std::stable_sort(order.begin(), order.end(), is_before);
    else std::partial_sort(order.begin(), order.begin() + p.kept, order.end(), is_before_or_first);
    for (int64_t i = 0; i < p.kept; ++i) values[i] = row[order[i]];
    if (p.values.data != nullptr)
      write(p.values, values.data(), p.values.data + offsets[0], p.values.strides[last], p.kept);
    if (p.places.data != nullptr)
      write(p.places, order.data(), p.places.data + offsets[1], p.places.strides[last], p.kept);
  };
  for_rows(p.dims, p.sizes, {p.values.strides, p.places.strides, p.a.strides}, body);
}

}  // namespace specmamba
