// Products with a packed weight; see README.md for layouts, panels.h for the loops.
#include "linear/bf16.h"
#include "linear/grouped.h"
#include "linear/grouped_rows.h"
#include "linear/int8.h"
#include "linear/to_bytes.h"
#include "linear/widened.h"
#include "live.h"
#include "replayable.h"

using namespace specmamba;

extern "C" {

// Elements of a packed weight [n, k].
int64_t linear_packed_size(int64_t n, int64_t k) { return panels_of(n) * panel_size(k); }

void linear_pack(const BFloat16* weight, BFloat16* packed, int64_t n, int64_t k, int num_threads) {
  pack<kInputsOf<BFloat16>>(weight, packed, n, k, num_threads);
}

void linear_pack_float(const float* weight, float* packed, int64_t n, int64_t k, int num_threads) {
  pack<1>(weight, packed, n, k, num_threads);
}

void linear_pack_int8(const int8_t* weight, int8_t* packed, int64_t n, int64_t k, int num_threads) {
  pack<2>(weight, packed, n, k, num_threads);
}

// x [rows, k] times packed -> y [rows, n], all contiguous; the first *live rows, or all if live is null.
void linear_multiply(const BFloat16* x, int64_t rows, const int64_t* live, const BFloat16* packed, BFloat16* y,
                     int64_t n, int64_t k, int num_threads) {
  rows = live_rows(rows, live);
  if (rows > 0) multiply_bf16(x, rows, packed, y, n, k, num_threads);
}

// The same in float32.
void linear_multiply_float(const float* x, int64_t rows, const int64_t* live, const float* packed, float* y,
                           int64_t n, int64_t k, int num_threads) {
  rows = live_rows(rows, live);
  if (rows > 0) multiply(WidenedProduct<float, float>{x, packed, y, rows, n, k, k}, num_threads);
}

// The same for int8 with the scales [n] of its outputs; x and y are bfloat16 or float32.
void linear_multiply_int8(const void* x, int64_t rows, const int64_t* live, const int8_t* packed, const float* scale,
                          void* y, int64_t n, int64_t k, int is_bf16, int num_threads) {
  rows = live_rows(rows, live);
  if (rows == 0) return;
  if (is_bf16)
    multiply_int8(static_cast<const BFloat16*>(x), rows, packed, scale, static_cast<BFloat16*>(y), n, k, num_threads);
  else
    multiply_int8(static_cast<const float*>(x), rows, packed, scale, static_cast<float*>(y), n, k, num_threads);
}

// Quantized weights [n, k] -> bytes [n, k] and a scale for every 128 inputs; `table`, `minimum`: or null.
void linear_to_bytes(const uint8_t* codes, const float* table, const float* scale, const float* minimum, int8_t* out,
                     float* out_scale, int64_t n, int64_t k, int64_t group, int is_signed, int num_threads) {
  to_bytes(StoredCodes{codes, is_signed != 0, table, scale, minimum, n, k, group}, out, out_scale, num_threads);
}

// Bytes of a packed weight [n, k] of codes in groups.
int64_t linear_grouped_size(int64_t n, int64_t k, int64_t group, int bits, int has_minimum) {
  return panels_of(n) * Grouping{n, k, group, bits, has_minimum != 0}.panel_bytes();
}

void linear_pack_grouped(const uint8_t* codes, const uint16_t* scale, const uint16_t* minimum, uint8_t* packed,
                         int64_t n, int64_t k, int64_t group, int bits, int num_threads) {
  pack_grouped(codes, scale, minimum, packed, Grouping{n, k, group, bits, minimum != nullptr}, num_threads);
}

// x [rows, k] times packed codes, less an offset, with the factors [n] of their scales -> y [rows, n]; x and y are
// bfloat16 or float32; `table`: 16 bytes that codes are places in, or null.
void linear_multiply_grouped(const void* x, int64_t rows, const int64_t* live, const uint8_t* packed,
                             const float* factor, const uint8_t* table, void* y, int64_t n, int64_t k, int64_t group,
                             int bits, int offset, int has_minimum, int is_bf16, int num_threads) {
  rows = live_rows(rows, live);
  if (rows == 0) return;
  const Grouping of{n, k, group, bits, has_minimum != 0};
  GroupedInputs inputs(rows, of, offset);
  if (is_bf16)
    inputs.set(static_cast<const BFloat16*>(x), 0, rows, num_threads);
  else
    inputs.set(static_cast<const float*>(x), 0, rows, num_threads);
  with_codes(bits, table, group, [&](auto codes, auto unit) {
    using Product = GroupedProduct<decltype(codes), decltype(unit)::value>;
    multiply(Product{inputs, 0, packed, factor, codes, of, y, !is_bf16, rows, n, k}, num_threads);
  });
}

// Rows `index` [count] of packed codes, the first *live or all -> out [count, k] bfloat16 or float32; arguments as above.
void linear_rows_grouped(const int64_t* index, int64_t count, const int64_t* live, const uint8_t* packed,
                         const float* factor, const uint8_t* table, void* out, int64_t n, int64_t k, int64_t group,
                         int bits, int offset, int has_minimum, int is_bf16, int num_threads) {
  const Grouping of{n, k, group, bits, has_minimum != 0};
  count = live_rows(count, live);
  if (is_bf16)
    take_rows(index, count, packed, factor, table, static_cast<BFloat16*>(out), of, offset, num_threads);
  else
    take_rows(index, count, packed, factor, table, static_cast<float*>(out), of, offset, num_threads);
}

}  // extern "C"

SPECMAMBA_REPLAYABLE(linear_multiply)
SPECMAMBA_REPLAYABLE(linear_multiply_float)
SPECMAMBA_REPLAYABLE(linear_multiply_int8)
SPECMAMBA_REPLAYABLE(linear_multiply_grouped)
SPECMAMBA_REPLAYABLE(linear_rows_grouped)
