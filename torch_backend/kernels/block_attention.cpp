// Causal attention of bf16 or FP32 operands on the CPU (block_attention.py), FlashAttention-2 (Dao 2023) by the block
// product of oneDNN that torch exports: at::native::cpublas::brgemm, which sums in FP32. packing.h stands before this
// file.

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include <cmath>
#include <exception>
#include <limits>
#include <memory>
#include <string>

namespace {

// A bf16 number in 32 bits, for a processor whose block product takes FP32 numbers alone.
struct Widened {
  float value;
};

// Operands are of type T: BFloat16, Widened or float. A product's right operand lies in words of 32 bits: one number, or
// a pair of bf16 numbers, of two rows (VNNI).
template <class T>
constexpr int64_t PAIRED = IN_PAIRS<T> ? 2 : 1;
// Forward: a block of ROWS queries beside all its keys, KEYS at a time. Backward: a block of COLUMNS keys beside
// QUERIES at a time. Small blocks compute fewer scores above the diagonal, which take longer in FP32, but cost more
// calls.
template <class T>
constexpr int64_t ROWS = IN_PAIRS<T> ? 128 : 32;
template <class T>
constexpr int64_t COLUMNS = IN_PAIRS<T> ? 64 : 32;
constexpr int64_t KEYS = 512, QUERIES = 256;
// Numbers in a vector of the processor: a compiler takes wider vectors apart, into slow programs.
#ifdef __AVX512F__
constexpr int64_t LANES = 16;
#else
constexpr int64_t LANES = 8;
#endif
// Lengths of rows in memory. Rows that are a power of two apart would share a few lines of the cache.
constexpr int64_t OF_KEYS = KEYS + LANES, OF_QUERIES = QUERIES + LANES;
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

template <class Vector, class From>
Vector load(const From* from) {
  Vector to;
  std::memcpy(&to, from, sizeof(Vector));
  return to;
}

template <class Vector, class To>
void store(To* to, const Vector& from) {
  std::memcpy(to, &from, sizeof(Vector));
}

Floats all(float value) { return Floats{} + value; }

// e^x to 2 ulp for x up to 0 (Cephes' expf); 0 below -87.3, NaN for NaN.
Floats exponential(Floats x) {
  const Floats shift = all(12582912.f);  // 1.5 · 2^23: adding it rounds to a whole number, in the lowest bits
  const Floats low = x < -87.3f ? all(-87.3f) : x;
  const Floats shifted = low * 1.44269504088896341f + shift, whole = shifted - shift;
  const Floats r = low - whole * 0.693359375f - whole * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.f;
  const Ints power = ((Ints)shifted - (Ints)shift) << 23;
  const Floats scaled = (Floats)((Ints)p + power);
  return x < -87.3f ? all(0.f) : (x == x ? scaled : x);
}

// Rounds to bf16, to nearest even, in the upper half of each word.
Words rounded(Floats x) {
  const Words bits = (Words)x;
  const Words up = bits + 0x7fffu + ((bits >> 16) & 1u);
  return x == x ? up : (bits | 0x400000u);
}

void store_rounded(BFloat16* to, Floats x) { store(to, __builtin_convertvector(rounded(x) >> 16, Halves)); }

void store_rounded(Widened* to, Floats x) { store(to, rounded(x) & 0xffff0000u); }

void store_rounded(float* to, Floats x) { store(to, x); }

Floats widened(const BFloat16* from) { return (Floats)(__builtin_convertvector(load<Halves>(from), Words) << 16); }

Floats widened(const float* from) { return load<Floats>(from); }

// Rounds n numbers times a factor to T.
template <class T>
void round_row(const float* from, int64_t n, float factor, T* to) {
  int64_t e = 0;
  for (; e + LANES <= n; e += LANES) store_rounded(to + e, load<Floats>(from + e) * factor);
  for (; e < n; ++e) to[e] = T(from[e] * factor);
}

// The type of T's numbers in tensors.
template <class T>
using Stored = std::conditional_t<std::is_same_v<T, Widened>, BFloat16, T>;

template <class T>
struct Heads {
  const Stored<T>* data;
  int64_t batch, head, row;  // strides in elements; a head's elements are contiguous

