// The product of two matrices with an FP32 result on the CPU (wide_product.py), by the block product of oneDNN that torch
// exports: at::native::cpublas::brgemm, which sums in FP32. Operands are bf16 or FP32. The product reads rows of the left
// matrix, and a block of columns of the right one: of FP32 row by row, of bf16 in pairs of rows, [K / 2][COLUMNS][2]
// (VNNI). Only blocks that lie otherwise are copied. packing.h stands before this file.

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include <exception>
#include <memory>
#include <string>

namespace {

// Sizes of a block: rows of the left matrix, columns of the right one, and terms of a sum, of bf16 all. A core's
// second-level cache holds both blocks.
constexpr int64_t ROWS = 128;
template <class T>
constexpr int64_t COLUMNS = IN_PAIRS<T> ? 64 : 128;
template <class T>
constexpr int64_t TERMS = IN_PAIRS<T> ? int64_t{1} << 40 : 512;

template <class T>
struct Matrix {
  const T* data;
  int64_t row, column;  // strides in elements

  const T* at(int64_t i, int64_t j) const { return data + i * row + j * column; }
  Matrix from(int64_t i, int64_t j) const { return {at(i, j), row, column}; }
};

// Copies n columns of k rows to [k / 2][COLUMNS][2]; pads k to an even number with zeros.
void pack(const Matrix<BFloat16>& from, int64_t k, int64_t n, BFloat16* to) {
  constexpr int64_t WIDTH = COLUMNS<BFloat16>;
  auto* words = reinterpret_cast<uint32_t*>(to);
  const int64_t pairs = k / 2;
  if (from.row == 1) transpose_words(from.data, from.column * sizeof(BFloat16), n, pairs, words, WIDTH);
  for (int64_t pair = from.row == 1 ? pairs : 0; pair < (k + 1) / 2; ++pair) {
    const bool both = 2 * pair + 1 < k;
    const BFloat16* upper = from.at(2 * pair, 0);
    const BFloat16* lower = both ? from.at(2 * pair + 1, 0) : nullptr;
    if (from.column == 1) {
      pair_rows(upper, lower, n, words + pair * WIDTH);
      continue;
    }
    BFloat16* line = to + pair * WIDTH * 2;
    for (int64_t j = 0; j < n; ++j) {
      line[2 * j] = upper[j * from.column];
      line[2 * j + 1] = both ? lower[j * from.column] : BFloat16(0.f);
    }
  }
}

// Copies n columns of k rows to [k][COLUMNS].
void pack(const Matrix<float>& from, int64_t k, int64_t n, float* to) {
  constexpr int64_t WIDTH = COLUMNS<float>;
  if (from.row == 1) {
    transpose_words(from.data, from.column * sizeof(float), n, k, reinterpret_cast<uint32_t*>(to), WIDTH);
    return;
  }
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < n; ++j) to[i * WIDTH + j] = *from.at(i, j);
  }
}

// Copies m ≤ ROWS rows of k elements to [m][even k], with a zero after an odd k.
void pack_left(const Matrix<BFloat16>& from, int64_t k, int64_t m, BFloat16* to) {
  const int64_t even = whole<BFloat16>(k);
  if (from.row != 1) {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < k; ++j) to[i * even + j] = *from.at(i, j);
      if (even > k) to[i * even + k] = BFloat16(0.f);
    }
    return;
  }
  // Columns are contiguous: pairs of them, eight at a time, are transposed.
  constexpr int64_t AT_ONCE = 8;
  uint32_t pairs[AT_ONCE * ROWS];
  for (int64_t pair = 0; pair < even / 2; pair += AT_ONCE) {
    const int64_t count = std::min(AT_ONCE, even / 2 - pair);
    for (int64_t p = 0; p < count; ++p) {
      const int64_t j = 2 * (pair + p);
      pair_rows(from.at(0, j), j + 1 < k ? from.at(0, j + 1) : nullptr, m, pairs + p * ROWS);
    }
    transpose_words(pairs, ROWS * sizeof(uint32_t), count, m, reinterpret_cast<uint32_t*>(to) + pair, even / 2);
  }
}

// Copies m rows of k elements to [m][k].
void pack_left(const Matrix<float>& from, int64_t k, int64_t m, float* to) {
  if (from.row == 1) {
    transpose_words(from.data, from.column * sizeof(float), k, m, reinterpret_cast<uint32_t*>(to), k);
    return;
  }
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < k; ++j) to[i * k + j] = *from.at(i, j);
  }
}

// This thread's memory of at least `size` elements. It is kept: new pages for each product would take a few percent of
// its time.
template <class T>
T* own(int64_t size) {
  thread_local std::unique_ptr<T[]> memory;
  thread_local int64_t held = 0;
  if (size > held) {
    memory.reset(new T[size]);
    held = size;
  }
  return memory.get();
}

