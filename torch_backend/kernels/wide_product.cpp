// The product of two bf16 matrices with an FP32 result on the CPU (wide_product.py), by the block product of oneDNN
// that torch exports: at::native::cpublas::brgemm. It reads the right matrix in blocks of columns, in pairs of rows:
// [K / 2][COLUMNS][2] (VNNI). Sums are FP32, in the processor's own bf16 instructions. packing.h stands before this file.

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include <exception>
#include <memory>
#include <string>

namespace {

// Columns of a block of the right matrix, and rows of a block of a left matrix that is copied: what a core's second-level
// cache holds beside the other operand.
constexpr int64_t COLUMNS = 64, ROWS = 128;

struct Matrix {
  const BFloat16* data;
  int64_t row, column;  // strides in elements

  const BFloat16* at(int64_t i, int64_t j) const { return data + i * row + j * column; }
};

// Copies columns [first, first + n) of `from` (k, …) to [k / 2][COLUMNS][2]; pads k to an even number with zeros.
void pack(const Matrix& from, int64_t k, int64_t first, int64_t n, BFloat16* to) {
  auto* words = reinterpret_cast<uint32_t*>(to);
  const int64_t pairs = k / 2;
  if (from.row == 1) {
    transpose_words(from.at(0, first), from.column * sizeof(BFloat16), n, pairs, words, COLUMNS);
  }
  for (int64_t pair = from.row == 1 ? pairs : 0; pair < (k + 1) / 2; ++pair) {
    const bool both = 2 * pair + 1 < k;
    const BFloat16* upper = from.at(2 * pair, first);
    const BFloat16* lower = both ? from.at(2 * pair + 1, first) : nullptr;
    if (from.column == 1) {
      pair_rows(upper, lower, n, words + pair * COLUMNS);
      continue;
    }
    BFloat16* line = to + pair * COLUMNS * 2;
    for (int64_t j = 0; j < n; ++j) {
      line[2 * j] = upper[j * from.column];
      line[2 * j + 1] = both ? lower[j * from.column] : BFloat16(0.f);
    }
  }
}

// Copies rows [first, first + m) of `from` (…, k) to [m][even k], with a zero after an odd k. m ≤ ROWS.
void pack_left(const Matrix& from, int64_t k, int64_t first, int64_t m, BFloat16* to) {
  const int64_t even = k + k % 2;
  if (from.row != 1) {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < k; ++j) to[i * even + j] = *from.at(first + i, j);
      if (even > k) to[i * even + k] = BFloat16(0.f);
    }
    return;
  }
  // Columns are contiguous: pairs of them, eight at a time, are transposed.
  constexpr int64_t PAIRS = 8;
  uint32_t pairs[PAIRS * ROWS];
  for (int64_t pair = 0; pair < even / 2; pair += PAIRS) {
    const int64_t count = std::min(PAIRS, even / 2 - pair);
    for (int64_t p = 0; p < count; ++p) {
      const int64_t j = 2 * (pair + p);
      pair_rows(from.at(first, j), j + 1 < k ? from.at(first, j + 1) : nullptr, m, pairs + p * ROWS);
    }
    transpose_words(pairs, ROWS * sizeof(uint32_t), count, m, reinterpret_cast<uint32_t*>(to) + pair, even / 2);
  }
}

void multiply(int64_t m, int64_t n, int64_t k, const BFloat16* a, int64_t row, const BFloat16* b, float* c, int64_t width,
              bool add) {
  at::native::cpublas::brgemm(m, n, k + k % 2, row, COLUMNS, width, add, a, b, c, /*is_vnni=*/true);
}

void product(const Matrix& a, const Matrix& b, float* c, int64_t m, int64_t n, int64_t k, bool add) {
  const int64_t blocks = (n + COLUMNS - 1) / COLUMNS, even = k + k % 2, block = even * COLUMNS;
  const auto columns = [&](int64_t which) { return std::min(COLUMNS, n - which * COLUMNS); };
  if (a.column == 1 && k == even) {
    // The left matrix is read where it is: each thread copies a block of the right one, and multiplies all rows by it.
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      const std::unique_ptr<BFloat16[]> packed(new BFloat16[block]);
      for (int64_t which = begin; which < end; ++which) {
        pack(b, k, which * COLUMNS, columns(which), packed.get());
        for (int64_t i = 0; i < m; i += ROWS) {
          multiply(std::min(ROWS, m - i), columns(which), k, a.at(i, 0), a.row, packed.get(),
                   c + i * n + which * COLUMNS, n, add);
        }
      }
      at::native::cpublas::brgemm_release();
    });
    return;
  }
  // Both are copied: the right matrix first and whole, the left one in blocks of rows.
  const std::unique_ptr<BFloat16[]> packed(new BFloat16[blocks * block]);
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t which = begin; which < end; ++which) {
      pack(b, k, which * COLUMNS, columns(which), packed.get() + which * block);
    }
  });
  at::parallel_for(0, (m + ROWS - 1) / ROWS, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<BFloat16[]> rows(new BFloat16[ROWS * even]);
    for (int64_t which = begin; which < end; ++which) {
      const int64_t first = which * ROWS, count = std::min(ROWS, m - first);
      pack_left(a, k, first, count, rows.get());
      for (int64_t i = 0; i < blocks; ++i) {
        multiply(count, columns(i), k, rows.get(), even, packed.get() + i * block, c + first * n + i * COLUMNS, n, add);
      }
    }
    at::native::cpublas::brgemm_release();
  });
}

}  // namespace

// c (m, n), contiguous FP32, = or += a (m, k) · b (k, n), both bf16 with strides in elements. m, n, k ≥ 1.
// Returns null, or the message of an error, which this thread's next call overwrites.
extern "C" const char* lockstep_wide_product(const void* a, int64_t a_row, int64_t a_column, const void* b, int64_t b_row,
                                             int64_t b_column, float* c, int64_t m, int64_t n, int64_t k, int add) {
  thread_local std::string message;
  try {
    product({static_cast<const BFloat16*>(a), a_row, a_column}, {static_cast<const BFloat16*>(b), b_row, b_column}, c, m,
            n, k, add);
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}