  const Stored<T>* at(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// The length in memory of a row of n elements.
int64_t apart(int64_t n) { return padded(n) + LANES; }

template <class T>
struct Block {
  explicit Block(int64_t n) : held(new T[n + LANES]) {}
  T* get() const { return held.get(); }
  std::unique_ptr<T[]> held;
};

// The rows of one head as T: where they are, or widened in memory of their own.
template <class T>
struct Rows {
  Rows(int64_t, int64_t) {}  // the number of rows, and their length

  void read(const T* from, int64_t row, int64_t) {
    data = from;
    stride = row;
  }

  const T* at(int64_t i) const { return data + i * stride; }

  const T* data = nullptr;
  int64_t stride = 0;
};

template <>
struct Rows<Widened> {
  Rows(int64_t n, int64_t width) : stride(width), block(n * width), data(block.get()) {}

  void read(const BFloat16* from, int64_t row, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t e = 0; e < stride; ++e) block.get()[i * stride + e].value = static_cast<float>(from[i * row + e]);
    }
  }

  const Widened* at(int64_t i) const { return data + i * stride; }

  int64_t stride;
  Block<Widened> block;
  const Widened* data;
};

struct Right {
  const void* words;
  int64_t stride;  // words from a row, or a pair of rows, to the next
};

template <class T>
void multiply(int64_t m, int64_t n, int64_t k, const T* a, int64_t row, Right b, float* c, int64_t width, bool add) {
  using Operand = std::conditional_t<IN_PAIRS<T>, BFloat16, float>;
  at::native::cpublas::brgemm(m, n, k, row, b.stride, width, add, reinterpret_cast<const Operand*>(a),
                              static_cast<const Operand*>(b.words), c, IN_PAIRS<T>);
}

// Rows as a right operand: bf16 rows are copied in pairs, with zeros after an odd n; rows of words stay where they are.
template <class T>
struct RightRows {
  RightRows(int64_t, int64_t) {}

  void read(const T* from, int64_t row, int64_t) { first = {from, row}; }

  Right at(int64_t i) const { return {static_cast<const T*>(first.words) + i * first.stride, first.stride}; }

  Right first = {};
};

template <>
struct RightRows<BFloat16> {
  RightRows(int64_t n, int64_t width) : width(width), words((n + 1) / 2 * width) {}

  void read(const BFloat16* from, int64_t row, int64_t n) {
    for (int64_t i = 0; i < n; i += 2) {
      const BFloat16* upper = from + i * row;
      pair_rows(upper, i + 1 < n ? upper + row : nullptr, width, words.get() + i / 2 * width);
    }
  }

  Right at(int64_t i) const { return {words.get() + i / 2 * width, width}; }

  int64_t width;
  Block<uint32_t> words;
};

// A block of FP32 numbers rounded to T: in place, or in memory of its own if T is shorter.
template <class T>
struct Rounded {
  explicit Rounded(int64_t) {}
  T* of(float* from) const { return reinterpret_cast<T*>(from); }
};

template <>
struct Rounded<BFloat16> {
  explicit Rounded(int64_t n) : block(n) {}
  BFloat16* of(float*) const { return block.get(); }
  Block<BFloat16> block;
};

// The transpose of rows [0, n) as a right operand: [width / PAIRED][stride].
template <class T>
void pack_transposed(const T* from, int64_t row, int64_t n, int64_t width, uint32_t* to, int64_t stride) {
  transpose_words(from, row * sizeof(T), n, width / PAIRED<T>, to, stride);
}

// The transpose of rows [0, n) as a left operand: [width][stride], with zeros after an odd n of bf16 rows. words:
// memory for half as many numbers.
void transpose_rows(const BFloat16* from, int64_t row, int64_t n, int64_t width, uint32_t* words, BFloat16* to,
                    int64_t stride) {
  pack_transposed(from, row, n, width, words, stride);
  for (int64_t p = 0; p < width / 2; ++p) {
    auto* upper = reinterpret_cast<uint16_t*>(to + 2 * p * stride);
    uint16_t* lower = upper + stride;
    for (int64_t j = 0; j < n; ++j) {
      upper[j] = static_cast<uint16_t>(words[p * stride + j]);
      lower[j] = static_cast<uint16_t>(words[p * stride + j] >> 16);
    }
    upper[n] = lower[n] = 0;
  }
}

template <class T>
void transpose_rows(const T* from, int64_t row, int64_t n, int64_t width, uint32_t*, T* to, int64_t stride) {
  pack_transposed(from, row, n, width, reinterpret_cast<uint32_t*>(to), stride);
}

struct Shape {
  int64_t batch, heads, of_keys, length, width;
  float scale;

