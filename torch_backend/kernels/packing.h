// Layouts of oneDNN's block product, for wide_product.cpp and block_attention.cpp: a right operand in bf16 lies in pairs
// of rows, [K / 2][N][2] (VNNI), one in FP32 row by row. A number in FP32 or a pair in bf16 is one 32-bit word here.
// (torch_backend/kernels/cpp.py joins the files.)

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

using at::BFloat16;

// True if a right operand of type T, BFloat16 or float, lies in pairs of rows.
template <class T>
constexpr bool IN_PAIRS = std::is_same_v<T, BFloat16>;

// The number of n rows in memory: whole pairs if they lie in pairs.
template <class T>
constexpr int64_t whole(int64_t n) {
  return IN_PAIRS<T> ? n + n % 2 : n;
}

#ifdef __AVX2__
// to[j * stride + i] = word j of row i, for 8 rows of 8 words.
inline void transpose_8x8(const char* from, int64_t bytes, uint32_t* to, int64_t stride) {
  __m256i row[8], pair[8], four[8];
  for (int i = 0; i < 8; ++i) row[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * bytes));
  for (int i = 0; i < 8; i += 2) {
    pair[i] = _mm256_unpacklo_epi32(row[i], row[i + 1]);
    pair[i + 1] = _mm256_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    four[i] = _mm256_unpacklo_epi64(pair[i], pair[i + 2]);
    four[i + 1] = _mm256_unpackhi_epi64(pair[i], pair[i + 2]);
    four[i + 2] = _mm256_unpacklo_epi64(pair[i + 1], pair[i + 3]);
    four[i + 3] = _mm256_unpackhi_epi64(pair[i + 1], pair[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    const __m256i low = _mm256_permute2x128_si256(four[j], four[j + 4], 0x20);
    const __m256i high = _mm256_permute2x128_si256(four[j], four[j + 4], 0x31);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + j * stride), low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (j + 4) * stride), high);
  }
}
#endif

// to[j * stride + i] = word j of row i, for `rows` rows of `words` words, which begin `bytes` after each other.
inline void transpose_words(const void* from, int64_t bytes, int64_t rows, int64_t words, uint32_t* to, int64_t stride) {
  const char* start = static_cast<const char*>(from);
  const auto one_by_one = [&](int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    for (int64_t j = j0; j < j1; ++j) {
      for (int64_t i = i0; i < i1; ++i) std::memcpy(to + j * stride + i, start + i * bytes + 4 * j, 4);
    }
  };
#ifdef __AVX2__
  const int64_t whole_rows = rows / 8 * 8, whole_words = words / 8 * 8;
  for (int64_t i = 0; i < whole_rows; i += 8) {
    for (int64_t j = 0; j < whole_words; j += 8) transpose_8x8(start + i * bytes + 4 * j, bytes, to + j * stride + i, stride);
  }
  one_by_one(0, whole_rows, whole_words, words);
  one_by_one(whole_rows, rows, 0, words);
#else
  one_by_one(0, rows, 0, words);
#endif
}

// Pairs the elements of two rows of n; without a lower row, with zeros.
inline void pair_rows(const BFloat16* upper, const BFloat16* lower, int64_t n, uint32_t* to) {
  const auto* high = reinterpret_cast<const uint16_t*>(upper);
  const auto* low = reinterpret_cast<const uint16_t*>(lower);
  if (low == nullptr) {
    for (int64_t j = 0; j < n; ++j) to[j] = high[j];
    return;
  }
  for (int64_t j = 0; j < n; ++j) to[j] = high[j] | static_cast<uint32_t>(low[j]) << 16;
}

}  // namespace