// Shares outer · inner pieces among the threads. Each calls `work` with an outer index, a range of inner ones, and its own
// memory of `size` elements.
template <class T, class Work>
void share(int64_t outer, int64_t inner, int64_t size, const Work& work) {
  at::parallel_for(0, outer * inner, 1, [&](int64_t begin, int64_t end) {
    T* memory = own<T>(size);
    for (int64_t piece = begin; piece < end;) {
      const int64_t first = piece % inner, last = std::min(inner, first + end - piece);
      work(piece / inner, first, last, memory);
      piece += last - first;
    }
    at::native::cpublas::brgemm_release(IN_PAIRS<T>);
  });
}

template <class T>
void product(const Matrix<T>& a, const Matrix<T>& b, float* c, int64_t m, int64_t n, int64_t k, bool add) {
  constexpr int64_t WIDTH = COLUMNS<T>, DEPTH = TERMS<T>;
  const int64_t columns = (n + WIDTH - 1) / WIDTH, rows = (m + ROWS - 1) / ROWS, deep = whole<T>(std::min(k, DEPTH));
  const bool left_as_is = a.column == 1 && k == whole<T>(k), right_as_is = !IN_PAIRS<T> && b.column == 1;
  // Multiplies a block of rows by a block of columns.
  const auto multiply = [&](int64_t i, int64_t j, int64_t d, const T* left, int64_t left_row, const T* right,
                            int64_t right_row) {
    at::native::cpublas::brgemm(std::min(ROWS, m - i * ROWS), std::min(WIDTH, n - j * WIDTH), whole<T>(std::min(DEPTH, k - d)),
                                left_row, right_row, n, add || d > 0, left, right, c + i * ROWS * n + j * WIDTH,
                                /*is_vnni=*/IN_PAIRS<T>);
  };
  const auto pack_block = [&](int64_t j, int64_t d, T* to) {
    pack(b.from(d, j * WIDTH), std::min(DEPTH, k - d), std::min(WIDTH, n - j * WIDTH), to);
  };
  if (left_as_is) {
    // A thread copies a block of the right matrix, and multiplies its rows of the left one by it.
    share<T>(columns, rows, right_as_is ? 0 : deep * WIDTH, [&](int64_t j, int64_t first, int64_t last, T* memory) {
      for (int64_t d = 0; d < k; d += DEPTH) {
        if (!right_as_is) pack_block(j, d, memory);
        for (int64_t i = first; i < last; ++i) {
          const T* left = a.at(i * ROWS, d);
          if (right_as_is) multiply(i, j, d, left, a.row, b.at(d, j * WIDTH), b.row);
          else multiply(i, j, d, left, a.row, memory, WIDTH);
        }
      }
    });
    return;
  }
  // The left matrix is copied block by block. Each is multiplied by all columns, so the right one is copied whole before.
  const int64_t all = whole<T>(k) * WIDTH;
  const std::unique_ptr<T[]> packed(right_as_is ? nullptr : new T[columns * all]);
  if (packed) {
    at::parallel_for(0, columns, 1, [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) {
        for (int64_t d = 0; d < k; d += DEPTH) pack_block(j, d, packed.get() + j * all + d * WIDTH);
      }
    });
  }
  share<T>(rows, columns, ROWS * deep, [&](int64_t i, int64_t first, int64_t last, T* memory) {
    for (int64_t d = 0; d < k; d += DEPTH) {
      const int64_t count = std::min(DEPTH, k - d);
      pack_left(a.from(i * ROWS, d), count, std::min(ROWS, m - i * ROWS), memory);
      for (int64_t j = first; j < last; ++j) {
        if (right_as_is) multiply(i, j, d, memory, whole<T>(count), b.at(d, j * WIDTH), b.row);
        else multiply(i, j, d, memory, whole<T>(count), packed.get() + j * all + d * WIDTH, WIDTH);
      }
    }
  });
}

template <class T>
const char* guarded(const void* a, int64_t a_row, int64_t a_column, const void* b, int64_t b_row, int64_t b_column, float* c,
                    int64_t m, int64_t n, int64_t k, bool add) {
  thread_local std::string message;
  try {
    product<T>({static_cast<const T*>(a), a_row, a_column}, {static_cast<const T*>(b), b_row, b_column}, c, m, n, k, add);
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace

// c (m, n), contiguous FP32, = or += a (m, k) · b (k, n), both bf16, or with `wide` FP32, with strides in elements.
// m, n, k ≥ 1. Returns null, or the message of an error, which this thread's next call overwrites.
extern "C" const char* lockstep_wide_product(const void* a, int64_t a_row, int64_t a_column, const void* b, int64_t b_row,
                                             int64_t b_column, float* c, int64_t m, int64_t n, int64_t k, int add, int wide) {
  const auto call = wide ? guarded<float> : guarded<BFloat16>;
  return call(a, a_row, a_column, b, b_row, b_column, c, m, n, k, add);
}