  int64_t group() const { return heads / of_keys; }
};

// One block of queries of one head: out rows, and their logsumexp.
template <class T>
void forward_rows(const Shape& s, const T* q, int64_t row, const uint32_t* keys, const RightRows<T>& values,
                  int64_t first, int64_t m, float* scores, T* weights, float* sums, Stored<T>* out, int64_t out_row,
                  float* lse) {
  const int64_t stride = apart(s.length), E = s.width;
  float top[ROWS<T>], total[ROWS<T>];
  std::fill(top, top + m, LOWEST);
  std::fill(total, total + m, 0.f);
  for (int64_t start = 0; start < first + m; start += KEYS) {
    const int64_t n = std::min(KEYS, first + m - start), wide = padded(n);
    multiply(m, n, E, q, row, {keys + start, stride}, scores, OF_KEYS, false);
    for (int64_t i = 0; i < m; ++i) {
      float* line = scores + i * OF_KEYS;
      const int64_t seen = std::min(n, std::max<int64_t>(0, first + i + 1 - start));
      std::fill(line + seen, line + wide, LOWEST);
      Floats most = all(top[i]);
      for (int64_t j = 0; j < seen; j += LANES) {
        const Floats x = load<Floats>(line + j) * s.scale;
        store(line + j, x);
        most = x > most ? x : most;
      }
      float now = most[0];
      for (int64_t t = 1; t < LANES; ++t) now = std::max(now, most[t]);
      Floats sum = {};
      const Floats least = all(now);
      for (int64_t j = 0; j < wide; j += LANES) {
        const Floats p = exponential(load<Floats>(line + j) - least);
        sum += p;
        store_rounded(weights + i * OF_KEYS + j, p);
      }
      float added = 0.f;
      for (int64_t t = 0; t < LANES; ++t) added += sum[t];
      const float before = start ? std::exp(top[i] - now) : 0.f;
      total[i] = total[i] * before + added;
      top[i] = now;
      for (int64_t e = 0; start && e < E; ++e) sums[i * E + e] *= before;
    }
    multiply(m, E, whole<T>(n), weights, OF_KEYS, values.at(start), sums, E, start > 0);
  }
  for (int64_t i = 0; i < m; ++i) {
    const float inverse = 1.f / total[i];
    round_row(sums + i * E, E, inverse, out + i * out_row);
    lse[i] = top[i] + std::log(total[i]);
  }
}

template <class T>
void forward(const Shape& s, const Heads<T>& q, const Heads<T>& k, const Heads<T>& v, Stored<T>* out, float* lse) {
  const int64_t S = s.length, E = s.width, stride = apart(S), blocks = (S + ROWS<T> - 1) / ROWS<T>;
  const int64_t out_row = s.heads * E;
  at::parallel_for(0, s.batch * s.heads, 1, [&](int64_t begin, int64_t end) {
    Rows<T> of_q(S, E), of_k(S, E), of_v(S, E);
    const Block<uint32_t> keys(E / PAIRED<T> * stride);
    RightRows<T> values(S, E);
    const Block<float> scores(ROWS<T> * OF_KEYS), sums(ROWS<T> * E);
    const Rounded<T> weights(ROWS<T> * OF_KEYS);
    for (int64_t which = begin; which < end; ++which) {
      const int64_t b = which / s.heads, h = which % s.heads, g = h / s.group();
      if (which == begin || h % s.group() == 0) {
        of_k.read(k.at(b, g), k.row, S);
        of_v.read(v.at(b, g), v.row, S);
        pack_transposed(of_k.data, of_k.stride, S, E, keys.get(), stride);
        values.read(of_v.data, of_v.stride, S);
      }
      of_q.read(q.at(b, h), q.row, S);
      for (int64_t i = 0; i < blocks; ++i) {
        const int64_t first = i * ROWS<T>, m = std::min(ROWS<T>, S - first);
        forward_rows(s, of_q.at(first), of_q.stride, keys.get(), values, first, m, scores.get(),
                     weights.of(scores.get()), sums.get(), out + (b * S + first) * out_row + h * E, out_row,
                     lse + which * S + first);
      }
    }
    at::native::cpublas::brgemm_release(IN_PAIRS<T>);
  });
}

// What the backward pass reads of one head's queries.
template <class T>
struct Queries {
  Queries(int64_t S, int64_t E)
      : of_q(S, E), of_grad(S, E), across(E / PAIRED<T> * apart(S)), grad_across(E / PAIRED<T> * apart(S)), rows(S, E),
        grad_rows(S, E), delta(padded(S)), lse(padded(S)), sums(E * apart(S)) {}
  Rows<T> of_q, of_grad;
  Block<uint32_t> across, grad_across;
  RightRows<T> rows, grad_rows;
  Block<float> delta, lse, sums;  // sums: the gradient of q, transposed
};

template <class T>
void prepare(const Shape& s, const Stored<T>* q, int64_t row, const Stored<T>* grad, int64_t grad_row,
             const Stored<T>* out, int64_t out_row, const float* lse, Queries<T>& to) {
  const int64_t S = s.length, E = s.width, stride = apart(S);
  to.of_q.read(q, row, S);
  to.of_grad.read(grad, grad_row, S);
  pack_transposed(to.of_q.data, to.of_q.stride, S, E, to.across.get(), stride);
  pack_transposed(to.of_grad.data, to.of_grad.stride, S, E, to.grad_across.get(), stride);
  to.rows.read(to.of_q.data, to.of_q.stride, S);
  to.grad_rows.read(to.of_grad.data, to.of_grad.stride, S);
  std::memcpy(to.lse.get(), lse, S * sizeof(float));
  for (int64_t i = 0; i < S; ++i) {
    const Stored<T> *g = grad + i * grad_row, *o = out + i * out_row;
    Floats sums = {};
    float sum = 0.f;
    int64_t e = 0;
    for (; e + LANES <= E; e += LANES) sums += widened(g + e) * widened(o + e);
    for (; e < E; ++e) sum += float(g[e]) * float(o[e]);
    for (int64_t t = 0; t < LANES; ++t) sum += sums[t];
    to.delta.get()[i] = sum;
  }
  std::fill(to.sums.get(), to.sums.get() + E * stride, 0.f);
}

// Writes P and dS of a block of keys (rows) by queries (columns), rounded: P to `weights`, dS to `grads`, and in bf16
// dS in pairs of rows to `pairs`. scores: q·k; of_weights: dO·v.
template <class T>
void softmax_backward(const Shape& s, const Queries<T>& of, int64_t key, int64_t n, int64_t query, int64_t m,
                      const float* scores, const float* of_weights, T* weights, T* grads, uint32_t* pairs) {
  const int64_t wide = padded(m);
  Ints lane;
  for (int64_t t = 0; t < LANES; ++t) lane[t] = static_cast<int32_t>(t);
  for (int64_t j = 0; j < whole<T>(n); ++j) {
    for (int64_t i = 0; i < wide; i += LANES) {
      Floats p = {}, d = {};
      if (j < n) {
        const Floats x = load<Floats>(scores + j * OF_QUERIES + i);
        const Ints at = lane + static_cast<int32_t>(query + i);
        const Ints seen = (at >= static_cast<int32_t>(key + j)) & (at < static_cast<int32_t>(query + m));
        p = exponential(x * s.scale - load<Floats>(of.lse.get() + query + i));
        d = p * (load<Floats>(of_weights + j * OF_QUERIES + i) - load<Floats>(of.delta.get() + query + i));
        p = seen ? p : all(0.f);
        d = seen ? d : all(0.f);
        store_rounded(weights + j * OF_QUERIES + i, p);
        store_rounded(grads + j * OF_QUERIES + i, d);
      }
      if constexpr (IN_PAIRS<T>) {
        uint32_t* pair = pairs + j / 2 * OF_QUERIES + i;
        const Words word = rounded(d);
        store(pair, j % 2 ? (load<Words>(pair) | (word & 0xffff0000u)) : word >> 16);
      }
    }
  }
}

template <class T>
void backward_keys(const Shape& s, const Heads<T>& q, const Heads<T>& k, const Heads<T>& v, const Heads<T>& out,
                   const Heads<T>& grad, const float* lse, Stored<T>* grad_q, Stored<T>* grad_k, Stored<T>* grad_v) {
  const int64_t S = s.length, E = s.width, stride = apart(S), group = s.group();
  at::parallel_for(0, s.batch * s.of_keys, 1, [&](int64_t begin, int64_t end) {
    std::unique_ptr<std::unique_ptr<Queries<T>>[]> of(new std::unique_ptr<Queries<T>>[group]);
    for (int64_t g = 0; g < group; ++g) of[g] = std::make_unique<Queries<T>>(S, E);
    Rows<T> of_k(S, E), of_v(S, E);
    const Block<T> across(E * stride);
    const Rounded<T> weights(COLUMNS<T> * OF_QUERIES), grads(COLUMNS<T> * OF_QUERIES);
    const Block<uint32_t> pairs(IN_PAIRS<T> ? COLUMNS<T> / 2 * OF_QUERIES : 0), words(E * stride);
    const Block<float> scores(COLUMNS<T> * OF_QUERIES), of_weights(COLUMNS<T> * OF_QUERIES);
    const Block<float> sum_k(COLUMNS<T> * E), sum_v(COLUMNS<T> * E);
    for (int64_t which = begin; which < end; ++which) {
      const int64_t b = which / s.of_keys, h = which % s.of_keys;
      for (int64_t g = 0; g < group; ++g) {
        const int64_t one = h * group + g;
        prepare<T>(s, q.at(b, one), q.row, grad.at(b, one), grad.row, out.at(b, one), out.row,
                   lse + (b * s.heads + one) * S, *of[g]);
      }
      of_k.read(k.at(b, h), k.row, S);
      of_v.read(v.at(b, h), v.row, S);
      transpose_rows(of_k.data, of_k.stride, S, E, words.get(), across.get(), stride);
      for (int64_t key = 0; key < S; key += COLUMNS<T>) {
        const int64_t n = std::min(COLUMNS<T>, S - key);
        bool add = false;
        for (int64_t g = 0; g < group; ++g) {
          const Queries<T>& one = *of[g];
          for (int64_t query = key; query < S; query += QUERIES) {
            const int64_t m = std::min(QUERIES, S - query);
            multiply(n, m, E, of_k.at(key), of_k.stride, {one.across.get() + query, stride}, scores.get(), OF_QUERIES,
                     false);
            multiply(n, m, E, of_v.at(key), of_v.stride, {one.grad_across.get() + query, stride}, of_weights.get(),
                     OF_QUERIES, false);
            T *p = weights.of(scores.get()), *d = grads.of(of_weights.get());
            softmax_backward(s, one, key, n, query, m, scores.get(), of_weights.get(), p, d, pairs.get());
            const Right of_grads = {IN_PAIRS<T> ? static_cast<const void*>(pairs.get()) : d, OF_QUERIES};
            multiply(n, E, whole<T>(m), p, OF_QUERIES, one.grad_rows.at(query), sum_v.get(), E, add);
            multiply(n, E, whole<T>(m), d, OF_QUERIES, one.rows.at(query), sum_k.get(), E, add);
            multiply(E, m, whole<T>(n), across.get() + key, stride, of_grads, one.sums.get() + query, stride, true);
            add = true;
          }
        }
        for (int64_t j = 0; j < n; ++j) {
          const int64_t to = ((b * S + key + j) * s.of_keys + h) * E;
          round_row(sum_k.get() + j * E, E, s.scale, grad_k + to);
          round_row(sum_v.get() + j * E, E, 1.f, grad_v + to);
        }
      }
      for (int64_t g = 0; g < group; ++g) {
        transpose_words(of[g]->sums.get(), stride * sizeof(float), E, S, words.get(), E);
        const auto* sums = reinterpret_cast<const float*>(words.get());
        for (int64_t i = 0; i < S; ++i) {
          round_row(sums + i * E, E, s.scale, grad_q + ((b * S + i) * s.heads + h * group + g) * E);
        }
      }
    }
    at::native::cpublas::brgemm_release(IN_PAIRS<T>);
  });
}

thread_local std::string message;

template <class Work>
const char* guarded(const Work& work) {
  try {
    work();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

template <class T>
Heads<T> heads(const void* data, const int64_t* strides) {
  return {static_cast<const Stored<T>*>(data), strides[0], strides[1], strides[2]};
}

template <class T>
const char* attention(const void* q, const void* k, const void* v, void* out, float* lse, const int64_t* shape,
                      const int64_t* strides, float scale) {
  return guarded([&] {
    const Shape s = {shape[0], shape[1], shape[2], shape[3], shape[4], scale};
    forward(s, heads<T>(q, strides), heads<T>(k, strides + 3), heads<T>(v, strides + 6),
            static_cast<Stored<T>*>(out), lse);
  });
}

template <class T>
const char* attention_backward(const void* q, const void* k, const void* v, const void* out, const void* grad,
                               const float* lse, void* grad_q, void* grad_k, void* grad_v, const int64_t* shape,
                               const int64_t* strides, float scale) {
  return guarded([&] {
    const Shape s = {shape[0], shape[1], shape[2], shape[3], shape[4], scale};
    backward_keys(s, heads<T>(q, strides), heads<T>(k, strides + 3), heads<T>(v, strides + 6),
                  heads<T>(out, strides + 9), heads<T>(grad, strides + 12), lse, static_cast<Stored<T>*>(grad_q),
                  static_cast<Stored<T>*>(grad_k), static_cast<Stored<T>*>(grad_v));
  });
}

}  // namespace

// Both return null, or the message of an error, which this thread's next call overwrites. format: of the operands, 0 for
// bf16, 1 for FP32, 2 for bf16 that is multiplied in 32
// bits.
extern "C" const char* lockstep_attention(const void* q, const void* k, const void* v, void* out, float* lse,
                                          const int64_t* shape, const int64_t* strides, int format, float scale) {
  const auto call = format == 0 ? attention<BFloat16> : format == 1 ? attention<float> : attention<Widened>;
  return call(q, k, v, out, lse, shape, strides, scale);
}

extern "C" const char* lockstep_attention_backward(const void* q, const void* k, const void* v, const void* out,
                                                   const void* grad, const float* lse, void* grad_q, void* grad_k,
                                                   void* grad_v, const int64_t* shape, const int64_t* strides,
                                                   int format, float scale) {
  const auto call = format == 0   ? attention_backward<BFloat16>
                    : format == 1 ? attention_backward<float>
                                  : attention_backward<Widened>;
  return call(q, k, v, out, grad, lse, grad_q, grad_k, grad_v, shape, strides, scale);
}
